"""The command line as a user runs it: the configurations of the repository, printed and written output, and errors."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_hmm
from lightning_hmm.cli import CommandLine, main, run
from lightning_hmm.cli.run_files import SharedVersion, default_loggers
from tests.helpers import random_symbols

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))
SMALL = ["--data.init_args.num_sequences=40", "--data.init_args.max_length=40", "--trainer.enable_progress_bar=false"]


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning_hmm"])


@pytest.fixture(autouse=True)
def _handlers_of_pytest():
    """`run` leaves the handler of Ctrl-C in the state that a process needs at its end."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def own_run(folder: Path) -> list[str]:
    return [
        f"--config={ROOT / 'configs/standard/synthetic.yaml'}",
        f"--trainer.default_root_dir={folder}",
        "--trainer.max_epochs=3",
        *SMALL,
    ]


def fit_small(folder: Path, *more: str) -> Path:
    """Trains a small model; returns the log folder."""
    main(["fit", *own_run(folder), *more])
    return max((folder / "standard/synthetic").glob("version_*"))


# The figures that each family of models must draw, and smaller data for the configs that would take long.
MATRICES = {"emissions", "state_usage", "transition_matrix"}
LATENTS = {"convergence", "effective_size", "latents", "predictions"}
FIGURES = {
    "cloned": {"convergence", "state_usage"},
    "dense": MATRICES | {"composition"},
    "dmc": MATRICES | {"convergence"},
    "neural": LATENTS,
    "standard": MATRICES | {"convergence"},
}
SMALLER = {
    "baselines/text": ["--data.init_args.max_train=20000"],
    "cloned/brackets": ["--data.init_args.length=5000"],
    "cloned/text": ["--data.init_args.max_train=20000", "--model.init_args.num_states=500"],
    "neural/gps": ["--data.init_args.visitors=20"],
    "neural/guitar": ["--data.init_args.num_sequences=10"],
    "neural/synthetic": ["--data.init_args.num_sequences=50"],
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_trains_a_full_epoch_and_draws_its_figures(path, tmp_path):
    """Also validates, saves and tests. A figure that fails warns, and a warning fails the test."""
    assert path.read_text().startswith(f"# python -m lightning_hmm fit --config {path.relative_to(ROOT)}\n")
    options = [
        f"--trainer.default_root_dir={tmp_path}",
        "--trainer.max_epochs=1",
        "--trainer.enable_progress_bar=false",
    ]
    main(["fit", f"--config={path}", *options, *SMALLER.get(f"{path.parent.name}/{path.stem}", [])])
    (logs,) = tmp_path.glob("*/*/version_*")
    drawn = {tag.removeprefix("figures/") for tag in EventAccumulator(str(logs)).Reload().Tags()["images"]}
    assert FIGURES.get(path.parent.name, {"convergence"}) <= drawn


def test_a_dry_run_writes_nothing(tmp_path):
    main(
        [
            "fit",
            f"--config={ROOT / 'configs/standard/synthetic.yaml'}",
            "--trainer.fast_dev_run=2",
            f"--trainer.default_root_dir={tmp_path}",
        ]
    )
    assert not list(tmp_path.iterdir())


def test_fit_logs_saves_and_says_where(tmp_path, capsys):
    logs = fit_small(tmp_path)
    printed = capsys.readouterr().out
    best = next(logs.glob("checkpoints/epoch=*.ckpt"))
    for line in (
        f"Best checkpoint:  {best}",
        f"tensorboard --logdir {logs}",
        "test/bits_per_symbol",
        "test/state_accuracy",
    ):
        assert line in printed
    assert (logs / "checkpoints/last.ckpt").exists()
    assert list(logs.glob("events.out.tfevents.*"))
    with (logs / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {
        "epoch",
        "step",
        "train/log_likelihood",
        "train/bits_per_symbol",
        "val/log_likelihood",
        "val/bits_per_symbol",
        "test/bits_per_symbol",
    } <= set(rows[0])
    likelihoods = [float(row["train/log_likelihood"]) for row in rows if row["train/log_likelihood"]]
    assert len(likelihoods) == 3
    assert likelihoods == sorted(likelihoods)
    model = lightning_hmm.load(best)
    assert model.num_symbols == 12  # handed over by the data


def test_the_saved_config_reruns_the_run(tmp_path):
    first = fit_small(tmp_path / "a", "--model.init_args.num_states=3")
    main(["fit", f"--config={first / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path / 'b'}"])
    second = max((tmp_path / "b/standard/synthetic").glob("version_*"))
    states = [torch.load(logs / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for logs in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert len(states[0]["transition.log_probs"][0]) == 3


def test_validate_test_and_predict_use_the_checkpoint(tmp_path, capsys):
    logs = fit_small(tmp_path)
    best = next(logs.glob("checkpoints/epoch=*.ckpt"))
    common = [
        f"--config={logs / 'config.yaml'}",
        f"--ckpt_path={best}",
        f"--trainer.default_root_dir={tmp_path / 'more'}",
    ]
    assert main(["validate", *common]).trainer.callback_metrics["val/bits_per_symbol"] > 0
    tested = main(["test", *common])
    model, sequences = lightning_hmm.load(best), tested.datamodule.test_sequences
    expected = -float(model.score(sequences).sum()) / float(sequences.num_observed()) / 0.6931471805599453
    assert float(tested.trainer.callback_metrics["test/bits_per_symbol"]) == pytest.approx(expected, rel=1e-10)
    main(["predict", *common, f"--predictions.path={tmp_path / 'states.jsonl'}"])
    lines = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    assert [line["sequence"] for line in lines] == list(range(40))  # all of the data, in their order
    everything = tested.datamodule._source("train")[0]
    assert [line["states"] for line in lines] == model.decode(everything).tolist()
    assert [line["log_likelihood"] for line in lines] == pytest.approx(model.score(everything).tolist())


def test_last_and_best_are_those_of_the_run_whose_config_is_given(tmp_path):
    """With more states than the few short sequences can tell apart, the best epoch is not the last."""
    logs = fit_small(
        tmp_path,
        "--model.init_args.num_states=8",
        "--trainer.max_epochs=40",
        "--convergence.tolerance=0",
        "--checkpoint.save_top_k=2",
    )
    checkpoints = {path: lightning_hmm.load(path) for path in logs.glob("checkpoints/*.ckpt")}
    validation = main(
        ["validate", f"--config={logs / 'config.yaml'}", "--ckpt_path=last", f"--trainer.default_root_dir={tmp_path}"]
    ).datamodule.val_sequences
    best = max(
        (path for path in checkpoints if path.stem != "last"),
        key=lambda path: float(checkpoints[path].score(validation).sum()),
    )
    last = logs / "checkpoints/last.ckpt"
    assert len(checkpoints) == 3
    for subcommand, which, path in (
        ("validate", "best", best),
        ("test", "best", best),
        ("test", "last", last),
        ("predict", "last", last),
    ):
        used = main(
            [
                subcommand,
                f"--config={logs / 'config.yaml'}",
                f"--ckpt_path={which}",
                f"--trainer.default_root_dir={tmp_path}",
            ]
        )
        assert torch.equal(used.model.transition_probs, checkpoints[path].transition_probs), (subcommand, which)


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("which", ["last", "best"])
def test_last_and_best_of_no_run_are_refused(subcommand, which):
    with pytest.raises(
        ValueError,
        match=rf"`--ckpt_path {which}` is looked up in the folder of the run .*, but none of the given "
        "`--config` files",
    ):
        main([subcommand, f"--config={ROOT / 'configs/standard/synthetic.yaml'}", f"--ckpt_path={which}"])


def test_the_best_of_a_run_without_validation_data_is_refused(tmp_path):
    logs = fit_small(tmp_path, "--data.init_args.val_fraction=0")
    with pytest.raises(FileNotFoundError, match=r"checkpoints holds last\.ckpt\. Without validation data"):
        main(["test", f"--config={logs / 'config.yaml'}", "--ckpt_path=best"])


def test_options_that_disagree_with_the_checkpoint_are_refused(tmp_path):
    """Options of the command and of a configuration file are compared, even if they have the default value.

    Defaults that were not given are not compared.
    """
    logs = fit_small(tmp_path, "--model.init_args.num_states=3", "--model.init_args.transition_pseudocount=0.5")
    shipped, last = ROOT / "configs/standard/synthetic.yaml", f"--ckpt_path={logs / 'checkpoints/last.ckpt'}"
    for subcommand in ("fit", "validate", "test", "predict"):
        with pytest.raises(ValueError, match=r"`model\.init_args\.num_states` is 7, but 3 in the checkpoint"):
            main([subcommand, f"--config={logs / 'config.yaml'}", "--model.init_args.num_states=7", last])
    with pytest.raises(
        ValueError, match=r"`model\.init_args\.num_states` is 5, but 3 in the checkpoint"
    ):  # as in the file
        main(["test", f"--config={shipped}", last])
    with pytest.raises(
        ValueError, match=r"`model\.init_args\.transition_pseudocount` is 0\.0, but 0\.5 in the checkpoint"
    ):
        main(["test", f"--config={logs / 'config.yaml'}", "--model.init_args.transition_pseudocount=0", last])
    with pytest.raises(ValueError, match=r"`model\.init_args\.num_symbols` is 5, but 12 in the checkpoint"):
        main(["test", f"--config={logs / 'config.yaml'}", "--model.init_args.num_symbols=5", last])
    with pytest.raises(
        ValueError, match=r"`model` is lightning_hmm\.ClonedHMM, but .*last\.ckpt contains a StandardHMM"
    ):
        main(["test", "--model=ClonedHMM", "--data=datamodules.SyntheticDataModule", last])
    bare = [
        "--model=StandardHMM",
        "--model.init_args.num_states=3",
        "--data=datamodules.SyntheticDataModule",
        "--data.init_args.length=20",
    ]
    tested = main(["test", *bare, "--data.init_args.num_symbols=12", f"--trainer.default_root_dir={tmp_path}", last])
    assert tested.model.restarts == 8


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_of_a_training_in_python_is_used(tmp_path, rng):
    model = lightning_hmm.StandardHMM(num_states=3, num_symbols=12, transition_pseudocount=0.5)
    lightning_hmm.fit(
        model,
        random_symbols(rng, num_symbols=12),
        2,
        0,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path, save_last=True)],
    )
    bare = [
        "--model=StandardHMM",
        "--model.init_args.num_states=3",
        "--data=datamodules.SyntheticDataModule",
        "--data.init_args.num_symbols=12",
    ]
    tested = main(["test", *bare, f"--ckpt_path={tmp_path / 'last.ckpt'}", f"--trainer.default_root_dir={tmp_path}"])
    assert torch.equal(tested.model.transition_probs, model.transition_probs)


def test_the_last_checkpoint_is_the_last_epoch_whatever_the_best_is(tmp_path):
    """With more states than the few short sequences can tell apart, validation soon gets worse."""
    logs = fit_small(tmp_path, "--model.init_args.num_states=8", "--trainer.max_epochs=60", "--convergence.tolerance=0")
    best = torch.load(next(logs.glob("checkpoints/epoch=*.ckpt")), weights_only=True)
    assert best["epoch"] < 50
    assert torch.load(logs / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 59


def test_without_validation_data_every_epoch_is_kept_as_the_last(tmp_path, capsys):
    logs = fit_small(tmp_path, "--data.init_args.val_fraction=0")
    assert [path.name for path in logs.glob("checkpoints/*")] == ["last.ckpt"]
    printed = capsys.readouterr().out
    assert f"Last checkpoint:  {logs / 'checkpoints/last.ckpt'} (no validation data to select by)" in printed
    assert "Predict:" in printed


def test_without_a_logger_the_given_configuration_file_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text((ROOT / "configs/standard/synthetic.yaml").read_text())
    main(["fit", "--config=config.yaml", "--trainer.logger=false", "--trainer.max_epochs=1", *SMALL])
    assert (tmp_path / "config.yaml").read_text() == (ROOT / "configs/standard/synthetic.yaml").read_text()


@pytest.mark.parametrize("option", ["--trainer.enable_checkpointing=false", "--trainer.logger=false"])
def test_nothing_is_saved_or_logged_where_nothing_is_wanted(tmp_path, option, capsys):
    config = ROOT / "configs/standard/synthetic.yaml"
    main(
        [
            "fit",
            f"--config={config}",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.max_epochs=2",
            *SMALL,
            option,
        ]
    )
    assert "Trained StandardHMM for 2 epochs." in capsys.readouterr().out


# Folders of runs


def test_runs_that_start_at_the_same_moment_get_folders_of_their_own(tmp_path, monkeypatch):
    """The second run is built before the first one trains."""
    original, folders = CommandLine._run_subcommand, []

    def run_second_first(self, subcommand):
        if not folders:
            folders.append(None)
            fit_small(tmp_path)
        original(self, subcommand)
        folders.append(Path(self.trainer.log_dir))

    monkeypatch.setattr(CommandLine, "_run_subcommand", run_second_first)
    fit_small(tmp_path)
    assert sorted(path.name for path in folders[1:]) == ["version_0", "version_1"]
    for folder in folders[1:]:
        assert (folder / "config.yaml").is_file()
        assert len(list(folder.glob("checkpoints/*.ckpt"))) == 2
        assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 3 + 3 + 1


def test_ranks_get_the_version_of_rank_zero(tmp_path):
    rank_one = SimpleNamespace(
        loggers=default_loggers(tmp_path, "a/b", None),
        is_global_zero=False,
        strategy=SimpleNamespace(broadcast=lambda value: 5),
    )
    SharedVersion(partial(default_loggers, tmp_path, "a/b")).setup(rank_one, None, "fit")
    assert [logger.version for logger in rank_one.loggers] == [5, 5]
    assert list(tmp_path.iterdir()) == []


class RemoteLogger(Logger):
    """A logger that keeps its runs on a server, as MLflow does, or in a folder that all runs share, as W&B does."""

    def __init__(self, run: str, save_dir: str | None = None) -> None:
        super().__init__()
        self._run, self._save_dir = run, save_dir

    name = property(lambda self: "project")
    version = property(lambda self: self._run)
    save_dir = property(lambda self: self._save_dir)
    log_dir = None

    def log_metrics(self, metrics, step=None) -> None:
        pass

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        pass


@pytest.mark.parametrize("shared", [False, True], ids=["no folder", "a shared folder"])
def test_runs_of_other_loggers_keep_their_own_configs_and_checkpoints(tmp_path, shared, capsys):
    for run_name, states in (("first", 3), ("second", 4)):
        logger = [f"--trainer.logger={__name__}.RemoteLogger", f"--trainer.logger.init_args.run={run_name}"]
        logger += [f"--trainer.logger.init_args.save_dir={tmp_path}"] if shared else []
        main(["fit", *own_run(tmp_path), *logger, f"--model.init_args.num_states={states}"])
        folder = tmp_path / "project" / run_name
        printed = capsys.readouterr().out
        assert f"predict --config {folder / 'config.yaml'} --ckpt_path {folder / 'checkpoints'}" in printed
        assert "tensorboard" not in printed
    for run_name, states in (("first", 3), ("second", 4)):
        folder = tmp_path / "project" / run_name
        assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]["num_states"] == states
        tested = main(["test", f"--config={folder / 'config.yaml'}", "--ckpt_path=best"])
        assert tested.model.num_states == states
    main(["predict", f"--config={folder / 'config.yaml'}", "--ckpt_path=last"])
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 40


# Own data


def fit_file(folder: Path, rows: list[str]) -> Path:
    """Trains on a CSV of 20 sequences of 8 rows; returns the log folder."""
    (folder / "own.csv").write_text(
        "day,seen\n" + "\n".join(f"{n // 8},{rows[(n * n + n // 5) % len(rows)]}" for n in range(160))
    )
    options = [
        "--model=StandardHMM",
        "--model.init_args.num_states=2",
        "--data=datamodules.FileDataModule",
        f"--data.init_args.path={folder / 'own.csv'}",
    ]
    options += [
        "--data.init_args.columns=[seen]",
        "--data.init_args.sequence_column=day",
        f"--data.init_args.data_dir={folder / 'cache'}",
    ]
    main(
        [
            "fit",
            *options,
            "--trainer.max_epochs=3",
            f"--trainer.default_root_dir={folder}",
            "--trainer.enable_progress_bar=false",
        ]
    )
    return max(folder.glob("standard/files/version_*"))


def test_a_new_file_is_scored_as_a_whole(tmp_path, caplog):
    """The model was not trained on a new file, so nothing is held out. A copy of the training file is not new."""
    logs = fit_file(tmp_path, ["rain", "sun", "cloud"])
    model = lightning_hmm.load(logs / "checkpoints/last.ckpt")
    (tmp_path / "new.csv").write_text(
        "day,seen\n" + "\n".join(f"{n // 4},{['sun', 'rain'][n * n % 3 % 2]}" for n in range(12))
    )
    (tmp_path / "copy.csv").write_text((tmp_path / "own.csv").read_text())
    days = [[["sun", "rain"][n * n % 3 % 2] for n in range(4 * day, 4 * day + 4)] for day in range(3)]
    common = [
        f"--config={logs / 'config.yaml'}",
        f"--ckpt_path={logs / 'checkpoints/last.ckpt'}",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    for subcommand, part in (("validate", "val"), ("test", "test")):
        caplog.clear()
        scored = main([subcommand, *common, f"--data.init_args.path={tmp_path / 'new.csv'}"])
        assert float(scored.trainer.callback_metrics[f"{part}/log_likelihood"]) == pytest.approx(
            float(model.score(days).sum()) / 12, rel=1e-10
        )
        assert "Scoring all 3 sequences, since the model was trained on other data." in caplog.messages
        scored = main([subcommand, *common, f"--data.init_args.path={tmp_path / 'copy.csv'}"])
        assert scored.datamodule.part_size(part) == 2
        assert f"Scoring 2 of 20 sequences (`{part}_fraction` is 0.1)." in caplog.messages


def test_other_validation_data_do_not_make_the_training_file_new(tmp_path):
    """New names in them shift the numbers of all names."""
    logs = fit_file(tmp_path, ["rain", "sun"])
    (tmp_path / "val.csv").write_text("day,seen\n0,fog\n0,rain\n")
    common = [f"--config={logs / 'config.yaml'}", "--ckpt_path=last", f"--trainer.default_root_dir={tmp_path}"]
    tested = main(
        ["test", *common, f"--data.init_args.val_path={tmp_path / 'val.csv'}", "--data.init_args.unknown=rain"]
    )
    assert tested.datamodule.part_size("test") == 2


def test_a_file_of_one_sequence_can_be_scored_only_if_it_is_new(tmp_path):
    """Of the file of training, a tenth of too few sequences is none."""
    (tmp_path / "own.csv").write_text("day,seen\n" + "\n".join(f"{n // 8},{n * n % 3}" for n in range(24)))
    (tmp_path / "new.csv").write_text("day,seen\n0,1\n0,0\n")
    options = [
        "--model=StandardHMM",
        "--model.init_args.num_states=2",
        "--data=datamodules.FileDataModule",
        "--data.init_args.columns=[seen]",
    ]
    options += [
        "--data.init_args.sequence_column=day",
        f"--data.init_args.data_dir={tmp_path / 'cache'}",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    main(
        [
            "fit",
            *options,
            f"--data.init_args.path={tmp_path / 'own.csv'}",
            "--trainer.max_epochs=2",
            "--trainer.enable_progress_bar=false",
        ]
    )
    common = [f"--config={tmp_path / 'standard/files/version_0/config.yaml'}", "--ckpt_path=last"]
    with pytest.raises(
        ValueError, match=r"`test` needs at least one sequence, but has 0 of 3 sequences \(`test_fraction` is 0\.1\)"
    ):
        main(["test", *common])
    with pytest.raises(ValueError, match=r"`validate` needs at least one sequence, but has 0 of 3 sequences"):
        main(["validate", *common])
    assert main(["test", *common, f"--data.init_args.path={tmp_path / 'new.csv'}"]).datamodule.part_size("test") == 1


def test_own_data_keep_their_names(tmp_path):
    model = lightning_hmm.load(fit_file(tmp_path, ["rain", "sun", "cloud"]) / "checkpoints/last.ckpt")
    assert model.vocabulary.names == ["cloud", "rain", "sun"]
    assert model.decode([["rain", "sun"]]).tolist() == model.decode([[1, 2]]).tolist()


@pytest.mark.parametrize(
    ("rows", "new"),
    [(["rain", "sun", "cloud"], ["sun", "rain"]), (["0", "1", "2"], ["1", "0"])],
    ids=["names", "numbers"],
)
def test_a_new_file_is_decoded_with_the_symbols_of_training(tmp_path, rows, new):
    """It need not have all of them; and all of it is decoded."""
    logs = fit_file(tmp_path, rows)
    last = logs / "checkpoints/last.ckpt"
    (tmp_path / "new.csv").write_text("day,seen\n" + "\n".join(f"{n // 3},{new[n % 2]}" for n in range(12)))
    common = [
        f"--config={logs / 'config.yaml'}",
        f"--ckpt_path={last}",
        f"--data.init_args.path={tmp_path / 'new.csv'}",
    ]
    main(["predict", *common, f"--predictions.path={tmp_path / 'states.jsonl'}"])
    lines = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    model = lightning_hmm.load(last)
    days = [[new[(3 * day + step) % 2] for step in range(3)] for day in range(4)]
    expected = model.score(days if model.vocabulary else [[int(symbol) for symbol in day] for day in days])
    assert [line["log_likelihood"] for line in lines] == pytest.approx(expected.tolist())


def test_a_new_file_with_another_symbol_is_refused(tmp_path):
    logs = fit_file(tmp_path, ["rain", "sun"])
    (tmp_path / "new.csv").write_text("day,seen\n0,rain\n0,storm\n")
    common = [
        f"--config={logs / 'config.yaml'}",
        f"--ckpt_path={logs / 'checkpoints/last.ckpt'}",
        f"--data.init_args.path={tmp_path / 'new.csv'}",
    ]
    with pytest.raises(ValueError, match=r"Symbols must be in `vocabulary`, but 'storm' in .*new\.csv"):
        main(["test", *common])
    with pytest.raises(
        ValueError,
        match="must have the symbols that the checkpoint was trained on, 'rain', 'sun', but have 'rain', 'storm'",
    ):
        main(["test", *common, "--data.init_args.vocabulary=[rain, storm]", "--data.init_args.test_fraction=0.6"])


def test_standardised_columns_keep_the_units_of_training(tmp_path):
    (tmp_path / "train.csv").write_text("x\n" + "\n".join(str(100 + 10 * (n % 7)) for n in range(80)))
    (tmp_path / "new.csv").write_text("x\n" + "\n".join(str(100 + n % 3) for n in range(30)))
    options = [
        "--model=StandardHMM",
        "--model.init_args.num_states=2",
        "--model.init_args.emission=gaussian",
        "--data=datamodules.FileDataModule",
    ]
    options += [
        "--data.init_args.kind=vectors",
        "--data.init_args.standardize=true",
        f"--data.init_args.data_dir={tmp_path / 'cache'}",
    ]
    options += [f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    trained = main(["fit", *options, f"--data.init_args.path={tmp_path / 'train.csv'}", "--trainer.max_epochs=2"])
    last = tmp_path / "standard/files/version_0/checkpoints/last.ckpt"
    again = main(["predict", *options, f"--data.init_args.path={tmp_path / 'new.csv'}", f"--ckpt_path={last}"])
    assert torch.equal(again.datamodule.mean, trained.datamodule.mean)
    first = float(again.datamodule._source("train")[0].values[0])
    assert first == pytest.approx((100 - float(trained.datamodule.mean)) / float(trained.datamodule.std))


def test_an_emission_of_ones_own_goes_all_the_way(tmp_path):
    """It is named by the path of its class; what was trained loads, is resumed, and predicts."""
    (tmp_path / "counts.csv").write_text(
        "day,calls\n" + "\n".join(f"{n // 8},{(n * n) % 7 + n % 2 * 9}.0" for n in range(160))
    )
    options = [
        "--model=HMM",
        "--model.init_args.num_states=2",
        "--model.init_args.emission=tests.models.test_new_family.NegativeBinomial",
    ]
    options += ["--model.init_args.emission.init_args.failures=3", "--data=datamodules.FileDataModule"]
    options += [
        f"--data.init_args.path={tmp_path / 'counts.csv'}",
        "--data.init_args.sequence_column=day",
        "--data.init_args.columns=[calls]",
    ]
    options += [
        "--data.init_args.kind=vectors",
        f"--data.init_args.data_dir={tmp_path / 'cache'}",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    options += ["--trainer.enable_progress_bar=false"]
    main(["fit", *options, "--trainer.max_epochs=2"])
    last = tmp_path / "hmm/files/version_0/checkpoints/last.ckpt"
    emission = lightning_hmm.load(last).emission
    assert type(emission).__name__ == "NegativeBinomial"
    assert emission.failures == 3
    main(["fit", *options, "--trainer.max_epochs=4", f"--ckpt_path={last}"])
    main(["predict", *options, f"--ckpt_path={last}", f"--predictions.path={tmp_path / 'states.jsonl'}"])
    assert len((tmp_path / "states.jsonl").read_text().splitlines()) == 20
    with pytest.raises(
        ValueError, match=r"`model\.init_args\.emission\.init_args\.failures` is 4\.0, but 3\.0 in the checkpoint"
    ):
        main(["predict", *options, "--model.init_args.emission.init_args.failures=4", f"--ckpt_path={last}"])


def test_a_resumed_run_brings_its_best_epoch_along(tmp_path):
    """Also where no later epoch is better; and the folder of the first run stays as it was."""
    first = fit_small(tmp_path / "a", "--trainer.max_epochs=2")
    best = next(first.glob("checkpoints/epoch=*.ckpt"))
    content = torch.load(first / "checkpoints/last.ckpt", weights_only=True)
    state = next(state for name, state in content["callbacks"].items() if name.startswith("BestCheckpoint"))
    state["best_model_score"] = torch.tensor(0.001)  # nothing will beat this
    torch.save(content, tmp_path / "last.ckpt")
    second = fit_small(tmp_path / "b", "--trainer.max_epochs=4", f"--ckpt_path={tmp_path / 'last.ckpt'}")
    assert [path.name for path in second.glob("checkpoints/epoch=*.ckpt")] == [best.name]
    assert best.exists()


# What it says when something is wrong


def test_a_wrong_key_is_pointed_at(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", "--model.init_args.num_stats=4"])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "num_stats" in printed
    assert len(printed.splitlines()) < 12


def test_a_wrong_key_in_a_file_is_pointed_at(tmp_path, capsys):
    config = yaml.safe_load((ROOT / "configs/standard/synthetic.yaml").read_text())
    config["model"]["init_args"]["num_stats"] = 4
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit):
        main(["fit", f"--config={tmp_path / 'wrong.yaml'}"])
    assert "num_stats" in capsys.readouterr().err


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_a_model_that_was_never_trained_is_not_used(subcommand):
    with pytest.raises(ValueError, match=f"`--ckpt_path` is required for `{subcommand}`"):
        main([subcommand, f"--config={ROOT / 'configs/standard/synthetic.yaml'}"])


@pytest.mark.parametrize("path", ["http://localhost/last.ckpt", "s3://bucket/last.ckpt", "file:///tmp/last.ckpt"])
def test_a_remote_checkpoint_is_refused(path):
    with pytest.raises(ValueError, match=f"`--ckpt_path` must be the path of a local file, but is '{path}'"):
        main(["test", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", f"--ckpt_path={path}"])


@pytest.mark.parametrize(("group", "value"), [("trainer", "-1"), ("figures", "[]"), ("convergence", "fast")])
def test_a_value_in_the_place_of_a_group_of_options_is_pointed_at(tmp_path, capsys, group, value):
    (tmp_path / "wrong.yaml").write_text(f"{group}: {value}\n")
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "fit",
                "--model=StandardHMM",
                "--model.init_args.num_states=2",
                "--data=datamodules.SyntheticDataModule",
                f"--config={tmp_path / 'wrong.yaml'}",
            ]
        )
    assert stopped.value.code == 2
    assert group in capsys.readouterr().err


def test_a_size_that_the_data_contradict_is_refused():
    with pytest.raises(
        ValueError, match=r"`num_symbols` is set by the data module \(12\); remove `--model\.init_args\.num_symbols=5`"
    ):
        main(["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", "--model.init_args.num_symbols=5"])


def test_the_sentence_of_an_error_is_not_buried(monkeypatch, capsys):
    options = [
        "fit",
        "--model=StandardHMM",
        "--model.init_args.num_states=2",
        "--data=datamodules.FileDataModule",
        "--data.init_args.columns=[sen]",
    ]
    monkeypatch.setattr(
        sys, "argv", ["lightning_hmm", *options, f"--data.init_args.path={ROOT / 'configs/standard/weather.csv'}"]
    )
    with pytest.raises(SystemExit):
        run()
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert line.startswith("error: `columns` must be in the file, but ")
    assert line.endswith("has no column 'sen'. It has station, day, seen.")


def test_zero_states_are_refused():
    with pytest.raises(ValueError, match="`num_states` must be a whole number of at least 1, but is 0"):
        main(["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", "--model.init_args.num_states=0"])


def test_an_unreadable_checkpoint_is_named(tmp_path):
    (tmp_path / "torn.ckpt").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(ValueError, match=r"`--ckpt_path` must be a checkpoint, but .*torn\.ckpt cannot be read as one"):
        main(["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", f"--ckpt_path={tmp_path / 'torn.ckpt'}"])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.ckpt"):
        main(["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", f"--ckpt_path={tmp_path / 'none.ckpt'}"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_said_in_a_line(monkeypatch, capsys):
    arguments = ["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", "--trainer.accelerator=gpu"]
    with pytest.raises(MisconfigurationException, match=r"(?i)gpu"):
        main(arguments)
    monkeypatch.setattr(sys, "argv", ["lightning_hmm", *arguments])
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.splitlines()[-2].startswith("error: ")


# Interrupted runs, as processes of their own


@pytest.fixture
def start_script():
    """Starts Python in processes of their own, and ends those that a failing test leaves behind."""
    processes = []

    def start_one(arguments: list[str], **environment: str) -> subprocess.Popen:
        processes.append(
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                # A shell's background job ignores Ctrl-C, and what it starts inherits that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        return processes[-1]

    yield start_one
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def start(start_script):
    """Starts runs of online EM."""

    def start_one(folder: Path, *more: str, **environment: str) -> subprocess.Popen:
        options = [
            "--trainer.max_epochs=60",
            "--model.init_args.discount=0.9",
            "--model.init_args.transition_pseudocount=1",
            "--model.init_args.restarts=2",
        ]
        options += [
            "--data.init_args.batch_size=50",
            "--data.init_args.shuffle=true",
            "--convergence.tolerance=0",
            "--trainer.enable_progress_bar=false",
        ]
        config = ["--config=configs/standard/synthetic.yaml", f"--trainer.default_root_dir={folder}"]
        return start_script(["-m", "lightning_hmm", "fit", *config, *options, *more], **environment)

    return start_one


def wait_for_epochs(process: subprocess.Popen, folder: Path, epochs: int) -> Path:
    """Waits until the run has finished some epochs; returns its last checkpoint."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for path in folder.glob("standard/synthetic/version_0/checkpoints/last.ckpt"):
            # Wait for the last checkpoint. The best one is written first, and a signal between the two would leave an
            # older last checkpoint.
            if torch.load(path, weights_only=True)["epoch"] >= epochs:
                return path
        time.sleep(0.02)
    raise AssertionError(f"The run ended before epoch {epochs}: {process.stdout.read()}")


def test_killed_and_resumed_equals_never_killed(tmp_path, start):
    """Bit for bit: parameters, count buffers, and the history that convergence goes by."""
    whole = start(tmp_path / "whole")
    whole.communicate(timeout=240)
    assert whole.returncode == 0
    process = start(tmp_path / "killed")
    last = wait_for_epochs(process, tmp_path / "killed", 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert torch.load(last, weights_only=True)["epoch"] < 59
    resumed = start(tmp_path / "resumed", f"--ckpt_path={last}")
    printed, _ = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, printed
    contents = [
        torch.load(tmp_path / name / "standard/synthetic/version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("whole", "resumed")
    ]
    assert contents[0]["epoch"] == contents[1]["epoch"] == 59
    for name, value in contents[0]["state_dict"].items():
        assert torch.equal(value, contents[1]["state_dict"][name]), name
    for key, state in contents[0]["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, contents[1]["optimizer_states"][0]["state"][key][name]), name
    histories = [
        next(state for name, state in content["callbacks"].items() if name.startswith("Convergence"))
        for content in contents
    ]
    assert histories[0] == histories[1]


def test_ctrl_c_keeps_the_last_checkpoint_and_says_how_to_go_on(tmp_path, start):
    """On a terminal of 40 columns too, whose lines the progress bar would otherwise break."""
    folder = tmp_path / "my runs"
    terminal = {"COLUMNS": "40", "FORCE_COLOR": "1"}
    process = start(folder, "--trainer.max_epochs=100000", "--trainer.enable_progress_bar=true", **terminal)
    last = wait_for_epochs(process, folder, 2)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"The checkpoint of the last completed epoch is {last}" in printed
    command = next(line for line in printed.splitlines() if "python -m lightning_hmm fit" in line)
    config = folder / "standard/synthetic/version_0/config.yaml"
    assert shlex.split(command) == [
        "python",
        "-m",
        "lightning_hmm",
        "fit",
        "--config",
        str(config),
        "--ckpt_path",
        str(last),
    ]
    assert "Traceback" not in printed
    assert torch.load(last, weights_only=True)["epoch"] >= 2


class Signals(Callback):
    """Sends signals to its own process at the end of the first epoch, or of the first batch of a test."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        for number in self.numbers:
            os.kill(os.getpid(), number)

    def on_test_batch_end(self, trainer, *args) -> None:
        self.on_train_epoch_end(trainer, None)


def signals(*numbers: int) -> list[str]:
    return [
        f"--trainer.callbacks={__name__}.Signals",
        f"--trainer.callbacks.numbers={[int(number) for number in numbers]}",
    ]


def test_sigterm_exits_with_143(tmp_path, start_script):
    process = start_script(["-m", "lightning_hmm", "fit", *own_run(tmp_path), *signals(signal.SIGTERM)])
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 143, printed
    assert "Traceback" not in printed


def test_sigterm_in_the_only_batch_of_a_test_exits_with_143(tmp_path):
    """Lightning does not look at the signal after the last batch."""
    logs = fit_small(tmp_path, "--trainer.max_epochs=1", "--data.init_args.test_fraction=0")
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "test",
                f"--config={logs / 'config.yaml'}",
                "--ckpt_path=last",
                "--data.init_args.test_fraction=0.1",
                *signals(signal.SIGTERM),
            ]
        )
    assert stopped.value.code == 143


def test_sigterm_exits_with_0_if_slurm_requeues_the_job(tmp_path, monkeypatch):
    slurm = {
        "JOB_ID": "7",
        "JOB_NAME": "train",
        "NTASKS": "1",
        "NTASKS_PER_NODE": "1",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
        "NODELIST": "here",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "requeued"}\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for numbers, code in (([signal.SIGTERM], 143), ([signal.SIGUSR1, signal.SIGTERM], 0)):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", *own_run(tmp_path), *signals(*numbers)])
        assert stopped.value.code == code
        assert (tmp_path / "requeued").exists() == (code == 0)


def test_further_ctrl_c_print_no_traceback(tmp_path, start_script):
    """One after Lightning has restored the handlers of the process, one while Python exits."""
    script = f"""
import atexit, os, signal, sys
from lightning.pytorch import Trainer
from lightning_hmm.cli import run

interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
teardown = Trainer._teardown
def teardown_and_interrupt(self):
    teardown(self)
    interrupt()
Trainer._teardown = teardown_and_interrupt
atexit.register(interrupt)
sys.argv[1:] = {["fit", *own_run(tmp_path), *signals(signal.SIGINT)]!r}
run()
"""
    process = start_script(["-c", script])
    printed, _ = process.communicate(timeout=120)
    assert "Stopped before the first epoch was completed" in printed
    assert "Traceback" not in printed
    assert "KeyboardInterrupt" not in printed.replace("Detected KeyboardInterrupt, attempting graceful shutdown", "")
    assert process.returncode != 0


MIXED = """
model:
  class_path: lightning_hmm.HMM
  init_args:
    num_states: 2
    emission:
      class_path: lightning_hmm.Product
      init_args:
        parts:
          x: {class_path: lightning_hmm.Gaussian}
          visits: {class_path: lightning_hmm.Poisson}
          weather: {class_path: lightning_hmm.Categorical, init_args: {pseudocount: 0.1}}
          code: {class_path: lightning_hmm.Categorical, init_args: {pseudocount: 0.1}}
data:
  class_path: datamodules.FileDataModule
  init_args:
    {path: train.csv, sequence_column: id, categorical_columns: [weather, code], data_dir: data, val_fraction: 0.0,
     test_fraction: 0.5}
trainer: {max_epochs: 2, enable_progress_bar: false, accelerator: cpu}
"""


def test_a_product_is_used_on_files_with_fewer_categories_in_another_order(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    Path("mixed.yaml").write_text(MIXED)
    rows = [f"{n % 4},{rng.normal():.3f},{rng.poisson(3)},{['rain', 'snow', 'sun'][n % 3]},{n % 5}" for n in range(60)]
    Path("train.csv").write_text("id,x,visits,weather,code\n" + "\n".join(rows) + "\n")
    main(["fit", "--config=mixed.yaml"])
    checkpoint = next(tmp_path.glob("logs/hmm/files/version_0/checkpoints/last.ckpt"))
    model = lightning_hmm.load(checkpoint)
    Path("few.csv").write_text("id,x,visits,weather,code\n7,0.5,2,snow,1\n7,1.5,,sun,0\n8,0.1,4,snow,\n")
    Path("permuted.csv").write_text("code,weather,id,visits,x\n1,snow,7,2,0.5\n0,sun,7,,1.5\n,snow,8,4,0.1\n")
    nan = float("nan")
    expected = model.score([[[0.5, 2, 1, 1], [1.5, nan, 2, 0]], [[0.1, 4, 1, nan]]])
    for path in ("few.csv", "permuted.csv"):
        common = ["--config=mixed.yaml", f"--data.init_args.path={path}", f"--ckpt_path={checkpoint}"]
        tested = main(["test", *common])
        assert float(tested.trainer.callback_metrics["test/log_likelihood"]) == pytest.approx(
            float(expected.sum()) / 3, rel=1e-10
        )
        main(["predict", *common, f"--predictions.path={path}.jsonl"])
        found = [json.loads(line)["log_likelihood"] for line in Path(f"{path}.jsonl").read_text().splitlines()]
        assert found == pytest.approx(expected.tolist(), rel=1e-10)
    Path("other.csv").write_text("id,x,visits,weather,code\n7,0.5,2,fog,1\n")
    with pytest.raises(
        ValueError, match=r"Categories of column 'weather' must be in .*, but 'fog' in row 1 of other\.csv is not"
    ):
        main(["test", "--config=mixed.yaml", "--data.init_args.path=other.csv", f"--ckpt_path={checkpoint}"])
    Path("other.csv").write_text("id,x,visits,weather,code\n7,0.5,2,sun,5\n")
    with pytest.raises(
        ValueError, match="Column 'code' must contain integers from 0 to 4, for 5 categories, but contains 5"
    ):
        main(["test", "--config=mixed.yaml", "--data.init_args.path=other.csv", f"--ckpt_path={checkpoint}"])
    Path("mixed.yaml").write_text(
        MIXED.replace(
            "class_path: lightning_hmm.Gaussian}", "class_path: lightning_hmm.Gaussian, init_args: {covariance: full}}"
        )
    )
    with pytest.raises(
        ValueError, match=r"parts\.x\.init_args\.covariance` is 'full', but 'diagonal' in the checkpoint"
    ):
        main(["test", *common])
