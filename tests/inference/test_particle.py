"""Particles against the Kalman filter and smoother, and against the discrete core on a grid."""

import math

import numpy as np
import pytest
import torch

from lightning_hmm import Sequences, inference
from lightning_hmm.distributions.densities import DiagonalGaussian
from lightning_hmm.inference import Rows, kalman, particle
from lightning_hmm.inference.kalman import LinearGaussian
from lightning_hmm.inference.operators import Dense
from lightning_hmm.inference.particle import Density
from lightning_hmm.random import generator

A = torch.tensor([[0.9, 0.2], [-0.2, 0.9]], dtype=torch.float64)
B = torch.tensor([0.1, -0.1], dtype=torch.float64)
Q = torch.tensor([0.5, 0.7], dtype=torch.float64)  # standard deviations
C = torch.tensor([[1.0, 0.3], [0.0, 1.0]], dtype=torch.float64)
R = torch.tensor([1.0, 1.2], dtype=torch.float64)
M0, P0 = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([1.0, 1.5], dtype=torch.float64)
EXACT = LinearGaussian(
    M0, P0.square().diag(), A, B, Q.square().diag(), C, torch.zeros(2, dtype=torch.float64), R.square().diag()
)


class Linear:
    """The same model for particles."""

    def __init__(self, sequences: Sequences, noise: torch.Tensor = R) -> None:
        self.values, self.noise = sequences.padded(), noise

    def initial(self, num_particles: int) -> Density:
        return DiagonalGaussian(M0.expand(len(self.values), num_particles, 2), P0)

    def transition(self, t: int, states: torch.Tensor) -> Density:
        return DiagonalGaussian(states @ A.T + B, Q)

    def log_obs(self, t: int, states: torch.Tensor) -> torch.Tensor:
        values = self.values[:, t].unsqueeze(1)
        logs = -0.5 * ((values - states @ C.T) / self.noise).square() - self.noise.log() - 0.5 * math.log(2 * math.pi)
        return torch.where(values.isnan(), 0.0, logs).sum(2)


def draw_sequences(rng: np.random.Generator, lengths: list[int], missing: float = 0.1) -> Sequences:
    parts = []
    for length in lengths:
        state = M0.numpy() + P0.numpy() * rng.normal(size=2)
        rows = []
        for _ in range(length):
            rows.append(C.numpy() @ state + R.numpy() * rng.normal(size=2))
            state = A.numpy() @ state + B.numpy() + Q.numpy() * rng.normal(size=2)
        rows = np.array(rows).reshape(-1, 2)
        rows[rng.random(len(rows)) < missing] = np.nan
        parts.append(np.where(rng.random(rows.shape) < missing / 2, np.nan, rows))
    return Sequences.from_lengths(np.concatenate(parts), lengths)


def optimal(model: Linear):
    """p(x_t | x_{t-1}, y_t), the optimal guide, whose entries are independent if the emission is diagonal."""

    def propose(t, states, transition):
        values = model.values[:, t].unsqueeze(1)
        prior, noise = transition.scale.square(), model.noise.square()
        gain = prior / (prior + noise)
        gain = torch.where(values.isnan(), 0.0, gain)
        mean = transition.mean + gain * (values.nan_to_num() - transition.mean)
        return DiagonalGaussian(mean, ((1 - gain) * prior).sqrt())

    return propose


def steps_of(sequences: Sequences, padded: torch.Tensor) -> torch.Tensor:
    """(T, B, ...) -> (steps, ...)."""
    return sequences.packed(padded.transpose(0, 1))


LENGTHS = [6, 1, 12, 0, 4]
RUNS = 25
WAYS = {
    "systematic": {},
    "stratified": {"resampling": "stratified"},
    "multinomial": {"resampling": "multinomial"},
    "always": {"threshold": 1.0},
    "never": {"threshold": 0.0},
    "guided": {"guided": True},
    "auxiliary": {"look": True},
    "both": {"guided": True, "look": True},
}


def run(
    model: Linear,
    lengths: torch.Tensor,
    num_particles: int,
    seed: int,
    *,
    guided: bool = False,
    look: bool = False,
    **words,
) -> particle.Particles:
    proposal = optimal(model) if guided else None
    ahead = particle.auxiliary(model) if look else None
    return particle.filter(
        model, lengths, num_particles, generator(seed, "test"), proposal=proposal, look_ahead=ahead, **words
    )


