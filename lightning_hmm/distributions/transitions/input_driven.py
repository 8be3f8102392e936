"""Transitions and first states whose probabilities depend on inputs, by multinomial logistic regression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Distribution, Transition, as_numbers, check_not_negative
from lightning_hmm.distributions.inputs import Inputs, with_ones
from lightning_hmm.distributions.iterative import MOST_HELD, Newton
from lightning_hmm.distributions.linear_predictors import ridge_curvature, softmax_curvature
from lightning_hmm.distributions.newton import Curvature
from lightning_hmm.distributions.rows import Initial
from lightning_hmm.inference.operators import TimeVarying
from lightning_hmm.sequences import Sequences


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


class InputDriven(LogisticRows, Transition):
    r"""Transition probabilities that depend on inputs.

    Use it if events or conditions that are observed change how states follow each other. The transition from state i
    *into* step t depends on the inputs :math:`x_t` of step t:

    .. math::
        P(z_t = j \mid z_{t-1} = i, x_t) =
        \frac{e^{b_{ij} + \beta_{ij} \cdot x_t}}{\sum_l e^{b_{il} + \beta_{il} \cdot x_t}}

    The coefficients :math:`\beta` have shape (K, K, P), the intercepts b have shape (K, K). The inputs of the first step
    of a sequence are not used. To make transitions depend on the previous step, shift the inputs by one step. All next
    states are treated alike, and the prior :math:`-\frac{s}{2} \sum (\lVert \beta_{ij} \rVert^2 + b_{ij}^2)` identifies
    the coefficients, whose sum over j is zero at the optimum. Standardize the inputs.

    The M-step stores the expected transitions of an epoch and runs Newton's method until it has converged; see
    `Iterative` for online EM and for large data. Steps with the same inputs share one matrix, so inputs with few
    distinct values are fast.

    Args:
        inputs: Number of inputs P of each step, or the list of the numbers of the inputs to use.
        coefficient_prior: Strength s of the ridge prior. It must be positive.
        most_held: Maximum number of expected transitions that are stored; see `Iterative`.
        learning_rate: Step size of a gradient step in online EM; see `Iterative`.

    Example:
        >>> import torch
        >>> from lightning_hmm import HMM, InputDriven
        >>> model = HMM(num_states=2, transition=InputDriven(inputs=1), num_symbols=3)
        >>> coefficients = [[[-1.0], [1.0]], [[0.0], [0.0]]]
        >>> intercept = [[0.0, 0.0], [-1.0, 1.0]]
        >>> model = model.set_parameters(transition={"coefficients": coefficients, "intercept": intercept})
        >>> model.transition.probs_at(torch.tensor([[0.0], [2.0]]))
        tensor([[[0.5000, 0.5000],
                 [0.1192, 0.8808]],
        <BLANKLINE>
                [[0.0180, 0.9820],
                 [0.1192, 0.8808]]], dtype=torch.float64)
    """

    option = "transition"
    no_matrix = "depend on inputs: see `model.transition.probs_at(inputs)`"

    def __init__(
        self,
        inputs: int | list[int],
        coefficient_prior: float = 1e-3,
        most_held: int = MOST_HELD,
        learning_rate: float = 0.1,
    ) -> None:
        super().__init__(most_held=most_held, learning_rate=learning_rate)
        self._prepare(inputs, coefficient_prior)
        self._distinct: tuple[Any, Tensor, Tensor] | None = None

    def allocate(self, restarts: int, num_states: int) -> None:
        self._allocate_rows(restarts, num_states, num_states)
        self.numbers_per_step = num_states**2

    @property
    def coefficients(self) -> Tensor:
        """(K, K, P) coefficients of the best restart."""
        return self.slopes[self.restart].detach()

    @property
    def intercept(self) -> Tensor:
        """(K, K) intercepts of the best restart. They are 0 at structural zeros."""
        return self.intercepts[self.restart].detach()

    def set(self, probs: Any = None, *, coefficients: Any = None, intercept: Any = None) -> None:
        """Sets parameters, to the same values in all restarts.

        Args:
            probs: A matrix of probabilities (K, K) for all inputs. It sets the coefficients to zero, and its zeros become
                structural zeros.
            coefficients: (K, K, P) coefficients.
            intercept: (K, K) intercepts.
        """
        given = {"coefficients": coefficients, "intercept": intercept}
        self._set({name: value for name, value in given.items() if value is not None} if probs is None else probs)

    def probs_at(self, inputs: Tensor) -> Tensor:
        """Returns the (N, K, K) transition probabilities of the best restart at inputs (N, P)."""
        rows = torch.as_tensor(inputs, dtype=torch.float64, device=self.slopes.device)
        return self.log_rows([self.coefficients, self.intercept], rows).exp()

    def matrix(self, restart: int) -> Tensor | None:
        return None

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> TimeVarying:
        inputs, index = self._distinct_inputs(batch)
        return TimeVarying(self.log_rows(natural, inputs), index)

    def _distinct_inputs(self, batch: Sequences | None) -> tuple[Tensor, Tensor]:
        """Returns the (M, P) distinct inputs of a batch and the (steps,) number of those of each step."""
        inputs = self.inputs.of(batch)
        assert batch is not None
        if self._distinct is None or self._distinct[0] is not batch.inputs:  # shared by the restarts and by `example`
            distinct, index = torch.unique(inputs, dim=0, return_inverse=True)
            if not len(distinct):
                distinct = inputs.new_zeros(1, inputs.shape[1])
            self._distinct = batch.inputs, distinct, index
        return self._distinct[1:]

    def example(self, batch: Sequences, posteriors: Tensor) -> tuple[Any, ...]:
        return self._distinct_inputs(batch)[0], posteriors

    def forget(self) -> None:
        super().forget()
        self._distinct = None


class InputDrivenInitial(LogisticRows, Initial):
    r"""The distribution of the first state, given the inputs of the first step.

    .. math:: P(z_1 = k \mid x_1) = \frac{e^{b_k + \beta_k \cdot x_1}}{\sum_l e^{b_l + \beta_l \cdot x_1}}

    The coefficients :math:`\beta` have shape (K, P) and the intercepts b have shape (K,). The prior and the M-step are
    those of `InputDriven`.

    Args:
        inputs: Number of inputs P of each step, or the list of the numbers of the inputs to use.
        coefficient_prior: Strength s of the ridge prior. It must be positive.
        most_held: Maximum number of posterior probabilities that are stored; see `Iterative`.
        learning_rate: Step size of a gradient step in online EM; see `Iterative`.

    Example:
        >>> from lightning_hmm import HMM, InputDrivenInitial
        >>> model = HMM(num_states=2, initial=InputDrivenInitial(inputs=1), num_symbols=3)
        >>> model = model.set_parameters(initial={"coefficients": [[-1.0], [1.0]], "intercept": [0.0, 0.0]})
        >>> model.initial.probs_at([[0.0], [2.0]])
        tensor([[0.5000, 0.5000],
                [0.0180, 0.9820]], dtype=torch.float64)
    """

    option = "initial"

    def __init__(
        self,
        inputs: int | list[int],
        coefficient_prior: float = 1e-3,
        most_held: int = MOST_HELD,
        learning_rate: float = 0.1,
    ) -> None:
        super().__init__(most_held=most_held, learning_rate=learning_rate)
        self._prepare(inputs, coefficient_prior)

    def allocate(self, restarts: int, num_states: int) -> None:
        self._allocate_rows(restarts, 1, num_states)

    @property
    def coefficients(self) -> Tensor:
        """(K, P) coefficients of the best restart."""
        return self.slopes[self.restart, 0].detach()

    @property
    def intercept(self) -> Tensor:
        """(K,) intercepts of the best restart. They are 0 at structural zeros."""
        return self.intercepts[self.restart, 0].detach()

    @property
    def probs(self) -> Tensor:
        raise AttributeError("The probabilities of the first state depend on inputs. Call `probs_at(inputs)`.")

    def probs_at(self, inputs: Any) -> Tensor:
        """Returns the (N, K) probabilities of the best restart at inputs (N, P) of first steps."""
        rows = torch.as_tensor(inputs, dtype=torch.float64, device=self.slopes.device)
        return self.log_rows([self.coefficients[None], self.intercept[None]], rows).exp()[:, 0]

    def set(self, probs: Any) -> None:
        """Sets the parameters, to the same values in all restarts.

        Args:
            probs: A dictionary with "coefficients" (K, P) or "intercept" (K,), or probabilities (K,), which set the
                coefficients to zero.
        """
        self._set(probs)

    def randomize(self, generator: torch.Generator) -> None:
        LogisticRows.randomize(self, generator)

    # Inference has one distribution of the first state. It is uniform, and the evidence of the first step of each
    # sequence contains the ratio of the probabilities to it.

    def log_first(self, natural: Sequence[Tensor]) -> Tensor:
        num_states = natural[0].shape[1]
        return natural[0].new_full((num_states,), -math.log(num_states))

    def first_evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Tensor:
        inputs = self.inputs.of(batch)[batch.first_steps]
        return self.log_rows(natural, inputs)[:, 0] + math.log(natural[0].shape[1])

    def example(self, batch: Sequences, posteriors: Tensor) -> tuple[Any, ...]:
        return self.inputs.of(batch)[batch.first_steps], posteriors.unsqueeze(1)
