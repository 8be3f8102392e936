"""Random paths of the hidden chain, from the model itself or from the posterior. They are drawn on the CPU, so that every device gives the same."""

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
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().contiguous().numpy()


def draw_rows(probs: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """One draw from row ``chosen[t]`` of `probs` for each t: the symbols of states, for example."""
    draws = loops.draw_rows(_numpy(probs), chosen.cpu().numpy(), draw_uniforms(len(chosen), generator).numpy())
    if draws.min(initial=0) < 0:
        raise ValueError(
            f"`probs` row {int(chosen[int((draws < 0).argmax())])} must have some probability to draw from, but has none."
        )
    return torch.from_numpy(draws).to(probs.device)


@singledispatch
def chains(operator: Operator, initial: Tensor, offsets: Tensor, uniforms: Tensor) -> Tensor:
    """(steps,) states of the chain for sequences that begin and end at `offsets`, all on the CPU; -1 from where there is nothing to draw from."""
    states = torch.full((len(uniforms),), -1, dtype=torch.int64)
    starts, lengths = offsets[:-1], offsets.diff()
    for t in range(int(lengths.max()) if len(lengths) else 0):
        rows = starts[lengths > t] + t
        states[rows] = _draw(
            initial.exp().expand(len(rows), -1) if t == 0 else operator.leaving(states[rows - 1], rows), uniforms[rows]
        )
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
    """(n,) the entry of each row of `probs` (n, S) on which a uniform number falls; -1 in rows without any mass. Rows need not sum to one."""
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
    """(steps,) states drawn backward: z_T from the last filtered row, then z_t from alpha_t(i) A[i, z_t+1]; -1 in impossible sequences.

    `filtered` runs the E-step that gives the filtered rows.
    """
    found = filtered()
    path = torch.from_numpy(backward_paths(operator, _numpy(found.filtered), offsets, uniforms))
    possible = torch.nonzero((offsets.diff() > 0) & (found.impossible_step.cpu() < 0)).flatten()
    for n in possible[
        path[offsets[:-1][possible]] < 0
    ].tolist():  # every weight is below the smallest float: the same in log space
        at = torch.arange(*offsets[n : n + 2].tolist())
        rows = evidence.at(at.to(evidence.live.device)).rows().detach().cpu()
        path[at] = _exact_path(initial, operator.restricted_to(at), rows, uniforms[at])
    return path


@singledispatch
def backward_paths(operator: Operator, filtered: np.ndarray, offsets: Tensor, uniforms: Tensor) -> np.ndarray:
    """Backward sampling from filtered rows; -1 in sequences in which all weights of a step are zero."""
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
    """One path, in log space. `rows` are the log-likelihoods of its steps."""
    matrices = [operator.to_dense(torch.tensor([t])).reshape(len(initial), len(initial)) for t in range(len(rows))]
    log_alpha = [initial + rows[0]]
    for t in range(1, len(rows)):
        log_alpha.append(torch.logsumexp(log_alpha[-1][:, None] + matrices[t], 0) + rows[t])
    states = torch.empty(len(rows), dtype=torch.int64)
    for t in range(len(rows) - 1, -1, -1):
        weights = log_alpha[t] if t == len(rows) - 1 else log_alpha[t] + matrices[t + 1][:, states[t + 1]]
        states[t] = _draw((weights - weights.max()).exp()[None], uniforms[t : t + 1])[0]
    return states
