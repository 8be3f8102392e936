r"""Exact inference in linear-Gaussian state-space models.

.. math:: x_0 \sim \mathcal{N}(m, P), \qquad x_t \sim \mathcal{N}(A x_{t-1} + b, Q), \qquad
    y_t \sim \mathcal{N}(C x_t + c, R)

There are N sequences; d is the number of entries of a state and D that of an observation. All sequences take a step at
once. Missing entries (NaN) are marginalized one by one. The covariances depend on which entries are missing, but not on
the values of the others, so they are computed once for each of the U different patterns of missing entries. The time is
O(longest x (U (d^3 + D^3) + N d^2)). Everything is plain torch and differentiable.

Example:
    >>> import torch
    >>> from lightning_hmm.inference import kalman
    >>> from lightning_hmm.sequences import Sequences
    >>> one, zero = torch.ones(1, 1), torch.zeros(1)
    >>> walk = kalman.LinearGaussian(zero, one, one, zero, one, one, zero, one)  # a random walk, observed with noise
    >>> steps = Sequences.from_lengths(torch.tensor([[1.0], [torch.nan], [1.0]]), [3])
    >>> kalman.posterior(walk, steps).mean.flatten()
    tensor([0.5714, 0.7143, 0.8571])
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hmm.sequences import Sequences


class LinearGaussian(NamedTuple):
    """Parameters of a linear-Gaussian state-space model.

    initial_mean: (d,) m.
    initial_cov: (d, d) P.
    transition: (d, d) A.
    transition_offset: (d,) b.
    transition_cov: (d, d) Q.
    emission: (D, d) C.
    emission_offset: (D,) c.
    emission_cov: (D, D) R.
    """

    initial_mean: Tensor
    initial_cov: Tensor
    transition: Tensor
    transition_offset: Tensor
    transition_cov: Tensor
    emission: Tensor
    emission_offset: Tensor
    emission_cov: Tensor


class GaussianPosterior(NamedTuple):
    """Filtered and smoothed states, one row per step, packed like the values of the sequences.

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

    def of_first(self, size: int) -> GaussianPosterior:
        """Returns the posterior of the first `size` entries of the state."""
        covs = (slice(None), slice(None, size), slice(None, size))
        return GaussianPosterior(
            self.log_likelihood,
            self.filtered_mean[:, :size],
            self.filtered_cov[covs],
            self.mean[:, :size],
            self.cov[covs],
            self.cross_cov[covs],
        )


class _Filtered(NamedTuple):
    """The result of the filter.

    log_likelihood: (N,).
    predicted: for each of T steps, (N, d) means and (U, d, d) covariances of the states before its observation.
    updated: the same after its observation.
    pattern: (N,) the number of the pattern of missing entries of each sequence, from 0 to U - 1.
    """

    log_likelihood: Tensor
    predicted: list[tuple[Tensor, Tensor]]
    updated: list[tuple[Tensor, Tensor]]
    pattern: Tensor


def log_likelihood(model: LinearGaussian, sequences: Sequences) -> Tensor:
    """Computes (N,) log p(y_1:T) with the Kalman filter."""
    return _filter(model, sequences).log_likelihood


def posterior(model: LinearGaussian, sequences: Sequences) -> GaussianPosterior:
    """Computes filtered and smoothed states with the Rauch-Tung-Striebel smoother (1965)."""
    log_likelihood, predicted, updated, pattern = _filter(model, sequences)
    if not updated:
        size = len(model.initial_mean)
        none, nones = model.initial_mean.new_zeros(0, size), model.initial_mean.new_zeros(0, size, size)
        return GaussianPosterior(log_likelihood, none, nones, none, nones, nones)
    smoothed, crosses = updated[-1:], []
    # Steps past the end of a sequence are missing, so they do not change the states before them.
    for t in range(len(updated) - 2, -1, -1):
        (mean, cov), (next_mean, next_cov), (last_mean, last_cov) = updated[t], predicted[t + 1], smoothed[-1]
        gain = torch.linalg.solve(next_cov, model.transition @ cov).mT
        crosses.append(last_cov @ gain.mT)
        smoothed.append(
            (mean + _times(gain, last_mean - next_mean, pattern), cov + gain @ (last_cov - next_cov) @ gain.mT)
        )
    crosses.append(torch.zeros_like(updated[0][1]))

    def packed(steps: list[Tensor]) -> Tensor:
        return sequences.packed(torch.stack(steps, dim=1))

    return GaussianPosterior(
        log_likelihood,
        packed([mean for mean, _ in updated]),
        packed([cov[pattern] for _, cov in updated]),
        packed([mean for mean, _ in reversed(smoothed)]),
        packed([cov[pattern] for _, cov in reversed(smoothed)]),
        packed([cross[pattern] for cross in reversed(crosses)]),
    )


