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

from lightning_hmm.inference.cpu.cache import inner, kernel

FLUSH, COLLAPSE, NEGLIGIBLE = 1e-290, 1e-200, 1e-9
_MARGIN = 1e20  # An entry this many times larger than `FLUSH` does not notice that a smaller one is added or not.


class Chain(NamedTuple):
    """Probabilities: initial (K, D), jumps (K, K), durations (K, D) and the smallest of the durations of each class (K,).

    doubtful: Whether a jump is so improbable that it can leave the range of floats unnoticed.
    """

    initial: np.ndarray
    jumps: np.ndarray
    durations: np.ndarray
    least: np.ndarray
    doubtful: bool


class Scratch(NamedTuple):
    """Of a sequence: predictions (slots, K, D), and (T + 1, K) factors, ends of stays and entries into classes.

    kappa: (2, K, D) backward messages.
    """

    messages: np.ndarray
    factors: np.ndarray
    ends: np.ndarray
    entering: np.ndarray
    kappa: np.ndarray


class Sums(NamedTuple):
    """Sums of products of messages: initial (K, D), jumps (K, K) and durations (K, D)."""

    initial: np.ndarray
    jumps: np.ndarray
    durations: np.ndarray


@inner
def _advance(now, following, stay, enter, durations, leak):
    """Predicts the next entries of one class and returns their sum."""
    longest, total = now.shape[0], 0.0
    for r in range(longest - 1):
        entry = stay * now[r + 1] + enter * durations[r] + leak
        entry = entry if entry >= FLUSH else 0.0
        following[r] = entry
        total += entry
    entry = enter * durations[longest - 1] + leak
    following[longest - 1] = entry if entry >= FLUSH else 0.0
    return total + following[longest - 1]


@inner
def _forward(chain, probs, impossible, scratch, keep, leak):
    """Filters a sequence. Returns its log-likelihood and whether an entry may have been lost."""
    length, size = probs.shape
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
            total += probs[t, k] * total_of[k]
            lost |= probs[t, k] == 0.0 and total_of[k] > 0.0 and not impossible[t, k]
        if not total > COLLAPSE:
            return np.nan, True
        log_likelihood += np.log(total)
        for k in range(size):
            scratch.factors[t, k] = probs[t, k] / total
            scratch.ends[t, k] = scratch.factors[t, k] * scratch.messages[slot, k, 0]
        if t + 1 == length:
            break
        for j in range(size):
            enter = 0.0
            for k in range(size):
                enter += scratch.ends[t, k] * chain.jumps[k, j]
            stay = scratch.factors[t, j]
            scratch.entering[t + 1, j] = enter
            kept, least = stay * bound[j] if stay > 0.0 else np.inf, enter * chain.least[j]
            lost |= kept < FLUSH and least < FLUSH * _MARGIN
            lost |= enter > 0.0 and least < FLUSH
            bound[j] = least if least >= FLUSH else min(kept, FLUSH if enter > 0.0 else np.inf)
            total_of[j] = _advance(
                scratch.messages[slot, j], scratch.messages[following, j], stay, enter, chain.durations[j], leak
            )
    return log_likelihood, lost


@inner
def _retreat(before, now, messages, durations, counted, factor, first, entering):
    """The backward messages of one class, `now` from those of the next step. Returns their sums with the durations and
    with the predictions, and adds their products with `entering` to `counted`."""
    longest = now.shape[0]
    value = first if messages[0] > 0.0 else 0.0
    now[0] = value
    counted[0] += entering * value
    leaving, posterior = durations[0] * value, messages[0] * value
    for r in range(1, longest):
        value = factor * before[r - 1]
        value = value if messages[r] > 0.0 else 0.0
        now[r] = value
        leaving += durations[r] * value
        posterior += messages[r] * value
        counted[r] += entering * value
    return leaving, posterior


@inner
def _backward(chain, weight, scratch, sums, posteriors):
    """Smooths a sequence and adds its counts. `posteriors` takes the probabilities of the classes, times weight."""
    length, size = posteriors.shape
    leaving, ending = np.empty(size), np.ones(size)
    scratch.kappa[(length % 2)] = 1.0
    scale = 1.0
    for t in range(length - 1, -1, -1):
        now, before, total = scratch.kappa[t % 2], scratch.kappa[(t + 1) % 2], 0.0
        for k in range(size):
            factor = scratch.factors[t, k] * scale
            leaving[k], posterior = _retreat(
                before[k], now[k], scratch.messages[t, k], chain.durations[k], sums.durations[k], factor,
                factor * ending[k], weight * scratch.entering[t, k],
            )  # fmt: skip
            posteriors[t, k] = posterior
            total += posterior
        scale = 1.0 / total  # Only rounding makes it differ from one.
        for k in range(size):
            posteriors[t, k] *= weight * scale
        if t == 0:
            break
        for k in range(size):
            end, ending[k] = weight * scratch.ends[t - 1, k], 0.0
            for j in range(size):
                ending[k] += chain.jumps[k, j] * leaving[j]
                sums.jumps[k, j] += end * leaving[j]
    for k in range(size):
        for r in range(sums.initial.shape[1]):
            sums.initial[k, r] += weight * scratch.messages[0, k, r] * scratch.kappa[0, k, r]


@kernel
def run_stays(
    lane, lanes, offsets, weights, chain, probs, impossible, smooth, scratch, sums, log_likelihood, last, posteriors
):
    """Runs every `lanes`-th sequence of a batch. `last` takes (N, K D) filtered rows without `smooth`."""
    size, longest = chain.durations.shape
    leak = min(size * longest * FLUSH, COLLAPSE)
    for n in range(lane, offsets.shape[0] - 1, lanes):
        first, end = offsets[n], offsets[n + 1]
        log_likelihood[n] = 0.0
        if first == end:
            continue
        rows, ruled_out = probs[first:end], impossible[first:end]
        found, lost = _forward(chain, rows, ruled_out, scratch, smooth, 0.0)
        if lost and not np.isnan(found):
            leaked, _ = _forward(chain, rows, ruled_out, scratch, smooth, leak)
            found = found if leaked - found <= NEGLIGIBLE else np.nan
            if not np.isnan(found):
                _forward(chain, rows, ruled_out, scratch, smooth, 0.0)
        log_likelihood[n] = found
        if np.isnan(found):
            continue
        if not smooth:
            slot = (end - first - 1) % 2
            for k in range(size):
                for r in range(longest):
                    last[n, k * longest + r] = scratch.factors[end - first - 1, k] * scratch.messages[slot, k, r]
        elif weights[n] != 0.0:
            scratch.entering[0] = 0.0
            _backward(chain, weights[n], scratch, sums, posteriors[first:end])
