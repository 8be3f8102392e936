"""The toy machine and the bracket language: their exact entropies, and that what is drawn follows the rules."""

from __future__ import annotations

import re

import numpy as np
import pytest

from datamodules import BracketDataModule, ToyMachineDataModule
from datamodules.languages import pieces


@pytest.mark.parametrize(
    ("k", "bits", "length"), [(2, 0.5, 11250), (3, 4 / 9, 33750), (4, 5 / 12, 90000), (5, 0.4, 225000)]
)
def test_toy_optimum_and_sizes_are_those_of_the_paper(k, bits, length):
    data = ToyMachineDataModule(k=k)
    assert data.length == data.test_length == length
    np.testing.assert_allclose(data.optimal_bits, bits, rtol=1e-12)
    np.testing.assert_allclose(data.machine.entropy_rate(), bits, rtol=1e-9)
    assert np.bincount(data.machine.symbols).tolist() == [1] * 4 + [2] * (4 * k - 2)


def test_toy_runs_keep_their_signal():
    data = ToyMachineDataModule(k=3, num_runs=200, sequence_length=9)
    data.setup()
    for run in data.train_sequences.tolist():
        assert run[0] + 1 == run[8]
        assert run[0] in (0, 2)
        assert [symbol // 2 * 2 if symbol in (4, 5, 8, 9, 12, 13) else symbol for symbol in run[1:8]] == [
            4,
            6,
            7,
            8,
            10,
            11,
            12,
        ]
    assert data.num_symbols == 14
    np.testing.assert_allclose(data.exact_bits("train"), 4 / 9, rtol=1e-12)  # every run has just as many bits
    assert data.machine.bits_per_symbol([0, 4, 6, 7, 8, 10, 11, 12, 3]) == np.inf


def test_toy_with_alphas():
    data = ToyMachineDataModule(k=2, alpha=[0.9, 0.1])
    np.testing.assert_allclose(data.optimal_bits, 0.5105, atol=5e-5)
    assert abs(data.length - 59559) < 300  # the mean size in the paper
    data.setup()
    text = "".join(chr(97 + symbol) for symbol in data.test_sequences[0].tolist())
    assert re.match("([ac][ef]gh[ij](gh[ij])*[bd])+", text)
    for run in re.findall("[ac][^bd]*[bd]", text):
        assert (run[0], run[-1]) in (("a", "b"), ("c", "d"))
    np.testing.assert_allclose(data.exact_bits("test"), data.optimal_bits, atol=0.005)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.99, 0.999, 0.9999, 0.999999])
def test_toy_with_one_alpha_in_closed_form(alpha):
    """The number of repeats is geometric, with mean a / (1 - a) and the entropy of one coin toss per trial."""
    coin = -(1 - alpha) * np.log2(1 - alpha) - (alpha * np.log2(alpha) if alpha else 0)
    data = ToyMachineDataModule(k=2, alpha=[alpha], num_runs=10)
    repeats = alpha / (1 - alpha)
    assert data.length == round(10 * (6 + 3 * repeats))
    np.testing.assert_allclose(data.optimal_bits, (3 + repeats + coin / (1 - alpha)) / (6 + 3 * repeats), rtol=1e-9)
    if alpha < 0.999:
        np.testing.assert_allclose(data.optimal_bits, data.machine.entropy_rate(), rtol=1e-6)


@pytest.mark.parametrize(
    ("alpha", "share"),
    [([0.9999, 0.5], 0.3), ([0.0, 0.999], 0.95), ([0.9999, 0.9998], 0.5), ([0.9, 0.9], 0.2), ([0.7, 0.999], 1.0)],
)
def test_toy_with_two_alphas_near_one(alpha, share):
    """Against the sum of a million terms."""
    tosses = np.arange(1_000_000)
    chances = sum(weight * (1 - a) * a**tosses for a, weight in zip(alpha, (share, 1 - share), strict=True))
    repeats, seen = float(chances @ tosses), chances[chances > 0]
    data = ToyMachineDataModule(k=2, alpha=alpha, alpha_share=share, num_runs=10)
    assert data.length == round(10 * (6 + 3 * repeats))
    np.testing.assert_allclose(
        data.optimal_bits, (3 + repeats - float(seen @ np.log2(seen))) / (6 + 3 * repeats), rtol=1e-9
    )


@pytest.mark.parametrize(("k", "bits", "clones"), [(2, 1.0537, 3), (3, 1.1290, 7), (4, 1.1605, 15)])
def test_bracket_entropies(k, bits, clones):
    data = BracketDataModule(k=k, length=20_000)
    np.testing.assert_allclose(data.optimal_bits, bits, atol=5e-5)
    assert np.bincount(data.machine.symbols).tolist() == [clones] * 4 + [1]
    data.setup()
    np.testing.assert_allclose(data.exact_bits("test"), bits, atol=0.01)
    depth, stack = 0, []
    for symbol in data.train_sequences.values.tolist():
        if symbol in (0, 2):
            stack.append(symbol)
        elif symbol in (1, 3):
            assert stack.pop() == symbol - 1
        else:
            assert not stack
        depth = max(depth, len(stack))
    assert depth == k


def test_shifted_brackets_cost_the_training_model_more():
    shifted = {"test_start": [4 / 19, 15 / 19], "test_inside": [4 / 24, 15 / 24, 5 / 24]}
    data = BracketDataModule(start=[15 / 19, 4 / 19], inside=[15 / 24, 4 / 24, 5 / 24], **shifted)
    data.setup()
    assert data.exact_bits("test") > data.exact_bits("val") + 0.3
    np.testing.assert_allclose(data.exact_bits("val"), data.optimal_bits, atol=0.03)


def test_the_same_words_give_the_same_data_and_others_do_not():
    parts = []
    for seed in (0, 0, 1):
        data = BracketDataModule(length=1000, seed=seed)
        data.setup()
        parts.append((data.train_sequences.values.tolist(), data.test_sequences.values.tolist()))
    assert parts[0] == parts[1] != parts[2]
    assert parts[0][0] != parts[0][1]
    assert pieces(1000, 400) == [400, 400, 200]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToyMachineDataModule(k=0), "`k` must be at least 1"),
        (lambda: ToyMachineDataModule(k=3, alpha=[0.5]), "requires `k=2`, but is"),
        (lambda: BracketDataModule(start=[0.5, 0.6]), "sum to 1"),
        (lambda: BracketDataModule(inside=[0.5, 0.5, 0.0]), "positive probability of closing"),
        (lambda: BracketDataModule(length=0), "`length` must be positive"),
    ],
)
def test_bad_options_are_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
