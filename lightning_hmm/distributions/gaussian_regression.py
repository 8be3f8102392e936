"""Gaussian linear regression as evidence in quadratic form, with expected statistics of fixed size.

With the centered response y and the regressors z, which are the centered inputs and a constant 1, the log-density is

.. math:: -\\frac{y^2}{2 v} + \\frac{y\\, B \\cdot z}{v} - \\frac{(B \\cdot z)^2}{2 v} - \\frac12 \\log 2 \\pi v,

which is linear in y y, the Q products y z and the Q (Q + 1) / 2 products z z. Their F coefficients are the natural
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hmm.distributions.least_squares import is_determined, least_squares
from lightning_hmm.distributions.quadratic_forms import regression_weights, symmetric
from lightning_hmm.inference.evidence import Quadratic

_SWEEPS = 50  # alternations between coefficients and variances in an M-step, where each depends on the other


class Products(NamedTuple):
    """Weighted sums over steps of products of a response y and Q regressors z, the last of which is 1.

    Attributes:
        yy: (R, K, D) sums of y y.
        yz: (R, K, D, Q) sums of y z.
        zz: (R, K, D, Q, Q) sums of z z^T.
    """

    yy: Tensor
    yz: Tensor
    zz: Tensor

    @property
    def visits(self) -> Tensor:
        """(R, K, D) sums of weights."""
        return self.zz[..., -1, -1]

    def moved(self, location: Tensor, center: Tensor) -> Products:
        """Returns the sums for y + location and z + center, with (D,) and (Q,) offsets; the last of z is unchanged."""
        shift = torch.eye(len(center)).to(center)
        shift[:-1, -1] = center[:-1]
        zz, yz = shift @ self.zz @ shift.T, self.yz @ shift.T
        yy = self.yy + location * (2 * self.yz[..., -1] + location * self.visits)
        return Products(yy, yz + location.unsqueeze(-1) * zz[..., -1], zz)

    def residual(self, coefficients: Tensor) -> Tensor:
        """Returns the (R, K, D) sums of squared residuals of coefficients (R, K, D, Q)."""
        fitted = (self.zz @ coefficients.unsqueeze(-1)).squeeze(-1)
        return (self.yy + (coefficients * (fitted - 2 * self.yz)).sum(-1)).clamp(min=0)  # negative only by rounding


def weights_of(coefficients: Tensor, variance: Tensor) -> Tensor:
    """Returns the (..., F) natural parameters of (..., Q) coefficients of centered data and (...) variances."""
    return regression_weights(coefficients.unsqueeze(-2), variance[..., None, None])


def products_of(statistics: Tensor, num_regressors: int) -> Products:
    """Converts the (..., F) expected statistics to sums of products."""
    matrix = symmetric(statistics, 1 + num_regressors)
    return Products(matrix[..., 0, 0], matrix[..., 0, 1:], matrix[..., 1:, 1:])


def quadratic(weights: Tensor, values: Tensor, inputs: Tensor, complete: bool) -> Quadratic:
    """Returns the evidence of a batch.

    Args:
        weights: (K, D, F) natural parameters.
        values: (steps, D) centered responses, NaN where missing.
        inputs: (steps, P) centered inputs.
        complete: Whether no value is missing.
    """
    columns = weights.shape[1]
    size = inputs.shape[1] + 1
    responses = torch.arange(columns, device=values.device)[:, None]
    i, j = torch.triu_indices(size, size, device=values.device)
    if complete:
        # The last number is one past the last column and represents a constant 1.
        regressors = columns + torch.arange(size, device=values.device)
        pairs = torch.cat(
            [torch.stack([responses, responses], 2), _pairs(responses, regressors.expand(columns, -1))], 1
        )
        shared = torch.stack([regressors[i], regressors[j]], 1)
        # The products of regressors are the same for all columns.
        live = torch.cat([weights[..., : 1 + size].flatten(1), weights[..., 1 + size :].sum(1)], 1)
        return Quadratic(torch.cat([values, inputs], 1), torch.cat([pairs.flatten(0, 1), shared]), live)
    observed = ~values.isnan()
    seen = observed.to(values.dtype).unsqueeze(2)
    rows = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1).unsqueeze(1) * seen  # (steps, D, Q)
    regressors = columns + torch.arange(columns * size, device=values.device).view(columns, size)
    pairs = torch.cat(
        [
            torch.stack([responses, responses], 2),
            _pairs(responses, regressors),
            torch.stack([regressors[:, i], regressors[:, j]], 2),
        ],
        1,
    )
    return Quadratic(
        torch.cat([torch.where(observed, values, 0.0), rows.flatten(1)], 1), pairs.flatten(0, 1), weights.flatten(1)
    )


def _pairs(responses: Tensor, regressors: Tensor) -> Tensor:
    """Returns the (D, Q, 2) pairs of the response (D, 1) and the regressors (D, Q) of each column."""
    return torch.stack([responses.expand_as(regressors), regressors], 2)


class Estimate(NamedTuple):
    """Coefficients (R, K, D, Q), variances (R, K, D), and a mask (R, K, D) of those that could be estimated."""

    coefficients: Tensor
    variance: Tensor
    seen: Tensor


def estimate(
    products: Products,
    coefficients: Tensor,
    variance: Tensor,
    centers: tuple[Tensor, Tensor],
    ridge: Tensor | float,
    added: Tensor,
    masks: Sequence[Tensor],
    rule: str | None,
) -> Estimate:
    """Performs the M-step.

    Args:
        products: Expected sums of products of centered data.
        coefficients: (R, K, D, Q) present coefficients of the data, which are kept where they cannot be estimated.
        variance: (R, K, D) present variances.
        centers: Centers of the responses (D,) and of the regressors (Q,), whose last entry is 0.
        ridge: Strength of the prior of the coefficients, without the intercept.
        added: (D,) numbers that the prior of the variances adds to each sum of squares.
        masks: Masks (Q,) of the tied and of the frozen coefficients, on the CPU.
        rule: "tied" or "frozen" if the variances are.
    """
    shared, fixed = masks
    shared = shared & ~fixed
    if bool((shared | fixed)[-1]):  # the intercept of the data is tied or frozen, not that of centered data
        products, centers = products.moved(*centers), (centers[0] * 0, centers[1] * 0)
    penalty = torch.ones_like(centers[1]) * ridge
    penalty[-1] = 0
    matrix = products.zz + penalty.diag()
    seen = products.visits > 0
    if not bool((shared | fixed).any()):
        seen = seen & is_determined(matrix)
    updated = seen.unsqueeze(-1) | shared.to(seen.device)
    found = present = _with_intercept(coefficients, *centers, 1)
    for _ in range(_SWEEPS if bool(shared.any()) and rule is None else 1):
        # Each column of the responses has regressors of its own, because values may be missing.
        solution = least_squares(
            matrix.movedim(2, 1),
            products.yz.unsqueeze(-2).movedim(2, 1),
            (1 / variance)[..., None, None].movedim(2, 1),
            present.unsqueeze(-2).movedim(2, 1),
            shared,
            fixed,
        )
        found = torch.where(updated, solution.movedim(1, 2).squeeze(-2), present)
        penalized = products.residual(found) + ridge * found[..., :-1].square().sum(-1)
        variance = _variance(penalized, products.visits, variance, added, rule)
    found = torch.where(updated, _with_intercept(found, *centers, -1), coefficients)
    return Estimate(found, variance, seen)


def _with_intercept(coefficients: Tensor, location: Tensor, center: Tensor, sign: int) -> Tensor:
    """Returns the coefficients for data from which centers are subtracted; with a sign of -1, the inverse."""
    change = sign * ((coefficients * center).sum(-1) - location)
    return torch.cat([coefficients[..., :-1], (coefficients[..., -1] + change).unsqueeze(-1)], -1)


def _variance(scatter: Tensor, visits: Tensor, current: Tensor, added: Tensor, rule: str | None) -> Tensor:
    """Returns the (R, K, D) variances that maximize the objective, given sums of squares."""
    if rule == "frozen":
        return current
    if rule == "tied":
        scatter, visits = scatter.sum(1, keepdim=True), visits.sum(1, keepdim=True)
    updated = (scatter + added) / visits
    # Without a prior, the variance of a single point is zero. The previous variance is kept in that case.
    return torch.where((visits > 0) & (updated > 0) & updated.isfinite(), updated, current)
