"""Ragged batches: every way in, every way of taking parts, and errors that say where."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import Vocabulary

NAN = float("nan")


def same(left: torch.Tensor, right) -> bool:
    """Equal, where a NaN equals a NaN."""
    return np.array_equal(left.numpy(), np.asarray(right), equal_nan=left.is_floating_point())


def vectors() -> Sequences:
    return Sequences.from_list([[[1.0, 2.0], [3.0, NAN]], np.zeros((0, 2)), [[5.0, 6.0]]], weights=[1.0, 2.0, 0.5])


class TestFromList:
    def test_symbols(self):
        batch = Sequences.from_list([[0, 1], [], (2,), np.array([3, 4], np.int8), torch.tensor([5])])
        assert batch.values.dtype == torch.int64
        assert batch.values.tolist() == [0, 1, 2, 3, 4, 5]
        assert batch.offsets.tolist() == [0, 2, 2, 3, 5, 6]
        assert batch.lengths.tolist() == [2, 0, 1, 2, 1]
        assert (len(batch), batch.num_steps, batch.is_discrete, batch.num_features, batch.weights) == (
            5,
            6,
            True,
            None,
            None,
        )

    def test_numbers_are_vectors_of_one(self):
        batch = Sequences.from_list([[1.5, 2.0], [3]])
        assert same(batch.values, [[1.5], [2.0], [3.0]])
        assert (batch.is_discrete, batch.num_features) == (False, 1)

    def test_vectors_keep_float32(self):
        batch = Sequences.from_list([np.ones((2, 3), np.float32), torch.zeros(1, 3)])
        assert batch.values.dtype == torch.float32
        assert batch.values.shape == (3, 3)
        assert Sequences.from_list([np.ones((2, 3), np.float16)]).values.dtype == torch.float64

    @pytest.mark.parametrize(
        ("given", "values"),
        [
            ([[0, None, 2], [None]], [0, -1, 2, -1]),
            ([[0.5, None], [None]], [[0.5], [NAN], [NAN]]),
            (
                [[1.5], [None, 3]],
                [[1.5], [NAN], [3.0]],
            ),  # whole numbers among real ones are real, and so is what is missing there
            ([[None, 3], [1.5]], [[NAN], [3.0], [1.5]]),
            ([[[1.0, None], [2.0, 3.0]]], [[1.0, NAN], [2.0, 3.0]]),
            ([[[1.0, 2.0], None]], [[1.0, 2.0], [NAN, NAN]]),
            (
                [[None, [1.0, 2.0]], [None, None, [3.0, None]]],
                [[NAN, NAN], [1.0, 2.0], [NAN, NAN], [NAN, NAN], [3.0, NAN]],
            ),
            ([np.array([1, None], object)], [1, -1]),
        ],
    )
    def test_none_is_missing(self, given, values):
        batch = Sequences.from_list(given)
        assert same(batch.values, values)
        assert same(batch.observed, np.asarray(values) >= 0 if batch.is_discrete else ~np.isnan(values))

    def test_nothing(self):
        assert len(Sequences.from_list([])) == 0
        assert Sequences.from_list([[], []]).is_discrete
        empty = Sequences.from_list([np.zeros((0, 3)), np.zeros((0, 3))])
        assert (len(empty), empty.num_features) == (2, 3)

    def test_what_is_given_is_not_changed_later(self):
        source = np.array([1, 2, 3])
        batch = Sequences.from_list([source])
        source[0] = 9
        assert batch.values.tolist() == [1, 2, 3]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([[0], ["a", "b"]], "sequence 1 holds .*from_strings"),
            ([[0, 1], np.zeros((2, 2), int)], "1 features like the first, but sequence 1 has 2"),
            ([[[1.0, 2.0]], [[1.0], [2.0]]], "2 features like the first, but sequence 1 has 1"),
            ([[[1.0, 2.0]], [[1.0, 2.0], [3.0]]], "2 features.*position 1 of sequence 1 has 1"),
            ([[[1.0, 2.0], 3.0]], "2 features.*position 1 of sequence 0 has 1"),
            ([1, 2], "item 0 is a single number"),
        ],
    )
    def test_errors(self, given, message):
        with pytest.raises(ValueError, match=message):
            Sequences.from_list(given)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
class TestFromOneArray:
    """An array in the place of the list of sequences."""

    @pytest.mark.parametrize("shape", [(4, 1), (4, 3), (1, 3), (0, 3)])
    def test_real_numbers_in_two_dimensions_are_one_sequence(self, kind, shape):
        given = np.arange(shape[0] * shape[1], dtype=float).reshape(shape)
        batch = Sequences.from_list(kind(given))
        assert batch.lengths.tolist() == [shape[0]]
        assert same(batch.values, given)

    def test_whole_numbers_in_two_dimensions_are_a_sequence_for_each_row(self, kind):
        assert Sequences.from_list(kind(np.arange(6).reshape(2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool])
    def test_a_column_of_whole_numbers_is_refused(self, kind, dtype):
        with pytest.raises(ValueError, match=r"shape \(5, 1\).*Sequences.from_lengths\(X, lengths\).*\(1, 5\)"):
            Sequences.from_list(kind(np.ones((5, 1), dtype)))

    def test_one_dimension_is_refused(self, kind):
        for given in (np.arange(3), np.arange(3.0)):
            with pytest.raises(ValueError, match=r"list of sequences, but is an array of shape \(3,\).*list of one"):
                Sequences.from_list(kind(given))

    def test_three_dimensions_are_a_sequence_for_each_entry(self, kind):
        assert Sequences.from_list(kind(np.zeros((2, 3, 4)))).lengths.tolist() == [3, 3]


class TestFromObjects:
    """Arrays of Python objects, and masked arrays."""

    def test_masked_entries_are_missing(self):
        mask = [[False, True], [False, False]]
        assert same(
            Sequences.from_list(np.ma.masked_array([[1.0, 9.0], [2.0, 3.0]], mask)).values, [[1.0, NAN], [2.0, 3.0]]
        )
        assert Sequences.from_list(np.ma.masked_array([[1, 9], [2, 3]], mask)).tolist() == [[1, -1], [2, 3]]
        assert Sequences.from_lengths(np.ma.masked_array([1, 9], [False, True]), [2]).tolist() == [[1, -1]]

    def test_real_numbers_are_one_sequence(self):
        batch = Sequences.from_list(np.array([[1.5, None], [2, 3]], object))
        assert batch.lengths.tolist() == [2]
        assert same(batch.values, [[1.5, NAN], [2.0, 3.0]])

    def test_whole_numbers_are_a_sequence_for_each_row(self):
        assert Sequences.from_list(np.array([[1, None], [2, 3]], object)).tolist() == [[1, -1], [2, 3]]
        with pytest.raises(ValueError, match="from_lengths"):
            Sequences.from_list(np.array([[1], [None]], object))


class TestFromPandas:
    TABLE = pd.DataFrame({"x": [1, 2, 3], "y": [0.5, None, 2.5], "word": ["a", "b", "a"]}, index=[7, 8, 9])

    def test_a_table_is_one_sequence_of_vectors(self):
        batch = Sequences.from_list(self.TABLE[["y", "x"]])
        assert batch.lengths.tolist() == [3]
        assert same(batch.values, [[0.5, 1.0], [NAN, 2.0], [2.5, 3.0]])
        assert same(Sequences.from_list(self.TABLE[["y"]]).values, [[0.5], [NAN], [2.5]])
        assert Sequences.from_list(pd.DataFrame({"a": [1, 2], "b": [3, 4]})).tolist() == [[[1.0, 3.0], [2.0, 4.0]]]

    def test_one_column_of_whole_numbers_is_one_sequence_of_symbols(self):
        assert (
            Sequences.from_list(self.TABLE[["x"]]).tolist()
            == Sequences.from_list(self.TABLE["x"]).tolist()
            == [[1, 2, 3]]
        )
        nullable = pd.Series([1, None, 3], dtype="Int64")
        assert (
            Sequences.from_list(nullable).tolist() == Sequences.from_list(nullable.to_frame()).tolist() == [[1, -1, 3]]
        )

    def test_a_series_of_numbers_is_one_sequence_and_one_of_lists_holds_several(self):
        assert same(Sequences.from_list(self.TABLE["y"]).values, [[0.5], [NAN], [2.5]])
        assert Sequences.from_list(pd.Series([[0, 1], [2]], index=[5, 6])).tolist() == [[0, 1], [2]]

    def test_items_of_a_list(self):
        batch = Sequences.from_list([self.TABLE[["x", "y"]], self.TABLE.iloc[:2][["x", "y"]]])
        assert same(batch.values, [[1.0, 0.5], [2.0, NAN], [3.0, 2.5], [1.0, 0.5], [2.0, NAN]])
        assert batch.lengths.tolist() == [3, 2]
        assert Sequences.from_list([self.TABLE["x"], self.TABLE["x"][1:]]).tolist() == [[1, 2, 3], [2, 3]]

    def test_lengths(self):
        assert Sequences.from_lengths(self.TABLE["x"], [1, 2]).tolist() == [[1], [2, 3]]
        assert Sequences.from_lengths(self.TABLE[["x", "y"]], [1, 2]).lengths.tolist() == [1, 2]

    @pytest.mark.parametrize(
        ("given", "message"),
        [(TABLE, "column 'word' .* numbers"), (TABLE[["word"]], "column 'word'"), (TABLE["word"], "from_strings")],
    )
    def test_names_are_refused(self, given, message):
        with pytest.raises(ValueError, match=message):
            Sequences.from_list(given)


def test_whole_numbers_of_several_features_are_vectors(rng):
    counts = rng.integers(0, 9, (5, 2))
    expected = Sequences.from_list([counts.astype(float)])
    for found in (
        Sequences.from_list([counts]),
        Sequences.from_list([torch.as_tensor(counts)]),
        Sequences.from_lengths(counts, [5]),
    ):
        assert torch.equal(found.values, expected.values)


def test_a_data_frame_names_the_columns():
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [3, 4]})
    batch = Sequences.from_list([frame, frame[:1], frame[:0]])
    parts = (
        batch,
        batch[:1],
        batch[[1, 0]],
        batch.to(torch.float32),
        Sequences.cat([batch, batch]),
        Sequences.from_lengths(frame, [2]),
        batch.replaced(weights=None),
    )
    for part in parts:
        assert [column.name for column in part.columns] == ["x", "y"]
    assert Sequences.from_list([[1.0]]).columns is None
    with pytest.raises(ValueError, match="the columns x, y like the first, but sequence 1 has y, x"):
        Sequences.from_list([frame, frame[["y", "x"]]])


class TestFromLengths:
    def test_as_hmmlearn_takes_them(self):
        batch = Sequences.from_lengths(np.arange(5), [2, 0, 3])
        assert batch.tolist() == [[0, 1], [], [2, 3, 4]]
        assert Sequences.from_lengths(torch.ones(2, 3), torch.tensor([2])).num_features == 3
        for column in (np.arange(5)[:, None], torch.arange(5)[:, None], [[0], [1], [2], [3], [4]]):
            assert Sequences.from_lengths(column, [2, 0, 3]).tolist() == batch.tolist()

    def test_lists_keep_their_digits(self):
        assert same(Sequences.from_lengths([0.1, 0.2], [2]).values, [[0.1], [0.2]])

    def test_shares_memory(self):
        values = np.arange(6.0).reshape(3, 2)
        assert Sequences.from_lengths(values, [3]).values.data_ptr() == values.ctypes.data

    def test_read_only_memory_needs_no_warning(self):
        """A mapped file, for example. torch warns once in a process: the check is that it is not even asked."""
        values = np.arange(6.0).reshape(3, 2)
        values.flags.writeable = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.set_warn_always(True)
            try:
                assert Sequences.from_lengths(values, [3]).tolist() == [values.tolist()]
            finally:
                torch.set_warn_always(False)

    @pytest.mark.parametrize(
        ("lengths", "message"),
        [
            ([2, 2], "`lengths` must sum to 5.*sums to 4"),
            ([6, -1], "`lengths` must not be negative, but the length of sequence 1 is -1"),
            ([2.5, 2.5], "`lengths` must hold whole numbers, but holds float64"),
            (5, r"`lengths` must be a list .* but has shape \(\)"),
            ([[2, 3]], r"`lengths` must be a list .* but has shape \(1, 2\)"),
        ],
    )
    def test_errors(self, lengths, message):
        for given in (lengths, torch.from_numpy(np.asarray(lengths))):
            with pytest.raises(ValueError, match=message):
                Sequences.from_lengths(np.arange(5), given)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (np.zeros((5, 2, 2)), r"\(steps, features\).*\(5, 2, 2\)"),
            (list("abcde"), "hold numbers.*from_strings"),
        ],
    )
    def test_wrong_values(self, values, message):
        with pytest.raises(ValueError, match=message):
            Sequences.from_lengths(values, [5])


class TestConstructor:
    @pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [], [[0, 3]], [0, 4, 3]])
    def test_offsets_must_rise_over_all_steps(self, offsets):
        with pytest.raises(ValueError, match="`offsets` must rise from 0 to 3"):
            Sequences(torch.arange(3), torch.tensor(offsets, dtype=torch.int64))

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"\(steps,\) for symbols.*\(3, 1\)"):
            Sequences(torch.zeros(3, 1, dtype=torch.int64), torch.tensor([0, 3]))
        with pytest.raises(ValueError, match=r"\(steps, features\).*\(3, 1, 1\)"):
            Sequences(torch.zeros(3, 1, 1), torch.tensor([0, 3]))
        assert Sequences(torch.zeros(3), torch.tensor([0, 3])).values.shape == (3, 1)
        assert (
            Sequences(torch.zeros(3, dtype=torch.bool), torch.tensor([0, 3], dtype=torch.int32)).offsets.dtype
            == torch.int64
        )

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([1.0], r"each of the 2 sequences.*\(1,\)"),
            ([1.0, -1.0], "sequence 1 is -1.0"),
            ([NAN, 1.0], "sequence 0 is nan"),
            ([1.0, float("inf")], "1 is inf"),
        ],
    )
    def test_weights(self, weights, message):
        with pytest.raises(ValueError, match=message):
            Sequences.from_list([[0], [1]], weights=weights)

    def test_weights_are_float64(self):
        assert Sequences.from_list([[0], [1]], weights=[1, 2]).weights.dtype == torch.float64


class TestFromArrow:
    @pytest.mark.parametrize(
        ("kind", "torch_type"),
        [(pa.int64(), torch.int64), (pa.float32(), torch.float32), (pa.float64(), torch.float64)],
    )
    def test_no_copy(self, kind, torch_type):
        """The values are Arrow's own memory, also of a slice; and nobody is warned."""
        column = pa.array([[9], [0, 1], [], [2, 3, 4]], pa.list_(kind))
        address = column.values.buffers()[1].address
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.set_warn_always(True)
            try:
                batch, part = Sequences.from_arrow(column), Sequences.from_arrow(column.slice(1))
            finally:
                torch.set_warn_always(False)
        assert batch.values.dtype == torch_type
        assert batch.values.data_ptr() == address
        assert part.values.data_ptr() == address + batch.values.element_size()
        assert [np.ravel(each).tolist() for each in part] == [[0, 1], [], [2, 3, 4]]

    def test_the_memory_outlives_the_column(self):
        batch = Sequences.from_arrow(pa.array([list(range(1000))], pa.list_(pa.int64())))
        pa.default_memory_pool().release_unused()
        pa.array(np.zeros(1000, np.int64)).sum()
        assert batch.values.tolist() == list(range(1000))

    def test_vectors_of_fixed_size_without_a_copy(self):
        column = pa.array([[[1.0, 2.0]], [], [[3.0, 4.0], [5.0, 6.0]]], pa.list_(pa.list_(pa.float64(), 2)))
        batch = Sequences.from_arrow(column)
        assert batch.tolist() == [[[1.0, 2.0]], [], [[3.0, 4.0], [5.0, 6.0]]]
        assert batch.values.data_ptr() == column.values.values.buffers()[1].address
        assert Sequences.from_arrow(column.slice(2)).tolist() == [[[3.0, 4.0], [5.0, 6.0]]]
        assert Sequences.from_arrow(column.slice(1, 1)).values.shape == (0, 2)

    @pytest.mark.parametrize("outer", [pa.list_, pa.large_list])
    def test_vectors_as_lists(self, outer):
        column = pa.array([[[0.0, 0.0]], [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], outer(outer(pa.float32())))
        assert Sequences.from_arrow(column.slice(1)).tolist() == [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]

    def test_chunks(self):
        column = pa.chunked_array([[[0, 1]], [], [[2], []]], pa.list_(pa.int64()))
        assert Sequences.from_arrow(column).tolist() == [[0, 1], [2], []]
        assert Sequences.from_arrow(column.slice(1)).tolist() == [[2], []]
        one = pa.chunked_array([[[0, 1], [2]]], pa.list_(pa.int64()))
        assert Sequences.from_arrow(one).values.data_ptr() == one.chunk(0).values.buffers()[1].address

    @pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.bool_(), pa.null()])
    def test_whole_numbers_of_any_type_with_nulls(self, kind):
        first = None if kind == pa.null() else True if kind == pa.bool_() else 1
        batch = Sequences.from_arrow(pa.array([[first, None], []], pa.list_(kind)))
        assert batch.is_discrete
        assert batch.tolist() == [[-1 if first is None else 1, -1], []]

    @pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.float16()])
    def test_numbers_with_nulls(self, kind):
        assert same(Sequences.from_arrow(pa.array([[np.float16(1.5), None]], pa.list_(kind))).values, [[1.5], [NAN]])

    @pytest.mark.parametrize("inner", [lambda kind: pa.list_(kind, 2), pa.list_, pa.large_list])
    @pytest.mark.parametrize("kind", [pa.int64(), pa.float64()])
    def test_vectors_with_nulls(self, inner, kind):
        """A missing entry, and a vector that is missing as a whole; sliced too."""
        column = pa.array([[[7, 8]], [[1, None], None], [None], [], [[3, 4]]], pa.list_(inner(kind)))
        assert same(Sequences.from_arrow(column).values, [[7, 8], [1, NAN], [NAN, NAN], [NAN, NAN], [3, 4]])
        assert same(Sequences.from_arrow(column.slice(2)).values, [[NAN, NAN], [3, 4]])
        assert Sequences.from_arrow(column).lengths.tolist() == [1, 2, 1, 0, 1]

    def test_nothing(self):
        assert Sequences.from_arrow(pa.array([], pa.list_(pa.int64()))).is_discrete
        assert Sequences.from_arrow(pa.chunked_array([], pa.list_(pa.list_(pa.float64(), 3)))).num_features == 3
        assert Sequences.from_arrow(pa.array([[], []])).lengths.tolist() == [0, 0]

    def test_weights(self):
        assert Sequences.from_arrow(pa.array([[1], [2]]), weights=np.array([1, 3])).weights.tolist() == [1, 3]

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            (pa.array([1, 2]), "must be an Arrow list column, but is int64"),
            (pa.array([[1], [2], None]), "sequence 2"),
            (pa.array([["a"]]), "holds string.*from_strings"),
            (pa.array([[[1.0, 2.0]], [[3.0, 4.0], None, [5.0]]]), "2 features.*position 2 of sequence 1"),
        ],
    )
    def test_errors(self, column, message):
        with pytest.raises(ValueError, match=message):
            Sequences.from_arrow(column)


