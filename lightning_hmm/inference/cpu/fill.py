"""From evidence to rows of emission probabilities, and from posterior probabilities to the gradient of the evidence, for a tile at a time.

The filter reads an emission row through its address. For symbols that is a row of a small table; for other evidence `fill` computes the rows of a
tile. Rows are divided by their largest entry, whose logarithm joins the log-likelihood. An entry that is too small for the precision
although it is not zero is stored as the smallest normal number, which the filter takes for "lost" rather than for "impossible".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner
from lightning_hmm.inference.cpu.vectors import peek, relative_four, relative_one
from lightning_hmm.inference.kernels.simd import accumulate_row, make_product

TABLE, QUADRATIC, ROWS = 0, 1, 2
BLOCK = 32  # rows that are computed at once

multiply = make_product(max_plus=False, accumulate=False)
multiply_add = make_product(max_plus=False, accumulate=True)


class Seen(NamedTuple):
    """The evidence of a batch in one type for all forms, so that the driver is compiled once.

    form: `TABLE`, `QUADRATIC` or `ROWS`.
    data, itemsize, width: address of the symbols, columns or log-likelihoods, the bytes of each number, and the numbers of a step.
    table, shifts: (V + 1, padded) probabilities divided by the largest of the row, and (V + 1,) its logarithm; the last row is for a missing symbol.
    one_hot: (K + 1, padded) rows for labelled steps of a table; the last is zero.
    log_probs: (K, V) of a table, for labelled steps.
    labels: (steps,), or empty.
    pairs, weights: (F, 2) and (F, padded) of `QUADRATIC`.
    bias: (padded,) zero for states and -inf for padding.
    """

    form: int
    data: int
    itemsize: int
    width: int
    table: np.ndarray
    shifts: np.ndarray
    one_hot: np.ndarray
    log_probs: np.ndarray
    labels: np.ndarray
    pairs: np.ndarray
    weights: np.ndarray
    bias: np.ndarray


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
def _number(seen, place):
    if seen.itemsize == 8:
        return peek(np.float64(0), seen.data + 8 * place)
    return np.float64(peek(np.float32(0), seen.data + 4 * place))


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
    table_at, shifts, row_bytes, total_bytes = seen.table.ctypes.data, seen.shifts, padded * seen.table.itemsize, padded * 8
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
            places[slot, b], counted[slot, b] = table_at + num_symbols * row_bytes, counts_at + num_symbols * total_bytes
    return usable


@inner
def fill_from_table(seen, first, last, members, lengths, starts, in_place, places, counted, counts_at, rows, sums, problem):
    """Writes the addresses of the emission rows of the steps `first` to `last` of a tile, and adds the logarithms that they were divided by to `sums`.

    `counted` takes the addresses of the rows of the gradient at `counts_at`, if that is not 0. With `in_place` the emission rows are copied to
    `rows`. `problem` takes a step whose symbol, and one whose label, cannot be used.
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
    if usable and not labelled and not in_place:
        return
    num_symbols, num_states, padded = seen.table.shape[0] - 1, seen.one_hot.shape[0] - 1, seen.table.shape[1]
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
        if in_place:
            for b in range(whole_blocks(active, places.shape[1])):
                for k in range(padded):
                    rows[slot, b, k] = peek(rows.dtype.type(0), places[slot, b] + k * rows.itemsize)
                places[slot, b] = rows[slot, b].ctypes.data


@inner
def _features(seen, t, steps, width, active, lengths, starts, columns, products):
    """products[f, r] of the steps t, t + 1, ... of `width` sequences, r = s * width + b; zero where a sequence has ended."""
    for s in range(steps):
        for b in range(width):
            r = s * width + b
            if b < active and t + s < lengths[b]:
                base = (starts[b] + t + s) * seen.width
                for c in range(seen.width):
                    columns[c, r] = _number(seen, base + c)
            else:
                for c in range(seen.width):
                    columns[c, r] = 0.0
    for f in range(seen.pairs.shape[0]):
        left, right, product = columns[seen.pairs[f, 0]], columns[seen.pairs[f, 1]], products[f]
        for r in range(BLOCK):
            product[r] = left[r] * right[r]


