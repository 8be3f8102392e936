"""Time series of measurements, such as those of an accelerometer: read from tables, or drawn days of activity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch

from datamodules.base import PARTS, FromSource, as_dataset, as_table, share
from datamodules.checks import require_positive
from datamodules.paths import cache_name, find_files, some
from datamodules.reader import require_observed
from datamodules.scaling import ScaledDataModule
from datamodules.series import ENDINGS, SECOND, as_numbers, as_times, read_table, resample
from lightning_hmm.columns import feature_columns
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

CACHE_VERSION = 2  # Increase it whenever the same files and options are read differently.

# The activities of a drawn day. `RHYTHM` has the probability per minute of each change, by hours of the day.
ACTIVITIES = ["sleep", "sitting", "walking", "running"]
CHANGES = [
    ("sleep", "sitting"),
    ("sitting", "sleep"),
    ("sitting", "walking"),
    ("walking", "sitting"),
    ("walking", "running"),
    ("running", "walking"),
]
RHYTHM = {
    (0, 6): [0.002, 0.10, 0, 0.30, 0, 0.30],
    (6, 9): [0.03, 0, 0.05, 0.08, 0.004, 0.04],
    (9, 17): [0.05, 0, 0.03, 0.12, 0, 0.10],
    (17, 21): [0.05, 0, 0.04, 0.08, 0.006, 0.04],
    (21, 24): [0.005, 0.02, 0.01, 0.15, 0, 0.30],
}
POSITIONS = ["wrist", "hip"]
# Mean and standard deviation of the logarithmic movement of each activity at both positions.
LEVELS = [[0.4, 0.1], [2.2, 0.9], [3.8, 4.2], [5.6, 6.3]]
DEVIATIONS = [[0.4, 0.2], [1.0, 0.6], [0.7, 0.5], [0.4, 0.3]]
NOT_WORN = (20, 40)  # Minutes per day without the device.


class AccelerometerDataModule(ScaledDataModule):
    """Time series of real-valued columns, resampled to a fixed step.

    Use it for sensor recordings with a column of times. Each file is one recording. A step contains the mean of the
    rows that fall into it, and is missing if there are none; nothing is interpolated. Each recording is split along
    time into training, validation and test part, in this order, so that the future is predicted from the past.

    Without `path`, days of one person are drawn in steps of one minute. They have a daily rhythm of sleeping, sitting,
    walking and running, measured at wrist and hip. The device is taken off for about half an hour per day. The true
    states are known.

    Args:
        path: File, folder, pattern or list of these, relative to the working directory or to `data_dir`. The format is
            CSV (".csv", ".tsv", ".txt", optionally with ".gz") or Parquet (".parquet"). ``None`` draws days.
        time_column: Column of times, by default the first. Times are dates such as ``2015-03-04 00:01:00`` or seconds,
            and must increase.
        time_format: Format of other dates, in the directives of `datetime.strptime`, such as ``"%d/%m/%Y %H:%M:%S"``.
        columns: Numeric columns to use, by default all except `time_column`. An empty cell or NaN is a missing value.
        delimiter: Delimiter of a CSV file, by default a tab for ".tsv" and a comma otherwise.
        skip_rows: Number of lines of a CSV file before the line with the column names.
        step: Seconds between steps, by default the median interval between rows.
        max_gap: Seconds without a row after which a new sequence begins. ``None`` makes all such steps missing.
        num_steps: Number of steps to use from the start of each recording; ``None`` for all.
        sequence_length: Number of steps into which each part is cut. The last sequence may be shorter. ``None`` does
            not cut.
        standardize: Whether to shift and scale each column to mean 0 and standard deviation 1 in the training part.
        days: Number of days to draw if `path` is ``None``.
        **kwargs: Forwarded to `SequenceDataModule`. The fractions refer to the steps of each recording.

    Attributes:
        columns: One real column per feature, named as in the file.
        step: Seconds between steps.

    Example:
        >>> data = AccelerometerDataModule(days=2, sequence_length=720, val_fraction=0, test_fraction=0.25)
        >>> data.setup()
        >>> data.train_sequences.lengths.tolist()
        [720, 720, 720]
        >>> [column.name for column in data.columns]
        ['wrist', 'hip']
    """

    step = FromSource[float](60.0)

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
        require_positive(step=step, max_gap=max_gap, num_steps=num_steps, sequence_length=sequence_length, days=days)
        self.num_steps = num_steps
        self.sequence_length = sequence_length
        if path is None and step not in (None, 60):
            raise ValueError(f"`step` must be 60 or omitted without `path`, because minutes are drawn, but is {step}.")
        self._days = days
        self._columns_given = columns is not None
        self._files = None if path is None else find_files(path, self.data_dir, endings=ENDINGS)
        self._reader = _Reader(time_column, time_format, columns, delimiter, skip_rows, step, max_gap)

    def open_source(self) -> None:
        """Reads or draws the recordings and sets `columns` and `step`."""
        files, reader = self._files, self._reader
        if files is None:
            self._dataset = as_dataset(draw_days(self._days, self.seed))
            metadata = {"step": "60.0", "columns": json.dumps(POSITIONS), "segments": "[1]"}
            self.state_names = ACTIVITIES
        else:
            self._dataset, metadata = self.cached(
                cache_name([CACHE_VERSION, reader], {"train": files}), lambda: reader.read(files)
            )
        self.step = json.loads(metadata["step"])
        names: list[str] = json.loads(metadata["columns"])
        self.set_columns(feature_columns(len(names), names), chosen=self._columns_given)
        self._segments: list[int] = json.loads(metadata["segments"])  # Number of segments of each recording.

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        table = self._dataset.with_format("arrow")[:]
        values = self.in_order(Sequences.from_arrow(table["values"]))
        states = Sequences.from_arrow(table["states"]) if "states" in table.column_names else None
        part, begins = self._split(values.lengths.numpy())
        training = values.values[torch.from_numpy(part == 0)]
        if self.standardize:
            every = self.scaled(values.values, training)
        else:
            self.require_variation(training)
            every = values.values
        made: dict[str, datasets.Dataset] = {}
        for number, name in enumerate(PARTS):
            here = torch.from_numpy(part == number)
            offsets = np.append(np.flatnonzero(begins[here.numpy()]), int(here.sum()))
            lengths = torch.from_numpy(np.diff(offsets))
            chosen = None if states is None else Sequences.from_lengths(states.values[here], lengths)
            made[name] = as_dataset(as_table(Sequences.from_lengths(every[here], lengths), chosen))
        return made

    def _split(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (steps,) the index of the part of each step, -1 for none, and (steps,) whether a sequence begins.

        Args:
            segments: (segments,) number of steps in each segment of the recordings.
        """
        steps = int(segments.sum())
        starts = np.cumsum(segments) - segments
        begins = np.zeros(steps, bool)
        begins[starts] = True
        part = np.full(steps, -1)
        first = 0
        recording_sizes = np.add.reduceat(segments, np.cumsum([0, *self._segments[:-1]]))
        for size in recording_sizes.tolist():
            taken = size if self.num_steps is None else min(size, self.num_steps)
            val, test = share(self.val_fraction, taken), share(self.test_fraction, taken)
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
    """Reads recordings into one packed Arrow table. The fields are the options of reading and enter the cache name."""

    time_column: str | None
    time_format: str | None
    columns: list[str] | None
    delimiter: str | None
    skip_rows: int
    step: float | None
    max_gap: float | None

    def read(self, files: list[Path]) -> pa.Table:
        """Returns one row per segment without a long gap; the metadata contain the number of segments per file."""
        recordings = [self._read_file(file) for file in files]
        names = recordings[0][2]
        for file, (_, _, others) in zip(files, recordings, strict=True):
            if sorted(others) != sorted(names):
                raise ValueError(
                    f"All files must have the same columns, but {file} has {some(others)} and {files[0]} has "
                    f"{some(names)}. Choose them with `columns`."
                )
        intervals = np.concatenate([np.diff(times) for times, _, _ in recordings])
        if self.step is None and not len(intervals):
            raise ValueError(f"`step` must be given if files have only one row, as {files[0]} has.")
        step = int(np.median(intervals)) if self.step is None else max(1, round(self.step * SECOND))
        ordered = [(times, values[:, [others.index(name) for name in names]]) for times, values, others in recordings]
        sampled = [
            resample(times, values, step, self.max_gap, str(file))
            for file, (times, values) in zip(files, ordered, strict=True)
        ]
        sequences = Sequences.from_lengths(
            np.concatenate([values for values, _, _ in sampled]), np.concatenate([lengths for _, lengths, _ in sampled])
        )
        metadata = {
            "step": json.dumps(step / SECOND),
            "columns": json.dumps(names),
            "segments": json.dumps([len(lengths) for _, lengths, _ in sampled]),
        }
        return as_table(sequences).replace_schema_metadata(metadata)

    # One file

    def _read_file(self, path: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Returns (rows,) times in microseconds, (rows, features) values with NaN if missing, and the column names."""
        table = read_table(path, lambda names: self._choose(names, path), self.delimiter, self.skip_rows)
        time, *columns = table.column_names

        def place(row: int) -> str:
            return f"row {row + 1} of {path}"

        times = as_times(table[time].combine_chunks(), time, place, self.time_format)
        if (wrong := np.flatnonzero(np.diff(times) <= 0)).size:
            row = int(wrong[0]) + 1
            which = "has the same time as" if times[row] == times[row - 1] else "is earlier than"
            raise ValueError(
                f"Times must increase, but {place(row)} {which} the row before it: {table[time][row].as_py()}. "
                "Sort the rows by time and remove duplicates."
            )
        values = np.stack([as_numbers(table[name].combine_chunks(), name, place) for name in columns], axis=1)
        require_observed(~np.isnan(values), path, columns)
        return times, values, columns

    def _choose(self, names: list[str], path: Path) -> list[str]:
        """Returns the column of times, followed by the columns of values."""
        time = names[0] if self.time_column is None else self.time_column
        columns = self.columns or [name for name in names if name != time]
        for option, wanted in (("time_column", [time]), ("columns", columns)):
            if missing := [name for name in wanted if name not in names]:
                raise ValueError(
                    f"`{option}` must be in the file, but {path} has no column {missing[0]!r}. It has {some(names)}."
                )
        if not columns:
            raise ValueError(
                f"There must be a column of values besides the times, but {path} has only {some(names)}. "
                "Set `delimiter` or `skip_rows`."
            )
        if time in columns:
            raise ValueError(f"`columns` must not contain `time_column`, but {time!r} is in both.")
        return [time, *columns]


def draw_days(days: int, seed: int) -> pa.Table:
    """Draws one recording: the movement in each minute, and the activities as true states."""
    draw = generator(seed, "days")
    states = torch.empty(days, 24 * 60, dtype=torch.int64)
    before = torch.zeros(days, dtype=torch.int64)  # Each day starts asleep.
    for hours, chances in RHYTHM.items():
        probs = torch.eye(len(ACTIVITIES), dtype=torch.float64)
        for (old, new), chance in zip(CHANGES, chances, strict=True):
            probs[ACTIVITIES.index(old), ACTIVITIES.index(new)] = chance
            probs[ACTIVITIES.index(old), ACTIVITIES.index(old)] -= chance
        for minute in range(60 * hours[0], 60 * hours[1]):
            before = states[:, minute] = torch.multinomial(probs[before], 1, generator=draw).squeeze(1)
    noise = torch.randn(days, 24 * 60, len(POSITIONS), dtype=torch.float64, generator=draw)
    values = (
        torch.tensor(LEVELS, dtype=torch.float64)[states]
        + torch.tensor(DEVIATIONS, dtype=torch.float64)[states] * noise
    )
    taken_off = torch.randint(7 * 60, 22 * 60, (days, 1), generator=draw)
    duration = torch.randint(NOT_WORN[0], NOT_WORN[1] + 1, (days, 1), generator=draw)
    minutes = torch.arange(24 * 60)
    values[(minutes >= taken_off) & (minutes < taken_off + duration)] = torch.nan
    lengths = [days * 24 * 60]
    return as_table(
        Sequences.from_lengths(values.reshape(-1, len(POSITIONS)), lengths),
        Sequences.from_lengths(states.reshape(-1), lengths),
    )
