"""The error of one-step predictions of vectors, computed and logged in addition to the likelihood."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning_hmm.metrics import PredictionError
from lightning_hmm.models.sequence_model import SequenceModel
from lightning_hmm.sequences import Sequences


class PredictionErrors(SequenceModel):
    """Base class of models that log ``val/prediction_error`` and ``test/prediction_error`` if the data are vectors.

    Args:
        **kwargs: Forwarded to the next class in the order of inheritance, in the end to `SequenceModel`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.val_error = PredictionError()
        self.test_error = PredictionError()

    @abstractmethod
    def predict_each(self, sequences: Any) -> Sequences:
        """(steps, D) the mean of each observation given those before it."""

    def validation_step(self, batch: Sequences, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self._update_error(self.val_error, batch)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._log_error("val", self.val_error)

    def test_step(self, batch: Sequences, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self._update_error(self.test_error, batch)

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        self._log_error("test", self.test_error)

    def _update_error(self, metric: PredictionError, batch: Sequences) -> None:
        if self.num_features:
            metric.update(self.predict_each(batch.without_labels()).values, batch)

    def _log_error(self, part: str, metric: PredictionError) -> None:
        if self.num_features:
            self.log(f"{part}/prediction_error", metric.compute(), prog_bar=part == "val")
            metric.reset()
