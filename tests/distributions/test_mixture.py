"""Mixtures against scipy and hmmlearn: densities, EM steps, tied components, starting values, samples and bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hmmlearn.hmm import GMMHMM
from scipy import special, stats

from lightning_hmm import HMM, Categorical, Gaussian, GaussianMixture, Mixture, Poisson, Sequences, StudentT, fit
from lightning_hmm.optim import BaumWelch
from tests.helpers import random_vectors

K, C, D = 2, 3, 2


def objectives(model, sequences, steps):
    model.initialize(sequences)
    optimizer, found = BaumWelch(model.distributions), []
    for _ in range(steps):
        counts = model._e_step(sequences)
        found.append(model.train_likelihood.compute() * sequences.num_observed() + optimizer.log_prior())
        model.train_likelihood.reset()
        optimizer.step(counts=counts)
    return torch.stack(found)


def gaussian_values(rng):
    roots = rng.normal(size=(K, C, D, D))
    return rng.dirichlet(np.ones(C), K), 2 * rng.normal(size=(K, C, D)), roots @ roots.swapaxes(-1, -2) + np.eye(D)


@pytest.mark.filterwarnings("ignore:.*rows of .* got no counts")  # a component with a weight of zero
def test_densities_are_sums_over_the_components(rng):
    weights, mean, covariance = gaussian_values(rng)
    weights[1] = [0.0, 0.4, 0.6]
    model = HMM(K, GaussianMixture(C, "full"), num_features=D)
    model.set_parameters(emission={"weights": weights, "mean": mean, "covariance": covariance})
    values = rng.normal(size=(40, D))
    values[0] = 1e9, -1e9
    values[rng.random(values.shape) < 0.2] = np.nan
    values[5] = np.nan
    found = model.evidence(0, Sequences.from_list([torch.from_numpy(values)])).rows().detach().numpy()
    for t, y in enumerate(values):
        seen = ~np.isnan(y)
        for k in range(K):
            terms = [
                stats.multivariate_normal(mean[k, c][seen], covariance[k, c][np.ix_(seen, seen)]).logpdf(y[seen])
                for c in range(C)
                if seen.any()
            ]
            expected = special.logsumexp(terms, b=weights[k]) if seen.any() else 0.0
            assert found[t, k] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(model.emission.component.mean, torch.from_numpy(mean))
    torch.testing.assert_close(model.emission.weights, torch.from_numpy(weights))
    fitted = fit(model, [rng.normal(size=(200, D))], 3, 0)
    assert float(fitted.emission.weights[1, 0]) == 0.0


@pytest.mark.parametrize("theirs", ["diag", "spherical", "full", "tied"])
def test_em_agrees_with_hmmlearn(rng, theirs):
    """Their covariances are those about the old means, so the likelihood of ours is at least as high."""
    values = rng.normal(size=(240, D)) + 3 * rng.integers(0, 3, (240, 1))
    lengths = [40] * 6
    weights, _, full = gaussian_values(rng)
    mean = values[rng.permutation(240)[: K * C]].reshape(K, C, D)
    given = {"diag": np.einsum("kcii->kci", full), "spherical": full[:, :, 0, 0], "full": full, "tied": full[:, 0]}
    ours = {"diag": given["diag"], "full": full, "tied": np.repeat(full[:, :1], C, 1)}
    ours["spherical"] = np.repeat(given["spherical"][..., None], D, -1)
    kind = {"diag": "diagonal", "spherical": "spherical"}.get(theirs, "full")
    peer = GMMHMM(K, C, covariance_type=theirs, n_iter=1, init_params="", tol=-np.inf, min_covar=0)
    peer.startprob_, peer.transmat_ = np.array([0.4, 0.6]), np.array([[0.7, 0.3], [0.2, 0.8]])
    peer.weights_, peer.means_, peer.covars_ = weights, mean, given[theirs]
    model = HMM(K, GaussianMixture(C, kind, variance_prior=0.0), num_features=D)
    name = "covariance" if kind == "full" else "variance"
    emission = {"weights": weights, "mean": mean, name: ours[theirs]}
    model.set_parameters(peer.startprob_, peer.transmat_, emission)
    sequences = Sequences.from_lengths(torch.from_numpy(values), lengths)
    assert float(model.score(sequences).sum()) == pytest.approx(peer.score(values, lengths), rel=1e-11)
    peer.fit(values, lengths)
    fit(model, sequences, 1, 0)
    np.testing.assert_allclose(model.emission.weights, peer.weights_, rtol=1e-10)
    np.testing.assert_allclose(model.emission.mean, peer.means_, rtol=1e-10)
    peer.n_iter = 19
    peer.fit(values, lengths)
    fit(model, sequences, 19, 0)
    assert float(model.score(sequences).sum()) >= peer.score(values, lengths) - 1e-9


@pytest.mark.parametrize(
    "make",
    [
        lambda: GaussianMixture(3, "full", 0.1, 0.2),
        lambda: GaussianMixture(2, tied=["weights"]),
        lambda: GaussianMixture(3, tied=["components"], pseudocount=0.5),
        lambda: GaussianMixture(2, frozen=["weights"]),
        lambda: GaussianMixture(2, frozen=["components"]),
        lambda: Mixture(Gaussian("full", 0.1, tied=["covariance"]), 2),
        lambda: Mixture(StudentT(0.1, tied=["df"]), 2),
    ],
)
def test_em_never_decreases(rng, make):
    """With missing values and restarts. Tied and frozen parameters are so."""
    sequences = random_vectors(rng)
    model = HMM(2, make(), num_features=2, restarts=2)
    model.initialize(sequences)
    emission = model.emission
    before = emission.weights, emission.mean if "mean" in emission.names else emission.loc
    gains = objectives(model, sequences, 12).diff(dim=0)
    assert float(gains.min()) > -1e-8
    assert float(gains[0].min()) > 0
    after = emission.weights, emission.mean if "mean" in emission.names else emission.loc
    for number, option in enumerate(("weights", "components")):
        assert torch.equal(after[number], before[number]) == (option in emission.frozen)
        is_equal = torch.equal(after[number][0], after[number][1])
        assert is_equal == (
            option in emission.tied or (option == "weights" and option in emission.frozen)
        )  # frozen at 1/2


def test_tied_and_frozen_parameters_are_counted_once():
    for options, wanted in (
        ({}, 2 * 2 + 2 * 3 * 4),
        ({"tied": ["weights"]}, 2 + 2 * 3 * 4),
        ({"tied": ["components"]}, 2 * 2 + 3 * 4),
        ({"frozen": ["components"]}, 2 * 2),
        ({"frozen": ["weights"]}, 2 * 3 * 4),
    ):
        assert HMM(2, GaussianMixture(3, **options), num_features=2).emission.num_free_parameters(0) == wanted


def test_training_starts_from_the_clusters_of_each_state(rng):
    """Each state has two modes that are far apart; the objective is then that of the parameters of the data."""
    truth = HMM(2, GaussianMixture(2), num_features=1)
    values = {"weights": [[0.5, 0.5], [0.3, 0.7]], "mean": [[[-8.0], [-5.0]], [[5.0], [8.0]]]}
    truth.set_parameters(None, [[0.9, 0.1], [0.1, 0.9]], {**values, "variance": np.full((2, 2, 1), 0.2)})
    data = truth.sample(5, 200, seed=1)
    model = fit(HMM(2, GaussianMixture(2), num_features=1), data, 10, 0)
    assert sorted(model.emission.mean.flatten().tolist()) == pytest.approx([-8, -5, 5, 8], abs=0.15)
    assert float(model.score(data).sum()) > float(truth.score(data).sum())


@pytest.mark.parametrize("tied", [(), ("components",)])
def test_samples_have_the_moments_that_are_predicted(tied):
    model = HMM(2, Mixture(Poisson(), 2, tied=tied), num_features=2)
    rate = np.array([[[1.0, 2.0], [9.0, 3.0]], [[4.0, 4.0], [20.0, 1.0]]])
    rate = np.tile(rate[:1], (2, 1, 1)) if tied else rate
    model.set_parameters(emission={"weights": [[0.3, 0.7], [0.9, 0.1]], "rate": rate})
    states = torch.arange(2).repeat_interleave(50_000)
    drawn = model.emission.sample(states, torch.Generator().manual_seed(0))
    for state in range(2):
        mean, variance = (moment[state] for moment in model.emission.moments())
        part = drawn[states == state]
        assert bool(((part.mean(0) - mean).abs() < 5 * (variance / len(part)).sqrt()).all())
        torch.testing.assert_close(part.var(0), variance, rtol=0.05, atol=0)


def made(**values):
    model = HMM(2, GaussianMixture(2), num_features=1)
    return model.set_parameters(emission={"weights": [[0.5, 0.5]] * 2, "variance": np.ones((2, 2, 1)), **values})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(Gaussian(), 0), "`num_components` must be a whole number of at least 1, but is 0"),
        (lambda: Mixture(Categorical(), 2), "`component` must be an emission with vectors, but Categorical is not"),
        (lambda: GaussianMixture(2, tied=["mean"]), r"\(weights, components\), but names 'mean'"),
        (lambda: made(), "`mean` must be given, too"),
        (lambda: made(rate=1), "has the parameters weights, mean, variance, but 'rate' was given"),
        (lambda: made(weights=[[0.5, 0.6]] * 2, mean=np.zeros((2, 2, 1))), "`weights` rows must sum to 1"),
        (lambda: made(mean=np.zeros((2, 1))), r"`mean` must have shape \(2, 2, 1\), but has \(2, 1\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
