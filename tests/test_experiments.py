"""Every experiment runs with ``--quick``, and goes on where it was stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.records import Records

ROOT = Path(__file__).parent.parent
EXPERIMENTS = [
    ["dense.factorisation"],
    ["dense.sequences", "synthetic"],
    ["dense.sequences", "pos"],
    ["cloned.capacity"],
    ["cloned.texts"],
    ["cloned.scrambled"],
    ["dmc.speed"],
    ["dmc.learning_curves", "--data", "accelerometer"],
    ["dmc.tradeoff", "--data", "anti"],
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