class TestVocabulary:
    def test_strings_and_names(self):
        assert Sequences.from_strings(["abba", "", "b"], "ab").tolist() == [[0, 1, 1, 0], [], [1]]
        assert Sequences.from_strings([["rain", None, "sun"]], Vocabulary(["sun", "rain"])).tolist() == [[1, -1, 0]]
        assert Sequences.from_strings(["a"], "ab", weights=[2]).weights.tolist() == [2]

    def test_unknown(self):
        vocabulary = Vocabulary(["a", "b", "?"], unknown="?")
        assert Sequences.from_strings(["axb"], vocabulary).tolist() == [[0, 2, 1]]
        with pytest.raises(ValueError, match=r"Sequence 1: .*'x', found at position 2"):
            Sequences.from_strings(["ab", "abx"], "ab")
        with pytest.raises(
            ValueError,
            match=r"must be a list of sequences, but is the string 'abba' instead. For one sequence give a list of one",
        ):
            Sequences.from_strings("abba", "ab")

    def test_from_data(self):
        assert Vocabulary.from_data(["cab", "a"]).names == ["a", "b", "c"]
        assert Vocabulary.from_data([["b", None, "?", "a"]], unknown="?").names == ["?", "a", "b"]
        assert Vocabulary.from_data([["b", None]]).names == ["b"]

    def test_there_and_back(self):
        vocabulary = Vocabulary("xyz")
        assert vocabulary.decode(vocabulary.encode(["z", None, "x"])) == ["z", None, "x"]
        assert vocabulary.decode(torch.tensor([2, -1, 0])) == ["z", None, "x"]
        assert (len(vocabulary), vocabulary[1], vocabulary == Vocabulary("xyz"), vocabulary == Vocabulary("xzy")) == (
            3,
            "y",
            True,
            False,
        )
        assert {vocabulary: 1}[Vocabulary("xyz")] == 1
        assert "3 symbols" in repr(vocabulary)

    def test_errors(self):
        with pytest.raises(ValueError, match="'a' occurs more than once"):
            Vocabulary(["a", "b", "a"])
        with pytest.raises(ValueError, match=r"`unknown` must be one of the names, but is '\?'"):
            Vocabulary("ab", unknown="?")


