"""Seeds that can be replayed: set LIGHTNING_HMM_SEED to the number that a failing run printed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

SEED = int(os.environ.get("LIGHTNING_HMM_SEED", "0"))


def pytest_report_header() -> str:
    return f"LIGHTNING_HMM_SEED={SEED}, torch threads: {torch.get_num_threads()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the slow files, so that no process runs one alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)
