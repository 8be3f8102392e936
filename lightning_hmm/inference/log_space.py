"""Forward-backward and Viterbi in log space, for any operator on any device.

It is right for every input and slow: each step needs (sequences x states x states) entries. `reference` runs it for sequences that
leave the range of scaled probabilities, and tests compare everything else with it. Sequences are padded to the longest of a chunk, and
chunks hold at most `_PAIR_ENTRIES` entries. Viterbi reads one value on the host, whether there are NaN, after everything is queued; nothing else waits for a
device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference.evidence import Evidence, Quadratic, Rows
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import EStep, refuse_nan

_PAIR_ENTRIES = 1 << 24


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


class _Chunk(NamedTuple):
    """Some sequences, padded: `rows` (T, n) are packed steps, `running` (T, n) says which of them are real."""

    first: int
    last: int
    rows: Tensor
    running: Tensor
    ends: Tensor  # (n,) the packed step after the last one


def _chunks(offsets: Tensor, num_states: int, device: torch.device) -> list[_Chunk]:
    boundaries = offsets.numpy()
    size = max(1, _PAIR_ENTRIES // (num_states * num_states))
    chunks = []
    for first in range(0, len(boundaries) - 1, size):
        part = boundaries[first : first + size + 1]
        steps = np.arange(int(np.diff(part).max(initial=0)))[:, None] + part[:-1]
        running = steps < part[1:]
        rows = np.where(running, steps, 0)
        tensors = (torch.from_numpy(array).to(device, non_blocking=True) for array in (rows, running, part[1:].copy()))
        chunks.append(_Chunk(first, first + len(part) - 1, *tensors))
    return chunks


def is_spoiled(initial: Tensor, operator: Operator, evidence: Evidence) -> Tensor:
    """Whether a parameter or the log-likelihood of a step is NaN, or such a log-likelihood infinite, as a tensor: it is not read here."""
    spoiled = [value.isnan().any() for value in (initial, *operator.natural, evidence.live)]
    if isinstance(evidence, Rows):
        spoiled.append((evidence.live == torch.inf).any())
    return torch.stack(spoiled).any()


def refuse_spoiled(initial: Tensor, operator: Operator, evidence: Evidence) -> None:
    """Raises an error that names the first parameter, or the first step, that is no number."""
    if isinstance(evidence, Rows):
        rows = evidence.live.detach()
        wrong = torch.nonzero((rows.isnan() | (rows == torch.inf)).any(1)).flatten()
        if len(wrong):
            raise ValueError(
                f"`log_likelihoods` must be numbers below infinity, but those of step {int(wrong[0])} are not."
            )
    given = [("initial", initial), *(("transition", value) for value in operator.natural)]
    given += [] if isinstance(evidence, Rows) else [("emission", evidence.live)]
    given += [("columns", evidence.columns)] if isinstance(evidence, Quadratic) else []
    for name, value in given:
        if bool(value.isnan().any()):
            refuse_nan(name, value.detach().cpu().numpy())


def _safe(total: Tensor) -> Tensor:
    """Zero in place of -inf, so that subtracting it leaves -inf rather than NaN."""
    return torch.where(total == -torch.inf, torch.zeros_like(total), total)


@torch.no_grad()
def e_step(
    initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor, weights: Tensor, *, smooth: bool = True
) -> EStep:
    """As `reference.e_step`, in log space."""
    device, num_states = initial.device, initial.shape[0]
    wide = wide_dtype(device)
    emissions, log_initial = evidence.rows().to(wide), initial.to(wide)
    operator = operator.to(wide)
    num_sequences, num_steps = len(offsets) - 1, len(emissions)
    log_likelihood = torch.zeros(num_sequences, dtype=wide, device=device)
    impossible_step = torch.full((num_sequences,), -1, dtype=torch.int64, device=device)
    last = torch.zeros(num_sequences, num_states, dtype=wide, device=device)
    smoothed, filtered = (
        torch.zeros(num_steps if smooth else 0, num_states, dtype=wide, device=device) for _ in range(2)
    )
    initial_counts = torch.zeros(num_states, dtype=wide, device=device)
    counts = tuple(torch.zeros_like(value) for value in operator.natural)

    for chunk in _chunks(offsets, num_states, device):
        here = slice(chunk.first, chunk.last)
        weight = weights[here].to(wide)
        messages: list[Tensor] = []
        for t in range(len(chunk.rows)):
            row, running = emissions[chunk.rows[t]], chunk.running[t]
            if t == 0:
                joint = log_initial + row
            else:
                joint = torch.logsumexp(messages[-1][:, :, None] + operator.to_dense(chunk.rows[t]), dim=1) + row
            total = torch.where(running, torch.logsumexp(joint, dim=1), joint.new_zeros(()))
            message = joint - _safe(total)[:, None]
            messages.append(message if t == 0 else torch.where(running[:, None], message, messages[-1]))
            log_likelihood[here] += total
            newly_impossible = (impossible_step[here] < 0) & (total == -torch.inf)
            impossible_step[here] = torch.where(newly_impossible, t, impossible_step[here])
        if not messages:
            continue
        possible = impossible_step[here] < 0
        has_steps = chunk.running[0]
        last[here] = torch.where((possible & has_steps)[:, None], messages[-1].exp(), last.new_zeros(()))
        if not smooth:
            continue
        back = torch.zeros_like(messages[0])
        for t in range(len(messages) - 1, -1, -1):
            counted = chunk.running[t] & possible
            joint = messages[t] + back
            gamma = (joint - _safe(torch.logsumexp(joint, dim=1))[:, None]).exp()
            gamma = torch.where(counted[:, None], gamma * weight[:, None], gamma.new_zeros(()))
            # Padded places write to row 0, so results are added to zeros rather than stored.
            smoothed.index_add_(0, chunk.rows[t], gamma)
            kept = torch.where(counted[:, None], messages[t].exp(), gamma.new_zeros(()))
            filtered.index_add_(0, chunk.rows[t], kept)
            if t == 0:
                initial_counts += gamma.sum(0)
            else:
                pair = (
                    messages[t - 1][:, :, None]
                    + operator.to_dense(chunk.rows[t])
                    + (emissions[chunk.rows[t]] + back)[:, None, :]
                )  # (n, S, S)
                total = _safe(torch.logsumexp(pair.flatten(1), dim=1))
                pair = pair - total[:, None, None]
                share = torch.where(counted, weight, weight.new_zeros(()))
                expected = torch.where(counted[:, None, None], pair.exp(), share.new_zeros(())) * share[:, None, None]
                for total_counts, found in zip(counts, operator.counts_of_pairs(expected, chunk.rows[t]), strict=True):
                    total_counts += found
                # Where alpha is zero the message back is of no use and may be infinite.
                reachable = messages[t - 1] > -torch.inf
                earlier = torch.where(reachable, torch.logsumexp(pair, dim=2) - _safe(messages[t - 1]), -torch.inf)
                back = torch.where(chunk.running[t][:, None], earlier, back)
    pulled = evidence.pull(smoothed) if smooth else smoothed
    return EStep(log_likelihood, impossible_step, initial_counts, counts, pulled, smoothed, filtered, last)


@torch.no_grad()
def viterbi(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(steps,) the most probable states, -1 in impossible sequences; and (N,) their log-probabilities."""
    given = initial, operator, evidence
    device, dtype = initial.device, wide_dtype(initial.device)
    initial, emissions, operator = initial.to(dtype), evidence.rows().to(dtype), operator.to(dtype)
    path = torch.zeros(len(emissions) + 1, dtype=torch.int64, device=device)  # one place more, for what padding writes
    log_probability = torch.zeros(len(offsets) - 1, dtype=dtype, device=device)
    for chunk in _chunks(offsets, initial.shape[0], device):
        pointers: list[Tensor] = []
        delta = initial.new_zeros(chunk.last - chunk.first, initial.shape[0])
        for t in range(len(chunk.rows)):
            row, running = emissions[chunk.rows[t]], chunk.running[t][:, None]
            if t == 0:
                delta = torch.where(running, initial + row, delta)
            else:
                best, pointer = (delta[:, :, None] + operator.to_dense(chunk.rows[t])).max(dim=1)
                pointers.append(pointer)
                delta = torch.where(running, best + row, delta)
        best, state = delta.max(dim=1)
        log_probability[chunk.first : chunk.last] = best
        for t in range(len(chunk.rows) - 1, -1, -1):
            running = chunk.running[t]
            shown = torch.where(best == -torch.inf, -1, state)
            path[torch.where(running, chunk.rows[t], len(emissions))] = shown
            if t > 0:
                earlier = pointers[t - 1].gather(1, state[:, None]).squeeze(1)
                state = torch.where(running, earlier, state)
    if bool(is_spoiled(*given) | log_probability.isnan().any()):
        refuse_spoiled(*given)
    return path[:-1], log_probability
