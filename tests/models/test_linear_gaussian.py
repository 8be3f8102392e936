"""EM of linear-Gaussian models: it never falls, its M-step is a maximum, missing values and batches do not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

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


def test_the_m_step_is_a_maximum(rng):
    """Of the expected log-density: by its gradient in the parameters, which Fisher's identity makes that of the likelihood at the old ones."""
    data = random_vectors(rng, num_sequences=5, longest=8, missing=0.2)
    model = LinearGaussianHMM(2, 2).parameters_in_units
    statistics = kalman.expected_statistics(model, data, torch.ones(5, dtype=torch.float64))
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

    exact = gradients(model, lambda free: kalman.log_likelihood(free, data).sum())
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
