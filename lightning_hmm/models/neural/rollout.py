"""Drawing the future of sequences from a neural HMM, step by step.

`EmissionRollout` draws observations for given states, and `Rollout` draws the states too. Every particle has its own
window, because each has drawn other observations. B is the number of sequences, N of particles, d of entries of a state
and D of features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hmm.inference import particle
from lightning_hmm.inference.particle import Particles, Streams
from lightning_hmm.models.neural.networks import ConditionalDensity, WindowFeatures
from lightning_hmm.models.neural.state_space import BoundModel
from lightning_hmm.models.neural.units import ObservationModel, Observations


class Emitted(NamedTuple):
    """The next observation given each particle: its mean and variance, and a draw. Each is (B, N, D) in float64."""

    mean: Tensor
    variance: Tensor
    drawn: Tensor

    def summary(self, level: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, D) mean and variance over particles, and quantiles between which a fraction `level` of the draws is."""
        mean = self.mean.mean(1)
        variance = (self.variance + (self.mean - mean.unsqueeze(1)).square()).mean(1)
        levels = torch.tensor([(1 - level) / 2, (1 + level) / 2]).to(self.drawn)
        lower, upper = self.drawn.quantile(levels, dim=1)
        return mean, variance, lower, upper


class EmissionRollout:
    """Draws the next observations of B sequences with N particles each, for given states.

    Args:
        model: The model of observations.
        observations: The sequences, which may differ in length; the draws continue from their ends.
        num_particles: N.
        order: Number of observations that the longest window reads.
    """

    def __init__(self, model: ObservationModel, observations: Observations, num_particles: int, order: int) -> None:
        self._emitter = model
        lengths = observations.lengths
        rows = torch.arange(len(lengths), device=lengths.device)

        def at_the_end(part: Tensor) -> Tensor:
            """(T + 1, B, ...) -> (B, N, ...)."""
            last = part[lengths, rows].unsqueeze(1)
            return last.expand(-1, num_particles, *[-1] * (last.dim() - 2))

        self._features = WindowFeatures(
            *(at_the_end(part) for part in observations.window_features.windows(max(order, 1)))
        )
        self._base = at_the_end(observations.base)
        self._unseen = at_the_end(observations.unseen)

    def emit(self, states: Tensor, streams: Streams) -> Emitted:
        """Draws the observations of the next step for its (B, N, d) states, and appends them to the windows."""
        model, unit = self._emitter, self._emitter.units.emission_std
        density = model.emission(states, self._prepared(model.emission))
        mean = model.in_data_units(density.mean.double(), self._base, self._unseen)
        variance = density.variance.double() * unit.square()
        drawn = self._base + unit * density.sample(streams).double()
        if model.residual:
            variance = torch.where(self._unseen, model.first_variance, variance)
            first = mean + model.first_variance.sqrt() * particle.normal(tuple(mean.shape), mean, streams)
            drawn = torch.where(self._unseen, first, drawn)
        self._append(drawn)
        return Emitted(mean, variance, drawn)

    def _prepared(self, part: ConditionalDensity) -> Tensor:
        """(B, N, units), since the windows of particles differ."""
        prepared = part.prepare(part.window.inputs(self._features.last(part.window.order)))
        return prepared.squeeze(-2) if prepared.dim() > 1 else prepared

    def _append(self, drawn: Tensor) -> None:
        units, dtype = self._emitter.units, self._features.value.dtype
        value = (drawn - units.center) / units.std
        change = (value - self._features.value[..., -1, :].double()) * units.std / units.change_std
        change = change.where(~self._unseen, 0.0)
        following = WindowFeatures(value.to(dtype), change.to(dtype), torch.ones_like(value, dtype=dtype))
        self._features = self._features.then(following)
        self._unseen = torch.zeros_like(self._unseen)
        if self._emitter.residual:
            self._base = drawn


class Rollout(EmissionRollout):
    """Draws the next states and observations of B sequences with N particles each.

    Args:
        bound: The model and the sequences whose future is drawn.
        num_particles: N.

    Attributes:
        states: (B, N, d) the last states.
    """

    def __init__(self, bound: BoundModel, num_particles: int) -> None:
        self._model = bound.model
        order = max(self._model.transition.window.order, self._model.emission.window.order)
        super().__init__(self._model, bound.observations, num_particles, order)
        self._empty = bound.observations.lengths == 0  # sequences whose next state is the first one
        self.states = bound.initial(num_particles).mean

    @classmethod
    def after(cls, bound: BoundModel, particles: Particles, streams: Streams) -> Rollout:
        """Continues from the filtered states at the ends of the sequences, resampled to have equal weights."""
        num_particles = particles.states.shape[2]
        run = cls(bound, num_particles)
        if len(particles.states):
            lengths = bound.observations.lengths
            rows, last = torch.arange(len(lengths), device=lengths.device), (lengths - 1).clamp(min=0)
            drawn = particle.resample(particles.log_weights[last, rows], num_particles, streams)
            run.states = particle.pick(particles.states[last, rows], drawn)
        return run

    def step(self, streams: Streams) -> Emitted:
        """Draws the next states and their observations."""
        model = self._model
        moved = model.transition(self.states, self._prepared(model.transition)).sample(streams)
        first = model.initial_density(*moved.shape[:2]).sample(streams)
        self.states = torch.where(self._empty.view(-1, 1, 1), first, moved)
        self._empty = torch.zeros_like(self._empty)
        return self.emit(self.states, streams)
