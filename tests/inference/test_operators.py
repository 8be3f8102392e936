"""Every operator against its full matrix: prediction, transpose, expected counts, and whole E-steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lightning_hmm.inference import log_space, reference
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.operators import Dense, Duration, MostlyConstant, Operator, TimeVarying

LENGTHS = (4, 0, 7, 1, 1, 5)
STEPS = sum(LENGTHS)


@dataclass(frozen=True)
class Factorial(Operator):
    """Two independent chains as one; an operator of a stranger, which has `predict` only."""

    first: torch.Tensor
    second: torch.Tensor

    @property
    def num_states(self) -> int:
        return len(self.first) * len(self.second)

    def predict(self, alpha: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        grid = alpha.reshape(len(alpha), len(self.first), len(self.second))
        return (self.first.exp().T @ grid @ self.second.exp()).flatten(1)


def log_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2).log_softmax(-1)
    )


def operators() -> dict[str, Operator]:
    zeros = (
        log_rows(6, 6, seed=1).masked_fill(torch.arange(6) > torch.arange(6)[:, None] + 1, -torch.inf).log_softmax(-1)
    )
    indices = torch.stack(
        [torch.randperm(6, generator=torch.Generator().manual_seed(n))[:2].sort().values for n in range(6)]
    )
    kept = log_rows(6, 3, seed=2)
    return {
        "dense": Dense(log_rows(6, 6)),
        "dense with zeros": Dense(zeros),
        "mostly constant": MostlyConstant(indices, kept[:, :2], kept[:, 2] - torch.tensor(4.0).log()),
        "sparse": MostlyConstant(indices, log_rows(6, 2, seed=3), torch.full((6,), -torch.inf, dtype=torch.float64)),
        "time-varying": TimeVarying(log_rows(3, 6, 6, seed=4), torch.arange(STEPS) * 7 % 3),
        "duration": Duration(log_rows(2, 2, seed=5), log_rows(2, 3, seed=6)),
        "factorial": Factorial(log_rows(2, 2, seed=7), log_rows(3, 3, seed=8)),
    }


OPERATORS = operators()


@pytest.mark.parametrize("name", OPERATORS)
def test_predict_and_its_transpose_are_those_of_the_matrix(name):
    operator, at = OPERATORS[name], torch.tensor([3, 8, 5])
    matrix = operator.to_dense(at).exp().expand(3, 6, 6)
    torch.testing.assert_close(matrix.sum(2), torch.ones(3, 6, dtype=torch.float64))
    messages, maps = log_rows(3, 6, seed=9).exp(), operator.prepare(torch.float64)
    predicted = (messages[:, None] @ matrix).squeeze(1)
    for found in (operator.predict(messages, at), maps.predict(messages, at)):
        torch.testing.assert_close(found, predicted, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(
        maps.retract(messages, at), (matrix @ messages[:, :, None]).squeeze(2), rtol=1e-12, atol=1e-15
    )


def summed(
    operator: Operator, initial: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(N,) log-likelihoods by sums in log space, and the operator's counts as the gradient of their weighted sum."""
    leaves = tuple(value.clone().requires_grad_() for value in operator.natural)
    chain, totals = operator.with_natural(leaves), []
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        forward = initial + rows[first] if last > first else torch.zeros(1, dtype=torch.float64)
        for t in range(first + 1, last):
            matrix = chain.to_dense(torch.tensor([t])).reshape(-1, 6, 6)[0]
            forward = (forward[:, None] + matrix + rows[t]).logsumexp(0)
        totals.append(forward.logsumexp(0))
    scores = torch.stack(totals)
    return scores, torch.autograd.grad((scores * weights).sum(), leaves, materialize_grads=True)


@pytest.mark.parametrize("route", ["float64", "float32", "log space"])
@pytest.mark.parametrize("name", OPERATORS)
def test_e_step(name, route):
    operator, initial, rows = OPERATORS[name], log_rows(6, seed=10), log_rows(STEPS, 6, seed=11)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    weights = torch.tensor([1.0, 1.0, -2.0, 0.0, 0.5, 1.0], dtype=torch.float64)  # a gradient may have either sign
    scores, counts = summed(operator, initial, rows, offsets, weights)
    if route == "log space":
        found = log_space.e_step(initial, operator, Rows(rows), offsets, weights)
    else:
        found = reference.e_step(initial, operator, Rows(rows), offsets, weights, dtype=getattr(torch, route))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if route == "float32" else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(found.log_likelihood, scores.detach(), **tolerance)
    for mine, theirs in zip(found.counts, counts, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    torch.testing.assert_close(
        found.smoothed.sum(1), weights.repeat_interleave(torch.tensor(LENGTHS)), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(found.initial.sum(), torch.tensor(0.5, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPERATORS)
def test_sequences_that_leave_the_range_of_floats_run_in_log_space(name):
    """Evidence of 3,000 standard deviations against every state but one, in one of the sequences."""
    operator, initial, rows = OPERATORS[name], log_rows(6, seed=10), log_rows(STEPS, 6, seed=11)
    rows[6:10] -= 4.5e6 * (1 + torch.arange(6)).double() * (torch.arange(4)[:, None] % 2)
    offsets, weights = torch.tensor([0, *LENGTHS]).cumsum(0), torch.rand(len(LENGTHS), dtype=torch.float64)
    exact = log_space.e_step(initial, operator, Rows(rows), offsets, weights)
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        found = reference.e_step(initial, operator, Rows(rows), offsets, weights, dtype=dtype)
        torch.testing.assert_close(found.log_likelihood, exact.log_likelihood, rtol=rtol, atol=1e-4)
        for mine, theirs in zip(found.counts, exact.counts, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)
        torch.testing.assert_close(found.smoothed, exact.smoothed, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("num_states", [1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_mostly_constant_maps_lose_no_digits(num_states, num_kept):
    """With kept entries of 1e-13, constants near one and messages of all sizes, results have 13 correct digits."""
    num_kept = min(num_kept, num_states)
    generator = torch.Generator().manual_seed(num_states)
    indices = torch.stack(
        [torch.randperm(num_states, generator=generator)[:num_kept].sort().values for _ in range(num_states)]
    )
    constants = torch.rand(num_states, generator=generator, dtype=torch.float64)
    operator = MostlyConstant(
        indices, torch.full((num_states, num_kept), 1e-13, dtype=torch.float64).log(), constants.log()
    )
    messages = 10.0 ** (-40 * torch.rand(5, num_states, generator=generator, dtype=torch.float64))
    matrix, at, maps = (
        operator.to_dense(torch.zeros(1)).exp(),
        torch.zeros(5, dtype=torch.int64),
        operator.prepare(torch.float64),
    )
    for found in (operator.predict(messages, at), maps.predict(messages, at)):
        torch.testing.assert_close(found, messages @ matrix, rtol=1e-13, atol=0)
    torch.testing.assert_close(maps.retract(messages, at), messages @ matrix.T, rtol=1e-13, atol=0)
    pairs = messages[:, :, None] * matrix * messages.flip(0)[:, None]
    for found, expected in zip(
        operator.counts(messages, messages.flip(0), at), operator.counts_of_pairs(pairs, at), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
