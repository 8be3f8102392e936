"""The parts of a hidden Markov model: what a distribution provides, and how it is saved.

A distribution is constructed with options only. The model that it belongs to calls `allocate` with the sizes, which makes the parameters; each has
a leading axis for the restarts. Inference never sees a distribution: an emission turns natural parameters and a batch into
`Evidence`, a transition turns them into an `Operator`. The gradient of the log-likelihood in the natural parameters is the expected
sufficient statistics, and `maximize` turns these into parameters. That is all that EM needs.
"""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.inference.evidence import Evidence
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import EStep
from lightning_hmm.sequences import Sequences


class Distribution(nn.Module, ABC):
    """A part of a model: natural parameters, their maximizer and their prior."""

    has_natural_parameters: ClassVar[bool] = (
        True  # whether the gradient of the log-likelihood is the expected statistics
    )
    partner: ClassVar[str | None] = (
        None  # the class of the emission that a transition requires, or of the transition that an emission requires
    )
    # Whether the M-step is a function of expected statistics of fixed size. Otherwise `hold` receives what it needs of each batch.
    is_closed: ClassVar[bool] = True
    is_set: Tensor  # whether the parameters have values that training starts from, set by the user, from the data or at random
    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        part = super().__new__(cls)
        part.__dict__["_given"] = (args, kwargs)
        return part

    def __init__(self) -> None:
        super().__init__()
        self.prior: dict[str, float] = {}  # the options of the prior by name
        self._owner: tuple[Any, ...] = ()  # the model, in a tuple so that it does not become a submodule

    # How it is saved

    @property
    def config(self) -> dict[str, Any]:
        """The class and the options as plain values, in the form of a configuration file."""
        args, kwargs = self._given
        given = inspect.signature(type(self).__init__).bind(self, *args, **kwargs).arguments
        options = {name: _plain(value) for name, value in list(given.items())[1:]}
        return {"class_path": _path(type(self)), "init_args": options}

    # Sizes and values

    def __getattr__(self, name: str) -> Any:
        # Python calls this, too, where a property has no value.
        if isinstance(getattr(type(self), name, None), property) and not self.is_allocated:
            raise AttributeError(
                f"A {type(self).__name__} has no `{name}` before it has sizes. Train its model, or give the sizes to the model."
            )
        return super().__getattr__(name)

    @property
    def is_allocated(self) -> bool:
        return "is_set" in self._buffers

    def belong_to(self, model: Any) -> None:
        """Records the model, whose chosen restart the parameters are read from."""
        self._owner = (model,)

    @property
    def restart(self) -> int:
        """The restart that parameters are read from."""
        return int(self._owner[0].chosen) if self._owner else 0

    def _begin_allocation(self) -> None:
        if self.is_allocated:
            raise ValueError(
                f"A {type(self).__name__} can be part of one model only, but this one has parameters already. Make one for each model."
            )
        self.register_buffer("is_set", torch.tensor(False))

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        """The natural parameters of one restart, in the order of `parameters()`."""
        return tuple(parameter[restart] for parameter in self.parameters())

    @torch.no_grad()
    def copy_from(self, other: Distribution, restart: int) -> None:
        """Takes the values of one restart of a part of the same kind and size, for all restarts."""
        for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs[restart])
        sizes = {parameter.shape for parameter in other.parameters()}
        for buffer, given in zip(self.buffers(), other.buffers(), strict=True):
            buffer.copy_(
                given[restart] if given.shape in sizes else given
            )  # a buffer of a parameter's shape has restarts, too

    def randomize(self, generator: torch.Generator) -> None:
        """Draws the starting values that do not come from data; none by default."""

    # EM

    @property
    def num_statistics(self) -> int:
        """The number of tensors that `maximize` takes: one for each parameter, or none if the M-step is iterative."""
        return len(list(self.parameters()))

    @abstractmethod
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        """Sets the parameters to those that maximize expected log-likelihood plus log prior, in place. Reads no tensor's value.

        Args:
            statistics: the gradient of the log-likelihood, one tensor for each parameter, in their order.
            weight: how much of the prior counts; below 1 where the statistics are those of a part of the data.

        Returns:
            The number of rows that had no statistics and kept their values, as a tensor.
        """

    def hold(self, restart: int, batch: Sequences, gradient: Tensor) -> None:
        """Keeps the gradient of the log-likelihood of a batch, in the evidence, for an M-step that is not closed."""

    def forget(self) -> None:
        """Drops what `hold` has kept."""

    @abstractmethod
    def log_prior(self) -> Tensor:
        """(restarts,) the logarithm of the prior density, up to a constant."""

    @abstractmethod
    def num_free_parameters(self, restart: int) -> int:
        """The number of degrees of freedom of one restart's parameters, without those that are structurally zero."""


