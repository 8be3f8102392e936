"""Transitions whose operator records the most recent states, for emissions that depend on earlier states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hmm.distributions.transitions.full import Full
from lightning_hmm.inference.operators import ShiftRegister
from lightning_hmm.sequences import Sequences


class Histories(Full):
    """A full matrix of transition probabilities, combined with an emission that depends on the last L + 1 states.

    The options and parameters are those of `Full`. Inference uses K^(L + 1) states, one for each sequence of L + 1
    states of the model, of which K follow each other. The number L is the order of the emission.
    ``Autoregressive(order, around_mean=True)`` selects these transitions.

    Example:
        >>> from lightning_hmm import HMM, Autoregressive
        >>> model = HMM(num_states=2, emission=Autoregressive(2, around_mean=True), num_features=1)
        >>> type(model.transition).__name__, model.transition_probs.shape
        ('Histories', torch.Size([2, 2]))
        >>> model.chain(0)[1].num_states
        8
    """

    partner = "AroundMean"

    @property
    def order(self) -> int:
        """Number of earlier states that the emission depends on."""
        return int(self._owner[0].emission.order)

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> ShiftRegister:  # type: ignore[override]
        return ShiftRegister.of(natural[0], self.order)

    def first_states(self, log_initial: Tensor, natural: Sequence[Tensor]) -> Tensor:
        """Returns the log-probabilities of the first state.

        States before the first step, which have no effect, are 0.
        """
        size = len(log_initial)
        earlier = size**self.order
        rest = log_initial.new_full((size, earlier - 1), -torch.inf)
        return torch.cat([log_initial[:, None], rest], 1).flatten()
