"""Figure 3: ways of moving found in tracks of positions, by clusters of a neural HMM's latent states.

``python -m experiments.neural.visitors museum`` (drawn visitors, on foot or by train) or ``tracks --path folder`` (CSV files with columns
timestamp, x, y in metres and groundtruth: people on foot or driving)

The model is trained on positions alone; k-means with two centres on its smoothed latent states is compared with what is known, on tracks
that were not trained on. Beside it, on the same tracks: k-means on positions, on speeds, and on averages of the logarithm of the step length, like
those that the model starts from; and a Gaussian HMM of two states on that logarithm. Spread over 5 runs with data or splits of their own.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.cluster import KMeans
from torch import Tensor

from datamodules import GPSDataModule
from experiments.neural.training import agreement, averages, mean_and_spread, timed_fit
from experiments.records import Records, markdown_table
from lightning_hmm import NeuralHMM, StandardHMM, fit
from lightning_hmm.plots import COLOURS
from lightning_hmm.sequences import Sequences

RUNS = 5
SHORTEST = 1.0  # m, added to step lengths before their logarithm is taken
TRAINING: dict[str, Any] = {"num_paths": 2, "m_steps": 8, "learning_rate": 1e-2, "transition_mean": "residual", "latent_bound": 2.0}
OPTIONS: dict[str, dict[str, Any]] = {
    # A state that cannot but be slow, started from averages over five minutes. What the step before tells is given to the emission, so that the state
    # need not hold it.
    "museum": {
        "latent_dim": 1,
        "emission_order": 2,
        "emission": "mixture",
        "num_components": 3,
        "emission_log_variance": -1.0,
        "transition_log_variance": -8.0,
        "start_window": 31,
        "num_particles": 96,
        "epochs": 10,
        **TRAINING,
    },
    # Tracks have no common map: the state alone says how far a step goes. People get in and out of their cars every few steps, so the state may jump.
    "tracks": {
        "latent_dim": 1,
        "emission_order": 0,
        "emission": "student",
        "transition": "mixture",
        "emission_log_variance": 0.0,
        "transition_log_variance": -3.0,
        "start_window": 5,
        "num_particles": 64,
        "epochs": 8,
        **TRAINING,
    },
}
NAMES = {
    "neural": "neural HMM, k-means on its latents",
    "position": "k-means on position",
    "speed": "k-means on speed",
    "log speed": "k-means on log step length",
    "average": "k-means on log step length, mean over {} steps",
    "gaussian": "Gaussian HMM, 2 states, on log step length",
}


def make_data(kind: str, run: int, path: str | None, visitors: int) -> GPSDataModule:
    parts: dict[str, Any] = {"seed": run, "val_fraction": 0.1, "test_fraction": 0.3, "batch_size": 32, "shuffle": True}
    if kind == "museum":
        data = GPSDataModule(visitors=visitors, **parts)
    else:
        columns = {"position_columns": ["x", "y"], "units": "metres", "time_column": "timestamp", "label_column": "groundtruth"}
        data = GPSDataModule(path, step=5.0, **columns, **parts)
    data.setup()
    return data


def step_lengths(data: GPSDataModule, sequences: Sequences) -> Sequences:
    """(steps, 1) metres from the step before; where one of the two is not known, the length known last, or at the beginning the first."""
    assert data.std is not None
    padded = sequences.padded() * data.std
    moved = torch.cat([torch.full_like(padded[:, :1], torch.nan), padded[:, 1:] - padded[:, :-1]], 1).norm(dim=2)
    for _ in range(2):  # forwards, then backwards
        latest = torch.where(moved.isnan(), 0, torch.arange(moved.shape[1])).cummax(1).values
        moved = moved.gather(1, latest).flip(1)
    return sequences.with_values(sequences.packed(moved.unsqueeze(2)))


def two_means(train: Tensor, test: Tensor, seed: int) -> np.ndarray:
    """(steps,) which of two centres found in the training steps each test step is nearest to; -1 where it is missing."""
    known, there = ~train.isnan().any(1), ~test.isnan().any(1)
    found = KMeans(2, n_init=10, random_state=seed).fit(train[known].numpy())
    clusters = np.full(len(test), -1)
    clusters[there.numpy()] = found.predict(test[there].numpy())
    return clusters


def gaussian_hmm(train: Sequences, test: Sequences, seed: int) -> np.ndarray:
    model = StandardHMM(2, emission="gaussian", num_features=1, seed=seed, restarts=3)
    return fit(model, train, max_epochs=100, val_sequences=train).decode(test).values.numpy()


def neural(data: GPSDataModule, options: dict[str, Any]) -> tuple[np.ndarray, float]:
    """(steps of the test part,) clusters of smoothed latent states, and seconds of processor time for training."""
    options = dict(options)
    epochs = options.pop("epochs")
    model = NeuralHMM(num_features=2, seed=data.seed, **options)
    seconds = timed_fit(model, data, epochs, data.batch_size)
    train, test = (model.latents(part).values.double() for part in (data.train_sequences, data.test_sequences))
    return two_means(train, test, data.seed), seconds


def controls(data: GPSDataModule, seed: int, window: int) -> dict[str, np.ndarray]:
    """(steps of the test part,) clusters by what is not a neural HMM. One of them clusters means over `window` steps, from which the model starts."""
    train, test = data.train_sequences, data.test_sequences
    lengths, test_lengths = step_lengths(data, train), step_lengths(data, test)
    logs, test_logs = (sequences.with_values((sequences.values + SHORTEST).log()) for sequences in (lengths, test_lengths))
    return {
        "position": two_means(train.values, test.values, seed),
        "speed": two_means(lengths.values, test_lengths.values, seed),
        "log speed": two_means(logs.values, test_logs.values, seed),
        "average": two_means(averages(logs, window).values, averages(test_logs, window).values, seed),
        "gaussian": gaussian_hmm(logs, test_logs, seed),
    }


def figure_map(data: GPSDataModule, clusters: np.ndarray, truth: np.ndarray) -> Figure:
    """All test tracks on one map, by cluster and by what they are."""
    assert data.mean is not None
    assert data.std is not None
    assert data.state_names is not None
    places = (data.test_sequences.values * data.std + data.mean).numpy()
    plot = Figure(figsize=(11, 4.6), layout="constrained")
    for axes, (numbers, names, title) in zip(
        plot.subplots(1, 2, sharex=True, sharey=True),
        [(clusters, ["cluster 0", "cluster 1"], "Clusters of latent states"), (truth, data.state_names, "Ways of visiting")],
        strict=True,
    ):
        for number, name in enumerate(names):
            rows = numbers == number
            axes.plot(places[rows, 0], places[rows, 1], "o", markersize=1.6, markeredgewidth=0, alpha=0.5, color=COLOURS[number], label=name)
        axes.set(title=title, xlabel="metres east", ylabel="metres north", aspect="equal")
        axes.legend(frameon=False, loc="upper right", markerscale=4)
        axes.spines[["top", "right"]].set_visible(False)
    return plot


def figure_tracks(data: GPSDataModule, clusters: np.ndarray, truth: np.ndarray, count: int = 6) -> Figure:
    """Some test tracks that have both ways of moving, each on a map of its own, by cluster; rings where the cluster is not the label."""
    assert data.mean is not None
    assert data.std is not None
    assert data.state_names is not None
    places, offsets = (data.test_sequences.values * data.std + data.mean).numpy(), data.test_sequences.offsets.tolist()
    stretches = [slice(first, last) for first, last in pairwise(offsets)]
    mixed = [rows for rows in stretches if 0.25 < truth[rows].mean() < 0.75][:count]
    plot = Figure(figsize=(11, 7), layout="constrained")
    for axes, rows in zip(plot.subplots(2, -(-count // 2)).flat, mixed, strict=False):
        axes.plot(*places[rows].T, color="#B8B8B8", linewidth=0.6)
        for number, name in enumerate(data.state_names):
            here = clusters[rows] == number
            axes.plot(*places[rows][here].T, "o", markersize=3.5, color=COLOURS[number], label=name)
        wrong = clusters[rows] != truth[rows]
        axes.plot(*places[rows][wrong].T, "o", markersize=7, color="#333333", fillstyle="none", markeredgewidth=0.7, label="labelled otherwise")
        axes.set(aspect="equal", xlabel="metres", ylabel="metres")
        axes.spines[["top", "right"]].set_visible(False)
    plot.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return plot


def in_order(clusters: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """The same clusters, numbered like the states that they mostly are."""
    known = (clusters >= 0) & (truth >= 0)
    same = np.mean(clusters[known] == truth[known])
    return clusters if same >= 0.5 else np.where(clusters < 0, clusters, 1 - clusters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=["museum", "tracks"])
    parser.add_argument("--path", help="for tracks: a folder of CSV files, looked up under $LIGHTNING_HMM_DATA too")
    parser.add_argument("--runs", type=int, nargs="+", default=list(range(RUNS)), help="seeds; settings were chosen on 100 and above")
    parser.add_argument("--out", type=Path, help="logs/experiments/neural/visitors/<data> if not given")
    parser.add_argument("--quick", action="store_true", help="one run, few visitors, few steps of training")
    args = parser.parse_args()
    if (args.data == "tracks") != (args.path is not None):
        parser.error("`--path` must be given for tracks, and for tracks only")
    torch.set_num_threads(1)
    out, options = args.out or Path("logs/experiments/neural/visitors") / args.data, OPTIONS[args.data]
    if args.quick:
        args.runs, options, visitors = [0], options | {"epochs": 2}, 12
    else:
        visitors = 200
    records, names = Records(out / "records.jsonl"), {name: words.format(options["start_window"]) for name, words in NAMES.items()}
    for run in args.runs:
        if all(records.has(model=name, run=run) for name in NAMES):
            continue
        data = make_data(args.data, run, args.path, visitors)
        truth = data.true_states("test").values.numpy()  # type: ignore[union-attr]
        truth = np.where(data.test_sequences.values.isnan().any(1).numpy(), -1, truth)  # the same steps for all
        latents, seconds = neural(data, options)
        found = {"neural": latents, **controls(data, run, options["start_window"])}
        for name, clusters in found.items():
            if not records.has(model=name, run=run):
                records.add(model=name, run=run, **agreement(clusters, truth), **({"seconds": seconds} if name == "neural" else {}))
        if run == args.runs[0]:
            draw = figure_map if args.data == "museum" else figure_tracks
            draw(data, in_order(found["neural"], truth), truth).savefig(out / "figure.png", dpi=150)
        print(f"run {run}: " + "; ".join(f"{names[name]} ARI {records.where(model=name, run=run)[0]['ari']:.3f}" for name in NAMES), flush=True)
    rows = [[names[name], *(mean_and_spread([r[measure] for r in records.where(model=name)]) for measure in ("ari", "purity", "accuracy"))] for name in NAMES]
    table = markdown_table(["", "ARI", "purity", "accuracy"], rows)
    (out / "agreement.md").write_text(table)
    print(table)
    print(f"Written to {out}: agreement.md, figure.png, records.jsonl.")


if __name__ == "__main__":
    main()
