"""Starting values from data: guessed posterior probabilities of the states."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hmm.sequences import Sequences

STEPS_TO_START_FROM = 100_000
_UNSURE = 0.1  # the share of each guess that is spread over all states, so that no state starts from a single point


def excerpt(sequences: Sequences, generator: torch.Generator) -> Sequences:
    """Whole sequences of positive weight in random order, with about 100,000 steps at most; all of them if they have no more."""
    sequences = sequences.counted()
    if sequences.num_steps <= STEPS_TO_START_FROM:
        return sequences
    order = torch.randperm(len(sequences), generator=generator)
    enough = int(torch.searchsorted(sequences.lengths[order].cumsum(0), STEPS_TO_START_FROM)) + 1
    part: Sequences = sequences[order[:enough]]
    return (
        part
        if part.num_steps <= 2 * STEPS_TO_START_FROM
        else part.with_steps(slice(0, STEPS_TO_START_FROM), torch.tensor([0, STEPS_TO_START_FROM]))
    )


def guess_states(
    sequences: Sequences, num_states: int, restarts: int, generator: torch.Generator, method: str
) -> list[Tensor]:
    """(steps, K) guessed posteriors times the weight of the step, for each restart.

    Steps with a missing value have no guess, unless more than half of the steps have one. Then their distances are those in the columns that
    they have, and only steps without any value have no guess.

    Args:
        sequences: real vectors.
        num_states: K.
        restarts: how many guesses.
        generator: random numbers.
        method: "kmeans" for the clusters that k-means finds in the standardized columns, "random" for the points that are nearest to each of
            K random ones.
    """
    values, weights = sequences.values.double().cpu(), sequences.step_weights().cpu()
    observed = ~values.isnan()
    used = observed.all(1)
    if 2 * int(used.sum()) < int(observed.any(1).sum()) or int(used.sum()) < num_states:
        used = observed.any(1)
    chosen = torch.nonzero(used).flatten()
    if len(chosen) < num_states:
        raise ValueError(
            f"{num_states} states need at least as many observed steps to start from, but there are {len(chosen)}. Use fewer states."
        )
    points, weights, observed = values[chosen], weights[chosen], observed[chosen]
    share = observed * weights[:, None]
    total = share.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    mean = (points.nan_to_num() * share).sum(0) / total
    spread = ((points - mean).nan_to_num() ** 2 * share).sum(0).div(total).sqrt()
    points = (
        (points - mean) / torch.where(spread > 0, spread, 1.0)
    ).nan_to_num()  # the mean in the place of missing values
    guesses = []
    for _ in range(restarts):
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
        labels = (
            _clusters(points, weights, num_states, seed)
            if method == "kmeans"
            else _nearest(points, weights, num_states, seed)
        )
        if not bool(observed.all()):
            labels = _refined(points, share, labels, num_states)
        guess = torch.zeros(len(values), num_states, dtype=torch.float64)
        guess[chosen] = (
            torch.nn.functional.one_hot(labels, num_states) * (1 - _UNSURE) + _UNSURE / num_states
        ) * weights[:, None]
        guesses.append(guess.to(sequences.device))
    return guesses


def _refined(points: Tensor, share: Tensor, labels: Tensor, num_states: int, iterations: int = 20) -> Tensor:
    """Clusters after some iterations of k-means in which only observed entries count; `share` holds the weights of the entries, 0 for a missing one."""
    observed = (share > 0).double()
    for _ in range(iterations):
        members = torch.nn.functional.one_hot(labels, num_states).double().T
        totals = members @ share
        centers = torch.where(
            totals > 0, members @ (points * share) / totals.clamp(min=torch.finfo(torch.float64).tiny), 0.0
        )
        distances = (
            observed @ (centers**2).T - 2 * (points * observed) @ centers.T
        )  # the squares of the points are the same for all centers
        labels, before = distances.argmin(1), labels
        if torch.equal(labels, before):
            break
    return labels


def _clusters(points: Tensor, weights: Tensor, num_states: int, seed: int) -> Tensor:
    from sklearn.cluster import KMeans

    found = KMeans(num_states, n_init=1, random_state=seed).fit(points.numpy(), sample_weight=weights.numpy())
    return torch.from_numpy(found.labels_).long()


def _nearest(points: Tensor, weights: Tensor, num_states: int, seed: int) -> Tensor:
    chosen = torch.multinomial(weights, num_states, generator=torch.Generator().manual_seed(seed))
    return torch.cdist(points, points[chosen]).argmin(1)
