"""Reading one's own files: every format gives the same sequences, and every mistake a sentence that helps."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from lightning.pytorch import Trainer

from datamodules import FileDataModule
from lightning_hmm import StandardHMM
from lightning_hmm.training import quiet_lightning
from lightning_hmm.vocabulary import MISSING, Vocabulary

ALL = {"val_fraction": 0.0, "test_fraction": 0.0}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory; caches go to data/cache in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(name, "wb") if name.endswith(".gz") else open(name, "wb") as file:
        file.write(text.encode())
    return name


def write_table(name: str, columns: dict[str, list]) -> str:
    """The same table in any of the formats."""
    kind = name.removesuffix(".gz").rsplit(".", 1)[1]
    if kind == "parquet":
        pa.parquet.write_table(pa.table(columns), name.removesuffix(".gz"))
        return write(name, Path(name).read_bytes().decode("latin-1")) if name.endswith(".gz") else name
    rows = list(zip(*columns.values(), strict=True))
    if kind == "jsonl":
        return write(name, "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    mark = "\t" if kind == "tsv" else ","
    cells = [list(columns), *rows]
    return write(name, "".join(mark.join("" if cell is None else str(cell) for cell in row) + "\n" for row in cells))


def ready(path, **words) -> FileDataModule:
    data = FileDataModule(path, **{**ALL, **words})
    data.setup()
    return data


def train(path, **words) -> list:
    return ready(path, **words).train_sequences.tolist()


TABLES = ["x.csv", "x.tsv", "x.csv.gz", "x.tsv.gz", "x.parquet", "x.jsonl", "x.jsonl.gz"]


@pytest.mark.parametrize("name", TABLES)
class TestTables:
    def test_names_become_numbers(self, folder, name):
        write_table(name, {"id": ["b", "a", "b", "a", "c"], "word": ["so", "to", "be", "or", "so"]})
        data = ready(name, sequence_column="id")
        assert (data.num_symbols, data.num_features) == (4, None)
        assert data.vocabulary == Vocabulary(["be", "or", "so", "to"])
        # sequences in the order in which they begin, steps in the order of the file, ids scattered
        assert data.train_sequences.tolist() == [[2, 0], [3, 1], [2]]

    def test_whole_numbers_are_symbols(self, folder, name):
        write_table(name, {"id": [1, 1, 2, 2, 2], "x": [0, 4, 2, None, 1]})
        data = ready(name, sequence_column="id")
        assert (data.num_symbols, data.num_features, data.vocabulary) == (5, None, None)
        assert data.train_sequences.tolist() == [[0, 4], [2, MISSING, 1]]

    def test_several_columns_are_vectors(self, folder, name):
        write_table(name, {"x": [0.5, 1.5, None], "id": ["u", "v", "u"], "y": [1, 2, 3], "note": ["p", "q", "r"]})
        data = ready(name, sequence_column="id", columns=["y", "x"])
        assert (data.num_symbols, data.num_features, data.vocabulary) == (None, 2, None)
        assert data.train_sequences.values.dtype == torch.float64
        torch.testing.assert_close(
            data.train_sequences.values,
            torch.tensor([[1, 0.5], [3, torch.nan], [2, 1.5]], dtype=torch.float64),
            equal_nan=True,
            rtol=0,
            atol=0,
        )
        assert data.train_sequences.lengths.tolist() == [2, 1]

    def test_a_file_is_one_sequence_without_ids(self, folder, name):
        write_table(name, {"x": [0.5, 1.5]})
        assert train(name) == [[[0.5], [1.5]]]

    def test_kind_overrides_what_it_looks_like(self, folder, name):
        write_table(name, {"x": [0, 2], "y": [1.0, None]})
        assert train(name, columns=["x"], kind="vectors") == [[[0.0], [2.0]]]
        assert train(name, columns=["y"], kind="symbols") == [[1, MISSING]]
        data = ready(name, columns=["x"], vocabulary=["2", "1", "0"])
        assert data.train_sequences.tolist() == [[2, 0]]
        assert data.num_symbols == 3

    def test_missing_token(self, folder, name):
        write_table(name, {"w": ["a", "?", "b"], "x": [0, 9, 1], "y": [0.5, 9.0, 1.5]})
        assert train(name, columns=["w"], missing_token="?") == [[0, MISSING, 1]]
        assert train(name, columns=["x"], missing_token="9") == [[0, MISSING, 1]]
        for token in ("9.0", "9", " 9 ", "9e0"):  # any way to write the number
            y = ready(name, columns=["y"], missing_token=token).train_sequences.values.flatten()
            assert y[[0, 2]].tolist() == [0.5, 1.5]
            assert y[1].isnan()
        assert train(name, columns=["x"], missing_token="9.0") == [[0, MISSING, 1]]

    def test_missing_token_as_text(self, folder, name):
        write_table(name, {"w": ["a", " NA", "b"], "x": ["1", "-99", "2"], "y": ["1", "-99.0", "one"]})
        assert train(name, columns=["w"], missing_token="NA") == [[0, MISSING, 1]]
        assert train(name, columns=["x"], missing_token="-99.0", kind="vectors")[0][::2] == [[1.0], [2.0]]
        assert ready(name, columns=["y"], missing_token="-99").vocabulary.names == ["1", "one"]
        assert ready(name, columns=["x"], missing_token="-99.0", unknown="?").vocabulary.names == ["?", "1", "2"]


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.jsonl.gz"])
class TestLists:
    def test_names(self, folder, name):
        write_table(name, {"n": [1, 2, 3], "words": [["b", "a"], [], ["c", None]]})
        assert train(name, columns=["words"]) == [[1, 0], [], [2, MISSING]]

    def test_numbers(self, folder, name):
        write_table(name, {"x": [[0, 3], [1]], "y": [[0.5], [1.0, 2.0]]})
        assert train(name, columns=["x"]) == [[0, 3], [1]]
        assert train(name, columns=["y"]) == [[[0.5]], [[1.0], [2.0]]]

    def test_vectors(self, folder, name):
        write_table(name, {"x": [[[1.0, 2.0], [3.0, None]], [None, [5.0, 6.0]]]})
        data = ready(name)
        nan = torch.nan
        expected = torch.tensor([[1, 2], [3, nan], [nan, nan], [5, 6]], dtype=torch.float64)
        torch.testing.assert_close(data.train_sequences.values, expected, equal_nan=True, rtol=0, atol=0)
        assert data.num_features == 2

    @pytest.mark.parametrize("token", ["-9", "-9.0"])
    def test_missing_token(self, folder, name, token):
        write_table(
            name, {"x": [[[1, 2], [-9, 4]]], "y": [[[1.5, -9.0]]], "z": [[1, -9]], "w": [[["1", "-9"], ["2", "3"]]]}
        )
        nan = torch.nan
        for column, expected in (("x", [[1, 2], [nan, 4]]), ("w", [[1, nan], [2, 3]])):
            values = ready(name, columns=[column], missing_token=token).train_sequences.values
            torch.testing.assert_close(
                values, torch.tensor(expected, dtype=torch.float64), equal_nan=True, rtol=0, atol=0
            )
        with pytest.raises(ValueError, match=r"entry 1 of column 'y' of x.* has none"):
            FileDataModule(name, columns=["y"], missing_token=token).setup()
        assert train(name, columns=["z"], missing_token=token) == [[1, MISSING]]

    def test_lists_in_vectors_are_refused(self, folder, name):
        write_table(name, {"x": [[[[1.0]], [[2.0]]], [[[3.0]]]]})
        with pytest.raises(ValueError, match=r"Vectors must contain numbers, but row 1 of x.* contains nested lists"):
            FileDataModule(name).setup()

    def test_mistakes(self, folder, name):
        write_table(name, {"n": [1, 2], "x": [[[1.0, 2.0]], [[3.0]]], "y": [[1], None]})
        with pytest.raises(ValueError, match=r"2 features like the first, but row 2 of x.* has 1 instead"):
            FileDataModule(name, columns=["x"]).setup()
        with pytest.raises(
            ValueError, match=r"Column 'y' must contain lists, but row 2 of x.* is null. Use an empty list"
        ):
            FileDataModule(name, columns=["y"]).setup()
        with pytest.raises(ValueError, match=r"must be the only one, but 'x' .* Set `columns` to it alone"):
            FileDataModule(name).setup()
        with pytest.raises(ValueError, match="Symbols must be in one column, but there are vectors"):
            FileDataModule(name, columns=["x"], kind="symbols").setup()


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz"])
class TestText:
    TEXT = "so be\r\n\r\n  to  be é\n"

    def words(self, name, **words) -> list:
        data = ready(write(name, self.TEXT), **words)
        return [data.vocabulary.decode(sequence) for sequence in data.train_sequences.tolist()]

    def test_words(self, folder, name):
        assert self.words(name) == [["so", "be"], ["to", "be", "é"]]
        assert self.words(name, sequence_per="file") == [["so", "be", "to", "be", "é"]]

    def test_characters(self, folder, name):
        assert self.words(name, unit="char") == [list("so be"), list("  to  be é")]
        assert self.words(name, unit="char", sequence_per="file") == [list("so be\n\n  to  be é\n")]

    def test_a_line_is_a_token(self, folder, name):
        assert self.words(name, unit="line-tokens") == [["so be"], ["to  be é"]]
        assert self.words(name, unit="line-tokens", sequence_per="file") == [["so be", "to  be é"]]

    def test_missing_token(self, folder, name):
        assert self.words(name, missing_token="be") == [["so", None], ["to", None, "é"]]
        assert self.words(name, unit="char", missing_token=" ")[0] == ["s", "o", None, "b", "e"]


def test_several_files_a_folder_and_a_pattern(folder):
    write("walks/b.csv", "x\n0.5\n1.5\n")
    write("walks/a.csv.gz", "x\n2.5\n")
    write("walks/notes.md", "nothing to read")
    write("data/c.csv", "x\n3.5\n")
    a, b, c = [[2.5]], [[0.5], [1.5]], [[3.5]]
    assert train("walks") == train("walks/*.csv*") == train(str(folder / "walks")) == [a, b]
    assert train(["walks/b.csv", "walks/a.csv.gz"]) == [b, a]
    assert train("c.csv") == [c]  # found under data_dir
    assert train(["walks", "c.csv"]) == [a, b, c]


def test_ids_belong_to_their_file_and_types_to_all_files(folder):
    write("a.csv", "id,x\n1,7\n1,8\n")
    write("b.csv", "id,x\n1,9\n2,z\n")
    data = ready(["a.csv", "b.csv"], sequence_column="id")
    assert data.vocabulary.names == ["7", "8", "9", "z"]
    assert data.train_sequences.tolist() == [[0, 1], [2], [3]]


def test_ids_of_any_type(folder):
    ids = (
        pa.array([20, 10, 20], pa.date32()),
        pa.array(["q", "p", "q"]).dictionary_encode(),
        pa.DictionaryArray.from_arrays([1, 0, 1], ["p", "q"]),
    )
    for column in ids:
        pa.parquet.write_table(pa.table({"id": column, "x": [0, 1, 2]}), "x.parquet")
        assert train("x.parquet", sequence_column="id") == [[0, 2], [1]]


def test_own_paths_for_val_and_test(folder):
    write("train.txt", "a b\nb c\n")
    write("val.txt", "c\n")
    write("test.txt", "b\na\n")
    data = ready("train.txt", val_path="val.txt", test_path="test.txt", val_fraction=0.5)
    assert data.train_sequences.tolist() == [[0, 1], [1, 2]]
    assert data.val_sequences.tolist() == [[2]]
    assert data.test_sequences.tolist() == [[1], [0]]
    assert [batch.tolist() for batch in data.predict_dataloader()] == [[[0, 1], [1, 2]]]  # what `path` leads to


def test_vocabulary_is_that_of_the_training_part(folder):
    write("train.txt", "b d\n")
    write("val.txt", "d\na c\n")
    with pytest.raises(
        ValueError, match=r"must be in the training part, but 'a' in line 2 of val.txt is not. Set `unknown`"
    ):
        FileDataModule("train.txt", val_path="val.txt").setup()
    data = ready("train.txt", val_path="val.txt", unknown="<unk>")
    assert data.vocabulary == Vocabulary(["<unk>", "b", "d"], "<unk>")
    assert data.num_symbols == 3
    assert data.train_sequences.tolist() == [[1, 2]]
    assert data.val_sequences.tolist() == [[2], [0, 0]]


def test_vocabulary_of_a_random_split(folder):
    write("x.txt", "".join(f"w{n}\n" for n in range(10)))
    data = ready("x.txt", unknown="?", val_fraction=0.2, test_fraction=0.1)
    assert data.num_symbols == 8  # 7 words in 7 training sequences, and the unknown one
    assert sorted(data.train_sequences.values.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert set(data.val_sequences.values.tolist() + data.test_sequences.values.tolist()) == {0}
    with pytest.raises(ValueError, match=r"in line [0-9]+ of x.txt is not"):
        FileDataModule("x.txt", val_fraction=0.2).setup()


def test_given_vocabulary(folder):
    write("x.csv", "x\nb\n\na\n")
    data = ready("x.csv", vocabulary=["c", "b", "a"])
    assert data.train_sequences.tolist() == [[1, MISSING, 2]]  # an empty line is an empty cell
    assert data.vocabulary.names == ["c", "b", "a"]
    assert data.num_symbols == 3
    with pytest.raises(ValueError, match=r"must be in `vocabulary`, but 'b' in row 1 of x.csv is not"):
        FileDataModule("x.csv", vocabulary=["a"]).setup()
    assert train("x.csv", vocabulary=["a", "?"], unknown="?") == [[1, MISSING, 0]]
    with pytest.raises(ValueError, match="`unknown` must be one of the names, but is '!'"):
        FileDataModule("x.csv", vocabulary=["a"], unknown="!").setup()


def test_the_row_in_an_error_is_that_of_the_file_even_when_ids_are_scattered(folder):
    write("a.csv", "id,x\n1,p\n2,p\n1,q\n")
    write("b.csv", "id,x\n2,p\n1,p\n2,r\n1,r\n")
    with pytest.raises(ValueError, match=r"'r' in row 3 of b.csv"):
        FileDataModule(["a.csv", "b.csv"], sequence_column="id", vocabulary=["p", "q"]).setup()


def test_names_that_look_like_missing_numbers_stay_names(folder):
    write("x.csv", "x,y\nnull,nan\nNaN, 2\nok,null\n")
    assert ready("x.csv", columns=["x"]).vocabulary.names == ["NaN", "null", "ok"]
    assert train("x.csv", columns=["y"]) == [[MISSING, 2, MISSING]]


def test_text_that_is_numbers_after_all(folder):
    write_table("x.parquet", {"x": ["1", " 2.5 ", "nan"], "y": ["1", " 2", "x"]})
    values = ready("x.parquet", columns=["x"], kind="vectors").train_sequences.values.flatten()
    assert values[:2].tolist() == [1.0, 2.5]
    assert values[2].isnan()
    assert ready("x.parquet", columns=["x"]).vocabulary.names == [" 2.5 ", "1", "nan"]
    with pytest.raises(ValueError, match=r"Vectors must be numbers, but row 3 of x.parquet has 'x' instead"):
        FileDataModule("x.parquet", kind="vectors").setup()


def test_numbers_are_those_of_people(folder):
    """Arrow also reads 0x1F as a whole number, but +1 only as a real one."""
    write("x.csv", "hex,plus,both,real\n0x1F,+1,-1,+1.5\n0x20,0,+0,1e1\n")
    assert ready("x.csv", columns=["hex"]).vocabulary.names == ["0x1F", "0x20"]
    assert train("x.csv", columns=["plus"]) == [[1, 0]]
    assert train("x.csv", columns=["both"]) == [[MISSING, 0]]
    assert train("x.csv", columns=["real"]) == [[[1.5], [10.0]]]
    with pytest.raises(ValueError, match=r"Vectors must be numbers, but row 1 of x.csv has '0x1F' instead"):
        FileDataModule("x.csv", columns=["hex"], kind="vectors").setup()


def test_names_that_look_like_dates_are_names(folder):
    rows = [("2015-03-04", "2020-01-01"), ("2015-03-04 00:00:00", "2020-01-02"), ("2015-03-04", "2020-01-01")]
    write(
        "x.jsonl",
        "".join(json.dumps({"id": name, "x": day, "days": [day], "pairs": [[day]]}) + "\n" for name, day in rows),
    )
    data = ready("x.jsonl", columns=["x"], sequence_column="id")
    assert data.vocabulary.names == ["2020-01-01", "2020-01-02"]
    assert data.train_sequences.tolist() == [[0, 0], [1]]
    assert train("x.jsonl", columns=["days"]) == [[0], [1], [0]]


def test_line_breaks_in_quotes(folder):
    """Over many of Arrow's blocks of 1 MB."""
    rows = 150_000
    write("one.csv", "a\n" + "".join(f'"word{n % 3}\nmore"\n' for n in range(rows)))
    data = ready("one.csv")
    assert data.vocabulary.names == ["word0\nmore", "word1\nmore", "word2\nmore"]
    assert torch.equal(data.train_sequences.values, torch.arange(rows) % 3)
    write("two.csv", "note,x\n" + "".join(f'"long\n{n},note",{n % 7}\n' for n in range(rows)))
    assert torch.equal(ready("two.csv", columns=["x"]).train_sequences.values, torch.arange(rows) % 7)


