"""The common style of the figures: colors, axes, titles, legends and tick labels.

Figures are created without pyplot. They need no display, do not change the current figure of pyplot, and are freed with
their last reference. In a notebook, a figure in the last line of a cell is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

Array = Tensor | np.ndarray | Sequence[Any]

# The color-blind-safe palette of Okabe and Ito, without its yellow, which has too little contrast on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
BLUE, VERMILION = COLORS[:2]
INK = "#333333"
GRAY = "#8C8C8C"
LIGHT_GRAY = "#B8B8B8"
PROBABILITY_COLORS = LinearSegmentedColormap.from_list(
    "probability", ["#FFFFFF", "#BBD9EC", "#4A9CCB", BLUE, "#00263C"]
)
SIGNED_COLORS = LinearSegmentedColormap.from_list("signed", ["#00395A", BLUE, "#F7F7F7", VERMILION, "#6B2F00"])
STATE_COLORS = LinearSegmentedColormap.from_list("states", ["#00263C", BLUE, "#009E73", "#E69F00"])


def to_numpy(array: Array) -> np.ndarray:
    """Returns the numbers as a float64 array in the memory of the CPU."""
    return array.detach().double().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array, dtype=np.float64)


def new_figure(
    rows: int = 1, heights: Sequence[float] | None = None, share_x: bool = False, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """Returns a figure and its panels, row by row from top to bottom."""
    figure = Figure(figsize=(7, 5), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    panels = figure.subplots(
        rows, columns, squeeze=False, sharex=share_x, gridspec_kw={"height_ratios": heights} if heights else None
    ).ravel()
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(color="#E6E6E6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRAY)
        axes.tick_params(labelsize=9, labelcolor=INK, color=GRAY, length=3)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(size=10, color=INK)
    return figure, list(panels)


def set_title(axes: Axes, text: str) -> None:
    """Sets the title, aligned to the left."""
    axes.set_title(text, fontsize=11, color=INK, loc="left")


def color_bar(figure: Figure, axes: Axes, image: AxesImage | ScalarMappable, label: str) -> Any:
    """Adds a color bar to the right of the axes and returns it."""
    bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, labelcolor=INK, color=GRAY, length=3)
    bar.set_label(label, size=10, color=INK)
    return bar


def add_legend(axes: Axes, beside: bool = False) -> None:
    """Adds a legend outside the axes: at the right end of the title line, or to the right of the axes if `beside`."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        if not beside:
            place = {"loc": "lower right", "bbox_to_anchor": (1, 0.99), "ncols": len(handles)}
        legend = axes.legend(**place, frameon=False, fontsize=9, labelcolor=INK, borderpad=0.1, columnspacing=1.2)
        for handle in legend.legend_handles:
            if isinstance(handle, Line2D):
                handle.set_markersize(5)


def label_ticks(axis: Axis, count: int, names: Sequence[str] | None = None, max_labels: int = 40) -> None:
    """Labels every entry, or every second, fifth, tenth, ... entry if there are more than `max_labels`.

    An axis of numbers (no `names`) has fewer labels than an axis of names.
    """
    limit = max_labels if names is not None or count <= 20 else min(max_labels, 13 if count <= 1000 else 7)
    stride = next(step * 10**power for power in range(20) for step in (1, 2, 5) if count <= limit * step * 10**power)
    ticks = range(0, count, stride)
    labels = [str(tick) for tick in ticks] if names is None else [visible_name(names[tick]) for tick in ticks]
    # Names are not TeX, even if they contain dollar signs.
    axis.set_ticks(list(ticks), labels, parse_math=False, fontsize=9 if len(labels) <= 30 else 7)
    if axis is axis.axes.xaxis and max(map(len, labels)) * len(labels) > 75:
        axis.set_tick_params(rotation=90)


def visible_name(name: str) -> str:
    """Returns a name in which invisible characters are replaced and that is cut after 12 characters."""
    visible = "␣" if name == " " else name if name.isprintable() and name.strip() else repr(name)[1:-1]
    return visible if len(visible) <= 12 else visible[:11] + "…"


def name_states(figure: Figure, axes: Axes, num_states: int, few: bool) -> None:
    """Adds a legend with the names of the states if there are `few`, otherwise a color bar."""
    if not few:
        bar = color_bar(figure, axes, ScalarMappable(Normalize(0, num_states - 1), STATE_COLORS), "state")
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(axes, beside=few)


def state_colors(num_states: int) -> tuple[Any, bool]:
    """Returns a function from states to colors, and whether every state has a color from `COLORS`."""
    few = num_states <= len(COLORS)
    colors = (
        LinearSegmentedColormap.from_list("few", COLORS, len(COLORS)) if few else STATE_COLORS.resampled(num_states)
    )
    return colors, few


def state_axis(axes: Axes, num_states: int, last: bool) -> None:
    """Sets up a horizontal axis of state numbers. Only the lowest panel (`last`) has an axis label."""
    axes.grid(False, axis="x")
    axes.set_xlim(-0.6, num_states - 0.4)
    label_ticks(axes.xaxis, num_states)
    if last:
        axes.set_xlabel("state")
