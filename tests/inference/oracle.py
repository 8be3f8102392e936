"""Slow answers that are right by inspection, for models of a few states.

`enumerate_paths` sums over all K^T paths; `log_space` is the textbook recursion in logarithms, one sequence at a time.
Both take the log-likelihoods of the steps as a (T, K) array. They do not use operators, evidence or batches.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.testing import assert_allclose
from scipy.stats import norm
from torch import Tensor

from lightning_hmm.inference.evidence import Evidence, Quadratic, Rows, Table
from lightning_hmm.inference.operators import Dense, MostlyConstant, Operator
from lightning_hmm.inference.results import EStep
from lightning_hmm.sequences import Sequences


class Answer(NamedTuple):
    """The results of inference for one sequence.

    `smoothed` and `filtered` are (T, K), `pairs` is (K, K) and summed over steps, and `path` is (T,).
    """

    log_likelihood: float
    smoothed: np.ndarray
    filtered: np.ndarray
    pairs: np.ndarray
    path: np.ndarray
    score: float


def logsumexp(values: np.ndarray, axis: int | None = None) -> Any:
    largest = values.max(axis, keepdims=True)
    largest = np.where(largest == -np.inf, 0, largest)
    with np.errstate(divide="ignore"):
        return (np.log(np.exp(values - largest).sum(axis, keepdims=True)) + largest).squeeze(axis)[()]


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def _joint(log_initial: np.ndarray, log_transition: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All K^T paths and log p(y, z) of each. The last state varies fastest."""
    steps, num_states = rows.shape
    paths = np.array(list(itertools.product(range(num_states), repeat=steps)), dtype=int).reshape(-1, steps)
    scores = log_initial[paths[:, 0]] + rows[0, paths[:, 0]]
    for t in range(1, steps):
        scores = scores + log_transition[paths[:, t - 1], paths[:, t]] + rows[t, paths[:, t]]
    return paths, scores


def enumerate_paths(log_initial: np.ndarray, log_transition: np.ndarray, rows: np.ndarray) -> Answer:
    steps, num_states = rows.shape
    smoothed, filtered, pairs = (
        np.zeros((steps, num_states)),
        np.zeros((steps, num_states)),
        np.zeros((num_states, num_states)),
    )
    if steps == 0:
        return Answer(0.0, smoothed, filtered, pairs, np.zeros(0, int), 0.0)
    paths, scores = _joint(log_initial, log_transition, rows)
    total = logsumexp(scores)
    if total == -np.inf:
        return Answer(total, smoothed, filtered, pairs, np.full(steps, -1), total)
    weights = np.exp(scores - total)
    for t in range(steps):
        np.add.at(smoothed[t], paths[:, t], weights)
        if t > 0:
            np.add.at(pairs, (paths[:, t - 1], paths[:, t]), weights)
        begun, begun_scores = _joint(log_initial, log_transition, rows[: t + 1])
        np.add.at(filtered[t], begun[:, t], np.exp(begun_scores - logsumexp(begun_scores)))
    # Of equally probable paths the one with the lowest numbers, compared from the end.
    best = min((tuple(path[::-1]), n) for n, path in enumerate(paths) if scores[n] == scores.max())[1]
    return Answer(total, smoothed, filtered, pairs, paths[best], scores[best])


def enumerate_next(log_initial: np.ndarray, log_transition: np.ndarray, rows: np.ndarray, steps: int) -> np.ndarray:
    """p(z_{T+steps} | y_1:T): the last state of all longer paths, whose last steps say nothing."""
    longer = np.concatenate([rows, np.zeros((steps, rows.shape[1]))])
    paths, scores = _joint(log_initial, log_transition, longer)
    return np.array(
        [
            np.exp(logsumexp(np.append(scores[paths[:, -1] == k], -np.inf)) - logsumexp(scores))
            for k in range(rows.shape[1])
        ]
    )


def log_space(log_initial: np.ndarray, log_transition: np.ndarray, rows: np.ndarray) -> Answer:
    """Forward, backward and Viterbi in logarithms. Each step is normalized, so that numbers stay small."""
    steps, num_states = rows.shape
    pairs, nothing = np.zeros((num_states, num_states)), np.zeros(rows.shape)
    if steps == 0:
        return Answer(0.0, nothing, nothing, pairs, np.zeros(0, int), 0.0)
    alpha, delta, pointers = np.empty(rows.shape), np.empty(rows.shape), np.zeros(rows.shape, int)
    total, score = 0.0, 0.0
    for t in range(steps):
        joint = rows[t] + (log_initial if t == 0 else logsumexp(alpha[t - 1][:, None] + log_transition, axis=0))
        best = rows[t] + (log_initial if t == 0 else (delta[t - 1][:, None] + log_transition).max(0))
        if joint.max() == -np.inf:
            return Answer(-np.inf, nothing, nothing, pairs, np.full(steps, -1), -np.inf)
        pointers[t] = 0 if t == 0 else (delta[t - 1][:, None] + log_transition).argmax(0)
        alpha[t], delta[t] = joint - logsumexp(joint), best - best.max()
        total, score = total + logsumexp(joint), score + best.max()
    smoothed, back = np.empty(rows.shape), np.zeros(num_states)
    for t in range(steps - 1, -1, -1):
        smoothed[t] = softmax(alpha[t] + back)
        if t > 0:
            pairs += softmax(alpha[t - 1][:, None] + log_transition + rows[t] + back)
            back = logsumexp(log_transition + rows[t] + back, axis=1)
            back = back - max(back[alpha[t - 1] > -np.inf].max(), -1e300)
    path = np.empty(steps, int)
    path[-1] = delta[-1].argmax()
    for t in range(steps - 1, 0, -1):
        path[t - 1] = pointers[t, path[t]]
    return Answer(total, smoothed, np.exp(alpha), pairs, path, score)


