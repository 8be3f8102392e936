"""Converts the cells of a table to numbers and names. Errors name the row of the wrong cell."""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_hmm.vocabulary import MISSING

NO_NUMBER = pa.array(["", "NaN", "nan", "null"], pa.large_string())
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:inf|infinity)$"
NUMBERS_REMEDY = (
    "Set `columns` to numeric columns, `categorical_columns` to columns of names, `missing_token` to the mark of a "
    "missing value, or `kind` to 'symbols'."
)
SYMBOLS_REMEDY = "To read them as names, set `vocabulary` or `unknown`."


def is_token(column: pa.Array, token: str, numeric: bool) -> pa.Array:
    """Returns which values equal the token: as text without surrounding blanks or, if `numeric`, as a number."""
    bare = token.strip() or token
    number = Decimal(bare) if numeric and re.match(NUMBER, bare) else None
    if is_text(column):
        trimmed = pc.utf8_trim_whitespace(column)
        found = pc.or_(pc.equal(column, token), pc.equal(trimmed, bare))
        if number is not None:
            numbers = pc.if_else(pc.match_substring_regex(trimmed, NUMBER), trimmed, None).cast(pa.float64())
            found = pc.or_(found, pc.equal(numbers, float(number)).fill_null(False))
        return found
    if number is not None and pa.types.is_floating(column.type):
        return pc.equal(column, float(number))
    if number is not None and abs(number) < 2**63 and number == int(number):
        return pc.equal(column, int(number))
    return pa.array(np.zeros(len(column), bool))


def plain(column: pa.Array) -> pa.Array:
    """Casts names to `large_string`, integers to `int64` and real numbers to `float64`; lists are not changed."""
    column = column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        column = column.cast(pa.float64())
        return pc.if_else(pc.is_nan(column), None, column)
    if is_list(kind):
        return column
    raise pa.ArrowInvalid(f"a column of {kind} is neither names, numbers nor lists of them.")


def from_text(column: pa.Array) -> pa.Array:
    """Converts text to integers or, if that fails, to real numbers. Returns the text if one cell is not a number."""
    trimmed = pc.utf8_trim_whitespace(column)
    numbers = pc.if_else(pc.is_in(trimmed, NO_NUMBER), None, trimmed)
    if pc.any(pc.match_substring(numbers, "x", ignore_case=True)).as_py():
        return column  # Arrow would read 0x1F as the number 31.
    numbers = pc.replace_substring_regex(numbers, r"^\+([0-9])", r"\1")  # Arrow reads no integers with a plus sign.
    for kind in (pa.int64(), pa.float64()):
        with contextlib.suppress(pa.ArrowException):
            return numbers.cast(kind)
    return column


def numbers(
    column: pa.Array, place: Callable[[int], str], what: str = "Vectors", remedy: str = NUMBERS_REMEDY
) -> np.ndarray:
    """Returns a column as float64 of shape (steps,), with NaN for missing values.

    Args:
        column: Cells of the column.
        place: Function that returns the location of a step, for errors.
        what: Subject of an error message.
        remedy: Last sentence of an error message.
    """
    column = from_text(column) if is_text(column) else column
    if is_text(column):
        step = bisect.bisect_left(range(len(column)), True, key=lambda last: is_text(from_text(column[: last + 1])))
        raise ValueError(f"{what} must be numbers, but {place(step)} has {column[step].as_py()!r} instead. {remedy}")
    found: np.ndarray = column.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    if np.any(infinite := np.isinf(found)):
        step = int(np.argmax(infinite))
        raise ValueError(
            f"{what} must be finite, but {place(step)} has {found[step]} instead. "
            "If it means a missing value, set `missing_token` to it."
        )
    return found


