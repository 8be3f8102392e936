"""The same models as in hmmlearn, scikit-learn and scipy, which are run on the same data."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from experiments.families.animals import FILE
from lightning_hmm import (
    HMM,
    Beta,
    Emission,
    Exponential,
    Gamma,
    Gaussian,
    GaussianMixture,
    Geometric,
    LogNormal,
    Multinomial,
    NegativeBinomial,
    Poisson,
    Regression,
    Sequences,
    StudentT,
    VonMises,
    Weibull,
    fit,
)

# Kinds of emissions of hmmlearn, with their names in the table.
KINDS = {kind: f"Gaussian {kind}" for kind in ("diag", "spherical", "full", "tied")} | {
    "Poisson": "Poisson",
    "Multinomial": "Multinomial",
}


def likelihood(model: HMM, sequences: Any) -> float:
    """Returns the log-likelihood of all sequences."""
    return float(model.score(sequences).sum())


def trained(model: HMM, data: Any, max_epochs: int, tolerance: float = 1e-12, **options: Any) -> HMM:
    """Returns the model after EM, without the warning that training ends before convergence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(model, data, max_epochs=max_epochs, tolerance=tolerance, **options)


def animals(*names: str) -> np.ndarray:
    """Returns the rows of `configs/families/animals.csv` in which the columns are observed."""
    with FILE.open() as lines:
        rows = [[row[name] for name in names] for row in csv.DictReader(lines)]
    return np.array([[float(entry) for entry in row] for row in rows if all(row)])


def hmmlearn_model(kind: str, seed: int = 0) -> tuple[Any, HMM, np.ndarray]:
    """Returns a model of hmmlearn, ours with the same parameters, and data."""
    from hmmlearn import hmm

    rng = np.random.default_rng(seed)
    states, size = 3, 4
    initial, transition = rng.dirichlet(np.ones(states)), rng.dirichlet(np.ones(states), states)
    options: dict[str, Any] = {"init_params": "", "n_iter": 20, "tol": -np.inf}
    if kind == "Poisson":
        rates = rng.uniform(1, 9, (states, size))
        theirs = hmm.PoissonHMM(states, lambdas_prior=0, lambdas_weight=0, **options)
        theirs.lambdas_, emission, values = rates, {"rate": rates}, rng.poisson(rates[rng.integers(states, size=600)])
        ours: Any = Poisson(prior_steps=1e-12)
    elif kind == "Multinomial":
        probs = rng.dirichlet(np.ones(size), states)
        theirs = hmm.MultinomialHMM(states, n_trials=8, **options)
        theirs.emissionprob_, emission = probs, {"probs": probs}
        values = np.array([rng.multinomial(8, probs[state]) for state in rng.integers(states, size=600)])
        ours = Multinomial(prior_steps=1e-12)
    else:
        means, factors = 2 * rng.normal(size=(states, size)), rng.normal(size=(states, size, 9))
        covariance = factors @ factors.transpose(0, 2, 1) / 9
        theirs = hmm.GaussianHMM(states, kind, min_covar=0, covars_prior=0, covars_weight=0, **options)
        ours = Gaussian({"diag": "diagonal"}.get(kind, kind), variance_prior=0.0)
        covariance = covariance[:1].repeat(states, 0) if kind == "tied" else covariance
        variances = covariance.diagonal(axis1=1, axis2=2)
        variances = np.repeat(variances[:, :1], size, 1) if kind == "spherical" else variances
        theirs.means_ = means
        theirs.covars_ = {"full": covariance, "tied": covariance[0], "diag": variances, "spherical": variances[:, 0]}[
            kind
        ]
        spread = {"covariance": covariance} if kind in ("full", "tied") else {"variance": variances}
        emission, values = (
            {"mean": means, **spread},
            means[rng.integers(states, size=600)] + rng.normal(size=(600, size)),
        )
    theirs.startprob_, theirs.transmat_, theirs.n_features = initial, transition, size
    model = HMM(states, ours, num_features=size).set_parameters(initial, transition, emission)
    return theirs, model, values


def after_20_iterations(kind: str, ours: bool) -> float:
    """Returns the log-likelihood after 20 iterations of EM from the same parameters, ours or that of hmmlearn."""
    theirs, model, values = hmmlearn_model(kind)
    lengths = [200, 300, 100]
    if not ours:
        return float(theirs.fit(values, lengths).score(values, lengths))
    trained(model, values, 20, 0.0, lengths=lengths)
    return likelihood(model, Sequences.from_lengths(values.astype(float), lengths))


def mixture_of_hmmlearn(kind: str, ours: bool) -> float:
    """Returns the log-likelihood of a model whose states have mixtures of two Gaussians, at the same parameters."""
    from hmmlearn import hmm

    rng = np.random.default_rng(0)
    states, components, size = 3, 2, 4
    values, lengths = rng.normal(size=(600, size)), [200, 300, 100]
    initial, transition = rng.dirichlet(np.ones(states)), rng.dirichlet(np.ones(states), states)
    weights, mean = rng.dirichlet(np.ones(components), states), rng.normal(size=(states, components, size))
    factors = rng.normal(size=(states, components, size, 9))
    covariance = factors @ factors.swapaxes(2, 3) / 9
    variance = covariance.diagonal(axis1=2, axis2=3)
    if not ours:
        theirs = hmm.GMMHMM(states, components, covariance_type=kind, init_params="")
        theirs.startprob_, theirs.transmat_, theirs.weights_, theirs.means_ = initial, transition, weights, mean
        theirs.covars_, theirs.n_features = covariance if kind == "full" else variance, size
        return float(theirs.score(values, lengths))
    emission = GaussianMixture(components, "full" if kind == "full" else "diagonal")
    spread = {"covariance": covariance} if kind == "full" else {"variance": variance}
    model = HMM(states, emission, num_features=size)
    model.set_parameters(initial, transition, {"weights": weights, "mean": mean, **spread})
    return likelihood(model, Sequences.from_lengths(values, lengths))


