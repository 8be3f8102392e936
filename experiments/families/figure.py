"""The figure of `docs/families.md`: each family, trained on its column of `configs/families/animals.csv`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
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


def trained(name: str) -> tuple[HMM, Sequences]:
    """Trains the model of a configuration with its known states, so that all models number the states alike."""
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    options = config["model"]["init_args"]
    data = FileDataModule(
        **{**config["data"]["init_args"], "path": str(CONFIGS / "animals.csv")},
        label_column="behavior",
        val_fraction=0.0,
        test_fraction=0.0,
    )
    data.setup()
    sequences = data.train_sequences
    emission = part(options["emission"])
    model = HMM(options["num_states"], emission, columns=data.columns)
    return fit(model, sequences, max_epochs=config["trainer"]["max_epochs"]), sequences


def part(config: dict[str, Any]) -> Any:
    """Returns the part that a configuration describes."""
    options = {
        name: part(value) if isinstance(value, dict) and "class_path" in value else value
        for name, value in config.get("init_args", {}).items()
    }
    return getattr(lightning_hmm, config["class_path"])(**options)


def densities(axes: Axes, model: HMM, sequences: Sequences) -> None:
    """Draws the densities of the first column."""
    names = [column.name for column in model.columns]
    column = column_densities(model.emission, sequences.values, names)[0]
    weights = model.posterior(sequences).smoothed.values.mean(0).numpy()
    draw_densities(axes, column, weights, STATES)


def bars(axes: Axes, model: HMM, sequences: Sequences) -> None:
    """Draws the probabilities of symbols or of counted categories."""
    probs, (column, *_) = model.emission.probs.numpy(), model.columns
    names = column.category_names or [one.name for one in model.columns]
    for state, row in enumerate(probs):
        axes.bar(np.arange(len(row)) + 0.27 * (state - 1), row, 0.25, color=state_colors(3)[0](state))
    axes.set_xticks(range(len(names)), names)


def lines(axes: Axes, model: HMM, sequences: Sequences) -> None:
    """Draws the mean of each state as a function of the input, or of the value before."""
    values, inputs, emission = sequences.values[:, 0], sequences.inputs, model.emission
    slope, intercept = emission.coefficients.reshape(3, 1), emission.intercept
    before = values[:-1] if inputs is None else inputs[1:, 0]
    grid = torch.linspace(float(before.nan_to_num(nan=before.nanmean()).min()), float(before.nan_to_num().max()), 100)
    mean = intercept + slope * grid
    mean = mean.exp() if getattr(emission, "family", "") == "poisson" else mean
    axes.plot(before, values[1:], ".", color="#C8C8C8", markersize=3)
    for state, row in enumerate(mean):
        axes.plot(grid, row, color=state_colors(3)[0](state), linewidth=1.8)
    axes.set_xlabel(f"{model.columns[0].name} before" if inputs is None else "tide")
    axes.set_ylabel(model.columns[0].name)


PANELS: dict[str, Callable[[Axes, HMM, Sequences], None]] = {
    **dict.fromkeys(("poisson", "negative_binomial", "geometric", "zero_inflated"), densities),
    **dict.fromkeys(("binomial", "bernoulli"), densities),
    **dict.fromkeys(("categorical", "multinomial"), bars),
    **dict.fromkeys(("gamma", "log_normal", "mixture", "weibull", "exponential", "beta", "von_mises"), densities),
    **dict.fromkeys(("gaussian", "gaussian_mixture", "student_t"), densities),
    **dict.fromkeys(("autoregressive", "regression"), lines),
}


def figure() -> Figure:
    """Returns the figure, with one panel for each configuration."""
    image, panels = new_figure(-(-len(PANELS) // COLUMNS), columns=COLUMNS)
    image.set_size_inches(11, 12.5)
    for axes, (name, draw) in zip(panels, PANELS.items(), strict=False):
        draw(axes, *trained(name))
        set_title(axes, name.replace("_", " ").capitalize())
        axes.xaxis.label.set(size=9, color=INK)
    handles, names = panels[0].get_legend_handles_labels()
    image.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, labelcolor=INK)
    return image
