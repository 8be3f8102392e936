"""Figures reach TensorBoard when they should, show what they should, and the curve survives a resume."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib import pyplot
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_hmm import DenseHMM, NeuralHMM, Sequences, StandardHMM, fit, plotting
from lightning_hmm.callbacks import Figures
from lightning_hmm.callbacks import figures as figures_module
from lightning_hmm.models import LinearGaussianHMM
from tests.helpers import random_symbols, random_vectors

TAGS = ["figures/convergence", "figures/emissions", "figures/state_usage", "figures/transition_matrix"]


def categorical(**options) -> StandardHMM:
    return StandardHMM(**{"num_states": 3, "num_symbols": 5, "seed": 1, **options})


def logger(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(str(folder), name="", version="")


def steps(folder: Path) -> dict[str, list[int]]:
    """The steps of the images by tag."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    return {tag: [image.step for image in events.Images(tag)] for tag in sorted(events.Tags()["images"])}


def at(*expected: int) -> dict[str, list[int]]:
    """Images of all tags at the same steps."""
    return {tag: list(expected) for tag in TAGS}


@pytest.fixture
def drawn(monkeypatch) -> list[dict[str, Figure]]:
    """What the callback drew each time, instead of in TensorBoard."""
    sets: list[dict[str, Figure]] = []

    def draw(self, trainer, model, epoch):
        self._drawn_epoch = epoch
        figures = {name: draw() for name, draw in self._figures(model)}
        sets.append({name: figure for name, figure in figures.items() if figure is not None})

    monkeypatch.setattr(Figures, "_draw", draw)
    return sets


def heights(figure: Figure) -> list[float]:
    return [bar.get_height() for bar in figure.axes[0].patches]


# When and where


def test_first_epoch_every_n_and_the_last(rng, tmp_path):
    fit(
        categorical(),
        random_symbols(rng),
        max_epochs=4,
        tolerance=0,
        logger=logger(tmp_path),
        callbacks=[Figures(every_n_epochs=3)],
    )
    assert steps(tmp_path) == at(1, 3, 4)


def test_by_default_the_epochs_double(rng, tmp_path):
    fit(categorical(), random_symbols(rng), max_epochs=9, tolerance=0, logger=logger(tmp_path), callbacks=[Figures()])
    assert steps(tmp_path) == at(1, 2, 4, 8, 9)


def test_the_step_is_the_number_of_updates(rng, tmp_path):
    model = categorical(discount=0.9)
    fit(
        model,
        random_symbols(rng),
        max_epochs=2,
        tolerance=0,
        batch_size=6,
        logger=logger(tmp_path),
        callbacks=[Figures(every_n_epochs=2)],
    )
    assert steps(tmp_path) == at(3, 6)


@pytest.mark.parametrize("num_features", [1, 2, 3])
def test_gaussian_models_have_the_same_tags(rng, tmp_path, num_features):
    model = StandardHMM(2, emission="gaussian", num_features=num_features)
    fit(
        model,
        random_vectors(rng, num_features=num_features),
        max_epochs=1,
        logger=logger(tmp_path),
        callbacks=[Figures()],
    )
    assert steps(tmp_path) == at(1)


def test_every_tensorboard_logger_gets_them(rng, tmp_path):
    loggers = [logger(tmp_path / "a"), CSVLogger(str(tmp_path / "c")), logger(tmp_path / "b")]
    fit(categorical(), random_symbols(rng), max_epochs=1, logger=loggers, callbacks=[Figures()])
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == at(1)


@pytest.mark.parametrize("reason", ["no logger", "another logger", "another rank"])
def test_nothing_is_drawn_where_nobody_would_see_it(rng, tmp_path, monkeypatch, reason):
    def draw(self, model):
        raise AssertionError("drawn")

    monkeypatch.setattr(Figures, "_figures", draw)
    if reason == "another rank":
        monkeypatch.setattr(Trainer, "is_global_zero", property(lambda self: False))
    chosen = {"no logger": False, "another logger": CSVLogger(str(tmp_path)), "another rank": logger(tmp_path)}[reason]
    callback = Figures()
    fit(categorical(), random_symbols(rng), max_epochs=2, tolerance=0, logger=chosen, callbacks=[callback])
    assert not callback._excerpts
    # The likelihood is a sum over ranks: each one asks for it.
    assert sorted(callback.train) == [1, 2]