class TestParts:
    batch = Sequences.from_list([[0, 1], [], [2], [3, 4, 5]], weights=[1.0, 2.0, 3.0, 4.0])

    def test_one_sequence(self):
        assert self.batch[0].tolist() == [0, 1]
        assert self.batch[-1].tolist() == [3, 4, 5]
        assert self.batch[np.int32(2)].tolist() == [2]
        assert self.batch[torch.tensor(2)].tolist() == [2]
        assert self.batch[1].tolist() == []
        for index in (4, -5):
            with pytest.raises(IndexError, match=f"has 4 sequences, but sequence {index} was requested"):
                self.batch[index]

    def test_a_slice_shares_memory(self):
        part = self.batch[2:]
        assert part.tolist() == [[2], [3, 4, 5]]
        assert part.values.data_ptr() == self.batch.values[2:].data_ptr()
        assert part.weights.tolist() == [3, 4]

    @pytest.mark.parametrize(
        "index",
        [
            slice(1, 3),
            slice(-1, None),
            slice(None, -1),
            slice(3, 1),
            slice(9, 12),
            slice(None, None, 2),
            slice(None, None, -1),
            slice(2, None, -2),
        ],
    )
    def test_slices_are_those_of_a_list(self, index):
        assert self.batch[index].tolist() == self.batch.tolist()[index]
        assert self.batch[index].weights.tolist() == self.batch.weights.tolist()[index]

    @pytest.mark.parametrize(
        ("index", "expected"),
        [
            ([3, 0, 0], [3, 0, 0]),
            ([-1, 1], [3, 1]),
            ([], []),
            (range(2), [0, 1]),
            (np.array([2, 3]), [2, 3]),
            (torch.tensor([1]), [1]),
            ([True, False, True, False], [0, 2]),
            (np.array([False, True, True, False]), [1, 2]),
            (torch.zeros(4, dtype=torch.bool), []),
        ],
    )
    def test_lists_and_masks(self, index, expected):
        part = self.batch[index]
        assert part.tolist() == [self.batch.tolist()[n] for n in expected]
        assert part.weights.tolist() == [self.batch.weights.tolist()[n] for n in expected]

    def test_wrong_lists(self):
        for index in ([4], [True, False], [0.5]):
            with pytest.raises(IndexError):
                self.batch[index]

    def test_empty_parts_keep_their_kind(self):
        for index in (slice(0, 0), [], [1], torch.zeros(3, dtype=torch.bool)):
            part = vectors()[index]
            assert (part.num_features, part.num_steps, part.values.dtype) == (2, 0, torch.float64)
        assert self.batch[:0].is_discrete
        assert Sequences.cat([vectors()[:0], vectors()[:0]]).num_features == 2

    def test_iteration_and_split(self):
        assert [each.tolist() for each in self.batch] == self.batch.tolist()
        parts = list(self.batch.split(3))
        assert [len(part) for part in parts] == [3, 1]
        assert Sequences.cat(parts).tolist() == self.batch.tolist()

    def test_locate(self):
        """Empty sequences are stepped over."""
        assert [self.batch.locate(step) for step in range(6)] == [(0, 0), (0, 1), (2, 0), (3, 0), (3, 1), (3, 2)]


