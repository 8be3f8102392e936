"""Laws of every hidden Markov model, on examples that hypothesis makes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm import inference
from lightning_hmm.inference import Rows, Table
from lightning_hmm.inference.operators import Dense, MostlyConstant
from tests.inference import oracle

laws = settings(max_examples=25, deadline=None, derandomize=True)
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@st.composite
def models(draw, zeros: bool = True, missing: float = 0.2):
    num_states = draw(st.integers(1, 9))
    return oracle.make(
        draw(st.sampled_from(oracle.KINDS)),
        num_states,
        draw(st.lists(st.integers(0, 12), max_size=40)),
        kept=draw(st.none() | st.integers(0, num_states - 1)),
        seed=draw(st.integers(0, 10**6)),
        zeros=draw(st.sampled_from([0.0, 0.3])) if zeros else 0.0,
        low=draw(st.sampled_from([0.0, 0.5])),
        missing=missing,
    )


def full_counts(model: oracle.Model, counts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """(K, K) expected transitions of a full matrix. Transitions with a shared constant are split by probability."""
    if isinstance(model.operator, Dense):
        return counts[0]
    kept, rest = counts
    size = len(model.initial)
    return (rest[:, None] / (size - kept.shape[1])).expand(size, size).scatter(1, model.operator.indices, kept)


def relabelled(model: oracle.Model, order: np.ndarray) -> oracle.Model:
    """State order[k] becomes state k."""
    evidence, operator = model.evidence, model.operator
    moved = evidence.with_live(evidence.live[:, order] if isinstance(evidence, Rows) else evidence.live[order])
    if isinstance(operator, Dense):
        other = Dense(operator.log_probs[order][:, order])
    else:
        places = torch.from_numpy(np.argsort(order))[operator.indices[order]]
        places, by = places.sort(1)
        other = MostlyConstant(places, operator.log_values[order].gather(1, by), operator.log_constants[order])
    return model._replace(initial=model.initial[order], operator=other, evidence=moved)


@laws
@given(models(), st.randoms(use_true_random=False))
def test_names_of_states_mean_nothing(model, random):
    order = np.arange(len(model.initial))
    random.shuffle(order)
    other = relabelled(model, order)
    before, after = inference.e_step(*model.problem), inference.e_step(*other.problem)
    assert_allclose(after.log_likelihood, before.log_likelihood, **CLOSE)
    assert_array_equal(after.impossible_step, before.impossible_step)
    assert_allclose(after.initial, before.initial[order], **CLOSE)
    assert_allclose(full_counts(other, after.counts), full_counts(model, before.counts)[order][:, order], **CLOSE)
    axis = 1 if isinstance(model.evidence, Rows) else 0
    assert_allclose(after.evidence, before.evidence.index_select(axis, torch.from_numpy(order)), **CLOSE)
    assert_allclose(
        inference.viterbi(*other.problem).log_probability, inference.viterbi(*model.problem).log_probability, **CLOSE
    )
    assert_allclose(inference.predict(*other.problem), inference.predict(*model.problem)[:, order], **CLOSE)
    assert_allclose(
        inference.posterior(*other.problem).filtered, inference.posterior(*model.problem).filtered[:, order], **CLOSE
    )


@laws
@given(models(), st.integers(0, 40))
def test_batches_add_up(model, cut):
    """Two batches apart give what they give together; weights go along."""
    model = model.with_weights(np.linspace(0, 2, len(model.rows)))
    together = inference.e_step(*model.weighted)
    apart, offsets, cut = [], model.sequences.offsets, min(cut, len(model.rows))
    for first, last in ((0, cut), (cut, len(model.rows))):
        steps = torch.arange(*offsets[[first, last]].tolist())
        part = model.evidence.at(steps), offsets[first : last + 1] - offsets[first], model.sequences.weights[first:last]
        apart.append(inference.e_step(*model.problem[:2], *part))
    assert_allclose(together.log_likelihood, torch.cat([step.log_likelihood for step in apart]), **CLOSE)
    assert_allclose(together.initial, apart[0].initial + apart[1].initial, **CLOSE)
    for whole, first, second in zip(together.counts, apart[0].counts, apart[1].counts, strict=True):
        assert_allclose(whole, first + second, **CLOSE)
    one, other = apart[0].evidence, apart[1].evidence
    assert_allclose(
        together.evidence, torch.cat([one, other]) if isinstance(model.evidence, Rows) else one + other, **CLOSE
    )


@laws
@given(models())
def test_posteriors_are_distributions(model):
    """Rows sum to one, or to nothing where the sequence is impossible; at the last step filtered is smoothed."""
    posterior = inference.posterior(*model.problem)
    possible = posterior.log_likelihood > -torch.inf
    each = model.sequences.repeat_interleave(possible.double())
    for rows in (posterior.filtered, posterior.smoothed):
        assert bool((rows >= 0).all())
        assert_allclose(rows.sum(1), each, **CLOSE)
    ends = model.sequences.offsets[1:][model.sequences.lengths > 0] - 1
    assert_allclose(posterior.filtered[ends], posterior.smoothed[ends], **CLOSE)
    expected = (model.sequences.lengths - 1).clamp(min=0)[possible].sum()
    assert_allclose(sum(counts.sum() for counts in posterior.counts), expected, **CLOSE)
    for counts, natural in zip(posterior.counts, model.operator.natural, strict=True):
        assert bool((counts >= 0).all())
        assert bool((counts[natural == -torch.inf] == 0).all())


@laws
@given(models())
def test_the_best_path_is_not_better_than_all_paths(model):
    path = inference.viterbi(*model.problem)
    log_likelihood = inference.log_likelihood(*model.problem)
    assert bool((path.log_probability <= log_likelihood + 1e-10).all())
    assert torch.equal(path.log_probability == -torch.inf, log_likelihood == -torch.inf)
    lengths = model.sequences.lengths.clamp(min=1)
    assert bool((path.log_probability >= log_likelihood - lengths * np.log(len(model.initial)) - 1e-10).all())


@laws
@given(models(missing=1.0))
def test_nothing_observed_is_certain(model):
    """With everything missing the likelihood is one, and counts are those of the chain itself."""
    if isinstance(model.evidence, Rows):
        model = model._replace(evidence=Rows(torch.zeros_like(model.evidence.log_likelihoods)))
    step = inference.e_step(*model.problem)
    assert_allclose(step.log_likelihood, np.zeros(len(model.rows)), rtol=0, atol=1e-13)
    state, matrix = (np.exp(part) for part in model.chain)
    pairs = np.zeros_like(matrix)
    for t in range(1, 13):
        pairs += int((model.sequences.lengths > t).sum()) * state[:, None] * matrix
        state = state @ matrix
    for ours, theirs in zip(step.counts, oracle.counts_of(model.operator, pairs), strict=True):
        assert_allclose(ours, theirs, **CLOSE)
    if not isinstance(model.evidence, Rows):
        assert not step.evidence.any()


@laws
@given(models(zeros=False))
def test_uniform_transitions_are_a_mixture(model):
    """When every row of A is the initial distribution, steps are independent draws from a mixture."""
    mixture = model._replace(operator=Dense(model.initial.expand(len(model.initial), -1).clone()))
    expected = [float(torch.logsumexp(model.initial + torch.from_numpy(rows), 1).sum()) for rows in model.rows]
    assert_allclose(inference.log_likelihood(*mixture.problem), expected, **CLOSE)
    rows = np.concatenate([np.zeros((0, len(model.initial))), *model.rows])
    responsibilities = (model.initial + torch.from_numpy(rows)).softmax(1)
    posterior = inference.posterior(*mixture.problem)
    assert_allclose(posterior.smoothed, responsibilities, **CLOSE)
    assert_allclose(posterior.filtered, responsibilities, **CLOSE)


@laws
@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([None, 0, 1]), st.integers(1, 6), st.integers(0, 4))
def test_a_missing_step_is_a_sum_over_its_symbols(seed, num_states, kept, length, position):
    """p(y without y_t) = sum over v of p(y with y_t = v); statistics are those, in proportion."""
    position = position % length
    model = oracle.make("table", num_states, [length], kept=kept, seed=seed, missing=0)
    symbols = model.sequences.values
    filled = [torch.where(torch.arange(length) == position, v, symbols) for v in (4, 0, 1, 2, 3)]
    without, *steps = [
        inference.e_step(*model.problem[:2], Table(model.evidence.log_probs, each), model.sequences.offsets)
        for each in filled
    ]
    assert_allclose(
        without.log_likelihood, torch.logsumexp(torch.stack([each.log_likelihood for each in steps]), 0), **CLOSE
    )
    shares = [float((each.log_likelihood - without.log_likelihood).exp()) for each in steps]
    for n, counts in enumerate(without.counts):
        assert_allclose(counts, sum(share * each.counts[n] for share, each in zip(shares, steps, strict=True)), **CLOSE)


@laws
@given(models(zeros=False), st.floats(-50, 50))
def test_evidence_is_relative(model, shift):
    """The same added to all states of a step changes the likelihood by it, and nothing else."""
    rows = torch.from_numpy(np.concatenate([np.zeros((0, len(model.initial))), *model.rows]))
    before, after = (
        inference.posterior(*model.problem[:2], Rows(each), model.sequences.offsets) for each in (rows, rows + shift)
    )
    assert_allclose(
        after.log_likelihood, before.log_likelihood + shift * model.sequences.lengths.double(), rtol=1e-9, atol=1e-9
    )
    assert_allclose(after.smoothed, before.smoothed, rtol=1e-9, atol=1e-11)


@laws
@given(models(zeros=False), st.sampled_from([torch.float64, torch.float32]))
def test_one_em_step_does_not_lower_the_likelihood(model, dtype):
    """Counts normalized into rows, evidence kept: the law that makes expected counts worth having."""
    step = inference.e_step(*model.problem, dtype=dtype)
    counts, before = full_counts(model, step.counts), torch.from_numpy(model.chain[1])
    initial, transition = (
        torch.where(c.sum(-1, keepdim=True) > 0, c / c.sum(-1, keepdim=True), p.exp()).log()
        for c, p in ((step.initial, model.initial), (counts, before))
    )
    after = inference.log_likelihood(initial, Dense(transition), *model.problem[2:])
    assert float(after.sum()) >= float(inference.log_likelihood(*model.problem).sum()) - (
        1e-3 if dtype == torch.float32 else 1e-9
    )
