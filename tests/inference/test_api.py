"""The functions of `inference`: gradients, backends, operators without kernels, sampling, prediction and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hmm import inference
from lightning_hmm.inference import Quadratic, Rows, Table, backends
from lightning_hmm.inference.operators import Dense, Duration, MostlyConstant, TimeVarying

OFFSETS = torch.tensor([0, 5, 5, 6, 12])
K, V = 4, 3


def rows(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1)


def problem(kind: str, evidence: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    initial = rows(K, generator=generator)
    matrix = rows(K, K, generator=generator)
    index = torch.randint(0, 3, (12,), generator=generator)
    kept = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3]])
    values = matrix.exp().gather(1, kept) * 0.9
    operator = {
        "dense": lambda: Dense(matrix),
        "mostly constant": lambda: MostlyConstant(kept, values.log(), ((1 - values.sum(1)) / (K - 2)).log()),
        "time-varying": lambda: TimeVarying(rows(3, K, K, generator=generator), index),
        "duration": lambda: Duration(
            torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64).log(), rows(2, 2, generator=generator)
        ),
    }[kind]()
    symbols = torch.randint(0, V + 1, (12,), generator=generator).to(torch.uint8)
    columns = torch.cat(
        [torch.randn(12, 2, generator=generator, dtype=torch.float64), torch.ones(12, 1, dtype=torch.float64)], 1
    )
    seen = {
        "table": lambda: Table(rows(K, V, generator=generator), symbols),
        "quadratic": lambda: Quadratic(
            columns, torch.tensor([[0, 2], [0, 1], [2, 2]]), torch.randn(K, 3, generator=generator, dtype=torch.float64)
        ),
        "rows": lambda: Rows(torch.randn(12, K, generator=generator, dtype=torch.float64)),
    }[evidence]()
    return initial, operator, seen, OFFSETS


def enumerated(initial, operator, evidence, offsets):
    """log p(y) of each sequence by summing over all paths."""
    found = []
    log_rows = evidence.rows()
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        total = initial.new_zeros(1, K) + initial
        if first == last:
            found.append(torch.logsumexp(initial, 0))
            continue
        scores = initial + log_rows[first]
        for t in range(first + 1, last):
            matrix = operator.to_dense(torch.tensor([t])).reshape(K, K)
            scores = (
                (scores[..., None] + matrix + log_rows[t]).flatten(0, -2)
                if scores.dim() > 1
                else scores[:, None] + matrix + log_rows[t]
            )
        found.append(torch.logsumexp(scores.flatten(), 0))
        del total
    return torch.stack(found)


OPERATORS = ("dense", "mostly constant", "time-varying", "duration")
FORMS = ("table", "quadratic", "rows")


@pytest.mark.parametrize("evidence", FORMS)
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("backend", ["", "reference"])
def test_log_likelihoods_are_sums_over_paths(monkeypatch, kind, evidence, backend):
    monkeypatch.setenv(backends.VARIABLE, backend)
    given = problem(kind, evidence)
    torch.testing.assert_close(inference.log_likelihood(*given), enumerated(*given), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("evidence", FORMS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_the_gradient_is_that_of_the_sum_over_paths(kind, evidence):
    """Weighted unequally, so that the backward pass runs an E-step of its own."""
    weights = torch.tensor([0.5, 1.0, -2.0, 3.0], dtype=torch.float64)
    results = []
    for function in (lambda *given: inference.log_likelihood(*given), enumerated):
        initial, operator, seen, offsets = problem(kind, evidence)
        leaves = [value.detach().clone().requires_grad_() for value in (initial, seen.live, *operator.natural)]
        total = function(leaves[0], operator.with_natural(tuple(leaves[2:])), seen.with_live(leaves[1]), offsets)
        (total[[0, 2, 3]] * weights[[0, 2, 3]]).sum().backward()
        results.append([torch.nan_to_num(leaf.grad, nan=0.0) for leaf in leaves])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", OPERATORS)
def test_samples_follow_the_posterior(kind):
    initial, operator, seen, _ = problem(kind, "table", seed=2)
    seen, offsets, draws = seen.at(torch.arange(3).repeat(4000)), torch.arange(4001) * 3, 4000
    if isinstance(operator, TimeVarying):
        operator = TimeVarying(operator.log_probs, operator.index[:3].repeat(draws))
    path = inference.sample_posterior(initial, operator, seen, offsets, torch.Generator().manual_seed(0)).reshape(
        draws, 3
    )
    smoothed = inference.posterior(initial, operator, seen, offsets).smoothed[:3]
    shares = torch.stack([torch.bincount(path[:, t], minlength=K) for t in range(3)]).double() / draws
    assert float((shares - smoothed).abs().max()) < 0.04
    states, _ = inference.sample(initial, operator, torch.full((draws,), 3), torch.Generator().manual_seed(1))
    free = Rows(torch.zeros(3 * draws, K, dtype=torch.float64))
    prior = inference.posterior(initial, operator, free, offsets).smoothed[:3]
    shares = (
        torch.stack([torch.bincount(states.reshape(draws, 3)[:, t], minlength=K) for t in range(3)]).double() / draws
    )
    assert float((shares - prior).abs().max()) < 0.04


@pytest.mark.parametrize("kind", OPERATORS)
def test_viterbi_finds_the_best_path(kind):
    initial, operator, seen, offsets = problem(kind, "quadratic", seed=5)
    path = inference.viterbi(initial, operator, seen, offsets)
    log_rows = seen.rows()
    for n, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        best, states = -np.inf, ()
        for candidate in np.ndindex(*[K] * (last - first)):
            if last == first:
                continue
            score = initial[candidate[0]] + log_rows[first, candidate[0]]
            for t in range(1, last - first):
                matrix = operator.to_dense(torch.tensor([first + t])).reshape(K, K)
                score = score + matrix[candidate[t - 1], candidate[t]] + log_rows[first + t, candidate[t]]
            if float(score) > best:
                best, states = float(score), candidate
        if last > first:
            assert float(path.log_probability[n]) == pytest.approx(best, abs=1e-9)
            assert path.states[first:last].tolist() == list(states)


def test_predictions_are_those_of_a_longer_sequence_without_observations():
    initial, operator, seen, offsets = problem("dense", "table")
    found = inference.predict(initial, operator, seen, offsets, steps=2)
    for n, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        longer = Rows(torch.cat([seen.rows()[first:last], torch.zeros(2, K, dtype=torch.float64)]))
        smoothed = inference.posterior(initial, operator, longer, torch.tensor([0, last - first + 2])).filtered
        torch.testing.assert_close(found[n], smoothed[-1], rtol=1e-10, atol=1e-12)


def test_explain_names_the_backend_and_the_reason(monkeypatch):
    initial, operator, seen, _ = problem("dense", "table")
    assert "Dense with Table on cpu runs on the backend 'cpu'" in inference.explain(operator, seen)
    meta = inference.explain(operator, seen, "meta")
    assert "runs on the backend 'reference'" in meta
    assert "'cpu': It runs on the CPU, but the parameters are on meta." in meta
    monkeypatch.setenv(backends.VARIABLE, "reference")
    assert f"The environment variable {backends.VARIABLE} forces it." in inference.explain(operator, seen)
    monkeypatch.setenv(backends.VARIABLE, "abacus")
    with pytest.raises(ValueError, match=r"`LIGHTNING_HMM_BACKEND` must be one of .*, but is 'abacus'"):
        inference.explain(operator, seen)
    monkeypatch.setenv(backends.VARIABLE, "clones")
    with pytest.raises(
        ValueError,
        match=r"is 'clones', but that backend cannot run Dense with Table on cpu\. It runs transitions between clones",
    ):
        inference.e_step(initial, operator, seen, OFFSETS)


def test_parts_that_do_not_fit_are_named():
    initial, operator, seen, offsets = problem("dense", "table")
    with pytest.raises(ValueError, match="`operator` must have the 3 states of `initial`, but Dense has 4"):
        inference.e_step(initial[:3], operator, seen, offsets)
    with pytest.raises(ValueError, match="`evidence` must be for the 4 states of `initial`, but Rows is for 2"):
        inference.e_step(initial, operator, Rows(torch.zeros(12, 2, dtype=torch.float64)), offsets)
    with pytest.raises(ValueError, match="`evidence` must have 12 steps, the last of `offsets`, but has 5"):
        inference.e_step(initial, operator, seen.at(torch.arange(5)), offsets)
    wrong = torch.zeros(12, 4, dtype=torch.float64)
    wrong[2, 1] = torch.nan
    with pytest.raises(ValueError, match="state 1 at position 2 of sequence 0 is not"):
        inference.e_step(initial, operator, Rows(wrong), offsets)
