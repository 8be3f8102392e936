"""Errors of figures and loggers are reported as warnings, and the run continues."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger

# Methods of a logger that Lightning calls between the start and the end of a run.
_LOGGER_METHODS = ("log_hyperparams", "log_graph", "log_metrics", "save", "after_save_checkpoint", "finalize")


@contextmanager
def reporting(what: str, reported: set[str]) -> Iterator[None]:
    """Converts an exception in the body into a warning, at most once for each `what`.

    Args:
        what: Name of the observer, for the warning.
        reported: Names that have been reported; `what` is added.
    """
    try:
        yield
    except Exception as error:
        if what not in reported:
            reported.add(what)
            warnings.warn(
                f"{what} failed, and the run continues without it: {type(error).__name__}: {error} "
                "(This is reported once.)",
                stacklevel=3,
            )


def guard_loggers(loggers: Iterable[Logger]) -> None:
    """Wraps the methods of `loggers` that Lightning calls during a run, so that exceptions become warnings."""
    for logger in loggers:
        reported: set[str] = set()
        for name in _LOGGER_METHODS:
            if name not in vars(logger):  # The loggers of a Trainer that ran before are wrapped already.
                setattr(logger, name, partial(_call, logger, name, reported))


def _call(logger: Logger, name: str, reported: set[str], *args: Any, **options: Any) -> Any:
    with reporting(f"{type(logger).__name__}.{name}", reported):
        return getattr(type(logger), name)(logger, *args, **options)