class TestCat:
    def test_weights_of_those_that_have_none_are_one(self):
        joined = Sequences.cat([Sequences.from_list([[0]], weights=[3.0]), Sequences.from_list([[1, 2], []])])
        assert joined.tolist() == [[0], [1, 2], []]
        assert joined.weights.tolist() == [3, 1, 1]
        assert Sequences.cat([Sequences.from_list([[0]]), Sequences.from_list([[1]])]).weights is None

    def test_empty_ones_of_another_kind_do_not_matter(self):
        joined = Sequences.cat([Sequences.from_list([[]]), vectors()])
        assert joined.lengths.tolist() == [0, 2, 0, 1]
        assert joined.num_features == 2

    def test_errors(self):
        with pytest.raises(ValueError, match="at least one"):
            Sequences.cat([])
        with pytest.raises(ValueError, match=r"same number of features, but found 2 and none \(symbols\)"):
            Sequences.cat([vectors(), Sequences.from_list([[0]])])

    def test_collate(self):
        """What a DataLoader's data set may give: one item at a time, or batches."""
        assert Sequences.collate([[0, 1], [2]]).tolist() == [[0, 1], [2]]
        assert Sequences.collate([torch.tensor([0, 1]), torch.tensor([2])]).tolist() == [[0, 1], [2]]
        assert Sequences.collate([vectors(), vectors()]).weights.tolist() == [1.0, 2.0, 0.5] * 2
        batch = vectors()
        assert Sequences.collate(batch) is batch
        loader = torch.utils.data.DataLoader([[0, 1], [2], [3]], batch_size=2, collate_fn=Sequences.collate)
        assert [each.tolist() for each in loader] == [[[0, 1], [2]], [[3]]]


