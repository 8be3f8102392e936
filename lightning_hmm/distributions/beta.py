"""Beta emissions, for numbers between 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, NamedParameter


class Beta(ExponentialFamily):
    r"""Numbers between 0 and 1 with a Beta distribution. The parameters have shape (K, D).

    Use it for proportions and rates.

    .. math::
        \log p(y) = (a - 1) \log y + (b - 1) \log (1 - y) + \log \Gamma(a + b) - \log \Gamma(a) - \log \Gamma(b)

    Here, a is `concentration1` and b is `concentration0`. The M-step is a Newton method. The prior has the effect of s
    additional steps in each state, at which the averages of log y and log(1 - y) in the data are observed; see
    `ExponentialFamily`.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: Names of the parameters that have the same value in all states.
        frozen: Names of the parameters that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Beta
        >>> model = HMM(num_states=2, emission=Beta(), num_features=1)
        >>> parameters = {"concentration1": [[1.0], [6.0]], "concentration0": [[3.0], [2.0]]}
        >>> model.set_parameters(emission=parameters).emission.moments()[0]
        tensor([[0.2500],
                [0.7500]], dtype=torch.float64)
    """

    products = ((0, None), (1, None))
    support = ("numbers between 0 and 1, exclusive", "Rescale the column, or mark 0 and 1 as missing.")
    m_step = "Newton's method"
    typical = (-1.0, -1.0)  # the uniform distribution
    is_exact = False
    concentration1 = NamedParameter(POSITIVE, "(K, D) exponents of y, plus one, of the best restart.")
    concentration0 = NamedParameter(POSITIVE, "(K, D) exponents of 1 - y, plus one, of the best restart.")

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values.log(), torch.log1p(-values)]

    def log_base(self, values: Tensor) -> Tensor:
        return -values.log() - torch.log1p(-values)

    def supports(self, values: Tensor) -> Tensor:
        return (values > 0) & (values < 1)

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        one, zero = (sums / visits.unsqueeze(2)).exp().unbind(2)  # the approximation of Johnson and Kotz
        spread = 2 * (1 - one - zero)
        return 0.5 + one / spread, 0.5 + zero / spread

    def weights_of(self, *parameters: Tensor) -> Tensor:
        one, zero = parameters
        return torch.stack([one, zero, torch.lgamma(one + zero) - torch.lgamma(one) - torch.lgamma(zero)], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return weights[..., 0, :], weights[..., 1, :]

    def moments(self) -> tuple[Tensor, Tensor]:
        total = self.concentration1 + self.concentration0
        mean = self.concentration1 / total
        return mean, mean * (self.concentration0 / total) / (total + 1)

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.beta(*parameters)
