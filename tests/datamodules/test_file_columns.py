"""Files with labels, inputs, times, actions and categories."""

from __future__ import annotations

import datetime
import math

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from lightning.pytorch import Trainer

from datamodules import FileDataModule, TextDataModule
from lightning_hmm import HMM, Column, Gaussian
from lightning_hmm.training import quiet_lightning
from tests.datamodules.test_files import TABLES, folder, ready, write, write_table  # noqa: F401

pytestmark = pytest.mark.usefixtures("folder")

NAMES = ("labels", "inputs", "times", "actions")

# The rows of sequences a and b alternate: everything must be sorted with the values.
ROWS = {
    "id": ["b", "a", "b", "a", "b"],
    "y": [10, 20, 11, 21, 12],
    "state": ["wet", "dry", None, "wet", "dry"],
    "u": [0.5, 1.5, 2.5, 3.5, 4.5],
    "v": [1, 2, 3, 4, 5],
    "t": [0, 5, 1, 6, 1],
    "do": ["stay", "go", "go", "go", "stay"],
}
OPTIONS = {
    "sequence_column": "id",
    "columns": ["y"],
    "label_column": "state",
    "input_columns": ["v", "u"],
    "time_column": "t",
    "action_column": "do",
    "num_symbols": 30,
}


def found(data: FileDataModule) -> dict[str, list | None]:
    columns = {name: getattr(data.train_sequences, name) for name in NAMES}
    return {name: None if column is None else column.tolist() for name, column in columns.items()}


class TestSteps:
    @pytest.mark.parametrize("name", TABLES)
    def test_every_format(self, name):
        write_table(name, ROWS)
        data = ready(name, **OPTIONS)
        assert data.train_sequences.tolist() == [[10, 11, 12], [20, 21]]
        assert found(data) == {
            "labels": [1, -1, 0, 0, 1],
            "inputs": [[1.0, 0.5], [3.0, 2.5], [5.0, 4.5], [2.0, 1.5], [4.0, 3.5]],
            "times": [0.0, 1.0, 1.0, 5.0, 6.0],
            "actions": [1, 0, 1, 0, 0],
        }
        assert (data.label_names, data.input_names, data.action_names, data.num_actions) == (
            ["dry", "wet"],
            ["v", "u"],
            ["go", "stay"],
            2,
        )
        assert data.columns == [Column("y", "categorical", 30)]

    def test_the_cache_has_them(self):
        write_table("x.csv", ROWS)
        first, again = (ready("x.csv", **OPTIONS) for _ in range(2))
        assert found(first) == found(again)
        assert found(ready("x.csv", **{**OPTIONS, "label_column": None})) == {**found(first), "labels": None}

    def test_without_options_there_are_none(self):
        write_table("x.csv", ROWS)
        data = ready("x.csv", sequence_column="id", columns=["y"])
        assert found(data) == dict.fromkeys(NAMES)
        assert (data.label_names, data.input_names, data.action_names, data.num_actions) == (None, None, None, None)

    def test_other_columns_are_values(self):
        write_table("x.csv", ROWS)
        data = ready("x.csv", sequence_column="id", label_column="state", action_column="do", time_column="t")
        assert [column.name for column in data.columns] == ["y", "u", "v"]

    def test_whole_numbers_are_their_own_numbers(self):
        write("x.csv", "y,l,a\n0,4,2\n1,,0\n2,-1,2\n")
        data = ready("x.csv", columns=["y"], label_column="l", action_column="a")
        assert found(data) == {"labels": [4, -1, -1], "inputs": None, "times": None, "actions": [2, 0, 2]}
        assert (data.label_names, data.action_names, data.num_actions) == (None, None, 3)

    def test_a_missing_token_is_an_unknown_label(self):
        write("x.csv", "y,l\n0,a\n1,?\n2,b\n")
        assert found(ready("x.csv", columns=["y"], label_column="l", missing_token="?"))["labels"] == [0, -1, 1]

    def test_parts_have_their_own(self):
        write("x.csv", "".join(f"{line}\n" for line in ["id,y,l,t", *(f"{n},{n},{n},{n}" for n in range(10))]))
        data = FileDataModule(
            "x.csv",
            sequence_column="id",
            columns=["y"],
            label_column="l",
            time_column="t",
            val_fraction=0.3,
            test_fraction=0.2,
        )
        data.setup()
        for part in (data.train_sequences, data.val_sequences, data.test_sequences):
            assert len(part)
            assert part.values.tolist() == part.labels.tolist() == part.times.tolist()
        assert (
            sorted(n for batch in data.train_dataloader() for n in batch.labels.tolist())
            == data.train_sequences.labels.tolist()
        )

    def test_names_of_all_files_have_one_number(self):
        write("a.csv", "y,l,a\n0,b,x\n1,c,y\n")
        write("b.csv", "y,l,a\n0,a,y\n1,c,x\n")
        data = ready("a.csv", val_path="b.csv", label_column="l", action_column="a")
        assert (data.label_names, data.train_sequences.labels.tolist(), data.val_sequences.labels.tolist()) == (
            ["a", "b", "c"],
            [1, 2],
            [0, 2],
        )
        assert (data.train_sequences.actions.tolist(), data.val_sequences.actions.tolist()) == ([0, 1], [1, 0])

    @pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
    def test_lists(self, name):
        lists = {
            "y": [[0, 1], [], [2]],
            "l": [["a", None], [], ["b"]],
            "u": [[0.5, 1.5], [], [2.5]],
            "t": [[1.0, 2.0], [], [0.0]],
            "a": [[1, 0], [], [1]],
        }
        write_table(name, lists)
        data = ready(name, columns=["y"], label_column="l", input_columns=["u"], time_column="t", action_column="a")
        assert data.train_sequences.tolist() == [[0, 1], [], [2]]
        assert found(data) == {
            "labels": [0, -1, 1],
            "inputs": [[0.5], [1.5], [2.5]],
            "times": [1.0, 2.0, 0.0],
            "actions": [1, 0, 1],
        }

    def test_standardized_values_keep_them(self):
        write("x.csv", "y,u,l\n1.5,10,a\n2.5,20,b\n")
        data = ready("x.csv", columns=["y"], input_columns=["u"], label_column="l", standardize=True)
        assert data.train_sequences.values.flatten().tolist() == [-1.0, 1.0]
        assert found(data) == {"labels": [0, 1], "inputs": [[10.0], [20.0]], "times": None, "actions": None}

    def test_names_of_symbols_in_another_order_keep_them(self):
        write("x.csv", "y,l\na,p\nb,q\n")
        data = ready("x.csv", columns=["y"], vocabulary=["b", "a"], label_column="l")
        assert (data.train_sequences.tolist(), found(data)["labels"]) == ([[1, 0]], [0, 1])


