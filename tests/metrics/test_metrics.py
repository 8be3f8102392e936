"""Metrics are sums: the same for any split."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from lightning_hmm import Sequences
from lightning_hmm.metrics import (
    BitsPerSymbol,
    LogLikelihoodPerSymbol,
    MatchedStateAccuracy,
    NormalizedNLL,
    PredictionError,
)
from tests.helpers import random_vectors


def test_likelihood_is_the_ratio_of_sums_not_the_mean_of_ratios():
    nats, bits = LogLikelihoodPerSymbol(), BitsPerSymbol()
    for metric in (nats, bits):
        metric.update(torch.tensor(-10.0), 5)
        metric.update(torch.tensor(-2.0), 20)
    assert float(nats.compute()) == pytest.approx(-12 / 25, rel=1e-12)
    assert float(bits.compute()) == pytest.approx(12 / 25 / math.log(2), rel=1e-12)


def test_sums_do_not_stop_growing_at_two_to_the_24():
    metric = LogLikelihoodPerSymbol()
    metric.update(torch.tensor(-1.0), 2.0**24)
    for _ in range(10):
        metric.update(torch.tensor(-1.0), 1.0)
    assert float(metric.num_symbols) == 2**24 + 10


def test_several_models_in_one_metric():
    metric = LogLikelihoodPerSymbol(2)
    metric.update(torch.tensor([-4.0, -8.0]), torch.tensor(4.0))
    assert metric.compute().tolist() == [-1.0, -2.0]


def test_normalised_likelihood_over_batches_and_ranks():
    """The longest length is a maximum, over batches and over ranks; weights count, and weight zero is absence."""
    first, second = NormalizedNLL(), NormalizedNLL()
    first.update(torch.tensor([-1.0, -2.0]), Sequences.from_list([[0, 1], [0, 1, 1]], weights=[2.0, 1.0]))
    first.update(torch.tensor([-5.0, -torch.inf]), Sequences.from_list([[0] * 5, [0] * 9], weights=[0.5, 0.0]))
    second.update(torch.tensor([-4.0]), Sequences.from_list([[0] * 4]))
    first.merge_state(second)
    assert float(first.compute()) == pytest.approx((2 + 2 + 2.5 + 4) / (4.5 * 5))


def test_accuracy_is_that_of_the_best_matching(rng):
    truth, decoded = torch.from_numpy(rng.integers(0, 4, 300)), torch.from_numpy(rng.integers(0, 4, 300))
    metric = MatchedStateAccuracy(4)
    for first in range(0, 300, 70):
        metric.update(decoded[first : first + 70], truth[first : first + 70])
    best = max(
        np.mean([order[d] == t for d, t in zip(decoded.tolist(), truth.tolist(), strict=True)])
        for order in itertools.permutations(range(4))
    )
    assert float(metric.compute()) == pytest.approx(best, rel=1e-12)


def test_accuracy_with_other_numbers_of_states_and_unknown_steps():
    metric = MatchedStateAccuracy(2, 3)
    metric.update(torch.tensor([0, 0, 1, 1, -1, 0]), torch.tensor([2, 2, 0, 1, 1, -1]))
    assert float(metric.compute()) == pytest.approx(3 / 4)


def test_accuracy_with_weights_is_that_of_repeated_steps(rng):
    truth, decoded, weights = (torch.from_numpy(rng.integers(0, 4, 60)) for _ in range(3))
    weighted, repeated = MatchedStateAccuracy(4), MatchedStateAccuracy(4)
    weighted.update(decoded, truth, weights.double())
    repeated.update(decoded.repeat_interleave(weights), truth.repeat_interleave(weights))
    assert float(weighted.compute()) == pytest.approx(float(repeated.compute()), rel=1e-12)


def test_prediction_error_is_the_mean_distance_of_steps_that_have_one(rng):
    """Not the first of a sequence, nor one with a missing entry; the same for any split into batches."""
    sequences = random_vectors(rng)
    sequences = Sequences(sequences.values, sequences.offsets, torch.from_numpy(rng.random(len(sequences))))
    predictions = torch.from_numpy(rng.normal(size=sequences.values.shape))
    together, apart = PredictionError(), PredictionError()
    together.update(predictions, sequences)
    total, count = 0.0, 0.0
    for n, (first, last) in enumerate(itertools.pairwise(sequences.offsets.tolist())):
        apart.update(predictions[first:last], sequences[n : n + 1])
        for step in range(first + 1, last):
            distance = math.dist(predictions[step].tolist(), sequences.values[step].tolist())
            if not math.isnan(distance):
                total, count = total + distance * float(sequences.weights[n]), count + float(sequences.weights[n])
    assert float(together.compute()) == pytest.approx(total / count, rel=1e-12)
    assert float(apart.compute()) == pytest.approx(total / count, rel=1e-12)
    with pytest.raises(
        ValueError, match=r"`predictions` must have shape \(\d+, 2\), steps by features, but has \(3, 2\)"
    ):
        together.update(predictions[:3], sequences)
