"""KeepBest restores the parameters of the best validation epoch."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hmm import Sequences, fit
from lightning_hmm.callbacks import KeepBest
from lightning_hmm.models import RecurrentNet


class History(Callback):
    """Keeps the metric and the parameters of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[tuple[float, dict[str, torch.Tensor]]] = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            state = {name: value.clone() for name, value in pl_module.state_dict().items()}
            self.epochs.append((float(trainer.callback_metrics["val/bits_per_symbol"]), state))


def data(seed: int) -> Sequences:
    return Sequences.from_list([torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(seed))])


def train(*callbacks: Callback, epochs: int = 12, validation: int = 1, **options) -> RecurrentNet:
    """Trains on the data of seed 0, which the network overfits within a few epochs."""
    model = RecurrentNet(8, num_symbols=3, learning_rate=0.1, seed=0)
    return fit(model, data(0), epochs, 0, val_sequences=data(validation), callbacks=list(callbacks), **options)


@pytest.mark.parametrize(("mode", "validation"), [("min", 1), ("max", 0)])
def test_the_best_epoch_is_restored(mode, validation):
    history, keep = History(), KeepBest("val/bits_per_symbol", mode)
    model = train(history, keep, validation=validation)
    scores = [score for score, _ in history.epochs]
    best = scores.index({"min": min, "max": max}[mode](scores))
    assert len(set(scores)) == 12
    assert best < 11  # else nothing would have to be restored
    assert keep.best_score == scores[best]
    assert keep.best_epoch == best + 1
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, history.epochs[best][1][name], rtol=0, atol=0, equal_nan=True)


def test_a_resumed_run_keeps_the_best_epoch_before_it(tmp_path):
    first = KeepBest("val/bits_per_symbol")
    model = train(first, epochs=12)
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = KeepBest("val/bits_per_symbol")
    resumed = train(again, epochs=13, ckpt_path=tmp_path / "last.ckpt")
    assert (again.best_score, again.best_epoch) == (first.best_score, first.best_epoch)
    for name, value in resumed.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0, equal_nan=True)


def test_a_metric_that_is_not_logged_is_an_error():
    with pytest.raises(
        ValueError, match=r"`monitor` must be a logged metric, but is 'val/nothing'.*val/bits_per_symbol"
    ):
        train(KeepBest("val/nothing"))
    with pytest.raises(ValueError, match="`mode` must be 'min' or 'max', but is 'least'"):
        KeepBest("val/bits_per_symbol", "least")  # type: ignore[arg-type]
