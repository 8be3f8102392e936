"""Two artificial languages with long-range dependencies, for which the best possible prediction is known exactly.

Both are drawn from a Markov chain in which every state emits exactly one symbol, so the true model is a cloned HMM.
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
from datamodules.checks import require_positive
from lightning_hmm.columns import symbol_column
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import Vocabulary


class Machine(NamedTuple):
    """A Markov chain in which every state emits exactly one symbol.

    symbols: (S,) symbol of each state.
    transition: (S, S) transition matrix.
    initial: (S,) initial distribution.
    """

    symbols: np.ndarray
    transition: np.ndarray
    initial: np.ndarray

    def draw(self, length: int, uniforms: np.ndarray) -> np.ndarray:
        """Draws the states of a run from one uniform number per step."""
        following = [(np.flatnonzero(row), np.cumsum(row[row > 0])) for row in self.transition]
        states = np.empty(length, np.int64)
        choices, cumulative = np.flatnonzero(self.initial), np.cumsum(self.initial[self.initial > 0])
        for t in range(length):
            states[t] = choices[min(int(np.searchsorted(cumulative, uniforms[t], side="right")), len(choices) - 1)]
            choices, cumulative = following[states[t]]
        return states

    def bits_per_symbol(self, symbols: Sequence[int] | np.ndarray) -> float:
        """Returns -log2 p per symbol of a run from the initial distribution; infinite if the run is impossible."""
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
        """Returns the entropy rate in bits per symbol, if a state and the next symbol determine the next state.

        It is the mean entropy of the rows of the transition matrix under the stationary distribution.
        """
        size = len(self.symbols)
        equations = np.vstack([self.transition.T - np.eye(size), np.ones(size)])
        share = np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)[0]
        logs = np.log2(np.where(self.transition > 0, self.transition, 1.0))
        return float(-(share[:, None] * self.transition * logs).sum())


class LanguageDataModule(SequenceDataModule):
    """Base class for symbols drawn from a `Machine`.

    The training part is cut into contiguous sequences; validation and test part are one sequence each.

    Args:
        length: Number of training symbols.
        sequence_length: Number of symbols per training sequence.
        val_length: Number of validation symbols.
        test_length: Number of test symbols, by default `length`.
        **kwargs: Forwarded to `SequenceDataModule`. The parts are drawn separately, so the fractions are ignored.

    Attributes:
        machine: Machine of the training and validation data.
        test_machine: Machine of the test data.
        optimal_bits: Expected bits per symbol of the true model on training data of infinite length.
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
        require_positive(length=length, sequence_length=sequence_length, val_length=val_length, test_length=test_length)
        self.length = length
        self.sequence_length = sequence_length
        self.val_length = val_length
        self.test_length = length if test_length is None else test_length

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
        """Returns the bits per symbol of the true training model on a part, including the first symbol."""
        values, _, _ = self._source(part)
        return self.machine.bits_per_symbol(values.values.numpy())


