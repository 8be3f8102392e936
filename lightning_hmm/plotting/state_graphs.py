"""Graphs of states and the transitions between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hmm.plotting.style import BLUE, GRAY, INK, visible_name


def state_graph(
    graph: nx.DiGraph, groups: Sequence[Any], titles: Sequence[str] | None = None, columns: int = 3
) -> Figure:
    """Groups of states of a graph, one panel per group.

    States are shown by the names of their symbols. Arrows are transitions, and wider if they are more probable.

    Args:
        graph: Graph of the states, as returned by `ClonedHMM.state_graph`.
        groups: Groups of states, such as those returned by `graphs.communities`.
        titles: Titles of the panels.
        columns: Number of panels per row.

    Example:
        >>> graph = nx.DiGraph()
        >>> graph.add_nodes_from([(0, {"name": "a"}), (1, {"name": "b"}), (2, {"name": "c"})])
        >>> graph.add_weighted_edges_from([(0, 1, 0.9), (1, 0, 0.8), (2, 2, 1.0)])
        >>> figure = state_graph(graph, [{0, 1}, {2}], titles=["ab", "c"], columns=2)
        >>> [axes.get_title() for axes in figure.axes]
        ['ab', 'c']
    """
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.1 * rows), dpi=110, layout="constrained", facecolor="white")
    for panel, axes in enumerate(figure.subplots(rows, columns, squeeze=False).reshape(-1)):
        axes.set_axis_off()
        if panel >= len(groups):
            continue
        _draw_group(axes, graph.subgraph(groups[panel]))
        if titles is not None:
            axes.set_title(titles[panel], fontsize=9, color=INK, parse_math=False)
        axes.margins(0.12)
    return figure


def _draw_group(axes: Axes, part: nx.DiGraph) -> None:
    """Draws the states and transitions of one group."""
    if len(part) > 1:
        places = nx.kamada_kawai_layout(part.to_undirected(as_view=True), weight=None)
    else:
        places = dict.fromkeys(part, (0.0, 0.0))
    weights = np.array([weight for _, _, weight in part.edges(data="weight")])
    widths = 0.4 + 2 * weights / max(weights.max(), 1e-12) if len(weights) else []
    arrows = {"edge_color": GRAY, "arrowsize": 8, "connectionstyle": "arc3,rad=0.08"}
    nx.draw_networkx_edges(part, places, ax=axes, width=widths, node_size=230, **arrows)
    circles = {"node_color": "#DCEBF5", "edgecolors": BLUE, "linewidths": 0.8}
    nx.draw_networkx_nodes(part, places, ax=axes, node_size=230, **circles)
    names = {state: visible_name(str(part.nodes[state]["name"])) for state in part}
    nx.draw_networkx_labels(part, places, names, ax=axes, font_size=9, font_color=INK)
