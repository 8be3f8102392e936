"""The plain-torch reference and log space: chunks change nothing, and the host reads one value of an E-step at most.

`test_cpu` compares both with the compiled driver.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hmm import inference
from lightning_hmm.inference import log_space, reference
from lightning_hmm.inference.evidence import Quadratic, Rows, Table
from lightning_hmm.inference.operators import Dense
from tests.inference import oracle
from tests.inference.oracle import KINDS

LENGTHS = (3, 0, 9, 1, 1, 0, 6, 9, 2, 4)


def test_equally_probable_paths():
    """With everything uniform all paths tie: state 0 throughout, as for the compiled driver."""
    flat = torch.zeros(6, 3, dtype=torch.float64)
    assert log_space.viterbi(flat[0], Dense(flat[:3]), Rows(flat), torch.tensor([0, 4, 6]))[0].tolist() == [0] * 6


@pytest.mark.parametrize("kept", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind, kept, monkeypatch):
    """Log space processes long batches in chunks of sequences, the reference counts in chunks of steps."""
    model = oracle.make(kind, 4, LENGTHS, kept=kept, seed=13, zeros=0.3)
    weights = torch.rand(len(LENGTHS), dtype=torch.float64)

    def everything() -> list:
        return [
            reference.e_step(*model.problem, weights),
            log_space.e_step(*model.problem, weights),
            log_space.viterbi(*model.problem),
        ]

    whole = everything()
    monkeypatch.setattr(log_space, "_PAIR_ENTRIES", 3 * 16)
    monkeypatch.setattr(reference, "_COUNTED_AT_ONCE", 7 * 4)
    torch.testing.assert_close(everything(), whole, rtol=1e-12, atol=1e-14)


class HostReads(TorchDispatchMode):
    """Raises if the host reads the value of a tensor more often than `allowed`, since it would wait for a GPU there."""

    def __init__(self, allowed: int = 0) -> None:
        super().__init__()
        self.left = allowed

    WAITS = (
        "_local_scalar_dense",
        "item",
        "equal",
        "nonzero",
        "is_nonzero",
        "masked_select",
        "_unique",
        "unique",
        "argwhere",
        "bincount",
        "is_same_size",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if masks or any(name == wait or name.startswith(wait + "_") for wait in self.WAITS):
            self.left -= 1
            if self.left < 0:
                raise AssertionError(f"{function} reads a tensor on the host")
        return function(*args, **(kwargs or {}))


def test_the_watch_sees_host_reads():
    tensor = torch.arange(3)
    for read in (
        lambda: tensor[1].item(),
        lambda: bool((tensor > 1).any()),
        lambda: tensor[tensor > 1],
        lambda: torch.equal(tensor, tensor),
        tensor.nonzero,
    ):
        with HostReads(), pytest.raises(AssertionError, match="on the host"):
            read()


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_one_value_of_an_e_step_or_a_path(kind):
    model = oracle.make(kind, 3, LENGTHS, seed=15)
    weights = torch.ones(len(LENGTHS), dtype=torch.float64)
    for options in ({}, {"dtype": torch.float32, "smooth": False}):
        with HostReads(allowed=1):
            reference.e_step(*model.problem, weights, **options)
    with HostReads():
        log_space.e_step(*model.problem, weights)
    with HostReads(allowed=1):
        log_space.viterbi(*model.problem)


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
        model = oracle.make("table", 3, [length] * 4, seed=15)
        with Calls() as calls:
            reference.e_step(*model.problem, torch.ones(4, dtype=torch.float64), smooth=smooth)
        numbers.append(calls.number)
    assert (numbers[1] - numbers[0]) / 100 <= (12 if smooth else 9)


@pytest.mark.parametrize("spoiled", ["initial", "transition", "emission"])
@pytest.mark.parametrize("form", ["table", "quadratic"])
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("call", [inference.e_step, inference.viterbi], ids=["e_step", "viterbi"])
def test_parameters_that_are_nan_are_refused_alike_by_all_backends(spoiled, form, call):
    """Even where no sequence meets them: the only one has one step, and its symbol is another."""
    parameters = {
        "initial": torch.zeros(3).double(),
        "transition": torch.zeros(3, 3).double(),
        "emission": torch.zeros(3, 4).double(),
    }
    parameters[spoiled][..., 1] = torch.nan
    ones = torch.ones(1, 2).double()
    table, quadratic = (
        Table(parameters["emission"], torch.tensor([0])),
        Quadratic(ones, torch.zeros(4, 2, dtype=torch.int64), parameters["emission"]),
    )
    evidence = table if form == "table" else quadratic
    with pytest.raises(
        ValueError, match=rf"^`{spoiled}` must hold numbers, but the entry at \((0, )?1,?\) is nan instead"
    ):
        call(parameters["initial"], Dense(parameters["transition"]), evidence, torch.tensor([0, 1]))
