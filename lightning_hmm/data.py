"""The interface of the data modules, and loaders that visit every sequence exactly once on any number of ranks.

The sequences, shuffled or not, are divided into *global* batches. Rank r of W takes sequences r, r + W, r + 2 W, ... of
each global batch. All ranks have the same number of batches, and the union over the ranks does not depend on W. No
sequence is repeated to give all ranks the same number, because EM would count it twice. A rank without a sequence in
the last batch gets an empty batch.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences


class SequenceData(LightningDataModule, ABC):
    """The interface through which models and callbacks read the data of a training run.

    `datamodules.SequenceDataModule` and `InMemoryData` implement it. Other data modules can be used with models that
    need nothing but batches.

    Attributes:
        columns: Observed columns, in order.
        batch_size: Global batch size, over all ranks; ``None`` for all sequences in one batch.
        transition_probs: (K, K) transition probabilities of the model that the data were drawn from, if they are known.
        emission_probs: (K, V) symbol probabilities of the model that the data were drawn from, if they are known.
    """

    columns: Any = ()
    batch_size: int | None
    transition_probs: Tensor | None = None
    emission_probs: Tensor | None = None

    @property
    @abstractmethod
    def train_sequences(self) -> Sequences:
        """The training set."""

    @property
    @abstractmethod
    def val_sequences(self) -> Sequences | None:
        """The validation set, if there is one."""

    @property
    def test_sequences(self) -> Sequences | None:
        """The test set, if there is one."""
        return None

    @property
    def train_size(self) -> float:
        """The weighted number of training sequences that are not empty."""
        train = self.train_sequences
        filled = train.lengths > 0
        return float(filled.sum() if train.weights is None else train.weights.cpu()[filled].sum())

    @property
    def knows_states(self) -> bool:
        """Whether the training sequences have labels or state weights, with which a model is trained."""
        return self.train_sequences.has_known_states

    def true_states(self, part: Any) -> Sequences | None:
        """Returns the true states of a part ("train", "val" or "test"), with -1 for unknown ones, if there are any.

        They are used to compute accuracies only. By default they are the labels of the part.
        """
        sequences = getattr(self, f"{part}_sequences")
        return None if sequences is None or sequences.labels is None else sequences.with_values(sequences.labels)

    @abstractmethod
    def train_on_validation(self, yes: bool = True) -> None:
        """Adds the validation part to the training set, or removes it again.

        Args:
            yes: Whether to train on the validation part as well.
        """


def data_of(trainer: Trainer) -> SequenceData | None:
    """Returns the data module of a Trainer; ``None`` if it has plain loaders or a data module of another kind."""
    datamodule = getattr(trainer, "datamodule", None)
    return datamodule if isinstance(datamodule, SequenceData) else None


class InMemoryData(SequenceData):
    """`Sequences` in memory as a data module.

    Args:
        train: The training set.
        val: The validation set, if there is one.
        batch_size: Global batch size, over all ranks; ``None`` for all sequences in one batch.
        shuffle: Whether to draw a new order for every epoch.
        seed: Seed for the order.
    """

    def __init__(
        self, train: Sequences, val: Sequences | None, batch_size: int | None, shuffle: bool, seed: int
    ) -> None:
        super().__init__()
        self._train, self._val = train, val
        self._trains_on_validation = False
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
        sequences: All sequences, possibly in a memory-mapped file.
        indices: Numbers of the sequences of the data set, in order. The default is all sequences. They are looked up
            batch by batch, so that a part of a large file need not fit into memory.
    """

    def __init__(self, sequences: Sequences, indices: Tensor | None = None) -> None:
        self.sequences, self.indices = sequences, indices

    def __len__(self) -> int:
        return len(self.sequences) if self.indices is None else len(self.indices)

    def __getitem__(self, batch: Sequence[int]) -> Sequences:
        if isinstance(batch, int):
            raise TypeError(
                f"The index must be a list of sequence numbers, but is {batch} instead. `Trainer(overfit_batches=...)` "
                "replaces the sampler; use `limit_train_batches` and `limit_val_batches` instead."
            )
        if isinstance(batch, range) and batch.step == 1 and self.indices is None:
            # The result is a view. The whole data set is the same object, so that it is checked only once.
            return self.sequences if len(batch) == len(self) else self.sequences[batch.start : batch.stop]
        chosen = torch.as_tensor(batch, dtype=torch.int64)
        part: Sequences = self.sequences[chosen if self.indices is None else self.indices[chosen]]
        return part


class GlobalBatchSampler(DistributedSampler[Sequence[int]]):
    """Yields this rank's part of each global batch, as sequence numbers.

    It derives from `DistributedSampler`, because Lightning would wrap any other sampler in one that repeats items until
    all ranks have the same number.

    Args:
        dataset: Data set whose length is the number of sequences.
        batch_size: Global batch size, over all ranks; ``None`` for all sequences in one batch.
        shuffle: Whether to draw a new order for every epoch. It depends on `seed` and on the epoch given to
            `set_epoch`, not on the rank.
        seed: Seed for the order.
        rank: Number of this process.
        world_size: Number of processes.
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
        """Returns the number of batches, which is the same on every rank."""
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
    """Returns a `DataLoader` of `Sequences` batches.

    Args:
        sequences: All sequences, possibly in a memory-mapped file.
        batch_size: Global batch size, over all ranks; ``None`` for all sequences in one batch.
        indices: Numbers of the sequences that are loaded. The default is all sequences.
        shuffle: Whether to draw a new order for every epoch.
        seed: Seed for the order.
        rank: Number of this process.
        world_size: Number of processes.
        num_workers: Number of worker processes, which share one copy of the sequences. Slicing a packed batch is cheap,
            so workers rarely make loading faster.

    Example:
        >>> batches = loader(Sequences.from_list([[0, 1], [1], [2, 2, 0]]), batch_size=2)
        >>> [batch.tolist() for batch in batches]
        [[[0, 1], [1]], [[2, 2, 0]]]
    """
    dataset = SequenceDataset(sequences, indices)
    sampler = GlobalBatchSampler(dataset, batch_size, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
    return DataLoader(
        dataset,
        batch_size=None,  # The sampler creates the batches: one index is one batch.
        sampler=sampler,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,  # Threads of numba do not survive a fork.
        persistent_workers=num_workers > 0,
        # A DataLoader draws one number per epoch, which must not change the global state: checkpoints do not contain
        # it.
        generator=generator(seed, "workers"),
    )


def sequence_numbers(loader: DataLoader[Any]) -> Iterator[int]:
    """Yields the numbers of this rank's sequences in the order in which `loader` returns them for prediction."""
    if isinstance(loader.sampler, GlobalBatchSampler) and isinstance(loader.dataset, SequenceDataset):
        indices = loader.dataset.indices
        for batch in loader.sampler:
            yield from batch if indices is None else indices[list(batch)].tolist()
    elif (seen := getattr(loader.batch_sampler, "seen_batch_indices", None)) is not None:
        # For prediction, Lightning wraps the batch sampler of a map-style data set, and the wrapper records the
        # numbers.
        for batch_idx in itertools.count():
            yield from seen[batch_idx]
    else:
        yield from itertools.count()