@inner
def log_block(seen, t, steps, width, active, lengths, starts, padded, scratch, columns, products, problem):
    """Log-likelihoods of the steps t, t + 1, ... of `width` sequences, into the rows s * width + b of `scratch`; zero where a sequence has ended.

    A table must hold log-probabilities here. What the padding holds is undefined.
    """
    num_states = seen.one_hot.shape[0] - 1
    if seen.form == QUADRATIC:
        _features(seen, t, steps, width, active, lengths, starts, columns, products)
        count = min(BLOCK, 4 * ((steps * width + 3) // 4))
        multiply(0.0, scratch.ctypes.data, products.ctypes.data, 1, BLOCK, seen.weights.ctypes.data, padded, count, padded, seen.pairs.shape[0])
    for s in range(steps):
        for b in range(width):
            r, step = s * width + b, starts[b] + t + s
            if b >= active or t + s >= lengths[b]:
                for k in range(num_states):
                    scratch[r, k] = 0.0
                continue
            if seen.form == ROWS:
                wrong = False
                for k in range(num_states):
                    value = _number(seen, step * seen.width + k)
                    scratch[r, k] = value
                    wrong |= not value < np.inf
                if wrong:
                    problem[0] = step
            elif seen.form == TABLE:
                symbol = symbol_at(seen, step)
                if not 0 <= symbol < seen.table.shape[0]:
                    problem[0], symbol = step, 0
                for k in range(num_states):
                    scratch[r, k] = seen.table[symbol, k]
            if seen.labels.shape[0] > 0:
                label = seen.labels[step]
                if label >= num_states or label < -1:
                    problem[1] = step
                elif label >= 0:
                    for k in range(num_states):
                        if k != label:
                            scratch[r, k] = -np.inf


@inner
def fill_rows(seen, tiny, first, last, members, lengths, starts, places, rows, scratch, columns, products, sums, problem):
    """As `fill_from_table`, for evidence whose rows are computed."""
    tile, padded = rows.shape[1], rows.shape[2]
    largest, like = np.empty(4), rows.dtype.type(0)
    active, t = members, first
    while t < last:
        while lengths[active - 1] <= t:
            active -= 1
        width = whole_blocks(active, tile)
        steps = min(max(1, BLOCK // width), last - t)
        log_block(seen, t, steps, width, active, lengths, starts, padded, scratch, columns, products, problem)
        r = 0
        while r < steps * width:
            size = 4 if r + 4 <= steps * width else 1
            s, b = r // width, r % width
            out, logs = rows[t - first + s, b].ctypes.data, scratch[r].ctypes.data
            if size == 4:
                relative_four(like, padded, logs, seen.bias.ctypes.data, tiny, out, largest.ctypes.data)
            else:
                relative_one(like, padded, logs, seen.bias.ctypes.data, tiny, out, largest.ctypes.data)
            for i in range(size):
                s, b = (r + i) // width, (r + i) % width
                if b < active and t + s < lengths[b]:
                    sums[b] += largest[i]
            r += size
        for s in range(steps):
            for b in range(tile):
                places[t - first + s, b] = rows[t - first + s, b].ctypes.data
        t += steps


@inner
def consume(seen, members, lengths, starts, num_states, rows, scratch, columns, products, sums, smoothed):
    """Adds the posterior probabilities in `rows` to the gradient `sums`, and copies them to `smoothed` where that has room."""
    tile, padded = rows.shape[1], rows.shape[2]
    active, t, like = members, 0, rows.dtype.type(0)
    while t < lengths[0]:
        while lengths[active - 1] <= t:
            active -= 1
        width = whole_blocks(active, tile)
        steps = min(max(1, BLOCK // width), lengths[0] - t)
        if seen.form == QUADRATIC:
            _features(seen, t, steps, width, active, lengths, starts, columns, products)
            for s in range(steps):
                for b in range(width):
                    target, source = scratch[s * width + b], rows[t + s, b]
                    for k in range(padded):
                        target[k] = source[k]
            features = seen.pairs.shape[0]
            multiply_add(0.0, sums.ctypes.data, products.ctypes.data, BLOCK, 1, scratch.ctypes.data, padded, features, padded, steps * width)
        for s in range(steps):
            for b in range(active):
                if t + s < lengths[b]:
                    step = starts[b] + t + s
                    if seen.form == TABLE:
                        symbol = symbol_at(seen, step)
                        symbol = symbol if 0 <= symbol < sums.shape[0] else sums.shape[0] - 1  # refused later
                        accumulate_row(like, padded, sums[symbol].ctypes.data, rows[t + s, b].ctypes.data, 1.0)
                    if smoothed.shape[0] > 0:
                        for k in range(num_states):
                            smoothed[step, k] = rows[t + s, b, k]
        t += steps
