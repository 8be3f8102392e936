"""Transitions and first states that depend on inputs, against the enumeration of all paths and scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax, logsumexp, softmax

from lightning_hmm import HMM, Full, Initial, InputDriven, InputDrivenInitial, Sequences, fit

K, P = 3, 2


@pytest.fixture
def model(rng):
    model = HMM(K, transition=InputDriven(P), initial=InputDrivenInitial([1]), num_symbols=2)
    transition = {"coefficients": rng.normal(size=(K, K, P)), "intercept": rng.normal(size=(K, K))}
    initial = {"coefficients": rng.normal(size=(K, 1)), "intercept": rng.normal(size=K)}
    return model.set_parameters(initial, transition, rng.dirichlet(np.ones(2), K))


@pytest.fixture
def sequences(rng):
    inputs = [rng.normal(size=(n, P)) for n in (5, 1, 0, 4)]
    inputs[3][2] = inputs[3][1]  # these steps share a matrix
    return Sequences.from_list([rng.integers(-1, 2, len(x)) for x in inputs], inputs=inputs)


def paths_of(model, symbols, inputs):
    """The log-probability of each path jointly with the symbols."""
    start = log_softmax(model.initial.coefficients.numpy() @ inputs[0][1:] + model.initial.intercept.numpy())
    moves = log_softmax(
        model.transition.coefficients.numpy() @ inputs.T + model.transition.intercept.numpy()[..., None], 1
    )
    emission = model.emission_probs.log().numpy()
    found = {}
    for path in itertools.product(range(K), repeat=len(symbols)):
        total = start[path[0]] + sum(moves[path[t - 1], path[t], t] for t in range(1, len(path)))
        found[path] = total + sum(emission[z, y] for z, y in zip(path, symbols, strict=True) if y >= 0)
    return found


def test_inference_is_that_of_all_paths(model, sequences):
    scores, decoded, posterior = model.score(sequences), model.decode(sequences), model.posterior(sequences)
    for n, symbols in enumerate(sequences.tolist()):
        if not symbols:
            assert float(scores[n]) == 0
            continue
        first, last = sequences.offsets[n : n + 2].tolist()
        found = paths_of(model, symbols, sequences.inputs[first:last].numpy())
        assert float(scores[n]) == pytest.approx(logsumexp(list(found.values())), rel=1e-12)
        assert tuple(decoded[n].tolist()) == max(found, key=found.get)
        weights = softmax(list(found.values()))
        occupancy = [
            [sum(w for w, path in zip(weights, found, strict=True) if path[t] == k) for k in range(K)]
            for t in range(len(symbols))
        ]
        np.testing.assert_allclose(posterior.smoothed[n], occupancy, rtol=1e-10, atol=1e-14)


def test_predictions_continue_the_chain(model, sequences, rng):
    future = rng.normal(size=(4, 2, P))
    prediction = model.predict_next(sequences, 2, inputs=future)
    for n, symbols in enumerate(sequences.tolist()):
        first, last = sequences.offsets[n : n + 2].tolist()
        found = paths_of(model, [*symbols, -1, -1], np.concatenate([sequences.inputs[first:last].numpy(), future[n]]))
        weights = softmax(list(found.values()))
        states = [sum(w for w, path in zip(weights, found, strict=True) if path[-1] == k) for k in range(K)]
        np.testing.assert_allclose(prediction[n], states @ model.emission_probs.numpy(), rtol=1e-10)


def test_samples_have_the_probabilities_of_the_model(model, rng):
    inputs = rng.normal(size=(3, P))
    _, states = model.sample(inputs=[inputs] * 20_000, return_states=True)
    found = paths_of(model, [-1] * 3, inputs)
    numbers = states.values.view(-1, 3) @ torch.tensor([K * K, K, 1])
    frequencies = torch.bincount(numbers, minlength=K**3) / 20_000
    np.testing.assert_allclose(frequencies, np.exp(list(found.values())), atol=0.015)


@pytest.mark.parametrize("zeros", [False, True])
def test_the_m_step_is_the_optimum_of_scipy(rng, zeros):
    transition = InputDriven(P, coefficient_prior=0.2)
    transition.allocate(1, K)
    mask = np.ones((K, K))
    if zeros:
        mask[0, 2] = 0
        transition.set(mask / mask.sum(1, keepdims=True))
    inputs, counts = rng.normal(size=(40, P)), rng.gamma(1.0, size=(40, K, K)) * mask
    steps = Sequences(torch.zeros(40, dtype=torch.int64), torch.tensor([0, 40]), inputs=torch.from_numpy(inputs))
    index = transition._distinct_inputs(steps)[1]
    ordered = torch.zeros(40, K, K, dtype=torch.float64).index_add(0, index, torch.from_numpy(counts))
    transition.hold(0, steps, ordered)
    transition.maximize([])

    def loss(x):
        x = x.reshape(K, K, P + 1)
        scores = np.einsum("np,ijp->nij", inputs, x[..., :-1]) + x[..., -1]
        logs = log_softmax(np.where(mask > 0, scores, -1e9), 2)
        return -(counts * logs).sum() + 0.1 * (x**2).sum()

    best = optimize.minimize(loss, np.zeros(K * K * (P + 1)), method="BFGS", options={"gtol": 1e-7})
    best = best.x.reshape(K, K, P + 1)
    np.testing.assert_allclose(transition.coefficients, best[..., :-1], atol=1e-5)
    np.testing.assert_allclose(transition.intercept, best[..., -1], atol=1e-5)
    np.testing.assert_allclose(transition.coefficients.sum(1), 0, atol=1e-8)
    assert transition.num_free_parameters(0) == (int(mask.sum()) - K) * (P + 1)
    rows = transition.probs_at(torch.zeros(1, P))
    assert torch.equal(rows[0] > 0, torch.from_numpy(mask > 0))


def test_inputs_that_are_zero_make_the_plain_model(rng):
    """Likelihood and EM, with a prior that is almost flat."""
    lengths = (40, 1, 60)
    sequences = Sequences.from_list(
        [rng.integers(0, 2, n).cumsum() % 3 for n in lengths], inputs=[np.zeros((n, 1)) for n in lengths]
    )
    start = {
        "initial": [0.6, 0.4],
        "transition": [[0.8, 0.2], [0.3, 0.7]],
        "emission": [[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]],
    }
    plain = HMM(2, transition=Full(), initial=Initial(), num_symbols=3).set_parameters(**start)
    driven = HMM(2, transition=InputDriven(1, 1e-9), initial=InputDrivenInitial(1, 1e-9), num_symbols=3)
    driven.set_parameters(**start)
    for model in (plain, driven):
        fit(model, sequences, 10, 0)
    torch.testing.assert_close(driven.score(sequences), plain.score(sequences), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        driven.transition.probs_at(torch.zeros(1, 1))[0], plain.transition_probs, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(driven.initial.probs_at([[0.0]])[0], plain.initial_probs, rtol=1e-4, atol=1e-4)


def test_it_learns_what_the_inputs_do(rng):
    inputs = [rng.choice([-1.0, 1.0], (300, 1)) for _ in range(20)]
    truth = HMM(2, transition=InputDriven(1), initial=InputDrivenInitial(1), num_symbols=2)
    truth.set_parameters(
        {"coefficients": [[1.5], [-1.5]]},
        {"coefficients": [[[-1.0], [1.0]], [[0.0], [0.0]]], "intercept": [[1.0, -1.0], [-0.5, 0.5]]},
        [[0.95, 0.05], [0.1, 0.9]],
    )
    sequences = truth.sample(inputs=inputs)
    model = HMM(2, transition=InputDriven(1), initial=InputDrivenInitial(1, 0.1), num_symbols=2)
    model.set_parameters(emission=[[0.7, 0.3], [0.3, 0.7]])
    fit(model, sequences, 60, 0)
    torch.testing.assert_close(
        model.transition.probs_at([[1.0], [-1.0]]), truth.transition.probs_at([[1.0], [-1.0]]), rtol=0, atol=0.08
    )
    assert float(model.initial.coefficients[0]) > 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InputDriven(1, 0.0), "`coefficient_prior` must be positive, because the prior identifies"),
        (lambda: HMM(2, transition=InputDriven(1), num_symbols=2).score([[0, 1]]),
         "The distribution of `transition` depends on inputs, but none are given"),
        (lambda: HMM(2, initial=InputDrivenInitial(1), num_symbols=2).score([[0, 1]]),
         "The distribution of `initial` depends on inputs, but none are given"),
        (lambda: HMM(2, transition=InputDriven(1), num_symbols=2).set_parameters(transition={"rate": 1}),
         "have the parameters probs, coefficients, intercept, but 'rate' was given"),
        (lambda: HMM(2, transition=InputDriven(1), num_symbols=2).set_parameters(
            transition={"intercept": [0.0, 1.0, 2.0]}),
         r"`intercept` must have shape \(2, 2\), but has \(3,\) instead"),
        (lambda: HMM(2, transition=InputDriven(1), num_symbols=2).set_parameters(transition=[[0.5, 0.6], [0, 1]]),
         "`transition` must hold probabilities, and its rows must sum to 1"),
        (lambda: HMM(2, initial=InputDrivenInitial(1), num_symbols=2).predict_next(
            Sequences.from_list([[0]], inputs=[[[0.0]]]), inputs=[[0.0]]),
         r"`inputs` must have shape \(1, 1, M\), .* but has \(1, 1\) instead"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "message"),
    [("transition_probs", "InputDriven transitions depend on inputs"), ("initial_probs", "depends on inputs")],
)
def test_there_are_no_constant_probabilities(model, name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(model, name)
