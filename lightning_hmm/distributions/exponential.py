"""Emissions of exponential families whose columns are independent given the state."""

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
    """Moments of predicted observations. The predictive distribution is a mixture over the states.

    Attributes:
        mean: (N, D) predictive means.
        variance: (N, D) predictive variances.

    Example:
        >>> import torch
        >>> from lightning_hmm import HMM, Poisson
        >>> model = HMM(2, Poisson(), num_features=1).set_parameters(emission={"rate": [[1.0], [3.0]]})
        >>> model.emission.predict(torch.tensor([[0.5, 0.5]], dtype=torch.float64))
        Moments(mean=tensor([[2.]], dtype=torch.float64), variance=tensor([[3.]], dtype=torch.float64))
    """

    mean: Tensor
    variance: Tensor


def mixture_moments(weights: Tensor, means: Tensor, variances: Tensor) -> Moments:
    """Computes the moments of N mixtures with weights (N, K) of K components with means and variances (K, D)."""
    mean = weights @ means
    spread = (means - mean[:, None]) ** 2  # (N, K, D)
    return Moments(mean, torch.einsum("nk,nkd->nd", weights, variances + spread))


class ExponentialFamily(Emission):
    r"""Base class of emissions of real columns that are independent given the state.

    Each column has a distribution of an exponential family with T statistics:

    .. math:: \log p(y \mid k) = \sum_d \Big( \sum_{s < T} w_{ksd} \, t_s(y_d) + w_{kTd} + h(y_d) \Big)

    The weights w are the parameters. The gradient with respect to :math:`w_{ksd}` is the expected sum of
    :math:`t_s(y_d)` over the visits of state k, and the gradient with respect to the last weight is the expected number
    of visits at which column d is observed. A missing value contributes to neither.

    To define a family, set `products` and `names` and implement `blocks`, from which the statistics are computed,
    `estimate`, which computes the parameters from sums of statistics, `weights_of`, which converts the parameters to
    weights, and `moments`, `sample`, `log_prior` and `num_free_parameters`. `Poisson` is a short implementation.

    Example:
        >>> from lightning_hmm.distributions import ExponentialFamily, Gaussian, Poisson
        >>> issubclass(Gaussian, ExponentialFamily), Poisson.names
        (True, ('rate',))
    """

    weights: nn.Parameter  # (restarts, K, T + 1, D)
    # Each statistic as the product of two blocks of columns, given by their numbers; ``None`` stands for a constant 1.
    products: ClassVar[tuple[tuple[int, int | None], ...]]

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        categorical = next((column.name for column in columns if column.is_categorical), None)
        if categorical is not None:
            raise ValueError(
                f"A {type(self).__name__} emission must have real columns, but column {categorical!r} is categorical."
            )
        self._begin_allocation()
        self.num_features = len(columns)
        self.column_names = [column.name for column in columns]
        self.weights = nn.Parameter(
            torch.zeros(restarts, num_states, len(self.products) + 1, self.num_features, dtype=torch.float64)
        )
        self._pairs: dict[bool, Tensor] = {}

    @abstractmethod
    def blocks(self, values: Tensor) -> list[Tensor]:
        """Returns (steps, D) blocks of columns, from which the statistics are formed.

        Entries at missing values are ignored.
        """

    @property
    def location(self) -> Tensor | None:
        """(D,) offset, if `blocks` only subtracts an offset from the values; otherwise ``None``."""
        return None

    def log_base(self, values: Tensor) -> Tensor | None:
        """Returns the (steps, D) values h(y), which do not depend on the parameters, or ``None`` if they are zero."""
        return None

    @abstractmethod
    def estimate(self, sums: Tensor, visits: Tensor, weight: Tensor | float) -> tuple[tuple[Tensor, ...], Tensor]:
        """Estimates the parameters from expected statistics.

        Args:
            sums: (R, K, T, D) expected sums of the statistics.
            visits: (R, K, D) expected numbers of visits at which each column is observed.
            weight: Factor of the log prior.

        Returns:
            The parameters, (R, K, D) each, and a mask (R, K, D) of the entries that could be estimated.
        """

    @abstractmethod
    def weights_of(self, *parameters: Tensor) -> Tensor:
        """Returns the (R, K, T + 1, D) weights of parameters (R, K, D)."""

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, D) means and variances of the best restart."""

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
            # A single weight is the sum of the constants of all columns.
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
        # There is a single constant for all columns if no value is missing.
        constants = gradient[:, sums[0].numel() : gradient.shape[1] - self._has_base]
        visits = constants.expand(num_states, size)
        return [torch.cat([sums, visits.unsqueeze(1)], 1)]

    @property
    def _has_base(self) -> bool:
        return type(self).log_base is not ExponentialFamily.log_base

    def _pairs_of(self, complete: bool, device: torch.device) -> Tensor:
        """Returns (F, 2) the numbers of the two columns whose product each feature is."""
        found = self._pairs.get(complete)
        if found is None or found.device != device:
            size, places = self.num_features, torch.arange(self.num_features)
            num_blocks = 1 + max(block for product in self.products for block in product if block is not None)
            end = size * num_blocks
            base = end if complete else end + size
            one = base + self._has_base  # an index one past the last column represents a constant 1
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
        """Sets parameters by name, (K, D) each, to the same values in all restarts.

        All parameters must be given if none has a value yet.
        """
        strange = next((name for name in values if name not in self.names), None)
        if strange is not None:
            raise ValueError(
                f"A {type(self).__name__} emission has the parameters {', '.join(self.names)}, "
                f"but {strange!r} was given."
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
        """Returns the shape of a parameter without the axis of restarts: states by columns."""
        return self.weights.shape[1], self.num_features

    def check_parameter(self, name: str, value: Tensor) -> None:
        """Raises a `ValueError` if a parameter (R, K, D) is out of range. Every parameter must be finite."""
        refuse_where(~value.isfinite(), name, "be finite", value)

    def predict(self, state_probs: Tensor) -> Moments:
        return mixture_moments(state_probs, *self.moments())


def refuse_where(wrong: Tensor, name: str, rule: str, value: Tensor) -> None:
    """Raises a `ValueError` that reports the first state and column at which a parameter (R, K, D) is wrong."""
    if bool(wrong.any()):
        where = tuple(torch.nonzero(wrong)[0].tolist())
        raise ValueError(
            f"`{name}` must {rule}, but that of state {where[1]}, column {where[2]} is {float(value[where]):g}."
        )


def require_observed(weights: Tensor, names: Sequence[str]) -> None:
    """Raises a `ValueError` that names the first column without an observed value.

    Args:
        weights: (D,) total weight of the observed values of each column.
        names: Names of the columns.
    """
    missing = torch.nonzero(weights == 0).flatten()
    if len(missing):
        raise ValueError(
            f"Every column must be observed somewhere, but {names[int(missing[0])]!r} is missing at every step. "
            "Leave the column out."
        )
