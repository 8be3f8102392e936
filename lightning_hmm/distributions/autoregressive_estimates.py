"""The M-step of autoregressions: weighted least squares, and covariances of the noise."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_hmm.distributions.least_squares import least_squares

_SWEEPS = 10  # alternations between coefficients and covariances in an M-step, where each depends on the other


class Noise(NamedTuple):
    """How covariances of the noise are estimated.

    Attributes:
        kind: Kind of covariance.
        is_tied: Whether all states share it.
        is_frozen: Whether it does not change.
    """

    kind: Literal["diagonal", "spherical", "full", "tied"]
    is_tied: bool
    is_frozen: bool

    def estimate(self, scatter: Tensor, visits: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the covariances of scatter matrices, and a mask of the states that have enough steps for one.

        Args:
            scatter: (R, K, D, D) sums of products of residuals, including those of the prior.
            visits: (R, K) numbers of steps.
            current: (R, K, D, D) present covariances, which states without enough steps keep.
        """
        if self.is_frozen:
            return current, torch.ones_like(visits, dtype=torch.bool)
        if self.is_tied:
            scatter, visits = scatter.sum(1, keepdim=True), visits.sum(1, keepdim=True)
        matrix = scatter / torch.where(visits > 0, visits, 1.0)[..., None, None]
        if self.kind in ("diagonal", "spherical"):
            variance = matrix.diagonal(dim1=-2, dim2=-1)
            variance = variance.mean(-1, keepdim=True).expand_as(variance) if self.kind == "spherical" else variance
            matrix = variance.diag_embed()
        enough = (visits > 0) & (torch.linalg.cholesky_ex(matrix).info == 0)
        return torch.where(enough[..., None, None], matrix, current), enough.expand(current.shape[:2])


class Lines(NamedTuple):
    """Estimated coefficients (R, K, D, F), covariances (R, K, D, D) and a mask (R, K) of states with too few steps."""

    coefficients: Tensor
    covariance: Tensor
    kept: Tensor


def regress(
    sums: Tensor,
    visits: Tensor,
    coefficients: Tensor,
    covariance: Tensor,
    masks: tuple[Tensor, Tensor],
    noise: Noise,
    ridge: Tensor,
    added: Tensor,
) -> Lines:
    """Estimates coefficients and covariances. States without steps keep theirs, except for shared ones.

    Args:
        sums: (R, K, D + F, D + F) sums of products of the D responses and the F regressors.
        visits: (R, K) numbers of steps.
        coefficients: (R, K, D, F) present coefficients.
        covariance: (R, K, D, D) present covariances.
        masks: Masks (F,) of the regressors whose coefficients are shared, and of those that are fixed, on the CPU.
        noise: How the covariances are estimated.
        ridge: (F,) numbers that the prior adds to the sums of squares of the regressors.
        added: (D,) numbers that the prior adds to the sums of squares of the residuals.
    """
    size = len(added)
    responses, products, squares = sums[..., :size, :size], sums[..., :size, size:], sums[..., size:, size:]
    squares = squares + ridge.diag()
    shared, fixed = masks[0] & ~masks[1], masks[1]
    updated = (visits > 0)[..., None, None] | shared.to(visits.device)
    once = not bool(shared.any()) or noise.is_tied or noise.is_frozen
    for _ in range(1 if once else _SWEEPS):
        found = least_squares(squares, products, torch.linalg.inv(covariance), coefficients, shared, fixed)
        coefficients = torch.where(updated, found, coefficients)
        cross = coefficients @ products.mT
        scatter = responses - cross - cross.mT + coefficients @ squares @ coefficients.mT + added.diag()
        covariance, known = noise.estimate(scatter, visits, covariance)
    return Lines(coefficients, covariance, ~((visits > 0) & known))
