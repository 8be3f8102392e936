"""Laws that hold for every model: each test runs on all rows of `tests.table` that it applies to."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_hmm
from lightning_hmm import Sequences
from lightning_hmm.callbacks import Convergence
from lightning_hmm.distributions import Categorical, Product
from lightning_hmm.inference.backends import VARIABLE
from tests.table import ROWS, assert_same_state, data, state


def rows(**flags: bool) -> Any:
    return pytest.mark.parametrize(
        "name",
        [name for name, row in ROWS.items() if all(getattr(row, flag) == wanted for flag, wanted in flags.items())],
    )


# 1. Batches and their order do not matter to what is updated once in an epoch. Ranks: `test_ranks.py`.


@rows(once_per_epoch=True)
def test_batches_and_their_order_do_not_matter(name):
    row = ROWS[name]
    sequences = data(row.kind)
    whole = row.fit(sequences, batch_size=None, max_epochs=5)
    for options in ({"batch_size": 1}, {"batch_size": 5, "shuffle": True, "seed": 3}, {"batch_size": 100}):
        assert_same_state(state(row.fit(sequences, max_epochs=5, **options)), state(whole), row.tolerance)


# 2. Killed and resumed equals never killed.


class SaveInside(Callback):
    """Saves a checkpoint after the first of several batches of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0 and not trainer.is_last_batch:
            trainer.save_checkpoint(self.path)


@rows()
@pytest.mark.parametrize("at", ["last batch", "end of epoch"])
def test_resumed_equals_never_stopped(tmp_path, name, at):
    """Lightning also saves at the last batch and calls no hook at the start of an epoch that is resumed from there."""
    row = ROWS[name]
    sequences = data(row.kind)
    common: dict[str, Any] = {"shuffle": True, "tolerance": 1e-300}
    if at == "last batch":
        when: dict[str, Any] = {"every_n_train_steps": 1}
    else:
        when, common["val_sequences"] = {"every_n_epochs": 1, "save_on_train_epoch_end": True}, data(row.kind, seed=1)
    files = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}-{step}", **when)
    convergence = Convergence(1e-300)
    whole = row.fit(
        sequences,
        callbacks=[convergence, SaveInside(tmp_path / "inside.ckpt"), files],
        enable_checkpointing=True,
        **common,
    )
    resumed_from = []
    for path in sorted(tmp_path.glob("epoch=*.ckpt")):
        progress = torch.load(path, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        epoch = int(path.name.split("=")[1].split("-")[0])
        if not progress["is_last_batch"] or epoch == row.epochs - 1:
            continue
        again = Convergence(1e-300)
        torch.rand(17)  # whatever the global generator has been used for
        resumed = row.fit(sequences, callbacks=[again], ckpt_path=str(path), **common)
        resumed_from.append(epoch)
        assert_same_state(state(resumed), state(whole), 0)
        assert again.previous == convergence.previous
        assert resumed.trainer.global_step == whole.trainer.global_step
        if whole.epoch_log_likelihood is not None:  # co-occurrences are fitted without it
            assert torch.equal(resumed.epoch_log_likelihood, whole.epoch_log_likelihood)
    assert resumed_from == list(range(row.epochs - 1))
    if (
        whole.trainer.num_training_batches == 1
    ):  # the objective of co-occurrences counts pairs once, and its epochs have one batch
        return
    with pytest.raises(ValueError, match="saved in the middle of an epoch"):
        row.fit(sequences, ckpt_path=str(tmp_path / "inside.ckpt"), **common)
    lightning_hmm.load(tmp_path / "inside.ckpt")  # its parameters are fine


# 3. EM.


class Objectives(Callback):
    """(epochs, restarts) the log-likelihood plus the log prior at the beginning of each epoch, per observation."""

    def __init__(self, sequences: Any) -> None:
        self.sequences, self.values = sequences, []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer, chosen = trainer.optimizers[0], int(pl_module.best_restart)
        prior = optimizer.log_prior() if hasattr(optimizer, "log_prior") else torch.zeros(pl_module.restarts)
        scores = []
        for restart in range(pl_module.restarts):
            pl_module.best_restart.fill_(restart)
            score = getattr(pl_module, "score_labeled", pl_module.score)
            scores.append(self.sequences.weighted(score(self.sequences)).sum())
        pl_module.best_restart.fill_(chosen)
        self.values.append((torch.stack(scores) + prior.detach()) / float(self.sequences.num_observed()))


@rows(closed=True)
def test_the_objective_never_decreases_and_rows_sum_to_one(name):
    row = ROWS[name]
    sequences = data(row.kind)
    objectives = Objectives(sequences)
    model = row.fit(sequences, max_epochs=12, callbacks=[objectives])
    gains = torch.stack(objectives.values).diff(dim=0)
    assert float(gains.min()) > -max(1e-9, row.tolerance * 1e-2)
    assert float(gains[0].min()) > 1e-4  # it moved at all
    for part in ("initial_probs", "transition_probs", "emission_probs"):
        if hasattr(model, part):
            sums = getattr(model, part).sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-12, atol=0)


