"""Starts from slow states: averages that are right, and a state that random starts do not find."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hmm import NeuralHMM, Sequences, fit
from lightning_hmm.models.neural.starts import moving_sum, slow_states
from tests.helpers import assert_identical_parameters, random_vectors


def test_sums_are_over_the_steps_around_each():
    values = torch.arange(1.0, 7.0).view(6, 1, 1)
    np.testing.assert_allclose(moving_sum(values, 3).flatten(), [3, 6, 9, 12, 15, 11])
    np.testing.assert_allclose(moving_sum(values, 2).flatten(), [1, 3, 5, 7, 9, 11])
    np.testing.assert_allclose(moving_sum(values, 1), values)
    np.testing.assert_allclose(moving_sum(values, 50).flatten(), [21] * 6)


@pytest.mark.parametrize(
    "options",
    [{"latent_dim": 2}, {"latent_dim": 3}, {"latent_dim": 1, "emission_order": 0, "emission_mean": "absolute"}],
)
def test_states_are_white_and_do_not_see_what_is_missing(rng, options):
    data = random_vectors(rng, num_sequences=5, longest=30, missing=0.2)
    model = NeuralHMM(num_features=2, width=8, **options)
    model.initialize(data)
    observations = model.bind(data).observations
    generator = torch.Generator().manual_seed(0)
    states = slow_states(observations, model.residual, model.latent_dim, 5, generator)
    rows = states[observations.inside].double()
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(rows.T @ rows / len(rows), np.eye(model.latent_dim), atol=1e-4)
    assert not states[~observations.inside].any()
    observations.targets[~observations.observed] = 1e6
    np.testing.assert_array_equal(
        slow_states(observations, model.residual, model.latent_dim, 5, generator.manual_seed(0)), states
    )


def walks(seed: int) -> tuple[Sequences, torch.Tensor]:
    """Random walks, some of which double their speed at some step and pause at every other step; and these steps."""
    draw, tracks, fast = np.random.default_rng(seed), [], []
    for _ in range(24):
        way = np.arange(60) >= draw.integers(15, 100)
        moving = draw.random(60) < 0.5
        tracks.append(
            np.cumsum(
                draw.normal(0, 1, (60, 2)) * np.where(way, 3.0, 1.0)[:, None] * np.where(moving, 1.0, 0.1)[:, None],
                axis=0,
            )
        )
        fast.append(way)
    return Sequences.from_list(tracks), torch.from_numpy(np.concatenate(fast))


def test_a_slow_state_is_found():
    """The speed of a walk, which changes at most once although the walk pauses; the same seed gives the same start."""
    data, fast = walks(0)
    options = {
        "latent_dim": 1,
        "num_features": 2,
        "emission_order": 0,
        "emission": "mixture",
        "emission_log_variance": -1.0,
        "width": 16,
    }
    slow = {"transition_mean": "residual", "transition_log_variance": -7.0, "latent_bound": 2.0, "start_window": 15}
    training = {"num_particles": 32, "num_paths": 2, "m_steps": 4, "learning_rate": 1e-2}
    models = [fit(NeuralHMM(**options, **slow, **training), data, 6, 0, batch_size=12) for _ in range(2)]
    assert_identical_parameters(*models)
    clusters = models[0].cluster_latents(data, 2).values
    right = float((clusters == fast).double().mean())
    assert max(right, 1 - right) > 0.9


def test_windows_are_checked():
    with pytest.raises(ValueError, match="`start_window` must be a whole number of at least 1, but is 0 instead"):
        NeuralHMM(2, 2, start_window=0)
