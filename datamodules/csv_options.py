"""Parse options for CSV files, used by all modules that read them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from datamodules.paths import ending


def parse_options(data: pa.Buffer, path: Path, delimiter: str | None) -> pa.csv.ParseOptions:
    """Returns the options of Arrow's reader for the content of a file.

    Raises an error if a quoted cell is not closed, because Arrow would read the rest of the file into that cell.
    """
    delimiter = delimiter or ("\t" if ending(path) == ".tsv" else ",")
    # An even number of quotes is safe. An odd number can also be due to quotes inside unquoted cells.
    if int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord('"'))) % 2:
        _refuse_open_quote(data, path, delimiter)
    # Without `newlines_in_values`, Arrow splits a large file into blocks at any line break, even inside quotes.
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
                    f"Every quoted cell must be closed, but the row that begins in line {line + 1} of {path} has a "
                    "quoted cell without a closing quote."
                ) from None
            # Other errors are ignored: Python's reader is stricter than Arrow's about the characters after a closing
            # quote, and it limits the size of a cell.
        line = rows.line_num
