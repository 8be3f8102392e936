"""Tracks from GPX, GeoJSON and tables: projection, cleaning, resampling and split; drawn visitors; error messages."""

import gzip
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from datamodules import GPSDataModule
from datamodules.gps import WAYS, project, reachable
from datamodules.series import SECOND

RAW = {"standardize": False, "val_fraction": 0.0, "test_fraction": 0.0}
METERS = {**RAW, "units": "meters", "position_columns": ["x", "y"]}
NAN = float("nan")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory; caches go to data/cache in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_HMM_DATA", raising=False)
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return name


def table(names: str, *rows: tuple) -> str:
    return "\n".join([names, *(",".join("" if cell is None else str(cell) for cell in row) for row in rows)]) + "\n"


def ready(path=None, **words) -> GPSDataModule:
    data = GPSDataModule(path, **words)
    data.setup()
    return data


def close(found, expected, atol=0.0) -> None:
    found, expected = [torch.as_tensor(x) for x in found.tolist()], [torch.tensor(x) for x in expected]
    assert [len(x) for x in found] == [len(x) for x in expected]
    torch.testing.assert_close(
        torch.cat(found).double(), torch.cat(expected).double(), rtol=0, atol=atol, equal_nan=True
    )


# A degree is 111 km: 1e-4 degrees of latitude are 11.1 m. The first track has a gap of two steps, and its fourth point
# has no longitude.
POINTS = [(0, 47.0, 13.0), (5, 47.0001, 13.0), (20, 47.0001, 13.0001), (25, 47.0, None), (30, 47.0, 13.0)]
OTHER = [(100, 47.0002, 13.0), (105, 47.0002, 13.0001)]
NORTH, EAST = 11.1174, 7.6056  # meters for 1e-4 degrees at a latitude of 47, by the radii of curvature of the ellipsoid
TRACKS = [
    [[0.0, 0.0], [0.0, NORTH], [NAN, NAN], [NAN, NAN], [EAST, NORTH], [NAN, NAN], [0.0, 0.0]],
    [[0.0, 2 * NORTH], [EAST, 2 * NORTH]],
]
ORIGIN = {"origin": [47.0, 13.0], "step": 5}


def gpx(**tracks: list) -> str:
    def point(time, lat, lon):
        return f'<trkpt lat="{lat}" lon="{lon}"><ele>3</ele><time>2020-05-01T10:00:{time:02}Z</time></trkpt>'

    body = "".join(
        f"<trk><name>{name}</name><type>{name}s</type><trkseg>{''.join(point(*p) for p in points)}</trkseg></trk>"
        for name, points in tracks.items()
    )
    head = '<?xml version="1.0"?><gpx version="1.1" xmlns="http://www.topografix.com/GPX/1/1">'
    return f'{head}<wpt lat="1" lon="1"/>{body}</gpx>'


def line(points: list, times: str = "coordTimes", **properties) -> dict:
    return {
        "type": "Feature",
        "properties": {times: [f"2020-05-01T10:00:{time:02}.000Z" for time, _, _ in points], **properties},
        "geometry": {"type": "LineString", "coordinates": [[lon, lat, 500.0] for _, lat, lon in points]},
    }


