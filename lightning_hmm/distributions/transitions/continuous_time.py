"""Transitions in continuous time, for observations at irregular times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Transition, as_numbers, check_not_negative
from lightning_hmm.distributions.transitions.generator_exponential import TERMS, generator_exponential
from lightning_hmm.inference.operators import TimeVarying
from lightning_hmm.sequences import Sequences

_NO_TIMES = (
    "ContinuousTime transitions depend on the times of the steps, but the sequences have none. Give `times`, as in "
    "`Sequences.from_list(values, times=...)` or `model.sample(times=[[0.0, 1.5, 2.0]])`."
)


class ContinuousTime(Transition):
    r"""Transitions of a Markov process in continuous time, which is observed at irregular times.

    .. math:: P(t_2 - t_1) = \exp(Q (t_2 - t_1)), \qquad Q_{ij} = q_{ij}, \; Q_{ii} = -\textstyle\sum_j q_{ij}

    The rates :math:`q_{ij}` are per unit of the `times` of the sequences. Steps at the same time have the same state.
    The E-step computes the expected number of jumps :math:`N_{ij}` and the expected time :math:`T_i` in each state as
    derivatives of the log-likelihood with respect to :math:`\log q_{ij}` and :math:`-q_{ii}`. The M-step is

    .. math:: \hat q_{ij} = (N_{ij} + \alpha) / (T_i + \beta)

    where :math:`\alpha` is the `pseudocount` and :math:`\beta` is the `pseudotime` of a Gamma prior with the density
    :math:`q_{ij}^\alpha e^{-\beta q_{ij}}`. Rates of zero are structural zeros, which training leaves unchanged.

    `predict_next` continues with the gap between the last two steps of a sequence.

    Args:
        pseudocount: Number of jumps that the prior adds to each transition, in counts of the whole data set.
        pseudotime: Time that the prior adds to each state.
        allowed: (K, K) zeros and ones: the transitions that are possible in an instant, such as
            ``[[0, 1, 1], [1, 0, 1], [0, 0, 0]]`` for two stages of a disease and death. The diagonal is not used. By
            default all are possible.
        exact: States whose entry times are known exactly, such as death. They are absorbing.
            A step at which such a state is certain, by a label or by an observation that only this state can emit,
            contributes the density :math:`\sum_j P_{ij} q_{jd}` of the time of entry. At other steps it contributes the
            probability :math:`P_{id}` of having been entered at any time before.

    References:
        Jackson: Multi-state models for panel data: the msm package for R, 2011 (there, `exact` is `deathexact`).

    Example:
        >>> from lightning_hmm import HMM, ContinuousTime, Sequences
        >>> model = HMM(2, transition=ContinuousTime(), num_symbols=2)
        >>> model = model.set_parameters([1, 0], [[0, 0.5], [0, 0]], [[1, 0], [0, 1]])
        >>> sequences = Sequences.from_list([[0, 0, 1]], times=[[0.0, 1.0, 3.0]])
        >>> round(model.score(sequences).exp().item(), 4)  # exp(-0.5) (1 - exp(-1))
        0.3834
    """

    no_matrix = "depend on the time between steps; `transition.rates` holds the rates"

    def __init__(
        self,
        pseudocount: float = 0.0,
        pseudotime: float = 0.0,
        allowed: list[list[int]] | None = None,
        exact: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_not_negative(pseudocount=pseudocount, pseudotime=pseudotime)
        self.prior = {"pseudocount": pseudocount, "pseudotime": pseudotime}
        self.allowed, self.exact = allowed, tuple(exact)
        self.needs_known_states = bool(self.exact)

    def allocate(self, restarts: int, num_states: int) -> None:
        possible = ~torch.eye(num_states, dtype=torch.bool)
        for state in self.exact:
            if isinstance(state, bool) or not isinstance(state, int) or not 0 <= state < num_states:
                raise ValueError(f"`exact` must hold states from 0 to {num_states - 1}, but holds {state!r} instead.")
            possible[state] = False
        if self.allowed is not None:
            allowed = as_numbers("allowed", self.allowed, possible.device)
            if allowed.shape != possible.shape or not bool(((allowed == 0) | (allowed == 1)).all()):
                raise ValueError(
                    f"`allowed` must hold zeros and ones of shape {tuple(possible.shape)}, "
                    f"but is {self.allowed!r} instead."
                )
            possible &= allowed > 0
        self._begin_allocation()
        self.numbers_per_step = 2 * TERMS * num_states**2
        self.log_rates = nn.Parameter(torch.where(possible, 0.0, -torch.inf).double().repeat(restarts, 1, 1))
        self.exit_rates = nn.Parameter(possible.sum(1).double().repeat(restarts, 1))
        self.register_buffer("possible", possible.repeat(restarts, 1, 1))

    # Parameters

    @property
    def rates(self) -> Tensor:
        """(K, K) rate matrix Q, whose rows sum to zero."""
        return self.log_rates[self.restart].detach().exp() - torch.diag(self.exit_rates[self.restart].detach())

    @torch.no_grad()
    def set(self, rates: Any) -> None:
        """Sets the (K, K) rates, to the same values in all restarts. Zeros become structural zeros.

        The diagonal is either zero, or minus the sum of the other entries of the row.
        """
        rates = as_numbers("rates", rates, self.log_rates.device)
        shape = self.log_rates.shape[1:]
        if rates.shape != shape:
            raise ValueError(f"`rates` must have shape {tuple(shape)}, but has {tuple(rates.shape)} instead.")
        diagonal, rates = rates.diagonal(), rates - torch.diag(rates.diagonal())
        wrong = ~((rates >= 0) & rates.isfinite())
        if bool(wrong.any()):
            i, j = torch.nonzero(wrong)[0].tolist()
            raise ValueError(
                f"`rates` must not be negative off the diagonal, but the entry at ({i}, {j}) is {float(rates[i, j]):g} "
                "instead."
            )
        sums = rates.sum(1)
        wrong = ~((diagonal == 0) | ((diagonal + sums).abs() <= 1e-6 * sums))
        if bool(wrong.any()):
            i = int(torch.nonzero(wrong)[0])
            raise ValueError(
                "`rates` must have a diagonal of zeros, or of minus the sum of the other entries of the row, "
                f"but the entry at ({i}, {i}) is {float(diagonal[i]):g} and that sum is {float(sums[i]):g}."
            )
        for state in self.exact:
            if float(sums[state]) > 0:
                raise ValueError(
                    f"`rates` from a state of `exact` must be zero, but those from state {state} sum to "
                    f"{float(sums[state]):g}."
                )
        self._store(rates.expand_as(self.log_rates))
        self.possible.copy_(rates > 0)
        self.is_set.fill_(True)

    def _store(self, rates: Tensor) -> None:
        self.log_rates.copy_(rates.log())
        self.exit_rates.copy_(rates.sum(-1))

    @property
    def is_started(self) -> bool:
        return bool(self.is_set)

    @torch.no_grad()
    def start(self, sequences: Sequences, generator: torch.Generator) -> None:
        """Draws rates such that about one jump in two is seen between steps with the mean gap."""
        self.check(sequences)
        later, gaps = self._gaps(sequences.counted())
        gaps = gaps[later]
        mean = float(gaps.mean()) if len(gaps) else 0.0
        # torch.distributions takes no generator, so numpy draws the variates, with a seed from the generator.
        seed = int(torch.randint(2**62, (), generator=generator))
        draws = torch.from_numpy(np.random.default_rng(seed).gamma(2.0, size=tuple(self.log_rates.shape)))
        draws = torch.where(self.possible.cpu(), draws, 0.0).to(self.log_rates.device)
        exits = draws.sum(-1, keepdim=True)
        self._store(draws / torch.where(exits > 0, exits, 1.0) * (0.5 / mean if mean > 0 else 1.0))
        self.is_set.fill_(True)

    # Chain

    def check(self, sequences: Sequences) -> None:
        if sequences.times is None and sequences.num_steps:
            raise ValueError(_NO_TIMES)

    def _gaps(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns which steps are not the first of a sequence, and the (steps,) time since the step before."""
        times = sequences.times
        assert times is not None
        later = torch.ones(len(times), dtype=torch.bool, device=times.device)
        later[sequences.offsets[:-1][sequences.lengths > 0].to(times.device)] = False
        gaps = torch.zeros_like(times)
        gaps[1:] = times.diff()
        return later, torch.where(later, gaps, 0.0)

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> TimeVarying:
        log_rates, exit_rates = natural
        if batch is None:
            raise ValueError(_NO_TIMES)
        self.check(batch)
        if not batch.num_steps:
            return TimeVarying(log_rates[None], torch.zeros(0, dtype=torch.int64, device=log_rates.device))
        _, gaps = self._gaps(batch)
        distinct, index = torch.unique(gaps, return_inverse=True)
        rates = log_rates.exp()
        probs = generator_exponential(rates - torch.diag(exit_rates), distinct.to(rates))
        possible = probs > 0  # The logarithm of zero has no gradient.
        log_probs = torch.where(possible, torch.where(possible, probs, 1.0).log(), -torch.inf)
        if self.exact and batch.labels is not None:
            log_probs = torch.cat([log_probs, self._log_densities(log_probs, log_rates)])
            entered = torch.isin(batch.labels, torch.tensor(self.exact, device=batch.labels.device))
            index = index + len(distinct) * entered
        return TimeVarying(log_probs, index)

    def _log_densities(self, log_probs: Tensor, log_rates: Tensor) -> Tensor:
        """Returns (M, K, K) matrices for steps in a state of `exact`: the density of entering it at that time."""
        exact = torch.zeros(len(log_rates), dtype=torch.bool, device=log_rates.device)
        exact[list(self.exact)] = True
        entering = log_probs.exp() @ log_rates.exp()  # The rates from absorbing states are zero.
        possible = exact & (entering > 0)
        entering = torch.where(possible, torch.where(possible, entering, 1.0).log(), -torch.inf)
        stays = torch.diag(exact)
        return torch.where(stays, log_probs, entering)

    @property
    def tables(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        labels = {"title": "Rates per unit of time", "xlabel": "to state", "ylabel": "from state"}
        return {"rates": (self.rates.clamp(min=0), labels)}

    def matrix(self, restart: int) -> None:
        return None

    # EM

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        jumps, exits = statistics
        times = -exits + self.prior["pseudotime"] * weight  # the time in each state
        allowed = self.log_rates > -torch.inf
        counts = torch.where(allowed, jumps.clamp(min=0) + self.prior["pseudocount"] * weight, 0.0)
        seen = times > 0
        updated = counts / torch.where(seen, times, 1.0)[..., None]
        self._store(torch.where(seen[..., None], updated, self.log_rates.exp()))
        return (~seen & allowed.any(-1)).sum()

    def log_prior(self) -> Tensor:
        finite = torch.where(self.log_rates > -torch.inf, self.log_rates, 0.0).detach()
        exits = self.exit_rates.detach()
        return self.prior["pseudocount"] * finite.flatten(1).sum(1) - self.prior["pseudotime"] * exits.sum(1)

    def num_free_parameters(self, restart: int) -> int:
        return int(self.possible[restart].sum())
