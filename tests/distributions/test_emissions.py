"""Emissions against other libraries, brute force and closed forms.

The tests cover densities, EM steps, missing values, initialization, samples, priors and errors.
"""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hmmlearn.hmm import GaussianHMM, PoissonHMM
from scipy import stats

from lightning_hmm import (
    DMCHMM,
    HMM,
    Categorical,
    Column,
    Full,
    Gaussian,
    Poisson,
    Product,
    Sequences,
    StandardHMM,
    TorchEmission,
    fit,
)
from lightning_hmm.columns import feature_columns
from lightning_hmm.inference import Quadratic, Rows
from lightning_hmm.optim import BaumWelch
from tests.helpers import random_vectors

COVARIANCES = ("diagonal", "spherical", "full", "tied")


def random_covariances(rng, kind, states, size):
    roots = rng.normal(size=(states, size, size))
    full = roots @ roots.swapaxes(1, 2) + np.eye(size)
    return {
        "full": full,
        "tied": np.repeat(full[:1], states, 0),
        "diagonal": np.einsum("kii->ki", full),
        "spherical": np.repeat(full[:, :1, 0], size, 1),
    }[kind]


def gaussian_model(rng, kind, states=3, size=2, variance_prior=0.0, **options):
    model = HMM(states, Gaussian(kind, variance_prior=variance_prior), num_features=size, **options)
    name = "covariance" if kind in ("full", "tied") else "variance"
    return model.set_parameters(
        emission={"mean": rng.normal(size=(states, size)), name: random_covariances(rng, kind, states, size)}
    )


def densities(model, values):
    """(steps, K) by scipy, over the observed entries of each step."""
    mean, matrix = model.emission.mean.numpy(), model.emission.covariance.numpy()
    rows = np.zeros((len(values), len(mean)))
    for t, y in enumerate(values):
        seen = ~np.isnan(y)
        for k in range(len(mean)):
            if seen.any():
                rows[t, k] = stats.multivariate_normal(mean[k][seen], matrix[k][np.ix_(seen, seen)]).logpdf(y[seen])
    return rows


@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_gaussian_densities_are_those_of_scipy(rng, kind, missing):
    model, sequences = gaussian_model(rng, kind), random_vectors(rng, missing=missing)
    evidence = model.evidence(0, sequences)
    np.testing.assert_allclose(
        evidence.rows().detach(), densities(model, sequences.values.numpy()), rtol=1e-10, atol=1e-10
    )
    assert isinstance(evidence, Rows if missing and kind in ("full", "tied") else Quadratic)


@pytest.mark.parametrize(
    ("kind", "theirs"), [("diagonal", "diag"), ("spherical", "spherical"), ("full", "full"), ("tied", "tied")]
)
def test_em_steps_are_those_of_hmmlearn(rng, kind, theirs):
    states, size, lengths = 3, 2, [40, 25, 1, 60]
    model = gaussian_model(rng, kind, states, size)
    values = rng.normal(size=(sum(lengths), size)) * 2
    sequences = Sequences.from_lengths(torch.from_numpy(values), lengths)
    peer = GaussianHMM(states, theirs, init_params="")
    peer.startprob_, peer.transmat_, peer.means_ = (
        model.initial_probs.numpy(),
        model.transition_probs.numpy(),
        model.emission.mean.numpy(),
    )
    covariance = model.emission.covariance.numpy()
    peer.covars_ = {
        "diag": model.emission.variance.numpy(),
        "spherical": covariance[:, 0, 0],
        "full": covariance,
        "tied": covariance[0],
    }[theirs]
    assert model.score(sequences).sum().item() == pytest.approx(peer.score(values, lengths), rel=1e-12)
    fit(model, sequences, 6, 0)
    _hmmlearn_em(peer, values, lengths, kind)
    np.testing.assert_allclose(model.transition_probs, peer.transmat_, rtol=1e-9)
    np.testing.assert_allclose(model.emission.mean, peer.means_, rtol=1e-9)
    np.testing.assert_allclose(model.emission.covariance, peer.covars_, rtol=1e-8, atol=1e-12)


