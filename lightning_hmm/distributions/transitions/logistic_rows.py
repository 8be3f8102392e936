"""Rows of probabilities that depend on inputs, by multinomial logistic regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Distribution, as_numbers, check_not_negative
from lightning_hmm.distributions.inputs import Inputs, with_ones
from lightning_hmm.distributions.iterative import Newton
from lightning_hmm.distributions.linear_predictors import ridge_curvature, softmax_curvature
from lightning_hmm.distributions.newton import Curvature


class LogisticRows(Newton):
    """Rows of probabilities that are computed from inputs, the base of `InputDriven` and `InputDrivenInitial`.

    The row i has the probabilities softmax over j of ``intercept[i, j] + coefficients[i, j] @ inputs``.
    """

    option: str  # name of the part in error messages
    inputs: Inputs
    slopes: nn.Parameter  # (restarts, rows, K, P)
    intercepts: nn.Parameter  # (restarts, rows, K)
    possible: Tensor  # (rows, K), false at structural zeros
    needs_inputs = True

    def _prepare(self, inputs: int | list[int], coefficient_prior: float) -> None:
        check_not_negative(coefficient_prior=coefficient_prior)
        if coefficient_prior == 0:
            raise ValueError(
                "`coefficient_prior` must be positive, because the prior identifies the coefficients, but is 0."
            )
        self.inputs = Inputs(inputs, f"distribution of `{self.option}`")
        self.prior = {"coefficient_prior": coefficient_prior}

    def _allocate_rows(self, *shape: int) -> None:
        self._begin_allocation()
        rows, num_states = shape[1:]
        self.slopes = nn.Parameter(torch.zeros(*shape, len(self.inputs), dtype=torch.float64))
        self.intercepts = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("possible", torch.ones(rows, num_states, dtype=torch.bool))

    @property
    def num_restarts(self) -> int:
        return len(self.slopes)

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return Distribution.natural(self, restart)

    def log_rows(self, natural: Sequence[Tensor], inputs: Tensor) -> Tensor:
        """Returns the (M, rows, K) log-probabilities at inputs (M, P)."""
        slopes, intercepts = natural
        scores = (inputs @ slopes.flatten(0, 1).T).unflatten(1, intercepts.shape) + intercepts
        return scores.masked_fill(~self.possible, -torch.inf).log_softmax(-1)

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Sets the coefficients to zero, and draws the rows of probabilities uniformly from the simplex."""
        uniform = torch.rand(self.intercepts.shape, generator=generator, dtype=torch.float64).clamp(min=1e-12)
        logs = (-uniform.log()).log()  # logarithms of standard exponential variates
        self.intercepts.copy_((logs - logs.mean(-1, keepdim=True)).masked_fill(~self.possible.cpu(), 0.0))
        self.slopes.zero_()
        self.is_set.fill_(True)

    @torch.no_grad()
    def _set(self, given: Any) -> None:
        """Sets the parameters of all restarts; see `InputDriven.set`."""
        if not isinstance(given, Mapping):
            probs = as_numbers(self.option, given, self.slopes.device)
            shape = tuple(self.intercepts.shape[1:])
            if probs.numel() != self.possible.numel() or probs.shape[-1] != shape[-1]:
                wanted = shape if shape[0] > 1 else shape[1:]
                raise ValueError(f"`{self.option}` must have shape {wanted}, but has {tuple(probs.shape)} instead.")
            probs = probs.view(shape)
            if not bool((probs >= 0).all()) or not bool(((probs.sum(-1) - 1).abs() < 1e-6).all()):
                raise ValueError(f"`{self.option}` must hold probabilities, and its rows must sum to 1.")
            self.possible.copy_(probs > 0)
            given = {
                "coefficients": torch.zeros_like(self.slopes[0]),
                "intercept": torch.where(probs > 0, probs, 1).log(),
            }
        for name, value in given.items():
            if name not in ("coefficients", "intercept"):
                raise ValueError(
                    f"`{self.option}` has the parameters coefficients and intercept, but {name!r} was given."
                )
            parameter = self.slopes if name == "coefficients" else self.intercepts
            number = as_numbers(name, value, parameter.device)
            if number.numel() != parameter[0].numel() or tuple(number.shape) not in (
                tuple(parameter.shape[1:]),
                tuple(parameter.shape[2:]),
            ):
                wanted = tuple(parameter.shape[1:] if parameter.shape[1] > 1 else parameter.shape[2:])
                raise ValueError(f"`{name}` must have shape {wanted}, but has {tuple(number.shape)} instead.")
            if not bool(number.isfinite().all()):
                raise ValueError(
                    f"`{name}` must be finite. Give zeros of a matrix of probabilities to make transitions impossible."
                )
            parameter.copy_(number.view(parameter.shape[1:]))
        self.is_set.fill_(True)

    # M-step. A problem has the coefficients and the intercepts of one row.

    def pack(self, natural: Sequence[Tensor]) -> Tensor:
        return torch.cat([natural[0], natural[1].unsqueeze(-1)], -1).flatten(1).unsqueeze(1)

    def unpack(self, packed: Tensor) -> list[Tensor]:
        entries = packed.view(*self.possible.shape, -1)
        return [entries[..., :-1], entries[..., -1]]

    def expected(self, natural: Sequence[Tensor], *example: Any) -> Tensor:
        inputs, counts = example
        logs = self.log_rows(natural, inputs)
        return torch.where(counts > 0, logs.masked_fill(counts <= 0, 0.0) * counts, 0.0).sum()

    def curvature(self, packed: Tensor, *example: Any) -> Curvature:
        inputs, counts = example
        coefficients = packed.view(*self.possible.shape, -1)
        found = softmax_curvature(coefficients, with_ones(inputs), counts.double(), self.possible)
        return Curvature(*(part.unsqueeze(1) for part in found))

    def prior_curvature(self, packed: Tensor) -> Curvature:
        return ridge_curvature(packed, self.prior["coefficient_prior"])

    def num_free_parameters(self, restart: int) -> int:
        return int((self.possible.sum(1) - 1).sum()) * (len(self.inputs) + 1)
