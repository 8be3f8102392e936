"""Reads tables (CSV, TSV, Parquet, JSON lines) and plain text into packed sequences; every error names the file and the row."""

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
from datamodules.csv_options import parse_options
from datamodules.paths import some
from datamodules.series import as_seconds
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING

OPTIONS = {"labels": "label_column", "inputs": "input_columns", "times": "time_column", "actions": "action_column"}
DEEPEST = 100  # levels of nested JSON; some thousands overflow the stack of Arrow's reader and end the process
JSON_STRING = re.compile(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"')
NO_BRACKET = bytes(set(range(256)) - set(b"[]{}\n"))


class _Steps(NamedTuple):
    """The steps of one file in its order: columns and their names (none for a text), row of each step, number of its sequence.

    `others` are the columns that come with the values: of labels, inputs, times and actions.
    """

    columns: list[pa.Array]
    names: list[str]
    others: dict[str, list[pa.Array]]
    rows: np.ndarray
    keys: np.ndarray
    num_sequences: int


class Reader(NamedTuple):
    """Reads files into one packed Arrow table; the fields are the options that what it reads depends on."""

    format: str
    delimiter: str | None
    sequence_column: str | None
    columns: list[str] | None
    kind: str
    named: bool
    unit: str
    per: str
    missing_token: str | None
    categorical: dict[str, bool]  # columns of categories, and whether they are read as names even if they hold numbers
    others: dict[str, list[str]]  # the columns of labels, inputs, times and actions
    time_format: str | None

    def read(self, files: dict[str, list[Path]]) -> pa.Table:
        """All files as a table of `as_table`; its metadata has the number of sequences in each part, and the columns with the names in them."""
        paths = [file for group in files.values() for file in group]
        contents = [self._read_file(path) for path in paths]
        names = contents[0].names
        for path, content in zip(paths, contents, strict=True):
            if sorted(content.names) != sorted(names):
                raise ValueError(
                    f"All files must have the same columns, but {path} has {some(content.names)} and {paths[0]} has {some(names)}. Choose them with `columns`."
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
            with pa.input_stream(str(path)) as stream:  # undoes gzip by the ending of the name
                data = stream.read_buffer()
            if data.size == 0:
                raise ValueError(f"{path} must not be empty, but is.")
            content = self._text(data) if self.format == "text" else self._table(data, path)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be a {self.format} file, but cannot be read as one: {error}") from None
        if content.num_sequences == 0 or not len(content.rows):
            raise ValueError(
                f"{path} must not be empty, but has no {'lines' if self.format == 'text' else 'rows'} with data."
            )
        return content

    def _text(self, data: pa.Buffer) -> _Steps:
        text = data.to_pybytes().decode("utf-8-sig").replace("\r\n", "\n")
        if self.unit == "char":
            characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            different, codes = np.unique(characters, return_inverse=True)
            values = pa.array(map(chr, different), pa.large_string()).take(pa.array(codes))
            skipped = (characters == ord("\n")) & (self.per == "line")
            rows = np.cumsum(characters == ord("\n")) - (characters == ord("\n"))  # the end of a line belongs to it
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
        keys = np.zeros_like(rows) if self.per == "file" else np.unique(keys, return_inverse=True)[1]
        return _Steps([values], [], {}, rows, keys, int(keys.max(initial=-1)) + 1)

    def _table(self, data: pa.Buffer, path: Path) -> _Steps:
        source = pa.BufferReader(data)
        if self.format == "csv":
            parse = parse_options(data, path, self.delimiter)
            names = pa.csv.open_csv(source, parse_options=parse).schema.names
            columns, every = self._choose(names, path)
            parse.ignore_empty_lines = (
                len(names) > 1
            )  # where there is one cell in a line, an empty line is an empty cell
            convert = pa.csv.ConvertOptions(
                include_columns=every,
                column_types=dict.fromkeys(every, pa.large_string()),
                strings_can_be_null=True,
                null_values=[""],
            )
            table = pa.csv.read_csv(pa.BufferReader(data), parse_options=parse, convert_options=convert)
        elif self.format == "parquet":
            columns, every = self._choose(pa.parquet.read_schema(source).names, path)
            table = pa.parquet.read_table(pa.BufferReader(data), columns=every)
        else:
            _require_safe_json(data, path)
            # One block: a sequence is one line, however long, and types are inferred from all of them.
            whole = pa.json.ReadOptions(block_size=min(data.size + 1, 2**31 - 1))
            table = pa.json.read_json(source, read_options=whole)
            columns, every = self._choose(table.column_names, path)
            inferred = [table.schema.field(name) for name in every]
            if dates := [
                field.with_type(_without_dates(field.type))
                for field in inferred
                if field.type != _without_dates(field.type)
            ]:
                table = pa.json.read_json(
                    pa.BufferReader(data),
                    read_options=whole,
                    parse_options=pa.json.ParseOptions(explicit_schema=pa.schema(dates)),
                )
        steps = [plain(table[name].combine_chunks()) for name in columns]
        rows = np.arange(len(table))
        nested = [name for name, column in zip(columns, steps, strict=True) if is_list(column.type)]
        if nested:
            if len(columns) > 1 or self.sequence_column is not None:
                raise ValueError(
                    f"A column of lists must be the only one, but {nested[0]!r} of {path} is read together with others. "
                    "Set `columns` to it alone, without `sequence_column`."
                )
            lists = steps[0]
            if lists.null_count:
                raise ValueError(
                    f"Column {nested[0]!r} must hold lists, but row {int(np.argmax(lists.is_null())) + 1} of {path} is null. Use an empty list."
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
                f"`sequence_column` must say for each row which sequence it belongs to, but row {int(np.argmax(encoded.is_null())) + 1} of {path} is empty."
            )
        return _Steps(
            steps, columns, others, rows, encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)
        )

    def _others(self, table: pa.Table, lengths: np.ndarray | None, path: Path) -> dict[str, list[pa.Array]]:
        """The columns that come with the values, one entry for each step. `lengths` are those of lists, if the values are lists."""
        found: dict[str, list[pa.Array]] = {}
        for kind, names in self.others.items():
            flat = [flattened(table[name].combine_chunks(), lengths, name, path) for name in names]
            found[kind] = [
                column if kind == "times" and pa.types.is_temporal(column.type) else plain(column) for column in flat
            ]
        return found

    def _choose(self, names: list[str], path: Path) -> tuple[list[str], list[str]]:
        """The columns of values, and the same with those of sequences, labels, inputs, times and actions."""
        options = {"sequence_column": [] if self.sequence_column is None else [self.sequence_column]}
        options |= {OPTIONS[kind]: those for kind, those in self.others.items()}
        others = [name for wanted in options.values() for name in wanted]
        columns = self.columns or [name for name in names if name not in others]
        for option, wanted in {"columns": columns, **options}.items():
            if missing := [name for name in wanted if name not in names]:
                raise ValueError(
                    f"`{option}` must be in the file, but {path} has no column {missing[0]!r}. It has {some(names)}."
                )
        require_different([*columns, *others], names, path)
        _require_one_use({"columns": columns, **options})
        if not columns:
            used = ", ".join(f"`{option}`" for option, wanted in options.items() if wanted)
            raise ValueError(f"There must be a column of values apart from {used}, but {path} has only {some(names)}.")
        if strange := [name for name in self.categorical if name not in columns]:
            raise ValueError(
                f"`categorical_columns` must be columns of values, but {strange[0]!r} is not. In {path} they are {some(columns)}."
            )
        return columns, [*columns, *others]

    # All files together

    def _clean(self, column: pa.Array, as_names: bool) -> pa.Array:
        """The column as int64, float64, names, or vectors, with null where a value is missing; vectors are cleaned when they are taken apart."""
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
        """For each column the numbers of its names or symbols, or (steps,) numbers; or (steps, features) for a column of vectors."""
        declared = [name in self.categorical for name in names] or [False]
        cleaned = [
            self._clean(column, self.named or self.categorical.get(name, False))
            for column, name in zip(columns, names or [""], strict=True)
        ]
        first, single = cleaned[0], len(columns) == 1
        if self.kind == "symbols" and (not single or is_list(first.type)):
            raise ValueError(
                f"Symbols must be in one column, but here are {'vectors' if single else len(columns)}. Choose it with `columns`."
            )
        if self.kind == "vectors" and single and declared[0]:
            raise ValueError(
                f"A single categorical column must be read as symbols, but `kind` is 'vectors'. Leave it out, or {names[0]!r} out of `categorical_columns`."
            )
        if is_list(first.type):
            if declared[0]:
                raise ValueError(
                    f"`categorical_columns` must hold names or whole numbers, but {names[0]!r} holds vectors."
                )
            return [vectors(first, lambda entries: self._clean(entries, False), place)]
        found: list[Codes | np.ndarray] = []
        for column, is_declared in zip(cleaned, declared, strict=True):
            if is_declared:
                found.append(
                    codes(
                        column,
                        place,
                        "Categories must be names or whole numbers",
                        "Leave the column out of `categorical_columns`.",
                    )
                )
            elif single and (self.kind == "symbols" or (self.kind == "auto" and not pa.types.is_floating(column.type))):
                found.append(codes(column, place))
            else:
                found.append(numbers(column, place))
        return found

    def _values(self, found: list[Codes | np.ndarray], names: list[str]) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """(steps,) symbols or (steps, columns) vectors, with NaN where a value is missing; and name, kind and categories of each column."""
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
        """The columns of labels, inputs, times and actions as numbers; and the names in those of labels and actions."""
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
                    each = "an action" if kind == "actions" else "all inputs"
                    raise ValueError(
                        f"Each row must have {each}, but {where(int(np.argmax(column.is_null())))} is empty."
                    )
                if kind == "inputs":
                    found.append(numbers(column, where, "Inputs", "Set `input_columns` to columns of numbers."))
                    continue
                there = codes(column, where, f"{kind.capitalize()} must be names or whole numbers", "")
                if kind == "actions" and np.any(there.numbers == MISSING):
                    raise ValueError(
                        f"Actions must be names or whole numbers from 0, but {where(int(np.argmax(there.numbers == MISSING)))} has {MISSING} instead."
                    )
                found.append(there.numbers)
                coded[kind] = _described(name, there)
            steps[kind] = np.stack(found, axis=1) if kind == "inputs" else found[0]
        return steps, coded

    def _clean_times(self, column: pa.Array) -> pa.Array:
        """A column of times with null in the place of the missing token; dates stay text."""
        if self.missing_token is None or pa.types.is_temporal(column.type):
            return column
        return pc.if_else(is_token(column, self.missing_token, numeric=True), None, column)

    def _require_order(self, times: np.ndarray, lengths: np.ndarray, place: Callable[[int], str]) -> None:
        """Raises where (steps,) times decrease within a sequence."""
        falls = np.append(False, np.diff(times) < 0)
        starts = np.cumsum(lengths) - lengths
        falls[starts[starts < len(falls)]] = False
        if falls.any():
            step = int(np.argmax(falls))
            raise ValueError(
                f"Times must not decrease within a sequence, but column {self.others['times'][0]!r} in {place(step)} is {times[step - 1] - times[step]:g} s "
                f"before {place(step - 1)}. Sort the rows of each sequence by time."
            )


def _described(name: str | None, found: Codes | None) -> dict[str, Any]:
    if found is None:
        return {"name": name, "kind": "real"}
    return {"name": name, "kind": "categorical", "names": found.names, "places": found.places}


def _together(arrays: list[pa.Array], paths: list[Path]) -> pa.Array:
    """The columns of several files, one after the other."""
    try:
        return pa.concat_tables([pa.table([array], ["x"]) for array in arrays], promote_options="permissive")[
            "x"
        ].combine_chunks()
    except pa.ArrowException as error:
        raise ValueError(
            f"Columns must be of one type in all files, but those of {some(list(map(str, paths)))} are not: {error}"
        ) from None


def require_observed(observed: np.ndarray, path: Path, names: list[str]) -> None:
    """Raises for the first feature of a file without an observed value.

    Args:
        observed: (steps, features) whether a value was observed.
        path: The file.
        names: The columns of the file: one per feature, one that holds vectors, or none.
    """
    if (unseen := np.flatnonzero(~observed.any(axis=0))).size:
        feature = int(unseen[0])
        column = (
            f"column {names[feature]!r} in "
            if len(names) == observed.shape[1]
            else f"entry {feature} of column {names[0]!r} in "
            if names
            else ""
        )
        remedy = "Leave it out of `columns`, or the file out of `path`" if names else "Leave the file out of `path`"
        raise ValueError(
            f"Each file and column must have an observed value, but in {column}{path} nothing is observed. {remedy}."
        )


def require_different(wanted: list[str], names: list[str], path: Path) -> None:
    """Raises where one of the wanted columns is not the only one of its name."""
    for name in wanted:
        if (count := names.count(name)) > 1:
            raise ValueError(
                f"Columns must have different names, but {path} has {count} columns {name!r}. Rename them in the file."
            )


def _require_one_use(options: dict[str, list[str]]) -> None:
    """Raises where a column is named twice, in one option or in two."""
    found: dict[str, str] = {}
    for option, wanted in options.items():
        for name in wanted:
            if name in found:
                both = f"twice in `{option}`" if found[name] == option else f"in `{found[name]}` and in `{option}`"
                raise ValueError(f"Each column must have one use, but {name!r} is {both}. Leave it out of one of them.")
            found[name] = option


def _require_safe_json(data: pa.Buffer, path: Path) -> None:
    """Raises for what would crash Arrow's reader: a file that begins with null, and deep nesting."""
    text = data.to_pybytes()
    start = text.removeprefix(b"\xef\xbb\xbf").lstrip()[:20]
    if not start.startswith(b"{"):
        raise ValueError(
            f'{path} must be a jsonl file, with one object per line such as {{"x": 1}}, but begins with {start!r} instead.'
        )
    brackets = JSON_STRING.sub(b"", text).translate(None, NO_BRACKET)  # those in strings do not count
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
    """The type with text for times: JSON has no dates, but Arrow takes strings that look like one for a timestamp."""
    if is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    return pa.large_string() if pa.types.is_timestamp(kind) else kind
