"""The operator `Dense` on a CPU. A step of a tile is a product with the matrix; counts are products of many steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, strict_kernel
from lightning_hmm.inference.cpu.driver import best, best_source, count, implements, predict, retract, step
from lightning_hmm.inference.cpu.fill import multiply, multiply_add
from lightning_hmm.inference.cpu.prepared import Facts, Prepared, prepares, scores
from lightning_hmm.inference.cpu.vectors import step_four, watched_step_four
from lightning_hmm.inference.kernels.simd import make_product, padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros
from lightning_hmm.inference.operators import Dense

_SUMMED = 2048  # rows of a product that are added up in the working precision
max_plus = make_product(max_plus=True, accumulate=False)


class DenseArrays(NamedTuple):
    """matrix: (padded, padded); transposed: its transpose."""

    matrix: np.ndarray
    transposed: np.ndarray
    num_states: int


class DenseSums(NamedTuple):
    """Sums of products of messages before and after a transition.

    partial: (padded, padded) sums of alpha kappa in the working precision.
    counts: (S, S) sums in float64.
    summed: Number of rows in `partial`.
    """

    partial: np.ndarray
    counts: np.ndarray
    summed: np.ndarray


@implements(DenseArrays, predict)
def _predict(op, starts, t, active, rows, messages, slot):
    tile, padded = messages.shape[1], messages.shape[2]
    before, size = messages.ctypes.data + slot * tile * padded * messages.itemsize, tile * padded * messages.itemsize
    multiply(
        messages.dtype.type(0),
        before + size,
        before,
        padded,
        1,
        op.matrix.ctypes.data,
        padded,
        rows,
        padded,
        op.num_states,
    )


@implements(DenseArrays, retract)
def _retract(op, sums, starts, t, active, rows, alpha, kappa, slot, beta):
    padded = beta.shape[1]
    here = kappa.ctypes.data + slot * beta.size * beta.itemsize
    multiply(
        beta.dtype.type(0),
        beta.ctypes.data,
        here,
        padded,
        1,
        op.transposed.ctypes.data,
        padded,
        rows,
        padded,
        op.num_states,
    )


@inner
def _add_pairs(op, sums):
    """counts += A_ij times the partial sums, which begin anew."""
    for i in range(op.num_states):
        for j in range(op.num_states):
            sums.counts[i, j] += np.float64(sums.partial[i, j]) * op.matrix[i, j]
    sums.partial[:] = 0
    sums.summed[0] = 0


@implements(DenseArrays, count)
def _count(op, sums, alpha, kappa, t, steps, last):
    tile, padded = alpha.shape[1], alpha.shape[2]
    depth, first = steps * tile, alpha.ctypes.data + t * tile * padded * alpha.itemsize
    quads = min(padded, 4 * ((op.num_states + 3) // 4))  # whole blocks of rows are cheaper than single ones
    multiply_add(
        alpha.dtype.type(0), sums.partial.ctypes.data, first, 1, padded, kappa.ctypes.data, padded, quads, padded, depth
    )
    sums.summed[0] += depth
    if last or sums.summed[0] >= _SUMMED:
        _add_pairs(op, sums)


@implements(DenseArrays, step)
def _step(op, watch, like, now, before, emissions, flush, tiny, collapse, scales, products):
    if watch:
        return watched_step_four(
            like, now, before, op.matrix.ctypes.data, op.num_states, emissions, flush, tiny, collapse, scales, products
        )
    return step_four(
        like, now, before, op.matrix.ctypes.data, op.num_states, emissions, flush, tiny, collapse, scales, products
    )


class DenseScores(NamedTuple):
    """Log-probabilities for Viterbi: (padded, padded) and its transpose, padded with -inf."""

    matrix: np.ndarray
    transposed: np.ndarray
    num_states: int


@implements(DenseScores, best)
def _best(op, starts, t, active, rows, messages, slot):
    tile, padded = messages.shape[1], messages.shape[2]
    before, size = messages.ctypes.data + slot * tile * padded * 8, tile * padded * 8
    max_plus(0.0, before + size, before, padded, 1, op.matrix.ctypes.data, padded, rows, padded, op.num_states)


@implements(DenseScores, best_source)
def _best_source(op, step, messages, slot, b, state):
    found, largest = 0, -np.inf
    for i in range(op.num_states):
        score = messages[slot, b, i] + op.transposed[state, i]
        if score > largest:
            found, largest = i, score
    return found


@strict_kernel
def fill_matrix(log_probs, matrix, transposed):
    """The probabilities, and their smallest, smallest except zero, largest, and largest sum of a row."""
    least, least_nonzero, largest, growth = np.inf, np.inf, 0.0, 0.0
    for i in range(log_probs.shape[0]):
        total = 0.0
        for j in range(log_probs.shape[0]):
            prob = np.exp(log_probs[i, j])
            matrix[i, j] = prob
            transposed[j, i] = prob
            total += prob
            least, largest = min(least, prob), max(largest, prob)
            if log_probs[i, j] > -np.inf:
                least_nonzero = min(least_nonzero, prob)
        growth = max(growth, total)
    return least, least_nonzero, largest, growth


@prepares(Dense)
def prepare(operator: Dense, dtype: np.dtype) -> Prepared:
    log_probs = operator.log_probs.numpy()
    num_states = log_probs.shape[0]
    padded = padded_size(num_states, dtype.itemsize)
    matrix, transposed = aligned_zeros(dtype, 2, padded, padded)
    facts = Facts(*fill_matrix(log_probs, matrix, transposed))

    def sums(lanes: int) -> list[DenseSums]:
        partial, counts = aligned_zeros(dtype, lanes, padded, padded), np.zeros((lanes, num_states, num_states))
        return [DenseSums(partial[lane], counts[lane], np.zeros(1, np.int64)) for lane in range(lanes)]

    def counts(sums: list[DenseSums]) -> tuple[np.ndarray, ...]:
        return (sums[0].counts if len(sums) == 1 else np.sum([part.counts for part in sums], 0),)

    return Prepared(DenseArrays(matrix, transposed, num_states), facts, 128, 8 * num_states * num_states, sums, counts)


@scores(Dense)
def prepare_scores(operator: Dense) -> DenseScores:
    log_probs = operator.log_probs.numpy()
    num_states = log_probs.shape[0]
    padded = padded_size(num_states, 8)
    matrix, transposed = aligned_zeros(np.float64, 2, padded, padded)
    matrix[:], transposed[:] = -np.inf, -np.inf
    matrix[:num_states, :num_states], transposed[:num_states, :num_states] = log_probs, log_probs.T
    return DenseScores(matrix, transposed, num_states)
