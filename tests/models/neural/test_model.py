"""The neural HMM against exact results: the Kalman filter for linear networks, and sums over single paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader

from datamodules import MovingTargetDataModule
from lightning_hmm import NeuralHMM, Sequences, fit, load
from lightning_hmm.data import loader
from lightning_hmm.distributions.densities import PartialDensity
from lightning_hmm.inference import kalman
from lightning_hmm.metrics import PredictionError
from lightning_hmm.models import LinearGaussianHMM, NeuralDiscreteHMM
from lightning_hmm.models.neural.state_space import PathDensity
from tests.helpers import assert_same_parameters, random_vectors

SMALL = {"latent_dim": 2, "num_features": 2, "num_particles": 16, "num_paths": 4, "width": 8}
EXACT = {**SMALL, "arithmetic": "float64"}
KINDS = [
    {},
    {
        "emission_order": 2,
        "transition_order": 3,
        "emission": "student",
        "transition": "student",
        "transition_mean": "residual",
    },
    {
        "emission_order": 0,
        "transition_order": 2,
        "emission_mean": "absolute",
        "emission": "mixture",
        "transition": "mixture",
        "latent_bound": 3.0,
    },
    {"emission_order": 1, "transition_order": 2, "window": "lstm", "activation": "tanh", "num_layers": 2},
]


def ready(sequences: Sequences, **options) -> NeuralHMM:
    model = NeuralHMM(**{**EXACT, **options})
    model.initialize(sequences)
    return model


def as_linear(model: NeuralHMM) -> kalman.LinearGaussian:
    """The model of one linear layer each, in units of the data."""
    parts = {}
    for name in ("transition", "emission"):
        network, head = getattr(model, name).network, getattr(model, name).head
        size = head.size
        variance = (head.log_variance + 4.0 * (network.bias[size:] / 4.0).tanh()).exp()
        parts |= {
            name: network.from_state[:, :size].T,
            f"{name}_offset": network.bias[:size],
            f"{name}_cov": variance.diag(),
        }
    parts |= {"initial_mean": model.initial_mean, "initial_cov": model.initial_log_variance.exp().diag()}
    return kalman.LinearGaussian(**{name: value.detach() for name, value in parts.items()})


def test_linear_networks_agree_with_kalman(rng):
    """Likelihood, smoothed means, and predictions, of ragged sequences with missing entries."""
    data = random_vectors(rng, num_sequences=6, longest=12, missing=0.2)
    model = ready(data, num_layers=1, emission_order=0, emission_mean="absolute", emission_log_variance=-0.5, seed=3)
    exact = as_linear(model)
    standard = data.with_values((data.values - model.center) / model.data_variance.sqrt())
    log_likelihood = kalman.log_likelihood(exact, standard)
    units = torch.where(data.observed, -0.5 * model.data_variance.log(), 0.0).sum(1)
    log_likelihood.index_add_(0, data.repeat_interleave(torch.arange(len(data))), units)
    found = model.score(data, runs=8, num_particles=2000, return_error=True)
    assert bool(((found.log_likelihood - log_likelihood).abs() < 5 * found.standard_error + 1e-6).all())
    assert float(found.standard_error.max()) < 0.1
    posterior = kalman.posterior(exact, standard)
    decoded = model.decode(data, num_paths=1000, num_particles=1000)
    np.testing.assert_allclose(decoded.mean.values, posterior.mean, atol=0.2)
    np.testing.assert_allclose(decoded.variance.values, posterior.cov.diagonal(dim1=1, dim2=2), atol=0.25)
    model.num_paths = 1  # what training draws is no measure of what an answer needs
    usual = model.decode(data, num_particles=1000)
    assert (
        float((usual.mean.values - posterior.mean).square().mean())
        < float(posterior.cov.diagonal(dim1=1, dim2=2).mean()) / 32
    )
    mean, cov = kalman.predict_next(exact, standard)
    last = data.offsets[1:] - 1
    ahead = model.predict_next(data, num_particles=4000)
    np.testing.assert_allclose((ahead.mean - model.center) / model.data_variance.sqrt(), mean[last], atol=0.15)
    spread = cov[last].diagonal(dim1=1, dim2=2)
    np.testing.assert_allclose(ahead.variance / model.data_variance, spread, rtol=0.15)
    np.testing.assert_allclose(
        (ahead.upper - ahead.lower) / model.data_variance.sqrt(), 2 * 1.645 * spread.sqrt(), rtol=0.15
    )
    each = (model.predict_each(data, num_particles=4000).values - model.center) / model.data_variance.sqrt()
    later = torch.ones(data.num_steps, dtype=torch.bool)
    later[data.offsets[:-1]] = False
    np.testing.assert_allclose(each[later], mean[torch.nonzero(later).flatten() - 1], atol=0.15)


def test_predicted_variances_contain_the_spread_of_the_states(rng):
    """Against Kalman's, for an emission whose own noise is a small part of the variance."""
    data = random_vectors(rng, num_sequences=6, longest=12, missing=0.2)
    model = ready(
        data,
        num_layers=1,
        emission_order=0,
        emission_mean="absolute",
        emission_log_variance=-1.5,
        transition_log_variance=0.0,
        seed=3,
    )
    exact = as_linear(model)
    standard = data.with_values((data.values - model.center) / model.data_variance.sqrt())
    own = exact.emission_cov.diagonal()
    _, cov = kalman.predict_next(exact, standard)
    spread = cov.diagonal(dim1=1, dim2=2)
    assert float((own / spread).max()) < 0.7
    later = torch.ones(data.num_steps, dtype=torch.bool)
    later[data.offsets[:-1]] = False
    first = kalman.predict_observation(exact, exact.initial_mean, exact.initial_cov)[1].diagonal()
    expected = torch.where(later.unsqueeze(1), torch.cat([first[None], spread[:-1]]), first) * model.data_variance
    np.testing.assert_allclose(
        model.one_step_predictions(data, num_particles=6000).variance.values, expected, rtol=0.15
    )
    np.testing.assert_allclose(
        model.predict_next(data, num_particles=6000).variance,
        spread[data.offsets[1:] - 1] * model.data_variance,
        rtol=0.15,
    )


