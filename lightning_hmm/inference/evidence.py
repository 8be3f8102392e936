r"""Evidence: log-likelihoods of the observations for each state, in the three forms that inference accepts.

Backends do not depend on emission distributions. An emission converts its natural parameters and a batch of data into
one of these forms:

`Table`
    For symbols: a (K, V) matrix of log-probabilities, which is looked up by the symbol of each step.
`Quadratic`
    For exponential families whose statistics are products of two data columns, such as all Gaussians, Poisson,
    Bernoulli, and products of these.
`Rows`
    For all other emissions: (steps, K) log-likelihoods.

The property `live` is the tensor with the gradient. An E-step returns the gradient of the log-likelihood with respect
to it: expected visits by symbol for `Table`, expected sums of products for `Quadratic`, and posterior probabilities for
`Rows`.

All forms have optional `labels`: (steps,) known states, with -1 where the state is unknown. At a labeled step all other
states are impossible. `with_known_states` adds labels and weights of the states to evidence.

Example:
    >>> import torch
    >>> from lightning_hmm.inference import Quadratic, Rows, Table
    >>> coin = Table(torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), symbols=torch.tensor([0, 1, 2]))  # 2 is missing
    >>> coin.rows().exp()
    tensor([[0.5000, 0.9000],
            [0.5000, 0.1000],
            [1.0000, 1.0000]])
    >>> x = torch.tensor([[0.0], [2.0]])  # one column; the number 1 stands for a factor of 1
    >>> pairs = torch.tensor([[0, 0], [0, 1]])  # x * x and x * 1
    >>> Quadratic(x, pairs, weights=torch.tensor([[-0.5, 0.0], [-0.5, 1.0]])).rows()
    tensor([[ 0.,  0.],
            [-2.,  0.]])
    >>> Rows(torch.zeros(2, 2), labels=torch.tensor([1, -1])).rows()
    tensor([[-inf, 0.],
            [0., 0.]])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Table(NamedTuple):
    """log p(y_t | k) = log_probs[k, symbols[t]].

    Args:
        log_probs: (K, V) log-probabilities. They are -inf for symbols that a state never emits.
        symbols: (steps,) uint8, int16, int32 or int64. The number V represents a missing symbol.
        labels: (steps,) known states, -1 where unknown. ``None`` if no state is known.
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

    def shared(self, classes: Tensor) -> Evidence:
        """Returns evidence for S states. The emission of state s is that of state ``classes[s]`` of this evidence.

        A label is a class, so all states of the class are possible at a labeled step.
        """
        if self.labels is not None:
            return Rows(self.rows()[:, classes])
        return self._replace(log_probs=self.log_probs[classes])

    def gathered(self, gradient: Tensor, classes: Tensor) -> Tensor:
        """Sums a gradient with respect to ``shared(classes).live`` over the states of each class.

        Returns:
            The gradient with respect to `live`.
        """
        if self.labels is not None:
            return self.pull(_sum_classes(gradient, classes, self.num_states))
        return torch.zeros_like(self.log_probs, dtype=gradient.dtype).index_add(0, classes, gradient)

    def rows(self) -> Tensor:
        """Returns (steps, K) log-likelihoods with labels applied, differentiable with respect to `live`."""
        padded = torch.cat([self.log_probs.T, self.log_probs.new_zeros(1, self.num_states)])
        return _labelled(padded[self.symbols.long()], self.labels)

    def pull(self, gamma: Tensor) -> Tensor:
        """Computes the gradient in `live`, (K, V) expected visits, from weighted posterior probabilities (steps, K)."""
        visits = gamma.new_zeros(self.log_probs.shape[1] + 1, self.num_states)
        return visits.index_add_(0, self.symbols.long(), gamma)[:-1].T

    def at(self, steps: Tensor) -> Table:
        """Returns the evidence of the given steps."""
        return self._replace(symbols=self.symbols[steps], labels=None if self.labels is None else self.labels[steps])