class TestTimes:
    def test_dates_are_seconds(self):
        write("x.csv", "y,t\n0,1970-01-01 00:00:10\n1,1970-01-02 00:00:00.5\n")
        assert found(ready("x.csv", columns=["y"], time_column="t"))["times"] == [10.0, 86400.5]
        pa.parquet.write_table(
            pa.table({"y": [0, 1], "t": pa.array([datetime.datetime(1970, 1, 1), datetime.datetime(1970, 1, 2)])}),
            "x.parquet",
        )
        assert found(ready("x.parquet", columns=["y"], time_column="t"))["times"] == [0.0, 86400.0]

    def test_format_of_dates(self):
        write("x.csv", "y,t\n0,02/01/1970\n1,03/01/1970\n")
        assert found(ready("x.csv", columns=["y"], time_column="t", time_format="%d/%m/%Y"))["times"] == [
            86400.0,
            2 * 86400.0,
        ]
        with pytest.raises(ValueError, match="`time_format` requires `time_column`, which is not given"):
            FileDataModule("x.csv", columns=["y"], time_format="%d/%m/%Y").setup()

    def test_numbers_are_not_rounded(self):
        write("x.csv", f"y,t\n0,{math.pi}\n1,{1e9 + math.pi}\n")
        assert found(ready("x.csv", columns=["y"], time_column="t"))["times"] == [math.pi, 1e9 + math.pi]

    def test_sequences_have_their_own_order(self):
        write("x.csv", "id,y,t\na,0,5\nb,1,0\na,2,6\nb,3,1\n")
        assert found(ready("x.csv", sequence_column="id", columns=["y"], time_column="t"))["times"] == [
            5.0,
            6.0,
            0.0,
            1.0,
        ]
        message = (
            "Times must not decrease within a sequence, but column 't' in row 2 of x.csv is 5 s before row 1 of x.csv. "
            "Sort the rows"
        )
        with pytest.raises(ValueError, match=message):
            FileDataModule("x.csv", columns=["y"], time_column="t").setup()
        write("x.csv", "id,y,t\na,0,5\nb,1,0\nb,2,1\na,3,4\n")
        with pytest.raises(ValueError, match=r"column 't' in row 4 of x.csv is 1 s before row 1 of x.csv"):
            FileDataModule("x.csv", sequence_column="id", columns=["y"], time_column="t").setup()

    @pytest.mark.parametrize(
        ("cell", "message"),
        [("", "Each row must have a time, but column 't' in row 2 of x.csv is empty"), ("soon", "has 'soon' instead")],
    )
    def test_errors(self, cell, message):
        write("x.csv", f"y,t\n0,1\n1,{cell}\n")
        with pytest.raises(ValueError, match=message):
            FileDataModule("x.csv", columns=["y"], time_column="t").setup()


