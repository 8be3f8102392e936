"""Student t and negative-binomial emissions, compared with scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from lightning_hmm import HMM, NegativeBinomial, Sequences, StudentT, fit

FAMILIES = {
    "StudentT": (
        StudentT,
        lambda df, loc, scale: stats.t(df, loc, scale),
        {"df": [[3.0, 8.0], [5.0, 2.5]], "loc": [[0.0, 9.0], [4.0, -3.0]], "scale": [[1.0, 0.1], [2.0, 5.0]]},
        {"df": (np.log, np.exp), "loc": (lambda x: x, lambda x: x), "scale": (np.log, np.exp)},
    ),
    "NegativeBinomial": (
        NegativeBinomial,
        lambda total_count, probs: stats.nbinom(total_count, 1 - probs),
        {"total_count": [[0.7, 3.0], [20.0, 2.0]], "probs": [[0.6, 0.9], [0.5, 0.97]]},
        {"total_count": (np.log, np.exp), "probs": (special.logit, special.expit)},
    ),
}
ALL = pytest.mark.parametrize("name", FAMILIES)


def log_density(name, values, parameters):
    """(steps, K, D) by scipy; zero where a value is missing."""
    peer = FAMILIES[name][1](**{key: np.asarray(value) for key, value in parameters.items()})
    values = values[:, None]
    found = peer.logpmf(np.nan_to_num(values)) if name == "NegativeBinomial" else peer.logpdf(np.nan_to_num(values))
    return np.where(np.isnan(values), 0.0, found)


def drawn(name, rng, steps=400):
    states = rng.integers(0, 2, steps)
    parameters = {key: np.array(value)[states] for key, value in FAMILIES[name][2].items()}
    return FAMILIES[name][1](**parameters).rvs((steps, 2), random_state=rng).astype(float), states


def model_of(name, *arguments, **options):
    make, _, parameters, _ = FAMILIES[name]
    return HMM(2, make(*arguments, **options), num_features=2).set_parameters(emission=parameters)


@ALL
def test_densities_are_those_of_scipy(rng, name):
    values, _ = drawn(name, rng, 60)
    if name == "StudentT":
        values[3] = 1e12, -1e6
    model = model_of(name)
    for data in (values, np.where(rng.random(values.shape) < 0.2, np.nan, values)):
        found = model.evidence(0, Sequences.from_list([torch.from_numpy(data)])).rows().detach()
        np.testing.assert_allclose(found, log_density(name, data, FAMILIES[name][2]).sum(2), rtol=1e-10, atol=1e-10)
    for key, value in FAMILIES[name][2].items():
        np.testing.assert_allclose(getattr(model.emission, key), value, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "tied", "frozen"),
    [
        ("StudentT", (), ()),
        ("StudentT", ("df",), ()),
        ("StudentT", ("df", "scale"), ()),
        ("StudentT", ("loc", "scale", "df"), ()),
        ("StudentT", ("scale",), ("df",)),
        ("StudentT", ("df",), ("loc",)),
        ("NegativeBinomial", (), ()),
        ("NegativeBinomial", ("total_count",), ()),
        ("NegativeBinomial", ("probs",), ()),
        ("NegativeBinomial", ("total_count", "probs"), ()),
        ("NegativeBinomial", ("total_count",), ("probs",)),
        ("NegativeBinomial", ("probs",), ("total_count",)),
    ],
)
def test_em_reaches_the_optimum_of_scipy(rng, name, tied, frozen):
    """With fixed posterior probabilities, missing values and a prior. The objective never decreases."""
    make, _, start, maps = FAMILIES[name]
    values, states = drawn(name, rng)
    values[rng.random(values.shape) < 0.1] = np.nan
    gamma = 0.1 + 0.8 * np.eye(2)[states] * rng.random((len(values), 1))
    start = {key: np.tile(value[:1], (2, 1)) if key in tied else np.array(value) for key, value in start.items()}
    sequences = Sequences.from_list([torch.from_numpy(values)])
    model = HMM(2, make(0.7, tied=tied, frozen=frozen), num_features=2).set_parameters(emission=start)
    emission = model.emission
    emission.set_data_stats(sequences)
    for key in start:
        np.testing.assert_allclose(getattr(emission, key), start[key], rtol=1e-9)  # the distribution is the same

    def objective(given):
        fitted = (gamma[:, :, None] * log_density(name, values, given)).sum()
        parameters = [torch.from_numpy(given[key])[None] for key in emission.names]
        return fitted + float((emission.weights_of(*parameters) * emission.prior_statistics()).sum())

    reached = []
    for _ in range(150):
        reached.append(objective({key: getattr(emission, key).numpy() for key in start}))
        leaves = [emission.weights[0].detach().requires_grad_()]
        evidence = emission.evidence(leaves, sequences)
        emission.maximize([emission.statistics(evidence, torch.from_numpy(gamma), leaves)[0][None]])
    assert np.diff(reached).min() > -1e-8
    assert reached[1] > reached[0] + 1e-3
    found = {key: getattr(emission, key).numpy() for key in start}
    assert all(np.array_equal(found[key][0], found[key][1]) for key in tied)
    assert all(np.allclose(found[key], start[key], rtol=1e-9) for key in frozen)
    free = [key for key in start if key not in frozen]

    def unpacked(place):
        given, rest = {key: value.copy() for key, value in found.items()}, list(place)
        for key in free:
            rows = [[rest.pop(0) for _ in range(2)] for _ in range(1 if key in tied else 2)]
            given[key] = maps[key][1](np.array(rows * 2 if key in tied else rows))
        return given

    ours = np.concatenate([maps[key][0](found[key][: 1 if key in tied else 2]).flatten() for key in free])
    best = optimize.minimize(lambda place: -objective(unpacked(place)), ours + 0.02, method="BFGS")
    assert objective(unpacked(ours)) >= -best.fun - 1e-5


def test_the_m_step_of_small_counts_is_exact(rng):
    """One step reaches the optimum, because the bound is exact for counts up to 32."""
    values = stats.nbinom(30, 0.8).rvs((500, 1), random_state=rng).astype(float)
    assert values.max() < 32
    model = HMM(1, NegativeBinomial(1e-12), num_features=1)
    model.initialize(Sequences.from_list([torch.from_numpy(values)]))
    peer = optimize.minimize(
        lambda x: -stats.nbinom(np.exp(x[0]), special.expit(x[1])).logpmf(values).sum(), [3.0, 1.0], method="BFGS"
    )
    assert float(model.score([values])) == pytest.approx(-peer.fun, abs=1e-6)


@ALL
def test_training_recovers_the_parameters_and_stays_finite(name):
    model = model_of(name)
    model.set_parameters(transition=[[0.95, 0.05], [0.1, 0.9]])
    data = model.sample(10, 300, seed=0)
    make, _, parameters, _ = FAMILIES[name]
    first = next(iter(parameters))
    fitted = fit(HMM(2, make(frozen=[first]), num_features=2).set_parameters(emission=parameters), data, 5, 0)
    assert fitted.emission.frozen == (first,)
    np.testing.assert_allclose(getattr(fitted.emission, first), parameters[first], rtol=1e-9)
    assert fitted.num_free_parameters == 1 + 2 + 4 * (len(parameters) - 1)
    fitted = fit(HMM(2, make(tied=[first]), num_features=2, restarts=2, arithmetic="float32"), data, 20, 0)
    assert float(fitted.score(data).sum()) > 1.1 * float(model.score(data).sum())
    constant = np.zeros((30, 2))
    fitted = fit(HMM(2, make(), num_features=2), [constant], 5, 0)
    assert bool(fitted.score([constant]).isfinite().all())
    assert all(bool(getattr(fitted.emission, key).isfinite().all()) for key in parameters)


@ALL
def test_samples_have_the_moments_that_are_predicted(name):
    model = model_of(name)
    if name == "StudentT":
        model.set_parameters(emission={"df": [[9.0, 12.0], [20.0, 30.0]]})
    states = torch.arange(2).repeat_interleave(60_000)
    values = model.emission.sample(states, torch.Generator().manual_seed(0))
    for state in range(2):
        mean, variance = (moment[state] for moment in model.emission.moments())
        part = values[states == state]
        assert bool(((part.mean(0) - mean).abs() < 5 * (variance / len(part)).sqrt()).all())
        torch.testing.assert_close(part.var(0), variance, rtol=0.08, atol=0)


def test_moments_that_do_not_exist():
    model = HMM(3, StudentT(), num_features=1)
    model.set_parameters(emission={"df": [[0.5], [1.5], [4.0]], "loc": [[1.0]] * 3, "scale": [[1.0]] * 3})
    mean, variance = model.emission.moments()
    assert str(mean.flatten().tolist()) == "[nan, 1.0, 1.0]"
    assert str(variance.flatten().tolist()) == "[nan, inf, 2.0]"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: model_of("StudentT").set_parameters(emission={"df": [[1.0, 0.0], [1.0, 1.0]]}),
         "`df` must be positive, but that of state 0, column 1 is 0"),
        (lambda: model_of("NegativeBinomial").set_parameters(emission={"probs": [[0.1, 0.2], [0.5, 1.0]]}),
         "`probs` must be between 0 and 1"),
        (lambda: model_of("NegativeBinomial").score([[[1.0, 2.0], [3.0, 2.5]]]),
         "must have counts, .*column 1 at position 1 of sequence 0 is 2.5"),
        (lambda: StudentT(tied=["mean"]), r"must name parameters of a StudentT emission \(df, loc, scale\)"),
        (lambda: NegativeBinomial(0), "`prior_steps` must be positive"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