class Emission(Distribution):
    """The distribution of an observation given the state."""

    reads_symbols: ClassVar[bool] = False  # whether an observation is a symbol, not a vector
    reads_counts: ClassVar[bool] = (
        False  # whether sequences of whole numbers are one column of counts, with -1 where one is missing
    )
    starts_from_data: bool = True  # whether starting values, or a center, come from the data
    has_data_stats: Tensor  # whether `set_data_stats` has been called

    def _begin_allocation(self) -> None:
        super()._begin_allocation()
        self.register_buffer("has_data_stats", torch.tensor(not self.starts_from_data))

    @abstractmethod
    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        """Makes the parameters for observations with the given columns."""

    def columns_of(self, columns: list[Column], parts: Sequence[Sequences]) -> list[Column]:
        """The columns of data that come without a description, with the kinds that the emission gives them."""
        return columns

    @abstractmethod
    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Evidence:
        """The log-likelihoods of the steps for each state; a pure function of the natural parameters and the batch."""

    def needs_graph(self, batch: Sequences) -> bool:
        """Whether `statistics` differentiates the evidence of this batch."""
        return True

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        """The expected statistics of the natural parameters, from the gradient in the evidence's `live` tensor."""
        return pull_back([evidence.live], [gradient], natural)

    @abstractmethod
    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Observations of the given states, (steps,) symbols or (steps, columns) vectors."""

    @abstractmethod
    def predict(self, state_probs: Tensor) -> Any:
        """The distribution of an observation whose state has the probabilities (N, K)."""

    @abstractmethod
    def set(self, **values: Any) -> None:
        """Sets parameters by name, for all restarts alike."""

    def check(self, sequences: Sequences) -> None:
        """Raises where a value cannot be an observation of this distribution."""

    def set_data_stats(self, sequences: Sequences) -> None:
        """Takes what the parametrization needs of the data, such as a center, without changing the distribution."""

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        """Starts each restart from (steps, K) guessed posterior probabilities of the states, by an M-step."""
        self.maximize(
            [torch.stack(parts) for parts in zip(*self._guessed_statistics(sequences, responsibilities), strict=True)]
        )

    def _guessed_statistics(
        self, sequences: Sequences, responsibilities: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, ...]]:
        for restart, guess in enumerate(responsibilities):
            leaves = [value.detach().requires_grad_() for value in self.natural(restart)]
            with torch.enable_grad():
                live = self.evidence(leaves, sequences)
            yield tuple(pull_back([live.live], [live.pull(guess)], leaves))


class Transition(Distribution):
    """The distribution of the next state given the present one."""

    no_matrix: ClassVar[str] = "are not one matrix"  # why `matrix` returns ``None``, in the message of an error

    @property
    def is_started(self) -> bool:
        """Whether the parameters exist. If they depend on the data, they do not until `start` or a checkpoint makes them."""
        return True

    def adopt(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Takes the shapes of saved parameters, whose names begin with `prefix`, if they are not those that `allocate` makes."""

    def start(self, sequences: Sequences, generator: torch.Generator) -> None:
        """Makes parameters that depend on the data, from all training sequences; called where `is_started` is false."""

    @abstractmethod
    def allocate(self, restarts: int, num_states: int) -> None:
        """Makes the parameters."""

    @abstractmethod
    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Operator:
        """The transitions; a pure function of the natural parameters and, where it depends on inputs or times, of the batch."""

    @abstractmethod
    def set(self, probs: Any) -> None:
        """Sets the transition probabilities, for all restarts alike."""

    @property
    def classes(self) -> Tensor | None:
        """(S,) the state of the model that each state of the operator emits as; ``None`` if both are the same."""
        return None

    def first_states(self, log_initial: Tensor, natural: Sequence[Tensor]) -> Tensor:
        """(S,) log-probabilities of the operator's first state, from (K,) those of the model's."""
        return log_initial

    def statistics(self, first: Tensor, operator: Operator, found: EStep, natural: Sequence[Tensor]) -> list[Tensor]:
        """The expected statistics of the natural parameters of the first state and of the transitions.

        Args:
            first: the result of `first_states`.
            operator: the result of `operator`.
            found: the E-step with these.
            natural: the parameters that both were computed from, those of the first state first.
        """
        return pull_back([first, *operator.natural], [found.initial, *operator.gradients(found.counts)], natural)

    @abstractmethod
    def matrix(self, restart: int) -> Tensor | None:
        """(K, K) the probabilities as one matrix, for figures and reading; ``None`` where there is no such matrix."""