class TestCategories:
    TEXT = "x,w,n\n0.5,b,2\n1.5,a,0\n,,\n2.5,b,1\n"

    def test_names_and_numbers(self):
        data = ready(write("x.csv", self.TEXT), categorical_columns=["w", "n"])
        assert data.columns == [Column("x"), Column("w", "categorical", ("a", "b")), Column("n", "categorical", 3)]
        assert (data.num_symbols, data.num_features, data.symbol_names, data.vocabulary) == (None, None, None, None)
        expected = torch.tensor([[0.5, 1, 2], [1.5, 0, 0], [math.nan] * 3, [2.5, 1, 1]], dtype=torch.float64)
        torch.testing.assert_close(data.train_sequences.values, expected, rtol=0, atol=0, equal_nan=True)

    def test_given_names(self):
        data = ready(write("x.csv", self.TEXT), categorical_columns={"w": ["c", "b", "a"], "n": ["2", "1", "0"]})
        assert data.columns[1:] == [
            Column("w", "categorical", ("c", "b", "a")),
            Column("n", "categorical", ("2", "1", "0")),
        ]
        assert data.train_sequences.values[:, 1:].nan_to_num(nan=-1).tolist() == [[1, 0], [2, 2], [-1, -1], [1, 1]]

    def test_one_column_is_symbols(self):
        data = ready(write("x.csv", self.TEXT), columns=["w"], categorical_columns=["w"])
        assert (data.columns, data.num_symbols, data.symbol_names) == (
            [Column("w", "categorical", ("a", "b"))],
            2,
            ["a", "b"],
        )
        assert data.train_sequences.tolist() == [[1, 0, -1, 1]]
        given = ready("x.csv", columns=["w"], categorical_columns={"w": ["b", "a"]})
        assert (given.symbol_names, given.train_sequences.tolist()) == (["b", "a"], [[0, 1, -1, 0]])

    def test_they_are_not_standardized(self):
        data = ready(write("x.csv", self.TEXT), categorical_columns=["w", "n"], standardize=True)
        assert data.train_sequences.values[:, 1:].nan_to_num(nan=-1).tolist() == [[1, 2], [0, 0], [-1, -1], [1, 1]]
        assert data.train_sequences.values[:, 0].nansum().item() == pytest.approx(0)
        assert (data.mean.tolist(), data.std[1:].tolist()) == ([1.5, 0.0, 0.0], [1.0, 1.0])

    def test_one_that_is_always_the_same_is_not_refused(self):
        assert ready(
            write("x.csv", "x,w\n1.5,a\n2.5,a\n"), categorical_columns=["w"], standardize=True
        ).train_sequences.values[:, 1].tolist() == [0.0, 0.0]

    def test_names_that_only_validation_has(self):
        write("x.csv", self.TEXT)
        write("y.csv", "x,w,n\n1,c,0\n2,a,1\n")
        message = (
            "Categories of column 'w' must be in the training part, but 'c' in row 1 of y.csv is not. "
            "List the categories in `categorical_columns`"
        )
        with pytest.raises(ValueError, match=message):
            FileDataModule("x.csv", val_path="y.csv", categorical_columns=["w", "n"]).setup()
        data = ready("x.csv", val_path="y.csv", categorical_columns={"w": ["a", "b", "c"], "n": ["0", "1", "2"]})
        assert data.val_sequences.tolist() == [[[1.0, 2.0, 0.0], [2.0, 0.0, 1.0]]]
        with pytest.raises(
            ValueError,
            match=r"Categories of column 'w' must be in `categorical_columns`, but 'b' in row 1 of x.csv is not",
        ):
            FileDataModule("x.csv", categorical_columns={"w": ["a"], "n": ["0", "1", "2"]}).setup()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {},
                "Vectors must be numbers, but row 1 of x.csv has 'b' instead. .*`categorical_columns` to columns of",
            ),
            (
                {"categorical_columns": ["x", "w"]},
                "Categories must be names or integers from 0, .* row 1 of x.csv has 0.5 instead. Remove the column",
            ),
            (
                {"categorical_columns": ["z"]},
                "`categorical_columns` must be columns of values, but 'z' is not. .* in x.csv are x, w, n",
            ),
            (
                {"categorical_columns": ["n"], "columns": ["x", "w"]},
                "`categorical_columns` must be columns of values, but 'n' is not",
            ),
            (
                {"categorical_columns": ["n"], "columns": ["n"], "kind": "vectors"},
                "must be read as symbols, but `kind` is 'vectors'",
            ),
            (
                {"categorical_columns": {"w": ["a", "b", "a"]}, "columns": ["x", "w"]},
                "of column 'w' must all be different, but 'a' occurs more than once",
            ),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            FileDataModule(write("x.csv", self.TEXT), **options).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_column": "z"},
         "`label_column` must be in the file, but x.csv has no column 'z'. It has id, y, state, u, v, t, do"),
        ({"input_columns": ["u", "z"]}, "`input_columns` must be in the file, but x.csv has no column 'z'"),
        ({"time_column": "z"}, "`time_column` must be in the file, but x.csv has no column 'z'"),
        ({"action_column": "z"}, "`action_column` must be in the file, but x.csv has no column 'z'"),
        ({"label_column": "y"},
         "Each column must be used once, but 'y' is in `columns` and in `label_column`. Remove one of them"),
        ({"columns": ["y", "y"]}, "Each column must be used once, but 'y' is twice in `columns`"),
        ({"input_columns": ["u", "u"]}, "Each column must be used once, but 'u' is twice in `input_columns`"),
        ({"input_columns": ["u", "t"], "time_column": "t"}, "'t' is in `.*_columns?` and in `.*_columns?`"),
        ({"sequence_column": "id", "label_column": "id"}, "'id' is in `sequence_column` and in `label_column`"),
        ({"input_columns": ["v", "do"]},
         "Inputs must be numbers, but column 'do' in row 1 of x.csv has 'stay' instead. Set `input_columns`"),
        ({"action_column": "state"}, "Each row must have an action, but column 'state' in row 3 of x.csv is empty"),
        ({"action_column": "u"},
         "Actions must be names or integers from 0, .* column 'u' in row 1 of x.csv has 0.5 instead"),
        ({"label_column": "u"},
         "Labels must be names or integers from 0, or -1 .* column 'u' in row 1 of x.csv has 0.5 instead"),
        ({"columns": None, "sequence_column": "id", "input_columns": ["y", "u", "v"], "label_column": "state",
          "time_column": "t", "action_column": "do"},
         "There must be a column of values apart from `sequence_column`, .*`input_columns`, but x.csv has only"),
    ],
)  # fmt: skip
def test_wrong_options(options, message):
    write_table("x.csv", ROWS)
    with pytest.raises(ValueError, match=message):
        FileDataModule("x.csv", **{"columns": ["y"], **options}).setup()


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ("a\n-1", {"action_column": "z"}, None),
        (
            "0\n-1",
            {"action_column": "z"},
            "Actions must be names or integers from 0, but column 'z' in row 2 of x.csv has -1 instead",
        ),
        ("0\n-2", {"label_column": "z"}, "Labels must be .* column 'z' in row 2 of x.csv has -2 instead"),
        ("0\n", {"input_columns": ["z"]}, "Each row must have all inputs, but column 'z' in row 2 of x.csv is empty"),
        ("0\ninf", {"input_columns": ["z"]}, "Inputs must be finite, but column 'z' in row 2 of x.csv has inf instead"),
    ],
)
def test_wrong_cells(column, options, message):
    first, second = column.split("\n")
    write("x.csv", f"y,z\n0,{first}\n1,{second}\n")
    if message is None:
        assert ready("x.csv", columns=["y"], **options).action_names == ["-1", "a"]
    else:
        with pytest.raises(ValueError, match=message):
            FileDataModule("x.csv", columns=["y"], **options).setup()


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            {"l": [[0, 1, 2], [0]]},
            "Column 'l' must have one entry per step, but row 1 of x.jsonl has 2 steps and has 3",
        ),
        (
            {"l": [[0, 1], None]},
            "Column 'l' must have one entry per step, but row 2 of x.jsonl has 1 steps and is null",
        ),
        ({"l": [0, 1]}, "Column 'l' must contain lists like the values, but contains int64 in x.jsonl"),
        (
            {"y": [0, 1], "l": [[0], [1]]},
            "Column 'l' must contain one value per row like the values, but contains lists in x.jsonl",
        ),
    ],
)
def test_wrong_lists(lists, message):
    write_table("x.jsonl", {"y": [[0, 1], [2]], **lists})
    with pytest.raises(ValueError, match=message):
        FileDataModule("x.jsonl", columns=["y"], label_column="l").setup()


