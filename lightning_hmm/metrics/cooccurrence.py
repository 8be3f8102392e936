"""How often one symbol follows another."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hmm.inference.cooccurrence import pair_counts
from lightning_hmm.sequences import Sequences


class PairFrequencies(Metric):
    """(V, V) share of each pair of symbols among the neighbours of sequences, which is what co-occurrence deviations compare.

    Args:
        num_symbols: V.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_symbols: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(num_symbols, num_symbols, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, sequences: Sequences) -> None:
        pair_counts(sequences, len(self.counts), self.counts)

    def compute(self) -> Tensor:
        """NaN where there was no pair."""
        return self.counts / self.counts.sum()
