"""Lazy selection against the selection from all pairs of states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.dmc.lazy import LazyDMCHMM, choose_lazily
from lightning_hmm import DMCHMM, fit, inference
from lightning_hmm.inference.selection import PairSums, choose, factored_pairs
from tests.helpers import assert_same_parameters, random_symbols, random_vectors
from tests.inference import oracle


def factored(model, dtype=None):
    """Returns the E-step and the pairs in factored form."""
    found = inference.e_step(*model.problem, dtype=dtype, per_step=True)
    return found, factored_pairs(model.operator, found, model.sequences.offsets)


@pytest.mark.parametrize(("num_states", "num_kept"), [(30, 4), (64, 1), (20, 18)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bound_terms", [None, 1, 3, 68])
def test_selects_the_same_entries(num_states, num_kept, dtype, bound_terms):
    """On ragged sequences, and with fewer exact sums than there are entries."""
    model = oracle.make("quadratic", num_states, [40, 1, 9, 0, 19], kept=num_kept, seed=num_kept)
    assert model.sequences.num_steps == 69
    found, pairs = factored(model, dtype)
    sums = PairSums(model.operator)
    sums.add(pairs)
    for pseudocount in (0.0, 0.1):
        expected = choose(sums, "largest", pseudocount)
        lazy, exact = choose_lazily(pairs.alpha, pairs.kappa, model.operator, *found.counts, bound_terms, pseudocount)
        assert torch.equal(lazy.indices, expected.indices)
        assert torch.equal(lazy.changes, expected.changes)
        assert int(expected.changes.sum()) > 0 or num_kept == 18
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
        for ours, theirs in zip(lazy[1:4], expected[1:4], strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)
        assert (exact >= num_kept).all()
        assert (exact <= num_states).all()
    if bound_terms == 68 and num_kept == 4:  # Nearly all terms are in the bound.
        assert exact.double().mean() < num_states / 2


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_trains_the_same_model(rng, kind):
    """In one batch and in several, as with the sums of all pairs."""
    sequences = random_symbols(rng) if kind == "categorical" else random_vectors(rng)
    options = {"num_symbols": 5} if kind == "categorical" else {"emission": "gaussian", "num_features": 2}
    options |= {"criterion": "largest", "transition_pseudocount": 0.1, "restarts": 2}
    whole, parts = (
        fit(LazyDMCHMM(9, 3, **options), sequences, 6, 0, batch_size=size, shuffle=size is not None)
        for size in (None, 4)
    )
    expected = fit(DMCHMM(9, 3, **options), sequences, 6, 0)
    for model in (parts, expected):
        assert torch.equal(whole.transition.indices, model.transition.indices)
        assert_same_parameters(whole, model)
    assert not torch.equal(whole.indices, LazyDMCHMM(9, 3, **options).indices)  # Entries were selected.
    assert 3 <= float(whole.trainer.callback_metrics["train/dot_products"]) <= 9


def test_threads_change_no_bit():
    model = oracle.make("quadratic", 200, [150, 30, 70], kept=5)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found, pairs = factored(model)
            choice, exact = choose_lazily(pairs.alpha, pairs.kappa, model.operator, *found.counts)
            results.append([*choice, exact])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bad_arguments_are_named(rng):
    operator, rows = oracle.mostly_constant(np.random.default_rng(0), 4, 2), torch.rand(11, 4).double()
    for bad in (0, 11, -3):
        message = f"`bound_terms` must be from 1 to 10, the transitions in the data, but is {bad}"
        with pytest.raises(ValueError, match=message):
            choose_lazily(rows, rows, operator, torch.ones(4, 2), torch.ones(4), bad)
    with pytest.raises(ValueError, match="`criterion` must be largest for lazy selection, but is window"):
        fit(LazyDMCHMM(5, 1, 3), [rng.integers(0, 3, 10)], 1)
    model = LazyDMCHMM(5, 1, 3, criterion="largest")
    model.bound_terms = 50
    with pytest.raises(ValueError, match="`bound_terms` must be from 1 to 9, the transitions in the data, but is 50"):
        fit(model, [rng.integers(0, 3, 10)], 1)
