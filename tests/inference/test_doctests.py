"""The examples in the docstrings of `lightning_hmm.inference` run as written."""

import doctest
import importlib

import pytest

MODULES = ["api", "backends", "cloned", "cooccurrence", "evidence", "kalman", "operators", "particle", "sampling"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(f"lightning_hmm.inference.{name}")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
