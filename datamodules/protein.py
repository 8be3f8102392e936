"""Proteins as sequences of amino acids: read from FASTA files or from the Protein Data Bank, or drawn."""

from __future__ import annotations

import hashlib
import math
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from datamodules.checks import require_choice
from datamodules.symbols import SymbolDataModule, Symbols
from datamodules.synthetic import draw_states, draw_symbols
from lightning_hmm.random import generator

Molecule = Literal["protein", "any"]
ENDINGS = (".fa", ".fasta", ".faa", ".txt")
URL = "https://files.rcsb.org/pub/pdb/derived_data/pdb_seqres.txt.gz"
# Every letter is the code of an amino acid, or of an ambiguous one.
LETTERS = [chr(letter) for letter in range(ord("A"), ord("Z") + 1)]

# Meaning of each byte of a sequence: the index of its letter, a blank or line break to skip, or a wrong character.
BLANK, WRONG = 26, 27
MEANING = np.full(256, WRONG, np.uint8)
MEANING[[ord(mark) for mark in " \t\r\n"]] = BLANK
for _number, _letter in enumerate(LETTERS):
    MEANING[[ord(_letter), ord(_letter.lower())]] = _number

# For each amino acid, its frequency in Swiss-Prot in percent, and its preference for helix, strand and turn (Chou and
# Fasman, 1978).
AMINO_ACIDS = {
    "A": (8.25, 1.42, 0.83, 0.66),
    "C": (1.38, 0.70, 1.19, 1.19),
    "D": (5.46, 1.01, 0.54, 1.46),
    "E": (6.72, 1.51, 0.37, 0.74),
    "F": (3.86, 1.13, 1.38, 0.60),
    "G": (7.07, 0.57, 0.75, 1.56),
    "H": (2.27, 1.00, 0.87, 0.95),
    "I": (5.91, 1.08, 1.60, 0.47),
    "K": (5.80, 1.16, 0.74, 1.01),
    "L": (9.65, 1.21, 1.30, 0.59),
    "M": (2.41, 1.45, 1.05, 0.60),
    "N": (4.06, 0.67, 0.89, 1.56),
    "P": (4.74, 0.57, 0.55, 1.52),
    "Q": (3.93, 1.11, 1.10, 0.98),
    "R": (5.53, 0.98, 0.93, 0.95),
    "S": (6.65, 0.77, 0.75, 1.43),
    "T": (5.36, 0.83, 1.19, 0.96),
    "U": (0.01, 1.00, 1.00, 1.00),
    "V": (6.86, 1.06, 1.70, 0.50),
    "W": (1.10, 1.08, 1.37, 0.96),
    "X": (0.10, 1.00, 1.00, 1.00),
    "Y": (2.92, 0.69, 1.47, 1.14),
}
STRUCTURES = ["helix", "strand", "turn", "start"]
# The mean lengths are 10 residues for helices and 5 for strands and turns. About half of all chains start with
# methionine, as in the Protein Data Bank.
TRANSITIONS = [[0.90, 0.01, 0.09, 0.0], [0.02, 0.80, 0.18, 0.0], [0.09, 0.11, 0.80, 0.0], [0.20, 0.15, 0.65, 0.0]]
METHIONINE_FIRST = 0.49
MEDIAN_LENGTH, LENGTH_SPREAD = 209, 0.72  # Median, and standard deviation of the logarithm, in the Protein Data Bank.


