"""Moments of predicted observations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Moments of predicted observations. The predictive distribution is a mixture over the states.

    Attributes:
        mean: (N, D) predictive means.
        variance: (N, D) predictive variances.

    Example:
        >>> import torch
        >>> from lightning_hmm import HMM, Poisson
        >>> model = HMM(2, Poisson(), num_features=1).set_parameters(emission={"rate": [[1.0], [3.0]]})
        >>> model.emission.predict(torch.tensor([[0.5, 0.5]], dtype=torch.float64))
        Moments(mean=tensor([[2.]], dtype=torch.float64), variance=tensor([[3.]], dtype=torch.float64))
    """

    mean: Tensor
    variance: Tensor


def mixture_moments(weights: Tensor, means: Tensor, variances: Tensor) -> Moments:
    """Computes the moments of N mixtures with weights (N, K) of K components with means and variances (K, D)."""
    mean = weights @ means
    spread = (means - mean[:, None]) ** 2  # (N, K, D)
    return Moments(mean, torch.einsum("nk,nkd->nd", weights, variances + spread))
