"""Data module for your own files: tables (CSV, TSV, Parquet, JSON lines) and plain text."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch

from datamodules.base import as_dataset, as_table, from_table
from datamodules.checks import require_choice
from datamodules.paths import cache_name, ending, find_files, some
from datamodules.reader import OPTIONS, Reader
from datamodules.scaling import ScaledDataModule
from lightning_hmm.columns import Column, symbol_dtype
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING, Vocabulary

Format = Literal["auto", "csv", "parquet", "jsonl", "text"]
Kind = Literal["auto", "symbols", "vectors"]
Unit = Literal["char", "word", "line-tokens"]
SequencePer = Literal["line", "file"]
ENDINGS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
}
CACHE_VERSION = 3  # Increase it whenever the same files and options are read differently.


class FileDataModule(ScaledDataModule):
    """Sequences from your own files: one file, several, a folder, or a pattern such as ``"walks/*.csv.gz"``.

    In a table, the rows of a sequence are its steps, in the order of the file. Alternatively, a column contains lists,
    and each row is a sequence. In a text, each line is a sequence. A sequence never continues in the next file. The
    parsed data are cached in ``<data_dir>/cache`` and read again only if a file or an option changes.

    Args:
        path: Training data, relative to the working directory or to `data_dir`. Validation and test parts are split off
            unless they have a path of their own. If you validate or test a model that was trained on other data, all
            sequences of `path` are used.
        val_path: Validation data.
        test_path: Test data.
        format: "csv", "parquet", "jsonl" or "text". "auto" determines the format from the ending, ignoring ".gz".
        delimiter: Delimiter of a CSV file, by default a tab for ".tsv" and a comma otherwise.
        sequence_column: Column that identifies the sequence of each row. The rows of a sequence need not be adjacent.
            If it is ``None``, each file is one sequence.
        columns: One column of names or integers for symbols, one or more columns of numbers for vectors, or one column
            that contains lists of these. Defaults to all columns that no other option names. The columns of several
            files, and of new data for a trained model, are matched by name. If you choose columns for new data, they
            replace those of training in the given order.
        categorical_columns: Those of `columns` that contain categories, as names or as integers from 0, in data with
            several columns. In the vectors, a category is represented by its index. To choose the indices, pass a
            dictionary from each column to the names of its categories in order; by default they are the names in the
            training part, sorted. For a column of integers, the dictionary contains the number of categories; by
            default it is one more than the largest integer. With a trained model, categories that are not given are
            those of training.
        label_column: Column of known states, as names or as integers from 0. An empty cell or -1 is an unknown state.
            Models are trained on the labels of the training part. Those of other parts are used only to compute
            accuracies.
        train_on_labels: Whether models are trained on the labels. Otherwise, those of all parts are used only to
            compute accuracies.
        input_columns: Numeric columns that emissions or transitions may depend on. No input may be missing.
        time_column: Column of times, as seconds or as dates, which are converted to seconds since 1970. No time may be
            missing, and times must not decrease within a sequence.
        time_format: Format of other dates, in the directives of `datetime.strptime`, such as ``"%d/%m/%Y %H:%M:%S"``.
        action_column: Column of the action at each step, as names or as integers from 0. No action may be missing.
            Names of labels and actions are numbered in sorted order, or as in training for a trained model. If
            `columns` is a column of lists, all of these columns must contain lists of the same lengths.
        state_weight_columns: Columns of non-negative weights, one for each state of the model, such as probabilities
            given by an annotator. Training multiplies them by the likelihoods of the states. No weight may be missing;
            equal weights leave the state open.
        kind: "symbols" or "vectors". "auto" reads a single column of names or integers as symbols, and everything else
            as vectors.
        vocabulary: Names of the symbols in the order of their indices, by default the names in the training part,
            sorted. Integers are used as indices of symbols, unless `vocabulary` or `unknown` is given; then they are
            read as names.
        unknown: Name of the symbol that replaces names outside the vocabulary.
        num_symbols: Number of symbols if they are integers, by default one more than the largest.
        unit: Symbols of a text: each "char", each "word" between blanks, or each line ("line-tokens"), where an empty
            line ends the sequence.
        sequence_per: "line" makes each line of a text a sequence, "file" each file. With "file" and the unit "char",
            line breaks are symbols too. Empty lines of a text do not form sequences.
        missing_token: Cell or symbol that means a missing value, in addition to empty cells, null and, for numbers,
            NaN. Blanks around it are ignored. In tables, numbers are compared by value: "-99" also matches "-99.0".
        standardize: Whether to shift and scale each real column to mean 0 and standard deviation 1 in the training
            part.
        **kwargs: Forwarded to `SequenceDataModule`.

    Attributes:
        columns: One categorical column for symbols, otherwise one column per entry of a vector.
        mean: (columns,) mean of the training part before standardization, 0 for a categorical column. It is ``None``
            before `setup` and without `standardize`.
        std: (columns,) standard deviation, 1 for a categorical column; likewise.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = Path(folder.name, "weather.txt").write_text("sun sun rain\\nrain rain\\n")
        >>> data = FileDataModule("weather.txt", data_dir=folder.name, val_fraction=0, test_fraction=0)
        >>> data.setup()
        >>> data.symbol_names
        ['rain', 'sun']
        >>> data.train_sequences.lengths.tolist()
        [3, 2]
        >>> folder.cleanup()
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
        train_on_labels: bool = True,
        input_columns: list[str] | None = None,
        time_column: str | None = None,
        time_format: str | None = None,
        action_column: str | None = None,
        state_weight_columns: list[str] | None = None,
        kind: Kind = "auto",
        vocabulary: list[str] | None = None,
        unknown: str | None = None,
        num_symbols: int | None = None,
        unit: Unit = "word",
        sequence_per: SequencePer = "line",
        missing_token: str | None = None,
        standardize: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(standardize=standardize, **kwargs)
        named = vocabulary is not None or unknown is not None
        _check_choices(format, kind, unit, sequence_per, named)
        paths = {"train": path, "val": val_path, "test": test_path}
        files, file_format = _find_parts(paths, self.data_dir, format)
        singles = {"labels": label_column, "times": time_column, "actions": action_column}
        several = {"inputs": input_columns, "state_weights": state_weight_columns}
        others = {step: [name] for step, name in singles.items() if name is not None}
        others |= {step: names for step, names in several.items() if names}
        if file_format == "text":
            given = {"columns": columns, "sequence_column": sequence_column, "categorical_columns": categorical_columns}
            _refuse_for_text([option for option, value in given.items() if value] + [OPTIONS[step] for step in others])
        if time_format is not None and time_column is None:
            raise ValueError("`time_format` requires `time_column`, which is not given. Set it, or omit `time_format`.")
        categories = categorical_columns if isinstance(categorical_columns, dict) else {}
        listed = dict.fromkeys(categorical_columns or [], False) | {
            name: not isinstance(given, int) for name, given in categories.items()
        }
        kind = "symbols" if named else kind
        layout = (sequence_column, columns, kind, named, unit, sequence_per, missing_token, listed, others, time_format)
        self._reader = Reader(file_format, delimiter, *layout)
        if not train_on_labels and label_column is None:
            raise ValueError(
                "`train_on_labels` requires `label_column`, which is not given. Set it, or omit the option."
            )
        self._files = files
        self._train_on_labels = train_on_labels
        self._columns_given = columns is not None
        self._categories = categories
        self._vocabulary_given = vocabulary
        self._num_symbols_given = num_symbols
        self._unknown = unknown
        self.input_names = input_columns

    def open_source(self) -> None:
        """Reads the files and sets `columns`, `vocabulary` and the names of labels and actions."""
        files, reader = self._files, self._reader
        vocabulary, categories = self._vocabulary_given, self._categories
        self._dataset, metadata = self.cached(cache_name([CACHE_VERSION, reader], files), lambda: reader.read(files))
        self._parts: dict[str, int] = json.loads(metadata["parts"])
        # Each entry has the name and the kind of a column, and the names of its categories with their locations.
        self._read: list[dict[str, Any]] = json.loads(metadata["columns"])
        self._coded: dict[str, dict[str, Any]] = json.loads(metadata["coded"])  # The same for labels and actions.
        self.label_names = self._coded["labels"]["names"] if "labels" in self._coded else None
        self.action_names = self._coded["actions"]["names"] if "actions" in self._coded else None
        values = self._values()
        if values.actions is not None:
            self.num_actions = len(self.action_names) if self.action_names else int(values.actions.max()) + 1
        if values.is_discrete:
            if self.standardize:
                raise ValueError(
                    f"`standardize` applies to vectors, but {files['train'][0]} contains symbols. "
                    "Omit it, or set `kind` to 'vectors'."
                )
            chosen = next(iter(categories.values()), None)
            vocabulary = chosen if vocabulary is None and isinstance(chosen, list) else vocabulary
            num_symbols = self._num_symbols_given
            num_symbols = chosen if num_symbols is None and isinstance(chosen, int) else num_symbols
            found = self._symbols(values, vocabulary, num_symbols)
        else:
            found = [self._column(number, categories) for number in range(len(self._read))]
        if self._read[0]["name"] is None:
            self.columns = found  # A text has no column names to match in new data.
        else:
            self.set_columns(found, chosen=self._columns_given)
        self._encoded(values)  # Raises an error for names that are not among the categories.

    def _symbols(self, values: Sequences, vocabulary: list[str] | None, num_symbols: int | None) -> list[Column]:
        """Returns the column of symbols, and sets the vocabulary if they have names."""
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
                f"`num_symbols` must be {'' if self.vocabulary is not None else 'at least '}{needed} for these data, "
                f"but is {num_symbols} instead."
            )
        categories = num_symbols or needed if self.vocabulary is None else tuple(self.vocabulary.names)
        return [Column(self._read[0]["name"] or "symbol", "categorical", categories)]

    def _column(self, number: int, categories: dict[str, list[str] | int]) -> Column:
        """Returns one column of vectors.

        Args:
            number: Index of the column.
            categories: Names, or numbers of categories, that the user gave for some columns.
        """
        read = self._read[number]
        if read["kind"] == "real":
            return Column(read["name"])
        given = categories.get(read["name"])
        if read["names"] is None:
            needed = int(_numbers(self._values(), number).max()) + 1
            if isinstance(given, int) and needed > given:
                raise ValueError(
                    f"Column {read['name']!r} must contain integers from 0 to {given - 1}, for {given} categories, "
                    f"but contains {needed - 1}."
                )
            return Column(read["name"], "categorical", given if isinstance(given, int) else needed)
        if isinstance(given, int):
            raise ValueError(
                f"`categorical_columns` must have names for column {read['name']!r}, which contains names, but has "
                f"the number {given} instead."
            )
        return Column(read["name"], "categorical", tuple(given or self._seen(number)))

    # Sequences as read, and with the indices of names

    def _values(self) -> Sequences:
        """Returns the sequences of all parts as they were read."""
        return from_table(self._dataset.with_format("arrow")[:])

    def _training(self, values: Sequences) -> Sequences:
        """Returns the training part of the sequences of all parts."""
        held_out = [part for part in ("val", "test") if part not in self._parts]
        indices = self.split(self._parts["train"], held_out)["train"]
        part: Sequences = values[: self._parts["train"]]
        return part if indices is None else part[indices]

    def _seen(self, number: int) -> list[str]:
        """Returns the names in one column of the training part, sorted."""
        return _occurring(self._read[number]["names"], _numbers(self._training(self._values()), number))

    def _encoded(self, values: Sequences) -> Sequences:
        """Replaces the indices of names by those of `columns`, `label_names` and `action_names`.

        Args:
            values: Sequences with their features in the order of `columns`.
        """
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
        """Returns a table from the indices of one column in the cache to those in `names`; see the function `_lookup`.

        Raises an error if a name in the data is not in `names` and there is no `unknown` symbol.
        """
        strange = (
            None
            if self._unknown is not None
            else next((number for number, name in enumerate(read["names"]) if name not in set(names)), None)
        )
        if strange is not None:
            option = "vocabulary" if symbols else "categorical_columns"
            is_given = self._vocabulary_given is not None or bool(self._categories)
            where = f"`{option}`" if is_given else "the training part"
            what = "Symbols" if symbols else f"Categories of column {read['name']!r}"
            remedy = (
                "Set `unknown` to a name for all such symbols, or add it to `vocabulary`."
                if symbols
                else "List the categories in `categorical_columns`."
            )
            raise ValueError(
                f"{what} must be in {where}, but {read['names'][strange]!r} in {read['places'][strange]} is not. "
                f"{remedy}"
            )
        return _lookup(read, names, self._unknown)

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        read = self._values()
        values = self._encoded(self.in_order(read))
        if self.standardize:
            values = values.with_values(self.scaled(values.values, self._training(values).values))
        labels = None if self._train_on_labels else values.labels
        states = None if labels is None else values.with_values(labels)
        if states is not None:
            values = values.replaced(labels=None)
        dataset = self._dataset if values is read else as_dataset(as_table(values, states))
        ends = np.cumsum(list(self._parts.values())).tolist()
        return {
            part: dataset.select(range(end - size, end))
            for (part, size), end in zip(self._parts.items(), ends, strict=True)
        }

    # Checkpoints

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the sequences of `path` as they were read, independent of the location of the file."""
        values: Sequences = self._values()[: self._parts["train"]]
        packed, every = values.values.long() if values.is_discrete else values.values.clone(), []
        # Names are renumbered, because other names in the validation or test part must not change the hash.
        for number, read in enumerate(self._read):
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
        """Restores the standardization and the names of training.

        If the model was trained on other data, all sequences are used for validation and testing.
        """
        trained_on = state_dict.get("fingerprint", self.fingerprint)
        before = (self.label_names, self.action_names)
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
        """Returns the names of labels or actions in training, after a check that they contain all names of the data."""
        read = self._coded[step]
        if (names is None) != (read["names"] is None):
            forms = ("integers", "names") if names is None else ("names", "integers")
            raise ValueError(
                f"{step.capitalize()} must be {forms[0]} as in training, but column {read['name']!r} contains "
                f"{forms[1]}."
            )
        for name, place in zip(read["names"] or [], read["places"] or [], strict=True):
            if names is not None and name not in names:
                raise ValueError(
                    f"{step.capitalize()} must be those of training, {some(names)}, but {place} has {name!r} instead."
                )
        return names


def _numbers(values: Sequences, number: int) -> np.ndarray:
    """Returns (steps,) int64 indices of the categories in one column, -1 for a missing value."""
    entries = values.values if values.is_discrete else values.values[:, number].nan_to_num(nan=MISSING)
    numbers: np.ndarray = entries.long().numpy()
    return numbers


def _occurring(names: list[str], numbers: np.ndarray) -> list[str]:
    """Returns the names whose indices occur in `numbers`, sorted."""
    seen = np.bincount(numbers[numbers != MISSING], minlength=len(names)) > 0
    return sorted(name for name, there in zip(names, seen, strict=True) if there)


def _lookup(read: dict[str, Any], names: list[str], unknown: str | None = None) -> np.ndarray | None:
    """Returns a table from the indices of the names in a column to those in `names`, or ``None`` if none changes.

    The last entry is -1, so that the index -1 of a missing value is not changed.
    """
    number = {name: i for i, name in enumerate(names)}
    lookup = [number[name] if name in number else number[str(unknown)] for name in read["names"]]
    return None if lookup == list(range(len(lookup))) else np.array([*lookup, MISSING], symbol_dtype(len(names)))


def _check_choices(format: str, kind: str, unit: str, sequence_per: str, has_vocabulary: bool) -> None:
    require_choice("format", format, Format)
    require_choice("kind", kind, Kind)
    require_choice("unit", unit, Unit)
    require_choice("sequence_per", sequence_per, SequencePer)
    if has_vocabulary and kind == "vectors":
        raise ValueError("`vocabulary` and `unknown` apply to symbols, but `kind` is 'vectors'. Omit them.")


def _refuse_for_text(used: list[str]) -> None:
    if used:
        raise ValueError(f"`{used[0]}` applies to tables, but the files are text. Omit it, or set `format`.")


def _find_parts(
    paths: dict[str, str | list[str] | None], data_dir: Path, format: Format
) -> tuple[dict[str, list[Path]], str]:
    """Returns the files of each part that has a path, and their format."""
    endings = ENDINGS if format == "auto" else None
    files = {
        part: find_files(given, data_dir, "path" if part == "train" else f"{part}_path", endings)
        for part, given in paths.items()
        if given is not None
    }
    formats = {_format(file) if format == "auto" else format for group in files.values() for file in group}
    if len(formats) > 1:
        raise ValueError(
            f"`path` must match files of one format, but they are {', '.join(sorted(formats))}. "
            "Use a narrower pattern, or set `format`."
        )
    return files, formats.pop()


def _format(path: Path) -> str:
    """Returns the format of a file according to its ending."""
    if ending(path) not in ENDINGS:
        raise ValueError(
            f"`format` must be given for {path}, because its ending is none of {', '.join(ENDINGS)} "
            "(optionally with .gz)."
        )
    return ENDINGS[ending(path)]