class ProteinDataModule(SymbolDataModule):
    """Chains of amino acids. The symbols are their one-letter codes.

    Files are in FASTA format (a line with ``>`` and a name, then lines of letters in upper or lower case), such as
    ``pdb_seqres.txt.gz`` of the Protein Data Bank, or plain text with one chain per line. Without `path`, chains are
    drawn from a hidden Markov model of secondary structure with the known frequencies and preferences of amino acids.
    The true states are known. The defaults are those of the DenseHMM paper; its published code uses a `max_length` of
    500 and a `rare_fraction` of 0.05.

    Args:
        path: File, folder, pattern or list of these, relative to the working directory or to `data_dir`. ``None`` draws
            chains.
        download: Whether to use ``pdb_seqres.txt.gz`` from the RCSB, which is downloaded to `data_dir` if it is not
            there. The file grows every week, so its SHA-256 checksum is saved after the download and verified on every
            use.
        molecule: "protein" omits records that are marked as something else, such as ``mol:na`` in `pdb_seqres.txt`.
            "any" uses all records. Records without a mark are always used.
        num_sequences: Maximum number of chains to use, from the first on; ``None`` for all.
        max_length: Number of amino acids after which a chain is cut; ``None`` does not cut.
        rare_fraction: The rarest symbols that together make up less than this fraction of all symbols are merged into
            `residual`.
        val_fraction: Fraction of the chains that are held out for validation.
        test_fraction: Fraction of the chains that are held out for testing.
        **kwargs: Forwarded to `SymbolDataModule` and `SequenceDataModule`.

    Example:
        >>> data = ProteinDataModule(num_sequences=4, max_length=10)
        >>> data.setup()
        >>> data.train_sequences.lengths.tolist()
        [10, 10]
        >>> data.state_names
        ['helix', 'strand', 'turn', 'start']
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        download: bool = False,
        molecule: Molecule = "protein",
        num_sequences: int | None = 1024,
        max_length: int | None = 512,
        rare_fraction: float = 0.002,
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
        require_choice("molecule", molecule, Molecule)
        if download and path is not None:
            raise ValueError(
                f"Only one of `download` and `path` may be given, but `path` is {path!r}. Omit one of them."
            )
        if path is None and not download:
            self.state_names = STRUCTURES
        self.download = download
        self.molecule = molecule
        if not download:
            self.use_files(path, ENDINGS, molecule)

    def open_source(self) -> None:
        if self.download:
            self.use_files(str(downloaded(URL, self.data_dir)), ENDINGS, self.molecule)
        super().open_source()

    def read(self, files: list[Path]) -> Symbols:
        numbers, lengths, found = [], [], 0
        for file in files:
            for chains, sizes in read_fasta(file, self.molecule):
                numbers.append(chains)
                lengths.append(sizes)
                found += len(sizes)
                if self.num_sequences is not None and found >= self.num_sequences:
                    return Symbols(np.concatenate(numbers), np.concatenate(lengths), LETTERS)
        return Symbols(np.concatenate(numbers), np.concatenate(lengths), LETTERS)

    def draw(self, num_sequences: int) -> Symbols:
        names = list(AMINO_ACIDS)
        shares = torch.tensor([row[0] for row in AMINO_ACIDS.values()], dtype=torch.float64) / 100
        preferences = torch.tensor([row[1:] for row in AMINO_ACIDS.values()], dtype=torch.float64).T
        start = (1 - METHIONINE_FIRST) * shares / shares.sum()
        start[names.index("M")] += METHIONINE_FIRST
        emission = torch.cat([shares * preferences, start.unsqueeze(0)])
        initial = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
        draw = generator(self.seed, "proteins")
        logarithms = math.log(MEDIAN_LENGTH) + LENGTH_SPREAD * torch.randn(
            num_sequences, dtype=torch.float64, generator=draw
        )
        lengths = logarithms.exp().long().clamp(3, self.max_length)  # Steps after the cut need not be drawn.
        states = draw_states(initial, torch.tensor(TRANSITIONS, dtype=torch.float64), lengths, draw)
        symbols = draw_symbols(emission / emission.sum(1, keepdim=True), states, draw)
        return Symbols(symbols.numpy(), lengths.numpy(), names, states.numpy())


def read_fasta(
    path: Path, molecule: Molecule = "protein", block_size: int = 2**21
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Reads the chains of a FASTA file, or of a text with one chain per line, block by block.

    It reads only as much of the file as is consumed, and uses a few times `block_size` bytes of memory.

    Yields:
        Indices of the letters of some chains, packed, and the lengths of the chains.
    """
    records = kept = letters = 0
    for block, first_line, fasta in _blocks(path, block_size):
        marks = np.frombuffer(block, np.uint8)
        starts = np.concatenate([[0], np.flatnonzero(marks[:-1] == ord("\n")) + 1])  # First byte of each line.
        heads = marks[starts] == ord(">") if fasta else np.zeros(len(starts), bool)
        meaning = MEANING[marks]
        meaning[np.repeat(heads, np.diff(starts, append=len(marks)))] = BLANK
        if (wrong := np.flatnonzero(meaning == WRONG)).size:
            line = int(np.searchsorted(starts, wrong[0], side="right")) - 1
            text = block[starts[line] :].split(b"\n", 1)[0].decode("utf-8", "replace")
            sign = block[wrong[0] :].decode("utf-8", "replace")[0]
            raise ValueError(
                f"Amino acids must be letters from A to Z, but line {first_line + line} of {path} has {sign!r} "
                f"instead: {text[:60]!r}."
            )
        is_letter = meaning < BLANK
        per_line = np.add.reduceat(is_letter, starts, dtype=np.int64)
        lengths = np.add.reduceat(per_line, np.flatnonzero(heads)) if fasta else per_line[per_line > 0]
        numbers = meaning[is_letter]
        records += len(lengths)
        if fasta and molecule == "protein":
            lines = pa.LargeBinaryArray.from_buffers(
                pa.large_binary(), len(starts), [None, pa.py_buffer(np.append(starts, len(marks))), pa.py_buffer(block)]
            )
            names = lines.filter(pa.array(heads))
            other = pc.and_not(
                pc.match_substring(names, b" mol:"), pc.match_substring(names, b" mol:protein")
            ).to_numpy(zero_copy_only=False)
            if other.any():
                numbers, lengths = numbers[np.repeat(~other, lengths)], lengths[~other]
        kept, letters = kept + len(lengths), letters + len(numbers)
        yield numbers, lengths
    if not letters:
        what = "no records" if not records else "only empty records"
        if records and not kept:
            what = f"{records} records, none of a protein. Set `molecule` to 'any'"
        raise ValueError(f"{path} must contain at least one chain of amino acids, but has {what}.")