def test_sanity_checks_and_separate_validation_leave_no_trace(rng, tmp_path):
    class Watch(Callback):
        def on_sanity_check_end(self, trainer, pl_module):
            assert trainer.num_sanity_val_batches == [2]
            assert callback.val == callback._excerpts == {}

    callback, model, validation = Figures(), categorical(), random_symbols(rng)
    options = {"batch_size": 5, "num_sanity_val_steps": 2, "logger": logger(tmp_path)}
    fit(model, random_symbols(rng), max_epochs=1, val_sequences=validation, callbacks=[callback, Watch()], **options)
    assert callback.val == {1: pytest.approx(float(model.score(validation).sum() / validation.num_observed()))}
    before = steps(tmp_path)
    loader = torch.utils.data.DataLoader([validation[:3]], batch_size=None)
    Trainer(
        logger=logger(tmp_path), callbacks=[callback], enable_checkpointing=False, enable_progress_bar=False
    ).validate(model, loader, verbose=False)
    assert list(callback.val) == [1]
    assert steps(tmp_path) == before


def test_figures_are_freed(rng, tmp_path, monkeypatch):
    made, figures = [], Figures._figures

    def watched(self, model):
        for name, figure in figures(self, model):
            made.append(weakref.ref(figure))
            yield name, figure

    monkeypatch.setattr(Figures, "_figures", watched)
    before = pyplot.get_fignums()
    fit(categorical(), random_symbols(rng), max_epochs=2, tolerance=0, logger=logger(tmp_path), callbacks=[Figures()])
    gc.collect()
    assert len(made) == 8
    assert not any(figure() for figure in made)
    assert pyplot.get_fignums() == before


