r"""Contexts of a few symbols as states, for the initialization and smoothing of cloned HMMs of text.

A context is a string of up to n symbols that occurs in the training data. It is a clone of its last symbol: from
context c, symbol x leads to the longest context that is a suffix of cx. Kneser-Ney n-grams are therefore a cloned HMM.

- `Contexts.encode` replaces the symbols of a text by contexts. A `ClonedHMM` of these has clones of contexts. It has
  fewer transitions to learn, by a factor of hundreds for pairs of letters, but different contexts share no clones.
- `BackOff` combines trained clones with contexts. After a transition that does not occur in the training data, the
  model continues in contexts, from which it can return to the clones.

References:
    MacKay and Peto: A hierarchical Dirichlet language model, 1995 (the weight of the lower order).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lightning_hmm import inference
from lightning_hmm.inference.cloned import Layout
from lightning_hmm.inference.results import impossible_message
from lightning_hmm.models.baselines.kneser_ney import KneserNey
from lightning_hmm.models.cloned import ClonedHMM
from lightning_hmm.sequences import Sequences

EVEN = 1e-9  # share of the uniform distribution in the predictions of a context


class Contexts:
    """The strings of up to `order` symbols that occur in training sequences.

    Args:
        sequences: Sequences of symbols, of which none is missing. Sequences of weight zero are ignored.
        num_symbols: Number of symbols V.
        order: Length of the longest context.
        min_count: Contexts of more than one symbol with a smaller weighted count are left out.

    Attributes:
        symbols: (C,) The last symbol of each context. Contexts are sorted by length; the first V have one symbol.
        lengths: (C,) The length of each context.
    """

    def __init__(self, sequences: Sequences, num_symbols: int, order: int, min_count: int = 1) -> None:
        if order < 1 or (num_symbols + 1) ** order >= 2**63:
            raise ValueError(
                f"`order` must be at least 1 and such that contexts of {num_symbols} symbols can be numbered, "
                f"but is {order} instead."
            )
        if min_count < 1:
            raise ValueError(f"`min_count` must be at least 1, but is {min_count} instead.")
        self.num_symbols, self.order = num_symbols, order
        # For each length, the sorted codes. A code is a number in base V + 1 whose last digit is the last symbol.
        self._codes = [np.arange(1, num_symbols + 1)]
        sequences = sequences.counted()
        weights = _step_weights(sequences)
        for length, (codes, there) in enumerate(self._running(sequences), 1):
            found, place = np.unique(codes[there], return_inverse=True)
            if length > 1:
                self._codes.append(found[np.bincount(place, weights[there], len(found)) >= min_count])
        self._first = np.append(0, np.cumsum([len(codes) for codes in self._codes]))
        self.lengths = np.repeat(np.arange(1, order + 1), np.diff(self._first))
        self._all = np.concatenate(self._codes)
        self.symbols = self._all % (num_symbols + 1) - 1

    def __len__(self) -> int:
        return len(self._all)

    def _running(self, sequences: Sequences) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields for each length the codes of the strings that end at each step, and whether they are complete."""
        sequences.check(self.num_symbols, None)
        symbols, offsets = sequences.values.cpu().numpy(), sequences.offsets.numpy()
        if len(symbols) and symbols.min() < 0:
            n, t = sequences.locate(int(np.argmin(symbols)))
            raise ValueError(
                f"`sequences` must have no missing symbols for contexts, but position {t} of sequence {n} is missing."
            )
        position = np.arange(len(symbols)) - np.repeat(offsets[:-1], np.diff(offsets))
        codes = np.zeros(len(symbols), np.int64)
        for length in range(self.order):
            codes = (
                codes
                + (np.append(np.zeros(length, np.int64), symbols)[: len(symbols)] + 1)
                * (self.num_symbols + 1) ** length
            )
            yield codes, position >= length

    def _find(self, codes: np.ndarray, length: int) -> np.ndarray:
        """Returns the numbers of the contexts of one length with these codes, or -1 if there is none."""
        known = self._codes[length - 1]
        place = np.minimum(np.searchsorted(known, codes), max(len(known) - 1, 0))
        return (
            np.where(known[place] == codes, place + self._first[length - 1], -1)
            if len(known)
            else np.full(len(codes), -1)
        )

    def encode(self, sequences: Sequences) -> Sequences:
        """Returns the longest context that ends at each step and starts in the same sequence."""
        found = np.zeros(sequences.num_steps, np.int64)
        for length, (codes, there) in enumerate(self._running(sequences), 1):
            numbers = np.where(there, self._find(codes, length), -1)
            found = np.where(numbers >= 0, numbers, found)
        return sequences.with_values(torch.from_numpy(found))

    def following(self) -> np.ndarray:
        """Returns the (C, V) contexts that the symbols lead to."""
        base, targets = self.num_symbols + 1, np.full((len(self), self.num_symbols), -1)
        for length in range(1, self.order + 1):  # Longer contexts replace shorter ones.
            enough = np.flatnonzero(self.lengths >= length - 1)
            codes = (self._all[enough] % base ** (length - 1))[:, None] * base + np.arange(1, base)
            numbers = self._find(codes.reshape(-1), length).reshape(codes.shape)
            targets[enough] = np.where(numbers >= 0, numbers, targets[enough])
        return targets

    def strings(self) -> Sequences:
        """Returns the symbols of each context."""
        places = np.arange(int(self.lengths.sum())) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        powers = (self.num_symbols + 1) ** (np.repeat(self.lengths, self.lengths) - 1 - places)
        return Sequences.from_lengths(
            np.repeat(self._all, self.lengths) // powers % (self.num_symbols + 1) - 1, self.lengths
        )


