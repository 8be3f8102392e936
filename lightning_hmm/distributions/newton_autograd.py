"""Newton's method for many small problems at once, whose derivatives are computed by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hmm.distributions.parameters import Range

_MAX_STEPS = 60
_MAX_HALVINGS = 40
_CONVERGED = 1e-20  # squared length of the last step, in the metric of the curvature
_CLOSE = 1e-8  # the same, below which a full step is taken without comparing values, which differ by rounding only


class NewtonProblem:
    """Maximization of a sum of terms, one for each restart, state and column, over parameters that may be tied.

    Each term depends only on the parameters of its own restart, state and column. Without tied parameters, every term
    is a problem of its own; otherwise the states of a restart and column form one problem, in which a tied parameter
    has one value. The derivatives are computed by autograd.

    Args:
        objective: Function of the parameters (R, K, D) that returns the terms (R, K, D). They should have the scale of
            one observation, so that convergence is judged correctly.
        ranges: Range of each parameter.
        tied: Whether each parameter has the same value in all states.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions.newton_autograd import NewtonProblem
        >>> from lightning_hmm.distributions.parameters import POSITIVE
        >>> mean = torch.tensor([[[2.0], [5.0]]], dtype=torch.float64)
        >>> problem = NewtonProblem(lambda rate: rate.log() - rate * mean, [POSITIVE], [False])
        >>> problem.maximum([[torch.ones_like(mean)]])[0].flatten()
        tensor([0.5000, 0.2000], dtype=torch.float64)
    """

    def __init__(self, objective: Callable[..., Tensor], ranges: Sequence[Range], tied: Sequence[bool]) -> None:
        self.objective, self.ranges, self.tied = objective, list(ranges), list(tied)
        self.joint = any(tied)  # whether the states of a column form one problem

    @torch.no_grad()
    def maximum(self, starts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Returns the parameters at a local maximum that is at least as good as each of the starting values.

        On a CPU, iterations stop at convergence. Elsewhere their number is fixed, so that no value is read on the host.

        Args:
            starts: One or more choices of starting values, each a tensor (R, K, D) for each parameter.
        """
        self._allocate(starts[0][0])
        place, value = self._best([self._coordinates(start) for start in starts])
        on_host = place.is_cpu
        for _ in range(_MAX_STEPS):
            gradient, curvature = self._derivatives(place)
            step = _ascent(gradient, curvature)
            length = (gradient * step).sum(-1)
            place, value = self._advance(place, value, step, length < _CLOSE)
            if on_host and not bool((length > _CONVERGED).any()):
                break
        return self._parameters(self._spread(place))

    def _allocate(self, like: Tensor) -> None:
        """Numbers the coordinates of a problem: one for a tied parameter, and one in each state for any other."""
        states, first = (like.shape[1] if self.joint else 1), 0
        numbers = []
        for is_tied in self.tied:
            size = 1 if is_tied else states
            numbers.append((first + torch.arange(size)).expand(states))
            first += size
        self.size = first
        self.index = torch.stack(numbers, 1).to(like.device)  # (M, P) coordinate of each state and parameter

    def _coordinates(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the coordinates (..., C) of parameters (R, K, D)."""
        real = torch.stack([range_.to_real(value) for range_, value in zip(self.ranges, parameters, strict=True)], -1)
        real = real.movedim(1, 2) if self.joint else real.unsqueeze(-2)  # (..., M, P)
        place = real.new_zeros(*real.shape[:-2], self.size)
        place[..., self.index.flatten()] = real.flatten(-2)
        return place

    def _spread(self, place: Tensor) -> Tensor:
        """Returns the (..., M, P) real values of the parameters in each state of each problem."""
        return place[..., self.index]

    def _parameters(self, real: Tensor) -> tuple[Tensor, ...]:
        real = real.movedim(-2, 1) if self.joint else real.squeeze(-2)
        return tuple(range_.from_real(value) for range_, value in zip(self.ranges, real.unbind(-1), strict=True))

    def _values(self, real: Tensor) -> Tensor:
        """Returns the values of the problems, (...)."""
        terms = self.objective(*self._parameters(real))
        return terms.sum(1) if self.joint else terms

    def _best(self, places: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        place = places[0]
        value = self._values(self._spread(place))
        for other in places[1:]:
            found = self._values(self._spread(other))
            better = (found > value) | value.isnan()
            place, value = torch.where(better.unsqueeze(-1), other, place), torch.where(better, found, value)
        return place, value

    def _derivatives(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient (..., C) and the negative second derivatives (..., C, C)."""
        with torch.enable_grad():
            real = self._spread(place).requires_grad_()
            (first,) = torch.autograd.grad(self._values(real).sum(), real, create_graph=True)
            rows = [
                torch.autograd.grad(part.sum(), real, retain_graph=True, materialize_grads=True)[0]
                if part.requires_grad
                else torch.zeros_like(real)
                for part in first.unbind(-1)
            ]
        second = torch.stack(rows, -2).detach()  # (..., M, P, P)
        gradient = torch.zeros_like(place).index_add_(-1, self.index.flatten(), first.detach().flatten(-2))
        pairs = self.index.unsqueeze(-1) * self.size + self.index.unsqueeze(-2)  # (M, P, P)
        flat = place.new_zeros(*place.shape[:-1], self.size**2)
        flat.index_add_(-1, pairs.flatten(), second.flatten(-3))
        return gradient, -flat.unflatten(-1, (self.size, self.size))

    def _advance(self, place: Tensor, value: Tensor, step: Tensor, close: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the longest of the steps 1, 1/2, 1/4, ... at which the value of each problem increases."""
        factor = torch.ones_like(value)
        for _ in range(_MAX_HALVINGS):
            found = self._values(self._spread(place + factor.unsqueeze(-1) * step))
            accepted = (found > value) | close & found.isfinite()
            if place.is_cpu and bool(accepted.all()):
                break
            factor = torch.where(accepted, factor, factor / 2)
        moved = torch.where(accepted.unsqueeze(-1), place + factor.unsqueeze(-1) * step, place)
        return moved, torch.where(accepted, found, value)


def _ascent(gradient: Tensor, curvature: Tensor) -> Tensor:
    """Returns the Newton step, or a short gradient step where the curvature is not positive."""
    diagonal = curvature.diagonal(dim1=-2, dim2=-1)
    # A coordinate that the value does not depend on would make the matrix singular.
    curvature = curvature + (diagonal == 0).to(diagonal).diag_embed()
    factor, failed = torch.linalg.cholesky_ex(curvature)
    newton = torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
    return torch.where((failed == 0).unsqueeze(-1), newton, gradient / curvature.abs().sum(-1))
