r"""Forward-backward in plain torch, for any operator on any device.

It is used on devices without compiled kernels, and tests compare compiled kernels with it.

Messages are probabilities that are normalized at every step, so a step is one product with the operator and a few
elementwise operations. Sequences are ordered by length and packed by time. The sequences that have a given step are
then a prefix of those that have the step before, so neither padding nor masks are needed.

.. math:: \alpha_t = (\alpha_{t-1} A \odot b_t) / c_t, \qquad \kappa_t = b_t \odot \beta_t / c_t, \qquad
    \beta_{t-1} = A \kappa_t

The expected counts of the operator are one vector-Jacobian product over all steps, after the backward pass.

The probabilities of a sequence can leave the floating-point range in two ways: the probability of a step underflows, or
a state whose probability was rounded to zero matters later. The second case is detected by another forward pass, in
which a tiny probability is added to every prediction. If this changes the likelihood, a path that was rounded to zero
could have changed it as well. In both cases the sequence is computed again in log space (`log_space`). The host waits
for the device only once, after all steps have been queued, to read whether there are such sequences or parameters that
are NaN.
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
    """Numerical limits of a data type.

    collapse: A sequence is computed in log space if the probability of a step, relative to the most probable emission,
        is below this.
    leak: Probability that the second pass adds to every prediction.
    flush: Forward probabilities below this are set to zero, because dividing by them could overflow.
    negligible: Largest change of a log-likelihood by the second pass that is accepted.
    drift: Largest deviation of the sum of a smoothed row from 1 that is accepted.
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
_COUNTED_AT_ONCE = 1 << 22  # entries of messages in one product of counts; products are summed in the wide type


class _Plan:
    """Indices between packed rows and rows by time, in which all first steps come first, then all second steps.

    order: (running,) sequences that have steps, longest first.
    rows: (steps,) packed row of each row by time.
    inverse: (steps,) row by time of each packed row.
    sequence: (steps,) sequence of each row by time.
    previous: (steps,) row by time of the step before.
    lengths: (N,) lengths of the sequences.
    ends: (running,) rows by time of the last steps.
    slices: Rows by time of each step.
    """

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
            "order": order,
            "rows": rows,
            "inverse": inverse,
            "sequence": order[member] if num_steps else member,
            "previous": starts[np.maximum(step - 1, 0)] + member,
            "lengths": lengths,
            "ends": starts[ordered - 1] + np.arange(len(ordered)) if num_steps else member,
        }
        put = {
            name: torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)
            for name, array in arrays.items()
        }
        self.order, self.rows, self.inverse, self.sequence = put["order"], put["rows"], put["inverse"], put["sequence"]
        self.previous, self.lengths, self.ends = put["previous"], put["lengths"], put["ends"]
        self.slices = [slice(int(first), int(first + size)) for first, size in zip(starts[:-1], sizes, strict=True)]

    def per_sequence(self, rows: Tensor, how: str) -> Tensor:
        """Reduces (steps,) numbers by time to (N,) sums or maxima. They are 0 for sequences without steps."""
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
        operator: Transition operator.
        evidence: Log-likelihoods of the steps for the S states.
        offsets: (N + 1,) boundaries of the sequences, on the CPU.
        weights: (N,) weights of the sequences.
        dtype: Data type of the messages. The default is float64, or float32 on devices without float64. Sums are always
            computed in the default data type.
        smooth: Whether to run the backward pass as well.
        per_step: Whether to return the filtered and smoothed rows. They are computed in any case.
    """
    device, wide = initial.device, wide_dtype(initial.device)
    dtype = wide if dtype is None else dtype
    limits, plan = _RANGES[dtype], _Plan(offsets, device)
    num_sequences, num_states = len(offsets) - 1, len(initial)
    log_rows = evidence.rows().to(wide)
    shifts = log_rows.amax(1).clamp(min=torch.finfo(wide).min)[plan.rows] if len(log_rows) else log_rows.new_zeros(0)
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
        # Dividing by numbers below `flush` could overflow. If this drops a path that matters, the sums of the smoothed
        # rows deviate from 1.
        usable = (alpha >= limits.flush) & ~log_likelihood.isnan()[plan.sequence][:, None]
        alpha = torch.where(usable, alpha, 0.0)
        kappa, beta = _backward(maps, torch.where(usable, emissions / totals[:, None], 0.0), plan)
        gamma = torch.where(usable, alpha * beta, 0.0)
        gamma, kappa, drifted = _normalize_smoothed(gamma, kappa, weights.to(wide), plan, limits)
        log_likelihood = torch.where(drifted, torch.nan, log_likelihood)
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
    if bool(log_likelihood.isnan().any() | log_space.has_invalid_numbers(initial, operator, evidence)):
        log_space.raise_invalid_numbers(initial, operator, evidence)
        found = with_lost_sequences(found, initial, operator, evidence, offsets, weights, smooth)
    return found if per_step else found._replace(smoothed=found.smoothed[:0], filtered=found.filtered[:0])


def _forward(start: Tensor, maps: Prepared, messages: Tensor, plan: _Plan, leak: float) -> tuple[Tensor, Tensor]:
    """Runs the forward pass, in place, on (steps, S) emission probabilities by time.

    Returns:
        (steps, S) filtered rows and (steps,) their sums before normalization.
    """
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
    """Runs the backward pass, in place, on (steps, S) emission probabilities divided by the sums of the forward pass.

    Returns:
        (steps, S) scaled messages kappa and (steps, S) backward messages beta.
    """
    beta = torch.ones_like(kappa)
    for before, here in zip(plan.slices[-2::-1], plan.slices[:0:-1], strict=True):
        scaled = kappa[here].mul_(beta[here])
        beta[before][: len(scaled)] = maps.retract(scaled, plan.rows[here])
    if plan.slices:
        kappa[plan.slices[0]].mul_(beta[plan.slices[0]])
    return kappa, beta


def _normalize_smoothed(
    gamma: Tensor, kappa: Tensor, weights: Tensor, plan: _Plan, limits: _Range
) -> tuple[Tensor, Tensor, Tensor]:
    """Corrects rounding: every smoothed row, and all pairs of states of a step, sum to the weight of the sequence.

    Returns: Smoothed rows and scaled messages in the data type of `weights`, and (N,) whether the sum of a row of the
        sequence deviates too much from 1. The rows of such a sequence are zero.
    """
    sums = gamma.sum(1).to(weights.dtype)
    drifted = ~(plan.per_sequence((sums - 1).abs(), "max") < limits.drift)
    scale = torch.where(
        drifted[plan.sequence] | (sums == 0), 0.0, weights[plan.sequence] / torch.where(sums == 0, 1.0, sums)
    )[:, None]
    gamma, kappa = (torch.where(scale == 0, 0.0, message.to(weights.dtype) * scale) for message in (gamma, kappa))
    return gamma, kappa, drifted


def _counts(
    operator: Operator, alpha: Tensor, kappa: Tensor, plan: _Plan, first: int, wide: torch.dtype
) -> tuple[Tensor, ...]:
    """Computes the expected counts of the transitions into all rows by time from `first` on."""
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
    """Computes the sequences whose log-likelihood is NaN in log space, and adds the results to `found`.

    Tensors without rows in `found` remain empty.
    """
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
