"""Learning curves."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_hmm.plotting.style import BLUE, GRAY, VERMILION, Array, add_legend, new_figure, set_title, to_numpy


def convergence(epochs: Array, train: Array, val: Array | None = None, chosen: int = 0) -> Figure:
    """Log-likelihood per symbol and its gain per epoch, the latter on a logarithmic scale.

    Training values are computed before the update of a batch and validation values at the end of the epoch, so that in
    batch EM the training curve lags one update behind.

    Args:
        epochs: (E,) numbers of the epochs.
        train: (E,) or (E, R) training log-likelihood, NaN if unknown. The chosen restart has a thick line, the others
            have thin lines.
        val: (E,) validation log-likelihood, NaN for epochs without validation.
        chosen: Number of the restart that is used for inference.

    Example:
        >>> figure = convergence([1, 2, 3], train=[-3.0, -2.5, -2.4], val=[-3.1, -2.7, -2.6])
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['training', 'validation']
    """
    numbers, curves = to_numpy(epochs), to_numpy(train)
    curves = np.where(np.isfinite(curves), curves, np.nan).reshape(len(numbers), -1)
    figure, (above, below) = new_figure(2, heights=(3, 2), share_x=True)
    others = np.delete(curves, chosen, axis=1)
    if others.shape[1]:
        labels = ["other restarts"] + ["_"] * (others.shape[1] - 1)
        above.plot(numbers, others, color=BLUE, linewidth=0.8, alpha=0.45, label=labels)
    sizes = [_draw_curve(above, below, numbers, curves[:, chosen], "training", BLUE)]
    if val is not None and np.isfinite(to_numpy(val)).any():
        sizes.append(_draw_curve(above, below, numbers, to_numpy(val), "validation", VERMILION))
    _decades(below, np.concatenate(sizes))
    above.set(ylabel="log-likelihood per symbol")
    below.set(xlabel="epoch", ylabel="gain per epoch")
    margin = max(0.5, 0.02 * (numbers.max() - numbers.min()))
    below.set_xlim(numbers.min() - margin, numbers.max() + margin)
    below.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    set_title(above, "Convergence")
    add_legend(above)
    add_legend(below)
    return figure


def _draw_curve(above: Axes, below: Axes, epochs: np.ndarray, values: np.ndarray, name: str, color: str) -> np.ndarray:
    """Draws a curve and its gains per epoch. Returns the absolute values of the gains that are not zero."""
    known = np.isfinite(values)
    at, values = epochs[known], values[known]
    few = len(at) <= 30
    dots: dict[str, Any] = {"marker": "o", "markeredgewidth": 0, "color": color}
    above.plot(at, values, linewidth=2, markersize=5 if few else 2, label=name, **dots)
    gains, at = np.diff(values) / np.diff(at), at[1:]
    below.plot(at, np.where(gains > 0, gains, np.nan), linewidth=1.4, markersize=5 if few else 1.4, **dots)
    falls = gains < 0
    if falls.any():
        hollow: dict[str, Any] = {"marker": "v", "markersize": 5, "markerfacecolor": "white"}
        below.plot(at[falls], -gains[falls], color=color, linestyle="", label=f"{name} fell by", **hollow)
    return np.abs(gains[gains != 0])


def _decades(axes: Axes, values: np.ndarray) -> None:
    """Makes the vertical axis logarithmic, with limits at powers of ten, so that at least two are labeled."""
    axes.set_yscale("log")
    axes.minorticks_off()
    if len(values):
        low, high = np.floor(np.log10(values.min())), np.ceil(np.log10(values.max()))
        axes.set_ylim(10**low, 10 ** max(high, low + 1))
    else:
        axes.yaxis.set_visible(False)
        axes.text(
            0.5,
            0.5,
            "from the second epoch on",
            transform=axes.transAxes,
            ha="center",
            va="center",
            fontsize=9,
            color=GRAY,
        )
