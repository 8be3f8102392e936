"""Table 1: how to spend 100 transition parameters: few states with all transitions, or many states with few kept ones each.

``python -m experiments.dmc.tradeoff`` (``--path`` for a real recording; ``--criterion largest`` for what the paper keeps)

Five pairs of N and K with N K = 100, on DMC-friendly, anti-DMC and accelerometer data, each from 5 starts, until the validation data have not become
more probable for 30 iterations; the test data are scored at the best of these iterations. "Chosen" takes, for each seed, the pair that validation prefers.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.dmc.learning import DATA, SEEDS, add_options, collect, mean_and_spread, settings_of, truth
from experiments.records import Records, markdown_table
from lightning_hmm.plots import COLOURS

EPOCHS, PATIENCE = 500, 30
MODELS: dict[str, tuple[int, int | None]] = {
    "regular, N = 10": (10, None),
    "DMC, N = 20, K = 5": (20, 5),
    "DMC, N = 25, K = 4": (25, 4),
    "DMC, N = 50, K = 2": (50, 2),
    "DMC, N = 100, K = 1": (100, 1),
}
PAPER = {  # its Motionlogger data are not to be had; another recording has another level
    "friendly": (-22829, -22780, -22783, -22807, -22847),
    "anti": (-27681, -27098, -27076, -27054, -27070),
    "accelerometer": (-81948, -80101, -80170, -79616, -79283),
}


def found_of(records: Records, name: str, seeds: int, epochs: int, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """(seeds, 2) log-likelihoods of validation and test data, for each model."""
    found = {}
    for label, size in MODELS.items():
        runs = {record["seed"]: (record["val"], record["test"]) for record in records.where(**settings_of(name, *size, epochs, args))}
        found[label] = np.array([runs[seed] for seed in range(seeds)])
    return found


def figure(records: Records, seeds: int, epochs: int, args: argparse.Namespace) -> Figure:
    """Test log-likelihood of each run, less the mean of the regular HMM; ours beside the paper's means."""
    plot = Figure(figsize=(4.2 * len(args.data), 4.2), layout="constrained")
    all_axes = plot.subplots(1, len(args.data), squeeze=False)[0]
    places = np.arange(len(MODELS))
    for axes, name in zip(all_axes, args.data, strict=True):
        found = np.stack([runs[:, 1] for runs in found_of(records, name, seeds, epochs, args).values()])  # (models, seeds)
        gains = found - found[0].mean()
        axes.plot(np.repeat(places, seeds), gains.ravel(), "o", markersize=4, alpha=0.5, color=COLOURS[0], label="ours, each start")
        axes.plot(places, gains.mean(1), "_", markersize=22, markeredgewidth=2, color=COLOURS[0], label="ours, mean")
        axes.plot(places, np.array(PAPER[name]) - PAPER[name][0], "D", markersize=6, markerfacecolor="none", color=COLOURS[1], label="the paper's")
        axes.axhline(0, color="#B8B8B8", linewidth=0.8)
        axes.set_xticks(places, ["10\nall", "20\n5", "25\n4", "50\n2", "100\n1"])
        axes.set(title=DATA[name], xlabel="states N, kept transitions K", xlim=(-0.5, len(MODELS) - 0.5))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    all_axes[0].set_ylabel("test log-likelihood above regular (nats)")
    plot.legend(*all_axes[0].get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside lower center", ncols=3)
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "tradeoff", "one start, 2 iterations, 100 points to test on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, epochs = (1, 2) if args.quick else (SEEDS, EPOCHS)
    records = Records(args.out / "records.jsonl")
    collect(records, MODELS, seeds, epochs, PATIENCE, args)
    columns = []
    for name in args.data:
        found = found_of(records, name, seeds, epochs, args)
        values = np.stack(list(found.values()))  # (models, seeds, 2)
        preferred = values[:, :, 0].argmax(0)
        chosen = values[preferred, np.arange(seeds), 1]
        true = truth(records, name, args)[1]
        ours = ["{:.1f} ± {:.1f}".format(*mean_and_spread(list(tests))) for tests in (*values[:, :, 1], chosen)]
        columns += [[*ours, "" if true is None else f"{true:.1f}"], [*(f"{level:,}" for level in PAPER[name]), "", ""]]
    labels = [*MODELS, "chosen on validation", "the model of the data"]
    heads = [head for name in args.data for head in (DATA[name], "paper")]
    table = markdown_table(["", *heads], [list(row) for row in zip(labels, *columns, strict=True)])
    (args.out / "table.md").write_text(table)
    figure(records, seeds, epochs, args).savefig(args.out / "figure.png", dpi=150)
    print(table, f"Written to {args.out}: table.md, figure.png, records.jsonl.", sep="\n")


if __name__ == "__main__":
    main()
