"""Every experiment runs with ``--quick`` and resumes, and the published records reproduce the published tables."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import MovingTargetDataModule
from experiments.families.table import PAGE, with_tables
from experiments.neural.guitar_sequence import cluster_sounds
from experiments.neural.stacked_networks import Stack
from experiments.neural.training import averages
from experiments.records import Records, markdown_table
from experiments.run import Experiment, Option, Run, run
from lightning_hmm import Sequences, fit
from lightning_hmm.metrics import PredictionError
from lightning_hmm.models import RecurrentNet

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
EXPERIMENTS = [
    ["cloned.languages", "toy"],
    ["cloned.figures"],
    ["cloned.appendix"],
    ["dense.factorization"],
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
    ["neural.ranks"],
    ["families.agreement"],
]
# Command, folder of its records, documentation page, and the tables that the page contains.
PUBLISHED = [
    ("cloned.languages toy", "cloned/toy", "results/cloned.md", ["table"]),
    ("cloned.languages brackets", "cloned/brackets", "results/cloned.md", ["table"]),
    ("cloned.languages shifted", "cloned/shifted", "results/cloned.md", ["table"]),
    ("cloned.figures --path milton-paradise.txt", "cloned/figures", "results/cloned.md", ["forward"]),
    ("cloned.appendix", "cloned/appendix", "results/cloned.md", ["table"]),
    ("cloned.texts", "cloned/texts", "results/cloned_text.md", ["table"]),
    ("cloned.texts --cleaning paper --methods ngrams", "cloned/texts_paper", "results/cloned_text.md", ["table"]),
    ("cloned.capacity", "cloned/capacity", "results/cloned_text.md", ["table"]),
    ("cloned.scrambled", "cloned/scrambled", "results/cloned_text.md", ["table"]),
    (
        "dense.sequences protein",
        "dense/protein",
        "results/dense.md",
        ["cooccurrence_mad_analytic", "cooccurrence_mad_sampled", "nll_per_symbol", "nll_normalised"],
    ),
    (
        "dense.sequences protein --max-length 500 --rare-fraction 0.05",
        "dense/protein_code",
        "results/dense.md",
        ["cooccurrence_mad_analytic", "cooccurrence_mad_sampled", "nll_per_symbol"],
    ),
    ("neural.moving", "neural/moving", "results/neural.md", ["errors_d3", "errors_d5", "shares_d3", "shares_d5"]),
    ("neural.settings", "neural/settings", "results/neural.md", ["depth", "particles", "share"]),
    ("neural.guitar", "neural/guitar/recorded", "results/neural.md", ["recovery"]),
    (
        "neural.guitar --compression 30 --models recovery --latent 5 10",
        "neural/guitar/recorded_30",
        "results/neural.md",
        ["recovery"],
    ),
    ("neural.visitors museum", "neural/visitors/museum", "results/neural.md", ["agreement"]),
    ("neural.visitors tracks", "neural/visitors/tracks", "results/neural.md", ["agreement"]),
    ("neural.ranks", "neural/ranks", "neural.md", []),
    ("families.agreement", "families/agreement", "agreement.md", ["table"]),
]


@pytest.fixture
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


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


def table_rows(text: str) -> list[tuple[str, ...]]:
    """The cells of all rows of Markdown tables, without the first, which names the row."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|"))[1:] for line in lines]


def header_rows(text: str) -> list[tuple[str, ...]]:
    lines = text.splitlines()
    headers = [line for line, after in pairwise(lines) if after.startswith("| ---")]
    return table_rows("\n".join(headers))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("command", "folder", "page", "tables"), PUBLISHED, ids=[entry[0] for entry in PUBLISHED])
