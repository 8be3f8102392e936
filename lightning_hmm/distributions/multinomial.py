"""Multinomial emissions, for vectors of counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.distributions.checks import refuse_value
from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, NamedParameter
from lightning_hmm.sequences import Sequences


class Multinomial(ExponentialFamily):
    r"""Vectors of D counts with a multinomial distribution given their sum. The probabilities have shape (K, D).

    Use it for counts of categories, such as the words of a document. The sum n of the counts may vary from step to
    step. Its distribution is not part of the model: the likelihood is that of the counts given their sums.

    .. math:: \log p(y) = \sum_d y_d \log p_d + \log \frac{n!}{\prod_d y_d!}, \qquad
              \hat p_d = \frac{\sum y_d + s m_d}{\sum_e (\sum y_e + s m_e)}

    The Dirichlet prior has the effect of s additional steps in each state, at which the mean counts m of the data are
    observed, so that no probability becomes zero. At a step, either all counts are observed or all are missing.

    Args:
        total_count: The sum n of steps that are sampled or predicted. By default the average sum in the training data,
            rounded to a whole number for samples.
        prior_steps: Strength s of the prior, in steps.
        tied: ``["probs"]`` for probabilities that do not depend on the state.
        frozen: ``["probs"]`` for probabilities that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, Multinomial
        >>> model = HMM(num_states=2, emission=Multinomial(), num_features=3)
        >>> model = model.set_parameters(emission={"probs": [[0.1, 0.1, 0.8], [0.4, 0.4, 0.2]]})
        >>> model.decode([[[1.0, 0.0, 9.0], [3.0, 2.0, 0.0]]])[0]
        tensor([0, 1])
    """

    products = ((0, None),)
    support = ("counts, whole numbers from 0", "Use another emission, or mark the whole step as missing.")
    typical = (1.0,)
    probs = NamedParameter(POSITIVE, "(K, D) probabilities of the columns, of the best restart.")

    def __init__(
        self,
        total_count: int | None = None,
        prior_steps: float = 1e-3,
        tied: Sequence[str] = (),
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__(prior_steps, tied, frozen)
        if total_count is not None and (not isinstance(total_count, int) or total_count < 1):
            raise ValueError(f"`total_count` must be a whole number from 1, but is {total_count!r} instead.")
        self.total_count = total_count

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values]

    def log_base(self, values: Tensor) -> Tensor:
        orders = torch.lgamma(values.sum(1, keepdim=True) + 1) / self.num_features
        return orders - torch.lgamma(values + 1)

    def supports(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values == values.floor())

    def check(self, sequences: Sequences) -> None:
        super().check(sequences)
        values = sequences.values
        partial = values.isnan() & ~values.isnan().all(1, keepdim=True)
        if values.is_cpu and bool(partial.any()):
            refuse_value(self, sequences, partial, "all counts of a step or none", "Mark the whole step as missing.")

    def check_parameter(self, name: str, value: Tensor) -> None:
        super().check_parameter(name, value)
        wrong = torch.nonzero((value.sum(-1) - 1).abs() > 1e-6)
        if len(wrong):
            restart, state = wrong[0].tolist()
            total = float(value[restart, state].sum())
            raise ValueError(f"`probs` rows must sum to 1, but row {state} sums to {total:.6g} instead. Normalize it.")

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        return (sums[:, :, 0] / sums[:, :, 0].sum(-1, keepdim=True),)

    def weights_of(self, *parameters: Tensor) -> Tensor:
        (probs,) = parameters
        logs = (probs / probs.sum(-1, keepdim=True)).log()
        return torch.stack([logs, torch.zeros_like(logs)], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (weights[..., 0, :].exp(),)

    @property
    def total(self) -> Tensor:
        """The sum of the counts of steps that are sampled or predicted."""
        if self.total_count is None and not bool(self.has_data_stats):
            raise ValueError("`total_count` must be given to sample or predict counts before the model is trained.")
        return self.data_statistics.sum() if self.total_count is None else self.probs.new_tensor(self.total_count)

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = self.total * self.probs
        return mean, mean * (1 - self.probs)

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        (probs,) = parameters
        return random.multinomial(max(1, round(float(self.total))), probs / probs.sum(-1, keepdims=True))

    def num_free_parameters(self, restart: int) -> int:
        return super().num_free_parameters(restart) // self.num_features * (self.num_features - 1)
