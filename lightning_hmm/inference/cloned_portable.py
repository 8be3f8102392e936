"""The cloned HMM in plain torch: any device, no compiled code, and the oracle of the compiled kernels.

Everything is in log space. Where every step is a symbol, blocks are padded to the most clones a symbol has, M, and a step
costs O(M^2) for each sequence; missing symbols and uncertain evidence go through the expanded matrix and `log_space`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference import log_space, operators
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.log_space import _chunks, _safe, wide_dtype


def positions(layout: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each stored transition: its pair, and the clones of source and target."""
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
    """Of each stored transition: the states it leads from and to."""
    pair, source, target = positions(layout)
    return layout.starts[layout.pair_source[pair]] + source, layout.starts[layout.pair_target[pair]] + target


def _expanded(layout: Any, values: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(H, H) with the stored entries in their places, and where these are in it, flattened."""
    num_states = int(layout.starts[-1])
    rows, columns = states_of(layout)
    places = torch.from_numpy(rows * num_states + columns).to(values.device)
    full = values.new_full((num_states * num_states,), fill)
    return full.index_copy(0, places, values).reshape(num_states, num_states), places


def step_rows(layout: Any, values: Tensor, evidence: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(steps, H) the logarithm of what each step says of the states."""
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
    """As `cpu.clones.run.e_step`: the same results, as tensors on the device of `initial`; all rows of steps where `smooth`."""
    dtype = torch.float32 if single else wide_dtype(initial.device)
    log_probs = probs.to(dtype).log()
    if evidence is None and not bool((values == layout.clones.shape[0]).any()):
        return _symbols_e_step(layout, initial.to(dtype), log_probs, values.long(), offsets, weights, smooth=smooth)
    matrix, places = _expanded(layout, log_probs, -torch.inf)
    rows = step_rows(layout, values, evidence, dtype)
    found = log_space.e_step(initial, operators.Dense(matrix), Rows(rows), offsets, weights, smooth=smooth)
    counts = found.counts[0].reshape(-1)[places] if smooth else found.initial.new_zeros(0)
    return *found[:3], counts, found.smoothed, found.filtered, found.last


def _symbols_e_step(
    layout: Any, initial: Tensor, log_probs: Tensor, values: Tensor, offsets: Tensor, weights: Tensor, *, smooth: bool
) -> tuple[Tensor, ...]:
    device, wide = initial.device, wide_dtype(initial.device)
    num_sequences, num_steps, num_states = len(offsets) - 1, len(values), int(layout.starts[-1])
    num_symbols, num_pairs, most = layout.clones.shape[0], layout.pair_target.shape[0], int(layout.clones.max())
    pair, source, target = positions(layout)
    places = torch.from_numpy((pair * most + source) * most + target).to(device)
    blocks = (
        log_probs.new_full(((num_pairs + 1) * most * most,), -torch.inf)
        .index_copy(0, places, log_probs)
        .reshape(-1, most, most)
    )
    numbers = np.full((num_symbols, num_symbols), num_pairs)  # a pair that is not stored: the last block, which is -inf
    numbers[layout.pair_source, layout.pair_target] = np.arange(num_pairs)
    pair_number = torch.from_numpy(numbers).to(device)
    states = torch.from_numpy(layout.starts[:-1, None] + np.arange(most)).to(
        device
    )  # (V, M); beyond a symbol's clones: of no use
    real = torch.from_numpy(np.arange(most) < layout.clones[:, None]).to(device)
    padded_initial = torch.where(real, initial[states.clamp(max=num_states - 1)], -torch.inf)
    spread = torch.where(real, states, num_states)  # padding goes to a state of its own, which is dropped

    log_likelihood = torch.zeros(num_sequences, dtype=wide, device=device)
    impossible_step = torch.full((num_sequences,), -1, dtype=torch.int64, device=device)
    last = torch.zeros(num_sequences, num_states + 1, dtype=wide, device=device)
    smoothed, filtered = (
        torch.zeros(num_steps if smooth else 0, num_states + 1, dtype=wide, device=device) for _ in range(2)
    )
    initial_counts = torch.zeros(num_states + 1, dtype=wide, device=device)
    counts = torch.zeros(num_pairs + 1 if smooth else 0, most, most, dtype=wide, device=device)
    for chunk in _chunks(offsets, most, device):
        here = slice(chunk.first, chunk.last)
        weight = weights[here].to(wide)
        messages: list[Tensor] = []
        for t in range(len(chunk.rows)):
            symbols, running = values[chunk.rows[t]], chunk.running[t]
            if t == 0:
                joint = padded_initial[symbols]
            else:
                joint = torch.logsumexp(
                    messages[-1][:, :, None] + blocks[pair_number[values[chunk.rows[t - 1]], symbols]], dim=1
                )
            total = torch.where(running, torch.logsumexp(joint, dim=1), joint.new_zeros(()))
            message = joint - _safe(total)[:, None]
            messages.append(message if t == 0 else torch.where(running[:, None], message, messages[-1]))
            log_likelihood[here] += total
            newly_impossible = (impossible_step[here] < 0) & (total == -torch.inf)
            impossible_step[here] = torch.where(newly_impossible, t, impossible_step[here])
        if not messages:
            continue
        possible, has_steps = impossible_step[here] < 0, chunk.running[0]
        ends = torch.where(has_steps, chunk.ends - 1, 0)
        final = torch.where((possible & has_steps)[:, None], messages[-1].exp().to(wide), last.new_zeros(()))
        last[here] = last[here].scatter(1, spread[values[ends]], final)
        if not smooth:
            continue
        back = torch.zeros_like(messages[0])
        for t in range(len(messages) - 1, -1, -1):
            symbols, counted = values[chunk.rows[t]], chunk.running[t] & possible
            joint = messages[t] + back
            gamma = (joint - _safe(torch.logsumexp(joint, dim=1))[:, None]).exp().to(wide)
            gamma = torch.where(counted[:, None], gamma * weight[:, None], gamma.new_zeros(()))
            kept = torch.where(counted[:, None], messages[t].exp().to(wide), gamma.new_zeros(()))
            # Padded places write to row 0, so results are added to zeros rather than stored.
            for rows, added in ((smoothed, gamma), (filtered, kept)):
                rows.index_put_((chunk.rows[t][:, None], spread[symbols]), added, accumulate=True)
            if t == 0:
                initial_counts.index_put_((spread[symbols],), gamma, accumulate=True)
                continue
            number = pair_number[values[chunk.rows[t - 1]], symbols]
            joint = messages[t - 1][:, :, None] + blocks[number] + back[:, None, :]  # (n, M, M)
            joint = joint - _safe(torch.logsumexp(joint.flatten(1), dim=1))[:, None, None]
            share = torch.where(counted, weight, weight.new_zeros(()))
            counts.index_add_(
                0,
                number,
                torch.where(counted[:, None, None], joint.exp().to(wide) * share[:, None, None], share.new_zeros(())),
            )
            # Where alpha is zero the message back is of no use and may be infinite.
            reachable = messages[t - 1] > -torch.inf
            earlier = torch.where(reachable, torch.logsumexp(joint, dim=2) - _safe(messages[t - 1]), -torch.inf)
            back = torch.where(chunk.running[t][:, None], earlier, back)
    stored = counts.reshape(-1)[places] if smooth else counts.reshape(-1)
    trimmed = [array[:, :-1].contiguous() for array in (smoothed, filtered, last)]
    return log_likelihood, impossible_step, initial_counts[:-1].contiguous(), stored, *trimmed


def viterbi(
    layout: Any, initial: Tensor, probs: Tensor, values: Tensor, evidence: Tensor | None, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """As `cloned_cpu.viterbi`, by the expanded matrix."""
    dtype = wide_dtype(initial.device)
    matrix, _ = _expanded(layout, probs.to(dtype).log(), -torch.inf)
    return log_space.viterbi(
        initial, operators.Dense(matrix), Rows(step_rows(layout, values, evidence, dtype)), offsets
    )
