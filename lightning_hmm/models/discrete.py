"""Base class of the models with discrete states: scoring, decoding, sampling, prediction and evaluation.

A subclass provides its hidden chain (`chain`), the evidence of a batch (`evidence`) and its emissions (`emit`,
`predict_emission`). The methods here combine these with the functions of `lightning_hmm.inference`.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hmm import inference
from lightning_hmm.conversion import packed_column
from lightning_hmm.data import data_of
from lightning_hmm.inference.evidence import Evidence, with_known_states
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import impossible_message
from lightning_hmm.metrics import LabelAccuracy, LogLikelihoodPerSymbol, MatchedStateAccuracy
from lightning_hmm.models.sequence_model import SequenceModel, check_counts, check_seed
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING


class Posterior(NamedTuple):
    """Posterior distributions of the states given the observations.

    log_likelihood: (N,) log p(y_1:T).
    filtered: p(z_t | y_1:t), one row of state probabilities per step.
    smoothed: p(z_t | y_1:T), one row of state probabilities per step.
    transition_counts: Expected counts of the transition's natural parameters, weighted by the weights of the sequences:
        (S, S) for a full matrix, or a tuple of tensors if the transition has several natural parameters.
    """

    log_likelihood: Tensor
    filtered: Sequences
    smoothed: Sequences
    transition_counts: Any


class DiscreteHMM(SequenceModel):
    """Base class of hidden Markov models with K discrete states.

    Derive from `HMM` to combine distributions; derive from this class only if the model has a training algorithm of its
    own. A subclass calls ``super().__init__``, creates its parameters, and implements the abstract methods and
    ``training_step``.

    Args:
        num_states: Number of hidden states K.
        num_symbols: Number of symbols, for sequences of symbols; else ``None``.
        num_features: Number of columns, for sequences of real vectors; else ``None``.
        restarts: Number of random initializations trained in the same run. The one with the best validation likelihood
            at the end (training likelihood if there is no validation set) is used for inference.
        arithmetic: Floating-point type of the messages, "float64" or "float32". Parameters and statistics are float64
            in either case.
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    Example:
        The methods for inference are the same for all models with discrete states.

        >>> from lightning_hmm import StandardHMM
        >>> from lightning_hmm.models import DiscreteHMM
        >>> model = StandardHMM(num_states=2, num_symbols=2)
        >>> isinstance(model, DiscreteHMM)
        True
        >>> model = model.set_parameters([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], [[0.8, 0.2], [0.2, 0.8]])
        >>> model.decode([[0, 0, 1, 1, 1]])[0].tolist()
        [0, 0, 1, 1, 1]
        >>> [round(value, 3) for value in model.predict_next([[0, 0, 1, 1, 1]])[0].tolist()]
        [0.304, 0.696]
        >>> round(model.score([[0, 0, 1, 1, 1]]).item(), 3)
        -3.557
    """

    def __init__(
        self,
        *,
        num_states: int,
        num_symbols: int | None,
        num_features: int | None,
        restarts: int = 1,
        arithmetic: str = "float64",
        symbol_names: Sequence[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        check_counts(num_states=num_states)
        super().__init__(
            num_symbols=num_symbols,
            num_features=num_features,
            restarts=restarts,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
        self.num_states = num_states
        self._impossible: list[Tensor] = []
        self._warned: set[str] = set()

    # Implemented by subclasses

    @abstractmethod
    def chain(self, restart: int, sequences: Sequences | None = None) -> tuple[Tensor, Operator]:
        """Returns the log-probabilities of the first state, and the transition operator, of one restart.

        `sequences` is used by transitions that depend on the data.
        """

    @abstractmethod
    def evidence(self, restart: int, sequences: Sequences) -> Evidence:
        """Returns the log-likelihoods of the observations under each state, without labels and state weights."""

    @abstractmethod
    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        """Draws an observation for each of the given states."""

    @abstractmethod
    def predict_emission(self, state_probs: Tensor, inputs: Tensor | None = None) -> Any:
        """Returns the distribution of an observation, given the probabilities of its state and its inputs."""

    @property
    def needs_inputs(self) -> bool:
        """Whether a distribution of the model depends on `Sequences.inputs`."""
        return False

    @property
    @abstractmethod
    def num_free_parameters(self) -> int:
        """The number of degrees of freedom."""

    def path_chain(self, restart: int, sequences: Sequences) -> tuple[Tensor, Operator, Tensor | None]:
        """Returns the chain whose most probable path is decoded: as `chain`, and the model state of each of its states.

        The model states are ``None`` if they are the states of the chain.
        """
        initial, operator = self.chain(restart, sequences)
        return initial, operator, operator.classes

    # Inference

    @property
    def message_dtype(self) -> torch.dtype:
        """The floating-point type of the messages in training and scoring."""
        return torch.float32 if self.arithmetic == "float32" else torch.float64

    def problem(self, sequences: Sequences, restart: int | None = None) -> tuple[Tensor, Operator, Evidence, Tensor]:
        """Returns the first arguments of the functions of `lightning_hmm.inference`, by default of the best restart.

        Labels and state weights of the sequences are part of the evidence.
        """
        restart = int(self.best_restart) if restart is None else restart
        initial, operator = self.chain(restart, sequences)
        evidence = self._with_labels(self.evidence(restart, sequences), sequences, operator)
        return initial, operator, evidence, sequences.offsets

    def _with_labels(self, evidence: Evidence, sequences: Sequences, operator: Operator) -> Evidence:
        """Applies labels and state weights of the sequences to their evidence."""
        if not sequences.has_known_states:
            return evidence
        self._refuse_known_states(sequences)
        sequences.check_states(self.num_states)
        classes = None if evidence.num_states == self.num_states else operator.classes
        return with_known_states(evidence, sequences.labels, sequences.state_weights, classes)

    def _filter(self, sequences: Sequences, restart: int | None = None) -> inference.EStep:
        """Runs the forward pass, for log-likelihoods and impossible steps."""
        return inference.e_step(*self.problem(sequences, restart), dtype=self.message_dtype, smooth=False)

    @torch.no_grad()
    def score(self, sequences: Any) -> Tensor:
        """Returns the (N,) natural log-likelihoods log p(y) of the sequences. Labels and state weights are not used.

        It is -inf for an impossible sequence, and a warning contains the impossible step.
        """
        return self._score(self.as_sequences(sequences).without_labels())

    @torch.no_grad()
    def score_labeled(self, sequences: Any) -> Tensor:
        r"""Returns the (N,) natural log-likelihoods of the sequences together with their labels and state weights.

        .. math:: \log \sum_z p(y, z) \prod_t w_t(z_t)

        The factor :math:`w_t(k)` is the weight of state k at step t, or, at a labeled step, 1 for the label and 0 for
        other states. This is the quantity that training maximizes. Without labels and state weights it equals `score`.
        """
        return self._score(self.as_sequences(sequences))

    def _score(self, sequences: Sequences) -> Tensor:
        found = self._filter(sequences)
        self._warn_impossible(sequences, found.impossible_step, stacklevel=5)
        return found.log_likelihood

    @torch.no_grad()
    def decode(self, sequences: Any) -> Sequences:
        """Returns the most probable states (Viterbi), given labels and state weights if the sequences have any.

        Those of an impossible sequence are -1, with a warning.
        """
        sequences = self.as_sequences(sequences)
        restart = int(self.best_restart)
        first, operator, classes = self.path_chain(restart, sequences)
        evidence = self._with_labels(self.evidence(restart, sequences), sequences, operator)
        if classes is not None and evidence.num_states != operator.num_states:
            evidence = evidence.shared(classes)
        path = inference.viterbi(first, operator, evidence, sequences.offsets)
        self._warn_where_impossible(sequences, path.log_probability == -torch.inf)
        return sequences.with_values(states_of_classes(path.states, classes))

    @torch.no_grad()
    def posterior(self, sequences: Any) -> Posterior:
        """Returns the filtered and smoothed state probabilities and the expected transition counts.

        Labels and state weights of the sequences, if there are any, are part of the evidence.
        """
        sequences = self.as_sequences(sequences)
        problem = self.problem(sequences)
        found = inference.posterior(*problem, sequences.weights)
        self._warn_where_impossible(sequences, found.log_likelihood == -torch.inf)
        counts = found.counts[0] if len(found.counts) == 1 else found.counts
        filtered, smoothed = (_sum_over_classes(rows, problem[1]) for rows in (found.filtered, found.smoothed))
        return Posterior(found.log_likelihood, sequences.with_values(filtered), sequences.with_values(smoothed), counts)

    @torch.no_grad()
    def sample(
        self,
        num_sequences: int = 1,
        length: int | Sequence[int] = 100,
        seed: int = 0,
        return_states: bool = False,
        *,
        inputs: Any = None,
        times: Any = None,
    ) -> Any:
        """Draws sequences.

        If the model depends on inputs or times, give these instead of `num_sequences` and `length`: a list with one
        array for each sequence, which determines the number of sequences and their lengths, or, for `inputs`,
        `Sequences` with inputs. The drawn sequences have these inputs and times.

        Args:
            num_sequences: Number of sequences.
            length: Length of all sequences, or the length of each.
            seed: Seed of the random numbers.
            return_states: Whether to return the hidden states as well.
            inputs: (T, M) inputs of the steps of each sequence.
            times: (T,) times of the steps of each sequence, or a tensor with one entry for each step of all sequences.
        """
        check_seed(seed)
        steps = self._steps_to_sample(num_sequences, length, inputs, times)
        generator = torch.Generator().manual_seed(seed)
        states = steps.with_values(self._draw_states(steps, generator))
        observations = self.emit(states, generator)
        return (observations, states) if return_states else observations

    def _steps_to_sample(self, num_sequences: int, length: Any, inputs: Any, times: Any) -> Sequences:
        """Returns sequences of the given lengths with missing values and with the columns that are given."""
        if isinstance(inputs, Sequences):
            if inputs.inputs is None:
                raise ValueError("`inputs` must be Sequences with inputs, but these have none.")
            num_sequences, length = len(inputs), inputs.lengths
            inputs, times = inputs.inputs, inputs.times if times is None else times
        columns = {name: value for name, value in {"inputs": inputs, "times": times}.items() if value is not None}
        lists = [column for column in columns.values() if isinstance(column, (list, tuple))]
        if lists:
            num_sequences, length = len(lists[0]), [len(part) for part in lists[0]]
        lengths = _lengths_to_sample(num_sequences, length)
        values = (
            torch.full((int(lengths.sum()),), MISSING)
            if self.num_features is None
            else torch.full((int(lengths.sum()), self.num_features), torch.nan, dtype=torch.float64)
        )
        packed = {
            name: packed_column(column, lengths.tolist(), name) if isinstance(column, (list, tuple)) else column
            for name, column in columns.items()
        }
        return Sequences.from_lengths(values, lengths, **packed).to(self.device)

    def _draw_states(self, steps: Sequences, generator: torch.Generator) -> Tensor:
        """Draws the states of sequences with the lengths and the other columns of `steps`."""
        initial, operator = self.chain(int(self.best_restart), steps)
        states = inference.sample(initial, operator, steps.lengths, generator)[0]
        return states_of_classes(states, operator.classes)

    @torch.no_grad()
    def sample_posterior(self, sequences: Any, seed: int = 0) -> Sequences:
        """Draws one path of hidden states for each sequence from p(states | sequence)."""
        check_seed(seed)
        sequences = self.as_sequences(sequences)
        problem = self.problem(sequences)
        states = inference.sample_posterior(*problem, torch.Generator().manual_seed(seed))
        return sequences.with_values(states_of_classes(states, problem[1].classes))

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1, inputs: Any = None) -> Any:
        """Returns the distribution of the observation `steps` steps after the end of each sequence.

        It consists of (N, V) probabilities for symbols and of moments for real vectors. The row of an impossible
        sequence is NaN, with a warning. If the model depends on inputs, give `inputs`, an (N, steps, M) array of those
        after the end of each sequence.
        """
        sequences = self.as_sequences(sequences)
        if not self.needs_inputs:
            problem = self.problem(sequences)
            states = inference.predict(*problem, steps=steps)
            self._warn_where_impossible(sequences, states.isnan().any(1))
            return self.predict_emission(_sum_over_classes(states, problem[1]))
        states, operator, move = self._first_states_after(sequences, steps, inputs)
        for step in range(1, steps):
            states = move(states, step)
        last_inputs = _inputs_to_predict(sequences, steps, inputs)[:, -1]
        return self.predict_emission(_sum_over_classes(states, operator), last_inputs)

    def _first_states_after(
        self, sequences: Sequences, steps: int, inputs: Any
    ) -> tuple[Tensor, Operator, Callable[[Tensor, int], Tensor]]:
        """Returns what is required to predict some steps after the end of each sequence.

        Returns:
            The (N, S) probabilities of the state of the first step after the end, the transition operator, and a
            function of (M, S) messages and of the number n >= 1 of steps after that one, which performs the transition
            into it. M is a multiple of N, with consecutive messages for each sequence.
        """
        if self.needs_inputs:
            rows = _inputs_to_predict(sequences, steps, inputs)
            first = _lengthened(sequences, rows[:, :1])
            found = inference.e_step(*self.problem(first), dtype=self.message_dtype, smooth=False)
            states = torch.where((found.impossible_step >= 0)[:, None], torch.nan, found.last.double())
            longer = _lengthened(sequences, rows)
            operator, starts = self.chain(int(self.best_restart), longer)[1], longer.offsets[1:] - steps
        else:
            initial, operator, evidence, offsets = self.problem(sequences)
            states = inference.predict(initial, operator, evidence, offsets)
            starts = (offsets[1:] - 1).clamp(min=0)
        self._warn_where_impossible(sequences, states.isnan().any(1))

        def move(messages: Tensor, step: int) -> Tensor:
            at = (starts + step if self.needs_inputs else starts).to(messages.device)
            return operator.predict(messages, at.repeat_interleave(len(messages) // max(len(at), 1)))

        return states, operator, move

    def aic(self, sequences: Any) -> float:
        """Returns Akaike's information criterion, 2 k - 2 log L with the weighted likelihood L. Lower is better."""
        return 2 * self.num_free_parameters - 2 * self._total_score(self._with_observations(sequences))

    def bic(self, sequences: Any) -> float:
        """Returns Schwarz's information criterion, k log n - 2 log L. Lower is better.

        The number n of observed steps and the likelihood L are weighted by the weights of the sequences.
        """
        sequences = self._with_observations(sequences)
        log_size = math.log(max(float(sequences.num_observed()), 1.0))
        return self.num_free_parameters * log_size - 2 * self._total_score(sequences)

    def _with_observations(self, data: Any) -> Sequences:
        sequences = self.as_sequences(data)
        if not float(sequences.num_observed()) > 0:
            raise ValueError(
                f"`sequences` must have an observed step, but none of the {sequences.num_steps} steps is observed."
            )
        return sequences

    def _total_score(self, sequences: Sequences) -> float:
        return float(sequences.weighted(self.score(sequences)).sum())

    def _warn_where_impossible(self, sequences: Sequences, impossible: Tensor) -> None:
        if bool(impossible.any()):
            self._warn_impossible(sequences, self._filter(sequences).impossible_step, stacklevel=5)

    def _why_impossible(self, sequences: Sequences, n: int, t: int) -> str:
        """Returns a reason and a remedy for the zero probability of step t of sequence n, to append to the message."""
        return ""

    def _warn_impossible(self, sequences: Sequences, impossible: Tensor, stacklevel: int = 4) -> None:
        """Warns about the first impossible sequence.

        The default `stacklevel` skips this method, its caller and the caller's ``no_grad`` wrapper, so that the warning
        refers to the user's line.
        """
        found = torch.nonzero(impossible >= 0).flatten().tolist()
        if found:
            more = f" ({len(found)} sequences in all.)" if len(found) > 1 else ""
            where = found[0], int(impossible[found[0]])
            warnings.warn(
                impossible_message(sequences, *where) + self._why_impossible(sequences, *where) + more,
                stacklevel=stacklevel,
            )

    # Training, independent of the algorithm

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._refuse_unsuited_trainer()
        super().setup(stage)

    def _refuse_unsuited_trainer(self) -> None:
        trainer = self.trainer
        if trainer.precision not in ("32-true", "64-true"):
            raise MisconfigurationException(
                f"`trainer.precision` must be 32-true or 64-true for an HMM, but is {trainer.precision} instead. "
                "Expected counts require more than 16 bits."
            )
        strategy = type(trainer.strategy).__name__
        if any(name in strategy for name in ("FSDP", "DeepSpeed", "ModelParallel")):
            raise MisconfigurationException(
                f"`trainer.strategy` must be a single device or ddp for an HMM, but is {strategy} instead. "
                "An M-step requires whole rows of parameters."
            )

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._impossible = []  # An interrupted run leaves values behind.

    def training_log_likelihood(self, batch: Sequences) -> Tensor:
        """Returns the (restarts,) weighted log-likelihoods of a training batch, and updates the metric of the epoch.

        The result is differentiable.
        """
        self._require_sequences(batch)
        totals = []
        for restart in range(self.restarts):
            values = inference.log_likelihood(*self.problem(batch, restart), batch.weights, dtype=self.message_dtype)
            totals.append(values.sum())
            if bool((values.detach() == -torch.inf).any()):
                self._watch_impossible(batch, self._filter(batch, restart).impossible_step)
        total = torch.stack(totals)
        self.train_likelihood.update(total.detach(), batch.num_observed())
        return total

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._raise_impossible()

    def _watch_impossible(self, batch: Sequences, impossible: Tensor) -> None:
        """Raises a `ValueError` for impossible sequences, which would contribute no counts to the M-step.

        On other devices than the CPU, the test is deferred to the M-step, to avoid a synchronization per batch.
        """
        if batch.weights is not None:
            impossible = torch.where(batch.weights == 0, -1, impossible)
        self._impossible.append(impossible)
        if impossible.device.type == "cpu":
            self._raise_impossible(batch)

    def _raise_impossible(self, batch: Sequences | None = None) -> None:
        pending, self._impossible = self._impossible, []
        found = torch.nonzero(torch.cat(pending) >= 0).flatten().tolist() if pending else []
        if found:
            n, t = found[0], int(torch.cat(pending)[found[0]])
            which = f"Sequence {n} has probability zero under the model at step {t}."
            remedy = "Remove it, set its weight to 0, or use a pseudocount, which keeps all sequences possible."
            if batch is not None:
                which = impossible_message(batch, n, t)
                if batch.has_known_states:
                    remedy = f"Correct the labels or state weights up to that step. Otherwise: {remedy}"
            raise ValueError(f"{which} (Sequences are counted inside the batch.) Training cannot use it. {remedy}")

    # Validation, test, prediction

    def _update_likelihood(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._require_sequences(batch)
        with torch.no_grad():
            results = [self._filter(batch, restart) for restart in range(self.restarts)]
        totals = torch.stack([batch.weighted(found.log_likelihood) for found in results])
        metric.update(totals.sum(1), batch.num_observed())
        best = int(self.best_restart)
        if "impossible" not in self._warned and bool((totals[best] == -torch.inf).any()):
            self._warned.add("impossible")
            self._warn_impossible(batch, results[best].impossible_step)
            warnings.warn(
                "The likelihood of these data is zero. A pseudocount keeps events possible that do not occur in the "
                "training data.",
                stacklevel=2,
            )

    def on_test_epoch_end(self) -> None:
        data = data_of(self.trainer)
        if data is not None and data.test_sequences is not None:
            self._log_accuracies(data.test_sequences, data.true_states("test"))
        super().on_test_epoch_end()

    def _log_accuracies(self, test: Sequences, states: Sequences | None) -> None:
        """Logs the accuracy of decoded states, compared with true states and, without a matching, with labels."""
        truths = {
            "state_accuracy": (MatchedStateAccuracy, None if states is None else states.values),
            "label_accuracy": (LabelAccuracy, test.labels),
        }
        # The sequences of this rank. There are none if there are more ranks than sequences.
        mine = torch.arange(len(test))[self.trainer.global_rank :: self.trainer.world_size]
        decoded, weights = None, None
        for name, (kind, truth) in truths.items():
            if truth is None or not bool((truth >= 0).any()):
                continue
            if decoded is None:
                sequences = self.as_sequences(test[mine]).without_labels()
                weights = None if sequences.weights is None else sequences.repeat_interleave(sequences.weights)
                decoded = self.decode(sequences).values
            accuracy = kind(self.num_states, int(truth.max()) + 1).to(self.device)
            accuracy.update(decoded, test.with_values(truth)[mine].values.to(self.device), weights)
            self.log(f"test/{name}", accuracy.compute())

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """Returns the most probable states and the log-likelihood of each sequence."""
        return {"states": self.decode(batch), "log_likelihood": self.score(batch)}


def _lengths_to_sample(num_sequences: Any, length: Any) -> Tensor:
    """Returns the (N,) lengths of the sequences to draw, from the arguments of `DiscreteHMM.sample`."""
    if not isinstance(num_sequences, int):
        raise ValueError(f"`num_sequences` must be a whole number, but is {num_sequences!r} instead.")
    sizes = np.asarray(length.cpu() if isinstance(length, Tensor) else length)
    if sizes.dtype.kind not in "iu" or sizes.ndim > 1:
        raise ValueError(
            f"`length` must be a whole number, or a list with one for each sequence, but is {length!r} instead."
        )
    lengths = torch.from_numpy(sizes.astype(np.int64))
    if num_sequences < 0 or bool((lengths < 0).any()):
        raise ValueError(
            f"`num_sequences` and `length` must not be negative, but are {num_sequences} and {length} instead."
        )
    if lengths.dim() == 1 and len(lengths) != num_sequences:
        raise ValueError(
            f"`length` must have one number for each of the {num_sequences} sequences, but has {len(lengths)}. "
            "Set `num_sequences` as well."
        )
    return lengths.expand(num_sequences)


def states_of_classes(states: Tensor, classes: Tensor | None) -> Tensor:
    """Returns the model state of each state of an operator; -1 stays -1."""
    return states if classes is None else torch.where(states < 0, -1, classes.to(states.device)[states.clamp(min=0)])


def _sum_over_classes(rows: Tensor, operator: Operator) -> Tensor:
    """Sums (n, S) probabilities over the operator states of each model state."""
    if operator.classes is None:
        return rows
    return rows.new_zeros(len(rows), operator.num_classes).index_add(1, operator.classes.to(rows.device), rows)


def _inputs_to_predict(sequences: Sequences, steps: int, inputs: Any) -> Tensor:
    """Returns the (N, steps, M) inputs of the steps after the end of each sequence."""
    if inputs is None:
        raise ValueError(
            "The model depends on inputs, so a prediction requires those of the predicted steps. "
            "Give `inputs`, an array of shape (sequences, steps, inputs)."
        )
    rows = torch.as_tensor(inputs, dtype=torch.float64, device=sequences.device)
    if rows.dim() != 3 or rows.shape[:2] != (len(sequences), steps):
        raise ValueError(
            f"`inputs` must have shape ({len(sequences)}, {steps}, M), one row for each predicted step of each "
            f"sequence, but has {tuple(rows.shape)} instead."
        )
    return rows


def _lengthened(sequences: Sequences, inputs: Tensor) -> Sequences:
    """Appends steps without observations and labels to each sequence, with inputs (N, steps, M).

    The times of the appended steps continue with the last gap of the sequence.
    """
    number, added = inputs.shape[:2]
    offsets = sequences.offsets + added * torch.arange(number + 1)
    old = torch.arange(sequences.num_steps) + (added * torch.arange(number)).repeat_interleave(sequences.lengths)
    new = (offsets[1:, None] - added + torch.arange(added)).flatten()

    def extended(column: Tensor, value: Any) -> Tensor:
        longer = column.new_zeros(int(offsets[-1]), *column.shape[1:])
        longer[old], longer[new] = column, value
        return longer

    known = inputs.new_zeros(sequences.num_steps, inputs.shape[2]) if sequences.inputs is None else sequences.inputs
    columns = {"inputs": extended(known.to(inputs), inputs.flatten(0, 1))}
    if sequences.labels is not None:
        columns["labels"] = extended(sequences.labels, -1)
    if sequences.state_weights is not None:
        columns["state_weights"] = extended(sequences.state_weights, 1)
    if sequences.times is not None:
        padded = torch.cat([sequences.times, sequences.times.new_zeros(1)])  # not empty if all sequences are
        last, before = (padded[(sequences.offsets[1:] - n).clamp(min=0)] for n in (1, 2))
        gaps = torch.where(sequences.lengths.to(last.device) >= 2, last - before, 0)
        later = last[:, None] + gaps[:, None] * torch.arange(1, added + 1, device=last.device)
        columns["times"] = extended(sequences.times, later.flatten())
    values = extended(sequences.values, MISSING if sequences.is_discrete else torch.nan)
    return Sequences(values, offsets, sequences.weights, **columns)
