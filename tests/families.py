"""One entry for each emission family. `test_families.py` generates the same tests for all of them.

Every emission that `lightning_hmm` exports must have an entry here, a row in `tests.table`, whose laws include resuming
and two ranks, and a configuration that trains it from the command line. `NOT_FAMILIES` are the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_hmm import HMM, Sequences
from lightning_hmm.columns import Column, feature_columns
from lightning_hmm.distributions import (
    Autoregressive,
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Emission,
    Exponential,
    Gamma,
    Gaussian,
    GaussianMixture,
    Geometric,
    LogNormal,
    Mixture,
    Multinomial,
    NegativeBinomial,
    Poisson,
    Regression,
    StudentT,
    VonMises,
    Weibull,
    ZeroInflated,
)

# Parts of models with a learning algorithm of their own, which are tested with their models.
NOT_FAMILIES = {"EmbeddedCategorical", "EmbeddedGaussian", "OneSymbol"}
# Compositions, whose parameters, ties and frozen parts are those of their parts or of a module.
COMPOSED = {"Product", "TorchEmission"}

TRANSITION = [[0.9, 0.1], [0.2, 0.8]]


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        make: Returns a new emission. Takes the options `tied` and `frozen`.
        parameters: Values for two states, from which the data are sampled.
        tied: A parameter that can have the same value in all states.
        frozen: A parameter that can be left unchanged.
        columns: The observed columns.
        num_inputs: Number of inputs on which the distribution depends.
        missing_together: Whether the columns of a step must be missing together.
    """

    make: Callable[..., Emission]
    parameters: Any
    tied: str
    frozen: str
    columns: tuple[Column, ...] = tuple(feature_columns(2))
    num_inputs: int = 0
    missing_together: bool = False

    def model(self, num_states: int = 2, *, restarts: int = 1, seed: int = 0, **options: Any) -> HMM:
        """Returns a model with this emission. `options` are those of the emission."""
        emission = self.make(**options)
        return HMM(num_states, emission, columns=list(self.columns), restarts=restarts, seed=seed)

    def truth(self) -> HMM:
        """Returns the model from which the data are sampled."""
        return self.model().set_parameters([0.5, 0.5], TRANSITION, self.parameters)

    def data(self, seed: int = 0) -> Sequences:
        """Returns sequences of different lengths, sampled from `truth`."""
        lengths, inputs = [0, 1, 2, *range(15, 24)], None
        if self.num_inputs:
            rng = np.random.default_rng(seed)
            inputs = [rng.normal(size=(length, self.num_inputs)) for length in lengths]
        sequences: Sequences = self.truth().sample(12, lengths, seed=seed, inputs=inputs)
        return sequences


COUNTS: Any = {"rate": [[1.0, 8.0], [5.0, 2.0]]}
REAL: Any = {"mean": [[0.0, 5.0], [2.0, 1.0]], "variance": [[1.0, 2.0], [0.5, 1.0]]}

