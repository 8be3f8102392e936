"""`fit` and `load`: the laws of EM under the Trainer, restarts, errors, and checkpoints."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import hmmlearn.hmm
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_hmm
from lightning_hmm import ClonedHMM, Sequences, StandardHMM, fit
from lightning_hmm.callbacks import Convergence
from lightning_hmm.data import loader
from tests.helpers import assert_identical_parameters, assert_same_parameters, random_symbols, random_vectors

PRIORS = {"initial_pseudocount": 0.3, "transition_pseudocount": 0.5, "emission_pseudocount": 0.1}


def categorical(**options) -> StandardHMM:
    return StandardHMM(**{"num_states": 3, "num_symbols": 5, "seed": 1, **options})


def quiet_trainer(**options) -> Trainer:
    return Trainer(
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


# Against a peer


def test_twenty_categorical_steps_equal_hmmlearn(rng):
    sequences, model = random_symbols(rng, missing=0.0), categorical()
    sequences = sequences[torch.nonzero(sequences.lengths > 0).flatten()]
    peer = hmmlearn.hmm.CategoricalHMM(3, n_iter=20, tol=-np.inf, init_params="", n_features=5)
    peer.startprob_, peer.transmat_, peer.emissionprob_ = (
        probs.numpy() for probs in (model.initial_probs, model.transition_probs, model.emission_probs)
    )
    peer.fit(sequences.values.numpy()[:, None], sequences.lengths.tolist())
    fit(model, sequences, max_epochs=20, tolerance=0, batch_size=4)
    np.testing.assert_allclose(model.transition_probs, peer.transmat_, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(model.emission_probs, peer.emissionprob_, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(model.initial_probs, peer.startprob_, rtol=1e-10, atol=1e-14)


def test_twenty_gaussian_steps_equal_hmmlearn(rng):
    sequences = random_vectors(rng, missing=0.0)
    model = StandardHMM(num_states=3, emission="gaussian", num_features=2, variance_prior=0.0)
    model.initialize(sequences)
    peer = hmmlearn.hmm.GaussianHMM(3, "diag", n_iter=20, tol=-np.inf, init_params="", covars_prior=0.0, min_covar=0.0)
    peer.startprob_, peer.transmat_ = model.initial_probs.numpy(), model.transition_probs.numpy()
    peer.means_, peer.covars_ = model.emission.mean.numpy(), model.emission.variance.numpy()
    peer.fit(sequences.values.numpy(), sequences.lengths.tolist())
    fit(model, sequences, max_epochs=20, tolerance=0, batch_size=4)
    np.testing.assert_allclose(model.emission.mean, peer.means_, rtol=1e-8)
    np.testing.assert_allclose(model.emission.variance, np.stack([np.diag(c) for c in peer.covars_]), rtol=1e-8)
    np.testing.assert_allclose(model.transition_probs, peer.transmat_, rtol=1e-8, atol=1e-14)


# Data in the format of hmmlearn


@pytest.mark.parametrize(
    "kind", [np.asarray, torch.as_tensor, pd.DataFrame, list], ids=["numpy", "torch", "pandas", "list"]
)
def test_fit_takes_lengths(rng, kind):
    symbols = random_symbols(rng, missing=0.0)
    column = symbols.values.numpy()[:, None]
    assert_same_parameters(
        fit(categorical(), kind(column), 5, 0, lengths=symbols.lengths.tolist()), fit(categorical(), symbols, 5, 0)
    )
    vectors = random_vectors(rng)
    models = [StandardHMM(num_states=2, emission="gaussian", num_features=2) for _ in range(2)]
    assert_same_parameters(
        fit(models[0], kind(vectors.values.numpy()), 5, 0, lengths=vectors.lengths), fit(models[1], vectors, 5, 0)
    )


def test_lengths_of_names():
    models = [categorical(num_symbols=2, symbol_names=["a", "b"]) for _ in range(2)]
    assert_same_parameters(fit(models[0], list("abbaa"), 5, 0, lengths=[2, 3]), fit(models[1], ["ab", "baa"], 5, 0))


def test_a_table_of_real_numbers_is_one_sequence_everywhere(rng):
    values = rng.normal(size=(30, 1))
    given = [values, torch.as_tensor(values), pd.DataFrame(values)]
    models = [
        fit(StandardHMM(num_states=2, emission="gaussian", num_features=1), data, 5, 0) for data in ([values], *given)
    ]
    for model, data in zip(models[1:], given, strict=True):
        assert_same_parameters(model, models[0])
        assert torch.equal(model.score(data), models[0].score([values]))
        assert model.decode(data).tolist() == models[0].decode([values]).tolist()


@pytest.mark.parametrize(
    "call",
    [lambda model, data: fit(model, data, 1), StandardHMM.score, StandardHMM.decode],
    ids=["fit", "score", "decode"],
)
@pytest.mark.parametrize("names", [None, ["a", "b", "c", "d", "e"]])
def test_a_column_of_symbols_is_refused_everywhere(call, names):
    for column in (np.zeros((4, 1), int), torch.zeros(4, 1, dtype=torch.int64), np.array([["a"]] * 4)):
        with pytest.raises(ValueError, match=r"shape \(4, 1\).* Use `Sequences.from_lengths\(X, lengths\)`"):
            call(categorical(symbol_names=names), column)


@pytest.mark.parametrize("lengths", [[2, 3], (2, 3), np.array([2, 3]), torch.tensor([2, 3])])
def test_lengths_in_the_place_of_max_epochs_are_refused(lengths):
    with pytest.raises(
        ValueError, match=r"`max_epochs` must be a number, but is .*2, 3.* `fit\(model, X, lengths=...\)`"
    ):
        fit(categorical(), np.zeros((5, 1), int), lengths)


def test_max_epochs_is_a_whole_number_of_any_type(rng):
    sequences = random_symbols(rng)
    found = [fit(categorical(), sequences, number, 0).transition_probs for number in (2, np.int64(2), 2.0)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match=r"`max_epochs` must be a whole number, .* but is 2\.5"):
        fit(categorical(), sequences, 2.5)


def test_lengths_of_sequences_are_refused():
    with pytest.raises(
        ValueError, match="`lengths` must be given with one array of all steps, but the data are `Sequences`"
    ):
        fit(categorical(), Sequences.from_list([[0, 1]]), lengths=[2])
    with pytest.raises(ValueError, match="`lengths` must sum to 5, the number of steps, but sums to 4"):
        fit(categorical(), np.zeros((5, 1), int), lengths=[2, 2])


# Laws


def test_many_updates_in_a_batch_equal_one_update_a_batch(rng):
    """The compiled pass through the Trainer; and where there is none, step by step."""
    symbols, vectors = random_symbols(rng, 32), random_vectors(rng, 32)
    options = {"discount": 0.9, "transition_pseudocount": 1.0}
    separate = fit(categorical(**options), symbols, 3, 0, batch_size=4)
    assert_same_parameters(
        separate, fit(categorical(sequences_per_update=4, **options), symbols, 3, 0, batch_size=16), rtol=1e-8
    )
    gaussian = {"num_states": 2, "emission": "gaussian", "num_features": 2, **options}
    separate = fit(StandardHMM(**gaussian), vectors, 3, 0, batch_size=4)
    assert_same_parameters(
        separate, fit(StandardHMM(sequences_per_update=4, **gaussian), vectors, 3, 0, batch_size=16), rtol=1e-8
    )


@pytest.mark.parametrize(
    ("family", "options", "per_epoch"),
    [
        (StandardHMM, {}, 1),
        (StandardHMM, {"discount": 0.8}, 4),
        (ClonedHMM, {}, 1),
        (ClonedHMM, {"discount": 0.8, "online_epochs": 1}, 1),
    ],
)
def test_batch_em_sums_over_ranks_once_an_epoch(rng, monkeypatch, family, options, per_epoch):
    """The Trainer is made to report two ranks.

    An epoch has four batches, and the second and later epochs are counted.
    """
    sequences, calls = random_symbols(rng, 32, missing=0.0), []
    monkeypatch.setattr(Trainer, "world_size", property(lambda _: 2))
    monkeypatch.setattr(family, "_sum_over_ranks", lambda _, value: calls.append(value) or value)
    counts = []
    for epochs in (2, 5):
        calls.clear()
        fit(
            family(num_states=10, num_symbols=5, transition_pseudocount=0.1, **options),
            sequences,
            epochs,
            0,
            batch_size=8,
        )
        counts.append(len(calls))
    assert counts[1] - counts[0] == 3 * per_epoch


def test_counts_of_an_interrupted_epoch_are_not_used_later(rng):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise RuntimeError("stopped")

    sequences, model = random_symbols(rng), categorical()
    with pytest.raises(RuntimeError, match="stopped"):
        fit(model, sequences, 1, 0, batch_size=5, callbacks=[Stop()])
    assert_identical_parameters(
        fit(model, sequences, 3, 0, batch_size=5), fit(categorical(), sequences, 3, 0, batch_size=5)
    )


def test_one_thread_and_two_give_the_same_bits(rng):
    sequences = random_symbols(rng, 300, longest=100)
    models = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            models.append(fit(categorical(num_states=7), sequences, 5, 0))
    finally:
        torch.set_num_threads(threads)
    assert_identical_parameters(*models)


def test_weights_count_like_repeats(rng):
    sequences = random_symbols(rng, 6)
    counts = torch.tensor([1, 2, 0, 3, 1, 2])
    weighted = Sequences(sequences.values, sequences.offsets, counts.double())
    repeated = sequences[torch.arange(6).repeat_interleave(counts)]
    assert_same_parameters(fit(categorical(**PRIORS), weighted, 5, 0), fit(categorical(**PRIORS), repeated, 5, 0))


def test_float32_arithmetic_is_close_and_counts_stay_float64(rng):
    sequences = random_symbols(rng)
    exact, fast = fit(categorical(), sequences, 10, 0), fit(categorical(), sequences, 10, 0, precision="32-true")
    assert fast.transition_probs.dtype == torch.float64
    assert fast.arithmetic == "float64"  # for this training only
    torch.testing.assert_close(fast.transition_probs, exact.transition_probs, rtol=0, atol=1e-4)
    assert not torch.equal(fast.transition_probs, exact.transition_probs)


def test_loader_workers_change_nothing(rng):
    sequences = random_symbols(rng)
    here, there = categorical(), categorical()
    for model, workers in ((here, 0), (there, 2)):
        trainer = quiet_trainer(max_epochs=2, accelerator="cpu")
        trainer.fit(model, loader(sequences, 5, num_workers=workers))
    assert_identical_parameters(here, there)


# Restarts


def test_restarts_are_the_separate_runs_and_the_best_is_chosen(rng):
    train, validation = random_symbols(rng), random_symbols(rng)
    together = fit(categorical(restarts=4, seed=3), train, 10, 0, val_sequences=validation)
    scores = []
    start = categorical(restarts=4, seed=3)
    for r in range(4):
        alone = categorical()
        start.best_restart.fill_(r)
        alone.set_parameters(start.initial_probs, start.transition_probs, start.emission_probs)
        fit(alone, train, 10, 0)
        torch.testing.assert_close(together.transition.matrix(r), alone.transition_probs, rtol=1e-10, atol=1e-13)
        scores.append(float(alone.score(validation).sum()))
    assert int(np.argmax(scores)) != 0  # or a model that never chooses would pass
    assert int(together.best_restart) == int(np.argmax(scores))
    assert float(together.score(validation).sum()) == pytest.approx(max(scores), rel=1e-12)


def test_without_validation_data_training_data_choose(rng):
    """By the likelihood under the parameters that are returned, not under those before the last update."""
    sequences, differ = random_symbols(rng), 0
    for seed in range(8):
        model = fit(
            categorical(restarts=5, seed=seed), sequences, 1 if seed % 2 else 2, 1.0, batch_size=5
        )  # tolerance 1 ends training after two epochs
        before, chosen = int(model.epoch_log_likelihood.argmax()), int(model.best_restart)
        scores = []
        for restart in range(5):
            model.best_restart.fill_(restart)
            scores.append(float(model.score(sequences).sum()))
        assert chosen == int(np.argmax(scores))
        differ += chosen != before
    assert differ  # or choosing by the likelihood before the last update would pass


def test_the_checkpoint_of_the_last_epoch_has_the_restart_that_is_returned(rng, tmp_path):
    sequences = random_symbols(rng)
    for seed in range(4):
        saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path / str(seed), save_last=True)]}
        model = fit(categorical(restarts=5, seed=seed), sequences, 1, 0, **saving)
        assert int(lightning_hmm.load(tmp_path / str(seed) / "last.ckpt").best_restart) == int(model.best_restart)


def test_where_validation_rules_all_out_training_chooses(rng):
    """A symbol that training never met: the likelihood of validation is zero for every restart."""
    train, validation = random_symbols(rng, num_symbols=4), Sequences.from_list([[4]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit(categorical(restarts=5, seed=2), train, 10, 0, val_sequences=validation)
    assert any("Sequence 0 has probability zero" in str(warning.message) for warning in caught)
    assert int(model.best_restart) == int(model.epoch_log_likelihood.argmax()) != 0


# Starting


def test_sequences_that_all_have_weight_zero_are_refused():
    with pytest.raises(ValueError, match="every sequence with an observed step has weight 0"):
        fit(categorical(), Sequences.from_list([[0, 1], [-1, -1]], weights=[0.0, 1.0]))


def test_a_gaussian_start_heeds_weights(rng):
    """A sequence of weight zero, far away, is as if it were not there; and weights are repeats."""
    near = [rng.normal(size=(20, 2)) for _ in range(6)]
    far = Sequences.from_list([*near, np.full((20, 2), 1e6)], weights=[1.0] * 6 + [0.0])
    models = [StandardHMM(num_states=2, emission="gaussian", num_features=2) for _ in range(2)]
    models[0].initialize(Sequences.from_list(near))
    models[1].initialize(far)
    assert_same_parameters(*models)
    assert torch.equal(models[0].emission.data_variance, models[1].emission.data_variance)
    weighted, repeated = (StandardHMM(num_states=2, emission="gaussian", num_features=2) for _ in range(2))
    weighted.emission.set_data_stats(Sequences.from_list(near[:2], weights=[1.0, 3.0]))
    repeated.emission.set_data_stats(Sequences.from_list([near[0], near[1], near[1], near[1]]))
    torch.testing.assert_close(weighted.emission.data_variance, repeated.emission.data_variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(weighted.emission.center, repeated.emission.center, rtol=1e-12, atol=1e-15)


def test_given_means_get_the_centre_of_the_data(rng):
    """Without it, data around 1e6 would lose ten digits."""
    near = random_vectors(rng, missing=0.0)
    models = []
    for offset in (0.0, 1e6):
        model = StandardHMM(num_states=2, emission="gaussian", num_features=2, variance_prior=0.0)
        model.set_parameters(
            emission={"mean": np.array([[0.0, 0.0], [4.0, 4.0]]) + offset, "variance": np.ones((2, 2))}
        )
        models.append(fit(model, near.with_values(near.values + offset), 10, 0))
    torch.testing.assert_close(models[1].emission.variance, models[0].emission.variance, rtol=1e-7, atol=0)


# Stopping


def test_a_callback_of_convergence_starts_anew_with_each_fit(rng):
    sequences, callback = random_symbols(rng), Convergence(tolerance=1e-4)
    epochs = [
        fit(categorical(seed=seed), sequences, 500, callbacks=[callback]).trainer.current_epoch for seed in (1, 1)
    ]
    assert epochs[0] == epochs[1] > 2


def test_a_fall_is_no_convergence():
    """Online EM has dips; so has a likelihood that a prior pulls on."""

    class Falling:
        values = iter([-1.0, -0.5, -0.6, -0.7, -0.7])
        update_called, priors, discount = True, {}, 0.9

        def compute(self):
            return torch.tensor([next(self.values)])

    model, callback = Falling(), Convergence(1e-3)
    trainer = SimpleNamespace(is_last_batch=True, should_stop=False, current_epoch=0)
    model.train_likelihood = model
    stopped = []
    for _ in range(5):
        callback.on_train_batch_end(trainer, model, None, None, 0)
        stopped.append(trainer.should_stop)
    assert stopped == [False, False, False, False, True]


def test_a_plain_trainer_makes_one_step_per_epoch(rng):
    trainer = quiet_trainer(accelerator="cpu", max_epochs=3)
    trainer.fit(categorical(), loader(random_symbols(rng), 5))
    assert trainer.global_step == 3


def test_other_options_than_the_checkpoints_are_refused(tmp_path, rng):
    sequences = random_symbols(rng)
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, save_last=True)]}
    fit(categorical(discount=0.5), sequences, 2, 0, **saving)
    with pytest.raises(ValueError, match=r"was trained with `discount` of initial 0\.5, but now it is 0\.9"):
        fit(categorical(discount=0.9), sequences, 4, 0, ckpt_path=str(tmp_path / "last.ckpt"), **saving)


def test_empty_sequences_do_not_count_in_a_priors_share(rng):
    """With one batch and no discounting, online EM is batch EM."""
    full = random_symbols(rng, 8)
    padded = Sequences.cat([full, Sequences.from_list([[], [], []])])
    batch = fit(categorical(**PRIORS), padded, 4, 0)
    assert_same_parameters(batch, fit(categorical(discount=0.0, **PRIORS), padded, 4, 0))


def test_a_weight_of_zero_times_minus_infinity_is_nothing_in_the_compiled_pass():
    model = categorical(discount=0.9, sequences_per_update=1)
    model.set_parameters(emission=[[0.5, 0.5, 0.0, 0.0, 0.0]] * 3)
    fit(model, Sequences.from_list([[0, 1], [4], [1, 0]], weights=[1.0, 0.0, 1.0]), 3, 0)
    assert torch.isfinite(model.epoch_log_likelihood).all()


def test_convergence_says_why(rng):
    sequences, callback = random_symbols(rng), Convergence(tolerance=1e-3)
    model = fit(categorical(), sequences, 500, 0, callbacks=[callback])
    assert "below the tolerance of 0.001" in callback.stopping_reason
    assert model.trainer.current_epoch < 100


def test_tolerance_zero_never_stops(rng):
    model = fit(categorical(), random_symbols(rng), 60, callbacks=[Convergence(0.0)])
    assert model.trainer.current_epoch == 60
    assert model.trainer.global_step == 60  # EM steps


# Errors


def test_an_impossible_sequence_is_named_and_changes_nothing():
    model = categorical()
    model.set_parameters(emission=[[0.5, 0.5, 0.0, 0.0, 0.0]] * 3)
    before = model.transition_probs
    with pytest.raises(ValueError, match=r"Sequence 1 has probability zero .* step 2 \(3\)"):
        fit(model, [[0, 1, 0], [1, 0, 3]], 5)
    assert torch.equal(model.transition_probs, before)
    fit(model, Sequences.from_list([[0, 1, 0], [1, 0, 3]], weights=[1.0, 0.0]), 5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[0, 1], [2, 7]], "position 1 of sequence 1 is 7"),
        ([[0, -2]], "position 1 of sequence 0 is -2"),
        ([], "at least one step, but holds 0 sequences"),
        ([[], []], "at least one step, but holds 2 sequences and 0 steps"),
        ([[-1, -1]], "all 2 steps are missing"),
        ([[0.5, 1.5]], "emits 5 symbols, but the sequences hold real vectors"),
    ],
)
def test_bad_data_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        fit(categorical(), data, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[[0.0, 1.0, 2.0]]], "Each step must have 2 features, but has 3"),
        ([[[0.0, 1.0], [float("inf"), 2.0]]], "feature 0 at position 1 of sequence 0 is inf"),
        ([[0, 1]], "Each step must have 2 features, but has 1"),
        ([[[float("nan"), 1.0], [float("nan"), 2.0]]], "'feature_0' is missing at every step"),
    ],
)
def test_bad_vectors_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        fit(StandardHMM(num_states=2, emission="gaussian", num_features=2), data, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, r"Remove `Trainer\(gradient_clip_val=1.0\)`"),
        ({"accumulate_grad_batches": 2}, r"Remove `Trainer\(accumulate_grad_batches=2\)`"),
        ({"precision": "bf16-mixed"}, "`trainer.precision` must be 32-true or 64-true"),
        ({"precision": "bf16-true"}, "`trainer.precision` must be 32-true or 64-true"),
    ],
)
def test_a_trainer_that_would_spoil_the_counts_is_refused(options, message):
    trainer = quiet_trainer(accelerator="cpu", **options)
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(categorical(), loader(Sequences.from_list([[0, 1, 2]])))


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_strategies_that_cut_parameters_up_are_refused(name):
    """They need a GPU to be built; a stand-in of that name does not."""
    strategy = type(name, (SingleDeviceStrategy,), {})(device=torch.device("cpu"))
    model = categorical()
    trainer = quiet_trainer(strategy=strategy)
    with pytest.raises(MisconfigurationException, match=f"must be a single device or ddp for an HMM, but is {name}"):
        trainer.fit(model, loader(Sequences.from_list([[0, 1, 2]])))


def test_sixteen_bits_are_refused_by_fit():
    with pytest.raises(ValueError, match="`precision` must be 64-true or 32-true, but is 'bf16-mixed'"):
        fit(categorical(), [[0, 1]], 1, precision="bf16-mixed")


def test_a_state_without_counts_is_said_once(rng):
    model = categorical()
    model.set_parameters([1.0, 0.0, 0.0], [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, random_symbols(rng, missing=0.0), 5, 0)
    said = [str(warning.message) for warning in caught if "`transition`" in str(warning.message)]
    assert len(said) == 1
    assert said[0].startswith("1 rows of `transition` got no counts and keep their values")


# Checkpoints


@pytest.fixture
def checkpoint(tmp_path, rng) -> tuple[StandardHMM, str]:
    model = categorical(restarts=3, symbol_names=list("abcde"))
    callback = ModelCheckpoint(tmp_path, save_last=True)
    fit(
        model,
        random_symbols(rng),
        5,
        0,
        val_sequences=random_symbols(rng),
        enable_checkpointing=True,
        callbacks=[callback],
    )
    return model, str(tmp_path / "last.ckpt")


def test_a_checkpoint_loads_with_weights_only(checkpoint, rng):
    model, path = checkpoint
    assert set(torch.load(path, weights_only=True)) >= {"state_dict", "hyper_parameters", "optimizer_states"}
    loaded = lightning_hmm.load(path)
    sequences = random_symbols(rng)
    assert isinstance(loaded, StandardHMM)
    assert torch.equal(loaded.score(sequences), model.score(sequences))
    assert loaded.vocabulary.names == list("abcde")
    assert loaded.decode(["abc"]).tolist() == model.decode([[0, 1, 2]]).tolist()
    assert torch.equal(StandardHMM.load_from_checkpoint(path).transition_probs, model.transition_probs)


def test_names_are_not_taken_for_the_numbers_of_training(tmp_path, rng):
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, save_last=True)]}
    fit(categorical(), random_symbols(rng), 1, **saving)
    with pytest.raises(ValueError, match=r"must have numbers as symbols, .* but have the names 'a', 'b'"):
        fit(
            categorical(symbol_names=list("abcde")),
            random_symbols(rng),
            2,
            ckpt_path=str(tmp_path / "last.ckpt"),
            **saving,
        )


def test_unreadable_and_foreign_checkpoints_are_named(checkpoint, tmp_path):
    (tmp_path / "torn.ckpt").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(ValueError, match=r"torn\.ckpt is not a checkpoint that can be read"):
        lightning_hmm.load(tmp_path / "torn.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match=r"foreign\.ckpt contains no model of lightning_hmm"):
        lightning_hmm.load(tmp_path / "foreign.ckpt")
    with pytest.raises(FileNotFoundError, match=r"`path` must be a checkpoint, but there is no file .*none\.ckpt"):
        lightning_hmm.load(tmp_path / "none.ckpt")
    content = torch.load(checkpoint[1], weights_only=True)
    content["lightning_hmm"]["model"] = "OtherHMM"
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="must hold a StandardHMM, but holds a OtherHMM"):
        StandardHMM.load_from_checkpoint(tmp_path / "other.ckpt")


@pytest.mark.parametrize("path", ["http://localhost:1/last.ckpt", "s3://bucket/last.ckpt", "file:///tmp/last.ckpt"])
def test_remote_checkpoints_are_refused(path):
    with pytest.raises(ValueError, match=f"`ckpt_path` must be the path of a local file, but is '{path}'"):
        fit(categorical(), [[0, 1]], 1, ckpt_path=path)
    with pytest.raises(ValueError, match=f"`path` must be the path of a local file, but is '{path}'"):
        lightning_hmm.load(path)


def test_a_local_checkpoint_whose_path_begins_with_http_is_not_downloaded(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    sequences = random_symbols(rng)
    for epochs, path in ((2, None), (4, "http_runs/last.ckpt")):
        saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path / "http_runs", save_last=True)]}
        model = fit(categorical(), sequences, epochs, 0, ckpt_path=path, **saving)
    assert model.trainer.global_step == 4


def test_a_word_in_the_place_of_a_checkpoint_is_refused():
    with pytest.raises(FileNotFoundError, match="`ckpt_path` must be a checkpoint, but there is no file last"):
        fit(categorical(), [[0, 1]], 1, ckpt_path="last")


def test_a_converged_run_is_not_trained_on(tmp_path, rng):
    sequences, saving = (
        random_symbols(rng),
        {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, save_last=True)]},
    )
    whole = fit(categorical(), sequences, 100, 1e-3, **saving)
    epochs = whole.trainer.current_epoch
    assert epochs < 100
    again = fit(categorical(), sequences, 100, 1e-3, ckpt_path=str(tmp_path / "last.ckpt"), **saving)
    assert again.trainer.current_epoch == epochs
    assert_identical_parameters(whole, again)
    assert (
        fit(
            categorical(), sequences, epochs + 3, 1e-9, ckpt_path=str(tmp_path / "last.ckpt"), **saving
        ).trainer.current_epoch
        == epochs + 3
    )
