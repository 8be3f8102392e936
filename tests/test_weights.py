"""A sequence of weight 0 is the same as its absence: in every method of every family.

Add a family as a row of `SYMBOLS` or `VECTORS`; every law below then applies to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer

from lightning_hmm import DMCHMM, ClonedHMM, DenseHMM, Sequences, StandardHMM, fit
from lightning_hmm.callbacks import CooccurrenceReport
from lightning_hmm.loading import loader
from lightning_hmm.models import LinearGaussianHMM, NeuralDiscreteHMM, NeuralHMM
from lightning_hmm.models.baselines import KneserNey, RecurrentNet
from lightning_hmm.models.cloned import ngram_counts, seen_pairs
from lightning_hmm.models.contexts import BackOff, Contexts
from lightning_hmm.training import quiet_lightning

V, D = 4, 2
ONE_UPDATE = {"discount": 0.8, "sequences_per_update": 20}  # all sequences in one update

SYMBOLS: dict[str, Callable[[], Any]] = {
    "StandardHMM": lambda: StandardHMM(3, V, restarts=3, transition_pseudocount=0.1),
    "StandardHMM, online": lambda: StandardHMM(3, V, **ONE_UPDATE, emission_pseudocount=0.2),
    "DMCHMM": lambda: DMCHMM(5, 2, V, restarts=2, transition_pseudocount=0.1),
    "DMCHMM, lazy": lambda: DMCHMM(5, 2, V, criterion="largest", selection="lazy"),
    "DenseHMM, em": lambda: DenseHMM(3, V, m_steps=3, restarts=2),
    "DenseHMM, cooccurrence": lambda: DenseHMM(3, V, objective="cooccurrence", steps_per_epoch=3),
    "DenseHMM, likelihood": lambda: DenseHMM(3, V, objective="likelihood"),
    "ClonedHMM": lambda: ClonedHMM(9, V, restarts=2),
    "ClonedHMM, frequency": lambda: ClonedHMM(20, V, allocation="frequency", pairs="all", transition_pseudocount=0.1),
    "ClonedHMM, ngram": lambda: ClonedHMM(9, V, allocation="ngram", ngram_order=2),
    "ClonedHMM, online": lambda: ClonedHMM(9, V, **ONE_UPDATE, transition_pseudocount=1e-3),
    "ClonedHMM, online then batch": lambda: ClonedHMM(9, V, discount=0.5, online_epochs=1, transition_pseudocount=1e-3),
    "RecurrentNet": lambda: RecurrentNet(4, num_symbols=V, bptt_steps=5, arithmetic="float64"),
}
VECTORS: dict[str, Callable[[], Any]] = {
    "StandardHMM": lambda: StandardHMM(2, emission="gaussian", num_features=D, restarts=2),
    "StandardHMM, random start": lambda: StandardHMM(2, emission="gaussian", num_features=D, initialisation="random"),
    "DMCHMM": lambda: DMCHMM(4, 1, emission="gaussian", num_features=D),
    "DenseHMM": lambda: DenseHMM(2, emission="gaussian", num_features=D, m_steps=3),
    "LinearGaussianHMM": lambda: LinearGaussianHMM(2, D),
    "LinearGaussianHMM, increments": lambda: LinearGaussianHMM(2, D, of="increments"),
    "NeuralDiscreteHMM": lambda: NeuralDiscreteHMM(2, D, width=4, emission_mean="absolute"),
    "NeuralDiscreteHMM, residual": lambda: NeuralDiscreteHMM(2, D, width=4),
    "NeuralHMM": lambda: NeuralHMM(2, D, width=4, num_particles=16, num_paths=4, arithmetic="float64"),
    "NeuralHMM, slow": lambda: NeuralHMM(2, D, width=4, num_particles=16, num_paths=4, arithmetic="float64", emission_mean="absolute", start_window=3),
    "RecurrentNet": lambda: RecurrentNet(4, num_features=D, arithmetic="float64"),
}
FAMILIES = [pytest.param(make, kind, id=f"{kind}: {name}") for kind, rows in (("symbols", SYMBOLS), ("vectors", VECTORS)) for name, make in rows.items()]


def pair(kind: str) -> tuple[Sequences, Sequences]:
    """Sequences of which the last two have weight 0, and the same without those two, which are unlike the others and longer than they are."""
    rng = np.random.default_rng(3)
    lengths = [6, 1, 0, 9, 4, 7]
    weights = [1.0, 2.0, 1.0, 0.5, 1.5, 1.0]
    if kind == "symbols":
        kept: list[Any] = [rng.permutation([0, 1, 2] * 3)[:n] for n in lengths]  # symbol 3 occurs in what does not count only
        extra: list[Any] = [[3, 3, 0, 0, 3, 1, 1, 3, 2, 2, 3, 0], [-1, 3, -1]]
    else:
        kept = [rng.normal(size=(n, D)) + 3.0 * rng.integers(0, 2, (n, 1)) for n in lengths]
        kept[3][2, 0] = np.nan
        extra = [np.full((12, D), 50.0) + rng.normal(size=(12, D)), np.array([[np.nan, 70.0]] * 3)]
    together = Sequences.from_list([*kept, *extra], [*weights, 0.0, 0.0])
    return together, together[: len(kept)]


class Data(LightningDataModule):
    """The same sequences for testing, with states that they are said to be drawn from."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__()
        self.test_sequences = sequences

    def true_states(self, part: str) -> Sequences:
        states = torch.arange(self.test_sequences.num_steps) % 2
        return Sequences(states, self.test_sequences.offsets)

    def test_dataloader(self) -> Any:
        return loader(self.test_sequences, None)


