"""Poisson emissions, for counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, NamedParameter


class Poisson(ExponentialFamily):
    r"""Counts with a Poisson distribution. The rates have shape (K, D).

    Use it for columns of counts, such as events per interval.

    .. math:: \log p(y) = y \log \lambda - \lambda - \log y!, \qquad \hat\lambda = \frac{\sum y + s m}{n + s}

    The Gamma prior has the effect of :math:`s` additional visits at which the mean count :math:`m` of the data is
    observed, so that no rate becomes zero.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: ``["rate"]`` for rates that do not depend on the state; see `ExponentialFamily`.
        frozen: ``["rate"]`` for rates that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Poisson
        >>> model = HMM(num_states=2, emission=Poisson(), num_features=1)
        >>> model = model.set_parameters(emission={"rate": [[1.0], [3.0]]})
        >>> model.emission.rate
        tensor([[1.],
                [3.]], dtype=torch.float64)
    """

    products = ((0, None),)
    support = ("counts, whole numbers from 0", "Use another emission, or mark the value as missing.")
    typical = (1.0,)
    reads_counts = True
    rate = NamedParameter(POSITIVE, "(K, D) rates of the best restart.")

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values]

    def log_base(self, values: Tensor) -> Tensor:
        return -torch.lgamma(values + 1)

    def supports(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values == values.floor())

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        return (sums[:, :, 0] / visits,)

    def weights_of(self, *parameters: Tensor) -> Tensor:
        (rate,) = parameters
        return torch.stack([rate.log(), -rate], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (-weights[..., 1, :],)

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.rate, self.rate

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.poisson(*parameters)