class BackOff:
    r"""Clones of trained models that back off to contexts, so that no sequence is impossible.

    .. math:: A_{ij} = \frac{n_{ij}}{n_i + s}, \quad
        A_{i, cx} = \frac{s}{n_i + s} \sum_c p(c \mid i)\, p(x \mid c), \quad
        A_{c, cx} = (1 - r)\, p(x \mid c), \quad A_{cj} = r\, p(x \mid c)\, p(j \mid cx)

    with the strength s, the share r of `returning`, expected counts n and Kneser-Ney n-grams p(x | c). On the most
    probable paths of the models through the training data, p(c | i) is the frequency of context c at clone i, and
    p(j | cx) that of clone j after context c and symbol x. If x does not follow c in the data, r is zero. Kneser-Ney
    rules out unseen symbols if no n-gram occurs exactly once, so p(x | c) contains a share of 1e-9 of the uniform
    distribution. With several models, the contexts lead back to each of them with the same probability.

    Args:
        models: Models trained on `sequences`. Their best restarts are used.
        sequences: The training data, in symbols.
        num_symbols: Number of symbols V.
        upper: Contexts that the models describe, if they were trained on `upper.encode(sequences)`.
    """

    def __init__(
        self, models: Sequence[ClonedHMM], sequences: Sequences, num_symbols: int, upper: Contexts | None = None
    ) -> None:
        sequences = sequences.counted()
        self.sequences, self.num_symbols, self.arithmetic = sequences, num_symbols, models[0].arithmetic
        data = sequences if upper is None else upper.encode(sequences)
        self._counted = [_counted(model, data) for model in models]
        self._symbols = [
            model.layout.symbols.numpy() if upper is None else upper.symbols[model.layout.symbols.numpy()]
            for model in models
        ]

    def joined(
        self, lower: Contexts, strength: float = 0.5, returning: float = 0.1, symbol_names: list[str] | None = None
    ) -> ClonedHMM:
        """Returns the combined cloned HMM.

        Args:
            lower: The contexts to back off to.
            strength: Weight of the lower order, in counts.
            returning: Share of the transitions of contexts that leads back to clones.
            symbol_names: Names of the symbols, for a model with a vocabulary.
        """
        if not strength > 0:
            raise ValueError(f"`strength` must be positive, but is {strength} instead.")
        if not 0 <= returning < 1:
            raise ValueError(f"`returning` must be at least 0 and below 1, but is {returning} instead.")
        num_symbols, size = self.num_symbols, len(lower)
        steps, weights = self.sequences.values.numpy(), _step_weights(self.sequences)
        context = lower.encode(self.sequences).values.numpy()
        inside = np.ones(len(context), bool)
        inside[self.sequences.offsets[1:].numpy() - 1] = False
        before = np.flatnonzero(inside)
        following = lower.following()
        probs = KneserNey(num_symbols, lower.order + 1).fit(self.sequences).predict_next(lower.strings())
        probs = (1 - EVEN) * probs + EVEN / num_symbols
        seen = np.bincount(
            context[before] * num_symbols + steps[before + 1], weights[before], size * num_symbols
        ).reshape(size, num_symbols)
        back = np.where(seen > 0, returning, 0.0)
        entries = [(np.repeat(np.arange(size), num_symbols), following.reshape(-1), (probs * (1 - back)).reshape(-1))]
        first = size
        for (rows, columns, counts, path), own in zip(self._counted, self._symbols, strict=True):
            num_clones = len(own)
            visits = np.bincount(rows, counts, num_clones)
            entries.append((first + rows, first + columns, counts / (visits[rows] + strength)))
            clone, where, often = _pairs(path, context, size, weights)
            often = often / np.bincount(clone, often, num_clones)[clone]
            # Clones that are on no path have the context of their symbol alone.
            never = np.setdiff1d(np.arange(num_clones), clone)
            clone, where = np.append(clone, never), np.append(where, own[never])
            often = np.append(often, np.ones(len(never)))
            shares = (often * (strength / (visits + strength))[clone])[:, None] * probs[where]
            entries.append(
                _summed(np.repeat(first + clone, num_symbols), following[where].reshape(-1), shares.reshape(-1), size)
            )
            where, clone, often = _pairs(context[before], path[before + 1], num_clones, weights[before])
            symbol = own[clone]
            entries.append(
                (
                    where,
                    first + clone,
                    probs[where, symbol] * back[where, symbol] / len(self._counted) * often / seen[where, symbol],
                )
            )
            first += num_clones
        sources, targets, values = map(np.concatenate, zip(*entries, strict=True))
        return self._assembled(np.concatenate([lower.symbols, *self._symbols]), sources, targets, values, symbol_names)

    def _assembled(
        self,
        symbols: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        values: np.ndarray,
        symbol_names: list[str] | None,
    ) -> ClonedHMM:
        """Returns the model with these symbols of the states and these transition probabilities."""
        order = np.argsort(symbols, kind="stable")
        new = np.empty_like(order)
        new[order] = np.arange(len(order))
        known = values > 0
        layout, place = Layout.of_entries(
            np.bincount(symbols, minlength=self.num_symbols),
            *(torch.from_numpy(new[ends[known]]) for ends in (sources, targets)),
        )
        single = self.arithmetic == "float32"
        model = ClonedHMM(
            num_states=len(order),
            num_symbols=self.num_symbols,
            arithmetic="float32" if single else "float64",
            symbol_names=symbol_names,
        )
        model.transition.set_layout(layout, torch.from_numpy(values[known])[place][None])
        return model.eval()