def trained(make: Callable[[], Any], sequences: Sequences, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*rows of .* got no counts")
        return fit(make(), sequences, 3, 0, **options)


def assert_same_state(first: Any, second: Any) -> None:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("make", "kind"), FAMILIES)
def test_in_training(make, kind):
    """Parameters, units, clones, the chosen restart and the logged likelihood; for validation likewise."""
    with_extra, without = pair(kind)
    models = [trained(make, sequences, val_sequences=validation) for sequences in (with_extra, without) for validation in (None, sequences)]
    for one, other in ((models[0], models[2]), (models[1], models[3])):
        assert_same_state(one, other)
        if one.epoch_log_likelihood is not None:
            torch.testing.assert_close(one.epoch_log_likelihood, other.epoch_log_likelihood, rtol=1e-10, atol=0)
        if hasattr(one, "num_free_parameters"):
            assert one.num_free_parameters == other.num_free_parameters


@pytest.mark.parametrize(("make", "kind"), FAMILIES)
def test_in_test_and_criteria(make, kind):
    """Likelihoods, prediction errors, state accuracy, the co-occurrence report, AIC, BIC and expected transitions."""
    with_extra, without = pair(kind)
    model = trained(make, without)
    found = []
    for sequences in (with_extra, without):
        with quiet_lightning(announcements=False), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(is not logged|has probability zero)")
            callbacks = [CooccurrenceReport()] if kind == "symbols" and hasattr(model, "sample") else []
            trainer = Trainer(callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
            (metrics,) = trainer.test(model, datamodule=Data(sequences), verbose=False)
            if hasattr(model, "aic"):
                metrics |= {"aic": model.aic(sequences), "bic": model.bic(sequences)}
                posterior = model.posterior(sequences)
                metrics |= {name: float(value.sum()) for name, value in posterior._asdict().items() if name.endswith("counts")}
        found.append(metrics)
    assert found[0] == pytest.approx(found[1], rel=1e-10)
    assert "test/log_likelihood" in found[0]
    assert ("test/state_accuracy" in found[0]) == hasattr(model, "num_states")


def test_of_clones():
    with_extra, without = pair("symbols")
    model = trained(SYMBOLS["ClonedHMM, frequency"], without)
    assert_same_state(*(model.backed_off(sequences) for sequences in (with_extra, without)))
    assert torch.equal(seen_pairs(with_extra), seen_pairs(without))
    for unique in (False, True):
        assert ngram_counts(with_extra, V, 2, unique=unique).tolist() == ngram_counts(without, V, 2, unique=unique).tolist()
    graphs = [model.state_graph(sequences) for sequences in (with_extra, without)]
    assert graphs[0].edges == graphs[1].edges
    assert [weight for *_, weight in graphs[0].edges(data="weight")] == pytest.approx([weight for *_, weight in graphs[1].edges(data="weight")])


def test_of_n_grams_and_contexts():
    with_extra, without = pair("symbols")
    whole = [Sequences(sequences.values, sequences.offsets, (2 * sequences.weights)) for sequences in (with_extra, without)]
    text = Sequences.from_list([[0, 1, 2, 0, 0, 2], [1, 1]], weights=[1.0, 0.0])
    one, other = (KneserNey(V, 3).fit(sequences) for sequences in whole)
    assert one.step_probs(text).tolist() == other.step_probs(text).tolist()
    assert one.bits_per_symbol(text) == pytest.approx(one.bits_per_symbol(text[:1]), rel=1e-12)
    contexts = [Contexts(sequences, V, 2, min_count=2) for sequences in whole]
    assert contexts[0].strings().tolist() == contexts[1].strings().tolist()
    model = trained(SYMBOLS["ClonedHMM"], without)
    joined = [BackOff([model], sequences, V).joined(lower) for sequences, lower in zip(whole, contexts, strict=True)]
    assert_same_state(*joined)


def test_of_n_grams_with_whole_weights_count_like_repeats():
    lists, weights = [[0, 1, 2, 0], [2, 1, 1], [0, 1]], [1, 3, 2]
    repeated = [sequence for sequence, weight in zip(lists, weights, strict=True) for _ in range(weight)]
    one, other = KneserNey(3, 3).fit(Sequences.from_list(lists, weights)), KneserNey(3, 3).fit(Sequences.from_list(repeated))
    text = Sequences.from_list([[0, 1, 1, 2, 0, 2]])
    assert one.step_probs(text).tolist() == other.step_probs(text).tolist()
    with pytest.raises(ValueError, match=r"whole numbers as weights for n-grams, but sequence 1 has 0\.5"):
        KneserNey(3, 3).fit(Sequences.from_list(lists, [1, 0.5, 1]))
