"""Declarations of the parameters of emissions: their names, their ranges, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Range:
    """The set of values of a parameter, with an invertible map onto the real numbers.

    Attributes:
        rule: Completes the sentence "The parameter must ..." in error messages.
        contains: Returns a mask of the values that are in the range.
        to_real: Maps the range onto the real numbers.
        from_real: Inverse of `to_real`.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions.parameters import POSITIVE
        >>> POSITIVE.from_real(POSITIVE.to_real(torch.tensor(2.0)))
        tensor(2.)
    """

    rule: str
    contains: Callable[[Tensor], Tensor]
    to_real: Callable[[Tensor], Tensor]
    from_real: Callable[[Tensor], Tensor]


REAL = Range("be finite", torch.isfinite, lambda value: value, lambda value: value)
POSITIVE = Range("be positive", lambda value: value > 0, torch.log, torch.exp)
PROBABILITY = Range(
    "be between 0 and 1, exclusive", lambda value: (value > 0) & (value < 1), torch.logit, torch.sigmoid
)


def below_one(probs: Tensor) -> Tensor:
    """Rounds probabilities that differ from 1 by less than the precision down to the next smaller number.

    The logarithm of 1 - p is then finite.
    """
    return probs.clamp(max=1 - torch.finfo(probs.dtype).eps / 2)


class NamedParameter(property):
    """Declares a parameter in the body of an emission class. Reading it returns its (K, D) values of the best restart.

    The base class collects the names and the ranges of the declared parameters in `names` and `ranges`, in the order of
    the declarations.

    Args:
        range_: The range of the parameter.
        doc: Docstring of the parameter.

    Example:
        >>> from lightning_hmm.distributions import Poisson
        >>> Poisson.names, Poisson.rate.__doc__
        (('rate',), '(K, D) rates of the best restart.')
    """

    def __init__(self, range_: Range, doc: str) -> None:
        super().__init__(self._read)
        self.__doc__ = doc
        self.range = range_

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def _read(self, emission: Any) -> Tensor:
        values: tuple[Tensor, ...] = emission.parameters_of(emission.weights[emission.restart].detach())
        found: Tensor = emission.read(self.name, values[emission.names.index(self.name)])
        return found