def repeated(sequences: Sequences) -> Sequences:
    """Each sequence `RUNS` times: as many independent runs, side by side."""
    return sequences[[n for n in range(len(sequences)) for _ in range(RUNS)]]


def assert_moments(
    cloud: particle.WeightedParticles, sequences: Sequences, mean: torch.Tensor, cov: torch.Tensor, slack: float = 0.03
) -> None:
    """Mean and variance over repeated runs are exact up to their standard errors and a bias of order 1 / N."""
    shape = (len(cloud.states), len(sequences), RUNS)
    weights = cloud.log_weights.expand(cloud.states.shape[:-1]).exp().reshape(*shape, -1, 1)
    centre, variance = (
        sequences.with_values(x).padded().transpose(0, 1) for x in (mean, cov.diagonal(dim1=1, dim2=2))
    )  # (T, sequences, d)
    away = cloud.states.reshape(*shape, -1, 2) - centre[:, :, None, None]
    inside = ~centre.isnan()
    for power, exact in ((1, torch.zeros_like(variance)), (2, variance)):
        found = (weights * away**power).sum(3)
        error, spread = (found.mean(2) - exact)[inside], found.std(2)[inside] / math.sqrt(RUNS)
        assert bool((error.abs() < 5 * spread + slack).all()), (power, error.abs().max())


@pytest.fixture
def diagonal(monkeypatch) -> None:
    """An emission of each entry by itself, for which the guide above is exact."""
    monkeypatch.setitem(globals(), "C", torch.eye(2, dtype=torch.float64))
    monkeypatch.setitem(globals(), "EXACT", EXACT._replace(emission=torch.eye(2, dtype=torch.float64)))


