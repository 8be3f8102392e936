"""Emissions that depend on inputs: generalized linear models of the observed columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, check_not_negative
from lightning_hmm.distributions.checks import (
    checked_parameters,
    count_free,
    refuse_value,
    refuse_where,
    require_real,
)
from lightning_hmm.distributions.free_entries import number_free
from lightning_hmm.distributions.gaussian import weighted_mean_var
from lightning_hmm.distributions.gaussian_regression import estimate, products_of, quadratic, weights_of
from lightning_hmm.distributions.inputs import Inputs, refuse_collinear, with_ones
from lightning_hmm.distributions.iterative import MOST_HELD, Newton
from lightning_hmm.distributions.linear_predictors import ridge_curvature
from lightning_hmm.distributions.newton import Curvature
from lightning_hmm.distributions.regression_outcomes import OUTCOMES, linear_predictors
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.sequences import Sequences

Family = Literal["gaussian", "bernoulli", "poisson", "categorical"]


class Regression(Newton, Emission):
    r"""A generalized linear model of the observations on inputs, with coefficients for each state.

    Use it if the observations depend on known inputs, such as the stimulus of a trial or the temperature of a day. With
    inputs :math:`x_t` (P), coefficients :math:`\beta_{kd}` (P) and intercepts :math:`b_{kd}`, the linear predictor of
    column d in state k is :math:`\eta = b_{kd} + \beta_{kd} \cdot x_t`, and

    .. math::
        \text{gaussian:}\; y \sim N(\eta, v_{kd}), \qquad
        \text{bernoulli:}\; P(y = 1) = \frac{1}{1 + e^{-\eta}}, \qquad
        \text{poisson:}\; y \sim \text{Poisson}(e^{\eta}).

    For "categorical", the observations are symbols, each of the V symbols has its own predictor, and
    :math:`P(y = v) = e^{\eta_v} / \sum_u e^{\eta_u}`. There is no reference symbol. The ridge
    prior makes the coefficients identifiable; they sum to zero over the symbols.

    The M-step of "gaussian" is weighted least squares on expected statistics of fixed size. The other families store
    the posterior probabilities of an epoch, and Newton's method runs until it has converged; see `Iterative` for online
    EM and for large data. The log prior is, with ridge strength s and the variance :math:`V_d` of the data,

    .. math::
        -\sum_{kd} \frac{s \lVert \beta_{kd} \rVert^2 + s_v V_d}{2 v_{kd}} \quad \text{(gaussian)}, \qquad
        -\frac{s}{2} \sum_{kd} \big( \lVert \beta_{kd} \rVert^2 + b_{kd}^2 \big) \quad \text{(otherwise)}.

    The prior assumes inputs of about unit variance, so standardize them. A missing observation contributes nothing, and
    a Gaussian, Bernoulli or Poisson column may be missing alone. Inputs must not be missing.

    Args:
        family: "gaussian", "bernoulli" (columns of 0 and 1), "poisson" (columns of counts) or "categorical" (symbols).
        inputs: Number of inputs P of each step, or the indices, from 0, of the inputs to use.
        coefficient_prior: Strength s of the ridge prior. It must be positive for "categorical".
        variance_prior: Strength :math:`s_v` of the prior of the variances, in steps, for "gaussian".
        tied: Names of the parameters that all states share: "coefficients", "intercept" or "variance".
        frozen: Names of the parameters that training leaves unchanged.
        most_held: Maximum number of posterior probabilities that are stored; see `Iterative`.
        learning_rate: Step size of a gradient step in online EM; see `Iterative`.

    Example:
        >>> from lightning_hmm import HMM, Regression
        >>> model = HMM(num_states=2, emission=Regression("bernoulli", inputs=1), num_features=1)
        >>> model = model.set_parameters(emission={"coefficients": [[[4.0]], [[-4.0]]], "intercept": [[0.0], [0.0]]})
        >>> choices = model.sample(inputs=[[[-1.0], [1.0], [1.0], [-1.0]]], seed=1)
        >>> choices.values.flatten().tolist()
        [0.0, 1.0, 1.0, 0.0]
    """

    slopes: nn.Parameter  # (restarts, K, D, P)
    intercepts: nn.Parameter  # (restarts, K, D)
    variances: nn.Parameter  # (restarts, K, D)
    center: Tensor
    input_center: Tensor
    data_variance: Tensor
    needs_inputs = True
    support = ("real numbers, zeros and ones, counts or symbols", "Use another family, or mark the value as missing.")
    m_step = 'least squares; Newton\'s method for other families than "gaussian"'

    def __init__(
        self,
        family: Family,
        inputs: int | list[int],
        coefficient_prior: float = 1e-3,
        variance_prior: float = 1e-6,
        tied: Sequence[str] = (),
        frozen: Sequence[str] = (),
        most_held: int = MOST_HELD,
        learning_rate: float = 0.1,
    ) -> None:
        if family not in get_args(Family):
            raise ValueError(f"`family` must be one of {', '.join(get_args(Family))}, but is {family!r} instead.")
        self.names = ("coefficients", "intercept", "variance")[: 3 if family == "gaussian" else 2]
        super().__init__(tied, frozen, most_held=most_held, learning_rate=learning_rate)
        check_not_negative(coefficient_prior=coefficient_prior, variance_prior=variance_prior)
        if family == "categorical" and coefficient_prior == 0:
            raise ValueError(
                "`coefficient_prior` must be positive for a categorical Regression, whose coefficients it identifies, "
                "but is 0."
            )
        self.family, self.outcomes = family, OUTCOMES[family]
        self.inputs = Inputs(inputs, "emission")
        self.prior = {"coefficient_prior": coefficient_prior}
        if family == "gaussian":
            self.prior["variance_prior"] = variance_prior

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        return self.family == "gaussian"

    @property
    def reads_symbols(self) -> bool:  # type: ignore[override]
        return self.family == "categorical"

    @property
    def reads_counts(self) -> bool:  # type: ignore[override]
        return self.family in ("bernoulli", "poisson")

    @property
    def starts_from_data(self) -> bool:  # type: ignore[override]
        return self.family != "categorical"

    @property
    def num_restarts(self) -> int:
        return len(self.slopes)

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        self._check_columns(columns)
        self._begin_allocation()
        size = len(self.inputs)
        self.num_columns = len(columns)
        self.column_names = [column.name for column in columns]
        self.num_symbols = columns[0].num_categories if self.family == "categorical" else None
        # The outcomes are the symbols, or the columns.
        outcomes = self.num_symbols or len(columns)
        self.width = num_states * outcomes
        self.slopes = nn.Parameter(torch.zeros(restarts, num_states, outcomes, size, dtype=torch.float64))
        self.intercepts = nn.Parameter(torch.zeros(restarts, num_states, outcomes, dtype=torch.float64))
        if self.family == "gaussian":
            self.variances = nn.Parameter(torch.ones(restarts, num_states, outcomes, dtype=torch.float64))
            self.register_buffer("center", torch.zeros(outcomes, dtype=torch.float64))
            self.register_buffer("input_center", torch.zeros(size, dtype=torch.float64))
            self.register_buffer("data_variance", torch.ones(outcomes, dtype=torch.float64))
        names = [*["coefficients"] * size, "intercept"] * (outcomes if self.family == "categorical" else 1)
        self._masks = tuple(torch.tensor([name in given for name in names]) for given in (self.tied, self.frozen))
        self.free = number_free(num_states, *self._masks)

    def _check_columns(self, columns: Sequence[Column]) -> None:
        if self.family == "categorical":
            if len(columns) != 1 or not columns[0].is_categorical:
                kinds = ", ".join(f"{column.name!r} ({column.kind})" for column in columns)
                raise ValueError(
                    f"A categorical Regression must have one column of symbols, but the columns are {kinds}."
                )
            return
        require_real(self, columns)

    # Values

    @property
    def _stacked(self) -> dict[str, Tensor]:
        """The parameters of all restarts by name."""
        return dict(zip(self.names, self.parameters(), strict=True))

    @property
    def coefficients(self) -> Tensor:
        """(K, D, P) coefficients of the best restart, (K, V, P) for "categorical"."""
        return self.slopes[self.restart].detach()

    @property
    def intercept(self) -> Tensor:
        """(K, D) intercepts of the best restart, (K, V) for "categorical"."""
        return self.intercepts[self.restart].detach()

    @property
    def variance(self) -> Tensor:
        """(K, D) variances of the best restart, for "gaussian"."""
        return self.variances[self.restart].detach()

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws coefficients and intercepts from a standard normal distribution.

        Gaussian and Poisson regressions are then initialized from the data.
        """
        for parameter in (self.slopes, self.intercepts):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if self.family == "categorical":
                parameter.sub_(parameter.mean(2, keepdim=True))
        for name in self.tied:
            stacked = self._stacked[name]
            stacked.copy_(stacked[:, :1].expand_as(stacked).clone())
        self.is_set.fill_(self.family in ("bernoulli", "categorical"))

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Stores the means and variances of the data, and checks that the inputs are linearly independent."""
        inputs, weights = self.inputs.of(sequences), sequences.step_weights()
        if self.prior["coefficient_prior"] == 0:
            refuse_collinear(inputs, weights, "Leave it out, or set `coefficient_prior` to a positive value.")
        if self.family == "gaussian":
            center, variance = weighted_mean_var(sequences, self.column_names)
            self.center.copy_(center)
            self.data_variance.copy_(variance)
            self.input_center.copy_(weights @ inputs / weights.sum())

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        if self.is_closed:
            Emission.start(self, sequences, responsibilities)
        else:
            self.increase_from(sequences, responsibilities)

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """Sets parameters by name, to the same values in all restarts.

        All parameters must be given if none has a value yet.
        """
        for name, value in checked_parameters(self, values, self._stacked, self._check).items():
            self._stacked[name].copy_(value)
        self.is_set.fill_(True)

    def _check(self, name: str, value: Tensor) -> None:
        wrong, rule = ~value.isfinite(), "be finite"
        if name == "variance":
            wrong, rule = wrong | (value <= 0), "be positive and finite"
        refuse_where(wrong, name, rule, value, "column" if self.num_symbols is None else "symbol")

    def check(self, sequences: Sequences) -> None:
        if self.num_symbols is not None:
            sequences.check(self.num_symbols, None)
        else:
            sequences.check(None, self.num_columns)
        self.inputs.check(sequences)
        if self.outcomes.support is not None and sequences.values.is_cpu:
            wrong = ~self.outcomes.supports(sequences.values) & ~sequences.values.isnan()
            if bool(wrong.any()):
                refuse_value(self, sequences, wrong, *self.outcomes.support)

    # Evidence

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        slopes, intercepts, *variances = (parameter[restart] for parameter in self.parameters())
        if not variances:
            return slopes, intercepts
        moved = intercepts + slopes @ self.input_center - self.center
        return (weights_of(_joined([slopes, moved]), variances[0]),)

    @property
    def num_statistics(self) -> int:
        return int(self.is_closed)

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Evidence:
        inputs = self.inputs.of(batch)
        if self.family == "gaussian":
            values = batch.values.double() - self.center
            return quadratic(natural[0], values, inputs - self.input_center, batch.is_complete)
        return Rows(self.outcomes.log_rows(linear_predictors(_joined(natural), with_ones(inputs)), batch.values))

    # M-step

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        return Emission.statistics(self, evidence, gradient, natural) if self.is_closed else []

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        if not self.is_closed:
            return super().maximize(statistics, weight)
        found = estimate(
            products_of(statistics[0], len(self.inputs) + 1),
            _joined([self.slopes, self.intercepts]),
            self.variances,
            (self.center, torch.cat([self.input_center, self.input_center.new_zeros(1)])),
            self.prior["coefficient_prior"] * weight,
            self.prior["variance_prior"] * weight * self.data_variance,
            self._masks,
            next((rule for rule in ("frozen", "tied") if "variance" in getattr(self, rule)), None),
        )
        self.slopes.copy_(found.coefficients[..., :-1])
        self.intercepts.copy_(found.coefficients[..., -1])
        self.variances.copy_(found.variance)
        self.is_set.fill_(True)
        return (~found.seen).any(-1).sum()

    # The entries of a problem are the coefficients and the intercept of a column, or those of all symbols.

    def pack(self, natural: Sequence[Tensor]) -> Tensor:
        entries = _joined(natural)
        return entries.flatten(1).unsqueeze(1) if self.family == "categorical" else entries

    def unpack(self, packed: Tensor) -> list[Tensor]:
        entries = packed.reshape(len(packed), -1, len(self.inputs) + 1)
        return [entries[..., :-1], entries[..., -1]]

    def curvature(self, packed: Tensor, *example: Any) -> Curvature:
        batch, posteriors = example
        design = with_ones(self.inputs.of(batch))
        return self.outcomes.curvature(_joined(self.unpack(packed)), design, batch.values, posteriors.double())

    def prior_curvature(self, packed: Tensor) -> Curvature:
        return ridge_curvature(packed, self.prior["coefficient_prior"])

    @torch.no_grad()
    def log_prior(self) -> Tensor:
        if not self.is_closed:
            return super().log_prior()
        added = self.prior["variance_prior"] * self.data_variance / self.variances
        added = added[:, :1] if "variance" in self.tied else added
        ridge = self.prior["coefficient_prior"] * self.slopes.square().sum(-1) / self.variances
        return -0.5 * (added.flatten(1).sum(1) + ridge.flatten(1).sum(1))

    def num_free_parameters(self, restart: int) -> int:
        states, outcomes, size = self.slopes.shape[1:]
        outcomes -= self.family == "categorical"  # the predictors of the symbols sum to zero
        sizes = {"coefficients": outcomes * size, "intercept": outcomes, "variance": outcomes}
        return count_free(self, states, sizes)

    # Observations

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        raise ValueError("A Regression is sampled from states with inputs. Call `emit`, or `model.sample(inputs=...)`.")

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        inputs, chosen = self.inputs.of(states), states.values.long()
        scores = (self.coefficients[chosen] @ inputs.unsqueeze(-1)).squeeze(-1) + self.intercept[chosen]
        variance = self.variance[chosen] if self.family == "gaussian" else None
        return states.with_values(self.outcomes.draw(scores, variance, generator).to(scores.device))

    def predict(self, state_probs: Tensor, inputs: Tensor | None = None) -> Any:
        """Returns the distribution of N observations.

        Args:
            state_probs: (N, K) probabilities of the states.
            inputs: (N, M) inputs of the observations.
        """
        if inputs is None:
            raise ValueError("The prediction of a Regression depends on the inputs of the step. Give `inputs`.")
        design = with_ones(inputs[:, self.inputs.numbers].double())
        scores = linear_predictors(_joined([self.coefficients, self.intercept]), design)
        return self.outcomes.predict(state_probs, scores, self.variance if self.family == "gaussian" else None)


def _joined(values: Sequence[Tensor]) -> Tensor:
    """Appends intercepts (...) to coefficients (..., P)."""
    return torch.cat([values[0], values[1].unsqueeze(-1)], -1)
