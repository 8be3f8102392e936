"""Kernels of the operator `MostlyConstant`. Row i of S keeps M entries a_ij and has a constant c_i for all others.

    predicted(j) = sum_i alpha(i) c_i + sum over the rows i that keep j of alpha(i) (a_ij - c_i)

The backward step is the same along the rows. A step takes S M multiplications instead of S^2. If a kept entry is below
the constant of its row, the correction is negative. If the result is small compared with the first sum, so that
precision is lost, it is computed again without subtraction, in O(S).

For one sequence, a vector contains one element of the lists of as many columns, or rows, as it has lanes. A tile of
sequences is transposed for the forward pass, so that a weight is multiplied by a vector of sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, strict_kernel
from lightning_hmm.inference.cpu.driver import best, best_source, implements, predict, retract
from lightning_hmm.inference.cpu.prepared import Facts, Prepared, prepares, scores
from lightning_hmm.inference.kernels.gather import (
    gather_count,
    gather_max,
    gather_sum,
    largest_sum,
    tile_column_one,
    tile_column_two,
    transpose_block,
    vector_lanes,
)
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros
from lightning_hmm.inference.operators import MostlyConstant, ShiftRegister

# If the fraction of a sum that is left after a subtraction is below this, it is computed again without subtraction.
_CANCELLED = {np.dtype(np.float32): 1e-2, np.dtype(np.float64): 1e-4}
_SCATTERED = 8  # time for a kept entry of a single row, relative to one in the lists of all columns
_SEARCHED = 64  # numbers whose maximum is computed at once
_SUMMED = 256  # messages whose counts are summed in the data type of the messages


class ColumnLists(NamedTuple):
    """For each column, the list of the rows that keep it.

    starts: (S + 1,) positions at which the lists begin in `sources` and `positions`.
    sources: Rows that keep each column.
    positions: Positions of the kept entries in the flat (S, M) arrays.
    order: (S,) columns by decreasing length of their lists, for the interleaved lists.
    slice_starts: First row of each slice in `slice_sources` and `weights`. A slice has the lists of as many columns as
        a vector has lanes.
    slice_sources: (rows, lanes) interleaved lists of rows.
    weights: (rows, lanes) weights of the interleaved lists.
    """

    starts: np.ndarray
    sources: np.ndarray
    positions: np.ndarray
    order: np.ndarray
    slice_starts: np.ndarray
    slice_sources: np.ndarray
    weights: np.ndarray


@strict_kernel
def find_columns(indices, starts, sources, positions):
    """Fills the lists of rows that keep each column."""
    num_states, num_kept = indices.shape
    for i in range(num_states):
        for m in range(num_kept):
            starts[indices[i, m] + 1] += 1
    for j in range(num_states):
        starts[j + 1] += starts[j]
    filled = starts[:-1].copy()
    for i in range(num_states):
        for m in range(num_kept):
            j = indices[i, m]
            sources[filled[j]], positions[filled[j]] = i, i * num_kept + m
            filled[j] += 1


@strict_kernel
def interleave(lanes, starts, sources, positions, numbers, order, slice_starts, slice_sources, weights):
    """Interleaves the lists of `lanes` columns. The arrays do not change after the end of a shorter list."""
    for n in range(order.shape[0]):
        j, first, lane = order[n], slice_starts[n // lanes], n % lanes
        for p in range(starts[j], starts[j + 1]):
            slice_sources[first + p - starts[j], lane] = sources[p]
            weights[first + p - starts[j], lane] = numbers[positions[p]]


def _column_lists(indices: np.ndarray, numbers: np.ndarray, neutral: float) -> ColumnLists:
    num_states, lanes = indices.shape[0], vector_lanes(numbers.itemsize)
    starts, sources, positions = (
        np.zeros(num_states + 1, np.int64),
        np.empty(indices.size, np.int32),
        np.empty(indices.size, np.int64),
    )
    find_columns(indices, starts, sources, positions)
    lengths = np.diff(starts)
    order = np.argsort(-lengths, kind="stable")
    slice_starts = np.concatenate(
        [[0], np.cumsum(lengths[order[::lanes]])]
    )  # The first list of a slice is the longest.
    slice_sources, weights = (
        np.zeros((slice_starts[-1], lanes), np.int32),
        aligned_zeros(numbers.dtype, int(slice_starts[-1]), lanes),
    )
    weights[:] = neutral
    interleave(lanes, starts, sources, positions, numbers.reshape(-1), order, slice_starts, slice_sources, weights)
    return ColumnLists(starts, sources, positions, order, slice_starts, slice_sources, weights)


class PairLists(NamedTuple):
    """The lists of `ColumnLists`, padded with a weight of zero to an even length.

    starts: (S + 1,) first pair of entries of each column.
    sources: Rows that keep each column.
    weights: Weights of the entries.
    """

    starts: np.ndarray
    sources: np.ndarray
    weights: np.ndarray


def _pair_lists(columns: ColumnLists, numbers: np.ndarray) -> PairLists:
    lengths = np.diff(columns.starts)
    starts = np.concatenate([[0], np.cumsum((lengths + 1) // 2)])
    sources, weights = np.zeros(2 * starts[-1], np.int32), np.zeros(2 * starts[-1], numbers.dtype)
    places = np.arange(lengths.sum()) + np.repeat(2 * starts[:-1] - columns.starts[:-1], lengths)
    sources[places], weights[places] = columns.sources, numbers.reshape(-1)[columns.positions]
    return PairLists(starts, sources, weights)


class ConstantArrays(NamedTuple):
    """Transition probabilities.

    constants: (padded,) constants of the rows.
    indices, values: (S, M) columns and probabilities of the kept entries.
    columns, pairs: Lists of the rows that keep each column, with weights a_ij - c_i.
    targets, target_weights: (slices, M, lanes) kept columns of each row and weights a_ij - c_i, interleaved.
    low_columns, low_rows: Columns and rows with a kept entry below the constant of its row.
    cancelled: Threshold for the fraction that is left after a subtraction.
    smallest: Smallest fraction that can be distinguished from a rounding error.
    """

    constants: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    columns: ColumnLists
    pairs: PairLists
    targets: np.ndarray
    target_weights: np.ndarray
    low_columns: np.ndarray
    low_rows: np.ndarray
    cancelled: Any
    smallest: Any


class ConstantSums(NamedTuple):
    """Sums of products of messages before and after a transition.

    partial: (slices * M * lanes,) sums for the kept entries in the data type of the messages.
    counts: (slices * M * lanes,) sums for the kept entries in float64.
    rest: (padded,) sums for all other entries of each row.
    summed: (1,) number of messages in `partial`.
    kept: (padded,) scratch space of a step.
    """

    partial: np.ndarray
    counts: np.ndarray
    rest: np.ndarray
    summed: np.ndarray
    kept: np.ndarray


@inner
def _exact_column(op, messages, slot, b, j):
    """Returns the sum over i of messages[slot, b, i] A_ij, computed without subtraction."""
    columns, total = op.columns, messages.dtype.type(0)
    p, end = columns.starts[j], columns.starts[j + 1]
    for i in range(op.indices.shape[0]):
        if p < end and columns.sources[p] == i:
            total += messages[slot, b, i] * op.values[i, columns.positions[p] - i * op.values.shape[1]]
            p += 1
        else:
            total += messages[slot, b, i] * op.constants[i]
    return total


@inner
def _gather_columns(op, messages, slot, b, shared):
    """Computes messages[slot + 1, b] = shared + messages[slot, b] @ weights, for one sequence."""
    size, tile, padded, columns = messages.itemsize, messages.shape[1], messages.shape[2], op.columns
    lanes, gathered = columns.slice_sources.shape[1], np.empty(columns.slice_sources.shape[1], messages.dtype)
    sources_at, weights_at, gathered_at = (
        columns.slice_sources.ctypes.data,
        columns.weights.ctypes.data,
        gathered.ctypes.data,
    )
    source_at = messages.ctypes.data + (slot * tile + b) * padded * size
    for s in range(columns.slice_starts.shape[0] - 1):
        begin = columns.slice_starts[s]
        count = columns.slice_starts[s + 1] - begin
        gather_sum(
            shared,
            gathered_at,
            shared,
            weights_at + begin * lanes * size,
            sources_at + begin * lanes * 4,
            source_at,
            count,
        )
        for lane in range(min(lanes, op.indices.shape[0] - s * lanes)):
            messages[slot + 1, b, columns.order[s * lanes + lane]] = gathered[lane]


@inner
def _tile_columns(op, messages, slot, first, vectors, shared_at, work_at):
    """Computes the same as `_gather_columns`, for one or two vectors of sequences from number `first` on.

    Sequences after the end of the tile are replaced by the last one.
    """
    zero, size, tile, padded = messages.dtype.type(0), messages.itemsize, messages.shape[1], messages.shape[2]
    pairs, num_states, lanes = op.pairs, op.indices.shape[0], op.columns.slice_sources.shape[1]
    row_bytes, width_bytes, vector_bytes = padded * size, vectors * lanes * size, lanes * size
    before_at, block_at = messages.ctypes.data + (slot * tile + first) * row_bytes, work_at + padded * width_bytes
    sources_at, weights_at, last = pairs.sources.ctypes.data, pairs.weights.ctypes.data, tile - 1 - first
    for v in range(vectors):
        rows_at, rows_last = before_at + v * lanes * row_bytes, last - v * lanes
        for k in range(0, padded, lanes):
            transpose_block(
                zero,
                work_at + k * width_bytes + v * vector_bytes,
                width_bytes,
                lanes,
                rows_at + k * size,
                row_bytes,
                rows_last,
            )
    for k in range(0, padded, lanes):
        for j in range(k, min(k + lanes, num_states)):
            begin, out_at = pairs.starts[j], block_at + (j - k) * width_bytes
            entries_at, places_at, count = (
                weights_at + 2 * begin * size,
                sources_at + 8 * begin,
                pairs.starts[j + 1] - begin,
            )
            if vectors == 1:
                tile_column_one(zero, out_at, shared_at, entries_at, places_at, work_at, count)
            else:
                tile_column_two(zero, out_at, shared_at, entries_at, places_at, work_at, count)
        for v in range(vectors):
            rows_at, rows_last = before_at + (tile + v * lanes) * row_bytes, last - v * lanes
            transpose_block(
                zero, rows_at + k * size, row_bytes, rows_last, block_at + v * vector_bytes, width_bytes, lanes
            )


@implements(ConstantArrays, predict)
def _predict(op, starts, t, active, rows, messages, slot):
    zero, tile, padded, lanes = (
        messages.dtype.type(0),
        messages.shape[1],
        messages.shape[2],
        op.columns.slice_sources.shape[1],
    )
    shared = np.empty(tile + 2 * lanes, messages.dtype)
    for b in range(rows):
        total = zero
        for k in range(padded):
            total += messages[slot, b, k] * op.constants[k]
        shared[b] = total
    if rows < 4:
        for b in range(rows):
            _gather_columns(op, messages, slot, b, shared[b])
    else:
        shared[rows:] = shared[rows - 1]
        work = np.empty((padded + lanes) * 2 * lanes + lanes, messages.dtype)
        work_at = work.ctypes.data + -work.ctypes.data % (lanes * messages.itemsize)
        b = 0
        while b < rows:
            vectors = 1 if b + lanes >= rows else 2
            _tile_columns(op, messages, slot, b, vectors, shared[b:].ctypes.data, work_at)
            b += vectors * lanes
    for b in range(rows):
        for j in op.low_columns:
            if messages[slot + 1, b, j] < op.cancelled * shared[b]:
                messages[slot + 1, b, j] = _exact_column(op, messages, slot, b, j)
        for k in range(op.indices.shape[0], padded):
            messages[slot + 1, b, k] = zero


@inner
def _exact_row(op, kappa, slot, b, i):
    """Returns sums for row i, computed without subtraction.

    They are the sum over the kept columns j of kappa[slot, b, j] A_ij, and the sum of kappa over all other columns.
    """
    message, others, p = kappa.dtype.type(0), kappa.dtype.type(0), 0
    for j in range(op.indices.shape[0]):
        if p < op.indices.shape[1] and op.indices[i, p] == j:
            message += op.values[i, p] * kappa[slot, b, j]
            p += 1
        else:
            others += kappa[slot, b, j]
    return message, others


@inner
def _add_counts(sums):
    for n in range(sums.partial.shape[0]):
        sums.counts[n] += np.float64(sums.partial[n])
        sums.partial[n] = 0
    sums.summed[0] = 0


@implements(ConstantArrays, retract)
def _retract(op, sums, starts, t, active, rows, alpha, kappa, slot, beta):
    zero, size, tile, padded = beta.dtype.type(0), beta.itemsize, beta.shape[0], beta.shape[1]
    slices, num_kept, lanes = op.targets.shape
    targets_at, weights_at, partial_at = op.targets.ctypes.data, op.target_weights.ctypes.data, sums.partial.ctypes.data
    kept, kept_at = sums.kept, sums.kept.ctypes.data
    for b in range(active):
        everything = zero
        for k in range(padded):
            everything += kappa[slot, b, k]
        kappa_at, alpha_at = (
            kappa.ctypes.data + (slot * tile + b) * padded * size,
            alpha.ctypes.data + (t * tile + b) * padded * size,
        )
        beta_at = beta.ctypes.data + b * padded * size
        for s in range(slices):
            begin, here = s * num_kept * lanes, s * lanes * size
            weights_here, targets_here, sums_here = (
                weights_at + begin * size,
                targets_at + begin * 4,
                partial_at + begin * size,
            )
            gather_count(
                zero,
                beta_at + here,
                kept_at + here,
                weights_here,
                targets_here,
                kappa_at,
                alpha_at + here,
                sums_here,
                num_kept,
            )
        sign = beta.dtype.type(1) if everything >= zero else beta.dtype.type(-1)  # sign of the weight of the sequence
        floor = op.smallest * everything * sign
        for k in range(padded):
            others = sign * (everything - kept[k])
            # Smaller numbers cannot be distinguished from rounding errors. With zero, the constant would vanish for
            # good.
            others = sign * (others if others > floor else floor)
            kept[k] = others
            beta[b, k] += op.constants[k] * everything
            sums.rest[k] += np.float64(alpha[t, b, k] * others)
        for i in op.low_rows:
            if sign * kept[i] < sign * op.cancelled * everything and alpha[t, b, i] > zero:
                message, others = _exact_row(op, kappa, slot, b, i)
                sums.rest[i] += np.float64(alpha[t, b, i] * (others - kept[i]))
                beta[b, i] = message + op.constants[i] * others
        sums.summed[0] += 1
    if sums.summed[0] >= _SUMMED or t == 1:
        _add_counts(sums)


@prepares(MostlyConstant)
@prepares(ShiftRegister)
def prepare(operator: MostlyConstant, dtype: np.dtype) -> Prepared:
    log_values, log_constants = operator.log_values.numpy(), operator.log_constants.numpy()
    indices = np.ascontiguousarray(operator.indices.numpy(), np.int32)
    (num_states, num_kept), lanes = indices.shape, vector_lanes(dtype.itemsize)
    padded, slices = padded_size(num_states, dtype.itemsize), -(-num_states // lanes)
    values, plain = np.exp(log_values), np.exp(log_constants)
    constants = aligned_zeros(dtype, padded)
    constants[:num_states] = plain
    weights = (values - plain[:, None]).astype(dtype)
    low, columns = log_values < log_constants[:, None], _column_lists(indices, weights, 0.0)
    targets, target_weights = (
        np.zeros((slices, num_kept, lanes), np.int32),
        aligned_zeros(dtype, slices, num_kept, lanes),
    )
    by_row = np.zeros((slices * lanes, num_kept), np.int32)
    by_row[:num_states] = indices
    targets[:] = by_row.reshape(slices, lanes, num_kept).transpose(0, 2, 1)
    row_weights = np.zeros((slices * lanes, num_kept), dtype)
    row_weights[:num_states] = weights
    target_weights[:] = row_weights.reshape(slices, lanes, num_kept).transpose(0, 2, 1)
    arrays = ConstantArrays(
        constants,
        indices,
        values.astype(dtype),
        columns,
        _pair_lists(columns, weights),
        targets,
        target_weights,
        low_columns=np.unique(indices[low]).astype(np.int64),
        low_rows=np.flatnonzero(low.any(1)),
        cancelled=dtype.type(_CANCELLED[dtype]),
        smallest=dtype.type(np.finfo(dtype).eps),
    )
    entries = np.concatenate([log_values.reshape(-1), log_constants if num_kept < num_states else log_constants[:0]])
    probs, possible = np.exp(entries), np.exp(entries[entries > -np.inf])
    growth = values.sum(1) + plain * (num_states - num_kept)
    facts = Facts(
        float(probs.min(initial=np.inf)),
        float(possible.min(initial=np.inf)),
        float(probs.max(initial=0.0)),
        float(growth.max(initial=0.0)),
    )
    size = slices * num_kept * lanes

    def sums(shares: int) -> list[ConstantSums]:
        partial, kept = aligned_zeros(dtype, shares, size), aligned_zeros(dtype, shares, padded)
        counts, rest = np.zeros((shares, size)), np.zeros((shares, padded))
        return [
            ConstantSums(partial[share], counts[share], rest[share], np.zeros(1, np.int64), kept[share])
            for share in range(shares)
        ]

    def counts(sums: list[ConstantSums]) -> tuple[np.ndarray, ...]:
        kept = (
            np.sum([part.counts for part in sums], 0)
            .reshape(slices, num_kept, lanes)
            .transpose(0, 2, 1)
            .reshape(slices * lanes, num_kept)
        )
        return kept[:num_states] * values, np.sum([part.rest for part in sums], 0)[:num_states] * plain

    return Prepared(arrays, facts, 1, 8 * (size + padded), sums, counts, 2 * lanes)


class ConstantScores(NamedTuple):
    """Transition log-probabilities.

    constants: (padded,) constants of the rows.
    indices, values: (S, M) columns and log-probabilities of the kept entries.
    columns: Lists of the rows that keep each column, with log-probabilities as weights.
    row_best: (padded,) largest kept entry of each row.
    """

    constants: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    columns: ColumnLists
    row_best: np.ndarray


@inner
def _best_constant(op, message):
    """Returns the first state i with the largest message[i] + log c_i, and this sum."""
    size, message_at, constants_at, found, largest = (
        message.shape[0],
        message.ctypes.data,
        op.constants.ctypes.data,
        0,
        -np.inf,
    )
    for first in range(0, size, _SEARCHED):
        here = largest_sum(0.0, min(_SEARCHED, size - first), message_at + 8 * first, constants_at + 8 * first)
        if here > largest:
            found, largest = first, here
    while found < op.indices.shape[0] - 1 and message[found] + op.constants[found] != largest:
        found += 1
    return found, largest


@inner
def _best_before(op, messages, slot, b, j):
    """Returns the first state i with the largest messages[slot, b, i] + log A_ij, and this sum."""
    columns, found, largest = op.columns, 0, -np.inf
    p, end = columns.starts[j], columns.starts[j + 1]
    for i in range(op.indices.shape[0]):
        if p < end and columns.sources[p] == i:
            score = messages[slot, b, i] + op.values[i, columns.positions[p] - i * op.values.shape[1]]
            p += 1
        else:
            score = messages[slot, b, i] + op.constants[i]
        if score > largest:
            found, largest = i, score
    return found, largest


@implements(ConstantScores, best)
def _best(op, starts, t, active, rows, messages, slot):
    """Computes the scores of a step. The best constant is a lower bound of almost all scores.

    If few rows have a better kept entry, only these rows are used.
    """
    (num_states, num_kept), columns = op.indices.shape, op.columns
    lanes, gathered = columns.slice_sources.shape[1], np.empty(columns.slice_sources.shape[1])
    for b in range(active):
        before, after = messages[slot, b], messages[slot + 1, b]
        common, shared = _best_constant(op, before)
        better = 0
        for i in range(num_states):
            better += before[i] + op.row_best[i] > shared
        if better * _SCATTERED < num_states:
            after[:num_states] = shared
            for i in range(num_states):
                if before[i] + op.row_best[i] > shared:
                    for m in range(num_kept):
                        j = op.indices[i, m]
                        after[j] = max(after[j], before[i] + op.values[i, m])
        else:
            for s in range(columns.slice_starts.shape[0] - 1):
                begin = columns.slice_starts[s]
                sources_at, weights_at = (
                    columns.slice_sources.ctypes.data + begin * lanes * 4,
                    columns.weights.ctypes.data + begin * lanes * 8,
                )
                gather_max(
                    0.0,
                    gathered.ctypes.data,
                    shared,
                    weights_at,
                    sources_at,
                    before.ctypes.data,
                    columns.slice_starts[s + 1] - begin,
                )
                for lane in range(min(lanes, num_states - s * lanes)):
                    after[columns.order[s * lanes + lane]] = gathered[lane]
        for m in range(num_kept):  # The row with the best constant keeps these columns, so its constant does not apply.
            if op.values[common, m] < op.constants[common]:
                j = op.indices[common, m]
                after[j] = _best_before(op, messages, slot, b, j)[1]
        after[num_states:] = -np.inf


@implements(ConstantScores, best_source)
def _best_source(op, step, messages, slot, b, state):
    message, columns = messages[slot, b], op.columns
    common, largest = _best_constant(op, message)
    found = common
    for p in range(columns.starts[state], columns.starts[state + 1]):
        i = columns.sources[p]
        if i == common:  # The constant of this row does not apply, and the best one of the others is unknown.
            return _best_before(op, messages, slot, b, state)[0]
        score = message[i] + op.values[i, columns.positions[p] - i * op.values.shape[1]]
        if score > largest or (score == largest and i < found):
            found, largest = i, score
    return found


@scores(MostlyConstant)
@scores(ShiftRegister)
def prepare_scores(operator: MostlyConstant) -> ConstantScores:
    log_values, indices = operator.log_values.numpy(), np.ascontiguousarray(operator.indices.numpy(), np.int32)
    constants, row_best = aligned_zeros(np.dtype(np.float64), 2, padded_size(indices.shape[0], 8))
    constants[:], row_best[:] = -np.inf, -np.inf
    constants[: indices.shape[0]], row_best[: indices.shape[0]] = (
        operator.log_constants.numpy(),
        log_values.max(1, initial=-np.inf),
    )
    return ConstantScores(constants, indices, log_values, _column_lists(indices, log_values, -np.inf), row_best)
