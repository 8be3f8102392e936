"""Texts: the paper's cleaning, plain characters, the split, files and folders, and what is said where nothing is left."""

from __future__ import annotations

import gzip

import pytest

from datamodules import TextDataModule
from datamodules.text import UNKNOWN, spell


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (40, "forty"), (99, "ninety nine"), (700, "seven hundred"), (1865, "one thousand eight hundred sixty five")],
)
def test_numbers_in_words(number, words):
    assert spell(number) == words


def test_large_numbers_in_words():
    assert spell(2_000_001) == "two million one"
    assert spell(10**15).split()[:2] == ["one", "zero"]


def test_cleaning(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The cat's hat, the hat -- 2 cats!\nThe once-seen cat's 2.  " * 1 + "the hat only tested")
    data = TextDataModule(str(path), test_fraction=0.25, val_fraction=0.0)
    # Of the training text, "the", "cats", "hat" and "two" occur twice; all else becomes rare, and so does what only the test part has.
    assert data.text["train"] == "the cats hat the hat two cats the rare rare cats two"
    assert data.text["test"] == " the hat rare rare"
    assert data.num_symbols == 27
    assert data.vocabulary.names[0] == " "


def test_parts_lie_one_after_the_other(tmp_path):
    (tmp_path / "a.txt").write_text("ab " * 300)
    with gzip.open(tmp_path / "b.gz", "wt") as file:
        file.write("ab " * 700)
    data = TextDataModule(str(tmp_path), sequence_length=500, test_fraction=0.1, val_fraction=0.2)
    data.setup()
    assert len(data.text["train"]) == 2160
    assert (len(data.text["val"]), len(data.text["test"])) == (539, 300)
    assert data.train_sequences.lengths.tolist() == [500] * 4 + [160]
    assert len(data.test_sequences) == len(data.val_sequences) == 1
    assert "".join(data.vocabulary.decode(data.test_sequences[0][:4].tolist())) == " ab "
    capped = TextDataModule(str(tmp_path), max_train=1000)
    assert len(capped.text["train"]) + len(capped.text["val"]) <= 1000
    assert len(capped.text["test"]) > 1900


def test_plain_characters_have_a_vocabulary(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Abc, abc.\n" * 20 + "Zß")
    data = TextDataModule(str(path), cleaning="none", test_fraction=0.1, val_fraction=0.1)
    data.setup()
    assert data.vocabulary.names == [UNKNOWN, "\n", " ", ",", ".", "A", "a", "b", "c"]
    assert data.test_sequences[0][-2:].tolist() == [0, 0]
    assert data.unknown_symbol == UNKNOWN


def test_every_python_has_a_text():
    data = TextDataModule()
    data.setup()
    assert data.train_sequences.num_steps > 100_000
    assert set(data.text["train"]) == set(" abcdefghijklmnopqrstuvwxyz")


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no"):
        TextDataModule(str(tmp_path / "none.txt"))
    with pytest.raises(ValueError, match="has none"):
        TextDataModule(str(tmp_path))
    (tmp_path / "marks.txt").write_text("?!... --")
    with pytest.raises(ValueError, match="nothing is left"):
        TextDataModule(str(tmp_path / "marks.txt"))
    with pytest.raises(ValueError, match="`sequence_length` must be positive"):
        TextDataModule(sequence_length=0)
