"""M-steps by gradient-based optimization, for parts whose natural parameters are a function of other parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.distributions.base import Distribution


class ByGradient(Distribution):
    r"""A part whose natural parameters :math:`\eta = f(\theta)` are a differentiable function of its parameters.

    The expected statistics n are the gradient of the log-likelihood with respect to :math:`\eta`. Each M-step runs
    L-BFGS on the expected log-likelihood :math:`Q(\theta) = n \cdot f(\theta)` plus the log prior. If this would
    decrease the objective, the parameters are left unchanged.
    """

    m_step = "L-BFGS"
    m_steps: int  # number of L-BFGS iterations in each M-step

    @abstractmethod
    def natural_of(self, *parameters: Tensor) -> Tensor:
        """Computes the natural parameters of one restart, or of all, from the parameters."""

    def prior_term(self, natural: Tensor) -> Tensor | float:
        """Returns the log prior density of one restart, up to a constant."""
        return 0.0

    def function_arguments(self, restart: int | slice) -> tuple[Tensor, ...]:
        """Returns the arguments of `natural_of` for one restart or for a slice of the restarts."""
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
                    objective = (counts * natural).sum() + weight * self.prior_term(natural)
                    value = -objective / counts.abs().sum().clamp(min=1)
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
    """Runs L-BFGS on a loss. If the loss would increase, the variables keep their values.

    Args:
        loss: Computes the loss and sets the gradients of the variables.
        variables: Tensors that are updated in place.
        steps: Number of iterations.
    """
    before, values = loss(), [variable.detach().clone() for variable in variables]
    torch.optim.LBFGS(variables, max_iter=steps, line_search_fn="strong_wolfe").step(loss)
    after = loss()
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.copy_(torch.where(after <= before, variable, value))
            variable.grad = None
