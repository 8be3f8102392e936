"""The hidden Markov model composed of three distributions: of the first state, the transitions and the emissions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, Self, cast
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hmm import inference
from lightning_hmm.columns import Column, are_named, as_columns
from lightning_hmm.conversion import as_reals, frames_of
from lightning_hmm.data import data_of
from lightning_hmm.distributions import Categorical, Distribution, Emission, Full, Initial, Transition
from lightning_hmm.distributions.base import make_part
from lightning_hmm.distributions.starting import completed, excerpt, guess_states, known_states
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.inference.operators import Dense, Operator
from lightning_hmm.models.discrete import DiscreteHMM, states_of_classes
from lightning_hmm.models.observed_columns import (
    arrays_of_frames,
    columns_from_data,
    columns_from_options,
    reorder_columns,
)
from lightning_hmm.models.plain_loader import initialize_from_loader
from lightning_hmm.models.sequence_model import as_names, check_counts, check_seed
from lightning_hmm.models.training_loop import BaumWelchTraining
from lightning_hmm.optim import BatchIterations, BaumWelch
from lightning_hmm.optim.online import compiled_kernel_for
from lightning_hmm.sequences import Sequences

_NO_SIZES = "The model has no sizes yet. Train it, or give `num_symbols`, `num_features` or `columns`."
_CHUNK = 1 << 22  # The largest size of temporary arrays in an E-step. The allocator does not reuse larger ones.


class HMM(BaumWelchTraining, DiscreteHMM):
    r"""A hidden Markov model with K states and any combination of transition and emission, trained by Baum-Welch.

    .. math:: z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad y_t \mid z_t = k \sim p(\cdot \mid \theta_k)

    Use it to combine distributions freely, or to take the columns from the training data. `StandardHMM`, `DMCHMM`,
    `DenseHMM` and `ClonedHMM` are combinations with options of their own.

    Each part is an instance of a distribution or the name of its class. In a configuration file it has a
    ``class_path`` and ``init_args``.

    Args:
        num_states: Number of states K.
        emission: Distribution of the observations. By default `Categorical` for symbols and a diagonal `Gaussian` for
            real vectors.
        transition: Distribution of the next state. By default `Full`.
        initial: Distribution of the first state: `Initial` (free probabilities, the default), `Stationary` (the
            stationary distribution of the transitions) or `InputDrivenInitial`.
        num_symbols: Number of symbols, for sequences of symbols.
        num_features: Number of columns, for sequences of real vectors.
        columns: Descriptions of the observed columns, instead of `num_symbols` or `num_features`. If none of the three
            is given, the columns are those of the training data.
        seed: Seed for the initial parameters.
        restarts: Number of random initializations trained in the same run. The one with the best validation likelihood
            at the end (training likelihood if there is no validation set) is used for inference.
        initialization: Initialization of emissions that depend on the data: from the clusters of k-means ("kmeans"), or
            from the points nearest to random points ("random").
        discount: Discount factor of online EM, at least 0 and below 1. Online EM updates the parameters after every
            batch, from statistics in which those of earlier batches are multiplied by this factor. If not given, batch
            EM updates the parameters after every epoch.
        sequences_per_update: Number of sequences per update of online EM, for several updates inside each batch.
        iterations_per_epoch: Number of batch-EM iterations in each epoch of the Trainer, for small data in one batch.
        frozen: Parts whose parameters are not updated: any of "initial", "transition" and "emission".
        arithmetic: Floating-point type of the messages. "float32" is faster; "float64" has 15 digits.
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    Example:
        >>> from lightning_hmm import HMM, Poisson, fit
        >>> counts = [[0.0], [1.0], [0.0], [9.0], [8.0], [9.0], [0.0], [1.0]]
        >>> model = fit(HMM(num_states=2, emission=Poisson()), [counts], max_epochs=20)
        >>> sorted(round(rate, 1) for rate in model.emission.rate.flatten().tolist())
        [0.4, 8.7]
        >>> states = model.decode([counts])[0]
        >>> states.eq(states[0]).int().tolist()
        [1, 1, 1, 0, 0, 0, 1, 1]
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
        observed = columns_from_options(columns, num_symbols, num_features, symbol_names)
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
        emitted = None if emission is None else make_part(emission, Emission, "emission")
        moves = make_part(transition or (emitted and emitted.partner) or Full(), Transition, "transition")
        self.initial = make_part(initial or moves.default_initial, Initial, "initial")
        self.transition = moves
        self.emission = emitted
        if observed is not None:
            self.allocate(observed)

    def _record_options(self, arguments: dict[str, Any]) -> None:
        """Stores the arguments of the constructor for checkpoints.

        The first call is that of the most derived class; later calls have no effect.
        """
        if "_given_options" not in self.__dict__:
            options = {name: value for name, value in arguments.items() if name not in ("self", "__class__")}
            if "frozen" in options:
                options["frozen"] = as_names("frozen", options["frozen"])
            self._given_options = options

    # Sizes

    @property
    def is_allocated(self) -> bool:
        """Whether the sizes of the data are set and the parameters exist."""
        return self.columns is not None

    def allocate(self, columns: Sequence[Column]) -> Self:
        """Creates the parameters for observations with these columns.

        Parameters that are not initialized from the data are drawn at random with `seed`.
        """
        if self.is_allocated:
            raise ValueError("The model has parameters already. Create a new model for other columns.")
        columns = list(columns)
        categorical = len(columns) == 1 and columns[0].is_categorical
        if self.emission is None:
            default = "Categorical" if categorical else "Gaussian"
            self.emission = make_part(self.transition.partner or default, Emission, "emission")
        _check_partners(self.transition, self.emission)
        self.num_symbols, self.num_features = (columns[0].num_categories, None) if categorical else (None, len(columns))
        for part in (self.transition, self.emission, self.initial):
            part.belong_to(self)
        self.emission.allocate(self.restarts, self.num_states, columns)
        self.transition.allocate(self.restarts, self.num_states)
        self.initial.allocate(self.restarts, self.num_states)
        self.columns = columns
        self._randomize(torch.Generator().manual_seed(self.seed))
        self._drawn = self._emission_checksum()
        self._save_options()
        return self

    def _emission_checksum(self) -> int | None:
        """Returns a checksum of the parameters of a categorical emission, to detect values that a user has set."""
        log_probs = getattr(self.emission, "log_probs", None)  # Embedded emissions have none.
        return None if log_probs is None else crc32(log_probs.detach().cpu().contiguous().numpy())

    def _randomize(self, generator: torch.Generator) -> None:
        """Draws the initial parameters that do not depend on data."""
        for part in self.distributions.values():
            part.randomize(generator)

    def _save_options(self) -> None:
        """Saves the options of the constructor as plain values, which a checkpoint can contain."""
        assert self.columns is not None
        options = dict(self._given_options)
        if "columns" in options:
            options |= {"num_symbols": None, "num_features": None}  # Both follow from the columns.
            options |= {name: part.config for name, part in self.distributions.items() if name in options}
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
        """Raises a `ValueError` if an emission that is initialized from data has no values yet."""
        self._require_allocated()
        for part in getattr(self.emission, "parts", [self.emission]):
            if part.starts_from_data and part.names and not bool(part.is_set):
                names = " and ".join(f"`{name}`" for name in part.names)
                raise ValueError(
                    f"The {type(part).__name__} emission has no values yet. Train the model, or set {names} with "
                    "`set_parameters`."
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
        """(K, K) p(z_t+1 = j | z_t = i), for transitions that have a constant matrix."""
        matrix = self.transition.matrix(int(self.best_restart))
        if matrix is None:
            raise AttributeError  # Python then calls `__getattr__`, which raises the error with a message.
        return matrix

    @property
    def emission_probs(self) -> Tensor:
        """(K, V) p(symbol | state), for categorical emissions."""
        if self.is_allocated and not self.emission.reads_symbols:
            raise AttributeError  # Python then calls `__getattr__`, which raises the error with a message.
        return self.emission.probs

    def __getattr__(self, name: str) -> Any:
        # Python also calls this method if one of the properties above raises an `AttributeError`.
        if name in ("initial_probs", "transition_probs", "emission_probs") and self.__dict__.get("columns") is None:
            raise AttributeError(_NO_SIZES)
        if name == "initial_probs":
            raise AttributeError("`initial_probs` depends on inputs: see `model.initial.probs_at(inputs)`.")
        if name == "transition_probs":
            raise AttributeError(
                f"`transition_probs` is a matrix, but {type(self.transition).__name__} transitions "
                f"{self.transition.no_matrix}."
            )
        if name == "emission_probs":
            message = "`emission_probs` is for categorical emissions"
            if isinstance(self.emission, Emission) and self.emission.names:
                names = " and ".join(f"`{name}`" for name in self.emission.names)
                message += f": a {type(self.emission).__name__} emission has {names}"
            raise AttributeError(f"{message}.")
        return super().__getattr__(name)

    def set_parameters(self, initial: Any = None, transition: Any = None, emission: Any = None) -> Self:
        """Sets parameters of all restarts. Parameters that are not given keep their values.

        Probabilities of zero remain zero in training.

        Args:
            initial: (K,) probabilities.
            transition: Probabilities, (K, K) for a full matrix, or a dictionary of the transition's parameters by name.
            emission: A dictionary of the emission's parameters by name, such as ``{"mean": ..., "variance": ...}``, the
                (K, V) probabilities of a categorical emission, or, for a `Product`, a list with an entry for each part,
                which is ``None`` for a part that keeps its values.
        """
        self._require_allocated()
        if initial is not None:
            self.initial.set(initial)
        if transition is not None:
            _set_transition(self.transition, transition)
        if emission is not None:
            _set_emission(self.emission, emission)
        return self

    # Inference

    @property
    def uses_labels(self) -> bool:
        return True

    def chain(self, restart: int, sequences: Sequences | None = None) -> tuple[Tensor, Operator]:
        self._require_allocated()
        natural = self.transition.natural(restart)
        initial = self.transition.first_states(self.initial.log_first(self.initial.natural(restart)), natural)
        return initial, self.transition.operator(natural, self._with_known_states(restart, sequences))

    def path_chain(self, restart: int, sequences: Sequences) -> tuple[Tensor, Operator, Tensor | None]:
        self._require_allocated()
        found: tuple[Tensor, Operator, Tensor | None] = self.transition.path_chain(
            self.initial.log_first(self.initial.natural(restart)),
            self.transition.natural(restart),
            self._with_known_states(restart, sequences),
        )
        return found

    def _with_known_states(self, restart: int, sequences: Sequences | None) -> Sequences | None:
        """Adds labels where only one state is possible, for transitions that depend on known states."""
        if sequences is None or not self.transition.needs_known_states:
            return sequences
        with torch.no_grad():
            possible = self.emission.evidence(self.emission.natural(restart), sequences).rows() > -torch.inf
        known = torch.where(possible.sum(1) == 1, possible.int().argmax(1), -1)
        return sequences.replaced(
            labels=known if sequences.labels is None else torch.where(sequences.labels >= 0, sequences.labels, known)
        )

    def evidence(self, restart: int, sequences: Sequences) -> Evidence:
        self._require_allocated()
        self.emission.check(sequences)
        if not torch.is_grad_enabled():
            self._require_values()
        found: Evidence = self.emission.evidence(self.emission.natural(restart), sequences)
        return self._started(found, self.initial.natural(restart), sequences)

    def _started(self, evidence: Evidence, natural: Sequence[Tensor], sequences: Sequences) -> Evidence:
        """Adds the factors of the first state that differ between sequences to the evidence of the first steps."""
        factors = self.initial.first_evidence(natural, sequences)
        if factors is None:
            return evidence
        return Rows(evidence.rows().index_add(0, sequences.first_steps, factors))

    @property
    def needs_inputs(self) -> bool:
        return any(part.needs_inputs for part in self.distributions.values())

    def _draw_states(self, steps: Sequences, generator: torch.Generator) -> Tensor:
        restart = int(self.best_restart)
        nothing = Rows(torch.zeros(steps.num_steps, self.num_states, dtype=torch.float64, device=steps.device))
        started = self._started(nothing, self.initial.natural(restart), steps)
        if started is nothing:
            return super()._draw_states(steps, generator)
        initial, operator = self.chain(restart, steps)
        # Without observations, the posterior is the distribution of the chain.
        states = inference.sample_posterior(initial, operator, started, steps.offsets, generator)
        return states_of_classes(states, operator.classes)

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        self._require_values()
        emitted: Sequences = self.emission.emit(states, generator)
        return emitted

    def predict_emission(self, state_probs: Tensor, inputs: Tensor | None = None) -> Any:
        if self.emission.needs_inputs:
            return self.emission.predict(state_probs, inputs)
        return self.emission.predict(state_probs)

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1, inputs: Any = None) -> Any:
        """Returns the distribution of the observation `steps` steps after the end of each sequence.

        See `DiscreteHMM.predict_next`.
        """
        if self.emission is None or not self.emission.depends_on_past:
            return super().predict_next(sequences, steps, inputs)
        sequences = self.as_sequences(sequences)
        states, operator, move = self._first_states_after(sequences, steps, inputs)
        return self.emission.forecast(sequences, states, move, steps, operator.classes)

    # Initialization

    @property
    def starts_from_data(self) -> bool:
        return not self.is_allocated or self.emission.starts_from_data or not self.transition.is_started

    def take_sizes(self, parts: Sequence[Sequences]) -> None:
        named = parts[0].columns
        if not self.is_allocated:
            columns = columns_from_data(parts) if named is None else list(named)
            self.allocate(columns if self.emission is None else self.emission.columns_of(columns, parts))
            return
        assert self.columns is not None
        if named is not None and len(named) == len(self.columns) and not are_named(self.columns):
            self.columns = [replace(column, name=other.name) for column, other in zip(self.columns, named, strict=True)]
            self._save_options()

    def as_sequences(self, data: Any, lengths: Any = None) -> Sequences:
        """Converts data to `Sequences` on the device of the model, as `SequenceModel.as_sequences`.

        If the emission describes real columns, they are matched by name with those of a DataFrame or of `Sequences`,
        and integers are converted to floating-point numbers.
        """
        if self.emission is None or self.emission.reads_symbols:
            return super().as_sequences(data, lengths)
        frames = frames_of(data)
        if frames is not None:
            columns, arrays = arrays_of_frames(frames, self.columns)
            found = super().as_sequences(arrays if lengths is None else np.concatenate(arrays), lengths)
            return found.with_columns(columns)
        if not isinstance(data, Sequences):
            found = super().as_sequences(as_reals(data), lengths)
            # Empty sequences have no data type and are converted to symbols by default.
            if found.is_discrete and not found.num_steps and self.num_features is not None:
                return found.with_values(found.values.new_zeros(0, self.num_features, dtype=torch.float64))
            return found
        data = super().as_sequences(data, lengths)
        if data.is_discrete and self.emission.reads_counts:  # Counts are not negative, so -1 marks a missing one.
            return data.with_values(torch.where(data.observed, data.values.double(), torch.nan))
        return data if self.columns is None else reorder_columns(data, self.columns)

    def check(self, sequences: Sequences) -> None:
        self.emission.check(sequences)
        self.transition.check(sequences)

    @torch.no_grad()
    def initialize(self, sequences: Sequences) -> None:
        """Initializes the parameters that depend on the training data.

        This includes the sizes of the model if it has none yet, and the location and scale of the data. Parts that
        already have values keep them.
        """
        self.take_sizes([sequences])
        self.check(sequences)
        if not self.transition.is_started:
            self.transition.start(sequences, torch.Generator().manual_seed(self.seed))
        generator = torch.Generator().manual_seed(self.seed)
        if sequences.has_known_states and self.uses_labels:
            sequences.check_states(self.num_states)
            if self._drawn is not None and self._drawn == self._emission_checksum() and "emission" not in self.frozen:
                self._start_from_known_states(excerpt(sequences, generator))
        if not self.emission.starts_from_data:
            return
        self.emission.set_data_stats(sequences)
        if not bool(self.emission.is_set):
            part = excerpt(sequences, generator)
            self.emission.start(part, self._guess_states(part, generator))
        self.emission.has_data_stats.fill_(True)

    def _start_from_known_states(self, sequences: Sequences) -> None:
        """Initializes a categorical emission from known states, so that states are numbered as the labels.

        At other steps the states are guessed from the parameters that were drawn.
        """
        known = known_states(sequences, self.num_states).to(self.device)
        sequences = sequences.to(self.device)
        rows = [self.emission.evidence(self.emission.natural(n), sequences).rows() for n in range(self.restarts)]
        weights = sequences.step_weights()
        self.emission.start(sequences, [completed(known, guess.softmax(1), weights) for guess in rows])

    def _guess_states(self, sequences: Sequences, generator: torch.Generator) -> list[Tensor]:
        """Guesses the posterior probabilities of the states for each restart, to initialize the emission from."""
        return guess_states(sequences, self.num_states, self.restarts, generator, self.initialization)

    def configure_optimizers(self) -> BaumWelch:
        if not self.distributions["transition"].is_started:
            raise MisconfigurationException(
                f"{type(self.transition).__name__} transitions are initialized from the training set, which a plain "
                "`DataLoader` does not expose. Call `model.initialize(sequences)` before training, or train with a "
                "datamodule or `lightning_hmm.fit`."
            )
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.is_allocated:
            for part in self.distributions.values():
                part.forget()  # An interrupted run leaves statistics behind.

    def setup(self, stage: str) -> None:
        data, begins = data_of(self.trainer), stage == "fit" and self.trainer.ckpt_path is None
        if begins and not self.is_allocated and data is not None and data.columns:
            self.allocate(data.columns)
        super().setup(stage)
        if begins and data is not None and data.knows_states:
            self.initialize(data.train_sequences)
        if begins and data is None and self.starts_from_data and self.transition.is_started:
            initialize_from_loader(self)

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
        """Returns the E-step of a chunk and the expected statistics of the natural parameters of all parts, in order.

        Args:
            batch: The chunk.
            restart: Index of the restart whose parameters are used.
            full_matrix: Whether the transitions are converted to one matrix, for the counts of all pairs of states.
            per_step: Whether the E-step also returns one row per step.
        """
        leaves = self._leaves(restart)
        with torch.enable_grad():
            initial = self.transition.first_states(self.initial.log_first(leaves[0]), leaves[1])
            operator = self.transition.operator(leaves[1], self._with_known_states(restart, batch))
            if full_matrix:
                operator = Dense(operator.to_dense(torch.zeros(0, dtype=torch.int64)))
        with torch.set_grad_enabled(self.emission.needs_graph(batch)):
            emitted = self.emission.evidence(leaves[2], batch)
        known = self._with_labels(self._started(emitted, leaves[0], batch), batch, operator)
        found = inference.e_step(
            initial, operator, known, batch.offsets, batch.weights, dtype=self.message_dtype, per_step=per_step
        )
        flat = [leaf for part in leaves[:2] for leaf in part if leaf.requires_grad]
        counts = self.transition.statistics(initial, operator, found, flat)
        if self._holds("initial"):
            self.initial.hold(restart, batch, found.evidence[batch.first_steps])
        if self._holds("transition"):
            self.transition.hold(restart, batch, *operator.gradients(found.counts))
        gradient = found.evidence if known.live is emitted.live else emitted.pull(found.evidence)
        if self._holds("emission"):
            self.emission.hold(restart, batch, gradient)
        if not self.emission.num_statistics:
            return found, counts
        return found, [*counts, *self.emission.statistics(emitted, gradient, leaves[2])]

    def _holds(self, name: str) -> bool:
        """Returns whether the M-step of a part needs the batches of an epoch."""
        return not self.distributions[name].is_closed and name not in self.frozen

    def _leaves(self, restart: int) -> list[list[Tensor]]:
        """Returns the natural parameters of the parts as leaves of the autograd graph."""
        leaves = []
        for part in self.distributions.values():
            if part.num_statistics:
                leaves.append(
                    [value.detach().requires_grad_(value.is_floating_point()) for value in part.natural(restart)]
                )
            else:
                leaves.append([value.detach() for value in part.natural(restart)])
        return leaves

    def _chunks(self, batch: Sequences) -> Iterator[Sequences]:
        """Splits a batch into runs of consecutive sequences that limit the memory of an E-step.

        The cuts depend only on shapes, so results do not depend on the number of threads.
        """
        numbers = 0 if batch.is_discrete else max(self.num_states, 2 * (self.num_features or 1))
        numbers = max(numbers, 0 if batch.state_weights is None else self.num_states)
        numbers = max(numbers, self.emission.width, self.transition.numbers_per_step)
        most = _CHUNK // max(1, numbers)
        if not numbers or batch.num_steps <= most:
            yield batch
            return
        first, offsets = 0, batch.offsets
        while first < len(batch) or first == 0:
            last = max(first + 1, int(torch.searchsorted(offsets, offsets[first] + most, right=True)) - 1)
            yield batch if first == 0 and last >= len(batch) else batch[first:last]
            first = last

    def _prepared_iteration(self, batch: Sequences) -> Callable[[], Tensor | None] | None:
        optimizer = cast(Any, self.optimizers()).optimizer
        is_plain = self.arithmetic == "float64" and self._is_plain(batch) and type(self)._e_step is HMM._e_step
        chunks = list(self._chunks(batch)) if is_plain else []
        if chunks and BatchIterations.apply_to(optimizer, chunks):
            return BatchIterations(optimizer, chunks)
        return super()._prepared_iteration(batch)

    @property
    def compiled_kernel(self) -> Any:
        return compiled_kernel_for(self.initial, self.transition, self.emission)


