"""Base class of the data modules: split into parts, storage as Arrow tables, and data loaders.

A data module is a `LightningDataModule`. A subclass implements `load_dataset` and sets `columns`. Constructors do not
read data. If the columns depend on the data, the subclass sets them in `open_source`, which runs when they are first
used.
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

from datamodules.checks import require_fraction
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
        default: Value of the attribute if no other value is set.
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
    """Base class of all data modules: sequences in the three parts "train", "val" and "test".

    Derive from it to add a data set, as the example does. To read your own files, use `FileDataModule`.

    Args:
        data_dir: Folder of data and caches. Defaults to the environment variable LIGHTNING_HMM_DATA, or to "data".
        batch_size: Number of sequences per batch over all ranks. ``None`` puts a whole part into one batch, which is
            the usual choice for batch EM.
        seed: Seed for the split, the order of training sequences, and drawn data.
        val_fraction: Fraction of the sequences that are held out for validation, rounded down. It is ignored if the
            data have a validation part of their own.
        test_fraction: Fraction of the sequences that are held out for testing, likewise.
        shuffle: Whether to train in a new random order in each epoch.
        num_workers: Number of processes that prepare batches.

    Attributes:
        columns: Columns observed at each step. A single categorical column means symbols. Otherwise the values are
            vectors with one entry per column, where the entry of a categorical column is the index of the category.
        vocabulary: Names of the symbols, or ``None``.
        state_names: Names of the true states, or ``None``.
        label_names: Names of the labels in the order of their indices, or ``None``.
        input_names: Names of the inputs, or ``None``.
        action_names: Names of the actions in the order of their indices, or ``None``.
        num_actions: Number of actions, or ``None`` if the sequences have no actions.

    Example:
        >>> import torch
        >>> from datamodules.base import as_dataset, as_table
        >>> from lightning_hmm.columns import symbol_column
        >>> from lightning_hmm.sequences import Sequences
        >>> class CoinDataModule(SequenceDataModule):
        ...     def __init__(self, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.columns = symbol_column(2, ["heads", "tails"])
        ...
        ...     def load_dataset(self):
        ...         return as_dataset(as_table(Sequences.from_lengths(torch.tensor([0, 1, 1, 0, 0]), [3, 2])))
        >>> data = CoinDataModule(val_fraction=0, test_fraction=0.5)
        >>> data.setup()
        >>> len(data.train_sequences), len(data.test_sequences)
        (1, 1)
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
        # The logger is excluded because Lightning raises an error if the model and the data have a hyperparameter of
        # the same name, such as `seed`, with different values.
        self.save_hyperparameters(logger=False)
        for name in [name for name, value in self.hparams.items() if not _is_plain(value)]:
            del self.hparams[name]  # Checkpoints must load with `weights_only=True`.
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"`batch_size` must be positive, or None for one batch per part, but is {batch_size} instead."
            )
        if num_workers < 0:
            raise ValueError(f"`num_workers` must not be negative, but is {num_workers} instead.")
        require_fraction(val_fraction=val_fraction, test_fraction=test_fraction)
        if Fraction(str(val_fraction)) + Fraction(str(test_fraction)) >= 1:
            raise ValueError(
                f"`val_fraction` and `test_fraction` must sum to less than 1, but are {val_fraction} and "
                f"{test_fraction}."
            )
        self.data_dir = Path(data_dir if data_dir is not None else os.environ.get("LIGHTNING_HMM_DATA", "data"))
        self.batch_size = batch_size
        self.seed = seed
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.shuffle = shuffle
        self.num_workers = num_workers
        self._is_open = False
        self._sources: dict[Part, tuple[Sequences, Sequences | None, Tensor | None]] = {}
        self._gathered: dict[Part, Sequences] = {}
        self._trains_on_validation = False
        self._fixed_parts: set[str] = set()
        self._trains = False
        self._scores_everything = False

    def open_source(self) -> None:
        """Sets the attributes that depend on the data, such as `columns`.

        It is called once, before any of these attributes is read. The default implementation does nothing.
        """

    def open_once(self) -> None:
        """Calls `open_source` on the first call only."""
        if not self._is_open:
            self._is_open = True  # `open_source` may read the attributes that it sets.
            try:
                with no_progress_bars():
                    self.open_source()
            except BaseException:
                self._is_open = False
                raise

    @abstractmethod
    def load_dataset(self) -> datasets.Dataset | Mapping[str, datasets.Dataset]:
        """Builds or opens the data. Every subclass implements this method.

        Returns a `datasets.Dataset` with a list column `values`: integers for symbols, floats or fixed-size lists of
        floats for vectors. Optional list columns are `states`, `labels`, `inputs`, `times`, `actions` and
        `state_weights`; `weights` has one number per sequence. See `as_table`. Models are trained on `labels` and
        `state_weights`. The true `states` are used only to evaluate models. If the parts are fixed, returns a
        dictionary of data sets with the key "train" and optionally "val" and "test"; missing parts are taken from
        "train".

        The method runs on every rank and must return the same data on each. Slow steps and steps that write files, such
        as a download or a conversion, belong in `prepare_data`, which Lightning runs once per machine, or in `cached`.
        """

    def setup(self, stage: str | None = None) -> None:
        """Reads and splits the data. Only the first call does so, for any stage."""
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
                f"`load_dataset` must return 'train' and optionally 'val' and 'test', but returns {sorted(given)}."
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
        """Returns the indices of the sequences in "train" and in each of `parts`, drawn with `seed` and sorted.

        A part with fraction f has exactly floor(f N) of the N sequences, so at least one remains for training. ``None``
        means all sequences in their order, which needs no copy.

        Args:
            num_sequences: Number of sequences N.
            parts: Parts to split off, by default "val" and "test".
        """
        order = torch.randperm(num_sequences, generator=generator(self.seed, "split"))
        indices: dict[str, Tensor | None] = {}
        first = 0
        for part in ["val", "test"] if parts is None else parts:
            last = first + share(self.val_fraction if part == "val" else self.test_fraction, num_sequences)
            indices[part] = order[first:last].sort().values
            first = last
        return {"train": order[first:].sort().values if first else None, **indices}

    # Sequences and their properties

    @property
    def train_sequences(self) -> Sequences:
        """Training sequences as one batch."""
        return self._part("train")

    @property
    def val_sequences(self) -> Sequences:
        """Validation sequences as one batch."""
        return self._part("val")

    @property
    def test_sequences(self) -> Sequences:
        """Test sequences as one batch."""
        return self._part("test")

    @property
    def num_symbols(self) -> int | None:
        """Number of symbols, or ``None`` if the values are vectors."""
        return self.columns[0].num_categories if len(self.columns) == 1 else None

    @property
    def num_features(self) -> int | None:
        """Number of entries per vector, or ``None`` if a column is categorical."""
        return len(self.columns) if self.columns and not any(column.is_categorical for column in self.columns) else None

    @property
    def symbol_names(self) -> list[str] | None:
        """Names of the symbols, or ``None``. The command line passes them to the model, which saves them."""
        return self.columns[0].category_names if len(self.columns) == 1 else None

    @property
    def unknown_symbol(self) -> str | None:
        """Name of the symbol that replaces names outside the vocabulary, or ``None``."""
        return None if self.vocabulary is None else self.vocabulary.unknown

    @property
    def train_size(self) -> float:
        """Total weight of the training sequences that are not empty; their number if they have no weights."""
        values, _, indices = self._source("train")
        weights = (values.lengths > 0).double() if values.weights is None else values.weights * (values.lengths > 0)
        return float((weights if indices is None else weights[indices]).sum())

    def true_states(self, part: Part) -> Sequences | None:
        """Returns the true states of a part ("train", "val" or "test"), or ``None`` if they are not known.

        They are the column `states` of the data set, or else the labels.
        """
        _, states, indices = self._source(part)
        if states is None:
            return super().true_states(part)
        return states if indices is None else states[indices]

    @property
    def knows_states(self) -> bool:
        return self._source("train")[0].has_known_states

    def _source(self, part: Part) -> tuple[Sequences, Sequences | None, Tensor | None]:
        """Returns sequences, their true states, and the indices of those in the part (``None`` for all)."""
        if part not in PARTS:
            raise ValueError(f"`part` must be one of {', '.join(PARTS)}, but is {part!r} instead.")
        if not self._sources:
            raise RuntimeError(f"No sequences have been read. Call `setup()` of the {type(self).__name__} first.")
        if part == "train" and self._trains_on_validation:
            return self._together, None, None
        if part != "train" and self._scores_everything and part not in self._fixed_parts:
            return (*self._sources["train"][:2], None)
        return self._sources[part]

    def score_everything(self, yes: bool = True) -> None:
        """Uses all sequences for validation and testing, except in parts that have data of their own.

        This is for a model that was trained on other data. It has no effect once this module has been used for
        training.
        """
        self._scores_everything = yes and not self._trains
        for part in PARTS[1:]:
            self._gathered.pop(part, None)

    def part_size(self, part: Part) -> int:
        """Returns the number of sequences in a part ("train", "val" or "test")."""
        values, _, indices = self._source(part)
        return len(values) if indices is None else len(indices)

    def _describe(self, part: Literal["val", "test"]) -> str:
        """Returns the number of sequences in the part and how it was determined, for a message."""
        size, everything = self.part_size(part), len(self._sources["train"][0])
        if part in self._fixed_parts:
            return f"the {size} sequences of the {part} part"
        if self._scores_everything:
            return f"all {size} sequences, since the model was trained on other data"
        fraction = self.val_fraction if part == "val" else self.test_fraction
        return f"{size} of {everything} sequences (`{part}_fraction` is {fraction})"

    def train_on_validation(self, yes: bool = True) -> None:
        """Trains on the training and validation parts together, or on the training part alone if `yes` is false."""
        if yes and not self._trains_on_validation:
            self._together = Sequences.cat([self._part("train"), self.as_training(self._part("val"))])
        self._trains_on_validation = yes
        self._gathered.pop("train", None)

    def as_training(self, sequences: Sequences) -> Sequences:
        """Returns sequences of another part in the form of training sequences.

        Modules that cut their training data into shorter sequences override this method.
        """
        return sequences

    def _part(self, part: Part) -> Sequences:
        """Returns the part as one batch. It is gathered once, and not copied if it consists of all sequences."""
        values, _, indices = self._source(part)
        if part not in self._gathered:
            self._gathered[part] = values if indices is None else values[indices]
            self._gathered[part].check_columns(self.columns)  # The result is remembered, so that no epoch repeats it.
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
        """Logs how many sequences `Trainer.validate` or `Trainer.test` scores.

        Raises an error if there are none, because Lightning would silently return no metrics.
        """
        if self.trainer is None or self.trainer.state.fn != fn:
            return
        if not self.part_size(part):
            raise ValueError(
                f"`{fn}` needs at least one sequence, but has {self._describe(part)}. "
                "Increase the fraction, or use data with more sequences."
            )
        rank_zero_info(f"Scoring {self._describe(part)}.")

    def predict_dataloader(self) -> DataLoader[Sequences]:
        """Returns a loader of all sequences in the order of the data, except parts that have data of their own."""
        return self._loader("train", whole=True)

    def _loader(self, part: Part, shuffle: bool = False, whole: bool = False) -> DataLoader[Sequences]:
        values, _, indices = self._source(part)
        if whole:
            indices = None
        elif self.batch_size is None:
            values, indices = self._part(part), None  # A single batch holds the whole part in memory in any case.
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
        """Returns the table built by `build` as a memory-mapped data set, and the metadata of its schema.

        The table is saved as ``<data_dir>/cache/<name>.arrow`` and built only if that file does not exist. It is stored
        as one record batch, which can be read as packed sequences without a copy. The file is moved into place when it
        is complete, so several processes may build it at the same time. If the folder is not writable, the table is
        kept in memory.

        Args:
            name: Name of the file. It must be different for different contents.
            build: Function that returns the table.
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
                    f"{path.parent} is not writable, so the data are read again each time. "
                    "Set `data_dir` to a writable folder."
                )
                return as_dataset(table), metadata_of(table.schema)
            unfinished.replace(path)
        with pa.memory_map(str(path)) as source:
            metadata = metadata_of(pa.ipc.open_stream(source).schema)
        return datasets.Dataset.from_file(str(path)), metadata


def as_table(sequences: Sequences, states: Sequences | None = None) -> pa.Table:
    """Converts sequences to an Arrow table. `from_table` is the inverse.

    Symbols are stored in the narrowest type that holds them; nothing else is copied. The columns are `values` and, if
    given, `states`, `weights`, `labels`, `inputs`, `times`, `actions` and `state_weights`.
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
    """Wraps an Arrow table in memory as a `datasets.Dataset`."""
    return datasets.Dataset(datasets.table.InMemoryTable(table))


def metadata_of(schema: pa.Schema) -> dict[str, str]:
    """Returns the metadata of a schema as strings."""
    return {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}


def from_table(table: pa.Table) -> Sequences:
    """Returns the sequences of a table made by `as_table`, sharing its memory."""
    weights = table["weights"].to_numpy().copy() if "weights" in table.column_names else None
    return Sequences.from_arrow(
        table["values"], weights, **{name: table[name] for name in STEP_COLUMNS if name in table.column_names}
    )


def share(fraction: float, size: int) -> int:
    """Returns the given fraction of `size`, rounded down, in exact arithmetic.

    The share 0.29 of 100 is 29, whereas ``int(0.29 * 100)`` is 28.
    """
    return math.floor(Fraction(str(fraction)) * size)


def _as_column(packed: Tensor, offsets: Tensor) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(packed.numpy()).reshape(-1))
    steps = flat if packed.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, packed.shape[1])
    return pa.LargeListArray.from_arrays(pa.array(offsets.numpy()), steps)


def _open(dataset: datasets.Dataset) -> tuple[Sequences, Sequences | None]:
    """Returns the sequences and the true states of a data set, sharing its memory."""
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
    """Disables the progress bars of `datasets`, which would interfere with those of Lightning."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
