"""Likelihood metrics, normalized by the number of observed steps.

The log-likelihood and the number of steps are accumulated separately. A mean of per-batch means would differ from the
mean over the data, because batches contain different numbers of steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hmm.sequences import Sequences


class LogLikelihoodPerSymbol(Metric):
    """Log-likelihood in nats, divided by the number of observed steps.

    Args:
        num_models: Number of models that are scored on the same data, such as the restarts of a model. The value is a
            scalar for one model and has shape (num_models,) otherwise.

    Example:
        >>> import torch
        >>> from lightning_hmm.metrics import LogLikelihoodPerSymbol
        >>> metric = LogLikelihoodPerSymbol()
        >>> metric.update(torch.tensor(-6.0), num_symbols=3)
        >>> metric.update(torch.tensor(-2.0), num_symbols=5)
        >>> metric.compute()
        tensor(-1., dtype=torch.float64)
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
        """Adds the log-likelihood of a batch.

        Args:
            log_likelihood: Log-likelihood of the batch, summed over its sequences: a scalar or (num_models,).
            num_symbols: Number of observed steps in the batch, weighted if the sequences have weights.
        """
        self.log_likelihood += log_likelihood.double()
        self.num_symbols += num_symbols

    def compute(self) -> Tensor:
        return (self.log_likelihood / self.num_symbols).squeeze()


class BitsPerSymbol(LogLikelihoodPerSymbol):
    """Negative log-likelihood in base 2 per observed step.

    This is the average code length per symbol of an ideal arithmetic coder that uses the model.

    Args:
        num_models: Number of models that are scored on the same data.

    Example:
        >>> import math, torch
        >>> from lightning_hmm.metrics import BitsPerSymbol
        >>> metric = BitsPerSymbol()
        >>> metric.update(torch.tensor(-8 * math.log(2)), num_symbols=4)
        >>> round(float(metric.compute()), 6)
        2.0
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        return -super().compute() / math.log(2)


class NormalizedNLL(Metric):
    """Negative log-likelihood divided by the number of sequences and by the length of the longest sequence.

    Use it to compare with Sicking et al. (2020), who report this quantity. If sequences have weights, likelihoods and
    the number of sequences are weighted, and sequences of weight zero are ignored. If the lengths of the sequences
    differ, the value is smaller than the negative log-likelihood per symbol.

    Example:
        >>> import torch
        >>> from lightning_hmm import Sequences
        >>> from lightning_hmm.metrics import NormalizedNLL
        >>> metric = NormalizedNLL()
        >>> metric.update(torch.tensor([-4.0, -2.0]), Sequences.from_list([[0, 1, 1], [0, 1]]))
        >>> metric.compute()
        tensor(1., dtype=torch.float64)
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
        """Adds the log-likelihoods of a batch.

        Args:
            log_likelihood: (N,) log-likelihood of each sequence, not multiplied by its weight.
            sequences: The N sequences, whose weights are applied here.
        """
        self.log_likelihood += sequences.weighted(log_likelihood.double()).sum()
        self.num_sequences += len(sequences) if sequences.weights is None else sequences.weights.sum()
        lengths = sequences.counted().lengths
        self.longest = torch.maximum(self.longest, lengths.max().to(self.longest)) if len(lengths) else self.longest

    def compute(self) -> Tensor:
        return -self.log_likelihood / (self.num_sequences * self.longest)
