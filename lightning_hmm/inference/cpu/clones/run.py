"""Inference in cloned hidden Markov models on a CPU: plans the work with `plan` and calls the compiled kernels.

Messages are normalized probabilities. If the probability of a step underflows, the sequence is either impossible or it
is computed again, in float64 if the messages were float32, otherwise in log space.
"""

# ruff: noqa: B023 (closures over loop variables run inside the same iteration)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_hmm.inference import cloned_portable
from lightning_hmm.inference.cpu.clones import forward_backward, paths, sparse, two_filters
from lightning_hmm.inference.cpu.clones.plan import (
    Arrays,
    KnownSteps,
    Limits,
    PlannedBatch,
    entries,
    padded,
    plan,
    planned_batches,
    select_sequences,
    sort_by_pair,
)
from lightning_hmm.inference.cpu.updates import over_rows, run_flushed
from lightning_hmm.inference.kernels.threads import no_subnormals, workspace

LIMITS = {np.dtype(np.float32): Limits(1e-30, 1e-20), np.dtype(np.float64): Limits(1e-290, 1e-200)}

_COUNT_SHARES = 64  # largest number of shares in which counts are computed
_SMOOTH_SHARES = 8  # number of shares in which the messages of two filters are combined
_WORTH_COPYING = 4  # passes over all entries of a pruned layout from which on the blocks are copied
_TRIED = 100  # steps from which the number of passes over all entries is estimated
_WORTH_PLANNING = 5_000_000  # multiply-adds of a pass from which on two filters are used
_MOST_WARM_UP = 24  # largest number of warm-up steps of a chunk
_CACHE_BYTES = 1 << 21  # size of the transitions that fit in the cache of a core
_READING = 8.0  # time to read an entry from memory, in units of the time for a multiply-add
# Messages are equal up to rounding if their distance, see `two_filters.hilbert_distance`, is at most this.
_SAME = {np.dtype(np.float32): 5e-6, np.dtype(np.float64): 1e-12}


