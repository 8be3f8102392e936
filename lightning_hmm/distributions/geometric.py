"""Geometric emissions, for numbers of failures before a success."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import PROBABILITY, NamedParameter, below_one


class Geometric(ExponentialFamily):
    r"""Counts from 0 with a geometric distribution: failures before the first success. The shape of p is (K, D).

    Use it for counts whose probabilities decrease by a constant factor, such as waiting times in whole steps.

    .. math:: \log p(y) = \log p + y \log (1 - p), \qquad \hat p = \frac{n + s}{n + s + \sum y + s m}

    The Beta prior has the effect of s additional steps in each state, at which the mean count m of the data is
    observed.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: ``["probs"]`` for probabilities that do not depend on the state.
        frozen: ``["probs"]`` for probabilities that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Geometric
        >>> model = HMM(num_states=2, emission=Geometric(), num_features=1)
        >>> model = model.set_parameters(emission={"probs": [[0.2], [0.5]]})
        >>> model.emission.moments()[0]
        tensor([[4.],
                [1.]], dtype=torch.float64)
    """

    products = ((0, None),)
    support = ("counts, whole numbers from 0", "Subtract 1 if the counts begin at 1, or mark the value as missing.")
    typical = (1.0,)
    reads_counts = True
    probs = NamedParameter(PROBABILITY, "(K, D) probabilities of success of the best restart.")

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values]

    def supports(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values == values.floor())

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        return (below_one(visits / (visits + sums[:, :, 0])),)

    def weights_of(self, *parameters: Tensor) -> Tensor:
        (probs,) = parameters
        return torch.stack([torch.log1p(-probs), probs.log()], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (weights[..., 1, :].exp(),)

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = (1 - self.probs) / self.probs
        return mean, mean / self.probs

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.geometric(*parameters) - 1