class TestFilter:
    @pytest.mark.parametrize("way", [way for way in WAYS if way != "never"])
    def test_moments_and_likelihood_are_those_of_kalman(self, rng, way, diagonal):
        sequences = draw_sequences(rng, LENGTHS)
        many = repeated(sequences)
        exact = kalman.posterior(EXACT, sequences)
        found = run(Linear(many), many.lengths, 500, 0, **WAYS[way])
        assert_moments(found.filtered, sequences, exact.filtered_mean, exact.filtered_cov)
        estimates = found.log_likelihood.view(-1, RUNS)
        # The logarithm of an unbiased estimate is too low by half its variance.
        error = estimates.mean(1) + estimates.var(1) / 2 - exact.log_likelihood
        assert bool((error.abs() < 5 * estimates.std(1) / math.sqrt(RUNS) + 0.02).all())
        assert bool((estimates[3] == 0).all())  # of length 0
        sums = found.log_weights.logsumexp(2)
        torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("way", list(WAYS))
    def test_likelihood_estimates_are_unbiased(self, rng, way, diagonal):
        """The mean of p-hat / p over thousands of runs with 30 particles is 1 within its standard error.

        Algorithm 1 of the paper fails this test.
        """
        one = draw_sequences(rng, [6])
        runs = 4000
        many = one[[0] * runs]
        found = run(Linear(many), many.lengths, 30, 1, **WAYS[way])
        ratio = (found.log_likelihood - kalman.log_likelihood(EXACT, one)).exp()
        error = float(ratio.std()) / math.sqrt(runs)
        assert abs(float(ratio.mean()) - 1) < 4 * error
        assert error < 0.3

    def test_likelihood_is_right_to_half_a_percent(self, rng):
        sequences = draw_sequences(rng, [100] * 40, missing=0.0)
        exact = kalman.log_likelihood(EXACT, sequences)
        found = run(Linear(sequences), sequences.lengths, 1000, 2).log_likelihood
        relative = (found - exact) / exact
        assert float(relative.square().mean().sqrt()) < 0.005  # of one run; the worst of these forty may be above
        assert float(relative.abs().max()) < 0.02

    def test_errors_fall_as_the_root_of_particles(self, rng):
        sequences = draw_sequences(rng, [20] * 150, missing=0.0)
        exact = kalman.log_likelihood(EXACT, sequences)
        found = [
            run(Linear(sequences), sequences.lengths, num_particles, 2).log_likelihood for num_particles in (100, 1600)
        ]
        more, less = (float((estimate - exact).abs().median()) for estimate in found)
        assert 2.5 < more / less < 6.5  # 4 for sixteen times the particles

    def test_a_guide_and_looking_ahead_help(self, rng, diagonal):
        sequences = draw_sequences(rng, [20] * 60, missing=0.0)
        narrow = 0.1 * R
        exact = kalman.log_likelihood(EXACT._replace(emission_cov=narrow.square().diag()), sequences)
        model = Linear(sequences, narrow)
        errors = [
            float((run(model, sequences.lengths, 200, 3, **words).log_likelihood - exact).abs().mean())
            for words in ({}, WAYS["guided"])
        ]
        assert errors[1] < errors[0] / 5

    def test_ancestors_lead_to_the_parents(self, rng):
        """If the state hardly moves, each state of a path must be close to its ancestor."""
        sequences = draw_sequences(rng, [9, 4])

        class Still(Linear):
            def transition(self, t, states):
                return DiagonalGaussian(states, torch.tensor(1e-6, dtype=torch.float64))

        found = run(Still(sequences), sequences.lengths, 50, 0, threshold=1.0)
        for t in range(1, 9):
            parents = found.states[t - 1].gather(1, found.ancestors[t].unsqueeze(2).expand(-1, -1, 2))
            torch.testing.assert_close(found.states[t], parents, rtol=0, atol=1e-5)
        assert bool((found.ancestors[4:, 1] == torch.arange(50)).all())  # nothing is resampled past the end
        paths = particle.genealogy(found)
        torch.testing.assert_close(paths.states, paths.states[-1:].expand_as(paths.states), rtol=0, atol=1e-4)

    def test_what_a_model_says_past_the_end_does_not_count(self, rng):
        sequences = draw_sequences(rng, [9, 4])

        class Babbling(Linear):
            def log_obs(self, t, states):
                logs = super().log_obs(t, states)
                return torch.where(
                    (t < sequences.lengths).unsqueeze(1), logs, 100 * states[..., 0] if t % 2 else torch.nan
                )

        plain, babbling = (run(kind(sequences), sequences.lengths, 50, 0, look=True) for kind in (Linear, Babbling))
        for first, second in (
            (plain.states, babbling.states),
            (plain.log_weights, babbling.log_weights),
            (plain.log_increments, babbling.log_increments),
        ):
            assert torch.equal(first, second)
        assert bool((plain.log_increments[4:, 1] == 0).all())

    def test_same_generator_same_particles(self, rng):
        sequences = draw_sequences(rng, [5, 8])
        first, again, other = (run(Linear(sequences), sequences.lengths, 30, seed) for seed in (0, 0, 1))
        assert torch.equal(first.states, again.states)
        assert not torch.equal(first.states, other.states)

    def test_single_precision(self, rng):
        sequences = draw_sequences(rng, LENGTHS)

        class Single(Linear):
            def __init__(self, sequences):
                super().__init__(sequences)
                self.values, self.noise = self.values.float(), self.noise.float()

            def initial(self, num_particles):
                return DiagonalGaussian(M0.float().expand(len(self.values), num_particles, 2), P0.float())

            def transition(self, t, states):
                return DiagonalGaussian(states @ A.T.float() + B.float(), Q.float())

            def log_obs(self, t, states):
                logs = (
                    -0.5 * ((self.values[:, t].unsqueeze(1) - states @ C.T.float()) / self.noise).square()
                    - self.noise.log()
                    - 0.5 * math.log(2 * math.pi)
                )
                return torch.where(self.values[:, t].unsqueeze(1).isnan(), 0.0, logs).sum(2)

        found = run(Single(sequences), sequences.lengths, 5000, 0)
        assert found.states.dtype == found.log_weights.dtype == torch.float32
        torch.testing.assert_close(
            found.log_likelihood.double(), kalman.log_likelihood(EXACT, sequences), rtol=0, atol=0.3
        )
        assert bool(particle.backward_simulation(found, 4, generator(0)).states.isfinite().all())

    def test_no_sequences_and_no_steps(self):
        for lengths in ([], [0, 0]):
            sequences = Sequences.from_lengths(np.zeros((0, 2)), lengths)
            found = run(Linear(sequences), sequences.lengths, 7, 0)
            assert found.log_likelihood.tolist() == [0.0] * len(lengths)
            for cloud in (
                particle.genealogy(found),
                particle.fixed_lag(found, 2),
                particle.backward_simulation(found, 7, generator(0)),
            ):
                assert cloud.states.shape == (0, len(lengths), 7, 2)


