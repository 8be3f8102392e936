"""Gaussian vectors with four kinds of covariance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column, feature_columns
from lightning_hmm.distributions.base import as_numbers, check_not_negative, pull_back
from lightning_hmm.distributions.exponential import ExponentialFamily, refuse_where, require_observed
from lightning_hmm.inference.evidence import Evidence, Quadratic, Rows
from lightning_hmm.sequences import Sequences

_SMALLEST_VARIANCE = 1e-280  # below it, variances of states would leave the range of normal numbers
_FAR = 10.0  # standard deviations from the mean of the data to that of the nearest state
_LOG_TWO_PI = math.log(2 * math.pi)


class Gaussian(ExponentialFamily):
    r"""Gaussian vectors of D columns.

    With the data centered, :math:`u = y - c`, the log-density is a sum of products of two columns. For "diagonal" and
    "spherical" covariances,

    .. math:: \log N(y_d \mid m, v) = \frac{m - c}{v} u - \frac{1}{2 v} u^2 - \Big( \frac{(m - c)^2}{2 v} + \frac12 \log 2 \pi v \Big)

    and for "full" and "tied" ones it is :math:`h \cdot u - \frac12 u^T P u - a` with the precision P. The center c is fixed. Without
    it, data far from zero lose all digits in the difference of squares. Single missing values are marginalized exactly in all four.

    The prior :math:`\exp(-\frac{s}{2} \operatorname{tr}(V \Sigma^{-1}))`, where V holds the variances of the data, adds s times these to the
    scatter of each covariance, so that none becomes singular.

    Args:
        covariance: "diagonal" (one variance for each state and column), "spherical" (one for each state), "full" (a matrix for each
            state) or "tied" (one matrix for all states).
        variance_prior: s, in steps.
    """

    products = ((0, None), (0, 0))
    center: Tensor
    data_variance: Tensor
    upper: Tensor

    def __init__(
        self, covariance: Literal["diagonal", "spherical", "full", "tied"] = "diagonal", variance_prior: float = 1e-6
    ) -> None:
        super().__init__()
        if covariance not in ("diagonal", "spherical", "full", "tied"):
            raise ValueError(f"`covariance` must be diagonal, spherical, full or tied, but is {covariance!r} instead.")
        check_not_negative(variance_prior=variance_prior)
        self.kind, self.prior = covariance, {"variance_prior": variance_prior}
        self.has_matrices = covariance in ("full", "tied")  # whether columns are correlated given the state
        self.names = ("mean", "covariance" if self.has_matrices else "variance")  # type: ignore[misc]

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        super().allocate(restarts, num_states, columns)
        size = self.num_features
        self.register_buffer("center", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("data_variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer(
            "upper", torch.triu_indices(size, size), persistent=False
        )  # the entries of a symmetric matrix
        mean = torch.zeros(restarts, num_states, size, dtype=torch.float64)
        self.weights = nn.Parameter(
            self._encode(mean, torch.ones_like(mean).diag_embed() if self.has_matrices else torch.ones_like(mean))
        )

    # Between weights and moments. With matrices, the weights are (..., F): D linear terms, D (D + 1) / 2 products of columns, and a constant.

    def weights_of(self, *parameters: Tensor) -> Tensor:
        mean, spread = parameters
        return self._encode(mean - self.center, spread)

    def _encode(self, offset: Tensor, spread: Tensor) -> Tensor:
        """The weights of means (..., K, D) around the center, and variances (..., K, D) or covariances (..., K, D, D)."""
        if not self.has_matrices:
            constant = offset * offset / (2 * spread) + 0.5 * (2 * math.pi * spread).log()
            return torch.stack([offset / spread, -0.5 / spread, -constant], -2)
        factor = torch.linalg.cholesky_ex(spread).L
        precision = torch.cholesky_inverse(factor)
        linear = (precision @ offset.unsqueeze(-1)).squeeze(-1)
        constant = (
            (offset * linear).sum(-1) / 2
            + factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            + self.num_features / 2 * _LOG_TWO_PI
        )
        i, j = self.upper
        products = -precision[..., i, j] * torch.where(i == j, 0.5, 1.0).to(precision)
        return torch.cat([linear, products, -constant.unsqueeze(-1)], -1)

    def _decode(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The way back from `_encode`."""
        if not self.has_matrices:
            return -weights[..., 0, :] / (2 * weights[..., 1, :]), -0.5 / weights[..., 1, :]
        linear, precision, _ = self._matrix_parts(weights)
        factor = torch.linalg.cholesky(precision)
        return torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1), torch.cholesky_inverse(factor)

    def _matrix_parts(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h (..., D), the precision (..., D, D) and -a (...) of weights (..., F)."""
        size = self.num_features
        return weights[..., :size], -self._symmetric(weights[..., size:-1], 1.0, 2.0), weights[..., -1]

    def _symmetric(self, entries: Tensor, off_diagonal: float, diagonal: float) -> Tensor:
        """(..., D (D + 1) / 2) the upper entries, times a factor, as symmetric matrices (..., D, D)."""
        i, j = self.upper
        matrix = entries.new_zeros(*entries.shape[:-1], self.num_features, self.num_features)
        matrix[..., i, j] = entries * torch.where(i == j, diagonal, off_diagonal).to(entries)
        return matrix + matrix.triu(1).mT

    @property
    def mean(self) -> Tensor:
        """(K, D) of the chosen restart."""
        return self.center + self._decode(self.weights[self.restart].detach())[0]

    @property
    def variance(self) -> Tensor:
        """(K, D) the variances of single columns, of the chosen restart."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def covariance(self) -> Tensor:
        """(K, D, D) of the chosen restart."""
        spread = self._decode(self.weights[self.restart].detach())[1]
        return spread if self.has_matrices else spread.diag_embed()

    def check_parameter(self, name: str, value: Tensor) -> None:
        if name == "covariance":
            if not bool(value.isfinite().all()):
                raise ValueError("`covariance` must be finite, but an entry is not.")
            scale = value.abs().amax((-2, -1))
            wrong = (torch.linalg.cholesky_ex(value).info != 0) | (
                (value - value.mT).abs().amax((-2, -1)) > 1e-8 * scale
            )
            if bool(wrong.any()):
                raise ValueError(
                    f"`covariance` must be symmetric and positive definite, but that of state {int(torch.nonzero(wrong)[0, -1])} is not."
                )
            if self.kind == "tied" and bool((value != value[:, :1]).any()):
                raise ValueError(
                    "`covariance` must be the same for all states of a tied Gaussian, but the matrices differ."
                )
            return
        super().check_parameter(name, value)
        if name == "variance":
            refuse_where(value <= 0, name, "be positive", value)
            refuse_where(value < _SMALLEST_VARIANCE, name, f"be at least {_SMALLEST_VARIANCE:g}", value)
            if self.kind == "spherical" and bool((value != value[..., :1]).any()):
                raise ValueError(
                    "`variance` must be the same for all columns of a spherical Gaussian, but they differ."
                )

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """As `ExponentialFamily.set`. Until the center is that of data, it is put at the given means, far from which digits would be lost."""
        if "mean" in values and not bool(self.has_data_stats):
            mean = as_numbers("mean", values["mean"], self.center.device)
            if mean.shape[-2:] == (self.weights.shape[1], self.num_features) and bool(mean.isfinite().all()):
                self._move_center(mean.flatten(0, -2).mean(0))
        super().set(**values)

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        shape = super().parameter_shape(name)
        return (*shape, self.num_features) if name == "covariance" else shape

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_features)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Takes center and scale of the data; means and covariances stay as they are."""
        center, variance = (value.to(self.center.device) for value in weighted_mean_var(sequences, self.column_names))
        self.data_variance.copy_(variance)
        self._move_center(center)
        if bool(self.is_set):
            self._warn_if_far(center, variance)

    def _warn_if_far(self, center: Tensor, variance: Tensor) -> None:
        """Warns where training starts from means that are far from the data, as after a fit on other data."""
        mean = self.mean
        distance = ((mean - center).abs() / torch.maximum(variance, self.variance).sqrt()).amin(
            0
        )  # (D,) of the nearest state
        column = int(distance.argmax())
        if float(distance[column]) > _FAR:
            nearest = mean[(mean[:, column] - center[column]).abs().argmin(), column]
            warnings.warn(
                "Training starts from the means that the model has, but they are far from the data: in column "
                f"{self.column_names[column]!r} the nearest is {float(nearest):g}, and the mean of the data is {float(center[column]):g}. "
                "Make a new model to start from the data.",
                stacklevel=2,
            )

    def _move_center(self, center: Tensor) -> None:
        """Changes the center, not the distribution."""
        if torch.equal(center, self.center):
            return  # not a bit changes where a model is trained further on the same data
        offset, spread = self._decode(self.weights.detach())
        offset = offset + (self.center - center)
        self.center.copy_(center)
        self.weights.copy_(self._encode(offset, spread))

    @torch.no_grad()
    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        """As `Emission.start`. Missing values are completed by the moments of the data."""
        spread = self.data_variance.expand(self.weights.shape[0], self.weights.shape[1], -1)
        self.weights.copy_(self._encode(torch.zeros_like(spread), spread.diag_embed() if self.has_matrices else spread))
        super().start(sequences, responsibilities)

    # Evidence

    @property
    def location(self) -> Tensor:
        return self.center

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values - self.center]

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Quadratic | Rows:  # type: ignore[override]
        if not self.has_matrices:
            return super().evidence(natural, batch)
        (weights,) = natural
        if not batch.is_complete:
            (offsets,) = self.blocks(batch.values.to(weights.dtype))
            return Rows(self._marginal_rows(weights, offsets))
        return Quadratic(batch.values, self._pairs_of(True, weights.device), weights, None, self.center)

    def _pairs_of(self, complete: bool, device: torch.device) -> Tensor:
        if not self.has_matrices:
            return super()._pairs_of(complete, device)
        found = self._pairs.get(complete)
        if found is None or found.device != device:
            size, (i, j) = self.num_features, self.upper.to(device)
            places, one = torch.arange(size, device=device), torch.full((size,), size, device=device)  # a constant of 1
            found = torch.cat([torch.stack([places, one], 1), torch.stack([i, j], 1), torch.stack([one, one], 1)[:1]])
            self._pairs[complete] = found
        return found

    def needs_graph(self, batch: Sequences) -> bool:
        return self.has_matrices and not batch.is_complete

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        if not self.has_matrices:
            return super().statistics(evidence, gradient, natural)
        return [gradient] if isinstance(evidence, Quadratic) else pull_back([evidence.live], [gradient], natural)

    def _marginal_rows(self, weights: Tensor, offsets: Tensor) -> Tensor:
        """(steps, K) the log-densities of what is observed, with the missing columns integrated out; zeros where all are missing.

        Differentiated in the weights, these give the conditional expectations of the statistics given the observed columns.
        """
        linear, precision, constant = self._matrix_parts(weights)
        patterns, which = torch.unique(~offsets.isnan(), dim=0, return_inverse=True)
        rows = torch.zeros(len(offsets), len(weights), dtype=weights.dtype, device=weights.device)
        for number, seen in enumerate(patterns):
            steps, hidden = torch.nonzero(which == number).flatten(), ~seen
            if not bool(seen.any()):
                continue
            u = offsets[steps][:, seen]
            total = (
                u @ linear[:, seen].T
                - 0.5 * torch.einsum("ti,kij,tj->tk", u, precision[:, seen][:, :, seen], u)
                + constant
            )
            if bool(hidden.any()):
                factor = torch.linalg.cholesky(precision[:, hidden][:, :, hidden])  # (K, M, M)
                pull = linear[:, :, None][:, hidden] - precision[:, hidden][:, :, seen] @ u.T  # (K, M, t)
                half = torch.linalg.solve_triangular(factor, pull, upper=False)
                logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - int(hidden.sum()) / 2 * _LOG_TWO_PI
                total = total + 0.5 * half.square().sum(1).T - logs
            rows = rows.index_copy(0, steps, total)
        return rows

    # EM

    def estimate(self, sums: Tensor, visits: Tensor, weight: Tensor | float) -> tuple[tuple[Tensor, ...], Tensor]:
        seen = visits > 0
        count = torch.where(seen, visits, 1.0)
        mean = sums[:, :, 0] / count
        scatter = (sums[:, :, 1] - sums[:, :, 0] * mean).clamp(min=0)  # below zero by rounding only
        added = self.prior["variance_prior"] * weight * self.data_variance
        if self.kind == "spherical":
            variance = (scatter.sum(-1, keepdim=True) + added.sum()) / visits.sum(-1, keepdim=True).clamp(
                min=torch.finfo(visits.dtype).tiny
            )
            variance = variance.expand_as(scatter)
        else:
            variance = (scatter + added) / count
        offset, old = self._decode(self.weights.detach())
        # Without a prior, a single point has no variance to offer; the old one stays.
        spread = seen & (variance > 0)
        return (self.center + torch.where(seen, mean, offset), torch.where(spread, variance, old)), spread

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        (sums,) = statistics
        if not self.has_matrices:
            parameters, spread = self.estimate(sums[:, :, :-1], sums[:, :, -1], weight)
            self.weights.copy_(self.weights_of(*parameters))
            self.is_set.fill_(True)
            return (~spread).any(-1).sum()
        size, visits = self.num_features, sums[..., -1:]
        seen = visits > 0
        count = torch.where(seen, visits, 1.0)
        mean = sums[..., :size] / count
        scatter = self._symmetric(sums[..., size:-1], 1.0, 1.0) - count.unsqueeze(-1) * mean.unsqueeze(
            -1
        ) * mean.unsqueeze(-2)
        added = (self.prior["variance_prior"] * weight * self.data_variance).diag_embed()
        if self.kind == "tied":
            total = torch.where(seen.unsqueeze(-1), scatter, 0.0).sum(1, keepdim=True) + added
            matrix = (total / visits.sum(1, keepdim=True).unsqueeze(-1)).expand_as(scatter)
        else:
            matrix = (scatter + added) / count.unsqueeze(-1)
        spread = (torch.linalg.cholesky_ex(matrix).info == 0).unsqueeze(
            -1
        )  # else too few points for a matrix; the old one stays
        offset, old = self._decode(self.weights.detach())
        self.weights.copy_(
            self._encode(torch.where(seen, mean, offset), torch.where((seen & spread).unsqueeze(-1), matrix, old))
        )
        self.is_set.fill_(True)
        return (~(seen & spread)).sum()

    def log_prior(self) -> Tensor:
        weights = self.weights.detach()
        if self.has_matrices:
            precisions = self._matrix_parts(weights)[1].diagonal(dim1=-2, dim2=-1)
        else:
            precisions = -2 * weights[:, :, 1]
        traces = (precisions * self.data_variance).sum(-1)  # (R, K)
        return -self.prior["variance_prior"] / 2 * (traces[:, 0] if self.kind == "tied" else traces.sum(1))

    def num_free_parameters(self, restart: int) -> int:
        states, size = self.weights.shape[1], self.num_features
        matrix = size * (size + 1) // 2
        return (
            states * size
            + {"diagonal": states * size, "spherical": states, "full": states * matrix, "tied": matrix}[self.kind]
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.variance

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(len(states), self.num_features, generator=generator, dtype=torch.float64).to(states.device)
        if not self.has_matrices:
            return self.mean[states] + noise * self.variance.sqrt()[states]
        factor = torch.linalg.cholesky(self.covariance)
        return self.mean[states] + (factor[states] @ noise.unsqueeze(-1)).squeeze(-1)


def weighted_mean_var(sequences: Sequences, names: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """(D,) means and variances of the columns, each step with its sequence's weight; a variance of 1 where nothing varies. `names` are for errors."""
    values = sequences.values.double()
    names = [column.name for column in feature_columns(values.shape[1])] if names is None else names
    observed = ~values.isnan()
    share = observed * sequences.step_weights()[:, None]
    total = share.sum(0)
    require_observed(total, names)
    center = (torch.where(observed, values, 0.0) * share).sum(0) / total
    offsets = torch.where(observed & (share > 0), values - center, 0.0)
    variance = (offsets**2 * share).sum(0) / total
    # A feature that never changes has no scale of its own, and the rounding of its mean is none.
    rounding = (8 * torch.finfo(torch.float64).eps * center.abs()) ** 2
    tiny = torch.nonzero((variance < _SMALLEST_VARIANCE) & (offsets.abs().amax(0) > rounding.sqrt())).flatten()
    if len(tiny):
        column = int(tiny[0])
        raise ValueError(
            f"The values of a column must differ by more than {_SMALLEST_VARIANCE**0.5:g}, but those of {names[column]!r} differ by "
            f"{float(offsets[:, column].abs().max()):g} at most, and squares of such numbers are rounded to zero. Rescale the column."
        )
    return center, torch.where(variance > rounding, variance, torch.ones_like(variance))
