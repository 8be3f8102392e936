"""The same bits whatever the number of threads, in a forked child, and when several Python threads call at once."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_hmm import inference
from lightning_hmm.inference.cpu import estep
from lightning_hmm.inference.kernels.threads import num_shares
from tests.inference import oracle

KINDS = oracle.KINDS


@pytest.fixture
def threads():
    """Sets the number of threads; puts it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


OPERATORS = pytest.mark.parametrize("kept", [None, 1], ids=["dense", "mostly constant"])


def large(kind: str, kept: int | None = None) -> oracle.Model:
    """Enough work for several lanes, more sequences than a tile holds, and a lane that gets less than the others."""
    model = oracle.make(kind, 17 if kept is None else 200, [90, 0, 1] + [60] * 70, kept=kept, seed=41)
    ((order, tile),) = estep.plan(model.sequences.offsets.numpy(), None, len(model.initial), 8 * len(model.initial))
    assert num_shares(-(-len(order) // tile), 0) > 2
    return model.with_weights(torch.linspace(0.1, 2, 73))


def everything(model: oracle.Model) -> list[torch.Tensor]:
    """All that is computed, as one list."""
    results = []
    for dtype in (torch.float64, torch.float32):
        step = inference.e_step(*model.weighted, dtype=dtype)
        results += [*step[:3], *step.counts, step.evidence, inference.log_likelihood(*model.problem, dtype=dtype)]
    path, posterior = inference.viterbi(*model.problem), inference.posterior(*model.problem)
    return [*results, path.states, path.log_probability, posterior.filtered, posterior.smoothed]


def identical(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@OPERATORS
@pytest.mark.parametrize("kind", KINDS)
def test_number_of_threads(kind, kept, threads):
    model = large(kind, kept)
    threads(1)
    one = everything(model)
    for number in (2, 3):
        threads(number)
        assert identical(one, everything(model))


def test_statistics_summed_over_lanes_need_not_be_equal_by_luck(threads):
    """The sums above are of floats whose order matters: another order of sequences gives other bits."""
    threads(2)
    model = large("table")
    order = torch.arange(len(model.sequences)).flip(0)
    turned = model.sequences[order]
    (there,) = inference.e_step(*model.weighted).counts
    (back,) = inference.e_step(
        *model.problem[:2], model.evidence._replace(symbols=turned.symbols(4)), turned.offsets, turned.weights
    ).counts
    assert not torch.equal(there, back)
    torch.testing.assert_close(there, back, rtol=1e-12, atol=0)


def _in_child(connection, kind: str) -> None:
    connection.send([tensor.numpy() for tensor in everything(large(kind))])
    connection.close()


def test_forked_child(threads):
    """A child has none of its parent's threads: it must neither wait for them nor give other bits."""
    threads(2)
    expected = everything(large("table"))  # the parent's pool exists before the fork
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(theirs, "table"))
    child.start()
    try:
        assert ours.poll(60), "the child hangs"
        assert identical(expected, [torch.from_numpy(array) for array in ours.recv()])
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()
    assert child.exitcode == 0


def test_concurrent_calls(threads):
    """Four threads, each with models and sizes of its own, share one pool and no workspace."""
    threads(2)
    models = [
        large("table"),
        oracle.make("quadratic", 5, [30, 3, 0, 200], seed=1),
        large("rows"),
        oracle.make("table", 3, [9] * 40, seed=2),
    ]
    expected = [everything(model) for model in models]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for left, right in zip(expected, pool.map(everything, models), strict=True):
                assert identical(left, right)


def test_workspaces_do_not_leak_between_calls():
    """Memory is kept from call to call and not cleared: a small batch after a large one sees nothing of it."""
    small = oracle.make("table", 3, [5, 2, 1], seed=3)
    before = everything(small)
    everything(large("quadratic"))
    impossible = oracle.make("table", 3, [40] * 40, seed=4, zeros=0.6)
    everything(impossible)
    assert identical(before, everything(small))