def _hmmlearn_em(peer, values, lengths, kind):
    """hmmlearn's E-steps with maximum-likelihood M-steps, because the flat limit of its priors differs by type."""
    size = values.shape[1]
    for _ in range(6):
        starts, pairs, posteriors = (
            np.zeros(peer.n_components),
            np.zeros((peer.n_components,) * 2),
            peer.predict_proba(values, lengths),
        )
        first = np.cumsum([0, *lengths])
        frames = peer._compute_log_likelihood(values)
        for begin, end in pairwise(first):
            starts += posteriors[begin]
            pairs += _expected_pairs(peer.startprob_, peer.transmat_, frames[begin:end])
        weights = posteriors.sum(0)
        means = posteriors.T @ values / weights[:, None]
        about = values[:, None] - means
        scatter = np.einsum("tk,tki,tkj->kij", posteriors, about, about)
        peer.startprob_, peer.transmat_, peer.means_ = starts / starts.sum(), pairs / pairs.sum(1, keepdims=True), means
        full = scatter / weights[:, None, None]
        peer.covars_ = {
            "full": full,
            "tied": scatter.sum(0) / weights.sum(),
            "diagonal": np.einsum("kii->ki", full),
            "spherical": np.einsum("kii->k", full) / size,
        }[kind]


def _expected_pairs(initial, transition, log_rows):
    """Expected transitions of one sequence, by plain forward-backward."""
    rows = np.exp(log_rows - log_rows.max(1, keepdims=True))
    alpha, beta = [initial * rows[0]], [np.ones(len(initial))]
    alpha[0] /= alpha[0].sum()
    for row in rows[1:]:
        alpha.append(alpha[-1] @ transition * row)
        alpha[-1] /= alpha[-1].sum()
    for row in rows[:0:-1]:
        beta.insert(0, transition @ (row * beta[0]))
        beta[0] /= beta[0].sum()
    total = np.zeros_like(transition)
    for t in range(len(rows) - 1):
        pair = alpha[t][:, None] * transition * (rows[t + 1] * beta[t + 1])
        total += pair / pair.sum()
    return total


def test_poisson_em_is_that_of_hmmlearn(rng):
    lengths = [50, 30]
    values = rng.poisson(4, size=(80, 2)).astype(float)
    model = HMM(2, Poisson(prior_steps=1e-300), num_features=2).set_parameters(
        emission={"rate": [[1.0, 2.0], [5.0, 4.0]]}
    )
    peer = PoissonHMM(2, n_iter=8, tol=-math.inf, init_params="", lambdas_prior=0, lambdas_weight=0)
    peer.startprob_, peer.transmat_, peer.lambdas_ = (
        model.initial_probs.numpy(),
        model.transition_probs.numpy(),
        model.emission.rate.numpy(),
    )
    sequences = Sequences.from_lengths(torch.from_numpy(values), lengths)
    assert model.score(sequences).sum().item() == pytest.approx(peer.score(values.astype(int), lengths), rel=1e-12)
    peer.fit(values.astype(int), lengths)
    fit(model, sequences, 8, 0)
    np.testing.assert_allclose(model.emission.rate, peer.lambdas_, rtol=1e-8)
    np.testing.assert_allclose(model.transition_probs, peer.transmat_, rtol=1e-8)


@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_the_objective_never_decreases_with_missing_values_far_from_zero(rng, kind, offset):
    sequences = random_vectors(rng, num_sequences=8, longest=30, missing=0.2)
    sequences = sequences.with_values(sequences.values + offset)
    model = HMM(3, Gaussian(kind, variance_prior=0.5), num_features=2, restarts=2)
    model.initialize(sequences)
    optimizer, objectives = BaumWelch(model.distributions), []
    for _ in range(15):
        counts = model._e_step(sequences)
        objectives.append(model.train_likelihood.compute() * sequences.num_observed() + optimizer.log_prior())
        model.train_likelihood.reset()
        optimizer.step(counts=counts)
    gains = torch.stack(objectives).diff(dim=0)
    assert float(gains.min()) > -1e-7 * (1 + offset / 1e3)
    assert float(gains[0].min()) > 0


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_missing_entries_are_completed_by_their_conditional_moments(rng, kind):
    """One state, so that an EM step is the classical one for a Gaussian with missing entries."""
    values = rng.normal(size=(30, 3)) @ rng.normal(size=(3, 3))
    values[rng.random((30, 3)) < 0.3] = np.nan
    values[3] = np.nan
    model = HMM(1, Gaussian(kind, variance_prior=0.0), num_features=3)
    mean, matrix = rng.normal(size=3), random_covariances(rng, "full", 1, 3)[0]
    model.set_parameters(emission={"mean": mean[None], "covariance": matrix[None]})
    fit(model, Sequences.from_list([torch.from_numpy(values)]), 1, 0)
    firsts, seconds, count = np.zeros(3), np.zeros((3, 3)), 0
    for y in values:
        seen, hidden = ~np.isnan(y), np.isnan(y)
        if not seen.any():
            continue
        gain = matrix[np.ix_(hidden, seen)] @ np.linalg.inv(matrix[np.ix_(seen, seen)])
        full, spread = y.copy(), np.zeros((3, 3))
        full[hidden] = mean[hidden] + gain @ (y[seen] - mean[seen])
        spread[np.ix_(hidden, hidden)] = matrix[np.ix_(hidden, hidden)] - gain @ matrix[np.ix_(seen, hidden)]
        firsts, seconds, count = firsts + full, seconds + np.outer(full, full) + spread, count + 1
    expected = firsts / count
    np.testing.assert_allclose(model.emission.mean[0], expected, rtol=1e-9)
    np.testing.assert_allclose(model.emission.covariance[0], seconds / count - np.outer(expected, expected), rtol=1e-8)


