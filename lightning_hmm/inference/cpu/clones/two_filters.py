"""Two-filter smoothing in cloned hidden Markov models: forward and backward messages are computed in parallel.

For small models, the blocks and the transposed blocks are copied into the cache, and sequences are processed one after
the other.

For large models, a step reads a whole block of the transition matrix for a single message, so the time is limited by
memory. The influence of the first message on later ones decreases quickly. Sequences are therefore divided into chunks.
Each chunk starts some steps early (the *warm-up*) from a uniform message, in both directions, and waits for the block
that it needs next. The blocks are read in the order in which they are stored, and one reading is used for up to four
waiting messages. Afterwards, the first message of each chunk is compared with the last one of the chunk before. If an
entry differs by more than rounding, the chunk is computed again from there until the messages agree. The results are
thus those of whole sequences.

Layouts consist of whole blocks, and the names are those of `forward_backward` and `KnownSteps`. The messages of a
warm-up alternate between two positions from ``scratch`` on, after all other messages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, kernel
from lightning_hmm.inference.cpu.clones.products import GROUP, add_rows, dot_rows
from lightning_hmm.inference.kernels.blocks import make_message, prefetch
from lightning_hmm.inference.kernels.products import multiply
from lightning_hmm.inference.kernels.simd import lanes_of

_message_1, _message_2, _message_3, _message_4 = (make_message(vectors) for vectors in range(1, 5))


class CopiedBlocks(NamedTuple):
    """Blocks in the cache: block p begins at ``first[p]`` of `values` and has rows of ``widths`` of their symbol."""

    first: np.ndarray
    widths: np.ndarray
    values: np.ndarray


class Chunks(NamedTuple):
    """Chunk b consists of the steps from ``firsts[b]`` to ``lasts[b]``, exclusive. Its warm-up starts at ``begins[b]``.

    In the backward direction steps decrease. The first chunk of a sequence has no warm-up: ``begins[b] == firsts[b]``.
    """

    begins: np.ndarray
    firsts: np.ndarray
    lasts: np.ndarray


@inner
def _normalize(message, flush):
    """Divides a message by its sum and sets entries below `flush` to zero. Returns the sum."""
    total = message.dtype.type(0.0)
    for c in range(message.shape[0]):
        total += message[c]
    scale = message.dtype.type(1.0) / total
    for c in range(message.shape[0]):
        x = message[c] * scale
        message[c] = x if x >= flush else message.dtype.type(0.0)
    return total


@kernel
def copy_blocks(transposed, layout, probs, copied):
    """Copies the blocks to `copied`. Padding is filled with zeros."""
    block_at, widths, blocks = copied
    starts, pair_first, pair_source, pair_target, bound_base, bounds, _ = layout
    zero = blocks.dtype.type(0.0)
    blocks[block_at[pair_target.shape[0]] :] = zero
    for p in range(pair_target.shape[0]):
        u, v = pair_source[p], pair_target[p]
        base, stride = bound_base[u] + p - pair_first[u], pair_first[u + 1] - pair_first[u] + 1
        num_source, num_target, first = starts[u + 1] - starts[u], starts[v + 1] - starts[v], block_at[p]
        apart = bounds[base + stride] - bounds[base] if num_source > 1 else 0
        if transposed:
            for j in range(num_target):
                for c in range(num_source):
                    blocks[first + j * widths[u] + c] = probs[bounds[base] + c * apart + j]
                for c in range(num_source, widths[u]):
                    blocks[first + j * widths[u] + c] = zero
        else:
            for c in range(num_source):
                for j in range(num_target):
                    blocks[first + c * widths[v] + j] = probs[bounds[base] + c * apart + j]
                for j in range(num_target, widths[v]):
                    blocks[first + c * widths[v] + j] = zero


@kernel
def filter_sequences(backward, share, shares, offsets, known, starts, copied, initial, limits, messages, totals):
    """Computes the forward or backward messages of every `shares`-th sequence. Returns False if a step underflows."""
    symbols, pairs, at = known
    block_at, widths, blocks = copied
    zero, one, size = messages.dtype.type(0.0), messages.dtype.type(1.0), messages.itemsize
    flush, collapse = messages.dtype.type(limits.flush), limits.collapse
    for n in range(share, offsets.shape[0] - 1, shares):
        length = offsets[n + 1] - offsets[n]
        for t in range(length):
            s = offsets[n + 1] - 1 - t if backward else offsets[n] + t
            v = symbols[s]
            if t + 1 < length:  # Prefetch the block of the next step.
                following = pairs[s] if backward else pairs[s + 1]
                y_at = blocks.ctypes.data + block_at[following] * size
                for line in range(0, (block_at[following + 1] - block_at[following]) * size, 64):
                    prefetch(y_at + line)
            # A message is padded with zeros to whole vectors.
            message, num_clones = messages[at[s] : at[s] + widths[v]], starts[v + 1] - starts[v]
            if t == 0:
                message[:] = zero
                if backward:
                    message[:num_clones] = one
                else:
                    message[:num_clones] = initial[starts[v] : starts[v + 1]]
                total = _normalize(message, flush)
            else:
                before, p = s + 1 if backward else s - 1, pairs[s + 1] if backward else pairs[s]
                c_at, x_at, y_at = (
                    messages.ctypes.data + at[s] * size,
                    messages.ctypes.data + at[before] * size,
                    blocks.ctypes.data + block_at[p] * size,
                )
                depth, vectors = starts[symbols[before] + 1] - starts[symbols[before]], widths[v] // lanes_of(zero)
                if vectors == 1:
                    total = _message_1(zero, c_at, x_at, y_at, depth, flush)
                elif vectors == 2:
                    total = _message_2(zero, c_at, x_at, y_at, depth, flush)
                elif vectors == 3:
                    total = _message_3(zero, c_at, x_at, y_at, depth, flush)
                elif vectors == 4:
                    total = _message_4(zero, c_at, x_at, y_at, depth, flush)
                else:
                    multiply(zero, c_at, x_at, 0, 1, y_at, widths[v], 1, widths[v], depth)
                    total = _normalize(message, flush)
            if not total > collapse:
                return False
            if not backward:
                totals[s] = total
    return True


@kernel
def scratch_size(widest):
    """Returns the distance in memory between two messages of a warm-up, if a symbol has at most `widest` clones."""
    return -(-widest // 16) * 16


@inner
def _rows_of_block(p, layout, probs, rows):
    """Fills `rows` with the addresses of the rows of block p. Returns its height and width."""
    starts, pair_first, pair_source, pair_target, bound_base, bounds, _ = layout
    u, v = pair_source[p], pair_target[p]
    base = bound_base[u] + p - pair_first[u]
    first, apart = bounds[base], bounds[bound_base[u] + pair_first[u + 1] - pair_first[u]] - bounds[bound_base[u]]
    for c in range(starts[u + 1] - starts[u]):
        rows[c] = probs.ctypes.data + (first + c * apart) * probs.itemsize
    return starts[u + 1] - starts[u], starts[v + 1] - starts[v]


@inner
def _products(backward, count, sources, targets, height, width, messages, rows, xs, outputs):
    """Computes messages[target] = messages[source] @ block for four, two or one messages.

    In the backward direction, it computes block @ messages[source].
    """
    zero, size = messages.dtype.type(0.0), messages.itemsize
    if backward:
        for r in range(count):
            outputs[r] = messages.ctypes.data + sources[r] * size
        dot_rows(count, zero, height, width, outputs, xs, rows)
        for r in range(count):
            target = messages[targets[r] : targets[r] + height]
            for c in range(height):
                target[c] = xs[c * count + r]
    else:
        for r in range(count):
            source = messages[sources[r] : sources[r] + height]
            for c in range(height):
                xs[c * count + r] = source[c]
            messages[targets[r] : targets[r] + width] = zero
            outputs[r] = messages.ctypes.data + targets[r] * size
        add_rows(count, zero, height, width, outputs, xs, rows)


@kernel
def filter_chunks(backward, chunks, known, scratch, layout, probs, initial, limits, messages, totals):
    """Computes the forward or backward messages of all chunks. Returns False if a step underflows."""
    begins, firsts, lasts = chunks
    symbols, pairs, at = known
    starts, pair_target = layout[0], layout[3]
    num_chunks, num_pairs = begins.shape[0], pair_target.shape[0]
    widest = np.max(starts[1:] - starts[:-1])
    one, flush, collapse = messages.dtype.type(1.0), messages.dtype.type(limits.flush), limits.collapse
    place = scratch_size(widest)
    step = -1 if backward else 1
    rows, xs = np.empty(widest, np.int64), np.empty(GROUP * max(widest, GROUP), messages.dtype)
    sources, targets, outputs = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    group = np.empty(GROUP, np.int64)
    head, following = np.full(num_pairs, -1), np.full(num_chunks, -1)
    now, where = begins.copy(), np.empty(num_chunks, np.int64)  # last computed step of each chunk, and its position
    waiting = 0
    for b in range(num_chunks):
        s = begins[b]
        guessed = s != firsts[b]
        where[b] = scratch + (2 * b + (s & 1)) * place if guessed else at[s]
        message = messages[where[b] : where[b] + starts[symbols[s] + 1] - starts[symbols[s]]]
        if backward or pairs[s] >= 0:
            message[:] = one
        else:
            message[:] = initial[starts[symbols[s]] : starts[symbols[s] + 1]]
        total = _normalize(message, flush)
        if not total > collapse:
            return False
        if not (backward or guessed):
            totals[s] = total
        if s + step != lasts[b]:
            p = pairs[s] if backward else pairs[s + 1]
            following[b], head[p] = head[p], b
            waiting += 1
    while waiting > 0:
        for p in range(num_pairs):
            if head[p] < 0:
                continue
            height, width = _rows_of_block(p, layout, probs, rows)
            length = height if backward else width
            while head[p] >= 0:  # A chunk may need the same block again for its next step.
                count = 0
                while count < GROUP and head[p] >= 0:
                    group[count] = head[p]
                    head[p] = following[group[count]]
                    count += 1
                if count == 3:
                    count = 2
                    following[group[2]], head[p] = head[p], group[2]
                for r in range(count):
                    b = group[r]
                    s = now[b] + step
                    sources[r] = where[b]
                    own = s <= firsts[b] if backward else s >= firsts[b]
                    targets[r] = at[s] if own else scratch + (2 * b + (s & 1)) * place
                _products(backward, count, sources, targets, height, width, messages, rows, xs, outputs)
                for r in range(count):
                    b = group[r]
                    now[b] += step
                    s, where[b] = now[b], targets[r]
                    total = _normalize(messages[targets[r] : targets[r] + length], flush)
                    if not total > collapse:
                        return False
                    if not backward and s >= firsts[b]:
                        totals[s] = total
                    if s + step != lasts[b]:
                        q = pairs[s] if backward else pairs[s + 1]
                        following[b], head[q] = head[q], b
                    else:
                        waiting -= 1
    return True


@inner
def hilbert_distance(one, other):
    """Returns max / min - 1 of the ratios of the entries of two messages, which approximates Hilbert's projective
    metric.

    It is infinite if the messages are zero in different entries.
    """
    low, high = np.inf, 0.0
    for c in range(one.shape[0]):
        if one[c] == 0 and other[c] == 0:
            continue
        if one[c] == 0 or other[c] == 0:
            return np.inf
        ratio = np.float64(one[c]) / np.float64(other[c])
        low, high = min(low, ratio), max(high, ratio)
    return high / low - 1.0


@kernel
def repair_chunks(backward, chunks, known, scratch, layout, probs, limits, tolerance, messages, totals):
    """Checks the warm-up of each chunk, and computes messages again where it was too short.

    Returns the number of steps that were computed again, or -1 if a step underflows.
    """
    begins, firsts, lasts = chunks
    symbols, pairs, at = known
    starts = layout[0]
    widest = np.max(starts[1:] - starts[:-1])
    place, step, again = scratch_size(widest), -1 if backward else 1, 0
    flush, collapse = messages.dtype.type(limits.flush), limits.collapse
    rows, xs = np.empty(widest, np.int64), np.empty(GROUP * max(widest, GROUP), messages.dtype)
    source, target, outputs = np.empty(1, np.int64), np.empty(1, np.int64), np.empty(1, np.int64)
    for b in range(firsts.shape[0]):
        s = firsts[b]
        if s == begins[b]:
            continue
        before = s - step
        width = starts[symbols[before] + 1] - starts[symbols[before]]
        guess = scratch + (2 * b + (before & 1)) * place
        if hilbert_distance(messages[guess : guess + width], messages[at[before] : at[before] + width]) <= tolerance:
            continue
        while s != lasts[b]:
            height, width = _rows_of_block(pairs[s + 1] if backward else pairs[s], layout, probs, rows)
            length = height if backward else width
            source[0], target[0] = at[s - step], guess
            _products(backward, 1, source, target, height, width, messages, rows, xs, outputs)
            found, kept = messages[guess : guess + length], messages[at[s] : at[s] + length]
            total = _normalize(found, flush)
            if not total > collapse:
                return -1
            if not backward:
                totals[s] = total
            agreed = hilbert_distance(found, kept) <= tolerance
            kept[:] = found
            again += 1
            if agreed:
                break
            s += step
    return again


@kernel
def mixing_time(backward, positions, most, tolerance, known, layout, probs, flush):
    """Returns the largest number of steps after which two different messages agree, over the given start positions.

    It is `most` + 1 if they do not agree after `most` steps.
    """
    symbols, pairs, _ = known
    starts = layout[0]
    widest = np.max(starts[1:] - starts[:-1])
    flush, step, longest = probs.dtype.type(flush), -1 if backward else 1, 0
    rows, xs = np.empty(widest, np.int64), np.empty(GROUP * max(widest, GROUP), probs.dtype)
    messages, place = np.empty(4 * widest, probs.dtype), np.arange(4) * widest
    outputs = np.empty(2, np.int64)
    for s in positions:
        width = starts[symbols[s] + 1] - starts[symbols[s]]
        for c in range(width):
            messages[c], messages[widest + c] = probs.dtype.type(1.0), probs.dtype.type(c + 1)
        taken = most + 1
        for t in range(1, most + 1):
            height, width = _rows_of_block(pairs[s] if backward else pairs[s + 1], layout, probs, rows)
            length = height if backward else width
            here, there = place[2 * ((t + 1) & 1) :][:2], place[2 * (t & 1) :][:2]
            _products(backward, 2, here, there, height, width, messages, rows, xs, outputs)
            s += step
            one, other = messages[there[0] : there[0] + length], messages[there[1] : there[1] + length]
            _normalize(one, flush)
            _normalize(other, flush)
            if hilbert_distance(one, other) <= tolerance:
                taken = t
                break
        longest = max(longest, taken)
        if longest > most:
            break
    return longest


@kernel
def smooth(first, last, known, starts, weights, alpha, totals, kappa, smoothed):
    """Combines forward and backward messages to those that `forward_backward.backward` computes, with weights by step.

    Returns False if the product of both messages underflows at a step.
    """
    symbols, pairs, at = known
    zero = alpha.dtype.type(0.0)
    for s in range(first, last):
        v = symbols[s]
        message, back = (
            alpha[at[s] : at[s] + starts[v + 1] - starts[v]],
            kappa[at[s] : at[s] + starts[v + 1] - starts[v]],
        )
        total = zero
        for c in range(message.shape[0]):
            total += message[c] * back[c]
        if not total > 1e-20:
            return False
        scaled_weight = weights[s] / total
        if smoothed.shape[0] > 0:
            for c in range(message.shape[0]):
                smoothed[s, starts[v] + c] = message[c] * back[c] * scaled_weight
        if pairs[s] < 0:
            for c in range(message.shape[0]):
                back[c] = message[c] * back[c] * alpha.dtype.type(scaled_weight)
        else:
            factor = alpha.dtype.type(scaled_weight / totals[s])
            for c in range(message.shape[0]):
                back[c] = back[c] * factor if message[c] > 0 else zero
    return True
