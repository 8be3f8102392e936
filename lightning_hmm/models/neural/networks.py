"""Networks that read a state and a window of past observations, and the densities that they describe.

The window of order n before step t holds the observations y_{t-n} to y_{t-1}. A missing entry has the value that was
last observed, and a separate input marks it as missing. The same holds for steps before the first one. S is the number
of sequences, T of steps and D of features of an observation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hmm.distributions.densities import DensityHead, Family, PartialDensity
from lightning_hmm.models.sequence_model import check_choices, check_counts
from lightning_hmm.random import generator

WindowKind = Literal["mlp", "lstm"]
Activation = Literal["relu", "tanh"]
Mean = Literal["absolute", "residual"]


class WindowFeatures(NamedTuple):
    """What a window shows of each observation. Each part is (S, ..., D) with time along the second last dimension.

    value: the value last seen, standardized.
    change: its change from the value of the step before, in units of the typical change.
    seen: 1 if it was observed at that very step, else 0.
    """

    value: Tensor
    change: Tensor
    seen: Tensor

    def last(self, order: int) -> WindowFeatures:
        """The last `order` steps."""
        return WindowFeatures(*(part[..., part.shape[-2] - order :, :] for part in self))

    def then(self, following: WindowFeatures) -> WindowFeatures:
        """The window one step later: (S, ..., D) features of one more step at the end, and without the first step."""
        pairs = zip(self, following, strict=True)
        return WindowFeatures(*(torch.cat([part[..., 1:, :], new.unsqueeze(-2)], -2) for part, new in pairs))

    def windows(self, order: int) -> WindowFeatures:
        """(S, T, D) -> (T, S, order, D): the window before each of T steps, padded with zeros before the beginning."""
        padded = (F.pad(part, (0, 0, order - 1, 0)) for part in self)
        return WindowFeatures(*(part.unfold(1, order, 1).permute(1, 0, 3, 2) for part in padded))


class Window(nn.Module):
    """Reads a window of observations and returns `num_outputs` numbers.

    The numbers are the concatenated features of the window, or the last state of an LSTM that reads one observation
    after the other.

    Args:
        order: Number of observations in the window. A window of order 0 is empty.
        num_features: D, the number of features of an observation.
        kind: "mlp" for concatenation, or "lstm".
        width: Size of the state of the LSTM.
        dtype: Data type of the parameters.
    """

    def __init__(self, order: int, num_features: int, kind: WindowKind, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.order = order
        reads = kind == "lstm" and order > 0
        self.reader = nn.LSTM(3 * num_features, width, batch_first=True, dtype=dtype) if reads else None
        self.num_outputs = width if self.reader is not None else 2 * order * num_features

    def inputs(self, features: WindowFeatures) -> Tensor:
        """(..., order, D) -> (..., inputs) or, for an LSTM, (..., order, 3 D). They do not depend on parameters."""
        if not self.order:
            return features.value.new_zeros(0)
        value, change, seen = features
        if self.reader is not None:
            # The change of the oldest observation is from one outside of the window.
            inside = torch.cat([torch.zeros_like(change[..., :1, :]), change[..., 1:, :]], -2)
            return torch.cat([value, inside, seen], -1)
        # The last value and the changes that led to it are equivalent to the values, but each has its own scale.
        return torch.cat([value[..., -1, :], change[..., 1:, :].flatten(-2), seen.flatten(-2)], -1)

    def inputs_of_each_step(self, features: WindowFeatures) -> Tensor:
        """(S, T, D) -> (T, S, ...): the inputs of the window before each step. Empty for a window of order 0."""
        return self.inputs(features.windows(self.order) if self.order else features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns (..., num_outputs)."""
        if self.reader is None:
            return inputs
        _, (last, _) = self.reader(inputs.flatten(0, -3))
        return last[0].unflatten(0, inputs.shape[:-2])


class WindowNetwork(nn.Module, ABC):
    """A network of a state and a window. The part that depends on the window only is computed once for all states."""

    @abstractmethod
    def prepare(self, window: Tensor) -> Tensor:
        """(..., window_size) -> (..., units): the part of the computation that does not depend on the state."""

    @abstractmethod
    def forward(self, states: Tensor, prepared: Tensor) -> Tensor:
        """(..., N, state_size), (..., 1, units) -> (..., N, num_outputs)."""


