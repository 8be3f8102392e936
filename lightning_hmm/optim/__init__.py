"""Expectation maximisation as a torch optimizer."""

from lightning_hmm.optim.baum_welch import BaumWelch

__all__ = ["BaumWelch"]
