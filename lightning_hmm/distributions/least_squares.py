"""Weighted least squares for several states, with coefficients that are shared or fixed."""

from __future__ import annotations

import torch
from torch import Tensor


def least_squares(
    squares: Tensor, products: Tensor, precision: Tensor, current: Tensor, shared: Tensor, fixed: Tensor
) -> Tensor:
    r"""Minimizes :math:`\sum_k \operatorname{tr} P_k (B_k S_k B_k^T - 2 B_k R_k^T)` over the coefficients B.

    If the columns of a matrix S are linearly dependent, the solution of minimal norm is returned.

    Args:
        squares: (R, K, F, F) matrices S, the weighted sums of products of the regressors.
        products: (R, K, D, F) matrices R, the weighted sums of products of the responses and the regressors.
        precision: (R, K, D, D) matrices P, used only if there are shared coefficients.
        current: (R, K, D, F) present coefficients, of which those of fixed regressors are used.
        shared: (F,) mask of regressors whose coefficients are the same for all states.
        fixed: (F,) mask of regressors whose coefficients do not change.

    Returns:
        (R, K, D, F) coefficients.
    """
    found = current.clone()
    own, common = ~fixed & ~shared, ~fixed & shared
    products = products - current[..., fixed] @ squares[..., fixed, :]
    # Each state's own coefficients are eliminated first.
    inverse = _pseudo_inverse(squares[..., own, :][..., own])
    if bool(common.any()):
        cross = squares[..., own, :][..., common]  # (R, K, U, C)
        rest = squares[..., common, :][..., common] - cross.mT @ inverse @ cross
        target = products[..., common] - products[..., own] @ inverse @ cross
        size = target.shape[-2] * target.shape[-1]
        system = torch.einsum("rkde,rkgf->rdfeg", precision, rest).reshape(-1, size, size)
        right = (precision @ target).sum(1).reshape(-1, size, 1)
        solution = (_pseudo_inverse(system) @ right).reshape(-1, 1, *target.shape[-2:])
        found[..., common] = solution.expand_as(target)
        products = products - found[..., common] @ squares[..., common, :]
    found[..., own] = products[..., own] @ inverse
    return found


def _pseudo_inverse(matrix: Tensor) -> Tensor:
    """Returns the pseudo-inverse of symmetric, positive semidefinite matrices, after scaling their diagonal to 1."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    scale = scale[..., :, None] * scale[..., None, :]
    return torch.linalg.pinv(matrix * scale, hermitian=True) * scale
