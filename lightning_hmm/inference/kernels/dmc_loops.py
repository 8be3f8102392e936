"""The loops of the HMM whose transition matrix is dense but mostly constant, compiled by numba.

N states, of which each row i keeps K entries a_ij and has one constant c_i for all others; T steps. A step of the
forward pass is

    predicted(j) = sum_i alpha(i) c_i + sum over the rows i that keep j of alpha(i) (a_ij - c_i)

and a step of the backward pass the same along the rows: N K multiplications in place of N^2. What is said in
`dense_loops` of messages, padding, float range and emission rows holds here.

Where a kept entry is below the row's constant the correction is negative. If what is left is small beside what it was
taken from, it is added up again without a subtraction, in O(N).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lightning_hmm.inference.kernels.dense_loops import GAUSSIAN, STEPS, SYMBOLS, _draw, _gaussian_row, _kernel, _log_emission_row, _strict_kernel
from lightning_hmm.inference.kernels.gather import (
    combine_row,
    denormals_off,
    exponential_row,
    gather_count,
    gather_max,
    gather_sum,
    largest_in_row,
    largest_sum,
    rescale_row,
    restore_denormals,
    tile_column,
    tile_rescale,
    tile_weigh,
    weigh_row,
)
from lightning_hmm.inference.kernels.simd import accumulate_row, smooth_row

_SCATTER_COST = 8  # a kept entry of a single row takes about so many times as long as one in the lists of all columns
_FLUSH_COUNTS = 256  # steps whose counts are summed in the working precision before they join the float64 sums

# There are no NaN among these numbers, which lets comparisons be made on vectors; there may be infinities.
_row_kernel = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "nnan"})


@_kernel
def _aligned(size, like):
    """Zeros of the type of `like` that begin at a cache line."""
    raw = np.zeros(size + 64 // like.itemsize, like.dtype)
    start = (-raw.ctypes.data % 64) // like.itemsize
    return raw[start : start + size]


# The layouts of a chain


@_strict_kernel
def incoming(indices, starts, sources, positions):
    """The lists of rows that keep each column, by counting: entry p of them is row sources[p], place positions[p] of `indices`."""
    num_states, kept = indices.shape
    starts[:] = 0
    for i in range(num_states):
        for k in range(kept):
            starts[indices[i, k] + 1] += 1
    for j in range(num_states):
        starts[j + 1] += starts[j]
    filled = starts[:-1].copy()
    for i in range(num_states):
        for k in range(kept):
            j = indices[i, k]
            sources[filled[j]] = i
            positions[filled[j]] = i * kept + k
            filled[j] += 1


@_strict_kernel
def interleave_columns(order, starts, sources, weights, lanes, slice_starts, slice_sources, slice_weights):
    """Puts the lists of `lanes` columns side by side, in the order `order`; shorter lists leave what is in the arrays."""
    num_states = starts.shape[0] - 1
    for s in range(slice_starts.shape[0] - 1):
        for lane in range(lanes):
            n = s * lanes + lane
            if n < num_states:
                j = order[n]
                for p in range(starts[j], starts[j + 1]):
                    slice_sources[slice_starts[s] + p - starts[j], lane] = sources[p]
                    slice_weights[slice_starts[s] + p - starts[j], lane] = weights[p]


# Emission rows


@_row_kernel
def _density_row(row, kind, steps, features, centre, eta1, eta2, log_norm, scratch, out):
    """out = p(y | state) / max over states; returns the logarithm of the maximum."""
    num_states = scratch.shape[0]
    if kind == STEPS:
        for k in range(num_states):
            scratch[k] = steps[row, k]
    else:
        _gaussian_row(row, features, centre, eta1, eta2, log_norm, scratch)
    largest = -np.inf
    for k in range(num_states):
        if scratch[k] > largest:
            largest = scratch[k]
    if largest > -np.inf:
        for k in range(num_states):
            out[k] = scratch[k] - largest
        for k in range(num_states, out.shape[0]):
            out[k] = -np.inf
        exponential_row(out.dtype.type(0), out.shape[0], out.ctypes.data)
    else:
        out[:] = 0
    return largest


@_kernel
def _tile_features(t, active, starts, features, centre, y, observed):
    """y[d, b] = feature d minus its centre, and observed[d, b] = 1; both 0 where it is missing."""
    for d in range(features.shape[1]):
        for b in range(active):
            value = np.float64(features[starts[b] + t, d]) - centre[d]
            missing = np.isnan(value)
            observed[d, b], y[d, b] = (0.0, 0.0) if missing else (1.0, value)


@_row_kernel
def _density_tile(t, active, starts, kind, steps, eta1, eta2, log_norm, y, observed, logs, out, shifts):
    """out[k, b] = p(y_t | k) / max over states for the running sequences, 0 for the others; shifts[b] is the maximum's logarithm."""
    num_states, tile = out.shape
    shifts[:] = -np.inf
    for k in range(num_states):
        row = logs[k]
        if kind == STEPS:
            for b in range(active):
                row[b] = steps[starts[b] + t, k]
        else:
            row[:] = 0.0
            for d in range(y.shape[0]):
                first, second, norm = eta1[d, k], eta2[d, k], log_norm[d, k]
                for b in range(tile):
                    row[b] += (first + second * y[d, b]) * y[d, b] - norm * observed[d, b]
        for b in range(tile):
            shifts[b] = row[b] if row[b] > shifts[b] else shifts[b]
    for b in range(tile):
        if b >= active:
            shifts[b] = np.inf  # the rows of sequences that have ended are zero
        elif not shifts[b] > -np.inf:
            shifts[b] = 0.0
    for k in range(num_states):
        for b in range(tile):
            out[k, b] = logs[k, b] - shifts[b]
        exponential_row(out.dtype.type(0), tile, out[k].ctypes.data)


