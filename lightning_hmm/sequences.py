"""Ragged batches of sequences, packed.

A batch of N sequences is one tensor of all steps, `values`, and the N + 1 `offsets` at which sequences begin and end; this
is also the layout of an Arrow list column. Nothing is ever padded. Symbols are int64 with -1 for a missing one; real
vectors are (steps, features) with NaN for a missing entry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

MISSING = -1


class Vocabulary:
    """The names of the symbols: symbol 3 is ``vocabulary[3]``.

    Args:
        names: the names in the order of their numbers, all different.
        unknown: the name that stands for anything not in `names`; it must be one of them. Without it an unknown name is an
            error.
    """

    def __init__(self, names: Iterable[str], unknown: str | None = None) -> None:
        self.names = [str(name) for name in names]
        self.unknown = unknown
        self._index = {name: i for i, name in enumerate(self.names)}
        if len(self._index) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"`names` must all be different, but {twice!r} occurs more than once.")
        if unknown is not None and unknown not in self._index:
            raise ValueError(f"`unknown` must be one of the names, but is {unknown!r} instead.")

    @classmethod
    def from_data(cls, sequences: Iterable[Iterable[str]], unknown: str | None = None) -> Vocabulary:
        """All names that occur, sorted, and `unknown` in front of them if given."""
        found = sorted({name for sequence in sequences for name in sequence if name is not None} - {unknown})
        return cls([unknown, *found] if unknown is not None else found, unknown)

    def encode(self, sequence: Iterable[str | None]) -> list[int]:
        """The numbers of the names; ``None`` is a missing symbol."""
        fallback = None if self.unknown is None else self._index[self.unknown]
        numbers = []
        for position, name in enumerate(sequence):
            number = MISSING if name is None else self._index.get(name, fallback)
            if number is None:
                raise ValueError(f"`vocabulary` has no symbol {name!r}, found at position {position}. Give it an `unknown` symbol, or leave it out.")
            numbers.append(number)
        return numbers

    def decode(self, symbols: Iterable[int]) -> list[str | None]:
        """The names of the numbers; a missing symbol is ``None``."""
        return [None if symbol == MISSING else self.names[symbol] for symbol in symbols]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, symbol: int) -> str:
        return self.names[symbol]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and (self.names, self.unknown) == (other.names, other.unknown)

    def __hash__(self) -> int:
        return hash((tuple(self.names), self.unknown))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.names[:8])) + (", ..." if len(self) > 8 else "")
        return f"Vocabulary({len(self)} symbols: {shown})"


class Sequences:
    """A ragged batch: sequence n is ``values[offsets[n]:offsets[n + 1]]``.

    Args:
        values: (steps,) int64 symbols, or (steps, features) real vectors.
        offsets: (N + 1,) int64, from 0 to steps, never falling. Kept on the CPU: loops are planned from it.
        weights: (N,) how often each sequence counts in training; all ones if not given.
    """

    def __init__(self, values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> None:
        if values.is_floating_point():
            values = values.unsqueeze(1) if values.dim() == 1 else values
            if values.dim() != 2:
                raise ValueError(f"`values` must be (steps, features) for real vectors, but has shape {tuple(values.shape)} instead.")
            if values.dtype not in (torch.float32, torch.float64):
                values = values.double()
        elif values.dim() != 1:
            raise ValueError(f"`values` must be (steps,) for symbols, but has shape {tuple(values.shape)} instead. Give vectors as floating-point numbers.")
        else:
            values = values.long()
        offsets = offsets.to("cpu", torch.int64)
        boundaries = offsets.numpy()
        if offsets.dim() != 1 or len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != len(values) or np.any(np.diff(boundaries) < 0):
            raise ValueError(f"`offsets` must rise from 0 to {len(values)}, the number of steps, but is {_brief(boundaries)} instead.")
        if weights is not None:
            weights = weights.to(values.device, torch.float64)
            if weights.shape != (len(boundaries) - 1,):
                raise ValueError(
                    f"`weights` must hold one number for each of the {len(boundaries) - 1} sequences, but has shape {tuple(weights.shape)} instead."
                )
            if not values.is_cuda and not bool(torch.isfinite(weights).all() and (weights >= 0).all()):
                bad = int(torch.nonzero(~(torch.isfinite(weights) & (weights >= 0)))[0, 0])
                raise ValueError(f"`weights` must be finite and not negative, but the weight of sequence {bad} is {float(weights[bad])} instead.")
        self.values, self.offsets, self.weights = values, offsets, weights
        self._checked: object = None
        self._num_observed: Tensor | None = None

    # Ways in

    @classmethod
    def from_list(cls, sequences: Sequence[Any], weights: Sequence[float] | None = None) -> Sequences:
        """From a list of sequences, each a list, array or tensor of symbols, numbers or vectors; ``None`` is missing.

        One array or tensor may replace the list. Real numbers of shape (steps, features) are one sequence of vectors. Whole
        numbers of shape (N, T) are N sequences of T symbols. Whole numbers of shape (n, 1) are refused, because they could be
        either; use `from_lengths` for them. A pandas DataFrame is one sequence with one step per row: symbols if it has a single
        column of whole numbers, otherwise vectors. A Series of numbers is one sequence as well.
        """
        arrays = [_as_array(sequence, index) for index, sequence in enumerate(as_list(sequences))]
        filled = [array for array in arrays if len(array)]
        if any(array.dtype.kind == "f" for array in filled):
            arrays = [_as_vectors(array) for array in arrays]
            widths = [array.shape[1] for array in arrays if len(array)]
            if len(set(widths)) > 1:
                odd = next(n for n, array in enumerate(arrays) if len(array) and array.shape[1] != widths[0])
                raise ValueError(f"`sequences` must all have {widths[0]} features like the first, but sequence {odd} has {arrays[odd].shape[1]} instead.")
            values = np.concatenate([array for array in arrays if len(array)])
        elif filled or not any(array.ndim == 2 for array in arrays):
            for n, array in enumerate(arrays):
                if len(array) and array.ndim != 1:
                    raise ValueError(f"`sequences` of whole numbers must hold symbols, but sequence {n} holds vectors. Give vectors as floating-point numbers.")
            values = np.concatenate([np.zeros(0, np.int64), *map(_filled, filled)])
        else:
            values = next(array for array in arrays if array.ndim == 2)  # no steps, but a number of features
        lengths = torch.tensor([len(array) for array in arrays], dtype=torch.int64)
        return cls.from_lengths(torch.from_numpy(np.ascontiguousarray(values)), lengths, weights)

    @classmethod
    def from_lengths(cls, values: Any, lengths: Tensor | np.ndarray | Sequence[int], weights: Any = None) -> Sequences:
        """From the steps of all sequences, one after another, and the length of each sequence, in the format of hmmlearn.

        Args:
            values: (steps,) or (steps, 1) whole numbers for symbols, (steps,) or (steps, features) real numbers for vectors; an array,
                tensor, list, DataFrame or Series.
            lengths: (N,) number of steps in each sequence.
            weights: (N,) how often each sequence counts in training; all ones if not given.
        """
        values = values if isinstance(values, Tensor) else _as_tensor(_filled(_as_array(_from_pandas(values), 0)))
        if not values.is_floating_point() and values.dim() == 2 and values.shape[1] == 1:
            values = values.squeeze(1)
        sizes = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths)
        if sizes.ndim != 1:
            raise ValueError(f"`lengths` must be a list with the length of each sequence, but has shape {sizes.shape} instead.")
        if sizes.dtype.kind not in "iu" and len(sizes):
            raise ValueError(f"`lengths` must hold whole numbers, but holds {sizes.dtype} instead.")
        if np.any(sizes < 0):
            n = int(np.argmax(sizes < 0))
            raise ValueError(f"`lengths` must not be negative, but the length of sequence {n} is {sizes[n]} instead.")
        if int(sizes.sum()) != len(values):
            raise ValueError(f"`lengths` must sum to {len(values)}, the number of steps, but sums to {int(sizes.sum())} instead.")
        offsets = torch.from_numpy(np.append(0, np.cumsum(sizes)).astype(np.int64))
        return cls(values, offsets, None if weights is None else torch.as_tensor(weights, dtype=torch.float64))

    @classmethod
    def from_arrow(cls, column: Any, weights: Any = None) -> Sequences:
        """From an Arrow list column (of whole numbers, numbers, or fixed-size lists of numbers), without copying it.

        int64, float32 and float64 without nulls are taken as they lie in memory; other types are converted.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise ValueError(f"`column` must be an Arrow list column, but is {column.type} instead.")
        if column.null_count:
            n = pc.index(column.is_null(), True).as_py()
            raise ValueError(f"`column` must have no null sequences, but sequence {n} is one. Use an empty list for an empty sequence.")
        offsets = column.offsets.to_numpy().astype(np.int64)
        offsets, flat = offsets - offsets[0], column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        width, given = None, None  # features of a vector; which steps hold one, if not all
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
                    raise ValueError(f"`column` must hold vectors of {width} features like the first, but {where} has another number.")
            flat = flat.flatten()
        if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type) or pa.types.is_boolean(flat.type) or pa.types.is_null(flat.type)):
            raise ValueError(f"`column` must hold numbers, but holds {flat.type} instead. For names of symbols use `Sequences.from_strings` with a vocabulary.")
        discrete = width is None and not pa.types.is_floating(flat.type)
        wanted = pa.int64() if discrete else flat.type if flat.type in (pa.float32(), pa.float64()) else pa.float64()
        flat = flat.cast(wanted)  # no copy where it is of that type
        values = from_dlpack(pc.fill_null(flat, MISSING if discrete else float("nan")) if flat.null_count else flat)
        if not discrete:
            values = values.reshape(-1, width or 1)
        if given is not None:
            values = values.new_full((len(given), values.shape[1]), torch.nan).index_copy_(0, torch.from_numpy(np.flatnonzero(given)), values)
        return cls(values, torch.from_numpy(offsets), None if weights is None else torch.as_tensor(weights))

    @classmethod
    def from_strings(cls, strings: Sequence[Iterable[str]], vocabulary: Vocabulary | Iterable[str], weights: Any = None) -> Sequences:
        """From strings (a symbol is a character) or lists of names (a symbol is a name)."""
        _refuse_one_string(strings)
        vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
        encoded = []
        for n, string in enumerate(strings):
            try:
                encoded.append(vocabulary.encode(string))
            except ValueError as error:
                raise ValueError(f"Sequence {n}: {error}") from None
        return cls.from_list(encoded, weights)

    @classmethod
    def cat(cls, batches: Sequence[Sequences]) -> Sequences:
        """One batch of all sequences, in order. Where some have weights, the others count once."""
        if not batches:
            raise ValueError("`batches` must hold at least one `Sequences`, but is empty.")
        filled = [batch for batch in batches if batch.num_steps] or [batches[0]]
        kinds = {batch.num_features for batch in filled}
        if len(kinds) > 1:
            raise ValueError(f"`batches` must be alike, but have {sorted(map(str, kinds))} features (None: symbols) instead.")
        weights = None
        if any(batch.weights is not None for batch in batches):
            weights = torch.cat(
                [batch.weights if batch.weights is not None else filled[0].values.new_ones(len(batch), dtype=torch.float64) for batch in batches]
            )
        lengths = torch.cat([batch.lengths for batch in batches])
        return cls.from_lengths(torch.cat([batch.values for batch in filled]), lengths, weights)

    @staticmethod
    def collate(items: Sequence[Any]) -> Sequences:
        """Makes a batch of what a data set's ``__getitem__`` gave: `Sequences`, or single sequences. For `DataLoader`."""
        if isinstance(items, Sequences):
            return items
        if all(isinstance(item, Sequences) for item in items):
            return Sequences.cat(items)
        return Sequences.from_list(items)

    # What is in it

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Steps of all sequences together."""
        return len(self.values)

    @property
    def lengths(self) -> Tensor:
        """(N,) steps in each sequence, on the CPU."""
        return self.offsets.diff()

    @property
    def is_discrete(self) -> bool:
        return not self.values.is_floating_point()

    @property
    def num_features(self) -> int | None:
        """Entries of each vector; ``None`` for symbols."""
        return None if self.is_discrete else self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def observed(self) -> Tensor:
        """(steps,) or (steps, features): where a value is not missing."""
        return self.values >= 0 if self.is_discrete else ~self.values.isnan()

    def num_observed(self) -> Tensor:
        """How many steps have something observed, each counted with its sequence's weight: a float64 scalar. Counted once."""
        if self._num_observed is None:
            observed = self.observed if self.is_discrete else self.observed.any(dim=1)
            weighted = observed if self.weights is None else observed * self.repeat_interleave(self.weights)
            self._num_observed = weighted.sum(dtype=torch.float64)
        return self._num_observed

    def repeat_interleave(self, per_sequence: Tensor) -> Tensor:
        """(N, ...) -> (steps, ...): each sequence's entry, once for each of its steps."""
        lengths = self.lengths.to(per_sequence.device)
        return per_sequence.repeat_interleave(lengths, dim=0, output_size=self.num_steps)

    def counted(self) -> Sequences:
        """The sequences of positive weight; all of them where there are no weights."""
        if self.weights is None or bool((self.weights > 0).all()):
            return self
        part: Sequences = self[self.weights > 0]
        return part

    def weighted(self, per_sequence: Tensor) -> Tensor:
        """(..., N) numbers times the weights of the sequences; zero where a weight is zero, even if the number is infinite."""
        if self.weights is None:
            return per_sequence
        return torch.where(self.weights == 0, torch.zeros_like(per_sequence), per_sequence * self.weights)

    def with_values(self, values: Tensor) -> Sequences:
        """The same sequences with something else at each step: states, posteriors."""
        return Sequences(values, self.offsets, self.weights)

    def padded(self) -> Tensor:
        """(N, longest, features) with NaN, or (N, longest) with -1, past the ends: for loops over time that take all sequences at once."""
        shape = (len(self), int(self.lengths.max()) if len(self) else 0, *self.values.shape[1:])
        padded = self.values.new_full(shape, MISSING if self.is_discrete else torch.nan)
        padded[self._inside()] = self.values
        return padded

    def packed(self, padded: Tensor) -> Tensor:
        """(N, longest, ...) -> (steps, ...): the way back from `padded`, for anything with these lengths."""
        return padded[self._inside()]

    def _inside(self) -> Tensor:
        lengths = self.lengths.to(self.device)
        return torch.arange(int(self.lengths.max()) if len(self) else 0, device=self.device) < lengths.unsqueeze(1)

    def __getitem__(self, index: Any) -> Any:
        """One sequence as a tensor for a number; a batch for a slice, a list of numbers, a tensor or a mask."""
        if isinstance(index, Tensor | np.ndarray) and index.ndim == 0:
            index = index.item()
        if isinstance(index, (int, np.integer)):
            position = int(index) + len(self) if index < 0 else int(index)
            if not 0 <= position < len(self):
                raise IndexError(f"Sequence {index} of a batch of {len(self)}.")
            first, last = self.offsets[position : position + 2].tolist()
            return self.values[first:last]
        if isinstance(index, slice) and index.step in (None, 1):
            first, last, _ = index.indices(len(self))
            last = max(first, last)
            offsets = self.offsets[first : last + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            return Sequences(self.values[begin:end], offsets - begin, None if self.weights is None else self.weights[first:last])
        if isinstance(index, slice):
            chosen = torch.tensor(range(*index.indices(len(self))), dtype=torch.int64)
        else:
            wanted = torch.as_tensor(index).cpu()
            chosen = torch.arange(len(self))[wanted if wanted.numel() else wanted.long()]
        lengths = self.lengths[chosen]
        starts = self.offsets[:-1][chosen] - torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])[: len(chosen)]
        rows = torch.arange(int(lengths.sum())) + starts.repeat_interleave(lengths)
        weights = None if self.weights is None else self.weights[chosen.to(self.device)]
        return Sequences.from_lengths(self.values[rows.to(self.device)], lengths, weights)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[n] for n in range(len(self)))

    def split(self, batch_size: int) -> Iterator[Sequences]:
        """Consecutive batches of `batch_size` sequences; the last may be smaller."""
        for first in range(0, len(self), batch_size):
            yield self[first : first + batch_size]

    def to(self, *args: Any, **kwargs: Any) -> Sequences:
        """Moves the values; takes what `Tensor.to` takes, except that symbols and weights keep their type."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        values = self.values.to(device, None if self.is_discrete else dtype, non_blocking=non_blocking)
        if values is self.values:  # as with tensors: where nothing is to be done, the same comes back, and what was counted stays known
            return self
        moved = Sequences.__new__(Sequences)
        moved.values, moved.offsets = values, self.offsets
        moved.weights = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        moved._checked = self._checked if values.dtype == self.values.dtype else None  # what fits float64 may be infinite in float32
        moved._num_observed = None
        return moved

    def pin_memory(self, device: Any = None) -> Sequences:
        pinned = Sequences(self.values.pin_memory(), self.offsets, None if self.weights is None else self.weights.pin_memory())
        pinned._checked = self._checked
        return pinned

    def tolist(self) -> list[Any]:
        return [sequence.tolist() for sequence in self]

    # Whether it fits a model

    def check(self, num_symbols: int | None, num_features: int | None) -> None:
        """Raises an error that names sequence and position where the values do not fit; once per batch, on the CPU."""
        wanted = (num_symbols, num_features)
        if self._checked == wanted:
            return
        if num_symbols is not None:
            if not self.is_discrete:
                raise ValueError(f"The model emits {num_symbols} symbols, but the sequences hold real vectors of {self.num_features} features instead.")
            if self.device.type == "cpu" and self.num_steps and (self.values.numpy().max() >= num_symbols or self.values.numpy().min() < MISSING):
                wrong = int(torch.nonzero((self.values >= num_symbols) | (self.values < MISSING))[0, 0])
                n, t = self.locate(wrong)
                raise ValueError(
                    f"Symbols must be 0 to {num_symbols - 1}, or {MISSING} for a missing one, "
                    f"but position {t} of sequence {n} is {int(self.values[wrong])} instead."
                )
        else:
            if self.is_discrete:
                raise ValueError(
                    f"The model emits vectors of {num_features} features, but the sequences hold symbols instead. Give them as floating-point numbers."
                )
            if self.num_features != num_features:
                raise ValueError(f"Each step must have {num_features} features, but has {self.num_features} instead.")
            if self.device.type == "cpu" and self.num_steps and bool(self.values.isinf().any()):
                row, column = torch.nonzero(self.values.isinf())[0].tolist()
                n, t = self.locate(row)
                raise ValueError(
                    f"Values must be finite, or NaN for a missing one, "
                    f"but feature {column} at position {t} of sequence {n} is {float(self.values[row, column])} instead."
                )
        if self.device.type == "cpu":
            self._checked = wanted

    def locate(self, step: int) -> tuple[int, int]:
        """The sequence and the position in it of a packed step."""
        n = int(np.searchsorted(self.offsets.numpy(), step, side="right")) - 1
        return n, step - int(self.offsets[n])

    def __repr__(self) -> str:
        what = "symbols" if self.is_discrete else f"vectors of {self.num_features}"
        return f"Sequences({len(self)} sequences, {self.num_steps} {what}{'' if self.weights is None else ', weighted'})"


def _as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """A tensor on the same memory. torch warns of read-only memory, a mapped file's for example; nothing here writes to it."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        try:
            return from_dlpack(values)
        except BufferError:  # NumPy before 2.1 does not hand out read-only memory
            values = values.copy()
    return torch.as_tensor(values)


