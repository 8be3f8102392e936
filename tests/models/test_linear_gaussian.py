"""EM of linear-Gaussian models: it never falls, its M-step is a maximum, missing values and batches do not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_hmm import BaumWelch, Sequences, fit
from lightning_hmm.inference import kalman
from lightning_hmm.models import LinearGaussianHMM
from tests.helpers import assert_same_parameters, random_vectors


@pytest.mark.parametrize("sums", [False, True], ids=["positions", "increments"])
def test_the_m_step_is_a_maximum(rng, sums):
    """The gradient of the expected log-density; at the old values, it is that of the likelihood (Fisher's identity)."""
    data = random_vectors(rng, num_sequences=5, longest=8, missing=0.2)
    whole = LinearGaussianHMM(2, 2)
    model = kalman.LinearGaussian(*(value.clone() for value in whole.parameters_in_units))
    first = torch.tensor([2.0, 0.5], dtype=torch.float64) if sums else None
    statistics = kalman.expected_statistics(model, data, torch.ones(5, dtype=torch.float64), first)
    whole.initial.maximize([statistics.starts[-1], statistics.starts[:-1, :-1]])
    whole.transition.maximize([statistics.across, statistics.before, statistics.after])
    whole.emission.maximize([statistics.products, statistics.emitters, statistics.squares])
    better = whole.parameters_in_units

    def expected(parameters: kalman.LinearGaussian) -> torch.Tensor:
        """E[log p(x, y)] from the statistics, as a sum of Gaussian log-densities."""
        joint = torch.cat([parameters.transition, parameters.transition_offset.unsqueeze(1)], 1)
        moved = (
            statistics.after
            - joint @ statistics.across.T
            - statistics.across @ joint.T
            + joint @ statistics.before @ joint.T
        )
        emit = torch.cat([parameters.emission, parameters.emission_offset.unsqueeze(1)], 1)
        error = (
            statistics.squares
            - 2 * (emit * statistics.products).sum(1)
            + torch.einsum("di,dij,dj->d", emit, statistics.emitters, emit)
        )
        start = torch.cat([torch.eye(2).double(), -parameters.initial_mean.unsqueeze(1)], 1)
        begun = start @ statistics.starts @ start.T
        total = -0.5 * (
            torch.trace(torch.linalg.solve(parameters.transition_cov, moved))
            + statistics.before[-1, -1] * parameters.transition_cov.logdet()
        )
        total = total - 0.5 * (
            torch.trace(torch.linalg.solve(parameters.initial_cov, begun))
            + statistics.starts[-1, -1] * parameters.initial_cov.logdet()
        )
        variance = parameters.emission_cov.diagonal()
        return total - 0.5 * (error / variance + statistics.emitters[:, -1, -1] * variance.log()).sum()

    def gradients(at: kalman.LinearGaussian, of) -> list[torch.Tensor]:
        free = kalman.LinearGaussian(*(value.clone().requires_grad_() for value in at))
        found = list(torch.autograd.grad(of(free), list(free)))
        found[-1] = found[-1].diagonal()  # the noise of features is independent
        return found

    exact = gradients(
        model, lambda free: kalman.log_likelihood(kalman.cumulative_sum(free, first) if sums else free, data).sum()
    )
    for name, mine, fisher in zip(model._fields, gradients(model, expected), exact, strict=True):
        torch.testing.assert_close(
            (mine + mine.mT) / 2 if name.startswith(("initial_cov", "transition_cov")) else mine,
            (fisher + fisher.mT) / 2 if name.startswith(("initial_cov", "transition_cov")) else fisher,
            rtol=1e-7,
            atol=1e-8,
        )
    for gradient in gradients(better, expected):
        assert float(gradient.abs().max()) < 1e-8


def log_likelihood_of_potentials(naturals: list[list[torch.Tensor]], sequence: torch.Tensor) -> torch.Tensor:
    """log p(y) as one Gaussian integral over all states, R^(T d), of exp(natural parameters times statistics)."""
    (start, start_square), (across, before, after), (products, states, squares) = naturals
    size, steps = len(start) - 1, len(sequence)
    quadratic = torch.zeros(steps * size, steps * size, dtype=torch.float64)
    linear, constant = torch.zeros(steps * size, dtype=torch.float64), start[-1]

    def at(t: int) -> torch.Tensor:
        """(T d, d) which entries of all states are those of step t."""
        return torch.eye(steps * size, dtype=torch.float64)[:, t * size : (t + 1) * size]

    def add_square(t: int, matrix: torch.Tensor) -> None:
        """z_t' matrix z_t."""
        nonlocal quadratic, linear, constant
        quadratic = quadratic + at(t) @ matrix[:-1, :-1] @ at(t).T
        linear = linear + at(t) @ (matrix[:-1, -1] + matrix[-1, :-1])
        constant = constant + matrix[-1, -1]

    quadratic, linear = quadratic + at(0) @ start_square @ at(0).T, linear + at(0) @ start[:-1]
    for t in range(1, steps):
        add_square(t - 1, before)
        quadratic = quadratic + at(t) @ after @ at(t).T + at(t) @ across[:, :-1] @ at(t - 1).T
        linear = linear + at(t) @ across[:, -1]
    for t, row in enumerate(sequence):
        for feature, value in enumerate(row):
            if not bool(value.isnan()):
                add_square(t, states[feature])
                linear, constant = (
                    linear + value * at(t) @ products[feature, :-1],
                    constant + value * products[feature, -1] + value**2 * squares[feature],
                )
    precision = -(quadratic + quadratic.T)
    return (
        constant
        + (linear @ torch.linalg.solve(precision, linear) + len(linear) * math.log(2 * math.pi) - precision.logdet())
        / 2
    )


def test_the_statistics_are_gradients_in_natural_parameters(rng):
    """Each entry of the natural parameters is treated as free."""
    model, data = LinearGaussianHMM(2, 2), random_vectors(rng, num_sequences=4, longest=5, missing=0.2)
    fit(model, data, 2, 0)
    naturals = [[value.requires_grad_() for value in part.natural_form()] for part in model.distributions.values()]
    flat = [value for part in naturals for value in part]
    in_units = model._in_units(data)
    totals = torch.stack([log_likelihood_of_potentials(naturals, sequence) for sequence in in_units])
    torch.testing.assert_close(totals.detach(), kalman.log_likelihood(model.parameters_in_units, in_units))
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    statistics = [value for part in model.statistics(data, weights).values() for value in part]
    for gradient, expected in zip(torch.autograd.grad(totals @ weights, flat), statistics, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("target", ["positions", "increments"])
def test_the_objective_never_falls_with_priors(rng, target):
    data = random_vectors(rng, longest=12, missing=0.15)
    model = LinearGaussianHMM(3, 2, target)
    model.initialize(data)
    for name, strength in (("initial", 0.5), ("transition", 2.0), ("emission", 5.0)):
        model.distributions[name].prior["variance_prior"] = strength
    optimizer, weights, objectives = BaumWelch(model.distributions), torch.ones(len(data), dtype=torch.float64), []
    for _ in range(12):
        objectives.append(float(model.score(data).sum() + optimizer.log_prior()))
        optimizer.step(counts=model.statistics(data, weights))
    assert np.diff(objectives).min() > -1e-9
    assert objectives[-1] > objectives[0] + 1
    plain = fit(LinearGaussianHMM(3, 2, target), data, 12, 0)
    assert bool((model.emission.variance > plain.emission.variance).all())


def test_the_prior_is_that_of_its_density(rng):
    """The M-step with a prior maximizes expected log-density plus log prior, by finite differences of one variance."""
    data = random_vectors(rng, longest=8)
    model = LinearGaussianHMM(2, 2, variance_prior=3.0)
    model.initialize(data)
    products, states, squares = model.statistics(data, torch.ones(len(data), dtype=torch.float64))["emission"]
    model.emission.maximize([products, states, squares])

    def objective(change: float) -> float:
        joint, variance = (
            torch.cat([model.emission.matrix, model.emission.offset.unsqueeze(1)], 1).detach(),
            model.emission.variance.detach().clone(),
        )
        variance[1] += change
        error = squares - 2 * (joint * products).sum(1) + torch.einsum("di,dij,dj->d", joint, states, joint)
        model.emission.variance.data, kept = variance, model.emission.variance.data
        prior = float(model.emission.log_prior())
        model.emission.variance.data = kept
        return float(-0.5 * (error / variance + states[:, -1, -1] * variance.log()).sum()) + prior

    assert abs(objective(1e-5) - objective(-1e-5)) / 2e-5 < 1e-3
    assert objective(0.0) > max(objective(1e-2), objective(-1e-2))


def test_online_em_is_the_discounted_sum(rng):
    """Online EM against explicit sums. With all data in each batch and no discount, it equals batch EM."""
    data = random_vectors(rng, longest=8)
    online = fit(LinearGaussianHMM(2, 2, discount=0.7, variance_prior=0.4), data, 1, 0, batch_size=6)
    by_hand = LinearGaussianHMM(2, 2, variance_prior=0.4)
    by_hand.initialize(data)
    sums: dict[str, list[torch.Tensor]] = {}
    size, updates = 0.0, 0
    for first in range(0, len(data), 6):
        batch, updates = data[first : min(first + 6, len(data))], updates + 1
        found = by_hand.statistics(batch, torch.ones(len(batch), dtype=torch.float64))
        sums = {
            name: [0.7 * (sums[name][i] if sums else 0) + 0.3 * value for i, value in enumerate(values)]
            for name, values in found.items()
        }
        size = 0.7 * size + 0.3 * len(batch)
        correction = 1 - 0.7**updates
        for name, part in by_hand.distributions.items():
            part.maximize([value / correction for value in sums[name]], size / correction / len(data))
    assert_same_parameters(online, by_hand)
    assert_same_parameters(
        fit(LinearGaussianHMM(2, 2, discount=0.0), data, 3, 0), fit(LinearGaussianHMM(2, 2), data, 3, 0)
    )


@pytest.mark.parametrize("frozen", ["initial", "transition", "emission"])
def test_frozen_parts_keep_their_values(rng, frozen):
    start, model = (
        LinearGaussianHMM(2, 2),
        fit(LinearGaussianHMM(2, 2, frozen=[frozen]), random_vectors(rng, longest=8), 2, 0),
    )
    for name, part in model.distributions.items():
        same = all(
            torch.equal(old, new)
            for old, new in zip(start.distributions[name].parameters(), part.parameters(), strict=True)
        )
        assert same == (name == frozen), name


def test_parameters_without_statistics_stay(rng):
    """The second feature is never observed, and the only sequence with a transition has weight 0."""
    data = Sequences.from_list([[[1.0, np.nan], [2.0, np.nan]], [[3.0, np.nan]], [[2.5, np.nan]]])
    start, model = LinearGaussianHMM(2, 2), LinearGaussianHMM(2, 2)
    BaumWelch(model.distributions).step(
        counts=model.statistics(data, torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    )
    for old, new in zip(start.emission.parameters(), model.emission.parameters(), strict=True):
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0])
    assert all(
        torch.equal(old, new)
        for old, new in zip(start.transition.parameters(), model.transition.parameters(), strict=True)
    )
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("target", ["positions", "increments"])
def test_predictions_scores_and_draws(rng, target):
    """What is said of each step is what is said after its past alone; a score is the sum of such log-densities."""
    data = random_vectors(rng, num_sequences=4, num_features=1, longest=7, missing=0.0)
    model = fit(LinearGaussianHMM(2, 1, target), data, 3, 0)
    each = model.predict_each(data)
    for n, sequence in enumerate(data):
        total = 0.0
        for t in range(len(sequence)):
            past = Sequences.from_list([sequence[:t]]) if t else Sequences.from_lengths(sequence[:0], [0])
            ahead = model.predict_next(past)
            np.testing.assert_allclose(each[n][t], ahead.mean[0], rtol=1e-9, atol=1e-9)
            total += float(torch.distributions.Normal(ahead.mean, ahead.variance.sqrt()).log_prob(sequence[t]).sum())
        assert float(model.score(data)[n]) == pytest.approx(total, rel=1e-9)
    drawn, states = model.sample(500, 3, seed=1, return_states=True)
    assert states.values.shape == (1500, 2)
    first = model.predict_next(Sequences.from_lengths(torch.zeros(0, 1, dtype=torch.float64), [0]))
    np.testing.assert_allclose(
        drawn.values.view(500, 3)[:, 0].mean(), first.mean[0, 0], atol=5 * float(first.variance.max() / 500) ** 0.5
    )


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_several_steps_ahead(rng, steps):
    """Positions against missing steps; increments against a model of positions whose state holds the position too."""
    data = random_vectors(rng, longest=8)
    model = fit(LinearGaussianHMM(2, 2), data, 2, 0)
    later = Sequences.from_list(
        [torch.cat([sequence, sequence.new_full((steps - 1, 2), torch.nan)]) for sequence in data]
    )
    for found, expected in zip(model.predict_next(data, steps), model.predict_next(later), strict=True):
        torch.testing.assert_close(found, expected)

    whole = Sequences.from_list([torch.from_numpy(rng.normal(size=(length, 2)).cumsum(0)) for length in (4, 7, 2)])
    model = fit(LinearGaussianHMM(2, 2, "increments"), whole, 2, 0)
    inner, unit, none = (
        model.parameters_in_units,
        torch.eye(2, dtype=torch.float64),
        torch.zeros(2, 2, dtype=torch.float64),
    )
    spread = model.data_variance.sqrt().diag()
    emission, offset = spread @ inner.emission, spread @ inner.emission_offset + model.center
    across = inner.transition_cov @ emission.T
    noise = emission @ across + spread @ inner.emission_cov @ spread
    joint = kalman.LinearGaussian(
        initial_mean=torch.cat([inner.initial_mean, torch.zeros(2, dtype=torch.float64)]),
        initial_cov=torch.block_diag(inner.initial_cov, 1e4 * unit),
        transition=torch.cat(
            [torch.cat([inner.transition, none], 1), torch.cat([emission @ inner.transition, unit], 1)]
        ),
        transition_offset=torch.cat([inner.transition_offset, emission @ inner.transition_offset + offset]),
        transition_cov=torch.cat([torch.cat([inner.transition_cov, across], 1), torch.cat([across.T, noise], 1)]),
        emission=torch.cat([none, unit], 1),
        emission_offset=torch.zeros(2, dtype=torch.float64),
        emission_cov=1e-9 * unit,
    )
    later = Sequences.from_list(
        [torch.cat([sequence, sequence.new_full((steps - 1, 2), torch.nan)]) for sequence in whole]
    )
    mean, cov = (moment[later.offsets[1:] - 1] for moment in kalman.predict_next(joint, later))
    found = model.predict_next(whole, steps)
    torch.testing.assert_close(found.mean, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance, cov.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=1e-5)


def joint_gaussian(model: LinearGaussianHMM, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of all observations of a sequence, (num_steps * D,).

    Each observation is a sum of constants and of independent standard normal numbers.
    """
    inner, (size, features) = model.parameters_in_units, (model.latent_dim, len(model.center))
    roots = [np.linalg.cholesky(cov.numpy()) for cov in (inner.initial_cov, inner.transition_cov, inner.emission_cov)]
    spread = model.data_variance.sqrt().numpy()[:, None]
    per_step = size + features
    # The rows of `state` and `value` are the constants and the factors of the normal numbers.
    noise = np.eye(num_steps * per_step).reshape(num_steps, per_step, -1)

    def affine(constant: torch.Tensor, factors: np.ndarray) -> np.ndarray:
        return np.concatenate([constant.numpy()[:, None], factors], 1)

    def emitted(t: int, state: np.ndarray) -> np.ndarray:
        own = inner.emission.numpy() @ state + affine(inner.emission_offset, roots[2] @ noise[t, size:])
        return spread * own + affine(model.center, 0 * noise[t, size:])

    state, values = affine(inner.initial_mean, roots[0] @ noise[0, :size]), []
    for t in range(num_steps):
        if t:
            state = inner.transition.numpy() @ state + affine(inner.transition_offset, roots[1] @ noise[t, :size])
        if model.target == "positions":
            values.append(emitted(t, state))
        elif t == 0:
            values.append(
                affine(model.first_center, model.first_data_variance.sqrt().numpy()[:, None] * noise[0, size:])
            )
        else:
            values.append(values[-1] + emitted(t, state))
    factors = np.concatenate(values)
    return factors[:, 0], factors[:, 1:] @ factors[:, 1:].T


def given(values: np.ndarray, mean: np.ndarray, cov: np.ndarray, wanted: slice) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the wanted entries of a Gaussian, given the first entries, of which some are missing."""
    seen = np.flatnonzero(~np.isnan(values))
    gain = np.linalg.solve(cov[np.ix_(seen, seen)], cov[seen, wanted]).T
    return mean[wanted] + gain @ (values[seen] - mean[seen]), np.diag(cov[wanted, wanted] - gain @ cov[seen, wanted])


@pytest.mark.parametrize("target", ["positions", "increments"])
def test_gaps_agree_with_the_joint_gaussian(rng, target):
    """Scores and predictions are those of one Gaussian, for any missing values and for an empty sequence."""
    model = fit(
        LinearGaussianHMM(2, 2, target),
        [rng.normal(size=(length, 2)).cumsum(0) + 0.7 * np.arange(length)[:, None] for length in (9, 6, 12, 3)],
        3,
        0,
    )
    parts = [rng.normal(size=(length, 2)).cumsum(0) for length in (7, 5, 6, 1)]
    parts[0][3:5], parts[0][5, 0] = np.nan, np.nan  # a gap, longer in one feature
    parts[1][:2, 1], parts[1][3:] = np.nan, np.nan  # nothing at first in one feature, nothing at the end in both
    parts[2][:, 0] = np.nan  # a feature that is never seen
    data = Sequences.from_list([*parts, np.zeros((0, 2))])
    scores, each = model.score(data), model.predict_each(data)
    ahead = {steps: model.predict_next(data, steps) for steps in (1, 3)}
    for n, sequence in enumerate(np.asarray(sequence) for sequence in data):
        mean, cov = joint_gaussian(model, len(sequence) + 3)
        values = sequence.reshape(-1)
        seen = np.flatnonzero(~np.isnan(values))
        exact = (
            stats.multivariate_normal(mean[seen], cov[np.ix_(seen, seen)]).logpdf(values[seen]) if len(seen) else 0.0
        )
        assert float(scores[n]) == pytest.approx(exact, rel=1e-9)
        for t in range(len(sequence)):
            np.testing.assert_allclose(
                each[n][t], given(values[: 2 * t], mean, cov, slice(2 * t, 2 * t + 2))[0], rtol=1e-9, atol=1e-9
            )
        for steps, found in ahead.items():
            last = len(sequence) + steps - 1
            wanted = given(values, mean, cov, slice(2 * last, 2 * last + 2))
            np.testing.assert_allclose(found.mean[n], wanted[0], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found.variance[n], wanted[1], rtol=1e-8)


def test_a_gap_is_as_long_as_its_steps():
    """Missing steps at the end and `steps` are two ways to ask for the same."""
    model = LinearGaussianHMM(1, 1, "increments")
    seen = np.arange(0.0, 60, 3)[:, None] + np.random.default_rng(0).normal(size=(20, 1))
    fit(model, [seen], 2, 0)
    gap = model.predict_next([np.concatenate([seen, np.full((3, 1), np.nan)])])
    steps = model.predict_next([seen], steps=4)
    torch.testing.assert_close(gap.mean, steps.mean)
    torch.testing.assert_close(gap.variance, steps.variance)
    assert float(gap.mean) == pytest.approx(69, abs=3)


def test_bad_input_is_said():
    with pytest.raises(ValueError, match="`steps` must be a whole number of at least 1, but is 0"):
        LinearGaussianHMM(2, 1).predict_next([[[1.0]]], steps=0)
    with pytest.raises(ValueError, match="`target` must be one of positions, increments, but is 'speeds'"):
        LinearGaussianHMM(2, 2, "speeds")
    with pytest.raises(ValueError, match="`frozen` must name initial, transition or emission, but names 'noise'"):
        LinearGaussianHMM(2, 2, frozen=["noise"])
    with pytest.raises(ValueError, match="`variance_prior` must not be negative, but is -1"):
        LinearGaussianHMM(2, 2, variance_prior=-1)
    with pytest.raises(ValueError, match="feature 0 is explained without any"):
        fit(LinearGaussianHMM(1, 1), [[[1.0]] * 3, [[1.0]] * 2], 1)
    with pytest.raises(ValueError, match="at least two steps somewhere"):
        fit(LinearGaussianHMM(2, 1), [[[1.0]], [[3.0]]], 1)
    with pytest.raises(ValueError, match="position 1 of sequence 0 is inf"):
        fit(LinearGaussianHMM(2, 1), [[[1.0], [math.inf]]], 1)
