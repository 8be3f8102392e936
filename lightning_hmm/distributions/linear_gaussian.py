"""Parts of a linear-Gaussian state-space model: the initial state, the transition and the emission.

Each part stores means and covariances, because these are numerically more accurate than natural parameters. The
statistics are still gradients of the log-likelihood with respect to natural parameters, which `natural_form` returns.
With z = (x, 1) and J = (A b), the log-density of a transition from x to x' is

.. math:: \\log N(x' \\mid A x + b, Q) = \\langle -\\tfrac12 Q^{-1}, x' x'^T \\rangle
    + \\langle Q^{-1} J, x' z^T \\rangle
    + \\langle -\\tfrac12 J^T Q^{-1} J - \\tfrac12 \\log|2 \\pi Q| \\, e e^T, z z^T \\rangle

where e is the unit vector of the last entry of z. The gradients with respect to these three matrices are the expected
sums of x'x'^T, x'z^T and zz^T.

The prior of every part is :math:`\\exp(-\\tfrac{s}{2} \\operatorname{tr} Q^{-1})` with ``variance_prior = s`` for its
covariance Q. It adds s to the scatter along every axis, so that no variance becomes zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Distribution, check_not_negative


class GaussianState(Distribution):
    """The initial state x_1 ~ N(mean, cov) of a linear-Gaussian state-space model.

    The statistics are the sum of E[z_1], (d + 1,), whose last entry is the number of sequences, and the sum of
    E[x_1 x_1^T], (d, d).

    Args:
        mean: Initial value of the mean, (d,).
        cov: Initial value of the covariance, (d, d).
        variance_prior: Strength s of the prior.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions import GaussianState
        >>> state = GaussianState(mean=torch.zeros(1), cov=torch.eye(1))
        >>> # Two sequences, with E[x_1] = 1 and E[x_1] = 3 and without uncertainty.
        >>> rows_without_counts = state.maximize([torch.tensor([4.0, 2.0]), torch.tensor([[10.0]])])
        >>> state.mean.tolist(), state.cov.tolist()
        ([2.0], [[1.0]])
    """

    has_natural_parameters = False

    def __init__(self, mean: Tensor, cov: Tensor, variance_prior: float = 0.0) -> None:
        super().__init__()
        check_not_negative(variance_prior=variance_prior)
        self.prior = {"variance_prior": variance_prior}
        self.mean = nn.Parameter(mean)
        self.cov = nn.Parameter(cov)

    def natural_form(self) -> tuple[Tensor, Tensor]:
        """Returns the natural parameters. The gradient of the log-likelihood in them is the statistics."""
        precision = torch.linalg.inv(self.cov.detach())
        linear = precision @ self.mean.detach()
        norm = (self.mean.detach() @ linear + len(linear) * math.log(2 * math.pi) + self.cov.detach().logdet()) / 2
        return torch.cat([linear, -norm.unsqueeze(0)]), -precision / 2

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        sums, squares = statistics
        seen, count = sums[-1] > 0, _or_one(sums[-1])
        mean = sums[:-1] / count
        cov = squares / count - torch.outer(mean, mean) + self.prior["variance_prior"] * weight * _unit(squares) / count
        _set_where(seen, {self.mean: mean, self.cov: cov})
        return (~seen).sum()

    def log_prior(self) -> Tensor:
        return _log_prior(self.cov, self.prior["variance_prior"])

    def num_free_parameters(self, restart: int) -> int:
        size = len(self.mean)
        return size + size * (size + 1) // 2


class LinearGaussianTransition(Distribution):
    """The transition x_t ~ N(matrix x_t-1 + offset, cov) of a linear-Gaussian state-space model.

    The statistics are the sum of E[x_t z_t-1^T], (d, d + 1), the sum of E[z_t-1 z_t-1^T], (d + 1, d + 1), whose last
    entry is the number of transitions, and the sum of E[x_t x_t^T], (d, d).

    Args:
        matrix: Initial value of the matrix, (d, d).
        offset: Initial value of the offset, (d,).
        cov: Initial value of the covariance, (d, d).
        variance_prior: Strength s of the prior.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions import LinearGaussianTransition
        >>> transition = LinearGaussianTransition(matrix=torch.eye(2), offset=torch.zeros(2), cov=torch.eye(2))
        >>> transition.num_free_parameters(restart=0)  # 4 of the matrix, 2 of the offset, 3 of the covariance
        9
    """

    has_natural_parameters = False

    def __init__(self, matrix: Tensor, offset: Tensor, cov: Tensor, variance_prior: float = 0.0) -> None:
        super().__init__()
        check_not_negative(variance_prior=variance_prior)
        self.prior = {"variance_prior": variance_prior}
        self.matrix = nn.Parameter(matrix)
        self.offset = nn.Parameter(offset)
        self.cov = nn.Parameter(cov)

    def natural_form(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the natural parameters. The gradient of the log-likelihood in them is the statistics."""
        precision = torch.linalg.inv(self.cov.detach())
        joint = torch.cat([self.matrix.detach(), self.offset.detach().unsqueeze(1)], 1)
        inner = -joint.T @ precision @ joint / 2
        inner[-1, -1] -= (len(joint) * math.log(2 * math.pi) + self.cov.detach().logdet()) / 2
        return precision @ joint, inner, -precision / 2

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        across, before, after = statistics
        seen, count = before[-1, -1] > 0, _or_one(before[-1, -1])
        joint = torch.linalg.solve(torch.where(seen, before, _unit(before)), across.T).T
        cov = (after - joint @ across.T + self.prior["variance_prior"] * weight * _unit(after)) / count
        _set_where(seen, {self.matrix: joint[:, :-1], self.offset: joint[:, -1], self.cov: (cov + cov.T) / 2})
        return (~seen).sum()

    def log_prior(self) -> Tensor:
        return _log_prior(self.cov, self.prior["variance_prior"])

    def num_free_parameters(self, restart: int) -> int:
        size = len(self.offset)
        return size * size + size + size * (size + 1) // 2


