r"""Exact inference in linear-Gaussian state-space models.

.. math:: x_0 \sim \mathcal{N}(m, P), \qquad x_t \sim \mathcal{N}(A x_{t-1} + b, Q), \qquad y_t \sim \mathcal{N}(C x_t + c, R)

N sequences, d entries of a state, D of an observation. All sequences take a step at once: time O(longest x N x (d^3 + D^3)). Missing
entries (NaN) are marginalised one by one. Everything is plain torch, so that gradients flow through it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hmm.sequences import Sequences


class LinearGaussian(NamedTuple):
    """The parameters: initial_mean (d,), initial_cov (d, d), transition (d, d), transition_offset (d,), transition_cov (d, d), emission (D, d),
    emission_offset (D,), emission_cov (D, D)."""

    initial_mean: Tensor
    initial_cov: Tensor
    transition: Tensor
    transition_offset: Tensor
    transition_cov: Tensor
    emission: Tensor
    emission_offset: Tensor
    emission_cov: Tensor


class Posterior(NamedTuple):
    """What the data say about the states; a row for each step, packed like the values of the sequences.

    log_likelihood: (N,) log p(y_1:T).
    filtered_mean: (steps, d) and filtered_cov: (steps, d, d) of p(x_t | y_1:t).
    mean: (steps, d) and cov: (steps, d, d) of p(x_t | y_1:T).
    cross_cov: (steps, d, d) Cov(x_t, x_{t-1} | y_1:T); zeros at the first step of a sequence.
    """

    log_likelihood: Tensor
    filtered_mean: Tensor
    filtered_cov: Tensor
    mean: Tensor
    cov: Tensor
    cross_cov: Tensor


class _Filtered(NamedTuple):
    """(N,) and, for each of T steps, (N, d) and (N, d, d): before and after its observation."""

    log_likelihood: Tensor
    predicted: list[tuple[Tensor, Tensor]]
    updated: list[tuple[Tensor, Tensor]]


def log_likelihood(model: LinearGaussian, sequences: Sequences) -> Tensor:
    """(N,) log p(y_1:T)."""
    return _filter(model, sequences).log_likelihood


def posterior(model: LinearGaussian, sequences: Sequences) -> Posterior:
    """Filtered and smoothed states (Rauch et al., 1965)."""
    log_likelihood, predicted, updated = _filter(model, sequences)
    if not updated:
        size = len(model.initial_mean)
        none, nones = model.initial_mean.new_zeros(0, size), model.initial_mean.new_zeros(0, size, size)
        return Posterior(log_likelihood, none, nones, none, nones, nones)
    smoothed, crosses = updated[-1:], []
    for t in range(len(updated) - 2, -1, -1):  # steps past the end of a sequence are missing ones, which add nothing to those before
        (mean, cov), (next_mean, next_cov), (last_mean, last_cov) = updated[t], predicted[t + 1], smoothed[-1]
        gain = torch.linalg.solve(next_cov, model.transition @ cov).mT
        crosses.append(last_cov @ gain.mT)
        smoothed.append((mean + _times(gain, last_mean - next_mean), cov + gain @ (last_cov - next_cov) @ gain.mT))
    crosses.append(torch.zeros_like(updated[0][1]))

    def packed(steps: list[Tensor]) -> Tensor:
        return sequences.packed(torch.stack(steps, dim=1))

    return Posterior(
        log_likelihood,
        packed([mean for mean, _ in updated]),
        packed([cov for _, cov in updated]),
        packed([mean for mean, _ in reversed(smoothed)]),
        packed([cov for _, cov in reversed(smoothed)]),
        packed(crosses[::-1]),
    )


def predict_next(model: LinearGaussian, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(steps, D) mean and (steps, D, D) covariance of p(y_{t+1} | y_1:t), for each step t."""
    found = posterior(model, sequences)
    mean = found.filtered_mean @ model.transition.T + model.transition_offset
    cov = model.transition @ found.filtered_cov @ model.transition.T + model.transition_cov
    return mean @ model.emission.T + model.emission_offset, model.emission @ cov @ model.emission.T + model.emission_cov


def _filter(model: LinearGaussian, sequences: Sequences) -> _Filtered:
    _check(model, sequences)
    values = sequences.padded().to(model.initial_mean)  # (N, T, D)
    mean = model.initial_mean.expand(len(sequences), -1)
    cov = model.initial_cov.expand(len(sequences), -1, -1)
    identity, unit = torch.eye(mean.shape[1]).to(mean), torch.eye(values.shape[2]).to(mean)
    total = mean.new_zeros(len(sequences))
    predicted, updated = [], []
    for t in range(values.shape[1]):
        if t > 0:
            mean = mean @ model.transition.T + model.transition_offset
            cov = model.transition @ cov @ model.transition.T + model.transition_cov
        predicted.append((mean, cov))
        # A missing entry becomes one of a noise of its own, whose value is its mean: it says nothing, and its density is left out below.
        there = ~values[:, t].isnan()
        emission = model.emission * there.unsqueeze(2)
        noise = torch.where(there.unsqueeze(2) & there.unsqueeze(1), model.emission_cov, unit)
        surprise = torch.where(there, values[:, t], 0.0) - torch.where(there, mean @ model.emission.T + model.emission_offset, 0.0)
        factor = torch.linalg.cholesky(emission @ cov @ emission.mT + noise)
        gain = torch.cholesky_solve(emission @ cov, factor).mT
        whitened = torch.linalg.solve_triangular(factor, surprise.unsqueeze(2), upper=False).squeeze(2)
        log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
        total = total - (whitened.square().sum(1) + log_det + there.to(mean).sum(1) * math.log(2 * math.pi)) / 2
        mean = mean + _times(gain, surprise)
        kept = identity - gain @ emission
        cov = kept @ cov @ kept.mT + gain @ noise @ gain.mT  # Joseph's form stays symmetric and positive
        updated.append((mean, cov))
    return _Filtered(total, predicted, updated)


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """(N, i, j), (N, j) -> (N, i)."""
    return (matrices @ vectors.unsqueeze(2)).squeeze(2)


def _check(model: LinearGaussian, sequences: Sequences) -> None:
    size, features = len(model.initial_mean), len(model.emission_offset)
    wanted = {"initial_cov": (size, size), "transition": (size, size), "transition_offset": (size,), "transition_cov": (size, size)}
    wanted |= {"emission": (features, size), "emission_cov": (features, features)}
    for name, shape in wanted.items():
        if tuple(getattr(model, name).shape) != shape:
            raise ValueError(
                f"`{name}` must be {shape} for states of {size} and observations of {features} entries, but is {tuple(getattr(model, name).shape)} instead."
            )
    sequences.check(None, features)