@_kernel
def _symbol_tile(t, active, starts, symbols, by_state, table_shifts, columns, out, shifts):
    """out[k, b] = the probability of the b-th sequence's symbol; the last two columns of `by_state` are for a missing one and for none."""
    num_states, tile = out.shape
    missing = table_shifts.shape[0] - 1
    for b in range(tile):
        columns[b] = missing + 1
        if b < active:
            symbol = symbols[starts[b] + t]
            columns[b] = missing if symbol < 0 else symbol
            shifts[b] = table_shifts[columns[b]]
    for k in range(num_states):
        for b in range(tile):
            out[k, b] = by_state[k, columns[b]]


# Forward and backward


@_kernel
def _exact_column(j, starts, sources, values, constants, message):
    """sum_i message(i) A_ij, from the list of the rows that keep j and the constants of all others."""
    total, p, end = message.dtype.type(0), starts[j], starts[j + 1]
    for i in range(starts.shape[0] - 1):
        if p < end and sources[p] == i:
            total += message[i] * values[p]
            p += 1
        else:
            total += message[i] * constants[i]
    return total


@_kernel
def _forward(first, last, keep, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
             initial, constants, column_order, slice_starts, slice_sources, slice_weights, starts, sources, values, low_columns,
             cancelled, flush, collapse, leak, alpha, rows, totals, scratch, gathered):
    """Filters one sequence, as `dense_loops._forward_tile` does. Returns its log-likelihood, NaN where it ran out of range."""
    padded, lanes = alpha.shape[1], slice_sources.shape[1]
    zero, one, flush = alpha.dtype.type(0.0), alpha.dtype.type(1.0), alpha.dtype.type(flush)
    num_states, itemsize = scratch.shape[0], alpha.itemsize
    alpha_at, rows_at, table_at, gathered_at = alpha.ctypes.data, rows.ctypes.data, table.ctypes.data, gathered.ctypes.data
    sources_at, weights_at, row_bytes = slice_sources.ctypes.data, slice_weights.ctypes.data, padded * itemsize
    log_likelihood, product = 0.0, 1.0
    for t in range(last - first):
        now = t if keep else t % 2
        before = t - 1 if keep else 1 - now
        if t == 0:
            alpha[0, :] = initial
        else:
            shared = zero
            for k in range(padded):
                shared += alpha[before, k] * constants[k]
            source_at = alpha_at + before * row_bytes
            for s in range(slice_starts.shape[0] - 1):
                begin = slice_starts[s] * lanes
                gather_sum(zero, gathered_at, shared, weights_at + begin * itemsize, sources_at + begin * 4, source_at, slice_starts[s + 1] - slice_starts[s])
                for lane in range(min(lanes, num_states - s * lanes)):
                    alpha[now, column_order[s * lanes + lane]] = gathered[lane]
            for j in low_columns:
                if alpha[now, j] < cancelled * shared:
                    alpha[now, j] = _exact_column(j, starts, sources, values, constants, alpha[before])
            for k in range(num_states, padded):
                alpha[now, k] = zero
        if leak > 0:
            for k in range(num_states):
                alpha[now, k] += alpha.dtype.type(leak)
        if kind == SYMBOLS:
            symbol = symbols[first + t]
            symbol = shifts.shape[0] - 1 if symbol < 0 else symbol
            emission_at, shift = table_at + symbol * row_bytes, shifts[symbol]
        else:
            slot = t % rows.shape[0]
            emission_at = rows_at + slot * row_bytes
            shift = _density_row(first + t, kind, steps, features, centre, eta1, eta2, log_norm, scratch, rows[slot])
        total = weigh_row(zero, padded, alpha_at + now * row_bytes, emission_at, flush)
        totals[now] = total
        if not total > collapse:
            for s in range(t if keep else 0, last - first if keep else 2):
                alpha[s, :] = zero
                totals[s] = zero
            return np.nan
        rescale_row(zero, padded, alpha_at + now * row_bytes, one / total, flush)
        product *= total
        if product < 1e-100 or product > 1e100:  # one more step keeps it in the range of floats
            log_likelihood += np.log(product)
            product = 1.0
        log_likelihood += shift
    return log_likelihood + np.log(product)


