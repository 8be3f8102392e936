"""What inference returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class EStep(NamedTuple):
    """Filtered and smoothed probabilities of a batch, and expected counts.

    log_likelihood: (N,) log p(y), without weights.
    impossible_step: (N,) the first step of probability zero, -1 if there is none.
    initial: (S,) expected starts, each sequence times its weight.
    counts: one tensor for each natural parameter of the operator, likewise.
    smoothed: (steps, S) p(z_t | y_1:T) times weight; no rows without a backward pass.
    filtered: (steps, S) p(z_t | y_1:t); no rows without a backward pass.
    last: (N, S) the filtered row of each sequence's last step.
    """

    log_likelihood: Tensor
    impossible_step: Tensor
    initial: Tensor
    counts: tuple[Tensor, ...]
    smoothed: Tensor
    filtered: Tensor
    last: Tensor