def pull_back(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The vector-Jacobian product: the sum over outputs of (d output / d leaf)^T cotangent, for each leaf.

    An output that is itself a leaf needs no graph.
    """
    totals: list[Tensor | None] = [None] * len(leaves)
    graphs = []
    for output, cotangent in zip(outputs, cotangents, strict=True):
        index = next((index for index, leaf in enumerate(leaves) if leaf is output), None)
        if index is not None:
            totals[index] = cotangent if totals[index] is None else totals[index] + cotangent  # type: ignore[operator]
        elif output.requires_grad:
            graphs.append((output, cotangent.to(output.dtype)))
    if graphs:
        found = torch.autograd.grad(
            [output for output, _ in graphs], leaves, [cotangent for _, cotangent in graphs], allow_unused=True
        )
        for index, gradient in enumerate(found):
            if gradient is not None:
                totals[index] = gradient if totals[index] is None else totals[index] + gradient  # type: ignore[operator]
    return [torch.zeros_like(leaf) if total is None else total for total, leaf in zip(totals, leaves, strict=True)]


def _plain(value: Any) -> Any:
    """A constructor's argument as a value that a checkpoint can hold."""
    if isinstance(value, Distribution):
        return value.config
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"The options of a part must be plain values, so that a checkpoint can hold them, but one is a {type(value).__name__}."
    )


def _subclasses(family: Any) -> Iterator[Any]:
    for subclass in family.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def make_part(given: Any, kind: Any, option: str) -> Any:
    """A part of the model from an instance, the name of a class, or `Distribution.config`.

    Classes are looked up among those that are imported, by their name or their full path.

    Args:
        given: what the user gave.
        kind: the base class that it must have.
        option: what an error calls it.
    """
    if isinstance(given, kind):
        return given
    known = {
        name: family
        for family in (kind, *_subclasses(kind))
        if not inspect.isabstract(family)
        for name in (family.__name__, _path(family))
    }
    if isinstance(given, str):
        given = {"class_path": given}
    if isinstance(given, Mapping) and isinstance(given.get("class_path"), str):
        name = given["class_path"]
        lower = {key.lower(): family for key, family in known.items()}
        family = known.get(name) or lower.get(name.lower()) or known.get(name.rsplit(".", 1)[-1])
        if family is not None:
            options = {key: _make_nested(value, option) for key, value in dict(given.get("init_args") or {}).items()}
            known_options = list(inspect.signature(family).parameters)
            strange = next((key for key in options if key not in known_options), None)
            if strange is not None:
                raise ValueError(
                    f"`{option}`: {family.__name__} has the options {', '.join(known_options)}, but {strange!r} was given."
                )
            return family(**options)
    names = ", ".join(sorted({family.__name__ for family in known.values()}))
    if isinstance(given, type) and issubclass(given, kind):
        raise ValueError(
            f"`{option}` must be an object, but is the class {given.__name__} instead. Give `{given.__name__}(...)`, with its options."
        )
    what = given["class_path"] if isinstance(given, Mapping) and "class_path" in given else given
    raise ValueError(
        f"`{option}` must be {'an' if kind.__name__[0] in 'EI' else 'a'} {kind.__name__}, or the name of one ({names}), but is {what!r} instead."
    )


def _make_nested(value: Any, option: str) -> Any:
    if isinstance(value, Mapping) and "class_path" in value:
        return make_part(value, Distribution, option)
    if isinstance(value, (list, tuple)):
        return [_make_nested(item, option) for item in value]
    if isinstance(value, Mapping):
        return {key: _make_nested(item, option) for key, item in value.items()}
    return value


def _path(family: type) -> str:
    """The path by which a class is imported; the short one where the package exports it."""
    package = sys.modules[__name__.split(".")[0]]
    exported = getattr(package, family.__name__, None) is family
    return f"{package.__name__ if exported else family.__module__}.{family.__qualname__}"


def as_numbers(name: str, value: Any, device: torch.device) -> Tensor:
    """What a user gave for a parameter as a float64 tensor."""
    try:
        return torch.as_tensor(value, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = repr(value)
        raise ValueError(
            f"`{name}` must be an array of real numbers, but is {shown if len(shown) <= 60 else shown[:57] + '...'} instead."
        ) from None


def check_not_negative(**options: float) -> None:
    """Refuses options of a prior that are negative, infinite or no number."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"`{name}` must be a finite number, but is {value!r} instead.")
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, but is {value} instead.")