@pytest.mark.parametrize("options", [{}, {"columns": ["v"]}])
def test_a_quote_that_is_never_closed_is_refused(folder, options):
    write("open.csv", "id,note,v\n" + "".join(f"{n},{chr(34) if n == 30 else 'fine'},{n % 3}\n" for n in range(100)))
    with pytest.raises(
        ValueError, match=r"row that begins in line 32 of .*open\.csv has a quoted cell without a closing quote"
    ):
        ready("open.csv", sequence_column="id", **options)
    write(
        "inch.csv", "id,note,v\n" + "".join(f"{n},5{chr(34)} pipe,{n % 3}\n" for n in range(101))
    )  # a quote inside a cell is no quoted cell
    assert len(ready("inch.csv", columns=["v"]).train_sequences.values) > 50


def test_columns_are_matched_by_name(folder):
    write("a.csv", "id,x,y\n1,1.5,100\n")
    write("b.csv", "y,id,x\n300,1,3.5\n")
    write("c.csv", "id,x,z\n1,1.5,100\n")
    a, b = [[1.5, 100.0]], [[3.5, 300.0]]
    assert train(["a.csv", "b.csv"], sequence_column="id") == [a, b]
    data = ready("a.csv", sequence_column="id", val_path="b.csv", test_path="b.csv")
    assert data.val_sequences.tolist() == data.test_sequences.tolist() == [b]
    message = r"All files must have the same columns, but c.csv has x, z and a.csv has x, y. Choose them with `columns`"
    for options in ({"path": ["a.csv", "c.csv"]}, {"path": "a.csv", "val_path": "c.csv"}):
        with pytest.raises(ValueError, match=message):
            FileDataModule(**options, sequence_column="id").setup()