class Statistics(NamedTuple):
    """Expected sufficient statistics, summed over all sequences with their weights, with z = (x, 1).

    starts: (d + 1, d + 1) sum of E[z_1 z_1'].
    before: (d + 1, d + 1) sum of E[z_t-1 z_t-1'] over all transitions.
    across: (d, d + 1) sum of E[x_t z_t-1'] over all transitions.
    after: (d, d) sum of E[x_t x_t'] over all transitions.
    emitters: (D, d + 1, d + 1) sum of E[z_t z_t'] over the steps at which a feature is observed.
    products: (D, d + 1) sum of y_t E[z_t] over the same steps.
    squares: (D,) sum of y_t^2 over the same steps.
    """

    starts: Tensor
    before: Tensor
    across: Tensor
    after: Tensor
    emitters: Tensor
    products: Tensor
    squares: Tensor


def cumulative_sum(model: LinearGaussian, first_variance: Tensor) -> LinearGaussian:
    """Returns the model of the cumulative sums y_t of the observations of `model`. Its state is (x_t, y_t).

    The first value y_1 ~ N(0, diag first_variance) is independent of the states. From the second step on,
    y_t = y_t-1 + C x_t + c + noise.
    """
    size, features = len(model.initial_mean), len(model.emission_offset)
    emission, none = model.emission, model.emission.new_zeros(size, features)
    unit = torch.eye(features, dtype=none.dtype, device=none.device)
    shared = model.transition_cov @ emission.T
    noise = emission @ model.transition_cov @ emission.T + model.emission_cov
    return LinearGaussian(
        initial_mean=torch.cat([model.initial_mean, none[0]]),
        initial_cov=torch.block_diag(model.initial_cov, first_variance.diag()),
        transition=_blocks(model.transition, none, emission @ model.transition, unit),
        transition_offset=torch.cat(
            [model.transition_offset, emission @ model.transition_offset + model.emission_offset]
        ),
        transition_cov=_blocks(model.transition_cov, shared, shared.T, noise),
        emission=torch.cat([none.T, unit], 1),
        emission_offset=none[0],
        emission_cov=torch.zeros_like(unit),
    )


def _blocks(upper_left: Tensor, upper_right: Tensor, lower_left: Tensor, lower_right: Tensor) -> Tensor:
    return torch.cat([torch.cat([upper_left, upper_right], 1), torch.cat([lower_left, lower_right], 1)])


class _Emissions(NamedTuple):
    """Posterior moments of the emission of each step.

    mean: (steps, D).
    variance: (steps, D).
    shared: (steps, D, d) covariance with the state.
    there: (steps, D) whether the emission is part of the statistics.
    """

    mean: Tensor
    variance: Tensor
    shared: Tensor
    there: Tensor


def _increments(joint: GaussianPosterior, sequences: Sequences, size: int) -> _Emissions:
    """Computes the moments of the increments y_t - y_t-1 from the posterior of (x_t, y_t), where y_t is a cumulative
    sum.

    Increments after the last observation of a feature are left out, because the data do not depend on them.
    """
    before = torch.cat([joint.mean[:1], joint.mean[:-1]])[:, size:]
    covs = joint.cov[:, size:, size:].diagonal(dim1=1, dim2=2)
    cross = joint.cross_cov[:, size:, size:].diagonal(dim1=1, dim2=2)
    variance = covs + torch.cat([covs[:1], covs[:-1]]) - 2 * cross
    observed = ~sequences.padded().isnan()
    there = sequences.packed(observed.flip(1).cumsum(1).flip(1) > 0)
    # The first value of a sequence is not an increment.
    there[sequences.offsets[:-1][sequences.lengths > 0].to(there.device)] = False
    shared = joint.cov[:, size:, :size] - joint.cross_cov[:, :size, size:].mT
    return _Emissions(joint.mean[:, size:] - before, variance, shared, there)


def expected_statistics(
    model: LinearGaussian, sequences: Sequences, weights: Tensor, first_variance: Tensor | None = None
) -> Statistics:
    """Computes the E-step.

    Args:
        model: Parameters.
        sequences: N sequences of vectors with D entries. Entries that are NaN are missing.
        weights: (N,) weights of the sequences.
        first_variance: (D,) variances of the first values, if the sequences are cumulative sums of the observations of
            the model. See `cumulative_sum`.
    """
    size = len(model.initial_mean)
    if first_variance is None:
        found = posterior(model, sequences)
        values = sequences.values.to(found.mean)
        emissions = _Emissions(
            mean=values.nan_to_num(nan=0.0),
            variance=torch.zeros_like(values),
            shared=values.new_zeros(*values.shape, size),
            there=~values.isnan(),
        )
    else:
        joint = posterior(cumulative_sum(model, first_variance), sequences)
        found, emissions = joint.of_first(size), _increments(joint, sequences, size)
    step_weights = sequences.repeat_interleave(weights).to(found.mean)
    one = found.mean.new_ones(len(found.mean), 1)
    mean = torch.cat([found.mean, one], 1)
    second = mean.unsqueeze(2) * mean.unsqueeze(1)
    second[:, :-1, :-1] += found.cov
    first = torch.zeros(len(mean), dtype=torch.bool, device=mean.device)
    first[sequences.offsets[:-1][sequences.lengths > 0].to(mean.device)] = True
    cross = found.mean[1:].unsqueeze(2) * mean[:-1].unsqueeze(1)
    cross[:, :, :-1] += found.cross_cov[1:]
    moved = (step_weights * ~first)[1:]
    there = emissions.there.to(mean) * step_weights.unsqueeze(1)  # (steps, D)
    products = (there * emissions.mean).T @ mean
    products[:, :-1] += (there.unsqueeze(2) * emissions.shared).sum(0)
    return Statistics(
        starts=((step_weights * first) @ second.flatten(1)).view(size + 1, size + 1),
        before=(moved @ second[:-1].flatten(1)).view(size + 1, size + 1),
        across=(moved @ cross.flatten(1)).view(size, size + 1),
        after=(moved @ second[1:, :-1, :-1].flatten(1)).view(size, size),
        emitters=(there.T @ second.flatten(1)).view(-1, size + 1, size + 1),
        products=products,
        squares=(there * (emissions.mean.square() + emissions.variance)).sum(0),
    )


