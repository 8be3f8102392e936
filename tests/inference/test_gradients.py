"""Gradients are expected counts: by finite differences, by autograd through plain torch, and where there are zeros."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from lightning_hmm import inference
from lightning_hmm.inference import Table
from lightning_hmm.inference.operators import Dense
from lightning_hmm.sequences import Sequences
from tests.inference import oracle
from tests.inference.oracle import KINDS

LENGTHS = (3, 0, 1, 4, 2)
WEIGHTS = (1.0, 3.0, 0.5, 0.0, 2.0)
OPERATORS = pytest.mark.parametrize("kept", [None, 1], ids=["dense", "mostly constant"])


def free(model: oracle.Model) -> tuple[torch.Tensor, ...]:
    """The parameters that a gradient is for, as leaves."""
    return tuple(
        tensor.clone().requires_grad_() for tensor in (model.initial, model.evidence.live, *model.operator.natural)
    )


def rebuilt(model: oracle.Model, leaves: tuple[torch.Tensor, ...]) -> tuple:
    """The problem of the leaves, with the weights of the model."""
    initial, evidence, *natural = leaves
    return (
        initial,
        model.operator.with_natural(tuple(natural)),
        model.evidence.with_live(evidence),
        model.sequences.offsets,
        model.sequences.weights,
    )


@pytest.mark.usefixtures("backend")
@OPERATORS
@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind, kept):
    """Of each sequence's log-likelihood apart (so the incoming gradients are unequal), and of the weighted sum."""
    model = oracle.make(kind, 3, LENGTHS, kept=kept, seed=21).with_weights(WEIGHTS)
    assert torch.autograd.gradcheck(
        lambda *leaves: inference.log_likelihood(*rebuilt(model, leaves)[:4]), free(model), rtol=1e-6, atol=1e-7
    )
    assert torch.autograd.gradcheck(
        lambda *leaves: inference.log_likelihood(*rebuilt(model, leaves)).sum(), free(model), rtol=1e-6, atol=1e-7
    )


@pytest.mark.usefixtures("backend")
@OPERATORS
@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("num_states", [2, 4])
def test_autograd_through_plain_torch(num_states, zeros, kept):
    """Incoming gradients of both signs, and a zero: as weights they are not what a user could give."""
    model = oracle.make("rows", num_states, LENGTHS, kept=kept, seed=22)
    if kept is None:
        model = model._replace(
            operator=Dense(
                oracle.log_rows(np.random.default_rng(1), num_states, num_states, zeros=zeros).clamp(min=-1e30)
            )
        )
    factors = torch.tensor([-2.0, 1.0, -1.5, 0.25, 0.0], dtype=torch.float64)
    ours, theirs = free(model), free(model)
    (factors * inference.log_likelihood(*rebuilt(model, ours))).sum().backward()
    initial, operator, evidence, offsets, _ = rebuilt(model, theirs)
    matrix = operator.to_dense(offsets[:0])
    parts = [
        oracle.differentiable(initial, matrix, evidence.rows()[first:last])
        for first, last in itertools.pairwise(offsets.tolist())
    ]
    (factors * torch.stack(parts)).sum().backward()
    for left, right in zip(ours, theirs, strict=True):
        assert_allclose(left.grad, right.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.usefixtures("backend")
@OPERATORS
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_e_step(kind, kept):
    """One backward pass from a sum hands out the statistics, bit for bit; and a scaled sum scales them."""
    model = oracle.make(kind, 4, LENGTHS, kept=kept, seed=23).with_weights(WEIGHTS)
    expected, leaves = inference.e_step(*model.weighted), free(model)
    inference.log_likelihood(*rebuilt(model, leaves)).sum().backward()
    for leaf, counts in zip(leaves, (expected.initial, expected.evidence, *expected.counts), strict=True):
        assert torch.equal(leaf.grad, counts)
    again = free(model)
    (-0.5 * inference.log_likelihood(*rebuilt(model, again)).sum()).backward()
    for leaf, scaled in zip(leaves, again, strict=True):
        assert torch.equal(-0.5 * leaf.grad, scaled.grad)


@pytest.mark.usefixtures("backend")
@OPERATORS
@pytest.mark.parametrize("zeros", [0.3, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_structural_zeros(kind, zeros, kept):
    """Where a log-probability is -inf the count is 0, and nothing is NaN though some sequences are impossible."""
    model = oracle.make(kind, 4, (3, 6, 1, 5, 8, 0, 2), kept=kept, seed=24, zeros=zeros)
    leaves = free(model)
    scores = inference.log_likelihood(*rebuilt(model, leaves))
    possible = scores > -torch.inf
    assert torch.equal(possible, inference.e_step(*model.problem).impossible_step < 0)
    scores[possible].sum().backward()
    for leaf in leaves:
        assert bool(leaf.grad.isfinite().all())
        assert bool((leaf.grad[leaf == -torch.inf] == 0).all())
    initial, counts, _ = oracle.statistics(model, model.answers(), np.ones(len(model.rows)))
    for leaf, expected in zip((leaves[0], *leaves[2:]), (initial, *counts), strict=True):
        assert_allclose(leaf.grad, expected, rtol=1e-10, atol=1e-13)
    assert float(leaves[0].grad.sum()) == pytest.approx(
        int((possible & (model.sequences.lengths > 0)).sum()), rel=1e-12
    )


@pytest.mark.usefixtures("backend")
@OPERATORS
def test_nothing_observed_leaves_gradients_of_zero(kept):
    """Connected to every parameter, or the ranks of a distributed run would wait for each other: zeros, not None."""
    for kind in KINDS:
        for lengths in ([], [0, 0]):
            model = oracle.make(kind, 3, lengths, kept=kept)
            leaves = free(model)
            loss = inference.log_likelihood(*rebuilt(model, leaves)).sum()
            loss.backward()
            assert loss.item() == 0
            assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)
        leaves = free(model := oracle.make(kind, 3, [1], kept=kept))
        inference.log_likelihood(*rebuilt(model, leaves)).sum().backward()
        assert not any(leaf.grad.any() for leaf in leaves[2:]), "one step has no transition"
        assert float(leaves[0].grad.sum()) == pytest.approx(1)


@pytest.mark.usefixtures("backend")
def test_weight_zero_hides_an_impossible_sequence():
    log_probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64).log()
    model = oracle.make("table", 2, [3, 2], missing=0)
    sequences = Sequences.from_list([[0, 0, 0], [0, 1]], weights=[1.0, 0.0])
    model = model._replace(evidence=Table(log_probs, sequences.symbols(2)), sequences=sequences)
    leaves = free(model)
    scores, found = inference.log_likelihood(*rebuilt(model, leaves)), inference.e_step(*model.weighted)
    assert scores.tolist()[1] == 0
    assert found.log_likelihood.tolist()[1] == -np.inf
    assert found.impossible_step.tolist() == [-1, 1]
    scores.sum().backward()
    assert float(leaves[1].grad.sum()) == pytest.approx(3)
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves)


