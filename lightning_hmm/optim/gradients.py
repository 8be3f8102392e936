"""Assignment of gradients that are not computed by ``backward``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def set_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Sets ``.grad`` of each parameter to a copy of its gradient, in the dtype and with the strides of the parameter.

    Fused optimizers on a CPU read parameter and gradient in the order of memory. If the strides differ, the entries of
    the gradient are applied to the wrong weights. Use this function to set every gradient that is not computed by
    ``backward``.

    Args:
        parameters: The parameters.
        gradients: One gradient for each parameter, with the same number of entries.

    Example:
        >>> import torch
        >>> from lightning_hmm.optim import set_gradients
        >>> parameter = torch.nn.Parameter(torch.zeros(3, 2).T)
        >>> set_gradients([parameter], [torch.ones(2, 3)])
        >>> parameter.grad.stride() == parameter.stride()
        True
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(gradient.view_as(parameter))
