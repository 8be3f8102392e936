"""Random state paths, from the Markov chain or from the posterior.

They are drawn on the CPU, so the result does not depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference.cpu.mostly_constant import find_columns
from lightning_hmm.inference.evidence import Evidence
from lightning_hmm.inference.kernels import sampling_loops as loops
from lightning_hmm.inference.operators import Dense, MostlyConstant, Operator
from lightning_hmm.inference.results import EStep


def draw_uniforms(count: int, generator: torch.Generator) -> Tensor:
    """Draws (count,) numbers from [0, 1), float64."""
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().contiguous().numpy()


def draw_rows(probs: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Draws one entry from row ``chosen[t]`` of `probs` for each t, for example the symbols of states.

    Args:
        probs: (rows, V) probabilities.
        chosen: (n,) numbers of rows.
        generator: Random generator of the CPU.

    Returns:
        (n,) numbers of columns, on the device of `probs`.

    Example:
        >>> import torch
        >>> draw_rows(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1, 0]), torch.Generator())
        tensor([1, 0, 1])
    """
    draws = loops.draw_rows(_numpy(probs), chosen.cpu().numpy(), draw_uniforms(len(chosen), generator).numpy())
    if draws.min(initial=0) < 0:
        raise ValueError(
            f"`probs` row {int(chosen[int((draws < 0).argmax())])} must have some probability to draw from, "
            "but has none."
        )
    return torch.from_numpy(draws).to(probs.device)


@singledispatch
def chains(operator: Operator, initial: Tensor, offsets: Tensor, uniforms: Tensor) -> Tensor:
    """Draws state paths from the Markov chain. All tensors are on the CPU.

    Args:
        operator: Transition operator.
        initial: (S,) log-probabilities of the first state.
        offsets: (N + 1,) boundaries of the sequences.
        uniforms: (steps,) numbers from [0, 1).

    Returns:
        (steps,) states. They are -1 after a state without transitions.
    """
    states = torch.full((len(uniforms),), -1, dtype=torch.int64)
    starts, lengths = offsets[:-1], offsets.diff()
    for t in range(int(lengths.max()) if len(lengths) else 0):
        rows = starts[lengths > t] + t
        probs = initial.exp().expand(len(rows), -1) if t == 0 else operator.leaving(states[rows - 1], rows)
        states[rows] = _draw(probs, uniforms[rows])
        if bool((states[rows] < 0).any()):
            break
    return states


@chains.register
def _(operator: Dense, initial: Tensor, offsets: Tensor, uniforms: Tensor) -> Tensor:
    return torch.from_numpy(
        loops.dense_chains(_numpy(initial.exp()), _numpy(operator.log_probs.exp()), offsets.numpy(), uniforms.numpy())
    )


@chains.register
def _(operator: MostlyConstant, initial: Tensor, offsets: Tensor, uniforms: Tensor) -> Tensor:
    rows = operator.indices.numpy(), _numpy(operator.log_values.exp()), _numpy(operator.log_constants.exp())
    return torch.from_numpy(
        loops.mostly_constant_chains(_numpy(initial.exp()), *rows, offsets.numpy(), uniforms.numpy())
    )


