"""Categorical emissions, for sequences of symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission
from lightning_hmm.distributions.rows import CategoricalRows
from lightning_hmm.inference.evidence import Table
from lightning_hmm.inference.sampling import draw_rows
from lightning_hmm.sequences import Sequences


class Categorical(CategoricalRows, Emission):
    """Emits one of V symbols, with a probability for each state and symbol.

    Use it for sequences of symbols. The probabilities have shape (K, V), where K is the number of states.

    Args:
        pseudocount: Pseudocount of a Dirichlet prior on each row, in counts of the whole data set.
        tied: ``["probs"]`` for probabilities that do not depend on the state.
        frozen: ``["probs"]`` for probabilities that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Categorical
        >>> model = HMM(num_states=2, emission=Categorical(pseudocount=0.1), num_symbols=3)
        >>> model = model.set_parameters(emission=[[0.5, 0.5, 0.0], [0.1, 0.1, 0.8]])
        >>> model.emission.probs
        tensor([[0.5000, 0.5000, 0.0000],
                [0.1000, 0.1000, 0.8000]], dtype=torch.float64)
    """

    option = "emission"
    support = ("symbols, whole numbers from 0 to V - 1", "Increase `num_symbols`, or mark the symbol as missing.")
    names = ("probs",)
    reads_symbols = True
    starts_from_data = False

    def __init__(self, pseudocount: float = 0.0, tied: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
        super().__init__(pseudocount, tied=tied, frozen=frozen)
        self.has_tied_rows, self.has_frozen_rows = bool(self.tied), bool(self.frozen)

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        if len(columns) != 1 or columns[0].num_categories is None:
            kinds = ", ".join(f"{column.name!r} ({column.kind})" for column in columns)
            raise ValueError(f"A Categorical emission must have one column of symbols, but the columns are {kinds}.")
        self.num_symbols = columns[0].num_categories
        self._allocate_rows(restarts, num_states, self.num_symbols)

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Table:
        return Table(natural[0], batch.symbols(self.num_symbols))

    def needs_graph(self, batch: Sequences) -> bool:
        return False

    def check(self, sequences: Sequences) -> None:
        sequences.check(self.num_symbols, None)

    def set(self, probs: Any) -> None:  # type: ignore[override]
        CategoricalRows.set(self, probs)

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        return draw_rows(self.probs, states, generator)

    def predict(self, state_probs: Tensor) -> Tensor:
        return state_probs @ self.probs
