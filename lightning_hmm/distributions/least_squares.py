"""Weighted least squares for all states and restarts at once, with coefficients that are shared or fixed."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST_PIVOT = 1e-7  # of matrices with ones on the diagonal, below which they are treated as singular


def least_squares(
    squares: Tensor, products: Tensor, precision: Tensor, current: Tensor, shared: Tensor, fixed: Tensor
) -> Tensor:
    r"""Minimizes :math:`\sum_k \operatorname{tr} P_k (B_k S_k B_k^T - 2 B_k R_k^T)` over the coefficients B.

    If the columns of a matrix S are linearly dependent, the solution of minimal norm is returned.

    Args:
        squares: (..., K, F, F) matrices S, the weighted sums of products of the regressors.
        products: (..., K, D, F) matrices R, the weighted sums of products of the responses and the regressors.
        precision: (..., K, D, D) matrices P, used only if there are shared coefficients.
        current: (..., K, D, F) present coefficients, of which those of fixed regressors are used.
        shared: (F,) mask of regressors whose coefficients are the same for all states, on the CPU.
        fixed: (F,) mask of regressors whose coefficients do not change, on the CPU.

    Returns:
        (..., K, D, F) coefficients.
    """
    found = current.clone()
    own, common = ~fixed & ~shared, ~fixed & shared
    products = products - current[..., fixed] @ squares[..., fixed, :]
    # Each state's own coefficients are eliminated first.
    inverse = _pseudo_inverse(squares[..., own, :][..., own])
    if bool(common.any()):
        cross = squares[..., own, :][..., common]  # (..., K, U, C)
        rest = squares[..., common, :][..., common] - cross.mT @ inverse @ cross
        target = products[..., common] - products[..., own] @ inverse @ cross
        size = target.shape[-2] * target.shape[-1]
        system = torch.einsum("...kde,...kgf->...dfeg", precision, rest).flatten(-4, -3).flatten(-2)
        right = (precision @ target).sum(-3).flatten(-2).unsqueeze(-1)
        solution = (_pseudo_inverse(system) @ right).view(*right.shape[:-2], 1, size // target.shape[-1], -1)
        found[..., common] = solution.expand_as(target)
        products = products - found[..., common] @ squares[..., common, :]
    found[..., own] = products[..., own] @ inverse
    return found


def is_determined(squares: Tensor) -> Tensor:
    """Returns a mask (...) of the positive definite matrices (..., F, F), for which the solution is unique."""
    scaled, _ = _with_unit_diagonal(squares)
    factor, info = torch.linalg.cholesky_ex(scaled)
    return (info == 0) & (factor.diagonal(dim1=-2, dim2=-1).nan_to_num().amin(-1) > _SMALLEST_PIVOT)


def _pseudo_inverse(matrix: Tensor) -> Tensor:
    """Returns the pseudo-inverse of symmetric, positive semidefinite matrices, after scaling their diagonal to 1."""
    scaled, scale = _with_unit_diagonal(matrix)
    return torch.linalg.pinv(scaled, hermitian=True) * scale


def _with_unit_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Scales regressors, so that singular matrices are recognized for any unit of them.

    Returns:
        The matrices and the factors of their entries.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    scale = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return matrix * scale, scale
