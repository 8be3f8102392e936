"""Observations in units of the training data.

Networks read and predict standardized numbers. `Units` holds the mean and the standard deviations of the training data,
`Observations` are the sequences of a batch in these units, and `StandardizedObservations` is the base class of the
models that use them. T is the number of steps, B of sequences and D of features.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.gaussian import weighted_mean_var
from lightning_hmm.models.last_seen import last_seen
from lightning_hmm.models.neural.networks import ConditionalDensity, WindowFeatures
from lightning_hmm.models.sequence_model import SequenceModel
from lightning_hmm.sequences import Sequences


class Units(NamedTuple):
    """The units of observations and of emissions.

    center: (D,) mean of the training data, in float64.
    std: (D,) standard deviation of the training data.
    change_std: (D,) root mean square of the change of a feature from one step to the next.
    residual: whether emissions describe changes from the value last seen instead of values.
    """

    center: Tensor
    std: Tensor
    change_std: Tensor
    residual: bool

    @property
    def emission_std(self) -> Tensor:
        """(D,) the unit of what emissions describe."""
        return self.change_std if self.residual else self.std


class Observations:
    """A batch of sequences in the units of a model, with time first.

    Attributes:
        lengths: (B,).
        targets: (T, B, D) what emissions describe, in their units: values, or changes from the value last seen where
            emissions are residual. Zero where it is missing.
        observed: (T, B, D) where there is a target.
        first: (T, B, D) where emissions are residual and a feature is observed for the first time, so that there is no
            change.
        starts: (T, B, D) the standardized values at these places.
        base: (T + 1, B, D) in float64 the value that a predicted change is added to. It is the mean of the training
            data where nothing was seen yet and where emissions are not residual.
        unseen: (T + 1, B, D) where nothing was seen yet.
        window_features: (B, T + 1, D) features of which windows are made.
        log_units: (T, B) term of the log-density of an observation that is due to the units.
    """

    def __init__(self, sequences: Sequences, units: Units, dtype: torch.dtype) -> None:
        padded = sequences.padded().double()
        self.lengths = sequences.lengths.to(padded.device)
        longer = torch.cat([padded, padded.new_full((len(padded), 1, len(units.center)), torch.nan)], 1)
        before, seen = last_seen(longer)
        unseen = before.isnan()
        value = ((before - units.center) / units.std).nan_to_num(nan=0.0)
        changes = (before[:, 1:] - before[:, :-1]) / units.change_std
        change = torch.cat([torch.zeros_like(before[:, :1]), changes], 1).nan_to_num(nan=0.0)
        self.window_features = WindowFeatures(value.to(dtype), change.to(dtype), seen.to(dtype))
        there, known = ~padded.isnan(), ~unseen[:, :-1]
        base = before.where(~unseen & units.residual, units.center)
        observed = there & known if units.residual else there
        first = there & ~observed
        targets = ((padded - base[:, :-1]) / units.emission_std).where(observed, 0.0)
        self.targets = targets.to(dtype).transpose(0, 1).contiguous()
        self.observed = observed.transpose(0, 1).contiguous()
        self.first = first.transpose(0, 1)
        self.starts = ((padded - units.center) / units.std).where(first, 0.0).to(dtype).transpose(0, 1)
        self.base = base.transpose(0, 1)
        self.unseen = unseen.transpose(0, 1)
        log_unit = units.emission_std.log() * observed + units.std.log() * first
        self.log_units = -log_unit.sum(2).T.to(dtype)

    @property
    def inside(self) -> Tensor:
        """(T, B) the steps that exist."""
        return torch.arange(len(self.targets), device=self.lengths.device).unsqueeze(1) < self.lengths


class ObservationModel(Protocol):
    """The model of observations given the state, as a rollout uses it. `StandardizedObservations` implements it."""

    emission: ConditionalDensity
    residual: bool

    @property
    def units(self) -> Units: ...

    @property
    def first_variance(self) -> Tensor: ...

    def first_log_prob(self, observations: Observations) -> Tensor: ...

    def in_data_units(self, mean: Tensor, base: Tensor, unseen: Tensor) -> Tensor: ...


class StandardizedObservations(SequenceModel):
    """Base class of models with a neural `emission` of standardized observations.

    If `residual` is true, the emission describes the change from the value last seen. The first value of a feature is
    not a
    change: it has a Gaussian density of its own, which does not depend on the state.
    """

    emission: ConditionalDensity
    residual: bool
    center: Tensor
    data_variance: Tensor
    change_variance: Tensor
    has_data_stats: Tensor

    def _make_units(self, residual: bool, dtype: torch.dtype) -> None:
        assert self.num_features is not None
        self.residual = residual
        self.network_dtype = dtype
        if residual:
            self.first_mean = nn.Parameter(torch.zeros(self.num_features, dtype=dtype))
            self.first_log_variance = nn.Parameter(torch.zeros(self.num_features, dtype=dtype))
        for name, start in {"center": 0.0, "data_variance": 1.0, "change_variance": 1.0}.items():
            self.register_buffer(name, torch.full((self.num_features,), start, dtype=torch.float64))
        self.register_buffer("has_data_stats", torch.tensor(False))

    @property
    def units(self) -> Units:
        return Units(self.center, self.data_variance.sqrt(), self.change_variance.sqrt(), self.residual)

    def observations(self, sequences: Sequences) -> Observations:
        """The sequences in the units of the model."""
        sequences.check(None, self.num_features)
        if not bool(self.has_data_stats):
            raise ValueError(
                "The model must be initialized before it is used, because observations are standardized with the mean "
                "and variance of the training data. Train it, or call `model.initialize(sequences)`."
            )
        return Observations(sequences, self.units, self.network_dtype)

    @property
    def first_variance(self) -> Tensor:
        """(D,) the variance of the first value of each feature of a residual model, in float64."""
        return self.units.std.square() * self.first_log_variance.double().exp()

    def first_log_prob(self, observations: Observations) -> Tensor:
        """(T, B) the log-density of the first value of each feature, in standardized units. Zero if not `residual`."""
        if not self.residual:
            return observations.targets.new_zeros(observations.targets.shape[:2])
        squares = (observations.starts - self.first_mean).square() / self.first_log_variance.exp()
        entries = -0.5 * (squares + self.first_log_variance + math.log(2 * math.pi))
        return torch.where(observations.first, entries, 0.0).sum(2)

    def in_data_units(self, mean: Tensor, base: Tensor, unseen: Tensor) -> Tensor:
        """Means of observations, computed from the means of emissions.

        `base` and `unseen` are as in `Observations`. Where a feature was not seen yet, its mean is that of a first
        value.
        """
        mean = base + self.units.emission_std * mean
        if not self.residual:
            return mean
        return torch.where(unseen, self.center + self.units.std * self.first_mean.double(), mean)

    @property
    def starts_from_data(self) -> bool:
        return not bool(self.has_data_stats)

    def initialize(self, sequences: Sequences) -> None:
        """Sets the units of observations and of their changes to those of the sequences."""
        sequences.check(None, self.num_features)
        sequences = sequences.counted()
        if not bool((sequences.lengths > 1).any()):
            raise ValueError(
                "Sequences must have at least two steps somewhere for a transition to be learned, "
                "but each has one step or none."
            )
        center, variance = weighted_mean_var(sequences)
        self.center.copy_(center)
        self.data_variance.copy_(variance)
        self.change_variance.copy_(_mean_square_change(sequences, variance))
        self.has_data_stats.fill_(True)

    def on_train_start(self) -> None:
        if not bool(self.has_data_stats):
            raise ValueError(
                "Observations are standardized with the mean and variance of the training set, which a plain "
                "`DataLoader` does not expose. Call `model.initialize(sequences)` before training, or train with a "
                "datamodule or `lightning_hmm.fit`."
            )


def _mean_square_change(sequences: Sequences, variance: Tensor) -> Tensor:
    """(D,) the mean square change of each feature from one step to the next, with the weights of the sequences.

    It is the (D,) `variance` of the feature where the feature never changes or no two successive values are observed.
    """
    padded = sequences.padded().double().cpu()
    changes = padded[:, 1:] - padded[:, :-1]
    weights = torch.ones(len(padded), dtype=torch.float64)
    if sequences.weights is not None:
        weights = sequences.weights.double().cpu()
    counted = ~changes.isnan() * weights.view(-1, 1, 1)
    total = counted.sum((0, 1))
    square = (counted * changes.nan_to_num(nan=0.0).square()).sum((0, 1)) / torch.where(total > 0, total, 1.0)
    return torch.where(square > 0, square, variance)
