"""How far predictions of the next observation are from it."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hmm.sequences import Sequences


class PredictionError(Metric):
    """Mean Euclidean distance between each vector and its prediction from those before it, as Jarboui and Perchet (2021) report it.

    The first step of a sequence, with nothing before it, does not count, nor does a step with a missing entry, which is at no known
    distance. On data with steps of length 1 (`datamodules.moving`) the prediction that nothing moves errs by 1.
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
        """Adds (steps, features) predictions E[y_t | y_1:t-1] of the steps of sequences, each with its sequence's weight."""
        if predictions.shape != sequences.values.shape:
            raise ValueError(
                f"`predictions` must be {tuple(sequences.values.shape)}, steps by features, but is {tuple(predictions.shape)} instead."
            )
        counted = sequences.observed.all(1).double()
        counted[sequences.offsets[:-1][sequences.lengths > 0].to(counted.device)] = 0
        if sequences.weights is not None:
            counted = counted * sequences.repeat_interleave(sequences.weights)
        distances = (predictions.double() - sequences.values).norm(dim=1)
        self.distance += torch.where(counted > 0, distances * counted, 0.0).sum()
        self.num_steps += counted.sum()

    def compute(self) -> Tensor:
        """NaN where no step counted."""
        return self.distance / self.num_steps
