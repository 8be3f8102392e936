"""Figures 2 and 3: how well 20 states with K = 1 to 5 kept transitions do on held-out data, along EM, beside the full HMM and two controls.

``python -m experiments.dmc.learning_curves`` (``--path`` for a real recording; ``--criterion largest`` for what the paper keeps)

DMC-friendly, anti-DMC and accelerometer data. Each model is trained from 5 starts, and the curves are means over them. The table takes each run at the
iteration at which the validation data are most probable; the paper took the test data for that.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.dmc.learning import DATA, SEEDS, add_options, collect, mean_and_spread, settings_of, truth
from experiments.records import Records, markdown_table
from lightning_hmm.plots import COLOURS

EPOCHS = 100
MODELS: dict[str, tuple[int, int | None]] = {
    "full": (20, None),
    **{f"K = {kept}": (20, kept) for kept in (5, 4, 3, 2, 1)},
    "uniform (K = 0)": (20, 0),
    "5 states, full": (5, None),
}
BLUES = ("#00263C", "#004C78", "#0072B2", "#4A9CCB", "#8FC1E0")  # K = 5 to 1
STYLES: dict[str, dict[str, Any]] = {
    "full": {"color": COLOURS[1], "linewidth": 2.2},
    **{f"K = {kept}": {"color": colour} for kept, colour in zip((5, 4, 3, 2, 1), BLUES, strict=True)},
    "uniform (K = 0)": {"color": COLOURS[6], "linestyle": "--"},
    "5 states, full": {"color": COLOURS[2], "linestyle": "-."},
}


def figure(records: Records, epochs: int, args: argparse.Namespace) -> Figure:
    """Log-likelihood of the test data for each point, mean over the seeds, against the iteration."""
    plot = Figure(figsize=(4.6 * len(args.data), 4.4), layout="constrained")
    all_axes = plot.subplots(1, len(args.data), squeeze=False)[0]
    for axes, name in zip(all_axes, args.data, strict=True):
        points, true = truth(records, name, args)
        ends = []
        for label, (num_states, num_kept) in MODELS.items():
            runs = [record["curve"] for record in records.where(**settings_of(name, num_states, num_kept, epochs, args))]
            curve = np.mean(runs, axis=0) / points
            ends.append(curve[1:])
            axes.plot(range(len(curve)), curve, label=label, **STYLES[label])
        if true is not None:
            axes.axhline(true / points, color="#8C8C8C", linewidth=0.8, linestyle=":", label="the model of the data")
        # The first iterations lie far below what matters.
        top, low = max([curve.max() for curve in ends] + ([] if true is None else [true / points])), min(curve[-1] for curve in ends)
        axes.set_ylim(low - 0.35 * (top - low), top + 0.12 * (top - low))
        axes.set(title=DATA[name], xlabel="iteration of EM", ylabel="test log-likelihood per point (nats)" if axes is all_axes[0] else "")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    handles, labels = all_axes[0].get_legend_handles_labels()
    plot.legend(handles, labels, frameon=False, fontsize="small", loc="outside right center")
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "learning_curves", "one start, 3 iterations, 100 points to test on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, epochs = (1, 3) if args.quick else (SEEDS, EPOCHS)
    records = Records(args.out / "records.jsonl")
    collect(records, MODELS, seeds, epochs, None, args)
    rows = []
    for label, (num_states, num_kept) in MODELS.items():
        row = [label]
        for name in args.data:
            points, _ = truth(records, name, args)
            full, found = (
                {record["seed"]: record["test"] for record in records.where(**settings_of(name, *size, epochs, args))}
                for size in (MODELS["full"], (num_states, num_kept))
            )
            mean, spread = mean_and_spread(list(found.values()))
            gap, gap_spread = mean_and_spread([(found[seed] - full[seed]) * 1000 / points for seed in full])
            row += [f"{mean:.1f} ± {spread:.1f}", "" if label == "full" else f"{gap:+.2f} ± {gap_spread:.2f}"]
        rows.append(row)
    true = [truth(records, name, args)[1] for name in args.data]
    rows.append(["the model of the data", *(cell for score in true for cell in ("" if score is None else f"{score:.1f}", ""))])
    heads = [head for name in args.data for head in (f"{DATA[name]}, test", "above full, per 1,000 points")]
    table = markdown_table(["model", *heads], rows)
    (args.out / "table.md").write_text(table)
    figure(records, epochs, args).savefig(args.out / "figure.png", dpi=150)
    print(table, f"Written to {args.out}: table.md, figure.png, records.jsonl.", sep="\n")


if __name__ == "__main__":
    main()
