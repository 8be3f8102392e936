"""Table 1: 100 transition parameters as few states with all transitions or as many states with few.

``python -m experiments.dmc.tradeoff`` (``--path`` for a real recording; ``--criterion largest`` for the paper's
criterion)

Five pairs of N and K with N K = 100, on DMC-friendly, anti-DMC and accelerometer data, each from 5 initializations,
until the validation likelihood has not increased for 30 iterations. The test data are scored at the best of these
iterations. "Chosen" takes, for each seed, the pair with the largest validation likelihood.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from experiments.dmc.learning import DATA, learning_experiment, settings_of, truth
from experiments.measures import mean_and_spread
from experiments.panels import LIGHT, legend, panels
from experiments.records import markdown_table
from experiments.run import Run, run
from lightning_hmm.plotting import COLORS

MODELS: dict[str, tuple[int, int | None]] = {
    "regular, N = 10": (10, None),
    "DMC, N = 20, K = 5": (20, 5),
    "DMC, N = 25, K = 4": (25, 4),
    "DMC, N = 50, K = 2": (50, 2),
    "DMC, N = 100, K = 1": (100, 1),
}
PAPER = {  # Its Motionlogger data are not available, and other recordings have other levels.
    "friendly": (-22829, -22780, -22783, -22807, -22847),
    "anti": (-27681, -27098, -27076, -27054, -27070),
    "accelerometer": (-81948, -80101, -80170, -79616, -79283),
}


def scores(run: Run, name: str) -> np.ndarray:
    """Returns the (models, seeds, 2) log-likelihoods of validation and test data."""
    found = []
    for size in MODELS.values():
        records = run.records.where(**settings_of(run, name, *size))
        by_seed = {record["seed"]: (record["val"], record["test"]) for record in records}
        found.append([by_seed[seed] for seed in range(run.seeds)])
    return np.array(found)


def table(run: Run) -> str:
    columns = []
    for name in run.data:
        found = scores(run, name)
        chosen = found[found[:, :, 0].argmax(0), np.arange(run.seeds), 1]
        true = truth(run, name)[1]
        ours = [mean_and_spread(list(tests), 1) for tests in (*found[:, :, 1], chosen)]
        columns += [[*ours, "" if true is None else f"{true:.1f}"], [*(f"{level:,}" for level in PAPER[name]), "", ""]]
    labels = [*MODELS, "chosen on validation", "the model of the data"]
    heads = [head for name in run.data for head in (DATA[name], "paper")]
    return markdown_table(["", *heads], list(zip(labels, *columns, strict=True)))


def figure(run: Run) -> Figure:
    """Test log-likelihood of each run minus the mean of the regular HMM, and the same of the paper's means."""
    plot, (all_axes,) = panels(4.2 * len(run.data), 4.2, 1, len(run.data), grid="y")
    places = np.arange(len(MODELS))
    ours, mean = {"markersize": 4, "alpha": 0.5}, {"markersize": 22, "markeredgewidth": 2}
    paper = {"markersize": 6, "markerfacecolor": "none"}
    for axes, name in zip(all_axes, run.data, strict=True):
        found = scores(run, name)[:, :, 1]
        gains = found - found[0].mean()
        axes.plot(np.repeat(places, run.seeds), gains.ravel(), "o", color=COLORS[0], label="ours, each start", **ours)
        axes.plot(places, gains.mean(1), "_", color=COLORS[0], label="ours, mean", **mean)
        axes.plot(places, np.array(PAPER[name]) - PAPER[name][0], "D", color=COLORS[1], label="the paper's", **paper)
        axes.axhline(0, color=LIGHT, linewidth=0.8)
        axes.set_xticks(places, ["10\nall", "20\n5", "25\n4", "50\n2", "100\n1"])
        axes.set(title=DATA[name], xlabel="states N, kept transitions K", xlim=(-0.5, len(MODELS) - 0.5))
    all_axes[0].set_ylabel("test log-likelihood above regular (nats)")
    legend(all_axes[0], outside="lower center", columns=3)
    return plot


EXPERIMENT = learning_experiment("tradeoff", __doc__, MODELS, table, figure, epochs=500, quick_epochs=2, patience=30)

if __name__ == "__main__":
    run(EXPERIMENT)