@_kernel
def _backward(first, last, weight, kind, symbols, table, shifts, features, centre, constants, indices, values,
              target_indices, target_weights, low_rows, cancelled, smallest, alpha, rows, totals, beta, gamma, kept, partial,
              initial_counts, counts, rest, visits, sum1, sum2, smoothed, filtered):
    """Smooths one sequence and adds its statistics; rows[t] (or the only row) becomes

    kappa_t(j) = w b_j(y_t) beta_t(j) / total_t,   so that   w E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j)

    `counts` takes these sums for the kept entries, `rest` those over all other j.
    """
    num_states, num_kept = indices.shape
    padded, lanes = alpha.shape[1], target_indices.shape[2]
    zero, one, smallest = alpha.dtype.type(0.0), alpha.dtype.type(1.0), alpha.dtype.type(smallest)
    itemsize = alpha.itemsize
    row_bytes, total_bytes = padded * itemsize, padded * 8
    alpha_at, rows_at, beta_at, gamma_at, kept_at = alpha.ctypes.data, rows.ctypes.data, beta.ctypes.data, gamma.ctypes.data, kept.ctypes.data
    table_at, targets_at, weights_at, partial_at = table.ctypes.data, target_indices.ctypes.data, target_weights.ctypes.data, partial.ctypes.data
    visits_at, sum1_at, sum2_at, initial_at = visits.ctypes.data, sum1.ctypes.data, sum2.ctypes.data, initial_counts.ctypes.data
    beta[:] = one
    pending = 0
    for t in range(last - first - 1, -1, -1):
        row, slot = first + t, t % rows.shape[0]
        # Where alpha is zero the message back is of no use, and may be beyond any bound: it is made zero.
        total = smooth_row(zero, padded, alpha_at + t * row_bytes, beta_at, gamma_at)
        scale, share = zero, weight
        if total != zero:
            scale = alpha.dtype.type(weight) / (total * totals[t])
            share = weight / total
        kappa_at = rows_at + slot * row_bytes
        emission_at = kappa_at
        if kind == SYMBOLS:
            symbol = symbols[row]
            if symbol >= 0:
                accumulate_row(zero, padded, visits_at + symbol * total_bytes, gamma_at, share)
            else:
                symbol = shifts.shape[0] - 1
            emission_at = table_at + symbol * row_bytes
        elif kind == GAUSSIAN:
            for d in range(features.shape[1]):
                y = np.float64(features[row, d]) - centre[d]
                if not np.isnan(y):
                    accumulate_row(zero, padded, visits_at + d * total_bytes, gamma_at, share)
                    accumulate_row(zero, padded, sum1_at + d * total_bytes, gamma_at, share * y)
                    accumulate_row(zero, padded, sum2_at + d * total_bytes, gamma_at, share * y * y)
        if smoothed.shape[0] > 0:
            for k in range(num_states):
                smoothed[row, k] = gamma[k] * share
        if filtered.shape[0] > 0:
            for k in range(num_states):
                filtered[row, k] = alpha[t, k]
        if t == 0:
            accumulate_row(zero, padded, initial_at, gamma_at, share)
            rows[slot, :] = zero
            break
        combine_row(zero, padded, kappa_at, emission_at, beta_at, scale)
        everything = zero
        for k in range(padded):
            everything += rows[slot, k]
        for s in range(target_indices.shape[0]):
            begin, here = s * num_kept * lanes, s * lanes * itemsize
            gather_count(zero, beta_at + here, kept_at + here, weights_at + begin * itemsize, targets_at + begin * 4, kappa_at,
                         alpha_at + (t - 1) * row_bytes + here, partial_at + begin * itemsize, num_kept)
        floor = smallest * everything
        for k in range(padded):
            others = everything - kept[k]
            # Less than this cannot be told from what was rounded off; nothing would be the end of the constant.
            others = others if others > floor else floor
            kept[k] = others
            beta[k] += constants[k] * everything
            rest[k] += np.float64(alpha[t - 1, k] * others)
        for i in low_rows:
            if kept[i] < cancelled * everything and alpha[t - 1, i] > zero:
                others, message, p = zero, zero, 0
                for j in range(num_states):
                    if p < num_kept and indices[i, p] == j:
                        message += values[i, p] * rows[slot, j]
                        p += 1
                    else:
                        others += rows[slot, j]
                rest[i] += np.float64(alpha[t - 1, i] * (others - kept[i]))
                beta[i] = message + constants[i] * others
        pending += 1
        if pending == _FLUSH_COUNTS:
            _add_counts(partial, counts)
            pending = 0
    _add_counts(partial, counts)


