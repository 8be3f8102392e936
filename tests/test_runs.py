"""Folders of runs."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

from lightning_hmm.runs import claim_version


def _claim_many(folder, barrier, found):
    barrier.wait()
    versions = []
    try:
        versions.extend(claim_version(folder) for _ in range(10))
    finally:  # or the test would wait for ever for a process that failed
        found.put(versions)


def test_processes_that_start_at_the_same_time_get_different_versions(tmp_path):
    context = get_context("fork")
    barrier, found = context.Barrier(4), context.SimpleQueue()
    processes = [context.Process(target=_claim_many, args=(tmp_path / "a/b", barrier, found)) for _ in range(4)]
    for process in processes:
        process.start()
    versions = [version for _ in processes for version in found.get()]
    for process in processes:
        process.join()
    assert sorted(versions) == list(range(40))


def test_the_next_version_comes_after_the_last(tmp_path):
    for name in ("version_3", "version_old", "other"):
        (tmp_path / name).mkdir()
    assert claim_version(tmp_path) == 4


def test_a_version_that_another_process_takes_in_between_is_left_alone(tmp_path, monkeypatch):
    """The folder is created after `claim_version` has looked for the last one."""
    look = Path.glob

    def look_and_create(folder, pattern):
        found = list(look(folder, pattern))
        (folder / "version_0").mkdir()
        return found

    monkeypatch.setattr(Path, "glob", look_and_create)
    assert claim_version(tmp_path) == 1
