"""Callbacks for checkpoints, convergence, early stopping, pruning, figures, prediction files and reports."""

from lightning_hmm.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from lightning_hmm.callbacks.convergence import Convergence
from lightning_hmm.callbacks.cooccurrence import CooccurrenceReport
from lightning_hmm.callbacks.figures import Figures
from lightning_hmm.callbacks.keep_best import KeepBest
from lightning_hmm.callbacks.predictions import PredictionWriter
from lightning_hmm.callbacks.pruning import Pruning
from lightning_hmm.callbacks.retraining import Retraining

__all__ = [
    "BestCheckpoint",
    "Convergence",
    "CooccurrenceReport",
    "Figures",
    "KeepBest",
    "LastCheckpoint",
    "PredictionWriter",
    "Pruning",
    "Retraining",
]
