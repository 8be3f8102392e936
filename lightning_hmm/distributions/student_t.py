"""Student t emissions, for real columns with outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.augmented import AugmentedFamily
from lightning_hmm.distributions.gaussian import weighted_mean_var
from lightning_hmm.distributions.parameters import POSITIVE, REAL, NamedParameter
from lightning_hmm.sequences import Sequences

_QUARTILES_OF_A_GAUSSIAN = 1.3489795003921634  # distance between the quartiles, in standard deviations
_TYPICAL_DF = 4.0  # degrees of freedom that the prior favors, and from which training starts


class StudentT(AugmentedFamily):
    r"""Real columns with a Student t distribution. The parameters have shape (K, D).

    Use it instead of a `Gaussian` for data with outliers, such as returns of assets. Columns are independent given the
    state, and single missing values are marginalized exactly.

    .. math::
        p(y) = \frac{\Gamma(\frac{\nu + 1}{2})}{\Gamma(\frac{\nu}{2}) \sqrt{\nu \pi} \, \sigma}
        \Big( 1 + \frac{(y - \mu)^2}{\nu \sigma^2} \Big)^{-\frac{\nu + 1}{2}}

    This is a Gaussian with mean :math:`\mu` and variance :math:`\sigma^2 / u`, where the latent u has a Gamma
    distribution with shape and rate :math:`\nu / 2`. The M-step uses the expectations of
    :math:`\log u, u, u y, u y^2`:

    .. math::
        \hat\mu = \frac{\sum u y}{\sum u}, \quad \hat\sigma^2 = \frac{1}{n} \sum u (y - \hat\mu)^2, \quad
        \log \frac{\hat\nu}{2} - \psi\Big(\frac{\hat\nu}{2}\Big) + 1 + \frac{1}{n} \sum (\log u - u) = 0

    The last equation is solved by a safeguarded Newton method. The prior has the effect of s additional steps in each
    state, drawn from a distribution with 4 degrees of freedom and the mean and the standard deviation of the data as
    location and scale. It keeps the degrees of freedom finite and the scales positive. Degrees of freedom are positive
    and not bounded otherwise; with more than 100 the distribution is almost Gaussian, and EM changes them slowly.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: Names of the parameters that all states share, such as ``["df"]``; see `ExponentialFamily`.
        frozen: Names of the parameters that training leaves unchanged, such as ``["df"]``.

    Example:
        >>> from lightning_hmm import HMM, StudentT
        >>> model = HMM(num_states=2, emission=StudentT(tied=["df"]), num_features=1)
        >>> parameters = {"df": [[3.0], [3.0]], "loc": [[0.0], [5.0]], "scale": [[1.0], [2.0]]}
        >>> model = model.set_parameters(emission=parameters)
        >>> mean, variance = model.emission.moments()
        >>> variance
        tensor([[ 3.],
                [12.]], dtype=torch.float64)
    """

    typical = (1 - 0.5772156649015329 - math.log(2), -1.0, 0.0, -1.0)  # the first is digamma(df / 2) - log(df / 2)
    m_step = "closed form given a latent scale; Newton's method for `df`"
    center: Tensor
    df = NamedParameter(POSITIVE, "(K, D) degrees of freedom of the best restart.")
    loc = NamedParameter(REAL, "(K, D) locations of the best restart.")
    scale = NamedParameter(POSITIVE, "(K, D) scales of the best restart.")

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        super().allocate(restarts, num_states, columns)
        self.register_buffer("center", torch.zeros(self.num_features, dtype=torch.float64))
        with torch.no_grad():
            self.weights.copy_(self.weights_of(*(self._placeholder(name) for name in self.names)))

    def weights_of(self, *parameters: Tensor) -> Tensor:
        df, loc, scale = parameters
        offset, precision = loc - self.center, scale**-2
        rate = df / 2 + offset * offset * precision / 2
        constant = df / 2 * (df / 2).log() - torch.lgamma(df / 2) - scale.log() - 0.5 * math.log(2 * math.pi)
        return torch.stack([(df + 1) / 2, rate, -offset * precision, precision / 2, constant], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        shape, _, linear, square, _ = weights.unbind(-2)
        return 2 * shape - 1, self.center - linear / (2 * square), (2 * square) ** -0.5

    def log_density(self, weights: Tensor, values: Tensor) -> Tensor:
        shape, rate, linear, square, constant = weights.unbind(1)
        x = (values - self.center).unsqueeze(1)  # (steps, 1, D)
        # The rate of u is a quadratic function of x. It is computed without cancellation, for outliers far from zero.
        fixed = weights.detach()
        total = (fixed[:, 0] - 0.5) + fixed[:, 3] * (x + fixed[:, 2] / (2 * fixed[:, 3])) ** 2
        found = torch.lgamma(shape) + constant - shape * total.log()
        # These terms are zero. Their gradients are the expectations of -u, -u x and -u x^2.
        u = fixed[:, 0] / total
        changes = (rate - fixed[:, 1], linear - fixed[:, 2], square - fixed[:, 3])
        return found - u * changes[0] - u * x * changes[1] - u * x * x * changes[2]

    def location_and_variance(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns the medians, and the variances of Gaussians with the interquartile ranges of the data.

        Unlike means and variances, they do not depend on outliers. The variance is used if the range is zero.
        """
        variance = weighted_mean_var(sequences, self.column_names)[1]
        weights, found = sequences.step_weights(), []
        for values in sequences.values.double().T:
            order = values.argsort()
            counted = torch.where(values[order].isnan(), 0.0, weights[order]).cumsum(0)
            levels = counted[-1] * torch.tensor([0.25, 0.5, 0.75], dtype=counted.dtype, device=counted.device)
            found.append(values[order[torch.searchsorted(counted, levels)]])
        low, median, high = torch.stack(found, 1)
        spread = ((high - low) / _QUARTILES_OF_A_GAUSSIAN) ** 2
        return median, torch.where(spread > 0, spread, variance.to(spread.device))

    def reference_parameters(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        return torch.full_like(mean, _TYPICAL_DF), mean, variance.sqrt()

    def reference_statistics(self, parameters: Sequence[Tensor]) -> Tensor:
        df, loc, scale = parameters
        offset = loc - self.center
        log_u = torch.digamma(df / 2) - (df / 2).log()
        return torch.stack([log_u, -torch.ones_like(df), -offset, -(offset**2) - scale**2])

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Moves the center to the median of the data. The distribution does not change."""
        center = self.location_and_variance(sequences)[0].to(self.center.device)
        if not torch.equal(center, self.center):
            parameters = self.parameters_of(self.weights.detach())
            self.center.copy_(center)
            self.weights.copy_(self.weights_of(*parameters))
        super().set_data_stats(sequences)

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        log_u, u, uy, uyy = sums[:, :, 0], -sums[:, :, 1], -sums[:, :, 2], -sums[:, :, 3]
        offset = uy / u
        variance = (uyy - uy * offset) / visits
        # An approximation of the root of log(df / 2) - digamma(df / 2) = gap, of which Newton's method makes the root.
        gap = ((u - log_u) / visits - 1).clamp(min=1e-8)
        df = (3 - gap + ((gap - 3) ** 2 + 24 * gap).sqrt()) / (6 * gap)
        return df, self.center + offset, variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, D) means, NaN if df <= 1, and the variances, infinite if df <= 2."""
        df, loc, scale = self.df, self.loc, self.scale
        variance = torch.where(df > 2, scale**2 * df / (df - 2), torch.inf)
        return torch.where(df > 1, loc, torch.nan), torch.where(df > 1, variance, torch.nan)

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        df, loc, scale = parameters
        return loc + scale * random.standard_t(df)
