"""How CSV files are parsed, for all modules that read them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from datamodules.paths import ending


def parse_options(data: pa.Buffer, path: Path, delimiter: str | None) -> pa.csv.ParseOptions:
    """The options of Arrow's reader for the content of a file. Raises where a quoted cell never ends, since Arrow would read the rest of the file into it."""
    delimiter = delimiter or ("\t" if ending(path) == ".tsv" else ",")
    if (
        int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord('"'))) % 2
    ):  # quotes come in pairs, but for those inside unquoted cells
        _refuse_open_quote(data, path, delimiter)
    # Without `newlines_in_values`, Arrow cuts a file of several blocks at any line break, also inside quotes.
    return pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)


def _refuse_open_quote(data: pa.Buffer, path: Path, delimiter: str) -> None:
    rows = csv.reader(
        io.TextIOWrapper(pa.BufferReader(data), encoding="utf-8", errors="replace", newline=""),
        delimiter=delimiter,
        strict=True,
    )
    line = 0
    while True:
        try:
            next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise ValueError(
                    f"Every quoted cell must end with a quotation mark, but the row that begins in line {line + 1} of {path} has one that never ends."
                ) from None
            # Python's reader is stricter than Arrow's about what follows a closing quote, and has a limit on the size of a cell.
        line = rows.line_num
