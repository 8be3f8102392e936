"""Stopping when EM has converged."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class Convergence(Callback):
    """Stops training when the relative change of the training likelihood is below `tolerance` for all restarts.

    The reason is printed and stored in `stopping_reason`. If the model is trained by batch EM without a prior, a
    warning is issued when the likelihood decreases by more than rounding errors, which exact EM steps never do. (With a
    prior, only the sum of log-likelihood and log prior never decreases.)

    Args:
        tolerance: Threshold for ``|new - old| / |old|``. With 0, training is never stopped.
        patience: Number of consecutive epochs below the tolerance after which training stops.

    Attributes:
        stopping_reason: Sentence that explains why training was stopped, or ``None``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import Convergence
        >>> convergence = Convergence(tolerance=1e-4, patience=2)
        >>> trainer = Trainer(max_epochs=500, callbacks=[convergence], logger=False, accelerator="cpu")
        >>> convergence.stopping_reason is None  # before training
        True
    """

    def __init__(self, tolerance: float = 1e-6, patience: int = 1) -> None:
        if not tolerance >= 0:
            raise ValueError(f"`tolerance` must not be negative, but is {tolerance} instead.")
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, but is {patience} instead.")
        self.tolerance = tolerance
        self.patience = patience
        self.previous: list[float] | None = None
        self.converged_epochs = 0
        self.stopping_reason: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # the state of a checkpoint is loaded later, when training is resumed
            self.previous, self.converged_epochs, self.stopping_reason = None, 0, None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # This runs before the end of the epoch, so that a checkpoint of its last batch contains the result.
        metric: Any = pl_module.train_likelihood
        if not trainer.is_last_batch or not metric.update_called:  # some models have another objective
            return
        if not getattr(pl_module, "iteration_likelihoods", None):
            self._compare(trainer, pl_module, metric.compute().reshape(-1).tolist())

    def on_iteration_end(self, trainer: Trainer, pl_module: LightningModule, likelihoods: torch.Tensor) -> None:
        """Called after each iteration by a model that runs several iterations of EM in an epoch."""
        if self.stopping_reason is None:
            self._compare(trainer, pl_module, likelihoods.reshape(-1).tolist())
        else:  # the last iteration, after training has been stopped
            self.previous = likelihoods.reshape(-1).tolist()

    def _compare(self, trainer: Trainer, pl_module: LightningModule, current: list[float]) -> None:
        """Compares the (restarts,) likelihoods of an epoch, or of an iteration within it, with the previous ones."""
        previous, self.previous = self.previous, current
        if previous is None:
            return
        gains = [
            (new - old) / max(abs(old), torch.finfo(torch.float64).tiny)
            for old, new in zip(previous, current, strict=True)
        ]
        if min(new - old for old, new in zip(previous, current, strict=True)) < -1e-9 and getattr(
            pl_module, "never_decreases", False
        ):
            fall = max(old - new for old, new in zip(previous, current, strict=True))
            warnings.warn(
                f"The training likelihood fell by {fall:.3g} per symbol in epoch {trainer.current_epoch}, "
                "which exact batch EM never does.",
                stacklevel=2,
            )
        if self.tolerance == 0:
            return
        # A decrease above the tolerance does not count as convergence. It occurs in online EM and with priors.
        self.converged_epochs = self.converged_epochs + 1 if max(map(abs, gains)) < self.tolerance else 0
        if self.converged_epochs >= self.patience:
            trainer.should_stop = True
            self.stopping_reason = (
                f"Converged after {self._epochs(trainer, pl_module)}: the training likelihood "
                f"({max(current):.6f} per symbol) gained {max(gains):.2g} relative, "
                f"below the tolerance of {self.tolerance:g}."
            )
            rank_zero_info(self.stopping_reason)

    @staticmethod
    def _epochs(trainer: Trainer, pl_module: LightningModule) -> str:
        iterations = int(getattr(pl_module, "iterations_per_epoch", 1))
        if iterations == 1:
            return f"{trainer.current_epoch + 1} epochs"
        return f"{trainer.current_epoch * iterations + len(pl_module.iteration_likelihoods)} iterations"  # type: ignore[arg-type]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.tolerance > 0 and self.converged_epochs >= self.patience:
            trainer.should_stop = True
            self.stopping_reason = (
                f"Training had converged before the checkpoint was saved, within the tolerance of {self.tolerance:g}."
            )
            rank_zero_info(self.stopping_reason)

    def state_dict(self) -> dict[str, Any]:
        return {"previous": self.previous, "converged_epochs": self.converged_epochs, "tolerance": self.tolerance}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous = state_dict["previous"]
        self.converged_epochs = state_dict["converged_epochs"] if state_dict["tolerance"] == self.tolerance else 0
