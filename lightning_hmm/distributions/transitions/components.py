"""Transitions inside the components of a mixture of hidden Markov models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.distributions.base import Transition, as_numbers
from lightning_hmm.distributions.rows import CategoricalRows
from lightning_hmm.inference.operators import MostlyConstant
from lightning_hmm.sequences import Sequences


class Components(CategoricalRows, Transition):
    """Transitions between the K states of each of M components. There are none between components.

    `MixtureOfHMMs` uses them. A model with these transitions has M K states; state k of component m has the number
    m K + k. A step takes M K^2 operations.

    Args:
        num_components: Number of components M.
        pseudocount: Pseudocount of a Dirichlet prior on each row, in counts of the whole data set.

    Example:
        >>> from lightning_hmm import HMM
        >>> from lightning_hmm.distributions import Components
        >>> model = HMM(4, transition=Components(2), num_symbols=3)
        >>> slow, fast = [[0.9, 0.1], [0.1, 0.9]], [[0.5, 0.5], [0.5, 0.5]]
        >>> model = model.set_parameters(transition=[slow, fast])
        >>> model.transition_probs[:2]
        tensor([[0.9000, 0.1000, 0.0000, 0.0000],
                [0.1000, 0.9000, 0.0000, 0.0000]], dtype=torch.float64)
    """

    option = "transition"

    def __init__(self, num_components: int, pseudocount: float = 0.0) -> None:
        super().__init__(pseudocount)
        if isinstance(num_components, bool) or not isinstance(num_components, int) or num_components < 1:
            raise ValueError(
                f"`num_components` must be a whole number of at least 1, but is {num_components!r} instead."
            )
        self.num_components = num_components

    def allocate(self, restarts: int, num_states: int) -> None:
        if num_states % self.num_components:
            raise ValueError(
                f"`num_states` must be a multiple of the {self.num_components} components, but is {num_states} instead."
            )
        self._allocate_rows(restarts, num_states, num_states // self.num_components)

    @torch.no_grad()
    def set(self, probs: Any) -> None:
        """Sets the (M, K, K) probabilities, or (M K, M K) ones without transitions between components."""
        probs = as_numbers(self.option, probs, self.log_probs.device)
        num_states, size = self.log_probs.shape[1:]
        if probs.shape == (num_states, num_states) and self.num_components > 1:
            inside = probs.gather(1, self._columns(probs.device))
            if bool((inside.sum(1) < probs.sum(1) - 1e-6).any()):
                row = int(torch.nonzero(inside.sum(1) < probs.sum(1) - 1e-6)[0])
                raise ValueError(
                    f"`transition` must be zero between components of {size} states, but row {row} has transitions to "
                    "another component."
                )
            probs = inside
        super().set(probs.flatten(0, 1) if probs.shape == (self.num_components, size, size) else probs)

    def _columns(self, device: torch.device) -> Tensor:
        """(M K, K) states of the component of each state."""
        num_states, size = self.log_probs.shape[1:]
        states = torch.arange(num_states, device=device)
        return (states // size * size)[:, None] + states[:size]

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> MostlyConstant:
        (log_probs,) = natural
        return MostlyConstant(
            self._columns(log_probs.device), log_probs, log_probs.new_full((len(log_probs),), -torch.inf)
        )

    def matrix(self, restart: int) -> Tensor:
        return torch.block_diag(*self.log_probs[restart].detach().exp().unflatten(0, (self.num_components, -1)))
