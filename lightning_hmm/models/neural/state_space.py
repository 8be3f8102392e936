r"""A neural HMM that is bound to a batch of sequences, for the particle filter and for the M-step.

.. math:: x_0 \sim \mu, \quad x_t \sim q(\cdot \mid f(x_{t-1}, y_{t-\tau_t}, \dots, y_{t-1})), \quad
    y_t \sim p(\cdot \mid g(x_t, y_{t-\tau_e}, \dots, y_{t-1}))

`BoundModel` is the `StateSpaceModel` that `inference.particle` filters with, and `PathDensity` is the function that an
M-step maximizes. T is the number of steps, B of sequences, N of particles, M of paths, d of entries of a state and D of
features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.densities import DiagonalGaussian, PartialDensity
from lightning_hmm.models.neural.networks import ConditionalDensity
from lightning_hmm.models.neural.units import ObservationModel, Observations

# States in a chunk of the M-step. What a network keeps of a chunk for its gradient then fits into the processor's
# cache.
_CHUNK = 16384


class LatentStateModel(ObservationModel, Protocol):
    """A neural HMM whose state is a vector: the members that `BoundModel`, `PathDensity` and `Rollout` use."""

    transition: ConditionalDensity

    def initial_density(self, num_sequences: int, num_particles: int) -> DiagonalGaussian: ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class BoundModel:
    """A model that is bound to B sequences; it implements `inference.particle.StateSpaceModel`.

    The windows of all steps are read once, with the present parameters and without a gradient.

    Args:
        model: The densities.
        observations: The sequences.
    """

    def __init__(self, model: LatentStateModel, observations: Observations) -> None:
        self.model = model
        self.observations = observations
        features = observations.window_features
        self.transition_inputs = model.transition.window.inputs_of_each_step(features)
        self.emission_inputs = model.emission.window.inputs_of_each_step(features)
        with torch.no_grad():
            self._prepared_transition = model.transition.prepare(self.transition_inputs)
            self._prepared_emission = model.emission.prepare(self.emission_inputs)
            self._constant = (observations.log_units + model.first_log_prob(observations)).unsqueeze(2)
        # Steps at which everything is observed need no mask.
        missing = ~observations.observed & observations.inside.unsqueeze(2)
        self._complete = (~missing.flatten(1).any(1)).tolist()

    def initial(self, num_particles: int) -> DiagonalGaussian:
        return self.model.initial_density(len(self.observations.lengths), num_particles)

    def transition(self, t: int, states: Tensor) -> PartialDensity:
        density: PartialDensity = self.model.transition(states, _at(self._prepared_transition, t))
        return density

    def emission(self, t: int, states: Tensor) -> PartialDensity:
        """The densities of the targets of `observations` at step t."""
        density: PartialDensity = self.model.emission(states, _at(self._prepared_emission, t))
        return density

    def log_obs(self, t: int, states: Tensor) -> Tensor:
        observations = self.observations
        observed = None if self._complete[t] else observations.observed[t].unsqueeze(1)
        return self.emission(t, states).log_prob(observations.targets[t].unsqueeze(1), observed) + self._constant[t]


class PathDensity:
    r"""The expected complete-data log-density, estimated with paths: what an M-step maximizes (eq. 3 and 18 of the
    paper).

    .. math:: Q = \sum_b w_b \frac1M \sum_m \Big[ \log \mu(x_0^m) + \sum_t \log q(x_t^m \mid x_{t-1}^m, y)
        + \log p(y_t \mid x_t^m, y) \Big]

    The steps are gathered once, without those past the ends of sequences and those at which nothing is observed. Q and
    its gradient can then be computed many times, for changing parameters.

    Args:
        bound: The model and its sequences.
        paths: (T, B, M, d) paths with equal weights.
        weights: (B,) weights of the sequences.
    """

    def __init__(self, bound: BoundModel, paths: Tensor, weights: Tensor) -> None:
        self.model = bound.model
        self.observations = bound.observations
        self.num_paths = paths.shape[2]
        self.weights = weights.to(paths.dtype)
        inside, started = self.observations.inside, self.observations.lengths > 0
        self.starts = paths[0][started] if len(paths) else paths.new_zeros(0, *paths.shape[2:])
        self.start_weights = self.weights[started]
        moved = inside[1:]
        self.moves = {
            "inputs": _select(bound.transition_inputs[1:], moved),
            "states": paths[:-1][moved],
            "following": paths[1:][moved],
            "weights": self.weights.expand(inside.shape)[1:][moved],
        }
        seen = inside & self.observations.observed.any(2)
        observed = self.observations.observed[seen].unsqueeze(1)
        self.emissions = {
            "inputs": _select(bound.emission_inputs, seen),
            "states": paths[seen],
            "targets": self.observations.targets[seen].unsqueeze(1),
            "observed": None if bool(observed.all()) else observed,
            "weights": self.weights.expand(inside.shape)[seen],
        }

    def _terms(self) -> Iterator[Tensor]:
        """The terms of Q, each of one chunk of steps."""
        model, size = self.model, max(1, _CHUNK // self.num_paths)
        initial = self.start_weights @ model.initial_density(*self.starts.shape[:2]).log_prob(self.starts).sum(1)
        yield initial / self.num_paths + (model.first_log_prob(self.observations) @ self.weights).sum()
        for rows in _chunks(self.moves, size):
            moves = model.transition(rows["states"], model.transition.prepare(rows["inputs"]))
            yield rows["weights"] @ moves.log_prob(rows["following"]).sum(1) / self.num_paths
        for rows in _chunks(self.emissions, size):
            emissions = model.emission(rows["states"], model.emission.prepare(rows["inputs"]))
            yield rows["weights"] @ emissions.log_prob(rows["targets"], rows["observed"]).sum(1) / self.num_paths

    def gradient(self) -> tuple[Tensor, list[Tensor]]:
        """Q, without the constant that is due to the units, and its gradient in each parameter, summed in float64."""
        parameters = list(self.model.parameters())
        total = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        gradients = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
        for term in self._terms():
            total += term.detach()
            for gradient, part in zip(gradients, torch.autograd.grad(term, parameters, allow_unused=True), strict=True):
                if part is not None:
                    gradient += part
        return total, gradients


def _at(prepared: Tensor, t: int) -> Tensor:
    """The prepared window of step t. A network without a window has the same for all steps, which has one dimension."""
    return prepared[t] if prepared.dim() > 1 else prepared


def _select(inputs: Tensor, steps: Tensor) -> Tensor:
    """The inputs of the steps where (T, B) `steps` is true; those of an empty window are empty."""
    return inputs[: len(steps)][steps] if inputs.dim() > 1 else inputs


def _chunks(rows: Mapping[str, Tensor | None], size: int) -> Iterator[dict[str, Any]]:
    """`size` rows at a time. Entries without rows, such as the inputs of an empty window, stay as they are."""
    assert rows["weights"] is not None
    num_rows = len(rows["weights"])
    for first in range(0, num_rows, size):
        yield {
            name: part[first : first + size] if part is not None and len(part) == num_rows else part
            for name, part in rows.items()
        }
