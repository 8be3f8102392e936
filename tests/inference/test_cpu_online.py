"""Online EM in one compiled pass: the same as an E-step and an update of the buffers for each batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from lightning_hmm import HMM, Sequences
from lightning_hmm.inference import log_space
from lightning_hmm.inference.cpu.updates import normalize_rows
from lightning_hmm.inference.evidence import Table
from lightning_hmm.inference.operators import Dense


def log_rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.log(rng.dirichlet(np.ones(shape[-1]), shape[:-1]))


def plain(
    parameters, buffers, size, symbols, offsets, weights, *, batch_size, discount, updates, data_size, priors, frozen
):
    """What the pass does, by the exact E-step."""
    parameters, buffers, size = [value.copy() for value in parameters], [value.copy() for value in buffers], size.copy()
    scores = np.zeros(len(offsets) - 1)
    for first in range(0, len(scores), batch_size):
        last, updates = min(first + batch_size, len(scores)), updates + 1
        part = slice(offsets[first], offsets[last])
        initial, transition, emission = map(torch.from_numpy, parameters)
        evidence = Table(emission, torch.from_numpy(symbols[part]))
        found = log_space.e_step(
            initial,
            Dense(transition),
            evidence,
            torch.from_numpy(offsets[first : last + 1] - offsets[first]),
            torch.from_numpy(weights[first:last]),
        )
        scores[first:last] = found.log_likelihood
        correction = 1 - discount**updates
        size = discount * size + (1 - discount) * float(found.initial.sum())
        for n, counts in enumerate((found.initial, found.counts[0], found.evidence)):
            buffers[n] = discount * buffers[n] + (1 - discount) * counts.numpy()
            if not frozen[n]:
                raised = np.where(
                    parameters[n] > -np.inf, buffers[n] / correction + priors[n] * size / correction / data_size, 0
                )
                with np.errstate(divide="ignore"):
                    parameters[n] = np.log(raised / raised.sum(-1, keepdims=True))
    return parameters, buffers, size, scores


def run(parameters, buffers, size, symbols, offsets, weights, *, batch_size, **options):
    """The pass of a model with these sizes, on arrays."""
    model = HMM(len(parameters[0]), num_symbols=parameters[2].shape[1])
    values = torch.from_numpy(np.where(symbols == parameters[2].shape[1], -1, symbols.astype(np.int64)))
    sequences = Sequences(values, torch.from_numpy(offsets), torch.from_numpy(weights))
    tensors = [torch.from_numpy(value) for value in (*parameters, *buffers, size)]
    scores = model.compiled_kernel(
        *tensors[:3], sequences, batch_size, buffers=tensors[3:6], size=tensors[6][0], **options
    )
    return scores.numpy()


@pytest.mark.parametrize("frozen", [(False, False, False), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("zeros", [False, True])
def test_it_is_an_e_step_and_an_update_for_each_batch(frozen, zeros):
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 15, 23)
    offsets, states, num_symbols = np.append(0, lengths.cumsum()), 3, 4
    parameters = [log_rows(rng, states), log_rows(rng, states, states), log_rows(rng, states, num_symbols)]
    if zeros:
        parameters[1][0, 2] = -np.inf
    symbols = rng.integers(0, num_symbols + 1, offsets[-1])
    buffers, size, weights = [rng.random(value.shape) for value in parameters], np.array([2.0]), rng.random(23)
    options = {
        "batch_size": 4,
        "discount": 0.8,
        "updates": 3,
        "data_size": 50.0,
        "priors": (0.5, 0.1, 0.2),
        "frozen": frozen,
    }
    expected = plain(parameters, buffers, size, symbols, offsets, weights, **options)
    scores = run(parameters, buffers, size, symbols, offsets, weights, **options)
    for mine, theirs in zip(
        [*parameters, *buffers, size, scores], [*expected[0], *expected[1], *expected[2:]], strict=True
    ):
        assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_it_leaves_log_space_to_the_exact_pass_and_refuses_an_impossible_sequence():
    with np.errstate(divide="ignore"):
        parameters = [np.log([0.5, 0.5]), np.log(np.eye(2)), np.log([[1 - 1e-250, 1e-250, 0], [1e-250, 1 - 1e-250, 0]])]
    buffers, size = [np.zeros_like(value) for value in parameters], np.zeros(1)
    symbols, offsets = np.array([0, 0, 1, 1, 1, 0, 2, 0]), np.array([0, 5, 6, 8])
    options = {
        "batch_size": 2,
        "discount": 0.5,
        "updates": 0,
        "data_size": 3.0,
        "priors": (0.0, 0.0, 0.0),
        "frozen": (False, False, False),
    }
    expected = plain(parameters, buffers, size, symbols[:6], offsets[:3], np.ones(2), **options)
    with pytest.raises(ValueError, match=r"Sequence 2 .* step 0 \(2\)"):
        run(parameters, buffers, size, symbols, offsets, np.ones(3), **options)
    for mine, theirs in zip([*parameters, *buffers, size], [*expected[0], *expected[1], expected[2]], strict=True):
        assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_rows_without_counts_stay():
    log_probs = np.log([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])
    log_probs[0, 2] = -np.inf
    row_first, counts = np.array([0, 3, 6]), np.array([1.0, 3.0, 5.0, 0.0, 0.0, 0.0])
    probs = np.exp(log_probs).reshape(-1)
    assert normalize_rows(0, 2, row_first, log_probs.reshape(-1), counts, 1.0, 0.0, True) == 1
    assert normalize_rows(0, 2, row_first, probs, counts, 1.0, 0.0, False) == 1
    for found in (np.exp(log_probs), probs.reshape(2, 3)):
        assert_allclose(found, [[0.25, 0.75, 0], [0.2, 0.2, 0.6]], rtol=1e-15, atol=0)
