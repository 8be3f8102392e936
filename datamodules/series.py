"""Rows with times: read from tables, and resampled to a fixed step. What modules of recordings and of tracks share."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from datamodules.paths import ending

ENDINGS = (".csv", ".tsv", ".txt", ".parquet")
SECOND = 1_000_000  # times are whole microseconds
MOST_EMPTY = 100  # steps for each row, above which a wrong `step` or a stray time is more likely than a true gap


def read_table(path: Path, choose: Callable[[list[str]], list[str]], delimiter: str | None = None, skip_rows: int = 0) -> pa.Table:
    """The columns that `choose` takes from the names of all, those of a CSV file as text; ".gz" is undone."""
    try:
        if ending(path) == ".parquet":
            table = pa.parquet.read_table(path, columns=choose(pa.parquet.read_schema(path).names))
        else:
            table = _read_csv(path, choose, delimiter, skip_rows)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a table in CSV or Parquet, but cannot be read as one: {error}") from None
    if not len(table):
        raise ValueError(f"{path} must not be empty, but has no rows with data.")
    return table


def _read_csv(path: Path, choose: Callable[[list[str]], list[str]], delimiter: str | None, skip_rows: int) -> pa.Table:
    with pa.input_stream(str(path)) as stream:  # undoes gzip by the ending of the name
        data = stream.read_buffer()
    if data.size == 0:
        raise ValueError(f"{path} must not be empty, but is.")
    parse = pa.csv.ParseOptions(delimiter=delimiter or ("\t" if ending(path) == ".tsv" else ","))
    lines = pa.csv.ReadOptions(skip_rows=skip_rows)
    chosen = choose(pa.csv.open_csv(pa.BufferReader(data), read_options=lines, parse_options=parse).schema.names)
    convert = pa.csv.ConvertOptions(include_columns=chosen, column_types=dict.fromkeys(chosen, pa.large_string()), strings_can_be_null=True)
    return pa.csv.read_csv(pa.BufferReader(data), read_options=lines, parse_options=parse, convert_options=convert)


def as_times(column: pa.Array, name: str, place: Callable[[int], str], time_format: str | None = None) -> np.ndarray:
    """(rows,) microseconds since any moment, from dates or seconds; `place` says for an error where a row was read."""
    if column.null_count:
        raise ValueError(f"Each row must have a time, but column {name!r} in {place(int(np.argmax(column.is_null())))} is empty.")
    times = _parse(column, time_format)
    if times is not None:
        return times
    row = bisect.bisect_left(range(len(column)), True, key=lambda last: _parse(column[: last + 1], time_format) is None)
    wanted = "dates as 2015-03-04 00:01:00, or seconds" if time_format is None else f"dates as {time_format}"
    raise ValueError(f"Times must be {wanted}, but column {name!r} in {place(row)} has {column[row].as_py()!r} instead. Set `time_column` or `time_format`.")


def _parse(column: pa.Array, time_format: str | None) -> np.ndarray | None:
    """The same, or ``None`` if one of them is no time."""
    with contextlib.suppress(pa.ArrowException):
        if pa.types.is_temporal(column.type):
            return _microseconds(column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False))
        if time_format is not None:
            return _microseconds(pc.strptime(column, time_format, "us"))
        with contextlib.suppress(pa.ArrowException):  # then they are no numbers, but may be dates
            seconds = column.cast(pa.float64()).to_numpy()
            return np.round(seconds * SECOND).astype(np.int64) if np.isfinite(seconds).all() else None
        zone = "UTC" if pc.any(pc.match_substring_regex(column, r"(Z|[+-]\d\d:?\d\d)$")).as_py() else None
        fine = bool(pc.any(pc.match_substring_regex(column, r"\.\d{7}")).as_py())  # these are read as nanoseconds or not at all
        return _microseconds(column.cast(pa.timestamp("ns" if fine else "us", zone)).cast(pa.timestamp("us", zone), safe=False))
    return None


def _microseconds(dates: pa.Array) -> np.ndarray:
    microseconds: np.ndarray = dates.cast(pa.int64()).to_numpy()
    return microseconds


def as_numbers(column: pa.Array, name: str, place: Callable[[int], str]) -> np.ndarray:
    """(rows,) float64, NaN where missing."""
    if pa.types.is_large_string(column.type):
        column = pc.utf8_trim_whitespace(column)

    def converted(cells: pa.Array) -> np.ndarray | None:
        try:
            numbers: np.ndarray = cells.cast(pa.float64()).fill_null(float("nan")).to_numpy()
        except pa.ArrowException:
            return None
        return numbers

    numbers = converted(column)
    if numbers is None:
        row = bisect.bisect_left(range(len(column)), True, key=lambda last: converted(column[: last + 1]) is None)
        raise ValueError(f"Values must be numbers, but column {name!r} in {place(row)} has {column[row].as_py()!r} instead. Set `columns` to those of numbers.")
    if (infinite := np.flatnonzero(np.isinf(numbers))).size:
        raise ValueError(f"Values must be finite, but column {name!r} in {place(int(infinite[0]))} has {numbers[infinite[0]]} instead.")
    return numbers


def resample(times: np.ndarray, values: np.ndarray, step: int, max_gap: float | None, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows,) rising times, (rows, features) -> (steps, features) means of the rows in each step, NaN where there are none; steps of each stretch.

    A new stretch begins after `max_gap` seconds without a row. A row belongs to the step that it falls into, but clocks are not exact:
    half of the usual distance of rows may be lacking. The third result is the (rows,) step of each row.
    """
    gaps = np.diff(times)
    slack = min(int(np.median(gaps)), step) // 2 if len(gaps) else 0
    fresh = np.concatenate([[True], gaps > max_gap * SECOND]) if max_gap is not None else np.arange(len(times)) == 0
    origins = times[fresh][np.cumsum(fresh) - 1]
    steps = (times - origins + slack) // step  # counted from the start of its stretch
    lengths = steps[np.append(np.flatnonzero(fresh)[1:], len(times)) - 1] + 1
    total = int(lengths.sum())
    if total > MOST_EMPTY * len(times):
        row = int(np.argmax(gaps))
        raise ValueError(
            f"Rows must not be much fewer than steps, but {where} has {len(times)} rows in {total} steps of {step / SECOND:g} s: "
            f"{gaps[row] / SECOND:g} s pass after row {row + 1}. Set `max_gap` to begin a new sequence there, or a longer `step`."
        )
    steps += (np.cumsum(lengths) - lengths)[np.cumsum(fresh) - 1]
    means = np.full((total, values.shape[1]), np.nan)
    for feature, column in enumerate(values.T):
        there = ~np.isnan(column)
        counts = np.bincount(steps[there], minlength=total)
        sums = np.bincount(steps[there], weights=column[there], minlength=total)
        np.divide(sums, counts, out=means[:, feature], where=counts > 0)
    return means, lengths, steps
