r"""Evidence: what the data say about the states, in the three forms that inference accepts.

A backend never sees a density. An emission turns its natural parameters and a batch of data into one of these:

`Table`
    For symbols. A (K, V) matrix of log-probabilities, looked up by the symbol of each step.
`Quadratic`
    For exponential families whose statistics are products of two data columns: all Gaussians, Poisson, Bernoulli, and products of these.
`Rows`
    For everything else: (steps, K) log-likelihoods.

The tensor that carries the gradient is `live`. What comes back for it from an E-step is the gradient of the log-likelihood: expected visits by
symbol for `Table`, expected sums of products for `Quadratic`, and posterior probabilities for `Rows`.

Every form takes optional `labels`, (steps,) known states with -1 where the state is unknown. A labelled step rules out all other states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Table(NamedTuple):
    """log p(y_t | k) = log_probs[k, symbols[t]].

    Args:
        log_probs: (K, V) log-probabilities; -inf for a symbol that a state never emits.
        symbols: (steps,) uint8, int16, int32 or int64; V stands for a missing symbol.
        labels: (steps,) known states, -1 where unknown; ``None`` if no state is known.
    """

    log_probs: Tensor
    symbols: Tensor
    labels: Tensor | None = None

    @property
    def live(self) -> Tensor:
        return self.log_probs

    @property
    def num_states(self) -> int:
        return self.log_probs.shape[0]

    @property
    def num_steps(self) -> int:
        return len(self.symbols)

    def with_live(self, live: Tensor) -> Table:
        return self._replace(log_probs=live)

    def shared(self, classes: Tensor) -> Table:
        """The evidence for S states, of which state s emits as `classes[s]` of these."""
        return self._replace(log_probs=self.log_probs[classes])

    def gathered(self, gradient: Tensor, classes: Tensor) -> Tensor:
        """The gradient in `live` from that in the one of ``shared(classes)``: the sum over the states of each class."""
        return torch.zeros_like(self.log_probs, dtype=gradient.dtype).index_add(0, classes, gradient)

    def rows(self) -> Tensor:
        """(steps, K) log-likelihoods, differentiable in `live`; labels are applied."""
        padded = torch.cat([self.log_probs.T, self.log_probs.new_zeros(1, self.num_states)])
        return _labelled(padded[self.symbols.long()], self.labels)

    def pull(self, gamma: Tensor) -> Tensor:
        """The gradient in `live`, (K, V) expected visits, from (steps, K) weighted posterior probabilities."""
        visits = gamma.new_zeros(self.log_probs.shape[1] + 1, self.num_states)
        return visits.index_add_(0, self.symbols.long(), gamma)[:-1].T

    def at(self, steps: Tensor) -> Table:
        """The evidence of some of the steps."""
        return self._replace(symbols=self.symbols[steps], labels=None if self.labels is None else self.labels[steps])


class Quadratic(NamedTuple):
    """log p(y_t | k) = sum over f of weights[k, f] * u[t, i_f] * u[t, j_f], with u = columns - center and (i_f, j_f) = pairs[f].

    The number C stands for a constant factor of 1. So the data themselves can be the columns, without a copy.

    Args:
        columns: (steps, C) finite numbers. A missing value is stored as 0, and terms that do not depend on it, such as its normalizer, are paired
            with a column that is 1 where the value is observed.
        pairs: (F, 2) int64, from 0 to C.
        weights: (K, F) finite numbers.
        labels: as for `Table`.
        center: (C,) finite numbers; zeros if not given.
    """

    columns: Tensor
    pairs: Tensor
    weights: Tensor
    labels: Tensor | None = None
    center: Tensor | None = None

    @property
    def live(self) -> Tensor:
        return self.weights

    @property
    def num_states(self) -> int:
        return self.weights.shape[0]

    @property
    def num_steps(self) -> int:
        return len(self.columns)

    def with_live(self, live: Tensor) -> Quadratic:
        return self._replace(weights=live)

    def shared(self, classes: Tensor) -> Quadratic:
        """As `Table.shared`."""
        return self._replace(weights=self.weights[classes])

    def gathered(self, gradient: Tensor, classes: Tensor) -> Tensor:
        """As `Table.gathered`."""
        return torch.zeros_like(self.weights, dtype=gradient.dtype).index_add(0, classes, gradient)

    def features(self, dtype: torch.dtype) -> Tensor:
        """(steps, F) the products of columns, computed in the given type."""
        columns = self.centered(dtype)
        return columns[:, self.pairs[:, 0]] * columns[:, self.pairs[:, 1]]

    def centered(self, dtype: torch.dtype) -> Tensor:
        """(steps, C + 1) the columns, with the center subtracted, and a column of ones."""
        columns = self.columns.to(dtype)
        columns = columns if self.center is None else columns - self.center.to(dtype)
        return torch.cat([columns, columns.new_ones(len(columns), 1)], 1)

    def rows(self) -> Tensor:
        """(steps, K) log-likelihoods, differentiable in `live`; labels are applied."""
        dtype = torch.promote_types(self.columns.dtype, self.weights.dtype)
        return _labelled(self.features(dtype) @ self.weights.T.to(dtype), self.labels)

    def pull(self, gamma: Tensor) -> Tensor:
        """The gradient in `live`, (K, F) expected sums of products, from (steps, K) weighted posterior probabilities."""
        return gamma.T @ self.features(gamma.dtype)

    def at(self, steps: Tensor) -> Quadratic:
        """The evidence of some of the steps."""
        return self._replace(columns=self.columns[steps], labels=None if self.labels is None else self.labels[steps])


class Rows(NamedTuple):
    """log p(y_t | k) = log_likelihoods[t, k].

    Args:
        log_likelihoods: (steps, K); -inf forbids a state.
        labels: as for `Table`.
    """

    log_likelihoods: Tensor
    labels: Tensor | None = None

    @property
    def live(self) -> Tensor:
        return self.log_likelihoods

    @property
    def num_states(self) -> int:
        return self.log_likelihoods.shape[1]

    @property
    def num_steps(self) -> int:
        return len(self.log_likelihoods)

    def with_live(self, live: Tensor) -> Rows:
        return self._replace(log_likelihoods=live)

    def shared(self, classes: Tensor) -> Rows:
        """As `Table.shared`."""
        return self._replace(log_likelihoods=self.log_likelihoods[:, classes])

    def gathered(self, gradient: Tensor, classes: Tensor) -> Tensor:
        """As `Table.gathered`."""
        return torch.zeros_like(self.log_likelihoods, dtype=gradient.dtype).index_add(1, classes, gradient)

    def rows(self) -> Tensor:
        """(steps, K) log-likelihoods, differentiable in `live`; labels are applied."""
        return _labelled(self.log_likelihoods, self.labels)

    def pull(self, gamma: Tensor) -> Tensor:
        """The gradient in `live`, which is the (steps, K) weighted posterior probabilities themselves."""
        return gamma

    def at(self, steps: Tensor) -> Rows:
        """The evidence of some of the steps."""
        return Rows(self.log_likelihoods[steps], None if self.labels is None else self.labels[steps])


Evidence = Table | Quadratic | Rows


def _labelled(rows: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return rows
    labels = labels.long()[:, None]
    return rows.masked_fill((labels >= 0) & (labels != torch.arange(rows.shape[1], device=rows.device)), -torch.inf)
