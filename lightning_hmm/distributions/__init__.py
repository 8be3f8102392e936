"""Components of a hidden Markov model: emissions, transitions and the distribution of the first state."""

from lightning_hmm.distributions.around_mean import AroundMean
from lightning_hmm.distributions.autoregressive import Autoregressive
from lightning_hmm.distributions.base import Distribution, Emission, Transition
from lightning_hmm.distributions.beta import Beta
from lightning_hmm.distributions.binomial import Bernoulli, Binomial
from lightning_hmm.distributions.categorical import Categorical
from lightning_hmm.distributions.embedded import EmbeddedCategorical, EmbeddedGaussian, EmbeddedTransition
from lightning_hmm.distributions.exponential import Exponential
from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.gamma import Gamma
from lightning_hmm.distributions.gaussian import Gaussian
from lightning_hmm.distributions.geometric import Geometric
from lightning_hmm.distributions.iterative import Iterative, Newton
from lightning_hmm.distributions.linear_gaussian import GaussianState, LinearGaussianEmission, LinearGaussianTransition
from lightning_hmm.distributions.log_normal import LogNormal
from lightning_hmm.distributions.mixture import GaussianMixture, Mixture
from lightning_hmm.distributions.moments import Moments
from lightning_hmm.distributions.multinomial import Multinomial
from lightning_hmm.distributions.negative_binomial import NegativeBinomial
from lightning_hmm.distributions.one_symbol import OneSymbol
from lightning_hmm.distributions.poisson import Poisson
from lightning_hmm.distributions.product import Product
from lightning_hmm.distributions.regression import Regression
from lightning_hmm.distributions.rows import CategoricalRows, Initial
from lightning_hmm.distributions.stationary import Stationary
from lightning_hmm.distributions.student_t import StudentT
from lightning_hmm.distributions.torch_emission import TorchEmission
from lightning_hmm.distributions.transitions import (
    Clones,
    Components,
    ContinuousTime,
    DenseMostlyConstant,
    Durations,
    Full,
    Histories,
    InputDriven,
    InputDrivenInitial,
    LeftRight,
)
from lightning_hmm.distributions.von_mises import VonMises
from lightning_hmm.distributions.weibull import Weibull
from lightning_hmm.distributions.zero_inflated import ZeroInflated

__all__ = [
    "AroundMean",
    "Autoregressive",
    "Bernoulli",
    "Beta",
    "Binomial",
    "Categorical",
    "CategoricalRows",
    "Clones",
    "Components",
    "ContinuousTime",
    "DenseMostlyConstant",
    "Distribution",
    "Durations",
    "EmbeddedCategorical",
    "EmbeddedGaussian",
    "EmbeddedTransition",
    "Emission",
    "Exponential",
    "ExponentialFamily",
    "Full",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "GaussianState",
    "Geometric",
    "Histories",
    "Initial",
    "InputDriven",
    "InputDrivenInitial",
    "Iterative",
    "LeftRight",
    "LinearGaussianEmission",
    "LinearGaussianTransition",
    "LogNormal",
    "Mixture",
    "Moments",
    "Multinomial",
    "NegativeBinomial",
    "Newton",
    "OneSymbol",
    "Poisson",
    "Product",
    "Regression",
    "Stationary",
    "StudentT",
    "TorchEmission",
    "Transition",
    "VonMises",
    "Weibull",
    "ZeroInflated",
]
