"""Deterministic emissions, in which each state emits one symbol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission
from lightning_hmm.inference.cloned import ClonedSymbols, Layout
from lightning_hmm.sequences import Sequences


class OneSymbol(Emission):
    """Emissions in which each state emits one symbol with probability one. There are no parameters.

    Use it together with `Clones` transitions, whose layout assigns a symbol to each state.

    The data may also be *uncertain evidence*: sequences of real vectors with one column for each symbol. Each row is
    then a distribution over the symbols of that step, and a row of NaN marks a missing observation.

    Example:
        >>> from lightning_hmm import HMM, Clones, OneSymbol
        >>> model = HMM(4, OneSymbol(), Clones(pairs="all"), num_symbols=2)
        >>> model.emission.layout.symbols
        tensor([0, 0, 1, 1])
    """

    starts_from_data = False
    reads_symbols = True
    partner = "Clones"
    support = ("symbols, whole numbers from 0 to V - 1", "Increase `num_symbols`, or mark the symbol as missing.")
    m_step = "none"

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        if len(columns) != 1 or columns[0].num_categories is None:
            kinds = ", ".join(f"{column.name!r} ({column.kind})" for column in columns)
            raise ValueError(f"A OneSymbol emission must have one column of symbols, but the columns are {kinds}.")
        self._begin_allocation()
        self.restarts = restarts
        self.num_symbols = columns[0].num_categories

    @property
    def layout(self) -> Layout:
        """Layout of the transitions, which assigns a symbol to each state."""
        layout: Layout = self._owner[0].transition.layout
        return layout

    def check(self, sequences: Sequences) -> None:
        if sequences.is_discrete:
            sequences.check(self.num_symbols, None)
        elif sequences.num_features != self.num_symbols:
            wanted, given = self.num_symbols, sequences.num_features
            raise ValueError(
                f"Uncertain evidence must have {wanted} columns, one for each symbol, but has {given} instead."
            )

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> ClonedSymbols:  # type: ignore[override]
        return ClonedSymbols.of(batch, self.layout)

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        return self.layout.symbols.to(states.device)[states]

    def predict(self, state_probs: Tensor) -> Tensor:
        symbols = self.layout.symbols.to(state_probs.device)
        return state_probs.new_zeros(len(state_probs), self.num_symbols).index_add_(1, symbols, state_probs)

    def set(self, **values: Any) -> None:
        if values:
            raise ValueError(f"A OneSymbol emission has no parameters, so `{next(iter(values))}` cannot be set.")

    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self.is_set.device)

    def log_prior(self) -> Tensor:
        return torch.zeros(self.restarts, dtype=torch.float64, device=self.is_set.device)

    def num_free_parameters(self, restart: int) -> int:
        return 0
