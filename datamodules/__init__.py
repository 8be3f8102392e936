"""Data for the models: each module turns one kind of data into `Sequences` batches."""

from datamodules.base import SequenceDataModule
from datamodules.files import FileDataModule
from datamodules.synthetic import SyntheticDataModule

__all__ = ["FileDataModule", "SequenceDataModule", "SyntheticDataModule"]
