"""Heat maps of transition, emission and co-occurrence matrices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lightning_hmm.plotting.style import (
    GRAY,
    INK,
    LIGHT_GRAY,
    PROBABILITY_COLORS,
    SIGNED_COLORS,
    Array,
    color_bar,
    label_ticks,
    new_figure,
    set_title,
    to_numpy,
    visible_name,
)

_MAX_WRITTEN = 12  # The cells of matrices with at most this many rows and columns show their numbers.
_MAX_ROWS = 400  # Larger matrices have more cells than the figure has pixels, and are drawn as means of blocks.


def transition_matrix(probs: Array, max_labels: int = 40) -> Figure:
    """Heat map of transition probabilities. The cells of a small matrix show their numbers.

    Args:
        probs: (K, K) transition probabilities, one row per state.
        max_labels: Largest number of tick labels per axis.

    Example:
        >>> figure = transition_matrix([[0.9, 0.1], [0.2, 0.8]])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0.90', '0.10', '0.20', '0.80']
    """
    matrix = to_numpy(probs)
    figure, (axes,) = new_figure()
    _draw_probabilities(figure, axes, matrix, "Transition probabilities")
    axes.set_aspect("equal")
    label_ticks(axes.xaxis, matrix.shape[1], max_labels=max_labels)
    label_ticks(axes.yaxis, matrix.shape[0], max_labels=max_labels)
    axes.set(xlabel="to state", ylabel="from state")
    return figure


def parameter_matrix(
    values: Array,
    title: str,
    xlabel: str,
    ylabel: str = "state",
    names: Sequence[str] | None = None,
    max_labels: int = 40,
) -> Figure:
    """Heat map of parameters that are not negative.

    Args:
        values: (rows, columns) parameters.
        title: Title of the figure.
        xlabel: Label of the columns.
        ylabel: Label of the rows.
        names: Names of the columns. They are numbered if there are none.
        max_labels: Largest number of tick labels per axis.

    Example:
        >>> figure = parameter_matrix([[0.1, 0.9], [0.5, 0.5]], "Durations", "steps", names=["1", "2"])
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['1', '2']
    """
    matrix = to_numpy(values)
    figure, (axes,) = new_figure()
    _draw_probabilities(figure, axes, matrix, title)
    label_ticks(axes.xaxis, matrix.shape[1], names, max_labels)
    label_ticks(axes.yaxis, matrix.shape[0], max_labels=max_labels)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure


def clone_matrix(probs: Array, clones: Array, names: Sequence[str] | None = None) -> Figure:
    """Heat map of the transition probabilities of a cloned HMM, with lines between the clones of different symbols.

    Args:
        probs: (H, H) transition probabilities, one row per state. States are numbered symbol after symbol.
        clones: (V,) number of clones of each symbol.
        names: Names of the symbols. Symbols are shown by number if there are none.

    Example:
        >>> figure = clone_matrix([[0.5, 0.0, 0.5], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]], clones=[2, 1], names=["a", "b"])
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['a', 'b']
    """
    matrix, ends = to_numpy(probs), np.cumsum(to_numpy(clones).astype(int))
    figure, (axes,) = new_figure()
    _draw_probabilities(figure, axes, matrix, "Transition probabilities")
    axes.set_aspect("equal")
    axes.grid(visible=False)
    labels = [str(number) for number in range(len(ends))] if names is None else [visible_name(name) for name in names]
    middles = ends - to_numpy(clones) / 2 - 0.5
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(list(middles), labels, parse_math=False, fontsize=9 if len(labels) <= 30 else 7)
        axis.set_tick_params(length=0)
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color=LIGHT_GRAY, linewidth=0.5)
        axes.axvline(end - 0.5, color=LIGHT_GRAY, linewidth=0.5)
    axes.set(xlabel="to a clone of", ylabel="from a clone of")
    return figure


def emission_matrix(probs: Array, names: Sequence[str] | None = None, max_labels: int = 40) -> Figure:
    """Heat map of emission probabilities.

    Args:
        probs: (K, V) emission probabilities, one row per state.
        names: Names of the symbols. Symbols are shown by number if there are none.
        max_labels: Largest number of tick labels per axis. If there are more symbols, every second, fifth, tenth, ...
            symbol is labeled.

    Example:
        >>> figure = emission_matrix([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], names=["sun", "rain", "snow"])
        >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
        ['sun', 'rain', 'snow']
    """
    matrix = to_numpy(probs)
    figure, (axes,) = new_figure()
    _draw_probabilities(figure, axes, matrix, "Emission probabilities")
    label_ticks(axes.xaxis, matrix.shape[1], names, max_labels)
    label_ticks(axes.yaxis, matrix.shape[0], max_labels=max_labels)
    axes.set(xlabel="symbol", ylabel="state")
    return figure


def cooccurrences(target: Array, model: Array, names: Sequence[str] | None = None, max_labels: int = 40) -> Figure:
    """Heat maps of the frequencies of symbol pairs in the data, under the model, and of their difference.

    The colors of the frequencies are on a square-root scale, because most pairs are rare.

    Args:
        target: (V, V) frequencies in the data.
        model: (V, V) probabilities under the model.
        names: Names of the symbols. Symbols are shown by number if there are none.
        max_labels: Largest number of tick labels per axis.

    Example:
        >>> figure = cooccurrences([[0.5, 0.1], [0.1, 0.3]], [[0.4, 0.2], [0.2, 0.2]])
        >>> [axes.get_title(loc="left") for axes in figure.axes[:3]]
        ['Data', 'Model', 'Model less data']
    """
    wanted, made = to_numpy(target), to_numpy(model)
    figure = Figure(figsize=(13, 4.6), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    largest, gap = max(wanted.max(), made.max()), max(np.abs(made - wanted).max(), 1e-12)
    scale = PowerNorm(0.5, 0, largest)
    panels = (
        ("Data", wanted, PROBABILITY_COLORS, scale),
        ("Model", made, PROBABILITY_COLORS, scale),
        ("Model less data", made - wanted, SIGNED_COLORS, Normalize(-gap, gap)),
    )
    for axes, (title, matrix, colors, norm) in zip(figure.subplots(1, 3), panels, strict=True):
        image, blocks = heat_map(axes, matrix, colors, norm, written=False)
        set_title(axes, title + blocks)
        axes.set_aspect("equal")
        axes.tick_params(labelsize=8, labelcolor=INK, color=GRAY, length=3)
        label_ticks(axes.yaxis, len(matrix), names, max_labels)
        label_ticks(axes.xaxis, len(matrix), names, max_labels)
        axes.set(xlabel="next symbol", ylabel="symbol")
        color_bar(figure, axes, image, "difference" if colors is SIGNED_COLORS else "frequency")
    return figure


def _draw_probabilities(figure: Figure, axes: Axes, matrix: np.ndarray, title: str) -> None:
    """Draws a matrix on a color scale from 0 to 1, so that figures of different steps can be compared.

    Matrices with many columns have a square-root scale, which resolves small probabilities.
    """
    many = matrix.shape[1] > _MAX_WRITTEN
    image, blocks = heat_map(axes, matrix, PROBABILITY_COLORS, PowerNorm(0.5, 0, 1) if many else Normalize(0, 1))
    set_title(axes, title + blocks)
    bar = color_bar(figure, axes, image, "probability")
    if blocks:
        # Means of blocks are far below 1.
        image.set_clim(0, np.max(np.asarray(image.get_array())))
    elif many:
        bar.set_ticks(
            [0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1],
            labels=["0", "0.01", "0.05", "0.1", "0.2", "0.4", "0.6", "0.8", "1"],
        )


def heat_map(
    axes: Axes, matrix: np.ndarray, colors: Colormap, norm: Normalize, written: bool = True
) -> tuple[AxesImage, str]:
    """Draws a matrix, and returns the image and a note on blocks for the title (empty if there are none).

    The axes count rows and columns of `matrix`, also if means of blocks are drawn. The cells of a small matrix show
    their numbers if `written`.
    """
    rows, columns = (-(-size // _MAX_ROWS) for size in matrix.shape)
    drawn, blocks = matrix, ""
    if rows > 1 or columns > 1:
        drawn, blocks = _block_means(matrix, rows, columns), f" (means of blocks of {rows} x {columns})"
    edges = (-0.5, drawn.shape[1] * columns - 0.5, drawn.shape[0] * rows - 0.5, -0.5)
    image = axes.imshow(drawn, cmap=colors, norm=norm, aspect="auto", extent=edges, interpolation="nearest")
    axes.set(xlim=(-0.5, matrix.shape[1] - 0.5), ylim=(matrix.shape[0] - 0.5, -0.5))
    axes.grid(False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(LIGHT_GRAY)
    if written and max(matrix.shape) <= _MAX_WRITTEN:
        for (row, column), value in np.ndenumerate(matrix):
            red, green, blue, _ = colors(norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.6
            color = "white" if dark else LIGHT_GRAY if abs(value) < 0.005 else INK
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=9 if max(matrix.shape) <= 8 else 8,
                color=color,
            )
    return image, blocks


def _block_means(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Returns the means of blocks of `rows` x `columns` entries. Blocks at the far edges may be smaller."""
    row_starts, column_starts = np.arange(0, matrix.shape[0], rows), np.arange(0, matrix.shape[1], columns)
    means: np.ndarray = np.add.reduceat(np.add.reduceat(matrix, row_starts, axis=0), column_starts, axis=1)
    means /= np.outer(np.diff(row_starts, append=matrix.shape[0]), np.diff(column_starts, append=matrix.shape[1]))
    return means
