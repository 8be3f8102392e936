"""What inference returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class EStep(NamedTuple):
    """Likelihoods and expected counts of a batch; counts are sums over sequences, each times its weight.

    log_likelihood: (N,) log p(y), without weights.
    impossible_step: (N,) the first step of probability zero, -1 if there is none.
    initial: (S,) expected starts.
    counts: one tensor for each natural parameter of the operator: its expected counts.
    evidence: the gradient in the evidence's `live` tensor.
    smoothed: (steps, S) p(z_t | y_1:T) times weight; no rows unless asked for.
    filtered: (steps, S) p(z_t | y_1:t); no rows unless asked for. Zeros in impossible sequences.
    last: (N, S) the filtered row of each sequence's last step; no rows unless asked for.
    """

    log_likelihood: Tensor
    impossible_step: Tensor
    initial: Tensor
    counts: tuple[Tensor, ...]
    evidence: Tensor
    smoothed: Tensor
    filtered: Tensor
    last: Tensor
