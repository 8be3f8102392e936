"""Forward-backward kernels and counts of cloned hidden Markov models.

There are V symbols. The states of symbol v, its clones, have the numbers from ``starts[v]`` to ``starts[v + 1]``,
exclusive. Transitions are stored for P sorted pairs of symbols. Those with source u are the m pairs from
``pair_first[u]`` to ``pair_first[u + 1]``. The row of a state is contiguous, pair after pair: the entries from clone c
of u to the target of the k-th of these pairs begin at ``bounds[bound_base[u] + c * (m + 1) + k]`` and end at the next
bound. If `columns` is empty, they belong to all clones of the target in order. Otherwise, ``columns`` contains the
target clone of each entry.

A step has one *entry* for each possible symbol: one if the symbol is known, V if it is missing. A message is the
concatenation of the clones of the entries. It is normalized at every step. A *task* is a pair of entries of successive
steps whose symbols are a stored pair, so it is a product with one block of the transition matrix. Several sequences are
processed in parallel, and tasks of the same pair are computed together: each row of the block is read once for up to
four messages. States with a forward probability of zero are skipped.

The order of each sum does not depend on the number of threads, so neither do the bits of the results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, kernel, strict_kernel
from lightning_hmm.inference.cpu.clones.products import GROUP, add_rows, dot_rows

# Messages


@inner
def _link(active, starts_at, t, first_task, pair, head, following, touched):
    """Creates a linked list, for each pair, of the tasks that lead to step t.

    Returns the number of pairs in `touched`.
    """
    num_touched, num_tasks = 0, 0
    for b in range(active):
        s = starts_at[b] + t
        for task in range(first_task[s], first_task[s + 1]):
            p = pair[task]
            if head[p] < 0:
                touched[num_touched] = p
                num_touched += 1
            following[task] = head[p]
            head[p] = task
            num_tasks += 1
    # If several tasks lead to one message, they are added in the order of their pairs, whatever the other sequences
    # are.
    if num_tasks > active:
        touched[:num_touched].sort()
    return num_touched


class Block(NamedTuple):
    """The rows of the transitions from the clones of one symbol to those of another.

    The entries of row c begin at ``bounds[base + c * stride]``.
    """

    base: int
    stride: int
    num_source: int
    num_target: int


class Forward(NamedTuple):
    """Results of the forward pass.

    alpha: Messages p(z_t | y_1:t).
    totals: Sum of each message before its normalization.
    log_likelihood: Log-likelihood of each sequence, NaN if a total is below the limit.
    stopped: First step of each sequence at which that is the case, or -1.
    """

    alpha: np.ndarray
    totals: np.ndarray
    log_likelihood: np.ndarray
    stopped: np.ndarray


class Space(NamedTuple):
    """Arrays for the products of a block with up to four messages.

    sources, targets: Positions of the messages.
    rows, ids, xs: Addresses and numbers of the rows for which a message is not zero, and the entries of the messages.
    outputs: Addresses of the results.
    """

    sources: np.ndarray
    targets: np.ndarray
    rows: np.ndarray
    ids: np.ndarray
    xs: np.ndarray
    outputs: np.ndarray


@inner
def _space(widest, messages):
    return Space(
        np.empty(GROUP, np.int64),
        np.empty(GROUP, np.int64),
        np.empty(widest, np.int64),
        np.empty(widest, np.int64),
        np.empty(GROUP * max(widest, GROUP), messages.dtype),
        np.empty(GROUP, np.int64),
    )


@inner
def _block(p, layout):
    """Returns the block of the stored pair p."""
    starts, pair_first, pair_source, pair_target, bound_base, _, _ = layout
    u, v = pair_source[p], pair_target[p]
    return Block(
        bound_base[u] + p - pair_first[u],
        pair_first[u + 1] - pair_first[u] + 1,
        starts[u + 1] - starts[u],
        starts[v + 1] - starts[v],
    )


@inner
def _active_rows(count, space, block, bounds, probs, messages):
    """Lists the rows of a block for which a message is not zero: addresses, entries of the messages, and clones."""
    group, _, rows, ids, xs, _ = space
    probs_at, size, active = probs.ctypes.data, probs.itemsize, 0
    for c in range(block.num_source):
        found = False
        for r in range(count):
            x = messages[group[r] + c]
            xs[active * count + r] = x
            found = found or x != 0
        if found:
            rows[active] = probs_at + bounds[block.base + c * block.stride] * size
            ids[active] = c
            active += 1
    return active


@inner
def _forward_group(count, space, block, bounds, columns, probs, alpha):
    """alpha[target] += alpha[source] @ block, for up to four messages."""
    sources, targets, rows, _, xs, outputs = space
    base, stride, num_source, num_target = block
    zero = alpha.dtype.type(0.0)
    if columns.shape[0] > 0:
        for r in range(count):
            for c in range(num_source):
                x = alpha[sources[r] + c]
                if x != 0:
                    for e in range(bounds[base + c * stride], bounds[base + c * stride + 1]):
                        alpha[targets[r] + columns[e]] += x * probs[e]
        return
    active = _active_rows(count, space, block, bounds, probs, alpha)
    for r in range(count):
        outputs[r] = alpha.ctypes.data + targets[r] * alpha.itemsize
    add_rows(count, zero, active, num_target, outputs, xs, rows)


@inner
def _backward_group(count, space, block, bounds, columns, probs, alpha, kappa):
    """kappa[source] += block @ kappa[target] where alpha[source] is not zero, for up to four messages."""
    sources, targets, rows, ids, xs, outputs = space
    base, stride, num_source, num_target = block
    zero = alpha.dtype.type(0.0)
    if columns.shape[0] > 0:
        for r in range(count):
            for c in range(num_source):
                if alpha[sources[r] + c] != 0:
                    total = zero
                    for e in range(bounds[base + c * stride], bounds[base + c * stride + 1]):
                        total += probs[e] * kappa[targets[r] + columns[e]]
                    kappa[sources[r] + c] += total
        return
    active = _active_rows(count, space, block, bounds, probs, alpha)
    for r in range(count):
        outputs[r] = kappa.ctypes.data + targets[r] * kappa.itemsize
    dot_rows(count, zero, active, num_target, outputs, xs, rows)
    for d in range(active):
        for r in range(count):
            if alpha[sources[r] + ids[d]] != 0:
                kappa[sources[r] + ids[d]] += xs[d * count + r]


@inner
def _take_group(task, following, entry_at, source, target, space):
    """Takes four, two or one tasks from a list, as positions of their messages.

    Returns their number and the next task.
    """
    left, probe = 0, task
    while probe >= 0 and left < GROUP:
        left += 1
        probe = following[probe]
    count = left if left != 3 else 2
    for r in range(count):
        space.sources[r], space.targets[r] = entry_at[source[task]], entry_at[target[task]]
        task = following[task]
    return count, task


@kernel
def forward(share, shares, order, offsets, plan, layout, probs, initial, limits, support, results):
    """Computes forward messages of every `shares`-th sequence of `order`, which is longest first.

    If a total is below the limit, the log-likelihood of the sequence is NaN, and `stopped` is the step. With `support`,
    positive entries of messages are set to one, and `stopped` is the first impossible step.
    """
    alpha, totals, log_likelihood, stopped = results
    first_entry, entry_symbol, entry_weight, entry_at, first_task, source, target, pair, following = plan
    starts, pair_target, bounds, columns = layout.starts, layout.pair_target, layout.bounds, layout.columns
    zero, one = alpha.dtype.type(0.0), alpha.dtype.type(1.0)
    flush, collapse = alpha.dtype.type(limits.flush), limits.collapse
    ids_here = order[share::shares]
    members, begins, lengths = ids_here.shape[0], offsets[ids_here], offsets[ids_here + 1] - offsets[ids_here]
    widest = np.max(starts[1:] - starts[:-1])
    space = _space(widest, alpha)
    head, touched = np.full(pair_target.shape[0], -1), np.empty(pair_target.shape[0], np.int64)
    product = np.ones(members)  # product of the totals since the last logarithm
    active = members
    for t in range(lengths[0] if members > 0 else 0):
        while lengths[active - 1] <= t:
            active -= 1
        for b in range(active):
            s = begins[b] + t
            for e in range(first_entry[s], first_entry[s + 1]):
                v, at = entry_symbol[e], entry_at[e]
                message = alpha[at : at + starts[v + 1] - starts[v]]
                if t == 0:
                    message[:] = initial[starts[v] : starts[v + 1]]
                else:
                    message[:] = zero
        if t > 0:
            num_touched = _link(active, begins, t, first_task, pair, head, following, touched)
            for k in range(num_touched):
                p = touched[k]
                block, task = _block(p, layout), head[p]
                head[p] = -1
                while task >= 0:
                    count, task = _take_group(task, following, entry_at, source, target, space)
                    _forward_group(count, space, block, bounds, columns, probs, alpha)
        for b in range(active):
            s, n = begins[b] + t, ids_here[b]
            total = zero
            for e in range(first_entry[s], first_entry[s + 1]):
                v, at = entry_symbol[e], entry_at[e]
                weight = alpha.dtype.type(entry_weight[e])
                message = alpha[at : at + starts[v + 1] - starts[v]]
                for c in range(message.shape[0]):
                    if support:
                        message[c] = one if message[c] > 0 and weight > 0 else zero
                    else:
                        message[c] = message[c] * weight if message[c] >= flush else zero
                    total += message[c]
            if support:
                if total == 0 and stopped[n] < 0:
                    stopped[n] = t
                continue
            totals[s] = total
            if total > collapse:
                scale = one / total
                for e in range(first_entry[s], first_entry[s + 1]):
                    v, at = entry_symbol[e], entry_at[e]
                    message = alpha[at : at + starts[v + 1] - starts[v]]
                    for c in range(message.shape[0]):
                        message[c] = message[c] * scale if message[c] * scale >= flush else zero
                product[b] *= total
                if product[b] < 1e-100:  # The next factor cannot underflow.
                    log_likelihood[n] += np.log(product[b])
                    product[b] = 1.0
            else:
                for e in range(first_entry[s], first_entry[s + 1]):
                    v, at = entry_symbol[e], entry_at[e]
                    alpha[at : at + starts[v + 1] - starts[v]] = zero
                log_likelihood[n] = np.nan
                if stopped[n] < 0:
                    stopped[n] = t
    for b in range(members):
        log_likelihood[ids_here[b]] += np.log(product[b])


@kernel
def backward(share, shares, order, offsets, plan, layout, probs, weights, alpha, totals, kappa, smoothed):
    """Computes scaled backward messages kappa, for which w E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j).

    kappa_t(j) = w e_t(j) beta_t(j) / (total_t sum alpha beta), where e is the weight of the symbol and w the weight of
    the sequence. At the first step of a sequence, kappa is w p(z_1 | y). If `smoothed` has rows, they are set to w
    p(z_t | y).
    """
    first_entry, entry_symbol, entry_weight, entry_at, first_task, source, target, pair, following = plan
    starts, pair_target, bounds, columns = layout.starts, layout.pair_target, layout.bounds, layout.columns
    zero = alpha.dtype.type(0.0)
    ids_here = order[share::shares]
    members, begins, lengths = ids_here.shape[0], offsets[ids_here], offsets[ids_here + 1] - offsets[ids_here]
    widest = np.max(starts[1:] - starts[:-1])
    space = _space(widest, alpha)
    head, touched = np.full(pair_target.shape[0], -1), np.empty(pair_target.shape[0], np.int64)
    active = 0
    for t in range(lengths[0] - 1 if members > 0 else -1, -1, -1):
        while active < members and lengths[active] > t:
            s = begins[active] + t
            for e in range(first_entry[s], first_entry[s + 1]):
                v, at = entry_symbol[e], entry_at[e]
                for c in range(starts[v + 1] - starts[v]):
                    kappa[at + c] = alpha.dtype.type(alpha[at + c] > 0)
            active += 1
        for b in range(active):
            s, n = begins[b] + t, ids_here[b]
            total = zero
            for e in range(first_entry[s], first_entry[s + 1]):
                at = entry_at[e]
                message, back = (
                    alpha[at : at + starts[entry_symbol[e] + 1] - starts[entry_symbol[e]]],
                    kappa[at : at + starts[entry_symbol[e] + 1] - starts[entry_symbol[e]]],
                )
                for c in range(message.shape[0]):
                    total += message[c] * back[c]
            scaled_weight = weights[n] / total if total != 0 else 0.0  # Zero if the forward pass collapsed.
            scale = alpha.dtype.type(scaled_weight / totals[s]) if total != 0 else zero
            for e in range(first_entry[s], first_entry[s + 1]):
                v, at = entry_symbol[e], entry_at[e]
                num_clones = starts[v + 1] - starts[v]
                message, back = alpha[at : at + num_clones], kappa[at : at + num_clones]
                if smoothed.shape[0] > 0:
                    for c in range(num_clones):
                        smoothed[s, starts[v] + c] = message[c] * back[c] * scaled_weight
                if t == 0:
                    for c in range(num_clones):
                        back[c] = message[c] * back[c] * alpha.dtype.type(scaled_weight)
                else:
                    factor = scale * alpha.dtype.type(entry_weight[e])
                    for c in range(num_clones):
                        back[c] *= factor
            if t > 0:
                for e in range(first_entry[s - 1], first_entry[s]):
                    at = entry_at[e]
                    kappa[at : at + starts[entry_symbol[e] + 1] - starts[entry_symbol[e]]] = zero
        if t > 0:
            num_touched = _link(active, begins, t, first_task, pair, head, following, touched)
            for k in range(num_touched):
                p = touched[k]
                block, task = _block(p, layout), head[p]
                head[p] = -1
                while task >= 0:
                    count, task = _take_group(task, following, entry_at, source, target, space)
                    _backward_group(count, space, block, bounds, columns, probs, alpha, kappa)


# Counts


_TILE = 256  # columns of a block whose sums are computed together
_OCCURRENCES = 512  # steps whose messages remain in the cache


@kernel
def add_counts(pairs, pair_task_first, pair_tasks, plan, layout, probs, alpha, kappa, counts):
    """Adds A * (sum of alpha_t-1 kappa_t' over the steps of each pair) to `counts`.

    Four rows of a block and four steps are processed at a time.
    """
    entry_at, source, target = plan.entry_at, plan.task_source, plan.task_target
    bounds, columns = layout.bounds, layout.columns
    zero, size = alpha.dtype.type(0.0), alpha.itemsize
    sums = np.zeros((4, _TILE), alpha.dtype)
    outputs, rows, xs = np.empty(4, np.int64), np.empty(_OCCURRENCES, np.int64), np.empty(4 * _OCCURRENCES, alpha.dtype)
    for r in range(4):
        outputs[r] = sums.ctypes.data + r * _TILE * size
    for p in pairs:
        base, stride, num_source, num_target = _block(p, layout)
        if columns.shape[0] > 0:
            for k in range(pair_task_first[p], pair_task_first[p + 1]):
                src, tgt = entry_at[source[pair_tasks[k]]], entry_at[target[pair_tasks[k]]]
                for c in range(num_source):
                    x = alpha[src + c]
                    if x != 0:
                        for e in range(bounds[base + c * stride], bounds[base + c * stride + 1]):
                            counts[e] += x * probs[e] * kappa[tgt + columns[e]]
            continue
        for block in range(pair_task_first[p], pair_task_first[p + 1], _OCCURRENCES):
            block_end = min(block + _OCCURRENCES, pair_task_first[p + 1])
            for tile in range(0, num_target, _TILE):
                width = min(_TILE, num_target - tile)
                for c in range(0, num_source, 4):
                    height = min(4, num_source - c)
                    active = 0
                    for k in range(block, block_end):
                        src = entry_at[source[pair_tasks[k]]] + c
                        found = False
                        for r in range(height):
                            x = alpha[src + r]
                            xs[4 * active + r] = x
                            found = found or x != 0
                        if found:
                            for r in range(height, 4):
                                xs[4 * active + r] = zero
                            rows[active] = kappa.ctypes.data + (entry_at[target[pair_tasks[k]]] + tile) * size
                            active += 1
                    if active == 0:
                        continue
                    sums[:height] = zero
                    add_rows(4, zero, active, width, outputs, xs, rows)
                    for r in range(height):
                        first = bounds[base + (c + r) * stride] + tile
                        added, row, out = sums[r, :width], probs[first : first + width], counts[first : first + width]
                        for j in range(width):
                            out[j] += row[j] * added[j]


# Pruning


@kernel
def mark_above(first_state, last_state, row_first, probs, threshold, keep):
    """Marks the transitions whose probability is at least `threshold` or the largest of their row."""
    for state in range(first_state, last_state):
        first, last = row_first[state], row_first[state + 1]
        largest = probs.dtype.type(0.0)
        for k in range(first, last):
            largest = max(largest, probs[k])
        for k in range(first, last):
            keep[k] |= probs[k] >= threshold or (probs[k] == largest and probs[k] > 0)


@strict_kernel
def kept_before(bounds, keep):
    """Returns the number of kept entries before each bound."""
    before, total = np.zeros(bounds.shape[0], np.int64), 0
    for b in range(1, bounds.shape[0]):
        for k in range(bounds[b - 1], bounds[b]):
            total += keep[k]
        before[b] = total
    return before


@strict_kernel
def target_clones(layout, kept):
    """Returns the target clones of the given entries, in ascending order, of a layout of whole blocks."""
    bounds = layout.bounds
    columns, b = np.empty(kept.shape[0], np.int32), 0
    for k in range(kept.shape[0]):
        while bounds[b + 1] <= kept[k]:  # The last bound of a row equals the first bound of the next row.
            b += 1
        columns[k] = kept[k] - bounds[b]
    return columns


# Results from messages


@kernel
def scatter(steps, plan, starts, messages, out):
    """Copies the messages of the given steps to rows over all states."""
    first_entry, entry_symbol, entry_at = plan.first_entry, plan.entry_symbol, plan.entry_at
    for k in range(steps.shape[0]):
        for e in range(first_entry[steps[k]], first_entry[steps[k] + 1]):
            v = entry_symbol[e]
            for c in range(starts[v + 1] - starts[v]):
                out[k, starts[v] + c] = messages[entry_at[e] + c]


@kernel
def add_initial(order, offsets, plan, starts, kappa, initial_counts):
    """Adds w p(z_1 | y) of the sequences, which `backward` stores in `kappa`."""
    first_entry, entry_symbol, entry_at = plan.first_entry, plan.entry_symbol, plan.entry_at
    for n in order:
        s = offsets[n]
        for e in range(first_entry[s], first_entry[s + 1]):
            v = entry_symbol[e]
            for c in range(starts[v + 1] - starts[v]):
                initial_counts[starts[v] + c] += kappa[entry_at[e] + c]
