"""Base class of the data modules that can standardize vectors with the mean and deviation of the training part."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from datamodules.base import Part, SequenceDataModule
from datamodules.paths import some
from lightning_hmm.columns import Column
from lightning_hmm.sequences import Sequences


class ScaledDataModule(SequenceDataModule):
    """Base class for vectors that can be standardized.

    Columns, mean and standard deviation of the training data are saved in the checkpoint and applied to new data. A
    subclass sets `columns`, with `set_columns` if the columns have names in the data. It passes the values through
    `in_order` and, to standardize them, through `scaled`.

    Args:
        standardize: Whether to shift and scale each real column to mean 0 and standard deviation 1 in the training
            part.
        **kwargs: Forwarded to `SequenceDataModule`.

    Attributes:
        mean: (columns,) mean of the training part before standardization, 0 for a categorical column. It is ``None``
            before `setup` and without `standardize`.
        std: (columns,) standard deviation, 1 for a categorical column; likewise.
    """

    def __init__(self, standardize: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.standardize = standardize
        self.mean: Tensor | None = None
        self.std: Tensor | None = None
        self._columns_read: list[Column] = []
        self._columns_chosen = False
        self._trained = False  # Whether columns, mean and standard deviation come from a checkpoint.
        self._constant: str | None = None

    def set_columns(self, columns: list[Column], chosen: bool) -> None:
        """Sets the columns in the order of the data.

        Args:
            columns: Columns of the data. A trained model matches them by name.
            chosen: Whether the user chose the columns. Chosen columns keep their order.
        """
        self.columns = columns
        self._columns_read = columns
        self._columns_chosen = chosen

    @property
    def reordered(self) -> bool:
        """Whether the columns are in the order of training, and that differs from their order in the data."""
        return bool(self._columns_read) and _names(self.columns) != _names(self._columns_read)

    def in_order(self, values: Sequences) -> Sequences:
        """Returns vectors with their features in the order of `columns`, given in the order of the data."""
        if not self.reordered:
            return values
        names = _names(self._columns_read)
        return values.with_values(values.values[:, [names.index(column.name) for column in self.columns]])

    def require_variation(self, training: Tensor) -> None:
        """Finds a real column of (training steps, columns) that is constant.

        The error is raised when sequences are first used, not here. When the data are read, the checkpoint of a trained
        model may not have been loaded yet, and its mean and standard deviation also apply to constant columns.
        """
        self._constant = None
        for feature, (column, entries) in enumerate(zip(self.columns, training.T, strict=True)):
            seen = entries[~entries.isnan()]
            if not column.is_categorical and (not len(seen) or bool(seen.min() == seen.max())):
                name = f"column {column.name!r}" if self._columns_read else f"feature {feature}"
                what = f"is always {seen[0].item():g}" if len(seen) else "has no value"
                remedy = "Leave it out of `columns`." if self._columns_read else "Set `standardize` to false."
                self._constant = f"Each feature must vary in the training part, but {name} {what} there. {remedy}"
                return

    def scaled(self, values: Tensor, training: Tensor) -> Tensor:
        """Returns (steps, columns) standardized with (training steps, columns), or with the values of a checkpoint.

        Categorical columns are not changed.
        """
        if not self._trained:
            self.require_variation(training)
            count = (~training.isnan()).sum(0)
            mean = training.nan_to_num().sum(0) / count
            std = ((training - mean).nan_to_num().square().sum(0) / count).sqrt()
            categorical = torch.tensor([column.is_categorical for column in self.columns])
            self.mean, self.std = mean.masked_fill(categorical, 0.0), std.masked_fill(categorical, 1.0)
        assert self.mean is not None
        assert self.std is not None
        return (values - self.mean) / self.std.where(self.std > 0, torch.nan)

    def _source(self, part: Part) -> tuple[Sequences, Sequences | None, Tensor | None]:
        source = super()._source(part)
        if self._constant is not None and not self._trained:
            raise ValueError(self._constant)
        return source

    def state_dict(self) -> dict[str, Any]:
        """Returns columns, mean and standard deviation of training, which a trained model needs to read new data."""
        units = {} if self.mean is None or self.std is None else {"mean": self.mean, "std": self.std}
        return units if not self._columns_read else {**units, "columns": [asdict(column) for column in self.columns]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = self.columns
        if self._columns_read and (trained := [Column(**column) for column in state_dict.get("columns", [])]):
            self.columns = self._matched(trained)
        self._trained = not self.standardize or "mean" in state_dict
        if self.standardize and self._trained:
            self.mean, self.std = state_dict["mean"], state_dict["std"]
        if self.standardize or self.columns != before:
            self._sources, self._gathered = {}, {}
            self.setup()

    def _matched(self, trained: list[Column]) -> list[Column]:
        """Returns the columns of the data in the order and with the categories of training.

        Columns that the user chose keep their order.
        """
        own = {column.name: column for column in self._columns_read}
        if not self._columns_chosen and sorted(_names(trained)) != sorted(own):
            raise ValueError(
                f"The data must have the columns that the model was trained on, {some(_names(trained))}, but have "
                f"{some(list(own))}. Choose them with `columns`, in that order."
            )
        if len(trained) != len(own):
            raise ValueError(
                f"The data must have {len(trained)} columns as in training, {some(_names(trained))}, but {len(own)} "
                f"are chosen: {some(list(own))}."
            )
        matched = self._columns_read if self._columns_chosen else [own[column.name] for column in trained]
        if len(matched) == 1:
            return matched  # The categories of symbols are the vocabulary, which is saved with the model.
        for old, new in zip(trained, matched, strict=True):
            if _contents(old) != _contents(new):
                raise ValueError(
                    f"Column {new.name!r} must contain {_contents(old)} as in training, but contains {_contents(new)}. "
                    "Set `categorical_columns` as in training, or choose other columns with `columns`."
                )
        return [replace(new, categories=old.categories) for old, new in zip(trained, matched, strict=True)]


def _names(columns: list[Column]) -> list[str]:
    return [column.name for column in columns]


def _contents(column: Column) -> str:
    if not column.is_categorical:
        return "numbers"
    return "category numbers" if column.category_names is None else "category names"