def _check_partners(transition: Transition, emission: Emission) -> None:
    """Raises a `ValueError` if the transition requires another emission, or the emission another transition."""
    names = {
        side: {family.__name__ for family in type(part).__mro__}
        for side, part in (("transition", transition), ("emission", emission))
    }
    if transition.partner is not None and transition.partner not in names["emission"]:
        raise ValueError(
            f"{type(transition).__name__} transitions must be combined with a {transition.partner} emission, "
            f"but the emission is a {type(emission).__name__}."
        )
    if emission.partner is not None and emission.partner not in names["transition"]:
        raise ValueError(
            f"The emission {type(emission).__name__} must be combined with {emission.partner} transitions, "
            f"but the transitions are {type(transition).__name__}."
        )


def _set_transition(transition: Any, values: Any) -> None:
    """Sets the parameters of a transition, given by name in a dictionary or as its one parameter."""
    if not isinstance(values, Mapping):
        transition.set(values)
        return
    names = list(inspect.signature(transition.set).parameters)
    unknown = next((name for name in values if name not in names), None)
    if unknown is not None:
        raise ValueError(
            f"{type(transition).__name__} transitions have the parameters {', '.join(names)}, "
            f"but {unknown!r} was given."
        )
    transition.set(**values)


def _set_emission(emission: Any, values: Any) -> None:
    """Sets the parameters of an emission; for a `Product`, those of each part."""
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
        unknown = next((name for name in values if name != "probs"), None)
        if isinstance(emission, Categorical) and unknown is not None:
            raise ValueError(f"A Categorical emission has the parameter probs, but {unknown!r} was given.")
        emission.set(**values)
    elif isinstance(emission, Categorical):
        emission.set(values)
    else:
        raise ValueError(
            f"`emission` must be a dictionary of parameters by name for a {type(emission).__name__}, "
            f"but is a {type(values).__name__}."
        )
