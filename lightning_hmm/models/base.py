"""What all models share: the questions one can ask, evaluation under the Lightning Trainer, checkpoints.

A family says what its natural parameters are (`chain`, `evidence`), which inference module understands them
(`inference`), and how states emit (`emit`, `predict_emission`). Everything here follows from that. How it learns is its
own business; `models.em` has Baum-Welch for those made of distributions with a maximiser.
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hmm.inference import dense
from lightning_hmm.metrics import LogLikelihoodPerSymbol, MatchedStateAccuracy
from lightning_hmm.sequences import Sequences, Vocabulary

_OF_OTHER_EMISSIONS = {
    "emission_probs": "`emission_probs` is of categorical emissions; a Gaussian model has `means` and `variances`.",
    "means": "`means` is of Gaussian emissions; a categorical model has `emission_probs`.",
    "variances": "`variances` is of Gaussian emissions; a categorical model has `emission_probs`.",
}


class HMM(LightningModule, ABC):
    """Base of the models.

    Subclasses call ``super().__init__`` with what is common, make their parameters, and implement the abstract members
    and the training.

    Args:
        num_states: hidden states.
        num_symbols: different symbols, for symbol data; else ``None``.
        num_features: entries of a vector, for real data; else ``None``.
        restarts: starts trained side by side on the same pass over the data; the best on validation data (on training
            data if there are none) is the one that answers.
        arithmetic: of the message passing; parameters and statistics are float64 in any case.
        symbol_names: for data with a vocabulary.
        unknown_symbol: the one of them that stands for all others.
    """

    inference: ClassVar[ModuleType] = dense

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
        super().__init__()
        counts = {"num_states": num_states, "num_symbols": num_symbols, "num_features": num_features}
        for name, value in {**counts, "restarts": restarts}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be a whole number of at least 1, but is {value} instead.")
        if arithmetic not in ("float64", "float32"):
            raise ValueError(f"`arithmetic` must be float64 or float32, but is {arithmetic!r} instead.")
        if symbol_names is not None and len(symbol_names) != num_symbols:
            raise ValueError(f"`symbol_names` must name {num_symbols} symbols, but names {len(symbol_names)} instead.")
        self.num_states, self.num_symbols, self.num_features = num_states, num_symbols, num_features
        self.restarts, self.arithmetic = restarts, arithmetic
        self.vocabulary = None if symbol_names is None else Vocabulary(symbol_names, unknown_symbol)
        self.chosen: Tensor
        self.register_buffer("chosen", torch.zeros((), dtype=torch.int64))
        self.train_likelihood, self.val_likelihood, self.test_likelihood = (LogLikelihoodPerSymbol(restarts) for _ in range(3))
        # (restarts,) per symbol, of the last finished epoch, under the parameters that its batches met.
        self.epoch_log_likelihood: Tensor | None = None
        self._impossible: list[Tensor] = []
        self._said: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        # Asked for after a property has raised, too: torch replaces the message of its AttributeError.
        if name in _OF_OTHER_EMISSIONS:
            raise AttributeError(_OF_OTHER_EMISSIONS[name])
        return super().__getattr__(name)

    # What a family brings

    @abstractmethod
    def chain(self, restart: int) -> tuple[Any, ...]:
        """The natural parameters of the hidden chain, for one restart: the first arguments of the inference functions."""

    @abstractmethod
    def evidence(self, restart: int, sequences: Sequences) -> Any:
        """The natural parameters of the emissions, or what they make of the sequences: the next argument."""

    @abstractmethod
    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        """Observations of given states."""

    @abstractmethod
    def predict_emission(self, state_probs: Tensor) -> Any:
        """The distribution of an observation whose state has the given probabilities."""

    @property
    @abstractmethod
    def num_free_parameters(self) -> int:
        """Degrees of freedom."""

    @property
    def starts_from_data(self) -> bool:
        """Whether `initialise` has something to do; only then is the training data gathered for it."""
        return False

    def initialise(self, sequences: Sequences) -> None:
        """Sets what depends on the data before training; nothing by default."""

    # Questions to ask a model

    def as_sequences(self, data: Any) -> Sequences:
        """`Sequences` as they are; lists of numbers, or of names where the model has a vocabulary, made into some."""
        if isinstance(data, Sequences):
            return data if data.device == self.device else data.to(self.device)
        if self.vocabulary is not None and len(data) and (isinstance(data[0], str) or (len(data[0]) and isinstance(data[0][0], str))):
            return Sequences.from_strings(data, self.vocabulary).to(self.device)
        return Sequences.from_list(data).to(self.device)

    def inference_arguments(self, sequences: Sequences, restart: int | None = None) -> tuple[Any, ...]:
        """The arguments of the inference functions, for the chosen restart or another."""
        restart = int(self.chosen) if restart is None else restart
        return *self.chain(restart), self.evidence(restart, sequences), sequences

    @torch.no_grad()
    def score(self, sequences: Any) -> Tensor:
        """(N,) the natural log-likelihood of each sequence; -inf, and a warning that names the step, where impossible."""
        sequences = self.as_sequences(sequences)
        _, log_likelihood, impossible = self.inference.weighted_log_likelihood(*self.inference_arguments(sequences), single=self.arithmetic == "float32")
        self._warn_impossible(sequences, impossible)
        return log_likelihood

    @torch.no_grad()
    def decode(self, sequences: Any) -> Sequences:
        """The most probable states (Viterbi), as `Sequences`; -1, and a warning, in impossible sequences."""
        sequences = self.as_sequences(sequences)
        path = self.inference.viterbi(*self.inference_arguments(sequences))
        self._warn_where_impossible(sequences, path.log_probability == -torch.inf)
        return path.states

    @torch.no_grad()
    def posterior(self, sequences: Any) -> Any:
        """Filtered and smoothed state probabilities and expected transitions; see `inference.dense.Posterior`."""
        sequences = self.as_sequences(sequences)
        posterior = self.inference.posterior(*self.inference_arguments(Sequences(sequences.values, sequences.offsets)))
        self._warn_where_impossible(sequences, posterior.log_likelihood == -torch.inf)
        return posterior

    @torch.no_grad()
    def sample(self, num_sequences: int = 1, length: int | Sequence[int] = 100, seed: int = 0, return_states: bool = False) -> Any:
        """Draws sequences of one length or of the given lengths; with `return_states`, also the hidden paths."""
        lengths = torch.as_tensor(length).expand(num_sequences)
        if num_sequences < 0 or bool((lengths < 0).any()):
            raise ValueError(f"`num_sequences` and `length` must not be negative, but are {num_sequences} and {length} instead.")
        generator = torch.Generator().manual_seed(seed)
        states = self.inference.sample(*self.chain(int(self.chosen)), lengths, generator)
        observations = self.emit(states, generator)
        return (observations, states) if return_states else observations

    @torch.no_grad()
    def sample_posterior(self, sequences: Any, seed: int = 0) -> Sequences:
        """One path of hidden states for each sequence, drawn from p(states | sequence)."""
        sequences = self.as_sequences(sequences)
        return self.inference.sample_posterior(*self.inference_arguments(sequences), torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1) -> Any:
        """The distribution of the observation `steps` after the end of each sequence: (N, V) probabilities, or moments.

        NaN, and a warning, where the sequence is impossible.
        """
        sequences = self.as_sequences(sequences)
        states = self.inference.predict_next(*self.inference_arguments(sequences), steps=steps)
        self._warn_where_impossible(sequences, states.isnan().any(1))
        return self.predict_emission(states)

    def aic(self, sequences: Any) -> float:
        """Akaike's criterion, 2 k - 2 log L, with weights where the sequences have some; lower is better."""
        return 2 * self.num_free_parameters - 2 * self._total_score(self.as_sequences(sequences))

    def bic(self, sequences: Any) -> float:
        """Schwarz's criterion, k log n - 2 log L with n the observed steps, both weighted likewise; lower is better."""
        sequences = self.as_sequences(sequences)
        return self.num_free_parameters * math.log(max(float(sequences.num_observed()), 1.0)) - 2 * self._total_score(sequences)

    def _total_score(self, sequences: Sequences) -> float:
        scores = self.score(sequences)
        if sequences.weights is not None:
            scores = torch.where(sequences.weights == 0, torch.zeros_like(scores), scores * sequences.weights)
        return float(scores.sum())

    def _warn_where_impossible(self, sequences: Sequences, impossible: Tensor) -> None:
        if bool(impossible.any()):
            self._warn_impossible(sequences, self.inference.weighted_log_likelihood(*self.inference_arguments(sequences))[2], stacklevel=5)

    @staticmethod
    def _warn_impossible(sequences: Sequences, impossible: Tensor, stacklevel: int = 4) -> None:
        """Points at the line that asked: above this, the question, and torch's decorator of it."""
        impossible_ones = impossible >= 0
        if bool(impossible_ones.any()):
            found = torch.nonzero(impossible_ones).flatten().tolist()
            more = f" ({len(found)} sequences in all.)" if len(found) > 1 else ""
            message = dense.impossible_message(sequences, found[0], int(impossible[found[0]])) + more
            warnings.warn(message, stacklevel=stacklevel)

    # Training: what does not depend on how

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        self._refuse_unsuited_trainer()
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        if self.starts_from_data and self.trainer.ckpt_path is None and hasattr(datamodule, "train_sequences"):
            self.initialise(datamodule.train_sequences)

    def _refuse_unsuited_trainer(self) -> None:
        trainer = self.trainer
        if trainer.precision not in ("32-true", "64-true"):
            raise MisconfigurationException(
                f"`trainer.precision` must be 32-true or 64-true for an HMM, but is {trainer.precision} instead: counts need more than 16 bits."
            )
        strategy = type(trainer.strategy).__name__
        if any(name in strategy for name in ("FSDP", "DeepSpeed", "ModelParallel")):
            raise MisconfigurationException(
                f"`trainer.strategy` must be a single device or ddp for an HMM, but is {strategy} instead: an M-step needs whole rows of parameters."
            )

    @property
    def _validates(self) -> bool:
        """Whether there are validation data; a loader of none at all counts as none."""
        return self.trainer.enable_validation and sum(self.trainer.num_val_batches) > 0

    def on_fit_start(self) -> None:
        self._impossible = []  # an interrupted run may have left something
        for metric in (self.train_likelihood, self.val_likelihood):
            metric.reset()

    @staticmethod
    def _require_sequences(batch: Any) -> None:
        if not isinstance(batch, Sequences):
            raise TypeError(f"A batch must be `Sequences`, but is a {type(batch).__name__} instead. Give the DataLoader `collate_fn=Sequences.collate`.")

    def total_log_likelihood(self, batch: Sequences) -> Tensor:
        """(restarts,) the weighted log-likelihood of a training batch, differentiable; noted for the epoch's metrics."""
        self._require_sequences(batch)
        totals = []
        for restart in range(self.restarts):
            weighted, _, impossible = self._weighted_log_likelihood(restart, batch)
            totals.append(weighted.sum())
            self._watch_impossible(batch, impossible)
        total = torch.stack(totals)
        self.train_likelihood.update(total.detach(), batch.num_observed())
        return total

    def _weighted_log_likelihood(self, restart: int, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """As the inference module's, for one restart in training."""
        answer: tuple[Tensor, Tensor, Tensor] = self.inference.weighted_log_likelihood(
            *self.inference_arguments(batch, restart), single=self.arithmetic == "float32"
        )
        return answer

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._raise_impossible()

    def _watch_impossible(self, batch: Sequences, impossible: Tensor) -> None:
        """An impossible sequence has no expected counts: training on it would ignore it in silence.

        Looked at once on a CPU; elsewhere only before the M-step, so that the device is not made to wait for each batch.
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
            which = f"Sequence {n} has probability zero under the model at step {t}." if batch is None else dense.impossible_message(batch, n, t)
            raise ValueError(
                f"{which} (Sequences are counted inside the batch.) Training cannot use it: take it out, give it a weight of 0, "
                "or add a pseudocount so that nothing becomes impossible."
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.restarts > 1 and self.trainer.is_last_batch and not self._validates:
            self.chosen.copy_(self.train_likelihood.compute().argmax())

    def on_train_epoch_end(self) -> None:
        if self.train_likelihood.update_called:  # not where an epoch was resumed from its very end
            self.epoch_log_likelihood = self.train_likelihood.compute().reshape(-1)
            self._log_likelihood("train", self.epoch_log_likelihood)
        self.train_likelihood.reset()

    # Validation, test, prediction

    def _update(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._require_sequences(batch)
        single = self.arithmetic == "float32"
        with torch.no_grad():
            results = [self.inference.weighted_log_likelihood(*self.inference_arguments(batch, r), single=single) for r in range(self.restarts)]
        metric.update(torch.stack([weighted.sum() for weighted, _, _ in results]), batch.num_observed())
        chosen = results[int(self.chosen)]
        if "impossible" not in self._said and bool((chosen[0] == -torch.inf).any()):
            self._said.add("impossible")
            self._warn_impossible(batch, chosen[2])
            warnings.warn("So the likelihood of these data is zero; a pseudocount keeps what training never met possible.", stacklevel=2)

    def validation_step(self, batch: Sequences, batch_idx: int) -> None:
        self._update(self.val_likelihood, batch)

    def on_validation_epoch_end(self) -> None:
        values = self.val_likelihood.compute().reshape(-1)
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            # Where validation rules all of them out, training chooses.
            self.chosen.copy_((values if bool(values.isfinite().any()) else self.train_likelihood.compute()).argmax())
        self._log_likelihood("val", values)
        self.val_likelihood.reset()

    def test_step(self, batch: Sequences, batch_idx: int) -> None:
        self._update(self.test_likelihood, batch)

    def on_test_epoch_end(self) -> None:
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        truth = datamodule.true_states("test") if hasattr(datamodule, "true_states") else None
        if truth is not None and truth.num_steps:
            mine = torch.arange(self.trainer.global_rank, len(truth), self.trainer.world_size)
            accuracy = MatchedStateAccuracy(self.num_states, int(truth.values.max()) + 1).to(self.device)
            decoded = self.decode(datamodule.test_sequences[mine])
            accuracy.update(decoded.values, truth[mine].values.to(self.device))
            self.log("test/state_accuracy", accuracy.compute())
        self._log_likelihood("test", self.test_likelihood.compute().reshape(-1))
        self.test_likelihood.reset()

    def _log_likelihood(self, part: str, values: Tensor) -> None:
        value = values[int(self.chosen)]
        self.log(f"{part}/log_likelihood", value, prog_bar=part == "train")
        self.log(f"{part}/bits_per_symbol", -value / math.log(2), prog_bar=part == "val")

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """The most probable states and the log-likelihood of each sequence."""
        return {"states": self.decode(batch), "log_likelihood": self.score(batch)}

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lightning_hmm"] = {"model": type(self).__name__}
        # The command line offers what it knows of the data to every family; what this one does not take must not be in its way.
        known = inspect.signature(type(self).__init__).parameters
        given = checkpoint.get("hyper_parameters", {})
        checkpoint["hyper_parameters"] = {name: value for name, value in given.items() if name in known or name.startswith("_")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        made_by = checkpoint.get("lightning_hmm", {}).get("model")
        if made_by is not None and made_by != type(self).__name__:
            raise ValueError(f"The checkpoint must hold a {type(self).__name__}, but holds a {made_by} instead. `lightning_hmm.load` makes the right one.")
        names = checkpoint.get("hyper_parameters", {}).get("symbol_names")
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
                "The checkpoint was saved in the middle of an epoch: its expected counts are not whole. "
                "Resume from one saved at the end of an epoch, such as last.ckpt."
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
