"""EM of linear-Gaussian models: it never falls, its M-step is a maximum, missing values and batches do not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy import stats

from lightning_hmm import Sequences, fit, load
from lightning_hmm.inference import kalman
from lightning_hmm.models import LinearGaussianHMM
from tests.helpers import assert_identical_parameters, assert_same_parameters, random_vectors


class Likelihoods(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.values.append(float(pl_module.train_likelihood.compute()))


@pytest.mark.parametrize("of", ["positions", "increments"])
def test_the_likelihood_never_falls_and_batches_do_not_matter(rng, of):
    data, seen = random_vectors(rng, longest=12, missing=0.15), Likelihoods()
    model = fit(LinearGaussianHMM(3, 2, of), data, 8, 0, callbacks=[seen])
    assert np.diff(seen.values).min() > -1e-9
    assert seen.values[-1] > seen.values[0] + 0.1
    assert_same_parameters(model, fit(LinearGaussianHMM(3, 2, of), data, 8, 0, batch_size=5, shuffle=True), rtol=1e-6, atol=1e-8)
    assert seen.values[-1] < float(model.score(data).sum()) / float(data.num_observed())  # after the last step


@pytest.mark.parametrize("sums", [False, True], ids=["positions", "increments"])
def test_the_m_step_is_a_maximum(rng, sums):
    """Of the expected log-density: by its gradient in the parameters, which Fisher's identity makes that of the likelihood at the old ones."""
    data = random_vectors(rng, num_sequences=5, longest=8, missing=0.2)
    model = LinearGaussianHMM(2, 2).parameters_in_units
    first = torch.tensor([2.0, 0.5], dtype=torch.float64) if sums else None
    statistics = kalman.expected_statistics(model, data, torch.ones(5, dtype=torch.float64), first)
    better = kalman.maximised(model, statistics)

    def expected(parameters: kalman.LinearGaussian) -> torch.Tensor:
        """E[log p(x, y)] from the statistics, as a sum of Gaussian log-densities."""
        joint = torch.cat([parameters.transition, parameters.transition_offset.unsqueeze(1)], 1)
        moved = statistics.after - joint @ statistics.across.T - statistics.across @ joint.T + joint @ statistics.before @ joint.T
        emit = torch.cat([parameters.emission, parameters.emission_offset.unsqueeze(1)], 1)
        error = statistics.squares - 2 * (emit * statistics.products).sum(1) + torch.einsum("di,dij,dj->d", emit, statistics.emitters, emit)
        start = torch.cat([torch.eye(2).double(), -parameters.initial_mean.unsqueeze(1)], 1)
        begun = start @ statistics.starts @ start.T
        total = -0.5 * (torch.trace(torch.linalg.solve(parameters.transition_cov, moved)) + statistics.before[-1, -1] * parameters.transition_cov.logdet())
        total = total - 0.5 * (torch.trace(torch.linalg.solve(parameters.initial_cov, begun)) + statistics.starts[-1, -1] * parameters.initial_cov.logdet())
        variance = parameters.emission_cov.diagonal()
        return total - 0.5 * (error / variance + statistics.emitters[:, -1, -1] * variance.log()).sum()

    def gradients(at: kalman.LinearGaussian, of) -> list[torch.Tensor]:
        free = kalman.LinearGaussian(*(value.clone().requires_grad_() for value in at))
        found = list(torch.autograd.grad(of(free), list(free)))
        found[-1] = found[-1].diagonal()  # the noise of features is independent
        return found

    exact = gradients(model, lambda free: kalman.log_likelihood(kalman.summed(free, first) if sums else free, data).sum())
    for name, mine, fisher in zip(model._fields, gradients(model, expected), exact, strict=True):
        torch.testing.assert_close(
            (mine + mine.mT) / 2 if name.startswith(("initial_cov", "transition_cov")) else mine,
            (fisher + fisher.mT) / 2 if name.startswith(("initial_cov", "transition_cov")) else fisher,
            rtol=1e-7,
            atol=1e-8,
        )
    for gradient in gradients(better, expected):
        assert float(gradient.abs().max()) < 1e-8


@pytest.mark.parametrize("of", ["positions", "increments"])
def test_predictions_scores_and_draws(rng, of):
    """What is said of each step is what is said after its past alone; a score is the sum of such log-densities."""
    data = random_vectors(rng, num_sequences=4, num_features=1, longest=7, missing=0.0)
    model = fit(LinearGaussianHMM(2, 1, of), data, 3, 0)
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
    np.testing.assert_allclose(drawn.values.view(500, 3)[:, 0].mean(), first.mean[0, 0], atol=5 * float(first.variance.max() / 500) ** 0.5)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_several_steps_ahead(rng, steps):
    """Positions against missing steps; increments against a model of positions whose state holds the position too."""
    data = random_vectors(rng, longest=8)
    model = fit(LinearGaussianHMM(2, 2), data, 2, 0)
    later = Sequences.from_list([torch.cat([sequence, sequence.new_full((steps - 1, 2), torch.nan)]) for sequence in data])
    for found, expected in zip(model.predict_next(data, steps), model.predict_next(later), strict=True):
        torch.testing.assert_close(found, expected)

    whole = Sequences.from_list([torch.from_numpy(rng.normal(size=(length, 2)).cumsum(0)) for length in (4, 7, 2)])
    model = fit(LinearGaussianHMM(2, 2, "increments"), whole, 2, 0)
    inner, unit, none = model.parameters_in_units, torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    spread = model.scale.sqrt().diag()
    emission, offset = spread @ inner.emission, spread @ inner.emission_offset + model.centre
    across = inner.transition_cov @ emission.T
    noise = emission @ across + spread @ inner.emission_cov @ spread
    joint = kalman.LinearGaussian(
        initial_mean=torch.cat([inner.initial_mean, torch.zeros(2, dtype=torch.float64)]),
        initial_cov=torch.block_diag(inner.initial_cov, 1e4 * unit),
        transition=torch.cat([torch.cat([inner.transition, none], 1), torch.cat([emission @ inner.transition, unit], 1)]),
        transition_offset=torch.cat([inner.transition_offset, emission @ inner.transition_offset + offset]),
        transition_cov=torch.cat([torch.cat([inner.transition_cov, across], 1), torch.cat([across.T, noise], 1)]),
        emission=torch.cat([none, unit], 1),
        emission_offset=torch.zeros(2, dtype=torch.float64),
        emission_cov=1e-9 * unit,
    )
    later = Sequences.from_list([torch.cat([sequence, sequence.new_full((steps - 1, 2), torch.nan)]) for sequence in whole])
    mean, cov = (moment[later.offsets[1:] - 1] for moment in kalman.predict_next(joint, later))
    found = model.predict_next(whole, steps)
    torch.testing.assert_close(found.mean, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance, cov.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=1e-5)


