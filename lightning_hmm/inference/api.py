r"""Inference in hidden Markov models, for every operator, form of evidence and device.

.. math:: p(y, z) = \pi_{z_1} \prod_{t>1} A_{z_{t-1} z_t} \prod_t b_{z_t}(y_t)

A problem is given by natural parameters, each entry free: `initial` (S,) log-probabilities of the first state, an `Operator` for the
transitions and `Evidence` for the observations. Sequences are packed: sequence n has the steps ``offsets[n]:offsets[n + 1]`` of the evidence. The
gradient of the log-likelihood is the E-step:

.. math:: \partial L / \partial \log A_{ij} = E[\text{number of transitions } i \to j \mid y]

Messages are float64 unless `dtype` asks for float32; counts are summed in float64 in any case. Impossible sequences have a
log-likelihood of -inf. N sequences, S states.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hmm.inference import backends, sampling
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.inference.log_space import wide_dtype
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import EStep, Path, Posterior


@torch.no_grad()
def e_step(
    initial: Tensor,
    operator: Operator,
    evidence: Evidence,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    smooth: bool = True,
    per_step: bool = False,
) -> EStep:
    """Log-likelihoods and expected counts.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: the transitions.
        evidence: the log-likelihoods of the steps for the S states.
        offsets: (N + 1,) where the sequences begin and end, on the CPU.
        weights: (N,) of the sequences; all ones if not given.
        dtype: of the messages.
        smooth: whether to run the backward pass, too. Without it there are no counts, but `last` is filled.
        per_step: whether to return the filtered and smoothed rows of all steps.
    """
    _check(initial, operator, evidence, offsets)
    if weights is None:
        weights = torch.ones(len(offsets) - 1, dtype=wide_dtype(initial.device), device=initial.device)
    backend = backends.choose(operator, evidence, initial.device)
    return backend.e_step(initial, operator, evidence, offsets, weights, dtype=dtype, smooth=smooth, per_step=per_step)


def log_likelihood(
    initial: Tensor,
    operator: Operator,
    evidence: Evidence,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(N,) log p(y) of each sequence times its weight, differentiable in `initial`, the operator's natural parameters and the evidence's `live`.

    The gradient treats each entry as free. A loss that adds sequences up costs one forward-backward pass; one that treats them differently
    costs a second. Higher derivatives are not available.
    """
    live = (initial, evidence.live, *operator.natural)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in live):
        weights = (
            torch.ones(len(offsets) - 1, dtype=wide_dtype(initial.device), device=initial.device)
            if weights is None
            else weights
        )
        return _log_likelihood(operator, evidence, offsets, dtype, weights, *live)
    found = e_step(initial, operator, evidence, offsets, weights, dtype=dtype, smooth=False)
    return found.log_likelihood if weights is None else weighted(found.log_likelihood, weights)


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """The products. A weight of zero gives zero even for -inf."""
    return torch.where(weights == 0, torch.zeros_like(values), values * weights)


