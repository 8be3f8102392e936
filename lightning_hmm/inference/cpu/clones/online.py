"""Kernel for many updates of online EM in cloned hidden Markov models. The names are those of `forward_backward`."""

from __future__ import annotations

import numpy as np

from lightning_hmm.inference.cpu.cache import kernel
from lightning_hmm.inference.cpu.clones.plan import Arrays, find_pair
from lightning_hmm.inference.cpu.updates import Part, update

_MOST_ENTRIES = 1 << 16  # largest number of stored transitions for which the compiled pass is used


@kernel
def online_updates(
    batch, batch_first, offsets, symbols, weights, layout, parts, discount, step, sizes, data_size, log_likelihood
):
    """Runs online EM for small models: one update for each batch from number `batch` on, after `step` earlier updates.

    `parts` are changed in place. Returns the number of the first batch that was not used, because the probability of
    one of its steps underflows.
    """
    log_initial, probs = parts[0].values, parts[1].values
    initial_counts, counts = parts[0].counts, parts[1].counts
    starts, pair_first, _, pair_target, bound_base, bounds, columns = layout
    widest, longest = 0, 0
    for v in range(starts.shape[0] - 1):
        widest = max(widest, starts[v + 1] - starts[v])
    for n in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[n + 1] - offsets[n])
    alpha, totals, back, kappa, blocks = (
        np.empty((longest, widest)),
        np.empty(longest),
        np.empty(widest),
        np.empty(widest),
        np.empty(longest, np.int64),
    )
    while batch < batch_first.shape[0] - 1:
        initial_counts[:], counts[:] = 0, 0
        for n in range(batch_first[batch], batch_first[batch + 1]):
            first, length, score, product = offsets[n], offsets[n + 1] - offsets[n], 0.0, 1.0
            for t in range(length):
                v = np.int64(symbols[first + t])
                num_clones = starts[v + 1] - starts[v]
                total = 0.0
                if t == 0:
                    for c in range(num_clones):
                        alpha[0, c] = np.exp(log_initial[starts[v] + c])
                        total += alpha[0, c]
                else:
                    u = np.int64(symbols[first + t - 1])
                    p = find_pair(u, v, pair_first, pair_target)
                    if p < 0:
                        return batch
                    stride = pair_first[u + 1] - pair_first[u] + 1
                    blocks[t] = bound_base[u] + p - pair_first[u]
                    for c in range(num_clones):
                        alpha[t, c] = 0.0
                    for i in range(starts[u + 1] - starts[u]):
                        x, e = alpha[t - 1, i], bounds[blocks[t] + i * stride]
                        if x == 0:
                            continue
                        if columns.shape[0] > 0:
                            for k in range(e, bounds[blocks[t] + i * stride + 1]):
                                alpha[t, columns[k]] += x * probs[k]
                        else:
                            for c in range(num_clones):
                                alpha[t, c] += x * probs[e + c]
                    for c in range(num_clones):
                        total += alpha[t, c]
                if not total > 1e-200:
                    return batch
                totals[t] = total
                for c in range(num_clones):
                    alpha[t, c] = alpha[t, c] / total if alpha[t, c] >= 1e-290 * total else 0.0
                product *= total
                if product < 1e-100:
                    score += np.log(product)
                    product = 1.0
            log_likelihood[n] = score + np.log(product)
            for c in range(widest):
                back[c] = 1.0
            for t in range(length - 1, -1, -1):
                v = np.int64(symbols[first + t])
                num_clones = starts[v + 1] - starts[v]
                total = 0.0
                for c in range(num_clones):
                    total += alpha[t, c] * back[c]
                if t == 0:
                    for c in range(num_clones):
                        initial_counts[starts[v] + c] += weights[n] * alpha[0, c] * back[c] / total
                    break
                for c in range(num_clones):
                    kappa[c] = back[c] / (total * totals[t]) if alpha[t, c] > 0 else 0.0
                u = np.int64(symbols[first + t - 1])
                stride = pair_first[u + 1] - pair_first[u] + 1
                for i in range(starts[u + 1] - starts[u]):
                    x, e = alpha[t - 1, i] * weights[n], bounds[blocks[t] + i * stride]
                    back[i] = 0.0
                    if alpha[t - 1, i] == 0:
                        continue
                    if columns.shape[0] > 0:
                        for k in range(e, bounds[blocks[t] + i * stride + 1]):
                            back[i] += probs[k] * kappa[columns[k]]
                            counts[k] += x * probs[k] * kappa[columns[k]]
                    else:
                        for c in range(num_clones):
                            back[i] += probs[e + c] * kappa[c]
                            counts[e + c] += x * probs[e + c] * kappa[c]
        batch += 1
        step += 1
        update(parts, sizes, initial_counts.sum(), step, discount, data_size)
    return batch


class ClonesPass:
    """Compiled pass of online EM for the initial probabilities and the transitions between clones.

    Args:
        layout: Layout of the stored transitions.
        num_entries: Number of stored transitions.
        symbols: (steps,) symbols from 0 to V. The number V represents a missing symbol.
        offsets: (N + 1,) boundaries of the sequences.
        weights: (N,) weights of the sequences.
        batch_size: Number of sequences per update.
    """

    def __init__(
        self,
        layout: Arrays,
        num_entries: int,
        symbols: np.ndarray,
        offsets: np.ndarray,
        weights: np.ndarray,
        batch_size: int,
    ) -> None:
        num_sequences, num_symbols = offsets.shape[0] - 1, layout.starts.shape[0] - 1
        self.counts = [np.zeros(int(layout.starts[-1])), np.zeros(num_entries)]
        self.scores = np.zeros(num_sequences)
        self._is_plain = num_entries <= _MOST_ENTRIES and not bool((symbols == num_symbols).any())
        batch_first = np.minimum(np.arange(-(-num_sequences // batch_size) + 1) * batch_size, num_sequences)
        self._data = batch_first, offsets, np.ascontiguousarray(symbols), weights, layout

    def __call__(
        self, batch: int, parts: tuple[Part, ...], discount: float, step: int, sizes: np.ndarray, data_size: float
    ) -> int:
        """Runs updates from batch number `batch` on, after `step` earlier ones.

        Returns the first batch that was not used.
        """
        if not self._is_plain:
            return batch
        return int(online_updates(batch, *self._data, parts, discount, step, sizes, data_size, self.scores))
