"""What all data modules share: the split into parts, storage as Arrow, and loaders that visit each sequence once.

A data module is a LightningDataModule with one method to write, `load_dataset`, and one attribute to set, `columns`. Constructors read no
data. Where the columns depend on the data, `open_source` finds them, when they are first used.
"""

from __future__ import annotations

import errno
import math
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import datasets
import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hmm.columns import STEP_COLUMNS, Column, narrowest
from lightning_hmm.data import SequenceData, loader
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import Vocabulary

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = get_args(Part)


T = TypeVar("T")


class FromSource(Generic[T]):
    """An attribute of a data module that may depend on the data. Reading it opens the source first.

    Args:
        default: Value of the attribute where nothing else is set.
    """

    def __init__(self, default: T) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = f"_{name}_from_source"

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self.default
        instance.open_once()
        value: T = instance.__dict__.get(self.key, self.default)
        return value

    def __set__(self, instance: Any, value: T) -> None:
        instance.__dict__[self.key] = value


class SequenceDataModule(SequenceData, ABC):
    """Sequences in three parts: train, val and test.

    Args:
        data_dir: folder of data and caches; if not given, the environment variable LIGHTNING_HMM_DATA, else "data".
        batch_size: number of sequences in one batch of all ranks together; ``None`` makes the whole part one batch, which is
            what batch EM wants.
        seed: start of everything random here: the split, the order of training, and data that is drawn.
        val_fraction: fraction of the sequences kept for validation, rounded down; a fixed validation part overrides it.
        test_fraction: the same for the test part.
        shuffle: train in a new order each epoch.
        num_workers: processes that prepare batches.

    Attributes:
        columns: what is observed at each step, in order. One categorical column means symbols; otherwise the values are vectors with
            one entry for each column, in which a categorical column holds the numbers of categories.
        vocabulary: the names of the symbols, if they have names.
        state_names: the names of the true states, if they have names.
        label_names: the names of the labels in the order of their numbers, if the sequences have labels with names.
        input_names: the names of the inputs, if the sequences have inputs.
        action_names: the names of the actions in the order of their numbers, if the sequences have actions with names.
        num_actions: the number of actions, if the sequences have actions.
    """

    columns = FromSource[list[Column]]([])
    vocabulary = FromSource[Vocabulary | None](None)
    state_names = FromSource[list[str] | None](None)
    label_names = FromSource[list[str] | None](None)
    input_names: list[str] | None = None
    action_names = FromSource[list[str] | None](None)
    num_actions = FromSource[int | None](None)

    def __init__(
        self,
        data_dir: str | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        shuffle: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        # Not to the logger: Lightning refuses to start when model and data have a word in common, such as `seed`, with two values.
        self.save_hyperparameters(logger=False)
        for name in [name for name, value in self.hparams.items() if not _is_plain(value)]:
            del self.hparams[name]  # a checkpoint must load with `weights_only=True`
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"`batch_size` must be positive, or None for the whole part in one batch, but is {batch_size} instead."
            )
        if num_workers < 0:
            raise ValueError(f"`num_workers` must not be negative, but is {num_workers} instead.")
        for name, fraction in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= fraction < 1:
                raise ValueError(f"`{name}` must be at least 0 and less than 1, but is {fraction} instead.")
        if Fraction(str(val_fraction)) + Fraction(str(test_fraction)) >= 1:
            raise ValueError(
                f"`val_fraction` and `test_fraction` must leave something to train on, but {val_fraction} + {test_fraction} is not less than 1."
            )
        self.data_dir = Path(data_dir if data_dir is not None else os.environ.get("LIGHTNING_HMM_DATA", "data"))
        self.batch_size, self.seed, self.shuffle, self.num_workers = batch_size, seed, shuffle, num_workers
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self._is_open = False
        self._sources: dict[Part, tuple[Sequences, Sequences | None, Tensor | None]] = {}
        self._gathered: dict[Part, Sequences] = {}
        self._trains_on_validation = False
        self._fixed_parts: set[str] = set()
        self._trains = self._scores_everything = False

    def open_source(self) -> None:
        """Finds out what depends on the data, such as `columns`. Called once, before any of it is used; nothing by default."""

    def open_once(self) -> None:
        """Calls `open_source` unless that was done before."""
        if not self._is_open:
            self._is_open = True  # what `open_source` sets, it may also read
            try:
                with no_progress_bars():
                    self.open_source()
            except BaseException:
                self._is_open = False
                raise

    @abstractmethod
    def load_dataset(self) -> datasets.Dataset | Mapping[str, datasets.Dataset]:
        """Builds or opens the data: the one method of a subclass.

        Gives a `datasets.Dataset` with a list column `values` (whole numbers are symbols, numbers or fixed-size lists of them
        are vectors) and, where known, list columns `states`, `labels`, `inputs`, `times` and `actions` and number column `weights`;
        see `as_table`. Or gives several under "train", "val" and "test" where these parts are fixed; "val" and "test" may be left
        out, and are then taken from "train".

        Runs on every rank and must give the same on each. What is slow or writes files (a download, a conversion) belongs
        into `prepare_data`, which Lightning runs once on each machine, or goes through `cached`.
        """

    def setup(self, stage: str | None = None) -> None:
        """Reads the data and splits it, once, whatever the stage."""
        if stage == "fit":
            self._trains = True
            self.score_everything(False)
        if self._sources:
            return
        self.open_once()
        with no_progress_bars():
            loaded = self.load_dataset()
        given = loaded if isinstance(loaded, Mapping) else {"train": loaded}
        if "train" not in given or not set(given) <= set(PARTS):
            raise ValueError(
                f"`load_dataset` must give the part 'train' and perhaps 'val' and 'test', but gives {sorted(given)} instead."
            )
        if len(given["train"]) == 0:
            raise ValueError(f"{type(self).__name__} must have at least one training sequence, but has none.")
        if not self.columns:
            raise ValueError(f"{type(self).__name__} must set `columns`, but has none.")
        opened = {part: _open(dataset) for part, dataset in given.items()}
        for values, _ in opened.values():
            values.check_columns(self.columns)
        self._fixed_parts = {part for part in given if part != "train"}
        indices = self.split(len(given["train"]), [part for part in ("val", "test") if part not in given])
        self._sources = {
            part: (*opened[part], None) if part in given and part != "train" else (*opened["train"], indices[part])
            for part in PARTS
        }

    def split(self, num_sequences: int, parts: list[str] | None = None) -> dict[str, Tensor | None]:
        """The numbers of the sequences in "train" and in each of `parts` ("val" and "test"), drawn by `seed`, each in rising order.

        A part of fraction f has exactly floor(f N) of the N sequences, so at least one is left to train on. ``None`` stands for
        all of them in order, which needs no copy.
        """
        order = torch.randperm(num_sequences, generator=generator(self.seed, "split"))
        indices: dict[str, Tensor | None] = {}
        first = 0
        for part in ["val", "test"] if parts is None else parts:
            fraction = Fraction(
                str(self.val_fraction if part == "val" else self.test_fraction)
            )  # 0.29 of 100 is 29, not floor(28.999...)
            last = first + math.floor(fraction * num_sequences)
            indices[part] = order[first:last].sort().values
            first = last
        return {"train": order[first:].sort().values if first else None, **indices}

    # What a model or a user may ask for

    @property
    def train_sequences(self) -> Sequences:
        return self._part("train")

    @property
    def val_sequences(self) -> Sequences:
        return self._part("val")

    @property
    def test_sequences(self) -> Sequences:
        return self._part("test")

    @property
    def num_symbols(self) -> int | None:
        """The number of symbols; ``None`` where the values are vectors."""
        return self.columns[0].num_categories if len(self.columns) == 1 else None

    @property
    def num_features(self) -> int | None:
        """The number of entries of a vector; ``None`` where a column is categorical."""
        return len(self.columns) if self.columns and not any(column.is_categorical for column in self.columns) else None

    @property
    def symbol_names(self) -> list[str] | None:
        """The names of the symbols, if they have names; the command line passes them to the model, whose checkpoint keeps them."""
        return self.columns[0].category_names if len(self.columns) == 1 else None

    @property
    def unknown_symbol(self) -> str | None:
        return None if self.vocabulary is None else self.vocabulary.unknown

    @property
    def train_size(self) -> float:
        """Number of training sequences that are not empty, each counted with its weight."""
        values, _, indices = self._source("train")
        weights = (values.lengths > 0).double() if values.weights is None else values.weights * (values.lengths > 0)
        return float((weights if indices is None else weights[indices]).sum())

    def true_states(self, part: Part) -> Sequences | None:
        """The states that the sequences of a part ("train", "val" or "test") were drawn from or labelled with, if they are known."""
        _, states, indices = self._source(part)
        return states if states is None or indices is None else states[indices]

    def _source(self, part: Part) -> tuple[Sequences, Sequences | None, Tensor | None]:
        if part not in PARTS:
            raise ValueError(f"`part` must be one of {', '.join(PARTS)}, but is {part!r} instead.")
        if not self._sources:
            raise RuntimeError(f"The sequences are not read yet. Call `setup()` of the {type(self).__name__} first.")
        if part == "train" and self._trains_on_validation:
            return self._together, None, None
        if part != "train" and self._scores_everything and part not in self._fixed_parts:
            return (*self._sources["train"][:2], None)
        return self._sources[part]

    def score_everything(self, yes: bool = True) -> None:
        """Uses all sequences for validation and test, except where these parts have data of their own.

        This is for a model that was trained on other data. It has no effect once this module has been used for training.
        """
        self._scores_everything = yes and not self._trains
        for part in PARTS[1:]:
            self._gathered.pop(part, None)

    def part_size(self, part: Part) -> int:
        """Returns the number of sequences in a part ("train", "val" or "test")."""
        values, _, indices = self._source(part)
        return len(values) if indices is None else len(indices)

    def _describe(self, part: Literal["val", "test"]) -> str:
        """Returns how many sequences the part has, and why."""
        size, everything = self.part_size(part), len(self._sources["train"][0])
        if part in self._fixed_parts:
            return f"the {size} sequences of the {part} part"
        if self._scores_everything:
            return f"all {size} sequences, since the model was trained on other data"
        return f"{size} of {everything} sequences (`{part}_fraction` is {self.val_fraction if part == 'val' else self.test_fraction})"

    def train_on_validation(self, yes: bool = True) -> None:
        """From now on training data are the training and the validation part together; or, taken back, the training part alone."""
        if yes and not self._trains_on_validation:
            self._together = Sequences.cat([self._part("train"), self.as_training(self._part("val"))])
        self._trains_on_validation = yes
        self._gathered.pop("train", None)

    def as_training(self, sequences: Sequences) -> Sequences:
        """Sequences of another part as they would be in training; modules that cut their training data into pieces cut here."""
        return sequences

    def _part(self, part: Part) -> Sequences:
        """The part as one batch, gathered once from wherever its sequences lie; without a copy if it is all of its source."""
        values, _, indices = self._source(part)
        if part not in self._gathered:
            self._gathered[part] = values if indices is None else values[indices]
            self._gathered[part].check_columns(self.columns)  # marks it as checked, so that no epoch checks it again
        return self._gathered[part]

    # Loaders

    def train_dataloader(self) -> DataLoader[Sequences]:
        return self._loader("train", self.shuffle)

    def val_dataloader(self) -> DataLoader[Sequences]:
        self._announce("val", "validate")
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Sequences]:
        self._announce("test", "test")
        return self._loader("test")

    def _announce(self, part: Literal["val", "test"], fn: str) -> None:
        """Reports how many sequences `Trainer.validate` or `Trainer.test` scores. Without any, it would return no metrics; this raises an error."""
        if self.trainer is None or self.trainer.state.fn != fn:
            return
        if not self.part_size(part):
            raise ValueError(
                f"`{fn}` needs at least one sequence, but has {self._describe(part)}. Increase the fraction, or use data with more sequences."
            )
        rank_zero_info(f"Scoring {self._describe(part)}.")

    def predict_dataloader(self) -> DataLoader[Sequences]:
        """All sequences that training, and what was not given a place of its own, are taken from; in the order of the data."""
        return self._loader("train", whole=True)

    def _loader(self, part: Part, shuffle: bool = False, whole: bool = False) -> DataLoader[Sequences]:
        values, _, indices = self._source(part)
        if whole:
            indices = None
        elif self.batch_size is None:  # then all of it is in memory at once anyway
            values, indices = self._part(part), None
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        return loader(
            values,
            self.batch_size,
            indices=indices,
            shuffle=shuffle,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            num_workers=self.num_workers,
        )

    # Storage, for subclasses

    def cached(self, name: str, build: Callable[[], pa.Table]) -> tuple[datasets.Dataset, dict[str, str]]:
        """The table that `build` makes, kept as ``<data_dir>/cache/<name>.arrow`` and memory-mapped, and its schema's metadata.

        The name must tell apart whatever the table depends on. The file is one record batch, which is what can be read as
        packed sequences without a copy, and appears in one move, so that several processes may build it at the same time. Where
        the folder may not be written to, the table stays in memory.
        """
        path = self.data_dir / "cache" / f"{name}.arrow"
        if not path.exists():
            table = build().combine_chunks()
            unfinished = path.with_suffix(f".{uuid.uuid4().hex}.part")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                    writer.write_table(table, max_chunksize=max(1, len(table)))
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                rank_zero_warn(
                    f"{path.parent} cannot be written to, so the data is read again each time. Set `data_dir` to a folder of your own."
                )
                return as_dataset(table), metadata_of(table.schema)
            unfinished.replace(path)
        with pa.memory_map(str(path)) as source:
            metadata = metadata_of(pa.ipc.open_stream(source).schema)
        return datasets.Dataset.from_file(str(path)), metadata


