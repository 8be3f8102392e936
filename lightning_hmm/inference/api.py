r"""Inference in hidden Markov models, for every operator, form of evidence and device.

.. math:: p(y, z) = \pi_{z_1} \prod_{t>1} A_{z_{t-1} z_t} \prod_t b_{z_t}(y_t)

A problem has three parts: the log-probabilities `initial` (S,) of the first state, an `Operator` for the transitions,
and `Evidence` for the observations. Their entries are natural parameters, and each entry is a free variable. Sequences
are packed: sequence n consists of the steps ``offsets[n]:offsets[n + 1]`` of the evidence. The gradient of the
log-likelihood is the E-step:

.. math:: \partial L / \partial \log A_{ij} = E[\text{number of transitions } i \to j \mid y]

If an operator has `classes` of states with the same emission, the evidence may be for the classes. Messages are float64
unless `dtype` is float32. Counts are always summed in float64. The log-likelihood of an impossible
sequence is -inf. N is the number of sequences and S the number of states.

Example:
    The examples of the functions below use these tensors.

    >>> import torch
    >>> from lightning_hmm import inference
    >>> from lightning_hmm.inference.evidence import Table
    >>> from lightning_hmm.inference.operators import Dense
    >>> initial = torch.tensor([0.5, 0.5]).log()
    >>> operator = Dense(torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log())
    >>> emission = torch.tensor([[0.8, 0.2], [0.1, 0.9]]).log()
    >>> evidence = Table(emission, symbols=torch.tensor([0, 0, 1, 1, 1]))
    >>> offsets = torch.tensor([0, 3, 5])  # two sequences, of 3 and 2 steps
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
    """Computes log-likelihoods and expected counts with the forward-backward algorithm.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: Transition operator.
        evidence: Log-likelihoods of the steps for the S states.
        offsets: (N + 1,) boundaries of the sequences, on the CPU.
        weights: (N,) weights of the sequences. They are all 1 if not given.
        dtype: Data type of the messages, float64 or float32.
        smooth: Whether to run the backward pass as well. Without it there are no counts, but `last` is filled.
        per_step: Whether to return the filtered and smoothed probabilities of all steps.

    Returns:
        Log-likelihoods (N,), expected counts and, if requested, probabilities (steps, S).

    Example:
        >>> found = inference.e_step(initial, operator, evidence, offsets)
        >>> found.counts[0].sum().round()  # one transition fewer than steps in each sequence
        tensor(3., dtype=torch.float64)
    """
    _check(initial, operator, evidence, offsets)
    if weights is None:
        weights = torch.ones(len(offsets) - 1, dtype=wide_dtype(initial.device), device=initial.device)
    backend = backends.choose(operator, evidence, initial.device)
    options: dict[str, Any] = {"dtype": dtype, "smooth": smooth, "per_step": per_step}
    if backend.takes_classes and not per_step:
        return backend.e_step(initial, operator, evidence, offsets, weights, **options)
    states = _for_states(operator, evidence)
    if states is evidence:
        return backend.e_step(initial, operator, evidence, offsets, weights, **options)
    found = backends.choose(operator, states, initial.device).e_step(
        initial, operator, states, offsets, weights, **options
    )
    assert operator.classes is not None
    return found._replace(evidence=evidence.gathered(found.evidence, operator.classes)) if smooth else found


def log_likelihood(
    initial: Tensor,
    operator: Operator,
    evidence: Evidence,
    offsets: Tensor,
    weights: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes the log-likelihood of each sequence, multiplied by its weight.

    The result is differentiable with respect to `initial`, `operator.natural` and `evidence.live`. The gradient treats
    each entry as a free variable. The gradient of a sum over sequences takes one forward-backward pass. A loss that
    depends differently on different sequences takes a second pass. Higher derivatives are not available.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: Transition operator.
        evidence: Log-likelihoods of the steps for the S states.
        offsets: (N + 1,) boundaries of the sequences, on the CPU.
        weights: (N,) weights of the sequences. They are all 1 if not given.
        dtype: Data type of the messages, float64 or float32.

    Returns:
        (N,) log p(y) times the weight.

    Example:
        >>> inference.log_likelihood(initial, operator, evidence, offsets)
        tensor([-2.4534, -0.9970], dtype=torch.float64)
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
    """Returns `values` times `weights`. The product is zero where the weight is zero, even if the value is -inf."""
    return torch.where(weights == 0, torch.zeros_like(values), values * weights)


class _LogLikelihood(torch.autograd.Function):
    """The log-likelihood as a function of autograd. Its backward pass returns the counts of the E-step."""

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
        ctx.operator = operator.on(operator.natural[0].device)
        ctx.evidence = evidence.with_live(evidence.live.detach())
        ctx.offsets, ctx.dtype = offsets, dtype
        ctx.found = e_step(live[0], ctx.operator, ctx.evidence, offsets, weights, dtype=dtype)
        ctx.save_for_backward(weights, *live)
        return weighted(ctx.found.log_likelihood, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weights, initial, evidence, *natural = ctx.saved_tensors
        found, scale = ctx.found, gradient[:1]
        # The gradient of a sum over sequences is one number, expanded to all of them. Otherwise, a second pass is
        # needed.
        if gradient.numel() > 1 and gradient.stride() != (0,):
            found = e_step(initial, ctx.operator, ctx.evidence, ctx.offsets, weights * gradient, dtype=ctx.dtype)
            scale = gradient.new_ones(1)
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
    """Computes filtered and smoothed state probabilities.

    In an impossible sequence all probabilities are zero and the log-likelihood is -inf.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: Transition operator.
        evidence: Log-likelihoods of the steps for the S states.
        offsets: (N + 1,) boundaries of the sequences, on the CPU.
        weights: (N,) weights of the sequences in the expected counts. They are all 1 if not given.

    Returns:
        Log-likelihoods (N,), filtered and smoothed probabilities (steps, S), and expected counts.

    Example:
        >>> inference.posterior(initial, operator, evidence, offsets).smoothed[0]
        tensor([0.9395, 0.0605], dtype=torch.float64)
    """
    found = e_step(initial, operator, evidence, offsets, per_step=True)
    # The weights would also multiply the smoothed rows, so weighted counts are computed by a second pass.
    counts = found.counts if weights is None else e_step(initial, operator, evidence, offsets, weights).counts
    return Posterior(found.log_likelihood, found.filtered, found.smoothed, counts)


@torch.no_grad()
def viterbi(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> Path:
    """Computes the most probable state path of each sequence.

    Ties are broken from the last step backward, in favor of the state with the lower number.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: Transition operator.
        evidence: Log-likelihoods of the steps for the S states.
        offsets: (N + 1,) boundaries of the sequences, on the CPU.

    Returns:
        The states (steps,), which are -1 in impossible sequences, and the log-probabilities (N,) of the paths.

    Example:
        >>> inference.viterbi(initial, operator, evidence, offsets).states
        tensor([0, 0, 0, 1, 1])
    """
    _check(initial, operator, evidence, offsets)
    evidence = _for_states(operator, evidence)
    return Path(*backends.choose(operator, evidence, initial.device).viterbi(initial, operator, evidence, offsets))


@torch.no_grad()
def predict(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor, *, steps: int = 1) -> Tensor:
    """Computes the distribution of the state some steps after the end of each sequence.

    Past the end of a sequence, time-varying transitions are those of its last step.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: Transition operator.
        evidence: Log-likelihoods of the steps for the S states.
        offsets: (N + 1,) boundaries of the sequences, on the CPU.
        steps: Number of steps after the last one, at least 1.

    Returns:
        (N, S) p(z_{T+steps} | y_1:T). For an empty sequence it is the distribution of the Markov chain after `steps`
        steps. For an impossible sequence it is NaN.

    Example:
        >>> inference.predict(initial, operator, evidence, offsets)
        tensor([[0.6363, 0.3637],
                [0.2683, 0.7317]])
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"`steps` must be a whole number of at least 1, but is {steps!r} instead.")
    own = backends.choose(operator, evidence, initial.device).predict
    if own is not None:
        return own(initial, operator, evidence, offsets, steps=steps)
    found = e_step(initial, operator, evidence, offsets, smooth=False)
    at = (offsets[1:] - 1).clamp(min=0).to(initial.device)
    empty = (offsets.diff() == 0).to(initial.device)[:, None]
    states = torch.where(empty, initial.exp(), operator.predict(found.last.to(initial.dtype), at))
    for _ in range(steps - 1):
        states = operator.predict(states, at)
    states = states.clamp(min=0)  # Rounding can make probabilities slightly negative.
    return torch.where((found.impossible_step >= 0)[:, None], torch.nan, states)


