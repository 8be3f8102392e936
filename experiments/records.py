"""The file of results of an experiment, and Markdown tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Records:
    """A file of results with one JSON object per line. Each object holds its settings and its results.

    Args:
        path: The file. It is created with its folder if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A run that was killed may have left an incomplete last line.
        self._records = [json.loads(line) for line in lines if line.endswith("\n")]
        if len(self._records) < len(lines):
            path.write_text("".join(lines[:-1]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._records)

    def has(self, **settings: Any) -> bool:
        """Returns whether there is a record with these settings."""
        return bool(self.where(**settings))

    def where(self, **settings: Any) -> list[dict[str, Any]]:
        """Returns the records with these settings. A setting of ``None`` also matches records without that setting."""
        wanted = settings.items()
        return [record for record in self._records if all(record.get(name) == value for name, value in wanted)]

    def values(self, result: str, **settings: Any) -> list[Any]:
        """Returns one result of all records that have it, among those with these settings."""
        return [record[result] for record in self.where(**settings) if result in record]

    def add(self, **record: Any) -> None:
        """Appends a record and writes it to the file immediately."""
        self._records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose first column is aligned to the left and whose other columns are aligned to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
