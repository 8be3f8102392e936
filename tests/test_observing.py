"""A logger that fails is reported and does not end a run."""

from __future__ import annotations

import pickle

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_hmm import StandardHMM, fit
from lightning_hmm.observing import guard_loggers
from tests.helpers import random_symbols


class Broken(CSVLogger):
    """Raises in the methods named in `broken`."""

    broken: tuple[str, ...] = ()

    def _fail(self, name):
        if name in self.broken:
            raise OSError(f"{name}: no space left on device")

    def log_metrics(self, metrics, step=None):
        self._fail("log_metrics")
        super().log_metrics(metrics, step)

    def log_hyperparams(self, params=None):
        self._fail("log_hyperparams")
        super().log_hyperparams(params)

    def save(self):
        self._fail("save")
        super().save()

    def after_save_checkpoint(self, checkpoint_callback):
        self._fail("after_save_checkpoint")

    def finalize(self, status):
        self._fail("finalize")
        super().finalize(status)


@pytest.mark.parametrize("name", ["log_hyperparams", "log_metrics", "save", "after_save_checkpoint", "finalize"])
def test_a_logger_that_fails_is_reported_once_and_the_run_finishes(rng, tmp_path, name):
    broken, other = Broken(tmp_path, name="broken"), CSVLogger(tmp_path, name="other")
    broken.broken = (name,)
    model = StandardHMM(num_states=2, num_symbols=5)
    saving = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1)
    with pytest.warns(UserWarning, match="no space left") as caught:
        fit(
            model,
            random_symbols(rng),
            3,
            0,
            logger=[broken, other],
            log_every_n_steps=1,
            callbacks=[saving],
            enable_checkpointing=True,
        )
    (warning,) = [warning for warning in caught if "no space" in str(warning.message)]
    assert str(warning.message).startswith(
        f"Broken.{name} failed, and the run continues without it: OSError: {name}: no space left on device"
    )
    assert model.trainer.current_epoch == 3
    assert len(other.experiment.metrics) == 0  # all of them are in the file
    assert (tmp_path / "other/version_0/metrics.csv").read_text().count("\n") == 4
    assert list((tmp_path / "saved").glob("*.ckpt"))


def test_what_saves_still_raises(rng, tmp_path):
    class Full(ModelCheckpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        fit(
            StandardHMM(num_states=2, num_symbols=5),
            random_symbols(rng),
            2,
            0,
            callbacks=[Full(tmp_path)],
            enable_checkpointing=True,
        )


def test_a_guarded_logger_can_be_sent_to_another_process(tmp_path):
    logger = Broken(tmp_path)
    logger.broken = ("save",)
    guard_loggers([logger])
    copy = pickle.loads(pickle.dumps(logger))
    with pytest.warns(UserWarning, match=r"Broken\.save failed"):
        copy.save()
    guard_loggers([copy])
    copy.save()  # reported once
