"""Accuracy of decoded states."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class MatchedStateAccuracy(Metric):
    """Fraction of steps whose decoded state is the true state, under the best one-to-one matching of states.

    The order of a model's states is arbitrary. The matching that maximizes the accuracy is therefore computed first,
    with the Hungarian algorithm (Kuhn 1955, `scipy.optimize.linear_sum_assignment`).

    Args:
        num_states: Number of states of the model.
        num_true_states: Number of true states. The default is `num_states`.

    Example:
        >>> import torch
        >>> from lightning_hmm.metrics import MatchedStateAccuracy
        >>> metric = MatchedStateAccuracy(num_states=2)
        >>> metric.update(decoded=torch.tensor([0, 0, 1, 1]), truth=torch.tensor([1, 1, 0, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
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
        """Adds the states of some steps.

        Args:
            decoded: (steps,) decoded states. A negative number marks an unknown state, whose step is ignored.
            truth: (steps,) true states, with negative numbers for unknown ones.
            weights: (steps,) weights of the steps. The default is 1 for each.
        """
        known = ((decoded >= 0) & (truth >= 0)).double()
        rows, columns = self.confusion.shape
        cells = (decoded.clamp(min=0) * columns + truth.clamp(min=0)).long()
        counts = torch.zeros(rows * columns, dtype=torch.float64, device=cells.device)
        self.confusion += counts.index_add_(0, cells, known if weights is None else known * weights).view(rows, columns)

    def compute(self) -> Tensor:
        """Returns the accuracy under the best matching."""
        from scipy.optimize import linear_sum_assignment

        matched = linear_sum_assignment(self.confusion.cpu().numpy(), maximize=True)
        return self.confusion[matched].sum() / self.confusion.sum()


class LabelAccuracy(MatchedStateAccuracy):
    """Fraction of labeled steps whose decoded state is the label, for models whose states are numbered as the labels.

    Args:
        num_states: Number of states of the model.
        num_true_states: Number of labels. The default is `num_states`.

    Example:
        >>> import torch
        >>> from lightning_hmm.metrics import LabelAccuracy
        >>> metric = LabelAccuracy(num_states=2)
        >>> metric.update(decoded=torch.tensor([0, 0, 1, 1]), truth=torch.tensor([1, 1, -1, 1]))
        >>> metric.compute()
        tensor(0.3333, dtype=torch.float64)
    """

    def compute(self) -> Tensor:
        """Returns the accuracy."""
        return self.confusion.diagonal().sum() / self.confusion.sum()
