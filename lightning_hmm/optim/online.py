"""Many updates of online EM in one compiled pass.

A pass performs an E-step and an M-step for each `batch_size` consecutive sequences, without the overhead of a Python
call for each update. The M-step is implemented in `inference.cpu.updates`. If the numbers of a batch leave the range of
the compiled E-step, the batch is processed by `inference.e_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm import inference
from lightning_hmm.distributions import Categorical, Clones, Emission, Full, Initial, OneSymbol, Transition
from lightning_hmm.inference.cloned import Blocks, ClonedSymbols
from lightning_hmm.inference.cpu.clones.online import ClonesPass
from lightning_hmm.inference.cpu.online import DensePass
from lightning_hmm.inference.cpu.updates import Part, advance, over_rows, update_rows
from lightning_hmm.inference.operators import Dense
from lightning_hmm.inference.results import impossible_message
from lightning_hmm.sequences import Sequences


class _Problem(NamedTuple):
    """Description of a combination of parts, for one restart.

    Attributes:
        compiled: Compiled function that performs updates from a given batch on and returns the number of the first
            batch that it could not process. It has the attributes `counts` and `scores`.
        row_first: Offsets of the rows of each parameter.
        are_logs: Whether each parameter consists of log-probabilities.
        inference: Function that returns the first arguments of `inference.e_step` for some of the sequences.
        counts: Function that returns the expected counts of each parameter from the result of an E-step.
    """

    compiled: Any
    row_first: list[np.ndarray]
    are_logs: list[bool]
    inference: Callable[[Sequences], tuple[Any, Any, Any, Tensor]]
    counts: Callable[[inference.EStep], tuple[Tensor, ...]]


def compiled_kernel_for(initial: Initial, transition: Transition, emission: Emission) -> Callable[..., Tensor] | None:
    """Returns the compiled pass for these parts, or ``None`` if there is none. See `_run` for its arguments."""
    problem = _PROBLEMS.get((type(initial), type(transition), type(emission)))
    if problem is None or emission.tied or emission.frozen:
        return None
    if any(parameter.dtype != torch.float64 for parameter in transition.parameters()):
        return None

    @torch.no_grad()
    def run(*arguments: Any, **options: Any) -> Tensor:
        *parameters, sequences, batch_size = arguments
        return _run(
            problem(transition, parameters, sequences, batch_size), parameters, sequences, batch_size, **options
        )

    return run


def _run(
    problem: _Problem,
    parameters: Sequence[Tensor],
    sequences: Sequences,
    batch_size: int,
    *,
    size: Tensor,
    buffers: Sequence[Tensor],
    discount: float,
    updates: int,
    data_size: float,
    priors: Sequence[float],
    frozen: Sequence[bool],
) -> Tensor:
    """Performs online EM over consecutive batches. Parameters and buffers are updated in place.

    Args:
        problem: Description of the parts.
        parameters: Parameters of one restart, on the CPU.
        sequences: Sequences of symbols.
        batch_size: Number of sequences per update.
        size: Discounted number of sequences in a batch.
        buffers: Discounted counts of the parameters.
        discount: Discount factor of the previous counts, below 1. With 0, only the current batch is used.
        updates: Number of previous updates.
        data_size: Number of sequences in the whole data set, to which the priors refer.
        priors: For each parameter, the number that its prior adds to a count of the whole data set.
        frozen: Whether each parameter is left unchanged.

    Returns:
        (N,) log p(y) of each sequence under the parameters before the update from its batch.
    """
    compiled, sizes = problem.compiled, size.reshape(1).numpy()
    values, memory = ([tensor.detach().view(-1).numpy() for tensor in tensors] for tensors in (parameters, buffers))
    options = zip(
        problem.row_first,
        values,
        compiled.counts,
        memory,
        map(float, priors),
        map(bool, frozen),
        problem.are_logs,
        strict=True,
    )
    parts = tuple(Part(*option) for option in options)
    num_batches, batch = -(-len(sequences) // batch_size), 0
    while (batch := compiled(batch, parts, float(discount), updates + batch, sizes, float(data_size))) < num_batches:
        first, last = batch * batch_size, min((batch + 1) * batch_size, len(sequences))
        chunk = sequences[first:last]
        found = inference.e_step(*problem.inference(chunk), weights=chunk.weights)
        _check_possible(found, chunk, sequences, first)
        compiled.scores[first:last] = found.log_likelihood
        for part, counts in zip(parts, problem.counts(found), strict=True):
            part.counts[:] = counts.reshape(-1)
        batch += 1
        started = float(found.initial.sum())
        factor, prior_weight = advance(sizes, started, updates + batch, float(discount), float(data_size))
        for part in parts:
            over_rows(part.row_first, update_rows, part, float(discount), factor, prior_weight)
    return torch.from_numpy(compiled.scores)


def _check_possible(found: inference.EStep, chunk: Sequences, sequences: Sequences, first: int) -> None:
    """Raises a `ValueError` if a sequence of positive weight in the chunk, which begins at `first`, is impossible."""
    counted = True if chunk.weights is None else chunk.weights != 0
    impossible = torch.nonzero((found.impossible_step >= 0) & counted).flatten()
    if len(impossible):
        n = int(impossible[0])
        raise ValueError(impossible_message(sequences, first + n, int(found.impossible_step[n])))


def _weights(sequences: Sequences) -> np.ndarray:
    weights: np.ndarray = np.ones(len(sequences)) if sequences.weights is None else sequences.weights.numpy()
    return weights


def _categorical(transition: Any, parameters: Sequence[Tensor], sequences: Sequences, batch_size: int) -> _Problem:
    log_initial, log_transition, log_emission = (parameter.detach() for parameter in parameters)
    (num_states, num_symbols), offsets = log_emission.shape, sequences.offsets.numpy()
    symbols = sequences.symbols(num_symbols).numpy()
    return _Problem(
        DensePass(log_transition.numpy(), log_emission.numpy(), symbols, offsets, _weights(sequences), batch_size),
        [
            np.arange(0, rows * width + 1, width)
            for rows, width in ((1, num_states), (num_states, num_states), (num_states, num_symbols))
        ],
        [True, True, True],
        lambda chunk: (
            log_initial,
            Dense(log_transition),
            inference.Table(log_emission, chunk.symbols(num_symbols)),
            chunk.offsets,
        ),
        lambda found: (found.initial, found.counts[0], found.evidence),
    )


def _clones(transition: Any, parameters: Sequence[Tensor], sequences: Sequences, batch_size: int) -> _Problem:
    log_initial, probs = (parameter.detach() for parameter in parameters)
    layout = transition.layout
    symbols = sequences.symbols(layout.num_symbols).numpy()
    return _Problem(
        ClonesPass(
            layout.arrays, layout.num_entries, symbols, sequences.offsets.numpy(), _weights(sequences), batch_size
        ),
        [np.array([0, layout.num_states]), layout.row_first],
        [True, False],
        lambda chunk: (log_initial, Blocks(probs, layout), ClonedSymbols.of(chunk, layout), chunk.offsets),
        lambda found: (found.initial, found.counts[0]),
    )


_PROBLEMS: dict[tuple[type, ...], Callable[[Any, Sequence[Tensor], Sequences, int], _Problem]] = {
    (Initial, Full, Categorical): _categorical,
    (Initial, Clones, OneSymbol): _clones,
}