class TestMoving:
    def test_types(self):
        """Symbols and weights keep their types; a batch that is already there is not copied."""
        batch = vectors()
        single = batch.to(torch.float32)
        assert (single.values.dtype, single.weights.dtype) == (torch.float32, torch.float64)
        assert batch.to("cpu").values is batch.values
        symbols = Sequences.from_list([[0, 1]])
        assert symbols.to(torch.float32).values.dtype == torch.int64
        assert symbols.to("meta").device.type == "meta"
        assert symbols.to("meta").offsets.device.type == "cpu"

    def test_what_was_checked_is_checked_again_in_another_type(self):
        """1e130 is a number in float64 and infinite in float32."""
        batch = Sequences.from_list([[1.0], [2.0, 1e130]])
        batch.check(None, 1)
        with pytest.raises(ValueError, match="position 1 of sequence 1 is inf"):
            batch.to(torch.float32).check(None, 1)

    @pytest.mark.skipif(not torch.accelerator.is_available(), reason="memory is pinned for an accelerator")
    def test_pin(self):
        pinned = vectors().pin_memory()
        assert pinned.values.is_pinned()
        assert pinned.weights.is_pinned()

    def test_pickle(self):
        """How a batch comes from a DataLoader's worker."""
        again = pickle.loads(pickle.dumps(vectors()))
        assert same(again.values, vectors().values)
        assert again.weights.tolist() == vectors().weights.tolist()
        assert again.offsets.tolist() == vectors().offsets.tolist()


