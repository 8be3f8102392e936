"""The parts a hidden Markov model is made of: parameters in natural form, sampling, and the maximiser of each."""

from lightning_hmm.distributions.base import Distribution
from lightning_hmm.distributions.categorical import CategoricalRows
from lightning_hmm.distributions.cloned import CloneTransitions
from lightning_hmm.distributions.gaussian import DiagonalGaussian
from lightning_hmm.distributions.linear_gaussian import GaussianState, LinearGaussianEmission, LinearGaussianTransition
from lightning_hmm.distributions.mostly_constant import MostlyConstantRows

__all__ = [
    "CategoricalRows",
    "CloneTransitions",
    "DiagonalGaussian",
    "Distribution",
    "GaussianState",
    "LinearGaussianEmission",
    "LinearGaussianTransition",
    "MostlyConstantRows",
]
