"""One LightningModule a file."""

from lightning_hmm.models.base import HMM
from lightning_hmm.models.dmc import DMCHMM
from lightning_hmm.models.standard import StandardHMM

__all__ = ["DMCHMM", "HMM", "StandardHMM"]
