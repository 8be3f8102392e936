"""The hidden Markov model that is composed of parts: the first state, transitions and emissions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Literal, Self

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hmm import inference
from lightning_hmm.columns import Column, are_named, as_columns, feature_columns, symbol_column
from lightning_hmm.conversion import as_reals, frame_columns, frame_values, frames_of
from lightning_hmm.data import data_of
from lightning_hmm.distributions import Categorical, Distribution, Emission, Full, Initial, Transition
from lightning_hmm.distributions.base import make_part
from lightning_hmm.distributions.exponential import ExponentialFamily
from lightning_hmm.distributions.starting import STEPS_TO_START_FROM, excerpt, guess_states
from lightning_hmm.inference.evidence import Evidence
from lightning_hmm.inference.operators import Dense, Operator
from lightning_hmm.models.discrete import DiscreteHMM
from lightning_hmm.models.sequence_model import as_names, check_counts, check_seed
from lightning_hmm.models.training_loop import BaumWelchTraining
from lightning_hmm.optim import BaumWelch
from lightning_hmm.optim.online import compiled_kernel_for
from lightning_hmm.sequences import Sequences

_NO_SIZES = "The model has no sizes yet. Train it, or give `num_symbols`, `num_features` or `columns`."
_CHUNK = (
    1 << 22
)  # numbers that a temporary array of an E-step holds at most: larger ones are given back to the system after each use


class HMM(BaumWelchTraining, DiscreteHMM):
    r"""K states with any transitions and any emissions, trained by Baum-Welch.

    .. math:: z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad y_t \mid z_t = k \sim p(\cdot \mid \theta_k)

    Parts are given as instances, or by the name of their class. In a configuration file they have a ``class_path`` and
    ``init_args``.

    Args:
        num_states: K.
        emission: the distribution of observations. If not given, `Categorical` for symbols and a diagonal `Gaussian` for real vectors.
        transition: the distribution of the next state; `Full` if not given.
        initial: the distribution of the first state; `Initial` if not given.
        num_symbols: the number of symbols, for sequences of symbols.
        num_features: the number of columns, for sequences of real vectors.
        columns: the observed columns, in place of both. Without any of the three, they are those of the training data.
        seed: of the starting values.
        restarts: number of random initializations trained in the same run. The one with the best validation likelihood at the end (training
            likelihood if there is no validation set) is used for inference.
        initialization: where emissions that start from data start: from the clusters that k-means finds ("kmeans"), or from the points nearest to
            random ones ("random").
        discount: lambda of online EM, with an update after each batch; without it batch EM, an update after each epoch.
        sequences_per_update: online EM with several updates inside each batch.
        iterations_per_epoch: EM iterations in each epoch of the Trainer; for small data, all in one batch.
        frozen: any of "initial", "transition", "emission"; they keep their values.
        arithmetic: "float32" is faster, "float64" exact to 15 digits.
        symbol_names: for data with a vocabulary.
        unknown_symbol: the one of them that stands for all others.
    """

    emission: Any
    transition: Any
    initial: Any

    def __init__(
        self,
        num_states: int,
        emission: Emission | None = None,
        transition: Transition | None = None,
        initial: Initial | None = None,
        num_symbols: int | None = None,
        num_features: int | None = None,
        columns: list[Column] | None = None,
        seed: int = 0,
        restarts: int = 1,
        initialization: Literal["kmeans", "random"] = "kmeans",
        discount: float | None = None,
        sequences_per_update: int | None = None,
        iterations_per_epoch: int = 1,
        frozen: Sequence[str] = (),
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        check_counts(num_states=num_states, num_symbols=num_symbols, num_features=num_features)
        check_seed(seed)
        self._record_options(locals())
        observed = _columns(columns, num_symbols, num_features, symbol_names)
        categorical = observed is not None and len(observed) == 1 and observed[0].is_categorical
        super().__init__(
            num_states=num_states,
            num_symbols=observed[0].num_categories if observed is not None and categorical else None,
            num_features=None if observed is None or categorical else len(observed),
            restarts=restarts,
            discount=discount,
            sequences_per_update=sequences_per_update,
            iterations_per_epoch=iterations_per_epoch,
            frozen=frozen,
            arithmetic=arithmetic,
            symbol_names=symbol_names if categorical else None,
            unknown_symbol=unknown_symbol if categorical else None,
        )
        if initialization not in ("kmeans", "random"):
            raise ValueError(f"`initialization` must be kmeans or random, but is {initialization!r} instead.")
        for name in frozen:
            if name not in ("initial", "transition", "emission"):
                raise ValueError(f"`frozen` must name initial, transition or emission, but names {name!r} instead.")
        self.seed, self.initialization = seed, initialization
        self.columns: list[Column] | None = None
        self.initial = make_part(initial or Initial(), Initial, "initial")
        emitted = None if emission is None else make_part(emission, Emission, "emission")
        self.transition = make_part(transition or (emitted and emitted.partner) or Full(), Transition, "transition")
        self.emission = emitted
        if observed is not None:
            self.allocate(observed)

    def _record_options(self, arguments: dict[str, Any]) -> None:
        """Keeps the arguments of a constructor for checkpoints. The subclass that calls it first decides."""
        if "_given_options" not in self.__dict__:
            options = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
            self._given_options = options | (
                {"frozen": as_names("frozen", options["frozen"])} if "frozen" in options else {}
            )

    # Sizes

    @property
    def is_allocated(self) -> bool:
        return self.columns is not None

    def allocate(self, columns: Sequence[Column]) -> Self:
        """Makes the parameters for observations with these columns, and draws the starting values that do not come from data."""
        if self.is_allocated:
            raise ValueError("The model has parameters already. Make a new one for other columns.")
        columns = list(columns)
        categorical = len(columns) == 1 and columns[0].is_categorical
        if self.emission is None:
            self.emission = make_part(
                self.transition.partner or ("Categorical" if categorical else "Gaussian"), Emission, "emission"
            )
        _check_partners(self.transition, self.emission)
        self.num_symbols, self.num_features = (columns[0].num_categories, None) if categorical else (None, len(columns))
        for part in (self.initial, self.transition, self.emission):
            part.belong_to(self)
        self.emission.allocate(self.restarts, self.num_states, columns)
        self.transition.allocate(self.restarts, self.num_states)
        self.initial.allocate(self.restarts, self.num_states)
        self.columns = columns
        self._randomize(torch.Generator().manual_seed(self.seed))
        self._save_options()
        return self

    def _randomize(self, generator: torch.Generator) -> None:
        """Draws the starting values that do not come from data."""
        for part in self.distributions.values():
            part.randomize(generator)

    def _save_options(self) -> None:
        """Records the options of the constructor as plain values, so that a checkpoint can hold them."""
        assert self.columns is not None
        options = dict(self._given_options)
        if "columns" in options:
            options |= {"num_symbols": None, "num_features": None}  # the columns hold both
            options |= {name: part.config for name, part in self.distributions.items()}
            options["columns"] = [
                {**asdict(column), "categories": column.category_names or column.num_categories}
                for column in self.columns
            ]
        elif isinstance(options.get("emission"), Emission):
            options["emission"] = self.emission.config
        self.save_hyperparameters(options)

    def _require_allocated(self) -> None:
        if not self.is_allocated:
            raise ValueError(_NO_SIZES)

    def _require_values(self) -> None:
        """Raises where an emission that starts from data has no values yet."""
        self._require_allocated()
        for part in getattr(self.emission, "parts", [self.emission]):
            if isinstance(part, ExponentialFamily) and not bool(part.is_set):
                names = " and ".join(f"`{name}`" for name in part.names)
                raise ValueError(
                    f"The {type(part).__name__} emission has no values yet. Train the model, or set {names} with `set_parameters`."
                )

    @property
    def may_iterate(self) -> bool:
        """Whether several EM iterations may run in one epoch of the Trainer."""
        return self.discount is None

    # Parameters

    @property
    def distributions(self) -> dict[str, Distribution]:
        self._require_allocated()
        return {"initial": self.initial, "transition": self.transition, "emission": self.emission}

    @property
    def initial_probs(self) -> Tensor:
        """(K,) p(z_1)."""
        return self.initial.probs

    @property
    def transition_probs(self) -> Tensor:
        """(K, K) p(z_t+1 = j | z_t = i), for transitions that are one matrix."""
        matrix = self.transition.matrix(int(self.chosen))
        if matrix is None:
            raise AttributeError  # `__getattr__` says why
        return matrix

    @property
    def emission_probs(self) -> Tensor:
        """(K, V) p(symbol | state), for categorical emissions."""
        return self.emission.probs

    def __getattr__(self, name: str) -> Any:
        # Python calls this, too, where one of the properties above has no value.
        if name in ("initial_probs", "transition_probs", "emission_probs") and self.__dict__.get("columns") is None:
            raise AttributeError(_NO_SIZES)
        if name == "transition_probs":
            raise AttributeError(
                f"`transition_probs` is a matrix, but {type(self.transition).__name__} transitions {self.transition.no_matrix}."
            )
        if name == "emission_probs":
            names = self.emission.names if isinstance(self.emission, ExponentialFamily) else ()
            has = (
                f": a {type(self.emission).__name__} emission has {' and '.join(f'`{name}`' for name in names)}"
                if names
                else ""
            )
            raise AttributeError(f"`emission_probs` is for categorical emissions{has}.")
        return super().__getattr__(name)

    def set_parameters(self, initial: Any = None, transition: Any = None, emission: Any = None) -> Self:
        """Sets parameters for all restarts alike; what is not given stays. Probabilities of zero stay zero in training.

        Args:
            initial: (K,) probabilities.
            transition: the probabilities, (K, K) for a full matrix.
            emission: a dictionary of the emission's parameters by name, such as ``{"mean": ..., "variance": ...}``; the (K, V) probabilities of
                a categorical emission; or for a `Product` a list with an entry for each part, or ``None``.
        """
        self._require_allocated()
        if initial is not None:
            self.initial.set(initial)
        if transition is not None:
            self.transition.set(transition)
        if emission is not None:
            _set_emission(self.emission, emission)
        return self

    # Inference

    def chain(self, restart: int, sequences: Sequences | None = None) -> tuple[Tensor, Operator]:
        self._require_allocated()
        natural = self.transition.natural(restart)
        initial = self.transition.first_states(self.initial.natural(restart)[0], natural)
        return initial, self.transition.operator(natural, sequences)

    def evidence(self, restart: int, sequences: Sequences) -> Evidence:
        self._require_allocated()
        self.emission.check(sequences)
        if not torch.is_grad_enabled():
            self._require_values()
        found: Evidence = self.emission.evidence(self.emission.natural(restart), sequences)
        return found if self.transition.classes is None else found.shared(self.transition.classes)

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        self._require_values()
        return states.with_values(self.emission.sample(states.values, generator))

    def predict_emission(self, state_probs: Tensor) -> Any:
        return self.emission.predict(state_probs)

    # Starting values

    @property
    def starts_from_data(self) -> bool:
        return not self.is_allocated or self.emission.starts_from_data or not self.transition.is_started

    def take_sizes(self, parts: Sequence[Sequences]) -> None:
        named = parts[0].columns
        if not self.is_allocated:
            columns = columns_of(parts) if named is None else list(named)
            self.allocate(columns if self.emission is None else self.emission.columns_of(columns, parts))
        elif (
            named is not None
            and self.columns is not None
            and len(named) == len(self.columns)
            and not are_named(self.columns)
        ):
            self.columns = [replace(column, name=other.name) for column, other in zip(self.columns, named, strict=True)]
            self._save_options()

    def as_sequences(self, data: Any, lengths: Any = None) -> Sequences:
        """As `SequenceModel.as_sequences`. For an emission of real columns, those of a DataFrame are found by name, and whole numbers are real ones."""
        if self.emission is None or self.emission.reads_symbols:
            return super().as_sequences(data, lengths)
        frames = frames_of(data)
        if frames is not None:
            columns = self.columns if self.columns is not None and are_named(self.columns) else frame_columns(frames)
            if self.columns is not None and len(columns) != len(self.columns):
                raise ValueError(
                    f"The data must have {len(self.columns)} columns, but have {len(columns)}: {', '.join(column.name for column in columns)}."
                )
            arrays = [frame_values(frame, columns, n) for n, frame in enumerate(frames)]
            return (
                super()
                .as_sequences(arrays if lengths is None else np.concatenate(arrays), lengths)
                .with_columns(columns)
            )
        if not isinstance(data, Sequences):
            found = super().as_sequences(as_reals(data), lengths)
            if (
                found.is_discrete and not found.num_steps and self.num_features is not None
            ):  # empty sequences have no kind of their own
                return found.with_values(found.values.new_zeros(0, self.num_features, dtype=torch.float64))
            return found
        data = super().as_sequences(data, lengths)
        if data.is_discrete and self.emission.reads_counts:  # a count is not negative, so -1 is a missing one
            return data.with_values(torch.where(data.observed, data.values.double(), torch.nan))
        if (
            data.columns is None
            or self.columns is None
            or not are_named(self.columns)
            or data.columns == tuple(self.columns)
        ):
            return data
        names, wanted = [column.name for column in data.columns], [column.name for column in self.columns]
        if sorted(names) != sorted(wanted):
            raise ValueError(f"The data must have the columns {', '.join(wanted)}, but have {', '.join(names)}.")
        return data.with_values(data.values[:, [names.index(name) for name in wanted]]).with_columns(self.columns)

    def check(self, sequences: Sequences) -> None:
        self.emission.check(sequences)

    @torch.no_grad()
    def initialize(self, sequences: Sequences) -> None:
        """Takes center and scale from the data, also sizes where the model has none, and starts parts from the data unless they have values."""
        self.take_sizes([sequences])
        self.emission.check(sequences)
        if not self.transition.is_started:
            self.transition.start(sequences, torch.Generator().manual_seed(self.seed))
        if not self.emission.starts_from_data:
            return
        generator = torch.Generator().manual_seed(self.seed)
        self.emission.set_data_stats(sequences)
        if not bool(self.emission.is_set):
            part = excerpt(sequences, generator)
            self.emission.start(
                part, guess_states(part, self.num_states, self.restarts, generator, self.initialization)
            )
        self.emission.has_data_stats.fill_(True)

    def configure_optimizers(self) -> BaumWelch:
        if not self.distributions["transition"].is_started:
            raise MisconfigurationException(
                f"{type(self.transition).__name__} transitions start from all training data, which a plain DataLoader does not provide as a whole. "
                "Call `model.initialize(sequences)` before training, or train with a datamodule or `lightning_hmm.fit`."
            )
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.is_allocated:
            self.emission.forget()  # an interrupted run may have left something

    def setup(self, stage: str) -> None:
        data, begins = data_of(self.trainer), stage == "fit" and self.trainer.ckpt_path is None
        if begins and not self.is_allocated and data is not None and data.columns:
            self.allocate(data.columns)
        super().setup(stage)
        if begins and data is None and self.starts_from_data and self.transition.is_started:
            self._initialize_from_loader()

    def _initialize_from_loader(self) -> None:
        """Starts from the batches of a plain DataLoader, which has no data module. All ranks start from those of the first."""
        self.trainer.fit_loop.setup_data()  # Lightning would make the loader after the optimizer, which needs the parameters
        batches: Any = self.trainer.train_dataloader
        limit, seen, steps, num_symbols = self.trainer.num_training_batches, [], 0, 0
        for batch in islice(batches, int(limit) if math.isfinite(limit) else None):
            self._require_sequences(batch)
            if steps < STEPS_TO_START_FROM:
                seen.append(batch)
                steps += batch.num_steps
            if batch.is_discrete and batch.num_steps:
                num_symbols = max(num_symbols, int(batch.values.max()) + 1)
            elif steps >= STEPS_TO_START_FROM:
                break
        sequences = Sequences.cat(seen)
        if not self.is_allocated and sequences.is_discrete:
            strategy = self.trainer.strategy
            num_symbols = int(strategy.reduce(torch.tensor(num_symbols, device=strategy.root_device), reduce_op="max"))
            self.allocate(symbol_column(num_symbols))
        self.initialize(sequences)
        if self.trainer.world_size > 1:
            self.load_state_dict(self.trainer.strategy.broadcast(self.state_dict()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        columns = checkpoint.get("hyper_parameters", {}).get("columns")
        if not self.is_allocated and columns is not None:
            self.allocate(as_columns(columns))
        self.transition.adopt(checkpoint.get("state_dict", {}), "transition.")
        super().on_load_checkpoint(checkpoint)

    # E-step

    @torch.no_grad()
    def _e_step(self, batch: Sequences) -> dict[str, list[Tensor]]:
        self._require_sequences(batch)
        self.emission.check(batch)
        totals = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(self.restarts)]
        impossible: list[list[Tensor]] = [[] for _ in totals]
        counts: list[list[Tensor]] = [[] for _ in totals]
        for chunk in self._chunks(batch):
            for restart in range(self.restarts):
                found, added = self._expected_counts(chunk, restart)
                totals[restart] += chunk.weighted(found.log_likelihood).sum()
                impossible[restart].append(found.impossible_step)
                counts[restart] = (
                    [sum_ + part for sum_, part in zip(counts[restart], added, strict=True)]
                    if counts[restart]
                    else added
                )
        for steps in impossible:
            self._watch_impossible(batch, torch.cat(steps))
        self._record_likelihood(torch.stack(totals), batch.num_observed())
        stacked = iter(
            [parts[0][None] if len(parts) == 1 else torch.stack(parts) for parts in zip(*counts, strict=True)]
        )
        return {name: [next(stacked) for _ in range(part.num_statistics)] for name, part in self.distributions.items()}

    def _expected_counts(
        self, batch: Sequences, restart: int, *, full_matrix: bool = False, per_step: bool = False
    ) -> tuple[inference.EStep, list[Tensor]]:
        """The E-step of a chunk, and the expected statistics of the natural parameters of all parts, in their order.

        Args:
            batch: the chunk.
            restart: whose parameters are used.
            full_matrix: whether the E-step runs on the transitions as one matrix, whose counts are then those of all pairs of states.
            per_step: whether the E-step returns the rows of all steps.
        """
        leaves = self._leaves(restart)
        with torch.enable_grad():
            initial = self.transition.first_states(leaves[0][0], leaves[1])
            operator = self.transition.operator(leaves[1], batch)
            if full_matrix:
                operator = Dense(operator.to_dense(torch.zeros(0, dtype=torch.int64)))
        with torch.set_grad_enabled(self.emission.needs_graph(batch)):
            emitted = self.emission.evidence(leaves[2], batch)
        classes = self.transition.classes
        evidence = emitted if classes is None else emitted.shared(classes)
        found = inference.e_step(
            initial, operator, evidence, batch.offsets, batch.weights, dtype=self.message_dtype, per_step=per_step
        )
        flat = [leaf for part in leaves[:2] for leaf in part if leaf.requires_grad]
        counts = self.transition.statistics(initial, operator, found, flat)
        gradient = found.evidence if classes is None else emitted.gathered(found.evidence, classes)
        if not self.emission.is_closed:
            if "emission" not in self.frozen:
                self.emission.hold(restart, batch, gradient)
            return found, counts
        return found, [*counts, *self.emission.statistics(emitted, gradient, leaves[2])]

    def _leaves(self, restart: int) -> list[list[Tensor]]:
        """The natural parameters of the parts, for which gradients are recorded."""
        leaves = []
        for part in self.distributions.values():
            if part.num_statistics:
                leaves.append(
                    [value.detach().requires_grad_(value.is_floating_point()) for value in part.natural(restart)]
                )
            else:
                leaves.append(list(part.natural(restart)))
        return leaves

    def _chunks(self, batch: Sequences) -> Iterator[Sequences]:
        """Consecutive sequences whose arrays are small enough. The cuts depend on shapes alone, so that results do not depend on threads."""
        most = max(1, _CHUNK // max(self.num_states, 2 * (self.num_features or 1)))
        if batch.is_discrete or batch.num_steps <= most:
            yield batch
            return
        first, offsets = 0, batch.offsets
        while first < len(batch) or first == 0:
            last = max(first + 1, int(torch.searchsorted(offsets, offsets[first] + most, right=True)) - 1)
            yield batch if first == 0 and last >= len(batch) else batch[first:last]
            first = last

    @property
    def compiled_kernel(self) -> Any:
        return compiled_kernel_for(self.initial, self.transition, self.emission)


def _check_partners(transition: Transition, emission: Emission) -> None:
    """Refuses an emission and transitions of which one requires another."""
    names = {
        side: {family.__name__ for family in type(part).__mro__}
        for side, part in (("transition", transition), ("emission", emission))
    }
    if transition.partner is not None and transition.partner not in names["emission"]:
        raise ValueError(
            f"{type(transition).__name__} transitions must be combined with a {transition.partner} emission, but the emission is a {type(emission).__name__}."
        )
    if emission.partner is not None and emission.partner not in names["transition"]:
        raise ValueError(
            f"A {type(emission).__name__} emission must be combined with {emission.partner} transitions, but the transitions are {type(transition).__name__}."
        )


def _columns(
    columns: Sequence[Column | Mapping[str, Any]] | None,
    num_symbols: int | None,
    num_features: int | None,
    names: Sequence[str] | None,
) -> list[Column] | None:
    """The observed columns, from whichever option gives them."""
    check_counts(num_symbols=num_symbols, num_features=num_features)
    if columns is not None:
        return as_columns(columns)
    if num_symbols is not None and num_features is not None:
        raise ValueError(
            "`num_symbols` is for sequences of symbols and `num_features` for real vectors, but both are given. "
            "Give one of them, or `columns` for columns of both kinds."
        )
    if num_symbols is not None:
        if names is not None and len(names) != num_symbols:
            raise ValueError(f"`symbol_names` must name {num_symbols} symbols, but names {len(names)} instead.")
        return symbol_column(num_symbols, names)
    return None if num_features is None else feature_columns(num_features)


def columns_of(parts: Sequence[Sequences]) -> list[Column]:
    """The columns of data that come without a description: as many symbols as occur, or real columns."""
    features = parts[0].num_features
    if features is not None:
        return feature_columns(features)
    return symbol_column(1 + max(int(part.values.max()) for part in parts if part.num_steps))


def _set_emission(emission: Any, values: Any) -> None:
    if hasattr(emission, "parts"):
        if not isinstance(values, Sequence) or len(values) != len(emission.parts):
            raise ValueError(
                f"`emission` must be a list with an entry for each of the {len(emission.parts)} parts of the Product."
            )
        for part, mine in zip(emission.parts, values, strict=True):
            if mine is not None:
                _set_emission(part, mine)
        if all(bool(part.is_set) for part in emission.parts):
            emission.is_set.fill_(True)
    elif isinstance(values, Mapping):
        strange = (
            next((name for name in values if name != "probs"), None) if isinstance(emission, Categorical) else None
        )
        if strange is not None:
            raise ValueError(f"A Categorical emission has the parameter probs, but {strange!r} was given.")
        emission.set(**values)
    elif isinstance(emission, Categorical):
        emission.set(values)
    else:
        raise ValueError(
            f"`emission` must be a dictionary of parameters by name for a {type(emission).__name__}, but is a {type(values).__name__}."
        )
