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
from datamodules.checks import require_choice, require_positive
from datamodules.corpus import UNKNOWN, Source, hub_texts, python_help, read_characters, read_letters, text_files
from datamodules.languages import in_pieces, pieces
from lightning_hmm.columns import symbol_column
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import Vocabulary

Cleaning = Literal["letters", "paper", "none"]
CACHE_VERSION = 3  # Increase it whenever the same text and options are read differently.


class TextDataModule(SequenceDataModule):
    """Characters of a text, split into consecutive training, validation and test parts.

    Use it for character-level language models. The training part is cut into contiguous sequences; validation and test
    part are one sequence each.

    Args:
        path: Text file, gzip file, or folder of such files (``*.txt`` and ``*.gz``, sorted by name). If neither `path`
            nor `dataset` is given, the English help texts of Python are used.
        dataset: Name of a text data set on Hugging Face, or folder of its data files.
        dataset_config: Configuration of the data set, if it has several.
        split: Split of the data set.
        column: Column of the data set that contains the text. Rows are separated by line breaks.
        streaming: Whether to read a text that does not fit into memory. It is read in pieces, and its symbols are
            cached in a memory-mapped file in ``<data_dir>/cache``, which is rebuilt only if a file or an option
            changes.
        cleaning: Treatment of the characters.

            - "letters" keeps the 26 letters and the space. It spells out numbers, removes all other characters from the
              words (hyphens separate words), and replaces words that do not occur at least twice in the training text
              by "rare".
            - "paper" uses the rules that reproduce the sizes and the n-gram results of Table 4 in Dedieu et al. (2019).
              Every other character separates words ("cat's" becomes "cat s"). A word is kept if it occurs in the
              training text and at least twice in the training and test text together, so a word that occurs once in
              the training text is kept only if it also occurs in the test text. The same rule is applied to the
              training text alone, with the validation part in the place of the test part, so neither the training nor
              the validation part depends on the test part. The test part is cleaned for a model of the whole training
              text. Before you test, train on all of it with the `Retraining` callback or `val_fraction=0`.
            - "none" keeps all characters. Those that do not occur in the training text are unknown.
        sequence_length: Number of symbols per training sequence.
        max_train: Maximum number of symbols for training and validation. The rest of the text is the test part.
        test_fraction: Fraction of the whole text that is the test part.
        val_fraction: Fraction of the remaining text that is the validation part.
        vocabulary: Characters for the cleaning "none", by default those of the training text.
        **kwargs: Forwarded to `SequenceDataModule`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "verse.txt")
        ...     _ = path.write_text("Row, row, row your boat! Row 2 boats, row your boat, row your boat!")
        ...     data = TextDataModule(str(path), sequence_length=20, val_fraction=0, test_fraction=0.2)
        ...     data.setup()
        >>> data.text["train"]
        'row row row your boat row rare rare row your boat'
        >>> data.text["test"]
        ' row your boat'
    """

    def __init__(
        self,
        path: str | None = None,
        dataset: str | None = None,
        dataset_config: str | None = None,
        split: str = "train",
        column: str = "text",
        streaming: bool = False,
        cleaning: Cleaning = "letters",
        sequence_length: int = 1000,
        max_train: int = 750_000,
        test_fraction: float = 0.1,
        val_fraction: float = 0.1,
        vocabulary: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(test_fraction=test_fraction, val_fraction=val_fraction, **kwargs)
        require_choice("cleaning", cleaning, Cleaning)
        if path is not None and dataset is not None:
            raise ValueError(f"Only one of `path` and `dataset` may be given, but both are: {path!r} and {dataset!r}.")
        require_positive(sequence_length=sequence_length, max_train=max_train)
        for character in vocabulary or ():
            if len(character) != 1:
                raise ValueError(f"`vocabulary` must contain single characters, but contains {character!r}.")
        self.path = path
        self.streaming = streaming
        self.cleaning: Cleaning = cleaning
        self.sequence_length = sequence_length
        self.max_train = max_train
        self._vocabulary_given = vocabulary
        self._hub = None if dataset is None else (dataset, dataset_config, split, column)

    def open_source(self) -> None:
        """Reads the text and sets `columns` and `vocabulary`."""
        if self._hub is not None:
            source = hub_texts(*self._hub, self.streaming)
        else:
            source = python_help() if self.path is None else text_files(Path(self.path))
        if self.streaming:
            limits = [self.sequence_length, self.max_train, self.test_fraction, self.val_fraction]
            options = [CACHE_VERSION, self.cleaning, *limits, self._vocabulary_given]
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
        """Returns the sequences of all parts; the metadata contain the symbols and the number of sequences per part.

        Args:
            source: Text to read.
            folder: Folder of the file that holds the symbols; ``None`` to keep them in memory.
        """
        limits = self.test_fraction, self.val_fraction, self.max_train
        if self.cleaning == "none":
            corpus = read_characters(source.pieces(), *limits, self._vocabulary_given, folder)
        else:
            corpus = read_letters(source.pieces(), *limits, self.cleaning, folder)
        if not corpus.sizes["train"]:
            raise ValueError(
                f"The training text must not be empty, but nothing remains of {source.name} after cleaning "
                f"({self.cleaning!r})."
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
        """Cleaned text of each part."""
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
