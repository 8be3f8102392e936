"""Packed batches of sequences with different lengths.

A batch of N sequences consists of one tensor with all steps, `values`, and the N + 1 `offsets` at which sequences begin
and end. Arrow list columns have the same layout. Sequences are not padded. Symbols are signed whole numbers, and -1 is
a missing symbol; they keep the integer type in which they are given, and data modules use the narrowest type. Real
vectors have shape (steps, features), and NaN is a missing entry. Each step may also have a label, inputs, a time, an
action and weights of the states. These columns are sliced, concatenated and moved together with the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
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

# Types for symbols and the number of symbols, which represents a missing symbol, with their limits.
_SYMBOL_TYPES = ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31))
_LARGEST = 1e140  # Largest absolute value: the sum of 10^28 squares is finite.
# Types that cannot represent -1, and the narrowest signed type for all of their numbers.
_SIGNED = {
    torch.bool: torch.int8,
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


class Sequences:
    """A packed batch of sequences. Sequence n is ``values[offsets[n]:offsets[n + 1]]``.

    Args:
        values: (steps,) symbols in int8, int16, int32 or int64, or (steps, features) real vectors. Whole numbers with
            two or more features are vectors as well.
        offsets: (N + 1,) nondecreasing whole numbers from 0 to the number of steps. They are kept on the CPU.
        weights: (N,) weight of each sequence in training. The default is 1.
        labels: (steps,) whole numbers, the known state of each step; -1 if it is unknown. Training and all
            inference methods except `score`, `aic` and `bic` condition on the labels.
        inputs: (steps, M) finite numbers that emissions or transitions may depend on.
        times: (steps,) finite numbers that do not decrease within a sequence. They are kept in float64.
        actions: (steps,) whole numbers from 0, the action at each step.
        state_weights: (steps, K) non-negative weights of the K states of a model, such as probabilities given by an
            annotator or a classifier. They are factors of p(y_t | k), in training, `decode` and `posterior`. A weight
            of 0 excludes a state, and equal weights leave it open. For log-weights w, pass ``(w - w.amax(1,
            True)).exp()``.

    Attributes:
        columns: Names and kinds of the columns of `values` if they come from DataFrames, otherwise ``None``.

    Example:
        >>> sequences = Sequences.from_list([[0, 1, 1], [2, 0]])
        >>> sequences
        Sequences(2 sequences, 5 symbols)
        >>> sequences.lengths.tolist()
        [3, 2]
        >>> sequences[1].tolist()
        [2, 0]
    """

    columns: tuple[Column, ...] | None
    labels: Tensor | None
    inputs: Tensor | None
    times: Tensor | None
    actions: Tensor | None
    state_weights: Tensor | None
    _without_labels: Sequences | None = None

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
        state_weights: Tensor | None = None,
    ) -> None:
        values = _checked_values(values)
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
            weights = _checked_weights(weights.to(values.device, torch.float64), len(boundaries) - 1)
        self.values, self.offsets, self.weights = values, offsets, weights
        self.columns = None
        self._checked: object = None
        self._num_observed: Tensor | None = None
        self._is_complete: bool | None = None
        self._symbols: tuple[int, Tensor] | None = None
        for name, column in zip(STEP_COLUMNS, (labels, inputs, times, actions, state_weights), strict=True):
            if column is not None:
                column = as_step_column(name, column, len(values), values.device)
                if column.device.type == "cpu":
                    check_step_column(name, column, offsets, self.locate)
            setattr(self, name, column)

    # Constructors

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
        state_weights: Any = None,
    ) -> Sequences:
        """Creates a batch from a list of sequences.

        A single array or tensor may replace the list: real numbers of shape (steps, features) are one sequence of
            vectors,
        and whole numbers of shape (N, T) are N sequences of T symbols. Whole numbers of shape (n, 1) raise a
        `ValueError`, because they are ambiguous; use `from_lengths` for them. A pandas DataFrame is one sequence with
        one step per row. Its steps are symbols if it has a single column of whole numbers, otherwise vectors. A Series
        of numbers is one sequence.

        Args:
            sequences: One list, array or tensor per sequence, of symbols, numbers or vectors. ``None`` is a missing
                value.
            weights: (N,) weight of each sequence in training. The default is 1.
            labels: One list, array or tensor per sequence, with one label per step. ``None`` is an unknown label.
            inputs: One list, array or tensor per sequence, with one number or vector per step.
            times: One list, array or tensor per sequence, with one number per step.
            actions: One list, array or tensor per sequence, with one whole number per step.
            state_weights: One list, array or tensor per sequence, with one vector of K weights per step.

        Example:
            >>> Sequences.from_list([[0.5, None, 1.5], [2.0]]).values.squeeze(1).tolist()
            [0.5, nan, 1.5, 2.0]
        """
        described = _described(sequences)
        arrays = [as_array(sequence, index) for index, sequence in enumerate(as_list(sequences))]
        given = [array for array in arrays if len(array)]
        if any(array.dtype.kind == "f" or (array.ndim == 2 and array.shape[1] > 1) for array in given):
            values = _joined_vectors([as_vectors(array) for array in arrays])
        elif given or not any(array.ndim == 2 for array in arrays):
            for n, array in enumerate(arrays):
                if len(array) and array.ndim != 1:
                    raise ValueError(
                        f"`sequences` of whole numbers must hold symbols, but sequence {n} has shape {array.shape}. "
                        "Give vectors as floating-point numbers."
                    )
            values = np.concatenate([np.zeros(0, np.int64), *map(filled, given)])
        else:
            values = next(
                array for array in arrays if array.ndim == 2
            )  # There are no steps, but the features are known.
        lengths = [len(array) for array in arrays]
        columns = zip(STEP_COLUMNS, (labels, inputs, times, actions, state_weights), strict=True)
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
        state_weights: Any = None,
    ) -> Sequences:
        """Creates a batch from the concatenated steps of all sequences and their lengths, the format of hmmlearn.

        Args:
            values: (steps,) or (steps, 1) whole numbers for symbols, (steps,) or (steps, features) real numbers for
                vectors, as an array, tensor, list, DataFrame or Series.
            lengths: (N,) number of steps of each sequence.
            weights: (N,) weight of each sequence in training. The default is 1.
            labels, inputs, times, actions, state_weights: (steps,) numbers, or (steps, M) for inputs and state weights,
                packed like the values.

        Example:
            >>> Sequences.from_lengths([0, 1, 1, 2, 0], lengths=[3, 2]).tolist()
            [[0, 1, 1], [2, 0]]
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
        columns = zip(STEP_COLUMNS, (labels, inputs, times, actions, state_weights), strict=True)
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
        state_weights: Any = None,
    ) -> Sequences:
        """Creates a batch from an Arrow list column of whole numbers, real numbers or fixed-size lists of numbers.

        Signed whole numbers, float32 and float64 without nulls are not copied; other types are converted. `labels`,
        `inputs`, `times`, `actions` and `state_weights` are Arrow list columns as well, with lists as long as those of
        `column`.
        """
        values, offsets = arrow_steps(column)
        packed = {}
        for name, other in zip(STEP_COLUMNS, (labels, inputs, times, actions, state_weights), strict=True):
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
                    f"`{name}` must have one entry for each step, but sequence {n} has {offsets.diff()[n]} steps "
                    f"and {others.diff()[n]} entries."
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
        state_weights: Any = None,
    ) -> Sequences:
        """Creates a batch of symbols from strings or lists of names.

        Args:
            strings: One string per sequence, whose characters are symbols, or one list of names per sequence.
            vocabulary: Names of the symbols.
            weights: (N,) weight of each sequence in training. The default is 1.
            labels, inputs, times, actions, state_weights: Other columns, in the format of `from_list`.

        Example:
            >>> Sequences.from_strings(["abba", "ab"], vocabulary="ab").tolist()
            [[0, 1, 1, 0], [0, 1]]
        """
        refuse_one_string(strings)
        vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
        encoded = []
        for n, string in enumerate(strings):
            try:
                encoded.append(vocabulary.encode(string))
            except ValueError as error:
                raise ValueError(f"Sequence {n}: {error}") from None
        columns = {"labels": labels, "inputs": inputs, "times": times, "actions": actions}
        return cls.from_list(encoded, weights, state_weights=state_weights, **columns)

    @classmethod
    def cat(cls, batches: Sequence[Sequences]) -> Sequences:
        """Concatenates batches.

        If only some batches have weights, the weights of the others are 1. If only some have labels or state weights,
        the states of the others are unknown. Inputs, times and actions must be given in all batches that have steps, or
        in none.
        """
        if not batches:
            raise ValueError("`batches` must hold at least one `Sequences`, but is empty.")
        given = [batch for batch in batches if batch.num_steps] or [batches[0]]
        kinds = {batch.num_features for batch in given}
        if len(kinds) > 1:
            found = " and ".join(sorted("none (symbols)" if kind is None else str(kind) for kind in kinds))
            raise ValueError(f"All `batches` must have the same number of features, but found {found}.")
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
        """Collates the items of a data set, `Sequences` or single sequences, for a `DataLoader`."""
        if isinstance(items, Sequences):
            return items
        if all(isinstance(item, Sequences) for item in items):
            return Sequences.cat(items)
        return Sequences.from_list(items)

    # Properties

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Total number of steps of all sequences."""
        return len(self.values)

    @property
    def lengths(self) -> Tensor:
        """(N,) number of steps of each sequence, on the CPU."""
        return self.offsets.diff()

    @property
    def first_steps(self) -> Tensor:
        """Packed numbers of the first steps of the sequences that are not empty, on the device of the values."""
        return self.offsets[:-1][self.lengths > 0].to(self.device)

    @property
    def is_discrete(self) -> bool:
        """Whether the values are symbols."""
        return not self.values.is_floating_point()

    @property
    def num_features(self) -> int | None:
        """Number of entries of each vector; ``None`` for symbols."""
        return None if self.is_discrete else self.values.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the values and the other columns."""
        return self.values.device

    @property
    def observed(self) -> Tensor:
        """(steps,) or (steps, features) mask of the values that are not missing."""
        return self.values >= 0 if self.is_discrete else ~self.values.isnan()

    def num_observed(self) -> Tensor:
        """Weighted number of steps with at least one observed value, as a float64 scalar. It is computed once."""
        if self._num_observed is None:
            observed = self.observed if self.is_discrete else self.observed.any(dim=1)
            weighted = observed if self.weights is None else observed * self.repeat_interleave(self.weights)
            self._num_observed = weighted.sum(dtype=torch.float64)
        return self._num_observed

    @property
    def is_complete(self) -> bool:
        """Whether no value is missing. It is computed once."""
        if self._is_complete is None:
            self._is_complete = bool(self.observed.all())
        return self._is_complete

    def step_weights(self) -> Tensor:
        """(steps,) weight of the sequence of each step in float64; ones if there are no weights."""
        if self.weights is None:
            return torch.ones(self.num_steps, dtype=torch.float64, device=self.device)
        return self.repeat_interleave(self.weights)

    def repeat_interleave(self, per_sequence: Tensor) -> Tensor:
        """Repeats (N, ...) entries of the sequences for each of their steps, giving shape (steps, ...)."""
        lengths = self.lengths.to(per_sequence.device)
        return per_sequence.repeat_interleave(lengths, dim=0, output_size=self.num_steps)

    def counted(self) -> Sequences:
        """Returns the sequences with positive weight; all sequences if there are no weights."""
        if self.weights is None or bool((self.weights > 0).all()):
            return self
        part: Sequences = self[self.weights > 0]
        return part

    def weighted(self, per_sequence: Tensor) -> Tensor:
        """Multiplies (..., N) numbers by the weights of the sequences. The product of infinity and weight 0 is 0."""
        if self.weights is None:
            return per_sequence
        return torch.where(self.weights == 0, torch.zeros_like(per_sequence), per_sequence * self.weights)

    def with_values(self, values: Tensor) -> Sequences:
        """Returns the same sequences with other values, such as states or posteriors. The other columns are kept."""
        return Sequences(values, self.offsets, self.weights)._with_columns(self._columns())

    def replaced(self, **changes: Tensor | None) -> Sequences:
        """Returns the same values with other weights, labels, inputs, times, actions or state weights.

        ``None`` removes a column.
        """
        return Sequences(
            self.values, self.offsets, **{"weights": self.weights, **self._columns(), **changes}
        ).with_columns(self.columns)

    @property
    def has_known_states(self) -> bool:
        """Whether there are labels or state weights."""
        return self.labels is not None or self.state_weights is not None

    def without_labels(self) -> Sequences:
        """Returns the same sequences without labels and state weights. Nothing is copied, and the result is cached."""
        if not self.has_known_states:
            return self
        if self._without_labels is None:
            self._without_labels = copy(self)._with_columns({"labels": None, "state_weights": None})
        return self._without_labels

    def with_columns(self, columns: Sequence[Column] | None) -> Sequences:
        """Sets `columns` and returns this batch."""
        self.columns = None if columns is None else tuple(columns)
        return self

    def with_steps(self, steps: Tensor | slice, offsets: Tensor, weights: Tensor | None = None) -> Sequences:
        """Returns a batch of selected steps, with all columns.

        Args:
            steps: Packed steps, as indices, a mask or a slice.
            offsets: (M + 1,) offsets of the M new sequences.
            weights: (M,) weights of the new sequences. The default is 1.
        """
        steps = steps.to(self.device) if isinstance(steps, Tensor) else steps
        columns = {name: column[steps] for name, column in self._columns().items() if column is not None}
        return Sequences(self.values[steps], offsets, weights, **columns).with_columns(self.columns)

    def _columns(self) -> dict[str, Tensor | None]:
        """Returns labels, inputs, times, actions and state weights by name."""
        return {name: getattr(self, name) for name in STEP_COLUMNS}

    def _with_columns(self, columns: dict[str, Tensor | None]) -> Sequences:
        """Sets columns that were checked before and returns this batch."""
        for name, column in columns.items():
            setattr(self, name, column)
        return self

    def padded(self) -> Tensor:
        """Returns (N, longest, features) vectors padded with NaN, or (N, longest) symbols padded with -1."""
        shape = (len(self), int(self.lengths.max()) if len(self) else 0, *self.values.shape[1:])
        padded = self.values.new_full(shape, MISSING if self.is_discrete else torch.nan)
        padded[self._inside()] = self.values
        return padded

    def packed(self, padded: Tensor) -> Tensor:
        """Removes the padding: returns the entries of (N, longest, ...) that belong to steps, as (steps, ...)."""
        return padded[self._inside()]

    def _inside(self) -> Tensor:
        """(N, longest) mask of the entries that are not padding."""
        lengths = self.lengths.to(self.device)
        return torch.arange(int(self.lengths.max()) if len(self) else 0, device=self.device) < lengths.unsqueeze(1)

    def __getitem__(self, index: Any) -> Any:
        """Returns the values of one sequence for a number.

        For a slice, a list of numbers, a tensor or a mask, returns a batch with all columns.
        """
        if isinstance(index, Tensor | np.ndarray) and index.ndim == 0:
            index = index.item()
        if isinstance(index, (int, np.integer)):
            position = int(index) + len(self) if index < 0 else int(index)
            if not 0 <= position < len(self):
                raise IndexError(f"The batch has {len(self)} sequences, but sequence {index} was requested.")
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
        """Yields consecutive batches of `batch_size` sequences; the last one may be smaller."""
        for first in range(0, len(self), batch_size):
            yield self[first : first + batch_size]

    def to(self, *args: Any, **kwargs: Any) -> Sequences:
        """Moves the batch to a device or dtype, with the arguments of `Tensor.to`.

        Only vectors and inputs change their dtype; whole numbers, weights and times keep theirs.
        """
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
            return self  # As `Tensor.to`. The batch also keeps what it has computed, such as `num_observed`.
        moved = Sequences.__new__(Sequences)
        moved.values, moved.offsets, moved.columns = values, self.offsets, self.columns
        moved.weights = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        # Values that are finite in float64 may be infinite in float32, so they are checked again.
        moved._checked = self._checked if values.dtype == self.values.dtype else None
        moved._num_observed = moved._symbols = moved._is_complete = None
        return moved._with_columns(columns)

    def pin_memory(self, device: Any = None) -> Sequences:
        """Returns a copy in pinned memory. `DataLoader` calls it; `device` is not used."""
        pinned = Sequences(
            self.values.pin_memory(), self.offsets, None if self.weights is None else self.weights.pin_memory()
        )
        pinned._checked = self._checked
        return pinned.with_columns(self.columns)._with_columns(
            {name: None if column is None else column.pin_memory() for name, column in self._columns().items()}
        )

    def tolist(self) -> list[Any]:
        """Returns the values as one list per sequence."""
        return [sequence.tolist() for sequence in self]

    # Checks

    def check(self, num_symbols: int | None, num_features: int | None) -> None:
        """Raises a `ValueError` if the values do not fit a model. The message names the sequence and the position.

        The numbers are checked on the CPU only, and once per batch.

        Args:
            num_symbols: Number of symbols of the model; ``None`` for a model of vectors.
            num_features: Number of features of the model; ``None`` for a model of symbols.
        """
        wanted = (num_symbols, num_features)
        if self._checked == wanted:
            return
        if num_symbols is not None:
            self._check_symbols(num_symbols)
        else:
            self._check_vectors(num_features)
        if self.device.type == "cpu":
            self._checked = wanted

    def _check_symbols(self, num_symbols: int) -> None:
        if not self.is_discrete:
            raise ValueError(
                f"The model emits {num_symbols} symbols, but the sequences hold real vectors of {self.num_features} "
                "features instead."
            )
        if self.device.type != "cpu" or not self.num_steps:
            return
        if int(self.values.max()) >= num_symbols or int(self.values.min()) < MISSING:
            wrong = int(torch.nonzero((self.values.long() >= num_symbols) | (self.values < MISSING))[0, 0])
            n, t = self.locate(wrong)
            raise ValueError(
                f"Symbols must be 0 to {num_symbols - 1}, or {MISSING} for a missing one, "
                f"but position {t} of sequence {n} is {int(self.values[wrong])} instead."
            )

    def _check_vectors(self, num_features: int | None) -> None:
        if self.is_discrete:
            raise ValueError(
                f"The model emits vectors of {num_features} features, but the sequences hold symbols instead. "
                "Give them as floating-point numbers."
            )
        if self.num_features != num_features:
            raise ValueError(f"Each step must have {num_features} features, but has {self.num_features} instead.")
        largest = min(_LARGEST, torch.finfo(self.values.dtype).max)
        if self.device.type == "cpu" and self.num_steps and bool((self.values.abs() > largest).any()):
            row, column = torch.nonzero(self.values.abs() > largest)[0].tolist()
            n, t = self.locate(row)
            where, value = f"feature {column} at position {t} of sequence {n}", float(self.values[row, column])
            if math.isinf(value):
                raise ValueError(f"Values must be finite, or NaN for a missing one, but {where} is {value} instead.")
            raise ValueError(
                f"Values must be between -{_LARGEST:g} and {_LARGEST:g}, so that sums of squares are finite, "
                f"but {where} is {value:g}. Rescale it."
            )

    def check_columns(self, columns: Sequence[Column]) -> None:
        """Raises a `ValueError` if the values do not fit `columns`. The message names the sequence and the position.

        A single categorical column requires symbols. Otherwise the values must be vectors with one entry per column,
        and the entries of a categorical column must be numbers of categories.
        """
        if len(columns) == 1 and columns[0].is_categorical:
            self.check(columns[0].num_categories, None)
            return
        self.check(None, len(columns))
        if self.device.type == "cpu":
            check_categories(self.values, columns, self.locate)

    def check_states(self, num_states: int) -> None:
        """Raises a `ValueError` if labels or state weights do not fit a model. Labels are checked on the CPU only.

        Args:
            num_states: Number of states of the model.
        """
        if self.state_weights is not None and self.state_weights.shape[1] != num_states:
            raise ValueError(
                f"`state_weights` must have {num_states} columns, one for each state of the model, "
                f"but have {self.state_weights.shape[1]} instead."
            )
        if self.labels is None or self.device.type != "cpu" or not self.num_steps:
            return
        if int(self.labels.max()) >= num_states:
            wrong = int(torch.nonzero(self.labels >= num_states)[0, 0])
            n, t = self.locate(wrong)
            raise ValueError(
                f"`labels` must be 0 to {num_states - 1} for a model with {num_states} states, or {MISSING} where the "
                f"state is unknown, but position {t} of sequence {n} is {int(self.labels[wrong])} instead. Increase "
                "`num_states`, or correct the label."
            )

    def symbols(self, num_symbols: int) -> Tensor:
        """Returns the (steps,) symbols in the narrowest of uint8, int16 and int32; missing symbols are `num_symbols`.

        The result is cached. On a device other than the CPU, a batch that was not checked before it was moved is
        checked here, which synchronizes with the device.
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
        """Returns the sequence of a packed step and the position of the step in it."""
        n = int(np.searchsorted(self.offsets.numpy(), step, side="right")) - 1
        return n, step - int(self.offsets[n])

    def __repr__(self) -> str:
        what = "symbols" if self.is_discrete else f"vectors of {self.num_features}"
        columns = "".join(f", {name}" for name, column in self._columns().items() if column is not None)
        weighted = "" if self.weights is None else ", weighted"
        return f"Sequences({len(self)} sequences, {self.num_steps} {what}{weighted}{columns})"


def _checked_values(values: Tensor) -> Tensor:
    """Returns (steps,) signed whole numbers or (steps, features) real numbers."""
    if values.is_floating_point():
        values = values.unsqueeze(1) if values.dim() == 1 else values
        if values.dim() != 2:
            raise ValueError(
                f"`values` must be (steps, features) for real vectors, but has shape {tuple(values.shape)} instead."
            )
        return values if values.dtype in (torch.float32, torch.float64) else values.double()
    if values.dim() == 2 and values.shape[1] > 1:
        return values.double()
    if values.dim() != 1:
        raise ValueError(
            f"`values` must be (steps,) for symbols, but has shape {tuple(values.shape)} instead. "
            "Give vectors as floating-point numbers."
        )
    return values.to(_SIGNED.get(values.dtype, values.dtype))


def _checked_weights(weights: Tensor, num_sequences: int) -> Tensor:
    """Returns the weights, after a check of their shape and, except on CUDA, of their values."""
    if weights.shape != (num_sequences,):
        raise ValueError(
            f"`weights` must hold one number for each of the {num_sequences} sequences, "
            f"but has shape {tuple(weights.shape)} instead."
        )
    if not weights.is_cuda and not bool(torch.isfinite(weights).all() and (weights >= 0).all()):
        bad = int(torch.nonzero(~(torch.isfinite(weights) & (weights >= 0)))[0, 0])
        raise ValueError(
            f"`weights` must be finite and not negative, but the weight of sequence {bad} is {float(weights[bad])} "
            "instead."
        )
    return weights


def _joined_vectors(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the steps of sequences of vectors, which must have the same number of features."""
    filled_arrays = [array for array in arrays if len(array)]
    width = filled_arrays[0].shape[1]
    for n, array in enumerate(arrays):
        if len(array) and array.shape[1] != width:
            raise ValueError(
                f"`sequences` must all have {width} features like the first, but sequence {n} has {array.shape[1]} "
                "instead."
            )
    return np.concatenate(filled_arrays)


