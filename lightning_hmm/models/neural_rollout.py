"""A neural HMM run into the future: states and observations drawn step by step, each with windows of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hmm.inference import particle
from lightning_hmm.inference.particle import Particles, Streams
from lightning_hmm.models.neural_networks import Entries
from lightning_hmm.models.neural_state_space import Bound, Conditional, Observations


class Emitted(NamedTuple):
    """(B, N, D) in float64: moments of the next observation given each particle, and one drawn."""

    mean: Tensor
    variance: Tensor
    drawn: Tensor


class Rollout:
    """B sequences with N particles each, at the step before the next.

    Args:
        model: a `NeuralHMM`.
        states: (B, N, d) the last ones.
        entries: (B, N, order, D) the last observations.
        base, unseen: (B, N, D), as in `Observations`.
        empty: (B,) whether nothing has happened yet: the next state is a first one.
    """

    def __init__(self, model: Any, states: Tensor, entries: Entries, base: Tensor, unseen: Tensor, empty: Tensor) -> None:
        self.model, self.states, self.entries, self.base, self.unseen, self.empty = model, states, entries, base, unseen, empty

    @classmethod
    def after(cls, model: Any, bound: Bound, particles: Particles, streams: Streams) -> Rollout:
        """From the ends of sequences, which may differ in length, with particles that all count the same."""
        lengths = bound.observations.lengths
        rows, last = torch.arange(len(lengths), device=lengths.device), (lengths - 1).clamp(min=0)
        run = cls.from_scratch(model, bound, particles.states.shape[2])
        if len(particles.states):
            chosen = particle.resample(particles.log_weights[last, rows], particles.states.shape[2], streams)
            run.states = particles.states[last, rows].gather(1, chosen.unsqueeze(2).expand(-1, -1, particles.states.shape[3]))
        return run

    @classmethod
    def from_scratch(cls, model: Any, bound: Bound, num_particles: int) -> Rollout:
        """With the past of the sequences, but states that are yet to be drawn."""
        order = max(model.transition.window.order, model.emission.window.order, 1)
        return cls.following(model, bound.observations, bound.initial(num_particles).mean, order)

    @classmethod
    def following(cls, model: Any, observations: Observations, states: Tensor, order: int) -> Rollout:
        """With given states, and windows of `order` observations before the ends of sequences."""
        lengths, num_particles = observations.lengths, states.shape[1]
        rows = torch.arange(len(lengths), device=lengths.device)
        past = observations.entries.windows(order)
        entries = Entries(*(part[lengths, rows].unsqueeze(1).expand(-1, num_particles, -1, -1) for part in past))
        base, unseen = (part[lengths, rows].unsqueeze(1).expand(-1, num_particles, -1) for part in (observations.base, observations.unseen))
        return cls(model, states, entries, base, unseen, lengths == 0)

    def step(self, streams: Streams) -> Emitted:
        """Draws the next states, and observations that later windows hold."""
        model = self.model
        moved = model.transition(self.states, self._prepared(model.transition)).sample(streams)
        first = model.initial_density(*moved.shape[:2]).sample(streams)
        self.states, self.empty = torch.where(self.empty.view(-1, 1, 1), first, moved), torch.zeros_like(self.empty)
        return self.emit(streams)

    def emit(self, streams: Streams) -> Emitted:
        """The same for states that are there already."""
        model, units = self.model, self.model.units
        density = model.emission(self.states, self._prepared(model.emission))
        mean, variance = model.in_data_units(density.mean.double(), self.base, self.unseen), density.variance.double() * units.emitted.square()
        drawn = self.base + units.emitted * density.sample(streams).double()
        if model.residual:
            spread = units.scale.square() * model.first_log_variance.double().exp()
            variance = torch.where(self.unseen, spread, variance)
            drawn = torch.where(self.unseen, mean + spread.sqrt() * particle.normal(tuple(mean.shape), mean, streams), drawn)
        self._append(drawn)
        return Emitted(mean, variance, drawn)

    def _prepared(self, part: Conditional) -> Tensor:
        """(B, N, units): windows differ from particle to particle."""
        order = part.window.order
        prepared = part.prepare(part.window.inputs(self.entries.last(order)) if order else self.entries.value.new_zeros(0))
        return prepared.squeeze(-2) if prepared.dim() > 1 else prepared

    def _append(self, drawn: Tensor) -> None:
        units, dtype = self.model.units, self.entries.value.dtype
        value = (drawn - units.centre) / units.scale
        change = (value - self.entries.value[..., -1, :].double()) * units.scale / units.change
        entry = Entries(value.to(dtype), change.where(~self.unseen, 0.0).to(dtype), torch.ones_like(value, dtype=dtype))
        self.entries, self.unseen = self.entries.then(entry), torch.zeros_like(self.unseen)
        if self.model.residual:
            self.base = drawn

    @staticmethod
    def summary(emitted: Emitted, level: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, D) mean and variance over particles, and the quantiles that hold `level` of the probability between them."""
        mean = emitted.mean.mean(1)
        variance = (emitted.variance + (emitted.mean - mean.unsqueeze(1)).square()).mean(1)
        lower, upper = emitted.drawn.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]).to(emitted.drawn), dim=1)
        return mean, variance, lower, upper
