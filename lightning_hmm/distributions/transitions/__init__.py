"""Transitions, one file for each kind."""

from lightning_hmm.distributions.transitions.full import Full
from lightning_hmm.distributions.transitions.mostly_constant import DenseMostlyConstant

__all__ = ["DenseMostlyConstant", "Full"]
