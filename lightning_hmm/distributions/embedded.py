"""Parts whose probabilities are computed from embeddings: low-dimensional vectors for states, symbols and columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.by_gradient import ByGradient
from lightning_hmm.distributions.categorical import Categorical
from lightning_hmm.distributions.gaussian import Gaussian, weighted_mean_var
from lightning_hmm.distributions.rows import CategoricalRows, Initial
from lightning_hmm.distributions.transitions.full import Full
from lightning_hmm.inference.cooccurrence import stationary
from lightning_hmm.sequences import Sequences

Similarity = Literal["exp", "sigmoid", "relu", "rbf", "abs_linear"]

_RELU_FLOOR = 1e-6


def similarity_log_probs(similarity: Similarity, left: Tensor, right: Tensor) -> Tensor:
    """Computes log-probabilities that are proportional to the similarities of embeddings.

    With the scalar product s of two embeddings, the similarity k is exp(s) for "exp", 1 / (1 + exp(-s)) for "sigmoid",
    max(s, 0) + 1e-6 for "relu" (the constant keeps every row positive), exp(-|left - right|^2 / 2) for "rbf", and |s|
    for "abs_linear".

    Args:
        similarity: Name of the similarity.
        left: (..., N, L) embeddings.
        right: (..., M, L) embeddings.

    Returns:
        (..., N, M) logarithms of k(left_i, right_j), normalized over j.
    """
    scores = left @ right.mT
    if similarity == "sigmoid":
        scores = F.logsigmoid(scores)
    elif similarity == "relu":
        scores = (scores.relu() + _RELU_FLOOR).log()
    elif similarity == "rbf":
        scores = scores - right.square().sum(-1)[..., None, :] / 2  # |left|^2 is constant in a row
    elif similarity == "abs_linear":
        scores = scores.abs().clamp(min=torch.finfo(scores.dtype).tiny).log()
    return scores.log_softmax(-1)


def check_embedding(embedding_dim: Any, similarity: Any, m_steps: Any) -> None:
    """Raises a `ValueError` if an option of an embedded part is invalid."""
    for name, size in {"embedding_dim": embedding_dim, "m_steps": m_steps}.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1, but is {size} instead.")
    if similarity not in get_args(Similarity):
        raise ValueError(
            f"`similarity` must be one of {', '.join(get_args(Similarity))}, but is {similarity!r} instead."
        )


def _normal(restarts: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(restarts, *shape, dtype=torch.float64))


class Embedded(ByGradient):
    """Base class of parts with embeddings, which are drawn from a standard normal distribution and cannot be set."""

    is_tied = False  # whether some of the embeddings are shared with the transition

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws all embeddings from a standard normal distribution."""
        for parameter in self.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        self.is_set.fill_(True)

    def belong_to(self, model: Any) -> None:
        if self.is_tied and not hasattr(type(model), "embeddings"):
            raise ValueError(
                f"{type(self).__name__} shares embeddings with the transition, which only a DenseHMM updates jointly. "
                f"Use a DenseHMM, or an {type(self).__name__} without shared embeddings."
            )
        super().belong_to(model)

    def set(self, *values: Any, **named_values: Any) -> None:
        """Raises a `ValueError`, because probabilities do not determine embeddings."""
        raise ValueError(
            f"The values of an {type(self).__name__} cannot be set: its probabilities are computed from embeddings."
        )


class EmbeddedRows(Embedded, CategoricalRows):
    """Rows of probabilities. Each row consists of the normalized similarities of one embedding to a set of others."""

    similarity: Similarity

    def natural_of(self, *parameters: Tensor) -> Tensor:
        left, right = parameters
        return similarity_log_probs(self.similarity, left, right)

    def prior_term(self, natural: Tensor) -> Tensor | float:
        return self.prior["pseudocount"] * natural.sum()

    @property
    def probs(self) -> Tensor:
        """Probabilities of the best restart."""
        return self.natural(self.restart)[0].detach().exp()


