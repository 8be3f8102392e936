"""Series with times: resampled, split along time, scaled by the training part; and what is said about bad ones."""

import gzip
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from datamodules import AccelerometerDataModule
from datamodules.accelerometer import ACTIVITIES

RAW = {"standardize": False, "val_fraction": 0.0, "test_fraction": 0.0}
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


def table(times: list, *columns: list, names: str = "t,x,y", mark: str = ",") -> str:
    rows = [mark.join("" if cell is None else str(cell) for cell in row) for row in zip(times, *columns, strict=True)]
    return "\n".join([mark.join(names.split(",")[: len(columns) + 1]), *rows]) + "\n"


def ready(path=None, **words) -> AccelerometerDataModule:
    data = AccelerometerDataModule(path, **words)
    data.setup()
    return data


def train(path, **words) -> list:
    return ready(path, **{**RAW, **words}).train_sequences.tolist()


def same(found: list, expected: list) -> bool:
    return [len(sequence) for sequence in found] == [len(sequence) for sequence in expected] and np.array_equal(
        np.concatenate(found), np.concatenate(expected), equal_nan=True
    )


SECONDS = [0, 5, 10, 25, 30]  # two steps of 5 s are lacking
X, Y = [1.0, 2.0, 4.0, 8.0, 16.0], [1, 0, None, 1, 0]
STEPS = [[1.0, 1.0], [2.0, 0.0], [4.0, NAN], [NAN, NAN], [NAN, NAN], [8.0, 1.0], [16.0, 0.0]]


class TestReading:
    @pytest.mark.parametrize(
        ("times", "words"),
        [
            (SECONDS, {}),
            ([1425427200.5 + second for second in SECONDS], {}),
            (
                [f"2015-03-04 23:59:{30 + second:02}" if second < 30 else "2015-03-05 00:00:00" for second in SECONDS],
                {},
            ),
            ([f"2015-03-04T12:00:{second:02}.250" for second in SECONDS], {}),
            ([f"2015-03-04T12:00:{second:02}Z" for second in SECONDS], {}),
            ([f"2015-03-04T12:00:{second:02}+0100" for second in SECONDS], {}),
            ([f"2015-03-04T12:00:{second:02}+01" for second in SECONDS], {}),
            ([f"2015-03-04 12:00:{second:02} " for second in SECONDS], {}),
            ([f"04/03/1915 12.00.{second:02}" for second in SECONDS], {"time_format": "%d/%m/%Y %H.%M.%S"}),
            (
                [f"04/03/2015 12:00:{second:02}.5 UTC" for second in SECONDS],
                {"time_format": "%d/%m/%Y %H:%M:%S.%f UTC"},
            ),
            ([f"12:0{second % 2}:{second:02} +000{second % 2}" for second in SECONDS], {"time_format": "%H:%M:%S %z"}),
        ],
    )
    def test_ways_to_write_times(self, times, words):
        data = ready(write("x.csv", table(times, X, Y)), **RAW, **words)
        assert (data.step, [column.name for column in data.columns], data.num_features, data.num_symbols) == (
            5.0,
            ["x", "y"],
            2,
            None,
        )
        assert same(data.train_sequences.tolist(), [STEPS])

    @pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.timestamp("s", "Europe/Berlin"), pa.int64(), pa.float64()])
    def test_parquet(self, kind):
        times = pa.array(np.array(SECONDS) * (10**9 if kind == pa.timestamp("ns") else 1)).cast(kind)
        pa.parquet.write_table(pa.table({"y": Y, "when": times, "x": X, "note": ["a"] * 5}), "x.parquet")
        assert same(train("x.parquet", time_column="when", columns=["x", "y"]), [STEPS])

    def test_other_tables(self):
        assert same(train(write("x.tsv", table(SECONDS, X, Y, mark="\t"))), [STEPS])
        assert same(
            train(
                write("x.txt.gz", "Report\nof; a device\n" + table(SECONDS, X, Y, mark=";")), delimiter=";", skip_rows=2
            ),
            [STEPS],
        )
        assert same(train(write("x.csv", table(SECONDS, X, ["a"] * 5)), columns=["x"]), [[[step[0]] for step in STEPS]])

    def test_blank_cells_and_marks_of_missing_numbers(self):
        write("x.csv", "t,x,y\n0,1, \n5,  ,NA\n10, 3 ,n/a\n15,null,4\n20,,5\n")
        assert same(train("x.csv"), [[[1.0, NAN], [NAN, NAN], [3.0, NAN], [NAN, 4.0], [NAN, 5.0]]])

    def test_line_breaks_in_cells_of_a_large_file(self):
        """Arrow reads blocks of 1 MB; a cell's second line looks like a row at the start of a block."""
        size = 60_000
        write(
            "x.csv",
            "t,x,note\n" + "".join(f'{5 * n},{n % 7},"a note of some length\n{5 * n + 1},99,b"\n' for n in range(size)),
        )
        assert Path("x.csv").stat().st_size > 2 << 20
        np.testing.assert_array_equal(np.array(train("x.csv", columns=["x"])[0])[:, 0], np.arange(size) % 7)

    def test_cached_by_its_options(self):
        write("x.csv", table(SECONDS, X, Y))
        assert same(train("x.csv"), [STEPS])
        assert same(train("x.csv", step=10), [[[1.5, 0.5], [4.0, NAN], [8.0, 1.0], [16.0, 0.0]]])
        assert len(list(Path("data/cache").iterdir())) == 2


