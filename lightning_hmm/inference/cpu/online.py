"""Online EM with dense transitions and symbols: many updates in one compiled call.

Each update consists of an E-step of the driver and `updates.update`.
"""

from __future__ import annotations

import numpy as np

from lightning_hmm.inference.cpu.cache import kernel
from lightning_hmm.inference.cpu.dense import DenseArrays, DenseSums, fill_matrix
from lightning_hmm.inference.cpu.driver import Result, run_lane
from lightning_hmm.inference.cpu.estep import DOUBLE, NO_CENTER, RANGES, TILE, fill_table, limits_of, most_steps
from lightning_hmm.inference.cpu.fill import TABLE, Seen
from lightning_hmm.inference.cpu.prepared import Facts
from lightning_hmm.inference.cpu.updates import Part, update
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros, workspace

_ROWS_COUNTED = 128


@kernel
def online_updates(
    batch, batch_offsets, order, offsets, weights, tile, most, bounds, discount, step, sizes, data_size, parts,
    log_transition, log_emission, seen, chain, sums, initial, emission_counts, work, out,
):  # fmt: skip
    """Runs the updates for the batches from number `batch` on.

    Returns the number of the first batch that was not used, because one of its sequences leaves the range of
    floating-point numbers.
    """
    num_states, num_symbols = log_emission.shape
    log_initial, initial_counts = parts[0].values, parts[0].counts
    for batch in range(batch, batch_offsets.shape[0] - 1):  # noqa: B020
        ids = order[batch_offsets[batch] : batch_offsets[batch + 1]]
        least, least_nonzero, largest, growth = fill_matrix(log_transition, chain.matrix, chain.transposed)
        fill_table(log_emission, seen.table, seen.shifts, bounds.tiny)
        first = 0.0
        for k in range(num_states):
            initial[k] = np.exp(log_initial[k])
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
                run_lane(
                    0,
                    1,
                    size,
                    members,
                    offsets,
                    weights,
                    True,
                    seen,
                    chain,
                    sums,
                    limits,
                    initial,
                    num_states,
                    longest,
                    window,
                    work,
                    out,
                )
        if out.problem[0] >= 0:
            return batch
        for n in ids:
            if np.isnan(out.log_likelihood[n]):
                return batch
        for k in range(num_states):
            initial_counts[k] = out.initial[k]
            for v in range(num_symbols):
                emission_counts[k, v] = out.evidence[v, k]
        step += 1
        update(parts, sizes, initial_counts.sum(), step, discount, data_size)
    return batch_offsets.shape[0] - 1


class DensePass:
    """The compiled pass for the first state, a full transition matrix and symbols.

    Args:
        log_transition: (K, K) log-probabilities, which the updates change.
        log_emission: (K, V).
        symbols: (steps,) uint8, int16, int32 or int64, from 0 to V; V stands for a missing symbol.
        offsets: (N + 1,) where the sequences begin.
        weights: (N,) of the sequences.
        batch_size: sequences of an update.
    """

    def __init__(
        self,
        log_transition: np.ndarray,
        log_emission: np.ndarray,
        symbols: np.ndarray,
        offsets: np.ndarray,
        weights: np.ndarray,
        batch_size: int,
    ) -> None:
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
        table, shifts, none = (
            aligned_zeros(DOUBLE, num_symbols + 1, padded),
            np.zeros(num_symbols + 1),
            np.zeros((0, 0)),
        )
        one_hot, no_pairs = aligned_zeros(DOUBLE, num_states + 1, 0), np.zeros((0, 2), np.int64)
        no_weights, where = aligned_zeros(DOUBLE, 0, padded), symbols.ctypes.data
        seen = Seen(
            TABLE, where, where + symbols.nbytes, symbols.itemsize, 1, table, shifts, one_hot, none,
            np.zeros(0, np.int64), no_pairs, no_weights, NO_CENTER, False,
        )  # fmt: skip
        chain = DenseArrays(aligned_zeros(DOUBLE, padded, padded), aligned_zeros(DOUBLE, padded, padded), num_states)
        sums = DenseSums(
            aligned_zeros(DOUBLE, padded, padded), np.zeros((num_states, num_states)), np.zeros(1, np.int64)
        )
        rows = np.zeros((0, num_states))
        out = Result(
            np.zeros(num_sequences),
            rows,
            rows,
            rows,
            np.zeros(padded),
            aligned_zeros(DOUBLE, num_symbols + 1, padded),
            np.full(2, -1),
        )
        tile, most = min(TILE, 4 * -(-min(batch_size, num_sequences) // 4)), most_steps(padded * 8)
        needed = ((min(longest, most) + 2 + max(1, _ROWS_COUNTED // max(tile, 1))) * tile + 1) * padded
        if longest > most:
            needed = max(needed, (longest + 3 + _ROWS_COUNTED) * padded)
        emission_counts = np.zeros((num_states, num_symbols))
        self.counts = [np.zeros(num_states), sums.counts.reshape(-1), emission_counts.reshape(-1)]
        self.scores = out.log_likelihood
        self._data = batch_offsets, order, offsets, weights, tile, most, bounds
        self._work = (
            log_transition,
            log_emission,
            seen,
            chain,
            sums,
            aligned_zeros(DOUBLE, padded),
            emission_counts,
            workspace(DOUBLE, needed),
            out,
        )
        self._symbols = symbols  # `seen` holds its address only

    def __call__(
        self, batch: int, parts: tuple[Part, ...], discount: float, step: int, sizes: np.ndarray, data_size: float
    ) -> int:
        """Runs the updates from batch number `batch` on, after `step` earlier updates. See `online_updates`."""
        return int(online_updates(batch, *self._data, discount, step, sizes, data_size, parts, *self._work))
