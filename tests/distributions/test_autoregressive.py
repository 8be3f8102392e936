"""Autoregressive emissions against scipy, statsmodels and numerical optima."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from lightning_hmm import HMM, Autoregressive, Full, Gaussian, Product, Sequences, fit
from lightning_hmm.distributions import Histories
from tests.models.test_new_family import assert_em_never_decreases

KINDS = ("diagonal", "spherical", "full", "tied")
# A series of 40 steps; values of statsmodels 0.15 are for it.
SERIES = np.round(np.cumsum(np.sin(np.arange(40) ** 2)) + 5, 3)[:, None]
CHAIN = [[0.9, 0.1], [0.2, 0.8]]


def parameters(rng, kind: str, states: int = 3, size: int = 2, order: int = 2) -> dict[str, np.ndarray]:
    roots = rng.normal(size=(states, size, size))
    full = roots @ roots.swapaxes(1, 2) + np.eye(size)
    spread = {
        "full": full,
        "tied": np.repeat(full[:1], states, 0),
        "diagonal": np.einsum("kii->ki", full),
        "spherical": np.repeat(full[:, :1, 0], size, 1),
    }[kind]
    return {
        "coefficients": rng.normal(size=(states, order, size, size)) * 0.3,
        "intercept": rng.normal(size=(states, size)),
        "covariance" if kind in ("full", "tied") else "variance": spread,
    }


def model_of(rng, kind: str = "full", order: int = 2, states: int = 3, **options) -> HMM:
    emission = Autoregressive(order, kind, **{"variance_prior": 0.0, **options})
    model = HMM(states, emission, Full(0.5), num_features=2)
    return model.set_parameters(emission=parameters(rng, kind, states, order=order))


def ragged(rng, missing: float = 0.1, offset: float = 0.0) -> Sequences:
    parts = []
    for n in (1, 0, 2, 30, 25, 3):
        values = np.cumsum(rng.normal(size=(n, 2)), 0) + offset
        parts.append(np.where(rng.random(values.shape) < missing, np.nan, values))
    return Sequences.from_list(parts, weights=[1.0, 2.0, 1.0, 0.5, 2.0, 3.0])


def densities(emission: Autoregressive, sequences: Sequences, zeros: bool = False) -> np.ndarray:
    """(steps, K) by scipy, 0 at steps with a missing value or a missing lag."""
    coefficients, intercept = emission.coefficients.numpy(), emission.intercept.numpy()
    covariance, order = emission.covariance.numpy(), emission.order
    rows = []
    for n in range(len(sequences)):
        values = sequences[n].numpy()
        for t in range(len(values)):
            lags = [values[t - lag] if t >= lag else np.zeros(2) for lag in range(1, order + 1)]
            row = np.zeros(len(intercept))
            if (zeros or t >= order) and np.isfinite([values[t], *lags]).all():
                for k in range(len(row)):
                    mean = intercept[k] + sum(coefficients[k, lag] @ lags[lag] for lag in range(order))
                    row[k] = stats.multivariate_normal(mean, covariance[k]).logpdf(values[t])
            rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["missing", "zeros"])
def test_densities_are_those_of_scipy(rng, kind, before):
    model, sequences = model_of(rng, kind, before=before), ragged(rng)
    model.emission.set_data_stats(sequences)  # moves the center, but not the distribution
    expected = densities(model.emission, sequences, before == "zeros")
    np.testing.assert_allclose(model.evidence(0, sequences).rows().detach(), expected, rtol=1e-10, atol=1e-10)


def test_values_far_from_zero_keep_their_precision(rng):
    near = ragged(rng, missing=0.0)
    far = near.with_values(near.values + 1e7)
    models = [fit(HMM(1, Autoregressive(2, "full"), num_features=2), data, 2) for data in (near, far)]
    for name in ("coefficients", "covariance"):
        torch.testing.assert_close(*(getattr(model.emission, name) for model in models), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(models[0].score(near), models[1].score(far), rtol=1e-6, atol=1e-6)


def test_the_likelihood_is_that_of_statsmodels():
    """MarkovRegression on lagged columns with a switching variance."""
    model = HMM(2, Autoregressive(2), initial="stationary", num_features=1).set_parameters(
        transition=CHAIN,
        emission={
            "coefficients": [[[[0.7]], [[0.1]]], [[[0.4]], [[0.2]]]],
            "intercept": [[1.0], [2.0]],
            "variance": [[0.5], [1.5]],
        },
    )
    assert float(model.score([SERIES])) == pytest.approx(-55.26758795332016, abs=1e-9)


@pytest.mark.parametrize(
    ("tied", "second", "expected"),
    [
        (None, ([0.6, 0.1], 0.8), -47.83958504077471),
        (["variance"], ([-0.3, 0.2], 0.8), -47.856451255568594),
        ([], ([-0.3], 1.7), -53.48937214140054),
    ],
)
def test_the_likelihood_around_means_is_that_of_statsmodels(tied, second, expected):
    """MarkovAutoregression, with common and with switching coefficients and variances.

    For orders above 1, statsmodels 0.15 uses the variance of the previous state if variances switch.
    """
    order = len(second[0])
    emission = Autoregressive(order, around_mean=True, tied=tied)
    model = HMM(2, emission, initial="stationary", num_features=1).set_parameters(
        transition=CHAIN,
        emission={
            "mean": [[3.0], [6.0]],
            "coefficients": [[[[value]] for value in values] for values in ([0.6, 0.1][:order], second[0])],
            "variance": [[0.8], [second[1]]],
        },
    )
    assert float(model.score([SERIES])) == pytest.approx(expected, abs=1e-9)
    model.emission.set_data_stats(Sequences.from_list([SERIES]))
    assert float(model.score([SERIES])) == pytest.approx(expected, abs=1e-9)


def around_mean(**options) -> HMM:
    transition = options.pop("transition", None)
    return HMM(2, Autoregressive(1, around_mean=True, **options), transition, num_features=1)


def test_the_states_around_means_are_those_of_all_paths():
    """Likelihood, posterior, Viterbi path and prediction, by enumeration."""
    model = around_mean().set_parameters(
        [0.3, 0.7],
        CHAIN,
        {"mean": [[-1.0], [2.0]], "coefficients": [[[[0.5]]]] * 2, "variance": [[0.5], [0.5]]},
    )
    y = np.array([0.1, -1.3, 0.8, 2.2, 1.0])
    mean, chain = np.array([-1.0, 2.0]), np.array(CHAIN)
    paths = np.array(np.meshgrid(*[[0, 1]] * 5)).reshape(5, -1).T
    logs = np.array([0.3, 0.7])[paths[:, 0]]
    for t in range(1, 5):
        center = mean[paths[:, t]] + 0.5 * (y[t - 1] - mean[paths[:, t - 1]])
        logs = logs * chain[paths[:, t - 1], paths[:, t]] * stats.norm(center, np.sqrt(0.5)).pdf(y[t])
    sequences = [y[:, None]]
    assert float(model.score(sequences)) == pytest.approx(np.log(logs.sum()), rel=1e-12)
    posterior = model.posterior(sequences).smoothed[0]
    expected = [(logs * (paths[:, t] == 1)).sum() / logs.sum() for t in range(5)]
    np.testing.assert_allclose(posterior[:, 1], expected, rtol=1e-10)
    assert model.decode(sequences)[0].tolist() == paths[logs.argmax()].tolist()
    joint = np.array([[(logs * (paths[:, 4] == i) * chain[i, j]).sum() for j in (0, 1)] for i in (0, 1)]) / logs.sum()
    centers = mean[None] + 0.5 * (y[4] - mean)[:, None]
    moments = model.predict_next(sequences)
    assert float(moments.mean) == pytest.approx((joint * centers).sum(), rel=1e-10)
    spread = (joint * (centers**2 + 0.5)).sum() - (joint * centers).sum() ** 2
    assert float(moments.variance) == pytest.approx(spread, rel=1e-9)
    draws = model.sample_posterior(Sequences.from_list(sequences * 4000), seed=1).values.reshape(-1, 5)
    np.testing.assert_allclose((draws == 1).double().mean(0), expected, atol=0.03)


# M-steps


def objective(model: HMM, sequences: Sequences, posteriors: np.ndarray) -> float:
    rows = model.emission.evidence(model.emission.natural(0), sequences).rows().detach().numpy()
    return float((rows * posteriors).sum() + model.emission.log_prior())


def assert_maximum(model: HMM, sequences: Sequences, posteriors: np.ndarray, names, repeats: int = 1) -> None:
    """The M-step reaches the optimum of scipy over the parameters `names`, of which tied ones have one value."""
    emission = model.emission
    emission.set_data_stats(sequences)
    evidence = emission.evidence(emission.natural(0), sequences)
    statistics = [evidence.pull(torch.from_numpy(posteriors))[None]]
    for _ in range(repeats):
        emission.maximize(statistics)
    found = objective(model, sequences, posteriors)
    values = {name: getattr(emission, name).numpy() for name in emission.names}
    shapes = {name: values[name][:1].shape if name in emission.tied else values[name].shape for name in names}

    def decoded(flat: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(flat, np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1])
        given = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        if "variance" in given:
            given["variance"] = np.exp(given["variance"])
        return {name: np.broadcast_to(given.get(name, values[name]), values[name].shape).copy() for name in values}

    def loss(flat: np.ndarray) -> float:
        emission.set(**decoded(flat))
        return -objective(model, sequences, posteriors)

    start = [np.log(values[name]) if name == "variance" else values[name] for name in names]
    start = np.concatenate(
        [(part[:1] if name in emission.tied else part).ravel() for name, part in zip(names, start, strict=True)]
    )
    options = {"maxiter": 3000, "maxfun": 10**6, "ftol": 1e-15, "gtol": 1e-8}
    guess = start + 0.1 * np.random.default_rng(3).normal(size=start.shape)
    best = optimize.minimize(loss, guess, method="L-BFGS-B", options=options)
    assert found == pytest.approx(-best.fun, rel=1e-7)
    emission.set(**decoded(best.x))
    for name in names:
        np.testing.assert_allclose(getattr(emission, name), values[name], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tied", [(), ("coefficients",), ("intercept",), ("variance",), ("coefficients", "intercept")])
def test_the_m_step_is_the_optimum_of_scipy(rng, tied):
    names = ("coefficients", "intercept", "variance")
    model = HMM(2, Autoregressive(1, variance_prior=0.3, ridge=2.0, tied=tied), num_features=1)
    start = {
        "coefficients": rng.normal(size=(2, 1, 1, 1)),
        "intercept": rng.normal(size=(2, 1)),
        "variance": [[1], [3]],
    }
    model.set_parameters(
        emission={name: np.array([value[0]] * 2) if name in tied else value for name, value in start.items()}
    )
    sequences = Sequences.from_list([SERIES, SERIES[10:0:-1] * 1.5 + 3])
    posteriors = rng.dirichlet([1, 1], 50) * np.repeat([1.0, 0.7], [40, 10])[:, None]
    assert_maximum(model, sequences, posteriors, names, repeats=10)


@pytest.mark.parametrize("frozen", ["coefficients", "intercept", "variance", "mean"])
@pytest.mark.parametrize("around", [False, True])
def test_frozen_parameters_stay_and_the_others_are_optimal(rng, frozen, around):
    names = ["mean", "coefficients", "variance"] if around else ["coefficients", "intercept", "variance"]
    if frozen not in names:
        pytest.skip("not a parameter")
    emission = Autoregressive(1, variance_prior=0.3, ridge=2.0, around_mean=around, tied=(), frozen=[frozen])
    model = HMM(2, emission, num_features=1)
    given = {"coefficients": [[[[0.3]]], [[[-0.5]]]], names[not around]: [[1.0], [7.0]], "variance": [[1.0], [2.0]]}
    model.set_parameters(emission=given)
    sequences = Sequences.from_list([SERIES, SERIES[10:0:-1] * 1.5 + 3])
    posteriors = rng.dirichlet(np.ones(4 if around else 2), 50)
    assert_maximum(model, sequences, posteriors, [name for name in names if name != frozen], repeats=30)
    np.testing.assert_allclose(getattr(model.emission, frozen), given[frozen], rtol=1e-9)
    free = {"coefficients": 2, "variance": 2, "mean": 2, "intercept": 2}
    assert model.emission.num_free_parameters(0) == sum(free[name] for name in names if name != frozen)


@pytest.mark.parametrize("tied", [None, (), ("mean",)])
def test_the_m_step_around_means_is_the_optimum_of_scipy(rng, tied):
    model = around_mean(variance_prior=0.3, ridge=2.0, tied=tied)
    equal = model.emission.tied
    given = {"coefficients": [[[[0.3]]], [[[-0.5]]]], "mean": [[1.0], [7.0]], "variance": [[1.0], [2.0]]}
    model.set_parameters(emission={k: [v[0]] * 2 if k in equal else v for k, v in given.items()})
    sequences = Sequences.from_list([SERIES, SERIES[10:0:-1] * 1.5 + 3])
    posteriors = rng.dirichlet(np.ones(4), 50)
    assert_maximum(model, sequences, posteriors, ["mean", "coefficients", "variance"], repeats=30)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_regression_is_that_of_numpy(rng, kind):
    """One state: ordinary least squares, and the covariance of its residuals."""
    sequences = Sequences.from_list([np.cumsum(rng.normal(size=(60, 2)), 0)])
    model = fit(HMM(1, Autoregressive(2, kind, variance_prior=0.0), num_features=2), sequences, 2, 0)
    y = sequences.values.numpy()
    regressors = np.concatenate([y[1:-1], y[:-2], np.ones((58, 1))], 1)
    lines, *_ = np.linalg.lstsq(regressors, y[2:], rcond=None)
    residuals = y[2:] - regressors @ lines
    np.testing.assert_allclose(model.emission.intercept[0], lines[-1], rtol=1e-8)
    np.testing.assert_allclose(model.emission.coefficients[0, 1], lines[2:4].T, rtol=1e-7)
    matrix = residuals.T @ residuals / 58
    if kind == "diagonal":
        matrix = np.diag(np.diag(matrix))
    elif kind == "spherical":
        matrix = np.eye(2) * np.trace(matrix) / 2
    np.testing.assert_allclose(model.emission.covariance[0], matrix, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"covariance": "full", "ridge": 1.0}, {"tied": ["coefficients"]}, {"before": "zeros"}]
)
def test_em_never_decreases(rng, options):
    sequences = ragged(rng)
    model = HMM(2, Autoregressive(1, **options), restarts=2, initialization="random", num_features=2)
    model.initialize(sequences)
    assert_em_never_decreases(model, sequences, 15)


def test_em_around_means_never_decreases(rng):
    sequences = Sequences.from_list([SERIES, SERIES[20:] * 2])
    model = HMM(2, Autoregressive(2, around_mean=True), restarts=2, initialization="random", num_features=1)
    model.initialize(sequences)
    assert_em_never_decreases(model, sequences, 15)


# Samples and predictions


def test_samples_are_learned_again():
    truth = HMM(2, Autoregressive(1, "full"), num_features=2).set_parameters(
        transition=[[0.98, 0.02], [0.02, 0.98]],
        emission={
            "coefficients": [[[[0.9, 0.0], [0.1, 0.5]]], [[[-0.7, 0.2], [0.0, 0.3]]]],
            "intercept": [[1.0, 0.0], [0.0, 2.0]],
            "covariance": [[[1.0, 0.3], [0.3, 0.5]], [[0.5, 0.0], [0.0, 1.0]]],
        },
    )
    sequences, states = truth.sample(20, 400, seed=2, return_states=True)
    model = HMM(2, Autoregressive(1, "full"), num_features=2).set_parameters(
        emission={name: getattr(truth.emission, name) for name in truth.emission.names}
    )
    fit(model, sequences, 20)
    for name, tolerance in (("coefficients", 0.05), ("intercept", 0.15), ("covariance", 0.1)):
        torch.testing.assert_close(getattr(model.emission, name), getattr(truth.emission, name), rtol=0, atol=tolerance)
    assert float((model.decode(sequences).values == states.values).double().mean()) > 0.95


def test_samples_around_means_have_their_moments():
    model = around_mean().set_parameters(
        transition=CHAIN,
        emission={"mean": [[-1.0], [4.0]], "coefficients": [[[[0.6]]]] * 2, "variance": [[0.5], [0.5]]},
    )
    drawn, states = model.sample(200, 200, seed=3, return_states=True)
    for state, mean in enumerate((-1.0, 4.0)):
        values = drawn.values[states.values == state]
        assert float(values.mean()) == pytest.approx(mean, abs=0.05)
        assert float(values.var()) == pytest.approx(0.5 / (1 - 0.36), rel=0.05)


def test_forecasts_are_the_moments_of_samples(rng):
    model = model_of(rng, states=2)
    start = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]])
    moments = model.predict_next([start], steps=3)
    emission, chain = model.emission, model.transition_probs.numpy()
    draws, now = 200_000, rng.choice(2, 200_000, p=model.posterior([start]).filtered[0][-1].numpy())
    past = [np.tile(start[-1], (draws, 1)), np.tile(start[-2], (draws, 1))]
    for _ in range(3):
        now = (rng.random(draws) > chain[now, 0]).astype(int)
        lines, noise = emission.coefficients.numpy()[now], np.linalg.cholesky(emission.covariance.numpy())[now]
        value = emission.intercept.numpy()[now] + (noise @ rng.normal(size=(draws, 2, 1)))[..., 0]
        value += (lines[:, 0] @ past[0][..., None] + lines[:, 1] @ past[1][..., None])[..., 0]
        past = [value, past[0]]
    np.testing.assert_allclose(moments.mean[0], value.mean(0), atol=0.05)
    np.testing.assert_allclose(moments.variance[0], value.var(0), rtol=0.03)


# Options and errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Autoregressive(0), "`order` must be a whole number of at least 1, but is 0"),
        (lambda: Autoregressive(1, "round"), "`covariance` must be diagonal"),
        (lambda: Autoregressive(1, before="mean"), "`before` must be missing or zeros"),
        (lambda: Autoregressive(1, ridge=-1), "`ridge` must not be negative"),
        (lambda: Autoregressive(1, tied=["mean"]), "`tied` must name parameters"),
        (lambda: HMM(2, Autoregressive(1, around_mean=True), num_features=2), "must have one column"),
        (
            lambda: HMM(2, Autoregressive(1, around_mean=True), Full(), num_features=1),
            "must be combined with Histories",
        ),
        (lambda: HMM(2, Gaussian(), Histories(), num_features=1), "must be combined with a AroundMean"),
        (lambda: HMM(2, Autoregressive(), num_symbols=3), "must have real columns"),
    ],
)
def test_bad_options_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coefficients": np.zeros((2, 1, 1, 1))}, "`intercept` must be given, too"),
        (
            {"coefficients": [[[[0.0]]], [[[np.inf]]]]},
            "`coefficients` must be finite, but that of state 1, column 0 is inf",
        ),
        ({"rate": 1}, "has the parameters coefficients, intercept, variance, but 'rate'"),
        ({"coefficients": np.zeros((2, 1, 1))}, r"`coefficients` must have shape \(2, 1, 1, 1\)"),
        ({"variance": [[1.0], [0.0]]}, "`variance` must be positive, but that of state 1, column 0 is 0"),
        ({"intercept": [[1.0], [np.nan]]}, "`intercept` must be finite, but that of state 1, column 0 is nan"),
    ],
)
def test_bad_values_are_refused_by_name(values, message):
    whole = {"coefficients": np.zeros((2, 1, 1, 1)), "intercept": np.zeros((2, 1)), "variance": np.ones((2, 1))}
    model = HMM(2, Autoregressive(), num_features=1)
    with pytest.raises(ValueError, match=message):
        model.set_parameters(
            emission=values if message.startswith("`intercept` must be given") else {**whole, **values}
        )


def test_tied_values_must_be_equal():
    model = HMM(2, Autoregressive(tied=["variance"]), num_features=1)
    values = {"coefficients": np.zeros((2, 1, 1, 1)), "intercept": np.zeros((2, 1)), "variance": [[1.0], [2.0]]}
    with pytest.raises(ValueError, match="`variance` must be the same for all states because it is tied"):
        model.set_parameters(emission=values)


def test_an_autoregression_in_a_product_is_the_sum_of_densities(rng):
    sequences = ragged(rng, missing=0.0)
    columns = sequences.values[:, :1], sequences.values[:, 1:]
    single = [
        HMM(2, Autoregressive(), num_features=1).set_parameters(
            emission={
                "coefficients": np.full((2, 1, 1, 1), 0.5),
                "intercept": [[0.0], [1.0]],
                "variance": [[1.0], [2.0]],
            }
        ),
        HMM(2, Gaussian(), num_features=1).set_parameters(
            emission={"mean": [[0.0], [1.0]], "variance": [[1.0], [2.0]]}
        ),
    ]
    product = HMM(2, Product([Autoregressive(), Gaussian()]), num_features=2).set_parameters(
        emission=[{name: getattr(model.emission, name) for name in model.emission.names} for model in single]
    )
    expected = sum(
        model.evidence(0, sequences.with_values(column)).rows() for model, column in zip(single, columns, strict=True)
    )
    torch.testing.assert_close(product.evidence(0, sequences).rows(), expected)
