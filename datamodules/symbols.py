"""What sequences of named symbols share: the first of them, cut to a length, and rare symbols taken together as one."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch

from datamodules.base import SequenceDataModule, as_dataset, as_table, metadata_of
from datamodules.paths import cache_name, find_files
from lightning_hmm.columns import symbol_column, symbol_dtype
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING, Vocabulary

CACHE_VERSION = 2  # raise it whenever the same file and options are read differently


class Symbols(NamedTuple):
    """Packed sequences of symbols.

    numbers: (steps,) which of the names each is, -1 for a missing one; in the narrowest type, or uint8 if none is missing.
    lengths: (N,) steps of each sequence.
    names: the symbols; not all need to occur.
    states: (steps,) the states they were drawn from, if they were drawn.
    """

    numbers: np.ndarray
    lengths: np.ndarray
    names: list[str]
    states: np.ndarray | None = None


class SymbolDataModule(SequenceDataModule):
    """Sequences of named symbols, read from files or drawn, prepared as in the DenseHMM paper (Sicking et al., 2021, appendix C).

    A subclass brings `read` and `draw`, and calls `prepare` at the end of its constructor. In this order: the first
    `num_sequences` are taken, each is cut after `max_length` symbols, and then the rarest symbols become one.

    Args:
        num_sequences: how many sequences are taken, from the first on; fewer if there are not so many; ``None`` for all.
        max_length: where a sequence is cut; ``None`` for nowhere.
        rare_fraction: the rarest symbols that together make up less than this fraction of all become one, `residual`. Of equally
            rare symbols the first by name goes first.
        residual: the name of that symbol. It also stands for symbols that are not in the vocabulary.
        vocabulary: the names of the symbols in the order of their numbers, such as those of a trained model; then
            `rare_fraction` has no effect. If not given, those that are left, sorted, after `residual`.
        kwargs: the words of `SequenceDataModule`.
    """

    def __init__(
        self,
        num_sequences: int | None = None,
        max_length: int | None = None,
        rare_fraction: float = 0.0,
        residual: str = "other",
        vocabulary: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in (("num_sequences", num_sequences), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be positive, or None for all, but is {value} instead.")
        if not 0 <= rare_fraction < 1:
            raise ValueError(f"`rare_fraction` must be at least 0 and less than 1, but is {rare_fraction} instead.")
        self.num_sequences, self.max_length, self.rare_fraction, self.residual = (
            num_sequences,
            max_length,
            rare_fraction,
            residual,
        )
        self._given = vocabulary

    @abstractmethod
    def read(self, files: list[Path]) -> Symbols:
        """The first `num_sequences` sequences of the files, or somewhat more of them."""

    @abstractmethod
    def draw(self, num_sequences: int) -> Symbols:
        """Drawn sequences, for when there is no file."""

    def use_files(self, path: str | list[str] | None, endings: Collection[str], options: Any = None) -> None:
        """Sets the files that the sequences are read from.

        Args:
            path: where the files are; ``None`` to draw.
            endings: of the files to take from a folder.
            options: whatever else `read` depends on, as plain values.
        """
        if path is None and self.num_sequences is None:
            raise ValueError(
                "`num_sequences` must be given where sequences are drawn, but is None. Set it, or `path` to a file."
            )
        self._files = None if path is None else find_files(path, self.data_dir, endings=endings)
        self._read_options = options

    def open_source(self) -> None:
        """Reads or draws the sequences and sets `columns` and `vocabulary`."""
        files = self._files
        if files is None:
            assert self.num_sequences is not None
            table = self._table(self.draw(self.num_sequences))
            self._dataset, metadata = as_dataset(table), metadata_of(table.schema)
        else:
            limits = [self.num_sequences, self.max_length, self.rare_fraction, self.residual, self._given]
            settings = [type(self).__name__, *limits, self._read_options]
            name = cache_name([CACHE_VERSION, settings], {"train": files})
            self._dataset, metadata = self.cached(name, lambda: self._table(self.read(files)))
        names = json.loads(metadata["names"])
        self.vocabulary = Vocabulary(names, self.residual if self.residual in names else None)
        self.columns = symbol_column(len(names), names)

    def load_dataset(self) -> datasets.Dataset:
        return self._dataset

    def _table(self, found: Symbols) -> pa.Table:
        made = cut(found, self.num_sequences, self.max_length)
        if self._given is not None:
            made = encode(made, self._given, self.residual)
        elif self.residual in made.names:
            raise ValueError(
                f"`residual` must be a name that no symbol has, but {self.residual!r} is a symbol of the data. Choose another."
            )
        else:
            made = merge_rare(made, self.rare_fraction, self.residual)
        lengths = torch.from_numpy(made.lengths)
        states = None if made.states is None else Sequences.from_lengths(torch.from_numpy(made.states), lengths)
        table = as_table(Sequences.from_lengths(torch.from_numpy(made.numbers), lengths), states)
        return table.replace_schema_metadata({"names": json.dumps(made.names)})


def cut(symbols: Symbols, num_sequences: int | None = None, max_length: int | None = None) -> Symbols:
    """The first sequences, and of each the first steps."""
    lengths = symbols.lengths[:num_sequences]
    steps = slice(int(lengths.sum()))
    numbers, states = symbols.numbers[steps], None if symbols.states is None else symbols.states[steps]
    if max_length is not None and len(lengths) and lengths.max() > max_length:
        starts = np.cumsum(lengths) - lengths
        kept = np.arange(len(numbers)) - np.repeat(starts, lengths) < max_length
        numbers, states, lengths = (
            numbers[kept],
            None if states is None else states[kept],
            np.minimum(lengths, max_length),
        )
    return symbols._replace(numbers=numbers, lengths=lengths, states=states)


def merge_rare(symbols: Symbols, fraction: float, residual: str) -> Symbols:
    """The rarest symbols that together are less than this fraction of all become one, and names without a symbol go.

    The names are sorted, after the residual one if there is any.
    """
    counts = _counts(symbols)
    if not counts.any():
        raise ValueError("There must be some symbols, but all are missing.")
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda number: (counts[number], symbols.names[number]))
    share = Fraction(str(fraction))  # 0.1 as it was typed
    together = np.cumsum(counts[order]).tolist()
    rare = {
        number
        for number, count in zip(order, together, strict=True)
        if count * share.denominator < share.numerator * together[-1]
    }
    kept = sorted(symbols.names[number] for number in order if number not in rare)
    return encode(symbols, [residual, *kept] if rare else kept, residual)


def encode(symbols: Symbols, names: list[str], residual: str) -> Symbols:
    """The same symbols numbered as in `names`; what is not there becomes the residual one."""
    known = {name: number for number, name in enumerate(names)}
    strange = [name not in known and residual not in known for name in symbols.names]
    if any(strange) and (
        strangers := [symbols.names[number] for number in np.flatnonzero(strange & (_counts(symbols) > 0))]
    ):
        raise ValueError(
            f"Symbols must be in `vocabulary`, but {strangers[0]!r} is not. Name it there, or name one {residual!r}, for all symbols that it does not have."
        )
    lookup = np.array(
        [*(known.get(name, known.get(residual, MISSING)) for name in symbols.names), MISSING], symbol_dtype(len(names))
    )  # the last is where -1 leads
    return symbols._replace(numbers=lookup[symbols.numbers], names=list(names))


def _counts(symbols: Symbols) -> np.ndarray:
    """(names,) how often each occurs."""
    numbers = torch.from_numpy(symbols.numbers)
    seen = numbers if numbers.dtype == torch.uint8 else numbers[numbers != MISSING]
    counts: np.ndarray = torch.bincount(
        seen, minlength=len(symbols.names)
    ).numpy()  # numpy would first make eight bytes of each
    return counts
