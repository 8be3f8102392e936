"""Appendix A: splitting one clone at a time stays where it began, in a language that Baum-Welch learns from random starts.

``python -m experiments.cloned.appendix``

The language is "ab" and "(ab)" in random order. Two clones of a and two of b tell inside from outside, and leave a bit for each of the two, a third
of a bit a symbol. But a second clone of a alone cannot help, because b follows anyway; nor one of b alone, because nothing before it tells its
clones apart. Greedy splitting starts with a clone for each symbol and tries to split each of them, several times at random with Baum-Welch after
each; it keeps the best split if it gains anything, and goes on from there. Beside it: splitting two clones at once, and Baum-Welch from random starts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from experiments.records import Records, markdown_table
from lightning_hmm import ClonedHMM, Sequences, fit
from lightning_hmm.plots import COLOURS

NAMES = "ab()"
SEEDS = {"greedy": 5, "pairs": 3, "em": 10}
METHODS = {"greedy": "splitting one clone at a time", "pairs": "splitting two at a time", "em": "Baum-Welch, two clones of each symbol"}
OPTIMUM = 1 / 3
ENOUGH = 1e-4  # bits a symbol that a split must gain
MOST_ROUNDS = 4


def language(blocks: int, seed: int) -> Sequences:
    """So many times "ab" or "(ab)"; the latter first, so that the first symbol, which all models learn at once, has no say."""
    inside = np.append(1, np.random.default_rng(seed).integers(0, 2, blocks - 1))
    return Sequences.from_strings(["".join("(ab)" if one else "ab" for one in inside)], vocabulary=NAMES)


class Curve(Callback):
    """Bits per symbol of the training data before each iteration."""

    def __init__(self) -> None:
        self.bits: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metric: Any = pl_module.train_likelihood
        self.bits.append(-float(metric.compute()) / math.log(2))


def train(model: ClonedHMM, data: Sequences, epochs: int) -> list[float]:
    curve = Curve()
    fit(model, data, epochs, 1e-9, callbacks=[curve])
    return [*curve.bits, bits_per_symbol(model, data)]


def bits_per_symbol(model: ClonedHMM, data: Sequences) -> float:
    return -float(model.score(data).sum()) / data.num_steps / math.log(2)


def cloned(clones: list[int], seed: int = 0) -> ClonedHMM:
    return ClonedHMM(clones=clones, num_symbols=len(NAMES), pairs="all", frozen=(), seed=seed)


def split(model: ClonedHMM, state: int, random: np.random.Generator) -> ClonedHMM:
    """The model with two clones for one: they share at random what led to it, and go on almost as it did, each a little differently."""
    matrix, clones = model.transition_probs.numpy(), model.layout.clones.tolist()
    clones[int(model.layout.symbols[state])] += 1
    order = np.insert(np.arange(len(matrix)), state, state)
    wider = matrix[np.ix_(order, order)] * np.exp(0.5 * random.standard_normal((len(order), len(order))))
    share = random.uniform(size=len(order))
    wider[:, state] *= share
    wider[:, state + 1] *= 1 - share
    return cloned(clones).set_parameters(transition=wider / wider.sum(1, keepdims=True))


def split_each(model: ClonedHMM, states: Iterable[int], random: np.random.Generator) -> ClonedHMM:
    for state in sorted(states, reverse=True):  # the numbers of those before it stay
        model = split(model, state, random)
    return model


def greedy(data: Sequences, at_once: int, tries: int, epochs: int, seed: int) -> tuple[ClonedHMM, list[list[float]]]:
    """Splits `at_once` clones, whichever gain most, as long as any do; and the curves of all that was tried in the last round that gained, or the first."""
    random = np.random.default_rng(seed)
    model = cloned([1] * len(NAMES))
    bits = train(model, data, epochs)[-1]
    shown: list[list[float]] = []
    for _ in range(MOST_ROUNDS):
        tried = []
        for states in combinations_with_replacement(range(model.num_states), at_once):
            for _ in range(tries):
                larger = split_each(model, states, random)
                tried.append((train(larger, data, epochs), larger))
        curve, best = min(tried, key=lambda one: one[0][-1])
        if not shown or curve[-1] < bits - ENOUGH:
            shown = [curve for curve, _ in tried]
        if curve[-1] >= bits - ENOUGH:
            break
        model, bits = best, curve[-1]
    return model, shown


def measure(method: str, seed: int, blocks: int, tries: int, epochs: int) -> dict[str, Any]:
    data, test = language(blocks, 2 * seed), language(blocks, 2 * seed + 1)
    if method == "em":
        model = cloned([2] * len(NAMES), seed)
        curves = [train(model, data, epochs)]
    else:
        model, curves = greedy(data, 1 if method == "greedy" else 2, tries, epochs, seed)
    found = {"train": bits_per_symbol(model, data), "test": bits_per_symbol(model, test), "states": model.num_states}
    return {**found, "curves": [[round(bits, 5) for bits in curve] for curve in curves]}


def figure(records: Records, settings: dict[str, Any]) -> Figure:
    plot = Figure(figsize=(4 * len(METHODS), 3.6), layout="constrained")
    for number, (axes, (method, name)) in enumerate(zip(plot.subplots(1, len(METHODS), sharex=True, sharey=True), METHODS.items(), strict=True)):
        for record in records.where(method=method, **settings)[: None if method == "em" else 1]:
            for curve in record["curves"]:
                axes.plot(range(len(curve)), curve, color=COLOURS[number], linewidth=0.9, alpha=0.7)
        axes.axhline(OPTIMUM, color="#8C8C8C", linewidth=1, linestyle="--")
        axes.set(title=name, xlabel="EM iterations" if method == "em" else "EM iterations after a split", ylim=(0.28, 0.9))
        axes.set_ylabel("" if number else "bits per symbol")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E5E5E5", linewidth=0.6)
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/cloned/appendix"))
    parser.add_argument("--quick", action="store_true", help="one seed, short data, few epochs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, settings = SEEDS, {"blocks": 1000, "tries": 3, "epochs": 200}
    if args.quick:
        seeds, settings = dict.fromkeys(METHODS, 1), {"blocks": 100, "tries": 1, "epochs": 5}
    records = Records(args.out / "records.jsonl")
    for method, name in METHODS.items():
        for seed in range(seeds[method]):
            if not records.has(method=method, seed=seed, **settings):
                found = measure(method, seed, **settings)
                records.add(method=method, seed=seed, **settings, **found)
                print(f"{name}, seed {seed}: {found['test']:.4f} bits per symbol with {found['states']} clones", flush=True)
    rows = []
    for method, name in METHODS.items():
        made = records.where(method=method, **settings)
        bits, states = np.array([one["test"] for one in made]), np.mean([one["states"] for one in made])
        rows.append([name, f"{states:.1f}", f"{bits.mean():.4f}", f"{bits.min():.4f}", f"{int((bits < OPTIMUM + 0.01).sum())} of {len(made)}"])
    table = markdown_table(["", "clones", "bits per symbol, mean", "best", f"within 0.01 of {OPTIMUM:.4f}"], rows)
    (args.out / "table.md").write_text(table)
    figure(records, settings).savefig(args.out / "figure.png", dpi=150)
    print(table, f"Written to {args.out}: table.md, figure.png, records.jsonl.", sep="\n")


if __name__ == "__main__":
    main()
