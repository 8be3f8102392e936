"""The files of a run: its configuration and its default loggers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_hmm.runs import run_folder


class RunConfig(SaveConfigCallback):
    """Saves ``config.yaml`` in the folder of the run, next to its checkpoints, for every logger.

    Args:
        parser: Parser of the command.
        config: Options of the command.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        super().__init__(parser, config, save_to_log_dir=False)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        path = run_folder(trainer) / "config.yaml"
        given = {Path(config).resolve() for config in self.config.get("config") or []}
        if path.exists() and (stage != "fit" or path.resolve() in given):
            return  # The file describes the training run, or was written by the user.
        path.parent.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, path, skip_none=False, overwrite=True)


class SharedVersion(Callback):
    """Sets the loggers of every rank to the version that was claimed by rank 0.

    Args:
        loggers: Function that returns the loggers for a version.
    """

    def __init__(self, loggers: Callable[[Any], list[Logger]]) -> None:
        self.loggers = loggers

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        version = trainer.strategy.broadcast(trainer.loggers[0].version)
        if not trainer.is_global_zero:
            trainer.loggers = self.loggers(version)


def default_loggers(folder: str | Path, name: str, version: int | None) -> list[Logger]:
    """Returns the default loggers of a run: TensorBoard and a CSV file.

    Args:
        folder: Folder of all runs.
        name: Subfolder of the model and the data.
        version: Number of the run.
    """
    # Frequent flushes show results early, and shorten the wait if an interrupt arrives while the writer holds its lock.
    return [
        TensorBoardLogger(folder, name, version, default_hp_metric=False, flush_secs=5),
        CSVLogger(folder, name, version),
    ]
