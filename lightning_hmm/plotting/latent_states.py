"""Figures of models with a continuous latent state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_hmm.plotting.style import (
    COLORS,
    INK,
    LIGHT_GRAY,
    Array,
    add_legend,
    new_figure,
    set_title,
    state_colors,
    to_numpy,
)

_MAX_PANELS = 3


def effective_size(shares: Array, lengths: Array) -> Figure:
    """The effective number of particles at each step: the median over the sequences, and a band around it.

    Args:
        shares: (steps,) effective number of particles divided by the number of particles, packed over the sequences.
        lengths: (N,) number of steps of each sequence.

    Example:
        >>> figure = effective_size([1.0, 0.5, 0.4, 1.0, 0.7], lengths=[3, 2])
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [1.0, 0.6, 0.4]
    """
    values, ends = to_numpy(shares).ravel(), np.cumsum(np.asarray(lengths, dtype=np.int64))
    figure, (axes,) = new_figure()
    rows = [values[end - length : end] for end, length in zip(ends, np.asarray(lengths), strict=True) if length]
    longest = max(map(len, rows), default=0)
    padded = np.full((len(rows), longest), np.nan)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    if longest:
        low, middle, high = np.nanquantile(padded, [0.1, 0.5, 0.9], axis=0)
        band: dict[str, Any] = {"color": COLORS[0], "alpha": 0.18, "linewidth": 0}
        axes.fill_between(range(longest), low, high, label="10 % to 90 % of sequences", **band)
        axes.plot(middle, color=COLORS[0], linewidth=1.6, label="median")
    axes.set(xlabel="step", ylabel="share of the particles", ylim=(0, 1.02), xlim=(0, max(longest - 1, 1)))
    set_title(axes, "Effective number of particles")
    add_legend(axes)
    return figure


def latents(states: Array, clusters: Array, lengths: Array, max_paths: int = 12) -> Figure:
    """Latent states as points in the plane of their first two principal components, colored by cluster.

    States with one entry are drawn over time.

    Args:
        states: (steps, d) latent states, packed over the sequences.
        clusters: (steps,) cluster of each state.
        lengths: (N,) number of steps of each sequence.
        max_paths: Number of sequences whose points are connected by lines.

    Example:
        >>> figure = latents([[0.0, 1.0], [0.5, 1.0], [2.0, 0.0]], clusters=[0, 0, 1], lengths=[3])
        >>> figure.axes[0].get_legend_handles_labels()[1]
        ['0 (67%)', '1 (33%)']
    """
    points, labels = to_numpy(states), np.asarray(clusters, dtype=np.int64)
    sizes = np.asarray(lengths, dtype=np.int64)
    points, names = _in_the_plane(points, sizes)
    figure, (axes,) = new_figure()
    for end, length in list(zip(np.cumsum(sizes), sizes, strict=True))[:max_paths]:
        axes.plot(*points[end - length : end].T, color=LIGHT_GRAY, linewidth=0.5, zorder=1)
    colors, few = state_colors(int(labels.max()) + 1 if len(labels) else 1)
    dots: dict[str, Any] = {"linestyle": "", "marker": ".", "markersize": 3.5, "markeredgewidth": 0, "zorder": 2}
    for cluster in np.unique(labels):
        chosen = labels == cluster
        label = f"{cluster} ({chosen.mean():.0%})" if few else None
        axes.plot(*points[chosen].T, color=colors(int(cluster)), label=label, **dots)
        if not few:  # There are too many clusters to tell them apart by color.
            _annotate_cluster(axes, str(cluster), np.median(points[chosen], 0), colors(int(cluster)))
    axes.set(xlabel=names[0], ylabel=names[1])
    set_title(axes, "Smoothed states, by cluster")
    add_legend(axes, beside=True)
    return figure


def _in_the_plane(points: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, tuple[str, str]]:
    """Returns two coordinates for each point, and their names."""
    if points.shape[1] == 2:
        return points, ("entry 0", "entry 1")
    if points.shape[1] == 1:
        steps = np.concatenate([np.arange(length) for length in lengths]) if len(points) else np.zeros(0)
        return np.stack([steps, points[:, 0]], 1), ("step", "state")
    centered = points - points.mean(0)
    directions = np.linalg.svd(centered, full_matrices=False)[2][:2]
    return centered @ directions.T, ("first principal direction", "second principal direction")


def _annotate_cluster(axes: Axes, text: str, place: Any, color: Any) -> None:
    """Writes the number of a cluster on a white plate."""
    plate: dict[str, Any] = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": color, "alpha": 0.85}
    axes.annotate(text, place, ha="center", va="center", fontsize=7, color=INK, bbox=plate, zorder=3)


def predictions(
    truth: Array, mean: Array, lower: Array, upper: Array, level: float, names: Sequence[str] | None = None
) -> Figure:
    """One-step-ahead predictions of one sequence, with a prediction band, and the observations.

    Args:
        truth: (steps, D) observations.
        mean: (steps, D) expected value of each step given the previous ones.
        lower: (steps, D) lower limit of the band.
        upper: (steps, D) upper limit of the band.
        level: Nominal coverage of the band, such as 0.9.
        names: Names of the features. Features are shown by number if there are none.

    Example:
        >>> figure = predictions([[0.0], [1.0]], [[0.0], [0.8]], [[-1.0], [0.0]], [[1.0], [1.6]], level=0.9)
        >>> figure.axes[0].get_legend_handles_labels()[1]
        ['90% band', 'expected', 'observed']
    """
    values, expected, low, high = (to_numpy(part) for part in (truth, mean, lower, upper))
    shown = min(values.shape[1], _MAX_PANELS)
    figure, panels = new_figure(shown, share_x=True)
    steps = np.arange(1, len(values))  # The first step has no prediction.
    band: dict[str, Any] = {"color": COLORS[0], "alpha": 0.2, "linewidth": 0, "label": f"{level:.0%} band"}
    for feature, axes in enumerate(panels):
        axes.fill_between(steps, low[1:, feature], high[1:, feature], **band)
        axes.plot(steps, expected[1:, feature], color=COLORS[0], linewidth=1.2, label="expected")
        axes.plot(values[:, feature], linestyle="", marker="o", markersize=2.5, color=INK, label="observed")
        axes.set(ylabel=names[feature] if names else f"feature {feature}")
    more = f", {shown} of {values.shape[1]} features" if shown < values.shape[1] else ""
    set_title(panels[0], f"One step ahead{more}")
    add_legend(panels[0])
    panels[-1].set_xlabel("step")
    return figure
