"""Compilation and its cache on disk.

The cache of numba depends on the signature of a function and on the date of the file that defines it. It does not
depend on other files whose functions are compiled into the code. The cache defined here depends on the contents of all
source files of `inference.cpu` and `inference.kernels`, and on the files that define the operators in a signature.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache

OPTIONS: Any = {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
_CALLED: Any = {"nogil": True, "no_cfunc_wrapper": True}  # Nothing calls the functions from C, but Python may.
_log = logging.getLogger("lightning_hmm")
_FOLDERS = (Path(__file__).parent, Path(__file__).parent.parent / "kernels")


def _hash_of(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


_PACKAGE_STAMP = _hash_of(*(path for folder in _FOLDERS for path in sorted(folder.rglob("*.py"))))
_file_stamps: dict[type, set[str]] = {}


def record_source(arrays: type, function: Callable[..., Any]) -> None:
    """Makes cached code for operators of the type `arrays` depend on the file that `function` is defined in."""
    _file_stamps.setdefault(arrays, set()).add(_hash_of(Path(inspect.getfile(function))))


class _Locator:
    """A cache locator of numba whose source stamp is that of the package and of the file of the function."""

    def __init__(self, locator: Any, stamp: str) -> None:
        self._locator, self._stamp = locator, stamp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._locator, name)

    def get_source_stamp(self) -> str:
        return self._stamp


class _Implementation(CompileResultCacheImpl):
    def __init__(self, py_func: Any) -> None:
        self._stamp = _PACKAGE_STAMP + _hash_of(Path(inspect.getfile(py_func)))
        super().__init__(py_func)

    @property
    def locator(self) -> Any:
        return _Locator(self._locator, self._stamp)


class SourceCache(FunctionCache):
    """numba's cache, keyed by the sources that compiled code is made from."""

    _impl_class = _Implementation

    announces = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Loads compiled code. If there is none, a warning is logged, because the compilation can take some seconds."""
        found = super().load_overload(sig, target_context)
        if found is None and self.announces:
            operators = [
                argument.instance_class.__name__
                for argument in sig
                if getattr(argument, "instance_class", None) in _file_stamps
            ]
            _log.warning(
                "Compiling %s(%s) for this machine. The result is kept on disk.",
                self._py_func.__name__,
                ", ".join(operators),
            )
        return found

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        # The key contains strings only, because an index with classes cannot be read if one of them cannot be imported.
        _, *rest = super()._index_key(sig, codegen)
        classes = [
            argument.instance_class for argument in sig if isinstance(argument, types.NamedTuple | types.NamedUniTuple)
        ]
        names = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in classes)
        stamps = tuple(sorted(stamp for cls in classes for stamp in _file_stamps.get(cls, ())))
        return str(sig), names, stamps, *rest


def inner(function: Callable[..., Any]) -> Any:
    """Compiles a function that other compiled functions call."""
    return njit(**_CALLED, **OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Makes a function part of the one compiled function that calls it, which compiles faster."""
    return njit(nogil=True, inline="always", **OPTIONS)(function)


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function that Python calls, and caches it on disk. A warning is logged before the compilation."""
    compiled = _cached(function, OPTIONS)
    compiled._cache.announces = True
    return compiled


def strict_kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function like `kernel`, without fast math: comparisons with NaN and -inf work, and sums are not
    reordered.
    """
    return _cached(function, {"error_model": "numpy"})


def _cached(function: Callable[..., Any], options: Any) -> Any:
    compiled: Any = njit(**_CALLED, **options)(function)
    compiled._cache = SourceCache(function)
    compiled.compile = _without_collections(compiled.compile)
    return compiled


def _without_collections(compile_: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Pauses garbage collection, which takes a tenth of the time of a compilation and finds nothing."""

    def run(signature: Any) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return compile_(signature)
        finally:
            if enabled:
                gc.enable()

    return run
