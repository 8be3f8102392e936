"""Finding the files that a user named, and telling whether they have changed since they were read."""

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
    """The files that a path, a folder or a pattern, or each of a list of them, leads to; looked up as given and then under `data_dir`.

    Of a folder only files with one of the `endings` are taken, before a possible ".gz"; all if there are none. The error
    names the `option` of the user.
    """
    found: list[Path] = []
    for pattern in [given] if isinstance(given, str) else given:
        places = [Path(pattern).expanduser(), data_dir / pattern]
        for place in places:
            entries = (
                sorted(place.iterdir())
                if place.is_dir()
                else [place]
                if place.exists()
                else sorted(map(Path, glob.glob(str(place), recursive=True)))
            )
            files = [file for file in entries if file.is_file() and not file.name.startswith(".")]
            if place.is_dir() and endings is not None:
                files = [file for file in files if ending(file) in endings]
            if files:
                break
        else:
            folders = dict.fromkeys(place if place.is_dir() else place.parent for place in places)
            listing = "; ".join(
                f"{folder}/ holds {some(sorted(entry.name for entry in folder.iterdir()))}"
                for folder in folders
                if folder.is_dir()
            )
            raise FileNotFoundError(
                f"`{option}` must lead to a file, but {pattern!r} does not, here or under {data_dir}. {listing or 'No such folder'}."
            )
        found += files
    if not found:
        raise ValueError(f"`{option}` must name at least one file, but is an empty list instead.")
    return found


def cache_name(options: Any, files: Mapping[str, list[Path]]) -> str:
    """A name for what is read from the files of each part: another one when a file or one of the plain-valued `options` changes."""
    stamps = [
        (part, str(file), str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        for part, group in files.items()
        for file in group
    ]
    digest = hashlib.blake2b(json.dumps([options, stamps]).encode(), digest_size=8).hexdigest()
    return f"{files['train'][0].name}-{digest}"


def ending(path: Path) -> str:
    """The ending of the name in small letters, before a possible ".gz"."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def some(names: list[str]) -> str:
    """The first ten of the names, for a message."""
    return (", ".join(names[:10]) or "nothing") + (f" and {len(names) - 10} more" if len(names) > 10 else "")
