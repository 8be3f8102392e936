"""Base classes of the parts of a hidden Markov model.

A distribution is constructed with options only. The model that contains it calls `allocate` with the sizes, which
creates the parameters. Every parameter has a leading axis for the restarts.

Inference functions do not take distributions as arguments. An emission converts its natural parameters and a batch into
an `Evidence`, and a transition converts them into an `Operator`. The gradient of the log-likelihood with respect to the
natural parameters equals the expected sufficient statistics, from which `maximize` computes new parameters. EM requires
nothing else of a distribution.
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
    """Base class of the parts of a model. A part has natural parameters, a prior and an M-step.

    Subclass `Emission` or `Transition` to define a new part. To use this class directly, implement `maximize`,
    `log_prior` and `num_free_parameters`.

    Example:
        >>> from lightning_hmm.distributions import Gaussian
        >>> Gaussian(covariance="full").config
        {'class_path': 'lightning_hmm.Gaussian', 'init_args': {'covariance': 'full'}}
    """

    # Whether the gradient of the log-likelihood with respect to the parameters equals the expected statistics.
    has_natural_parameters: ClassVar[bool] = True
    # Name of the class of emission that a transition requires, or of the transition that an emission requires.
    partner: ClassVar[str | None] = None
    # Whether the M-step is a function of expected statistics of fixed size. Otherwise `hold` is called for each batch.
    is_closed: ClassVar[bool] = True
    # Whether the distribution depends on `Sequences.inputs`.
    needs_inputs: bool = False
    # Whether the parameters have initial values for training: set by the user, computed from data or drawn at random.
    is_set: Tensor
    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        part = super().__new__(cls.class_for(kwargs))
        part.__dict__["_given"] = (args, kwargs)
        return part

    @classmethod
    def class_for(cls, options: Mapping[str, Any]) -> type[Self]:
        """Returns the class of a part with the given options: this one, or a subclass that implements an option."""
        return cls

    def __init__(self) -> None:
        super().__init__()
        self.prior: dict[str, float] = {}  # options of the prior by name
        self._owner: tuple[Any, ...] = ()  # the model; a tuple keeps torch from registering it as a submodule

    # Configuration

    @property
    def config(self) -> dict[str, Any]:
        """Class path and constructor arguments as plain values, in the format of a configuration file."""
        args, kwargs = self._given
        signature = inspect.signature(type(self).__init__)
        given = signature.bind(self, *args, **kwargs).arguments
        options: dict[str, Any] = {}
        for name, value in list(given.items())[1:]:
            is_further = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            options |= _plain(value) if is_further else {name: _plain(value)}
        return {"class_path": _path(type(self)), "init_args": options}

    # Sizes and values

    def __getattr__(self, name: str) -> Any:
        # Python also calls this method if a property raises an AttributeError.
        if isinstance(getattr(type(self), name, None), property) and not self.is_allocated:
            raise AttributeError(
                f"A {type(self).__name__} has no `{name}` before it has sizes. "
                "Train its model, or give the sizes to the model."
            )
        return super().__getattr__(name)

    @property
    def is_allocated(self) -> bool:
        """Whether `allocate` has been called, so that the parameters exist."""
        return "is_set" in self._buffers

    def belong_to(self, model: Any) -> None:
        """Records the model that contains this part."""
        self._owner = (model,)

    @property
    def restart(self) -> int:
        """Number of the restart whose parameters the properties return."""
        return int(self._owner[0].best_restart) if self._owner else 0

    def _begin_allocation(self) -> None:
        if self.is_allocated:
            raise ValueError(
                f"A {type(self).__name__} can be part of one model only, but this one has parameters already. "
                "Make one for each model."
            )
        self.register_buffer("is_set", torch.tensor(False))

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        """Returns the natural parameters of one restart, in the order of `parameters()`."""
        return tuple(parameter[restart] for parameter in self.parameters())

    @torch.no_grad()
    def copy_from(self, other: Distribution, restart: int) -> None:
        """Copies the parameters of one restart of another part of the same class and size into all restarts."""
        for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs[restart])
        sizes = {parameter.shape for parameter in other.parameters()}
        for (name, buffer), given in zip(self.named_buffers(), other.buffers(), strict=True):
            # A buffer that has the shape of a parameter, or the values of one, has an axis for the restarts, too.
            buffer.copy_(given[restart] if given.shape in sizes or name.startswith("frozen_") else given)

    def randomize(self, generator: torch.Generator) -> None:
        """Draws the initial values that do not depend on data. The default implementation draws nothing."""

    # EM

    @property
    def num_statistics(self) -> int:
        """Number of tensors that `maximize` requires: one for each parameter, or zero if the M-step is iterative."""
        return len(list(self.parameters()))

    @abstractmethod
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        """Performs the M-step in place: maximizes the expected log-likelihood plus the log prior.

        No value is read on the host, so that the step does not synchronize with a GPU.

        Args:
            statistics: Gradient of the log-likelihood, one tensor for each parameter, in the order of the parameters.
            weight: Factor of the log prior. It is below 1 if the statistics represent a fraction of the data.

        Returns:
            Number of rows without statistics, which keep their values, as a tensor.
        """

    def hold(self, restart: int, batch: Sequences, *gradients: Tensor) -> None:
        """Stores a batch for an M-step that is not closed; see `Iterative`.

        Args:
            restart: Number of the restart.
            batch: The batch.
            *gradients: Gradients of the log-likelihood of the batch: with respect to the `Evidence` for an emission,
                the natural parameters of the operator for a transition, and the log-probabilities of the first state of
                each sequence for the distribution of the first state.
        """

    def forget(self) -> None:
        """Discards the batches that `hold` has stored."""

    @abstractmethod
    def log_prior(self) -> Tensor:
        """Returns the logarithm of the prior density of each restart, (restarts,), up to a constant."""

    @abstractmethod
    def num_free_parameters(self, restart: int) -> int:
        """Returns the number of free parameters of one restart. Structural zeros are not counted."""


class Emission(Distribution):
    """Base class of emissions: the distribution of an observation given the state.

    Subclass it to define a new family of emissions. The required methods are `allocate`, `evidence`, `maximize`, `set`,
    `sample`, `predict`, `log_prior` and `num_free_parameters`.

    Example:
        >>> from lightning_hmm.distributions import Categorical, Emission, Gaussian
        >>> [(kind.__name__, kind.reads_symbols) for kind in (Categorical, Gaussian) if issubclass(kind, Emission)]
        [('Categorical', True), ('Gaussian', False)]
    """

    # Whether an observation is a symbol instead of a vector.
    reads_symbols: ClassVar[bool] = False
    # Whether sequences of whole numbers are interpreted as one column of counts, in which -1 marks a missing count.
    reads_counts: ClassVar[bool] = False
    # Whether initial values or statistics such as a center are computed from the training data.
    starts_from_data: bool = True
    # Whether the distribution of an observation depends on earlier ones, so that `forecast` predicts from sequences.
    depends_on_past: bool = False
    # The values that the emission can have, and what to do with others, for error messages and the table of families.
    support: ClassVar[tuple[str, str]] = ("real numbers", "Mark other values as missing.")
    # How the M-step is computed, for the table of families.
    m_step: ClassVar[str] = "closed form"
    # Names of the parameters, which are properties, arguments of `set`, and values of the options `tied` and `frozen`.
    names: tuple[str, ...] = ()
    # Number of temporary values per step of the data that `evidence` creates, if it is larger than that of states.
    width: int = 0
    # Whether `set_data_stats` has been called.
    has_data_stats: Tensor

    def __init__(self, tied: Sequence[str] = (), frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self.tied = self._checked_names("tied", tied)  # parameters that have the same value in all states
        self.frozen = self._checked_names("frozen", frozen)  # parameters that training leaves unchanged

    def _checked_names(self, option: str, given: Sequence[str]) -> tuple[str, ...]:
        given = (given,) if isinstance(given, str) else tuple(given)
        strange = next((name for name in given if name not in self.names), None)
        if strange is not None:
            names = ", ".join(self.names) or "none"
            raise ValueError(
                f"`{option}` must name parameters of a {type(self).__name__} emission ({names}), "
                f"but names {strange!r} instead."
            )
        return given

    def _begin_allocation(self) -> None:
        super()._begin_allocation()
        self.register_buffer("has_data_stats", torch.tensor(not self.starts_from_data))

    @abstractmethod
    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        """Creates the parameters for observations with the given columns."""

    def columns_of(self, columns: list[Column], parts: Sequence[Sequences]) -> list[Column]:
        """Returns the columns of data without a description, with the kinds that this emission assigns to them.

        Args:
            columns: Columns as found in the data, all real unless the data are symbols.
            parts: The data sets, such as training and validation data.
        """
        return columns

    @abstractmethod
    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Evidence:
        """Returns the log-likelihood of each step in each state, as a pure function of its arguments."""

    def needs_graph(self, batch: Sequences) -> bool:
        """Returns whether `statistics` differentiates the evidence of this batch by autograd."""
        return True

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        """Computes the expected statistics of the natural parameters.

        Args:
            evidence: Result of `evidence`.
            gradient: Gradient of the log-likelihood with respect to `evidence.live`.
            natural: Natural parameters from which the evidence was computed.
        """
        return pull_back([evidence.live], [gradient], natural)

    @abstractmethod
    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Draws an observation for each of the given states: (steps,) symbols or (steps, columns) vectors."""

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        """Draws an observation for each step of sequences of states.

        Override it if an observation depends on earlier observations or on other columns of the sequences.
        """
        return states.with_values(self.sample(states.values, generator))

    def forecast(self, sequences: Sequences, state_probs: Tensor, move: Any, steps: int, classes: Any = None) -> Any:
        """Predicts the observation some steps after the end of each sequence, if `depends_on_past`."""
        raise ValueError(
            f"A {type(self).__name__} emission with a part that depends on earlier observations cannot predict. "
            "Use the part as the emission of a model of its own."
        )

    @abstractmethod
    def predict(self, state_probs: Tensor) -> Any:
        """Returns the distribution of N observations whose states have the probabilities (N, K)."""

    @abstractmethod
    def set(self, **values: Any) -> None:
        """Sets parameters by name, to the same values in all restarts."""

    def check(self, sequences: Sequences) -> None:
        """Raises a `ValueError` if the sequences contain a value that this distribution cannot emit."""

    def set_data_stats(self, sequences: Sequences) -> None:
        """Stores statistics of the data that the parametrization uses, such as a center.

        The distribution itself does not change.
        """

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        """Initializes the parameters by an M-step.

        Args:
            sequences: Data to initialize from.
            responsibilities: For each restart, (steps, K) guessed posterior probabilities of the states.
        """
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
    """Base class of transitions: the distribution of the next state given the current state.

    Subclass it to define transitions with another structure. The required methods are `allocate`, `operator`,
    `maximize`, `set`, `matrix`, `log_prior` and `num_free_parameters`.

    Example:
        >>> from lightning_hmm.distributions import Full, Transition
        >>> transition = Full(pseudocount=0.5)
        >>> isinstance(transition, Transition), transition.prior
        (True, {'pseudocount': 0.5})
    """

    no_matrix: ClassVar[str] = "are not one matrix"  # the reason why `matrix` returns ``None``, for error messages
    # Distribution of the first state for models without another one, in the format of a configuration file.
    default_initial: str | Mapping[str, Any] = "Initial"

    @property
    def is_plain(self) -> bool:
        """Whether the M-step normalizes counts plus one pseudocount, as the compiled passes of online EM do."""
        return True

    def couple(self, initial: Distribution) -> None:
        """Records the part `initial` of the model, whose distribution follows from the transitions.

        The M-step of the transitions must take its counts into account.
        """
        raise ValueError(
            f"A {type(initial).__name__} start requires Full transitions, but they are {type(self).__name__}. "
            "Use another initial."
        )

    @property
    def is_started(self) -> bool:
        """Whether the parameters exist. Parameters that depend on data are created by `start` or from a checkpoint."""
        return True

    def adopt(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Adapts the shapes of the parameters to saved ones, whose names begin with `prefix`."""

    def start(self, sequences: Sequences, generator: torch.Generator) -> None:
        """Creates parameters that depend on the training sequences. Called if `is_started` is false."""

    @abstractmethod
    def allocate(self, restarts: int, num_states: int) -> None:
        """Creates the parameters."""

    @abstractmethod
    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Operator:
        """Returns the transitions as a pure function of the arguments.

        If the operator has `classes`, these are the states of the model.

        Args:
            natural: Natural parameters of one restart.
            batch: The batch, for transitions that depend on inputs or times.
        """

    @abstractmethod
    def set(self, probs: Any) -> None:
        """Sets the transition probabilities to the same values in all restarts.

        A transition with other parameters takes these as arguments by name.
        """

    # Whether `operator` takes the states that are known from observations or labels as the labels of the batch.
    needs_known_states: bool = False
    # Approximate size of the temporary arrays of `operator` for each step of the batch.
    numbers_per_step: int = 0

    @property
    def tables(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """Matrices that `Figures` draws, with the options of `plotting.parameter_matrix`, for transitions without a
        matrix of probabilities.
        """
        return {}

    def check(self, sequences: Sequences) -> None:
        """Raises a `ValueError` if the sequences lack a column that the transitions depend on."""

    def path_chain(
        self, log_initial: Tensor, natural: Sequence[Tensor], batch: Sequences | None
    ) -> tuple[Tensor, Operator, Tensor | None]:
        """Returns the chain whose most probable path is decoded: first states, operator, and classes of its states.

        Override it if several paths of `operator` belong to the same path of model states.
        """
        operator = self.operator(natural, batch)
        return self.first_states(log_initial, natural), operator, operator.classes

    def first_states(self, log_initial: Tensor, natural: Sequence[Tensor]) -> Tensor:
        """Returns the (S,) log-probabilities of the operator's first state, given the (K,) ones of the model's."""
        return log_initial

    def statistics(self, first: Tensor, operator: Operator, found: EStep, natural: Sequence[Tensor]) -> list[Tensor]:
        """Computes the expected statistics of the natural parameters of the first state and of the transitions.

        Args:
            first: Result of `first_states`.
            operator: Result of `operator`.
            found: Result of the E-step with `first` and `operator`.
            natural: Parameters from which both were computed, beginning with those of the first state.
        """
        return pull_back([first, *operator.natural], [found.initial, *operator.gradients(found.counts)], natural)

    @abstractmethod
    def matrix(self, restart: int) -> Tensor | None:
        """Returns the (K, K) transition probabilities, or ``None`` if there is no such matrix."""


def pull_back(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Computes the vector-Jacobian product: for each leaf, the sum over outputs of (d output / d leaf)^T cotangent.

    An output that is itself a leaf does not need a graph.
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
    """Converts an argument of a constructor to a plain value that can be stored in a checkpoint."""
    if isinstance(value, Distribution):
        return value.config
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        "The options of a part must be plain values, so that a checkpoint can hold them, "
        f"but one is a {type(value).__name__}."
    )


def _subclasses(family: Any) -> Iterator[Any]:
    for subclass in family.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def make_part(given: Any, kind: Any, option: str) -> Any:
    """Creates a part of a model from an instance, the name of a class, or a configuration (`Distribution.config`).

    Classes are looked up by name or by full path among the classes that have been imported.

    Args:
        given: Value of the option, as given by the user.
        kind: Base class that the part must have.
        option: Name of the option, for error messages.
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
            parameters = inspect.signature(family).parameters
            known_options = [key for key, given_as in parameters.items() if given_as.kind is not given_as.VAR_KEYWORD]
            takes_more = len(known_options) < len(parameters)
            strange = next((key for key in options if key not in known_options and not takes_more), None)
            if strange is not None:
                names = ", ".join(known_options)
                raise ValueError(f"`{option}`: {family.__name__} has the options {names}, but {strange!r} was given.")
            return family(**options)
    names = ", ".join(sorted({family.__name__ for family in known.values()}))
    if isinstance(given, type) and issubclass(given, kind):
        raise ValueError(
            f"`{option}` must be an object, but is the class {given.__name__} instead. "
            f"Give `{given.__name__}(...)`, with its options."
        )
    what = given["class_path"] if isinstance(given, Mapping) and "class_path" in given else given
    article = "an" if kind.__name__[0] in "EI" else "a"
    raise ValueError(
        f"`{option}` must be {article} {kind.__name__}, or the name of one ({names}), but is {what!r} instead."
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
    """Returns the import path of a class, which is the short one if the top-level package exports the class."""
    package = sys.modules[__name__.split(".")[0]]
    exported = getattr(package, family.__name__, None) is family
    return f"{package.__name__ if exported else family.__module__}.{family.__qualname__}"


def as_numbers(name: str, value: Any, device: torch.device) -> Tensor:
    """Converts the value of the parameter `name`, as given by the user, to a float64 tensor."""
    try:
        return torch.as_tensor(value, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ValueError(f"`{name}` must be an array of real numbers, but is {shown} instead.") from None


def check_not_negative(**options: float) -> None:
    """Raises a `ValueError` if an option of a prior is negative, infinite or not a number."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"`{name}` must be a finite number, but is {value!r} instead.")
        if value < 0:
            raise ValueError(f"`{name}` must not be negative, but is {value} instead.")
