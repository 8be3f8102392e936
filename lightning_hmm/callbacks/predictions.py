"""What `predict` found, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class PredictionWriter(Callback):
    """Writes one JSON line for each sequence: its number in the data and what the model found, such as log-likelihood and decoded states.

    Args:
        path: of the file; ``predictions.jsonl`` in the log folder if not given. Further ranks add ``.rank1`` and so on.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._file: Path | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        file = Path(self.path) if self.path else Path(trainer.log_dir or trainer.default_root_dir) / "predictions.jsonl"
        if trainer.global_rank:
            file = file.with_name(f"{file.name}.rank{trainer.global_rank}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        self._file = file

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert self._file is not None
        # Of a batch of all ranks together, each rank has every world_size-th sequence.
        first = batch_idx * (getattr(getattr(trainer, "datamodule", None), "batch_size", None) or 0) + trainer.global_rank
        with self._file.open("a") as file:
            for n in range(len(batch)):
                found = {name: values[n].tolist() for name, values in outputs.items()}
                if found.get("log_likelihood") == float("-inf"):
                    found["log_likelihood"] = None  # JSON has no infinity: an impossible sequence has no log-likelihood
                file.write(json.dumps({"sequence": first + n * trainer.world_size, **found}) + "\n")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank_zero_info(f"Predictions: {self._file}")
