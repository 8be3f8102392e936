"""Autoregressive emissions of deviations from switching means, the model of Hamilton (1989)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.autoregressive import Autoregressive
from lightning_hmm.distributions.autoregressive_estimates import regress
from lightning_hmm.distributions.quadratic_forms import regression_weights, symmetric
from lightning_hmm.sequences import Sequences

_SWEEPS = 20  # alternations between the means and the other parameters in an M-step


class AroundMean(Autoregressive):
    r"""A real column whose deviations from the mean of the state follow an autoregression.

    .. math:: y_t - \mu_{z_t} = \sum_{l=1}^L \phi_l \, (y_{t-l} - \mu_{z_{t-l}}) + e_t, \qquad e_t \sim N(0, \sigma^2)

    Use it for time series that return to a level that depends on the state, such as the growth of an economy. This is
    the emission ``Autoregressive(order, around_mean=True)``; see there for the arguments. An observation depends
    on the last L + 1 states, so inference uses K^(L + 1) states; the states that the model returns are the K ones. The
    transitions must be `Histories`, the default. Only one column is supported. By default, all states share the
    coefficients and the variance. With ``tied=[]``, those of the present state are used.

    The M-step updates the means and the other parameters in turn, and each update is a weighted least-squares
    regression.

    Example:
        >>> from lightning_hmm import HMM, Autoregressive
        >>> model = HMM(num_states=2, emission=Autoregressive(1, around_mean=True), num_features=1)
        >>> parameters = {"mean": [[-1.0], [1.0]], "coefficients": [[[[0.5]]]] * 2, "variance": [[1.0], [1.0]]}
        >>> model = model.set_parameters(transition=[[0.9, 0.1], [0.1, 0.9]], emission=parameters)
        >>> model.decode([[[-1.0], [-2.0], [-1.5], [1.0], [2.0]]])[0].tolist()
        [0, 0, 0, 1, 1]
    """

    is_around_mean = True
    m_step = "least squares for the means and the coefficients in turn"
    partner = "Histories"
    default_tied = ("coefficients", "variance")
    names_of_lines = ("mean", "coefficients")
    path: Tensor  # (K^(L + 1), L + 1) the present state and those before it, for each row of the weights

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        if self.names[-1] != "variance" or self.before != "missing" or len(columns) != 1:
            raise ValueError(
                "An Autoregressive emission around the mean must have one column, a diagonal covariance and "
                f"`before` missing, but has {len(columns)} columns, covariance {self.kind!r} and before "
                f"{self.before!r}."
            )
        if self._owner and self._owner[0].emission is not self:
            raise ValueError(
                "An Autoregressive emission around the mean cannot be a part of another emission. "
                "Leave out `around_mean`."
            )
        powers = num_states ** torch.arange(self.order, -1, -1)
        rows = torch.arange(num_states ** (self.order + 1))
        self.num_states = num_states
        super().allocate(restarts, num_states, columns)
        self.register_buffer("path", rows[:, None] // powers % num_states, persistent=False)

    @property
    def _num_rows(self) -> int:
        return self.num_states ** (self.order + 1)

    @property
    def _state_rows(self) -> Tensor:
        powers = self.num_states ** torch.arange(self.order + 1, device=self.center.device)
        return torch.arange(self.num_states, device=self.center.device) * powers.sum()

    # Conversion between weights and parameters. The intercept of a row is linear in the means.

    def _design(self, coefficients: Tensor) -> Tensor:
        """Returns the (..., H, K) factors of the means in the intercepts, for coefficients (..., K, L)."""
        members = torch.nn.functional.one_hot(self.path, self.num_states).to(coefficients)  # (H, L + 1, K)
        lags = coefficients[..., self.path[:, 0], :, None] * members[:, 1:]
        return members[:, 0] - lags.sum(-2)

    def _values_of(self, weights: Tensor) -> dict[str, Tensor]:
        coefficients, covariance = self.lines_of(weights)
        lags = coefficients[..., self._state_rows, 0, :-1]
        mean = torch.linalg.pinv(self._design(lags)) @ coefficients[..., -1]
        variance = covariance[..., self._state_rows, 0, :]
        return {"mean": mean + self.center, "coefficients": lags[..., None, None], "variance": variance}

    def _weights_of(self, *parameters: Tensor) -> Tensor:
        mean, lags, variance = parameters
        return self._weights_around(mean[..., 0] - self.center, lags[..., 0, 0], variance[..., 0])

    def _weights_around(self, mean: Tensor, lags: Tensor, variance: Tensor) -> Tensor:
        """Returns the weights of centered means (..., K), coefficients (..., K, L) and variances (..., K)."""
        present = self.path[:, 0]
        intercept = self._design(lags) @ mean.unsqueeze(-1)
        coefficients = torch.cat([lags[..., present, :], intercept], -1).unsqueeze(-2)
        return regression_weights(coefficients, variance[..., present, None, None])

    @property
    def mean(self) -> Tensor:
        """(K, 1) means of the best restart."""
        return self._value("mean")

    @torch.no_grad()
    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        """Initializes the parameters; see `Emission.start`. States of successive steps are guessed independently."""
        rows = []
        for guess in responsibilities:
            weights = guess.sum(1, keepdim=True)
            probs = torch.where(weights > 0, guess / weights, 1 / self.num_states)
            steps = torch.arange(len(probs), device=probs.device)
            lagged = [probs[(steps - lag).clamp(min=0)][:, self.path[:, lag]] for lag in range(self.order + 1)]
            rows.append(weights * torch.stack(lagged).prod(0))
        super().start(sequences, rows)

    # EM

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        sums = symmetric(statistics[0], self.order + 2)  # (R, H, L + 2, L + 2), of the products of y, its lags and 1
        found = self._values_of(self.weights)
        mean, lags, variance = found["mean"][..., 0] - self.center, found["coefficients"][..., 0, 0], found["variance"]
        present, each = self.path[:, 0], torch.ones(self.order, dtype=torch.bool)
        masks = each & ("coefficients" in self.tied), each & ("coefficients" in self.frozen)
        pooled = sums.new_zeros(len(sums), self.num_states, *sums.shape[2:])
        visits = pooled.index_add(1, present, sums)[..., -1, -1]
        coefficients, covariance = lags.unsqueeze(-2), variance.unsqueeze(-1)
        for _ in range(_SWEEPS):
            deviations = torch.eye(sums.shape[-1]).to(sums).repeat(*sums.shape[:2], 1, 1)
            deviations[..., :-1, -1] = -mean[:, self.path]
            around = pooled.index_add(1, present, deviations @ sums @ deviations.mT)[..., :-1, :-1]
            coefficients, covariance, kept = regress(
                around, visits, coefficients, covariance, masks, self.noise, self._ridge * weight, self._added * weight
            )
            if "mean" not in self.frozen:
                mean = self._mean(sums, mean, coefficients.squeeze(-2), covariance[..., 0, 0])
        self.weights.copy_(self._weights_around(mean, coefficients.squeeze(-2), covariance[..., 0, 0]))
        self.is_set.fill_(True)
        return kept.sum()

    def _mean(self, sums: Tensor, mean: Tensor, lags: Tensor, variance: Tensor) -> Tensor:
        """Returns the optimal (R, K) centered means, given the other parameters."""
        present, design = self.path[:, 0], self._design(lags)
        errors = sums[..., 0, -1] - (lags[:, present] * sums[..., 1:-1, -1]).sum(-1)
        errors = errors - sums[..., -1, -1] * (design @ mean.unsqueeze(-1)).squeeze(-1)
        change = design.sum(-1, keepdim=True) if "mean" in self.tied else design
        scaled = change.mT / variance[:, present].unsqueeze(-2)
        system = (scaled * sums[..., -1, -1].unsqueeze(-2)) @ change
        return mean + (torch.linalg.pinv(system, hermitian=True) @ scaled @ errors.unsqueeze(-1)).squeeze(-1)

    # Samples and predictions

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        """Draws the steps of each sequence in turn. Deviations before the first step are zero."""
        path, mean = states.padded().clamp(min=0), self.mean[:, 0]
        lags, deviation = self.coefficients[..., 0, 0], self.variance[:, 0].sqrt()
        past = mean.new_zeros(len(path), self.order)
        drawn = []
        for now in path.T:
            noise = torch.randn(len(path), generator=generator, dtype=torch.float64).to(mean.device)
            value = (lags[now] * past).sum(1) + deviation[now] * noise
            past = torch.cat([value[:, None], past[:, :-1]], 1)
            drawn.append(mean[now] + value)
        values = torch.stack(drawn, 1) if drawn else past[:, :0]
        return states.with_values(states.packed(values).unsqueeze(-1))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Returns the (K, 1) means and variances of a step whose lags are equal to their means."""
        return self.mean, self.variance
