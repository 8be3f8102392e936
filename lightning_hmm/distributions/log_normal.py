"""Log-normal emissions, for positive numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, REAL, NamedParameter


class LogNormal(ExponentialFamily):
    r"""Positive numbers whose logarithms have a normal distribution. The parameters have shape (K, D).

    Use it for positive columns that vary by factors, such as prices or sizes.

    .. math:: \log p(y) = -\frac{(\log y - \mu)^2}{2 \sigma^2} - \log \sigma - \log y - \frac12 \log 2 \pi

    The estimates are the mean and the standard deviation of log y. The prior has the effect of s additional steps in
    each state, at which the averages of log y and :math:`(\log y)^2` in the data are observed; see `ExponentialFamily`.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: Names of the parameters that have the same value in all states.
        frozen: Names of the parameters that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, LogNormal
        >>> model = HMM(num_states=2, emission=LogNormal(), num_features=1)
        >>> model = model.set_parameters(emission={"loc": [[0.0], [1.0]], "scale": [[0.5], [0.1]]})
        >>> model.emission.moments()[0]
        tensor([[1.1331],
                [2.7319]], dtype=torch.float64)
    """

    products = ((0, None), (0, 0))
    support = ("positive numbers", "Mark the value as missing, or use an emission that has zeros.")
    typical = (0.0, 1.0)
    loc = NamedParameter(REAL, "(K, D) means of log y of the best restart.")
    scale = NamedParameter(POSITIVE, "(K, D) standard deviations of log y of the best restart.")

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values.log()]

    def log_base(self, values: Tensor) -> Tensor:
        return -values.log()

    def supports(self, values: Tensor) -> Tensor:
        return values > 0

    def reference(self, mean: Tensor) -> Tensor:
        return mean + torch.tensor([[0.0], [1.0]]).to(mean)  # a variance that is larger by one

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        loc, squares = (sums / visits.unsqueeze(2)).unbind(2)
        return loc, (squares - loc * loc).sqrt()

    def weights_of(self, *parameters: Tensor) -> Tensor:
        loc, scale = parameters
        precision = scale**-2
        constant = 0.5 * loc * loc * precision + scale.log() + 0.5 * math.log(2 * math.pi)
        return torch.stack([loc * precision, -0.5 * precision, -constant], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        variance = -0.5 / weights[..., 1, :]
        return weights[..., 0, :] * variance, variance.sqrt()

    def moments(self) -> tuple[Tensor, Tensor]:
        variance = self.scale**2
        mean = (self.loc + variance / 2).exp()
        return mean, mean**2 * variance.expm1()

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.lognormal(*parameters)
