"""The DenseHMM of Sicking et al. (2020): dense vectors for states and symbols, from which a kernel makes the probabilities."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hmm.distributions.exponential import Moments, mixture_moments
from lightning_hmm.distributions.gaussian import data_location
from lightning_hmm.inference.cooccurrence import cooccurrences, pair_counts, squared_error, stationary
from lightning_hmm.inference.evidence import Evidence, Quadratic, Table
from lightning_hmm.inference.operators import Dense
from lightning_hmm.inference.sampling import draw_rows
from lightning_hmm.models.discrete import DiscreteHMM
from lightning_hmm.optim import set_gradients
from lightning_hmm.sequences import Sequences

Kernel = Literal["exp", "sigmoid", "relu", "rbf", "abs_linear"]
Objective = Literal["em", "cooccurrence", "likelihood"]

_RELU_FLOOR = 1e-6
_LEARNING_RATES = {"em": 0.03, "cooccurrence": 0.001, "likelihood": 0.1}


def kernel_log_probs(kernel: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """(..., N, L), (..., M, L) -> (..., N, M): log of k(left_i, right_j) / sum over j.

    k is exp(s), 1 / (1 + exp(-s)), max(s, 0) + 1e-6 (without that a row could be without mass), exp(-|left - right|^2 / 2), or
    |s|, with s the scalar product.
    """
    scores = left @ right.mT
    if kernel == "sigmoid":
        scores = F.logsigmoid(scores)
    elif kernel == "relu":
        scores = (scores.relu() + _RELU_FLOOR).log()
    elif kernel == "rbf":
        scores = scores - right.square().sum(-1)[..., None, :] / 2  # |left|^2 is the same for the whole row
    elif kernel == "abs_linear":
        scores = scores.abs().clamp(min=torch.finfo(scores.dtype).tiny).log()
    return scores.log_softmax(-1)


def fair_num_states(num_states: int, num_symbols: int, embedding_dim: int) -> int:
    """How many states give a StandardHMM about the degrees of freedom of a DenseHMM: the n' nearest to n'^2 + n' (m - 1) - 1 = l (3 n + m + 1)."""
    half = (num_symbols - 1) / 2
    return max(1, round(-half + math.sqrt(half**2 + 1 + embedding_dim * (3 * num_states + num_symbols + 1))))


