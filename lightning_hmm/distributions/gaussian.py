"""Gaussian emissions with diagonal, spherical, full or tied covariances."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column, feature_columns
from lightning_hmm.distributions.base import Emission, as_numbers, check_not_negative, pull_back
from lightning_hmm.distributions.checks import count_free, refuse_where, require_observed, require_positive_definite
from lightning_hmm.distributions.compiled import update_diagonal_gaussian
from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, REAL
from lightning_hmm.distributions.quadratic_forms import form_matrix, form_weights, symmetric
from lightning_hmm.inference.evidence import Evidence, Quadratic, Rows
from lightning_hmm.sequences import Sequences

_SMALLEST_VARIANCE = 1e-280  # below this value, the variances of states would leave the range of normal numbers
_FAR = 10.0  # standard deviations between the mean of the data and the nearest state, above which a warning is issued
_CYCLES = 20  # iterations of ECM in an M-step with a tied mean
_LOG_TWO_PI = math.log(2 * math.pi)


class Gaussian(ExponentialFamily):
    r"""Vectors of D real columns with a Gaussian distribution in each state.

    Use it for sequences of real vectors. Missing values are marginalized exactly for all kinds of covariance.

    With the data centered, :math:`u = y - c`, the log-density is linear in products of two columns. For "diagonal" and
    "spherical" covariances,

    .. math::
        \log N(y_d \mid m, v) =
        \frac{m - c}{v} u - \frac{1}{2 v} u^2 - \Big( \frac{(m - c)^2}{2 v} + \frac12 \log 2 \pi v \Big)

    and for "full" and "tied" covariances it is :math:`h \cdot u - \frac12 u^T P u - a` with the precision P. The center
    c is fixed. It prevents the loss of precision by cancellation if the data are far from zero.

    The prior :math:`\exp(-\frac{s}{2} \operatorname{tr}(V \Sigma^{-1}))`, where V is the diagonal matrix of the
    variances of the data, adds s V to the scatter matrix of each covariance, so that no covariance becomes singular.

    Args:
        covariance: Kind of covariance: "diagonal" (one variance for each state and column), "spherical" (one variance
            for each state), "full" (a matrix for each state) or "tied" (one matrix for all states).
        variance_prior: Strength s of the prior, in steps.
        tied: Names of the parameters that have the same value in all states, such as ``["variance"]``.
        frozen: Names of the parameters that training leaves unchanged, such as ``["mean"]``.

    If the mean is tied and the covariance is not, both are updated in turn (ECM).

    Example:
        >>> from lightning_hmm import HMM, Gaussian
        >>> model = HMM(num_states=2, emission=Gaussian("spherical"), num_features=2)
        >>> parameters = {"mean": [[0.0, 0.0], [4.0, 4.0]], "variance": [[1.0, 1.0], [2.0, 2.0]]}
        >>> model = model.set_parameters(emission=parameters)
        >>> model.emission.mean
        tensor([[0., 0.],
                [4., 4.]], dtype=torch.float64)
    """

    products = ((0, None), (0, 0))
    center: Tensor
    data_variance: Tensor

    def __init__(
        self,
        covariance: Literal["diagonal", "spherical", "full", "tied"] = "diagonal",
        variance_prior: float = 1e-6,
        tied: Sequence[str] = (),
        frozen: Sequence[str] = (),
    ) -> None:
        check_covariance_kind(covariance)
        check_not_negative(variance_prior=variance_prior)
        self.kind = covariance
        self.has_matrices = covariance in ("full", "tied")  # whether columns are correlated given the state
        self.names = ("mean", "covariance" if self.has_matrices else "variance")
        self.ranges = (REAL, POSITIVE)
        Emission.__init__(self, tied, frozen)
        if covariance == "tied" and "covariance" not in self.tied:
            self.tied += ("covariance",)
        self.prior = {"variance_prior": variance_prior}

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        super().allocate(restarts, num_states, columns)
        mean = torch.zeros(restarts, num_states, self.num_features, dtype=torch.float64)
        self.weights = nn.Parameter(
            self._encode(mean, torch.ones_like(mean).diag_embed() if self.has_matrices else torch.ones_like(mean))
        )

    def _allocate_statistics(self) -> None:
        self.register_buffer("center", torch.zeros(self.num_features, dtype=torch.float64))
        self.register_buffer("data_variance", torch.ones(self.num_features, dtype=torch.float64))

    @property
    def has_tied_spread(self) -> bool:
        """Whether the variances or covariances are the same in all states."""
        return self.names[1] in self.tied

    # Conversion between weights and moments. With matrices, the weights have shape (..., F): D linear terms,
    # D (D + 1) / 2 products of columns, and a constant.

    def weights_of(self, *parameters: Tensor) -> Tensor:
        mean, spread = parameters
        return self._encode(mean - self.center, spread)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        offset, spread = self._decode(weights)
        return self.center + offset, spread

    def _encode(self, offset: Tensor, spread: Tensor) -> Tensor:
        """Converts moments to weights.

        Args:
            offset: (..., K, D) means minus the center.
            spread: Variances (..., K, D) or covariances (..., K, D, D).
        """
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
        return torch.cat([linear, form_weights(precision), -constant.unsqueeze(-1)], -1)

    def _decode(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Converts weights to moments. This is the inverse of `_encode`."""
        if not self.has_matrices:
            return -weights[..., 0, :] / (2 * weights[..., 1, :]), -0.5 / weights[..., 1, :]
        linear, precision, _ = self._matrix_parts(weights)
        factor = torch.linalg.cholesky(precision)
        return torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1), torch.cholesky_inverse(factor)

    def _matrix_parts(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns h (..., D), the precision P (..., D, D) and -a (...) of weights (..., F)."""
        size = self.num_features
        return weights[..., :size], form_matrix(weights[..., size:-1], size), weights[..., -1]

    @property
    def mean(self) -> Tensor:
        """(K, D) means of the best restart."""
        return self.read("mean", self.center + self._decode(self.weights[self.restart].detach())[0])

    @property
    def variance(self) -> Tensor:
        """(K, D) variances of the columns, of the best restart."""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def covariance(self) -> Tensor:
        """(K, D, D) covariances of the best restart."""
        spread = self.read(self.names[1], self._decode(self.weights[self.restart].detach())[1])
        return spread if self.has_matrices else spread.diag_embed()

    def check_parameter(self, name: str, value: Tensor) -> None:
        if name == "covariance":
            require_positive_definite(name, value)
            return
        super().check_parameter(name, value)
        if name == "variance":
            refuse_where(value < _SMALLEST_VARIANCE, name, f"be at least {_SMALLEST_VARIANCE:g}", value)
            if self.kind == "spherical" and bool((value != value[..., :1]).any()):
                raise ValueError(
                    "`variance` must be the same for all columns of a spherical Gaussian, but they differ."
                )

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """Sets parameters by name, to the same values in all restarts; see `ExponentialFamily.set`.

        As long as the center has not been computed from data, it is moved to the average of the given means, because
        precision is lost far from the center.
        """
        if "mean" in values and not bool(self.has_data_stats):
            mean = as_numbers("mean", values["mean"], self.center.device)
            if mean.shape[-2:] == (self.weights.shape[1], self.num_features) and bool(mean.isfinite().all()):
                self._move_center(mean.flatten(0, -2).mean(0))
        super().set(**values)

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        shape = super().parameter_shape(name)
        return (*shape, self.num_features) if name == "covariance" else shape

    def _placeholder(self, name: str) -> Tensor:
        if name != "covariance":
            return super()._placeholder(name)
        return torch.eye(self.num_features).expand(self.parameter_shape(name))

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_features)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Stores the mean and the variances of the data. Means and covariances of the states do not change."""
        center, variance = (value.to(self.center.device) for value in weighted_mean_var(sequences, self.column_names))
        self.data_variance.copy_(variance)
        self._move_center(center)
        if bool(self.is_set):
            self._warn_if_far(center, variance)

    def _warn_if_far(self, center: Tensor, variance: Tensor) -> None:
        """Warns if training starts from means that are far from the data, as after a fit on other data."""
        mean = self.mean
        distances = (mean - center).abs() / torch.maximum(variance, self.variance).sqrt()
        distance = distances.amin(0)  # (D,) distance of the nearest state
        column = int(distance.argmax())
        if float(distance[column]) > _FAR:
            nearest = mean[(mean[:, column] - center[column]).abs().argmin(), column]
            warnings.warn(
                "Training starts from the means that the model has, but they are far from the data: in column "
                f"{self.column_names[column]!r} the nearest is {float(nearest):g}, "
                f"and the mean of the data is {float(center[column]):g}. Make a new model to start from the data.",
                stacklevel=2,
            )

    def _move_center(self, center: Tensor) -> None:
        """Changes the center and adapts the weights, so that the distribution does not change."""
        if torch.equal(center, self.center):
            return  # no rounding if training continues on the same data
        offset, spread = self._decode(self.weights.detach())
        offset = offset + (self.center - center)
        self.center.copy_(center)
        self.weights.copy_(self._encode(offset, spread))

    @torch.no_grad()
    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        """Initializes the parameters; see `Emission.start`. Missing values are imputed with the moments of the data."""
        spread = self.data_variance.expand(self.weights.shape[0], self.weights.shape[1], -1)
        mean = self.given("mean", self.center.expand(spread.shape))
        spread = self.given(self.names[1], spread.diag_embed() if self.has_matrices else spread)
        self.weights.copy_(self.weights_of(mean, spread))
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
            size = self.num_features
            i, j = torch.triu_indices(size, size, device=device)
            places = torch.arange(size, device=device)
            one = torch.full((size,), size, device=device)  # an index one past the last column represents a constant 1
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
        """Returns the (steps, K) log-densities of the observed columns, with the missing ones integrated out.

        Steps without any observed column have log-densities of zero. The derivatives with respect to the weights are
        the conditional expectations of the statistics given the observed columns.
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

    def _sums(self, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the numbers of visits (R, K, D or 1), the sums of the offsets, and of their squares or products."""
        if not self.has_matrices:
            return statistics[:, :, 2], statistics[:, :, 0], statistics[:, :, 1]
        size = self.num_features
        return statistics[..., -1:], statistics[..., :size], symmetric(statistics[..., size:-1], size)

    def _scatter(self, squares: Tensor, visits: Tensor, means: Tensor, offset: Tensor) -> Tensor:
        """Returns the scatter about `offset`, given the sums of squares about zero and the means of the statistics."""
        gap = means - offset
        if not self.has_matrices:
            about_mean = (squares - visits * means * means).clamp(min=0)  # negative only by rounding
            return about_mean + visits * gap * gap
        visits = visits.unsqueeze(-1)
        about_mean = squares - visits * means.unsqueeze(-1) * means.unsqueeze(-2)
        return about_mean + visits * gap.unsqueeze(-1) * gap.unsqueeze(-2)

    def _tied_offset(self, visits: Tensor, means: Tensor, spread: Tensor) -> Tensor:
        """Returns the common offset that maximizes the likelihood for given variances or covariances."""
        if not self.has_matrices:
            precision = visits / spread
            return ((precision * means).sum(1, keepdim=True) / precision.sum(1, keepdim=True)).expand_as(means)
        precision = visits.unsqueeze(-1) * torch.cholesky_inverse(torch.linalg.cholesky_ex(spread).L)
        pulls = (precision @ means.unsqueeze(-1)).sum(1, keepdim=True)
        factor = torch.linalg.cholesky_ex(precision.sum(1, keepdim=True)).L
        return torch.cholesky_solve(pulls, factor).squeeze(-1).expand_as(means)

    def _spread(self, scatter: Tensor, visits: Tensor, weight: Tensor | float) -> tuple[Tensor, Tensor]:
        """Returns variances or covariances that maximize the objective, and a mask of those that could be estimated."""
        added = self.prior["variance_prior"] * weight * self.data_variance
        shape = scatter.shape
        if self.has_tied_spread:
            scatter, visits = scatter.sum(1, keepdim=True), visits.sum(1, keepdim=True)
        if self.kind == "spherical":
            scatter, visits, added = scatter.sum(-1, keepdim=True), visits.sum(-1, keepdim=True), added.sum()
        seen = visits > 0
        count = torch.where(seen, visits, 1.0)
        if not self.has_matrices:
            variance = (scatter + added) / count
            # Without a prior, the variance of a single point is zero. The previous variance is kept in that case.
            return variance.expand(shape), (seen & (variance > 0)).expand(shape)
        matrix = (scatter + added.diag_embed()) / count.unsqueeze(-1)
        # A matrix from too few points is singular. The previous covariance is kept in that case.
        found = seen & (torch.linalg.cholesky_ex(matrix).info == 0).unsqueeze(-1)
        return matrix.expand(shape), found.expand((*shape[:-2], 1))

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        (sums,) = statistics
        plain = not (self.has_matrices or self.tied or self.frozen)
        if plain and sums.is_cpu and self.weights.dtype == sums.dtype == torch.float64:
            prior = self.prior["variance_prior"] * weight * self.data_variance
            arrays = [value.detach().contiguous().numpy() for value in (self.weights, sums, prior)]
            self.is_set.fill_(True)
            return torch.tensor(update_diagonal_gaussian(*arrays, self.kind == "spherical"))
        visits, sums, squares = self._sums(sums)
        before = self._decode(self.weights.detach())
        offset, spread = before
        seen = visits > 0
        means = sums / torch.where(seen, visits, 1.0)
        alternates = "mean" in self.tied and not {"mean", self.names[1]} & {*self.frozen}
        for _ in range(_CYCLES if alternates else 1):
            if "mean" in self.tied:
                offset = torch.where(seen.any(1, keepdim=True), self._tied_offset(visits, means, spread), before[0])
            else:
                offset = torch.where(seen, means, before[0])
            if "mean" in self.frozen:
                offset = self.kept("mean", self.center + offset) - self.center
            found, known = self._spread(self._scatter(squares, visits, means, offset), visits, weight)
            spread = torch.where(known.unsqueeze(-1) if self.has_matrices else known, found, before[1])
            spread = self.kept(self.names[1], spread)
        known = known | (self.names[1] in self.frozen)
        self.weights.copy_(self._encode(offset, spread))
        self.is_set.fill_(True)
        return (~(seen & known)).any(-1).sum()

    def log_prior(self) -> Tensor:
        weights = self.weights.detach()
        if self.has_matrices:
            precisions = self._matrix_parts(weights)[1].diagonal(dim1=-2, dim2=-1)
        else:
            precisions = -2 * weights[:, :, 1]
        traces = (precisions * self.data_variance).sum(-1)  # (R, K)
        return -self.prior["variance_prior"] / 2 * (traces[:, 0] if self.has_tied_spread else traces.sum(1))

    def num_free_parameters(self, restart: int) -> int:
        size = self.num_features
        spread = {"diagonal": size, "spherical": 1}.get(self.kind, size * (size + 1) // 2)
        return count_free(self, self.weights.shape[1], dict(zip(self.names, (size, spread), strict=True)))

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.variance

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(len(states), self.num_features, generator=generator, dtype=torch.float64).to(states.device)
        if not self.has_matrices:
            return self.mean[states] + noise * self.variance.sqrt()[states]
        factor = torch.linalg.cholesky(self.covariance)
        return self.mean[states] + (factor[states] @ noise.unsqueeze(-1)).squeeze(-1)


def check_covariance_kind(kind: str) -> None:
    """Raises a `ValueError` if there is no such kind of covariance."""
    if kind not in ("diagonal", "spherical", "full", "tied"):
        raise ValueError(f"`covariance` must be diagonal, spherical, full or tied, but is {kind!r} instead.")


def weighted_mean_var(sequences: Sequences, names: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Computes the mean and the variance of each column, with the weights of the sequences.

    Args:
        sequences: Sequences of real vectors. Missing values are ignored.
        names: Names of the columns, for error messages.

    Returns:
        The (D,) means and the (D,) variances. The variance of a constant column is 1.
    """
    values = sequences.values.double()
    names = [column.name for column in feature_columns(values.shape[1])] if names is None else names
    observed = ~values.isnan()
    weights = observed * sequences.step_weights()[:, None]
    total = weights.sum(0)
    require_observed(total, names)
    center = (torch.where(observed, values, 0.0) * weights).sum(0) / total
    offsets = torch.where(observed & (weights > 0), values - center, 0.0)
    variance = (offsets**2 * weights).sum(0) / total
    # A constant column has no scale. The variance that is due to the rounding of its mean is ignored.
    rounding = (8 * torch.finfo(torch.float64).eps * center.abs()) ** 2
    tiny = torch.nonzero((variance < _SMALLEST_VARIANCE) & (offsets.abs().amax(0) > rounding.sqrt())).flatten()
    if len(tiny):
        column = int(tiny[0])
        raise ValueError(
            f"The values of a column must differ by more than {_SMALLEST_VARIANCE**0.5:g}, but those of "
            f"{names[column]!r} differ by {float(offsets[:, column].abs().max()):g} at most, "
            "and squares of such numbers are rounded to zero. Rescale the column."
        )
    return center, torch.where(variance > rounding, variance, torch.ones_like(variance))
