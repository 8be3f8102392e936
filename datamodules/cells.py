"""The cells of a table as numbers and names; every mistake is reported with its place."""

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
NUMBERS_REMEDY = "Set `columns` to those of numbers, `categorical_columns` to those of names, `missing_token` to what means missing, or `kind` to 'symbols'."
SYMBOLS_REMEDY = "To take them as names, set `vocabulary` or `unknown`."


def is_token(column: pa.Array, token: str, numeric: bool) -> pa.Array:
    """Which values are the token: the same text but for blanks around it or, if `numeric`, the same number."""
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
    """One Arrow type for each kind of value: names, whole numbers, numbers; lists as they are."""
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
    raise pa.ArrowInvalid(f"a column of {kind}, where names, numbers or lists of them are needed.")


def from_text(column: pa.Array) -> pa.Array:
    """Names as whole numbers, or else as numbers; and as they are if one of them is neither."""
    trimmed = pc.utf8_trim_whitespace(column)
    numbers = pc.if_else(pc.is_in(trimmed, NO_NUMBER), None, trimmed)
    if pc.any(pc.match_substring(numbers, "x", ignore_case=True)).as_py():  # 0x1F, which Arrow would take for 31
        return column
    numbers = pc.replace_substring_regex(numbers, r"^\+([0-9])", r"\1")  # Arrow reads a plus sign in real numbers alone
    for kind in (pa.int64(), pa.float64()):
        with contextlib.suppress(pa.ArrowException):
            return numbers.cast(kind)
    return column


def numbers(
    column: pa.Array, place: Callable[[int], str], what: str = "Vectors", remedy: str = NUMBERS_REMEDY
) -> np.ndarray:
    """(steps,) float64, NaN where missing; `what` they are and a `remedy` are for errors."""
    column = from_text(column) if is_text(column) else column
    if is_text(column):
        step = bisect.bisect_left(range(len(column)), True, key=lambda last: is_text(from_text(column[: last + 1])))
        raise ValueError(f"{what} must be numbers, but {place(step)} has {column[step].as_py()!r} instead. {remedy}")
    found: np.ndarray = column.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    if np.any(infinite := np.isinf(found)):
        step = int(np.argmax(infinite))
        raise ValueError(
            f"{what} must be finite, but {place(step)} has {found[step]} instead. Set `missing_token` to it if it means missing."
        )
    return found


def vectors(column: pa.Array, clean: Callable[[pa.Array], pa.Array], place: Callable[[int], str]) -> np.ndarray:
    """(steps, features) float64 of a column of lists, NaN where missing."""
    there = column.is_valid().to_numpy(zero_copy_only=False)
    sizes = pc.list_value_length(column).fill_null(0).to_numpy()
    size = int(sizes[there][0]) if there.any() else 1
    if np.any(wrong := there & (sizes != size)):
        raise ValueError(
            f"Vectors must have {size} features like the first, but {place(int(np.argmax(wrong)))} has one of {sizes[wrong][0]} instead."
        )
    entries = plain(column.flatten())
    if is_list(entries.type):
        raise ValueError(
            f"Vectors must hold numbers, but those in {place(int(np.argmax(there)))} hold lists instead. Choose another column with `columns`."
        )
    found = np.full((len(column), size), np.nan)
    found[there] = numbers(clean(entries), lambda entry: place(int(np.flatnonzero(there)[entry // size]))).reshape(
        -1, size
    )
    return found


class Codes(NamedTuple):
    """A column of names or whole numbers.

    numbers: (steps,) int64, -1 where missing; where there are names, those of the sorted names.
    names: the names that occur, sorted; ``None`` if the column holds whole numbers.
    places: where each name first occurs.
    """

    numbers: np.ndarray
    names: list[str] | None = None
    places: list[str] | None = None


def codes(
    column: pa.Array,
    place: Callable[[int], str],
    rule: str = "Symbols must be whole numbers",
    remedy: str = SYMBOLS_REMEDY,
) -> Codes:
    """A column of names, or of whole numbers from 0, as numbers; what the `rule` is and a `remedy` are for errors."""
    if not is_text(column):
        values = column.fill_null(MISSING).to_numpy()
        if np.any(wrong := (values != np.floor(values)) | (values < MISSING) | np.isinf(values)):
            step = int(np.argmax(wrong))
            raise ValueError(
                f"{rule} from 0, or {MISSING} for a missing one, but {place(step)} has {values[step]} instead. {remedy}".rstrip()
            )
        return Codes(values.astype(np.int64))
    encoded = column.dictionary_encode()
    numbers, found = encoded.indices.fill_null(MISSING).to_numpy().astype(np.int64), encoded.dictionary.to_pylist()
    observed = np.flatnonzero(numbers != MISSING)
    steps = np.empty(len(found), np.int64)
    steps[numbers[observed[::-1]]] = observed[::-1]  # the last written stays: the first occurrence
    order = sorted(range(len(found)), key=found.__getitem__)
    ranks = np.empty(len(found) + 1, np.int64)
    ranks[[*order, MISSING]] = [*range(len(found)), MISSING]
    return Codes(ranks[numbers], [found[i] for i in order], [place(int(steps[i])) for i in order])


def flattened(column: pa.Array, lengths: np.ndarray | None, name: str, path: Path) -> pa.Array:
    """The steps of a column that comes with the values.

    Args:
        column: one cell for each row, or one list for each row.
        lengths: (rows,) the number of steps in each row if the values are lists, else ``None``.
        name: of the column, for errors.
        path: of the file, for errors.
    """
    if lengths is None:
        if is_list(column.type):
            raise ValueError(
                f"Column {name!r} must hold one value in each row, as the columns of values do, but holds lists in {path}."
            )
        return column
    if not is_list(column.type):
        raise ValueError(
            f"Column {name!r} must hold lists, as the column of values does, but holds {column.type} in {path}."
        )
    found = pc.list_value_length(column).fill_null(-1).to_numpy()
    if np.any(wrong := found != lengths):
        row = int(np.argmax(wrong))
        entries = "is null" if found[row] < 0 else f"has {found[row]}"
        raise ValueError(
            f"Column {name!r} must have one entry for each step, but row {row + 1} of {path} has {lengths[row]} steps and {entries}."
        )
    return column.flatten()


def is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_large_string(column.type))


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
