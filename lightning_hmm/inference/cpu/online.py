"""Online EM with dense transitions and symbols: many updates in one compiled call.

One update is an E-step of a batch, ``buffer = discount * buffer + (1 - discount) * counts`` for each parameter, and an M-step from the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, kernel
from lightning_hmm.inference.cpu.dense import DenseArrays, DenseSums, fill_matrix
from lightning_hmm.inference.cpu.driver import Result, run_lane
from lightning_hmm.inference.cpu.estep import DOUBLE, NO_CENTER, RANGES, TILE, fill_table, limits_of, most_steps
from lightning_hmm.inference.cpu.exact import exact_sequence
from lightning_hmm.inference.cpu.fill import TABLE, Seen, symbol_at
from lightning_hmm.inference.cpu.prepared import Facts
from lightning_hmm.inference.kernels.lanes import aligned_zeros, workspace
from lightning_hmm.inference.kernels.simd import padded_size

_ROWS_COUNTED = 128


@inner
def _remember(buffer, counts, discount):
    for i in range(buffer.shape[0]):
        for j in range(buffer.shape[1]):
            buffer[i, j] = discount * buffer[i, j] + (1 - discount) * counts[i, j]


@kernel
def update_rows(log_probs, counts, buffer, discount, correction, pseudocount):
    """The update of rows of log-probabilities in place: ``buffer = discount * buffer + (1 - discount) * counts``, then each row is
    ``buffer / correction + pseudocount``, normalized.

    Entries of -inf stay so. So does a row without counts. With a discount of 0 and a correction of 1 it is the M-step of batch EM.
    """
    _remember(buffer, counts, discount)
    for i in range(log_probs.shape[0]):
        total = 0.0
        for j in range(log_probs.shape[1]):
            if log_probs[i, j] > -np.inf:
                total += buffer[i, j] / correction + pseudocount
        if total > 0:
            for j in range(log_probs.shape[1]):
                if log_probs[i, j] > -np.inf:
                    log_probs[i, j] = np.log((buffer[i, j] / correction + pseudocount) / total)


@inner
def _exact(n, offsets, seen, log_initial, log_transition, log_emission, weight, log_likelihood, impossible_step, initial_counts, transition_counts, visits):
    """Log space, for one sequence."""
    first, steps, num_states = offsets[n], offsets[n + 1] - offsets[n], log_initial.shape[1]
    rows, smoothed, filtered = np.zeros((steps, num_states)), np.zeros((steps, num_states)), np.zeros((steps, num_states))
    symbols = np.empty(steps, np.int64)
    for t in range(steps):
        symbols[t] = symbol_at(seen, first + t)
        if symbols[t] < log_emission.shape[1]:
            for k in range(num_states):
                rows[t, k] = log_emission[k, symbols[t]]
    log_likelihood[n], impossible_step[n] = exact_sequence(log_initial[0], log_transition, rows, weight, True, smoothed, filtered, transition_counts)
    for k in range(num_states):
        initial_counts[0, k] += smoothed[0, k]
        for t in range(steps):
            if symbols[t] < log_emission.shape[1]:
                visits[k, symbols[t]] += smoothed[t, k]


@kernel
def online_updates(batch_offsets, order, offsets, weights, tile, most, bounds, discount, step, sizes, total_size, pseudocounts, frozen,
                   log_initial, log_transition, log_emission, initial_buffer, transition_buffer, emission_buffer,
                   seen, chain, sums, initial, initial_counts, emission_counts, work, out, impossible_step):  # fmt: skip
    """Updates for consecutive batches; see `online_pass`. Returns the number of batches done, fewer than given where a sequence is impossible."""
    num_states, num_symbols = log_emission.shape
    for batch in range(batch_offsets.shape[0] - 1):
        ids = order[batch_offsets[batch] : batch_offsets[batch + 1]]
        least, least_nonzero, largest, growth = fill_matrix(log_transition, chain.matrix, chain.transposed)
        fill_table(log_emission, seen.table, seen.shifts, bounds.tiny)
        first = 0.0
        for k in range(num_states):
            initial[k] = np.exp(log_initial[0, k])
            first = max(first, initial[k])
        sums.counts[:], out.initial[:], out.evidence[:] = 0, 0, 0
        num_long = 0
        while num_long < ids.shape[0] and offsets[ids[num_long] + 1] - offsets[ids[num_long]] > most:
            num_long += 1
        for group in range(2):
            members = ids[:num_long] if group == 0 else ids[num_long:]
            if members.shape[0] > 0:
                size = 1 if group == 0 else tile
                longest = offsets[members[0] + 1] - offsets[members[0]]
                limits = limits_of(bounds, Facts(least, least_nonzero, largest, growth), first, num_states, longest)
                window = max(1, _ROWS_COUNTED // size)
                run_lane(0, 1, size, members, offsets, weights, True, seen, chain, sums, limits, initial, num_states, longest, window, work, out)
        if out.problem[0] >= 0:
            return batch
        for k in range(num_states):
            initial_counts[0, k] = out.initial[k]
            for v in range(num_symbols):
                emission_counts[k, v] = out.evidence[v, k]
        possible = True
        for n in ids:
            if np.isnan(out.log_likelihood[n]):
                _exact(n, offsets, seen, log_initial, log_transition, log_emission, weights[n], out.log_likelihood, impossible_step,
                       initial_counts, sums.counts, emission_counts)  # fmt: skip
                possible = possible and (out.log_likelihood[n] > -np.inf or weights[n] == 0)
        if not possible:
            return batch
        step += 1
        correction, started = 1.0 - discount**step, 0.0
        for k in range(num_states):
            started += initial_counts[0, k]
        sizes[0] = discount * sizes[0] + (1 - discount) * started
        share = sizes[0] / correction / total_size
        for part, (log_probs, found, buffer) in enumerate(
            ((log_initial, initial_counts, initial_buffer), (log_transition, sums.counts, transition_buffer), (log_emission, emission_counts, emission_buffer))
        ):
            if frozen[part]:
                _remember(buffer, found, discount)
            else:
                update_rows(log_probs, found, buffer, discount, correction, pseudocounts[part] * share)
    return batch_offsets.shape[0] - 1


def online_pass(
    log_initial: np.ndarray, log_transition: np.ndarray, log_emission: np.ndarray, buffers: Sequence[np.ndarray], size: np.ndarray,
    symbols: np.ndarray, offsets: np.ndarray, weights: np.ndarray, *, batch_size: int, discount: float, updates: int, data_size: float,
    pseudocounts: Sequence[float], frozen: Sequence[bool],
) -> tuple[np.ndarray, tuple[int, int] | None]:  # fmt: skip
    """Online EM over consecutive batches of sequences; parameters and buffers change in place.

    Args:
        log_initial: (K,) log-probabilities.
        log_transition: (K, K).
        log_emission: (K, V).
        buffers: discounted counts of these three.
        size: (1,) the discounted number of sequences in a batch.
        symbols: (steps,) uint8, int16, int32 or int64; V stands for a missing symbol.
        offsets: (N + 1,) where the sequences begin.
        weights: (N,) of the sequences.
        batch_size: sequences of an update.
        discount: of older counts, below 1; 0 for none.
        updates: how many updates have gone before.
        data_size: the number of sequences of all data; a batch takes its share of the pseudocounts.
        pseudocounts: of the three parameters.
        frozen: which of them stay as they are.

    Returns:
        (N,) log-likelihoods under the parameters that the batch of each sequence met, and (sequence, step) of the first one that is impossible, where
        the pass has ended, or ``None``.
    """
    lengths = offsets[1:] - offsets[:-1]
    num_sequences, longest = lengths.shape[0], int(lengths.max(initial=0))
    if num_sequences <= batch_size and lengths.min(initial=longest) == longest > 0:  # nothing to sort
        order, batch_offsets = np.arange(num_sequences), np.array([0, num_sequences])
    else:
        batches = np.arange(num_sequences) // batch_size
        order = np.lexsort((-lengths, batches))
        order = order[lengths[order] > 0]
        batch_offsets = np.searchsorted(batches[order], np.arange(-(-num_sequences // batch_size) + 1))
    (num_states, num_symbols), bounds = log_emission.shape, RANGES[DOUBLE]
    padded = padded_size(num_states, 8)
    symbols = np.ascontiguousarray(symbols)
    table, shifts, none = aligned_zeros(DOUBLE, num_symbols + 1, padded), np.zeros(num_symbols + 1), np.zeros((0, 0))
    one_hot, no_pairs = aligned_zeros(DOUBLE, num_states + 1, 0), np.zeros((0, 2), np.int64)
    no_weights = aligned_zeros(DOUBLE, 0, padded)
    where = symbols.ctypes.data
    seen = Seen(
        TABLE, where, where + symbols.nbytes, symbols.itemsize, 1, table, shifts, one_hot, none, np.zeros(0, np.int64), no_pairs, no_weights, NO_CENTER,
        False,
    )  # fmt: skip
    chain = DenseArrays(aligned_zeros(DOUBLE, padded, padded), aligned_zeros(DOUBLE, padded, padded), num_states)
    sums = DenseSums(aligned_zeros(DOUBLE, padded, padded), np.zeros((num_states, num_states)), np.zeros(1, np.int64))
    log_likelihood, impossible_step, rows = np.zeros(num_sequences), np.full(num_sequences, -1), np.zeros((0, num_states))
    out = Result(log_likelihood, rows, rows, rows, np.zeros(padded), aligned_zeros(DOUBLE, num_symbols + 1, padded), np.full(2, -1))
    tile, most = min(TILE, 4 * -(-min(batch_size, num_sequences) // 4)), most_steps(padded * 8)
    needed = ((min(longest, most) + 2 + max(1, _ROWS_COUNTED // max(tile, 1))) * tile + 1) * padded
    if longest > most:
        needed = max(needed, (longest + 3 + _ROWS_COUNTED) * padded)
    online_updates(
        batch_offsets, order, offsets, weights, tile, most, bounds, float(discount), int(updates), size, float(data_size),
        np.asarray(pseudocounts, np.float64), np.asarray(frozen, np.bool_), log_initial[None], log_transition, log_emission,
        buffers[0][None], buffers[1], buffers[2], seen, chain, sums, aligned_zeros(DOUBLE, padded), np.zeros((1, num_states)),
        np.zeros((num_states, num_symbols)), workspace(DOUBLE, needed), out, impossible_step,
    )  # fmt: skip
    if out.problem[0] >= 0:
        step = int(out.problem[0])
        raise ValueError(f"`symbols` must be from 0 to {num_symbols} ({num_symbols} for a missing one), but that of step {step} is {int(symbols[step])}.")
    impossible = np.flatnonzero((impossible_step >= 0) & (weights != 0))
    return log_likelihood, (int(impossible[0]), int(impossible_step[impossible[0]])) if impossible.shape[0] else None
