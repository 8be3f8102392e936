"""Reads tables (CSV, TSV, Parquet, JSON lines) and plain text into packed sequences. Errors name file and row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from datamodules.base import as_table
from datamodules.cells import Codes, codes, flattened, from_text, is_list, is_text, is_token, numbers, plain, vectors
from datamodules.checks import require_distinct
from datamodules.csv_options import parse_options
from datamodules.paths import some
from datamodules.series import as_seconds
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING

OPTIONS = {
    "labels": "label_column",
    "inputs": "input_columns",
    "times": "time_column",
    "actions": "action_column",
    "state_weights": "state_weight_columns",
}
NUMERIC = {"inputs": "Inputs", "state_weights": "State weights"}  # Those that may have several columns.
DEEPEST = 100  # Levels of nested JSON. Several thousand would overflow the stack of Arrow's reader and crash.
JSON_STRING = re.compile(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"')
NO_BRACKET = bytes(set(range(256)) - set(b"[]{}\n"))


class _Steps(NamedTuple):
    """The steps of one file in the order of the file.

    columns: Cells of each column of values.
    names: Names of the columns; empty for a text.
    others: Columns of labels, inputs, times, actions and state weights.
    rows: (steps,) row of each step.
    keys: (steps,) index of the sequence of each step.
    num_sequences: Number of sequences.
    """

    columns: list[pa.Array]
    names: list[str]
    others: dict[str, list[pa.Array]]
    rows: np.ndarray
    keys: np.ndarray
    num_sequences: int


class Reader(NamedTuple):
    """Reads files into one packed Arrow table. The fields are the options of reading and enter the cache name."""

    format: str
    delimiter: str | None
    sequence_column: str | None
    columns: list[str] | None
    kind: str
    named: bool
    unit: str
    sequence_per: str
    missing_token: str | None
    categorical: dict[str, bool]  # Columns of categories, and whether to read numbers in them as names.
    others: dict[str, list[str]]  # Columns of labels, inputs, times, actions and state weights.
    time_format: str | None

    def read(self, files: dict[str, list[Path]]) -> pa.Table:
        """Reads the files of each part into one table of `as_table`.

        Its metadata contain the number of sequences in each part, and the columns with the names in them.
        """
        paths = [file for group in files.values() for file in group]
        contents = [self._read_file(path) for path in paths]
        names = contents[0].names
        for path, content in zip(paths, contents, strict=True):
            if sorted(content.names) != sorted(names):
                raise ValueError(
                    f"All files must have the same columns, but {path} has {some(content.names)} and {paths[0]} has "
                    f"{some(names)}. Choose them with `columns`."
                )
        starts = np.cumsum([0, *(len(content.rows) for content in contents)])
        rows = np.concatenate([content.rows for content in contents])

        def place(step: int) -> str:
            file = int(np.searchsorted(starts, step, side="right")) - 1
            return f"{'line' if self.format == 'text' else 'row'} {rows[step] + 1} of {paths[file]}"

        columns = [
            _together([content.columns[content.names.index(names[i]) if names else i] for content in contents], paths)
            for i in range(len(contents[0].columns))
        ]
        found = self._convert(columns, names, place)
        values, described = self._values(found, names)
        observed = (values != MISSING)[:, np.newaxis] if values.ndim == 1 else ~np.isnan(values)
        for path, rows_of_file in zip(paths, np.split(observed, starts[1:-1]), strict=True):
            require_observed(rows_of_file, path, names)
        others = {
            kind: [_together([content.others[kind][i] for content in contents], paths) for i in range(len(those))]
            for kind, those in self.others.items()
        }
        steps, coded = self._convert_others(others, place)

        sizes = [content.num_sequences for content in contents]
        keys = np.concatenate(
            [content.keys + first for content, first in zip(contents, np.cumsum([0, *sizes[:-1]]), strict=True)]
        )
        order = np.argsort(keys, kind="stable") if np.any(np.diff(keys) < 0) else None
        if order is not None:
            values, steps = values[order], {kind: column[order] for kind, column in steps.items()}
        lengths = np.bincount(keys, minlength=sum(sizes))
        if "times" in steps:
            self._require_order(
                steps["times"], lengths, lambda step: place(step if order is None else int(order[step]))
            )
        parts = {part: sum(sizes[paths.index(file)] for file in group) for part, group in files.items()}
        metadata = {"columns": json.dumps(described), "parts": json.dumps(parts), "coded": json.dumps(coded)}
        return as_table(Sequences.from_lengths(values, lengths, **steps)).replace_schema_metadata(metadata)

    # One file

    def _read_file(self, path: Path) -> _Steps:
        try:
            with pa.input_stream(str(path)) as stream:  # Decompresses files that end in ".gz".
                data = stream.read_buffer()
            if data.size == 0:
                raise ValueError(f"{path} must not be empty, but is.")
            content = self._text(data) if self.format == "text" else self._table(data, path)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be a {self.format} file, but cannot be read as one: {error}") from None
        if content.num_sequences == 0 or not len(content.rows):
            raise ValueError(
                f"{path} must not be empty, but has no {'lines' if self.format == 'text' else 'rows'} of data."
            )
        return content

    def _text(self, data: pa.Buffer) -> _Steps:
        """Reads the symbols of a text."""
        text = data.to_pybytes().decode("utf-8-sig").replace("\r\n", "\n")
        if self.unit == "char":
            characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            different, codes = np.unique(characters, return_inverse=True)
            values = pa.array(map(chr, different), pa.large_string()).take(pa.array(codes))
            skipped = (characters == ord("\n")) & (self.sequence_per == "line")
            rows = np.cumsum(characters == ord("\n")) - (characters == ord("\n"))  # A line includes its line break.
            keys = rows
        else:
            values = pa.array(text.removesuffix("\n").split("\n"), pa.large_string())
            rows = np.arange(len(values))
            if self.unit == "word":
                words = pc.utf8_split_whitespace(values)
                values, rows = words.flatten(), np.repeat(rows, pc.list_value_length(words).to_numpy())
            else:
                values = pc.utf8_trim_whitespace(values)
            skipped = pc.equal(values, "").to_numpy(zero_copy_only=False)
            keys = rows if self.unit == "word" else np.cumsum(skipped)
        values, rows, keys = values.filter(pa.array(~skipped)), rows[~skipped], keys[~skipped]
        keys = np.zeros_like(rows) if self.sequence_per == "file" else np.unique(keys, return_inverse=True)[1]
        return _Steps([values], [], {}, rows, keys, int(keys.max(initial=-1)) + 1)

    def _read_table(self, data: pa.Buffer, path: Path) -> tuple[pa.Table, list[str]]:
        """Returns the table with all columns that are used, and the names of the columns of values."""
        source = pa.BufferReader(data)
        if self.format == "csv":
            parse = parse_options(data, path, self.delimiter)
            names = pa.csv.open_csv(source, parse_options=parse).schema.names
            columns, every = self._choose(names, path)
            parse.ignore_empty_lines = len(names) > 1  # With a single column, an empty line is an empty cell.
            convert = pa.csv.ConvertOptions(
                include_columns=every,
                column_types=dict.fromkeys(every, pa.large_string()),
                strings_can_be_null=True,
                null_values=[""],
            )
            return pa.csv.read_csv(pa.BufferReader(data), parse_options=parse, convert_options=convert), columns
        if self.format == "parquet":
            columns, every = self._choose(pa.parquet.read_schema(source).names, path)
            return pa.parquet.read_table(pa.BufferReader(data), columns=every), columns
        _require_safe_json(data, path)
        # A single block, so that lines may have any length and types are inferred from all lines.
        whole = pa.json.ReadOptions(block_size=min(data.size + 1, 2**31 - 1))
        table = pa.json.read_json(source, read_options=whole)
        columns, every = self._choose(table.column_names, path)
        inferred = [table.schema.field(name) for name in every]
        dates = [
            field.with_type(_without_dates(field.type))
            for field in inferred
            if field.type != _without_dates(field.type)
        ]
        if dates:
            as_text = pa.json.ParseOptions(explicit_schema=pa.schema(dates))
            table = pa.json.read_json(pa.BufferReader(data), read_options=whole, parse_options=as_text)
        return table, columns

    def _table(self, data: pa.Buffer, path: Path) -> _Steps:
        """Reads the steps of a table, whose sequences are lists or the rows with the same `sequence_column`."""
        table, columns = self._read_table(data, path)
        steps = [plain(table[name].combine_chunks()) for name in columns]
        rows = np.arange(len(table))
        nested = [name for name, column in zip(columns, steps, strict=True) if is_list(column.type)]
        if nested:
            if len(columns) > 1 or self.sequence_column is not None:
                raise ValueError(
                    f"A column of lists must be the only one, but {nested[0]!r} of {path} is read with other columns. "
                    "Set `columns` to it alone, without `sequence_column`."
                )
            lists = steps[0]
            if lists.null_count:
                raise ValueError(
                    f"Column {nested[0]!r} must contain lists, but row {int(np.argmax(lists.is_null())) + 1} of {path} "
                    "is null. Use an empty list instead."
                )
            lengths = pc.list_value_length(lists).to_numpy()
            rows = np.repeat(rows, lengths)
            return _Steps([plain(lists.flatten())], columns, self._others(table, lengths, path), rows, rows, len(table))
        others = self._others(table, None, path)
        if self.sequence_column is None:
            return _Steps(steps, columns, others, rows, np.zeros_like(rows), min(1, len(table)))
        ids = table[self.sequence_column].combine_chunks()
        encoded = (ids.dictionary_decode() if isinstance(ids, pa.DictionaryArray) else ids).dictionary_encode()
        if encoded.null_count:
            raise ValueError(
                f"`sequence_column` must have a value in each row, but row {int(np.argmax(encoded.is_null())) + 1} of "
                f"{path} is empty."
            )
        return _Steps(
            steps, columns, others, rows, encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)
        )

    def _others(self, table: pa.Table, lengths: np.ndarray | None, path: Path) -> dict[str, list[pa.Array]]:
        """Returns the columns of labels, inputs, times, actions and state weights, with one entry per step.

        Args:
            table: Table with these columns.
            lengths: (rows,) lengths of the lists if the values are lists, else ``None``.
            path: Path of the file, for errors.
        """
        found: dict[str, list[pa.Array]] = {}
        for kind, names in self.others.items():
            flat = [flattened(table[name].combine_chunks(), lengths, name, path) for name in names]
            found[kind] = [
                column if kind == "times" and pa.types.is_temporal(column.type) else plain(column) for column in flat
            ]
        return found

    def _choose(self, names: list[str], path: Path) -> tuple[list[str], list[str]]:
        """Returns the columns of values, and all columns that are used."""
        options = {"sequence_column": [] if self.sequence_column is None else [self.sequence_column]}
        options |= {OPTIONS[kind]: those for kind, those in self.others.items()}
        others = [name for wanted in options.values() for name in wanted]
        columns = self.columns or [name for name in names if name not in others]
        for option, wanted in {"columns": columns, **options}.items():
            if missing := [name for name in wanted if name not in names]:
                raise ValueError(
                    f"`{option}` must be in the file, but {path} has no column {missing[0]!r}. It has {some(names)}."
                )
        require_distinct([*columns, *others], names, path)
        _require_one_use({"columns": columns, **options})
        if not columns:
            used = ", ".join(f"`{option}`" for option, wanted in options.items() if wanted)
            raise ValueError(f"There must be a column of values apart from {used}, but {path} has only {some(names)}.")
        if strange := [name for name in self.categorical if name not in columns]:
            raise ValueError(
                f"`categorical_columns` must be columns of values, but {strange[0]!r} is not. "
                f"The columns of values in {path} are {some(columns)}."
            )
        return columns, [*columns, *others]

    # All files together

    def _clean(self, column: pa.Array, as_names: bool) -> pa.Array:
        """Returns a column as int64, float64 or text, with null for missing values.

        Lists are not changed; their entries are cleaned by `vectors`.
        """
        if self.missing_token is not None and not is_list(column.type) and not pa.types.is_temporal(column.type):
            column = pc.if_else(is_token(column, self.missing_token, numeric=self.format != "text"), None, column)
        if as_names and not is_list(column.type):
            return column if is_text(column) else column.cast(pa.large_string())
        if is_text(column) and self.format == "csv":
            return from_text(column)
        return column

    def _convert(
        self, columns: list[pa.Array], names: list[str], place: Callable[[int], str]
    ) -> list[Codes | np.ndarray]:
        """Converts each column to codes of names or symbols, or to (steps,) numbers, or (steps, features) for lists."""
        declared = [name in self.categorical for name in names] or [False]
        cleaned = [
            self._clean(column, self.named or self.categorical.get(name, False))
            for column, name in zip(columns, names or [""], strict=True)
        ]
        first, single = cleaned[0], len(columns) == 1
        if self.kind == "symbols" and (not single or is_list(first.type)):
            raise ValueError(
                f"Symbols must be in one column, but there are {'vectors' if single else f'{len(columns)} columns'}. "
                "Choose one with `columns`."
            )
        if self.kind == "vectors" and single and declared[0]:
            raise ValueError(
                "A single categorical column must be read as symbols, but `kind` is 'vectors'. "
                f"Omit `kind`, or remove {names[0]!r} from `categorical_columns`."
            )
        if is_list(first.type):
            if declared[0]:
                raise ValueError(
                    f"`categorical_columns` must contain names or integers, but {names[0]!r} contains vectors."
                )
            return [vectors(first, lambda entries: self._clean(entries, False), place)]
        found: list[Codes | np.ndarray] = []
        for column, is_declared in zip(cleaned, declared, strict=True):
            if is_declared:
                found.append(
                    codes(
                        column,
                        place,
                        "Categories must be names or integers",
                        "Remove the column from `categorical_columns`.",
                    )
                )
            elif single and (self.kind == "symbols" or (self.kind == "auto" and not pa.types.is_floating(column.type))):
                found.append(codes(column, place))
            else:
                found.append(numbers(column, place))
        return found

    def _values(self, found: list[Codes | np.ndarray], names: list[str]) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Returns (steps,) symbols, or (steps, columns) vectors with NaN if missing, and describes each column."""
        if len(found) == 1 and isinstance(found[0], Codes):
            return found[0].numbers, [_described(names[0] if names else None, found[0])]
        described, entries = [], []
        for name, column in zip(names, found, strict=True):
            if isinstance(column, Codes):
                described.append(_described(name, column))
                entries.append(np.where(column.numbers == MISSING, np.nan, column.numbers)[:, np.newaxis])
            else:
                entries.append(column.reshape(len(column), -1))
                described += [
                    _described(name if column.ndim == 1 else f"{name}[{feature}]", None)
                    for feature in range(entries[-1].shape[1])
                ]
        return np.concatenate(entries, axis=1), described

    def _convert_others(
        self, others: dict[str, list[pa.Array]], place: Callable[[int], str]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Returns the other columns of each step as numbers, and describes those of labels and actions."""
        steps, coded = {}, {}
        for kind, columns in others.items():
            cleaned = [
                self._clean_times(column) if kind == "times" else self._clean(column, as_names=False)
                for column in columns
            ]
            found = []
            for name, column in zip(self.others[kind], cleaned, strict=True):

                def where(step: int, name: str = name) -> str:
                    return f"column {name!r} in {place(step)}"

                if kind == "times":
                    found.append(as_seconds(column, name, place, self.time_format))
                    continue
                if kind != "labels" and column.null_count:
                    each = f"all {NUMERIC[kind].lower()}" if kind in NUMERIC else "an action"
                    raise ValueError(
                        f"Each row must have {each}, but {where(int(np.argmax(column.is_null())))} is empty."
                    )
                if kind in NUMERIC:
                    remedy = f"Set `{OPTIONS[kind]}` to numeric columns."
                    found.append(numbers(column, where, NUMERIC[kind], remedy))
                    continue
                there = codes(column, where, f"{kind.capitalize()} must be names or integers", "")
                if kind == "actions" and np.any(missing := there.numbers == MISSING):
                    raise ValueError(
                        f"Actions must be names or integers from 0, but {where(int(np.argmax(missing)))} has {MISSING} "
                        "instead."
                    )
                found.append(there.numbers)
                coded[kind] = _described(name, there)
            steps[kind] = np.stack(found, axis=1) if kind in NUMERIC else found[0]
        return steps, coded

    def _clean_times(self, column: pa.Array) -> pa.Array:
        """Replaces the missing token in a column of times by null. Dates remain text."""
        if self.missing_token is None or pa.types.is_temporal(column.type):
            return column
        return pc.if_else(is_token(column, self.missing_token, numeric=True), None, column)

    def _require_order(self, times: np.ndarray, lengths: np.ndarray, place: Callable[[int], str]) -> None:
        """Raises an error if (steps,) times decrease within a sequence."""
        falls = np.append(False, np.diff(times) < 0)
        starts = np.cumsum(lengths) - lengths
        falls[starts[starts < len(falls)]] = False
        if falls.any():
            step = int(np.argmax(falls))
            raise ValueError(
                f"Times must not decrease within a sequence, but column {self.others['times'][0]!r} in {place(step)} "
                f"is {times[step - 1] - times[step]:g} s before {place(step - 1)}. "
                "Sort the rows of each sequence by time."
            )


def _described(name: str | None, found: Codes | None) -> dict[str, Any]:
    """Describes a column of categories, or of real numbers if `found` is ``None``, for the metadata of a table."""
    if found is None:
        return {"name": name, "kind": "real"}
    return {"name": name, "kind": "categorical", "names": found.names, "places": found.places}


def _together(arrays: list[pa.Array], paths: list[Path]) -> pa.Array:
    """Concatenates a column of several files."""
    tables = [pa.table([array], ["x"]) for array in arrays]
    try:
        return pa.concat_tables(tables, promote_options="permissive")["x"].combine_chunks()
    except pa.ArrowException as error:
        raise ValueError(
            f"Columns must have the same type in all files, but differ in {some(list(map(str, paths)))}: {error}"
        ) from None


def require_observed(observed: np.ndarray, path: Path, names: list[str]) -> None:
    """Raises an error for the first feature of a file that has no observed value.

    Args:
        observed: (steps, features) whether a value was observed.
        path: The file.
        names: The columns of the file: one per feature, one that holds vectors, or none.
    """
    if (unseen := np.flatnonzero(~observed.any(axis=0))).size:
        feature = int(unseen[0])
        column = ""
        if len(names) == observed.shape[1]:
            column = f"column {names[feature]!r} of "
        elif names:
            column = f"entry {feature} of column {names[0]!r} of "
        remedy = "Remove it from `columns`, or the file from `path`" if names else "Remove the file from `path`"
        raise ValueError(
            f"Each column of each file must have an observed value, but {column}{path} has none. {remedy}."
        )


def _require_one_use(options: dict[str, list[str]]) -> None:
    """Raises an error if a column is named twice, in one option or in two."""
    found: dict[str, str] = {}
    for option, wanted in options.items():
        for name in wanted:
            if name in found:
                both = f"twice in `{option}`" if found[name] == option else f"in `{found[name]}` and in `{option}`"
                raise ValueError(f"Each column must be used once, but {name!r} is {both}. Remove one of them.")
            found[name] = option


def _require_safe_json(data: pa.Buffer, path: Path) -> None:
    """Raises an error for files that crash Arrow's reader: those that begin with null, and those with deep nesting."""
    text = data.to_pybytes()
    start = text.removeprefix(b"\xef\xbb\xbf").lstrip()[:20]
    if not start.startswith(b"{"):
        raise ValueError(
            f'{path} must be a jsonl file, with one object per line such as {{"x": 1}}, but begins with {start!r} '
            "instead."
        )
    brackets = JSON_STRING.sub(b"", text).translate(None, NO_BRACKET)  # Brackets inside strings do not count.
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")], steps[list(b"]}")] = 1, -1
    levels = np.cumsum(steps[np.frombuffer(brackets, np.uint8)], dtype=np.int64)
    if levels.max(initial=0) > DEEPEST:
        deepest = int(np.argmax(levels))
        line = brackets.count(b"\n", 0, deepest) + 1
        raise ValueError(
            f"{path} must not be nested deeper than {DEEPEST} levels, but line {line} has {levels[deepest]}."
        )


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """Replaces timestamps in a type by text, because Arrow reads strings of JSON that look like dates as timestamps."""
    if is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    return pa.large_string() if pa.types.is_timestamp(kind) else kind
