"""Transitions in which each row has a few individual probabilities and one constant for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Transition, as_numbers, check_not_negative
from lightning_hmm.inference.operators import MostlyConstant
from lightning_hmm.inference.selection import Choice
from lightning_hmm.sequences import Sequences

_ENTRIES_AT_ONCE = 1 << 22  # entries of the full matrix that are held in memory at a time


class DenseMostlyConstant(Transition):
    r"""A dense, mostly constant (DMC) transition matrix.

    Row i of the N x N matrix has K individual probabilities :math:`a_{ij}`, at the *kept* entries, and one constant
    :math:`c_i` for all other entries. Use it for many states, because a step takes O(N K) instead of O(N^2) time;
    `DMCHMM` also selects which entries are kept. With the expected counts S, the gradients and the M-step are

    .. math::
        \partial L / \partial \log a_{ij} = S_{ij}, \quad
        \partial L / \partial \log c_i = R_i = \sum_{j \text{ not kept}} S_{ij}, \qquad
        \hat a_{ij} = S_{ij} / G_i, \quad \hat c_i = R_i / ((N - K) G_i), \quad G_i = \sum_j S_{ij}

    The Dirichlet prior has the same pseudocount for every entry of the full row. A log-probability of -inf is a
    structural zero, as in `CategoricalRows`, as long as the entry is kept.

    Args:
        num_kept: Number K of kept entries in each row, from 0 to N - 1.
        pseudocount: Pseudocount of the Dirichlet prior, in counts of the whole data set.

    Example:
        >>> from lightning_hmm import HMM
        >>> from lightning_hmm.distributions import DenseMostlyConstant
        >>> model = HMM(num_states=3, transition=DenseMostlyConstant(num_kept=1), num_symbols=2)
        >>> model.transition.set_kept(indices=[[0], [1], [2]], values=[[0.8], [0.6], [0.4]])
        >>> model.transition_probs
        tensor([[0.8000, 0.1000, 0.1000],
                [0.2000, 0.6000, 0.2000],
                [0.3000, 0.3000, 0.4000]], dtype=torch.float64)
    """

    indices: Tensor

    def __init__(self, num_kept: int, pseudocount: float = 0.0) -> None:
        super().__init__()
        check_not_negative(pseudocount=pseudocount)
        self.num_kept = num_kept
        self.prior = {"pseudocount": pseudocount}

    def allocate(self, restarts: int, num_states: int) -> None:
        if not isinstance(self.num_kept, int) or not 0 <= self.num_kept < num_states:
            wanted = f"a whole number from 0 to {num_states - 1}, one less than there are states"
            raise ValueError(f"`num_kept` must be {wanted}, but is {self.num_kept} instead.")
        self._begin_allocation()
        self.num_states = num_states
        even = torch.full((restarts, num_states), 1.0 / num_states, dtype=torch.float64).log()
        self.log_values = nn.Parameter(even[..., None].repeat(1, 1, self.num_kept))
        self.log_constants = nn.Parameter(even)
        self.register_buffer("indices", torch.arange(self.num_kept).repeat(restarts, num_states, 1))

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return self.log_values[restart], self.log_constants[restart], self.indices[restart]

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> MostlyConstant:
        log_values, log_constants, indices = natural
        return MostlyConstant(indices, log_values, log_constants)

    def matrix(self, restart: int) -> Tensor:
        return self.operator(self.natural(restart), None).to_dense(torch.zeros(0)).detach().exp()

    def kept_mass(self, restart: int) -> Tensor:
        """Returns the (N,) sums of the probabilities of the kept entries of each row."""
        return self.log_values[restart].detach().exp().sum(-1)

    @torch.no_grad()
    def set_kept(self, indices: Any, values: Any) -> None:
        """Sets the kept entries, to the same values in all restarts.

        The remaining probability of each row is distributed evenly over its other entries.

        Args:
            indices: (N, K) columns of the kept entries, in any order.
            values: (N, K) probabilities of these entries.
        """
        shape = (self.num_states, self.num_kept)
        indices = torch.as_tensor(indices, device=self.indices.device)
        values = as_numbers("values", values, self.indices.device)
        for what, given in (("indices", indices), ("values", values)):
            if given.shape != shape:
                raise ValueError(
                    f"`{what}` must have shape {shape}, states by kept entries, but has {tuple(given.shape)} instead."
                )
        if indices.is_floating_point() and indices.numel():
            raise ValueError(f"`indices` must be whole numbers, but are {indices.dtype} instead.")
        indices, order = indices.long().sort(dim=1)
        values = values.gather(1, order)
        wrong = (indices < 0) | (indices >= self.num_states)
        if bool(wrong.any()):
            i, k = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"`indices` must be from 0 to {self.num_states - 1}, but row {i} holds {int(indices[i, k])}."
            )
        repeated = (indices.diff(dim=1) == 0).any(1)
        if bool(repeated.any()):
            i = int(repeated.nonzero()[0, 0])
            raise ValueError(
                f"`indices` must be different in a row, but row {i} holds {_first_repeated(indices[i])} twice."
            )
        if not bool((values >= 0).all()):  # also true for NaN
            i, k = (~(values >= 0)).nonzero()[0].tolist()
            raise ValueError(
                f"`values` must hold probabilities, but that of row {i}, column {int(indices[i, k])} "
                f"is {float(values[i, k])} instead."
            )
        mass = values.sum(1)
        if bool((mass > 1 + 1e-6).any()):
            i = int((mass > 1 + 1e-6).nonzero()[0, 0])
            raise ValueError(
                f"`values` of a row must not sum to more than 1, but row {i} sums to {float(mass[i]):.6g}."
            )
        over = mass.clamp(min=1)  # above one only by rounding
        constants = (1 - mass / over) / (self.num_states - self.num_kept)
        self._store(slice(None), slice(None), indices, (values / over[:, None]).log(), constants.log())
        self.is_set.fill_(True)

    def _store(self, restarts: Any, rows: Any, *given: Tensor) -> None:
        for mine, value in zip((self.indices, self.log_values, self.log_constants), given, strict=True):
            mine[restarts, rows] = value.to(mine.device)

    @torch.no_grad()
    def set(self, probs: Any) -> None:
        """Approximates a full matrix, with the same values in all restarts.

        The K largest entries of each row are kept, and the others are replaced by their mean.
        """
        probs = as_numbers("transition", probs, self.indices.device)
        if probs.shape != (self.num_states, self.num_states):
            raise ValueError(
                f"`transition` must have shape {(self.num_states, self.num_states)}, "
                f"but has {tuple(probs.shape)} instead."
            )
        if not bool((probs >= 0).all()):
            where = tuple(torch.nonzero(~(probs >= 0))[0].tolist())
            raise ValueError(
                f"`transition` must hold probabilities, but the entry at {where} is {float(probs[where])} instead."
            )
        sums = probs.sum(1)
        if not bool(((sums - 1).abs() < 1e-6).all()):
            row = int(((sums - 1).abs() >= 1e-6).nonzero()[0, 0])
            raise ValueError(
                f"`transition` rows must sum to 1, but row {row} sums to {float(sums[row]):.6g} instead. Normalize it."
            )
        self._store(slice(None), slice(None), *keep_largest(probs / sums[:, None], self.num_kept))
        self.is_set.fill_(True)

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws each row uniformly from the probability simplex, as `CategoricalRows` does.

        The K largest entries of each row are kept, and the others are replaced by their mean.
        """
        import numpy as np

        draws = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        rows = max(1, _ENTRIES_AT_ONCE // self.num_states)
        for restart in range(len(self.indices)):
            for first in range(0, self.num_states, rows):
                last = min(first + rows, self.num_states)
                weights = torch.from_numpy(np.maximum(draws.gamma(1.0, size=(last - first, self.num_states)), 1e-12))
                self._store(
                    restart, slice(first, last), *keep_largest(weights / weights.sum(1, keepdim=True), self.num_kept)
                )

    @torch.no_grad()
    def take(self, restart: int, choice: Choice, counts: Sequence[Tensor]) -> None:
        """Replaces the kept entries.

        Args:
            restart: Number of the restart.
            choice: The new entries and their expected counts.
            counts: Expected counts of the parameters, which are overwritten with those of the new entries.
        """
        self.indices[restart].copy_(choice.indices)
        self.log_values[restart].copy_(choice.log_values)
        for gathered, chosen in zip(counts, (choice.kept, choice.rest), strict=True):
            gathered[restart].copy_(chosen)

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        kept, rest = statistics
        pseudocount = self.prior["pseudocount"] * weight
        others = self.num_states - self.num_kept
        kept = kept + pseudocount * (self.log_values > -torch.inf).to(kept.dtype)
        rest = rest + pseudocount * others * (self.log_constants > -torch.inf).to(rest.dtype)
        total = kept.sum(-1) + rest
        seen = total > 0
        total = torch.where(seen, total, torch.ones_like(total))
        self.log_values.copy_(torch.where(seen[..., None], (kept / total[..., None]).log(), self.log_values))
        self.log_constants.copy_(torch.where(seen, (rest / total / others).log(), self.log_constants))
        return (~seen).sum()

    def log_prior(self) -> Tensor:
        others = self.num_states - self.num_kept
        values, constants = (
            torch.where(logs > -torch.inf, logs, torch.zeros_like(logs)).detach()
            for logs in (self.log_values, self.log_constants)
        )
        return self.prior["pseudocount"] * (values.flatten(1).sum(1) + others * constants.sum(1))

    def num_free_parameters(self, restart: int) -> int:
        """Returns N K, because the constant of a row follows from its kept entries. Their choice is not counted."""
        return self.num_states * self.num_kept


def _first_repeated(row: Tensor) -> int:
    return int(row[1:][row.diff() == 0][0])


def keep_largest(probs: Tensor, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Approximates rows of probabilities by their K largest entries and the mean of the others.

    Returns:
        The indices and the log-probabilities of the kept entries, (N, K) each, and the (N,) logarithms of the means.
    """
    order = probs.sort(dim=1, descending=True, stable=True).indices
    indices, others = order[:, :num_kept].sort(dim=1).values, order[:, num_kept:]
    return indices, probs.gather(1, indices).log(), probs.gather(1, others).mean(1).log()
