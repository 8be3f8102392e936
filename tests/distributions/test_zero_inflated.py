"""Zero-inflated counts against scipy: densities, EM with ties and frozen gates, samples and bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from lightning_hmm import HMM, Binomial, Gaussian, Geometric, NegativeBinomial, Poisson, Sequences, ZeroInflated, fit

GATE, RATE = np.array([[0.3, 0.0], [0.6, 0.1]]), np.array([[2.0, 5.0], [9.0, 1.0]])


def log_density(values, gate, rate):
    values = values[:, None]
    found = np.log(np.where(values == 0, gate, 0) + (1 - gate) * stats.poisson(rate).pmf(np.nan_to_num(values)))
    return np.where(np.isnan(values), 0.0, found)


def model_of(**options):
    model = HMM(2, ZeroInflated(Poisson(1e-9), **options), num_features=2)
    return model.set_parameters(emission={"gate": GATE, "rate": RATE})


@pytest.mark.filterwarnings("ignore:.*rows of .* got no counts")
def test_densities_are_those_of_scipy(rng):
    values = rng.poisson(3, (60, 2)) * (rng.random((60, 2)) < 0.7).astype(float)
    values[rng.random(values.shape) < 0.2] = np.nan
    model = model_of()
    found = model.evidence(0, Sequences.from_list([torch.from_numpy(values)])).rows().detach()
    np.testing.assert_allclose(found, log_density(values, GATE, RATE).sum(2), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(model.emission.component.rate, torch.from_numpy(RATE))
    never = model_of().set_parameters(emission={"gate": [[1.0, 0.5], [0.5, 0.5]]})
    rows = never.evidence(0, Sequences.from_list([torch.tensor([[1.0, 0.0]], dtype=torch.float64)])).rows()
    assert rows.isneginf().tolist() == [[True, False]]
    assert bool(fit(never, [values], 3, 0).emission.gate[0, 0] == 1)  # no NaN


@pytest.mark.parametrize(("tied", "frozen"), [((), ()), (("gate",), ()), ((), ("gate",))])
def test_em_reaches_the_optimum_of_scipy(rng, tied, frozen):
    """One column, with fixed posterior probabilities and a prior. The objective never decreases."""
    states = rng.integers(0, 2, 500)
    values = (rng.poisson(RATE[states, 0]) * (rng.random(500) > GATE[states, 0]))[:, None].astype(float)
    gamma = 0.1 + 0.8 * np.eye(2)[states]
    sequences = Sequences.from_list([torch.from_numpy(values)])
    emission = ZeroInflated(Poisson(1e-9), 0.4, tied=tied, frozen=frozen)
    model = HMM(2, emission, num_features=1)
    gate = [[0.5], [0.5]] if tied or frozen else [[0.2], [0.7]]
    model.set_parameters(emission={"gate": gate, "rate": [[1.0], [8.0]]})

    def objective(gate, rate):
        prior = 0.4 * np.log(gate * (1 - gate))[: 1 if tied else 2].sum()
        return (gamma * log_density(values, gate[:, None], rate[:, None])[:, :, 0]).sum() + prior

    reached = []
    for _ in range(100):
        reached.append(objective(emission.gate[:, 0].numpy(), emission.rate[:, 0].numpy()))
        leaves = [value.detach().requires_grad_() for value in emission.natural(0)]
        evidence = emission.evidence(leaves, sequences)
        statistics = emission.statistics(evidence, torch.from_numpy(gamma), leaves)
        emission.maximize([value[None] for value in statistics])
    assert np.diff(reached).min() > -1e-9
    if frozen:
        assert emission.gate.tolist() == gate

    def unpacked(place):
        gates = np.full(2, 0.5) if frozen else np.full(2, special.expit(place[2])) if tied else special.expit(place[2:])
        return gates, np.exp(place[:2])

    best = optimize.minimize(lambda place: -objective(*unpacked(place)), [0.5, 2.0, 0.0, 0.0], method="BFGS")
    assert reached[-1] == pytest.approx(-best.fun, abs=1e-6)
    assert emission.num_free_parameters(0) == 2 + (0 if frozen else 1 if tied else 2)


@pytest.mark.parametrize("make", [Poisson, NegativeBinomial, Geometric, lambda: Binomial([40])])
def test_every_count_family_is_a_component(rng, make):
    values = rng.poisson(5 + 10 * (np.arange(400)[:, None] // 40 % 2)) * (rng.random((400, 1)) < 0.6)
    model = fit(HMM(2, ZeroInflated(make()), num_features=1, restarts=2), [values.astype(float)], 40, 0)
    assert bool(model.score([values.astype(float)]).isfinite().all())
    if make is Poisson:
        truth = HMM(2, ZeroInflated(Poisson()), num_features=1)
        parameters = {"gate": [[0.4], [0.4]], "rate": [[5.0], [15.0]]}
        truth.set_parameters([1.0, 0.0], [[0.975, 0.025], [0.025, 0.975]], parameters)
        assert float(model.score([values.astype(float)])) > float(truth.score([values.astype(float)]))


def test_samples_have_the_moments_that_are_predicted():
    emission = model_of().emission
    states = torch.arange(2).repeat_interleave(50_000)
    drawn = emission.sample(states, torch.Generator().manual_seed(0))
    for state in range(2):
        mean, variance = (moment[state] for moment in emission.moments())
        part = drawn[states == state]
        assert bool(((part.mean(0) - mean).abs() < 5 * (variance / len(part)).sqrt()).all())
        torch.testing.assert_close(part.var(0), variance, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeroInflated(Gaussian()),
         "`component` must be an emission of counts, such as Poisson, but is Gaussian"),
        (lambda: model_of().set_parameters(emission={"gate": [[0.5, 1.5], [0.0, 0.0]]}),
         "`gate` must be between 0 and 1, .*state 0, column 1 is 1.5"),
        (lambda: model_of().set_parameters(emission={"gate": [0.5]}),
         r"`gate` must have shape \(2, 2\), but has \(1,\)"),
        (lambda: model_of().score([[[1.0, -1.0]]]), "must have counts, .*column 1 at position 0 of sequence 0 is -1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
