"""Kneser-Ney against its formula, written out with dictionaries."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lightning_hmm import Sequences
from lightning_hmm.models.baselines import KneserNey
from tests.helpers import random_symbols


def written_out(train: list[list[int]], num_symbols: int, order: int):
    """p(x | context) by the definition, from sets and counters of tuples."""
    raw = [
        Counter(tuple(s[t - m + 1 : t + 1]) for s in train for t in range(m - 1, len(s))) for m in range(1, order + 1)
    ]
    tables = []
    for m in range(1, order + 1):
        if m == order:
            tables.append(raw[m - 1])
        else:
            before = {(gram[1:], gram[0]) for gram in raw[m]} | {(tuple(s[:m]), "start") for s in train if len(s) >= m}
            tables.append(Counter(gram for gram, _ in before))

    def prob(context: tuple[int, ...], x: int, m: int) -> float:
        if m == 0:
            return 1 / num_symbols
        table = tables[m - 1]
        lower = (
            prob(context[1:] if len(context) >= m - 1 and m > 1 else context, x, m - 1) if m > 1 else 1 / num_symbols
        )
        if len(context) < m - 1:
            return prob(context, x, m - 1)
        context = context[len(context) - (m - 1) :]
        lower = prob(context[1:], x, m - 1)
        following = {gram: count for gram, count in table.items() if gram[:-1] == context}
        total = sum(following.values())
        if not total:
            return lower
        once, twice = sum(c == 1 for c in table.values()), sum(c == 2 for c in table.values())
        discount = once / (once + 2 * twice) if once else 0.0
        return (max(following.get((*context, x), 0) - discount, 0) + discount * len(following) * lower) / total

    return prob


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_formula(rng, order):
    train, test = (random_symbols(rng, num_symbols=3, missing=0.0, longest=12).tolist() for _ in range(2))
    prob = written_out(train, 4, order)  # a symbol that never occurs, too
    expected = [prob(tuple(sequence[:t]), sequence[t], order) for sequence in test for t in range(len(sequence))]
    model = KneserNey(4, order).fit(train)
    np.testing.assert_allclose(model.step_probs(test), expected, rtol=1e-12)
    for context in ([], [0], [2, 1], [0, 0, 1, 2]):
        every = Sequences.from_list([[*context, x] for x in range(4)])
        following = model.step_probs(every)[len(context) :: len(context) + 1]
        np.testing.assert_allclose(following.sum(), 1, rtol=1e-12)
        np.testing.assert_allclose(model.predict_next([context, [3, 3]])[0], following, rtol=1e-12)


def test_an_order_longer_than_every_sequence():
    train, test = [[0, 1, 2], [1, 1], [0]], [[0, 1], [0, 1, 2, 3, 0, 1, 2], [], [3]]
    prob = written_out(train, 4, 6)
    model = KneserNey(4, 6).fit(train)
    np.testing.assert_allclose(
        model.step_probs(test), [prob(tuple(s[:t]), s[t], 6) for s in test for t in range(len(s))], rtol=1e-12
    )
    np.testing.assert_allclose(
        model.predict_next(test), [[prob(tuple(s), x, 6) for x in range(4)] for s in test], rtol=1e-12
    )


def test_scores_add_up_and_long_orders_find_what_repeats(rng):
    text = Sequences.from_list([[0, 1, 2, 3, 1, 2] * 200])
    model = KneserNey(5, 8).fit(text)
    assert model.bits_per_symbol(text) < 0.1 < 0.3 < KneserNey(5, 2).fit(text).bits_per_symbol(text)
    halves = Sequences.from_list([[0, 1, 2], [3, 4]])
    np.testing.assert_allclose(float(model.score(halves).sum()), np.log(model.step_probs(halves)).sum(), rtol=1e-12)


def test_bad_input_is_said():
    with pytest.raises(ValueError, match="from 1 to 20, but is 21"):
        KneserNey(3, 21)
    with pytest.raises(ValueError, match="position 1 of sequence 0 is missing"):
        KneserNey(3).fit(Sequences.from_list([[0, -1, 2]]))
    with pytest.raises(RuntimeError, match="Call `fit` first"):
        KneserNey(3).score([[0]])