class TestCounting:
    def test_observed(self):
        batch = Sequences.from_list([[0, None, 2], [None], []])
        assert batch.observed.tolist() == [True, False, True, False]
        assert float(batch.num_observed()) == 2
        weighted = Sequences(batch.values, batch.offsets, torch.tensor([0.5, 7.0, 1.0]))
        assert float(weighted.num_observed()) == 1

    def test_a_vector_observed_in_part_counts(self):
        batch = Sequences.from_list([[[1.0, NAN], [NAN, NAN]]])
        assert batch.observed.tolist() == [[True, False], [False, False]]
        assert float(batch.num_observed()) == 1

    def test_repeat_interleave_and_with_values(self):
        batch = Sequences.from_list([[0, 1], [], [2]], weights=[1.0, 2.0, 3.0])
        assert batch.repeat_interleave(batch.weights).tolist() == [1, 1, 3]
        states = batch.with_values(torch.tensor([7, 8, 9]))
        assert states.tolist() == [[7, 8], [], [9]]
        assert states.weights.tolist() == [1, 2, 3]

    def test_repr(self):
        assert repr(vectors()) == "Sequences(3 sequences, 3 vectors of 2, weighted)"
        assert repr(Sequences.from_list([[0]])) == "Sequences(1 sequences, 1 symbols)"


