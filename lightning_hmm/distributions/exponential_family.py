"""Emissions of exponential families whose columns are independent given the state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, check_not_negative
from lightning_hmm.distributions.checks import (
    count_free,
    expanded,
    refuse_unknown,
    refuse_value,
    refuse_where,
    require_observed,
    require_real,
    require_tied,
)
from lightning_hmm.distributions.moments import Moments, mixture_moments
from lightning_hmm.distributions.newton_autograd import NewtonProblem
from lightning_hmm.distributions.parameters import NamedParameter, Range
from lightning_hmm.inference.evidence import Evidence, Quadratic
from lightning_hmm.sequences import Sequences


class ExponentialFamily(Emission):
    r"""Base class of emissions of real columns that are independent given the state.

    Each column has a distribution of an exponential family with T statistics:

    .. math:: \log p(y \mid k) = \sum_d \Big( \sum_{j < T} w_{kjd} \, t_j(y_d) + w_{kTd} + h(y_d) \Big)

    The weights w are the parameters. The gradient with respect to :math:`w_{kjd}` is the expected sum of
    :math:`t_j(y_d)` over the visits of state k, and the gradient with respect to the last weight is the expected number
    of visits at which column d is observed. A missing value contributes to neither.

    By default the prior is conjugate. It has the effect of s additional steps in each state, at which the statistics
    have the average values :math:`m_{jd}` of the whole data:

    .. math:: \log p(w) = s \sum_k \sum_d \Big( \sum_{j < T} w_{kjd} \, m_{jd} + w_{kTd} \Big)

    These averages include half a step with typical values of the family, so that the prior is proper even if a column
    does not vary. If all parameters are tied, the sum over the states is divided by K, so that the prior counts once.

    To define a family, set `products`, `support` and `typical`, declare the parameters as `NamedParameter`, and
    implement `blocks`, from which the statistics are computed, `weights_of` and `parameters_of`, which convert
    parameters to weights and back, `estimate`, which computes the parameters from sums of statistics, `moments`,
    `supports` and `draw`. `Poisson` is a short implementation, and `Gamma` is one without a closed form.

    Args:
        prior_steps: Strength s of the prior, in steps. It must be positive, because without a prior the estimates from
            steps that do not vary are infinite or at the border of their range.
        tied: Names of the parameters that have the same value in all states. Each column has a value of its own.
        frozen: Names of the parameters that training leaves unchanged. Those that have not been set before are
            initialized from the data.

    Example:
        >>> from lightning_hmm.distributions import ExponentialFamily, Gaussian, Poisson
        >>> issubclass(Gaussian, ExponentialFamily), Poisson.names
        (True, ('rate',))
    """

    weights: nn.Parameter  # (restarts, K, T + 1, D)
    # Each statistic as the product of two blocks of columns, given by their numbers; ``None`` stands for a constant 1.
    products: ClassVar[tuple[tuple[int, int | None], ...]]
    # Averages of the T statistics in widely spread data, the default of `reference`.
    typical: tuple[float, ...]
    # Whether `estimate` returns the maximum. Otherwise its result is improved by Newton's method.
    is_exact: ClassVar[bool] = True
    ranges: tuple[Range, ...] = ()  # of the parameters, in the order of `names`
    data_statistics: Tensor  # (T, D) averages of the statistics in the data

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        declared = {name: value for name, value in vars(cls).items() if isinstance(value, NamedParameter)}
        if declared:
            cls.names = tuple(declared)
            cls.ranges = tuple(value.range for value in declared.values())

    def __init__(self, prior_steps: float = 1e-3, tied: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
        super().__init__(tied, frozen)
        check_not_negative(prior_steps=prior_steps)
        if prior_steps == 0:
            raise ValueError(f"`prior_steps` must be positive, but is {prior_steps} instead.")
        self.prior = {"prior_steps": prior_steps}

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        require_real(self, columns)
        self._begin_allocation()
        self.num_features = len(columns)
        self.column_names = [column.name for column in columns]
        self.weights = nn.Parameter(
            torch.zeros(restarts, num_states, len(self.products) + 1, self.num_features, dtype=torch.float64)
        )
        self._pairs: dict[bool, Tensor] = {}
        self._allocate_statistics()
        for name in self.frozen:
            value = torch.full((restarts, *self.parameter_shape(name)), torch.nan, dtype=torch.float64)
            self.register_buffer(f"frozen_{name}", value)

    def _allocate_statistics(self) -> None:
        """Creates the buffers for `set_data_stats`."""
        typical = torch.tensor(self.typical, dtype=torch.float64)
        self.register_buffer("data_statistics", typical[:, None].repeat(1, self.num_features))

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
    def weights_of(self, *parameters: Tensor) -> Tensor:
        """Returns the (..., T + 1, D) weights of parameters (..., D). It must be twice differentiable."""

    @abstractmethod
    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Returns the parameters (..., D) of weights (..., T + 1, D). This is the inverse of `weights_of`."""

    def supports(self, values: Tensor) -> Tensor:
        """Returns a mask of the values that the family can emit. Missing values are ignored."""
        return torch.ones_like(values, dtype=torch.bool)

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        """Estimates the parameters from statistics, to which those of the prior have been added.

        It is not used if `maximize` is overridden.

        Args:
            sums: (R, K, T, D) sums of the statistics.
            visits: (R, K, D) numbers of visits at which each column is observed.

        Returns:
            The parameters, (R, K, D) each: the maximum, or an approximation if `is_exact` is false. Entries without
            visits are ignored.
        """
        raise NotImplementedError

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        """Draws an array of values from parameters, which are arrays (steps, D).

        It is not used if `sample` is overridden.
        """
        raise NotImplementedError

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

    def reference(self, mean: Tensor) -> Tensor:
        """Returns statistics (T, D) that are added to the average statistics of the data, with a weight of half a step.

        They keep the prior inside the range of the parameters if a column does not vary.

        Args:
            mean: (T, D) average statistics of the data.
        """
        return torch.tensor(self.typical, dtype=mean.dtype, device=mean.device)[:, None].expand_as(mean)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        observed, values = sequences.observed, sequences.values.double()
        weights = sequences.step_weights()[:, None] * observed
        total = weights.sum(0)
        require_observed(total, self.column_names)
        blocks = [torch.where(observed, block, 0.0) for block in self.blocks(values)]
        sums = torch.stack([(blocks[i] * (1.0 if j is None else blocks[j]) * weights).sum(0) for i, j in self.products])
        self.data_statistics.copy_((sums + 0.5 * self.reference(sums / total)) / (total + 0.5))

    @property
    def is_pooled(self) -> bool:
        """Whether all parameters are tied."""
        return len(self.tied) == len(self.names)

    def prior_statistics(self) -> Tensor:
        """Returns the (T + 1, D) statistics that the prior adds in each state."""
        steps = self.prior["prior_steps"] / (self.weights.shape[1] if self.is_pooled else 1)
        return steps * torch.cat([self.data_statistics, torch.ones_like(self.data_statistics[:1])])

    def log_prior(self) -> Tensor:
        return (self.weights.detach() * self.prior_statistics()).flatten(1).sum(1)

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        (sums,) = statistics
        seen = sums[:, :, -1] > 0
        total = sums + weight * self.prior_statistics()
        updated = seen
        if self.tied:
            updated = seen.any(1, keepdim=True).expand_as(seen)
            total = total.sum(1, keepdim=True).expand_as(total) if self.is_pooled else total
        weights = self.weights_of(*self._maximum(total))
        self.weights.copy_(torch.where(updated.unsqueeze(2), weights, self.weights))
        self.is_set.fill_(True)
        return (~seen).any(-1).sum()

    def _maximum(self, total: Tensor) -> tuple[Tensor, ...]:
        """Returns the parameters that maximize the sum of weights times statistics (R, K, T + 1, D)."""
        found = list(self.estimate(total[:, :, :-1], total[:, :, -1]))
        if self.is_exact and not self.frozen and (self.is_pooled or not self.tied):
            return tuple(found)
        before = self.parameters_of(self.weights)
        if self.tied and not self.is_pooled:
            pooled = total.sum(1, keepdim=True).expand_as(total)
            shared = self.estimate(pooled[:, :, :-1], pooled[:, :, -1])
            found = [shared[i] if name in self.tied else found[i] for i, name in enumerate(self.names)]
        found = [self.kept(name, value) for name, value in zip(self.names, found, strict=True)]
        free = [i for i, name in enumerate(self.names) if name not in self.frozen]
        return self._improved(found, before, free, total) if free else tuple(found)

    def given(self, name: str, value: Tensor) -> Tensor:
        """Returns `value`, or the value of the parameter if it is frozen and has one."""
        if name not in self.frozen:
            return value
        frozen = self.get_buffer(f"frozen_{name}")
        return torch.where(frozen.isnan(), value, frozen)

    def kept(self, name: str, value: Tensor) -> Tensor:
        """Returns the same as `given`. A frozen parameter has this value from now on."""
        value = self.given(name, value)
        if name in self.frozen:
            self.get_buffer(f"frozen_{name}").copy_(value)
        return value

    def read(self, name: str, value: Tensor) -> Tensor:
        """Returns a parameter of the best restart, given its `value` as computed from the weights.

        Values that are tied or frozen would otherwise differ by rounding.
        """
        if name in self.frozen:
            return self.get_buffer(f"frozen_{name}")[self.restart].clone()
        return value[:1].expand_as(value).clone() if name in self.tied else value

    def _improved(
        self, found: Sequence[Tensor], before: Sequence[Tensor], free: Sequence[int], total: Tensor
    ) -> tuple[Tensor, ...]:
        """Maximizes over the parameters with the numbers `free` by Newton's method.

        It starts from the better of the values `found` and `before`, so that the result is at least as good as both.
        """
        tied = [self.names[i] in self.tied and not self.is_pooled for i in free]
        visits = total[:, :, -1:]
        visits = visits.sum(1, keepdim=True) if any(tied) else visits
        total = total / torch.where(visits > 0, visits, 1.0)

        def merged(values: Sequence[Tensor]) -> list[Tensor]:
            parameters = list(found)
            for i, value in zip(free, values, strict=True):
                parameters[i] = value
            return parameters

        problem = NewtonProblem(
            lambda *values: (self.weights_of(*merged(values)) * total).sum(2), [self.ranges[i] for i in free], tied
        )
        return tuple(merged(problem.maximum([[start[i] for i in free] for start in (found, before)])))

    def num_free_parameters(self, restart: int) -> int:
        return count_free(self, self.weights.shape[1], dict.fromkeys(self.names, self.num_features))

    # Values

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """Sets parameters by name, (K, D) each, to the same values in all restarts.

        As long as none has a value, all parameters must be given, or only frozen ones. The others are then initialized
        from the data.
        """
        refuse_unknown(self, values)
        is_set = bool(self.is_set)
        lacking = [name for name in self.names if name not in values]
        partial = not is_set and bool(lacking)
        if partial and not set(values) <= set(self.frozen):
            raise ValueError(f"`{lacking[0]}` must be given, too, as long as the emission has no values from data.")
        restarts, parameters = len(self.weights), []
        for name in self.names:
            shape = self.parameter_shape(name)
            known = values[name] if name in values else self._placeholder(name) if partial else getattr(self, name)
            value = expanded(name, known, (restarts, *shape), self.weights.device)
            self.check_parameter(name, value)
            if name in values:
                require_tied(self, name, value)
            parameters.append(value)
            if name in values and name in self.frozen:
                self.get_buffer(f"frozen_{name}").copy_(value)
        self.weights.copy_(self.weights_of(*parameters))
        self.is_set.fill_(not partial)

    def _placeholder(self, name: str) -> Tensor:
        """Returns any value (K, D) in the range of a parameter, which is used as long as there is no other."""
        zero = torch.zeros(self.parameter_shape(name), dtype=torch.float64, device=self.weights.device)
        return self.ranges[self.names.index(name)].from_real(zero)

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter without the axis of restarts: states by columns."""
        return self.weights.shape[1], self.num_features

    def check_parameter(self, name: str, value: Tensor) -> None:
        """Raises a `ValueError` if a parameter (R, K, D) is out of its range."""
        refuse_where(~value.isfinite(), name, "be finite", value)
        range_ = self.ranges[self.names.index(name)]
        refuse_where(~range_.contains(value), name, range_.rule, value)

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_features)
        values = sequences.values
        if not values.is_cpu:
            return
        wrong = ~self.supports(values) & ~values.isnan()
        if bool(wrong.any()):
            refuse_value(self, sequences, wrong, *self.support)

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        # torch has generators for few distributions only, so numpy draws, with a seed from the generator.
        random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        parameters = [getattr(self, name)[states].cpu().numpy() for name in self.names]
        return torch.from_numpy(np.asarray(self.draw(parameters, random), dtype=np.float64)).to(states.device)

    def predict(self, state_probs: Tensor) -> Moments:
        return mixture_moments(state_probs, *self.moments())
