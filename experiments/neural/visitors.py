"""Figure 3: modes of movement found in tracks of positions, by clusters of a neural HMM's latent states.

``python -m experiments.neural.visitors museum`` (synthetic visitors, on foot or by train) or ``tracks --path folder``
(CSV files with columns timestamp, x, y in meters and groundtruth: people on foot or driving)

The model is trained on positions alone. K-means with two centers on its smoothed latent states is compared with the
true modes, on tracks that were not used for training. It is compared on the same tracks with k-means on positions, on
speeds, and on averages of the logarithm of the step length, similar to those from which the model is initialized, and
with a Gaussian HMM of two states on that logarithm. There are 5 runs with data or splits of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.cluster import KMeans
from torch import Tensor

from datamodules import GPSDataModule
from experiments.measures import mean_and_spread
from experiments.neural.training import agreement, averages, timed_fit
from experiments.panels import LIGHT, legend, panels
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm import NeuralHMM, StandardHMM, fit
from lightning_hmm.plotting import COLORS
from lightning_hmm.sequences import Sequences

SHORTEST = 1.0  # meters, added to step lengths before the logarithm
TRAINING: dict[str, Any] = {
    "num_paths": 2,
    "m_steps": 8,
    "learning_rate": 1e-2,
    "transition_mean": "residual",
    "latent_bound": 2.0,
}
OPTIONS: dict[str, dict[str, Any]] = {
    # The state is restricted to be slow and is initialized from averages over five minutes. The emission reads the
    # previous steps, so the state need not represent them.
    "museum": {
        "latent_dim": 1,
        "emission_order": 2,
        "emission": "mixture",
        "num_components": 3,
        "emission_log_variance": -1.0,
        "transition_log_variance": -8.0,
        "start_window": 31,
        "num_particles": 96,
        **TRAINING,
    },
    # Tracks have no common map: only the state determines the length of a step. People get in and out of their cars
    # every few steps, so the state may jump.
    "tracks": {
        "latent_dim": 1,
        "emission_order": 0,
        "emission": "student",
        "transition": "mixture",
        "emission_log_variance": 0.0,
        "transition_log_variance": -3.0,
        "start_window": 5,
        "num_particles": 64,
        **TRAINING,
    },
}
EPOCHS = {"museum": 10, "tracks": 8}
NAMES = {
    "neural": "neural HMM, k-means on its latents",
    "position": "k-means on position",
    "speed": "k-means on speed",
    "log speed": "k-means on log step length",
    "average": "k-means on log step length, mean over {} steps",
    "gaussian": "Gaussian HMM, 2 states, on log step length",
}


@lru_cache(maxsize=1)
def make_data(run: Run, seed: int) -> GPSDataModule:
    if (run.data == "tracks") != (run.path is not None):
        raise ValueError("`--path` must be given for tracks, and only for tracks.")
    parts: dict[str, Any] = {"seed": seed, "val_fraction": 0.1, "test_fraction": 0.3, "batch_size": 32, "shuffle": True}
    if run.data == "museum":
        data = GPSDataModule(visitors=run.visitors, **parts)
    else:
        columns: dict[str, Any] = {"position_columns": ["x", "y"], "time_column": "timestamp", "units": "metres"}
        data = GPSDataModule(run.path, step=5.0, label_column="groundtruth", **columns, **parts)
    data.setup()
    return data


def true_modes(data: GPSDataModule) -> np.ndarray:
    """Returns the (steps of the test part,) true modes; -1 where the position is missing."""
    states = data.true_states("test")
    assert states is not None
    return np.where(data.test_sequences.values.isnan().any(1).numpy(), -1, states.values.numpy())


def step_lengths(data: GPSDataModule, sequences: Sequences) -> Sequences:
    """Returns (steps, 1) distances from the previous step in meters, the last known one where it is missing."""
    assert data.std is not None
    padded = sequences.padded() * data.std
    moved = torch.cat([torch.full_like(padded[:, :1], torch.nan), padded[:, 1:] - padded[:, :-1]], 1).norm(dim=2)
    for _ in range(2):  # forward, then backward
        latest = torch.where(moved.isnan(), 0, torch.arange(moved.shape[1])).cummax(1).values
        moved = moved.gather(1, latest).flip(1)
    return sequences.with_values(sequences.packed(moved.unsqueeze(2)))


def two_means(train: Tensor, test: Tensor, seed: int) -> np.ndarray:
    """Returns (steps,) the nearest of two k-means centers of the training steps; -1 where missing."""
    known, there = ~train.isnan().any(1), ~test.isnan().any(1)
    found = KMeans(2, n_init=10, random_state=seed).fit(train[known].numpy())
    clusters = np.full(len(test), -1)
    clusters[there.numpy()] = found.predict(test[there].numpy())
    return clusters


def gaussian_hmm(train: Sequences, test: Sequences, seed: int) -> np.ndarray:
    model = StandardHMM(2, emission="gaussian", num_features=1, seed=seed, restarts=3)
    return fit(model, train, max_epochs=100, val_sequences=train).decode(test).values.numpy()


def neural(run: Run, data: GPSDataModule) -> tuple[np.ndarray, float]:
    """Returns (steps of the test part,) clusters of smoothed latent states, and the seconds of training."""
    model = NeuralHMM(num_features=2, seed=data.seed, **OPTIONS[run.data])
    seconds = timed_fit(model, data, run.epochs or EPOCHS[run.data], data.batch_size)
    train, test = (model.latents(part).values.double() for part in (data.train_sequences, data.test_sequences))
    return two_means(train, test, data.seed), seconds


def control(name: str, data: GPSDataModule, window: int) -> np.ndarray:
    """Returns (steps of the test part,) clusters by another method; those of averages are over `window` steps."""
    train, test = data.train_sequences, data.test_sequences
    if name != "position":
        train, test = (step_lengths(data, part) for part in (train, test))
    if name not in ("position", "speed"):
        train, test = (part.with_values((part.values + SHORTEST).log()) for part in (train, test))
    if name == "average":
        train, test = (averages(part, window) for part in (train, test))
    return (
        gaussian_hmm(train, test, data.seed) if name == "gaussian" else two_means(train.values, test.values, data.seed)
    )


def places_of(data: GPSDataModule) -> np.ndarray:
    """Returns the (steps of the test part, 2) positions in meters."""
    assert data.mean is not None
    assert data.std is not None
    return (data.test_sequences.values * data.std + data.mean).numpy()


def figure_map(data: GPSDataModule, clusters: np.ndarray, truth: np.ndarray) -> Figure:
    """All test tracks on one map, by cluster and by their true mode."""
    assert data.state_names is not None
    places = places_of(data)
    plot, (all_axes,) = panels(11, 4.6, 1, 2, sharex=True, sharey=True)
    left = clusters, ["cluster 0", "cluster 1"], "Clusters of latent states"
    right = truth, data.state_names, "Ways of visiting"
    for axes, (numbers, names, title) in zip(all_axes, [left, right], strict=True):
        for number, name in enumerate(names):
            style = {"markersize": 1.6, "markeredgewidth": 0, "alpha": 0.5, "color": COLORS[number]}
            axes.plot(*places[numbers == number].T, "o", label=name, **style)
        axes.set(title=title, xlabel="meters east", ylabel="meters north", aspect="equal")
        legend(axes, loc="upper right", markerscale=4, fontsize="medium")
    return plot


def figure_tracks(data: GPSDataModule, clusters: np.ndarray, truth: np.ndarray, count: int = 6) -> Figure:
    """Some test tracks with both modes on separate maps, by cluster. Rings show where cluster and label differ."""
    assert data.state_names is not None
    places = places_of(data)
    stretches = [slice(first, last) for first, last in pairwise(data.test_sequences.offsets.tolist())]
    mixed = [rows for rows in stretches if 0.25 < truth[rows].mean() < 0.75][:count]
    plot, all_axes = panels(11, 7, 2, -(-count // 2))
    ring = {"markersize": 7, "color": "#333333", "fillstyle": "none", "markeredgewidth": 0.7}
    for axes, rows in zip(all_axes.flat, mixed, strict=False):
        axes.plot(*places[rows].T, color=LIGHT, linewidth=0.6)
        for number, name in enumerate(data.state_names):
            here = clusters[rows] == number
            axes.plot(*places[rows][here].T, "o", markersize=3.5, color=COLORS[number], label=name)
        wrong = clusters[rows] != truth[rows]
        axes.plot(*places[rows][wrong].T, "o", label="labelled otherwise", **ring)
        axes.set(aspect="equal", xlabel="meters", ylabel="meters")
    legend(all_axes[0, 0], outside="lower center", columns=3, fontsize="medium")
    return plot


def in_order(clusters: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Numbers the two clusters like the states that they agree with."""
    known = (clusters >= 0) & (truth >= 0)
    same = np.mean(clusters[known] == truth[known])
    return clusters if same >= 0.5 else np.where(clusters < 0, clusters, 1 - clusters)


