"""Descriptions of observed columns, and checks of the other columns of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.vocabulary import MISSING

STEP_COLUMNS = ("labels", "inputs", "times", "actions", "state_weights")


@dataclass(frozen=True)
class Column:
    """One observed column.

    Args:
        name: Name of the column.
        kind: "categorical" for symbols, "real" for numbers.
        categories: Names of the categories of a categorical column in the order of their numbers, or the number of
            categories.

    Example:
        >>> weather = Column("weather", "categorical", ("rain", "sun"))
        >>> weather.num_categories
        2
        >>> Column("temperature").is_categorical
        False
    """

    name: str
    kind: Literal["categorical", "real"] = "real"
    categories: tuple[str, ...] | int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"`name` of a column must be a string, but is {self.name!r} instead.")
        if self.kind not in ("categorical", "real"):
            raise ValueError(
                f"`kind` of column {self.name!r} must be categorical or real, but is {self.kind!r} instead."
            )
        if self.kind == "real":
            if self.categories is not None:
                raise ValueError(
                    f"`categories` are for categorical columns, but column {self.name!r} is real. Leave them out."
                )
            return
        if isinstance(self.categories, list):
            object.__setattr__(self, "categories", tuple(self.categories))
        if (
            isinstance(self.categories, bool)
            or not isinstance(self.categories, (int, tuple))
            or not self.num_categories
            or self.num_categories < 1
        ):
            raise ValueError(
                f"`categories` of column {self.name!r} must be names or a positive number, "
                f"but is {self.categories!r} instead."
            )
        if isinstance(self.categories, tuple) and (twice := _repeated(self.categories)) is not None:
            raise ValueError(
                f"`categories` of column {self.name!r} must all be different, but {twice!r} occurs more than once."
            )

    @property
    def is_categorical(self) -> bool:
        """Whether the column contains categories."""
        return self.kind == "categorical"

    @property
    def num_categories(self) -> int | None:
        """Number of categories; ``None`` for a real column."""
        return len(self.categories) if isinstance(self.categories, tuple) else self.categories

    @property
    def category_names(self) -> list[str] | None:
        """Names of the categories, if they have names."""
        return list(self.categories) if isinstance(self.categories, tuple) else None


def as_columns(columns: Iterable[Column | Mapping[str, Any]]) -> list[Column]:
    """Returns columns given as `Column` or as dictionaries of its fields. Their names must be different."""
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ValueError(f"`columns` must be a list of `Column`, but is {columns!r} instead.")
    found = []
    for number, column in enumerate(columns):
        if not isinstance(column, (Column, Mapping)):
            raise ValueError(
                f"`columns` must be `Column` or dictionaries of its fields, but item {number} is {column!r} instead."
            )
        if isinstance(column, Mapping) and (
            strange := [key for key in column if key not in ("name", "kind", "categories")]
        ):
            raise ValueError(
                f"`columns` must have the fields name, kind and categories, but item {number} has {strange[0]!r}."
            )
        if isinstance(column, Mapping) and "name" not in column:
            raise ValueError(f"`columns` must have names, but item {number} has none.")
        found.append(column if isinstance(column, Column) else Column(**column))
    if not found:
        raise ValueError("`columns` must hold at least one column, but is empty.")
    if (twice := _repeated([column.name for column in found])) is not None:
        raise ValueError(f"`columns` must have different names, but {twice!r} occurs more than once.")
    return found


def symbol_column(num_symbols: int, names: Sequence[str] | None = None) -> list[Column]:
    """Returns the only column of sequences of symbols. `names` are the names of the symbols."""
    if names is not None and len(names) != num_symbols:
        raise ValueError(f"`names` must hold the names of {num_symbols} symbols, but holds {len(names)} names.")
    return [Column("symbol", "categorical", num_symbols if names is None else tuple(names))]


def feature_columns(num_features: int, names: Sequence[str] | None = None) -> list[Column]:
    """Returns one column per entry of real vectors. The default names are feature_0, feature_1, and so on."""
    if names is not None and len(names) != num_features:
        raise ValueError(f"`names` must hold the names of {num_features} features, but holds {len(names)} names.")
    return [Column(name) for name in (names or [f"feature_{number}" for number in range(num_features)])]


def are_named(columns: Sequence[Column]) -> bool:
    """Whether the names of the columns differ from the default names of `feature_columns`."""
    return [column.name for column in columns] != [column.name for column in feature_columns(len(columns))]


def _repeated(names: Sequence[str]) -> str | None:
    """Returns the first name that occurs more than once, if there is one."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def symbol_dtype(num_symbols: int) -> np.dtype:
    """Returns the narrowest of int8, int16, int32 and int64 for the symbols below `num_symbols` and -1."""
    return np.min_scalar_type(-max(num_symbols, 1))


def narrowest(symbols: Tensor) -> Tensor:
    """Converts whole numbers to the narrowest of int8, int16, int32 and int64 that can represent them."""
    if symbols.dtype == torch.int8 or not len(symbols):
        return symbols.to(torch.int8)
    least, most = (int(number) for number in symbols.aminmax())
    dtypes = (torch.int8, torch.int16, torch.int32, torch.int64)
    return symbols.to(
        next(dtype for dtype in dtypes if torch.iinfo(dtype).min <= least and most <= torch.iinfo(dtype).max)
    )


