"""Tracks of positions at a fixed step: read from GPX, GeoJSON and tables, or drawn visitors of an open-air museum."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

import datasets
import numpy as np
import pyarrow as pa
import torch
from lightning.pytorch.utilities import rank_zero_info
from numba import njit

from datamodules import series
from datamodules.base import PARTS, as_dataset, as_table
from datamodules.checks import require_choice, require_positive
from datamodules.paths import cache_name, ending, find_files, some
from datamodules.scaling import ScaledDataModule
from datamodules.series import SECOND, as_numbers, as_times, read_table, resample
from lightning_hmm.columns import feature_columns
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING

Units = Literal["degrees", "meters"]
ENDINGS = (".gpx", ".geojson", ".json", *series.ENDINGS)
CACHE_VERSION = 3  # Increase it whenever the same files and options are read differently.
WIDEST = 60.0  # Maximum degrees of longitude from the origin. Beyond, the projection distorts distances too much.

# Default names of columns and properties.
TIMES = ("time", "timestamp", "datetime", "date")
TRACKS = ("track", "track_id", "trackid", "trajectory", "trajectory_id")
LATITUDES, LONGITUDES = ("lat", "latitude"), ("lon", "lng", "long", "longitude")
COORDINATE_TIMES = ("coordTimes", "times", *TIMES)  # Properties of a line in GeoJSON.

# The drawn museum, in meters and seconds: exhibits on both sides of a circular railway, and the visitors' movements.
WAYS = ["on foot", "train"]
EXHIBITS = (
    (-210, 40),
    (-120, 125),
    (0, 150),
    (130, 120),
    (205, -80),
    (110, -130),
    (-20, -150),
    (-190, -125),
    (-80, 30),
    (0, 0),
    (85, 45),
    (60, -60),
)
RAILS = (180.0, 115.0)  # Half axes of the loop.
STATIONS = 4  # Stations, at equal angles.
WALKING, RIDING = (0.9, 1.5), (2.5, 5.0)  # Ranges of speeds in m/s.
LOOKING, WAITING = (20.0, 150.0), (40.0, 90.0)  # Ranges of seconds at an exhibit, and of the train at a station.
VISIT = (1200.0, 2400.0)  # Range of the duration of a visit in seconds.
RIDERS = 0.5  # Probability that a visitor starts on the train. Riders continue on foot after some stations.
LEGS = (6, 14)  # Range of the number of stations that a rider passes.
DRAWN_STEP = 10.0  # Seconds between steps.
NOISE = 3.0  # Standard deviation of a position in meters.
LOST = 0.01  # Probability per step that the signal is lost.
LOST_STEPS = 4  # Number of steps for which it is lost.


class GPSDataModule(ScaledDataModule):
    """Tracks of positions in meters east and north of an origin, resampled to a fixed step.

    Use it for recordings of GPS devices. A step contains the mean of the points that fall into it, and is missing if
    there are none; nothing is interpolated. Whole tracks are assigned to training, validation and test part. Latitude
    and longitude (WGS 84) are converted to meters by a transverse Mercator projection about the origin. It preserves
    angles, and lengths to within 3 in 100,000 up to 50 km east or west of the origin. Points that require an impossible
    speed, points with the same time as the previous one, and tracks of too few points are omitted, and their numbers
    are logged.

    Without `path`, visitors of an open-air museum are drawn. Some walk from exhibit to exhibit, and some take a train
    whose rails the walkers cross. Both stop now and then. The true states are known.

    Args:
        path: File, folder, pattern or list of these, relative to the working directory or to `data_dir`. The format is
            GPX (".gpx"), GeoJSON (".geojson", ".json"), CSV (".csv", ".tsv", ".txt") or Parquet (".parquet"),
            optionally with ".gz". ``None`` draws visitors.
        position_columns: Two columns of a table: latitude and longitude in degrees, or x and y in meters. Defaults to
            columns named "lat" or "latitude" and "lon", "lng", "long" or "longitude".
        units: "degrees", or "meters" for positions on a plane.
        time_column: Column of times, or property in GeoJSON, by default one named "time", "timestamp", "datetime" or
            "date". Times are dates such as ``2015-03-04 00:01:00`` or seconds, and must increase along a track.
        time_format: Format of other dates, in the directives of `datetime.strptime`.
        track_column: Column that identifies the track of each row, by default one named "track", "track_id", "trackid",
            "trajectory" or "trajectory_id". Without such a column, a table is one track.
        label_column: Column of true states, such as the means of transport; a property in GeoJSON, an element of the
            track in GPX. A step has the label of its last point. Models are not trained on them; they are used only to
            compute accuracies.
        delimiter: Delimiter of a CSV file, by default a tab for ".tsv" and a comma otherwise.
        step: Seconds between steps, by default the median interval between points.
        max_gap: Seconds without a point after which a new sequence begins. ``None`` makes all such steps missing.
        max_speed: Maximum speed in meters per second. The largest set of points that can be reached at this speed is
            kept. ``None`` keeps all points.
        min_points: Minimum number of points per track. Shorter tracks are omitted.
        origin: Latitude and longitude of the point (0, 0), by default the median position.
        standardize: Whether to shift and scale each coordinate to mean 0 and standard deviation 1 in the training part.
        visitors: Number of visitors to draw if `path` is ``None``.
        **kwargs: Forwarded to `SequenceDataModule`. The fractions refer to tracks.

    Attributes:
        step: Seconds between steps. It is set by `setup` if not given.
        origin: Latitude and longitude of the point (0, 0), or ``None`` for positions on a plane. It is set by `setup`
            if not given.

    Example:
        >>> data = GPSDataModule(visitors=4, val_fraction=0, test_fraction=0.25)
        >>> data.setup()
        >>> len(data.train_sequences), len(data.test_sequences)
        (3, 1)
        >>> data.step, data.state_names
        (10.0, ['on foot', 'train'])
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        position_columns: list[str] | None = None,
        units: Units = "degrees",
        time_column: str | None = None,
        time_format: str | None = None,
        track_column: str | None = None,
        label_column: str | None = None,
        delimiter: str | None = None,
        step: float | None = None,
        max_gap: float | None = None,
        max_speed: float | None = 70.0,
        min_points: int = 2,
        origin: list[float] | None = None,
        standardize: bool = True,
        visitors: int = 200,
        **kwargs: Any,
    ) -> None:
        super().__init__(standardize=standardize, **kwargs)
        require_choice("units", units, Units)
        require_positive(step=step, max_gap=max_gap, max_speed=max_speed, min_points=min_points, visitors=visitors)
        if position_columns is not None and len(set(position_columns)) != 2:
            raise ValueError(f"`position_columns` must be two columns, but is {position_columns} instead.")
        if units == "meters" and path is not None and position_columns is None:
            raise ValueError("`position_columns` must be given for positions on a plane.")
        if origin is not None:
            if units == "meters":
                raise ValueError(f"`origin` applies to degrees, but `units` is 'meters'. Omit it; it is {origin}.")
            if len(origin) != 2 or not (abs(origin[0]) <= 90 and abs(origin[1]) <= 180):
                raise ValueError(f"`origin` must be a latitude and a longitude in degrees, but is {origin} instead.")
        self.columns = feature_columns(2, ["east", "north"])
        self.visitors = visitors
        self.step = step
        self.origin = origin
        if path is None:
            if step not in (None, DRAWN_STEP):
                raise ValueError(
                    f"`step` must be {DRAWN_STEP:g} or omitted without `path`, because visitors are drawn with this "
                    f"step, but is {step}."
                )
            self.step, self.state_names = DRAWN_STEP, WAYS
        self._files = None if path is None else find_files(path, self.data_dir, endings=ENDINGS)
        names = (time_column, time_format, track_column, label_column, delimiter)
        limits = (step, max_gap, max_speed, min_points)
        self._reader = _Reader(position_columns, units, *names, *limits, origin)

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        if self._files is None:
            table = draw_visitors(self.visitors, self.seed)
            tracks = np.ones(len(table), np.int64)
        else:
            files, reader = self._files, self._reader._replace(step=self.step, origin=self.origin)
            dataset, metadata = self.cached(
                cache_name([CACHE_VERSION, reader], {"train": files}), lambda: reader.read(files)
            )
            table = dataset.with_format("arrow")[:]
            self.step, self.origin = json.loads(metadata["step"]), json.loads(metadata["origin"])
            self.state_names = json.loads(metadata["labels"])
            tracks = np.array(json.loads(metadata["segments"]))  # Number of sequences of each track.
            if metadata["omitted"]:
                rank_zero_info(metadata["omitted"])
        values = Sequences.from_arrow(table["values"])
        states = Sequences.from_arrow(table["states"]) if "states" in table.column_names else None
        indices = self.split(len(tracks))
        starts = np.cumsum(tracks) - tracks
        chosen = {}
        for part in PARTS:
            members = indices[part]
            numbers = range(len(tracks)) if members is None else members.tolist()
            chosen[part] = torch.tensor(
                [row for n in numbers for row in range(starts[n], starts[n] + tracks[n])], dtype=torch.int64
            )
        if self.standardize:
            values = values.with_values(self.scaled(values.values, values[chosen["train"]].values))
        return {
            part: as_dataset(as_table(values[rows], None if states is None else states[rows]))
            for part, rows in chosen.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns mean, standard deviation, step and origin, which a trained model needs to read new data."""
        return {**super().state_dict(), "step": self.step, "origin": self.origin}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.origin = state_dict["step"], state_dict["origin"]
        self._sources, self._gathered = {}, {}
        super().load_state_dict({name: state_dict[name] for name in ("mean", "std") if name in state_dict})
        self.setup()


class _Points(NamedTuple):
    """The points of one file.

    times: (points,) microseconds.
    positions: (points, 2) coordinates.
    labels: Labels of the points, ``None`` for an unknown one, or ``None`` if there are no labels.
    tracks: (points,) indices into `names`.
    names: Names of the tracks.
    place: Function that returns the location of a point, for errors.
    """

    times: np.ndarray
    positions: np.ndarray
    labels: list[str | None] | None
    tracks: np.ndarray
    names: list[str]
    place: Callable[[int], str]


class _Track(NamedTuple):
    """The points of one track, as in `_Points`, and its location for errors."""

    times: np.ndarray
    positions: np.ndarray
    labels: list[str | None] | None
    where: str


class _Reader(NamedTuple):
    """Reads tracks into one packed Arrow table. The fields are the options of reading and enter the cache name."""

    position_columns: list[str] | None
    units: str
    time_column: str | None
    time_format: str | None
    track_column: str | None
    label_column: str | None
    delimiter: str | None
    step: float | None
    max_gap: float | None
    max_speed: float | None
    min_points: int
    origin: list[float] | None

    def read(self, files: list[Path]) -> pa.Table:
        """Returns one row of `values` and `states` per segment without a long gap.

        The metadata contain the number of segments per track, and a message about omitted points.
        """
        found = [track for file in files for track in self._tracks(self._read_file(file), file)]
        same_time = sum(int((np.diff(track.times) == 0).sum()) for track in found)
        found = [_select(track, np.append(True, np.diff(track.times) > 0)) for track in found]
        origin = self.origin
        if self.units == "degrees":
            degrees = np.concatenate([track.positions for track in found])
            origin = _middle(degrees) if origin is None else origin
            found = [track._replace(positions=self._project(track, origin)) for track in found]
        kept = (
            [_select(track, reachable(track.times, track.positions, self.max_speed)) for track in found]
            if self.max_speed is not None
            else found
        )
        jumps = sum(len(track.times) for track in found) - sum(len(track.times) for track in kept)
        tracks = [track for track in kept if len(track.times) >= self.min_points]
        if not tracks:
            raise ValueError(
                f"There must be a track of at least {self.min_points} points, but all {len(found)} of "
                f"{some(list(map(str, files)))} have fewer."
            )
        omitted = []
        if same_time:
            omitted.append(f"{same_time} points with the same time as the previous point")
        if jumps:
            omitted.append(f"{jumps} points that require more than {self.max_speed:g} m/s")
        if short := len(kept) - len(tracks):
            omitted.append(f"{short} of {len(kept)} tracks with fewer than {self.min_points} points")
        intervals = np.concatenate([np.diff(track.times) for track in tracks])
        if self.step is None and not len(intervals):
            raise ValueError("`step` must be given if each track has only one point.")
        step = int(np.median(intervals)) if self.step is None else max(1, round(self.step * SECOND))
        sampled = [resample(track.times, track.positions, step, self.max_gap, track.where) for track in tracks]
        lengths = np.concatenate([segments for _, segments, _ in sampled])
        values = Sequences.from_lengths(np.concatenate([means for means, _, _ in sampled]), lengths)
        names, states = None, None
        if self.label_column is not None:
            names = sorted({label for track in tracks for label in track.labels or [] if label is not None})
            numbers = {name: number for number, name in enumerate(names)} | {None: MISSING}
            labels = []
            for track, (means, _, steps) in zip(tracks, sampled, strict=True):
                labels.append(np.full(len(means), MISSING))
                # Later writes win, so each step has the label of its last point.
                labels[-1][steps] = [numbers[label] for label in track.labels or [None] * len(steps)]
            states = Sequences.from_lengths(np.concatenate(labels), lengths)
        metadata = {
            "step": json.dumps(step / SECOND),
            "origin": json.dumps(origin),
            "labels": json.dumps(names),
            "segments": json.dumps([len(segments) for _, segments, _ in sampled]),
            "omitted": f"Omitted: {'; '.join(omitted)}." if omitted else "",
        }
        return as_table(values, states).replace_schema_metadata(metadata)

    def _tracks(self, points: _Points, path: Path) -> list[_Track]:
        """Checks the points of a file and returns its tracks. Points without a position are dropped."""
        if self.units == "degrees":
            for column, (name, limit) in enumerate((("Latitudes", 90), ("Longitudes", 180))):
                if (wrong := np.flatnonzero(np.abs(points.positions[:, column]) > limit)).size:
                    row = int(wrong[0])
                    raise ValueError(
                        f"{name} must be from {-limit} to {limit} degrees, but {points.place(row)} has "
                        f"{points.positions[row, column]:g} instead."
                    )
        there = ~np.isnan(points.positions).any(axis=1)
        tracks = []
        for number, name in enumerate(points.names):
            rows = np.flatnonzero((points.tracks == number) & there)
            times = points.times[rows]
            if (wrong := np.flatnonzero(np.diff(times) < 0)).size:
                raise ValueError(
                    f"Times must increase along a track, but {points.place(int(rows[wrong[0] + 1]))} is earlier than "
                    "the previous point. Sort the file, or set `track_column` if it contains several tracks."
                )
            labels = None if points.labels is None else [points.labels[row] for row in rows]
            where = f"track {name!r} of {path}" if len(points.names) > 1 else str(path)
            if len(rows):
                tracks.append(_Track(times, points.positions[rows], labels, where))
        if not tracks:
            raise ValueError(f"{path} must contain positions, but has none.")
        return tracks

    def _project(self, track: _Track, origin: list[float]) -> np.ndarray:
        """Projects the positions of a track that is not too far from the origin."""
        away = np.abs((track.positions[:, 1] - origin[1] + 180) % 360 - 180)
        if away.max() > WIDEST:
            raise ValueError(
                f"Tracks must be within {WIDEST:g} degrees of longitude of the origin {origin}, but {track.where} is "
                f"{away.max():.0f} away. Set `origin`, or read distant places separately."
            )
        return project(track.positions[:, 0], track.positions[:, 1], *origin)

    # One file

    def _read_file(self, path: Path) -> _Points:
        kind = ending(path)
        if kind not in (".gpx", ".geojson", ".json"):
            return self._table(path)
        if self.units == "meters":
            raise ValueError(f"`units` must be 'degrees' for GPX and GeoJSON such as {path}, but is 'meters'.")
        try:
            with pa.input_stream(str(path)) as stream:  # Decompresses files that end in ".gz".
                data = stream.read()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}. Copy or download it again.") from None
        try:
            tracks = self._gpx(ElementTree.fromstring(data)) if kind == ".gpx" else self._geojson(json.loads(data))
        except (ElementTree.ParseError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f"{path} must be {'GPX' if kind == '.gpx' else 'GeoJSON'}, but cannot be read as such: {error}"
            ) from None
        if not any(rows for _, rows in tracks):
            wanted = "a `trk` with points" if kind == ".gpx" else "a LineString, MultiLineString or Point with times"
            raise ValueError(f"{path} must contain {wanted}, but has none.")
        sizes = [len(rows) for _, rows in tracks]
        times, latitudes, longitudes, labels = zip(*(row for _, rows in tracks for row in rows), strict=True)

        def place(row: int) -> str:
            number = int(np.searchsorted(np.cumsum(sizes), row, side="right"))
            return f"point {row - sum(sizes[:number]) + 1} of track {tracks[number][0]!r} in {path}"

        columns = {"lat": latitudes, "lon": longitudes}
        positions = np.stack(
            [
                as_numbers(pa.array([None if v is None else str(v) for v in c], pa.large_string()), n, place)
                for n, c in columns.items()
            ],
            axis=1,
        )
        named = pa.array([None if time is None else str(time) for time in times], pa.large_string())
        return _Points(
            as_times(named, self.time_column or "time", place, self.time_format),
            positions,
            list(labels) if self.label_column is not None else None,
            np.repeat(np.arange(len(sizes)), sizes),
            [name for name, _ in tracks],
            place,
        )

    def _gpx(self, root: ElementTree.Element) -> list[tuple[str, list[tuple[Any, ...]]]]:
        """Returns the name of each track, and time, latitude, longitude and label of its points.

        The segments of a track are read as one track with gaps.
        """
        found = []
        for number, track in enumerate(root.iterfind("{*}trk")):
            label = track.findtext(f"{{*}}{self.label_column}") if self.label_column is not None else None
            points = [
                (point.findtext("{*}time"), point.get("lat"), point.get("lon"), label)
                for point in track.iterfind("{*}trkseg/{*}trkpt")
            ]
            found.append((track.findtext("{*}name") or str(number + 1), points))
        return found

    def _geojson(self, root: Any) -> list[tuple[str, list[tuple[Any, ...]]]]:
        """Returns the same as `_gpx`.

        A line is a track and has a list of times among its properties. Points belong to the track that a property
        names.
        """
        found: list[tuple[str, list[tuple[Any, ...]]]] = []
        points: dict[str, list[tuple[Any, ...]]] = {}
        for number, feature in enumerate(root.get("features", [root]) if isinstance(root, dict) else []):
            geometry, properties = feature.get("geometry") or {}, feature.get("properties") or {}
            label = None if self.label_column is None else properties.get(self.label_column)
            name = next(
                (
                    str(properties[key])
                    for key in self._names(self.track_column, (*TRACKS, "name"))
                    if key in properties
                ),
                None,
            )
            if geometry.get("type") == "Point":
                time = next(
                    (properties[key] for key in self._names(self.time_column, TIMES) if key in properties), None
                )
                points.setdefault(name or "points", []).append(
                    (time, geometry["coordinates"][1], geometry["coordinates"][0], label)
                )
            elif geometry.get("type") in ("LineString", "MultiLineString"):
                nested = {**properties, **(properties.get("coordinateProperties") or {})}
                times: Any = next(
                    (nested[key] for key in self._names(self.time_column, COORDINATE_TIMES) if key in nested), None
                )
                lines = [geometry["coordinates"]] if geometry["type"] == "LineString" else geometry["coordinates"]
                coordinates = [point for line in lines for point in line]
                if times and isinstance(times[0], list):
                    times = [time for line in times for time in line]
                labels = label if isinstance(label, list) else [label] * len(coordinates)
                for what, given in (("time", times), ("label", labels)):
                    if not isinstance(given, list) or len(given) != len(coordinates):
                        count = len(given) if isinstance(given, list) else "none"
                        raise ValueError(
                            f"A line must have a {what} for each of its {len(coordinates)} points, but feature "
                            f"{number + 1} has {count}."
                        )
                rows = [
                    (time, point[1], point[0], label)
                    for time, point, label in zip(times, coordinates, labels, strict=True)
                ]
                found.append((name or str(number + 1), rows))
        return [*found, *points.items()]

    def _table(self, path: Path) -> _Points:
        """Reads the points of a table."""
        chosen: list[str | None] = []

        def choose(names: list[str]) -> list[str]:
            pick = lambda given, option, usual, needed: self._pick(names, given, option, usual, needed, path)  # noqa: E731
            first, second = self.position_columns or (None, None)
            chosen[:] = [
                pick(first, "position_columns", LATITUDES, True),
                pick(second, "position_columns", LONGITUDES, True),
                pick(self.time_column, "time_column", TIMES, True),
                pick(self.track_column, "track_column", TRACKS, False),
                pick(self.label_column, "label_column", (), False),
            ]
            return list(dict.fromkeys(name for name in chosen if name is not None))

        table = read_table(path, choose, self.delimiter)
        first, second, time, track, label = [
            None if name is None else (name, table[name].combine_chunks()) for name in chosen
        ]
        assert first is not None
        assert second is not None
        assert time is not None

        def place(row: int) -> str:
            return f"row {row + 1} of {path}"

        positions = np.stack([as_numbers(column, name, place) for name, column in (first, second)], axis=1)
        ids, names = np.zeros(len(table), np.int64), ["1"]
        if track is not None:
            encoded = track[1].dictionary_encode()
            if encoded.null_count:
                raise ValueError(
                    f"`track_column` must have a value in each row, but {place(int(np.argmax(encoded.is_null())))} is "
                    "empty."
                )
            ids, names = encoded.indices.to_numpy(), [str(name) for name in encoded.dictionary.to_pylist()]
        labels = (
            None if label is None else [None if value in (None, "") else str(value) for value in label[1].to_pylist()]
        )
        return _Points(as_times(time[1], time[0], place, self.time_format), positions, labels, ids, names, place)

    @staticmethod
    def _names(given: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
        return usual if given is None else (given,)

    @staticmethod
    def _pick(
        names: list[str], given: str | None, option: str, usual: tuple[str, ...], needed: bool, path: Path
    ) -> str | None:
        """Returns the column that the user named, or the first with a usual name."""
        found = (
            [name for name in names if name == given]
            if given is not None
            else [name for name in names if name.strip().lower() in usual]
        )
        if not found and (needed or given is not None):
            wanted = repr(given) if given is not None else f"named {' or '.join(usual)}"
            raise ValueError(
                f"`{option}` must be in the file, but {path} has no column {wanted}. It has {some(names)}."
            )
        return found[0] if found else None


def _select(track: _Track, rows: np.ndarray) -> _Track:
    labels = None if track.labels is None else [label for label, kept in zip(track.labels, rows, strict=True) if kept]
    return track._replace(times=track.times[rows], positions=track.positions[rows], labels=labels)


def reachable(times: np.ndarray, positions: np.ndarray, max_speed: float) -> np.ndarray:
    """Returns (points,) the largest subset in which no two neighbors require more than `max_speed`.

    Among subsets of the same size, it is the one with the shortest path.
    """
    before, last = _longest_chain(times, positions, max_speed)
    kept = np.zeros(len(times), bool)
    while last >= 0:
        kept[last] = True
        last = before[last]
    return kept


@njit(cache=True)
def _longest_chain(times: np.ndarray, positions: np.ndarray, max_speed: float) -> tuple[np.ndarray, int]:
    """Finds the longest chain of reachable points by dynamic programming.

    Previous points are tried from the last to the first, until all earlier chains are shorter than the best one. This
    takes few comparisons per point for a track with few jumps, and one per pair of points in the worst case.

    Returns:
        The predecessor of each point in the longest chain that ends in it, -1 for none, and the end of the longest
        chain.
    """
    size = len(times)
    lengths = np.ones(size, np.int64)  # Number of points of the longest chain that ends in each point.
    ways = np.zeros(size)  # Length of that chain in meters.
    before = np.full(size, -1)
    longest = np.ones(size, np.int64)  # Number of points of the longest chain that ends in this point or earlier.
    last = 0
    for point in range(size):
        other = point - 1
        while other >= 0 and longest[other] >= lengths[point] - 1:
            east, north = positions[point, 0] - positions[other, 0], positions[point, 1] - positions[other, 1]
            square, limit = east * east + north * north, max_speed * (times[point] - times[other]) / SECOND
            if square <= limit * limit and lengths[other] >= lengths[point] - 1:
                way = ways[other] + math.sqrt(square)
                if lengths[other] >= lengths[point] or way < ways[point]:
                    lengths[point], ways[point], before[point] = lengths[other] + 1, way, other
            other -= 1
        longest[point] = max(lengths[point], longest[point - 1]) if point else 1
        if lengths[point] > lengths[last] or (lengths[point] == lengths[last] and ways[point] < ways[last]):
            last = point
    return before, last


def _middle(degrees: np.ndarray) -> list[float]:
    """Returns the median latitude and longitude, also across the 180th meridian, rounded to about a meter."""
    turns = np.exp(1j * np.radians(degrees[:, 1]))
    rough = np.degrees(np.angle(turns.mean()))
    longitude = rough + np.median((degrees[:, 1] - rough + 180) % 360 - 180)
    return [round(float(np.median(degrees[:, 0])), 5), round(float((longitude + 180) % 360 - 180), 5)]


def project(latitude: np.ndarray, longitude: np.ndarray, origin_latitude: float, origin_longitude: float) -> np.ndarray:
    """Applies the transverse Mercator projection: (points,) degrees on WGS 84 -> (points, 2) meters east and north.

    It uses the series of Krueger (1912) to the fourth power of the third flattening, as in Karney (2011), "Transverse
    Mercator with an accuracy of a few nanometers", with scale 1 on the meridian of the origin.
    """
    axis, flattening = 6_378_137.0, 1 / 298.257223563
    n = flattening / (2 - flattening)
    radius = axis / (1 + n) * (1 + n**2 / 4 + n**4 / 64)
    series = (  # Karney (2011), eq. 35
        n / 2 - 2 * n**2 / 3 + 5 * n**3 / 16 + 41 * n**4 / 180,
        13 * n**2 / 48 - 3 * n**3 / 5 + 557 * n**4 / 1440,
        61 * n**3 / 240 - 103 * n**4 / 140,
        49561 * n**4 / 161280,
    )
    eccentricity = math.sqrt(flattening * (2 - flattening))

    def flat(latitude: Any, longitude: Any) -> tuple[np.ndarray, np.ndarray]:
        sine = np.sin(np.radians(latitude))
        # Tangent of the conformal latitude.
        conformal = np.sinh(np.arctanh(sine) - eccentricity * np.arctanh(eccentricity * sine))
        away = np.radians((longitude - origin_longitude + 180) % 360 - 180)
        north = np.arctan2(conformal, np.cos(away))
        east = np.arcsinh(np.sin(away) / np.hypot(conformal, np.cos(away)))
        terms = [(2 * (j + 1), coefficient) for j, coefficient in enumerate(series)]
        return (
            radius * (east + sum(c * np.cos(j * north) * np.sinh(j * east) for j, c in terms)),
            radius * (north + sum(c * np.sin(j * north) * np.cosh(j * east) for j, c in terms)),
        )

    with np.errstate(divide="ignore"):  # `arctanh` is infinite at the poles.
        east, north = flat(latitude, longitude)
        _, zero = flat(np.float64(origin_latitude), np.float64(origin_longitude))
    return np.stack([east, north - zero], axis=1)


def rails(angle: np.ndarray) -> np.ndarray:
    """Returns points of the railway of the drawn museum: (points,) radians -> (points, 2) meters."""
    radius = 1 + 0.18 * np.cos(3 * angle)
    return np.stack([RAILS[0] * radius * np.cos(angle), RAILS[1] * radius * np.sin(angle)], axis=1)


def draw_visitors(visitors: int, seed: int) -> pa.Table:
    """Draws a track per visitor, and in each step the true state, on foot or on the train."""
    draw = np.random.default_rng(generator(seed, "visitors").initial_seed())
    exhibits = np.array(EXHIBITS, float)
    values, states, lengths = [], [], []
    for _ in range(visitors):
        duration = draw.uniform(*VISIT)
        times, places, ways = [0.0], [exhibits[draw.integers(len(exhibits))]], [0]
        walking = draw.uniform(*WALKING)

        def go(place: np.ndarray, seconds: float, way: int) -> None:
            times.append(times[-1] + seconds)  # noqa: B023
            places.append(place)  # noqa: B023
            ways.append(way)  # noqa: B023

        if draw.random() < RIDERS:
            station, legs = int(draw.integers(STATIONS)), int(draw.integers(LEGS[0], LEGS[1] + 1))
            places[0] = rails(np.array([2 * np.pi * station / STATIONS]))[0]
            for leg in range(station, station + legs):
                go(places[-1], draw.uniform(*WAITING), 1)
                riding = draw.uniform(*RIDING)
                for place in rails(2 * np.pi * (leg + np.arange(1, 33) / 32) / STATIONS):
                    go(place, float(np.linalg.norm(place - places[-1])) / riding, 1)
        while times[-1] < duration:
            goal = exhibits[draw.integers(len(exhibits))] + draw.normal(0, 5, 2)
            go(goal, float(np.linalg.norm(goal - places[-1])) / walking, 0)
            go(goal + draw.normal(0, 2, 2), draw.uniform(*LOOKING), 0)
        moments = np.arange(0, duration, DRAWN_STEP)
        track = np.stack([np.interp(moments, times, column) for column in np.stack(places).T], axis=1) + draw.normal(
            0, NOISE, (len(moments), 2)
        )
        lost = np.convolve(draw.random(len(moments)) < LOST, np.ones(LOST_STEPS))[: len(moments)] > 0
        track[lost] = np.nan
        values.append(track)
        states.append(np.array(ways)[np.minimum(np.searchsorted(times, moments, side="right"), len(ways) - 1)])
        lengths.append(len(moments))
    return as_table(
        Sequences.from_lengths(np.concatenate(values), lengths), Sequences.from_lengths(np.concatenate(states), lengths)
    )
