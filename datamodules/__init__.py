"""Data for the models: each module turns one kind of data into `Sequences` batches."""

from datamodules.base import SequenceDataModule
from datamodules.files import FileDataModule
from datamodules.languages import BracketDataModule, ToyMachineDataModule
from datamodules.synthetic import SyntheticDataModule
from datamodules.text import TextDataModule

__all__ = ["BracketDataModule", "FileDataModule", "SequenceDataModule", "SyntheticDataModule", "TextDataModule", "ToyMachineDataModule"]