def as_list(data: Any) -> Sequence[Any]:
    """The single sequences in what a user gave for several: a list, or one array, tensor, DataFrame or Series (see `Sequences.from_list`)."""
    _refuse_one_string(data)
    given, data = data, _from_pandas(data)
    if data is not given and data.dtype.kind != "O":
        return [data]
    if isinstance(data, Tensor):
        data = data.detach().cpu().numpy()
    if not isinstance(data, np.ndarray):
        return [_from_pandas(sequence) for sequence in data]
    if data.ndim < 2 and (data.dtype.kind != "O" or any(isinstance(item, str) or not hasattr(item, "__len__") for item in data.flat)):
        raise ValueError(
            f"`sequences` must be a list of sequences, but is an array of shape {data.shape} instead. For one sequence give a list of one, `[X]`. "
            "For names of symbols use `Sequences.from_strings` with a vocabulary."
        )
    if data.ndim == 2 and data.dtype.kind == "O" and any(isinstance(item, (float, np.floating)) for item in data.flat):
        data = _without_none(list(data), 0)
    if data.ndim == 2 and data.dtype.kind == "f":
        return [data]
    if data.ndim == 2 and data.shape[1] == 1:
        raise ValueError(
            f"`sequences` must not be a single column of symbols, but has shape {data.shape}, which could be one sequence or {len(data)}. "
            f"Use `Sequences.from_lengths(X, lengths)` with the length of each sequence, or give shape (1, {len(data)}) for one sequence."
        )
    return list(data)


