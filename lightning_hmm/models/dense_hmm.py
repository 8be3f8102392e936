"""The DenseHMM of Sicking et al. (2020), whose probabilities are functions of embeddings of states and symbols."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_hmm.data import data_of
from lightning_hmm.distributions import Categorical, Emission
from lightning_hmm.distributions.embedded import (
    Embedded,
    EmbeddedCategorical,
    EmbeddedGaussian,
    EmbeddedInitial,
    EmbeddedTransition,
    Similarity,
)
from lightning_hmm.inference.cooccurrence import cooccurrences, pair_counts, squared_error
from lightning_hmm.models.hmm import HMM
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.models.standard import standard_emission
from lightning_hmm.optim import set_gradients
from lightning_hmm.sequences import Sequences

Objective = Literal["em", "cooccurrence", "likelihood"]

_LEARNING_RATES = {"em": 0.03, "cooccurrence": 0.001, "likelihood": 0.1}


def fair_num_states(num_states: int, num_symbols: int, embedding_dim: int) -> int:
    """Returns the number of states for which a StandardHMM has about as many degrees of freedom as a DenseHMM.

    It is the integer nearest to the solution n' of n'^2 + n' (m - 1) - 1 = l (3 n + m + 1), for n states, m symbols and
    embeddings of length l.

    Example:
        >>> from lightning_hmm.models import fair_num_states
        >>> fair_num_states(num_states=20, num_symbols=10, embedding_dim=3)
        11
    """
    half = (num_symbols - 1) / 2
    return max(1, round(-half + math.sqrt(half**2 + 1 + embedding_dim * (3 * num_states + num_symbols + 1))))


_CHOICES = {"objective": get_args(Objective), "optimizer": ("adam", "sgd"), "target": ("data", "truth")}


def _check_choices(**given: str) -> None:
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"`{name}` must be one of {', '.join(_CHOICES[name])}, but is {value!r} instead.")


def _check_objective(objective: Objective, emission: Emission, symbolic: bool) -> None:
    embedded, name = isinstance(emission, Embedded), type(emission).__name__
    if objective == "cooccurrence" and not (embedded and symbolic):
        suited = "em or likelihood" if embedded else "em"
        raise ValueError(
            f"`objective` must be {suited} for {name} emissions. "
            "The objective cooccurrence requires symbols with embeddings."
        )
    if objective == "likelihood" and not embedded:
        raise ValueError(f"`objective` must be em for {name} emissions, which are not trained by gradients.")


class DenseHMM(HMM):
    r"""A hidden Markov model whose probabilities are functions of embeddings of length L.

    .. math:: A_{ij} \propto k(z_i, u_j), \quad B_{ij} \propto k(w_i, v_j), \quad \pi_i \propto k(z_{start}, u_i)

    State i has an embedding :math:`z_i` as the source and :math:`u_i` as the target of a transition, and an embedding
    :math:`w_i` for its emission. Symbol j has the embedding :math:`v_j`. The number of parameters grows linearly with
    the numbers of states and symbols. Use it instead of `StandardHMM` if a full matrix has too many parameters, or if
    the embeddings themselves are of interest. The embeddings are unconstrained and trained by gradient descent with one
    of three objectives:

    - ``em``: After the E-step of an epoch, the optimizer takes `m_steps` steps on the expected log-likelihood Q.
    - ``cooccurrence``: The squared difference between the frequencies of symbol pairs in the data and under the model,
      whose chain is assumed to be stationary. The pairs are counted once; after that a step takes O(K V^2) time,
      independent of the size of the data. An epoch has `steps_per_epoch` steps. The initial probabilities are the
      stationary ones of A.
    - ``likelihood``: One gradient step on the log-likelihood for each batch.

    Any other emission can replace the embedded one with the objective ``em``. It then has its own M-step.

    Args:
        num_states: Number of states K.
        num_symbols: Number of symbols V, for sequences of symbols.
        embedding_dim: Length L of the embeddings.
        objective: "em", "cooccurrence" or "likelihood".
        similarity: The function k: "exp" (the softmax of the paper), "sigmoid", "relu", "rbf" or "abs_linear". See
            `distributions.embedded.similarity_log_probs`.
        tied: Whether a state has only one embedding, U = W = Z.
        emission: "categorical" for symbols, "gaussian" for real vectors whose means are :math:`w_i \cdot v_d` in units
            of the data (not for ``cooccurrence``), or any other emission (for ``em``).
        num_features: Number of columns D, for sequences of real vectors.
        seed: Seed for the initial embeddings, which are standard normal.
        restarts: Number of random initializations trained in the same run. The one with the best validation likelihood
            at the end (training likelihood if there is no validation set) is used for inference.
        optimizer: "adam" or "sgd".
        learning_rate: Learning rate; by default 0.03 for ``em``, 0.001 for ``cooccurrence`` and 0.1 for ``likelihood``.
        m_steps: Optimizer steps in an epoch of ``em``.
        steps_per_epoch: Optimizer steps in an epoch of ``cooccurrence``.
        target: Target of ``cooccurrence``: "data", the frequencies of pairs in the training data, or "truth", the
            co-occurrences of the model that generated synthetic data.
        differentiate_stationary: For ``cooccurrence``: Whether the gradient includes the dependence of the stationary
            distribution on A. The reference implementation holds it constant.
        arithmetic: Floating-point type of the messages. "float32" is faster; "float64" has 15 digits.
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    References:
        Sicking, Pintz, Akila, Wirtz: DenseHMM: Learning hidden Markov models by learning dense representations, 2020.

    Example:
        >>> from lightning_hmm import DenseHMM, fit
        >>> model = DenseHMM(num_states=3, num_symbols=3, embedding_dim=2)
        >>> model = fit(model, [[0, 1, 2] * 5], max_epochs=40)
        >>> {name: tuple(vectors.shape) for name, vectors in model.embeddings.items()}
        {'U': (3, 2), 'Z': (3, 2), 'V': (3, 2), 'W': (3, 2)}
        >>> model.predict_next([[0, 1]])[0].argmax().item()
        2
    """

    transition: EmbeddedTransition

    def __init__(
        self,
        num_states: int,
        num_symbols: int | None = None,
        embedding_dim: int = 3,
        objective: Objective = "em",
        similarity: Similarity = "exp",
        tied: bool = False,
        emission: Literal["categorical", "gaussian"] | Emission = "categorical",
        num_features: int | None = None,
        seed: int = 0,
        restarts: int = 1,
        optimizer: Literal["adam", "sgd"] = "adam",
        learning_rate: float | None = None,
        m_steps: int = 25,
        steps_per_epoch: int = 100,
        target: Literal["data", "truth"] = "data",
        differentiate_stationary: bool = True,
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        self._record_options(locals())
        _check_choices(objective=objective, optimizer=optimizer, target=target)
        check_counts(m_steps=m_steps, steps_per_epoch=steps_per_epoch)
        if learning_rate is not None and not learning_rate > 0:
            raise ValueError(f"`learning_rate` must be positive, but is {learning_rate} instead.")
        transition = EmbeddedTransition(embedding_dim, similarity, tied=tied)
        part = standard_emission(emission, num_symbols, num_features, 0.0, 0.0)
        symbolic = isinstance(part, Categorical)
        if emission == "categorical":
            part = EmbeddedCategorical(embedding_dim, similarity, tied=tied)
        elif emission == "gaussian":
            part = EmbeddedGaussian(embedding_dim, tied=tied)
        _check_objective(objective, part, symbolic)
        super().__init__(
            num_states,
            part,
            transition,
            EmbeddedInitial(embedding_dim, similarity, stationary=objective == "cooccurrence"),
            num_symbols=num_symbols if symbolic else None,
            num_features=None if symbolic else num_features,
            seed=seed,
            restarts=restarts,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
        self.objective, self.optimizer_name = objective, optimizer
        self.learning_rate = _LEARNING_RATES[objective] if learning_rate is None else learning_rate
        self.m_steps, self.steps_per_epoch = m_steps, steps_per_epoch
        self.target, self.differentiate_stationary = target, differentiate_stationary
        self.automatic_optimization = objective == "likelihood"
        # (V, V) The target of `cooccurrence`. It is not saved but counted again on resume, because it may be larger
        # than all parameters.
        self.target_cooccurrences: Tensor | None = None
        self._rows_without_counts: dict[str, Tensor] = {}

    def _randomize(self, generator: torch.Generator) -> None:
        for part in (self.transition, self.emission, self.initial):
            part.randomize(generator)

    # Embeddings

    @property
    def embedded_parts(self) -> dict[str, Embedded]:
        """The parts whose probabilities are functions of embeddings, by name."""
        return {name: part for name, part in self.distributions.items() if isinstance(part, Embedded)}

    @property
    def embeddings(self) -> dict[str, Tensor]:
        """The embeddings of the best restart by name.

        U, Z and W have one row per state; V has one row per symbol or column. W and V exist for embedded emissions.
        """
        found: dict[str, Any] = {"U": self.transition.entered, "Z": self.transition.Z}
        if isinstance(self.emission, Embedded):
            states, outputs, *_ = self.emission.function_arguments(slice(None))
            found |= {"V": outputs, "W": states}
        return {name: vectors[self.best_restart].detach() for name, vectors in found.items()}

    @property
    def cooccurrences(self) -> Tensor:
        """(V, V) P(y_t = i, y_t+1 = j) under the stationary distribution of the chain."""
        return cooccurrences(self.transition_probs, self.emission_probs)

    def at_start(self) -> DenseHMM:
        """Returns the model as it was before training."""
        model = DenseHMM(**{**self._given_options, "emission": self.hparams["emission"]})
        model.best_restart.copy_(self.best_restart)
        if not isinstance(self.emission, Embedded):
            model.emission.load_state_dict(self.emission.state_dict())  # Only embeddings are drawn with the seed.
        for name in (
            ("center", "data_variance", "has_data_stats") if isinstance(self.emission, EmbeddedGaussian) else ()
        ):
            getattr(model.emission, name).copy_(getattr(self.emission, name))
        return model

    # Training

    @property
    def never_decreases(self) -> bool:
        return False  # A gradient step may overshoot.

    @property
    def uses_labels(self) -> bool:
        return self.objective != "cooccurrence"  # That objective does not use states.

    @property
    def may_iterate(self) -> bool:
        return self.objective == "em"

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        kind = torch.optim.Adam if self.optimizer_name == "adam" else torch.optim.SGD
        return kind(self._embedding_parameters(), lr=self.learning_rate, fused=self.device.type in ("cpu", "cuda"))

    def _embedding_parameters(self) -> list[Tensor]:
        return [parameter for part in self.embedded_parts.values() for parameter in part.parameters()]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._users_limit = self.trainer.limit_train_batches
        if self.objective == "cooccurrence":
            self.trainer.limit_train_batches = 1  # Pairs are counted before the first epoch; steps need no data.

    def on_fit_end(self) -> None:
        self.trainer.limit_train_batches = self._users_limit

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.objective == "cooccurrence":
            from_truth = self.target == "truth"
            self.target_cooccurrences = self._true_cooccurrences() if from_truth else self._count_cooccurrences()

    def _true_cooccurrences(self) -> Tensor:
        data = data_of(self.trainer)
        if data is None or data.transition_probs is None or data.emission_probs is None:
            raise ValueError(
                "`target` must be data unless the data were drawn from a model with known parameters, as those of a "
                "synthetic datamodule of symbols."
            )
        return cooccurrences(data.transition_probs, data.emission_probs).to(self.device)

    def _count_cooccurrences(self) -> Tensor:
        """Returns the frequencies of symbol pairs in the training data of all ranks, counted batch by batch."""
        assert self.num_symbols is not None
        counts = torch.zeros(self.num_symbols, self.num_symbols, dtype=torch.float64, device=self.device)
        batches: Any = self.trainer.train_dataloader
        for batch in batches:
            self._require_sequences(batch)
            pair_counts(batch.to(self.device), self.num_symbols, counts)
        counts = self._sum_over_ranks(counts)
        total = counts.sum()
        if not float(total) > 0:
            raise ValueError(
                "The training data must have two observed symbols in a row somewhere, but have no such pair."
            )
        return counts.div_(total)

    def training_step(self, batch: Sequences, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        if self.objective == "likelihood":
            total = self.training_log_likelihood(batch).sum()
            observed = torch.as_tensor(batch.num_observed(), dtype=torch.float64, device=self.device)
            # DDP averages gradients over the ranks, so the loss is multiplied by their number.
            return -total / self._sum_over_ranks(observed).clamp(min=1) * self.trainer.world_size
        if self.objective == "cooccurrence":
            self._fit_cooccurrences()
        else:
            super().training_step(batch, batch_idx)
        return None

    def _maximize(self, counted: bool) -> None:
        # All ranks have the same counts, so they take the same steps without communication.
        parts, counts = self.embedded_parts, self._counts
        num_steps = (counts["initial"][0].sum(-1) + counts["transition"][0].sum((-2, -1))).clamp(min=1)  # (restarts,)

        def loss() -> Tensor:
            terms = [expected_log_likelihood(part, counts[name][0]) for name, part in parts.items()]
            return -torch.stack(terms).sum(0) / num_steps

        self._descend(loss, self.m_steps, counted)
        if "emission" not in parts:
            self._rows_without_counts = {"emission": self.emission.maximize(counts["emission"])}

    @property
    def rows_without_counts(self) -> dict[str, Tensor]:
        return self._rows_without_counts

    def _fit_cooccurrences(self) -> None:
        assert self.target_cooccurrences is not None
        target = self.target_cooccurrences

        def loss() -> Tensor:
            transition, emission = (part.natural(slice(None))[0].exp() for part in (self.transition, self.emission))
            return squared_error(transition, emission, target, differentiate_stationary=self.differentiate_stationary)

        errors = self._descend(loss, self.steps_per_epoch)
        if self.restarts > 1 and not self._validates:
            with torch.no_grad():
                self.best_restart.copy_(loss().argmin())
        self.log("train/cooccurrence_error", errors[self.best_restart], prog_bar=True)

    def _descend(self, loss: Callable[[], Tensor], steps: int, counted: bool = True) -> Tensor:
        """Takes optimizer steps on a (restarts,) loss and returns its value before the last step."""
        optimizer: Any = self.optimizers()
        parameters = self._embedding_parameters()
        for step in range(steps):
            with torch.enable_grad():
                losses = loss()
                gradients = torch.autograd.grad(losses.sum(), parameters)
            set_gradients(parameters, gradients)
            # Lightning's wrapper takes as long as a step, so only the last step of an epoch uses it.
            (optimizer if counted and step == steps - 1 else optimizer.optimizer).step()
        return losses.detach()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.objective != "cooccurrence":
            super().on_train_batch_end(outputs, batch, batch_idx)

    def _choose_on_training_data(self) -> None:
        if self.objective != "cooccurrence":  # That objective selects the restart with the smallest error.
            super()._choose_on_training_data()


def expected_log_likelihood(part: Embedded, counts: Tensor) -> Tensor:
    """Returns the (restarts,) terms of one part in Q: expected statistics times natural parameters."""
    return (counts * part.natural(slice(None))[0]).flatten(1).sum(1)
