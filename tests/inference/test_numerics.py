"""Where float ranges end: rare events, unreachable states, far points, long sequences, large and small weights.

A scaled forward-backward pass silently returns a wrong result in each of these cases. The expected values are computed
in log space.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm import inference
from lightning_hmm.inference import Rows, Table
from lightning_hmm.inference.operators import Dense
from lightning_hmm.inference.results import impossible_message
from lightning_hmm.sequences import Sequences
from tests.inference import oracle

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
pytestmark = pytest.mark.usefixtures("backend")
INF = np.inf


def log(*probabilities) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(probabilities, dtype=np.float64)))


def given(initial: torch.Tensor, transition: torch.Tensor, *rows: np.ndarray) -> oracle.Model:
    """A model whose steps are given as log-likelihoods."""
    packed = np.concatenate(rows)
    sequences = Sequences.from_lengths(torch.zeros(len(packed), dtype=torch.int64), [len(row) for row in rows])
    return oracle.Model(initial, Dense(transition), Rows(torch.from_numpy(packed)), sequences, list(rows))


def check(model: oracle.Model, dtype: torch.dtype) -> list[oracle.Answer]:
    """All of forward, backward and counts, against log space."""
    answers, single = model.answers(), dtype == torch.float32
    exact = oracle.gathered(answers, "log_likelihood")
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if single else {"rtol": 1e-9, "atol": 1e-9}
    step = inference.e_step(*model.problem, dtype=dtype)
    for log_likelihood in (step.log_likelihood, inference.log_likelihood(*model.problem, dtype=dtype)):
        assert_allclose(log_likelihood, exact, rtol=1e-6 if single else 1e-10, atol=1e-5 if single else 1e-9)
    oracle.check_statistics(step, model, answers, np.ones(len(answers)), **tolerance)
    if not single:
        posterior = inference.posterior(*model.problem)
        assert_allclose(posterior.smoothed, step.evidence, **tolerance)
        assert_allclose(posterior.filtered, oracle.gathered(answers, "filtered"), **tolerance)
    return answers


# Rare transitions


@DTYPES
def test_rare_transitions_that_must_be_used_again_and_again(dtype):
    """Each step keeps more than it may lose, but the product of two is below the smallest float64."""
    model = given(log(0.5, 0.5), log([1, 1e-190], [1e-190, 1]), log([1, 0], [0, 1], [1, 0], [0, 1], [0, 1]).numpy())
    check(model, dtype)


@DTYPES
@pytest.mark.parametrize("probability", [1e-9, 1e-30, 1e-39, 1e-45, 1e-300, 1e-320])
def test_a_rare_transition_that_must_be_used(dtype, probability):
    """A probability below the smallest float32 is still not zero."""
    model = given(log(1, 0), log([1, probability], [0, 1]), log([1, 0], [1, 0], [0, 1], [0, 1]).numpy())
    step = inference.e_step(*model.problem, dtype=dtype)
    assert float(step.log_likelihood) == pytest.approx(
        float(model.operator.log_probs[0, 1]), rel=1e-8 if dtype == torch.float32 else 1e-13
    )
    assert_allclose(step.counts[0], [[1, 1], [0, 1]], rtol=1e-6, atol=0)
    assert inference.viterbi(*model.problem).states.tolist() == [0, 0, 1, 1]


@DTYPES
@pytest.mark.parametrize("favour", [1.0, 5.0, 40.0])
@pytest.mark.parametrize("log_probability", [-20, -43, -46, -60, -68.5, -90, -460, -625, -667, -690, -1000])
@pytest.mark.parametrize("both_ways", [False, True])
def test_a_rare_transition_that_pays_off_slowly(dtype, favour, log_probability, both_ways):
    """No step is a catastrophe: the rare state is better by a little each time, and wins in the end.

    From two sources; or from one of them, and with no way back, so that being there is rarer than the transition.
    """
    steps = 4 + int(2 * -log_probability / favour)
    rare = log([0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1])
    rare[0, 2] = log_probability
    if both_ways:
        rare[1, 2] = rare[2, 0] = rare[2, 1] = log_probability
    rows = np.zeros((steps, 3))
    rows[3:, :2] = -favour
    (answer,) = check(given(log(0.5, 0.5, 0), rare, rows), dtype)
    assert answer.smoothed[-1, 2] > 0.99


# States that cannot be reached


@DTYPES
@pytest.mark.parametrize("favour", [10.0, 200.0, 20000.0])
def test_an_unreachable_state_that_fits_much_better(dtype, favour):
    rows = np.zeros((40, 3))
    rows[:, 2] = favour
    model = given(log(0.5, 0.5, 0), log([0.6, 0.4, 0], [0.3, 0.7, 0], [0.2, 0.2, 0.6]), rows)
    (answer,) = check(model, dtype)
    assert not answer.smoothed[:, 2].any()


@DTYPES
@pytest.mark.parametrize(
    ("first", "second", "rate"),
    [(1, 1, 20000.0), (1, 2, 20000.0), (30, 60, 3.0), (100, 200, 1.0), (100, 150, 10.0), (9, 10, 1000.0)],
)
def test_two_chains_that_cannot_reach_each_other(dtype, first, second, rate):
    """Evidence for one chain, then more for the other: what was given up for lost comes back, at once or bit by bit."""
    rows = np.zeros((first + second, 2))
    rows[:first, 1], rows[first:, 0] = -rate, -rate
    chains = log(0.5, 0.5), log([1, 0], [0, 1])
    (answer,) = check(given(*chains, rows), dtype)
    assert answer.smoothed[0, 1] == pytest.approx(0.5 if first == second else 1.0)


@DTYPES
@pytest.mark.parametrize("rate", [1.0, 10.0, 100.0])
def test_a_left_to_right_chain_that_seemed_to_have_moved_on(dtype, rate):
    """State 0 looks dead for a while; only it explains the end. There is no way back to it."""
    rows = np.zeros((400, 3))
    rows[:120, 0] = -rate
    rows[120:, 1:] = -rate
    (answer,) = check(given(log(1, 0, 0), log([0.9, 0.1, 0], [0, 0.9, 0.1], [0, 0, 1]), rows), dtype)
    assert answer.smoothed[60, 0] > 0.99


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
def test_random_evidence_and_random_zeros(dtype, scale):
    """Half of the transitions are impossible; the evidence wanders over many orders of magnitude."""
    rng = np.random.default_rng(int(scale))
    rows = [
        np.cumsum(rng.normal(0, scale, (40, 5)), 0) / 3 + np.where(rng.random((40, 5)) < 0.05, -INF, 0)
        for _ in range(40)
    ]
    model = given(oracle.log_rows(rng, 5, zeros=0.3), oracle.log_rows(rng, 5, 5, zeros=0.5), *rows)
    answers = check(model, dtype)
    assert sum(answer.log_likelihood > -INF for answer in answers) > 10


@DTYPES
def test_random_block_diagonal_chains(dtype):
    """A mixture of chains: each sequence belongs to one of three, and which one is settled slowly."""
    rng = np.random.default_rng(3)
    transition = np.full((6, 6), -INF)
    for block in range(3):
        transition[2 * block : 2 * block + 2, 2 * block : 2 * block + 2] = oracle.log_rows(rng, 2, 2).numpy()
    drift = np.repeat(np.cumsum(rng.normal(0, 0.3, (20, 150, 3)), 1), 2, axis=2)
    model = given(oracle.log_rows(rng, 6), torch.from_numpy(transition), *(drift + rng.normal(0, 1, drift.shape)))
    check(model, dtype)


# Gaussian outliers and offsets


@DTYPES
@pytest.mark.parametrize("distance", [40.0, 300.0, 3000.0, 30000.0])
def test_points_many_standard_deviations_away(dtype, distance):
    """The point is far from every state, and much nearer to one of them than to the other."""
    means, variances = np.array([[0.0], [1.0]]), np.ones((2, 1))
    values = np.array([[0.1], [-0.2], [distance], [0.3], [-distance], [0.8]])
    rows = oracle.gaussian_rows(means, variances, values)
    for chain in ([0.9, 0.1], [0.2, 0.8]), ([1, 0], [0, 1]):
        initial, transition = log(0.5, 0.5), log(*chain)
        evidence, sequences = (
            oracle.gaussian(means, variances, np.zeros(1), np.concatenate([values, values[:2]])),
            Sequences.from_list([values, values[:2]]),
        )
        model = oracle.Model(initial, Dense(transition), evidence, sequences, [rows, rows[:2]])
        step, single = inference.e_step(*model.problem, dtype=dtype), dtype == torch.float32
        answers = model.answers()
        assert_allclose(
            step.log_likelihood, oracle.gathered(answers, "log_likelihood"), rtol=1e-6 if single else 1e-10, atol=0
        )
        _, (counts,), sums = oracle.statistics(model, answers, np.ones(2))
        rounding = 1e-15 * distance**2  # of a log-density in float64, which posteriors cannot be better than
        tolerance = {
            "rtol": max(rounding, 1e-4 if single else 1e-10),
            "atol": 1e-5 if single else max(1e-12, rounding / 100),
        }
        assert_allclose(step.counts[0], counts, **tolerance)
        scale = distance ** np.array([1, 2, 0])
        assert_allclose(step.evidence.numpy() / scale, sums / scale, **tolerance)


@DTYPES
def test_data_far_from_zero(dtype):
    """An offset of 1e6 costs nothing when the center takes it off: the same statistics as without the offset."""
    rng = np.random.default_rng(0)
    means, variances, values = rng.normal(size=(3, 2)), rng.gamma(2, size=(3, 2)), rng.normal(size=(50, 2))
    chain, offsets = (oracle.log_rows(rng, 3), Dense(oracle.log_rows(rng, 3, 3))), torch.tensor([0, 50])
    values = (values + 1e6) - 1e6  # as far as float64 holds them at 1e6
    near, moved = (
        oracle.gaussian(means, variances, np.zeros(2), values),
        oracle.gaussian(means, variances, np.full(2, 1e6), values + 1e6),
    )
    far = moved.with_live(near.weights)
    here, there = (inference.e_step(*chain, evidence, offsets, dtype=dtype) for evidence in (near, far))
    assert_allclose(there.log_likelihood, here.log_likelihood, rtol=1e-13, atol=0)
    assert_allclose(there.evidence, here.evidence, rtol=1e-12, atol=1e-12)


# Length


def test_a_million_steps_in_float32(backend):
    """Rounding errors do not accumulate: 1e-6 of the log-likelihood, and all transitions are counted.

    The reference is slow and therefore gets a tenth of the steps.
    """
    rng = np.random.default_rng(0)
    steps = 1_000_000 if backend == "cpu" else 100_000
    chain, log_probs = (oracle.log_rows(rng, 3), Dense(oracle.log_rows(rng, 3, 3))), oracle.log_rows(rng, 3, 4)
    symbols, ends = torch.from_numpy(rng.integers(0, 4, steps)), torch.tensor([0, steps])
    exact = inference.e_step(*chain, Table(log_probs, symbols), ends)
    rough = inference.e_step(*chain, Table(log_probs, symbols), ends, dtype=torch.float32)
    assert abs(float(rough.log_likelihood - exact.log_likelihood)) < 1e-6 * abs(float(exact.log_likelihood))
    scored = inference.log_likelihood(*chain, Table(log_probs, symbols), ends, dtype=torch.float32)
    assert float(scored) == pytest.approx(float(rough.log_likelihood), rel=1e-12)
    for step, tolerance in ((exact, 1e-11), (rough, 1e-6)):
        assert float(step.counts[0].sum()) == pytest.approx(steps - 1, rel=tolerance)
        assert float(step.evidence.sum()) == pytest.approx(steps, rel=tolerance)
        assert float(step.initial.sum()) == pytest.approx(1, rel=tolerance)
    assert_allclose(rough.counts[0], exact.counts[0], rtol=1e-5, atol=0)
    assert_allclose(rough.evidence, exact.evidence, rtol=1e-5, atol=0)
    # Another route: the likelihood is the sum of those of two halves, the second started from where the first ended.
    half = torch.tensor([0, steps // 2])
    first, second = Table(log_probs, symbols[: steps // 2]), Table(log_probs, symbols[steps // 2 :])
    carried = inference.predict(*chain, first, half)[0].log()
    parts = inference.log_likelihood(*chain, first, half) + inference.log_likelihood(carried, chain[1], second, half)
    assert float(parts) == pytest.approx(float(exact.log_likelihood), rel=1e-10)


# Impossible evidence


@DTYPES
@pytest.mark.parametrize("step", [0, 1, 4])
def test_impossible_evidence_is_located_and_adds_nothing(dtype, step):
    """An impossible sequence gives -inf and the first impossible step, no NaN, and does not affect the others."""
    rng = np.random.default_rng(5)
    possible = [rng.normal(size=(length, 3)) for length in (5, 1, 0, 7)]
    bad = rng.normal(size=(5, 3))
    bad[step] = -INF
    chain = oracle.log_rows(rng, 3), oracle.log_rows(rng, 3, 3)
    alone, mixed = given(*chain, *possible), given(*chain, *possible[:2], bad, *possible[2:])
    without, with_it = (inference.e_step(*model.problem, dtype=dtype) for model in (alone, mixed))
    assert with_it.log_likelihood[2] == -INF
    assert with_it.impossible_step.tolist() == [-1, -1, step, -1, -1]
    others, single = [0, 1, 3, 4], dtype == torch.float32
    same = {"rtol": 1e-6 if single else 1e-12, "atol": 1e-6 if single else 1e-15}
    assert_allclose(with_it.log_likelihood[others], without.log_likelihood, **same)
    assert_allclose(with_it.initial, without.initial, **same)
    assert_allclose(with_it.counts[0], without.counts[0], **same)
    rows = mixed.sequences.with_values(with_it.evidence)
    assert not rows[2].any()
    assert_allclose(rows[others].values, without.evidence, **same)
    if not single:
        posterior = inference.posterior(*mixed.problem)
        smoothed, filtered = (
            mixed.sequences.with_values(values) for values in (posterior.smoothed, posterior.filtered)
        )
        assert not smoothed[2].any()
        assert not filtered[2].any()
        assert_allclose(filtered[others].values, inference.posterior(*alone.problem).filtered, **same)
        path = inference.viterbi(*mixed.problem)
        assert mixed.sequences.with_values(path.states)[2].tolist() == [-1] * 5
        assert path.log_probability[2] == -INF
        assert inference.predict(*mixed.problem)[2].isnan().all()
        assert bool(inference.predict(*mixed.problem)[others].isfinite().all())
    assert "step " + str(step) in impossible_message(mixed.sequences, 2, step)


def test_impossible_for_want_of_a_transition():
    """Each step is possible, what joins them is not; the step that cannot follow is named."""
    evidence = Table(log([1, 0], [0, 1]), torch.tensor([1, 1, 0, 0, 1, 0, 1, 0, 0]))
    step = inference.e_step(log(0.5, 0.5), Dense(log([1, 0], [0.5, 0.5])), evidence, torch.tensor([0, 6, 9]))
    assert step.impossible_step.tolist() == [4, -1]
    assert_allclose(step.counts[0], [[1, 0], [1, 0]], rtol=1e-12, atol=0)


# Weights


@DTYPES
@pytest.mark.parametrize("weight", [1e-300, 1e-50, 1e-30, 1e30, 1e50, 1e200])
def test_weights_of_any_size(dtype, weight):
    """Statistics are the weight times those of weight one, whatever its size; float32 holds neither 1e-50 nor 1e50."""
    for kind in oracle.KINDS:
        model = oracle.make(kind, 3, [4, 2, 0, 1], seed=31)
        one = inference.e_step(*model.problem, dtype=dtype)
        many = inference.e_step(*model.with_weights(np.full(4, weight)).weighted, dtype=dtype)
        assert_array_equal(many.log_likelihood, one.log_likelihood)
        single = dtype == torch.float32
        tolerance = {"rtol": 1e-5 if single else 1e-12, "atol": 1e-7 if single else 1e-14}
        assert_allclose(many.initial / weight, one.initial, **tolerance)
        assert_allclose(many.counts[0] / weight, one.counts[0], **tolerance)
        assert_allclose(many.evidence / weight, one.evidence, **tolerance)


@DTYPES
def test_a_huge_weight_on_a_rare_transition(dtype):
    """The message back is as large as the transition is rare; times the weight it must still be a number."""
    rare = given(log(1, 0), log([1, 1e-29], [0, 1]), log([1, 0], [0, 1]).numpy()).with_weights([1e12])
    assert_allclose(inference.e_step(*rare.weighted, dtype=dtype).counts[0], [[0, 1e12], [0, 0]], rtol=1e-6, atol=0)


@DTYPES
def test_small_weights_beside_large_ones(dtype):
    model, single = oracle.make("table", 3, [5, 5], seed=32), dtype == torch.float32
    answers = model.answers()
    for weights in ([1e-20, 1.0], [1.0, 1e9], [0.0, 1e-40]):
        step = inference.e_step(*model.with_weights(weights).weighted, dtype=dtype)
        _, (expected,), _ = oracle.statistics(model, answers, np.array(weights))
        assert_allclose(
            step.counts[0], expected, rtol=1e-5 if single else 1e-12, atol=1e-6 * max(weights) if single else 0
        )


@pytest.mark.parametrize("spoiled", ["initial", "transition", "emission"])
@pytest.mark.parametrize(
    "question",
    [inference.log_likelihood, inference.posterior, inference.viterbi],
    ids=lambda question: question.__name__,
)
def test_nan_is_refused(spoiled, question, backend):
    """A comparison with NaN is false: it would count as zero."""
    if backend == "reference":
        return
    parameters = {
        "initial": log(0.5, 0.5),
        "transition": log([0.5, 0.5], [0.5, 0.5]),
        "emission": log([0.5, 0.5], [0.5, 0.5]),
    }
    parameters[spoiled][..., 1] = torch.nan
    evidence = Table(parameters["emission"], torch.tensor([0, 1]))
    with pytest.raises(
        ValueError, match=rf"^`{spoiled}` must hold numbers, but the entry at \((0, )?1,?\) is nan instead"
    ):
        question(parameters["initial"], Dense(parameters["transition"]), evidence, torch.tensor([0, 2]))
