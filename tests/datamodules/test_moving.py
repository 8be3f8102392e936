"""Particles among targets: their steps, and the exact filter against simulation and enumeration."""

import itertools

import numpy as np
import pytest
import torch

from datamodules import MovingTargetDataModule
from datamodules.moving import bayes_predictions, direction_log_density, mean_direction
from lightning_hmm.random import generator


def ready(**words) -> MovingTargetDataModule:
    data = MovingTargetDataModule(**words)
    data.setup()
    return data


def test_trajectories_follow_the_law():
    data = ready(num_features=3, num_sequences=200, val_fraction=0.0, test_fraction=0.0)
    positions = data.train_sequences.values.view(200, 100, 3)
    targets = data.true_states("train").values.view(200, 100)
    steps = positions[:, 1:] - positions[:, :-1]
    torch.testing.assert_close(
        steps.norm(dim=2), torch.ones(200, 99, dtype=torch.float64)
    )  # who stands still errs by 1
    near = (positions[:, 1:] - data.targets[targets[:, :-1]]).norm(dim=2) <= 1
    changed = targets[:, 1:] != targets[:, :-1]
    assert not bool(changed[~near].any())
    assert 0.7 < float(changed[near].double().mean()) < 0.9  # 4 of 5
    away = data.targets[targets[:, :-1]] - positions[:, :-1]
    far = away.norm(dim=2) > 3
    expected = mean_direction(away[far], 1.0)
    torch.testing.assert_close(
        (steps[far] * expected).sum(1).mean(), expected.square().sum(1).mean(), rtol=0.01, atol=0
    )
    assert torch.equal(ready(num_sequences=20).train_sequences.values, ready(num_sequences=20).train_sequences.values)
    assert not torch.equal(ready(num_sequences=20).targets, ready(num_sequences=20, seed=1).targets)


@pytest.mark.parametrize("d", [2, 3, 5, 8])
def test_direction_of_a_normal_vector(d):
    """Compares the mean with draws, the density with a recursion, and its integral over the circle with 1."""
    draw = generator(0, "directions", d)
    centre = torch.randn(d, dtype=torch.float64, generator=draw)
    points = centre + 0.7 * torch.randn(200_000, d, dtype=torch.float64, generator=draw)
    directions = points / points.norm(dim=1, keepdim=True)
    torch.testing.assert_close(mean_direction(centre, 0.7), directions.mean(0), rtol=0, atol=0.008)
    centres = torch.tensor([0.01, 1.0, 4.0, 9.0], dtype=torch.float64).unsqueeze(1) * centre
    along = (directions[:50].unsqueeze(1) * centres).sum(2) / 0.7
    normal = torch.distributions.Normal(0.0, 1.0)
    integrals = [np.sqrt(2 * np.pi) * (along.square() / 2).exp() * normal.cdf(along)]
    integrals.append(1 + along * integrals[0])
    for k in range(2, d):
        integrals.append(along * integrals[-1] + (k - 1) * integrals[-2])
    exact = integrals[d - 1].log() - d / 2 * np.log(2 * np.pi) - (centres / 0.7).square().sum(1) / 2
    usable = along > -3  # beyond, the recursion cancels
    torch.testing.assert_close(
        direction_log_density(directions[:50].unsqueeze(1), centres, 0.7)[usable], exact[usable], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("distance", [0.0, 0.3, 3.0, 40.0])
def test_density_sums_to_one(distance):
    angles = torch.linspace(0, 2 * np.pi, 20_001, dtype=torch.float64)[:-1]
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    logs = direction_log_density(circle, torch.tensor([distance, 0.0], dtype=torch.float64), 1.0)
    assert bool(logs.isfinite().all())
    np.testing.assert_allclose(float(logs.exp().mean() * 2 * np.pi), 1.0, rtol=1e-8)


def test_filter_against_all_paths_of_targets():
    targets = torch.tensor([[0.5, 0.0], [3.0, 0.5], [-2.0, 1.0]], dtype=torch.float64)
    positions = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.8, 0.6], [2.8, 0.6], [1.8, 0.6]], dtype=torch.float64)
    found = bayes_predictions(positions.unsqueeze(0), targets, 0.8, 1.0)[0]
    for last in range(5):
        total, mean = 0.0, torch.zeros(2, dtype=torch.float64)
        for path in itertools.product(range(3), repeat=last + 2):  # from the target before the first step on
            weight = 1 / 3
            for t in range(last + 1):
                before, after = path[t], path[t + 1]
                if (positions[t] - targets[before]).norm() <= 1.0:
                    weight /= 3
                elif before != after:
                    weight = 0.0
                if t < last:
                    weight *= float(
                        direction_log_density(positions[t + 1] - positions[t], targets[after] - positions[t], 0.8).exp()
                    )
            total += weight
            mean += weight * mean_direction(targets[path[-1]] - positions[last], 0.8)
        torch.testing.assert_close(found[last], positions[last] + mean / total, rtol=1e-9, atol=1e-12)


def test_the_filter_follows_the_particles_from_before_the_burn_in():
    """Both are the same trajectories, of which one data module keeps the last steps only."""
    words = {"num_sequences": 40, "val_fraction": 0.0, "test_fraction": 0.5}
    data, whole = ready(burn_in=12, length=6, **words), ready(burn_in=0, length=18, **words)
    positions = whole.test_sequences.values.view(20, 18, 3)
    assert torch.equal(positions[:, 12:].flatten(0, 1), data.test_sequences.values)
    errors = (positions[:, 1:] - bayes_predictions(positions, whole.targets, 1.0, 1.0)[:, :-1]).norm(dim=2)
    np.testing.assert_allclose(data.bayes_error("test"), float(errors[:, 12:].mean()), rtol=1e-12)
    np.testing.assert_allclose(whole.bayes_error("test"), float(errors.mean()), rtol=1e-12)


def test_the_filter_is_far_better_than_standing_still_and_no_simpler_rule_comes_near():
    data = ready(num_features=3, num_sequences=200, val_fraction=0.0, test_fraction=0.5)
    positions, targets = data.test_sequences.values.view(-1, 100, 3), data.true_states("test").values.view(-1, 100)
    oracle = positions + mean_direction(data.targets[targets] - positions, 1.0)  # sees the states
    error = float((positions[:, 1:] - oracle[:, :-1]).norm(dim=2).mean())
    straight = float((positions[:, 2:] - 2 * positions[:, 1:-1] + positions[:, :-2]).norm(dim=2).mean())
    assert error < data.bayes_error("test") < 0.65 < straight


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_features": 1}, "`num_features` must be at least 2, but is 1 instead"),
        ({"noise": 0.0}, "`noise` must be positive, but is 0.0 instead"),
        ({"burn_in": -1}, "`burn_in` must not be negative, but is -1 instead"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        MovingTargetDataModule(**words)