def _count_shares(layout: Arrays, pair_first: np.ndarray) -> list[np.ndarray]:
    """Divides the pairs that have tasks into shares of about the same work."""
    pairs = np.flatnonzero(np.diff(pair_first))
    clones = layout.clones
    work = np.diff(pair_first)[pairs] * clones[layout.pair_source[pairs]] * clones[layout.pair_target[pairs]]
    pairs = pairs[np.argsort(-work, kind="stable")]
    shares = max(1, min(_COUNT_SHARES, int(work.sum()) // 200_000, pairs.shape[0]))
    return [pairs[share::shares] for share in range(shares)]


class Results(NamedTuple):
    """Results of an E-step as arrays.

    log_likelihood: (N,) log p(y).
    impossible_step: (N,) first step of probability zero, -1 if there is none.
    initial_counts: (H,) expected counts of the first state.
    counts: (entries,) expected counts of the stored transitions.
    smoothed: (steps, H) smoothed probabilities times the weight, or no rows unless requested.
    filtered: (steps, H) filtered probabilities, or no rows unless requested.
    last: (N, H) filtered probabilities of the last steps, or no rows unless requested.
    """

    log_likelihood: np.ndarray
    impossible_step: np.ndarray
    initial_counts: np.ndarray
    counts: np.ndarray
    smoothed: np.ndarray
    filtered: np.ndarray
    last: np.ndarray


def _message_shares(num_sequences: int, work: int) -> int:
    return 1 if work < 200_000 else max(1, min(num_sequences, torch.get_num_threads()))


def _chunk_length(layout: Arrays, pairs: np.ndarray, warm_up: int) -> int:
    """Returns the number of steps of a chunk for which the estimated time is least.

    With short chunks, more messages share one reading of a block, but each chunk has its own warm-up.
    """
    occurrences = np.bincount(pairs, minlength=layout.pair_target.shape[0]).astype(float)
    num_pairs = occurrences.sum() ** 2 / (occurrences**2).sum()  # effective number of equally frequent pairs

    def cost(length: int) -> float:
        waiting = 2 * pairs.shape[0] / length / num_pairs  # chunks that wait for a block when it is read
        return (1 + warm_up / length) * (1 + _READING * -np.expm1(-waiting) / waiting)

    return min((4, 8, 16, 32, 64, 128), key=cost)


def _two_filters(
    layout: Arrays, initial, probs, batch: PlannedBatch, weights, *, smooth: bool, per_step: bool
) -> MessageBatch | None:
    """Computes messages with `two_filters`.

    Returns:
        ``None`` if the algorithm cannot be used for this batch, or if a message underflows.
    """
    dtype, offsets, num_steps, lengths = probs.dtype, batch.offsets, batch.steps.shape[0], np.diff(batch.offsets)
    if batch.plan.task_pair.shape[0] != num_steps - np.count_nonzero(lengths):
        return None  # The block of a pair of successive symbols is not stored.
    known, totals = _known_steps(batch), np.zeros(num_steps, dtype)
    directions = (False, True) if smooth else (False,)
    widths = padded(layout)
    sizes = (
        layout.clones[layout.pair_source] * widths[layout.pair_target],
        widths[layout.pair_source] * layout.clones[layout.pair_target],
    )
    compute = _whole_sequences if max(map(sum, sizes)) * dtype.itemsize <= _CACHE_BYTES else _in_chunks
    messages = compute(layout, initial, probs, offsets, known, batch.size, directions, totals)
    if messages is None:
        return None
    alpha, kappa = messages[0], messages[-1]
    smoothed = np.zeros((num_steps if per_step and smooth else 0, int(layout.starts[-1])))
    if smooth:
        borders = np.linspace(0, num_steps, _SMOOTH_SHARES + 1).astype(np.int64)
        succeeded, step_weights = [False] * _SMOOTH_SHARES, np.repeat(weights, lengths)

        def combine(share: int) -> None:
            here = int(borders[share]), int(borders[share + 1])
            succeeded[share] = two_filters.smooth(
                *here, known, layout.starts, step_weights, alpha, totals, kappa, smoothed
            )

        run_flushed(_SMOOTH_SHARES, combine)
        if not all(succeeded):
            return None
    log_likelihood = np.zeros(batch.ids.shape[0])
    log_likelihood[batch.order] = np.add.reduceat(np.log(totals, dtype=np.float64), offsets[batch.order])
    return MessageBatch(batch, alpha, kappa, smoothed, log_likelihood, np.full(batch.ids.shape[0], -1))


def _whole_sequences(
    layout: Arrays, initial, probs, offsets, known: KnownSteps, size: int, directions, totals
) -> list[np.ndarray] | None:
    """Computes the messages of small models, one array for each direction, sequence after sequence.

    The arrays are in a workspace, so they are valid until the next call.
    """
    dtype, widths = probs.dtype, padded(layout)
    sequence_shares = min(offsets.shape[0] - 1, 16)
    source, target, spare = layout.pair_source, layout.pair_target, 4 * int(widths.max())  # Four rows are read at once.
    sizes = [
        layout.clones[target] * widths[source] if backward else layout.clones[source] * widths[target]
        for backward in directions
    ]
    places = [np.append(0, np.cumsum(of_pairs)) for of_pairs in sizes]
    parts = np.cumsum([*(int(place[-1]) + spare for place in places), *(size for _ in directions)])
    space = np.split(workspace(dtype, int(parts[-1])), parts[:-1])
    messages = space[len(directions) :]
    tables = [two_filters.CopiedBlocks(place, widths, values) for place, values in zip(places, space, strict=False)]
    done = [False] * (len(directions) * sequence_shares)

    def copy(direction: int) -> None:
        two_filters.copy_blocks(bool(direction), layout, probs, tables[direction])

    def work(task: int) -> None:
        share, direction = divmod(task, len(directions))
        if sequence_shares == 1:  # A separate call to copy the blocks would take as long as the copying itself.
            copy(direction)
        data = offsets, known, layout.starts, tables[direction], initial, LIMITS[dtype]
        done[task] = two_filters.filter_sequences(
            bool(direction), share, sequence_shares, *data, messages[direction], totals
        )

    if sequence_shares > 1:
        run_flushed(len(directions), copy)
    run_flushed(len(done), work)
    return messages if all(done) else None


def _in_chunks(
    layout: Arrays, initial, probs, offsets, known: KnownSteps, size: int, directions, totals
) -> list[np.ndarray] | None:
    """Computes the messages of large models, one array for each direction, in chunks."""
    dtype, lengths = probs.dtype, np.diff(offsets)
    longest = int(lengths.argmax())
    if lengths[longest] < 4 * _MOST_WARM_UP:
        return None
    ends = offsets[longest] + _MOST_WARM_UP, offsets[longest + 1] - _MOST_WARM_UP - 1
    positions = np.linspace(*ends, 4).astype(np.int64)
    limits, same = LIMITS[dtype], _SAME[dtype]
    warm_up = 1
    with no_subnormals():
        for backward in directions:
            mixing_time = two_filters.mixing_time(
                backward, positions, _MOST_WARM_UP, same, known, layout, probs, limits.flush
            )
            warm_up = max(warm_up, 1 + mixing_time)
    if warm_up > _MOST_WARM_UP:
        return None
    length = _chunk_length(layout, known.pairs[known.pairs >= 0], warm_up)
    num_chunks = -(-lengths // length)
    sequence = np.repeat(np.arange(lengths.shape[0]), num_chunks)
    within = np.arange(sequence.shape[0]) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    firsts = offsets[sequence] + within * length
    lasts = np.minimum(firsts + length, offsets[sequence + 1])
    scratch = 2 * firsts.shape[0] * two_filters.scratch_size(int(layout.clones.max()))
    messages = [np.empty(size + scratch, dtype) for _ in directions]
    done = [False for _ in directions]

    def work(direction: int) -> None:
        if direction:  # Backward, steps decrease, and the last chunk of a sequence comes first.
            first, last = lasts[::-1] - 1, firsts[::-1] - 1
            begins = np.minimum(first + warm_up, offsets[sequence + 1][::-1] - 1)
        else:
            first, last, begins = firsts, lasts, np.maximum(firsts - warm_up, offsets[sequence])
        chunks = two_filters.Chunks(begins, np.ascontiguousarray(first), np.ascontiguousarray(last))
        where, found = (bool(direction), chunks, known, size, layout, probs), (messages[direction], totals)
        if two_filters.filter_chunks(*where, initial, limits, *found):
            done[direction] = two_filters.repair_chunks(*where, limits, same, *found) >= 0

    run_flushed(len(directions), work)
    return messages if all(done) else None


class MessageBatch(NamedTuple):
    """Messages of sequences that are computed together.

    batch: Sequences and their plan.
    alpha: Forward messages.
    kappa: Backward messages as `forward_backward.backward` returns them, empty without a backward pass.
    smoothed: (steps, states) smoothed rows, or no rows unless requested.
    log_likelihood: (sequences,) log-likelihoods, NaN where the messages underflowed.
    impossible_step: (sequences,) first step of probability zero, -1 if there is none.
    """

    batch: PlannedBatch
    alpha: np.ndarray
    kappa: np.ndarray
    smoothed: np.ndarray
    log_likelihood: np.ndarray
    impossible_step: np.ndarray


def _messages(
    layout: Arrays, log_initial, probs, values, evidence, offsets, weights, *, smooth: bool, per_step: bool
) -> Iterator[MessageBatch]:
    """Computes forward and, with `smooth`, backward messages, for as many sequences at a time as fit in memory."""
    dtype, keep = probs.dtype, smooth or per_step
    initial = np.exp(log_initial).astype(dtype)
    data = entries(values, evidence, layout.clones.shape[0])
    only_symbols, whole_blocks = data[1].shape[0] == offsets[-1] and evidence is None, not layout.columns.shape[0]
    for batch in planned_batches(layout, offsets, data, dtype.itemsize, keep=keep):
        if not batch.order.shape[0]:
            continue
        clones, pairs = layout.clones, batch.plan.task_pair
        work = int((clones[layout.pair_source[pairs]] * clones[layout.pair_target[pairs]]).sum())
        found, options = None, {"smooth": smooth, "per_step": per_step}
        if keep and only_symbols and whole_blocks and work >= _WORTH_PLANNING:
            found = _two_filters(layout, initial, probs, batch, weights[batch.ids], **options)
        if found is None:
            shares = _message_shares(batch.order.shape[0], work)
            found = _forward_backward(layout, initial, probs, batch, weights[batch.ids], shares, **options)
        yield found


def _forward_backward(
    layout: Arrays, initial, probs, batch: PlannedBatch, weights, shares: int, *, smooth: bool, per_step: bool
) -> MessageBatch:
    """Computes messages with `forward_backward`."""
    dtype, num_sequences, num_steps = probs.dtype, batch.ids.shape[0], batch.steps.shape[0]
    log_likelihood, impossible = np.zeros(num_sequences), np.full(num_sequences, -1)
    alpha, totals = np.empty(batch.size, dtype), np.zeros(num_steps, dtype)
    forward = forward_backward.Forward(alpha, totals, log_likelihood, np.full(num_sequences, -1))
    arguments = batch.order, batch.offsets, batch.plan, layout, probs
    run_flushed(
        shares,
        lambda share: forward_backward.forward(share, shares, *arguments, initial, LIMITS[dtype], False, forward),
    )
    if np.isnan(log_likelihood).any():
        impossible = _impossible_steps(layout, initial, probs, batch.offsets, batch.entries, log_likelihood)
    kappa = np.empty(batch.size if smooth else 0, dtype)
    smoothed = np.zeros((num_steps if per_step and smooth else 0, int(layout.starts[-1])))
    if smooth:
        counted = np.where(np.isnan(log_likelihood), 0.0, weights)
        run_flushed(
            shares,
            lambda share: forward_backward.backward(share, shares, *arguments, counted, alpha, totals, kappa, smoothed),
        )
    return MessageBatch(batch, alpha, kappa, smoothed, log_likelihood, impossible)


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
    """Runs the E-step (or, without `smooth`, the forward pass) of all sequences, in the data type of `probs`.

    Args:
        layout: Layout of the stored transitions.
        log_initial: (H,) log-probabilities of the first state.
        probs: (entries,) probabilities of the stored transitions.
        values: (steps,) symbols. The number V represents a missing symbol.
        evidence: (steps, V) distributions over the symbols, or ``None`` if the symbols are known.
        offsets: (N + 1,) boundaries of the sequences.
        weights: (N,) weights of the sequences.
        smooth: Whether to run the backward pass.
        per_step: Whether to return the filtered and smoothed rows of all steps.
        last: Whether to return the filtered rows of the last steps.
    """
    dtype, num_states = probs.dtype, int(layout.starts[-1])
    num_sequences, num_steps = offsets.shape[0] - 1, int(offsets[-1])
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
        _compute_again(
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
    """Fills the results with messages that have an entry for each clone of a symbol."""
    for found in _messages(
        layout, log_initial, probs, values, evidence, offsets, weights, smooth=smooth, per_step=per_step
    ):
        batch, planned = found.batch, found.batch.plan
        results.log_likelihood[batch.ids] = found.log_likelihood
        results.impossible_step[batch.ids] = found.impossible_step
        if per_step:
            filtered = np.zeros((batch.steps.shape[0], results.initial_counts.shape[0]))
            forward_backward.scatter(np.arange(batch.steps.shape[0]), planned, layout.starts, found.alpha, filtered)
            results.filtered[batch.steps] = filtered
        if results.last.shape[0]:
            rows = np.zeros((batch.order.shape[0], results.initial_counts.shape[0]))
            last_steps = batch.offsets[1:][batch.order] - 1
            forward_backward.scatter(last_steps, planned, layout.starts, found.alpha, rows)
            results.last[batch.ids[batch.order]] = rows
        if not smooth:
            continue
        if per_step:
            results.smoothed[batch.steps] = found.smoothed
        forward_backward.add_initial(
            batch.order, batch.offsets, planned, layout.starts, found.kappa, results.initial_counts
        )
        pair_first, pair_tasks = sort_by_pair(planned.task_pair, layout.pair_target.shape[0])
        shares = _count_shares(layout, pair_first)
        tasks = pair_first, pair_tasks, planned, layout, probs, found.alpha, found.kappa, results.counts
        run_flushed(len(shares), lambda share: forward_backward.add_counts(shares[share], *tasks))


def _known_steps(batch: PlannedBatch) -> KnownSteps:
    pairs = np.full(batch.steps.shape[0], -1)
    pairs[batch.plan.task_target] = batch.plan.task_pair
    return KnownSteps(batch.entries[1], pairs, batch.plan.entry_at)


def _sparse_forward(
    layout: Arrays, initial, blocks: sparse.Blocks, batch: PlannedBatch, shares: int
) -> tuple[np.ndarray, sparse.Messages]:
    """Returns the log-likelihoods and the forward messages of a pruned layout."""
    dtype, num_steps = blocks.probs.dtype, batch.steps.shape[0]
    messages = sparse.Messages(
        np.empty(batch.size, np.int32),
        np.empty(batch.size, dtype),
        np.zeros(num_steps, np.int64),
        np.zeros(num_steps, dtype),
    )
    log_likelihood = np.zeros(batch.offsets.shape[0] - 1)
    data = batch.order, batch.offsets, _known_steps(batch), layout.starts, blocks, initial, LIMITS[dtype]
    run_flushed(shares, lambda share: sparse.forward(share, shares, *data, messages, log_likelihood))
    return log_likelihood, messages


def _times_read(layout: Arrays, initial, blocks: sparse.Blocks, values, offsets) -> float:
    """Estimates how often a pass reads all stored entries, from the first steps of the longest sequence."""
    first = int(offsets[np.diff(offsets).argmax()])
    few = values[first : first + min(_TRIED, int(np.diff(offsets).max()))]
    data = entries(few, None, layout.clones.shape[0])
    (batch,) = planned_batches(layout, np.array([0, few.shape[0]]), data, 8, keep=True)
    active = _sparse_forward(layout, initial, blocks, batch, 1)[1].active
    return values.shape[0] / layout.pair_target.shape[0] * float((active / layout.clones[batch.entries[1]]).mean())


def _sparse_counts(
    layout: Arrays,
    blocks: sparse.Blocks,
    batch: PlannedBatch,
    messages: sparse.Messages,
    weights,
    shares: int,
    out,
    counts,
) -> None:
    """Runs the backward pass of a pruned layout. Adds initial counts to `out` and transition counts to `counts`."""
    clones, alpha, active, _ = messages
    order, offsets, at, starts = batch.order, batch.offsets, batch.plan.entry_at, layout.starts
    kappa = np.empty(batch.size, alpha.dtype)
    data = order, offsets, _known_steps(batch), starts, blocks, weights, messages, kappa
    run_flushed(shares, lambda share: sparse.backward(share, shares, *data))
    rows = np.zeros_like(order)
    sparse.add_rows(offsets[:-1][order], rows, batch.entries[1], at, starts, clones, kappa, active, out[None])
    step_first, tasks = sort_by_pair(batch.plan.task_pair, layout.pair_target.shape[0])
    steps, count_shares = batch.plan.task_target[tasks], _count_shares(layout, step_first)
    sums = step_first, steps, at, starts, blocks, messages, kappa, counts
    run_flushed(len(count_shares), lambda share: sparse.add_counts(count_shares[share], *sums))


def _fill_from_lists(
    layout: Arrays, initial, probs, values, offsets, weights, results: Results, *, smooth: bool
) -> None:
    """Fills the results of a pruned layout and known symbols with `sparse`."""
    num_pairs, counts = layout.pair_target.shape[0], results.counts
    stored = blocks = sparse.stored_blocks(layout, probs)
    if (
        values.shape[0] >= _WORTH_COPYING * num_pairs
        and _times_read(layout, initial, stored, values, offsets) >= _WORTH_COPYING
    ):
        blocks, counts = sparse.copied_blocks(layout, stored), np.zeros_like(counts)
    data = entries(values, None, layout.clones.shape[0])
    itemsize = probs.dtype.itemsize + 2  # An entry of two messages shares one clone number of 4 bytes.
    for batch in planned_batches(layout, offsets, data, itemsize, keep=smooth):
        ids, symbols, at, order = batch.ids, batch.entries[1], batch.plan.entry_at, batch.order
        work = int(batch.plan.task_pair.shape[0] * (probs.shape[0] // max(num_pairs, 1)))
        shares = _message_shares(order.shape[0], work)
        log_likelihood, messages = _sparse_forward(layout, initial, blocks, batch, shares)
        results.log_likelihood[ids] = log_likelihood
        if np.isnan(log_likelihood).any():
            results.impossible_step[ids] = _impossible_steps(
                layout, initial, probs, batch.offsets, batch.entries, log_likelihood
            )
        if results.last.shape[0]:
            last_steps = batch.offsets[1:][order] - 1
            sparse.add_rows(last_steps, ids[order], symbols, at, layout.starts, *messages[:3], results.last)
        if smooth:
            _sparse_counts(layout, blocks, batch, messages, weights[ids], shares, results.initial_counts, counts)
    if smooth and blocks is not stored:
        sparse.put_back(layout, stored, blocks, counts, results.counts)


def _impossible_steps(layout: Arrays, initial, probs, offsets, step_entries, log_likelihood) -> np.ndarray:
    """Returns the first impossible step of each sequence whose log-likelihood is NaN, and -1 for all others."""
    ids = np.flatnonzero(np.isnan(log_likelihood))
    _, local, *chosen = select_sequences(ids, offsets, *step_entries)
    planned, size = plan(layout, local, *chosen, keep=False)
    found, order = np.full(ids.shape[0], -1), np.argsort(-np.diff(local), kind="stable")
    reached, unused = (initial > 0).astype(probs.dtype), np.zeros(0, probs.dtype)
    forward = forward_backward.Forward(np.empty(size, probs.dtype), unused, np.zeros(ids.shape[0]), found)
    forward_backward.forward(0, 1, order, local, planned, layout, probs, reached, Limits(0.0, 0.0), True, forward)
    impossible = np.full(log_likelihood.shape[0], -1)
    impossible[ids] = found
    return impossible


def _compute_again(
    layout, log_initial, probs, values, evidence, offsets, weights, results: Results, collapsed, smooth, per_step, last
) -> None:
    """Sets the log-likelihood of impossible sequences to -inf. Computes the others in float64 or in log space."""
    impossible = collapsed[results.impossible_step[collapsed] >= 0]
    results.log_likelihood[impossible] = -np.inf
    left = collapsed[results.impossible_step[collapsed] < 0]
    lengths = np.diff(offsets)
    for n in impossible:
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
        found = cloned_portable.e_step(layout, *tensors, single=False, smooth=smooth or per_step)
        exact = Results(*(result.numpy() for result in found))
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
    """Returns the packed states of the most probable paths, and their log-probabilities."""
    data = entries(values, evidence, layout.clones.shape[0])
    log_probability, path = np.zeros(offsets.shape[0] - 1), np.full(int(offsets[-1]), -1)
    for batch in planned_batches(layout, offsets, data, 8, keep=True):
        delta, shifts = np.empty(batch.size), np.empty(batch.steps.shape[0])
        found, scores = np.full(batch.steps.shape[0], -1), np.zeros(batch.ids.shape[0])
        shares = min(batch.ids.shape[0], torch.get_num_threads())
        chain = batch.offsets, batch.plan, layout, probs, log_initial
        run_flushed(shares, lambda share: paths.viterbi(share, shares, *chain, delta, shifts, found, scores))
        path[batch.steps], log_probability[batch.ids] = found, scores
    lost = np.flatnonzero(log_probability == -np.inf)
    if lost.shape[0]:
        initial = np.exp(log_initial).astype(probs.dtype)
        failed = np.where(log_probability == -np.inf, np.nan, 0.0)
        impossible = _impossible_steps(layout, initial, probs, offsets, data, failed)
        # A path exists, but at some step its probability relative to the best state is below the smallest float.
        for n in lost[impossible[lost] < 0]:
            here = slice(int(offsets[n]), int(offsets[n + 1]))
            known, local = None if evidence is None else evidence[here], np.array([0, here.stop - here.start])
            tensors = _tensors(log_initial, probs, values[here], known, local)
            states, score = cloned_portable.viterbi(layout, *tensors)
            path[here], log_probability[n] = states.numpy(), float(score)
    return path, log_probability


def sample_posterior(layout: Arrays, log_initial, probs, values, evidence, offsets, uniforms) -> np.ndarray:
    """Draws state paths from the posterior, with one uniform number per step. They are -1 in impossible sequences."""
    weights = np.ones(offsets.shape[0] - 1)
    filtered = e_step(
        layout, log_initial, probs, values, evidence, offsets, weights, smooth=False, per_step=True
    ).filtered
    states = np.full(uniforms.shape[0], -1)
    symbol_of = np.repeat(np.arange(layout.clones.shape[0]), layout.clones)
    paths.sample_paths(filtered, offsets, layout, symbol_of, probs, uniforms, states)
    return states


def sample(layout: Arrays, initial_probs, probs, offsets, uniforms) -> np.ndarray:
    """Draws state paths from the Markov chain, with one uniform number per step."""
    symbol_of = np.repeat(np.arange(layout.clones.shape[0]), layout.clones)
    return paths.sample_chains(initial_probs, layout, symbol_of, probs, offsets, uniforms)


def mark_above(row_first: np.ndarray, probs: np.ndarray, threshold: float, keep: np.ndarray) -> None:
    """Runs `forward_backward.mark_above` on all rows."""
    over_rows(row_first, forward_backward.mark_above, probs, float(threshold), keep)


def pruned(layout: Arrays, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds and columns of the layout of the entries that are kept."""
    bounds = forward_backward.kept_before(layout.bounds, keep)
    if layout.columns.shape[0]:
        return bounds, layout.columns[keep]
    return bounds, forward_backward.target_clones(layout, np.flatnonzero(keep))
