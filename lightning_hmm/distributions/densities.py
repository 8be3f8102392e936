r"""Densities whose parameters are the outputs of a network: Gaussian, Student's t, and mixtures of Gaussians.

Each object represents R x N densities of d entries. It implements `inference.particle.Density`, so particles can be
drawn from it, and it can be evaluated with missing entries. `DensityHead` converts the outputs of a network to such an
object. All methods but `sample` and `log_prob_of_each` are differentiable.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_hmm.inference.particle import Density, Randomness, Streams, normal, pick, uniform

Family = Literal["gaussian", "student", "mixture"]
# Maximum distance of a log-variance from its initial value. Without a bound, states can diverge if their variance grows
# with the state.
LOG_VARIANCE_RANGE = 4.0


class PartialDensity(Density):
    """A density with a variance, which can be evaluated at some of its entries only."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """(R, N, d)."""

    @abstractmethod
    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        """(R, N, d) -> (R, N): the log-density with the entries that are not `observed` integrated out."""


class DiagonalGaussian(PartialDensity):
    """Gaussian densities with independent entries.

    Args:
        mean: (R, N, d).
        scale: Standard deviations, of any shape that broadcasts to that of `mean`. They are not expanded in memory.
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        self._mean = mean
        self.scale = scale

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def variance(self) -> Tensor:
        return self.scale.expand_as(self.mean).square()

    def sample(self, generator: Randomness) -> Tensor:
        noise = normal(tuple(self.mean.shape), self.mean, generator)
        return torch.addcmul(self.mean, self.scale.expand_as(self.mean), noise)

    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        if observed is None:
            squares = ((states - self.mean) / self.scale).square().sum(-1)
            return -0.5 * squares - self._log_norm()
        entries = -0.5 * ((states - self.mean) / self.scale).square() - self.scale.log() - 0.5 * math.log(2 * math.pi)
        return torch.where(observed, entries, 0.0).sum(-1)

    def log_prob_of_each(self, states: Tensor) -> Tensor:
        """Computes all pairs by one matrix product: (x - m)^2 / s^2 = x^2 / s^2 - 2 x m / s^2 + m^2 / s^2.

        The average of the means is subtracted first, to avoid cancellation if the means are far from zero.
        """
        center = self.mean.mean(1, keepdim=True)
        precision = self.scale.expand_as(self.mean).reciprocal().square()
        mean, states = self.mean - center, states - center
        features = torch.cat([states.square(), states], dim=2)  # (R, M, 2 d)
        weights = torch.cat([-0.5 * precision, precision * mean], dim=2)  # (R, N, 2 d)
        constant = -0.5 * (precision * mean.square()).sum(2) - self._log_norm()
        return torch.baddbmm(constant.expand(len(mean), -1).unsqueeze(1), features, weights.mT)

    def pick(self, particles: Tensor) -> DiagonalGaussian:
        differs = self.scale.dim() == 3 and self.scale.shape[1] > 1
        return DiagonalGaussian(pick(self.mean, particles), pick(self.scale, particles) if differs else self.scale)

    def _log_norm(self) -> Tensor:
        return self.scale.expand_as(self.mean).log().sum(-1) + self.mean.shape[-1] / 2 * math.log(2 * math.pi)


