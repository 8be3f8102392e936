"""Sentences as sequences of part-of-speech tags: read from tagged corpora, or drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from datamodules.checks import require_choice
from datamodules.paths import ending
from datamodules.symbols import SymbolDataModule, Symbols
from datamodules.synthetic import draw_states, draw_symbols
from lightning_hmm.random import generator
from lightning_hmm.vocabulary import MISSING

Format = Literal["auto", "medpost", "conllu", "tagged"]
Column = Literal["upos", "xpos"]
ENDINGS = {".ioc": "medpost", ".conllu": "conllu", ".pos": "tagged"}

# Roles of words in a sentence, and the tags of each role with their frequencies in percent, as in the MedPost corpus
# (Smith et al., 2004).
ROLES = {
    "determiner": {"DD": 95.6, "PNG": 3.6, "GE": 0.5, "DB": 0.3},
    "modifier": {"JJ": 77.7, "VVNJ": 13.3, "VVGJ": 6.0, "JJR": 1.8, "JJ+": 0.8, "JJT": 0.4},
    "number": {"MC": 77.0, "SYM": 23.0},
    "noun": {"NN": 77.3, "NNS": 20.5, "VVGN": 1.6, "NNP": 0.6},
    "pronoun": {"PN": 39.5, "PNR": 36.6, "PND": 20.3, "EX": 3.6},
    "preposition": {"II": 94.4, "TO": 4.6, "II+": 1.0},
    "auxiliary": {
        "VBD": 38.1,
        "VBZ": 16.9,
        "VBB": 12.8,
        "VM": 10.9,
        "VHB": 5.4,
        "VBN": 3.8,
        "VBI": 3.4,
        "VHZ": 3.1,
        "VDD": 2.1,
        "VHD": 1.3,
        "VDZ": 0.8,
        "VDB": 0.6,
        "VBG": 0.4,
        "VHI": 0.3,
        "VHG": 0.2,
    },
    "verb": {"VVN": 43.9, "VVB": 16.5, "VVD": 15.7, "VVZ": 8.5, "VVG": 8.3, "VVI": 7.1},
    "adverb": {"RR": 95.3, "RR+": 3.4, "RRT": 1.0, "RRR": 0.3},
    "conjunction": {"CC": 71.5, "CST": 13.6, "CS": 8.4, "CSN": 3.1, "CC+": 2.7, "CS+": 0.7},
    "comma": {",": 90.3, ":": 8.1, "``": 0.8, "''": 0.8},
    "opening": {"(": 100.0},
    "closing": {")": 100.0},
    "stop": {".": 100.0},
}
# Probabilities in percent, in the order of the roles: of the first word, and of the next word after each role. A stop
# is added at the end of each sentence.
FIRST = [32, 10, 3, 24, 7, 12, 0, 1, 7, 4, 0, 0, 0, 0]
NEXT = [
    [0, 33, 3, 62, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0],
    [0, 11, 0, 76, 0, 6, 0, 0, 0, 4, 2, 1, 0, 0],
    [1, 7, 14, 39, 0, 6, 1, 1, 0, 4, 7, 5, 15, 0],
    [1, 3, 3, 29, 1, 23, 8, 7, 1, 7, 10, 3, 4, 0],
    [1, 1, 0, 4, 2, 12, 36, 38, 3, 2, 1, 0, 0, 0],
    [31, 17, 5, 40, 1, 1, 1, 2, 1, 1, 0, 0, 0, 0],
    [7, 11, 1, 1, 0, 2, 8, 50, 20, 0, 0, 0, 0, 0],
    [17, 7, 2, 11, 1, 45, 0, 1, 4, 11, 1, 0, 0, 0],
    [3, 20, 3, 2, 1, 11, 3, 32, 8, 5, 12, 0, 0, 0],
    [16, 16, 6, 36, 3, 5, 3, 6, 4, 4, 0, 1, 0, 0],
    [12, 7, 7, 27, 7, 6, 4, 7, 5, 17, 0, 1, 0, 0],
    [1, 2, 29, 63, 0, 2, 0, 1, 0, 1, 0, 1, 0, 0],
    [1, 5, 4, 32, 1, 15, 8, 6, 1, 12, 15, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 100],
]
MEDIAN_LENGTH, LENGTH_SPREAD = 26, 0.43  # Median, and standard deviation of the logarithm, in the same corpus.


class POSDataModule(SymbolDataModule):
    """Sentences of part-of-speech tags. The symbols are the tags; the words are not used.

    Without `path`, sentences are drawn from a hidden Markov model of the roles of words with the frequencies of the
    MedPost corpus, and end with a full stop. The true states are known. The defaults are those of the DenseHMM paper,
    for the file ``tag_mb.ioc`` of that corpus.

    Args:
        path: File, folder, pattern or list of these, relative to the working directory or to `data_dir`. ``None`` draws
            sentences.
        format: "medpost" has two lines per sentence, an identifier and ``word_TAG`` separated by blanks. "conllu" is
            CoNLL-U, with one word per line and an empty line after each sentence. "tagged" has one sentence per line,
            ``word/TAG`` separated by blanks, as in NLTK's corpora. "auto" determines the format from the ending,
            ".ioc", ".conllu" or ".pos", ignoring ".gz".
        column: Tags to use from CoNLL-U, "upos" or "xpos". The tag ``_`` is a missing symbol.
        num_sequences: Maximum number of sentences to use, from the first on; ``None`` for all.
        max_length: Number of words after which a sentence is cut; ``None`` does not cut.
        rare_fraction: The rarest tags that together make up less than this fraction of all tags are merged into
            `residual`.
        val_fraction: Fraction of the sentences that are held out for validation.
        test_fraction: Fraction of the sentences that are held out for testing.
        **kwargs: Forwarded to `SymbolDataModule` and `SequenceDataModule`.

    Example:
        >>> data = POSDataModule(num_sequences=4)
        >>> data.setup()
        >>> len(data.train_sequences), len(data.test_sequences)
        (2, 2)
        >>> data.symbol_names[int(data.train_sequences.values[-1])]
        '.'
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        format: Format = "auto",
        column: Column = "upos",
        num_sequences: int | None = 1000,
        max_length: int | None = 40,
        rare_fraction: float = 0.01,
        val_fraction: float = 0.0,
        test_fraction: float = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_sequences=num_sequences,
            max_length=max_length,
            rare_fraction=rare_fraction,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            **kwargs,
        )
        require_choice("format", format, Format)
        require_choice("column", column, Column)
        self.format = format
        self.column = column
        if path is None:
            self.state_names = list(ROLES)
        self.use_files(path, ENDINGS, [format, column])

    def read(self, files: list[Path]) -> Symbols:
        tags, lengths, found = [], [], 0
        for file in files:
            if self.format == "auto" and ending(file) not in ENDINGS:
                raise ValueError(
                    f"`format` must be given for {file}, because its ending is none of {', '.join(ENDINGS)} "
                    "(optionally with .gz)."
                )
            new, sizes = read_tags(file, ENDINGS[ending(file)] if self.format == "auto" else self.format, self.column)
            if new.null_count == len(new):
                raise ValueError(
                    f"Each file must contain tags, but in column {self.column!r} of {file} all are missing. "
                    "Set `column` to the column of the tags."
                )
            tags.append(new)
            lengths.append(sizes)
            found += len(sizes)
            if self.num_sequences is not None and found >= self.num_sequences:
                break
        encoded = pa.concat_arrays(tags).dictionary_encode()
        numbers = encoded.indices.fill_null(MISSING).to_numpy().astype(np.int64)
        return Symbols(numbers, np.concatenate(lengths), encoded.dictionary.to_pylist())

    def draw(self, num_sequences: int) -> Symbols:
        names = [tag for tags in ROLES.values() for tag in tags]
        emission = torch.tensor(
            [[tags.get(name, 0.0) for name in names] for tags in ROLES.values()], dtype=torch.float64
        )
        initial = torch.tensor(FIRST, dtype=torch.float64) / 100
        transition = torch.tensor(NEXT, dtype=torch.float64) / 100
        draw = generator(self.seed, "sentences")
        normal = torch.randn(num_sequences, dtype=torch.float64, generator=draw)
        lengths = (math.log(MEDIAN_LENGTH) + LENGTH_SPREAD * normal).exp().long().clamp(min=4)
        states = draw_states(initial, transition, lengths, draw)
        states[lengths.cumsum(0) - 1] = list(ROLES).index("stop")
        symbols = draw_symbols(emission / emission.sum(1, keepdim=True), states, draw)
        return Symbols(symbols.numpy(), lengths.numpy(), names, states.numpy())


