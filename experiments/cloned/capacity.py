"""Figures 3c and 3d: training bits per symbol against the number of states, and how many transitions can be left out without harm.

``python -m experiments.cloned.capacity --path <folder>`` (with gutenberg/; $LIGHTNING_HMM_DATA if not given)

Clones of letters, 30 iterations of batch EM for every capacity. For Figure 3d the transitions of the model of `--pruned` states below a threshold are set to
zero, each row's largest apart, and the rest sums to one again; test bits are with back-off, whose counts are those of the pruned model.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

from experiments.cloned.texts import START, TEXTS, Clones, Parts, bits, final_parts
from experiments.records import Records, markdown_table
from lightning_hmm.plots import COLOURS

CAPACITIES = (250, 500, 1000, 2000, 4000)
THRESHOLDS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ITERATIONS = 30


def training_bits(clones: Clones) -> float:
    """Of the clones themselves, without back-off."""
    return bits(clones.model, clones.encoded)


@torch.no_grad()
def pruned(clones: Clones, threshold: float) -> tuple[Clones, float]:
    """Without the transitions below the threshold; and the share of all pairs of states that has none then."""
    other = copy.copy(clones)
    other.model = copy.deepcopy(clones.model)
    keep = other.model.above(threshold) if threshold else other.model.transition.probs[0] > 0
    counts = torch.where(keep, other.model.transition.probs, 0.0)
    other.model.transition.maximize([counts])
    return other, 1 - int(keep.sum()) / other.model.num_states**2


def figure(records: Records) -> Figure:
    plot = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = plot.subplots(1, 2)
    capacities = sorted(records.where(figure="capacity"), key=lambda record: record["num_states"])
    left.plot([record["num_states"] for record in capacities], [record["train"] for record in capacities], "o-", color=COLOURS[0])
    left.set(xscale="log", xlabel="states", ylabel="bits per symbol, training part")
    left.set_xticks([record["num_states"] for record in capacities], [f"{record['num_states']:,}" for record in capacities])
    left.minorticks_off()
    thresholds = sorted(records.where(figure="pruning"), key=lambda record: record["threshold"])
    finite = [record for record in thresholds if math.isfinite(record["test"])]
    right.plot([100 * record["zeros"] for record in finite], [record["test"] for record in finite], "o-", color=COLOURS[0])
    right.set(xlabel="transitions that are zero, %", ylabel="bits per symbol, test part")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E5E5E5", linewidth=0.6)
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path(os.environ.get("LIGHTNING_HMM_DATA", "data")), help="folder of the texts")
    parser.add_argument("--text", default="blake-poems", choices=[text.name for text in TEXTS])
    parser.add_argument("--pruned", type=int, default=2000, help="states of the model of Figure 3d, one of the capacities")
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/cloned/capacity"))
    parser.add_argument("--quick", action="store_true", help="a stretch of Python's help texts, two capacities, two thresholds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    capacities, thresholds, iterations = CAPACITIES, THRESHOLDS, ITERATIONS
    parts = final_parts(None if args.quick else args.path / next(text.path for text in TEXTS if text.name == args.text))
    if args.quick:
        capacities, thresholds, iterations, args.pruned = (60, 120), (0.0, 1e-4), 3, 120
        parts = Parts(parts.train[:6], parts.scored, parts.data)
    records = Records(args.out / "records.jsonl")
    missing = [threshold for threshold in thresholds if not records.has(figure="pruning", threshold=threshold)]
    for num_states in capacities:
        wanted = missing if num_states == args.pruned else []
        if not wanted and records.has(figure="capacity", num_states=num_states):
            continue
        begin = time.process_time()
        clones = Clones(parts, 1, num_states)
        clones.train(iterations)
        if not records.has(figure="capacity", num_states=num_states):
            seconds = round(time.process_time() - begin, 1)
            records.add(figure="capacity", num_states=num_states, train=training_bits(clones), seconds=seconds)
            print(records.where(figure="capacity", num_states=num_states), flush=True)
        for threshold in wanted:
            smaller, zeros = pruned(clones, threshold)
            possible = math.isfinite(training_bits(smaller))  # else there is no path through the training data to count contexts along
            test = bits(smaller.smoothed(smaller.back_off(), **START), parts.scored) if possible else math.inf
            records.add(figure="pruning", threshold=threshold, zeros=zeros, test=test)
            print(records.where(figure="pruning", threshold=threshold), flush=True)
    rows = [[f"{record['num_states']:,}", f"{record['train']:.3f}", f"{record['seconds']:.1f}"] for record in records.where(figure="capacity")]
    made = markdown_table(["states", "training bits per symbol", "s"], rows) + "\n"
    rows = [[f"{record['threshold']:g}", f"{100 * record['zeros']:.2f}", f"{record['test']:.3f}"] for record in records.where(figure="pruning")]
    made += markdown_table(["threshold", "zeros, %", "test bits per symbol"], rows)
    (args.out / "table.md").write_text(made)
    print(made)
    figure(records).savefig(args.out / "figure.png", dpi=150)
    print(f"Written to {args.out}: table.md, figure.png, records.jsonl.")


if __name__ == "__main__":
    main()
