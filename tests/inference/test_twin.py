"""The plain-torch reference and log space give what the compiled kernels give, and the host reads one value of an E-step at most."""

from __future__ import annotations

import itertools

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hmm.inference import dense, log_space, operators, reference
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.kernels import cpu
from tests.inference import oracle
from tests.inference.oracle import KINDS

NAMES = ("log_likelihood", "impossible_step", "initial", "transition", "visits", "sum1", "sum2", "smoothed", "filtered", "last")
LENGTHS = (3, 0, 9, 1, 1, 0, 6, 9, 2, 4)


def arguments(model: oracle.Model) -> tuple:
    """(kind, initial, transition, parameters, values, offsets), as both take them."""
    kind, parameters = dense._unpack(model.emission)
    return kind, model.initial, model.transition, parameters, model.sequences.values, model.sequences.offsets


def as_numpy(given: tuple) -> list:
    return [[p.numpy() for p in item] if isinstance(item, list) else item.numpy() if isinstance(item, torch.Tensor) else item for item in given]


def plain(model: oracle.Model, weights: torch.Tensor, *, single: bool = False, smooth: bool = True, exact: bool = False) -> tuple:
    """The results of `cpu.e_step` from plain torch: scaled probabilities, or log space."""
    kind, initial, transition, parameters, values, offsets = arguments(model)
    rows, operator = dense.log_emissions(kind, parameters, values, torch.float64), operators.Dense(transition)
    if exact:
        found = log_space.e_step(initial, operator, Rows(rows), offsets, weights, smooth=smooth)
    else:
        found = reference.e_step(initial, operator, Rows(rows), offsets, weights, dtype=torch.float32 if single else None, smooth=smooth)
    return *found[:3], *found.counts, *dense._statistics(kind, parameters, values, found.smoothed, smooth), *found[5:]


@pytest.mark.parametrize("route", ["float64", "float32", "log space"])
@pytest.mark.parametrize("zeros", [0.0, 0.5], ids=["possible", "structural zeros and impossible sequences"])
@pytest.mark.parametrize("kind", KINDS)
def test_e_step(kind, zeros, route):
    model = oracle.make(kind, 5, LENGTHS, seed=11, zeros=zeros)
    weights = torch.tensor([1.0, 1.0, 0.5, 2.0, 0.0, 3.0, 1.0, 1.0, 1e-3, 1.0], dtype=torch.float64)
    single, options = route == "float32", {"single": route == "float32", "exact": route == "log space"}
    theirs = plain(model, weights, **options)
    ours = cpu.e_step(*as_numpy(arguments(model)), weights.numpy(), single=single, smooth=True, per_step=True)
    forward = cpu.e_step(*as_numpy(arguments(model)), weights.numpy(), single=single, smooth=False, last=True)
    assert bool((theirs[1] >= 0).any()) == (zeros > 0 and kind != "gaussian")
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if single else {"rtol": 1e-11, "atol": 1e-13}
    for name, left, right in zip(NAMES[:-1], ours[:-1], theirs[:-1], strict=True):
        assert_allclose(left, right, **tolerance, err_msg=name)
    for name, index in (("log_likelihood", 0), ("impossible_step", 1), ("last", 9)):
        assert_allclose(forward[index], theirs[index], **tolerance, err_msg=f"{name} of the forward pass")
    assert_array_equal(plain(model, weights, smooth=False, **options)[9], theirs[9])


def best_path(model: oracle.Model) -> tuple[torch.Tensor, torch.Tensor]:
    kind, initial, transition, parameters, values, offsets = arguments(model)
    return log_space.viterbi(initial, operators.Dense(transition), Rows(dense.log_emissions(kind, parameters, values, torch.float64)), offsets)


@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_viterbi(kind, zeros):
    model = oracle.make(kind, 5, LENGTHS, seed=12, zeros=zeros)
    path, score = best_path(model)
    our_path, our_score = cpu.viterbi(*as_numpy(arguments(model)))
    assert_array_equal(our_path, path)
    assert_allclose(our_score, score, rtol=1e-12, atol=0)


