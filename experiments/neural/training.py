"""The common part of the experiments with neural HMMs: training, prediction errors, agreement of clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from datamodules.base import SequenceDataModule
from experiments.measures import Stopwatch
from experiments.run import QUIET_TRAINER
from lightning_hmm.callbacks import KeepBest
from lightning_hmm.metrics import PredictionError
from lightning_hmm.models.neural.starts import moving_sum
from lightning_hmm.sequences import Sequences
from lightning_hmm.training import fit, quiet_lightning

CELLS = ("rnn", "lstm", "gru")
MONITORED = "val/prediction_error"


def averages(sequences: Sequences, window: int) -> Sequences:
    """Returns means over the observed steps in the `window` around each step, missing where the step is missing."""
    missing = sequences.values.isnan().any(1, keepdim=True)
    values, counts = (
        sequences.with_values(part).padded().nan_to_num().transpose(0, 1)
        for part in (sequences.values.masked_fill(missing, 0), (~missing).to(sequences.values))
    )
    means = moving_sum(values, window) / moving_sum(counts, window).clamp(min=1)
    return sequences.with_values(sequences.packed(means.transpose(0, 1)).masked_fill(missing, torch.nan))


def train(model: Any, data: SequenceDataModule, epochs: int, patience: int) -> dict[str, Any]:
    """Trains until the validation error has not fallen for `patience` epochs and restores the best epoch.

    Returns the validation error, the number of epochs and the seconds of processor time.
    """
    best = KeepBest(MONITORED)
    with quiet_lightning(announcements=False):
        callbacks = [EarlyStopping(MONITORED, patience=patience), best]
        trainer = Trainer(max_epochs=epochs, callbacks=callbacks, num_sanity_val_steps=0, **QUIET_TRAINER)
        with Stopwatch() as watch:
            trainer.fit(model, datamodule=data)
    return {"val_error": best.best_score, "epochs": trainer.current_epoch, "seconds": round(watch.seconds, 2)}


def timed_fit(model: Any, data: SequenceDataModule, epochs: int, batch_size: int | None) -> float:
    """Trains for a fixed number of epochs without validation and returns the seconds of processor time."""
    batches: dict[str, Any] = {"batch_size": batch_size, "shuffle": batch_size is not None, "seed": data.seed}
    with Stopwatch() as watch:
        fit(model, data.train_sequences, max_epochs=epochs, tolerance=0, **batches)
    return round(watch.seconds, 2)


def prediction_error(predictions: Sequences | Tensor, sequences: Sequences) -> float:
    """Returns the mean distance of (steps, D) one-step predictions from the observations, without the first step."""
    metric = PredictionError()
    metric.update(predictions.values if isinstance(predictions, Sequences) else predictions, sequences)
    return float(metric.compute())


def agreement(clusters: np.ndarray | Tensor, truth: np.ndarray | Tensor) -> dict[str, float]:
    """Compares clusters with the true states over the steps where both are known (not negative).

    Returns:
        ``accuracy``, the fraction of steps that agree under the best one-to-one matching; ``purity``, the fraction of
        steps in the most frequent state of their cluster; ``ari``, the adjusted Rand index, 0 for chance and 1 for
        equal partitions (Hubert and Arabie, 1985).
    """
    clusters, truth = (np.asarray(numbers) for numbers in (clusters, truth))
    known = (clusters >= 0) & (truth >= 0)
    table = contingency_matrix(truth[known], clusters[known])
    return {
        "accuracy": float(table[linear_sum_assignment(table, maximize=True)].sum() / table.sum()),
        "purity": float(table.max(0).sum() / table.sum()),
        "ari": float(adjusted_rand_score(truth[known], clusters[known])),
    }
