"""Inference in cloned hidden Markov models in plain torch, for any device.

It is used on devices without compiled kernels, and tests compare compiled kernels with it. All computations are in log
space. If the symbols of all steps are known, blocks are padded to the largest number of clones of a symbol, M, and a
step takes O(M^2) operations for each sequence. With missing or uncertain symbols, `log_space` is used with the full
matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference import log_space, operators
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.log_space import Chunk, finite_normalizer, padded_chunks, wide_dtype


def positions(layout: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for each stored transition, the number of its pair of symbols, its source clone and its target clone."""
    starts, pair_first, _, _, bound_base, bounds, columns = layout
    pair, source, target = (np.empty(int(bounds[-1]) if bounds.shape[0] else 0, np.int64) for _ in range(3))
    for u in range(starts.shape[0] - 1):
        m, clones = int(pair_first[u + 1] - pair_first[u]), int(starts[u + 1] - starts[u])
        here = bounds[bound_base[u] : bound_base[u] + clones * (m + 1)].reshape(clones, m + 1)
        sizes = np.diff(here, axis=1).reshape(-1)
        part = slice(int(here[0, 0]), int(here[-1, -1]))
        pair[part] = np.repeat(np.tile(np.arange(pair_first[u], pair_first[u + 1]), clones), sizes)
        source[part] = np.repeat(np.arange(clones), sizes.reshape(clones, m).sum(1))
        begins = np.append(0, np.cumsum(sizes))[:-1]
        target[part] = (
            np.arange(int(sizes.sum())) - np.repeat(begins, sizes) if columns.shape[0] == 0 else columns[part]
        )
    return pair, source, target