def test_a_figure_that_fails_is_reported_once_and_training_continues(rng, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("'alpha' must be between 0 and 1")

    monkeypatch.setattr(figures_module.plotting, "transition_matrix", fail)
    model = categorical()
    with pytest.warns(UserWarning, match="transition_matrix") as caught:
        fit(
            model,
            random_symbols(rng),
            max_epochs=3,
            tolerance=0,
            logger=logger(tmp_path),
            callbacks=[Figures(every_n_epochs=1)],
        )
    (warning,) = caught
    assert str(warning.message).startswith(
        "The figure transition_matrix failed, and the run continues without it: "
        "ValueError: 'alpha' must be between 0 and 1"
    )
    assert model.trainer.current_epoch == 3
    assert steps(tmp_path) == {tag: [1, 2, 3] for tag in TAGS if tag != "figures/transition_matrix"}


def test_a_model_that_fails_in_a_figure_does_not_end_the_run(rng, tmp_path, monkeypatch):
    def fail(self, sequences):
        raise AttributeError("no `posterior` here")

    monkeypatch.setattr(StandardHMM, "posterior", fail)
    with pytest.warns(UserWarning, match=r"AttributeError: no `posterior` here") as caught:
        fit(
            categorical(),
            random_symbols(rng),
            max_epochs=2,
            tolerance=0,
            logger=logger(tmp_path),
            callbacks=[Figures()],
        )
    assert len(caught) == 1  # that of the share of time; probabilities of symbols do not need it
    assert steps(tmp_path) == {f"figures/{name}": [1, 2] for name in ("convergence", "emissions", "transition_matrix")}


@pytest.mark.parametrize("method", ["add_figure", "add_embedding"])
def test_a_writer_that_fails_does_not_end_the_run(rng, tmp_path, monkeypatch, method):
    def fail(self, *_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(SummaryWriter, method, fail)
    model = DenseHMM(num_states=3, embedding_dim=2, num_symbols=5)
    with pytest.warns(UserWarning, match=r"OSError: no space left on device"):
        fit(model, random_symbols(rng), max_epochs=2, tolerance=0, logger=logger(tmp_path), callbacks=[Figures()])
    assert model.trainer.current_epoch == 2


def test_names_that_the_font_lacks_are_no_reason_to_warn(rng, tmp_path):
    model = categorical(symbol_names=["一", "二", "三", "$", "$$"])
    fit(model, random_symbols(rng), max_epochs=1, logger=logger(tmp_path), callbacks=[Figures()])
    assert steps(tmp_path) == at(1)


@pytest.mark.parametrize("name", ["every_n_epochs", "max_labels"])
def test_arguments_are_checked(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, but is 0 instead"):
        Figures(**{name: 0})
    with pytest.raises(ValueError, match="`lead` must be at least 0, but is -1 instead"):
        Figures(lead=-1)


# What they show


def test_matrices_are_those_of_the_model(rng, tmp_path, drawn):
    model = categorical(symbol_names=list("abcde"))
    fit(model, random_symbols(rng), max_epochs=3, tolerance=0, logger=logger(tmp_path), callbacks=[Figures()])
    assert len(drawn) == 3
    np.testing.assert_array_equal(drawn[-1]["transition_matrix"].axes[0].images[0].get_array(), model.transition_probs)
    emissions = drawn[-1]["emissions"].axes[0]
    np.testing.assert_array_equal(emissions.images[0].get_array(), model.emission_probs)
    assert [text.get_text() for text in emissions.get_xticklabels()] == list("abcde")


def test_means_are_in_units_of_the_training_data(rng, tmp_path, drawn):
    model, sequences = StandardHMM(2, emission="gaussian", num_features=3), random_vectors(rng, num_features=3)
    fit(model, sequences, max_epochs=1, logger=logger(tmp_path), callbacks=[Figures()])
    values = sequences.values.numpy()
    units = (model.emission.mean.numpy() - np.nanmean(values, axis=0)) / np.nanstd(values, axis=0)
    np.testing.assert_allclose(drawn[-1]["emissions"].axes[0].images[0].get_array(), units, rtol=1e-10)


@pytest.mark.parametrize("part", ["training", "validation"])
def test_bars_are_expected_visits(rng, tmp_path, drawn, part):
    model, validation = categorical(), random_symbols(rng)
    sequences = random_symbols(rng, missing=0.0)
    sequences = Sequences(sequences.values, sequences.offsets, torch.from_numpy(rng.integers(0, 4, len(sequences))))
    fit(
        model,
        sequences,
        max_epochs=2,
        tolerance=0,
        val_sequences=validation if part == "validation" else None,
        logger=logger(tmp_path),
        callbacks=[Figures()],
    )
    used = validation if part == "validation" else sequences
    weights = np.ones(len(used)) if used.weights is None else used.weights.numpy()
    visits = sum(
        weight * model.posterior([sequence]).smoothed.values.numpy().sum(0)
        for weight, sequence in zip(weights, used, strict=True)
        if len(sequence)
    )
    usage = drawn[-1]["state_usage"]
    np.testing.assert_allclose(heights(usage), visits / visits.sum(), rtol=1e-10)
    assert used.num_steps > 20
    assert usage.axes[0].get_title(loc="left") == f"Expected share of time ({used.num_steps} steps of {part} data)"
    np.testing.assert_allclose(
        usage.axes[1].lines[0].get_ydata(), 1 / (1 - model.transition_probs.diagonal().numpy()), rtol=1e-10
    )


def test_excerpts_are_small_copies():
    batch = Sequences.from_list([[0, 1, 2]] * 300, weights=list(range(300)))
    excerpt = figures_module._excerpt(batch, 10_000)
    assert excerpt.tolist() == [[0, 1, 2]] * 256
    assert excerpt.weights.tolist() == list(range(256))
    batch.values.zero_()
    assert excerpt.tolist() == [[0, 1, 2]] * 256
    assert figures_module._excerpt(excerpt, 4).tolist()[:3] == [[0, 1, 2], [0], []]


def test_the_stationary_distribution_stands_in_where_there_is_no_posterior(rng, tmp_path, drawn):
    class NoPosterior(StandardHMM):
        @property
        def posterior(self):
            raise AttributeError("posterior")

    model = NoPosterior(3, 5)
    fit(model, random_symbols(rng), max_epochs=1, logger=logger(tmp_path), callbacks=[Figures()])
    share = torch.tensor(heights(drawn[0]["state_usage"]), dtype=torch.float64)
    torch.testing.assert_close(share @ model.transition_probs, share, rtol=1e-10, atol=0)
    assert "stationary distribution" in drawn[0]["state_usage"].axes[0].get_title(loc="left")


def test_a_posterior_of_continuous_states_has_no_usage(rng, tmp_path):
    fit(
        LinearGaussianHMM(2, 2),
        random_vectors(rng, longest=6),
        max_epochs=1,
        logger=logger(tmp_path),
        callbacks=[Figures()],
    )
    assert list(steps(tmp_path)) == ["figures/convergence"]


def test_what_a_model_has_not_is_left_out(rng, tmp_path, drawn):
    class Bare(StandardHMM):
        @property
        def transition_probs(self):
            return self.transition.log_probs.exp()  # of all restarts, which is not a matrix

        @property
        def emission_probs(self):
            raise AttributeError("emission_probs")

    fit(Bare(3, 5), random_symbols(rng), max_epochs=1, logger=logger(tmp_path), callbacks=[Figures()])
    assert sorted(drawn[0]) == ["convergence", "state_usage"]
    assert len(drawn[0]["state_usage"].axes) == 1


def test_all_restarts_are_in_the_curve_and_the_chosen_one_is_thick(rng, tmp_path, drawn):
    model, seen = categorical(restarts=4), []

    class Watch(Callback):
        def on_train_end(self, trainer, pl_module):
            seen.append(pl_module.epoch_log_likelihood.tolist())

    callback = Figures()
    fit(model, random_symbols(rng), max_epochs=3, tolerance=0, logger=logger(tmp_path), callbacks=[callback, Watch()])
    assert [callback.train[3]] == seen
    *thin, thick = drawn[-1]["convergence"].axes[0].lines
    assert thick.get_ydata().tolist() == [callback.train[epoch][int(model.best_restart)] for epoch in (1, 2, 3)]
    assert len(thin) == 3


def test_validation_is_drawn_at_the_epochs_that_had_it(rng, tmp_path, drawn):
    fit(
        categorical(),
        random_symbols(rng),
        max_epochs=4,
        tolerance=0,
        val_sequences=random_symbols(rng),
        check_val_every_n_epoch=2,
        logger=logger(tmp_path),
        callbacks=[Figures()],
    )
    training, validation = drawn[-1]["convergence"].axes[0].lines
    assert training.get_xdata().tolist() == [1, 2, 3, 4]
    assert validation.get_xdata().tolist() == [2, 4]


# Checkpoints


@pytest.mark.filterwarnings(
    "ignore:The ``compute`` method of metric .* was called before"
)  # by others, at an epoch's end without a batch
@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_resume_keeps_the_curve(rng, tmp_path, drawn, at_epoch_end):
    sequences, validation = random_symbols(rng), random_symbols(rng)

    def run(max_epochs: int, *others: Callback, **options) -> Figures:
        callback = Figures(every_n_epochs=10)
        fit(
            categorical(),
            sequences,
            max_epochs,
            tolerance=0,
            val_sequences=validation,
            logger=logger(tmp_path),
            callbacks=[callback, *others],
            **options,
        )
        return callback

    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=at_epoch_end)

    run(3, checkpoint(), enable_checkpointing=True)
    resumed = run(5, checkpoint(), enable_checkpointing=True, ckpt_path=str(tmp_path / "epoch=2.ckpt"))
    whole = run(5)
    if not at_epoch_end:
        # Saved between the validation and the end of epoch 3, whose training likelihood is lost with its batches.
        del whole.train[3]
    assert resumed.train == whole.train
    assert resumed.val == whole.val
    training, validation_line = drawn[2]["convergence"].axes[0].lines
    assert training.get_xdata().tolist() == list(whole.train)
    assert validation_line.get_xdata().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("drawn")
def test_another_run_with_the_same_callback_begins_anew(rng, tmp_path):
    callback, sequences = Figures(), random_symbols(rng)
    for max_epochs in (3, 1):
        fit(
            categorical(),
            sequences,
            max_epochs,
            tolerance=0,
            val_sequences=sequences,
            logger=logger(tmp_path),
            callbacks=[callback],
        )
    assert list(callback.train) == list(callback.val) == [1]


def test_more_epochs_of_the_same_trainer_go_on(rng, tmp_path):
    callback, model = Figures(), categorical()
    loader = torch.utils.data.DataLoader([random_symbols(rng)], batch_size=None)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=2, logger=logger(tmp_path), callbacks=[callback], **quiet)
    trainer.fit(model, loader)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader)
    assert list(callback.train) == [1, 2, 3]
    assert steps(tmp_path) == at(1, 2, 3)


