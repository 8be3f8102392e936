"""Kernels that select the K entries of each row to keep.

Let S_ij be the expected transitions and G_i the sum of row i. If the set M of row i is kept and the M-step follows, the
contribution of the row to the expected log-likelihood Q is, up to a constant, G_i times

    sum over j in M of p_j log p_j + r log(r / (N - K)),     p = S_i / G_i,  r = 1 - sum over M of p

which is what `set_value` returns. All sums are over positive numbers, without subtraction.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_hmm.inference.cpu.cache import kernel, strict_kernel
from lightning_hmm.inference.kernels.products import multiply_add

GAIN = 1e-12  # The set of a row changes only if the gain in `set_value` exceeds this, so not because of rounding.


@kernel
def multiply_rows(first, last, alpha, kappa, partial, out):
    """Adds sum_t alpha_t(i) kappa_t+1(j) to out[i - first, j], in blocks that are short enough for float32 sums.

    The bits of BLAS products would depend on the number of threads.
    """
    steps, padded, zero = alpha.shape[0], alpha.shape[1], alpha.dtype.type(0.0)
    alpha_at, kappa_at, partial_at = alpha.ctypes.data, kappa.ctypes.data, partial.ctypes.data
    panel = max(16, min(128, (1 << 20) // (padded * alpha.itemsize)))  # steps whose kappa remain in the cache
    for block in range(0, steps - 1, 2048):
        partial[:] = zero
        for start in range(block, min(block + 2048, steps - 1), panel):
            depth = min(panel, min(block + 2048, steps - 1) - start)
            x_at, y_at = (
                alpha_at + (start * padded + first) * alpha.itemsize,
                kappa_at + (start + 1) * padded * alpha.itemsize,
            )
            multiply_add(zero, partial_at, x_at, 1, padded, y_at, padded, last - first, padded, depth)
        for i in range(last - first):
            for j in range(out.shape[1]):
                out[i, j] += np.float64(partial[i, j])


@strict_kernel
def _entropy_term(p):
    return p * math.log(p) if p > 0 else 0.0


@strict_kernel
def set_value(kept, rest, total, num_others):
    value = _entropy_term(rest / total) - rest / total * math.log(num_others)
    for s in kept:
        value += _entropy_term(s / total)
    return value


@strict_kernel
def insert(values, places, filled, value, place):
    """Inserts into a descending list, after equal values. If the list is full, its last value is removed."""
    k = min(filled, values.shape[0] - 1)
    while k > 0 and values[k - 1] < value:
        values[k], places[k] = values[k - 1], places[k - 1]
        k -= 1
    values[k], places[k] = value, place


@strict_kernel
def _extremes(row, highest, highest_at, lowest, lowest_at):
    """Finds the K highest values, with ties by ascending position, and the K lowest ones.

    The lowest values are negated, and their ties are by descending position.
    """
    size, num_kept = row.shape[0], highest.shape[0]
    for j in range(size):
        if j < num_kept or row[j] > highest[num_kept - 1]:
            insert(highest, highest_at, j, row[j], j)
    if lowest.shape[0] > 0:
        for n in range(size):
            j = size - 1 - n
            if n < num_kept or -row[j] > lowest[num_kept - 1]:
                insert(lowest, lowest_at, n, -row[j], j)


@strict_kernel
def _best_window(row, total, highest, highest_at, lowest, lowest_at, chosen):
    """Fills `chosen` with the best set of the a highest and K - a lowest entries, and returns its value.

    If `lowest` is empty, it is the set of the K highest entries.
    """
    size, num_kept = row.shape[0], highest.shape[0]
    in_ends = np.zeros(size, np.bool_)
    for k in range(num_kept):
        in_ends[highest_at[k]] = True
        if lowest.shape[0] > 0:
            in_ends[lowest_at[k]] = True
    middle = 0.0
    for j in range(size):
        if not in_ends[j]:
            middle += row[j]
    overlap = lowest.shape[0] > 0 and 2 * num_kept > size
    order = np.argsort(-row, kind="mergesort") if overlap else np.zeros(0, np.int64)
    best, best_value, kept = num_kept, -np.inf, np.empty(num_kept)
    for a in range(num_kept, -1 if lowest.shape[0] > 0 else num_kept - 1, -1):
        rest = 0.0
        if overlap:
            for n in range(a, a + size - num_kept):
                rest += row[order[n]]
        else:
            rest = middle
            for k in range(a, num_kept):
                rest += highest[k]
            if lowest.shape[0] > 0:
                for k in range(num_kept - a, num_kept):
                    rest -= lowest[k]
        for k in range(num_kept):
            kept[k] = highest[k] if k < a else -lowest[k - a]
        value = set_value(kept, rest, total, size - num_kept)
        if value > best_value + GAIN:
            best, best_value = a, value
    for k in range(num_kept):
        chosen[k] = highest_at[k] if k < best else lowest_at[k - best]
    return best_value


@strict_kernel
def choose_rows(
    pairs, indices, log_values, log_constants, pseudocount, window, new_indices, new_log_values, kept, rest, changes
):
    """Selects the entries to keep for each row of `pairs` (S_ij): the K highest or, with `window`, the best set.

    The old set is kept if nothing is gained. `new_log_values` are the entries of the old matrix, and `kept` and `rest`
    are the counts for the M-step.
    """
    size, num_kept = pairs.shape[1], indices.shape[1]
    row, is_old, logs = np.empty(size), np.zeros(size, np.bool_), np.empty(size)
    highest, highest_at, chosen = np.empty(num_kept), np.empty(num_kept, np.int64), np.empty(num_kept, np.int64)
    lowest, lowest_at = np.empty(num_kept if window else 0), np.empty(num_kept if window else 0, np.int64)
    old = np.empty(num_kept)
    for i in range(pairs.shape[0]):
        logs[:], is_old[:] = log_constants[i], False
        for k in range(num_kept):
            logs[indices[i, k]], is_old[indices[i, k]] = log_values[i, k], True
        total, old_rest = 0.0, 0.0
        for j in range(size):
            row[j] = pairs[i, j] + (pseudocount if logs[j] > -np.inf else 0.0)
            total += row[j]
            if not is_old[j]:
                old_rest += row[j]
        changes[i] = 0
        new_indices[i] = indices[i]
        if total > 0:
            for k in range(num_kept):
                old[k] = row[indices[i, k]]
            _extremes(row, highest, highest_at, lowest, lowest_at)
            value = _best_window(row, total, highest, highest_at, lowest, lowest_at, chosen)
            if value > set_value(old, old_rest, total, size - num_kept) + GAIN:
                chosen.sort()
                new_indices[i] = chosen
                for j in chosen:
                    changes[i] += not is_old[j]
        is_old[:] = False
        for k in range(num_kept):
            j = new_indices[i, k]
            new_log_values[i, k], kept[i, k], is_old[j] = logs[j], pairs[i, j], True
        rest[i] = 0.0
        for j in range(size):
            if not is_old[j]:
                rest[i] += pairs[i, j]
