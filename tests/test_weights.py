"""A sequence of weight 0 is the same as its absence: in every method of every row of `tests.table`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_hmm import Sequences
from lightning_hmm.callbacks import CooccurrenceReport
from lightning_hmm.data import InMemoryData, loader
from lightning_hmm.distributions.transitions.clones import ngram_counts, seen_pairs
from lightning_hmm.models.baselines import KneserNey
from lightning_hmm.models.contexts import BackOff, Contexts
from lightning_hmm.training import quiet_lightning
from tests.table import ROWS, D, Row, V, assert_same_state, state, suited


def pair(kind: str) -> tuple[Sequences, Sequences]:
    """Sequences of which the last two have weight 0, and the same without those two, which are longer and different."""
    rng = np.random.default_rng(3)
    lengths = [6, 1, 0, 9, 4, 7]
    weights = [1.0, 2.0, 1.0, 0.5, 1.5, 1.0]
    if "vectors" not in kind:
        kept: list[Any] = [
            rng.permutation([0, 1, 2] * 3)[:n] for n in lengths
        ]  # symbols 3 and 4 occur in what does not count only
        extra: list[Any] = [[3, 3, 0, 0, 3, 1, 1, 3, 2, 4, 3, 0], [-1, 3, -1]]
    else:
        kept = [rng.normal(size=(n, D)) + 3.0 * rng.integers(0, 2, (n, 1)) for n in lengths]
        kept[3][2, 0] = np.nan
        extra = [np.full((12, D), 50.0) + rng.normal(size=(12, D)), np.array([[np.nan, 70.0]] * 3)]
    together = suited(kind, Sequences.from_list([*kept, *extra], [*weights, 0.0, 0.0]))
    return together, together[: len(kept)]


class Data(InMemoryData):
    """The same sequences for testing, with states that they are said to be drawn from."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(sequences, None, None, False, 0)
        self._test = sequences

    @property
    def test_sequences(self) -> Sequences:
        return self._test

    def true_states(self, part: str) -> Sequences:
        states = torch.arange(self.test_sequences.num_steps) % 2
        return Sequences(states, self.test_sequences.offsets)

    def test_dataloader(self) -> Any:
        return loader(self.test_sequences, None)


def trained(row: Row, sequences: Sequences, **options: Any) -> Any:
    """All sequences in one batch, or a sequence of weight 0 would decide which of the others share one."""
    return row.fit(sequences, batch_size=None, **options)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not (row.several_updates or row.random_shares)])
def test_in_training(name):
    """Parameters, units, clones, the chosen restart and the logged likelihood; for validation likewise."""
    row = ROWS[name]
    with_extra, without = pair(row.kind)
    models = [
        trained(row, sequences, val_sequences=validation)
        for sequences in (with_extra, without)
        for validation in (None, sequences)
    ]
    for one, other in ((models[0], models[2]), (models[1], models[3])):
        assert_same_state(state(one), state(other), max(row.tolerance, 1e-9))
        if one.epoch_log_likelihood is not None:
            torch.testing.assert_close(one.epoch_log_likelihood, other.epoch_log_likelihood, rtol=row.tolerance, atol=0)
        if hasattr(one, "num_free_parameters"):
            assert one.num_free_parameters == other.num_free_parameters


@pytest.mark.parametrize("name", ROWS)
def test_in_test_and_criteria(name):
    """Likelihoods, prediction errors, state accuracy, the co-occurrence report, AIC, BIC and expected transitions."""
    row = ROWS[name]
    with_extra, without = pair(row.kind)
    model = trained(row, without)
    found = []
    for sequences in (with_extra, without):
        with quiet_lightning(announcements=False), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(is not logged|has probability zero)")
            callbacks = [CooccurrenceReport()] if row.is_symbolic and hasattr(model, "sample") else []
            trainer = Trainer(
                callbacks=callbacks,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            (metrics,) = trainer.test(model, datamodule=Data(sequences), verbose=False)
            if hasattr(model, "aic"):
                metrics |= {"aic": model.aic(sequences), "bic": model.bic(sequences)}
                counts = model.posterior(sequences).transition_counts
                metrics |= {
                    f"counts {number}": float(part.sum())
                    for number, part in enumerate(counts if isinstance(counts, tuple) else [counts])
                }
        found.append(metrics)
    assert found[0] == pytest.approx(found[1], rel=row.tolerance)
    assert "test/log_likelihood" in found[0]
    assert ("test/state_accuracy" in found[0]) == hasattr(model, "num_states")


def test_of_clones():
    with_extra, without = pair("symbols")
    model = trained(ROWS["cloned, frequency"], without)
    assert_same_state(*(state(model.backed_off(sequences)) for sequences in (with_extra, without)), 1e-9)
    assert torch.equal(seen_pairs(with_extra), seen_pairs(without))
    for unique in (False, True):
        assert (
            ngram_counts(with_extra, V, 2, unique=unique).tolist()
            == ngram_counts(without, V, 2, unique=unique).tolist()
        )
    graphs = [model.state_graph(sequences) for sequences in (with_extra, without)]
    assert graphs[0].edges == graphs[1].edges
    assert [weight for *_, weight in graphs[0].edges(data="weight")] == pytest.approx(
        [weight for *_, weight in graphs[1].edges(data="weight")]
    )


def test_of_n_grams_and_contexts():
    with_extra, without = pair("symbols")
    whole = [
        Sequences(sequences.values, sequences.offsets, (2 * sequences.weights)) for sequences in (with_extra, without)
    ]
    text = Sequences.from_list([[0, 1, 2, 0, 0, 2], [1, 1]], weights=[1.0, 0.0])
    one, other = (KneserNey(V, 3).fit(sequences) for sequences in whole)
    assert one.step_probs(text).tolist() == other.step_probs(text).tolist()
    assert one.bits_per_symbol(text) == pytest.approx(one.bits_per_symbol(text[:1]), rel=1e-12)
    contexts = [Contexts(sequences, V, 2, min_count=2) for sequences in whole]
    assert contexts[0].strings().tolist() == contexts[1].strings().tolist()
    model = trained(ROWS["cloned"], without)
    joined = [BackOff([model], sequences, V).joined(lower) for sequences, lower in zip(whole, contexts, strict=True)]
    assert_same_state(*(state(model) for model in joined), 1e-9)


def test_of_n_grams_with_whole_weights_count_like_repeats():
    lists, weights = [[0, 1, 2, 0], [2, 1, 1], [0, 1]], [1, 3, 2]
    repeated = [sequence for sequence, weight in zip(lists, weights, strict=True) for _ in range(weight)]
    one, other = (
        KneserNey(3, 3).fit(Sequences.from_list(lists, weights)),
        KneserNey(3, 3).fit(Sequences.from_list(repeated)),
    )
    text = Sequences.from_list([[0, 1, 1, 2, 0, 2]])
    assert one.step_probs(text).tolist() == other.step_probs(text).tolist()
    with pytest.raises(ValueError, match=r"whole numbers as weights for n-grams, but sequence 1 has 0\.5"):
        KneserNey(3, 3).fit(Sequences.from_list(lists, [1, 0.5, 1]))
