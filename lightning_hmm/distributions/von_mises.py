"""Von Mises emissions, for angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.moments import Moments
from lightning_hmm.distributions.parameters import POSITIVE, REAL, NamedParameter


class VonMises(ExponentialFamily):
    r"""Angles in radians with a von Mises distribution. The parameters have shape (K, D).

    Use it for directions and turning angles, and for times of the day or the year. Angles that differ by
    :math:`2 \pi` are the same.

    .. math:: \log p(y) = \kappa \cos(y - \mu) - \log 2 \pi I_0(\kappa)

    The location :math:`\mu` is returned between :math:`-\pi` and :math:`\pi`. The M-step is a Newton method on the
    ratio of Bessel functions. The prior has the effect of s additional steps in each state, at which the averages of
    cos y and sin y in the data are observed; see `ExponentialFamily`.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: Names of the parameters that have the same value in all states.
        frozen: Names of the parameters that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, VonMises
        >>> model = HMM(num_states=2, emission=VonMises(), num_features=1)
        >>> model = model.set_parameters(emission={"loc": [[0.0], [3.0]], "concentration": [[0.5], [8.0]]})
        >>> model.emission.loc
        tensor([[0.],
                [3.]], dtype=torch.float64)
    """

    support = ("angles in radians, any real numbers", "Mark other values as missing.")
    m_step = "Newton's method"
    products = ((0, None), (1, None))
    typical = (0.0, 0.0)  # the uniform distribution
    is_exact = False
    loc = NamedParameter(REAL, "(K, D) locations of the best restart.")
    concentration = NamedParameter(POSITIVE, "(K, D) concentrations of the best restart.")

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values.cos(), values.sin()]

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        cosine, sine = (sums / visits.unsqueeze(2)).unbind(2)
        length = torch.hypot(cosine, sine)
        concentration = length * (2 - length**2) / (1 - length**2)  # the approximation of Banerjee et al.
        return torch.atan2(sine, cosine), concentration

    def weights_of(self, *parameters: Tensor) -> Tensor:
        loc, concentration = parameters
        log_bessel = concentration + torch.special.i0e(concentration).log()
        constant = log_bessel + math.log(2 * math.pi)
        return torch.stack([concentration * loc.cos(), concentration * loc.sin(), -constant], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        cosine, sine, _ = weights.unbind(-2)
        return torch.atan2(sine, cosine), torch.hypot(cosine, sine)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, D) locations, and the variances of the angles between -pi and pi from the location."""
        concentration = self.concentration
        nodes, weights = (torch.from_numpy(array).to(concentration) for array in np.polynomial.legendre.leggauss(200))
        # Farther than 12 / sqrt(concentration) from the location, the density is below 1e-28 of its maximum.
        half = (12 / concentration.sqrt()).clamp(max=math.pi).unsqueeze(-1) / 2
        angles = half * (nodes + 1)
        density = weights * (-2 * concentration.unsqueeze(-1) * (angles / 2).sin() ** 2).exp()
        return self.loc, (angles**2 * density).sum(-1) / density.sum(-1)

    def predict(self, state_probs: Tensor) -> Moments:
        """Returns the direction of the mean resultant vector, and the variance of the angles measured from it."""
        loc, variance = self.moments()
        length = torch.special.i1e(self.concentration) / torch.special.i0e(self.concentration)
        mean = torch.atan2(state_probs @ (length * loc.sin()), state_probs @ (length * loc.cos()))
        gap = torch.remainder(loc - mean[:, None] + math.pi, 2 * math.pi) - math.pi  # (N, K, D)
        return Moments(mean, torch.einsum("nk,nkd->nd", state_probs, variance + gap**2))

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.vonmises(*parameters)
