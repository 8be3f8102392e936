"""Imports run one way: sequences <- inference <- distributions <- optim <- models <- command line."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ORDER = [
    "_version",
    "vocabulary",
    "columns",
    "conversion",
    "sequences",
    "random",
    "data",
    "observing",
    "ranks",
    "runs",
    "inference",
    "distributions",
    "optim",
    "metrics",
    "graphs",
    "models",
    "plotting",
    "callbacks",
    "training",
    "cli",
    "__main__",
]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_every_module_imports_only_what_is_below_it():
    for path in (ROOT / "lightning_hmm").rglob("*.py"):
        room = path.relative_to(ROOT / "lightning_hmm").with_suffix("").parts[0]
        if room == "__init__":
            continue
        for name in imported(path):
            top, _, rest = name.partition(".")
            assert top != "datamodules", f"{path} imports {name}"
            if top == "lightning_hmm" and rest:
                assert ORDER.index(rest.split(".")[0]) <= ORDER.index(room), f"{path} imports {name}"


def test_models_do_not_import_baselines():
    """The exception is `contexts`, whose smoothed n-grams are those of the Kneser-Ney model."""
    for path in (ROOT / "lightning_hmm/models").rglob("*.py"):
        if path.parent.name != "baselines" and path.name not in ("__init__.py", "contexts.py"):
            assert not {name for name in imported(path) if name.startswith("lightning_hmm.models.baselines")}, path


def test_inference_knows_neither_lightning_nor_models():
    for path in (ROOT / "lightning_hmm/inference").rglob("*.py"):
        assert not {name for name in imported(path) if name.split(".")[0] in ("lightning", "pytorch_lightning")}, path


def test_inference_contains_no_density():
    """Emissions become evidence before inference sees them.

    A compiled kernel names no family, and no module of inference imports one.
    """
    for path in (ROOT / "lightning_hmm/inference").rglob("*.py"):
        assert not {name for name in imported(path) if name.startswith("lightning_hmm.distributions")}, path
    for folder in ("cpu", "kernels"):
        for path in (ROOT / "lightning_hmm/inference" / folder).glob("*.py"):
            assert not re.findall("gaussian|poisson|categorical|bernoulli", path.read_text(), re.IGNORECASE), path


def test_datamodules_import_data_and_sequences_only():
    for path in (ROOT / "datamodules").rglob("*.py"):
        ours = {name for name in imported(path) if name.startswith("lightning_hmm")}
        assert ours <= {f"lightning_hmm.{name}" for name in ("columns", "data", "random", "sequences", "vocabulary")}, (
            path
        )


def test_importing_the_package_is_quiet():
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", "import lightning_hmm, datamodules"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == done.stderr == ""
