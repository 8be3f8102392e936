"""Particles that move from target to target (Jarboui and Perchet, 2021), and the prediction of whoever knows the targets."""

from __future__ import annotations

import math
from typing import Any

import datasets
import numpy as np
import torch
from scipy.special import gammaln, hyp1f1
from torch import Tensor

from datamodules.base import Part, SequenceDataModule, as_dataset, as_table
from lightning_hmm.columns import feature_columns
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

NODES = 64  # of the quadrature over distances


class MovingTargetDataModule(SequenceDataModule):
    r"""Trajectories of particles that take steps of length 1 towards their targets.

    .. math::
        i_t \sim \begin{cases} \mathcal{U}\{1, \dots, K\} & \text{if } \|y_t - X_{i_{t-1}}\| \le \epsilon \\ i_{t-1} & \text{otherwise,} \end{cases} \qquad
        x_t \sim \mathcal{N}(X_{i_t}, \sigma^2 I), \qquad y_{t+1} = y_t + \frac{x_t - y_t}{\|x_t - y_t\|}

    (eq. 19 of the paper). The state of a step is the target that it is headed for. Who predicts that a particle stands still errs by 1;
    `bayes_error` is the error of the mean of the exact filter, which knows the targets and has followed each particle since before the burn-in.

    Args:
        num_features: d, at least 2.
        num_targets: K, drawn evenly from a cube.
        extent: the cube is from minus this to this in each direction.
        noise: sigma.
        radius: epsilon; with less than 1, particles circle around a target that they cannot hit.
        num_sequences: how many trajectories.
        length: steps of each.
        burn_in: steps before the first that is kept.
        kwargs: the words of `SequenceDataModule`.

    Attributes:
        targets: (K, d).
    """

    def __init__(
        self,
        num_features: int = 3,
        num_targets: int = 5,
        extent: float = 5.0,
        noise: float = 1.0,
        radius: float = 1.0,
        num_sequences: int = 250,
        length: int = 100,
        burn_in: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, value in {
            "num_targets": num_targets,
            "extent": extent,
            "noise": noise,
            "radius": radius,
            "num_sequences": num_sequences,
            "length": length,
        }.items():
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive, but is {value} instead.")
        if num_features < 2:
            raise ValueError(
                f"`num_features` must be at least 2, for steps to have a direction, but is {num_features} instead."
            )
        if burn_in < 0:
            raise ValueError(f"`burn_in` must not be negative, but is {burn_in} instead.")
        self.columns, self.noise, self.radius = feature_columns(num_features), noise, radius
        self.extent, self.num_sequences, self.length, self.burn_in = extent, num_sequences, length, burn_in
        self.targets = self._uniform(generator(self.seed, "targets"), num_targets)

    def _uniform(self, draw: torch.Generator, count: int) -> Tensor:
        return self.extent * (2 * torch.rand(count, len(self.columns), dtype=torch.float64, generator=draw) - 1)

    def _trajectories(self) -> tuple[Tensor, Tensor]:
        """(N, burn_in + length, d) positions and (N, burn_in + length) targets; the same at every call."""
        draw = generator(self.seed, "trajectories")
        position = self._uniform(draw, self.num_sequences)
        target = torch.randint(len(self.targets), (self.num_sequences,), generator=draw)
        positions, targets = [], []
        for _ in range(self.burn_in + self.length):
            fresh = torch.randint(len(self.targets), (self.num_sequences,), generator=draw)
            target = torch.where((position - self.targets[target]).norm(dim=1) <= self.radius, fresh, target)
            positions.append(position)
            targets.append(target)
            away = (
                self.targets[target]
                + self.noise * torch.randn(position.shape, dtype=torch.float64, generator=draw)
                - position
            )
            position = position + away / away.norm(dim=1, keepdim=True)
        return torch.stack(positions, dim=1), torch.stack(targets, dim=1)

    def load_dataset(self) -> datasets.Dataset:
        values, states = (drawn[:, self.burn_in :].flatten(0, 1) for drawn in self._trajectories())
        lengths = [self.length] * self.num_sequences
        return as_dataset(as_table(Sequences.from_lengths(values, lengths), Sequences.from_lengths(states, lengths)))

    def bayes_error(self, part: Part = "test") -> float:
        """Mean distance between the next position and its expectation by a filter that knows targets, noise and radius.

        The filter starts where the particles do, before the burn-in. It thus has seen more than the sequences show, and no predictor
        that reads only the sequences has a smaller expected error.
        """
        _, _, indices = self._source(part)
        positions, _ = self._trajectories()
        positions = positions if indices is None else positions[indices]
        predictions = bayes_predictions(positions, self.targets, self.noise, self.radius)
        return float((positions[:, self.burn_in + 1 :] - predictions[:, self.burn_in : -1]).norm(dim=2).mean())


def bayes_predictions(positions: Tensor, targets: Tensor, noise: float, radius: float) -> Tensor:
    """(N, T, d) positions of particles, (K, d) targets -> (N, T, d): E[y_{t+1} | y_1:t] for each step; at first, all targets are equally probable."""
    num_targets = len(targets)
    away = targets - positions.unsqueeze(2)  # (N, T, K, d)
    reached = away.norm(dim=3) <= radius
    steps = positions[:, 1:] - positions[:, :-1]
    evidence = direction_log_density(
        (steps / steps.norm(dim=2, keepdim=True)).unsqueeze(2), away[:, :-1], noise
    )  # (N, T - 1, K)
    ahead = torch.empty_like(away[..., 0])  # p(i_t | y_1:t)
    belief = torch.full_like(ahead[:, 0], 1 / num_targets)
    for t in range(positions.shape[1]):
        leaving = (belief * reached[:, t]).sum(1, keepdim=True)
        ahead[:, t] = torch.where(reached[:, t], 0.0, belief) + leaving / num_targets
        if t < evidence.shape[1]:
            belief = (ahead[:, t].log() + evidence[:, t]).softmax(1)
    return positions + (ahead.unsqueeze(3) * mean_direction(away, noise)).sum(2)


def mean_direction(centre: Tensor, noise: float) -> Tensor:
    r"""(..., d) -> (..., d): E[x / |x|] for x ~ N(centre, noise^2 I).

    .. math:: \frac{\mu}{\sigma} \frac{\Gamma((d + 1) / 2)}{\sqrt{2} \, \Gamma(d / 2 + 1)} \, {}_1F_1(1/2; d/2 + 1; -|\mu|^2 / 2 \sigma^2)
    """
    d = centre.shape[-1]
    scaled = centre / noise
    factor = math.exp(gammaln((d + 1) / 2) - gammaln(d / 2 + 1)) / math.sqrt(2)
    return (
        scaled
        * factor
        * torch.from_numpy(np.asarray(hyp1f1(0.5, d / 2 + 1, -scaled.square().sum(-1, keepdim=True).numpy() / 2)))
    )


def direction_log_density(direction: Tensor, centre: Tensor, noise: float) -> Tensor:
    r"""(..., d) unit vectors, (..., d) -> (...): log density on the sphere of x / |x| for x ~ N(centre, noise^2 I), the projected normal distribution.

    .. math:: (2 \pi)^{-d/2} e^{-|m|^2 / 2} \int_0^\infty r^{d-1} e^{-r^2/2 + r a} dr, \qquad m = \mu / \sigma, \ a = u \cdot m

    The integral is taken by Gauss and Legendre's rule around the maximum of the integrand, whose logarithm is concave.
    """
    d = centre.shape[-1]
    scaled = centre / noise
    along = (direction * scaled).sum(-1, keepdim=True)
    root = (along.square() + 4 * (d - 1)).sqrt()
    mode = torch.where(along > 0, (along + root) / 2, 2 * (d - 1) / (root - along))  # without cancellation
    width = (1 + (d - 1) / mode.square()).rsqrt()
    low, high = (
        (mode - 10 * width).clamp(min=0),
        mode + 16 * width,
    )  # the upper tail is that of a gamma distribution where `along` is very negative
    nodes, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(NODES))
    distance = low + (high - low) * (nodes + 1) / 2  # (..., nodes)
    logs = (d - 1) * distance.log() - distance.square() / 2 + distance * along + weights.log()
    integral = logs.logsumexp(-1) + ((high - low) / 2).log().squeeze(-1)
    return integral - d / 2 * math.log(2 * math.pi) - scaled.square().sum(-1) / 2