FAMILIES: dict[str, Family] = {
    "Autoregressive": Family(
        lambda **options: Autoregressive(1, variance_prior=0.1, **options),
        {
            "coefficients": [[[[0.5, 0.0], [0.2, 0.3]]], [[[-0.4, 0.1], [0.0, 0.6]]]],
            "intercept": [[0.0, 2.0], [3.0, -1.0]],
            "variance": [[1.0, 0.5], [0.5, 1.0]],
        },
        tied="variance",
        frozen="intercept",
    ),
    "Bernoulli": Family(
        lambda **options: Bernoulli(0.1, **options), {"probs": [[0.1, 0.7], [0.8, 0.4]]}, tied="probs", frozen="probs"
    ),
    "Beta": Family(
        lambda **options: Beta(0.1, **options),
        {"concentration1": [[2.0, 5.0], [6.0, 1.5]], "concentration0": [[5.0, 2.0], [2.0, 4.0]]},
        tied="concentration1",
        frozen="concentration0",
    ),
    "Binomial": Family(
        lambda **options: Binomial([5, 9], 0.1, **options),
        {"probs": [[0.2, 0.7], [0.8, 0.3]]},
        tied="probs",
        frozen="probs",
    ),
    "Categorical": Family(
        lambda **options: Categorical(0.1, **options),
        {"probs": [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]},
        tied="probs",
        frozen="probs",
        columns=(Column("symbol", "categorical", 3),),
    ),
    "Exponential": Family(
        lambda **options: Exponential(0.1, **options), {"rate": [[0.5, 3.0], [4.0, 1.0]]}, tied="rate", frozen="rate"
    ),
    "Gamma": Family(
        lambda **options: Gamma(0.1, **options),
        {"concentration": [[2.0, 5.0], [8.0, 1.5]], "rate": [[2.0, 1.0], [1.0, 0.5]]},
        tied="concentration",
        frozen="rate",
    ),
    "Gaussian": Family(lambda **options: Gaussian(variance_prior=0.1, **options), REAL, tied="variance", frozen="mean"),
    "GaussianMixture": Family(
        lambda **options: GaussianMixture(2, variance_prior=0.1, pseudocount=0.1, **options),
        {
            "weights": [[0.3, 0.7], [0.6, 0.4]],
            "mean": [[[0.0, 5.0], [3.0, 1.0]], [[-4.0, 0.0], [6.0, 6.0]]],
            "variance": [[[1.0, 2.0], [0.5, 1.0]], [[1.0, 1.0], [2.0, 0.5]]],
        },
        tied="weights",
        frozen="weights",
    ),
    "Geometric": Family(
        lambda **options: Geometric(0.1, **options), {"probs": [[0.2, 0.7], [0.6, 0.3]]}, tied="probs", frozen="probs"
    ),
    "LogNormal": Family(
        lambda **options: LogNormal(0.1, **options),
        {"loc": [[0.0, 1.0], [2.0, -1.0]], "scale": [[0.5, 0.4], [0.3, 0.6]]},
        tied="scale",
        frozen="loc",
    ),
    "Mixture": Family(
        lambda **options: Mixture(Poisson(0.1), 2, pseudocount=0.1, **options),
        {"weights": [[0.3, 0.7], [0.6, 0.4]], "rate": [[[1.0, 8.0], [9.0, 2.0]], [[20.0, 4.0], [30.0, 15.0]]]},
        tied="weights",
        frozen="weights",
    ),
    "Multinomial": Family(
        lambda **options: Multinomial(9, 0.1, **options),
        {"probs": [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]},
        tied="probs",
        frozen="probs",
        columns=tuple(feature_columns(3)),
        missing_together=True,
    ),
    "NegativeBinomial": Family(
        lambda **options: NegativeBinomial(0.1, **options),
        {"total_count": [[2.0, 5.0], [4.0, 3.0]], "probs": [[0.2, 0.6], [0.7, 0.3]]},
        tied="total_count",
        frozen="probs",
    ),
    "Poisson": Family(lambda **options: Poisson(0.1, **options), COUNTS, tied="rate", frozen="rate"),
    "Regression": Family(
        lambda **options: Regression("gaussian", 2, variance_prior=0.1, **options),
        {
            "coefficients": [[[1.0, 0.0], [0.5, -1.0]], [[-2.0, 1.0], [0.0, 1.0]]],
            "intercept": [[0.0, 2.0], [3.0, -1.0]],
            "variance": [[1.0, 0.5], [0.5, 1.0]],
        },
        tied="coefficients",
        frozen="variance",
        num_inputs=2,
    ),
    "StudentT": Family(
        lambda **options: StudentT(0.1, **options),
        {"df": [[5.0, 9.0], [7.0, 12.0]], "loc": [[0.0, 5.0], [3.0, 1.0]], "scale": [[1.0, 2.0], [0.5, 1.0]]},
        tied="df",
        frozen="scale",
    ),
    "VonMises": Family(
        lambda **options: VonMises(0.1, **options),
        {"loc": [[0.0, 1.0], [2.5, -2.0]], "concentration": [[4.0, 1.0], [2.0, 8.0]]},
        tied="concentration",
        frozen="loc",
    ),
    "Weibull": Family(
        lambda **options: Weibull(0.1, **options),
        {"concentration": [[1.5, 0.8], [3.0, 2.0]], "scale": [[1.0, 4.0], [6.0, 0.5]]},
        tied="concentration",
        frozen="scale",
    ),
    "ZeroInflated": Family(
        lambda **options: ZeroInflated(Poisson(0.1), 0.1, **options),
        {"gate": [[0.3, 0.1], [0.05, 0.5]], **COUNTS},
        tied="gate",
        frozen="gate",
    ),
}
