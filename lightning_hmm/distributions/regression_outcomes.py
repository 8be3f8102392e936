"""Distributions of the observations of a `Regression`, given linear predictors of each column and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hmm.distributions.linear_predictors import softmax_curvature, weighted_products
from lightning_hmm.distributions.moments import Moments
from lightning_hmm.distributions.newton import Curvature
from lightning_hmm.inference.sampling import draw_rows


def linear_predictors(coefficients: Tensor, design: Tensor) -> Tensor:
    """Returns the (N, K, D) products of coefficients (K, D, Q) and rows (N, Q)."""
    return (design @ coefficients.flatten(0, 1).T).unflatten(1, coefficients.shape[:2])


class Outcomes(ABC):
    """Base class: observations with D columns, or of one of D symbols, given linear predictors (N, K, D)."""

    support: tuple[str, str] | None = None  # names of the values, and what to do with others, for error messages

    def supports(self, values: Tensor) -> Tensor:
        """Returns a mask of the values that can be observed. Missing values are ignored."""
        return torch.ones_like(values, dtype=torch.bool)

    @abstractmethod
    def draw(self, scores: Tensor, variance: Tensor | None, generator: torch.Generator) -> Tensor:
        """Draws N observations from predictors and variances (N, D); there are variances for `Normal` only."""

    @abstractmethod
    def predict(self, state_probs: Tensor, scores: Tensor, variance: Tensor | None) -> Any:
        """Returns the distribution of N observations whose states have the probabilities (N, K)."""

    def log_rows(self, scores: Tensor, values: Tensor) -> Tensor:
        """Returns the (N, K) log-likelihoods, which are zero at missing values. `Normal` has evidence of its own."""
        raise NotImplementedError

    def curvature(self, coefficients: Tensor, design: Tensor, values: Tensor, posteriors: Tensor) -> Curvature:
        """Returns the expected log-likelihood as a function of the coefficients, with derivatives.

        Args:
            coefficients: (K, D, Q) coefficients.
            design: (N, Q) rows of inputs and 1.
            values: Observations.
            posteriors: (N, K) probabilities of the states.
        """
        raise NotImplementedError


class Columns(Outcomes):
    """Columns that are independent given the state."""

    @abstractmethod
    def moments(self, scores: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the means and the variances."""

    def predict(self, state_probs: Tensor, scores: Tensor, variance: Tensor | None) -> Moments:
        means, variances = self.moments(scores, variance)
        mean = torch.einsum("nk,nkd->nd", state_probs, means)
        spread = variances + (means - mean.unsqueeze(1)).square()
        return Moments(mean, torch.einsum("nk,nkd->nd", state_probs, spread))


class Normal(Columns):
    """Real numbers, whose means are the predictors."""

    def moments(self, scores: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor]:
        assert variance is not None
        return scores, variance.expand_as(scores)

    def draw(self, scores: Tensor, variance: Tensor | None, generator: torch.Generator) -> Tensor:
        assert variance is not None
        noise = torch.randn(scores.shape, generator=generator, dtype=torch.float64)
        return scores + noise.to(scores.device) * variance.sqrt()


class Canonical(Columns):
    """Columns of an exponential family whose natural parameters are the predictors."""

    @abstractmethod
    def log_probs(self, scores: Tensor, values: Tensor) -> Tensor:
        """Returns the logarithms of the probabilities of observed values."""

    def log_rows(self, scores: Tensor, values: Tensor) -> Tensor:
        observed = ~values.isnan()
        logs = self.log_probs(scores, torch.where(observed, values.double(), 0.0).unsqueeze(1))
        return torch.where(observed.unsqueeze(1), logs, 0.0).sum(2)

    def curvature(self, coefficients: Tensor, design: Tensor, values: Tensor, posteriors: Tensor) -> Curvature:
        shape = coefficients.shape[:2]
        observed = ~values.isnan()
        weights = posteriors.unsqueeze(2) * observed.unsqueeze(1)  # (N, K, D)
        # Where the weight is zero, the mean may be infinite.
        scores = torch.where(weights > 0, linear_predictors(coefficients, design), 0.0)
        values = torch.where(observed, values.double(), 0.0).unsqueeze(1)
        mean, variance = self.moments(scores, None)
        return Curvature(
            (weights * self.log_probs(scores, values)).sum(0),
            ((weights * (values - mean)).flatten(1).T @ design).unflatten(0, shape),
            -weighted_products((weights * variance).flatten(1), design).unflatten(0, shape),
        )


class Bernoulli(Canonical):
    """Numbers 0 and 1, whose log-odds are the predictors."""

    support = ("the numbers 0 and 1", "Mark the value as missing, or use another `family`.")

    def supports(self, values: Tensor) -> Tensor:
        return (values == 0) | (values == 1)

    def log_probs(self, scores: Tensor, values: Tensor) -> Tensor:
        return values * scores - F.softplus(scores)

    def moments(self, scores: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor]:
        mean = scores.sigmoid()
        return mean, mean * (1 - mean)

    def draw(self, scores: Tensor, variance: Tensor | None, generator: torch.Generator) -> Tensor:
        return torch.bernoulli(scores.sigmoid().cpu(), generator=generator)


class Poisson(Canonical):
    """Counts, the logarithms of whose means are the predictors."""

    support = ("counts, whole numbers from 0", "Mark the value as missing, or use another `family`.")

    def supports(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values == values.floor())

    def log_probs(self, scores: Tensor, values: Tensor) -> Tensor:
        return values * scores - scores.exp() - torch.lgamma(values + 1)

    def moments(self, scores: Tensor, variance: Tensor | None) -> tuple[Tensor, Tensor]:
        return scores.exp(), scores.exp()

    def draw(self, scores: Tensor, variance: Tensor | None, generator: torch.Generator) -> Tensor:
        return torch.poisson(scores.exp().cpu(), generator=generator)


class Categorical(Outcomes):
    """Symbols, the softmax of whose predictors are the probabilities."""

    def log_rows(self, scores: Tensor, values: Tensor) -> Tensor:
        symbols = values.long()
        chosen = symbols.clamp(min=0)[:, None, None].expand(-1, scores.shape[1], 1)
        logs = scores.log_softmax(-1).gather(2, chosen).squeeze(2)
        return torch.where((symbols >= 0)[:, None], logs, 0.0)

    def curvature(self, coefficients: Tensor, design: Tensor, values: Tensor, posteriors: Tensor) -> Curvature:
        symbols = values.long()
        chosen = F.one_hot(symbols.clamp(min=0), coefficients.shape[1]) * (symbols >= 0)[:, None]
        found = softmax_curvature(coefficients, design, posteriors.unsqueeze(2) * chosen.unsqueeze(1))
        return Curvature(*(part.unsqueeze(1) for part in found))

    def draw(self, scores: Tensor, variance: Tensor | None, generator: torch.Generator) -> Tensor:
        return draw_rows(scores.softmax(-1), torch.arange(len(scores)), generator)

    def predict(self, state_probs: Tensor, scores: Tensor, variance: Tensor | None) -> Tensor:
        return torch.einsum("nk,nkv->nv", state_probs, scores.softmax(-1))


OUTCOMES = {"gaussian": Normal(), "bernoulli": Bernoulli(), "poisson": Poisson(), "categorical": Categorical()}
