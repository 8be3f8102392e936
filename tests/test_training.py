"""`fit` and `load`: the laws of EM under the Trainer, restarts, errors, and checkpoints."""

from __future__ import annotations

import warnings

import hmmlearn.hmm
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_hmm
from lightning_hmm import Sequences, StandardHMM, fit
from lightning_hmm.callbacks import Convergence
from lightning_hmm.loading import loader
from tests.helpers import assert_identical_parameters, assert_same_parameters, random_symbols, random_vectors

PRIORS = {"initial_pseudocount": 0.3, "transition_pseudocount": 0.5, "emission_pseudocount": 0.1}


def categorical(**options) -> StandardHMM:
    return StandardHMM(**{"num_states": 3, "num_symbols": 5, "seed": 1, **options})


def quiet_trainer(**options) -> Trainer:
    return Trainer(**{"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, **options})


# Against a peer


def test_twenty_categorical_steps_equal_hmmlearn(rng):
    sequences, model = random_symbols(rng, missing=0.0), categorical()
    sequences = sequences[torch.nonzero(sequences.lengths > 0).flatten()]
    peer = hmmlearn.hmm.CategoricalHMM(3, n_iter=20, tol=-np.inf, init_params="", n_features=5)
    peer.startprob_, peer.transmat_, peer.emissionprob_ = (probs.numpy() for probs in (model.initial_probs, model.transition_probs, model.emission_probs))
    peer.fit(sequences.values.numpy()[:, None], sequences.lengths.tolist())
    fit(model, sequences, max_epochs=20, tolerance=0, batch_size=4)
    np.testing.assert_allclose(model.transition_probs, peer.transmat_, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(model.emission_probs, peer.emissionprob_, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(model.initial_probs, peer.startprob_, rtol=1e-10, atol=1e-14)


def test_twenty_gaussian_steps_equal_hmmlearn(rng):
    sequences = random_vectors(rng, missing=0.0)
    model = StandardHMM(num_states=3, emission="gaussian", num_features=2, variance_prior=0.0)
    model.initialise(sequences)
    peer = hmmlearn.hmm.GaussianHMM(3, "diag", n_iter=20, tol=-np.inf, init_params="", covars_prior=0.0, min_covar=0.0)
    peer.startprob_, peer.transmat_ = model.initial_probs.numpy(), model.transition_probs.numpy()
    peer.means_, peer.covars_ = model.means.numpy(), model.variances.numpy()
    peer.fit(sequences.values.numpy(), sequences.lengths.tolist())
    fit(model, sequences, max_epochs=20, tolerance=0, batch_size=4)
    np.testing.assert_allclose(model.means, peer.means_, rtol=1e-8)
    np.testing.assert_allclose(model.variances, np.stack([np.diag(c) for c in peer.covars_]), rtol=1e-8)
    np.testing.assert_allclose(model.transition_probs, peer.transmat_, rtol=1e-8, atol=1e-14)


# Laws


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 5}, {"batch_size": 5, "shuffle": True, "seed": 3}, {"batch_size": 100}])
@pytest.mark.parametrize("emission", ["categorical", "gaussian"])
def test_batch_em_does_not_depend_on_the_batches(rng, emission, options):
    """Law 1, priors included."""
    if emission == "categorical":
        sequences, make = random_symbols(rng), lambda: categorical(**PRIORS)
    else:
        sequences, make = (
            random_vectors(rng),
            lambda: StandardHMM(num_states=2, emission="gaussian", num_features=2, variance_prior=0.1, transition_pseudocount=0.5),
        )
    assert_same_parameters(fit(make(), sequences, 8, 0), fit(make(), sequences, 8, 0, **options))


def test_accumulating_batches_is_one_larger_batch_online(rng):
    """The prior is not blind to the scale of the counts."""
    sequences = random_symbols(rng, 16)
    options = {"discount": 0.8, **PRIORS}
    whole = fit(categorical(**options), sequences, 3, 0, batch_size=8)
    parts = fit(categorical(**options), sequences, 3, 0, batch_size=4, accumulate_grad_batches=2)
    assert_same_parameters(whole, parts)


def test_many_updates_in_a_batch_equal_one_update_a_batch(rng):
    """The fused pass through the Trainer; and where there is none, step by step."""
    symbols, vectors = random_symbols(rng, 32), random_vectors(rng, 32)
    options = {"discount": 0.9, "transition_pseudocount": 1.0}
    separate = fit(categorical(**options), symbols, 3, 0, batch_size=4)
    assert_same_parameters(separate, fit(categorical(sequences_per_update=4, **options), symbols, 3, 0, batch_size=16), rtol=1e-8)
    gaussian = {"num_states": 2, "emission": "gaussian", "num_features": 2, **options}
    separate = fit(StandardHMM(**gaussian), vectors, 3, 0, batch_size=4)
    assert_same_parameters(separate, fit(StandardHMM(sequences_per_update=4, **gaussian), vectors, 3, 0, batch_size=16), rtol=1e-8)


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


def test_relabelling_states_changes_nothing(rng):
    sequences, order = random_symbols(rng), torch.tensor([2, 0, 1])
    first, second = categorical(), categorical()
    second.set_parameters(first.initial_probs[order], first.transition_probs[order][:, order], first.emission_probs[order])
    fit(first, sequences, 10, 0)
    fit(second, sequences, 10, 0)
    torch.testing.assert_close(second.transition_probs, first.transition_probs[order][:, order], rtol=1e-9, atol=1e-12)


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
        alone.set_parameters(start.initial.probs[r], start.transition.probs[r], start.emission.probs[r])
        fit(alone, train, 10, 0)
        torch.testing.assert_close(together.transition.probs[r], alone.transition_probs, rtol=1e-10, atol=1e-13)
        scores.append(float(alone.score(validation).sum()))
    assert int(np.argmax(scores)) != 0  # or a model that never chooses would pass
    assert int(together.chosen) == int(np.argmax(scores))
    assert float(together.score(validation).sum()) == pytest.approx(max(scores), rel=1e-12)


def test_without_validation_data_training_data_choose(rng):
    sequences = random_symbols(rng)
    model = fit(categorical(restarts=5), sequences, 10, 0)
    # By the likelihood that the last epoch's batches met.
    assert int(model.chosen) == int(model.epoch_log_likelihood.argmax())
    assert len(set(model.epoch_log_likelihood.tolist())) == 5


def test_where_validation_rules_all_out_training_chooses(rng):
    """A symbol that training never met: the likelihood of validation is zero for every restart."""
    train, validation = random_symbols(rng, num_symbols=4), Sequences.from_list([[4]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit(categorical(restarts=5, seed=2), train, 10, 0, val_sequences=validation)
    assert any("Sequence 0 has probability zero" in str(warning.message) for warning in caught)
    assert int(model.chosen) == int(model.epoch_log_likelihood.argmax()) != 0


# Starting


def test_a_gaussian_start_heeds_weights(rng):
    """A sequence of weight zero, far away, is as if it were not there; and weights are repeats."""
    near = [rng.normal(size=(20, 2)) for _ in range(6)]
    far = Sequences.from_list([*near, np.full((20, 2), 1e6)], weights=[1.0] * 6 + [0.0])
    models = [StandardHMM(num_states=2, emission="gaussian", num_features=2) for _ in range(2)]
    models[0].initialise(Sequences.from_list(near))
    models[1].initialise(far)
    assert_same_parameters(*models)
    assert torch.equal(models[0].emission.scale, models[1].emission.scale)
    weighted, repeated = (StandardHMM(num_states=2, emission="gaussian", num_features=2) for _ in range(2))
    weighted.emission.locate(Sequences.from_list(near[:2], weights=[1.0, 3.0]))
    repeated.emission.locate(Sequences.from_list([near[0], near[1], near[1], near[1]]))
    torch.testing.assert_close(weighted.emission.scale, repeated.emission.scale, rtol=1e-12, atol=0)
    torch.testing.assert_close(weighted.emission.centre, repeated.emission.centre, rtol=1e-12, atol=1e-15)


def test_given_means_get_the_centre_of_the_data(rng):
    """Without it, data around 1e6 would lose ten digits."""
    near = random_vectors(rng, missing=0.0)
    models = []
    for offset in (0.0, 1e6):
        model = StandardHMM(num_states=2, emission="gaussian", num_features=2, variance_prior=0.0)
        model.set_parameters(means=np.array([[0.0, 0.0], [4.0, 4.0]]) + offset, variances=np.ones((2, 2)))
        models.append(fit(model, near.with_values(near.values + offset), 10, 0))
    torch.testing.assert_close(models[1].variances, models[0].variances, rtol=1e-7, atol=0)


# Stopping


def test_a_callback_of_convergence_starts_anew_with_each_fit(rng):
    sequences, callback = random_symbols(rng), Convergence(tolerance=1e-4)
    epochs = [fit(categorical(seed=seed), sequences, 500, callbacks=[callback]).trainer.current_epoch for seed in (1, 1)]
    assert epochs[0] == epochs[1] > 2


def test_a_fall_is_no_convergence():
    """Online EM has dips; so has a likelihood that a prior pulls on."""

    class Falling:
        values = iter([-1.0, -0.5, -0.6, -0.7, -0.7])
        update_called, priors, discount = True, {}, 0.9

        def compute(self):
            return torch.tensor([next(self.values)])

    model, trainer, callback = Falling(), Trainer(logger=False, accelerator="cpu"), Convergence(1e-3)
    model.train_likelihood = model
    stopped = []
    for _ in range(5):
        callback.on_train_epoch_end(trainer, model)
        stopped.append(trainer.should_stop)
    assert stopped == [False, False, False, False, True]


def test_batch_em_leaves_the_trainers_accumulation_as_it_was(rng):
    sequences = random_symbols(rng)
    trainer = quiet_trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(categorical(), loader(sequences, 5))
    assert trainer.accumulate_grad_batches == 3
    assert trainer.global_step == 1


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


def test_a_weight_of_zero_times_minus_infinity_is_nothing_in_the_fused_pass():
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
    model = fit(categorical(), random_symbols(rng), 60, 0)
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
        ([[0, 1]], "hold symbols instead"),
        ([[[float("nan"), 1.0], [float("nan"), 2.0]]], "feature 0 is missing at every step"),
    ],
)
def test_bad_vectors_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        fit(StandardHMM(num_states=2, emission="gaussian", num_features=2), data, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "`trainer.gradient_clip_val` must not be set for EM"),
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


def test_a_gaussian_model_with_a_plain_loader_says_what_to_do(rng):
    trainer = quiet_trainer(accelerator="cpu")
    with pytest.raises(ValueError, match=r"model.initialise\(sequences\)"):
        trainer.fit(StandardHMM(num_states=2, emission="gaussian", num_features=2), loader(random_vectors(rng)))


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
    fit(model, random_symbols(rng), 5, 0, val_sequences=random_symbols(rng), enable_checkpointing=True, callbacks=[callback])
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


def test_unreadable_and_foreign_checkpoints_are_named(checkpoint, tmp_path):
    (tmp_path / "torn.ckpt").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(ValueError, match=r"torn\.ckpt is not a checkpoint that can be read"):
        lightning_hmm.load(tmp_path / "torn.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match=r"foreign\.ckpt holds no model of lightning_hmm"):
        lightning_hmm.load(tmp_path / "foreign.ckpt")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        lightning_hmm.load(tmp_path / "none.ckpt")
    content = torch.load(checkpoint[1], weights_only=True)
    content["lightning_hmm"]["model"] = "OtherHMM"
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="must hold a StandardHMM, but holds a OtherHMM"):
        StandardHMM.load_from_checkpoint(tmp_path / "other.ckpt")


@pytest.mark.parametrize("options", [{}, {"discount": 0.9, "transition_pseudocount": 1.0}, {"discount": 0.9, "sequences_per_update": 2}, {"restarts": 3}])
def test_resumed_equals_never_stopped(tmp_path, rng, options):
    """Law 2, bit for bit, in one process; a killed process is another test."""
    train, validation = random_symbols(rng), random_symbols(rng)
    common = {"val_sequences": validation, "batch_size": 5, "shuffle": True}
    whole = fit(categorical(**options), train, 8, 0, **common)
    for epochs, path in ((4, None), (8, str(tmp_path / "last.ckpt"))):
        saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "ckpt_path": path}
        resumed = fit(categorical(**options), train, epochs, 0, **saving, **common)
    assert_identical_parameters(whole, resumed)
    assert torch.equal(whole.chosen, resumed.chosen)
    assert torch.equal(whole.epoch_log_likelihood, resumed.epoch_log_likelihood)


def test_a_checkpoint_from_the_middle_of_an_epoch_is_refused(tmp_path, rng):
    sequences = random_symbols(rng)
    model = categorical(discount=0.9)
    fit(
        model,
        sequences,
        2,
        0,
        batch_size=5,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")],
    )
    with pytest.raises(ValueError, match="saved in the middle of an epoch"):
        fit(categorical(discount=0.9), sequences, 4, 0, batch_size=5, ckpt_path=str(tmp_path / "step=2.ckpt"))
    lightning_hmm.load(tmp_path / "step=2.ckpt")  # its parameters are fine
