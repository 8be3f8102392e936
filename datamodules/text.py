"""Texts as sequences of characters."""

from __future__ import annotations

import json
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow as pa
import torch

from datamodules.base import SequenceDataModule, as_dataset, as_table, from_table, metadata_of
from datamodules.corpus import UNKNOWN, Source, hub_texts, python_help, read_characters, read_letters, text_files
from datamodules.languages import in_pieces, pieces
from lightning_hmm.columns import symbol_column
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import Vocabulary

CACHE_VERSION = 3  # raise it whenever the same text and options are read differently


class TextDataModule(SequenceDataModule):
    """A text in three parts, one after the other: training data in contiguous sequences, validation and test data in one each.

    Args:
        path: a file, a gzip file, or a folder of such files (``*.txt`` and ``*.gz``, in the order of their names). If neither it nor
            `dataset` is given, the English help texts that come with every Python.
        dataset: a text data set of Hugging Face instead, by its name there, or a folder of its data files.
        dataset_config: which of the data set's configurations, if it has several.
        split: which part of it is the text.
        column: which column of it holds the text; a line ends where a row does.
        streaming: for a text that does not fit into memory: it is read in pieces, and its symbols are in a file in ``<data_dir>/cache``,
            which is mapped into memory, and made again only if a file or an option changes.
        cleaning: What becomes of the characters.

            - "letters" leaves the 26 letters and the space. It spells numbers out, removes all other characters from the words (hyphens
              separate words), and replaces words that do not occur at least twice in the training text by "rare".
            - "paper" does the same with the rules that reproduce the sizes and the n-gram results of Table 4 in Dedieu et al. (2019): every
              other character separates words ("cat's" becomes "cat s"), and a word is kept if the training text contains it and it
              occurs at least twice in the training and test text together. A word that occurs once in the training text is thus
              kept only if the test text contains it too. The same rule is applied to the training text alone, with the
              validation part in the place of the test part, so that neither the training nor the validation part depends on
              the test part. The test part is cleaned for a model of the whole training text: before you test, train on all of it
              with the `Retraining` callback or `val_fraction=0`.
            - "none" keeps the characters as they are. Those that the training text does not contain are unknown.
        sequence_length: symbols of a training sequence.
        max_train: most symbols to train and validate on; what is beyond them is tested on.
        test_fraction: of the whole text.
        val_fraction: of what is left of it.
        vocabulary: the characters, for "none"; those of the training text if not given.
        kwargs: the words of `SequenceDataModule`.
    """

    def __init__(
        self,
        path: str | None = None,
        dataset: str | None = None,
        dataset_config: str | None = None,
        split: str = "train",
        column: str = "text",
        streaming: bool = False,
        cleaning: Literal["letters", "paper", "none"] = "letters",
        sequence_length: int = 1000,
        max_train: int = 750_000,
        test_fraction: float = 0.1,
        val_fraction: float = 0.1,
        vocabulary: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(test_fraction=test_fraction, val_fraction=val_fraction, **kwargs)
        if cleaning not in ("letters", "paper", "none"):
            raise ValueError(f"`cleaning` must be letters, paper or none, but is {cleaning!r} instead.")
        if path is not None and dataset is not None:
            raise ValueError(f"One of `path` and `dataset` may be given, but they are {path!r} and {dataset!r}.")
        for name, size in (("sequence_length", sequence_length), ("max_train", max_train)):
            if size < 1:
                raise ValueError(f"`{name}` must be positive, but is {size} instead.")
        for character in vocabulary or ():
            if len(character) != 1:
                raise ValueError(f"`vocabulary` must hold single characters, but holds {character!r}.")
        self.sequence_length, self.max_train, self._given = sequence_length, max_train, vocabulary
        self.cleaning: Literal["letters", "paper", "none"] = cleaning
        self.path, self.streaming = path, streaming
        self._hub = None if dataset is None else (dataset, dataset_config, split, column)

    def open_source(self) -> None:
        """Reads the text and sets `columns` and `vocabulary`."""
        if self._hub is not None:
            source = hub_texts(*self._hub, self.streaming)
        else:
            source = python_help() if self.path is None else text_files(Path(self.path))
        if self.streaming:
            limits = [self.sequence_length, self.max_train, self.test_fraction, self.val_fraction]
            options = [CACHE_VERSION, self.cleaning, *limits, self._given]
            self.data_dir.joinpath("cache").mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.data_dir / "cache") as folder:
                self._dataset, metadata = self.cached(source.stamp(options), lambda: self._read(source, Path(folder)))
        else:
            table = self._read(source, None)
            self._dataset, metadata = as_dataset(table), metadata_of(table.schema)
        self._parts: dict[str, int] = json.loads(metadata["parts"])
        self.vocabulary = Vocabulary(json.loads(metadata["names"]), UNKNOWN if self.cleaning == "none" else None)
        self.columns = symbol_column(len(self.vocabulary.names), self.vocabulary.names)

    def _read(self, source: Source, folder: Path | None) -> pa.Table:
        """All parts as a table, with the names of the symbols and the numbers of sequences in its metadata; symbols are in a file where there is a folder."""
        limits = self.test_fraction, self.val_fraction, self.max_train
        if self.cleaning == "none":
            corpus = read_characters(source.pieces(), *limits, self._given, folder)
        else:
            corpus = read_letters(source.pieces(), *limits, self.cleaning, folder)
        if not corpus.sizes["train"]:
            raise ValueError(
                f"`path` or `dataset` must lead to a text to train on, but nothing is left of {source.name} after cleaning ({self.cleaning!r})."
            )
        lengths = {
            part: pieces(size, self.sequence_length if part in ("train", "whole") else max(size, 1))
            for part, size in corpus.sizes.items()
        }
        sequences = Sequences.from_lengths(
            torch.from_numpy(corpus.symbols), [length for part in lengths.values() for length in part]
        )
        metadata = {
            "names": json.dumps(corpus.names),
            "parts": json.dumps({part: len(there) for part, there in lengths.items()}),
        }
        return as_table(sequences).replace_schema_metadata(metadata)

    @cached_property
    def text(self) -> dict[str, str]:
        """The cleaned text of each part."""
        self.setup()
        parts = {"train": self.train_sequences, "val": self.val_sequences, "test": self.test_sequences}
        assert self.vocabulary is not None
        return {
            part: "".join(map(self.vocabulary.names.__getitem__, sequences.values.tolist()))
            for part, sequences in parts.items()
        }

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        parts, first = {}, 0
        for part, size in self._parts.items():
            parts[part] = self._dataset.select(range(first, first + size) if size else [])
            first += size
        self._whole = parts.pop("whole", None)
        return parts

    def train_on_validation(self, yes: bool = True) -> None:
        super().train_on_validation(yes)
        if yes and self._whole is not None:
            self._together = from_table(self._whole.with_format("arrow")[:])

    def as_training(self, sequences: Sequences) -> Sequences:
        return in_pieces(sequences, self.sequence_length)