def _described(data: Any) -> list[Column] | None:
    """Returns the columns of DataFrames, which must all have the same columns in the same order; otherwise ``None``."""
    frames = frames_of(data)
    if frames is None:
        return None
    names = [str(name) for name in frames[0].columns]
    for n, frame in enumerate(frames):
        if (others := [str(name) for name in frame.columns]) != names:
            raise ValueError(
                f"`sequences` must all have the columns {', '.join(names)} like the first, "
                f"but sequence {n} has {', '.join(others)}."
            )
    return as_columns([Column(name) for name in names])


def _joined(name: str, given: Sequence[Sequences], batches: Sequence[Sequences]) -> Tensor | None:
    """Concatenates a column of the `given` batches; ``None`` if no batch has it. `batches` are used for errors."""
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
    elif name == "state_weights":
        width = next(column.shape[1] for column in columns if column is not None)
        columns = [
            batch.values.new_ones(batch.num_steps, width, dtype=torch.float64) if column is None else column
            for batch, column in zip(given, columns, strict=True)
        ]
    there = [column for column in columns if column is not None]
    if len(there) < len(columns):
        lacking = next(n for n, batch in enumerate(batches) if batch.num_steps and getattr(batch, name) is None)
        raise ValueError(
            f"`batches` must all have `{name}` or none, but batch {lacking} has none. Give them to all batches."
        )
    if len({column.shape[1:] for column in there}) > 1:
        numbers = " and ".join(str(column.shape[1]) for column in there)
        raise ValueError(f"`batches` must have the same number of `{name}`, but have {numbers}.")
    return torch.cat(there)
