"""Checks of options and columns that several data modules share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args


def require_positive(**options: float | None) -> None:
    """Raises an error for the first option that is neither ``None`` nor positive and finite."""
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be positive, but is {value} instead.")


def require_fraction(**options: float) -> None:
    """Raises an error for the first option that is not at least 0 and less than 1."""
    for name, value in options.items():
        if not 0 <= value < 1:
            raise ValueError(f"`{name}` must be at least 0 and less than 1, but is {value} instead.")


def require_choice(name: str, value: str, choices: Any) -> None:
    """Raises an error if the value of an option is not one of the values of a `Literal` type."""
    if value not in get_args(choices):
        raise ValueError(f"`{name}` must be one of {', '.join(get_args(choices))}, but is {value!r} instead.")


def require_distinct(wanted: list[str], names: list[str], path: Path) -> None:
    """Raises an error if the name of a wanted column occurs more than once among the columns of a file."""
    for name in wanted:
        if (count := names.count(name)) > 1:
            raise ValueError(
                f"Columns must have different names, but {path} has {count} columns {name!r}. Rename them in the file."
            )
