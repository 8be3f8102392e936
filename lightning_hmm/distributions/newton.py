"""Newton's method for many small problems at once, whose derivatives are given.

`newton_autograd` has the variant that computes the derivatives by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST_CURVATURE = 1e-10  # smallest curvature of a problem, relative to its largest one
_CONVERGED = 1e-12  # relative gain of a Newton step that is the last one


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
        >>> from lightning_hmm.distributions.newton import Curvature, maximize_by_newton
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