class TestResampling:
    def test_a_step_is_the_mean_of_its_rows(self, rng):
        """Against a loop over steps and rows, with values and whole rows missing."""
        times = np.sort(rng.choice(2000, 900, replace=False))
        times[0] = 0
        values = rng.normal(size=(900, 2))
        values[rng.random((900, 2)) < 0.3] = NAN
        write(
            "x.csv",
            table(
                times.tolist(), *[[None if np.isnan(v) else repr(v) for v in column.tolist()] for column in values.T]
            ),
        )
        slack = np.median(np.diff(times)) // 2
        expected = np.full((int((times[-1] + slack) // 7) + 1, 2), NAN)
        for step in range(len(expected)):
            for column in range(2):
                inside = [
                    v
                    for t, v in zip(times, values[:, column], strict=True)
                    if 7 * step <= t + slack < 7 * step + 7 and not np.isnan(v)
                ]
                if inside:
                    expected[step, column] = sum(inside) / len(inside)
        found = ready("x.csv", step=7, **RAW).train_sequences
        torch.testing.assert_close(found.values, torch.from_numpy(expected), equal_nan=True)

    def test_clocks_that_are_not_exact_make_no_gaps(self, rng):
        times = np.arange(500) * 60 + rng.uniform(-20, 20, 500)
        times[0] = 0
        assert same(
            train(write("x.csv", table(times.tolist(), list(range(500)))), step=60), [[[float(n)] for n in range(500)]]
        )

    def test_long_gaps_begin_a_new_sequence(self):
        times = [0, 5, 15, 1000, 1005, 5000]
        write("x.csv", table(times, [1, 2, 3, 4, 5, 6]))
        assert same(train("x.csv", step=5, max_gap=10), [[[1.0], [2.0], [NAN], [3.0]], [[4.0], [5.0]], [[6.0]]])
        assert same(train("x.csv", step=5, max_gap=9.9), [[[1.0], [2.0]], [[3.0]], [[4.0], [5.0]], [[6.0]]])
        with pytest.raises(
            ValueError, match=r"x.csv has 6 rows in 1001 steps of 5 s, with a gap of 3995 s after row 5. Set `max_gap`"
        ):
            AccelerometerDataModule("x.csv", step=5).setup()


class TestSplit:
    def test_along_time(self):
        write("x.csv", table(list(range(20)), list(range(20))))
        data = ready("x.csv", standardize=False, val_fraction=0.2, test_fraction=0.29)
        assert [
            values.flatten().tolist()
            for values in (data.train_sequences.values, data.val_sequences.values, data.test_sequences.values)
        ] == [
            list(range(11)),
            [11, 12, 13, 14],
            [15, 16, 17, 18, 19],
        ]
        data = ready("x.csv", standardize=False, val_fraction=0.2, test_fraction=0.3, num_steps=10, sequence_length=2)
        parts = [
            [sequence.flatten().tolist() for sequence in part]
            for part in (data.train_sequences, data.val_sequences, data.test_sequences)
        ]
        assert parts == [[[0, 1], [2, 3], [4]], [[5, 6]], [[7, 8], [9]]]

    def test_of_every_recording(self):
        write("b.csv", table([0, 1, 2, 3, 4, 100, 101, 102, 103, 104], list(range(10))))
        write("a.csv", table([50, 51, 52, 53, 54], [10, 11, 12, 13, 14]))
        data = ready(["b.csv", "a.csv"], standardize=False, max_gap=10, val_fraction=0.2, test_fraction=0.2)
        parts = [
            [sequence.flatten().tolist() for sequence in part]
            for part in (data.train_sequences, data.val_sequences, data.test_sequences)
        ]
        assert parts == [[[0, 1, 2, 3, 4], [5], [10, 11, 12]], [[6, 7], [13]], [[8, 9], [14]]]

    def test_units_are_those_of_the_training_part(self):
        write("x.csv", table(list(range(10)), [1, 3, None, 1, 3, 1, 3, 100, 200, 300], list(range(10))))
        data = ready("x.csv", val_fraction=0.0, test_fraction=0.3)
        assert (data.mean[0].item(), data.std[0].item()) == (2.0, 1.0)
        assert data.train_sequences.values[:, 0].nan_to_num(7.0).tolist() == [-1, 1, 7, -1, 1, -1, 1]
        assert data.test_sequences.values[:, 0].tolist() == [98, 198, 298]
        other = AccelerometerDataModule(
            write("y.csv", table([0, 1, 2], [2, 4, 6], [0, 1, 2])), val_fraction=0.0, test_fraction=0.0
        )
        other.load_state_dict(data.state_dict())
        assert other.train_sequences.values[:, 0].tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv must not be empty, but is"),
        ("t,x\n", "x.csv must not be empty, but has no rows of data"),
        (
            table([0, 1, 2], [7, 7, 7]),
            "Each feature must vary in the training part, but column 'x' is always 7 there. Leave it out of `columns`",
        ),
        (
            table([0, 1, 2], [7, 8, 9], [None, "NaN", ""]),
            "Each column of each file must have an observed value, but column 'y' of x.csv has none",
        ),
        (
            table([0, 2, 1], [1, 2, 3]),
            "Times must increase, but row 3 of x.csv is earlier than the row before it: 1. Sort the rows",
        ),
        (
            table([0, 1, 1], [1, 2, 3]),
            "Times must increase, but row 3 of x.csv has the same time as the row before it: 1",
        ),
        (
            table(["2015-03-04", "2015-03-05", "noon"], [1, 2, 3]),
            "Times must be dates .* column 't' in row 3 of x.csv has 'noon' instead. Set `time_column`",
        ),
        (table(["04/03/2015", "05/03/2015"], [1, 2]), "column 't' in row 1 of x.csv has '04/03/2015' instead"),
        (table([0, "inf"], [1, 2]), "column 't' in row 2 of x.csv has 'inf' instead"),
        (table([0, None, 2], [1, 2, 3]), "Each row must have a time, but column 't' in row 2 of x.csv is empty"),
        (
            table([0, 1, 2], [1, "two", 3]),
            "Values must be numbers, but column 'x' in row 2 of x.csv has 'two' instead. Set `columns`",
        ),
        (table([0, 1, 2], [1, "inf", 3]), "Values must be finite, but column 'x' in row 2 of x.csv has inf instead"),
        (
            "t\n1\n2\n",
            "There must be a column of values besides the times, but x.csv has only t. Set `delimiter` or `skip_rows`",
        ),
        ("t,x\n1,2\n3\n", "x.csv must be a table in CSV or Parquet, but cannot be read as one"),
        (table([0], [1]), "`step` must be given if files have only one row, as x.csv has"),
    ],
)
def test_wrong_files(text, message):
    with pytest.raises(ValueError, match=message):
        ready(write("x.csv", text)).train_dataloader()


def test_a_column_must_vary_in_training_not_later():
    write("x.csv", table(list(range(10)), [5] * 8 + [1, 2]))
    with pytest.raises(ValueError, match="'x' is always 5 there"):
        ready("x.csv", standardize=False, val_fraction=0.0, test_fraction=0.2).train_dataloader()


@pytest.mark.parametrize("standardize", [False, True])
def test_columns_are_matched_by_name(standardize):
    write("x.csv", table([0, 1, 2], [1, 3, 2], [10, 30, 50]))
    write("y.csv", table([10, 11], [70, 70], [4, 5], names="t,y,x"))
    options = {"val_fraction": 0.0, "test_fraction": 0.0, "standardize": standardize}
    assert train(["x.csv", "y.csv"]) == [[[1, 10], [3, 30], [2, 50]], [[4, 70], [5, 70]]]
    trained, new = ready("x.csv", **options), ready("y.csv", **options)
    new.load_state_dict(trained.state_dict())  # where y is constant
    expected = torch.tensor([[4.0, 70], [5, 70]], dtype=torch.float64)
    torch.testing.assert_close(
        new.train_sequences.values, (expected - trained.mean) / trained.std if standardize else expected
    )
    with pytest.raises(ValueError, match=r"trained on, x, y, but have x, z. Choose them with `columns`"):
        ready(write("z.csv", table([0, 1, 2], [1, 3, 2], [10, 30, 50], names="t,x,z")), **options).load_state_dict(
            trained.state_dict()
        )


def test_a_file_without_an_observation_is_refused():
    write("x.csv", table([0, 1, 2], [1, 3, 2]))
    write("y.csv", table([0, 1, 2], [None, "NaN", ""]))
    with pytest.raises(ValueError, match=r"column 'x' of y.csv has none"):
        AccelerometerDataModule(["x.csv", "y.csv"]).setup()


def test_two_columns_of_one_name():
    write("x.csv", table([0, 1, 2], [1, 3, 2], [10, 30, 50], names="t,x,x"))
    with pytest.raises(ValueError, match=r"Columns must have different names, but x.csv has 2 columns 'x'"):
        AccelerometerDataModule("x.csv").setup()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"step": 0}, "`step` must be positive, but is 0 instead"),
        ({"max_gap": -1.0}, "`max_gap` must be positive, but is -1.0 instead"),
        ({"sequence_length": 0}, "`sequence_length` must be positive, but is 0 instead"),
        ({"num_steps": 0}, "`num_steps` must be positive, but is 0 instead"),
        ({"days": 0}, "`days` must be positive, but is 0 instead"),
        ({"skip_rows": -1}, "`skip_rows` must not be negative, but is -1 instead"),
        ({"step": 5}, "`step` must be 60 or omitted without `path`, because minutes are drawn, but is 5"),
        (
            {"path": "x.csv", "columns": ["z"]},
            "`columns` must be in the file, but x.csv has no column 'z'. It has t, x, y",
        ),
        ({"path": "x.csv", "time_column": "z"}, "`time_column` must be in the file, but x.csv has no column 'z'"),
        ({"path": "x.csv", "columns": ["t", "x"]}, "`columns` must not contain `time_column`, but 't' is in both"),
        (
            {"path": "x.csv", "time_format": "%H:%M"},
            "Times must be dates such as %H:%M, but column 't' in row 1 of x.csv has '0' instead",
        ),
        (
            {"path": "day.csv", "time_format": "%d/%m/%Y"},
            "column 't' in row 2 of day.csv has '31/02/2015' instead \\(day is out of range for month\\)",
        ),
        (
            {"path": "day.csv", "time_format": "%d/%m/%Y %Z"},
            "`time_format` must not contain %Z, because names of time zones are ambiguous, but is '%d/%m/%Y %Z'",
        ),
        ({"path": "day.csv", "time_format": "%d/%m/%K"}, "'K' is a bad directive"),
        ({"path": "twice.csv"}, "Columns must have different names, but twice.csv has 2 columns 'x'"),
        (
            {"path": ["x.csv", "y.csv"]},
            "All files must have the same columns, but y.csv has x and x.csv has x, y. Choose them with `columns`",
        ),
    ],
)
def test_wrong_words(words, message):
    write("x.csv", table(SECONDS, X, Y))
    write("y.csv", table(SECONDS, X))
    write("day.csv", table(["28/02/2015", "31/02/2015"], [1, 2]))
    write("twice.csv", table(SECONDS, X, Y, names="t,x,x"))
    with pytest.raises(ValueError, match=message):
        AccelerometerDataModule(**words).setup()


