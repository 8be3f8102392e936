"""Reads tables (CSV, TSV, Parquet, JSON lines) and plain text into packed sequences; every mistake is told with its file and row."""

from __future__ import annotations

import bisect
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from datamodules.base import as_table
from datamodules.paths import ending, some
from lightning_hmm.sequences import MISSING, Sequences

NO_NUMBER = pa.array(["", "NaN", "nan", "null"], pa.large_string())


class _Steps(NamedTuple):
    """What one file holds: its steps in the order of the file, the row each was read from, and the sequence each belongs to."""

    columns: list[pa.Array]
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
        """All files as a table with column `values`; its metadata has the number of sequences in each part and the names of the symbols."""
        paths = [file for group in files.values() for file in group]
        contents = [self._read_file(path) for path in paths]
        widths = [len(content.columns) for content in contents]
        if len(set(widths)) > 1:
            odd = next(i for i, width in enumerate(widths) if width != widths[0])
            raise ValueError(
                f"All files must have the same columns, but {paths[odd]} has {widths[odd]} and {paths[0]} has {widths[0]}. Choose them with `columns`."
            )
        starts = np.cumsum([0, *(len(content.rows) for content in contents)])
        rows = np.concatenate([content.rows for content in contents])

        def place(step: int) -> str:
            file = int(np.searchsorted(starts, step, side="right")) - 1
            return f"{'line' if self.format == 'text' else 'row'} {rows[step] + 1} of {paths[file]}"

        columns = []
        for arrays in zip(*(content.columns for content in contents), strict=True):
            try:
                columns.append(pa.concat_tables([pa.table([array], ["x"]) for array in arrays], promote_options="permissive")["x"].combine_chunks())
            except pa.ArrowException as error:
                raise ValueError(f"Columns must be of one type in all files, but those of {some(list(map(str, paths)))} are not: {error}") from None
        values, metadata = self._convert([self._clean(column) for column in columns], place)

        sizes = [content.num_sequences for content in contents]
        keys = np.concatenate([content.keys + first for content, first in zip(contents, np.cumsum([0, *sizes[:-1]]), strict=True)])
        if np.any(np.diff(keys) < 0):
            values = values[np.argsort(keys, kind="stable")]
        lengths = np.bincount(keys, minlength=sum(sizes))
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
        return _Steps([values], rows, keys, int(keys.max(initial=-1)) + 1)

    def _table(self, data: pa.Buffer, path: Path) -> _Steps:
        source = pa.BufferReader(data)
        if self.format == "csv":
            parse = pa.csv.ParseOptions(delimiter=self.delimiter or ("\t" if ending(path) == ".tsv" else ","))
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
            # One block: a sequence is one line, however long, and types are inferred from all of them.
            table = pa.json.read_json(source, read_options=pa.json.ReadOptions(block_size=min(data.size + 1, 2**31 - 1)))
            columns, every = self._choose(table.column_names, path)
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
            return _Steps([_plain(lists.flatten())], rows, rows, len(table))
        if self.sequence_column is None:
            return _Steps(steps, rows, np.zeros_like(rows), min(1, len(table)))
        ids = table[self.sequence_column].combine_chunks()
        encoded = (ids.dictionary_decode() if isinstance(ids, pa.DictionaryArray) else ids).dictionary_encode()
        if encoded.null_count:
            raise ValueError(
                f"`sequence_column` must say for each row which sequence it belongs to, but row {int(np.argmax(encoded.is_null())) + 1} of {path} is empty."
            )
        return _Steps(steps, rows, encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary))

    def _choose(self, names: list[str], path: Path) -> tuple[list[str], list[str]]:
        """The columns of values, and the same with the one of sequences."""
        ids = [] if self.sequence_column is None else [self.sequence_column]
        columns = self.columns or [name for name in names if name not in ids]
        for option, wanted in (("columns", columns), ("sequence_column", ids)):
            if missing := [name for name in wanted if name not in names]:
                raise ValueError(f"`{option}` must be in the file, but {path} has no column {missing[0]!r}. It has {some(names)}.")
        if not columns:
            raise ValueError(f"There must be a column of values beside `sequence_column`, but {path} has only {some(names)}.")
        return columns, [*columns, *(name for name in ids if name not in columns)]

    # All files together

    def _clean(self, column: pa.Array) -> pa.Array:
        """The column as int64, float64, names, or vectors, with null where a value is missing."""
        if self.missing_token is not None and not _is_list(column.type):
            with contextlib.suppress(pa.ArrowException):  # then the token is no value of this type, so no value is the token
                column = pc.if_else(pc.equal(column, pa.scalar(self.missing_token).cast(column.type)), None, column)
        if _is_text(column) and self.format == "csv" and not self.named:
            return _from_text(column)
        return column

    def _convert(self, columns: list[pa.Array], place: Callable[[int], str]) -> tuple[np.ndarray, dict[str, str]]:
        """(steps,) symbols or (steps, features) vectors; and the names of the symbols and where each first occurs."""
        first = columns[0]
        if self.kind == "vectors" or len(columns) > 1 or _is_list(first.type) or (self.kind == "auto" and pa.types.is_floating(first.type)):
            if self.kind == "symbols":
                raise ValueError(f"Symbols must be in one column, but here are {'vectors' if len(columns) == 1 else len(columns)}. Choose it with `columns`.")
            vectors = [_vectors(column, place) if _is_list(column.type) else _numbers(column, place)[:, np.newaxis] for column in columns]
            return np.concatenate(vectors, axis=1), {}
        if self.named and not _is_text(first):
            first = first.cast(pa.large_string())
        if not _is_text(first):
            return _symbols(first, place), {}
        encoded = first.dictionary_encode()
        codes, found = encoded.indices.fill_null(MISSING).to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
        if not found:
            raise ValueError(f"There must be some symbols, but all are missing from {place(0)} on.")
        observed = np.flatnonzero(codes != MISSING)
        steps = np.empty(len(found), np.int64)
        steps[codes[observed[::-1]]] = observed[::-1]  # the last written stays: the first occurrence
        order = sorted(range(len(found)), key=found.__getitem__)
        ranks = np.empty(len(found) + 1, np.int64)
        ranks[[*order, MISSING]] = [*range(len(found)), MISSING]
        return ranks[codes], {"names": json.dumps([found[i] for i in order]), "places": json.dumps([place(int(steps[i])) for i in order])}


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


def _vectors(column: pa.Array, place: Callable[[int], str]) -> np.ndarray:
    """(steps, features) float64 of a column of lists, NaN where missing."""
    there = column.is_valid().to_numpy(zero_copy_only=False)
    sizes = pc.list_value_length(column).fill_null(0).to_numpy()
    size = int(sizes[there][0]) if there.any() else 1
    if np.any(wrong := there & (sizes != size)):
        raise ValueError(f"Vectors must have {size} features like the first, but {place(int(np.argmax(wrong)))} has one of {sizes[wrong][0]} instead.")
    vectors = np.full((len(column), size), np.nan)
    vectors[there] = _numbers(_plain(column.flatten()), lambda entry: place(int(np.flatnonzero(there)[entry // size]))).reshape(-1, size)
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
    if values.max() < 0:
        raise ValueError(f"There must be some symbols, but all are missing from {place(0)} on.")
    symbols: np.ndarray = values.astype(np.int64)
    return symbols


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_large_string(column.type))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
