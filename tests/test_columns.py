"""The description of columns, and the columns that come with each step: labels, inputs, times and actions."""

from __future__ import annotations

import pickle
from dataclasses import asdict

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from datamodules.base import as_table, from_table
from datamodules.languages import in_pieces
from lightning_hmm import Column, Sequences
from lightning_hmm.columns import STEP_COLUMNS, as_columns, feature_columns, symbol_column, symbol_dtype

NAN, INF = float("nan"), float("inf")

# Three sequences of 2, 0 and 3 steps. Every entry is different, so that no mix-up goes unnoticed.
VALUES = [[0, 1], [], [2, 3, 4]]
LABELS = [[5, -1], [], [7, 8, 9]]
INPUTS = [[[0.5, 1.5], [2.5, 3.5]], [], [[4.5, 5.5], [6.5, 7.5], [8.5, 9.5]]]
TIMES = [[10.0, 10.0], [], [-3.0, 0.0, 1e9]]
ACTIONS = [[0, 1], [], [2, 3, 4]]
WEIGHTS = [[[0.5, 0.0], [1.0, 2.0]], [], [[0.25, 3.0], [0.75, 1024.0], [0.0, 7.0]]]
GIVEN = {"labels": LABELS, "inputs": INPUTS, "times": TIMES, "actions": ACTIONS, "state_weights": WEIGHTS}


def batch(**changes) -> Sequences:
    return Sequences.from_list(VALUES, [1.0, 2.0, 3.0], **{**GIVEN, **changes})


def flat(lists: list) -> list:
    return [entry for part in lists for entry in part]


def columns(sequences: Sequences) -> dict[str, list | None]:
    found = {name: getattr(sequences, name) for name in STEP_COLUMNS}
    return {name: None if column is None else column.tolist() for name, column in found.items()}


def chosen(*numbers: int) -> dict[str, list]:
    """The columns of some of the sequences."""
    return {name: flat([given[n] for n in numbers]) for name, given in GIVEN.items()}


