"""Transitions whose probabilities depend on inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.distributions.base import Transition
from lightning_hmm.distributions.iterative import MOST_HELD
from lightning_hmm.distributions.transitions.logistic_rows import LogisticRows
from lightning_hmm.inference.operators import TimeVarying
from lightning_hmm.sequences import Sequences


class InputDriven(LogisticRows, Transition):
    r"""Transition probabilities that depend on inputs.

    Use it if events or conditions that are observed change how states follow each other. The transition from state i
    *into* step t depends on the inputs :math:`x_t` of step t:

    .. math::
        P(z_t = j \mid z_{t-1} = i, x_t) =
        \frac{e^{b_{ij} + \beta_{ij} \cdot x_t}}{\sum_l e^{b_{il} + \beta_{il} \cdot x_t}}

    The coefficients :math:`\beta` have shape (K, K, P), the intercepts b have shape (K, K). The inputs of the first
    step of a sequence are not used. To make transitions depend on the previous step, shift the inputs by one step. All
    next states are treated alike, and the prior :math:`-\frac{s}{2} \sum (\lVert \beta_{ij} \rVert^2 + b_{ij}^2)`
    identifies the coefficients, whose sum over j is zero at the optimum. Standardize the inputs.

    The M-step stores the expected transitions of an epoch and runs Newton's method until it has converged; see
    `Iterative` for online EM and for large data. Steps with the same inputs share one matrix, so inputs with few
    distinct values are fast.

    Args:
        inputs: Number of inputs P of each step, or the list of the numbers of the inputs to use.
        coefficient_prior: Strength s of the ridge prior. It must be positive.
        most_held: Maximum number of expected transitions that are stored; see `Iterative`.
        learning_rate: Step size of a gradient step in online EM; see `Iterative`.

    Example:
        >>> import torch
        >>> from lightning_hmm import HMM, InputDriven
        >>> model = HMM(num_states=2, transition=InputDriven(inputs=1), num_symbols=3)
        >>> coefficients = [[[-1.0], [1.0]], [[0.0], [0.0]]]
        >>> intercept = [[0.0, 0.0], [-1.0, 1.0]]
        >>> model = model.set_parameters(transition={"coefficients": coefficients, "intercept": intercept})
        >>> model.transition.probs_at(torch.tensor([[0.0], [2.0]]))
        tensor([[[0.5000, 0.5000],
                 [0.1192, 0.8808]],
        <BLANKLINE>
                [[0.0180, 0.9820],
                 [0.1192, 0.8808]]], dtype=torch.float64)
    """

    option = "transition"
    no_matrix = "depend on inputs: see `model.transition.probs_at(inputs)`"

    def __init__(
        self,
        inputs: int | list[int],
        coefficient_prior: float = 1e-3,
        most_held: int = MOST_HELD,
        learning_rate: float = 0.1,
    ) -> None:
        super().__init__(most_held=most_held, learning_rate=learning_rate)
        self._prepare(inputs, coefficient_prior)
        self._distinct: tuple[Any, Tensor, Tensor] | None = None

    def allocate(self, restarts: int, num_states: int) -> None:
        self._allocate_rows(restarts, num_states, num_states)
        self.numbers_per_step = num_states**2

    @property
    def coefficients(self) -> Tensor:
        """(K, K, P) coefficients of the best restart."""
        return self.slopes[self.restart].detach()

    @property
    def intercept(self) -> Tensor:
        """(K, K) intercepts of the best restart. They are 0 at structural zeros."""
        return self.intercepts[self.restart].detach()

    def set(self, probs: Any = None, *, coefficients: Any = None, intercept: Any = None) -> None:
        """Sets parameters, to the same values in all restarts.

        Args:
            probs: A matrix of probabilities (K, K) for all inputs. It sets the coefficients to zero, and its zeros
            become
                structural zeros.
            coefficients: (K, K, P) coefficients.
            intercept: (K, K) intercepts.
        """
        given = {"coefficients": coefficients, "intercept": intercept}
        self._set({name: value for name, value in given.items() if value is not None} if probs is None else probs)

    def probs_at(self, inputs: Tensor) -> Tensor:
        """Returns the (N, K, K) transition probabilities of the best restart at inputs (N, P)."""
        rows = torch.as_tensor(inputs, dtype=torch.float64, device=self.slopes.device)
        return self.log_rows([self.coefficients, self.intercept], rows).exp()

    def matrix(self, restart: int) -> Tensor | None:
        return None

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> TimeVarying:
        inputs, index = self._distinct_inputs(batch)
        return TimeVarying(self.log_rows(natural, inputs), index)

    def _distinct_inputs(self, batch: Sequences | None) -> tuple[Tensor, Tensor]:
        """Returns the (M, P) distinct inputs of a batch and the (steps,) number of those of each step."""
        inputs = self.inputs.of(batch)
        assert batch is not None
        if self._distinct is None or self._distinct[0] is not batch.inputs:  # shared by the restarts and by `example`
            distinct, index = torch.unique(inputs, dim=0, return_inverse=True)
            if not len(distinct):
                distinct = inputs.new_zeros(1, inputs.shape[1])
            self._distinct = batch.inputs, distinct, index
        return self._distinct[1:]

    def example(self, batch: Sequences, posteriors: Tensor) -> tuple[Any, ...]:
        return self._distinct_inputs(batch)[0], posteriors

    def forget(self) -> None:
        super().forget()
        self._distinct = None
