"""Errors of one-step predictions."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hmm.sequences import Sequences


class PredictionError(Metric):
    """Mean Euclidean distance between each observed vector and its prediction from the preceding observations.

    Jarboui and Perchet (2021) report this metric. The first step of each sequence and steps with a missing entry are
    ignored. On data in which every step has length 1 (`datamodules.moving`), predicting the previous position scores 1.

    Example:
        >>> import torch
        >>> from lightning_hmm import Sequences
        >>> from lightning_hmm.metrics import PredictionError
        >>> metric = PredictionError()
        >>> positions = Sequences.from_list([[[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]]])
        >>> metric.update(torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]]), positions)
        >>> metric.compute()
        tensor(3., dtype=torch.float64)
    """

    full_state_update = False
    higher_is_better = False
    distance: Tensor
    num_steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("distance", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_steps", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, sequences: Sequences) -> None:
        """Adds the errors of a batch, each with the weight of its sequence.

        Args:
            predictions: (steps, features) predictions E[y_t | y_1:t-1] for all steps of the batch.
            sequences: The observed sequences.
        """
        if predictions.shape != sequences.values.shape:
            raise ValueError(
                f"`predictions` must have shape {tuple(sequences.values.shape)}, steps by features, "
                f"but has {tuple(predictions.shape)} instead."
            )
        counted = sequences.observed.all(1).double()
        counted[sequences.offsets[:-1][sequences.lengths > 0].to(counted.device)] = 0
        if sequences.weights is not None:
            counted = counted * sequences.repeat_interleave(sequences.weights)
        distances = (predictions.double() - sequences.values).norm(dim=1)
        self.distance += torch.where(counted > 0, distances * counted, 0.0).sum()
        self.num_steps += counted.sum()

    def compute(self) -> Tensor:
        """Returns the mean distance, which is NaN if every step was ignored."""
        return self.distance / self.num_steps
