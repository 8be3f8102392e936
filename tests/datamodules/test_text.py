"""Texts: cleaning as in the paper, plain characters, the split, files and folders, error messages."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch

from datamodules import TextDataModule, corpus
from datamodules.corpus import UNKNOWN, hub_texts, spell


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety nine"),
        (700, "seven hundred"),
        (1865, "one thousand eight hundred sixty five"),
    ],
)
def test_numbers_in_words(number, words):
    assert spell(str(number)) == words
    assert spell(f"00{number}") == words


def test_large_numbers_in_words():
    assert spell("2000001") == "two million one"
    assert spell("999999999999999").startswith("nine hundred ninety nine trillion")
    assert spell(str(10**15)).split() == ["one"] + ["zero"] * 15
    assert spell("7" * 5000).split() == ["seven"] * 5000  # more digits than Python makes an int of
    assert spell("\u0661\u0662") == "twelve"  # Arabic digits


def test_cleaning(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The cat's hat, the hat -- 2 cats!\nThe once-seen cat's 2.  " * 1 + "the hat only tested")
    data = TextDataModule(str(path), test_fraction=0.25, val_fraction=0.0)
    # In the training text, "the", "cats", "hat" and "two" occur twice. All other words are rare, including those that
    # occur only in the test part.
    assert data.text["train"] == "the cats hat the hat two cats the rare rare cats two"
    assert data.text["test"] == " the hat rare rare"
    assert data.num_symbols == 27
    assert data.vocabulary.names[0] == " "


def test_the_paper_keeps_words_of_the_training_text_that_occur_twice_anywhere(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(
        "The cat's hat, the hat -- 2 cats!\nThe once-seen cat's 2. " + "The cats once; the hat only tested only"
    )
    data = TextDataModule(str(path), cleaning="paper", test_fraction=0.37, val_fraction=0.0)
    # Every other character separates words. "once" and "cats" occur once in each part; "only" occurs twice, but not in
    # the training text.
    assert data.text["train"] == "the cat s hat the hat two cats the once rare cat s two"
    assert data.text["test"] == " the cats once the hat rare rare rare"
    assert data.text["val"] == ""


def made_words(seed, size=400):
    """Words of which many are rare, in the second half longer and rarer ones."""
    rng = np.random.default_rng(seed)
    common, strange = (
        ["".join(rng.choice(list("abcdefgh"), rng.integers(1, longest))) for _ in range(200)] for longest in (4, 12)
    )
    return [str(rng.choice(common if n < size // 2 or rng.random() < 0.5 else strange)) for n in range(size)]


def kept_words(train, test, cleaning):
    counts, everywhere = Counter(train), Counter(train + test)
    return {word for word in counts if (counts if cleaning == "letters" else everywhere)[word] > 1}


def cleaned(words, kept):
    return [word if word in kept else "rare" for word in words]


@pytest.mark.parametrize("cleaning", ["letters", "paper"])
@pytest.mark.parametrize("seed", range(8))
def test_rare_words_and_the_split_agree(tmp_path, cleaning, seed):
    """The rare words are those of the training text, whose length is a share of the text with these words replaced."""
    words = made_words(seed)
    (tmp_path / "text.txt").write_text(" ".join(words))
    data = TextDataModule(str(tmp_path / "text.txt"), cleaning=cleaning, test_fraction=0.29, val_fraction=0.0)
    size = len(data.text["train"].split())
    found = cleaned(words, kept_words(words[:size], words[size:], cleaning))
    assert data.text["train"] == " ".join(found[:size])
    assert data.text["test"] == " " + " ".join(found[size:])
    ends = np.cumsum([len(word) + 1 for word in found])
    assert 100 * ends[size - 1] <= 71 * ends[-1] < 100 * ends[size]


def test_the_paper_cleans_validation_without_the_test_part(tmp_path):
    """The validation part takes the place of the test part; the whole training text is cleaned with the test part."""
    words = made_words(3)
    (tmp_path / "text.txt").write_text(" ".join(words))
    options = {"cleaning": "paper", "test_fraction": 0.2, "sequence_length": 100}
    data, whole = (
        TextDataModule(str(tmp_path / "text.txt"), val_fraction=fraction, **options) for fraction in (0.3, 0.0)
    )
    first_val, first_test = len(data.text["train"].split()), len((data.text["train"] + data.text["val"]).split())
    found = cleaned(words, kept_words(words[:first_val], words[first_val:first_test], "paper"))
    assert data.text["train"] == " ".join(found[:first_val])
    assert data.text["val"] == " " + " ".join(found[first_val:first_test])
    ends = np.cumsum([len(word) + 1 for word in found[:first_test]])
    assert ends[first_val - 1] <= 0.7 * ends[-1] < ends[first_val]
    assert data.text["test"] == whole.text["test"]
    assert data.text["train"] + data.text["val"] != whole.text["train"]
    data.train_on_validation()
    assert torch.equal(data.train_sequences.values, whole.train_sequences.values)
    assert torch.equal(data.train_sequences.offsets, whole.train_sequences.offsets)
    data.train_on_validation(False)
    assert "".join(data.vocabulary.decode(data.train_sequences.values.tolist())) == data.text["train"]


@pytest.mark.parametrize("fraction", [0.29, 0.57, 0.07])
def test_parts_are_exact_fractions(tmp_path, fraction):
    """Products such as ``0.29 * 100``, rounded down, are one too few."""
    (tmp_path / "text.txt").write_text("a" * 100)
    data = TextDataModule(str(tmp_path / "text.txt"), cleaning="none", test_fraction=fraction, val_fraction=0.0)
    assert len(data.text["test"]) == round(100 * fraction)
    data = TextDataModule(str(tmp_path / "text.txt"), cleaning="none", test_fraction=0.0, val_fraction=fraction)
    assert len(data.text["val"]) == round(100 * fraction)
    (tmp_path / "text.txt").write_text("a " * 100)
    data = TextDataModule(str(tmp_path / "text.txt"), test_fraction=fraction, val_fraction=0.0)
    assert data.text["train"].count("a") == 100 - round(100 * fraction)


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


def made_text(seed=0, size=3000):
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcde"), rng.integers(1, 7))) for _ in range(60)]
    marks = [" ", "\n", ", ", "-", " 12 ", ". ", "\u00e9 "]
    return "".join(rng.choice(words) + rng.choice(marks) for _ in range(size))


@pytest.mark.parametrize("cleaning", ["letters", "paper", "none"])
def test_a_stream_is_the_same_text(tmp_path, monkeypatch, cleaning):
    monkeypatch.setattr(corpus, "BLOCK", 61)  # words, numbers and characters of two bytes lie across the ends of pieces
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(made_text(), "utf-8")
    with gzip.open(tmp_path / "texts" / "b.gz", "wt", encoding="latin-1") as file:
        file.write(made_text(1))
    options = {"path": str(tmp_path / "texts"), "cleaning": cleaning, "sequence_length": 100, "max_train": 5000}
    streamed = TextDataModule(**options, streaming=True, data_dir=str(tmp_path / "data"))
    monkeypatch.setattr(corpus, "BLOCK", 1 << 20)
    whole = TextDataModule(**options)
    assert streamed.vocabulary == whole.vocabulary
    assert streamed.text == whole.text
    (cached,) = (tmp_path / "data" / "cache").iterdir()  # what lay on disk between the passes is gone
    assert cached.suffix == ".arrow"
    again = TextDataModule(**options, streaming=True, data_dir=str(tmp_path / "data"))
    again.setup()
    whole.setup()
    assert torch.equal(again.train_sequences.values, whole.train_sequences.values)
    assert torch.equal(again.train_sequences.offsets, whole.train_sequences.offsets)


@pytest.mark.parametrize("streaming", [False, True])
def test_texts_of_hugging_face(tmp_path, monkeypatch, streaming):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "set").mkdir()
    rows = made_text().split("\n")
    (tmp_path / "set" / "train.jsonl").write_text(
        "".join(json.dumps({"text": row, "number": 1}) + "\n" for row in rows)
    )
    (tmp_path / "plain.txt").write_text(made_text(), "utf-8")
    data = TextDataModule(dataset=str(tmp_path / "set"), streaming=streaming, data_dir=str(tmp_path / "data"))
    assert data.text == TextDataModule(str(tmp_path / "plain.txt")).text
    for column, message in (("body", "has only the columns number, text"), ("number", "has int")):
        with pytest.raises(ValueError, match=f"must contain texts.*{message}"):
            TextDataModule(
                dataset=str(tmp_path / "set"), column=column, streaming=streaming, data_dir=str(tmp_path / "data")
            ).setup()
    with pytest.raises(ValueError, match="`dataset` must be a data set that can be loaded"):
        TextDataModule(dataset=str(tmp_path / "set"), split="nothing").setup()


def test_a_stream_that_ends_early_is_said(tmp_path, monkeypatch):
    whole = gzip.compress(made_text().encode())
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.gz is truncated: nothing can be read after [\d,]+ bytes"):
        TextDataModule(str(tmp_path / "cut.gz")).setup()
    (tmp_path / "no.gz").write_bytes(b"plain")
    with pytest.raises(ValueError, match="is not a valid gzip file"):
        TextDataModule(str(tmp_path / "no.gz")).setup()

    class Cut:
        info = corpus.datasets.DatasetInfo(splits=[{"name": "train", "num_examples": 3}])

        def __iter__(self):
            return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setattr(corpus.datasets, "load_dataset", lambda *args, **options: Cut())
    with pytest.raises(ValueError, match="'a/b' is truncated: it ends after 2 of the 3 rows"):
        list(hub_texts("a/b", None, "train", "text", True).pieces())


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match="Only one of `path` and `dataset`"):
        TextDataModule("a.txt", dataset="b").setup()
    with pytest.raises(ValueError, match="`vocabulary` must contain single characters, but contains 'ab'"):
        TextDataModule(cleaning="none", vocabulary=["a", "ab"]).setup()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        TextDataModule(str(tmp_path / "none.txt")).setup()
    with pytest.raises(ValueError, match="contains none"):
        TextDataModule(str(tmp_path)).setup()
    (tmp_path / "marks.txt").write_text("?!... --")
    with pytest.raises(ValueError, match="nothing remains"):
        TextDataModule(str(tmp_path / "marks.txt")).setup()
    (tmp_path / "empty.txt").write_text("")
    for name, cleaning, streaming in itertools.product(("marks", "empty"), ("letters", "paper"), (False, True)):
        with pytest.raises(ValueError, match=f"nothing remains of .*{name}.txt after cleaning"):
            TextDataModule(
                str(tmp_path / f"{name}.txt"), cleaning=cleaning, streaming=streaming, data_dir=str(tmp_path / "data")
            ).setup()
    with pytest.raises(ValueError, match="`cleaning` must be one of letters, paper, none, but is 'words' instead"):
        TextDataModule(cleaning="words").setup()
    with pytest.raises(ValueError, match="`sequence_length` must be positive"):
        TextDataModule(sequence_length=0).setup()


@pytest.mark.parametrize("cleaning", ["letters", "none"])
def test_an_empty_text_is_refused_when_streaming(tmp_path, cleaning):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"The training text must not be empty, but nothing remains of .*empty.txt"):
        TextDataModule(str(tmp_path / "empty.txt"), cleaning=cleaning, streaming=True, data_dir=str(tmp_path)).setup()
