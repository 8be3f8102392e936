"""Forward-backward kernels and counts of pruned layouts.

The time is proportional to the number of stored entries from clones with positive probability. A message is a list of
these clones, of which there are often few: ``active[s]`` numbers of clones in `ids`, and as many entries of `alpha` and
`kappa`, from position ``at[s]`` on.

A layout stores the row of a state contiguously, for the M-step. A step needs a block, which consists of the rows of one
pair of symbols. In a pruned layout, these are short and far apart in memory, so reading them takes most of the time. If
all entries are read often, they are copied pair after pair, and the counts are copied back at the end. `Blocks`
describes both storage orders. The other names are those of `forward_backward`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, kernel, strict_kernel

_MANY = 16  # A message is sorted if more than 1 / _MANY of the clones are active.


class Blocks(NamedTuple):
    """The entries of clone c in block p begin at ``bounds[base[p] + c * stride[p]]`` and end at the next bound."""

    base: np.ndarray
    stride: np.ndarray
    bounds: np.ndarray
    columns: np.ndarray
    probs: np.ndarray


class Messages(NamedTuple):
    """Forward messages: the numbers of the clones, their probabilities, and the sizes and totals of the messages."""

    ids: np.ndarray
    alpha: np.ndarray
    active: np.ndarray
    totals: np.ndarray


@strict_kernel
def stored_blocks(layout, probs):
    """Returns the blocks in the storage order of the layout."""
    _, pair_first, pair_source, pair_target, bound_base, bounds, columns = layout
    base, stride = np.empty(pair_target.shape[0], np.int64), np.empty(pair_target.shape[0], np.int64)
    for p in range(pair_target.shape[0]):
        u = pair_source[p]
        base[p], stride[p] = bound_base[u] + p - pair_first[u], pair_first[u + 1] - pair_first[u] + 1
    return Blocks(base, stride, bounds, columns, probs)


@strict_kernel
def copied_blocks(layout, stored):
    """Returns copies of the blocks, one after the other."""
    clones = layout.starts[layout.pair_source + 1] - layout.starts[layout.pair_source]
    base, bounds = np.empty_like(stored.base), np.empty(np.sum(clones + 1), np.int64)
    columns, probs = np.empty_like(stored.columns), np.empty_like(stored.probs)
    place, entry = 0, 0
    for p in range(base.shape[0]):
        base[p] = place
        for c in range(clones[p]):
            bounds[place] = entry
            here = stored.base[p] + c * stored.stride[p]
            for e in range(stored.bounds[here], stored.bounds[here + 1]):
                columns[entry], probs[entry] = stored.columns[e], stored.probs[e]
                entry += 1
            place += 1
        bounds[place] = entry
        place += 1
    return Blocks(base, np.ones_like(base), bounds, columns, probs)


@strict_kernel
def put_back(layout, stored, copied, values, out):
    """Copies `values`, in the order of the copied blocks, to `out`, in the storage order of the layout."""
    clones = layout.starts[layout.pair_source + 1] - layout.starts[layout.pair_source]
    for p in range(clones.shape[0]):
        for c in range(clones[p]):
            here = stored.bounds[stored.base[p] + c * stored.stride[p]]
            for e in range(copied.bounds[copied.base[p] + c], copied.bounds[copied.base[p] + c + 1]):
                out[here] = values[e]
                here += 1


@kernel
def forward(share, shares, order, offsets, known, starts, blocks, initial, limits, messages, log_likelihood):
    """Computes forward messages of every `shares`-th sequence of `order`, as `forward_backward.forward`.

    A sequence that collapses has no active clones.
    """
    symbols, pairs, at = known
    base, stride, bounds, columns, probs = blocks
    ids, alpha, active, totals = messages
    flush, collapse = alpha.dtype.type(limits.flush), limits.collapse
    widths = starts[1:] - starts[:-1]
    widest = np.max(widths)
    zero, one = alpha.dtype.type(0.0), alpha.dtype.type(1.0)
    # All sums are zero except those of the clones in `found`.
    found, sums = np.empty(widest, np.int64), np.zeros(widest, alpha.dtype)
    for n in order[share::shares]:
        product = 1.0
        for s in range(offsets[n], offsets[n + 1]):
            num_found, total = 0, zero
            if s == offsets[n]:
                for c in range(widths[symbols[s]]):
                    x = initial[starts[symbols[s]] + c]
                    if x >= flush:
                        found[num_found], sums[c] = c, x
                        num_found += 1
            elif pairs[s] >= 0:
                p, before = pairs[s], at[s - 1]
                for k in range(before, before + active[s - 1]):
                    x, place = alpha[k], base[p] + ids[k] * stride[p]
                    for e in range(bounds[place], bounds[place + 1]):
                        j = columns[e]
                        old = sums[j]
                        sums[j] = old + x * probs[e]
                        if old == 0 and sums[j] != 0:
                            found[num_found] = j
                            num_found += 1
            if _MANY * num_found > widths[symbols[s]]:  # Rows are read fastest in ascending order.
                num_found = 0
                for c in range(widths[symbols[s]]):
                    if sums[c] != 0:
                        found[num_found] = c
                        num_found += 1
            for k in range(num_found):
                if sums[found[k]] >= flush:
                    total += sums[found[k]]
            if not total > collapse:
                log_likelihood[n] = np.nan
                active[offsets[n] : offsets[n + 1]] = 0
                sums[:] = zero
                break
            scale, here = one / total, at[s]
            for k in range(num_found):
                x, sums[found[k]] = sums[found[k]], zero
                if x >= flush and x * scale >= flush:
                    ids[here], alpha[here] = found[k], x * scale
                    here += 1
            active[s], totals[s] = here - at[s], total
            product *= total
            if product < 1e-100:  # The next factor cannot underflow.
                log_likelihood[n] += np.log(product)
                product = 1.0
        log_likelihood[n] += np.log(product)


@inner
def _spread(first, last, ids, values, row):
    for k in range(first, last):
        row[ids[k]] = values[k]


@inner
def _clear(first, last, ids, row):
    for k in range(first, last):
        row[ids[k]] = 0


@kernel
def backward(share, shares, order, offsets, known, starts, blocks, weights, messages, kappa):
    """Computes scaled backward messages kappa, as `forward_backward.backward`."""
    pairs, at = known.pairs, known.at
    base, stride, bounds, columns, probs = blocks
    ids, alpha, active, totals = messages
    zero, one = alpha.dtype.type(0.0), alpha.dtype.type(1.0)
    row = np.zeros(np.max(starts[1:] - starts[:-1]), alpha.dtype)
    for n in order[share::shares]:
        for s in range(offsets[n + 1] - 1, offsets[n] - 1, -1):
            first, last = at[s], at[s] + active[s]
            if s == offsets[n + 1] - 1:
                kappa[first:last] = one
            else:
                after, p = at[s + 1], pairs[s + 1]
                _spread(after, after + active[s + 1], ids, kappa, row)
                for k in range(first, last):
                    place, total = base[p] + ids[k] * stride[p], zero
                    for e in range(bounds[place], bounds[place + 1]):
                        total += probs[e] * row[columns[e]]
                    kappa[k] = total
                _clear(after, after + active[s + 1], ids, row)
            total = zero
            for k in range(first, last):
                total += alpha[k] * kappa[k]
            scaled_weight = weights[n] / total if total != 0 else 0.0  # Zero if the forward pass collapsed.
            if s == offsets[n]:
                for k in range(first, last):
                    kappa[k] *= alpha[k] * alpha.dtype.type(scaled_weight)
            elif total != 0:
                scale = alpha.dtype.type(scaled_weight / totals[s])
                for k in range(first, last):
                    kappa[k] *= scale


@kernel
def add_counts(pair_numbers, step_first, steps, at, starts, blocks, messages, kappa, counts):
    """Adds A * (sum of alpha_t-1 kappa_t' over the steps of each pair) to `counts`.

    The steps of pair p are ``steps[step_first[p]:step_first[p + 1]]``.
    """
    base, stride, bounds, columns, probs = blocks
    ids, alpha, active, _ = messages
    row = np.zeros(np.max(starts[1:] - starts[:-1]), alpha.dtype)
    for p in pair_numbers:
        for s in steps[step_first[p] : step_first[p + 1]]:
            first, last = at[s], at[s] + active[s]
            _spread(first, last, ids, kappa, row)
            for k in range(at[s - 1], at[s - 1] + active[s - 1]):
                x, place = alpha[k], base[p] + ids[k] * stride[p]
                for e in range(bounds[place], bounds[place + 1]):
                    counts[e] += x * probs[e] * row[columns[e]]
            _clear(first, last, ids, row)


@kernel
def add_rows(steps, rows, symbols, at, starts, ids, values, active, out):
    """Adds the messages of the given steps to the given rows of `out` (rows, states)."""
    for k in range(steps.shape[0]):
        s = steps[k]
        for place in range(at[s], at[s] + active[s]):
            out[rows[k], starts[symbols[s]] + ids[place]] += values[place]
