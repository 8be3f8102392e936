r"""Inference in hidden Markov models with a full transition matrix.

.. math:: p(y, z) = \pi_{z_1} \prod_{t>1} A_{z_{t-1} z_t} \prod_t b_{z_t}(y_t)

Functions take *natural* parameters, each entry free: log-probabilities `initial` (K,) and `transition` (K, K), and an
emission: `Symbols` (log-probabilities of symbols), `Gaussian` (natural parameters), or `Steps` (any log-likelihoods of
the steps, so that soft evidence and other densities share all of this). Then the gradient of the log-likelihood *is* the
E-step:

.. math:: \partial L / \partial \log A_{ij} = E[\text{number of transitions } i \to j \mid y]

and `log_likelihood` hands out the statistics its fused forward-backward pass has already made. N sequences, K states,
V symbols, D features. Time O(steps K^2); memory O(32 x longest x K) beside the data on a CPU.

On a CPU the kernels of `kernels.cpu` run, elsewhere `reference`; torch's dispatcher picks. float64 unless
`single` asks for float32 arithmetic (statistics are summed in float64 either way). Impossible evidence gives -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode

from lightning_hmm.inference import log_space, operators, reference
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.kernels import cpu, dense_loops
from lightning_hmm.inference.log_space import wide_dtype
from lightning_hmm.inference.results import EStep as EStepRows
from lightning_hmm.sequences import Sequences


class Symbols(NamedTuple):
    """log_probs: (K, V) log p(symbol | state)."""

    log_probs: Tensor


class Gaussian(NamedTuple):
    """log N(y | state) = sum over d of eta1 u + eta2 u^2 - log_norm, with u = y - centre.

    eta1, eta2, log_norm are (K, D); centre is (D,), a constant that keeps u small.
    """

    eta1: Tensor
    eta2: Tensor
    log_norm: Tensor
    centre: Tensor


class Steps(NamedTuple):
    """log_likelihoods: (steps, K) log p(y_t | state), or any evidence for the states; zeros say nothing."""

    log_likelihoods: Tensor


Emission = Symbols | Gaussian | Steps


class EStep(NamedTuple):
    """Expected sufficient statistics of all sequences, each times its weight.

    log_likelihood: (N,) log p(y), without weights.
    impossible_step: (N,) the first step of probability zero, -1 where there is none.
    initial: (K,) E[sequences that start in k].
    transition: (K, K) E[transitions i -> j].
    emission: for `Symbols` ((K, V) visits); for `Gaussian` (sum of u, sum of u^2, visits; each (K, D)); for `Steps`
        ((steps, K) p(z_t | y)).
    """

    log_likelihood: Tensor
    impossible_step: Tensor
    initial: Tensor
    transition: Tensor
    emission: tuple[Tensor, ...]


class Posterior(NamedTuple):
    """What the data say about the states.

    log_likelihood: (N,) log p(y_1:T).
    filtered: p(z_t | y_1:t), a (K,) row for each step.
    smoothed: p(z_t | y_1:T), a (K,) row for each step.
    transition_counts: (K, K) expected transitions i -> j, summed over sequences, each times its weight.
    """

    log_likelihood: Tensor
    filtered: Sequences
    smoothed: Sequences
    transition_counts: Tensor


class Path(NamedTuple):
    """The most probable states: `states` for each step (-1 in impossible sequences), `log_probability` (N,) log p(y, z)."""

    states: Sequences
    log_probability: Tensor


def _unpack(emission: Emission) -> tuple[int, list[Tensor]]:
    kind = {Symbols: cpu.SYMBOLS, Steps: cpu.STEPS, Gaussian: cpu.GAUSSIAN}[type(emission)]
    return kind, list(emission)


def _numpy(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    return [tensor.detach().double().contiguous().numpy() for tensor in tensors]


def kernel_values(sequences: Sequences) -> Tensor:
    """The values in a type for which kernels are compiled: int64 for symbols."""
    return sequences.values.long() if sequences.is_discrete else sequences.values


def _values_numpy(values: Tensor) -> np.ndarray:
    return values.contiguous().numpy()


# The operators. The bodies given here are the portable ones; `register_kernel("cpu")` puts the compiled ones beside them.
# Outputs: log-likelihoods times weight, log-likelihoods, impossible steps, initial, transition, three emission
# statistics, smoothed rows times weight, filtered rows, filtered rows of the last steps.

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _finish(results: tuple[Any, ...], weights: Tensor) -> _Results:
    log_likelihood, impossible, initial, transition, visits, sum1, sum2, smoothed, filtered, last = map(torch.as_tensor, results)
    # A weight of zero times -inf would be NaN; such a sequence does not count.
    weighted = torch.where(weights == 0, torch.zeros_like(log_likelihood), log_likelihood * weights)
    return weighted, log_likelihood, impossible, initial, transition, visits.T.contiguous(), sum1.T.contiguous(), sum2.T.contiguous(), smoothed, filtered, last


def log_emissions(kind: int, parameters: Sequence[Tensor], values: Tensor, dtype: torch.dtype) -> Tensor:
    """(steps, K) log p(y_t | z_t = k)."""
    if kind == cpu.SYMBOLS:
        table = parameters[0].T.to(dtype)  # (V, K)
        rows = table[values.clamp(min=0)]
        return torch.where((values >= 0)[:, None], rows, rows.new_zeros(()))
    if kind == cpu.STEPS:
        return parameters[0].to(dtype)
    eta1, eta2, log_norm, centre = parameters
    u = values.to(centre.dtype) - centre  # (steps, D)
    observed = ~u.isnan()
    u = torch.where(observed, u, u.new_zeros(()))
    return (u @ eta1.T + (u * u) @ eta2.T - observed.to(u.dtype) @ log_norm.T).to(dtype)


def _statistics(kind: int, parameters: Sequence[Tensor], values: Tensor, smoothed: Tensor, smooth: bool) -> list[Tensor]:
    """Three emission statistics, without rows where there are none: visits, and for Gaussians sums and sums of squares."""
    none = [smoothed.new_zeros(0, smoothed.shape[1]) for _ in range(3)]  # three, as an operator must not return one tensor twice
    if not smooth or kind == cpu.STEPS:
        return none
    if kind == cpu.SYMBOLS:
        visits = smoothed.new_zeros(parameters[0].shape[1], smoothed.shape[1])
        share = torch.where((values >= 0)[:, None], smoothed, smoothed.new_zeros(()))
        return [visits.index_add_(0, values.clamp(min=0), share), *none[1:]]
    u = values.to(smoothed.dtype) - parameters[3].to(smoothed.dtype)
    observed = ~u.isnan()
    u = torch.where(observed, u, u.new_zeros(()))
    return [observed.to(smoothed.dtype).T @ smoothed, u.T @ smoothed, (u * u).T @ smoothed]


def _rows(kind: int, found: EStepRows, per_step: bool, smooth: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Smoothed, filtered and last rows, those that are wanted."""
    smoothed = found.smoothed if per_step or kind == cpu.STEPS else found.smoothed[:0].clone()
    return smoothed, found.filtered if per_step else found.filtered[:0].clone(), found.last[:0].clone() if smooth else found.last


