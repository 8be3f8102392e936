"""Structure of full transition matrices, left-to-right transitions, and starts that follow from the transitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize

import lightning_hmm
from lightning_hmm import HMM, Categorical, Full, LeftRight, Poisson, Stationary, fit
from lightning_hmm.optim.online import compiled_kernel_for
from tests.helpers import random_symbols
from tests.models.test_new_family import assert_em_never_decreases

K = 4


def full(seed: int = 0, **options) -> HMM:
    return HMM(K, Categorical(0.1), Full(**options), num_symbols=5, seed=seed)


def counts_of(rng) -> torch.Tensor:
    return torch.from_numpy(rng.gamma(1.0, size=(1, K, K)) * 5)


OPTIONS = [
    {"pseudocount": 0.3},
    {"pseudocount": 0.3, "stickiness": 2.0},
    {"zeros": [[0, 1], [2, 3]], "pseudocount": 0.1},
    {"fixed": [[0, 1], [0, 2], [3, 3]], "pseudocount": 0.1},
    {"tied_rows": [[0, 2], [3, 1]], "stickiness": 1.0},
    {"zeros": [[0, 1], [2, 1]], "fixed": [[0, 3], [2, 3]], "tied_rows": [[0, 2]], "pseudocount": 0.2},
]


def optimum(model: HMM, counts: np.ndarray, first: np.ndarray | None = None) -> float:
    """The largest expected log-likelihood plus log prior over the free entries, by scipy."""
    transition, options = model.transition, model.transition.options
    matrix = transition.matrix(0).numpy()
    fixed = np.zeros((K, K), bool)
    for i, j in options["fixed"] or ():
        fixed[i, j] = True
    free = (matrix > 0) & ~fixed
    group = np.arange(K)
    for rows in options["tied_rows"] or ():
        group[rows] = min(rows)
    prior = transition.prior["pseudocount"] + transition.prior.get("stickiness", 0.0) * np.eye(K)

    def value(flat: np.ndarray) -> float:
        logits = np.where(free, flat.reshape(K, K)[group], -np.inf)
        logits = logits - logits.max(1, keepdims=True)
        share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        kept = np.where(fixed, matrix, 0.0)
        probs = np.where(free, share * (1 - kept.sum(1, keepdims=True)), kept)
        used = (matrix > 0) & (counts + prior > 0)
        total = ((counts + prior)[used] * np.log(probs[used])).sum()
        if first is not None:
            start = np.linalg.solve((np.eye(K) - probs + 1).T, np.ones(K))
            total += first @ np.log(start)
        return -total

    found = optimize.minimize(value, np.zeros(K * K), method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
    return -found.fun


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stationary", [False, True])
def test_the_m_step_is_the_optimum_of_scipy(rng, options, stationary):
    model = HMM(K, Categorical(0.1), Full(**options), Stationary() if stationary else None, num_symbols=5)
    before, counts = model.transition_probs, counts_of(rng)
    first = rng.gamma(1.0, size=K) * 20 if stationary else None
    if stationary:
        model.initial.maximize([torch.from_numpy(first)[None]])
    model.transition.maximize([counts])
    probs = model.transition_probs
    torch.testing.assert_close(probs.sum(1), torch.ones(K).double(), rtol=1e-12, atol=0)
    for i, j in options.get("fixed", []):
        assert float(probs[i, j]) == float(before[i, j])
    for i, j in options.get("zeros", []):
        assert float(probs[i, j]) == 0
    for rows in options.get("tied_rows", []):
        assert torch.equal(probs[rows[0]], probs[rows[1]])
    finite = torch.where(probs > 0, probs.log(), 0.0)
    value = float((counts[0] * finite).sum() + model.transition.log_prior())
    if stationary:
        value += float(torch.from_numpy(first) @ model.initial_probs.log())
    assert value == pytest.approx(optimum(model, counts[0].numpy(), first), rel=1e-9)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("initial", ["initial", "stationary"])
def test_em_never_decreases_and_keeps_the_structure(rng, options, initial):
    sequences = random_symbols(rng)
    model = HMM(K, Categorical(0.1), Full(**options), initial, num_symbols=5, restarts=2)
    if initial == "initial":
        assert_em_never_decreases(model, sequences, 10)
        return
    objectives = []
    for _ in range(10):
        objectives.append(
            float(model.score(sequences).sum() + sum(p.log_prior()[0] for p in model.distributions.values()))
        )
        fit(model, sequences, 1, 0)
        model.best_restart.fill_(0)
    assert min(np.diff(objectives)) > -1e-9
    pi = model.initial_probs
    torch.testing.assert_close(pi @ model.transition_probs, pi, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "free"), [({}, 12), ({"stickiness": 1.0}, 12), ({"zeros": [[0, 1]]}, 11), ({"fixed": [[0, 1]]}, 11),
                          ({"tied_rows": [[0, 2, 3]]}, 6), (OPTIONS[5], 1 + 3 + 3)],
)  # fmt: skip
def test_free_parameters_are_counted(options, free):
    model = full(**options)
    assert model.transition.num_free_parameters(0) == free
    assert model.num_free_parameters == free + 3 + 16


def test_fixed_entries_keep_the_values_that_were_set(rng, tmp_path):
    start = [[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]]
    model = full(fixed=[[1, 0], [3, 0], [0, 2]]).set_parameters(transition=start)
    fit(model, random_symbols(rng), 5, 0)
    for i, j in ((1, 0), (3, 0), (0, 2), (0, 3)):
        assert float(model.transition_probs[i, j]) == pytest.approx(start[i][j], rel=1e-12)
    assert float((model.transition_probs - torch.tensor(start)).abs().max()) > 1e-3


def test_a_mask_is_the_list_of_its_pairs():
    mask = [[False, True, False, False], [False] * 4, [False] * 4, [True, False, False, False]]
    assert torch.equal(full(zeros=mask).transition_probs, full(zeros=[[0, 1], [3, 0]]).transition_probs)


@pytest.mark.parametrize("options", [{"stickiness": 1.0}, {"fixed": [[0, 0]]}, {"tied_rows": [[0, 1]]}])
def test_online_em_respects_the_structure(rng, options):
    """The compiled pass does not know these options, so the same updates run one by one."""
    sequences = random_symbols(rng)
    found = []
    for per_update in (None, 3):
        model = HMM(
            K, Categorical(0.1), Full(0.1, **options), num_symbols=5, discount=0.8, sequences_per_update=per_update
        )
        assert compiled_kernel_for(model.initial, model.transition, model.emission) is None
        found.append(fit(model, sequences, 3, 0, batch_size=3 if per_update is None else None).transition_probs)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    plain = full()
    assert compiled_kernel_for(plain.initial, plain.transition, plain.emission) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zeros": [[0, 4]]}, r"`zeros` must be a list of pairs .* but has the row \[0, 4\]"),
        ({"zeros": [[0, 0], [0, 1], [0, 2], [0, 3]]}, "`zeros` must leave an entry in each row, but row 0 has none"),
        ({"fixed": [0]}, r"`fixed` must be a list of pairs"),
        ({"tied_rows": [[0, 1], [1, 2]]}, "`tied_rows` must be lists of states from 0 to 3, each in one list at most"),
        ({"tied_rows": [0, 1]}, "`tied_rows` must be lists of states"),
        ({"tied_rows": [[0, 1]], "zeros": [[0, 1]]}, "must have the same zeros and fixed entries, but rows 0 and 1"),
        ({"stickiness": -1}, "`stickiness` must not be negative"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        full(**options)


def test_values_that_contradict_the_structure_are_refused():
    uniform = torch.full((K, K), 0.25).double()
    with pytest.raises(ValueError, match=r"`transition` must be zero where .* entry at \(0, 1\) is 0.25"):
        full(zeros=[[0, 1]]).set_parameters(transition=uniform)
    other = uniform.clone()
    other[2] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(ValueError, match=r"`transition` must have equal rows .* but rows 0 and 2 differ"):
        full(tied_rows=[[0, 2]]).set_parameters(transition=other)


# Left to right


def test_left_right_moves_forward_only(rng, tmp_path):
    model = HMM(K, Categorical(0.1), LeftRight(2, first_state=True), num_symbols=5)
    possible = torch.ones(K, K).triu() - torch.ones(K, K).triu(3)
    fit(model, random_symbols(rng), 5, 0)
    assert torch.equal(model.transition_probs > 0, possible > 0)
    assert model.initial_probs.tolist() == [1, 0, 0, 0]
    assert model.num_free_parameters == 2 + 2 + 1 + 16
    states = model.sample(3, 30)
    assert states.num_steps == 90
    paths = model.decode(states)
    assert all(bool((path.diff() >= 0).all()) for path in paths)
    free = HMM(K, Categorical(0.1), "LeftRight", num_symbols=5)
    assert float(free.initial_probs.max()) < 1
    chosen = HMM(K, Categorical(0.1), LeftRight(first_state=True), "Initial", num_symbols=5)
    assert float(chosen.initial_probs.max()) < 1
    with pytest.raises(ValueError, match="`jump` must be a whole number of at least 1, but is 0"):
        LeftRight(0)


# Stationary start


def test_the_gradient_of_a_stationary_start_is_that_of_differences(rng):
    model = HMM(3, Categorical(0.1), initial="stationary", num_symbols=5)
    sequences = random_symbols(rng)

    def value(logs: np.ndarray) -> float:
        probs = np.exp(logs.reshape(3, 3))
        model.transition.set(probs / probs.sum(1, keepdims=True))
        return float(model.score(sequences).sum())

    logs = model.transition.log_probs[0].detach().numpy().copy()
    (parameter,) = model.transition.parameters()
    initial, operator, evidence, offsets = model.problem(sequences)
    lightning_hmm.inference.log_likelihood(initial, operator, evidence, offsets).sum().backward()
    gradient = parameter.grad[0].numpy()
    gradient = gradient - np.exp(logs) * gradient.sum(1, keepdims=True)  # along rows that sum to one
    expected = optimize.approx_fprime(logs.ravel(), value, 1e-6).reshape(3, 3)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-3)


def test_a_stationary_start_is_refused_where_it_does_not_exist():
    with pytest.raises(ValueError, match="must lead from every state to every other one, but none leads from state 1"):
        HMM(3, Poisson(), LeftRight(), "stationary", num_features=1)
    model = HMM(2, Poisson(), initial="stationary", num_features=1)
    before = model.transition_probs
    with pytest.raises(ValueError, match="none leads from state 1 to state 0"):
        model.set_parameters(transition=[[0.5, 0.5], [0.0, 1.0]])
    assert torch.equal(model.transition_probs, before)
    with pytest.raises(ValueError, match="`initial` cannot be set if the start is Stationary"):
        model.set_parameters(initial=[0.5, 0.5])
    with pytest.raises(ValueError, match="`frozen` must not name initial"):
        HMM(2, Poisson(), initial="stationary", num_features=1, frozen=["initial"])
    with pytest.raises(
        ValueError, match="A Stationary start requires Full transitions, but they are EmbeddedTransition"
    ):
        HMM(2, Poisson(), lightning_hmm.EmbeddedTransition(2), "stationary", num_features=1)


def test_a_frozen_transition_keeps_its_stationary_start(rng):
    model = HMM(3, Categorical(0.1), initial="stationary", num_symbols=5, frozen=["transition"])
    before = model.initial_probs
    fit(model, random_symbols(rng), 3, 0)
    assert torch.equal(model.initial_probs, before)
