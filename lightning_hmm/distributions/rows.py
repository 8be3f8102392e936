"""Rows of probabilities, the base of first states, full transition matrices and categorical emissions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Distribution, as_numbers, check_not_negative
from lightning_hmm.inference.cpu.updates import normalize_rows
from lightning_hmm.sequences import Sequences

_FEW = 1 << 16  # number of entries up to which the compiled M-step, which runs on one thread, is faster


class CategoricalRows(Distribution):
    r"""Rows of probabilities, each of which sums to one. The parameters are log-probabilities.

    .. math::
        \partial L / \partial \log p_{ij} = E[n_{ij}], \qquad
        \hat p_{ij} = (n_{ij} + \kappa) / \sum_j (n_{ij} + \kappa)

    The Dirichlet prior has the pseudocount :math:`\kappa` for each entry that is not a structural zero. A
    log-probability of -inf is a structural zero, which training and the prior leave unchanged.

    This is the base class of `Initial`, `Full` and `Categorical`.

    Args:
        pseudocount: Pseudocount of the Dirichlet prior, in counts of the whole data set.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions import Initial
        >>> rows = Initial(pseudocount=1.0)
        >>> rows.allocate(restarts=1, num_states=2)
        >>> rows_without_counts = rows.maximize([torch.tensor([[3.0, 0.0]])])
        >>> rows.probs
        tensor([0.8000, 0.2000], dtype=torch.float64)
    """

    option = "probs"  # name of the parameter in error messages
    # Entries that are not structural zeros. An entry whose estimate is zero is still a free parameter.
    possible: Tensor
    has_tied_rows = False  # whether all rows are the same
    has_frozen_rows = False  # whether training leaves the rows unchanged

    def __init__(self, pseudocount: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        check_not_negative(pseudocount=pseudocount)
        self.prior = {"pseudocount": pseudocount}

    def _allocate_rows(self, *shape: int) -> None:
        self._begin_allocation()
        self.log_probs = nn.Parameter(torch.full(shape, 1.0 / shape[-1], dtype=torch.float64).log())
        self.register_buffer("possible", torch.ones(shape, dtype=torch.bool))

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return (self.log_probs[restart],)

    @property
    def num_statistics(self) -> int:
        return 1

    @property
    def probs(self) -> Tensor:
        """Copy of the probabilities of the best restart."""
        return self.log_probs[self.restart].detach().exp()

    @torch.no_grad()
    def set(self, probs: Any) -> None:
        """Sets the probabilities, whose rows must sum to one. Zeros become structural zeros."""
        probs = as_numbers(self.option, probs, self.log_probs.device)
        shape = self.log_probs.shape
        if probs.shape not in (shape, shape[1:]):
            raise ValueError(
                f"`{self.option}` must have shape {tuple(shape[1:])}, but has {tuple(probs.shape)} instead."
            )
        probs = probs.expand(shape)
        if self.has_tied_rows and bool((probs != probs[:, :1]).any()):
            raise ValueError(
                f"`{self.option}` must be the same for all states because it is tied, but the states differ."
            )
        if not bool((probs >= 0).all()):  # also true for NaN
            where = tuple(torch.nonzero(~(probs >= 0))[0].tolist())
            raise ValueError(
                f"`{self.option}` must hold probabilities, "
                f"but the entry at {where[1:]} is {float(probs[where])} instead."
            )
        sums = probs.sum(-1)
        if not bool(((sums - 1).abs() < 1e-6).all()):
            where = tuple(torch.nonzero((sums - 1).abs() >= 1e-6)[0].tolist())
            row = f"row {where[-1]} sums" if len(where) > 1 else "it sums"
            raise ValueError(
                f"`{self.option}` rows must sum to 1, but {row} to {float(sums[where]):.6g} instead. Normalize it."
            )
        self.log_probs.copy_((probs / sums[..., None]).log())
        self.possible.copy_(probs > 0)
        self.is_set.fill_(True)

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws each row uniformly from the probability simplex. Structural zeros are left unchanged."""
        # torch.distributions takes no generator, so numpy draws the Gamma variates, with a seed from the generator.
        seed = int(torch.randint(2**62, (), generator=generator))
        draws = np.random.default_rng(seed).gamma(1.0, size=tuple(self.log_probs.shape))
        weights = torch.from_numpy(np.maximum(draws, 1e-12)).to(self.log_probs.device)
        weights = torch.where(self.log_probs == -torch.inf, 0.0, weights)
        weights = weights[:, :1].expand_as(weights) if self.has_tied_rows else weights
        self.log_probs.copy_((weights / weights.sum(-1, keepdim=True)).log())
        self.is_set.fill_(True)

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        (counts,) = statistics
        if self.has_frozen_rows:
            return (counts.sum(-1) == 0).sum()
        values = self.log_probs.detach()
        is_small = (
            isinstance(weight, float)
            and values.is_cpu
            and values.dtype == counts.dtype == torch.float64
            and values.numel() <= _FEW
        )
        if is_small and not self.has_tied_rows:
            row_first = np.arange(0, values.numel() + 1, values.shape[-1])
            rows, counted = values.view(-1).numpy(), counts.detach().reshape(-1).numpy()
            added = self.prior["pseudocount"] * weight
            return torch.tensor(normalize_rows(0, len(row_first) - 1, row_first, rows, counted, 1.0, added, True))
        if self.has_tied_rows:
            counts = counts.sum(1, keepdim=True).expand_as(counts)
        allowed = self.log_probs > -torch.inf
        weights = torch.where(allowed, counts + self.prior["pseudocount"] * weight, torch.zeros_like(counts))
        total = weights.sum(-1, keepdim=True)
        seen = total > 0
        updated = (weights / torch.where(seen, total, torch.ones_like(total))).log()
        self.log_probs.copy_(torch.where(seen, updated, self.log_probs))
        return (~seen).sum()

    def log_prior(self) -> Tensor:
        finite = torch.where(self.log_probs > -torch.inf, self.log_probs, torch.zeros_like(self.log_probs)).detach()
        finite = finite[:, :1] if self.has_tied_rows else finite
        return self.prior["pseudocount"] * finite.flatten(1).sum(1)

    def num_free_parameters(self, restart: int) -> int:
        if self.has_frozen_rows:
            return 0
        possible = self.possible[restart, :1] if self.has_tied_rows else self.possible[restart]
        return int(possible.sum()) - possible.numel() // possible.shape[-1]


