"""All models. Each is a LightningModule in a file or, if it has several parts, a folder of its own."""

from lightning_hmm.models.baselines import KneserNey, RecurrentNet
from lightning_hmm.models.cloned import ClonedHMM
from lightning_hmm.models.dense_hmm import DenseHMM, fair_num_states
from lightning_hmm.models.discrete import DiscreteHMM
from lightning_hmm.models.dmc import DMCHMM
from lightning_hmm.models.hmm import HMM
from lightning_hmm.models.linear_gaussian import LinearGaussianHMM
from lightning_hmm.models.mixture import MixtureOfHMMs
from lightning_hmm.models.neural import NeuralDiscreteHMM, NeuralHMM
from lightning_hmm.models.semi_markov import SemiMarkovHMM
from lightning_hmm.models.sequence_model import SequenceModel
from lightning_hmm.models.standard import StandardHMM

__all__ = [
    "DMCHMM",
    "HMM",
    "ClonedHMM",
    "DenseHMM",
    "DiscreteHMM",
    "KneserNey",
    "LinearGaussianHMM",
    "MixtureOfHMMs",
    "NeuralDiscreteHMM",
    "NeuralHMM",
    "RecurrentNet",
    "SemiMarkovHMM",
    "SequenceModel",
    "StandardHMM",
    "fair_num_states",
]