def pieces(length: int, piece: int) -> list[int]:
    """Returns the lengths of contiguous pieces. The last one may be shorter."""
    return [piece] * (length // piece) + ([length % piece] if length % piece else [])


def in_pieces(sequences: Sequences, piece: int) -> Sequences:
    """Cuts every sequence into contiguous pieces of at most `piece` steps, each with the weight of the sequence."""
    sizes = [pieces(length, piece) for length in sequences.lengths.tolist()]
    offsets = torch.tensor([0, *itertools.accumulate(itertools.chain.from_iterable(sizes))], dtype=torch.int64)
    weights = sequences.weights
    if weights is not None:
        weights = weights.repeat_interleave(torch.tensor(list(map(len, sizes)), dtype=torch.int64))
    return sequences.with_steps(slice(None), offsets, weights)


class ToyMachineDataModule(LanguageDataModule):
    r"""Runs of 3k symbols: a signal 0 or 2, then 3k - 2 noise symbols, then the response to the signal, 1 or 3.

    Use it to test whether a model represents long-range dependencies. The noise is 4 or 5, 6, 7, 8 or 9, 10, 11, ... up
    to 4k or 4k + 1. The signal determines the response after all the noise. A cloned HMM with two clones per noise
    symbol can represent this, but an n-gram model of moderate order cannot. The entropy of a run is k + 1 bits.

    With `alpha`, the last two groups of noise are repeated with this probability, so that the length of the noise is
    random. With two values, each run uses the first one with probability `alpha_share`.

    Args:
        k: Number of groups of noise.
        alpha: One or two probabilities of returning from 8 or 9 to 6, for k = 2. ``None`` disables repeats.
        alpha_share: Fraction of the runs that use the first value of `alpha`.
        num_runs: Number of training runs, each with 3k symbols if `alpha` is ``None``. Defaults to 1875, 3750, 7500 and
            15000 for k = 2, 3, 4 and 5.
        length: Number of training symbols, which replaces `num_runs`.
        **kwargs: Forwarded to `LanguageDataModule`.

    Example:
        >>> data = ToyMachineDataModule(k=2, num_runs=4, sequence_length=12, val_length=6, test_length=6)
        >>> data.setup()
        >>> data.train_sequences.lengths.tolist()
        [12, 12]
        >>> data.optimal_bits
        0.5
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
                f"`alpha` must be one or two probabilities below 1 and requires `k=2`, but is {alpha} with `k={k}`."
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
    """Returns the machine, whose states are the responses 1 and 3 and, for each signal and alpha, signal and noise."""
    symbols = [1, 3]
    names: dict[tuple[Any, ...], int] = {("response", 0): 0, ("response", 2): 1}
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
                        transition[state[symbol], names["response", signal]] = 1 - alpha
                        if alpha:
                            transition[state[symbol], state[6]] = alpha
                if n < k:
                    transition[state[4 * n + 2], state[4 * n + 3]] = 1
                    transition[state[4 * n + 3], [state[4 * n + 4], state[4 * n + 5]]] = 0.5
    return Machine(np.array(symbols), transition, initial)


def _run_length_and_bits(k: int, alphas: list[float], shares: list[float]) -> tuple[float, float]:
    """Returns the mean length of a run and its entropy in bits.

    The entropy is one bit for the signal, one per group of noise, and the entropy of the number of repeats. This number
    has a mixture of geometric distributions. The entropy is summed term by term as long as several components
    contribute in double precision, and in closed form for the rest, to which only the largest alpha contributes.
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
    rest = share * largest**terms  # Probability of at least this many repeats.
    entropy = -float(xlogy(chances, chances).sum()) - float(
        xlogy(rest, share * (1 - largest)) + xlogy(rest * (terms + largest / (1 - largest)), largest)
    )
    repeats = sum(share * alpha / (1 - alpha) for alpha, share in mixed.items())
    return 3 * k + 3 * repeats, 1 + k + repeats + entropy / math.log(2)


_OPENING, _CLOSING, _END = (0, 2), (1, 3), 4  # The symbols ( and [, the symbols ) and ], and the symbol |.


class BracketDataModule(LanguageDataModule):
    r"""Sentences of nested round and square brackets with depth at most k, each terminated by \|.

    Use it to test whether a model represents nested structure. A sentence starts with ( or [ with the probabilities
    `start`. Inside a bracket, `inside` are the probabilities of (, [ and closing; at depth k, the next symbol always
    closes. After a group at depth 0, the symbols (, [ and \| are equally probable. The state is the stack of open
    brackets, which 2^k - 1 clones per symbol can represent.

    Args:
        k: Maximum depth.
        length: Number of training symbols.
        start: Probabilities of ( and [ at the start of a sentence, by default equal.
        inside: Probabilities of (, [ and closing inside a bracket, by default equal.
        test_start: Probabilities `start` of the test data, by default those of training.
        test_inside: Probabilities `inside` of the test data, by default those of training.
        **kwargs: Forwarded to `LanguageDataModule`.

    Example:
        >>> data = BracketDataModule(k=1, length=20, sequence_length=10, val_length=5)
        >>> data.setup()
        >>> data.train_sequences.lengths.tolist()
        [10, 10]
        >>> data.symbol_names
        ['(', ')', '[', ']', '|']
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
        start = [0.5, 0.5] if start is None else start
        inside = [1 / 3, 1 / 3, 1 / 3] if inside is None else inside
        test_start = start if test_start is None else test_start
        test_inside = inside if test_inside is None else test_inside
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
            raise ValueError("`inside` and `test_inside` must have a positive probability of closing, but one has 0.")
        self.k = k
        self.vocabulary = Vocabulary("()[]|")
        self.columns = symbol_column(len(self.vocabulary), self.vocabulary.names)
        self.machine = _bracket_machine(k, start, inside)
        self.test_machine = _bracket_machine(k, test_start, test_inside)
        self.optimal_bits = self.machine.entropy_rate()


def _bracket_machine(k: int, start: list[float], inside: list[float]) -> Machine:
    """Returns the machine, whose states are pairs of the current symbol and the stack of open brackets after it."""
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
                after = stack[:-1]  # The stack is empty at the end of a sentence.
                if chosen in _OPENING:
                    after = (*stack, _OPENING.index(chosen))
                row[number(chosen, after)] = chance
    transition, initial = np.zeros((len(names), len(names))), np.zeros(len(names))
    for state, row in enumerate(rows):
        transition[state, list(row)] = list(row.values())
    initial[:] = transition[names[_END, ()]]
    return Machine(np.array([symbol for symbol, _ in names]), transition, initial)
