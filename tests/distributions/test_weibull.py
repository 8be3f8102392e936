"""Weibull emissions against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from lightning_hmm import HMM, Sequences, Weibull, fit


def weibull(states=2, columns=1, **options):
    return HMM(states, Weibull(**options), num_features=columns)


def test_the_density_is_that_of_scipy(rng):
    values = rng.weibull(1.5, (20, 2)) * 3
    values[3, 0] = values[5] = np.nan
    concentration, scale = rng.uniform(0.5, 3, (2, 2)), rng.uniform(0.5, 3, (2, 2))
    model = weibull(columns=2).set_parameters(emission={"concentration": concentration, "scale": scale})
    rows = model.evidence(0, Sequences.from_list([values])).rows()
    logs = stats.weibull_min(concentration, scale=scale).logpdf(np.nan_to_num(values, nan=1.0)[:, None])
    expected = np.where(np.isnan(values)[:, None], 0.0, logs).sum(2)
    np.testing.assert_allclose(rows.detach(), expected, rtol=1e-10)
    for number, moment in enumerate(model.emission.moments()):
        np.testing.assert_allclose(
            moment, stats.weibull_min(concentration, scale=scale).stats("mv")[number], rtol=1e-10
        )


@pytest.mark.parametrize(
    ("tied", "frozen"),
    [((), ()), (("concentration",), ()), (("scale",), ()), (("concentration", "scale"), ()), ((), ("scale",)),
     (("scale",), ("concentration",))],
)  # fmt: skip
def test_the_m_step_is_the_optimum_of_scipy(rng, tied, frozen):
    values, gamma = rng.weibull(0.8, (50, 1)) * [[2.0]], rng.dirichlet(np.ones(2), 50)
    values[3] = np.nan
    model = weibull(tied=tied, frozen=frozen, concentration_prior=0.5)
    model.set_parameters(emission={"concentration": np.full((2, 1), 1.3), "scale": np.full((2, 1), 0.7)})
    model.emission.start(Sequences.from_list([values]), [torch.from_numpy(gamma)])

    def unpacked(x):
        logs = np.log([[1.3, 1.3], [0.7, 0.7]])  # concentrations and scales of two states
        for n, name in enumerate(("concentration", "scale")):
            if name not in frozen:
                logs[n] = x[2 * n] if name in tied else x[2 * n : 2 * n + 2]
        return np.exp(logs)

    def loss(x):
        c, s = unpacked(x)
        logs = stats.weibull_min(c, scale=s).logpdf(np.nan_to_num(values, nan=1.0))
        priors = np.log(c) - c
        return -(gamma * np.where(np.isnan(values), 0.0, logs)).sum() - 0.5 * priors.sum()

    best = unpacked(optimize.minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8}).x)
    np.testing.assert_allclose(model.emission.concentration[:, 0], best[0], rtol=1e-5)
    np.testing.assert_allclose(model.emission.scale[:, 0], best[1], rtol=1e-5)
    free = sum((1 if name in tied else 2) for name in ("concentration", "scale") if name not in frozen)
    assert model.emission.num_free_parameters(0) == free


def test_equal_values_have_a_finite_estimate():
    model = fit(weibull(1), [np.full((20, 1), 2.0)], 5)
    assert 1e3 < float(model.emission.concentration) < 1e6
    assert float(model.emission.scale) == pytest.approx(2.0, rel=1e-3)


def test_moments_of_extreme_concentrations():
    model = weibull().set_parameters(emission={"concentration": [[0.005], [1e4]], "scale": [[1.0], [2.0]]})
    mean, variance = model.emission.moments()
    assert mean[0] == variance[0] == torch.inf
    expected = stats.weibull_min(1e4, scale=2.0)
    np.testing.assert_allclose(mean[1], expected.mean(), rtol=1e-12)
    np.testing.assert_allclose(variance[1], np.pi**2 / 6 * (2.0 / 1e4) ** 2, rtol=1e-3)  # its limit


def test_it_learns_and_samples():
    truth = weibull().set_parameters(
        transition=[[0.95, 0.05], [0.1, 0.9]], emission={"concentration": [[0.8], [3.0]], "scale": [[1.0], [8.0]]}
    )
    sequences = truth.sample(20, 200, seed=1)
    model = fit(weibull(), sequences, 40)
    order = model.emission.scale[:, 0].argsort()
    torch.testing.assert_close(model.emission.scale[order], truth.emission.scale, rtol=0.1, atol=0)
    torch.testing.assert_close(model.emission.concentration[order], truth.emission.concentration, rtol=0.1, atol=0)
    single = weibull(1).set_parameters(emission={"concentration": [[1.7]], "scale": [[2.0]]})
    drawn = single.sample(1, 50_000).values.numpy()[:, 0]
    assert stats.kstest(drawn, stats.weibull_min(1.7, scale=2.0).cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Weibull(0), "`concentration_prior` must be positive, but is 0"),
        (lambda: fit(weibull(), [[[1.0], [0.0]]]), "positive numbers, but column 0 at position 1 of sequence 0 is 0"),
        (lambda: weibull().set_parameters(emission={"scale": [[1.0], [2.0]]}), "`concentration` must be given, too"),
        (lambda: weibull().set_parameters(emission={"scale": [[1.0], [2.0]], "concentration": [[1.0], [-2.0]]}),
         "`concentration` must be positive and finite, but that of state 1, column 0 is -2"),
        (lambda: weibull(tied="scale").set_parameters(
            emission={"scale": [[1.0], [2.0]], "concentration": [[1.0], [2.0]]}),
         "`scale` must be the same for all states because it is tied"),
        (lambda: weibull().set_parameters(
            emission={"rate": [[1.0], [2.0]], "concentration": [[1.0], [2.0]], "scale": [[1.0], [1.0]]}),
         "has the parameters concentration, scale, but 'rate' was given"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
