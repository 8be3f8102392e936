"""Inference in the cloned HMM on a CPU: hands layouts and sequences, planned by `plan`, to the compiled loops.

Messages are probabilities. Where a step keeps too little mass for that, it is found out whether the sequence is impossible;
if it is not, it is done again in float64 or, where it was that already, in log space.
"""

# ruff: noqa: B023 (closures over loop variables run inside the same iteration)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_hmm.inference import cloned_portable
from lightning_hmm.inference.cpu.clones import forward_backward, paths, sparse, two_filters
from lightning_hmm.inference.cpu.clones.plan import Arrays, Plan, entries, gathered, goes_of, padded, plan, sort_by_pair
from lightning_hmm.inference.cpu.updates import over_rows, run_flushed
from lightning_hmm.inference.kernels.lanes import no_subnormals, workspace

# A message entry below FLUSH is taken as zero; a step that keeps less than COLLAPSE of its mass is not trusted.
FLUSH = {np.dtype(np.float32): 1e-30, np.dtype(np.float64): 1e-290}
COLLAPSE = {np.dtype(np.float32): 1e-20, np.dtype(np.float64): 1e-200}

_COUNT_LANES = 64
_WORTH_COPYING = 4  # copies pay where a pass reads all entries of a pruned layout so often
_TRIED = 100  # steps from which it is guessed how many of them a pass reads
_WORTH_PLANNING = 5_000_000  # multiply-adds of a pass from which on two filters are worth their planning
_MOST_WARM_UP = 24
_CACHE_BYTES = 1 << 21  # of transitions that fit into a core's cache
_READING = 8.0  # how much longer it takes to read an entry from memory than to multiply with it
# Messages that differ by no more, in any entry, are the same but for rounding.
_SAME = {np.dtype(np.float32): 5e-6, np.dtype(np.float64): 1e-12}


