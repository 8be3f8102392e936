"""Initialization of a composed HMM from the batches of a plain `DataLoader`, which has no datamodule."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lightning_hmm.columns import symbol_column
from lightning_hmm.distributions.starting import STEPS_TO_START_FROM
from lightning_hmm.sequences import Sequences

if TYPE_CHECKING:
    from lightning_hmm.models.hmm import HMM


def initialize_from_loader(model: HMM) -> None:
    """Initializes a model from the first training batches. All ranks use the parameters of the first rank."""
    trainer = model.trainer
    trainer.fit_loop.setup_data()  # Lightning creates the loader after the optimizer, which requires the parameters.
    batches, num_symbols = _first_batches(model)
    sequences = Sequences.cat(batches)
    if not model.is_allocated and sequences.is_discrete:
        strategy = trainer.strategy
        num_symbols = int(strategy.reduce(torch.tensor(num_symbols, device=strategy.root_device), reduce_op="max"))
        model.allocate(symbol_column(num_symbols))
    model.initialize(sequences)
    if trainer.world_size > 1:
        model.load_state_dict(trainer.strategy.broadcast(model.state_dict()))


def _first_batches(model: HMM) -> tuple[list[Sequences], int]:
    """Returns enough batches to initialize from, and the number of symbols, for which all batches are read."""
    loader: Any = model.trainer.train_dataloader
    limit = model.trainer.num_training_batches
    batches: list[Sequences] = []
    steps = num_symbols = 0
    for batch in islice(loader, int(limit) if math.isfinite(limit) else None):
        model._require_sequences(batch)
        if steps < STEPS_TO_START_FROM:
            batches.append(batch)
            steps += batch.num_steps
        if batch.is_discrete and batch.num_steps:
            num_symbols = max(num_symbols, int(batch.values.max()) + 1)
        elif steps >= STEPS_TO_START_FROM:
            break
    return batches, num_symbols