def read_tags(path: Path, format: str, column: Column = "upos") -> tuple[pa.Array, np.ndarray]:
    """Returns the tags of all sentences of a file, packed, with null for a missing tag, and the sentence lengths."""
    try:
        with pa.input_stream(str(path)) as stream:  # Decompresses files that end in ".gz".
            text = stream.read().decode("utf-8-sig")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a text in UTF-8, but cannot be read as one: {error}") from None
    lines = pc.ascii_rtrim_whitespace(pa.array(text.split("\n"), pa.large_string()))
    tags, lengths = _conllu(lines, path, column) if format == "conllu" else _word_tag(lines, path, format)
    if not len(tags):
        raise ValueError(f"{path} must contain at least one tagged sentence, but has none.")
    return tags, lengths


def _word_tag(lines: pa.Array, path: Path, format: str) -> tuple[pa.Array, np.ndarray]:
    """Reads one sentence per line, of ``word_TAG`` (MedPost, each after a line with an identifier) or ``word/TAG``."""
    rows = np.flatnonzero(pc.not_equal(pc.ascii_ltrim_whitespace(lines), "").to_numpy(zero_copy_only=False))
    mark = "/"
    if format == "medpost":
        mark = "_"
        names = lines.take(pa.array(rows[::2]))
        wrong = pc.match_substring_regex(names, r"[_\s]")
        _refuse(wrong, rows[::2], path, names, "Lines must alternate between identifiers and sentences", "identifier")
        if len(rows) % 2:
            raise ValueError(
                f"Each identifier must be followed by its sentence, but line {rows[-1] + 1} of {path} is the last: "
                f"{lines[rows[-1]].as_py()!r}."
            )
        rows = rows[1::2]
    sentences = pc.ascii_trim_whitespace(lines.take(pa.array(rows, pa.int64())))
    words = pc.split_pattern_regex(sentences, r"\s+")
    lengths = pc.list_value_length(words).to_numpy().astype(np.int64)
    tokens = words.flatten()
    unlike = pc.invert(pc.match_substring_regex(tokens, rf"^.+{mark}[^{mark}]+$"))
    _refuse(unlike, np.repeat(rows, lengths), path, tokens, f"Words must have the form word{mark}TAG", "word")
    return pc.list_element(pc.split_pattern(tokens, mark, max_splits=1, reverse=True), 1), lengths


