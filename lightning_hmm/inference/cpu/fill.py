"""Conversion of evidence to rows of emission probabilities, and of posterior probabilities to its gradient, by tile.

The filter reads an emission row through its address. For symbols, it is a row of a small table; for other evidence,
`fill` computes the rows of a tile. Rows are divided by their largest entry, whose logarithm is added to the
log-likelihood. An entry that is not zero but too small for the precision is stored as about the smallest normal number,
which the filter treats as "lost" instead of "impossible". The padding contains arbitrary finite numbers, because
messages are zero there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inlined, inner
from lightning_hmm.inference.cpu.vectors import center_row, multiply_row, peek, relative_four, relative_one
from lightning_hmm.inference.kernels.gather import transpose_block
from lightning_hmm.inference.kernels.simd import accumulate_row, lanes_of, make_product

TABLE, QUADRATIC, ROWS = 0, 1, 2
BLOCK = 32  # rows that are computed at once

multiply = make_product(max_plus=False, accumulate=False)
multiply_add = make_product(max_plus=False, accumulate=True)


class Seen(NamedTuple):
    """The evidence of a batch in one type for all forms, so that the driver is compiled once.

    form: `TABLE`, `QUADRATIC` or `ROWS`.
    data, end, itemsize, width: the addresses where the symbols, columns or log-likelihoods begin and end, the bytes of
        each number, and the numbers of a step.
    table, shifts: (V + 1, padded) probabilities divided by the largest of the row, and (V + 1,) its logarithm; the last
        row is for a missing symbol.
    one_hot: (K + 1, padded) rows for labelled steps of a table; the last is zero.
    log_probs: (K, V) of a table, for labelled steps.
    labels: (steps,), or empty.
    pairs, weights: (F, 2) and (F, padded) of `QUADRATIC`; the padding is a copy of the weights of the first state.
    center: (C,) of `QUADRATIC`, padded with zeros to whole vectors.
    linear: whether the first features are the C columns.
    """

    form: int
    data: int
    end: int
    itemsize: int
    width: int
    table: np.ndarray
    shifts: np.ndarray
    one_hot: np.ndarray
    log_probs: np.ndarray
    labels: np.ndarray
    pairs: np.ndarray
    weights: np.ndarray
    center: np.ndarray
    linear: bool


@inner
def symbol_at(seen, step):
    """The symbol of a step, of whatever type."""
    if seen.itemsize == 8:
        return peek(np.int64(0), seen.data + 8 * step)
    if seen.itemsize == 4:
        return np.int64(peek(np.int32(0), seen.data + 4 * step))
    if seen.itemsize == 2:
        return np.int64(peek(np.int16(0), seen.data + 2 * step))
    return np.int64(peek(np.uint8(0), seen.data + step))


@inner
def running(first, members, lengths):
    """How many sequences of a tile, longest first, are longer than `first`."""
    active = members
    while active > 0 and lengths[active - 1] <= first:
        active -= 1
    return active


@inner
def whole_blocks(active, tile):
    """Whole blocks of four rows are cheaper than single ones; ended sequences run on as if their data were missing."""
    return min(tile, 4 * ((active + 3) // 4))


@inner
def _look_up(like, seen, first, last, members, lengths, starts, places, counted, counts_at, sums):
    """The addresses for symbols of the type of `like`; returns whether all symbols can be used."""
    num_symbols, tile, padded, size = seen.table.shape[0] - 1, places.shape[1], seen.table.shape[1], seen.itemsize
    table_at, shifts, row_bytes, total_bytes = (
        seen.table.ctypes.data,
        seen.shifts,
        padded * seen.table.itemsize,
        padded * 8,
    )
    active, usable = members, True
    for t in range(first, last):
        while lengths[active - 1] <= t:
            active -= 1
        slot, data = t - first, seen.data + t * size
        for b in range(active):
            symbol = np.int64(peek(like, data + starts[b] * size))
            row = symbol if np.uint64(symbol) <= np.uint64(num_symbols) else num_symbols
            usable &= row == symbol
            places[slot, b] = table_at + row * row_bytes
            sums[b] += shifts[row]
            if counts_at != 0:
                counted[slot, b] = counts_at + row * total_bytes
        for b in range(active, tile):
            places[slot, b], counted[slot, b] = (
                table_at + num_symbols * row_bytes,
                counts_at + num_symbols * total_bytes,
            )
    return usable


@inlined
def fill_from_table(seen, first, last, members, lengths, starts, places, counted, counts_at, sums, problem):
    """Writes the addresses of the emission rows of the steps `first` to `last` of a tile.

    The logarithms by which the rows were divided are added to `sums`. `counted` takes the addresses of the rows of the
    gradient at `counts_at`, if that is not 0. `problem` takes a step whose symbol, and one whose label, cannot be used.
    """
    if seen.itemsize == 8:
        usable = _look_up(np.int64(0), seen, first, last, members, lengths, starts, places, counted, counts_at, sums)
    elif seen.itemsize == 4:
        usable = _look_up(np.int32(0), seen, first, last, members, lengths, starts, places, counted, counts_at, sums)
    elif seen.itemsize == 2:
        usable = _look_up(np.int16(0), seen, first, last, members, lengths, starts, places, counted, counts_at, sums)
    else:
        usable = _look_up(np.uint8(0), seen, first, last, members, lengths, starts, places, counted, counts_at, sums)
    labelled = seen.labels.shape[0] > 0
    if usable and not labelled:
        return
    num_symbols, num_states = seen.table.shape[0] - 1, seen.one_hot.shape[0] - 1
    for t in range(first, last):
        active, slot = running(t, members, lengths), t - first
        for b in range(active):
            step = starts[b] + t
            symbol = symbol_at(seen, step)
            if not 0 <= symbol <= num_symbols:
                problem[0] = step
            elif labelled:
                label = seen.labels[step]
                if label >= num_states or label < -1:
                    problem[1] = step
                elif label >= 0:
                    log_prob = seen.log_probs[label, symbol] if symbol < num_symbols else 0.0
                    sums[b] += log_prob - (seen.shifts[symbol] if seen.shifts[symbol] > -np.inf else 0.0)
                    places[slot, b] = seen.one_hot[label if log_prob > -np.inf else num_states].ctypes.data


class Buffers(NamedTuple):
    """Of a block of rows, in float64.

    scratch: (BLOCK, padded) log-likelihoods, or posterior probabilities.
    gathered, columns: (BLOCK, width) and (width, BLOCK) the columns of the data, padded to whole vectors.
    present: (1, BLOCK) one where a sequence is running, else zero.
    products: (F, BLOCK) the features, F rounded up. If the first features are the columns, they share the rows.
    """

    scratch: np.ndarray
    gathered: np.ndarray
    columns: np.ndarray
    present: np.ndarray
    products: np.ndarray


@inner
def _aligned(rows, columns):
    """Zeros that begin at a cache line."""
    raw = np.zeros(rows * columns + 8)
    start = -raw.ctypes.data % 64 // 8
    return raw[start : start + rows * columns].reshape(rows, columns)


@inner
def make_buffers(seen, padded):
    """The buffers of a lane. Those of columns are empty unless the evidence is `QUADRATIC`."""
    width, size = seen.center.shape[0], BLOCK if seen.form == QUADRATIC else 0
    products = _aligned(max(feature_rows(seen.pairs.shape[0]), width), size)
    columns = products if seen.linear else _aligned(width, size)
    return Buffers(_aligned(BLOCK, padded), _aligned(size, width), columns, _aligned(1, size), products)


@inner
def feature_rows(num_features):
    """Returns the number of features, rounded up for products of blocks of four rows, unless a single row remains."""
    return num_features if num_features % 4 == 1 else 4 * ((num_features + 3) // 4)


@inner
def _gather(like, seen, t, steps, width, whole, active, lengths, starts, buffers):
    """Returns the columns of the steps t, t + 1, ... of `width` sequences, minus the center, in the type of `like`.

    They are zero where a sequence has ended, which is never the case if the block is `whole`.
    """
    size, num_columns, center, gathered, present = (
        seen.itemsize,
        seen.width,
        seen.center,
        buffers.gathered,
        buffers.present[0],
    )
    padded, center_at, row_bytes = center.shape[0], center.ctypes.data, 8 * center.shape[0]
    present[:] = 1.0
    out_at = gathered.ctypes.data
    for s in range(steps):
        for b in range(width):
            place = seen.data + (starts[b] + t + s) * num_columns * size
            if not whole and (b >= active or t + s >= lengths[b]):
                gathered[s * width + b] = 0.0
                present[s * width + b] = 0.0
            elif place + padded * size <= seen.end:  # whole vectors, whose rest is not used
                center_row(like, padded, out_at, place, center_at)
            else:
                for c in range(num_columns):
                    gathered[s * width + b, c] = np.float64(peek(like, place + c * size)) - center[c]
            out_at += row_bytes


@inner
def _features(seen, t, steps, width, active, lengths, starts, buffers):
    """Computes products[f, r] of the steps t, t + 1, ... of `width` sequences, where r = s * width + b.

    They are zero where a sequence has ended.
    """
    whole, num_columns, padded, lanes = (
        active >= width and t + steps <= lengths[width - 1],
        seen.width,
        seen.center.shape[0],
        lanes_of(0.0),
    )
    if seen.itemsize == 8:
        _gather(np.float64(0), seen, t, steps, width, whole, active, lengths, starts, buffers)
    else:
        _gather(np.float32(0), seen, t, steps, width, whole, active, lengths, starts, buffers)
    gathered_at, columns_at, products_at = (
        buffers.gathered.ctypes.data,
        buffers.columns.ctypes.data,
        buffers.products.ctypes.data,
    )
    present_at, row_bytes = buffers.present.ctypes.data, 8 * BLOCK
    for r in range(0, steps * width, lanes):
        for c in range(0, padded, lanes):
            transpose_block(
                0.0,
                columns_at + c * row_bytes + 8 * r,
                row_bytes,
                lanes,
                gathered_at + 8 * (r * padded + c),
                8 * padded,
                lanes,
            )
    for f in range(num_columns if seen.linear else 0, seen.pairs.shape[0]):
        left, right = seen.pairs[f, 0], seen.pairs[f, 1]
        left_at = present_at if left == num_columns else columns_at + left * row_bytes
        right_at = present_at if right == num_columns else columns_at + right * row_bytes
        multiply_row(0.0, BLOCK, products_at + f * row_bytes, left_at, right_at)


@inner
def _copy_rows(like, seen, step, target):
    """The log-likelihoods of a step, numbers of the type of `like`; returns whether all can be used."""
    usable, place = True, seen.data + step * seen.width * seen.itemsize
    for k in range(seen.width):
        value = np.float64(peek(like, place + k * seen.itemsize))
        target[k] = value
        usable &= value < np.inf
    target[seen.width :] = -np.inf
    return usable


@inner
def _rule_out(seen, r, step, scratch, problem):
    """Leaves the state of a labelled step only."""
    label = seen.labels[step]
    if label >= seen.one_hot.shape[0] - 1 or label < -1:
        problem[1] = step
    elif label >= 0:
        for k in range(scratch.shape[1]):
            if k != label:
                scratch[r, k] = -np.inf


@inner
def log_block(seen, t, steps, width, active, lengths, starts, padded, buffers, problem):
    """Writes log-likelihoods of the steps t, t + 1, ... of `width` sequences to `buffers.scratch`.

    Row s * width + b is for step t + s of sequence b. It is zero where a sequence has ended. A table must hold
    log-probabilities here. The padding contains numbers that are not larger than the largest of a row.
    """
    scratch = buffers.scratch
    if seen.form == QUADRATIC:
        _features(seen, t, steps, width, active, lengths, starts, buffers)
        count, products_at = min(BLOCK, 4 * ((steps * width + 3) // 4)), buffers.products.ctypes.data
        multiply(
            0.0,
            scratch.ctypes.data,
            products_at,
            1,
            BLOCK,
            seen.weights.ctypes.data,
            padded,
            count,
            padded,
            seen.pairs.shape[0],
        )
    labelled = seen.labels.shape[0] > 0
    if seen.form == QUADRATIC and not labelled:  # the features of a sequence that has ended are zero
        return
    for s in range(steps):
        for b in range(width):
            r, step = s * width + b, starts[b] + t + s
            if b >= active or t + s >= lengths[b]:
                scratch[r] = 0.0
                continue
            if seen.form == ROWS:
                usable = (
                    _copy_rows(np.float64(0), seen, step, scratch[r])
                    if seen.itemsize == 8
                    else _copy_rows(np.float32(0), seen, step, scratch[r])
                )
                if not usable:
                    problem[0] = step
            elif seen.form == TABLE:
                symbol = symbol_at(seen, step)
                if not 0 <= symbol < seen.table.shape[0]:
                    problem[0], symbol = step, 0
                scratch[r] = seen.table[symbol]
            if labelled:
                _rule_out(seen, r, step, scratch, problem)


@inlined
def fill_rows(seen, first, last, members, lengths, starts, rows, buffers, sums, problem):
    """As `fill_from_table`, for evidence whose rows are computed: rows[t - first, b] of the steps `first` to `last`."""
    tile, padded = rows.shape[1], rows.shape[2]
    largest, like = np.empty(BLOCK), rows.dtype.type(0)
    largest_at, logs_at, rows_at = largest.ctypes.data, buffers.scratch.ctypes.data, rows.ctypes.data
    active, t = members, first
    while t < last:
        while lengths[active - 1] <= t:
            active -= 1
        width = whole_blocks(active, tile)
        steps = min(max(1, BLOCK // width), last - t)
        log_block(seen, t, steps, width, active, lengths, starts, padded, buffers, problem)
        for s in range(steps):
            out_at, b = rows_at + (t - first + s) * tile * padded * rows.itemsize, 0
            while b < width:
                r = s * width + b
                if b + 4 <= width:
                    relative_four(
                        like, padded, logs_at + 8 * r * padded, out_at + b * padded * rows.itemsize, largest_at + 8 * r
                    )
                    b += 4
                else:
                    relative_one(
                        like, padded, logs_at + 8 * r * padded, out_at + b * padded * rows.itemsize, largest_at + 8 * r
                    )
                    b += 1
            for b in range(running(t + s, active, lengths)):
                sums[b] += largest[s * width + b]
        t += steps


@inlined
def consume(seen, first, steps, members, lengths, starts, num_states, posteriors, buffers, sums, smoothed):
    """Adds the posterior probabilities of the steps `first`, `first` + 1, ... of a tile to the gradient `sums`.

    They are copied to `smoothed` if it has room. Rows of sequences that have ended are zero.
    """
    tile, padded, like = posteriors.shape[1], posteriors.shape[2], posteriors.dtype.type(0)
    active, t = members, first
    while seen.form == QUADRATIC and t < first + steps:
        active = running(t, active, lengths)
        together = min(max(1, BLOCK // tile), first + steps - t)
        _features(seen, t, together, tile, active, lengths, starts, buffers)
        rows_at = posteriors.ctypes.data + (t - first) * tile * padded * 8
        if posteriors.itemsize < 8:
            rows_at = buffers.scratch.ctypes.data
            for s in range(together):
                for b in range(tile):
                    for k in range(padded):
                        buffers.scratch[s * tile + b, k] = posteriors[t - first + s, b, k]
        multiply_add(
            0.0,
            sums.ctypes.data,
            buffers.products.ctypes.data,
            BLOCK,
            1,
            rows_at,
            padded,
            sums.shape[0],
            padded,
            together * tile,
        )
        t += together
    if seen.form == QUADRATIC and smoothed.shape[0] == 0:
        return
    for t in range(first, first + steps):
        for b in range(running(t, members, lengths)):
            step = starts[b] + t
            if seen.form == TABLE:
                symbol = symbol_at(seen, step)
                symbol = symbol if 0 <= symbol < sums.shape[0] else sums.shape[0] - 1  # refused later
                accumulate_row(like, padded, sums[symbol].ctypes.data, posteriors[t - first, b].ctypes.data, 1.0)
            if smoothed.shape[0] > 0:
                for k in range(num_states):
                    smoothed[step, k] = posteriors[t - first, b, k]
