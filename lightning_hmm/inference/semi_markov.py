"""The backend for explicit durations on a CPU, with evidence for the classes of the operator `Duration`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference import backends, cpu
from lightning_hmm.inference.cpu import stays
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros, num_shares, run_shares, workspace
from lightning_hmm.inference.operators import Duration, Operator
from lightning_hmm.inference.results import EStep

_LARGEST_LOG = 300.0  # of a parameter
_LEAST_JUMP = 1e-17
_ENTRIES_AT_ONCE = 1 << 17  # of emission probabilities, which then stay in the cache of the processor


def _obstacle(operator: Operator, evidence: Evidence, device: torch.device) -> str | None:
    if not isinstance(operator, Duration):
        return "It runs explicit durations only."
    if device.type != "cpu" or evidence.live.device.type != "cpu":
        return "It runs on the CPU."
    if evidence.num_states != operator.num_classes or operator.num_classes == operator.num_states:
        return "It takes evidence for the classes instead of the states."
    return None


def _chain(initial: Tensor, operator: Duration) -> stays.Chain | None:
    """Returns the probabilities, or ``None`` if they are too large or not numbers."""
    logs = [initial.reshape(operator.log_durations.shape), operator.log_jumps, operator.log_durations]
    if not all(bool((part < _LARGEST_LOG).all()) for part in logs):
        return None
    first, jumps, durations = (part.detach().double().exp().contiguous().numpy() for part in logs)
    least = jumps[logs[1].detach().numpy() > -np.inf].min(initial=1.0)
    shortest = np.stack([durations.min(1), np.where(durations > 0, durations, np.inf).min(1)])
    size = len(jumps)
    padded, transposed = aligned_zeros(np.float64, 2, size, padded_size(size, 8))
    padded[:, :size], transposed[:, :size] = jumps, jumps.T
    return stays.Chain(first, durations, padded, transposed, shortest, bool(least < _LEAST_JUMP))


def _e_step(
    initial: Tensor,
    operator: Duration,
    evidence: Evidence,
    offsets: Tensor,
    weights: Tensor,
    *,
    dtype: torch.dtype | None = None,
    smooth: bool = True,
    per_step: bool = False,
) -> EStep:
    """Runs the E-step with messages in float64. Arguments and result are those of `reference.e_step`."""
    chain = _chain(initial, operator)
    if chain is None:
        return _general(initial, operator, evidence, offsets, weights, smooth)
    num_sequences, boundaries, size = len(offsets) - 1, offsets.numpy(), operator.num_classes
    log_likelihood, last = np.zeros(num_sequences), np.zeros((0 if smooth else num_sequences, operator.num_states))
    jumps, sums, pulled = np.zeros((size, size)), stays.Sums(*map(np.zeros_like, chain[:2])), []
    for first, after in _pieces(boundaries, size):
        here = slice(first, after)
        part = evidence.at(torch.arange(int(boundaries[first]), int(boundaries[after])))
        out = _run(
            chain, part, boundaries[first : after + 1], weights[here], smooth, sums, log_likelihood[here], last[here]
        )
        if out is None:
            return _general(initial, operator, evidence, offsets, weights, smooth)
        if smooth:
            jumps += out.ends[:-1, :size].T @ out.leaving[1:, :size]
            pulled.append(part.pull(torch.from_numpy(out.posteriors)))
    gradient = evidence.live.new_zeros(0)
    if smooth:
        gradient = torch.cat(pulled) if isinstance(evidence, Rows) else torch.stack(pulled).sum(0)
    nothing = torch.zeros(0, operator.num_states, dtype=torch.float64)
    result = EStep(
        torch.from_numpy(log_likelihood),
        torch.full((num_sequences,), -1),
        torch.from_numpy(sums.initial).flatten(),
        (torch.from_numpy(jumps * chain.jumps[:, :size]), torch.from_numpy(sums.durations * chain.durations)),
        gradient.detach(),
        nothing,
        nothing,
        torch.from_numpy(last),
    )
    return _with_lost(result, initial, operator, evidence, offsets, weights, smooth)


def _pieces(boundaries: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Yields runs of consecutive sequences whose emission probabilities are computed at once; one if there are none."""
    first, num_sequences = 0, len(boundaries) - 1
    while first < num_sequences or first == 0:
        most = boundaries[first] + _ENTRIES_AT_ONCE // size
        after = max(first + 1, int(np.searchsorted(boundaries, most, side="right")) - 1)
        yield first, min(after, num_sequences)
        first = after


