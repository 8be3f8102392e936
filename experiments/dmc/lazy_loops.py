"""Kernels of the lazy selection of the entries of a mostly constant matrix; see `experiments.dmc.lazy`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from lightning_hmm.inference.cpu.cache import inner, kernel, record_source
from lightning_hmm.inference.kernels.selection_loops import GAIN, insert, set_value


class Messages(NamedTuple):
    """Messages before and after each transition, (T, N), and their transposes."""

    alpha: np.ndarray
    kappa: np.ndarray
    alpha_columns: np.ndarray
    kappa_columns: np.ndarray


class Large(NamedTuple):
    """The result of `large_entries`: steps, their number, the limit, and the sum over all other steps, by state."""

    places: np.ndarray
    counts: np.ndarray
    limits: np.ndarray
    small_sums: np.ndarray


class Old(NamedTuple):
    """The kept entries before the selection, with their exact counts, and the pseudocount."""

    indices: np.ndarray
    log_values: np.ndarray
    log_constants: np.ndarray
    kept: np.ndarray
    rest: np.ndarray
    pseudocount: float


@njit(nogil=True, error_model="numpy")
def _ordered_sum(values):
    """Sums in order. The last bits of vectorized sums would depend on the alignment of the array."""
    total = 0.0
    for value in values:
        total += value
    return total


@inner
def large_entries(columns, num_terms, places, counts, limits, small_sums):
    """Finds the steps above the `num_terms`-th largest number of each row of `columns` (states by steps).

    `limits` are these numbers, and `small_sums` are the sums over all other steps.
    """
    for i in range(columns.shape[0]):
        column = columns[i]
        limits[i] = np.partition(column, column.shape[0] - num_terms)[column.shape[0] - num_terms]
        counts[i], total = 0, 0.0
        for t in range(column.shape[0]):
            if column[t] > limits[i]:
                places[i, counts[i]] = t
                counts[i] += 1
            else:
                total += np.float64(column[t])
        small_sums[i] = total


@inner
def _exact_product(left, right):
    total = 0.0
    for t in range(left.shape[0]):
        total += np.float64(left[t]) * np.float64(right[t])
    return total


@inner
def _partial_block(first, last, messages, large_alpha, large_kappa, small, sums, partial):
    """Computes partial[b, j], the sum of alpha_t(first + b) kappa_t(j) over the steps at which either is large."""
    alpha, kappa, _, kappa_columns = messages
    width = last - first
    for t in range(alpha.shape[0]):
        for b in range(width):
            small[t, b] = alpha[t, first + b]
    for b in range(width):
        i = first + b
        partial[b, :] = 0
        for n in range(large_alpha.counts[i]):
            t = large_alpha.places[i, n]
            weight = alpha[t, i]
            small[t, b] = 0
            for j in range(kappa.shape[1]):
                partial[b, j] += weight * kappa[t, j]
    for j in range(kappa_columns.shape[0]):
        sums[:] = 0
        for n in range(large_kappa.counts[j]):
            t = large_kappa.places[j, n]
            weight = kappa_columns[j, t]
            for b in range(width):
                sums[b] += weight * small[t, b]
        for b in range(width):
            partial[b, j] += sums[b]


@kernel
def lazy_rows(
    first, last, messages, large_alpha, large_kappa, old_set, new_indices, new_log_values, kept, rest, changes, products
):
    """Selects the K highest entries of the rows from `first` to `last`, as `choose_rows`, with few exact sums.

    The upper bound of S_ij is A_ij times the sum of the partial sum and the smaller of two bounds of the remainder. The
    smallest of the old entries is a threshold, which most bounds do not reach.
    """
    indices, log_values, log_constants, kept_counts, rest_counts, pseudocount = old_set
    alpha, alpha_columns, kappa_columns = messages.alpha, messages.alpha_columns, messages.kappa_columns
    size, num_kept = indices.shape
    width = last - first
    small, sums = np.empty((alpha.shape[0], width), alpha.dtype), np.empty(width, alpha.dtype)
    partial = np.empty((width, size), alpha.dtype)
    _partial_block(first, last, messages, large_alpha, large_kappa, small, sums, partial)
    bounds, candidates, is_old = np.empty(size), np.empty(size, np.int64), np.zeros(size, np.bool_)
    highest, highest_at, old = np.empty(num_kept), np.empty(num_kept, np.int64), np.empty(num_kept)
    # Rounding can make partial sums too small, so the bounds are increased.
    slack = 1 + 64 * (6e-8 if alpha.itemsize == 4 else 1.2e-16)
    for b in range(width):
        i = first + b
        constant = math.exp(log_constants[i])
        prior = pseudocount if log_constants[i] > -np.inf else 0.0
        for k in range(num_kept):
            is_old[indices[i, k]] = True
            old[k] = kept_counts[i, k] + (pseudocount if log_values[i, k] > -np.inf else 0.0)
            insert(highest, highest_at, k, old[k], indices[i, k])
        products[i], found = num_kept, 0
        for j in range(size):
            if not is_old[j]:
                remainder = min(
                    large_alpha.limits[i] * large_kappa.small_sums[j], large_alpha.small_sums[i] * large_kappa.limits[j]
                )
                bounds[j] = constant * (partial[b, j] + remainder) * slack + prior
                if bounds[j] > highest[num_kept - 1]:
                    candidates[found] = j
                    found += 1
        for n in np.argsort(-bounds[candidates[:found]], kind="mergesort"):
            j = candidates[n]
            if bounds[j] <= highest[num_kept - 1]:
                break
            exact = constant * _exact_product(alpha_columns[i], kappa_columns[j]) + prior
            products[i] += 1
            if exact > highest[num_kept - 1]:
                insert(highest, highest_at, num_kept, exact, j)
        old_rest = rest_counts[i] + (size - num_kept) * prior
        total = old_rest + _ordered_sum(old)
        new_rest = total - _ordered_sum(highest)
        changes[i] = 0
        for j in highest_at:
            changes[i] += not is_old[j]
        new_indices[i] = indices[i]
        if (
            changes[i] > 0
            and total > 0
            and new_rest > 0
            and set_value(highest, new_rest, total, size - num_kept)
            > set_value(old, old_rest, total, size - num_kept) + GAIN
        ):
            new_indices[i] = np.sort(highest_at)
        else:
            changes[i] = 0
        rest[i] = rest_counts[i] if changes[i] == 0 else max(new_rest - (size - num_kept) * prior, 0.0)
        for k in range(num_kept):
            j = new_indices[i, k]
            if is_old[j]:
                for n in range(num_kept):
                    if indices[i, n] == j:
                        new_log_values[i, k], kept[i, k] = log_values[i, n], kept_counts[i, n]
            else:
                for n in range(num_kept):
                    if highest_at[n] == j:
                        new_log_values[i, k], kept[i, k] = log_constants[i], highest[n] - prior
        for k in range(num_kept):
            is_old[indices[i, k]] = False


record_source(Old, lazy_rows.py_func)  # Compiled code that is cached becomes invalid if this file changes.