def test_equally_probable_paths():
    """With everything uniform all paths tie: both say state 0 throughout."""
    flat = torch.zeros(6, 3, dtype=torch.float64)
    given = cpu.STEPS, torch.zeros(3).double(), torch.zeros(3, 3).double(), [flat], torch.zeros(6).long(), torch.tensor([0, 4, 6])
    assert log_space.viterbi(given[1], operators.Dense(given[2]), Rows(flat), given[5])[0].tolist() == [0] * 6
    assert cpu.viterbi(*as_numpy(given))[0].tolist() == [0] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind, monkeypatch):
    """Log space takes long batches in chunks of sequences, here three at a time; the reference takes counts in chunks of steps, here seven."""
    model = oracle.make(kind, 4, LENGTHS, seed=13, zeros=0.3)
    weights = torch.rand(len(LENGTHS), dtype=torch.float64)
    whole = plain(model, weights), plain(model, weights, exact=True), best_path(model)
    monkeypatch.setattr(log_space, "_PAIR_ENTRIES", 3 * 16)
    monkeypatch.setattr(reference, "_COUNTED_AT_ONCE", 7 * 4)
    parts = plain(model, weights), plain(model, weights, exact=True), best_path(model)
    for left, right in zip(itertools.chain(*whole), itertools.chain(*parts), strict=True):
        assert_allclose(left, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("smooth", "per_step"), [(True, False), (True, True), (False, False)])
def test_the_operator_returns_the_same_on_every_device(kind, smooth, per_step):
    """Eleven results of the same shapes and types, from the body that GPUs run too."""
    model = oracle.make(kind, 3, LENGTHS, seed=14, zeros=0.3)
    weights = torch.rand(len(LENGTHS), dtype=torch.float64)
    given = *arguments(model), weights, False, smooth, per_step
    ours, theirs = dense._e_step_op(*given), dense._e_step_op._init_fn(*given)
    for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert (left.shape, left.dtype) == (right.shape, right.dtype), index
        assert_allclose(left, right, rtol=1e-11, atol=1e-13, err_msg=str(index))
    assert len({result.untyped_storage()._cdata for result in theirs}) == len(theirs), "an operator must not return one tensor twice"


class HostReads(TorchDispatchMode):
    """Raises where a tensor's value decides something on the host more often than `allowed`: that is where a GPU would be waited for."""

    def __init__(self, allowed: int = 0) -> None:
        super().__init__()
        self.left = allowed

    WAITS = ("_local_scalar_dense", "item", "equal", "nonzero", "is_nonzero", "masked_select", "_unique", "unique", "argwhere", "bincount", "is_same_size")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masks or any(name == wait or name.startswith(wait + "_") for wait in self.WAITS):
            self.left -= 1
            if self.left < 0:
                raise AssertionError(f"{function} reads a tensor on the host")
        return function(*args, **(kwargs or {}))


def test_the_watch_sees_host_reads():
    tensor = torch.arange(3)
    for read in (lambda: tensor[1].item(), lambda: bool((tensor > 1).any()), lambda: tensor[tensor > 1], lambda: torch.equal(tensor, tensor), tensor.nonzero):
        with HostReads(), pytest.raises(AssertionError, match="on the host"):
            read()


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_one_value_of_an_e_step(kind):
    model = oracle.make(kind, 3, LENGTHS, seed=15)
    weights = torch.ones(len(LENGTHS), dtype=torch.float64)
    for options in ({}, {"single": True, "smooth": False}):
        with HostReads(allowed=1):
            plain(model, weights, **options)
    with HostReads():
        plain(model, weights, exact=True)
        best_path(model)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_step_takes_few_calls(smooth):
    """At most 12 calls of torch for a time step of the reference, views not counted."""

    class Calls(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += not function.is_view
            return function(*args, **(kwargs or {}))

    numbers = []
    for length in (50, 150):
        model = oracle.make("symbols", 3, [length] * 4, seed=15)
        with Calls() as calls:
            plain(model, torch.ones(4, dtype=torch.float64), smooth=smooth)
        numbers.append(calls.number)
    assert (numbers[1] - numbers[0]) / 100 <= (12 if smooth else 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_well_registered(kind, dtype):
    """Schema, fake tensors (torch.compile, meta) and autograd registration, by torch's own checks."""
    model = oracle.make(kind, 3, LENGTHS, seed=16)
    number, *natural, parameters, values, offsets = arguments(model)
    natural = [tensor.to(dtype).requires_grad_() for tensor in natural]
    parameters = [tensor.to(dtype) for tensor in parameters]
    weights = torch.rand(len(LENGTHS), dtype=torch.float64)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    for single, smooth, per_step in ((False, True, False), (True, True, True), (False, False, False)):
        torch.library.opcheck(dense._e_step_op, (number, *natural, parameters, values, offsets, weights, single, smooth, per_step), test_utils=utilities)
    torch.library.opcheck(dense._viterbi_op, (number, *(t.detach() for t in natural), parameters, values, offsets), test_utils=utilities)