class TestCheck:
    """Each message names the sequence and the position in it."""

    @pytest.mark.parametrize("bad", [3, 10**12, -2])
    def test_symbols_out_of_range(self, bad):
        batch = Sequences.from_list([[0, 1], [], [2, bad]])
        with pytest.raises(ValueError, match=f"0 to 2.*position 1 of sequence 2 is {bad}"):
            batch.check(3, None)

    def test_what_fits(self):
        batch = Sequences.from_list([[0, -1, 2]])
        batch.check(3, None)
        with pytest.raises(ValueError, match="position 2 of sequence 0 is 2"):
            batch.check(2, None)
        Sequences.from_list([]).check(3, None)

    @pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
    def test_infinite_values(self, bad):
        batch = Sequences.from_list([np.zeros((0, 2)), [[0.0, NAN], [1.0, bad]]])
        with pytest.raises(ValueError, match=f"feature 1 at position 1 of sequence 1 is {bad}"):
            batch.check(None, 2)

    def test_the_wrong_kind(self):
        with pytest.raises(ValueError, match="emits 3 symbols, but the sequences hold real vectors of 2"):
            vectors().check(3, None)
        with pytest.raises(ValueError, match="vectors of 2 features, but the sequences hold symbols"):
            Sequences.from_list([[0]]).check(None, 2)
        with pytest.raises(ValueError, match="must have 3 features, but has 2"):
            vectors().check(None, 3)