def product_model(**options):
    parts = {"a, c": Gaussian("full", variance_prior=0.1), "b": Poisson(), "d": Categorical(0.1)}
    columns = [Column("a"), Column("b"), Column("c"), Column("d", "categorical", 3)]
    return HMM(2, Product(parts), columns=columns, **options)


def product_data(rng, missing=0.1):
    values = np.concatenate(
        [rng.normal(size=(60, 1)), rng.poisson(3, (60, 1)), rng.normal(size=(60, 1)), rng.integers(0, 3, (60, 1))], 1
    )
    values[rng.random(values.shape) < missing] = np.nan
    return Sequences.from_lengths(torch.from_numpy(values), [20, 0, 39, 1])


def test_a_product_is_the_sum_of_its_parts(rng):
    model, sequences = product_model(), product_data(rng)
    model.initialize(sequences)
    gaussian, poisson, categorical = model.emission.parts
    values = sequences.values.numpy()
    expected = densities(HMM(2, Gaussian("full"), num_features=2).set_parameters(
        emission={"mean": gaussian.mean, "covariance": gaussian.covariance}), values[:, [0, 2]])  # fmt: skip
    counts, symbols = values[:, 1], values[:, 3]
    expected += np.where(
        np.isnan(counts)[:, None], 0.0, stats.poisson(poisson.rate[:, 0].numpy()).logpmf(np.nan_to_num(counts)[:, None])
    )
    log_probs = np.log(categorical.probs.numpy())
    expected += np.where(np.isnan(symbols)[:, None], 0.0, log_probs[:, np.nan_to_num(symbols).astype(int)].T)
    np.testing.assert_allclose(model.evidence(0, sequences).rows().detach(), expected, rtol=1e-9, atol=1e-9)


def test_products_of_exponential_families_stay_quadratic(rng):
    model = HMM(2, Product([Gaussian(), Poisson(), Gaussian("spherical")]), num_features=3)
    sequences = Sequences.from_list([torch.from_numpy(np.abs(rng.normal(size=(10, 3))).round() + 0.0)])
    model.initialize(sequences)
    evidence = model.evidence(0, sequences)
    assert isinstance(evidence, Quadratic)
    parts = [
        part.evidence(part.natural(0), sequences.with_values(sequences.values[:, [n]])).rows()
        for n, part in enumerate(model.emission.parts)
    ]
    torch.testing.assert_close(evidence.rows(), torch.stack(parts).sum(0))


