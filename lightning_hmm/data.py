"""The data of a training: what models and callbacks may read of it, and loaders that visit every sequence exactly once on any number of ranks.

The order of the sequences, shuffled or not, is cut into *global* batches, and rank r of W takes every W-th sequence of each,
from the r-th on. So all ranks have the same number of batches, the union over the ranks is the same whatever W is, and
nothing is repeated to even things out: a repeated sequence would be counted twice. The last batch may leave a rank with no
sequence at all; it then gets an empty batch, which adds nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences


class SequenceData(LightningDataModule):
    """What models and callbacks may read of the data that they are trained on.

    `datamodules.SequenceDataModule` and `InMemoryData` implement it. A data module of your own that derives from neither works as well, as long as
    the model needs nothing but batches.

    Attributes:
        columns: What is observed at each step, in order.
        batch_size: Number of sequences in one batch of all ranks together; ``None`` for all sequences in one batch.
        transition_probs: (K, K) transition probabilities of the model that the data were drawn from, if they are known.
        emission_probs: (K, V) symbol probabilities of the model that the data were drawn from, if they are known.
    """

    columns: Any = ()
    batch_size: int | None
    transition_probs: Tensor | None = None
    emission_probs: Tensor | None = None

    @property
    def train_sequences(self) -> Sequences:
        """The training set."""
        raise NotImplementedError

    @property
    def val_sequences(self) -> Sequences | None:
        """The validation set, if there is one."""
        raise NotImplementedError

    @property
    def test_sequences(self) -> Sequences | None:
        """The test set, if there is one."""
        return None

    @property
    def train_size(self) -> float:
        """The number of training sequences that are not empty, each counted with its weight."""
        train = self.train_sequences
        filled = train.lengths > 0
        return float(filled.sum() if train.weights is None else train.weights.cpu()[filled].sum())

    def true_states(self, part: Any) -> Sequences | None:
        """The states that the sequences of a part ("train", "val" or "test") were drawn from or labelled with, if they are known."""
        return None

    def train_on_validation(self, yes: bool = True) -> None:
        """Makes the training set the training and the validation part together, or the training part alone again."""
        raise NotImplementedError


def data_of(trainer: Trainer) -> SequenceData | None:
    """The data of a training; ``None`` where it has plain loaders or a data module of another kind."""
    datamodule = getattr(trainer, "datamodule", None)
    return datamodule if isinstance(datamodule, SequenceData) else None


class InMemoryData(SequenceData):
    """`Sequences` in memory as a data module.

    Args:
        train: The training set.
        val: The validation set, if there is one.
        batch_size: Number of sequences in a batch of all ranks together; ``None`` for all sequences in one batch.
        shuffle: Whether to draw a new order for every epoch.
        seed: Seed for the order.
    """

    def __init__(
        self, train: Sequences, val: Sequences | None, batch_size: int | None, shuffle: bool, seed: int
    ) -> None:
        super().__init__()
        self._train, self._val, self._trains_on_validation = train, val, False
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed

    @property
    def train_sequences(self) -> Sequences:
        return self._together if self._trains_on_validation else self._train

    @cached_property
    def _together(self) -> Sequences:
        return self._train if self._val is None else Sequences.cat([self._train, self._val])

    @property
    def val_sequences(self) -> Sequences | None:
        return self._val

    def train_on_validation(self, yes: bool = True) -> None:
        self._trains_on_validation = yes

    def _loader(self, sequences: Sequences, shuffle: bool) -> DataLoader[Sequences]:
        assert self.trainer is not None
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        return loader(sequences, self.batch_size, shuffle=shuffle, seed=self.seed, rank=rank, world_size=world_size)

    def train_dataloader(self) -> DataLoader[Sequences]:
        return self._loader(self.train_sequences, self.shuffle)

    def val_dataloader(self) -> DataLoader[Sequences] | list[Any]:
        return [] if self._val is None else self._loader(self._val, False)


class SequenceDataset(Dataset[Sequences]):
    """Map-style data set whose index is a whole batch: the numbers of its sequences.

    Args:
        sequences: where the sequences are, perhaps in a memory-mapped file.
        indices: which of them belong to the data set, in order; all of them if not given. They are looked up batch by batch,
            so that a part of a large file need not fit into memory.
    """

    def __init__(self, sequences: Sequences, indices: Tensor | None = None) -> None:
        self.sequences, self.indices = sequences, indices

    def __len__(self) -> int:
        return len(self.sequences) if self.indices is None else len(self.indices)

    def __getitem__(self, batch: Sequence[int]) -> Sequences:
        if isinstance(batch, int):
            raise TypeError(
                f"The index must be a list of sequence numbers, but is {batch} instead. If you set `Trainer(overfit_batches=...)`, which puts its own "
                "sampler in place of ours, use `limit_train_batches` and `limit_val_batches` instead."
            )
        if isinstance(batch, range) and batch.step == 1 and self.indices is None:
            # A view; and the whole is the very same object, so what was checked once stays checked.
            return self.sequences if len(batch) == len(self) else self.sequences[batch.start : batch.stop]
        chosen = torch.as_tensor(batch, dtype=torch.int64)
        part: Sequences = self.sequences[chosen if self.indices is None else self.indices[chosen]]
        return part


class GlobalBatchSampler(DistributedSampler[Sequence[int]]):
    """Yields this rank's part of each global batch, as sequence numbers.

    It is a `DistributedSampler` because that is what it does, and because Lightning leaves such a sampler alone: it would
    otherwise wrap it in its own, which repeats items until all ranks have equally many.

    Args:
        dataset: anything with a length, the number of sequences.
        batch_size: number of sequences in one batch of all ranks together; ``None`` makes one batch of everything.
        shuffle: draw a new order for every epoch, from `seed` and the epoch that `set_epoch` was told; never from the rank.
        seed: start of the random order.
        rank: which of the processes this is.
        world_size: how many processes share the work.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"`batch_size` must be positive, or None for everything in one batch, but is {batch_size} instead."
            )
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
        self.num_sequences: int = len(dataset)  # type: ignore[arg-type]
        self.batch_size = batch_size or max(1, self.num_sequences)

    def __iter__(self) -> Iterator[Sequence[int]]:
        order: Sequence[int] = range(self.num_sequences)
        if self.shuffle:
            order = torch.randperm(self.num_sequences, generator=generator(self.seed, "shuffle", self.epoch)).tolist()
        for first in range(0, self.num_sequences, self.batch_size):
            yield order[first : first + self.batch_size][self.rank :: self.num_replicas]

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return math.ceil(self.num_sequences / self.batch_size)


