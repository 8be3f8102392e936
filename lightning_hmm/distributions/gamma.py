"""Gamma emissions, for positive numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, NamedParameter

_EULER = 0.5772156649015329  # minus the mean logarithm of an exponential distribution with mean 1


class Gamma(ExponentialFamily):
    r"""Positive numbers with a Gamma distribution. The parameters have shape (K, D).

    Use it for positive columns, such as step lengths, amounts of rain or durations.

    .. math:: \log p(y) = a \log y - b y - \log y + a \log b - \log \Gamma(a)

    The parameters are the concentration a and the rate b. The mean is a / b, and the variance is :math:`a / b^2`. The
    M-step is a Newton method. The prior is equivalent to s additional steps in each state whose statistics are the
    averages of y and log y over the data; see `ExponentialFamily`. Values must be positive.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: Names of the parameters that have the same value in all states.
        frozen: Names of the parameters that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Gamma
        >>> model = HMM(num_states=2, emission=Gamma(), num_features=1)
        >>> model = model.set_parameters(emission={"concentration": [[1.0], [4.0]], "rate": [[1.0], [2.0]]})
        >>> model.emission.moments()[0]
        tensor([[1.],
                [2.]], dtype=torch.float64)
    """

    products = ((0, None), (1, None))
    support = ("positive numbers", "Mark the value as missing, or use an emission that has zeros.")
    m_step = "Newton's method"
    typical = (-_EULER, 1.0)
    is_exact = False
    concentration = NamedParameter(POSITIVE, "(K, D) concentrations a of the best restart.")
    rate = NamedParameter(POSITIVE, "(K, D) rates b of the best restart.")

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values.log(), values]

    def log_base(self, values: Tensor) -> Tensor:
        return -values.log()

    def supports(self, values: Tensor) -> Tensor:
        return values > 0

    def reference(self, mean: Tensor) -> Tensor:
        return torch.stack([mean[1].log() - _EULER, mean[1]])  # the exponential distribution with the same mean

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        mean_log, mean = (sums / visits.unsqueeze(2)).unbind(2)
        gap = mean.log() - mean_log
        concentration = (3 - gap + ((gap - 3) ** 2 + 24 * gap).sqrt()) / (12 * gap)  # Minka's approximation
        return concentration, concentration / mean

    def weights_of(self, *parameters: Tensor) -> Tensor:
        concentration, rate = parameters
        return torch.stack([concentration, -rate, concentration * rate.log() - torch.lgamma(concentration)], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return weights[..., 0, :], -weights[..., 1, :]

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = self.concentration / self.rate
        return mean, mean / self.rate

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        concentration, rate = parameters
        return random.gamma(concentration, 1 / rate)
