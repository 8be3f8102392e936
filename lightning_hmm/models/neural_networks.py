"""The networks of a neural HMM: what they see of the past, and how it is combined with the state.

S sequences, T steps, D features of an observation. Windows hold the last observations before a step: step t of an order n sees
y_{t-n} to y_{t-1}. What is missing is as it was last seen, and an input of its own says so; so is what lies before the first step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WindowKind = Literal["mlp", "lstm"]
Activation = Literal["relu", "tanh"]


class Entries(NamedTuple):
    """What windows are made of, (S, ..., D) each, in time along the axis before the last: `value` last seen in units of the data, its `change` from
    the one before in units of changes, and whether it was `seen` at that very step, 0 or 1."""

    value: Tensor
    change: Tensor
    seen: Tensor

    def last(self, order: int) -> Entries:
        return Entries(*(part[..., part.shape[-2] - order :, :] for part in self))

    def then(self, entry: Entries) -> Entries:
        """With one more at the end, (S, ..., D), in place of the first."""
        return Entries(*(torch.cat([part[..., 1:, :], new.unsqueeze(-2)], -2) for part, new in zip(self, entry, strict=True)))

    def windows(self, order: int) -> Entries:
        """(S, T, D) -> (T, S, order, D): the window before each of T steps, of which the first entries lie before the beginning."""
        return Entries(*(F.pad(part, (0, 0, order - 1, 0)).unfold(1, order, 1).permute(1, 0, 3, 2) for part in self))


class Window(nn.Module):
    """From entries to `num_outputs` numbers: all of them side by side, or the last state of an LSTM that reads them.

    Args:
        order: how many observations.
        num_features: D.
        kind: "mlp" or "lstm".
        width: of an LSTM.
        dtype: of its parameters.
    """

    def __init__(self, order: int, num_features: int, kind: WindowKind, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        if kind not in get_args(WindowKind):
            raise ValueError(f"`window` must be one of {', '.join(get_args(WindowKind))}, but is {kind!r} instead.")
        self.order = order
        self.reader = nn.LSTM(3 * num_features, width, batch_first=True, dtype=dtype) if kind == "lstm" and order else None
        self.num_outputs = width if self.reader is not None else 2 * order * num_features

    def inputs(self, entries: Entries) -> Tensor:
        """(..., order, D) -> (..., inputs) or, for an LSTM, (..., order, 3 D). Computed once: it has no parameters."""
        value, change, seen = entries
        if self.reader is not None:
            inside = torch.cat([torch.zeros_like(change[..., :1, :]), change[..., 1:, :]], -2)  # the oldest changed from one outside
            return torch.cat([value, inside, seen], -1)
        # Where it is now and how it got there: the same as the values themselves, but on the scale of each.
        return torch.cat([value[..., -1, :], change[..., 1:, :].flatten(-2), seen.flatten(-2)], -1)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., num_outputs)."""
        if self.reader is None:
            return inputs
        _, (last, _) = self.reader(inputs.flatten(0, -3))
        return last[0].unflatten(0, inputs.shape[:-2])


class WindowedMLP(nn.Module):
    """A perceptron of (state, window). Its first layer treats the two apart: what the window adds is the same for all states of a sequence.

    Args:
        state_size, window_size, num_outputs: of inputs and outputs.
        num_layers: of weights; with 1 it is linear.
        width: units of each hidden layer.
        activation: of these.
        dtype: of its parameters.
        is_constant: (num_outputs,) which outputs do not depend on the inputs where it is linear.
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
        if activation not in get_args(Activation):
            raise ValueError(f"`activation` must be one of {', '.join(get_args(Activation))}, but is {activation!r} instead.")
        self.activation = activation
        sizes = [*[width] * (num_layers - 1), num_outputs]
        first = nn.Linear(state_size + window_size, sizes[0], dtype=dtype)  # drawn as one layer
        self.from_state = nn.Parameter(first.weight.detach()[:, :state_size].T.clone())  # as (inputs, units) its gradient is far faster on a CPU
        self.from_window = nn.Parameter(first.weight.detach()[:, state_size:].clone()) if window_size else None
        self.bias = nn.Parameter(first.bias.detach().clone())
        self.layers = nn.ModuleList(nn.Linear(before, after, dtype=dtype) for before, after in pairwise(sizes))
        self.register_buffer("varies", None if is_constant is None or num_layers > 1 else (~is_constant).to(dtype), persistent=False)

    def prepare(self, window: Tensor) -> Tensor:
        """(..., window_size) -> (..., units): its part in the first layer."""
        return self.bias if self.from_window is None else F.linear(window, self._varying(self.from_window.T).T, self.bias)

    def _varying(self, weights: Tensor) -> Tensor:
        """(inputs, units) without those to outputs that are constant."""
        return weights if self.varies is None else weights * self.varies

    def forward(self, states: Tensor, prepared: Tensor) -> Tensor:
        """(..., N, state_size), (..., 1, units) -> (..., N, num_outputs)."""
        hidden = (states @ self._varying(self.from_state)).add_(prepared)
        shape, hidden = hidden.shape, hidden.flatten(0, -2)
        for layer in self.layers:
            if self.activation == "tanh":
                hidden = hidden.tanh()
            else:
                hidden = hidden.relu() if hidden.requires_grad else hidden.relu_()  # what works in place on a view costs its gradient more
            hidden = layer(hidden)
        return hidden.view(*shape[:-1], hidden.shape[-1])


class Whole(nn.Module):
    """Any module from (..., inputs) to (..., outputs) in the place of a `WindowedMLP`: it sees state and window as one vector."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def prepare(self, window: Tensor) -> Tensor:
        return window

    def forward(self, states: Tensor, prepared: Tensor) -> Tensor:
        outputs: Tensor = self.module(torch.cat([states, prepared.expand(*states.shape[:-1], -1)], -1))
        return outputs
