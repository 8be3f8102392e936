"""Exponential families whose columns are independent, compared with scipy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

from lightning_hmm import (
    HMM,
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Exponential,
    Gamma,
    Geometric,
    LogNormal,
    Multinomial,
    Poisson,
    Sequences,
    VonMises,
    fit,
)


@dataclass(frozen=True)
class Family:
    """An emission, and the same distribution in scipy.

    Attributes:
        make: makes the emission with options.
        peer: makes the scipy distribution of parameters by name.
        parameters: values of the parameters, (K, D) for two states and two columns.
        ranges: for each parameter, "real", "positive" or "unit".
    """

    make: Callable[..., Any]
    peer: Callable[..., Any]
    parameters: dict[str, list[list[float]]]
    ranges: tuple[str, ...]

    def log_density(self, values: np.ndarray, **parameters: np.ndarray) -> np.ndarray:
        peer = self.peer(**parameters)
        return peer.logpmf(values) if hasattr(peer.dist, "pmf") else peer.logpdf(values)


FAMILIES = {
    "Bernoulli": Family(
        Bernoulli, lambda probs: stats.bernoulli(probs), {"probs": [[0.2, 0.7], [0.9, 0.5]]}, ("unit",)
    ),
    "Binomial": Family(
        lambda *a, **o: Binomial([5, 9], *a, **o),
        lambda probs: stats.binom(np.array([5, 9]), probs),
        {"probs": [[0.2, 0.7], [0.9, 0.5]]},
        ("unit",),
    ),
    "Geometric": Family(
        Geometric, lambda probs: stats.geom(probs, loc=-1), {"probs": [[0.2, 0.7], [0.9, 0.5]]}, ("unit",)
    ),
    "Poisson": Family(Poisson, lambda rate: stats.poisson(rate), {"rate": [[0.5, 3.0], [7.0, 20.0]]}, ("positive",)),
    "Exponential": Family(
        Exponential, lambda rate: stats.expon(scale=1 / rate), {"rate": [[0.5, 3.0], [7.0, 0.01]]}, ("positive",)
    ),
    "Gamma": Family(
        Gamma,
        lambda concentration, rate: stats.gamma(concentration, scale=1 / rate),
        {"concentration": [[0.5, 3.0], [7.0, 1.2]], "rate": [[0.5, 0.01], [20.0, 1.0]]},
        ("positive", "positive"),
    ),
    "LogNormal": Family(
        LogNormal,
        lambda loc, scale: stats.lognorm(scale, scale=np.exp(loc)),
        {"loc": [[0.5, -3.0], [1.0, 5.0]], "scale": [[0.5, 0.1], [1.0, 0.2]]},
        ("real", "positive"),
    ),
    "Beta": Family(
        Beta,
        lambda concentration1, concentration0: stats.beta(concentration1, concentration0),
        {"concentration1": [[0.5, 3.0], [7.0, 1.2]], "concentration0": [[2.0, 0.7], [20.0, 1.0]]},
        ("positive", "positive"),
    ),
    "VonMises": Family(
        VonMises,
        lambda loc, concentration: stats.vonmises(concentration, loc),
        {"loc": [[0.5, -3.0], [1.0, 2.5]], "concentration": [[0.5, 3.0], [12.0, 1.0]]},
        ("real", "positive"),
    ),
}  # fmt: skip
ALL = pytest.mark.parametrize("name", FAMILIES)


def drawn(name: str, rng: np.random.Generator, steps: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Values by scipy and the states that they were drawn from."""
    family, states = FAMILIES[name], rng.integers(0, 2, steps)
    peer = family.peer(**{key: np.array(value)[states] for key, value in family.parameters.items()})
    return peer.rvs((steps, 2), random_state=rng).astype(float), states


def model_of(name: str, *arguments: Any, **options: Any) -> HMM:
    family = FAMILIES[name]
    model = HMM(2, family.make(*arguments, **options), num_features=2)
    return model.set_parameters(emission=family.parameters)


