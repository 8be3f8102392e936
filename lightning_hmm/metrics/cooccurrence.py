"""Frequencies of pairs of consecutive symbols."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hmm.inference.cooccurrence import pair_counts
from lightning_hmm.sequences import Sequences


class PairFrequencies(Metric):
    """Relative frequency of each pair of consecutive symbols, as a (V, V) matrix.

    Entry (i, j) is the fraction of pairs in which symbol j follows symbol i. Use it to compare data with the
    co-occurrences under a model, as `CooccurrenceReport` does.

    Args:
        num_symbols: Number of symbols V.

    Example:
        >>> from lightning_hmm import Sequences
        >>> from lightning_hmm.metrics import PairFrequencies
        >>> metric = PairFrequencies(num_symbols=2)
        >>> metric.update(Sequences.from_list([[0, 1, 1], [0, 1]]))
        >>> metric.compute()
        tensor([[0.0000, 0.6667],
                [0.0000, 0.3333]], dtype=torch.float64)
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_symbols: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(num_symbols, num_symbols, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, sequences: Sequences) -> None:
        """Counts the pairs in sequences of symbols, each with the weight of its sequence."""
        pair_counts(sequences, len(self.counts), self.counts)

    def compute(self) -> Tensor:
        """Returns the (V, V) frequencies, which are NaN if no pair was counted."""
        return self.counts / self.counts.sum()
