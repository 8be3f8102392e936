"""The embeddings of a `DenseHMM` and the matrices that they define."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lightning_hmm.plotting.matrices import heat_map
from lightning_hmm.plotting.style import (
    COLORS,
    GRAY,
    INK,
    PROBABILITY_COLORS,
    Array,
    add_legend,
    label_ticks,
    set_title,
    to_numpy,
    visible_name,
)


def composition(
    before: Mapping[str, Array], after: Mapping[str, Array], names: Sequence[str] | None = None, max_labels: int = 40
) -> Figure:
    """The embeddings of a `DenseHMM` and the matrices that they define, before and after training.

    Args:
        before: Arrays before training: the embeddings "U" and "Z" with one row per state, and the matrix "transition".
            For embedded emissions also the embeddings "V" and "W", and for embedded symbols the matrix "emission".
        after: The same arrays after training.
        names: Names of the symbols. Symbols are shown by number if there are none.
        max_labels: Largest number of labeled points or symbols.

    Example:
        >>> embeddings = {"U": [[0.0, 1.0], [1.0, 0.0]], "Z": [[1.0, 1.0], [0.0, 2.0]]}
        >>> model = embeddings | {"transition": [[0.5, 0.5], [0.3, 0.7]]}
        >>> figure = composition(model, model)
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['Z and U, before', 'A, before', 'Z and U, after', 'A, after']
    """
    pairs = [(("Z", "U"), "transition")] + ([(("W", "V"), "emission")] if "W" in after else [])
    num_matrices = sum(matrix in after for _, matrix in pairs)
    width = 5.2 * num_matrices + 3.4 * (len(pairs) - num_matrices) + 2
    figure = Figure(figsize=(width, 6.4), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    panels = figure.subplots(2, len(pairs) + num_matrices, squeeze=False)
    for row, (when, values) in zip(panels, {"before": before, "after": after}.items(), strict=True):
        places = iter(row)
        for pair, matrix in pairs:
            axes = next(places)
            _draw_vectors(axes, {name: to_numpy(values[name]) for name in pair}, names, max_labels)
            set_title(axes, f"{pair[0]} and {pair[1]}, {when}")
            if matrix in values:
                axes, probs = next(places), to_numpy(values[matrix])
                _, blocks = heat_map(axes, probs, PROBABILITY_COLORS, PowerNorm(0.5, 0, 1))
                set_title(axes, ("A" if matrix == "transition" else "B") + f", {when}{blocks}")
                axes.tick_params(labelsize=8, labelcolor=INK, color=GRAY, length=3)
                label_ticks(axes.yaxis, probs.shape[0], max_labels=max_labels)
                label_ticks(axes.xaxis, probs.shape[1], names if matrix == "emission" else None, max_labels)
    return figure


def _draw_vectors(axes: Axes, vectors: Mapping[str, np.ndarray], names: Sequence[str] | None, max_labels: int) -> None:
    """Draws embeddings as points in the plane.

    Embeddings with one entry lie on the diagonal. Embeddings with more than two entries are projected on their first
    two principal components.
    """
    together = np.concatenate(list(vectors.values()))
    if together.shape[1] == 1:
        together = np.repeat(together, 2, axis=1)
    elif together.shape[1] > 2:
        centered = together - together.mean(0)
        together = centered @ np.linalg.svd(centered, full_matrices=False)[2][:2].T
    first = 0
    for number, (name, rows) in enumerate(vectors.items()):
        points = together[first : first + len(rows)]
        first += len(rows)
        axes.scatter(points[:, 0], points[:, 1], s=14, color=COLORS[number], label=name, marker="os"[number])
        if len(rows) <= max_labels:
            for index, point in enumerate(points):
                text = visible_name(names[index]) if name == "V" and names is not None else str(index)
                axes.annotate(
                    text, point, (3, 3), textcoords="offset points", fontsize=7, color=COLORS[number], parse_math=False
                )
    axes.margins(0.12)
    axes.grid(color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(labelsize=8, labelcolor=INK, color=GRAY, length=3)
    add_legend(axes)
