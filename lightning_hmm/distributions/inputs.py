"""The inputs of a part: columns of `Sequences.inputs` on which its distribution depends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.sequences import Sequences


class Inputs:
    """The choice of inputs that a part depends on.

    Args:
        chosen: Number of inputs, if the part depends on all of them, or the numbers of the inputs that it depends on.
        part: Name of the part, for error messages.

    Example:
        >>> from lightning_hmm import Sequences
        >>> from lightning_hmm.distributions.inputs import Inputs
        >>> sequences = Sequences.from_list([[0, 1]], inputs=[[[1.0, 5.0, 2.0], [3.0, 6.0, 4.0]]])
        >>> Inputs([0, 2], "emission").of(sequences)
        tensor([[1., 2.],
                [3., 4.]], dtype=torch.float64)
    """

    def __init__(self, chosen: int | Sequence[int], part: str) -> None:
        single = isinstance(chosen, int) and not isinstance(chosen, bool)
        numbers: Any = list(range(max(chosen, 0))) if isinstance(chosen, int) and single else chosen
        if (
            not isinstance(numbers, (list, tuple))
            or not numbers
            or any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers)
            or len(set(numbers)) < len(numbers)
        ):
            raise ValueError(
                f"`inputs` must be the number of inputs, at least 1, or a list of different numbers of inputs from 0, "
                f"but is {chosen!r} instead."
            )
        self.numbers = list(numbers)
        self.total = chosen if single else None  # number of inputs that the data must have, if all are used
        self.part = part

    def __len__(self) -> int:
        return len(self.numbers)

    def check(self, sequences: Sequences | None) -> None:
        """Raises a `ValueError` if the sequences do not have the inputs."""
        given = None if sequences is None else sequences.inputs
        if given is None:
            raise ValueError(
                f"The {self.part} depends on inputs, but none are given. Pass `inputs` with one row for each step: "
                "`Sequences(..., inputs=...)`, or `input_columns` of a data module."
            )
        if self.total is not None and given.shape[1] != self.total:
            raise ValueError(
                f"The {self.part} depends on {self.total} inputs, but each step has {given.shape[1]}. "
                "List the numbers of those to use: `inputs=[0, ...]`."
            )
        if max(self.numbers) >= given.shape[1]:
            raise ValueError(
                f"The {self.part} depends on input {max(self.numbers)}, but each step has {given.shape[1]} inputs, "
                "numbered from 0."
            )

    def of(self, sequences: Sequences | None) -> Tensor:
        """Returns the (steps, P) chosen inputs in float64."""
        self.check(sequences)
        assert sequences is not None
        assert sequences.inputs is not None
        return sequences.inputs[:, self.numbers].double()


def with_ones(inputs: Tensor) -> Tensor:
    """Appends a column of ones, for the intercept, to (steps, P) inputs."""
    return torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)


def refuse_collinear(inputs: Tensor, weights: Tensor, remedy: str) -> None:
    """Raises a `ValueError` if an input is a linear combination of earlier inputs and a constant.

    Args:
        inputs: (steps, P) inputs.
        weights: (steps,) weights of the steps.
        remedy: What to do, for the message.
    """
    used = inputs[weights > 0]
    ones = used.new_ones(len(used), 1)
    scale = used.abs().amax(0).clamp(min=torch.finfo(used.dtype).tiny) if len(used) else used.new_ones(used.shape[1])
    columns = torch.cat([ones, used / scale], 1)
    for number in range(inputs.shape[1]):
        earlier, column = columns[:, : number + 1], columns[:, number + 1]
        rest = column - earlier @ torch.linalg.lstsq(earlier, column.unsqueeze(1)).solution.squeeze(1)
        if float(rest.square().mean().nan_to_num()) <= 1e-20:
            raise ValueError(
                f"`inputs` must be linearly independent of each other and of a constant, but input {number} is a "
                f"linear combination of those before it. {remedy}"
            )
