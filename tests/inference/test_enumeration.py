"""Everything the dense HMM computes, against the sum over all K^T paths; then, for more states and sequences than that
allows, against the textbook recursion of one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm.inference import dense
from lightning_hmm.inference.kernels import cpu
from tests.inference import oracle
from tests.inference.oracle import KINDS

LENGTHS = (5, 0, 1, 2, 5, 1, 0, 5)
EXACT = {"rtol": 1e-10, "atol": 1e-14}


def small(kind: str, num_states: int, zeros: float = 0.0) -> tuple[oracle.Model, list[oracle.Answer]]:
    model = oracle.make(kind, num_states, LENGTHS, seed=7 * num_states, zeros=zeros)
    return model, model.answers(oracle.enumerate_paths)


def gathered(answers: list[oracle.Answer], field: str) -> np.ndarray:
    return np.concatenate([np.atleast_1d(getattr(answer, field)) for answer in answers])


def check_statistics(step: dense.EStep, model: oracle.Model, answers: list[oracle.Answer], weights: np.ndarray, **tolerance: float) -> None:
    initial, transition, emission = oracle.statistics(model, answers, weights)
    assert_allclose(step.initial, initial, **tolerance)
    assert_allclose(step.transition, transition, **tolerance)
    assert len(step.emission) == len(emission)
    for ours, theirs in zip(step.emission, emission, strict=True):
        assert_allclose(ours, theirs, **tolerance)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("num_states", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
class TestAgainstAllPaths:
    """K in {1, 2, 3}, T in {0, 1, 2, 5} in one ragged batch, values missing, with and without structural zeros."""

    def test_log_likelihood(self, kind, num_states, zeros):
        model, answers = small(kind, num_states, zeros)
        assert_allclose(dense.log_likelihood(*model.parameters), gathered(answers, "log_likelihood"), **EXACT)

    def test_posterior(self, kind, num_states, zeros):
        model, answers = small(kind, num_states, zeros)
        posterior = dense.posterior(*model.parameters)
        assert_allclose(posterior.log_likelihood, gathered(answers, "log_likelihood"), **EXACT)
        assert_allclose(posterior.filtered.values, gathered(answers, "filtered"), **EXACT)
        assert_allclose(posterior.smoothed.values, gathered(answers, "smoothed"), **EXACT)
        assert_allclose(posterior.transition_counts, sum(answer.pairs for answer in answers), **EXACT)

    def test_viterbi(self, kind, num_states, zeros):
        model, answers = small(kind, num_states, zeros)
        path = dense.viterbi(*model.parameters)
        assert_array_equal(path.states.values, gathered(answers, "path"))
        assert_allclose(path.log_probability, gathered(answers, "score"), **EXACT)

    def test_predict_next(self, kind, num_states, zeros):
        model, _ = small(kind, num_states, zeros)
        chain = model.initial.numpy(), model.transition.numpy()
        for steps in (1, 2, 3):
            predicted = dense.predict_next(*model.parameters, steps=steps)
            for n, rows in enumerate(model.rows):
                if oracle.enumerate_paths(*chain, rows).log_likelihood == -np.inf:
                    assert predicted[n].isnan().all()
                else:
                    assert_allclose(predicted[n], oracle.enumerate_next(*chain, rows, steps), **EXACT)

    def test_weighted_statistics(self, kind, num_states, zeros):
        model, answers = small(kind, num_states, zeros)
        weights = np.array([1.0, 5.0, 0.0, 2.5, 0.0, 1e-3, 1.0, 0.25])
        step = dense.e_step(*model.with_weights(weights).parameters)
        assert_allclose(step.log_likelihood, gathered(answers, "log_likelihood"), **EXACT)
        check_statistics(step, model, answers, weights, **EXACT)
        weighted, plain, _ = dense.weighted_log_likelihood(*model.with_weights(weights).parameters)
        assert_array_equal(plain, step.log_likelihood)
        assert_allclose(weighted, [0 if w == 0 else w * a.log_likelihood for w, a in zip(weights, answers, strict=True)], **EXACT)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_two_oracles_agree(zeros):
    for kind in KINDS:
        model, answers = small(kind, 3, zeros)
        for slow, fast in zip(answers, model.answers(oracle.log_space), strict=True):
            for left, right in zip(slow, fast, strict=True):
                assert_allclose(left, right, **EXACT)


def test_empty_batches():
    for kind in KINDS:
        model = oracle.make(kind, 3, [])
        assert dense.log_likelihood(*model.parameters).shape == (0,)
        assert dense.posterior(*model.parameters).smoothed.values.shape == (0, 3)
        assert dense.viterbi(*model.parameters).log_probability.shape == (0,)
        assert dense.predict_next(*model.parameters).shape == (0, 3)
        check_statistics(dense.e_step(*model.parameters), model, [], np.zeros(0), rtol=0, atol=0)


# (sequences, longest): one tile, a last tile in part, several lanes, one sequence a tile, tiles of eight. The work of the
# last three is large enough for the plan that spreads it over threads.
BATCHES = [(33, 9), (300, 9), (300, 25), (5, 2600), (45, 170)]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("num_states", [1, 2, 5, 7, 8, 9, 17])
def test_tiles_lanes_and_vector_tails(num_states, single):
    """No number of states is a multiple of every vector width, and no batch fills its last tile."""
    tolerance = {"rtol": 2e-4, "atol": 2e-4} if single else {"rtol": 1e-9, "atol": 1e-10}
    for index, (num_sequences, longest) in enumerate(BATCHES if num_states == 17 else BATCHES[:2]):
        rng = np.random.default_rng(index)
        kind = KINDS[(num_states + index) % 3]
        lengths = np.concatenate([[0, 1, longest], rng.integers(0, longest + 1, num_sequences - 3)])
        model = oracle.make(kind, num_states, lengths, seed=index)
        assert model.sequences.num_steps * num_states**2 > 1_000_000 or index < 2
        answers = model.answers()
        weights = rng.gamma(1, size=num_sequences)
        step = dense.e_step(*model.with_weights(weights).parameters, single=single)
        log_likelihoods = gathered(answers, "log_likelihood")
        for ours in (step.log_likelihood, dense.log_likelihood(*model.parameters, single=single)):
            assert_allclose(ours, log_likelihoods, rtol=1e-6 if single else 1e-11, atol=1e-6 if single else 1e-14)
        check_statistics(step, model, answers, weights, **tolerance)
        assert int(step.impossible_step.max()) == -1
        if not single:
            path = dense.viterbi(*model.parameters)
            assert_allclose(path.log_probability, gathered(answers, "score"), rtol=1e-11, atol=1e-13)
            for n, rows in enumerate(model.rows):  # of equally probable paths, which there are where steps are missing, any
                score = oracle.path_score(model.initial.numpy(), model.transition.numpy(), rows, path.states[n].numpy())
                assert score == pytest.approx(float(path.log_probability[n]), rel=1e-11, abs=1e-13)
            assert_allclose(dense.posterior(*model.parameters).filtered.values, gathered(answers, "filtered"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_very_long_sequences_are_worked_on_alone(single, zeros, monkeypatch):
    """They are not put into tiles with short ones, which would need as much memory as they do. Here that is more than 16 steps."""
    monkeypatch.setattr(cpu, "_TILE_BYTES", 2 * 32 * 8 * 8 * 16)
    model = oracle.make("symbols", 5, [3, 40, 0, 17, 16, 1, 200, 15, *[9] * 50], seed=8, zeros=zeros)
    assert [(len(order), tile) for order, tile in cpu.plan(model.sequences.offsets.numpy(), 5, 8)] == [(3, 1), (54, 32)]
    answers, weights = model.answers(), np.linspace(0, 2, 58)
    step = dense.e_step(*model.with_weights(weights).parameters, single=single)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if single else EXACT
    assert_allclose(step.log_likelihood, gathered(answers, "log_likelihood"), **tolerance)
    check_statistics(step, model, answers, weights, **tolerance)
    assert_allclose(dense.log_likelihood(*model.parameters, single=single), gathered(answers, "log_likelihood"), **tolerance)
    assert_allclose(dense.viterbi(*model.parameters).log_probability, gathered(answers, "score"), **EXACT)


def test_vectors_given_in_float32():
    """Half the memory, the same model: only the data are rounded."""
    model = oracle.make("gaussian", 3, [4, 0, 1, 7], seed=3)
    rounded = model._replace(sequences=model.sequences.to(torch.float32))
    again = model._replace(sequences=rounded.sequences.to(torch.float64))
    ours, theirs = dense.e_step(*rounded.parameters), dense.e_step(*again.parameters)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dense.viterbi(*rounded.parameters).log_probability, dense.viterbi(*again.parameters).log_probability)


@pytest.mark.parametrize("length", [6, 4000])
def test_em_step_is_an_e_step_and_rows_normalised(length):
    """Both of its ways: one compiled call for small work, all threads for large."""
    model = oracle.make("symbols", 9, [length, 3, 0, 1, length], seed=5).with_weights([1.0, 0.5, 1.0, 0.0, 2.0])
    expected = dense.e_step(*model.parameters)
    initial, transition, log_probs = model.initial.clone(), model.transition.clone(), model.emission.log_probs.clone()
    assert_allclose(dense.em_step(initial, transition, dense.Symbols(log_probs), model.sequences), expected.log_likelihood, **EXACT)
    for after, counts in ((initial, expected.initial), (transition, expected.transition), (log_probs, expected.emission[0])):
        assert_allclose(after.exp(), counts / counts.sum(-1, keepdim=True), **EXACT)


def test_wrong_shapes_are_named():
    model = oracle.make("symbols", 3, [4, 2], missing=0)
    with pytest.raises(ValueError, match=r"`transition` must be \(3, 3\).*\(3, 2\)"):
        dense.log_likelihood(model.initial, model.transition[:, :2], model.emission, model.sequences)
    with pytest.raises(ValueError, match="3 rows"):
        dense.log_likelihood(model.initial, model.transition, dense.Symbols(model.emission.log_probs[:2]), model.sequences)
    with pytest.raises(ValueError, match=r"\(6, 3\), steps by states"):
        dense.log_likelihood(model.initial, model.transition, dense.Steps(torch.zeros(5, 3)), model.sequences)
    with pytest.raises(ValueError, match="`steps` must be at least 1"):
        dense.predict_next(*model.parameters, steps=0)
    for bad in (torch.nan, torch.inf):
        evidence = torch.zeros(6, 3, dtype=torch.float64)
        evidence[5, 1] = bad
        with pytest.raises(ValueError, match="state 1 at position 1 of sequence 1"):
            dense.log_likelihood(model.initial, model.transition, dense.Steps(evidence), model.sequences)