def as_step_column(name: str, column: Tensor, num_steps: int, device: torch.device) -> Tensor:
    """Converts a per-step column to the dtype of `Sequences`: int64, floating point for inputs, otherwise float64.

    Args:
        name: One of `STEP_COLUMNS`.
        column: (steps,) numbers, or (steps, M) for inputs and state weights.
        num_steps: Required number of steps.
        device: Device of the result.
    """
    whole, is_matrix = name in ("labels", "actions"), name in ("inputs", "state_weights")
    if whole and column.is_floating_point():
        raise ValueError(f"`{name}` must be whole numbers, but are {str(column.dtype).removeprefix('torch.')} instead.")
    if is_matrix:
        column = column.unsqueeze(1) if column.dim() == 1 else column
        keeps = name == "inputs" and column.dtype == torch.float32
        column = column if keeps else column.double()
    else:
        column = column.squeeze(1) if column.dim() == 2 and column.shape[1] == 1 else column
        column = column.long() if whole else column.double()
    shape = (num_steps, *column.shape[1:]) if is_matrix and column.dim() == 2 else (num_steps,)
    if column.shape != shape:
        wanted = f"({num_steps}, {'M' if name == 'inputs' else 'K'})" if is_matrix else f"({num_steps},)"
        raise ValueError(
            f"`{name}` must have shape {wanted}, one entry for each step, but has shape {tuple(column.shape)} instead."
        )
    return column.to(device)


def check_categories(values: Tensor, columns: Sequence[Column], locate: Callable[[int], tuple[int, int]]) -> None:
    """Raises a `ValueError` if a categorical column contains anything but NaN and the numbers of its categories.

    Args:
        values: (steps, C) values of all columns.
        columns: Descriptions of the C columns.
        locate: Function that returns the sequence of a packed step and the position in it.
    """
    for number, column in enumerate(columns):
        if column.num_categories is None:
            continue
        entries = values[:, number]
        wrong = ~entries.isnan() & ((entries < 0) | (entries >= column.num_categories) | (entries != entries.floor()))
        if bool(wrong.any()):
            step = int(torch.nonzero(wrong)[0, 0])
            n, t = locate(step)
            raise ValueError(
                f"Column {column.name!r} must hold the whole numbers 0 to {column.num_categories - 1}, "
                f"or NaN for a missing one, but position {t} of sequence {n} has {float(entries[step]):g} instead."
            )


def check_step_column(name: str, column: Tensor, offsets: Tensor, locate: Callable[[int], tuple[int, int]]) -> None:
    """Raises a `ValueError` for an invalid entry. The message names the column, the sequence and the step.

    Args:
        name: One of `STEP_COLUMNS`.
        column: (steps,) or (steps, M) column, as returned by `as_step_column`.
        offsets: (N + 1,) offsets of the sequences.
        locate: Function that returns the sequence of a packed step and the position in it.
    """

    def first(wrong: Tensor) -> tuple[int, str] | None:
        if not bool(wrong.any()):
            return None
        step = int(torch.nonzero(wrong)[0, 0])
        n, t = locate(step)
        return step, f"position {t} of sequence {n}"

    if name in ("labels", "actions"):
        least = MISSING if name == "labels" else 0
        if found := first(column < least):
            rule = (
                f"must be whole numbers from 0, or {MISSING} for an unknown one"
                if name == "labels"
                else "must be whole numbers from 0"
            )
            raise ValueError(f"`{name}` {rule}, but {found[1]} has {int(column[found[0]])} instead.")
        return
    if name == "state_weights":
        if found := first(~(column.isfinite() & (column >= 0))):
            state = int(torch.nonzero(~(column[found[0]].isfinite() & (column[found[0]] >= 0)))[0, 0])
            weight = float(column[found[0], state])
            raise ValueError(
                f"`state_weights` must be finite and not negative, but that of state {state} at {found[1]} is {weight}."
            )
        if found := first(column.sum(1) == 0):
            raise ValueError(
                f"`state_weights` must have a positive entry at each step, but {found[1]} has none. Use equal weights "
                "where nothing is known."
            )
        return
    if found := first(~column.isfinite()):
        entry = column[found[0]]
        if name == "times":
            raise ValueError(f"`times` must be finite, but {found[1]} has {float(entry)} instead.")
        number = int(torch.nonzero(~entry.isfinite())[0, 0])
        raise ValueError(
            f"`inputs` must be finite, but input {number} at {found[1]} is {float(entry[number])} instead."
        )
    if name == "times" and len(column) > 1:
        falls = torch.zeros(len(column), dtype=torch.bool)
        falls[1:] = column.diff() < 0
        starts = offsets[:-1]
        falls[starts[starts < len(column)]] = False
        if found := first(falls):
            earlier, later = float(column[found[0] - 1]), float(column[found[0]])
            raise ValueError(
                f"`times` must not decrease within a sequence, but {found[1]} has {later!r} after {earlier!r}."
            )
