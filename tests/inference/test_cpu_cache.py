"""Compiled code on disk is found again only if it was made from the same sources."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import typeof
from numba.core.registry import cpu_target

import lightning_hmm.inference
from lightning_hmm.inference.cpu import cache
from lightning_hmm.inference.cpu.clones import forward_backward


class First(NamedTuple):
    values: np.ndarray


class Second(NamedTuple):
    values: np.ndarray


@cache.kernel
def total(given):
    return given.values.sum()


def key(given) -> tuple:
    return total._cache._index_key((typeof(given),), cpu_target.target_context.codegen())


def test_the_key_names_the_type_and_contains_plain_values_only():
    values = np.ones(3)
    assert key(First(values)) != key(Second(values))
    assert key(First(values)) == key(First(values.copy()))
    assert all(isinstance(part, str | tuple) for part in key(First(values)))


def test_the_key_depends_on_the_file_of_an_operator(tmp_path):
    keys = []
    for number in range(2):
        path = tmp_path / f"operator{number}.py"
        path.write_text(f"def predict(op):\n    return {number}\n")
        spec = importlib.util.spec_from_file_location(f"operator{number}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cache._file_stamps.pop(First, None)
        cache.record_source(First, module.predict)
        keys.append(key(First(np.ones(3))))
    cache._file_stamps.pop(First)
    assert keys[0] != keys[1]


def test_the_index_depends_on_all_source_files(tmp_path):
    assert total._cache._impl.locator.get_source_stamp().startswith(cache._PACKAGE_STAMP)
    (tmp_path / "one.py").write_text("a = 1\n")
    before = cache._hash_of(tmp_path / "one.py")
    (tmp_path / "one.py").write_text("a = 2\n")
    assert cache._hash_of(tmp_path / "one.py") != before


def test_every_compiled_module_of_inference_uses_this_cache():
    """numba's own cache does not notice an edit in a file that compiled code imports."""
    package = Path(lightning_hmm.inference.__file__).parent
    paths = [path for folder in ("cpu", "kernels") for path in (package / folder).rglob("*.py")]
    assert [path for path in paths if "cache=True" in path.read_text()] == []
    assert (
        cache._hash_of(*(path for folder in ("cpu", "kernels") for path in sorted((package / folder).rglob("*.py"))))
        == cache._PACKAGE_STAMP
    )
    assert isinstance(forward_backward.forward._cache, cache.SourceCache)


def test_a_line_says_what_is_compiled(caplog):
    @cache.kernel
    def product(given):
        return given.values.prod()

    cache.record_source(First, test_a_line_says_what_is_compiled)
    product._cache.disable()  # nothing is found, and nothing is stored
    product(First(np.ones(3)))
    product(First(np.ones(3)))
    cache._file_stamps.pop(First)
    assert [record.getMessage() for record in caplog.records] == [
        "Compiling product(First) for this machine. The result is kept on disk."
    ]
