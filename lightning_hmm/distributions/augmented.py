"""Emissions of columns whose distribution is an exponential family together with a latent variable of each value."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import pull_back
from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.gaussian import weighted_mean_var
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.sequences import Sequences


class AugmentedFamily(ExponentialFamily):
    r"""Base class of emissions with a latent variable u for each value, such that y and u are an exponential family.

    .. math:: \log p(y, u \mid k) = \sum_{j < T} w_{kj} \, t_j(y, u) + w_{kT} + h(y, u)

    The log-density of y is a function of the weights w, and its gradient with respect to :math:`w_{kj}` is
    :math:`E[t_j(y, u) \mid y, k]`. An EM step therefore consists of the expected statistics, which autograd computes,
    and the M-step of the exponential family. The prior has the effect of s additional steps in each state, at which the
    statistics have their expectations under the parameters of `reference_parameters`.

    To define a family, implement `log_density` and `reference_parameters`, and the methods of `ExponentialFamily` that
    concern parameters and weights. The length of `typical` is the number of statistics T.

    Example:
        >>> from lightning_hmm.distributions import NegativeBinomial, StudentT
        >>> NegativeBinomial.names, StudentT.names
        (('total_count', 'probs'), ('df', 'loc', 'scale'))
    """

    is_exact = False

    @property
    def products(self) -> tuple[tuple[int, int | None], ...]:  # type: ignore[override]
        return ((0, None),) * len(self.typical)

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        super().allocate(restarts, num_states, columns)
        self.width = num_states * self.num_features

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values]

    @abstractmethod
    def log_density(self, weights: Tensor, values: Tensor) -> Tensor:
        """Returns the log-densities (steps, K, D) of values (steps, D), whose gradients are expected statistics."""

    def location_and_variance(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns the (D,) arguments of `reference_parameters`, by default the mean and the variance of the data."""
        return weighted_mean_var(sequences, self.column_names)

    @abstractmethod
    def reference_parameters(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        """Returns parameters (D,) for the mean and the variance of the data, which the prior favors."""

    @abstractmethod
    def reference_statistics(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the expected statistics (T, D) under parameters (D,)."""

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Rows:  # type: ignore[override]
        (weights,) = natural
        values = batch.values.to(weights.dtype)
        if batch.is_complete:
            return Rows(self.log_density(weights, values).sum(-1))
        observed = ~values.isnan()
        terms = self.log_density(weights, torch.where(observed, values, 0.0))
        return Rows(torch.where(observed.unsqueeze(1), terms, 0.0).sum(-1))

    def needs_graph(self, batch: Sequences) -> bool:
        return True

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        return pull_back([evidence.live], [gradient], natural)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        moments = [moment.to(self.weights.device) for moment in self.location_and_variance(sequences)]
        self.data_statistics.copy_(self.reference_statistics(self.reference_parameters(*moments)))

    @torch.no_grad()
    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        """Initializes the parameters by an M-step, with the latent variables of the whole data."""
        moments = [moment.to(self.weights.device) for moment in self.location_and_variance(sequences)]
        shape = (*self.weights.shape[:2], self.num_features)
        values = self.reference_parameters(*moments)
        found = [self.given(name, value.expand(shape)) for name, value in zip(self.names, values, strict=True)]
        self.weights.copy_(self.weights_of(*found))
        super().start(sequences, responsibilities)
