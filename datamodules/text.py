"""Texts as sequences of characters."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import torch

from datamodules.base import SequenceDataModule, as_dataset, as_table
from datamodules.languages import in_pieces, pieces
from lightning_hmm.sequences import Sequences, Vocabulary

LETTERS = " abcdefghijklmnopqrstuvwxyz"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextDataModule(SequenceDataModule):
    """A text in three parts, one after the other: training data in contiguous sequences, validation and test data in one each.

    Args:
        path: a file, a gzip file, or a folder of such files (``*.txt`` and ``*.gz``, in the order of their names). If not
            given, the English help texts that come with every Python.
        cleaning: "letters" spells numbers out, replaces words that occur once in the training text, or only in the test text,
            by "rare", and leaves the 26 letters and the space; "none" keeps the characters as they are, and those that the
            training text does not have are unknown.
        sequence_length: symbols of a training sequence.
        max_train: most symbols to train and validate on; what is beyond them is tested on.
        test_fraction: of the whole text.
        val_fraction: of what is left of it.
        vocabulary: the characters, for "none"; those of the training text if not given.
        kwargs: the words of `SequenceDataModule`.

    Attributes:
        text: the cleaned text of each part.
    """

    def __init__(
        self,
        path: str | None = None,
        cleaning: Literal["letters", "none"] = "letters",
        sequence_length: int = 1000,
        max_train: int = 750_000,
        test_fraction: float = 0.1,
        val_fraction: float = 0.1,
        vocabulary: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(test_fraction=test_fraction, val_fraction=val_fraction, **kwargs)
        if cleaning not in ("letters", "none"):
            raise ValueError(f"`cleaning` must be letters or none, but is {cleaning!r} instead.")
        for name, size in (("sequence_length", sequence_length), ("max_train", max_train)):
            if size < 1:
                raise ValueError(f"`{name}` must be positive, but is {size} instead.")
        self.sequence_length = sequence_length
        raw = _python_help() if path is None else _read(Path(path))
        if cleaning == "letters":
            train, test = _clean(raw, test_fraction, max_train)
            self.vocabulary = Vocabulary(LETTERS)
        else:
            size = min(len(raw) - int(test_fraction * len(raw)), max_train)
            train, test = raw[:size], raw[size:]
            known = sorted(set(train)) if vocabulary is None else [name for name in vocabulary if name != UNKNOWN]
            self.vocabulary = Vocabulary([UNKNOWN, *known], UNKNOWN)
        if not train:
            where = "Python's help texts" if path is None else path
            raise ValueError(f"`path` must lead to a text to train on, but nothing is left of {where} ({len(raw)} characters before cleaning).")
        size = len(train) - int(val_fraction * len(train))
        self.text = {"train": train[:size], "val": train[size:], "test": test}
        self.num_symbols = len(self.vocabulary)

    def load_dataset(self) -> dict[str, datasets.Dataset]:
        assert self.vocabulary is not None
        parts = {}
        for part, text in self.text.items():
            symbols = np.asarray(self.vocabulary.encode(text), np.int64)
            lengths = pieces(len(symbols), self.sequence_length if part == "train" else max(len(symbols), 1))
            parts[part] = as_dataset(as_table(Sequences.from_lengths(torch.from_numpy(symbols), lengths)))
        return parts

    def as_training(self, sequences: Sequences) -> Sequences:
        return in_pieces(sequences, self.sequence_length)


def _python_help() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    if path.is_dir():
        files = sorted([*path.glob("*.txt"), *path.glob("*.gz")])
        if not files:
            raise ValueError(f"`path` must be a text or a folder of texts (*.txt, *.gz), but {path} has none.")
        return "\n".join(map(_read, files))
    if not path.is_file():
        raise FileNotFoundError(f"`path` must be a text or a folder of texts, but there is no {path}.")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")  # what older texts are in; it can read anything


def _clean(raw: str, test_fraction: float, max_train: int) -> tuple[str, str]:
    """Training and test text, as section 4.2 of Dedieu et al. (2019) says."""
    spelled = re.sub(r"\d+", lambda match: f" {spell(int(match[0]))} ", raw)
    words = [word for word in (re.sub("[^a-z]", "", token) for token in spelled.lower().replace("-", " ").split()) if word]
    if not words:
        return "", ""
    # Which words are rare depends on where the training text ends, and that on how long the rare ones become.
    ends = np.cumsum([len(word) + 1 for word in words])
    first_test, before = 0, -1
    for _ in range(10):
        first_test = int(np.searchsorted(ends, min((1 - test_fraction) * ends[-1], max_train), side="right"))
        if first_test == before:
            break
        before = first_test
        seen = Counter(words[:first_test])
        kept = [word if seen[word] > 1 else "rare" for word in words]
        ends = np.cumsum([len(word) + 1 for word in kept])
    text = " ".join(kept)
    size = len(" ".join(kept[:first_test]))
    return text[:size], text[size:]


_SMALL = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_SMALL += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_LARGE = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))


def spell(number: int) -> str:
    """A whole number in words; digit by digit where it has more than fifteen."""
    if number >= 10**15:
        return " ".join(_SMALL[int(digit)] for digit in str(number))
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10] + (f" {_SMALL[number % 10]}" if number % 10 else "")
    size, name = next(pair for pair in _LARGE if number >= pair[0])
    rest = f" {spell(number % size)}" if number % size else ""
    return f"{spell(number // size)} {name}{rest}"
