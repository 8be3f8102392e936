"""Transitions between the states."""

from lightning_hmm.distributions.transitions.clones import Clones
from lightning_hmm.distributions.transitions.components import Components
from lightning_hmm.distributions.transitions.continuous_time import ContinuousTime
from lightning_hmm.distributions.transitions.durations import Durations
from lightning_hmm.distributions.transitions.full import Full
from lightning_hmm.distributions.transitions.histories import Histories
from lightning_hmm.distributions.transitions.input_driven import InputDriven
from lightning_hmm.distributions.transitions.input_driven_initial import InputDrivenInitial
from lightning_hmm.distributions.transitions.left_right import LeftRight
from lightning_hmm.distributions.transitions.mostly_constant import DenseMostlyConstant

__all__ = [
    "Clones",
    "Components",
    "ContinuousTime",
    "DenseMostlyConstant",
    "Durations",
    "Full",
    "Histories",
    "InputDriven",
    "InputDrivenInitial",
    "LeftRight",
]
