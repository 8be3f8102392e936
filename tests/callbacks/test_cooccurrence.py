"""What is reported after a test equals what plain loops find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from datamodules import SyntheticDataModule
from lightning_hmm import Sequences, StandardHMM
from lightning_hmm.callbacks import CooccurrenceReport
from lightning_hmm.loading import loader
from tests.helpers import random_symbols

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def frequencies(sequences: Sequences, num_symbols: int) -> np.ndarray:
    counts = np.zeros((num_symbols, num_symbols))
    for first, last in zip(sequences.offsets[:-1].tolist(), sequences.offsets[1:].tolist(), strict=True):
        for row in range(first, last - 1):
            pair = sequences.values[row].item(), sequences.values[row + 1].item()
            if min(pair) >= 0:
                counts[pair] += 1
    return counts / counts.sum()


def long_run_pairs(model) -> np.ndarray:
    shares = torch.linalg.matrix_power(model.transition_probs, 500)[0]
    return (model.emission_probs.T @ torch.diag(shares) @ model.transition_probs @ model.emission_probs).numpy()


def test_deviations_and_likelihoods(rng):
    sequences, model = random_symbols(rng), StandardHMM(3, 5)
    (found,) = Trainer(**QUIET, callbacks=[CooccurrenceReport(seed=5)]).test(model, loader(sequences, None), verbose=False)
    data, drawn = frequencies(sequences, 5), frequencies(model.sample(len(sequences), sequences.lengths.tolist(), seed=5), 5)
    assert found["test/cooccurrence_mad_analytic"] == pytest.approx(np.abs(data - long_run_pairs(model)).mean())
    assert found["test/cooccurrence_mad_sampled"] == pytest.approx(np.abs(data - drawn).mean())
    total = -float(model.score(sequences).sum())
    assert found["test/nll_normalised"] == pytest.approx(total / (len(sequences) * int(sequences.lengths.max())))
    assert found["test/nll_per_symbol"] == pytest.approx(total / float(sequences.num_observed()))


def test_a_known_truth_stands_for_the_test_data():
    data, model = SyntheticDataModule(num_states=3, num_symbols=4, num_sequences=20), StandardHMM(3, 4)
    (found,) = Trainer(**QUIET, callbacks=[CooccurrenceReport()]).test(model, datamodule=data, verbose=False)
    truth = data.emission_probs.T @ torch.diag(data.initial_probs) @ data.transition_probs @ data.emission_probs
    assert found["test/cooccurrence_mad_analytic"] == pytest.approx(np.abs(truth.numpy() - long_run_pairs(model)).mean())


def test_models_of_vectors_are_refused():
    model = StandardHMM(2, emission="gaussian", num_features=1).set_parameters(means=[[0.0], [1.0]], variances=[[1.0], [1.0]])
    with pytest.raises(ValueError, match="for models of symbols"):
        Trainer(**QUIET, callbacks=[CooccurrenceReport()]).test(model, loader(Sequences.from_list([[[0.0], [1.0]]]), None), verbose=False)
