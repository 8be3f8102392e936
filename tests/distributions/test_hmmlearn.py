"""Twenty EM steps from the same start give the parameters of hmmlearn, with priors of the same meaning.

For a Gaussian, `covars_prior` is s times the variance of the data, and `covars_weight` has no effect up to 1 (the
dimension for matrices). hmmlearn's prior of the means has no counterpart, and its weight is 0. For counts, the prior
of s steps has `lambdas_prior` s m and `lambdas_weight` s. A Dirichlet prior there is larger by 1 than a pseudocount.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hmmlearn.hmm import GaussianHMM, MultinomialHMM, PoissonHMM

from lightning_hmm import HMM, Emission, Full, Gaussian, Initial, Multinomial, Poisson, Sequences, fit

LENGTHS = [60, 45, 1, 80]
STEPS = 20
COMMON: dict[str, Any] = {
    "n_iter": STEPS,
    "tol": -np.inf,
    "init_params": "",
    "startprob_prior": 1.2,
    "transmat_prior": 1.4,
}


def trained(emission: Emission, values: np.ndarray, peer: Any, **start: np.ndarray) -> HMM:
    """Trains both models from the same start; returns ours."""
    states = len(next(iter(start.values())))
    sequences = Sequences.from_lengths(torch.from_numpy(values.astype(float)), LENGTHS)
    model = HMM(states, emission, Full(0.4), Initial(0.2), num_features=values.shape[1])
    transition = (np.eye(states) + 0.2) / (1 + 0.2 * states)
    model.set_parameters(transition=transition, emission=start)
    model.emission.set_data_stats(sequences)
    peer.startprob_, peer.transmat_ = np.full(states, 1 / states), transition
    model.set_parameters(initial=peer.startprob_)
    assert model.score(sequences).sum().item() == pytest.approx(peer.score(values, LENGTHS), rel=1e-12)
    peer.fit(values, LENGTHS)
    fit(model, sequences, max_epochs=STEPS, tolerance=0)
    np.testing.assert_allclose(model.initial_probs, peer.startprob_, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(model.transition_probs, peer.transmat_, rtol=1e-8)
    return model


@pytest.mark.parametrize(
    ("kind", "theirs"), [("diagonal", "diag"), ("spherical", "spherical"), ("full", "full"), ("tied", "tied")]
)
@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_gaussians(rng, kind, theirs, strength):
    states = rng.integers(0, 3, sum(LENGTHS))
    values = rng.normal(size=(sum(LENGTHS), 2)) @ [[1.0, 0.5], [0.0, 0.6]] + np.array([[0, 0], [3, 1], [1, 4]])[states]
    mean = values[rng.choice(len(values), 3, replace=False)]
    variance = np.tile(values.var(0).mean(), (3, 2)) if kind == "spherical" else np.tile(values.var(0), (3, 1))
    has_matrices = kind in ("full", "tied")
    covariance = np.stack([np.diag(row) for row in variance])
    prior = strength * (np.diag(values.var(0)) if has_matrices else values.var(0))
    peer = GaussianHMM(3, theirs, min_covar=0, means_weight=0, covars_prior=prior, covars_weight=0, **COMMON)
    peer.means_ = mean
    peer.covars_ = {"diag": variance, "spherical": variance[:, 0], "full": covariance, "tied": covariance[0]}[theirs]
    start = {"mean": mean, "covariance" if has_matrices else "variance": covariance if has_matrices else variance}
    model = trained(Gaussian(kind, strength), values, peer, **start)
    np.testing.assert_allclose(model.emission.mean, peer.means_, rtol=1e-8)
    if kind == "spherical":  # hmmlearn repeats the rows of `covars_` after a fit
        np.testing.assert_allclose(model.emission.variance, peer._covars_, rtol=1e-8)
    else:
        np.testing.assert_allclose(model.emission.covariance, peer.covars_, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("rates", "strength"), [([[1.0, 5.0], [4.0, 3.0]], 1e-300), ([[2.0, 2.0]], 2.0)])
def test_counts(rng, rates, strength):
    """hmmlearn compares the prior with the visits of all states, so that it is the same for one state only."""
    values = rng.poisson(np.array([[1, 8], [6, 2]])[rng.integers(0, 2, sum(LENGTHS))])
    mean = (values.sum(0) + 0.5) / (len(values) + 0.5)
    peer = PoissonHMM(len(rates), lambdas_prior=strength * mean, lambdas_weight=strength, **COMMON)
    peer.lambdas_ = np.array(rates)
    model = trained(Poisson(strength), values, peer, rate=peer.lambdas_)
    np.testing.assert_allclose(model.emission.rate, peer.lambdas_, rtol=1e-8)


@pytest.mark.filterwarnings("ignore")
def test_vectors_of_counts(rng):
    """hmmlearn has no prior of the probabilities. Their sums are equal at all steps, as hmmlearn requires for a fit."""
    probs = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    values = np.stack([rng.multinomial(8, probs[state]) for state in rng.integers(0, 2, sum(LENGTHS))])
    peer = MultinomialHMM(2, n_trials=8, **COMMON)
    peer.emissionprob_ = np.array([[0.5, 0.3, 0.2], [0.3, 0.2, 0.5]])
    model = trained(Multinomial(prior_steps=1e-300), values, peer, probs=peer.emissionprob_)
    np.testing.assert_allclose(model.emission.probs, peer.emissionprob_, rtol=1e-8)
