"""The observed columns of a composed HMM: from its options, from data, and matched by name with those of new data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_hmm.columns import Column, are_named, as_columns, feature_columns, symbol_column
from lightning_hmm.conversion import frame_columns, frame_values
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.sequences import Sequences


def columns_from_options(
    columns: Sequence[Column | Mapping[str, Any]] | None,
    num_symbols: int | None,
    num_features: int | None,
    names: Sequence[str] | None,
) -> list[Column] | None:
    """Returns the columns that the options of a model describe, or ``None`` if they describe none."""
    check_counts(num_symbols=num_symbols, num_features=num_features)
    if columns is not None:
        return as_columns(columns)
    if num_symbols is not None and num_features is not None:
        raise ValueError(
            "`num_symbols` is for sequences of symbols and `num_features` for real vectors, but both are given. "
            "Give one of them, or `columns` for columns of both kinds."
        )
    if num_symbols is not None:
        if names is not None and len(names) != num_symbols:
            raise ValueError(f"`symbol_names` must name {num_symbols} symbols, but names {len(names)} instead.")
        return symbol_column(num_symbols, names)
    return None if num_features is None else feature_columns(num_features)


def columns_from_data(parts: Sequence[Sequences]) -> list[Column]:
    """Returns columns for data without a description: real columns, or one of the symbols from 0 to the largest."""
    features = parts[0].num_features
    if features is not None:
        return feature_columns(features)
    return symbol_column(1 + max(int(part.values.max()) for part in parts if part.num_steps))


def arrays_of_frames(frames: Sequence[Any], columns: list[Column] | None) -> tuple[list[Column], list[np.ndarray]]:
    """Returns the columns and values of DataFrames.

    If the `columns` of the model have names, these columns are selected. Otherwise all columns are used, and there must
    be as many as the model has.
    """
    selected = columns if columns is not None and are_named(columns) else frame_columns(frames)
    if columns is not None and len(selected) != len(columns):
        names = ", ".join(column.name for column in selected)
        raise ValueError(f"The data must have {len(columns)} columns, but have {len(selected)}: {names}.")
    return selected, [frame_values(frame, selected, n) for n, frame in enumerate(frames)]


def reorder_columns(data: Sequences, columns: list[Column]) -> Sequences:
    """Returns the data with their columns in the order of the model, if both have names."""
    if data.columns is None or not are_named(columns) or data.columns == tuple(columns):
        return data
    names, wanted = [column.name for column in data.columns], [column.name for column in columns]
    if sorted(names) != sorted(wanted):
        raise ValueError(f"The data must have the columns {', '.join(wanted)}, but have {', '.join(names)}.")
    return data.with_values(data.values[:, [names.index(name) for name in wanted]]).with_columns(columns)
