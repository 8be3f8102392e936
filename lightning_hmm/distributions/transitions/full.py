"""Transitions with a full matrix, with optional structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.distributions.base import Transition, as_numbers, check_not_negative
from lightning_hmm.distributions.rows import CategoricalRows
from lightning_hmm.distributions.stationary import check_irreducible, rows_with_stationary_start
from lightning_hmm.inference.operators import Dense
from lightning_hmm.sequences import Sequences


class Full(CategoricalRows, Transition):
    r"""A full matrix of transition probabilities, with optional structure.

    This is the default transition. Probabilities that are set to zero are structural zeros: training leaves them
    unchanged. With the expected counts :math:`n_{ij}`, the M-step is

    .. math::
        \hat A_{ij} = (1 - f_i) \frac{n_{ij} + \kappa + s \, 1[i = j]}{\sum_l (n_{il} + \kappa + s \, 1[i = l])}

    where j and l run over the entries of row i that are neither zero nor fixed, and :math:`f_i` is the sum of the fixed
    entries. The counts of tied rows, including their pseudocounts, are added up. The log prior is
    :math:`\sum_{ij} (\kappa + s \, 1[i = j]) \log A_{ij}`.

    Args:
        pseudocount: Pseudocount :math:`\kappa` of a Dirichlet prior on each row, in counts of the whole data set.
        stickiness: Additional pseudocount s of the diagonal, for states that persist.
        zeros: Structural zeros: a list of pairs [i, j], or K rows of K booleans that are true at the zeros.
        fixed: Entries that training leaves unchanged, in the format of `zeros`. They keep the values that were set with
            `set_parameters`. Before, the entries of a row are equal.
        tied_rows: Lists of states whose rows are equal.

    Example:
        >>> from lightning_hmm import HMM, Full
        >>> model = HMM(num_states=2, transition=Full(pseudocount=0.1), num_symbols=3)
        >>> model = model.set_parameters(transition=[[0.9, 0.1], [0.0, 1.0]])
        >>> model.transition.probs
        tensor([[0.9000, 0.1000],
                [0.0000, 1.0000]], dtype=torch.float64)
        >>> model = HMM(num_states=3, transition=Full(zeros=[[0, 2], [2, 0]], tied_rows=[[0, 1]]), num_symbols=3)
        Traceback (most recent call last):
        ValueError: The rows of `tied_rows` must have the same zeros and fixed entries, but rows 0 and 1 differ.
    """

    option = "transition"
    fixed: Tensor  # (K, K) mask
    group: Tensor  # (K,) for each row, the first row that it is tied with

    def __init__(
        self,
        pseudocount: float = 0.0,
        stickiness: float = 0.0,
        zeros: list[Any] | None = None,
        fixed: list[Any] | None = None,
        tied_rows: list[list[int]] | None = None,
    ) -> None:
        super().__init__(pseudocount)
        check_not_negative(stickiness=stickiness)
        if stickiness:
            self.prior["stickiness"] = stickiness
        self.options = {"zeros": zeros, "fixed": fixed, "tied_rows": tied_rows}
        self._start: tuple[Any, ...] = ()  # the stationary distribution of the first state, in a tuple as `_owner`

    def allocate(self, restarts: int, num_states: int) -> None:
        zeros = self._zeros(num_states)
        fixed = _mask("fixed", self.options["fixed"], num_states)
        group = _groups(self.options["tied_rows"], num_states)
        differ = torch.nonzero(((zeros != zeros[group]) | (fixed != fixed[group])).any(1)).flatten()
        if len(differ):
            first, second = int(group[differ[0]]), int(differ[0])
            raise ValueError(
                "The rows of `tied_rows` must have the same zeros and fixed entries, "
                f"but rows {first} and {second} differ."
            )
        empty = torch.nonzero(zeros.all(1)).flatten()
        if len(empty):
            raise ValueError(
                f"`zeros` must leave an entry in each row, but row {int(empty[0])} has none. "
                "Leave out a zero, such as that on the diagonal."
            )
        self._allocate_rows(restarts, num_states, num_states)
        self.register_buffer("fixed", fixed, persistent=False)
        self.register_buffer("group", group, persistent=False)
        with torch.no_grad():
            self.log_probs.masked_fill_(zeros, -torch.inf).sub_(self.log_probs.logsumexp(-1, keepdim=True))
        self.possible.copy_(~zeros)

    def _zeros(self, num_states: int) -> Tensor:
        """Returns the (K, K) mask of the structural zeros that the options define."""
        return _mask("zeros", self.options["zeros"], num_states)

    @property
    def is_plain(self) -> bool:
        """Whether rows are updated by normalizing counts plus one pseudocount, as compiled passes do."""
        return not (self.prior.get("stickiness") or self.options["fixed"] or self.options["tied_rows"] or self._start)

    def couple(self, initial: Any) -> None:
        if type(self).maximize is not Full.maximize:
            super().couple(initial)
        self._start = (initial,)

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Dense:
        return Dense(natural[0])

    def matrix(self, restart: int) -> Tensor:
        return self.log_probs[restart].detach().exp()

    # Values

    @torch.no_grad()
    def set(self, probs: Any) -> None:
        """Sets the probabilities, which must agree with the structure. Zeros become structural zeros."""
        shape = self.log_probs.shape
        given = as_numbers(self.option, probs, self.log_probs.device)
        if given.shape in (shape, shape[1:]):
            self._check_structure(given.expand(shape))
        super().set(given)

    def _check_structure(self, probs: Tensor) -> None:
        """Raises a `ValueError` if probabilities (R, K, K) contradict the zeros or the ties."""
        wrong = torch.nonzero(self._zeros(probs.shape[-1]).to(probs.device) & (probs != 0))
        if len(wrong):
            where = tuple(wrong[0].tolist())
            raise ValueError(
                f"`{self.option}` must be zero where the structure of the transitions has a zero, "
                f"but the entry at {where[1:]} is {float(probs[where]):g}."
            )
        wrong = torch.nonzero((probs != probs[:, self.group]).any(-1))
        if len(wrong):
            row = int(wrong[0, 1])
            raise ValueError(
                f"`{self.option}` must have equal rows where `tied_rows` ties them, "
                f"but rows {int(self.group[row])} and {row} differ."
            )
        if self._start:
            check_irreducible(probs > 0)

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws each row from the probability simplex. Structural zeros and fixed entries are left unchanged."""
        before = self.log_probs.clone()
        super().randomize(generator)
        if not self.is_plain:
            weights = self._pooled(self.log_probs.exp().masked_fill(self.fixed, 0.0))
            self.log_probs.copy_(before)
            self.log_probs.copy_(self._normalized(weights))

    # EM

    def _pooled(self, weights: Tensor) -> Tensor:
        """Replaces each row of (R, K, K) weights by the sum of the rows that it is tied with."""
        if not self.options["tied_rows"]:
            return weights
        return torch.zeros_like(weights).index_add(1, self.group, weights)[:, self.group]

    @property
    def _free(self) -> Tensor:
        """(R, K, K) mask of the entries that training changes."""
        return (self.log_probs > -torch.inf) & ~self.fixed

    def _normalized(self, weights: Tensor) -> Tensor:
        """Returns (R, K, K) log-probabilities that are proportional to weights, except for fixed entries and zeros."""
        total = weights.sum(-1, keepdim=True)
        updated = (weights / torch.where(total > 0, total, torch.ones_like(total))).log()
        if self.options["fixed"]:
            kept = torch.where(self.fixed, self.log_probs.exp(), 0.0).sum(-1, keepdim=True)
            updated = updated + torch.log1p(-kept)
        return torch.where((total > 0) & self._free, updated, self.log_probs)

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        if self.is_plain:
            return super().maximize(statistics, weight)
        (counts,) = statistics
        added = torch.full_like(counts[0], self.prior["pseudocount"])
        added.diagonal().add_(self.prior.get("stickiness", 0.0))
        free = self._free
        weights = self._pooled(torch.where(free, counts + added * weight, torch.zeros_like(counts)))
        updated = self._normalized(weights)
        if self._start:
            updated = rows_with_stationary_start(
                self.log_probs.detach(), updated, weights, self._start[0].counts.detach(), free, self._pooled
            )
        self.log_probs.copy_(updated)
        return (free.any(-1) & ~(weights.sum(-1) > 0)).sum()

    def log_prior(self) -> Tensor:
        total = super().log_prior()
        if "stickiness" in self.prior:
            stays = self.log_probs.detach().diagonal(dim1=-2, dim2=-1)
            total = total + self.prior["stickiness"] * torch.where(stays > -torch.inf, stays, 0.0).sum(-1)
        return total

    def num_free_parameters(self, restart: int) -> int:
        first = self.group == torch.arange(len(self.group), device=self.group.device)
        free = (self.possible[restart] & ~self.fixed)[first].sum(-1)
        return int((free - 1).clamp(min=0).sum())


