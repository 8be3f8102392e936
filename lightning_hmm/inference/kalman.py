r"""Exact inference in linear-Gaussian state-space models.

.. math:: x_0 \sim \mathcal{N}(m, P), \qquad x_t \sim \mathcal{N}(A x_{t-1} + b, Q), \qquad y_t \sim \mathcal{N}(C x_t + c, R)

N sequences, d entries of a state, D of an observation. All sequences take a step at once. Missing entries (NaN) are marginalised one by one.
Covariances do not depend on what is observed, but on where something is: they are reckoned once for all sequences alike in that, of U kinds. Time
O(longest x (U (d^3 + D^3) + N d^2)). Everything is plain torch, so that gradients flow through it.
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

    def of_first(self, size: int) -> Posterior:
        """The posterior of the first `size` entries of the state."""
        means, covs = slice(None, size), (slice(None), slice(None, size), slice(None, size))
        return Posterior(self.log_likelihood, self.filtered_mean[:, means], self.filtered_cov[covs], self.mean[:, means], self.cov[covs], self.cross_cov[covs])


class _Filtered(NamedTuple):
    """(N,) and, for each of T steps, means (N, d) and covariances (U, d, d) before and after its observation; and (N,) the kind of each sequence."""

    log_likelihood: Tensor
    predicted: list[tuple[Tensor, Tensor]]
    updated: list[tuple[Tensor, Tensor]]
    kind: Tensor


def log_likelihood(model: LinearGaussian, sequences: Sequences) -> Tensor:
    """(N,) log p(y_1:T)."""
    return _filter(model, sequences).log_likelihood


def posterior(model: LinearGaussian, sequences: Sequences) -> Posterior:
    """Filtered and smoothed states (Rauch et al., 1965)."""
    log_likelihood, predicted, updated, kind = _filter(model, sequences)
    if not updated:
        size = len(model.initial_mean)
        none, nones = model.initial_mean.new_zeros(0, size), model.initial_mean.new_zeros(0, size, size)
        return Posterior(log_likelihood, none, nones, none, nones, nones)
    smoothed, crosses = updated[-1:], []
    for t in range(len(updated) - 2, -1, -1):  # steps past the end of a sequence are missing ones, which add nothing to those before
        (mean, cov), (next_mean, next_cov), (last_mean, last_cov) = updated[t], predicted[t + 1], smoothed[-1]
        gain = torch.linalg.solve(next_cov, model.transition @ cov).mT
        crosses.append(last_cov @ gain.mT)
        smoothed.append((mean + _times(gain, last_mean - next_mean, kind), cov + gain @ (last_cov - next_cov) @ gain.mT))
    crosses.append(torch.zeros_like(updated[0][1]))

    def packed(steps: list[Tensor]) -> Tensor:
        return sequences.packed(torch.stack(steps, dim=1))

    return Posterior(
        log_likelihood,
        packed([mean for mean, _ in updated]),
        packed([cov[kind] for _, cov in updated]),
        packed([mean for mean, _ in reversed(smoothed)]),
        packed([cov[kind] for _, cov in reversed(smoothed)]),
        packed([cross[kind] for cross in reversed(crosses)]),
    )


class Statistics(NamedTuple):
    """Expected sufficient statistics of all sequences, each times its weight, with z = (x, 1) and z_t-1 the state before a transition.

    starts: (d + 1, d + 1) sum of E[z_1 z_1'].
    before: (d + 1, d + 1) sum of E[z_t-1 z_t-1']; across: (d, d + 1) of E[x_t z_t-1']; after: (d, d) of E[x_t x_t'].
    emitters: (D, d + 1, d + 1) sum of E[z_t z_t'] over the steps at which a feature is observed; products: (D, d + 1) of y_t E[z_t]; squares: (D,) of y_t^2.
    """

    starts: Tensor
    before: Tensor
    across: Tensor
    after: Tensor
    emitters: Tensor
    products: Tensor
    squares: Tensor


def summed(model: LinearGaussian, first_variance: Tensor) -> LinearGaussian:
    """The model of cumulative sums of what `model` emits, whose state holds (x_t, y_t).

    y_1 ~ N(0, diag first_variance), independent of the states, and y_t = y_t-1 + C x_t + c + noise from the second step on.
    """
    size, features = len(model.initial_mean), len(model.emission_offset)
    emission, none = model.emission, model.emission.new_zeros(size, features)
    unit = torch.eye(features, dtype=none.dtype, device=none.device)
    shared = model.transition_cov @ emission.T
    return LinearGaussian(
        initial_mean=torch.cat([model.initial_mean, none[0]]),
        initial_cov=torch.block_diag(model.initial_cov, first_variance.diag()),
        transition=torch.cat([torch.cat([model.transition, none], 1), torch.cat([emission @ model.transition, unit], 1)]),
        transition_offset=torch.cat([model.transition_offset, emission @ model.transition_offset + model.emission_offset]),
        transition_cov=torch.cat(
            [torch.cat([model.transition_cov, shared], 1), torch.cat([shared.T, emission @ model.transition_cov @ emission.T + model.emission_cov], 1)]
        ),
        emission=torch.cat([none.T, unit], 1),
        emission_offset=none[0],
        emission_cov=torch.zeros_like(unit),
    )


class _Emissions(NamedTuple):
    """Moments of what a model emits at each step: (steps, D) mean and variance, (steps, D, d) covariance with the state, (steps, D) whether it counts."""

    mean: Tensor
    variance: Tensor
    shared: Tensor
    there: Tensor


def _increments(joint: Posterior, sequences: Sequences, size: int) -> _Emissions:
    """What was added to a sum from each step to the next, given the posterior of (x_t, y_t).

    Increments after the last observation of a feature do not count: the data do not depend on them.
    """
    before = torch.cat([joint.mean[:1], joint.mean[:-1]])[:, size:]
    covs = joint.cov[:, size:, size:].diagonal(dim1=1, dim2=2)
    variance = covs + torch.cat([covs[:1], covs[:-1]]) - 2 * joint.cross_cov[:, size:, size:].diagonal(dim1=1, dim2=2)
    observed = ~sequences.padded().isnan()
    there = sequences.packed(observed.flip(1).cumsum(1).flip(1) > 0)
    there[sequences.offsets[:-1][sequences.lengths > 0].to(there.device)] = False  # the first value of a sequence is no increment
    return _Emissions(joint.mean[:, size:] - before, variance, joint.cov[:, size:, :size] - joint.cross_cov[:, :size, size:].mT, there)


def expected_statistics(model: LinearGaussian, sequences: Sequences, weights: Tensor, first_variance: Tensor | None = None) -> Statistics:
    """The E-step, for (N,) weights of the sequences. With `first_variance` the sequences are sums of what the model emits, as `summed` describes."""
    size = len(model.initial_mean)
    if first_variance is None:
        found = posterior(model, sequences)
        values = sequences.values.to(found.mean)
        emitted = _Emissions(values.nan_to_num(nan=0.0), torch.zeros_like(values), values.new_zeros(*values.shape, size), ~values.isnan())
    else:
        joint = posterior(summed(model, first_variance), sequences)
        found, emitted = joint.of_first(size), _increments(joint, sequences, size)
    share = sequences.repeat_interleave(weights).to(found.mean)
    one = found.mean.new_ones(len(found.mean), 1)
    mean = torch.cat([found.mean, one], 1)
    second = mean.unsqueeze(2) * mean.unsqueeze(1)
    second[:, :-1, :-1] += found.cov
    first = torch.zeros(len(mean), dtype=torch.bool, device=mean.device)
    first[sequences.offsets[:-1][sequences.lengths > 0].to(mean.device)] = True
    later = ~first
    cross = found.mean[1:].unsqueeze(2) * mean[:-1].unsqueeze(1)
    cross[:, :, :-1] += found.cross_cov[1:]
    moved = (share * later)[1:]
    there = emitted.there.to(mean) * share.unsqueeze(1)  # (steps, D)
    products = (there * emitted.mean).T @ mean
    products[:, :-1] += (there.unsqueeze(2) * emitted.shared).sum(0)
    return Statistics(
        starts=((share * first) @ second.flatten(1)).view(size + 1, size + 1),
        before=(moved @ second[:-1].flatten(1)).view(size + 1, size + 1),
        across=(moved @ cross.flatten(1)).view(size, size + 1),
        after=(moved @ second[1:, :-1, :-1].flatten(1)).view(size, size),
        emitters=(there.T @ second.flatten(1)).view(-1, size + 1, size + 1),
        products=products,
        squares=(there * (emitted.mean.square() + emitted.variance)).sum(0),
    )


def predict_next(model: LinearGaussian, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(steps, D) mean and (steps, D, D) covariance of p(y_{t+1} | y_1:t), for each step t."""
    found = posterior(model, sequences)
    return emitted(model, *later(model, found.filtered_mean, found.filtered_cov))


def later(model: LinearGaussian, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """(..., d) mean and (..., d, d) covariance of the state, one step after it has these."""
    return mean @ model.transition.T + model.transition_offset, model.transition @ cov @ model.transition.T + model.transition_cov


def emitted(model: LinearGaussian, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """(..., D) mean and (..., D, D) covariance of the observation, where the state has these."""
    return mean @ model.emission.T + model.emission_offset, model.emission @ cov @ model.emission.T + model.emission_cov


def _filter(model: LinearGaussian, sequences: Sequences) -> _Filtered:
    _check(model, sequences)
    values = sequences.padded().to(model.initial_mean)  # (N, T, D)
    kinds, kind = (~values.isnan()).unique(dim=0, return_inverse=True) if values.numel() else (values.new_zeros(0), torch.arange(len(values)))
    mean = model.initial_mean.expand(len(sequences), -1)
    cov = model.initial_cov.expand(len(kinds), -1, -1)
    identity, unit = torch.eye(mean.shape[1]).to(mean), torch.eye(values.shape[2]).to(mean)
    total = mean.new_zeros(len(sequences))
    predicted, updated = [], []
    for t in range(values.shape[1]):
        if t > 0:
            mean, cov = later(model, mean, cov)
        predicted.append((mean, cov))
        # A missing entry becomes one of a noise of its own, whose value is its mean: it says nothing, and its density is left out below.
        there = kinds[:, t]
        emission = model.emission * there.unsqueeze(2)
        noise = torch.where(there.unsqueeze(2) & there.unsqueeze(1), model.emission_cov, unit)
        seen = there[kind]
        surprise = torch.where(seen, values[:, t], 0.0) - torch.where(seen, mean @ model.emission.T + model.emission_offset, 0.0)
        factor = torch.linalg.cholesky(emission @ cov @ emission.mT + noise)
        gain = torch.cholesky_solve(emission @ cov, factor).mT
        whitened = _times(torch.linalg.solve_triangular(factor, unit, upper=False), surprise, kind)
        of_kind = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1) + there.to(mean).sum(1) * math.log(2 * math.pi)
        total = total - (whitened.square().sum(1) + of_kind[kind]) / 2
        mean = mean + _times(gain, surprise, kind)
        kept = identity - gain @ emission
        cov = kept @ cov @ kept.mT + gain @ noise @ gain.mT  # Joseph's form stays symmetric and positive
        updated.append((mean, cov))
    return _Filtered(total, predicted, updated, kind)


def _times(matrices: Tensor, vectors: Tensor, kind: Tensor) -> Tensor:
    """(U, i, j), (N, j) -> (N, i): each vector times the matrix of its kind."""
    return vectors @ matrices[0].T if len(matrices) == 1 else (matrices[kind] @ vectors.unsqueeze(2)).squeeze(2)


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
