"""Files of predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hmm.data import sequence_numbers
from lightning_hmm.runs import run_folder


class PredictionWriter(Callback):
    """Writes the results of `Trainer.predict` to a file, with one JSON object per line and sequence.

    Each object contains the number of the sequence in the data and the outputs of the model, such as the log-likelihood
    and the decoded states.

    Args:
        path: Path of the file. The default is ``predictions.jsonl`` in the folder of the run. On ranks other than 0,
            the suffix ``.rank1``, ``.rank2`` and so on is appended.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import PredictionWriter
        >>> writer = PredictionWriter("predictions.jsonl")
        >>> trainer = Trainer(callbacks=[writer], logger=False, accelerator="cpu")
        >>> writer.path
        'predictions.jsonl'
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._file: Path | None = None
        self._numbers: Iterator[int] = iter(())

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        file = Path(self.path) if self.path else trainer.strategy.broadcast(run_folder(trainer)) / "predictions.jsonl"
        if trainer.global_rank:
            file = file.with_name(f"{file.name}.rank{trainer.global_rank}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        loaders: Any = trainer.predict_dataloaders
        self._file, self._numbers = file, sequence_numbers(loaders[0] if isinstance(loaders, list | tuple) else loaders)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self._file is not None
        with self._file.open("a") as file:
            for n in range(len(batch)):
                found = {name: values[n].tolist() for name, values in outputs.items()}
                if found.get("log_likelihood") == float("-inf"):
                    found["log_likelihood"] = None  # JSON has no infinity; null marks an impossible sequence
                file.write(json.dumps({"sequence": next(self._numbers), **found}) + "\n")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank_zero_info(f"Predictions: {self._file}")
