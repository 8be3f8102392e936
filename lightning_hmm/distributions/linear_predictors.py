"""Log-likelihoods of linear predictors and their derivatives, for Newton's method."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_hmm.distributions.newton import Curvature

_ENTRIES_AT_ONCE = 1 << 22  # size of temporary arrays


def weighted_products(weights: Tensor, design: Tensor) -> Tensor:
    """Computes the sums over steps of weights times products of columns, for the Hessian of a linear predictor.

    Args:
        weights: (steps, B) weights.
        design: (steps, Q) columns.

    Returns:
        (B, Q, Q) sums.
    """
    size = design.shape[1]
    total = weights.new_zeros(weights.shape[1], size * size)
    pieces = max(1, _ENTRIES_AT_ONCE // (size * size))
    for mine, rows in zip(weights.split(pieces), design.split(pieces), strict=True):
        total += mine.T @ (rows.unsqueeze(2) * rows.unsqueeze(1)).flatten(1)
    return total.unflatten(1, (size, size))


def softmax_curvature(
    coefficients: Tensor, design: Tensor, targets: Tensor, possible: Tensor | None = None
) -> Curvature:
    """Returns the weighted log-likelihood of multinomial logistic regressions and its derivatives.

    Args:
        coefficients: (S, V, Q) coefficients of S regressions with V outcomes.
        design: (steps, Q) columns.
        targets: (steps, S, V) weights of the outcomes.
        possible: (S, V) mask of the outcomes that are possible. By default all are.

    Returns:
        Value (S,), gradient (S, V * Q) and Hessian (S, V * Q, V * Q).
    """
    states, outcomes, size = coefficients.shape
    value = coefficients.new_zeros(states)
    slope = torch.zeros_like(coefficients)
    products = coefficients.new_zeros(states, outcomes, outcomes, size, size)
    for rows, wanted in _pieces(design, targets, outcomes * outcomes * states):
        scores = (rows @ coefficients.flatten(0, 1).T).unflatten(1, (states, outcomes))
        if possible is not None:
            scores = scores.masked_fill(~possible, -torch.inf)
        logs = scores.log_softmax(-1)
        probs, total = logs.exp(), wanted.sum(-1, keepdim=True)
        value = value + torch.where(wanted > 0, logs * wanted, 0.0).sum((0, 2))
        slope += ((wanted - total * probs).flatten(1).T @ rows).unflatten(0, (states, outcomes))
        bends = total.unsqueeze(-1) * (probs.diag_embed() - probs.unsqueeze(-1) * probs.unsqueeze(-2))
        products -= weighted_products(bends.flatten(1), rows).unflatten(0, (states, outcomes, outcomes))
    return Curvature(value, slope.flatten(1), products.transpose(2, 3).flatten(3).flatten(1, 2))


def _pieces(design: Tensor, targets: Tensor, entries: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, _ENTRIES_AT_ONCE // entries)
    yield from zip(design.split(size), targets.split(size), strict=True)


def ridge_curvature(packed: Tensor, strength: float) -> Curvature:
    """Returns the log density of a normal prior with mean 0 and variance 1 / strength of each entry."""
    hessian = -strength * torch.eye(packed.shape[-1], dtype=packed.dtype, device=packed.device)
    return Curvature(
        -strength / 2 * packed.square().sum(-1),
        -strength * packed,
        hessian.expand(*packed.shape, packed.shape[-1]),
    )