class EmbeddedTransition(EmbeddedRows, Full):
    r"""Transition probabilities that are computed from two embeddings of each state.

    .. math:: A_{ij} \propto k(z_i, u_j)

    State i has the embedding :math:`z_i` as the current state and :math:`u_i` as the next state. The matrix has 2 K L
    parameters instead of K (K - 1). Use it for many states, or to visualize states by their embeddings.

    Args:
        embedding_dim: Length L of the embeddings.
        similarity: The function k: "exp", for which each row is a softmax of scalar products, "sigmoid", "relu", "rbf"
            or "abs_linear"; see `similarity_log_probs`.
        pseudocount: Pseudocount of a Dirichlet prior on each row, in counts of the whole data set.
        m_steps: Number of L-BFGS iterations in each M-step.
        tied: Whether each state has a single embedding, U = Z.

    Example:
        >>> from lightning_hmm import HMM
        >>> from lightning_hmm.distributions import EmbeddedTransition
        >>> model = HMM(num_states=50, transition=EmbeddedTransition(embedding_dim=3), num_symbols=4)
        >>> model.transition.num_free_parameters(restart=0)
        300
        >>> model.transition_probs.shape
        torch.Size([50, 50])
    """

    def __init__(
        self,
        embedding_dim: int,
        similarity: Similarity = "exp",
        pseudocount: float = 0.0,
        m_steps: int = 5,
        tied: bool = False,
    ) -> None:
        super().__init__(pseudocount)
        check_embedding(embedding_dim, similarity, m_steps)
        self.embedding_dim = embedding_dim
        self.similarity = similarity
        self.m_steps = m_steps
        self.tied = tied

    def allocate(self, restarts: int, num_states: int) -> None:
        self._begin_allocation()
        if not self.tied:
            self.U = _normal(restarts, num_states, self.embedding_dim)
        self.Z = _normal(restarts, num_states, self.embedding_dim)

    @property
    def entered(self) -> Tensor:
        """(restarts, K, L) embeddings of the states as the next state."""
        return self.Z if self.tied else self.U

    def natural_of(self, *parameters: Tensor) -> Tensor:
        # The parameters are U and Z, or only Z if they are tied.
        return super().natural_of(parameters[-1], parameters[0])

    def matrix(self, restart: int) -> Tensor:
        return self.natural(restart)[0].detach().exp()


class EmbeddedInitial(EmbeddedRows, Initial):
    r"""Probabilities of the first state that are computed from embeddings.

    .. math:: \pi_i \propto k(z_{start}, u_i)

    The embeddings :math:`u_i` are those of the transition, so this part is only available in a `DenseHMM`.

    Args:
        embedding_dim: Length L of the embeddings.
        similarity: The function k; see `EmbeddedTransition`.
        stationary: Whether the first state has the stationary distribution of the transition instead.
    """

    is_tied = True

    def __init__(self, embedding_dim: int, similarity: Similarity = "exp", stationary: bool = False) -> None:
        super().__init__()
        check_embedding(embedding_dim, similarity, 1)
        self.embedding_dim = embedding_dim
        self.similarity = similarity
        self.stationary = stationary

    def allocate(self, restarts: int, num_states: int) -> None:
        self._begin_allocation()
        if not self.stationary:
            self.z_start = _normal(restarts, self.embedding_dim)

    def function_arguments(self, restart: int | slice) -> tuple[Tensor, ...]:
        transition = self._owner[0].transition
        if self.stationary:
            return transition.natural(restart)
        return self.z_start[restart], transition.entered[restart]

    def natural_of(self, *parameters: Tensor) -> Tensor:
        if self.stationary:
            return stationary(parameters[0].exp()).log()
        start, entered = parameters
        return super().natural_of(start.unsqueeze(-2), entered).squeeze(-2)


