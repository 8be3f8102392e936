"""Weibull emissions, for positive numbers such as durations and wind speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, check_not_negative
from lightning_hmm.distributions.checks import (
    checked_parameters,
    count_free,
    refuse_value,
    refuse_where,
    require_observed,
    require_real,
)
from lightning_hmm.distributions.free_entries import number_free
from lightning_hmm.distributions.iterative import MOST_HELD, Newton
from lightning_hmm.distributions.moments import Moments, mixture_moments
from lightning_hmm.distributions.newton import Curvature
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.sequences import Sequences


class Weibull(Newton, Emission):
    r"""Positive numbers with a Weibull distribution. Concentrations c and scales s have shape (K, D).

    Use it for durations, lifetimes and wind speeds. The hazard rate falls with y if c is below 1, and rises if it is
    above 1.

    .. math:: \log p(y) = \log \frac{c}{s} + (c - 1) \log \frac{y}{s} - \Big( \frac{y}{s} \Big)^c

    The M-step stores the posterior probabilities of an epoch and runs Newton's method in :math:`\log c` and
    :math:`\log s` until it has converged; see `Iterative` for online EM and for large data. The log prior
    :math:`r \sum (\log c - c)`, a Gamma density with its mode at c = 1, keeps the concentration of equal values finite.

    Args:
        concentration_prior: Strength r of the prior, in steps. It must be positive.
        tied: Names of the parameters that all states share: "concentration" or "scale".
        frozen: Names of the parameters that training leaves unchanged.
        most_held: Maximum number of posterior probabilities that are stored; see `Iterative`.
        learning_rate: Step size of a gradient step in online EM; see `Iterative`.

    Example:
        >>> from lightning_hmm import HMM, Weibull
        >>> model = HMM(num_states=2, emission=Weibull(), num_features=1)
        >>> model = model.set_parameters(emission={"concentration": [[1.0], [2.0]], "scale": [[3.0], [1.0]]})
        >>> model.emission.moments()[0]
        tensor([[3.0000],
                [0.8862]], dtype=torch.float64)
    """

    support = ("positive numbers", "Shift the column, or mark the value as missing.")
    m_step = "Newton's method on stored posteriors"
    names = ("concentration", "scale")
    log_parameters: nn.Parameter  # (restarts, K, D, 2): logarithms of concentrations and scales

    def __init__(
        self,
        concentration_prior: float = 1e-3,
        tied: Sequence[str] = (),
        frozen: Sequence[str] = (),
        most_held: int = MOST_HELD,
        learning_rate: float = 0.1,
    ) -> None:
        super().__init__(tied, frozen, most_held=most_held, learning_rate=learning_rate)
        check_not_negative(concentration_prior=concentration_prior)
        if concentration_prior == 0:
            raise ValueError(f"`concentration_prior` must be positive, but is {concentration_prior} instead.")
        self.prior = {"concentration_prior": concentration_prior}

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        require_real(self, columns)
        self._begin_allocation()
        self.num_columns = len(columns)
        self.column_names = [column.name for column in columns]
        self.log_parameters = nn.Parameter(torch.zeros(restarts, num_states, len(columns), 2, dtype=torch.float64))
        tied, frozen = (torch.tensor([name in given for name in self.names]) for given in (self.tied, self.frozen))
        self.free = number_free(num_states, tied, frozen)

    @property
    def num_restarts(self) -> int:
        return len(self.log_parameters)

    @property
    def concentration(self) -> Tensor:
        """(K, D) concentrations of the best restart."""
        return self.log_parameters[self.restart, ..., 0].detach().exp()

    @property
    def scale(self) -> Tensor:
        """(K, D) scales of the best restart."""
        return self.log_parameters[self.restart, ..., 1].detach().exp()

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_columns)
        wrong = sequences.values <= 0
        if sequences.values.is_cpu and bool(wrong.any()):
            refuse_value(self, sequences, wrong, *self.support)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Initializes the scales with the means of the columns, unless the parameters are set."""
        weights = sequences.step_weights()[:, None] * sequences.observed
        require_observed(weights.sum(0), self.column_names)
        if not bool(self.is_set):
            mean = (sequences.values.double().nan_to_num() * weights).sum(0) / weights.sum(0)
            self.log_parameters[..., 1] = mean.log()

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        self.increase_from(sequences, responsibilities)

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Evidence:
        observed = ~batch.values.isnan()
        concentration, log_scale = natural[0].unbind(-1)  # the logarithm of the concentration
        logs = torch.where(observed, batch.values.double(), 1.0).log().unsqueeze(1)
        powers = concentration.exp() * (logs - log_scale)
        return Rows(torch.where(observed.unsqueeze(1), concentration - logs + powers - powers.exp(), 0.0).sum(2))

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        return []

    def pack(self, natural: Sequence[Tensor]) -> Tensor:
        return natural[0]

    def unpack(self, packed: Tensor) -> list[Tensor]:
        return [packed]

    def curvature(self, packed: Tensor, *example: Any) -> Curvature:
        batch, posteriors = example
        observed = ~batch.values.isnan()
        weights = posteriors.double().unsqueeze(2) * observed.unsqueeze(1)  # (steps, K, D)
        logs = torch.where(observed, batch.values.double(), 1.0).log().unsqueeze(1)
        rate, powers = packed[..., 0].exp(), packed[..., 0].exp() * (logs - packed[..., 1])
        raised = powers.exp()

        def total(values: Tensor) -> Tensor:
            return torch.where(weights > 0, weights * values, 0.0).sum(0)

        gradient = torch.stack([total(1 + powers * (1 - raised)), -rate * total(1 - raised)], -1)
        mixed = -rate * total(1 - raised - powers * raised)
        own = total(powers * (1 - raised) - powers.square() * raised), -rate.square() * total(raised)
        hessian = torch.stack([torch.stack([own[0], mixed], -1), torch.stack([mixed, own[1]], -1)], -2)
        return Curvature(total(packed[..., 0] - logs + powers - raised), gradient, hessian)

    def prior_curvature(self, packed: Tensor) -> Curvature:
        strength, logs = self.prior["concentration_prior"], packed[..., 0]
        slopes = torch.stack([strength * (1 - logs.exp()), torch.zeros_like(logs)], -1)
        bends = torch.stack([-strength * logs.exp(), torch.zeros_like(logs)], -1)
        return Curvature(strength * (logs - logs.exp()), slopes, bends.diag_embed())

    def num_free_parameters(self, restart: int) -> int:
        states, columns = self.log_parameters.shape[1:3]
        return count_free(self, states, dict.fromkeys(self.names, columns))

    @torch.no_grad()
    def set(self, **values: Any) -> None:
        """Sets parameters by name, (K, D) each, to the same values in all restarts."""
        present = dict(zip(self.names, self.log_parameters.unbind(-1), strict=True))
        for name, value in checked_parameters(self, values, present, _check).items():
            present[name].copy_(value.log())
        self.is_set.fill_(True)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, D) means and variances of the best restart."""
        first, second = (torch.lgamma(1 + n / self.concentration) for n in (1, 2))
        mean = self.scale * first.exp()
        # Not the difference of two moments, which is NaN if both are infinite.
        return mean, mean.square() * torch.expm1(second - 2 * first)

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(len(states), self.num_columns, generator=generator, dtype=torch.float64)
        # `rand` may return zero, but not one.
        exponential = -torch.log1p(-uniform.clamp(min=1e-16)).to(states.device)
        return self.scale[states] * exponential ** (1 / self.concentration[states])

    def predict(self, state_probs: Tensor) -> Moments:
        return mixture_moments(state_probs, *self.moments())


def _check(name: str, value: Tensor) -> None:
    refuse_where(~(value.isfinite() & (value > 0)), name, "be positive and finite", value)
