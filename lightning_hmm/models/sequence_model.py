"""Base class of all models, including those that are not HMMs: sizes of the data, evaluation and checkpoints."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_hmm.data import data_of
from lightning_hmm.metrics import LogLikelihoodPerSymbol
from lightning_hmm.observing import guard_loggers
from lightning_hmm.optim import set_gradients
from lightning_hmm.ranks import destroy_process_group_at_exit
from lightning_hmm.sequences import Sequences, Vocabulary, as_list


def check_counts(least: int = 1, /, **counts: int | None) -> None:
    """Raises a `ValueError` for values that are not whole numbers of at least `least`; ``None`` passes."""
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"`{name}` must be a whole number of at least {least}, but is {value!r} instead.")


def check_seed(seed: int) -> None:
    """Raises a `ValueError` for a value that is not a valid seed of a torch generator."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"`seed` must be a whole number of at most 64 bits, but is {seed!r} instead.")


def as_names(option: str, names: Sequence[str]) -> list[str]:
    """Returns the names of an option as a list. Raises a `ValueError` for a single string and for other types."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        example = repr([names]) if isinstance(names, str) else "['emission']"
        raise ValueError(f"`{option}` must be a list of names, such as {example}, but is {names!r} instead.")
    return list(names)


def check_positive(**numbers: float | None) -> None:
    """Raises a `ValueError` for values that are not positive and finite; ``None`` passes."""
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be positive, but is {value} instead.")


def check_choices(literal: Any, /, **options: str) -> None:
    """Raises a `ValueError` for options that are not among the values of a `Literal` type."""
    for name, value in options.items():
        if value not in get_args(literal):
            raise ValueError(f"`{name}` must be one of {', '.join(get_args(literal))}, but is {value!r} instead.")


class SequenceModel(LightningModule, ABC):
    """Base class of models that assign a likelihood to sequences and are trained by the Lightning Trainer.

    A subclass calls ``super().__init__``, creates its parameters, and implements the abstract methods and
    ``training_step``. This class logs the likelihood of training, validation and test data, selects the best restart,
    and validates checkpoints.

    Args:
        num_symbols: Number of symbols, for sequences of symbols; else ``None``.
        num_features: Number of columns, for sequences of real vectors; else ``None``.
        restarts: Number of random initializations trained in the same run. The one with the best validation likelihood
            at the end (training likelihood if there is no validation set) is used for inference.
        arithmetic: Floating-point type of the computation, "float64" or "float32".
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    Example:
        A model in which the symbols are independent of each other, trained by gradient descent.

        >>> import torch
        >>> from lightning_hmm import fit
        >>> from lightning_hmm.models import SequenceModel
        >>> class IndependentSymbols(SequenceModel):
        ...     def __init__(self, num_symbols):
        ...         super().__init__(num_symbols=num_symbols, num_features=None)
        ...         self.logits = torch.nn.Parameter(torch.zeros(num_symbols))
        ...
        ...     def score(self, sequences):
        ...         log_probs = self.logits.log_softmax(0)
        ...         return torch.stack([log_probs[symbols].sum() for symbols in self.as_sequences(sequences)])
        ...
        ...     def _update_likelihood(self, metric, batch):
        ...         metric.update(self.score(batch).sum().detach(), batch.num_observed())
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         self._update_likelihood(self.train_likelihood, batch)
        ...         return -self.score(batch).mean()
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=1.0)
        >>> model = fit(IndependentSymbols(2), [[0, 1, 1, 1], [1, 1, 0, 1]], max_epochs=20)
        >>> [round(value, 2) for value in model.logits.softmax(0).tolist()]
        [0.25, 0.75]
    """

    def __init__(
        self,
        *,
        num_symbols: int | None,
        num_features: int | None,
        restarts: int = 1,
        arithmetic: str = "float64",
        symbol_names: Sequence[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        super().__init__()
        check_counts(num_symbols=num_symbols, num_features=num_features, restarts=restarts)
        if arithmetic not in ("float64", "float32"):
            raise ValueError(f"`arithmetic` must be float64 or float32, but is {arithmetic!r} instead.")
        if symbol_names is not None and len(symbol_names) != num_symbols:
            raise ValueError(f"`symbol_names` must name {num_symbols} symbols, but names {len(symbol_names)} instead.")
        self.num_symbols, self.num_features = num_symbols, num_features
        self.restarts, self.arithmetic = restarts, arithmetic
        self.vocabulary = None if symbol_names is None else Vocabulary(symbol_names, unknown_symbol)
        self.best_restart: Tensor  # index of the restart that is used for inference
        self.register_buffer("best_restart", torch.zeros((), dtype=torch.int64))
        self.train_likelihood = LogLikelihoodPerSymbol(restarts)
        self.val_likelihood = LogLikelihoodPerSymbol(restarts)
        self.test_likelihood = LogLikelihoodPerSymbol(restarts)
        # (restarts,) The training log-likelihood per symbol of the last finished epoch. Each batch contributes the
        # value under the parameters at the time it was processed.
        self.epoch_log_likelihood: Tensor | None = None

    @abstractmethod
    def score(self, sequences: Any) -> Tensor:
        """Returns the (N,) natural log-likelihoods of the sequences."""

    @abstractmethod
    def _update_likelihood(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        """Updates a metric with the log-likelihood of a batch under each restart."""

    @property
    def uses_labels(self) -> bool:
        """Whether labels and state weights of the training data are used in training."""
        return False

    def _refuse_known_states(self, sequences: Sequences) -> None:
        """Raises a `ValueError` if there are labels or state weights, and the model cannot use them."""
        if sequences.has_known_states and not self.uses_labels:
            given = "labels" if sequences.labels is not None else "state weights"
            raise ValueError(
                f"A {type(self).__name__} cannot use known states, but the sequences have {given}. Remove them with "
                "`sequences.without_labels()`, or set `train_on_labels` of a `FileDataModule` to False."
            )

    @property
    def starts_from_data(self) -> bool:
        """Whether parameters are still to be initialized from the training data, by `initialize`."""
        return False

    def initialize(self, sequences: Sequences) -> None:
        """Initializes the parameters that depend on the training data. Does nothing by default."""

    def take_sizes(self, parts: Sequence[Sequences]) -> None:
        """Sets the number of symbols or features from the data if the model was created without. Nothing by default."""

    def check(self, sequences: Sequences) -> None:
        """Raises an error with the sequence and position if the data do not match the sizes of the model."""
        sequences.check(self.num_symbols, self.num_features)

    def as_sequences(self, data: Any, lengths: Any = None) -> Sequences:
        """Converts data to `Sequences` on the device of the model.

        Args:
            data: `Sequences`, an argument of `Sequences.from_list`, or, if `lengths` is given, of
                `Sequences.from_lengths`. If the model has a vocabulary, the data may contain names of symbols.
            lengths: Lengths of the sequences, for data that are one array of all steps.
        """
        if isinstance(data, Sequences):
            if lengths is not None:
                raise ValueError(
                    "`lengths` must be given with one array of all steps, but the data are `Sequences`, which have "
                    "lengths. Leave `lengths` out."
                )
            return data if data.device == self.device else data.to(self.device)
        if lengths is not None:
            if self.vocabulary is not None and len(data) and isinstance(next(iter(data)), str):
                data = self.vocabulary.encode(data)
            return Sequences.from_lengths(data, lengths).to(self.device)
        data = as_list(data)
        if self.vocabulary is not None:
            first: Any = next((sequence for sequence in data if not hasattr(sequence, "__len__") or len(sequence)), ())
            if isinstance(first, str) or (hasattr(first, "__len__") and len(first) and isinstance(first[0], str)):
                return Sequences.from_strings(data, self.vocabulary).to(self.device)
        return Sequences.from_list(data).to(self.device)

    # Training, independent of the algorithm

    def setup(self, stage: str) -> None:
        guard_loggers(self.trainer.loggers)
        if stage != "fit":
            return
        data = data_of(self.trainer)
        if data is not None and self.starts_from_data and self.trainer.ckpt_path is None:
            self.initialize(data.train_sequences)

    def teardown(self, stage: str) -> None:
        destroy_process_group_at_exit()  # Lightning calls `teardown` only after a run without errors.

    @property
    def _validates(self) -> bool:
        """Whether there are validation batches. An empty loader counts as no validation data."""
        return self.trainer.enable_validation and sum(self.trainer.num_val_batches) > 0

    def on_fit_start(self) -> None:
        for metric in (self.train_likelihood, self.val_likelihood):  # An interrupted run leaves values behind.
            metric.reset()

    @staticmethod
    def _require_sequences(batch: Any) -> None:
        if not isinstance(batch, Sequences):
            raise TypeError(
                f"A batch must be `Sequences`, but is a {type(batch).__name__} instead. "
                "Create the DataLoader with `collate_fn=Sequences.collate`."
            )

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        total: Tensor = self.trainer.strategy.reduce(value, reduce_op="sum")
        return total

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenates the rows of all ranks in the order of the ranks. The numbers of rows may differ."""
        sizes = torch.zeros(self.trainer.world_size, dtype=torch.int64, device=rows.device)
        sizes[self.trainer.global_rank] = len(rows)
        sizes = self._sum_over_ranks(sizes)
        first = int(sizes[: self.trainer.global_rank].sum())
        gathered = rows.new_zeros(int(sizes.sum()), *rows.shape[1:])
        gathered[first : first + len(rows)] = rows
        return self._sum_over_ranks(gathered)

    def _set_gradients(self, gradients: Sequence[Tensor], divisor: float | Tensor) -> None:
        """Sets the gradients of the parameters to the sums of `gradients` over ranks, in float64, over `divisor`."""
        total = self._sum_over_ranks(torch.cat([gradient.flatten().double() for gradient in gradients])) / divisor
        set_gradients(self.parameters(), total.split([gradient.numel() for gradient in gradients]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._require_sequences(batch)
        self._refuse_known_states(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.restarts > 1 and self.trainer.is_last_batch and not self._validates:
            self.best_restart.copy_(self.train_likelihood.compute().argmax())

    def on_train_epoch_end(self) -> None:
        if self.restarts > 1 and not self._validates and self._is_last_epoch:
            self._choose_on_training_data()
        if self.train_likelihood.update_called:  # It is not if the run was resumed from the end of an epoch.
            self.epoch_log_likelihood = self.train_likelihood.compute().reshape(-1)
            self._log_metrics("train", self.epoch_log_likelihood)
        self.train_likelihood.reset()

    @property
    def _is_last_epoch(self) -> bool:
        """Whether training ends with the present epoch. It is valid at the end of an epoch."""
        trainer = self.trainer
        stops = (trainer.current_epoch + 1, trainer.max_epochs), (trainer.global_step, trainer.max_steps)
        return trainer.should_stop or any(limit is not None and 0 <= limit <= done for done, limit in stops)

    def _choose_on_training_data(self) -> None:
        """Selects the restart whose final parameters have the highest likelihood, by another pass over training data.

        After other epochs, restarts are compared by the likelihoods recorded during the epoch. Those need no extra
        pass, but belong to the parameters before the last update.
        """
        likelihood = LogLikelihoodPerSymbol(self.restarts).to(self.device)
        batches: Any = self.trainer.train_dataloader
        limit = self.trainer.num_training_batches  # It is infinite if the loader has no length.
        for batch in islice(batches, int(limit) if math.isfinite(limit) else None):
            self._update_likelihood(likelihood, batch.to(self.device))
        self.best_restart.copy_(likelihood.compute().argmax())

    # Validation and test

    def validation_step(self, batch: Sequences, batch_idx: int) -> None:
        self._require_sequences(batch)
        self._update_likelihood(self.val_likelihood, batch.without_labels())

    def on_validation_epoch_end(self) -> None:
        values = self.val_likelihood.compute().reshape(-1)
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            # If the validation data are impossible under all restarts, the training likelihood is used.
            any_possible = bool(values.isfinite().any())
            self.best_restart.copy_((values if any_possible else self.train_likelihood.compute()).argmax())
        self._log_metrics("val", values)
        self.val_likelihood.reset()

    def test_step(self, batch: Sequences, batch_idx: int) -> None:
        self._require_sequences(batch)
        self._update_likelihood(self.test_likelihood, batch.without_labels())

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test", self.test_likelihood.compute().reshape(-1))
        self.test_likelihood.reset()

    def _log_metrics(self, part: str, values: Tensor) -> None:
        """Logs the log-likelihood per symbol of the best restart, in nats and in bits, for "train", "val" or "test"."""
        value = values[int(self.best_restart)]
        self.log(f"{part}/log_likelihood", value, prog_bar=part == "train")
        self.log(f"{part}/bits_per_symbol", -value / math.log(2), prog_bar=part == "val")

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lightning_hmm"] = {"model": type(self).__name__}
        # The command line sets all options that follow from the data. Those that the class has no argument for are
        # removed.
        known = inspect.signature(type(self).__init__).parameters
        given = checkpoint.get("hyper_parameters", {})
        checkpoint["hyper_parameters"] = {
            name: value for name, value in given.items() if name in known or name.startswith("_")
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        made_by = checkpoint.get("lightning_hmm", {}).get("model")
        if made_by is not None and made_by != type(self).__name__:
            raise ValueError(
                f"The checkpoint must hold a {type(self).__name__}, but holds a {made_by} instead. "
                "`lightning_hmm.load` selects the class from the checkpoint."
            )
        options = checkpoint.get("hyper_parameters", {})
        names = options.get("symbol_names")
        if "symbol_names" in options and names is None and self.vocabulary is not None:
            raise ValueError(
                "The data must have numbers as symbols, as the checkpoint's training data, "
                f"but have the names {_some(self.vocabulary.names)} instead."
            )
        if names is not None and self.vocabulary is not None and list(names) != self.vocabulary.names:
            raise ValueError(
                f"The data must have the symbols that the checkpoint was trained on, {_some(names)}, "
                f"but have {_some(self.vocabulary.names)} instead. Encode the data with that vocabulary."
            )
        for name, value in self.state_dict().items():
            saved = checkpoint.get("state_dict", {}).get(name, value)
            if saved.shape != value.shape:
                raise ValueError(
                    f"The checkpoint's `{name}` has shape {tuple(saved.shape)}, but the model's has shape "
                    f"{tuple(value.shape)}. The checkpoint was trained with other options or data."
                )
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        if fitting and progress and progress["current"]["ready"] and not progress["is_last_batch"]:
            raise ValueError(
                "The checkpoint was saved in the middle of an epoch and lacks the statistics of the batches before it. "
                "Resume from one saved at the end of an epoch, such as last.ckpt."
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