@pytest.mark.parametrize(
    "options", [*KINDS, {"emission_order": 0}], ids=["gaussian", "student", "mixture", "lstm", "plain"]
)
def test_missing_steps_at_the_end_are_steps_ahead(rng, options):
    """The prediction after three missing steps is the prediction four steps ahead, whatever else is in the batch."""
    whole = list(random_vectors(rng, num_sequences=5, longest=9, missing=0.0))
    model = ready(Sequences.from_list(whole), **options)
    gap = torch.full((3, 2), torch.nan, dtype=torch.float64)
    for steps in (1, 2):
        found = model.predict_next(
            Sequences.from_list([torch.cat([sequence, gap]) for sequence in whole[:4]] + [whole[4], gap]), steps
        )
        ahead, usual = (
            model.predict_next(Sequences.from_list(whole), steps + 3),
            model.predict_next(Sequences.from_list(whole), steps),
        )
        for moment, later, soon in zip(found, ahead, usual, strict=True):
            torch.testing.assert_close(moment[:4], later[:4])
            torch.testing.assert_close(moment[4], soon[4])
            assert bool(moment[5].isfinite().all())


def test_changes_add_up_across_a_gap(rng):
    """A residual emission of linear networks, against Kalman's moments of sums: the state holds the position too."""
    data = Sequences.from_list(
        [rng.normal(size=(length, 2)).cumsum(0) + np.arange(length)[:, None] for length in (6, 9, 4)]
    )
    model = ready(data, num_layers=1, emission_order=0, emission_log_variance=-0.5, seed=3)
    with torch.no_grad():
        model.emission.network.bias[:2] = 0.8  # a drift
    exact = kalman.cumulative_sum(
        as_linear(model), model.first_log_variance.exp().detach() * model.data_variance / model.change_variance
    )
    unit = model.change_variance.sqrt()
    located = data.with_values((data.values - model.center) / unit)
    found = kalman.posterior(exact, located)
    last = data.offsets[1:] - 1
    mean, cov = found.filtered_mean[last], found.filtered_cov[last]
    for _ in range(4):
        mean, cov = kalman.predict_state(exact, mean, cov)
    expected, spread = kalman.predict_observation(exact, mean, cov)
    later = Sequences.from_list([torch.cat([sequence, sequence.new_full((3, 2), torch.nan)]) for sequence in data])
    ahead = model.predict_next(later, num_particles=4000)
    np.testing.assert_allclose((ahead.mean - model.center) / unit, expected, atol=0.25)
    np.testing.assert_allclose(ahead.variance / model.change_variance, spread.diagonal(dim1=1, dim2=2), rtol=0.15)


