"""Table 1 and Figure 1b: errors of predicting the next position of a particle, by the dimension of the latent space.

``python -m experiments.neural.moving`` (``--features 3``, ``--latent 2 4``, ``--models neural gru`` for parts of it)

Each of 10 environments (seeds 0 to 9) has targets of its own, 200 trajectories for training, 50 for early stopping and
150 for the test. The models are the neural HMM, the linear-Gaussian model of positions and of increments, and recurrent
networks. They are compared with predicting the last position and with the exact filter with known targets (the floor).
The share (error - floor) / (1 - floor) is the part of the possible gain that was not reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from datamodules import MovingTargetDataModule
from experiments.measures import Stopwatch, mean_and_spread
from experiments.neural.stacked_networks import Stack
from experiments.neural.training import CELLS, prediction_error, timed_fit
from experiments.panels import DARK, legend, log_ticks, panels
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm.models import LinearGaussianHMM, NeuralHMM, RecurrentNet
from lightning_hmm.models.baselines import persistence
from lightning_hmm.plotting import COLORS

LATENT = (2, 3, 4, 5, 10, 20)
SIZES: dict[str, Any] = {"num_sequences": 400, "val_fraction": 0.125, "test_fraction": 0.375}
# Chosen on validation data of environment 100: long training with few particles in each E-step.
NEURAL: dict[str, Any] = {
    "transition_order": 2,
    "num_particles": 8,
    "num_paths": 1,
    "m_steps": 8,
    "learning_rate": 1e-2,
}
# From this dimension on, the initial noise of each dimension is smaller, and there are more paths.
MANY, FOR_MANY = 10, {"transition_log_variance": -4.0, "num_paths": 2}
TEST_PARTICLES = 128
HIGHEST_SHOWN = 1.1  # largest error in the figure; the linear-Gaussian model of few dimensions is above it
RECURRENT: dict[str, Any] = {"epochs": 600, "patience": 60, "learning_rate": 5e-3, "learning_rate_decay": 0.995}
NAMES = {
    "neural": "neural HMM",
    "linear": "linear-Gaussian",
    "linear, increments": "linear-Gaussian on increments",
    "rnn": "RNN",
    "lstm": "LSTM",
    "gru": "GRU",
    "rnn, direct": "RNN, direct",
    "lstm, direct": "LSTM, direct",
    "gru, direct": "GRU, direct",
}
# Mean and spread in the paper's Table 1, whose HMM is the linear-Gaussian model.
PAPER = {
    3: {
        "neural": [".65 ± .17", ".64 ± .17", ".66 ± .16", ".63 ± .16", ".65 ± .19", ".66 ± .18"],
        "linear": [".92 ± .20", ".82 ± .16", ".82 ± .18", ".76 ± .13", ".71 ± .15", ".71 ± .13"],
        "rnn": [".86 ± .06", ".83 ± .06", ".82 ± .07", ".73 ± .10", ".64 ± .09", ".56 ± .10"],
        "lstm": [".71 ± .10", ".71 ± .08", ".75 ± .09", ".60 ± .09", ".56 ± .10", ".54 ± .10"],
        "gru": [".82 ± .06", ".82 ± .08", ".73 ± .08", ".67 ± .08", ".56 ± .08", ".54 ± .09"],
    },
    5: {
        "neural": [".76 ± .13", ".77 ± .12", ".80 ± .13", ".75 ± .14", ".78 ± .13", ".78 ± .13"],
        "linear": [".98 ± .13", ".93 ± .11", ".87 ± .11", ".87 ± .10", ".81 ± .12", ".81 ± .10"],
        "rnn": [".98 ± .01", ".94 ± .02", ".86 ± .06", ".83 ± .07", ".71 ± .07", ".65 ± .07"],
        "lstm": [".84 ± .07", ".79 ± .07", ".76 ± .08", ".76 ± .07", ".61 ± .07", ".61 ± .07"],
        "gru": [".87 ± .04", ".86 ± .04", ".80 ± .05", ".75 ± .05", ".66 ± .06", ".59 ± .07"],
    },
}


@cache
def make_data(run: Run, features: int, environment: int) -> MovingTargetDataModule:
    data = MovingTargetDataModule(features, seed=environment, batch_size=32, shuffle=True, **run.sizes)
    data.setup()
    return data


def error_of(model: Any, data: MovingTargetDataModule, **options: Any) -> float:
    return prediction_error(model.predict_each(data.test_sequences, **options), data.test_sequences)


def neural(latent: int, data: MovingTargetDataModule, epochs: int) -> dict[str, Any]:
    """Returns the error of a neural HMM after a fixed number of epochs of 4 E-steps on 50 trajectories each."""
    model = NeuralHMM(latent, data.num_features, seed=data.seed, **NEURAL | (FOR_MANY if latent >= MANY else {}))
    seconds = timed_fit(model, data, epochs, batch_size=50)
    return {"error": error_of(model, data, num_particles=TEST_PARTICLES), "epochs": epochs, "seconds": seconds}


def linear(name: str, latent: int, data: MovingTargetDataModule, epochs: int) -> dict[str, Any]:
    """Returns the error of a linear-Gaussian model after a fixed number of iterations of exact EM."""
    target: Any = "increments" if "increments" in name else "positions"
    model = LinearGaussianHMM(latent, data.num_features, target=target, seed=data.seed)
    seconds = timed_fit(model, data, epochs, batch_size=None)
    return {"error": error_of(model, data), "epochs": epochs, "seconds": seconds}


@lru_cache(maxsize=1)
def recurrent(run: Run, name: str, features: int, latent: int) -> dict[int, dict[str, Any]]:
    """Returns the errors of networks with a head of 3 layers by environment, all trained side by side."""
    cell, _, variant = name.partition(", ")
    data = [make_data(run, features, environment) for environment in run.environments]
    options: dict[str, Any] = {"num_features": features, "cell": cell, "residual": variant != "direct"}
    models = [RecurrentNet(latent, seed=drawn.seed, **options) for drawn in data]
    with Stopwatch() as watch:
        errors, epochs = Stack(models, data).fit(**RECURRENT | run.recurrent)
    seconds = round(watch.seconds / len(data), 2)
    return {
        drawn.seed: {
            "error": error_of(model, drawn),
            "val_error": float(error),
            "epochs": int(epoch),
            "seconds": seconds,
        }
        for model, drawn, error, epoch in zip(models, data, errors, epochs, strict=True)
    }


def cases(run: Run) -> Iterator[Case]:
    for d in run.features:
        for name in ("persistence", "floor"):
            yield from ({"model": name, "d": d, "environment": environment} for environment in run.environments)
        for latent in run.latent:
            for name in run.models:
                settings = {"model": name, "d": d, "latent": latent}
                yield from ({**settings, "environment": environment} for environment in run.environments)


def compute(run: Run, case: Case) -> dict[str, Any]:
    name, environment, latent = case["model"], case["environment"], case.get("latent", 0)
    if name.partition(", ")[0] in CELLS:
        return recurrent(run, name, case["d"], latent)[environment]
    data = make_data(run, case["d"], environment)
    if name == "persistence":
        return {"error": prediction_error(persistence(data.test_sequences), data.test_sequences)}
    if name == "floor":
        return {"error": data.bayes_error()}
    return neural(latent, data, run.epochs) if name == "neural" else linear(name, latent, data, run.epochs)


def tables(run: Run, d: int) -> dict[str, str]:
    """Errors and the paper's, and the shares of the possible gain that were not reached, over environments.

    If not all environments were run, their number is in parentheses.
    """
    header = ["", *(f"d_h = {latent}" for latent in run.latent)]
    floors, still = (
        {found["environment"]: found["error"] for found in run.records.where(model=name, d=d)}
        for name in ("floor", "persistence")
    )

    def cell(numbers: list[float]) -> str:
        return mean_and_spread(numbers) + (f" ({len(numbers)})" if 0 < len(numbers) < len(run.environments) else "")

    def lost(found: dict[str, Any]) -> float:
        floor = floors[found["environment"]]
        return float((found["error"] - floor) / (1 - floor))

    errors, shares = [], []
    for name in run.models:
        by_latent = [run.records.where(model=name, d=d, latent=latent) for latent in run.latent]
        runs = [[found for found in records if found["environment"] in run.environments] for records in by_latent]
        if any(runs):
            errors.append([NAMES[name], *(cell([found["error"] for found in records]) for records in runs)])
            shares.append([NAMES[name], *(cell([lost(found) for found in records]) for records in runs)])
        if name in PAPER.get(d, {}):
            printed = dict(zip(LATENT, PAPER[d][name], strict=True))
            errors.append([f"{NAMES[name]}, paper", *(printed.get(latent, "-") for latent in run.latent)])
    for name, bound in (("standing still", still), ("floor: exact filter, targets known", floors)):
        errors.append([name, *[cell([bound[environment] for environment in run.environments])] * len(run.latent)])
    return {f"errors_d{d}": markdown_table(header, errors), f"shares_d{d}": markdown_table(header, shares)}


def table(run: Run) -> dict[str, str]:
    return {name: made for d in run.features for name, made in tables(run, d).items()}


def draw(run: Run, axes: Axes, d: int) -> None:
    latents = sorted(run.latent)
    for number, name in enumerate(name for name in run.models if "direct" not in name):
        found = {latent: run.records.values("error", model=name, d=d, latent=latent) for latent in latents}
        means, spreads = ([function(errors) for errors in found.values() if errors] for function in (np.mean, np.std))
        places = [latent for latent in latents if found[latent]]
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 2, "color": COLORS[number]}
        axes.errorbar(places, means, spreads, label=NAMES[name], **style)
    for name, label, style_of_line in (("persistence", "standing still", "--"), ("floor", "floor", ":")):
        error = np.mean(run.records.values("error", model=name, d=d))
        axes.axhline(error, color=DARK, linestyle=style_of_line, linewidth=1, label=label)
    axes.set_ylim(top=HIGHEST_SHOWN)
    axes.set(title=f"d = {d}", xlabel="dimension of the latent space", ylabel="prediction error")
    log_ticks(axes, latents)


def figure(run: Run) -> Figure:
    plot, (all_axes,) = panels(5.5 * len(run.features), 4.4, 1, len(run.features), grid="y")
    for axes, d in zip(all_axes, run.features, strict=True):
        draw(run, axes, d)
    legend(all_axes[-1], outside="right")
    return plot


SEEDS_HELP = "seeds of the environments; settings were chosen on 100 and above"
EXPERIMENT = Experiment(
    folder="neural/moving",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        Option("--features", type=int, nargs="+", default=[3, 5], help="dimensions d of the positions"),
        Option("--latent", type=int, nargs="+", default=list(LATENT), help="dimensions d_h of the latent space"),
        Option("--models", nargs="+", choices=list(NAMES), default=list(NAMES), help="models (all if not given)"),
        Option("--environments", type=int, nargs="+", default=list(range(10)), help=SEEDS_HELP),
    ],
    settings={"sizes": SIZES, "epochs": 40, "recurrent": {}},
    quick={
        "features": [3],
        "latent": [2],
        "environments": [0],
        "sizes": {**SIZES, "num_sequences": 20, "length": 20},
        "epochs": 2,
        "recurrent": {"epochs": 2},
    },
    quick_help="one small environment, few steps of training",
)

if __name__ == "__main__":
    run(EXPERIMENT)