def _run(
    chain: stays.Chain,
    evidence: Evidence,
    boundaries: np.ndarray,
    weights: Tensor,
    smooth: bool,
    sums: stays.Sums,
    log_likelihood: np.ndarray,
    last: np.ndarray,
) -> stays.Result | None:
    """Runs some sequences and adds to the results. Returns ``None`` if the evidence is not valid."""
    rows = evidence.rows().detach()
    rows = (rows.clone() if rows.data_ptr() == evidence.live.data_ptr() else rows).double().contiguous()
    impossible, largest = np.zeros(rows.shape, np.bool_), np.zeros(len(rows))
    if not stays.relative(rows.numpy(), largest, impossible):
        return None
    probs, offsets, (size, longest) = rows.exp_().numpy(), boundaries - boundaries[0], chain.durations.shape
    padded, length = chain.jumps.shape[1], int(np.diff(offsets).max(initial=0))
    lanes = num_shares(len(offsets) - 1, 16 * size * longest)
    kept = len(rows) if smooth else 0
    out = stays.Result(
        log_likelihood,
        last,
        aligned_zeros(np.float64, len(rows), padded),
        aligned_zeros(np.float64, kept, padded),
        np.zeros((kept, size)),
    )
    parts = [stays.Sums(*map(np.zeros_like, sums)) for _ in range(lanes)]

    def work(lane: int) -> None:
        slots = length if smooth else 2
        memory = workspace(np.dtype(np.float64), (slots + 2) * size * longest).reshape(slots + 2, size, longest)
        scratch = stays.Scratch(
            memory[:slots],
            np.zeros((length + 1, size)),
            aligned_zeros(np.float64, length + 1, padded),
            memory[slots:],
            aligned_zeros(np.float64, padded),
        )
        given = offsets, weights.double().numpy(), chain, probs, impossible, smooth
        stays.run_stays(lane, lanes, *given, scratch, parts[lane], out)

    run_shares(lanes, work)
    for part in parts:
        for total, added in zip(sums, part, strict=True):
            total += added
    which = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    log_likelihood += np.bincount(
        which, weights=np.where(np.isfinite(largest), largest, 0.0), minlength=len(offsets) - 1
    )
    return out


def _general(
    initial: Tensor, operator: Duration, evidence: Evidence, offsets: Tensor, weights: Tensor, smooth: bool
) -> EStep:
    """Runs the E-step of the compiled driver, for which each state has evidence of its own."""
    found = cpu.e_step(
        initial, operator, evidence.shared(operator.classes), offsets, weights, smooth=smooth, per_step=False
    )
    return found._replace(evidence=evidence.gathered(found.evidence, operator.classes)) if smooth else found


def _with_lost(result: EStep, *problem: Any) -> EStep:
    """Adds the sequences whose log-likelihood is NaN."""
    initial, operator, evidence, offsets, weights, smooth = problem
    lost = torch.nonzero(result.log_likelihood.isnan()).flatten()
    if not len(lost):
        return result
    lengths = offsets.diff()[lost]
    ends = lengths.cumsum(0)
    steps = torch.arange(int(ends[-1])) + (offsets[:-1][lost] - ends + lengths).repeat_interleave(lengths)
    part = evidence.at(steps)
    found = _general(initial, operator, part, torch.cat([ends.new_zeros(1), ends]), weights[lost], smooth)
    result.log_likelihood[lost], result.impossible_step[lost] = found.log_likelihood, found.impossible_step
    if not smooth:
        result.last[lost] = found.last
        return result
    if isinstance(evidence, Rows):
        result.evidence[steps] = found.evidence
    else:
        result.evidence.add_(found.evidence)
    for mine, added in zip((result.initial, *result.counts), (found.initial, *found.counts), strict=True):
        mine += added
    return result


backends.register(backends.Backend("durations", _obstacle, _e_step, cpu.viterbi, takes_classes=True))
