"""Chains of amino acids from FASTA files: variants of the format, error messages, downloads and drawn chains."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import ProteinDataModule, protein
from datamodules.protein import LETTERS, downloaded, read_fasta

ALL = {"val_fraction": 0.0, "test_fraction": 0.0, "rare_fraction": 0.0}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory; caches go to data/cache in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_HMM_DATA", raising=False)
    return tmp_path


def write(name: str, text: str | bytes) -> str:
    content = text if isinstance(text, bytes) else text.encode()
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return name


def chains(data: ProteinDataModule) -> list[str]:
    data.setup()
    return ["".join(data.vocabulary.decode(sequence.tolist())) for sequence in data.train_sequences]


def plainly(text: str) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            found.append("")
        elif line.strip():
            found[-1] += line.replace(" ", "").upper()
    return found


PDB = """>101m_A mol:protein length:7  MYOGLOBIN
MVLSEGE
>100d_A mol:na length:4  DNA/RNA (5'-R(*CP*)-D(*CP*GP*G)
CCGG
>102l_A mol:protein length:4  T4 LYSOZYME > 2 mol:na
MNIF
"""


@pytest.mark.parametrize("name", ["x.fasta", "x.fa.gz", "pdb_seqres.txt", "pdb_seqres.txt.gz"])
def test_records_of_a_file(name):
    data = ProteinDataModule(write(name, PDB), **ALL)
    assert chains(data) == ["MVLSEGE", "MNIF"]
    assert data.symbol_names == sorted(set("MVLSEGEMNIF"))
    assert data.num_symbols == len(data.symbol_names)
    assert data.true_states("train") is None
    assert chains(ProteinDataModule(name, molecule="any", **ALL)) == ["MVLSEGE", "CCGG", "MNIF"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_ways_to_write_the_same(end, last):
    text = end.join([">one", "ac d", "", "EF\t", ">two", ">three>", "w" * 70, "y"]) + (end if last else "")
    assert chains(ProteinDataModule(write("x.fa", text), **ALL)) == ["ACDEF", "", "W" * 70 + "Y"]
    assert chains(ProteinDataModule(write("y.fa", b"\xef\xbb\xbf" + end.encode() + text.encode()), **ALL)) == [
        "ACDEF",
        "",
        "W" * 70 + "Y",
    ]
    plain = end.join(["", "ACD", "", "wy"]) + (end if last else "")
    assert chains(ProteinDataModule(write("x.txt", plain), **ALL)) == ["ACD", "WY"]


@pytest.mark.parametrize("block_size", [1, 7, 30, 200, 10**6])
def test_blocks_give_what_a_plain_implementation_gives(rng, block_size):
    lines = []
    for n in range(40):
        lines.append(f">{n} some > name mol:protein")
        letters = "".join(rng.choice(LETTERS, int(rng.integers(0, 50))))
        lines += [letters[i : i + 10] for i in range(0, len(letters), 10)] + [""] * int(rng.integers(0, 2))
    text = "\n".join(lines) + "\n"
    blocks = list(read_fasta(Path(write("x.fa", text)), block_size=block_size))
    numbers, lengths = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    found = "".join(LETTERS[number] for number in numbers)
    ends = np.cumsum(lengths)
    assert [found[end - size : end] for end, size in zip(ends, lengths, strict=True)] == plainly(text)
    assert block_size > 200 or len(blocks) > 5


def test_wrong_letters_are_found_in_any_block():
    text = "".join(f">{n}\nACDE\n" for n in range(100)) + ">x\nAC\nDE-F\n"
    for block_size in (1, 50, 10**6):
        with pytest.raises(ValueError, match=r"line 203 of x.fa has '-' instead: 'DE-F'"):
            list(read_fasta(Path(write("x.fa", text)), block_size=block_size))


def test_no_more_is_read_than_is_needed(monkeypatch):
    write("x.fa", "".join(f">{n}\nACDE\n" for n in range(100)) + ">bad\n123\n")
    monkeypatch.setattr(protein.read_fasta, "__defaults__", ("protein", 50))
    assert chains(ProteinDataModule("x.fa", num_sequences=60, **ALL)) == ["ACDE"] * 60
    with pytest.raises(ValueError, match=r"line 202 of x.fa has '1'"):
        ProteinDataModule("x.fa", num_sequences=None, **ALL).setup()


def test_preparation_and_split():
    write("x.fa", "".join(f">{n}\nAAAAAAAACC{'W' if n == 3 else 'A'}DDD\n" for n in range(10)))
    data = ProteinDataModule("x.fa", num_sequences=6, max_length=11, rare_fraction=0.02)
    data.setup()
    assert data.symbol_names == ["other", "A", "C"]  # W is 1 of 66; D lies behind the cut
    assert data.unknown_symbol == "other"
    assert (len(data.train_sequences), len(data.val_sequences), len(data.test_sequences)) == (3, 0, 3)
    assert data.train_sequences.lengths.tolist() == [11, 11, 11]
    other = ProteinDataModule("x.fa", num_sequences=6, max_length=11, rare_fraction=0.0)
    assert other.symbol_names == ["A", "C", "W"]  # not what is in the cache from before
    trained = ProteinDataModule("x.fa", vocabulary=["C", "other", "A"], **ALL)
    assert set(chains(trained)[3].split("other")) == {"A" * 8 + "CC", ""}


def test_several_files_and_a_folder():
    Path("two").mkdir()
    write("two/b.fa", ">1\nAC\n")
    write("two/a.fasta.gz", ">1\nDE\n>2\nFF\n")
    write("two/README.md", "not this")
    assert chains(ProteinDataModule("two", **ALL)) == ["DE", "FF", "AC"]
    assert chains(ProteinDataModule(["two/b.fa", "two/a*"], **ALL)) == ["AC", "DE", "FF"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.fa must contain at least one chain of amino acids, but has no records"),
        (" \n\n", "but has no records"),
        (">one\n>two\n\n", "but has only empty records"),
        (">one mol:na\nACGT\n", "but has 1 records, none of a protein. Set `molecule` to 'any'"),
        (">one\nACD\nA*D\n", r"Amino acids must be letters from A to Z, but line 3 of x.fa has '\*' instead: 'A\*D'"),
        (">one\n\nAC4D\n", "line 3 of x.fa has '4' instead"),
        ("\n\n>one\nACé\n", "line 4 of x.fa has 'é' instead"),
        ("ACD\nhello, world\n", "line 2 of x.fa has ',' instead: 'hello, world'"),
    ],
)
def test_wrong_files(text, message):
    with pytest.raises(ValueError, match=message):
        ProteinDataModule(write("x.fa", text)).setup()


def test_files_that_cannot_be_read():
    write("x.fa.gz", PDB * 50)
    Path("x.fa.gz").write_bytes(Path("x.fa.gz").read_bytes()[:-60])
    with pytest.raises(ValueError, match=r"x.fa.gz must be a FASTA file, but cannot be read as one"):
        ProteinDataModule("x.fa.gz").setup()
    with pytest.raises(FileNotFoundError, match=r"`path` must match a file, but 'none.fa' matches none"):
        ProteinDataModule("none.fa").setup()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"molecule": "rna"}, "`molecule` must be one of protein, any, but is 'rna' instead"),
        ({"num_sequences": 0}, "`num_sequences` must be positive, or None for all, but is 0 instead"),
        ({"num_sequences": None}, "`num_sequences` must be given to draw sequences"),
        ({"max_length": 0}, "`max_length` must be positive, or None for all, but is 0 instead"),
        ({"rare_fraction": 1.0}, "`rare_fraction` must be at least 0 and less than 1, but is 1.0 instead"),
        ({"residual": "A"}, "`residual` must not be a symbol of the data, but 'A' is one"),
        ({"download": True, "path": "x.fa"}, "Only one of `download` and `path` may be given, but `path` is 'x.fa'"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        ProteinDataModule(**words).setup()


def test_drawn_chains_are_reproducible_and_look_like_proteins():
    data = ProteinDataModule(num_sequences=600, max_length=None, **ALL)
    data.setup()
    again = ProteinDataModule(num_sequences=600, max_length=None, **ALL)
    again.setup()
    assert torch.equal(again.train_sequences[7], data.train_sequences[7])
    values, lengths = data.train_sequences.values, data.train_sequences.lengths
    # Shares of the Protein Data Bank: a random sample of 268,623 residues.
    shares = {
        "A": 0.078,
        "C": 0.014,
        "E": 0.063,
        "G": 0.073,
        "K": 0.060,
        "L": 0.088,
        "P": 0.047,
        "V": 0.071,
        "W": 0.013,
    }
    for name, share in shares.items():
        assert (values == data.symbol_names.index(name)).double().mean().item() == pytest.approx(share, rel=0.2)
    assert lengths.median().item() == pytest.approx(209, rel=0.1)
    first = values[data.train_sequences.offsets[:-1]]
    assert (first == data.symbol_names.index("M")).double().mean().item() == pytest.approx(
        0.49 + 0.51 * 0.024, abs=0.05
    )
    assert data.state_names == ["helix", "strand", "turn", "start"]
    assert data.true_states("train").values.unique().tolist() == [0, 1, 2, 3]
    assert ProteinDataModule().symbol_names == ["other", *"ACDEFGHIKLMNPQRSTVWY"]


class TestDownload:
    """From a file:// address, so that no network is needed."""

    def test_comes_once_and_is_checked(self, folder, monkeypatch):
        write("pdb_seqres.txt.gz", PDB)
        monkeypatch.setattr(protein, "URL", (folder / "pdb_seqres.txt.gz").as_uri())
        words = {"download": True, "data_dir": "kept", **ALL}
        assert chains(ProteinDataModule(**words)) == ["MVLSEGE", "MNIF"]
        assert sorted(file.name for file in Path("kept").iterdir()) == [
            "cache",
            "pdb_seqres.txt.gz",
            "pdb_seqres.txt.gz.sha256",
        ]
        write("pdb_seqres.txt.gz", ">new\nAAA\n")  # next week's
        assert chains(ProteinDataModule(**words)) == ["MVLSEGE", "MNIF"]
        write("kept/pdb_seqres.txt.gz", ">broken\nAAA\n")
        with pytest.raises(
            ValueError,
            match=r"must have the SHA-256 checksum [0-9a-f]{64} in pdb_seqres.txt.gz.sha256, but has [0-9a-f]{64}",
        ):
            ProteinDataModule(**words).setup()
        Path("kept/pdb_seqres.txt.gz.sha256").unlink()  # a file that was put there by other means
        assert chains(ProteinDataModule(**words)) == ["AAA"]

    def test_failure_leaves_nothing_behind(self, folder):
        with pytest.raises(
            OSError, match=r"none.gz could not be downloaded to kept .* Download it by other means and set `path`"
        ):
            downloaded((folder / "none.gz").as_uri(), Path("kept"))
        assert list(Path("kept").iterdir()) == []
