"""Pictures of a model with a continuous latent state: arrays in, a matplotlib `Figure` out, as in `plots`."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from lightning_hmm import plots
from lightning_hmm.plots import COLOURS, Array

_INK, _FAINT = "#333333", "#B8B8B8"
_MAX_PANELS = 3


def effective_size(shares: Array, lengths: Array) -> Figure:
    """(steps,) of all sequences, packed, and their lengths: the share of particles that count, at each step of a sequence."""
    values, ends = plots._numpy(shares).ravel(), np.cumsum(np.asarray(lengths, dtype=np.int64))
    figure, (axes,) = plots._figure()
    rows = [values[end - length : end] for end, length in zip(ends, np.asarray(lengths), strict=True) if length]
    longest = max(map(len, rows), default=0)
    padded = np.full((len(rows), longest), np.nan)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    if longest:
        low, middle, high = np.nanquantile(padded, [0.1, 0.5, 0.9], axis=0)
        axes.fill_between(
            range(longest), low, high, color=COLOURS[0], alpha=0.18, linewidth=0, label="10 % to 90 % of sequences"
        )
        axes.plot(middle, color=COLOURS[0], linewidth=1.6, label="median")
    axes.set(xlabel="step", ylabel="share of the particles", ylim=(0, 1.02), xlim=(0, max(longest - 1, 1)))
    plots._title(axes, "Effective number of particles")
    plots._legend(axes)
    return figure


def latents(states: Array, clusters: Array, lengths: Array, max_paths: int = 12) -> Figure:
    """(steps, d) states of all sequences, packed, the cluster of each, and the lengths of the sequences: the plane of largest spread.

    Of the first sequences the points are joined. A state of one entry is drawn over time.
    """
    points, labels = plots._numpy(states), np.asarray(clusters, dtype=np.int64)
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    figure, (axes,) = plots._figure()
    names = ("entry 0", "entry 1")
    if points.shape[1] == 1:
        steps = np.concatenate([np.arange(length) for length in np.asarray(lengths)]) if len(points) else np.zeros(0)
        points, names = np.stack([steps, points[:, 0]], 1), ("step", "state")
    elif points.shape[1] > 2:
        centred = points - points.mean(0)
        points, names = (
            centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T,
            ("first principal direction", "second principal direction"),
        )
    for end, length in list(zip(ends, np.asarray(lengths), strict=True))[:max_paths]:
        axes.plot(*points[end - length : end].T, color=_FAINT, linewidth=0.5, zorder=1)
    colours, few = plots._state_colours(int(labels.max()) + 1 if len(labels) else 1)
    for cluster in np.unique(labels):
        chosen = labels == cluster
        axes.plot(
            *points[chosen].T,
            linestyle="",
            marker=".",
            markersize=3.5,
            markeredgewidth=0,
            color=colours(int(cluster)),
            label=f"{cluster} ({chosen.mean():.0%})" if few else None,
            zorder=2,
        )
        if not few:  # colours alone do not tell so many apart
            plate = {
                "boxstyle": "round,pad=0.15",
                "facecolor": "white",
                "edgecolor": colours(int(cluster)),
                "alpha": 0.85,
            }
            axes.annotate(
                str(cluster),
                np.median(points[chosen], 0),
                ha="center",
                va="center",
                fontsize=7,
                color=_INK,
                bbox=plate,
                zorder=3,
            )
    axes.set(xlabel=names[0], ylabel=names[1])
    plots._title(axes, "Smoothed states, by cluster")
    plots._legend(axes, beside=True)
    return figure


def predictions(
    truth: Array, mean: Array, lower: Array, upper: Array, level: float, names: list[str] | None = None
) -> Figure:
    """(steps, D) one sequence, what was expected of each step from those before it, and the band that should hold a share `level` of it."""
    values, expected, low, high = (plots._numpy(part) for part in (truth, mean, lower, upper))
    shown = min(values.shape[1], _MAX_PANELS)
    figure, panels = plots._figure(shown, share_x=True)
    steps = np.arange(1, len(values))  # nothing is known before the first
    for feature, axes in enumerate(panels):
        axes.fill_between(
            steps,
            low[1:, feature],
            high[1:, feature],
            color=COLOURS[0],
            alpha=0.2,
            linewidth=0,
            label=f"{level:.0%} band",
        )
        axes.plot(steps, expected[1:, feature], color=COLOURS[0], linewidth=1.2, label="expected")
        axes.plot(values[:, feature], linestyle="", marker="o", markersize=2.5, color=_INK, label="observed")
        axes.set(ylabel=names[feature] if names else f"feature {feature}")
    more = f", {shown} of {values.shape[1]} features" if shown < values.shape[1] else ""
    plots._title(panels[0], f"One step ahead{more}")
    plots._legend(panels[0])
    panels[-1].set_xlabel("step")
    return figure
