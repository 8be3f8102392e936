"""Exponential emissions, for positive numbers such as waiting times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, NamedParameter


class Exponential(ExponentialFamily):
    r"""Numbers from 0 with an exponential distribution. The rates have shape (K, D).

    Use it for waiting times without memory. It is a `Gamma` distribution with a concentration of 1.

    .. math:: \log p(y) = \log \lambda - \lambda y, \qquad \hat\lambda = \frac{n + s}{\sum y + s m}

    The prior has the effect of s additional steps in each state, at which the mean m of the data is observed.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: ``["rate"]`` for rates that do not depend on the state.
        frozen: ``["rate"]`` for rates that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Exponential
        >>> model = HMM(num_states=2, emission=Exponential(), num_features=1)
        >>> model = model.set_parameters(emission={"rate": [[0.1], [2.0]]})
        >>> model.emission.moments()[0]
        tensor([[10.0000],
                [ 0.5000]], dtype=torch.float64)
    """

    products = ((0, None),)
    support = ("numbers from 0", "Mark the value as missing, or use an emission of real numbers.")
    typical = (1.0,)
    rate = NamedParameter(POSITIVE, "(K, D) rates of the best restart.")

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values]

    def supports(self, values: Tensor) -> Tensor:
        return values >= 0

    def reference(self, mean: Tensor) -> Tensor:
        return torch.where(mean > 0, mean, 1.0)

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        return (visits / sums[:, :, 0],)

    def weights_of(self, *parameters: Tensor) -> Tensor:
        (rate,) = parameters
        return torch.stack([-rate, rate.log()], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (-weights[..., 0, :],)

    def moments(self) -> tuple[Tensor, Tensor]:
        return 1 / self.rate, self.rate**-2

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.exponential(1 / parameters[0])
