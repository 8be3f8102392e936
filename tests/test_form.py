"""Rules for the form of the code: lengths of functions, numbers of parameters, imports and docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = ("lightning_hmm/inference/cpu/", "lightning_hmm/inference/kernels/")
MOST_LINES = 60  # of a function outside the kernels, without its docstring
LONG = {"lightning_hmm/training.py: fit"}  # with 15 arguments for the Trainer
MOST_PARAMETERS = 12  # of a kernel
# Kernels of the driver, whose parameters are arrays of one problem, and their numbers of parameters.
EXCEPTIONS = {
    "cpu/online.py online_updates": 22,
    "cpu/driver.py backward": 18,
    "cpu/driver.py run_lane": 17,
    "cpu/driver.py forward": 15,
    "cpu/viterbi.py viterbi_lane": 14,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yields the path of each module below the folders, and its syntax tree."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def num_lines(function: Function) -> int:
    """Returns the number of lines without the docstring."""
    total = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def num_parameters(function: Function) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)


def test_functions_are_short():
    long = {
        f"{path}: {function.name}"
        for path, tree in modules("lightning_hmm", "datamodules")
        if not path.startswith(KERNELS)
        for function in functions(tree)
        if num_lines(function) > MOST_LINES
    }
    assert long - LONG == set()


def test_kernels_have_few_parameters():
    many = {
        f"{path.removeprefix('lightning_hmm/inference/')} {function.name}": num_parameters(function)
        for path, tree in modules("lightning_hmm")
        if path.startswith(KERNELS)
        for function in functions(tree)
        if num_parameters(function) > MOST_PARAMETERS
    }
    assert {name for name, count in many.items() if count > EXCEPTIONS.get(name, MOST_PARAMETERS)} == set()


def test_no_private_name_is_imported():
    imported = [
        f"{path}: {alias.name} of {node.module}"
        for path, tree in modules("lightning_hmm", "datamodules", "experiments")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not imported


def test_public_names_have_docstrings():
    missing = [
        f"{path}: {node.name}"
        for path, tree in modules("lightning_hmm", "datamodules")
        if not path.startswith(KERNELS)
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        if not node.name.startswith("_") and ast.get_docstring(node) is None
    ]
    assert not missing
