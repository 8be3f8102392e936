"""Work plans for the kernels of cloned hidden Markov models.

A plan consists of the arrays of a layout, the entries and tasks of each step (see `forward_backward`), and the
positions of messages. Sequences are divided into batches whose messages fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import strict_kernel

MESSAGE_BYTES = 1 << 30  # largest size of the messages of a batch of several sequences
_ALIGNED = 16  # Messages begin at multiples of this.
_TABLE = 256  # largest number of symbols for which pairs are looked up in a table


class Limits(NamedTuple):
    """Entries of messages below `flush` are set to zero. If the probability of a step is below `collapse`, the sequence
    is impossible or is computed again.
    """

    flush: float
    collapse: float


class KnownSteps(NamedTuple):
    """Steps with known symbols.

    symbols: Symbol of each step.
    pairs: Pair of the symbols of steps s - 1 and s, or -1 at the first step of a sequence.
    at: Position of the message of each step.
    """

    symbols: np.ndarray
    pairs: np.ndarray
    at: np.ndarray


class Arrays(NamedTuple):
    """Arrays of a layout for the kernels. The names are explained in `forward_backward`."""

    starts: np.ndarray
    pair_first: np.ndarray
    pair_source: np.ndarray
    pair_target: np.ndarray
    bound_base: np.ndarray
    bounds: np.ndarray
    columns: np.ndarray

    @property
    def clones(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def row_first(self) -> np.ndarray:
        """(H + 1,) positions at which the entries of each state begin."""
        sizes = np.diff(self.pair_first) + 1
        places = np.concatenate(
            [np.arange(n) * size + base for n, size, base in zip(self.clones, sizes, self.bound_base, strict=True)]
        )
        return np.append(self.bounds[places], self.bounds[-1])


def layout_arrays(clones: np.ndarray, pairs: np.ndarray, bounds: np.ndarray, columns: np.ndarray) -> Arrays:
    """Creates the arrays from the arguments of `inference.cloned.Layout`."""
    num_symbols = clones.shape[0]
    pair_first = np.searchsorted(pairs[:, 0], np.arange(num_symbols + 1))
    widths = clones * (np.diff(pair_first) + 1)
    base = np.append(0, np.cumsum(widths)[:-1])
    return Arrays(
        np.append(0, np.cumsum(clones)),
        pair_first,
        np.ascontiguousarray(pairs[:, 0]),
        np.ascontiguousarray(pairs[:, 1]),
        base,
        bounds,
        columns,
    )


def entries(
    values: np.ndarray, evidence: np.ndarray | None, num_symbols: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists the symbols that are possible at each step, as entries.

    Symbols keep their data type. `select_sequences` converts them to int64.

    Args:
        values: (steps,) symbols. The number `num_symbols` represents a missing symbol.
        evidence: (steps, V) distributions over the symbols, or ``None`` if the symbols are known.
        num_symbols: Number of symbols V.

    Returns:
        (steps + 1,) positions at which the entries of each step begin, and symbol and weight of each entry.
    """
    if evidence is None:
        missing = values == num_symbols
        if not missing.any():
            return np.arange(values.shape[0] + 1), values, np.ones(values.shape[0])
        size = np.where(missing, num_symbols, 1)
        symbols = np.repeat(values, size)
        symbols[symbols == num_symbols] = np.tile(np.arange(num_symbols), int(missing.sum()))
        return np.append(0, np.cumsum(size)), symbols, np.ones(symbols.shape[0])
    weights = np.where(np.isnan(evidence), 1.0, evidence)
    steps, symbols = np.nonzero(weights > 0)
    return np.searchsorted(steps, np.arange(evidence.shape[0] + 1)), symbols, weights[steps, symbols]


@strict_kernel
def find_pair(u, v, pair_first, pair_target):
    """Returns the number of the stored pair (u, v), or -1 if it is not stored."""
    low, high = pair_first[u], pair_first[u + 1]
    while low < high:
        middle = (low + high) // 2
        if pair_target[middle] < v:
            low = middle + 1
        else:
            high = middle
    return low if low < pair_first[u + 1] and pair_target[low] == v else -1


