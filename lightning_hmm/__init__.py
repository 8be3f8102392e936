"""Hidden Markov models that scale, as LightningModules."""

from lightning_hmm._version import __version__
from lightning_hmm.columns import Column
from lightning_hmm.models import DMCHMM, HMM, BaumWelchHMM, ClonedHMM, DenseHMM, NeuralHMM, StandardHMM
from lightning_hmm.optim import BaumWelch
from lightning_hmm.sequences import Sequences
from lightning_hmm.training import fit, load
from lightning_hmm.vocabulary import Vocabulary

__all__ = [
    "DMCHMM",
    "HMM",
    "BaumWelch",
    "BaumWelchHMM",
    "ClonedHMM",
    "Column",
    "DenseHMM",
    "NeuralHMM",
    "Sequences",
    "StandardHMM",
    "Vocabulary",
    "__version__",
    "fit",
    "load",
]
