"""Explicit durations against the enumeration of all segmentations, and the M-steps of their families."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from scipy import optimize, stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_hmm
from lightning_hmm import HMM, BaumWelch, Durations, Poisson, SemiMarkovHMM, Sequences, fit, inference
from lightning_hmm.callbacks import Figures
from lightning_hmm.distributions.durations import FAMILIES, fitted, log_probs_of
from lightning_hmm.inference import semi_markov
from lightning_hmm.inference.backends import VARIABLE
from lightning_hmm.inference.evidence import Quadratic, Rows, Table
from lightning_hmm.inference.operators import Duration

KINDS = ("categorical", "poisson", "negative_binomial", "geometric")


def segmentations(length: int, num_states: int, longest: int, last: int = -1) -> Iterator[list[tuple[int, int]]]:
    """All sequences of stays (state, observed duration) of this total length; successive states differ."""
    if length == 0:
        yield []
        return
    for state in range(num_states):
        for duration in range(1, min(longest, length) + 1) if state != last else ():
            for rest in segmentations(length - duration, num_states, longest, state):
                yield [(state, duration), *rest]


def enumerated(model: Any, symbols: list[int]) -> tuple[float, np.ndarray, list[int]]:
    """Log-likelihood, state probabilities and the best path. The last stay lasts at least as long as observed."""
    initial, jumps, durations, emission = (
        probs.numpy()
        for probs in (
            model.initial_probs,
            model.transition.jump_probs,
            model.transition.duration_probs,
            model.emission_probs,
        )
    )
    survival = durations[:, ::-1].cumsum(1)[:, ::-1]
    weights, paths = [], []
    for stays in segmentations(len(symbols), *durations.shape):
        weight = initial[stays[0][0]]
        for n, (state, duration) in enumerate(stays):
            weight *= jumps[stays[n - 1][0], state] if n else 1.0
            weight *= (survival if n == len(stays) - 1 else durations)[state, duration - 1]
        path = [state for state, duration in stays for _ in range(duration)]
        for state, symbol in zip(path, symbols, strict=True):
            weight *= emission[state, symbol] if symbol >= 0 else 1.0
        weights.append(weight)
        paths.append(path)
    total = sum(weights)
    smoothed = np.zeros((len(symbols), len(initial)))
    for weight, path in zip(weights, paths, strict=True):
        smoothed[range(len(symbols)), path] += weight / total
    return math.log(total), smoothed, paths[int(np.argmax(weights))]


def random_model(kind: Any = "categorical", longest: int = 4, seed: int = 2, **options: Any) -> HMM:
    model = HMM(3, transition=Durations(longest, kind), num_symbols=3, seed=seed, **options)
    if kind == "categorical":
        model.transition.durations.randomize(torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_inference_is_that_of_all_segmentations(kind):
    """In the first sequence stays are cut by its end; in the others there is a single one."""
    model = random_model(kind)
    for symbols in ([0, 1, 1, -1, 2, 2, 0, 1], [0], [2, 2]):
        log_likelihood, smoothed, path = enumerated(model, symbols)
        assert float(model.score([symbols])) == pytest.approx(log_likelihood, abs=1e-12)
        np.testing.assert_allclose(model.posterior([symbols]).smoothed.values, smoothed, rtol=0, atol=1e-12)
        assert model.decode([symbols])[0].tolist() == path


def test_a_shorter_sequence_marginalizes_the_next_step():
    """The right censoring of the last stay is exact."""
    model = random_model()
    longer = [model.score([[0, 1, 1, 2, symbol]]) for symbol in range(3)]
    torch.testing.assert_close(torch.cat(longer).logsumexp(0, keepdim=True), model.score([[0, 1, 1, 2]]))
    predicted = model.predict_next([[0, 1, 1, 2]])[0]
    torch.testing.assert_close(predicted, torch.cat(longer).softmax(0), rtol=1e-12, atol=0)


def test_counts_are_those_of_all_segmentations():
    model, symbols = random_model(), [0, 1, 1, 2, 0]
    _, counts = model._expected_counts(Sequences.from_list([symbols]), 0)
    step, jumps = 1e-6, model.transition.jumps.log_probs
    for parameter, found in ((jumps, counts[1]), (model.transition.durations.log_probs, counts[2])):
        for place in ((0, 1, 0), (0, 2, 1)):
            scores = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[place] += sign * step
                scores.append(float(model.score([symbols])))
                with torch.no_grad():
                    parameter[place] -= sign * step
            assert float(found[place[1:]]) == pytest.approx((scores[0] - scores[1]) / (2 * step), abs=1e-8)
    assert float(counts[2].sum()) == pytest.approx(1 + float(counts[1].sum()))  # every stay has one duration


@pytest.mark.parametrize("kind", KINDS)
def test_em_never_decreases_and_recovers_the_durations(kind):
    truth = HMM(2, transition=Durations(12, kind), num_symbols=2).set_parameters(
        [1, 0], {"jumps": [[0, 1], [1, 0]]}, [[0.95, 0.05], [0.05, 0.95]]
    )
    true_durations = stats.nbinom.pmf(np.arange(12), [[4.0], [30.0]], [[0.6], [0.9]])
    truth.transition.durations.set(true_durations / true_durations.sum(1, keepdims=True))
    sequences = truth.sample(30, 100, seed=1)
    model = HMM(2, transition=Durations(12, kind, 0.1, 0.01), num_symbols=2, restarts=2, seed=1)
    model.set_parameters(emission=[[0.8, 0.2], [0.2, 0.8]])
    optimizer, objectives = BaumWelch(model.distributions), []
    for _ in range(25):
        optimizer.zero_grad()
        totals = torch.stack([inference.log_likelihood(*model.problem(sequences, r)).sum() for r in range(2)])
        objectives.append(totals.detach() + optimizer.log_prior())
        totals.sum().neg().backward()
        optimizer.step()
    assert float(torch.stack(objectives).diff(dim=0).min()) > -1e-7
    if kind != "geometric":
        torch.testing.assert_close(model.transition.mean_durations, truth.transition.mean_durations, rtol=0.15, atol=0)
    torch.testing.assert_close(model.transition.duration_probs.sum(1), torch.ones(2).double())


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_m_step_is_the_optimum_of_scipy(kind, rng):
    family, longest = FAMILIES[kind], 20
    numbers = np.arange(longest)
    counts = torch.from_numpy(
        np.stack(
            [stats.nbinom.pmf(numbers, 3, 0.3) + rng.random(longest) * 0.02, stats.poisson.pmf(numbers, 4) + 0.001]
        )
    )
    start = family.from_mean(torch.full((2,), 5.0, dtype=torch.float64))
    found = fitted(family, start, counts)
    for n in range(2):

        def loss(parameters: np.ndarray, n: int = n) -> float:
            return -float(counts[n] @ log_probs_of(family, torch.from_numpy(parameters), longest))

        best = optimize.minimize(loss, start[n].numpy(), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-13})
        assert loss(found[n].numpy()) <= best.fun + 1e-10
    assert torch.equal(fitted(family, found, torch.zeros_like(counts)), found)  # rows without counts keep their values


@pytest.mark.parametrize("kind", FAMILIES)
def test_extreme_counts_give_finite_log_probabilities(kind):
    counts = torch.eye(6, dtype=torch.float64)[[0, 5]]
    found = FAMILIES[kind].from_mean(torch.ones(2, dtype=torch.float64))
    for _ in range(30):
        found = fitted(FAMILIES[kind], found, counts)
    assert bool(log_probs_of(FAMILIES[kind], found, 6)[0].isfinite().all())
    assert float(log_probs_of(FAMILIES[kind], found, 6)[0, 0]) > -1e-10


def test_the_families_are_those_of_scipy():
    model = SemiMarkovHMM(2, 200, "negative_binomial", num_symbols=2)
    model.set_parameters(transition={"durations": {"total_count": [2.5, 4.0], "probs": 0.3}})
    expected = stats.nbinom.pmf(np.arange(200), [[2.5], [4.0]], 0.7)
    np.testing.assert_allclose(model.transition.duration_probs, expected, rtol=1e-10)
    assert float(model.transition.duration_parameters["probs"][1]) == pytest.approx(0.3)
    model = SemiMarkovHMM(2, 200, "poisson", num_symbols=2)
    model.set_parameters(transition={"durations": {"rate": 3.0}})
    np.testing.assert_allclose(model.transition.mean_durations, 4.0, rtol=1e-12)
    np.testing.assert_allclose(
        model.transition.duration_probs[0, :50], stats.poisson.pmf(np.arange(50), 3.0), rtol=1e-9
    )


def test_geometric_durations_are_a_plain_chain():
    """Apart from the truncation, which is negligible for a large maximum."""
    model = SemiMarkovHMM(2, 150, "geometric", num_symbols=2, seed=4)
    model.set_parameters([0.3, 0.7], {"jumps": [[0, 1], [1, 0]], "durations": {"probs": [0.4, 0.25]}})
    plain = HMM(2, num_symbols=2).set_parameters([0.3, 0.7], [[0.6, 0.4], [0.25, 0.75]], model.emission_probs)
    sequences = plain.sample(5, 40)
    torch.testing.assert_close(model.score(sequences), plain.score(sequences), rtol=1e-10, atol=0)
    assert model.decode(sequences).tolist() == plain.decode(sequences).tolist()
    torch.testing.assert_close(model.predict_next(sequences, 3), plain.predict_next(sequences, 3), rtol=1e-9, atol=0)


def test_samples_have_the_durations_of_the_model():
    model = random_model(longest=3)
    _, states = model.sample(1, 20_000, seed=2, return_states=True)
    path = states.values.numpy()
    changes = np.flatnonzero(np.diff(path)) + 1
    lengths, stays = np.diff(changes), path[changes[:-1]]
    for state in range(3):
        shares = np.bincount(lengths[stays == state], minlength=4)[1:] / (stays == state).sum()
        np.testing.assert_allclose(shares, model.transition.duration_probs[state], rtol=0, atol=0.03)
    drawn = model.sample_posterior([[0, 1, 1, 2, 0, 0, 0, 1]], seed=1).values.numpy()
    assert drawn.max() <= 2


# The backend for evidence of classes


def problem(scale: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, Duration, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).log_softmax(-1)

    jumps = draw(3, 3).masked_fill(torch.eye(3, dtype=torch.bool), -torch.inf).log_softmax(-1)
    durations = draw(3, 5)
    durations[0, 2] = -torch.inf
    weights = torch.rand(6, generator=generator, dtype=torch.float64)
    weights[2] = 0
    return draw(15), Duration(jumps, durations), torch.tensor([0, 7, 7, 8, 30, 31, 60]), weights


def evidences() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    symbols, probs = torch.randint(0, 5, (60,), generator=generator), draw(3, 4).log_softmax(-1)
    zeros, labels = probs.clone(), torch.randint(-1, 3, (60,), generator=generator)
    zeros[0, :2] = -torch.inf
    labels[10:] = -1
    weights = draw(3, 3) - torch.tensor([3.0, 0.0, 0.0])
    return {
        "table": Table(probs, symbols),
        "zeros": Table(zeros, symbols),
        "labels": Table(probs, symbols, labels),
        "quadratic": Quadratic(draw(60, 1), torch.tensor([[0, 0], [0, 1], [1, 1]]), weights),
        "rows": Rows(draw(60, 3)),
        "far apart": Rows(300 * draw(60, 3)),
        "out of range": Rows(3000 * draw(60, 3)),
    }


@pytest.mark.parametrize("name", evidences())
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_the_compiled_backend_gives_the_numbers_of_the_reference(monkeypatch, name, smooth, scale):
    first, operator, offsets, weights = problem(scale)
    evidence = evidences()[name]
    assert inference.explain(operator, evidence).startswith(
        f"Duration with {type(evidence).__name__} on cpu runs on the"
    )
    assert semi_markov._obstacle(operator, evidence, torch.device("cpu")) is None
    found = inference.e_step(first, operator, evidence, offsets, weights, smooth=smooth)
    monkeypatch.setenv(VARIABLE, "reference")
    wanted = inference.e_step(first, operator, evidence, offsets, weights, smooth=smooth)
    options = {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(found.log_likelihood, wanted.log_likelihood, **options)
    assert torch.equal(found.impossible_step, wanted.impossible_step)
    if smooth:
        torch.testing.assert_close(found.initial, wanted.initial, **options)
        torch.testing.assert_close(found.evidence, wanted.evidence, **options)
        torch.testing.assert_close(found.counts, wanted.counts, **options)
    else:
        torch.testing.assert_close(found.last, wanted.last, **options)


def test_labels_of_classes_restrict_the_states_of_a_class():
    first, operator, offsets, _ = problem()
    labelled = evidences()["labels"]
    rows = Rows(labelled.rows())
    assert inference.e_step(first, operator, labelled, offsets).log_likelihood.tolist() == pytest.approx(
        inference.e_step(first, operator, rows, offsets).log_likelihood.tolist(), rel=1e-12
    )
    states = inference.viterbi(first, operator, labelled, offsets).states
    known = (labelled.labels >= 0) & (states >= 0)
    assert torch.equal(operator.classes[states[known]], labelled.labels[known])


def test_no_gradient_is_lost_in_long_sequences():
    """The posteriors of every step sum to the weight, after 100,000 steps too."""
    first, operator, _, _ = problem()
    generator = torch.Generator().manual_seed(5)
    rows = Rows(torch.randn(100_000, 3, generator=generator, dtype=torch.float64))
    found = inference.e_step(first, operator, rows, torch.tensor([0, 100_000]))
    torch.testing.assert_close(found.evidence.sum(1), torch.ones(100_000).double(), rtol=1e-12, atol=0)
    assert float(found.counts[1].sum()) == pytest.approx(float(found.counts[0].sum()), rel=1e-9)


# The model


def test_a_semi_markov_model_trains_saves_and_loads(tmp_path):
    truth = SemiMarkovHMM(2, 8, "poisson", Poisson(), num_features=1)
    truth.set_parameters(
        [1, 0], {"jumps": [[0, 1], [1, 0]], "durations": {"rate": [1.5, 4.0]}}, {"rate": [[1.0], [9.0]]}
    )
    sequences, states = truth.sample(20, 80, seed=1, return_states=True)
    sequences.values[torch.rand(len(sequences.values), generator=torch.Generator().manual_seed(1)) < 0.05] = torch.nan
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, save_last=True)]}
    model = fit(SemiMarkovHMM(2, 8, "poisson", Poisson(), restarts=2), sequences, 30, **saving)
    order = model.emission.rate[:, 0].argsort()
    torch.testing.assert_close(
        model.transition.duration_parameters["rate"][order], torch.tensor([1.5, 4.0]).double(), rtol=0.15, atol=0
    )
    assert (model.decode(sequences).values == order[states.values]).double().mean() > 0.95
    assert model.num_free_parameters == 1 + 0 + 2 + 2
    loaded = lightning_hmm.load(tmp_path / "last.ckpt")
    assert type(loaded) is SemiMarkovHMM
    assert torch.equal(loaded.score(sequences), model.score(sequences))
    assert torch.equal(loaded.transition.mean_durations, model.transition.mean_durations)
    assert model.posterior(sequences).smoothed.values.shape == (len(sequences.values), 2)


def test_figures_of_jumps_and_durations_are_drawn(tmp_path):
    model = SemiMarkovHMM(2, 4, num_symbols=3)
    options = {"logger": TensorBoardLogger(tmp_path, ""), "callbacks": [Figures()]}
    fit(model, [[0, 1, 1, 2, 0, 0]], 1, **options)
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    assert sorted(events.Tags()["images"]) == [
        f"figures/{name}" for name in ("convergence", "durations", "emissions", "jumps", "state_usage")
    ]


def test_an_impossible_duration_is_reported():
    model = SemiMarkovHMM(2, 3, num_symbols=2)
    model.set_parameters([0.5, 0.5], {"jumps": [[0, 1], [1, 0]]}, [[1, 0], [0, 1]])
    with pytest.warns(UserWarning, match="probability zero"):
        assert float(model.score([[0, 0, 0, 0]])) == -math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model.decode([[0, 0, 0, 0]])[0].tolist() == [-1] * 4
    with pytest.raises(ValueError, match="probability zero"):
        fit(model, [[0, 0, 0, 0]], 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Durations(0), "`max_duration` must be a whole number of at least 1, but is 0"),
        (lambda: Durations(3, "gamma"), "`duration` must be one of categorical, poisson"),
        (lambda: Durations(3, duration_pseudocount=-1.0), "`duration_pseudocount` must not be negative"),
        (lambda: SemiMarkovHMM(1, 3, num_symbols=2), "`num_states` must be at least 2"),
        (lambda: SemiMarkovHMM(2, 3, num_symbols=2).transition_probs, "`transition.jump_probs`"),
        (
            lambda: SemiMarkovHMM(2, 3, num_symbols=2).set_parameters(transition={"jumps": [[0.5, 0.5], [1, 0]]}),
            r"`jumps` must have zeros on the diagonal.*entry at \(0, 0\) is 0\.5",
        ),
        (
            lambda: SemiMarkovHMM(2, 3, num_symbols=2).set_parameters(transition={"durations": {"rate": 2.0}}),
            r"`durations` of the family categorical must be \(K, D\) probabilities",
        ),
        (
            lambda: SemiMarkovHMM(2, 3, "poisson", num_symbols=2).set_parameters(
                transition={"durations": {"rate": -2.0}}
            ),
            "`rate` must be positive and finite, but that of state 0 is -2",
        ),
        (
            lambda: SemiMarkovHMM(2, 3, num_symbols=2).set_parameters(transition={"rates": 1}),
            "have the parameters jumps, durations, but 'rates' was given",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, AttributeError), match=message):
        call()


@pytest.mark.parametrize(("longest", "free"), [(1, 0), (2, 2), (3, 4)])
def test_free_parameters_of_durations_are_at_most_those_of_the_probabilities(longest, free):
    transition = HMM(2, transition=Durations(longest, "negative_binomial"), num_symbols=2).transition
    assert transition.num_free_parameters(0) == free  # with two states, the jumps have none
