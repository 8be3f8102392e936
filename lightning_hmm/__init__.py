"""Hidden Markov models that scale, as LightningModules."""

from lightning_hmm._version import __version__
from lightning_hmm.columns import Column
from lightning_hmm.distributions import (
    Categorical,
    Clones,
    DenseMostlyConstant,
    EmbeddedCategorical,
    EmbeddedGaussian,
    EmbeddedTransition,
    Emission,
    Full,
    Gaussian,
    Initial,
    InputDriven,
    InputDrivenInitial,
    OneSymbol,
    Poisson,
    Product,
    Regression,
    TorchEmission,
    Transition,
    Weibull,
)
from lightning_hmm.models import (
    DMCHMM,
    HMM,
    ClonedHMM,
    DenseHMM,
    LinearGaussianHMM,
    NeuralDiscreteHMM,
    NeuralHMM,
    StandardHMM,
)
from lightning_hmm.optim import BaumWelch
from lightning_hmm.sequences import Sequences
from lightning_hmm.training import fit, load
from lightning_hmm.vocabulary import Vocabulary

__all__ = [
    "DMCHMM",
    "HMM",
    "BaumWelch",
    "Categorical",
    "ClonedHMM",
    "Clones",
    "Column",
    "DenseHMM",
    "DenseMostlyConstant",
    "EmbeddedCategorical",
    "EmbeddedGaussian",
    "EmbeddedTransition",
    "Emission",
    "Full",
    "Gaussian",
    "Initial",
    "InputDriven",
    "InputDrivenInitial",
    "LinearGaussianHMM",
    "NeuralDiscreteHMM",
    "NeuralHMM",
    "OneSymbol",
    "Poisson",
    "Product",
    "Regression",
    "Sequences",
    "StandardHMM",
    "TorchEmission",
    "Transition",
    "Vocabulary",
    "Weibull",
    "__version__",
    "fit",
    "load",
]
