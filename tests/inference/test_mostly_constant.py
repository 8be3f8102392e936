"""Mostly constant transitions: the choice between sparse and dense kernels, which must agree, and cancellation.

`test_enumeration`, `test_gradients`, `test_sampling` and `test_cpu` have the guarantees that hold for every operator.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hmm import inference
from lightning_hmm.inference import Rows, Table, cpu
from lightning_hmm.inference.cpu import estep, routes
from lightning_hmm.inference.operators import Dense, MostlyConstant
from lightning_hmm.inference.selection import PairSums, factored_pairs
from tests.inference import oracle
from tests.inference.oracle import KINDS

LENGTHS = [7, 1, 0, 4, 2, 5, 3, 9, 1, 6, 8, 2]  # enough to be worked on side by side


@pytest.mark.parametrize("kind", KINDS)
def test_both_routes_give_the_same(kind, monkeypatch):
    model = oracle.make(kind, 12, LENGTHS, kept=3, low=0.2).with_weights(np.linspace(0, 2, len(LENGTHS)))
    found, paths = [], []
    for full in (True, False):
        monkeypatch.setattr(routes, "prefers_dense", lambda *sizes, full=full, **options: full)
        found.append(inference.e_step(*model.weighted, per_step=True))
        paths.append(inference.viterbi(*model.problem))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-13)
    assert torch.equal(paths[0].states, paths[1].states)


def test_the_full_matrix_is_used_where_it_is_faster(monkeypatch):
    operators = []
    run = estep.e_step
    monkeypatch.setattr(
        estep, "e_step", lambda *given, **options: operators.append(type(given[1])) or run(*given, **options)
    )
    for num_states, kept in ((20, 5), (500, 2)):
        inference.log_likelihood(*oracle.make("table", num_states, [5], kept=kept).problem)
    assert operators == [Dense, MostlyConstant]
    operator = oracle.mostly_constant(np.random.default_rng(0), 200, 16)
    assert cpu.prefers_dense(operator, 1, torch.float32, smooth=True, pairs=True) > cpu.prefers_dense(
        operator, 1, torch.float32, smooth=True
    )


def test_pairs_are_the_expected_transitions():
    model = oracle.make("quadratic", 20, LENGTHS, kept=3, low=0.3).with_weights(np.linspace(0, 2, len(LENGTHS)))
    full = Dense(torch.from_numpy(model.chain[1]))
    (expected,) = inference.e_step(model.initial, full, *model.weighted[2:]).counts
    sums = PairSums(model.operator)
    sums.add(factored_pairs(model.operator, inference.e_step(*model.weighted, per_step=True), model.sequences.offsets))
    torch.testing.assert_close(sums.rows(0, 20), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.usefixtures("backend")
def test_points_out_of_float_range():
    """A step that no state explains in probabilities, only in logarithms; a state that fits but cannot be reached."""
    model = oracle.make("rows", 10, [6, 6, 6, 6, 6], kept=3, zeros=0.4)
    rows = model.evidence.log_likelihoods.clone()
    rows[2] -= 1e5 * torch.arange(10)
    rows[9, 1:] = -3e4
    rows[20] = torch.linspace(0, -5000, 10)
    model = model._replace(evidence=Rows(rows), rows=[rows[6 * n : 6 * n + 6].numpy() for n in range(5)])
    answers = model.answers()
    for dtype, tolerance in (
        (torch.float64, {"rtol": 1e-9, "atol": 1e-13}),
        (torch.float32, {"rtol": 1e-4, "atol": 1e-5}),
    ):
        found = inference.e_step(*model.problem, dtype=dtype)
        np.testing.assert_allclose(
            found.log_likelihood,
            oracle.gathered(answers, "log_likelihood"),
            rtol=1e-5 if dtype == torch.float32 else 1e-10,
        )
        oracle.check_statistics(found, model, answers, np.ones(5), **tolerance)
        torch.testing.assert_close(
            inference.log_likelihood(*model.problem, dtype=dtype), found.log_likelihood, rtol=1e-6, atol=1e-4
        )


@pytest.mark.parametrize("lengths", [[12], [2, 2, 2, 2, 2, 2]], ids=["one", "many"])
@pytest.mark.usefixtures("backend")
def test_nothing_is_lost_where_much_is_subtracted(lengths):
    """Every row gives state 0 almost no probability, but the data require it; the rest must not be rounding error."""
    num_states, tiny = 30, 1e-12
    values, constants = (
        torch.full((num_states, 1), tiny).double(),
        torch.full((num_states,), (1 - tiny) / (num_states - 1)).double(),
    )
    operator = MostlyConstant(torch.zeros(num_states, 1, dtype=torch.int64), values.log(), constants.log())
    rows = torch.zeros(12, num_states).double()
    rows[5:, 0] = 40.0
    initial = torch.full((num_states,), 1 / num_states).double().log()
    given = Rows(rows), torch.tensor([0, *lengths]).cumsum(0)
    expected = inference.e_step(initial, Dense(operator.log_rows(slice(None))), *given)
    found = inference.e_step(initial, operator, *given)
    tolerance = {"rtol": 1e-12, "atol": 0}
    torch.testing.assert_close(found.log_likelihood, expected.log_likelihood, **tolerance)
    for ours, theirs in zip(found.counts, oracle.counts_of(operator, expected.counts[0].numpy()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    torch.testing.assert_close(
        inference.log_likelihood(initial, operator, *given), expected.log_likelihood, **tolerance
    )


@pytest.mark.parametrize("num_sequences", [1, 12])  # alone, and side by side
@pytest.mark.usefixtures("backend")
def test_rare_transitions_that_must_be_used_again_and_again(num_sequences):
    """Each step keeps more than it may lose, but the product of two is below the smallest float64."""
    rare = torch.full((2,), 1e-190, dtype=torch.float64).log()
    operator = MostlyConstant(torch.tensor([[0], [1]]), torch.zeros(2, 1, dtype=torch.float64), rare)
    evidence = Table(torch.eye(2, dtype=torch.float64).log(), torch.tensor([0, 1, 0, 1, 1] * num_sequences))
    found = inference.log_likelihood(
        torch.tensor([0.5, 0.5], dtype=torch.float64).log(), operator, evidence, torch.arange(num_sequences + 1) * 5
    )
    np.testing.assert_allclose(found, np.log(0.5) + 3 * np.log(1e-190), rtol=1e-12)
