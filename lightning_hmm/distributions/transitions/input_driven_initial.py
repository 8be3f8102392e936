"""First states whose probabilities depend on inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.distributions.iterative import MOST_HELD
from lightning_hmm.distributions.rows import Initial
from lightning_hmm.distributions.transitions.logistic_rows import LogisticRows
from lightning_hmm.sequences import Sequences


class InputDrivenInitial(LogisticRows, Initial):
    r"""The distribution of the first state, given the inputs of the first step.

    .. math:: P(z_1 = k \mid x_1) = \frac{e^{b_k + \beta_k \cdot x_1}}{\sum_l e^{b_l + \beta_l \cdot x_1}}

    The coefficients :math:`\beta` have shape (K, P) and the intercepts b have shape (K,). The prior and the M-step are
    those of `InputDriven`.

    Args:
        inputs: Number of inputs P of each step, or the list of the numbers of the inputs to use.
        coefficient_prior: Strength s of the ridge prior. It must be positive.
        most_held: Maximum number of posterior probabilities that are stored; see `Iterative`.
        learning_rate: Step size of a gradient step in online EM; see `Iterative`.

    Example:
        >>> from lightning_hmm import HMM, InputDrivenInitial
        >>> model = HMM(num_states=2, initial=InputDrivenInitial(inputs=1), num_symbols=3)
        >>> model = model.set_parameters(initial={"coefficients": [[-1.0], [1.0]], "intercept": [0.0, 0.0]})
        >>> model.initial.probs_at([[0.0], [2.0]])
        tensor([[0.5000, 0.5000],
                [0.0180, 0.9820]], dtype=torch.float64)
    """

    option = "initial"

    def __init__(
        self,
        inputs: int | list[int],
        coefficient_prior: float = 1e-3,
        most_held: int = MOST_HELD,
        learning_rate: float = 0.1,
    ) -> None:
        super().__init__(most_held=most_held, learning_rate=learning_rate)
        self._prepare(inputs, coefficient_prior)

    def allocate(self, restarts: int, num_states: int) -> None:
        self._allocate_rows(restarts, 1, num_states)

    @property
    def coefficients(self) -> Tensor:
        """(K, P) coefficients of the best restart."""
        return self.slopes[self.restart, 0].detach()

    @property
    def intercept(self) -> Tensor:
        """(K,) intercepts of the best restart. They are 0 at structural zeros."""
        return self.intercepts[self.restart, 0].detach()

    @property
    def probs(self) -> Tensor:
        raise AttributeError("The probabilities of the first state depend on inputs. Call `probs_at(inputs)`.")

    def probs_at(self, inputs: Any) -> Tensor:
        """Returns the (N, K) probabilities of the best restart at inputs (N, P) of first steps."""
        rows = torch.as_tensor(inputs, dtype=torch.float64, device=self.slopes.device)
        return self.log_rows([self.coefficients[None], self.intercept[None]], rows).exp()[:, 0]

    def set(self, probs: Any) -> None:
        """Sets the parameters, to the same values in all restarts.

        Args:
            probs: A dictionary with "coefficients" (K, P) or "intercept" (K,), or probabilities (K,), which set the
                coefficients to zero.
        """
        self._set(probs)

    def randomize(self, generator: torch.Generator) -> None:
        LogisticRows.randomize(self, generator)

    # Inference has one distribution of the first state. It is uniform, and the evidence of the first step of each
    # sequence contains the ratio of the probabilities to it.

    def log_first(self, natural: Sequence[Tensor]) -> Tensor:
        num_states = natural[0].shape[1]
        return natural[0].new_full((num_states,), -math.log(num_states))

    def first_evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Tensor:
        inputs = self.inputs.of(batch)[batch.first_steps]
        return self.log_rows(natural, inputs)[:, 0] + math.log(natural[0].shape[1])

    def example(self, batch: Sequences, posteriors: Tensor) -> tuple[Any, ...]:
        return self.inputs.of(batch)[batch.first_steps], posteriors.unsqueeze(1)
