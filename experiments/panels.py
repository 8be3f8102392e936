"""The style of the figures of all experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DARK, GREY, LIGHT, GRID = "#4D4D4D", "#8C8C8C", "#B8B8B8", "#E5E5E5"
Grid = Literal["both", "x", "y"]


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, *, grid: Grid | None = None, **subplots: Any
) -> tuple[Figure, np.ndarray]:
    """Returns a figure of `width` times `height` inches and its (rows, columns) axes.

    Args:
        width: Width of the figure.
        height: Height of the figure.
        rows: Rows of axes.
        columns: Columns of axes.
        grid: Direction of the grid lines.
        subplots: Forwarded to `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    for axes in all_axes.flat:
        axes.spines[["top", "right"]].set_visible(False)
        if grid is not None:
            axes.grid(axis=grid, color=GRID, linewidth=0.6)
    return figure, all_axes


def panel(width: float, height: float, grid: Grid | None = None) -> tuple[Figure, Axes]:
    """Returns a figure with a single pair of axes."""
    figure, all_axes = panels(width, height, grid=grid)
    return figure, all_axes[0, 0]


def legend(axes: Axes, outside: str | None = None, columns: int = 1, **options: Any) -> None:
    """Adds a legend to the axes, or with `outside` to that side of the whole figure."""
    options = {"frameon": False, "fontsize": "small", "ncols": columns, **options}
    if outside is None:
        axes.legend(**options)
    else:
        handles, labels = axes.get_legend_handles_labels()
        axes.figure.legend(handles, labels, **{"loc": f"outside {outside}", **options})


def log_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Makes the horizontal axis logarithmic, with ticks at these values only."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.xaxis.minorticks_off()


def error_bars(axes: Axes, places: Sequence[float], median: Any, low: Any, high: Any, **options: Any) -> None:
    """Draws points with bars from `low` to `high`."""
    middle, bottom, top = (np.asarray(values) for values in (median, low, high))
    options = {"marker": "o", "markersize": 4, "capsize": 2, **options}
    axes.errorbar(places, middle, [middle - bottom, top - middle], **options)
