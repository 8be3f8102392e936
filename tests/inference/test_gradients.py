"""Gradients are expected counts: by finite differences, by autograd through plain torch, and where there are zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from lightning_hmm.inference import dense
from tests.inference import oracle
from tests.inference.oracle import KINDS

LENGTHS = (3, 0, 1, 4, 2)
WEIGHTS = (1.0, 3.0, 0.5, 0.0, 2.0)


def free(model: oracle.Model) -> tuple[torch.Tensor, ...]:
    """The parameters that a gradient is for, as leaves; a centre is a constant."""
    emission = model.emission[:3] if isinstance(model.emission, dense.Gaussian) else tuple(model.emission)
    return tuple(tensor.clone().requires_grad_() for tensor in (model.initial, model.transition, *emission))


def rebuilt(model: oracle.Model, leaves: tuple[torch.Tensor, ...]) -> tuple:
    """(initial, transition, emission, sequences) of the leaves."""
    initial, transition, *emission = leaves
    constant = model.emission[3:] if isinstance(model.emission, dense.Gaussian) else ()
    return initial, transition, type(model.emission)(*emission, *constant), model.sequences


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind):
    """Of each sequence's log-likelihood apart (so the incoming gradients are unequal), and of the weighted sum."""
    model = oracle.make(kind, 3, LENGTHS, seed=21).with_weights(WEIGHTS)
    assert torch.autograd.gradcheck(lambda *leaves: dense.log_likelihood(*rebuilt(model, leaves)), free(model), rtol=1e-6, atol=1e-7)
    assert torch.autograd.gradcheck(lambda *leaves: dense.weighted_log_likelihood(*rebuilt(model, leaves))[0].sum(), free(model), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("num_states", [1, 4])
def test_autograd_through_plain_torch(num_states, zeros):
    """Incoming gradients of both signs, and a zero: as weights they are not what a user could give."""
    model = oracle.make("steps", num_states, LENGTHS, seed=22, zeros=0)
    model = model._replace(transition=oracle.log_rows(np.random.default_rng(1), num_states, num_states, zeros=zeros).clamp(min=-1e30))
    factors = torch.tensor([-2.0, 1.0, -1.5, 0.25, 0.0], dtype=torch.float64)
    ours, theirs = free(model), free(model)
    (factors * dense.log_likelihood(*rebuilt(model, ours))).sum().backward()
    bounds = model.sequences.offsets.tolist()
    sum(f * oracle.differentiable(*theirs[:2], theirs[2][a:b]) for f, a, b in zip(factors, bounds[:-1], bounds[1:], strict=True)).backward()
    for left, right in zip(ours, theirs, strict=True):
        assert_allclose(left.grad, right.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_e_step(kind):
    """One backward pass from a sum hands out the statistics, bit for bit; and a scaled sum scales them."""
    model = oracle.make(kind, 4, LENGTHS, seed=23).with_weights(WEIGHTS)
    expected, leaves = dense.e_step(*model.parameters), free(model)
    dense.weighted_log_likelihood(*rebuilt(model, leaves))[0].sum().backward()
    emission = (*expected.emission[:2], -expected.emission[2]) if kind == "gaussian" else expected.emission
    for leaf, counts in zip(leaves, (expected.initial, expected.transition, *emission), strict=True):
        assert torch.equal(leaf.grad, counts)
    again = free(model)
    (-0.5 * dense.weighted_log_likelihood(*rebuilt(model, again))[0].sum()).backward()
    for leaf, scaled in zip(leaves, again, strict=True):
        assert torch.equal(-0.5 * leaf.grad, scaled.grad)


@pytest.mark.parametrize("zeros", [0.3, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_structural_zeros(kind, zeros):
    """Where a log-probability is -inf the count is 0, and nothing is NaN though some sequences are impossible."""
    model = oracle.make(kind, 4, (3, 6, 1, 5, 8, 0, 2), seed=24, zeros=zeros)
    leaves = free(model)
    weighted, plain, impossible = dense.weighted_log_likelihood(*rebuilt(model, leaves))
    possible = plain > -torch.inf
    assert torch.equal(possible, impossible < 0)
    weighted[possible].sum().backward()
    for leaf in leaves:
        assert bool(leaf.grad.isfinite().all())
        assert bool((leaf.grad[leaf == -torch.inf] == 0).all())
    expected = oracle.statistics(model, model.answers(), np.ones(len(model.rows)))
    assert_allclose(leaves[0].grad, expected[0], rtol=1e-10, atol=1e-13)
    assert_allclose(leaves[1].grad, expected[1], rtol=1e-10, atol=1e-13)
    assert float(leaves[0].grad.sum()) == pytest.approx(int((possible & (model.sequences.lengths > 0)).sum()), rel=1e-12)


def test_nothing_observed_leaves_gradients_of_zero():
    """Connected to every parameter, or the ranks of a distributed run would wait for each other: zeros, not None."""
    for kind in KINDS:
        for lengths in ([], [0, 0]):
            model = oracle.make(kind, 3, lengths)
            leaves = free(model)
            loss = dense.log_likelihood(*rebuilt(model, leaves)).sum()
            loss.backward()
            assert loss.item() == 0
            assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)
        leaves = free(model := oracle.make(kind, 3, [1]))
        dense.log_likelihood(*rebuilt(model, leaves)).sum().backward()
        assert not leaves[1].grad.any(), "one step has no transition"
        assert float(leaves[0].grad.sum()) == pytest.approx(1)


def test_weight_zero_hides_an_impossible_sequence():
    symbols = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64).log()
    model = oracle.make("symbols", 2, [3, 2], missing=0)
    sequences = dense.Sequences.from_list([[0, 0, 0], [0, 1]], weights=[1.0, 0.0])
    leaves = (model.initial.clone().requires_grad_(), model.transition.clone().requires_grad_(), symbols.requires_grad_())
    weighted, plain, impossible = dense.weighted_log_likelihood(leaves[0], leaves[1], dense.Symbols(leaves[2]), sequences)
    assert weighted.tolist()[1] == 0
    assert plain.tolist()[1] == -np.inf
    assert impossible.tolist() == [-1, 1]
    weighted.sum().backward()
    assert float(leaves[2].grad.sum()) == pytest.approx(3)
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves)


def test_parameters_in_float32_get_gradients_in_float32():
    model = oracle.make("gaussian", 3, LENGTHS, seed=25)
    leaves = tuple(leaf.detach().float().requires_grad_() for leaf in free(model))
    dense.log_likelihood(*rebuilt(model, leaves)).sum().backward()
    expected = dense.e_step(*model.parameters)
    assert {leaf.grad.dtype for leaf in leaves} == {torch.float32}
    assert_allclose(leaves[1].grad, expected.transition, rtol=1e-4, atol=1e-4)


def test_what_has_no_gradient_says_so():
    """The log-likelihood without weights, and a second derivative, would otherwise be a silent zero."""
    model = oracle.make("symbols", 3, LENGTHS, seed=26)
    leaves = free(model)
    weighted, plain, _ = dense.weighted_log_likelihood(*rebuilt(model, leaves))
    assert not plain.requires_grad
    (first,) = torch.autograd.grad(weighted.sum(), leaves[1], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        first.sum().backward()


def test_without_gradients_there_is_no_backward_pass():
    """`log_likelihood` of constants takes O(tile x K) memory: it must not smooth."""
    model = oracle.make("symbols", 3, LENGTHS)
    assert not dense.log_likelihood(*model.parameters).requires_grad
    with torch.no_grad():
        assert not dense.log_likelihood(*rebuilt(model, free(model))).requires_grad
