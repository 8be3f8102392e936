"""The composed model: parts by name, instance and configuration; sizes from data; checkpoints; plain Trainers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

import lightning_hmm
from lightning_hmm import (
    HMM,
    Categorical,
    Column,
    Full,
    Gaussian,
    Initial,
    Poisson,
    Product,
    Sequences,
    StandardHMM,
    TorchEmission,
    fit,
    load,
)
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
    named = fit(
        StandardHMM(3, emission_pseudocount=0.1, transition_pseudocount=0.2, initial_pseudocount=0.3, **options),
        sequences,
        5,
        0,
    )
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
    model = HMM(2, "Gaussian", num_features=2, frozen=["emission"]).set_parameters(
        emission={"mean": mean, "variance": torch.ones(2, 2)}
    )
    fit(model, sequences, 2, 0)
    torch.testing.assert_close(model.emission.mean, mean, rtol=1e-12, atol=1e-12)
    once = HMM(2, "Gaussian", num_features=2).set_parameters(
        emission={"mean": [[-1.0, -1.0], [1.0, 1.0]], "variance": np.ones((2, 2))}
    )
    started = copy.deepcopy(once)
    started.initialize(sequences)
    torch.testing.assert_close(started.emission.mean, once.emission.mean, rtol=1e-9, atol=1e-9)


def test_a_copy_has_its_own_chosen_restart(rng):
    model = HMM(2, "Gaussian", num_features=2, restarts=2)
    model.initialize(random_vectors(rng))
    twin = copy.deepcopy(model)
    twin.best_restart.fill_(1)
    assert torch.equal(
        model.emission.mean, model.emission._decode(model.emission.weights[0].detach())[0] + model.emission.center
    )
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


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*You defined a `validation_step`",
    "ignore:.*Trying to infer the `batch_size`",
)
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("emission", ["Gaussian", "Categorical"])
def test_a_plain_trainer_and_data_loader_work(rng, emission, sized, tmp_path):
    symbolic = emission == "Categorical"
    sequences = random_symbols(rng, missing=0.0) if symbolic else random_vectors(rng, missing=0.0)
    if symbolic:
        sequences.values[-1] = 4  # the largest symbol, also in the last batch only
    sizes = ({"num_symbols": 5} if symbolic else {"num_features": 2}) if sized else {}
    loader = DataLoader([row for row in sequences if len(row)], batch_size=4, collate_fn=Sequences.collate)
    model = HMM(2, emission, **sizes)
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
    }
    callbacks = [EarlyStopping("val/log_likelihood", mode="max", patience=3), ModelCheckpoint(tmp_path, save_last=True)]
    Trainer(max_epochs=6, callbacks=callbacks, **options).fit(model, loader, loader)
    filled = sequences[sequences.lengths > 0]
    expected = HMM(2, emission, **sizes)
    fit(expected, filled, 6, 0, batch_size=4)
    torch.testing.assert_close(model.score(filled), expected.score(filled), rtol=1e-9, atol=1e-9)
    assert torch.equal(
        HMM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True).score(filled), model.score(filled)
    )
    resumed = HMM(2, emission, **sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint")
        Trainer(max_epochs=8, enable_checkpointing=False, **options).fit(
            resumed, loader, ckpt_path=tmp_path / "last.ckpt", weights_only=True
        )
    longer = HMM(2, emission, **sizes)
    Trainer(max_epochs=8, enable_checkpointing=False, **options).fit(longer, loader)
    assert torch.equal(resumed.score(filled), longer.score(filled))


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*Trying to infer the `batch_size`")
def test_symbols_are_those_of_all_batches_of_a_plain_loader():
    loader = DataLoader([[0, 1, 0], [1, 1], [2, 0], [0, 6]], batch_size=1, collate_fn=Sequences.collate)
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
    }
    model = HMM(2)
    Trainer(max_epochs=2, **options).fit(model, loader)
    assert model.num_symbols == 7
    with pytest.raises(TypeError, match=r"collate_fn=Sequences\.collate"):
        Trainer(max_epochs=2, **options).fit(HMM(2), DataLoader(torch.zeros(8, 3)))


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
        plain = fit(
            HMM(2, num_symbols=5), sequences, number, 0, callbacks=[Convergence(0.0)]
        )  # nothing is hidden from a callback
        torch.testing.assert_close(model.transition_probs, plain.transition_probs, rtol=1e-9, atol=1e-12)
        assert plain.trainer.current_epoch == number
        assert model.iterations_per_epoch == 1


def test_several_iterations_need_one_batch(rng):
    with pytest.raises(MisconfigurationException, match=r"`iterations_per_epoch` is 3, .* but an epoch has 4 batches"):
        fit(HMM(2, num_symbols=5, iterations_per_epoch=3), random_symbols(rng, num_sequences=8), 2, batch_size=2)
    with pytest.raises(ValueError, match="`iterations_per_epoch` requires batch EM"):
        HMM(2, num_symbols=5, iterations_per_epoch=3, discount=0.9)


def table(rng) -> pd.DataFrame:
    """Numbers, counts and names that differ between two states; some are missing."""
    states = np.repeat(rng.integers(0, 2, 40), 5)
    frame = pd.DataFrame({"x": rng.normal(size=200) + 4 * states, "visits": rng.poisson(2 + 5 * states)})
    frame["weather"] = np.where(rng.random(200) < 0.1 + 0.8 * states, "sun", "rain")
    frame.loc[3, "weather"], frame.loc[5, "x"] = None, np.nan
    return frame


def mixed() -> Product:
    return Product({"x": Gaussian(), "visits": Poisson(), "weather": Categorical(0.1)})


def test_columns_of_a_data_frame_are_found_by_name(rng, tmp_path):
    frame = table(rng)
    model = fit(HMM(2, mixed()), frame, max_epochs=5, val_sequences=frame[["visits", "weather", "x"]])
    assert model.columns == [Column("x"), Column("visits"), Column("weather", "categorical", ("rain", "sun"))]
    expected = model.score(frame)
    coded = np.column_stack([frame.x, frame.visits, frame.weather.map({"rain": 0.0, "sun": 1.0})])
    model.trainer.save_checkpoint(tmp_path / "mixed.ckpt")
    for same in (model, load(tmp_path / "mixed.ckpt")):
        for data in (frame[["weather", "x", "visits"]], [frame[["weather", "x", "visits"]]], coded):
            assert torch.equal(same.score(data), expected)
    for data, message in (
        (frame[["x", "visits"]], "columns 'x', 'visits', 'weather', but sequence 0 has no column 'weather'"),
        (
            frame.assign(y=1.0),
            r"but sequence 0 also has 'y'. Select the columns, as in `df\[\['x', 'visits', 'weather'\]\]`",
        ),
        (
            frame.assign(weather="snow"),
            "Column 'weather' must hold the categories of training, 'rain', 'sun', but sequence 0 holds 'snow'",
        ),
        (frame.assign(x="a"), "Column 'x' must hold numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            model.score(data)


@pytest.mark.parametrize(
    "make", [lambda: HMM(2, Gaussian("full")), lambda: StandardHMM(2, emission="gaussian", num_features=2)]
)
def test_permuted_columns_are_put_in_order(rng, make):
    frame = table(rng)[["x", "visits"]]
    model = fit(make(), frame, max_epochs=3)
    assert torch.equal(model.score(frame[["visits", "x"]]), model.score(frame))
    assert torch.equal(model.score(Sequences.from_list(frame[["visits", "x"]])), model.score(frame))
    for data in (frame.rename(columns={"x": "y"}), Sequences.from_list(frame.rename(columns={"x": "y"}))):
        with pytest.raises(ValueError, match=r"must have the columns '?x'?, '?visits'?"):
            model.score(data)


def test_categories_of_a_product_are_those_of_the_data(rng):
    values = np.column_stack([rng.normal(size=50), rng.integers(0, 3, 50)])
    model = fit(HMM(2, Product([Gaussian(), Categorical()])), values, max_epochs=2)
    assert model.columns == [Column("feature_0"), Column("feature_1", "categorical", 3)]


def test_whole_numbers_are_counts_for_poisson(rng):
    counts = rng.poisson(3, 60)
    model = fit(HMM(2, "Poisson"), [counts], max_epochs=5)
    expected = model.score([counts.astype(float)])
    forms = (
        counts,
        counts[:, None],
        torch.as_tensor(counts),
        [counts.tolist()],
        [torch.as_tensor(counts)],
        pd.Series(counts),
        [pd.Series(counts)],
    )
    for data in (*forms, Sequences.from_list([counts]), pd.DataFrame({"count": counts})):
        assert torch.equal(model.score(data), expected)
    pairs = rng.poisson(3, (60, 2))
    model = fit(HMM(2, "Poisson"), pairs, lengths=[20, 40], max_epochs=5)
    assert torch.equal(model.score([pairs]), model.score([pairs.astype(float)]))
    assert model.score([[[1, 2], [3, 4]], [[1, 2]]]).shape == (2,)
    assert torch.equal(model.score([[None, [1, 2]]]), model.score([[[np.nan, np.nan], [1.0, 2.0]]]))
    whole = fit(HMM(2, Gaussian()), [np.arange(10), np.arange(5) - 3], max_epochs=2)  # -1 is a number
    assert torch.equal(whole.score([[-1, 0]]), whole.score([[-1.0, 0.0]]))


VECTORS = [np.random.default_rng(0).normal(size=(20, 2))]
SYMBOLS = [[0, 1, 2, 1, 0, 2]]


def trained(emission: Any, data: Any = VECTORS) -> HMM:
    return fit(HMM(2, emission), data, max_epochs=1)


def set_emission(values: Any, emission: Any = "Gaussian", data: Any = VECTORS) -> HMM:
    return trained(emission, data).set_parameters(emission=values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # options
        (lambda: HMM(2, seed=None), "`seed` must be a whole number of at most 64 bits, but is None instead"),
        (lambda: HMM(2, seed="a"), "`seed` .* but is 'a' instead"),
        (lambda: HMM(2, seed=2**70), "`seed` must be a whole number of at most 64 bits"),
        (lambda: HMM(2, frozen="emission"),
         r"`frozen` must be a list of names, such as \['emission'\], but is 'emission' instead"),
        (lambda: StandardHMM(2, 3, frozen=1), "`frozen` must be a list of names, .* but is 1 instead"),
        (lambda: HMM(2, restarts=1.5), "`restarts` must be a whole number of at least 1, but is 1.5 instead"),
        (lambda: HMM("4"), "`num_states` must be a whole number of at least 1, but is '4' instead"),
        (lambda: HMM(True), "`num_states` must be a whole number of at least 1, but is True instead"),
        (lambda: HMM(2, num_symbols="3"), "`num_symbols` must be a whole number of at least 1, but is '3' instead"),
        (lambda: HMM(2, num_features=-1), "`num_features` must be a whole number of at least 1, but is -1 instead"),
        (lambda: HMM(2, num_symbols=2, num_features=2), "`num_symbols` .* and `num_features` .* but both are given"),
        (lambda: HMM(2, discount="a", num_symbols=3), "`discount` must be at least 0 and below 1, but is 'a' instead"),
        (lambda: HMM(2, columns=[]), "`columns` must hold at least one column"),
        (lambda: HMM(2, columns="xy"), "`columns` must be a list of `Column`, but is 'xy' instead"),
        (lambda: HMM(2, columns=[Column("x"), Column("x")]),
         "`columns` must have different names, but 'x' occurs more than once"),
        (lambda: Column(3), "`name` of a column must be a string, but is 3 instead"),
        # parts
        (lambda: HMM(2, 5), "`emission` must be an Emission, .* but is 5 instead"),
        (lambda: HMM(2, Gaussian),
         r"`emission` must be an object, but is the class Gaussian instead. Give `Gaussian\(...\)`"),
        (lambda: HMM(2, {"class_path": "Gaussian", "init_args": {"foo": 1}}),
         "Gaussian has the options covariance, variance_prior, tied, frozen, but 'foo' was given"),
        (lambda: HMM(2, Gaussian("foo")),
         "`covariance` must be diagonal, spherical, full or tied, but is 'foo' instead"),
        (lambda: Product([]), "`parts` must hold at least one emission"),
        (lambda: Product(Gaussian()), r"`parts` must be a list of emissions, .* but is Gaussian\(\) instead"),
        (lambda: Product([Gaussian(), 3]), "parts of a Product must be emissions, but one is 3"),
        (lambda: Product({0: Gaussian()}), "keys of `parts` must be names of columns, but one is 0"),
        (lambda: TorchEmission(3), "`module` must be an nn.Module class, or the path of one, but is 3 instead"),
        (lambda: TorchEmission(torch.nn.Linear, m_steps="a"),
         "`m_steps` must be a positive number, but is 'a' instead"),
        # training
        (lambda: fit(3, SYMBOLS), "`model` must be a model, .* but is 3 instead"),
        (lambda: fit(HMM(2), SYMBOLS, max_epochs="5"),
         "`max_epochs` must be a whole number, or -1 for no limit, but is '5' instead"),
        (lambda: fit(HMM(2), SYMBOLS, max_epochs=float("nan")),
         "`max_epochs` must be a whole number, or -1 for no limit, but is nan instead"),
        (lambda: fit(HMM(2), SYMBOLS, max_epochs=-3),
         "`max_epochs` must be a whole number, or -1 for no limit, but is -3 instead"),
        (lambda: fit(HMM(2), SYMBOLS, tolerance="a"), "`tolerance` must be a finite number, but is 'a' instead"),
        (lambda: fit(HMM(2), SYMBOLS, batch_size=1.5), "`batch_size` must be a whole number, .* but is 1.5 instead"),
        (lambda: fit(HMM(2), SYMBOLS, seed="a"), "`seed` .* but is 'a' instead"),
        # data
        (lambda: fit(HMM(2), None), "`sequences` must be a list of sequences, but is None instead"),
        (lambda: fit(HMM(2), 5), "`sequences` must be a list of sequences, but is 5 instead"),
        (lambda: fit(HMM(2), {"a": [1]}), "`sequences` must be a list of sequences, but is {'a': .1.} instead"),
        (lambda: fit(HMM(2), []), "`sequences` must hold at least one step, but holds 0 sequences"),
        (lambda: fit(HMM(2, Gaussian()), [[]]), "`sequences` must hold at least one step, but holds 1 sequences"),
        (lambda: fit(HMM(2, Gaussian()), [np.zeros((3, 2)), np.zeros((3, 3))]),
         "must all have 2 features like the first, but sequence 1 has 3"),
        (lambda: fit(HMM(2, Gaussian()), [np.zeros((3, 2, 2))]), r"sequence 0 has shape \(3, 2, 2\) instead"),
        (lambda: fit(HMM(2, Gaussian()), [["a", "b"]]),
         "`sequences` must hold numbers, but sequence 0 holds <U1 instead"),
        (lambda: fit(HMM(2, Gaussian()), torch.tensor([[1j, 2.0]])),
         r"`sequences` must hold real numbers, but sequence 0 holds complex64 instead.$"),
        (lambda: fit(HMM(2, Gaussian()), pd.DataFrame({"t": pd.date_range("2020", periods=4)})),
         "numbers or names, but 't' holds dates"),
        (lambda: fit(HMM(2, Gaussian()), VECTORS[0], lengths=[5, 5]),
         "`lengths` must sum to 20, the number of steps, but sums to 10"),
        # values
        (lambda: set_emission({"foo": 1}), "has the parameters mean, variance, but 'foo' was given"),
        (lambda: set_emission({"mean": [1, 2, 3]}), r"`mean` must have shape \(2, 2\), but has \(3,\) instead"),
        (lambda: set_emission({"mean": "abc"}), "`mean` must be an array of real numbers, but is 'abc' instead"),
        (lambda: set_emission({"mean": [[1], [2, 3]]}),
         r"`mean` must be an array of real numbers, but is \[\[1\], \[2, 3\]\] instead"),
        (lambda: set_emission({"variance": np.full((2, 2), 1e-320)}),
         "`variance` must be at least 1e-280, but that of state 0, column 0 is 9.99"),
        (lambda: set_emission({"foo": 1}, "Categorical", SYMBOLS),
         "A Categorical emission has the parameter probs, but 'foo' was given"),
        (lambda: set_emission("abc", "Categorical", SYMBOLS),
         "`emission` must be an array of real numbers, but is 'abc' instead"),
        (lambda: trained("Categorical", SYMBOLS).set_parameters(transition=[[1j, 0], [0, 1]]),
         "`transition` must be an array of real numbers"),
        (lambda: trained("Categorical", SYMBOLS).set_parameters(initial=[0.5, 0.6]),
         "`initial` rows must sum to 1, but it sums to 1.1"),
        # use
        (lambda: trained("Categorical", SYMBOLS).sample(length=-1), "`length` must not be negative"),
        (lambda: trained("Categorical", SYMBOLS).sample(length=1.5),
         "`length` must be a whole number, .* but is 1.5 instead"),
        (lambda: trained("Categorical", SYMBOLS).sample(1.5),
         "`num_sequences` must be a whole number, but is 1.5 instead"),
        (lambda: trained("Categorical", SYMBOLS).sample(3, [1, 2]),
         "`length` must have one number for each of the 3 sequences, but has 2"),
        (lambda: trained("Categorical", SYMBOLS).sample(seed=None), "`seed` .* but is None instead"),
        (lambda: trained("Categorical", SYMBOLS).predict_next(SYMBOLS, steps=0),
         "`steps` must be a whole number of at least 1, but is 0 instead"),
        (lambda: trained("Categorical", SYMBOLS).predict_next(SYMBOLS, steps=1.5),
         "`steps` must be a whole number of at least 1, but is 1.5 instead"),
        (lambda: trained("Categorical", SYMBOLS).aic([]),
         "`sequences` must have an observed step, but none of the 0 steps is observed"),
        (lambda: trained("Gaussian").bic([]), "`sequences` must have an observed step"),
        (lambda: trained("Gaussian").decode([np.zeros((3, 3))]), "Each step must have 2 features, but has 3 instead"),
        (lambda: HMM(2).score(SYMBOLS), "The model has no sizes yet. Train it, or give `num_symbols`"),
        (lambda: HMM(2, Gaussian(), num_features=2).score(VECTORS),
         "Gaussian emission has no values yet. Train the model, or set `mean` and `variance`"),
        (lambda: HMM(2, Product([Gaussian(), Poisson()]), num_features=2).sample(),
         "Gaussian emission has no values yet"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["initial_probs", "transition_probs", "emission_probs"])
def test_parameters_without_sizes_are_named(name):
    with pytest.raises(AttributeError, match="The model has no sizes yet"):
        getattr(HMM(2, "Categorical"), name)
    with pytest.raises(AttributeError, match="A Gaussian has no `mean` before it has sizes"):
        _ = Gaussian().mean


def test_nothing_is_scored_as_nothing(rng):
    for model in (trained("Gaussian"), trained("Categorical", SYMBOLS)):
        assert model.score([]).shape == (0,)
        assert model.score([[]]).tolist() == [0.0]
