"""Runs every row of `tests.table` on the ranks of one `torchrun`; the first rank saves what came out.

Started by `tests/test_ranks.py`, which also calls the functions here on one rank. All rows run in the same processes,
since starting a process takes longer than training a small model.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from datamodules import SyntheticDataModule
from lightning_hmm import HMM, ClonedHMM, Sequences, StandardHMM
from lightning_hmm.callbacks import CooccurrenceReport, Retraining
from lightning_hmm.data import loader, sequence_numbers
from lightning_hmm.training import quiet_lightning
from tests.helpers import random_symbols
from tests.table import CLONES, ROWS, D, Row, V, data, state, suited

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class ForTesting(LightningDataModule):
    """Sequences to test on and to predict, in global batches of 4."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__()
        self.test_sequences = sequences

    def test_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        return loader(self.test_sequences, 4, rank=self.trainer.global_rank, world_size=self.trainer.world_size)

    predict_dataloader = test_dataloader


def ragged(name: str, **ranks: Any) -> dict[str, Any]:
    """Trains a row on ragged sequences whose number is no multiple of that of ranks.

    Tests and predicts with starting values, which have no rounding errors.
    """
    row = ROWS[name]
    model = row.fit(data(row.kind), shuffle=True, accelerator="cpu", **ranks)
    found: dict[str, Any] = {"state": state(model), "global_step": model.trainer.global_step}
    if row.random_by_rank:
        return found
    used = row.make()
    if used.starts_from_data:
        used.initialize(data(row.kind))
    unseen = ForTesting(data(row.kind, seed=1))
    (found["metrics"],) = Trainer(**QUIET, **ranks).test(used, datamodule=unseen, verbose=False)
    trainer = Trainer(**QUIET, **ranks)
    batches: Any = trainer.predict(used, datamodule=unseen)
    numbers: Any = sequence_numbers(
        loader(unseen.test_sequences, 4, rank=trainer.global_rank, world_size=trainer.world_size)
    )
    mine = {
        next(numbers): {key: values[n] for key, values in batch.items()}
        for batch in batches
        for n in range(len(batch["log_likelihood"]))
    }
    found["predictions"] = _united(mine)
    return found


def _united(mine: dict[int, Any]) -> dict[int, Any]:
    """The predictions of all ranks, by the numbers of the sequences. No number may occur twice."""
    parts: list[Any] = [mine]
    if torch.distributed.is_initialized():
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
    assert sum(map(len, parts)) == len({number for part in parts for number in part})
    return {number: found for part in parts for number, found in sorted(part.items())}


class Synthetic(SyntheticDataModule):
    """Drawn sequences as what the models of a kind of rows observe."""

    kind = "vectors"

    def _draw_sequences(self) -> tuple[Sequences, Sequences]:
        values, states = super()._draw_sequences()
        return suited(self.kind, values), states


def few(name: str, **ranks: Any) -> dict[str, Any]:
    """Trains and tests a row on more ranks than sequences: two for training, one for validation, one for the test."""
    row = ROWS[name]
    model = row.make()
    synthetic = Synthetic(
        emission="categorical" if row.is_symbolic else "gaussian",
        num_states=3,
        num_symbols=V,
        num_features=D,
        num_sequences=4,
        length=12,
        val_fraction=0.25,
        test_fraction=0.25,
        batch_size=2,
    )
    synthetic.kind, synthetic.columns = row.kind, getattr(model, "columns", synthetic.columns)
    precision: Any = "64-true" if next(model.parameters()).dtype == torch.float64 else "32-true"
    trainer = Trainer(max_epochs=2, precision=precision, callbacks=row.callbacks(), **QUIET, **ranks)
    trainer.fit(model, datamodule=synthetic)
    return {"state": state(model), "metrics": trainer.test(model, datamodule=synthetic, verbose=False)[0]}


def report(**ranks: Any) -> dict[str, Any]:
    """The co-occurrence report. The longest sequence is on the second rank only."""
    rng = np.random.default_rng(0)
    sequences = random_symbols(rng)
    sequences = Sequences.cat([sequences[:5], Sequences.from_list([rng.integers(0, V, 60)]), sequences[5:]])
    weights = torch.from_numpy(rng.integers(0, 4, len(sequences)) / 2 + (sequences.lengths == 60).numpy())
    weighted = ForTesting(Sequences(sequences.values, sequences.offsets, weights))
    (found,) = Trainer(**QUIET, callbacks=[CooccurrenceReport(seed=5)], **ranks).test(
        StandardHMM(3, V), datamodule=weighted, verbose=False
    )
    return {"metrics": found}


def retraining(**ranks: Any) -> dict[str, Any]:
    """Online EM, then batch EM, as long as the validation data say; and again on all data."""
    sequences, callback = data("whole symbols", seed=4), Retraining(patience=2)
    row = Row(
        lambda: ClonedHMM(**CLONES, discount=0.8, sequences_per_update=2, online_epochs=2, transition_pseudocount=1e-3)
    )
    model = row.fit(
        sequences[:11],
        val_sequences=sequences[11:],
        callbacks=[callback],
        max_epochs=30,
        batch_size=6,
        accelerator="cpu",
        **ranks,
    )
    return {
        "state": state(model),
        "metrics": {"best epochs": callback.best_epochs, **dict(enumerate(callback.validated))},
    }


def plain_loader(**ranks: Any) -> dict[str, Any]:
    """A model without sizes and a loader without a data module. The largest symbol is on the last rank only."""
    sequences = Sequences.from_list([[0, 1, 0, 2], [1, 1], [2, 0, 1], [0, 6]])
    trainer, model = Trainer(max_epochs=2, use_distributed_sampler=False, **QUIET, **ranks), HMM(2, restarts=2)
    trainer.fit(model, loader(sequences, 4, rank=trainer.global_rank, world_size=trainer.world_size))
    return {"state": state(model), "metrics": {"num_symbols": model.num_symbols}}


# What there is besides the rows of the table.
OTHERS: dict[str, Callable[..., dict[str, Any]]] = {
    "co-occurrence report": report,
    "retraining": retraining,
    "plain loader": plain_loader,
}


def main(job: str, path: Path) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    ranks = {"strategy": "ddp", "devices": world_size}
    names = [*ROWS, *OTHERS] if job == "ragged" else [*ROWS]
    results: dict[str, Any] = {}
    for name in names:
        with quiet_lightning(announcements=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results[name] = (
                OTHERS[name](**ranks) if name in OTHERS else {"ragged": ragged, "few": few}[job](name, **ranks)
            )
        if os.environ["RANK"] == "0":  # after every row, so that a failure names the first one that is missing
            torch.save(results, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    torch.distributed.barrier()


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1], Path(sys.argv[2]))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # The process ends here and now. A thread of torch's backend may otherwise abort it while the interpreter shuts
    # down, when all results are saved already, and a test must not depend on that. `test_exit_of_ranks.py` is about the
    # way in which a run of a user ends.
    os._exit(status)
