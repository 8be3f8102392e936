"""Vectors in units of the training part: mean 0 and standard deviation 1 there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from datamodules.base import Part, SequenceDataModule
from datamodules.paths import some
from lightning_hmm.sequences import Sequences


class ScaledDataModule(SequenceDataModule):
    """Vectors that may be standardized. Columns and units of training are saved in the checkpoint, and other data are read with them.

    A subclass sets `columns` with `set_columns`, passes what it has read through `in_order` and, to standardize, through `scaled`.

    Args:
        standardize: shift and scale each feature to mean 0 and standard deviation 1 in the training part.
        kwargs: the words of `SequenceDataModule`.

    Attributes:
        columns: the names of the columns in the order of the features, if the data have names.
        mean: (num_features,) mean of the training part as it was read, if `standardize`, after `setup`.
        std: (num_features,) standard deviation of the same.
    """

    columns: list[str] | None = None

    def __init__(self, standardize: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.standardize = standardize
        self.mean: Tensor | None = None
        self.std: Tensor | None = None
        self._columns_read: list[str] = []
        self._columns_chosen = False
        self._trained = False  # whether columns and units come from a checkpoint
        self._constant: str | None = None

    def set_columns(self, names: list[str], chosen: bool) -> None:
        """Sets the names of the columns as they were read, and whether the user chose them."""
        self.columns, self._columns_read, self._columns_chosen = names or None, names, chosen

    @property
    def reordered(self) -> bool:
        """Whether the columns have another order than they were read in, that of training."""
        return self.columns is not None and self.columns != self._columns_read

    def in_order(self, values: Sequences) -> Sequences:
        """Vectors as they were read, with their features in the order of `columns`."""
        if self.columns is None or not self.reordered:
            return values
        return values.with_values(values.values[:, [self._columns_read.index(name) for name in self.columns]])

    def require_variation(self, training: Tensor) -> None:
        """Looks for a feature of (training steps, features) without two different values.

        Such a feature is refused when sequences are first used, not here: when the data are read, the checkpoint of a trained model
        may not have been loaded yet, and its units apply to constant features too.
        """
        self._constant = None
        for feature, column in enumerate(training.T):
            seen = column[~column.isnan()]
            if not len(seen) or bool(seen.min() == seen.max()):
                named = self.columns is not None and len(self.columns) == training.shape[1]
                name = f"column {self.columns[feature]!r}" if named and self.columns is not None else f"feature {feature}"
                what = f"is always {seen[0].item():g}" if len(seen) else "has no value"
                self._constant = f"Each feature must vary in the training part, but {name} {what} there. Leave it out of `columns`."
                return

    def scaled(self, values: Tensor, training: Tensor) -> Tensor:
        """(steps, features) in the units of (training steps, features), or in those that came with a checkpoint."""
        if not self._trained:
            self.require_variation(training)
            count = (~training.isnan()).sum(0)
            self.mean = training.nan_to_num().sum(0) / count
            self.std = ((training - self.mean).nan_to_num().square().sum(0) / count).sqrt()
        assert self.mean is not None
        assert self.std is not None
        return (values - self.mean) / self.std.where(self.std > 0, torch.nan)

    def _source(self, part: Part) -> tuple[Sequences, Sequences | None, Tensor | None]:
        source = super()._source(part)
        if self._constant is not None and not self._trained:
            raise ValueError(self._constant)
        return source

    def state_dict(self) -> dict[str, Any]:
        """What a trained model needs to read other data: the columns and units that it was trained on."""
        units = {} if self.mean is None or self.std is None else {"mean": self.mean, "std": self.std}
        return units if self.columns is None else {**units, "columns": self.columns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trained, before = state_dict.get("columns"), self.columns
        if trained is not None and self.columns is not None and not self._columns_chosen:
            if sorted(trained) != sorted(self._columns_read):
                raise ValueError(
                    f"The data must have the columns that the model was trained on, {some(trained)}, but have {some(self._columns_read)}. "
                    "Choose them with `columns`, in that order."
                )
            self.columns = list(trained)
        self._trained = not self.standardize or "mean" in state_dict
        if self.standardize and self._trained:
            self.mean, self.std = state_dict["mean"], state_dict["std"]
        if self.standardize or self.columns != before:
            self._sources, self._gathered = {}, {}
            self.setup()
