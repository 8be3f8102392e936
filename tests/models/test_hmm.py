"""The composed model: parts by name, instance and configuration; sizes from data; checkpoints; plain Trainers; several iterations in an epoch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

import lightning_hmm
from lightning_hmm import HMM, Categorical, Column, Full, Gaussian, Initial, Poisson, Product, Sequences, StandardHMM, fit
from lightning_hmm.callbacks import Convergence
from tests.helpers import random_symbols, random_vectors


def test_parts_are_given_by_name_instance_or_configuration():
    given = [
        HMM(2, "Gaussian", num_features=1),
        HMM(2, "gaussian", num_features=1),
        HMM(2, Gaussian(), num_features=1),
        HMM(2, {"class_path": "lightning_hmm.Gaussian"}, num_features=1),
        HMM(2, num_features=1),
    ]
    assert {type(model.emission) for model in given} == {Gaussian}
    assert {type(model.transition) for model in given} == {Full}
    assert isinstance(HMM(2, num_symbols=3).emission, Categorical)
    assert HMM(2, num_symbols=3, transition=Full(0.5)).transition.prior == {"pseudocount": 0.5}


def test_it_equals_the_named_model(rng):
    sequences = random_symbols(rng)
    options = {"num_symbols": 5, "seed": 3, "restarts": 2}
    composed = fit(HMM(3, Categorical(0.1), Full(0.2), Initial(0.3), **options), sequences, 5, 0)
    named = fit(StandardHMM(3, emission_pseudocount=0.1, transition_pseudocount=0.2, initial_pseudocount=0.3, **options), sequences, 5, 0)
    for mine, theirs in zip(composed.parameters(), named.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_named_model_takes_any_emission(rng, tmp_path):
    sequences = Sequences.from_list([torch.from_numpy(rng.poisson(3, (20, 1)).astype(float))])
    model = StandardHMM(2, emission=Poisson(), num_features=1, transition_pseudocount=1.0)
    fit(model, sequences, 3, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    loaded = lightning_hmm.load(tmp_path / "last.ckpt")
    assert isinstance(loaded.emission, Poisson)
    assert torch.equal(loaded.score(sequences), model.score(sequences))


def test_sizes_are_those_of_the_data(rng):
    vectors, symbols = random_vectors(rng), random_symbols(rng)
    model = fit(HMM(2), vectors, 2, 0)
    assert isinstance(model.emission, Gaussian)
    assert model.emission.mean.shape == (2, 2)
    model = fit(HMM(2), symbols[:5], 2, 0, val_sequences=symbols)
    assert model.num_symbols == int(symbols.values.max()) + 1
    with pytest.raises(ValueError, match="The model has no sizes yet"):
        HMM(2).score(symbols)


def test_values_that_are_set_survive_training(rng):
    """Frozen parts keep what was set; others start from it."""
    sequences = random_vectors(rng)
    mean = torch.tensor([[100.0, 0.0], [0.0, 100.0]], dtype=torch.float64)
    model = HMM(2, "Gaussian", num_features=2, frozen=["emission"]).set_parameters(emission={"mean": mean, "variance": torch.ones(2, 2)})
    fit(model, sequences, 2, 0)
    torch.testing.assert_close(model.emission.mean, mean, rtol=1e-12, atol=1e-12)
    once = HMM(2, "Gaussian", num_features=2).set_parameters(emission={"mean": [[-1.0, -1.0], [1.0, 1.0]], "variance": np.ones((2, 2))})
    started = copy.deepcopy(once)
    started.initialize(sequences)
    torch.testing.assert_close(started.emission.mean, once.emission.mean, rtol=1e-9, atol=1e-9)


def test_a_copy_has_its_own_chosen_restart(rng):
    model = HMM(2, "Gaussian", num_features=2, restarts=2)
    model.initialize(random_vectors(rng))
    twin = copy.deepcopy(model)
    twin.chosen.fill_(1)
    assert torch.equal(model.emission.mean, model.emission._decode(model.emission.weights[0].detach())[0] + model.emission.center)
    assert not torch.equal(twin.emission.mean, model.emission.mean)


@pytest.mark.parametrize("through", ["load", "load_from_checkpoint"])
def test_a_checkpoint_names_its_parts(rng, tmp_path, through):
    columns = [Column("x"), Column("n"), Column("kind", "categorical", ("a", "b"))]
    values = np.stack([rng.normal(size=40), rng.poisson(2, 40), rng.integers(0, 2, 40)], 1)
    sequences = Sequences.from_lengths(torch.from_numpy(values), [25, 15])
    emission = Product({"x": Gaussian(variance_prior=0.1), "n": Poisson(), "kind": Categorical(0.1)})
    model = HMM(2, emission, columns=columns, restarts=2)
    fit(model, sequences, 3, 0, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    path = tmp_path / "last.ckpt"
    torch.load(path, weights_only=True)
    loaded = lightning_hmm.load(path) if through == "load" else HMM.load_from_checkpoint(path, weights_only=True)
    assert torch.equal(loaded.score(sequences), model.score(sequences))
    assert loaded.columns == columns
    assert loaded.emission.config == emission.config


class CountingHMM(HMM):
    """A subclass without options of its own."""


def test_a_subclass_is_saved_with_its_parts(rng, tmp_path):
    sequences = Sequences.from_list([torch.from_numpy(rng.poisson(3, (20, 1)).astype(float))])
    model = CountingHMM(2, Poisson(), num_features=1)
    fit(model, sequences, 2, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    loaded = lightning_hmm.load(tmp_path / "last.ckpt")
    assert isinstance(loaded, CountingHMM)
    assert torch.equal(loaded.score(sequences), model.score(sequences))


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*You defined a `validation_step`", "ignore:.*Trying to infer the `batch_size`")
@pytest.mark.parametrize("emission", ["Gaussian", "Categorical"])
def test_a_plain_trainer_and_data_loader_work(rng, emission, tmp_path):
    symbolic = emission == "Categorical"
    sequences = random_symbols(rng, missing=0.0) if symbolic else random_vectors(rng, missing=0.0)
    sizes = {"num_symbols": 5} if symbolic else {"num_features": 2}
    loader = DataLoader([row for row in sequences if len(row)], batch_size=4, collate_fn=Sequences.collate)
    model = HMM(2, emission, **sizes)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
    callbacks = [EarlyStopping("val/log_likelihood", mode="max", patience=3), ModelCheckpoint(tmp_path, save_last=True)]
    Trainer(max_epochs=6, callbacks=callbacks, **options).fit(model, loader, loader)
    filled = sequences[sequences.lengths > 0]
    expected = HMM(2, emission, **sizes)
    fit(expected, filled, 6, 0, batch_size=4)
    torch.testing.assert_close(model.score(filled), expected.score(filled), rtol=1e-9, atol=1e-9)
    assert torch.equal(HMM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True).score(filled), model.score(filled))


@pytest.mark.parametrize("options", [{"num_symbols": 5}, {"num_symbols": 5, "restarts": 2}, {"num_features": 2}])
def test_several_iterations_in_an_epoch_are_several_epochs(rng, options):
    sequences = random_symbols(rng) if "num_symbols" in options else random_vectors(rng)
    single, several = (HMM(3, **options, iterations_per_epoch=number) for number in (1, 4))
    convergence = Convergence(0.0)
    fit(single, sequences, 8, 0, callbacks=[Convergence(0.0)])
    fit(several, sequences, 2, 0, callbacks=[convergence])
    for mine, theirs in zip(several.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(several.epoch_log_likelihood, single.epoch_log_likelihood, rtol=1e-10, atol=0)
    assert len(several.iteration_likelihoods) == 4
    assert several.trainer.global_step == 2
    assert convergence.previous == several.iteration_likelihoods[-1].reshape(-1).tolist()


def test_iterations_in_an_epoch_stop_when_training_has_converged(rng):
    sequences = random_symbols(rng)
    single, several = HMM(2, num_symbols=5), HMM(2, num_symbols=5, iterations_per_epoch=400)
    callbacks = Convergence(1e-3), Convergence(1e-3)
    fit(single, sequences, 400, callbacks=[callbacks[0]])
    fit(several, sequences, 1, callbacks=[callbacks[1]])
    epochs = single.trainer.current_epoch
    assert 1 < epochs < 399
    assert len(several.iteration_likelihoods) == epochs + 1  # and the one that Lightning counts
    assert several.trainer.global_step == 1
    assert callbacks[1].stopping_reason == callbacks[0].stopping_reason.replace("epochs", "iterations")


def test_priors_count_in_several_iterations(rng):
    sequences = random_symbols(rng)
    models = [HMM(3, Categorical(0.5), Full(0.7), num_symbols=5, iterations_per_epoch=number) for number in (1, 5)]
    for model, epochs in zip(models, (5, 1), strict=True):
        fit(model, sequences, epochs, 0, callbacks=[Convergence(0.0)])
    torch.testing.assert_close(models[0].transition_probs, models[1].transition_probs, rtol=1e-10, atol=1e-12)


def test_fit_makes_as_many_iterations_as_asked_for(rng):
    sequences = random_symbols(rng)
    for number in (1, 7, 20, 23):
        model = fit(HMM(2, num_symbols=5), sequences, number, 0)
        plain = fit(HMM(2, num_symbols=5), sequences, number, 0, callbacks=[Convergence(0.0)])  # nothing is hidden from a callback
        torch.testing.assert_close(model.transition_probs, plain.transition_probs, rtol=1e-9, atol=1e-12)
        assert plain.trainer.current_epoch == number
        assert model.iterations_per_epoch == 1


def test_several_iterations_need_one_batch(rng):
    with pytest.raises(MisconfigurationException, match="`iterations_per_epoch` is 3, but an epoch has 4 batches"):
        fit(HMM(2, num_symbols=5, iterations_per_epoch=3), random_symbols(rng, num_sequences=8), 2, batch_size=2)
    with pytest.raises(ValueError, match="`iterations_per_epoch` is for batch EM"):
        HMM(2, num_symbols=5, iterations_per_epoch=3, discount=0.9)
