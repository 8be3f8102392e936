"""Inference in the mostly constant HMM on a CPU: lays out the chain, prepares arrays, and hands both to the compiled loops.

Float range is watched as in `cpu`. A sequence that leaves it is done again in log space with the full matrix: that costs
O(T N^2), and happens where a point is hopelessly far from every state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_hmm.inference.kernels import dense_loops
from lightning_hmm.inference.kernels import dmc_loops as loops
from lightning_hmm.inference.kernels.cpu import ALWAYS_FED, COLLAPSE, FLUSH, NEGLIGIBLE, _power_of_two, _working_dtype, emission_arrays
from lightning_hmm.inference.kernels.dense_loops import GAUSSIAN, STEPS, SYMBOLS
from lightning_hmm.inference.kernels.gather import TILE_VECTORS, vector_lanes
from lightning_hmm.inference.kernels.lanes import aligned_zeros, num_lanes, run_lanes, workspace
from lightning_hmm.inference.kernels.simd import padded_size

# What is left of a sum after a subtraction, if less than this share, is added up again without one.
CANCELLED = {np.dtype(np.float32): 1e-2, np.dtype(np.float64): 1e-4}
_NONE = np.zeros((0, 0))


class Columns(NamedTuple):
    """The rows that keep each column: entries starts[j]:starts[j + 1] of `sources` (rows) and `positions` (in the flat (N, K) arrays)."""

    starts: np.ndarray
    sources: np.ndarray
    positions: np.ndarray


def columns_of(indices: np.ndarray) -> Columns:
    num_states = indices.shape[0]
    columns = Columns(np.zeros(num_states + 1, np.int64), np.empty(indices.size, np.int32), np.empty(indices.size, np.int64))
    loops.incoming(indices, *columns)
    return columns


class Chain(NamedTuple):
    """Probabilities in the working precision, padded, and the lists that forward and backward pass walk along."""

    initial: np.ndarray
    constants: np.ndarray
    values: np.ndarray  # (N, K)
    columns: Columns
    incoming_values: np.ndarray  # in the order of the columns
    incoming_weights: np.ndarray  # the same minus the row's constant
    low_columns: np.ndarray  # columns that a row keeps at less than its constant
    low_rows: np.ndarray


def _chain(log_initial: np.ndarray, indices: np.ndarray, log_values: np.ndarray, log_constants: np.ndarray, dtype: np.dtype) -> Chain:
    num_states = log_initial.shape[0]
    initial, constants = aligned_zeros(dtype, 2, padded_size(num_states, dtype.itemsize))
    initial[:num_states], constants[:num_states] = np.exp(log_initial), np.exp(log_constants)
    values, columns = np.exp(log_values).astype(dtype), columns_of(indices)
    low = log_values < log_constants[:, None]
    incoming_values = values.reshape(-1)[columns.positions]
    weights = (np.exp(log_values) - np.exp(log_constants)[:, None]).astype(dtype).reshape(-1)[columns.positions]
    return Chain(initial, constants, values, columns, incoming_values, weights, np.unique(indices[low]).astype(np.int64), np.flatnonzero(low.any(1)))


def _slices(columns: Columns, incoming_weights: np.ndarray, neutral: float) -> tuple[np.ndarray, ...]:
    """The columns' lists, a vector's width of them side by side, shorter ones filled up with `neutral`; those of like length together."""
    dtype = incoming_weights.dtype
    lanes, lengths = vector_lanes(dtype.itemsize), np.diff(columns.starts)
    order = np.argsort(-lengths, kind="stable")
    longest = lengths[order[::lanes]]  # the first of each slice has the longest list
    starts = np.concatenate([[0], np.cumsum(longest)])
    sources, weights = np.zeros((starts[-1], lanes), np.int32), aligned_zeros(dtype, starts[-1], lanes)
    weights[:] = neutral
    loops.interleave_columns(order, columns.starts, columns.sources, incoming_weights, lanes, starts, sources, weights)
    return order, starts, sources, weights


def _pairs(chain: Chain, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """The columns' lists made even in length, with starts counted in pairs."""
    lengths = np.diff(chain.columns.starts)
    starts = np.concatenate([[0], np.cumsum((lengths + 1) // 2)])
    sources, weights = np.zeros(2 * starts[-1], np.int32), np.zeros(2 * starts[-1], dtype)
    places = np.arange(lengths.sum()) + np.repeat(2 * starts[:-1] - chain.columns.starts[:-1], lengths)
    sources[places], weights[places] = chain.columns.sources, chain.incoming_weights
    return starts, sources, weights


def _targets(indices: np.ndarray, chain: Chain, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """(slices, K, lanes): the rows' lists, a vector's width of them side by side."""
    (num_states, num_kept), lanes = indices.shape, vector_lanes(dtype.itemsize)
    slices = -(-num_states // lanes)
    targets, weights = np.zeros((slices * lanes, num_kept), np.int32), np.zeros((slices * lanes, num_kept), dtype)
    targets[:num_states] = indices
    weights[:num_states].reshape(-1)[chain.columns.positions] = chain.incoming_weights
    turned = aligned_zeros(dtype, slices, num_kept, lanes)
    turned[:] = weights.reshape(slices, lanes, num_kept).transpose(0, 2, 1)
    return np.ascontiguousarray(targets.reshape(slices, lanes, num_kept).transpose(0, 2, 1)), turned


def expand(indices: np.ndarray, log_values: np.ndarray, log_constants: np.ndarray) -> np.ndarray:
    """(N, N) the full matrix of log-probabilities."""
    full = np.repeat(log_constants[:, None], log_constants.shape[0], axis=1)
    np.put_along_axis(full, indices.astype(np.int64), log_values, axis=1)
    return full


def split_counts(pairs: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, N) expected transitions as those of the kept entries (N, K) and the sum of all others (N,)."""
    places = indices.astype(np.int64)
    kept, others = np.take_along_axis(pairs, places, axis=1), pairs.copy()
    np.put_along_axis(others, places, 0.0, axis=1)
    return kept, others.sum(1)


class Results(NamedTuple):
    """What `e_step` returns; emission statistics are (V or D, N)."""

    log_likelihood: np.ndarray
    impossible_step: np.ndarray
    initial: np.ndarray
    kept: np.ndarray  # (N, K) expected transitions along the kept entries
    rest: np.ndarray  # (N,) along all others
    visits: np.ndarray
    sum1: np.ndarray
    sum2: np.ndarray
    smoothed: np.ndarray  # times weight
    filtered: np.ndarray
    last: np.ndarray
    alpha: np.ndarray  # (steps, padded N) p(z_t | y_1:t), or empty
    kappa: np.ndarray  # (steps, padded N): E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j)
    pairs: np.ndarray  # (N, N) expected transitions that are not in alpha and kappa, or empty


def e_step(
    kind, log_initial, indices, log_values, log_constants, parameters, values, offsets, weights, *, single, smooth, per_step=False, last=False, factors=False
):
    """Runs the E-step (or, without `smooth`, the forward pass) of all sequences; with `factors`, alpha and kappa of all steps are kept."""
    num_states, num_sequences, num_steps = log_initial.shape[0], offsets.shape[0] - 1, int(offsets[-1])
    indices = np.ascontiguousarray(indices, np.int32)
    tables = parameters[:1] if kind == SYMBOLS else []
    dtype = _working_dtype(single, log_initial, log_values, log_constants, *tables)
    emission = emission_arrays(kind, parameters, values, dtype, logs=False)
    chain = _chain(log_initial, indices, log_values, log_constants, dtype)
    padded = chain.constants.shape[0]
    statistic_rows = parameters[0].shape[1] if kind != STEPS and smooth else 0
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    lane_bytes = 8 * padded * (indices.shape[1] + 3 * statistic_rows) if smooth else 0
    lanes = num_lanes(order.shape[0], lane_bytes)

    log_likelihood, impossible_step = np.zeros(num_sequences), np.full(num_sequences, -1)
    initial_counts, rest = np.zeros((lanes, padded)), np.zeros((lanes, padded))
    visits = aligned_zeros(np.float64, lanes, statistic_rows, padded)
    sums = aligned_zeros(np.float64, 2, lanes, statistic_rows if kind == GAUSSIAN else 0, padded)
    smoothed = np.zeros((num_steps if per_step or (kind == STEPS and smooth) else 0, num_states))
    filtered = np.zeros((num_steps if per_step else 0, num_states))
    last_rows = np.zeros((num_sequences if last else 0, num_states))
    alpha, kappa = (aligned_zeros(dtype, num_steps if factors and smooth else 0, padded) for _ in range(2))
    flush, collapse, cancelled, smallest = FLUSH[dtype], COLLAPSE[dtype], CANCELLED[dtype], np.finfo(dtype).eps
    scale = _power_of_two(weights)
    scaled = weights / scale
    slices = _slices(chain.columns, chain.incoming_weights, 0.0)
    targets = _targets(indices, chain, dtype) if smooth else (np.zeros((0, 0, 0), np.int32), np.zeros((0, 0, 0), dtype))
    counts = np.zeros((lanes, targets[1].size))
    walk = (chain.initial, chain.constants, *slices, chain.columns.starts, chain.columns.sources, chain.incoming_values, chain.low_columns)

    def forward(sequences, leak, likelihood, rows):
        tile = TILE_VECTORS * vector_lanes(dtype.itemsize)
        if sequences.shape[0] > tile // 4:
            lists = (chain.columns.starts, chain.columns.sources, chain.incoming_values, *_pairs(chain, dtype), chain.low_columns)
            tile_lanes = num_lanes(-(-sequences.shape[0] // tile), 0)
            run_lanes(tile_lanes, lambda lane: loops.score_tile_lane(lane, tile_lanes, tile, sequences, offsets, *emission, chain.initial, chain.constants,
                                                                     *lists, cancelled, flush, collapse, leak, num_states, likelihood, rows))
        else:
            run_lanes(lanes, lambda lane: loops.score_lane(lane, lanes, sequences, offsets, *emission, *walk,
                                                           cancelled, flush, collapse, leak, num_states, likelihood, rows))

    def forward_backward(sequences):
        def work(lane):
            if lane >= sequences.shape[0]:
                return
            longest = int(lengths[sequences[lane]])
            stores = (alpha, kappa) if factors else (aligned_zeros(dtype, longest, padded), aligned_zeros(dtype, 1 if kind == SYMBOLS else longest, padded))
            loops.e_step_lane(lane, lanes, sequences, offsets, *emission, *walk, indices, chain.values, *targets, chain.low_rows, scaled, cancelled, smallest,
                              flush, collapse, factors, *stores, log_likelihood, initial_counts[lane], counts[lane], rest[lane], visits[lane],
                              sums[0, lane], sums[1, lane], smoothed, filtered)

        run_lanes(lanes, work)

    if smooth:
        forward_backward(order)
    else:
        forward(order, 0.0, log_likelihood, last_rows)
    least = min(log_constants.min(), log_values.min(initial=0.0))
    if order.shape[0] and np.exp(least) < ALWAYS_FED[dtype]:
        bound = np.zeros(num_sequences)
        forward(order, num_states * flush, bound, _NONE)
        lost = ~(bound - log_likelihood <= NEGLIGIBLE[dtype])
        if smooth and dtype == np.float64 and np.any(lost & ~np.isnan(log_likelihood)):  # their statistics are wrong: the others' again, without them
            for array in (initial_counts, counts, rest, visits, sums, alpha, kappa):
                array[:] = 0
            forward_backward(order[~lost[order]])
        log_likelihood[lost] = np.nan
    if dtype == np.float32 and np.any(np.isnan(log_likelihood)):
        # Out of float32's range is seldom out of float64's, which is far cheaper than log space.
        return e_step(kind, log_initial, indices, log_values, log_constants, parameters, values, offsets, weights,
                      single=False, smooth=smooth, per_step=per_step, last=last, factors=factors)
    initial_counts, rest, visits, sums = (array[..., :num_states] for array in (initial_counts.sum(0), rest.sum(0), visits.sum(0), sums.sum(1)))
    slots = targets[1].shape
    kept = counts.sum(0).reshape(slots).transpose(0, 2, 1).reshape(slots[0] * slots[2], slots[1])[:num_states] if smooth else np.zeros(indices.shape)
    kept, rest = kept * np.exp(log_values), rest * np.exp(log_constants)
    if scale != 1:
        initial_counts, rest, kept = initial_counts * scale, rest * scale, kept * scale
        for array in (visits, sums, smoothed, kappa):
            array *= scale
    pairs = _NONE
    collapsed = np.flatnonzero(np.isnan(log_likelihood))
    if collapsed.shape[0]:
        exact = emission_arrays(kind, parameters, values, dtype, logs=True)
        full = expand(indices, log_values, log_constants)
        pairs = np.zeros((num_states, num_states))
        dense_loops.exact_sequences(collapsed, offsets, exact, log_initial, full, weights, smooth, log_likelihood, impossible_step,
                                    initial_counts, pairs, visits, sums[0], sums[1], smoothed, filtered, last_rows)
        kept_pairs, rest_pairs = split_counts(pairs, indices)
        kept, rest = kept + kept_pairs, rest + rest_pairs
    return Results(log_likelihood, impossible_step, initial_counts, kept, rest, visits, sums[0], sums[1], smoothed, filtered, last_rows,
                   alpha, kappa, pairs if factors else _NONE)


def viterbi(kind, log_initial, indices, log_values, log_constants, parameters, values, offsets, *, single=False):
    """Returns the most probable paths, packed, and their log-probabilities."""
    dtype = np.dtype(np.float32 if single else np.float64)
    num_states, lengths = log_initial.shape[0], np.diff(offsets)
    indices = np.ascontiguousarray(indices, np.int32)
    kind, symbols, table, *rest = emission_arrays(kind, parameters, values, np.dtype(np.float64), logs=True)
    table = table.astype(dtype)
    columns, low = columns_of(indices), (log_values < log_constants[:, None]).any(1)
    padded = padded_size(num_states, dtype.itemsize)
    constants, row_best = aligned_zeros(dtype, 2, padded)
    constants[:], row_best[:] = -np.inf, -np.inf
    constants[:num_states], row_best[:num_states] = log_constants, log_values.max(1, initial=-np.inf)
    rounded = log_values.astype(dtype)
    slices = _slices(columns, rounded.reshape(-1)[columns.positions], -np.inf)
    chain = (log_initial.astype(dtype), constants, indices, rounded, row_best, low, *columns, *slices)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    lanes = num_lanes(order.shape[0], 0)
    log_probability, path = np.zeros(offsets.shape[0] - 1), np.empty(int(offsets[-1]), np.int64)

    def work(lane):
        if lane < order.shape[0]:
            longest = int(lengths[order[lane]])
            delta = workspace(dtype, longest * padded).reshape(longest, padded)
            loops.viterbi_lane(lane, lanes, order, offsets, kind, symbols, table, *rest, *chain, delta, log_probability, path)

    run_lanes(lanes, work)
    return path, log_probability


def sample_chains(log_initial, indices, log_values, log_constants, offsets, uniforms) -> Any:
    return loops.sample_chains(np.exp(log_initial), indices, np.exp(log_values), np.exp(log_constants), offsets, uniforms)


def sample_paths(filtered, indices, log_values, log_constants, offsets, uniforms):
    """State paths drawn from the posterior; -1 in sequences whose weights are below the smallest float."""
    columns, states = columns_of(np.ascontiguousarray(indices, np.int32)), np.empty(uniforms.shape[0], np.int64)
    values = np.exp(log_values).reshape(-1)[columns.positions]
    loops.sample_paths(filtered, offsets, columns.starts, columns.sources, values, np.exp(log_constants), uniforms, states)
    return states
