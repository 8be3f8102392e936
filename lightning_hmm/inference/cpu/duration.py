"""Kernels of the operator `Duration`. A step takes K^2 + K D operations for K classes and durations up to D."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.driver import best, best_source, implements, predict, retract
from lightning_hmm.inference.cpu.prepared import Facts, Prepared, prepares, scores
from lightning_hmm.inference.operators import Duration


class DurationArrays(NamedTuple):
    """Probabilities of the next class (K, K) and of durations (K, D)."""

    jumps: np.ndarray
    durations: np.ndarray


class DurationSums(NamedTuple):
    """Sums of products of messages before and after a transition.

    jumps: (K, K) sums for the next class.
    durations: (K, D) sums for the durations.
    entering: (K,) scratch space of a step.
    """

    jumps: np.ndarray
    durations: np.ndarray
    entering: np.ndarray


@implements(DurationArrays, predict)
def _predict(op, starts, t, active, rows, messages, slot):
    size, longest = op.durations.shape
    for b in range(rows):
        for j in range(size):
            entering = messages.dtype.type(0)
            for k in range(size):
                entering += messages[slot, b, k * longest] * op.jumps[k, j]
            first = j * longest
            for r in range(longest - 1):
                messages[slot + 1, b, first + r] = messages[slot, b, first + r + 1] + entering * op.durations[j, r]
            messages[slot + 1, b, first + longest - 1] = entering * op.durations[j, longest - 1]
        for s in range(size * longest, messages.shape[2]):
            messages[slot + 1, b, s] = 0


@implements(DurationArrays, retract)
def _retract(op, sums, starts, t, active, rows, alpha, kappa, slot, beta):
    size, longest = op.durations.shape
    for b in range(active):
        for j in range(size):
            total, entering, first = 0.0, 0.0, j * longest
            for k in range(size):
                entering += np.float64(alpha[t, b, k * longest]) * op.jumps[k, j]
            for r in range(longest):
                message = np.float64(kappa[slot, b, first + r])
                total += op.durations[j, r] * message
                sums.durations[j, r] += entering * message
            sums.entering[j] = total
        for k in range(size):
            total, first = 0.0, k * longest
            for j in range(size):
                total += op.jumps[k, j] * sums.entering[j]
                sums.jumps[k, j] += np.float64(alpha[t, b, first]) * sums.entering[j]
            for r in range(longest - 1, 0, -1):
                beta[b, first + r] = kappa[slot, b, first + r - 1]
            beta[b, first] = total


@prepares(Duration)
def prepare(operator: Duration, dtype: np.dtype) -> Prepared:
    log_jumps, log_durations = operator.log_jumps.numpy(), operator.log_durations.numpy()
    jumps, durations = np.exp(log_jumps), np.exp(log_durations)
    least_nonzero = np.exp(
        log_jumps[log_jumps > -np.inf].min(initial=0.0) + log_durations[log_durations > -np.inf].min(initial=0.0)
    )
    growth = max(1.0, float((jumps @ durations.sum(1)).max(initial=0.0)))
    largest = max(1.0, float(jumps.max(initial=0.0) * durations.max(initial=0.0)))
    facts = Facts(
        0.0 if durations.size > 1 else float(jumps.min() * durations.min()), float(least_nonzero), largest, growth
    )

    def sums(shares: int) -> list[DurationSums]:
        shapes = jumps.shape, durations.shape, len(jumps)
        return [DurationSums(*map(np.zeros, shapes)) for _ in range(shares)]

    def counts(sums: list[DurationSums]) -> tuple[np.ndarray, ...]:
        jump_sums = np.sum([part.jumps for part in sums], 0)
        duration_sums = np.sum([part.durations for part in sums], 0)
        return jump_sums * jumps, duration_sums * durations

    return Prepared(
        DurationArrays(jumps.astype(dtype), durations.astype(dtype)),
        facts,
        1,
        8 * (jumps.size + durations.size),
        sums,
        counts,
    )


class DurationScores(NamedTuple):
    """Log-probabilities of the next class (K, K) and of durations (K, D)."""

    jumps: np.ndarray
    durations: np.ndarray


@implements(DurationScores, best)
def _best(op, starts, t, active, rows, messages, slot):
    size, longest = op.durations.shape
    for b in range(active):
        for j in range(size):
            entering = -np.inf
            for k in range(size):
                entering = max(entering, messages[slot, b, k * longest] + op.jumps[k, j])
            first = j * longest
            for r in range(longest):
                staying = messages[slot, b, first + r + 1] if r + 1 < longest else -np.inf
                messages[slot + 1, b, first + r] = max(staying, entering + op.durations[j, r])


@implements(DurationScores, best_source)
def _best_source(op, step, messages, slot, b, state):
    size, longest = op.durations.shape
    j, r = state // longest, state % longest
    found, largest = 0, -np.inf
    for k in range(size):
        score = messages[slot, b, k * longest] + op.jumps[k, j] + op.durations[j, r]
        if score > largest:
            found, largest = k * longest, score
    if r + 1 < longest and messages[slot, b, state + 1] > largest:
        found = state + 1
    return found


@scores(Duration)
def prepare_scores(operator: Duration) -> DurationScores:
    return DurationScores(operator.log_jumps.numpy(), operator.log_durations.numpy())
