"""Transition distributions."""

from lightning_hmm.distributions.transitions.clones import Clones
from lightning_hmm.distributions.transitions.full import Full
from lightning_hmm.distributions.transitions.input_driven import InputDriven, InputDrivenInitial
from lightning_hmm.distributions.transitions.mostly_constant import DenseMostlyConstant

__all__ = ["Clones", "DenseMostlyConstant", "Full", "InputDriven", "InputDrivenInitial"]
