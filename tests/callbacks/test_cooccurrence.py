"""What is reported after a test equals what plain loops find."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

import lightning_hmm
from datamodules import SyntheticDataModule
from lightning_hmm import ClonedHMM, Sequences, StandardHMM, fit
from lightning_hmm.callbacks import CooccurrenceReport, cooccurrence
from lightning_hmm.data import loader
from lightning_hmm.models.baselines import RecurrentNet
from tests.helpers import random_symbols

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def frequencies(sequences: Sequences, num_symbols: int) -> np.ndarray:
    counts = np.zeros((num_symbols, num_symbols))
    for n, symbols in enumerate(sequences.tolist()):
        for pair in pairwise(symbols):
            if min(pair) >= 0:
                counts[pair] += 1 if sequences.weights is None else float(sequences.weights[n])
    return counts / counts.sum()


def report(model, sequences: Sequences, batch_size: int | None = None, **options) -> dict[str, float]:
    (found,) = Trainer(**QUIET, callbacks=[CooccurrenceReport(seed=5)], **options).test(
        model, loader(sequences, batch_size), verbose=False
    )
    return found


def long_run_pairs(model) -> np.ndarray:
    shares = torch.linalg.matrix_power(model.transition_probs, 500)[0]
    return (model.emission_probs.T @ torch.diag(shares) @ model.transition_probs @ model.emission_probs).numpy()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_deviations_and_likelihoods(rng, weighted, batch_size):
    sequences, model = random_symbols(rng), StandardHMM(3, 5)
    weights = (
        torch.from_numpy(rng.integers(0, 4, len(sequences)) / 2) if weighted else torch.ones(len(sequences)).double()
    )
    weights[sequences.lengths.argmax()] = 0 if weighted else 1
    if weighted:
        sequences = Sequences(sequences.values, sequences.offsets, weights)
    found = report(model, sequences, batch_size)
    shapes = sorted(
        (length, weight) for length, weight in zip(sequences.lengths.tolist(), weights.tolist(), strict=True) if weight
    )
    drawn = model.sample(len(shapes), [length for length, _ in shapes], seed=5)
    drawn = Sequences(drawn.values, drawn.offsets, torch.tensor([weight for _, weight in shapes]))
    data = frequencies(sequences, 5)
    assert found["test/cooccurrence_mad_analytic"] == pytest.approx(np.abs(data - long_run_pairs(model)).mean())
    assert found["test/cooccurrence_mad_sampled"] == pytest.approx(np.abs(data - frequencies(drawn, 5)).mean())
    total = -float(model.score(sequences) @ weights)
    assert found["test/nll_normalised"] == pytest.approx(total / (float(weights.sum()) * shapes[-1][0]))
    assert found["test/nll_per_symbol"] == pytest.approx(total / float(sequences.num_observed()))


def test_many_sequences_are_drawn_in_parts(rng, monkeypatch):
    """The parts have seeds of their own; all sequences are drawn."""
    sequences, model = random_symbols(rng), StandardHMM(3, 5)
    monkeypatch.setattr(cooccurrence, "_MOST_STEPS", 40)
    seeds, lengths = [], []

    def sample(num_sequences: int, length: list[int], seed: int) -> Sequences:
        seeds.append(seed)
        lengths.extend(length)
        assert sum(length) <= 40 + max(length)
        return StandardHMM.sample(model, num_sequences, length, seed)

    monkeypatch.setattr(model, "sample", sample)
    report(model, sequences)
    assert seeds == list(range(5, 5 + len(seeds)))
    assert len(seeds) > 3
    assert lengths == sorted(sequences.lengths.tolist())


def test_the_long_run_depends_on_the_start_where_parts_of_the_chain_never_meet(rng):
    """With two closed classes, the stationary distribution is not unique, but the fractions of time are."""
    parameters = {
        "initial": [0.2, 0.3, 0.0, 0.5],
        "transition": [[0.9, 0.1, 0, 0], [0.3, 0.7, 0, 0], [0, 0, 1, 0], [0.1, 0.1, 0.6, 0.2]],
        "emission": [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.05, 0.05, 0.9], [0.4, 0.3, 0.3]],
    }
    model = StandardHMM(4, 3).set_parameters(**parameters)
    initial, transition, emission = (np.array(parameters[name]) for name in ("initial", "transition", "emission"))
    later = initial @ np.linalg.matrix_power(transition, 1000)
    assert 0.5 < later[:2].sum() < 0.7
    pairs = emission.T @ np.diag(later) @ transition @ emission
    sequences = random_symbols(rng, num_symbols=3)
    assert report(model, sequences)["test/cooccurrence_mad_analytic"] == pytest.approx(
        np.abs(frequencies(sequences, 3) - pairs).mean()
    )


def test_a_cloned_hmm_has_the_report_too(rng):
    sequences, model = random_symbols(rng), ClonedHMM(num_states=11, num_symbols=5, pairs="all")
    shares = torch.linalg.matrix_power(model.transition_probs, 500)[0].numpy()
    pairs = np.zeros((5, 5))
    symbols, transition = model.layout.symbols.tolist(), model.transition_probs.numpy()
    for i, j in product(range(11), repeat=2):
        pairs[symbols[i], symbols[j]] += shares[i] * transition[i, j]
    assert report(model, sequences)["test/cooccurrence_mad_analytic"] == pytest.approx(
        np.abs(frequencies(sequences, 5) - pairs).mean()
    )


def test_without_a_long_run_the_rest_is_reported(monkeypatch):
    sequences = Sequences.from_list([[0, 1, 2], [1, 0, 1, 2]])  # nothing follows 2
    model = ClonedHMM(num_states=5, num_symbols=3)
    model.initialize(sequences)
    with (
        pytest.warns(UserWarning, match="mad_analytic` is not logged: the chain reaches states without transitions"),
        pytest.warns(UserWarning, match="mad_sampled` is not logged: The chain must be able to go on"),
    ):
        found = report(model, sequences)
    assert not any("mad" in name for name in found)
    assert np.isfinite(found["test/nll_normalised"])
    model = ClonedHMM(num_states=11, num_symbols=3, pairs="all")
    monkeypatch.setattr(lightning_hmm.distributions.transitions.clones, "MOST_SHOWN", 10)
    with pytest.warns(UserWarning, match="too many states for a transition matrix"):
        found = report(model, sequences)
    assert "test/cooccurrence_mad_analytic" not in found
    assert np.isfinite(found["test/cooccurrence_mad_sampled"])


def test_a_known_truth_stands_for_the_test_data():
    data, model = SyntheticDataModule(num_states=3, num_symbols=4, num_sequences=20), StandardHMM(3, 4)
    (found,) = Trainer(**QUIET, callbacks=[CooccurrenceReport()]).test(model, datamodule=data, verbose=False)
    truth = data.emission_probs.T @ torch.diag(data.initial_probs) @ data.transition_probs @ data.emission_probs
    assert found["test/cooccurrence_mad_analytic"] == pytest.approx(
        np.abs(truth.numpy() - long_run_pairs(model)).mean()
    )


def test_models_of_vectors_are_refused():
    model = StandardHMM(2, emission="gaussian", num_features=1).set_parameters(
        emission={"mean": [[0.0], [1.0]], "variance": [[1.0], [1.0]]}
    )
    with pytest.raises(ValueError, match="for models of symbols"):
        Trainer(**QUIET, callbacks=[CooccurrenceReport()]).test(
            model, loader(Sequences.from_list([[[0.0], [1.0]]]), None), verbose=False
        )


def test_models_that_cannot_be_sampled_are_refused_before_training():
    sequences = Sequences.from_list([[0, 1, 0]])
    with pytest.raises(ValueError, match="the RecurrentNet has no `sample`"):
        fit(RecurrentNet(4, num_symbols=2), sequences, 1, callbacks=[CooccurrenceReport()])