def test_a_state_that_jumps_agrees_with_a_grid():
    """The log-likelihood with Student's t as transition, against numerical integration over a state of one entry."""
    values = np.array([0.0, 0.5, 5.0, -4.0, 0.3])
    data = Sequences.from_list([values[:, None]])
    model = ready(
        data,
        latent_dim=1,
        num_features=1,
        num_layers=1,
        emission_order=0,
        emission_mean="absolute",
        transition="student",
        emission_log_variance=-0.5,
    )
    with torch.no_grad():
        (
            model.center.zero_(),
            model.data_variance.fill_(1.0),
            model.transition.head.log_freedom.zero_(),
        )  # 3 degrees of freedom
        for part, slope in ((model.transition, 0.8), (model.emission, 1.0)):
            part.network.from_state.copy_(torch.tensor([[slope, 0.0]]))
            part.network.bias.zero_()
    grid, width = np.linspace(-15, 15, 601), 0.05
    spread = {name: math.exp(getattr(model, name).head.log_variance / 2) for name in ("transition", "emission")}
    evidence = stats.norm(grid[:, None], spread["emission"]).pdf(values)
    moves = stats.t(3, 0.8 * grid[None, :], spread["transition"]).pdf(grid[:, None]) * width
    forward = stats.norm(0, 1).pdf(grid) * evidence[:, 0]
    for t in range(1, len(values)):
        forward = (moves @ forward) * evidence[:, t]
    found = model.score(data, runs=8, num_particles=5000, return_error=True)
    assert float(found.log_likelihood[0]) == pytest.approx(
        math.log(forward.sum() * width), abs=5 * float(found.standard_error[0])
    )
    assert float(found.standard_error[0]) < 0.2


def test_bounds_and_draws_of_an_emission_with_heavy_tails(rng):
    """An emission that does not depend on the state: the quantiles are those of Student's t."""
    data = random_vectors(rng, num_sequences=4, longest=6)
    model = ready(data, num_layers=1, emission_order=0, emission_mean="absolute", emission="student")
    with torch.no_grad():
        model.emission.head.log_freedom.fill_(math.log(0.5))
        model.emission.network.from_state.zero_(), model.emission.network.bias.zero_()
    scale = (0.5 * model.emission.head.log_variance + 0.5 * model.data_variance.log()).exp()
    exact = stats.t(2.5, model.center, scale)
    ahead = model.predict_next(data[:1], level=0.95, num_particles=20_000)
    np.testing.assert_allclose(ahead.variance[0], exact.var(), rtol=1e-6)
    np.testing.assert_allclose(
        torch.cat([ahead.lower, ahead.upper]) - model.center,
        exact.ppf([[0.025], [0.975]]) - model.center.numpy(),
        rtol=0.1,
    )
    drawn = model.sample(500, 10).values
    for feature in range(2):
        assert (
            stats.kstest(
                drawn[:, feature], stats.t(2.5, float(model.center[feature]), float(scale[feature])).cdf
            ).pvalue
            > 1e-3
        )