def _conllu(lines: pa.Array, path: Path, column: Column) -> tuple[pa.Array, np.ndarray]:
    """Reads sentences of CoNLL-U, which has ten columns and comments.

    Multiword tokens (numbered 1-2) and empty nodes (1.1) are skipped.
    """
    filled = pc.not_equal(lines, "").to_numpy(zero_copy_only=False)
    comment = pc.starts_with(lines, "#").to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(filled & ~comment)
    cells = pc.split_pattern(lines.take(pa.array(rows)), "\t")
    wrong = pc.not_equal(pc.list_value_length(cells), 10)
    _refuse(wrong, rows, path, lines.take(pa.array(rows)), "Words must have 10 columns separated by tabs", "line")
    table = cells.flatten()
    ids = table.take(pa.array(np.arange(0, len(table), 10)))
    unnumbered = pc.invert(pc.match_substring_regex(ids, r"^\d+([.-]\d+)?$"))
    _refuse(unnumbered, rows, path, ids, "Words must have a number such as 1, 1-2 or 1.1", "number")
    words = pc.match_substring_regex(ids, r"^\d+$").to_numpy(zero_copy_only=False)
    tags = table.take(pa.array(np.flatnonzero(words) * 10 + (3 if column == "upos" else 4)))
    _refuse(pc.equal(tags, ""), rows[words], path, tags, "Tags must not be empty", "tag")
    sentences = np.unique(np.cumsum(~filled)[rows[words]], return_counts=True)[1]
    return pc.if_else(pc.equal(tags, "_"), None, tags), sentences.astype(np.int64)


def _refuse(wrong: pa.Array, rows: np.ndarray, path: Path, texts: pa.Array, rule: str, what: str) -> None:
    """Raises an error for the first wrong text.

    Args:
        wrong: Whether each text is wrong.
        rows: Line of each text, counted from 0.
        path: Path of the file.
        texts: Texts to check.
        rule: Beginning of the message.
        what: Description of a text.
    """
    if (places := np.flatnonzero(wrong.to_numpy(zero_copy_only=False))).size:
        text = texts[int(places[0])].as_py()
        raise ValueError(f"{rule}, but line {rows[places[0]] + 1} of {path} has the {what} {text[:60]!r} instead.")
