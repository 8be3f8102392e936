"""How well a model predicts, per observed step.

A mean of per-batch means is not the mean: batches hold different numbers of steps. Two sums are kept instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hmm.sequences import Sequences


class LogLikelihoodPerSymbol(Metric):
    """Natural log-likelihood divided by the number of observed steps.

    Args:
        num_models: how many models are scored side by side; the value is a scalar for one, else (num_models,).
    """

    full_state_update = False
    higher_is_better = True
    log_likelihood: Tensor
    num_symbols: Tensor

    def __init__(self, num_models: int = 1) -> None:
        super().__init__()
        self.add_state("log_likelihood", torch.zeros(num_models, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_symbols", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, log_likelihood: Tensor, num_symbols: Tensor | float) -> None:
        """Adds log-likelihoods, summed over sequences: a scalar or (num_models,); and the observed steps they are of."""
        self.log_likelihood += log_likelihood.double()
        self.num_symbols += num_symbols

    def compute(self) -> Tensor:
        return (self.log_likelihood / self.num_symbols).squeeze()


class BitsPerSymbol(LogLikelihoodPerSymbol):
    """Negative base-2 log-likelihood per observed step: what a perfect coder would need."""

    higher_is_better = False

    def compute(self) -> Tensor:
        return -super().compute() / math.log(2)


class NormalizedNLL(Metric):
    """Negative log-likelihood divided by the number of sequences and by the length of the longest, as Sicking et al. (2020) report it.

    Likelihoods and the number of sequences are weighted where the sequences have weights; a sequence of weight zero does not count.
    Sequences of different lengths make it smaller than the value per symbol, by as much as they fall short of the longest.
    """

    full_state_update = False
    higher_is_better = False
    log_likelihood: Tensor
    num_sequences: Tensor
    longest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("log_likelihood", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_sequences", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("longest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def update(self, log_likelihood: Tensor, sequences: Sequences) -> None:
        """Adds the (N,) log-likelihoods of sequences, without weights, and the sequences that they are of."""
        self.log_likelihood += sequences.weighted(log_likelihood.double()).sum()
        self.num_sequences += len(sequences) if sequences.weights is None else sequences.weights.sum()
        lengths = sequences.counted().lengths
        self.longest = torch.maximum(self.longest, lengths.max().to(self.longest)) if len(lengths) else self.longest

    def compute(self) -> Tensor:
        return -self.log_likelihood / (self.num_sequences * self.longest)
