"""Inference in the dense HMM on a CPU: plans the work, prepares arrays, and hands both to the compiled loops.

Sequences are sorted by length and cut into tiles of at most 32. What is left of float range is watched: where a step's
mass falls below `COLLAPSE`, or where what was dropped below `FLUSH` might matter, the sequence is done again in log
space, so that neither a point a thousand standard deviations off nor a state that fits better but cannot be reached ends
in a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lightning_hmm.inference.kernels import dense_loops as loops
from lightning_hmm.inference.kernels.dense_loops import GAUSSIAN, STEPS, SYMBOLS
from lightning_hmm.inference.kernels.lanes import aligned_zeros, num_lanes, run_lanes, workspace
from lightning_hmm.inference.kernels.simd import padded_size

_DOUBLE = np.dtype(np.float64)
# A message entry below FLUSH is taken as zero, which keeps every quotient of the backward pass inside the float range
# with room for sequence weights. A step that keeps less than COLLAPSE of its mass sends the sequence to log space.
FLUSH = {np.dtype(np.float32): 1e-30, np.dtype(np.float64): 1e-290}
COLLAPSE = {np.dtype(np.float32): 1e-20, np.dtype(np.float64): 1e-200}
# Where every transition is at least this probable, each state gets at least this much mass from what is kept at the step
# before, beside which what was dropped is nothing. Elsewhere the likelihood may gain NEGLIGIBLE from what was dropped.
ALWAYS_FED = {np.dtype(np.float32): 1e-20, np.dtype(np.float64): 1e-270}
NEGLIGIBLE = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-9}

_TILE = 32
_TILE_BYTES = 1 << 29  # a sequence whose tile would need more than this is worked on alone
_SMALL_WORK = 1_000_000  # multiply-adds below which handing work to threads costs more than it saves

Arrays = tuple[Any, ...]


Groups = list[tuple[np.ndarray, int]]


def _most_steps(num_states: int, itemsize: int) -> int:
    """Steps of the longest sequence that shares a tile with others."""
    return _TILE_BYTES // (2 * _TILE * padded_size(num_states, itemsize) * itemsize)


def plan(offsets: np.ndarray, num_states: int, itemsize: int) -> Groups:
    """The non-empty sequences, longest first, with the size of the tiles they go in; from shapes alone, never from threads.

    Very long sequences are a group of their own, one to a tile: a tile has as many steps as its longest sequence.
    """
    lengths = offsets[1:] - offsets[:-1]
    order = np.argsort(-lengths, kind="stable") if (lengths[1:] != lengths[:-1]).any() else np.arange(lengths.shape[0])
    order = order[: np.count_nonzero(lengths)]
    num_long = int(np.searchsorted(-lengths[order], -_most_steps(num_states, itemsize))) if order.shape[0] else 0
    long, short = order[:num_long], order[num_long:]
    if int(offsets[-1]) * num_states * num_states < _SMALL_WORK:
        tile = min(_TILE, 4 * -(-short.shape[0] // 4))
    else:
        tile = 1 if short.shape[0] < 8 else min(_TILE, -(-short.shape[0] // 32) * 4)
    return [(group, size) for group, size in ((long, 1), (short, tile)) if group.shape[0]]


def _lanes(groups: Groups, lane_bytes: int) -> int:
    return max((num_lanes(-(-order.shape[0] // tile), lane_bytes) for order, tile in groups), default=1)


def _sweep(groups: Groups, lanes: int, work: Callable[..., None]) -> None:
    """Calls ``work(lane, order, tile)`` for all lanes of each group."""
    for order, tile in groups:
        run_lanes(lanes, partial(work, order=order, tile=tile))


def _workspace_size(kind: int, longest: int, tile: int, padded: int) -> int:
    """Numbers that `e_step_lane` works with: alpha, emission rows unless they are in a table, kappa, beta and gamma, partial sums."""
    steps = longest if kind == SYMBOLS else 2 * longest
    return (steps + loops.pair_window(tile) + 2) * tile * padded + padded * padded


def _in_place_sizes(num_states: int, longest: int, num_sequences: int) -> tuple[int, int, np.ndarray]:
    """Of EM in place, which is in float64: the size of tiles, the longest sequence in one, and the workspace."""
    tile, most_steps, padded = min(_TILE, 4 * -(-num_sequences // 4)), _most_steps(num_states, 8), 8 * -(-num_states // 8)
    size = _workspace_size(SYMBOLS, min(longest, most_steps), tile, padded)
    if longest > most_steps:
        size = max(size, _workspace_size(SYMBOLS, longest, 1, padded))
    return tile, most_steps, workspace(_DOUBLE, size)


_NO_IDS = np.zeros(0, np.int64)
_NONE = np.zeros((0, 0))
_NO_CENTRE = np.zeros(0)


def emission_arrays(kind: int, parameters: list[np.ndarray], values: np.ndarray, dtype: np.dtype, *, logs: bool) -> Arrays:
    """The emission part of every kernel's arguments. `logs`: symbol tables as log-probabilities, for log space."""
    if kind == SYMBOLS:
        if logs:
            return (SYMBOLS, values, np.ascontiguousarray(parameters[0].T), _NO_CENTRE, _NONE, _NONE, _NO_CENTRE, _NONE, _NONE, _NONE)
        num_states, num_symbols = parameters[0].shape
        table, shifts = aligned_zeros(dtype, num_symbols + 1, padded_size(num_states, dtype.itemsize)), np.zeros(num_symbols + 1)
        loops.fill_table(parameters[0], table, shifts)
        return (SYMBOLS, values, table, shifts, _NONE, _NONE, _NO_CENTRE, _NONE, _NONE, _NONE)
    table = _NONE
    if not logs:
        table = aligned_zeros(dtype, 1, padded_size(parameters[0].shape[1 if kind == STEPS else 0], dtype.itemsize))
        table[:] = 1
    if kind == STEPS:
        return (STEPS, _NO_IDS, table, _NO_CENTRE, parameters[0], _NONE, _NO_CENTRE, _NONE, _NONE, _NONE)
    eta1, eta2, log_norm, centre = parameters
    natural = tuple(np.ascontiguousarray(array.T, np.float64) for array in (eta1, eta2, log_norm))
    return (GAUSSIAN, _NO_IDS, table, _NO_CENTRE, _NONE, values, centre, *natural)


