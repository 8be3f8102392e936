r"""Transition operators: linear maps of forward messages, with natural parameters.

An operator is its method `predict`, which maps messages :math:`\alpha` to :math:`\alpha A` and is differentiable. Everything else follows
from it: the backward messages :math:`A \kappa` are the vector-Jacobian product of `predict` in :math:`\alpha`, and the expected counts of
the natural parameters are the one in these. An operator overrides `prepare` and `counts` where it has a faster way. It must do so to run inside
an operator of `torch.library`, where autograd is off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Prepared(NamedTuple):
    """An operator in the precision of a pass, exponentiated once.

    predict: (n, S) messages and (n,) step numbers to the messages after the transition into those steps.
    retract: the transpose of `predict`.
    """

    predict: Callable[[Tensor, Tensor], Tensor]
    retract: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Operator(ABC):
    """Base class of transition operators; the fields of a subclass are tensors, those with natural parameters floating point."""

    @property
    @abstractmethod
    def num_states(self) -> int:
        """S."""

    @abstractmethod
    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        """(n, S) messages after the transition into the steps `at` (n,), from those before it; linear in `alpha` and differentiable."""

    @property
    def natural(self) -> tuple[Tensor, ...]:
        """The natural parameters, in the order of the fields."""
        return tuple(value for value in self._values() if value.is_floating_point())

    def with_natural(self, natural: tuple[Tensor, ...]) -> Operator:
        """The same operator with other natural parameters."""
        names = [
            field.name for field, value in zip(fields(self), self._values(), strict=True) if value.is_floating_point()
        ]
        changes: dict[str, Any] = dict(zip(names, natural, strict=True))
        return replace(self, **changes)

    def to(self, dtype: torch.dtype) -> Operator:
        """The same operator with its natural parameters, detached, in another precision."""
        return self.with_natural(tuple(value.detach().to(dtype) for value in self.natural))

    def on(self, device: torch.device | str) -> Operator:
        """The same operator, detached, on a device."""
        changes: dict[str, Any] = {
            field.name: value.detach().to(device) for field, value in zip(fields(self), self._values(), strict=True)
        }
        return replace(self, **changes)

    def gradients(self, counts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of the log-likelihood in the tensors of `natural`. They are the expected counts, because natural parameters are logarithms."""
        return counts

    def leaving(self, states: Tensor, at: Tensor) -> Tensor:
        """(n, S) the probabilities of the transitions from `states` (n,) into the steps `at` (n,)."""
        return self.predict(torch.nn.functional.one_hot(states, self.num_states).to(self.natural[0].dtype), at)

    def prepare(self, dtype: torch.dtype) -> Prepared:
        """The maps of a pass in the given precision."""
        operator = self.to(dtype)

        def retract(kappa: Tensor, at: Tensor) -> Tensor:
            with torch.enable_grad():
                alpha = torch.zeros_like(kappa).requires_grad_()
                (back,) = torch.autograd.grad(operator.predict(alpha, at), alpha, kappa)
            return back

        return Prepared(operator.predict, retract)

    def counts(self, alpha: Tensor, kappa: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Expected counts, one tensor for each natural parameter, from (n, S) messages before the steps `at` and scaled ones after them."""
        leaves = tuple(value.detach().to(alpha.dtype).requires_grad_() for value in self.natural)
        with torch.enable_grad():
            return torch.autograd.grad(
                self.with_natural(leaves).predict(alpha, at), leaves, kappa, materialize_grads=True
            )

    def counts_of_pairs(self, pairs: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Expected counts, one tensor for each natural parameter, from those of all pairs of states (n, S, S) across the steps `at`."""
        leaves = tuple(value.detach().to(pairs.dtype).requires_grad_() for value in self.natural)
        with torch.enable_grad():
            matrix = self.with_natural(leaves).to_dense(at)
            return torch.autograd.grad(
                matrix, leaves, pairs.sum(0) if matrix.dim() == 2 else pairs, materialize_grads=True
            )

    def to_dense(self, at: Tensor) -> Tensor:
        """Log-probabilities of the transitions into the steps `at` (n,): (n, S, S), or (S, S) if they are the same for all steps."""
        unit = torch.eye(self.num_states, dtype=self.natural[0].dtype, device=self.natural[0].device)
        probs = self.predict(unit, at[:1].expand(len(unit)))
        possible = probs > 0  # the logarithm of zero has no gradient
        return torch.where(possible, torch.where(possible, probs, 1.0).log(), -torch.inf)

    def restricted_to(self, at: Tensor) -> Operator:
        """The operator of a batch that has the steps `at` of this one only."""
        return self

    def _values(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Dense(Operator):
    """A full matrix: (S, S) log-probabilities, -inf for a transition that cannot happen."""

    log_probs: Tensor

    @property
    def num_states(self) -> int:
        return self.log_probs.shape[0]

    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        return alpha @ self.log_probs.exp()

    def prepare(self, dtype: torch.dtype) -> Prepared:
        probs = self.log_probs.detach().exp().to(dtype)
        return Prepared(lambda alpha, at: alpha @ probs, lambda kappa, at: kappa @ probs.T)

    def counts(self, alpha: Tensor, kappa: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        return ((alpha.T @ kappa) * self.log_probs.detach().exp().to(alpha.dtype),)

    def counts_of_pairs(self, pairs: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        return (pairs.sum(0),)

    def to_dense(self, at: Tensor) -> Tensor:
        return self.log_probs


_SUMMED_AT_ONCE = 1024  # messages whose sums over what is not kept are computed at once


class _Complements(NamedTuple):
    """Sums over all of S numbers but some, for each of S groups, without a subtraction, in which digits would be lost.

    What a group does not leave out are the gaps between the members of it. Level k of a table has, for each block of 2^k numbers, the sums from each
    number to the middle of the block. The sum over a gap is two entries of the level in whose blocks its ends are on different sides of the middle.

    group, first, second: (gaps,) the group of each gap and the places of the two entries in the table. The last entry of the table is zero.
    num_levels: of the table, in addition to the numbers themselves.
    """

    group: Tensor
    first: Tensor
    second: Tensor
    num_levels: int

    @classmethod
    def of(cls, groups: Tensor, members: Tensor, size: int) -> _Complements:
        """From the group and the number of each member, in the same order. A group has no member twice."""
        every = torch.arange(size, device=groups.device) * (
            size + 1
        )  # each group begins with a member before all numbers
        keys = torch.cat([every, groups.flatten() * (size + 1) + members.flatten() + 1]).sort().values
        group, begin = keys // (size + 1), keys % (size + 1)
        following = torch.cat([keys[1:], keys.new_full((1,), size * (size + 1))])
        last = torch.where(following // (size + 1) == group, following % (size + 1) - 1, size) - 1
        levels = (size - 1).bit_length()
        padded, nothing = 1 << levels, (levels + 1) << levels
        level = torch.frexp(
            (begin ^ last).double()
        ).exponent.long()  # the number of bits up to the highest in which both ends differ
        empty = last < begin
        first = torch.where(empty, nothing, level * padded + begin)
        second = torch.where(empty | (begin == last), nothing, level * padded + last)
        return cls(group, first, second, levels)

    def sums(self, numbers: Tensor) -> Tensor:
        """(n, S) for each row of numbers (n, S)."""
        padded = torch.nn.functional.pad(numbers, (0, (1 << self.num_levels) - numbers.shape[1]))
        table = [padded]
        for level in range(1, self.num_levels + 1):
            halves = padded.reshape(len(numbers), -1, 2, 1 << (level - 1))
            left, right = halves[:, :, 0].flip(-1).cumsum(-1).flip(-1), halves[:, :, 1].cumsum(-1)
            table.append(torch.stack([left, right], 2).flatten(1))
        entries = torch.cat([*table, numbers.new_zeros(len(numbers), 1)], 1)
        return torch.zeros_like(numbers).index_add(1, self.group, entries[:, self.first] + entries[:, self.second])


@dataclass(frozen=True)
class MostlyConstant(Operator):
    """Rows of which M entries are kept and all others share a constant.

    indices: (S, M) the columns of the kept entries; log_values: (S, M) their log-probabilities; log_constants: (S,) the
    log-probability of each of the others. With constants of -inf it is a sparse matrix.
    """

    indices: Tensor
    log_values: Tensor
    log_constants: Tensor

    @property
    def num_states(self) -> int:
        return self.log_constants.shape[0]

    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        rest = self._keepers.sums(alpha * self.log_constants.exp())
        kept = alpha[:, :, None] * self.log_values.exp()  # (n, S, M)
        return rest.scatter_add(1, self.indices.reshape(1, -1).expand(len(alpha), -1), kept.flatten(1))

    @cached_property
    def _keepers(self) -> _Complements:
        """For each column, the rows that keep it."""
        rows = torch.arange(self.num_states, device=self.indices.device)[:, None].expand_as(self.indices)
        return _Complements.of(self.indices, rows, self.num_states)

    @cached_property
    def _kept(self) -> _Complements:
        """For each row, the columns that it keeps."""
        rows = torch.arange(self.num_states, device=self.indices.device)[:, None].expand_as(self.indices)
        return _Complements.of(rows, self.indices, self.num_states)

    def prepare(self, dtype: torch.dtype) -> Prepared:
        operator = self.to(dtype)
        assert isinstance(operator, MostlyConstant)
        values, constants = operator.log_values.exp(), operator.log_constants.exp()

        def retract(kappa: Tensor, at: Tensor) -> Tensor:
            return operator._kept.sums(kappa) * constants + (kappa[:, self.indices] * values).sum(2)

        return Prepared(operator.predict, retract)

    def counts(self, alpha: Tensor, kappa: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        kept = torch.empty_like(self.log_values, dtype=alpha.dtype)
        for n, column in enumerate(self.indices.T):
            kept[:, n] = (alpha * kappa[:, column]).sum(0)
        rest = torch.zeros_like(self.log_constants, dtype=alpha.dtype)
        for mine, theirs in zip(alpha.split(_SUMMED_AT_ONCE), kappa.split(_SUMMED_AT_ONCE), strict=True):
            rest += (mine * self._kept.sums(theirs)).sum(0)
        return kept * self.log_values.detach().exp().to(kept.dtype), rest * self.log_constants.detach().exp().to(
            kept.dtype
        )

    def counts_of_pairs(self, pairs: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        total = pairs.sum(0)
        return total.gather(1, self.indices), total.scatter(1, self.indices, 0.0).sum(1)

    def to_dense(self, at: Tensor) -> Tensor:
        return self.log_rows(slice(None))

    def log_rows(self, rows: slice) -> Tensor:
        """(rows, S) log-probabilities of the transitions from some of the states."""
        full = self.log_constants[rows, None].expand(-1, self.num_states)
        return full.scatter(1, self.indices[rows], self.log_values[rows])


@dataclass(frozen=True)
class TimeVarying(Operator):
    """A matrix for each step: log_probs (M, S, S) and index (steps,), the matrix of the transition *into* each step."""

    log_probs: Tensor
    index: Tensor

    @property
    def num_states(self) -> int:
        return self.log_probs.shape[1]

    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        return (alpha[:, None] @ self.log_probs.exp()[self.index[at]]).squeeze(1)

    def prepare(self, dtype: torch.dtype) -> Prepared:
        probs = self.log_probs.detach().exp().to(dtype)
        return Prepared(
            lambda alpha, at: (alpha[:, None] @ probs[self.index[at]]).squeeze(1),
            lambda kappa, at: (probs[self.index[at]] @ kappa[:, :, None]).squeeze(2),
        )

    def to_dense(self, at: Tensor) -> Tensor:
        return self.log_probs[self.index[at]]

    def restricted_to(self, at: Tensor) -> Operator:
        return TimeVarying(self.log_probs, self.index[at])


@dataclass(frozen=True)
class Duration(Operator):
    """Explicit durations, for hidden semi-Markov models; the state K x D is never multiplied out.

    log_jumps: (K, K) from one stay to the next; log_durations: (K, D) of a stay's length, 1 to D. State k D + r stays in k for r
    more steps.
    """

    log_jumps: Tensor
    log_durations: Tensor

    @property
    def num_states(self) -> int:
        return self.log_durations.numel()

    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        stays = alpha.reshape(len(alpha), *self.log_durations.shape)
        entering = stays[:, :, 0] @ self.log_jumps.exp()
        staying = torch.cat([stays[:, :, 1:], torch.zeros_like(stays[:, :, :1])], 2)
        return (staying + entering[:, :, None] * self.log_durations.exp()).flatten(1)