@_kernel
def _add_counts(partial, counts):
    """counts += partial, which becomes zero."""
    for n in range(partial.shape[0]):
        counts[n] += np.float64(partial[n])
        partial[n] = 0.0


@_kernel
def e_step_lane(lane, lanes, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                initial, constants, column_order, slice_starts, slice_sources, slice_weights, starts, sources, incoming_values, low_columns,
                indices, values, target_indices, target_weights, low_rows, weights, cancelled, smallest, flush, collapse,
                in_place, alpha_store, row_store, log_likelihood, initial_counts, counts, rest, visits, sum1, sum2, smoothed, filtered):
    """Forward-backward over the sequences of one lane. The stores are for one sequence at a time, or, `in_place`, packed like the data."""
    num_states, padded = indices.shape[0], constants.shape[0]
    beta, gamma, kept = _aligned(padded, constants), _aligned(padded, constants), _aligned(padded, constants)
    partial, scratch, gathered = _aligned(target_weights.size, constants), np.zeros(num_states), _aligned(slice_sources.shape[1], constants)
    control = denormals_off()
    for n in order[lane::lanes]:
        first, last = offsets[n], offsets[n + 1]
        alpha = alpha_store[first:last] if in_place else alpha_store[: last - first]
        rows = row_store[first:last] if in_place else row_store
        totals = np.zeros(last - first, constants.dtype)
        log_likelihood[n] = _forward(
            first, last, True, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
            initial, constants, column_order, slice_starts, slice_sources, slice_weights, starts, sources, incoming_values, low_columns,
            cancelled, flush, collapse, 0.0, alpha, rows, totals, scratch, gathered)
        if np.isnan(log_likelihood[n]):
            rows[:] = 0
            continue
        _backward(first, last, weights[n], kind, symbols, table, shifts, features, centre, constants, indices, values,
                  target_indices, target_weights, low_rows, cancelled, smallest, alpha, rows, totals, beta, gamma, kept, partial,
                  initial_counts, counts, rest, visits, sum1, sum2, smoothed, filtered)
    restore_denormals(control)