def _padded_chain(log_initial: np.ndarray, log_transition: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """exp of both, padded with zeros; the matrix and its transpose as flat arrays."""
    padded = padded_size(log_initial.shape[0], dtype.itemsize)
    initial, (transition, transposed) = np.zeros(padded, dtype), aligned_zeros(dtype, 2, padded, padded)
    loops.fill_chain(log_initial, log_transition, initial, transition, transposed)
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


def _refuse_nan(kind: int, log_initial: np.ndarray, log_transition: np.ndarray, parameters: list[np.ndarray]) -> None:
    """NaN would be lost in a comparison somewhere. (Log-probabilities above zero are allowed: each entry is free.)"""
    named = [("initial", log_initial), ("transition", log_transition), *(("emission", array) for array in parameters if kind != STEPS)]
    for name, array in named:
        if array.size and np.isnan(array.min()):
            where = tuple(map(int, np.argwhere(np.isnan(array))[0]))
            raise ValueError(f"`{name}` must hold numbers, but the entry at {where} is nan instead.")


def e_step(kind, log_initial, log_transition, parameters, values, offsets, weights, *, single, smooth, per_step=False, last=False):
    """Runs the E-step (or, without `smooth`, the forward pass) of all sequences.

    Returns log-likelihoods, steps of probability zero (-1: none), initial counts, transition counts, emission statistics
    (visits, sum1, sum2; each (V or D, K)), smoothed rows times weight, filtered rows, and filtered rows of the last steps.
    """
    num_states, num_sequences, num_steps = log_initial.shape[0], offsets.shape[0] - 1, int(offsets[-1])
    _refuse_nan(kind, log_initial, log_transition, parameters)
    tables = parameters[:1] if kind == SYMBOLS else []
    dtype = _working_dtype(single, log_initial, log_transition, *tables)
    emission = emission_arrays(kind, parameters, values, dtype, logs=False)
    initial, transition, transposed = _padded_chain(log_initial, log_transition, dtype)
    statistic_rows = parameters[0].shape[1] if kind != STEPS and smooth else 0
    groups = plan(offsets, num_states, dtype.itemsize)
    lanes = _lanes(groups, 8 * num_states * (num_states + 3 * statistic_rows) if smooth else 0)

    log_likelihood, impossible_step = np.zeros(num_sequences), np.full(num_sequences, -1)
    padded = initial.shape[0]
    initial_counts, transition_counts = np.zeros((lanes, padded)), np.zeros((lanes, num_states, num_states))
    visits = aligned_zeros(np.float64, lanes, statistic_rows + 1, padded)
    sums = aligned_zeros(np.float64, 2, lanes, statistic_rows, padded) if kind == GAUSSIAN else np.zeros((2, lanes, 0, padded))
    step_rows = num_steps if per_step else 0
    smoothed = np.zeros((num_steps if per_step or (kind == STEPS and smooth) else 0, num_states))
    filtered = np.zeros((step_rows, num_states))
    last_rows = np.zeros((num_sequences if last else 0, num_states))
    flush, collapse = FLUSH[dtype], COLLAPSE[dtype]
    # Messages are multiplied by the weights in the working precision: very large and very small ones are scaled before.
    scale = _power_of_two(weights) if smooth else 1.0
    scaled = weights if scale == 1 else weights / scale

    def forward(lane, order, tile, leak=0.0, likelihood=log_likelihood, rows=last_rows):
        loops.score_lane(lane, lanes, tile, order, offsets, *emission, initial, transition, num_states, flush, collapse, leak, likelihood, rows)

    def forward_backward(lane, order, tile):
        if lane * tile >= order.shape[0]:
            return
        first = order[lane * tile]  # the longest of this lane
        longest = int(offsets[first + 1] - offsets[first])
        loops.e_step_lane(lane, lanes, tile, order, offsets, *emission, initial, transition, transposed, scaled, flush, collapse,
                          longest, workspace(dtype, _workspace_size(kind, longest, tile, padded)), log_likelihood, initial_counts[lane],
                          transition_counts[lane], visits[lane], sums[0, lane], sums[1, lane], smoothed, filtered)

    _sweep(groups, lanes, forward_backward if smooth else forward)
    if groups and np.exp(log_transition.min()) < ALWAYS_FED[dtype]:
        bound = np.zeros(num_sequences)
        _sweep(groups, lanes, lambda lane, order, tile: forward(lane, order, tile, num_states * flush, bound, _NONE))
        lost = ~(bound - log_likelihood <= NEGLIGIBLE[dtype])
        if smooth and dtype == np.float64 and np.any(lost & ~np.isnan(log_likelihood)):  # their statistics are wrong: the others' again, without them
            for array in (initial_counts, transition_counts, visits, sums):
                array[:] = 0
            _sweep([(order[~lost[order]], tile) for order, tile in groups], lanes, forward_backward)
        log_likelihood[lost] = np.nan
    collapsed = np.flatnonzero(np.isnan(log_likelihood))
    if dtype == np.float32 and collapsed.shape[0]:
        # Out of float32's range is seldom out of float64's, which is far cheaper than log space.
        return e_step(kind, log_initial, log_transition, parameters, values, offsets, weights, single=False, smooth=smooth, per_step=per_step, last=last)
    transition_counts = transition_counts.sum(0)
    initial_counts, visits, sums = (array[..., :num_states] for array in (initial_counts.sum(0), visits[:, :-1].sum(0), sums.sum(1)))
    if scale != 1:
        for array in (initial_counts, transition_counts, visits, sums, smoothed):
            array *= scale
    if collapsed.shape[0]:
        exact = emission_arrays(kind, parameters, values, dtype, logs=True)
        loops.exact_sequences(collapsed, offsets, exact, log_initial, log_transition, weights, smooth, log_likelihood, impossible_step,
                              initial_counts, transition_counts, visits, sums[0], sums[1], smoothed, filtered, last_rows)
    return log_likelihood, impossible_step, initial_counts, transition_counts, visits, sums[0], sums[1], smoothed, filtered, last_rows


def viterbi(kind, log_initial, log_transition, parameters, values, offsets):
    """Returns the most probable paths, packed, and their log-probabilities."""
    num_states = log_initial.shape[0]
    _refuse_nan(kind, log_initial, log_transition, parameters)
    emission = emission_arrays(kind, parameters, values, np.dtype(np.float64), logs=True)
    padded = padded_size(num_states, 8)
    initial, transition = np.full(padded, -np.inf), np.full((padded, padded), -np.inf)
    initial[:num_states], transition[:num_states, :num_states] = log_initial, log_transition
    transposed = np.ascontiguousarray(log_transition.T)
    groups = plan(offsets, num_states, 8)
    lanes = _lanes(groups, 0)
    log_probability, path = np.zeros(offsets.shape[0] - 1), np.empty(int(offsets[-1]), np.int64)

    def work(lane, order, tile):
        loops.viterbi_lane(lane, lanes, tile, order, offsets, *emission, initial, transition, transposed, log_probability, path)

    _sweep(groups, lanes, work)
    return path, log_probability


def sample_paths(filtered, kind, log_initial, log_transition, parameters, values, offsets, uniforms):
    """State paths drawn from the posterior, given the filtered probabilities and one uniform number a step."""
    emission = emission_arrays(kind, parameters, values, np.dtype(np.float64), logs=True)
    states = np.empty(uniforms.shape[0], np.int64)
    loops.sample_paths(filtered, offsets, emission, log_initial, log_transition, uniforms, states)
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
    tile, most_steps, memory = _in_place_sizes(log_initial.shape[0], longest, min(batch_size, num_sequences))
    loops.online_em(
        batch_offsets, order, offsets, symbols, weights, tile, most_steps, FLUSH[_DOUBLE], COLLAPSE[_DOUBLE], ALWAYS_FED[_DOUBLE], NEGLIGIBLE[_DOUBLE],
        float(discount), int(updates), size, float(data_size), np.asarray(pseudocounts, np.float64), np.asarray(frozen, np.bool_),
        log_initial, log_transition, log_emission, initial_buffer, transition_buffer, emission_buffer,
        memory, log_likelihood, impossible_step,
    )  # fmt: skip
    impossible = np.flatnonzero((impossible_step >= 0) & (weights != 0)) if impossible_step.max(initial=-1) >= 0 else _NO_IDS
    return log_likelihood, (int(impossible[0]), int(impossible_step[impossible[0]])) if impossible.shape[0] else None


def em_step(log_initial, log_transition, log_emission, symbols, offsets, weights, *, single):
    """One Baum-Welch iteration in place: in one compiled call where the work is small, over all threads otherwise.

    Where a sequence that counts is impossible, the parameters stay as they are.
    """
    num_states, num_sequences = log_emission.shape[0], offsets.shape[0] - 1
    if int(offsets[-1]) * num_states * num_states < _SMALL_WORK:
        longest = int((offsets[1:] - offsets[:-1]).max(initial=0))
        tile, most_steps, memory = _in_place_sizes(num_states, longest, num_sequences)
        log_likelihood = np.zeros(num_sequences)
        loops.em_step(offsets, symbols, weights, tile, most_steps, FLUSH[_DOUBLE], COLLAPSE[_DOUBLE], ALWAYS_FED[_DOUBLE], NEGLIGIBLE[_DOUBLE],
                      log_initial, log_transition, log_emission, memory, log_likelihood)
        return log_likelihood
    log_likelihood, impossible, initial, transition, visits, *_ = e_step(
        SYMBOLS, log_initial, log_transition, [log_emission], symbols, offsets, weights, single=single, smooth=True
    )
    if np.any((impossible >= 0) & (weights != 0)):
        return log_likelihood
    for log_probs, counts in ((log_initial[None], initial[None]), (log_transition, transition), (log_emission, np.ascontiguousarray(visits.T))):
        loops.normalise_rows(log_probs, counts, 1.0, 0.0)
    return log_likelihood
