"""The hidden Markov model as Rabiner (1989) tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_hmm.distributions import CategoricalRows, DiagonalGaussian, Distribution
from lightning_hmm.inference import dense
from lightning_hmm.models.em import BaumWelchHMM
from lightning_hmm.sequences import Sequences


class GaussianPrediction(NamedTuple):
    """mean, variance: (N, D) moments of the predicted observation, a mixture over states."""

    mean: Tensor
    variance: Tensor


def gaussian_mixture(weights: Tensor, means: Tensor, variances: Tensor) -> GaussianPrediction:
    """Moments of (N,) mixtures of the same K components: weights (N, K), means and variances (K, D)."""
    mean = weights @ means
    spread = (means - mean[:, None]) ** 2  # (N, K, D)
    return GaussianPrediction(mean, torch.einsum("nk,nkd->nd", weights, variances + spread))


class StandardHMM(BaumWelchHMM):
    r"""K states, a full transition matrix, categorical or Gaussian emissions, trained by Baum-Welch.

    .. math:: z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad y_t \mid z_t = k \sim B_k \text{ or } N(\mu_k, \operatorname{diag} v_k)

    An EM iteration costs O(steps K^2) time and O(32 x longest sequence x K) memory beside the data.

    Args:
        num_states: K.
        num_symbols: V, for categorical emissions.
        emission: "categorical" for symbols, "gaussian" for real vectors.
        num_features: D, for Gaussian emissions.
        seed: of the starting values.
        restarts: number of random initializations trained in the same run. The one with the best validation likelihood at the end (training
            likelihood if there is no validation set) is used for inference.
        initialisation: of Gaussian means: the centres that k-means finds in the training data, or random points of it.
        discount: lambda of online EM, with an update after each batch; without it batch EM, an update after each epoch.
        sequences_per_update: online EM with several updates inside each batch.
        initial_pseudocount, transition_pseudocount, emission_pseudocount: of Dirichlet priors, in counts of the whole data.
        variance_prior: keeps Gaussian variances off zero: scatter added to each state, in units of the data's variance.
        frozen: any of "initial", "transition", "emission"; they keep their values.
        arithmetic: "float32" is faster, "float64" exact to 15 digits.
        symbol_names: for data with a vocabulary.
        unknown_symbol: the one of them that stands for all others.
    """

    def __init__(
        self,
        num_states: int,
        num_symbols: int | None = None,
        emission: Literal["categorical", "gaussian"] = "categorical",
        num_features: int | None = None,
        seed: int = 0,
        restarts: int = 1,
        initialisation: Literal["kmeans", "random"] = "kmeans",
        discount: float | None = None,
        sequences_per_update: int | None = None,
        initial_pseudocount: float = 0.0,
        transition_pseudocount: float = 0.0,
        emission_pseudocount: float = 0.0,
        variance_prior: float = 1e-6,
        frozen: Sequence[str] = (),
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        if emission not in ("categorical", "gaussian"):
            raise ValueError(f"`emission` must be categorical or gaussian, but is {emission!r} instead.")
        needed = {"categorical": ("num_symbols", num_symbols), "gaussian": ("num_features", num_features)}[emission]
        if needed[1] is None:
            other = {"categorical": ("vectors", num_features, "gaussian"), "gaussian": ("symbols", num_symbols, "categorical")}[emission]
            hint = f" The data are {other[0]}: set `emission` to {other[2]}." if other[1] is not None else ""
            raise ValueError(f"`{needed[0]}` must be given for {emission} emissions.{hint}")
        if initialisation not in ("kmeans", "random"):
            raise ValueError(f"`initialisation` must be kmeans or random, but is {initialisation!r} instead.")
        categorical = emission == "categorical"
        priors = {"initial": {"pseudocount": initial_pseudocount}, "transition": {"pseudocount": transition_pseudocount}}
        priors["emission"] = {"pseudocount": emission_pseudocount} if categorical else {"variance_prior": variance_prior}
        super().__init__(
            num_states=num_states,
            num_symbols=num_symbols if categorical else None,
            num_features=None if categorical else num_features,
            restarts=restarts,
            discount=discount,
            sequences_per_update=sequences_per_update,
            priors=priors,
            frozen=frozen,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
        self.save_hyperparameters()
        for name in frozen:
            if name not in priors:
                raise ValueError(f"`frozen` must name initial, transition or emission, but names {name!r} instead.")
        self.initialisation, self.seed = initialisation, seed
        self.initial = CategoricalRows(restarts, num_states, name="initial")
        self.transition = self._make_transition()
        self.emission: CategoricalRows | DiagonalGaussian
        if categorical:
            assert num_symbols is not None
            self.emission = CategoricalRows(restarts, num_states, num_symbols, name="emission")
        else:
            assert num_features is not None
            self.emission = DiagonalGaussian(restarts, num_states, num_features)
        self.initialised: Tensor
        self.register_buffer("initialised", torch.tensor(categorical))
        generator = torch.Generator().manual_seed(seed)
        for rows in (self.initial, self.transition, self.emission):
            if not isinstance(rows, DiagonalGaussian):
                rows.randomise(generator)

    def _make_transition(self) -> Any:
        return CategoricalRows(self.restarts, self.num_states, self.num_states, name="transition")

    @property
    def distributions(self) -> dict[str, Distribution]:
        return {"initial": self.initial, "transition": self.transition, "emission": self.emission}

    def chain(self, restart: int) -> tuple[Any, ...]:
        return self.initial.log_probs[restart], self.transition.log_probs[restart]

    def evidence(self, restart: int, sequences: Sequences) -> dense.Emission:
        return dense.Symbols(self.emission.log_probs[restart]) if isinstance(self.emission, CategoricalRows) else self.emission.natural(restart)

    @property
    def initial_probs(self) -> Tensor:
        """(K,) p(z_1)."""
        return self.initial.probs[self.chosen]

    @property
    def transition_probs(self) -> Tensor:
        """(K, K) p(z_t+1 = j | z_t = i)."""
        return self.transition.probs[self.chosen]

    @property
    def emission_probs(self) -> Tensor:
        """(K, V) p(symbol | state)."""
        if isinstance(self.emission, DiagonalGaussian):
            raise AttributeError  # `HMM.__getattr__` says why
        return self.emission.probs[self.chosen]

    def _gaussian(self) -> DiagonalGaussian:
        if isinstance(self.emission, CategoricalRows):
            raise AttributeError
        return self.emission

    @property
    def means(self) -> Tensor:
        """(K, D) Gaussian means."""
        return self._gaussian().means[self.chosen]

    @property
    def variances(self) -> Tensor:
        """(K, D) Gaussian variances."""
        return self._gaussian().variances[self.chosen]

    def set_parameters(
        self,
        initial: Any = None,
        transition: Any = None,
        emission: Any = None,
        means: Any = None,
        variances: Any = None,
    ) -> StandardHMM:
        """Takes probabilities, and means and variances, for all restarts alike; what is not given stays. Zeros stay zero in training."""
        for rows, probs in ((self.initial, initial), (self.transition, transition)):
            if probs is not None:
                rows.set(probs)
        if emission is not None:
            if isinstance(self.emission, DiagonalGaussian):
                raise ValueError("`emission` must be given as `means` and `variances` for Gaussian emissions.")
            self.emission.set(emission)
        if means is not None or variances is not None:
            gaussian = self._gaussian()
            if means is None and not bool(self.initialised):
                raise ValueError("`means` must be given with `variances`, as long as the model has none from data.")
            gaussian.set(gaussian.means if means is None else means, gaussian.variances if variances is None else variances)
            self.initialised.fill_(True)
        return self

    @property
    def starts_from_data(self) -> bool:
        return isinstance(self.emission, DiagonalGaussian) and not bool(self.emission.located)

    def initialise(self, sequences: Sequences) -> None:
        """Gives Gaussian emissions the units of the data and, unless they were set or trained already, starts them from the data."""
        if isinstance(self.emission, DiagonalGaussian) and not bool(self.emission.located):
            sequences.check(None, self.num_features)
            self.emission.locate(sequences)
            if not bool(self.initialised):
                self.emission.initialise(sequences, torch.Generator().manual_seed(self.seed), self.initialisation)
            self.initialised.fill_(True)

    def on_train_start(self) -> None:
        if not bool(self.initialised):
            raise ValueError(
                "Gaussian emissions start from the data, which a plain DataLoader does not show as a whole. "
                "Call `model.initialise(sequences)` before training, or train with a datamodule or `lightning_hmm.fit`."
            )

    @property
    def fused_kernel(self) -> Any:
        if isinstance(self.emission, DiagonalGaussian):
            return None
        return _online_em

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        if isinstance(self.emission, CategoricalRows):
            return states.with_values(dense.draw_rows(self.emission_probs, states.values, generator))
        noise = torch.randn(states.num_steps, self.means.shape[1], generator=generator, dtype=torch.float64).to(self.device)
        return states.with_values(self.means[states.values] + noise * self.variances.sqrt()[states.values])

    def predict_emission(self, state_probs: Tensor) -> Tensor | GaussianPrediction:
        if isinstance(self.emission, CategoricalRows):
            return state_probs @ self.emission_probs
        return gaussian_mixture(state_probs, self.means, self.variances)


def _online_em(initial: Tensor, transition: Tensor, emission: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return dense.online_em(initial, transition, dense.Symbols(emission), *args, **kwargs)