class TestSmoothing:
    def test_paths_are_those_of_the_smoother(self, rng):
        sequences = draw_sequences(rng, LENGTHS)
        many = repeated(sequences)
        exact = kalman.posterior(EXACT, sequences)
        found = run(Linear(many), many.lengths, 500, 0)
        paths = particle.backward_simulation(found, 16, generator(1, "test"))
        assert paths.states.shape == (12, 5 * RUNS, 16, 2)
        for cloud in (paths, particle.genealogy(found), particle.genealogy(found, 16, generator(2, "test"))):
            assert_moments(cloud, sequences, exact.mean, exact.cov)
        # Whole paths, not only their points: neighbours vary together as they should.
        centre = sequences.with_values(exact.mean).padded().transpose(0, 1).unsqueeze(2)
        away = paths.states.reshape(12, 5, RUNS * 16, 2) - centre
        cross = (away[1:].unsqueeze(-1) * away[:-1].unsqueeze(-2)).mean(2)
        cross = steps_of(sequences, torch.cat([torch.zeros_like(cross[:1]), cross]))
        torch.testing.assert_close(cross, exact.cross_cov, rtol=0, atol=0.12)
        with pytest.raises(ValueError, match="`generator` must be given to draw `num_paths` paths"):
            particle.genealogy(found, 3)

    def test_fixed_lag(self, rng):
        """A lag of 0 is the filter, a lag of all steps the genealogy, and a lag of 2 the fixed-lag smoother."""
        sequences = draw_sequences(rng, LENGTHS)
        many = repeated(sequences)
        found = run(Linear(many), many.lengths, 500, 0)
        assert torch.equal(particle.fixed_lag(found, 0).states, found.states)
        whole, paths = particle.fixed_lag(found, 100), particle.genealogy(found)
        torch.testing.assert_close(steps_of(many, whole.mean), steps_of(many, paths.mean))
        later = [
            kalman.posterior(EXACT, Sequences.from_list([values[: t + 3]]))
            for values in sequences
            for t in range(len(values))
        ]
        steps = [t for values in sequences for t in range(len(values))]
        known = [
            torch.stack([getattr(x, field)[t] for x, t in zip(later, steps, strict=True)]) for field in ("mean", "cov")
        ]
        assert_moments(particle.fixed_lag(found, 2), sequences, *known)
        with pytest.raises(ValueError, match="`lag` must not be negative, but is -1 instead"):
            particle.fixed_lag(found, -1)

    def test_prediction(self, rng):
        sequences = draw_sequences(rng, LENGTHS)
        many = repeated(sequences)
        exact = kalman.posterior(EXACT, sequences)
        model = Linear(many)
        found = run(model, many.lengths, 500, 0)
        mean, cov = exact.filtered_mean, exact.filtered_cov
        for steps in (1, 2, 3):
            mean, cov = mean @ A.T + B, A @ cov @ A.T + Q.square().diag()
            cloud = particle.predict(model, found, steps, generator(steps, "test"))
            assert_moments(cloud, sequences, mean, cov)
        one = particle.predict(model, found, 3, generator(3, "test"), after=4)
        assert one.states.shape == (5 * RUNS, 500, 2)
        torch.testing.assert_close(one.mean.view(5, RUNS, 2).mean(1)[0], mean[4], rtol=0, atol=0.1)


