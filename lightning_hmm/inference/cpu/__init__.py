"""Compiled inference on a CPU: one driver for all operators and all forms of evidence."""

from lightning_hmm.inference.cpu import dense as _dense  # noqa: F401  (these register their kernels)
from lightning_hmm.inference.cpu import duration as _duration  # noqa: F401
from lightning_hmm.inference.cpu import mostly_constant as _mostly_constant  # noqa: F401
from lightning_hmm.inference.cpu import varying as _varying  # noqa: F401
from lightning_hmm.inference.cpu.estep import supports
from lightning_hmm.inference.cpu.routes import e_step, prefers_dense, viterbi

__all__ = ["e_step", "prefers_dense", "supports", "viterbi"]
