"""Your own data, from tables (CSV, TSV, Parquet, JSON lines) or plain text."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import datasets
import numpy as np
import torch

from datamodules.base import as_dataset, as_table
from datamodules.paths import cache_name, ending, find_files
from datamodules.reader import Reader
from datamodules.scaling import ScaledDataModule
from lightning_hmm.sequences import MISSING, Sequences, Vocabulary

Format = Literal["auto", "csv", "parquet", "jsonl", "text"]
Kind = Literal["auto", "symbols", "vectors"]
Unit = Literal["char", "word", "line-tokens"]
Per = Literal["line", "file"]
ENDINGS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text"}
CACHE_VERSION = 2  # raise it whenever the same file and options are read differently


class FileDataModule(ScaledDataModule):
    """Sequences from one file, several, a folder or a pattern such as ``"walks/*.csv.gz"``.

    In a table, the rows of one sequence are its steps, in the order of the file; or a column holds whole lists, and each row is
    a sequence. In a text, each line is a sequence. A sequence never goes on from one file into the next. What was read is kept
    in ``<data_dir>/cache`` and read again only if the file or an option changes.

    Args:
        path: where the training data is, looked up as given and then under `data_dir`; validation and test parts are taken from
            it too, unless they have a path of their own. If a checkpoint of a model that was trained on other data is validated or
            tested, all sequences of `path` are used.
        val_path: where the validation part is.
        test_path: where the test part is.
        format: "csv", "parquet", "jsonl" or "text"; "auto" goes by the ending of the name, before a possible ".gz".
        delimiter: what separates the cells of a CSV file; if not given, a tab for ".tsv" and a comma otherwise.
        sequence_column: the column that says which sequence a row belongs to; its rows need not stand together. Without it a
            file is one sequence.
        columns: one column of names or whole numbers for symbols, one or several of numbers for vectors, or one that holds
            lists of these; all but `sequence_column` if not given. The columns of several files, and of new data for a trained
            model, are matched by name. Columns that you choose for new data replace those of training in the given order.
        kind: "symbols" or "vectors"; "auto" takes names and whole numbers in a single column as symbols, the rest as vectors.
        vocabulary: the names of the symbols in the order of their numbers. If not given, the names in the training part, sorted.
            Whole numbers are taken as the symbols' own numbers, unless `vocabulary` or `unknown` is given: then as names.
        unknown: the name that stands for names that are not in the vocabulary.
        num_symbols: how many symbols there are, where they are whole numbers; one more than the largest if not given.
        unit: what is a symbol in a text: every "char", every "word" between blanks, or with "line-tokens" every line, where
            an empty line ends the sequence.
        per: "file" makes each text file one sequence, not each line; for the unit "char" the ends of lines then are symbols too.
            Empty lines of a text make no sequence.
        missing_token: a cell or symbol that means a missing value, besides empty cells and null; and, for numbers, NaN. Blanks
            around it do not matter. In tables a number may be written in any way: "-99" also means cells with "-99.0".
        standardize: shift and scale each feature to mean 0 and standard deviation 1 in the training part.
        kwargs: the words of `SequenceDataModule`.

    Attributes:
        columns: the names of the columns that were read, in the order of the features; ``None`` for a text.
        mean: (num_features,) mean of the training part as it was read, if `standardize`, after `setup`.
        std: (num_features,) standard deviation of the same.
    """

    def __init__(
        self,
        path: str | list[str],
        val_path: str | list[str] | None = None,
        test_path: str | list[str] | None = None,
        format: Format = "auto",
        delimiter: str | None = None,
        sequence_column: str | None = None,
        columns: list[str] | None = None,
        kind: Kind = "auto",
        vocabulary: list[str] | None = None,
        unknown: str | None = None,
        num_symbols: int | None = None,
        unit: Unit = "word",
        per: Per = "line",
        missing_token: str | None = None,
        standardize: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(standardize=standardize, **kwargs)
        for name, value, allowed in (("format", format, Format), ("kind", kind, Kind), ("unit", unit, Unit), ("per", per, Per)):
            if value not in get_args(allowed):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(allowed))}, but is {value!r} instead.")
        if (named := vocabulary is not None or unknown is not None) and kind == "vectors":
            raise ValueError("`vocabulary` and `unknown` are for symbols, but `kind` is 'vectors'. Leave them out.")

        paths = {"train": path, "val": val_path, "test": test_path}
        files = {
            part: find_files(given, self.data_dir, "path" if part == "train" else f"{part}_path", ENDINGS if format == "auto" else None)
            for part, given in paths.items()
            if given is not None
        }
        formats = {file: format if format != "auto" else _format(file) for group in files.values() for file in group}
        if len(set(formats.values())) > 1:
            raise ValueError(f"`path` must lead to files of one format, but they are {', '.join(sorted(set(formats.values())))}. Narrow it, or set `format`.")
        if set(formats.values()) == {"text"} and (columns or sequence_column):
            raise ValueError("`columns` and `sequence_column` are for tables, but a text has no columns. Leave them out, or set `format`.")
        reader = Reader(next(iter(formats.values())), delimiter, sequence_column, columns, "symbols" if named else kind, named, unit, per, missing_token)
        name = cache_name([CACHE_VERSION, reader], files)
        self._dataset, metadata = self.cached(name, lambda: reader.read(files))
        self._parts: dict[str, int] = json.loads(metadata["parts"])
        self._names: list[str] | None = json.loads(metadata["names"]) if "names" in metadata else None
        self._lookup: np.ndarray | None = None
        self.set_columns(json.loads(metadata["columns"]), chosen=columns is not None)

        values = self._values()
        self.num_features = values.num_features
        if values.is_discrete:
            if standardize:
                raise ValueError(f"`standardize` is for vectors, but {files['train'][0]} holds symbols. Leave it out, or set `kind` to 'vectors'.")
            if self._names is not None:
                self.vocabulary = self._encode(self._names, json.loads(metadata["places"]), vocabulary, unknown)
            needed = int(values.values.max()) + 1 if self.vocabulary is None else len(self.vocabulary)
            self.num_symbols = needed if num_symbols is None else num_symbols
            if needed > self.num_symbols or (self.vocabulary is not None and needed != self.num_symbols):
                raise ValueError(
                    f"`num_symbols` must be {'' if self.vocabulary is not None else 'at least '}{needed} for this data, but is {num_symbols} instead."
                )

    def _values(self) -> Sequences:
        return self.in_order(Sequences.from_arrow(self._dataset.with_format("arrow")[:]["values"]))

    def _training(self) -> Sequences:
        """The training part as it was read."""
        indices = self.split(self._parts["train"], [part for part in ("val", "test") if part not in self._parts])["train"]
        values: Sequences = self._values()[: self._parts["train"]]
        return values if indices is None else values[indices]

    def _encode(self, names: list[str], places: list[str], given: list[str] | None, unknown: str | None) -> Vocabulary:
        """The vocabulary; and how the numbers in the cache, which are for all names of all parts, become its numbers."""
        if given is None:
            symbols = self._training().values.numpy()
            seen = np.bincount(symbols[symbols != MISSING], minlength=len(names)) > 0
            vocabulary = Vocabulary.from_data([[name for name, there in zip(names, seen, strict=True) if there]], unknown)
        else:
            vocabulary = Vocabulary(given, unknown)
        number = {name: i for i, name in enumerate(vocabulary.names)}
        for name, place in zip(names, places, strict=True):
            if name not in number and unknown is None:
                where = "`vocabulary`" if given is not None else "the training part"
                raise ValueError(
                    f"Symbols must be in {where}, but {name!r} in {place} is not. Set `unknown` to a name for all such symbols, or name it in `vocabulary`."
                )
        lookup = [number[name] if name in number else number[str(unknown)] for name in names]
        if lookup != list(range(len(names))):
            self._lookup = np.array([*lookup, MISSING])  # the last is what the number -1, missing, leads to
        return vocabulary

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the sequences of `path` as they were read, wherever the file is."""
        values: Sequences = self._values()[: self._parts["train"]]
        packed, names = values.values.numpy(), []
        if self._names is not None:  # other names in the validation or test part must not change the numbers
            seen = np.bincount(packed[packed != MISSING], minlength=len(self._names)) > 0
            names = sorted(name for name, there in zip(self._names, seen, strict=True) if there)
            number = {name: i for i, name in enumerate(names)}
            packed = np.array([*(number.get(name, MISSING) for name in self._names), MISSING])[packed]
        digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=16)
        for array in (values.lengths.numpy(), packed):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fingerprint": self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the units of training. If the model was trained on other data, all sequences are used for validation and test."""
        trained_on = state_dict.get("fingerprint", self.fingerprint)
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "fingerprint"})
        self.score_everything(trained_on != self.fingerprint)

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        dataset, values = self._dataset, self._values()
        if self._lookup is not None:
            dataset = as_dataset(as_table(values.with_values(torch.from_numpy(self._lookup[values.values.numpy()]))))
        elif self.standardize:
            dataset = as_dataset(as_table(values.with_values(self.scaled(values.values, self._training().values))))
        elif self.reordered:
            dataset = as_dataset(as_table(values))
        ends = np.cumsum(list(self._parts.values())).tolist()
        return {part: dataset.select(range(end - size, end)) for (part, size), end in zip(self._parts.items(), ends, strict=True)}


def _format(path: Path) -> str:
    if ending(path) not in ENDINGS:
        raise ValueError(f"`format` must be given for {path}, whose ending is none of {', '.join(ENDINGS)}, with or without .gz.")
    return ENDINGS[ending(path)]
