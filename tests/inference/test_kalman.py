"""The Kalman filter and smoother against conditioning one big Gaussian of all states and observations."""

import numpy as np
import pytest
import torch

from lightning_hmm import Sequences
from lightning_hmm.inference import kalman
from lightning_hmm.inference.kalman import LinearGaussian


def random_model(rng: np.random.Generator, size: int, features: int) -> LinearGaussian:
    def cov(n: int) -> torch.Tensor:
        root = torch.from_numpy(rng.normal(size=(n, n + 1)))
        return root @ root.T / n + 0.1 * torch.eye(n, dtype=torch.float64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    transition = 0.9 * torch.linalg.qr(normal(size, size)).Q
    return LinearGaussian(
        normal(size),
        cov(size),
        transition,
        normal(size),
        cov(size),
        normal(features, size),
        normal(features),
        cov(features),
    )


def joint(model: LinearGaussian, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance of (x_0, ..., x_{T-1}, y_0, ..., y_{T-1})."""
    size, features = len(model.initial_mean), len(model.emission_offset)
    states, observations = num_steps * size, num_steps * features
    mean, cov = torch.zeros(states, dtype=torch.float64), torch.zeros(states, states, dtype=torch.float64)
    mean[:size], cov[:size, :size] = model.initial_mean, model.initial_cov
    for t in range(1, num_steps):
        now, before = slice(t * size, (t + 1) * size), slice((t - 1) * size, t * size)
        mean[now] = model.transition @ mean[before] + model.transition_offset
        cov[now, : t * size] = model.transition @ cov[before, : t * size]
        cov[: t * size, now] = cov[now, : t * size].T
        cov[now, now] = model.transition @ cov[before, before] @ model.transition.T + model.transition_cov
    emission = torch.block_diag(*[model.emission] * num_steps)
    noise = torch.block_diag(*[model.emission_cov] * num_steps)
    full = torch.cat(
        [torch.cat([cov, cov @ emission.T], 1), torch.cat([emission @ cov, emission @ cov @ emission.T + noise], 1)]
    )
    assert full.shape == (states + observations,) * 2
    return torch.cat([mean, emission @ mean + model.emission_offset.repeat(num_steps)]), full


def condition(mean, cov, first, given, values):
    """Mean and covariance of the entries `first`, given those in `given`."""
    gain = torch.linalg.solve(cov[given][:, given], cov[given][:, first]).T
    return mean[first] + gain @ (values - mean[given]), cov[first][:, first] - gain @ cov[given][:, first]


@pytest.mark.parametrize(("size", "features"), [(1, 1), (2, 3), (3, 2)])
def test_against_one_big_gaussian(rng, size, features):
    model = random_model(rng, size, features)
    lengths = [1, 5, 0, 3]
    data = [rng.normal(size=(n, features)) * 2 for n in lengths]
    data[1][2] = np.nan  # a whole step, and single entries
    data[1][0, 0] = data[3][2, -1] = np.nan
    sequences = Sequences.from_lengths(np.concatenate(data), lengths)
    found = kalman.posterior(model, sequences)
    torch.testing.assert_close(kalman.log_likelihood(model, sequences), found.log_likelihood)
    predicted, spread = kalman.predict_next(model, sequences)
    for n, values in enumerate(data):
        num_steps = len(values)
        if not num_steps:
            assert float(found.log_likelihood[n]) == 0
            continue
        mean, cov = joint(model, num_steps + 1)
        states = (num_steps + 1) * size
        flat = torch.from_numpy(values.reshape(-1))
        given = states + torch.nonzero(~flat.isnan()).squeeze(1)
        seen = flat[~flat.isnan()]
        expected = torch.distributions.MultivariateNormal(mean[given], cov[given][:, given]).log_prob(seen)
        torch.testing.assert_close(found.log_likelihood[n], expected, rtol=1e-10, atol=0)
        for t in range(num_steps):
            row = int(sequences.offsets[n]) + t
            here = torch.arange(t * size, (t + 1) * size)
            for fields, given_now in (
                (("mean", "cov"), given),
                (("filtered_mean", "filtered_cov"), given[given < states + (t + 1) * features]),
            ):
                exact = condition(mean, cov, here, given_now, seen[: len(given_now)])
                for name, value in zip(fields, exact, strict=True):
                    torch.testing.assert_close(getattr(found, name)[row], value, rtol=1e-9, atol=1e-10)
            if t > 0:
                _, both = condition(mean, cov, torch.arange((t - 1) * size, (t + 1) * size), given, seen)
                torch.testing.assert_close(found.cross_cov[row], both[size:, :size], rtol=1e-9, atol=1e-10)
            following = states + torch.arange((t + 1) * features, (t + 2) * features)
            given_now = given[given < states + (t + 1) * features]
            exact = condition(mean, cov, following, given_now, seen[: len(given_now)])
            torch.testing.assert_close(predicted[row], exact[0], rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(spread[row], exact[1], rtol=1e-9, atol=1e-10)
        assert bool((found.cross_cov[sequences.offsets[n]] == 0).all())


def test_gradients_flow(rng):
    model = random_model(rng, 2, 2)
    sequences = Sequences.from_list([rng.normal(size=(4, 2)), np.where(rng.random((3, 2)) < 0.4, np.nan, 1.0)])
    noise = model.emission_cov.clone().requires_grad_()
    transition = model.transition.clone().requires_grad_()
    torch.autograd.gradcheck(
        lambda a, r: kalman.log_likelihood(model._replace(transition=a, emission_cov=(r + r.T) / 2), sequences),
        (transition, noise),
        rtol=1e-5,
    )


def test_nothing_at_all(rng):
    model = random_model(rng, 2, 3)
    found = kalman.posterior(model, Sequences.from_lengths(np.zeros((0, 3)), [0, 0]))
    assert [tuple(field.shape) for field in found] == [(2,), (0, 2), (0, 2, 2), (0, 2), (0, 2, 2), (0, 2, 2)]


def test_wrong_shapes(rng):
    model = random_model(rng, 2, 3)
    sequences = Sequences.from_list([rng.normal(size=(4, 3))])
    with pytest.raises(
        ValueError,
        match=r"`emission` must be \(3, 2\) for states of 2 and observations of 3 entries, but is \(2, 3\) instead",
    ):
        kalman.log_likelihood(model._replace(emission=model.emission.T), sequences)
    with pytest.raises(ValueError, match="Each step must have 3 features, but has 2 instead"):
        kalman.log_likelihood(model, Sequences.from_list([rng.normal(size=(4, 2))]))
