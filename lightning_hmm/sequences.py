"""Ragged batches of sequences, packed.

A batch of N sequences is one tensor of all steps, `values`, and the N + 1 `offsets` at which sequences begin and end; this
is also the layout of an Arrow list column. Nothing is ever padded. Symbols are signed whole numbers, in the type in which they
are given, with -1 for a missing one; data modules give the narrowest type. Real
vectors are (steps, features) with NaN for a missing entry. Other columns may come with each step: labels, inputs, times and
actions. They follow the values wherever these go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.columns import STEP_COLUMNS, Column, as_columns, as_step_column, check_categories, check_step_column
from lightning_hmm.conversion import (
    arrow_steps,
    as_array,
    as_list,
    as_vectors,
    brief,
    filled,
    frames_of,
    packed_column,
    packed_steps,
    refuse_one_string,
)
from lightning_hmm.vocabulary import MISSING, Vocabulary

# The narrowest type that holds the symbols and the number after the last one, which stands for a missing symbol.
_SYMBOL_TYPES = ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31))
_LARGEST = 1e140  # of real values: the sum of 10^28 squares is finite
# Types in which -1 cannot be written, and the narrowest that can hold it and all of their numbers.
_SIGNED = {
    torch.bool: torch.int8,
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


class Sequences:
    """A ragged batch: sequence n is ``values[offsets[n]:offsets[n + 1]]``.

    Args:
        values: (steps,) int8, int16, int32 or int64 symbols, or (steps, features) real vectors. Whole numbers with two features or more are vectors, too.
        offsets: (N + 1,) int64, from 0 to steps, never falling. Kept on the CPU: loops are planned from it.
        weights: (N,) how often each sequence counts in training; all ones if not given.
        labels: (steps,) whole numbers, the known state of each step; -1 where it is unknown.
        inputs: (steps, M) finite numbers that emissions or transitions may depend on.
        times: (steps,) finite numbers that do not decrease within a sequence; kept as float64.
        actions: (steps,) whole numbers from 0, what was done at each step.

    Attributes:
        columns: the names and kinds of the columns of `values`, where they come from DataFrames; otherwise ``None``.
    """

    columns: tuple[Column, ...] | None
    labels: Tensor | None
    inputs: Tensor | None
    times: Tensor | None
    actions: Tensor | None

    def __init__(
        self,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        inputs: Tensor | None = None,
        times: Tensor | None = None,
        actions: Tensor | None = None,
    ) -> None:
        if values.is_floating_point():
            values = values.unsqueeze(1) if values.dim() == 1 else values
            if values.dim() != 2:
                raise ValueError(
                    f"`values` must be (steps, features) for real vectors, but has shape {tuple(values.shape)} instead."
                )
            if values.dtype not in (torch.float32, torch.float64):
                values = values.double()
        elif values.dim() == 2 and values.shape[1] > 1:
            values = values.double()
        elif values.dim() != 1:
            raise ValueError(
                f"`values` must be (steps,) for symbols, but has shape {tuple(values.shape)} instead. Give vectors as floating-point numbers."
            )
        else:
            values = values.to(_SIGNED.get(values.dtype, values.dtype))
        offsets = offsets.to("cpu", torch.int64)
        boundaries = offsets.numpy()
        if (
            offsets.dim() != 1
            or len(boundaries) == 0
            or boundaries[0] != 0
            or boundaries[-1] != len(values)
            or np.any(np.diff(boundaries) < 0)
        ):
            raise ValueError(
                f"`offsets` must rise from 0 to {len(values)}, the number of steps, but is {brief(boundaries)} instead."
            )
        if weights is not None:
            weights = weights.to(values.device, torch.float64)
            if weights.shape != (len(boundaries) - 1,):
                raise ValueError(
                    f"`weights` must hold one number for each of the {len(boundaries) - 1} sequences, but has shape {tuple(weights.shape)} instead."
                )
            if not values.is_cuda and not bool(torch.isfinite(weights).all() and (weights >= 0).all()):
                bad = int(torch.nonzero(~(torch.isfinite(weights) & (weights >= 0)))[0, 0])
                raise ValueError(
                    f"`weights` must be finite and not negative, but the weight of sequence {bad} is {float(weights[bad])} instead."
                )
        self.values, self.offsets, self.weights = values, offsets, weights
        self.columns = None
        self._checked: object = None
        self._num_observed: Tensor | None = None
        self._is_complete: bool | None = None
        self._symbols: tuple[int, Tensor] | None = None
        for name, column in zip(STEP_COLUMNS, (labels, inputs, times, actions), strict=True):
            if column is not None:
                column = as_step_column(name, column, len(values), values.device)
                if column.device.type == "cpu":
                    check_step_column(name, column, offsets, self.locate)
            setattr(self, name, column)

    # Ways in

    @classmethod
    def from_list(
        cls,
        sequences: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        labels: Any = None,
        inputs: Any = None,
        times: Any = None,
        actions: Any = None,
    ) -> Sequences:
        """From a list of sequences, each a list, array or tensor of symbols, numbers or vectors; ``None`` is missing.

        One array or tensor may replace the list. Real numbers of shape (steps, features) are one sequence of vectors. Whole
        numbers of shape (N, T) are N sequences of T symbols. Whole numbers of shape (n, 1) are refused, because they could be
        either; use `from_lengths` for them. A pandas DataFrame is one sequence with one step per row: symbols if it has a single
        column of whole numbers, otherwise vectors. A Series of numbers is one sequence as well.

        `labels`, `inputs`, `times` and `actions` are given in the same form: for each sequence a list, array or tensor with one
        number for each step or, as inputs, one vector for each step. ``None`` is an unknown label.
        """
        described = _described(sequences)
        arrays = [as_array(sequence, index) for index, sequence in enumerate(as_list(sequences))]
        given = [array for array in arrays if len(array)]
        if any(array.dtype.kind == "f" or (array.ndim == 2 and array.shape[1] > 1) for array in given):
            arrays = [as_vectors(array) for array in arrays]
            widths = [array.shape[1] for array in arrays if len(array)]
            if len(set(widths)) > 1:
                odd = next(n for n, array in enumerate(arrays) if len(array) and array.shape[1] != widths[0])
                raise ValueError(
                    f"`sequences` must all have {widths[0]} features like the first, but sequence {odd} has {arrays[odd].shape[1]} instead."
                )
            values = np.concatenate([array for array in arrays if len(array)])
        elif given or not any(array.ndim == 2 for array in arrays):
            for n, array in enumerate(arrays):
                if len(array) and array.ndim != 1:
                    raise ValueError(
                        f"`sequences` of whole numbers must hold symbols, but sequence {n} has shape {array.shape}. Give vectors as floating-point numbers."
                    )
            values = np.concatenate([np.zeros(0, np.int64), *map(filled, given)])
        else:
            values = next(array for array in arrays if array.ndim == 2)  # no steps, but a number of features
        lengths = [len(array) for array in arrays]
        columns = zip(STEP_COLUMNS, (labels, inputs, times, actions), strict=True)
        packed = {name: packed_column(column, lengths, name) for name, column in columns if column is not None}
        found = cls.from_lengths(
            torch.from_numpy(np.ascontiguousarray(values)), torch.tensor(lengths, dtype=torch.int64), weights, **packed
        )
        return found.with_columns(None if found.is_discrete else described)

    @classmethod
    def from_lengths(
        cls,
        values: Any,
        lengths: Tensor | np.ndarray | Sequence[int],
        weights: Any = None,
        *,
        labels: Any = None,
        inputs: Any = None,
        times: Any = None,
        actions: Any = None,
    ) -> Sequences:
        """From the steps of all sequences, one after another, and the length of each sequence, in the format of hmmlearn.

        Args:
            values: (steps,) or (steps, 1) whole numbers for symbols, (steps,) or (steps, features) real numbers for vectors; an array,
                tensor, list, DataFrame or Series.
            lengths: (N,) number of steps in each sequence.
            weights: (N,) how often each sequence counts in training; all ones if not given.
            labels, inputs, times, actions: (steps,) or, as inputs, (steps, M) numbers, packed as the values are; see `Sequences`.
        """
        described = _described(values)
        values = packed_steps(values)
        if not values.is_floating_point() and values.dim() == 2 and values.shape[1] == 1:
            values = values.squeeze(1)
        sizes = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths)
        if sizes.ndim != 1:
            raise ValueError(
                f"`lengths` must be a list with the length of each sequence, but has shape {sizes.shape} instead."
            )
        if sizes.dtype.kind not in "iu" and len(sizes):
            raise ValueError(f"`lengths` must hold whole numbers, but holds {sizes.dtype} instead.")
        if np.any(sizes < 0):
            n = int(np.argmax(sizes < 0))
            raise ValueError(f"`lengths` must not be negative, but the length of sequence {n} is {sizes[n]} instead.")
        if int(sizes.sum()) != len(values):
            raise ValueError(
                f"`lengths` must sum to {len(values)}, the number of steps, but sums to {int(sizes.sum())} instead."
            )
        offsets = torch.from_numpy(np.append(0, np.cumsum(sizes)).astype(np.int64))
        columns = zip(STEP_COLUMNS, (labels, inputs, times, actions), strict=True)
        packed = {name: packed_steps(column, name) for name, column in columns if column is not None}
        found = cls(
            values, offsets, None if weights is None else torch.as_tensor(weights, dtype=torch.float64), **packed
        )
        return found.with_columns(None if found.is_discrete else described)

    @classmethod
    def from_arrow(
        cls,
        column: Any,
        weights: Any = None,
        *,
        labels: Any = None,
        inputs: Any = None,
        times: Any = None,
        actions: Any = None,
    ) -> Sequences:
        """From an Arrow list column (of whole numbers, numbers, or fixed-size lists of numbers), without copying it.

        Signed whole numbers, float32 and float64 without nulls are taken as they lie in memory; other types are converted. `labels`, `inputs`,
        `times` and `actions` are Arrow list columns as well, with lists as long as those of `column`.
        """
        values, offsets = arrow_steps(column)
        packed = {}
        for name, other in zip(STEP_COLUMNS, (labels, inputs, times, actions), strict=True):
            if other is None:
                continue
            packed[name], others = arrow_steps(other, name)
            if len(others) != len(offsets):
                raise ValueError(
                    f"`{name}` must have {len(offsets) - 1} sequences like `column`, but has {len(others) - 1} instead."
                )
            if not torch.equal(others, offsets):
                n = int(torch.nonzero(others.diff() != offsets.diff())[0, 0])
                raise ValueError(
                    f"`{name}` must have one entry for each step, but sequence {n} has {offsets.diff()[n]} steps and {others.diff()[n]} entries."
                )
        return cls(values, offsets, None if weights is None else torch.as_tensor(weights), **packed)

    @classmethod
    def from_strings(
        cls,
        strings: Sequence[Iterable[str]],
        vocabulary: Vocabulary | Iterable[str],
        weights: Any = None,
        *,
        labels: Any = None,
        inputs: Any = None,
        times: Any = None,
        actions: Any = None,
    ) -> Sequences:
        """From strings (a symbol is a character) or lists of names (a symbol is a name). The other columns are given as in `from_list`."""
        refuse_one_string(strings)
        vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
        encoded = []
        for n, string in enumerate(strings):
            try:
                encoded.append(vocabulary.encode(string))
            except ValueError as error:
                raise ValueError(f"Sequence {n}: {error}") from None
        return cls.from_list(encoded, weights, labels=labels, inputs=inputs, times=times, actions=actions)

    @classmethod
    def cat(cls, batches: Sequence[Sequences]) -> Sequences:
        """One batch of all sequences, in order.

        Where some have weights, the others count once. Where some have labels, those of the others are unknown. Inputs, times and
        actions must come with all batches that have steps or with none.
        """
        if not batches:
            raise ValueError("`batches` must hold at least one `Sequences`, but is empty.")
        given = [batch for batch in batches if batch.num_steps] or [batches[0]]
        kinds = {batch.num_features for batch in given}
        if len(kinds) > 1:
            raise ValueError(
                f"`batches` must be alike, but have {sorted(map(str, kinds))} features (None: symbols) instead."
            )
        weights = None
        if any(batch.weights is not None for batch in batches):
            weights = torch.cat(
                [
                    batch.weights
                    if batch.weights is not None
                    else given[0].values.new_ones(len(batch), dtype=torch.float64)
                    for batch in batches
                ]
            )
        lengths = torch.cat([batch.lengths for batch in batches])
        joined = cls.from_lengths(torch.cat([batch.values for batch in given]), lengths, weights)
        joined.columns = given[0].columns if all(batch.columns == given[0].columns for batch in given) else None
        return joined._with_columns({name: _joined(name, given, batches) for name in STEP_COLUMNS})

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

    @property
    def is_complete(self) -> bool:
        """Whether no value is missing. It is found out once for each batch."""
        if self._is_complete is None:
            self._is_complete = bool(self.observed.all())
        return self._is_complete

    def step_weights(self) -> Tensor:
        """(steps,) the weight of each step's sequence, float64; ones where there are no weights."""
        if self.weights is None:
            return torch.ones(self.num_steps, dtype=torch.float64, device=self.device)
        return self.repeat_interleave(self.weights)

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
        """The same sequences with something else at each step: states, posteriors. The other columns are kept."""
        return Sequences(values, self.offsets, self.weights)._with_columns(self._columns())

    def replaced(self, **changes: Tensor | None) -> Sequences:
        """The same values with other `weights`, `labels`, `inputs`, `times` or `actions`; ``None`` removes what there was."""
        return Sequences(
            self.values, self.offsets, **{"weights": self.weights, **self._columns(), **changes}
        ).with_columns(self.columns)

    def with_columns(self, columns: Sequence[Column] | None) -> Sequences:
        """Sets `columns`, and returns this batch."""
        self.columns = None if columns is None else tuple(columns)
        return self

    def with_steps(self, steps: Tensor | slice, offsets: Tensor, weights: Tensor | None = None) -> Sequences:
        """A batch of some of the steps, with everything that comes with them.

        Args:
            steps: packed steps: their numbers, a mask or a slice.
            offsets: (M + 1,) where the M new sequences begin and end.
            weights: (M,) the weights of the new sequences; all ones if not given.
        """
        steps = steps.to(self.device) if isinstance(steps, Tensor) else steps
        columns = {name: column[steps] for name, column in self._columns().items() if column is not None}
        return Sequences(self.values[steps], offsets, weights, **columns).with_columns(self.columns)

    def _columns(self) -> dict[str, Tensor | None]:
        """The columns that come with each step, by name."""
        return {name: getattr(self, name) for name in STEP_COLUMNS}

    def _with_columns(self, columns: dict[str, Tensor | None]) -> Sequences:
        """Sets columns that were checked before, and returns this batch."""
        for name, column in columns.items():
            setattr(self, name, column)
        return self

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
        """The values of one sequence as a tensor for a number; a batch, with all columns, for a slice, a list of numbers, a tensor or a mask."""
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
            part = Sequences(
                self.values[begin:end], offsets - begin, None if self.weights is None else self.weights[first:last]
            )
            return part.with_columns(self.columns)._with_columns(
                {name: None if column is None else column[begin:end] for name, column in self._columns().items()}
            )
        if isinstance(index, slice):
            chosen = torch.tensor(range(*index.indices(len(self))), dtype=torch.int64)
        else:
            wanted = torch.as_tensor(index).cpu()
            chosen = torch.arange(len(self))[wanted if wanted.numel() else wanted.long()]
        lengths = self.lengths[chosen]
        starts = (
            self.offsets[:-1][chosen]
            - torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])[: len(chosen)]
        )
        rows = (torch.arange(int(lengths.sum())) + starts.repeat_interleave(lengths)).to(self.device)
        weights = None if self.weights is None else self.weights[chosen.to(self.device)]
        gathered = Sequences.from_lengths(self.values[rows], lengths, weights)
        return gathered.with_columns(self.columns)._with_columns(
            {name: None if column is None else column[rows] for name, column in self._columns().items()}
        )

    def __iter__(self) -> Iterator[Tensor]:
        return (self[n] for n in range(len(self)))

    def split(self, batch_size: int) -> Iterator[Sequences]:
        """Consecutive batches of `batch_size` sequences; the last may be smaller."""
        for first in range(0, len(self), batch_size):
            yield self[first : first + batch_size]

    def to(self, *args: Any, **kwargs: Any) -> Sequences:
        """Moves everything; takes what `Tensor.to` takes. Only vectors and inputs change their type: whole numbers, weights and times keep theirs."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        values = self.values.to(device, None if self.is_discrete else dtype, non_blocking=non_blocking)
        columns: dict[str, Tensor | None] = {}
        for name, column in self._columns().items():
            columns[name] = (
                None
                if column is None
                else column.to(device, dtype if name == "inputs" else None, non_blocking=non_blocking)
            )
        if values is self.values and columns["inputs"] is self.inputs:
            return self  # as with tensors: where nothing is to be done, the same comes back, and what was counted stays known
        moved = Sequences.__new__(Sequences)
        moved.values, moved.offsets, moved.columns = values, self.offsets, self.columns
        moved.weights = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        moved._checked = (
            self._checked if values.dtype == self.values.dtype else None
        )  # what fits float64 may be infinite in float32
        moved._num_observed = moved._symbols = moved._is_complete = None
        return moved._with_columns(columns)

    def pin_memory(self, device: Any = None) -> Sequences:
        pinned = Sequences(
            self.values.pin_memory(), self.offsets, None if self.weights is None else self.weights.pin_memory()
        )
        pinned._checked = self._checked
        return pinned.with_columns(self.columns)._with_columns(
            {name: None if column is None else column.pin_memory() for name, column in self._columns().items()}
        )

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
                raise ValueError(
                    f"The model emits {num_symbols} symbols, but the sequences hold real vectors of {self.num_features} features instead."
                )
            if (
                self.device.type == "cpu"
                and self.num_steps
                and (int(self.values.max()) >= num_symbols or int(self.values.min()) < MISSING)
            ):
                wrong = int(torch.nonzero((self.values.long() >= num_symbols) | (self.values < MISSING))[0, 0])
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
            largest = min(_LARGEST, torch.finfo(self.values.dtype).max)
            if self.device.type == "cpu" and self.num_steps and bool((self.values.abs() > largest).any()):
                row, column = torch.nonzero(self.values.abs() > largest)[0].tolist()
                n, t = self.locate(row)
                where, value = f"feature {column} at position {t} of sequence {n}", float(self.values[row, column])
                if math.isinf(value):
                    raise ValueError(
                        f"Values must be finite, or NaN for a missing one, but {where} is {value} instead."
                    )
                raise ValueError(
                    f"Values must be between -{_LARGEST:g} and {_LARGEST:g}, so that sums of squares are finite, but {where} is {value:g}. Rescale it."
                )
        if self.device.type == "cpu":
            self._checked = wanted

    def check_columns(self, columns: Sequence[Column]) -> None:
        """Raises an error that names sequence and position where the values are not those of the observed `columns`.

        One categorical column means symbols. Otherwise the values are vectors with one entry for each column, in which a
        categorical column holds the numbers of categories.
        """
        if len(columns) == 1 and columns[0].is_categorical:
            self.check(columns[0].num_categories, None)
            return
        self.check(None, len(columns))
        if self.device.type == "cpu":
            check_categories(self.values, columns, self.locate)

    def symbols(self, num_symbols: int) -> Tensor:
        """(steps,) the symbols in the narrowest of uint8, int16 and int32, with `num_symbols` in the place of missing ones.

        They are checked and converted once for each batch and number. On a device other than the CPU, a batch that was not checked
        before it was moved there is checked here, which waits for the device.
        """
        if self._symbols is None or self._symbols[0] != num_symbols:
            dtype = next((dtype for dtype, limit in _SYMBOL_TYPES if num_symbols < limit), None)
            if dtype is None:
                raise ValueError(f"`num_symbols` must be below 2^31, but is {num_symbols} instead.")
            self.check(num_symbols, None)
            if self._checked != (num_symbols, None):
                self.to("cpu").check(num_symbols, None)
                self._checked = (num_symbols, None)
            missing = self.values == MISSING
            same = {torch.int8: torch.uint8}.get(self.values.dtype, self.values.dtype) == dtype
            symbols = self.values.view(dtype) if same else self.values.to(dtype)
            self._symbols = (
                num_symbols,
                symbols.masked_fill(missing, num_symbols) if self.values.is_cuda or bool(missing.any()) else symbols,
            )
        return self._symbols[1]

    def locate(self, step: int) -> tuple[int, int]:
        """The sequence and the position in it of a packed step."""
        n = int(np.searchsorted(self.offsets.numpy(), step, side="right")) - 1
        return n, step - int(self.offsets[n])

    def __repr__(self) -> str:
        what = "symbols" if self.is_discrete else f"vectors of {self.num_features}"
        columns = "".join(f", {name}" for name, column in self._columns().items() if column is not None)
        return f"Sequences({len(self)} sequences, {self.num_steps} {what}{'' if self.weights is None else ', weighted'}{columns})"


def _described(data: Any) -> list[Column] | None:
    """The columns of what a user gave, if they are DataFrames, which must all have the same columns in the same order."""
    frames = frames_of(data)
    if frames is None:
        return None
    names = [str(name) for name in frames[0].columns]
    for n, frame in enumerate(frames):
        if (others := [str(name) for name in frame.columns]) != names:
            raise ValueError(
                f"`sequences` must all have the columns {', '.join(names)} like the first, but sequence {n} has {', '.join(others)}."
            )
    return as_columns([Column(name) for name in names])


def _joined(name: str, given: Sequence[Sequences], batches: Sequence[Sequences]) -> Tensor | None:
    """The column of all `given` batches, one after the other; ``None`` if no batch has it. `batches` are all, for an error."""
    columns: list[Tensor | None] = [getattr(batch, name) for batch in given]
    if all(column is None for column in columns):
        return None
    if name == "labels":
        columns = [
            batch.values.new_full((batch.num_steps,), MISSING, dtype=torch.int64)
            if batch.labels is None
            else batch.labels
            for batch in given
        ]
    there = [column for column in columns if column is not None]
    if len(there) < len(columns):
        lacking = next(n for n, batch in enumerate(batches) if batch.num_steps and getattr(batch, name) is None)
        raise ValueError(
            f"`batches` must all have `{name}` or none, but batch {lacking} has none. Give them to all batches."
        )
    if len({column.shape[1:] for column in there}) > 1:
        raise ValueError(
            f"`batches` must have the same number of `{name}`, but have {' and '.join(str(column.shape[1]) for column in there)}."
        )
    return torch.cat(there)
