"""Selection of the entries to keep, against an enumeration of all sets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lightning_hmm import inference
from lightning_hmm.inference import selection
from lightning_hmm.inference.operators import Dense, MostlyConstant
from lightning_hmm.inference.results import EStep
from lightning_hmm.inference.selection import Pairs, PairSums, choose, factored_pairs
from tests.inference import oracle
from tests.inference.oracle import mostly_constant


def row_q(row: np.ndarray, kept: tuple[int, ...]) -> float:
    """The row's part of Q after the M-step for a set: sum of S log A."""
    others = [j for j in range(len(row)) if j not in kept]
    probs = row / row.sum()
    rest = probs[others].sum() / len(others)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(
            np.nansum(row[list(kept)] * np.log(probs[list(kept)]))
            + (row[others].sum() * np.log(rest) if rest > 0 else 0.0)
        )


def random_rows(seed: int, size: int = 7) -> torch.Tensor:
    """Rows of all shapes: even, spread over magnitudes, with zeros, with equal entries, rising like 1..N."""
    rng = np.random.default_rng(seed)
    rows = [
        rng.random(size),
        np.exp(rng.normal(0, 4, size)),
        rng.random(size) * (rng.random(size) < 0.6),
        rng.integers(1, 3, size).astype(float),
    ]
    return torch.from_numpy(
        np.stack([*rows, np.arange(1.0, size + 1), rng.gamma(0.3, size=size), rng.random(size) * 1e-9])[:size]
    )


def all_pairs(counts: torch.Tensor) -> Pairs:
    return Pairs(torch.zeros(0, 0), torch.zeros(0, 0), counts)


def sums_of(operator: MostlyConstant, pairs: Pairs) -> PairSums:
    sums = PairSums(operator)
    sums.add(pairs)
    return sums


def factored(model: oracle.Model, dtype: torch.dtype | None = None) -> tuple[EStep, Pairs]:
    """The E-step and the pairs, not multiplied out."""
    found = inference.e_step(*model.problem, dtype=dtype, per_step=True)
    return found, factored_pairs(model.operator, found, model.sequences.offsets)


@pytest.fixture(params=["compiled", "portable"])
def device_of_choice(request, monkeypatch):
    if request.param == "portable":
        monkeypatch.setattr(selection, "_choose_compiled", selection._choose_portable)


@pytest.mark.parametrize("num_kept", [1, 3, 5, 6])
@pytest.mark.parametrize("seed", range(12))
def test_window_is_the_best_of_all_sets(seed, num_kept, device_of_choice):
    counts, operator = random_rows(seed), mostly_constant(np.random.default_rng(seed), 7, num_kept)
    choice = choose(sums_of(operator, all_pairs(counts)), "window")
    for i, row in enumerate(counts.numpy()):
        if row.sum() == 0:
            continue
        best = max(row_q(row, kept) for kept in itertools.combinations(range(7), num_kept))
        assert row_q(row, tuple(choice.indices[i].tolist())) == pytest.approx(best, rel=1e-10)
    assert torch.equal(choice.kept, counts.gather(1, choice.indices))
    torch.testing.assert_close(choice.kept.sum(1) + choice.rest, counts.sum(1))
    assert torch.equal(choice.log_values, operator.log_rows(slice(None)).gather(1, choice.indices))
    assert (choice.indices.diff(dim=1) > 0).all()


@pytest.mark.parametrize("num_kept", [1, 3, 6])
@pytest.mark.parametrize("seed", range(12))
def test_largest_is_the_largest_or_what_was_there(seed, num_kept, device_of_choice):
    counts, operator = random_rows(seed), mostly_constant(np.random.default_rng(seed), 7, num_kept)
    choice = choose(sums_of(operator, all_pairs(counts)), "largest")
    for i, row in enumerate(counts.numpy()):
        largest, old = sorted(np.argsort(-row, kind="stable")[:num_kept].tolist()), operator.indices[i].tolist()
        if row.sum() == 0 or row_q(row, tuple(largest)) <= row_q(row, tuple(old)) + 1e-12 * row.sum():
            largest = old
        assert choice.indices[i].tolist() == largest
        assert int(choice.changes[i]) == len(set(largest) - set(old))


def test_a_row_of_one_to_twenty_keeps_its_five_smallest():
    operator = mostly_constant(np.random.default_rng(0), 20, 5)
    choice = choose(sums_of(operator, all_pairs(torch.arange(1.0, 21).double().repeat(20, 1))), "window")
    assert choice.indices.tolist() == [[0, 1, 2, 3, 4]] * 20


def test_priors_count(device_of_choice):
    """A pseudocount is added to every entry; with a large one nothing is gained by any set."""
    counts, operator = random_rows(3), mostly_constant(np.random.default_rng(3), 7, 3)
    with_prior, by_hand = (
        choose(sums_of(operator, all_pairs(counts)), "window", 0.7),
        choose(sums_of(operator, all_pairs(counts + 0.7)), "window"),
    )
    assert torch.equal(with_prior.indices, by_hand.indices)
    assert torch.equal(with_prior.kept, counts.gather(1, with_prior.indices))


def test_batches_add_up_and_fold_into_a_matrix_when_that_is_smaller():
    model = oracle.make("table", 16, [6, 9, 4, 5, 7, 8], kept=3)
    whole = sums_of(model.operator, factored(model)[1])
    parts, held = PairSums(model.operator), []
    for batch in model.sequences.split(1):
        part = model._replace(evidence=model.evidence._replace(symbols=batch.symbols(4)), sequences=batch)
        if len(held) == 3:  # the counts of the full matrix may come as well
            full = model.initial, Dense(model.operator.log_rows(slice(None))), part.evidence, batch.offsets
            parts.add(all_pairs(inference.e_step(*full).counts[0]))
        else:
            parts.add(factored(part)[1])
        held.append((len(parts.factors), parts.counts is not None))
    assert whole.counts is None
    assert held[0] == (1, False)
    assert held[-1] == (0, True)
    torch.testing.assert_close(parts.rows(0, 16), whole.rows(0, 16), rtol=1e-10, atol=1e-13)
    assert torch.equal(choose(parts, "window").indices, choose(whole, "window").indices)


def test_sums_over_ranks_are_asked_for_block_by_block(monkeypatch):
    monkeypatch.setattr(selection, "_BLOCK_ENTRIES", 14)
    counts, operator = random_rows(4), mostly_constant(np.random.default_rng(4), 7, 2)
    shapes = []

    def total(tensor):
        shapes.append(tuple(tensor.shape))
        return 2 * tensor

    choice = choose(sums_of(operator, all_pairs(counts)), "window", 0.0, total)
    assert shapes == [(2, 7), (2, 7), (2, 7), (1, 7)]
    torch.testing.assert_close(choice.kept, 2 * counts.gather(1, choice.indices))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_threads_change_no_bit(dtype):
    model = oracle.make("quadratic", 200, [150, 30, 70], kept=5)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found, pairs = factored(model, dtype)
            sums = sums_of(model.operator, pairs)
            parts = [*pairs, *found[:3], *found.counts, found.evidence, sums.rows(0, 200)]
            results.append([*parts, *choose(sums, "window")])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bad_arguments_are_named():
    operator = mostly_constant(np.random.default_rng(0), 4, 2)
    with pytest.raises(ValueError, match="`criterion` must be largest or window, but is 'best'"):
        choose(sums_of(operator, all_pairs(torch.ones(4, 4).double())), "best")