@pytest.mark.parametrize("options", KINDS, ids=["gaussian", "student", "mixture", "lstm"])
def test_the_m_step_is_of_the_log_density_of_paths(rng, options, monkeypatch):
    """Q and its gradient, against a sum over single paths, sequences and steps, each with its whole past as input."""
    monkeypatch.setattr("lightning_hmm.models.neural.state_space._CHUNK", 7)
    data = random_vectors(rng, num_sequences=4, longest=6, missing=0.2)
    model, weights = ready(data, **options), torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    bound = model.bind(data)
    paths = torch.randn(
        int(data.lengths.max()), len(data), 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    density = PathDensity(bound, paths, weights)

    def step(sequence: torch.Tensor, path: torch.Tensor, t: int) -> torch.Tensor:
        """log q(x_t | x_t-1, y) + log p(y_t | x_t, y) of one path, less the units."""
        features = model.observations(
            Sequences.from_list([sequence[:t]]) if t else Sequences.from_lengths(sequence[:0], [0])
        ).window_features
        now, before = path[t].view(1, 1, -1), path[t - 1].view(1, 1, -1)

        def given(part: nn.Module, states: torch.Tensor) -> PartialDensity:
            order = part.window.order
            return part(
                states,
                part.prepare(part.window.inputs(features.windows(order))[-1] if order else features.value.new_zeros(0)),
            )

        total = (
            given(model.transition, before).log_prob(now).squeeze()
            if t
            else model.initial_density(1, 1).log_prob(now).squeeze()
        )
        target = torch.full((1, 1, 2), math.nan, dtype=torch.float64)
        for d in range(2):
            seen = [float(value) for value in sequence[:t, d] if not math.isnan(value)]
            base = (seen[-1] if seen else math.nan) if model.residual else float(model.center[d])
            target[..., d] = (sequence[t, d] - base) / model.units.emission_std[d]
            if model.residual and not seen and not math.isnan(sequence[t, d]):
                first = torch.distributions.Normal(model.first_mean[d], (0.5 * model.first_log_variance[d]).exp())
                total = total + first.log_prob((sequence[t, d] - model.center[d]) / model.data_variance[d].sqrt())
        return total + given(model.emission, now).log_prob(target.nan_to_num(), ~target.isnan()).squeeze()

    def by_hand() -> torch.Tensor:
        steps = [(n, sequence, m, t) for n, sequence in enumerate(data) for m in range(3) for t in range(len(sequence))]
        return torch.stack([weights[n] / 3 * step(sequence, paths[:, n, m], t) for n, sequence, m, t in steps]).sum()

    value, gradients = density.gradient()
    expected = by_hand()
    torch.testing.assert_close(value, expected.detach())
    for (name, _), found, wanted in zip(
        model.named_parameters(), gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")


def test_a_step_of_training_is_a_step_of_adam(rng):
    """Fused Adam takes no notice of strides: each weight must get its own gradient all the same."""

    class Plain(NeuralHMM):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    data = random_vectors(rng, num_sequences=6, longest=9)
    fused, plain = (kind(**EXACT, transition_order=2, m_steps=3) for kind in (NeuralHMM, Plain))
    for model in (fused, plain):
        fit(model, data, max_epochs=2, tolerance=0, batch_size=3)
    assert_same_parameters(fused, plain, rtol=1e-6, atol=1e-8)


def test_states_later_have_read_the_step(rng):
    """A state that copies the previous observation: the state one step later is the observation, also at the end."""
    data = random_vectors(rng, num_sequences=4, longest=8, missing=0.0)
    model = ready(
        data,
        num_layers=1,
        emission_order=0,
        emission_mean="absolute",
        transition_order=1,
        transition_log_variance=-12.0,
        emission_log_variance=8.0,
    )
    with torch.no_grad():
        for part in (
            model.transition.network.from_state,
            model.transition.network.from_window,
            model.transition.network.bias,
        ):
            part.zero_()
        model.transition.network.from_window[:2, :2] = torch.eye(2)
    standard = (data.values - model.center) / model.data_variance.sqrt()
    torch.testing.assert_close(model.latents(data, lead=1).values, standard, atol=0.02, rtol=0)
    at_once = data.with_values(model.latents(data).values)
    for found, wanted in zip(at_once, data.with_values(standard), strict=True):
        torch.testing.assert_close(found[1:], wanted[:-1], atol=0.02, rtol=0)
    with pytest.raises(ValueError, match="`lead` must be a whole number of at least 0, but is -1"):
        model.latents(data, lead=-1)


@pytest.mark.parametrize("options", KINDS, ids=["gaussian", "student", "mixture", "lstm"])
def test_a_sequence_does_not_see_its_neighbours(rng, options):
    """Alone or in a batch with longer ones, the same numbers are drawn for it; and all answers are numbers."""
    data = random_vectors(rng, num_sequences=5, longest=9, missing=0.2)
    model = ready(data, **options)
    together = model.filter_particles(model.bind(data), model.streams(range(5), "test"))
    paths = model.draw_paths(together, model.streams(range(5), "paths"), 4)
    for n in (1, 4):
        alone = model.filter_particles(model.bind(data[[n]]), model.streams([n], "test"))
        torch.testing.assert_close(alone.log_likelihood[0], together.log_likelihood[n])
        length = len(data[n])
        torch.testing.assert_close(
            model.draw_paths(alone, model.streams([n], "paths"), 4)[:length, 0], paths[:length, n]
        )
    for answer in (
        model.predict_each(data).values,
        model.latents(data).values,
        *model.predict_next(data, steps=3),
        model.sample(3, [4, 0, 2]).values,
    ):
        assert bool(answer.isfinite().all())
    assert model.cluster_latents(data, 2).values.unique().tolist() == [0, 1]


def test_drawn_data_have_the_moments_that_are_predicted(rng):
    """Sampling and prediction build their windows in other ways: the second step of many draws, given the first."""
    data = random_vectors(rng, num_sequences=8, longest=9, missing=0.0)
    model = ready(data, emission_order=2, transition_order=2)
    values, states = model.sample(1500, 3, seed=1, return_states=True)
    assert states.values.shape == (4500, 2)
    threes = values.values.view(-1, 3, 2)
    assert abs(float(threes[:, 0].mean() - model.center.mean())) < 0.3
    two = Sequences.from_lengths(threes[:200, :2].reshape(-1, 2), [2] * 200)
    surprise = (threes[:200, 2] - (ahead := model.predict_next(two, num_particles=200)).mean) / ahead.variance.sqrt()
    assert abs(float(surprise.mean())) < 0.2
    assert float(surprise.square().mean()) == pytest.approx(1, abs=0.3)
    inside = ((threes[:200, 2] > ahead.lower) & (threes[:200, 2] < ahead.upper)).double().mean()
    assert float(inside) == pytest.approx(0.9, abs=0.06)


def test_gradients_are_summed_in_float64(rng, monkeypatch):
    """In float32 as well: over the pieces of a batch, and over ranks."""
    monkeypatch.setattr("lightning_hmm.models.neural.state_space._CHUNK", 1)
    data = random_vectors(rng, num_sequences=5, longest=9, missing=0.0)
    model = NeuralHMM(**SMALL)
    model.initialize(data)
    paths = torch.randn(int(data.lengths.max()), len(data), 3, 2, generator=torch.Generator().manual_seed(0))
    density = PathDensity(model.bind(data), paths, torch.ones(len(data), dtype=torch.float64))
    parameters = list(model.parameters())
    pieces = [torch.autograd.grad(piece, parameters, allow_unused=True) for piece in density._terms()]
    assert len(pieces) > 10
    for name, found, parts in zip(
        dict(model.named_parameters()), density.gradient()[1], zip(*pieces, strict=True), strict=True
    ):
        expected = sum(part.double() for part in parts if part is not None)
        torch.testing.assert_close(
            found, expected, rtol=1e-14, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
        )
    monkeypatch.setattr(model, "_sum_over_ranks", lambda value: value + (1.0 - 1e9))  # what the other rank has
    model._set_gradients([torch.full_like(parameter, 1e9, dtype=torch.float64) for parameter in parameters], 2.0)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.5))