WORDS = {"columns": ["x", "w"], "categorical_columns": ["w"], "label_column": "l", "action_column": "a"}


class TestNewDataForATrainedModel:
    """Names have the numbers that they had in training."""

    def trained(self) -> dict:
        write("old.csv", "x,w,l,a\n1,p,up,go\n2,q,down,stay\n3,r,up,go\n")
        return ready("old.csv", **WORDS).state_dict()

    def test_numbers(self):
        state = self.trained()
        write("new.csv", "x,w,l,a\n5,r,up,stay\n6,p,,stay\n")
        data = FileDataModule("new.csv", **WORDS)
        data.setup()
        assert (data.label_names, data.action_names, data.num_actions) == (["up"], ["stay"], 1)
        data.load_state_dict(state)
        assert data.columns == [Column("x"), Column("w", "categorical", ("p", "q", "r"))]
        assert (data.label_names, data.action_names, data.num_actions) == (["down", "up"], ["go", "stay"], 2)
        assert data.val_sequences.tolist() == [[[5.0, 2.0], [6.0, 0.0]]]
        assert (data.val_sequences.labels.tolist(), data.val_sequences.actions.tolist()) == ([1, -1], [1, 1])

    def test_numbers_of_labels_alone(self):
        write("old.csv", "x,l\n1.5,a\n2,b\n")
        write("new.csv", "x,l\n1.5,b\n2,b\n")
        data = ready("new.csv", columns=["x"], label_column="l")
        data.load_state_dict(ready("old.csv", columns=["x"], label_column="l").state_dict())
        assert found(data)["labels"] == [1, 1]

    def test_labels_that_training_did_not_have(self):
        write("old.csv", "x,l\n1.5,a\n2,b\n")
        state = ready("old.csv", columns=["x"]).state_dict()
        data = ready("old.csv", columns=["x"], label_column="l")
        data.load_state_dict(state)
        assert found(data)["labels"] == [0, 1]

    def test_the_state_is_plain(self, tmp_path):
        state = self.trained()
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "x,w,l,a\n5,s,up,go\n",
                "Categories of column 'w' must be in the training part, but 's' in row 1 of new.csv is not",
            ),
            (
                "x,w,l,a\n5,p,left,go\n",
                "Labels must be those of training, down, up, but column 'l' in row 1 of new.csv has 'left' instead",
            ),
            (
                "x,w,l,a\n5,p,up,run\n",
                "Actions must be those of training, go, stay, but column 'a' in row 1 of new.csv has 'run' instead",
            ),
            ("x,w,l,a\n5,p,1,go\n", "Labels must be names as in training, but column 'l' contains integers"),
            (
                "x,w,l,a\n5,1,up,go\n",
                "Column 'w' must contain category names as in training, but contains category numbers",
            ),
        ],
    )
    def test_errors(self, text, message):
        state = self.trained()
        data = ready(write("new.csv", text), **WORDS)
        with pytest.raises(ValueError, match=message):
            data.load_state_dict(state)

    def test_labels_do_not_make_other_data(self):
        """Whether validation uses all sequences depends only on the observations, not on the other columns."""
        write("x.csv", "x,l\n1.5,a\n2,b\n")
        assert ready("x.csv", columns=["x"]).fingerprint == ready("x.csv", columns=["x"], label_column="l").fingerprint

    def test_names_of_another_part_do_not_make_other_data(self):
        write("x.csv", "x,w\n1.5,b\n2,c\n")
        write("y.csv", "x,w\n1.5,a\n")
        names = {"w": ["a", "b", "c"]}
        alone, both = (
            ready("x.csv", categorical_columns=names),
            ready("x.csv", val_path="y.csv", categorical_columns=names),
        )
        other = ready(write("z.csv", "x,w\n1.5,c\n2,b\n"), categorical_columns=names)
        assert alone.fingerprint == both.fingerprint != other.fingerprint


