"""The densities of the neural HMM against those of scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_hmm.distributions.densities import DiagonalGaussian, GaussianMixture, PartialDensity, StudentT
from lightning_hmm.inference.particle import Randomness, Streams

ROWS, PARTICLES = 4, 2500
FREEDOM = 3.0
SHARES, CENTRES, SCALES = (0.3, 0.7), (-2.0, 1.0), (0.5, 1.5)


def full(*values: float) -> torch.Tensor:
    """(ROWS, PARTICLES, len(values))."""
    return torch.tensor(values, dtype=torch.float64).expand(ROWS, PARTICLES, -1).clone()


def mixture_cdf(x: np.ndarray) -> np.ndarray:
    return sum(
        share * stats.norm(centre, scale).cdf(x) for share, centre, scale in zip(SHARES, CENTRES, SCALES, strict=True)
    )


DENSITIES = {
    "gaussian": (lambda: DiagonalGaussian(full(1.0), full(2.0)), stats.norm(1.0, 2.0).cdf),
    "student": (
        lambda: StudentT(full(1.0), full(2.0), torch.tensor([FREEDOM], dtype=torch.float64)),
        stats.t(FREEDOM, 1.0, 2.0).cdf,
    ),
    "mixture": (
        lambda: GaussianMixture(full(*SHARES).log(), full(*CENTRES).unsqueeze(3), full(*SCALES).unsqueeze(3)),
        mixture_cdf,
    ),
}


@pytest.mark.parametrize("streams", [True, False], ids=["one generator per sequence", "one generator"])
@pytest.mark.parametrize("family", DENSITIES)
def test_samples_have_the_distribution(family, streams):
    make, cdf = DENSITIES[family]
    generators = [torch.Generator().manual_seed(seed) for seed in range(ROWS)]
    source: Randomness = Streams(generators) if streams else generators[0]
    density: PartialDensity = make()
    drawn = density.sample(source)
    assert drawn.shape == (ROWS, PARTICLES, 1)
    assert stats.kstest(drawn.flatten().numpy(), cdf).pvalue > 1e-3
    outside = float((drawn.abs() > 9).double().mean())  # in the tails, where Student's t and a Gaussian differ most
    expected = float(cdf(-9.0) + 1 - cdf(9.0))
    assert outside == pytest.approx(expected, abs=5 * math.sqrt(expected / drawn.numel()) + 1e-9)


def test_moments_and_densities_of_students_t():
    freedom = torch.tensor([2.5, 7.0], dtype=torch.float64)
    mean, scale = torch.tensor([[[0.5, -1.0]]], dtype=torch.float64), torch.tensor([[[2.0, 0.3]]], dtype=torch.float64)
    density, exact = StudentT(mean, scale, freedom), stats.t(freedom, mean, scale)
    np.testing.assert_allclose(density.mean, exact.mean())
    np.testing.assert_allclose(density.variance, exact.var())
    point = torch.tensor([[[3.0, -1.2]]], dtype=torch.float64)
    np.testing.assert_allclose(density.log_prob(point), exact.logpdf(point).sum(-1))
    np.testing.assert_allclose(density.log_prob(point, torch.tensor([[[False, True]]])), exact.logpdf(point)[..., 1])