class WindowedMLP(WindowNetwork):
    """A multilayer perceptron whose first layer is split into a part for the state and one for the window.

    Args:
        state_size: Number of entries of the state.
        window_size: Number of outputs of the window.
        num_outputs: Number of outputs of the network.
        num_layers: Number of layers of weights. With 1 the network is linear.
        width: Units of each hidden layer.
        activation: Activation of the hidden layers, "relu" or "tanh".
        dtype: Data type of the parameters.
        is_constant: (num_outputs,) the outputs that do not depend on the inputs if the network is linear.
    """

    varies: Tensor | None

    def __init__(
        self,
        state_size: int,
        window_size: int,
        num_outputs: int,
        num_layers: int,
        width: int,
        activation: Activation,
        dtype: torch.dtype,
        is_constant: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        sizes = [*[width] * (num_layers - 1), num_outputs]
        first = nn.Linear(state_size + window_size, sizes[0], dtype=dtype)  # initialized as one layer
        # Stored as (inputs, units), because the gradient is then far faster on a CPU.
        self.from_state = nn.Parameter(first.weight.detach()[:, :state_size].T.clone())
        self.from_window = nn.Parameter(first.weight.detach()[:, state_size:].clone()) if window_size else None
        self.bias = nn.Parameter(first.bias.detach().clone())
        self.layers = nn.ModuleList(nn.Linear(before, after, dtype=dtype) for before, after in pairwise(sizes))
        varies = None if is_constant is None or num_layers > 1 else (~is_constant).to(dtype)
        self.register_buffer("varies", varies, persistent=False)

    def prepare(self, window: Tensor) -> Tensor:
        if self.from_window is None:
            return self.bias
        return F.linear(window, self._varying(self.from_window.T).T, self.bias)

    def _varying(self, weights: Tensor) -> Tensor:
        """(inputs, units) weights with zeros for the outputs that are constant."""
        return weights if self.varies is None else weights * self.varies

    def forward(self, states: Tensor, prepared: Tensor) -> Tensor:
        hidden = (states @ self._varying(self.from_state)).add_(prepared)
        shape, hidden = hidden.shape, hidden.flatten(0, -2)
        for layer in self.layers:
            if self.activation == "tanh":
                hidden = hidden.tanh()
            else:  # in place only without a gradient, which would cost more for a view that was changed in place
                hidden = hidden.relu() if hidden.requires_grad else hidden.relu_()
            hidden = layer(hidden)
        return hidden.view(*shape[:-1], hidden.shape[-1])


class ConcatInputs(WindowNetwork):
    """Lets any module from (..., inputs) to (..., outputs) take the place of a `WindowedMLP`.

    The inputs of the module are the state and the outputs of the window, concatenated.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def prepare(self, window: Tensor) -> Tensor:
        return window

    def forward(self, states: Tensor, prepared: Tensor) -> Tensor:
        outputs: Tensor = self.module(torch.cat([states, prepared.expand(*states.shape[:-1], -1)], -1))
        return outputs


class ConditionalDensity(nn.Module):
    """A density given a state and a window of observations: a window, a network and a density head in sequence.

    Args:
        window: Reads the past observations.
        network: Computes the outputs of the state and the window.
        head: Turns the outputs into densities.
        residual: Whether the state is added to the means.
    """

    def __init__(self, window: Window, network: WindowNetwork, head: DensityHead, residual: bool = False) -> None:
        super().__init__()
        self.window = window
        self.network = network
        self.head = head
        self.residual = residual

    def prepare(self, inputs: Tensor) -> Tensor:
        """Inputs of windows -> (..., 1, units), computed once for all states."""
        prepared = self.network.prepare(self.window(inputs))
        return prepared.unsqueeze(-2) if prepared.dim() > 1 else prepared

    def forward(self, states: Tensor, prepared: Tensor) -> PartialDensity:
        """(R, N, d) states -> R x N densities."""
        density: PartialDensity = self.head(self.network(states, prepared), states if self.residual else None)
        return density


@dataclass(frozen=True)
class NetworkOptions:
    """The options that the networks of a model have in common.

    Args:
        num_features: D, the number of features of an observation.
        window: "mlp" or "lstm", see `Window`.
        num_layers: Number of layers of each network.
        width: Units of the hidden layers, and of an LSTM.
        activation: Activation of the hidden layers.
        num_components: Number of components of a mixture.
        dtype: Data type of the parameters.
    """

    num_features: int
    window: WindowKind
    num_layers: int
    width: int
    activation: Activation
    num_components: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_counts(num_layers=self.num_layers, width=self.width, num_components=self.num_components)
        check_choices(WindowKind, window=self.window)
        check_choices(Activation, activation=self.activation)

    def make_mlp(
        self, state_size: int, window_size: int, num_outputs: int, is_constant: Tensor | None = None
    ) -> WindowedMLP:
        sizes = (state_size, window_size, num_outputs)
        return WindowedMLP(*sizes, self.num_layers, self.width, self.activation, self.dtype, is_constant)

    def make_window(self, order: int) -> Window:
        return Window(order, self.num_features, self.window, self.width, self.dtype)


@dataclass(frozen=True)
class DensityOptions:
    """The options of one conditional density of a model.

    Args:
        name: "transition" or "emission", for error messages.
        family: Family of the densities.
        order: Number of observations in the window.
        mean: "residual" if the network computes a difference, else "absolute".
        log_variance: Initial log-variance.
        bound: Largest absolute value of a mean.
    """

    name: str
    family: Family
    order: int
    mean: Mean
    log_variance: float
    bound: float | None = None

    def __post_init__(self) -> None:
        check_choices(Family, **{self.name: self.family})
        check_choices(Mean, **{f"{self.name}_mean": self.mean})
        check_counts(0, **{f"{self.name}_order": self.order})

    def make_head(self, size: int, num_components: int, dtype: torch.dtype) -> DensityHead:
        return DensityHead(self.family, size, self.log_variance, num_components, self.bound, dtype)


def require_features(num_features: int | None) -> int:
    """Raises a `ValueError` if the data have no features, because they are symbols."""
    if num_features is None:
        raise ValueError(
            "`num_features` must be given: a neural HMM is for real vectors. For symbols use another model."
        )
    return num_features


@contextmanager
def seeded_modules(seed: int) -> Iterator[None]:
    """Seeds the global generator, from which torch modules draw their parameters, and restores its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "start").initial_seed())
        yield
