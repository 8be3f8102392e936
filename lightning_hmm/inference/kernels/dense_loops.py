"""The loops of the dense HMM, compiled by numba.

N sequences, T steps, K states, V symbols, D features. Sequences are packed: sequence n is rows
``offsets[n]:offsets[n + 1]``. They come sorted by length and are worked on in tiles, so that one step of a tile is one
small matrix product, and in a tile of ragged sequences those still running are a prefix.

Messages are probabilities, normalised at every step; the state axis is padded with states of probability zero to a
multiple of the vector width. Emission rows are divided by their largest entry, whose logarithm joins the likelihood. A
sequence that runs out of float range is marked by a log-likelihood of NaN, and `exact_sequences` does it in log space.

All functions take plain arrays and release the GIL. `cpu` prepares their arguments and deals them to threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_hmm.inference.kernels.simd import (
    accumulate_row,
    filter_four,
    filter_one,
    lanes_of,
    make_product,
    scale_row,
    smooth_four,
    smooth_one,
    smooth_row,
    step_four,
)

SYMBOLS, STEPS, GAUSSIAN = 0, 1, 2

_multiply = make_product(max_plus=False, accumulate=False)
_multiply_add = make_product(max_plus=False, accumulate=True)
_max_plus = make_product(max_plus=True, accumulate=False)

_kernel = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
# Comparisons with NaN and -inf decide things here, and sums are as written.
_strict_kernel = njit(nogil=True, cache=True, error_model="numpy")


@_kernel
def fill_chain(log_initial, log_transition, initial, transition, transposed):
    """The probabilities of the hidden chain, into arrays that are padded with zeros."""
    for i in range(log_initial.shape[0]):
        initial[i] = np.exp(log_initial[i])
        for j in range(log_initial.shape[0]):
            transition[i, j] = np.exp(log_transition[i, j])
            transposed[j, i] = transition[i, j]


@_kernel
def fill_table(log_emission, table, shifts):
    """Emission rows of the symbols, divided by their largest entry, whose logarithm goes to `shifts`; the last is a missing symbol's."""
    num_states, num_symbols = log_emission.shape
    for v in range(num_symbols):
        shifts[v] = log_emission[:, v].max()
        for k in range(num_states):
            table[v, k] = np.exp(log_emission[k, v] - shifts[v]) if shifts[v] > -np.inf else 0.0
    for k in range(num_states):
        table[num_symbols, k] = 1.0


