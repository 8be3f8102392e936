"""Reads tables (CSV, TSV, Parquet, JSON lines) and plain text into packed sequences; every mistake is told with its file and row."""

from __future__ import annotations

import bisect
import contextlib
import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from datamodules.base import as_table
from datamodules.csv_options import parse_options
from datamodules.paths import some
from lightning_hmm.sequences import MISSING, Sequences

NO_NUMBER = pa.array(["", "NaN", "nan", "null"], pa.large_string())
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:inf|infinity)$"
DEEPEST = 100  # levels of nested JSON; some thousands overflow the stack of Arrow's reader and end the process
JSON_STRING = re.compile(rb'(?s)"[^"\\]*(?:\\.[^"\\]*)*"')
NO_BRACKET = bytes(set(range(256)) - set(b"[]{}\n"))


class _Steps(NamedTuple):
    """The steps of one file in its order: columns and their names (none for a text), row of each step, number of its sequence."""

    columns: list[pa.Array]
    names: list[str]
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

    def read(self, files: dict[str, list[Path]]) -> pa.Table:
        """All files as a table with column `values`; its metadata has the number of sequences in each part and the names of columns and symbols."""
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

        columns = []
        by_name = [[content.columns[content.names.index(name)] for name in names] if names else content.columns for content in contents]
        for arrays in zip(*by_name, strict=True):
            try:
                columns.append(pa.concat_tables([pa.table([array], ["x"]) for array in arrays], promote_options="permissive")["x"].combine_chunks())
            except pa.ArrowException as error:
                raise ValueError(f"Columns must be of one type in all files, but those of {some(list(map(str, paths)))} are not: {error}") from None
        values, metadata = self._convert([self._clean(column) for column in columns], place)
        observed = (values != MISSING)[:, np.newaxis] if values.ndim == 1 else ~np.isnan(values)
        for path, rows_of_file in zip(paths, np.split(observed, starts[1:-1]), strict=True):
            require_observed(rows_of_file, path, names)

        sizes = [content.num_sequences for content in contents]
        keys = np.concatenate([content.keys + first for content, first in zip(contents, np.cumsum([0, *sizes[:-1]]), strict=True)])
        if np.any(np.diff(keys) < 0):
            values = values[np.argsort(keys, kind="stable")]
        lengths = np.bincount(keys, minlength=sum(sizes))
        metadata["columns"] = json.dumps(names)
        metadata["parts"] = json.dumps({part: sum(sizes[paths.index(file)] for file in group) for part, group in files.items()})
        return as_table(Sequences.from_lengths(values, lengths)).replace_schema_metadata(metadata)

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
            raise ValueError(f"{path} must not be empty, but has no {'lines' if self.format == 'text' else 'rows'} with data.")
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
        return _Steps([values], [], rows, keys, int(keys.max(initial=-1)) + 1)

    def _table(self, data: pa.Buffer, path: Path) -> _Steps:
        source = pa.BufferReader(data)
        if self.format == "csv":
            parse = parse_options(data, path, self.delimiter)
            names = pa.csv.open_csv(source, parse_options=parse).schema.names
            columns, every = self._choose(names, path)
            parse.ignore_empty_lines = len(names) > 1  # where there is one cell in a line, an empty line is an empty cell
            convert = pa.csv.ConvertOptions(
                include_columns=every, column_types=dict.fromkeys(every, pa.large_string()), strings_can_be_null=True, null_values=[""]
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
            if dates := [field.with_type(_without_dates(field.type)) for field in inferred if field.type != _without_dates(field.type)]:
                table = pa.json.read_json(pa.BufferReader(data), read_options=whole, parse_options=pa.json.ParseOptions(explicit_schema=pa.schema(dates)))
        steps = [_plain(table[name].combine_chunks()) for name in columns]
        rows = np.arange(len(table))
        nested = [name for name, column in zip(columns, steps, strict=True) if _is_list(column.type)]
        if nested:
            if len(columns) > 1 or self.sequence_column is not None:
                raise ValueError(
                    f"A column of lists must be the only one, but {nested[0]!r} of {path} is read beside others. "
                    "Set `columns` to it alone, without `sequence_column`."
                )
            lists = steps[0]
            if lists.null_count:
                raise ValueError(f"Column {nested[0]!r} must hold lists, but row {int(np.argmax(lists.is_null())) + 1} of {path} is null. Use an empty list.")
            rows = np.repeat(rows, pc.list_value_length(lists).to_numpy())
            return _Steps([_plain(lists.flatten())], columns, rows, rows, len(table))
        if self.sequence_column is None:
            return _Steps(steps, columns, rows, np.zeros_like(rows), min(1, len(table)))
        ids = table[self.sequence_column].combine_chunks()
        encoded = (ids.dictionary_decode() if isinstance(ids, pa.DictionaryArray) else ids).dictionary_encode()
        if encoded.null_count:
            raise ValueError(
                f"`sequence_column` must say for each row which sequence it belongs to, but row {int(np.argmax(encoded.is_null())) + 1} of {path} is empty."
            )
        return _Steps(steps, columns, rows, encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary))

    def _choose(self, names: list[str], path: Path) -> tuple[list[str], list[str]]:
        """The columns of values, and the same with the one of sequences."""
        ids = [] if self.sequence_column is None else [self.sequence_column]
        columns = self.columns or [name for name in names if name not in ids]
        for option, wanted in (("columns", columns), ("sequence_column", ids)):
            if missing := [name for name in wanted if name not in names]:
                raise ValueError(f"`{option}` must be in the file, but {path} has no column {missing[0]!r}. It has {some(names)}.")
        require_different([*columns, *ids], names, path)
        if not columns:
            raise ValueError(f"There must be a column of values beside `sequence_column`, but {path} has only {some(names)}.")
        return columns, [*columns, *(name for name in ids if name not in columns)]

    # All files together

    def _clean(self, column: pa.Array) -> pa.Array:
        """The column as int64, float64, names, or vectors, with null where a value is missing; vectors are cleaned when they are taken apart."""
        if self.missing_token is not None and not _is_list(column.type):
            column = pc.if_else(_is_token(column, self.missing_token, numeric=self.format != "text"), None, column)
        if _is_text(column) and self.format == "csv" and not self.named:
            return _from_text(column)
        return column

    def _convert(self, columns: list[pa.Array], place: Callable[[int], str]) -> tuple[np.ndarray, dict[str, str]]:
        """(steps,) symbols or (steps, features) vectors; and the names of the symbols and where each first occurs."""
        first = columns[0]
        if self.kind == "vectors" or len(columns) > 1 or _is_list(first.type) or (self.kind == "auto" and pa.types.is_floating(first.type)):
            if self.kind == "symbols":
                raise ValueError(f"Symbols must be in one column, but here are {'vectors' if len(columns) == 1 else len(columns)}. Choose it with `columns`.")
            vectors = [_vectors(column, self._clean, place) if _is_list(column.type) else _numbers(column, place)[:, np.newaxis] for column in columns]
            return np.concatenate(vectors, axis=1), {}
        if self.named and not _is_text(first):
            first = first.cast(pa.large_string())
        if not _is_text(first):
            return _symbols(first, place), {}
        encoded = first.dictionary_encode()
        codes, found = encoded.indices.fill_null(MISSING).to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
        observed = np.flatnonzero(codes != MISSING)
        steps = np.empty(len(found), np.int64)
        steps[codes[observed[::-1]]] = observed[::-1]  # the last written stays: the first occurrence
        order = sorted(range(len(found)), key=found.__getitem__)
        ranks = np.empty(len(found) + 1, np.int64)
        ranks[[*order, MISSING]] = [*range(len(found)), MISSING]
        return ranks[codes], {"names": json.dumps([found[i] for i in order]), "places": json.dumps([place(int(steps[i])) for i in order])}