def predicted(model: NeuralHMM, sequences: Sequences, batch_size: int, world_size: int = 1) -> list[dict]:
    """What `predict` returns for each sequence, in the order of the data, after joining the ranks."""
    found: dict[int, dict] = {}
    for rank in range(world_size):
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        batches = trainer.predict(model, loader(sequences, batch_size, rank=rank, world_size=world_size))
        numbers = (
            number
            for batch in loader(sequences, batch_size, rank=rank, world_size=world_size).sampler
            for number in batch
        )
        for batch in batches:
            for n in range(len(batch["log_likelihood"])):
                found[next(numbers)] = {name: values[n] for name, values in batch.items()}
    return [found[number] for number in range(len(sequences))]


def test_what_is_predicted_does_not_depend_on_batches_or_ranks(rng):
    data = random_vectors(rng, num_sequences=7, longest=9, missing=0.2)
    model = ready(data)
    each, latents, scores = model.predict_each(data), model.latents(data), model.score(data)
    for batch_size, world_size in ((7, 1), (3, 1), (4, 2), (2, 3)):
        for n, found in enumerate(predicted(model, data, batch_size, world_size)):
            torch.testing.assert_close(found["log_likelihood"], scores[n])
            torch.testing.assert_close(found["predictions"], each[n])
            torch.testing.assert_close(found["latents"], latents[n])
    plain = DataLoader(list(data), batch_size=2, collate_fn=Sequences.collate)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    torch.testing.assert_close(torch.cat([batch["log_likelihood"] for batch in trainer.predict(model, plain)]), scores)
    torch.testing.assert_close(model.score(data[[5, 2]], numbers=[5, 2]), scores[[5, 2]])
    with pytest.raises(ValueError, match="`numbers` must be one for each of 2 sequences, but are 1"):
        model.score(data[[5, 2]], numbers=[5])