class TestReading:
    def test_tables(self):
        rows = [(*point, "a") for point in POINTS] + [(*point, "b") for point in OTHER]
        rows = [rows[i] for i in (0, 5, 1, 2, 6, 3, 4)]  # tracks may be interleaved
        data = ready(write("x.csv", table("time,Latitude,lng,track_id", *rows)), **RAW, **ORIGIN)
        assert (data.step, data.num_features, data.num_symbols, data.origin) == (5.0, 2, None, [47.0, 13.0])
        close(data.train_sequences, TRACKS, atol=0.001)
        rows = [
            (lat, f"2020-05-01 10:0{time // 60}:{time % 60:02}.000000123", lon) for time, lat, lon in OTHER
        ]  # nanoseconds, one track
        found = ready(write("x.tsv.gz", table("lat,time,lon", *rows).replace(",", "\t")), **RAW, **ORIGIN)
        close(found.train_sequences, TRACKS[1:], atol=0.001)

    def test_gpx(self):
        points = [point for point in POINTS if point[2] is not None]
        data = ready(
            write("x.gpx", gpx(walk=points, ride=[(t - 60, *p) for t, *p in OTHER])),
            label_column="type",
            **RAW,
            **ORIGIN,
        )
        close(data.train_sequences, TRACKS, atol=0.001)
        assert data.state_names == ["rides", "walks"]
        assert data.true_states("train").tolist() == [[1, 1, -1, -1, 1, -1, 1], [0, 0]]

    def test_gpx_times_with_blanks_and_short_offsets(self):
        text = gpx(walk=[(0, 47.0, 13.0), (5, 47.0001, 13.0)])
        for before, after in (("<time>", "<time>\n  "), ("Z</time>", "+02\n</time>")):
            assert before in text
            text = text.replace(before, after)
        close(ready(write("x.gpx", text), **RAW, **ORIGIN).train_sequences, [TRACKS[0][:2]], atol=0.001)

    def test_labels_and_tracks_called_na(self):
        """Marks of missing numbers are names like others where names are read."""
        rows = [
            (0, 1, 2, "NA", "NA"),
            (5, 2, 2, "null", "NA"),
            (10, 2, 2, None, "NA"),
            (0, 1, 2, "NA", "nan"),
            (5, "NA", 2, "NA", "nan"),
            (10, 3, 2, "NA", "nan"),
        ]
        data = ready(write("x.csv", table("time,x,y,kind,track", *rows)), label_column="kind", step=5, **METERS)
        assert data.state_names == ["NA", "null"]
        assert data.true_states("train").tolist() == [[0, 1, -1], [0, -1, 0]]

    def test_geojson(self):
        points = [point for point in POINTS if point[2] is not None]
        features = [
            line(points, mode="foot"),
            line([(t - 60, *p) for t, *p in OTHER], times="times", mode=["train", "foot"]),
        ]
        data = ready(
            write("x.geojson", json.dumps({"type": "FeatureCollection", "features": features})),
            label_column="mode",
            **RAW,
            **ORIGIN,
        )
        close(data.train_sequences, TRACKS, atol=0.001)
        assert data.true_states("train").tolist() == [[0, 0, -1, -1, 0, -1, 0], [1, 0]]
        places = [(*point, track) for track, all_points in (("a", points), ("b", OTHER)) for point in all_points]
        features = [
            {
                "type": "Feature",
                "properties": {"time": time, "track": track},
                "geometry": {"type": "Point", "coordinates": [lon, lat]},
            }
            for time, lat, lon, track in places
        ]
        close(
            ready(write("y.json", json.dumps({"features": features})), **RAW, **ORIGIN).train_sequences,
            TRACKS,
            atol=0.001,
        )

    def test_meters_and_labels_of_points(self):
        write("x.csv", table("t,x,y,kind", (0, 1, 2, "b"), (4, 2, 2, "a"), (5, 3, 4, None), (20, 4, 4, "b")))
        data = ready("x.csv", time_column="t", label_column="kind", step=5, **METERS)
        close(
            data.train_sequences, [[[1.0, 2.0], [2.5, 3.0], [NAN, NAN], [NAN, NAN], [4.0, 4.0]]]
        )  # half a row's distance may be lacking
        assert (data.true_states("train").tolist(), data.origin, data.state_names) == (
            [[1, -1, -1, -1, 1]],
            None,
            ["a", "b"],
        )

    def test_trained_units_step_and_origin_go_with_a_checkpoint(self):
        write("x.csv", table("time,lat,lon", *[(5 * n, 47 + n * 1e-4, 13 + (n % 3) * 1e-4) for n in range(9)]))
        write("y.csv", table("time,lat,lon", *[(9 * n, 47 + n * 1e-4, 13.0 + n * 1e-4) for n in range(5)]))
        data = ready("x.csv", val_fraction=0.0, test_fraction=0.0)
        other = GPSDataModule("y.csv", val_fraction=0.0, test_fraction=0.0)
        other.load_state_dict(data.state_dict())
        assert (other.step, other.origin) == (5.0, data.origin)
        back = other.train_sequences.values * data.std + data.mean
        expected = project(np.array([47.0]), np.array([13.0]), *data.origin)
        torch.testing.assert_close(back[0], torch.from_numpy(expected[0]), rtol=0, atol=1e-6)
        plain = GPSDataModule("y.csv", **RAW)
        plain.load_state_dict(ready("x.csv", **RAW).state_dict())
        torch.testing.assert_close(plain.train_sequences.values, back, rtol=0, atol=1e-6, equal_nan=True)


