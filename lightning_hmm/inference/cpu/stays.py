r"""Forward-backward with explicit durations, for evidence of the K classes.

The messages are those of the operator `Duration`, but a step takes one pass over them in each direction. The
prediction a of a step t has an entry for each class k and number of remaining steps r. With the factor
:math:`f_k = b_k / c`, where b are the emission probabilities and c is the probability of the step,

.. math:: a'_{kr} = f_k a_{k,r+1} + e_k p_{kr}, \qquad e_j = \sum_k f_k a_{k0} J_{kj}

The backward messages :math:`\kappa_{kr} = f_k \beta_{kr}` move in the other direction, and all counts are sums of
products of a or e with them. The emission of a class is used once for all of its states.

A prediction below `FLUSH` is set to zero. A lower bound of the positive entries of each class reveals where that may
happen. The forward pass is then repeated with a tiny number added to each entry. If this changes the likelihood, or if
a step leaves the range of floats, the log-likelihood of the sequence is NaN, and the caller computes it by other means.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import inner, kernel, strict_kernel
from lightning_hmm.inference.cpu.fill import multiply

FLUSH, COLLAPSE, NEGLIGIBLE = 1e-290, 1e-200, 1e-9
_MARGIN = 1e20  # An entry this many times larger than `FLUSH` does not notice that a smaller one is added or not.


class Chain(NamedTuple):
    """Probabilities: initial (K, D), durations (K, D), and jumps (K, padded) with their transpose, padded with zeros.

    least: (2, K) smallest probability of a duration of each class, of all and of those that are not zero.
    doubtful: Whether a jump is so improbable that it can leave the range of floats unnoticed.
    """

    initial: np.ndarray
    durations: np.ndarray
    jumps: np.ndarray
    transposed: np.ndarray
    least: np.ndarray
    doubtful: bool


class Scratch(NamedTuple):
    """Of a sequence: predictions (slots, K, D), factors (T + 1, K) and entries into classes (T + 1, padded).

    kappa: (2, K, D) backward messages.
    ending: (padded,) backward messages at the ends of stays.
    """

    messages: np.ndarray
    factors: np.ndarray
    entering: np.ndarray
    kappa: np.ndarray
    ending: np.ndarray


class Sums(NamedTuple):
    """Sums of products of messages: initial (K, D) and durations (K, D)."""

    initial: np.ndarray
    durations: np.ndarray


class Result(NamedTuple):
    """Of the sequences and steps of a batch.

    log_likelihood: (N,) log-likelihoods.
    last: (N, K D) filtered rows, without a backward pass only.
    ends, leaving: (steps, padded) probabilities of ends of stays, and backward messages at entries, times weight. Their
        products at successive steps are the counts of jumps.
    posteriors: (steps, K) probabilities of the classes, times weight.
    """

    log_likelihood: np.ndarray
    last: np.ndarray
    ends: np.ndarray
    leaving: np.ndarray
    posteriors: np.ndarray


@strict_kernel
def relative(rows, largest, impossible):
    """Subtracts the largest entry from each row. Returns whether all entries are numbers below infinity."""
    valid = True
    for t in range(rows.shape[0]):
        most = -np.inf
        for k in range(rows.shape[1]):
            valid &= rows[t, k] < np.inf
            most = max(most, rows[t, k])
        largest[t] = most
        for k in range(rows.shape[1]):
            impossible[t, k] = rows[t, k] == -np.inf
            rows[t, k] = -np.inf if impossible[t, k] else rows[t, k] - most
    return valid


@inner
def _least_positive(messages, slot, k):
    least = np.inf
    for r in range(messages.shape[2]):
        if 0.0 < messages[slot, k, r] < least:
            least = messages[slot, k, r]
    return least


@inner
def _forward(chain, probs, impossible, first, length, scratch, ends, keep, leak):
    """Filters a sequence. Returns its log-likelihood and whether an entry may have been lost."""
    # References to arrays are counted, which takes longer than a row of a message. Hence the loops below contain
    # neither attributes nor calls.
    initial, durations, jumps, least_of = chain.initial, chain.durations, chain.jumps, chain.least
    messages, factors, entering = scratch.messages, scratch.factors, scratch.entering
    (size, longest), padded = durations.shape, ends.shape[1]
    jumps_at, entering_at, ends_at = jumps.ctypes.data, entering.ctypes.data, ends.ctypes.data
    total_of, bound = np.empty(size), np.empty(size)
    log_likelihood, lost = 0.0, chain.doubtful
    for k in range(size):
        total_of[k] = 0.0
        for r in range(longest):
            entry = initial[k, r] + leak
            messages[0, k, r] = entry
            total_of[k] += entry
        bound[k] = _least_positive(messages, 0, k)
    for t in range(length):
        slot, following = (t, t + 1) if keep else (t % 2, (t + 1) % 2)
        total = 0.0
        for k in range(size):
            total += probs[first + t, k] * total_of[k]
            lost |= probs[first + t, k] == 0.0 and total_of[k] > 0.0 and not impossible[first + t, k]
        if not total > COLLAPSE:
            return np.nan, True
        log_likelihood += np.log(total)
        inverse = 1.0 / total
        for k in range(size):
            factors[t, k] = probs[first + t, k] * inverse
            ends[first + t, k] = factors[t, k] * messages[slot, k, 0]
        if t + 1 == length:
            break
        multiply(
            0.0, entering_at + 8 * (t + 1) * padded, ends_at + 8 * (first + t) * padded, padded, 1, jumps_at, padded, 1,
            padded, size,
        )  # fmt: skip
        for j in range(size):
            stay, enter = factors[t, j], entering[t + 1, j]
            least, entered = enter * least_of[0, j], enter * least_of[1, j] if enter > 0.0 else np.inf
            kept = stay * bound[j] if stay > 0.0 else np.inf
            if kept < FLUSH and least < FLUSH * _MARGIN:
                kept = stay * _least_positive(messages, slot, j)
                lost |= kept < FLUSH
            lost |= entered < FLUSH
            bound[j] = least if least >= FLUSH else max(min(kept, entered), FLUSH)
            total = 0.0
            for r in range(longest - 1):
                entry = stay * messages[slot, j, r + 1] + enter * durations[j, r] + leak
                entry = entry if entry >= FLUSH else 0.0
                messages[following, j, r] = entry
                total += entry
            entry = enter * durations[j, longest - 1] + leak
            entry = entry if entry >= FLUSH else 0.0
            messages[following, j, longest - 1] = entry
            total_of[j] = total + entry
    return log_likelihood, lost


@inner
def _backward(chain, weight, first, length, scratch, sums, out):
    """Smooths a sequence and adds its counts."""
    durations, transposed, starts, counted = chain.durations, chain.transposed, sums.initial, sums.durations
    messages, factors, entering, kappa, ending = (
        scratch.messages, scratch.factors, scratch.entering, scratch.kappa, scratch.ending,
    )  # fmt: skip
    posteriors, leaving = out.posteriors, out.leaving
    (size, longest), padded = durations.shape, leaving.shape[1]
    ending_at, leaving_at, transposed_at = ending.ctypes.data, leaving.ctypes.data, transposed.ctypes.data
    kappa[length % 2] = 1.0
    ending[:] = 1.0
    scale = 1.0
    for t in range(length - 1, -1, -1):
        now, before, row, whole = t % 2, (t + 1) % 2, first + t, 0.0
        for k in range(size):
            factor, enter = factors[t, k] * scale, weight * entering[t, k]
            value = factor * ending[k] if messages[t, k, 0] > 0.0 else 0.0
            kappa[now, k, 0] = value
            counted[k, 0] += enter * value
            left, posterior = durations[k, 0] * value, messages[t, k, 0] * value
            for r in range(1, longest):
                message = messages[t, k, r]
                value = factor * kappa[before, k, r - 1] if message > 0.0 else 0.0
                kappa[now, k, r] = value
                left += durations[k, r] * value
                posterior += message * value
                counted[k, r] += enter * value
            posteriors[row, k], leaving[row, k] = posterior, left
            whole += posterior
        scale = 1.0 / whole  # Only rounding makes it differ from one.
        if t > 0:
            multiply(0.0, ending_at, leaving_at + 8 * row * padded, padded, 1, transposed_at, padded, 1, padded, size)
        for k in range(size):
            posteriors[row, k] *= weight * scale
            leaving[row, k] *= weight if t > 0 else 0.0
    for k in range(size):
        for r in range(longest):
            starts[k, r] += weight * messages[0, k, r] * kappa[0, k, r]


@kernel
def run_stays(lane, lanes, offsets, weights, chain, probs, impossible, smooth, scratch, sums, out):
    """Runs every `lanes`-th sequence of a batch."""
    size, longest = chain.durations.shape
    leak = min(size * longest * FLUSH, COLLAPSE)
    for n in range(lane, offsets.shape[0] - 1, lanes):
        first, length = offsets[n], offsets[n + 1] - offsets[n]
        out.log_likelihood[n] = 0.0
        if length == 0:
            continue
        found, lost = _forward(chain, probs, impossible, first, length, scratch, out.ends, smooth, 0.0)
        if lost and not np.isnan(found):
            leaked, _ = _forward(chain, probs, impossible, first, length, scratch, out.ends, smooth, leak)
            if leaked - found <= NEGLIGIBLE:
                _forward(chain, probs, impossible, first, length, scratch, out.ends, smooth, 0.0)
            else:
                found = np.nan
        out.log_likelihood[n] = found
        if np.isnan(found):
            continue
        if not smooth:
            slot = (length - 1) % 2
            for k in range(size):
                for r in range(longest):
                    out.last[n, k * longest + r] = scratch.factors[length - 1, k] * scratch.messages[slot, k, r]
        elif weights[n] != 0.0:
            scratch.entering[0] = 0.0
            _backward(chain, weights[n], first, length, scratch, sums, out)