class EmbeddedCategorical(EmbeddedRows, Categorical):
    r"""Symbol probabilities that are computed from embeddings of states and symbols.

    .. math:: B_{ij} \propto k(w_i, v_j)

    Use it for many symbols, or to visualize symbols by their embeddings.

    Args:
        embedding_dim: Length L of the embeddings.
        similarity: The function k; see `EmbeddedTransition`.
        pseudocount: Pseudocount of a Dirichlet prior on each row, in counts of the whole data set.
        m_steps: Number of L-BFGS iterations in each M-step.
        tied: Whether W is the embedding Z of the transition, in a `DenseHMM`.

    Example:
        >>> from lightning_hmm import HMM
        >>> from lightning_hmm.distributions import EmbeddedCategorical
        >>> model = HMM(num_states=5, emission=EmbeddedCategorical(embedding_dim=2), num_symbols=100)
        >>> model.emission.V.shape  # restarts, symbols, entries of an embedding
        torch.Size([1, 100, 2])
        >>> model.emission.probs.shape
        torch.Size([5, 100])
    """

    def __init__(
        self,
        embedding_dim: int,
        similarity: Similarity = "exp",
        pseudocount: float = 0.0,
        m_steps: int = 5,
        tied: bool = False,
    ) -> None:
        super().__init__(pseudocount)
        check_embedding(embedding_dim, similarity, m_steps)
        self.embedding_dim = embedding_dim
        self.similarity = similarity
        self.m_steps = m_steps
        self.is_tied = tied

    def _allocate_rows(self, *shape: int) -> None:
        self._begin_allocation()
        restarts, num_states, num_symbols = shape
        if not self.is_tied:
            self.W = _normal(restarts, num_states, self.embedding_dim)
        self.V = _normal(restarts, num_symbols, self.embedding_dim)

    def function_arguments(self, restart: int | slice) -> tuple[Tensor, ...]:
        states = self._owner[0].transition.Z if self.is_tied else self.W
        return states[restart], self.V[restart]

    def needs_graph(self, batch: Sequences) -> bool:
        return False


class EmbeddedGaussian(Embedded, Gaussian):
    r"""Gaussians with diagonal covariances whose means are scalar products of embeddings.

    The mean of state i in column d is :math:`c_d + \sigma_d \, w_i \cdot v_d`, where c is the mean and :math:`\sigma`
    the standard deviation of the data. Use it for many columns, or to visualize columns by their embeddings. There is
    one free variance for each state and column.

    Args:
        embedding_dim: Length L of the embeddings.
        m_steps: Number of L-BFGS iterations in each M-step.
        tied: Whether W is the embedding Z of the transition, in a `DenseHMM`.

    Example:
        >>> from lightning_hmm import HMM
        >>> from lightning_hmm.distributions import EmbeddedGaussian
        >>> model = HMM(num_states=5, emission=EmbeddedGaussian(embedding_dim=2), num_features=3)
        >>> model.emission.mean.shape
        torch.Size([5, 3])
    """

    def __init__(self, embedding_dim: int, m_steps: int = 5, tied: bool = False) -> None:
        super().__init__(variance_prior=0.0)
        check_embedding(embedding_dim, "exp", m_steps)
        self.embedding_dim = embedding_dim
        self.m_steps = m_steps
        self.is_tied = tied

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        super().allocate(restarts, num_states, columns)
        del self.weights
        if not self.is_tied:
            self.W = _normal(restarts, num_states, self.embedding_dim)
        self.V = _normal(restarts, self.num_features, self.embedding_dim)
        self.log_variance = _normal(restarts, num_states, self.num_features)

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws embeddings for which the means have the spread of the data. The variances are those of the data."""
        for name in ("V",) if self.is_tied else ("W", "V"):
            embeddings = self.get_parameter(name)
            embeddings.copy_(torch.randn(embeddings.shape, generator=generator, dtype=torch.float64))
        self.V.div_(math.sqrt(self.embedding_dim))
        self.log_variance.zero_()
        self.is_set.fill_(True)

    @torch.no_grad()
    def set_data_stats(self, sequences: Sequences) -> None:
        """Stores the mean and the variance of the data at the first call. Means and variances are in these units."""
        if bool(self.has_data_stats):
            return
        for buffer, value in zip((self.center, self.data_variance), weighted_mean_var(sequences), strict=True):
            buffer.copy_(value)

    def function_arguments(self, restart: int | slice) -> tuple[Tensor, ...]:
        states = self._owner[0].transition.Z if self.is_tied else self.W
        return states[restart], self.V[restart], self.log_variance[restart]

    def natural_of(self, *parameters: Tensor) -> Tensor:
        states, features, log_variance = parameters
        return self._encode(self.data_variance.sqrt() * (states @ features.mT), self.data_variance * log_variance.exp())

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, D) means minus the center, and the variances, of the best restart."""
        return self._decode(self.natural(self.restart)[0].detach())

    @property
    def mean(self) -> Tensor:
        """(K, D) means of the best restart."""
        return self.center + self._moments()[0]

    @property
    def covariance(self) -> Tensor:
        """(K, D, D) covariances of the best restart."""
        return self._moments()[1].diag_embed()
