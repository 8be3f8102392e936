"""The figure of `docs/families.md`: each family, trained on its column of `configs/families/animals.csv`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lightning_hmm
from datamodules import FileDataModule
from lightning_hmm import HMM, Sequences
from lightning_hmm.callbacks.figures import column_densities
from lightning_hmm.plotting.emissions import draw_densities
from lightning_hmm.plotting.style import INK, new_figure, set_title, state_colors
from lightning_hmm.training import fit

CONFIGS = Path(__file__).parents[2] / "configs/families"
COLUMNS = 4
STATES = ("foraging", "resting", "travelling")


def trained(name: str) -> tuple[HMM, Sequences, list[str]]:
    """Trains the model of a configuration with the known states, so that all models number the states alike.

    Returns:
        The model, the training data, and the names of the columns.
    """
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    options = config["model"]["init_args"]
    table = config["data"]["init_args"] | {
        "path": str(CONFIGS / "animals.csv"),
        "val_fraction": 0.0,
        "test_fraction": 0.0,
    }
    data = FileDataModule(**table, label_column="behavior")
    data.setup()
    model = fit(
        HMM(options["num_states"], part(options["emission"])), data.train_sequences, config["trainer"]["max_epochs"]
    )
    return model, model.as_sequences(data.train_sequences), table["columns"]


def part(config: dict[str, Any]) -> Any:
    """Returns the part that a configuration describes."""
    options = {
        name: part(value) if isinstance(value, dict) and "class_path" in value else value
        for name, value in config.get("init_args", {}).items()
    }
    return getattr(lightning_hmm, config["class_path"])(**options)


def densities(axes: Axes, model: HMM, sequences: Sequences, names: list[str]) -> None:
    """Draws the densities of the first column."""
    column = column_densities(model.emission, sequences.values, names)[0]
    weights = model.posterior(sequences).smoothed.values.mean(0).numpy()
    draw_densities(axes, column, weights, STATES)
    if column.points.min() >= 0:
        axes.set_xlim(right=float(np.quantile(column.points, 0.98)) + 0.6 * column.is_count)


def bars(axes: Axes, model: HMM, sequences: Sequences, names: list[str]) -> None:
    """Draws a probability of each state and column."""
    for state, row in enumerate(model.emission.probs.numpy()):
        axes.bar(np.arange(len(row)) + 0.27 * (state - 1), row, 0.25, color=state_colors(3)[0](state))
    axes.set_xticks(range(len(names)), names)
    margin = 0.6 if len(names) > 1 else 1.0
    axes.set_xlim(-margin, len(names) - 1 + margin)
    axes.grid(False, axis="x")


def lines(axes: Axes, model: HMM, sequences: Sequences, names: list[str]) -> None:
    """Draws the mean of each state as a function of the input, or of the value before."""
    values, inputs, emission = sequences.values[:, 0].numpy(), sequences.inputs, model.emission
    before = values[:-1] if inputs is None else inputs[1:, 0].numpy()
    grid = np.linspace(np.nanmin(before), np.nanmax(before), 100)
    mean = emission.intercept.numpy() + emission.coefficients.numpy().reshape(-1, 1) * grid
    if getattr(emission, "family", "") == "poisson":
        mean = np.exp(mean)
    axes.plot(before, values[1:], ".", color="#C8C8C8", markersize=3)
    for state, row in enumerate(mean):
        axes.plot(grid, row, color=state_colors(3)[0](state), linewidth=1.8)
    axes.set(xlabel=f"{names[0]} before" if inputs is None else "tide", ylabel=names[0])


PANELS: dict[str, Callable[[Axes, HMM, Sequences, list[str]], None]] = {
    **dict.fromkeys(("poisson", "negative_binomial", "geometric", "zero_inflated"), densities),
    "binomial": densities,
    **dict.fromkeys(("bernoulli", "multinomial"), bars),
    **dict.fromkeys(("gamma", "log_normal", "mixture", "weibull", "exponential", "beta", "von_mises"), densities),
    **dict.fromkeys(("gaussian", "gaussian_mixture", "student_t"), densities),
    **dict.fromkeys(("autoregressive", "regression", "poisson_regression"), lines),
}


def figure() -> Figure:
    """Returns the figure, with one panel for each configuration."""
    image, panels = new_figure(-(-len(PANELS) // COLUMNS), columns=COLUMNS)
    image.set_size_inches(11, 12.5)
    for axes, (name, draw) in zip(panels, PANELS.items(), strict=False):
        model, sequences, names = trained(name)
        draw(axes, model, sequences, names)
        family = getattr(model.emission, "family", None)
        set_title(axes, type(model.emission).__name__ + (f", {family}" if family else ""))
        axes.xaxis.label.set(size=9, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    image.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, labelcolor=INK)
    return image
