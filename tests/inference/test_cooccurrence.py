"""Pair counts, stationary distributions and the co-occurrence error against loops, powers and finite differences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from lightning_hmm import Sequences
from lightning_hmm.inference import cooccurrence
from lightning_hmm.inference.cooccurrence import cooccurrences, long_run, pair_counts, squared_error, stationary
from tests.helpers import random_symbols


def random_rows(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.dirichlet(np.ones(shape[-1]), shape[:-1]))


@pytest.mark.parametrize("weighted", [False, True])
def test_pairs_are_counted_inside_sequences_only(rng, weighted):
    sequences = random_symbols(rng, num_symbols=4)
    weights = torch.from_numpy(rng.random(len(sequences))) if weighted else None
    sequences = Sequences(sequences.values, sequences.offsets, weights)
    expected = np.zeros((4, 4))
    for n in range(len(sequences)):
        for first, second in itertools.pairwise(
            sequences.values[sequences.offsets[n] : sequences.offsets[n + 1]].tolist()
        ):
            if first >= 0 and second >= 0:
                expected[first, second] += 1 if weights is None else float(weights[n])
    counts = pair_counts(sequences, 4)
    np.testing.assert_allclose(counts, expected, rtol=1e-12)
    halves = pair_counts(sequences[9:], 4, pair_counts(sequences[:9], 4))
    torch.testing.assert_close(halves, counts)


@pytest.mark.parametrize("data", [[[0]], [[], [1], []], [[0, -1, 1]]])
def test_data_without_a_pair_have_none(data):
    assert pair_counts(Sequences.from_list([np.array(row, dtype=np.int64) for row in data]), 2).sum() == 0


def test_the_stationary_distribution_is_that_of_many_steps(rng):
    transition = random_rows(rng, 3, 6, 6)
    powers = torch.linalg.matrix_power(transition, 200)
    torch.testing.assert_close(stationary(transition), powers[:, 0])
    torch.testing.assert_close(long_run(transition[1, 2], transition[1]), powers[1, 0])


def test_the_long_run_of_a_chain_in_two_parts_depends_on_its_start():
    transition = torch.block_diag(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(1, 1)).double()
    torch.testing.assert_close(
        long_run(torch.tensor([0.6, 0.0, 0.4]).double(), transition), torch.tensor([0.3, 0.3, 0.4]).double()
    )


def test_cooccurrences_are_those_of_a_long_sample(rng):
    transition, emission = random_rows(rng, 3, 3), random_rows(rng, 3, 4)
    expected, shares = np.zeros((4, 4)), stationary(transition).numpy()
    for k in range(3):
        for j in range(3):
            expected += shares[k] * transition[k, j].item() * np.outer(emission[k], emission[j])
    np.testing.assert_allclose(cooccurrences(transition, emission), expected)
    assert expected.sum() == pytest.approx(1)


@pytest.mark.parametrize("block", [1 << 21, 12])  # the residual at once, and two rows at a time
def test_the_error_and_its_gradient(rng, monkeypatch, block):
    monkeypatch.setattr(cooccurrence, "_BLOCK", block)
    scores = [torch.from_numpy(rng.normal(size=shape)).requires_grad_() for shape in ((2, 4, 4), (2, 4, 6))]
    target = torch.from_numpy(rng.dirichlet(np.ones(36)).reshape(6, 6))

    def error(*scores: torch.Tensor) -> torch.Tensor:
        return squared_error(scores[0].softmax(-1), scores[1].softmax(-1), target)

    plain = (cooccurrences(*(value.softmax(-1) for value in scores)) - target).square().sum((-2, -1))
    torch.testing.assert_close(error(*scores), plain)
    assert gradcheck(error, scores)
    assert gradcheck(lambda value: stationary(value.softmax(-1)), scores[:1])


def test_a_constant_stationary_distribution_gives_another_gradient(rng):
    scores = torch.from_numpy(rng.normal(size=(3, 3))).requires_grad_()
    emission, target = random_rows(rng, 3, 4), random_rows(rng, 1, 16).reshape(4, 4)
    through, constant = (
        torch.autograd.grad(squared_error(scores.softmax(-1), emission, target, differentiate_stationary=flag), scores)[
            0
        ]
        for flag in (True, False)
    )
    shares = stationary(scores.softmax(-1)).detach()
    expected = torch.autograd.grad(
        (cooccurrences(scores.softmax(-1), emission, shares) - target).square().sum(), scores
    )[0]
    torch.testing.assert_close(constant, expected)
    assert (through - constant).abs().max() > 1e-3
