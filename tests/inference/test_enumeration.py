"""All results of inference against the sum over all K^T paths, and for larger models against the textbook recursion.

Transitions are full matrices and mostly constant ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm import inference
from lightning_hmm.inference.cpu import estep
from tests.inference import oracle
from tests.inference.oracle import KINDS, check_statistics, gathered

LENGTHS = (5, 0, 1, 2, 5, 1, 0, 5)
EXACT = {"rtol": 1e-10, "atol": 1e-14}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def small(
    kind: str, num_states: int, kept: int | None = None, zeros: float = 0.0
) -> tuple[oracle.Model, list[oracle.Answer]]:
    model = oracle.make(kind, num_states, LENGTHS, kept=kept, seed=7 * num_states, zeros=zeros, low=zeros)
    return model, model.answers(oracle.enumerate_paths)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize(("num_states", "kept"), [(1, None), (2, None), (3, None), (2, 0), (2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
class TestAgainstAllPaths:
    """K in {1, 2, 3}, T in {0, 1, 2, 5} in one ragged batch, values missing, with and without structural zeros."""

    def test_posterior(self, kind, num_states, kept, zeros):
        model, answers = small(kind, num_states, kept, zeros)
        posterior = inference.posterior(*model.problem)
        assert_allclose(posterior.log_likelihood, gathered(answers, "log_likelihood"), **EXACT)
        assert_allclose(inference.log_likelihood(*model.problem), gathered(answers, "log_likelihood"), **EXACT)
        assert_allclose(posterior.filtered, gathered(answers, "filtered"), **EXACT)
        assert_allclose(posterior.smoothed, gathered(answers, "smoothed"), **EXACT)
        for ours, theirs in zip(
            posterior.counts, oracle.counts_of(model.operator, sum(answer.pairs for answer in answers)), strict=True
        ):
            assert_allclose(ours, theirs, **EXACT)

    def test_viterbi(self, kind, num_states, kept, zeros):
        model, answers = small(kind, num_states, kept, zeros)
        path = inference.viterbi(*model.problem)
        assert_array_equal(path.states, gathered(answers, "path"))
        assert_allclose(path.log_probability, gathered(answers, "score"), **EXACT)

    def test_predict(self, kind, num_states, kept, zeros):
        model, answers = small(kind, num_states, kept, zeros)
        for steps in (1, 2, 3):
            predicted = inference.predict(*model.problem, steps=steps)
            for n, rows in enumerate(model.rows):
                if answers[n].log_likelihood == -np.inf:
                    assert predicted[n].isnan().all()
                else:
                    assert_allclose(predicted[n], oracle.enumerate_next(*model.chain, rows, steps), **EXACT)

    def test_weighted_statistics(self, kind, num_states, kept, zeros):
        model, answers = small(kind, num_states, kept, zeros)
        weights = np.array([1.0, 5.0, 0.0, 2.5, 0.0, 1e-3, 1.0, 0.25])
        model = model.with_weights(weights)
        found = inference.e_step(*model.weighted)
        assert_allclose(found.log_likelihood, gathered(answers, "log_likelihood"), **EXACT)
        check_statistics(found, model, answers, weights, **EXACT)
        expected = [
            0 if weight == 0 else weight * answer.log_likelihood
            for weight, answer in zip(weights, answers, strict=True)
        ]
        assert_allclose(inference.log_likelihood(*model.weighted), expected, **EXACT)
        for ours, theirs in zip(inference.posterior(*model.weighted).counts, found.counts, strict=True):
            assert_allclose(ours, theirs, **EXACT)


@pytest.mark.parametrize("kept", [None, 1])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_two_oracles_agree(zeros, kept):
    for kind in KINDS:
        model, answers = small(kind, 3, kept, zeros)
        for slow, fast in zip(answers, model.answers(oracle.log_space), strict=True):
            for left, right in zip(slow, fast, strict=True):
                assert_allclose(left, right, **EXACT)


@pytest.mark.usefixtures("backend")
def test_empty_batches():
    for kind in KINDS:
        for kept in (None, 1):
            model = oracle.make(kind, 3, [], kept=kept)
            assert inference.log_likelihood(*model.problem).shape == (0,)
            assert inference.posterior(*model.problem).smoothed.shape == (0, 3)
            assert inference.viterbi(*model.problem).log_probability.shape == (0,)
            assert inference.predict(*model.problem).shape == (0, 3)
            check_statistics(inference.e_step(*model.problem), model, [], np.zeros(0), rtol=0, atol=0)


# (sequences, longest): one tile, an incomplete last tile, several lanes, one sequence in a tile, tiles of eight. The
# last three are large enough for the plan that distributes them over threads.
BATCHES = [(33, 9), (300, 9), (300, 25), (5, 2600), (45, 170)]


def agree(model: oracle.Model, weights: np.ndarray, dtype: torch.dtype) -> None:
    """Everything, against the textbook recursion."""
    single = dtype == torch.float32
    tolerance = {"rtol": 2e-4, "atol": 2e-4} if single else {"rtol": 1e-9, "atol": 1e-10}
    answers, model = model.answers(), model.with_weights(weights)
    found = inference.e_step(*model.weighted, dtype=dtype)
    likelihoods = gathered(answers, "log_likelihood")
    for ours in (found.log_likelihood, inference.log_likelihood(*model.problem, dtype=dtype)):
        assert_allclose(ours, likelihoods, rtol=1e-5 if single else 1e-11, atol=1e-5 if single else 1e-13)
    check_statistics(found, model, answers, weights, **tolerance)
    assert_array_equal(found.impossible_step >= 0, likelihoods == -np.inf)
    if not single:
        path = inference.viterbi(*model.problem)
        assert_allclose(path.log_probability, gathered(answers, "score"), rtol=1e-11, atol=1e-13)
        for n, states in enumerate(
            model.sequences.with_values(path.states)
        ):  # any of equally probable paths, which missing steps cause
            if likelihoods[n] == -np.inf:
                assert set(states.tolist()) == {-1}
            else:
                score = oracle.path_score(*model.chain, model.rows[n], states.numpy())
                assert score == pytest.approx(float(path.log_probability[n]), rel=1e-11, abs=1e-13)
        assert_allclose(
            inference.posterior(*model.problem).filtered, gathered(answers, "filtered"), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("num_states", [1, 2, 5, 7, 8, 9, 17])
@DTYPES
def test_tiles_lanes_and_vector_tails(num_states, dtype):
    """No number of states is a multiple of every vector width, and no batch fills its last tile."""
    for index, (num_sequences, longest) in enumerate(BATCHES if num_states == 17 else BATCHES[:2]):
        rng = np.random.default_rng(index)
        kind = KINDS[(num_states + index) % 3]
        lengths = np.concatenate([[0, 1, longest], rng.integers(0, longest + 1, num_sequences - 3)])
        model = oracle.make(kind, num_states, lengths, seed=index)
        assert model.sequences.num_steps * num_states**2 > 1_000_000 or index < 2
        agree(model, rng.gamma(1, size=num_sequences), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("low", "zeros"), [(0.0, 0.0), (0.8, 0.0), (0.5, 0.3)])
@pytest.mark.parametrize(("num_states", "kept"), [(5, 2), (40, 3), (37, 36), (20, 0)])
@pytest.mark.parametrize("lengths", [[7, 1, 0, 4, 2, 5, 3, 9, 1, 6, 8, 2], [30]], ids=["many", "one"])
@pytest.mark.usefixtures("backend")
def test_mostly_constant_transitions(kind, low, zeros, num_states, kept, lengths):
    model = oracle.make(kind, num_states, lengths, kept=kept, seed=kept, low=low, zeros=zeros)
    agree(model, np.linspace(0.5, 2, len(lengths)), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[7, 1, 0, 4, 2, 5, 3, 9, 1, 6, 8, 2] * 3, [50]], ids=["many", "one"])
@pytest.mark.usefixtures("backend")
def test_mostly_constant_transitions_in_float32(kind, lengths):
    model = oracle.make(kind, 100, lengths, kept=7, low=0.3)
    agree(model, np.linspace(0.5, 2, len(lengths)), torch.float32)
    exact, single = (inference.log_likelihood(*model.problem, dtype=dtype) for dtype in (None, torch.float32))
    assert not torch.equal(exact, single)  # it was float32


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@DTYPES
def test_very_long_sequences_are_worked_on_alone(dtype, zeros, monkeypatch):
    """Long sequences do not share tiles with short ones, which would need as much memory. Long is above 16 here."""
    monkeypatch.setattr(estep, "TILE_BYTES", 32 * 100 * 16)
    model = oracle.make("table", 5, [3, 40, 0, 17, 16, 1, 200, 15, *[9] * 50], seed=8, zeros=zeros)
    assert [(len(order), tile) for order, tile in estep.plan(model.sequences.offsets.numpy(), None, 5, 100)] == [
        (3, 1),
        (54, 32),
    ]
    agree(model, np.linspace(0, 2, 58), dtype)


@pytest.mark.usefixtures("backend")
def test_columns_given_in_float32():
    """Half the memory, the same model: only the data are rounded."""
    model = oracle.make("quadratic", 3, [4, 0, 1, 7], seed=3)
    rounded = model._replace(evidence=model.evidence._replace(columns=model.evidence.columns.float()))
    again = model._replace(evidence=model.evidence._replace(columns=rounded.evidence.columns.double()))
    for ours, theirs in zip(inference.e_step(*rounded.problem), inference.e_step(*again.problem), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        inference.viterbi(*rounded.problem).log_probability, inference.viterbi(*again.problem).log_probability
    )


def test_wrong_steps_are_named():
    with pytest.raises(ValueError, match="`steps` must be a whole number of at least 1, but is 0"):
        inference.predict(*oracle.make("table", 3, [4, 2]).problem, steps=0)
