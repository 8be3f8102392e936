"""The hot loops of the dense HMM on a CPU, compiled by numba.

N sequences, T steps, K states, V symbols, D features. Sequences are packed: sequence n is rows
``offsets[n]:offsets[n + 1]``. They are sorted by length and worked on in tiles of at most 32, so that one step of a tile
is one small matrix product, and in a tile of ragged sequences those still running are a prefix.

Messages are probabilities, normalised at every step; the state axis is padded with states of probability zero to a
multiple of the vector width. Emission rows are divided by their largest entry, whose logarithm joins the likelihood.
What is left of float range is watched: where a step's mass falls below `COLLAPSE`, the sequence is marked and
`exact_sequences` does it again in log space, so that neither a point a thousand standard deviations off nor a state that
fits better but cannot be reached ends in a wrong number. Entries below `FLUSH` are dropped; where a transition matrix has
zeros, so that no other state brings back what was dropped, a second forward pass bounds what it could have become, and a
sequence for which that is not negligible goes to log space too.

Work is dealt to a fixed number of lanes, each with sums of its own, that depends on shapes only. So one thread and
sixteen give the same bits. Threads are Python's: the kernels release the GIL. (numba's own OpenMP layer kills forked
children, and its parallel compiler triples the compile time.)
"""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit

from lightning_hmm.inference.kernels.simd import accumulate_row, combine_row, make_product, padded_size, rescale_row, smooth_row, weigh_row

SYMBOLS, STEPS, GAUSSIAN = 0, 1, 2

# A message entry below FLUSH is taken as zero, which keeps every quotient of the backward pass inside the float range
# with room for sequence weights. A step that keeps less than COLLAPSE of its mass sends the sequence to log space.
_DOUBLE = np.dtype(np.float64)
FLUSH = {np.dtype(np.float32): 1e-30, np.dtype(np.float64): 1e-290}
COLLAPSE = {np.dtype(np.float32): 1e-20, np.dtype(np.float64): 1e-200}
# Where every transition is at least this probable, each state gets at least this much mass from what is kept at the step
# before, beside which what was dropped is nothing. Elsewhere the likelihood may gain NEGLIGIBLE from what was dropped.
ALWAYS_FED = {np.dtype(np.float32): 1e-20, np.dtype(np.float64): 1e-270}
NEGLIGIBLE = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-9}

_TILE = 32
_MAX_LANES = 32
_SMALL_WORK = 1_000_000  # multiply-adds below which handing work to threads costs more than it saves
_LANE_BYTES = 1 << 28  # the lanes' sums together stay below this
_KEPT_BYTES = 1 << 26  # a larger workspace is given back after the call

_multiply = make_product(max_plus=False, accumulate=False)
_multiply_add = make_product(max_plus=False, accumulate=True)
_max_plus = make_product(max_plus=True, accumulate=False)

_kernel = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
# Comparisons with NaN and -inf decide things here, and sums are as written.
_strict_kernel = njit(nogil=True, cache=True, error_model="numpy")


@_kernel
def _density_rows(t, slot, active, starts, kind, steps, features, centre, eta1, eta2, log_norm, scratch, rows, shifts_out):
    """rows[slot, b] = p(y_t | state) / max over states, for the running sequences; the maximum's logarithm apart."""
    num_states, padded = scratch.shape[0], rows.shape[2]
    for b in range(active):
        row = starts[b] + t
        if kind == STEPS:
            for k in range(num_states):
                scratch[k] = steps[row, k]
        else:
            _gaussian_row(row, features, centre, eta1, eta2, log_norm, scratch)
        largest = -np.inf
        for k in range(num_states):
            largest = max(largest, scratch[k])
        shifts_out[b] = largest
        for k in range(num_states):
            rows[slot, b, k] = np.exp(scratch[k] - largest) if largest > -np.inf else 0.0
        for k in range(num_states, padded):
            rows[slot, b, k] = 0.0


@_kernel
def _gaussian_row(row, features, centre, eta1, eta2, log_norm, out):
    """log N(y; state) = sum over observed d of eta1 u + eta2 u^2 - a with u = y - centre. Arrays are (D, K)."""
    for k in range(out.shape[0]):
        out[k] = 0.0
    for d in range(features.shape[1]):
        y = np.float64(features[row, d]) - centre[d]
        if not np.isnan(y):
            for k in range(out.shape[0]):
                out[k] += (eta1[d, k] + eta2[d, k] * y) * y - log_norm[d, k]


