"""Base class for sequences of named symbols: selection of sequences, cutting, and merging of rare symbols."""

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
from datamodules.checks import require_fraction
from datamodules.paths import cache_name, find_files
from lightning_hmm.columns import symbol_column, symbol_dtype
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING, Vocabulary

CACHE_VERSION = 2  # Increase it whenever the same files and options are read differently.


class Symbols(NamedTuple):
    """Packed sequences of symbols.

    numbers: (steps,) indices into `names`, -1 for a missing symbol. The type is the narrowest one, or uint8 if no
        symbol is missing.
    lengths: (N,) number of steps in each sequence.
    names: Names of the symbols. Not all need to occur.
    states: (steps,) true states if the sequences were drawn, else ``None``.
    """

    numbers: np.ndarray
    lengths: np.ndarray
    names: list[str]
    states: np.ndarray | None = None


class SymbolDataModule(SequenceDataModule):
    """Base class for sequences of named symbols that are read from files or drawn.

    They are prepared as in the DenseHMM paper (Sicking et al., 2021, appendix C): the first `num_sequences` sequences
    are used, each is cut after `max_length` symbols, and then the rarest symbols are merged into one. A subclass
    implements `read` and `draw`, and calls `use_files` at the end of its constructor.

    Args:
        num_sequences: Maximum number of sequences to use, from the first on; ``None`` for all.
        max_length: Number of symbols after which a sequence is cut; ``None`` does not cut.
        rare_fraction: The rarest symbols that together make up less than this fraction of all symbols are merged into
            `residual`. Equally rare symbols are merged in the order of their names.
        residual: Name of the merged symbol. It also replaces symbols that are not in the vocabulary.
        vocabulary: Names of the symbols in the order of their indices, such as those of a trained model. If given,
            `rare_fraction` is ignored. Defaults to `residual`, if symbols were merged, and the other symbols, sorted.
        **kwargs: Forwarded to `SequenceDataModule`.
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
        require_fraction(rare_fraction=rare_fraction)
        self.num_sequences = num_sequences
        self.max_length = max_length
        self.rare_fraction = rare_fraction
        self.residual = residual
        self._vocabulary_given = vocabulary

    @abstractmethod
    def read(self, files: list[Path]) -> Symbols:
        """Reads at least the first `num_sequences` sequences of the files, or all if there are fewer."""

    @abstractmethod
    def draw(self, num_sequences: int) -> Symbols:
        """Draws sequences, for use without files."""

    def use_files(self, path: str | list[str] | None, endings: Collection[str], options: Any = None) -> None:
        """Sets the files from which the sequences are read.

        Args:
            path: Location of the files; ``None`` to draw sequences.
            endings: Endings of the files to take from a folder.
            options: All other options that `read` depends on, as plain values.
        """
        if path is None and self.num_sequences is None:
            raise ValueError("`num_sequences` must be given to draw sequences, but is None. Set it, or set `path`.")
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
            limits = [self.num_sequences, self.max_length, self.rare_fraction, self.residual, self._vocabulary_given]
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
        if self._vocabulary_given is not None:
            made = encode(made, self._vocabulary_given, self.residual)
        elif self.residual in made.names:
            raise ValueError(
                f"`residual` must not be a symbol of the data, but {self.residual!r} is one. Choose another name."
            )
        else:
            made = merge_rare(made, self.rare_fraction, self.residual)
        lengths = torch.from_numpy(made.lengths)
        states = None if made.states is None else Sequences.from_lengths(torch.from_numpy(made.states), lengths)
        table = as_table(Sequences.from_lengths(torch.from_numpy(made.numbers), lengths), states)
        return table.replace_schema_metadata({"names": json.dumps(made.names)})


def cut(symbols: Symbols, num_sequences: int | None = None, max_length: int | None = None) -> Symbols:
    """Returns the first `num_sequences` sequences, each cut after `max_length` steps."""
    lengths = symbols.lengths[:num_sequences]
    steps = slice(int(lengths.sum()))
    numbers, states = symbols.numbers[steps], None if symbols.states is None else symbols.states[steps]
    if max_length is not None and len(lengths) and lengths.max() > max_length:
        starts = np.cumsum(lengths) - lengths
        kept = np.arange(len(numbers)) - np.repeat(starts, lengths) < max_length
        numbers, states = numbers[kept], None if states is None else states[kept]
        lengths = np.minimum(lengths, max_length)
    return symbols._replace(numbers=numbers, lengths=lengths, states=states)


def merge_rare(symbols: Symbols, fraction: float, residual: str) -> Symbols:
    """Merges the rarest symbols that together are less than a fraction of all, and drops names that do not occur.

    The remaining names are sorted. If symbols were merged, `residual` is the first name.
    """
    counts = _counts(symbols)
    if not counts.any():
        raise ValueError("At least one symbol must be observed, but all are missing.")
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda number: (counts[number], symbols.names[number]))
    share = Fraction(str(fraction))  # The decimal fraction exactly as it was written.
    together = np.cumsum(counts[order]).tolist()
    rare = {
        number
        for number, count in zip(order, together, strict=True)
        if count * share.denominator < share.numerator * together[-1]
    }
    kept = sorted(symbols.names[number] for number in order if number not in rare)
    return encode(symbols, [residual, *kept] if rare else kept, residual)


def encode(symbols: Symbols, names: list[str], residual: str) -> Symbols:
    """Renumbers symbols by their indices in `names`. Symbols that are not in `names` become the residual symbol."""
    known = {name: number for number, name in enumerate(names)}
    strange = [name not in known and residual not in known for name in symbols.names]
    if any(strange) and (
        strangers := [symbols.names[number] for number in np.flatnonzero(strange & (_counts(symbols) > 0))]
    ):
        raise ValueError(
            f"Symbols must be in `vocabulary`, but {strangers[0]!r} is not. "
            f"Add it, or add {residual!r}, which replaces all symbols outside the vocabulary."
        )
    # The last entry is MISSING, so that the index -1 of a missing symbol is not changed.
    lookup = np.array(
        [*(known.get(name, known.get(residual, MISSING)) for name in symbols.names), MISSING], symbol_dtype(len(names))
    )
    return symbols._replace(numbers=lookup[symbols.numbers], names=list(names))


def _counts(symbols: Symbols) -> np.ndarray:
    """Returns (names,) the number of occurrences of each name."""
    numbers = torch.from_numpy(symbols.numbers)
    seen = numbers if numbers.dtype == torch.uint8 else numbers[numbers != MISSING]
    # torch counts narrow types directly, whereas numpy first converts them to eight bytes per symbol.
    counts: np.ndarray = torch.bincount(seen, minlength=len(symbols.names)).numpy()
    return counts
