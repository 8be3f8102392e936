"""Laws of every hidden Markov model, on examples that hypothesis makes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm.inference import dense
from lightning_hmm.sequences import Sequences
from tests.inference import oracle

laws = settings(max_examples=25, deadline=None, derandomize=True)
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@st.composite
def models(draw, zeros: bool = True, missing: float = 0.2):
    return oracle.make(
        draw(st.sampled_from(oracle.KINDS)),
        draw(st.integers(1, 9)),
        draw(st.lists(st.integers(0, 12), max_size=40)),
        seed=draw(st.integers(0, 10**6)),
        zeros=draw(st.sampled_from([0.0, 0.3])) if zeros else 0.0,
        missing=missing,
    )


def relabelled(model: oracle.Model, order: np.ndarray) -> oracle.Model:
    """State order[k] becomes state k."""
    emission = model.emission
    if isinstance(emission, dense.Gaussian):
        emission = dense.Gaussian(*(tensor[order] for tensor in emission[:3]), emission.centre)
    elif isinstance(emission, dense.Symbols):
        emission = dense.Symbols(emission.log_probs[order])
    else:
        emission = dense.Steps(emission.log_likelihoods[:, order])
    return model._replace(initial=model.initial[order], transition=model.transition[order][:, order], emission=emission)


@laws
@given(models(), st.randoms(use_true_random=False))
def test_names_of_states_mean_nothing(model, random):
    order = np.arange(len(model.initial))
    random.shuffle(order)
    other = relabelled(model, order)
    before, after = dense.e_step(*model.parameters), dense.e_step(*other.parameters)
    assert_allclose(after.log_likelihood, before.log_likelihood, **CLOSE)
    assert_array_equal(after.impossible_step, before.impossible_step)
    assert_allclose(after.initial, before.initial[order], **CLOSE)
    assert_allclose(after.transition, before.transition[order][:, order], **CLOSE)
    axis = 1 if isinstance(model.emission, dense.Steps) else 0
    for left, right in zip(after.emission, before.emission, strict=True):
        assert_allclose(left, right.index_select(axis, torch.from_numpy(order)), **CLOSE)
    assert_allclose(dense.viterbi(*other.parameters).log_probability, dense.viterbi(*model.parameters).log_probability, **CLOSE)
    assert_allclose(dense.predict_next(*other.parameters), dense.predict_next(*model.parameters)[:, order], **CLOSE)
    assert_allclose(dense.posterior(*other.parameters).filtered.values, dense.posterior(*model.parameters).filtered.values[:, order], **CLOSE)


@laws
@given(models(), st.integers(0, 40))
def test_batches_add_up(model, cut):
    """Two batches apart give what they give together; weights go along."""
    model = model.with_weights(np.linspace(0, 2, len(model.rows)))
    sequences = model.sequences
    parts = [sequences[:cut], sequences[cut:]]
    emissions = [model.emission] * 2
    if isinstance(model.emission, dense.Steps):
        split = parts[0].num_steps
        emissions = [dense.Steps(model.emission.log_likelihoods[:split]), dense.Steps(model.emission.log_likelihoods[split:])]
    together = dense.e_step(*model.parameters)
    apart = [dense.e_step(model.initial, model.transition, emission, part) for emission, part in zip(emissions, parts, strict=True)]
    assert_allclose(together.log_likelihood, torch.cat([step.log_likelihood for step in apart]), **CLOSE)
    assert_allclose(together.transition, apart[0].transition + apart[1].transition, **CLOSE)
    assert_allclose(together.initial, apart[0].initial + apart[1].initial, **CLOSE)
    for whole, first, second in zip(together.emission, apart[0].emission, apart[1].emission, strict=True):
        assert_allclose(whole, torch.cat([first, second]) if isinstance(model.emission, dense.Steps) else first + second, **CLOSE)


@laws
@given(models())
def test_posteriors_are_distributions(model):
    """Rows sum to one, or to nothing where the sequence is impossible; at the last step filtered is smoothed."""
    posterior = dense.posterior(*model.parameters)
    possible = posterior.log_likelihood > -torch.inf
    each = model.sequences.repeat_interleave(possible.double())
    for rows in (posterior.filtered.values, posterior.smoothed.values):
        assert bool((rows >= 0).all())
        assert_allclose(rows.sum(1), each, **CLOSE)
    ends = model.sequences.offsets[1:][model.sequences.lengths > 0] - 1
    assert_allclose(posterior.filtered.values[ends], posterior.smoothed.values[ends], **CLOSE)
    expected = (model.sequences.lengths - 1).clamp(min=0)[possible].sum()
    assert_allclose(posterior.transition_counts.sum(), expected, **CLOSE)
    assert bool((posterior.transition_counts[model.transition == -torch.inf] == 0).all())


@laws
@given(models())
def test_the_best_path_is_not_better_than_all_paths(model):
    path = dense.viterbi(*model.parameters)
    log_likelihood = dense.log_likelihood(*model.parameters)
    assert bool((path.log_probability <= log_likelihood + 1e-10).all())
    assert torch.equal(path.log_probability == -torch.inf, log_likelihood == -torch.inf)
    lengths = model.sequences.lengths.clamp(min=1)
    assert bool((path.log_probability >= log_likelihood - lengths * np.log(len(model.initial)) - 1e-10).all())


@laws
@given(models(missing=1.0))
def test_nothing_observed_is_certain(model):
    """With everything missing the likelihood is one, and counts are those of the chain itself."""
    if isinstance(model.emission, dense.Steps):
        model = model._replace(emission=dense.Steps(torch.zeros_like(model.emission.log_likelihoods)))
    step = dense.e_step(*model.parameters)
    assert_allclose(step.log_likelihood, np.zeros(len(model.rows)), rtol=0, atol=1e-13)
    state, pairs = model.initial.exp(), torch.zeros_like(model.transition)
    for t in range(1, 13):
        pairs += (model.sequences.lengths > t).sum() * state[:, None] * model.transition.exp()
        state = state @ model.transition.exp()
    assert_allclose(step.transition, pairs, **CLOSE)
    if not isinstance(model.emission, dense.Steps):
        assert not any(statistic.any() for statistic in step.emission)


@laws
@given(models(zeros=False))
def test_uniform_transitions_are_a_mixture(model):
    """When every row of A is the initial distribution, steps are independent draws from a mixture."""
    mixture = model._replace(transition=model.initial.expand_as(model.transition).clone())
    expected = [float(torch.logsumexp(model.initial + torch.from_numpy(rows), 1).sum()) for rows in model.rows]
    assert_allclose(dense.log_likelihood(*mixture.parameters), expected, **CLOSE)
    rows = np.concatenate([np.zeros((0, len(model.initial))), *model.rows])
    responsibilities = (model.initial + torch.from_numpy(rows)).softmax(1)
    posterior = dense.posterior(*mixture.parameters)
    assert_allclose(posterior.smoothed.values, responsibilities, **CLOSE)
    assert_allclose(posterior.filtered.values, responsibilities, **CLOSE)


@laws
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_a_missing_step_is_a_sum_over_its_symbols(seed, num_states, length, position):
    """p(y without y_t) = sum over v of p(y with y_t = v); statistics are those, in proportion."""
    position = position % length
    model = oracle.make("symbols", num_states, [length], seed=seed, missing=0)
    values = model.sequences.values
    filled = [torch.where(torch.arange(length) == position, v, values) for v in range(-1, 4)]
    step = [dense.e_step(*model.parameters[:3], Sequences.from_list([each])) for each in filled]
    assert_allclose(step[0].log_likelihood, torch.logsumexp(torch.stack([each.log_likelihood for each in step[1:]]), 0), **CLOSE)
    shares = [float((each.log_likelihood - step[0].log_likelihood).exp()) for each in step[1:]]
    assert_allclose(step[0].transition, sum(share * each.transition for share, each in zip(shares, step[1:], strict=True)), **CLOSE)


@laws
@given(models(zeros=False), st.floats(-50, 50))
def test_evidence_is_relative(model, shift):
    """The same added to all states of a step changes the likelihood by it, and nothing else."""
    rows = torch.from_numpy(np.concatenate([np.zeros((0, len(model.initial))), *model.rows]))
    before = dense.posterior(model.initial, model.transition, dense.Steps(rows), model.sequences)
    after = dense.posterior(model.initial, model.transition, dense.Steps(rows + shift), model.sequences)
    assert_allclose(after.log_likelihood, before.log_likelihood + shift * model.sequences.lengths.double(), rtol=1e-9, atol=1e-9)
    assert_allclose(after.smoothed.values, before.smoothed.values, rtol=1e-9, atol=1e-11)


@laws
@given(models(zeros=False), st.sampled_from([False, True]))
def test_one_em_step_does_not_lower_the_likelihood(model, single):
    """Counts normalised into rows, emissions kept: the law that makes expected counts worth having."""
    step = dense.e_step(*model.parameters, single=single)
    initial, transition = (
        torch.where(c.sum(-1, keepdim=True) > 0, c / c.sum(-1, keepdim=True), p.exp()).log() for c, p in zip(step[2:4], model[:2], strict=True)
    )
    after = dense.log_likelihood(initial, transition, *model.parameters[2:])
    assert float(after.sum()) >= float(dense.log_likelihood(*model.parameters).sum()) - (1e-3 if single else 1e-9)