@strict_kernel
def plan_tasks(offsets, first_entry, entry_symbol, pair_first, pair_target):
    """Lists the tasks by the step they lead to.

    Returns ``first_task`` (steps + 1,), and the source entry, target entry and pair of symbols of each task.
    """
    num_steps = first_entry.shape[0] - 1
    first_task = np.zeros(num_steps + 1, np.int64)
    size = 0
    for n in range(offsets.shape[0] - 1):
        for s in range(offsets[n] + 1, offsets[n + 1]):
            size += (first_entry[s] - first_entry[s - 1]) * (first_entry[s + 1] - first_entry[s])
    source, target, pair = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    num_symbols = pair_first.shape[0] - 1
    table = np.full((num_symbols, num_symbols) if num_symbols <= _TABLE else (0, 0), -1)
    for u in range(table.shape[0]):
        for p in range(pair_first[u], pair_first[u + 1]):
            table[u, pair_target[p]] = p
    count = 0
    for n in range(offsets.shape[0] - 1):
        for s in range(offsets[n], offsets[n + 1]):
            first_task[s] = count
            if s > offsets[n]:
                for e in range(first_entry[s - 1], first_entry[s]):
                    for f in range(first_entry[s], first_entry[s + 1]):
                        u, v = entry_symbol[e], entry_symbol[f]
                        found = table[u, v] if table.shape[0] > 0 else find_pair(u, v, pair_first, pair_target)
                        if found >= 0:
                            source[count], target[count], pair[count] = e, f, found
                            count += 1
    first_task[num_steps] = count
    return first_task, source[:count], target[:count], pair[:count]


@strict_kernel
def sort_by_pair(pair, num_pairs):
    """Sorts tasks by pair.

    Returns the position of the first task of each pair (P + 1,), and the numbers of the tasks.
    """
    first = np.zeros(num_pairs + 1, np.int64)
    for p in pair:
        first[p + 1] += 1
    first = np.cumsum(first)
    place, tasks = first[:-1].copy(), np.empty(pair.shape[0], np.int64)
    for task in range(pair.shape[0]):
        tasks[place[pair[task]]] = task
        place[pair[task]] += 1
    return first, tasks


class Plan(NamedTuple):
    """Entries and tasks of a batch of sequences.

    first_entry: (steps + 1,) first entry of each step.
    entry_symbol, entry_weight, entry_at: Symbol, weight and position of the message of each entry.
    first_task: (steps + 1,) first task that leads to each step.
    task_source, task_target, task_pair: Source entry, target entry and pair of symbols of each task.
    following: Space for linked lists of tasks.
    """

    first_entry: np.ndarray
    entry_symbol: np.ndarray
    entry_weight: np.ndarray
    entry_at: np.ndarray
    first_task: np.ndarray
    task_source: np.ndarray
    task_target: np.ndarray
    task_pair: np.ndarray
    following: np.ndarray


