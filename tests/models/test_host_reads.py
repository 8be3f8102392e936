"""A whole training step as another device than the CPU runs it: the host waits for one value per restart, after the E-step."""

from __future__ import annotations

import pytest
import torch

from lightning_hmm import BaumWelch, Sequences, StandardHMM
from lightning_hmm.inference import dense, reference
from tests.helpers import random_symbols, random_vectors
from tests.inference.test_twin import HostReads


@pytest.fixture
def reference_calls(monkeypatch):
    """The reference in place of the compiled kernels, and checks of the CPU switched off; counts its calls."""
    calls = []
    e_step = reference.e_step
    monkeypatch.setattr(reference, "e_step", lambda *args, **kwargs: calls.append(args) or e_step(*args, **kwargs))
    monkeypatch.setattr(Sequences, "check", lambda self, num_symbols, num_features: None)
    monkeypatch.setattr(StandardHMM, "_watch_impossible", lambda self, batch, impossible: self._impossible.append(impossible))
    with dense._e_step_op.set_kernel_enabled("cpu", enabled=False):
        yield calls


@pytest.mark.parametrize("emission", ["categorical", "gaussian"])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_value_per_e_step_is_read_on_the_host(rng, emission, weighted, reference_calls):
    if emission == "categorical":
        sequences, model = random_symbols(rng), StandardHMM(3, 5, restarts=2)
    else:
        sequences, model = random_vectors(rng), StandardHMM(3, emission="gaussian", num_features=2, restarts=2)
        model.initialise(sequences)
    if weighted:
        sequences = Sequences(sequences.values, sequences.offsets, torch.linspace(0, 1, len(sequences)).double())
    optimizer = BaumWelch(model.distributions, 0.9, {"transition": {"pseudocount": 1.0}}, data_size=17.0)
    before = model.transition_probs
    with HostReads(allowed=2):
        (-model.total_log_likelihood(sequences).sum()).backward()
        optimizer.step()
    assert len(reference_calls) == 2
    assert not torch.equal(model.transition_probs, before)