class TestProjection:
    def test_published_point(self):
        """The example of GeographicLib's GeoConvert: UTM zone 38, meridian 45 E, scale 0.9996, false easting 500 km."""
        east, north = project(np.array([33.3]), np.array([44.4]), 0.0, 45.0)[0]
        np.testing.assert_allclose(
            [500_000 + 0.9996 * east, 0.9996 * north], [444_140.54, 3_684_706.36], rtol=0, atol=0.006
        )

    def test_meridian_is_the_ellipse(self):
        """Against the arc length by numerical integration."""
        square = 0.0066943799901413165
        latitudes = np.radians(np.linspace(-20, 63.0, 200_001))
        arc = np.trapezoid(6_378_137 * (1 - square) / (1 - square * np.sin(latitudes) ** 2) ** 1.5, latitudes)
        np.testing.assert_allclose(
            project(np.array([63.0]), np.array([5.0]), -20.0, 5.0), [[0.0, arc]], rtol=0, atol=1e-3
        )

    @pytest.mark.parametrize(("latitude", "longitude"), [(47.0, 13.0), (-33.0, 179.9), (65.0, -179.5), (10.0, 178.0)])
    def test_keeps_angles_and_on_its_meridian_lengths(self, latitude, longitude):
        """Small steps north and east on the ellipsoid keep their length on the plane, and are at a right angle."""
        square, sine = 0.0066943799901413165, np.sin(np.radians(latitude))
        meridional, normal = (
            6_378_137 * (1 - square) / (1 - square * sine**2) ** 1.5,
            6_378_137 / np.sqrt(1 - square * sine**2),
        )
        small = 1e-5
        points = project(
            np.array([latitude - small, latitude + small, latitude, latitude]),
            np.array([longitude] * 2 + [longitude - small, longitude + small]),
            40,
            180,
        )
        north, east = points[1] - points[0], points[3] - points[2]
        north, east = (
            north / (2 * np.radians(small) * meridional),
            east / (2 * np.radians(small) * normal * np.cos(np.radians(latitude))),
        )
        np.testing.assert_allclose(np.hypot(*north), np.hypot(*east), rtol=1e-8)
        np.testing.assert_allclose(north @ east, 0, atol=1e-8)
        np.testing.assert_allclose(
            np.hypot(*project(np.array([40.0]), np.array([180 + 1e-4]), 40, 180)[0]), 8.5395, rtol=1e-4
        )


class TestCleaning:
    def test_against_trying_all_subsets(self, rng):
        """As many points are kept as in the largest subset in which no two neighbours need more than the speed."""
        for _ in range(60):
            size = int(rng.integers(1, 10))
            times = np.cumsum(rng.integers(1, 4, size)) * SECOND
            positions = rng.normal(size=(size, 2)) + 8.0 * rng.integers(0, 2, (size, 1))
            kept = reachable(times, positions, 3.0)

            def possible(rows, times=times, positions=positions):
                return bool(
                    (np.hypot(*np.diff(positions[rows], axis=0).T) <= 3.0 * np.diff(times[rows]) / SECOND).all()
                )

            assert possible(np.flatnonzero(kept))
            subsets = ((chosen, np.flatnonzero((chosen >> np.arange(size)) & 1)) for chosen in range(1, 2**size))
            assert kept.sum() == max(chosen.bit_count() for chosen, rows in subsets if possible(rows))

    def test_long_tracks_against_all_pairs(self, rng):
        """Tracks of two places and stray points, against dynamic programming over all pairs of points."""
        for _ in range(20):
            size = int(rng.integers(50, 150))
            times = np.cumsum(rng.integers(1, 5, size)) * SECOND
            positions = rng.normal(size=(size, 2)).cumsum(0) + 30.0 * (
                rng.random((size, 1)) < rng.choice([0.1, 0.5])
            ) * rng.normal(size=(size, 2))
            lengths = np.ones(size, int)
            for n in range(1, size):
                reached = np.hypot(*(positions[n] - positions[:n]).T) <= 5.0 * (times[n] - times[:n]) / SECOND
                lengths[n] = 1 + (lengths[:n] * reached).max()
            assert reachable(times, positions, 5.0).sum() == lengths.max()

    def test_one_outlier_before_a_pause_is_all_that_goes(self):
        """The outlier is out of reach of the point before it, but not of the point after the pause."""
        times = np.array([*range(10), 10, *range(12, 22)]) * SECOND
        positions = np.zeros((21, 2))
        positions[10, 0] = 100.0
        assert np.flatnonzero(~reachable(times, positions, 70.0)).tolist() == [10]

    def test_what_is_left_out_is_said(self, caplog):
        rows = [
            (0, 5000, 0, "a"),
            (1, 0, 0, "a"),
            (2, 1, 0, "a"),
            (2, 9, 9, "a"),
            (3, 900, 0, "a"),
            (4, 901, 0, "a"),
            (5, 3, 0, "a"),
            (6, 4, 0, "a"),
        ]
        rows += [(0, 1, 1, "lone")]
        write("x.csv", table("time,x,y,track", *rows))
        with caplog.at_level(logging.INFO):
            close(
                ready("x.csv", max_speed=10, **METERS).train_sequences,
                [[[0.0, 0.0], [1.0, 0.0], [NAN, NAN], [NAN, NAN], [3.0, 0.0], [4.0, 0.0]]],
            )
        message = (
            "Omitted: 1 points with the same time as the previous point; 3 points that require more than 10 m/s; "
            "1 of 2 tracks with fewer than 2 points."
        )
        assert message in caplog.text
        every = ready("x.csv", max_speed=None, min_points=1, **METERS).train_sequences
        assert every.lengths.tolist() == [7, 1]