class StudentT(PartialDensity):
    """Student's t densities with independent entries, whose heavy tails allow for jumps.

    Args:
        mean: (R, N, d).
        scale: (R, N, d) scale parameters. The standard deviations are larger, see `variance`.
        freedom: (d,) degrees of freedom, above 2.
    """

    def __init__(self, mean: Tensor, scale: Tensor, freedom: Tensor) -> None:
        self._mean = mean
        self.scale = scale
        self.freedom = freedom

    @property
    def mean(self) -> Tensor:
        return self._mean

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * self.freedom / (self.freedom - 2)

    def sample(self, generator: Randomness) -> Tensor:
        shape = tuple(self.mean.shape)
        half = (self.freedom.detach() / 2).expand(shape).contiguous()
        if isinstance(generator, Streams):
            # A copy, because `fill` works in place and `half` is needed below.
            numbers = half.to("cpu", copy=True)
            gamma = generator.fill(numbers, lambda row, own: row.copy_(torch._standard_gamma(row, generator=own)))
        else:
            gamma = torch._standard_gamma(half.to(generator.device), generator=generator)
        noise = normal(shape, self.mean, generator)
        return self.mean + self.scale * noise * (half / gamma.to(self.mean.device)).sqrt()

    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        entries = self._entries(states, self.mean, self.scale)
        return (entries if observed is None else torch.where(observed, entries, 0.0)).sum(-1)

    def log_prob_of_each(self, states: Tensor) -> Tensor:
        return self._entries(states.unsqueeze(2), self.mean.unsqueeze(1), self.scale.unsqueeze(1)).sum(-1)

    def _entries(self, states: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Returns the log-density of each entry."""
        freedom = self.freedom
        constant = torch.lgamma((freedom + 1) / 2) - torch.lgamma(freedom / 2) - 0.5 * (math.pi * freedom).log()
        return constant - scale.log() - (freedom + 1) / 2 * (((states - mean) / scale).square() / freedom).log1p()

    def pick(self, particles: Tensor) -> StudentT:
        return StudentT(pick(self.mean, particles), pick(self.scale, particles), self.freedom)


class GaussianMixture(PartialDensity):
    """Mixtures of C Gaussians with independent entries.

    Args:
        log_weights: (R, N, C) normalized log-weights of the components.
        means: (R, N, C, d).
        scales: (R, N, C, d) standard deviations.
    """

    def __init__(self, log_weights: Tensor, means: Tensor, scales: Tensor) -> None:
        self.log_weights = log_weights
        self.means = means
        self.scales = scales

    @property
    def mean(self) -> Tensor:
        return (self.log_weights.exp().unsqueeze(-1) * self.means).sum(-2)

    @property
    def variance(self) -> Tensor:
        about_mean = self.scales.square() + (self.means - self.mean.unsqueeze(-2)).square()
        return (self.log_weights.exp().unsqueeze(-1) * about_mean).sum(-2)

    def sample(self, generator: Randomness) -> Tensor:
        level = uniform((*self.log_weights.shape[:2], 1), self.means, generator)
        last = self.log_weights.shape[-1] - 1
        component = (self.log_weights.exp().cumsum(-1) <= level).sum(-1).clamp(max=last)
        index = component[..., None, None].expand(-1, -1, 1, self.means.shape[-1])
        mean, scale = (part.gather(2, index).squeeze(2) for part in (self.means, self.scales))
        return torch.addcmul(mean, scale, normal(tuple(mean.shape), mean, generator))

    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        observed = None if observed is None else observed.unsqueeze(-2)
        components = DiagonalGaussian(self.means, self.scales).log_prob(states.unsqueeze(-2), observed)
        return (self.log_weights + components).logsumexp(-1)

    def log_prob_of_each(self, states: Tensor) -> Tensor:
        flat = DiagonalGaussian(self.means.flatten(1, 2), self.scales.flatten(1, 2))
        components = flat.log_prob_of_each(states).unflatten(2, self.log_weights.shape[1:])
        return (components + self.log_weights.unsqueeze(1)).logsumexp(-1)

    def pick(self, particles: Tensor) -> GaussianMixture:
        means, scales = (
            pick(part.flatten(2), particles).unflatten(2, part.shape[2:]) for part in (self.means, self.scales)
        )
        return GaussianMixture(pick(self.log_weights, particles), means, scales)


class DensityHead(nn.Module):
    """Output layer that converts `num_outputs` outputs of a network into one density.

    Args:
        family: "gaussian"; "student", with one learned number of degrees of freedom for each entry; or "mixture" of
            Gaussians.
        size: d, the number of entries.
        log_variance: Logarithm of the variance where the output of the network is 0. A tanh keeps it within 4 of this
            value.
        num_components: Number of components of a mixture.
        bound: Largest absolute value of a mean, which is bound * tanh(output / bound). Means are unbounded if not
            given.
        dtype: Data type of the parameters.
    """

    def __init__(
        self,
        family: Family,
        size: int,
        log_variance: float = 0.0,
        num_components: int = 2,
        bound: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if family not in get_args(Family):
            raise ValueError(f"`family` must be one of {', '.join(get_args(Family))}, but is {family!r} instead.")
        self.family = family
        self.size = size
        self.log_variance = log_variance
        self.bound = bound
        self.num_components = num_components if family == "mixture" else 1
        self.num_outputs = (2 * size + (family == "mixture")) * self.num_components
        if family == "student":  # degrees of freedom are 2 + exp(log_freedom), so that there is a variance
            self.log_freedom = nn.Parameter(torch.full((size,), math.log(3), dtype=dtype))

    @property
    def is_log_variance(self) -> Tensor:
        """(num_outputs,) whether each output is a log-variance."""
        of_component = torch.arange(2 * self.size) >= self.size
        weights = torch.zeros(self.num_components if self.family == "mixture" else 0, dtype=torch.bool)
        return torch.cat([weights, of_component.repeat(self.num_components)])

    def forward(self, outputs: Tensor, shift: Tensor | None = None) -> PartialDensity:
        """Converts outputs of a network to densities.

        Args:
            outputs: (R, N, num_outputs).
            shift: (R, N, d) or (R, 1, d) values that are added to the means.

        Returns:
            R x N densities of d entries.
        """
        if self.family == "mixture":
            parts = outputs[..., self.num_components :].unflatten(-1, (self.num_components, 2 * self.size))
            shift = None if shift is None else shift.unsqueeze(-2)
        else:
            parts = outputs
        mean, log_variance = parts.chunk(2, dim=-1)
        half = LOG_VARIANCE_RANGE / 2
        scale = (half * (log_variance / LOG_VARIANCE_RANGE).tanh() + self.log_variance / 2).exp()
        mean = mean if shift is None else mean + shift
        if self.bound is not None:
            mean = self.bound * (mean / self.bound).tanh()
        if self.family == "mixture":
            return GaussianMixture(outputs[..., : self.num_components].log_softmax(-1), mean, scale)
        if self.family == "student":
            return StudentT(mean, scale, 2 + self.log_freedom.exp())
        return DiagonalGaussian(mean, scale)
