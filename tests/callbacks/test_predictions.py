"""Files of predictions: each sequence has its number in the data."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_hmm import Sequences, StandardHMM
from lightning_hmm.callbacks import PredictionWriter
from lightning_hmm.data import loader

LISTS = [[0] * (n + 1) for n in range(5)]  # sequence n has n + 1 steps
SEQUENCES = Sequences.from_list(LISTS)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(LISTS)


@pytest.mark.filterwarnings("ignore:Your `predict_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (lambda: loader(SEQUENCES, 2), [0, 1, 2, 3, 4]),
        (lambda: loader(SEQUENCES), [0, 1, 2, 3, 4]),
        (lambda: loader(SEQUENCES, 2, indices=torch.tensor([4, 1, 3])), [4, 1, 3]),
        (lambda: loader(SEQUENCES, 2, shuffle=True, seed=4), None),
        (lambda: DataLoader(LISTS, batch_size=2, collate_fn=Sequences.from_list), [0, 1, 2, 3, 4]),
        (lambda: DataLoader(LISTS, batch_size=2, shuffle=True, collate_fn=Sequences.from_list), None),
        (lambda: DataLoader(Stream(), batch_size=2, collate_fn=Sequences.from_list), [0, 1, 2, 3, 4]),
    ],
    ids=["batches", "one batch", "indices", "shuffled", "DataLoader", "shuffled DataLoader", "stream"],
)
def test_sequences_have_their_numbers_without_a_datamodule(tmp_path, batches, expected):
    trainer = Trainer(
        callbacks=[PredictionWriter(str(tmp_path / "found.jsonl"))],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
    )
    trainer.predict(StandardHMM(num_states=2, num_symbols=3), batches())
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    numbers = [line["sequence"] for line in lines]
    assert [len(line["states"]) for line in lines] == [number + 1 for number in numbers]
    assert numbers == expected if expected else sorted(numbers) == [0, 1, 2, 3, 4]
