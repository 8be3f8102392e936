"""Continuous time against scipy's matrix exponential, finite differences and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import expm

import lightning_hmm
from lightning_hmm import HMM, ContinuousTime, Sequences, fit
from lightning_hmm.distributions.transitions.generator_exponential import generator_exponential

RATES = np.array([[-1.3, 1.0, 0.3], [0.2, -0.7, 0.5], [0.0, 0.001, -0.001]])
START = np.array([0.5, 0.3, 0.2])
EMISSION = np.array([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.05, 0.05, 0.9]])
# Two living states, of which the observation may be wrong, and death.
DISEASE = [[0.0, 0.5, 0.1], [0.2, 0.0, 0.3], [0.0, 0.0, 0.0]]
DIAGNOSIS = [[0.9, 0.1, 0.0], [0.1, 0.9, 0.0], [0.0, 0.0, 1.0]]


def model(**options: Any) -> HMM:
    return HMM(3, transition=ContinuousTime(**options), num_symbols=3)


def disease(**options: Any) -> HMM:
    return model(**options).set_parameters([1, 0, 0], DISEASE, DIAGNOSIS)


@pytest.fixture
def sequences() -> Sequences:
    return Sequences.from_list(
        [[0, 1, 2, -1, 1], [2], [0, 0, 1]], times=[[0.0, 0.5, 0.5, 2.0, 3.3], [1.0], [0.0, 1.0, 10.0]]
    )


def log_likelihoods(rates: np.ndarray, sequences: Sequences) -> list[float]:
    found = []
    for n in range(len(sequences)):
        times = sequences.times[sequences.offsets[n] : sequences.offsets[n + 1]].tolist()
        message = START
        for t, symbol in enumerate(sequences[n].tolist()):
            message = message @ expm(rates * (times[t] - times[t - 1])) if t else message
            message = message * EMISSION[:, symbol] if symbol >= 0 else message
        found.append(math.log(message.sum()))
    return found


def test_the_matrix_exponential_is_that_of_scipy():
    times = torch.tensor([0.0, 1e-3, 0.5, 3.0, 1e3, 1e9, 1e14], dtype=torch.float64)
    probs = generator_exponential(torch.from_numpy(RATES), times)
    for time, found in zip(times[:5].tolist(), probs, strict=False):
        np.testing.assert_allclose(found, expm(RATES * time), rtol=1e-10, atol=1e-16)
    assert torch.equal(probs[0], torch.eye(3).double())
    torch.testing.assert_close(probs.sum(2), torch.ones(7, 3).double(), rtol=1e-14, atol=0)
    torch.testing.assert_close(probs[6], probs[6, :1].expand(3, 3), rtol=1e-9, atol=0)  # the stationary distribution
    chain = torch.diag(torch.full((9,), 1e-5, dtype=torch.float64), 1)
    tiny = generator_exponential(chain - torch.diag(chain.sum(1)), torch.ones(1, dtype=torch.float64))[0]
    assert float(tiny[0, 9]) == pytest.approx(1e-45 / math.factorial(9), rel=1e-4)  # relative precision


def test_two_states_have_a_closed_form():
    a, b, gap = 0.7, 0.2, 1.9
    found = generator_exponential(torch.from_numpy(np.array([[-a, a], [b, -b]])), torch.from_numpy(np.array([gap])))[0]
    assert float(found[0, 1]) == pytest.approx(a / (a + b) * (1 - math.exp(-(a + b) * gap)), rel=1e-12)


def test_the_likelihood_is_that_of_scipy(sequences):
    mine = model().set_parameters(START, RATES, EMISSION)
    assert mine.score(sequences).tolist() == pytest.approx(log_likelihoods(RATES, sequences), abs=1e-12)


def test_expected_jumps_and_times_are_derivatives_of_the_likelihood(sequences):
    mine = model().set_parameters(START, RATES, EMISSION)
    _, (_, jumps, exits, *_) = mine._expected_counts(sequences, 0)
    step = 1e-6
    for i, j in np.ndindex(3, 3):
        if RATES[i, j] == 0:
            assert float(jumps[i, j]) == 0
            continue
        scores = []
        for sign in (1, -1):
            rates = RATES.copy()
            rates[i, j] = rates[i, j] - sign * step if i == j else rates[i, j] * math.exp(sign * step)
            scores.append(sum(log_likelihoods(rates, sequences)))
        found = exits[i] if i == j else jumps[i, j]
        assert float(found) == pytest.approx((scores[0] - scores[1]) / (2 * step), abs=1e-7)
    assert float(-exits.sum()) == pytest.approx(3.3 + 10)  # the total time


def test_em_recovers_rates_and_ends_at_a_maximum(rng):
    times = [np.cumsum(rng.exponential(1.0, 15)) for _ in range(400)]
    sequences = disease().sample(times=times, seed=1)
    assert sequences.times.tolist() == pytest.approx(np.concatenate(times).tolist())
    mine = model(allowed=[[0, 1, 1], [1, 0, 1], [0, 0, 0]])
    mine.set_parameters([1, 0, 0], emission=DIAGNOSIS)
    mine.frozen = ("initial", "emission")
    fit(mine, sequences, 300, 0)
    torch.testing.assert_close(mine.transition.rates, disease().transition.rates, rtol=0.2, atol=0.06)
    _, (_, jumps, exits, *_) = mine._expected_counts(sequences, 0)
    gradient = jumps + exits[:, None] * mine.transition.rates.clamp(min=0)  # with respect to log q_ij
    assert float(gradient.abs().max()) < 1e-3
    assert mine.num_free_parameters == 4
    assert torch.equal(mine.transition.rates[2], torch.zeros(3).double())


def test_the_prior_adds_jumps_and_times(sequences):
    mine = model(pseudocount=2.0, pseudotime=5.0).set_parameters(START, RATES, EMISSION)
    _, (_, jumps, exits, *_) = mine._expected_counts(sequences, 0)
    mine.transition.maximize([jumps[None], exits[None]])
    expected = (jumps + 2) / (5 - exits)[:, None]
    torch.testing.assert_close(mine.transition.rates[0, 1:], expected[0, 1:])
    assert float(mine.transition.rates[2, 0]) == 0
    torch.testing.assert_close(mine.transition.rates.sum(1), torch.zeros(3).double(), rtol=0, atol=1e-12)


def test_exact_entry_times_contribute_a_density():
    mine = disease(exact=[2])
    rates = disease().transition.rates.numpy()
    before = np.array([0.9, 0.0, 0.0]) @ expm(rates) * [0.1, 0.9, 0.0] @ expm(rates * 1.5)
    expected = math.log(before[0] * 0.1 + before[1] * 0.3)
    for options in ({}, {"labels": [[-1, -1, 2]]}):
        found = Sequences.from_list([[0, 1, 2]], times=[[0.0, 1.0, 2.5]], **options)
        assert float(mine.score(found)) == pytest.approx(expected, abs=1e-12)
        assert mine.decode(found).tolist() == [[0, 1, 2]]
    censored = Sequences.from_list([[0, 1, -1]], times=[[0.0, 1.0, 2.5]])  # dead or alive
    assert float(mine.score(censored)) == pytest.approx(math.log(before.sum()), abs=1e-12)
    assert mine.sample(times=[[0.0, 100.0, 1000.0]])[0][-1] == 2


def test_em_with_exact_entry_times_ends_at_the_closed_form(rng):
    """One living state that is observed until death: the rate is the number of deaths per time."""
    times = [[0.0, float(time)] for time in rng.exponential(2.0, 50)]
    mine = HMM(2, transition=ContinuousTime(exact=[1]), num_symbols=2)
    mine.set_parameters([1, 0], emission=[[1, 0], [0, 1]])
    fit(mine, Sequences.from_list([[0, 1]] * 50, times=times), 20, 0)
    assert float(mine.transition.rates[0, 1]) == pytest.approx(50 / sum(time for _, time in times), rel=1e-9)


def test_large_gaps_and_a_single_step_give_no_nan():
    mine = model(pseudocount=0.1, pseudotime=0.1)
    sequences = Sequences.from_list([[0, 1, 2, 0], [1]], times=[[0.0, 1e-12, 1e12, 1e12], [5.0]])
    fit(mine, sequences, 5, 0)
    assert bool(mine.transition.rates.isfinite().all())
    assert bool(mine.predict_next(sequences).isfinite().all())
    assert bool(mine.score(sequences).isfinite().all())


def test_a_model_saves_and_loads(tmp_path, sequences):
    mine = fit(
        model(pseudocount=0.1, pseudotime=0.1), sequences, 3, enable_checkpointing=True, default_root_dir=tmp_path
    )
    loaded = lightning_hmm.load(mine.trainer.checkpoint_callback.best_model_path)
    assert torch.equal(loaded.transition.rates, mine.transition.rates)
    assert torch.equal(loaded.score(sequences), mine.score(sequences))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: disease().score([[0, 1]]), "depend on the times of the steps, but the sequences have none"),
        (lambda: fit(model(), [[0, 1, 1]]), "depend on the times of the steps, but the sequences have none"),
        (lambda: disease().sample(2), r"`model\.sample\(times=\[\[0\.0, 1\.5, 2\.0\]\]\)`"),
        (lambda: disease().transition_probs, r"`transition\.rates` holds the rates"),
        (lambda: disease(exact=[3]), "`exact` must hold states from 0 to 2, but holds 3"),
        (lambda: model(exact=[2]).set_parameters(transition=RATES), "`rates` from a state of `exact` must be zero"),
        (lambda: model().set_parameters(transition=-RATES), r"must not be negative off the diagonal.*\(0, 1\) is -1"),
        (lambda: model().set_parameters(transition=RATES + np.eye(3)), r"`rates` must have a diagonal of zeros"),
        (lambda: model().set_parameters(transition=[[0.0]]), r"`rates` must have shape \(3, 3\)"),
        (lambda: model(allowed=[[0, 1]]), "`allowed` must hold zeros and ones of shape"),
        (lambda: ContinuousTime(pseudotime=-1.0), "`pseudotime` must not be negative"),
        (
            lambda: Sequences.from_list([[0, 1]], times=[[1.0, 0.5]]),
            "`times` must not decrease within a sequence, but position 1 of sequence 0 has",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, AttributeError), match=message):
        call()