class Quadratic(NamedTuple):
    """log p(y_t | k) = sum over f of weights[k, f] * u[t, i_f] * u[t, j_f].

    Here, u = columns - center and (i_f, j_f) = pairs[f]. The column number C represents a constant factor of 1, so the
    data can be used as columns without a copy.

    Args:
        columns: (steps, C) finite numbers. Store a missing value as 0, and pair the terms that do not depend on the
            value, such as its normalizer, with a column that is 1 where the value is observed and 0 elsewhere.
        pairs: (F, 2) column numbers from 0 to C, int64.
        weights: (K, F) finite numbers.
        labels: Known states, as for `Table`.
        center: (C,) finite numbers. They are zero if not given.
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

    def shared(self, classes: Tensor) -> Evidence:
        """See `Table.shared`."""
        if self.labels is not None:
            return Rows(self.rows()[:, classes])
        return self._replace(weights=self.weights[classes])

    def gathered(self, gradient: Tensor, classes: Tensor) -> Tensor:
        """See `Table.gathered`."""
        if self.labels is not None:
            return self.pull(_sum_classes(gradient, classes, self.num_states))
        return torch.zeros_like(self.weights, dtype=gradient.dtype).index_add(0, classes, gradient)

    def features(self, dtype: torch.dtype) -> Tensor:
        """Returns (steps, F) products of columns, computed in the given data type."""
        columns = self.centered(dtype)
        return columns[:, self.pairs[:, 0]] * columns[:, self.pairs[:, 1]]

    def centered(self, dtype: torch.dtype) -> Tensor:
        """Returns (steps, C + 1): the columns minus the center, and a column of ones."""
        columns = self.columns.to(dtype)
        columns = columns if self.center is None else columns - self.center.to(dtype)
        return torch.cat([columns, columns.new_ones(len(columns), 1)], 1)

    def rows(self) -> Tensor:
        """Returns (steps, K) log-likelihoods with labels applied, differentiable with respect to `live`."""
        dtype = torch.promote_types(self.columns.dtype, self.weights.dtype)
        return _labelled(self.features(dtype) @ self.weights.T.to(dtype), self.labels)

    def pull(self, gamma: Tensor) -> Tensor:
        """Computes the gradient in `live`, (K, F) expected sums of products, from weighted posterior probabilities."""
        return gamma.T @ self.features(gamma.dtype)

    def at(self, steps: Tensor) -> Quadratic:
        """Returns the evidence of the given steps."""
        return self._replace(columns=self.columns[steps], labels=None if self.labels is None else self.labels[steps])


class Rows(NamedTuple):
    """log p(y_t | k) = log_likelihoods[t, k].

    Args:
        log_likelihoods: (steps, K) log-likelihoods. They are -inf where a state is impossible.
        labels: Known states, as for `Table`.
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
        """See `Table.shared`."""
        return Rows(self.rows()[:, classes])

    def gathered(self, gradient: Tensor, classes: Tensor) -> Tensor:
        """See `Table.gathered`."""
        return _sum_classes(gradient, classes, self.num_states)

    def rows(self) -> Tensor:
        """Returns (steps, K) log-likelihoods with labels applied, differentiable with respect to `live`."""
        return _labelled(self.log_likelihoods, self.labels)

    def pull(self, gamma: Tensor) -> Tensor:
        """Computes the gradient in `live`, which is equal to the weighted posterior probabilities (steps, K)."""
        return gamma

    def at(self, steps: Tensor) -> Rows:
        """Returns the evidence of the given steps."""
        return Rows(self.log_likelihoods[steps], None if self.labels is None else self.labels[steps])


Evidence = Table | Quadratic | Rows


def _sum_classes(gradient: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Sums (steps, S) numbers over the states of each class."""
    return gradient.new_zeros(len(gradient), num_classes).index_add(1, classes, gradient)


def with_known_states(
    evidence: Evidence, labels: Tensor | None, state_weights: Tensor | None, classes: Tensor | None = None
) -> Evidence:
    """Returns evidence that is restricted by labels and multiplied by state weights.

    Labels do not change the form of the evidence. With weights, the result is `Rows`; the `pull` method of the given
    evidence converts a gradient with respect to them.

    Args:
        evidence: Evidence without labels.
        labels: (steps,) known states, -1 where unknown.
        state_weights: (steps, K) non-negative weights of the states, which are factors of p(y_t | k).
        classes: (S,) state to which labels and weights refer, for each of the S states of the evidence, if these
        differ.

    Example:
        >>> import torch
        >>> from lightning_hmm.inference.evidence import Rows, with_known_states
        >>> labels, weights = torch.tensor([1, -1]), torch.tensor([[1, 2], [1, 1]])
        >>> with_known_states(Rows(torch.zeros(2, 2)), labels, weights).rows().exp()
        tensor([[0., 2.],
                [1., 1.]])
    """
    if state_weights is None and classes is None:
        return evidence._replace(labels=labels)
    rows = evidence.rows()
    if state_weights is not None:
        factors = state_weights.to(rows.dtype).log()
        rows = rows + (factors if classes is None else factors[:, classes])
    if labels is not None and classes is not None:
        other = (labels[:, None] >= 0) & (labels[:, None] != classes)
        return Rows(rows.masked_fill(other, -torch.inf))
    return Rows(rows, labels)


def _labelled(rows: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return rows
    labels = labels.long()[:, None]
    return rows.masked_fill((labels >= 0) & (labels != torch.arange(rows.shape[1], device=rows.device)), -torch.inf)
