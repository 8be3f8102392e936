"""Components of a hidden Markov model: emissions, transitions and the distribution of the first state."""

from lightning_hmm.distributions.base import Distribution, Emission, Transition
from lightning_hmm.distributions.categorical import Categorical
from lightning_hmm.distributions.embedded import EmbeddedCategorical, EmbeddedGaussian, EmbeddedTransition
from lightning_hmm.distributions.exponential import ExponentialFamily, Moments
from lightning_hmm.distributions.gaussian import Gaussian
from lightning_hmm.distributions.iterative import Iterative, Newton
from lightning_hmm.distributions.linear_gaussian import GaussianState, LinearGaussianEmission, LinearGaussianTransition
from lightning_hmm.distributions.one_symbol import OneSymbol
from lightning_hmm.distributions.poisson import Poisson
from lightning_hmm.distributions.product import Product
from lightning_hmm.distributions.regression import Regression
from lightning_hmm.distributions.rows import CategoricalRows, Initial
from lightning_hmm.distributions.torch_emission import TorchEmission
from lightning_hmm.distributions.transitions import (
    Clones,
    DenseMostlyConstant,
    Full,
    InputDriven,
    InputDrivenInitial,
)
from lightning_hmm.distributions.weibull import Weibull

__all__ = [
    "Categorical",
    "CategoricalRows",
    "Clones",
    "DenseMostlyConstant",
    "Distribution",
    "EmbeddedCategorical",
    "EmbeddedGaussian",
    "EmbeddedTransition",
    "Emission",
    "ExponentialFamily",
    "Full",
    "Gaussian",
    "GaussianState",
    "Initial",
    "InputDriven",
    "InputDrivenInitial",
    "Iterative",
    "LinearGaussianEmission",
    "LinearGaussianTransition",
    "Moments",
    "Newton",
    "OneSymbol",
    "Poisson",
    "Product",
    "Regression",
    "TorchEmission",
    "Transition",
    "Weibull",
]