def as_table(sequences: Sequences, states: Sequences | None = None) -> pa.Table:
    """Sequences as an Arrow table; `from_table` is the way back.

    Symbols are stored in the narrowest type that holds them. What is in that type, and everything else, is not copied. The columns are
    `values`, and `states`, `weights`, `labels`, `inputs`, `times` and `actions` where they are given.
    """
    values = narrowest(sequences.values) if sequences.is_discrete else sequences.values
    columns = {"values": _as_column(values, sequences.offsets)}
    if states is not None:
        columns["states"] = _as_column(states.values, states.offsets)
    for name in STEP_COLUMNS:
        if (column := getattr(sequences, name)) is not None:
            columns[name] = _as_column(column, sequences.offsets)
    if sequences.weights is not None:
        columns["weights"] = pa.array(sequences.weights.numpy())
    return pa.table(columns)


def as_dataset(table: pa.Table) -> datasets.Dataset:
    """An Arrow table in memory as a `datasets.Dataset`."""
    return datasets.Dataset(datasets.table.InMemoryTable(table))


def metadata_of(schema: pa.Schema) -> dict[str, str]:
    """What is noted in the schema of a table beside its columns."""
    return {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}


def from_table(table: pa.Table) -> Sequences:
    """The sequences of a table of `as_table`, with their weights and all columns, on the memory of the table."""
    weights = table["weights"].to_numpy().copy() if "weights" in table.column_names else None
    return Sequences.from_arrow(
        table["values"], weights, **{name: table[name] for name in STEP_COLUMNS if name in table.column_names}
    )


def _as_column(packed: Tensor, offsets: Tensor) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(packed.numpy()).reshape(-1))
    steps = flat if packed.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, packed.shape[1])
    return pa.LargeListArray.from_arrays(pa.array(offsets.numpy()), steps)


def _open(dataset: datasets.Dataset) -> tuple[Sequences, Sequences | None]:
    """The sequences and the states, on the data set's own memory."""
    table = dataset.with_format("arrow")[:]
    return from_table(table), Sequences.from_arrow(table["states"]) if "states" in table.column_names else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silences the bars of `datasets`, which would run into Lightning's own."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
