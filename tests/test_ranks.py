"""Two and three processes against one: every row of `tests.table` gives the same model, metrics and predictions.

Two ranks share ragged sequences in global batches, the last of which may leave a rank without any. Three ranks have
fewer sequences than ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hmm.training import quiet_lightning
from tests.rank_worker import OTHERS, few, ragged
from tests.table import ROWS, assert_same_state, data, state

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def run_on_ranks(world_size: int, job: str, path: Path) -> tuple[dict[str, Any], str]:
    """What the first rank saved, and the end of what the processes said."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(world_size),
        "-m",
        "tests.rank_worker",
        job,
        str(path),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    # The timeout is generous, because each rank may have to compile the kernels.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    # Written by the processes that were started above. Predictions contain `Sequences`, which are no plain values.
    return (torch.load(path, weights_only=False) if path.exists() else {}), done.stderr[-3000:]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[dict[str, Any], str]:
    return run_on_ranks(2, "ragged", tmp_path_factory.mktemp("two") / "results.pt")


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory) -> tuple[dict[str, Any], str]:
    return run_on_ranks(3, "few", tmp_path_factory.mktemp("three") / "results.pt")


def alone(run: Any, *arguments: Any) -> dict[str, Any]:
    with quiet_lightning(announcements=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = run(*arguments)
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    assert found.get("global_step") == wanted.get("global_step")
    if "state" in wanted:
        assert_same_state(found["state"], wanted["state"], tolerance)
    if "metrics" in wanted:
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=max(tolerance, 1e-9), nan_ok=True)
    if "predictions" in wanted:
        assert list(range(len(found["predictions"]))) == sorted(found["predictions"]) == sorted(wanted["predictions"])
        for number, values in wanted["predictions"].items():
            for key, value in values.items():
                torch.testing.assert_close(
                    found["predictions"][number][key],
                    value,
                    rtol=max(tolerance, 1e-9),
                    atol=max(tolerance, 1e-9),
                    equal_nan=True,
                )


@pytest.mark.parametrize("name", ROWS)
def test_two_ranks_equal_one(two_ranks, name):
    results, output = two_ranks
    assert name in results, output
    row, found = ROWS[name], results[name]
    if row.random_by_rank:
        assert all(bool(value.isfinite().all()) for value in found["state"].values())
        return
    wanted = alone(ragged, name)
    assert_same(found, wanted, row.tolerance)
    start = row.make()
    if start.starts_from_data:
        start.initialize(data(row.kind))
    before = state(start)
    moved = [
        value.shape != before[key].shape or not torch.allclose(value, before[key], atol=1e-3, equal_nan=True)
        for key, value in wanted["state"].items()
    ]
    assert any(moved)  # it learned


@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_equal_one_in_other_runs(two_ranks, name):
    results, output = two_ranks
    assert name in results, output
    assert_same(results[name], alone(OTHERS[name]), 1e-8)


@pytest.mark.parametrize("name", ROWS)
def test_more_ranks_than_sequences(three_ranks, name):
    results, output = three_ranks
    assert name in results, output
    row, found = ROWS[name], results[name]
    assert all(bool(value.isfinite().all()) for key, value in found["state"].items() if "log_" not in key)
    if not row.random_by_rank:
        assert_same(found, alone(few, name), row.tolerance)
