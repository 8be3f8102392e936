r"""Densities that a network describes: independent Gaussian entries, independent entries of Student's t, mixtures of the former.

They are what `inference.particle` knows as a `Density`, so that particles can be drawn from them, and in addition leave out entries that are missing.
All but `sample` and `log_prob_of_each` pass on gradients. R x N of them, of d entries.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_hmm.inference import particle
from lightning_hmm.inference.particle import Density, Randomness, Streams, uniform

Family = Literal["gaussian", "student", "mixture"]
# Log-variances stay this near to what they start from. A variance that grows with the state makes it larger still: without a bound, states explode.
LOG_VARIANCE_RANGE = 4.0


class PartialDensity(Density):
    """A density that can be asked about some entries alone, and knows its variance."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """(R, N, d)."""

    @abstractmethod
    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        """(R, N, d) -> (R, N): without the entries that are not `observed`, which are integrated out."""


class Gaussian(particle.DiagonalGaussian, PartialDensity):
    """Independent Gaussian entries."""

    @property
    def variance(self) -> Tensor:
        return self.scale.expand_as(self.mean).square()

    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        if observed is None:
            return super().log_prob(states)
        entries = -0.5 * ((states - self.mean) / self.scale).square() - self.scale.log() - 0.5 * math.log(2 * math.pi)
        return torch.where(observed, entries, 0.0).sum(-1)


class StudentT(PartialDensity):
    """Independent entries of Student's t: like a Gaussian, but a jump is not impossible.

    Args:
        mean, scale: (R, N, d).
        freedom: (d,) degrees of freedom, above 2.
    """

    def __init__(self, mean: Tensor, scale: Tensor, freedom: Tensor) -> None:
        self._mean, self.scale, self.freedom = mean, scale, freedom

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
            # Copied, since `fill` works in place and `half` is needed below.
            gamma = generator.fill(half.to("cpu", copy=True), lambda row, own: row.copy_(torch._standard_gamma(row, generator=own))).to(self.mean.device)
        else:
            gamma = torch._standard_gamma(half.to(generator.device), generator=generator).to(self.mean.device)
        return self.mean + self.scale * particle.normal(shape, self.mean, generator) * (half / gamma).sqrt()

    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        entries = self._entries(states, self.mean, self.scale)
        return (entries if observed is None else torch.where(observed, entries, 0.0)).sum(-1)

    def log_prob_of_each(self, states: Tensor) -> Tensor:
        return self._entries(states.unsqueeze(2), self.mean.unsqueeze(1), self.scale.unsqueeze(1)).sum(-1)

    def _entries(self, states: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        freedom = self.freedom
        constant = torch.lgamma((freedom + 1) / 2) - torch.lgamma(freedom / 2) - 0.5 * (math.pi * freedom).log()
        return constant - scale.log() - (freedom + 1) / 2 * (((states - mean) / scale).square() / freedom).log1p()

    def pick(self, particles: Tensor) -> StudentT:
        return StudentT(_pick(self.mean, particles), _pick(self.scale, particles), self.freedom)


class Mixture(PartialDensity):
    """Mixtures of C Gaussians with independent entries.

    Args:
        log_shares: (R, N, C), normalised.
        means, scales: (R, N, C, d).
    """

    def __init__(self, log_shares: Tensor, means: Tensor, scales: Tensor) -> None:
        self.log_shares, self.means, self.scales = log_shares, means, scales

    @property
    def mean(self) -> Tensor:
        return (self.log_shares.exp().unsqueeze(-1) * self.means).sum(-2)

    @property
    def variance(self) -> Tensor:
        about_mean = self.scales.square() + (self.means - self.mean.unsqueeze(-2)).square()
        return (self.log_shares.exp().unsqueeze(-1) * about_mean).sum(-2)

    def sample(self, generator: Randomness) -> Tensor:
        level = uniform((*self.log_shares.shape[:2], 1), self.means, generator)
        component = (self.log_shares.exp().cumsum(-1) <= level).sum(-1).clamp(max=self.log_shares.shape[-1] - 1)
        chosen = component[..., None, None].expand(-1, -1, 1, self.means.shape[-1])
        mean, scale = (part.gather(2, chosen).squeeze(2) for part in (self.means, self.scales))
        return torch.addcmul(mean, scale, particle.normal(tuple(mean.shape), mean, generator))

    def log_prob(self, states: Tensor, observed: Tensor | None = None) -> Tensor:
        hidden = None if observed is None else observed.unsqueeze(-2)
        return (self.log_shares + Gaussian(self.means, self.scales).log_prob(states.unsqueeze(-2), hidden)).logsumexp(-1)

    def log_prob_of_each(self, states: Tensor) -> Tensor:
        components = Gaussian(self.means.flatten(1, 2), self.scales.flatten(1, 2)).log_prob_of_each(states)
        return (components.unflatten(2, self.log_shares.shape[1:]) + self.log_shares.unsqueeze(1)).logsumexp(-1)

    def pick(self, particles: Tensor) -> Mixture:
        means, scales = (_pick(part.flatten(2), particles).unflatten(2, part.shape[2:]) for part in (self.means, self.scales))
        return Mixture(_pick(self.log_shares, particles), means, scales)


class DensityHead(nn.Module):
    """Makes densities of what a network says: `num_outputs` numbers for each.

    Args:
        family: "gaussian"; "student", with degrees of freedom that are learned, one number for each entry; or "mixture" of Gaussians.
        size: d.
        log_variance: what it is where the network says 0; it stays within 4 of that, by tanh.
        num_components: of a mixture.
        bound: means are bound * tanh(what the network says / bound).
        dtype: of its parameters.
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
        self.family, self.size, self.log_variance, self.bound = family, size, log_variance, bound
        self.num_components = num_components if family == "mixture" else 1
        self.num_outputs = (2 * size + (family == "mixture")) * self.num_components
        if family == "student":
            self.log_freedom = nn.Parameter(torch.full((size,), math.log(3), dtype=dtype))  # above 2, where there is a variance

    @property
    def is_log_variance(self) -> Tensor:
        """(num_outputs,) which of the numbers are."""
        of_one = torch.arange(2 * self.size) >= self.size
        shares = torch.zeros(self.num_components if self.family == "mixture" else 0, dtype=torch.bool)
        return torch.cat([shares, of_one.repeat(self.num_components)])

    def forward(self, outputs: Tensor, shift: Tensor | None = None) -> PartialDensity:
        """(R, N, num_outputs), and perhaps (R, N, d) or (R, 1, d) what is added to the means -> R x N densities."""
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
            return Mixture(outputs[..., : self.num_components].log_softmax(-1), mean, scale)
        return Gaussian(mean, scale) if self.family == "gaussian" else StudentT(mean, scale, 2 + self.log_freedom.exp())


def _pick(values: Tensor, particles: Tensor) -> Tensor:
    """(R, N, d), (R, M) -> (R, M, d)."""
    return values.gather(1, particles.unsqueeze(2).expand(-1, -1, values.shape[2]))