@ALL
def test_densities_are_those_of_scipy(rng, name):
    values, _ = drawn(name, rng, 50)
    missing = rng.random(values.shape) < 0.2
    family, model = FAMILIES[name], model_of(name)
    for data in (values, np.where(missing, np.nan, values)):
        parameters = {key: np.array(value)[:, None] for key, value in family.parameters.items()}
        expected = np.where(np.isnan(data), 0.0, family.log_density(values, **parameters)).sum(-1).T
        found = model.evidence(0, Sequences.from_list([torch.from_numpy(data)])).rows().detach()
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)
    for key, value in family.parameters.items():
        np.testing.assert_allclose(getattr(model.emission, key), value, rtol=1e-12)


def choices(names: tuple[str, ...]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """All pairs of tied and frozen parameters."""
    subsets = [part for size in range(len(names) + 1) for part in itertools.combinations(names, size)]
    return [(tied, frozen) for tied in subsets for frozen in subsets if not {*tied} & {*frozen}]


CASES = [
    (name, tied, frozen) for name, family in FAMILIES.items() for tied, frozen in choices(tuple(family.parameters))
]
TO_REAL = {"real": lambda x: x, "positive": np.log, "unit": special.logit}
FROM_REAL = {"real": lambda x: x, "positive": np.exp, "unit": special.expit}


@pytest.mark.parametrize(("name", "tied", "frozen"), CASES)
def test_an_m_step_is_the_optimum_of_scipy(rng, name, tied, frozen):
    """With weighted posterior probabilities, missing values, a prior, and any parameters tied or frozen."""
    family = FAMILIES[name]
    values, states = drawn(name, rng)
    values[rng.random(values.shape) < 0.1] = np.nan
    gamma = 0.2 + 0.6 * np.eye(2)[states] * rng.random((len(values), 1))
    sequences = Sequences.from_list([torch.from_numpy(values)])
    start = {key: np.array(value) for key, value in family.parameters.items()}
    start = {key: np.tile(value[:1], (2, 1)) if key in tied else value for key, value in start.items()}
    model = HMM(2, family.make(0.7, tied=tied, frozen=frozen), num_features=2).set_parameters(emission=start)
    emission, observed = model.emission, ~np.isnan(values)
    emission.set_data_stats(sequences)
    before = {key: getattr(emission, key) for key in family.parameters}
    evidence = emission.evidence(emission.natural(0), sequences)
    (statistics,) = emission.statistics(evidence, evidence.pull(torch.from_numpy(gamma)), emission.natural(0))
    emission.maximize([statistics[None]])
    found = {key: getattr(emission, key) for key in family.parameters}
    for key in family.parameters:
        if key in frozen:
            assert torch.equal(found[key], before[key])
        if key in tied:
            assert torch.equal(found[key][0], found[key][1])

    def objective(column: int, given: dict[str, np.ndarray]) -> float:
        """Of one column, while the other has its first values.

        Another test compares `log_prior` with its definition.
        """
        elsewhere = {key: np.where(np.arange(2) == column, value, start[key]) for key, value in given.items()}
        peer = HMM(2, family.make(0.7, tied=tied), num_features=2).set_parameters(emission=elsewhere)
        peer.emission.data_statistics.copy_(emission.data_statistics)
        seen, total = observed[:, column], 0.0
        for state in range(2):
            parameters = {key: value[state] for key, value in elsewhere.items()}
            total += gamma[seen, state] @ family.log_density(values, **parameters)[seen, column]
        return total + float(peer.emission.log_prior())

    free = [key for key in family.parameters if key not in frozen]
    ranges = dict(zip(family.parameters, family.ranges, strict=True))

    for column in range(2):

        def unpacked(place: np.ndarray, column: int = column) -> dict[str, np.ndarray]:
            given, rest = {key: value.numpy().copy() for key, value in found.items()}, list(place)
            for key in free:
                numbers = [rest.pop(0)] * 2 if key in tied else [rest.pop(0), rest.pop(0)]
                given[key][:, column] = FROM_REAL[ranges[key]](np.array(numbers))
            return given

        ours = np.concatenate(
            [TO_REAL[ranges[key]](found[key][: 1 if key in tied else 2, column].numpy()) for key in free] or [[]]
        )
        if not len(ours):
            continue
        reached = objective(column, unpacked(ours))
        best = optimize.minimize(
            lambda place, column=column: -objective(column, unpacked(place)),
            ours + 0.05,
            method="BFGS",
            options={"gtol": 1e-6},
        )
        assert reached >= -best.fun - 1e-9 * abs(best.fun)
        np.testing.assert_allclose(ours, best.x, rtol=1e-4, atol=1e-4)


@ALL
def test_the_prior_is_the_likelihood_of_additional_steps(rng, name):
    """Differences of log prior: s times the mean of log p over the data, and half a step with typical statistics."""
    family, (values, _) = FAMILIES[name], drawn(name, rng, 4000)
    model = model_of(name, 2.5)
    model.emission.set_data_stats(Sequences.from_list([torch.from_numpy(values)]))
    other = {
        key: special.expit(special.logit(value) + 0.3) if kind == "unit" else np.array(value) * 1.1
        for (key, value), kind in zip(family.parameters.items(), family.ranges, strict=True)
    }
    before = float(model.emission.log_prior())
    difference = float(model.set_parameters(emission=other).emission.log_prior()) - before
    expected = 0.0
    for state in range(2):
        first, second = (
            family.log_density(values, **{key: np.array(value)[state] for key, value in given.items()}).mean(0).sum()
            for given in (family.parameters, other)
        )
        expected += 2.5 * (second - first)
    assert difference == pytest.approx(expected, rel=0.02, abs=2e-3)


@ALL
def test_samples_have_the_moments_that_are_predicted(name):
    emission = model_of(name).emission
    states = torch.arange(2).repeat_interleave(60_000)
    values = emission.sample(states, torch.Generator().manual_seed(0))
    if name == "VonMises":  # angles are measured from the location
        values = emission.loc[states] + torch.remainder(values - emission.loc[states] + np.pi, 2 * np.pi) - np.pi
    for state in range(2):
        mean, variance = (moment[state] for moment in emission.moments())
        part = values[states == state]
        assert bool(((part.mean(0) - mean).abs() < 5 * (variance / len(part)).sqrt()).all())
        torch.testing.assert_close(part.var(0), variance, rtol=0.06, atol=0)


@ALL
def test_starting_values_come_from_the_data(rng, name):
    """Columns that do not vary and values at the border of the support have finite estimates, too."""
    values, _ = drawn(name, rng)
    values[:, 1] = 0.5 if name == "Beta" else 1.0
    if FAMILIES[name].ranges == ("unit",):
        values[:, 1] = 0.0
    model = fit(HMM(2, FAMILIES[name].make(), num_features=2, restarts=2), [values], max_epochs=20, tolerance=0)
    for key in FAMILIES[name].parameters:
        assert bool(getattr(model.emission, key).isfinite().all())
    assert bool(model.score([values]).isfinite().all())


@ALL
def test_parameters_are_frozen_or_tied_by_name(rng, name):
    family, (values, _) = FAMILIES[name], drawn(name, rng)
    first, *others = family.parameters
    model = HMM(2, family.make(frozen=[first]), num_features=2, restarts=2)
    model.set_parameters(emission={first: family.parameters[first]})  # the others are initialized from the data
    assert bool(model.emission.is_set) == (not others)
    fit(model, [values], max_epochs=4, tolerance=0)
    assert getattr(model.emission, first).tolist() == family.parameters[first]
    assert model.num_free_parameters == 1 + 2 + 4 * len(others)
    model = HMM(2, family.make(frozen=[first]), num_features=2)  # the frozen one is, too
    model.initialize(Sequences.from_list([torch.from_numpy(values)]))
    before = getattr(model.emission, first)
    assert torch.equal(getattr(fit(model, [values], max_epochs=4).emission, first), before)
    model = fit(HMM(2, family.make(tied=first), num_features=2), [values], max_epochs=4, tolerance=0)
    found = getattr(model.emission, first)
    assert torch.equal(found[0], found[1])
    assert model.num_free_parameters == 1 + 2 + 2 + 4 * len(others)
    with pytest.raises(ValueError, match=f"`{first}` must be the same for all states because it is tied"):
        model.set_parameters(emission={first: family.parameters[first]})


@pytest.mark.parametrize("concentration", [1e-3, 0.1, 1.0, 30.0, 1e3, 1e6])
def test_newton_is_accurate(concentration):
    """The concentration is that with the given averages, up to their rounding."""
    expected = torch.full((1, 1, 1), concentration, dtype=torch.float64)
    ratio = special.ive(1, concentration) / special.ive(0, concentration)
    averages = {
        VonMises: [ratio * np.cos(0.4), ratio * np.sin(0.4)],
        Gamma: [special.digamma(concentration) - np.log(3), concentration / 3],
        Beta: special.digamma([concentration, 2 * concentration]) - special.digamma(3 * concentration),
    }
    others = {VonMises: ("loc", 0.4), Gamma: ("rate", 3.0), Beta: ("concentration0", 2 * concentration)}
    for family, statistics in averages.items():
        emission = family(1e-300)
        HMM(1, emission, num_features=1)
        emission.maximize([torch.tensor([*statistics, 1.0], dtype=torch.float64).reshape(1, 1, 3, 1) * 50])
        name = "concentration1" if family is Beta else "concentration"
        tolerance = 1e-12 + 1e-14 * concentration
        torch.testing.assert_close(getattr(emission, name), expected[0], rtol=tolerance, atol=0)
        other, value = others[family]
        assert float(getattr(emission, other)) == pytest.approx(value, rel=tolerance * 10)


def test_angles_are_predicted_as_directions():
    model = HMM(2, VonMises(), num_features=1)
    model.set_parameters(emission={"loc": [[3.0], [-3.0]], "concentration": [[50.0], [50.0]]})
    mean, variance = model.emission.predict(torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64))
    assert abs(abs(float(mean[0])) - np.pi) < 1e-12
    assert float(mean[1]) == pytest.approx(3.0)
    sums = [integrate.quad(lambda x, n=n: x**n * np.exp(-100 * np.sin(x / 2) ** 2), -np.pi, np.pi)[0] for n in (0, 2)]
    alone = sums[1] / sums[0]
    np.testing.assert_allclose(variance[:, 0], [alone + (np.pi - 3) ** 2, alone], rtol=1e-6)


