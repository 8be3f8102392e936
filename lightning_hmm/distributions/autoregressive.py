"""Autoregressive Gaussian emissions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.autoregressive_estimates import Noise, regress
from lightning_hmm.distributions.autoregressive_paths import forecast_moments, lags_of, simulate
from lightning_hmm.distributions.base import Emission, check_not_negative
from lightning_hmm.distributions.checks import (
    checked_parameters,
    count_free,
    refuse_where,
    require_positive_definite,
    require_real,
)
from lightning_hmm.distributions.gaussian import check_covariance_kind, weighted_mean_var
from lightning_hmm.distributions.inputs import with_ones
from lightning_hmm.distributions.moments import Moments, mixture_moments
from lightning_hmm.distributions.quadratic_forms import regression_of, regression_weights, symmetric
from lightning_hmm.inference.evidence import Evidence, Quadratic
from lightning_hmm.sequences import Sequences


class Autoregressive(Emission):
    r"""Vectors of D real columns, each of which is a linear function of the L vectors before it, plus Gaussian noise.

    .. math:: y_t \mid z_t = k \sim N(b_k + \sum_{l=1}^L A_{kl} \, y_{t-l}, \; \Sigma_k)

    Use it for time series whose dynamics switch between regimes. The first L steps of a sequence are conditioned on:
    they have no evidence. A step that has a missing value, or a missing value among its lags, is treated as missing.
    Lags never cross the border between two sequences. The process need not be stationary.

    The M-step is a weighted least-squares regression for each state. The prior is
    :math:`\exp(-\frac12 \sum_k \operatorname{tr} \Sigma_k^{-1} (s V + r \sum_l A_{kl} V A_{kl}^T))`, where V is the
    diagonal matrix of the variances of the data. If parameters are tied, coefficients and covariances are updated in
    turn.

    With `around_mean`, the emission is an `AroundMean`, in which deviations from the mean of the state follow the
    autoregression.

    Args:
        order: Number L of lags.
        covariance: Kind of covariance of the noise, as for `Gaussian`: "diagonal", "spherical", "full" or "tied".
        variance_prior: Strength s of the prior of the covariances, in steps.
        ridge: Strength r of the prior of the coefficients, in steps.
        before: Lags before the first step of a sequence: "missing", so that the first L steps are conditioned on, or
            "zeros".
        around_mean: Whether the autoregression is that of the deviations from the means.
        tied: Parameters that all states share: any of "coefficients", "intercept" and "covariance" or "variance".
            By default none, and with `around_mean` the coefficients and the variance.
        frozen: Parameters that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Autoregressive
        >>> model = HMM(num_states=2, emission=Autoregressive(order=1), num_features=1)
        >>> parameters = {"coefficients": [[[[0.9]]], [[[-0.5]]]], "intercept": [[0.0], [1.0]]}
        >>> parameters["variance"] = [[1.0], [2.0]]
        >>> model = model.set_parameters(transition=[[0.5, 0.5], [0.5, 0.5]], emission=parameters)
        >>> model.emission.coefficients.shape  # states, lags, columns, columns
        torch.Size([2, 1, 1, 1])
        >>> model.predict_next([[[0.0], [2.0]]]).mean  # a mixture of 0.9 * 2 and 1 - 0.5 * 2
        tensor([[0.9000]], dtype=torch.float64)
    """

    weights: nn.Parameter  # (restarts, states, F), of the products of two of the columns y_t, its lags and 1
    center: Tensor
    data_variance: Tensor

    depends_on_past = True
    m_step = "least squares"
    is_around_mean = False
    default_tied: tuple[str, ...] = ()
    names_of_lines: tuple[str, ...] = ("coefficients", "intercept")  # names of the parameters without the covariance

    @classmethod
    def class_for(cls, options: Mapping[str, Any]) -> type[Self]:
        if not options.get("around_mean"):
            return cls
        return next(family for family in (cls, *cls.__subclasses__()) if family.is_around_mean)

    def __init__(
        self,
        order: int = 1,
        covariance: Literal["diagonal", "spherical", "full", "tied"] = "diagonal",
        variance_prior: float = 1e-6,
        ridge: float = 0.0,
        before: Literal["missing", "zeros"] = "missing",
        *,
        around_mean: bool = False,
        tied: Sequence[str] | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        if type(order) is not int or order < 1:
            raise ValueError(f"`order` must be a whole number of at least 1, but is {order!r} instead.")
        check_covariance_kind(covariance)
        if before not in ("missing", "zeros"):
            raise ValueError(f"`before` must be missing or zeros, but is {before!r} instead.")
        check_not_negative(variance_prior=variance_prior, ridge=ridge)
        spread = "covariance" if covariance in ("full", "tied") else "variance"
        self.names = (*self.names_of_lines, spread)
        super().__init__(self.default_tied if tied is None else tied, frozen)
        if covariance == "tied" and spread not in self.tied:
            self.tied += (spread,)
        self.order, self.kind, self.before = order, covariance, before
        self.prior = {"variance_prior": variance_prior, "ridge": ridge}

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        require_real(self, columns)
        self._begin_allocation()
        size = self.num_features = len(columns)
        self.num_states, self.column_names = num_states, [column.name for column in columns]
        self.register_buffer("center", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("data_variance", torch.ones(size, dtype=torch.float64))
        shape = (restarts, self._num_rows, size)
        coefficients = torch.zeros(*shape, self.num_regressors, dtype=torch.float64)
        self.weights = nn.Parameter(regression_weights(coefficients, torch.eye(size).double().expand(*shape, size)))

    @property
    def num_regressors(self) -> int:
        """Number of the lagged columns and the constant."""
        return self.order * self.num_features + 1

    @property
    def _num_rows(self) -> int:
        """Number of states for which there is evidence."""
        return self.num_states

    # Parameters. The weights are those of `regression_weights` for values from which the center is subtracted.

    def lines_of(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the coefficients (..., D, L D + 1) of the centered regressors and the covariances (..., D, D)."""
        return regression_of(weights.detach(), self.num_features, self.num_regressors)

    def _shift(self) -> Tensor:
        """Returns the matrix T that maps centered regressors to regressors that are not centered."""
        shift = torch.eye(self.num_regressors).to(self.center)
        shift[:-1, -1] = self.center.repeat(self.order)
        return shift

    def _values_of(self, weights: Tensor) -> dict[str, Tensor]:
        """Returns the parameters by name, for weights (..., K, F)."""
        coefficients, covariance = self.lines_of(weights)
        lags = coefficients[..., :-1].unflatten(-1, (self.order, -1)).transpose(-2, -3)
        intercept = self.center + (torch.linalg.solve(self._shift().mT, coefficients.mT).mT)[..., -1]
        spread = covariance if self.names[-1] == "covariance" else covariance.diagonal(dim1=-2, dim2=-1)
        return dict(zip(self.names, (lags, intercept, spread), strict=True))

    def _weights_of(self, lags: Tensor, intercept: Tensor, spread: Tensor) -> Tensor:
        """Returns the weights of parameters in the order of `names`. This is the inverse of `_values_of`."""
        coefficients = torch.cat([lags.transpose(-2, -3).flatten(-2), (intercept - self.center).unsqueeze(-1)], -1)
        return regression_weights(
            coefficients @ self._shift(), spread if self.names[-1] == "covariance" else spread.diag_embed()
        )

    def _value(self, name: str) -> Tensor:
        """Returns a parameter of the best restart by name."""
        if name not in self.names:
            raise AttributeError
        return self._values_of(self.weights[self.restart])[name]

    @property
    def coefficients(self) -> Tensor:
        """(K, L, D, D) matrices of the lags, of the best restart."""
        return self._value("coefficients")

    @property
    def intercept(self) -> Tensor:
        """(K, D) intercepts of the best restart."""
        return self._value("intercept")

    @property
    def covariance(self) -> Tensor:
        """(K, D, D) covariances of the noise, of the best restart."""
        return self.lines_of(self.weights[self.restart, self._state_rows])[1]

    @property
    def variance(self) -> Tensor:
        """(K, D) variances of the noise, of the best restart."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """Sets parameters by name, to the same values in all restarts.

        All parameters must be given if none has a value yet.
        """
        present = self._values_of(self.weights)
        given = checked_parameters(self, values, present, self._check)
        self.weights.copy_(self._weights_of(*({**present, **given}[name] for name in self.names)))
        self.is_set.fill_(True)

    def _check(self, name: str, value: Tensor) -> None:
        if name == "covariance":
            require_positive_definite(name, value)
            return
        columns = value.transpose(2, 3) if name == "coefficients" else value
        refuse_where(~columns.isfinite(), name, "be finite", columns)
        if name == "variance":
            refuse_where(value <= 0, name, "be positive", value)
            if self.kind == "spherical":
                refuse_where(value != value[..., :1], name, "be the same for all columns", value)

    # Data

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_features)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Stores the mean and the variances of the data. The parameters do not change."""
        longest = int(sequences.lengths.max()) if len(sequences) else 0
        if self.before == "missing" and longest <= self.order:
            raise ValueError(
                f"`order` must be less than the length of the longest sequence ({longest}), but is {self.order}. "
                "Lower it, or use longer sequences."
            )
        center, variance = (value.to(self.center.device) for value in weighted_mean_var(sequences, self.column_names))
        self.data_variance.copy_(variance)
        if not torch.equal(center, self.center):  # no rounding if training continues on the same data
            parameters = self._values_of(self.weights)
            self.center.copy_(center)
            self.weights.copy_(self._weights_of(*(parameters[name] for name in self.names)))

    @torch.no_grad()
    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        covariance = self.data_variance.diag().expand(*self.weights.shape[:2], -1, -1)
        coefficients = self.weights.new_zeros(*covariance.shape[:-1], self.num_regressors)
        self.weights.copy_(regression_weights(coefficients, covariance))
        super().start(sequences, responsibilities)

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return (self.weights[restart],)

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Quadratic:
        values = batch.values.to(self.center.dtype) - self.center
        starts = batch.repeat_interleave(batch.offsets[:-1].to(values.device))
        steps = torch.arange(len(values), device=values.device)
        columns = torch.cat([values, lags_of(values, steps, starts, self.order, self._outside)], 1)
        used = ~columns.isnan().any(1, keepdim=True)
        columns = torch.cat([torch.where(used, columns, 0.0), used.to(columns.dtype)], 1)
        size = columns.shape[1]
        return Quadratic(columns, torch.triu_indices(size, size, device=values.device).T.contiguous(), natural[0])

    @property
    def _outside(self) -> Tensor:
        """(D,) value before the first step, minus the center; NaN if it is missing."""
        return -self.center if self.before == "zeros" else torch.full_like(self.center, torch.nan)

    def needs_graph(self, batch: Sequences) -> bool:
        return False

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        return [gradient]

    # EM

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        sums = symmetric(statistics[0], self.num_features + self.num_regressors)
        coefficients, covariance = self.lines_of(self.weights)
        # An intercept that is tied or frozen is one of regressors that are not centered.
        centered = "intercept" not in (*self.tied, *self.frozen)
        shift = torch.eye(self.num_regressors).to(sums) if centered else self._shift()
        change = torch.block_diag(torch.eye(self.num_features).to(sums), shift)
        coefficients = torch.linalg.solve(shift.mT, coefficients.mT).mT
        lags = torch.arange(self.num_regressors) < self.num_regressors - 1
        shared, fixed = (
            torch.where(lags, "coefficients" in names, "intercept" in names) for names in (self.tied, self.frozen)
        )
        ridge = torch.nn.functional.pad(self._ridge * weight, (0, 1))  # none for the intercept
        sums, visits = change @ sums @ change.mT, sums[..., -1, -1]
        found = regress(
            sums, visits, coefficients, covariance, (shared, fixed), self.noise, ridge, self._added * weight
        )
        self.weights.copy_(regression_weights(found.coefficients @ shift, found.covariance))
        self.is_set.fill_(True)
        return found.kept.sum()

    @property
    def noise(self) -> Noise:
        """How covariances are estimated."""
        return Noise(self.kind, self.names[-1] in self.tied, self.names[-1] in self.frozen)

    @property
    def _ridge(self) -> Tensor:
        """(L D,) numbers that the prior adds to the sums of squares of the lags."""
        return (self.prior["ridge"] * self.data_variance).repeat(self.order)

    @property
    def _added(self) -> Tensor:
        """(D,) numbers that the prior adds to the sums of squares of the residuals."""
        return self.prior["variance_prior"] * self.data_variance

    def log_prior(self) -> Tensor:
        coefficients, covariance = self.lines_of(self.weights[:, self._state_rows])
        lags = coefficients[..., :-1] * self._ridge.sqrt()
        scatter = lags @ lags.mT + self._added.diag()
        return -0.5 * (torch.linalg.inv(covariance) * scatter).sum((1, 2, 3))

    @property
    def _state_rows(self) -> Tensor:
        """(K,) for each state of the model, a row of the weights that has its coefficients and covariance."""
        return torch.arange(self.num_states, device=self.center.device)

    def num_free_parameters(self, restart: int) -> int:
        size = self.num_features
        matrix = {"variance": 1 if self.kind == "spherical" else size, "covariance": size * (size + 1) // 2}
        sizes = {"coefficients": self.order * size * size, "intercept": size, "mean": size, **matrix}
        return count_free(self, self.num_states, sizes)

    # Samples and predictions

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Draws one sequence, in which the lags before the first step are as in `emit`."""
        return self.emit(Sequences(states, torch.tensor([0, len(states)])), generator).values

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        """Draws the steps of each sequence in turn.

        Before the first step, values are zeros, or the mean of the data.
        """
        path = states.padded().clamp(min=0)
        past = [self._outside.nan_to_num().expand(len(path), -1)] * self.order
        values = simulate(path, *self.lines_of(self.weights[self.restart]), past, generator)
        return states.with_values(states.packed(values) + self.center)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, D) means and variances of a step whose lags are equal to the mean of the data."""
        coefficients, _ = self.lines_of(self.weights[self.restart])
        return self.center + coefficients[..., -1], self.variance

    def predict(self, state_probs: Tensor) -> Moments:
        """Returns the moments of N observations whose lags are equal to the mean of the data; see `forecast`."""
        return mixture_moments(state_probs, *self.moments())

    def forecast(
        self,
        sequences: Sequences,
        state_probs: Tensor,
        move: Callable[[Tensor, int], Tensor],
        steps: int,
        classes: Tensor | None = None,
    ) -> Moments:
        """Returns the exact moments of the observation `steps` steps after the end of each sequence.

        Args:
            sequences: The N sequences. Missing values among their last L steps are replaced by the mean of the data.
            state_probs: (N, S) probabilities of the state of the first step after the end.
            move: Linear function of (M, S) messages and of the number n of steps after the first one, which performs
            the
                transition into that step. M is a multiple of N.
            steps: Number of steps.
            classes: (S,) model state of each state of the transitions, if these differ.
        """
        starts, ends = (part.to(self.center.device) for part in (sequences.offsets[:-1], sequences.offsets[1:]))
        values = sequences.values.to(self.center.dtype) - self.center
        padded = torch.cat([values, torch.zeros_like(self.center)[None]])  # not empty if all sequences are
        lags = lags_of(padded, ends, starts, self.order, self._outside).nan_to_num()
        lines = self.lines_of(self.weights[self.restart])
        if classes is not None and len(lines[0]) != len(classes):
            lines = lines[0][classes], lines[1][classes]
        mean, variance = forecast_moments(with_ones(lags), *lines, state_probs, move, steps)
        return Moments(mean + self.center, variance)
