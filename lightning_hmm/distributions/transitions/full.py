"""Transitions with a full matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_hmm.distributions.base import Transition
from lightning_hmm.distributions.rows import CategoricalRows
from lightning_hmm.inference.operators import Dense
from lightning_hmm.sequences import Sequences


class Full(CategoricalRows, Transition):
    """A full matrix of transition probabilities.

    This is the default transition. Probabilities that are set to zero are structural zeros: training leaves them
    unchanged, so that you can, for example, train a left-to-right model.

    Args:
        pseudocount: Pseudocount of a Dirichlet prior on each row, in counts of the whole data set.

    Example:
        >>> from lightning_hmm import HMM, Full
        >>> model = HMM(num_states=2, transition=Full(pseudocount=0.1), num_symbols=3)
        >>> model = model.set_parameters(transition=[[0.9, 0.1], [0.0, 1.0]])
        >>> model.transition.probs
        tensor([[0.9000, 0.1000],
                [0.0000, 1.0000]], dtype=torch.float64)
    """

    option = "transition"

    def allocate(self, restarts: int, num_states: int) -> None:
        self._allocate_rows(restarts, num_states, num_states)

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Dense:
        return Dense(natural[0])

    def matrix(self, restart: int) -> Tensor:
        return self.log_probs[restart].detach().exp()
