"""How far off a model of vectors is in what it expects of each step, measured and logged beside the likelihood."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lightning_hmm.metrics import PredictionError
from lightning_hmm.models.sequence_model import SequenceModel
from lightning_hmm.sequences import Sequences


class PredictionErrors(SequenceModel):
    """Logs ``val/prediction_error`` and ``test/prediction_error``, where the data are vectors.

    Args:
        kwargs: the words of `SequenceModel`, or of the class that this one stands before.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.val_error, self.test_error = PredictionError(), PredictionError()

    @abstractmethod
    def predict_each(self, sequences: Any) -> Sequences:
        """What is expected at each step from those before it."""

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
            metric.update(self.predict_each(batch).values, batch)

    def _log_error(self, part: str, metric: PredictionError) -> None:
        if self.num_features:
            self.log(f"{part}/prediction_error", metric.compute(), prog_bar=part == "val")
            metric.reset()
