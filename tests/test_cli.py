"""The command line as a person uses it: shipped configs, what it prints and writes, and what it says when something is wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_hmm
from lightning_hmm.cli import main, run

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))
SMALL = ["--data.init_args.num_sequences=40", "--data.init_args.max_length=40", "--trainer.enable_progress_bar=false"]


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning_hmm"])


def fit_small(folder: Path, *more: str) -> Path:
    """Trains a small model; returns the log folder."""
    main(["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", f"--trainer.default_root_dir={folder}", "--trainer.max_epochs=3", *SMALL, *more])
    return max((folder / "standard/synthetic").glob("version_*"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_runs_two_steps(path, tmp_path):
    assert path.read_text().startswith(f"# python -m lightning_hmm fit --config {path.relative_to(ROOT)}\n")
    main(["fit", f"--config={path}", "--trainer.fast_dev_run=2", f"--trainer.default_root_dir={tmp_path}"])


def test_fit_logs_saves_and_says_where(tmp_path, capsys):
    logs = fit_small(tmp_path)
    printed = capsys.readouterr().out
    best = next(logs.glob("checkpoints/epoch=*.ckpt"))
    for line in (f"Best checkpoint:  {best}", f"tensorboard --logdir {logs}", "test/bits_per_symbol", "test/state_accuracy"):
        assert line in printed
    assert (logs / "checkpoints/last.ckpt").exists()
    assert list(logs.glob("events.out.tfevents.*"))
    with (logs / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"epoch", "step", "train/log_likelihood", "train/bits_per_symbol", "val/log_likelihood", "val/bits_per_symbol", "test/bits_per_symbol"} <= set(
        rows[0]
    )
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
    common = [f"--config={logs / 'config.yaml'}", f"--ckpt_path={best}", f"--trainer.default_root_dir={tmp_path / 'more'}"]
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
    assert f"Last checkpoint:  {logs / 'checkpoints/last.ckpt'} (no validation data to choose by)" in printed
    assert "Decode with it:" in printed


@pytest.mark.parametrize("option", ["--trainer.enable_checkpointing=false", "--trainer.logger=false"])
def test_nothing_is_saved_or_logged_where_nothing_is_wanted(tmp_path, option, capsys):
    config = ROOT / "configs/standard/synthetic.yaml"
    main(["fit", f"--config={config}", f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=2", *SMALL, option])
    assert "Trained StandardHMM for 2 epochs." in capsys.readouterr().out


# Own data


def fit_file(folder: Path, rows: list[str]) -> Path:
    """Trains on a CSV of 20 sequences of 8 rows; returns the log folder."""
    (folder / "own.csv").write_text("day,seen\n" + "\n".join(f"{n // 8},{rows[(n * n + n // 5) % len(rows)]}" for n in range(160)))
    options = ["--model=StandardHMM", "--model.init_args.num_states=2", "--data=datamodules.FileDataModule", f"--data.init_args.path={folder / 'own.csv'}"]
    options += ["--data.init_args.columns=[seen]", "--data.init_args.sequence_column=day", f"--data.init_args.data_dir={folder / 'cache'}"]
    main(["fit", *options, "--trainer.max_epochs=3", f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false"])
    return max(folder.glob("standard/files/version_*"))


def test_own_data_keep_their_names(tmp_path):
    model = lightning_hmm.load(fit_file(tmp_path, ["rain", "sun", "cloud"]) / "checkpoints/last.ckpt")
    assert model.vocabulary.names == ["cloud", "rain", "sun"]
    assert model.decode([["rain", "sun"]]).tolist() == model.decode([[1, 2]]).tolist()


@pytest.mark.parametrize(("rows", "new"), [(["rain", "sun", "cloud"], ["sun", "rain"]), (["0", "1", "2"], ["1", "0"])], ids=["names", "numbers"])
def test_a_new_file_is_decoded_with_the_symbols_of_training(tmp_path, rows, new):
    """It need not have all of them; and all of it is decoded."""
    logs = fit_file(tmp_path, rows)
    last = logs / "checkpoints/last.ckpt"
    (tmp_path / "new.csv").write_text("day,seen\n" + "\n".join(f"{n // 3},{new[n % 2]}" for n in range(12)))
    common = [f"--config={logs / 'config.yaml'}", f"--ckpt_path={last}", f"--data.init_args.path={tmp_path / 'new.csv'}"]
    main(["predict", *common, f"--predictions.path={tmp_path / 'states.jsonl'}"])
    lines = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    model = lightning_hmm.load(last)
    days = [[new[(3 * day + step) % 2] for step in range(3)] for day in range(4)]
    expected = model.score(days if model.vocabulary else [[int(symbol) for symbol in day] for day in days])
    assert [line["log_likelihood"] for line in lines] == pytest.approx(expected.tolist())


def test_a_new_file_with_another_symbol_is_refused(tmp_path):
    logs = fit_file(tmp_path, ["rain", "sun"])
    (tmp_path / "new.csv").write_text("day,seen\n0,rain\n0,storm\n")
    common = [f"--config={logs / 'config.yaml'}", f"--ckpt_path={logs / 'checkpoints/last.ckpt'}", f"--data.init_args.path={tmp_path / 'new.csv'}"]
    with pytest.raises(ValueError, match=r"Symbols must be in `vocabulary`, but 'storm' in .*new\.csv"):
        main(["test", *common])
    with pytest.raises(ValueError, match="must have the symbols that the checkpoint was trained on, 'rain', 'sun', but have 'rain', 'storm'"):
        main(["test", *common, "--data.init_args.vocabulary=[rain, storm]", "--data.init_args.test_fraction=0.6"])


def test_standardised_columns_keep_the_units_of_training(tmp_path):
    (tmp_path / "train.csv").write_text("x\n" + "\n".join(str(100 + 10 * (n % 7)) for n in range(80)))
    (tmp_path / "new.csv").write_text("x\n" + "\n".join(str(100 + n % 3) for n in range(30)))
    options = ["--model=StandardHMM", "--model.init_args.num_states=2", "--model.init_args.emission=gaussian", "--data=datamodules.FileDataModule"]
    options += ["--data.init_args.kind=vectors", "--data.init_args.standardize=true", f"--data.init_args.data_dir={tmp_path / 'cache'}"]
    options += [f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    trained = main(["fit", *options, f"--data.init_args.path={tmp_path / 'train.csv'}", "--trainer.max_epochs=2"])
    last = tmp_path / "standard/files/version_0/checkpoints/last.ckpt"
    again = main(["predict", *options, f"--data.init_args.path={tmp_path / 'new.csv'}", f"--ckpt_path={last}"])
    assert torch.equal(again.datamodule.mean, trained.datamodule.mean)
    first = float(again.datamodule._source("train")[0].values[0])
    assert first == pytest.approx((100 - float(trained.datamodule.mean)) / float(trained.datamodule.std))


def test_a_family_of_ones_own_goes_all_the_way(tmp_path):
    """It need not know of the names that the data hand over; what was trained loads, is resumed, and predicts."""
    (tmp_path / "counts.csv").write_text("day,calls\n" + "\n".join(f"{n // 8},{(n * n) % 7 + n % 2 * 9}.0" for n in range(160)))
    options = ["--model=tests.models.test_new_family.PoissonHMM", "--model.init_args.num_states=2", "--data=datamodules.FileDataModule"]
    options += [f"--data.init_args.path={tmp_path / 'counts.csv'}", "--data.init_args.sequence_column=day", "--data.init_args.columns=[calls]"]
    options += ["--data.init_args.kind=vectors", f"--data.init_args.data_dir={tmp_path / 'cache'}", f"--trainer.default_root_dir={tmp_path}"]
    options += ["--trainer.enable_progress_bar=false"]
    main(["fit", *options, "--trainer.max_epochs=2"])
    last = tmp_path / "poisson/files/version_0/checkpoints/last.ckpt"
    assert type(lightning_hmm.load(last)).__name__ == "PoissonHMM"
    main(["fit", *options, "--trainer.max_epochs=4", f"--ckpt_path={last}"])
    main(["predict", *options, f"--ckpt_path={last}", f"--predictions.path={tmp_path / 'states.jsonl'}"])
    assert len((tmp_path / "states.jsonl").read_text().splitlines()) == 20


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
    with pytest.raises(ValueError, match=f"`--ckpt_path` must say which model to {subcommand}"):
        main([subcommand, f"--config={ROOT / 'configs/standard/synthetic.yaml'}"])


def test_a_size_that_the_data_contradict_is_refused():
    with pytest.raises(ValueError, match=r"`--model\.init_args\.num_symbols` is what the data say, 12, but 5 was given"):
        main(["fit", f"--config={ROOT / 'configs/standard/synthetic.yaml'}", "--model.init_args.num_symbols=5"])


def test_the_sentence_of_an_error_is_not_buried(monkeypatch, capsys):
    options = ["fit", "--model=StandardHMM", "--model.init_args.num_states=2", "--data=datamodules.FileDataModule", "--data.init_args.columns=[sen]"]
    monkeypatch.setattr(sys, "argv", ["lightning_hmm", *options, f"--data.init_args.path={ROOT / 'configs/standard/weather.csv'}"])
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
def start():
    """Starts runs, and ends those that a failing test leaves behind."""
    processes = []

    def start_one(folder: Path, *more: str) -> subprocess.Popen:
        processes.append(start_process(folder, *more))
        return processes[-1]

    yield start_one
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def start_process(folder: Path, *more: str) -> subprocess.Popen:
    options = ["--trainer.max_epochs=60", "--model.init_args.discount=0.9", "--model.init_args.transition_pseudocount=1", "--model.init_args.restarts=2"]
    options += ["--data.init_args.batch_size=50", "--data.init_args.shuffle=true", "--convergence.tolerance=0", "--trainer.enable_progress_bar=false"]
    command = [
        sys.executable,
        "-m",
        "lightning_hmm",
        "fit",
        "--config=configs/standard/synthetic.yaml",
        f"--trainer.default_root_dir={folder}",
        *options,
        *more,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell's background job ignores Ctrl-C, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_epochs(process: subprocess.Popen, folder: Path, epochs: int) -> Path:
    """Waits until the run has finished some epochs; returns its last checkpoint."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for path in folder.glob("standard/synthetic/version_0/checkpoints/last.ckpt"):
            # Not by the file of the best epoch: that one is written first, and a signal between the two leaves the last one behind it.
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
    contents = [torch.load(tmp_path / name / "standard/synthetic/version_0/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "resumed")]
    assert contents[0]["epoch"] == contents[1]["epoch"] == 59
    for name, value in contents[0]["state_dict"].items():
        assert torch.equal(value, contents[1]["state_dict"][name]), name
    for key, state in contents[0]["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, contents[1]["optimizer_states"][0]["state"][key][name]), name
    histories = [next(state for name, state in content["callbacks"].items() if name.startswith("Convergence")) for content in contents]
    assert histories[0] == histories[1]


def test_ctrl_c_keeps_the_last_checkpoint_and_says_how_to_go_on(tmp_path, start):
    process = start(tmp_path, "--trainer.max_epochs=100000")
    last = wait_for_epochs(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"The last finished epoch is in {last}" in printed
    assert f"fit --config {tmp_path / 'standard/synthetic/version_0/config.yaml'} --ckpt_path {last}" in printed
    assert "Traceback" not in printed
    assert torch.load(last, weights_only=True)["epoch"] >= 2