@pytest.mark.parametrize("standardize", [False, True])
def test_columns_of_a_new_file_are_those_of_training(folder, standardize):
    write("train.csv", "id,x,y\n1,1,100\n1,2,200\n1,6,300\n")
    write("new.csv", "y,id,x\n500,1,7\n700,1,8\n")
    trained = ready("train.csv", sequence_column="id", standardize=standardize)
    new = ready("new.csv", sequence_column="id", standardize=standardize)
    new.load_state_dict(trained.state_dict())
    expected = torch.tensor([[7.0, 500], [8, 700]], dtype=torch.float64)
    torch.testing.assert_close(
        new.train_sequences.values, (expected - trained.mean) / trained.std if standardize else expected
    )
    same = ready("train.csv", sequence_column="id", standardize=standardize)
    same.load_state_dict(trained.state_dict())
    assert same.train_sequences.tolist() == trained.train_sequences.tolist()

    write("other.csv", "id,x,z\n1,1,100\n1,2,200\n")
    other = ready("other.csv", sequence_column="id", standardize=standardize)
    with pytest.raises(
        ValueError,
        match=r"columns that the model was trained on, x, y, but have x, z. Choose them with `columns`, in that order",
    ):
        other.load_state_dict(trained.state_dict())
    chosen = ready("other.csv", columns=["x", "z"], standardize=standardize)
    chosen.load_state_dict(trained.state_dict())  # chosen by the user: the first is the first in training
    expected = torch.tensor([[1.0, 100], [2, 200]], dtype=torch.float64)
    torch.testing.assert_close(
        chosen.train_sequences.values, (expected - trained.mean) / trained.std if standardize else expected
    )


