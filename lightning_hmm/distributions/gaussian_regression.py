"""Gaussian linear regression as evidence in quadratic form, with expected statistics of fixed size.

With the centered response y and the regressors z, which are the centered inputs and a constant 1, the log-density is

.. math:: -\\frac{y^2}{2 v} + \\frac{y\\, B \\cdot z}{v} - \\frac{(B \\cdot z)^2}{2 v} - \\frac12 \\log 2 \\pi v,

which is linear in y y, the Q products y z and the Q (Q + 1) / 2 products z z. Their F coefficients are the natural
parameters.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hmm.distributions.regression_products import Products, solve, solve_jointly
from lightning_hmm.inference.evidence import Quadratic

_JOINT_ITERATIONS = 50


def weights_of(coefficients: Tensor, variance: Tensor) -> Tensor:
    """Returns the (..., F) natural parameters of (..., Q) coefficients of centered data and (...) variances."""
    size = coefficients.shape[-1]
    i, j = torch.triu_indices(size, size, device=coefficients.device)
    products = coefficients[..., i] * coefficients[..., j] * torch.where(i == j, 0.5, 1.0).to(coefficients)
    variance = variance.unsqueeze(-1)
    constant = torch.zeros_like(products)
    constant[..., -1] = 0.5 * (2 * math.pi * variance.squeeze(-1)).log()  # the last product is 1 * 1
    return torch.cat([-0.5 / variance, coefficients / variance, -products / variance - constant], -1)


def products_of(statistics: Tensor, size: int) -> Products:
    """Converts the (..., F) expected statistics to sums of products with Q = `size` regressors."""
    i, j = torch.triu_indices(size, size, device=statistics.device)
    zz = statistics.new_zeros(*statistics.shape[:-1], size, size)
    zz[..., i, j] = statistics[..., 1 + size :]
    return Products(statistics[..., 0], statistics[..., 1 : 1 + size], zz + zz.triu(1).mT)


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
    free: Tensor | None,
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
        free: (K, Q) numbers of the free coefficients, or ``None`` if no coefficient is tied or frozen.
        rule: "tied" or "frozen" if the variances are.
    """
    penalty = torch.ones_like(centers[1]) * ridge
    penalty[-1] = 0

    def variance_of(residual: Tensor, found: Tensor) -> Tensor:
        total, visits = residual + ridge * found[..., :-1].square().sum(-1), products.visits
        if rule == "tied":
            total, visits = (part.sum(1, keepdim=True) for part in (total, visits))
        updated = (total + added) / visits
        # Without a prior, the variance of a single point is zero. The previous variance is kept in that case.
        usable = (visits > 0) & (updated > 0) & updated.isfinite()
        return variance if rule == "frozen" else torch.where(usable, updated, variance)

    if free is None:
        found, seen = solve(products, penalty)
        offset = (coefficients * centers[1]).sum(-1) - centers[0]
        present = torch.cat([coefficients[..., :-1], (coefficients[..., -1] + offset).unsqueeze(-1)], -1)
        found = torch.where(seen.unsqueeze(-1), found, present)
        offset = (found * centers[1]).sum(-1) - centers[0]
        moved = torch.cat([found[..., :-1], (found[..., -1] - offset).unsqueeze(-1)], -1)
        kept = torch.where(seen.unsqueeze(-1), moved, coefficients)
        return Estimate(kept, variance_of(products.residual(found), found), seen)
    products = products.moved(*centers)
    found, free = coefficients, free.to(coefficients.device)
    # The variances and the coefficients that states share are estimated in turn.
    for _ in range(_JOINT_ITERATIONS):
        found = solve_jointly(products, penalty, 1 / variance, free, coefficients)
        variance = variance_of(products.residual(found), found)
    return Estimate(found, variance, products.visits > 0)