def _refuse_one_string(data: Any) -> None:
    if isinstance(data, str):
        raise ValueError(f"`sequences` must be a list of sequences, but is the string {data[:20]!r} instead. For one sequence give a list of one.")


def _from_pandas(data: Any) -> Any:
    """A DataFrame or Series as an array of whole numbers, real numbers or, from a Series, other objects; anything else unchanged."""
    pandas = sys.modules.get("pandas")  # where it is not imported, nothing can be of its types
    if pandas is None or not isinstance(data, (pandas.DataFrame, pandas.Series)):
        return data
    kinds = pandas.api.types
    table = data.to_frame() if isinstance(data, pandas.Series) else data
    for name, kind in table.dtypes.items():
        if not kinds.is_numeric_dtype(kind):
            if table is not data:
                return data.to_numpy(object)
            raise ValueError(
                f"A DataFrame must hold numbers, but column {name!r} holds {kind} instead. Select the columns of numbers, as in `df[['x', 'y']]`. "
                f"For names of symbols use `Sequences.from_strings([df[{name!r}]], vocabulary)`."
            )
    if table.shape[1] == 1 and (kinds.is_integer_dtype(table.dtypes.iloc[0]) or kinds.is_bool_dtype(table.dtypes.iloc[0])):
        return table.iloc[:, 0].to_numpy(np.int64, na_value=MISSING)
    return table.to_numpy(np.float64, na_value=np.nan)