class TestNarrowSymbols:
    @pytest.mark.parametrize(("largest", "kind"), [(127, "int8"), (128, "int16"), (2**15, "int32")])
    def test_files(self, largest, kind):
        write("x.csv", f"y\n0\n{largest}\n")
        data = ready("x.csv")
        assert str(data.train_sequences.values.dtype) == f"torch.{kind}"
        assert str(data._dataset.features["values"].feature.dtype) == kind
        assert data.train_sequences.tolist() == [[0, largest]]
        (batch,) = data.train_dataloader()
        assert str(batch.values.dtype) == f"torch.{kind}"

    def test_the_fingerprint_does_not_depend_on_the_type(self):
        write("x.csv", "y\n0\n1\n")
        write("y.csv", "y\n300\n")
        both = ready("x.csv", val_path="y.csv")
        assert str(both.train_sequences.values.dtype) == "torch.int16"
        assert both.fingerprint == ready("x.csv").fingerprint

    def test_texts(self):
        data = TextDataModule(path=write("x.txt", "the cat sat on the mat " * 50))
        data.setup()
        assert data.train_sequences.values.dtype == torch.int8
        assert str(data._dataset.features["values"].feature.dtype) == "int8"


class TestKnownStates:
    """Labels are used in training and as the truth; without `train_on_labels` they are only the truth."""

    def test_labels_are_the_truth_of_every_part(self):
        write_table("x.csv", ROWS)
        data = ready("x.csv", **OPTIONS)
        assert data.knows_states
        assert data.true_states("train").tolist() == [[1, -1, 0], [0, 1]]
        assert data.true_states("train").values.tolist() == data.train_sequences.labels.tolist()

    def test_labels_for_evaluation_only(self):
        write_table("x.csv", ROWS)
        data, other = ready("x.csv", **OPTIONS), ready("x.csv", train_on_labels=False, **OPTIONS)
        assert not other.knows_states
        assert found(other) == {**found(data), "labels": None}
        for part in ("train", "val", "test"):
            assert other.true_states(part).tolist() == data.true_states(part).tolist()
        assert other.label_names == ["dry", "wet"]
        with pytest.raises(ValueError, match="`train_on_labels` requires `label_column`, which is not given"):
            FileDataModule("x.csv", train_on_labels=False)

    def test_state_weights(self):
        write_table("x.csv", ROWS)
        options = {"sequence_column": "id", "columns": ["y"], "state_weight_columns": ["u", "v"]}
        data = ready("x.csv", **options)
        assert data.knows_states
        assert data.train_sequences.state_weights.tolist() == [
            [0.5, 1.0],
            [2.5, 3.0],
            [4.5, 5.0],
            [1.5, 2.0],
            [3.5, 4.0],
        ]
        assert data.true_states("train") is None
        write_table("x.csv", {**ROWS, "u": [0.5, -1.5, 2.5, 3.5, 4.5]})
        with pytest.raises(ValueError, match=r"not negative, but that of state 0 at position 0 of sequence 1 is -1\.5"):
            ready("x.csv", **options)
        write_table("x.csv", {**ROWS, "u": [0.5, None, 2.5, 3.5, 4.5]})
        with pytest.raises(ValueError, match="Each row must have all state weights, but column 'u' in row 2 of"):
            ready("x.csv", **options)
        write_table("x.csv", {**ROWS, "u": list("abcde")})
        with pytest.raises(ValueError, match=r"State weights .* Set `state_weight_columns` to numeric columns"):
            ready("x.csv", **options)

    def test_training_and_testing(self):
        states = [0, 0, 0, 1, 1, 1] * 10
        rows = {
            "id": [n // 12 for n in range(60)],
            "y": [10.0 * state + n % 3 for n, state in enumerate(states)],
            "state": ["ab"[1 - state] if n % 3 == 0 else None for n, state in enumerate(states)],
        }
        write_table("x.csv", rows)
        options = {"sequence_column": "id", "columns": ["y"], "label_column": "state", "test_fraction": 0.2}
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        for train_on_labels in (True, False):
            data = ready("x.csv", **options, train_on_labels=train_on_labels)
            trainer, model = Trainer(max_epochs=5, enable_model_summary=False, **quiet), HMM(2, Gaussian())
            with quiet_lightning(announcements=False):
                trainer.fit(model, datamodule=data)
                (metrics,) = trainer.test(model, datamodule=data, verbose=False)
            assert metrics["test/state_accuracy"] == 1
            assert metrics.get("test/label_accuracy") == (1 if train_on_labels else None)
            if train_on_labels:
                assert model.emission.mean.flatten().tolist() == pytest.approx([11.0, 1.0], abs=0.1)
