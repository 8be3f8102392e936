"""Two processes (gloo) against one: the same model, with 17 sequences that do not divide by two."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_hmm import Sequences, StandardHMM, fit
from tests.helpers import assert_same_parameters, random_symbols, random_vectors

PRIORS = {"initial_pseudocount": 0.3, "transition_pseudocount": 0.5}
GAUSSIAN = {"num_states": 2, "emission": "gaussian", "num_features": 2, "variance_prior": 0.1}
CATEGORICAL = {"num_states": 3, "num_symbols": 5, "emission_pseudocount": 0.1}


def fit_both(options: dict, sequences: Sequences, **how) -> tuple[StandardHMM, StandardHMM]:
    # Spawned, since threads of compiled kernels do not survive a fork; the timeout turns a hang into a failure.
    strategy = DDPStrategy(start_method="spawn", timeout=timedelta(seconds=60), process_group_backend="gloo")
    one = fit(StandardHMM(**options, **PRIORS), sequences, 4, 0, **how)
    two = fit(StandardHMM(**options, **PRIORS), sequences, 4, 0, strategy=strategy, devices=2, accelerator="cpu", **how)
    return one, two


@pytest.mark.parametrize(
    ("options", "how"),
    [
        (CATEGORICAL | {"restarts": 2}, {"batch_size": 4}),
        (GAUSSIAN, {"batch_size": None}),
        (CATEGORICAL | {"discount": 0.8}, {"batch_size": 4, "shuffle": True}),
        (CATEGORICAL | {"discount": 0.8, "sequences_per_update": 3}, {"batch_size": 8}),
    ],
    ids=["batch EM, restarts", "batch EM, Gaussian", "online EM", "online EM, many updates a batch"],
)
def test_two_ranks_equal_one(rng, options, how):
    sequences = random_vectors(rng) if options.get("emission") == "gaussian" else random_symbols(rng)
    one, two = fit_both(options, sequences, **how)
    assert_same_parameters(one, two)
    start = StandardHMM(**options)
    assert (one.transition_probs - start.transition_probs).abs().max() > 1e-2  # it learned


def test_an_empty_rank_and_sequences_of_length_one():
    one, two = fit_both(CATEGORICAL | {"frozen": ["transition"]}, Sequences.from_list([[0], [3], [4]]), batch_size=1)
    assert_same_parameters(one, two)
    assert torch.isfinite(two.initial_probs).all()
