"""Figures of emission densities: Gaussians, and columns with any distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import MaxNLocator

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


class ColumnDensities(NamedTuple):
    """Densities of one column for each state, as the input of `column_emissions`.

    values: (G,) values at which the densities are evaluated, in ascending order.
    densities: (G, K) densities of the states, or probabilities if `is_count`.
    points: (steps,) a sample of the data, drawn as a histogram in the background.
    name: Name of the column.
    is_count: Whether the column contains whole numbers, so that a histogram has bars at whole numbers.
    """

    values: np.ndarray
    densities: np.ndarray
    points: np.ndarray
    name: str
    is_count: bool


def column_emissions(columns: Sequence[ColumnDensities], share: Array | None = None) -> Figure:
    """Emissions of columns that are independent given the state: one panel of densities for each column.

    Args:
        columns: The columns, from top to bottom.
        share: (K,) share of time spent in each state, by which the densities are multiplied. The default is equal
            weights.

    Example:
        >>> from scipy import stats
        >>> values = np.arange(10.0)
        >>> probabilities = stats.poisson.pmf(values[:, None], [1.0, 6.0])
        >>> visits = ColumnDensities(values, probabilities, np.empty(0), "visits", is_count=True)
        >>> column_emissions([visits]).axes[0].get_xlabel()
        'visits'
    """
    num_states = columns[0].densities.shape[1]
    weights = np.full(num_states, 1 / num_states) if share is None else to_numpy(share)
    figure, panels = new_figure(len(columns))
    figure.set_size_inches(7, max(5.0, 2.6 * len(columns)))
    names = [
        f"state {state}" if share is None else f"state {state} ({weights[state]:.0%})" for state in range(num_states)
    ]
    for axes, column in zip(panels, columns, strict=True):
        draw_densities(axes, column, weights, names)
    quantity = "probability" if all(column.is_count for column in columns) else "density"
    panels[0].set_ylabel(f"{quantity}, equal weights" if share is None else f"{quantity} times share of time")
    set_title(panels[0], "Emission probabilities" if quantity == "probability" else "Emission densities")
    name_states(figure, panels[0], num_states, state_colors(num_states)[1])
    return figure


def draw_densities(axes: Axes, column: ColumnDensities, weights: np.ndarray, names: Sequence[str]) -> None:
    """Draws the densities of one column, multiplied by the (K,) weights of the states, with their sum and the data."""
    _draw_histogram(axes, column)
    colors, few = state_colors(len(weights))
    mark = "o" if column.is_count and len(column.values) <= 60 else None
    line: dict[str, Any] = {"linewidth": 1.8 if few else 1, "marker": mark, "markersize": 3}
    weighted = column.densities * weights
    for state, name in enumerate(names):
        axes.plot(column.values, weighted[:, state], color=colors(state), label=name if few else None, **line)
    if len(names) > 1:
        total: dict[str, Any] = {"color": INK, "linewidth": 1, "linestyle": (0, (4, 2)), "zorder": 1.5}
        axes.plot(column.values, weighted.sum(1), label="all states", **total)
    axes.set_ylim(0, _highest(weighted))
    axes.set_xlabel(visible_name(column.name), parse_math=False)
    if column.is_count:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_histogram(axes: Axes, column: ColumnDensities) -> None:
    low, high = float(column.values[0]), float(column.values[-1])
    shown = column.points[(column.points >= low) & (column.points <= high)]
    style: dict[str, Any] = {"density": True, "color": "#E4E4E4", "label": "data"}
    if column.is_count:
        counts_per_bar = -(-int(high - low + 1) // 100)
        style |= {"bins": np.arange(low - 0.5, high + counts_per_bar, counts_per_bar).tolist(), "rwidth": 0.9}
        low, high = low - 0.6, high + 0.6
    else:
        style |= {"bins": 60, "range": (low, high)}
    if len(shown):
        axes.hist(shown, **style)
    axes.set_xlim(low, high)


def _highest(densities: np.ndarray) -> float | None:
    """Returns the upper limit of the axis of densities, which may be infinite at the border of their support."""
    peaks = np.where(np.isfinite(densities), densities, 0.0).sum(1)
    typical, highest = float(np.quantile(peaks, 0.95)), float(peaks.max())
    return 4 * typical if highest > 8 * typical > 0 else None


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


def coefficient_matrix(coefficients: Array, names: Sequence[str] | None = None, max_labels: int = 40) -> Figure:
    """Heat map of the coefficients of regressions or autoregressions.

    Args:
        coefficients: (K, P) coefficients of the states.
        names: Names of the P regressors. They are shown by number if there are none.
        max_labels: Largest number of labels of states and regressors.

    Example:
        >>> coefficient_matrix([[0.5, -1.0], [2.0, 0.0]], ["tide", "wind"]).axes[0].get_xlabel()
        'regressor'
    """
    figure, axes = _signed_matrix(to_numpy(coefficients), "Coefficients", "coefficient", names, max_labels)
    axes.set_xlabel("regressor")
    return figure


def _means(means: np.ndarray, max_labels: int, known_units: bool, names: Sequence[str] | None) -> Figure:
    """Heat map of the means for three or more features."""
    unit = "standard deviations of the data from its mean" if known_units else "mean"
    figure, axes = _signed_matrix(means, "Emission means", unit, names, max_labels)
    axes.set_xlabel("feature")
    return figure


def _signed_matrix(
    values: np.ndarray, title: str, unit: str, names: Sequence[str] | None, max_labels: int
) -> tuple[Figure, Axes]:
    """Heat map of numbers of either sign, with one row for each state."""
    figure, (axes,) = new_figure()
    limit = max(float(np.abs(values).max()), 1e-12)
    image, blocks = heat_map(axes, values, SIGNED_COLORS, Normalize(-limit, limit))
    label_ticks(axes.xaxis, values.shape[1], names, max_labels=max_labels)
    label_ticks(axes.yaxis, values.shape[0], max_labels=max_labels)
    axes.set_ylabel("state")
    set_title(axes, f"{title}{blocks}")
    color_bar(figure, axes, image, unit)
    return figure, axes
