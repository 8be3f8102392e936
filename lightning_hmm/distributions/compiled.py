"""The M-step of a diagonal Gaussian as one compiled function. For small data, it is faster than operations of torch."""

from __future__ import annotations

import math

import numpy as np

from lightning_hmm.inference.cpu.cache import strict_kernel

_TINY = np.finfo(np.float64).tiny


@strict_kernel
def update_diagonal_gaussian(weights, sums, added, spherical):
    """Estimates means and variances and writes their natural parameters, as `Gaussian.maximize`.

    Args:
        weights: (R, K, 3, D) natural parameters, which are updated.
        sums: (R, K, 3, D) expected sums of the values, minus the center, and of their squares, and numbers of visits.
        added: (D,) what the prior adds to the sums of squared deviations.
        spherical: Whether the columns have the same variance.

    Returns:
        Number of states without an estimate of a variance, which keep the previous one.
    """
    kept, size = 0, sums.shape[3]
    scatter = np.empty(size)
    for r in range(sums.shape[0]):
        for k in range(sums.shape[1]):
            total, deviations, prior, complete = 0.0, 0.0, 0.0, True
            for d in range(size):
                visits = sums[r, k, 2, d]
                count = visits if visits > 0 else 1.0
                scatter[d] = sums[r, k, 1, d] - sums[r, k, 0, d] * (sums[r, k, 0, d] / count)
                if scatter[d] < 0:  # by rounding
                    scatter[d] = 0.0
                total, deviations, prior = total + visits, deviations + scatter[d], prior + added[d]
            for d in range(size):
                visits, old = sums[r, k, 2, d], weights[r, k, 1, d]
                mean = -weights[r, k, 0, d] / (2 * old)
                variance = (deviations + prior) / max(total, _TINY) if spherical else scatter[d] + added[d]
                if visits > 0:
                    mean = sums[r, k, 0, d] / visits
                    variance = variance if spherical else variance / visits
                # Without a prior, the variance of a single point is zero. The previous variance is kept in that case.
                if not (visits > 0 and variance > 0):
                    variance, complete = -0.5 / old, False
                weights[r, k, 0, d], weights[r, k, 1, d] = mean / variance, -0.5 / variance
                weights[r, k, 2, d] = -(mean * mean / (2 * variance) + 0.5 * math.log(2 * math.pi * variance))
            kept += not complete
    return kept
