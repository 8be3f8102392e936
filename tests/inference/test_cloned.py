"""The cloned HMM against enumeration, against inference with the full matrix, and the kernels against plain torch."""

from __future__ import annotations

from itertools import chain, permutations, product

import numpy as np
import pytest
import torch

from lightning_hmm import inference
from lightning_hmm.inference import Rows, cloned, cloned_portable
from lightning_hmm.inference.cloned import Blocks, ClonedSymbols, Layout
from lightning_hmm.inference.cpu.clones import plan, run, two_filters
from lightning_hmm.inference.operators import Dense
from lightning_hmm.sequences import Sequences
from tests.inference.oracle import Answer, enumerate_next, enumerate_paths, log_space, path_score

KINDS = ("symbols", "missing", "evidence")
LAYOUTS = ("full", "pairs", "sparse")


def problem(initial: torch.Tensor, probs: torch.Tensor, layout: Layout, sequences: Sequences) -> tuple:
    """The arguments of `inference`."""
    return initial, Blocks(probs, layout), ClonedSymbols.of(sequences, layout), sequences.offsets


class Case:
    """A random model with 1, 2 or more clones a symbol, and ragged data for it, of lengths 0 and 1 too."""

    def __init__(
        self,
        kind: str,
        stored: str,
        clones: list[int],
        lengths: list[int],
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        rng = np.random.default_rng(seed)
        num_symbols, num_states = len(clones), sum(clones)
        pairs = None
        if stored != "full":
            pairs = [
                (u, v)
                for u in range(num_symbols)
                for v in range(num_symbols)
                if v == (u + 1) % num_symbols or rng.random() < 0.7
            ]
        self.layout = Layout(clones, pairs)
        if stored == "sparse":
            rows, columns = self.layout.states_of()
            ring = self.layout.symbols[columns] == (self.layout.symbols[rows] + 1) % num_symbols
            self.layout = self.layout.pruned(ring | torch.from_numpy(rng.random(self.layout.num_entries) < 0.6))
        weights = torch.from_numpy(rng.gamma(0.5, size=self.layout.num_entries) + 1e-3)
        matrix = self.layout.expand(weights)
        self.matrix = matrix / matrix.sum(1, keepdim=True)
        self.transition = self.layout.collect(self.matrix).to(dtype)
        self.initial = torch.from_numpy(rng.dirichlet(np.ones(num_states))).log()
        steps = sum(lengths)
        symbols = torch.from_numpy(rng.integers(0, num_symbols, steps))
        if kind == "missing":
            symbols[torch.from_numpy(rng.random(steps) < 0.3)] = -1
        self.evidence = None
        self.sequences = Sequences.from_lengths(symbols, lengths)
        rows = np.where(symbols.numpy()[:, None] < 0, 1.0, symbols.numpy()[:, None] == self.layout.symbols.numpy())
        if kind == "evidence":
            table = rng.dirichlet(np.full(num_symbols, 0.5), steps)
            table[rng.random(table.shape) < 0.3] = 0
            table[np.arange(steps), rng.integers(0, num_symbols, steps)] += 0.1
            table /= table.sum(1, keepdims=True)
            table[rng.random(steps) < 0.2] = np.nan
            self.evidence = torch.from_numpy(table)
            self.sequences = Sequences.from_lengths(self.evidence, lengths)
            rows = np.nan_to_num(table, nan=1.0)[:, self.layout.symbols.numpy()]
        with np.errstate(divide="ignore"):
            self.rows = np.split(np.log(rows), np.cumsum(lengths)[:-1])
            self.log_matrix = np.log(self.matrix.numpy())

    @property
    def problem(self) -> tuple:
        return problem(self.initial, self.transition, self.layout, self.sequences)

    def answers(self, method=enumerate_paths) -> list[Answer]:
        return [method(self.initial.numpy(), self.log_matrix, rows) for rows in self.rows]


def check_against(case: Case, answers: list[Answer], rtol: float = 1e-10, atol: float = 1e-12) -> None:
    found = inference.posterior(*case.problem)
    scores = np.array([answer.log_likelihood for answer in answers])
    np.testing.assert_allclose(found.log_likelihood, scores, rtol=rtol, atol=atol)
    np.testing.assert_allclose(inference.log_likelihood(*case.problem), scores, rtol=rtol, atol=atol)
    for name in ("filtered", "smoothed"):
        np.testing.assert_allclose(
            getattr(found, name),
            np.concatenate([getattr(answer, name) for answer in answers]),
            rtol=1e3 * rtol,
            atol=1e2 * atol,
        )
    pairs = sum(answer.pairs for answer in answers)
    np.testing.assert_allclose(case.layout.expand(found.counts[0]), pairs, rtol=1e3 * rtol, atol=1e2 * atol)
    starts = sum(answer.smoothed[0] for answer in answers if len(answer.smoothed))
    np.testing.assert_allclose(inference.e_step(*case.problem).initial, starts, rtol=1e3 * rtol, atol=1e2 * atol)


@pytest.mark.parametrize("stored", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_enumeration(kind, stored):
    for seed in range(3):
        case = Case(kind, stored, [2, 1, 2], [4, 0, 1, 2], seed)
        answers = case.answers()
        check_against(case, answers)
        path = inference.viterbi(*case.problem)
        states = case.sequences.with_values(path.states)
        for n, answer in enumerate(answers):
            assert states[n].tolist() == answer.path.tolist()
            np.testing.assert_allclose(path.log_probability[n], answer.score, rtol=1e-10)
        for steps in (1, 2):
            predicted = inference.predict(*case.problem, steps=steps)
            torch.testing.assert_close(
                inference.predict(*case.problem, steps=steps), predicted, rtol=1e-10, atol=1e-14, equal_nan=True
            )
            for found, rows, answer in zip(predicted, case.rows, answers, strict=True):
                if answer.log_likelihood > -np.inf:
                    np.testing.assert_allclose(
                        found,
                        enumerate_next(case.initial.numpy(), case.log_matrix, rows, steps),
                        rtol=1e-10,
                        atol=1e-15,
                    )
                else:
                    assert bool(found.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", LAYOUTS)
def test_many_clones_equal_the_recursion_in_logarithms(kind, stored, dtype):
    """Groups of every size, rows of every rest of the vector width, and more sequences than a group holds."""
    case = Case(kind, stored, [21, 1, 33, 8, 16, 5], [40, 39, 39, 1, 25, 40, 12, 0, 7, 3, 38], 1, dtype)
    case.log_matrix = np.log(np.maximum(case.layout.expand(case.transition).double().numpy(), 1e-300))
    case.log_matrix[case.log_matrix < -600] = -np.inf
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-7}
    check_against(case, case.answers(log_space), **tolerance)
    path = inference.viterbi(*case.problem)
    states = case.sequences.with_values(path.states)
    for n, answer in enumerate(case.answers(log_space)):
        np.testing.assert_allclose(path.log_probability[n], answer.score, rtol=1e-6)
        if answer.score > -np.inf:
            np.testing.assert_allclose(
                path_score(case.initial.numpy(), case.log_matrix, case.rows[n], states[n].numpy()),
                answer.score,
                rtol=1e-6,
            )


@pytest.mark.parametrize("kind", KINDS)
def test_the_full_matrix(kind):
    case = Case(kind, "pairs", [3, 2, 4], [30, 17, 1, 30], 2)
    evidence = Rows(torch.from_numpy(np.concatenate(case.rows)))
    full = inference.posterior(case.initial, Dense(torch.from_numpy(case.log_matrix)), evidence, case.sequences.offsets)
    found = inference.posterior(*case.problem)
    torch.testing.assert_close(found.log_likelihood, full.log_likelihood, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.smoothed, full.smoothed, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(case.layout.expand(found.counts[0]), full.counts[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", LAYOUTS)
@pytest.mark.parametrize("smooth", [True, False])
def test_the_twin_gives_the_same(kind, stored, smooth):
    case = Case(kind, stored, [2, 5, 3], [12, 0, 1, 20, 7], 3)
    weights = torch.tensor([1.0, 1.0, 0.5, 0.0, 2.0], dtype=torch.float64)
    values = case.problem[2].symbols
    twin = cloned_portable.e_step(
        case.layout.arrays,
        case.initial,
        case.transition,
        values,
        case.evidence,
        case.sequences.offsets,
        weights,
        single=False,
        smooth=smooth,
    )
    rows = None if case.evidence is None else case.evidence.numpy()
    arrays = (
        case.initial.numpy(),
        case.transition.numpy(),
        values.numpy(),
        rows,
        case.sequences.offsets.numpy(),
        weights.numpy(),
    )
    mine = run.e_step(case.layout.arrays, *arrays, smooth=smooth, per_step=smooth, last=True)
    for name, one, other in zip(run.Results._fields, mine, twin, strict=True):
        if one.size:
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=name)
    path = cloned_portable.viterbi(
        case.layout.arrays, case.initial, case.transition, values, case.evidence, case.sequences.offsets
    )
    assert torch.equal(inference.viterbi(*case.problem).states, path[0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_gradcheck(kind):
    """Every stored probability is a free parameter; entries that are zero are structural and stay out of the check."""
    case = Case(kind, "full", [2, 1, 2], [6, 1, 4], 4)
    free = torch.nonzero(case.transition > 0).flatten()
    assert len(free) > 0

    def scores(initial: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return inference.log_likelihood(
            *problem(initial, case.transition.index_copy(0, free, probs), case.layout, case.sequences)
        )

    inputs = case.initial.clone().requires_grad_(), case.transition[free].clone().requires_grad_()
    assert torch.autograd.gradcheck(scores, inputs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_times_probabilities_are_counts(kind):
    """Against the dense likelihood of the expanded matrix, with a coefficient of its own for each sequence."""
    case = Case(kind, "pairs", [2, 1, 2], [6, 1, 4], 4)
    weights = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)
    initial, transition = case.initial.clone().requires_grad_(), case.transition.clone().requires_grad_()
    (inference.log_likelihood(*problem(initial, transition, case.layout, case.sequences)) * weights).sum().backward()
    log_initial, log_matrix = case.initial.clone().requires_grad_(), torch.from_numpy(case.log_matrix).requires_grad_()
    evidence = Rows(torch.from_numpy(np.concatenate(case.rows)))
    (
        inference.log_likelihood(log_initial, Dense(log_matrix), evidence, case.sequences.offsets) * weights
    ).sum().backward()
    torch.testing.assert_close(initial.grad, log_initial.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        transition.grad * case.transition, case.layout.collect(log_matrix.grad), rtol=1e-9, atol=1e-12
    )


def test_weights_count_sequences():
    case = Case("symbols", "full", [2, 3], [9, 5, 7], 5)
    twice = Sequences.cat([case.sequences, case.sequences[:1], case.sequences[2:]])
    one = inference.e_step(*problem(case.initial, case.transition, case.layout, twice))
    other = inference.e_step(*case.problem, torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(one.counts, other.counts, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.initial, other.initial, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_threads_nor_company_change_a_bit(kind, monkeypatch):
    case = Case(kind, "pairs", [40, 33, 20, 47, 30], [300, 280, 300, 100, 260, 90, 300], 6)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(inference.posterior(*case.problem))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0].log_likelihood, other.log_likelihood)
        assert torch.equal(results[0].smoothed, other.smoothed)
        assert torch.equal(results[0].counts[0], other.counts[0])
    alone = [
        inference.log_likelihood(*problem(case.initial, case.transition, case.layout, case.sequences[n : n + 1]))
        for n in range(7)
    ]
    assert torch.equal(torch.cat(alone), results[0].log_likelihood)
    monkeypatch.setattr(plan, "MESSAGE_BYTES", 200_000)  # several goes
    few = inference.posterior(*case.problem)
    assert torch.equal(few.smoothed, results[0].smoothed)
    torch.testing.assert_close(few.counts, results[0].counts, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["small", "wide", "right guess", "wrong guess", "nothing forgotten"])
def test_two_filters_are_one_pass_there_and_back(way, dtype, monkeypatch):
    """The two filters agree with forward-backward, for small models and messages of one to more than four vectors.

    With chunks, the guess that a chunk begins with is good, not good, or useless because nothing is forgotten.
    """
    case = Case(
        "symbols",
        "full",
        [7, 1, 12, 20, 35, 50, 150] if way == "wide" else [7, 1, 12, 20],
        [300, 97, 0, 1, 500],
        dtype=dtype,
    )
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.5], dtype=torch.float64)
    transition = case.transition.clone()
    if way == "nothing forgotten":
        matrix = case.matrix**8  # so few ways on that a wrong guess stays wrong, yet inside float32's range
        transition = case.layout.collect(matrix / matrix.sum(1, keepdim=True)).to(dtype)
    given = *problem(case.initial, transition, case.layout, case.sequences), weights
    whole, rows = inference.e_step(*given), inference.posterior(*given)
    again, done = [], []
    repair, both = two_filters.repair_chunks, run._two_filters
    monkeypatch.setattr(two_filters, "repair_chunks", lambda *given: again.append(repair(*given)) or again[-1])
    monkeypatch.setattr(run, "_two_filters", lambda *given, **how: done.append(both(*given, **how)) or done[-1])
    monkeypatch.setattr(run, "_WORTH_PLANNING", 0)
    if way not in ("small", "wide"):
        monkeypatch.setattr(run, "_CACHE_BYTES", 0)
    if way != "right guess":
        monkeypatch.setattr(two_filters, "mixing_time", lambda *_: 1)
    rtol, atol = (1e-4, 1e-6) if dtype == torch.float32 else (1e-9, 1e-12)
    found = inference.e_step(*given)
    for one, other in zip((*found[:3], *found.counts), (*whole[:3], *whole.counts), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    posterior = inference.posterior(*given)
    for one, other in ((posterior.filtered, rows.filtered), (posterior.smoothed, rows.smoothed)):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    assert len(done) == 3  # with weights, `posterior` runs the E-step as well
    assert all(result is not None for result in done)
    redone = max(again, default=0)  # of 898 steps
    assert redone > 100 if way in ("wrong guess", "nothing forgotten") else redone < 20


def test_impossible_sequences_are_named_and_the_others_count():
    layout = Layout([1, 2, 1], [(0, 1), (1, 0), (1, 1)])
    matrix = torch.tensor([[0, 0.5, 0.5, 0], [0.5, 0, 0.5, 0], [0, 0, 1.0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    transition, initial = layout.collect(matrix), torch.full((4,), 0.25, dtype=torch.float64).log()
    # 0 after 0 is no stored pair; 0 1 1 1 0 is: state 2 never comes back, so it has to be 1 0 at once
    sequences = Sequences.from_list([[0, 1, 0], [0, 1, 0, 0, 1], [1, 1, 1, 0], [2, 0]])
    given = problem(initial, transition, layout, sequences)
    found = inference.e_step(*given)
    assert found.log_likelihood.tolist() == [pytest.approx(np.log(0.25 * 0.5 * 0.5)), -np.inf, -np.inf, -np.inf]
    assert found.impossible_step.tolist() == [-1, 3, 3, 1]
    torch.testing.assert_close(
        found.counts, inference.e_step(*problem(initial, transition, layout, sequences[:1])).counts
    )
    path = inference.viterbi(*given)
    assert path.states[:8].tolist() == [0, 1, 0] + [-1] * 5
    assert path.log_probability.tolist()[1:] == [-np.inf] * 3
    assert bool(inference.predict(*given)[1:].isnan().all())
    assert bool((inference.posterior(*given).filtered[3:8] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_floats_cannot_hold_is_done_in_log_space(dtype):
    """Twenty steps of probability 1e-30: the one way to go on is far below what the messages hold."""
    tiny = 1e-30 if dtype == torch.float32 else 1e-250
    layout = Layout([2, 1])
    matrix = torch.tensor([[1 - tiny, tiny, 0], [0, 0, 1.0], [tiny, 0, 1 - tiny]], dtype=torch.float64)
    transition, initial = layout.collect(matrix).to(dtype), torch.tensor([1.0, 0, 0], dtype=torch.float64).log()
    sequences = Sequences.from_list([[0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 0]])
    given = problem(initial, transition, layout, sequences)
    found = inference.posterior(*given)
    expected = 4 * np.log(float(transition[1]))
    np.testing.assert_allclose(found.log_likelihood, [expected, 0], rtol=1e-6)
    assert found.smoothed[:8].argmax(1).tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    counts = layout.expand(found.counts[0])
    np.testing.assert_allclose(counts[0], [3, 2, 0], atol=1e-6)
    path = inference.viterbi(*given)
    assert path.states[:8].tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    np.testing.assert_allclose(path.log_probability[0], expected, rtol=1e-6)


def test_a_million_steps_in_float32():
    case = Case("symbols", "full", [2, 2], [1], 7)
    states, _ = inference.sample(*case.problem[:2], torch.tensor([1_000_000]), torch.Generator().manual_seed(1))
    data = Sequences.from_list([case.layout.symbols[states]])
    wide, single = (
        inference.log_likelihood(*problem(case.initial, probs, case.layout, data))
        for probs in (case.transition, case.transition.float())
    )
    np.testing.assert_allclose(single, wide, rtol=1e-6)


@pytest.mark.parametrize("stored", LAYOUTS)
def test_sampled_chains_follow_the_matrix(stored):
    case = Case("symbols", stored, [2, 1, 2], [1], 8)
    states, offsets = inference.sample(
        *case.problem[:2], torch.tensor([2, 0, 200_000]), torch.Generator().manual_seed(0)
    )
    assert offsets.tolist() == [0, 2, 2, 200_002]
    long = states[2:]
    counts = torch.zeros(5, 5, dtype=torch.float64).index_put_(
        (long[:-1], long[1:]), torch.ones(len(long) - 1, dtype=torch.float64), accumulate=True
    )
    np.testing.assert_allclose(counts / counts.sum(1, keepdim=True), case.matrix, atol=0.012)


@pytest.mark.parametrize("kind", KINDS)
def test_posterior_samples_have_the_posterior_frequencies(kind):
    case = Case(kind, "sparse", [2, 1, 2], [5], 9)
    many = 4000
    data = Sequences.cat([case.sequences] * many)
    given = problem(case.initial, case.transition, case.layout, data)
    paths = inference.sample_posterior(*given, torch.Generator().manual_seed(0)).reshape(many, 5)
    smoothed = inference.posterior(*case.problem).smoothed
    frequency = torch.stack([(paths == k).double().mean(0) for k in range(5)], 1)
    np.testing.assert_allclose(frequency, smoothed, atol=0.03)
    adjacent = case.matrix[paths[:, :-1], paths[:, 1:]]
    assert bool((adjacent > 0).all())


def test_pruned_layouts_keep_what_was_said():
    layout = Layout([2, 3], [(0, 0), (0, 1), (1, 0)])
    keep = torch.arange(layout.num_entries) % 3 != 0
    values = torch.arange(1.0, layout.num_entries + 1)
    once = layout.pruned(keep)
    expected = layout.expand(torch.where(keep, values, 0))
    assert torch.equal(once.expand(values[keep]), expected)
    again = once.pruned(values[keep] > 5)
    assert torch.equal(again.expand(values[keep][values[keep] > 5]), torch.where(expected > 5, expected, 0))
    assert once.density == int(keep.sum()) / 25
    assert Layout(*once.tensors) == once


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [3, 2000])  # blocks as they are stored, and copied
@pytest.mark.parametrize(
    "share", [0.02, 0.4]
)  # of entries that stay: few clones have mass, whose order is that of their finding; and many, sorted
def test_pruned_layouts_count_like_whole_blocks_with_zeros(share, length, dtype, monkeypatch):
    rng = np.random.default_rng(0)
    whole = Layout([60, 1, 40])
    keep = torch.from_numpy(rng.random(whole.num_entries) < share)
    keep[:: whole.num_states] = True  # every row has an entry
    matrix = whole.expand(torch.where(keep, torch.from_numpy(rng.gamma(0.5, size=whole.num_entries) + 1e-3), 0))
    probs = whole.collect(matrix / matrix.sum(1, keepdim=True)).to(dtype)
    initial = torch.from_numpy(rng.dirichlet(np.ones(whole.num_states))).log()
    states, offsets = inference.sample(
        initial, Blocks(probs, whole), torch.tensor([length, 0, 1, length + 1]), torch.Generator().manual_seed(1)
    )
    symbols = Sequences(whole.symbols[states], offsets)
    if share < 0.1:  # a sequence that cannot be, beside those that can
        symbols = Sequences.cat([symbols, Sequences.from_list([[1, 1, 1, 1]])])
    weights = torch.arange(len(symbols), dtype=torch.float64)  # one does not count
    expected = inference.e_step(*problem(initial, probs, whole, symbols), weights)
    pruned = whole.pruned(keep)
    given = problem(initial, probs[keep], pruned, symbols)
    found = inference.e_step(*given, weights)
    assert torch.equal(found.impossible_step, expected.impossible_step)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(found.counts[0], expected.counts[0][keep], **tolerance)
    np.testing.assert_allclose(found.initial, expected.initial, **tolerance)
    np.testing.assert_allclose(found.log_likelihood, expected.log_likelihood, rtol=tolerance["rtol"])
    np.testing.assert_allclose(inference.log_likelihood(*given), expected.log_likelihood, rtol=tolerance["rtol"])
    predicted = [
        inference.predict(*problem(initial, part, layout, symbols[:4]))
        for part, layout in ((probs, whole), (probs[keep], pruned))
    ]
    np.testing.assert_allclose(*predicted, **tolerance)
    monkeypatch.setattr(plan, "MESSAGE_BYTES", 5000)  # in several goes, on one thread: the same bits
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    again = inference.e_step(*given, weights)
    torch.set_num_threads(threads)
    assert torch.equal(again.counts[0], found.counts[0])
    assert torch.equal(again.initial, found.initial)
    with pytest.raises(ValueError, match="keeps none"):
        whole.pruned(torch.zeros_like(keep))


@pytest.mark.parametrize("stored", LAYOUTS)
def test_rearranged_symbols_against_every_order(stored):
    """Finds the best path over all orders of symbols within groups, and a possible path if few nodes are kept."""
    for seed in range(4):
        case = Case("symbols", stored, [1, 3, 2], [9], seed=seed)
        symbols, lengths = case.sequences.values, [1, 4, 1, 3]
        groups = [list(permutations(part.tolist())) for part in symbols.split(lengths)]
        orders = sorted({tuple(chain.from_iterable(order)) for order in product(*groups)})
        paths = inference.viterbi(
            *problem(case.initial, case.transition, case.layout, Sequences.from_list([list(order) for order in orders]))
        )
        states, score = cloned.rearranged_viterbi(*case.problem[:2], symbols, lengths)
        best = paths.log_probability.max()
        assert score == pytest.approx(float(best), rel=1e-12)
        if best == -torch.inf:
            assert (states == -1).all()
            continue
        assert tuple(case.layout.symbols[states].tolist()) in orders
        assert path_score(case.initial.numpy(), case.log_matrix, np.zeros((9, 6)), states.numpy()) == pytest.approx(
            score, rel=1e-12
        )
        _, few = cloned.rearranged_viterbi(*case.problem[:2], symbols, lengths, most=2)
        assert few <= score
    with pytest.raises(ValueError, match="sum to the number of symbols, 9, but sum to 5 instead"):
        cloned.rearranged_viterbi(*case.problem[:2], symbols, [4, 1])
    with pytest.raises(ValueError, match="position 1 is missing"):
        cloned.rearranged_viterbi(*case.problem[:2], torch.tensor([0, -1]), [2])


def test_bad_input_is_said():
    case = Case("symbols", "full", [2, 1], [3], 0)
    with pytest.raises(ValueError, match="symbol 1 has none"):
        Layout([2, 0, 1])
    with pytest.raises(ValueError, match="Symbols must be 0 to 1"):
        ClonedSymbols.of(Sequences.from_list([[0, 2]]), case.layout)
    rows = Sequences.from_list([[[0.5, 0.5], [0.9, 0.2]]])
    with pytest.raises(ValueError, match=r"position 1 of sequence 0 sums to 1\.1"):
        ClonedSymbols.of(rows, case.layout)
    with pytest.raises(ValueError, match="no probability"):
        ClonedSymbols.of(rows.with_values(rows.values - 0.6), case.layout)


def test_rare_transitions_that_must_be_used_again_and_again():
    """Each step keeps more than it may lose, but the product of two is below the smallest float64."""
    probs = torch.tensor([1.0, 1e-190, 1e-190, 1.0], dtype=torch.float64)
    data = Sequences.from_list([[0, 1, 0, 1, 1], [0, 0, 1]])
    log_likelihood = inference.log_likelihood(
        *problem(torch.tensor([0.5, 0.5], dtype=torch.float64).log(), probs, Layout([1, 1]), data)
    )
    np.testing.assert_allclose(log_likelihood, np.log(0.5) + np.log(1e-190) * np.array([3, 1]), rtol=1e-12)