class TestDescription:
    def test_kinds(self):
        real, counted, named = Column("x"), Column("n", "categorical", 3), Column("w", "categorical", ["a", "b"])
        assert (real.kind, real.is_categorical, real.num_categories, real.category_names) == ("real", False, None, None)
        assert (counted.is_categorical, counted.num_categories, counted.category_names) == (True, 3, None)
        assert (named.categories, named.num_categories, named.category_names) == (("a", "b"), 2, ["a", "b"])
        assert hash(named) == hash(Column("w", "categorical", ("a", "b")))

    def test_shorthands(self):
        assert symbol_column(3) == [Column("symbol", "categorical", 3)]
        assert symbol_column(2, ["a", "b"]) == [Column("symbol", "categorical", ("a", "b"))]
        assert feature_columns(2) == [Column("feature_0"), Column("feature_1")]
        assert feature_columns(2, ["x", "y"]) == [Column("x"), Column("y")]

    def test_from_dictionaries(self):
        given = [Column("x"), Column("w", "categorical", ("a", "b"))]
        assert as_columns(given) == given
        assert as_columns(map(asdict, given)) == given
        assert as_columns([{"name": "w", "kind": "categorical", "categories": ["a", "b"]}]) == given[1:]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Column("x", "text"), "`kind` of column 'x' must be categorical or real, but is 'text' instead"),
            (lambda: Column("x", "real", 3), "`categories` are for categorical columns, but column 'x' is real"),
            (
                lambda: Column("x", "categorical"),
                "`categories` of column 'x' must be names or a positive number, but is None instead",
            ),
            (lambda: Column("x", "categorical", 0), "must be names or a positive number, but is 0 instead"),
            (lambda: Column("x", "categorical", []), r"must be names or a positive number, but is \(\) instead"),
            (lambda: Column("x", "categorical", "abc"), "must be names or a positive number, but is 'abc' instead"),
            (lambda: Column("x", "categorical", True), "must be names or a positive number, but is True instead"),
            (
                lambda: Column("x", "categorical", ["a", "b", "a"]),
                "of column 'x' must all be different, but 'a' occurs more than once",
            ),
            (
                lambda: as_columns([Column("x"), Column("y"), Column("x")]),
                "`columns` must have different names, but 'x' occurs more than once",
            ),
            (lambda: as_columns(["x"]), "must be `Column` or dictionaries of its fields, but item 0 is 'x' instead"),
            (lambda: as_columns([{"kind": "real"}]), "`columns` must have names, but item 0 has none"),
            (
                lambda: as_columns([{"name": "x", "type": "real"}]),
                "fields name, kind and categories, but item 0 has 'type'",
            ),
            (lambda: symbol_column(3, ["a", "b"]), "`names` must hold the names of 3 symbols, but holds 2 names"),
            (lambda: feature_columns(1, ["a", "b"]), "`names` must hold the names of 1 features, but holds 2 names"),
        ],
    )
    def test_errors(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    @pytest.mark.parametrize(
        ("size", "kind"), [(1, "int8"), (128, "int8"), (129, "int16"), (2**15, "int16"), (2**15 + 1, "int32")]
    )
    def test_narrowest_type(self, size, kind):
        assert symbol_dtype(size) == np.dtype(kind)
        assert np.array([-1, size - 1]).astype(symbol_dtype(size)).tolist() == [-1, size - 1]


class TestWaysIn:
    def test_from_list(self):
        made = batch()
        assert columns(made) == chosen(0, 1, 2)
        assert [getattr(made, name).dtype for name in STEP_COLUMNS] == [
            torch.int64,
            torch.float64,
            torch.float64,
            torch.int64,
            torch.float64,
        ]
        assert columns(Sequences.from_list(VALUES)) == dict.fromkeys(STEP_COLUMNS)

    def test_from_packed_steps(self):
        packed = {name: flat(given) for name, given in GIVEN.items()}
        for convert in (np.asarray, torch.as_tensor, pd.DataFrame):
            given = {name: convert(column) for name, column in packed.items()}
            assert columns(Sequences.from_lengths(flat(VALUES), [2, 0, 3], **given)) == chosen(0, 1, 2)
        assert columns(Sequences.from_lengths(flat(VALUES), [2, 0, 3], **packed)) == chosen(0, 1, 2)

    def test_from_strings(self):
        assert columns(Sequences.from_strings(["ab", "", "cde"], "abcde", **GIVEN)) == chosen(0, 1, 2)

    def test_from_arrow(self):
        given = {name: pa.array(column) for name, column in GIVEN.items()}
        assert columns(Sequences.from_arrow(pa.array(VALUES), **given)) == chosen(0, 1, 2)

    def test_an_unknown_label_is_none(self):
        assert Sequences.from_list([[0, 1]], labels=[[None, 3]]).labels.tolist() == [-1, 3]
        assert Sequences.from_arrow(pa.array([[0, 1]]), labels=pa.array([[None, 3]])).labels.tolist() == [-1, 3]

    def test_numbers_are_inputs_of_one(self):
        assert Sequences.from_list([[0, 1]], inputs=[[1, 2]]).inputs.tolist() == [[1.0], [2.0]]

    def test_float32_inputs_stay(self):
        assert Sequences.from_list([[0]], inputs=[np.ones((1, 2), np.float32)]).inputs.dtype == torch.float32

    def test_the_array_of_the_only_sequence(self):
        made = Sequences.from_list(np.zeros((3, 2)), labels=np.arange(3), inputs=np.ones((3, 4)))
        assert (made.labels.tolist(), made.inputs.shape) == ([0, 1, 2], (3, 4))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"labels": [[0, 1], [], [2, 3]]},
                "`labels` must have one entry for each step, but sequence 2 has 3 steps and 2 entries",
            ),
            ({"labels": [[0, 1]]}, "`labels` must hold one list for each of the 3 sequences, but holds 1 instead"),
            (
                {"labels": [[0, -2], [], [0, 0, 0]]},
                "`labels` must be whole numbers from 0, or -1 .* position 1 of sequence 0 has -2 instead",
            ),
            ({"labels": [[0, 0.5], [], [0, 0, 0]]}, "`labels` must be whole numbers, but are float64 instead"),
            (
                {"labels": [["a", "b"], [], [0, 0, 0]]},
                "`labels` must hold numbers, but sequence 0 holds .* Convert names into numbers first",
            ),
            ({"labels": "abc"}, "`labels` must be a list of sequences, but is the string 'abc' instead"),
            (
                {"actions": [[0, 0], [], [0, -1, 0]]},
                "`actions` must be whole numbers from 0, but position 1 of sequence 2 has -1 instead",
            ),
            (
                {"actions": [[0, None], [], [0, 0, 0]]},
                "`actions` must be whole numbers from 0, but position 1 of sequence 0 has -1 instead",
            ),
            (
                {"times": [[0.0, 1.0], [], [5.0, 6.0, 4.0]]},
                "`times` must not decrease within a sequence, but position 2 of sequence 2 has 4.0 after 6.0",
            ),
            (
                {"times": [[0.0, NAN], [], [0, 1, 2]]},
                "`times` must be finite, but position 1 of sequence 0 has nan instead",
            ),
            (
                {"times": [[0.0], [], [0, 1, 2]]},
                "`times` must have one entry for each step, but sequence 0 has 2 steps and 1 entries",
            ),
            (
                {"inputs": [[1, 2], [], [3, NAN, 4]]},
                "`inputs` must be finite, but input 0 at position 1 of sequence 2 is nan instead",
            ),
            (
                {"inputs": [[[1, 2], [3, INF]], [], INPUTS[2]]},
                "`inputs` must be finite, but input 1 at position 1 of sequence 0 is inf instead",
            ),
            (
                {"state_weights": [[[1, 2], [3, -1]], [], WEIGHTS[2]]},
                "`state_weights` must be finite and not negative, but that of state 1 at position 1 of sequence 0 "
                "is -1",
            ),
            (
                {"state_weights": [[[1, 2], [3, NAN]], [], WEIGHTS[2]]},
                "`state_weights` must be finite and not negative, but that of state 1 at position 1 of sequence 0 "
                "is nan",
            ),
            (
                {"state_weights": [WEIGHTS[0], [], [[1, 0], [0, 0], [1, 1]]]},
                "must have a positive entry at each step, but position 1 of sequence 2 has none. Use equal weights",
            ),
            ({"inputs": [[1, "x"], [], [3, 4, 5]]}, "`inputs` must hold numbers, but sequence 0 holds"),
            (
                {"inputs": [[[1], [2]], [], INPUTS[2]]},
                "`inputs` must have the same number of entries at each step, but sequence 2 has another",
            ),
        ],
    )
    def test_errors(self, given, message):
        with pytest.raises(ValueError, match=message):
            batch(**given)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"labels": torch.zeros(4, dtype=torch.int64)},
                r"`labels` must have shape \(5,\), one entry for each step, but has shape \(4,\) instead",
            ),
            (
                {"inputs": torch.zeros(4, 2)},
                r"`inputs` must have shape \(5, M\), one entry for each step, but has shape \(4, 2\) instead",
            ),
            ({"inputs": torch.zeros(5, 2, 2)}, r"`inputs` must have shape \(5, M\)"),
            ({"state_weights": torch.ones(4, 2)}, r"`state_weights` must have shape \(5, K\), one entry for each step"),
            ({"times": torch.zeros(5, 2)}, r"`times` must have shape \(5,\)"),
            ({"actions": torch.zeros(5)}, "`actions` must be whole numbers, but are float32 instead"),
        ],
    )
    def test_errors_of_packed_columns(self, given, message):
        with pytest.raises(ValueError, match=message):
            Sequences(torch.arange(5), torch.tensor([0, 2, 2, 5]), **given)

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ([[0, 1], []], "`labels` must have 3 sequences like `column`, but has 2 instead"),
            (
                [[0], [], [1, 2, 3]],
                "`labels` must have one entry for each step, but sequence 0 has 2 steps and 1 entries",
            ),
            ([["a", "b"], [], ["c", "d", "e"]], "`labels` must hold numbers, but holds string instead"),
        ],
    )
    def test_errors_of_arrow_columns(self, labels, message):
        with pytest.raises(ValueError, match=message):
            Sequences.from_arrow(pa.array(VALUES), labels=pa.array(labels))

    def test_times_may_begin_again_with_each_sequence(self):
        made = Sequences.from_lengths([0, 1, 2], [2, 1], times=[1.0, 2.0, 0.0])
        assert made.times.tolist() == [1.0, 2.0, 0.0]
        assert Sequences.from_lengths([0, 1], [1, 0, 1, 0], times=[1.0, 0.0]).times.tolist() == [1.0, 0.0]


