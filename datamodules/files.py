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

from datamodules.base import as_dataset, as_table, from_table
from datamodules.paths import cache_name, ending, find_files, some
from datamodules.reader import OPTIONS, Reader
from datamodules.scaling import ScaledDataModule
from lightning_hmm.columns import Column, symbol_dtype
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING, Vocabulary

Format = Literal["auto", "csv", "parquet", "jsonl", "text"]
Kind = Literal["auto", "symbols", "vectors"]
Unit = Literal["char", "word", "line-tokens"]
Per = Literal["line", "file"]
ENDINGS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
}
CACHE_VERSION = 3  # raise it whenever the same file and options are read differently


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
            lists of these; all that no other option names if not given. The columns of several files, and of new data for a trained
            model, are matched by name. Columns that you choose for new data replace those of training in the given order.
        categorical_columns: those of `columns` that hold categories, as names or as whole numbers from 0, among columns of numbers. In the
            vectors, a category is its number. To choose the numbers, give a dictionary from each column to the names of its
            categories in the order of their numbers; otherwise they are the names in the training part, sorted. For a column of
            whole numbers the dictionary has the number of categories, which otherwise is one more than the largest. If a
            trained model is used, categories that are not given are those of training.
        label_column: the column of the known states, as names or as whole numbers from 0. An empty cell, or -1, is an unknown state.
        input_columns: the columns of numbers that emissions or transitions may depend on. No input may be missing.
        time_column: the column of times, as seconds or as dates, which become seconds since 1970. None may be missing, and they must not
            decrease within a sequence.
        time_format: how dates are written if in another way, in the directives of Python's `datetime.strptime`: ``"%d/%m/%Y %H:%M:%S"``.
        action_column: the column of what was done at each step, as names or as whole numbers from 0. No action may be missing. Names of
            labels and actions are numbered in sorted order, or as in training where a trained model is used. Where `columns` is one
            of lists, the columns of labels, inputs, times and actions hold lists of the same lengths.
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
        standardize: shift and scale each real column to mean 0 and standard deviation 1 in the training part.
        kwargs: the words of `SequenceDataModule`.

    Attributes:
        columns: what was read: one categorical column for symbols, otherwise one column for each entry of a vector.
        mean: (columns,) mean of the training part as it was read, 0 for a categorical column; if `standardize`, after `setup`.
        std: (columns,) standard deviation of the same, 1 for a categorical column.
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
        categorical_columns: list[str] | dict[str, list[str] | int] | None = None,
        label_column: str | None = None,
        input_columns: list[str] | None = None,
        time_column: str | None = None,
        time_format: str | None = None,
        action_column: str | None = None,
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
        for name, value, allowed in (
            ("format", format, Format),
            ("kind", kind, Kind),
            ("unit", unit, Unit),
            ("per", per, Per),
        ):
            if value not in get_args(allowed):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(allowed))}, but is {value!r} instead.")
        if (named := vocabulary is not None or unknown is not None) and kind == "vectors":
            raise ValueError("`vocabulary` and `unknown` are for symbols, but `kind` is 'vectors'. Leave them out.")

        paths = {"train": path, "val": val_path, "test": test_path}
        files = {
            part: find_files(
                given,
                self.data_dir,
                "path" if part == "train" else f"{part}_path",
                ENDINGS if format == "auto" else None,
            )
            for part, given in paths.items()
            if given is not None
        }
        formats = {file: format if format != "auto" else _format(file) for group in files.values() for file in group}
        if len(set(formats.values())) > 1:
            raise ValueError(
                f"`path` must lead to files of one format, but they are {', '.join(sorted(set(formats.values())))}. Narrow it, or set `format`."
            )
        singles = {"labels": label_column, "times": time_column, "actions": action_column}
        others = {step: [name] for step, name in singles.items() if name is not None} | (
            {"inputs": input_columns} if input_columns else {}
        )
        if set(formats.values()) == {"text"} and (columns or sequence_column or categorical_columns or others):
            given = {"columns": columns, "sequence_column": sequence_column, "categorical_columns": categorical_columns}
            used = [option for option, value in given.items() if value] + [OPTIONS[step] for step in others]
            raise ValueError(f"`{used[0]}` is for tables, but a text has no columns. Leave it out, or set `format`.")
        if time_format is not None and time_column is None:
            raise ValueError(
                "`time_format` is for the column of times, but there is no `time_column`. Set it, or leave `time_format` out."
            )
        categories = categorical_columns if isinstance(categorical_columns, dict) else {}
        listed = dict.fromkeys(categorical_columns or [], False) | {
            name: not isinstance(given, int) for name, given in categories.items()
        }
        kind = "symbols" if named else kind
        layout = (sequence_column, columns, kind, named, unit, per, missing_token, listed, others, time_format)
        self._reader = Reader(next(iter(formats.values())), delimiter, *layout)
        self._files, self._columns_given, self._categories = files, columns is not None, categories
        self._vocabulary_given, self._num_symbols_given, self._unknown = vocabulary, num_symbols, unknown
        self._given = vocabulary is not None or bool(categories)
        self.input_names = input_columns

    def open_source(self) -> None:
        """Reads the files and sets `columns`, `vocabulary` and the names of labels and actions."""
        files, reader = self._files, self._reader
        vocabulary, categories = self._vocabulary_given, self._categories
        self._dataset, metadata = self.cached(cache_name([CACHE_VERSION, reader], files), lambda: reader.read(files))
        self._parts: dict[str, int] = json.loads(metadata["parts"])
        self._read: list[dict[str, Any]] = json.loads(
            metadata["columns"]
        )  # name, kind, and names of categories with their places
        self._coded: dict[str, dict[str, Any]] = json.loads(metadata["coded"])  # the same for labels and actions
        self.label_names, self.action_names = (
            self._coded[step]["names"] if step in self._coded else None for step in ("labels", "actions")
        )
        values = self._values()
        if values.actions is not None:
            self.num_actions = len(self.action_names) if self.action_names else int(values.actions.max()) + 1
        if values.is_discrete:
            if self.standardize:
                raise ValueError(
                    f"`standardize` is for vectors, but {files['train'][0]} holds symbols. Leave it out, or set `kind` to 'vectors'."
                )
            chosen = next(iter(categories.values()), None)
            vocabulary = chosen if vocabulary is None and isinstance(chosen, list) else vocabulary
            num_symbols = self._num_symbols_given
            num_symbols = chosen if num_symbols is None and isinstance(chosen, int) else num_symbols
            found = self._symbols(values, vocabulary, num_symbols)
        else:
            found = [self._column(number, categories) for number in range(len(self._read))]
        if self._read[0]["name"] is None:  # a text, whose symbols are not matched by the name of a column
            self.columns = found
        else:
            self.set_columns(found, chosen=self._columns_given)
        self._encoded(values)  # refuses names that are not among the categories

    def _symbols(self, values: Sequences, vocabulary: list[str] | None, num_symbols: int | None) -> list[Column]:
        """The one column of symbols, and the vocabulary if they have names."""
        names = self._read[0]["names"]
        if names is not None:
            self.vocabulary = (
                Vocabulary.from_data([self._seen(0)], self._unknown)
                if vocabulary is None
                else Vocabulary(vocabulary, self._unknown)
            )
        needed = int(values.values.max()) + 1 if self.vocabulary is None else len(self.vocabulary)
        if num_symbols is not None and (
            needed > num_symbols or (self.vocabulary is not None and needed != num_symbols)
        ):
            raise ValueError(
                f"`num_symbols` must be {'' if self.vocabulary is not None else 'at least '}{needed} for this data, but is {num_symbols} instead."
            )
        categories = num_symbols or needed if self.vocabulary is None else tuple(self.vocabulary.names)
        return [Column(self._read[0]["name"] or "symbol", "categorical", categories)]

    def _column(self, number: int, categories: dict[str, list[str] | int]) -> Column:
        """One column of vectors; `categories` are the names, or the numbers of categories, that were given for some columns."""
        read = self._read[number]
        if read["kind"] == "real":
            return Column(read["name"])
        given = categories.get(read["name"])
        if read["names"] is None:
            needed = int(_numbers(self._values(), number).max()) + 1
            if isinstance(given, int) and needed > given:
                raise ValueError(
                    f"Column {read['name']!r} must hold {given} categories, the whole numbers 0 to {given - 1}, but holds {needed - 1}."
                )
            return Column(read["name"], "categorical", given if isinstance(given, int) else needed)
        if isinstance(given, int):
            raise ValueError(
                f"`categorical_columns` has a number for column {read['name']!r}, which holds names. Give the names of its categories."
            )
        return Column(read["name"], "categorical", tuple(given or self._seen(number)))

    # The sequences as they were read, and with the numbers of names

    def _values(self) -> Sequences:
        """All parts as they were read."""
        return from_table(self._dataset.with_format("arrow")[:])

    def _training(self, values: Sequences) -> Sequences:
        """The training part of all parts."""
        indices = self.split(self._parts["train"], [part for part in ("val", "test") if part not in self._parts])[
            "train"
        ]
        part: Sequences = values[: self._parts["train"]]
        return part if indices is None else part[indices]

    def _seen(self, number: int) -> list[str]:
        """The names in one column of the training part, sorted."""
        return _occurring(self._read[number]["names"], _numbers(self._training(self._values()), number))

    def _encoded(self, values: Sequences) -> Sequences:
        """Sequences in the order of `columns`, with the numbers of names as in `columns`, `label_names` and `action_names`."""
        read = {entry["name"] or "symbol": entry for entry in self._read}
        packed = values.values
        for number, column in enumerate(self.columns):
            if (names := column.category_names) is None or (
                lookup := self._lookup(read[column.name], names, values.is_discrete)
            ) is None:
                continue
            numbers = torch.from_numpy(lookup[_numbers(values, number)])
            if values.is_discrete:
                packed = numbers
            else:
                packed = packed.clone() if packed is values.values else packed
                packed[:, number] = numbers.to(packed.dtype).masked_fill(numbers == MISSING, torch.nan)
        encoded = values if packed is values.values else values.with_values(packed)
        for step, names in (("labels", self.label_names), ("actions", self.action_names)):
            if names is not None and (lookup := _lookup(self._coded[step], names)) is not None:
                encoded = encoded.replaced(**{step: torch.from_numpy(lookup[getattr(values, step).numpy()])})
        return encoded

    def _lookup(self, read: dict[str, Any], names: list[str], symbols: bool) -> np.ndarray | None:
        """How the numbers of one column in the cache, which are for all names of all parts, become those of `names`."""
        strange = (
            None
            if self._unknown is not None
            else next((number for number, name in enumerate(read["names"]) if name not in set(names)), None)
        )
        if strange is not None:
            option = "vocabulary" if symbols else "categorical_columns"
            where = f"`{option}`" if self._given else "the training part"
            what = "Symbols" if symbols else f"Categories of column {read['name']!r}"
            remedy = (
                "Set `unknown` to a name for all such symbols, or name it in `vocabulary`."
                if symbols
                else "Name the categories in `categorical_columns`."
            )
            raise ValueError(
                f"{what} must be in {where}, but {read['names'][strange]!r} in {read['places'][strange]} is not. {remedy}"
            )
        return _lookup(read, names, self._unknown)

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        read = self._values()
        values = self._encoded(self.in_order(read))
        if self.standardize:
            values = values.with_values(self.scaled(values.values, self._training(values).values))
        dataset = self._dataset if values is read else as_dataset(as_table(values))
        ends = np.cumsum(list(self._parts.values())).tolist()
        return {
            part: dataset.select(range(end - size, end))
            for (part, size), end in zip(self._parts.items(), ends, strict=True)
        }

    # Checkpoints

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the sequences of `path` as they were read, wherever the file is."""
        values: Sequences = self._values()[: self._parts["train"]]
        packed, every = values.values.long() if values.is_discrete else values.values.clone(), []
        for number, read in enumerate(
            self._read
        ):  # other names in the validation or test part must not change the numbers
            if read.get("names") is None:
                continue
            numbers = _numbers(values, number)
            names = _occurring(read["names"], numbers)
            ranks = {name: rank for rank, name in enumerate(names)}
            renumbered = torch.from_numpy(
                np.array([*(ranks.get(name, MISSING) for name in read["names"]), MISSING])[numbers]
            )
            every.append(names)
            packed[:] = renumbered if values.is_discrete else packed
            if not values.is_discrete:
                packed[:, number] = renumbered.to(packed.dtype).masked_fill(renumbered == MISSING, torch.nan)
        digest = hashlib.blake2b(json.dumps(every).encode(), digest_size=16)
        for array in (values.lengths.numpy(), packed.numpy()):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        coded = {"labels": self.label_names, "actions": self.action_names}
        return {
            **super().state_dict(),
            "fingerprint": self.fingerprint,
            "coded": {step: coded[step] for step in self._coded},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores units and names of training. If the model was trained on other data, all sequences are used for validation and test."""
        trained_on, before = state_dict.get("fingerprint", self.fingerprint), (self.label_names, self.action_names)
        coded = state_dict.get("coded", {})
        if "labels" in coded and "labels" in self._coded:
            self.label_names = self._names_of_training("labels", coded["labels"])
        if "actions" in coded and "actions" in self._coded:
            self.action_names = self._names_of_training("actions", coded["actions"])
            self.num_actions = len(self.action_names) if self.action_names else self.num_actions
        super().load_state_dict(
            {name: value for name, value in state_dict.items() if name not in ("fingerprint", "coded")}
        )
        if before != (self.label_names, self.action_names):
            self._sources, self._gathered = {}, {}
            self.setup()
        self.score_everything(trained_on != self.fingerprint)

    def _names_of_training(self, step: str, names: list[str] | None) -> list[str] | None:
        """The names of labels or actions in training, which must have all names that were read here."""
        read = self._coded[step]
        if (names is None) != (read["names"] is None):
            forms = ("whole numbers", "names") if names is None else ("names", "whole numbers")
            raise ValueError(
                f"{step.capitalize()} must be {forms[0]} as in training, but column {read['name']!r} holds {forms[1]}."
            )
        for name, place in zip(read["names"] or [], read["places"] or [], strict=True):
            if names is not None and name not in names:
                raise ValueError(
                    f"{step.capitalize()} must be those of training, {some(names)}, but {place} has {name!r} instead."
                )
        return names


