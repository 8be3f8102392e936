"""The numbers that the benchmark scripts print: which times a ratio divides, and how memory is measured."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def baum_welch(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("baum_welch")


def cells(text: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table after a heading, by column."""
    lines = text[text.index(heading) :].split("\n\n")
    table = next(part for part in lines if part.startswith("|")).splitlines()
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_ratios_are_shown_at_equal_precision_in_float32_and_against_fit(baum_welch):
    setting = baum_welch.Setting(10, 20, 512, 300)
    seconds = {"ours float32": 2.0, "ours float64": 3.0, "ours fit float64": 6.0, "hmmlearn": 84.0, "dynamax": 100.0}
    rows = [
        baum_welch.Row("iteration", setting, name, spent, spent, 3 if name == "dynamax" else 10, 1)
        for name, spent in seconds.items()
    ]
    text = baum_welch.tables(rows, None, threads=2)
    (row,) = cells(text, "Time of the peers divided by ours")
    found = {column: value for column, value in row.items() if value.endswith("x")}
    assert list(found.values()) == ["28x", "42x", "14x", "50x"]
    equal, single, through_fit, dynamax = found
    assert "both float64" in equal
    assert "1 thread" in equal
    assert "2 threads" in equal
    assert "float64 / our iteration (2 threads), float32" in single
    assert "epoch of our `fit`" in through_fit
    assert "both float32" in dynamax
    assert f"Best of 10 rounds; best of 3 for dynamax at {setting}." in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_the_process_itself():
    """`ru_maxrss` of a process includes the peak of the process that started it."""
    child = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); from baum_welch import peak_bytes; print(peak_bytes())"
    )
    run = f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    parent = f"import subprocess, sys; held = b'x' * 400_000_000; {run}"
    peak = int(subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True).stdout)
    assert peak < 300_000_000
    grown = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); from baum_welch import peak_bytes, resident_bytes; "
    grown += "before = resident_bytes(); "
    grown += "held = b'x' * 50_000_000; print(resident_bytes() - before, peak_bytes() - before)"
    for growth in subprocess.run(
        [sys.executable, "-c", grown], capture_output=True, text=True, check=True
    ).stdout.split():
        assert 40_000_000 < int(growth) < 100_000_000
