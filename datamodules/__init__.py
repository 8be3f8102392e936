"""Data for the models: each module turns one kind of data into `Sequences` batches."""

from datamodules.accelerometer import AccelerometerDataModule
from datamodules.base import SequenceDataModule
from datamodules.files import FileDataModule
from datamodules.languages import BracketDataModule, ToyMachineDataModule
from datamodules.pos import POSDataModule
from datamodules.protein import ProteinDataModule
from datamodules.synthetic import SyntheticDataModule
from datamodules.text import TextDataModule

__all__ = [
    "AccelerometerDataModule",
    "BracketDataModule",
    "FileDataModule",
    "POSDataModule",
    "ProteinDataModule",
    "SequenceDataModule",
    "SyntheticDataModule",
    "TextDataModule",
    "ToyMachineDataModule",
]