@torch.library.custom_op("lightning_hmm::dense_e_step", mutates_args=())
def _e_step_op(
    kind: int,
    initial: Tensor,
    transition: Tensor,
    parameters: Sequence[Tensor],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor,
    single: bool,
    smooth: bool,
    per_step: bool,
) -> _Results:
    rows = log_emissions(kind, parameters, values, wide_dtype(initial.device))
    found = reference.e_step(initial, operators.Dense(transition), Rows(rows), offsets, weights, dtype=torch.float32 if single else None, smooth=smooth)
    return _finish((*found[:3], *found.counts, *_statistics(kind, parameters, values, found.smoothed, smooth), *_rows(kind, found, per_step, smooth)), weights)


@_e_step_op.register_kernel("cpu")
def _e_step_cpu(kind, initial, transition, parameters, values, offsets, weights, single, smooth, per_step):
    log_initial, log_transition, *natural = _numpy([initial, transition, *parameters])
    arrays = log_initial, log_transition, natural, _values_numpy(values), offsets.numpy(), weights.numpy()
    results = cpu.e_step(kind, *arrays, single=single, smooth=smooth, per_step=per_step, last=not smooth)
    return _finish(results, weights)


@_e_step_op.register_fake
def _(kind, initial, transition, parameters, values, offsets, weights, single, smooth, per_step):
    num_sequences, num_states = weights.shape[0], initial.shape[0]
    wide = lambda *shape: weights.new_empty(shape)  # noqa: E731
    width = 0 if kind == cpu.STEPS or not smooth else parameters[0].shape[1]
    sums = width if kind == cpu.GAUSSIAN else 0
    steps = values.shape[0] if per_step or (kind == cpu.STEPS and smooth) else 0
    statistics = (wide(num_states, width), wide(num_states, sums), wide(num_states, sums))
    counts = (wide(num_states), wide(num_states, num_states), *statistics)
    impossible = torch.empty(num_sequences, dtype=torch.int64, device=weights.device)
    rows = (wide(steps, num_states), wide(values.shape[0] if per_step else 0, num_states), wide(0 if smooth else num_sequences, num_states))
    return (wide(num_sequences), wide(num_sequences), impossible, *counts, *rows)


