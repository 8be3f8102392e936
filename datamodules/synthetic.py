"""Sequences drawn from a random hidden Markov model with known parameters and state paths."""

from __future__ import annotations

import math
from typing import Any, Literal

import datasets
import torch
from torch import Tensor

from datamodules.base import SequenceDataModule, as_dataset, as_table
from datamodules.checks import require_choice, require_fraction, require_positive
from lightning_hmm.columns import feature_columns, symbol_column
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING

Emission = Literal["categorical", "gaussian"]
Transitions = Literal["dirichlet", "mostly_constant", "graded"]
Layout = Literal["random", "grid"]
DRAWS = 100  # Maximum number of attempts to draw data in which every symbol occurs.


class SyntheticDataModule(SequenceDataModule):
    r"""N sequences drawn from a random HMM with K states.

    Use it to try out models and to compare estimates with the true parameters and states.

    .. math::
        A_k \sim \mathrm{Dirichlet}(c), \qquad z_1 \sim \pi = \pi A, \qquad z_{t+1} \sim A_{z_t}, \qquad
        y_t \sim \mathrm{Cat}(B_{z_t}), \ B_k \sim \mathrm{Dirichlet}(c) \quad \text{or} \quad
        y_t \sim \mathcal{N}(\mu_{z_t}, \mathrm{diag}\, \sigma^2_{z_t}).

    The same options give the same data on every rank. The data are drawn in memory in O(N T K) time.

    The data of the DenseHMM paper (Sicking et al., 2021) are ``num_states=num_symbols=n, concentration=0.1,
    num_sequences=20, length=200, every_symbol=True, val_fraction=0, test_fraction=0.5``. Those of the
    Dense-Mostly-Constant paper (Siddiqi and Moore, 2005) are ``emission="gaussian", num_states=20, layout="grid",
    num_sequences=5, length=5000, val_fraction=0, test_fraction=0.2`` with ``transitions="mostly_constant"``, or with
    "graded" to violate its assumption.

    Args:
        emission: "categorical" for symbols, "gaussian" for real vectors.
        num_states: Number of states K.
        num_symbols: Number of symbols, for categorical emissions.
        num_features: Number of entries per vector, for Gaussian emissions.
        num_sequences: Number of sequences N.
        length: Number of steps per sequence.
        min_length: Smallest length, if lengths are drawn uniformly. Defaults to `length`.
        max_length: Largest length, if lengths are drawn uniformly. Defaults to `length`.
        concentration: Concentration c of the Dirichlet distribution. The smaller it is, the more the probability of a
            row is concentrated in a few entries.
        transitions: "dirichlet" draws rows from the Dirichlet distribution. "mostly_constant" gives `kept` random
            entries of each row the total probability `kept_mass`, and all others equal probabilities. "graded" makes
            rows proportional to 1, 2, ..., K in random order.
        kept: Number of large entries per row if transitions are mostly constant. Their excess over the constant is
            drawn from the Dirichlet distribution.
        kept_mass: Total probability of these entries.
        layout: "random" draws means from a normal distribution and standard deviations uniformly from 0.5 to 1.5.
            "grid" places the means on the points of a square grid in random order, with standard deviation 1.
        separation: Distance scale of the means: their standard deviation in each feature if random, or the distance of
            neighboring points on a grid. The smaller it is, the more the states overlap.
        every_symbol: Whether to repeat drawing until each symbol occurs in the training part.
        missing_fraction: Probability that a symbol, or a single entry of a vector, is missing.
        **kwargs: Forwarded to `SequenceDataModule`.

    Attributes:
        initial_probs: (K,) stationary distribution of the transitions.
        transition_probs: (K, K) transition matrix.
        emission_probs: (K, num_symbols) probabilities of the symbols, or ``None`` for real vectors.
        means: (K, num_features) means, or ``None`` for symbols.
        variances: (K, num_features) variances, or ``None`` for symbols.

    Example:
        >>> data = SyntheticDataModule(num_sequences=4, length=5, val_fraction=0, test_fraction=0.25)
        >>> data.setup()
        >>> data.train_sequences.lengths.tolist()
        [5, 5, 5]
        >>> tuple(data.transition_probs.shape), tuple(data.emission_probs.shape)
        ((5, 5), (5, 10))
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
        require_choice("emission", emission, Emission)
        require_choice("transitions", transitions, Transitions)
        require_choice("layout", layout, Layout)
        require_positive(num_states=num_states, num_symbols=num_symbols, num_features=num_features)
        require_positive(num_sequences=num_sequences, concentration=concentration)
        if not separation >= 0:
            raise ValueError(f"`separation` must not be negative, but is {separation} instead.")
        require_fraction(missing_fraction=missing_fraction)
        if transitions == "mostly_constant" and not 0 < kept < num_states:
            raise ValueError(
                f"`kept` must be positive and less than `num_states` ({num_states}), but is {kept} instead."
            )
        if transitions == "mostly_constant" and not kept / num_states <= kept_mass < 1:
            raise ValueError(
                f"`kept_mass` must be at least `kept` / `num_states` ({kept / num_states:g}) and less than 1, "
                f"but is {kept_mass} instead."
            )
        if every_symbol and emission != "categorical":
            raise ValueError("`every_symbol` applies to symbols, but `emission` is 'gaussian'. Omit it.")
        self.min_length = length if min_length is None else min_length
        self.max_length = length if max_length is None else max_length
        if not 0 <= self.min_length <= self.max_length:
            raise ValueError(
                "`min_length` must be at least 0 and at most `max_length`, but they are "
                f"{self.min_length} and {self.max_length} instead."
            )
        self.num_states = num_states
        self.num_sequences = num_sequences
        self.concentration = concentration
        self.transitions = transitions
        self.kept = kept
        self.kept_mass = kept_mass
        self.layout = layout
        self.separation = separation
        self.missing_fraction = missing_fraction
        self.columns = symbol_column(num_symbols) if emission == "categorical" else feature_columns(num_features)
        self._draw_model(every_symbol)

    def _draw_model(self, every_symbol: bool) -> None:
        """Draws parameters, repeatedly if every symbol must occur in the training part."""
        for self._attempt in range(DRAWS):
            self._draw_parameters()
            if not every_symbol or self._has_every_symbol():
                return
        raise ValueError(
            f"`every_symbol` must be possible, but in {DRAWS} draws not all {self.num_symbols} symbols occurred. "
            "Increase `num_sequences`, `length` or `concentration`."
        )

    def _generator(self, purpose: str) -> torch.Generator:
        """Returns the random generator of the current attempt. The first one does not depend on `every_symbol`."""
        return generator(self.seed, purpose, self._attempt) if self._attempt else generator(self.seed, purpose)

    def _draw_parameters(self) -> None:
        """Draws transition and emission parameters."""
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
        """Draws the transition matrix, (K, K)."""
        size = self.num_states
        if self.transitions == "dirichlet":
            return _dirichlet(self.concentration, size, size, draw)
        order = torch.rand(size, size, dtype=torch.float64, generator=draw).argsort(dim=1)  # One permutation per row.
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
        """Draws sequences and their states."""
        draw = self._generator("sequences")
        lengths = torch.randint(self.min_length, self.max_length + 1, (self.num_sequences,), generator=draw)
        assert self.transition_probs is not None
        states = draw_states(self.initial_probs, self.transition_probs, lengths, draw)
        return Sequences.from_lengths(self._emit(states, draw), lengths), Sequences.from_lengths(states, lengths)

    def _emit(self, states: Tensor, draw: torch.Generator) -> Tensor:
        """Draws one symbol, (steps,), or one vector, (steps, num_features), per state."""
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
    """Draws a path of states for each of N sequences: (K,), (K, K), (N,) -> (steps,), packed."""
    longest = int(lengths.max()) if len(lengths) else 0
    path = torch.empty(len(lengths), longest, dtype=torch.int64)
    probs = initial_probs.expand(len(lengths), -1)
    for t in range(longest):
        path[:, t] = torch.multinomial(probs, 1, generator=draw).squeeze(1)
        probs = transition_probs[path[:, t]]
    return path[torch.arange(longest) < lengths.unsqueeze(1)]  # (N, T) -> (steps,)


def draw_symbols(emission_probs: Tensor, states: Tensor, draw: torch.Generator) -> Tensor:
    """Draws a symbol for each state: (K, V), (steps,) -> (steps,)."""
    symbols = torch.empty(len(states), dtype=torch.int64)
    for state, probs in enumerate(emission_probs):
        visits = torch.nonzero(states == state).squeeze(1)
        if len(visits):
            symbols[visits] = torch.multinomial(probs, len(visits), replacement=True, generator=draw)
    return symbols


def stationary(transition_probs: Tensor) -> Tensor:
    """Returns the stationary distribution of a transition matrix: (K, K) -> (K,).

    States are eliminated one by one without subtractions, so every entry is accurate to nearly all digits (Grassmann,
    Taksar and Heyman, 1985). The time is O(K^3).
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
            "`concentration` must be large enough for every state to be reachable from every other, but some states of "
            "the drawn transition matrix are not. Increase it."
        )
    return probs


def _grid(points: int, dimensions: int) -> Tensor:
    """Returns the first points of a square or cubic grid with distance 1, (points, dimensions)."""
    side = math.ceil(round(points ** (1 / dimensions), 9))  # Roots such as 27 ** (1 / 3) may exceed 3 by rounding.
    axes = torch.unravel_index(torch.arange(points), (side,) * dimensions)
    return torch.stack(axes, dim=1).double()


def _dirichlet(concentration: float, rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Draws (rows, columns), each row from the Dirichlet distribution.

    It uses the logarithm of gamma variables, log G(c) = log G(c + 1) + log(U) / c, because for a small concentration
    the variables themselves may underflow.
    """
    gamma: Tensor = torch._standard_gamma(
        torch.full((rows, columns), concentration + 1, dtype=torch.float64), generator=draw
    )
    uniform = 1 - torch.rand(rows, columns, dtype=torch.float64, generator=draw)
    return (gamma.log() + uniform.log() / concentration).softmax(dim=1)
