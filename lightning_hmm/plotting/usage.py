"""State occupancy: the share of time in each state and the expected length of a visit."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from lightning_hmm.plotting.style import (
    BLUE,
    LIGHT_GRAY,
    VERMILION,
    Array,
    add_legend,
    new_figure,
    set_title,
    state_axis,
    to_numpy,
)

_MAX_BARS = 100  # More bars than this are drawn as one outline.


def state_usage(share: Array | None, dwell: Array | None = None, source: str = "") -> Figure:
    """The share of time in each state, and the expected length of a visit. A panel without numbers is omitted.

    Args:
        share: (K,) expected share of time in each state.
        dwell: (K,) expected number of steps of a visit, as returned by `expected_dwell`. Infinite values are drawn with
            a marker of their own.
        source: Description of the data that `share` was computed from, for the title.

    Example:
        >>> figure = state_usage([0.7, 0.3], expected_dwell([[0.9, 0.1], [0.2, 0.8]]), source="training data")
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['Expected share of time (training data)', 'Expected length of a visit']
    """
    panels = [panel for panel in (share, dwell) if panel is not None]
    figure, rows = new_figure(len(panels))
    if share is not None:
        axes, values = rows.pop(0), to_numpy(share)
        if len(values) <= _MAX_BARS:
            axes.bar(np.arange(len(values)), values, width=0.8, color=BLUE)
        else:
            axes.stairs(
                values, np.arange(len(values) + 1) - 0.5, fill=True, facecolor=BLUE, edgecolor=BLUE, linewidth=0.5
            )
        axes.set(ylabel="share of time", ylim=(0, None))
        set_title(axes, f"Expected share of time{f' ({source})' if source else ''}")
        state_axis(axes, len(values), last=dwell is None)
    if dwell is not None:
        _draw_dwell(rows.pop(0), to_numpy(dwell))
    return figure


def expected_dwell(probs: Array) -> np.ndarray:
    """Returns the expected number of steps of a visit to each state, 1 / (1 - A_kk).

    Args:
        probs: (K, K) transition probabilities.

    Returns:
        (K,) expected lengths; infinite for a state that is never left.

    Example:
        >>> expected_dwell([[0.5, 0.5], [0.0, 1.0]]).tolist()
        [2.0, inf]
    """
    stay = np.minimum(np.diagonal(to_numpy(probs)), 1.0)
    with np.errstate(divide="ignore"):
        dwell: np.ndarray = 1 / (1 - stay)
    return dwell


def stationary_distribution(probs: Array) -> np.ndarray:
    """Returns the stationary distribution of a Markov chain, at a cost of O(K^3).

    If the chain is reducible, the result is one of its stationary distributions. Sequences that are short compared to
    the mixing time are described better by expected visits.

    Args:
        probs: (K, K) transition probabilities.

    Returns:
        (K,) shares of time in the long run.

    Example:
        >>> stationary_distribution([[0.9, 0.1], [0.3, 0.7]]).round(6).tolist()
        [0.75, 0.25]
    """
    matrix = to_numpy(probs)
    # pi A = pi and sum(pi) = 1. Least squares returns a solution even if there are several.
    equations = np.vstack([matrix.T - np.eye(len(matrix)), np.ones(len(matrix))])
    solution: np.ndarray = np.linalg.lstsq(equations, np.append(np.zeros(len(matrix)), 1.0), rcond=None)[0].clip(min=0)
    solution /= solution.sum()
    return solution


def _draw_dwell(axes: Axes, dwell: np.ndarray) -> None:
    """Draws points on stalks rather than bars, because a logarithmic scale has no zero at which bars could start."""
    states, finite = np.arange(len(dwell)), np.isfinite(dwell)
    size = 6 if len(dwell) <= 30 else 3.5 if len(dwell) <= _MAX_BARS else 2
    if len(dwell) <= _MAX_BARS:
        axes.vlines(states[finite], 1, dwell[finite], color=LIGHT_GRAY, linewidth=1)
    axes.plot(states[finite], dwell[finite], linestyle="", marker="o", markersize=size, color=BLUE)
    top = max(float(dwell[finite].max(initial=1.0)), 2.0) * 1.5
    if not finite.all():
        # Infinite values are drawn above all others.
        axes.plot(
            states[~finite],
            np.full((~finite).sum(), top),
            linestyle="",
            marker="^",
            markersize=7,
            color=VERMILION,
            label="never left",
        )
        top *= 1.5
    axes.set_yscale("log")
    axes.set(ylabel="steps", ylim=(0.9, top))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 200 else (1,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.minorticks_off()
    set_title(axes, "Expected length of a visit")
    state_axis(axes, len(dwell), last=True)
    add_legend(axes)
