"""The argument parser and its error messages."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser


class Parser(LightningArgumentParser):
    """Lightning's parser with short error messages: they do not repeat the usage of the command."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        if self.exit_on_error and not os.environ.get("JSONARGPARSE_DEBUG"):
            sys.stderr.write(
                f"error: {relevant_lines(message)}\n"
                "(See `python -m lightning_hmm fit --help` for the options, "
                "and `--model.help StandardHMM` for those of a model.)\n"
            )
            self.exit(2)
        return super().error(message, ex)


def relevant_lines(message: str) -> str:
    """Returns the lines of an error message of jsonargparse that help the user.

    jsonargparse tries every type that an option may have and reports one error per type.
    """
    if "Errors:" not in message:
        return message
    inner = message.split("Errors:", 1)[1].split("Given value type:")[0]
    lines = [line.strip().removeprefix("- ") for line in inner.splitlines()]
    return "\n".join(
        line
        for line in lines
        if line and "NoneType" not in line and not line.startswith("Problem with given class_path")
    )