def test_a_coordinate_that_never_changes_has_no_unit():
    write("x.csv", table("time,x,y", *((n, 3, n) for n in range(8))))
    with pytest.raises(
        ValueError,
        match=r"must vary in the training part, but feature 0 is always 3 there\. Set `standardize` to false\.",
    ):
        _ = ready("x.csv", **{**METERS, "standardize": True}).train_sequences
    assert ready("x.csv", **METERS).train_sequences.values[:, 0].tolist() == [3] * 8


def test_tracks_are_split_as_wholes():
    rows = [(n + (1000 if n >= 5 else 0), track, n, track) for track in range(10) for n in range(8)]
    write("x.csv", table("time,x,y,track", *rows))
    data = ready("x.csv", **{**METERS, "val_fraction": 0.2, "test_fraction": 0.3}, max_gap=10)
    parts = [data.train_sequences, data.val_sequences, data.test_sequences]
    assert [part.lengths.tolist() for part in parts] == [[5, 3] * 5, [5, 3] * 2, [5, 3] * 3]
    tracks = [set(part.values[:, 0].tolist()) for part in parts]
    assert sorted(set.union(*tracks)) == list(range(10))
    assert sum(map(len, tracks)) == 10


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "", "x.csv must not be empty, but is"),
        (
            "x.csv",
            table("time,lat,lon", (0, 1, 2), (2, 1, 2), (1, 1, 2)),
            "Times must increase along a track, but row 3 of x.csv is earlier .* set `track_column`",
        ),
        (
            "x.csv",
            table("time,lat,lon", (0, 1, 2), (1, 91, 2)),
            "Latitudes must be from -90 to 90 degrees, but row 2 of x.csv has 91 instead",
        ),
        (
            "x.csv",
            table("time,lat,lon", (0, 1, 2), (1, 1, -180.5)),
            "Longitudes must be from -180 to 180 degrees, but row 2 of x.csv has -180.5 instead",
        ),
        (
            "x.csv",
            table("time,lat,lon", (0, 1, "east"), (1, 1, 2)),
            "Values must be numbers, but column 'lon' in row 1 of x.csv has 'east' instead",
        ),
        (
            "x.csv",
            table("time,lat,lon", (0, 1, 2)),
            "There must be a track of at least 2 points, but all 1 of x.csv have fewer",
        ),
        ("x.csv", table("time,lat,lon", (0, None, 2)), "x.csv must contain positions, but has none"),
        (
            "x.csv",
            table("time,lat,lon,track", (0, 1, 2, 1), (1, 1, 2, None)),
            "`track_column` must have a value in each row, but row 2 of x.csv is empty",
        ),
        (
            "x.csv",
            table("time,lat,x", (0, 1, 2)),
            "`position_columns` must be in the file, but x.csv has no column named lon or lng .* It has time, lat, x",
        ),
        (
            "x.csv",
            table("time,lat,lon,track", (0, 1, 0, 1), (1, 1, 0, 1), (0, 1, 100, 2), (1, 1, 100, 2), (2, 1, 0, 1)),
            "track '2' of x.csv is 100 away",
        ),
        (
            "x.csv",
            table("time,lat,lon", (0, 1, 2), (1, 1, 2), (2, 1, 2), (1e6, 1, 2)),
            "x.csv has 4 rows in .* Set `max_gap`",
        ),
        ("x.gpx", "<gpx><trk></trk></gpx>", "x.gpx must contain a `trk` with points, but has none"),
        ("x.gpx", "<gpx>", "x.gpx must be GPX, but cannot be read as such"),
        (
            "x.gpx",
            '<gpx><trk><trkseg><trkpt lat="1" lon="2"/></trkseg></trk></gpx>',
            "Each row must have a time, but column 'time' in point 1 of track '1' in x.gpx",
        ),
        ("x.geojson", "[1, 2", "x.geojson must be GeoJSON, but cannot be read as such"),
        (
            "x.geojson",
            '{"features": []}',
            "x.geojson must contain a LineString, MultiLineString or Point with times, but has none",
        ),
        (
            "x.geojson",
            json.dumps({"features": [{**line(OTHER), "properties": {}}]}),
            "A line must have a time for each of its 2 points, but feature 1 has none",
        ),
    ],
)
def test_wrong_files(name, text, message):
    with pytest.raises(ValueError, match=message):
        ready(write(name, text), **RAW)


