"""Measurements that several experiments share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from lightning_hmm import Sequences


class Stopwatch:
    """Measures the processor time of a ``with`` block in seconds."""

    def __enter__(self) -> Self:
        self._begin = time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.process_time() - self._begin


def best_seconds(call: Callable[[], object], rounds: int) -> float:
    """Returns the least processor time of several calls, after one call that does not count."""
    times = []
    for _ in range(rounds + 1):
        with Stopwatch() as watch:
            call()
        times.append(watch.seconds)
    return min(times[1:])


def bits_per_symbol(model: Any, sequences: Sequences) -> float:
    """Returns the negative log-likelihood per symbol to base 2."""
    return -float(model.score(sequences).sum()) / sequences.num_steps / math.log(2)


def mean_and_spread(numbers: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Formats mean and standard deviation over runs; a single run has no deviation, and ``-`` stands for no runs."""
    if not numbers:
        return "-"
    spread = f" ± {np.std(numbers, ddof=1):.{digits}f}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):{sign}.{digits}f}{spread}"


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, the lower and the upper quartile."""
    low, median, high = np.quantile(numbers, [0.25, 0.5, 0.75]).tolist()
    return median, low, high
