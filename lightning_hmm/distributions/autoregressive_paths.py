"""Lags of sequences, and samples and forecasts of autoregressions whose coefficients depend on the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def lags_of(values: Tensor, at: Tensor, start: Tensor, order: int, outside: Tensor) -> Tensor:
    """Returns the (N, L D) rows of `values` (steps, D) that are 1 to L = `order` steps before N others.

    Args:
        values: Values of all sequences.
        at: (N,) numbers of the steps.
        start: (N,) numbers of the first steps of their sequences.
        order: Number of lags.
        outside: (D,) value of lags before the first step.
    """
    lags = []
    for lag in range(1, order + 1):
        inside = (at - lag >= start)[:, None]
        lags.append(torch.where(inside, values[(at - lag).clamp(min=0)], outside))
    return torch.cat(lags, 1)


def simulate(
    path: Tensor, coefficients: Tensor, covariance: Tensor, past: Sequence[Tensor], generator: torch.Generator
) -> Tensor:
    """Draws the steps of N sequences in turn.

    Args:
        path: (N, T) states.
        coefficients: (K, D, L D + 1) coefficients of the lags and of 1.
        covariance: (K, D, D) covariances of the noise.
        past: The L values (N, D) before the first step, the last one first.
        generator: Random number generator.

    Returns:
        (N, T, D) values.
    """
    factor, lags, drawn = torch.linalg.cholesky(covariance), list(past), []
    size = lags[0].shape
    for now in path.T:
        noise = torch.randn(size, generator=generator, dtype=torch.float64).to(factor.device)
        regressors = torch.cat([*lags, noise.new_ones(len(path), 1)], 1).unsqueeze(-1)
        value = (coefficients[now] @ regressors + factor[now] @ noise.unsqueeze(-1)).squeeze(-1)
        lags = [value, *lags[:-1]]
        drawn.append(value)
    return torch.stack(drawn, 1) if drawn else lags[0].unsqueeze(1)[:, :0]


def forecast_moments(
    regressors: Tensor,
    coefficients: Tensor,
    covariance: Tensor,
    state_probs: Tensor,
    move: Callable[[Tensor, int], Tensor],
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Computes the exact means and variances (N, D) of the observation `steps` steps after the end of N sequences.

    Args:
        regressors: (N, F) lags and 1 of the first step after the end, with F = L D + 1.
        coefficients: (S, D, F) coefficients.
        covariance: (S, D, D) covariances of the noise.
        state_probs: (N, S) probabilities of the state of the first step after the end.
        move: Linear function of (M, S) messages and of the number of steps after the first one, which performs the
            transition into that step.
        steps: Number of steps.
    """
    size, width = coefficients.shape[1:]
    matrix = torch.zeros(len(coefficients), width, width).to(coefficients)  # the next regressors are linear in these
    matrix[:, :size] = coefficients
    kept = torch.arange(width - 1 - size)
    matrix[:, kept + size, kept] = 1.0
    matrix[:, -1, -1] = 1.0
    noise = torch.zeros_like(matrix)
    noise[:, :size, :size] = covariance
    # (N, S, F, F) second moments of the regressors of the next step, times the probability of its state.
    moments = state_probs[..., None, None] * (regressors[:, None, :, None] * regressors[:, None, None])
    for step in range(steps):
        if step:
            flat = moments.permute(0, 2, 3, 1)
            moments = move(flat.reshape(-1, flat.shape[-1]), step).reshape(flat.shape).permute(0, 3, 1, 2)
        moments = matrix @ moments @ matrix.mT + moments[..., -1:, -1:] * noise
    total = moments.sum(1)
    mean = total[:, :size, -1]
    return mean, total[:, :size, :size].diagonal(dim1=-2, dim2=-1) - mean**2
