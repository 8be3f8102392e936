"""Initialization from data: guessed posterior probabilities of the states."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lightning_hmm.sequences import Sequences

STEPS_TO_START_FROM = 100_000
# Probability of each guess that is distributed over all states, so that no state is initialized from a single point.
_UNIFORM_WEIGHT = 0.1


def excerpt(sequences: Sequences, generator: torch.Generator) -> Sequences:
    """Selects whole sequences of positive weight with about 100,000 steps in total.

    If the sequences have at most this number of steps, all of them are returned. Otherwise they are selected in random
    order.
    """
    sequences = sequences.counted()
    if sequences.num_steps <= STEPS_TO_START_FROM:
        return sequences
    order = torch.randperm(len(sequences), generator=generator)
    enough = int(torch.searchsorted(sequences.lengths[order].cumsum(0), STEPS_TO_START_FROM)) + 1
    part: Sequences = sequences[order[:enough]]
    if part.num_steps <= 2 * STEPS_TO_START_FROM:
        return part
    return part.with_steps(slice(0, STEPS_TO_START_FROM), torch.tensor([0, STEPS_TO_START_FROM]))


def guess_states(
    sequences: Sequences, num_states: int, restarts: int, generator: torch.Generator, method: str
) -> list[Tensor]:
    """Guesses the posterior probabilities of the states by clustering the observations.

    Steps with a missing value get a guess of zero. If more than half of the steps have a missing value, only steps
    without any observed value do; distances are then computed from the observed columns.

    Args:
        sequences: Sequences of real vectors.
        num_states: Number of states K.
        restarts: Number of guesses.
        generator: Random number generator.
        method: "kmeans" for k-means clusters of the standardized columns, or "random" to assign each point to the
            nearest of K points drawn at random.

    Returns:
        For each restart, the (steps, K) guessed probabilities, multiplied by the weight of the step.
    """
    return guess_clusters(sequences.values, sequences.step_weights(), num_states, restarts, generator, method)


def guess_clusters(
    values: Tensor, weights: Tensor, num_states: int, restarts: int, generator: torch.Generator, method: str
) -> list[Tensor]:
    """Guesses the posterior probabilities of the states of single steps; see `guess_states`.

    Args:
        values: (steps, columns) observations.
        weights: (steps,) weights. Steps of weight zero get a guess of zero.
        num_states: Number of states K.
        restarts: Number of guesses.
        generator: Random number generator.
        method: "kmeans" or "random".
    """
    device = values.device
    values, weights = values.double().cpu(), weights.cpu()
    observed = ~values.isnan() & (weights > 0)[:, None]
    used = observed.all(1)
    if 2 * int(used.sum()) < int(observed.any(1).sum()) or int(used.sum()) < num_states:
        used = observed.any(1)
    chosen = torch.nonzero(used).flatten()
    if len(chosen) < num_states:
        raise ValueError(
            f"{num_states} states need at least as many observed steps to start from, but there are {len(chosen)}. "
            "Use fewer states."
        )
    points, weights, observed = values[chosen], weights[chosen], observed[chosen]
    entry_weights = observed * weights[:, None]
    total = entry_weights.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    mean = (points.nan_to_num() * entry_weights).sum(0) / total
    spread = ((points - mean).nan_to_num() ** 2 * entry_weights).sum(0).div(total).sqrt()
    # Missing values are replaced by the mean, which is zero after the standardization.
    points = ((points - mean) / torch.where(spread > 0, spread, 1.0)).nan_to_num()
    guesses = []
    for _ in range(restarts):
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
        labels = (
            _clusters(points, weights, num_states, seed)
            if method == "kmeans"
            else _nearest(points, weights, num_states, seed)
        )
        if not bool(observed.all()):
            labels = _refined(points, entry_weights, labels, num_states)
        guess = torch.zeros(len(values), num_states, dtype=torch.float64)
        members = torch.nn.functional.one_hot(labels, num_states)
        guess[chosen] = (members * (1 - _UNIFORM_WEIGHT) + _UNIFORM_WEIGHT / num_states) * weights[:, None]
        guesses.append(guess.to(device))
    return guesses


def _refined(points: Tensor, entry_weights: Tensor, labels: Tensor, num_states: int, iterations: int = 20) -> Tensor:
    """Runs iterations of k-means in which only observed entries are used.

    Args:
        points: (N, D) points, with any finite value at missing entries.
        entry_weights: (N, D) weights of the entries, 0 for missing ones.
        labels: (N,) initial clusters.
        num_states: Number of clusters.
        iterations: Maximum number of iterations.

    Returns:
        (N,) clusters.
    """
    observed = (entry_weights > 0).double()
    for _ in range(iterations):
        members = torch.nn.functional.one_hot(labels, num_states).double().T
        totals = members @ entry_weights
        means = members @ (points * entry_weights) / totals.clamp(min=torch.finfo(torch.float64).tiny)
        centers = torch.where(totals > 0, means, 0.0)
        # The squares of the points are left out, because they are the same for all centers.
        distances = observed @ (centers**2).T - 2 * (points * observed) @ centers.T
        labels, before = distances.argmin(1), labels
        if torch.equal(labels, before):
            break
    return labels


def _clusters(points: Tensor, weights: Tensor, num_states: int, seed: int) -> Tensor:
    from sklearn.cluster import KMeans

    with warnings.catch_warnings():  # Counts may have fewer distinct values than there are clusters.
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        found = KMeans(num_states, n_init=1, random_state=seed).fit(points.numpy(), sample_weight=weights.numpy())
    return torch.from_numpy(found.labels_).long()


def _nearest(points: Tensor, weights: Tensor, num_states: int, seed: int) -> Tensor:
    chosen = torch.multinomial(weights, num_states, generator=torch.Generator().manual_seed(seed))
    return torch.cdist(points, points[chosen]).argmin(1)