class _LogLikelihood(torch.autograd.Function):
    """The E-step as a function of autograd: its backward pass returns the counts of the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        evidence: Evidence,
        offsets: Tensor,
        dtype: torch.dtype | None,
        weights: Tensor,
        *live: Tensor,
    ) -> Tensor:
        ctx.operator, ctx.evidence, ctx.offsets = (
            operator.on(operator.natural[0].device),
            evidence.with_live(evidence.live.detach()),
            offsets,
        )
        ctx.dtype = dtype
        ctx.found = e_step(live[0], ctx.operator, ctx.evidence, offsets, weights, dtype=dtype)
        ctx.save_for_backward(weights, *live)
        return weighted(ctx.found.log_likelihood, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weights, initial, evidence, *natural = ctx.saved_tensors
        found, scale = ctx.found, gradient[:1]
        if gradient.numel() > 1 and gradient.stride() != (0,):  # not one number for all sequences, as a sum gives
            found, scale = (
                e_step(initial, ctx.operator, ctx.evidence, ctx.offsets, weights * gradient, dtype=ctx.dtype),
                gradient.new_ones(1),
            )
        if not gradient.numel():
            scale = gradient.new_ones(1)
        counts = ctx.operator.gradients(found.counts)
        pairs = zip((found.initial, found.evidence, *counts), (initial, evidence, *natural), strict=True)
        return (None,) * 5 + tuple((count * scale).to(tensor.dtype) for count, tensor in pairs)


_log_likelihood = torch.compiler.disable(_LogLikelihood.apply)


@torch.no_grad()
def posterior(
    initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor, weights: Tensor | None = None
) -> Posterior:
    """Filtered and smoothed state probabilities. Impossible sequences have rows of zeros and a likelihood of -inf."""
    found = e_step(initial, operator, evidence, offsets, per_step=True)
    # With weights, the smoothed rows would be multiplied by them too.
    counts = found.counts if weights is None else e_step(initial, operator, evidence, offsets, weights).counts
    return Posterior(found.log_likelihood, found.filtered, found.smoothed, counts)


@torch.no_grad()
def viterbi(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> Path:
    """The most probable path of each sequence. Of equally probable paths it is the one with the lowest numbers from the end."""
    _check(initial, operator, evidence, offsets)
    return Path(*backends.choose(operator, evidence, initial.device).viterbi(initial, operator, evidence, offsets))


@torch.no_grad()
def predict(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor, *, steps: int = 1) -> Tensor:
    """(N, S) p(z_{T+steps} | y_1:T); of an empty sequence, the distribution of the chain itself. Impossible sequences give NaN.

    The transitions after the end of a sequence are those of its last step.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` must be a whole number and at least 1, but is {steps!r} instead.")
    own = backends.choose(operator, evidence, initial.device).predict
    if own is not None:
        return own(initial, operator, evidence, offsets, steps=steps)
    found = e_step(initial, operator, evidence, offsets, smooth=False)
    at = (offsets[1:] - 1).clamp(min=0).to(initial.device)
    empty = (offsets.diff() == 0).to(initial.device)[:, None]
    states = torch.where(empty, initial.exp(), operator.predict(found.last.to(initial.dtype), at))
    for _ in range(steps - 1):
        states = operator.predict(states, at)
    return torch.where(
        (found.impossible_step >= 0)[:, None], torch.nan, states.clamp(min=0)
    )  # below zero by rounding only


@torch.no_grad()
def sample(initial: Tensor, operator: Operator, lengths: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """State paths drawn from the chain: (steps,) packed states and (N + 1,) offsets. They are drawn on the CPU, the same for every device."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cpu().cumsum(0)])
    uniforms = sampling.draw_uniforms(int(offsets[-1]), generator)
    states = sampling.chains(operator.on("cpu"), initial.detach().cpu(), offsets, uniforms)
    if len(states) and int(states.min()) < 0:
        row = int((states < 0).int().argmax())
        which = "`initial`" if bool((offsets == row).any()) else f"`transition` row {int(states[row - 1])}"
        raise ValueError(f"{which} must have some probability to draw from, but has none.")
    return states.to(initial.device), offsets


@torch.no_grad()
def sample_posterior(
    initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor, generator: torch.Generator
) -> Tensor:
    """(steps,) one path for each sequence, drawn from p(z | y); -1 in impossible sequences. They are drawn on the CPU."""
    _check(initial, operator, evidence, offsets)
    uniforms = sampling.draw_uniforms(int(offsets[-1]), generator)
    filtered = partial(e_step, initial, operator, evidence, offsets, per_step=True)
    return sampling.paths(operator.on("cpu"), initial.detach().cpu(), evidence, offsets, uniforms, filtered).to(
        initial.device
    )


def _check(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> None:
    """Refuses parts that do not fit together."""
    num_states = len(initial)
    if operator.num_states != num_states:
        raise ValueError(
            f"`operator` must have the {num_states} states of `initial`, but {type(operator).__name__} has {operator.num_states}."
        )
    if evidence.num_states != num_states:
        raise ValueError(
            f"`evidence` must be for the {num_states} states of `initial`, but {type(evidence).__name__} is for {evidence.num_states}."
        )
    if evidence.num_steps != int(offsets[-1]):
        raise ValueError(
            f"`evidence` must have {int(offsets[-1])} steps, the last of `offsets`, but has {evidence.num_steps}."
        )
    if isinstance(evidence, Rows) and evidence.live.is_cpu:
        rows = evidence.live.detach()
        wrong = rows.isnan() | (rows == torch.inf)
        if bool(wrong.any()):
            row, state = torch.nonzero(wrong)[0].tolist()
            n = int(np.searchsorted(offsets.numpy(), row, side="right")) - 1
            raise ValueError(
                f"`log_likelihoods` must be numbers below infinity, but state {state} at position {row - int(offsets[n])} of sequence {n} is not."
            )
