"""Mixtures: several components for each state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, as_numbers
from lightning_hmm.distributions.compound import Compound, log_sum_exp
from lightning_hmm.distributions.gaussian import Gaussian
from lightning_hmm.distributions.moments import Moments
from lightning_hmm.distributions.starting import guess_clusters
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.sampling import draw_rows
from lightning_hmm.sequences import Sequences


class Mixture(Compound):
    r"""A mixture of C components of the same family in each state.

    .. math:: p(y \mid k) = \sum_{c=1}^{C} w_{kc} \, p(y \mid \theta_{kc})

    Use it if the observations of a state have several modes, or a distribution that no single family describes. The
    gradient of the log-likelihood with respect to :math:`\log w_{kc}` is the expected number of visits n to the
    component, and the M-step of the components is their own. The Dirichlet prior has the pseudocount :math:`\kappa` for
    each component: :math:`\hat w_{kc} = (n_{kc} + \kappa) / \sum_c (n_{kc} + \kappa)`. A weight of zero stays zero.
    Training starts from clusters of the observations of each state.

    With ``tied=("components",)``, all states share the same C components and differ in their weights only (the
    semi-continuous hidden Markov model). Options of the component, such as its prior or frozen parameters, are given to
    the component.

    Args:
        component: Emission of a component: any emission of vectors whose M-step uses expected statistics of fixed size,
            such as `Gaussian`, `Gamma` or `Poisson`.
        num_components: Number of components C of each state.
        pseudocount: Pseudocount of the Dirichlet prior on the weights, in counts of the whole data set.
        tied: "weights" and "components" can be shared by all states.
        frozen: "weights" and "components" can be excluded from training.

    Example:
        >>> from lightning_hmm import HMM, Mixture, Poisson
        >>> model = HMM(num_states=1, emission=Mixture(Poisson(), num_components=2), num_features=1)
        >>> model = model.set_parameters(emission={"weights": [[0.5, 0.5]], "rate": [[[1.0], [3.0]]]})
        >>> model.emission.component.rate.shape
        torch.Size([1, 2, 1])
        >>> model.emission.predict(torch.ones(1, 1, dtype=torch.float64)).mean
        tensor([[2.]], dtype=torch.float64)
    """

    support = ("values of its component", "Mark other values as missing.")
    m_step = "closed form for the weights; that of the component"
    names = ("weights", "components")

    def __init__(
        self,
        component: Emission,
        num_components: int,
        pseudocount: float = 0.0,
        tied: Sequence[str] = (),
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__(component, pseudocount, tied, frozen)
        if isinstance(num_components, bool) or not isinstance(num_components, int) or num_components < 1:
            raise ValueError(
                f"`num_components` must be a whole number of at least 1, but is {num_components!r} instead."
            )
        self.num_components = num_components
        self.shares_components = "components" in self.tied

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        self.part.allocate(restarts, self.num_components * (1 if self.shares_components else num_states), columns)
        self._begin_allocation()
        self.num_states = num_states
        self.width = max(num_states * self.num_components, self.part.width)
        self.latent.allocate(restarts, num_states, self.num_components)

    @property
    def weights(self) -> Tensor:
        """(K, C) weights of the components, of the best restart."""
        return self.latent.probs

    @property
    def component(self) -> Components:
        """The components. Their parameters have shape (K, C, ...)."""
        return Components(self)

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Rows:
        log_weights, *rest = natural
        rows = self.part.evidence(rest, batch).rows().unflatten(1, (-1, self.num_components))
        mixed = log_sum_exp(rows + log_weights)
        if not batch.is_complete:  # A missing step does not count for the weights.
            mixed = torch.where(batch.observed.any(1, keepdim=True), mixed, 0.0)
        return Rows(mixed)

    @torch.no_grad()
    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        guesses = [self._guess(sequences, guess, restart) for restart, guess in enumerate(responsibilities)]
        if self.part.starts_from_data and not bool(self.part.is_set):
            self.part.start(
                sequences, [guess.sum(1) if self.shares_components else guess.flatten(1) for guess in guesses]
            )
        self.latent.maximize([torch.stack([guess.sum(0) for guess in guesses])])  # frozen weights keep their values
        self.is_set.fill_(True)

    def _guess(self, sequences: Sequences, guess: Tensor, seed: int) -> Tensor:
        """Returns (steps, K, C) guessed posterior probabilities of the components.

        The components of a state are clusters of the steps at which this state is the most probable one. Shared
        components are clusters of all steps.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.shares_components:
            weights = guess.sum(1)
            shares = self._clusters(sequences, weights, generator) / torch.where(weights > 0, weights, 1.0)[:, None]
            return guess[:, :, None] * shares[:, None]
        nearest, found = guess.argmax(1), []
        for state in range(self.num_states):
            weights = torch.where(nearest == state, guess[:, state], 0.0)
            is_enough = int((weights > 0).sum()) >= self.num_components
            found.append(self._clusters(sequences, weights if is_enough else guess[:, state], generator))
        return torch.stack(found, 1)

    def _clusters(self, sequences: Sequences, weights: Tensor, generator: torch.Generator) -> Tensor:
        return guess_clusters(sequences.values, weights, self.num_components, 1, generator, "kmeans")[0]

    def _set_latent(self, value: Any) -> None:
        self.latent.set(value)

    def _set_component(self, values: dict[str, Any]) -> None:
        flat = {}
        for name, value in values.items():
            shape = tuple(getattr(self.component, name).shape)
            value = as_numbers(name, value, self.latent.log_probs.device)
            if value.shape not in (shape, (len(self.latent.log_probs), *shape)):
                raise ValueError(f"`{name}` must have shape {shape}, but has {tuple(value.shape)} instead.")
            states = value.dim() - len(shape)
            first = value.narrow(states, 0, 1)
            if self.shares_components and bool((value != first).any()):
                raise ValueError(f"`{name}` must be the same for all states of tied components, but the states differ.")
            flat[name] = (first if self.shares_components else value).flatten(states, states + 1)
        self.part.set(**flat)

    def predict(self, state_probs: Tensor) -> Any:
        joint = state_probs[:, :, None] * self.weights
        return self.part.predict(joint.sum(1) if self.shares_components else joint.flatten(1))

    def moments(self) -> Moments:
        """Returns the (K, D) means and variances of the best restart."""
        found: Moments = self.predict(torch.eye(self.num_states, dtype=torch.float64, device=self.weights.device))
        return found

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        drawn = draw_rows(self.weights, states, generator)
        found: Tensor = self.part.sample(
            drawn if self.shares_components else states * self.num_components + drawn, generator
        )
        return found