def _save(ctx, inputs, output):
    kind, initial, transition, parameters, values, offsets, weights, single, _, _ = inputs
    ctx.kind, ctx.single, ctx.num_parameters = kind, single, len(parameters)
    ctx.save_for_backward(initial, transition, values, offsets, weights, *parameters, *output[3:9])
    ctx.mark_non_differentiable(*output[1:])  # a gradient through these would be a silent zero


def _backward(ctx, grad_weighted, *unused):
    """Gradients are the statistics, times the incoming gradient."""
    initial, transition, values, offsets, weights, *rest = ctx.saved_tensors
    parameters, statistics = rest[: ctx.num_parameters], rest[ctx.num_parameters :]
    if grad_weighted.numel() == 1 or grad_weighted.stride() == (0,):
        # From a sum: one number for all sequences. Its stride says so without reading it.
        scale = grad_weighted[:1]
    else:
        again = _e_step_op(ctx.kind, initial, transition, parameters, values, offsets, weights * grad_weighted, ctx.single, True, False)
        statistics, scale = again[3:9], grad_weighted.new_ones(1)
    if grad_weighted.numel() == 0:
        scale = grad_weighted.new_ones(1)
    initial_counts, transition_counts, visits, sum1, sum2, smoothed = statistics
    if ctx.kind == cpu.SYMBOLS:
        emission = [visits * scale]
    elif ctx.kind == cpu.STEPS:
        emission = [smoothed * scale]
    else:
        emission = [sum1 * scale, sum2 * scale, -visits * scale, None]
    emission = [gradient if gradient is None else gradient.to(parameter.dtype) for gradient, parameter in zip(emission, parameters, strict=True)]
    gradients = (initial_counts * scale).to(initial.dtype), (transition_counts * scale).to(transition.dtype)
    return None, *gradients, emission, None, None, None, None, None, None


_e_step_op.register_autograd(once_differentiable(_backward), setup_context=_save)


class _DirectEStep(torch.autograd.Function):
    """The operator on plain CPU tensors, without torch's dispatcher, which takes longer than the E-step of a small model."""

    @staticmethod
    def forward(kind, initial, transition, values, offsets, weights, single, per_step, *parameters):
        return _e_step_cpu(kind, initial, transition, parameters, values, offsets, weights, single, True, per_step)

    @staticmethod
    def setup_context(ctx, inputs, output):
        kind, initial, transition, values, offsets, weights, single, per_step, *parameters = inputs
        _save(ctx, (kind, initial, transition, parameters, values, offsets, weights, single, True, per_step), output)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_weighted, *unused):
        if grad_weighted is None:
            return (None,) * (8 + ctx.num_parameters)
        _, initial, transition, emission, *_ = _backward(ctx, grad_weighted)
        return None, initial, transition, None, None, None, None, None, *emission


def _is_plain(*tensors: Tensor) -> bool:
    """Whether these are numbers in memory that nobody but autograd watches: no fake tensors, no tracing, no compiler."""
    kinds = all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_cpu for tensor in tensors)
    return kinds and not torch.compiler.is_compiling() and get_current_dispatch_mode() is None