def _draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one entry from each row of `probs` (n, S), whose rows need not sum to one.

    Returns:
        (n,) numbers of columns. They are -1 for rows of zeros.
    """
    rows = torch.arange(len(probs)).numpy()
    return torch.from_numpy(loops.draw_rows(_numpy(probs), rows, uniforms.numpy()))


@singledispatch
def paths(
    operator: Operator,
    initial: Tensor,
    evidence: Evidence,
    offsets: Tensor,
    uniforms: Tensor,
    filtered: Callable[[], EStep],
) -> Tensor:
    """Draws state paths from the posterior: z_T from the last filtered row, then z_t from alpha_t(i) A[i, z_t+1].

    Args:
        operator: Transition operator, on the CPU.
        initial: (S,) log-probabilities of the first state, on the CPU.
        evidence: Evidence of the observations.
        offsets: (N + 1,) boundaries of the sequences.
        uniforms: (steps,) numbers from [0, 1).
        filtered: Function that runs the E-step with filtered rows.

    Returns:
        (steps,) states, which are -1 in impossible sequences.
    """
    found = filtered()
    path = torch.from_numpy(backward_paths(operator, _numpy(found.filtered), offsets, uniforms))
    possible = torch.nonzero((offsets.diff() > 0) & (found.impossible_step.cpu() < 0)).flatten()
    # In some sequences all weights of a step are below the smallest float. They are computed in log space.
    for n in possible[path[offsets[:-1][possible]] < 0].tolist():
        at = torch.arange(*offsets[n : n + 2].tolist())
        rows = evidence.at(at.to(evidence.live.device)).rows().detach().cpu()
        path[at] = _exact_path(initial, operator.restricted_to(at), rows, uniforms[at])
    return path


@singledispatch
def backward_paths(operator: Operator, filtered: np.ndarray, offsets: Tensor, uniforms: Tensor) -> np.ndarray:
    """Runs backward sampling on filtered rows. States are -1 in sequences in which all weights of a step are zero."""
    rows_of, states = torch.from_numpy(filtered), torch.full((len(uniforms),), -1, dtype=torch.int64)
    retract = operator.prepare(rows_of.dtype).retract
    starts, lengths = offsets[:-1], offsets.diff()
    for t in range(int(lengths.max()) - 1 if len(lengths) else -1, -1, -1):
        rows, goes_on = starts[lengths > t] + t, lengths[lengths > t] > t + 1
        weights, later = rows_of[rows], rows[goes_on] + 1
        unit = torch.nn.functional.one_hot(states[later].clamp(min=0), rows_of.shape[1]).to(rows_of.dtype)
        weights[goes_on] *= torch.where((states[later] < 0)[:, None], 0.0, retract(unit, later).clamp(min=0))
        states[rows] = _draw(weights, uniforms[rows])
    return states.numpy()


@backward_paths.register
def _(operator: Dense, filtered: np.ndarray, offsets: Tensor, uniforms: Tensor) -> np.ndarray:
    states = np.full(len(uniforms), -1)
    loops.dense_paths(filtered, offsets.numpy(), _numpy(operator.log_probs.exp()), uniforms.numpy(), states)
    return states


@backward_paths.register
def _(operator: MostlyConstant, filtered: np.ndarray, offsets: Tensor, uniforms: Tensor) -> np.ndarray:
    states = np.full(len(uniforms), -1)
    indices = np.ascontiguousarray(operator.indices.numpy(), np.int32)
    starts, sources, positions = (
        np.zeros(len(indices) + 1, np.int64),
        np.empty(indices.size, np.int32),
        np.empty(indices.size, np.int64),
    )
    find_columns(indices, starts, sources, positions)
    values, constants = _numpy(operator.log_values.exp()).reshape(-1)[positions], _numpy(operator.log_constants.exp())
    loops.mostly_constant_paths(filtered, offsets.numpy(), starts, sources, values, constants, uniforms.numpy(), states)
    return states


def _exact_path(initial: Tensor, operator: Operator, rows: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one path from the posterior in log space. `rows` are the log-likelihoods of its steps."""
    matrices = [operator.to_dense(torch.tensor([t])).reshape(len(initial), len(initial)) for t in range(len(rows))]
    log_alpha = [initial + rows[0]]
    for t in range(1, len(rows)):
        log_alpha.append(torch.logsumexp(log_alpha[-1][:, None] + matrices[t], 0) + rows[t])
    states = torch.empty(len(rows), dtype=torch.int64)
    for t in range(len(rows) - 1, -1, -1):
        weights = log_alpha[t] if t == len(rows) - 1 else log_alpha[t] + matrices[t + 1][:, states[t + 1]]
        states[t] = _draw((weights - weights.max()).exp()[None], uniforms[t : t + 1])[0]
    return states
