"""Particles that move from target to target (Jarboui and Perchet, 2021), and their optimal prediction."""

from __future__ import annotations

import math
from typing import Any

import datasets
import numpy as np
import torch
from scipy.special import gammaln, hyp1f1
from torch import Tensor

from datamodules.base import Part, SequenceDataModule, as_dataset, as_table
from datamodules.checks import require_positive
from lightning_hmm.columns import feature_columns
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

NODES = 64  # Number of nodes of the quadrature over distances.


class MovingTargetDataModule(SequenceDataModule):
    r"""Trajectories of particles that take steps of length 1 towards their targets.

    Use it to evaluate models of continuous trajectories against the best possible prediction. The trajectories follow
    eq. 19 of the paper:

    .. math::
        i_t \sim \begin{cases} \mathcal{U}\{1, \dots, K\} & \text{if } \|y_t - X_{i_{t-1}}\| \le \epsilon \\
        i_{t-1} & \text{otherwise,} \end{cases} \qquad
        x_t \sim \mathcal{N}(X_{i_t}, \sigma^2 I), \qquad y_{t+1} = y_t + \frac{x_t - y_t}{\|x_t - y_t\|}

    The true state of a step is the current target. Predicting the previous position has an error of 1. `bayes_error` is
    the error of the mean of the exact filter, which is computed from the true targets and from the trajectory including
    the burn-in.

    Args:
        num_features: Dimension d, at least 2.
        num_targets: Number of targets K, which are drawn uniformly from a cube.
        extent: Half the side of the cube, which is centered at the origin.
        noise: Standard deviation sigma.
        radius: Distance epsilon within which a target is reached. With less than 1, particles circle around targets
            that they cannot reach.
        num_sequences: Number of trajectories.
        length: Number of steps per trajectory.
        burn_in: Number of steps that are discarded at the start of each trajectory.
        **kwargs: Forwarded to `SequenceDataModule`.

    Attributes:
        targets: (K, d) positions of the targets.

    Example:
        >>> data = MovingTargetDataModule(num_features=2, num_sequences=4, length=5, val_fraction=0, test_fraction=0.25)
        >>> data.setup()
        >>> data.train_sequences.lengths.tolist()
        [5, 5, 5]
        >>> tuple(data.targets.shape)
        (5, 2)
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
        require_positive(num_targets=num_targets, extent=extent, noise=noise, radius=radius)
        require_positive(num_sequences=num_sequences, length=length)
        if num_features < 2:
            raise ValueError(f"`num_features` must be at least 2, but is {num_features} instead.")
        if burn_in < 0:
            raise ValueError(f"`burn_in` must not be negative, but is {burn_in} instead.")
        self.columns = feature_columns(num_features)
        self.extent = extent
        self.noise = noise
        self.radius = radius
        self.num_sequences = num_sequences
        self.length = length
        self.burn_in = burn_in
        self.targets = self._uniform(generator(self.seed, "targets"), num_targets)

    def _uniform(self, draw: torch.Generator, count: int) -> Tensor:
        """Draws points uniformly from the cube, (count, d)."""
        return self.extent * (2 * torch.rand(count, len(self.columns), dtype=torch.float64, generator=draw) - 1)

    def _trajectories(self) -> tuple[Tensor, Tensor]:
        """Returns (N, burn_in + length, d) positions and (N, burn_in + length) targets, the same in every call."""
        draw = generator(self.seed, "trajectories")
        position = self._uniform(draw, self.num_sequences)
        target = torch.randint(len(self.targets), (self.num_sequences,), generator=draw)
        positions, targets = [], []
        for _ in range(self.burn_in + self.length):
            fresh = torch.randint(len(self.targets), (self.num_sequences,), generator=draw)
            target = torch.where((position - self.targets[target]).norm(dim=1) <= self.radius, fresh, target)
            positions.append(position)
            targets.append(target)
            noise = self.noise * torch.randn(position.shape, dtype=torch.float64, generator=draw)
            away = self.targets[target] + noise - position
            position = position + away / away.norm(dim=1, keepdim=True)
        return torch.stack(positions, dim=1), torch.stack(targets, dim=1)

    def load_dataset(self) -> datasets.Dataset:
        values, states = (drawn[:, self.burn_in :].flatten(0, 1) for drawn in self._trajectories())
        lengths = [self.length] * self.num_sequences
        return as_dataset(as_table(Sequences.from_lengths(values, lengths), Sequences.from_lengths(states, lengths)))

    def bayes_error(self, part: Part = "test") -> float:
        """Returns the mean distance between the next position and its expectation under the exact filter.

        The filter uses the true targets, noise and radius, and starts before the burn-in. No predictor that uses only
        the sequences has a smaller expected error.
        """
        _, _, indices = self._source(part)
        positions, _ = self._trajectories()
        positions = positions if indices is None else positions[indices]
        predictions = bayes_predictions(positions, self.targets, self.noise, self.radius)
        return float((positions[:, self.burn_in + 1 :] - predictions[:, self.burn_in : -1]).norm(dim=2).mean())


def bayes_predictions(positions: Tensor, targets: Tensor, noise: float, radius: float) -> Tensor:
    """Returns E[y_{t+1} | y_1:t] for each step; initially, all targets are equally probable.

    Args:
        positions: (N, T, d) positions of the particles.
        targets: (K, d) positions of the targets.
        noise: Standard deviation of the direction noise.
        radius: Distance within which a target is reached.

    Returns:
        (N, T, d) expected next positions.
    """
    num_targets = len(targets)
    away = targets - positions.unsqueeze(2)  # (N, T, K, d)
    reached = away.norm(dim=3) <= radius
    steps = positions[:, 1:] - positions[:, :-1]
    directions = (steps / steps.norm(dim=2, keepdim=True)).unsqueeze(2)
    evidence = direction_log_density(directions, away[:, :-1], noise)  # (N, T - 1, K)
    ahead = torch.empty_like(away[..., 0])  # p(i_t | y_1:t)
    belief = torch.full_like(ahead[:, 0], 1 / num_targets)
    for t in range(positions.shape[1]):
        leaving = (belief * reached[:, t]).sum(1, keepdim=True)
        ahead[:, t] = torch.where(reached[:, t], 0.0, belief) + leaving / num_targets
        if t < evidence.shape[1]:
            belief = (ahead[:, t].log() + evidence[:, t]).softmax(1)
    return positions + (ahead.unsqueeze(3) * mean_direction(away, noise)).sum(2)


def mean_direction(center: Tensor, noise: float) -> Tensor:
    r"""Returns E[x / |x|] for x ~ N(center, noise^2 I): (..., d) -> (..., d).

    .. math::
        \frac{\mu}{\sigma} \frac{\Gamma((d + 1) / 2)}{\sqrt{2} \, \Gamma(d / 2 + 1)} \,
        {}_1F_1(1/2; d/2 + 1; -|\mu|^2 / 2 \sigma^2)
    """
    d = center.shape[-1]
    scaled = center / noise
    factor = math.exp(gammaln((d + 1) / 2) - gammaln(d / 2 + 1)) / math.sqrt(2)
    hypergeometric = hyp1f1(0.5, d / 2 + 1, -scaled.square().sum(-1, keepdim=True).numpy() / 2)
    return scaled * factor * torch.from_numpy(np.asarray(hypergeometric))


def direction_log_density(direction: Tensor, center: Tensor, noise: float) -> Tensor:
    r"""Returns the log density of the direction x / |x| for x ~ N(center, noise^2 I): (..., d), (..., d) -> (...).

    This is the projected normal distribution on the sphere,

    .. math::
        (2 \pi)^{-d/2} e^{-|m|^2 / 2} \int_0^\infty r^{d-1} e^{-r^2/2 + r a} dr,
        \qquad m = \mu / \sigma, \ a = u \cdot m.

    The integrand is log-concave. The integral is computed by Gauss-Legendre quadrature around its maximum.
    """
    d = center.shape[-1]
    scaled = center / noise
    along = (direction * scaled).sum(-1, keepdim=True)
    root = (along.square() + 4 * (d - 1)).sqrt()
    mode = torch.where(along > 0, (along + root) / 2, 2 * (d - 1) / (root - along))  # Avoids cancellation.
    width = (1 + (d - 1) / mode.square()).rsqrt()
    # The upper limit is larger because the tail is that of a gamma distribution if `along` is very negative.
    low, high = (mode - 10 * width).clamp(min=0), mode + 16 * width
    nodes, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(NODES))
    distance = low + (high - low) * (nodes + 1) / 2  # (..., nodes)
    logs = (d - 1) * distance.log() - distance.square() / 2 + distance * along + weights.log()
    integral = logs.logsumexp(-1) + ((high - low) / 2).log().squeeze(-1)
    return integral - d / 2 * math.log(2 * math.pi) - scaled.square().sum(-1) / 2