def _count_lanes(layout: Arrays, pair_first: np.ndarray) -> list[np.ndarray]:
    """The pairs that have tasks, dealt so that the lanes have about the same work."""
    pairs = np.flatnonzero(np.diff(pair_first))
    clones = layout.clones
    work = np.diff(pair_first)[pairs] * clones[layout.pair_source[pairs]] * clones[layout.pair_target[pairs]]
    dealt = pairs[np.argsort(-work, kind="stable")]
    lanes = max(1, min(_COUNT_LANES, int(work.sum()) // 200_000, dealt.shape[0]))
    return [dealt[lane::lanes] for lane in range(lanes)]


class Results(NamedTuple):
    """Log-likelihoods, steps of probability zero (-1: none), initial and transition counts, and rows over the states: smoothed
    (times weight) and filtered ones of all steps, filtered ones of the last steps."""

    log_likelihood: np.ndarray
    impossible_step: np.ndarray
    initial_counts: np.ndarray
    counts: np.ndarray
    smoothed: np.ndarray
    filtered: np.ndarray
    last: np.ndarray


def _message_lanes(num_sequences: int, work: int) -> int:
    return 1 if work < 200_000 else max(1, min(num_sequences, torch.get_num_threads()))


def _chunk_length(layout: Arrays, pairs: np.ndarray, warm_up: int) -> int:
    """Steps of a chunk, so that the time for all is least: short ones share the reading of blocks, but each has its warm-up."""
    occurrences = np.bincount(pairs, minlength=layout.pair_target.shape[0]).astype(float)
    num_pairs = (
        occurrences.sum() ** 2 / (occurrences**2).sum()
    )  # as many as there would be if all were equally frequent

    def cost(length: int) -> float:
        waiting = 2 * pairs.shape[0] / length / num_pairs  # at a block when its turn comes
        return (1 + warm_up / length) * (1 + _READING * -np.expm1(-waiting) / waiting)

    return min((4, 8, 16, 32, 64, 128), key=cost)


def _two_filters(
    layout: Arrays,
    initial,
    probs,
    offsets,
    symbols: np.ndarray,
    planned: Plan,
    size: int,
    weights,
    *,
    smooth: bool,
    per_step: bool,
):
    """Messages by `two_filters`: alpha, totals, kappa and smoothed rows; ``None`` where that does not pay or goes wrong."""
    dtype, at, num_steps, lengths = probs.dtype, planned.entry_at, symbols.shape[0], np.diff(offsets)
    if planned.task_pair.shape[0] != num_steps - np.count_nonzero(lengths):
        return None  # a pair is not stored
    pairs = np.full(num_steps, -1)
    pairs[planned.task_target] = planned.task_pair
    totals = np.zeros(num_steps, dtype)
    ways = (False, True) if smooth else (False,)
    widths = padded(layout)
    sizes = (
        layout.clones[layout.pair_source] * widths[layout.pair_target],
        widths[layout.pair_source] * layout.clones[layout.pair_target],
    )
    go = _whole_sequences if max(map(sum, sizes)) * dtype.itemsize <= _CACHE_BYTES else _in_chunks
    messages = go(layout, initial, probs, offsets, symbols, pairs, at, size, ways, totals)
    if messages is None:
        return None
    alpha, kappa = messages[0], messages[-1]
    smoothed = np.zeros((num_steps if per_step and smooth else 0, int(layout.starts[-1])))
    if smooth:
        borders, common, step_weights = (
            np.linspace(0, num_steps, 9).astype(np.int64),
            [False] * 8,
            np.repeat(weights, lengths),
        )

        def combine(lane: int) -> None:
            here = int(borders[lane]), int(borders[lane + 1])
            common[lane] = two_filters.smooth(
                *here, symbols, pairs, at, layout.starts, step_weights, alpha, totals, kappa, smoothed
            )

        run_flushed(8, combine)
        if not all(common):
            return None
    return alpha, totals, kappa, smoothed


def _whole_sequences(
    layout: Arrays, initial, probs, offsets, symbols, pairs, at, size: int, ways, totals
) -> list[np.ndarray] | None:
    """Messages of small models, forward and backward, sequence after sequence; they are good until the next call."""
    dtype, widths = probs.dtype, padded(layout)
    sequence_lanes = min(offsets.shape[0] - 1, 16)
    source, target, spare = layout.pair_source, layout.pair_target, 4 * int(widths.max())  # rows are read in fours
    sizes = [
        layout.clones[target] * widths[source] if backward else layout.clones[source] * widths[target]
        for backward in ways
    ]
    places = [np.append(0, np.cumsum(of_pairs)) for of_pairs in sizes]
    parts = np.cumsum([*(int(place[-1]) + spare for place in places), *(size for _ in ways)])
    space = np.split(workspace(dtype, int(parts[-1])), parts[:-1])
    tables, messages = list(zip(places, space, strict=False)), space[len(ways) :]
    done = [False] * (len(ways) * sequence_lanes)

    def copy(way: int) -> None:
        two_filters.copy_blocks(bool(way), tables[way][0], widths, layout, probs, tables[way][1])

    def work(task: int) -> None:
        lane, way = divmod(task, len(ways))
        if sequence_lanes == 1:  # to wait for each other would take as long as to copy
            copy(way)
        block_at, blocks = tables[way]
        data = offsets, symbols, pairs, at, block_at, widths, layout.starts, blocks, initial
        done[task] = two_filters.filter_sequences(
            bool(way), lane, sequence_lanes, *data, FLUSH[dtype], COLLAPSE[dtype], messages[way], totals
        )

    if sequence_lanes > 1:
        run_flushed(len(ways), copy)
    run_flushed(len(done), work)
    return messages if all(done) else None


def _in_chunks(
    layout: Arrays, initial, probs, offsets, symbols, pairs, at, size: int, ways, totals
) -> list[np.ndarray] | None:
    """Messages of large models, forward and backward, in chunks."""
    dtype, lengths = probs.dtype, np.diff(offsets)
    longest = int(lengths.argmax())
    if lengths[longest] < 4 * _MOST_WARM_UP:
        return None
    positions = np.linspace(offsets[longest] + _MOST_WARM_UP, offsets[longest + 1] - _MOST_WARM_UP - 1, 4).astype(
        np.int64
    )
    flush, collapse, same = FLUSH[dtype], COLLAPSE[dtype], _SAME[dtype]
    warm_up = 1
    with no_subnormals():
        for backward in ways:
            warm_up = max(
                warm_up,
                1
                + two_filters.mixing_time(
                    backward, positions, _MOST_WARM_UP, same, symbols, pairs, layout, probs, flush
                ),
            )
    if warm_up > _MOST_WARM_UP:
        return None
    length = _chunk_length(layout, pairs[pairs >= 0], warm_up)
    num_chunks = -(-lengths // length)
    sequence = np.repeat(np.arange(lengths.shape[0]), num_chunks)
    within = np.arange(sequence.shape[0]) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    firsts = offsets[sequence] + within * length
    lasts = np.minimum(firsts + length, offsets[sequence + 1])
    messages = [
        np.empty(size + 2 * firsts.shape[0] * two_filters.scratch_size(int(layout.clones.max())), dtype) for _ in ways
    ]
    done = [False for _ in ways]

    def work(way: int) -> None:
        if way:  # backward: steps fall, and a sequence's last chunk is its first
            first, last = lasts[::-1] - 1, firsts[::-1] - 1
            begins = np.minimum(first + warm_up, offsets[sequence + 1][::-1] - 1)
        else:
            first, last, begins = firsts, lasts, np.maximum(firsts - warm_up, offsets[sequence])
        chunks = bool(way), begins, np.ascontiguousarray(first), np.ascontiguousarray(last)
        where = symbols, pairs, at, size, layout, probs
        if two_filters.filter_chunks(*chunks, *where, initial, flush, collapse, messages[way], totals):
            done[way] = two_filters.repair_chunks(*chunks, *where, flush, collapse, same, messages[way], totals) >= 0

    run_flushed(len(ways), work)
    return messages if all(done) else None


class _Go(NamedTuple):
    """The messages of sequences that were worked on together, and what they belong to."""

    ids: np.ndarray
    steps: np.ndarray
    offsets: np.ndarray
    order: np.ndarray
    plan: Plan
    alpha: np.ndarray
    kappa: np.ndarray
    smoothed: np.ndarray
    log_likelihood: np.ndarray
    impossible_step: np.ndarray


def _messages(
    layout: Arrays, log_initial, probs, values, evidence, offsets, weights, *, smooth: bool, per_step: bool
) -> Iterator[_Go]:
    """Forward and, with `smooth`, backward messages of all sequences, those that fit into memory at a time."""
    dtype, num_states, keep = probs.dtype, int(layout.starts[-1]), smooth or per_step
    initial = np.exp(log_initial).astype(dtype)
    data = entries(values, evidence, layout.clones.shape[0])
    symbols_alone, whole_blocks = data[1].shape[0] == offsets[-1] and evidence is None, not layout.columns.shape[0]
    goes = (
        goes_of(layout, offsets, *data[:2], dtype.itemsize) if keep else [np.argsort(-np.diff(offsets), kind="stable")]
    )
    for ids in goes:
        steps, local, *step_entries = gathered(ids, offsets, *data)
        planned, size = plan(layout, local, *step_entries, keep=keep)
        order = np.flatnonzero(np.diff(local))
        if not order.shape[0]:
            continue
        log_likelihood, stopped = np.zeros(ids.shape[0]), np.full(ids.shape[0], -1)
        impossible = np.full(ids.shape[0], -1)
        clones = layout.clones
        work = int(
            (clones[layout.pair_source[planned.task_pair]] * clones[layout.pair_target[planned.task_pair]]).sum()
        )
        if keep and symbols_alone and whole_blocks and work >= _WORTH_PLANNING:
            found = _two_filters(
                layout,
                initial,
                probs,
                local,
                step_entries[1],
                planned,
                size,
                weights[ids],
                smooth=smooth,
                per_step=per_step,
            )
            if found is not None:
                alpha, totals, kappa, smoothed = found
                log_likelihood[order] = np.add.reduceat(np.log(totals, dtype=np.float64), local[order])
                yield _Go(ids, steps, local, order, planned, alpha, kappa, smoothed, log_likelihood, impossible)
                continue
        alpha, totals = np.empty(size, dtype), np.zeros(steps.shape[0], dtype)
        arguments = order, local, planned, layout, probs
        lanes = _message_lanes(order.shape[0], work)
        ends = FLUSH[dtype], COLLAPSE[dtype]
        run_flushed(
            lanes,
            lambda lane: forward_backward.forward_lane(
                lane, lanes, *arguments, initial, *ends, False, alpha, totals, log_likelihood, stopped
            ),
        )
        if np.isnan(log_likelihood).any():
            impossible = _impossible_steps(layout, initial, probs, local, step_entries, log_likelihood)
        kappa, smoothed = (
            np.empty(size if smooth else 0, dtype),
            np.zeros((steps.shape[0] if per_step and smooth else 0, num_states)),
        )
        if smooth:
            counted = np.where(np.isnan(log_likelihood), 0.0, weights[ids])
            run_flushed(
                lanes,
                lambda lane: forward_backward.backward_lane(
                    lane, lanes, *arguments, counted, alpha, totals, kappa, smoothed
                ),
            )
        yield _Go(ids, steps, local, order, planned, alpha, kappa, smoothed, log_likelihood, impossible)


def e_step(
    layout: Arrays,
    log_initial,
    probs,
    values,
    evidence,
    offsets,
    weights,
    *,
    smooth: bool,
    per_step: bool = False,
    last: bool = False,
) -> Results:
    """Runs the E-step (or, without `smooth`, the forward pass) of all sequences, in the precision of `probs`."""
    dtype, num_states, num_sequences, num_steps = (
        probs.dtype,
        int(layout.starts[-1]),
        offsets.shape[0] - 1,
        int(offsets[-1]),
    )
    results = Results(
        np.zeros(num_sequences),
        np.full(num_sequences, -1),
        np.zeros(num_states),
        np.zeros(probs.shape[0] if smooth else 0, dtype),
        np.zeros((num_steps if per_step and smooth else 0, num_states)),
        np.zeros((num_steps if per_step else 0, num_states)),
        np.zeros((num_sequences if last else 0, num_states)),
    )
    if layout.columns.shape[0] and evidence is None and not per_step and not (values == layout.clones.shape[0]).any():
        _fill_from_lists(
            layout, np.exp(log_initial).astype(dtype), probs, values, offsets, weights, results, smooth=smooth
        )
    else:
        _fill_from_rows(
            layout, log_initial, probs, values, evidence, offsets, weights, results, smooth=smooth, per_step=per_step
        )
    collapsed = np.flatnonzero(np.isnan(results.log_likelihood))
    if collapsed.shape[0]:
        _again(
            layout, log_initial, probs, values, evidence, offsets, weights, results, collapsed, smooth, per_step, last
        )
    return results


def _fill_from_rows(
    layout: Arrays,
    log_initial,
    probs,
    values,
    evidence,
    offsets,
    weights,
    results: Results,
    *,
    smooth: bool,
    per_step: bool,
) -> None:
    """Fills the results by messages that have a number for each clone."""
    for go in _messages(
        layout, log_initial, probs, values, evidence, offsets, weights, smooth=smooth, per_step=per_step
    ):
        results.log_likelihood[go.ids] = go.log_likelihood
        results.impossible_step[go.ids] = go.impossible_step
        if per_step:
            filtered = np.zeros((go.steps.shape[0], results.initial_counts.shape[0]))
            forward_backward.scatter(np.arange(go.steps.shape[0]), go.plan, layout.starts, go.alpha, filtered)
            results.filtered[go.steps] = filtered
        if results.last.shape[0]:
            rows = np.zeros((go.order.shape[0], results.initial_counts.shape[0]))
            forward_backward.scatter(go.offsets[1:][go.order] - 1, go.plan, layout.starts, go.alpha, rows)
            results.last[go.ids[go.order]] = rows
        if not smooth:
            continue
        if per_step:
            results.smoothed[go.steps] = go.smoothed
        forward_backward.add_initial(go.order, go.offsets, go.plan, layout.starts, go.kappa, results.initial_counts)
        pair_first, pair_tasks = sort_by_pair(go.plan.task_pair, layout.pair_target.shape[0])
        dealt = _count_lanes(layout, pair_first)
        tasks = pair_first, pair_tasks, go.plan, layout, probs, go.alpha, go.kappa, results.counts
        run_flushed(len(dealt), lambda lane: forward_backward.counts_lane(dealt[lane], *tasks))


def _fill_from_lists(
    layout: Arrays, initial, probs, values, offsets, weights, results: Results, *, smooth: bool
) -> None:
    """Fills the results for symbols alone and a pruned layout; see `sparse`."""
    data, dtype, starts = entries(values, None, layout.clones.shape[0]), probs.dtype, layout.starts
    num_pairs = layout.pair_target.shape[0]
    stored = blocks = sparse.stored_blocks(layout, probs)
    counts, ends = results.counts, (FLUSH[dtype], COLLAPSE[dtype])

    def forward(of: sparse.Blocks, offsets, symbols, planned: Plan, size: int, lanes: int) -> tuple[np.ndarray, ...]:
        """Pairs, log-likelihoods and messages: clones, alpha, how many, totals."""
        num_steps, order = symbols.shape[0], np.flatnonzero(np.diff(offsets))
        pairs = np.full(num_steps, -1)
        pairs[planned.task_target] = planned.task_pair
        messages = (
            np.empty(size, np.int32),
            np.empty(size, dtype),
            np.zeros(num_steps, np.int64),
            np.zeros(num_steps, dtype),
        )
        log_likelihood, data = np.zeros(offsets.shape[0] - 1), (offsets, symbols, pairs, planned.entry_at, starts)
        run_flushed(
            lanes, lambda lane: sparse.forward(lane, lanes, order, *data, of, initial, *ends, *messages, log_likelihood)
        )
        return pairs, log_likelihood, *messages

    def times_read() -> float:
        """How often a pass would read all entries, by the first steps of the longest sequence."""
        first = int(offsets[np.diff(offsets).argmax()])
        few = values[first : first + min(_TRIED, int(np.diff(offsets).max()))].astype(np.int64)
        tried = np.array([0, few.shape[0]])
        planned, size = plan(layout, tried, *entries(few, None, layout.clones.shape[0]), keep=True)
        active = forward(stored, tried, few, planned, size, 1)[4]
        return values.shape[0] / num_pairs * float((active / layout.clones[few]).mean())

    if values.shape[0] >= _WORTH_COPYING * num_pairs and times_read() >= _WORTH_COPYING:
        blocks, counts = sparse.copied_blocks(layout, stored), np.zeros_like(counts)
    width = dtype.itemsize + 2  # with half the number of a clone
    for ids in goes_of(layout, offsets, *data[:2], width) if smooth else [np.argsort(-np.diff(offsets), kind="stable")]:
        _, local, *step_entries = gathered(ids, offsets, *data)
        planned, size = plan(layout, local, *step_entries, keep=smooth)
        symbols, at, order = step_entries[1], planned.entry_at, np.flatnonzero(np.diff(local))
        lanes = _message_lanes(order.shape[0], int(planned.task_pair.shape[0] * (probs.shape[0] // max(num_pairs, 1))))
        pairs, log_likelihood, clones, alpha, active, totals = forward(blocks, local, symbols, planned, size, lanes)
        results.log_likelihood[ids] = log_likelihood
        if np.isnan(log_likelihood).any():
            results.impossible_step[ids] = _impossible_steps(
                layout, initial, probs, local, step_entries, log_likelihood
            )
        if results.last.shape[0]:
            sparse.add_rows(local[1:][order] - 1, ids[order], symbols, at, starts, clones, alpha, active, results.last)
        if not smooth:
            continue
        kappa = np.empty(size, dtype)
        run_flushed(
            lanes,
            lambda lane: sparse.backward(
                lane, lanes, order, local, pairs, at, starts, blocks, weights[ids], clones, alpha, active, totals, kappa
            ),
        )
        sparse.add_rows(
            local[:-1][order],
            np.zeros_like(order),
            symbols,
            at,
            starts,
            clones,
            kappa,
            active,
            results.initial_counts[None],
        )
        step_first, tasks = sort_by_pair(planned.task_pair, num_pairs)
        steps, dealt = planned.task_target[tasks], _count_lanes(layout, step_first)
        run_flushed(
            len(dealt),
            lambda lane: sparse.count(
                dealt[lane], step_first, steps, at, starts, blocks, clones, alpha, active, kappa, counts
            ),
        )
    if smooth and blocks is not stored:
        sparse.put_back(layout, stored, blocks, counts, results.counts)


def _impossible_steps(layout: Arrays, initial, probs, offsets, step_entries, log_likelihood) -> np.ndarray:
    """For sequences that collapsed: the first step that no state can be at, -1 where there is none."""
    ids = np.flatnonzero(np.isnan(log_likelihood))
    _, local, *chosen = gathered(ids, offsets, *step_entries)
    planned, size = plan(layout, local, *chosen, keep=False)
    found, order = np.full(ids.shape[0], -1), np.argsort(-np.diff(local), kind="stable")
    reached, unused = (initial > 0).astype(probs.dtype), np.zeros(0, probs.dtype)
    forward_backward.forward_lane(
        0,
        1,
        order,
        local,
        planned,
        layout,
        probs,
        reached,
        0.0,
        0.0,
        True,
        np.empty(size, probs.dtype),
        unused,
        np.zeros(ids.shape[0]),
        found,
    )
    impossible = np.full(log_likelihood.shape[0], -1)
    impossible[ids] = found
    return impossible


def _again(
    layout, log_initial, probs, values, evidence, offsets, weights, results: Results, collapsed, smooth, per_step, last
) -> None:
    """Sequences that ran out of float range: -inf where they are impossible, else done in float64 or in log space."""
    impossible = collapsed[results.impossible_step[collapsed] >= 0]
    results.log_likelihood[impossible] = -np.inf
    left = collapsed[results.impossible_step[collapsed] < 0]
    lengths = np.diff(offsets)
    for n in impossible:  # nothing can be said of their steps
        results.filtered[offsets[n] : offsets[n + 1]] = 0
        results.last[n : n + 1] = 0
    if not left.shape[0]:
        return
    local = np.append(0, np.cumsum(lengths[left]))
    steps = np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in left])
    data = values[steps], None if evidence is None else evidence[steps], local, weights[left]
    if probs.dtype == np.float32:
        exact = e_step(
            layout, log_initial, probs.astype(np.float64), *data, smooth=smooth, per_step=per_step, last=last
        )
    else:
        tensors = _tensors(log_initial, probs, *data)
        exact = Results(
            *(
                result.numpy()
                for result in cloned_portable.e_step(layout, *tensors, single=False, smooth=smooth or per_step)
            )
        )
    results.log_likelihood[left] = exact.log_likelihood
    results.initial_counts[:] += exact.initial_counts
    if smooth:
        results.counts[:] += exact.counts.astype(results.counts.dtype)
    if per_step:
        results.filtered[steps] = exact.filtered
        if smooth:
            results.smoothed[steps] = exact.smoothed
    if last:
        results.last[left] = exact.last


def _tensors(*arrays: np.ndarray | None) -> list[Any]:
    return [None if array is None else torch.from_numpy(array) for array in arrays]


def viterbi(layout: Arrays, log_initial, probs, values, evidence, offsets) -> tuple[np.ndarray, np.ndarray]:
    """Returns the most probable paths, packed, and their log-probabilities."""
    first_entry, symbols, entry_weights = entries(values, evidence, layout.clones.shape[0])
    log_probability, path = np.zeros(offsets.shape[0] - 1), np.full(int(offsets[-1]), -1)
    for ids in goes_of(layout, offsets, first_entry, symbols, 8):
        steps, local, *step_entries = gathered(ids, offsets, first_entry, symbols, entry_weights)
        planned, size = plan(layout, local, *step_entries, keep=True)
        delta, shifts = np.empty(size), np.empty(steps.shape[0])
        found, scores = np.full(steps.shape[0], -1), np.zeros(ids.shape[0])
        lanes = min(ids.shape[0], torch.get_num_threads())
        run_flushed(
            lanes,
            lambda lane: paths.viterbi_lane(
                lane, lanes, local, planned, layout, probs, log_initial, delta, shifts, found, scores
            ),
        )
        path[steps], log_probability[ids] = found, scores
    lost = np.flatnonzero(log_probability == -np.inf)
    if lost.shape[0]:
        initial = np.exp(log_initial).astype(probs.dtype)
        impossible = _impossible_steps(
            layout,
            initial,
            probs,
            offsets,
            (first_entry, symbols, entry_weights),
            np.where(log_probability == -np.inf, np.nan, 0.0),
        )
        for n in lost[
            impossible[lost] < 0
        ]:  # the path is there, but below the smallest float beside the best of some step
            here = slice(int(offsets[n]), int(offsets[n + 1]))
            data = values[here], None if evidence is None else evidence[here], np.array([0, here.stop - here.start])
            states, score = cloned_portable.viterbi(layout, *_tensors(log_initial, probs, *data))
            path[here], log_probability[n] = states.numpy(), float(score)
    return path, log_probability


def sample_posterior(layout: Arrays, log_initial, probs, values, evidence, offsets, uniforms) -> np.ndarray:
    """State paths drawn from the posterior, from one uniform number a step; -1 in impossible sequences."""
    filtered = e_step(
        layout,
        log_initial,
        probs,
        values,
        evidence,
        offsets,
        np.ones(offsets.shape[0] - 1),
        smooth=False,
        per_step=True,
    ).filtered
    states = np.full(uniforms.shape[0], -1)
    symbol_of = np.repeat(np.arange(layout.clones.shape[0]), layout.clones)
    paths.sample_paths(filtered, offsets, layout, symbol_of, probs, uniforms, states)
    return states


def sample(layout: Arrays, initial_probs, probs, offsets, uniforms) -> np.ndarray:
    """State paths of the Markov chain."""
    symbol_of = np.repeat(np.arange(layout.clones.shape[0]), layout.clones)
    return paths.sample_chains(initial_probs, layout, symbol_of, probs, offsets, uniforms)


def mark_above(row_first: np.ndarray, probs: np.ndarray, threshold: float, keep: np.ndarray) -> None:
    """See `forward_backward.mark_above`."""
    over_rows(row_first, forward_backward.mark_above, probs, float(threshold), keep)


def pruned(layout: Arrays, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds and columns of the entries that are kept."""
    bounds = forward_backward.kept_before(layout.bounds, keep)
    if layout.columns.shape[0]:
        return bounds, layout.columns[keep]
    return bounds, forward_backward.target_clones(layout, np.flatnonzero(keep))