def test_columns_and_units_go_with_a_checkpoint(folder):
    """Log-likelihoods of new data do not depend on the order of the columns, and a feature may be constant in them."""
    write("train.csv", "id,x,y\n" + "".join(f"{n // 10},{n % 3},{100 * (n % 7)}\n" for n in range(80)))
    write("same.csv", "id,x,y\n1,2,300\n1,2,500\n2,2,0\n")
    write("other.csv", "y,id,x\n300,1,2\n500,1,2\n0,2,2\n")
    options = {"sequence_column": "id", "standardize": True, **ALL}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    model = StandardHMM(num_states=2, emission="gaussian", num_features=2)
    found = []
    with quiet_lightning(announcements=False):
        trainer = Trainer(max_epochs=2, **quiet)
        trainer.fit(model, datamodule=FileDataModule("train.csv", **options))
        trainer.save_checkpoint("last.ckpt")
        for path in ("same.csv", "other.csv"):
            data = FileDataModule(path, **options)
            Trainer(**quiet).predict(model, datamodule=data, ckpt_path="last.ckpt", weights_only=True)
            found.append(model.score(data.train_sequences))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_the_name_of_a_single_column_is_that_of_training(folder):
    write("train.csv", "word\na\nb\n")
    write("new.csv", "letter\na\nb\n")
    state = ready("train.csv").state_dict()
    with pytest.raises(ValueError, match=r"trained on, word, but have letter"):
        ready("new.csv").load_state_dict(state)
    for fitting in (ready("new.csv", columns=["letter"]), ready(write("new.txt", "a\nb\n"))):
        fitting.load_state_dict(state)
        assert fitting.vocabulary.names == ["a", "b"]


