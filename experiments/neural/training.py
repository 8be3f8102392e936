"""What the experiments with neural HMMs share: training that keeps the best epoch on validation data, errors of predictions, agreement of clusters."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix
from torch import Tensor

from datamodules.base import SequenceDataModule
from lightning_hmm.metrics import PredictionError
from lightning_hmm.models.neural.starts import moving_sum
from lightning_hmm.sequences import Sequences
from lightning_hmm.training import fit, quiet_lightning

CELLS = ("rnn", "lstm", "gru")
MONITORED = "val/prediction_error"


class KeepBest(Callback):
    """At the end of training the model is as it was in the epoch with the least error on validation data."""

    def __init__(self) -> None:
        self.best, self.state = float("inf"), {}  # type: float, dict[str, Tensor]

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking and (error := float(trainer.callback_metrics[MONITORED])) < self.best:
            self.best, self.state = error, {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.load_state_dict(self.state)


def averages(sequences: Sequences, window: int) -> Sequences:
    """Means over the observed steps among the `window` steps around each step; missing where the step itself is."""
    missing = sequences.values.isnan().any(1, keepdim=True)
    values, counts = (
        sequences.with_values(part).padded().nan_to_num().transpose(0, 1)
        for part in (sequences.values.masked_fill(missing, 0), (~missing).to(sequences.values))
    )
    means = moving_sum(values, window) / moving_sum(counts, window).clamp(min=1)
    return sequences.with_values(sequences.packed(means.transpose(0, 1)).masked_fill(missing, torch.nan))


def train(model: Any, data: SequenceDataModule, epochs: int, patience: int) -> dict[str, float]:
    """Trains until the error on validation data, has not fallen for `patience` epochs; gives it, and seconds of processor time."""
    best = KeepBest()
    callbacks = [EarlyStopping(MONITORED, patience=patience), best]
    with quiet_lightning(announcements=False):
        trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            callbacks=callbacks,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        begin = time.process_time()
        trainer.fit(model, datamodule=data)
    return {"val_error": best.best, "epochs": trainer.current_epoch, "seconds": round(time.process_time() - begin, 2)}


def timed_fit(model: Any, data: SequenceDataModule, epochs: int, batch_size: int | None) -> float:
    """Trains for a fixed number of epochs, without a look at validation data; gives seconds of processor time."""
    begin = time.process_time()
    fit(model, data.train_sequences, max_epochs=epochs, tolerance=0, batch_size=batch_size, shuffle=batch_size is not None, seed=data.seed)
    return round(time.process_time() - begin, 2)


def prediction_error(predictions: Sequences | Tensor, sequences: Sequences) -> float:
    """Mean distance of (steps, D) predictions of each step from those before it; the first step does not count."""
    metric = PredictionError()
    metric.update(predictions.values if isinstance(predictions, Sequences) else predictions, sequences)
    return float(metric.compute())


def agreement(clusters: np.ndarray | Tensor, truth: np.ndarray | Tensor) -> dict[str, float]:
    """How well clusters are known states, over the steps where both are known.

    accuracy: share of steps in agreement under the best one-to-one matching; purity: share of steps that are of the commonest state
    of their cluster; ari: Rand's index, 0 for chance and 1 for the same partition (Hubert and Arabie, 1985).
    """
    clusters, truth = (np.asarray(numbers) for numbers in (clusters, truth))
    known = (clusters >= 0) & (truth >= 0)
    table = contingency_matrix(truth[known], clusters[known])
    return {
        "accuracy": float(table[linear_sum_assignment(table, maximize=True)].sum() / table.sum()),
        "purity": float(table.max(0).sum() / table.sum()),
        "ari": float(adjusted_rand_score(truth[known], clusters[known])),
    }


def mean_and_spread(numbers: list[float], digits: int = 3) -> str:
    """Over runs: the mean and the standard deviation."""
    if not numbers:
        return "-"
    spread = f" ± {np.std(numbers, ddof=1):.{digits}f}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):.{digits}f}{spread}"
