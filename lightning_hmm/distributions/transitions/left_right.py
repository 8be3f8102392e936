"""Left-to-right transitions."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hmm.distributions.transitions.full import Full


class LeftRight(Full):
    """Transitions that stay in a state or move to one of the next states, as in models of words or of stages.

    All other entries of the matrix are structural zeros. The last state is never left.

    Args:
        jump: The largest number of states by which a transition moves forward.
        pseudocount: Pseudocount of a Dirichlet prior on the possible entries of each row, in counts of the whole data
            set.
        first_state: Whether sequences start in the first state, unless the model is given another `initial`.

    Example:
        >>> from lightning_hmm import HMM, LeftRight
        >>> model = HMM(num_states=3, transition=LeftRight(jump=1, first_state=True), num_symbols=2)
        >>> model.transition.possible[0].int()
        tensor([[1, 1, 0],
                [0, 1, 1],
                [0, 0, 1]], dtype=torch.int32)
        >>> model.initial.probs
        tensor([1., 0., 0.], dtype=torch.float64)
    """

    def __init__(self, jump: int = 1, pseudocount: float = 0.0, first_state: bool = False) -> None:
        if type(jump) is not int or jump < 1:
            raise ValueError(f"`jump` must be a whole number of at least 1, but is {jump!r} instead.")
        super().__init__(pseudocount)
        self.jump = jump
        if first_state:
            self.default_initial = {"class_path": "Initial", "init_args": {"start": "first"}}

    def _zeros(self, num_states: int) -> Tensor:
        steps = torch.arange(num_states)[None] - torch.arange(num_states)[:, None]
        return (steps < 0) | (steps > self.jump)
