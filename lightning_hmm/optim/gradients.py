"""Gradients that a model computes itself and passes to its optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def set_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Sets ``.grad`` of each parameter to a copy of its gradient, in the dtype and with the strides of the parameter.

    Fused optimizers on a CPU read parameter and gradient in the order of memory. If the strides differ, the entries of the gradient are applied to the
    wrong weights. Every gradient that is not left by ``backward`` must therefore be set by this function.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(gradient.view_as(parameter))
