"""Parametric families of durations, truncated to 1 to D steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_ITERATIONS = 60  # of the scoring method in an M-step; it starts from the present parameters
_FLAT = 1e-12  # information below which a parameter hardly moves, such as the total count near the Poisson limit
_LARGEST_STEP = 2.0  # of an iteration, in the unconstrained parameters


class Family(NamedTuple):
    r"""A family of distributions of the duration d, with x = d - 1 = 0, 1, ..., D - 1 and unconstrained parameters.

    .. math:: p(d) = f(d - 1) / \sum_{x < D} f(x)

    names: Names of the parameters.
    curves: Function of the parameters (..., P) and D. It returns log f, (..., D), up to a constant, and its
        derivatives, (..., P, D).
    values: Function from the unconstrained parameters (..., P) to the values of the parameters, (..., P).
    unconstrained: The inverse of `values`.
    from_mean: Function from the mean of x without truncation to unconstrained parameters.
    """

    names: tuple[str, ...]
    curves: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    values: Callable[[Tensor], Tensor]
    unconstrained: Callable[[Tensor], Tensor]
    from_mean: Callable[[Tensor], Tensor]


def _numbers(parameters: Tensor, longest: int) -> Tensor:
    return torch.arange(longest, dtype=parameters.dtype, device=parameters.device)


def _poisson(parameters: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The parameter is the logarithm of the rate."""
    x = _numbers(parameters, longest)
    return parameters * x - torch.lgamma(x + 1), x.expand(*parameters.shape, -1)


def _geometric(parameters: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The parameter is the logarithm of -log(1 - probs)."""
    curve = -parameters.exp() * _numbers(parameters, longest)
    return curve, curve[..., None, :]


def _negative_binomial(parameters: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The parameters are the logarithms of the mean m and of the total count r.

    The differences of log-gamma functions are written as sums, which lose no digits for a large r.
    """
    mean, total = parameters[..., :1].exp(), parameters[..., 1:].exp()
    x = _numbers(parameters, longest)
    terms = torch.log1p((x[:-1] - mean) / (total + mean))  # log (r + i) / (r + m)
    slopes = total * (mean - x[:-1]) / ((total + x[:-1]) * (total + mean))
    zero = torch.zeros_like(mean)
    curve = x * parameters[..., :1] + torch.cat([zero, terms.cumsum(-1)], -1) - torch.lgamma(x + 1)
    return curve, torch.stack([x * total / (total + mean), torch.cat([zero, slopes.cumsum(-1)], -1)], -2)


def _negative_binomial_values(parameters: Tensor) -> Tensor:
    mean, total = parameters.exp().unbind(-1)
    return torch.stack([total, mean / (mean + total)], -1)


def _negative_binomial_parameters(values: Tensor) -> Tensor:
    total, probs = values.unbind(-1)
    return torch.stack([total.log() + probs.log() - torch.log1p(-probs), total.log()], -1)


FAMILIES = {
    "poisson": Family(("rate",), _poisson, torch.exp, torch.log, lambda mean: mean.log()[..., None]),
    "geometric": Family(
        ("probs",),
        _geometric,
        lambda parameters: -torch.expm1(-parameters.exp()),
        lambda values: torch.log(-torch.log1p(-values)),
        lambda mean: torch.log1p(1 / mean).log()[..., None],
    ),
    "negative_binomial": Family(
        ("total_count", "probs"),
        _negative_binomial,
        _negative_binomial_values,
        _negative_binomial_parameters,
        lambda mean: torch.stack([mean.log(), torch.zeros_like(mean)], -1),
    ),
}


def log_probs_of(family: Family, parameters: Tensor, longest: int) -> Tensor:
    """Returns (..., D) log-probabilities of the durations 1 to D."""
    return family.curves(parameters, longest)[0].log_softmax(-1)


def fitted(family: Family, parameters: Tensor, counts: Tensor) -> Tensor:
    """Maximizes the log-likelihood of counts of durations by Fisher scoring, from the given parameters.

    The step of an iteration is the gradient divided by the damped information. It is taken only if it increases the
    log-likelihood, which therefore never decreases; otherwise the damping is increased. For one parameter of an
    exponential family this is Newton's method.

    Args:
        family: The family.
        parameters: (..., P) unconstrained parameters to start from.
        counts: (..., D) counts.

    Returns:
        (..., P) unconstrained parameters.
    """
    longest, total = counts.shape[-1], counts.sum(-1, keepdim=True)
    shares = counts / torch.where(total > 0, total, 1.0)
    present = _derivatives(family, parameters, shares, longest)
    damping = torch.full_like(present[0], 1e-10)
    for _ in range(_ITERATIONS):
        best, gradient, information = present
        ridge = information.diagonal(dim1=-2, dim2=-1) * damping[..., None] + _FLAT
        step = torch.linalg.solve_ex(information + torch.diag_embed(ridge), gradient)[0].nan_to_num()
        step = step.clamp(-_LARGEST_STEP, _LARGEST_STEP)  # of each parameter: one of them may be flat
        proposed = _derivatives(family, parameters + step, shares, longest)
        # Close to the maximum, rounding errors hide the gain, but the gradient still decreases.
        smaller = proposed[1].abs().amax(-1) < gradient.abs().amax(-1)
        better = (proposed[0] - best > 1e-15 * best.abs()) | (smaller & (proposed[0] - best > -1e-14 * best.abs()))
        parameters = torch.where(better[..., None], parameters + step, parameters)
        present = (
            torch.where(better, proposed[0], best),
            torch.where(better[..., None], proposed[1], gradient),
            torch.where(better[..., None, None], proposed[2], information),
        )
        damping = torch.where(better, damping * 0.1, damping.clamp(min=1e-3) * 10).clamp(1e-10, 1e10)
        done = (step.abs().amax(-1) < 1e-10) | (damping > 1e7)
        if done.device.type == "cpu" and bool(done.all()):  # On other devices the host does not wait for the result.
            break
    return parameters


def _derivatives(family: Family, parameters: Tensor, shares: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-likelihood (...) of shares (..., D), its gradient (..., P) and the information (..., P, P)."""
    curve, slopes = family.curves(parameters, longest)
    log_probs = curve.log_softmax(-1)
    probs = log_probs.exp()
    gradient = (slopes @ (shares - shares.sum(-1, keepdim=True) * probs)[..., None]).squeeze(-1)
    centered = slopes - slopes @ probs[..., None]
    return (shares * log_probs).sum(-1), gradient, (centered * probs[..., None, :]) @ centered.mT
