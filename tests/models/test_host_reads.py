"""A whole training step as another device than the CPU runs it.

The host waits for one value per restart, after the E-step. For real vectors it also waits for one per batch, namely
whether values are missing.
"""

from __future__ import annotations

import pytest
import torch

from lightning_hmm import BaumWelch, Sequences, StandardHMM
from lightning_hmm.inference import api, backends, reference
from tests.helpers import random_symbols, random_vectors
from tests.inference.test_reference import HostReads


@pytest.fixture
def reference_calls(monkeypatch):
    """Runs the reference instead of the compiled kernels, without functions that read tensors of the CPU anyway."""
    calls = []

    def e_step(*args, **kwargs):
        calls.append(args)
        return reference.e_step(*args, **kwargs)

    monkeypatch.setattr(backends, "choose", lambda *problem: backends._BACKENDS[-1]._replace(e_step=e_step))
    monkeypatch.setattr(api, "_check", lambda *problem: None)  # reads the offsets, and data on the CPU
    monkeypatch.setattr(StandardHMM, "_chunks", lambda self, batch: [batch])  # reads the offsets
    monkeypatch.setattr(Sequences, "check", lambda self, num_symbols, num_features: None)
    monkeypatch.setattr(
        StandardHMM, "_watch_impossible", lambda self, batch, impossible: self._impossible.append(impossible)
    )
    return calls


@pytest.mark.parametrize("emission", ["categorical", "gaussian"])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_value_per_e_step_is_read_on_the_host(rng, emission, weighted, reference_calls):
    if emission == "categorical":
        sequences, model = random_symbols(rng), StandardHMM(3, 5, restarts=2, transition_pseudocount=1.0)
    else:
        sequences, model = (
            random_vectors(rng),
            StandardHMM(3, emission="gaussian", num_features=2, restarts=2, transition_pseudocount=1.0),
        )
        model.initialize(sequences)
    if weighted:
        sequences = Sequences(sequences.values, sequences.offsets, torch.linspace(0, 1, len(sequences)).double())
    optimizer = BaumWelch(model.distributions, 0.9, data_size=17.0)
    before = model.transition_probs
    if emission == "categorical":
        sequences.symbols(5)  # reads data on the CPU, but none on a GPU
    with HostReads(allowed=2 if emission == "categorical" else 3):
        optimizer.step(counts=model._e_step(sequences))
    assert len(reference_calls) == 2
    assert not torch.equal(model.transition_probs, before)
