"""Runs the code and the commands of the README and of `docs`, and checks that links and paths in them exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_hmm.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/**/*.md")))
}
OWN_TESTS = ("README.md", "docs/cloned.md")  # their code blocks are run by tests of their own, which also check results


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_python_example_runs(capsys):
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) > 8


def test_the_example_of_the_guide_to_cloned_hmms_runs():
    (code,) = blocks("python", (ROOT / "docs/cloned.md").read_text())
    names: dict = {}
    exec(compile(code, "docs/cloned.md", "exec"), names)
    assert names["safe"].unscramble("a fitncuon of a srtnig") == "a function of a string"
    assert names["model"].layout.is_sparse


@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if blocks("python", text) and page not in OWN_TESTS]
)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    code = "\n".join(blocks("python", PAGES[page]))
    if page != "CONTRIBUTING.md":  # whose checks compare results
        code = re.sub(r"max_epochs=\d+", "max_epochs=1", code)
    # The code is in a file, because compiled code depends on the contents of the file that defines an operator.
    file = tmp_path / "page.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "page", module)
    spec.loader.exec_module(module)


def test_the_python_example_is_short():
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("bash")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "command",
    [
        line.split("      #")[0]
        for block in blocks("bash")
        for line in block.splitlines()
        if "lightning_hmm fit --config" in line
    ],
)
def test_the_fit_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning_hmm"])
    monkeypatch.chdir(ROOT)
    arguments = command.split("lightning_hmm ")[1].split()
    main(
        [
            *arguments,
            "--trainer.max_epochs=2",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.enable_progress_bar=false",
        ]
    )


def test_the_command_for_own_data_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning_hmm"])
    (tmp_path / "weather.csv").write_text((ROOT / "configs/standard/weather.csv").read_text())
    monkeypatch.chdir(tmp_path)
    command = next(block for block in blocks("bash") if "FileDataModule" in block).replace("\\\n", " ").replace("'", "")
    main([*command.split()[3:], "--trainer.max_epochs=2", "--trainer.enable_progress_bar=false"])
    assert list(tmp_path.glob("logs/standard/files/version_0/checkpoints/last.ckpt"))


def anchors(text: str) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", PAGES[page]):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_that_a_page_names_exist(page):
    text = PAGES[page]
    for file in re.findall(
        r"(?<![\w./])(?:benchmarks|configs|datamodules|experiments|lightning_hmm|tests)/[\w/]+\.(?:py|yaml|csv)", text
    ):
        assert (ROOT / file).exists(), file
    for module in re.findall(r"python -m (experiments(?:\.\w+)+)(?![\w.{<])", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_the_calls_on_the_architecture_page_exist():
    page = PAGES["docs/architecture.md"]
    for section in (page, *page.split("\n## ")):
        calls = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE)
        files = {file for file, _ in calls}
        assert not calls or f"{len(calls)} calls in {len(files)} files" in " ".join(section.split())
    numbered = re.findall(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    assert [int(number) for number, _, _ in numbered] == list(range(1, len(numbered) + 1))
    calls = [(file, call) for _, file, call in numbered]
    files = {file for file, _ in calls}
    defined = {file: set(defined_names(ast.parse((ROOT / file).read_text()))) for file in files}
    for file, call in calls:
        assert call in defined[file], f"{file} has no {call}"


def defined_names(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """The qualified names of the functions and methods in a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from defined_names(child, f"{child.name}.")
