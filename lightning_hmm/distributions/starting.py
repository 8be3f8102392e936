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
    order, those with known states first.
    """
    sequences = sequences.counted()
    if sequences.num_steps <= STEPS_TO_START_FROM:
        return sequences
    order = torch.randperm(len(sequences), generator=generator)
    if sequences.labels is not None:
        labeled = torch.segment_reduce(
            (sequences.labels.cpu() >= 0).double(), "max", lengths=sequences.lengths, unsafe=True, initial=0.0
        )
        order = order[labeled[order].argsort(descending=True, stable=True)]
    enough = int(torch.searchsorted(sequences.lengths[order].cumsum(0), STEPS_TO_START_FROM)) + 1
    part: Sequences = sequences[order[:enough]]
    if part.num_steps <= 2 * STEPS_TO_START_FROM:
        return part
    return part.with_steps(slice(0, STEPS_TO_START_FROM), torch.tensor([0, STEPS_TO_START_FROM]))


def guess_states(
    sequences: Sequences, num_states: int, restarts: int, generator: torch.Generator, method: str
) -> list[Tensor]:
    """Guesses the posterior probabilities of the states by clustering the observations.

    At steps with a label or with unequal state weights, the guess is what is known. These steps determine the first
    centers of their states, so that the clusters have the numbers of the labels.

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
    known = known_states(sequences, num_states) if sequences.has_known_states else None
    return guess_clusters(sequences.values, sequences.step_weights(), num_states, restarts, generator, method, known)


