r"""Inference in hidden Markov models whose transition matrix is dense but mostly constant (DMC).

.. math:: A_{ij} = a_{ij} \text{ for the K columns } j \text{ that row } i \text{ keeps}, \qquad A_{ij} = c_i \text{ for all others}

Forward, backward and Viterbi cost O(steps N K) in place of O(steps N^2), and nothing is approximated: the answers are those
of `inference.dense` with the full matrix. The functions have the same names and take the same arguments, but for the
transition, which is a `Transition`. The log-likelihood's gradient is the E-step here too:

.. math:: \partial L / \partial \log a_{ij} = E[i \to j], \qquad \partial L / \partial \log c_i = \sum_{j \text{ not kept}} E[i \to j]

N states, K kept entries a row. Dense routines multiply contiguous numbers, so below some N / K they are faster; with
``routine="auto"`` they are used there. On a CPU the kernels of `kernels.dmc_cpu` run, elsewhere those of
`reference`.

Siddiqi, S. M., & Moore, A. W. (2005). Fast inference and learning in large-state-space HMMs. ICML.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hmm.inference import dense, log_space, operators, reference
from lightning_hmm.inference.dense import Emission, Gaussian, Path, Steps, Symbols, _numpy, _uniforms, _unpack, _values_numpy
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.kernels import cpu, dmc_cpu
from lightning_hmm.inference.log_space import wide_dtype
from lightning_hmm.sequences import Sequences


class Transition(NamedTuple):
    """indices: (N, K) the columns each row keeps, rising; log_values: (N, K) log a_ij; log_constants: (N,) log c_i."""

    indices: Tensor
    log_values: Tensor
    log_constants: Tensor

    @classmethod
    def from_dense(cls, probs: Tensor, num_kept: int) -> Transition:
        """Of rows of probabilities, which need not be all rows: the K largest entries of each are kept, the others averaged."""
        order = probs.sort(dim=1, descending=True, stable=True).indices
        indices, others = order[:, :num_kept].sort(dim=1).values, order[:, num_kept:]
        return cls(indices, probs.gather(1, indices).log(), probs.gather(1, others).mean(1).log())

    def to_dense(self) -> Tensor:
        """(N, N) all probabilities."""
        return self.expand().exp()

    def expand(self, num_states: int | None = None) -> Tensor:
        """(N, N) the full matrix of log-probabilities; of a part of the rows where `num_states` tells N."""
        full = self.log_constants[:, None].expand(-1, num_states or len(self.log_constants))
        return full.scatter(1, self.indices, self.log_values)


class EStep(NamedTuple):
    """Expected sufficient statistics of all sequences, each times its weight.

    log_likelihood: (N,) log p(y), without weights.
    impossible_step: (N,) the first step of probability zero, -1 where there is none.
    initial: E[sequences that start in k], for each state.
    kept: (N, K) E[transitions along the kept entries].
    rest: (N,) E[transitions from i along all other entries].
    emission: as `dense.EStep` has it.
    """

    log_likelihood: Tensor
    impossible_step: Tensor
    initial: Tensor
    kept: Tensor
    rest: Tensor
    emission: tuple[Tensor, ...]


class Posterior(NamedTuple):
    """What the data say about the states.

    log_likelihood: of each sequence, log p(y_1:T).
    filtered: p(z_t | y_1:t), a row of N for each step.
    smoothed: p(z_t | y_1:T), a row of N for each step.
    kept_counts: (N, K) expected transitions along the kept entries, summed over sequences, each times its weight.
    rest_counts: (N,) expected transitions along all other entries, summed likewise.
    """

    log_likelihood: Tensor
    filtered: Sequences
    smoothed: Sequences
    kept_counts: Tensor
    rest_counts: Tensor


class Pairs(NamedTuple):
    """The expected transitions of all pairs of states, not yet multiplied out.

    E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j) + counts_ij, the sum over successive rows of `alpha` and `kappa`; kappa is zero at
    the first step of each sequence. Any of the three may be empty.
    """

    alpha: Tensor
    kappa: Tensor
    counts: Tensor


ROUTINES = ("auto", "dense", "sparse")

# Nanoseconds a step and sequence, measured (benchmarks/dmc.py costs): for an entry of the full matrix in the dense routine, for a kept
# entry and for a state in the sparse one. For one sequence at a time, and for many side by side; float32, then float64.
_COSTS = {
    ("forward", False): ((0.035, 0.32, 1.4), (0.073, 0.31, 1.9)),
    ("forward", True): ((0.013, 0.029, 0.9), (0.027, 0.058, 1.2)),
    ("e_step", False): ((0.086, 0.66, 2.7), (0.185, 0.70, 3.7)),
    ("e_step", True): ((0.042, 0.66, 3.0), (0.086, 0.69, 3.8)),
}
_MANY = 8  # sequences from which on they are worked on side by side
_PAIR_COST = (0.026, 0.052)  # of an entry of alpha^T kappa, which the dense routine has made in any case


def prefers_dense(num_states: int, num_kept: int, num_sequences: int, *, single: bool, smooth: bool, pairs: bool = False) -> bool:
    """Whether the dense routine is expected to be faster, by measured costs; with `pairs`, all expected transitions are wanted too."""
    precision = 0 if single else 1
    full, entry, state = _COSTS["e_step" if smooth else "forward", num_sequences >= _MANY][precision]
    return full * num_states < entry * num_kept + state + (_PAIR_COST[precision] * num_states if pairs else 0.0)


def _use_dense(routine: str, transition: Transition, sequences: Sequences, *, single: bool, smooth: bool, pairs: bool = False) -> bool:
    if routine != "auto":
        return routine == "dense"
    num_states, num_kept = transition.log_values.shape
    return prefers_dense(num_states, num_kept, len(sequences), single=single, smooth=smooth, pairs=pairs)


# The operators, made like those of `inference.dense`. Outputs: log-likelihoods times weight, log-likelihoods, impossible steps, initial,
# kept, rest, three emission statistics, smoothed rows times weight, filtered rows, filtered rows of the last steps, alpha, kappa,
# expected transitions of pairs that are not in these.

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _finish(results: Any, weights: Tensor) -> _Results:
    log_likelihood, impossible, initial, kept, rest, visits, sum1, sum2, *rows = map(torch.as_tensor, results)
    # A weight of zero times -inf would be NaN; such a sequence does not count.
    weighted = torch.where(weights == 0, torch.zeros_like(log_likelihood), log_likelihood * weights)
    statistics = (visits.T.contiguous(), sum1.T.contiguous(), sum2.T.contiguous())
    smoothed, filtered, last, alpha, kappa, pairs = rows
    return weighted, log_likelihood, impossible, initial.clone(), kept, rest, *statistics, smoothed, filtered, last, alpha, kappa, pairs


def _from_dense(results: tuple[Any, ...], indices: Any, pairs: bool) -> tuple[Any, ...]:
    """The results of a dense E-step, the transition counts split; `pairs`: also as they are."""
    log_likelihood, impossible, initial, counts, *rest = results
    kept, others = dmc_cpu.split_counts(counts, indices)
    empty = counts[:0, :0]
    return log_likelihood, impossible, initial, kept, others, *rest, empty.copy(), empty.copy(), counts if pairs else empty.copy()


@torch.library.custom_op("lightning_hmm::dmc_e_step", mutates_args=())
def _e_step_op(
    kind: int,
    initial: Tensor,
    indices: Tensor,
    log_values: Tensor,
    log_constants: Tensor,
    parameters: Sequence[Tensor],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor,
    single: bool,
    smooth: bool,
    per_step: bool,
    pairs: bool,
    use_dense: bool,
) -> _Results:
    # The choice of what to keep needs the counts of all pairs, which only the full matrix has.
    given = Transition(indices, log_values, log_constants)
    operator = operators.Dense(given.expand()) if pairs else operators.MostlyConstant(*given)
    rows = dense.log_emissions(kind, parameters, values, wide_dtype(initial.device))
    found = reference.e_step(initial, operator, Rows(rows), offsets, weights, dtype=torch.float32 if single else None, smooth=smooth)
    if pairs:
        (counts,) = found.counts
        kept, others = counts.gather(1, indices), counts.scatter(1, indices, 0.0).sum(1)
    else:
        (kept, others), counts = found.counts, found.initial.new_zeros(0, 0)
    empty = [found.initial.new_zeros(0, 0) for _ in range(2)]
    statistics, steps = dense._statistics(kind, parameters, values, found.smoothed, smooth), dense._rows(kind, found, per_step, smooth)
    return _finish((*found[:3], kept, others, *statistics, *steps, *empty, counts), weights)


@_e_step_op.register_kernel("cpu")
def _(kind, initial, indices, log_values, log_constants, parameters, values, offsets, weights, single, smooth, per_step, pairs, use_dense):
    log_initial, values_array, constants_array, *natural = _numpy([initial, log_values, log_constants, *parameters])
    data = natural, _values_numpy(values), offsets.numpy(), weights.numpy()
    options = {"single": single, "smooth": smooth, "per_step": per_step, "last": not smooth}
    if use_dense:
        full = dmc_cpu.expand(indices.numpy(), values_array, constants_array)
        results = _from_dense(cpu.e_step(kind, log_initial, full, *data, **options), indices.numpy(), pairs)
    else:
        results = dmc_cpu.e_step(kind, log_initial, indices.numpy(), values_array, constants_array, *data, **options, factors=pairs)
    return _finish(results, weights)


@_e_step_op.register_fake
def _(kind, initial, indices, log_values, log_constants, parameters, values, offsets, weights, single, smooth, per_step, pairs, use_dense):
    num_sequences, (num_states, num_kept) = weights.shape[0], log_values.shape
    wide = lambda *shape: weights.new_empty(shape)  # noqa: E731
    width = 0 if kind == cpu.STEPS or not smooth else parameters[0].shape[1]
    sums = width if kind == cpu.GAUSSIAN else 0
    steps = values.shape[0] if per_step or (kind == cpu.STEPS and smooth) else 0
    counts = (wide(num_states), wide(num_states, num_kept), wide(num_states), wide(num_states, width), wide(num_states, sums), wide(num_states, sums))
    impossible = torch.empty(num_sequences, dtype=torch.int64, device=weights.device)
    rows = (wide(steps, num_states), wide(values.shape[0] if per_step else 0, num_states), wide(0 if smooth else num_sequences, num_states))
    factors = (wide(0, 0), wide(0, 0), wide(num_states, num_states) if pairs else wide(0, 0))
    return (wide(num_sequences), wide(num_sequences), impossible, *counts, *rows, *factors)


def _save(ctx, inputs, output):
    kind, initial, indices, log_values, log_constants, parameters, values, offsets, weights, single, _, _, _, use_dense = inputs
    ctx.kind, ctx.single, ctx.use_dense, ctx.num_parameters = kind, single, use_dense, len(parameters)
    ctx.save_for_backward(initial, indices, log_values, log_constants, values, offsets, weights, *parameters, *output[3:10])
    ctx.mark_non_differentiable(*output[1:])  # a gradient through these would be a silent zero


@once_differentiable
def _backward(ctx, grad_weighted, *unused):
    """Gradients are the statistics, times the incoming gradient."""
    initial, indices, log_values, log_constants, values, offsets, weights, *rest = ctx.saved_tensors
    parameters, statistics = rest[: ctx.num_parameters], rest[ctx.num_parameters :]
    if grad_weighted.numel() == 1 or grad_weighted.stride() == (0,):
        scale = grad_weighted[:1]  # from a sum: one number for all sequences
    else:
        chain = (initial, indices, log_values, log_constants, parameters, values, offsets)
        again = _e_step_op(ctx.kind, *chain, weights * grad_weighted, ctx.single, True, False, False, ctx.use_dense)
        statistics, scale = again[3:10], grad_weighted.new_ones(1)
    if grad_weighted.numel() == 0:
        scale = grad_weighted.new_ones(1)
    initial_counts, kept, others, visits, sum1, sum2, smoothed = statistics
    if ctx.kind == cpu.SYMBOLS:
        emission = [visits * scale]
    elif ctx.kind == cpu.STEPS:
        emission = [smoothed * scale]
    else:
        emission = [sum1 * scale, sum2 * scale, -visits * scale, None]
    emission = [gradient if gradient is None else gradient.to(parameter.dtype) for gradient, parameter in zip(emission, parameters, strict=True)]
    first, *rows = [(counts * scale).to(of.dtype) for counts, of in ((initial_counts, initial), (kept, log_values), (others, log_constants))]
    return None, first, None, *rows, emission, *[None] * 8


_e_step_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("lightning_hmm::dmc_viterbi", mutates_args=())
def _viterbi_op(
    kind: int,
    initial: Tensor,
    indices: Tensor,
    log_values: Tensor,
    log_constants: Tensor,
    parameters: Sequence[Tensor],
    values: Tensor,
    offsets: Tensor,
    single: bool,
    use_dense: bool,
) -> tuple[Tensor, Tensor]:
    rows = dense.log_emissions(kind, parameters, values, wide_dtype(initial.device))
    return log_space.viterbi(initial, operators.MostlyConstant(indices, log_values, log_constants), Rows(rows), offsets)


@_viterbi_op.register_kernel("cpu")
def _(kind, initial, indices, log_values, log_constants, parameters, values, offsets, single, use_dense):
    log_initial, values_array, constants_array, *natural = _numpy([initial, log_values, log_constants, *parameters])
    data = natural, _values_numpy(values), offsets.numpy()
    if use_dense:
        path, log_probability = cpu.viterbi(kind, log_initial, dmc_cpu.expand(indices.numpy(), values_array, constants_array), *data)
    else:
        path, log_probability = dmc_cpu.viterbi(kind, log_initial, indices.numpy(), values_array, constants_array, *data, single=single)
    return torch.from_numpy(path), torch.from_numpy(log_probability)


@_viterbi_op.register_fake
def _(kind, initial, indices, log_values, log_constants, parameters, values, offsets, single, use_dense):
    return values.new_empty(values.shape[0], dtype=torch.int64), initial.new_empty(offsets.shape[0] - 1, dtype=wide_dtype(initial.device))


def _check(initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, routine: str) -> None:
    num_states = initial.shape[0]
    indices, log_values, log_constants = transition
    if indices.shape != log_values.shape or indices.dim() != 2:
        raise ValueError(f"`indices` and `log_values` must be states by kept entries, but are {tuple(indices.shape)} and {tuple(log_values.shape)} instead.")
    if log_constants.shape != (num_states,) or len(indices) != num_states:
        wanted, shapes = f"{num_states} rows for {num_states} initial probabilities", f"{len(indices)} and {len(log_constants)}"
        raise ValueError(f"`transition` must have {wanted}, but its indices and constants have {shapes} instead.")
    if indices.shape[1] >= num_states:
        raise ValueError(f"`transition` must keep fewer entries of a row than there are states, {num_states}, but keeps {indices.shape[1]} instead.")
    if routine not in ROUTINES:
        raise ValueError(f"`routine` must be auto, dense or sparse, but is {routine!r} instead.")
    dense.check_emission(num_states, emission, sequences)


def _call(
    initial: Tensor,
    transition: Transition,
    emission: Emission,
    sequences: Sequences,
    weights: Tensor | None,
    *,
    single: bool = False,
    smooth: bool,
    per_step: bool = False,
    pairs: bool = False,
    routine: str,
) -> _Results:
    _check(initial, transition, emission, sequences, routine)
    kind, parameters = _unpack(emission)
    if weights is None:
        weights = torch.ones(len(sequences), dtype=wide_dtype(initial.device), device=initial.device)
    use_dense = _use_dense(routine, transition, sequences, single=single, smooth=smooth, pairs=pairs)
    data = (dense.kernel_values(sequences), sequences.offsets, weights)
    return _e_step_op(kind, initial, *transition, parameters, *data, single, smooth, per_step, pairs, use_dense)


def log_likelihood(initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, *, single: bool = False, routine: str = "auto") -> Tensor:
    """Log p(y) of each sequence, differentiable in all log-probabilities and the emission's parameters, each entry free."""
    _, parameters = _unpack(emission)
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (initial, *transition, *parameters))
    return _call(initial, transition, emission, sequences, None, single=single, smooth=differentiable, routine=routine)[0]


