"""The stationary distribution of the transitions as the distribution of the first state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.rows import Initial
from lightning_hmm.inference.cooccurrence import stationary

_ITERATIONS = 200  # largest number of iterations in an M-step
_CONVERGED = 1e-14  # largest change of a probability at which an M-step ends
_ROUNDING = 1e-13  # decrease of the objective, relative to it, that is attributed to rounding


class Stationary(Initial):
    r"""The first state has the stationary distribution of the transition matrix, :math:`\pi A = \pi`.

    Use it for sequences that begin at an arbitrary time of a process that has run for long. The start has no parameters
    of its own. With the expected counts :math:`n_{ij}` of transitions and :math:`c_k` of first states, the M-step of
    the transitions maximizes

    .. math:: Q(A) = \sum_{ij} n_{ij} \log A_{ij} + \sum_k c_k \log \pi_k(A)

    plus the log prior. This has no closed form and is computed by an iteration that never decreases Q. The transitions
    must be `Full`, possibly with zeros, fixed entries and ties, and every state must be reachable from every other one.

    Example:
        >>> from lightning_hmm import HMM
        >>> model = HMM(num_states=2, emission="Poisson", initial="stationary", num_features=1)
        >>> model.set_parameters(transition=[[0.9, 0.1], [0.3, 0.7]]).initial_probs
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    has_natural_parameters = False
    counts: nn.Parameter  # (R, K) expected counts of first states, for the M-step of the transitions

    def __init__(self) -> None:
        super().__init__()

    def belong_to(self, model: Any) -> None:
        super().belong_to(model)
        if "initial" in model.frozen:
            raise ValueError(
                "`frozen` must not name initial if the start is Stationary, because it follows the transitions. "
                "Freeze the transition as well, or use another initial."
            )
        model.transition.couple(self)

    def allocate(self, restarts: int, num_states: int) -> None:
        self._begin_allocation()
        self.counts = nn.Parameter(torch.zeros(restarts, num_states, dtype=torch.float64), requires_grad=False)
        check_irreducible(self._owner[0].transition.possible)

    def randomize(self, generator: torch.Generator) -> None:
        """Draws nothing, because the distribution follows from the transitions."""

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return (stationary(self._owner[0].transition.natural(restart)[0].exp()).log(),)

    @property
    def probs(self) -> Tensor:
        """Stationary distribution of the transitions of the best restart."""
        return self.natural(self.restart)[0].detach().exp()

    def set(self, probs: Any) -> None:
        """Raises a `ValueError`, because the distribution follows from the transitions."""
        raise ValueError("`initial` cannot be set if the start is Stationary. It follows from the transitions.")

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        """Stores the counts for the M-step of the transitions, which follows."""
        self.counts.copy_(statistics[0])
        return torch.zeros((), dtype=torch.int64, device=self.counts.device)

    def log_prior(self) -> Tensor:
        return self.counts.new_zeros(len(self.counts))

    def num_free_parameters(self, restart: int) -> int:
        return 0


def check_irreducible(possible: Tensor) -> None:
    """Raises a `ValueError` if a state cannot be reached from another one by possible transitions (R, K, K)."""
    reached = possible.double() + torch.eye(possible.shape[-1], dtype=torch.float64, device=possible.device)
    for _ in range(possible.shape[-1].bit_length()):
        reached = (reached @ reached).clamp(max=1)
    missing = torch.nonzero(reached == 0)
    if len(missing):
        _, start, end = missing[0].tolist()
        raise ValueError(
            "The transitions of a Stationary start must lead from every state to every other one, "
            f"but none leads from state {start} to state {end}. Use another initial, or remove zeros."
        )


@torch.no_grad()
def rows_with_stationary_start(
    current: Tensor, closed: Tensor, weights: Tensor, first: Tensor, free: Tensor, pooled: Callable[[Tensor], Tensor]
) -> Tensor:
    """Maximizes the expected log-likelihood of transitions and of first states with the stationary distribution.

    An iteration moves the logits in the direction of their gradient, scaled by an upper bound of the curvature of the
    counts, as far as the objective does not decrease.

    Args:
        current: (R, K, K) log-probabilities before the M-step.
        closed: (R, K, K) log-probabilities that are optimal without the counts of first states.
        weights: (R, K, K) counts of transitions plus pseudocounts, summed over tied rows.
        first: (R, K) counts of first states.
        free: (R, K, K) mask of the entries to optimize.
        pooled: Function that sums rows of (R, K, K) numbers over tied rows.

    Returns:
        (R, K, K) log-probabilities.
    """
    # Each row of tied rows has the counts of all of them, so the counts of first states are compared with one share.
    share = pooled(torch.ones_like(weights))

    def objective(logs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns Q (R,) and the derivatives of its second term by the probabilities, summed over tied rows."""
        probs = logs.exp().requires_grad_()
        with torch.enable_grad():
            start = stationary(probs)
            used = first > 0
            term = torch.where(used, first * torch.where(used, start, 1.0).log(), 0.0).sum(-1)
            (slope,) = torch.autograd.grad(term.sum(), probs)
        finite = torch.where(free & (weights > 0), weights * logs / share, 0.0)
        return finite.sum((1, 2)) + term.detach(), pooled(slope * probs.detach())

    def normalized(logs: Tensor) -> Tensor:
        return torch.where(free, logs - torch.where(free, logs, -torch.inf).logsumexp(-1, True) + mass, current)

    mass = torch.where(free, current, -torch.inf).logsumexp(-1, keepdim=True)
    value, slope = objective(current)
    other, other_slope = objective(closed)
    better = ((other > value) & closed.isfinite().eq(current.isfinite()).all(-1).all(-1))[:, None, None]
    logs = torch.where(better, closed, current)
    value, slope = torch.where(better[:, 0, 0], other, value), torch.where(better, other_slope, slope)
    for _ in range(_ITERATIONS):
        probs = torch.where(free, (logs - mass).exp(), 0.0)
        pull = torch.where(free, weights + slope, 0.0)
        gradient = pull - probs * pull.sum(-1, keepdim=True)
        curvature = weights.sum(-1, keepdim=True) + torch.where(free, slope.abs(), 0.0).sum(-1, keepdim=True)
        scale = probs * curvature
        direction = torch.where(scale > 0, 1 + gradient / torch.where(scale > 0, scale, 1.0), 1.0).clamp(min=0.1).log()
        if float((probs * direction).abs().max()) < _CONVERGED:
            break
        step = torch.ones_like(better, dtype=logs.dtype)
        for _ in range(30):
            trial = normalized(torch.where(free, logs + step * direction, current))
            found, found_slope = objective(trial)
            worse = (~(found >= value - _ROUNDING * value.abs()))[:, None, None]
            if not bool(worse.any()):
                break
            step = torch.where(worse, step / 2, step)
        logs = torch.where(worse, logs, trial)
        value, slope = torch.where(worse[:, 0, 0], value, found), torch.where(worse, slope, found_slope)
    return logs
