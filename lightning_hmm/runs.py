"""The folder of a run, which holds its `config.yaml` and its `checkpoints`: naming it, creating it, and finding checkpoints in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path:
    """Returns the folder above the one in which `ModelCheckpoint` saves. It is specific to the run for every logger that numbers its runs.

    Loggers such as W&B and MLflow choose the run's name on rank 0 only, so call this function on rank 0 and broadcast the result.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / version


def claim_version(folder: Path) -> int:
    """Creates the next free ``version_N`` in `folder` and returns N. Processes that call it at the same time get different numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = [
        int(path.name.removeprefix("version_"))
        for path in folder.glob("version_*")
        if path.name.removeprefix("version_").isdigit()
    ]
    version = max(taken, default=-1) + 1
    while True:
        try:
            (folder / f"version_{version}").mkdir()
            return version
        except FileExistsError:  # another process was faster
            version += 1


def require_local_file(path: str | Path, option: str = "ckpt_path") -> Path:
    """Returns the absolute path of a file on this machine. Anything else raises an error, and nothing is downloaded."""
    if "://" in str(path):
        raise ValueError(
            f"`{option}` must be the path of a local file, but is {str(path)!r} instead. Download the checkpoint first, if you trust its source."
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"`{option}` must be a checkpoint, but there is no file {path}.")
    return Path(path).absolute()  # Lightning downloads every path that begins with "http"


def find_checkpoint(which: str, configs: Iterable[str | Path]) -> Path:
    """Returns the last or best checkpoint of the run whose ``config.yaml`` is among the given `configs`.

    Args:
        which: "last" or "best".
        configs: Configuration files from the command line.
    """
    folders = sorted(
        {
            Path(config).absolute().parent / "checkpoints"
            for config in configs
            if (Path(config).absolute().parent / "checkpoints").is_dir()
        }
    )
    if len(folders) != 1:
        found = (
            "several runs were given"
            if folders
            else "none of the given `--config` files is in the folder of a run that saved checkpoints"
        )
        raise ValueError(
            f"`--ckpt_path {which}` is looked up in the folder of the run whose `config.yaml` is given as `--config`, but {found}. "
            "Give the run's own `config.yaml`, such as logs/<model>/<data>/version_0/config.yaml, or the path of a checkpoint."
        )
    checkpoint = folders[0] / "last.ckpt" if which == "last" else _best(folders[0])
    if checkpoint is None or not checkpoint.is_file():
        there = ", ".join(path.name for path in sorted(folders[0].glob("*.ckpt"))) or "no checkpoints"
        reason = " Without validation data no checkpoint is chosen as the best." if which == "best" else ""
        raise FileNotFoundError(
            f"`--ckpt_path {which}` must be a checkpoint of the run, but {folders[0]} holds {there}.{reason}"
        )
    return checkpoint


def _best(folder: Path) -> Path | None:
    """The best checkpoint according to the latest one, which stores the state of `BestCheckpoint`."""
    latest = folder / "last.ckpt"
    if not latest.is_file():
        latest = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=latest)
    if not latest.is_file():
        return None
    # Not the one with the most steps: without a logger, several runs share a folder.
    callbacks: Any = torch.load(latest, weights_only=True, map_location="cpu", mmap=True).get("callbacks", {})
    states = [state for name, state in callbacks.items() if name.startswith("BestCheckpoint")]
    best = states[0]["best_model_path"] if states else ""
    return folder / Path(best).name if best else None  # by name, since the folder may have been moved
