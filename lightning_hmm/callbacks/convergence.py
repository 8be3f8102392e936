"""When EM has done its work."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class Convergence(Callback):
    """Stops when an epoch changes the training likelihood by less than `tolerance`, relatively, for all restarts, and says so.

    Where the model trains by batch EM, a likelihood that falls by more than rounding can explain is warned about: EM with
    exact steps never lets it (a prior may: it is the likelihood plus log prior that cannot fall).

    Args:
        tolerance: of ``|new - old| / |old|``; 0 never stops.
        patience: how many such epochs in a row it takes.
    """

    def __init__(self, tolerance: float = 1e-6, patience: int = 1) -> None:
        if not tolerance >= 0:
            raise ValueError(f"`tolerance` must not be negative, but is {tolerance} instead.")
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, but is {patience} instead.")
        self.tolerance, self.patience = tolerance, patience
        self.previous: list[float] | None = None
        self.calm_epochs = 0
        self.stopping_reason: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # what a checkpoint to go on from remembers is loaded after this
            self.previous, self.calm_epochs, self.stopping_reason = None, 0, None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not at the end of the epoch: a checkpoint of its last batch must hold what this epoch brought.
        metric: Any = pl_module.train_likelihood
        if not trainer.is_last_batch or not metric.update_called:  # not every objective is a likelihood
            return
        if not getattr(pl_module, "iteration_likelihoods", None):
            self._compare(trainer, pl_module, metric.compute().reshape(-1).tolist())

    def on_iteration_end(self, trainer: Trainer, pl_module: LightningModule, likelihoods: torch.Tensor) -> None:
        """Called by a model that makes several iterations of EM in an epoch, after each."""
        if self.stopping_reason is None:
            self._compare(trainer, pl_module, likelihoods.reshape(-1).tolist())
        else:  # the last one
            self.previous = likelihoods.reshape(-1).tolist()

    def _compare(self, trainer: Trainer, pl_module: LightningModule, current: list[float]) -> None:
        """Compares the (restarts,) likelihoods of an epoch, or of an iteration of EM inside one, with those before."""
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
                f"The training likelihood fell by {fall:.3g} per symbol in epoch {trainer.current_epoch}, which exact batch EM never does.",
                stacklevel=2,
            )
        if self.tolerance == 0:
            return
        # A fall is no calm: online EM has them, and so does a likelihood that a prior pulls on.
        self.calm_epochs = self.calm_epochs + 1 if max(map(abs, gains)) < self.tolerance else 0
        if self.calm_epochs >= self.patience:
            trainer.should_stop = True
            self.stopping_reason = (
                f"Converged after {self._epochs(trainer, pl_module)}: the training likelihood ({max(current):.6f} per symbol) "
                f"gained {max(gains):.2g} relative, below the tolerance of {self.tolerance:g}."
            )
            rank_zero_info(self.stopping_reason)

    @staticmethod
    def _epochs(trainer: Trainer, pl_module: LightningModule) -> str:
        iterations = int(getattr(pl_module, "iterations_per_epoch", 1))
        if iterations == 1:
            return f"{trainer.current_epoch + 1} epochs"
        return f"{trainer.current_epoch * iterations + len(pl_module.iteration_likelihoods)} iterations"  # type: ignore[arg-type]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.tolerance > 0 and self.calm_epochs >= self.patience:
            trainer.should_stop = True
            self.stopping_reason = (
                f"Training had converged before the checkpoint was saved, within the tolerance of {self.tolerance:g}."
            )
            rank_zero_info(self.stopping_reason)

    def state_dict(self) -> dict[str, Any]:
        return {"previous": self.previous, "calm_epochs": self.calm_epochs, "tolerance": self.tolerance}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous = state_dict["previous"]
        self.calm_epochs = state_dict["calm_epochs"] if state_dict["tolerance"] == self.tolerance else 0
