"""Appendix A: splitting one clone at a time fails on a language that Baum-Welch learns from random initializations.

``python -m experiments.cloned.appendix``

The language is "ab" and "(ab)" in random order. Two clones of a and two of b separate inside from outside, and leave
one bit for each of the two, a third of a bit per symbol. A second clone of a alone cannot help, because b follows
anyway; neither can a second clone of b alone, because nothing before it separates its clones. Greedy splitting starts
with one clone per symbol, tries to split each of them several times at random with Baum-Welch after each split, keeps
the best split if the likelihood improves, and repeats. It is compared with splitting two clones at once and with
Baum-Welch from random initializations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from experiments.measures import bits_per_symbol
from experiments.panels import GREY, panels
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Run, run
from lightning_hmm import ClonedHMM, Sequences, fit
from lightning_hmm.plotting import COLORS

NAMES = "ab()"
METHODS = {
    "greedy": "splitting one clone at a time",
    "pairs": "splitting two at a time",
    "em": "Baum-Welch, two clones of each symbol",
}
OPTIMUM = 1 / 3
MIN_GAIN = 1e-4  # bits per symbol that a split must gain to be kept
MAX_ROUNDS = 4


def language(blocks: int, seed: int) -> Sequences:
    """Draws `blocks` times "ab" or "(ab)". All begin with "(ab)", so the first symbol does not matter."""
    inside = np.append(1, np.random.default_rng(seed).integers(0, 2, blocks - 1))
    return Sequences.from_strings(["".join("(ab)" if one else "ab" for one in inside)], vocabulary=NAMES)


class Curve(Callback):
    """Records the bits per symbol of the training data before each iteration."""

    def __init__(self) -> None:
        self.bits: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metric: Any = pl_module.train_likelihood
        self.bits.append(-float(metric.compute()) / math.log(2))


def train(model: ClonedHMM, data: Sequences, epochs: int) -> list[float]:
    """Returns the bits per symbol of the training data before each iteration and at the end."""
    curve = Curve()
    fit(model, data, epochs, 1e-9, callbacks=[curve])
    return [*curve.bits, bits_per_symbol(model, data)]


def cloned(clones: list[int], seed: int = 0) -> ClonedHMM:
    return ClonedHMM(clones=clones, num_symbols=len(NAMES), pairs="all", frozen=(), seed=seed)


def split(model: ClonedHMM, state: int, random: np.random.Generator) -> ClonedHMM:
    """Replaces one clone by two that share its incoming transitions at random and perturb its outgoing ones."""
    matrix, clones = model.transition_probs.numpy(), model.layout.clones.tolist()
    clones[int(model.layout.symbols[state])] += 1
    order = np.insert(np.arange(len(matrix)), state, state)
    wider = matrix[np.ix_(order, order)] * np.exp(0.5 * random.standard_normal((len(order), len(order))))
    share = random.uniform(size=len(order))
    wider[:, state] *= share
    wider[:, state + 1] *= 1 - share
    return cloned(clones).set_parameters(transition=wider / wider.sum(1, keepdims=True))


def split_each(model: ClonedHMM, states: Iterable[int], random: np.random.Generator) -> ClonedHMM:
    for state in sorted(states, reverse=True):  # Splitting from the end keeps the numbers of the others.
        model = split(model, state, random)
    return model


def greedy(data: Sequences, at_once: int, tries: int, epochs: int, seed: int) -> tuple[ClonedHMM, list[list[float]]]:
    """Splits the best `at_once` clones while that gains. Also returns the curves of the last such round."""
    random = np.random.default_rng(seed)
    model = cloned([1] * len(NAMES))
    bits = train(model, data, epochs)[-1]
    shown: list[list[float]] = []
    for _ in range(MAX_ROUNDS):
        tried = []
        for states in combinations_with_replacement(range(model.num_states), at_once):
            for _ in range(tries):
                larger = split_each(model, states, random)
                tried.append((train(larger, data, epochs), larger))
        curve, best = min(tried, key=lambda one: one[0][-1])
        if not shown or curve[-1] < bits - MIN_GAIN:
            shown = [curve for curve, _ in tried]
        if curve[-1] >= bits - MIN_GAIN:
            break
        model, bits = best, curve[-1]
    return model, shown


def cases(run: Run) -> Iterator[Case]:
    for method, seeds in run.seeds.items():
        for seed in range(seeds):
            yield {"method": method, "seed": seed, **run.sizes}


def compute(run: Run, case: Case) -> dict[str, Any]:
    method, seed, blocks, epochs = (case[name] for name in ("method", "seed", "blocks", "epochs"))
    data, test = language(blocks, 2 * seed), language(blocks, 2 * seed + 1)
    if method == "em":
        model = cloned([2] * len(NAMES), seed)
        curves = [train(model, data, epochs)]
    else:
        model, curves = greedy(data, 1 if method == "greedy" else 2, case["tries"], epochs, seed)
    found = {"train": bits_per_symbol(model, data), "test": bits_per_symbol(model, test), "states": model.num_states}
    return {**found, "curves": [[round(bits, 5) for bits in curve] for curve in curves]}


def table(run: Run) -> str:
    rows = []
    for method, name in METHODS.items():
        bits = np.array(run.records.values("test", method=method, **run.sizes))
        states = np.mean(run.records.values("states", method=method, **run.sizes))
        reached = f"{int((bits < OPTIMUM + 0.01).sum())} of {len(bits)}"
        rows.append([name, f"{states:.1f}", f"{bits.mean():.4f}", f"{bits.min():.4f}", reached])
    return markdown_table(["", "clones", "bits per symbol, mean", "best", f"within 0.01 of {OPTIMUM:.4f}"], rows)


def figure(run: Run) -> Figure:
    """All curves of Baum-Welch, and those of the first seed of each greedy method."""
    plot, all_axes = panels(4 * len(METHODS), 3.6, 1, len(METHODS), grid="both", sharex=True, sharey=True)
    for number, (axes, (method, name)) in enumerate(zip(all_axes[0], METHODS.items(), strict=True)):
        for curves in run.records.values("curves", method=method, **run.sizes)[: None if method == "em" else 1]:
            for curve in curves:
                axes.plot(range(len(curve)), curve, color=COLORS[number], linewidth=0.9, alpha=0.7)
        axes.axhline(OPTIMUM, color=GREY, linewidth=1, linestyle="--")
        axes.set(
            title=name, xlabel="EM iterations" if method == "em" else "EM iterations after a split", ylim=(0.28, 0.9)
        )
    all_axes[0, 0].set_ylabel("bits per symbol")
    return plot


EXPERIMENT = Experiment(
    folder="cloned/appendix",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    settings={
        "seeds": {"greedy": 5, "pairs": 3, "em": 10},
        "sizes": {"blocks": 1000, "tries": 3, "epochs": 200},
    },
    quick={"seeds": dict.fromkeys(METHODS, 1), "sizes": {"blocks": 100, "tries": 1, "epochs": 5}},
    quick_help="one seed, short data, few epochs",
)

if __name__ == "__main__":
    run(EXPERIMENT)