@_kernel
def score_lane(lane, lanes, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
               initial, constants, column_order, slice_starts, slice_sources, slice_weights, starts, sources, incoming_values, low_columns,
               cancelled, flush, collapse, leak, num_states, log_likelihood, last_rows):
    """The forward pass alone, in O(N) memory; `last_rows` takes p(z_T | y_1:T) where it has room."""
    padded = constants.shape[0]
    alpha, rows = _aligned(2 * padded, constants).reshape(2, padded), _aligned(padded, constants).reshape(1, padded)
    totals, scratch, gathered = np.zeros(2, constants.dtype), np.zeros(num_states), _aligned(slice_sources.shape[1], constants)
    control = denormals_off()
    for n in order[lane::lanes]:
        first, last = offsets[n], offsets[n + 1]
        log_likelihood[n] = _forward(
            first, last, False, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
            initial, constants, column_order, slice_starts, slice_sources, slice_weights, starts, sources, incoming_values, low_columns,
            cancelled, flush, collapse, leak, alpha, rows, totals, scratch, gathered)
        if last_rows.shape[0] > 0:
            for k in range(num_states):
                last_rows[n, k] = alpha[(last - first - 1) % 2, k]
    restore_denormals(control)


@_kernel
def score_tile_lane(lane, lanes, tile, order, offsets, kind, symbols, table, shifts, steps, features, centre, eta1, eta2, log_norm,
                    initial, constants, starts, sources, incoming_values, pair_starts, pair_sources, pair_weights, low_columns,
                    cancelled, flush, collapse, leak, num_states, log_likelihood, last_rows):
    """The forward pass of `tile` sequences at once, the sequences innermost, in O(tile x N) memory."""
    zero, flush = constants.dtype.type(0.0), constants.dtype.type(flush)
    alpha, rows = _aligned(2 * num_states * tile, constants).reshape(2, num_states, tile), _aligned(num_states * tile, constants).reshape(num_states, tile)
    shared, totals, scales = _aligned(tile, constants), _aligned(tile, constants), _aligned(tile, constants)
    logs = np.zeros((num_states if kind != SYMBOLS else 0, tile))
    y, observed = np.zeros((features.shape[1], tile)), np.zeros((features.shape[1], tile))
    step_shifts, product, message = np.zeros(tile), np.ones(tile), np.zeros(num_states, constants.dtype)
    by_state, columns = np.zeros((num_states, table.shape[0] + 1), constants.dtype), np.zeros(tile, np.int32)
    if kind == SYMBOLS:
        by_state[:, :-1] = table[:, :num_states].T
    control = denormals_off()
    begins, lengths, alive = np.zeros(tile, np.int64), np.zeros(tile, np.int64), np.zeros(tile, np.bool_)
    row_bytes = tile * alpha.itemsize
    alpha_at, rows_at, constants_at = alpha.ctypes.data, rows.ctypes.data, constants.ctypes.data
    shared_at, totals_at, scales_at = shared.ctypes.data, totals.ctypes.data, scales.ctypes.data
    sources_at, weights_at = pair_sources.ctypes.data, pair_weights.ctypes.data
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        members = ids.shape[0]
        for b in range(members):
            begins[b] = offsets[ids[b]]
            lengths[b] = offsets[ids[b] + 1] - begins[b]
        alive[:], product[:] = True, 1.0
        active = members
        for t in range(lengths[0]):
            while lengths[active - 1] <= t:
                active -= 1
            now, before = t % 2, 1 - t % 2
            now_at, before_at = alpha_at + now * num_states * row_bytes, alpha_at + before * num_states * row_bytes
            if t == 0:
                for k in range(num_states):
                    for b in range(tile):
                        alpha[now, k, b] = initial[k]
            else:
                for j in range(num_states):
                    begin = pair_starts[j]
                    tile_column(zero, now_at + j * row_bytes, shared_at, weights_at + 2 * begin * alpha.itemsize, sources_at + 8 * begin, before_at,
                                pair_starts[j + 1] - begin)
                for j in low_columns:
                    for b in range(active):
                        if alpha[now, j, b] < cancelled * shared[b]:
                            message[:] = alpha[before, :, b]
                            alpha[now, j, b] = _exact_column(j, starts, sources, incoming_values, constants, message)
            if leak > 0:
                for k in range(num_states):
                    for b in range(tile):
                        alpha[now, k, b] += alpha.dtype.type(leak)
            if kind == SYMBOLS:
                _symbol_tile(t, active, begins, symbols, by_state, shifts, columns, rows, step_shifts)
            else:
                if kind == GAUSSIAN:
                    _tile_features(t, active, begins, features, centre, y, observed)
                _density_tile(t, active, begins, kind, steps, eta1, eta2, log_norm, y, observed, logs, rows, step_shifts)
            tile_weigh(zero, num_states, now_at, rows_at, totals_at, flush)
            for b in range(tile):
                scales[b] = zero
                if b < active and alive[b]:
                    if totals[b] > collapse:
                        scales[b] = 1 / totals[b]
                        product[b] *= totals[b]
                        if product[b] < 1e-100 or product[b] > 1e100:
                            log_likelihood[ids[b]] += np.log(product[b])
                            product[b] = 1.0
                        log_likelihood[ids[b]] += step_shifts[b]
                    else:
                        alive[b] = False
                        log_likelihood[ids[b]] = np.nan
            tile_rescale(zero, num_states, now_at, scales_at, constants_at, shared_at, flush)
            if last_rows.shape[0] > 0:
                for b in range(active):
                    if lengths[b] == t + 1:
                        for k in range(num_states):
                            last_rows[ids[b], k] = alpha[now, k, b]
        for b in range(members):
            log_likelihood[ids[b]] += np.log(product[b])
    restore_denormals(control)


