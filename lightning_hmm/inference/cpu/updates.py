"""The update of EM from expected counts, compiled: what every compiled pass of online EM and the M-step of clones call.

One update of a parameter is ``buffer = discount * buffer + (1 - discount) * counts``, then each row is proportional to the buffer over its correction
plus the prior. `BaumWelch.step` does the same in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, kernel
from lightning_hmm.inference.kernels.lanes import no_subnormals, run_lanes


class Part(NamedTuple):
    """A parameter of a compiled pass. All arrays are flat.

    row_first: (rows + 1,) where the rows begin.
    values: the probabilities, or their logarithms; zero, or -inf, stays.
    counts: the expected counts of the present batch.
    buffer: the discounted counts.
    prior: what the prior adds to each count of the whole data; negative if it takes some away.
    frozen: whether the values stay as they are.
    are_logs: whether the values are logarithms.
    """

    row_first: np.ndarray
    values: np.ndarray
    counts: np.ndarray
    buffer: np.ndarray
    prior: float
    frozen: bool
    are_logs: bool


@kernel
def normalize_rows(first, last, row_first, values, counts, factor, added, are_logs):
    """Rows `first` to `last` become max(factor * counts + added, 0) over its sum, where they are possible already. Returns the rows without counts."""
    kept, impossible = 0, -np.inf if are_logs else 0.0
    for n in range(first, last):
        row, count = values[row_first[n] : row_first[n + 1]], counts[row_first[n] : row_first[n + 1]]
        total = 0.0
        for j in range(row.shape[0]):
            if row[j] > impossible:
                total += max(factor * count[j] + added, 0.0)
        if not total > 0:
            kept += 1
        elif are_logs:
            for j in range(row.shape[0]):
                if row[j] > impossible:
                    row[j] = np.log(max(factor * count[j] + added, 0.0) / total)
        else:
            scale = 1.0 / total
            for j in range(row.shape[0]):
                if row[j] > impossible:
                    row[j] = max(factor * count[j] + added, 0.0) * scale
    return kept


@kernel
def advance(sizes, started, step, discount, data_size):
    """Discounts the number of sequences in a batch. Returns the factor of the buffers of update number `step`, and the share of the prior."""
    sizes[0] = discount * sizes[0] + (1 - discount) * started
    factor = 1.0 / (1.0 - discount**step)
    return factor, sizes[0] * factor / data_size


@kernel
def update_rows(first, last, row_first, part, discount, factor, share):
    """The update of the rows `first` to `last` of a part."""
    for k in range(row_first[first], row_first[last]):
        part.buffer[k] = discount * part.buffer[k] + (1 - discount) * part.counts[k]
    if not part.frozen:
        normalize_rows(first, last, row_first, part.values, part.buffer, factor, part.prior * share, part.are_logs)


@inner
def update(parts, sizes, started, step, discount, data_size):
    """The update of all parts, from the counts of a batch of `started` sequences."""
    factor, share = advance(sizes, started, step, discount, data_size)
    for part in parts:
        update_rows(0, part.row_first.shape[0] - 1, part.row_first, part, discount, factor, share)


def run_flushed(lanes: int, work: Callable[[int], Any]) -> None:
    """`run_lanes`, with subnormal numbers as zeros: entries that EM is about to end, and messages on their way out, are full of them."""

    def flushed(lane: int) -> None:
        with no_subnormals():
            work(lane)

    run_lanes(lanes, flushed, spread=True)


def over_rows(row_first: np.ndarray, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs ``work(first row, last row, row_first, *arguments)`` on stretches of about the same size, and returns the results."""
    size = int(row_first[-1])
    lanes = max(1, min(64, size >> 16))
    cuts = np.searchsorted(row_first, np.linspace(0, size, lanes + 1))
    cuts[0], cuts[-1] = 0, row_first.shape[0] - 1
    results = [None] * lanes

    def run(lane: int) -> None:
        results[lane] = work(int(cuts[lane]), int(cuts[lane + 1]), row_first, *arguments)

    run_flushed(lanes, run)
    return results