def predict_next(model: LinearGaussian, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Computes the (steps, D) mean and (steps, D, D) covariance of p(y_{t+1} | y_1:t), for each step t."""
    found = posterior(model, sequences)
    return predict_observation(model, *predict_state(model, found.filtered_mean, found.filtered_cov))


def predict_state(model: LinearGaussian, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the (..., d) mean and (..., d, d) covariance of the next state from those of the present state."""
    next_cov = model.transition @ cov @ model.transition.T + model.transition_cov
    return mean @ model.transition.T + model.transition_offset, next_cov


def predict_observation(model: LinearGaussian, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the (..., D) mean and (..., D, D) covariance of the observation from those of the state."""
    spread = model.emission @ cov @ model.emission.T + model.emission_cov
    return mean @ model.emission.T + model.emission_offset, spread


def _filter(model: LinearGaussian, sequences: Sequences) -> _Filtered:
    _check(model, sequences)
    values = sequences.padded().to(model.initial_mean)  # (N, T, D)
    if values.numel():
        patterns, pattern = (~values.isnan()).unique(dim=0, return_inverse=True)
    else:
        patterns, pattern = values.new_zeros(0), torch.arange(len(values))
    mean = model.initial_mean.expand(len(sequences), -1)
    cov = model.initial_cov.expand(len(patterns), -1, -1)
    identity, unit = torch.eye(mean.shape[1]).to(mean), torch.eye(values.shape[2]).to(mean)
    total = mean.new_zeros(len(sequences))
    predicted, updated = [], []
    for t in range(values.shape[1]):
        if t > 0:
            mean, cov = predict_state(model, mean, cov)
        predicted.append((mean, cov))
        # A missing entry is replaced by independent noise of variance 1, observed at its mean. It does not change the
        # state, and its density is left out of the likelihood below.
        there = patterns[:, t]
        emission = model.emission * there.unsqueeze(2)
        noise = torch.where(there.unsqueeze(2) & there.unsqueeze(1), model.emission_cov, unit)
        seen = there[pattern]
        expected = mean @ model.emission.T + model.emission_offset
        innovation = torch.where(seen, values[:, t], 0.0) - torch.where(seen, expected, 0.0)
        factor = torch.linalg.cholesky(emission @ cov @ emission.mT + noise)
        gain = torch.cholesky_solve(emission @ cov, factor).mT
        whitened = _times(torch.linalg.solve_triangular(factor, unit, upper=False), innovation, pattern)
        log_norm = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1) + there.to(mean).sum(1) * math.log(2 * math.pi)
        total = total - (whitened.square().sum(1) + log_norm[pattern]) / 2
        mean = mean + _times(gain, innovation, pattern)
        kept = identity - gain @ emission
        cov = kept @ cov @ kept.mT + gain @ noise @ gain.mT  # Joseph's form stays symmetric and positive definite
        updated.append((mean, cov))
    return _Filtered(total, predicted, updated, pattern)


def _times(matrices: Tensor, vectors: Tensor, pattern: Tensor) -> Tensor:
    """Multiplies each of N vectors (N, j) by the matrix of its pattern (U, i, j). Returns (N, i)."""
    return vectors @ matrices[0].T if len(matrices) == 1 else (matrices[pattern] @ vectors.unsqueeze(2)).squeeze(2)


def _check(model: LinearGaussian, sequences: Sequences) -> None:
    size, features = len(model.initial_mean), len(model.emission_offset)
    wanted: dict[str, tuple[int, ...]] = {
        "initial_cov": (size, size),
        "transition": (size, size),
        "transition_offset": (size,),
        "transition_cov": (size, size),
        "emission": (features, size),
        "emission_cov": (features, features),
    }
    for name, shape in wanted.items():
        found = tuple(getattr(model, name).shape)
        if found != shape:
            raise ValueError(
                f"`{name}` must be {shape} for states of {size} and observations of {features} entries, "
                f"but is {found} instead."
            )
    sequences.check(None, features)
