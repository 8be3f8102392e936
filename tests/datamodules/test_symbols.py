"""The first sequences, the cut and the residual symbol, against a plain implementation."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.symbols import Symbols, cut, encode, merge_rare
from lightning_hmm.vocabulary import MISSING

NAMES = ["d", "b", "a", "e", "c", "never"]


def pack(sequences: list[list[str | None]], states: bool = False) -> Symbols:
    numbers = np.array(
        [MISSING if name is None else NAMES.index(name) for sequence in sequences for name in sequence], np.int64
    )
    return Symbols(
        numbers,
        np.array([len(sequence) for sequence in sequences], np.int64),
        NAMES,
        np.arange(len(numbers)) if states else None,
    )


def unpack(symbols: Symbols) -> list[list[str | None]]:
    names = [None if number == MISSING else symbols.names[number] for number in symbols.numbers.tolist()]
    ends = np.cumsum(symbols.lengths).tolist()
    return [names[end - size : end] for end, size in zip(ends, symbols.lengths.tolist(), strict=True)]


def plainly(
    sequences: list[list[str | None]], first: int | None, length: int | None, fraction: str
) -> tuple[list[list[str | None]], list[str]]:
    """The rule in words: the rarest, one after another, as long as they are less than the fraction of all."""
    sequences = [sequence[:length] for sequence in sequences[:first]]
    counts = Counter(name for sequence in sequences for name in sequence if name is not None)
    total, gone, rare = sum(counts.values()), 0, set()
    for name, count in sorted(counts.items(), key=lambda pair: (pair[1], pair[0])):
        gone += count
        if gone < Fraction(fraction) * total:
            rare.add(name)
    merged = [
        [None if name is None else "rest" if name in rare else name for name in sequence] for sequence in sequences
    ]
    return merged, (["rest"] if rare else []) + sorted(set(counts) - rare)


@given(
    sequences=st.lists(
        st.lists(st.sampled_from([*NAMES[:5], "a", "a", "b", None]), max_size=12), min_size=1, max_size=12
    ),
    first=st.none() | st.integers(1, 8),
    length=st.none() | st.integers(1, 8),
    fraction=st.sampled_from(["0.0", "0.1", "0.2", "0.3", "0.5", "0.9"]),
)
def test_preparation_is_what_a_plain_implementation_gives(sequences, first, length, fraction):
    shorter = cut(pack(sequences, states=True), first, length)
    expected, names = plainly(sequences, first, length, fraction)
    if not names:
        with pytest.raises(ValueError, match="At least one symbol must be observed, but all are missing"):
            merge_rare(shorter, float(fraction), "rest")
        return
    made = merge_rare(shorter, float(fraction), "rest")
    assert made.names == names
    assert unpack(made) == expected
    starts = np.cumsum([0, *map(len, sequences)])
    assert made.states.tolist() == [starts[n] + t for n, sequence in enumerate(expected) for t in range(len(sequence))]


def test_the_threshold_is_exact_and_not_reached():
    """One "b" of 10 symbols is a tenth, which is not less than 0.1. In floating point, 0.1 * 3 is more than 0.3."""
    assert merge_rare(pack([["a"] * 9, ["b"]]), 0.1, "rest").names == ["a", "b"]
    assert merge_rare(pack([["a"] * 9, ["b"]]), 0.11, "rest").names == ["rest", "a"]
    assert merge_rare(pack([["a"] * 7, ["b"] * 3]), 0.3, "rest").names == ["a", "b"]


def test_of_equally_rare_symbols_the_first_by_name_goes_first():
    assert merge_rare(pack([["a"] * 8, ["d", "c"]]), 0.15, "rest").names == ["rest", "a", "d"]


def test_a_given_vocabulary_keeps_its_order_and_takes_strangers_as_the_residual_symbol():
    made = encode(pack([["a", "b", None, "e"]]), ["b", "rest", "a", "x"], "rest")
    assert made.numbers.tolist() == [2, 0, MISSING, 1]
    with pytest.raises(ValueError, match="Symbols must be in `vocabulary`, but 'e' is not"):
        encode(pack([["a", "b", None, "e"]]), ["a", "b"], "rest")
