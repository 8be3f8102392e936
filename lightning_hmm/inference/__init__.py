"""Inference in hidden Markov models as pure functions on tensors. The conventions are described in `api`."""

from lightning_hmm.inference import cloned, semi_markov  # register their backends
from lightning_hmm.inference.api import e_step, log_likelihood, posterior, predict, sample, sample_posterior, viterbi
from lightning_hmm.inference.backends import explain
from lightning_hmm.inference.evidence import Quadratic, Rows, Table
from lightning_hmm.inference.results import EStep, Path, Posterior

__all__ = [
    "EStep",
    "Path",
    "Posterior",
    "Quadratic",
    "Rows",
    "Table",
    "cloned",
    "e_step",
    "explain",
    "log_likelihood",
    "posterior",
    "predict",
    "sample",
    "sample_posterior",
    "semi_markov",
    "viterbi",
]
