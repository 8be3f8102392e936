"""The split, storage and loaders that all data modules share."""

import errno
import itertools
from collections.abc import Iterable
from pathlib import Path

import datasets
import lightning
import numpy as np
import pyarrow as pa
import pytest
import torch
from jsonargparse import ArgumentParser

from datamodules import FileDataModule, SequenceDataModule, SyntheticDataModule
from datamodules.base import PARTS, as_dataset, as_table
from lightning_hmm.columns import symbol_column
from lightning_hmm.sequences import Sequences

NUM = 17


class Counting(SequenceDataModule):
    """Sequence n is n times the symbol n."""

    def __init__(
        self,
        num_sequences: int = NUM,
        weighted: bool = False,
        given: dict[str, int] | None = None,
        note: object = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.columns = symbol_column(max(1, num_sequences))
        self.sizes, self.weighted = given or {"all": num_sequences}, weighted
        self.loads = 0

    def load_dataset(self):
        self.loads += 1
        made = {}
        for part, size in self.sizes.items():
            weights = [n / 2 for n in range(size)] if self.weighted else None
            sequences = Sequences.from_lengths(
                torch.arange(size).repeat_interleave(torch.arange(size)), torch.arange(size), weights
            )
            made[part] = as_dataset(as_table(sequences, sequences.with_values(sequences.values + 100)))
        return made.get("all", made)


def ready(data: SequenceDataModule) -> SequenceDataModule:
    data.setup("fit")
    return data


def numbers(batch: Sequences) -> list[int]:
    return batch.lengths.tolist()


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def test_split_is_exact_disjoint_complete_and_reproducible():
    def parts(seed: int) -> list[list[int]]:
        data = ready(Counting(100, seed=seed, val_fraction=0.29, test_fraction=0.07))
        return [numbers(data.train_sequences), numbers(data.val_sequences), numbers(data.test_sequences)]

    train, val, test = parts(0)
    assert (len(train), len(val), len(test)) == (64, 29, 7)  # 0.29 * 100 is 28.999... in floating point
    assert sorted(train + val + test) == list(range(100))
    assert parts(0) == [train, val, test]
    assert parts(1)[0] != train


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 10])
def test_something_is_always_left_to_train_on(num_sequences):
    data = ready(Counting(num_sequences, val_fraction=0.5, test_fraction=0.49))
    assert len(data.train_sequences) >= 1
    assert len(data.train_sequences) + len(data.val_sequences) + len(data.test_sequences) == num_sequences


def test_without_fractions_nothing_is_split_or_copied():
    data = ready(Counting(val_fraction=0.0, test_fraction=0.0))
    assert numbers(data.train_sequences) == list(range(NUM))
    assert len(data.val_sequences) == 0
    assert data.val_sequences.is_discrete
    assert list(data.val_dataloader()) == []
    assert data.train_sequences.values.data_ptr() == data._source("train")[0].values.data_ptr()


def test_fixed_parts_are_kept_and_the_missing_one_is_taken_from_train():
    data = ready(Counting(given={"train": NUM, "test": 3}, val_fraction=0.2, test_fraction=0.9 - 0.2))
    assert numbers(data.test_sequences) == [0, 1, 2]
    assert len(data.val_sequences) == 3
    assert len(data.train_sequences) == 14
    assert sorted(numbers(data.train_sequences) + numbers(data.val_sequences)) == list(range(NUM))


def test_states_and_weights_go_with_their_sequences():
    data = ready(Counting(weighted=True, val_fraction=0.3))
    for part in PARTS:
        states = data.true_states(part)
        sequences = data._part(part)
        assert torch.equal(states.values, sequences.values + 100)
        assert torch.equal(states.offsets, sequences.offsets)
        assert torch.equal(sequences.weights * 2, sequences.lengths.double())
    assert data.train_size == data.train_sequences.weights.sum().item()
    assert ready(Counting(val_fraction=0.3)).train_size == 11.0


