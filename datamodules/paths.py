"""Finds the files that a path option refers to, and derives names of cache files from them."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def find_files(
    given: str | list[str], data_dir: Path, option: str = "path", endings: Collection[str] | None = None
) -> list[Path]:
    """Returns the files of a path, a folder, a pattern, or a list of these.

    Args:
        given: Where to look, first relative to the working directory and then relative to `data_dir`.
        data_dir: Folder of the data.
        option: Name of the option, for errors.
        endings: Endings of the files to take from a folder, without ".gz"; all files if ``None``.
    """
    found: list[Path] = []
    for pattern in [given] if isinstance(given, str) else given:
        places = [Path(pattern).expanduser(), data_dir / pattern]
        for place in places:
            if place.is_dir():
                entries = sorted(place.iterdir())
            elif place.exists():
                entries = [place]
            else:
                entries = sorted(map(Path, glob.glob(str(place), recursive=True)))
            files = [file for file in entries if file.is_file() and not file.name.startswith(".")]
            if place.is_dir() and endings is not None:
                files = [file for file in files if ending(file) in endings]
            if files:
                break
        else:
            folders = dict.fromkeys(place if place.is_dir() else place.parent for place in places)
            listing = "; ".join(
                f"{folder}/ contains {some(sorted(entry.name for entry in folder.iterdir()))}"
                for folder in folders
                if folder.is_dir()
            )
            raise FileNotFoundError(
                f"`{option}` must match a file, but {pattern!r} matches none, here or under {data_dir}. "
                f"{listing or 'No such folder'}."
            )
        found += files
    if not found:
        raise ValueError(f"`{option}` must name at least one file, but is an empty list instead.")
    return found


def cache_name(options: Any, files: Mapping[str, list[Path]]) -> str:
    """Returns a name for the cache of files, which changes with the files and with the `options` (plain values)."""
    stamps = [
        (part, str(file), str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        for part, group in files.items()
        for file in group
    ]
    digest = hashlib.blake2b(json.dumps([options, stamps]).encode(), digest_size=8).hexdigest()
    return f"{files['train'][0].name}-{digest}"


def ending(path: Path) -> str:
    """Returns the ending of a file name in lower case, without ".gz"."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def some(names: list[str]) -> str:
    """Returns the first ten names as text, for a message."""
    return (", ".join(names[:10]) or "nothing") + (f" and {len(names) - 10} more" if len(names) > 10 else "")
