"""Kernels for the M-step, which are used by the compiled passes of online EM and for transitions between clones.

An update of a parameter computes ``buffer = discount * buffer + (1 - discount) * counts``. Each row of the parameter is
then proportional to the bias-corrected buffer plus the prior. `BaumWelch.step` computes the same in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, kernel
from lightning_hmm.inference.kernels.threads import no_subnormals, run_shares


class Part(NamedTuple):
    """A parameter of a compiled pass. All arrays are flat.

    row_first: (rows + 1,) positions at which the rows begin.
    values: Probabilities or their logarithms. Entries of zero, or -inf, do not change.
    counts: Expected counts of the present batch.
    buffer: Discounted counts.
    prior: Pseudocount of the prior for each entry, relative to the counts of all data. It may be negative.
    frozen: Whether the values are fixed.
    are_logs: Whether the values are logarithms.
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
    """Sets rows `first` to `last` proportional to max(factor * counts + added, 0), except for impossible entries.

    Returns the number of rows without counts, which do not change.
    """
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
    """Discounts the number of sequences in a batch.

    Returns the factors of the buffers and of the prior in update `step`.
    """
    sizes[0] = discount * sizes[0] + (1 - discount) * started
    factor = 1.0 / (1.0 - discount**step)
    return factor, sizes[0] * factor / data_size


@kernel
def update_rows(first, last, row_first, part, discount, factor, prior_scale):
    """Updates the rows `first` to `last` of a part."""
    for k in range(row_first[first], row_first[last]):
        part.buffer[k] = discount * part.buffer[k] + (1 - discount) * part.counts[k]
    if not part.frozen:
        normalize_rows(
            first, last, row_first, part.values, part.buffer, factor, part.prior * prior_scale, part.are_logs
        )


@inner
def update(parts, sizes, started, step, discount, data_size):
    """Updates all parts from the counts of a batch of `started` sequences."""
    factor, prior_scale = advance(sizes, started, step, discount, data_size)
    for part in parts:
        update_rows(0, part.row_first.shape[0] - 1, part.row_first, part, discount, factor, prior_scale)


def run_flushed(shares: int, work: Callable[[int], Any]) -> None:
    """Calls `run_shares` with subnormal numbers treated as zero.

    They are frequent in messages and vanishing parameters.
    """

    def flushed(share: int) -> None:
        with no_subnormals():
            work(share)

    run_shares(shares, flushed, spread=True)


def over_rows(row_first: np.ndarray, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs ``work(first row, last row, row_first, *arguments)`` on ranges of rows of about the same size.

    Returns the list of results.
    """
    size = int(row_first[-1])
    shares = max(1, min(64, size >> 16))
    cuts = np.searchsorted(row_first, np.linspace(0, size, shares + 1))
    cuts[0], cuts[-1] = 0, row_first.shape[0] - 1
    results = [None] * shares

    def run(share: int) -> None:
        results[share] = work(int(cuts[share]), int(cuts[share + 1]), row_first, *arguments)

    run_flushed(shares, run)
    return results
