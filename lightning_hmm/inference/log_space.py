"""Forward-backward and Viterbi in log space, for any operator on any device.

These functions are correct for every input, but slow: each step computes (sequences x states x states) entries.
`reference` uses them for sequences whose probabilities leave the floating-point range, and tests compare other
implementations with them. Sequences are processed in chunks of at most `_PAIR_ENTRIES` entries and padded to the
longest of the chunk. The host waits for the device only once, in `viterbi`, to read whether any number is NaN.
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
    """Returns float64, or float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Chunk(NamedTuple):
    """A padded batch of the n sequences from number `first` to number `last`, exclusive.

    rows: (T, n) packed step of each step.
    running: (T, n) whether the sequence has this step. Otherwise the step is padding.
    ends: (n,) packed step after the last one of each sequence.
    """

    first: int
    last: int
    rows: Tensor
    running: Tensor
    ends: Tensor


def padded_chunks(offsets: Tensor, num_states: int, device: torch.device) -> list[Chunk]:
    """Divides sequences into padded batches that have at most `_PAIR_ENTRIES` pairs of states per step."""
    boundaries = offsets.numpy()
    size = max(1, _PAIR_ENTRIES // (num_states * num_states))
    chunks = []
    for first in range(0, len(boundaries) - 1, size):
        part = boundaries[first : first + size + 1]
        steps = np.arange(int(np.diff(part).max(initial=0)))[:, None] + part[:-1]
        running = steps < part[1:]
        rows = np.where(running, steps, 0)
        tensors = (torch.from_numpy(array).to(device, non_blocking=True) for array in (rows, running, part[1:].copy()))
        chunks.append(Chunk(first, first + len(part) - 1, *tensors))
    return chunks


def has_invalid_numbers(initial: Tensor, operator: Operator, evidence: Evidence) -> Tensor:
    """Returns whether a parameter is NaN, or the log-likelihood of a step is NaN or +inf, as a tensor on the device."""
    invalid = [value.isnan().any() for value in (initial, *operator.natural, evidence.live)]
    if isinstance(evidence, Rows):
        invalid.append((evidence.live == torch.inf).any())
    return torch.stack(invalid).any()


def raise_invalid_numbers(initial: Tensor, operator: Operator, evidence: Evidence) -> None:
    """Raises a `ValueError` that names the first parameter or the first step that is not a number, if there is one."""
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


def finite_normalizer(total: Tensor) -> Tensor:
    """Replaces -inf by zero, so that -inf minus the normalizer is -inf and not NaN."""
    return torch.where(total == -torch.inf, torch.zeros_like(total), total)


@torch.no_grad()
def e_step(
    initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor, weights: Tensor, *, smooth: bool = True
) -> EStep:
    """Computes the same as `reference.e_step`, in log space."""
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

    for chunk in padded_chunks(offsets, num_states, device):
        here = slice(chunk.first, chunk.last)
        messages = _forward(log_initial, operator, emissions, chunk, log_likelihood[here], impossible_step[here])
        if not messages:
            continue
        possible = impossible_step[here] < 0
        has_steps = chunk.running[0]
        last[here] = torch.where((possible & has_steps)[:, None], messages[-1].exp(), last.new_zeros(()))
        if smooth:
            weight = weights[here].to(wide)
            results = smoothed, filtered, initial_counts, counts
            _add_backward(operator, emissions, chunk, messages, weight, possible, *results)
    pulled = evidence.pull(smoothed) if smooth else smoothed
    return EStep(log_likelihood, impossible_step, initial_counts, counts, pulled, smoothed, filtered, last)


def _forward(
    log_initial: Tensor,
    operator: Operator,
    emissions: Tensor,
    chunk: Chunk,
    log_likelihood: Tensor,
    impossible_step: Tensor,
) -> list[Tensor]:
    """Runs the forward pass of a chunk. Adds to `log_likelihood` (n,) and sets `impossible_step` (n,), in place.

    Returns:
        (n, S) normalized log-messages of each step. Past the end of a sequence, they are those of its last step.
    """
    messages: list[Tensor] = []
    for t in range(len(chunk.rows)):
        row, running = emissions[chunk.rows[t]], chunk.running[t]
        if t == 0:
            joint = log_initial + row
        else:
            joint = torch.logsumexp(messages[-1][:, :, None] + operator.to_dense(chunk.rows[t]), dim=1) + row
        total = torch.where(running, torch.logsumexp(joint, dim=1), joint.new_zeros(()))
        message = joint - finite_normalizer(total)[:, None]
        messages.append(message if t == 0 else torch.where(running[:, None], message, messages[-1]))
        log_likelihood += total
        newly_impossible = (impossible_step < 0) & (total == -torch.inf)
        impossible_step.copy_(torch.where(newly_impossible, t, impossible_step))
    return messages


def _add_backward(
    operator: Operator,
    emissions: Tensor,
    chunk: Chunk,
    messages: list[Tensor],
    weight: Tensor,
    possible: Tensor,
    smoothed: Tensor,
    filtered: Tensor,
    initial_counts: Tensor,
    counts: tuple[Tensor, ...],
) -> None:
    """Runs the backward pass of a chunk, and adds its rows and counts to the last four arguments in place."""
    back = torch.zeros_like(messages[0])
    for t in range(len(messages) - 1, -1, -1):
        counted = chunk.running[t] & possible
        joint = messages[t] + back
        gamma = (joint - finite_normalizer(torch.logsumexp(joint, dim=1))[:, None]).exp()
        gamma = torch.where(counted[:, None], gamma * weight[:, None], gamma.new_zeros(()))
        # Padding adds zeros to row 0, so results are added and not stored.
        smoothed.index_add_(0, chunk.rows[t], gamma)
        kept = torch.where(counted[:, None], messages[t].exp(), gamma.new_zeros(()))
        filtered.index_add_(0, chunk.rows[t], kept)
        if t == 0:
            initial_counts += gamma.sum(0)
            continue
        matrix, later = operator.to_dense(chunk.rows[t]), (emissions[chunk.rows[t]] + back)[:, None, :]
        pair = messages[t - 1][:, :, None] + matrix + later  # (n, S, S)
        pair = pair - finite_normalizer(torch.logsumexp(pair.flatten(1), dim=1))[:, None, None]
        scale = torch.where(counted, weight, weight.new_zeros(()))
        expected = torch.where(counted[:, None, None], pair.exp(), scale.new_zeros(())) * scale[:, None, None]
        for total, found in zip(counts, operator.counts_of_pairs(expected, chunk.rows[t]), strict=True):
            total += found
        # Where alpha is zero the backward message is not needed, and it may be infinite.
        reachable = messages[t - 1] > -torch.inf
        source = finite_normalizer(messages[t - 1])
        earlier = torch.where(reachable, torch.logsumexp(pair, dim=2) - source, -torch.inf)
        back = torch.where(chunk.running[t][:, None], earlier, back)


@torch.no_grad()
def viterbi(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the most probable paths.

    Returns:
        (steps,) states, which are -1 in impossible sequences, and (N,) log-probabilities of the paths.
    """
    given = initial, operator, evidence
    device, dtype = initial.device, wide_dtype(initial.device)
    initial, emissions, operator = initial.to(dtype), evidence.rows().to(dtype), operator.to(dtype)
    path = torch.zeros(len(emissions) + 1, dtype=torch.int64, device=device)  # Padding writes to the last entry.
    log_probability = torch.zeros(len(offsets) - 1, dtype=dtype, device=device)
    for chunk in padded_chunks(offsets, initial.shape[0], device):
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
    if bool(has_invalid_numbers(*given) | log_probability.isnan().any()):
        raise_invalid_numbers(*given)
    return path[:-1], log_probability