def path_score(log_initial: np.ndarray, log_transition: np.ndarray, rows: np.ndarray, path: np.ndarray) -> float:
    """log p(y, z) of one path."""
    if len(rows) == 0:
        return 0.0
    return log_initial[path[0]] + log_transition[path[:-1], path[1:]].sum() + rows[np.arange(len(rows)), path].sum()


def differentiable(initial: Tensor, transition: Tensor, rows: Tensor) -> Tensor:
    """log p(y) of one sequence as plain torch, for autograd to differentiate."""
    if len(rows) == 0:
        return initial.new_zeros(())
    alpha = initial + rows[0]
    for row in rows[1:]:
        alpha = torch.logsumexp(alpha[:, None] + transition, dim=0) + row
    return torch.logsumexp(alpha, dim=0)


# Models and the log-likelihoods of their steps


class Model(NamedTuple):
    """A model, sequences with missing values, and the (T, K) log-likelihoods of the steps of each sequence."""

    initial: Tensor
    operator: Operator
    evidence: Evidence
    sequences: Sequences
    rows: list[np.ndarray]

    @property
    def problem(self) -> tuple[Tensor, Operator, Evidence, Tensor]:
        return self.initial, self.operator, self.evidence, self.sequences.offsets

    @property
    def weighted(self) -> tuple[Tensor, Operator, Evidence, Tensor, Tensor | None]:
        return *self.problem, self.sequences.weights

    @property
    def chain(self) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the first state and of transitions."""
        return self.initial.numpy(), self.operator.to_dense(torch.zeros(0, dtype=torch.int64)).numpy()

    def answers(self, method: Any = log_space) -> list[Answer]:
        return [method(*self.chain, rows) for rows in self.rows]

    def with_weights(self, weights: Any) -> Model:
        weights = torch.as_tensor(weights, dtype=torch.float64)
        return self._replace(sequences=Sequences(self.sequences.values, self.sequences.offsets, weights))


KINDS = ("table", "quadratic", "rows")


def log_rows(rng: np.random.Generator, *shape: int, zeros: float = 0.0) -> Tensor:
    """Random log-probabilities over the last axis; a share `zeros` of them, never a whole row, is -inf."""
    weights = rng.gamma(0.7, size=shape) + 1e-3
    weights = np.where((rng.random(shape) < zeros) & (np.arange(shape[-1]) != rng.integers(shape[-1])), 0, weights)
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(weights / weights.sum(-1, keepdims=True)))


def mostly_constant(
    rng: np.random.Generator, num_states: int, num_kept: int, *, low: float = 0.0, zeros: float = 0.0
) -> MostlyConstant:
    """Kept entries are above the row's constant, except for a fraction `low`; a fraction `zeros` of all is zero."""
    indices = np.stack([np.sort(rng.permutation(num_states)[:num_kept]) for _ in range(num_states)])
    values = np.where(
        rng.random(indices.shape) < low, rng.random(indices.shape) * 1e-3, 1 + 5 * rng.random(indices.shape)
    )
    values = np.where(rng.random(indices.shape) < zeros, 0.0, values)
    constants = np.where(
        (rng.random(num_states) < zeros) & (values.sum(1) > 0), 0.0, 0.2 + 0.8 * rng.random(num_states)
    )
    total = values.sum(1) + (num_states - num_kept) * constants
    with np.errstate(divide="ignore"):
        arrays = np.log(values / total[:, None]), np.log(constants / total)
    return MostlyConstant(torch.from_numpy(indices), *map(torch.from_numpy, arrays))


def gaussian(means: np.ndarray, variances: np.ndarray, center: np.ndarray, values: np.ndarray) -> Quadratic:
    """Independent Gaussians. The columns are y - center, or 0 if missing, and indicators of what is observed."""
    offset, u = means - center, np.asarray(values, np.float64) - center
    observed, size = ~np.isnan(u), len(center)
    first, shown = torch.arange(size), torch.arange(size, 2 * size)
    pairs = torch.cat([torch.stack(pair, 1) for pair in ((first, shown), (first, first), (shown, shown))])
    weights = np.concatenate(
        [offset / variances, -0.5 / variances, -(offset**2) / (2 * variances) - 0.5 * np.log(2 * np.pi * variances)], 1
    )
    return Quadratic(
        torch.from_numpy(np.concatenate([np.where(observed, u, 0), observed], 1)), pairs, torch.from_numpy(weights)
    )


