"""Expectation maximization as a torch optimizer."""

from lightning_hmm.optim.baum_welch import BaumWelch
from lightning_hmm.optim.gradients import set_gradients

__all__ = ["BaumWelch", "set_gradients"]