def guess_clusters(
    values: Tensor,
    weights: Tensor,
    num_states: int,
    restarts: int,
    generator: torch.Generator,
    method: str,
    known: Tensor | None = None,
) -> list[Tensor]:
    """Guesses the posterior probabilities of the states of single steps; see `guess_states`.

    Args:
        values: (steps, columns) observations.
        weights: (steps,) weights. Steps of weight zero get a guess of zero.
        num_states: Number of states K.
        restarts: Number of guesses.
        generator: Random number generator.
        method: "kmeans" or "random".
        known: (steps, K) result of `known_states`, if some states are known.
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
    known = None if known is None else known[chosen]
    guesses = []
    for _ in range(restarts):
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
        if known is not None:
            labels = _nearest_to_known(points, weights, known, seed)
        else:
            labels = (_clusters if method == "kmeans" else _nearest)(points, weights, num_states, seed)
        if not bool(observed.all()) or (known is not None and method == "kmeans"):
            labels = _refined(points, entry_weights, labels, num_states, known)
        guess = torch.zeros(len(values), num_states, dtype=torch.float64)
        members = _members(labels, num_states, known)
        guess[chosen] = (members * (1 - _UNIFORM_WEIGHT) + _UNIFORM_WEIGHT / num_states) * weights[:, None]
        guesses.append(guess.to(device))
    return guesses


def cluster_sequences(sequences: Sequences, num_clusters: int, generator: torch.Generator, method: str) -> Tensor:
    """Clusters sequences of real vectors by the means and standard deviations of their columns.

    Args:
        sequences: The N sequences.
        num_clusters: Number of clusters M.
        generator: Random number generator.
        method: "kmeans" for k-means clusters of the standardized numbers, or "random" to assign each sequence to the
            nearest of M sequences drawn at random.

    Returns:
        (N, M) guessed probabilities of the clusters.
    """
    values = sequences.values.double().cpu()
    observed = (~values.isnan()).double()
    which = torch.arange(len(sequences)).repeat_interleave(sequences.lengths)

    def per_sequence(entries: Tensor) -> Tensor:
        return torch.zeros(len(sequences), values.shape[1], dtype=torch.float64).index_add_(0, which, entries)

    number = per_sequence(observed)
    means = per_sequence(values.nan_to_num()) / number.clamp(min=1)
    squares = per_sequence((values - means[which]).nan_to_num() ** 2) / number.clamp(min=1)
    points, known = torch.cat([means, squares.sqrt()], 1), torch.cat([number, number], 1) > 0
    total = known.sum(0).clamp(min=1)
    center = (points * known).sum(0) / total
    spread = (((points - center) ** 2 * known).sum(0) / total).sqrt()
    points = torch.where(known, (points - center) / torch.where(spread > 0, spread, 1.0), 0.0)
    weights = torch.ones(len(points), dtype=torch.float64) if sequences.weights is None else sequences.weights.cpu()
    weights = weights * (number.sum(1) > 0)
    if int((weights > 0).sum()) < num_clusters:
        raise ValueError(
            f"{num_clusters} components need at least as many observed sequences to start from, but there are "
            f"{int((weights > 0).sum())}. Use fewer components."
        )
    seed = int(torch.randint(2**31 - 1, (), generator=generator))
    find = _clusters if method == "kmeans" else _nearest
    members = torch.nn.functional.one_hot(find(points, weights, num_clusters, seed), num_clusters)
    return (members * (1 - _UNIFORM_WEIGHT) + _UNIFORM_WEIGHT / num_clusters).to(sequences.device)


def known_states(sequences: Sequences, num_states: int) -> Tensor:
    """Returns (steps, K) probabilities of the states according to labels and state weights alone.

    The row of a step is zero if it has no label and no weights, or equal weights. The result is on the CPU.
    """
    known = torch.zeros(sequences.num_steps, num_states, dtype=torch.float64)
    if sequences.state_weights is not None:
        weights = sequences.state_weights.cpu()
        unequal = weights.amax(1) > weights.amin(1)
        known[unequal] = weights[unequal] / weights[unequal].sum(1, keepdim=True)
    if sequences.labels is not None:
        labels = sequences.labels.cpu()
        known[labels >= 0] = torch.nn.functional.one_hot(labels[labels >= 0], num_states).double()
    return known


def completed(known: Tensor, guess: Tensor, weights: Tensor) -> Tensor:
    """Returns (steps, K) guessed probabilities of the states, multiplied by the weight of the step.

    They are `known` where the states are known, and `guess` elsewhere. The guesses of a state with known steps are
    scaled down, so that their total is at most a tenth of that of the state.

    Args:
        known: (steps, K) result of `known_states`.
        guess: (steps, K) guessed probabilities.
        weights: (steps,) weights of the steps.
    """
    is_known = known.sum(1, keepdim=True) > 0
    smooth = known * (1 - _UNIFORM_WEIGHT) + _UNIFORM_WEIGHT / known.shape[1]
    known, guess = (
        torch.where(rows, part * weights[:, None], 0.0) for rows, part in ((is_known, smooth), (~is_known, guess))
    )
    limit = known.sum(0) * _UNIFORM_WEIGHT / (1 - _UNIFORM_WEIGHT)
    total = guess.sum(0)
    scale = torch.where((limit > 0) & (total > limit), limit / total, 1.0)
    return known + guess * scale


def _members(labels: Tensor, num_states: int, known: Tensor | None) -> Tensor:
    """Returns (N, K) memberships of the points: the known ones, or one cluster for each point."""
    members = torch.nn.functional.one_hot(labels, num_states).double()
    return members if known is None else torch.where(known.sum(1, keepdim=True) > 0, known, members)


def _refined(
    points: Tensor,
    entry_weights: Tensor,
    labels: Tensor,
    num_states: int,
    known: Tensor | None = None,
    iterations: int = 20,
) -> Tensor:
    """Runs iterations of k-means in which only observed entries are used.

    Args:
        points: (N, D) points, with any finite value at missing entries.
        entry_weights: (N, D) weights of the entries, 0 for missing ones.
        labels: (N,) initial clusters.
        num_states: Number of clusters.
        known: (N, K) known memberships, which do not change. They are zero for other points.
        iterations: Maximum number of iterations.

    Returns:
        (N,) clusters.
    """
    observed = (entry_weights > 0).double()
    for _ in range(iterations):
        members = _members(labels, num_states, known).T
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


def _nearest_to_known(points: Tensor, weights: Tensor, known: Tensor, seed: int) -> Tensor:
    """Assigns each point to the nearest center. The centers of states with known points are the means of these.

    The centers of other states are points that are drawn one by one, with probabilities proportional to the squared
    distance to the nearest center (k-means++).
    """
    generator = torch.Generator().manual_seed(seed)
    mass = known.T @ weights
    centers = (known.T @ (points * weights[:, None])) / torch.where(mass > 0, mass, 1.0)[:, None]
    placed = mass > 0
    for state in torch.nonzero(~placed).flatten().tolist():
        chances = weights * torch.cdist(points, centers[placed]).amin(1) ** 2 if bool(placed.any()) else weights
        chances = chances if float(chances.sum()) > 0 else weights
        centers[state] = points[torch.multinomial(chances, 1, generator=generator)]
        placed[state] = True
    return torch.cdist(points, centers).argmin(1)
