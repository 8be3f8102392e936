r"""Co-occurrences: how often one symbol follows another, in data and under a model.

.. math:: \Omega_{ij} = P(y_t = i, y_{t+1} = j) = \sum_{kl} \pi_k B_{ki} A_{kl} B_{lj}, \qquad \pi = \pi A

K states, V symbols; matrices of probabilities, with any leading axes (several models side by side).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hmm.sequences import Sequences

_BLOCK = 1 << 21  # entries of the residual that are worked on at a time


def pair_counts(sequences: Sequences, num_symbols: int, counts: Tensor | None = None) -> Tensor:
    """(V, V) how often, with the sequences' weights, symbol j follows symbol i; pairs with a missing symbol are none.

    Adds to `counts`, in place, where given: a corpus can be counted batch by batch.
    """
    sequences.check(num_symbols, None)
    values = sequences.values.long()  # pairs have numbers up to V * V
    if counts is None:
        counts = torch.zeros(num_symbols, num_symbols, dtype=torch.float64, device=values.device)
    if len(values) < 2:
        return counts
    within = torch.ones(len(values) - 1, dtype=torch.bool)
    borders = sequences.offsets[1:-1] - 1  # a last step and the first step of the next sequence
    within[borders[(borders >= 0) & (borders < len(within))]] = False
    first, second = values[:-1], values[1:]
    within = within.to(values.device) & (first >= 0) & (second >= 0)
    if sequences.weights is None:
        weights = torch.ones((), dtype=counts.dtype, device=values.device).expand(int(within.sum()))
    else:
        weights = sequences.repeat_interleave(sequences.weights)[:-1][within].to(counts.dtype)
    counts.view(-1).scatter_add_(0, (first * num_symbols + second)[within], weights)
    return counts


def stationary(transition: Tensor) -> Tensor:
    """(..., K, K) -> (..., K): the distribution that the transitions leave as it is; differentiable, by the implicit function theorem."""
    probs: Tensor = _Stationary.apply(transition)
    return probs


def long_run(initial: Tensor, transition: Tensor) -> Tensor:
    """(K,), (K, K) -> (K,): the shares of time that a chain with this start spends in its states, in the long run.

    Unlike `stationary` it is an answer also where the chain falls into parts that never meet. O(60 K^3).
    """
    power = (
        transition + torch.eye(len(transition), dtype=transition.dtype, device=transition.device)
    ) / 2  # staying ends all periods
    for _ in range(60):
        power = power @ power
        power = power / power.sum(-1, keepdim=True)
    shares: Tensor = initial @ power
    return shares


def cooccurrences(transition: Tensor, emission: Tensor, shares: Tensor | None = None) -> Tensor:
    """(..., K, K), (..., K, V) -> (..., V, V): Omega, for the given shares of time in the states, or the stationary ones."""
    shares = stationary(transition) if shares is None else shares
    return emission.mT @ ((shares[..., None] * transition) @ emission)


def squared_error(
    transition: Tensor, emission: Tensor, target: Tensor, *, differentiate_stationary: bool = True
) -> Tensor:
    r"""(...) the squared Frobenius norm of `target` - Omega, differentiable in both matrices.

    Memory O(K V + K^2) beside the target, whatever V: the residual is made in blocks of rows, and the gradient with it.

    Args:
        transition: (..., K, K), of a chain with a single stationary distribution.
        emission: (..., K, V).
        target: (V, V).
        differentiate_stationary: whether the gradient includes the dependence of the stationary distribution on the transitions.
    """
    error: Tensor = _SquaredError.apply(transition, emission, target, differentiate_stationary)
    return error


def _stationary_system(transition: Tensor) -> tuple[Tensor, Tensor]:
    """The LU factors of (I - A + 1 1')', with which pi (I - A + 1 1') = 1' is solved."""
    identity = torch.eye(transition.shape[-1], dtype=transition.dtype, device=transition.device)
    factors: tuple[Tensor, Tensor] = torch.linalg.lu_factor((identity - transition + 1).mT.contiguous())
    return factors


def _solve_stationary(factors: tuple[Tensor, Tensor], transition: Tensor) -> Tensor:
    probs = torch.linalg.lu_solve(*factors, torch.ones_like(transition[..., :1])).squeeze(-1)
    return probs.clamp(min=0)  # below zero by rounding only


def _sensitivity(factors: tuple[Tensor, Tensor], probs: Tensor, gradient: Tensor) -> Tensor:
    """dL/dA where dL/dpi is given: d pi = pi dA (I - A + 1 1')^-1."""
    adjoint = torch.linalg.lu_solve(*factors, gradient[..., None], adjoint=True)
    return probs[..., None] * adjoint.mT


class _Stationary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, transition):
        factors = _stationary_system(transition)
        probs = _solve_stationary(factors, transition)
        ctx.save_for_backward(*factors, probs)
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        *factors, probs = ctx.saved_tensors
        return _sensitivity(factors, probs, gradient)


class _SquaredError(torch.autograd.Function):
    """Gradients are made with the error, by hand: autograd would keep several (V, V) matrices."""

    @staticmethod
    def forward(ctx, transition, emission, target, differentiate_stationary):
        factors = _stationary_system(transition)
        probs = _solve_stationary(factors, transition)
        pairs = probs[..., None] * transition  # P(z_t, z_t+1)
        right = pairs @ emission
        num_symbols = emission.shape[-1]
        rows = max(1, _BLOCK // max(1, right[..., 0, :].numel()))
        if rows >= num_symbols:
            residual = torch.sub(target, emission.mT @ right)
            error = residual.square().sum((-2, -1))
            before, after = emission @ residual, emission @ residual.mT
        else:
            error = torch.zeros(right.shape[:-2], dtype=right.dtype, device=right.device)
            before, after = torch.zeros_like(emission), torch.empty_like(emission)
            for first in range(0, num_symbols, rows):
                part = emission[..., first : first + rows]
                residual = torch.sub(target[first : first + rows], part.mT @ right)
                error = error + residual.square().sum((-2, -1))
                before += part @ residual
                after[..., first : first + rows] = emission @ residual.mT
        if any(ctx.needs_input_grad):
            pair_gradient = before @ emission.mT  # times -2, as all that follows
            gradient = probs[..., None] * pair_gradient
            if differentiate_stationary:
                gradient = gradient + _sensitivity(factors, probs, (pair_gradient * transition).sum(-1))
            ctx.save_for_backward(gradient, torch.matmul(pairs.mT, before).add_(pairs @ after))
        return error

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        transition_gradient, emission_gradient = ctx.saved_tensors
        scale = -2 * gradient[..., None, None]
        return scale * transition_gradient, scale * emission_gradient, None, None