class TestTogether:
    """The columns follow the values."""

    @pytest.mark.parametrize(
        ("index", "numbers"),
        [
            (slice(1, 3), [1, 2]),
            (slice(0, 1), [0]),
            (slice(2, 0), []),
            (slice(None, None, -1), [2, 1, 0]),
            ([2, 0], [2, 0]),
            ([2, 2], [2, 2]),
            (torch.tensor([True, False, True]), [0, 2]),
        ],
    )
    def test_parts(self, index, numbers):
        part = batch()[index]
        assert columns(part) == chosen(*numbers)
        assert part.tolist() == [VALUES[n] for n in numbers]

    def test_a_slice_shares_memory(self):
        made = batch()
        assert made[2:].times.data_ptr() == made.times[2:].data_ptr()

    def test_split_and_cat(self):
        assert columns(Sequences.cat(list(batch().split(1)))) == chosen(0, 1, 2)

    def test_cat_without_labels_and_with(self):
        joined = Sequences.cat([Sequences.from_list([[0, 1]]), Sequences.from_list([[2]], labels=[[4]])])
        assert joined.labels.tolist() == [-1, -1, 4]
        assert Sequences.cat([Sequences.from_list([[]]), Sequences.from_list([[2]], times=[[4.0]])]).times.tolist() == [
            4.0
        ]

    def test_cat_without_state_weights_and_with(self):
        weighted = Sequences.from_list([[2]], state_weights=[[[4.0, 2.0]]])
        joined = Sequences.cat([Sequences.from_list([[0, 1]]), weighted])
        assert joined.state_weights.tolist() == [[1.0, 1.0], [1.0, 1.0], [4.0, 2.0]]
        with pytest.raises(
            ValueError, match="`batches` must have the same number of `state_weights`, but have 2 and 3"
        ):
            Sequences.cat([weighted, Sequences.from_list([[0]], state_weights=[[[1, 1, 1]]])])

    def test_without_labels(self):
        made = batch()
        made.check(5, None)
        plain = made.without_labels()
        assert columns(plain) == {**chosen(0, 1, 2), "labels": None, "state_weights": None}
        assert columns(made) == chosen(0, 1, 2)
        assert plain is made.without_labels()
        assert plain.without_labels() is plain
        assert (plain.values is made.values, plain.weights is made.weights) == (True, True)
        assert not plain.has_known_states
        assert made.has_known_states
        assert batch(labels=None).has_known_states
        assert columns(plain[1:]) == {**chosen(1, 2), "labels": None, "state_weights": None}

    @pytest.mark.parametrize("name", ["inputs", "times", "actions"])
    def test_cat_of_batches_of_which_some_have_a_column(self, name):
        with pytest.raises(ValueError, match=f"`batches` must all have `{name}` or none, but batch 1 has none"):
            Sequences.cat([Sequences.from_list([[0]], **{name: [[1]]}), Sequences.from_list([[0]])])

    def test_cat_of_inputs_of_two_sizes(self):
        with pytest.raises(ValueError, match="`batches` must have the same number of `inputs`, but have 1 and 2"):
            Sequences.cat([Sequences.from_list([[0]], inputs=[[1]]), Sequences.from_list([[0]], inputs=[[[1, 2]]])])

    def test_loader(self):
        made = batch()
        loaded = list(DataLoader([made[n : n + 1] for n in range(3)], batch_size=2, collate_fn=Sequences.collate))
        assert [columns(part) for part in loaded] == [chosen(0, 1), chosen(2)]

    def test_pickle(self):
        assert columns(pickle.loads(pickle.dumps(batch()))) == chosen(0, 1, 2)

    def test_counted(self):
        made = batch().replaced(weights=torch.tensor([1.0, 1.0, 0.0]))
        assert columns(made.counted()) == chosen(0, 1)

    def test_with_values_keeps_them(self):
        made = batch().with_values(torch.zeros(5, 2))
        assert columns(made) == chosen(0, 1, 2)
        assert made.weights.tolist() == [1.0, 2.0, 3.0]

    def test_replaced(self):
        made = batch().replaced(labels=None, actions=torch.ones(5, dtype=torch.int64))
        assert columns(made) == {**chosen(0, 1, 2), "labels": None, "actions": [1] * 5}
        assert made.weights.tolist() == [1.0, 2.0, 3.0]
        with pytest.raises(ValueError, match="`times` must not decrease"):
            batch().replaced(times=torch.arange(5).flip(0))

    def test_with_steps(self):
        made = batch().with_steps(torch.tensor([4, 0]), torch.tensor([0, 1, 2]))
        assert columns(made) == {name: [flat(given)[4], flat(given)[0]] for name, given in GIVEN.items()}

    def test_pieces(self):
        made = in_pieces(batch(), 2)
        assert (made.lengths.tolist(), made.weights.tolist()) == ([2, 2, 1], [1.0, 3.0, 3.0])
        assert columns(made) == chosen(0, 1, 2)

    def test_types(self):
        moved = batch().to(torch.float32)
        assert [getattr(moved, name).dtype for name in STEP_COLUMNS] == [
            torch.int64,
            torch.float32,
            torch.float64,
            torch.int64,
            torch.float64,
        ]
        assert columns(moved) == chosen(0, 1, 2)
        made = batch()
        assert made.to(torch.float64) is made

    def test_devices(self):
        moved = batch().to("meta")
        assert {getattr(moved, name).device.type for name in STEP_COLUMNS} == {"meta"}

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for CUDA")
    def test_pin(self):
        pinned = batch().pin_memory()
        assert all(getattr(pinned, name).is_pinned() for name in STEP_COLUMNS)
        assert columns(pinned) == chosen(0, 1, 2)

    def test_pinning_keeps_them(self, monkeypatch):
        monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        assert columns(batch().pin_memory()) == chosen(0, 1, 2)

    def test_a_table_and_back(self):
        made = batch()
        table = as_table(made)
        assert set(table.column_names) == {"values", "weights", *STEP_COLUMNS}
        back = from_table(table)
        assert columns(back) == chosen(0, 1, 2)
        assert back.weights.tolist() == [1.0, 2.0, 3.0]
        assert all(getattr(back, name).data_ptr() == getattr(made, name).data_ptr() for name in STEP_COLUMNS)

    def test_repr(self):
        names = "labels, inputs, times, actions, state_weights"
        assert repr(batch()) == f"Sequences(3 sequences, 5 symbols, weighted, {names})"


