"""Gaussian emissions with a variance for each state and feature."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Distribution
from lightning_hmm.inference.dense import Gaussian
from lightning_hmm.sequences import Sequences

_KMEANS_ROWS = 100_000


class DiagonalGaussian(Distribution):
    r"""Independent Gaussian features, in natural parameters.

    .. math:: \log N(y \mid m, v) = \eta_1 u + \eta_2 u^2 - a, \quad u = y - c, \quad \eta_1 = \frac{m - c}{v}, \;
        \eta_2 = -\frac{1}{2 v}, \; a = \frac{(m - c)^2}{2 v} + \frac12 \log 2 \pi v

    so that :math:`\partial L / \partial \eta_1 = E[\sum u]`, :math:`\partial L / \partial \eta_2 = E[\sum u^2]` and
    :math:`-\partial L / \partial a = E[\text{visits}]` for each state. The centre `c` is fixed: without it, data far from
    zero lose all digits in the difference of squares. `a` is kept for each feature apart, so that a step with some
    features missing counts for the others.

    The prior :math:`\exp(-s \, \text{scale} / 2 v)` with ``variance_prior = s`` adds that much scatter to every state, so
    that no variance falls to zero; `scale` is the variance of the data (1 if it was never given).

    Args:
        restarts, num_states, num_features: the shape of the parameters.
    """

    centre: Tensor
    scale: Tensor
    located: Tensor

    def __init__(self, restarts: int, num_states: int, num_features: int) -> None:
        super().__init__()
        shape = (restarts, num_states, num_features)
        self.eta1 = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        self.eta2 = nn.Parameter(torch.full(shape, -0.5, dtype=torch.float64))
        self.log_norm = nn.Parameter(torch.full(shape, 0.5 * math.log(2 * math.pi), dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(num_features, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(num_features, dtype=torch.float64))
        self.register_buffer("located", torch.tensor(False))

    @property
    def means(self) -> Tensor:
        return (self.centre - self.eta1 / (2 * self.eta2)).detach()

    @property
    def variances(self) -> Tensor:
        return (-0.5 / self.eta2).detach()

    def natural(self, restart: int) -> Gaussian:
        return Gaussian(self.eta1[restart], self.eta2[restart], self.log_norm[restart], self.centre)

    @torch.no_grad()
    def set(self, means: Tensor, variances: Tensor) -> None:
        """Takes (K, D) or (restarts, K, D) means and variances."""
        given = {"means": means, "variances": variances}
        for name, value in given.items():
            value = torch.as_tensor(value, dtype=torch.float64, device=self.eta1.device)
            if value.shape not in (self.eta1.shape, self.eta1.shape[1:]):
                raise ValueError(f"`{name}` must have shape {tuple(self.eta1.shape[1:])}, states by features, but has {tuple(value.shape)} instead.")
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"`{name}` must be finite, but an entry is not.")
            given[name] = value.expand(self.eta1.shape)
        if not bool((given["variances"] > 0).all()):
            where = tuple(torch.nonzero(given["variances"] <= 0)[0].tolist())[1:]
            raise ValueError(f"`variances` must be positive, but that of state {where[0]}, feature {where[1]} is not.")
        self._store(given["means"] - self.centre, given["variances"])

    def _store(self, offsets: Tensor, variances: Tensor) -> None:
        self.eta1.copy_(offsets / variances)
        self.eta2.copy_(-0.5 / variances)
        self.log_norm.copy_(offsets * offsets / (2 * variances) + 0.5 * (2 * math.pi * variances).log())

    @torch.no_grad()
    def locate(self, sequences: Sequences) -> None:
        """Takes centre and scale from the data, each step with its sequence's weight; means and variances stay what they are."""
        centre, scale = data_location(sequences)
        means, variances = self.means, self.variances
        self.centre.copy_(centre.to(self.centre.device))
        self.scale.copy_(scale.to(self.scale.device))
        self._store(means - self.centre, variances)
        self.located.fill_(True)

    @torch.no_grad()
    def initialise(self, sequences: Sequences, generator: torch.Generator, method: str) -> None:
        """Puts the means at the k-means centres, or at random data points; after `locate`.

        k-means sees at most 100,000 steps without missing features; each restart begins from its own seed.
        """
        values, weights = _observations(sequences)
        complete = (~values.isnan()).all(1)
        rows, weights = values[complete], weights[complete]
        num_states = self.eta1.shape[1]
        if len(rows) < num_states:
            raise ValueError(f"{num_states} states need at least as many steps without missing features to start from, but there are {len(rows)}.")
        if len(rows) > _KMEANS_ROWS:
            chosen = torch.randperm(len(rows), generator=generator)[:_KMEANS_ROWS]
            rows, weights = rows[chosen], weights[chosen]
        centre, scale = self.centre.cpu(), self.scale.cpu()
        points = (rows - centre) / scale.sqrt()
        start = _kmeans_start if method == "kmeans" else _random_start
        starts = [start(points, weights, num_states, int(torch.randint(2**31 - 1, (), generator=generator))) for _ in range(self.eta1.shape[0])]
        means, variances = (torch.stack(values).to(self.eta1.device) for values in zip(*starts, strict=True))
        self._store(means * self.scale.sqrt(), variances * self.scale)

    @torch.no_grad()
    def maximise(self, statistics: list[Tensor], share: Tensor | float = 1.0, *, variance_prior: float = 0.0) -> Tensor:  # type: ignore[override]
        sum1, sum2, visits = statistics[0], statistics[1], -statistics[2]
        seen = visits > 0
        count = torch.where(seen, visits, torch.ones_like(visits))
        mean = sum1 / count
        scatter = (sum2 - sum1 * mean).clamp(min=0) + variance_prior * share * self.scale  # below zero by rounding only
        variance = scatter / count
        # With no prior and a single point there is no variance to be had; the old one stays.
        spread = seen & (variance > 0)
        old_mean, old_variance = self.means - self.centre, self.variances
        self._store(torch.where(seen, mean, old_mean), torch.where(spread, variance, old_variance))
        return (~spread).any(-1).sum()

    def log_prior(self, *, variance_prior: float = 0.0) -> Tensor:  # type: ignore[override]
        return -(variance_prior * self.scale / (2 * self.variances)).flatten(1).sum(1)

    def num_free_parameters(self, restart: int) -> int:
        return 2 * self.eta1[restart].numel()