@pytest.mark.parametrize("make", [*(lambda kind=kind: Gaussian(kind) for kind in COVARIANCES), Poisson])
def test_samples_have_the_moments_that_are_predicted(make):
    emission = make()
    model = HMM(2, emission, num_features=2)
    if isinstance(emission, Poisson):
        model.set_parameters(emission={"rate": [[1.0, 4.0], [9.0, 2.0]]})
    else:
        rng = np.random.default_rng(3)
        name = "covariance" if emission.has_matrices else "variance"
        model.set_parameters(
            emission={"mean": rng.normal(size=(2, 2)), name: random_covariances(rng, emission.kind, 2, 2)}
        )
    states = torch.arange(2).repeat_interleave(40_000)
    drawn = model.emission.sample(states, torch.Generator().manual_seed(0))
    for state in range(2):
        mean, variance = (moment[state] for moment in model.emission.moments())
        part = drawn[states == state]
        assert bool(((part.mean(0) - mean).abs() < 5 * (variance / len(part)).sqrt()).all())
        torch.testing.assert_close(part.var(0), variance, rtol=0.06, atol=0)
    if getattr(emission, "has_matrices", False):
        torch.testing.assert_close(torch.cov(drawn[states == 0].T), model.emission.covariance[0], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize(("mean", "variance"), [(1e9, 1.0), (1000.0, 1e-12)])
def test_parameters_that_are_set_far_from_zero_score_right(kind, mean, variance):
    """Before any training there is no center from data."""
    name, spread = (
        ("covariance", variance * np.eye(2)[None].repeat(2, 0))
        if kind in ("full", "tied")
        else ("variance", np.full((2, 2), variance))
    )
    model = HMM(2, Gaussian(kind), num_features=2).set_parameters(
        emission={"mean": np.full((2, 2), mean), name: spread}
    )
    value = mean + 0.1 * variance**0.5
    expected = 2 * stats.norm(mean, variance**0.5).logpdf(value)
    assert model.score([np.full((1, 2), value)]).item() == pytest.approx(expected, rel=1e-6)


class Laplace(torch.nn.Module):
    def __init__(self, num_states: int, num_columns: int) -> None:
        super().__init__()
        self.loc = torch.nn.Parameter(torch.randn(num_states, num_columns))
        self.log_scale = torch.nn.Parameter(torch.zeros(num_states, num_columns))

    def forward(self, values):
        return torch.distributions.Laplace(self.loc, self.log_scale.exp()).log_prob(values[:, None]).sum(-1)

    def moments(self):
        return self.loc.detach(), 2 * (2 * self.log_scale.detach()).exp()


def test_a_module_of_torch_is_an_emission(rng):
    sequences = Sequences.from_list(
        [torch.from_numpy(rng.laplace(size=(50, 2)) + 4.0 * (np.arange(50)[:, None] // 10 % 2)) for _ in range(6)]
    )
    sequences.values[::9, 0] = torch.nan
    model = HMM(2, TorchEmission(Laplace, m_steps=10), num_features=2, restarts=2)
    model.initialize(sequences)
    scores = []
    for _ in range(8):
        scores.append(float(model.score(sequences).sum()))
        fit(model, sequences, 1, 0)
    assert np.diff(scores).min() > -1e-8
    centers = sorted(model.emission.networks[model.emission.restart].loc.detach().mean(1).tolist())
    np.testing.assert_allclose(centers, [0, 4], atol=0.3)
    assert model.predict_next(sequences).mean.shape == (6, 2)
    with pytest.raises(ValueError, match="must have a method `sample` for this, but Laplace has none"):
        model.sample(1, 3)


def test_a_frozen_module_holds_nothing(rng):
    model = HMM(2, TorchEmission(Laplace), num_features=1, frozen=["emission"])
    fit(model, [rng.normal(size=(20, 1))], 3, 0)
    assert not model.emission._held


def test_too_many_posteriors_make_one_gradient_step(rng):
    sequences = Sequences.from_list([torch.from_numpy(rng.normal(size=(20, 1)))])
    model = HMM(2, TorchEmission(Laplace, most_held=10, learning_rate=0.5), num_features=1)
    model.initialize(sequences)
    network = model.emission.networks[0]
    with torch.no_grad():
        posterior = model.posterior(sequences).smoothed.values
    before = network.loc.detach().clone()
    (gradient,) = torch.autograd.grad((network(sequences.values) * posterior).sum() / 20, [network.loc])
    with pytest.warns(
        UserWarning, match=r"more than 10 posterior .* is a single gradient step with `learning_rate` 0\.5"
    ):
        fit(model, sequences, 1, 0)
    torch.testing.assert_close(network.loc.detach(), before + 0.5 * gradient)


@pytest.mark.filterwarnings("ignore:.*rows of .* got no counts")
def test_priors_keep_parameters_off_the_boundary(rng):
    sequences = Sequences.from_list([torch.zeros(20, 1), torch.full((1, 1), 50.0)])
    for emission in (Gaussian(variance_prior=1e-3), Gaussian("full", variance_prior=1e-3), Poisson()):
        model = fit(HMM(2, emission, num_features=1), sequences, 30, 0)
        mean, variance = model.emission.moments()
        assert bool(mean.isfinite().all() and (variance > 0).all()), emission


def counts():
    return HMM(2, Poisson(), num_features=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian("round"), "`covariance` must be diagonal, spherical, full or tied, but is 'round'"),
        (lambda: Gaussian(variance_prior=-1), "`variance_prior` must not be negative, but is -1"),
        (lambda: Poisson(0), "`prior_steps` must be positive, but is 0"),
        (lambda: HMM(2, Poisson(), num_symbols=3),
         "A Poisson emission must have real columns, but column 'symbol' is categorical"),
        (lambda: HMM(2, Categorical(), num_features=2), "A Categorical emission must have one column of symbols"),
        (lambda: HMM(2, "Zeta", num_features=2),
         "`emission` must be an Emission, or the name of one .AroundMean, .* but is 'Zeta'"),
        (lambda: HMM(2, Product([Gaussian()]), num_features=2),
         "A Product of 1 parts must have as many columns, but there are 2"),
        (lambda: HMM(2, Product([Gaussian()]), num_features=1),
         "A Product is for several columns, but there is only 'feature_0'"),
        (lambda: HMM(2, Product({"x": Gaussian()}), columns=feature_columns(2, ["y", "z"])),
         r"columns of the data \(y, z\), but one names 'x'"),
        (lambda: product_model().score([[[0.0, 1.0, 0.0, 1.5]]]),
         "Column 'd' must hold the whole numbers 0 to 2, .* has 1.5 instead"),
        (lambda: HMM(2, Product({"x": Gaussian()}), columns=feature_columns(2, ["x", "y"])), "no part names 'y'"),
        (lambda: Product(["Gaussian", "Poisson"]), "The parts of a Product must be emissions, but one is 'Gaussian'"),
        (lambda: HMM(2, Product([]), num_features=1), "`parts` must hold at least one emission"),
        (lambda: HMM(2, Gaussian("full"), num_features=1).set_parameters(emission={"mean": [[0.0], [1.0]]}),
         "`covariance` must be given, too"),
        (lambda: counts().set_parameters(emission={"rate": [[1.0], [-1.0]]}),
         "`rate` must be positive, but that of state 1, column 0 is -1"),
        (lambda: counts().set_parameters(emission={"mean": [[1.0], [1.0]]}),
         "has the parameters rate, but 'mean' was given"),
        (lambda: HMM(1, Gaussian("full"), num_features=2).set_parameters(
            emission={"mean": [[0, 0]], "covariance": np.ones((1, 2, 2))}),
         "positive definite"),
        (lambda: fit(counts(), [[[1.0], [2.5]]]),
         "whole numbers from 0, but column 0 at position 1 of sequence 0 is 2.5"),
        (lambda: fit(counts(), [[[1.0], [-2.0]]]),
         "whole numbers from 0, but column 0 at position 1 of sequence 0 is -2"),
        (lambda: HMM(2, TorchEmission("nowhere.Module"), num_features=1),
         "`module` must be the path of an nn.Module class that is imported"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_part_belongs_to_one_model():
    emission = Gaussian()
    HMM(2, emission, num_features=1)
    with pytest.raises(ValueError, match="A Gaussian can be part of one model only"):
        HMM(3, emission, num_features=1)


@pytest.mark.parametrize("kind", ["diagonal", "spherical", "full", "tied"])
@pytest.mark.filterwarnings("ignore:.*(got no counts|far from the data)")
def test_a_second_fit_far_away_takes_the_center_of_its_data(rng, kind):
    """The start and the fit are those at the origin, moved: EM does not depend on where the data are."""
    first, second = rng.normal(size=(60, 2)), rng.normal(size=(80, 2)) * 3 + 2
    models = []
    for offset in (0.0, 1e6):
        model = fit(HMM(2, Gaussian(kind, 1e-3)), [first + offset], max_epochs=3)
        models.append(fit(model, [second + offset], max_epochs=5, tolerance=0))
    torch.testing.assert_close(models[1].emission.mean - 1e6, models[0].emission.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(models[1].emission.covariance, models[0].emission.covariance, rtol=1e-7, atol=1e-7)
    model = fit(HMM(1, Gaussian(kind, 0.0)), [first], max_epochs=2)
    fit(model, [second + 1e6], max_epochs=5)
    np.testing.assert_allclose(model.emission.mean[0], second.mean(0) + 1e6, rtol=1e-15)
    if kind in ("full", "tied"):
        np.testing.assert_allclose(model.emission.covariance[0], np.cov(second.T, bias=True), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*got no counts")
def test_a_start_far_from_the_data_is_reported(rng):
    values = rng.normal(size=(60, 2))
    model = fit(HMM(2, Product([Gaussian(), Gaussian()])), [values], max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, [values + 1], max_epochs=2)
    with pytest.warns(
        UserWarning, match=r"the means that the model has.* far from the data.* mean of the data is (49|50)"
    ):
        fit(model, [values + 50], max_epochs=2)


def test_training_further_on_the_same_data_is_training_longer(rng):
    values = [rng.normal(size=(60, 2)) + 100]
    twice = fit(fit(HMM(2, Gaussian("full")), values, max_epochs=3, tolerance=0), values, max_epochs=4, tolerance=0)
    once = fit(HMM(2, Gaussian("full")), values, max_epochs=7, tolerance=0)
    assert torch.equal(twice.emission.weights, once.emission.weights)


@pytest.mark.parametrize("prior", [float("inf"), float("nan"), -1.0, "1", None])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Categorical, "pseudocount"),
        (lambda prior: Gaussian("full", prior), "variance_prior"),
        (Poisson, "prior_steps"),
        (Full, "pseudocount"),
        (lambda prior: StandardHMM(2, 3, transition_pseudocount=prior), "transition_pseudocount"),
        (lambda prior: DMCHMM(4, 1, 3, emission_pseudocount=prior), "emission_pseudocount"),
    ],
)
def test_priors_are_finite(make, name, prior):
    with pytest.raises(
        ValueError, match=f"`{name}` must (be a finite number|not be negative), but is {prior!r} instead."
    ):
        make(prior)


@pytest.mark.parametrize("initialization", ["kmeans", "random"])
@pytest.mark.parametrize("kind", COVARIANCES)
def test_data_without_a_complete_step_can_start(rng, kind, initialization):
    """Each step has one of two columns. The states differ in both, so that single columns tell which is which."""
    states = np.repeat(rng.integers(0, 2, 80), 5)
    values = rng.normal(size=(400, 2)) * [1.0, 1e-4] + states[:, None] * [8.0, 8e-4]
    values[np.arange(400), rng.integers(0, 2, 400)] = np.nan
    model = fit(HMM(2, Gaussian(kind), initialization=initialization, restarts=2), [values], max_epochs=30)
    found = model.decode([values]).values.numpy()
    assert max((found == states).mean(), (found != states).mean()) > (0.9 if kind == "spherical" else 0.97)


def test_columns_without_a_value_are_named():
    values = np.column_stack([np.arange(10.0), np.full(10, np.nan)])
    for emission in (Gaussian(), Gaussian("full"), Poisson(), Product([Poisson(), Poisson()])):
        with pytest.raises(
            ValueError, match="Every column must be observed somewhere, but 'feature_1' is missing at every step"
        ):
            fit(HMM(2, emission), [values])


def test_too_few_observed_steps_are_reported():
    with pytest.raises(
        ValueError, match="3 states need at least as many observed steps to start from, but there are 2"
    ):
        fit(HMM(3, Gaussian()), [[1.0, 2.0, np.nan]])


@pytest.mark.parametrize("scale", [1e160, 1e-160])
@pytest.mark.parametrize("kind", COVARIANCES)
def test_numbers_whose_squares_leave_the_range_are_refused(rng, kind, scale):
    values = rng.normal(size=(50, 2))
    with pytest.raises(ValueError, match=r"Rescale"):
        fit(HMM(2, Gaussian(kind)), [values * scale])
    for moderate in (1e130, 1e-130):
        model = fit(HMM(2, Gaussian(kind)), [values * moderate], max_epochs=5, tolerance=0)
        expected = fit(HMM(2, Gaussian(kind)), [values], max_epochs=5, tolerance=0).score(
            [values]
        ) - values.size * math.log(moderate)
        torch.testing.assert_close(model.score([values * moderate]), expected, rtol=1e-6, atol=1e-6)
