"""Series of measurements with times, such as those of an accelerometer: from tables, or drawn days of activity."""

from __future__ import annotations

import bisect
import contextlib
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import torch

from datamodules.base import PARTS, as_dataset, as_table
from datamodules.paths import cache_name, ending, find_files, some
from datamodules.scaling import ScaledDataModule
from lightning_hmm.loading import generator
from lightning_hmm.sequences import Sequences

ENDINGS = (".csv", ".tsv", ".txt", ".parquet")
CACHE_VERSION = 1  # raise it whenever the same file and options are read differently
SECOND = 1_000_000  # times are whole microseconds
MOST_EMPTY = 100  # steps for each row of a file, above which a wrong `step` or a stray time is more likely than a true gap

# A drawn day: between which hours a person goes, with which chance in each minute, from one activity to the other.
ACTIVITIES = ["sleep", "sitting", "walking", "running"]
CHANGES = [("sleep", "sitting"), ("sitting", "sleep"), ("sitting", "walking"), ("walking", "sitting"), ("walking", "running"), ("running", "walking")]
RHYTHM = {
    (0, 6): [0.002, 0.10, 0, 0.30, 0, 0.30],
    (6, 9): [0.03, 0, 0.05, 0.08, 0.004, 0.04],
    (9, 17): [0.05, 0, 0.03, 0.12, 0, 0.10],
    (17, 21): [0.05, 0, 0.04, 0.08, 0.006, 0.04],
    (21, 24): [0.005, 0.02, 0.01, 0.15, 0, 0.30],
}
POSITIONS = ["wrist", "hip"]
LEVELS = [[0.4, 0.1], [2.2, 0.9], [3.8, 4.2], [5.6, 6.3]]  # logarithm of the movement of an activity at both positions, and its deviation
DEVIATIONS = [[0.4, 0.2], [1.0, 0.6], [0.7, 0.5], [0.4, 0.3]]
NOT_WORN = (20, 40)  # minutes each day


