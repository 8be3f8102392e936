"""Every experiment runs with ``--quick``, and goes on where it was stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import MovingTargetDataModule
from experiments.neural.guitar import cluster_sounds
from experiments.neural.side_by_side import Stack
from experiments.neural.training import averages
from experiments.records import Records
from lightning_hmm import Sequences, fit
from lightning_hmm.metrics import PredictionError
from lightning_hmm.models import RecurrentNet

ROOT = Path(__file__).parent.parent
EXPERIMENTS = [
    ["cloned.languages", "toy"],
    ["cloned.figures"],
    ["cloned.appendix"],
    ["dense.factorisation"],
    ["dense.sequences", "synthetic"],
    ["dense.sequences", "pos"],
    ["cloned.capacity"],
    ["cloned.texts"],
    ["cloned.scrambled"],
    ["dmc.speed"],
    ["dmc.learning_curves", "--data", "accelerometer"],
    ["dmc.tradeoff", "--data", "anti"],
    ["neural.guitar"],
    ["neural.moving"],
    ["neural.settings"],
    ["neural.visitors", "museum"],
]


@pytest.mark.parametrize("command", EXPERIMENTS, ids=" ".join)
def test_quick_runs_write_tables_and_figures(tmp_path, command):
    module, *rest = command
    line = [sys.executable, "-m", f"experiments.{module}", *rest, "--quick", "--out", str(tmp_path / "out")]
    for _ in range(2):
        ran = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        made = (tmp_path / "out" / "records.jsonl").read_text()
    assert len(made.splitlines()) == len(set(made.splitlines()))  # nothing was done twice
    assert list((tmp_path / "out").glob("*.md"))
    assert list((tmp_path / "out").glob("*.png"))


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_networks_side_by_side_learn_what_each_would_alone(cell):
    data = [MovingTargetDataModule(seed=seed, num_sequences=20, length=12, val_fraction=0.2, test_fraction=0.2) for seed in range(3)]
    for drawn in data:
        drawn.setup()
    make = lambda seed: RecurrentNet(25, num_features=3, cell=cell, residual=seed != 1, learning_rate=0.01, gradient_clip=0.1, seed=seed)  # noqa: E731
    together = [make(seed) for seed in range(3)]
    errors, epochs = Stack(together, data).fit(1, patience=1, learning_rate=0.01)  # a batch is all 12 sequences
    for seed, model in enumerate(together):
        alone = fit(make(seed), data[seed].train_sequences, max_epochs=1)
        for name, value in alone.named_parameters():
            torch.testing.assert_close(dict(model.named_parameters())[name], value, rtol=1e-4, atol=1e-6)
        metric = PredictionError()
        metric.update(model.predict_each(data[seed].val_sequences).values, data[seed].val_sequences)
        assert float(errors[seed]) == pytest.approx(float(metric.compute()), rel=1e-5)
    assert epochs.tolist() == [1, 1, 1]


def test_sounds_of_clusters_are_the_sound():
    sound = [torch.ones(8 + 4 * 9), torch.ones(8 + 4 * 4)]  # windows of 8 samples, 4 apart: 10 and 5 frames
    clusters = np.array([0] * 6 + [1] * 9)
    found = cluster_sounds(sound, clusters, window=8, hop=4)
    torch.testing.assert_close((found[0] + found[1])[2:-2], torch.ones(64))  # it fades in and out at the ends
    assert torch.equal(found[0][4:20], torch.ones(16))
    assert torch.equal(found[1][32:64], torch.ones(32))
    assert found[1][:20].sum() == found[0][32:].sum() == 0


def test_records_survive_a_half_written_line(tmp_path):
    path = tmp_path / "folder" / "records.jsonl"
    records = Records(path)
    records.add(n=1, value=2.5)
    with path.open("a") as file:
        file.write('{"n": 2, "val')
    again = Records(path)
    assert again.has(n=1)
    assert not again.has(n=2)
    again.add(n=2, value=0.5)
    assert [record["value"] for record in Records(path)] == [2.5, 0.5]
    assert Records(path).where(n=2) == [{"n": 2, "value": 0.5}]


def test_averages_are_over_the_observed_steps_of_the_window():
    sequences = Sequences.from_list([torch.tensor([[1.0], [torch.nan], [5.0], [6.0]]), torch.tensor([[2.0]])])
    expected = torch.tensor([1.0, torch.nan, 5.5, 5.5, 2.0])
    torch.testing.assert_close(averages(sequences, 3).values[:, 0], expected.to(sequences.values.dtype), equal_nan=True)
