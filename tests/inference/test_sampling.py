"""Samples have the probabilities they should: counts within five standard deviations, 1e-6 of luck a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hmm import inference
from lightning_hmm.inference import Rows, Table
from lightning_hmm.inference.operators import Dense, MostlyConstant
from lightning_hmm.inference.sampling import draw_rows
from tests.inference import oracle


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_frequencies(counts, probabilities, draws: int) -> None:
    """Each count is binomial; what has probability zero never happens."""
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    spread = np.sqrt(draws * probabilities * np.maximum(1 - probabilities, 0))
    assert np.all(counts[probabilities == 0] == 0)
    assert np.all(np.abs(counts - draws * probabilities) <= 5 * spread + 1e-9), (counts / draws, probabilities)


OPERATORS = pytest.mark.parametrize("kept", [None, 0, 1, 2], ids=["dense", "nothing kept", "one kept", "two kept"])


@OPERATORS
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_chains(zeros, kept):
    """Where chains start, where they go, and the joint frequencies of all paths of three steps."""
    model = oracle.make("rows", 3, [], kept=kept, seed=51, zeros=zeros, low=zeros)
    draws = 20_000
    states, offsets = inference.sample(model.initial, model.operator, torch.full((draws,), 3), generator())
    assert offsets.tolist() == list(range(0, 3 * draws + 1, 3))
    counts = torch.zeros(3, 3, 3)
    counts.index_put_(tuple(states.reshape(draws, 3).T), torch.ones(draws), accumulate=True)
    initial, matrix = (np.exp(part) for part in model.chain)
    assert_frequencies(counts, initial[:, None, None] * matrix[:, :, None] * matrix[None], draws)


def test_chains_of_different_lengths():
    initial, transition = (
        oracle.log_rows(np.random.default_rng(52), 4),
        oracle.log_rows(np.random.default_rng(53), 4, 4),
    )
    states, offsets = inference.sample(initial, Dense(transition), torch.tensor([5, 0, 1, 30_000]), generator())
    assert offsets.tolist() == [0, 5, 5, 6, 30_006]
    path = states[6:]
    for state in range(4):
        following = path[1:][path[:-1] == state]
        assert_frequencies(torch.bincount(following, minlength=4), transition[state].exp(), len(following))


@OPERATORS
@pytest.mark.parametrize("kind", oracle.KINDS)
def test_posterior_paths(kind, kept):
    """Marginals and pairs of one sequence that is sampled many times, against the enumeration of all paths."""
    model = oracle.make(kind, 3, [5], kept=kept, seed=54, zeros=0.0 if kind == "quadratic" else 0.2)
    (answer,) = model.answers(oracle.enumerate_paths)
    assert answer.log_likelihood > -np.inf
    draws = 8000
    many = model.evidence.at(torch.arange(5).repeat(draws)), torch.arange(draws + 1) * 5
    states = inference.sample_posterior(*model.problem[:2], *many, generator()).reshape(draws, 5)
    for t in range(5):
        assert_frequencies(torch.bincount(states[:, t], minlength=3), answer.smoothed[t], draws)
    paths, scores = oracle._joint(*model.chain, model.rows[0])
    weights = np.exp(scores - answer.log_likelihood)
    for t in range(4):
        pairs, counts = np.zeros((3, 3)), torch.zeros(3, 3)
        np.add.at(pairs, (paths[:, t], paths[:, t + 1]), weights)
        counts.index_put_((states[:, t], states[:, t + 1]), torch.ones(draws), accumulate=True)
        assert_frequencies(counts, pairs, draws)


APART = torch.tensor([0.5, 0.5]).double().log(), Dense(torch.eye(2).double().log())


def test_posterior_paths_where_floats_end():
    """The only path lies where filtered probabilities are below the smallest float."""
    rows = torch.zeros(300, 2).double()
    rows[:100, 1], rows[100:, 0] = -10.0, -10.0
    for operator in (
        APART[1],
        MostlyConstant(torch.tensor([[0], [1]]), torch.zeros(2, 1).double(), torch.full((2,), -torch.inf).double()),
    ):
        assert (
            inference.sample_posterior(APART[0], operator, Rows(rows), torch.tensor([0, 300]), generator()).tolist()
            == [1] * 300
        )


def test_impossible_sequences_are_marked():
    certain = Table(torch.eye(2).double().log(), torch.tensor([0, 0, 0, 1, 1, 1]))
    states = inference.sample_posterior(*APART, certain, torch.tensor([0, 2, 5, 5, 6]), generator())
    assert states.tolist() == [0, 0, -1, -1, -1, 1]


def test_a_row_without_a_constant_is_never_left():
    cycle = MostlyConstant(
        torch.tensor([[1], [2], [0]]), torch.zeros(3, 1).double(), torch.tensor([-torch.inf] * 3).double()
    )
    states, _ = inference.sample(
        torch.tensor([0.0, -torch.inf, -torch.inf]).double(), cycle, torch.tensor([7]), generator()
    )
    assert states.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_rows():
    probs = torch.tensor([[0.2, 0.8, 0.0], [0.0, 0.0, 1.0]])
    chosen = torch.tensor([0, 1] * 10_000)
    drawn = draw_rows(probs, chosen, generator())
    assert_frequencies(torch.bincount(drawn[::2], minlength=3), probs[0], 10_000)
    assert set(drawn[1::2].tolist()) == {2}


def test_seeds():
    """One seed, one sample; another seed, another; and the global generator is not touched."""
    model = oracle.make("table", 3, [50, 50], seed=55)
    lengths = torch.tensor([50, 50])
    before = torch.random.get_rng_state()
    for draw in (
        lambda seed: inference.sample(model.initial, model.operator, lengths, generator(seed))[0],
        lambda seed: inference.sample_posterior(*model.problem, generator(seed)),
        lambda seed: draw_rows(model.operator.log_probs.exp(), torch.zeros(60, dtype=torch.int64), generator(seed)),
    ):
        assert torch.equal(draw(3), draw(3))
        assert not torch.equal(draw(3), draw(4))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_row_without_probability_is_named():
    nothing, even = torch.full((2,), -torch.inf, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64).log()
    with pytest.raises(ValueError, match=r"^`initial` must have some probability to draw from, but has none\.$"):
        inference.sample(nothing, Dense(torch.stack([even, even])), torch.tensor([0, 3]), generator())
    with pytest.raises(ValueError, match=r"^`transition` row 1 must have some probability"):
        inference.sample(even, Dense(torch.stack([even, nothing])), torch.tensor([1, 50]), generator())
    with pytest.raises(ValueError, match=r"^`probs` row 1 must have some probability"):
        draw_rows(torch.stack([even, nothing]).exp(), torch.tensor([0, 0, 1]), generator())
