"""Contexts as states: n-grams are a cloned HMM, clones of contexts are clones of symbols, and the back-off formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_hmm import ClonedHMM, Sequences, fit, inference
from lightning_hmm.models import KneserNey
from lightning_hmm.models.contexts import EVEN, BackOff, Contexts


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)
    words = [[0, 1, 2], [0, 2], [3, 1, 1], [2, 3, 0, 1]]
    return Sequences.from_list([np.concatenate([words[k] for k in rng.integers(0, 4, 30)]) for _ in range(4)])


def test_contexts_are_the_longest_that_occurred(texts):
    contexts = Contexts(texts[:2], 4, 3)
    strings = [tuple(string.tolist()) for string in contexts.strings()]
    seen = {tuple(text[t : t + n].tolist()) for text in texts[:2] for n in (1, 2, 3) for t in range(len(text) - n + 1)}
    assert len(strings) == len(set(strings)) == len(contexts)
    assert set(strings) == seen | {(v,) for v in range(4)}
    assert contexts.symbols.tolist() == [string[-1] for string in strings]

    def longest(string):
        return next(strings.index(end) for n in (3, 2, 1) if len(end := tuple(string[-n:])) == n and end in strings)

    for text, numbers in zip(texts, contexts.encode(texts), strict=True):
        assert numbers.tolist() == [longest(text[: t + 1].tolist()) for t in range(len(text))]
    assert contexts.following().tolist() == [[longest([*string, v]) for v in range(4)] for string in strings]
    often = Contexts(texts, 4, 3, min_count=20)
    assert 4 < len(often) < len(Contexts(texts, 4, 3))


def test_n_grams_are_a_cloned_hmm(texts):
    train, test = texts[:3], texts[3:]
    model = ClonedHMM(num_states=6, num_symbols=4)
    model.initialize(train)
    contexts = Contexts(train, 4, 2)
    joined = BackOff([model], train, 4).joined(contexts, returning=0.0)
    # The contexts by themselves: start in that of the first symbol, which is the first of its symbol's states.
    first = int(test.values[0])
    start = torch.zeros(joined.num_states, dtype=torch.float64)
    start[int(joined.layout.clones[:first].sum())] = 1.0
    joined.initial.set(start)
    np.testing.assert_allclose(
        float(joined.score(test)), np.log(KneserNey(4, 3).fit(train).step_probs(test))[1:].sum(), rtol=1e-7
    )


@pytest.mark.filterwarnings("ignore:.*got no counts")
@pytest.mark.parametrize("upper_order", [1, 2])
def test_backing_off_is_the_formula(texts, upper_order):
    upper = Contexts(texts, 4, upper_order)
    encoded = upper.encode(texts)
    model = fit(ClonedHMM(num_states=2 * len(upper), num_symbols=len(upper), seed=1), encoded, 4, 0.0)
    s, r, lower = 0.7, 0.2, Contexts(texts, 4, 2)
    joined = BackOff([model], texts, 4, upper).joined(lower, s, r)
    matrix = joined.transition_probs.numpy()
    np.testing.assert_allclose(matrix.sum(1), 1, rtol=1e-10)
    # In the joined model a symbol's contexts come first, then its clones.
    own = np.concatenate([lower.symbols, upper.symbols[model.layout.symbols.numpy()]])
    order = np.argsort(own, kind="stable")
    place = np.argsort(order)
    of_context, of_clone = place[: len(lower)], place[len(lower) :]
    n = model.layout.expand(inference.e_step(*model.problem(encoded)).counts[0]).numpy()
    n = np.where(n > 1e-4, n, 0)
    np.testing.assert_allclose(
        matrix[np.ix_(of_clone, of_clone)], n / (n.sum(1, keepdims=True) + s), rtol=1e-8, atol=1e-12
    )
    probs, following = (
        (1 - EVEN) * KneserNey(4, 3).fit(texts).predict_next(lower.strings()) + EVEN / 4,
        lower.following(),
    )
    to_context, to_clone = np.zeros((model.num_states, len(lower))), np.zeros((len(lower), model.num_states))
    visits, seen = np.zeros(model.num_states), np.zeros((len(lower), 4))
    pairs = list(zip(model.decode(encoded), lower.encode(texts), texts, strict=True))
    for path, context, _ in pairs:
        for i, c in zip(path.tolist(), context.tolist(), strict=True):
            visits[i] += 1
            for x in range(4):
                to_context[i, following[c, x]] += probs[c, x]
        for c, j in zip(context[:-1].tolist(), path[1:].tolist(), strict=True):
            to_clone[c, j] += 1
            seen[c, own[len(lower) + j]] += 1
    there = visits > 0
    expected = (to_context / np.maximum(visits, 1)[:, None]) * (s / (n.sum(1) + s))[:, None]
    np.testing.assert_allclose(matrix[np.ix_(of_clone, of_context)][there], expected[there], rtol=1e-8, atol=1e-12)
    symbols = own[len(lower) :]
    expected = r * probs[:, symbols] * to_clone / np.maximum(seen[:, symbols], 1)
    np.testing.assert_allclose(matrix[np.ix_(of_context, of_clone)], expected, rtol=1e-8, atol=1e-12)
    assert bool(torch.isfinite(joined.score([[3, 3, 3, 2, 2, 0, 0]])).all())


def test_bad_input_is_said(texts):
    model = ClonedHMM(num_states=6, num_symbols=4)
    model.initialize(texts)
    counted, contexts = BackOff([model], texts, 4), Contexts(texts, 4, 2)
    with pytest.raises(ValueError, match="`strength` must be positive"):
        counted.joined(contexts, 0.0)
    with pytest.raises(ValueError, match="`returning` must be at least 0 and below 1"):
        counted.joined(contexts, 1.0, 1.0)
    with pytest.raises(ValueError, match="`order` must be at least 1 and such that"):
        Contexts(texts, 4, 40)
    with pytest.raises(ValueError, match="position 1 of sequence 0 is missing"):
        Contexts(Sequences.from_list([[0, -1, 2]]), 4, 2)
    with pytest.raises(ValueError, match="`min_count` must be at least 1"):
        Contexts(texts, 4, 2, 0)


def test_a_model_that_rules_out_its_data_is_refused(texts):
    elsewhere = Sequences.from_list([[0, 1, 2, 3] * 10])
    with pytest.raises(
        ValueError,
        match=r"must be possible under all `models`, but are not under one: Sequence 0 .* prune it less",
    ):
        BackOff([fit(ClonedHMM(num_states=4, num_symbols=4), elsewhere, 2, 0.0)], texts, 4)