def data_location(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(D,) means and variances of the features, each step with its sequence's weight; a variance of 1 where nothing varies."""
    values, weights = _observations(sequences)
    observed = ~values.isnan()
    share = observed * weights[:, None]
    total = share.sum(0)
    if bool((total == 0).any()):
        raise ValueError(f"Every feature must be observed somewhere, but feature {int((total == 0).nonzero()[0, 0])} is missing at every step.")
    centre = (torch.where(observed, values, 0.0) * share).sum(0) / total
    variance = (torch.where(observed, values - centre, 0.0) ** 2 * share).sum(0) / total
    # A feature that never changes has no scale of its own; what its mean was rounded by is none.
    rounding = (8 * torch.finfo(torch.float64).eps * centre.abs()) ** 2
    scale = torch.where(variance > rounding, variance, torch.ones_like(variance))
    return centre, scale


def _observations(sequences: Sequences) -> tuple[Tensor, Tensor]:
    """The steps that count, in float64 on the CPU, and their weights."""
    values = sequences.values.double().cpu()
    if sequences.weights is None:
        return values, torch.ones(len(values), dtype=torch.float64)
    weights = sequences.repeat_interleave(sequences.weights).cpu()
    return values[weights > 0], weights[weights > 0]


def _kmeans_start(points: Tensor, weights: Tensor, num_states: int, seed: int) -> tuple[Tensor, Tensor]:
    """Centres, and the variance of the points around their own centre; in units of the data's spread."""
    from sklearn.cluster import KMeans

    found = KMeans(num_states, n_init=1, random_state=seed).fit(points.numpy(), sample_weight=weights.numpy())
    centres = torch.from_numpy(found.cluster_centers_).double()
    squares = (points - centres[torch.from_numpy(found.labels_).long()]) ** 2
    variance = (squares * weights[:, None]).sum(0) / weights.sum()
    return centres, variance.clamp(min=1e-3).expand(num_states, -1)


def _random_start(points: Tensor, weights: Tensor, num_states: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data points, and the variance of the data."""
    chosen = torch.multinomial(weights, num_states, generator=torch.Generator().manual_seed(seed))
    return points[chosen], torch.ones(num_states, points.shape[1], dtype=torch.float64)
