"""Symmetric matrices as vectors of their F = n (n + 1) / 2 upper entries, in the order of `torch.triu_indices`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def symmetric(entries: Tensor, size: int) -> Tensor:
    """Returns the symmetric matrices (..., n, n) with n = `size` that have the given upper entries (..., F)."""
    i, j = torch.triu_indices(size, size, device=entries.device)
    matrix = entries.new_zeros(*entries.shape[:-1], size, size)
    matrix[..., i, j] = entries
    return matrix + matrix.triu(1).mT


def form_weights(matrix: Tensor) -> Tensor:
    r"""Returns the (..., F) weights of the products :math:`v_i v_j` in :math:`-\frac12 v^T M v`, for matrices M."""
    size = matrix.shape[-1]
    i, j = torch.triu_indices(size, size, device=matrix.device)
    return -matrix[..., i, j] * torch.where(i == j, 0.5, 1.0).to(matrix)


def form_matrix(weights: Tensor, size: int) -> Tensor:
    """Returns the matrices (..., n, n) with n = `size`. This is the inverse of `form_weights`."""
    i, j = torch.triu_indices(size, size, device=weights.device)
    return -symmetric(weights * torch.where(i == j, 2.0, 1.0).to(weights), size)


# With v = (y, z), of D responses and Q regressors, the last of which is 1, the log-density of a Gaussian regression of
# y
# on z is such a form.


def regression_weights(coefficients: Tensor, covariance: Tensor) -> Tensor:
    """Returns the (..., F) weights of regressions with coefficients (..., D, Q) and covariances (..., D, D)."""
    size = covariance.shape[-1]
    factor = torch.linalg.cholesky_ex(covariance).L
    errors = torch.cat([torch.eye(size).to(coefficients).expand_as(covariance), -coefficients], -1)
    matrix = errors.mT @ torch.cholesky_solve(errors, factor)
    matrix[..., -1, -1] += 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + size * math.log(2 * math.pi)
    return form_weights(matrix)


def regression_of(weights: Tensor, size: int, num_regressors: int) -> tuple[Tensor, Tensor]:
    """Returns coefficients and covariances for D = `size` responses. This is the inverse of `regression_weights`."""
    matrix = form_matrix(weights, size + num_regressors)
    factor = torch.linalg.cholesky(matrix[..., :size, :size])
    return torch.cholesky_solve(-matrix[..., :size, size:], factor), torch.cholesky_inverse(factor)
