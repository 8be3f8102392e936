"""Autoregressive Gaussian emissions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, as_numbers, check_not_negative
from lightning_hmm.distributions.exponential import Moments, mixture_moments
from lightning_hmm.distributions.gaussian import weighted_mean_var
from lightning_hmm.distributions.least_squares import least_squares
from lightning_hmm.inference.evidence import Evidence, Quadratic
from lightning_hmm.sequences import Sequences

_SWEEPS = 10  # alternations between coefficients and covariances in an M-step, where each depends on the other


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
        >>> parameters = {"coefficients": [[[[0.9]]], [[[-0.5]]]], "intercept": [[0.0], [1.0]], "variance": [[1.0], [2.0]]}
        >>> model = model.set_parameters(transition=[[0.5, 0.5], [0.5, 0.5]], emission=parameters)
        >>> model.emission.coefficients.shape  # states, lags, columns, columns
        torch.Size([2, 1, 1, 1])
        >>> model.predict_next([[[0.0], [2.0]]]).mean  # a mixture of 0.9 * 2 and 1 - 0.5 * 2
        tensor([[0.9000]], dtype=torch.float64)
    """

    weights: nn.Parameter  # (restarts, states, F), of the products of two of the columns y_t, its lags and 1
    center: Tensor
    data_variance: Tensor
    upper: Tensor

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
        if covariance not in ("diagonal", "spherical", "full", "tied"):
            raise ValueError(f"`covariance` must be diagonal, spherical, full or tied, but is {covariance!r} instead.")
        if before not in ("missing", "zeros"):
            raise ValueError(f"`before` must be missing or zeros, but is {before!r} instead.")
        check_not_negative(variance_prior=variance_prior, ridge=ridge)
        spread = "covariance" if covariance in ("full", "tied") else "variance"
        self.names = (*self.names_of_lines, spread)
        super().__init__(self.default_tied if tied is None else tied, frozen)
        self.order, self.kind, self.before = order, covariance, before
        self.prior = {"variance_prior": variance_prior, "ridge": ridge}

    @property
    def _is_spread_tied(self) -> bool:
        return self.kind == "tied" or self.names[-1] in self.tied

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        categorical = next((column.name for column in columns if column.is_categorical), None)
        if categorical is not None:
            raise ValueError(
                f"An Autoregressive emission must have real columns, but column {categorical!r} is categorical."
            )
        self._begin_allocation()
        size = self.num_features = len(columns)
        self.num_states, self.column_names = num_states, [column.name for column in columns]
        self.register_buffer("center", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("data_variance", torch.ones(size, dtype=torch.float64))
        upper = torch.triu_indices(size + self.num_regressors, size + self.num_regressors)
        self.register_buffer("upper", upper, persistent=False)
        shape = (restarts, self._num_rows, size)
        coefficients = torch.zeros(*shape, self.num_regressors, dtype=torch.float64)
        self.weights = nn.Parameter(self._encode(coefficients, torch.eye(size).double().expand(*shape, size)))

    @property
    def num_regressors(self) -> int:
        """Number of the lagged columns and the constant."""
        return self.order * self.num_features + 1

    @property
    def _num_rows(self) -> int:
        """Number of states for which there is evidence."""
        return self.num_states

    # Conversion between weights and parameters. With v = (y_t, y_t-1, ..., y_t-L, 1), where the center is subtracted from
    # the values, the log-density is -v' M v / 2 and the weights are the upper entries of -M / 2, twice off the diagonal.

    def _encode(self, coefficients: Tensor, covariance: Tensor) -> Tensor:
        """Converts coefficients (..., D, L D + 1) of the centered regressors and covariances (..., D, D) to weights."""
        factor = torch.linalg.cholesky_ex(covariance).L
        errors = torch.cat([torch.eye(self.num_features).to(coefficients).expand_as(covariance), -coefficients], -1)
        matrix = errors.mT @ torch.cholesky_solve(errors, factor)
        constant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + self.num_features * math.log(2 * math.pi)
        matrix[..., -1, -1] += constant
        i, j = self.upper
        return -matrix[..., i, j] * torch.where(i == j, 0.5, 1.0).to(matrix)

    def _decode(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Converts weights to coefficients and covariances. This is the inverse of `_encode`."""
        matrix = -self._symmetric(weights, 2.0)
        size = self.num_features
        factor = torch.linalg.cholesky(matrix[..., :size, :size])
        return torch.cholesky_solve(-matrix[..., :size, size:], factor), torch.cholesky_inverse(factor)

    def _symmetric(self, entries: Tensor, diagonal: float) -> Tensor:
        """Returns the symmetric matrices with the given upper entries, of which those on the diagonal are multiplied."""
        i, j = self.upper
        size = self.num_features + self.num_regressors
        matrix = entries.new_zeros(*entries.shape[:-1], size, size)
        matrix[..., i, j] = entries * torch.where(i == j, diagonal, 1.0).to(entries)
        return matrix + matrix.triu(1).mT

    def _shift(self) -> Tensor:
        """Returns the matrix T that maps centered regressors to those that are not centered, apart from the response."""
        shift = torch.eye(self.num_regressors).to(self.center)
        shift[:-1, -1] = self.center.repeat(self.order)
        return shift

    def _values_of(self, weights: Tensor) -> dict[str, Tensor]:
        """Returns the parameters by name, for weights (..., K, F)."""
        coefficients, covariance = self._decode(weights)
        lags = coefficients[..., :-1].unflatten(-1, (self.order, -1)).transpose(-2, -3)
        intercept = self.center + (torch.linalg.solve(self._shift().mT, coefficients.mT).mT)[..., -1]
        spread = covariance if self.names[-1] == "covariance" else covariance.diagonal(dim1=-2, dim2=-1)
        return dict(zip(self.names, (lags, intercept, spread), strict=True))

    def _weights_of(self, lags: Tensor, intercept: Tensor, spread: Tensor) -> Tensor:
        """Returns the weights of parameters in the order of `names`. This is the inverse of `_values_of`."""
        coefficients = torch.cat([lags.transpose(-2, -3).flatten(-2), (intercept - self.center).unsqueeze(-1)], -1)
        return self._encode(
            coefficients @ self._shift(), spread if self.names[-1] == "covariance" else spread.diag_embed()
        )

    def _value(self, name: str) -> Tensor:
        """Returns a parameter of the best restart by name."""
        if name not in self.names:
            raise AttributeError
        return self._values_of(self.weights[self.restart].detach())[name]

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
        return self._decode(self.weights[self.restart, self._state_rows].detach())[1]

    @property
    def variance(self) -> Tensor:
        """(K, D) variances of the noise, of the best restart."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """Sets parameters by name, to the same values in all restarts.

        All parameters must be given if none has a value yet.
        """
        strange = next((name for name in values if name not in self.names), None)
        if strange is not None:
            raise ValueError(
                f"An Autoregressive emission has the parameters {', '.join(self.names)}, but {strange!r} was given."
            )
        lacking = next((name for name in self.names if name not in values), None)
        if lacking is not None and not bool(self.is_set):
            raise ValueError(f"`{lacking}` must be given, too, as long as the emission has no values from data.")
        present = self._values_of(self.weights.detach())
        given = {name: as_numbers(name, values[name], self.center.device) for name in values}
        for name, value in given.items():
            shape = present[name].shape
            if value.shape not in (shape, shape[1:]):
                raise ValueError(f"`{name}` must have shape {tuple(shape[1:])}, but has {tuple(value.shape)} instead.")
            given[name] = value.expand(shape)
            self._check(name, given[name])
        self.weights.copy_(self._weights_of(*({**present, **given}[name] for name in self.names)))
        self.is_set.fill_(True)

    def _check(self, name: str, value: Tensor) -> None:
        """Raises a `ValueError` if a parameter with axes for restarts and states is invalid."""
        wrong = ~value.isfinite().flatten(2).all(-1)
        rule = "be finite"
        if name == self.names[-1] and not bool(wrong.any()):
            matrix = value if name == "covariance" else value.diag_embed()
            rule = "be positive" if name != "covariance" else "be symmetric and positive definite"
            gap = (matrix - matrix.mT).abs().amax((-2, -1)) > 1e-8 * matrix.abs().amax((-2, -1))
            wrong = gap | (torch.linalg.cholesky_ex(matrix).info != 0)
            if self.kind == "spherical" and not bool(wrong.any()):
                rule, wrong = "be the same for all columns", (value != value[..., :1]).any(-1)
        if (name in self.tied or (name == "covariance" and self.kind == "tied")) and not bool(wrong.any()):
            rule, wrong = "be the same for all states", (value != value[:, :1]).flatten(2).any(-1)
        if bool(wrong.any()):
            raise ValueError(f"`{name}` must {rule}, but that of state {int(torch.nonzero(wrong)[0, 1])} is not.")

    # Data

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_features)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Stores the mean and the variances of the data. The parameters do not change."""
        center, variance = (value.to(self.center.device) for value in weighted_mean_var(sequences, self.column_names))
        self.data_variance.copy_(variance)
        if not torch.equal(center, self.center):  # no rounding if training continues on the same data
            parameters = self._values_of(self.weights.detach())
            self.center.copy_(center)
            self.weights.copy_(self._weights_of(*(parameters[name] for name in self.names)))

    @torch.no_grad()
    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        covariance = self.data_variance.diag().expand(*self.weights.shape[:2], -1, -1)
        coefficients = self.weights.new_zeros(*covariance.shape[:-1], self.num_regressors)
        self.weights.copy_(self._encode(coefficients, covariance))
        super().start(sequences, responsibilities)

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return (self.weights[restart],)

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Quadratic:
        columns = self.lagged(batch)
        used = ~columns.isnan().any(1, keepdim=True)
        columns = torch.cat([torch.where(used, columns, 0.0), used.to(columns.dtype)], 1)
        return Quadratic(columns, self.upper.T.contiguous(), natural[0])

    def lagged(self, batch: Sequences) -> Tensor:
        """Returns (steps, (L + 1) D) the values minus the center, and their lags; NaN where they are missing."""
        values = batch.values.to(self.center.dtype) - self.center
        steps = torch.arange(len(values), device=values.device)
        position = steps - batch.repeat_interleave(batch.offsets[:-1].to(values.device))
        lags = [
            torch.where((position >= lag)[:, None], values[(steps - lag).clamp(min=0)], self._outside)
            for lag in range(1, self.order + 1)
        ]
        return torch.cat([values, *lags], 1)

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
        sums = self._symmetric(statistics[0], 1.0)
        coefficients, covariance = self._decode(self.weights.detach())
        # An intercept that is tied or frozen is one of regressors that are not centered.
        centered = "intercept" not in (*self.tied, *self.frozen)
        shift = torch.eye(self.num_regressors).to(sums) if centered else self._shift()
        change = torch.block_diag(torch.eye(self.num_features).to(sums), shift)
        coefficients = torch.linalg.solve(shift.mT, coefficients.mT).mT
        lags = torch.arange(self.num_regressors, device=sums.device) < self.num_regressors - 1
        shared, fixed = (
            torch.where(lags, "coefficients" in names, "intercept" in names) for names in (self.tied, self.frozen)
        )
        coefficients, covariance, kept = self.regress(
            change @ sums @ change.mT, coefficients, covariance, shared, fixed, sums[..., -1, -1], weight
        )
        self.weights.copy_(self._encode(coefficients @ shift, covariance))
        self.is_set.fill_(True)
        return kept.sum()

    def regress(
        self,
        sums: Tensor,
        coefficients: Tensor,
        covariance: Tensor,
        shared: Tensor,
        fixed: Tensor,
        visits: Tensor,
        weight: Tensor | float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Updates coefficients (R, K, D, F) and covariances (R, K, D, D) from the sums of products of y_t and regressors.

        `shared` and `fixed` are masks of the regressors, and `visits` (R, K) are the numbers of steps. The third result
        is a mask (R, K) of the states that keep their values for lack of steps.
        """
        size = self.num_features
        responses, products, squares = sums[..., :size, :size], sums[..., :size, size:], sums[..., size:, size:]
        ridge = torch.zeros_like(squares[0, 0].diagonal())
        ridge[: size * self.order] = (self.prior["ridge"] * weight * self.data_variance).repeat(self.order)
        squares = squares + ridge.diag()
        added = (self.prior["variance_prior"] * weight * self.data_variance).diag()
        seen = visits > 0
        once = not bool((shared & ~fixed).any()) or self._is_spread_tied or self.names[-1] in self.frozen
        for _ in range(1 if once else _SWEEPS):
            found = least_squares(squares, products, torch.linalg.inv(covariance), coefficients, shared, fixed)
            coefficients = torch.where(seen[..., None, None] | (shared & ~fixed), found, coefficients)
            cross = coefficients @ products.mT
            scatter = responses - cross - cross.mT + coefficients @ squares @ coefficients.mT + added
            covariance, spread = self._spread(scatter, visits, covariance)
        return coefficients, covariance, ~(seen & spread)

    def _spread(self, scatter: Tensor, visits: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the covariances of scatter matrices, and a mask of the states that have enough steps for one."""
        if self.names[-1] in self.frozen:
            return current, torch.ones_like(visits, dtype=torch.bool)
        if self._is_spread_tied:
            scatter, visits = scatter.sum(1, keepdim=True), visits.sum(1, keepdim=True)
        matrix = scatter / torch.where(visits > 0, visits, 1.0)[..., None, None]
        if self.names[-1] == "variance":
            variance = matrix.diagonal(dim1=-2, dim2=-1)
            variance = variance.mean(-1, keepdim=True).expand_as(variance) if self.kind == "spherical" else variance
            matrix = variance.diag_embed()
        enough = (visits > 0) & (torch.linalg.cholesky_ex(matrix).info == 0)
        return torch.where(enough[..., None, None], matrix, current), enough.expand(current.shape[:2])

    def log_prior(self) -> Tensor:
        coefficients, covariance = self._decode(self.weights.detach()[:, self._state_rows])
        lags = coefficients[..., :-1] * (self.prior["ridge"] * self.data_variance).repeat(self.order).sqrt()
        scatter = lags @ lags.mT + (self.prior["variance_prior"] * self.data_variance).diag()
        return -0.5 * (torch.linalg.inv(covariance) * scatter).sum((1, 2, 3))

    @property
    def _state_rows(self) -> Tensor:
        """(K,) for each state of the model, a row of the weights that has its coefficients and covariance."""
        return torch.arange(self.num_states, device=self.center.device)

    def num_free_parameters(self, restart: int) -> int:
        size, states = self.num_features, self.num_states
        matrix = {"variance": 1 if self.kind == "spherical" else size, "covariance": size * (size + 1) // 2}
        sizes = {"coefficients": self.order * size * size, "intercept": size, "mean": size, **matrix}
        tied = {*self.tied, *([self.names[-1]] if self._is_spread_tied else [])}
        return sum(sizes[name] * (1 if name in tied else states) for name in self.names if name not in self.frozen)

    # Samples and predictions

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Draws one sequence, in which the lags before the first step are as in `emit`."""
        return self.emit(Sequences(states, torch.tensor([0, len(states)])), generator).values

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        """Draws the steps of each sequence in turn. Before the first step, values are zeros, or the mean of the data."""
        coefficients, covariance = self._decode(self.weights[self.restart].detach())
        factor = torch.linalg.cholesky(covariance)
        path = states.padded().clamp(min=0)
        size = (len(path), self.num_features)
        before = self._outside.nan_to_num().expand(size)
        lags = [before] * self.order
        drawn = []
        for now in path.T:
            noise = torch.randn(size, generator=generator, dtype=torch.float64).to(before.device)
            regressors = torch.cat([*lags, noise.new_ones(len(path), 1)], 1).unsqueeze(-1)
            value = (coefficients[now] @ regressors + factor[now] @ noise.unsqueeze(-1)).squeeze(-1)
            lags = [value, *lags[:-1]]
            drawn.append(value)
        values = torch.stack(drawn, 1) if drawn else before.unsqueeze(1)[:, :0]
        return states.with_values(states.packed(values) + self.center)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, D) means and variances of a step whose lags are equal to the mean of the data."""
        coefficients, _ = self._decode(self.weights[self.restart].detach())
        return self.center + coefficients[..., -1], self.variance

    def predict(self, state_probs: Tensor) -> Moments:
        """Returns the moments of N observations whose lags are equal to the mean of the data; see `forecast`."""
        return mixture_moments(state_probs, *self.moments())

    def forecast(
        self, sequences: Sequences, state_probs: Tensor, move: Callable[[Tensor], Tensor], steps: int
    ) -> Moments:
        """Returns the exact moments of the observation `steps` steps after the end of each sequence.

        Args:
            sequences: The N sequences. Missing values among their last L steps are replaced by the mean of the data.
            state_probs: (N, S) probabilities of the state of the first step after the end.
            move: Linear function of (M, S) messages, which performs a transition.
            steps: Number of steps.
        """
        coefficients, covariance = self._decode(self.weights[self.restart].detach())
        size, width = self.num_features, self.num_regressors
        matrix = torch.zeros(len(coefficients), width, width).to(coefficients)
        matrix[:, :size] = coefficients
        kept = torch.arange(width - 1 - size)
        matrix[:, kept + size, kept] = 1.0
        matrix[:, -1, -1] = 1.0
        noise = torch.zeros_like(matrix)
        noise[:, :size, :size] = covariance
        last = self._last_regressors(sequences)
        # (N, S, F, F) second moments of the regressors of the next step, times the probability of its state.
        moments = state_probs[..., None, None] * (last[:, None, :, None] * last[:, None, None])
        for step in range(steps):
            if step:
                flat = moments.permute(0, 2, 3, 1)
                moments = move(flat.reshape(-1, flat.shape[-1])).reshape(flat.shape).permute(0, 3, 1, 2)
            moments = matrix @ moments @ matrix.mT + moments[..., -1:, -1:] * noise
        total = moments.sum(1)
        mean = total[:, :size, -1]
        return Moments(mean + self.center, total[:, :size, :size].diagonal(dim1=-2, dim2=-1) - mean**2)

    def _last_regressors(self, sequences: Sequences) -> Tensor:
        """Returns (N, F) the regressors of the step after the end of each sequence."""
        starts, ends = (part.to(self.center.device) for part in (sequences.offsets[:-1], sequences.offsets[1:]))
        values = torch.cat(
            [sequences.values.to(self.center.dtype) - self.center, self.center.new_zeros(1, len(self.center))]
        )
        lags = []
        for lag in range(1, self.order + 1):
            inside = (ends - lag >= starts)[:, None]
            lags.append(torch.where(inside, values[(ends - lag).clamp(min=0)].nan_to_num(), self._outside.nan_to_num()))
        return torch.cat([*lags, values.new_ones(len(sequences), 1)], 1)
