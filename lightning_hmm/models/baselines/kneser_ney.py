r"""Interpolated Kneser-Ney n-grams.

.. math:: p_m(x \mid c) = \frac{\max(N(cx) - D_m, 0)}{N(c\,\cdot)}
    + \frac{D_m N_{1+}(c\,\cdot)}{N(c\,\cdot)} p_{m-1}(x \mid c')

for contexts c of m - 1 symbols, where c' is the context without its first symbol and :math:`p_0` is uniform. N is the
count of an n-gram in the highest order, and the number of different symbols before it in lower orders. For a context
that does not occur in the training data, :math:`p_m = p_{m-1}`.

References:
    Kneser and Ney: Improved backing-off for m-gram language modeling, 1995.
    Chen and Goodman: An empirical study of smoothing techniques for language modeling, 1999.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.sequences import Sequences


class _Order(NamedTuple):
    """The n-grams of one length. The sorted `keys` are number of the context x V + symbol."""

    keys: np.ndarray
    counts: np.ndarray
    context_totals: np.ndarray
    context_types: np.ndarray
    discount: float


class KneserNey:
    """An n-gram language model with interpolated Kneser-Ney smoothing.

    Use it as a baseline for models of symbol sequences. It is fitted by counting, in O(order x symbols log symbols)
    time, and does not use a Trainer.

    Args:
        num_symbols: Number of symbols V.
        order: Length of the longest n-gram.

    Example:
        >>> from lightning_hmm.models import KneserNey
        >>> model = KneserNey(num_symbols=3, order=2).fit([[0, 1, 0, 2, 0, 1, 0, 1]])
        >>> model.predict_next([[0]]).round(2)
        array([[0.15, 0.68, 0.18]])
    """

    def __init__(self, num_symbols: int, order: int = 6) -> None:
        if num_symbols < 1:
            raise ValueError(f"`num_symbols` must be at least 1, but is {num_symbols} instead.")
        if not 1 <= order <= 20:
            raise ValueError(f"`order` must be from 1 to 20, but is {order} instead.")
        self.num_symbols, self.order = num_symbols, order
        self._orders: list[_Order] = []

    def fit(self, sequences: Any) -> KneserNey:
        """Counts the n-grams of the sequences. No n-gram extends over the end of a sequence.

        A sequence of weight w counts w times. Weights must be whole numbers, because the discounts are defined for
        whole counts.
        """
        sequences = (sequences if isinstance(sequences, Sequences) else Sequences.from_list(sequences)).counted()
        weights = np.ones(len(sequences)) if sequences.weights is None else sequences.weights.cpu().numpy()
        if np.any(weights != np.floor(weights)):
            n = int(np.flatnonzero(weights != np.floor(weights))[0])
            raise ValueError(
                f"`sequences` must have whole numbers as weights for n-grams, but sequence {n} has {weights[n]:g}."
            )
        symbols, position = self._arrays(sequences)
        repeats = np.repeat(weights.astype(np.int64), sequences.lengths.numpy())
        if not symbols.shape[0]:
            raise ValueError("`sequences` must hold at least one symbol, but hold none.")
        found = []
        # The number of the n-gram that ends at each position, or -1 if it would start before the sequence.
        numbers = np.zeros(symbols.shape[0], np.int64)
        for length in range(1, self.order + 1):
            context = np.append(-1, numbers[:-1]) if length > 1 else numbers
            valid = np.flatnonzero((position >= length - 1) & (context >= 0))
            keys, first, inverse = np.unique(
                context[valid] * self.num_symbols + symbols[valid], return_index=True, return_inverse=True
            )
            counts = np.bincount(inverse, repeats[valid], keys.shape[0]).astype(np.int64)
            suffix = numbers[valid[first]]
            numbers = np.full(symbols.shape[0], -1)
            numbers[valid] = inverse
            begins = np.zeros(keys.shape[0], np.int64)
            # The start of a sequence counts as one more symbol before an n-gram.
            begins[numbers[valid[position[valid] == length - 1]]] = 1
            found.append((keys, counts, suffix, begins))
        self._orders = []
        num_contexts = 1
        for n, (keys, counts, _, begins) in enumerate(found):
            if not keys.shape[0]:  # No sequence is as long as this.
                break
            if n + 1 < len(found):
                counts = np.bincount(found[n + 1][2], minlength=keys.shape[0]) + begins  # different symbols before it
            once, twice = int((counts == 1).sum()), int((counts == 2).sum())
            discount = once / (once + 2 * twice) if once else 0.0
            context = keys // self.num_symbols
            totals = np.bincount(context, counts, num_contexts)
            self._orders.append(_Order(keys, counts, totals, np.bincount(context, minlength=num_contexts), discount))
            num_contexts = keys.shape[0]
        return self

    def _arrays(self, sequences: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the symbols and the position of each in its sequence."""
        sequences = sequences if isinstance(sequences, Sequences) else Sequences.from_list(sequences)
        sequences.check(self.num_symbols, None)
        symbols = sequences.values.cpu().numpy()
        if symbols.shape[0] and symbols.min() < 0:
            n, t = sequences.locate(int(np.argmin(symbols)))
            raise ValueError(
                f"`sequences` must have no missing symbols for n-grams, but position {t} of sequence {n} is missing."
            )
        offsets = sequences.offsets.numpy()
        return symbols, np.arange(symbols.shape[0]) - np.repeat(offsets[:-1], np.diff(offsets))

    def step_probs(self, sequences: Any) -> np.ndarray:
        """Returns (steps,) p(x_t | x_1:t-1)."""
        if not self._orders:
            raise RuntimeError("The n-grams are not counted yet. Call `fit` first.")
        symbols, position = self._arrays(sequences)
        probs = np.full(symbols.shape[0], 1 / self.num_symbols)
        numbers = np.zeros(symbols.shape[0], np.int64)
        for length, order in enumerate(self._orders, 1):
            context = np.append(-1, numbers[:-1]) if length > 1 else numbers
            context = np.where(position >= length - 1, context, -1)
            keys = context * self.num_symbols + symbols
            place = np.minimum(np.searchsorted(order.keys, keys), order.keys.shape[0] - 1)
            numbers = np.where((context >= 0) & (order.keys[place] == keys), place, -1)
            counts = np.where(numbers >= 0, order.counts[numbers], 0)
            total = np.where(context >= 0, order.context_totals[context], 0)
            known = total > 0
            with np.errstate(invalid="ignore", divide="ignore"):
                higher = (
                    np.maximum(counts - order.discount, 0) + order.discount * order.context_types[context] * probs
                ) / total
            probs = np.where(known, higher, probs)
        return probs

    def predict_next(self, sequences: Any) -> np.ndarray:
        """Returns the (N, V) distributions of the symbols after the ends of the sequences."""
        if not self._orders:
            raise RuntimeError("The n-grams are not counted yet. Call `fit` first.")
        sequences = sequences if isinstance(sequences, Sequences) else Sequences.from_list(sequences)
        symbols, _ = self._arrays(sequences)
        ends, lengths = sequences.offsets.numpy()[1:], sequences.lengths.numpy()
        probs = np.full((len(sequences), self.num_symbols), 1 / self.num_symbols)
        for length, order in enumerate(self._orders, 1):
            context = np.where(lengths >= length - 1, 0, -1)
            for back in range(
                length - 1, 0, -1
            ):  # Finds the number of the last length - 1 symbols, from left to right.
                here = np.flatnonzero(context >= 0)
                keys = context[here] * self.num_symbols + symbols[ends[here] - back]
                context[here] = _found(self._orders[length - 1 - back].keys, keys)
            here = np.flatnonzero(context >= 0)
            context = context[here, None]
            place = _found(order.keys, context * self.num_symbols + np.arange(self.num_symbols))
            counts, total = np.where(place >= 0, order.counts[place], 0), order.context_totals[context]
            with np.errstate(invalid="ignore", divide="ignore"):
                higher = (
                    np.maximum(counts - order.discount, 0) + order.discount * order.context_types[context] * probs[here]
                ) / total
            probs[here] = np.where(total > 0, higher, probs[here])
        return probs

    def score(self, sequences: Any) -> Tensor:
        """Returns the (N,) natural log-likelihoods of the sequences, including their first symbols."""
        sequences = sequences if isinstance(sequences, Sequences) else Sequences.from_list(sequences)
        sums = np.append(0.0, np.cumsum(np.log(self.step_probs(sequences))))
        offsets = sequences.offsets.numpy()
        return torch.from_numpy(sums[offsets[1:]] - sums[offsets[:-1]])

    def bits_per_symbol(self, sequences: Any) -> float:
        """Returns the weighted negative log-likelihood of all sequences per symbol, in base 2."""
        sequences = sequences if isinstance(sequences, Sequences) else Sequences.from_list(sequences)
        total = float(sequences.weighted(self.score(sequences)).sum())
        return -total / max(float(sequences.num_observed()), 1.0) / math.log(2)


def _found(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the positions of the keys in the sorted array `known`, or -1 for keys that it does not contain."""
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, place, -1)
