"""Sequences drawn from a random hidden Markov model, whose parameters and state paths are known."""

from __future__ import annotations

from typing import Any, Literal

import datasets
import torch
from torch import Tensor

from datamodules.base import SequenceDataModule, as_dataset, as_table
from lightning_hmm.loading import generator
from lightning_hmm.sequences import MISSING, Sequences


class SyntheticDataModule(SequenceDataModule):
    r"""A random HMM with K states, and N sequences drawn from it.

    .. math::
        A_k \sim \mathrm{Dirichlet}(c), \qquad z_1 \sim \pi = \pi A, \qquad z_{t+1} \sim A_{z_t}, \qquad
        y_t \sim \mathrm{Cat}(B_{z_t}), \ B_k \sim \mathrm{Dirichlet}(c) \quad \text{or} \quad
        y_t \sim \mathcal{N}(\mu_{z_t}, \mathrm{diag}\, \sigma^2_{z_t}).

    The same words give the same data, on every rank. Made in memory in O(N T K) time; nothing is downloaded.

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
        separation: how far apart the states' means are: their spread along each feature, where the standard deviations of the
            states are between 0.5 and 1.5.
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
        emission: Literal["categorical", "gaussian"] = "categorical",
        num_states: int = 5,
        num_symbols: int = 10,
        num_features: int = 2,
        num_sequences: int = 256,
        length: int = 100,
        min_length: int | None = None,
        max_length: int | None = None,
        concentration: float = 0.3,
        separation: float = 3.0,
        missing_fraction: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if emission not in ("categorical", "gaussian"):
            raise ValueError(f"`emission` must be 'categorical' or 'gaussian', but is {emission!r} instead.")
        sizes = {"num_states": num_states, "num_symbols": num_symbols, "num_features": num_features, "num_sequences": num_sequences}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"`{name}` must be positive, but is {size} instead.")
        if not concentration > 0:
            raise ValueError(f"`concentration` must be positive, but is {concentration} instead.")
        if not separation >= 0:
            raise ValueError(f"`separation` must not be negative, but is {separation} instead.")
        if not 0 <= missing_fraction < 1:
            raise ValueError(f"`missing_fraction` must be at least 0 and less than 1, but is {missing_fraction} instead.")
        self.min_length = length if min_length is None else min_length
        self.max_length = length if max_length is None else max_length
        if not 0 <= self.min_length <= self.max_length:
            raise ValueError(f"Lengths must be from `min_length` >= 0 up to `max_length`, but are from {self.min_length} to {self.max_length} instead.")
        self.num_sequences, self.missing_fraction = num_sequences, missing_fraction

        draw = generator(self.seed, "parameters")
        self.transition_probs = _dirichlet(concentration, num_states, num_states, draw)
        self.initial_probs = stationary(self.transition_probs)
        self.emission_probs: Tensor | None = None
        self.means: Tensor | None = None
        self.variances: Tensor | None = None
        if emission == "categorical":
            self.num_symbols = num_symbols
            self.emission_probs = _dirichlet(concentration, num_states, num_symbols, draw)
        else:
            self.num_features = num_features
            self.means = separation * torch.randn(num_states, num_features, dtype=torch.float64, generator=draw)
            self.variances = (0.5 + torch.rand(num_states, num_features, dtype=torch.float64, generator=draw)).square()

    def load_dataset(self) -> datasets.Dataset:
        draw = generator(self.seed, "sequences")
        lengths = torch.randint(self.min_length, self.max_length + 1, (self.num_sequences,), generator=draw)
        states = draw_states(self.initial_probs, self.transition_probs, lengths, draw)
        values = self._emit(states, draw)
        return as_dataset(as_table(Sequences.from_lengths(values, lengths), Sequences.from_lengths(states, lengths)))

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
        raise ValueError("`concentration` must be large enough for every state to be reached from every other, but the transitions drawn fall apart. Raise it.")
    return probs


def _dirichlet(concentration: float, rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """(rows, columns), each row from the Dirichlet distribution.

    Drawn through the logarithm of gamma variables, log G(c) = log G(c + 1) + log(U) / c, because for a small concentration the
    variables themselves may all be too small for a float.
    """
    gamma: Tensor = torch._standard_gamma(torch.full((rows, columns), concentration + 1, dtype=torch.float64), generator=draw)
    uniform = 1 - torch.rand(rows, columns, dtype=torch.float64, generator=draw)
    return (gamma.log() + uniform.log() / concentration).softmax(dim=1)