class Components:
    """The components of a `Mixture`. Their parameters have shape (K, C, ...), for K states and C components.

    Example:
        >>> from lightning_hmm import HMM, GaussianMixture
        >>> model = HMM(num_states=3, emission=GaussianMixture(2), num_features=4)
        >>> model.emission.component.variance.shape
        torch.Size([3, 2, 4])
    """

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture

    def __getattr__(self, name: str) -> Any:
        value, mixture = getattr(self._mixture.part, name), self._mixture
        # Properties that are matrices are parameters, with the number of the component as their first axis.
        if not isinstance(getattr(type(mixture.part), name, None), property) or getattr(value, "ndim", 0) < 2:
            return value
        value = value.unflatten(0, (-1, mixture.num_components))
        return value.expand(mixture.num_states, *value.shape[1:])


class GaussianMixture(Mixture):
    """A mixture of C Gaussians in each state: `Mixture` of `Gaussian`.

    Use it for real vectors if a single Gaussian does not describe the observations of a state.

    Args:
        num_components: Number of components C of each state.
        covariance: Kind of covariance; see `Gaussian`. A "tied" covariance is shared by all components of all states.
        variance_prior: Strength of the prior on the variances; see `Gaussian`.
        pseudocount: Pseudocount of the Dirichlet prior on the weights, in counts of the whole data set.
        tied: "weights" and "components" can be shared by all states; see `Mixture`.
        frozen: "weights" and "components" can be excluded from training.

    Example:
        >>> import torch
        >>> from lightning_hmm import HMM, GaussianMixture, fit
        >>> values = torch.tensor([[-1.1], [1.0], [-0.9], [1.1], [9.0], [11.1], [8.9], [11.0]], dtype=torch.float64)
        >>> model = fit(HMM(num_states=2, emission=GaussianMixture(2)), [values], max_epochs=10)
        >>> sorted(round(mean) for mean in model.emission.mean.flatten().tolist())
        [-1, 1, 9, 11]
    """

    support = Gaussian.support
    m_step = "closed form"

    def __init__(
        self,
        num_components: int,
        covariance: Literal["diagonal", "spherical", "full", "tied"] = "diagonal",
        variance_prior: float = 1e-6,
        pseudocount: float = 0.0,
        tied: Sequence[str] = (),
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__(Gaussian(covariance, variance_prior), num_components, pseudocount, tied, frozen)
