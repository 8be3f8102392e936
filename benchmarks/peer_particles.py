"""The package particles: a bootstrap filter and backward sampling of the model that `particle.py` describes.

`particle.py` starts this program in an environment of its own.

    python benchmarks/peer_particles.py <problem.npz> <results.npz> <num_particles> <num_paths> <rounds>

Prints the seconds of the best round of each part, the number of rounds and the versions as JSON. The library takes one
sequence at a time. Its densities are given as a class of their own, which is faster than the products of
one-dimensional ones that it ships.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import particles
from particles import distributions as dists
from particles import state_space_models as ssm

LOG_2_PI = np.log(2 * np.pi)


class DiagonalGaussian(dists.ProbDist):
    """Independent entries; `mean` and `scale` have a row for each particle, or one for all."""

    dtype = np.float64

    def __init__(self, mean: np.ndarray, scale: np.ndarray) -> None:
        self.mean, self.scale, self.dim = mean, scale, mean.shape[-1]

    def rvs(self, size: int | None = None) -> np.ndarray:
        shape = self.mean.shape if size is None else (size, self.dim)
        return self.mean + self.scale * np.random.standard_normal(shape)  # noqa: NPY002 - the generator that the library draws from

    def logpdf(self, x: np.ndarray) -> np.ndarray:
        return -0.5 * (((x - self.mean) / self.scale) ** 2 + LOG_2_PI).sum(-1) - np.log(self.scale).sum(-1)


class Neural(ssm.StateSpaceModel):
    """A subclass sets `weights`."""

    weights: dict[str, np.ndarray]

    def network(self, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for layer in range(3):
            x = x @ self.weights[f"{name}_weight{layer}"] + self.weights[f"{name}_bias{layer}"]
            x = np.maximum(x, 0.0) if layer < 2 else x
        half = x.shape[-1] // 2
        return x[..., :half], np.exp(x[..., half:])

    def PX0(self) -> DiagonalGaussian:
        size = self.weights["transition_weight0"].shape[0]
        return DiagonalGaussian(np.zeros(size), np.ones(size))

    def PX(self, t: int, xp: np.ndarray) -> DiagonalGaussian:
        change, scale = self.network("transition", xp)
        return DiagonalGaussian(0.8 * xp + change, scale)

    def PY(self, t: int, xp: np.ndarray, x: np.ndarray) -> DiagonalGaussian:
        return DiagonalGaussian(*self.network("emission", x))


def main() -> None:
    problem, results = sys.argv[1:3]
    num_particles, num_paths, rounds = map(int, sys.argv[3:])
    with np.load(problem) as arrays:
        Neural.weights = {name: arrays[name] for name in arrays.files if name != "values"}
        values = arrays["values"]
    np.random.seed(0)  # noqa: NPY002
    best = dict.fromkeys(("filter", "exact", "metropolis"), np.inf)
    for _ in range(rounds):
        seconds = dict.fromkeys(best, 0.0)
        log_likelihoods, means = [], []
        for n, sequence in enumerate([values[0], *values]):  # the first once more: it compiles
            start = time.perf_counter()
            found = particles.SMC(
                fk=ssm.Bootstrap(ssm=Neural(), data=sequence),
                N=num_particles,
                resampling="systematic",
                ESSrmin=0.5,
                store_history=True,
                verbose=False,
            )
            found.run()
            middle = time.perf_counter()
            paths = found.hist.backward_sampling_ON2(num_paths)
            late = time.perf_counter()
            found.hist.backward_sampling_mcmc(num_paths)
            end = time.perf_counter()
            if n > 0:
                for name, spent in zip(seconds, (middle - start, late - middle, end - late), strict=True):
                    seconds[name] += spent
                log_likelihoods.append(found.logLt)
                means.append(np.array(paths).mean(1))
        best = {name: min(spent, best[name]) for name, spent in seconds.items()}
    np.savez(results, log_likelihood=np.array(log_likelihoods), means=np.array(means))
    print(
        json.dumps(
            {"seconds": best, "rounds": rounds, "versions": {name: version(name) for name in ("particles", "numpy")}}
        )
    )


if __name__ == "__main__":
    main()