# The most probable path


@_row_kernel
def _count_above(left, right, limit):
    count = 0
    for k in range(left.shape[0]):
        count += left[k] + right[k] > limit
    return count


@_row_kernel
def _add_and_shift(message, row, out):
    """out = message + row minus its maximum, which is returned. What is beyond `row` is -inf."""
    for k in range(row.shape[0]):
        message[k] += row[k]
    largest = largest_in_row(message[0], message.shape[0], message.ctypes.data)
    if largest > -np.inf:
        for k in range(message.shape[0]):
            out[k] = message[k] - largest
    return largest


@_strict_kernel
def _best_before(j, starts, sources, positions, log_values, log_constants, delta):
    """The state i, lowest of equals, with the largest delta(i) + log A_ij, and that sum; every i is looked at."""
    best, best_score, p, end = 0, -np.inf, starts[j], starts[j + 1]
    for i in range(delta.shape[0]):
        if p < end and sources[p] == i:
            score = delta[i] + log_values[positions[p]]
            p += 1
        else:
            score = delta[i] + log_constants[i]
        if score > best_score:
            best, best_score = i, score
    return best, best_score


@_strict_kernel
def _step_back(j, common, starts, sources, positions, log_values, log_constants, delta):
    """As `_best_before`, from the list of j alone if `common`, the best of all constants, is not in it."""
    best, best_score = common, delta[common] + log_constants[common]
    for p in range(starts[j], starts[j + 1]):
        i = sources[p]
        if i == common:
            return _best_before(j, starts, sources, positions, log_values, log_constants, delta)[0]
        score = delta[i] + log_values[positions[p]]
        if score > best_score or (score == best_score and i < best):
            best, best_score = i, score
    return best