def states_of(layout: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source state and the target state of each stored transition."""
    pair, source, target = positions(layout)
    return layout.starts[layout.pair_source[pair]] + source, layout.starts[layout.pair_target[pair]] + target


def _expanded(layout: Any, values: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Returns the (H, H) matrix of the stored entries, and their positions in the flattened matrix."""
    num_states = int(layout.starts[-1])
    rows, columns = states_of(layout)
    places = torch.from_numpy(rows * num_states + columns).to(values.device)
    full = values.new_full((num_states * num_states,), fill)
    return full.index_copy(0, places, values).reshape(num_states, num_states), places


def step_rows(layout: Any, values: Tensor, evidence: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the (steps, H) log-likelihoods of the steps."""
    symbol_of = torch.from_numpy(np.repeat(np.arange(layout.clones.shape[0]), layout.clones)).to(values.device)
    if evidence is None:
        possible = (values[:, None] == symbol_of) | (values == layout.clones.shape[0])[:, None]
        return torch.where(possible, 0.0, -torch.inf).to(dtype)
    return torch.nan_to_num(evidence.to(dtype), nan=1.0).log()[:, symbol_of]


def e_step(
    layout: Any,
    initial: Tensor,
    probs: Tensor,
    values: Tensor,
    evidence: Tensor | None,
    offsets: Tensor,
    weights: Tensor,
    *,
    single: bool,
    smooth: bool,
) -> tuple[Tensor, ...]:
    """Computes the same as `cpu.clones.run.e_step`, as tensors on the device of `initial`.

    With `smooth`, the smoothed and filtered rows of all steps are returned.
    """
    dtype = torch.float32 if single else wide_dtype(initial.device)
    log_probs = probs.to(dtype).log()
    if evidence is None and not bool((values == layout.clones.shape[0]).any()):
        return _symbols_e_step(layout, initial.to(dtype), log_probs, values.long(), offsets, weights, smooth=smooth)
    matrix, places = _expanded(layout, log_probs, -torch.inf)
    rows = step_rows(layout, values, evidence, dtype)
    found = log_space.e_step(initial, operators.Dense(matrix), Rows(rows), offsets, weights, smooth=smooth)
    counts = found.counts[0].reshape(-1)[places] if smooth else found.initial.new_zeros(0)
    return *found[:3], counts, found.smoothed, found.filtered, found.last


class _PaddedBlocks(NamedTuple):
    """Blocks of a layout, padded to M clones per symbol.

    blocks: (P + 1, M, M) log-probabilities of each pair of symbols. The last block is for pairs that are not stored.
    places: (entries,) positions of the stored transitions in the flattened blocks.
    pair_number: (V, V) number of the block of each pair of symbols.
    initial: (V, M) log-probabilities of the first state.
    states: (V, M) number of each state. Padding has the number H.
    """

    blocks: Tensor
    places: Tensor
    pair_number: Tensor
    initial: Tensor
    states: Tensor


def _padded_blocks(layout: Any, initial: Tensor, log_probs: Tensor) -> _PaddedBlocks:
    device, num_states = initial.device, int(layout.starts[-1])
    num_symbols, num_pairs, most = layout.clones.shape[0], layout.pair_target.shape[0], int(layout.clones.max())
    pair, source, target = positions(layout)
    places = torch.from_numpy((pair * most + source) * most + target).to(device)
    empty = log_probs.new_full(((num_pairs + 1) * most * most,), -torch.inf)
    blocks = empty.index_copy(0, places, log_probs).reshape(-1, most, most)
    numbers = np.full((num_symbols, num_symbols), num_pairs)
    numbers[layout.pair_source, layout.pair_target] = np.arange(num_pairs)
    states = torch.from_numpy(layout.starts[:-1, None] + np.arange(most)).to(device)
    real = torch.from_numpy(np.arange(most) < layout.clones[:, None]).to(device)
    padded_initial = torch.where(real, initial[states.clamp(max=num_states - 1)], -torch.inf)
    states = torch.where(real, states, num_states)
    return _PaddedBlocks(blocks, places, torch.from_numpy(numbers).to(device), padded_initial, states)


def _symbols_e_step(
    layout: Any, initial: Tensor, log_probs: Tensor, values: Tensor, offsets: Tensor, weights: Tensor, *, smooth: bool
) -> tuple[Tensor, ...]:
    """Runs the E-step for sequences without missing symbols."""
    device, wide = initial.device, wide_dtype(initial.device)
    num_sequences, num_steps, num_states = len(offsets) - 1, len(values), int(layout.starts[-1])
    padded = _padded_blocks(layout, initial, log_probs)
    log_likelihood = torch.zeros(num_sequences, dtype=wide, device=device)
    impossible_step = torch.full((num_sequences,), -1, dtype=torch.int64, device=device)
    # The last column of these tensors collects padding and is dropped.
    last = torch.zeros(num_sequences, num_states + 1, dtype=wide, device=device)
    smoothed, filtered = (
        torch.zeros(num_steps if smooth else 0, num_states + 1, dtype=wide, device=device) for _ in range(2)
    )
    initial_counts = torch.zeros(num_states + 1, dtype=wide, device=device)
    counts = torch.zeros_like(padded.blocks if smooth else padded.blocks[:0], dtype=wide)
    for chunk in padded_chunks(offsets, int(layout.clones.max()), device):
        here = slice(chunk.first, chunk.last)
        messages = _forward(padded, values, chunk, log_likelihood[here], impossible_step[here])
        if not messages:
            continue
        possible, has_steps = impossible_step[here] < 0, chunk.running[0]
        ends = torch.where(has_steps, chunk.ends - 1, 0)
        final = torch.where((possible & has_steps)[:, None], messages[-1].exp().to(wide), last.new_zeros(()))
        last[here] = last[here].scatter(1, padded.states[values[ends]], final)
        if smooth:
            weight = weights[here].to(wide)
            results = smoothed, filtered, initial_counts, counts
            _add_backward(padded, values, chunk, messages, weight, possible, *results)
    stored = counts.reshape(-1)[padded.places] if smooth else counts.reshape(-1)
    trimmed = [array[:, :-1].contiguous() for array in (smoothed, filtered, last)]
    return log_likelihood, impossible_step, initial_counts[:-1].contiguous(), stored, *trimmed


def _forward(
    padded: _PaddedBlocks, values: Tensor, chunk: Chunk, log_likelihood: Tensor, impossible_step: Tensor
) -> list[Tensor]:
    """Runs the forward pass of a chunk. Adds to `log_likelihood` (n,) and sets `impossible_step` (n,), in place.

    Returns:
        (n, M) normalized log-messages of each step. Past the end of a sequence, they are those of its last step.
    """
    messages: list[Tensor] = []
    for t in range(len(chunk.rows)):
        symbols, running = values[chunk.rows[t]], chunk.running[t]
        if t == 0:
            joint = padded.initial[symbols]
        else:
            block = padded.blocks[padded.pair_number[values[chunk.rows[t - 1]], symbols]]
            joint = torch.logsumexp(messages[-1][:, :, None] + block, dim=1)
        total = torch.where(running, torch.logsumexp(joint, dim=1), joint.new_zeros(()))
        message = joint - finite_normalizer(total)[:, None]
        messages.append(message if t == 0 else torch.where(running[:, None], message, messages[-1]))
        log_likelihood += total
        newly_impossible = (impossible_step < 0) & (total == -torch.inf)
        impossible_step.copy_(torch.where(newly_impossible, t, impossible_step))
    return messages


def _add_backward(
    padded: _PaddedBlocks,
    values: Tensor,
    chunk: Chunk,
    messages: list[Tensor],
    weight: Tensor,
    possible: Tensor,
    smoothed: Tensor,
    filtered: Tensor,
    initial_counts: Tensor,
    counts: Tensor,
) -> None:
    """Runs the backward pass of a chunk, and adds its rows and counts to the last four arguments in place."""
    wide = weight.dtype
    back = torch.zeros_like(messages[0])
    for t in range(len(messages) - 1, -1, -1):
        symbols, counted = values[chunk.rows[t]], chunk.running[t] & possible
        states = padded.states[symbols]
        joint = messages[t] + back
        gamma = (joint - finite_normalizer(torch.logsumexp(joint, dim=1))[:, None]).exp().to(wide)
        gamma = torch.where(counted[:, None], gamma * weight[:, None], gamma.new_zeros(()))
        kept = torch.where(counted[:, None], messages[t].exp().to(wide), gamma.new_zeros(()))
        # Padding adds zeros to row 0, so results are added and not stored.
        for rows, added in ((smoothed, gamma), (filtered, kept)):
            rows.index_put_((chunk.rows[t][:, None], states), added, accumulate=True)
        if t == 0:
            initial_counts.index_put_((states,), gamma, accumulate=True)
            continue
        number = padded.pair_number[values[chunk.rows[t - 1]], symbols]
        joint = messages[t - 1][:, :, None] + padded.blocks[number] + back[:, None, :]  # (n, M, M)
        joint = joint - finite_normalizer(torch.logsumexp(joint.flatten(1), dim=1))[:, None, None]
        scale = torch.where(counted, weight, weight.new_zeros(()))[:, None, None]
        expected = torch.where(counted[:, None, None], joint.exp().to(wide) * scale, scale.new_zeros(()))
        counts.index_add_(0, number, expected)
        # Where alpha is zero the backward message is not needed, and it may be infinite.
        reachable = messages[t - 1] > -torch.inf
        source = finite_normalizer(messages[t - 1])
        earlier = torch.where(reachable, torch.logsumexp(joint, dim=2) - source, -torch.inf)
        back = torch.where(chunk.running[t][:, None], earlier, back)


def viterbi(
    layout: Any, initial: Tensor, probs: Tensor, values: Tensor, evidence: Tensor | None, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the same as `cpu.clones.run.viterbi`, with the full matrix."""
    dtype = wide_dtype(initial.device)
    matrix, _ = _expanded(layout, probs.to(dtype).log(), -torch.inf)
    return log_space.viterbi(
        initial, operators.Dense(matrix), Rows(step_rows(layout, values, evidence, dtype)), offsets
    )