class LinearGaussianEmission(Distribution):
    """The emission y_t ~ N(matrix x_t + offset, diag variance) of a linear-Gaussian state-space model.

    Columns are independent given the state. The statistics are sums over the steps at which a column is observed: of
    E[y_t z_t], (D, d + 1), of E[z_t z_t^T], (D, d + 1, d + 1), whose last entry is the number of these steps, and of
    E[y_t^2], (D,).

    Args:
        matrix: Initial value of the matrix, (D, d).
        offset: Initial value of the offset, (D,).
        variance: Initial value of the variances, (D,).
        variance_prior: Strength s of the prior.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions import LinearGaussianEmission
        >>> emission = LinearGaussianEmission(torch.ones(3, 2), offset=torch.zeros(3), variance=torch.ones(3))
        >>> emission.num_free_parameters(restart=0)  # 6 of the matrix, 3 of the offset, 3 variances
        12
    """

    has_natural_parameters = False

    def __init__(self, matrix: Tensor, offset: Tensor, variance: Tensor, variance_prior: float = 0.0) -> None:
        super().__init__()
        check_not_negative(variance_prior=variance_prior)
        self.prior = {"variance_prior": variance_prior}
        self.matrix = nn.Parameter(matrix)
        self.offset = nn.Parameter(offset)
        self.variance = nn.Parameter(variance)

    def natural_form(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the natural parameters. The gradient of the log-likelihood in them is the statistics."""
        precision = 1 / self.variance.detach()
        joint = torch.cat([self.matrix.detach(), self.offset.detach().unsqueeze(1)], 1)
        linear = precision.unsqueeze(1) * joint
        inner = -linear.unsqueeze(2) * joint.unsqueeze(1) / 2
        inner[:, -1, -1] -= (2 * math.pi * self.variance.detach()).log() / 2
        return linear, inner, -precision / 2

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        """Performs the M-step; see `Distribution.maximize`.

        One value is read on the host, because a column without noise raises a `ValueError`.
        """
        products, states, squares = statistics
        seen, count = states[:, -1, -1] > 0, _or_one(states[:, -1, -1])
        joint = torch.linalg.solve(
            torch.where(seen[:, None, None], states, _unit(states[0])), products.unsqueeze(2)
        ).squeeze(2)
        variance = (squares - (joint * products).sum(1) + self.prior["variance_prior"] * weight) / count
        if bool((seen & ~(variance > 0)).any()):
            feature = int(torch.nonzero(seen & ~(variance > 0))[0, 0])
            raise ValueError(
                f"The noise of each feature must have a variance, but feature {feature} is explained without any. "
                "Use fewer entries of the state, or give a `variance_prior`."
            )
        _set_where(seen.unsqueeze(1), {self.matrix: joint[:, :-1]})
        _set_where(seen, {self.offset: joint[:, -1], self.variance: variance})
        return (~seen).sum()

    def log_prior(self) -> Tensor:
        return -self.prior["variance_prior"] / 2 * (1 / self.variance.detach()).sum()

    def num_free_parameters(self, restart: int) -> int:
        return self.matrix.numel() + 2 * len(self.offset)


def _or_one(count: Tensor) -> Tensor:
    """Replaces counts of zero by one, so that they can be divided by."""
    return torch.where(count > 0, count, torch.ones_like(count))


def _unit(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


def _log_prior(cov: Tensor, variance_prior: float) -> Tensor:
    return -variance_prior / 2 * torch.linalg.inv(cov.detach()).trace()


def _set_where(condition: Tensor, values: dict[nn.Parameter, Tensor]) -> None:
    """Sets the parameters where the condition is true. Elsewhere they keep their values."""
    for parameter, value in values.items():
        parameter.copy_(torch.where(condition, value, parameter))
