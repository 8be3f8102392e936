"""Agreement of decoded states with known ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class MatchedStateAccuracy(Metric):
    """Share of steps whose decoded state is the true one, under the best one-to-one matching of state numbers.

    A model's states come in any order, so the matching that agrees most often is taken (Kuhn 1955, by scipy).

    Args:
        num_states: of the model.
        num_true_states: of the truth; as many as the model has if not given.
    """

    full_state_update = False
    higher_is_better = True
    confusion: Tensor

    def __init__(self, num_states: int, num_true_states: int | None = None) -> None:
        super().__init__()
        self.add_state(
            "confusion",
            torch.zeros(num_states, num_true_states or num_states, dtype=torch.float64),
            dist_reduce_fx="sum",
        )

    def update(self, decoded: Tensor, truth: Tensor, weights: Tensor | None = None) -> None:
        """Adds the states of some steps, each with its weight if `weights` are given; steps where either state is below zero are unknown and do not count."""
        known = ((decoded >= 0) & (truth >= 0)).double()
        rows, columns = self.confusion.shape
        cells = (decoded.clamp(min=0) * columns + truth.clamp(min=0)).long()
        counts = torch.zeros(rows * columns, dtype=torch.float64, device=cells.device)
        self.confusion += counts.index_add_(0, cells, known if weights is None else known * weights).view(rows, columns)

    def compute(self) -> Tensor:
        from scipy.optimize import linear_sum_assignment

        matched = linear_sum_assignment(self.confusion.cpu().numpy(), maximize=True)
        return self.confusion[matched].sum() / self.confusion.sum()
