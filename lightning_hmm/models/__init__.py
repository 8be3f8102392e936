"""One LightningModule a file."""

from lightning_hmm.models.base import HMM
from lightning_hmm.models.cloned import ClonedHMM
from lightning_hmm.models.standard import StandardHMM

__all__ = ["HMM", "ClonedHMM", "StandardHMM"]
