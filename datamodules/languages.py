"""Two made-up languages with long dependencies, whose best possible prediction is known exactly.

Both are drawn from a Markov chain whose states emit one symbol each for certain, so the true model is a cloned HMM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from scipy.special import xlogy

from datamodules.base import Part, SequenceDataModule, as_dataset, as_table
from lightning_hmm.columns import symbol_column
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import Vocabulary


class Machine(NamedTuple):
    """A Markov chain whose states emit a symbol each: `symbols` (S,), `transition` (S, S), `initial` (S,)."""

    symbols: np.ndarray
    transition: np.ndarray
    initial: np.ndarray

    def draw(self, length: int, uniforms: np.ndarray) -> np.ndarray:
        """The states of a run, from one uniform number a step."""
        following = [(np.flatnonzero(row), np.cumsum(row[row > 0])) for row in self.transition]
        states, choices, upto = (
            np.empty(length, np.int64),
            np.flatnonzero(self.initial),
            np.cumsum(self.initial[self.initial > 0]),
        )
        for t in range(length):
            states[t] = choices[min(int(np.searchsorted(upto, uniforms[t], side="right")), len(choices) - 1)]
            choices, upto = following[states[t]]
        return states

    def bits_per_symbol(self, symbols: Sequence[int] | np.ndarray) -> float:
        """-log2 p per symbol of a run that starts where the machine does; infinite where it cannot make it."""
        belief, total = self.initial, 0.0
        of_symbol = {int(v): np.flatnonzero(self.symbols == v) for v in np.unique(self.symbols)}
        here = np.arange(len(self.symbols))
        for n, symbol in enumerate(symbols):
            there = of_symbol.get(int(symbol), here[:0])
            belief = belief[there] if n == 0 else belief @ self.transition[np.ix_(here, there)]
            mass, here = belief.sum(), there
            if not mass > 0:
                return math.inf
            belief, total = belief / mass, total - math.log2(mass)
        return total / max(len(symbols), 1)

    def entropy_rate(self) -> float:
        """Bits per symbol, where a state and the next symbol tell the next state: the mean over states of the entropy of their row."""
        size = len(self.symbols)
        equations = np.vstack([self.transition.T - np.eye(size), np.ones(size)])
        share = np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)[0]
        logs = np.log2(np.where(self.transition > 0, self.transition, 1.0))
        return float(-(share[:, None] * self.transition * logs).sum())


class LanguageDataModule(SequenceDataModule):
    """Symbols drawn from a `Machine`: training data in contiguous sequences, validation and test data in one run each.

    Args:
        length: symbols to train on.
        sequence_length: symbols of a training sequence; the batches of online EM are made of these.
        val_length: symbols to validate on.
        test_length: symbols to test on; as many as to train on if not given.
        kwargs: the words of `SequenceDataModule`; the parts are drawn apart, so that its fractions have no say.

    Attributes:
        machine: what training and validation data are drawn from.
        test_machine: what test data are drawn from.
        optimal_bits: bits per symbol of the true model on endless data of the training kind.
    """

    machine: Machine
    test_machine: Machine
    optimal_bits: float

    def __init__(
        self,
        length: int,
        sequence_length: int = 400,
        val_length: int = 5000,
        test_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        sizes = {
            "length": length,
            "sequence_length": sequence_length,
            "val_length": val_length,
            "test_length": length if test_length is None else test_length,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be positive, but is {size} instead.")
        self.length, self.sequence_length, self.val_length, self.test_length = sizes.values()

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        sizes = {"train": self.length, "val": self.val_length, "test": self.test_length}
        parts = {}
        for part, length in sizes.items():
            machine = self.test_machine if part == "test" else self.machine
            uniforms = torch.rand(length, dtype=torch.float64, generator=generator(self.seed, part)).numpy()
            states = machine.draw(length, uniforms)
            lengths = pieces(length, self.sequence_length if part == "train" else length)
            values = (
                Sequences.from_lengths(torch.from_numpy(array), lengths) for array in (machine.symbols[states], states)
            )
            parts[part] = as_dataset(as_table(*values))
        return parts

    def as_training(self, sequences: Sequences) -> Sequences:
        return in_pieces(sequences, self.sequence_length)

    def exact_bits(self, part: Part) -> float:
        """Bits per symbol of the true training model on a part, its first symbol included."""
        values, _, _ = self._source(part)
        return self.machine.bits_per_symbol(values.values.numpy())


def pieces(length: int, piece: int) -> list[int]:
    """The lengths of contiguous pieces; the last may be shorter."""
    return [piece] * (length // piece) + ([length % piece] if length % piece else [])


def in_pieces(sequences: Sequences, piece: int) -> Sequences:
    """Every sequence cut into contiguous ones of at most `piece` steps, each with the weight of the sequence."""
    sizes = [pieces(length, piece) for length in sequences.lengths.tolist()]
    offsets = torch.tensor([0, *itertools.accumulate(itertools.chain.from_iterable(sizes))], dtype=torch.int64)
    weights = (
        None
        if sequences.weights is None
        else sequences.weights.repeat_interleave(torch.tensor(list(map(len, sizes)), dtype=torch.int64))
    )
    return sequences.with_steps(slice(None), offsets, weights)


class ToyMachineDataModule(LanguageDataModule):
    r"""Runs of 3k symbols: a signal 0 or 2, then 3k - 2 noise symbols, then the signal's answer, 1 or 3.

    The noise is 4 or 5, 6, 7, 8 or 9, 10, 11, ... up to 4k or 4k + 1. A signal foretells its answer over all that noise, which
    two clones of each noise symbol can carry and no n-gram of a reasonable order can. Each run has k + 1 bits.

    With `alpha`, the last two groups of noise are gone through again with that probability, so that the length of the noise is
    random; with two of them, each run takes the first with probability `alpha_share`.

    Args:
        k: groups of noise.
        alpha: probability of going back from 8 or 9 to 6, for k = 2; none if not given.
        alpha_share: of the runs that have the first alpha.
        num_runs: training runs, of 3k symbols each without alpha; 1875, 3750, 7500, 15000 for k = 2, 3, 4, 5 if not given.
        length: symbols to train on, instead of a number of runs.
        kwargs: the words of `LanguageDataModule`.
    """

    def __init__(
        self,
        k: int = 3,
        alpha: list[float] | None = None,
        alpha_share: float = 0.95,
        num_runs: int | None = None,
        length: int | None = None,
        **kwargs: Any,
    ) -> None:
        if k < 1:
            raise ValueError(f"`k` must be at least 1, but is {k} instead.")
        alphas = [0.0] if alpha is None else list(alpha)
        if alpha is not None and (k != 2 or len(alpha) not in (1, 2) or not all(0 <= a < 1 for a in alpha)):
            raise ValueError(
                f"`alpha` must be one or two probabilities below 1, with `k` 2, but is {alpha} with `k` {k} instead."
            )
        if not 0 <= alpha_share <= 1:
            raise ValueError(f"`alpha_share` must be a probability, but is {alpha_share} instead.")
        shares = [1.0] if len(alphas) == 1 else [alpha_share, 1 - alpha_share]
        mean_length, bits = _run_length_and_bits(k, alphas, shares)
        num_runs = round(1875 * 2 ** (k - 2)) if num_runs is None else num_runs
        super().__init__(length=round(num_runs * mean_length) if length is None else length, **kwargs)
        self.k = k
        self.vocabulary = Vocabulary(map(str, range(4 * k + 2)))
        self.columns = symbol_column(len(self.vocabulary), self.vocabulary.names)
        self.machine = self.test_machine = _toy_machine(k, alphas, shares)
        self.optimal_bits = bits / mean_length


def _toy_machine(k: int, alphas: list[float], shares: list[float]) -> Machine:
    """States: answers 1 and 3; for each signal and alpha, the signal and its noise."""
    symbols = [1, 3]
    names: dict[tuple[Any, ...], int] = {("answer", 0): 0, ("answer", 2): 1}
    for signal in (0, 2):
        for a in range(len(alphas)):
            for symbol in (signal, *range(4, 4 * k + 2)):
                names[signal, a, symbol] = len(symbols)
                symbols.append(symbol)
    transition, initial = np.zeros((len(symbols), len(symbols))), np.zeros(len(symbols))
    for signal in (0, 2):
        for a, (alpha, share) in enumerate(zip(alphas, shares, strict=True)):
            state = {symbol: names[signal, a, symbol] for symbol in (signal, *range(4, 4 * k + 2))}
            initial[state[signal]] = share / 2
            transition[:2, state[signal]] = share / 2
            transition[state[signal], [state[4], state[5]]] = 0.5
            for n in range(1, k + 1):
                for symbol in (4 * n, 4 * n + 1):
                    if n < k:
                        transition[state[symbol], state[4 * n + 2]] = 1
                    else:
                        transition[state[symbol], names["answer", signal]] = 1 - alpha
                        if alpha:
                            transition[state[symbol], state[6]] = alpha
                if n < k:
                    transition[state[4 * n + 2], state[4 * n + 3]] = 1
                    transition[state[4 * n + 3], [state[4 * n + 4], state[4 * n + 5]]] = 0.5
    return Machine(np.array(symbols), transition, initial)


def _run_length_and_bits(k: int, alphas: list[float], shares: list[float]) -> tuple[float, float]:
    """The mean length of a run and its entropy: the signal, a bit for each group, and how often the last group is repeated.

    The number of repeats is a mixture of geometric distributions. Their sum is taken term by term up to where only the one with the largest
    alpha counts in double precision, and in closed form from there on. A single alpha has the closed form alone.
    """
    mixed: dict[float, float] = {}
    for alpha, share in zip(alphas, shares, strict=True):
        mixed[alpha] = mixed.get(alpha, 0.0) + share
    mixed = {alpha: share for alpha, share in mixed.items() if share > 0}
    largest, share = max(mixed.items())
    terms = 0
    for alpha, other in mixed.items():
        if alpha < largest:
            logs = math.log(1e-18 * share * (1 - largest) / (other * (1 - alpha)))
            terms = max(terms, 1 if alpha == 0 else math.ceil(logs / math.log(alpha / largest)))
    chances = sum(share * (1 - alpha) * alpha ** np.arange(terms) for alpha, share in mixed.items())
    rest = share * largest**terms  # probability of at least this many repeats
    entropy = -float(xlogy(chances, chances).sum()) - float(
        xlogy(rest, share * (1 - largest)) + xlogy(rest * (terms + largest / (1 - largest)), largest)
    )
    repeats = sum(share * alpha / (1 - alpha) for alpha, share in mixed.items())
    return 3 * k + 3 * repeats, 1 + k + repeats + entropy / math.log(2)


_OPENING, _CLOSING, _END = (0, 2), (1, 3), 4  # ( [ and ) ] and |


class BracketDataModule(LanguageDataModule):
    r"""Sentences of nested round and square brackets, at most k deep, each ended by \|.

    A sentence starts with ( or [ with the probabilities `start`. Inside a bracket, the probabilities of ( and [ and of closing
    are `inside`; k deep one can only close. After a group at depth 0, (, [ and the end are equally probable. The state is all
    that is open: 2^k - 1 clones a symbol hold it.

    Args:
        k: how deep brackets nest.
        length: symbols to train on.
        start: probabilities of ( and [ at the start of a sentence.
        inside: probabilities of (, [ and closing.
        test_start, test_inside: of the test data; those of training if not given.
        kwargs: the words of `LanguageDataModule`.
    """

    def __init__(
        self,
        k: int = 2,
        length: int = 50_000,
        start: list[float] | None = None,
        inside: list[float] | None = None,
        test_start: list[float] | None = None,
        test_inside: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(length=length, **kwargs)
        if k < 1:
            raise ValueError(f"`k` must be at least 1, but is {k} instead.")
        start, inside = [0.5, 0.5] if start is None else start, [1 / 3, 1 / 3, 1 / 3] if inside is None else inside
        test_start, test_inside = (
            start if test_start is None else test_start,
            inside if test_inside is None else test_inside,
        )
        given = {
            "start": (start, 2),
            "inside": (inside, 3),
            "test_start": (test_start, 2),
            "test_inside": (test_inside, 3),
        }
        for name, (probs, size) in given.items():
            if len(probs) != size or min(probs) < 0 or abs(sum(probs) - 1) > 1e-9:
                raise ValueError(f"`{name}` must be {size} probabilities that sum to 1, but is {probs} instead.")
        if inside[2] == 0 or test_inside[2] == 0:
            raise ValueError("`inside` must leave a chance to close, or no sentence would end.")
        self.k = k
        self.vocabulary = Vocabulary("()[]|")
        self.columns = symbol_column(len(self.vocabulary), self.vocabulary.names)
        self.machine, self.test_machine = (
            _bracket_machine(k, start, inside),
            _bracket_machine(k, test_start, test_inside),
        )
        self.optimal_bits = self.machine.entropy_rate()


def _bracket_machine(k: int, start: list[float], inside: list[float]) -> Machine:
    """States: the symbol just made, and what is open after it."""
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    rows: list[dict[int, float]] = []
    waiting: list[tuple[int, tuple[int, ...]]] = []

    def number(symbol: int, stack: tuple[int, ...]) -> int:
        if (symbol, stack) not in names:
            names[symbol, stack] = len(names)
            rows.append({})
            waiting.append((symbol, stack))
        return names[symbol, stack]

    number(_END, ())
    while waiting:
        symbol, stack = waiting.pop()
        row = rows[names[symbol, stack]]
        if symbol == _END:
            choices = [(_OPENING[0], start[0]), (_OPENING[1], start[1])]
        elif len(stack) == k:
            choices = [(_CLOSING[stack[-1]], 1.0)]
        else:
            chances = inside if stack else [1 / 3, 1 / 3, 1 / 3]
            choices = list(zip((*_OPENING, _CLOSING[stack[-1]] if stack else _END), chances, strict=True))
        for chosen, chance in choices:
            if chance > 0:
                after = (
                    (*stack, _OPENING.index(chosen)) if chosen in _OPENING else stack[:-1] if chosen in _CLOSING else ()
                )
                row[number(chosen, after)] = chance
    transition, initial = np.zeros((len(names), len(names))), np.zeros(len(names))
    for state, row in enumerate(rows):
        transition[state, list(row)] = list(row.values())
    initial[:] = transition[names[_END, ()]]
    return Machine(np.array([symbol for symbol, _ in names]), transition, initial)