def regression(family: str, column: str, ours: bool) -> float:
    """Returns the coefficient of a regression without a prior of a column on the tide, with one state."""
    from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor

    data = animals(column, "tide")
    if ours:
        emission = Regression(family, 1, coefficient_prior=1e-10)
        model = trained(HMM(1, emission, num_features=1), Sequences.from_list([data[:, :1]], inputs=[data[:, 1:]]), 3)
        return float(model.emission.coefficients)
    peers = {
        "gaussian": lambda: LinearRegression(),
        "bernoulli": lambda: LogisticRegression(C=1e10, tol=1e-12, max_iter=10000),
        "poisson": lambda: PoissonRegressor(alpha=0, tol=1e-12, max_iter=10000),
    }
    return float(peers[family]().fit(data[:, 1:], data[:, 0]).coef_.item())


def mixture_of_sklearn(ours: bool) -> float:
    """Returns the log-likelihood of two columns under a mixture of three Gaussians, at the parameters of their fit."""
    from sklearn.mixture import GaussianMixture as Peer

    data = animals("heart_rate", "temperature")
    peer = Peer(3, random_state=0).fit(data)
    if not ours:
        return float(peer.score_samples(data).sum())
    model = HMM(1, GaussianMixture(3, "full"), num_features=2)
    emission = {"weights": peer.weights_[None], "mean": peer.means_[None], "covariance": peer.covariances_[None]}
    return likelihood(model.set_parameters(emission=emission), [data])


# Families with the column that they are fitted to, and the distribution of scipy with its fixed arguments.
FITS: dict[str, tuple[Callable[[], Emission], str, Any, dict[str, float]]] = {
    "Exponential": (lambda: Exponential(1e-12), "pause", stats.expon, {"floc": 0}),
    "Gamma": (lambda: Gamma(1e-12), "step", stats.gamma, {"floc": 0}),
    "LogNormal": (lambda: LogNormal(1e-12), "step", stats.lognorm, {"floc": 0}),
    "Weibull": (lambda: Weibull(1e-12), "depth", stats.weibull_min, {"floc": 0}),
    "Beta": (lambda: Beta(1e-12), "submerged", stats.beta, {"floc": 0, "fscale": 1}),
    "VonMises": (lambda: VonMises(1e-12), "angle", stats.vonmises, {"fscale": 1}),
    "StudentT": (lambda: StudentT(1e-12), "random numbers", stats.t, {}),
}


def maximum(family: str, ours: bool) -> float:
    """Returns the log-likelihood of a column at the estimates of a family, with one state."""
    make, name, peer, fixed = FITS[family]
    data = stats.t(4).rvs((600, 1), random_state=0) if name == "random numbers" else animals(name)
    if not ours:
        estimates = peer.fit(data[:, 0], **fixed)
        return float(peer.logpdf(data[:, 0], *estimates).sum())
    return likelihood(trained(HMM(1, make(), num_features=1), [data], 2000, 1e-14), [data])


def probability(family: str, ours: bool) -> float:
    """Returns the log-probability of the captures at given parameters, with one state."""
    data = animals("captures")
    peers = {
        "NegativeBinomial": (NegativeBinomial, stats.nbinom(1.5, 0.4), {"total_count": [[1.5]], "probs": [[0.6]]}),
        "Geometric": (Geometric, stats.geom(0.3, loc=-1), {"probs": [[0.3]]}),
        "Poisson": (Poisson, stats.poisson(2.5), {"rate": [[2.5]]}),
    }
    make, peer, emission = peers[family]
    if not ours:
        return float(peer.logpmf(data).sum())
    return likelihood(HMM(1, make(), num_features=1).set_parameters(emission=emission), [data])


def _rows(package: str, model: str, quantity: str, function: Callable[..., float], *arguments: str) -> tuple[Any, ...]:
    return package, model, quantity, partial(function, *arguments, False), partial(function, *arguments, True)


# Package, model, quantity, and the functions that compute their number and ours.
COMPARISONS = [
    *(
        _rows("hmmlearn", f"random vectors, {name}", "log L after 20 iterations", after_20_iterations, kind)
        for kind, name in KINDS.items()
    ),
    *(
        _rows("hmmlearn", f"random vectors, mixtures of Gaussians, {kind}", "log L", mixture_of_hmmlearn, kind)
        for kind in ("diag", "full")
    ),
    *(
        _rows("scikit-learn", f"animals, {column} on tide, {family}", "coefficient", regression, family, column)
        for family, column in (("gaussian", "heart_rate"), ("bernoulli", "ashore"), ("poisson", "dives"))
    ),
    _rows("scikit-learn", "animals, mixture of three Gaussians", "log L", mixture_of_sklearn),
    *(_rows("scipy", f"{FITS[name][1]}, {name}", "fitted log L", maximum, name) for name in FITS),
    *(
        _rows("scipy", f"animals, captures, {name}", "log L", probability, name)
        for name in ("NegativeBinomial", "Geometric", "Poisson")
    ),
]
