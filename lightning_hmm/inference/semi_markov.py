"""The backend for explicit durations on a CPU, with evidence for the classes of the operator `Duration`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference import backends, cpu
from lightning_hmm.inference.cpu import stays
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.inference.kernels.threads import num_shares, run_shares, workspace
from lightning_hmm.inference.operators import Duration, Operator
from lightning_hmm.inference.results import EStep

_LARGEST_LOG = 300.0  # of a parameter
_LEAST_JUMP = 1e-17
_ENTRIES_AT_ONCE = 1 << 22  # of emission probabilities, which are computed for whole sequences


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
    return stays.Chain(first, jumps, durations, shortest, bool(least < _LEAST_JUMP))


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
    num_sequences, boundaries = len(offsets) - 1, offsets.numpy()
    log_likelihood, last = np.zeros(num_sequences), np.zeros((0 if smooth else num_sequences, operator.num_states))
    sums = [np.zeros((operator.num_classes, width)) for width in (operator.log_durations.shape[1], operator.num_classes)]
    totals = stays.Sums(sums[0], sums[1], sums[0].copy())
    pulled, first = [], 0
    while first < num_sequences or not pulled:
        most = boundaries[first] + max(1, _ENTRIES_AT_ONCE // operator.num_classes)
        after = max(first + 1, int(np.searchsorted(boundaries, most, side="right")) - 1) if num_sequences else 0
        here = slice(first, after)
        part = evidence.at(torch.arange(int(boundaries[first]), int(boundaries[after])))
        found = _run(chain, part, boundaries[first : after + 1], weights[here], smooth, totals, log_likelihood[here], last[here])
        if found is None:
            return _general(initial, operator, evidence, offsets, weights, smooth)
        pulled.append(part.pull(found) if smooth else part.live[:0])
        first = after
        if not num_sequences:
            break
    gradient = torch.cat(pulled) if isinstance(evidence, Rows) else torch.stack(pulled).sum(0)
    result = EStep(
        torch.from_numpy(log_likelihood),
        torch.full((num_sequences,), -1),
        torch.from_numpy(totals.initial).flatten(),
        (torch.from_numpy(totals.jumps * chain.jumps), torch.from_numpy(totals.durations * chain.durations)),
        gradient.detach(),
        torch.zeros(0, operator.num_states, dtype=torch.float64),
        torch.zeros(0, operator.num_states, dtype=torch.float64),
        torch.from_numpy(last),
    )
    return _with_lost(result, initial, operator, evidence, offsets, weights, smooth)


def _run(
    chain: stays.Chain,
    evidence: Evidence,
    boundaries: np.ndarray,
    weights: Tensor,
    smooth: bool,
    totals: stays.Sums,
    log_likelihood: np.ndarray,
    last: np.ndarray,
) -> Tensor | None:
    """Runs some sequences and adds to the results. Returns (steps, K) posteriors, or ``None`` for invalid evidence."""
    rows = evidence.rows().detach().double()
    if not bool((rows < torch.inf).all()):
        return None
    largest = rows.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    probs = (rows - largest).exp().contiguous().numpy()
    impossible = (rows == -torch.inf).contiguous().numpy()
    offsets, size, longest = boundaries - boundaries[0], *chain.durations.shape
    length = int(np.diff(offsets).max(initial=0))
    lanes = num_shares(len(offsets) - 1, 8 * size * (2 * longest + size))
    posteriors = np.zeros((len(rows) if smooth else 0, size))
    parts = [stays.Sums(*map(np.zeros_like, totals)) for _ in range(lanes)]

    def work(lane: int) -> None:
        slots = length if smooth else 2
        memory = workspace(np.dtype(np.float64), (slots + 2) * size * longest)
        messages = memory.reshape(slots + 2, size, longest)
        small = [np.zeros((length + 1, size)) for _ in range(3)]
        stays.run_stays(
            lane, lanes, offsets, weights.double().numpy(), chain, probs, impossible, smooth,
            stays.Scratch(messages[:slots], *small, messages[slots:]), parts[lane], log_likelihood, last, posteriors,
        )  # fmt: skip

    run_shares(lanes, work)
    for part in parts:
        for total, added in zip(totals, part, strict=True):
            total += added
    log_likelihood += np.add.reduceat(
        np.append(largest.numpy()[:, 0], 0.0), np.minimum(offsets[:-1], len(rows))
    ) * (np.diff(offsets) > 0)
    return torch.from_numpy(posteriors)


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
    found = _general(
        initial, operator, part, torch.cat([ends.new_zeros(1), ends]), weights[lost], smooth
    )
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


backends.register(
    backends.Backend("durations", _obstacle, _e_step, cpu.viterbi, takes_classes=True)  # type: ignore[arg-type]
)
