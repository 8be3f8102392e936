r"""Transition operators: linear maps of forward messages, with natural parameters.

An operator is defined by its differentiable method `predict`, which maps messages :math:`\alpha` to :math:`\alpha A`.
All other methods have defaults that are derived from it. Backward messages :math:`A \kappa` are the vector-Jacobian
product of `predict` with respect to :math:`\alpha`. The expected counts of the natural parameters are the
vector-Jacobian product with respect to these. Override `prepare` and `counts` to provide a faster implementation. They
must be overridden if the operator is used inside a custom operator of `torch.library`, where autograd is disabled.

Example:
    >>> import torch
    >>> from lightning_hmm.inference.operators import Dense, MostlyConstant
    >>> dense = Dense(torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log())
    >>> dense.predict(torch.tensor([[0.5, 0.5]]), at=torch.tensor([1]))
    tensor([[0.5500, 0.4500]])
    >>> diagonal = torch.arange(3)[:, None]
    >>> sticky = MostlyConstant(diagonal, torch.full((3, 1), 0.8).log(), torch.full((3,), 0.1).log())
    >>> sticky.to_dense(torch.tensor([1])).exp()
    tensor([[0.8000, 0.1000, 0.1000],
            [0.1000, 0.8000, 0.1000],
            [0.1000, 0.1000, 0.8000]])
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
    """The linear maps of an operator in the data type of the messages. Its parameters have been exponentiated.

    predict: Maps (n, S) messages and (n,) numbers of steps to the messages after the transition into these steps.
    retract: The transpose of `predict`.
    """

    predict: Callable[[Tensor, Tensor], Tensor]
    retract: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Operator(ABC):
    """Base class of transition operators.

    The fields of a subclass are tensors. Those with a floating-point data type are the natural parameters.
    """

    @property
    @abstractmethod
    def num_states(self) -> int:
        """Number of states S."""

    @abstractmethod
    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        """Computes the messages after a transition. The result is linear in `alpha` and differentiable.

        Args:
            alpha: (n, S) messages before the transition.
            at: (n,) numbers of the steps after the transition.

        Returns:
            (n, S) messages after the transition.
        """

    @property
    def classes(self) -> Tensor | None:
        """(S,) class of each state, if the states of a class have the same emission; ``None`` if each has its own.

        Inference then also accepts evidence for the classes instead of the states.
        """
        return None

    @property
    def num_classes(self) -> int:
        """Number of classes of states with the same emission."""
        return self.num_states

    @property
    def natural(self) -> tuple[Tensor, ...]:
        """Natural parameters, in the order of the fields."""
        return tuple(value for value in self._values() if value.is_floating_point())

    def with_natural(self, natural: tuple[Tensor, ...]) -> Operator:
        """Returns the same operator with other natural parameters."""
        names = [
            field.name for field, value in zip(fields(self), self._values(), strict=True) if value.is_floating_point()
        ]
        changes: dict[str, Any] = dict(zip(names, natural, strict=True))
        return replace(self, **changes)

    def to(self, dtype: torch.dtype) -> Operator:
        """Returns the same operator with detached natural parameters of another data type."""
        return self.with_natural(tuple(value.detach().to(dtype) for value in self.natural))

    def on(self, device: torch.device | str) -> Operator:
        """Returns the same operator with detached tensors on a device."""
        changes: dict[str, Any] = {
            field.name: value.detach().to(device) for field, value in zip(fields(self), self._values(), strict=True)
        }
        return replace(self, **changes)

    def gradients(self, counts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Converts expected counts to gradients of the log-likelihood with respect to the tensors of `natural`.

        They are equal if the natural parameters are logarithms.
        """
        return counts

    def leaving(self, states: Tensor, at: Tensor) -> Tensor:
        """Returns (n, S) transition probabilities from `states` (n,) into the steps `at` (n,)."""
        return self.predict(torch.nn.functional.one_hot(states, self.num_states).to(self.natural[0].dtype), at)

    def prepare(self, dtype: torch.dtype) -> Prepared:
        """Returns the linear maps of this operator in the given data type."""
        operator = self.to(dtype)

        def retract(kappa: Tensor, at: Tensor) -> Tensor:
            with torch.enable_grad():
                alpha = torch.zeros_like(kappa).requires_grad_()
                (back,) = torch.autograd.grad(operator.predict(alpha, at), alpha, kappa)
            return back

        return Prepared(operator.predict, retract)

    def counts(self, alpha: Tensor, kappa: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Computes the expected counts of the transitions into some steps.

        Args:
            alpha: (n, S) filtered probabilities of the steps before.
            kappa: (n, S) scaled backward messages of the steps `at`.
            at: (n,) numbers of the steps after the transitions.

        Returns:
            One tensor for each natural parameter.
        """
        leaves = tuple(value.detach().to(alpha.dtype).requires_grad_() for value in self.natural)
        with torch.enable_grad():
            return torch.autograd.grad(
                self.with_natural(leaves).predict(alpha, at), leaves, kappa, materialize_grads=True
            )

    def counts_of_pairs(self, pairs: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Computes the expected counts of the natural parameters from those of all pairs of states.

        Args:
            pairs: (n, S, S) expected transitions between all pairs of states.
            at: (n,) numbers of the steps after the transitions.

        Returns:
            One tensor for each natural parameter.
        """
        leaves = tuple(value.detach().to(pairs.dtype).requires_grad_() for value in self.natural)
        with torch.enable_grad():
            matrix = self.with_natural(leaves).to_dense(at)
            return torch.autograd.grad(
                matrix, leaves, pairs.sum(0) if matrix.dim() == 2 else pairs, materialize_grads=True
            )

    def to_dense(self, at: Tensor) -> Tensor:
        """Returns the log-probabilities of the transitions into the steps `at` (n,).

        Their shape is (n, S, S), or (S, S) if they are the same for all steps.
        """
        unit = torch.eye(self.num_states, dtype=self.natural[0].dtype, device=self.natural[0].device)
        probs = self.predict(unit, at[:1].expand(len(unit)))
        possible = probs > 0  # The logarithm of zero has no gradient.
        return torch.where(possible, torch.where(possible, probs, 1.0).log(), -torch.inf)

    def restricted_to(self, at: Tensor) -> Operator:
        """Returns the operator for a batch that consists of the steps `at` of the present batch."""
        return self

    def _values(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class Dense(Operator):
    """A full transition matrix.

    log_probs: (S, S) log-probabilities. They are -inf for impossible transitions.
    """

    log_probs: Tensor

    @property
    def num_states(self) -> int:
        return self.log_probs.shape[0]

    @property
    def natural(self) -> tuple[Tensor, ...]:
        return (self.log_probs,)

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


_SUMMED_AT_ONCE = 1024  # number of messages whose sums over entries that are not kept are computed together


class _Complements(NamedTuple):
    """Sums over the complements of S groups of numbers out of S, without subtraction, which would lose precision.

    The complement of a group consists of the gaps between its members. The sums over all gaps are computed from a
    table. Level k of the table contains, for each block of 2^k numbers, the sums from each number to the middle of the
    block. The sum over a gap is the sum of two entries, taken from the level at which the middle of a block is inside
    the gap.

    group, first, second: (gaps,) group of each gap, and positions of its two entries in the table. The last entry of
        the table is zero.
    num_levels: Number of levels of the table, without the numbers themselves.
    """

    group: Tensor
    first: Tensor
    second: Tensor
    num_levels: int

    @classmethod
    def of(cls, groups: Tensor, members: Tensor, size: int) -> _Complements:
        """Creates the sums from the group and the number of each member. The members of a group must be distinct."""
        # Each group also gets a member before all numbers, so that every gap follows a member.
        every = torch.arange(size, device=groups.device) * (size + 1)
        keys = torch.cat([every, groups.flatten() * (size + 1) + members.flatten() + 1]).sort().values
        group, begin = keys // (size + 1), keys % (size + 1)
        following = torch.cat([keys[1:], keys.new_full((1,), size * (size + 1))])
        last = torch.where(following // (size + 1) == group, following % (size + 1) - 1, size) - 1
        levels = (size - 1).bit_length()
        padded, nothing = 1 << levels, (levels + 1) << levels
        # The level is the number of bits up to the highest bit in which the two ends of a gap differ.
        level = torch.frexp((begin ^ last).double()).exponent.long()
        empty = last < begin
        first = torch.where(empty, nothing, level * padded + begin)
        second = torch.where(empty | (begin == last), nothing, level * padded + last)
        return cls(group, first, second, levels)

    def sums(self, numbers: Tensor) -> Tensor:
        """Returns (n, S): for each row of `numbers` (n, S), the sums over the complements of all groups."""
        padded = torch.nn.functional.pad(numbers, (0, (1 << self.num_levels) - numbers.shape[1]))
        table = [padded]
        for level in range(1, self.num_levels + 1):
            halves = padded.reshape(len(numbers), 1 << (self.num_levels - level), 2, 1 << (level - 1))
            left, right = halves[:, :, 0].flip(-1).cumsum(-1).flip(-1), halves[:, :, 1].cumsum(-1)
            table.append(torch.stack([left, right], 2).flatten(1))
        entries = torch.cat([*table, numbers.new_zeros(len(numbers), 1)], 1)
        return torch.zeros_like(numbers).index_add(1, self.group, entries[:, self.first] + entries[:, self.second])


@dataclass(frozen=True)
class MostlyConstant(Operator):
    """A transition matrix with M separate entries in each row. All other entries of a row are equal.

    If the constants are -inf, the matrix is sparse.

    indices: (S, M) columns of the separate ("kept") entries, in ascending order.
    log_values: (S, M) log-probabilities of the kept entries.
    log_constants: (S,) log-probability of each of the other entries of a row.
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
        """The groups are, for each column, the rows that keep it."""
        rows = torch.arange(self.num_states, device=self.indices.device)[:, None].expand_as(self.indices)
        return _Complements.of(self.indices, rows, self.num_states)

    @cached_property
    def _kept(self) -> _Complements:
        """The groups are, for each row, the columns that it keeps."""
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
        values, constants = (logs.detach().exp().to(kept.dtype) for logs in (self.log_values, self.log_constants))
        return kept * values, rest * constants

    def counts_of_pairs(self, pairs: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        total = pairs.sum(0)
        return total.gather(1, self.indices), total.scatter(1, self.indices, 0.0).sum(1)

    def to_dense(self, at: Tensor) -> Tensor:
        return self.log_rows(slice(None))

    def log_rows(self, rows: slice) -> Tensor:
        """Returns (rows, S) log-probabilities of the transitions from some of the states."""
        full = self.log_constants[rows, None].expand(-1, self.num_states)
        return full.scatter(1, self.indices[rows], self.log_values[rows])


@dataclass(frozen=True)
class ShiftRegister(MostlyConstant):
    """A chain of K classes whose states are the most recent classes, so that an emission can depend on earlier ones.

    With L earlier classes there are S = K^(L + 1) states. State c_0 K^L + c_1 K^(L - 1) + ... + c_L means that the
    present class is c_0 and that c_l is the class l steps before. A state leads to K others. Use `of` to create it.
    """

    @classmethod
    def of(cls, log_probs: Tensor, order: int) -> ShiftRegister:
        """Creates the operator from (K, K) log-probabilities of the classes and the number L of earlier classes."""
        size = len(log_probs)
        states = torch.arange(size ** (order + 1), device=log_probs.device)
        present = states // size**order
        indices = torch.arange(size, device=log_probs.device) * size**order + (states // size)[:, None]
        return cls(indices, log_probs[present], log_probs.new_full((len(states),), -torch.inf))

    @property
    def num_classes(self) -> int:
        return self.indices.shape[1]

    @property
    def classes(self) -> Tensor:
        return torch.arange(self.num_states, device=self.indices.device) // (self.num_states // self.num_classes)


@dataclass(frozen=True)
class TimeVarying(Operator):
    """A transition matrix for each step.

    log_probs: (M, S, S) log-probabilities of M matrices.
    index: (steps,) number of the matrix of the transition *into* each step.
    """

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
    """Explicit durations, for hidden semi-Markov models.

    State k D + r means that the chain remains in class k for r more steps. A step takes K^2 + K D operations, because
    the transition matrix of all K D states is not formed. All states of a class have the same emission, so the evidence
    may be for the K classes.

    log_jumps: (K, K) log-probabilities of the next class at the end of a stay.
    log_durations: (K, D) log-probabilities of the duration of a stay, from 1 to D steps.
    """

    log_jumps: Tensor
    log_durations: Tensor

    @property
    def num_states(self) -> int:
        return self.log_durations.numel()

    @property
    def num_classes(self) -> int:
        return len(self.log_jumps)

    @property
    def classes(self) -> Tensor:
        size, longest = self.log_durations.shape
        return torch.arange(size, device=self.log_durations.device).repeat_interleave(longest)

    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        stays = alpha.reshape(len(alpha), *self.log_durations.shape)
        entering = stays[:, :, 0] @ self.log_jumps.exp()
        staying = torch.cat([stays[:, :, 1:], torch.zeros_like(stays[:, :, :1])], 2)
        return (staying + entering[:, :, None] * self.log_durations.exp()).flatten(1)
