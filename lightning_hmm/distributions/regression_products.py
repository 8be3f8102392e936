"""Weighted least squares for all states, columns and restarts at once, from sums of products of fixed size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        size = self.zz.shape[-1]
        shift = torch.eye(size, dtype=self.zz.dtype, device=self.zz.device)
        shift[:, -1] += center * (torch.arange(size, device=center.device) < size - 1)
        zz, yz, move = shift @ self.zz @ shift.T, self.yz @ shift.T, location.unsqueeze(-1)
        moved_yz = yz + move * zz[..., -1]
        yy = self.yy + location * (2 * self.yz[..., -1] + location * self.visits)
        return Products(yy, moved_yz, zz)

    def residual(self, coefficients: Tensor) -> Tensor:
        """Returns the (R, K, D) sums of squared residuals of coefficients (R, K, D, Q)."""
        fitted = (self.zz @ coefficients.unsqueeze(-1)).squeeze(-1)
        return (self.yy + (coefficients * (fitted - 2 * self.yz)).sum(-1)).clamp(min=0)  # negative only by rounding


def solve(products: Products, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """Solves the regression of each state separately.

    Args:
        products: Sums of products.
        ridge: (Q,) number that is added to the diagonal of zz.

    Returns:
        The (R, K, D, Q) coefficients, and a mask (R, K, D) of the regressions that have a unique solution.
    """
    matrix = products.zz + ridge.diag()
    # The columns are scaled, so that singular matrices are recognized for any unit of the regressors.
    scale = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    scaled = scale.unsqueeze(-1) * matrix * scale.unsqueeze(-2)
    factor, info = torch.linalg.cholesky_ex(scaled)
    smallest = factor.diagonal(dim1=-2, dim2=-1).nan_to_num().amin(-1)
    solvable = (info == 0) & (smallest > 1e-7) & (products.visits > 0)
    identity = torch.eye(len(ridge), dtype=matrix.dtype, device=matrix.device)
    factor = torch.where(solvable.unsqueeze(-1).unsqueeze(-1), factor, identity)
    found = torch.cholesky_solve((scale * products.yz).unsqueeze(-1), factor).squeeze(-1) * scale
    return found, solvable


def solve_jointly(products: Products, ridge: Tensor, precision: Tensor, free: Tensor, start: Tensor) -> Tensor:
    """Solves the regressions of all states together, with coefficients that are tied or fixed.

    Args:
        products: Sums of products.
        ridge: (Q,) number that is added to the diagonal of zz.
        precision: (R, K, D) inverse variances.
        free: (K, Q) number of the free parameter of each coefficient, -1 for fixed ones.
        start: (R, K, D, Q) coefficients, the values of the fixed ones.

    Returns:
        The (R, K, D, Q) coefficients. Those that the sums do not determine have the smallest norm.
    """
    size = int(free.max()) + 1
    if not size:
        return start
    chosen = (free.unsqueeze(-1) == torch.arange(size, device=free.device)).to(start.dtype)  # (K, Q, F)
    fixed = torch.where((free < 0).unsqueeze(1), start, 0.0)
    matrix = precision.unsqueeze(-1).unsqueeze(-1) * (products.zz + ridge.diag())
    target = precision.unsqueeze(-1) * (products.yz - (products.zz @ fixed.unsqueeze(-1)).squeeze(-1))
    left = torch.einsum("rkdpq,kpf,kqg->rdfg", matrix, chosen, chosen)
    right = torch.einsum("rkdq,kqf->rdf", target, chosen)
    values = (torch.linalg.pinv(left, hermitian=True, rtol=1e-13) @ right.unsqueeze(-1)).squeeze(-1)
    return fixed + torch.einsum("rdf,kqf->rkdq", values, chosen)
