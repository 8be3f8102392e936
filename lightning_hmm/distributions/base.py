"""What `BaumWelch` asks of a distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn


class Distribution(nn.Module, ABC):
    """Natural parameters and their maximiser.

    The gradient of the log-likelihood in the natural parameters is the expected sufficient statistics; `maximise` turns
    these into the parameters that maximise expected log-likelihood plus log prior. That is all a new family needs for EM.
    Parameters may have leading axes (one entry for each of several restarts); every method works along the last ones.
    """

    has_natural_parameters: ClassVar[bool] = True  # whether the gradient of the log-likelihood is the expected statistics

    @abstractmethod
    def maximise(self, statistics: list[Tensor], share: Tensor | float = 1.0, **prior: float) -> Tensor:
        """Sets the parameters, in place. Reads no tensor's value.

        Args:
            statistics: the gradient of the log-likelihood, one tensor for each parameter, in their order.
            share: how much of the prior counts; below 1 where the statistics are those of a part of the data.
            prior: the options of the prior, as `log_prior` takes them.

        Returns:
            How many rows had no statistics to go by and kept their old values, as a tensor.
        """

    @abstractmethod
    def log_prior(self, **prior: float) -> Tensor:
        """(leading axes) the logarithm of the prior density, up to a constant."""

    @abstractmethod
    def num_free_parameters(self, restart: int) -> int:
        """The number of degrees of freedom of one restart's parameters, without those that are structurally zero."""