def test_padded_and_back():
    vectors = Sequences.from_list([[[1.0, 2.0], [3.0, 4.0]], np.zeros((0, 2)), [[5.0, 6.0]]])
    padded = vectors.padded()
    nothing = [float("nan")] * 2
    expected = [[[1.0, 2.0], [3.0, 4.0]], [nothing, nothing], [[5.0, 6.0], nothing]]
    torch.testing.assert_close(padded, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert torch.equal(vectors.packed(padded), vectors.values)
    assert torch.equal(vectors.packed(padded[..., :1].unsqueeze(3))[:, 0, 0], vectors.values[:, 0])
    assert Sequences.from_list([[3, 4], [5]]).padded().tolist() == [[3, 4], [5, -1]]
    assert Sequences.from_lengths(np.zeros((0, 2)), []).padded().shape == (0, 0, 2)


def test_arrays_that_torch_does_not_take_are_converted():
    steps = np.arange(6)
    for array in (steps[::-1], steps.astype(">i8")):
        assert Sequences.from_lengths(array, [6]).values.tolist() == array.tolist()
        assert Sequences.from_list([array]).values.tolist() == array.tolist()
    backwards = np.linspace(0, 1, 6).reshape(3, 2)[::-1].astype(">f8")
    assert np.array_equal(Sequences.from_lengths(backwards, [3]).values, backwards)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (np.zeros((2, 3, 4)), r"sequence 0 has shape \(2, 3, 4\)"),
        (np.array([2**64 - 1], np.uint64), "symbols below 2\\^63, but sequence 0 holds 18446744073709551615"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(sequence, message):
    with pytest.raises(ValueError, match=message):
        Sequences.from_list([sequence])


class TestSymbols:
    """Symbols in the narrowest type, with the number of symbols in the place of a missing one."""

    @pytest.mark.parametrize("given", [torch.int8, torch.int16, torch.int32, torch.int64])
    @pytest.mark.parametrize(
        ("num_symbols", "kind"),
        [
            (5, torch.uint8),
            (127, torch.uint8),
            (128, torch.uint8),
            (255, torch.uint8),
            (256, torch.int16),
            (2**15 - 1, torch.int16),
            (2**15, torch.int32),
        ],
    )
    @pytest.mark.parametrize("missing", [False, True])
    def test_every_type(self, given, num_symbols, kind, missing):
        largest = min(num_symbols - 1, torch.iinfo(given).max)
        values = [0, largest, *([-1] if missing else [])]
        batch = Sequences.from_lengths(torch.tensor(values, dtype=given), [len(values)])
        assert batch.values.dtype == given
        symbols = batch.symbols(num_symbols)
        assert symbols.dtype == kind
        assert symbols.tolist() == [0, largest, *([num_symbols] if missing else [])]
        assert batch.values.tolist() == values  # the batch itself did not change
        assert batch.symbols(num_symbols) is symbols

    def test_nothing_is_copied_where_none_is_missing(self):
        for kind, num_symbols in ((torch.int8, 5), (torch.int16, 300), (torch.int32, 2**20)):
            batch = Sequences.from_lengths(torch.tensor([0, 4], dtype=kind), [2])
            assert batch.symbols(num_symbols).data_ptr() == batch.values.data_ptr()

    def test_another_number_of_symbols(self):
        batch = Sequences.from_list([[0, None]])
        assert [batch.symbols(number).tolist() for number in (1, 7, 1)] == [[0, 1], [0, 7], [0, 1]]

    def test_parts_and_copies_have_their_own(self):
        batch = Sequences.from_list([[0, 1], [2]])
        batch.symbols(3)
        assert batch[1:].symbols(3).tolist() == [2]
        assert batch.with_values(torch.tensor([2, 2, 2])).symbols(3).tolist() == [2, 2, 2]

    @pytest.mark.parametrize("kind", [torch.int8, torch.int64])
    def test_errors(self, kind):
        batch = Sequences.from_lengths(torch.tensor([0, 3, 100], dtype=kind), [1, 2])
        with pytest.raises(
            ValueError,
            match="Symbols must be 0 to 2, or -1 for a missing one, but position 0 of sequence 1 is 3 instead",
        ):
            batch.symbols(3)
        with pytest.raises(ValueError, match="`num_symbols` must be below 2\\^31"):
            batch.symbols(2**31)
        with pytest.raises(ValueError, match="hold real vectors"):
            Sequences.from_list([[0.5]]).symbols(3)
        batch.check(1000, None)  # more than the type can hold

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            (torch.bool, torch.int8),
            (torch.uint8, torch.int16),
            (torch.int8, torch.int8),
            (torch.int16, torch.int16),
            (torch.int32, torch.int32),
        ],
    )
    def test_types_that_can_hold_a_missing_symbol_are_kept(self, given, kept):
        assert Sequences.from_lengths(torch.tensor([0, 1]).to(given), [2]).values.dtype == kept

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            (pa.int8(), torch.int8),
            (pa.int16(), torch.int16),
            (pa.int32(), torch.int32),
            (pa.uint8(), torch.int16),
            (pa.bool_(), torch.int8),
        ],
    )
    def test_types_of_arrow(self, given, kept):
        column = (
            pa.array([[0, 1], [1]], pa.large_list(given)) if given != pa.bool_() else pa.array([[False, True], [True]])
        )
        batch = Sequences.from_arrow(column)
        assert (batch.values.dtype, batch.tolist()) == (kept, [[0, 1], [1]])
        if given in (pa.int8(), pa.int16(), pa.int32()):
            assert batch.values.data_ptr() == column.values.buffers()[1].address

    def test_batches_of_two_types(self):
        narrow, wide = (
            Sequences.from_lengths(torch.tensor([number], dtype=kind), [1])
            for number, kind in ((5, torch.int8), (300, torch.int16))
        )
        assert Sequences.cat([narrow, wide]).tolist() == [[5], [300]]
