"""Pruning of improbable transitions."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hmm import inference
from lightning_hmm.data import data_of
from lightning_hmm.inference.cloned import Blocks, ClonedSymbols, Layout
from lightning_hmm.models.cloned import ClonedHMM
from lightning_hmm.sequences import Sequences


class Pruning(Callback):
    """Removes improbable transitions of a `ClonedHMM`, after the last update of an epoch.

    The remaining transitions are stored as single entries instead of in blocks, so that memory and time are
    proportional to their number. Processing a single entry takes about 35 times as long as processing an entry of a
    block. Pruning is therefore postponed until few enough transitions remain. If memory is scarce, set a larger
    `density`, up to 1/3. The increase in bits per symbol is printed.

    Args:
        threshold: Minimum probability of a transition. The most probable transition of each state is always kept.
        density: Maximum fraction of the stored transitions that remain. If more would remain, nothing is pruned.
        every_n_epochs: Number of epochs between attempts.
        max_steps: Number of steps of the training data on which the loss of likelihood is measured. The default is all
            of them. If pruning would make these data impossible, nothing is pruned.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import Pruning
        >>> pruning = Pruning(threshold=1e-4, every_n_epochs=10)
        >>> trainer = Trainer(callbacks=[pruning], logger=False, accelerator="cpu")
        >>> pruning.density
        0.02
    """

    def __init__(
        self, threshold: float = 1e-5, density: float = 0.02, every_n_epochs: int = 1, max_steps: int | None = None
    ) -> None:
        for name, value in {"threshold": threshold, "density": density}.items():
            if not 0 < value <= 1:
                raise ValueError(f"`{name}` must be above 0 and at most 1, but is {value} instead.")
        for name, count in {"every_n_epochs": every_n_epochs, "max_steps": max_steps}.items():
            if count is not None and count < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {count} instead.")
        self.threshold = threshold
        self.density = density
        self.every_n_epochs = every_n_epochs
        self.max_steps = max_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, ClonedHMM):
            raise TypeError(f"Pruning is for a ClonedHMM, but the model is a {type(pl_module).__name__} instead.")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # This runs before the end of the epoch, so that a checkpoint of its last batch contains the pruned model.
        if not trainer.is_last_batch or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        before = pl_module.layout.num_entries
        keep = pl_module.above(self.threshold)
        kept = int(keep.sum())
        # A layout of single entries is pruned again if this removes at least 10 % of them.
        if kept > (0.9 if pl_module.layout.is_sparse else self.density) * before:
            return
        source = data_of(trainer)
        data = None if source is None else _first_steps(source.train_sequences, self.max_steps)
        cost = ""
        if data is not None:
            bits = _bits(pl_module, data, *pl_module.transition.pruned(keep)) - _bits(
                pl_module, data, pl_module.layout, pl_module.transition.probs.detach()
            )
            if not bool(bits.isfinite().all()):
                rank_zero_warn(
                    f"Not pruned after epoch {trainer.current_epoch}: without the transitions below "
                    f"{self.threshold:g} some training data would be impossible. A smaller `threshold` may do."
                )
                return
            cost = f", at a cost of {float(bits.max()):.2g} bits per symbol ({data.num_steps:,} steps of training data)"
        prune_in_training(trainer, pl_module, keep)
        rank_zero_info(
            f"Pruned after epoch {trainer.current_epoch}: {kept:,} of {before:,} transitions stay, "
            f"{pl_module.layout.density:.2%} of all{cost}."
        )


def prune_in_training(trainer: Trainer, model: ClonedHMM, keep: Tensor) -> None:
    """Prunes the model during training, together with the discounted counts of online EM.

    The parameter is the same object afterwards, with fewer entries.
    """
    (optimizer,) = trainer.optimizers
    state = optimizer.state.get(model.transition.probs, {})
    model.prune(keep)
    if "statistics" in state:
        state["statistics"] = state["statistics"][:, keep.to(state["statistics"].device)].contiguous()


def _first_steps(sequences: Sequences, max_steps: int | None) -> Sequences:
    """Returns the first `max_steps` steps of the sequences with positive weight.

    The sequence that contains the last of these steps is truncated, and later sequences are empty.
    """
    sequences = sequences.counted()
    if max_steps is None:
        return sequences
    offsets = sequences.offsets.clamp(max=max_steps)
    return sequences.with_steps(slice(int(offsets[-1])), offsets, sequences.weights)


def _bits(model: ClonedHMM, sequences: Sequences, layout: Layout, probs: Tensor) -> Tensor:
    """Returns the (restarts,) bits per observed symbol with the given transitions, weighted by sequence."""
    evidence: Any = ClonedSymbols.of(sequences, layout)
    weights = sequences.weights
    starts = model.initial.log_probs.detach()
    scores = [
        inference.log_likelihood(
            initial, Blocks(row, layout), evidence, sequences.offsets, weights, dtype=model.message_dtype
        ).sum()
        for initial, row in zip(starts, probs.detach(), strict=True)
    ]
    return -torch.stack(scores) / max(float(sequences.num_observed()), 1.0) / math.log(2)
