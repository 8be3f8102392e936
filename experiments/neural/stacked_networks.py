"""Several recurrent networks of the same size, trained in one computation, each on its own data.

At these sizes one network takes nearly as long as ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from datamodules.base import SequenceDataModule
from lightning_hmm.models import RecurrentNet
from lightning_hmm.random import generator

WIDEST = 60  # largest joint state of networks that run as one; for larger ones the zeros cost more than separate calls


class Stack:
    """E recurrent networks, each with complete sequences of equal length T. All tensors have a first dimension E.

    The updates are those of `RecurrentNet`: Adam on the likelihood of each batch, gradients clipped for each network by
    itself. At the end each network is as it was in the epoch with the least error on its validation part. Training ends
    when none has improved for `patience` epochs.

    Args:
        models: Networks with the same cell and size. They are trained in place.
        data: Data of each network. The seed determines the order of the sequences.
    """

    def __init__(self, models: Sequence[RecurrentNet], data: Sequence[SequenceDataModule]) -> None:
        self.models, self.data = models, data
        for model, drawn in zip(models, data, strict=True):
            model.initialize(drawn.train_sequences)
        named = [dict(model.named_parameters()) for model in models]
        self.parameters = {
            name: torch.stack([own[name].detach() for own in named]).requires_grad_() for name in named[0]
        }
        self.train, self.val = [self._standard(part) for part in ("train", "val")]
        self.residual = torch.tensor([float(model.residual) for model in models]).view(-1, 1, 1, 1)

    def _standard(self, part: str) -> Tensor:
        """Returns the (E, N, T, D) standardized positions."""
        values = []
        for model, drawn in zip(self.models, self.data, strict=True):
            padded = getattr(drawn, f"{part}_sequences").padded()
            if bool(padded.isnan().any()):
                raise ValueError(
                    f"`Stack` needs complete sequences of equal length, but the part {part!r} has missing values."
                )
            values.append((padded - model.center) / model.data_variance.sqrt())
        return torch.stack(values).float()

    def outputs(self, values: Tensor) -> Tensor:
        """(E, N, T, D) -> (E, N, T, D) one-step predictions."""
        networks, count, steps, features = values.shape
        late = torch.cat([torch.zeros_like(values[:, :, :1]), values[:, :, :-1]], 2)
        seen = torch.ones_like(late)
        seen[:, :, 0] = 0
        inputs = torch.cat([late, seen], 3)
        groups = torch.arange(networks).split(max(1, WIDEST // self.models[0].hparams["hidden_size"]))
        found = torch.cat([self._run(group, inputs[group]) for group in groups]).flatten(1, 2)  # (E, N T, hidden)
        weights = self.parameters
        layers = sorted({int(name.split(".")[1]) for name in weights if name.startswith("head")})
        for here, after in pairwise([*layers, None]):
            found = torch.baddbmm(weights[f"head.{here}.bias"].unsqueeze(1), found, weights[f"head.{here}.weight"].mT)
            found = found if after is None else found.relu()
        return found.view(networks, count, steps, features) + self.residual * late

    def _run(self, group: Tensor, inputs: Tensor) -> Tensor:
        """(E, N, T, 2 D) -> (E, N, T, hidden) of some networks, run as one cell with block-diagonal weights."""
        networks, count = inputs.shape[:2]
        own = {
            name: self.parameters[f"cell.{name}_l0"][group] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        hidden, alone = own["weight_hh"].shape[2], torch.eye(networks)
        weights = []
        for name in own:
            parts = own[name].unflatten(1, (-1, hidden)).transpose(0, 1)  # (gates, E, hidden, ...)
            weights.append(
                torch.einsum("gehk,ef->gehfk", parts, alone).flatten(0, 2).flatten(1)
                if "weight" in name
                else parts.flatten()
            )
        start = inputs.new_zeros(1, count, networks * hidden)
        cell = self.models[0].hparams["cell"]
        run: Any = {"rnn": torch.rnn_tanh, "lstm": torch.lstm, "gru": torch.gru}[cell]
        states = run(
            inputs.permute(1, 2, 0, 3).flatten(2),
            (start, start) if cell == "lstm" else start,
            weights,
            True,
            1,
            0.0,
            True,
            False,
            True,
        )[0]
        return states.unflatten(2, (networks, hidden)).permute(2, 0, 1, 3)

    def loss(self, values: Tensor) -> Tensor:
        """Returns (E,) negative log-likelihoods per step, without a constant."""
        log_variance = self.parameters["log_variance"]  # (E, 2, D): of the first step and of the others
        spread = log_variance[:, [0] + [1] * (values.shape[2] - 1)].unsqueeze(1)  # (E, 1, T, D)
        return 0.5 * ((values - self.outputs(values)).square() / spread.exp() + spread).sum(3).mean((1, 2))

    @torch.no_grad()
    def errors(self, values: Tensor) -> Tensor:
        """Returns (E,) mean distances of predictions in the units of the data."""
        scales = torch.stack([model.data_variance.sqrt().float() for model in self.models]).view(
            len(self.models), 1, 1, -1
        )
        return ((self.outputs(values) - values) * scales)[:, :, 1:].norm(dim=3).mean((1, 2))

    def fit(
        self, epochs: int, patience: int, learning_rate: float, learning_rate_decay: float = 1.0, batch_size: int = 32
    ) -> tuple[Tensor, Tensor]:
        """Returns the (E,) least validation errors and their epochs."""
        optimizer = torch.optim.Adam(self.parameters.values(), lr=learning_rate, fused=True)
        best, when = torch.full((len(self.models),), torch.inf), torch.zeros(len(self.models), dtype=torch.int64)
        kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        rows = torch.arange(len(self.models)).unsqueeze(1)
        for epoch in range(epochs):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * learning_rate_decay**epoch
            orders = torch.stack(
                [
                    torch.randperm(self.train.shape[1], generator=generator(drawn.seed, "order", epoch))
                    for drawn in self.data
                ]
            )
            for chosen in orders.split(batch_size, 1):
                optimizer.zero_grad()
                self.loss(self.train[rows, chosen]).sum().backward()
                self._clip(self.models[0].gradient_clip)
                optimizer.step()
            errors = self.errors(self.val)
            better = errors < best
            best, when = torch.where(better, errors, best), torch.where(better, epoch + 1, when)
            for name, parameter in self.parameters.items():
                kept[name][better] = parameter.detach()[better]
            if epoch + 1 - int(when.max()) >= patience:
                break
        for number, model in enumerate(self.models):
            model.load_state_dict({name: values[number] for name, values in kept.items()}, strict=False)
            model.eval()
        return best, when

    def _clip(self, largest: float) -> None:
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
        shares = (largest / (norms + 1e-6)).clamp(max=1.0)  # as torch clips the gradient of one network
        for gradient in gradients:
            gradient.mul_(shares.view(-1, *[1] * (gradient.dim() - 1)))