@_kernel
def _density_rows(t, slot, active, starts, kind, steps, features, centre, eta1, eta2, log_norm, scratch, rows, sums):
    """rows[slot, b] = p(y_t | state) / max over states, for the running sequences; the maximum's logarithm joins `sums`."""
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
        sums[b] += largest
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
                  initial, transition, flush, collapse, leak, alpha, rows, scales, scratch, ends, log_likelihood):
    """Filters one tile. alpha[slot, b] ~ p(z_t | y_1:t), scaled by scales[slot, b] to a sum of one; slot = t, or t % 2.

    Emission rows of symbols are those of `table`; others are made, and left in rows[slot, b]. Where there is room, `ends` takes
    the last messages.

    `leak` is added to every predicted probability. With K times `flush`, that is more than the flushing of the step before
    took away, the result is an upper bound of the likelihood.
    """
    num_states, tile, padded = scratch.shape[0], alpha.shape[1], alpha.shape[2]
    zero, one, flush, collapse = alpha.dtype.type(0.0), np.ones(1, alpha.dtype), alpha.dtype.type(flush), alpha.dtype.type(collapse)
    alpha_at, rows_at, table_at, transition_at = alpha.ctypes.data, rows.ctypes.data, table.ctypes.data, transition.ctypes.data
    scales_at, row_bytes = scales.ctypes.data, padded * alpha.itemsize
    missing, places = table.shape[0] - 1, np.zeros(tile, np.int64)  # the last row is all ones: a missing symbol tells nothing
    # The likelihood is exp(sums) * products: a logarithm is taken only where a product might leave the range of floats.
    products, sums = np.ones(tile), np.zeros(tile)
    places_at, products_at = places.ctypes.data, products.ctypes.data
    active = members
    for t in range(lengths[0] + 1):
        now = t if keep else t % 2
        before = t - 1 if keep else 1 - now
        while active > 0 and lengths[active - 1] <= t:
            active -= 1
            log_likelihood[active] = sums[active] + np.log(products[active])
            if ends.shape[0] > 0:
                for k in range(num_states):
                    ends[active, k] = alpha[before, active, k]
        if active == 0:
            break
        # Whole blocks of four rows are cheaper than single ones: ended sequences may run on as if their symbols were missing.
        rows_done = min(tile, 4 * ((active + 3) // 4))
        now_at, before_at = alpha_at + now * tile * row_bytes, alpha_at + before * tile * row_bytes
        narrow = t > 0 and padded == lanes_of(zero) and rows_done % 4 == 0 and leak == 0
        if t == 0:
            _multiply(zero, now_at, one.ctypes.data, 0, 0, initial.ctypes.data, padded, rows_done, padded, 1)
        elif not narrow:
            _multiply(zero, now_at, before_at, padded, 1, transition_at, padded, rows_done, padded, num_states)
        if leak > 0:
            for b in range(active):
                for k in range(num_states):
                    alpha[now, b, k] += alpha.dtype.type(leak)
        if kind == SYMBOLS:
            for b in range(active):
                symbol = symbols[starts[b] + t]
                row = symbol if symbol >= 0 else missing
                places[b] = table_at + row * row_bytes
                sums[b] += shifts[row]
        else:
            _density_rows(t, now, active, starts, kind, steps, features, centre, eta1, eta2, log_norm, scratch, rows, sums)
            for b in range(active):
                places[b] = rows_at + (now * tile + b) * row_bytes
        for b in range(active, rows_done):
            places[b] = table_at + missing * row_bytes
        for b in range(rows_done, tile):
            for k in range(padded):
                alpha[now, b, k] = zero
        b = 0
        while b < rows_done:
            size = 4 if b + 4 <= rows_done else 1
            here, emissions, scale, product = b * row_bytes, places_at + 8 * b, scales_at + (now * tile + b) * alpha.itemsize, products_at + 8 * b
            if narrow:
                leaving = step_four(zero, now_at + here, before_at + here, transition_at, num_states, emissions, flush, collapse, scale, product)
            elif size == 4:
                leaving = filter_four(zero, padded, now_at + here, emissions, flush, collapse, scale, product)
            else:
                leaving = filter_one(zero, padded, now_at + here, emissions, flush, collapse, scale, product)
            if leaving:
                for i in range(b, b + size):
                    if products[i] < 1e-100 or products[i] > 1e100:
                        sums[i] = sums[i] + np.log(products[i]) if products[i] > 0 else np.nan  # zero: the step collapsed
                        products[i] = 1.0
            b += size


@_kernel
def _add_pairs(partial, transition, transition_counts):
    """transition_counts += A_ij sum over steps of alpha_t-1(i) kappa_t(j), which begins anew."""
    num_states, padded = transition_counts.shape[0], partial.shape[0]
    for i in range(num_states):
        for j in range(num_states):
            transition_counts[i, j] += np.float64(partial[i, j]) * transition[i * padded + j]
    partial[:] = 0


@_kernel
def _backward_tile(members, lengths, starts, ids, kind, symbols, table, features, centre, transition, transposed, weights,
                   alpha, rows, scales, beta, gamma, kappa, partial, initial_counts, transition_counts, visits, sum1, sum2, smoothed, filtered):
    """Smooths one tile and adds its statistics.

    kappa_t(j) = b_j(y_t) beta_t(j) / total_t,   so that   w E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j)

    beta begins with the weight w at the last step. The sum of alpha beta is then w at every step, but for rounding: every eighth
    step puts it right. `kappa` holds a few steps, as many as one product takes. The last row of `visits` takes what nobody asks for.
    """
    num_states, tile, padded, window = transition_counts.shape[0], alpha.shape[1], alpha.shape[2], kappa.shape[0]
    zero, lanes = alpha.dtype.type(0.0), lanes_of(alpha.dtype.type(0.0))
    alpha_at, rows_at, beta_at, gamma_at, kappa_at = alpha.ctypes.data, rows.ctypes.data, beta.ctypes.data, gamma.ctypes.data, kappa.ctypes.data
    transposed_at, table_at, scales_at, partial_at = transposed.ctypes.data, table.ctypes.data, scales.ctypes.data, partial.ctypes.data
    initial_at, visits_at, sum1_at, sum2_at = initial_counts.ctypes.data, visits.ctypes.data, sum1.ctypes.data, sum2.ctypes.data
    row_bytes, total_bytes = padded * alpha.itemsize, padded * 8
    missing, nowhere = table.shape[0] - 1, visits_at + (visits.shape[0] - 1) * total_bytes
    places, counted = np.zeros(tile, np.int64), np.zeros(tile, np.int64)
    places_at, counted_at = places.ctypes.data, counted.ctypes.data
    quads = min(padded, 4 * ((num_states + 3) // 4))  # whole blocks of rows are cheaper than single ones
    beta[:], partial[:] = zero, zero
    active, summed, end = 0, 0, lengths[0]
    for t in range(lengths[0] - 1, -1, -1):
        while active < members and lengths[active] > t:
            for k in range(padded):
                beta[active, k] = alpha.dtype.type(weights[ids[active]])
            active += 1
        rows_done = min(tile, 4 * ((active + 3) // 4))
        slot = (t - 1) % window
        step_at, slot_at = alpha_at + t * tile * row_bytes, kappa_at + slot * tile * row_bytes
        if t % 8 == 4:
            for b in range(active):
                total = smooth_row(zero, padded, step_at + b * row_bytes, beta_at + b * row_bytes, gamma_at + b * row_bytes)
                # Zero where the forward pass gave up; negative where the weight is, which an incoming gradient may be.
                scale_row(zero, padded, beta_at + b * row_bytes, alpha.dtype.type(weights[ids[b]]) / total if total != zero else zero)
        if kind == SYMBOLS:
            for b in range(active):
                symbol = symbols[starts[b] + t]
                row = symbol if symbol >= 0 else missing
                places[b], counted[b] = table_at + row * row_bytes, visits_at + row * total_bytes
        else:
            for b in range(active):
                places[b], counted[b] = rows_at + (t * tile + b) * row_bytes, nowhere
        for b in range(active, rows_done):
            places[b], counted[b] = table_at + missing * row_bytes, nowhere
        if kind != SYMBOLS or smoothed.shape[0] > 0 or t == 0:
            for b in range(active):
                row, share = starts[b] + t, gamma_at + b * row_bytes
                smooth_row(zero, padded, step_at + b * row_bytes, beta_at + b * row_bytes, share)
                if t == 0:
                    accumulate_row(zero, padded, initial_at, share, 1.0)
                if kind == GAUSSIAN:
                    for d in range(features.shape[1]):
                        y = np.float64(features[row, d]) - centre[d]
                        if not np.isnan(y):
                            accumulate_row(zero, padded, visits_at + d * total_bytes, share, 1.0)
                            accumulate_row(zero, padded, sum1_at + d * total_bytes, share, y)
                            accumulate_row(zero, padded, sum2_at + d * total_bytes, share, y * y)
                if smoothed.shape[0] > 0:
                    for k in range(num_states):
                        smoothed[row, k] = gamma[b, k]
                if filtered.shape[0] > 0:
                    for k in range(num_states):
                        filtered[row, k] = alpha[t, b, k]
        b, scale_at = 0, scales_at + t * tile * alpha.itemsize
        while b + 4 <= rows_done:
            here, scale = b * row_bytes, scale_at + b * alpha.itemsize
            if padded == lanes:  # a known length saves the loop over vectors
                smooth_four(zero, lanes, slot_at + here, step_at + here, beta_at + here, scale, places_at + 8 * b, counted_at + 8 * b)
            else:
                smooth_four(zero, padded, slot_at + here, step_at + here, beta_at + here, scale, places_at + 8 * b, counted_at + 8 * b)
            b += 4
        while b < rows_done:
            here, scale = b * row_bytes, scale_at + b * alpha.itemsize
            smooth_one(zero, padded, slot_at + here, step_at + here, beta_at + here, scale, places_at + 8 * b, counted_at + 8 * b)
            b += 1
        if t == 0:
            break
        for b in range(rows_done, tile):  # ended sequences take no part in the pair counts of this step
            for k in range(padded):
                kappa[slot, b, k] = zero
        _multiply(zero, beta_at, slot_at, padded, 1, transposed_at, padded, rows_done, padded, num_states)
        if slot == 0:
            depth = (end - t) * tile
            _multiply_add(zero, partial_at, step_at - tile * row_bytes, 1, padded, kappa_at, padded, quads, padded, depth)
            end, summed = t, summed + depth
            if summed >= 2048:  # few enough for sums in float32
                _add_pairs(partial, transition, transition_counts)
                summed = 0
    _add_pairs(partial, transition, transition_counts)


@_kernel
def pair_window(tile):
    """How many steps go into one product of the pair counts: about 128 rows of it."""
    return max(1, 128 // tile)


@_kernel
def _find_sequences(ids, offsets, starts, lengths):
    """Where the sequences of a tile begin, and how long they are; returns their number."""
    for b in range(ids.shape[0]):
        starts[b] = offsets[ids[b]]
        lengths[b] = offsets[ids[b] + 1] - starts[b]
    return ids.shape[0]


@_kernel
def e_step_lane(lane, lanes, tile, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                 initial, transition, transposed, weights, flush, collapse, longest, workspace,
                 log_likelihood, initial_counts, transition_counts, visits, sum1, sum2, smoothed, filtered):
    """Forward-backward over the tiles of one lane; everything after `workspace` is output.

    Statistics are padded like rows, and `visits` has a row more than there are symbols.
    """
    num_states, padded = transition_counts.shape[0], initial.shape[0]
    window, size, rows_kept = pair_window(tile), tile * padded, longest if kind != SYMBOLS else 0
    alpha, rest = workspace[: longest * size].reshape(longest, tile, padded), workspace[longest * size :]
    rows, rest = rest[: rows_kept * size].reshape(rows_kept, tile, padded), rest[rows_kept * size :]
    kappa, rest = rest[: window * size].reshape(window, tile, padded), rest[window * size :]
    beta, gamma = rest[:size].reshape(tile, padded), rest[size : 2 * size].reshape(tile, padded)
    partial = rest[2 * size :][: padded * padded].reshape(padded, padded)
    scratch, scales, ends = np.zeros(num_states), np.empty((longest, tile), initial.dtype), np.empty((0, 0), initial.dtype)
    lengths, starts = np.zeros(tile, np.int64), np.zeros(tile, np.int64)
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        members = _find_sequences(ids, offsets, starts, lengths)
        tile_likelihood = np.empty(members)
        _forward_tile(members, lengths, starts, True, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                      initial, transition, flush, collapse, 0.0, alpha, rows, scales, scratch, ends, tile_likelihood)
        _backward_tile(members, lengths, starts, ids, kind, symbols, table, features, centre, transition, transposed, weights,
                       alpha, rows, scales, beta, gamma, kappa, partial, initial_counts, transition_counts, visits, sum1, sum2, smoothed, filtered)
        for b in range(members):
            log_likelihood[ids[b]] = tile_likelihood[b]


@_kernel
def score_lane(lane, lanes, tile, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                initial, transition, num_states, flush, collapse, leak, log_likelihood, last):
    """The forward pass alone, in O(tile x K) memory; `last` takes p(z_T | y_1:T) where it has room."""
    padded = initial.shape[0]
    alpha = np.empty((2, tile, padded), initial.dtype)
    rows = np.zeros((2, tile, padded), initial.dtype)
    scales, scratch, ends = np.empty((2, tile), initial.dtype), np.zeros(num_states), np.empty((tile, num_states), initial.dtype)
    lengths, starts = np.zeros(tile, np.int64), np.zeros(tile, np.int64)
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        members = _find_sequences(ids, offsets, starts, lengths)
        tile_likelihood = np.empty(members)
        _forward_tile(members, lengths, starts, False, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                      initial, transition, flush, collapse, leak, alpha, rows, scales, scratch, ends, tile_likelihood)
        for b in range(members):
            log_likelihood[ids[b]] = tile_likelihood[b]
            if last.shape[0] > 0:
                for k in range(num_states):
                    last[ids[b], k] = ends[b, k]


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
def exact_sequences(indices, offsets, emission, log_initial, log_transition, weights, smooth, log_likelihood, impossible_step,
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
def viterbi_lane(lane, lanes, tile, order, offsets, kind, symbols, log_table, shifts, steps, features, centre, eta1, eta2, log_norm, log_initial, log_transition, log_transposed, log_probability, path):
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
    total = 0.0
    for k in range(weights.shape[0]):
        total += weights[k]
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
def sample_paths(filtered, offsets, emission, log_initial, log_transition, uniforms, states):
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
def normalise_rows(log_probs, counts, correction, pseudocount):
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
def online_em(batch_offsets, order, offsets, symbols, weights, tile, most_steps, flush, collapse, fed, negligible, discount, step, sizes, total_size,
               pseudocounts, frozen, log_initial, log_transition, log_emission, initial_buffer, transition_buffer, emission_buffer,
               workspace, log_likelihood, impossible_step):
    """EM updates for consecutive batches of sequences, parameters and count buffers changed in place.

    One update is E-step, ``buffer = discount * buffer + (1 - discount) * counts``, M-step. `sizes` is the buffer of batch
    sizes. Sequences longer than `most_steps` have tiles of their own, as in `cpu.plan`. Returns the number of batches done; fewer than given where a sequence is impossible.
    """
    num_states, num_symbols = log_emission.shape
    padded = 8 * ((num_states + 7) // 8)
    initial, transition, transposed = np.zeros(padded), _aligned(padded * padded).reshape(padded, padded), _aligned(padded * padded).reshape(padded, padded)
    table, shifts = _aligned((num_symbols + 1) * padded).reshape(num_symbols + 1, padded), np.zeros(num_symbols + 1)
    initial_counts, transition_counts, visits = np.zeros(padded), np.zeros((num_states, num_states)), _aligned((num_symbols + 1) * padded).reshape(num_symbols + 1, padded)
    none, no_centre, bound = np.zeros((0, 0)), np.zeros(0), np.zeros(offsets.shape[0] - 1)
    for batch in range(batch_offsets.shape[0] - 1):
        ids = order[batch_offsets[batch] : batch_offsets[batch + 1]]
        fill_chain(log_initial, log_transition, initial, transition, transposed)
        fill_table(log_emission, table, shifts)
        possible, kept, again = True, ids, True
        while again:
            initial_counts[:], transition_counts[:], visits[:] = 0, 0, 0
            num_long = 0
            while num_long < kept.shape[0] and offsets[kept[num_long] + 1] - offsets[kept[num_long]] > most_steps:
                num_long += 1
            for group, size in ((kept[:num_long], 1), (kept[num_long:], tile)):
                if group.shape[0] > 0:
                    e_step_lane(0, 1, size, group, offsets, SYMBOLS, symbols, table, shifts, none, none, no_centre, none, none, none,
                                 initial, transition.reshape(-1), transposed.reshape(-1), weights, flush, collapse,
                                 offsets[group[0] + 1] - offsets[group[0]], workspace,
                                 log_likelihood, initial_counts, transition_counts, visits, none, none, none, none)
            again = kept.shape[0] == ids.shape[0] and np.exp(log_transition.min()) < fed
            if again:  # as in `e_step`
                score_lane(0, 1, tile, ids, offsets, SYMBOLS, symbols, table, shifts, none, none, no_centre, none, none, none,
                            initial, transition.reshape(-1), num_states, flush, collapse, num_states * flush, bound, none)
                lost = ~(bound[ids] - log_likelihood[ids] <= negligible)
                again = np.any(lost & ~np.isnan(log_likelihood[ids]))
                log_likelihood[ids[lost]] = np.nan
                kept = ids[~lost]
        for n in ids:
            if np.isnan(log_likelihood[n]):
                exact = (SYMBOLS, symbols, log_emission.T.copy(), shifts, none, none, np.zeros(0), none, none, none)
                exact_sequences(np.full(1, n), offsets, exact, log_initial, log_transition, weights, True, log_likelihood, impossible_step,
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
            normalise_rows(log_initial.reshape(1, -1), initial_buffer.reshape(1, -1), correction, pseudocounts[0] * share)
        if not frozen[1]:
            normalise_rows(log_transition, transition_buffer, correction, pseudocounts[1] * share)
        if not frozen[2]:
            normalise_rows(log_emission, emission_buffer, correction, pseudocounts[2] * share)
    return batch_offsets.shape[0] - 1


@_kernel
def em_step(offsets, symbols, weights, tile, most_steps, flush, collapse, fed, negligible, log_initial, log_transition, log_emission,
            workspace, log_likelihood):
    """One EM update from all sequences: `online_em` with one batch and nothing to remember."""
    num_states, num_symbols = log_emission.shape
    num_sequences, filled = offsets.shape[0] - 1, 0
    order = np.argsort(offsets[:-1] - offsets[1:], kind="mergesort")
    for n in range(num_sequences):
        filled += offsets[n + 1] > offsets[n]
    buffers = np.zeros(num_states), np.zeros((num_states, num_states)), np.zeros((num_states, num_symbols))
    online_em(np.array([0, filled]), order[:filled], offsets, symbols, weights, tile, most_steps, flush, collapse, fed, negligible, 0.0, 0, np.zeros(1), 1.0,
              np.zeros(3), np.zeros(3, np.bool_), log_initial, log_transition, log_emission, buffers[0], buffers[1], buffers[2],
              workspace, log_likelihood, np.full(num_sequences, -1))
