"""Observations in units of the training data, for models whose emissions read them: what the neural HMMs share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.gaussian import data_location
from lightning_hmm.models.neural_networks import Entries, Window
from lightning_hmm.models.neural_state_space import Conditional, Observations, Units, first_log_prob
from lightning_hmm.models.sequence_model import SequenceModel
from lightning_hmm.sequences import Sequences


class InUnits(SequenceModel):
    """A model with `emission`, a `Conditional`, of observations or, where it is `residual`, of their changes from the value last seen.

    The first value of a feature is no change: it is Gaussian on its own.
    """

    emission: Conditional
    residual: bool
    centre: Tensor
    scale: Tensor
    change: Tensor
    located: Tensor

    def _make_units(self, residual: bool, dtype: torch.dtype) -> None:
        assert self.num_features is not None
        self.residual, self.network_dtype = residual, dtype
        if residual:
            self.first_mean, self.first_log_variance = (nn.Parameter(torch.zeros(self.num_features, dtype=dtype)) for _ in range(2))
        for name, start in {"centre": 0.0, "scale": 1.0, "change": 1.0}.items():
            self.register_buffer(name, torch.full((self.num_features,), start, dtype=torch.float64))
        self.register_buffer("located", torch.tensor(False))

    @property
    def units(self) -> Units:
        return Units(self.centre, self.scale.sqrt(), self.change.sqrt(), self.residual)

    def observations(self, sequences: Sequences) -> Observations:
        """The sequences as the densities see them."""
        sequences.check(None, self.num_features)
        if not bool(self.located):
            raise ValueError("The model must be trained before it is asked, or `initialize(sequences)` called: its units are those of training data.")
        return Observations(sequences, self.units, self.network_dtype)

    def first_log_prob(self, observations: Observations) -> Tensor:
        """(T, B)."""
        if not self.residual:
            return observations.targets.new_zeros(observations.targets.shape[:2])
        return first_log_prob(observations, self.first_mean, self.first_log_variance)

    def in_data_units(self, mean: Tensor, base: Tensor, unseen: Tensor) -> Tensor:
        """Means of observations, from those of what the emission describes; the first ones' where nothing was seen before."""
        mean = base + self.units.emitted * mean
        return torch.where(unseen, self.centre + self.units.scale * self.first_mean.double(), mean) if self.residual else mean

    @property
    def starts_from_data(self) -> bool:
        return not bool(self.located)

    def initialize(self, sequences: Sequences) -> None:
        """Takes the units of observations and of their changes from the data."""
        sequences.check(None, self.num_features)
        sequences = sequences.counted()
        if not bool((sequences.lengths > 1).any()):
            raise ValueError("Sequences must have at least two steps somewhere for a transition to be learned, but each has one step or none.")
        centre, scale = data_location(sequences)
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.change.copy_(_mean_square_change(sequences, scale))
        self.located.fill_(True)

    def on_train_start(self) -> None:
        if not bool(self.located):
            raise ValueError(
                "Observations are in units of the training data, which a plain DataLoader does not show as a whole. "
                "Call `model.initialize(sequences)` before training, or train with a datamodule or `lightning_hmm.fit`."
            )


def window_inputs(window: Window, entries: Entries) -> Tensor:
    """Of each step of (B, T + 1, D) entries: (T + 1, B, ...); nothing where nothing is read."""
    return window.inputs(entries.windows(window.order)) if window.order else entries.value.new_zeros(0)


def up_to_last_seen(sequences: Sequences, steps: int) -> tuple[Sequences, Tensor]:
    """The sequences without the steps at their ends at which nothing is observed, and (N,) how many steps after the new end the `steps`-th after the old is."""
    seen = (~sequences.padded().isnan()).any(2)
    number = torch.arange(1, seen.shape[1] + 1, device=seen.device)
    lengths = torch.where(seen, number, 0).amax(1).cpu() if seen.shape[1] else torch.zeros(len(seen), dtype=torch.int64)
    kept = sequences.packed(number <= lengths.to(seen.device).unsqueeze(1))
    shorter = sequences.with_steps(kept, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), sequences.weights)
    return shorter, sequences.lengths - lengths + steps


def _mean_square_change(sequences: Sequences, scale: Tensor) -> Tensor:
    """(D,) of a feature from one step to the next, each with its sequence's weight; the variance of the feature where it is never seen to change."""
    padded = sequences.padded().double().cpu()
    changes = padded[:, 1:] - padded[:, :-1]
    weights = torch.ones(len(padded), dtype=torch.float64) if sequences.weights is None else sequences.weights.double().cpu()
    share = ~changes.isnan() * weights.view(-1, 1, 1)
    total = share.sum((0, 1))
    square = (share * changes.nan_to_num(nan=0.0).square()).sum((0, 1)) / torch.where(total > 0, total, 1.0)
    return torch.where(square > 0, square, scale)