def test_a_constant_feature_in_the_units_of_training(folder):
    write("train.csv", "x,y\n1,10\n2,20\n6,30\n")
    write("new.csv", "x,y\n11,95\n")
    trained, new = ready("train.csv", standardize=True), ready("new.csv", standardize=True)
    with pytest.raises(
        ValueError,
        match=r"must vary in the training part, but column 'x' is always 1+ there. Leave it out of `columns`",
    ):
        new.predict_dataloader()
    new.load_state_dict(trained.state_dict())
    torch.testing.assert_close(
        new.train_sequences.values, (torch.tensor([[11.0, 95.0]], dtype=torch.float64) - trained.mean) / trained.std
    )


@pytest.mark.parametrize("name", TABLES)
def test_files_and_columns_without_an_observation_are_refused(folder, name):
    write_table(name, {"id": [1, 2], "x": [None, None], "y": [1.5, None], "w": ["?", "?"], "m": [-1, -1]})
    other = write_table(
        "other." + name, {"id": [1, 2], "x": [0.0, 2.0], "y": [1.5, None], "w": ["a", "b"], "m": [0, 1]}
    )
    for options in (
        {"columns": ["x"]},
        {"columns": ["y", "x"]},
        {"columns": ["y", "x"], "sequence_column": "id"},
        {"columns": ["x"], "kind": "symbols"},
    ):
        with pytest.raises(ValueError, match=rf"column 'x' of {name} has none"):
            FileDataModule(name, **options).setup()
        with pytest.raises(ValueError, match=rf"column 'x' of {name} has none"):
            FileDataModule([other, name], **options).setup()
    with pytest.raises(ValueError, match=rf"column 'w' of {name} has none"):
        FileDataModule(other, val_path=name, columns=["w"], missing_token="?").setup()
    with pytest.raises(ValueError, match=rf"column 'm' of {name} has none"):
        FileDataModule([other, name], columns=["m"]).setup()


