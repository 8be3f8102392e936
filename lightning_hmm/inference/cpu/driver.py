r"""Forward-backward over tiles of sequences, compiled once for each type of operator and precision.

Sequences are sorted by length and processed in tiles, so that a step of a tile is a small matrix product. The sequences
that are still running are the first ones of the tile. Messages are probabilities that are normalized at every step. The
state axis is padded with zeros to a multiple of the vector width.

.. math:: \alpha_t = (\alpha_{t-1} A \odot b_t) / c_t, \qquad
    \kappa_t = b_t \odot \beta_t / c_t, \qquad \beta_{t-1} = A \kappa_t

An operator is a NamedTuple of arrays with implementations of the functions `predict`, `retract`, `count` and `best`
below, which numba selects by the type of the tuple. See `dense` for an example.

A message entry below `flush`, relative to the sum, is set to zero. The filter reports where that happens to an entry
that was possible. Three bounds on the likelihood that was lost follow. Each is computed only if the one before is not
conclusive:

1. Nothing was lost. Or, from the bounds of the operator alone, every transition is so probable that one step later
   every state has a probability beside which the loss is negligible (`fed`).
2. The lost fraction can grow at most by the inverse of all later sums :math:`c_t`.
3. A second forward pass adds to every prediction more than could have been lost, which gives an upper bound of the
   likelihood.

A sequence that passes none of them has a log-likelihood of NaN and contributes to no sum. The same holds for a sequence
in which the sum of a step is below `collapse`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from lightning_hmm.inference.cpu.cache import OPTIONS, inlined, inner, kernel, record_source
from lightning_hmm.inference.cpu.fill import (
    TABLE,
    consume,
    fill_from_table,
    fill_rows,
    make_buffers,
    running,
    whole_blocks,
)
from lightning_hmm.inference.cpu.vectors import (
    filter_four,
    filter_one,
    posterior_four,
    posterior_one,
    watched_filter_four,
    watched_filter_one,
)
from lightning_hmm.inference.kernels.simd import (
    accumulate_row,
    lanes_of,
    scale_row,
    smooth_four,
    smooth_one,
    smooth_row,
)

_CHUNK, _CHUNK_BYTES = (
    64,
    1 << 18,
)  # steps of a tile that a forward pass without a backward pass works on at once, and the size of their messages


class Limits(NamedTuple):
    """What a precision can hold, and what is known of the chain.

    flush, tiny, collapse: see `vectors`.
    leak: what the third bound adds to every prediction.
    unit: how much of the likelihood a step can lose, relative to what it keeps.
    growth: logarithm of the largest factor by which a transition enlarges a sum.
    negligible: how much a log-likelihood may be off.
    fed: whether every transition has a probability that is large beside what can be lost.
    doubtful: whether something may be lost that the filter cannot see.
    """

    flush: Any
    tiny: Any
    collapse: Any
    leak: Any
    unit: float
    growth: float
    negligible: float
    fed: bool
    doubtful: bool


class Result(NamedTuple):
    """What a lane fills. Arrays of one row per sequence or step are shared by the lanes; others are sums of its own."""

    log_likelihood: np.ndarray
    last: np.ndarray
    smoothed: np.ndarray
    filtered: np.ndarray
    initial: np.ndarray
    evidence: np.ndarray  # (V + 1 or F, padded)
    problem: np.ndarray


class State(NamedTuple):
    """State of the sequences of a tile.

    It consists of logarithms and products whose sum is the log-likelihood, what was lost, and both at the end of each
    sequence.
    """

    sums: np.ndarray
    products: np.ndarray
    lost: np.ndarray
    found: np.ndarray
    gap: np.ndarray


@inner
def chunk_steps(step_bytes):
    """Returns the number of steps that a forward pass without a backward pass processes at once.

    `step_bytes` is the size of the messages of a tile at one step.
    """
    return min(_CHUNK, max(4, _CHUNK_BYTES // step_bytes))


# The functions of an operator


def predict(op, starts, t, active, rows, messages, slot):
    """Computes messages[slot + 1, b] = messages[slot, b] A for b < rows, into step t.

    Step t of sequence b has the number starts[b] + t in the batch. Rows from `active` on belong to sequences that have
    ended. They may take any finite value.
    """
    raise NotImplementedError


def retract(op, sums, starts, t, active, rows, alpha, kappa, slot, beta):
    """Computes beta[b] = A kappa[slot, b] for b < rows, out of step t.

    It may add the counts of alpha[t, b], the messages before that step, and kappa[slot, b] to `sums`. From `active` on,
    kappa is zero.
    """
    raise NotImplementedError


def count(op, sums, alpha, kappa, t, steps, last):
    """Adds the counts of alpha[t : t + steps] and kappa[:steps], the messages before and after the transitions.

    `last` is true in the last call for a tile.
    """
    raise NotImplementedError


def fuses(op):
    """Whether `step` predicts and filters rows of one vector at once."""
    raise NotImplementedError


def step(op, watch, like, now, before, emissions, flush, tiny, collapse, scales, products):
    """As `vectors.step_four`, or `watched_step_four`, from addresses."""
    raise NotImplementedError


def best(op, starts, t, active, rows, messages, slot):
    """Computes messages[slot + 1, b, j] = max over i of messages[slot, b, i] + log A_ij, otherwise as `predict`."""
    raise NotImplementedError


def best_source(op, step, messages, slot, b, state):
    """Returns the first i that maximizes messages[slot, b, i] + log A[i, state], into the step with number `step`."""
    raise NotImplementedError


_implementations: dict[tuple[type, str], Callable[..., Any]] = {}


def implements(arrays: type, stub: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the implementation of `stub` for operators of the type `arrays`."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        _implementations[arrays, stub.__name__] = function
        record_source(arrays, function)
        return function

    return keep


@overload(predict, jit_options=OPTIONS)
def _predict(op, starts, t, active, rows, messages, slot):
    return _implementations[op.instance_class, "predict"]


@overload(retract, jit_options=OPTIONS)
def _retract(op, sums, starts, t, active, rows, alpha, kappa, slot, beta):
    return _implementations[op.instance_class, "retract"]


@overload(count, jit_options=OPTIONS)
def _count(op, sums, alpha, kappa, t, steps, last):
    return _implementations.get((op.instance_class, "count"), lambda op, sums, alpha, kappa, t, steps, last: None)


@overload(fuses, jit_options=OPTIONS)
def _fuses(op):
    return (lambda op: True) if (op.instance_class, "step") in _implementations else (lambda op: False)


@overload(step, jit_options=OPTIONS)
def _step(op, watch, like, now, before, emissions, flush, tiny, collapse, scales, products):
    return _implementations.get(
        (op.instance_class, "step"),
        lambda op, watch, like, now, before, emissions, flush, tiny, collapse, scales, products: np.int64(0),
    )


@overload(best, jit_options=OPTIONS)
def _best(op, starts, t, active, rows, messages, slot):
    return _implementations[op.instance_class, "best"]


@overload(best_source, jit_options=OPTIONS)
def _best_source(op, step, messages, slot, b, state):
    return _implementations[op.instance_class, "best_source"]


# Forward and backward


@inner
def _report(code, size, b, scales, slot, state):
    """What the code of a filter says about the rows b, b + 1, ..."""
    for i in range(size):
        n = b + i
        product = state.products[n]
        if code & 1 and (product < 1e-100 or product > 1e100):
            state.sums[n] = (
                state.sums[n] + np.log(product) if 0 < product < np.inf else np.nan
            )  # zero: the step collapsed
            state.products[n] = 1.0
        if code & (2 << i) and state.lost[n] == -np.inf:  # later losses are smaller beside the likelihood at the end
            state.lost[n] = state.sums[n] + np.log(state.products[n]) + np.log(np.float64(scales[slot, n]))


@inlined
def forward(
    op, limits, leak, first, last, members, lengths, starts, num_states, initial, places, alpha, scales, state, ends
):
    """Filters the steps `first` to `last` of a tile.

    alpha[1 + t - first, b] ~ p(z_t | y_1:t) is scaled by scales[t - first, b] to a sum of one; alpha[0] contains the
    messages before `first`. The last messages of sequences are copied to `ends` if it has room.
    """
    tile, padded = alpha.shape[1], alpha.shape[2]
    zero, tiny = alpha.dtype.type(0.0), alpha.dtype.type(0.0) if leak > 0 else limits.tiny
    alpha_at, places_at, scales_at, products_at = (
        alpha.ctypes.data,
        places.ctypes.data,
        scales.ctypes.data,
        state.products.ctypes.data,
    )
    row_bytes, watch = padded * alpha.itemsize, not limits.fed and leak == 0
    active = running(first, members, lengths)
    for t in range(first, last):
        if active == 0:
            break
        slot = t - first
        rows = whole_blocks(active, tile)
        before_at = alpha_at + slot * tile * row_bytes
        now_at = before_at + tile * row_bytes
        fused = fuses(op) and t > 0 and leak == 0 and padded == lanes_of(zero) and rows % 4 == 0
        if t == 0:
            for b in range(rows):
                for k in range(padded):
                    alpha[1, b, k] = initial[k]
        elif not fused:
            predict(op, starts, t, active, rows, alpha, slot)
        if leak > 0:
            for b in range(active):
                for k in range(num_states):
                    alpha[slot + 1, b, k] += leak
        for b in range(rows, tile):
            for k in range(padded):
                alpha[slot + 1, b, k] = zero
        b = 0
        while b < rows:
            size = 4 if b + 4 <= rows else 1
            here, there = b * row_bytes, slot * tile + b
            emissions, scale, product = places_at + 8 * there, scales_at + there * alpha.itemsize, products_at + 8 * b
            if fused:
                code = step(
                    op,
                    watch,
                    zero,
                    now_at + here,
                    before_at + here,
                    emissions,
                    limits.flush,
                    tiny,
                    limits.collapse,
                    scale,
                    product,
                )
            elif size == 4 and watch:
                code = watched_filter_four(
                    zero, padded, now_at + here, emissions, limits.flush, tiny, limits.collapse, scale, product
                )
            elif size == 4:
                code = filter_four(
                    zero, padded, now_at + here, emissions, limits.flush, tiny, limits.collapse, scale, product
                )
            elif watch:
                code = watched_filter_one(
                    zero, padded, now_at + here, emissions, limits.flush, tiny, limits.collapse, scale, product
                )
            else:
                code = filter_one(
                    zero, padded, now_at + here, emissions, limits.flush, tiny, limits.collapse, scale, product
                )
            if code != 0:
                _report(code, size, b, scales, slot, state)
            b += size
        while active > 0 and lengths[active - 1] == t + 1:
            active -= 1
            state.found[active] = state.sums[active] + np.log(state.products[active])
            state.gap[active] = state.lost[active] - state.found[active]
            if ends.shape[0] > 0:
                for k in range(num_states):
                    ends[active, k] = alpha[slot + 1, active, k]


@inner
def _settled(limits, length, gap):
    """Whether what was lost is negligible, by the first two bounds."""
    if limits.fed:
        return True
    if limits.doubtful:
        return False
    return gap == -np.inf or gap + np.log(limits.unit * length) + limits.growth * length <= np.log(limits.negligible)


@inlined
def backward(
    op,
    seen,
    sums,
    members,
    lengths,
    starts,
    weights,
    by_rows,
    places,
    counted,
    alpha,
    scales,
    beta,
    gamma,
    kappa,
    posteriors,
    buffers,
    out,
):
    """Smooths a tile and adds its counts.

    The posterior probabilities, times weight, are added to the float64 rows at the addresses `counted`, or with
    `by_rows` are consumed from `posteriors`.

    beta begins with the weight at the last step. The sum of alpha beta is then the weight at every step, except for
    rounding, which every eighth step removes. `kappa` and `posteriors` contain as many steps as one product of the
    counts uses.
    """
    tile, padded, window = alpha.shape[1], alpha.shape[2], kappa.shape[0]
    zero, lanes, num_states = alpha.dtype.type(0.0), lanes_of(alpha.dtype.type(0.0)), seen.one_hot.shape[0] - 1
    alpha_at, beta_at, gamma_at, kappa_at = alpha.ctypes.data, beta.ctypes.data, gamma.ctypes.data, kappa.ctypes.data
    places_at, counted_at, scales_at, initial_at = (
        places.ctypes.data,
        counted.ctypes.data,
        scales.ctypes.data,
        out.initial.ctypes.data,
    )
    row_bytes, posteriors_at = padded * alpha.itemsize, posteriors.ctypes.data
    beta[:] = zero
    active, end = 0, lengths[0]
    for t in range(lengths[0] - 1, -1, -1):
        while active < members and lengths[active] > t:
            for k in range(padded):
                beta[active, k] = alpha.dtype.type(weights[active])
            active += 1
        rows = whole_blocks(active, tile)
        slot = (t - 1) % window if t > 0 else 0
        step_at, slot_bytes = alpha_at + (t + 1) * tile * row_bytes, slot * tile * row_bytes
        if t % 8 == 4 or t == 0:
            for b in range(active):
                total = smooth_row(zero, padded, step_at + b * row_bytes, beta_at + b * row_bytes, gamma_at)
                if t == 0:
                    accumulate_row(zero, padded, initial_at, gamma_at, 1.0)
                else:
                    # Zero if the sequence takes no part; negative if the weight is, which an incoming gradient may be.
                    scale_row(
                        zero,
                        padded,
                        beta_at + b * row_bytes,
                        alpha.dtype.type(weights[b]) / total if total != zero else zero,
                    )
        b = 0
        while b < rows:
            here, there = b * row_bytes, t * tile + b
            scale, place, counts = scales_at + there * alpha.itemsize, places_at + 8 * there, counted_at + 8 * there
            kappa_to, gamma_to, alpha_from, beta_from = (
                kappa_at + slot_bytes + here,
                posteriors_at + slot_bytes + here,
                step_at + here,
                beta_at + here,
            )
            if by_rows:
                if b + 4 <= rows:
                    posterior_four(zero, padded, kappa_to, gamma_to, alpha_from, beta_from, scale, place)
                    b += 4
                else:
                    posterior_one(zero, padded, kappa_to, gamma_to, alpha_from, beta_from, scale, place)
                    b += 1
            elif b + 4 <= rows:
                if padded == lanes:  # a known length saves the loop over vectors
                    smooth_four(zero, lanes, kappa_to, alpha_from, beta_from, scale, place, counts)
                else:
                    smooth_four(zero, padded, kappa_to, alpha_from, beta_from, scale, place, counts)
                b += 4
            else:
                smooth_one(zero, padded, kappa_to, alpha_from, beta_from, scale, place, counts)
                b += 1
        for b in range(rows, tile):  # ended sequences take no part in the counts of this step
            for k in range(padded):
                kappa[slot, b, k] = zero
                if by_rows:
                    posteriors[slot, b, k] = zero
        if t > 0:
            retract(op, sums, starts, t, active, rows, alpha, kappa, slot, beta)
        if slot == 0:
            if t > 0:
                count(op, sums, alpha, kappa, t, end - t, t == 1)
            if by_rows:
                consume(
                    seen,
                    t,
                    end - t,
                    members,
                    lengths,
                    starts,
                    num_states,
                    posteriors,
                    buffers,
                    out.evidence,
                    out.smoothed,
                )
            end = t


@kernel
def run_lane(
    lane,
    lanes,
    tile,
    order,
    offsets,
    weights,
    smooth,
    seen,
    op,
    sums,
    limits,
    initial,
    num_states,
    chunk,
    window,
    work,
    out,
):
    """Runs forward-backward, or without `smooth` the forward pass, over the tiles of one lane.

    With `smooth`, `chunk` is the length of the longest sequence of the lane; otherwise, the number of steps that are
    processed at once.
    """
    padded, size = initial.shape[0], tile * initial.shape[0]
    computed, by_rows = seen.form != TABLE, smooth and (seen.form != TABLE or out.smoothed.shape[0] > 0)
    alpha, rest = work[: (chunk + 1) * size].reshape(chunk + 1, tile, padded), work[(chunk + 1) * size :]
    kept = chunk if computed else 0
    rows, rest = rest[: kept * size].reshape(kept, tile, padded), rest[kept * size :]
    kappa, rest = rest[: window * size].reshape(window, tile, padded), rest[window * size :]
    kept = window if by_rows else 0
    posteriors, rest = rest[: kept * size].reshape(kept, tile, padded), rest[kept * size :]
    beta, gamma = rest[:size].reshape(tile, padded), rest[size : size + padded]
    scales, addresses = np.empty((chunk, tile), initial.dtype), np.empty((2 * chunk, tile), np.int64)
    numbers, integers = np.zeros((10, tile)), np.zeros((2, tile), np.int64)
    places, counted, lengths, starts = addresses[:chunk], addresses[chunk:], integers[0], integers[1]
    state = State(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])
    tile_weights, shifts, found, settled, unused = numbers[5], numbers[6], numbers[7], numbers[8], numbers[9]
    buffers = make_buffers(seen, padded)
    if computed:
        for t in range(chunk):
            for b in range(tile):
                places[t, b] = rows.ctypes.data + (t * tile + b) * padded * rows.itemsize
    taken = min(chunk, chunk_steps(size * initial.itemsize))
    spare, spare_scales = alpha[:0], scales[:0]
    ends = np.empty((0 if smooth else tile, num_states), initial.dtype)
    counts_at = out.evidence.ctypes.data if smooth else 0
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        members = ids.shape[0]
        for b in range(members):
            starts[b], tile_weights[b], shifts[b] = offsets[ids[b]], weights[ids[b]], 0.0
            lengths[b] = offsets[ids[b] + 1] - starts[b]
        keeps = lengths[0] <= chunk  # whether the emission rows, and with `smooth` the messages, of all steps are kept
        doubtful, attempt = False, 0
        while attempt == 0 or (attempt == 1 and doubtful):  # the second time with a leak, for the third bound
            leak = initial.dtype.type(0.0) if attempt == 0 else limits.leak
            messages, factors, finals = (alpha, scales, ends) if attempt == 0 else (spare, spare_scales, ends[:0])
            for b in range(tile):
                state.sums[b], state.products[b], state.lost[b] = 0.0, 1.0, -np.inf
            for first in range(0, lengths[0], taken):
                last, here = min(first + taken, lengths[0]), first if keeps else 0
                there = here if attempt == 0 else 0
                if attempt == 0 or not keeps:
                    target = shifts if attempt == 0 else unused
                    if computed:
                        fill_rows(
                            seen, first, last, members, lengths, starts, rows[here:], buffers, target, out.problem
                        )
                    else:
                        fill_from_table(
                            seen,
                            first,
                            last,
                            members,
                            lengths,
                            starts,
                            places[here:],
                            counted[here:],
                            counts_at,
                            target,
                            out.problem,
                        )
                forward(
                    op, limits, leak, first, last, members, lengths, starts, num_states, initial,
                    places[here:], messages[there:], factors[there:], state, finals,
                )  # fmt: skip
                if last < lengths[0] and (attempt == 1 or not keeps):
                    for b in range(tile):
                        for k in range(padded):
                            messages[0, b, k] = messages[last - first, b, k]
            for b in range(members):
                if attempt == 0:
                    found[b], settled[b] = state.found[b], 1.0 if _settled(limits, lengths[b], state.gap[b]) else 0.0
                    doubtful |= settled[b] == 0 and not np.isnan(found[b])
                elif settled[b] == 0 and not state.found[b] - found[b] <= limits.negligible:
                    found[b] = np.nan
            if attempt == 0 and doubtful and spare.shape[0] == 0:
                spare, spare_scales = (
                    np.zeros((taken + 1, tile, padded), initial.dtype),
                    np.zeros((taken, tile), initial.dtype),
                )
            attempt += 1
        for b in range(members):
            out.log_likelihood[ids[b]] = found[b] + shifts[b]
            if np.isnan(found[b]):
                tile_weights[b] = 0.0
            elif out.last.shape[0] > 0:
                for k in range(num_states):
                    out.last[ids[b], k] = ends[b, k]
        if smooth:
            backward(
                op, seen, sums, members, lengths, starts, tile_weights, by_rows, places, counted,
                alpha, scales, beta, gamma, kappa, posteriors, buffers, out,
            )  # fmt: skip
            for b in range(members):
                if out.filtered.shape[0] > 0 and not np.isnan(found[b]):
                    for t in range(lengths[b]):
                        for k in range(num_states):
                            out.filtered[starts[b] + t, k] = alpha[t + 1, b, k]
