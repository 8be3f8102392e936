"""Registry of the operators with compiled kernels, and their preparation for a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_hmm.inference.operators import Operator


class Facts(NamedTuple):
    """Bounds of the transition probabilities.

    least: Smallest probability.
    least_nonzero: Smallest probability except for structural zeros.
    largest: Largest probability.
    growth: Largest sum of a row.
    """

    least: float
    least_nonzero: float
    largest: float
    growth: float


class Prepared(NamedTuple):
    """An operator in the data type of a pass.

    arrays: NamedTuple for which the functions of the driver are compiled.
    facts: Bounds of its probabilities.
    rows_counted: Approximate number of rows that `count` processes at once. It is 1 for operators that count in
        `retract`.
    lane_bytes: Size of the sums of a share of the work.
    sums: Function that creates the sums for a number of shares.
    counts: Function that computes the counts, one array for each natural parameter, from the sums of all shares.
    rows_scored: Smallest size of a tile in a forward pass without a backward pass.
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
    """Registers the function that prepares operators of the given type."""

    def keep(function: Callable[[Any, np.dtype], Prepared]) -> Callable[[Any, np.dtype], Prepared]:
        _preparers[operator] = function
        return function

    return keep


def scores(operator: type) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers the function that prepares operators of the given type for the Viterbi algorithm.

    The function returns the arrays for `best` and `best_source`: log-probabilities in float64.
    """

    def keep(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        _scorers[operator] = function
        return function

    return keep


def is_prepared(operator: Operator) -> bool:
    """Returns whether there are compiled kernels for an operator."""
    return type(operator) in _preparers and type(operator) in _scorers


def prepare(operator: Operator, dtype: np.dtype) -> Prepared:
    """Prepares an operator for a forward or forward-backward pass in the given data type."""
    return _preparers[type(operator)](operator, dtype)


def prepare_scores(operator: Operator) -> Any:
    """Prepares an operator for the Viterbi algorithm."""
    return _scorers[type(operator)](operator)
