"""Conversion of lists, arrays, pandas objects and Arrow columns into packed steps. Error messages name the sequence."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lightning_hmm.columns import Column, as_columns
from lightning_hmm.vocabulary import MISSING


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """Returns a tensor that shares memory with the array.

    `torch.as_tensor` warns if the memory is read-only, as in a memory-mapped file. The package never writes to it.
    """
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        try:
            return from_dlpack(values)
        except BufferError:  # NumPy before 2.1 does not export read-only memory.
            values = values.copy()
    return torch.as_tensor(values)


def as_list(data: Any) -> Sequence[Any]:
    """Returns the sequences in a list, array, tensor, DataFrame or Series as a list; see `Sequences.from_list`."""
    refuse_one_string(data)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        shown = repr(data)
        raise ValueError(
            f"`sequences` must be a list of sequences, but is {shown if len(shown) <= 60 else shown[:57] + '...'} "
            "instead."
        )
    given, data = data, from_pandas(data)
    if data is not given and data.dtype.kind != "O":
        return [data]
    if isinstance(data, Tensor):
        data = data.detach().cpu().numpy()
    if not isinstance(data, np.ndarray):
        return [from_pandas(sequence) for sequence in data]
    if data.ndim < 2 and (
        data.dtype.kind != "O" or any(isinstance(item, str) or not hasattr(item, "__len__") for item in data.flat)
    ):
        raise ValueError(
            f"`sequences` must be a list of sequences, but is an array of shape {data.shape} instead. For one sequence "
            "give a list of one, `[X]`. "
            "For names of symbols use `Sequences.from_strings` with a vocabulary."
        )
    if data.ndim == 2 and data.dtype.kind == "O" and any(isinstance(item, (float, np.floating)) for item in data.flat):
        data = _without_none(list(data), 0)
    if data.ndim == 2 and data.dtype.kind == "f":
        return [data]
    if data.ndim == 2 and data.shape[1] == 1:
        raise ValueError(
            f"`sequences` must not be a single column of symbols, but has shape {data.shape}, which could be one "
            f"sequence or {len(data)}. "
            "Use `Sequences.from_lengths(X, lengths)` with the length of each sequence, or give shape (1, "
            f"{len(data)}) for one sequence."
        )
    return list(data)


def refuse_one_string(data: Any, name: str = "sequences") -> None:
    """Raises a `ValueError` for a string, whose characters would otherwise be read as sequences."""
    if isinstance(data, str):
        raise ValueError(
            f"`{name}` must be a list of sequences, but is the string {data[:20]!r} instead. For one sequence give a "
            "list of one."
        )


def from_pandas(data: Any) -> Any:
    """Converts a DataFrame or Series into an array of numbers, or of objects for a Series that contains no numbers.

    Other data are returned unchanged.
    """
    pandas = sys.modules.get("pandas")  # If pandas is not imported, the data cannot be pandas objects.
    if pandas is None or not isinstance(data, (pandas.DataFrame, pandas.Series)):
        return data
    kinds = pandas.api.types
    table = data.to_frame() if isinstance(data, pandas.Series) else data
    for name, kind in table.dtypes.items():
        if not kinds.is_numeric_dtype(kind):
            if table is not data:
                return data.to_numpy(object)
            raise ValueError(
                f"A DataFrame must hold numbers, but column {name!r} holds {kind} instead. Select the columns of "
                "numbers, as in `df[['x', 'y']]`. "
                f"For names of symbols use `Sequences.from_strings([df[{name!r}]], vocabulary)`."
            )
    if table.shape[1] == 1 and (
        kinds.is_integer_dtype(table.dtypes.iloc[0]) or kinds.is_bool_dtype(table.dtypes.iloc[0])
    ):
        return table.iloc[:, 0].to_numpy(np.int64, na_value=MISSING)
    return table.to_numpy(np.float64, na_value=np.nan)


def frames_of(data: Any) -> list[Any] | None:
    """Returns the DataFrames in the data, one or a list of them; ``None`` for other data."""
    pandas = sys.modules.get("pandas")  # If pandas is not imported, the data cannot be pandas objects.
    if pandas is None:
        return None
    frames = [data] if isinstance(data, pandas.DataFrame) else data if isinstance(data, (list, tuple)) else []
    return list(frames) if frames and all(isinstance(frame, pandas.DataFrame) for frame in frames) else None


def frame_columns(frames: Sequence[Any]) -> list[Column]:
    """Returns the columns of DataFrames. Columns of names are categorical, with the sorted names as categories."""
    import pandas

    columns = []
    for name in frames[0].columns:
        entries = [frame[name] for frame in frames if name in frame.columns]
        if all(pandas.api.types.is_numeric_dtype(part.dtype) for part in entries):
            columns.append(Column(str(name)))
            continue
        if any(pandas.api.types.is_datetime64_any_dtype(part.dtype) for part in entries):
            raise ValueError(
                f"The columns of a DataFrame must hold numbers or names, but {name!r} holds dates. Leave it out, or "
                "convert it into numbers."
            )
        names = tuple(sorted({str(entry) for part in entries for entry in part.dropna()}))
        if not names:
            raise ValueError(
                f"Every column must be observed somewhere, but {name!r} is missing at every step. Leave the column out."
            )
        columns.append(Column(str(name), "categorical", names))
    return as_columns(columns)


def frame_values(frame: Any, columns: Sequence[Column], index: int) -> np.ndarray:
    """Returns the (steps, columns) values of a DataFrame, with categories as numbers. Columns are matched by name.

    Args:
        frame: DataFrame with one row per step.
        columns: Columns of the model or the training data, in the order of the result.
        index: Number of the sequence, for error messages.
    """
    import pandas

    given, wanted = [str(name) for name in frame.columns], [column.name for column in columns]
    listing = f"columns {', '.join(map(repr, wanted))}"
    if len(set(given)) < len(given):
        twice = next(name for name in given if given.count(name) > 1)
        raise ValueError(f"The columns of a DataFrame must have different names, but {twice!r} occurs more than once.")
    for name in wanted:
        if name not in given:
            raise ValueError(
                f"The data must have the {listing}, but sequence {index} has no column {name!r}. Its columns are "
                f"{', '.join(map(repr, given))}."
            )
    for name in given:
        if name not in wanted:
            raise ValueError(
                f"The data must have the {listing}, but sequence {index} also has {name!r}. Select the columns, as in "
                f"`df[{wanted!r}]`."
            )
    found = []
    for column in columns:
        entries = frame.iloc[:, given.index(column.name)]
        names, numeric = column.category_names, pandas.api.types.is_numeric_dtype(entries.dtype)
        if names is None and not numeric:
            raise ValueError(
                f"Column {column.name!r} must hold numbers, but holds {entries.dtype} in sequence {index}."
            )
        if names is None or (numeric and bool(entries.isna().all())):
            found.append(entries.to_numpy(np.float64, na_value=np.nan))
            continue
        places = {name: number for number, name in enumerate(names)}
        strange = next((entry for entry in entries.dropna() if str(entry) not in places), None)
        if strange is not None:
            known = ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            raise ValueError(
                f"Column {column.name!r} must hold the categories of training, {known}, but sequence {index} holds "
                f"{strange!r}."
            )
        found.append(
            np.array(
                [
                    np.nan if missing else places[str(entry)]
                    for entry, missing in zip(entries, entries.isna(), strict=True)
                ],
                np.float64,
            )
        )
    return np.column_stack(found) if len(frame) else np.zeros((0, len(columns)))


def as_reals(data: Any) -> Any:
    """Converts whole numbers into real numbers, in a tensor, an array or a list of sequences.

    A one-dimensional array becomes a single column. Other data are returned unchanged.
    """
    data = _real_series(data)
    if isinstance(data, (Tensor, np.ndarray)) and data.ndim and _is_whole(data):
        data = data.double() if isinstance(data, Tensor) else data.astype(np.float64)
    if isinstance(data, (Tensor, np.ndarray)) and data.ndim == 1 and _is_number(data):
        return data[:, None]
    if isinstance(data, (list, tuple)):
        return [_real_sequence(sequence) for sequence in data]
    return data


def _real_series(data: Any) -> Any:
    """Converts a Series of numbers into an array of real numbers. Other data are returned unchanged."""
    pandas = sys.modules.get("pandas")
    is_series = pandas is not None and isinstance(data, pandas.Series) and pandas.api.types.is_numeric_dtype(data.dtype)
    return data.to_numpy(np.float64, na_value=np.nan) if is_series else data


def _real_sequence(sequence: Any) -> Any:
    sequence = _real_series(sequence)
    if isinstance(sequence, (Tensor, np.ndarray)):
        if not _is_whole(sequence):
            return sequence
        real: Any = (
            sequence.double() if isinstance(sequence, Tensor) else np.ma.filled(sequence.astype(np.float64), np.nan)
        )
        return real
    if isinstance(sequence, (list, tuple)) and len(sequence):
        array = np.asarray(sequence, object) if any(entry is None for entry in sequence) else None
        if array is None:
            try:
                array = np.asarray(sequence)
            except ValueError:  # steps of different shapes, which an error names later
                return sequence
        if array.dtype.kind in "iub":
            return array.astype(np.float64)
        if array.dtype.kind == "O" and all(entry is None or isinstance(entry, (int, float)) for entry in array.flat):
            return np.array([np.nan if entry is None else float(entry) for entry in array])
    return sequence


def _is_whole(values: Tensor | np.ndarray) -> bool:
    return (
        not values.is_floating_point() and not values.is_complex()
        if isinstance(values, Tensor)
        else values.dtype.kind in "iub"
    )


def _is_number(values: Tensor | np.ndarray) -> bool:
    return not values.is_complex() if isinstance(values, Tensor) else values.dtype.kind in "iubf"


def filled(array: np.ndarray) -> np.ndarray:
    """Replaces masked entries by -1 or NaN."""
    whole: np.ndarray = np.ma.filled(array, np.nan if array.dtype.kind == "f" else MISSING)
    return whole


def as_array(sequence: Any, index: int, name: str = "sequences") -> np.ndarray:
    """Converts one sequence into an array: int64 symbols (missing ones are masked), or real numbers with NaN.

    Args:
        sequence: List, array or tensor of symbols, numbers or vectors.
        index: Number of the sequence, for error messages.
        name: Name of the argument that contains the sequence, for error messages.
    """
    if isinstance(sequence, Tensor):
        sequence = sequence.detach().cpu().numpy()
    try:
        array = sequence if isinstance(sequence, np.ma.MaskedArray) else np.asarray(sequence)
    except ValueError:  # steps of different shapes
        array = np.empty(0, object)
    if array.dtype.kind == "O":
        array = _without_none(list(sequence), index)
    if array.dtype.kind not in "iubf":
        what = f"sequence {index} holds {array.dtype} instead"
        if array.dtype.kind not in "USO":
            raise ValueError(f"`{name}` must hold real numbers, but {what}.")
        remedy = (
            "For names of symbols use `Sequences.from_strings` with a vocabulary."
            if name == "sequences"
            else "Convert names into numbers first."
        )
        raise ValueError(f"`{name}` must hold numbers, but {what}. {remedy}")
    if array.ndim == 0:
        raise ValueError(
            f"`{name}` must be a list of sequences, but item {index} is a single number. For one sequence give a list "
            "of one."
        )
    if array.ndim > 2:
        raise ValueError(
            f"A sequence must have shape (steps,) or (steps, features), but sequence {index} has shape {array.shape} "
            "instead."
        )
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"`{name}` must hold symbols below 2^63, but sequence {index} holds {array.max()} instead.")
    if any(stride < 0 for stride in array.strides) or not array.dtype.isnative:  # torch takes neither
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return array if array.dtype.kind == "f" else array.astype(np.int64, copy=False)


def _without_none(steps: list[Any], index: int) -> np.ndarray:
    """Replaces ``None``: returns symbols as a masked array, and numbers and vectors with NaN."""
    widths = [
        None if step is None else len(step) if hasattr(step, "__len__") and not isinstance(step, str) else 0
        for step in steps
    ]  # 0: a number
    width = next((width for width in widths if width is not None), 0)
    if any(other not in (width, None) for other in widths):
        odd = next(t for t, other in enumerate(widths) if other not in (width, None))
        raise ValueError(
            f"Each step must have {width or 1} features like the first, but position {odd} of sequence {index} has "
            f"{widths[odd] or 1} instead."
        )
    if width:
        return np.asarray(
            [
                [float("nan") if entry is None else entry for entry in (step if step is not None else [None] * width)]
                for step in steps
            ]
        )
    if all(step is None or isinstance(step, (int, np.integer)) for step in steps):
        return np.ma.masked_array(
            [MISSING if step is None else step for step in steps], [step is None for step in steps], dtype=np.int64
        )
    return np.asarray([float("nan") if step is None else step for step in steps])


def as_vectors(array: np.ndarray) -> np.ndarray:
    """Converts one sequence into (steps, features) float32 or float64 numbers."""
    array = array.astype(np.float64) if array.dtype not in (np.float32, np.float64) else array
    array = np.ma.filled(array, np.nan)
    return array.reshape(len(array), -1) if len(array) else array


def brief(array: np.ndarray) -> str:
    """Returns a short description of numbers for error messages."""
    return (
        str(array.tolist()) if len(array) <= 8 else f"[{array[0]}, {array[1]}, ..., {array[-1]}] ({len(array)} numbers)"
    )


def packed_steps(steps: Any, name: str = "sequences") -> Tensor:
    """Converts an array, tensor, list, DataFrame or Series of all steps into a tensor. ``None`` becomes -1 or NaN."""
    return steps if isinstance(steps, Tensor) else as_tensor(filled(as_array(from_pandas(steps), 0, name)))


def packed_column(column: Any, lengths: Sequence[int], name: str) -> Tensor:
    """Packs a per-step column that is given per sequence.

    Args:
        column: One list, array or tensor per sequence, or one array, tensor, DataFrame or Series as in
            `Sequences.from_list`.
        lengths: (N,) number of steps of each sequence.
        name: Name of the column, for error messages.

    Returns:
        (steps,) or (steps, M) numbers. ``None`` becomes -1 or NaN.
    """
    refuse_one_string(column, name)
    column = from_pandas(column)
    if isinstance(column, Tensor):
        column = column.detach().cpu().numpy()
    if isinstance(column, np.ndarray) and column.dtype.kind != "O" and column.ndim < 3 and [*lengths] == [len(column)]:
        column = [column]  # an array of all steps of the only sequence
    arrays = [as_array(from_pandas(part), n, name) for n, part in enumerate(column)]
    if len(arrays) != len(lengths):
        raise ValueError(
            f"`{name}` must hold one list for each of the {len(lengths)} sequences, but holds {len(arrays)} instead."
        )
    for n, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if len(array) != length:
            raise ValueError(
                f"`{name}` must have one entry for each step, but sequence {n} has {length} steps and {len(array)} "
                "entries."
            )
    parts = [array for array in arrays if len(array)] or arrays[:1]
    if any(array.dtype.kind == "f" for array in parts):
        parts = [
            np.ma.filled(array.astype(np.float64), np.nan) if array.dtype.kind != "f" else filled(array)
            for array in parts
        ]
    shapes = [array.shape[1:] for array in parts]
    if len(set(shapes)) > 1:
        odd = next(n for n, array in enumerate(arrays) if len(array) and array.shape[1:] != shapes[0])
        raise ValueError(
            f"`{name}` must have the same number of entries at each step, but sequence {odd} has another than the "
            "first."
        )
    return torch.from_numpy(
        np.ascontiguousarray(np.concatenate([filled(array) for array in parts]) if parts else np.zeros(0, np.int64))
    )


def arrow_steps(column: Any, name: str = "column") -> tuple[Tensor, Tensor]:
    """Returns the packed steps and the offsets of an Arrow list column; see `Sequences.from_arrow`.

    Args:
        column: Arrow array or chunked array of lists.
        name: Name of the column, for error messages.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ChunkedArray):
        column = (
            column.chunk(0)
            if column.num_chunks == 1
            else pa.concat_arrays(column.chunks)
            if column.num_chunks
            else pa.array([], column.type)
        )
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise ValueError(f"`{name}` must be an Arrow list column, but is {column.type} instead.")
    if column.null_count:
        n = pc.index(column.is_null(), True).as_py()
        raise ValueError(
            f"`{name}` must have no null sequences, but sequence {n} is one. Use an empty list for an empty sequence."
        )
    offsets = column.offsets.to_numpy().astype(np.int64)
    offsets, flat = offsets - offsets[0], column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    width, given = None, None  # Number of features of a vector; mask of the steps with a vector, if some have none.
    if pa.types.is_fixed_size_list(flat.type) or pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type):
        if flat.null_count:
            given = flat.is_valid().to_numpy(zero_copy_only=False)
            flat = flat.drop_null()
        if pa.types.is_fixed_size_list(flat.type):
            width = flat.type.list_size
        else:
            inner = pc.list_value_length(flat).to_numpy()
            width = int(inner[0]) if len(inner) else 1
            if np.any(inner != width):
                step = np.flatnonzero(inner != width)[0] if given is None else np.flatnonzero(given)[inner != width][0]
                n = int(np.searchsorted(offsets, step, side="right")) - 1
                where = f"position {step - offsets[n]} of sequence {n}"
                raise ValueError(
                    f"`{name}` must hold vectors of {width} features like the first, but {where} has another number."
                )
        flat = flat.flatten()
    values = _arrow_numbers(flat, name, symbols=width is None)
    if values.is_floating_point():
        values = values.reshape(-1, width or 1)
    if given is not None:
        values = values.new_full((len(given), values.shape[1]), torch.nan).index_copy_(
            0, torch.from_numpy(np.flatnonzero(given)), values
        )
    return values, torch.from_numpy(offsets)


def _arrow_numbers(flat: Any, name: str, symbols: bool) -> Tensor:
    """Converts a flat Arrow array into a tensor, without a copy if its type allows it. Nulls become -1 or NaN.

    Args:
        flat: Arrow array of numbers.
        name: Name of the column, for error messages.
        symbols: Whether whole numbers are symbols. Otherwise they are converted into real numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = pa.types
    if not any(fits(flat.type) for fits in (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_null)):
        raise ValueError(
            f"`{name}` must hold numbers, but holds {flat.type} instead. "
            "For names of symbols use `Sequences.from_strings` with a vocabulary."
        )
    discrete = symbols and not kinds.is_floating(flat.type)
    if not discrete:
        wanted = flat.type if flat.type in (pa.float32(), pa.float64()) else pa.float64()
    elif kinds.is_signed_integer(flat.type):
        wanted = flat.type
    else:  # The narrowest type of a tensor that can also represent -1.
        wanted = {pa.bool_(): pa.int8(), pa.uint8(): pa.int16(), pa.uint16(): pa.int32()}.get(flat.type, pa.int64())
    flat = flat.cast(wanted)
    values: Tensor = from_dlpack(pc.fill_null(flat, MISSING if discrete else float("nan")) if flat.null_count else flat)
    return values
