"""Checkpoints of the best and of the last epoch, for runs that may be resumed in another folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the best epoch on validation data.

    Without validation data, nothing is saved. If a run is resumed in another folder, the best checkpoint so far is
    copied to that folder.

    Args:
        monitor: Name of the logged metric that is compared.
        mode: "min" or "max".
        save_top_k: Number of checkpoints that are kept.
        every_n_epochs: Number of epochs between checkpoints.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import BestCheckpoint, LastCheckpoint
        >>> checkpoint = BestCheckpoint(monitor="val/bits_per_symbol")
        >>> trainer = Trainer(callbacks=[checkpoint, LastCheckpoint()], logger=False, accelerator="cpu")
        >>> checkpoint.monitor, checkpoint.mode
        ('val/bits_per_symbol', 'min')
    """

    def __init__(
        self, monitor: str = "val/bits_per_symbol", mode: str = "min", save_top_k: int = 1, every_n_epochs: int = 1
    ) -> None:
        super().__init__(
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=True,
        )
        self._earlier: dict[str, Any] | None = None
        self._wanted = save_top_k

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("dirpath") == self.dirpath:
            super().load_state_dict(state_dict)
        else:
            self._earlier = state_dict

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        if current is not None and not bool(torch.isfinite(current)):
            # A validation sequence is impossible. The latest checkpoint is kept until an epoch has a finite score.
            return not any(bool(torch.isfinite(score)) for score in self.best_k_models.values())
        return super().check_monitor_top_k(trainer, current)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        validates = trainer.enable_validation and sum(trainer.num_val_batches) > 0
        self.save_top_k = self._wanted if validates else 0
        if (
            validates
            and self._earlier is not None
            and self._earlier["monitor"] == self.monitor
            and Path(self._earlier["best_model_path"]).is_file()
        ):
            self._take_over(trainer, Path(self._earlier["best_model_path"]), self._earlier["best_model_score"])
        super().on_train_start(trainer, pl_module)

    def _take_over(self, trainer: Trainer, best: Path, score: Any) -> None:
        """Copies the best checkpoint so far into the folder of a resumed run. The old folder is left unchanged."""
        assert self.dirpath is not None
        copy = str(Path(self.dirpath) / best.name)
        if trainer.is_global_zero:
            Path(self.dirpath).mkdir(parents=True, exist_ok=True)
            shutil.copy2(best, copy)
        trainer.strategy.barrier()
        self.best_model_path = self.kth_best_model_path = copy
        self.best_model_score, self.kth_value = score, score
        self.best_k_models = {copy: score}


class LastCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the last finished epoch in ``last.ckpt``.

    `ModelCheckpoint(save_last=True)` writes this file only when the best checkpoint changes.

    Args:
        every_n_epochs: Number of epochs between checkpoints.

    Example:
        >>> from lightning_hmm.callbacks import LastCheckpoint
        >>> LastCheckpoint(every_n_epochs=5).filename
        'last'
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        super().__init__(
            filename="last", every_n_epochs=every_n_epochs, save_on_train_epoch_end=True, enable_version_counter=False
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing, because a resumed run has its own folder."""