def _filled(array: np.ndarray) -> np.ndarray:
    """Without a mask: -1 or NaN where an entry is masked."""
    filled: np.ndarray = np.ma.filled(array, np.nan if array.dtype.kind == "f" else MISSING)
    return filled


def _as_array(sequence: Any, index: int) -> np.ndarray:
    """One sequence as an array: int64 (masked where ``None`` stands for a symbol), or real with NaN."""
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
        raise ValueError(f"`sequences` must hold numbers, but {what}. For names of symbols use `Sequences.from_strings` with a vocabulary.")
    if array.ndim == 0:
        raise ValueError(f"`sequences` must be a list of sequences, but item {index} is a single number. For one sequence give a list of one.")
    if array.ndim > 2:
        raise ValueError(f"A sequence must have shape (steps,) or (steps, features), but sequence {index} has shape {array.shape} instead.")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"`sequences` must hold symbols below 2^63, but sequence {index} holds {array.max()} instead.")
    if any(stride < 0 for stride in array.strides) or not array.dtype.isnative:  # torch takes neither
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return array if array.dtype.kind == "f" else array.astype(np.int64, copy=False)


def _without_none(steps: list[Any], index: int) -> np.ndarray:
    """Symbols with ``None`` for missing ones as a masked array; numbers and vectors with NaN in the place of ``None``."""
    widths = [None if step is None else len(step) if hasattr(step, "__len__") and not isinstance(step, str) else 0 for step in steps]  # 0: a number
    width = next((width for width in widths if width is not None), 0)
    if any(other not in (width, None) for other in widths):
        odd = next(t for t, other in enumerate(widths) if other not in (width, None))
        raise ValueError(f"Each step must have {width or 1} features like the first, but position {odd} of sequence {index} has {widths[odd] or 1} instead.")
    if width:
        return np.asarray([[float("nan") if entry is None else entry for entry in (step if step is not None else [None] * width)] for step in steps])
    if all(step is None or isinstance(step, (int, np.integer)) for step in steps):
        return np.ma.masked_array([MISSING if step is None else step for step in steps], [step is None for step in steps], dtype=np.int64)
    return np.asarray([float("nan") if step is None else step for step in steps])


def _as_vectors(array: np.ndarray) -> np.ndarray:
    array = array.astype(np.float64) if array.dtype not in (np.float32, np.float64) else array
    array = np.ma.filled(array, np.nan)
    return array.reshape(len(array), -1) if len(array) else array


def _brief(array: np.ndarray) -> str:
    return str(array.tolist()) if len(array) <= 8 else f"[{array[0]}, {array[1]}, ..., {array[-1]}] ({len(array)} numbers)"
