"""Gaussians with tied or frozen parameters, against scipy's optimizer and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from lightning_hmm import HMM, Gaussian, Sequences, fit

KINDS = ("diagonal", "spherical", "full", "tied")
CHOICES = [
    ((), ("mean",)),
    (("mean",), ()),
    (("spread",), ()),
    (("mean", "spread"), ()),
    ((), ("spread",)),
    (("spread",), ("mean",)),
    (("mean",), ("spread",)),
]


def named(kind: str, choice: tuple[str, ...]) -> list[str]:
    spread = "covariance" if kind in ("full", "tied") else "variance"
    return [spread if name == "spread" else name for name in choice]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tied", "frozen"), CHOICES)
def test_an_m_step_is_the_optimum_of_scipy(rng, kind, tied, frozen):
    """With the prior. The M-step is repeated, because one with a tied mean updates mean and covariance in turn."""
    values, gamma = rng.normal(size=(60, 2)) @ [[1.0, 0.4], [0.0, 2.0]] + [100.0, 0.0], rng.dirichlet([1, 1], 60)
    model = HMM(2, Gaussian(kind, 5.0, named(kind, tied), named(kind, frozen)), num_features=2)
    emission, sequences = model.emission, Sequences.from_list([torch.from_numpy(values)])
    mean = np.array([[99.0, 0.0], [101.0, 0.5]]) if "mean" not in tied else np.array([[99.0, 0.3]] * 2)
    matrix = np.array([[[1.0, 0.3], [0.3, 2.0]], [[3.0, 0.0], [0.0, 1.0]]])
    matrix = matrix[[0, 0]] if "spread" in tied or kind == "tied" else matrix
    start = {"diagonal": np.einsum("kii->ki", matrix), "spherical": np.repeat(matrix[:, :1, 0], 2, 1)}.get(kind, matrix)
    (spread_name,) = named(kind, ("spread",))
    model.set_parameters(emission={"mean": mean, spread_name: start})
    emission.set_data_stats(sequences)
    before = {name: getattr(emission, name) for name in emission.names}
    evidence = emission.evidence(emission.natural(0), sequences)
    statistics = emission.statistics(evidence, evidence.pull(torch.from_numpy(gamma)), emission.natural(0))
    for _ in range(50):
        emission.maximize([statistics[0][None]])
    for name in emission.frozen:
        assert torch.equal(getattr(emission, name), before[name])
    for name in emission.tied:
        assert torch.equal(getattr(emission, name)[0], getattr(emission, name)[1])

    shares_spread = "spread" in tied or kind == "tied"
    variance = np.diag(values.var(0))

    def objective(means: np.ndarray, matrices: np.ndarray) -> float:
        total = sum(gamma[:, k] @ stats.multivariate_normal(means[k], matrices[k]).logpdf(values) for k in range(2))
        traces = np.array([np.trace(np.linalg.solve(each, variance)) for each in matrices])
        return total - 2.5 * (traces[0] if shares_spread else traces.sum())

    def unpacked(place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rest = list(place)
        means, matrices = before["mean"].numpy(), emission.covariance.numpy()
        if "mean" not in frozen:
            number = 1 if "mean" in tied else 2
            means = np.array([rest.pop(0) for _ in range(2 * number)]).reshape(number, 2)[[0, number - 1]]
        if "spread" not in frozen:
            number, found = (1 if shares_spread else 2), []
            for _ in range(number):
                a, b = rest.pop(0), (0.0 if kind == "spherical" else rest.pop(0))
                b = a if kind == "spherical" else b
                c = rest.pop(0) if kind in ("full", "tied") else 0.0
                root = np.array([[np.exp(a), 0.0], [c, np.exp(b)]])
                found.append(root @ root.T)
            matrices = np.array(found)[[0, number - 1]]
        return means, matrices

    size = 0 if "mean" in frozen else 2 if "mean" in tied else 4
    place = [100.0, 0.0] * (size // 2)
    if "spread" not in frozen:
        place += [0.2] * ({"diagonal": 2, "spherical": 1}.get(kind, 3) * (1 if shares_spread else 2))
    best = optimize.minimize(lambda place: -objective(*unpacked(place)), place, method="BFGS", options={"gtol": 1e-7})
    means, matrices = unpacked(best.x)
    assert objective(emission.mean.numpy(), emission.covariance.numpy()) >= -best.fun - 1e-8
    np.testing.assert_allclose(emission.mean, means, rtol=1e-5)
    np.testing.assert_allclose(emission.covariance, matrices, rtol=1e-3, atol=1e-4)
    assert emission.num_free_parameters(0) == len(place)
    prior = float(emission.log_prior())
    traces = np.trace(np.linalg.solve(emission.covariance.numpy(), variance), axis1=1, axis2=2)
    assert prior == pytest.approx(-2.5 * (traces[0] if shares_spread else traces.sum()))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_can_be_set_before_the_others_are_known(rng, kind):
    values = [rng.normal(size=(80, 2)) * [[1.0, 5.0]] * np.where(np.arange(80) < 40, 1, 4)[:, None]]
    values[0][rng.random((80, 2)) < 0.1] = np.nan
    model = HMM(2, Gaussian(kind, frozen=["mean"]), num_features=2, restarts=2)
    model.set_parameters(emission={"mean": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="The Gaussian emission has no values yet"):
        model.sample(1, 3)
    fit(model, values, max_epochs=5, tolerance=0)
    assert torch.equal(model.emission.mean, torch.zeros(2, 2).double())
    assert bool((model.emission.variance[:, 0] != 1).all())
    spread = "covariance" if kind in ("full", "tied") else "variance"
    model = fit(HMM(2, Gaussian(kind, tied=[spread]), num_features=2), values, max_epochs=5, tolerance=0)
    assert torch.equal(model.emission.covariance[0], model.emission.covariance[1])
    different = getattr(model.emission, spread).clone()
    different[1] *= 2
    with pytest.raises(ValueError, match=f"`{spread}` must be the same for all states because it is tied"):
        model.set_parameters(emission={spread: different})


def test_a_tied_covariance_has_one_name_more():
    """`Gaussian("tied")` and full covariances that are tied are the same model."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(50, 2))]
    one, other = (
        fit(HMM(2, emission, num_features=2), values, max_epochs=4, tolerance=0)
        for emission in (Gaussian("tied", 0.3), Gaussian("full", 0.3, tied=["covariance"]))
    )
    assert torch.equal(one.emission.covariance, other.emission.covariance)
    assert one.num_free_parameters == other.num_free_parameters