class AccelerometerDataModule(ScaledDataModule):
    """Real-valued columns along time, at a fixed step.

    Each file is the recording of one device. A step holds the mean of the rows that fall into it; where there are none, the
    step is missing: nothing is interpolated. A recording is split along time, into training, validation and test part in this
    order, so that the future is predicted from the past.

    Without a file, days of one person are drawn, in minutes, with a daily rhythm of sleeping, sitting, walking and running, felt at
    wrist and hip; the device is taken off for half an hour a day. Then the true states are known.

    Args:
        path: file, folder, pattern or list of them, looked up as given and then under `data_dir`; CSV (".csv", ".tsv", ".txt") or
            Parquet (".parquet"), the former perhaps with ".gz"; ``None`` to draw days.
        time_column: the column of times; the first if not given. Times are dates as in ``2015-03-04 00:01:00``, or numbers of
            seconds, and must rise.
        time_format: how dates are written if in another way, in the signs of `strptime`: ``"%d/%m/%Y %H:%M:%S"``.
        columns: the columns of numbers to take; all but `time_column` if not given. An empty cell or NaN is a missing value.
        delimiter: what separates the cells of a CSV file; if not given, a tab for ".tsv" and a comma otherwise.
        skip_rows: lines of a CSV file before the one with the names of the columns.
        step: seconds between steps; the median distance of rows if not given.
        max_gap: seconds without a row after which a new sequence begins, instead of missing steps; ``None`` for never.
        num_steps: how many steps of each recording are taken, from the first on; ``None`` for all.
        sequence_length: steps into which each part is cut; the last sequence may be shorter. ``None`` makes no cuts.
        standardize: shift and scale each column to mean 0 and standard deviation 1 in the training part.
        days: how many are drawn without a file.
        kwargs: the words of `SequenceDataModule`; the fractions are of the steps of each recording.

    Attributes:
        columns: the names of the features.
        step: seconds between steps.
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        time_column: str | None = None,
        time_format: str | None = None,
        columns: list[str] | None = None,
        delimiter: str | None = None,
        skip_rows: int = 0,
        step: float | None = None,
        max_gap: float | None = None,
        num_steps: int | None = None,
        sequence_length: int | None = None,
        standardize: bool = True,
        days: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(standardize=standardize, **kwargs)
        if skip_rows < 0:
            raise ValueError(f"`skip_rows` must not be negative, but is {skip_rows} instead.")
        positive = {"step": step, "max_gap": max_gap, "num_steps": num_steps, "sequence_length": sequence_length, "days": days}
        for name, value in positive.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive, but is {value} instead.")
        self.num_steps, self.sequence_length = num_steps, sequence_length
        if path is None:
            if step not in (None, 60):
                raise ValueError(f"`step` is for files, but without `path` minutes are drawn. Leave it out; it is {step}.")
            table = draw_days(days, self.seed)
            self._dataset, metadata = as_dataset(table), {"step": "60.0", "columns": json.dumps(POSITIONS), "segments": "[1]"}
            self.state_names = ACTIVITIES
        else:
            files = find_files(path, self.data_dir, endings=ENDINGS)
            reader = _Reader(time_column, time_format, columns, delimiter, skip_rows, step, max_gap)
            self._dataset, metadata = self.cached(cache_name([CACHE_VERSION, reader], {"train": files}), lambda: reader.read(files))
        self.step: float = json.loads(metadata["step"])
        self.columns: list[str] = json.loads(metadata["columns"])
        self._segments: list[int] = json.loads(metadata["segments"])  # of each recording
        self.num_features = len(self.columns)

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        table = self._dataset.with_format("arrow")[:]
        values = Sequences.from_arrow(table["values"])
        states = Sequences.from_arrow(table["states"]) if "states" in table.column_names else None
        part, begins = self._split(values.lengths.numpy())
        training = values.values[torch.from_numpy(part == 0)]
        for column, name in enumerate(self.columns):
            seen = training[:, column][~training[:, column].isnan()]
            if not len(seen) or bool(seen.min() == seen.max()):
                what = f"is always {seen[0].item():g}" if len(seen) else "has no value"
                raise ValueError(f"`columns` must vary in the training part, but {name!r} {what} there. Leave it out.")
        every = self.scaled(values.values, training) if self.standardize else values.values
        made: dict[str, datasets.Dataset] = {}
        for number, name in enumerate(PARTS):
            here = torch.from_numpy(part == number)
            offsets = np.append(np.flatnonzero(begins[here.numpy()]), int(here.sum()))
            lengths = torch.from_numpy(np.diff(offsets))
            chosen = None if states is None else Sequences.from_lengths(states.values[here], lengths)
            made[name] = as_dataset(as_table(Sequences.from_lengths(every[here], lengths), chosen))
        return made

    def _split(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(steps,) the part that each step belongs to, -1 for none, and whether a sequence begins at it."""
        steps = int(segments.sum())
        starts = np.cumsum(segments) - segments
        begins = np.zeros(steps, bool)
        begins[starts] = True
        part = np.full(steps, -1)
        first = 0
        for size in np.add.reduceat(segments, np.cumsum([0, *self._segments[:-1]])).tolist():  # steps of a recording
            taken = size if self.num_steps is None else min(size, self.num_steps)
            val, test = (math.floor(Fraction(str(fraction)) * taken) for fraction in (self.val_fraction, self.test_fraction))
            ends = [first, first + taken - val - test, first + taken - test, first + taken]
            for number in range(len(PARTS)):
                part[ends[number] : ends[number + 1]] = number
                begins[ends[number] : ends[number + 1]][:1] = True
            first += size
        if self.sequence_length is not None:
            whole = np.flatnonzero(begins)
            begins |= (np.arange(steps) - np.repeat(whole, np.diff(whole, append=steps))) % self.sequence_length == 0
        return part, begins