def weighted_log_likelihood(
    initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, *, single: bool = False, routine: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """What training needs: weight x log p(y) of each sequence, differentiable; log p(y); and the impossible steps (-1: none)."""
    smooth = torch.is_grad_enabled()
    weighted, plain, impossible, *_ = _call(initial, transition, emission, sequences, sequences.weights, single=single, smooth=smooth, routine=routine)
    return weighted, plain, impossible


def weighted_log_likelihood_and_pairs(
    initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, *, single: bool = False, routine: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Pairs]:
    """As `weighted_log_likelihood`, and what choosing other entries to keep needs."""
    results = _call(initial, transition, emission, sequences, sequences.weights, single=single, smooth=True, pairs=True, routine=routine)
    return results[0], results[1], results[2], Pairs(*(tensor.detach() for tensor in results[12:]))


@torch.no_grad()
def e_step(initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, *, single: bool = False, routine: str = "auto") -> EStep:
    """Expected sufficient statistics, each sequence counted with its weight."""
    results = _call(initial, transition, emission, sequences, sequences.weights, single=single, smooth=True, routine=routine)
    _, log_likelihood, impossible, initial_counts, kept, rest, visits, sum1, sum2, smoothed, *_ = results
    statistics = {Symbols: (visits,), Gaussian: (sum1, sum2, visits), Steps: (smoothed,)}[type(emission)]
    return EStep(log_likelihood, impossible, initial_counts, kept, rest, statistics)


@torch.no_grad()
def posterior(initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, *, routine: str = "auto") -> Posterior:
    """Filtered and smoothed state probabilities. Impossible sequences have rows of zeros and a likelihood of -inf."""
    results = _call(initial, transition, emission, sequences, None, smooth=True, per_step=True, routine=routine)
    kept, rest = results[4], results[5]
    if sequences.weights is not None:  # with weights, the rows of the steps would be multiplied too
        statistics = e_step(initial, transition, emission, sequences, routine=routine)
        kept, rest = statistics.kept, statistics.rest
    return Posterior(results[1], sequences.with_values(results[10]), sequences.with_values(results[9]), kept, rest)


@torch.no_grad()
def viterbi(initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, *, single: bool = False, routine: str = "auto") -> Path:
    """The most probable path of each sequence; of equally probable ones that with the lowest numbers from the end."""
    _check(initial, transition, emission, sequences, routine)
    kind, parameters = _unpack(emission)
    use_dense = _use_dense(routine, transition, sequences, single=single, smooth=False)
    path, log_probability = _viterbi_op(kind, initial, *transition, parameters, dense.kernel_values(sequences), sequences.offsets, single, use_dense)
    return Path(sequences.with_values(path), log_probability)


def propagate(state_probs: Tensor, transition: Transition) -> Tensor:
    """(n, N) probabilities of states -> those one step later, in O(n N K)."""
    indices, log_values, log_constants = transition
    constants, num_kept = log_constants.exp(), indices.shape[1]
    corrections = (log_values.exp() - constants[:, None]).flatten() * state_probs.repeat_interleave(num_kept, dim=1)  # (n, N K)
    shared = (state_probs @ constants)[:, None].expand_as(state_probs)
    return shared.index_add(1, indices.flatten(), corrections).clamp(min=0)  # below zero by rounding only


@torch.no_grad()
def predict_next(initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, *, steps: int = 1) -> Tensor:
    """p(z_{T+steps} | y_1:T), a row for each sequence; of an empty one, the chain's own start. Impossible sequences give NaN."""
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, but is {steps} instead.")
    results = _call(initial, transition, emission, sequences, None, smooth=False, routine="auto")
    empty = (sequences.lengths == 0).to(initial.device)[:, None]
    states = torch.where(empty, initial.exp(), propagate(results[11].to(initial.dtype), transition))
    for _ in range(steps - 1):
        states = propagate(states, transition)
    return torch.where((results[2] >= 0)[:, None], torch.nan, states)


@torch.no_grad()
def sample(initial: Tensor, transition: Transition, lengths: Tensor, generator: torch.Generator) -> Sequences:
    """State paths drawn from the Markov chain, of the given lengths, in O(K) a step. Drawn on the CPU: the same on every device."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cpu().cumsum(0)])
    log_initial, log_values, log_constants = _numpy([initial.cpu(), transition.log_values.cpu(), transition.log_constants.cpu()])
    chain = log_initial, transition.indices.cpu().numpy(), log_values, log_constants
    states = dmc_cpu.sample_chains(*chain, offsets.numpy(), _uniforms(int(offsets[-1]), generator))
    return Sequences(torch.from_numpy(states).to(initial.device), offsets)


@torch.no_grad()
def sample_posterior(initial: Tensor, transition: Transition, emission: Emission, sequences: Sequences, generator: torch.Generator) -> Sequences:
    """One state path for each sequence, drawn from p(z | y); -1 in impossible sequences. Drawn on the CPU."""
    filtered = posterior(initial, transition, emission, sequences).filtered.values
    rows, log_values, log_constants = _numpy([tensor.cpu() for tensor in (filtered, transition.log_values, transition.log_constants)])
    uniforms = _uniforms(sequences.num_steps, generator)
    states = dmc_cpu.sample_paths(rows, transition.indices.cpu().numpy(), log_values, log_constants, sequences.offsets.numpy(), uniforms)
    lost = np.flatnonzero(sequences.lengths.numpy() > 0)
    lost = lost[states[sequences.offsets.numpy()[lost]] < 0]
    path = torch.from_numpy(states).to(initial.device)
    if len(lost):  # weights below the smallest float, if not impossible: in log space with the full matrix
        again = dense.sample_posterior(initial, transition.expand(), emission, sequences, generator)
        for n in lost:
            first, last = sequences.offsets[n : n + 2].tolist()
            path[first:last] = again.values[first:last]
    return sequences.with_values(path)
