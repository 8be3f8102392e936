r"""Forward-backward in plain torch, for any operator on any device: the path of devices without compiled kernels, and their oracle.

Messages are probabilities that are normalized at every step, so a step is one product with the operator and a few elementwise
operations. Sequences are ordered by length and packed by time: those that are still running at a step are a prefix of those
of the step before, and nothing is padded or masked.

.. math:: \alpha_t = (\alpha_{t-1} A \odot b_t) / c_t, \qquad \kappa_t = b_t \odot \beta_t / c_t, \qquad \beta_{t-1} = A \kappa_t

The expected counts of the operator are one vector-Jacobian product over all steps, after the backward pass.

Two kinds of sequences leave the range of floating-point numbers: those in which a step collapses, and those in which a state
that was rounded to zero would matter later. The second kind is found by a pass in which every prediction leaks a tiny probability into all
states: where that changes the likelihood, a lost path could have as well. Both kinds run again in log space
(`log_space`). Whether there are any, or a parameter that is NaN, is the only value that the host reads, after all steps have been queued.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference import log_space
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.inference.log_space import wide_dtype
from lightning_hmm.inference.operators import Operator, Prepared
from lightning_hmm.inference.results import EStep


class _Range(NamedTuple):
    """What a precision can hold.

    collapse: a step whose probability, relative to the best emission, is below this is run in log space.
    leak: what the second pass adds to every prediction.
    flush: forward probabilities below this cannot be divided by.
    negligible: how much the leaks may change a log-likelihood.
    drift: how far the sum of a smoothed row may be off.
    """

    collapse: float
    leak: float
    flush: float
    negligible: float
    drift: float


_RANGES = {
    torch.float32: _Range(1e-12, 1e-37, 1e-25, 1e-5, 1e-3),
    torch.float64: _Range(1e-100, 1e-300, 1e-180, 1e-9, 1e-7),
}
_COUNTED_AT_ONCE = 1 << 22  # entries of messages in a product of counts; sums over more are taken in the wide type


class _Plan:
    """Where the rows of a batch are, by time; from the offsets, on the host."""

    def __init__(self, offsets: Tensor, device: torch.device) -> None:
        boundaries = offsets.numpy()
        lengths = np.diff(boundaries)
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]
        ordered = lengths[order]
        num_steps = int(ordered[0]) if len(ordered) else 0
        sizes = np.searchsorted(-ordered, -np.arange(num_steps), side="left")  # sequences longer than t
        starts = np.concatenate([[0], np.cumsum(sizes)])
        member = np.concatenate([np.arange(size) for size in sizes]) if num_steps else np.zeros(0, np.int64)
        step = np.repeat(np.arange(num_steps), sizes)
        rows = boundaries[:-1][order][member] + step
        inverse = np.empty_like(rows)
        inverse[rows] = np.arange(len(rows))
        arrays = {
            "order": order,  # (running,) sequences that have steps, longest first
            "rows": rows,  # (steps,) the packed row of each row by time
            "inverse": inverse,  # (steps,) the row by time of each packed row
            "sequence": order[member] if num_steps else member,  # (steps,) of each row by time
            "previous": starts[np.maximum(step - 1, 0)] + member,  # (steps,) the row by time of the step before
            "lengths": lengths,
            "ends": starts[ordered - 1] + np.arange(len(ordered))
            if num_steps
            else member,  # (running,) rows of the last steps
        }
        put = {
            name: torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)
            for name, array in arrays.items()
        }
        self.order, self.rows, self.inverse, self.sequence = put["order"], put["rows"], put["inverse"], put["sequence"]
        self.previous, self.lengths, self.ends = put["previous"], put["lengths"], put["ends"]
        self.slices = [slice(int(first), int(first + size)) for first, size in zip(starts[:-1], sizes, strict=True)]

    def per_sequence(self, rows: Tensor, how: str) -> Tensor:
        """(N,) the sum or the largest of a number of each row by time; 0 for sequences without steps."""
        return torch.segment_reduce(rows[self.inverse], how, lengths=self.lengths, unsafe=True, initial=0.0)


@torch.no_grad()
def e_step(
    initial: Tensor,
    operator: Operator,
    evidence: Evidence,
    offsets: Tensor,
    weights: Tensor,
    *,
    dtype: torch.dtype | None = None,
    smooth: bool = True,
    per_step: bool = True,
) -> EStep:
    """Filters and smooths a batch.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: transitions.
        evidence: of the steps for the S states.
        offsets: (N + 1,) where the sequences begin, on the CPU.
        weights: (N,) of the sequences.
        dtype: of the messages; float64 where the device has it, if not given. Sums are float64 in any case.
        smooth: whether to run the backward pass too.
        per_step: whether to return the filtered and smoothed rows. They are computed in any case.
    """
    device, wide = initial.device, wide_dtype(initial.device)
    log_rows = evidence.rows()
    dtype = wide if dtype is None else dtype
    limits, plan = _RANGES[dtype], _Plan(offsets, device)
    num_sequences, num_states, num_steps = len(offsets) - 1, len(initial), len(log_rows)
    log_rows = log_rows.to(wide)
    shifts = log_rows.amax(1).clamp(min=torch.finfo(wide).min)[plan.rows] if num_steps else log_rows.new_zeros(0)
    emissions = (log_rows[plan.rows] - shifts[:, None]).exp().to(dtype)
    maps, start = operator.prepare(dtype), initial.detach().exp().to(dtype)

    alpha, totals = _forward(start, maps, emissions.clone(), plan, 0.0)
    steps = torch.where(totals > limits.collapse, totals.to(wide).log() + shifts, torch.nan)
    log_likelihood = plan.per_sequence(steps, "sum")
    leaking = _forward(start, maps, emissions.clone(), plan, limits.leak)[1]
    bound = plan.per_sequence(leaking.to(wide).log() + shifts, "sum")
    log_likelihood = torch.where(bound - log_likelihood <= limits.negligible, log_likelihood, torch.nan)

    nothing = torch.zeros(0, num_states, dtype=wide, device=device)
    initial_counts = torch.zeros(num_states, dtype=wide, device=device)
    counts = tuple(torch.zeros_like(value, dtype=wide) for value in operator.natural)
    smoothed = filtered = pulled = nothing
    if smooth:
        lost = log_likelihood.isnan()
        # Dividing by what is below `flush` would overflow. A path that is missed by this shows in the sums of the smoothed rows.
        usable = (alpha >= limits.flush) & ~lost[plan.sequence][:, None]
        alpha = torch.where(usable, alpha, 0.0)
        kappa, beta = _backward(maps, torch.where(usable, emissions / totals[:, None], 0.0), plan)
        gamma = torch.where(usable, alpha * beta, 0.0)
        sums = gamma.sum(1).to(wide)
        astray = ~(plan.per_sequence((sums - 1).abs(), "max") < limits.drift)
        log_likelihood = torch.where(astray, torch.nan, log_likelihood)
        # What rounding has changed is put right: every smoothed row, and all pairs of a step, sum to the weight.
        exact = torch.where(
            astray[plan.sequence] | (sums == 0),
            0.0,
            weights.to(wide)[plan.sequence] / torch.where(sums == 0, 1.0, sums),
        )[:, None]
        gamma, kappa = (torch.where(exact == 0, 0.0, message.to(wide) * exact) for message in (gamma, kappa))
        first = plan.slices[0].stop if plan.slices else 0
        initial_counts = gamma[:first].sum(0)
        counts = _counts(operator, alpha.to(wide), kappa, plan, first, wide)
        smoothed = gamma[plan.inverse]
        pulled = evidence.pull(smoothed)
        filtered = torch.where(log_likelihood.isnan()[plan.sequence][:, None], 0.0, alpha.to(wide))[plan.inverse]
    last = torch.zeros(num_sequences, num_states, dtype=wide, device=device)
    last[plan.order] = torch.where(log_likelihood[plan.order].isnan()[:, None], 0.0, alpha[plan.ends].to(wide))
    impossible = torch.full((num_sequences,), -1, dtype=torch.int64, device=device)
    found = EStep(log_likelihood, impossible, initial_counts, counts, pulled, smoothed, filtered, last)
    if bool(log_likelihood.isnan().any() | log_space.is_spoiled(initial, operator, evidence)):
        log_space.refuse_spoiled(initial, operator, evidence)
        found = with_lost_sequences(found, initial, operator, evidence, offsets, weights, smooth)
    return found if per_step else found._replace(smoothed=found.smoothed[:0], filtered=found.filtered[:0])


def _forward(start: Tensor, maps: Prepared, messages: Tensor, plan: _Plan, leak: float) -> tuple[Tensor, Tensor]:
    """Turns (steps, S) emissions by time into filtered rows, in place; and (steps,) their sums before normalization."""
    totals = messages.new_empty(len(messages))
    before = messages[:0]
    for t, here in enumerate(plan.slices):
        message, total = messages[here], totals[here]
        predicted = start if t == 0 else maps.predict(before[: len(message)], plan.rows[here])
        message.mul_(predicted + leak if leak else predicted)
        torch.sum(message, 1, out=total)
        before = message.div_(total[:, None])
    return messages, totals


def _backward(maps: Prepared, kappa: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Turns (steps, S) emissions over totals into scaled messages, in place; and (steps, S) backward messages."""
    beta = torch.ones_like(kappa)
    for before, here in zip(plan.slices[-2::-1], plan.slices[:0:-1], strict=True):
        scaled = kappa[here].mul_(beta[here])
        beta[before][: len(scaled)] = maps.retract(scaled, plan.rows[here])
    if plan.slices:
        kappa[plan.slices[0]].mul_(beta[plan.slices[0]])
    return kappa, beta


