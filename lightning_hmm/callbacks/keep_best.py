"""Keep the parameters of the best validation epoch."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor


class KeepBest(Callback):
    """Restores the parameters of the best validation epoch at the end of training.

    Unlike `ModelCheckpoint`, it keeps the parameters in memory and needs no file.

    Args:
        monitor: Name of the logged metric.
        mode: Whether the smallest ("min") or the largest ("max") value is the best.

    Attributes:
        best_score: Best value so far, or ``None`` before the first validation.
        best_epoch: Number of epochs after which it was reached.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import KeepBest
        >>> keep_best = KeepBest(monitor="val/bits_per_symbol")
        >>> trainer = Trainer(callbacks=[keep_best], logger=False, accelerator="cpu")
        >>> keep_best.best_score is None  # before training
        True
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"] = "min") -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max', but is {mode!r}.")
        self.monitor = monitor
        self.mode = mode
        self.best_score: float | None = None
        self.best_epoch = 0
        self.parameters: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # the state of a checkpoint is loaded later, when training is resumed
            self.best_score, self.best_epoch, self.parameters = None, 0, {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(
                f"`monitor` must be a logged metric, but is {self.monitor!r}. The logged metrics are: {known}."
            )
        score = float(trainer.callback_metrics[self.monitor])
        if self.best_score is None or (score < self.best_score if self.mode == "min" else score > self.best_score):
            self.best_score, self.best_epoch = score, trainer.current_epoch + 1
            self.parameters = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.parameters:
            pl_module.load_state_dict(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_epoch": self.best_epoch, "parameters": self.parameters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_epoch = state_dict["best_score"], state_dict["best_epoch"]
        self.parameters = state_dict["parameters"]