def padded(layout: Arrays) -> np.ndarray:
    """Returns (V,) the size of a message of each symbol, a multiple of `_ALIGNED`."""
    return -(-layout.clones // _ALIGNED) * _ALIGNED


def plan(
    layout: Arrays,
    offsets: np.ndarray,
    first_entry: np.ndarray,
    symbols: np.ndarray,
    weights: np.ndarray,
    *,
    keep: bool,
) -> tuple[Plan, int]:
    """Returns the plan of a batch and the size of its messages.

    With `keep`, the messages of all steps are stored. Otherwise, those of each sequence alternate between two
    positions.
    """
    tasks = plan_tasks(offsets, first_entry, symbols, layout.pair_first, layout.pair_target)
    ends = np.cumsum(padded(layout)[symbols])
    begins = np.append(0, ends)[:-1] if ends.shape[0] else ends
    size = int(ends[-1]) if ends.shape[0] else 0
    if not keep and size:
        step_begins = np.append(begins, size)[first_entry]  # (steps + 1,)
        sizes = np.diff(step_begins)
        lengths = np.diff(offsets)
        largest = int(sizes.max())
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        place = (2 * np.repeat(np.arange(lengths.shape[0]), lengths) + position % 2) * largest
        begins = begins + np.repeat(place - step_begins[:-1], np.diff(first_entry))
        size = 2 * lengths.shape[0] * largest
    first_task, source, target, pair = tasks
    return Plan(
        first_entry, symbols, weights, begins, first_task, source, target, pair, np.empty(pair.shape[0], np.int64)
    ), size


def memory_batches(
    layout: Arrays, offsets: np.ndarray, first_entry: np.ndarray, symbols: np.ndarray, itemsize: int
) -> list[np.ndarray]:
    """Divides the sequences, longest first, into batches whose messages fit in memory. Returns numbers of sequences."""
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    ends = np.append(0, np.cumsum(padded(layout)[symbols]))[first_entry]
    sizes = (ends[offsets[1:]] - ends[offsets[:-1]])[order] * 2 * itemsize
    if int(sizes.sum()) <= MESSAGE_BYTES:
        return [order] if order.shape[0] else []
    batches, first, total = [], 0, 0
    for n, size in enumerate(sizes.tolist()):
        if n > first and total + size > MESSAGE_BYTES:
            batches.append(order[first:n])
            first, total = n, 0
        total += size
    return [*batches, order[first:]]


def select_sequences(
    ids: np.ndarray, offsets: np.ndarray, first_entry: np.ndarray, symbols: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Selects sequences by number. Returns their steps, their offsets, and their entries with int64 symbols."""
    lengths = np.diff(offsets)[ids]
    local = np.append(0, np.cumsum(lengths))
    steps = np.arange(local[-1]) + np.repeat(offsets[ids] - local[:-1], lengths)
    if steps.shape[0] == offsets[-1] and np.array_equal(ids, np.arange(ids.shape[0])):
        return steps, local, first_entry, symbols.astype(np.int64, copy=False), weights
    sizes = np.diff(first_entry)[steps]
    first = np.append(0, np.cumsum(sizes))
    chosen = np.arange(first[-1]) + np.repeat(first_entry[steps] - first[:-1], sizes)
    return steps, local, first, symbols[chosen].astype(np.int64, copy=False), weights[chosen]


class PlannedBatch(NamedTuple):
    """A batch of sequences and its plan.

    ids: Numbers of the sequences.
    steps: Packed steps of the sequences.
    offsets: Boundaries of the sequences within the batch.
    entries: Entries of the batch, as `entries` returns them.
    order: Sequences of the batch that have steps, longest first.
    plan: Entries and tasks.
    size: Size of the messages.
    """

    ids: np.ndarray
    steps: np.ndarray
    offsets: np.ndarray
    entries: tuple[np.ndarray, ...]
    order: np.ndarray
    plan: Plan
    size: int


def planned_batches(
    layout: Arrays, offsets: np.ndarray, data: tuple[np.ndarray, np.ndarray, np.ndarray], itemsize: int, *, keep: bool
) -> Iterator[PlannedBatch]:
    """Plans batches of sequences, longest first. With `keep`, their messages fit in memory; otherwise, there is one
    batch.

    Args:
        layout: Layout of the stored transitions.
        offsets: (N + 1,) boundaries of the sequences.
        data: Result of `entries`.
        itemsize: Bytes of an entry of a message.
        keep: Whether the messages of all steps are stored.
    """
    if keep:
        batches = memory_batches(layout, offsets, *data[:2], itemsize)
    else:
        batches = [np.argsort(-np.diff(offsets), kind="stable")]
    for ids in batches:
        steps, local, *selected = select_sequences(ids, offsets, *data)
        planned, size = plan(layout, local, *selected, keep=keep)
        yield PlannedBatch(ids, steps, local, tuple(selected), np.flatnonzero(np.diff(local)), planned, size)