def test_it_learns_where_particles_go():
    data = MovingTargetDataModule(num_features=2, num_sequences=120, length=50)
    data.setup()
    model = NeuralHMM(2, 2, transition_order=2, num_particles=32, num_paths=2, m_steps=8, learning_rate=1e-2)
    fit(model, data.train_sequences, 5, 0, batch_size=32, shuffle=True, val_sequences=data.val_sequences)
    error = PredictionError()
    error.update(model.predict_each(data.test_sequences).values, data.test_sequences)
    assert data.bayes_error() < float(error.compute()) < 0.75
    logged = model.trainer.callback_metrics
    assert 0 < float(logged["train/effective_size"]) < 1
    assert float(logged["val/prediction_error"]) < 0.75


class Deep(NeuralHMM):
    """With a network of the user's own."""

    def make_network(self, name: str, num_inputs: int, num_outputs: int) -> nn.Module | None:
        return (
            nn.Sequential(nn.Linear(num_inputs, 5), nn.Tanh(), nn.Linear(5, num_outputs))
            if name == "transition"
            else None
        )


def test_any_module_may_be_a_network(rng, tmp_path):
    data = random_vectors(rng, longest=6)
    keep = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    model = fit(Deep(**SMALL, transition_order=1), data, 1, 0, callbacks=[keep], enable_checkpointing=True)
    assert isinstance(model.transition.network.module, nn.Sequential)
    assert torch.equal(load(tmp_path / "last.ckpt").score(data), model.score(data))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_features": None}, "`num_features` must be given: a neural HMM is for real vectors"),
        ({"latent_dim": 0}, "`latent_dim` must be a whole number of at least 1, but is 0"),
        ({"emission": "laplace"}, "`emission` must be one of gaussian, student, mixture, but is 'laplace'"),
        ({"transition_order": -1}, "`transition_order` must be a whole number of at least 0, but is -1"),
        ({"latent_bound": 0.0}, r"`latent_bound` must be positive, but is 0\.0"),
        ({"e_step_fraction": 0.0}, r"`e_step_fraction` must be above 0 and at most 1, but is 0\.0"),
        ({"threshold": 2.0}, r"`threshold` must be from 0 to 1, but is 2\.0"),
    ],
)
def test_bad_options_are_said(options, said):
    with pytest.raises(ValueError, match=said):
        NeuralHMM(**{**SMALL, **options})