# Dense vectors


def test_vectors_reach_the_projector_with_their_names(rng, tmp_path):
    model = DenseHMM(3, 5, embedding_dim=2, objective="cooccurrence", steps_per_epoch=2, symbol_names=list("abcde"))
    fit(model, random_symbols(rng), max_epochs=2, tolerance=0, logger=logger(tmp_path), callbacks=[Figures()])
    assert {"figures/composition", "figures/cooccurrences"} <= steps(tmp_path).keys()
    for name, count in {"U": 3, "Z": 3, "W": 3, "V": 5}.items():
        folder = tmp_path / "00002" / name
        saved = np.loadtxt(folder / "tensors.tsv")
        np.testing.assert_allclose(saved, model.embeddings[name], rtol=1e-5)
        assert (folder / "metadata.tsv").read_text().split() == (
            list("abcde") if name == "V" else [str(state) for state in range(count)]
        )


def test_composition_shows_the_start_and_now(rng, tmp_path, drawn):
    model = DenseHMM(3, 5, embedding_dim=2, m_steps=2, restarts=2)
    start = [DenseHMM(3, 5, embedding_dim=2, restarts=2).transition.matrix(restart) for restart in range(2)]
    fit(model, random_symbols(rng), max_epochs=1, tolerance=0, logger=logger(tmp_path), callbacks=[Figures()])
    before, after = (drawn[-1]["composition"].axes[panel].images[0].get_array() for panel in (1, 5))
    np.testing.assert_allclose(before, start[int(model.best_restart)])
    np.testing.assert_allclose(after, model.transition_probs)