def test_a_text_without_an_observation_is_refused(folder):
    write("a.txt", "so be\n")
    write("b.txt", "? ?\n?\n")
    with pytest.raises(ValueError, match=r"but b.txt has none"):
        FileDataModule(["a.txt", "b.txt"], missing_token="?").setup()


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deeply_nested_json_is_refused(folder, opening):
    """Arrow's reader overflows the stack, which ends the process."""
    closing = "]" if opening == "[" else "}"
    for depth in (200, 100_000):
        write("x.jsonl", '{"x": 1}\n{"x": 2, "y": ' + opening * depth + "1" + closing * depth + "}\n")
        with pytest.raises(
            ValueError, match=rf"x.jsonl must not be nested deeper than 100 levels, but line 2 has {depth + 1}"
        ):
            FileDataModule("x.jsonl", columns=["x"]).setup()


@pytest.mark.parametrize("text", ["null\n", '  null {"x": 1}\n', "[1, 2]\n", "3\n"])
def test_json_without_objects_is_refused(folder, text):
    """Arrow's reader crashes on the first two."""
    with pytest.raises(
        ValueError, match=r"x.jsonl must be a jsonl file, with one object per line such as .* but begins with b'"
    ):
        FileDataModule(write("x.jsonl", text)).setup()
    assert train(write("x.jsonl", '\ufeff{"x": 1}\n')) == [[1]]


def test_brackets_in_strings_are_not_nested(folder):
    brackets = "[" * 1000
    write("x.jsonl", "".join(json.dumps({"x": n, "note": f'"{brackets}\\'}) + "\n" for n in range(3)))
    assert train("x.jsonl", columns=["x"]) == [[0, 1, 2]]


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
def test_two_columns_of_one_name(folder, name):
    if name == "x.csv":
        write(name, "a,b,a\n1,2,3\n")
    else:
        pa.parquet.write_table(pa.table([[1], [2], [3]], ["a", "b", "a"]), name)
    for options in ({}, {"columns": ["a"]}, {"columns": ["b"], "sequence_column": "a"}):
        with pytest.raises(ValueError, match=rf"Columns must have different names, but {name} has 2 columns 'a'"):
            FileDataModule(name, **options).setup()
    assert train(name, columns=["b"]) == [[2]]