class Grid:
    """Any discrete HMM is a state-space model: the state is the number of a cell. Densities are over cells."""

    class Cells(Density):
        def __init__(self, log_probs: torch.Tensor) -> None:
            self.log_probs = log_probs  # (B, N, K)

        @property
        def mean(self) -> torch.Tensor:
            return (self.log_probs.exp() * torch.arange(self.log_probs.shape[2])).sum(2, keepdim=True)

        def sample(self, generator):
            return (
                torch.multinomial(self.log_probs.exp().flatten(0, 1), 1, generator=generator)
                .view(*self.log_probs.shape[:2], 1)
                .double()
            )

        def log_prob(self, states):
            return self.log_probs.gather(2, states.long()).squeeze(2)

        def log_prob_of_each(self, states):
            return self.log_probs.gather(
                2, states.long().squeeze(2).unsqueeze(1).expand(-1, self.log_probs.shape[1], -1)
            ).mT

        def pick(self, particles):
            return Grid.Cells(self.log_probs.gather(1, particles.unsqueeze(2).expand(-1, -1, self.log_probs.shape[2])))

    def __init__(self, initial, transition, evidence):
        self.log_initial, self.log_transition, self.evidence = initial, transition, evidence  # evidence (B, T, K)

    def initial(self, num_particles):
        return Grid.Cells(self.log_initial.expand(len(self.evidence), num_particles, -1))

    def transition(self, t, states):
        return Grid.Cells(self.log_transition[states.long().squeeze(2)])

    def log_obs(self, t, states):
        return self.evidence[:, t].gather(1, states.long().squeeze(2))


def test_against_the_discrete_core_on_a_grid(rng):
    """A walk on a line of cells that is pulled to two places (nothing Gaussian about it), with exact posteriors."""
    cells = torch.linspace(-4, 4, 33, dtype=torch.float64)
    pulled = cells + 0.5 * torch.sin(2 * cells)
    transition = (-0.5 * ((cells - pulled.unsqueeze(1)) / 0.8).square()).log_softmax(1)
    initial = (-0.5 * cells.square()).log_softmax(0)
    lengths = torch.tensor([15, 6])
    values = torch.from_numpy(np.abs(rng.normal(size=(21, 1))) * 1.5)
    evidence = -0.5 * ((values - cells.abs()) / 0.8).square()  # only the distance from the middle is seen
    evidence[4] = 0.0  # missing
    sequences = Sequences.from_lengths(evidence, lengths)
    exact = inference.posterior(initial, Dense(transition), Rows(evidence), sequences.offsets)
    many = repeated(sequences)
    found = particle.filter(
        Grid(initial, transition, many.padded().nan_to_num()), many.lengths, 600, generator(0, "test")
    )
    ratio = (found.log_likelihood.view(2, RUNS) - exact.log_likelihood.unsqueeze(1)).exp()
    assert bool(((ratio.mean(1) - 1).abs() < 4 * ratio.std(1) / math.sqrt(RUNS)).all())

    def assert_shares(cloud: particle.WeightedParticles, posterior: torch.Tensor) -> None:
        weights = cloud.log_weights.expand(cloud.states.shape[:3]).exp()
        shares = torch.zeros(15, 2 * RUNS, 33, dtype=torch.float64).scatter_add(
            2, cloud.states.long().squeeze(3), weights
        )
        shares = shares.view(15, 2, RUNS, 33)
        error, spread = (steps_of(sequences, x) for x in (shares.mean(2), shares.std(2) / math.sqrt(RUNS)))
        error = (error - posterior).abs()
        assert bool((error < 5 * spread + 0.015).all()), error.max()  # and a bias of order 1 / N
        assert float(spread.max()) < 0.03

    assert_shares(found.filtered, exact.filtered)
    assert_shares(particle.backward_simulation(found, 50, generator(1, "test")), exact.smoothed)


class TestResampling:
    @pytest.mark.parametrize("method", ["systematic", "stratified", "multinomial"])
    def test_draws_are_in_proportion(self, method):
        weights = torch.tensor([[0.0, 0.5, 0.25, 0.0, 0.2, 0.05, 0.0]], dtype=torch.float64).expand(4000, -1)
        drawn = particle.resample(weights.log(), 10, generator(0, method), method)
        counts = torch.zeros(4000, 7, dtype=torch.float64).scatter_add(
            1, drawn, torch.ones(4000, 10, dtype=torch.float64)
        )
        torch.testing.assert_close(counts.mean(0), 10 * weights[0], rtol=0, atol=0.12)
        assert not bool(counts[:, [0, 3, 6]].any())
        if method == "systematic":
            assert bool(((counts - 10 * weights).abs() < 1).all())
        spread = {"systematic": 0.3, "stratified": 0.6, "multinomial": 2.0}[method]
        assert float(counts.var(0).max()) == pytest.approx(10 * 0.25 if method == "multinomial" else spread, abs=0.3)

    def test_never_a_particle_without_weight(self):
        """Uniform numbers next to 0 and 1, where rounding would lead outside."""
        for dtype in (torch.float32, torch.float64):
            weights = torch.tensor([[0.0, 1.0, 1e-30, 0.0]], dtype=dtype)
            uniform = torch.tensor([[0.0, 0.5, 1 - torch.finfo(dtype).eps / 2, 1.0]], dtype=dtype)
            assert particle._invert(weights, uniform).tolist() == [[1, 1, 1, 1]]