@pytest.mark.parametrize("batch_size", [None, 3])
def test_loaders_visit_their_part_once(batch_size):
    data = ready(Counting(batch_size=batch_size, val_fraction=0.3, test_fraction=0.3))
    loaders = {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}
    for part, batches in loaders.items():
        seen = [numbers(batch) for batch in batches]
        assert flat(seen) == numbers(data._part(part))
        assert len(seen) == (1 if batch_size is None else -(-len(data._part(part)) // 3))
    assert flat(map(numbers, data.predict_dataloader())) == list(range(17))  # all of the data, in their order


def test_only_training_is_shuffled():
    data = ready(Counting(batch_size=3, shuffle=True, val_fraction=0.3, test_fraction=0.3))
    batches = data.train_dataloader()
    orders = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        orders.append(flat(map(numbers, batches)))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == numbers(data.train_sequences)
    assert flat(map(numbers, data.val_dataloader())) == numbers(data.val_sequences)
    assert flat(map(numbers, data.predict_dataloader())) == list(range(17))


def test_loaders_take_rank_and_world_size_from_the_trainer():
    class Trainer:
        global_rank, world_size = 1, 2

    data = ready(Counting(batch_size=4, val_fraction=0.0, test_fraction=0.0))
    data.trainer = Trainer()
    for batches in (data.train_dataloader(), Counting.predict_dataloader(data)):
        assert (batches.sampler.rank, batches.sampler.num_replicas) == (1, 2)
    assert list(map(numbers, data.train_dataloader())) == [[1, 3], [5, 7], [9, 11], [13, 15], []]


class Watching(lightning.LightningModule):
    """Learns nothing; notes which sequences it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: Sequences, _: int) -> torch.Tensor:
        self.seen.setdefault(self.current_epoch, []).extend(numbers(batch))
        return 0 * self.weight

    def validation_step(self, batch: Sequences, _: int) -> None:
        self.validated = numbers(batch)

    def predict_step(self, batch: Sequences, _: int) -> list[int]:
        return numbers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lightning_trains_in_a_new_order_each_epoch_and_predicts_in_the_old_one():
    data = Counting(batch_size=4, shuffle=True, test_fraction=0.5, val_fraction=0.2)
    model = Watching()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    assert model.seen[0] != model.seen[1]
    assert sorted(model.seen[0]) == sorted(model.seen[1]) == numbers(data.train_sequences)
    assert model.validated == numbers(data.val_sequences)
    assert flat(trainer.predict(model, datamodule=data)) == list(range(17))


def test_data_is_read_once():
    data = ready(Counting())
    data.setup("test")
    assert data.loads == 1


def test_gathered_data_is_checked_once_for_all_epochs():
    data = ready(Counting())
    (batch,) = data.train_dataloader()
    assert batch is data.train_sequences
    assert batch._checked == (NUM, None)


@pytest.mark.parametrize(
    "values",
    [torch.arange(5, dtype=torch.int8), torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 3)],
    ids=["symbols", "float64", "float32"],
)
def test_a_table_and_back(values):
    sequences = Sequences.from_lengths(values, [2, 0, 3], weights=[1.0, 2.0, 3.0])
    table = as_table(sequences)
    back = Sequences.from_arrow(table["values"], table["weights"].to_numpy().copy())
    assert back.values.dtype == values.dtype
    assert torch.equal(back.values, values)
    assert back.values.data_ptr() == values.data_ptr()
    assert torch.equal(back.offsets, sequences.offsets)
    assert torch.equal(back.weights, sequences.weights)


def test_the_cache_is_built_once_and_memory_mapped(tmp_path):
    builds = []

    def build() -> pa.Table:
        builds.append(1)
        halves = [as_table(Sequences.from_list([[1, 2]])), as_table(Sequences.from_list([[3]]))]
        return pa.concat_tables(halves).replace_schema_metadata({"note": "hello"})

    data = Counting(data_dir=str(tmp_path))
    for _ in range(2):
        dataset, metadata = data.cached("pair", build)
        assert metadata["note"] == "hello"
        assert len(builds) == 1
        assert dataset.cache_files == [{"filename": str(tmp_path / "cache" / "pair.arrow")}]
        column = dataset.with_format("arrow")[:]["values"]
        assert column.num_chunks == 1
        assert column.to_pylist() == [[1, 2], [3]]
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["pair.arrow"]


def test_where_nothing_may_be_written_the_table_stays_in_memory(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(Path, "mkdir", refuse)
    table = as_table(Sequences.from_list([[1, 2], [3]])).replace_schema_metadata({"note": "hello"})
    with pytest.warns(UserWarning, match="is not writable, so the data are read again each time"):
        dataset, metadata = Counting(data_dir=str(tmp_path)).cached("pair", lambda: table)
    assert dataset["values"][:] == [[1, 2], [3]]
    assert metadata == {"note": "hello"}
    assert list(tmp_path.iterdir()) == []


def test_data_dir_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_HMM_DATA", "elsewhere")
    assert Counting().data_dir == Path("elsewhere")
    assert Counting(data_dir="here").data_dir == Path("here")
    monkeypatch.delenv("LIGHTNING_HMM_DATA")
    assert Counting().data_dir == Path("data")


def test_hyperparameters_are_plain_values_only():
    data = Counting(batch_size=3, note=np.zeros(2), given={"train": 3})
    assert data.hparams.batch_size == 3
    assert data.hparams.given == {"train": 3}
    assert "note" not in data.hparams


def test_progress_bars_come_back():
    assert not datasets.are_progress_bars_disabled()
    ready(Counting())
    assert not datasets.are_progress_bars_disabled()


def test_the_command_line_knows_the_words_of_the_base():
    parser = ArgumentParser()
    parser.add_subclass_arguments(SequenceDataModule, "data")
    arguments = [
        "--data=datamodules.SyntheticDataModule",
        "--data.num_states=3",
        "--data.batch_size=7",
        "--data.val_fraction=0.25",
    ]
    data = parser.instantiate(parser.parse_args(arguments)).data
    assert isinstance(data, SyntheticDataModule)
    assert data.batch_size == 7
    assert data.val_fraction == 0.25
    assert "batch_size" in parser.parse_args(["--data=datamodules.FileDataModule", "--data.path=x.csv"]).data.init_args
    assert issubclass(FileDataModule, SequenceDataModule)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be positive, .* but is 0 instead"),
        ({"num_workers": -1}, "`num_workers` must not be negative, but is -1 instead"),
        ({"val_fraction": 1.0}, "`val_fraction` must be at least 0 and less than 1, but is 1.0 instead"),
        ({"test_fraction": -0.1}, "`test_fraction` must be at least 0 and less than 1, but is -0.1 instead"),
        ({"val_fraction": 0.9, "test_fraction": 0.1}, "must sum to less than 1, but are 0.9 and 0.1"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        Counting(**words)


def test_wrong_data():
    with pytest.raises(ValueError, match="at least one training sequence, but has none"):
        Counting(0).setup()
    with pytest.raises(ValueError, match=r"must return 'train' .* but returns \['dev', 'train'\]"):
        Counting(given={"train": 2, "dev": 2}).setup()
    with pytest.raises(RuntimeError, match=r"Call `setup\(\)` of the Counting first"):
        _ = Counting().train_sequences
    with pytest.raises(ValueError, match="`part` must be one of train, val, test, but is 'dev' instead"):
        ready(Counting()).true_states("dev")
    neither = Counting()
    neither.columns = []
    with pytest.raises(ValueError, match="Counting must set `columns`, but has none"):
        neither.setup()
    small = Counting()
    small.columns = symbol_column(5)
    with pytest.raises(ValueError, match="Symbols must be 0 to 4"):
        small.setup()


def test_constructors_read_no_data(tmp_path):
    """A file is opened when what depends on it is first used, and once only."""
    path = tmp_path / "weather.csv"
    path.write_text("seen\nsun\nrain\n")
    data = FileDataModule(str(path), data_dir=str(tmp_path), val_fraction=0.0, test_fraction=0.0)
    assert not (tmp_path / "cache").exists()
    path.write_text("seen\nsun\nsnow\nrain\n")
    assert data.num_symbols == 3
    path.unlink()
    data.setup()
    assert data.train_sequences.num_steps == 3