# Multinomial


PROBS = np.array([[0.2, 0.3, 0.5], [0.7, 0.2, 0.1]])


def test_multinomial_densities_are_those_of_scipy(rng):
    values = rng.multinomial(rng.integers(0, 20, 40), PROBS[0]).astype(float)
    values[7] = np.nan
    model = HMM(2, Multinomial(), num_features=3).set_parameters(emission={"probs": PROBS})
    found = model.evidence(0, Sequences.from_list([torch.from_numpy(values)])).rows().detach()
    seen = np.delete(values, 7, 0)
    for state in range(2):
        expected = np.insert(stats.multinomial(seen.sum(1), PROBS[state]).logpmf(seen), 7, 0.0)
        np.testing.assert_allclose(found[:, state], expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(model.emission.probs, torch.from_numpy(PROBS))


@pytest.mark.parametrize("tied", [(), ("probs",)])
def test_a_multinomial_m_step_adds_the_counts(rng, tied):
    values, gamma = rng.multinomial(6, PROBS[0], 50).astype(float), rng.dirichlet([1, 1], 50)
    model = HMM(2, Multinomial(prior_steps=3.0, tied=tied), num_features=3)
    sequences = Sequences.from_list([torch.from_numpy(values)])
    model.emission.set_data_stats(sequences)
    model.emission.has_data_stats.fill_(True)
    model.emission.start(sequences, [torch.from_numpy(gamma)])
    mean = (values.sum(0) + 0.5) / 50.5
    counts = gamma.T @ values
    expected = (counts.sum(0, keepdims=True) if tied else counts) + 3 * mean
    np.testing.assert_allclose(model.emission.probs, np.broadcast_to(expected / expected.sum(1, keepdims=True), (2, 3)))
    assert model.num_free_parameters == 1 + 2 + (2 if tied else 4)
    torch.testing.assert_close(model.emission.moments()[0].sum(1), torch.full((2,), float(mean.sum())).double())
    assert model.sample(2, 5, seed=0).values.sum(1).eq(6).all()


# Categorical


def test_tied_and_frozen_symbols(rng):
    values = [rng.integers(0, 3, 50), rng.integers(0, 3, 20)]
    for options in ({}, {"discount": 0.9, "sequences_per_update": 1}):
        model = HMM(2, Categorical(0.5, tied=["probs"]), num_symbols=3, **options)
        assert torch.equal(model.emission.probs[0], model.emission.probs[1])
        fit(model, values, max_epochs=3, tolerance=0)
        assert torch.equal(model.emission.probs[0], model.emission.probs[1])
        assert model.num_free_parameters == 1 + 2 + 2
        if not options:
            counts = np.bincount(np.concatenate(values), minlength=3) + 0.5
            np.testing.assert_allclose(model.emission.probs[0], counts / counts.sum(), rtol=1e-12)
            expected = 0.5 * model.emission.probs[0].log().sum()
            torch.testing.assert_close(model.emission.log_prior()[0], expected)
        model = HMM(2, Categorical(frozen=["probs"]), num_symbols=3, **options)
        before = model.emission.probs
        assert torch.equal(fit(model, values, max_epochs=3).emission.probs, before)
        assert model.num_free_parameters == 1 + 2
    with pytest.raises(ValueError, match="`emission` must be the same for all states because it is tied"):
        HMM(2, Categorical(tied=["probs"]), num_symbols=2).set_parameters(emission=[[0.5, 0.5], [0.4, 0.6]])


# Bad input


def one(emission: Any, **values: Any) -> HMM:
    return HMM(1, emission, num_features=1).set_parameters(emission=values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gamma(0.0), r"`prior_steps` must be positive, but is 0\.0"),
        (lambda: Gamma(tied=["scale"]),
         r"`tied` must name parameters of a Gamma emission \(concentration, rate\), but names 'scale'"),
        (lambda: one(Gamma(), concentration=[[1.0]], rate=[[0.0]]),
         "`rate` must be positive, but that of state 0, column 0 is 0"),
        (lambda: one(Gamma(), rate=[[1.0]]), "`concentration` must be given, too"),
        (lambda: one(LogNormal(), loc=[[np.inf]], scale=[[1.0]]), "`loc` must be finite"),
        (lambda: one(Bernoulli(), probs=[[1.0]]),
         "`probs` must be between 0 and 1, exclusive, but that of state 0, column 0 is 1"),
        (lambda: Binomial(0), "`total_count` must be a whole number from 1, but is 0"),
        (lambda: HMM(1, Binomial([2, 3]), num_features=1),
         "`total_count` must have one number for each of the 1 columns, but has 2"),
        (lambda: one(Multinomial(), probs=[[0.5]]), "`probs` rows must sum to 1, but row 0 sums to 0.5"),
        (lambda: Multinomial(total_count=0), "`total_count` must be a whole number from 1"),
        (lambda: one(Multinomial(), probs=[[1.0]]).sample(1, 2), "`total_count` must be given to sample or predict"),
        (lambda: fit(HMM(1, Gamma()), [[[1.0], [0.0]]]),
         "A Gamma emission must have positive numbers, but column 0 at position 1 of sequence 0 is 0. Mark"),
        (lambda: fit(HMM(1, LogNormal()), [[[-1.0]]]), "A LogNormal emission must have positive numbers, but .* is -1"),
        (lambda: fit(HMM(1, Exponential()), [[[-1.0]]]),
         "An Exponential emission must have numbers from 0, but .* is -1"),
        (lambda: fit(HMM(1, Beta()), [[[0.5], [1.0]]]),
         "A Beta emission must have numbers between 0 and 1, exclusive, but .* is 1. Rescale"),
        (lambda: fit(HMM(1, Bernoulli()), [[[2.0]]]),
         "A Bernoulli emission must have zeros and ones, but .* is 2. Use a Binomial"),
        (lambda: fit(HMM(1, Binomial(3)), [[[4.0]]]), "from 0 to its total count, but .* is 4. Increase `total_count`"),
        (lambda: fit(HMM(1, Geometric()), [[[0.5]]]),
         "A Geometric emission must have counts, whole numbers from 0, but .* is 0.5"),
        (lambda: fit(HMM(1, Multinomial()), [[[1.0, np.nan]]]),
         "all counts of a step or none, but column 1 at position 0 of sequence 0 is nan"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
