"""Expectation maximization as a torch optimizer."""

from lightning_hmm.optim.baum_welch import BaumWelch
from lightning_hmm.optim.gradients import set_gradients
from lightning_hmm.optim.iterations import BatchIterations

__all__ = ["BatchIterations", "BaumWelch", "set_gradients"]
