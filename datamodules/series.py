"""Reads tables of rows with times and resamples them to a fixed step, for the modules of recordings and tracks."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from datamodules.checks import require_distinct
from datamodules.csv_options import parse_options
from datamodules.paths import ending

ENDINGS = (".csv", ".tsv", ".txt", ".parquet")
SECOND = 1_000_000  # Times are integer microseconds.
NULLS = pa.csv.ConvertOptions().null_values  # Marks of a missing number.
MOST_EMPTY = 100  # With more steps per row, a wrong `step` or a stray time is more likely than a true gap.


def read_table(
    path: Path, choose: Callable[[list[str]], list[str]], delimiter: str | None = None, skip_rows: int = 0
) -> pa.Table:
    """Reads columns of a table in CSV or Parquet. The columns of a CSV file are returned as text.

    Args:
        path: File to read; ".gz" is decompressed.
        choose: Function from the names of all columns to those to read.
        delimiter: Delimiter of a CSV file, by default a tab for ".tsv" and a comma otherwise.
        skip_rows: Number of lines of a CSV file before the line with the column names.
    """

    def chosen(names: list[str]) -> list[str]:
        found = choose(names)
        require_distinct(found, names, path)
        return found

    try:
        if ending(path) == ".parquet":
            table = pa.parquet.read_table(path, columns=chosen(pa.parquet.read_schema(path).names))
        else:
            table = _read_csv(path, chosen, delimiter, skip_rows)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a table in CSV or Parquet, but cannot be read as one: {error}") from None
    if not len(table):
        raise ValueError(f"{path} must not be empty, but has no rows of data.")
    return table


def _read_csv(path: Path, choose: Callable[[list[str]], list[str]], delimiter: str | None, skip_rows: int) -> pa.Table:
    with pa.input_stream(str(path)) as stream:  # Decompresses files that end in ".gz".
        data = stream.read_buffer()
    if data.size == 0:
        raise ValueError(f"{path} must not be empty, but is.")
    parse = parse_options(data, path, delimiter)
    lines = pa.csv.ReadOptions(skip_rows=skip_rows)
    chosen = choose(pa.csv.open_csv(pa.BufferReader(data), read_options=lines, parse_options=parse).schema.names)
    types = dict.fromkeys(chosen, pa.large_string())
    # Only empty cells are null here, because "NA" may be a name.
    convert = pa.csv.ConvertOptions(
        include_columns=chosen, column_types=types, strings_can_be_null=True, null_values=[""]
    )
    return pa.csv.read_csv(pa.BufferReader(data), read_options=lines, parse_options=parse, convert_options=convert)


def as_times(column: pa.Array, name: str, place: Callable[[int], str], time_format: str | None = None) -> np.ndarray:
    """Converts dates or seconds to (rows,) integer microseconds since an arbitrary origin.

    Args:
        column: Cells of the column.
        name: Name of the column, for errors.
        place: Function that returns the location of a row, for errors.
        time_format: Format of the dates, in the directives of `datetime.strptime`.
    """
    column = _trimmed(column)
    if column.null_count:
        raise ValueError(
            f"Each row must have a time, but column {name!r} in {place(int(np.argmax(column.is_null())))} is empty."
        )
    if time_format is not None and not pa.types.is_temporal(column.type):
        return _formatted(column, name, place, time_format)
    times = _parse(column)
    if times is not None:
        return times
    row = bisect.bisect_left(range(len(column)), True, key=lambda last: _parse(column[: last + 1]) is None)
    raise ValueError(
        f"Times must be dates such as 2015-03-04 00:01:00, or seconds, but column {name!r} in {place(row)} has "
        f"{column[row].as_py()!r} instead. Set `time_column` or `time_format`."
    )


def as_seconds(column: pa.Array, name: str, place: Callable[[int], str], time_format: str | None = None) -> np.ndarray:
    """Converts numbers (unchanged) or dates (seconds since 1970) to (rows,) float64 seconds; see `as_times`."""
    if time_format is None and not pa.types.is_temporal(column.type):
        with contextlib.suppress(pa.ArrowException):  # Cells that are not numbers may be dates.
            seconds: np.ndarray = _trimmed(column).cast(pa.float64()).fill_null(float("nan")).to_numpy()
            if np.isfinite(seconds).all():
                return seconds
    return as_times(column, name, place, time_format) / SECOND


def _formatted(column: pa.Array, name: str, place: Callable[[int], str], time_format: str) -> np.ndarray:
    """Converts dates in a format of `datetime.strptime` to (rows,) integer microseconds since 1970.

    Unlike the parser of Arrow, it raises an error for impossible dates, and it reads fractions of a second.
    """
    if "%Z" in time_format.replace("%%", ""):
        raise ValueError(
            f"`time_format` must not contain %Z, because names of time zones are ambiguous, but is {time_format!r}. "
            "If all times are in one zone, replace %Z by its name. Otherwise use %z and offsets such as +0200."
        )
    dates, start = column.dictionary_encode(), datetime(1970, 1, 1, tzinfo=UTC)
    times = np.empty(len(dates.dictionary), np.int64)
    for number, text in enumerate(map(str, dates.dictionary.to_pylist())):
        try:
            date = datetime.strptime(text, time_format)
        except ValueError as error:
            row = int(np.argmax(dates.indices.to_numpy() == number))
            raise ValueError(
                f"Times must be dates such as {time_format}, but column {name!r} in {place(row)} has {text!r} instead "
                f"({error}). Set `time_column` or `time_format`."
            ) from None
        times[number] = ((date if date.tzinfo else date.replace(tzinfo=UTC)) - start) // timedelta(microseconds=1)
    return times[dates.indices.to_numpy()]


def _parse(column: pa.Array) -> np.ndarray | None:
    """Converts dates or seconds to (rows,) microseconds; returns ``None`` if a cell is neither."""
    with contextlib.suppress(pa.ArrowException):
        if pa.types.is_temporal(column.type):
            return _microseconds(column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False))
        with contextlib.suppress(pa.ArrowException):  # Cells that are not numbers may be dates.
            seconds = column.cast(pa.float64()).to_numpy()
            return np.round(seconds * SECOND).astype(np.int64) if np.isfinite(seconds).all() else None
        zone = "UTC" if pc.any(pc.match_substring_regex(column, r"[T ]\d.*(Z|[+-]\d\d(:?\d\d)?)$")).as_py() else None
        fine = pc.any(pc.match_substring_regex(column, r"\.\d{7}")).as_py()  # Arrow reads these only as nanoseconds.
        return _microseconds(
            column.cast(pa.timestamp("ns" if fine else "us", zone)).cast(pa.timestamp("us", zone), safe=False)
        )
    return None


def _trimmed(column: pa.Array) -> pa.Array:
    """Removes blanks around text and replaces empty text by null. Other columns are not changed."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    column = pc.utf8_trim_whitespace(column)
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)


