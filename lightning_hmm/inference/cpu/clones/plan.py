"""What the loops of the cloned HMM are told of a layout and of sequences: entries, tasks, addresses of messages, and what fits into memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_hmm.inference.cpu.cache import strict_kernel

MESSAGE_BYTES = (
    1 << 30
)  # messages of sequences that are worked on together stay below this, except those of a single one
_ALIGNED = 16  # messages begin at multiples of so many numbers
_TABLE = 256  # symbols up to which pairs are looked up in a table


class Arrays(NamedTuple):
    """A layout as the loops take it; see `forward_backward`."""

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
        """(H + 1,) where the entries of each state begin."""
        sizes = np.diff(self.pair_first) + 1
        places = np.concatenate(
            [np.arange(n) * size + base for n, size, base in zip(self.clones, sizes, self.bound_base, strict=True)]
        )
        return np.append(self.bounds[places], self.bounds[-1])


def layout_arrays(clones: np.ndarray, pairs: np.ndarray, bounds: np.ndarray, columns: np.ndarray) -> Arrays:
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
    """The symbols that are possible at each step: where each step's begin (steps + 1,), and symbol and weight of each.

    `num_symbols` stands for a missing symbol. Symbols keep their type, which is the narrowest, until `gathered`.
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
    """The number of the stored pair (u, v), or -1."""
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
    """Tasks by the step they lead to: ``first_task`` (steps + 1), and for each its source entry, target entry and pair."""
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
    """Tasks in the order of their pairs: where each pair's begin, (P + 1,), and their numbers."""
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
    """What `forward_lane` needs to know of the sequences of one go; see `forward_backward`."""

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
    """The plan and the size of the messages; without `keep`, only two messages of each sequence have a place of their own."""
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


def goes_of(
    layout: Arrays, offsets: np.ndarray, first_entry: np.ndarray, symbols: np.ndarray, itemsize: int
) -> list[np.ndarray]:
    """The sequences, longest first, in goes whose messages fit into memory."""
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    ends = np.append(0, np.cumsum(padded(layout)[symbols]))[first_entry]
    sizes = (ends[offsets[1:]] - ends[offsets[:-1]])[order] * 2 * itemsize
    if int(sizes.sum()) <= MESSAGE_BYTES:
        return [order] if order.shape[0] else []
    goes, first, total = [], 0, 0
    for n, size in enumerate(sizes.tolist()):
        if n > first and total + size > MESSAGE_BYTES:
            goes.append(order[first:n])
            first, total = n, 0
        total += size
    return [*goes, order[first:]]


def gathered(
    ids: np.ndarray, offsets: np.ndarray, first_entry: np.ndarray, symbols: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The chosen sequences by themselves: their steps, offsets, and entries, whose symbols are int64, as the loops take them."""
    lengths = np.diff(offsets)[ids]
    local = np.append(0, np.cumsum(lengths))
    steps = np.arange(local[-1]) + np.repeat(offsets[ids] - local[:-1], lengths)
    if steps.shape[0] == offsets[-1] and np.array_equal(ids, np.arange(ids.shape[0])):
        return steps, local, first_entry, symbols.astype(np.int64, copy=False), weights
    sizes = np.diff(first_entry)[steps]
    first = np.append(0, np.cumsum(sizes))
    chosen = np.arange(first[-1]) + np.repeat(first_entry[steps] - first[:-1], sizes)
    return steps, local, first, symbols[chosen].astype(np.int64, copy=False), weights[chosen]
