"""M-steps by gradients, for parts whose natural parameters are a function of other parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.distributions.base import Distribution


class ByGradient(Distribution):
    r"""A part whose natural parameters :math:`\eta = f(\theta)` are a differentiable function of its parameters.

    The expected statistics are the gradient in :math:`\eta`. The M-step increases the expected log-likelihood
    :math:`Q(\theta) = n \cdot f(\theta)` plus the log prior by L-BFGS, which never decreases it.
    """

    m_steps: int  # iterations of L-BFGS in each M-step

    @abstractmethod
    def natural_of(self, *parameters: Tensor) -> Tensor:
        """The natural parameters, of one restart or of all, as a function of the parameters."""

    def prior_term(self, natural: Tensor) -> Tensor | float:
        """The log prior density of one restart, up to a constant."""
        return 0.0

    def function_arguments(self, restart: int | slice) -> tuple[Tensor, ...]:
        """The arguments of `natural_of` for one restart or a slice of all."""
        return tuple(parameter[restart] for parameter in self.parameters())

    def natural(self, restart: int | slice) -> tuple[Tensor, ...]:
        return (self.natural_of(*self.function_arguments(restart)),)

    @property
    def num_statistics(self) -> int:
        return 1

    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        for restart, counts in enumerate(statistics[0]):
            variables = [parameter[restart].detach().clone().requires_grad_() for parameter in self.parameters()]

            def loss(counts: Tensor = counts, variables: list[Tensor] = variables) -> Tensor:
                with torch.enable_grad():
                    natural = self.natural_of(*variables)
                    value = -((counts * natural).sum() + weight * self.prior_term(natural)) / counts.abs().sum().clamp(
                        min=1
                    )
                for variable, gradient in zip(variables, torch.autograd.grad(value, variables), strict=True):
                    variable.grad = gradient
                return value.detach()

            decrease(loss, variables, self.m_steps)
            with torch.no_grad():
                for parameter, variable in zip(self.parameters(), variables, strict=True):
                    parameter[restart] = variable
        return torch.zeros((), dtype=torch.int64)

    def log_prior(self) -> Tensor:
        with torch.no_grad():
            terms = [self.prior_term(self.natural(restart)[0]) for restart in range(len(next(self.parameters())))]
        return torch.tensor([float(term) for term in terms], dtype=torch.float64)

    def num_free_parameters(self, restart: int) -> int:
        return sum(parameter[restart].numel() for parameter in self.parameters())


def decrease(loss: Callable[[], Tensor], variables: Sequence[Any], steps: int) -> None:
    """Runs iterations of L-BFGS on a loss that sets the gradients of the variables. They keep their values where it would increase."""
    before, values = loss(), [variable.detach().clone() for variable in variables]
    torch.optim.LBFGS(variables, max_iter=steps, line_search_fn="strong_wolfe").step(loss)
    after = loss()
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.copy_(torch.where(after <= before, variable, value))
            variable.grad = None
