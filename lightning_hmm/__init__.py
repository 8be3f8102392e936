"""Hidden Markov models that scale, as LightningModules."""

from lightning_hmm._version import __version__
from lightning_hmm.columns import Column
from lightning_hmm.distributions import (
    Categorical,
    Clones,
    Components,
    ContinuousTime,
    DenseMostlyConstant,
    Durations,
    EmbeddedCategorical,
    EmbeddedGaussian,
    EmbeddedTransition,
    Emission,
    Full,
    Gaussian,
    Initial,
    OneSymbol,
    Poisson,
    Product,
    TorchEmission,
    Transition,
)
from lightning_hmm.models import (
    DMCHMM,
    HMM,
    ClonedHMM,
    DenseHMM,
    LinearGaussianHMM,
    MixtureOfHMMs,
    NeuralDiscreteHMM,
    NeuralHMM,
    SemiMarkovHMM,
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
    "Components",
    "ContinuousTime",
    "DenseHMM",
    "DenseMostlyConstant",
    "Durations",
    "EmbeddedCategorical",
    "EmbeddedGaussian",
    "EmbeddedTransition",
    "Emission",
    "Full",
    "Gaussian",
    "Initial",
    "LinearGaussianHMM",
    "MixtureOfHMMs",
    "NeuralDiscreteHMM",
    "NeuralHMM",
    "OneSymbol",
    "Poisson",
    "Product",
    "SemiMarkovHMM",
    "Sequences",
    "StandardHMM",
    "TorchEmission",
    "Transition",
    "Vocabulary",
    "__version__",
    "fit",
    "load",
]
