"""What the papers compare with."""

from lightning_hmm.models.baselines.kneser_ney import KneserNey

__all__ = ["KneserNey"]