@torch.library.custom_op("lightning_hmm::dense_viterbi", mutates_args=())
def _viterbi_op(kind: int, initial: Tensor, transition: Tensor, parameters: Sequence[Tensor], values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    rows = log_emissions(kind, parameters, values, wide_dtype(initial.device))
    return log_space.viterbi(initial, operators.Dense(transition), Rows(rows), offsets)


@_viterbi_op.register_kernel("cpu")
def _viterbi_cpu(kind, initial, transition, parameters, values, offsets):
    log_initial, log_transition, *natural = _numpy([initial, transition, *parameters])
    path, log_probability = cpu.viterbi(kind, log_initial, log_transition, natural, _values_numpy(values), offsets.numpy())
    return torch.from_numpy(path), torch.from_numpy(log_probability)


@_viterbi_op.register_fake
def _(kind, initial, transition, parameters, values, offsets):
    return values.new_empty(values.shape[0], dtype=torch.int64), initial.new_empty(offsets.shape[0] - 1, dtype=wide_dtype(initial.device))


def _call(
    initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences, weights: Tensor | None, single: bool, smooth: bool, per_step: bool
) -> _Results:
    _check(initial, transition, emission, sequences)
    kind, parameters = _unpack(emission)
    values, offsets = kernel_values(sequences), sequences.offsets
    if weights is None:
        weights = torch.ones(len(sequences), dtype=wide_dtype(initial.device), device=initial.device)
    if not _is_plain(initial, transition, *parameters, values):
        return _e_step_op(kind, initial, transition, parameters, values, offsets, weights, single, smooth, per_step)
    if smooth and torch.is_grad_enabled():
        return _DirectEStep.apply(kind, initial, transition, values, offsets, weights, single, per_step, *parameters)
    return _e_step_cpu(kind, initial, transition, parameters, values, offsets, weights, single, smooth, per_step)


def _check(initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences) -> None:
    num_states = initial.shape[0]
    if transition.shape != (num_states, num_states):
        raise ValueError(f"`transition` must be {(num_states, num_states)} for {num_states} initial probabilities, but is {tuple(transition.shape)} instead.")
    check_emission(num_states, emission, sequences)


def check_emission(num_states: int, emission: Emission, sequences: Sequences) -> None:
    """Raises where emission, number of states and sequences do not go together."""
    if isinstance(emission, Steps):
        if emission.log_likelihoods.shape != (sequences.num_steps, num_states):
            wanted, shape = (sequences.num_steps, num_states), tuple(emission.log_likelihoods.shape)
            raise ValueError(f"`log_likelihoods` must be {wanted}, steps by states, but is {shape} instead.")
        if emission.log_likelihoods.device.type == "cpu" and bool((emission.log_likelihoods.isnan() | (emission.log_likelihoods == torch.inf)).any()):
            row, state = torch.nonzero(emission.log_likelihoods.isnan() | (emission.log_likelihoods == torch.inf))[0].tolist()
            n, t = sequences.locate(row)
            raise ValueError(f"`log_likelihoods` must be numbers below infinity, but state {state} at position {t} of sequence {n} is not.")
        return
    if emission[0].shape[0] != num_states:
        raise ValueError(f"The emission must have {num_states} rows, one a state, but has {emission[0].shape[0]} instead.")
    if isinstance(emission, Symbols):
        sequences.check(emission.log_probs.shape[1], None)
    else:
        sequences.check(None, emission.eta1.shape[1])


def log_likelihood(initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences, *, single: bool = False) -> Tensor:
    """(N,) log p(y) of each sequence, differentiable in `initial`, `transition` and the emission's parameters.

    The gradient treats each entry as free. A loss that adds sequences up costs one forward-backward pass; one that treats
    them differently costs a second.
    """
    _, parameters = _unpack(emission)
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (initial, transition, *parameters))
    return _call(initial, transition, emission, sequences, None, single, differentiable, False)[0]