def require_observed(observed: np.ndarray, path: Path, names: list[str]) -> None:
    """Raises for the first feature of a file without an observed value.

    Args:
        observed: (steps, features) whether a value was observed.
        path: The file.
        names: The columns of the file: one per feature, one that holds vectors, or none.
    """
    if (unseen := np.flatnonzero(~observed.any(axis=0))).size:
        feature = int(unseen[0])
        column = f"column {names[feature]!r} in " if len(names) == observed.shape[1] else f"entry {feature} of column {names[0]!r} in " if names else ""
        remedy = "Leave it out of `columns`, or the file out of `path`" if names else "Leave the file out of `path`"
        raise ValueError(f"Each file and column must have an observed value, but in {column}{path} nothing is observed. {remedy}.")


def require_different(wanted: list[str], names: list[str], path: Path) -> None:
    """Raises where one of the wanted columns is not the only one of its name."""
    for name in wanted:
        if (count := names.count(name)) > 1:
            raise ValueError(f"Columns must have different names, but {path} has {count} columns {name!r}. Rename them in the file.")


def _require_safe_json(data: pa.Buffer, path: Path) -> None:
    """Raises for what would crash Arrow's reader: a file that begins with null, and deep nesting."""
    text = data.to_pybytes()
    start = text.removeprefix(b"\xef\xbb\xbf").lstrip()[:20]
    if not start.startswith(b"{"):
        raise ValueError(f'{path} must be a jsonl file, with one object per line such as {{"x": 1}}, but begins with {start!r} instead.')
    brackets = JSON_STRING.sub(b"", text).translate(None, NO_BRACKET)  # those in strings do not count
    steps = np.zeros(256, np.int8)
    steps[list(b"[{")], steps[list(b"]}")] = 1, -1
    levels = np.cumsum(steps[np.frombuffer(brackets, np.uint8)], dtype=np.int64)
    if levels.max(initial=0) > DEEPEST:
        deepest = int(np.argmax(levels))
        line = brackets.count(b"\n", 0, deepest) + 1
        raise ValueError(f"{path} must not be nested deeper than {DEEPEST} levels, but line {line} has {levels[deepest]}.")


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """The type with text for times: JSON has no dates, but Arrow takes strings that look like one for a timestamp."""
    if _is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    return pa.large_string() if pa.types.is_timestamp(kind) else kind


