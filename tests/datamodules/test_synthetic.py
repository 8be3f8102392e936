"""Data drawn from a random HMM follows that HMM."""

import pytest
import torch

from datamodules import SyntheticDataModule
from datamodules.synthetic import stationary

ALL = {"val_fraction": 0.0, "test_fraction": 0.0}


def ready(**words) -> SyntheticDataModule:
    data = SyntheticDataModule(**words)
    data.setup()
    return data


def frequencies(rows: torch.Tensor, columns: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative frequencies of the columns in each row, and how often the row was seen."""
    counts = torch.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1]).reshape(shape).double()
    return counts / counts.sum(1, keepdim=True), counts.sum(1)


def assert_close_to(frequency: torch.Tensor, probs: torch.Tensor, total: torch.Tensor) -> None:
    """Within five standard errors of a frequency, sqrt(p (1 - p) / n), plus one count."""
    bound = 5 * (probs * (1 - probs) / total.unsqueeze(-1)).sqrt() + 1 / total.unsqueeze(-1)
    assert bool(((frequency - probs).abs() <= bound).all())
    assert bool((frequency[probs == 0] == 0).all())


def test_stationary_start_is_exact():
    for words in ({}, {"num_states": 40, "concentration": 0.02}, {"num_states": 1}, {"seed": 5, "num_states": 200}):
        data = SyntheticDataModule(**words)
        torch.testing.assert_close(
            data.initial_probs @ data.transition_probs, data.initial_probs, rtol=1e-12, atol=1e-15
        )
        assert data.initial_probs.sum().item() == pytest.approx(1, abs=1e-14)
        assert bool((data.initial_probs >= 0).all())


def test_stationary_distribution_of_a_known_chain():
    a, b = 1e-12, 3e-12  # pi = (b, a) / (a + b), however slow the chain
    chain = torch.tensor([[1 - a, a], [b, 1 - b]], dtype=torch.float64)
    torch.testing.assert_close(stationary(chain), torch.tensor([0.75, 0.25], dtype=torch.float64), rtol=1e-14, atol=0)


def test_symbols_and_states_follow_the_true_parameters():
    data = ready(num_states=4, num_symbols=6, num_sequences=2000, length=50, seed=1, **ALL)
    states, symbols = data.true_states("train"), data.train_sequences
    assert (data.num_symbols, data.num_features) == (6, None)
    path = states.values.reshape(2000, 50)
    assert_close_to(path[:, 0].bincount(minlength=4) / 2000, data.initial_probs, torch.tensor(2000.0))
    assert_close_to(*_swap(frequencies(path[:, :-1].flatten(), path[:, 1:].flatten(), (4, 4)), data.transition_probs))
    assert_close_to(*_swap(frequencies(states.values, symbols.values, (4, 6)), data.emission_probs))


def _swap(
    pair: tuple[torch.Tensor, torch.Tensor], probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return pair[0], probs, pair[1]


def test_vectors_follow_the_true_parameters():
    data = ready(
        emission="gaussian", num_states=3, num_features=2, num_sequences=400, length=50, separation=4.0, seed=2, **ALL
    )
    assert (data.num_symbols, data.num_features, data.emission_probs) == (None, 2, None)
    states, values = data.true_states("train").values, data.train_sequences.values
    for state in range(3):
        visits = values[states == state]
        error = (data.variances[state] / len(visits)).sqrt()
        assert len(visits) > 500
        assert bool(((visits.mean(0) - data.means[state]).abs() < 5 * error).all())
        assert bool(((visits.var(0) / data.variances[state] - 1).abs() < 5 * (2 / len(visits)) ** 0.5).all())


def test_separation_spreads_the_means_and_nothing_else():
    near, far = (
        SyntheticDataModule(emission="gaussian", num_states=500, num_features=2, separation=s) for s in (1.0, 7.0)
    )
    torch.testing.assert_close(far.means, 7 * near.means)
    assert far.means.std().item() == pytest.approx(
        7, rel=0.1
    )  # standard error of a standard deviation: 7 / sqrt(2000) = 0.16
    assert bool((near.variances >= 0.25).all() and (near.variances <= 2.25).all())


def test_concentration_is_that_of_a_dirichlet():
    for concentration in (0.1, 0.5, 2.0):
        probs = SyntheticDataModule(num_states=50, num_symbols=1000, concentration=concentration).emission_probs
        # E[sum of p^2] = (c + 1) / (V c + 1) for V entries of concentration c.
        # It varies by at most 2 % between draws of this size.
        assert probs.square().sum(1).mean().item() == pytest.approx(
            (concentration + 1) / (1000 * concentration + 1), rel=0.06
        )
    sharp, flat = (SyntheticDataModule(num_states=200, concentration=c).transition_probs for c in (0.005, 50.0))
    assert sharp.isfinite().all()
    assert sharp.sum(1).sub(1).abs().max() < 1e-14
    # mean of the largest of 200 entries: most of the mass, or near 1 / 200
    assert sharp.max(1).values.mean() > 0.5
    assert flat.max(1).values.mean() < 0.01


def test_mostly_constant_transitions():
    """Five of twenty entries hold 60 % of the mass, and stand out; the others are equal."""
    data = SyntheticDataModule(num_states=20, transitions="mostly_constant")
    rows = data.transition_probs.sort(dim=1, descending=True).values
    torch.testing.assert_close(rows.sum(1), torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close(rows[:, :5].sum(1), torch.full((20,), 0.6, dtype=torch.float64))
    torch.testing.assert_close(rows[:, 5:], torch.full((20, 15), 0.4 / 15, dtype=torch.float64))
    assert (
        len(data.transition_probs.argmax(1).unique()) > 8
    )  # 20 draws of one in 20 meet 12.8 on average, with deviation 1.4
    even = SyntheticDataModule(
        num_states=20, transitions="mostly_constant", concentration=1e6, kept=2, kept_mass=0.3
    ).transition_probs
    torch.testing.assert_close(even.topk(2).values, torch.full((20, 2), 0.15, dtype=torch.float64), rtol=0.01, atol=0)


def test_graded_transitions():
    probs = SyntheticDataModule(num_states=20, transitions="graded").transition_probs
    torch.testing.assert_close(
        probs.sort(dim=1).values, (torch.arange(1, 21, dtype=torch.float64) / 210).expand(20, -1)
    )
    assert len(probs.argmax(1).unique()) > 8


@pytest.mark.parametrize(("states", "features", "width"), [(20, 2, 4), (27, 3, 2), (4, 1, 3), (1, 2, 0)])
def test_a_grid_of_means(states, features, width):
    data = SyntheticDataModule(
        emission="gaussian", num_states=states, num_features=features, layout="grid", separation=3.2
    )
    distances = torch.cdist(data.means, data.means)
    nearest = (distances + torch.diag(torch.full((states,), torch.inf, dtype=torch.float64))).min(dim=1).values
    if states > 1:
        torch.testing.assert_close(nearest, torch.full((states,), 3.2, dtype=torch.float64))
    assert data.means.amax().item() == pytest.approx(3.2 * width)
    assert bool((data.variances == 1).all())


def test_every_symbol_occurs_in_training():
    words = {
        "num_states": 10,
        "num_symbols": 10,
        "concentration": 0.1,
        "num_sequences": 20,
        "length": 200,
        "val_fraction": 0.0,
        "test_fraction": 0.5,
    }
    redrawn = 0
    for seed in range(20):
        data, plain = (ready(seed=seed, every_symbol=every, **words) for every in (True, False))
        assert (len(data.train_sequences), len(data.test_sequences)) == (10, 10)
        assert len(data.train_sequences.values.unique()) == 10
        torch.testing.assert_close(
            data.initial_probs @ data.transition_probs, data.initial_probs, rtol=1e-12, atol=1e-15
        )
        same = torch.equal(data.transition_probs, plain.transition_probs)
        assert same == (len(plain.train_sequences.values.unique()) == 10)  # redrawn where needed, and only there
        assert bool(
            (data.emission_probs[data.true_states("train").values, data.train_sequences.values.long()] > 0).all()
        )
        redrawn += not same
    assert 0 < redrawn < 20


def test_same_seed_same_data():
    first, again, other = (ready(num_sequences=20, length=7, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.train_sequences.values, again.train_sequences.values)
    assert torch.equal(first.transition_probs, again.transition_probs)
    assert torch.equal(first.true_states("test").values, again.true_states("test").values)
    assert not torch.equal(first.transition_probs, other.transition_probs)
    assert not torch.equal(first.train_sequences.values, other.train_sequences.values)


def test_lengths():
    assert set(ready(num_sequences=30, length=7).train_sequences.lengths.tolist()) == {7}
    ragged = ready(num_sequences=300, min_length=0, max_length=5, **ALL).train_sequences.lengths
    assert ragged.unique().tolist() == [0, 1, 2, 3, 4, 5]
    assert set(ready(num_sequences=100, min_length=5, length=7, **ALL).train_sequences.lengths.tolist()) == {5, 6, 7}


@pytest.mark.parametrize("emission", ["categorical", "gaussian"])
def test_missing_values(emission):
    data = ready(emission=emission, num_sequences=200, length=100, missing_fraction=0.2, **ALL)
    observed = data.train_sequences.observed.double()
    assert abs(observed.mean().item() - 0.8) < 5 * (0.2 * 0.8 / observed.numel()) ** 0.5
    full = ready(emission=emission, num_sequences=200, length=100, **ALL).train_sequences
    assert bool(full.observed.all())
    seen = data.train_sequences.observed
    assert torch.equal(data.train_sequences.values[seen], full.values[seen])


def test_parts_have_their_states():
    data = ready(num_sequences=40, min_length=1, max_length=9)
    for part, sequences in (
        ("train", data.train_sequences),
        ("val", data.val_sequences),
        ("test", data.test_sequences),
    ):
        assert torch.equal(data.true_states(part).offsets, sequences.offsets)
    assert (len(data.train_sequences), len(data.val_sequences), len(data.test_sequences)) == (32, 4, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"emission": "poisson"}, "`emission` must be one of categorical, gaussian, but is 'poisson' instead"),
        ({"num_states": 0}, "`num_states` must be positive, but is 0 instead"),
        ({"num_sequences": 0}, "`num_sequences` must be positive, but is 0 instead"),
        ({"concentration": 0.0}, "`concentration` must be positive, but is 0.0 instead"),
        ({"concentration": 1e-6, "num_states": 50}, "`concentration` must be large enough.* Increase it"),
        ({"separation": -1.0}, "`separation` must not be negative, but is -1.0 instead"),
        ({"missing_fraction": 1.0}, "`missing_fraction` must be at least 0 and less than 1, but is 1.0 instead"),
        ({"min_length": 9, "max_length": 3}, "are 9 and 3 instead"),
        ({"length": -1}, "are -1 and -1 instead"),
        (
            {"transitions": "sparse"},
            "`transitions` must be one of dirichlet, mostly_constant, graded, but is 'sparse' instead",
        ),
        ({"layout": "line"}, "`layout` must be one of random, grid, but is 'line' instead"),
        (
            {"transitions": "mostly_constant", "kept": 5},
            r"`kept` must be positive and less than `num_states` \(5\), but is 5 instead",
        ),
        (
            {"transitions": "mostly_constant", "kept": 0},
            r"`kept` must be positive and less than `num_states` \(5\), but is 0 instead",
        ),
        (
            {"transitions": "mostly_constant", "kept": 3, "kept_mass": 0.5},
            "`kept_mass` must be at least `kept` / `num_states` .* but is 0.5 instead",
        ),
        (
            {"transitions": "mostly_constant", "kept": 3, "kept_mass": 1.0},
            "`kept_mass` must be .* less than 1, but is 1.0 instead",
        ),
        (
            {"emission": "gaussian", "every_symbol": True},
            "`every_symbol` applies to symbols, but `emission` is 'gaussian'",
        ),
        (
            {"num_symbols": 50, "num_sequences": 2, "length": 20, "every_symbol": True},
            "in 100 draws not all 50 symbols occurred",
        ),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        SyntheticDataModule(**words)
