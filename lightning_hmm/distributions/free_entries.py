"""Conversion between the entries of a problem and its free parameters, if entries are tied or frozen."""

from __future__ import annotations

import torch
from torch import Tensor


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
