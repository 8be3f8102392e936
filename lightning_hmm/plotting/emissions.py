"""Figures of emission densities: Gaussians and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import MaxNLocator
from scipy import stats

from lightning_hmm.plotting.matrices import heat_map
from lightning_hmm.plotting.style import (
    INK,
    LIGHT_GRAY,
    SIGNED_COLORS,
    Array,
    color_bar,
    label_ticks,
    name_states,
    new_figure,
    set_title,
    state_colors,
    to_numpy,
    visible_name,
)


def gaussian_emissions(
    means: Array,
    variances: Array,
    share: Array | None = None,
    center: Array | None = None,
    variance: Array | None = None,
    points: Array | None = None,
    max_labels: int = 40,
    names: Sequence[str] | None = None,
) -> Figure:
    """Gaussian emissions: densities for one feature, ellipses for two, a heat map of the means for more.

    Args:
        means: (K, D) means of the states.
        variances: (K, D) variances, or (K, D, D) covariances, which also determine the orientation of the ellipses.
        share: (K,) share of time spent in each state. It weights the densities and is printed next to the name of the
            state. Without it, the densities have equal weights and no share is printed.
        center: (D,) mean of the data, subtracted in the heat map. The default is 0.
        variance: (D,) variance of the data, whose square root is the unit of the heat map. The default is 1.
        points: (steps, D) a sample of the data, drawn in the background for one or two features.
        max_labels: Largest number of labels of states and features.
        names: Names of the features. Features are shown by number if there are none.

    Example:
        >>> figure = gaussian_emissions([[0.0], [3.0]], [[1.0], [0.5]], share=[0.75, 0.25])
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['state 0 (75%)', 'state 1 (25%)', 'all states']
    """
    centers, moments = to_numpy(means), to_numpy(variances)
    covariances = moments if moments.ndim == 3 else moments[:, :, None] * np.eye(moments.shape[1])
    num_states, num_features = centers.shape
    weights = np.full(num_states, 1 / num_states) if share is None else to_numpy(share)
    states = [
        f"state {state}" if share is None else f"state {state} ({weight:.0%})" for state, weight in enumerate(weights)
    ]
    data = np.empty((0, num_features)) if points is None else to_numpy(points)
    data = data[np.isfinite(data).all(1)]
    if num_features > 2:
        offset = np.zeros(num_features) if center is None else to_numpy(center)
        unit = np.ones(num_features) if variance is None else np.sqrt(to_numpy(variance))
        return _means((centers - offset) / unit, max_labels, known_units=variance is not None, names=names)
    if num_features == 1:
        figure = _densities(centers[:, 0], np.sqrt(covariances[:, 0, 0]), weights, states, data[:, 0])
        weighting = "density, equal weight for each state" if share is None else "density times share of time"
        figure.axes[0].set_ylabel(weighting)
    else:
        figure = _ellipses(centers, covariances, weights, states, data, max_labels)
    if names is not None:
        for axis, name in zip((figure.axes[0].xaxis, figure.axes[0].yaxis), names, strict=False):
            axis.set_label_text(visible_name(name), parse_math=False)
    return figure


def count_emissions(
    rates: Array, share: Array | None = None, points: Array | None = None, name: str | None = None
) -> Figure:
    """Poisson emissions of one column: the probability of each count, times the share of time in each state.

    Args:
        rates: (K,) rates of the states.
        share: (K,) share of time spent in each state. The default is equal weights.
        points: (steps,) a sample of the data, drawn as a histogram in the background.
        name: Name of the column.

    Example:
        >>> figure = count_emissions([1.0, 6.0], name="visits")
        >>> figure.axes[0].get_xlabel()
        'visits'
    """
    means = to_numpy(rates)
    weights = np.full(len(means), 1 / len(means)) if share is None else to_numpy(share)
    data = np.empty(0) if points is None else to_numpy(points)
    data = data[np.isfinite(data)]
    visited = weights >= min(1e-3, weights.max())
    highest = int(np.ceil((means + 4 * np.sqrt(means))[visited].max()))
    highest = max(highest, int(np.quantile(data, 0.995))) if len(data) else highest
    counts = np.unique(np.linspace(0, highest, min(highest + 1, 400)).round().astype(int))
    figure, (axes,) = new_figure()
    if len(data):
        counts_per_bar = -(-(highest + 1) // 100)
        edges = np.arange(-0.5, highest + counts_per_bar, counts_per_bar).tolist()
        axes.hist(data, bins=edges, density=True, color="#E4E4E4", rwidth=0.9, label="data")
    colors, few = state_colors(len(means))
    mark = "o" if len(counts) <= 60 else None
    for state, (rate, weight) in enumerate(zip(means, weights, strict=True)):
        name_of_state = f"state {state}" if share is None else f"state {state} ({weight:.0%})"
        line: dict[str, Any] = {"color": colors(state), "linewidth": 1.8 if few else 1, "marker": mark, "markersize": 3}
        axes.plot(counts, weight * stats.poisson.pmf(counts, rate), label=name_of_state if few else None, **line)
    if len(means) > 1:
        total = (weights * stats.poisson.pmf(counts[:, None], means)).sum(1)
        axes.plot(counts, total, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1.5, label="all states")
    weighted = "probability, equal weight for each state" if share is None else "probability times share of time"
    axes.set(xlim=(-0.6, highest + 0.6), ylim=(0, None), ylabel=weighted)
    axes.set_xlabel("count" if name is None else visible_name(name), parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    set_title(axes, "Emission probabilities")
    name_states(figure, axes, len(means), few)
    return figure


def _densities(means: np.ndarray, spreads: np.ndarray, share: np.ndarray, names: list[str], data: np.ndarray) -> Figure:
    """Densities of the states for one feature, their sum, and a histogram of the data."""
    figure, (axes,) = new_figure()
    # Rarely visited states and outliers of the data do not extend the range of the axis.
    visited = share >= min(1e-3, share.max())
    low, high = (means - 3.5 * spreads)[visited].min(), (means + 3.5 * spreads)[visited].max()
    if len(data):
        low, high = min(low, np.quantile(data, 0.005)), max(high, np.quantile(data, 0.995))
        axes.hist(data, bins=60, range=(low, high), density=True, color="#E4E4E4", label="data")
    colors, few = state_colors(len(means))
    for state, (mean, spread, weight) in enumerate(zip(means, spreads, share, strict=True)):
        grid = mean + spread * np.linspace(-4.5, 4.5, 121)
        label = names[state] if few else None
        axes.plot(
            grid, weight * _density(grid, mean, spread), color=colors(state), linewidth=1.8 if few else 1, label=label
        )
    if len(means) > 1:
        # The grid is finer around each mean, for states that are narrow compared to the range of the axis.
        grid = np.sort(
            np.concatenate([np.linspace(low, high, 400), (means + spreads * np.linspace(-4, 4, 17)[:, None]).ravel()])
        )
        total = (share * _density(grid[:, None], means, spreads)).sum(1)
        axes.plot(grid, total, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1.5, label="all states")
    axes.set(xlabel="value", xlim=(low, high), ylim=(0, None))
    set_title(axes, "Emission densities")
    name_states(figure, axes, len(means), few)
    return figure


def _density(grid: np.ndarray, mean: Any, spread: Any) -> np.ndarray:
    density: np.ndarray = np.exp(-0.5 * ((grid - mean) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    return density


def _ellipses(
    means: np.ndarray, covariances: np.ndarray, share: np.ndarray, names: list[str], data: np.ndarray, max_labels: int
) -> Figure:
    """Ellipses of one and two standard deviations for two features, and points for the data."""
    figure, (axes,) = new_figure()
    if len(data):
        shown = data[:: -(-len(data) // 2000)]
        dots: dict[str, Any] = {
            "linestyle": "",
            "marker": ".",
            "markersize": 2.5,
            "markeredgewidth": 0,
            "color": LIGHT_GRAY,
        }
        axes.plot(shown[:, 0], shown[:, 1], zorder=0.5, label="data", **dots)
    colors, few = state_colors(len(means))
    labeled = len(means) <= max_labels
    for state, (mean, covariance, weight) in enumerate(zip(means, covariances, share, strict=True)):
        color = colors(state)[:3]
        # If there are many states, rarely visited ones are pale. The quotient is at most 1, and so is the sum.
        strength = 1.0 if few else 0.2 + 0.8 * (weight / share.max())
        spread, angle = _principal_axes(covariance)
        line: dict[str, Any] = {"edgecolor": (color, strength), "linewidth": 1.2 if few else 0.7}
        for radius, shade in ((2, 0.1), (1, 0.2)):
            fill = (color, shade * strength) if labeled else "none"
            axes.add_patch(Ellipse(tuple(mean), *(2 * radius * spread), angle=angle, facecolor=fill, **line))
        label = names[state] if few else None
        axes.plot(*mean, linestyle="", marker="o", markersize=4 if few else 2.5, color=(color, strength), label=label)
        if not few and labeled:
            axes.annotate(str(state), mean, xytext=(3, 3), textcoords="offset points", fontsize=7, color=INK)
    axes.set(xlabel="feature 0", ylabel="feature 1")
    set_title(axes, "Emissions: means, one and two standard deviations")
    name_states(figure, axes, len(means), few)
    return figure


def _principal_axes(covariance: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the standard deviations along the principal axes, and the angle of the first one in degrees.

    The first axis is the one closest to the first feature.
    """
    widths, directions = np.linalg.eigh(covariance)
    first = int(np.abs(directions[0]).argmax())
    spread = np.sqrt(widths.clip(min=0))[[first, 1 - first]]
    return spread, float(np.degrees(np.arctan2(directions[1, first], directions[0, first])))


def _means(means: np.ndarray, max_labels: int, known_units: bool, names: Sequence[str] | None) -> Figure:
    """Heat map of the means for three or more features."""
    figure, (axes,) = new_figure()
    limit = max(float(np.abs(means).max()), 1e-12)
    image, blocks = heat_map(axes, means, SIGNED_COLORS, Normalize(-limit, limit))
    label_ticks(axes.xaxis, means.shape[1], names, max_labels=max_labels)
    label_ticks(axes.yaxis, means.shape[0], max_labels=max_labels)
    axes.set(xlabel="feature", ylabel="state")
    set_title(axes, f"Emission means{blocks}")
    color_bar(figure, axes, image, "standard deviations of the data from its mean" if known_units else "mean")
    return figure
