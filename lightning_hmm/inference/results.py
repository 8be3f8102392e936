"""What inference returns. All tensors of steps are packed, as the evidence is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_hmm.sequences import Sequences


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


class Posterior(NamedTuple):
    """What the data say about the states.

    log_likelihood: (N,) log p(y_1:T).
    filtered: (steps, S) p(z_t | y_1:t).
    smoothed: (steps, S) p(z_t | y_1:T).
    counts: one tensor for each natural parameter of the operator: its expected counts, each sequence times its weight.
    """

    log_likelihood: Tensor
    filtered: Tensor
    smoothed: Tensor
    counts: tuple[Tensor, ...]


class Path(NamedTuple):
    """The most probable states.

    states: (steps,) -1 in impossible sequences.
    log_probability: (N,) log p(y, z).
    """

    states: Tensor
    log_probability: Tensor


def impossible_message(sequences: Sequences, n: int, t: int) -> str:
    """Names the step of a sequence that has probability zero."""
    value = sequences[n][t].tolist()
    return f"Sequence {n} has probability zero under the model: step {t} ({value}) cannot follow what is before it."


def refuse_nan(name: str, array: np.ndarray) -> float:
    """Refuses NaN, which would be lost in a comparison somewhere; returns the largest number. (Log-probabilities above zero are allowed.)"""
    largest = float(array.max(initial=-np.inf))
    if np.isnan(largest):
        where = tuple(map(int, np.argwhere(np.isnan(array))[0]))
        raise ValueError(f"`{name}` must hold numbers, but the entry at {where} is nan instead.")
    return largest
