"""Metrics that accumulate float64 sums, so their values do not depend on how data are split over batches and ranks."""

from lightning_hmm.metrics.cooccurrence import PairFrequencies
from lightning_hmm.metrics.likelihood import BitsPerSymbol, LogLikelihoodPerSymbol, NormalizedNLL
from lightning_hmm.metrics.prediction import PredictionError
from lightning_hmm.metrics.states import LabelAccuracy, MatchedStateAccuracy

__all__ = [
    "BitsPerSymbol",
    "LabelAccuracy",
    "LogLikelihoodPerSymbol",
    "MatchedStateAccuracy",
    "NormalizedNLL",
    "PairFrequencies",
    "PredictionError",
]