def _counts(
    operator: Operator, alpha: Tensor, kappa: Tensor, plan: _Plan, first: int, wide: torch.dtype
) -> tuple[Tensor, ...]:
    """Expected counts of the transitions into all rows by time from `first` on."""
    totals = tuple(torch.zeros_like(value, dtype=wide) for value in operator.natural)
    size = max(1, _COUNTED_AT_ONCE // max(kappa.shape[1], 1))
    for begin in range(first, len(kappa), size):
        part = slice(begin, begin + size)
        for total, found in zip(
            totals, operator.counts(alpha[plan.previous[part]], kappa[part], plan.rows[part]), strict=True
        ):
            total += found
    return totals


def with_lost_sequences(
    found: EStep,
    initial: Tensor,
    operator: Operator,
    evidence: Evidence,
    offsets: Tensor,
    weights: Tensor,
    smooth: bool,
) -> EStep:
    """Adds what log space finds of the sequences whose log-likelihood is NaN. Rows that `found` does not have are not filled."""
    lost = torch.nonzero(found.log_likelihood.isnan()).flatten()
    which, boundaries = lost.cpu().numpy(), offsets.numpy()
    at = torch.from_numpy(np.concatenate([np.arange(boundaries[n], boundaries[n + 1]) for n in which])).to(
        initial.device
    )
    part = torch.from_numpy(np.append(0, np.cumsum(np.diff(boundaries)[which])))
    theirs = evidence.at(at)
    exact = log_space.e_step(initial, operator.restricted_to(at), theirs, part, weights[lost], smooth=smooth)
    found.log_likelihood[lost], found.impossible_step[lost] = exact.log_likelihood, exact.impossible_step
    if len(found.last):
        found.last[lost] = exact.last
    if not smooth:
        return found
    if len(found.smoothed):
        found.smoothed[at], found.filtered[at] = exact.smoothed, exact.filtered
    counts = tuple(mine + extra for mine, extra in zip(found.counts, exact.counts, strict=True))
    if isinstance(evidence, Rows):
        pulled = found.evidence.index_copy(0, at, exact.smoothed)
    else:
        pulled = found.evidence + exact.evidence
    return found._replace(initial=found.initial + exact.initial, counts=counts, evidence=pulled)
