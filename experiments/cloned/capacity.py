"""Figures 3c and 3d: training bits per symbol by the number of states, and the effect of pruning transitions.

``python -m experiments.cloned.capacity --path <folder>`` (with gutenberg/; $LIGHTNING_HMM_DATA if not given)

Clones of letters are trained with 30 iterations of batch EM for each number of states. For Figure 3d, the transitions
of the model with `--pruned` states that are below a threshold are set to zero, except for the largest of each row, and
the rows are normalized again. Test bits include back-off, whose counts are those of the pruned model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from matplotlib.figure import Figure

from experiments.cloned.texts import DATA_FOLDER, START, TEXTS, Clones, Parts, final_parts
from experiments.measures import bits_per_symbol
from experiments.panels import log_ticks, panels
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm.plotting import COLORS


@lru_cache(maxsize=1)
def text_parts(run: Run) -> Parts:
    if not run.quick:
        return final_parts(run.path / next(text.path for text in TEXTS if text.name == run.text))
    parts = final_parts(None)
    return Parts(parts.train[:6], parts.scored, parts.data)


@lru_cache(maxsize=1)
def trained(run: Run, num_states: int) -> tuple[Clones, float]:
    """Returns a trained model and the seconds of processor time."""
    clones = Clones(text_parts(run), 1, num_states)
    return clones, clones.train(run.iterations)


@torch.no_grad()
def pruned(clones: Clones, threshold: float) -> tuple[Clones, float]:
    """Returns the model without transitions below the threshold, and the fraction of transitions that are zero."""
    other = copy.copy(clones)
    other.model = copy.deepcopy(clones.model)
    keep = other.model.above(threshold) if threshold else other.model.transition.probs[0] > 0
    counts = torch.where(keep, other.model.transition.probs, 0.0)
    other.model.transition.maximize([counts])
    return other, 1 - int(keep.sum()) / other.model.num_states**2


def cases(run: Run) -> Iterator[Case]:
    for num_states in run.capacities:
        yield {"figure": "capacity", "num_states": num_states}
        if num_states == run.pruned:
            yield from ({"figure": "pruning", "threshold": threshold} for threshold in run.thresholds)


def compute(run: Run, case: Case) -> dict[str, Any]:
    if case["figure"] == "capacity":
        clones, seconds = trained(run, case["num_states"])
        return {"train": bits_per_symbol(clones.model, clones.encoded), "seconds": round(seconds, 1)}
    smaller, zeros = pruned(trained(run, run.pruned)[0], case["threshold"])
    if not math.isfinite(bits_per_symbol(smaller.model, smaller.encoded)):
        return {"zeros": zeros, "test": math.inf}  # No path through the training text is left to count contexts along.
    return {
        "zeros": zeros,
        "test": bits_per_symbol(smaller.smoothed(smaller.back_off(), **START), smaller.parts.scored),
    }


def table(run: Run) -> str:
    capacity, pruning = (run.records.where(figure=name) for name in ("capacity", "pruning"))
    rows = [[f"{found['num_states']:,}", f"{found['train']:.3f}", f"{found['seconds']:.1f}"] for found in capacity]
    made = markdown_table(["states", "training bits per symbol", "s"], rows)
    rows = []
    for found in pruning:
        test = f"{found['test']:.3f}" if math.isfinite(found["test"]) else "training text impossible"
        rows.append([f"{found['threshold']:g}", f"{100 * found['zeros']:.2f}", test])
    return f"{made}\n{markdown_table(['threshold', 'transitions that are zero, %', 'test bits per symbol'], rows)}"


def figure(run: Run) -> Figure:
    plot, ((left, right),) = panels(8, 3.4, 1, 2, grid="both")
    capacity = sorted(run.records.where(figure="capacity"), key=lambda record: record["num_states"])
    sizes = [record["num_states"] for record in capacity]
    left.plot(sizes, [record["train"] for record in capacity], "o-", color=COLORS[0])
    left.set(xlabel="states", ylabel="bits per symbol, training part")
    log_ticks(left, sizes)
    pruning = sorted(run.records.where(figure="pruning"), key=lambda record: record["threshold"])
    finite = [record for record in pruning if math.isfinite(record["test"])]
    zeros = [100 * record["zeros"] for record in finite]
    right.plot(zeros, [record["test"] for record in finite], "o-", color=COLORS[0])
    right.set(xlabel="transitions that are zero, %", ylabel="bits per symbol, test part")
    return plot


EXPERIMENT = Experiment(
    folder="cloned/capacity",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        DATA_FOLDER,
        Option("--text", default="blake-poems", choices=[text.name for text in TEXTS], help="text to train on"),
        Option(
            "--pruned", type=int, default=2000, help="states of the model that is pruned (%(default)s if not given)"
        ),
    ],
    settings={
        "capacities": (250, 500, 1000, 2000, 4000),
        "thresholds": (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
        "iterations": 30,
    },
    quick={"capacities": (60, 120), "thresholds": (0.0, 1e-4), "iterations": 3, "pruned": 120},
    quick_help="a part of Python's help texts, two models, two thresholds",
)

if __name__ == "__main__":
    run(EXPERIMENT)
