r"""Co-occurrences: joint frequencies of successive symbols, in data and under a model.

.. math:: \Omega_{ij} = P(y_t = i, y_{t+1} = j) = \sum_{kl} \pi_k B_{ki} A_{kl} B_{lj}, \qquad \pi = \pi A

K is the number of states and V the number of symbols. Matrices of probabilities may have leading dimensions, for
several models at once.

Example:
    >>> import torch
    >>> from lightning_hmm.inference import cooccurrence
    >>> from lightning_hmm.sequences import Sequences
    >>> words = Sequences.from_lengths(torch.tensor([0, 1, 0, 1, 1]), [3, 2])
    >>> cooccurrence.pair_counts(words, num_symbols=2)
    tensor([[0., 1.],
            [1., 1.]], dtype=torch.float64)
    >>> transition = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    >>> cooccurrence.stationary(transition)
    tensor([0.7500, 0.2500])
    >>> cooccurrence.cooccurrences(transition, emission=torch.eye(2))
    tensor([[0.6750, 0.0750],
            [0.0750, 0.1750]])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hmm.sequences import Sequences

_BLOCK = 1 << 21  # entries of the residual that are computed at a time


def pair_counts(sequences: Sequences, num_symbols: int, counts: Tensor | None = None) -> Tensor:
    """Counts how often each symbol follows each other symbol, with the weights of the sequences.

    Pairs with a missing symbol are not counted.

    Args:
        sequences: Sequences of symbols.
        num_symbols: Number of symbols V.
        counts: (V, V) counts of earlier batches, to which those of `sequences` are added in place.

    Returns:
        (V, V) counts. Rows belong to the first symbol of a pair and columns to the second one.
    """
    sequences.check(num_symbols, None)
    values = sequences.values.long()  # The numbers of pairs, up to V * V, need int64.
    if counts is None:
        counts = torch.zeros(num_symbols, num_symbols, dtype=torch.float64, device=values.device)
    if len(values) < 2:
        return counts
    within = torch.ones(len(values) - 1, dtype=torch.bool)
    borders = sequences.offsets[1:-1] - 1  # pairs of the last step of a sequence and the first step of the next one
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
    """Computes the stationary distribution pi = pi A of (..., K, K) transition probabilities.

    Returns:
        (..., K) probabilities, differentiable with respect to `transition` by the implicit function theorem.
    """
    probs: Tensor = _Stationary.apply(transition)
    return probs


def long_run(initial: Tensor, transition: Tensor) -> Tensor:
    """Computes the long-run fractions of time that a chain with the given initial distribution spends in its states.

    Unlike `stationary`, it is also defined for chains with several closed classes. The cost is O(60 K^3).

    Args:
        initial: (K,) probabilities of the first state.
        transition: (K, K) transition probabilities.

    Returns:
        (K,) fractions of time.
    """
    # Averaging with the identity makes the chain aperiodic without changing the fractions of time.
    power = (transition + torch.eye(len(transition), dtype=transition.dtype, device=transition.device)) / 2
    for _ in range(60):
        power = power @ power
        power = power / power.sum(-1, keepdim=True)
    fractions: Tensor = initial @ power
    return fractions


def cooccurrences(transition: Tensor, emission: Tensor, state_probs: Tensor | None = None) -> Tensor:
    """Computes the joint probabilities Omega of two successive symbols under a model.

    Args:
        transition: (..., K, K) transition probabilities.
        emission: (..., K, V) emission probabilities.
        state_probs: (..., K) probabilities of the first state of a pair. The default is the stationary distribution.

    Returns:
        (..., V, V) joint probabilities.
    """
    state_probs = stationary(transition) if state_probs is None else state_probs
    return emission.mT @ ((state_probs[..., None] * transition) @ emission)


def squared_error(
    transition: Tensor, emission: Tensor, target: Tensor, *, differentiate_stationary: bool = True
) -> Tensor:
    r"""Computes the squared Frobenius norm of `target` - Omega, differentiable with respect to both matrices.

    The residual and the gradient are computed in blocks of rows, so the memory in addition to `target` is O(K V + K^2).

    Args:
        transition: (..., K, K) transition probabilities of a chain with a single stationary distribution.
        emission: (..., K, V) emission probabilities.
        target: (V, V) joint probabilities of successive symbols.
        differentiate_stationary: Whether the gradient includes the dependence of the stationary distribution on the
            transitions.

    Returns:
        (...) squared errors.
    """
    error: Tensor = _SquaredError.apply(transition, emission, target, differentiate_stationary)
    return error


def _stationary_system(transition: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the LU factors of (I - A + 1 1')', which are used to solve pi (I - A + 1 1') = 1'."""
    identity = torch.eye(transition.shape[-1], dtype=transition.dtype, device=transition.device)
    factors: tuple[Tensor, Tensor] = torch.linalg.lu_factor((identity - transition + 1).mT.contiguous())
    return factors


def _solve_stationary(factors: tuple[Tensor, Tensor], transition: Tensor) -> Tensor:
    probs = torch.linalg.lu_solve(*factors, torch.ones_like(transition[..., :1])).squeeze(-1)
    return probs.clamp(min=0)  # Rounding can make probabilities slightly negative.


def _sensitivity(factors: tuple[Tensor, Tensor], probs: Tensor, gradient: Tensor) -> Tensor:
    """Returns dL/dA given dL/dpi, by d pi = pi dA (I - A + 1 1')^-1."""
    adjoint = torch.linalg.lu_solve(*factors, gradient[..., None], adjoint=True)
    return probs[..., None] * adjoint.mT


class _Stationary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transition: Tensor) -> Tensor:
        factors = _stationary_system(transition)
        probs = _solve_stationary(factors, transition)
        ctx.save_for_backward(*factors, probs)
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        *factors, probs = ctx.saved_tensors
        return _sensitivity(factors, probs, gradient)


class _SquaredError(torch.autograd.Function):
    """Computes gradients together with the error, because autograd would store several (V, V) matrices."""

    @staticmethod
    def forward(
        ctx: Any, transition: Tensor, emission: Tensor, target: Tensor, differentiate_stationary: bool
    ) -> Tensor:
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
            pair_gradient = before @ emission.mT  # All gradients here lack the factor -2, which `backward` applies.
            gradient = probs[..., None] * pair_gradient
            if differentiate_stationary:
                gradient = gradient + _sensitivity(factors, probs, (pair_gradient * transition).sum(-1))
            ctx.save_for_backward(gradient, torch.matmul(pairs.mT, before).add_(pairs @ after))
        return error

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        transition_gradient, emission_gradient = ctx.saved_tensors
        scale = -2 * gradient[..., None, None]
        return scale * transition_gradient, scale * emission_gradient, None, None