def vectors(column: pa.Array, clean: Callable[[pa.Array], pa.Array], place: Callable[[int], str]) -> np.ndarray:
    """Returns a column of lists as float64 of shape (steps, features), with NaN for missing values."""
    there = column.is_valid().to_numpy(zero_copy_only=False)
    sizes = pc.list_value_length(column).fill_null(0).to_numpy()
    size = int(sizes[there][0]) if there.any() else 1
    if np.any(wrong := there & (sizes != size)):
        raise ValueError(
            f"Vectors must have {size} features like the first, but {place(int(np.argmax(wrong)))} has "
            f"{sizes[wrong][0]} instead."
        )
    entries = plain(column.flatten())
    if is_list(entries.type):
        raise ValueError(
            f"Vectors must contain numbers, but {place(int(np.argmax(there)))} contains nested lists. "
            "Choose another column with `columns`."
        )
    found = np.full((len(column), size), np.nan)
    found[there] = numbers(clean(entries), lambda entry: place(int(np.flatnonzero(there)[entry // size]))).reshape(
        -1, size
    )
    return found


class Codes(NamedTuple):
    """A column of names or integers.

    numbers: (steps,) int64 integers, or indices into `names`; -1 for a missing value.
    names: Names that occur, sorted, or ``None`` for a column of integers.
    places: Location of the first occurrence of each name.
    """

    numbers: np.ndarray
    names: list[str] | None = None
    places: list[str] | None = None


def codes(
    column: pa.Array,
    place: Callable[[int], str],
    rule: str = "Symbols must be integers",
    remedy: str = SYMBOLS_REMEDY,
) -> Codes:
    """Converts a column of names, or of integers from 0, to indices.

    Args:
        column: Cells of the column.
        place: Function that returns the location of a step, for errors.
        rule: Beginning of an error message.
        remedy: Last sentence of an error message.
    """
    if not is_text(column):
        values = column.fill_null(MISSING).to_numpy()
        if np.any(wrong := (values != np.floor(values)) | (values < MISSING) | np.isinf(values)):
            step = int(np.argmax(wrong))
            raise ValueError(
                f"{rule} from 0, or {MISSING} for a missing value, but {place(step)} has {values[step]} instead. "
                f"{remedy}".rstrip()
            )
        return Codes(values.astype(np.int64))
    encoded = column.dictionary_encode()
    numbers, found = encoded.indices.fill_null(MISSING).to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
    observed = np.flatnonzero(numbers != MISSING)
    steps = np.empty(len(found), np.int64)
    steps[numbers[observed[::-1]]] = observed[::-1]  # Later writes win, so each name keeps its first occurrence.
    order = sorted(range(len(found)), key=found.__getitem__)
    ranks = np.empty(len(found) + 1, np.int64)
    ranks[[*order, MISSING]] = [*range(len(found)), MISSING]
    return Codes(ranks[numbers], [found[i] for i in order], [place(int(steps[i])) for i in order])


def flattened(column: pa.Array, lengths: np.ndarray | None, name: str, path: Path) -> pa.Array:
    """Returns one cell per step of a column that accompanies the values.

    Args:
        column: One cell per row, or one list per row.
        lengths: (rows,) number of steps in each row if the values are lists, else ``None``.
        name: Name of the column, for errors.
        path: Path of the file, for errors.
    """
    if lengths is None:
        if is_list(column.type):
            raise ValueError(
                f"Column {name!r} must contain one value per row like the values, but contains lists in {path}."
            )
        return column
    if not is_list(column.type):
        raise ValueError(f"Column {name!r} must contain lists like the values, but contains {column.type} in {path}.")
    found = pc.list_value_length(column).fill_null(-1).to_numpy()
    if np.any(wrong := found != lengths):
        row = int(np.argmax(wrong))
        entries = "is null" if found[row] < 0 else f"has {found[row]}"
        raise ValueError(
            f"Column {name!r} must have one entry per step, but row {row + 1} of {path} has {lengths[row]} steps and "
            f"{entries}."
        )
    return column.flatten()


def is_text(column: pa.Array) -> bool:
    """Returns whether the cells of a column of `plain` are names."""
    return bool(pa.types.is_large_string(column.type))


def is_list(kind: pa.DataType) -> bool:
    """Returns whether a type is a list of fixed or variable size."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
