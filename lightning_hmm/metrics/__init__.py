"""Metrics: float64 sums, exact under any split of the data over batches and ranks."""

from lightning_hmm.metrics.cooccurrence import PairFrequencies
from lightning_hmm.metrics.likelihood import BitsPerSymbol, LogLikelihoodPerSymbol, NormalizedNLL
from lightning_hmm.metrics.prediction import PredictionError
from lightning_hmm.metrics.states import MatchedStateAccuracy

__all__ = [
    "BitsPerSymbol",
    "LogLikelihoodPerSymbol",
    "MatchedStateAccuracy",
    "NormalizedNLL",
    "PairFrequencies",
    "PredictionError",
]
