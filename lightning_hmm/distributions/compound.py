"""Emissions that combine another emission, the component, with a latent categorical variable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, make_part
from lightning_hmm.distributions.checks import refuse_unknown
from lightning_hmm.distributions.rows import CategoricalRows
from lightning_hmm.sequences import Sequences


class LatentProbs(CategoricalRows):
    """Probabilities of a latent variable given the state, with shape (K, ..., C).

    Args:
        option: Name of the parameter in error messages.
        pseudocount: Pseudocount of a Dirichlet prior on each row, in counts of the whole data set.
        is_tied: Whether all states have the same probabilities.
        is_frozen: Whether training leaves the probabilities unchanged.

    Example:
        >>> from lightning_hmm.distributions.compound import LatentProbs
        >>> weights = LatentProbs("weights")
        >>> weights.allocate(1, 2, 4)
        >>> weights.probs
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]], dtype=torch.float64)
    """

    def __init__(self, option: str, pseudocount: float = 0.0, is_tied: bool = False, is_frozen: bool = False) -> None:
        super().__init__(pseudocount)
        self.option, self.has_tied_rows, self.has_frozen_rows = option, is_tied, is_frozen

    def allocate(self, restarts: int, *shape: int) -> None:
        """Creates the parameters; `shape` is (K, ..., C)."""
        self._allocate_rows(restarts, *shape)


class Compound(Emission):
    """Base class of emissions with a latent categorical variable and another emission, the component.

    The parameters are the probabilities of the latent variable and those of the component, which are also available by
    name. The gradients of the log-likelihood are the expected statistics of both, so the M-step is that of each.

    Args:
        component: An emission with a closed M-step.
        pseudocount: Pseudocount of the Dirichlet prior on the probabilities of the latent variable.
        tied: Names of parameters that all states share.
        frozen: Names of parameters that training leaves unchanged.

    Example:
        >>> from lightning_hmm import GaussianMixture, Poisson, ZeroInflated
        >>> ZeroInflated(Poisson()).names, GaussianMixture(2).names
        (('gate', 'rate'), ('weights', 'mean', 'variance'))
    """

    num_states: int

    def __init__(self, component: Any, pseudocount: float, tied: Sequence[str], frozen: Sequence[str]) -> None:
        super().__init__(tied, frozen)
        component = make_part(component, Emission, "component")
        if not component.is_closed or component.reads_symbols:
            rule = "vectors" if component.reads_symbols else "a closed M-step"
            raise ValueError(
                f"`component` must be an emission with {rule}, but {type(component).__name__} is not. "
                "Use it as the emission of the model."
            )
        if isinstance(component, Compound):
            raise ValueError(
                f"`component` must not be composed of other emissions itself, but is a {type(component).__name__}."
            )
        option = self.names[0]
        self.latent = LatentProbs(option, pseudocount, option in self.tied, option in self.frozen)
        self.part = component
        self.names = (option, *component.names)
        self.prior = {"pseudocount": pseudocount} | {f"component {name}": x for name, x in component.prior.items()}

    @property
    def starts_from_data(self) -> bool:  # type: ignore[override]
        return bool(self.part.starts_from_data)

    @property
    def component(self) -> Any:
        """The component, with the parameters of the best restart."""
        return self.part

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("names", ())[1:]:
            return getattr(self.component, name)
        return super().__getattr__(name)

    @property
    def depends_on_past(self) -> bool:  # type: ignore[override]
        return bool(self.part.depends_on_past)

    @property
    def reads_counts(self) -> bool:  # type: ignore[override]
        return bool(self.part.reads_counts)

    def belong_to(self, model: Any) -> None:
        for part in (self.latent, self.part):
            part.belong_to(model)
        super().belong_to(model)

    def columns_of(self, columns: list[Column], parts: Sequence[Sequences]) -> list[Column]:
        found: list[Column] = self.part.columns_of(columns, parts)
        return found

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return (*self.latent.natural(restart), *self.part.natural(restart))

    @property
    def num_statistics(self) -> int:
        return 1 + int(self.part.num_statistics)

    def check(self, sequences: Sequences) -> None:
        self.part.check(sequences)

    def set_data_stats(self, sequences: Sequences) -> None:
        self.part.set_data_stats(sequences)
        self.part.has_data_stats.fill_(True)

    def randomize(self, generator: torch.Generator) -> None:
        self.part.randomize(generator)

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        counts, *rest = statistics
        unseen = self.latent.maximize([counts], weight)
        if "components" not in self.frozen:
            unseen = unseen + self.part.maximize(rest, weight)
        self.is_set.fill_(True)
        return unseen

    def log_prior(self) -> Tensor:
        return self.latent.log_prior() + self.part.log_prior().to(self.latent.log_probs.device)

    def num_free_parameters(self, restart: int) -> int:
        own = self.latent.num_free_parameters(restart)
        return own + (0 if "components" in self.frozen else int(self.part.num_free_parameters(restart)))

    def set(self, **values: Any) -> None:
        """Sets parameters by name, to the same values in all restarts; those of the component have their own names.

        As long as none has a value, all parameters must be given, or only frozen ones. The others are then initialized
        from the data.
        """
        refuse_unknown(self, values)
        option, lacking = self.names[0], [name for name in self.names if name not in values]
        partial = not bool(self.is_set) and bool(lacking)
        fixed = {option} & set(self.frozen) | set(self.names[1:] if "components" in self.frozen else self.part.frozen)
        if partial and not set(values) <= fixed:
            raise ValueError(f"`{lacking[0]}` must be given, too, as long as the emission has no values from data.")
        rest = {name: value for name, value in values.items() if name != option}
        if rest:
            self._set_component(rest)
        if option in values:
            self._set_latent(values[option])
        self.is_set.fill_(not partial)

    @abstractmethod
    def _set_latent(self, value: Any) -> None:
        """Sets the parameter of the latent variable."""

    def _set_component(self, values: dict[str, Any]) -> None:
        self.part.set(**values)


class _LogSumExp(torch.autograd.Function):
    """Sum of probabilities given by their logarithms, over the last axis. The gradient of -inf is zero."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor) -> Tensor:
        largest = terms.amax(-1, keepdim=True)
        largest = torch.where(largest == -torch.inf, 0.0, largest)
        shares = (terms - largest).exp_()
        total = shares.sum(-1, keepdim=True)
        ctx.save_for_backward(shares, total)
        return total.log().add_(largest).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        shares, total = ctx.saved_tensors
        return shares * (gradients[0].unsqueeze(-1) / torch.where(total == 0, 1.0, total))


def log_sum_exp(terms: Tensor) -> Tensor:
    """Computes log(sum(exp(terms))) over the last axis.

    Unlike in torch, the gradient is finite if all terms are -inf.
    """
    found: Tensor = _LogSumExp.apply(terms)
    return found