def relabelled(emission: Any, order: torch.Tensor) -> Any:
    """The parameters of an emission in the form of `set_parameters`, with the states in another order."""
    if isinstance(emission, Product):
        return [relabelled(part, order) for part in emission.parts]
    if isinstance(emission, Categorical):
        return emission.probs[order]
    return {name: getattr(emission, name)[order] for name in emission.names}


@rows(states=True)
def test_relabelling_states_changes_nothing(name):
    row = ROWS[name]
    sequences = data(row.kind)
    first = row.fit(sequences, max_epochs=1)
    order = torch.arange(first.num_states).roll(1)
    second = row.make()
    second.set_parameters(
        first.initial_probs[order], first.transition_probs[order][:, order], relabelled(first.emission, order)
    )
    torch.testing.assert_close(second.score(sequences), first.score(sequences), rtol=1e-12, atol=1e-12)
    for model in (first, second):
        lightning_hmm.fit(model, sequences, 5, 0)
    torch.testing.assert_close(second.transition_probs, first.transition_probs[order][:, order], rtol=1e-9, atol=1e-12)
    smoothed = [model.posterior(sequences).smoothed.values for model in (first, second)]
    torch.testing.assert_close(smoothed[1], smoothed[0][:, order], rtol=1e-8, atol=1e-12)


# 4. The backends agree.


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith(("linear", "neural", "recurrent"))])
def test_the_reference_backend_trains_the_same_model(monkeypatch, name):
    row = ROWS[name]
    sequences = data(row.kind)
    compiled = row.fit(sequences)
    scores = compiled.score(sequences)
    monkeypatch.setenv(VARIABLE, "reference")
    plain = row.fit(sequences)
    tolerance = max(1e-9, row.tolerance)
    assert_same_state(state(plain), state(compiled), tolerance)
    torch.testing.assert_close(plain.score(sequences), scores, rtol=tolerance, atol=tolerance)


# 5. A plain Trainer with a DataLoader trains every composed model.

COMPOSED = ("standard", "Gaussian", "composed", "DMC", "dense")


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if name.startswith(COMPOSED) and row.once_per_epoch]
)
def test_a_plain_trainer_with_a_loader_trains_the_same_model(name):
    row = ROWS[name]
    sequences, model = data(row.kind), row.make()
    loader = DataLoader([sequences[n : n + 1] for n in range(len(sequences))], batch_size=5, collate_fn=Sequences.cat)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=row.epochs, enable_model_summary=False, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rows of .* got no counts")
        trainer.fit(model, loader)
    wanted = row.fit(sequences)
    assert_same_state(state(model), state(wanted), max(1e-9, row.tolerance))


# 6. Checkpoints.


@rows()
def test_a_checkpoint_holds_plain_values_and_the_whole_model(tmp_path, name):
    row = ROWS[name]
    sequences = data(row.kind)
    model = row.fit(sequences, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, filename="model")])
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)
    assert set(saved) >= {"state_dict", "hyper_parameters", "optimizer_states"}
    loaded = lightning_hmm.load(tmp_path / "model.ckpt")
    assert type(loaded) is type(model)
    assert loaded.hparams == model.hparams
    assert_same_state(state(loaded), state(model), 0)
    assert torch.equal(loaded.score(sequences), model.score(sequences))
    if hasattr(model, "num_states"):
        assert torch.equal(loaded.decode(sequences).values, model.decode(sequences).values)


def test_the_rows_do_what_their_names_say():
    """Otherwise a law could hold because nothing happens."""
    row = ROWS["cloned, pruned"]
    assert row.fit(data(row.kind)).layout.is_sparse
    for name in ("DMC", "DMC, many states", "DMC, lazy"):
        row = ROWS[name]
        assert not torch.equal(row.fit(data(row.kind)).indices, row.make().indices)  # other transitions are kept
    assert float(data("weighted symbols").weights.min()) == 0
