"""Exponential families whose features are independent given the state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, as_numbers
from lightning_hmm.inference.evidence import Evidence, Quadratic
from lightning_hmm.sequences import Sequences


class Moments(NamedTuple):
    """mean, variance: (N, D) moments of a predicted observation, which is a mixture over the states."""

    mean: Tensor
    variance: Tensor


def mixture_moments(weights: Tensor, means: Tensor, variances: Tensor) -> Moments:
    """The moments of N mixtures of the same K components: weights (N, K), means and variances (K, D)."""
    mean = weights @ means
    spread = (means - mean[:, None]) ** 2  # (N, K, D)
    return Moments(mean, torch.einsum("nk,nkd->nd", weights, variances + spread))


class ExponentialFamily(Emission):
    r"""Real columns that are independent given the state, each of an exponential family with T statistics.

    .. math:: \log p(y \mid k) = \sum_d \Big( \sum_{s < T} w_{ksd} \, t_s(y_d) + w_{kTd} + h(y_d) \Big)

    Every weight is free, so that its gradient is a sum of statistics over the expected visits: of :math:`t_s(y_d)`, and for the last
    weight the number of visits at which feature d is observed. A missing value drops out of both.

    A family provides `blocks` and `products`, which make the statistics, and two functions between weights and sums: `estimate`, which
    turns sums into named parameters, and `weights_of`, the way back.
    """

    weights: nn.Parameter  # (restarts, K, T + 1, D)
    # The statistics as products of two blocks of columns; ``None`` stands for 1.
    products: ClassVar[tuple[tuple[int, int | None], ...]]
    names: ClassVar[tuple[str, ...]]  # of the parameters that `set` takes and `weights_of` expects, each (K, D)

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        categorical = next((column.name for column in columns if column.is_categorical), None)
        if categorical is not None:
            raise ValueError(
                f"A {type(self).__name__} emission must have real columns, but column {categorical!r} is categorical."
            )
        self._begin_allocation()
        self.num_features, self.column_names = len(columns), [column.name for column in columns]
        self.weights = nn.Parameter(
            torch.zeros(restarts, num_states, len(self.products) + 1, self.num_features, dtype=torch.float64)
        )
        self._pairs: dict[bool, Tensor] = {}

    @abstractmethod
    def blocks(self, values: Tensor) -> list[Tensor]:
        """(steps, D) columns of which the statistics are made; what they hold at missing values has no effect."""

    @property
    def location(self) -> Tensor | None:
        """(D,) what is subtracted from the values, where `blocks` does nothing else; ``None`` if it makes other columns."""
        return None

    def log_base(self, values: Tensor) -> Tensor | None:
        """(steps, D) h(y), which no parameter has an influence on."""
        return None

    @abstractmethod
    def estimate(self, sums: Tensor, visits: Tensor, weight: Tensor | float) -> tuple[tuple[Tensor, ...], Tensor]:
        """The parameters from sums (R, K, T, D) of the statistics over visits (R, K, D), and (R, K, D) where there are any."""

    @abstractmethod
    def weights_of(self, *parameters: Tensor) -> Tensor:
        """(R, K, T + 1, D) the weights of parameters (R, K, D)."""

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """(K, D) means and variances of the chosen restart."""

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return (self.weights[restart],)

    @property
    def num_statistics(self) -> int:
        return 1

    # Evidence

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Quadratic:
        (weights,) = natural  # (K, T + 1, D)
        complete = batch.is_complete
        pairs = self._pairs_of(complete, weights.device)
        if complete and self.location is not None:
            # One weight holds the sum of the constants of all features.
            return Quadratic(
                batch.values,
                pairs,
                torch.cat([weights[:, :-1].flatten(1), weights[:, -1].sum(1, keepdim=True)], 1),
                None,
                self.location,
            )
        values = batch.values.to(weights.dtype)
        columns, base = self.blocks(values), self.log_base(values)
        constant = weights[:, -1].sum(1, keepdim=True) if complete else weights[:, -1]
        if not complete:
            observed = ~values.isnan()
            columns = [*(torch.where(observed, block, 0.0) for block in columns), observed.to(values.dtype)]
            base = None if base is None else torch.where(observed, base, 0.0)
        parts = [weights[:, :-1].flatten(1), constant]
        if base is not None:
            columns.append(base.sum(1, keepdim=True))
            parts.append(weights.new_ones(len(weights), 1))
        return Quadratic(torch.cat(columns, 1), pairs, torch.cat(parts, 1))

    def needs_graph(self, batch: Sequences) -> bool:
        return False

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        num_states, num_statistics, size = natural[0].shape
        sums = gradient[:, : (num_statistics - 1) * size].unflatten(1, (num_statistics - 1, size))
        constants = gradient[
            :, sums[0].numel() : gradient.shape[1] - self._has_base
        ]  # one for all columns if no value is missing
        visits = constants.expand(num_states, size)
        return [torch.cat([sums, visits.unsqueeze(1)], 1)]

    @property
    def _has_base(self) -> bool:
        return type(self).log_base is not ExponentialFamily.log_base

    def _pairs_of(self, complete: bool, device: torch.device) -> Tensor:
        """(F, 2) which columns each feature is the product of."""
        found = self._pairs.get(complete)
        if found is None or found.device != device:
            size, places = self.num_features, torch.arange(self.num_features)
            end = size * (
                1 + max(block for product in self.products for block in product if block is not None)
            )  # of the blocks
            base = end if complete else end + size
            one = base + self._has_base  # the number of columns stands for a constant of 1
            ones = torch.full((size,), one) if complete else end + places
            pairs = [
                torch.stack([i * size + places, ones if j is None else j * size + places], 1) for i, j in self.products
            ]
            pairs.append(torch.stack([ones, ones], 1)[:1] if complete else torch.stack([ones, ones], 1))
            if self._has_base:
                pairs.append(torch.tensor([[base, one]]))
            found = self._pairs[complete] = torch.cat(pairs).to(device)
        return found

    # EM

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        (sums,) = statistics
        parameters, seen = self.estimate(sums[:, :, :-1], sums[:, :, -1], weight)
        self.weights.copy_(torch.where(seen.unsqueeze(2), self.weights_of(*parameters), self.weights))
        self.is_set.fill_(True)
        return (~seen).any(-1).sum()

    # Values

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """Sets parameters by name, (K, D) each, for all restarts alike. All of them must be given until the parameters have values."""
        strange = next((name for name in values if name not in self.names), None)
        if strange is not None:
            raise ValueError(
                f"A {type(self).__name__} emission has the parameters {', '.join(self.names)}, but {strange!r} was given."
            )
        lacking = next((name for name in self.names if name not in values), None)
        if lacking is not None and not bool(self.is_set):
            raise ValueError(f"`{lacking}` must be given, too, as long as the emission has no values from data.")
        restarts, parameters = len(self.weights), []
        for name in self.names:
            shape = self.parameter_shape(name)
            value = as_numbers(name, values.get(name, getattr(self, name)), self.weights.device)
            if value.shape not in (shape, (restarts, *shape)):
                raise ValueError(f"`{name}` must have shape {shape}, but has {tuple(value.shape)} instead.")
            self.check_parameter(name, value.expand(restarts, *shape))
            parameters.append(value.expand(restarts, *shape))
        self.weights.copy_(self.weights_of(*parameters))
        self.is_set.fill_(True)

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter without the axis of restarts: states by columns."""
        return self.weights.shape[1], self.num_features

    def check_parameter(self, name: str, value: Tensor) -> None:
        """Raises where a parameter (R, K, D) is outside of its range; finite numbers are required of all."""
        refuse_where(~value.isfinite(), name, "be finite", value)

    def predict(self, state_probs: Tensor) -> Moments:
        return mixture_moments(state_probs, *self.moments())


def refuse_where(wrong: Tensor, name: str, rule: str, value: Tensor) -> None:
    """Raises an error that names the first state and column where a parameter (R, K, D) is wrong."""
    if bool(wrong.any()):
        where = tuple(torch.nonzero(wrong)[0].tolist())
        raise ValueError(
            f"`{name}` must {rule}, but that of state {where[1]}, column {where[2]} is {float(value[where]):g}."
        )


def require_observed(weights: Tensor, names: Sequence[str]) -> None:
    """Raises an error that names the first column without an observed value; `weights` (D,) are those of the observed values of each column."""
    missing = torch.nonzero(weights == 0).flatten()
    if len(missing):
        raise ValueError(
            f"Every column must be observed somewhere, but {names[int(missing[0])]!r} is missing at every step. Leave the column out."
        )
