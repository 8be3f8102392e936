r"""Forward-backward with explicit durations, for evidence of the K classes.

The messages are those of the operator `Duration`, but a step takes one pass over them in each direction. The prediction a
of step t has an entry for each class k and number of remaining steps r. With the factor :math:`f_k = b_k / c`, where b are
the emission probabilities and c is the probability of the step,

.. math:: a'_{kr} = f_k a_{k,r+1} + e_k p_{kr}, \qquad e_j = \sum_k f_k a_{k0} J_{kj}

The backward messages :math:`\kappa_{kr} = f_k \beta_{kr}` move in the other direction, and all counts are sums of products
of a or e with them. The emission of a class is used once for all of its states.

A prediction below `FLUSH` is set to zero. A lower bound of the positive entries of each class reveals where that may
happen. The forward pass is then repeated with a tiny number added to each entry. If this changes the likelihood, or if a
step leaves the range of floats, the log-likelihood of the sequence is NaN, and the caller computes it by other means.
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
def _advance(messages, slot, following, k, stay, enter, durations, leak):
    """Predicts the next entries of class k and returns their sum. Views of rows are avoided: they cost as much as a row."""
    longest, total = durations.shape[1], 0.0
    for r in range(longest - 1):
        entry = stay * messages[slot, k, r + 1] + enter * durations[k, r] + leak
        entry = entry if entry >= FLUSH else 0.0
        messages[following, k, r] = entry
        total += entry
    entry = enter * durations[k, longest - 1] + leak
    entry = entry if entry >= FLUSH else 0.0
    messages[following, k, longest - 1] = entry
    return total + entry


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
    size, padded = probs.shape[1], ends.shape[1]
    total_of, bound = np.empty(size), np.empty(size)
    log_likelihood, lost = 0.0, chain.doubtful
    for k in range(size):
        total_of[k], bound[k] = 0.0, np.inf
        for r in range(chain.initial.shape[1]):
            entry = chain.initial[k, r] + leak
            scratch.messages[0, k, r] = entry
            total_of[k] += entry
            if 0.0 < entry < bound[k]:
                bound[k] = entry
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
            scratch.factors[t, k] = probs[first + t, k] * inverse
            ends[first + t, k] = scratch.factors[t, k] * scratch.messages[slot, k, 0]
        if t + 1 == length:
            break
        multiply(
            0.0, scratch.entering.ctypes.data + 8 * (t + 1) * padded, ends.ctypes.data + 8 * (first + t) * padded, padded, 1,
            chain.jumps.ctypes.data, padded, 1, padded, size,
        )  # fmt: skip
        for j in range(size):
            stay, enter = scratch.factors[t, j], scratch.entering[t + 1, j]
            least, entered = enter * chain.least[0, j], enter * chain.least[1, j] if enter > 0.0 else np.inf
            kept = stay * bound[j] if stay > 0.0 else np.inf
            if kept < FLUSH and least < FLUSH * _MARGIN:
                kept = stay * _least_positive(scratch.messages, slot, j)
                lost |= kept < FLUSH
            lost |= entered < FLUSH
            bound[j] = least if least >= FLUSH else max(min(kept, entered), FLUSH)
            total_of[j] = _advance(scratch.messages, slot, following, j, stay, enter, chain.durations, leak)
    return log_likelihood, lost


@inner
def _retreat(kappa, now, before, messages, t, k, durations, counted, factor, first, entering):
    """The backward messages of class k at step t, from those of the next step. Returns their sums of products with the
    durations and with the predictions, and adds their products with `entering` to `counted`."""
    longest = durations.shape[1]
    value = first if messages[t, k, 0] > 0.0 else 0.0
    kappa[now, k, 0] = value
    counted[k, 0] += entering * value
    leaving, posterior = durations[k, 0] * value, messages[t, k, 0] * value
    for r in range(1, longest):
        value, message = factor * kappa[before, k, r - 1], messages[t, k, r]
        value = value if message > 0.0 else 0.0
        kappa[now, k, r] = value
        leaving += durations[k, r] * value
        posterior += message * value
        counted[k, r] += entering * value
    return leaving, posterior


@inner
def _backward(chain, weight, first, length, scratch, sums, out):
    """Smooths a sequence and adds its counts."""
    size, padded = out.posteriors.shape[1], out.leaving.shape[1]
    scratch.kappa[length % 2] = 1.0
    scratch.ending[:] = 1.0
    scale = 1.0
    for t in range(length - 1, -1, -1):
        total, row = 0.0, first + t
        for k in range(size):
            factor = scratch.factors[t, k] * scale
            leaving, posterior = _retreat(
                scratch.kappa, t % 2, (t + 1) % 2, scratch.messages, t, k, chain.durations, sums.durations, factor,
                factor * scratch.ending[k], weight * scratch.entering[t, k],
            )  # fmt: skip
            out.posteriors[row, k], out.leaving[row, k] = posterior, leaving
            total += posterior
        scale = 1.0 / total  # Only rounding makes it differ from one.
        if t > 0:
            multiply(
                0.0, scratch.ending.ctypes.data, out.leaving.ctypes.data + 8 * row * padded, padded, 1,
                chain.transposed.ctypes.data, padded, 1, padded, size,
            )  # fmt: skip
        for k in range(size):
            out.posteriors[row, k] *= weight * scale
            out.leaving[row, k] *= weight if t > 0 else 0.0
    for k in range(size):
        for r in range(sums.initial.shape[1]):
            sums.initial[k, r] += weight * scratch.messages[0, k, r] * scratch.kappa[0, k, r]


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