def _microseconds(dates: pa.Array) -> np.ndarray:
    microseconds: np.ndarray = dates.cast(pa.int64()).to_numpy()
    return microseconds


def as_numbers(column: pa.Array, name: str, place: Callable[[int], str]) -> np.ndarray:
    """Converts a column to (rows,) float64, with NaN for empty and blank cells and for marks such as "NA" or "null"."""
    column = _trimmed(column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = pc.if_else(pc.is_in(column, pa.array(NULLS, column.type)), pa.scalar(None, column.type), column)

    def converted(cells: pa.Array) -> np.ndarray | None:
        try:
            numbers: np.ndarray = cells.cast(pa.float64()).fill_null(float("nan")).to_numpy()
        except pa.ArrowException:
            return None
        return numbers

    numbers = converted(column)
    if numbers is None:
        row = bisect.bisect_left(range(len(column)), True, key=lambda last: converted(column[: last + 1]) is None)
        raise ValueError(
            f"Values must be numbers, but column {name!r} in {place(row)} has {column[row].as_py()!r} instead. "
            "Set `columns` to numeric columns."
        )
    if (infinite := np.flatnonzero(np.isinf(numbers))).size:
        raise ValueError(
            f"Values must be finite, but column {name!r} in {place(int(infinite[0]))} has {numbers[infinite[0]]} "
            "instead."
        )
    return numbers


def resample(
    times: np.ndarray, values: np.ndarray, step: int, max_gap: float | None, where: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Averages rows over steps of fixed duration.

    A new segment begins after `max_gap` seconds without a row. Each row belongs to the step that it falls into, with a
    tolerance of half the median interval between rows because clocks are not exact.

    Args:
        times: (rows,) increasing times in microseconds.
        values: (rows, features) values, NaN if missing.
        step: Duration of a step in microseconds.
        max_gap: Seconds without a row after which a new segment begins; ``None`` for one segment.
        where: Source of the rows, for errors.

    Returns:
        (steps, features) means with NaN for steps without a value, (segments,) number of steps per segment, and
        (rows,) the step of each row.
    """
    gaps = np.diff(times)
    slack = min(int(np.median(gaps)), step) // 2 if len(gaps) else 0
    fresh = np.concatenate([[True], gaps > max_gap * SECOND]) if max_gap is not None else np.arange(len(times)) == 0
    origins = times[fresh][np.cumsum(fresh) - 1]
    steps = (times - origins + slack) // step  # Counted from the start of the segment.
    lengths = steps[np.append(np.flatnonzero(fresh)[1:], len(times)) - 1] + 1
    total = int(lengths.sum())
    if total > MOST_EMPTY * len(times):
        row = int(np.argmax(gaps))
        raise ValueError(
            f"There must be at most {MOST_EMPTY} steps per row, but {where} has {len(times)} rows in {total} steps of "
            f"{step / SECOND:g} s, with a gap of {gaps[row] / SECOND:g} s after row {row + 1}. "
            "Set `max_gap` to begin a new sequence there, or a longer `step`."
        )
    steps += (np.cumsum(lengths) - lengths)[np.cumsum(fresh) - 1]
    means = np.full((total, values.shape[1]), np.nan)
    for feature, column in enumerate(values.T):
        there = ~np.isnan(column)
        counts = np.bincount(steps[there], minlength=total)
        sums = np.bincount(steps[there], weights=column[there], minlength=total)
        np.divide(sums, counts, out=means[:, feature], where=counts > 0)
    return means, lengths, steps