def gaussian_rows(means: np.ndarray, variances: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(T, K): the sum over the features that are not missing."""
    densities = norm.logpdf(values[:, None, :], means, np.sqrt(variances))
    return np.nansum(densities, axis=2)


def symbol_rows(log_probs: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    return np.where(symbols[:, None] < 0, 0.0, log_probs.T[symbols])


def make(
    kind: str,
    num_states: int,
    lengths: Any,
    *,
    kept: int | None = None,
    seed: int = 0,
    zeros: float = 0.0,
    low: float = 0.0,
    missing: float = 0.2,
) -> Model:
    """A random model and data for it. A share `missing` of the values is missing, and some vectors are in part.

    Transitions are a full matrix, or mostly constant ones if `kept` is given.
    """
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int64)
    steps = int(lengths.sum())
    initial, matrix = log_rows(rng, num_states, zeros=zeros), log_rows(rng, num_states, num_states, zeros=zeros)
    operator = Dense(matrix) if kept is None else mostly_constant(rng, num_states, kept, low=low, zeros=zeros)
    symbols = np.where(rng.random(steps) < missing, -1, rng.integers(0, 4, steps))
    sequences = Sequences.from_lengths(torch.from_numpy(symbols), lengths)
    evidence: Evidence
    if kind == "table":
        evidence = Table(log_rows(rng, num_states, 4, zeros=zeros), sequences.symbols(4))
        rows = symbol_rows(evidence.log_probs.numpy(), symbols)
    elif kind == "quadratic":
        means, variances, center = (
            rng.normal(0, 2, (num_states, 3)),
            rng.gamma(2, size=(num_states, 3)) + 0.1,
            rng.normal(size=3),
        )
        features = rng.normal(0, 2, (steps, 3))
        features[rng.random((steps, 3)) < missing] = np.nan
        features[rng.random(steps) < missing / 2] = np.nan
        evidence, sequences = (
            gaussian(means, variances, center, features),
            Sequences.from_lengths(torch.from_numpy(features), lengths),
        )
        rows = gaussian_rows(means, variances, features)
    else:
        rows = rng.normal(0, 2, (steps, num_states))
        rows[rng.random(rows.shape) < zeros / 2] = -np.inf
        evidence = Rows(torch.from_numpy(rows))
    return Model(
        initial,
        operator,
        evidence,
        sequences,
        [rows[first:last] for first, last in itertools.pairwise(sequences.offsets.tolist())],
    )


def counts_of(operator: Operator, pairs: np.ndarray) -> tuple[np.ndarray, ...]:
    """The expected counts of an operator's natural parameters, from those of all pairs of states."""
    if isinstance(operator, Dense):
        return (pairs,)
    assert isinstance(operator, MostlyConstant)
    kept = np.zeros(pairs.shape, bool)
    np.put_along_axis(kept, operator.indices.numpy(), True, 1)
    return np.take_along_axis(pairs, operator.indices.numpy(), 1), np.where(kept, 0, pairs).sum(1)


def statistics(
    model: Model, answers: list[Answer], weights: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    """Expected starts, the operator's counts and the evidence's, each answer times its weight."""
    num_states = len(model.initial)
    shares = [answer.smoothed * weight for answer, weight in zip(answers, weights, strict=True)]
    initial = sum((share[0] for share in shares if len(share)), np.zeros(num_states))
    pairs = sum(
        (answer.pairs * weight for answer, weight in zip(answers, weights, strict=True)),
        np.zeros((num_states, num_states)),
    )
    packed, evidence = np.concatenate([np.zeros((0, num_states)), *shares]), model.evidence
    if isinstance(evidence, Rows):
        pulled = packed
    elif isinstance(evidence, Table):
        pulled, symbols = np.zeros((num_states, evidence.log_probs.shape[1])), evidence.symbols.numpy()
        seen = symbols < pulled.shape[1]
        np.add.at(pulled.T, symbols[seen], packed[seen])
    else:
        columns, (left, right) = evidence.columns.numpy(), evidence.pairs.numpy().T
        pulled = packed.T @ (columns[:, left] * columns[:, right])
    return initial, counts_of(model.operator, pairs), pulled


def check_statistics(
    found: EStep, model: Model, answers: list[Answer], weights: np.ndarray, **tolerance: float
) -> None:
    initial, counts, evidence = statistics(model, answers, weights)
    assert_allclose(found.initial, initial, **tolerance)
    for ours, theirs in zip(found.counts, counts, strict=True):
        assert_allclose(ours, theirs, **tolerance)
    assert_allclose(found.evidence, evidence, **tolerance)


def gathered(answers: list[Answer], field: str) -> np.ndarray:
    """A field of all answers, one after the other."""
    return np.concatenate([np.atleast_1d(getattr(answer, field)) for answer in answers])