def _mask(option: str, given: Any, size: int) -> Tensor:
    """Returns the (K, K) mask of entries that are given as pairs, or as K rows of K booleans."""
    mask = torch.zeros(size, size, dtype=torch.bool)
    rows = [] if given is None else [list(row) if isinstance(row, (list, tuple)) else [row] for row in given]
    entries = [entry for row in rows for entry in row]
    if entries and all(isinstance(entry, bool) for entry in entries) and [len(row) for row in rows] == [size] * size:
        return torch.tensor(rows)
    for row in rows:
        if len(row) != 2 or not all(type(entry) is int and 0 <= entry < size for entry in row):
            raise ValueError(
                f"`{option}` must be a list of pairs [i, j] of states from 0 to {size - 1}, "
                f"or {size} rows of {size} booleans, but has the row {row} instead."
            )
        mask[row[0], row[1]] = True
    return mask


def _groups(tied_rows: Any, size: int) -> Tensor:
    """Returns (K,) for each row, the first row that it is tied with."""
    group, seen = torch.arange(size), set()
    for rows in tied_rows or ():
        for row in rows if isinstance(rows, (list, tuple)) else [rows]:
            if type(row) is not int or not 0 <= row < size or row in seen or not isinstance(rows, (list, tuple)):
                raise ValueError(
                    f"`tied_rows` must be lists of states from 0 to {size - 1}, each in one list at most, "
                    f"but has {rows!r} instead."
                )
            seen.add(row)
            group[row] = min(rows)
    return group