def weighted_log_likelihood(
    initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences, *, single: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What training needs: (N,) weight x log p(y), differentiable; (N,) log p(y); and (N,) the impossible steps (-1: none)."""
    weighted, plain, impossible, *_ = _call(initial, transition, emission, sequences, sequences.weights, single, torch.is_grad_enabled(), False)
    return weighted, plain, impossible


@torch.no_grad()
def e_step(initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences, *, single: bool = False) -> EStep:
    """Expected sufficient statistics, each sequence counted with its weight."""
    results = _call(initial, transition, emission, sequences, sequences.weights, single, True, False)
    _, log_likelihood, impossible, initial_counts, transition_counts, visits, sum1, sum2, smoothed, _, _ = results
    statistics = {Symbols: (visits,), Gaussian: (sum1, sum2, visits), Steps: (smoothed,)}[type(emission)]
    return EStep(log_likelihood, impossible, initial_counts, transition_counts, statistics)


@torch.no_grad()
def posterior(initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences) -> Posterior:
    """Filtered and smoothed state probabilities. Impossible sequences have rows of zeros and a likelihood of -inf."""
    results = _call(initial, transition, emission, sequences, None, False, True, True)
    _, log_likelihood, _, _, transition_counts, _, _, _, smoothed, filtered, _ = results
    if sequences.weights is not None:  # with weights, the rows of the steps would be multiplied too
        transition_counts = e_step(initial, transition, emission, sequences).transition
    return Posterior(log_likelihood, sequences.with_values(filtered), sequences.with_values(smoothed), transition_counts)


@torch.no_grad()
def viterbi(initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences) -> Path:
    """The most probable path of each sequence; of equally probable ones that with the lowest numbers from the end."""
    _check(initial, transition, emission, sequences)
    kind, parameters = _unpack(emission)
    values = kernel_values(sequences)
    run = _viterbi_cpu if _is_plain(initial, transition, *parameters, values) else _viterbi_op
    path, log_probability = run(kind, initial, transition, parameters, values, sequences.offsets)
    return Path(sequences.with_values(path), log_probability)


@torch.no_grad()
def predict_next(initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences, *, steps: int = 1) -> Tensor:
    """(N, K) p(z_{T+steps} | y_1:T); of an empty sequence, the chain's own start. Impossible sequences give NaN."""
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, but is {steps} instead.")
    results = _call(initial, transition, emission, sequences, None, False, False, False)
    last, matrix = results[10].to(initial.dtype), transition.exp()
    empty = (sequences.lengths == 0).to(initial.device)[:, None]
    states = torch.where(empty, initial.exp(), last @ matrix)
    for _ in range(steps - 1):
        states = states @ matrix
    return torch.where((results[2] >= 0)[:, None], torch.nan, states)


def _editable(tensor: Tensor, name: str) -> np.ndarray:
    """The tensor's own memory: what is written there is written to the tensor."""
    if not tensor.is_cpu or tensor.dtype is not torch.float64 or not tensor.is_contiguous():
        raise ValueError(f"`{name}` must be a contiguous float64 tensor on the CPU to be changed in place, but is {tensor.dtype} on {tensor.device} instead.")
    return tensor.detach().numpy()


def _data_arrays(sequences: Sequences) -> Any:
    """Values, offsets and weights as arrays."""
    weights = np.ones(len(sequences)) if sequences.weights is None else sequences.weights.numpy()
    return _values_numpy(kernel_values(sequences)), sequences.offsets.numpy(), weights


@torch.no_grad()
def online_em(
    initial: Tensor,
    transition: Tensor,
    emission: Symbols,
    sequences: Sequences,
    batch_size: int,
    *,
    discount: float,
    updates: int,
    size: Tensor,
    data_size: float,
    pseudocounts: Sequence[float],
    frozen: Sequence[bool],
    buffers: Sequence[Tensor],
) -> Tensor:
    """Online EM over consecutive batches of `batch_size` sequences in one compiled pass; parameters and buffers change in place.

    The same as an E-step and a step of `BaumWelch` for each batch, without the cost of a Python step for each.
    `updates` batches have gone before; `size` is the buffer of batch sizes; `pseudocounts`, `frozen` and `buffers` are in
    the order initial, transition, emission. Returns (N,) log p(y) of each sequence under the parameters its batch met.
    """
    _check(initial, transition, emission, sequences)
    names = ("initial", "transition", "emission")
    in_place: Any = [_editable(tensor, name) for tensor, name in zip((initial, transition, emission.log_probs), names, strict=True)]
    in_place += [_editable(tensor, f"buffer of {name}") for tensor, name in zip(buffers, names, strict=True)]
    in_place.append(_editable(size.reshape(1), "size"))
    log_likelihood, stopped = cpu.online_em(
        *in_place,
        *_data_arrays(sequences),
        batch_size=batch_size,
        discount=discount,
        updates=updates,
        data_size=data_size,
        pseudocounts=pseudocounts,
        frozen=frozen,
    )
    if stopped is not None:
        raise ValueError(impossible_message(sequences, *stopped))
    return torch.from_numpy(log_likelihood)


def impossible_message(sequences: Sequences, n: int, t: int) -> str:
    """Says which step of which sequence has probability zero."""
    value = sequences[n][t].tolist()
    return f"Sequence {n} has probability zero under the model: step {t} ({value}) cannot follow what is before it."


def em_step(initial: Tensor, transition: Tensor, emission: Symbols, sequences: Sequences, *, single: bool = False) -> Tensor:
    """One bare Baum-Welch iteration without priors, in place; returns (N,) log p(y) under the parameters before it.

    Where one that counts is -inf, the parameters stay as they are.
    """
    _check(initial, transition, emission, sequences)
    in_place: Any = [_editable(*pair) for pair in ((initial, "initial"), (transition, "transition"), (emission.log_probs, "emission"))]
    return torch.from_numpy(cpu.em_step(*in_place, *_data_arrays(sequences), single=single))


def _uniforms(count: int, generator: torch.Generator) -> np.ndarray:
    return torch.rand(count, generator=generator, dtype=torch.float64).numpy()


@torch.no_grad()
def sample(initial: Tensor, transition: Tensor, lengths: Tensor, generator: torch.Generator) -> Sequences:
    """State paths drawn from the Markov chain, of the given lengths. Drawn on the CPU: the same on every device."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cpu().cumsum(0)])
    initial_probs, transition_probs = _numpy([initial.exp().cpu(), transition.exp().cpu()])
    states = dense_loops.sample_chains(initial_probs, transition_probs, offsets.numpy(), _uniforms(int(offsets[-1]), generator))
    if states.min(initial=0) < 0:
        row = int((states < 0).argmax())
        which = "`initial`" if row in offsets.numpy() else f"`transition` row {states[row - 1]}"
        raise ValueError(f"{which} must have some probability to draw from, but has none.")
    return Sequences(torch.from_numpy(states).to(initial.device), offsets)


@torch.no_grad()
def sample_posterior(initial: Tensor, transition: Tensor, emission: Emission, sequences: Sequences, generator: torch.Generator) -> Sequences:
    """One state path for each sequence, drawn from p(z | y); -1 in impossible sequences. Drawn on the CPU."""
    filtered = posterior(initial, transition, emission, sequences).filtered.values
    kind, parameters = _unpack(emission)
    (log_filtered, log_initial, log_transition, *natural) = _numpy([tensor.cpu() for tensor in (filtered, initial, transition, *parameters)])
    values = _values_numpy(kernel_values(sequences).cpu())
    uniforms = _uniforms(sequences.num_steps, generator)
    states = cpu.sample_paths(log_filtered, kind, log_initial, log_transition, natural, values, sequences.offsets.numpy(), uniforms)
    return sequences.with_values(torch.from_numpy(states).to(initial.device))


def draw_rows(probs: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """One draw from row ``chosen[t]`` of `probs` for each t: symbols of states, for example."""
    draws = dense_loops.sample_rows(_numpy([probs.cpu()])[0], chosen.cpu().numpy(), _uniforms(len(chosen), generator))
    if draws.min(initial=0) < 0:
        raise ValueError(f"`probs` row {int(chosen[int((draws < 0).argmax())])} must have some probability to draw from, but has none.")
    return torch.from_numpy(draws).to(probs.device)
