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

from lightning_hmm.inference.kernels.simd import accumulate_row, combine_row, make_product, rescale_row, smooth_row, weigh_row

SYMBOLS, STEPS, GAUSSIAN = 0, 1, 2

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
def e_step_lane(lane, lanes, tile, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
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
def score_lane(lane, lanes, tile, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
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
def online_em(batch_offsets, order, offsets, symbols, weights, tile, flush, collapse, fed, negligible, discount, step, sizes, total_size,
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
            e_step_lane(0, 1, tile, kept, offsets, SYMBOLS, symbols, table, shifts, none, none, no_centre, none, none, none,
                         initial, transition.reshape(-1), transposed.reshape(-1), weights, flush, collapse, longest, workspace,
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
                exact = (SYMBOLS, symbols, log_table, shifts, none, none, np.zeros(0), none, none, none)
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
def em_step(offsets, symbols, weights, tile, flush, collapse, fed, negligible, log_initial, log_transition, log_emission,
            longest, workspace, log_likelihood):
    """One EM update from all sequences: `online_em` with one batch and nothing to remember."""
    num_states, num_symbols = log_emission.shape
    num_sequences, filled = offsets.shape[0] - 1, 0
    order = np.argsort(offsets[:-1] - offsets[1:], kind="mergesort")
    for n in range(num_sequences):
        filled += offsets[n + 1] > offsets[n]
    buffers = np.zeros(num_states), np.zeros((num_states, num_states)), np.zeros((num_states, num_symbols))
    online_em(np.array([0, filled]), order[:filled], offsets, symbols, weights, tile, flush, collapse, fed, negligible, 0.0, 0, np.zeros(1), 1.0,
              np.zeros(3), np.zeros(3, np.bool_), log_initial, log_transition, log_emission, buffers[0], buffers[1], buffers[2],
              longest, workspace, log_likelihood, np.full(num_sequences, -1))
