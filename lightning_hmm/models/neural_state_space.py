r"""The densities of a neural HMM, and these bound to a batch of sequences: what `inference.particle` asks, and what an M-step maximises.

.. math:: x_0 \sim \mu, \quad x_t \sim q(\cdot \mid f(x_{t-1}, y_{t-\tau_t}, \dots, y_{t-1})), \quad y_t \sim p(\cdot \mid g(x_t, y_{t-\tau_e}, \dots, y_{t-1}))

T steps, B sequences, N particles, M paths, d entries of a state, D features. Networks see observations in units of the data; see `neural_networks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.densities import DensityHead, Gaussian, PartialDensity
from lightning_hmm.models.baselines.recurrent import last_seen
from lightning_hmm.models.neural_networks import Entries, Window
from lightning_hmm.sequences import Sequences

_ROWS = 16384  # states of a piece of the M-step


class Conditional(nn.Module):
    """A density given a state and a window of observations: window, network and head in a row.

    Args:
        window: what is seen of the past.
        network: from state and window to numbers, a `WindowedMLP` or one that can be asked like it.
        head: from these to a density.
        residual: whether means are added to the state.
    """

    def __init__(self, window: Window, network: nn.Module, head: DensityHead, residual: bool = False) -> None:
        super().__init__()
        self.window, self.network, self.head, self.residual = window, network, head, residual

    def prepare(self, inputs: Tensor) -> Tensor:
        """(..., 1, units): what windows come to, once for all states."""
        prepared: Tensor = self.network.prepare(self.window(inputs))  # type: ignore[operator]
        return prepared.unsqueeze(-2) if prepared.dim() > 1 else prepared

    def forward(self, states: Tensor, prepared: Tensor) -> PartialDensity:
        """(R, N, d) states -> R x N densities."""
        density: PartialDensity = self.head(self.network(states, prepared), states if self.residual else None)
        return density


class Units(NamedTuple):
    """(D,) in float64: the `centre` and `scale` of the data, and the unit of an emission: `scale`, or that of changes; (), whether it is `residual`."""

    centre: Tensor
    scale: Tensor
    change: Tensor
    residual: bool

    @property
    def emitted(self) -> Tensor:
        return self.change if self.residual else self.scale


class Observations:
    """A batch as the densities see it, with time first.

    Attributes:
        lengths: (B,).
        targets: (T, B, D) what emissions describe, in their units: changes from the value last seen where they are residual; 0 where missing.
        observed: (T, B, D) where there is something for an emission to describe.
        first: (T, B, D) where a feature is observed for the first time, which is nothing that a change could describe; all false unless residual.
        starts: (T, B, D) these values, in units of the data.
        base: (T + 1, B, D) in float64 what a predicted change is added to; the centre where nothing was seen yet or nothing is residual.
        unseen: (T + 1, B, D) where nothing was seen yet.
        entries: (B, T + 1, D) what windows are made of.
        log_units: (T, B) what the units of emissions add to the log-density of an observation.
    """

    def __init__(self, sequences: Sequences, units: Units, dtype: torch.dtype) -> None:
        padded = sequences.padded().double()
        self.lengths = sequences.lengths.to(padded.device)
        longer = torch.cat([padded, padded.new_full((len(padded), 1, len(units.centre)), torch.nan)], 1)
        before, seen = last_seen(longer)
        unseen = before.isnan()
        value = ((before - units.centre) / units.scale).nan_to_num(nan=0.0)
        change = torch.cat([torch.zeros_like(before[:, :1]), (before[:, 1:] - before[:, :-1]) / units.change], 1).nan_to_num(nan=0.0)
        self.entries = Entries(value.to(dtype), change.to(dtype), seen.to(dtype))
        there, known = ~padded.isnan(), ~unseen[:, :-1]
        base = before.where(~unseen & units.residual, units.centre)
        observed = there & known if units.residual else there
        targets = ((padded - base[:, :-1]) / units.emitted).where(observed, 0.0)
        self.targets, self.observed = targets.to(dtype).transpose(0, 1).contiguous(), observed.transpose(0, 1).contiguous()
        self.first = (there & ~observed).transpose(0, 1)
        self.starts = ((padded - units.centre) / units.scale).where(there & ~observed, 0.0).to(dtype).transpose(0, 1)
        self.base, self.unseen = base.transpose(0, 1), unseen.transpose(0, 1)
        of_each = units.emitted.log() * observed + units.scale.log() * (there & ~observed)
        self.log_units = -of_each.sum(2).T.to(dtype)

    @property
    def inside(self) -> Tensor:
        """(T, B) steps that exist."""
        return torch.arange(len(self.targets), device=self.lengths.device).unsqueeze(1) < self.lengths


class Bound:
    """A `particle.StateSpaceModel` of B sequences. `model` has `initial_density`, `transition`, `emission` and `first_log_prob`."""

    def __init__(self, model: Any, observations: Observations) -> None:
        self.model, self.observations = model, observations
        self.inputs = {
            name: part.window.inputs(observations.entries.windows(part.window.order)) if part.window.order else observations.entries.value.new_zeros(0)
            for name, part in (("transition", model.transition), ("emission", model.emission))
        }
        self._prepared = {name: self._prepare(name, self.inputs[name]) for name in self.inputs}
        # Where all is observed, nothing need be left out.
        missing = ~observations.observed & observations.inside.unsqueeze(2)
        self._complete = (~missing.flatten(1).any(1)).tolist()
        self._constant = (observations.log_units + model.first_log_prob(observations)).detach().unsqueeze(2)

    def _prepare(self, name: str, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            prepared: Tensor = getattr(self.model, name).prepare(inputs)
        return prepared

    def _at(self, name: str, t: int) -> Tensor:
        prepared = self._prepared[name]
        return prepared[t] if prepared.dim() > 1 else prepared

    def initial(self, num_particles: int) -> Gaussian:
        density: Gaussian = self.model.initial_density(len(self.observations.lengths), num_particles)
        return density

    def transition(self, t: int, states: Tensor) -> PartialDensity:
        density: PartialDensity = self.model.transition(states, self._at("transition", t))
        return density

    def emission(self, t: int, states: Tensor) -> PartialDensity:
        """Of the targets of `observations`."""
        density: PartialDensity = self.model.emission(states, self._at("emission", t))
        return density

    def log_evidence(self, t: int, states: Tensor) -> Tensor:
        observations = self.observations
        observed = None if self._complete[t] else observations.observed[t].unsqueeze(1)
        return self.emission(t, states).log_prob(observations.targets[t].unsqueeze(1), observed) + self._constant[t]


class PathDensity:
    r"""The complete-data log-density of paths and observations, mean over paths: what an M-step maximises (eq. 3 and 18 of the paper).

    .. math:: Q = \sum_b w_b \frac1M \sum_m \Big[ \log \mu(x_0^m) + \sum_t \log q(x_t^m \mid x_{t-1}^m, y) + \log p(y_t \mid x_t^m, y) \Big]

    Steps are gathered once, those past the ends and those with nothing to describe left out; then it may be asked many times.

    Args:
        bound: the model and its sequences.
        paths: (T, B, M, d), each of the same weight.
        weights: (B,) of the sequences.
    """

    def __init__(self, bound: Bound, paths: Tensor, weights: Tensor) -> None:
        self.model, self.observations, self.num_paths = bound.model, bound.observations, paths.shape[2]
        self.weights = weights.to(paths.dtype)
        inside, started = self.observations.inside, self.observations.lengths > 0
        self.starts = paths[0][started] if len(paths) else paths.new_zeros(0, *paths.shape[2:])
        self.start_weights = self.weights[started]
        later = inside[1:]
        self.moves = {
            "inputs": self._inputs(bound, "transition", later, 1),
            "states": paths[:-1][later],
            "following": paths[1:][later],
            "weights": self.weights.expand(inside.shape)[1:][later],
        }
        seen = inside & self.observations.observed.any(2)
        observed = self.observations.observed[seen].unsqueeze(1)
        self.emissions = {
            "inputs": self._inputs(bound, "emission", seen, 0),
            "states": paths[seen],
            "targets": self.observations.targets[seen].unsqueeze(1),
            "observed": None if bool(observed.all()) else observed,
            "weights": self.weights.expand(inside.shape)[seen],
        }

    @staticmethod
    def _inputs(bound: Bound, name: str, chosen: Tensor, late: int) -> Tensor:
        inputs = bound.inputs[name]
        return inputs[late : late + len(chosen)][chosen] if inputs.dim() > 1 else inputs

    def _pieces(self) -> Iterator[Tensor]:
        """Terms of Q, of so many steps each that what a network keeps for its gradient stays in the processor's cache."""
        model, size = self.model, max(1, _ROWS // self.num_paths)
        initial = self.start_weights @ model.initial_density(*self.starts.shape[:2]).log_prob(self.starts).sum(1)
        yield initial / self.num_paths + (model.first_log_prob(self.observations) @ self.weights).sum()
        for rows in _split(self.moves, size):
            log_probs = model.transition(rows["states"], model.transition.prepare(rows["inputs"])).log_prob(rows["following"])
            yield rows["weights"] @ log_probs.sum(1) / self.num_paths
        for rows in _split(self.emissions, size):
            density = model.emission(rows["states"], model.emission.prepare(rows["inputs"]))
            yield rows["weights"] @ density.log_prob(rows["targets"], rows["observed"]).sum(1) / self.num_paths

    def gradient(self) -> tuple[Tensor, list[Tensor]]:
        """Q, less what the units of the data add, and its gradient in each parameter of the model. Pieces are summed in float64."""
        parameters = list(self.model.parameters())
        total = torch.zeros((), dtype=torch.float64, device=self.weights.device)
        gradients = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
        for piece in self._pieces():
            total += piece.detach()
            for gradient, part in zip(gradients, torch.autograd.grad(piece, parameters, allow_unused=True), strict=True):
                if part is not None:
                    gradient += part
        return total, gradients


def _split(rows: Mapping[str, Tensor | None], size: int) -> Iterator[dict[str, Any]]:
    """So many rows at a time; what has no rows, such as the inputs of a network that reads no window, stays whole."""
    assert rows["weights"] is not None
    num_rows = len(rows["weights"])
    for first in range(0, num_rows, size):
        yield {name: part[first : first + size] if part is not None and len(part) == num_rows else part for name, part in rows.items()}


def first_log_prob(observations: Observations, mean: Tensor, log_variance: Tensor) -> Tensor:
    """(T, B) log-density of each feature's first value, in units of the data, under independent Gaussians."""
    entries = -0.5 * ((observations.starts - mean).square() / log_variance.exp() + log_variance + math.log(2 * math.pi))
    return torch.where(observations.first, entries, 0.0).sum(2)
