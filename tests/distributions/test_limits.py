"""Outliers in starting values, and combinations that cannot be trained."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hmm import HMM, Autoregressive, Mixture, Poisson, StudentT, ZeroInflated, fit


def test_an_outlier_does_not_determine_the_scale_of_student_t(rng):
    values = np.append(rng.normal(size=(100, 1)), [[1e6]], axis=0)
    model = fit(HMM(1, StudentT()), [values], 200)
    assert float(model.emission.scale) < 2
    assert abs(float(model.emission.loc)) < 1


def test_an_order_without_a_complete_step_is_refused(rng):
    with pytest.raises(ValueError, match=r"`order` must be less than .* longest sequence \(5\), but is 10"):
        fit(HMM(1, Autoregressive(10)), [rng.normal(size=(5, 1))])


def test_a_component_that_is_composed_itself_is_refused():
    with pytest.raises(ValueError, match=r"`component` must not be composed .* but is a ZeroInflated"):
        Mixture(ZeroInflated(Poisson()), 2)
