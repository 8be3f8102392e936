"""Figures 2 and 3: held-out likelihood along EM of 20 states with K = 1 to 5 kept transitions.

``python -m experiments.dmc.learning_curves`` (``--path`` for a real recording; ``--criterion largest`` for the paper's
criterion)

The full HMM and two controls are shown for comparison. The data are DMC-friendly, anti-DMC and accelerometer data. Each
model is trained from 5 initializations, and the curves are their means. The table shows each run at the iteration with
the largest validation likelihood; the paper used the test data for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.dmc.learning import DATA, learning_experiment, settings_of, truth
from experiments.measures import mean_and_spread
from experiments.panels import GREY, legend, panels
from experiments.records import markdown_table
from experiments.run import Run, run
from lightning_hmm.plotting import COLORS

MODELS: dict[str, tuple[int, int | None]] = {
    "full": (20, None),
    **{f"K = {kept}": (20, kept) for kept in (5, 4, 3, 2, 1)},
    "uniform (K = 0)": (20, 0),
    "5 states, full": (5, None),
}
BLUES = ("#00263C", "#004C78", "#0072B2", "#4A9CCB", "#8FC1E0")  # K = 5 to 1
STYLES: dict[str, dict[str, Any]] = {
    "full": {"color": COLORS[1], "linewidth": 2.2},
    **{f"K = {kept}": {"color": colour} for kept, colour in zip((5, 4, 3, 2, 1), BLUES, strict=True)},
    "uniform (K = 0)": {"color": COLORS[6], "linestyle": "--"},
    "5 states, full": {"color": COLORS[2], "linestyle": "-."},
}


def table(run: Run) -> str:
    rows = []
    for label, size in MODELS.items():
        row = [label]
        for name in run.data:
            points, _ = truth(run, name)
            full, found = (
                {record["seed"]: record["test"] for record in run.records.where(**settings_of(run, name, *one))}
                for one in (MODELS["full"], size)
            )
            gaps = [(found[seed] - full[seed]) * 1000 / points for seed in full]
            row += [mean_and_spread(list(found.values()), 1), "" if label == "full" else mean_and_spread(gaps, 2, "+")]
        rows.append(row)
    scores = [truth(run, name)[1] for name in run.data]
    cells = [cell for score in scores for cell in ("" if score is None else f"{score:.1f}", "")]
    heads = [head for name in run.data for head in (f"{DATA[name]}, test", "above full, per 1,000 points")]
    return markdown_table(["model", *heads], [*rows, ["the model of the data", *cells]])


def draw(run: Run, axes: Axes, name: str) -> None:
    """Draws the log-likelihood of the test data per point, as a mean over the seeds, against the iteration."""
    points, true = truth(run, name)
    curves = {}
    for label, size in MODELS.items():
        curves[label] = np.mean(run.records.values("curve", **settings_of(run, name, *size)), axis=0) / points
        axes.plot(range(len(curves[label])), curves[label], label=label, **STYLES[label])
    tops = [curve[1:].max() for curve in curves.values()]
    if true is not None:
        axes.axhline(true / points, color=GREY, linewidth=0.8, linestyle=":", label="the model of the data")
        tops.append(true / points)
    # The first iterations are far below the range of interest.
    top, low = max(tops), min(curve[-1] for curve in curves.values())
    axes.set_ylim(low - 0.35 * (top - low), top + 0.12 * (top - low))
    axes.set(title=DATA[name], xlabel="iteration of EM")


def figure(run: Run) -> Figure:
    plot, (all_axes,) = panels(4.6 * len(run.data), 4.4, 1, len(run.data), grid="y")
    for axes, name in zip(all_axes, run.data, strict=True):
        draw(run, axes, name)
    all_axes[0].set_ylabel("test log-likelihood per point (nats)")
    legend(all_axes[0], outside="right center")
    return plot


EXPERIMENT = learning_experiment("learning_curves", __doc__, MODELS, table, figure, epochs=100, quick_epochs=3)

if __name__ == "__main__":
    run(EXPERIMENT)
