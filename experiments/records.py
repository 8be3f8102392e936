"""What an experiment has found so far, so that it can be stopped at any time and goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Records:
    """A file of results, one JSON object a line, each with the settings that it is of.

    Args:
        path: made with its folder where it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        self._records = [json.loads(line) for line in lines if line.endswith("\n")]  # a run that was killed may have left half a line
        if len(self._records) < len(lines):
            path.write_text("".join(lines[:-1]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)

    def has(self, **settings: Any) -> bool:
        """Whether there is a result of these settings."""
        return bool(self.where(**settings))

    def where(self, **settings: Any) -> list[dict[str, Any]]:
        """The results of these settings."""
        return [record for record in self._records if all(record.get(name) == value for name, value in settings.items())]

    def add(self, **record: Any) -> None:
        """Written at once."""
        self._records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """The first column left, the others right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