@pytest.mark.usefixtures("backend")
@OPERATORS
def test_parameters_in_float32_get_gradients_in_float32(kept):
    model = oracle.make("quadratic", 3, LENGTHS, kept=kept, seed=25)
    leaves = tuple(leaf.detach().float().requires_grad_() for leaf in free(model))
    inference.log_likelihood(*rebuilt(model, leaves)).sum().backward()
    assert {leaf.grad.dtype for leaf in leaves} == {torch.float32}
    for leaf, counts in zip(leaves[2:], inference.e_step(*model.problem).counts, strict=True):
        assert_allclose(leaf.grad, counts, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("backend")
def test_what_has_no_gradient_says_so():
    """A second derivative would otherwise be a silent zero."""
    model = oracle.make("table", 3, LENGTHS, seed=26)
    leaves = free(model)
    (first,) = torch.autograd.grad(
        inference.log_likelihood(*rebuilt(model, leaves)).sum(), leaves[2], create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()


def test_without_gradients_there_is_no_backward_pass():
    """`log_likelihood` of constants takes O(tile x K) memory: it must not smooth."""
    model = oracle.make("table", 3, LENGTHS)
    assert not inference.log_likelihood(*model.problem).requires_grad
    with torch.no_grad():
        assert not inference.log_likelihood(*rebuilt(model, free(model))).requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
def test_a_compiled_function_may_contain_the_log_likelihood():
    """It is opaque to `torch.compile`: what is before and after it is compiled."""
    model = oracle.make("table", 3, LENGTHS, seed=27)

    def loss(initial: torch.Tensor, live: torch.Tensor, natural: torch.Tensor) -> torch.Tensor:
        scores = inference.log_likelihood(*rebuilt(model, (initial.log_softmax(0), live, natural.log_softmax(1))))
        return -scores.sum() * 2

    plain, compiled = free(model), free(model)
    loss(*plain).backward()
    torch.compile(loss, backend="aot_eager")(*compiled).backward()
    for left, right in zip(plain, compiled, strict=True):
        assert_allclose(left.grad, right.grad, rtol=1e-12, atol=1e-14)