@pytest.mark.parametrize(
    ("name", "text"), [("x.gpx.gz", gpx(walk=OTHER)), ("x.geojson.gz", json.dumps({"features": [line(OTHER)]}))]
)
def test_truncated_and_corrupt_gzip_files(name, text):
    whole = gzip.compress(text.encode())
    for data in (whole[: len(whole) // 2], whole[:20] + bytes(20) + whole[40:], b"plain"):
        Path(name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} cannot be read: .*Copy or download it again."):
            ready(name, **RAW)


def test_deeply_nested_geojson():
    with pytest.raises(ValueError, match=r"x\.geojson must be GeoJSON, but cannot be read as such"):
        ready(write("x.geojson", "[" * 100_000), **RAW)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"units": "feet"}, "`units` must be one of degrees, meters, but is 'feet' instead"),
        ({"max_speed": 0}, "`max_speed` must be positive, but is 0 instead"),
        ({"visitors": 0}, "`visitors` must be positive, but is 0 instead"),
        ({"step": 5}, "`step` must be 10 or omitted without `path`, .* but is 5"),
        ({"position_columns": ["x"]}, "`position_columns` must be two columns, but is \\['x'\\] instead"),
        ({"path": "x.csv", "units": "meters"}, "`position_columns` must be given for positions on a plane"),
        (
            {"origin": [13.0, 470.0]},
            "`origin` must be a latitude and a longitude in degrees, but is \\[13.0, 470.0\\] instead",
        ),
        ({"origin": [13.0, 47.0], "units": "meters"}, "`origin` applies to degrees, but `units` is 'meters'"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        GPSDataModule(**words)


def test_drawn_visitors_cannot_be_told_apart_by_position_or_speed_alone():
    data = ready(visitors=60, **RAW)
    assert (data.state_names, data.step) == (WAYS, 10.0)
    values, states = data.train_sequences.values.numpy(), data.true_states("train").values.numpy()
    assert 0.15 < states.mean() < 0.6
    there = ~np.isnan(values).any(axis=1)
    assert 0.9 < there.mean() < 1
    speed = np.hypot(*np.diff(values, axis=0).T)
    speed[data.train_sequences.offsets[1:-1].numpy() - 1] = NAN
    measured = ~np.isnan(speed)
    clusters = KMeans(2, n_init=3, random_state=0)
    assert adjusted_rand_score(states[there], clusters.fit_predict(values[there])) < 0.1
    for feature in (speed, np.log(speed)):
        assert adjusted_rand_score(states[1:][measured], clusters.fit_predict(feature[measured, None])) < 0.6
    again, other = ready(visitors=60, **RAW), ready(visitors=60, seed=1, **RAW)
    assert torch.equal(again.train_sequences.values.nan_to_num(), data.train_sequences.values.nan_to_num())
    assert not torch.equal(other.train_sequences.offsets, data.train_sequences.offsets)