def test_drawn_days_have_a_rhythm_and_true_states():
    data = ready(days=30, standardize=False, val_fraction=0.0, test_fraction=0.0)
    assert ([column.name for column in data.columns], data.step, data.state_names) == (
        ["wrist", "hip"],
        60.0,
        ACTIVITIES,
    )
    states, values = data.true_states("train").values.reshape(30, 24, 60), data.train_sequences.values
    asleep = (states == 0).double().mean(dim=(0, 2))
    assert bool((asleep[2:5] > 0.8).all())
    assert bool((asleep[10:20] < 0.1).all())
    shares = torch.bincount(states.flatten()) / states.numel()
    assert 0.25 < shares[0] < 0.45
    assert 0.005 < shares[3] < 0.08
    assert bool((states[:, :, 1:] == states[:, :, :-1]).double().mean() > 0.9)  # people go on with what they do
    missing = values.isnan().any(dim=1).reshape(30, -1).sum(dim=1)
    assert bool(((missing >= 20) & (missing <= 40)).all())
    means = [values[(states.flatten() == state) & ~values[:, 0].isnan()].mean(dim=0) for state in range(4)]
    assert all(bool((low < high).all()) for low, high in itertools.pairwise(means))
    again, other = ready(days=30, seed=0), ready(days=30, seed=1)
    assert torch.equal(again.train_sequences.values.isnan(), ready(days=30).train_sequences.values.isnan())
    assert not torch.equal(again.true_states("train").values, other.true_states("train").values)


def test_states_go_with_their_steps():
    whole = ready(days=2, standardize=False, val_fraction=0.0, test_fraction=0.0)
    data = ready(days=2, standardize=False, val_fraction=0.25, test_fraction=0.25, sequence_length=100)
    for attribute in ("true_states", "_part"):
        parts = torch.cat([getattr(data, attribute)(part).values for part in ("train", "val", "test")])
        assert torch.equal(parts.nan_to_num(-9), getattr(whole, attribute)("train").values.nan_to_num(-9))
    for part in ("train", "val", "test"):
        assert torch.equal(data.true_states(part).offsets, data._part(part).offsets)
    assert data.val_sequences.lengths.tolist() == [100] * 7 + [20]
