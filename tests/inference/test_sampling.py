"""Samples have the probabilities they should: counts within five standard deviations, 1e-6 of luck a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hmm.inference import dense
from lightning_hmm.sequences import Sequences
from tests.inference import oracle


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_frequencies(counts, probabilities, draws: int) -> None:
    """Each count is binomial; what has probability zero never happens."""
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    spread = np.sqrt(draws * probabilities * (1 - probabilities))
    assert np.all(counts[probabilities == 0] == 0)
    assert np.all(np.abs(counts - draws * probabilities) <= 5 * spread + 1e-9), (counts / draws, probabilities)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_chains(zeros):
    """Where chains start, where they go, and the joint frequencies of all paths of three steps."""
    rng = np.random.default_rng(51)
    initial, transition = oracle.log_rows(rng, 3, zeros=zeros), oracle.log_rows(rng, 3, 3, zeros=zeros)
    draws = 20_000
    states = dense.sample(initial, transition, torch.full((draws,), 3), generator()).values.reshape(draws, 3)
    counts = torch.zeros(3, 3, 3)
    counts.index_put_(tuple(states.T), torch.ones(draws), accumulate=True)
    joint = initial.exp()[:, None, None] * transition.exp()[:, :, None] * transition.exp()[None]
    assert_frequencies(counts, joint, draws)


def test_chains_of_different_lengths():
    initial, transition = oracle.log_rows(np.random.default_rng(52), 4), oracle.log_rows(np.random.default_rng(53), 4, 4)
    states = dense.sample(initial, transition, torch.tensor([5, 0, 1, 30_000]), generator())
    assert states.lengths.tolist() == [5, 0, 1, 30_000]
    path = states[3]
    for state in range(4):
        following = path[1:][path[:-1] == state]
        assert_frequencies(torch.bincount(following, minlength=4), transition[state].exp(), len(following))


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_posterior_paths(kind):
    """Marginals and pairs of one sequence drawn many times, against all paths; states of each step and pairs of each two."""
    model = oracle.make(kind, 3, [5], seed=54, zeros=0.0 if kind == "gaussian" else 0.2)
    (answer,) = model.answers(oracle.enumerate_paths)
    assert answer.log_likelihood > -np.inf
    draws = 8000
    many = Sequences.cat([model.sequences] * draws)
    emission = dense.Steps(model.emission.log_likelihoods.repeat(draws, 1)) if kind == "steps" else model.emission
    states = dense.sample_posterior(model.initial, model.transition, emission, many, generator()).values.reshape(draws, 5)
    for t in range(5):
        assert_frequencies(torch.bincount(states[:, t], minlength=3), answer.smoothed[t], draws)
    paths, scores = oracle._joint(model.initial.numpy(), model.transition.numpy(), model.rows[0])
    weights = np.exp(scores - answer.log_likelihood)
    for t in range(4):
        pairs, counts = np.zeros((3, 3)), torch.zeros(3, 3)
        np.add.at(pairs, (paths[:, t], paths[:, t + 1]), weights)
        counts.index_put_((states[:, t], states[:, t + 1]), torch.ones(draws), accumulate=True)
        assert_frequencies(counts, pairs, draws)


def test_posterior_paths_where_floats_end():
    """The only path lies where filtered probabilities are below the smallest float."""
    rows = np.zeros((300, 2))
    rows[:100, 1], rows[100:, 0] = -10.0, -10.0
    with np.errstate(divide="ignore"):
        chains = torch.tensor([0.5, 0.5]).double().log(), torch.eye(2).double().log()
    sequences = Sequences.from_list([[0] * 300])
    assert dense.sample_posterior(*chains, dense.Steps(torch.from_numpy(rows)), sequences, generator()).values.tolist() == [1] * 300


def test_impossible_sequences_are_marked():
    certain = dense.Symbols(torch.eye(2).double().log())
    chains = torch.tensor([0.5, 0.5]).double().log(), torch.eye(2).double().log()
    states = dense.sample_posterior(*chains, certain, Sequences.from_list([[0, 0], [0, 1, 1], [], [1]]), generator())
    assert states.tolist() == [[0, 0], [-1, -1, -1], [], [1]]


def test_rows():
    probs = torch.tensor([[0.2, 0.8, 0.0], [0.0, 0.0, 1.0]])
    chosen = torch.tensor([0, 1] * 10_000)
    drawn = dense.draw_rows(probs, chosen, generator())
    assert_frequencies(torch.bincount(drawn[::2], minlength=3), probs[0], 10_000)
    assert set(drawn[1::2].tolist()) == {2}


def test_seeds():
    """One seed, one sample; another seed, another; and the global generator is not touched."""
    model = oracle.make("symbols", 3, [50, 50], seed=55)
    lengths = torch.tensor([50, 50])
    before = torch.random.get_rng_state()
    for draw in (
        lambda seed: dense.sample(model.initial, model.transition, lengths, generator(seed)).values,
        lambda seed: dense.sample_posterior(*model.parameters, generator(seed)).values,
        lambda seed: dense.draw_rows(model.transition.exp(), torch.zeros(60, dtype=torch.int64), generator(seed)),
    ):
        assert torch.equal(draw(3), draw(3))
        assert not torch.equal(draw(3), draw(4))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_row_without_probability_is_named():
    nothing, even = torch.full((2,), -torch.inf, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64).log()
    with pytest.raises(ValueError, match=r"^`initial` must have some probability to draw from, but has none\.$"):
        dense.sample(nothing, torch.stack([even, even]), torch.tensor([0, 3]), generator())
    with pytest.raises(ValueError, match=r"^`transition` row 1 must have some probability"):
        dense.sample(even, torch.stack([even, nothing]), torch.tensor([1, 50]), generator())
    with pytest.raises(ValueError, match=r"^`probs` row 1 must have some probability"):
        dense.draw_rows(torch.stack([even, nothing]).exp(), torch.tensor([0, 0, 1]), generator())
