"""The folder of a run, which contains its `config.yaml` and its `checkpoints`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path:
    """Returns the parent of the folder in which `ModelCheckpoint` saves. Loggers with numbered runs have one per run.

    Loggers such as W&B and MLflow choose the name of the run on rank 0 only. Call this function on rank 0 and broadcast
    the result.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / version


def claim_version(folder: Path) -> int:
    """Creates the next free ``version_N`` in `folder` and returns N, which differs between concurrent processes."""
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
        except FileExistsError:  # Another process has created it.
            version += 1


def require_local_file(path: str | Path, option: str = "ckpt_path") -> Path:
    """Returns the absolute path of a local file. Other paths raise an error, and nothing is downloaded."""
    if "://" in str(path):
        raise ValueError(
            f"`{option}` must be the path of a local file, but is {str(path)!r} instead. "
            "Download the checkpoint first, if you trust its source."
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"`{option}` must be a checkpoint, but there is no file {path}.")
    return Path(path).absolute()  # Lightning downloads every path that begins with "http".


def find_checkpoint(which: str, configs: Iterable[str | Path]) -> Path:
    """Returns the last or best checkpoint of the run whose ``config.yaml`` is among the given `configs`.

    Args:
        which: Either "last" or "best".
        configs: Configuration files of the command line.
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
            f"`--ckpt_path {which}` is looked up in the folder of the run whose `config.yaml` is given as `--config`, "
            f"but {found}. Give the `config.yaml` of the run, such as logs/<model>/<data>/version_0/config.yaml, "
            "or the path of a checkpoint."
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
    """Returns the best checkpoint according to the latest one, which contains the state of `BestCheckpoint`."""
    latest = folder / "last.ckpt"
    if not latest.is_file():
        latest = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=latest)
    if not latest.is_file():
        return None
    # The one with the most steps may belong to another run, because runs without a logger share a folder.
    callbacks: Any = torch.load(latest, weights_only=True, map_location="cpu", mmap=True).get("callbacks", {})
    states = [state for name, state in callbacks.items() if name.startswith("BestCheckpoint")]
    best = states[0]["best_model_path"] if states else ""
    return folder / Path(best).name if best else None  # The folder may have been moved.
