"""Transitions of hidden semi-Markov models, with explicit distributions of the duration of a stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_hmm.distributions.base import Transition, as_numbers, check_not_negative
from lightning_hmm.distributions.durations import FAMILIES, fitted, log_probs_of
from lightning_hmm.distributions.rows import CategoricalRows
from lightning_hmm.inference.operators import Duration, MostlyConstant, Operator
from lightning_hmm.sequences import Sequences

DurationFamily = Literal["categorical", "poisson", "negative_binomial", "geometric"]


class _Rows(CategoricalRows):
    """Rows of probabilities of a transition."""

    def __init__(self, option: str, pseudocount: float) -> None:
        super().__init__(pseudocount)
        self.option = option


class Durations(Transition):
    r"""Transitions of a hidden semi-Markov model: the duration of a stay in a state has a distribution of its own.

    .. math:: d \sim p_k(d), \; 1 \le d \le D, \qquad z' \mid z = k \sim J_k, \; J_{kk} = 0

    The chain stays in state k for d steps and then jumps to another state. The first stay begins at the first step of a
    sequence. The last stay is right-censored: it may continue after the end of the sequence. Use it instead of `Full`
    if stays have a typical length; the durations of `Full` are geometric. A step takes :math:`K^2 + K D` operations.

    The M-step uses the expected numbers of jumps and of complete durations, :math:`n_{kd}`, in which the censored part
    of a last stay is its expectation. Both have Dirichlet priors. Durations are either free ("categorical"), or
    :math:`d - 1` follows a family of distributions that is truncated to 0 to D - 1 and normalized,

    .. math:: p_k(d) = f_k(d - 1) / \textstyle\sum_{x < D} f_k(x)

    whose parameters maximize :math:`\sum_d (n_{kd} + \kappa) \log p_k(d)` by safeguarded Newton steps (Fisher scoring):
    "poisson" with `rate`; "geometric" with `probs`; "negative_binomial" with `total_count` and `probs`. The parameters
    are those of `torch.distributions`, before the truncation.

    Args:
        max_duration: Longest duration D, in steps.
        duration: Family of the durations: "categorical", "poisson", "negative_binomial" or "geometric".
        pseudocount: Pseudocount of a Dirichlet prior on the jumps from each state, in counts of the whole data set.
        duration_pseudocount: Pseudocount :math:`\kappa` of a Dirichlet prior on the durations in each state. With a
            value of zero, durations without counts get a probability of zero, and parameters may become infinite.

    Example:
        >>> from lightning_hmm import HMM, Durations
        >>> model = HMM(2, transition=Durations(max_duration=3), num_symbols=2)
        >>> durations = [[0.1, 0.8, 0.1], [0.0, 0.0, 1.0]]
        >>> model = model.set_parameters(transition={"jumps": [[0, 1], [1, 0]], "durations": durations})
        >>> model.transition.mean_durations
        tensor([2., 3.], dtype=torch.float64)
        >>> model.set_parameters(initial=[0, 1], emission=[[1, 0], [0, 1]]).sample(length=7).tolist()
        [[1, 1, 1, 0, 0, 0, 1]]
    """

    no_matrix = (
        "depend on the time since the last jump; `transition.jump_probs` and `transition.duration_probs` hold them"
    )

    def __init__(
        self,
        max_duration: int,
        duration: DurationFamily = "categorical",
        pseudocount: float = 0.0,
        duration_pseudocount: float = 1e-3,
    ) -> None:
        super().__init__()
        check_not_negative(pseudocount=pseudocount, duration_pseudocount=duration_pseudocount)
        if isinstance(max_duration, bool) or not isinstance(max_duration, int) or max_duration < 1:
            raise ValueError(f"`max_duration` must be a whole number of at least 1, but is {max_duration!r} instead.")
        if duration not in get_args(DurationFamily):
            raise ValueError(
                f"`duration` must be one of {', '.join(get_args(DurationFamily))}, but is {duration!r} instead."
            )
        self.max_duration, self.duration = max_duration, duration
        self.prior = {"pseudocount": pseudocount, "duration_pseudocount": duration_pseudocount}
        self.jumps = _Rows("jumps", pseudocount)
        self.durations = _Rows("durations", duration_pseudocount)

    def allocate(self, restarts: int, num_states: int) -> None:
        if num_states < 2:
            raise ValueError(
                f"`num_states` must be at least 2 with Durations transitions, but is {num_states} instead."
            )
        self._begin_allocation()
        self.jumps._allocate_rows(restarts, num_states, num_states)
        self.durations._allocate_rows(restarts, num_states, self.max_duration)
        same = torch.eye(num_states, dtype=torch.bool)
        with torch.no_grad():
            self.jumps.log_probs.masked_fill_(same, -torch.inf).copy_(self.jumps.log_probs.log_softmax(-1))
        self.jumps.possible &= ~same
        if self.duration != "categorical":
            self.register_buffer(
                "parameters_of_durations",
                torch.zeros(restarts, num_states, len(self._family.names), dtype=torch.float64),
            )

    def belong_to(self, model: Any) -> None:
        super().belong_to(model)
        self.jumps.belong_to(model)
        self.durations.belong_to(model)

    @property
    def _family(self) -> Any:
        return FAMILIES[self.duration]

    # Parameters

    @property
    def jump_probs(self) -> Tensor:
        """(K, K) probabilities of the next state at the end of a stay."""
        return self.jumps.probs

    @property
    def duration_probs(self) -> Tensor:
        """(K, D) probabilities of the durations 1 to D."""
        return self.durations.probs

    @property
    def mean_durations(self) -> Tensor:
        """(K,) means of the durations, in steps."""
        probs = self.duration_probs
        return probs @ torch.arange(1, self.max_duration + 1, dtype=probs.dtype, device=probs.device)

    @property
    def duration_parameters(self) -> dict[str, Tensor]:
        """Parameters of the family of durations by name, (K,) each. Categorical durations have none."""
        if self.duration == "categorical":
            return {}
        values = self._family.values(self.parameters_of_durations[self.restart])
        return dict(zip(self._family.names, values.unbind(-1), strict=True))

    @torch.no_grad()
    def set(self, jumps: Any = None, durations: Any = None) -> None:
        """Sets parameters, to the same values in all restarts. Those that are not given keep their values.

        Args:
            jumps: (K, K) probabilities of the next state, with zeros on the diagonal.
            durations: (K, D) probabilities of the durations, or a dictionary of the parameters of their family, such as
                ``{"rate": [3.0, 5.0]}``. For a family with parameters, probabilities are approximated: the parameters
                maximize their expected log-likelihood.
        """
        if jumps is not None:
            stays = as_numbers("jumps", jumps, self.jumps.log_probs.device)
            stays = stays.diagonal() if stays.dim() == 2 else stays.new_zeros(1)
            if bool((stays != 0).any()):
                state = int(torch.nonzero(stays)[0])
                raise ValueError(
                    "`jumps` must have zeros on the diagonal, because a stay ends with a jump to another state, "
                    f"but the entry at ({state}, {state}) is {float(stays[state]):g} instead. "
                    "Describe longer stays by `durations`."
                )
            self.jumps.set(jumps)
        if isinstance(durations, Mapping):
            self._set_family(durations)
        elif durations is not None:
            self.durations.set(durations)
            if self.duration != "categorical":
                self._fit(self.durations.log_probs.exp())
        self.is_set.fill_(True)

    def _set_family(self, values: Mapping[str, Any]) -> None:
        names = () if self.duration == "categorical" else self._family.names
        if sorted(values) != sorted(names):
            wanted = f"the parameters {' and '.join(names)}" if names else "(K, D) probabilities"
            raise ValueError(
                f"`durations` of the family {self.duration} must be {wanted}, but {', '.join(values)} was given."
            )
        given = []
        for name in names:
            value = as_numbers(name, values[name], self.durations.log_probs.device)
            value = value.expand(self.durations.log_probs.shape[1])
            wrong = ~((value > 0) & (value < (1 if name == "probs" else torch.inf)))
            if bool(wrong.any()):
                state = int(torch.nonzero(wrong)[0])
                rule = "between 0 and 1" if name == "probs" else "positive and finite"
                raise ValueError(
                    f"`{name}` must be {rule}, but that of state {state} is {float(value[state]):g} instead."
                )
            given.append(value)
        self.parameters_of_durations.copy_(self._family.unconstrained(torch.stack(given, -1)))
        self._update_durations()

    def _fit(self, counts: Tensor) -> None:
        """Fits the parameters of the family to (restarts, K, D) counts. Rows without counts keep theirs."""
        self.parameters_of_durations.copy_(fitted(self._family, self.parameters_of_durations, counts))
        self._update_durations()

    def _update_durations(self) -> None:
        self.durations.log_probs.data.copy_(log_probs_of(self._family, self.parameters_of_durations, self.max_duration))
        self.durations.possible.fill_(True)

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws the jumps uniformly from the probability simplex, and mean durations between 1 and D.

        Categorical durations begin with equal probabilities.
        """
        self.jumps.randomize(generator)
        if self.duration != "categorical":
            shape = self.parameters_of_durations.shape[:-1]
            draws = torch.rand(shape, generator=generator, dtype=torch.float64).to(self.jumps.log_probs.device)
            # The mean of d - 1 is drawn on a logarithmic scale from 1/2 to D - 1.
            most = max(self.max_duration - 1, 1)
            self.parameters_of_durations.copy_(self._family.from_mean(0.5 * (2.0 * most) ** draws))
            self._update_durations()
        self.is_set.fill_(True)

    # Chain

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Duration:
        return Duration(*natural)

    def first_states(self, log_initial: Tensor, natural: Sequence[Tensor]) -> Tensor:
        return (log_initial[:, None] + natural[1]).flatten()

    def path_chain(
        self, log_initial: Tensor, natural: Sequence[Tensor], batch: Sequences | None
    ) -> tuple[Tensor, Operator, Tensor | None]:
        """Returns a sparse chain whose state k D + a is state k after a previous steps of the stay.

        In contrast to `Duration`, it has one path for each sequence of stays, whose probability includes that of the
        last stay being at least as long as observed.
        """
        log_jumps, log_durations = natural
        size, longest = log_durations.shape
        survival = log_durations.flip(1).logcumsumexp(1).flip(1)  # of at least 1 to D steps
        later = torch.cat([survival[:, 1:], survival.new_full((size, 1), -torch.inf)], 1)
        reached = survival > -torch.inf
        stay, leave = (torch.where(reached, part - survival, -torch.inf) for part in (later, log_durations))
        entered = torch.arange(size, device=log_jumps.device) * longest
        indices = entered.expand(size, longest, size)
        values = leave[..., None] + log_jumps[:, None]
        if longest > 1:
            ages = torch.arange(longest, device=log_jumps.device)
            following = entered[:, None] + torch.where(ages + 1 < longest, ages + 1, ages)
            indices, values = torch.cat([indices, following[..., None]], 2), torch.cat([values, stay[..., None]], 2)
        indices, order = indices.flatten(0, 1).sort(1)
        operator = MostlyConstant(
            indices, values.flatten(0, 1).gather(1, order), log_jumps.new_full((size * longest,), -torch.inf)
        )
        first = log_initial.new_full((size, longest), -torch.inf)
        first[:, 0] = log_initial
        return first.flatten(), operator, entered.div(longest, rounding_mode="floor").repeat_interleave(longest)

    @property
    def tables(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        steps = [str(duration) for duration in range(1, self.max_duration + 1)]
        return {
            "jumps": (self.jump_probs, {"title": "Jump probabilities", "xlabel": "to state", "ylabel": "from state"}),
            "durations": (
                self.duration_probs,
                {"title": "Probabilities of durations", "xlabel": "steps", "names": steps},
            ),
        }

    def matrix(self, restart: int) -> None:
        return None

    # EM

    @property
    def num_statistics(self) -> int:
        return 2

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        jumps, durations = statistics
        kept = self.jumps.maximize([jumps], weight)
        if self.duration == "categorical":
            return kept + self.durations.maximize([durations], weight)
        counts = durations + self.prior["duration_pseudocount"] * weight
        self._fit(counts)
        return kept + (counts.sum(-1) <= 0).sum()

    def log_prior(self) -> Tensor:
        return self.jumps.log_prior() + self.durations.log_prior()

    def num_free_parameters(self, restart: int) -> int:
        if self.duration == "categorical":
            durations = self.durations.num_free_parameters(restart)
        else:
            states, size = self.parameters_of_durations.shape[1:]
            durations = states * min(size, self.max_duration - 1)  # D durations have D - 1 free probabilities
        return self.jumps.num_free_parameters(restart) + durations
