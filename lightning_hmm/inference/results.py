"""Results of inference. Tensors with one row per step are packed like the evidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_hmm.sequences import Sequences


class EStep(NamedTuple):
    """Log-likelihoods and expected counts of a batch. Counts are weighted sums over the sequences.

    log_likelihood: (N,) log p(y), without weights.
    impossible_step: (N,) first step of probability zero within each sequence, -1 if there is none.
    initial: (S,) expected number of sequences that start in each state.
    counts: One tensor of expected counts for each natural parameter of the operator.
    evidence: Gradient of the log-likelihood with respect to the `live` tensor of the evidence.
    smoothed: (steps, S) p(z_t | y_1:T) times the weight, or no rows unless requested.
    filtered: (steps, S) p(z_t | y_1:t), or no rows unless requested. It is zero in impossible sequences.
    last: (N, S) filtered probabilities of the last step of each sequence, or no rows unless requested.
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
    """Posterior distribution of the states.

    log_likelihood: (N,) log p(y_1:T).
    filtered: (steps, S) p(z_t | y_1:t).
    smoothed: (steps, S) p(z_t | y_1:T).
    counts: One tensor of expected counts, weighted sums over the sequences, for each natural parameter of the operator.
    """

    log_likelihood: Tensor
    filtered: Tensor
    smoothed: Tensor
    counts: tuple[Tensor, ...]


class Path(NamedTuple):
    """The most probable states.

    states: (steps,) states, which are -1 in impossible sequences.
    log_probability: (N,) log p(y, z).
    """

    states: Tensor
    log_probability: Tensor


def impossible_message(sequences: Sequences, n: int, t: int) -> str:
    """Returns an error message for sequence `n`, whose step `t` has probability zero."""
    value, label = sequences[n][t].tolist(), ""
    if sequences.labels is not None and (state := int(sequences.labels[int(sequences.offsets[n]) + t])) >= 0:
        label = f" with the label {state}"
    return (
        f"Sequence {n} has probability zero under the model: step {t} ({value}){label} cannot follow what is before it."
    )


def refuse_nan(name: str, array: np.ndarray) -> float:
    """Raises a `ValueError` if the array contains NaN. Returns the largest number, which may be above zero."""
    largest = float(array.max(initial=-np.inf))
    if np.isnan(largest):
        where = tuple(map(int, np.argwhere(np.isnan(array))[0]))
        raise ValueError(f"`{name}` must hold numbers, but the entry at {where} is nan instead.")
    return largest
