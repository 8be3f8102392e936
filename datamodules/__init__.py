"""Data for the models: each module turns one kind of data into `Sequences` batches."""

from datamodules.accelerometer import AccelerometerDataModule
from datamodules.base import SequenceDataModule
from datamodules.files import FileDataModule
from datamodules.gps import GPSDataModule
from datamodules.guitar import GuitarDataModule
from datamodules.languages import BracketDataModule, ToyMachineDataModule
from datamodules.moving import MovingTargetDataModule
from datamodules.pos import POSDataModule
from datamodules.protein import ProteinDataModule
from datamodules.synthetic import SyntheticDataModule
from datamodules.text import TextDataModule

__all__ = [
    "AccelerometerDataModule",
    "BracketDataModule",
    "FileDataModule",
    "GPSDataModule",
    "GuitarDataModule",
    "MovingTargetDataModule",
    "POSDataModule",
    "ProteinDataModule",
    "SequenceDataModule",
    "SyntheticDataModule",
    "TextDataModule",
    "ToyMachineDataModule",
]