def joint_gaussian(model: LinearGaussianHMM, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of all observations of a sequence, (num_steps * D,): each is a sum of constants and of independent standard normal numbers."""
    inner, (size, features) = model.parameters_in_units, (model.latent_dim, len(model.centre))
    roots = [np.linalg.cholesky(cov.numpy()) for cov in (inner.initial_cov, inner.transition_cov, inner.emission_cov)]
    spread = model.scale.sqrt().numpy()[:, None]
    per_step = size + features
    # The rows of `state` and `value` are the constants and the factors of the normal numbers.
    noise = np.eye(num_steps * per_step).reshape(num_steps, per_step, -1)

    def affine(constant: torch.Tensor, factors: np.ndarray) -> np.ndarray:
        return np.concatenate([constant.numpy()[:, None], factors], 1)

    def emitted(t: int, state: np.ndarray) -> np.ndarray:
        own = inner.emission.numpy() @ state + affine(inner.emission_offset, roots[2] @ noise[t, size:])
        return spread * own + affine(model.centre, 0 * noise[t, size:])

    state, values = affine(inner.initial_mean, roots[0] @ noise[0, :size]), []
    for t in range(num_steps):
        if t:
            state = inner.transition.numpy() @ state + affine(inner.transition_offset, roots[1] @ noise[t, :size])
        if model.of == "positions":
            values.append(emitted(t, state))
        elif t == 0:
            values.append(affine(model.first_centre, model.first_scale.sqrt().numpy()[:, None] * noise[0, size:]))
        else:
            values.append(values[-1] + emitted(t, state))
    factors = np.concatenate(values)
    return factors[:, 0], factors[:, 1:] @ factors[:, 1:].T


def given(values: np.ndarray, mean: np.ndarray, cov: np.ndarray, wanted: slice) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the wanted entries of a Gaussian, given the first entries, of which some are missing."""
    seen = np.flatnonzero(~np.isnan(values))
    gain = np.linalg.solve(cov[np.ix_(seen, seen)], cov[seen, wanted]).T
    return mean[wanted] + gain @ (values[seen] - mean[seen]), np.diag(cov[wanted, wanted] - gain @ cov[seen, wanted])


@pytest.mark.parametrize("of", ["positions", "increments"])
def test_gaps_agree_with_the_joint_gaussian(rng, of):
    """Scores, predictions of each step and predictions of later steps are those of one Gaussian, whatever is missing, an empty sequence included."""
    model = fit(LinearGaussianHMM(2, 2, of), [rng.normal(size=(length, 2)).cumsum(0) + 0.7 * np.arange(length)[:, None] for length in (9, 6, 12, 3)], 3, 0)
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
        exact = stats.multivariate_normal(mean[seen], cov[np.ix_(seen, seen)]).logpdf(values[seen]) if len(seen) else 0.0
        assert float(scores[n]) == pytest.approx(exact, rel=1e-9)
        for t in range(len(sequence)):
            np.testing.assert_allclose(each[n][t], given(values[: 2 * t], mean, cov, slice(2 * t, 2 * t + 2))[0], rtol=1e-9, atol=1e-9)
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


def test_saved_loaded_and_resumed(rng, tmp_path):
    data = random_vectors(rng, longest=8)

    def trained(epochs: int, **more) -> LinearGaussianHMM:
        keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
        return fit(LinearGaussianHMM(2, 2), data, epochs, 0, batch_size=8, callbacks=[keep], enable_checkpointing=True, **more)

    whole = trained(3)
    assert_identical_parameters(whole, load(tmp_path / "epoch=2.ckpt"))
    assert_identical_parameters(whole, trained(3, ckpt_path=str(tmp_path / "epoch=0.ckpt")))


def test_bad_input_is_said():
    with pytest.raises(ValueError, match="`steps` must be a whole number of at least 1, but is 0"):
        LinearGaussianHMM(2, 1).predict_next([[[1.0]]], steps=0)
    with pytest.raises(ValueError, match="`of` must be one of positions, increments, but is 'speeds'"):
        LinearGaussianHMM(2, 2, "speeds")
    with pytest.raises(ValueError, match="at least two steps somewhere"):
        fit(LinearGaussianHMM(2, 1), [[[1.0]], [[3.0]]], 1)
    with pytest.raises(ValueError, match="position 1 of sequence 0 is inf"):
        fit(LinearGaussianHMM(2, 1), [[[1.0], [math.inf]]], 1)