def test_published_records_make_the_published_tables(tmp_path, command, folder, page, tables):
    def compute(run: Run, case: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(f"There is no record of {case}.")

    module, *arguments = command.split()
    shutil.copy(ROOT / "docs" / "results" / "records" / folder / "records.jsonl", tmp_path)
    experiment = importlib.import_module(f"experiments.{module}").EXPERIMENT
    run(replace(experiment, compute=compute, figure=None), [*arguments, "--out", str(tmp_path)])
    published = set(table_rows((ROOT / "docs" / page).read_text()))
    for name in tables:
        text = (tmp_path / f"{name}.md").read_text()
        headers = header_rows(text)
        rows = [row for row in table_rows(text) if row not in headers]
        assert len(rows) > 2
        assert not [row for row in rows if row not in published], name


def test_the_page_of_families_contains_the_tables_of_the_code():
    page = PAGE.read_text()
    assert all(f"| `{name}` |" in page for name in ("Gaussian", "ZeroInflated", "Full", "SemiMarkovHMM"))
    assert with_tables(page) == page, "Run `python -m experiments.families.table`."


def test_every_published_folder_of_records_is_checked():
    folder = ROOT / "docs" / "results" / "records"
    assert {str(path.parent.relative_to(folder)) for path in folder.rglob("records.jsonl")} == {
        entry[1] for entry in PUBLISHED
    }


@pytest.mark.usefixtures("_threads")
def test_a_run_computes_what_is_missing_and_writes_each_record_at_once(tmp_path, capsys):
    computed = []

    def cases(run):
        yield from ({"size": run.size, "seed": seed} for seed in range(run.seeds))
        yield {"sum": True, "size": run.size, "seeds": len(run.records.values("seed", size=run.size))}

    def compute(run, case):
        if case.get("seed") == 1 and not computed.count(case):
            computed.append(case)
            raise KeyboardInterrupt
        computed.append(case)
        return {"value": sum(run.records.values("value")) if "sum" in case else 10.0 * case["seed"]}

    def table(run):
        return markdown_table(["value"], [[f"{value:g}"] for value in run.records.values("value", size=run.size)])

    experiment = Experiment(
        folder="some/folder",
        description="A test.",
        cases=cases,
        compute=compute,
        table=table,
        figure=None,
        options=[Option("--seeds", type=int, default=3)],
        settings={"size": 100},
        quick={"size": 1, "seeds": 1},
    )
    arguments = ["--out", str(tmp_path / "out")]
    with pytest.raises(KeyboardInterrupt):
        run(experiment, arguments)
    assert [record["seed"] for record in Records(tmp_path / "out" / "records.jsonl")] == [0]
    run(experiment, arguments)
    records = list(Records(tmp_path / "out" / "records.jsonl"))
    assert [record["value"] for record in records] == [0, 10, 20, 30]
    assert records[-1]["seeds"] == 3  # cases may depend on records that were computed before
    assert (tmp_path / "out" / "table.md").read_text().count("\n") == 6
    printed = capsys.readouterr().out
    assert printed.count("size 100, seed 1: value 10\n") == 1
    assert f"Written to {tmp_path / 'out'}: table.md, records.jsonl." in printed
    computed.clear()
    run(experiment, arguments)
    assert computed == []
    run(experiment, [*arguments, "--quick"])  # has other settings, so it does not use the same records
    assert [case["size"] for case in computed] == [1, 1]


@pytest.mark.usefixtures("_threads")
def test_quick_runs_have_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing: Any = {
        "cases": lambda run: [{"a": 1}],
        "compute": lambda run, case: {},
        "table": lambda run: "",
        "figure": None,
    }
    experiment = Experiment(
        folder=lambda run: f"model/{run.kind}", description="A test.", options=[Option("kind")], **nothing
    )
    run(experiment, ["one"])
    run(experiment, ["one", "--quick"])
    found = {str(path.parent) for path in Path("logs").rglob("records.jsonl")}
    assert found == {"logs/experiments/model/one", "logs/experiments/quick/model/one"}


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_stacked_networks_learn_what_each_learns_alone(cell):
    data = [
        MovingTargetDataModule(seed=seed, num_sequences=20, length=12, val_fraction=0.2, test_fraction=0.2)
        for seed in range(3)
    ]
    for drawn in data:
        drawn.setup()

    def make(seed):
        return RecurrentNet(
            25, num_features=3, cell=cell, residual=seed != 1, learning_rate=0.01, gradient_clip=0.1, seed=seed
        )

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
