"""Newton's method for many small problems at once, with parameters that are tied or frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST_CURVATURE = 1e-10  # smallest curvature of a problem, relative to its largest one
_CONVERGED = 1e-12  # relative gain of a Newton step that is the last one
_ENTRIES_AT_ONCE = 1 << 22  # size of temporary arrays


class Curvature(NamedTuple):
    """Values (...), gradients (..., M) and Hessian matrices (..., M, M) of functions of M parameters."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor

    def plus(self, other: Curvature) -> Curvature:
        """Returns the curvature of the sum of two functions."""
        return Curvature(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def maximize_by_newton(evaluate: Callable[[Tensor], Curvature], start: Tensor, most: int = 100) -> Tensor:
    """Maximizes functions of M parameters each by Newton's method with step halving.

    Directions in which a function is not concave are ascended with the absolute value of their curvature. The last step
    of each problem is one whose expected gain is below the rounding error of the value, so that the result is a smooth
    function of the data.

    Args:
        evaluate: Computes values, gradients and Hessian matrices at (..., M) points.
        start: (..., M) starting points.
        most: Maximum number of Newton steps.

    Returns:
        (..., M) points whose values are not below those of the starting points.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions.iterative_newton import Curvature, maximize_by_newton
        >>> def concave(x):
        ...     return Curvature(-(x - 3).square().sum(-1), -2 * (x - 3), -2 * torch.eye(1).expand(*x.shape, 1))
        >>> maximize_by_newton(concave, torch.zeros(2, 1)).flatten()
        tensor([3., 3.])
    """
    point, found = start, evaluate(start)
    running = torch.ones_like(found.value, dtype=torch.bool)
    for _ in range(most):
        direction = _direction(found)
        gain = (found.gradient * direction).sum(-1)
        last = gain <= _CONVERGED * (1 + found.value.abs())
        size = running.to(point.dtype)
        for _ in range(60):
            moved = point + size.unsqueeze(-1) * direction
            tried = evaluate(moved)
            # A comparison with NaN is false.
            worse = running & ~last & ~(tried.value >= found.value)
            if not bool(worse.any()):
                break
            size = torch.where(worse, size / 2, size)
        accepted = running & ~worse
        point = torch.where(accepted.unsqueeze(-1), moved, point)
        running = accepted & ~last
        if not bool(running.any()):
            break
        found = Curvature(
            torch.where(accepted, tried.value, found.value),
            torch.where(accepted.unsqueeze(-1), tried.gradient, found.gradient),
            torch.where(accepted.unsqueeze(-1).unsqueeze(-1), tried.hessian, found.hessian),
        )
    return point


def _direction(found: Curvature) -> Tensor:
    """Returns the Newton step, in which the curvatures are positive and bounded from below."""
    sizes, vectors = torch.linalg.eigh(-found.hessian)
    sizes = sizes.abs()
    floor = _SMALLEST_CURVATURE * sizes.amax(-1, keepdim=True)
    sizes = torch.maximum(sizes, floor).clamp(min=torch.finfo(sizes.dtype).tiny)
    return (vectors @ ((vectors.mT @ found.gradient.unsqueeze(-1)) / sizes.unsqueeze(-1))).squeeze(-1)


# Ties and frozen entries


def number_free(num_states: int, tied: Tensor, frozen: Tensor) -> Tensor | None:
    """Numbers the free parameters of S states with M entries each.

    Args:
        num_states: Number of states S.
        tied: (M,) mask of the entries that all states share.
        frozen: (M,) mask of the entries that keep their values.

    Returns:
        (S, M) numbers, which are -1 for frozen entries, or ``None`` if all entries are free.
    """
    if not bool((tied | frozen).any()):
        return None
    numbers = torch.arange(num_states * len(tied)).view(num_states, -1)
    numbers = torch.where(frozen, -1, torch.where(tied, numbers[0], numbers))
    return torch.unique(numbers, return_inverse=True)[1] - int(bool(frozen.any()))


def expand(values: Tensor, free: Tensor, start: Tensor) -> Tensor:
    """Converts (G, F) free parameters to (S, G, M) entries. Frozen entries are those of `start`."""
    if not values.shape[-1]:
        return start
    entries = values[:, free.clamp(min=0)].transpose(0, 1)
    return torch.where((free < 0).unsqueeze(1), start, entries)


def first_of(packed: Tensor, free: Tensor) -> Tensor:
    """Returns the (G, F) free parameters of (S, G, M) entries. A tied parameter is that of the first state."""
    size = int(free.max()) + 1
    values = packed.new_zeros(packed.shape[1], size)
    for state in range(len(free) - 1, -1, -1):
        kept = free[state] >= 0
        values[:, free[state][kept]] = packed[state][:, kept]
    return values


def gather(gradient: Tensor, free: Tensor) -> Tensor:
    """Sums (S, G, M) gradients over the entries of each free parameter: (G, F)."""
    return torch.einsum("sgm,smf->gf", gradient, _one_hot(free, gradient))


def gather_matrices(hessian: Tensor, free: Tensor) -> Tensor:
    """Sums (S, G, M, M) Hessian matrices over the entries of pairs of free parameters: (G, F, F)."""
    chosen = _one_hot(free, hessian)
    return torch.einsum("sgmn,smf,snh->gfh", hessian, chosen, chosen)


def _one_hot(free: Tensor, like: Tensor) -> Tensor:
    numbers = torch.arange(int(free.max()) + 1, device=like.device)
    return (free.unsqueeze(-1) == numbers).to(like.dtype)


# Linear predictors


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
