"""Zero-inflated counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, as_numbers
from lightning_hmm.distributions.checks import refuse_where
from lightning_hmm.distributions.compound import Compound, log_sum_exp
from lightning_hmm.distributions.moments import Moments, mixture_moments
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.sequences import Sequences


class ZeroInflated(Compound):
    r"""Counts with additional zeros: each column is zero with the probability `gate`, and else from the component.

    .. math:: p(y_d \mid k) = g_{kd} \, [y_d = 0] + (1 - g_{kd}) \, p(y_d \mid \theta_{kd})

    Use it for columns of counts with more zeros than the component explains. The gates have shape (K, D). The columns
    are independent given the state. The M-step of the gate is the expected fraction of additional zeros,
    :math:`\hat g = (n_0 + \kappa) / (n + 2 \kappa)`, where :math:`\kappa` is the pseudocount of a Beta prior, and
    that of the component is its own. A gate of 0 or 1 stays as it is.

    Args:
        component: Emission of counts: `Poisson`, `NegativeBinomial` or another one with independent columns. Options of
            the component, such as tied parameters, are given to the component.
        pseudocount: Pseudocount of the Beta prior on the gates, in counts of the whole data set.
        tied: ``["gate"]`` for gates that do not depend on the state.
        frozen: ``["gate"]`` for gates that training leaves unchanged. They are 0.5 if they have not been set.

    Example:
        >>> from lightning_hmm import HMM, Poisson, ZeroInflated
        >>> model = HMM(num_states=2, emission=ZeroInflated(Poisson()), num_features=1)
        >>> model = model.set_parameters(emission={"gate": [[0.5], [0.0]], "rate": [[4.0], [1.0]]})
        >>> model.emission.component.rate.flatten()
        tensor([4., 1.], dtype=torch.float64)
        >>> model.emission.moments().mean.flatten()
        tensor([2., 1.], dtype=torch.float64)
    """

    support = ("counts, whole numbers from 0", "Use another emission, or mark the value as missing.")
    m_step = "closed form for the gate; that of the component"
    names = ("gate",)

    def __init__(
        self, component: Emission, pseudocount: float = 0.0, tied: Sequence[str] = (), frozen: Sequence[str] = ()
    ) -> None:
        super().__init__(component, pseudocount, tied, frozen)
        if not self.part.reads_counts:
            raise ValueError(
                f"`component` must be an emission of counts, such as Poisson, but is {type(self.part).__name__}."
            )

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        self.part.allocate(restarts, num_states, columns)
        self._begin_allocation()
        self.num_states, self.num_features = num_states, len(columns)
        self.width = max(2 * num_states, self.part.width)
        self.latent.allocate(restarts, num_states, len(columns), 2)  # the gate, and its complement

    @property
    def gate(self) -> Tensor:
        """(K, D) probabilities of an additional zero, of the best restart."""
        return self.latent.probs[..., 0]

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Rows:
        log_gates, *rest = natural
        observed, values = batch.observed, batch.values
        rows = log_gates.new_zeros(batch.num_steps, self.num_states)
        for d in range(self.num_features):
            # With all other columns missing, the component returns the log-likelihoods of column d.
            alone = torch.arange(self.num_features, device=values.device) == d
            data = batch if self.num_features == 1 else batch.with_values(torch.where(alone, values, torch.nan))
            log_gate, log_rest = log_gates[:, d].unbind(-1)
            found = log_rest + self.part.evidence(rest, data).rows()
            at_zero = log_sum_exp(torch.stack([log_gate.expand_as(found), found], -1))
            found = torch.where(values[:, d, None] == 0, at_zero, found)
            rows = rows + torch.where(observed[:, d, None], found, 0.0)
        return Rows(rows)

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        if not bool(self.part.is_set):
            self.part.start(sequences, responsibilities)
        super().start(sequences, responsibilities)

    @torch.no_grad()
    def _set_latent(self, value: Any) -> None:
        gate, shape = as_numbers("gate", value, self.latent.log_probs.device), self.latent.log_probs.shape[:-1]
        if gate.shape not in (shape, shape[1:]):
            raise ValueError(f"`gate` must have shape {tuple(shape[1:])}, but has {tuple(gate.shape)} instead.")
        refuse_where(~((gate >= 0) & (gate <= 1)).expand(shape), "gate", "be between 0 and 1", gate.expand(shape))
        self.latent.set(torch.stack([gate, 1 - gate], -1))

    def moments(self) -> Moments:
        """Returns the (K, D) means and variances of the best restart."""
        (mean, variance), rest = self.part.moments(), 1 - self.gate
        return Moments(rest * mean, rest * (variance + self.gate * mean**2))

    def predict(self, state_probs: Tensor) -> Moments:
        return mixture_moments(state_probs, *self.moments())

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        drawn: Tensor = self.part.sample(states, generator)
        uniforms = torch.rand(drawn.shape, generator=generator, dtype=torch.float64).to(drawn.device)
        return torch.where(uniforms < self.gate[states], 0.0, drawn)