def test_standardize(folder):
    write("train.csv", "id,x,y\na,1,10\na,2,\nb,3,30\nb,6,50\n")
    write("val.csv", "id,x,y\nc,3,70\n")
    data = ready("train.csv", val_path="val.csv", sequence_column="id", columns=["x", "y"], standardize=True)
    values = data.train_sequences.values
    mean, std = torch.tensor([3.0, 30.0], dtype=torch.float64), torch.tensor([3.5, 800 / 3], dtype=torch.float64).sqrt()
    torch.testing.assert_close(data.mean, mean)
    torch.testing.assert_close(data.std, std)
    torch.testing.assert_close(values.nanmean(0), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(
        data.val_sequences.values, (torch.tensor([[3.0, 70.0]], dtype=torch.float64) - mean) / std
    )
    assert values.isnan().nonzero().tolist() == [[1, 1]]
    write("flat.csv", "x,y\n1,2\n1,3\n")
    with pytest.raises(
        ValueError,
        match=r"must vary in the training part, but column 'x' is always 1+ there. Leave it out of `columns`",
    ):
        ready("flat.csv", standardize=True).train_dataloader()
    write("words.txt", "a b\n")
    with pytest.raises(ValueError, match=r"`standardize` applies to vectors, but words.txt contains symbols"):
        FileDataModule("words.txt", standardize=True).setup()


def test_standardize_looks_at_the_training_part_only(folder):
    write("x.jsonl", "".join(json.dumps({"x": [float(n), n + 0.5]}) + "\n" for n in range(20)))
    data = ready("x.jsonl", standardize=True, val_fraction=0.25, test_fraction=0.25)
    torch.testing.assert_close(
        data.train_sequences.values.mean(), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(data.train_sequences.values.std(correction=0), torch.ones((), dtype=torch.float64))
    assert data.val_sequences.values.mean().abs() > 1e-3


def test_reads_again_only_if_file_or_options_change(folder, monkeypatch):
    write("x.csv", "x,y\n1,2\n0,1\n")
    assert train("x.csv", columns=["x"]) == [[1, 0]]
    assert train("x.csv", columns=["y"]) == [[2, 1]]
    write("x.csv", "x,y\n3,2\n0,1\n5,5\n")
    assert train("x.csv", columns=["x"]) == [[3, 0, 5]]
    monkeypatch.setattr("pyarrow.csv.read_csv", None)
    data = ready("x.csv", columns=["x"], batch_size=1)
    assert data.num_symbols == 6
    assert data.train_sequences.tolist() == [[3, 0, 5]]
    assert data._source("train")[0].values.data_ptr() == data._values().values.data_ptr()  # memory-mapped, not copied


def test_long_lines_and_many_rows(folder):
    write(
        "x.jsonl", json.dumps({"x": list(range(300_000))}) + "\n" + '{"x": [0]}\n'
    )  # a line of 2 MB, more than a block
    assert ready("x.jsonl").train_sequences.lengths.tolist() == [300_000, 1]
    write("x.csv", "id,x\n" + "".join(f"{n % 3},{n}\n" for n in range(100_000)))
    values = ready("x.csv", sequence_column="id").train_sequences
    assert values.lengths.tolist() == [33334, 33333, 33333]
    assert torch.equal(values[1], torch.arange(1, 100_000, 3))


def test_batches_of_a_text(folder):
    data = ready(write("x.txt", "a b\nb\na a a\n"), batch_size=2)
    assert [batch.tolist() for batch in data.train_dataloader()] == [[[0, 1], [1]], [[0, 0, 0]]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"format": "xls"}, "`format` must be one of auto, csv, parquet, jsonl, text, but is 'xls' instead"),
        ({"kind": "words"}, "`kind` must be one of auto, symbols, vectors, but is 'words' instead"),
        ({"unit": "byte"}, "`unit` must be one of char, word, line-tokens, but is 'byte' instead"),
        ({"sequence_per": "page"}, "`sequence_per` must be one of line, file, but is 'page' instead"),
        ({"kind": "vectors", "unknown": "?"}, "`vocabulary` and `unknown` apply to symbols, but `kind` is 'vectors'"),
        ({"columns": ["z"]}, "`columns` must be in the file, but x.csv has no column 'z'. It has id, x, y, w, i"),
        (
            {"sequence_column": "z"},
            "`sequence_column` must be in the file, but x.csv has no column 'z'. It has id, x, y, w, i",
        ),
        (
            {"columns": ["w"], "kind": "vectors"},
            "Vectors must be numbers, but row 2 of x.csv has 'two' instead. Set `columns`",
        ),
        ({"columns": ["x", "w"]}, "Vectors must be numbers, but row 2 of x.csv has 'two' instead"),
        (
            {"columns": ["x", "y"], "kind": "symbols"},
            "Symbols must be in one column, but there are 2 columns. Choose one with `columns`",
        ),
        (
            {"columns": ["y"], "kind": "symbols"},
            "integers from 0, .* but row 3 of x.csv has 0.5 instead. To read them as names",
        ),
        ({"columns": ["x", "i"]}, "Vectors must be finite, but row 3 of x.csv has inf instead"),
        ({"columns": ["i"], "kind": "symbols"}, "integers from 0, .* but row 3 of x.csv has inf instead"),
        ({"columns": ["x"]}, "integers from 0, .* but row 3 of x.csv has -3 instead"),
        ({"columns": ["x"], "format": "text"}, "`columns` applies to tables, but the files are text"),
        ({"action_column": "x", "format": "text"}, "`action_column` applies to tables, but the files are text"),
        (
            {"columns": ["x"], "sequence_column": "id"},
            "`sequence_column` must have a value in each row, but row 2 of x.csv is empty",
        ),
    ],
)
def test_wrong_words(folder, words, message):
    write("x.csv", "id,x,y,w,i\na,1,1,1,1\n,2,2,two,2\nb,-3,0.5,3,inf\n")
    with pytest.raises(ValueError, match=message):
        FileDataModule("x.csv", **words).setup()


