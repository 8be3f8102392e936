"""Numbers that books and other packages publish. Data that are not in this file are read from LIGHTNING_HMM_DATA."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_hmm import HMM, Autoregressive, Gaussian, Poisson, StandardHMM, fit, inference

# Earthquakes of magnitude 7 and above in the world, 1900 to 2006; numbers of Zucchini and MacDonald.
EARTHQUAKES = [
    13, 14, 8, 10, 16, 26, 32, 27, 18, 32, 36, 24, 22, 23, 22, 18, 25, 21, 21, 14, 8, 11, 14, 23, 18, 17, 19,
    20, 22, 19, 13, 26, 13, 14, 22, 24, 21, 22, 26, 21, 23, 24, 27, 41, 31, 27, 35, 26, 28, 36, 39, 21, 17, 22,
    17, 19, 15, 34, 10, 15, 22, 18, 15, 20, 15, 22, 19, 16, 30, 27, 29, 23, 20, 16, 21, 21, 25, 16, 18, 15, 18,
    14, 10, 15, 8, 15, 6, 11, 8, 7, 18, 16, 13, 12, 13, 20, 15, 16, 12, 18, 15, 16, 13, 15, 16, 11, 11,
]  # fmt: skip
COUNTS = [np.array(EARTHQUAKES, dtype=float)[:, None]]


def table(name: str) -> list[dict[str, str]]:
    """Rows of a published data set."""
    path = Path(os.environ.get("LIGHTNING_HMM_DATA", "")) / "published" / f"{name}.csv"
    if "LIGHTNING_HMM_DATA" not in os.environ or not path.exists():
        pytest.skip(f"LIGHTNING_HMM_DATA has no published/{name}.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def column(name: str, key: str) -> list[np.ndarray]:
    return [np.array([float(row[key]) for row in table(name)])[:, None]]


def earthquakes(rates: list[float], initial: str = "initial") -> HMM:
    size = len(rates)
    matrix = np.full((size, size), 0.1 / max(size - 1, 1))
    np.fill_diagonal(matrix, 0.9 if size > 1 else 1.0)
    model = HMM(size, Poisson(1e-9), initial=initial, num_features=1, iterations_per_epoch=50)
    return model.set_parameters(transition=matrix, emission={"rate": [[rate] for rate in rates]})


@pytest.mark.parametrize(
    ("rates", "initial", "loss", "aic", "bic"),
    [
        ([20.0], "initial", 391.9189, None, None),
        ([15.0, 26.0], "stationary", 342.3183, 692.6365, 703.3278),
        ([15.0, 26.0], "initial", 341.8787, 693.7574, 707.1216),
        ([13.0, 19.0, 29.0], "stationary", 329.4603, 676.9206, 700.976),
        ([13.0, 19.0, 29.0], "initial", 328.5275, 679.055, 708.4561),
        ([11.0, 15.0, 19.0, 29.0], "stationary", 327.8316, 687.6632, 730.4284),
    ],
)
def test_fits_to_the_earthquakes(rates, initial, loss, aic, bic):
    model = fit(earthquakes(rates, initial), COUNTS, 20, 1e-12)
    assert -float(model.score(COUNTS)) == pytest.approx(loss, abs=1e-3)
    size = len(rates)
    assert model.num_free_parameters == size**2 + (size - 1) * (initial == "initial")
    if aic is not None:
        assert model.aic(COUNTS) == pytest.approx(aic, abs=1e-3)
        assert model.bic(COUNTS) == pytest.approx(bic, abs=1e-3)


def test_four_states_reach_at_least_the_published_fit():
    """-326.6749 is a local optimum; its AIC and BIC are 691.3499 and 742.1336."""
    model = fit(earthquakes([11.0, 15.0, 19.0, 29.0]), COUNTS, 20, 1e-12)
    assert -float(model.score(COUNTS)) < 326.6749 + 1e-3
    assert model.aic(COUNTS) < 691.3499 + 2e-3
    assert model.bic(COUNTS) < 742.1336 + 2e-3


def test_states_of_the_earthquakes():
    model = earthquakes([10.0, 20.0, 25.0]).set_parameters(
        [1 / 3] * 3, [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]
    )
    path = "11111333333333333331111222222222222222333333333333322222222222222222333322222222211111111111111222222222211"
    likely = (
        "11111333333333322221111222222222222223333333333333332222231222222222333322222222211111111122111222222222111"
    )
    assert "".join(str(int(state) + 1) for state in model.decode(COUNTS)[0]) == path
    posterior = model.posterior(COUNTS)
    assert "".join(str(int(state) + 1) for state in posterior.smoothed[0].argmax(1)) == likely
    expected = [
        [0.7733048, 0.6413134, 0.5489194, 0.4842436, 0.4389705],
        [0.1259027, 0.1881319, 0.2316923, 0.2621846, 0.2835292],
        [0.1007924, 0.1705547, 0.2193883, 0.2535718, 0.2775003],
    ]
    sequences = model.as_sequences(COUNTS)
    found = [inference.predict(*model.problem(sequences), steps=steps)[0].numpy() for steps in range(1, 6)]
    np.testing.assert_allclose(np.array(found).T, expected, atol=1e-7)


def test_the_umbrella_of_russell_and_norvig():
    model = StandardHMM(2, 2).set_parameters([0.5, 0.5], [[0.7, 0.3], [0.3, 0.7]], [[0.9, 0.1], [0.2, 0.8]])
    days = [[0, 0, 1, 0, 0]]
    assert float(model.score(days)) == pytest.approx(-3.3725, abs=1e-4)
    path = inference.viterbi(*model.problem(model.as_sequences(days)))
    assert path.states.tolist() == [0, 0, 1, 0, 0]
    assert float(path.log_probability) == pytest.approx(-4.4590, abs=1e-4)
    rain = model.posterior(days).smoothed[0][:, 0]
    np.testing.assert_allclose(rain, [0.8673, 0.8204, 0.3075, 0.8204, 0.8673], atol=1e-4)


def test_the_weather():
    model = StandardHMM(2, 3).set_parameters([0.6, 0.4], [[0.7, 0.3], [0.4, 0.6]], [[0.1, 0.4, 0.5], [0.6, 0.3, 0.1]])
    path = inference.viterbi(*model.problem(model.as_sequences([[0, 1, 2]])))
    assert math.exp(float(path.log_probability)) == pytest.approx(0.01344, rel=1e-9)
    # The first state of the table is rainy: walk, shop and clean have the probabilities .1, .4 and .5 there.
    assert path.states.tolist() == [1, 0, 0]


def test_the_federal_funds_rate():
    """MarkovRegression with a common variance, of statsmodels and Stata."""
    rates = column("fedfunds", "rate")
    model = HMM(2, Gaussian("tied", variance_prior=0.0), initial="stationary", num_features=1, iterations_per_epoch=50)
    model.set_parameters(
        transition=[[0.9820939, 1 - 0.9820939], [0.0503587, 1 - 0.0503587]],
        emission={"mean": [[3.70877], [9.556793]], "covariance": [[[2.107562**2]]] * 2},
    )
    assert float(model.score(rates)) == pytest.approx(-508.63592, abs=1e-5)
    assert float(fit(model, rates, 10, 1e-12).score(rates)) > -508.63592 - 1e-5
    fresh = HMM(2, Gaussian("tied", variance_prior=0.0), initial="stationary", num_features=1, iterations_per_epoch=50)
    assert float(fit(fresh, rates, 40, 1e-12).score(rates)) > -508.63592 - 1e-3


def test_hamilton_on_the_growth_of_the_national_product():
    """AR(4) around a switching mean."""
    growth = column("rgnp", "growth")
    model = HMM(2, Autoregressive(4, around_mean=True, variance_prior=0.0), initial="stationary", num_features=1)
    lags = [[[value]] for value in (0.013486, -0.057521, -0.246983, -0.212923)]
    model.set_parameters(
        transition=[[0.754673, 1 - 0.754673], [0.095915, 1 - 0.095915]],
        emission={
            "mean": [[-0.358811], [1.163516]],
            "coefficients": [lags] * 2,
            "variance": [[math.exp(-0.262658) ** 2]] * 2,
        },
    )
    assert float(model.score(growth)) == pytest.approx(-181.26339, abs=1e-5)
    assert float(fit(model, growth, 20, 0).score(growth)) > -181.26339 - 1e-5


def test_two_normals_on_the_returns_of_the_dax():
    """Likelihood and Viterbi path of fHMM."""
    returns = column("dax", "logreturn")
    model = HMM(2, Gaussian(variance_prior=0.0), initial="stationary", num_features=1).set_parameters(
        transition=[[0.96904599, 0.03095401], [0.0121246, 0.9878754]],
        emission={
            "mean": [[-1.48923023e-3], [7.45917059e-4]],
            "variance": [[0.02307617**2], [0.00938592**2]],
        },
    )
    assert float(model.score(returns)) == pytest.approx(17403.605268, abs=1e-4)
    path = torch.tensor([int(row["viterbi_2n"]) for row in table("dax")])
    assert torch.equal(model.decode(returns)[0], path)