def _blocks(path: Path, size: int) -> Iterator[tuple[bytes, int, bool]]:
    """Yields whole records of about `size` bytes, the number of their first line, and whether they are in FASTA."""
    rest, line, fasta = b"", 1, None
    try:
        with pa.input_stream(str(path)) as stream:  # Decompresses files that end in ".gz".
            while True:
                new = stream.read(size)
                if fasta is None:
                    rest = new.removeprefix(b"\xef\xbb\xbf")
                    lead = len(rest) - len(rest.lstrip())
                    rest, line = rest[lead:], 1 + rest[:lead].count(b"\n")
                    fasta = rest[:1] == b">" if rest or not new else None
                else:
                    rest += new
                end = rest.rfind(b"\n>" if fasta else b"\n") + 1 if new else len(rest)
                if end:
                    yield rest[:end], line, bool(fasta)
                    line += rest.count(b"\n", 0, end)
                    rest = rest[end:]
                if not new:
                    return
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} must be a FASTA file, but cannot be read as one: {error}") from None


def downloaded(url: str, folder: Path) -> Path:
    """Returns the path of a file in `folder`, which is downloaded from `url` if it is not there.

    The checksum is saved after the download and verified afterwards.
    """
    path = folder / url.rpartition("/")[2]
    note = path.with_name(f"{path.name}.sha256")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        try:
            with urllib.request.urlopen(url, timeout=60) as source, unfinished.open("wb") as target:
                while piece := source.read(2**20):
                    target.write(piece)
                expected = source.headers.get("Content-Length")
            if expected is not None and int(expected) != unfinished.stat().st_size:
                raise OSError(f"only {unfinished.stat().st_size} of {expected} bytes were received")
            note.write_text(f"{_checksum(unfinished)}  {path.name}\n")
            unfinished.replace(path)
        except (OSError, urllib.error.URLError) as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(
                f"{url} could not be downloaded to {folder} ({error}). "
                "Download it by other means and set `path`, or omit `download`."
            ) from error
    elif note.exists() and (noted := note.read_text().split()[0]) != (now := _checksum(path)):
        raise ValueError(
            f"{path} must have the SHA-256 checksum {noted} in {note.name}, but has {now} instead. "
            "Delete both files to download it again."
        )
    return path


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