def test_density_of_each_pair(rng):
    mean, scale = (
        torch.from_numpy(rng.normal(size=(3, 5, 2)) + 1e4),
        torch.from_numpy(rng.uniform(0.5, 2, size=(3, 5, 2))),
    )
    states = torch.from_numpy(rng.normal(size=(3, 4, 2)) + 1e4)
    for spread in (scale, scale[:, :1], scale[0, 0], scale[0, 0, 0]):
        density = DiagonalGaussian(mean, spread)
        expected = (
            torch.distributions.Normal(mean.unsqueeze(1), spread.expand(3, 5, 2).unsqueeze(1))
            .log_prob(states.unsqueeze(2))
            .sum(3)
        )
        torch.testing.assert_close(density.log_prob_of_each(states), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            density.log_prob(states[:, [0, 1, 2, 3, 0]]),
            expected[:, [0, 1, 2, 3, 0], torch.arange(5)],
            rtol=1e-9,
            atol=1e-9,
        )
        chosen = torch.tensor([[4, 0, 0], [1, 2, 3], [2, 2, 2]])
        torch.testing.assert_close(
            density.pick(chosen).log_prob(mean[:, :3]),
            density.log_prob_of_each(mean[:, :3])[torch.arange(3)[:, None], torch.arange(3), chosen],
        )


class TestBadInput:
    def test_weights_that_vanish(self, rng):
        sequences = draw_sequences(rng, [5, 6], missing=0.0)

        class Blind(Linear):
            def log_obs(self, t, states):
                logs = super().log_obs(t, states)
                if t == 4:
                    logs[1] = -torch.inf
                return logs

        with pytest.raises(
            ValueError,
            match=r"the weights of all 20 vanish at step 4 of sequence 1. Use more particles, or a wider emission",
        ):
            run(Blind(sequences), sequences.lengths, 20, 0)
        far = sequences.with_values(sequences.values.clone())
        far.values[2] = 1e200
        with pytest.raises(ValueError, match="vanish at step 2 of sequence 0"):
            run(Linear(far), far.lengths, 20, 0)

    def test_some_weights_that_vanish_do_no_harm(self, rng):
        sequences = draw_sequences(rng, [5, 6], missing=0.0)

        class Halved(Linear):
            def log_obs(self, t, states):
                return super().log_obs(t, states).where(states[..., 0] > 0, -torch.inf)

        for look in (False, True):
            found = run(Halved(sequences), sequences.lengths, 500, 0, look=look)
            paths = particle.backward_simulation(found, 8, generator(0))
            for n, length in enumerate([5, 6]):
                assert bool((paths.states[:length, n, :, 0] > 0).all())
            assert bool(found.log_likelihood.isfinite().all())

    def test_undefined_evidence(self, rng):
        sequences = draw_sequences(rng, [5, 6], missing=0.0)
        model = Linear(sequences, R * float("nan"))
        with pytest.raises(
            ValueError, match="`log_obs` must be numbers below infinity, but is not at step 0 of sequence 0"
        ):
            run(model, sequences.lengths, 20, 0)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ({"num_particles": 0}, "`num_particles` must be positive, but is 0 instead"),
            (
                {"resampling": "residual"},
                "`resampling` must be one of systematic, stratified, multinomial, but is 'residual' instead",
            ),
            ({"threshold": 2.0}, "`threshold` must be from 0 to 1, but is 2.0 instead"),
            (
                {"lengths": torch.tensor([3])},
                r"`initial` must give \(1, 5\) densities, sequences by particles, but gives \(2, 5\) instead",
            ),
        ],
    )
    def test_wrong_words(self, rng, words, message):
        sequences = draw_sequences(rng, [5, 6])
        with pytest.raises(ValueError, match=message):
            particle.filter(
                Linear(sequences),
                **{"lengths": sequences.lengths, "num_particles": 5, "generator": generator(0), **words},
            )
