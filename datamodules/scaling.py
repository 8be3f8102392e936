"""Vectors in units of the training part: mean 0 and standard deviation 1 there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from datamodules.base import SequenceDataModule


class ScaledDataModule(SequenceDataModule):
    """Data that may be standardised; the units of training go into the checkpoint, and other data is read in them.

    Args:
        standardize: shift and scale each feature to mean 0 and standard deviation 1 in the training part.
        kwargs: the words of `SequenceDataModule`.

    Attributes:
        mean: (num_features,) mean of the training part as it was read, if `standardize`, after `setup`.
        std: (num_features,) standard deviation of the same.
    """

    def __init__(self, standardize: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.standardize = standardize
        self.mean: Tensor | None = None
        self.std: Tensor | None = None

    def scaled(self, values: Tensor, training: Tensor) -> Tensor:
        """(steps, features) in the units of (training steps, features), or in those that came with a checkpoint."""
        if self.mean is None or self.std is None:
            count = (~training.isnan()).sum(0)
            self.mean = training.nan_to_num().sum(0) / count
            self.std = ((training - self.mean).nan_to_num().square().sum(0) / count).sqrt()
        if not bool((self.std > 0).all()):
            feature = int(torch.nonzero(~(self.std > 0))[0, 0])
            raise ValueError(
                f"`standardize` needs features that vary, but feature {feature} has no two different values in the training part. Leave it out of `columns`."
            )
        return (values - self.mean) / self.std

    def state_dict(self) -> dict[str, Any]:
        """What a trained model must be given again with other data: the units it was trained in."""
        return {} if self.mean is None or self.std is None else {"mean": self.mean, "std": self.std}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.standardize and state_dict:
            self.mean, self.std = state_dict["mean"], state_dict["std"]
            self._sources, self._gathered = {}, {}
            self.setup()