def _numbers(values: Sequences, number: int) -> np.ndarray:
    """(steps,) int64 numbers of the categories in one column, -1 where a value is missing."""
    entries = values.values if values.is_discrete else values.values[:, number].nan_to_num(nan=MISSING)
    numbers: np.ndarray = entries.long().numpy()
    return numbers


def _occurring(names: list[str], numbers: np.ndarray) -> list[str]:
    """Those of the names whose numbers occur, sorted."""
    seen = np.bincount(numbers[numbers != MISSING], minlength=len(names)) > 0
    return sorted(name for name, there in zip(names, seen, strict=True) if there)


def _lookup(read: dict[str, Any], names: list[str], unknown: str | None = None) -> np.ndarray | None:
    """(names that were read + 1,) their numbers among `names`, and -1 at the end, for the number -1; ``None`` where no number changes."""
    number = {name: i for i, name in enumerate(names)}
    lookup = [number[name] if name in number else number[str(unknown)] for name in read["names"]]
    return None if lookup == list(range(len(lookup))) else np.array([*lookup, MISSING], symbol_dtype(len(names)))


def _format(path: Path) -> str:
    if ending(path) not in ENDINGS:
        raise ValueError(
            f"`format` must be given for {path}, whose ending is none of {', '.join(ENDINGS)}, with or without .gz."
        )
    return ENDINGS[ending(path)]
