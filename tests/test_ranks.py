"""Three processes with fewer sequences than ranks, against one process: every family runs, and gives the same model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.rank_worker import MODELS, RANDOM_BY_RANK, run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory) -> tuple[dict, str]:
    path = tmp_path_factory.mktemp("ranks") / "results.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", "-m", "tests.rank_worker", "3", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    # The timeout is generous, because each rank may have to compile the kernels.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    return (torch.load(path, weights_only=True) if path.exists() else {}), done.stderr[-3000:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_more_ranks_than_sequences(three_ranks, name):
    results, output = three_ranks
    assert name in results, output
    found = results[name]
    assert all(bool(value.isfinite().all()) for key, value in found["parameters"].items() if "log_" not in key)
    if name not in RANDOM_BY_RANK:
        alone = run(name)
        tolerance = 1e-10 if next(iter(alone["parameters"].values())).dtype == torch.float64 else 1e-5
        for key, value in alone["parameters"].items():
            torch.testing.assert_close(found["parameters"][key], value, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}")
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=max(tolerance, 1e-9), nan_ok=True)
