"""Baselines that are not hidden Markov models: n-grams, recurrent networks and persistence."""

from lightning_hmm.models.baselines.kneser_ney import KneserNey
from lightning_hmm.models.baselines.recurrent import RecurrentNet, persistence

__all__ = ["KneserNey", "RecurrentNet", "persistence"]
