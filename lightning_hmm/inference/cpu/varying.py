"""Kernels of the operator `TimeVarying`. A step is one product with the matrix of the step for each sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.dense import max_plus
from lightning_hmm.inference.cpu.driver import best, best_source, implements, predict, retract
from lightning_hmm.inference.cpu.fill import multiply
from lightning_hmm.inference.cpu.prepared import Facts, Prepared, prepares, scores
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros
from lightning_hmm.inference.operators import TimeVarying


class VaryingArrays(NamedTuple):
    """Transition probabilities.

    matrices: (M, padded, padded) matrices.
    transposed: (M, padded, padded) transposed matrices.
    which: (steps,) number of the matrix of the transition into each step.
    num_states: Number of states.
    """

    matrices: np.ndarray
    transposed: np.ndarray
    which: np.ndarray
    num_states: int


@implements(VaryingArrays, predict)
def _predict(op, starts, t, active, rows, messages, slot):
    padded, row_bytes = messages.shape[2], messages.shape[2] * messages.itemsize
    before = messages.ctypes.data + slot * messages.shape[1] * row_bytes
    now = before + messages.shape[1] * row_bytes
    for b in range(rows):
        m = op.which[starts[b] + t] if b < active else 0
        matrix = op.matrices.ctypes.data + m * padded * row_bytes
        multiply(
            messages.dtype.type(0),
            now + b * row_bytes,
            before + b * row_bytes,
            padded,
            1,
            matrix,
            padded,
            1,
            padded,
            op.num_states,
        )


@implements(VaryingArrays, retract)
def _retract(op, sums, starts, t, active, rows, alpha, kappa, slot, beta):
    padded, row_bytes = beta.shape[1], beta.shape[1] * beta.itemsize
    here = kappa.ctypes.data + slot * beta.shape[0] * row_bytes
    for b in range(active):
        m = op.which[starts[b] + t]
        matrix = op.transposed.ctypes.data + m * padded * row_bytes
        multiply(
            beta.dtype.type(0),
            beta.ctypes.data + b * row_bytes,
            here + b * row_bytes,
            padded,
            1,
            matrix,
            padded,
            1,
            padded,
            op.num_states,
        )
        for i in range(op.num_states):
            message = np.float64(alpha[t, b, i])
            for j in range(padded):
                sums.counts[m, i, j] += message * np.float64(kappa[slot, b, j])


class VaryingSums(NamedTuple):
    """Sums of products of messages alpha and kappa: (M, padded, padded)."""

    counts: np.ndarray


@prepares(TimeVarying)
def prepare(operator: TimeVarying, dtype: np.dtype) -> Prepared:
    probs = np.exp(operator.log_probs.numpy())
    num_matrices, num_states, _ = probs.shape
    padded = padded_size(num_states, dtype.itemsize)
    matrices, transposed = aligned_zeros(dtype, 2, num_matrices, padded, padded)
    matrices[:, :num_states, :num_states], transposed[:, :num_states, :num_states] = probs, probs.transpose(0, 2, 1)
    possible = probs[operator.log_probs.numpy() > -np.inf]
    facts = Facts(
        float(probs.min(initial=np.inf)),
        float(possible.min(initial=np.inf)),
        float(probs.max(initial=0.0)),
        float(probs.sum(2).max(initial=0.0)),
    )
    index = operator.index.long().contiguous().numpy()
    if index.size and not 0 <= index.min() <= index.max() < num_matrices:
        raise ValueError(f"`index` must be from 0 to {num_matrices - 1}, but is from {index.min()} to {index.max()}.")

    def sums(shares: int) -> list[VaryingSums]:
        counts = np.zeros((shares, num_matrices, padded, padded))
        return [VaryingSums(counts[share]) for share in range(shares)]

    def counts(sums: list[VaryingSums]) -> tuple[np.ndarray, ...]:
        return (np.sum([part.counts for part in sums], 0)[:, :num_states, :num_states] * probs,)

    return Prepared(
        VaryingArrays(matrices, transposed, index, num_states),
        facts,
        1,
        8 * num_matrices * padded * padded,
        sums,
        counts,
    )


class VaryingScores(NamedTuple):
    """Transition log-probabilities.

    matrices: (M, padded, padded) matrices, padded with -inf.
    which: (steps,) number of the matrix of the transition into each step.
    num_states: Number of states.
    """

    matrices: np.ndarray
    which: np.ndarray
    num_states: int


@implements(VaryingScores, best)
def _best(op, starts, t, active, rows, messages, slot):
    padded, row_bytes = messages.shape[2], messages.shape[2] * 8
    before = messages.ctypes.data + slot * messages.shape[1] * row_bytes
    now = before + messages.shape[1] * row_bytes
    for b in range(active):
        matrix = op.matrices.ctypes.data + op.which[starts[b] + t] * padded * row_bytes
        max_plus(0.0, now + b * row_bytes, before + b * row_bytes, padded, 1, matrix, padded, 1, padded, op.num_states)


@implements(VaryingScores, best_source)
def _best_source(op, step, messages, slot, b, state):
    found, largest, m = 0, -np.inf, op.which[step]
    for i in range(op.num_states):
        score = messages[slot, b, i] + op.matrices[m, i, state]
        if score > largest:
            found, largest = i, score
    return found


@scores(TimeVarying)
def prepare_scores(operator: TimeVarying) -> VaryingScores:
    log_probs = operator.log_probs.numpy()
    num_matrices, num_states, _ = log_probs.shape
    padded = padded_size(num_states, 8)
    matrices = aligned_zeros(np.float64, num_matrices, padded, padded)
    matrices[:] = -np.inf
    matrices[:, :num_states, :num_states] = log_probs
    return VaryingScores(matrices, operator.index.long().contiguous().numpy(), num_states)
