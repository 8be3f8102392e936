"""Retraining on training and validation data, with the number of epochs chosen on validation data."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hmm.callbacks.convergence import Convergence
from lightning_hmm.data import data_of
from lightning_hmm.models.cloned import ClonedHMM


class Retraining(Callback):
    """Early stopping of a `ClonedHMM`, followed by retraining on training plus validation data.

    In the first part, the model is trained until the validation likelihood has not improved for `patience` epochs, or
    until `trainer.max_epochs`. If the model switches from online to batch EM, it does so as soon as online EM no longer
    improves the validation likelihood, and after `online_epochs` epochs at the latest.

    In the second part, the model is initialized again and trained on training and validation data together, for the
    numbers of epochs of online and batch EM that were best. There is no validation in this part. Both parts run in one
    call of `fit`, and an interrupted run can be resumed from a checkpoint in either part.

    Args:
        patience: Number of epochs without an improvement after which the first part ends.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import Retraining
        >>> retraining = Retraining(patience=5)
        >>> trainer = Trainer(max_epochs=200, callbacks=[retraining], logger=False, accelerator="cpu")
        >>> retraining.validated  # validation scores so far
        []
    """

    def __init__(self, patience: int = 3) -> None:
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1, but is {patience} instead.")
        self.patience = patience
        self._reset()

    def _reset(self) -> None:
        self.validated: list[float] = []  # bits per symbol after each epoch of the first part
        self.switched = 0  # number of epochs before the switch from online to batch EM, or 0 before the switch
        self.first_epoch: int | None = None  # first epoch of the second part
        self._users: dict[str, Any] = {}

    @property
    def best_epochs(self) -> int:
        """Number of epochs after which validation was best. If several are equal, the smallest."""
        return self.validated.index(min(self.validated)) + 1

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(pl_module, ClonedHMM):
            raise TypeError(f"Retraining is for a ClonedHMM, but the model is a {type(pl_module).__name__} instead.")
        if data_of(trainer) is None:
            raise MisconfigurationException(
                "Retraining joins training and validation data, "
                "which needs `lightning_hmm.fit` or a `SequenceDataModule`."
            )
        self._reset()
        pl_module.first_epoch = 0
        # This callback must run after callbacks that stop training early, and before those that save checkpoints.
        others = [callback for callback in trainer.callbacks if callback is not self]
        savers = [callback for callback in others if isinstance(callback, Checkpoint)]
        trainer.callbacks[:] = [callback for callback in others if callback not in savers] + [self, *savers]

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # `max_epochs` is set here, before Lightning checks whether the run already has more epochs.
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if (
            state
            and state["first_epoch"] is None
            and trainer.state.fn == "fit"
            and len(state["validated"]) < checkpoint["epoch"] + 1
        ):
            raise ValueError(
                f"The checkpoint was saved before epoch {checkpoint['epoch']} was validated, "
                "and Retraining needs the validation of every epoch. "
                "Resume from one saved at the end of an epoch, such as last.ckpt."
            )
        if state and state["first_epoch"] is not None and trainer.state.fn == "fit":
            self.load_state_dict(state)
            trainer.fit_loop.max_epochs = state["first_epoch"] + self.best_epochs

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.switched:
            pl_module.online_epochs = self.switched
        self._users = {
            "limit_val_batches": trainer.limit_val_batches,
            "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs,
        }
        if self.first_epoch is not None:
            self._take_all_data(trainer, pl_module)
        elif trainer.limit_val_batches == 0:
            raise MisconfigurationException(
                "Retraining finds the number of epochs on validation data, but there are none."
            )

    def _take_all_data(self, trainer: Any, pl_module: ClonedHMM) -> None:
        trainer.datamodule.train_on_validation()
        trainer.limit_val_batches = 0
        assert self.first_epoch is not None
        pl_module.first_epoch = self.first_epoch

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.reload_dataloaders_every_n_epochs = self._users["reload_dataloaders_every_n_epochs"]
        if trainer.current_epoch != self.first_epoch:
            return
        pl_module.start_over(trainer.datamodule.train_sequences)
        (optimizer,) = trainer.optimizers
        optimizer.forget()
        for callback in trainer.callbacks:
            if isinstance(callback, Convergence):
                callback.previous, callback.converged_epochs = None, 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # The epoch may have been recorded before, if training was resumed from the end of this epoch.
        if self.first_epoch is not None or len(self.validated) > trainer.current_epoch:
            return
        found = trainer.callback_metrics.get("val/bits_per_symbol")
        if found is None:
            raise MisconfigurationException(
                "Retraining needs the validation of every epoch: leave `check_val_every_n_epoch` as it is."
            )
        self.validated.append(float(found))
        epochs = trainer.current_epoch + 1
        done = epochs - self.best_epochs >= self.patience or math.isnan(float(found))
        online = pl_module.online_epochs
        if online is not None and not self.switched and (done or epochs >= online):
            pl_module.online_epochs = self.switched = epochs
            if epochs != trainer.max_epochs:
                trainer.should_stop = False
                return
        since_switch = epochs - max(self.switched, self.best_epochs)
        if since_switch >= self.patience or trainer.should_stop or epochs == trainer.max_epochs:
            self._begin_second_part(trainer, pl_module)

    def _begin_second_part(self, trainer: Any, pl_module: ClonedHMM) -> None:
        self.first_epoch = trainer.current_epoch + 1
        trainer.should_stop = False
        trainer.fit_loop.max_epochs = self.first_epoch + self.best_epochs
        trainer.reload_dataloaders_every_n_epochs = 1  # for the next epoch only
        self._take_all_data(trainer, pl_module)
        kinds = f" ({min(self.switched, self.best_epochs)} of online EM)" if self.switched else ""
        rank_zero_info(
            f"Best on validation after {self.best_epochs} epochs{kinds}: {min(self.validated):.4f} bits per symbol. "
            "Training as long on all data."
        )

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.datamodule.train_on_validation(False)
        for name, value in self._users.items():
            setattr(trainer, name, value)

    def state_dict(self) -> dict[str, Any]:
        return {"validated": self.validated, "switched": self.switched, "first_epoch": self.first_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validated = list(state_dict["validated"])
        self.switched = state_dict["switched"]
        self.first_epoch = state_dict["first_epoch"]
