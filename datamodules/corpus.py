"""Reads texts of any size in pieces, cleans them, and converts them to symbols.

The text is read once, and its words or characters are numbered in order of appearance. A second pass over these numbers
creates the symbols, because the end of the training text and the rare words are known only after the first pass. The
numbers and the symbols are kept in memory or in files.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np

from datamodules.base import no_progress_bars, share
from datamodules.paths import cache_name, some
from lightning_hmm.columns import symbol_dtype

LETTERS = " abcdefghijklmnopqrstuvwxyz"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
BLOCK = 1 << 20  # Number of bytes, characters or numbers that are processed at a time.


class Source(NamedTuple):
    """Source of a text.

    name: Name for messages.
    stamp: Function from options to the name of a cache file, which changes with the text.
    pieces: Function that reads the text in pieces of any size.
    """

    name: str
    stamp: Callable[[Any], str]
    pieces: Callable[[], Iterator[str]]


def python_help() -> Source:
    """Returns the English help texts of Python."""

    def pieces() -> Iterator[str]:
        from pydoc_data.topics import topics

        yield "\n".join(topics[name] for name in sorted(topics))

    return Source("Python's help texts", lambda options: f"help-{_digest(options)}", pieces)


def text_files(path: Path) -> Source:
    """Returns a text file, a gzip file, or a folder of them. Files are separated by line breaks."""
    files = sorted([*path.glob("*.txt"), *path.glob("*.gz")]) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"`path` must be a text or a folder of texts (*.txt, *.gz), but {path} contains none.")
    if not files[0].is_file():
        raise FileNotFoundError(f"`path` must be a text or a folder of texts, but {path} does not exist.")

    def pieces() -> Iterator[str]:
        for n, file in enumerate(files):
            yield from chain(["\n"] if n else [], _decoded(file))

    return Source(str(path), lambda options: cache_name(options, {"train": files}), pieces)


def _blocks(file: Path) -> Iterator[bytes]:
    """Reads a file, decompressed if it ends in ".gz", in blocks of bytes."""
    read = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while block := stream.read(BLOCK):
                yield block
                read += len(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = "is truncated" if isinstance(error, EOFError) else "is not a valid gzip file"
        raise ValueError(
            f"{file} {why}: nothing can be read after {read:,} bytes of text ({error}). Copy or download it again."
        ) from None


def _decoded(file: Path) -> Iterator[str]:
    """Reads a text in UTF-8 or, if that fails, in Latin-1, which is common for older texts and decodes any bytes."""
    for encoding in ("utf-8-sig", "latin-1"):
        decoder = codecs.getincrementaldecoder(encoding)()
        try:
            for block in _blocks(file):  # The whole file is tried before the first piece is returned.
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            continue
        decoder.reset()
        yield from (decoder.decode(block) for block in _blocks(file))
        return


def hub_texts(name: str, config: str | None, split: str, column: str, streaming: bool) -> Source:
    """Returns a text data set of Hugging Face, given by its name or a folder. Rows are separated by line breaks."""

    def load(**options: Any) -> Any:
        try:
            return datasets.load_dataset(name, config, split=split, **options)
        except Exception as error:  # The library raises many types of errors.
            raise ValueError(
                f"`dataset` must be a data set that can be loaded, but {name!r} (config {config!r}, split {split!r}) "
                f"cannot: {error}"
            ) from error

    def pieces() -> Iterator[str]:
        with no_progress_bars():
            rows = load(streaming=streaming)
        splits, read = rows.info.splits or {}, 0
        expected = splits[split].num_examples if split in splits else None
        for row in rows:
            text = row.get(column)
            if not isinstance(text, str):
                what = type(text).__name__ if column in row else f"only the columns {some(sorted(row))}"
                raise ValueError(f"`column` {column!r} must contain texts, but row {read} of {name!r} has {what}.")
            yield f"\n{text}" if read else text
            read += 1
        if expected and read < expected:
            raise ValueError(
                f"{name!r} is truncated: it ends after {read:,} of the {expected:,} rows of its split {split!r}. "
                "Read it again."
            )

    def stamp(options: Any) -> str:
        builder = datasets.load_dataset_builder(name, config)
        version = [str(builder.info.version), str(builder.hash)]
        return f"{Path(name).name}-{_digest([options, name, config, split, column, *version])}"

    return Source(name, stamp, pieces)


def _digest(options: Any) -> str:
    return hashlib.blake2b(json.dumps(options).encode(), digest_size=8).hexdigest()


class Store:
    """Array that grows piece by piece, in memory or in a memory-mapped file.

    Args:
        dtype: Type of the numbers.
        path: File of the numbers; ``None`` to keep them in memory.
    """

    def __init__(self, dtype: np.dtype | type, path: Path | None = None) -> None:
        self.dtype, self.path = dtype, path
        self._pieces: list[np.ndarray] = []

    def add(self, numbers: Iterable[int] | np.ndarray) -> None:
        """Appends numbers."""
        array: np.ndarray = np.asarray(numbers if isinstance(numbers, np.ndarray) else list(numbers), self.dtype)
        if self.path is None:
            self._pieces.append(array)
        elif len(array):
            with self.path.open("ab") as file:
                array.tofile(file)

    def array(self) -> np.ndarray:
        """Returns all numbers that were appended."""
        if self.path is None or not self.path.exists():  # An empty file is not created, because it cannot be mapped.
            return np.concatenate([np.zeros(0, self.dtype), *self._pieces])
        return np.memmap(self.path, self.dtype, "c")


class Corpus(NamedTuple):
    """A text as symbols.

    Attributes:
        names: Names of the symbols.
        symbols: Symbols of all parts, one part after the other.
        sizes: Number of symbols in each part: "train", "val", "test" and, if the whole training text is cleaned
            differently from its two parts, "whole".
    """

    names: list[str]
    symbols: np.ndarray
    sizes: dict[str, int]


LetterCleaning = Literal["letters", "paper"]


def read_letters(
    pieces: Iterable[str],
    test_fraction: float,
    val_fraction: float,
    max_train: int,
    cleaning: LetterCleaning = "letters",
    folder: Path | None = None,
) -> Corpus:
    """Converts a text to letters and spaces. `TextDataModule` describes the two kinds of `cleaning`."""
    numbers: dict[str, int] = {}
    store = Store(np.int32, folder and folder / "words")
    for some_words in _words(pieces, cleaning):
        store.add(numbers.setdefault(word, len(numbers)) for word in some_words)
    words, names = store.array(), list(numbers)
    first_test, kept = _split(words, names, test_fraction, max_train, cleaning)
    parts = {"train": (words[:first_test], kept), "test": (words[first_test:], kept)}
    if val_fraction and cleaning == "paper":
        # The same rule, applied to the training text as if it were the whole text and its last part were the test part.
        first_val, inner = _split(words[:first_test], names, val_fraction, max_train, cleaning)
        parts = {
            "train": (words[:first_val], inner),
            "val": (words[first_val:first_test], inner),
            "test": parts["test"],
            "whole": parts["train"],
        }
    code = np.zeros(256, symbol_dtype(len(LETTERS)))
    code[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))
    symbols = Store(code.dtype, folder and folder / "symbols")
    sizes = dict.fromkeys(parts, 0)
    for part, (there, keeps) in parts.items():
        spelled = [name if keep else "rare" for name, keep in zip(names, keeps, strict=True)]
        for block in _in_blocks(there):
            text = " ".join([spelled[word] for word in block.tolist()])
            if sizes[part] or part in ("val", "test"):  # These parts begin with the space after the previous part.
                text = f" {text}"
            symbols.add(code[np.frombuffer(text.encode(), np.uint8)])
            sizes[part] += len(text)
    return Corpus(
        list(LETTERS),
        symbols.array(),
        sizes if "val" in sizes else _with_validation(sizes["train"], sizes["test"], val_fraction),
    )


def _with_validation(num_train: int, num_test: int, val_fraction: float) -> dict[str, int]:
    """Returns the sizes of the parts if the last symbols of the training text are the validation part."""
    validation = share(val_fraction, num_train)
    return {"train": num_train - validation, "val": validation, "test": num_test}


def _split(
    words: np.ndarray, names: list[str], test_fraction: float, max_train: int, cleaning: LetterCleaning
) -> tuple[int, np.ndarray]:
    """Returns the number of words in the training text, and whether each of `names` is kept.

    The rare words depend on the end of the training text, which depends on the lengths of the cleaned words. Both are
    found by fixed-point iteration. If it does not converge in ten iterations, the rare words are those of the last
    training text.
    """
    originals = np.array([len(name) + 1 for name in names], np.int64)
    sizes, before, kept = originals, -1, np.zeros(len(names), bool)
    everywhere = _occurrences(words, len(names))
    for _ in range(10):
        size = int(everywhere @ sizes)
        first_test = _fitting(words, sizes, min(math.floor((1 - Fraction(str(test_fraction))) * size), max_train))
        if first_test == before:
            break
        before = first_test
        in_training = _occurrences(words[:first_test], len(names))
        kept = in_training > 1 if cleaning == "letters" else (in_training > 0) & (everywhere > 1)
        sizes = np.where(kept, originals, len("rare") + 1)
    return first_test, kept


def _occurrences(words: np.ndarray, size: int) -> np.ndarray:
    """Counts the words, (size,)."""
    counts = np.zeros(size, np.int64)
    for block in _in_blocks(words):
        counts += np.bincount(block, minlength=size)
    return counts


def _words(pieces: Iterable[str], cleaning: LetterCleaning) -> Iterator[list[str]]:
    """Yields the words of each piece in lower case, with numbers spelled out."""
    rest = ""
    for piece in chain(pieces, [" "]):
        ready = re.match(r"(.*\s)?", text := rest + piece, re.DOTALL)
        assert ready is not None
        rest = text[ready.end() :]  # The last word may continue in the next piece.
        spelled = re.sub(r"\d+", lambda match: f" {spell(match[0])} ", ready[0])
        if cleaning == "paper":
            yield re.findall("[a-z]+", spelled.lower())
        else:
            yield [
                word
                for word in (re.sub("[^a-z]", "", token) for token in spelled.lower().replace("-", " ").split())
                if word
            ]


def _in_blocks(numbers: np.ndarray) -> Iterator[np.ndarray]:
    return (numbers[first : first + BLOCK] for first in range(0, len(numbers), BLOCK))


def _fitting(words: np.ndarray, sizes: np.ndarray, limit: int) -> int:
    """Returns the largest number of words from the start that have at most `limit` symbols together."""
    number, total = 0, 0
    for block in _in_blocks(words):
        ends = total + np.cumsum(sizes[block])
        fitting = int(np.searchsorted(ends, limit, side="right"))
        number, total = number + fitting, int(ends[-1])
        if fitting < len(block):
            break
    return number


def read_characters(
    pieces: Iterable[str],
    test_fraction: float,
    val_fraction: float,
    max_train: int,
    vocabulary: list[str] | None,
    folder: Path | None = None,
) -> Corpus:
    """Converts all characters to symbols. Those outside the vocabulary, by default the training text, are unknown."""
    store = Store(np.uint32, folder and folder / "characters")
    for piece in pieces:
        store.add(np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32))
    characters = store.array()
    num_train = min(len(characters) - share(test_fraction, len(characters)), max_train)
    if vocabulary is None:
        found: set[int] = set()
        for block in _in_blocks(characters[:num_train]):
            found.update(np.unique(block).tolist())
        vocabulary = [chr(number) for number in sorted(found)]
    names = [UNKNOWN, *(name for name in vocabulary if name != UNKNOWN)]
    known = np.array([ord(name) for name in names])
    order = np.argsort(known)
    symbols = Store(symbol_dtype(len(names)), folder and folder / "symbols")
    for block in _in_blocks(characters):
        place = np.minimum(np.searchsorted(known[order], block), len(names) - 1)
        symbols.add(np.where(known[order][place] == block, order[place], 0))
    return Corpus(names, symbols.array(), _with_validation(num_train, len(characters) - num_train, val_fraction))


_SMALL = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_SMALL += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_LARGE = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))


def spell(digits: str) -> str:
    """Spells out an integer given by its digits, or each digit if there are more than fifteen."""
    digits = "".join(str(int(digit)) for digit in digits).lstrip("0") or "0"
    return " ".join(_SMALL[int(digit)] for digit in digits) if len(digits) > 15 else _in_words(int(digits))


def _in_words(number: int) -> str:
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10] + (f" {_SMALL[number % 10]}" if number % 10 else "")
    size, name = next(pair for pair in _LARGE if number >= pair[0])
    rest = f" {_in_words(number % size)}" if number % size else ""
    return f"{_in_words(number // size)} {name}{rest}"