def test_latent_states_are_drawn(rng, tmp_path):
    """Of ragged sequences with gaps, one of them a single point; the band is of the very sequence that is shown."""
    data = random_vectors(rng, longest=8)
    model = fit(
        NeuralHMM(2, 2, num_particles=8, num_paths=2, width=4),
        data,
        1,
        0,
        callbacks=[Figures(num_clusters=3)],
        logger=logger(tmp_path),
    )
    assert set(steps(tmp_path)) == {
        f"figures/{name}" for name in ("convergence", "effective_size", "latents", "predictions")
    }
    predictions = model.one_step_predictions(data)
    callback = Figures(num_clusters=3, lead=1)
    callback._excerpts["training"] = data
    found = {name: draw() for name, draw in callback._figures(model)}
    longest = int(data.lengths.argmax())
    line = next(line for line in found["predictions"].axes[0].lines if line.get_label() == "expected")
    np.testing.assert_allclose(line.get_ydata(), predictions.mean[longest][1:, 0])
    shown = [len(line.get_xdata()) for line in found["latents"].axes[0].lines if str(line.get_label())[0] in "012"]
    assert sum(shown) == data.num_steps
    assert len(shown) == 3
    joined = next(line for line in found["latents"].axes[0].lines if str(line.get_label())[0] not in "012")
    np.testing.assert_allclose(np.transpose(joined.get_data()), model.latents(data, lead=1)[0])
    many = plotting.latents(np.arange(40.0).reshape(20, 2), np.arange(20), [20])
    assert [note.get_text() for note in many.axes[0].texts] == [
        str(cluster) for cluster in range(20)
    ]  # so many colours are alike
    median = next(line for line in found["effective_size"].axes[0].lines if line.get_label() == "median").get_ydata()
    first = predictions.effective_size.values[data.offsets[:-1]].squeeze(1)
    assert float(median[0]) == pytest.approx(float(np.median(first)))
