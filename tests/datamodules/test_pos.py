"""Tags from every format, and what is said about those that do not parse."""

import gzip
from pathlib import Path

import pytest
import torch

from datamodules import POSDataModule
from datamodules.pos import FIRST, NEXT, ROLES

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


def tags(*args, **words) -> list[list[str | None]]:
    data = POSDataModule(*args, **{**ALL, **words})
    data.setup()
    return [data.vocabulary.decode(sequence.tolist()) for sequence in data.train_sequences]


SENTENCES = [["DD", "NN", "VVD", "."], ["NN+", "NN", ","], ["("]]
MEDPOST = "P1A01\nThe_DD cell_free_NN ran_VVD ._.\n\nP2T01\n as_NN+  well_NN ,_,\nP3A1\n(_(\n"
TAGGED = "The/DD 1/2/NN ran/VVD ./.\n\n\tas/NN+ well/NN ,/,\n(/(\n"
CONLLU = """# text = The cell
1\tThe\tthe\tDD\tX\t_\t2\tdet\t_\t_
2-3\tcellran\t_\t_\t_\t_\t_\t_\t_\t_
2\tcell\tcell\tNN\tY\t_\t3\tnsubj\t_\t_
3\tran\trun\tVVD\tX\t_\t0\troot\t_\t_
3.1\tgone\tgo\tVVN\tX\t_\t_\t_\t_\t_
4\t.\t.\t.\tX\t_\t3\tpunct\t_\t_


# another
1\tas\tas\tNN+\t_\t_\t0\troot\t_\t_
2\twell\twell\tNN\tX\t_\t1\tdep\t_\t_
3\t,\t,\t,\tX\t_\t1\tpunct\t_\t_

1\t(\t(\t(\t_\t_\t0\troot\t_\t_
"""


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.ioc", MEDPOST, {}),
        ("x.ioc.gz", MEDPOST, {}),
        ("x.ioc", MEDPOST.replace("\n", "\r\n"), {}),
        ("x.conllu", CONLLU, {}),
        ("x.conllu", CONLLU.replace("\n", "\r\n").rstrip(), {}),
        ("x.pos", TAGGED, {}),
        ("ca01", TAGGED, {"format": "tagged"}),
        ("x.pos", b"\xef\xbb\xbf" + TAGGED.encode(), {}),
    ],
)
def test_every_format_gives_the_same(name, text, words):
    assert tags(write(name, text), **words) == SENTENCES


def test_the_column_of_language_specific_tags_and_missing_ones():
    assert tags(write("x.conllu", CONLLU), column="xpos") == [["X", "Y", "X", "X"], [None, "X", "X"], [None]]
    with pytest.raises(
        ValueError,
        match=r"Each file must contain tags, but in column 'xpos' of y.conllu all are missing. Set `column`",
    ):
        POSDataModule(
            [write("x.conllu", CONLLU), write("y.conllu", CONLLU.replace("\tX\t", "\t_\t").replace("\tY\t", "\t_\t"))],
            column="xpos",
        ).setup()


def test_several_files_in_their_order():
    write("b.ioc", MEDPOST)
    write("a.ioc", "P1\nx_ZZ\n")
    assert tags("*.ioc") == [["ZZ"], *SENTENCES]
    assert tags(["b.ioc", "a.ioc"]) == [*SENTENCES, ["ZZ"]]
    assert tags(["b.ioc", "a.ioc"], num_sequences=2) == SENTENCES[:2]
    assert tags(".") == [["ZZ"], *SENTENCES]


