"""Predictions of models whose transitions or emissions depend on inputs, times or earlier observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_hmm import (
    HMM,
    Autoregressive,
    ContinuousTime,
    Gaussian,
    InputDriven,
    Product,
    Regression,
    SemiMarkovHMM,
    Sequences,
)

VALUES = [np.array([[1.0], [2.0], [9.0], [8.0]])]
MEANS: dict[str, Any] = {"mean": [[0.0], [10.0]], "variance": [[1.0], [1.0]]}
LINES: dict[str, Any] = {
    "coefficients": np.zeros((2, 1, 1, 1)),
    "intercept": [[0.0], [10.0]],
    "variance": [[1.0], [1.0]],
}


def pair(transition: Any, values: Any) -> tuple[HMM, HMM]:
    """Returns a Gaussian model, and an autoregressive one without dependence on the past, which are equal."""
    models = [HMM(2, emission, transition(), num_features=1) for emission in (Gaussian(), Autoregressive(1))]
    for model, emission in zip(models, (MEANS, LINES), strict=True):
        model.set_parameters([0.5, 0.5], values, emission)
    return models[0], models[1]


@pytest.mark.parametrize("steps", [1, 3])
def test_autoregressive_models_use_inputs_and_times(steps):
    driven = {"coefficients": [[[-3.0], [3.0]], [[-3.0], [3.0]]], "intercept": np.zeros((2, 2))}
    sequences = Sequences.from_list(VALUES, inputs=[np.zeros((4, 1))])
    for value in (-2.0, 2.0):
        inputs = np.full((1, steps, 1), value)
        plain, past = (
            float(model.predict_next(sequences, steps, inputs=inputs).mean)
            for model in pair(lambda: InputDriven(1), driven)
        )
        assert past == pytest.approx(plain)
        assert plain == pytest.approx(10 / (1 + np.exp(-6 * value)))
    timed = Sequences.from_list(VALUES, times=[[0.0, 1.0, 2.0, 2.5]])
    plain, past = (
        float(model.predict_next(timed, steps).mean) for model in pair(ContinuousTime, [[0.0, 0.3], [0.2, 0.0]])
    )
    assert past == pytest.approx(plain)


@pytest.mark.parametrize("steps", [1, 3])
def test_operator_states_are_summed(steps):
    plain, past = (SemiMarkovHMM(2, 4, emission=part, num_features=1) for part in (Gaussian(), Autoregressive(1)))
    durations = plain.transition.duration_probs
    for model, emission in ((plain, MEANS), (past, LINES)):
        model.set_parameters([0.3, 0.7], {"jumps": [[0, 1], [1, 0]], "durations": durations}, emission)
    assert float(past.predict_next(VALUES, steps).mean) == pytest.approx(float(plain.predict_next(VALUES, steps).mean))
    regression = SemiMarkovHMM(2, 4, emission=Regression("gaussian", 1), num_features=1)
    lines = {"coefficients": np.zeros((2, 1, 1)), "intercept": [[0.0], [10.0]], "variance": [[1.0], [1.0]]}
    regression.set_parameters([0.3, 0.7], {"jumps": [[0, 1], [1, 0]], "durations": durations}, lines)
    sequences = Sequences.from_list(VALUES, inputs=[np.zeros((4, 1))])
    found = regression.predict_next(sequences, steps, inputs=np.zeros((1, steps, 1)))
    assert float(found.mean) == pytest.approx(float(plain.predict_next(VALUES, steps).mean))


def test_labels_are_used_in_models_with_inputs():
    model = HMM(2, Gaussian(), InputDriven(1), num_features=1)
    same = {"coefficients": np.zeros((2, 2, 1)), "intercept": [[3.0, 0.0], [0.0, 3.0]]}
    model.set_parameters([0.5, 0.5], same, MEANS)
    for label, expected in ((0, 1 / (1 + np.exp(3))), (1, 1 / (1 + np.exp(-3)))):
        sequences = Sequences.from_list(VALUES, inputs=[np.zeros((4, 1))], labels=[[label] * 4])
        assert float(model.predict_next(sequences, inputs=np.zeros((1, 1, 1))).mean) == pytest.approx(10 * expected)


def test_an_autoregressive_part_of_a_product_is_not_predicted_without_its_past():
    model = HMM(2, Product([Autoregressive(1), Gaussian()]), num_features=2)
    sequences = Sequences.from_list([torch.randn(20, 2, dtype=torch.float64)])
    model.initialize(sequences)
    with pytest.raises(ValueError, match="a part that depends on earlier observations cannot predict"):
        model.predict_next(sequences)