def cases(run: Run) -> Iterator[Case]:
    for seed in run.runs:
        yield from ({"model": name, "run": seed} for name in NAMES)


def compute(run: Run, case: Case) -> dict[str, Any]:
    """Returns the agreement with the true modes. The figure shows the clusters of the first run."""
    data = make_data(run, case["run"])
    truth = true_modes(data)
    if case["model"] != "neural":
        return agreement(control(case["model"], data, OPTIONS[run.data]["start_window"]), truth)
    clusters, seconds = neural(run, data)
    if case["run"] == run.runs[0]:
        draw = figure_map if run.data == "museum" else figure_tracks
        run.save(draw(data, in_order(clusters, truth), truth))
    return {**agreement(clusters, truth), "seconds": seconds}


def table(run: Run) -> dict[str, str]:
    rows = []
    for name, words in NAMES.items():
        found = [run.records.values(measure, model=name) for measure in ("ari", "purity", "accuracy")]
        rows.append([words.format(OPTIONS[run.data]["start_window"]), *map(mean_and_spread, found)])
    return {"agreement": markdown_table(["", "ARI", "purity", "accuracy"], rows)}


RUNS_HELP = "seeds of data or splits; settings were chosen on 100 and above"
EXPERIMENT = Experiment(
    folder=lambda run: f"neural/visitors/{run.data}",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=None,
    options=[
        Option("data", choices=["museum", "tracks"], help="synthetic visitors or recorded tracks"),
        Option("--path", help="for tracks: a folder of CSV files, also looked up in $LIGHTNING_HMM_DATA"),
        Option("--runs", type=int, nargs="+", default=list(range(5)), help=RUNS_HELP),
    ],
    settings={"visitors": 200, "epochs": None},
    quick={"runs": [0], "visitors": 12, "epochs": 2},
    quick_help="one run, few visitors, few steps of training",
)

if __name__ == "__main__":
    run(EXPERIMENT)