def test_wrong_files(folder):
    write("here/a.csv", "x\n1\n")
    with pytest.raises(
        FileNotFoundError,
        match=r"`path` must match a file, but 'here/b.csv' matches none, here or under data. here/ contains a.csv",
    ):
        FileDataModule("here/b.csv").setup()
    with pytest.raises(
        FileNotFoundError, match=r"`val_path` must match a file, but 'nowhere/b.csv' matches none.* No such folder"
    ):
        FileDataModule("here/a.csv", val_path="nowhere/b.csv").setup()
    with pytest.raises(ValueError, match="`path` must name at least one file, but is an empty list"):
        FileDataModule([]).setup()
    for name, text in (
        ("empty.csv", ""),
        ("empty.txt", ""),
        ("empty.jsonl", ""),
        ("empty.csv.gz", ""),
        ("head.csv", "x,y\n"),
        ("blank.txt", "\n \n"),
        ("none.jsonl", '{"x": []}\n'),
    ):
        with pytest.raises(ValueError, match=f"{name} must not be empty, but"):
            FileDataModule(write(name, text)).setup()
    write("all.csv", 'x,y\n"",1\n"",2\n')
    with pytest.raises(ValueError, match=r"column 'x' of all.csv has none. Remove it from `columns`"):
        FileDataModule("all.csv", columns=["x"]).setup()
    with pytest.raises(ValueError, match=r"`format` must be given for x.dat, because its ending is none of .csv"):
        FileDataModule(write("x.dat", "x\n1\n")).setup()
    assert train("x.dat", format="csv") == [[1]]
    assert train(write("x.dat", "x;y\n1;2\n"), format="csv", delimiter=";", columns=["y"]) == [[2]]
    write("mixed/a.csv", "x\n1\n")
    write("mixed/a.txt", "x\n1\n")
    with pytest.raises(
        ValueError, match=r"files of one format, but they are csv, text. Use a narrower pattern, or set `format`"
    ):
        FileDataModule("mixed").setup()
    with pytest.raises(ValueError, match=r"ragged.csv must be a csv file, but cannot be read as one"):
        FileDataModule(write("ragged.csv", "x,y\n1\n1,2,3\n")).setup()
    with pytest.raises(ValueError, match=r"broken.jsonl must be a jsonl file, but cannot be read as one"):
        FileDataModule(write("broken.jsonl", '{"x": 1}\n{"x": ')).setup()
    with pytest.raises(ValueError, match=r"fake.parquet must be a parquet file, but cannot be read as one"):
        FileDataModule(write("fake.parquet", "not parquet at all")).setup()
    Path("latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt must be a text file, but cannot be read as one"):
        FileDataModule("latin.txt").setup()
    pa.parquet.write_table(pa.table({"x": pa.array([0], pa.timestamp("s"))}), "dates.parquet")
    with pytest.raises(ValueError, match=r"dates.parquet must be a parquet file, .* a column of timestamp"):
        FileDataModule("dates.parquet").setup()
    write("one.csv", "x\n1\n")
    write("two.csv", "x,y\n1,2\n")
    with pytest.raises(ValueError, match=r"must have the same columns, but two.csv has x, y and one.csv has x"):
        FileDataModule(["one.csv", "two.csv"]).setup()
    write("text.jsonl", '{"x": "a"}\n')
    write("number.jsonl", '{"x": 1}\n')
    with pytest.raises(
        ValueError, match=r"Columns must have the same type in all files, but differ in text.jsonl, number.jsonl"
    ):
        FileDataModule(["text.jsonl", "number.jsonl"]).setup()