def loader(
    sequences: Sequences,
    batch_size: int | None = None,
    *,
    indices: Tensor | None = None,
    shuffle: bool = False,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> DataLoader[Sequences]:
    """A `DataLoader` of `Sequences` batches; the arguments are those of `SequenceDataset` and `GlobalBatchSampler`.

    Slicing a packed batch is cheap, so `num_workers` seldom helps; the workers share one copy of the sequences in shared memory.
    """
    dataset = SequenceDataset(sequences, indices)
    sampler = GlobalBatchSampler(dataset, batch_size, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
    return DataLoader(
        dataset,
        batch_size=None,  # the sampler makes the batches: one index is one batch
        sampler=sampler,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,  # numba's threads do not survive a fork
        persistent_workers=num_workers > 0,
        generator=generator(
            seed, "workers"
        ),  # a DataLoader draws a number each epoch: not from the global state, which no checkpoint holds
    )


def sequence_numbers(loader: DataLoader[Any]) -> Iterator[int]:
    """Yields the numbers in the data of this rank's sequences, in the order in which `loader` draws them for prediction."""
    if isinstance(loader.sampler, GlobalBatchSampler) and isinstance(loader.dataset, SequenceDataset):
        indices = loader.dataset.indices
        for batch in loader.sampler:
            yield from batch if indices is None else indices[list(batch)].tolist()
    elif (seen := getattr(loader.batch_sampler, "seen_batch_indices", None)) is not None:
        # Lightning wraps the batch sampler of a map-style data set for prediction, and the wrapper records the numbers.
        for batch_idx in itertools.count():
            yield from seen[batch_idx]
    else:
        yield from itertools.count()
