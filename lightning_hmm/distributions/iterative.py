"""M-steps that need the data of a whole epoch, because no expected statistics of fixed size determine the estimate."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.distributions.base import Distribution
from lightning_hmm.distributions.free_entries import expand, first_of, gather, gather_matrices
from lightning_hmm.distributions.newton import Curvature, maximize_by_newton
from lightning_hmm.sequences import Sequences

MOST_HELD = 50_000_000


class Iterative(Distribution):
    r"""Base class of parts, emissions or transitions, with an iterative M-step on the data of an epoch.

    During an epoch of batch EM, `hold` stores each batch with its posterior probabilities. The M-step increases the
    expected log-likelihood

    .. math:: Q(\theta) = \sum_t \sum_k p(z_t = k \mid y) \log p(y_t \mid k, \theta)

    plus the log prior, summed over the batches and the ranks. In online EM, and if an epoch has more than `most_held`
    posterior probabilities, only the gradient of Q is accumulated, and the M-step is a single gradient step, which may
    decrease the objective.

    Subclasses implement `increase` and, unless they are emissions, `expected`. `Newton` implements `increase` for parts
    with few parameters.

    Args:
        *args: Forwarded to the next class in the order of inheritance.
        most_held: Maximum number of posterior probabilities that are stored on each rank, with 8 bytes each.
        learning_rate: Step size of a single step along the gradient of the mean log-likelihood.
        **options: Forwarded to the next class in the order of inheritance.
    """

    is_closed = False

    def __init__(self, *args: Any, most_held: int = MOST_HELD, learning_rate: float = 0.1, **options: Any) -> None:
        super().__init__(*args, **options)
        for name, value in {"most_held": most_held, "learning_rate": learning_rate}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"`{name}` must be a positive number, but is {value!r} instead.")
        self.most_held = most_held
        self.learning_rate = learning_rate
        self._held: list[tuple[int, tuple[Any, ...]]] = []
        self._num_held = 0
        self._is_announced = False
        self._gradients: dict[int, list[Tensor]] = {}  # of each restart: total of the posteriors, then the gradients

    # Implemented by subclasses

    @property
    @abstractmethod
    def num_restarts(self) -> int:
        """Number of restarts."""

    @abstractmethod
    def increase(self, restart: int, examples: Sequence[tuple[Any, ...]], weight: Tensor | float) -> None:
        """Increases the expected log-likelihood of the examples of all ranks plus the log prior, in place.

        Args:
            restart: Number of the restart.
            examples: The stored batches of this rank. There may be none.
            weight: Factor of the log prior.
        """

    def example(self, batch: Sequences, posteriors: Tensor) -> tuple[Any, ...]:
        """Returns what is stored of a batch; the posterior probabilities are the last entry."""
        return batch, posteriors

    def expected(self, natural: Sequence[Tensor], *example: Any) -> Tensor:
        """Returns the expected log-likelihood of an example, differentiable in the natural parameters.

        The default is that of an emission, whose example is a batch with its posterior probabilities.
        """
        batch, posteriors = example
        rows = self.evidence(natural, batch).rows()
        return torch.where(posteriors > 0, rows * posteriors, 0.0).sum()

    def prior_term(self, natural: Sequence[Tensor]) -> Tensor:
        """Returns the log prior density of one restart, up to a constant."""
        return natural[0].new_zeros(())

    def constrained(self, direction: list[Tensor]) -> list[Tensor]:
        """Returns the part of a change of the natural parameters that ties and frozen parameters admit."""
        return direction

    def increase_from(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        """Initializes the parameters of an emission by an M-step from guesses; see `Emission.start`."""
        # All ranks have the same sequences here, so the sum over the ranks contains each of them several times.
        times = self._owner[0].trainer.world_size if self._is_distributed else 1
        for restart, guess in enumerate(responsibilities):
            self.increase(restart, [self.example(sequences, guess)], float(times))
        self.is_set.fill_(True)

    # EM

    @property
    def num_statistics(self) -> int:
        return 0  # the M-step uses the batches that `hold` has stored

    def hold(self, restart: int, batch: Sequences, *gradients: Tensor) -> None:
        """Stores a batch for the M-step; in online EM, and above the limit, only the gradient.

        Args:
            restart: Number of the restart.
            batch: The batch.
            *gradients: Posterior probabilities: (steps, K) of the states for an emission, or the expected counts of the
                natural parameters of the operator for a transition.
        """
        example = self.example(batch, *(gradient.detach() for gradient in gradients))
        self._held.append((restart, example))
        self._num_held += example[-1].numel()
        online = bool(self._owner) and self._owner[0].discount is not None
        if online or self._gradients or self._num_held > self.most_held:
            self._announce(online)
            self._reduce()

    def _announce(self, online: bool) -> None:
        """Warns once that M-steps are gradient steps."""
        if not self._is_announced:
            reason = (
                "In online EM"
                if online
                else f"Because an epoch has more than {self.most_held} posterior probabilities (`most_held`)"
            )
            warnings.warn(
                f"{reason}, each M-step of {type(self).__name__} is a single gradient step with `learning_rate` "
                f"{self.learning_rate:g}, which may decrease the likelihood.",
                stacklevel=2,
            )
        self._is_announced = True

    def _reduce(self) -> None:
        """Replaces the stored batches by the gradient of their expected log-likelihood."""
        for restart, example in self._held:
            leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in self.natural(restart)]
            with torch.enable_grad():
                total = self.expected(leaves, *example)
                found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
            known = self._gradients.get(restart, self._no_gradients(restart))
            self._gradients[restart] = [
                before + part for before, part in zip(known, (example[-1].sum(), *found), strict=True)
            ]
        self._held, self._num_held = [], 0

    def _no_gradients(self, restart: int) -> list[Tensor]:
        natural = self.natural(restart)
        return [natural[0].new_zeros(()), *(torch.zeros_like(value) for value in natural)]

    def forget(self) -> None:
        """Discards stored batches, such as those of an interrupted run."""
        self._held, self._num_held, self._gradients = [], 0, {}

    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        if not (self._held or self._gradients or self._is_distributed):
            return torch.zeros((), dtype=torch.int64)
        # All ranks take the same branch, also if only some of them have exceeded the limit.
        if float(self._sum(torch.tensor(float(bool(self._gradients))))) > 0:
            self._reduce()
            for restart in range(self.num_restarts):
                self._step(restart, self._gradients.get(restart, self._no_gradients(restart)), weight)
        else:
            for restart in range(self.num_restarts):
                self.increase(restart, [example for number, example in self._held if number == restart], weight)
        self.forget()
        self.is_set.fill_(True)
        return torch.zeros((), dtype=torch.int64)

    def _step(self, restart: int, gradients: list[Tensor], weight: Tensor | float) -> None:
        """Makes one step along the gradient of the mean log-likelihood and log prior."""
        size, *total = (self._sum(part) for part in gradients)
        leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in self.natural(restart)]
        with torch.enable_grad():
            prior = weight * self.prior_term(leaves) + sum(leaf.sum() * 0 for leaf in leaves)
            slopes = torch.autograd.grad(prior, leaves)
        total = self.constrained([part + slope for part, slope in zip(total, slopes, strict=True)])
        with torch.no_grad():
            for value, part in zip(self.natural(restart), total, strict=True):
                value.add_(self.learning_rate * part / size.clamp(min=1))

    @property
    def _is_distributed(self) -> bool:
        return bool(self._owner) and self._owner[0]._trainer is not None and self._owner[0].trainer.world_size > 1

    def _sum(self, value: Tensor) -> Tensor:
        """Returns the sum of a tensor over the ranks."""
        return self._owner[0]._sum_over_ranks(value.clone()) if self._is_distributed else value

    def log_prior(self) -> Tensor:
        with torch.no_grad():
            return torch.stack(
                [self.prior_term(self.natural(restart)).double() for restart in range(self.num_restarts)]
            )


class Newton(Iterative):
    r"""Base class of parts whose M-step is Newton's method.

    The parameters of each state and column form a problem of M parameters of their own. Newton's method solves all
    problems jointly until it has converged. A step is halved until it does not decrease the objective, so that the
    M-step never does. Parameters that are tied are solved for together.

    Subclasses implement `pack`, `unpack`, `curvature` and `prior_curvature`. `free` contains, for each state and entry,
    the number of its free parameter, or -1 for a frozen entry; it is ``None`` if no parameter is tied or frozen.
    """

    free: Tensor | None = None  # (S, M)

    @abstractmethod
    def pack(self, natural: Sequence[Tensor]) -> Tensor:
        """Returns the natural parameters of one restart as (S, G, M): states, columns and entries."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Converts (S, G, M) entries to natural parameters. This is the inverse of `pack`."""

    @abstractmethod
    def curvature(self, packed: Tensor, *example: Any) -> Curvature:
        """Returns the expected log-likelihood of a batch as a function of the entries: value (S, G) and derivatives."""

    @abstractmethod
    def prior_curvature(self, packed: Tensor) -> Curvature:
        """Returns the log prior as a function of the entries: value (S, G) and derivatives."""

    def prior_term(self, natural: Sequence[Tensor]) -> Tensor:
        return self.prior_curvature(self.pack(natural)).value.sum()

    def constrained(self, direction: list[Tensor]) -> list[Tensor]:
        if self.free is None:
            return direction
        packed = self.pack(direction)
        free = self.free.to(packed.device)
        return self.unpack(expand(gather(packed, free), free, torch.zeros_like(packed)))

    @torch.no_grad()
    def increase(self, restart: int, examples: Sequence[tuple[Any, ...]], weight: Tensor | float) -> None:
        start = self.pack(self.natural(restart)).clone()
        free = None if self.free is None else self.free.to(start.device)
        if free is not None and bool((free < 0).all()):
            return

        def evaluate(packed: Tensor) -> Curvature:
            states, columns, size = packed.shape
            found = Curvature(*(packed.new_zeros(states, columns, *(size,) * order) for order in range(3)))
            for example in examples:
                found = found.plus(self.curvature(packed, *example))
            if self._is_distributed:
                total = self._sum(torch.cat([part.flatten() for part in found]))
                pieces = total.split([part.numel() for part in found])
                found = Curvature(*(piece.view_as(part) for piece, part in zip(pieces, found, strict=True)))
            return found.plus(Curvature(*(weight * part for part in self.prior_curvature(packed))))

        if free is None:
            packed = maximize_by_newton(evaluate, start)
        else:

            def evaluate_free(values: Tensor) -> Curvature:
                found = evaluate(expand(values, free, start))
                return Curvature(found.value.sum(0), gather(found.gradient, free), gather_matrices(found.hessian, free))

            packed = expand(maximize_by_newton(evaluate_free, first_of(start, free)), free, start)
        for value, new in zip(self.natural(restart), self.unpack(packed), strict=True):
            value.copy_(new)
