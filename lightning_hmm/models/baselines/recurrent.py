"""Recurrent networks that predict the next symbol or vector, and the persistence baseline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_hmm.distributions import Moments
from lightning_hmm.distributions.gaussian import weighted_mean_var
from lightning_hmm.metrics import LogLikelihoodPerSymbol
from lightning_hmm.models.last_seen import last_seen
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.random import generator
from lightning_hmm.sequences import MISSING, Sequences

Cell = Literal["rnn", "lstm", "gru"]
_CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
_AT_ONCE = 200_000  # number of steps of all sequences that are scored at a time


class RecurrentNet(PredictionErrors):
    r"""A recurrent network whose output at each step is the distribution of the next observation.

    .. math:: h_t = \text{cell}(y_{t-1}, h_{t-1}), \quad y_t \mid y_{1:t-1} \sim \text{softmax}(\text{head}(h_t))
        \text{ or } N(\text{head}(h_t) + r\, \bar y_{t-1}, \operatorname{diag} v)

    where :math:`\bar y` is the vector last observed, and r = 1 for residual prediction. Use it as a baseline for models
    of symbols or real vectors. A separate input marks missing observations and the start of a sequence, so the first
    observation is scored like any other. Vectors are standardized with the mean and variance of the training data.
    Variances are constant, so maximum likelihood is least squares; the first observation of each feature has a variance
    of its own.

    The network is trained by Adam. Gradients are truncated after `bptt_steps` steps, and the state is carried on to the
    end of the sequence. For text, split it into contiguous sequences; a batch is then read in parallel, with an update
    after every `bptt_steps` symbols of each. Early stopping is left to the Trainer.

    Args:
        hidden_size: Number of entries of the state.
        num_symbols: Number of symbols V, for sequences of symbols.
        num_features: Number of columns D, for sequences of real vectors.
        cell: Type of the recurrent cell: "rnn", "lstm" or "gru".
        num_layers: Number of stacked recurrent layers.
        head_layers: Number of layers of the network from the state to the prediction. By default 1 for symbols and 3
            for vectors.
        head_width: Number of units of its hidden layers.
        residual: Whether the network predicts the difference to the vector last observed.
        dropout: Dropout probability between layers.
        learning_rate: Learning rate of the first epoch.
        learning_rate_decay: Factor by which the learning rate is multiplied after each epoch.
        bptt_steps: Number of steps after which gradients are truncated; whole sequences if ``None``.
        gradient_clip: Largest norm of a gradient.
        seed: Seed for the initial parameters and dropout.
        arithmetic: Floating-point type of the network, "float32" or "float64".
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    References:
        Karpathy: The unreasonable effectiveness of recurrent neural networks (char-rnn), 2015.
        Zaremba, Sutskever, Vinyals: Recurrent neural network regularization, 2014 (placement of dropout).

    Example:
        >>> from lightning_hmm import fit
        >>> from lightning_hmm.models import RecurrentNet
        >>> model = RecurrentNet(hidden_size=8, num_symbols=3, learning_rate=0.05)
        >>> model = fit(model, [[0, 1, 2] * 6], max_epochs=40)
        >>> model.predict_next([[0, 1]])[0].argmax().item()
        2
    """

    center: Tensor
    data_variance: Tensor
    has_data_stats: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_symbols: int | None = None,
        num_features: int | None = None,
        cell: Cell = "lstm",
        num_layers: int = 1,
        head_layers: int | None = None,
        head_width: int = 32,
        residual: bool = False,
        dropout: float = 0.0,
        learning_rate: float = 2e-3,
        learning_rate_decay: float = 1.0,
        bptt_steps: int | None = 100,
        gradient_clip: float = 5.0,
        seed: int = 0,
        arithmetic: Literal["float32", "float64"] = "float32",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        self._check_options(locals())
        super().__init__(
            num_symbols=num_symbols,
            num_features=num_features,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
        self.save_hyperparameters()
        self.automatic_optimization = False  # A batch has several updates.
        self.residual, self.bptt_steps, self.seed = residual, bptt_steps, seed
        self.learning_rate, self.learning_rate_decay = learning_rate, learning_rate_decay
        self.gradient_clip = gradient_clip
        with torch.random.fork_rng(devices=[]):  # Modules of torch use the global generator.
            torch.manual_seed(_seed(seed, "start"))
            self._create_network(
                hidden_size, cell, num_layers, head_layers or (1 if num_symbols else 3), head_width, dropout
            )
        self.dropout = nn.Dropout(dropout)
        if num_features:
            # Rows: the first observation of each feature, and all others.
            self.log_variance = nn.Parameter(torch.zeros(2, num_features, dtype=getattr(torch, arithmetic)))
        self.register_buffer("center", torch.zeros(num_features or 0, dtype=torch.float64))
        self.register_buffer("data_variance", torch.ones(num_features or 0, dtype=torch.float64))
        self.register_buffer("has_data_stats", torch.tensor(num_features is None))

    @staticmethod
    def _check_options(given: dict[str, Any]) -> None:
        """Raises a `ValueError` for a wrong value of an option of the constructor."""
        num_symbols, num_features, cell, dropout = (
            given[name] for name in ("num_symbols", "num_features", "cell", "dropout")
        )
        if (num_symbols is None) == (num_features is None):
            raise ValueError(
                f"One of `num_symbols` and `num_features` must be given, but they are {num_symbols} and "
                f"{num_features} instead."
            )
        counts = ("hidden_size", "num_layers", "head_layers", "head_width", "bptt_steps")
        check_counts(**{name: given[name] for name in counts})
        if cell not in get_args(Cell):
            raise ValueError(f"`cell` must be one of {', '.join(get_args(Cell))}, but is {cell!r} instead.")
        if given["residual"] and num_symbols is not None:
            raise ValueError("`residual` is for vectors, because symbols have no differences.")
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and below 1, but is {dropout} instead.")
        for name in ("learning_rate", "learning_rate_decay", "gradient_clip"):
            if not given[name] > 0:
                raise ValueError(f"`{name}` must be positive, but is {given[name]} instead.")

    # The network

    def _create_network(
        self, hidden_size: int, cell: Cell, num_layers: int, head_layers: int, head_width: int, dropout: float
    ) -> None:
        width, dtype = self.num_symbols or self.num_features or 0, getattr(torch, self.arithmetic)
        # The last embedding is that of a missing symbol.
        self.embedding = nn.Embedding(width + 1, hidden_size, dtype=dtype) if self.num_symbols else None
        self.cell = _CELLS[cell](
            hidden_size if self.num_symbols else 2 * width,
            hidden_size,
            num_layers,
            batch_first=True,
            dropout=dropout if num_layers > 1 else 0.0,
            dtype=dtype,
        )
        sizes = [hidden_size, *[head_width] * (head_layers - 1), width]
        layers = [
            layer for before, after in pairwise(sizes) for layer in (nn.Linear(before, after, dtype=dtype), nn.ReLU())
        ]
        self.head = nn.Sequential(*layers[:-1])

    def _inputs(self, sequences: Sequences) -> Tensor:
        """Returns the inputs, delayed by one step.

        They are (N, longest) symbols, or (N, longest, 2 D) the vectors last observed and whether they were observed at
        the step just before.
        """
        if self.num_symbols is not None:
            padded = sequences.padded().long()  # The number of a missing symbol may exceed the storage type.
            late = torch.cat([padded.new_full((len(padded), 1), MISSING), padded], 1)[:, : padded.shape[1]]
            return torch.where(late == MISSING, self.num_symbols, late)
        last, observed = last_seen(sequences.padded())
        # Before the first observation of a feature, its mean is used.
        standard = ((last - self.center) / self.data_variance.sqrt()).nan_to_num(nan=0.0)
        return torch.cat([standard, observed], 2).to(self.log_variance.dtype)

    def _outputs(self, sequences: Sequences, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Runs the network on chunks of `size` steps, longest sequences first. Gradients end at the borders of chunks.

        Yields the steps of the chunk, the numbers of the sequences that reach it, and the (sequences, steps, V or D)
        outputs of the head.
        """
        order = sequences.lengths.argsort(descending=True, stable=True)
        lengths, device = sequences.lengths[order], sequences.device
        inputs = self._inputs(sequences)[order.to(device)]
        state: Any = None
        for first in range(0, inputs.shape[1], size):
            steps, going = slice(first, min(first + size, inputs.shape[1])), int((lengths > first).sum())
            if state is not None:
                is_lstm = isinstance(state, tuple)
                kept = [part[:, :going].detach() for part in (state if is_lstm else (state,))]
                state = tuple(kept) if is_lstm else kept[0]
            chunk = inputs[:going, steps]
            hidden, state = self.cell(chunk if self.embedding is None else self.dropout(self.embedding(chunk)), state)
            outputs = self.head(self.dropout(hidden))
            yield (
                steps,
                order[:going].to(device),
                outputs + chunk[..., : outputs.shape[2]] if self.residual else outputs,
            )

    def _scored(self, sequences: Sequences, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields for each chunk of `_outputs` the numbers of its sequences, log-probabilities, and what is observed.

        The (sequences, steps) log-probabilities log p(y_t | y_1:t-1) are zero at steps without an observation.
        """
        targets = sequences.padded()
        targets = targets.long() if sequences.is_discrete else targets
        first = last_seen(targets)[0].isnan() if self.num_features else None
        for steps, rows, outputs in self._outputs(sequences, size):
            target = targets[rows, steps]
            if first is None:
                observed = target >= 0
                log_probs = outputs.log_softmax(2).gather(2, target.clamp(min=0).unsqueeze(2)).squeeze(2).double()
                yield rows, torch.where(observed, log_probs, 0.0), observed
            else:
                observed, spread = ~target.isnan(), self._log_variance(first[rows, steps])
                errors = ((target.nan_to_num() - self.center) / self.data_variance.sqrt() - outputs).square()
                log_probs = -0.5 * (errors / spread.exp() + spread + (2 * torch.pi * self.data_variance).log())
                yield rows, torch.where(observed, log_probs, 0.0).sum(2), observed.any(2)

    def _log_variance(self, first: Tensor) -> Tensor:
        """Returns the (..., D) standardized log-variances. `first` marks the first observation of each feature."""
        return torch.where(first, self.log_variance[0], self.log_variance[1]).double()

    def _prepared(self, sequences: Any) -> tuple[Sequences, int]:
        """Returns the converted sequences, and the number of steps per chunk for evaluation."""
        sequences = self.as_sequences(sequences)
        sequences.check(self.num_symbols, self.num_features)
        return sequences, max(1, _AT_ONCE // max(len(sequences), 1))

    # Inference

    @torch.no_grad()
    def score(self, sequences: Any) -> Tensor:
        """Returns the (N,) natural log-likelihoods of the sequences, including their first observations."""
        sequences, size = self._prepared(sequences)
        scores = torch.zeros(len(sequences), dtype=torch.float64, device=sequences.device)
        for rows, log_probs, _ in self._evaluated(self._scored(sequences, size)):
            scores.index_add_(0, rows, log_probs.sum(1))
        return scores

    @torch.no_grad()
    def predict_each(self, sequences: Any) -> Sequences:
        """Returns predictions of each step from those before it: (steps, V) probabilities or (steps, D) means."""
        sequences, size = self._prepared(sequences)
        padded = torch.zeros(
            len(sequences),
            int(sequences.lengths.max()) if len(sequences) else 0,
            self.num_symbols or self.num_features or 0,
        )
        padded = padded.to(sequences.device, torch.float64)
        for steps, rows, outputs in self._evaluated(self._outputs(sequences, size)):
            padded[rows, steps] = (
                outputs.softmax(2).double()
                if self.num_symbols is not None
                else self.center + self.data_variance.sqrt() * outputs
            )
        return sequences.with_values(sequences.packed(padded))

    @torch.no_grad()
    def predict_next(self, sequences: Any) -> Tensor | Moments:
        """Returns the distribution of the observation after each sequence: (N, V) probabilities, or moments."""
        sequences, _ = self._prepared(sequences)
        # It is the prediction of an additional, missing step.
        nothing = sequences.values.new_full(
            (1, *sequences.values.shape[1:]), MISSING if sequences.is_discrete else torch.nan
        )
        longer = Sequences.from_list([torch.cat([sequence, nothing]) for sequence in sequences]).to(sequences.device)
        last = longer.offsets[1:] - 1
        predicted = self.predict_each(longer).values[last]
        if self.num_symbols is not None:
            return predicted
        return Moments(
            predicted,
            self.data_variance * self._log_variance(longer.packed(last_seen(longer.padded())[0])[last].isnan()).exp(),
        )

    def _evaluated(self, run: Iterator[Any]) -> Iterator[Any]:
        """Yields the items of `run` with the network in evaluation mode, without dropout."""
        training = self.training
        self.eval()
        try:
            yield from run
        finally:
            self.train(training)

    # Training

    @property
    def starts_from_data(self) -> bool:
        return not bool(self.has_data_stats)

    def initialize(self, sequences: Sequences) -> None:
        """Sets the mean and variance with which vectors are standardized."""
        sequences.check(self.num_symbols, self.num_features)
        if self.num_features is not None:
            center, variance = weighted_mean_var(sequences)
            self.center.copy_(center)
            self.data_variance.copy_(variance)
        self.has_data_stats.fill_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate, fused=self.device.type in ("cpu", "cuda"))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if next(self.parameters()).dtype != getattr(torch, self.arithmetic):
            raise ValueError(
                f"`precision` must be that of the network's parameters, but is {self.arithmetic} instead. "
                "Create the network with that `arithmetic`."
            )

    def on_train_start(self) -> None:
        if not bool(self.has_data_stats):
            raise ValueError(
                "Vectors are standardized with the mean and variance of the training set, which a plain `DataLoader` "
                "does not expose. Call `model.initialize(sequences)` before training, or train with a datamodule or "
                "`lightning_hmm.fit`."
            )

    def training_step(self, batch: Sequences, batch_idx: int) -> None:
        self._require_sequences(batch)
        batch.check(self.num_symbols, self.num_features)
        # A long sequence of weight zero would add updates without a gradient, in which Adam still changes parameters.
        batch = batch.counted()
        optimizer: Any = self.optimizers()
        # This is not in `on_train_epoch_start`, which is not called for every resumed epoch.
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * self.learning_rate_decay**self.current_epoch
        longest = int(self._over_ranks(int(batch.lengths.max()) if len(batch) else 0, "max"))
        size = self.bptt_steps or max(longest, 1)
        weights = (
            torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.weights is None else batch.weights
        )
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            # Lightning does not save the state of generators, so dropout is seeded by the position in training.
            torch.manual_seed(_seed(self.seed, self.current_epoch, batch_idx, self.trainer.global_rank))
            run = self._scored(batch, size)
            for _ in range(-(-longest // size)):
                found = next(run, None)
                if found is None:  # Other ranks have longer sequences, and all ranks take part in an update.
                    log_likelihood = torch.stack([parameter.sum() for parameter in self.parameters()]).sum() * 0.0
                    share = 0.0
                else:
                    rows, log_probs, observed = found
                    log_likelihood = weights[rows] @ log_probs.sum(1)
                    share = float(weights[rows] @ observed.sum(1).double())
                share = self._over_ranks(share, "sum") / self.trainer.world_size  # DDP averages over the ranks.
                optimizer.zero_grad()
                self.manual_backward(-log_likelihood / (share or 1.0))
                nn.utils.clip_grad_norm_(self.parameters(), self.gradient_clip)
                optimizer.step()
                total += log_likelihood.detach()
        self.train_likelihood.update(total, batch.num_observed())

    def _over_ranks(self, number: float, operation: str) -> float:
        if self.trainer.world_size == 1:
            return number
        return float(
            self.trainer.strategy.reduce(
                torch.tensor(number, dtype=torch.float64, device=self.device), reduce_op=operation
            )
        )

    # Validation, test, prediction

    def _update_likelihood(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._require_sequences(batch)
        metric.update(batch.weighted(self.score(batch)).sum(), batch.num_observed())

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """Returns the predictions of all steps and the log-likelihood of each sequence."""
        return {"predictions": self.predict_each(batch), "log_likelihood": self.score(batch)}


def persistence(sequences: Sequences, start: float = 0.0) -> Sequences:
    """Predicts at each step the vector last observed before it, or `start` if there is none."""
    return sequences.with_values(sequences.packed(last_seen(sequences.padded())[0].nan_to_num(nan=start)))


def _seed(*words: int | str) -> int:
    return generator(*words).initial_seed()