def test_preparation_and_split():
    data = POSDataModule(write("x.pos", "a/A b/B\n" * 9 + "a/A b/C d/D\n"), max_length=2, rare_fraction=0.06)
    data.setup()
    assert data.symbol_names == ["other", "A", "B"]
    assert data.unknown_symbol == "other"
    assert (len(data.train_sequences), len(data.val_sequences), len(data.test_sequences)) == (5, 0, 5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.ioc", "", "x.ioc must contain at least one tagged sentence, but has none"),
        ("x.pos", "\n \n", "x.pos must contain at least one tagged sentence, but has none"),
        ("x.conllu", "# nothing\n\n", "x.conllu must contain at least one tagged sentence, but has none"),
        ("x.ioc", "P1\na_A b\n", "Words must have the form word_TAG, but line 2 of x.ioc has the word 'b' instead"),
        ("x.ioc", "P1\na_A\nP2\na_A b_\n", "line 4 of x.ioc has the word 'b_' instead"),
        (
            "x.ioc",
            "P1\na_A\nb_B c_C\nP2\n",
            "alternate between identifiers and sentences, but line 3 of x.ioc has the identifier 'b_B c_C' instead",
        ),
        (
            "x.ioc",
            "P1\na_A\nP2\n",
            "Each identifier must be followed by its sentence, but line 3 of x.ioc is the last: 'P2'",
        ),
        ("x.pos", "a/A\n\nb c/C\n", "Words must have the form word/TAG, but line 3 of x.pos has the word 'b' instead"),
        ("x.pos", "/A\n", "line 1 of x.pos has the word '/A' instead"),
        (
            "x.conllu",
            CONLLU.replace("\t3\tpunct\t_\t_", "\t3\tpunct\t_"),
            "Words must have 10 columns separated by tabs, but line 7 of x.conllu",
        ),
        (
            "x.conllu",
            CONLLU.replace("\n3.1\t", "\n3,1\t"),
            "Words must have a number such as 1, 1-2 or 1.1, but line 6 of x.conllu has the number '3,1'",
        ),
        ("x.conllu", CONLLU.replace("\tVVD\t", "\t\t"), "Tags must not be empty, but line 5 of x.conllu"),
        ("x.ioc", b"P1\n\xff_A\n", "x.ioc must be a text in UTF-8, but cannot be read as one"),
        ("x.txt", TAGGED, "`format` must be given for x.txt, because its ending is none of .ioc, .conllu, .pos"),
    ],
)
def test_wrong_files(name, text, message):
    with pytest.raises(ValueError, match=message):
        POSDataModule(write(name, text)).setup()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"format": "brown"}, "`format` must be one of auto, medpost, conllu, tagged, but is 'brown' instead"),
        ({"column": "lemma"}, "`column` must be one of upos, xpos, but is 'lemma' instead"),
        ({"residual": "NN"}, "`residual` must not be a symbol of the data, but 'NN' is one"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        POSDataModule(**words).setup()


def test_the_tables_of_the_drawn_sentences_are_distributions():
    assert sum(FIRST) == 100
    assert [sum(row) for row in NEXT] == [100] * len(ROLES)
    assert [len(row) for row in NEXT] == [len(ROLES)] * len(ROLES)
    assert all(sum(shares.values()) == pytest.approx(100, abs=0.2) for shares in ROLES.values())


def test_drawn_sentences_are_reproducible_and_look_like_sentences():
    data = POSDataModule(num_sequences=2000, max_length=None, **ALL)
    data.setup()
    again = POSDataModule(num_sequences=2000, max_length=None, **ALL)
    again.setup()
    values, ends = data.train_sequences.values, data.train_sequences.offsets[1:] - 1
    assert torch.equal(again.train_sequences.values, values)
    stop, noun, determiner = (data.symbol_names.index(name) for name in (".", "NN", "DD"))
    assert bool((values[ends] == stop).all())
    assert int((values == stop).sum()) == 2000
    # The corpus has 27,767 tags, of which 26.4 % are NN and 7.8 % DD. A noun or modifier follows DD in 95 % of cases.
    assert (values == noun).double().mean().item() == pytest.approx(0.264, rel=0.1)
    assert (values == determiner).double().mean().item() == pytest.approx(0.078, rel=0.15)
    assert data.train_sequences.lengths.median().item() == pytest.approx(26, abs=2)
    assert data.state_names == list(ROLES)
    assert POSDataModule(num_sequences=2000).unknown_symbol == "other"