def test_answers_in_pieces_are_those_in_one_go(rng, monkeypatch):
    data = random_vectors(rng, longest=6)
    model = ready(data)
    whole = model.decode(data, num_paths=50)
    monkeypatch.setattr("lightning_hmm.models.neural.model._MAX_PARTICLES", 2 * 50 * model.num_particles)
    widths = [len(piece) for piece, _ in model._chunks(data, num_paths=50)]
    assert max(widths) == 2  # paths count where there are more of them than steps
    torch.testing.assert_close(model.decode(data, num_paths=50).paths, whole.paths)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NeuralHMM(**EXACT),
        lambda: NeuralHMM(**EXACT, start_window=3),
        lambda: NeuralDiscreteHMM(2, 2, width=8, embedding_dim=4),
        lambda: LinearGaussianHMM(2, 2, "increments"),
    ],
    ids=["neural", "slow start", "discrete", "linear"],
)
def test_a_start_is_without_sequences_of_weight_zero(rng, make):
    """Units and first networks, and with other weights a sequence of weight 2 is one that occurs twice."""
    data = random_vectors(rng, num_sequences=6, longest=8, missing=0.0)
    wild = [1e3 * rng.normal(size=(9, 2)).cumsum(0)]
    weighted, plain = make(), make()
    weighted.initialize(Sequences.from_list([*wild, *data], weights=[0.0, *[1.0] * 6]))
    plain.initialize(data)
    for (name, found), expected in zip(weighted.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    with pytest.raises(ValueError, match="at least two steps somewhere"):
        make().initialize(Sequences.from_list([*wild, data[0]], weights=[0.0, 1.0]))
    if plain.hparams.get("start_window") is None:
        weighted, plain = make(), make()
        weighted.initialize(Sequences.from_list(list(data), weights=[2.0, *[1.0] * 4, 2.0]))
        plain.initialize(Sequences.from_list([*data, data[0], data[5]]))
        for name, found in weighted.named_buffers():
            torch.testing.assert_close(
                found, plain.get_buffer(name), rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_clusters_and_logged_values_are_without_sequences_of_weight_zero(rng):
    data = random_vectors(rng, num_sequences=6, longest=8, missing=0.0)
    both = Sequences.from_list([*data, *(1e3 * sequence for sequence in data)], weights=[*[1.0] * 6, *[0.0] * 6])
    model = ready(data)
    assert torch.equal(model.cluster_latents(both, 3).values[: data.num_steps], model.cluster_latents(data, 3).values)
    weighted, plain = (fit(NeuralHMM(**EXACT), sequences, 1, 0) for sequences in (both, data))
    assert_same_parameters(weighted, plain)
    for name, value in plain.trainer.callback_metrics.items():
        torch.testing.assert_close(
            weighted.trainer.callback_metrics[name], value, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_bad_data_are_said(rng):
    data = random_vectors(rng, longest=6)
    with pytest.raises(ValueError, match="must be initialized before it is used"):
        NeuralHMM(**SMALL).score(data)
    with pytest.raises(ValueError, match="at least two steps somewhere"):
        fit(NeuralHMM(**SMALL), [[[1.0, 2.0]], [[3.0, 4.0]]], 1)
    with pytest.raises(ValueError, match="feature 1 at position 1 of sequence 0 is inf"):
        fit(NeuralHMM(**SMALL), [[[1.0, 2.0], [3.0, math.inf]]], 1)
    with pytest.raises(ValueError, match="Each step must have 2 features, but has 1"):
        NeuralHMM(**SMALL).initialize(Sequences.from_list([[1.0, 2.0]]))
    with pytest.raises(ValueError, match="`precision` must be that of the networks' parameters, but is float64"):
        fit(NeuralHMM(**SMALL), data, 1, precision=64)
    with pytest.raises(ValueError, match="`num_clusters` must be from 1 to the number of steps"):
        ready(data).cluster_latents(data, 10_000)
    with pytest.raises(ValueError, match="`num_paths` must be a whole number of at least 1, but is 0"):
        ready(data).latents(data, num_paths=0)
    model = ready(data)
    with torch.no_grad():
        model.emission.network.layers[-1].bias[0] = 1e200
    with pytest.raises(
        ValueError,
        match=r"weights of all 16 vanish at step 1 of sequence \d+\. Use more particles, or a wider emission",
    ):
        model.score(data)


def test_one_point_tracks_and_gaps_are_no_obstacle():
    nan = math.nan
    data = Sequences.from_list(
        [[[1.0, 2.0]], [[0.0, nan], [nan, nan], [1.0, 1.0], [2.0, 0.0]], [[nan, nan], [nan, nan]]]
    )
    for options in KINDS:
        model = fit(NeuralHMM(**SMALL, **options), data, 1, 0)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        assert bool(model.score(data).isfinite().all())
        assert float(model.score(data)[2]) == pytest.approx(0, abs=1e-5)  # nothing observed
