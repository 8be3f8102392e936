"""Where float ranges end: rare events, unreachable states, far points, long sequences, large and small weights.

Each of these is a case that a scaled forward-backward pass gets wrong without saying so. The answers come from log space.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm.inference import dense
from lightning_hmm.sequences import Sequences
from tests.inference import oracle

PRECISIONS = pytest.mark.parametrize("single", [False, True], ids=["float64", "float32"])
INF = np.inf


def log(*probabilities) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(probabilities, dtype=np.float64)))


def given(initial: torch.Tensor, transition: torch.Tensor, *rows: np.ndarray) -> oracle.Model:
    """A model whose steps are given as log-likelihoods."""
    packed = np.concatenate(rows)
    sequences = Sequences.from_lengths(torch.zeros(len(packed), dtype=torch.int64), [len(row) for row in rows])
    return oracle.Model(initial, transition, dense.Steps(torch.from_numpy(packed)), sequences, list(rows))


def check(model: oracle.Model, single: bool) -> list[oracle.Answer]:
    """All of forward, backward and counts, against log space."""
    answers = model.answers()
    exact = np.array([answer.log_likelihood for answer in answers])
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if single else {"rtol": 1e-9, "atol": 1e-9}
    step = dense.e_step(*model.parameters, single=single)
    for log_likelihood in (step.log_likelihood, dense.log_likelihood(*model.parameters, single=single)):
        assert_allclose(log_likelihood, exact, rtol=1e-6 if single else 1e-10, atol=1e-5 if single else 1e-9)
    initial, transition, (smoothed,) = oracle.statistics(model, answers, np.ones(len(answers)))
    assert_allclose(step.initial, initial, **tolerance)
    assert_allclose(step.transition, transition, **tolerance)
    assert_allclose(step.emission[0], smoothed, **tolerance)
    if not single:
        posterior = dense.posterior(*model.parameters)
        assert_allclose(posterior.smoothed.values, smoothed, **tolerance)
        possible = [a.filtered for a in answers if a.log_likelihood > -INF]
        assert_allclose(posterior.filtered[exact > -INF].values, np.concatenate(possible or [np.zeros((0, len(initial)))]), **tolerance)
    return answers


# Rare transitions


@PRECISIONS
def test_rare_transitions_that_must_be_used_again_and_again(single):
    """Each step keeps more than it may lose, but the product of two is below the smallest float64."""
    model = given(log(0.5, 0.5), log([1, 1e-190], [1e-190, 1]), log([1, 0], [0, 1], [1, 0], [0, 1], [0, 1]).numpy())
    check(model, single)


@PRECISIONS
@pytest.mark.parametrize("probability", [1e-9, 1e-30, 1e-39, 1e-45, 1e-300, 1e-320])
def test_a_rare_transition_that_must_be_used(single, probability):
    """A probability below the smallest float32 is still not zero."""
    model = given(log(1, 0), log([1, probability], [0, 1]), log([1, 0], [1, 0], [0, 1], [0, 1]).numpy())
    step = dense.e_step(*model.parameters, single=single)
    assert float(step.log_likelihood) == pytest.approx(float(model.transition[0, 1]), rel=1e-8 if single else 1e-13)
    assert_allclose(step.transition, [[1, 1], [0, 1]], rtol=1e-6, atol=0)
    assert dense.viterbi(*model.parameters).states.values.tolist() == [0, 0, 1, 1]


@PRECISIONS
@pytest.mark.parametrize("favour", [1.0, 5.0, 40.0])
@pytest.mark.parametrize("log_probability", [-20, -43, -46, -60, -68.5, -90, -460, -625, -667, -690, -1000])
@pytest.mark.parametrize("both_ways", [False, True])
def test_a_rare_transition_that_pays_off_slowly(single, favour, log_probability, both_ways):
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
    (answer,) = check(given(log(0.5, 0.5, 0), rare, rows), single)
    assert answer.smoothed[-1, 2] > 0.99


# States that cannot be reached


@PRECISIONS
@pytest.mark.parametrize("favour", [10.0, 200.0, 20000.0])
def test_an_unreachable_state_that_fits_much_better(single, favour):
    rows = np.zeros((40, 3))
    rows[:, 2] = favour
    model = given(log(0.5, 0.5, 0), log([0.6, 0.4, 0], [0.3, 0.7, 0], [0.2, 0.2, 0.6]), rows)
    (answer,) = check(model, single)
    assert not answer.smoothed[:, 2].any()


@PRECISIONS
@pytest.mark.parametrize(("first", "second", "rate"), [(1, 1, 20000.0), (1, 2, 20000.0), (30, 60, 3.0), (100, 200, 1.0), (100, 150, 10.0), (9, 10, 1000.0)])
def test_two_chains_that_cannot_reach_each_other(single, first, second, rate):
    """Evidence for one chain, then more for the other: what was given up for lost comes back, at once or bit by bit."""
    rows = np.zeros((first + second, 2))
    rows[:first, 1], rows[first:, 0] = -rate, -rate
    chains = log(0.5, 0.5), log([1, 0], [0, 1])
    (answer,) = check(given(*chains, rows), single)
    assert answer.smoothed[0, 1] == pytest.approx(0.5 if first == second else 1.0)


@PRECISIONS
@pytest.mark.parametrize("rate", [1.0, 10.0, 100.0])
def test_a_left_to_right_chain_that_seemed_to_have_moved_on(single, rate):
    """State 0 looks dead for a while; only it explains the end. There is no way back to it."""
    rows = np.zeros((400, 3))
    rows[:120, 0] = -rate
    rows[120:, 1:] = -rate
    (answer,) = check(given(log(1, 0, 0), log([0.9, 0.1, 0], [0, 0.9, 0.1], [0, 0, 1]), rows), single)
    assert answer.smoothed[60, 0] > 0.99


@PRECISIONS
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
def test_random_evidence_and_random_zeros(single, scale):
    """Half of the transitions are impossible; the evidence wanders over many orders of magnitude."""
    rng = np.random.default_rng(int(scale))
    rows = [np.cumsum(rng.normal(0, scale, (40, 5)), 0) / 3 + np.where(rng.random((40, 5)) < 0.05, -INF, 0) for _ in range(40)]
    model = given(oracle.log_rows(rng, 5, zeros=0.3), oracle.log_rows(rng, 5, 5, zeros=0.5), *rows)
    answers = check(model, single)
    assert sum(answer.log_likelihood > -INF for answer in answers) > 10


@PRECISIONS
def test_random_block_diagonal_chains(single):
    """A mixture of chains: each sequence belongs to one of three, and which one is settled slowly."""
    rng = np.random.default_rng(3)
    transition = np.full((6, 6), -INF)
    for block in range(3):
        transition[2 * block : 2 * block + 2, 2 * block : 2 * block + 2] = oracle.log_rows(rng, 2, 2).numpy()
    drift = np.repeat(np.cumsum(rng.normal(0, 0.3, (20, 150, 3)), 1), 2, axis=2)
    model = given(oracle.log_rows(rng, 6), torch.from_numpy(transition), *(drift + rng.normal(0, 1, drift.shape)))
    check(model, single)


def test_what_is_given_up_does_not_spoil_the_others():
    """A sequence that goes to log space shares a tile with sequences that do not; and `em_step` does the same."""
    rows = np.zeros((300, 2))
    rows[:100, 1], rows[100:, 0] = -10.0, -10.0
    chains = log(0.5, 0.5), log([1, 0], [0, 1])
    alone = dense.e_step(*given(*chains, rows[:50]).parameters)
    both = dense.e_step(*given(*chains, rows[:50], rows, rows[:50]).parameters)
    assert_array_equal(both.log_likelihood[[0, 2]], alone.log_likelihood.repeat(2))
    assert_allclose(both.transition, 2 * alone.transition + torch.tensor([[0, 0], [0, 299.0]]), rtol=1e-12, atol=1e-12)


def test_em_step_does_not_lose_a_chain_either():
    """Symbols 0 and 1 speak for chain 0 and chain 1, by ten nats each time."""
    likely = 1 / (1 + np.exp(-10.0))
    parameters = [log(0.5, 0.5), log([1, 0], [0, 1]), log([likely, 1 - likely], [1 - likely, likely])]
    sequences = Sequences.from_list([[0] * 100 + [1] * 200, [0, 0, 1]])
    expected = dense.e_step(*parameters[:2], dense.Symbols(parameters[2]), sequences)
    assert_allclose(expected.transition, [[2, 0], [0, 299]], rtol=1e-4, atol=1e-20)
    dense.em_step(*parameters[:2], dense.Symbols(parameters[2]), sequences)
    assert_allclose(parameters[0].exp(), [0.5, 0.5], rtol=1e-4, atol=0)
    assert_allclose(parameters[2].exp()[1], [100 / 300, 200 / 300], rtol=1e-4, atol=0)


# Gaussian outliers and offsets


@PRECISIONS
@pytest.mark.parametrize("distance", [40.0, 300.0, 3000.0, 30000.0])
def test_points_many_standard_deviations_away(single, distance):
    """The point is far from every state, and much nearer to one of them than to the other."""
    means, variances = np.array([[0.0], [1.0]]), np.ones((2, 1))
    values = np.array([[0.1], [-0.2], [distance], [0.3], [-distance], [0.8]])
    rows = oracle.gaussian_rows(means, variances, values)
    for chain in ([0.9, 0.1], [0.2, 0.8]), ([1, 0], [0, 1]):
        initial, transition = log(0.5, 0.5), log(*chain)
        emission = oracle.natural(means, variances, np.zeros(1))
        model = oracle.Model(initial, transition, emission, Sequences.from_list([values, values[:2]]), [rows, rows[:2]])
        step = dense.e_step(*model.parameters, single=single)
        answers = model.answers()
        assert_allclose(step.log_likelihood, [answer.log_likelihood for answer in answers], rtol=1e-6 if single else 1e-10, atol=0)
        expected = oracle.statistics(model, answers, np.ones(2))
        rounding = 1e-15 * distance**2  # of a log-density in float64, which posteriors cannot be better than
        tolerance = {"rtol": max(rounding, 1e-4 if single else 1e-10), "atol": 1e-5 if single else 1e-12}
        assert_allclose(step.transition, expected[1], **tolerance)
        for ours, theirs, power in zip(step.emission, expected[2], (1, 2, 0), strict=True):
            assert_allclose(ours / distance**power, theirs / distance**power, **tolerance)


@PRECISIONS
def test_data_far_from_zero(single):
    """An offset of 1e6 costs nothing when the centre takes it off: the same statistics as without the offset."""
    rng = np.random.default_rng(0)
    means, variances, values = rng.normal(size=(3, 2)), rng.gamma(2, size=(3, 2)), rng.normal(size=(50, 2))
    chain = oracle.log_rows(rng, 3), oracle.log_rows(rng, 3, 3)
    values = (values + 1e6) - 1e6  # as far as float64 holds them at 1e6
    near = dense.e_step(*chain, oracle.natural(means, variances, np.zeros(2)), Sequences.from_list([values]), single=single)
    moved = oracle.natural(means, variances, np.zeros(2))._replace(centre=torch.full((2,), 1e6, dtype=torch.float64))
    far = dense.e_step(*chain, moved, Sequences.from_list([values + 1e6]), single=single)
    assert_allclose(far.log_likelihood, near.log_likelihood, rtol=1e-13, atol=0)
    for ours, theirs in zip(far.emission, near.emission, strict=True):
        assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


# Length


def test_a_million_steps_in_float32():
    """Errors do not pile up: 1e-6 of the log-likelihood, and every transition counted."""
    rng = np.random.default_rng(0)
    initial, transition, log_probs = oracle.log_rows(rng, 3), oracle.log_rows(rng, 3, 3), oracle.log_rows(rng, 3, 4)
    steps = 1_000_000
    sequences = Sequences.from_list([rng.integers(0, 4, steps)])
    exact = dense.e_step(initial, transition, dense.Symbols(log_probs), sequences)
    rough = dense.e_step(initial, transition, dense.Symbols(log_probs), sequences, single=True)
    assert abs(float(rough.log_likelihood - exact.log_likelihood)) < 1e-6 * abs(float(exact.log_likelihood))
    assert float(dense.log_likelihood(initial, transition, dense.Symbols(log_probs), sequences, single=True)) == float(rough.log_likelihood)
    for step, tolerance in ((exact, 1e-11), (rough, 1e-6)):
        assert float(step.transition.sum()) == pytest.approx(steps - 1, rel=tolerance)
        assert float(step.emission[0].sum()) == pytest.approx(steps, rel=tolerance)
        assert float(step.initial.sum()) == pytest.approx(1, rel=tolerance)
    assert_allclose(rough.transition, exact.transition, rtol=1e-5, atol=0)
    assert_allclose(rough.emission[0], exact.emission[0], rtol=1e-5, atol=0)
    # Another route: the likelihood is the sum of what each half says, the second started from where the first ended.
    half = steps // 2
    first, second = Sequences.from_list([sequences.values[:half]]), Sequences.from_list([sequences.values[half:]])
    carried = dense.predict_next(initial, transition, dense.Symbols(log_probs), first)[0].log()
    parts = dense.log_likelihood(initial, transition, dense.Symbols(log_probs), first) + dense.log_likelihood(
        carried, transition, dense.Symbols(log_probs), second
    )
    assert float(parts) == pytest.approx(float(exact.log_likelihood), rel=1e-10)


# Impossible evidence


@PRECISIONS
@pytest.mark.parametrize("step", [0, 1, 4])
def test_impossible_evidence_is_located_and_adds_nothing(single, step):
    """-inf, the first step of probability zero, no NaN anywhere; the others in the batch are as if it were not there."""
    rng = np.random.default_rng(5)
    possible = [rng.normal(size=(length, 3)) for length in (5, 1, 0, 7)]
    bad = rng.normal(size=(5, 3))
    bad[step] = -INF
    chain = oracle.log_rows(rng, 3), oracle.log_rows(rng, 3, 3)
    alone, mixed = given(*chain, *possible), given(*chain, *possible[:2], bad, *possible[2:])
    without, with_it = dense.e_step(*alone.parameters, single=single), dense.e_step(*mixed.parameters, single=single)
    assert with_it.log_likelihood[2] == -INF
    assert with_it.impossible_step.tolist() == [-1, -1, step, -1, -1]
    others = [0, 1, 3, 4]
    same = {"rtol": 1e-6 if single else 1e-12, "atol": 1e-6 if single else 0}
    assert_allclose(with_it.log_likelihood[others], without.log_likelihood, **same)
    assert_allclose(with_it.initial, without.initial, **same)
    assert_allclose(with_it.transition, without.transition, **same)
    rows = mixed.sequences.with_values(with_it.emission[0])
    assert not rows[2].any()
    assert_allclose(rows[others].values, without.emission[0], **same)
    if not single:
        posterior = dense.posterior(*mixed.parameters)
        assert not posterior.smoothed[2].any()
        assert not posterior.filtered[2].any()
        assert_allclose(posterior.filtered[others].values, dense.posterior(*alone.parameters).filtered.values, **same)
        path = dense.viterbi(*mixed.parameters)
        assert path.states[2].tolist() == [-1] * 5
        assert path.log_probability[2] == -INF
        assert dense.predict_next(*mixed.parameters)[2].isnan().all()
        assert bool(dense.predict_next(*mixed.parameters)[others].isfinite().all())
    assert "step " + str(step) in dense.impossible_message(mixed.sequences, 2, step)


def test_impossible_for_want_of_a_transition():
    """Each step is possible, what joins them is not; the step that cannot follow is named."""
    deterministic = dense.Symbols(log([1, 0], [0, 1]))
    step = dense.e_step(log(0.5, 0.5), log([1, 0], [0.5, 0.5]), deterministic, Sequences.from_list([[1, 1, 0, 0, 1, 0], [1, 0, 0]]))
    assert step.impossible_step.tolist() == [4, -1]
    assert_allclose(step.transition, [[1, 0], [1, 0]], rtol=1e-12, atol=0)


@pytest.mark.parametrize("length", [2, 3000])
def test_em_step_leaves_the_parameters_when_a_sequence_is_impossible(length):
    """In both of its ways; and a sequence in need of log space beside it is still scored."""
    log_probs = log([1 - 1e-250, 1e-250, 0], [1e-250, 1 - 1e-250, 0])
    parameters = [log(1, 0), log([0.5, 0.5], [0, 1]), log_probs]
    states = torch.tensor([0] * length)
    rare = Sequences.from_list([[0, 2, 0], [1, 1], states.tolist() * 100])
    before = [tensor.clone() for tensor in parameters]
    log_likelihood = dense.em_step(*parameters[:2], dense.Symbols(parameters[2]), rare)
    assert log_likelihood[0] == -INF
    assert_allclose(log_likelihood[1:], dense.log_likelihood(*before[:2], dense.Symbols(before[2]), rare)[1:], rtol=1e-12, atol=0)
    assert all(torch.equal(left, right) for left, right in zip(before, parameters, strict=True))
    dense.em_step(*parameters[:2], dense.Symbols(parameters[2]), Sequences(rare.values, rare.offsets, torch.tensor([0.0, 1.0, 1.0])))
    assert not torch.equal(before[1], parameters[1])
    assert not any(bool(tensor.isnan().any()) for tensor in parameters)


# Weights


@PRECISIONS
@pytest.mark.parametrize("weight", [1e-300, 1e-50, 1e-30, 1e30, 1e50, 1e200])
def test_weights_of_any_size(single, weight):
    """Statistics are the weight times those of weight one, whatever its size; float32 holds neither 1e-50 nor 1e50."""
    for kind in oracle.KINDS:
        model = oracle.make(kind, 3, [4, 2, 0, 1], seed=31)
        one = dense.e_step(*model.parameters, single=single)
        many = dense.e_step(*model.with_weights(np.full(4, weight)).parameters, single=single)
        assert_array_equal(many.log_likelihood, one.log_likelihood)
        tolerance = {"rtol": 1e-5 if single else 1e-12, "atol": 1e-7 if single else 1e-14}
        assert_allclose(many.initial / weight, one.initial, **tolerance)
        assert_allclose(many.transition / weight, one.transition, **tolerance)
        for ours, theirs in zip(many.emission, one.emission, strict=True):
            assert_allclose(ours / weight, theirs, **tolerance)


@PRECISIONS
def test_a_huge_weight_on_a_rare_transition(single):
    """The message back is as large as the transition is rare; times the weight it must still be a number."""
    rare = given(log(1, 0), log([1, 1e-29], [0, 1]), log([1, 0], [0, 1]).numpy()).with_weights([1e12])
    assert_allclose(dense.e_step(*rare.parameters, single=single).transition, [[0, 1e12], [0, 0]], rtol=1e-6, atol=0)


@PRECISIONS
def test_small_weights_beside_large_ones(single):
    model = oracle.make("symbols", 3, [5, 5], seed=32)
    answers = model.answers()
    for weights in ([1e-20, 1.0], [1.0, 1e9], [0.0, 1e-40]):
        step = dense.e_step(*model.with_weights(weights).parameters, single=single)
        expected = oracle.statistics(model, answers, np.array(weights))[1]
        assert_allclose(step.transition, expected, rtol=1e-5 if single else 1e-12, atol=1e-6 * max(weights) if single else 0)


@pytest.mark.parametrize("spoilt", ["initial", "transition", "emission"])
@pytest.mark.parametrize("question", [dense.log_likelihood, dense.e_step, dense.posterior, dense.viterbi], ids=lambda question: question.__name__)
def test_nan_is_refused(spoilt, question):
    """Flushing compares, and a comparison with NaN is false: it would count as zero."""
    parameters = {"initial": log(0.5, 0.5), "transition": log([0.5, 0.5], [0.5, 0.5]), "emission": log([0.5, 0.5], [0.5, 0.5])}
    parameters[spoilt][..., 1] = torch.nan
    with pytest.raises(ValueError, match=rf"^`{spoilt}` must hold numbers, but the entry at \((0, )?1,?\) is nan instead"):
        question(parameters["initial"], parameters["transition"], dense.Symbols(parameters["emission"]), Sequences.from_list([[0, 1]]))
