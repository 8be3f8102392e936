"""Negative-binomial emissions, for overdispersed counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.augmented import AugmentedFamily
from lightning_hmm.distributions.parameters import POSITIVE, PROBABILITY, NamedParameter
from lightning_hmm.sequences import Sequences

_NUM_ANCHORS = 32


class NegativeBinomial(AugmentedFamily):
    r"""Counts with a negative-binomial distribution. The parameters have shape (K, D).

    Use it instead of `Poisson` for counts whose variance exceeds their mean. As in
    `torch.distributions.NegativeBinomial`, `total_count` is a positive real number r, and `probs` is the probability p:

    .. math::
        p(y) = \frac{\Gamma(y + r)}{y! \, \Gamma(r)} \, (1 - p)^r \, p^y, \qquad
        E[y] = \frac{r p}{1 - p}, \qquad \operatorname{Var}[y] = \frac{r p}{(1 - p)^2}

    The M-step is that of a lower bound. Since :math:`\Gamma(y + r) / \Gamma(r) = \prod_{j < y} (r + j)`, and
    :math:`\log(r + j)` is a convex function of :math:`\log(r + h)` for :math:`h \le j`, 32 fixed anchors h, from 0 to
    the largest count of the data, give

    .. math::
        \log \frac{\Gamma(y + r)}{\Gamma(r)} \ge \text{const} + \sum_h T_h(y) \log(r + h), \qquad
        T_h(y) = \sum_j \frac{r_0 + h}{r_0 + j}

    where the last sum is over :math:`j < y` from this anchor up to the next one, and :math:`r_0` is the current value.
    The expectations of :math:`T_h` and y are of fixed size, and the bound plus
    :math:`\log p \sum y + n \, r \log(1 - p)` is maximized by a safeguarded Newton method. The bound is exact for
    counts up to 32.

    The prior has the effect of s additional steps in each state with the mean m of the data and
    :math:`T_0 = \log(1 + m)`, whose maximum is at r = 1. It keeps the parameters inside their ranges. Counts that are
    not overdispersed make r grow, towards the Poisson distribution.

    Args:
        prior_steps: Strength s of the prior, in steps.
        tied: Names of the parameters that all states share, such as ``["total_count"]``; see `ExponentialFamily`.
        frozen: Names of the parameters that training leaves unchanged.

    Example:
        >>> from lightning_hmm import HMM, NegativeBinomial
        >>> model = HMM(num_states=2, emission=NegativeBinomial(), num_features=1)
        >>> parameters = {"total_count": [[2.0], [2.0]], "probs": [[0.5], [0.8]]}
        >>> model = model.set_parameters(emission=parameters)
        >>> model.emission.mean
        tensor([[2.0000],
                [8.0000]], dtype=torch.float64)
    """

    typical = (math.log(2.0), *[0.0] * (_NUM_ANCHORS - 1), 1.0)
    anchors: Tensor  # (A, D), increasing from 0
    support = ("counts, whole numbers from 0", "Use another emission, or mark the value as missing.")
    m_step = "Newton's method on a lower bound"
    reads_counts = True
    total_count = NamedParameter(POSITIVE, "(K, D) numbers of failures r of the best restart.")
    probs = NamedParameter(PROBABILITY, "(K, D) probabilities p of the best restart.")

    @property
    def mean(self) -> Tensor:
        """(K, D) means of the best restart."""
        return self.moments()[0]

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        super().allocate(restarts, num_states, columns)
        anchors = torch.arange(_NUM_ANCHORS, dtype=torch.float64)
        self.register_buffer("anchors", anchors[:, None].repeat(1, self.num_features))

    def weights_of(self, *parameters: Tensor) -> Tensor:
        total_count, probs = (value.unsqueeze(-2) for value in parameters)
        return torch.cat([(total_count + self.anchors).log(), probs.log(), total_count * torch.log1p(-probs)], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return weights[..., 0, :].exp(), weights[..., -2, :].exp()

    def log_density(self, weights: Tensor, values: Tensor) -> Tensor:
        # The functions are computed once for each value that occurs.
        counts, which = values.unique(return_inverse=True)
        table = self._table(weights.movedim(1, 0), counts[:, None, None])
        return torch.stack([table[:, :, d].index_select(0, which[:, d]) for d in range(values.shape[1])], -1)

    def _table(self, weights: Tensor, counts: Tensor) -> Tensor:
        """Returns the (V, K, D) log-densities of counts (V, 1, 1), for weights (A + 2, K, D)."""
        *_, log_probs, constant = weights
        fixed = weights[0].detach().exp()  # (K, D) the values of r
        found = torch.lgamma(counts + fixed) - torch.lgamma(fixed) - torch.lgamma(counts + 1)
        found = found + counts * log_probs + constant
        # These terms are zero. Their gradients are the statistics of the anchors.
        changes, below = weights - weights.detach(), torch.digamma(fixed).expand_as(found)
        for i, anchor in enumerate(self.anchors):
            last = counts if i + 1 == len(self.anchors) else torch.minimum(counts, self.anchors[i + 1])
            above = torch.digamma(torch.maximum(last, anchor) + fixed)
            above = torch.where(counts > anchor, above, below)
            found = found + (fixed + anchor) * (above - below) * changes[i]
            below = above
        return found

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Sets the anchors and the mean of the prior. The distribution does not change."""
        seen = sequences.observed & (sequences.step_weights() > 0)[:, None]
        largest = torch.where(seen, sequences.values.double(), 0.0).amax(0)
        places = torch.arange(_NUM_ANCHORS, dtype=torch.float64, device=largest.device)[:, None]
        anchors = torch.maximum(places, (places**2 * (largest + 1) / _NUM_ANCHORS**2).ceil())
        if not torch.equal(anchors, self.anchors):
            parameters = self.parameters_of(self.weights.detach())
            self.anchors.copy_(anchors)
            self.weights.copy_(self.weights_of(*parameters))
        super().set_data_stats(sequences)

    def supports(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values == values.floor())

    def reference_parameters(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        mean = torch.where(mean > 0, mean, 0.5)  # all counts are zero
        return torch.ones_like(mean), mean / (1 + mean)

    def reference_statistics(self, parameters: Sequence[Tensor]) -> Tensor:
        total_count, probs = parameters
        clusters = -total_count * torch.log1p(-probs)
        mean = total_count * probs / (1 - probs)
        return torch.cat([clusters[None], torch.zeros_like(self.anchors[1:]), mean[None]])

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        total_count = self.parameters_of(self.weights)[0]
        total = sums[:, :, -1]
        return total_count, total / (total + visits * total_count)

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = self.total_count * self.probs / (1 - self.probs)
        return mean, mean / (1 - self.probs)

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        total_count, probs = parameters
        return random.negative_binomial(total_count, 1 - probs)