@torch.no_grad()
def _counted(model: ClonedHMM, data: Sequences) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the sources, targets and expected counts of the transitions, and the most probable path."""
    layout = model.layout
    statistics = inference.e_step(*model.problem(data), data.weights, dtype=model.message_dtype)
    ruled_out = torch.nonzero(statistics.impossible_step >= 0).flatten()
    if len(ruled_out):
        n = int(ruled_out[0])
        step = impossible_message(data, n, int(statistics.impossible_step[n]))
        raise ValueError(
            f"The training data must be possible under all `models`, but are not under one: {step} "
            "Train it further, or prune it less."
        )
    # The sum of the other counts is negligible compared with the strength.
    counted = torch.nonzero(statistics.counts[0] > 1e-4).flatten()
    rows, columns = layout.states_of(counted)
    return (
        rows.numpy(),
        columns.numpy(),
        statistics.counts[0][counted].double().numpy(),
        model.decode(data).values.numpy(),
    )


def _step_weights(sequences: Sequences) -> np.ndarray:
    """Returns (steps,) the weight of the sequence of each step."""
    if sequences.weights is None:
        return np.ones(sequences.num_steps)
    weights: np.ndarray = sequences.repeat_interleave(sequences.weights).cpu().numpy()
    return weights


def _pairs(
    left: np.ndarray, right: np.ndarray, size: int, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the distinct pairs and the sum of the weights of each. Numbers on the right are below `size`."""
    found, place = np.unique(left * size + right, return_inverse=True)
    return found // size, found % size, np.bincount(place, weights, len(found))


def _summed(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the entries with those in the same place added up."""
    found, place = np.unique(rows * size + columns, return_inverse=True)
    return found // size, found % size, np.bincount(place, values)
