"""What the driver needs of an operator before a pass, and which operators it can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_hmm.inference.operators import Operator


class Facts(NamedTuple):
    """Of the transition probabilities: the smallest, the smallest except structural zeros, the largest, and the largest sum of a row."""

    least: float
    least_nonzero: float
    largest: float
    growth: float


class Prepared(NamedTuple):
    """An operator in the precision of a pass.

    arrays: the NamedTuple that the functions of the driver are compiled for.
    facts: of its probabilities.
    rows_counted: how many rows `count` takes at once, about; 1 for operators that count in `retract`.
    lane_bytes: size of the sums of a lane.
    sums: for a number of lanes, the sums of each.
    counts: from the sums of all lanes, one array for each natural parameter.
    rows_scored: the size that tiles should at least have in a forward pass without a backward pass.
    """

    arrays: Any
    facts: Facts
    rows_counted: int
    lane_bytes: int
    sums: Callable[[int], list[Any]]
    counts: Callable[[list[Any]], tuple[np.ndarray, ...]]
    rows_scored: int = 1


_preparers: dict[type, Callable[[Any, np.dtype], Prepared]] = {}
_scorers: dict[type, Callable[[Any], Any]] = {}


def prepares(operator: type) -> Callable[[Callable[[Any, np.dtype], Prepared]], Callable[[Any, np.dtype], Prepared]]:
    """Makes a function the one that prepares operators of a type."""

    def keep(function: Callable[[Any, np.dtype], Prepared]) -> Callable[[Any, np.dtype], Prepared]:
        _preparers[operator] = function
        return function

    return keep


def scores(operator: type) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Makes a function the one that returns the arrays of `best` and `best_source` for operators of a type: log-probabilities in float64."""

    def keep(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        _scorers[operator] = function
        return function

    return keep


def is_prepared(operator: Operator) -> bool:
    """Whether the driver has kernels for an operator."""
    return type(operator) in _preparers and type(operator) in _scorers


def prepare(operator: Operator, dtype: np.dtype) -> Prepared:
    return _preparers[type(operator)](operator, dtype)


def prepare_scores(operator: Operator) -> Any:
    return _scorers[type(operator)](operator)