class Initial(CategoricalRows):
    """The distribution of the first state of a sequence.

    Args:
        pseudocount: Pseudocount of a Dirichlet prior, in counts of the whole data set.
        start: Initial values for training: "random" draws them from the probability simplex, "uniform" gives the same
            probability to each state, and "first" makes all states but the first impossible.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions import Initial
        >>> initial = Initial(start="uniform")
        >>> initial.allocate(restarts=1, num_states=4)
        >>> initial.randomize(torch.Generator())
        >>> initial.probs
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """

    option = "initial"

    def __init__(self, pseudocount: float = 0.0, start: Literal["random", "uniform", "first"] = "random") -> None:
        super().__init__(pseudocount)
        if start not in ("random", "uniform", "first"):
            raise ValueError(f"`start` must be random, uniform or first, but is {start!r} instead.")
        self.start = start

    def randomize(self, generator: torch.Generator) -> None:
        """Draws random initial values, or sets those that `start` defines."""
        size = self.log_probs.shape[-1]
        if self.start == "random":
            super().randomize(generator)
        elif self.start == "uniform":
            self.set(torch.full((size,), 1 / size, dtype=torch.float64))
        else:
            self.set(torch.eye(size, dtype=torch.float64)[0])

    def allocate(self, restarts: int, num_states: int) -> None:
        """Creates the parameters."""
        self._allocate_rows(restarts, num_states)

    def log_first(self, natural: Sequence[Tensor]) -> Tensor:
        """Returns the (K,) log-probabilities of the first state, the same for all sequences."""
        return natural[0]

    def first_evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Tensor | None:
        """Returns log-factors of the probabilities of `log_first` that differ between sequences.

        They are added to the evidence of the first steps.

        Returns:
            One row of K factors for each sequence that is not empty, or ``None`` if there are no factors.
        """
        return None