@torch.no_grad()
def sample(initial: Tensor, operator: Operator, lengths: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws state paths from the Markov chain.

    They are drawn on the CPU, so the result does not depend on the device.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: Transition operator.
        lengths: (N,) lengths of the paths.
        generator: Random generator of the CPU.

    Returns:
        (steps,) packed states on the device of `initial`, and (N + 1,) offsets on the CPU.

    Example:
        >>> cycle = Dense(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]).log())
        >>> first = torch.tensor([1.0, 0.0, 0.0]).log()
        >>> inference.sample(first, cycle, torch.tensor([4, 2]), torch.Generator())
        (tensor([0, 1, 2, 0, 0, 1]), tensor([0, 4, 6]))
    """
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
    """Draws one state path for each sequence from the posterior p(z | y).

    The paths are drawn on the CPU, so the result does not depend on the device.

    Args:
        initial: (S,) log-probabilities of the first state.
        operator: Transition operator.
        evidence: Log-likelihoods of the steps for the S states.
        offsets: (N + 1,) boundaries of the sequences, on the CPU.
        generator: Random generator of the CPU.

    Returns:
        (steps,) states, which are -1 in impossible sequences.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> inference.sample_posterior(initial, operator, evidence, offsets, generator).shape
        torch.Size([5])
    """
    _check(initial, operator, evidence, offsets)
    evidence = _for_states(operator, evidence)
    uniforms = sampling.draw_uniforms(int(offsets[-1]), generator)
    filtered = partial(e_step, initial, operator, evidence, offsets, per_step=True)
    states = sampling.paths(operator.on("cpu"), initial.detach().cpu(), evidence, offsets, uniforms, filtered)
    return states.to(initial.device)


def _for_states(operator: Operator, evidence: Evidence) -> Evidence:
    """Returns evidence for the states of the operator, given evidence for these or for their classes."""
    if evidence.num_states == operator.num_states or operator.classes is None:
        return evidence
    return evidence.shared(operator.classes)


def _check(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> None:
    """Raises a `ValueError` if the sizes of the arguments do not agree, or if log-likelihoods are NaN or +inf."""
    num_states = len(initial)
    if operator.num_states != num_states:
        raise ValueError(
            f"`operator` must have the {num_states} states of `initial`, "
            f"but {type(operator).__name__} has {operator.num_states}."
        )
    if evidence.num_states not in (num_states, operator.num_classes):
        raise ValueError(
            f"`evidence` must be for the {num_states} states of `initial`, "
            f"but {type(evidence).__name__} is for {evidence.num_states}."
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
                f"`log_likelihoods` must be numbers below infinity, but state {state} "
                f"at position {row - int(offsets[n])} of sequence {n} is not."
            )
