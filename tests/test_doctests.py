"""The examples in the docstrings run and print what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("lightning_hmm", "datamodules")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    module = importlib.import_module(name.removesuffix(".__init__"))
    names = dict(vars(module))
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    # The example of the module comes first, and the others may use its names.
    for example in sorted(doctest.DocTestFinder().find(module), key=lambda found: found.name != module.__name__):
        example.globs = names if example.name == module.__name__ else dict(names)
        runner.run(example, clear_globs=False)
    result = runner.summarize(verbose=False)
    assert result.attempted > 0
    assert result.failed == 0