class _Reader(NamedTuple):
    """Reads recordings into one packed Arrow table; the fields are the options that what it reads depends on."""

    time_column: str | None
    time_format: str | None
    columns: list[str] | None
    delimiter: str | None
    skip_rows: int
    step: float | None
    max_gap: float | None

    def read(self, files: list[Path]) -> pa.Table:
        """A row of column `values` for each stretch without a long gap; the metadata has how many of them each file has."""
        recordings = [self._read_file(file) for file in files]
        names = recordings[0][2]
        for file, (_, _, others) in zip(files, recordings, strict=True):
            if others != names:
                raise ValueError(
                    f"All files must have the same columns, but {file} has {some(others)} and {files[0]} has {some(names)}. Choose with `columns`."
                )
        intervals = np.concatenate([np.diff(times) for times, _, _ in recordings])
        if self.step is None and not len(intervals):
            raise ValueError(f"`step` must be given where there is one row only, as in {files[0]}.")
        step = int(np.median(intervals)) if self.step is None else max(1, round(self.step * SECOND))
        sampled = [self._resample(times, values, step, file) for file, (times, values, _) in zip(files, recordings, strict=True)]
        sequences = Sequences.from_lengths(np.concatenate([values for values, _ in sampled]), np.concatenate([lengths for _, lengths in sampled]))
        metadata = {"step": json.dumps(step / SECOND), "columns": json.dumps(names), "segments": json.dumps([len(lengths) for _, lengths in sampled])}
        return as_table(sequences).replace_schema_metadata(metadata)

    def _resample(self, times: np.ndarray, values: np.ndarray, step: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """(rows,), (rows, features) -> (steps, features) means of the rows in each step, and the steps of each stretch.

        A row belongs to the step that it falls into, but clocks are not exact: half of the usual distance of rows may be lacking.
        """
        gaps = np.diff(times)
        slack = min(int(np.median(gaps)), step) // 2 if len(gaps) else 0
        fresh = np.concatenate([[True], gaps > self.max_gap * SECOND]) if self.max_gap is not None else np.arange(len(times)) == 0
        origins = times[fresh][np.cumsum(fresh) - 1]
        steps = (times - origins + slack) // step  # counted from the start of its stretch
        lengths = steps[np.append(np.flatnonzero(fresh)[1:], len(times)) - 1] + 1
        total = int(lengths.sum())
        if total > MOST_EMPTY * len(times):
            where = int(np.argmax(gaps))
            raise ValueError(
                f"Rows must not be much fewer than steps, but {path} has {len(times)} rows in {total} steps of {step / SECOND:g} s: "
                f"{gaps[where] / SECOND:g} s pass after row {where + 1}. Set `max_gap` to begin a new sequence there, or a longer `step`."
            )
        steps += (np.cumsum(lengths) - lengths)[np.cumsum(fresh) - 1]
        means = np.full((total, values.shape[1]), np.nan)
        for feature, column in enumerate(values.T):
            there = ~np.isnan(column)
            counts = np.bincount(steps[there], minlength=total)
            sums = np.bincount(steps[there], weights=column[there], minlength=total)
            np.divide(sums, counts, out=means[:, feature], where=counts > 0)
        return means, lengths

    # One file

    def _read_file(self, path: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """(rows,) times in microseconds, (rows, features) values, NaN where missing, and the names of the columns."""
        try:
            table = self._parquet(path) if ending(path) == ".parquet" else self._csv(path)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be a table in CSV or Parquet, but cannot be read as one: {error}") from None
        time, *columns = table.column_names
        if not len(table):
            raise ValueError(f"{path} must not be empty, but has no rows with data.")

        def place(row: int) -> str:
            return f"row {row + 1} of {path}"

        times = self._times(table[time].combine_chunks(), time, place)
        if (wrong := np.flatnonzero(np.diff(times) <= 0)).size:
            row = int(wrong[0]) + 1
            which = "has the same time as" if times[row] == times[row - 1] else "is earlier than"
            raise ValueError(f"Times must rise, but {place(row)} {which} the row before it: {table[time][row].as_py()}. Sort the file, each time once.")
        values = np.stack([_numbers(table[name].combine_chunks(), name, place) for name in columns], axis=1)
        return times, values, columns

    def _csv(self, path: Path) -> pa.Table:
        with pa.input_stream(str(path)) as stream:  # undoes gzip by the ending of the name
            data = stream.read_buffer()
        if data.size == 0:
            raise ValueError(f"{path} must not be empty, but is.")
        parse = pa.csv.ParseOptions(delimiter=self.delimiter or ("\t" if ending(path) == ".tsv" else ","))
        lines = pa.csv.ReadOptions(skip_rows=self.skip_rows)
        chosen = self._choose(pa.csv.open_csv(pa.BufferReader(data), read_options=lines, parse_options=parse).schema.names, path)
        convert = pa.csv.ConvertOptions(include_columns=chosen, column_types=dict.fromkeys(chosen, pa.large_string()), strings_can_be_null=True)
        return pa.csv.read_csv(pa.BufferReader(data), read_options=lines, parse_options=parse, convert_options=convert)

    def _parquet(self, path: Path) -> pa.Table:
        return pa.parquet.read_table(path, columns=self._choose(pa.parquet.read_schema(path).names, path))

    def _choose(self, names: list[str], path: Path) -> list[str]:
        """The column of times, and those of values."""
        time = names[0] if self.time_column is None else self.time_column
        columns = self.columns or [name for name in names if name != time]
        for option, wanted in (("time_column", [time]), ("columns", columns)):
            if missing := [name for name in wanted if name not in names]:
                raise ValueError(f"`{option}` must be in the file, but {path} has no column {missing[0]!r}. It has {some(names)}.")
        if not columns:
            raise ValueError(f"There must be a column of values beside that of times, but {path} has only {some(names)}. Set `delimiter` or `skip_rows`.")
        if time in columns:
            raise ValueError(f"`columns` must be others than `time_column`, but {time!r} is both.")
        return [time, *columns]

    def _times(self, column: pa.Array, name: str, place: Callable[[int], str]) -> np.ndarray:
        """(rows,) microseconds since any moment."""
        if column.null_count:
            raise ValueError(f"Each row must have a time, but column {name!r} in {place(int(np.argmax(column.is_null())))} is empty.")
        times = self._parse(column)
        if times is not None:
            return times
        row = bisect.bisect_left(range(len(column)), True, key=lambda last: self._parse(column[: last + 1]) is None)
        wanted = "dates as 2015-03-04 00:01:00, or seconds" if self.time_format is None else f"dates as {self.time_format}"
        raise ValueError(
            f"Times must be {wanted}, but column {name!r} in {place(row)} has {column[row].as_py()!r} instead. Set `time_column` or `time_format`."
        )

    def _parse(self, column: pa.Array) -> np.ndarray | None:
        """The same, or ``None`` if one of them is no time."""
        with contextlib.suppress(pa.ArrowException):
            if pa.types.is_temporal(column.type):
                return _microseconds(column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False))
            if self.time_format is not None:
                return _microseconds(pc.strptime(column, self.time_format, "us"))
            with contextlib.suppress(pa.ArrowException):  # then they are no numbers, but may be dates
                seconds = column.cast(pa.float64()).to_numpy()
                return np.round(seconds * SECOND).astype(np.int64) if np.isfinite(seconds).all() else None
            zoned = bool(pc.any(pc.match_substring_regex(column, r"(Z|[+-]\d\d:?\d\d)$")).as_py())
            return _microseconds(column.cast(pa.timestamp("us", "UTC" if zoned else None)))
        return None


def _microseconds(dates: pa.Array) -> np.ndarray:
    microseconds: np.ndarray = dates.cast(pa.int64()).to_numpy()
    return microseconds


def _numbers(column: pa.Array, name: str, place: Callable[[int], str]) -> np.ndarray:
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


def draw_days(days: int, seed: int) -> pa.Table:
    """One recording of so many days: movement in each minute, and what the person did."""
    draw = generator(seed, "days")
    states = torch.empty(days, 24 * 60, dtype=torch.int64)
    before = torch.zeros(days, dtype=torch.int64)  # asleep
    for hours, chances in RHYTHM.items():
        probs = torch.eye(len(ACTIVITIES), dtype=torch.float64)
        for (old, new), chance in zip(CHANGES, chances, strict=True):
            probs[ACTIVITIES.index(old), ACTIVITIES.index(new)] = chance
            probs[ACTIVITIES.index(old), ACTIVITIES.index(old)] -= chance
        for minute in range(60 * hours[0], 60 * hours[1]):
            before = states[:, minute] = torch.multinomial(probs[before], 1, generator=draw).squeeze(1)
    noise = torch.randn(days, 24 * 60, len(POSITIONS), dtype=torch.float64, generator=draw)
    values = torch.tensor(LEVELS, dtype=torch.float64)[states] + torch.tensor(DEVIATIONS, dtype=torch.float64)[states] * noise
    taken_off = torch.randint(7 * 60, 22 * 60, (days, 1), generator=draw)
    duration = torch.randint(NOT_WORN[0], NOT_WORN[1] + 1, (days, 1), generator=draw)
    minutes = torch.arange(24 * 60)
    values[(minutes >= taken_off) & (minutes < taken_off + duration)] = torch.nan
    lengths = [days * 24 * 60]
    return as_table(Sequences.from_lengths(values.reshape(-1, len(POSITIONS)), lengths), Sequences.from_lengths(states.reshape(-1), lengths))