@_kernel
def _forward_tile(members, lengths, starts, keep, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                  initial, transition, flush, collapse, leak, alpha, rows, totals, scratch, log_likelihood):
    """Filters one tile. alpha[slot, b] ~ p(z_t | y_1:t), normalised by totals[slot, b]; slot = t, or t % 2.

    Emission rows of symbols are those of `table`; others are made, and left in rows[slot, b].

    `leak` is added to every predicted probability. With K times `flush`, that is more than the flushing of the step before
    took away, the result is an upper bound of the likelihood.
    """
    num_states, tile, padded = scratch.shape[0], alpha.shape[1], alpha.shape[2]
    zero, one, flush = alpha.dtype.type(0.0), alpha.dtype.type(1.0), alpha.dtype.type(flush)
    alpha_at, rows_at, table_at, transition_at = alpha.ctypes.data, rows.ctypes.data, table.ctypes.data, transition.ctypes.data
    row_bytes = padded * alpha.itemsize
    product, step_shifts = np.ones(tile), np.zeros(tile)  # product: of the normalisers since their logarithm was last taken
    active = members
    for t in range(lengths[0]):
        now = t if keep else t % 2
        before = t - 1 if keep else 1 - now
        while lengths[active - 1] <= t:
            active -= 1
        if kind != SYMBOLS:
            _density_rows(t, now, active, starts, kind, steps, features, centre, eta1, eta2, log_norm, scratch, rows, step_shifts)
        if t == 0:
            for b in range(active):
                for k in range(padded):
                    alpha[0, b, k] = initial[k]
        else:
            # Whole blocks of four rows are cheaper than single ones. What this writes into ended sequences, the backward pass
            # clears; without one, their last rows must stay.
            rows_done = min(tile, 4 * ((active + 3) // 4)) if keep else active
            _multiply(zero, alpha_at + now * tile * row_bytes, alpha_at + before * tile * row_bytes, padded, 1, transition_at, padded, rows_done, padded, num_states)
        if leak > 0:
            for b in range(active):
                for k in range(num_states):
                    alpha[now, b, k] += alpha.dtype.type(leak)
        for b in range(active):
            here = (now * tile + b) * row_bytes
            emission_at = rows_at + here
            if kind == SYMBOLS:
                symbol = symbols[starts[b] + t]
                if symbol < 0:
                    symbol = shifts.shape[0] - 1  # the last row is all ones: a missing symbol tells nothing
                emission_at, step_shifts[b] = table_at + symbol * row_bytes, shifts[symbol]
            total = weigh_row(zero, padded, alpha_at + here, emission_at, flush)
            totals[now, b] = total
            if total > collapse:
                rescale_row(zero, padded, alpha_at + here, one / total, flush)
                product[b] *= total
                if product[b] < 1e-200 or product[b] > 1e200:
                    log_likelihood[b] += np.log(product[b])
                    product[b] = 1.0
                log_likelihood[b] += step_shifts[b]
            else:
                for k in range(padded):
                    alpha[now, b, k] = zero
                log_likelihood[b] = np.nan
    for b in range(members):
        log_likelihood[b] += np.log(product[b])


@_kernel
def _backward_tile(members, lengths, starts, ids, num_states, kind, symbols, table, shifts, features, centre, transposed, weights,
                   alpha, rows, totals, beta, gamma, initial_counts, visits, sum1, sum2, smoothed, filtered):
    """Smooths one tile: adds its initial and emission statistics, and fills `rows` with

    kappa_t(j) = w b_j(y_t) beta_t(j) / total_t,   so that   w E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j)

    beta is normalised at every step, so that the pair posteriors of a step sum to one whatever came after it.
    """
    tile, padded = alpha.shape[1], alpha.shape[2]
    zero, one = alpha.dtype.type(0.0), alpha.dtype.type(1.0)
    alpha_at, rows_at, beta_at, gamma_at = alpha.ctypes.data, rows.ctypes.data, beta.ctypes.data, gamma.ctypes.data
    transposed_at, initial_at, table_at = transposed.ctypes.data, initial_counts.ctypes.data, table.ctypes.data
    visits_at, sum1_at, sum2_at = visits.ctypes.data, sum1.ctypes.data, sum2.ctypes.data
    row_bytes, total_bytes = padded * alpha.itemsize, padded * 8
    active = 0
    for t in range(lengths[0] - 1, -1, -1):
        while active < members and lengths[active] > t:
            for k in range(padded):
                beta[active, k] = one
            active += 1
        for b in range(active):
            weight, row = weights[ids[b]], starts[b] + t
            here, back, share = (t * tile + b) * row_bytes, beta_at + b * row_bytes, gamma_at + b * row_bytes
            # Where alpha is zero the message back is of no use, and may be beyond any bound: it is made zero.
            total = smooth_row(zero, padded, alpha_at + here, back, share)
            scale = zero  # where the forward pass gave up: such a sequence adds nothing here
            if total != zero:  # negative where the weight is, which an incoming gradient may be
                scale = alpha.dtype.type(weight) / (total * totals[t, b])
                weight /= total
            emission_at = rows_at + here
            if kind == SYMBOLS:
                symbol = symbols[row]
                if symbol >= 0:
                    accumulate_row(zero, padded, visits_at + symbol * total_bytes, share, weight)
                else:
                    symbol = shifts.shape[0] - 1
                emission_at = table_at + symbol * row_bytes
            if t > 0:
                combine_row(zero, padded, rows_at + here, emission_at, back, scale)
            else:
                accumulate_row(zero, padded, initial_at, share, weight)
            if kind == GAUSSIAN:
                for d in range(features.shape[1]):
                    y = np.float64(features[row, d]) - centre[d]
                    if not np.isnan(y):
                        accumulate_row(zero, padded, visits_at + d * total_bytes, share, weight)
                        accumulate_row(zero, padded, sum1_at + d * total_bytes, share, weight * y)
                        accumulate_row(zero, padded, sum2_at + d * total_bytes, share, weight * y * y)
            if smoothed.shape[0] > 0:
                for k in range(num_states):
                    smoothed[row, k] = gamma[b, k] * weight
            if filtered.shape[0] > 0:
                for k in range(num_states):
                    filtered[row, k] = alpha[t, b, k]
        if t > 0:
            rows_done = min(tile, 4 * ((active + 3) // 4))
            _multiply(zero, beta_at, rows_at + t * tile * row_bytes, padded, 1, transposed_at, padded, rows_done, padded, num_states)
        for b in range(active, tile):  # ended sequences take no part in the pair counts of this step
            for k in range(padded):
                rows[t, b, k] = zero
                alpha[t, b, k] = zero


@_kernel
def _pair_counts(longest, transition, alpha, kappa, partial, transition_counts):
    """transition_counts += A_ij sum over steps of alpha_t-1(i) kappa_t(j), in blocks short enough for float32 sums."""
    num_states, zero = transition_counts.shape[0], alpha.dtype.type(0.0)
    tile, padded = alpha.shape[1], alpha.shape[2]
    alpha_at, kappa_at, partial_at = alpha.ctypes.data, kappa.ctypes.data, partial.ctypes.data
    row_bytes = padded * alpha.itemsize
    rows, quads = (longest - 1) * tile, min(padded, 4 * ((num_states + 3) // 4))  # whole blocks of rows are cheaper than single ones
    for block in range(0, rows, 2048):
        partial[:] = zero
        for first in range(block, min(block + 2048, rows), 128):
            depth = min(128, rows - first)
            _multiply_add(zero, partial_at, alpha_at + first * row_bytes, 1, padded, kappa_at + (first + tile) * row_bytes, padded, quads, padded, depth)
        for i in range(num_states):
            for j in range(num_states):
                transition_counts[i, j] += np.float64(partial[i, j]) * transition[i * padded + j]


@_kernel
def _e_step_lane(lane, lanes, tile, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                 initial, transition, transposed, weights, flush, collapse, longest, workspace,
                 log_likelihood, initial_counts, transition_counts, visits, sum1, sum2, smoothed, filtered):
    """Forward-backward over the tiles of one lane; everything after `workspace` is output. Statistics are padded like rows."""
    num_states, padded = transition_counts.shape[0], initial.shape[0]
    first, second, third = longest * tile * padded, 2 * longest * tile * padded, (2 * longest + 1) * tile * padded
    alpha, rows = workspace[:first].reshape(longest, tile, padded), workspace[first:second].reshape(longest, tile, padded)
    beta, gamma = workspace[second:third].reshape(tile, padded), workspace[third : third + tile * padded].reshape(tile, padded)
    partial = workspace[third + tile * padded :][: padded * padded].reshape(padded, padded)
    scratch, totals = np.zeros(num_states), np.zeros((longest, tile), initial.dtype)
    lengths, starts = np.zeros(tile, np.int64), np.zeros(tile, np.int64)
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        members = ids.shape[0]
        for b in range(members):
            starts[b] = offsets[ids[b]]
            lengths[b] = offsets[ids[b] + 1] - starts[b]
        tile_likelihood = np.zeros(members)
        _forward_tile(members, lengths, starts, True, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                      initial, transition, flush, collapse, 0.0, alpha, rows, totals, scratch, tile_likelihood)
        _backward_tile(members, lengths, starts, ids, num_states, kind, symbols, table, shifts, features, centre, transposed, weights,
                       alpha, rows, totals, beta, gamma, initial_counts, visits, sum1, sum2, smoothed, filtered)
        _pair_counts(lengths[0], transition, alpha, rows, partial, transition_counts)
        for b in range(members):
            log_likelihood[ids[b]] = tile_likelihood[b]


@_kernel
def _score_lane(lane, lanes, tile, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                initial, transition, num_states, flush, collapse, leak, log_likelihood, last):
    """The forward pass alone, in O(tile x K) memory; `last` takes p(z_T | y_1:T) where it has room."""
    padded = initial.shape[0]
    alpha = np.empty((2, tile, padded), initial.dtype)
    rows = np.zeros((2, tile, padded), initial.dtype)
    totals, scratch = np.zeros((2, tile), initial.dtype), np.zeros(num_states)
    lengths, starts = np.zeros(tile, np.int64), np.zeros(tile, np.int64)
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        members = ids.shape[0]
        for b in range(members):
            starts[b] = offsets[ids[b]]
            lengths[b] = offsets[ids[b] + 1] - starts[b]
        tile_likelihood = np.zeros(members)
        _forward_tile(members, lengths, starts, False, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                      initial, transition, flush, collapse, leak, alpha, rows, totals, scratch, tile_likelihood)
        for b in range(members):
            log_likelihood[ids[b]] = tile_likelihood[b]
            if last.shape[0] > 0:
                for k in range(num_states):
                    last[ids[b], k] = alpha[(lengths[b] - 1) % 2, b, k]


@_strict_kernel
def _log_emission_row(kind, row, symbols, log_table, steps, features, centre, eta1, eta2, log_norm, out):
    if kind == SYMBOLS:
        symbol = symbols[row]
        for k in range(out.shape[0]):
            out[k] = log_table[symbol, k] if symbol >= 0 else 0.0
    elif kind == STEPS:
        for k in range(out.shape[0]):
            out[k] = steps[row, k]
    else:
        _gaussian_row(row, features, centre, eta1, eta2, log_norm, out)


@_strict_kernel
def _log_sum_exp(values):
    largest = values.max()
    if largest == -np.inf:
        return largest
    return largest + np.log(np.exp(values - largest).sum())


@_strict_kernel
def _exact_filter(first, last, emission, log_initial, log_transition, log_alpha):
    """Fills log p(z_t | y_1:t); returns the log-likelihood and the first step of probability zero, or -1."""
    kind, symbols, log_table, _, steps, features, centre, eta1, eta2, log_norm = emission
    num_states = log_initial.shape[0]
    row, log_likelihood = np.empty(num_states), 0.0
    for t in range(last - first):
        _log_emission_row(kind, first + t, symbols, log_table, steps, features, centre, eta1, eta2, log_norm, row)
        if t == 0:
            log_alpha[t] = log_initial + row
        else:
            for j in range(num_states):
                log_alpha[t, j] = _log_sum_exp(log_alpha[t - 1] + log_transition[:, j]) + row[j]
        total = _log_sum_exp(log_alpha[t])
        if total == -np.inf:
            return -np.inf, t
        log_alpha[t] -= total
        log_likelihood += total
    return log_likelihood, -1


@_strict_kernel
def _exact_sequences(indices, offsets, emission, log_initial, log_transition, weights, smooth, log_likelihood, impossible_step,
                     initial_counts, transition_counts, visits, sum1, sum2, smoothed, filtered, last):
    """The E-step in log space, one sequence at a time: slow, and right wherever the answer is a float64."""
    kind, symbols, log_table, _, steps, features, centre, eta1, eta2, log_norm = emission
    num_states = log_initial.shape[0]
    row, pair = np.empty(num_states), np.empty((num_states, num_states))
    for n in indices:
        first, end = offsets[n], offsets[n + 1]
        log_alpha = np.empty((end - first, num_states))
        log_likelihood[n], impossible_step[n] = _exact_filter(first, end, emission, log_initial, log_transition, log_alpha)
        if impossible_step[n] >= 0:
            if filtered.shape[0] > 0:
                filtered[first:end] = 0  # the steps before the impossible one were already written
            continue
        if last.shape[0] > 0:
            last[n] = np.exp(log_alpha[end - first - 1])
        if not smooth:
            continue
        weight = weights[n]
        log_beta = np.zeros(num_states)
        for t in range(end - first - 1, -1, -1):
            log_gamma = log_alpha[t] + log_beta
            gamma = np.exp(log_gamma - _log_sum_exp(log_gamma))
            if filtered.shape[0] > 0:
                for k in range(num_states):
                    filtered[first + t, k] = np.exp(log_alpha[t, k])
            if smoothed.shape[0] > 0:
                for k in range(num_states):
                    smoothed[first + t, k] = weight * gamma[k]
            if t == 0:
                for k in range(num_states):
                    initial_counts[k] += weight * gamma[k]
            if kind == SYMBOLS:
                if symbols[first + t] >= 0:
                    for k in range(num_states):
                        visits[symbols[first + t], k] += weight * gamma[k]
            elif kind == GAUSSIAN:
                for d in range(features.shape[1]):
                    y = np.float64(features[first + t, d]) - centre[d]
                    if not np.isnan(y):
                        for k in range(num_states):
                            visits[d, k] += weight * gamma[k]
                            sum1[d, k] += weight * gamma[k] * y
                            sum2[d, k] += weight * gamma[k] * y * y
            if t > 0:
                _log_emission_row(kind, first + t, symbols, log_table, steps, features, centre, eta1, eta2, log_norm, row)
                for i in range(num_states):
                    for j in range(num_states):
                        pair[i, j] = log_alpha[t - 1, i] + log_transition[i, j] + row[j] + log_beta[j]
                total = _log_sum_exp(pair.reshape(-1))
                transition_counts += weight * np.exp(pair - total)
                for i in range(num_states):
                    # Where alpha is zero the message back is of no use and may be infinite.
                    reachable = log_alpha[t - 1, i] > -np.inf
                    pair[i, 0] = _log_sum_exp(pair[i]) - log_alpha[t - 1, i] - total if reachable else -np.inf
                log_beta[:] = pair[:, 0]


@_kernel
def _viterbi_lane(lane, lanes, tile, order, offsets, kind, symbols, log_table, shifts, steps, features, centre, eta1, eta2, log_norm, log_initial, log_transition, log_transposed, log_probability, path):
    """The most probable paths. Only the scores are kept; the argmax is found again along the path."""
    num_states, padded = log_transposed.shape[0], log_initial.shape[0]
    longest = 0
    for start in range(lane * tile, order.shape[0], lanes * tile):
        longest = max(longest, offsets[order[start] + 1] - offsets[order[start]])
    delta, row = np.empty((longest, tile, padded)), np.empty(num_states)
    delta_at, transition_at, row_bytes = delta.ctypes.data, log_transition.ctypes.data, padded * 8
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        active = ids.shape[0]
        for t in range(offsets[ids[0] + 1] - offsets[ids[0]]):
            while offsets[ids[active - 1] + 1] - offsets[ids[active - 1]] <= t:
                active -= 1
            if t > 0:
                _max_plus(0.0, delta_at + t * tile * row_bytes, delta_at + (t - 1) * tile * row_bytes, padded, 1, transition_at, padded, active, padded, num_states)
            for b in range(active):
                if t == 0:
                    delta[t, b] = log_initial
                if kind == SYMBOLS:
                    symbol = symbols[offsets[ids[b]] + t]
                    if symbol >= 0:
                        for k in range(num_states):
                            delta[t, b, k] += log_table[symbol, k]
                else:
                    _log_emission_row(kind, offsets[ids[b]] + t, symbols, log_table, steps, features, centre, eta1, eta2, log_norm, row)
                    for k in range(num_states):
                        delta[t, b, k] += row[k]
        for b in range(ids.shape[0]):
            first, end = offsets[ids[b]], offsets[ids[b] + 1]
            state = delta[end - first - 1, b].argmax()
            log_probability[ids[b]] = delta[end - first - 1, b, state]
            if log_probability[ids[b]] == -np.inf:
                path[first:end] = -1
                continue
            path[end - 1] = state
            for t in range(end - first - 2, -1, -1):
                best, best_score = 0, -np.inf
                for i in range(num_states):
                    score = delta[t, b, i] + log_transposed[state, i]
                    if score > best_score:
                        best, best_score = i, score
                state = best
                path[first + t] = state


@_strict_kernel
def _draw(weights, uniform):
    """The index that `uniform` in [0, 1) falls on when `weights` divide the unit interval; -1 where all are zero."""
    total = weights.sum()
    if not total > 0:
        return -1
    threshold, running, chosen = uniform * total, 0.0, -1
    for k in range(weights.shape[0]):
        if weights[k] > 0:
            running += weights[k]
            chosen = k
            if running > threshold:
                break
    return chosen


@_strict_kernel
def sample_chains(initial, transition, offsets, uniforms):
    """State paths of a Markov chain, one per sequence, from one uniform number a step."""
    states = np.empty(uniforms.shape[0], np.int64)
    for n in range(offsets.shape[0] - 1):
        for row in range(offsets[n], offsets[n + 1]):
            states[row] = _draw(initial if row == offsets[n] else transition[states[row - 1]], uniforms[row])
    return states


@_strict_kernel
def sample_rows(rows, chosen, uniforms):
    """One draw from ``rows[chosen[t]]`` for each t."""
    draws = np.empty(chosen.shape[0], np.int64)
    for t in range(chosen.shape[0]):
        draws[t] = _draw(rows[chosen[t]], uniforms[t])
    return draws


@_strict_kernel
def _sample_paths(filtered, offsets, emission, log_initial, log_transition, uniforms, states):
    """Backward sampling: z_T ~ p(z_T | y), then z_t ~ alpha_t(i) A[i, z_t+1]. Impossible sequences get -1."""
    transition = np.exp(log_transition)
    for n in range(offsets.shape[0] - 1):
        first, end = offsets[n], offsets[n + 1]
        lost = False
        for row in range(end - 1, first - 1, -1):
            weights = filtered[row] if row == end - 1 else filtered[row] * transition[:, states[row + 1]]
            states[row] = _draw(weights, uniforms[row])
            if states[row] < 0:
                lost = True
                break
        if not lost:
            continue
        # Some weight is below the smallest float: the same in log space.
        log_alpha = np.empty((end - first, log_initial.shape[0]))
        _, impossible = _exact_filter(first, end, emission, log_initial, log_transition, log_alpha)
        if impossible >= 0:
            states[first:end] = -1
            continue
        for row in range(end - 1, first - 1, -1):
            log_weights = log_alpha[row - first] if row == end - 1 else log_alpha[row - first] + log_transition[:, states[row + 1]]
            states[row] = _draw(np.exp(log_weights - log_weights.max()), uniforms[row])


@_kernel
def _normalise_rows(log_probs, counts, correction, pseudocount):
    """The M-step of categorical rows, as `CategoricalRows.maximise` does it. Counts are laid out like `log_probs`."""
    for i in range(log_probs.shape[0]):
        total = 0.0
        for j in range(log_probs.shape[1]):
            if log_probs[i, j] > -np.inf:
                total += counts[i, j] / correction + pseudocount
        if total > 0:
            for j in range(log_probs.shape[1]):
                if log_probs[i, j] > -np.inf:
                    log_probs[i, j] = np.log((counts[i, j] / correction + pseudocount) / total)


@_kernel
def _aligned(size):
    """`aligned_zeros` of float64, inside a kernel."""
    raw = np.zeros(size + 8)
    start = (-raw.ctypes.data % 64) // 8
    return raw[start : start + size]


@_kernel
def _online_em(batch_offsets, order, offsets, symbols, weights, tile, flush, collapse, fed, negligible, discount, step, sizes, total_size,
               pseudocounts, frozen, log_initial, log_transition, log_emission, initial_buffer, transition_buffer, emission_buffer,
               longest, workspace, log_likelihood, impossible_step):
    """EM updates for consecutive batches of sequences, parameters and count buffers changed in place.

    One update is E-step, ``buffer = discount * buffer + (1 - discount) * counts``, M-step. `sizes` is the buffer of batch
    sizes. Returns the number of batches done; fewer than given where a sequence is impossible.
    """
    num_states, num_symbols = log_emission.shape
    padded = 8 * ((num_states + 7) // 8)
    initial, transition, transposed = np.zeros(padded), _aligned(padded * padded).reshape(padded, padded), _aligned(padded * padded).reshape(padded, padded)
    table, shifts = _aligned((num_symbols + 1) * padded).reshape(num_symbols + 1, padded), np.zeros(num_symbols + 1)
    log_table = np.zeros((num_symbols, num_states))
    initial_counts, transition_counts, visits = np.zeros(padded), np.zeros((num_states, num_states)), _aligned(num_symbols * padded).reshape(num_symbols, padded)
    none, no_centre, bound = np.zeros((0, 0)), np.zeros(0), np.zeros(offsets.shape[0] - 1)
    for batch in range(batch_offsets.shape[0] - 1):
        ids = order[batch_offsets[batch] : batch_offsets[batch + 1]]
        for i in range(num_states):
            initial[i] = np.exp(log_initial[i])
            for j in range(num_states):
                transition[i, j] = np.exp(log_transition[i, j])
                transposed[j, i] = transition[i, j]
        for v in range(num_symbols):
            shifts[v] = log_emission[:, v].max()
            for k in range(num_states):
                log_table[v, k] = log_emission[k, v]
                table[v, k] = np.exp(log_emission[k, v] - shifts[v]) if shifts[v] > -np.inf else 0.0
        for k in range(num_states):
            table[num_symbols, k] = 1.0
        possible, kept, again = True, ids, True
        while again:
            initial_counts[:], transition_counts[:], visits[:] = 0, 0, 0
            _e_step_lane(0, 1, tile, kept, offsets, SYMBOLS, symbols, table, shifts, none, none, no_centre, none, none, none,
                         initial, transition.reshape(-1), transposed.reshape(-1), weights, flush, collapse, longest, workspace,
                         log_likelihood, initial_counts, transition_counts, visits, none, none, none, none)
            again = kept.shape[0] == ids.shape[0] and np.exp(log_transition.min()) < fed
            if again:  # as in `e_step`
                _score_lane(0, 1, tile, ids, offsets, SYMBOLS, symbols, table, shifts, none, none, no_centre, none, none, none,
                            initial, transition.reshape(-1), num_states, flush, collapse, num_states * flush, bound, none)
                lost = ~(bound[ids] - log_likelihood[ids] <= negligible)
                again = np.any(lost & ~np.isnan(log_likelihood[ids]))
                log_likelihood[ids[lost]] = np.nan
                kept = ids[~lost]
        for n in ids:
            if np.isnan(log_likelihood[n]):
                exact = (SYMBOLS, symbols, log_table, shifts, none, none, np.zeros(0), none, none, none)
                _exact_sequences(np.full(1, n), offsets, exact, log_initial, log_transition, weights, True, log_likelihood, impossible_step,
                                 initial_counts, transition_counts, visits, none, none, none, none, none)
                possible = possible and (log_likelihood[n] > -np.inf or weights[n] == 0)
        if not possible:
            return batch
        step += 1
        correction = 1.0 - discount**step
        sizes[0] = discount * sizes[0] + (1 - discount) * initial_counts.sum()
        share = sizes[0] / correction / total_size
        for i in range(num_states):
            initial_buffer[i] = discount * initial_buffer[i] + (1 - discount) * initial_counts[i]
            for j in range(num_states):
                transition_buffer[i, j] = discount * transition_buffer[i, j] + (1 - discount) * transition_counts[i, j]
            for v in range(num_symbols):
                emission_buffer[i, v] = discount * emission_buffer[i, v] + (1 - discount) * visits[v, i]
        if not frozen[0]:
            _normalise_rows(log_initial.reshape(1, -1), initial_buffer.reshape(1, -1), correction, pseudocounts[0] * share)
        if not frozen[1]:
            _normalise_rows(log_transition, transition_buffer, correction, pseudocounts[1] * share)
        if not frozen[2]:
            _normalise_rows(log_emission, emission_buffer, correction, pseudocounts[2] * share)
    return batch_offsets.shape[0] - 1


# From here on Python: what the operators of `inference.dense` call.

Arrays = tuple[Any, ...]


def _plan(offsets: np.ndarray, num_states: int) -> tuple[np.ndarray, int]:
    """The non-empty sequences, longest first, and the tile size; from shapes alone, never from the number of threads."""
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable") if np.any(lengths[1:] != lengths[:-1]) else np.arange(lengths.shape[0])
    order = order[: np.count_nonzero(lengths)]
    if int(offsets[-1]) * num_states * num_states < _SMALL_WORK:
        return order, min(_TILE, 4 * max(1, -(-order.shape[0] // 4)))
    if order.shape[0] < 8:
        return order, 1
    return order, min(_TILE, -(-order.shape[0] // 32) * 4)


def _num_lanes(order: np.ndarray, tile: int, lane_bytes: int) -> int:
    tiles = -(-order.shape[0] // tile)
    return max(1, min(tiles, _MAX_LANES, _LANE_BYTES // max(1, lane_bytes)))


_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def _run(lanes: int, work: Any) -> None:
    """Calls ``work(lane)`` for each lane, on as many threads as torch uses."""
    global _pool
    threads = min(lanes, torch.get_num_threads())
    if threads == 1:
        for lane in range(lanes):
            work(lane)
        return
    # A forked child has no threads of its parent's: it makes a pool of its own.
    if _pool is None or _pool[0] != os.getpid() or _pool[1] != torch.get_num_threads():
        _pool = (os.getpid(), torch.get_num_threads(), ThreadPoolExecutor(torch.get_num_threads(), "lightning_hmm"))
    for _ in _pool[2].map(work, range(lanes)):
        pass


_scratch = threading.local()


def _workspace_size(longest: int, tile: int, padded: int) -> int:
    """Numbers that `_e_step_lane` works with: alpha, rows, beta, gamma, partial sums."""
    return 2 * (longest + 1) * tile * padded + padded * padded


def _workspace(dtype: np.dtype, size: int) -> np.ndarray:
    """`size` numbers, kept by the thread between calls: fresh pages would cost as much as the arithmetic."""
    if size * dtype.itemsize > _KEPT_BYTES:
        return aligned_zeros(dtype, size)
    kept = getattr(_scratch, dtype.name, None)
    if kept is None or kept.shape[0] < size:
        kept = aligned_zeros(dtype, size)
        setattr(_scratch, dtype.name, kept)
    return kept[:size]


def aligned_zeros(dtype: Any, *shape: int) -> np.ndarray:
    """Zeros that begin at a cache line; a vector across two of them takes twice as long to load."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


_NO_IDS = np.zeros(0, np.int64)
_NONE = np.zeros((0, 0))
_NO_CENTRE = np.zeros(0)


def emission_arrays(kind: int, parameters: list[np.ndarray], values: np.ndarray, dtype: np.dtype, *, logs: bool) -> Arrays:
    """The emission part of every kernel's arguments. `logs`: symbol tables as log-probabilities, for log space."""
    if kind == SYMBOLS:
        log_probs = np.ascontiguousarray(parameters[0].T)  # (V, K)
        if logs:
            return (SYMBOLS, values, log_probs, _NO_CENTRE, _NONE, _NONE, _NO_CENTRE, _NONE, _NONE, _NONE)
        num_symbols, num_states = log_probs.shape
        shifts = np.zeros(num_symbols + 1)
        shifts[:-1] = log_probs.max(axis=1)
        table = aligned_zeros(dtype, num_symbols + 1, padded_size(num_states, dtype.itemsize))
        possible = shifts[:-1] > -np.inf
        table[:-1, :num_states][possible] = np.exp(log_probs[possible] - shifts[:-1][possible, None])
        table[-1, :num_states] = 1
        return (SYMBOLS, values, table, shifts, _NONE, _NONE, _NO_CENTRE, _NONE, _NONE, _NONE)
    table = np.zeros((0, 0), np.float64 if logs else dtype)
    if kind == STEPS:
        return (STEPS, _NO_IDS, table, _NO_CENTRE, parameters[0], _NONE, _NO_CENTRE, _NONE, _NONE, _NONE)
    eta1, eta2, log_norm, centre = parameters
    natural = tuple(np.ascontiguousarray(array.T, np.float64) for array in (eta1, eta2, log_norm))
    return (GAUSSIAN, _NO_IDS, table, _NO_CENTRE, _NONE, values, centre, *natural)


def _padded_chain(log_initial: np.ndarray, log_transition: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """exp of both, padded with zeros; the matrix and its transpose as flat arrays."""
    num_states = log_initial.shape[0]
    padded = padded_size(num_states, dtype.itemsize)
    initial, (transition, transposed) = np.zeros(padded, dtype), aligned_zeros(dtype, 2, padded, padded)
    initial[:num_states] = np.exp(log_initial)
    transition[:num_states, :num_states] = np.exp(log_transition)
    transposed[:] = transition.T
    return initial, transition.reshape(-1), transposed.reshape(-1)


def _working_dtype(single: bool, *logs: np.ndarray) -> np.dtype:
    """float32 where asked for and able to hold the parameters; a probability of 1e-39 needs float64."""
    if single:
        smallest = np.log(FLUSH[np.dtype(np.float32)])
        if not any(np.any((log < smallest) & (log > -np.inf)) for log in logs):
            return np.dtype(np.float32)
    return np.dtype(np.float64)


def _power_of_two(weights: np.ndarray) -> float:
    """What to divide weights by so that the largest is near one; 1 where they are already moderate."""
    largest = np.abs(weights).max(initial=0.0)
    return 1.0 if largest == 0 or 1e-6 < largest < 1e6 else float(np.ldexp(1.0, np.frexp(largest)[1] - 1))


def e_step(kind, log_initial, log_transition, parameters, values, offsets, weights, *, single, smooth, per_step=False, last=False):
    """Runs the E-step (or, without `smooth`, the forward pass) of all sequences.

    Returns log-likelihoods, steps of probability zero (-1: none), initial counts, transition counts, emission statistics
    (visits, sum1, sum2; each (V or D, K)), smoothed rows times weight, filtered rows, and filtered rows of the last steps.
    """
    num_states, num_sequences, num_steps = log_initial.shape[0], offsets.shape[0] - 1, int(offsets[-1])
    tables = parameters[:1] if kind == SYMBOLS else []
    dtype = _working_dtype(single, log_initial, log_transition, *tables)
    emission = emission_arrays(kind, parameters, values, dtype, logs=False)
    initial, transition, transposed = _padded_chain(log_initial, log_transition, dtype)
    statistic_rows = parameters[0].shape[1] if kind != STEPS else 0
    order, tile = _plan(offsets, num_states)
    longest = int(offsets[order[0] + 1] - offsets[order[0]]) if order.shape[0] else 0
    lanes = _num_lanes(order, tile, 8 * num_states * (num_states + 3 * statistic_rows) if smooth else 0)

    log_likelihood, impossible_step = np.zeros(num_sequences), np.full(num_sequences, -1)
    padded = initial.shape[0]
    initial_counts, transition_counts = np.zeros((lanes, padded)), np.zeros((lanes, num_states, num_states))
    visits = aligned_zeros(np.float64, lanes, statistic_rows, padded)
    sums = aligned_zeros(np.float64, 2, lanes, statistic_rows if kind == GAUSSIAN else 0, padded)
    step_rows = num_steps if per_step else 0
    smoothed = np.zeros((num_steps if per_step or (kind == STEPS and smooth) else 0, num_states))
    filtered = np.zeros((step_rows, num_states))
    last_rows = np.zeros((num_sequences if last else 0, num_states))
    flush, collapse = FLUSH[dtype], COLLAPSE[dtype]
    # Messages are multiplied by the weights in the working precision: very large and very small ones are scaled before.
    scale = _power_of_two(weights)
    scaled = weights / scale

    def work(lane):
        if smooth:
            _e_step_lane(lane, lanes, tile, order, offsets, *emission, initial, transition, transposed, scaled, flush, collapse,
                         longest, _workspace(dtype, _workspace_size(longest, tile, padded)), log_likelihood, initial_counts[lane], transition_counts[lane],
                         visits[lane], sums[0, lane], sums[1, lane], smoothed, filtered)
        else:
            _score_lane(lane, lanes, tile, order, offsets, *emission, initial, transition, num_states, flush, collapse, 0.0, log_likelihood, last_rows)

    if order.shape[0]:
        _run(lanes, work)
        if np.exp(log_transition.min()) < ALWAYS_FED[dtype]:
            bound = np.zeros(num_sequences)
            _run(lanes, lambda lane: _score_lane(lane, lanes, tile, order, offsets, *emission, initial, transition, num_states, flush, collapse,
                                                 num_states * flush, bound, _NONE))
            lost = ~(bound - log_likelihood <= NEGLIGIBLE[dtype])
            if smooth and dtype == np.float64 and np.any(lost & ~np.isnan(log_likelihood)):  # their statistics are wrong: the others' again, without them
                order = order[~lost[order]]
                for array in (initial_counts, transition_counts, visits, sums):
                    array[:] = 0
                _run(lanes, work)
            log_likelihood[lost] = np.nan
    if dtype == np.float32 and np.any(np.isnan(log_likelihood)):
        # Out of float32's range is seldom out of float64's, which is far cheaper than log space.
        return e_step(kind, log_initial, log_transition, parameters, values, offsets, weights, single=False, smooth=smooth, per_step=per_step, last=last)
    transition_counts = transition_counts.sum(0)
    initial_counts, visits, sums = (array[..., :num_states] for array in (initial_counts.sum(0), visits.sum(0), sums.sum(1)))
    if scale != 1:
        for array in (initial_counts, transition_counts, visits, sums, smoothed):
            array *= scale
    collapsed = np.flatnonzero(np.isnan(log_likelihood))
    if collapsed.shape[0]:
        exact = emission_arrays(kind, parameters, values, dtype, logs=True)
        _exact_sequences(collapsed, offsets, exact, log_initial, log_transition, weights, smooth, log_likelihood, impossible_step,
                         initial_counts, transition_counts, visits, sums[0], sums[1], smoothed, filtered, last_rows)
    return log_likelihood, impossible_step, initial_counts, transition_counts, visits, sums[0], sums[1], smoothed, filtered, last_rows


def viterbi(kind, log_initial, log_transition, parameters, values, offsets):
    """Returns the most probable paths, packed, and their log-probabilities."""
    num_states = log_initial.shape[0]
    emission = emission_arrays(kind, parameters, values, np.dtype(np.float64), logs=True)
    padded = padded_size(num_states, 8)
    initial, transition = np.full(padded, -np.inf), np.full((padded, padded), -np.inf)
    initial[:num_states], transition[:num_states, :num_states] = log_initial, log_transition
    transposed = np.ascontiguousarray(log_transition.T)
    order, tile = _plan(offsets, num_states)
    lanes = _num_lanes(order, tile, 0)
    log_probability, path = np.zeros(offsets.shape[0] - 1), np.empty(int(offsets[-1]), np.int64)
    if order.shape[0]:
        _run(lanes, lambda lane: _viterbi_lane(lane, lanes, tile, order, offsets, *emission, initial, transition, transposed, log_probability, path))
    return path, log_probability


def sample_paths(filtered, kind, log_initial, log_transition, parameters, values, offsets, uniforms):
    """State paths drawn from the posterior, given the filtered probabilities and one uniform number a step."""
    emission = emission_arrays(kind, parameters, values, np.dtype(np.float64), logs=True)
    states = np.empty(uniforms.shape[0], np.int64)
    _sample_paths(filtered, offsets, emission, log_initial, log_transition, uniforms, states)
    return states


def online_em(
    log_initial, log_transition, log_emission, initial_buffer, transition_buffer, emission_buffer, size, symbols, offsets, weights,
    *, batch_size, discount, updates, data_size, pseudocounts, frozen,
):  # fmt: skip
    """See `inference.dense.online_em`. Returns log-likelihoods, and (sequence, step) where one is impossible, else None."""
    lengths = offsets[1:] - offsets[:-1]
    num_sequences, longest = lengths.shape[0], int(lengths.max(initial=0))
    if num_sequences <= batch_size and lengths.min(initial=longest) == longest > 0:  # nothing to sort
        order, batch_offsets = np.arange(num_sequences), np.array([0, num_sequences])
    else:
        batches = np.arange(num_sequences) // batch_size
        order = np.lexsort((-lengths, batches))
        order = order[lengths[order] > 0]
        batch_offsets = np.searchsorted(batches[order], np.arange(-(-num_sequences // batch_size) + 1))
    log_likelihood, impossible_step = np.zeros(num_sequences), np.full(num_sequences, -1)
    tile = min(_TILE, 4 * -(-min(batch_size, num_sequences) // 4))
    padded = 8 * -(-log_initial.shape[0] // 8)
    _online_em(
        batch_offsets, order, offsets, symbols, weights, tile, FLUSH[_DOUBLE], COLLAPSE[_DOUBLE], ALWAYS_FED[_DOUBLE], NEGLIGIBLE[_DOUBLE],
        float(discount), int(updates), size, float(data_size), np.asarray(pseudocounts, np.float64), np.asarray(frozen, np.bool_),
        log_initial, log_transition, log_emission, initial_buffer, transition_buffer, emission_buffer,
        longest, _workspace(_DOUBLE, _workspace_size(longest, tile, padded)), log_likelihood, impossible_step,
    )  # fmt: skip
    impossible = np.flatnonzero((impossible_step >= 0) & (weights != 0)) if impossible_step.max(initial=-1) >= 0 else _NO_IDS
    return log_likelihood, (int(impossible[0]), int(impossible_step[impossible[0]])) if impossible.shape[0] else None


def em_step(log_initial, log_transition, log_emission, symbols, offsets, weights, *, single):
    """One Baum-Welch iteration in place: in one compiled call where the work is small, over all threads otherwise.

    Where a sequence that counts is impossible, the parameters stay as they are.
    """
    num_states, num_symbols = log_emission.shape
    if int(offsets[-1]) * num_states * num_states < _SMALL_WORK:
        buffers = np.zeros(num_states), np.zeros((num_states, num_states)), np.zeros((num_states, num_symbols))
        return online_em(
            log_initial, log_transition, log_emission, *buffers, np.zeros(1), symbols, offsets, weights, batch_size=max(1, offsets.shape[0] - 1),
            discount=0.0, updates=0, data_size=1.0, pseudocounts=(0.0, 0.0, 0.0), frozen=(False, False, False),
        )[0]  # fmt: skip
    log_likelihood, impossible, initial, transition, visits, *_ = e_step(
        SYMBOLS, log_initial, log_transition, [log_emission], symbols, offsets, weights, single=single, smooth=True
    )
    if np.any((impossible >= 0) & (weights != 0)):
        return log_likelihood
    for log_probs, counts in ((log_initial[None], initial[None]), (log_transition, transition), (log_emission, np.ascontiguousarray(visits.T))):
        _normalise_rows(log_probs, counts, 1.0, 0.0)
    return log_likelihood
