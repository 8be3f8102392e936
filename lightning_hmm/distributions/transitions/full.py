"""Transitions between any two states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_hmm.distributions.base import Transition
from lightning_hmm.distributions.rows import CategoricalRows
from lightning_hmm.inference.operators import Dense
from lightning_hmm.sequences import Sequences


class Full(CategoricalRows, Transition):
    """A full matrix of transition probabilities. Zeros that are set are structural and stay.

    Args:
        pseudocount: of a Dirichlet prior on each row, in counts of the whole data.
    """

    option = "transition"

    def allocate(self, restarts: int, num_states: int) -> None:
        self._allocate_rows(restarts, num_states, num_states)

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Dense:
        return Dense(natural[0])

    def matrix(self, restart: int) -> Tensor:
        return self.log_probs[restart].detach().exp()
