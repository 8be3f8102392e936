"""Sequences drawn from a random hidden Markov model, whose parameters and state paths are known."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import datasets
import torch
from torch import Tensor

from datamodules.base import SequenceDataModule, as_dataset, as_table
from lightning_hmm.columns import feature_columns, symbol_column
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING

Emission = Literal["categorical", "gaussian"]
Transitions = Literal["dirichlet", "mostly_constant", "graded"]
Layout = Literal["random", "grid"]
DRAWS = 100  # tries to draw data with every symbol


class SyntheticDataModule(SequenceDataModule):
    r"""A random HMM with K states, and N sequences drawn from it.

    .. math::
        A_k \sim \mathrm{Dirichlet}(c), \qquad z_1 \sim \pi = \pi A, \qquad z_{t+1} \sim A_{z_t}, \qquad
        y_t \sim \mathrm{Cat}(B_{z_t}), \ B_k \sim \mathrm{Dirichlet}(c) \quad \text{or} \quad
        y_t \sim \mathcal{N}(\mu_{z_t}, \mathrm{diag}\, \sigma^2_{z_t}).

    The same words give the same data, on every rank. Made in memory in O(N T K) time; nothing is downloaded.

    The DenseHMM paper's data (Sicking et al., 2021) are ``num_states=num_symbols=n, concentration=0.1, num_sequences=20, length=200,
    every_symbol=True, val_fraction=0, test_fraction=0.5``. Those of the Dense-Mostly-Constant paper (Siddiqi and Moore, 2005) are
    ``emission="gaussian", num_states=20, layout="grid", num_sequences=5, length=5000, val_fraction=0, test_fraction=0.2`` with
    ``transitions="mostly_constant"`` or, where its assumption is broken, "graded".

    Args:
        emission: "categorical" for symbols, "gaussian" for real vectors.
        num_states: K.
        num_symbols: size of the alphabet, for symbols.
        num_features: entries of a vector, for real vectors.
        num_sequences: N.
        length: steps of each sequence.
        min_length: if given, lengths are drawn evenly from this to `max_length`; `length` otherwise.
        max_length: if given, lengths are drawn evenly from `min_length` to this; `length` otherwise.
        concentration: c; the smaller, the more of a row's probability sits in a few entries.
        transitions: "dirichlet" draws rows from the Dirichlet distribution; "mostly_constant" gives `kept` random entries of each
            row the probability `kept_mass` together, and all others the same; "graded" makes rows proportional to 1, 2, ..., K in
            random order.
        kept: how many entries of a row stand out if transitions are mostly constant. What each has above the others is again
            drawn from the Dirichlet distribution.
        kept_mass: their probability together.
        layout: "random" draws means from a normal distribution and standard deviations between 0.5 and 1.5; "grid" puts the means on
            the points of a square grid, in random order, with standard deviations of 1.
        separation: how far apart the states' means are: their spread along each feature if random, and on a grid the distance
            between neighbours; the smaller, the more states overlap.
        every_symbol: draw everything anew until each symbol occurs in the training part.
        missing_fraction: chance that a symbol, or a single entry of a vector, is missing.
        kwargs: the words of `SequenceDataModule`.

    Attributes:
        initial_probs: (K,) the stationary distribution of the transitions.
        transition_probs: (K, K).
        emission_probs: (K, num_symbols), or ``None`` for real vectors.
        means: (K, num_features), or ``None`` for symbols.
        variances: (K, num_features), or ``None`` for symbols.
    """

    def __init__(
        self,
        emission: Emission = "categorical",
        num_states: int = 5,
        num_symbols: int = 10,
        num_features: int = 2,
        num_sequences: int = 256,
        length: int = 100,
        min_length: int | None = None,
        max_length: int | None = None,
        concentration: float = 0.3,
        transitions: Transitions = "dirichlet",
        kept: int = 5,
        kept_mass: float = 0.6,
        layout: Layout = "random",
        separation: float = 3.0,
        every_symbol: bool = False,
        missing_fraction: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value, allowed in (
            ("emission", emission, Emission),
            ("transitions", transitions, Transitions),
            ("layout", layout, Layout),
        ):
            if value not in get_args(allowed):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(allowed))}, but is {value!r} instead.")
        sizes = {
            "num_states": num_states,
            "num_symbols": num_symbols,
            "num_features": num_features,
            "num_sequences": num_sequences,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be positive, but is {size} instead.")
        if not concentration > 0:
            raise ValueError(f"`concentration` must be positive, but is {concentration} instead.")
        if not separation >= 0:
            raise ValueError(f"`separation` must not be negative, but is {separation} instead.")
        if not 0 <= missing_fraction < 1:
            raise ValueError(
                f"`missing_fraction` must be at least 0 and less than 1, but is {missing_fraction} instead."
            )
        if transitions == "mostly_constant" and not 0 < kept < num_states:
            raise ValueError(
                f"`kept` must be positive and less than the {num_states} of `num_states`, but is {kept} instead."
            )
        if transitions == "mostly_constant" and not kept / num_states <= kept_mass < 1:
            raise ValueError(
                f"`kept_mass` must be at least {kept} of {num_states}, for the kept to stand out, and less than 1, but is {kept_mass} instead."
            )
        if every_symbol and emission != "categorical":
            raise ValueError("`every_symbol` is for symbols, but `emission` is 'gaussian'. Leave it out.")
        self.min_length = length if min_length is None else min_length
        self.max_length = length if max_length is None else max_length
        if not 0 <= self.min_length <= self.max_length:
            raise ValueError(
                f"Lengths must be from `min_length` >= 0 up to `max_length`, but are from {self.min_length} to {self.max_length} instead."
            )
        self.num_states, self.num_sequences, self.missing_fraction = num_states, num_sequences, missing_fraction
        self.concentration, self.transitions, self.kept, self.kept_mass = concentration, transitions, kept, kept_mass
        self.layout, self.separation = layout, separation
        self.columns = symbol_column(num_symbols) if emission == "categorical" else feature_columns(num_features)

        for self._tries in range(DRAWS):
            self._draw_parameters()
            if not every_symbol or self._has_every_symbol():
                break
        else:
            raise ValueError(
                f"`every_symbol` must be possible, but {DRAWS} times not all of the {num_symbols} symbols occurred. "
                "Raise `num_sequences`, `length` or `concentration`."
            )

    def _generator(self, purpose: str) -> torch.Generator:
        """The first try does not depend on whether there may be others."""
        return generator(self.seed, purpose, self._tries) if self._tries else generator(self.seed, purpose)

    def _draw_parameters(self) -> None:
        draw = self._generator("parameters")
        self.transition_probs = self._draw_transitions(draw)
        self.initial_probs = stationary(self.transition_probs)
        self.emission_probs: Tensor | None = None
        self.means: Tensor | None = None
        self.variances: Tensor | None = None
        if self.num_symbols is not None:
            self.emission_probs = _dirichlet(self.concentration, self.num_states, self.num_symbols, draw)
            return
        assert self.num_features is not None
        shape = (self.num_states, self.num_features)
        if self.layout == "random":
            self.means = self.separation * torch.randn(shape, dtype=torch.float64, generator=draw)
            self.variances = (0.5 + torch.rand(shape, dtype=torch.float64, generator=draw)).square()
        else:
            self.means = self.separation * _grid(*shape)[torch.randperm(self.num_states, generator=draw)]
            self.variances = torch.ones(shape, dtype=torch.float64)

    def _draw_transitions(self, draw: torch.Generator) -> Tensor:
        size = self.num_states
        if self.transitions == "dirichlet":
            return _dirichlet(self.concentration, size, size, draw)
        order = torch.rand(size, size, dtype=torch.float64, generator=draw).argsort(
            dim=1
        )  # a random order for each row
        if self.transitions == "graded":
            return (order.double() + 1) / (size * (size + 1) / 2)
        constant = (1 - self.kept_mass) / (size - self.kept)
        above = (self.kept_mass - self.kept * constant) * _dirichlet(self.concentration, size, self.kept, draw)
        return torch.full((size, size), constant, dtype=torch.float64).scatter_add(1, order[:, : self.kept], above)

    def _has_every_symbol(self) -> bool:
        values, _ = self._draw_sequences()
        indices = self.split(self.num_sequences)["train"]
        symbols = (values if indices is None else values[indices]).values
        return len(symbols[symbols != MISSING].unique()) == self.num_symbols

    def load_dataset(self) -> datasets.Dataset:
        return as_dataset(as_table(*self._draw_sequences()))

    def _draw_sequences(self) -> tuple[Sequences, Sequences]:
        """The values and the states."""
        draw = self._generator("sequences")
        lengths = torch.randint(self.min_length, self.max_length + 1, (self.num_sequences,), generator=draw)
        assert self.transition_probs is not None
        states = draw_states(self.initial_probs, self.transition_probs, lengths, draw)
        return Sequences.from_lengths(self._emit(states, draw), lengths), Sequences.from_lengths(states, lengths)

    def _emit(self, states: Tensor, draw: torch.Generator) -> Tensor:
        """Draws one symbol, (steps,), or vector, (steps, num_features), for each state."""
        if self.emission_probs is not None:
            values = draw_symbols(self.emission_probs, states, draw)
        else:
            assert self.means is not None
            assert self.variances is not None
            noise = torch.randn(len(states), self.means.shape[1], dtype=torch.float64, generator=draw)
            values = self.means[states] + self.variances.sqrt()[states] * noise
        missing = torch.rand(values.shape, dtype=torch.float64, generator=draw) < self.missing_fraction
        return values.masked_fill(missing, float("nan") if values.is_floating_point() else MISSING)


def draw_states(initial_probs: Tensor, transition_probs: Tensor, lengths: Tensor, draw: torch.Generator) -> Tensor:
    """(K,), (K, K), (N,) -> (steps,): a path of states for each of N sequences, packed."""
    longest = int(lengths.max()) if len(lengths) else 0
    path = torch.empty(len(lengths), longest, dtype=torch.int64)
    probs = initial_probs.expand(len(lengths), -1)
    for t in range(longest):
        path[:, t] = torch.multinomial(probs, 1, generator=draw).squeeze(1)
        probs = transition_probs[path[:, t]]
    return path[torch.arange(longest) < lengths.unsqueeze(1)]  # (N, T) -> (steps,)


def draw_symbols(emission_probs: Tensor, states: Tensor, draw: torch.Generator) -> Tensor:
    """(K, V), (steps,) -> (steps,): a symbol for each state."""
    symbols = torch.empty(len(states), dtype=torch.int64)
    for state, probs in enumerate(emission_probs):
        visits = torch.nonzero(states == state).squeeze(1)
        if len(visits):
            symbols[visits] = torch.multinomial(probs, len(visits), replacement=True, generator=draw)
    return symbols


def stationary(transition_probs: Tensor) -> Tensor:
    """(K, K) -> (K,): the distribution that the transitions leave as it is.

    States are eliminated one by one without a single subtraction, so every entry is right to nearly all its digits
    (Grassmann, Taksar and Heyman, 1985). O(K^3).
    """
    reduced = transition_probs.clone()
    for last in range(len(reduced) - 1, 0, -1):
        reduced[:last, last] /= reduced[last, :last].sum()
        reduced[:last, :last] += torch.outer(reduced[:last, last], reduced[last, :last])
    weights = torch.ones_like(reduced[0])
    for state in range(1, len(reduced)):
        weights[state] = weights[:state] @ reduced[:state, state]
    probs = weights / weights.sum()
    if not bool(probs.isfinite().all()):
        raise ValueError(
            "`concentration` must be large enough for every state to be reached from every other, but the transitions drawn fall apart. Raise it."
        )
    return probs


def _grid(points: int, dimensions: int) -> Tensor:
    """(points, dimensions): the first points of a square or cubic grid with distance 1."""
    side = math.ceil(round(points ** (1 / dimensions), 9))  # 27 ** (1 / 3) is 3.0000000000000004 or so
    axes = torch.unravel_index(torch.arange(points), (side,) * dimensions)
    return torch.stack(axes, dim=1).double()


def _dirichlet(concentration: float, rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """(rows, columns), each row from the Dirichlet distribution.

    Drawn through the logarithm of gamma variables, log G(c) = log G(c + 1) + log(U) / c, because for a small concentration the
    variables themselves may all be too small for a float.
    """
    gamma: Tensor = torch._standard_gamma(
        torch.full((rows, columns), concentration + 1, dtype=torch.float64), generator=draw
    )
    uniform = 1 - torch.rand(rows, columns, dtype=torch.float64, generator=draw)
    return (gamma.log() + uniform.log() / concentration).softmax(dim=1)