def _is_token(column: pa.Array, token: str, numeric: bool) -> pa.Array:
    """Which values are the token: the same text but for blanks around it or, if `numeric`, the same number."""
    bare = token.strip() or token
    number = Decimal(bare) if numeric and re.match(NUMBER, bare) else None
    if _is_text(column):
        trimmed = pc.utf8_trim_whitespace(column)
        found = pc.or_(pc.equal(column, token), pc.equal(trimmed, bare))
        if number is not None:
            numbers = pc.if_else(pc.match_substring_regex(trimmed, NUMBER), trimmed, None).cast(pa.float64())
            found = pc.or_(found, pc.equal(numbers, float(number)).fill_null(False))
        return found
    if number is not None and pa.types.is_floating(column.type):
        return pc.equal(column, float(number))
    if number is not None and abs(number) < 2**63 and number == int(number):
        return pc.equal(column, int(number))
    return pa.array(np.zeros(len(column), bool))


def _plain(column: pa.Array) -> pa.Array:
    """One Arrow type for each kind of value: names, whole numbers, numbers; lists as they are."""
    column = column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        column = column.cast(pa.float64())
        return pc.if_else(pc.is_nan(column), None, column)
    if _is_list(kind):
        return column
    raise pa.ArrowInvalid(f"a column of {kind}, where names, numbers or lists of them are needed.")


def _from_text(column: pa.Array) -> pa.Array:
    """Names as whole numbers, or else as numbers; and as they are if one of them is neither."""
    trimmed = pc.utf8_trim_whitespace(column)
    numbers = pc.if_else(pc.is_in(trimmed, NO_NUMBER), None, trimmed)
    if pc.any(pc.match_substring(numbers, "x", ignore_case=True)).as_py():  # 0x1F, which Arrow would take for 31
        return column
    numbers = pc.replace_substring_regex(numbers, r"^\+([0-9])", r"\1")  # Arrow reads a plus sign in real numbers alone
    for kind in (pa.int64(), pa.float64()):
        with contextlib.suppress(pa.ArrowException):
            return numbers.cast(kind)
    return column


def _numbers(column: pa.Array, place: Callable[[int], str]) -> np.ndarray:
    """(steps,) float64, NaN where missing."""
    column = _from_text(column) if _is_text(column) else column
    if _is_text(column):
        step = bisect.bisect_left(range(len(column)), True, key=lambda last: _is_text(_from_text(column[: last + 1])))
        raise ValueError(
            f"Vectors must be numbers, but {place(step)} has {column[step].as_py()!r} instead. "
            "Set `columns` to those of numbers, `missing_token` to what means missing, or `kind` to 'symbols'."
        )
    numbers: np.ndarray = column.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    if np.any(infinite := np.isinf(numbers)):
        step = int(np.argmax(infinite))
        raise ValueError(f"Vectors must be finite, but {place(step)} has {numbers[step]} instead. Set `missing_token` to it if it means missing.")
    return numbers


def _vectors(column: pa.Array, clean: Callable[[pa.Array], pa.Array], place: Callable[[int], str]) -> np.ndarray:
    """(steps, features) float64 of a column of lists, NaN where missing."""
    there = column.is_valid().to_numpy(zero_copy_only=False)
    sizes = pc.list_value_length(column).fill_null(0).to_numpy()
    size = int(sizes[there][0]) if there.any() else 1
    if np.any(wrong := there & (sizes != size)):
        raise ValueError(f"Vectors must have {size} features like the first, but {place(int(np.argmax(wrong)))} has one of {sizes[wrong][0]} instead.")
    entries = _plain(column.flatten())
    if _is_list(entries.type):
        raise ValueError(f"Vectors must hold numbers, but those in {place(int(np.argmax(there)))} hold lists instead. Choose another column with `columns`.")
    vectors = np.full((len(column), size), np.nan)
    vectors[there] = _numbers(clean(entries), lambda entry: place(int(np.flatnonzero(there)[entry // size]))).reshape(-1, size)
    return vectors


def _symbols(column: pa.Array, place: Callable[[int], str]) -> np.ndarray:
    """(steps,) int64 of a column of numbers, -1 where missing."""
    values = column.fill_null(MISSING).to_numpy()
    if np.any(wrong := (values != np.floor(values)) | (values < MISSING) | np.isinf(values)):
        step = int(np.argmax(wrong))
        raise ValueError(
            f"Symbols must be whole numbers from 0, or {MISSING} for a missing one, but {place(step)} has {values[step]} instead. "
            "To take them as names, set `vocabulary` or `unknown`."
        )
    symbols: np.ndarray = values.astype(np.int64)
    return symbols


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_large_string(column.type))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
