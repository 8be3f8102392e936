"""Poisson emissions, for counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import check_not_negative
from lightning_hmm.distributions.exponential import ExponentialFamily, refuse_where, require_observed
from lightning_hmm.sequences import Sequences


class Poisson(ExponentialFamily):
    r"""Counts with a Poisson distribution. The rates have shape (K, D).

    Use it for columns of counts, such as events per interval.

    .. math:: \log p(y) = y \log \lambda - \lambda - \log y!, \qquad \hat\lambda = \frac{\sum y + s m}{n + s}

    The Gamma prior has the effect of :math:`s` additional visits at which the mean count :math:`m` of the data is
    observed, so that no rate becomes zero.

    Args:
        rate_prior: Strength s of the Gamma prior, in steps. It must be positive, because the logarithm of a rate of
            zero is not finite.

    Example:
        >>> from lightning_hmm import HMM, Poisson
        >>> model = HMM(num_states=2, emission=Poisson(), num_features=1)
        >>> model = model.set_parameters(emission={"rate": [[1.0], [3.0]]})
        >>> model.emission.rate
        tensor([[1.],
                [3.]], dtype=torch.float64)
    """

    products = ((0, None),)
    names = ("rate",)
    reads_counts = True
    data_mean: Tensor

    def __init__(self, rate_prior: float = 1e-3) -> None:
        super().__init__()
        check_not_negative(rate_prior=rate_prior)
        if rate_prior == 0:
            raise ValueError(f"`rate_prior` must be positive, but is {rate_prior} instead.")
        self.prior = {"rate_prior": rate_prior}

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        super().allocate(restarts, num_states, columns)
        self.register_buffer("data_mean", torch.ones(self.num_features, dtype=torch.float64))

    @property
    def rate(self) -> Tensor:
        """(K, D) rates of the best restart."""
        return -self.weights[self.restart, :, 1].detach()

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values]

    def log_base(self, values: Tensor) -> Tensor:
        return -torch.lgamma(values + 1)

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_features)
        values = sequences.values
        wrong = (values < 0) | (values != values.floor()) & ~values.isnan()
        if values.is_cpu and bool(wrong.any()):
            step, column = torch.nonzero(wrong)[0].tolist()
            n, t = sequences.locate(step)
            raise ValueError(
                "A Poisson emission must have counts, whole numbers from 0, "
                f"but column {column} at position {t} of sequence {n} is {float(values[step, column]):g}."
            )

    def set_data_stats(self, sequences: Sequences) -> None:
        observed, values = sequences.observed, sequences.values.double()
        weights = sequences.step_weights()[:, None] * observed
        require_observed(weights.sum(0), self.column_names)
        # Adding half a count keeps the mean positive if a column contains only zeros.
        self.data_mean.copy_((torch.where(observed, values, 0.0) * weights).sum(0).add(0.5) / weights.sum(0).add(0.5))

    def estimate(self, sums: Tensor, visits: Tensor, weight: Tensor | float) -> tuple[tuple[Tensor, ...], Tensor]:
        strength = self.prior["rate_prior"] * weight
        return ((sums[:, :, 0] + strength * self.data_mean) / (visits + strength),), visits > 0

    def weights_of(self, *parameters: Tensor) -> Tensor:
        (rate,) = parameters
        return torch.stack([rate.log(), -rate], 2)

    def check_parameter(self, name: str, value: Tensor) -> None:
        super().check_parameter(name, value)
        refuse_where(value <= 0, name, "be positive", value)

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.rate, self.rate

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(self.rate.cpu()[states.cpu()], generator=generator).to(states.device)

    def log_prior(self) -> Tensor:
        log_rate, negative_rate = self.weights.detach().unbind(2)
        return self.prior["rate_prior"] * (self.data_mean * log_rate + negative_rate).flatten(1).sum(1)

    def num_free_parameters(self, restart: int) -> int:
        return self.weights[restart, :, 0].numel()