@_strict_kernel
def viterbi_lane(lane, lanes, order, offsets, kind, symbols, log_table, shifts, steps, features, centre, eta1, eta2, log_norm,
                 log_initial, log_constants, indices, log_values, row_best, has_low, starts, sources, positions,
                 column_order, slice_starts, slice_sources, slice_values, delta_store, log_probability, path):
    """The most probable paths. Only the scores are kept; the best state before is found again along the path.

    A state is reached at no less than the best constant, max_i delta(i) + log c_i. A row whose best kept entry does not beat
    that is skipped; where few are skipped, all columns' lists are walked instead. The one row whose constant it is does not offer
    it to the columns it keeps at less: these are done apart. Rows of states are padded with -inf.
    """
    (num_states, num_kept), padded = indices.shape, log_constants.shape[0]
    lanes_wide, itemsize = slice_sources.shape[1], log_constants.itemsize
    flat_values, message, scratch = log_values.reshape(-1), _aligned(padded, log_constants), np.zeros(num_states)
    zero, constants_at = log_constants.dtype.type(0.0), log_constants.ctypes.data
    message[num_states:] = -np.inf
    common, gathered = np.zeros(delta_store.shape[0], np.int64), _aligned(lanes_wide, log_constants)
    gathered_at, sources_at, values_at = gathered.ctypes.data, slice_sources.ctypes.data, slice_values.ctypes.data
    for n in order[lane::lanes]:
        first, last = offsets[n], offsets[n + 1]
        delta, score = delta_store[: last - first], 0.0
        for t in range(last - first):
            if t == 0:
                message[:num_states] = log_initial
            else:
                before = delta[t - 1]
                shared = largest_sum(zero, padded, before.ctypes.data, constants_at)
                giver = 0
                while before[giver] + log_constants[giver] != shared:
                    giver += 1
                common[t - 1] = giver
                if _count_above(before, row_best, shared) * _SCATTER_COST < num_states:
                    message[:num_states] = shared
                    for i in range(num_states):
                        if before[i] + row_best[i] > shared:
                            for k in range(num_kept):
                                message[indices[i, k]] = max(message[indices[i, k]], before[i] + log_values[i, k])  # no branch to guess
                else:
                    before_at = before.ctypes.data
                    for s in range(slice_starts.shape[0] - 1):
                        begin = slice_starts[s] * lanes_wide
                        gather_max(shared, gathered_at, shared, values_at + begin * itemsize, sources_at + begin * 4, before_at, slice_starts[s + 1] - slice_starts[s])
                        for place in range(min(lanes_wide, num_states - s * lanes_wide)):
                            message[column_order[s * lanes_wide + place]] = gathered[place]
                if has_low[giver]:
                    for k in range(num_kept):
                        if log_values[giver, k] < log_constants[giver]:
                            j = indices[giver, k]
                            message[j] = _best_before(j, starts, sources, positions, flat_values, log_constants, before[:num_states])[1]
            symbol = symbols[first + t] if kind == SYMBOLS else -1
            if symbol >= 0:
                largest = _add_and_shift(message, log_table[symbol], delta[t])
            else:
                if kind == SYMBOLS:
                    scratch[:] = 0.0
                else:
                    _log_emission_row(kind, first + t, symbols, log_table, steps, features, centre, eta1, eta2, log_norm, scratch)
                largest = _add_and_shift(message, scratch, delta[t])
            score += largest
            if largest == -np.inf:
                break
        log_probability[n] = score
        if score == -np.inf:
            path[first:last] = -1
            continue
        state = delta[last - first - 1].argmax()
        path[last - 1] = state
        for t in range(last - first - 2, -1, -1):
            state = _step_back(state, common[t], starts, sources, positions, flat_values, log_constants, delta[t, :num_states])
            path[first + t] = state


# Drawing


@_strict_kernel
def sample_chains(initial, indices, values, constants, offsets, uniforms):
    """State paths of the chain, one per sequence, in O(K) a step; the kept entries of a row are in the order of their columns."""
    num_states, num_kept = indices.shape
    states = np.empty(uniforms.shape[0], np.int64)
    for n in range(offsets.shape[0] - 1):
        for row in range(offsets[n], offsets[n + 1]):
            if row == offsets[n]:
                states[row] = _draw(initial, uniforms[row])
                continue
            i = states[row - 1]
            mass = values[i].sum()
            others = (num_states - num_kept) * constants[i]
            if uniforms[row] * (mass + others) < mass or others == 0:
                states[row] = indices[i, _draw(values[i], min(uniforms[row] * (mass + others) / mass, 1.0))]
                continue
            # The rank among the columns that are not kept, then the column of that rank.
            j = min(int((uniforms[row] * (mass + others) - mass) / constants[i]), num_states - num_kept - 1)
            for k in range(num_kept):
                if indices[i, k] <= j:
                    j += 1
            states[row] = j
    return states


@_strict_kernel
def sample_paths(filtered, offsets, starts, sources, values, constants, uniforms, states):
    """Backward sampling: z_T ~ p(z_T | y), then z_t ~ alpha_t(i) A[i, z_t+1]. A sequence whose weights are all zero gets -1."""
    weights = np.empty(constants.shape[0])
    for n in range(offsets.shape[0] - 1):
        for row in range(offsets[n + 1] - 1, offsets[n] - 1, -1):
            if row == offsets[n + 1] - 1:
                weights[:] = filtered[row]
            else:
                weights[:] = filtered[row] * constants
                for p in range(starts[states[row + 1]], starts[states[row + 1] + 1]):
                    weights[sources[p]] = filtered[row, sources[p]] * values[p]
            states[row] = _draw(weights, uniforms[row])
            if states[row] < 0:
                states[offsets[n] : offsets[n + 1]] = -1
                break
