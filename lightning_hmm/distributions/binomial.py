"""Binomial and Bernoulli emissions, for numbers of successes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import PROBABILITY, NamedParameter, below_one


class Binomial(ExponentialFamily):
    r"""Numbers of successes in n trials with a binomial distribution. The probabilities have shape (K, D).

    Use it for columns that count successes in a known number of trials.

    .. math:: \log p(y) = y \log p + (n - y) \log (1 - p) + \log \binom{n}{y}, \qquad
              \hat p = \frac{\sum y / n + s m}{N + s}

    The Beta prior has the effect of s additional steps in each state, at which the mean m of y / n in the data is
    observed, so that no probability becomes 0 or 1.

    Args:
        total_count: Number of trials n, one for all columns or one for each.
        prior_steps: Strength s of the prior, in steps.
        tied: ``["probs"]`` for probabilities that do not depend on the state.
        frozen: ``["probs"]`` for probabilities that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Binomial
        >>> model = HMM(num_states=2, emission=Binomial(total_count=10), num_features=1)
        >>> model = model.set_parameters(emission={"probs": [[0.1], [0.5]]})
        >>> model.emission.moments()[0]
        tensor([[1.0000],
                [5.0000]], dtype=torch.float64)
    """

    products = ((0, None),)
    support = ("whole numbers from 0 to its total count", "Increase `total_count`, or mark the value as missing.")
    typical = (0.5,)  # of the fraction of successes
    reads_counts = True
    probs = NamedParameter(PROBABILITY, "(K, D) probabilities of success of the best restart.")
    trials: Tensor

    def __init__(
        self,
        total_count: int | Sequence[int],
        prior_steps: float = 1e-3,
        tied: Sequence[str] = (),
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__(prior_steps, tied, frozen)
        self.total_count = total_count if isinstance(total_count, int) else list(total_count)
        for count in self.total_count if isinstance(self.total_count, list) else [self.total_count]:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"`total_count` must be a whole number from 1, but is {count!r} instead.")

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        if isinstance(self.total_count, list) and len(self.total_count) != len(columns):
            raise ValueError(
                f"`total_count` must have one number for each of the {len(columns)} columns, "
                f"but has {len(self.total_count)}."
            )
        super().allocate(restarts, num_states, columns)
        trials = torch.tensor(self.total_count, dtype=torch.float64).expand(self.num_features).clone()
        self.register_buffer("trials", trials, persistent=False)

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values / self.trials]

    def log_base(self, values: Tensor) -> Tensor:
        failures = self.trials - values
        return torch.lgamma(self.trials + 1) - torch.lgamma(values + 1) - torch.lgamma(failures + 1)

    def supports(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values <= self.trials) & (values == values.floor())

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        return (below_one(sums[:, :, 0] / visits),)

    def weights_of(self, *parameters: Tensor) -> Tensor:
        (probs,) = parameters
        return torch.stack([self.trials * torch.logit(probs), self.trials * torch.log1p(-probs)], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (torch.sigmoid(weights[..., 0, :] / self.trials),)

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = self.trials * self.probs
        return mean, mean * (1 - self.probs)

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.binomial(self.trials.cpu().numpy().astype(np.int64), *parameters)


class Bernoulli(Binomial):
    r"""Columns of zeros and ones. The probabilities of a one have shape (K, D).

    Use it for events that occur or do not occur at a step.

    .. math:: \log p(y) = y \log p + (1 - y) \log (1 - p), \qquad \hat p = \frac{\sum y + s m}{n + s}

    The Beta prior has the effect of s additional steps in each state, at which the mean m of the data is observed, so
    that no probability becomes 0 or 1.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: ``["probs"]`` for probabilities that do not depend on the state.
        frozen: ``["probs"]`` for probabilities that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Bernoulli, fit
        >>> model = fit(HMM(num_states=1, emission=Bernoulli()), [[0, 1, 1, 1]], max_epochs=2)
        >>> round(float(model.emission.probs), 3)
        0.75
    """

    support = ("zeros and ones", "Use a Binomial emission for larger counts, or mark the value as missing.")

    def __init__(self, prior_steps: float = 1e-3, tied: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
        super().__init__(1, prior_steps, tied, frozen)