class TestCheck:
    MIXED = (Column("x"), Column("w", "categorical", ("a", "b")))

    def test_one_categorical_column_is_symbols(self):
        Sequences.from_list([[0, 2]]).check_columns(symbol_column(3))
        with pytest.raises(ValueError, match="Symbols must be 0 to 1"):
            Sequences.from_list([[0, 2]]).check_columns(symbol_column(2))
        with pytest.raises(ValueError, match="emits 2 symbols, but the sequences hold real vectors"):
            Sequences.from_list([[0.0]]).check_columns(symbol_column(2))

    def test_a_category_is_its_number(self):
        Sequences.from_list([[[0.5, 1.0], [NAN, NAN], [7.0, 0.0]]]).check_columns(self.MIXED)

    @pytest.mark.parametrize("bad", [2.0, -1.0, 0.5])
    def test_what_is_no_category(self, bad):
        message = (
            "Column 'w' must hold the whole numbers 0 to 1, or NaN for a missing one, but position 1 of sequence 1 "
        )
        message += f"has {bad:g} instead"
        with pytest.raises(ValueError, match=message):
            Sequences.from_list([[[9.0, 0.0]], [[9.0, 1.0], [9.0, bad]]]).check_columns(self.MIXED)

    def test_number_of_columns(self):
        with pytest.raises(ValueError, match="Each step must have 2 features, but has 3 instead"):
            Sequences.from_list([[[1.0, 2.0, 3.0]]]).check_columns(self.MIXED)
