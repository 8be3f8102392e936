"""What everything that the Trainer trains here shares: sizes of the data, evaluation, checkpoints. Models of other kinds than HMMs have it too."""

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
    """Refuses what torch cannot start a random generator from."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"`seed` must be a whole number of at most 64 bits, but is {seed!r} instead.")


def as_names(option: str, names: Sequence[str]) -> list[str]:
    """A list of names that a user gave; refuses a single string and what is no list."""
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
    """A model of sequences that can say how probable they are.

    Subclasses call ``super().__init__`` with what is common, make their parameters, and implement the abstract members and
    the training.

    Args:
        num_symbols: different symbols, for symbol data; else ``None``.
        num_features: entries of a vector, for real data; else ``None``.
        restarts: number of random initializations trained in the same run. The one with the best validation likelihood at the end (training
            likelihood if there is no validation set) is used for inference.
        arithmetic: "float64" or "float32".
        symbol_names: for data with a vocabulary.
        unknown_symbol: the one of them that stands for all others.
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
        self.num_symbols, self.num_features, self.restarts, self.arithmetic = (
            num_symbols,
            num_features,
            restarts,
            arithmetic,
        )
        self.vocabulary = None if symbol_names is None else Vocabulary(symbol_names, unknown_symbol)
        self.best_restart: Tensor
        self.register_buffer("best_restart", torch.zeros((), dtype=torch.int64))
        self.train_likelihood, self.val_likelihood, self.test_likelihood = (
            LogLikelihoodPerSymbol(restarts) for _ in range(3)
        )
        # (restarts,) per symbol, of the last finished epoch, under the parameters that its batches met.
        self.epoch_log_likelihood: Tensor | None = None

    @abstractmethod
    def score(self, sequences: Any) -> Tensor:
        """(N,) the natural log-likelihood of each sequence."""

    @abstractmethod
    def _update_likelihood(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        """Adds the log-likelihoods of a batch, of each restart, to a metric."""

    @property
    def starts_from_data(self) -> bool:
        """Whether `initialize` has something to do; only then is the training data gathered for it."""
        return False

    def initialize(self, sequences: Sequences) -> None:
        """Sets what depends on the data before training; nothing by default."""

    def take_sizes(self, parts: Sequence[Sequences]) -> None:
        """Takes the numbers of symbols or features from the data, where a model has none yet; nothing by default."""

    def check(self, sequences: Sequences) -> None:
        """Raises an error that names sequence and position where the data do not suit the model."""
        sequences.check(self.num_symbols, self.num_features)

    def as_sequences(self, data: Any, lengths: Any = None) -> Sequences:
        """Converts what `Sequences.from_list` takes, or `Sequences.from_lengths` if `lengths` are given, to `Sequences` on the model's device.

        Where the model has a vocabulary, the data may also hold the names of symbols.
        """
        if isinstance(data, Sequences):
            if lengths is not None:
                raise ValueError(
                    "`lengths` must be given with one array of all steps, but the data are `Sequences`, which have lengths. Leave `lengths` out."
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

    # Training: what does not depend on how

    def setup(self, stage: str) -> None:
        guard_loggers(self.trainer.loggers)
        if stage != "fit":
            return
        data = data_of(self.trainer)
        if data is not None and self.starts_from_data and self.trainer.ckpt_path is None:
            self.initialize(data.train_sequences)

    def teardown(self, stage: str) -> None:
        destroy_process_group_at_exit()  # Lightning calls this method after a run that succeeded only

    @property
    def _validates(self) -> bool:
        """Whether there are validation data; a loader of none at all counts as none."""
        return self.trainer.enable_validation and sum(self.trainer.num_val_batches) > 0

    def on_fit_start(self) -> None:
        for metric in (self.train_likelihood, self.val_likelihood):  # an interrupted run may have left something
            metric.reset()

    @staticmethod
    def _require_sequences(batch: Any) -> None:
        if not isinstance(batch, Sequences):
            raise TypeError(
                f"A batch must be `Sequences`, but is a {type(batch).__name__} instead. Give the DataLoader `collate_fn=Sequences.collate`."
            )

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        total: Tensor = self.trainer.strategy.reduce(value, reduce_op="sum")
        return total

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenates the rows of all ranks, each of which may have another number of them, in the order of the ranks."""
        sizes = torch.zeros(self.trainer.world_size, dtype=torch.int64, device=rows.device)
        sizes[self.trainer.global_rank] = len(rows)
        sizes = self._sum_over_ranks(sizes)
        first = int(sizes[: self.trainer.global_rank].sum())
        gathered = rows.new_zeros(int(sizes.sum()), *rows.shape[1:])
        gathered[first : first + len(rows)] = rows
        return self._sum_over_ranks(gathered)

    def _set_gradients(self, gradients: Sequence[Tensor], divisor: float | Tensor) -> None:
        """Sets the gradient of each parameter to the sum of `gradients` over ranks, computed in float64, divided by `divisor`."""
        total = self._sum_over_ranks(torch.cat([gradient.flatten().double() for gradient in gradients])) / divisor
        set_gradients(self.parameters(), total.split([gradient.numel() for gradient in gradients]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.restarts > 1 and self.trainer.is_last_batch and not self._validates:
            self.best_restart.copy_(self.train_likelihood.compute().argmax())

    def on_train_epoch_end(self) -> None:
        if self.restarts > 1 and not self._validates and self._is_last_epoch:
            self._choose_on_training_data()
        if self.train_likelihood.update_called:  # not where an epoch was resumed from its very end
            self.epoch_log_likelihood = self.train_likelihood.compute().reshape(-1)
            self._log_metrics("train", self.epoch_log_likelihood)
        self.train_likelihood.reset()

    @property
    def _is_last_epoch(self) -> bool:
        """Whether training ends with this epoch; at the end of an epoch."""
        trainer = self.trainer
        stops = (trainer.current_epoch + 1, trainer.max_epochs), (trainer.global_step, trainer.max_steps)
        return trainer.should_stop or any(limit is not None and 0 <= limit <= done for done, limit in stops)

    def _choose_on_training_data(self) -> None:
        """Chooses the restart whose parameters at the end of training give the training data the highest likelihood; one more pass over them.

        Between epochs, the likelihood that the batches of the last epoch met decides: it costs nothing, but it is that of the parameters before the
        last update.
        """
        likelihood = LogLikelihoodPerSymbol(self.restarts).to(self.device)
        batches: Any = self.trainer.train_dataloader
        limit = self.trainer.num_training_batches  # infinite where a loader has no length
        for batch in islice(batches, int(limit) if math.isfinite(limit) else None):
            self._update_likelihood(likelihood, batch.to(self.device))
        self.best_restart.copy_(likelihood.compute().argmax())

    # Validation and test

    def validation_step(self, batch: Sequences, batch_idx: int) -> None:
        self._update_likelihood(self.val_likelihood, batch)

    def on_validation_epoch_end(self) -> None:
        values = self.val_likelihood.compute().reshape(-1)
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            # Where validation rules all of them out, training chooses.
            self.best_restart.copy_((values if bool(values.isfinite().any()) else self.train_likelihood.compute()).argmax())
        self._log_metrics("val", values)
        self.val_likelihood.reset()

    def test_step(self, batch: Sequences, batch_idx: int) -> None:
        self._update_likelihood(self.test_likelihood, batch)

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test", self.test_likelihood.compute().reshape(-1))
        self.test_likelihood.reset()

    def _log_metrics(self, part: str, values: Tensor) -> None:
        value = values[int(self.best_restart)]
        self.log(f"{part}/log_likelihood", value, prog_bar=part == "train")
        self.log(f"{part}/bits_per_symbol", -value / math.log(2), prog_bar=part == "val")

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lightning_hmm"] = {"model": type(self).__name__}
        # The command line offers what it knows of the data to every family; what this one does not take must not be in its way.
        known = inspect.signature(type(self).__init__).parameters
        given = checkpoint.get("hyper_parameters", {})
        checkpoint["hyper_parameters"] = {
            name: value for name, value in given.items() if name in known or name.startswith("_")
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        made_by = checkpoint.get("lightning_hmm", {}).get("model")
        if made_by is not None and made_by != type(self).__name__:
            raise ValueError(
                f"The checkpoint must hold a {type(self).__name__}, but holds a {made_by} instead. `lightning_hmm.load` makes the right one."
            )
        options = checkpoint.get("hyper_parameters", {})
        names = options.get("symbol_names")
        if "symbol_names" in options and names is None and self.vocabulary is not None:
            raise ValueError(
                f"The data must have numbers as symbols, as the checkpoint's training data, but have the names {_some(self.vocabulary.names)} instead."
            )
        if names is not None and self.vocabulary is not None and list(names) != self.vocabulary.names:
            raise ValueError(
                f"The data must have the symbols that the checkpoint was trained on, {_some(names)}, but have {_some(self.vocabulary.names)} instead. "
                "Give the data that vocabulary."
            )
        for name, value in self.state_dict().items():
            saved = checkpoint.get("state_dict", {}).get(name, value)
            if saved.shape != value.shape:
                raise ValueError(
                    f"The checkpoint's `{name}` is {tuple(saved.shape)}, but the model's is {tuple(value.shape)}: it was trained with other sizes or data."
                )
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        if fitting and progress and progress["current"]["ready"] and not progress["is_last_batch"]:
            raise ValueError(
                "The checkpoint was saved in the middle of an epoch: what its batches gathered is not whole. "
                "Resume from one saved at the end of an epoch, such as last.ckpt."
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