class DenseHMM(DiscreteHMM):
    r"""A hidden Markov model whose probabilities are composed of vectors of length L.

    .. math:: A_{ij} \propto k(u_j, z_i), \quad B_{ij} \propto k(v_j, w_i), \quad \pi_i \propto k(u_i, z_{start})

    State i is :math:`z_i` where it is left, :math:`u_i` where it is entered and :math:`w_i` where it emits; symbol j is
    :math:`v_j`. Nothing constrains the vectors, so any optimizer trains them, by one of three objectives:

    - ``em``: expected counts of an epoch, then `m_steps` steps of the optimizer on the expected log-likelihood Q of them.
    - ``cooccurrence``: the squared difference of the frequencies of symbol pairs in the data and under the model, whose
      chain is taken to be stationary. The data are counted once; after that a step costs O(K V^2), whatever their size.
      An epoch is `steps_per_epoch` steps. The initial probabilities are the stationary ones of A.
    - ``likelihood``: a gradient step on the log-likelihood for each batch.

    With Gaussian emissions (not for ``cooccurrence``) a feature d has a vector too: the mean of state i is
    :math:`w_i \cdot v_d`, in units of the data's spread around its centre; log-variances are free.

    Args:
        num_states: K.
        num_symbols: V, for categorical emissions.
        embedding_dim: L.
        objective: "em", "cooccurrence" or "likelihood".
        kernel: "exp" (the paper's softmax), "sigmoid", "relu", "rbf" or "abs_linear"; see `kernel_log_probs`.
        tie: "zv" learns only Z, V and z_start: a state has one vector, U = W = Z.
        emission: "categorical" for symbols, "gaussian" for real vectors.
        num_features: D, for Gaussian emissions.
        seed: of the starting vectors, which are standard normal.
        restarts: number of random initializations trained in the same run. The one with the best validation likelihood at the end (training
            likelihood if there is no validation set) is used for inference.
        optimizer: "adam" or "sgd".
        learning_rate: if not given, 0.03 for ``em``, 0.001 for ``cooccurrence`` and 0.1 for ``likelihood``.
        m_steps: of an epoch of ``em``.
        steps_per_epoch: of ``cooccurrence``.
        target: of ``cooccurrence``: "data" counts the pairs of the training data, "truth" takes the co-occurrences of the model
            that synthetic data were drawn from.
        through_stationary: of ``cooccurrence``: whether the gradient knows that the stationary distribution moves with A. The
            reference implementation holds it constant.
        arithmetic: "float32" is faster, "float64" exact to 15 digits; of the message passing.
        symbol_names: for data with a vocabulary.
        unknown_symbol: the one of them that stands for all others.

    Attributes:
        U, Z, W: (restarts, K, L).
        V: (restarts, V or D, L).
        z_start: (restarts, L).
    """

    centre: Tensor
    scale: Tensor
    located: Tensor

    def __init__(
        self,
        num_states: int,
        num_symbols: int | None = None,
        embedding_dim: int = 3,
        objective: Objective = "em",
        kernel: Kernel = "exp",
        tie: Literal["none", "zv"] = "none",
        emission: Literal["categorical", "gaussian"] = "categorical",
        num_features: int | None = None,
        seed: int = 0,
        restarts: int = 1,
        optimizer: Literal["adam", "sgd"] = "adam",
        learning_rate: float | None = None,
        m_steps: int = 25,
        steps_per_epoch: int = 100,
        target: Literal["data", "truth"] = "data",
        through_stationary: bool = True,
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        options: dict[str, tuple[str, tuple[str, ...]]] = {
            "objective": (objective, get_args(Objective)),
            "kernel": (kernel, get_args(Kernel)),
            "tie": (tie, ("none", "zv")),
            "emission": (emission, ("categorical", "gaussian")),
            "optimizer": (optimizer, ("adam", "sgd")),
            "target": (target, ("data", "truth")),
        }
        for name, (value, allowed) in options.items():
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, but is {value!r} instead.")
        for name, size in {"embedding_dim": embedding_dim, "m_steps": m_steps, "steps_per_epoch": steps_per_epoch}.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1, but is {size} instead.")
        if learning_rate is not None and not learning_rate > 0:
            raise ValueError(f"`learning_rate` must be positive, but is {learning_rate} instead.")
        categorical = emission == "categorical"
        if objective == "cooccurrence" and not categorical:
            raise ValueError("`objective` must be em or likelihood for Gaussian emissions: vectors do not co-occur, symbols do.")
        width = num_symbols if categorical else num_features
        if width is None:
            raise ValueError(f"`{'num_symbols' if categorical else 'num_features'}` must be given for {emission} emissions.")
        super().__init__(
            num_states=num_states,
            num_symbols=num_symbols if categorical else None,
            num_features=None if categorical else num_features,
            restarts=restarts,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
        self.save_hyperparameters()
        self.embedding_dim, self.objective, self.kernel, self.tie, self.seed = embedding_dim, objective, kernel, tie, seed
        self.optimizer_name, self.learning_rate = optimizer, _LEARNING_RATES[objective] if learning_rate is None else learning_rate
        self.m_steps, self.steps_per_epoch, self.target, self.through_stationary = m_steps, steps_per_epoch, target, through_stationary
        self.automatic_optimization = objective == "likelihood"
        start = self.starting_vectors()
        self.Z, self.V = nn.Parameter(start["Z"]), nn.Parameter(start["V"])
        if tie == "none":
            self.U, self.W = nn.Parameter(start["U"]), nn.Parameter(start["W"])
        if objective != "cooccurrence":
            self.z_start = nn.Parameter(start["z_start"])
        if not categorical:
            self.log_variance = nn.Parameter(torch.zeros(restarts, num_states, width, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(width, dtype=torch.float64))
        self.register_buffer("located", torch.tensor(categorical))
        # (V, V) what `cooccurrence` fits; counted anew on resume, since it may be larger than everything else in a checkpoint.
        self.target_cooccurrences: Tensor | None = None
        # Natural parameters held while an epoch of `em` gathers its counts: the counts are their gradients.
        self._held: list[Tensor] | None = None

    def starting_vectors(self) -> dict[str, Tensor]:
        """The vectors that training starts from, by name; drawn by `seed`, the same at any time."""
        generator = torch.Generator().manual_seed(self.seed)
        width = self.num_symbols or self.num_features or 0
        sizes = {"U": (self.num_states,), "Z": (self.num_states,), "W": (self.num_states,), "V": (width,), "z_start": ()}
        draws = {name: torch.randn(self.restarts, *size, self.embedding_dim, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
        if self.num_features is not None:
            draws["V"] /= math.sqrt(self.embedding_dim)  # so that means are spread like the data
        return draws

    def __getattr__(self, name: str) -> Any:
        if name in ("U", "W") and self.__dict__.get("tie") == "zv":
            return self.Z
        # Python calls this, too, where a property has no value.
        if name in ("means", "variances"):
            raise AttributeError(f"`{name}` is for Gaussian emissions: a categorical model has `emission_probs`.")
        if name == "emission_probs":
            raise AttributeError("`emission_probs` is for categorical emissions: a Gaussian model has `means` and `variances`.")
        return super().__getattr__(name)

    # Probabilities from vectors

    def natural_parameters(self, restart: int | slice) -> list[Tensor]:
        """log pi, log A, and the natural parameters of the emissions, of one restart or of all."""
        if self._held is not None:
            return [value[restart] for value in self._held]
        log_transition = kernel_log_probs(self.kernel, self.Z[restart], self.U[restart])
        if self.objective == "cooccurrence":
            log_initial = stationary(log_transition.exp()).log()
        else:
            log_initial = kernel_log_probs(self.kernel, self.z_start[restart].unsqueeze(-2), self.U[restart]).squeeze(-2)
        if self.num_features is None:
            return [log_initial, log_transition, kernel_log_probs(self.kernel, self.W[restart], self.V[restart])]
        offset, variance = self._offsets_and_variances(restart)
        log_norm = offset.square() / (2 * variance) + 0.5 * (2 * math.pi * variance).log()
        return [log_initial, log_transition, offset / variance, -0.5 / variance, log_norm]

    def _offsets_and_variances(self, restart: int | slice) -> tuple[Tensor, Tensor]:
        return self.scale.sqrt() * (self.W[restart] @ self.V[restart].mT), self.scale * self.log_variance[restart].exp()

    def chain(self, restart: int, sequences: Sequences | None = None) -> tuple[Tensor, Dense]:
        log_initial, log_transition, *_ = self.natural_parameters(restart)
        return log_initial, Dense(log_transition)

    def evidence(self, restart: int, sequences: Sequences) -> Evidence:
        _, _, *natural = self.natural_parameters(restart)
        if self.num_symbols is not None:
            return Table(natural[0], sequences.symbols(self.num_symbols))
        sequences.check(None, self.num_features)
        eta1, eta2, log_norm = natural
        return diagonal_gaussian(eta1, eta2, log_norm, self.centre, sequences)

    @property
    def initial_probs(self) -> Tensor:
        """(K,) p(z_1)."""
        return self.natural_parameters(int(self.chosen))[0].detach().exp()

    @property
    def transition_probs(self) -> Tensor:
        """(K, K) p(z_t+1 = j | z_t = i)."""
        return self.natural_parameters(int(self.chosen))[1].detach().exp()

    @property
    def emission_probs(self) -> Tensor:
        """(K, V) p(symbol | state)."""
        if self.num_features is not None:
            raise AttributeError  # `__getattr__` says why
        return self.natural_parameters(int(self.chosen))[2].detach().exp()

    def _gaussian(self) -> tuple[Tensor, Tensor]:
        if self.num_features is None:
            raise AttributeError  # `__getattr__` says why
        offset, variance = self._offsets_and_variances(int(self.chosen))
        return (self.centre + offset).detach(), variance.detach()

    @property
    def means(self) -> Tensor:
        """(K, D) Gaussian means."""
        return self._gaussian()[0]

    @property
    def variances(self) -> Tensor:
        """(K, D) Gaussian variances."""
        return self._gaussian()[1]

    @property
    def cooccurrences(self) -> Tensor:
        """(V, V) P(y_t = i, y_t+1 = j) in the long run."""
        return cooccurrences(self.transition_probs, self.emission_probs)

    @property
    def embeddings(self) -> dict[str, Tensor]:
        """The chosen restart's vectors by name: U, Z, W with a row for each state, V with one for each symbol or feature."""
        return {name: getattr(self, name)[self.chosen].detach() for name in ("U", "Z", "V", "W")}

    def at_start(self) -> DenseHMM:
        """The model as it was before training."""
        words = inspect.signature(DenseHMM.__init__).parameters
        model = DenseHMM(**{name: value for name, value in self.hparams.items() if name in words})
        for name in ("chosen", "centre", "scale", "located"):
            getattr(model, name).copy_(getattr(self, name))
        return model

    @property
    def num_free_parameters(self) -> int:
        """L (3 K + V + 1) as in the paper; less what is tied, and without z_start where the chain is stationary."""
        return sum(parameter[0].numel() for parameter in self.parameters())

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        if self.num_features is None:
            return states.with_values(draw_rows(self.emission_probs, states.values, generator))
        noise = torch.randn(states.num_steps, len(self.centre), generator=generator, dtype=torch.float64).to(self.device)
        return states.with_values(self.means[states.values] + noise * self.variances.sqrt()[states.values])

    def predict_emission(self, state_probs: Tensor) -> Tensor | Moments:
        if self.num_features is None:
            return state_probs @ self.emission_probs
        return mixture_moments(state_probs, self.means, self.variances)

    # Training

    @property
    def starts_from_data(self) -> bool:
        return not bool(self.located)

    def initialize(self, sequences: Sequences) -> None:
        """Gives Gaussian emissions the units of the data."""
        sequences.check(None, self.num_features)
        centre, scale = data_location(sequences)
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.located.fill_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.Adam if self.optimizer_name == "adam" else torch.optim.SGD
        return kind(self.parameters(), lr=self.learning_rate, fused=self.device.type in ("cpu", "cuda"))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._held = None  # an interrupted run may have left something
        self._users_limit = self.trainer.limit_train_batches
        if self.objective == "cooccurrence":
            self.trainer.limit_train_batches = 1  # the data are counted before; no step reads them

    def on_fit_end(self) -> None:
        self.trainer.limit_train_batches = self._users_limit

    def on_train_start(self) -> None:
        if not bool(self.located):
            raise ValueError(
                "Gaussian emissions take their units from the data, which a plain DataLoader does not show as a whole. "
                "Call `model.initialize(sequences)` before training, or train with a datamodule or `lightning_hmm.fit`."
            )
        if self.objective == "cooccurrence":
            self.target_cooccurrences = self._true_cooccurrences() if self.target == "truth" else self._count_cooccurrences()

    def _true_cooccurrences(self) -> Tensor:
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        transition, emission = getattr(datamodule, "transition_probs", None), getattr(datamodule, "emission_probs", None)
        if transition is None or emission is None:
            raise ValueError("`target` must be data, unless the data were drawn from a model with known parameters (a synthetic datamodule of symbols).")
        return cooccurrences(transition, emission).to(self.device)

    def _count_cooccurrences(self) -> Tensor:
        """The frequencies of pairs in the training data of all ranks, batch by batch."""
        assert self.num_symbols is not None
        counts = torch.zeros(self.num_symbols, self.num_symbols, dtype=torch.float64, device=self.device)
        batches: Any = self.trainer.train_dataloader
        for batch in batches:
            self._require_sequences(batch)
            pair_counts(batch.to(self.device), self.num_symbols, counts)
        counts = self._sum_over_ranks(counts)
        total = counts.sum()
        if not float(total) > 0:
            raise ValueError("The training data must have two observed symbols in a row somewhere, but have no such pair: nothing co-occurs.")
        return counts.div_(total)

    def training_step(self, batch: Sequences, batch_idx: int) -> Tensor | None:
        if self.objective == "likelihood":
            total = self.total_log_likelihood(batch).sum()
            observed = self._sum_over_ranks(torch.as_tensor(batch.num_observed(), dtype=torch.float64, device=self.device)).clamp(min=1)
            return -total / observed * self.trainer.world_size  # DDP takes the mean over ranks
        if self.objective == "em":
            self._e_step(batch)
            if self.trainer.is_last_batch:
                self._m_step()
        else:
            self._fit_cooccurrences()
        return None

    def _e_step(self, batch: Sequences) -> None:
        if self._held is None:
            self._held = [value.detach().requires_grad_() for value in self.natural_parameters(slice(None))]
        self.total_log_likelihood(batch).sum().backward()

    def _m_step(self) -> None:
        assert self._held is not None
        self._raise_impossible()
        # Each rank goes on from the counts of all: they take the same steps, and none need wait for another.
        counts = [self._sum_over_ranks(torch.zeros_like(value) if value.grad is None else value.grad) for value in self._held]
        self._held = None
        num_steps = (counts[0].sum(-1) + counts[1].sum((-2, -1))).clamp(min=1)  # (restarts,)

        def loss() -> Tensor:
            return -expected_log_likelihood(counts, self.natural_parameters(slice(None))) / num_steps

        self._descend(loss, self.m_steps)

    def _fit_cooccurrences(self) -> None:
        assert self.target_cooccurrences is not None
        target = self.target_cooccurrences

        def loss() -> Tensor:
            transition, emission = (kernel_log_probs(self.kernel, *pair).exp() for pair in ((self.Z, self.U), (self.W, self.V)))
            return squared_error(transition, emission, target, through_stationary=self.through_stationary)

        errors = self._descend(loss, self.steps_per_epoch)
        if self.restarts > 1 and not self._validates:
            with torch.no_grad():
                self.chosen.copy_(loss().argmin())
        self.log("train/cooccurrence_error", errors[self.chosen], prog_bar=True)

    def _descend(self, loss: Any, steps: int) -> Tensor:
        """Steps of the optimizer on a (restarts,) loss; returns it as it was before the last."""
        optimizer: Any = self.optimizers()
        parameters = list(self.parameters())
        for step in range(steps):
            losses: Tensor = loss()
            set_gradients(parameters, torch.autograd.grad(losses.sum(), parameters))
            # Lightning counts the last of them; its bookkeeping would take as long as a step.
            (optimizer if step == steps - 1 else optimizer.optimizer).step()
        return losses.detach()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.objective != "cooccurrence":
            super().on_train_batch_end(outputs, batch, batch_idx)

    def _choose_on_training_data(self) -> None:
        if self.objective != "cooccurrence":  # there, the error decides
            super()._choose_on_training_data()


def diagonal_gaussian(eta1: Tensor, eta2: Tensor, log_norm: Tensor, center: Tensor, sequences: Sequences) -> Quadratic:
    """log N(y | k) = sum over observed d of eta1 u + eta2 u^2 - log_norm with u = y - center; the natural parameters are (K, D)."""
    offsets = sequences.values.to(center.dtype) - center
    observed, places = ~offsets.isnan(), torch.arange(len(center), device=center.device)
    shown = len(center) + places  # the columns that say what is observed
    pairs = torch.cat([torch.stack(pair, 1) for pair in ((places, shown), (places, places), (shown, shown))])
    columns = torch.cat([torch.where(observed, offsets, 0.0), observed.to(offsets.dtype)], 1)
    return Quadratic(columns, pairs, torch.cat([eta1, eta2, -log_norm], 1))


def expected_log_likelihood(counts: list[Tensor], natural: list[Tensor]) -> Tensor:
    """(restarts,) Q of appendix A: expected statistics times natural parameters, which is linear in both."""
    return torch.stack([(count * value).flatten(1).sum(1) for count, value in zip(counts, natural, strict=True)]).sum(0)
