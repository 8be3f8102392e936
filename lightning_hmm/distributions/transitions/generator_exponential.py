"""The exponential function of rate matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TERMS = 18  # of the exponential series of a matrix with row sums of at most 1, for 16 digits


def generator_exponential(generator: Tensor, times: Tensor) -> Tensor:
    r"""Computes exp(Q t) for a rate matrix, differentiable with respect to all entries of Q.

    .. math:: \exp(Q t) = \left(e^{-\lambda s} \exp((Q + \lambda I) s)\right)^{2^n}, \qquad s = t / 2^n

    With :math:`\lambda = \max_i(-Q_{ii})` no term of the series is negative, so even the smallest entries have a small
    relative error, which `torch.matrix_exp` does not guarantee. The rows of every square are normalized, which removes
    rounding errors only.

    Args:
        generator: (K, K) matrix Q with rows that sum to zero.
        times: (M,) times t, which are not negative.

    Returns:
        (M, K, K) transition probabilities.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions.transitions.generator_exponential import generator_exponential
        >>> rates = torch.tensor([[-2.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
        >>> generator_exponential(rates, torch.tensor([0.0, 0.5], dtype=torch.float64))
        tensor([[[1.0000, 0.0000],
                 [0.0000, 1.0000]],
        <BLANKLINE>
                [[0.3679, 0.6321],
                 [0.0000, 1.0000]]], dtype=torch.float64)
    """
    unit = torch.eye(len(generator), dtype=generator.dtype, device=generator.device)
    fastest = (-generator.detach().diagonal()).max().clamp(min=0)
    largest = float(fastest * times.max())
    squares = max(0, math.ceil(math.log2(largest))) if largest > 0 else 0
    short = times[:, None, None] / 2**squares
    step = (generator + fastest * unit) * short  # Its row sums are at most 1.
    total = unit + step / TERMS
    for n in range(TERMS - 1, 0, -1):
        total = unit + step @ total / n
    probs = _normalized(total * torch.exp(-fastest * short))
    for _ in range(squares):
        probs = _normalized(probs @ probs)
    return probs


def _normalized(probs: Tensor) -> Tensor:
    return probs / probs.detach().sum(-1, keepdim=True)
