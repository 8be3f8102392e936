"""Figure 1: processor time of Viterbi, forward pass and Baum-Welch, and of lazy selection by its parameter R.

``python -m experiments.dmc.speed`` (``--parts inference`` for Figure 1A alone, ``baum_welch`` for 1B, ``bounds`` for
1C)

One sequence of two-dimensional Gaussian observations is drawn from the model: 2,000 steps in parts A and B, 10,000 in
C. One thread and float64, the only precision of our dense Viterbi. Run this on an idle machine. benchmarks/dmc.py has
float32, more states and other libraries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from experiments.dmc.lazy import LazyDMCHMM
from experiments.measures import best_seconds
from experiments.panels import GREY, legend, log_ticks, panels
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm import DMCHMM, Sequences, StandardHMM, fit, inference
from lightning_hmm.inference.cpu import estep
from lightning_hmm.inference.cpu.viterbi import viterbi
from lightning_hmm.plotting import COLORS

PARTS = ("inference", "baum_welch", "bounds")
BOUND_KEPT = 10
ANY_KEPT = 20  # of the model that the regular HMM is made from
KEPT_MASS = 0.8
ROUNDS = 3
WAYS: dict[str, dict[str, Any]] = {  # of selecting the entries to keep
    "choosing each time": {},
    "choosing lazily": {"family": LazyDMCHMM, "criterion": "largest"},
    "fixed set": {"reselect_every": 1_000_000},
}
MEASURES = {
    "inference": {"viterbi": "Viterbi", "forward": "Forward pass"},
    "baum_welch": {"seconds": "An iteration of Baum-Welch"},
}
COMPILED: set[tuple[str, str | None]] = set()  # parts and ways whose kernels have been compiled


def random_model(num_states: int, num_kept: int, family: type[DMCHMM] = DMCHMM, **options: Any) -> DMCHMM:
    """Returns a model with random kept columns that have 0.8 of the probability of each row."""
    draw = torch.Generator().manual_seed(0)
    indices = torch.rand(num_states, num_states, generator=draw).topk(num_kept, dim=1).indices
    weights = torch.rand(num_states, num_kept, dtype=torch.float64, generator=draw) + 0.5
    means = 3 * torch.randn(num_states, 2, dtype=torch.float64, generator=draw)
    variances = 0.1 + 0.4 * torch.rand(num_states, 2, dtype=torch.float64, generator=draw)
    model = family(num_states, num_kept, emission="gaussian", num_features=2, **options)
    values = KEPT_MASS * weights / weights.sum(1, keepdim=True)
    return model.set_parameters(indices=indices, values=values, emission={"mean": means, "variance": variances})


class IterationTimes(Callback):
    """Records the processor time of each EM iteration and the number of exact sums per row for the selection."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.seconds: list[float] = []
        self.exact: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.process_time() - self.begin)
        if isinstance(pl_module, DMCHMM) and pl_module.choices:
            lazy = isinstance(pl_module, LazyDMCHMM)
            self.exact.append(float(pl_module.dot_products[0].double().mean()) if lazy else pl_module.num_states)


def iterate(model: StandardHMM | DMCHMM, sequences: Sequences, iterations: int) -> IterationTimes:
    times = IterationTimes()
    fit(model, sequences, max_epochs=iterations, tolerance=0, callbacks=[times])
    return times


def time_inference(num_states: int, num_kept: int | None, steps: int) -> dict[str, float]:
    """Times Viterbi and forward pass, those of the regular HMM if `num_kept` is ``None``."""
    model = random_model(num_states, num_kept or ANY_KEPT)
    sequences = model.sample(1, steps)
    with torch.no_grad():
        if num_kept is None:
            problem = model.to_standard().problem(sequences)
            calls = {
                "viterbi": lambda: inference.viterbi(*problem),
                "forward": lambda: inference.log_likelihood(*problem),
            }
        else:  # The kernels along the kept entries, even where `inference` would use the full matrix.
            problem, weights = model.problem(sequences), torch.ones(1, dtype=torch.float64)
            calls = {
                "viterbi": lambda: viterbi(*problem),
                "forward": lambda: estep.e_step(*problem, weights, smooth=False),
            }
        return {name: best_seconds(call, ROUNDS) for name, call in calls.items()}


def time_baum_welch(num_states: int, num_kept: int | None, way: str | None, steps: int) -> dict[str, float]:
    """Returns the time of the fastest iteration after the first, which selects entries even with a fixed set."""
    model = random_model(num_states, num_kept or ANY_KEPT, **WAYS.get(way or "", {}))
    sequences = model.sample(1, steps)
    times = iterate(model.to_standard() if num_kept is None else model, sequences, ROUNDS + 1)
    return {"seconds": min(times.seconds[1:])}


def time_bounds(terms: int | None, num_states: int, num_kept: int, steps: int, iterations: int) -> dict[str, float]:
    """Returns means over the iterations of EM from a random start; without `terms`, all pairs are multiplied."""
    sequences = random_model(num_states, num_kept).sample(1, steps)
    family = DMCHMM if terms is None else LazyDMCHMM
    model = family(num_states, num_kept, emission="gaussian", num_features=2, criterion="largest")
    if isinstance(model, LazyDMCHMM):
        model.bound_terms = terms
    times = iterate(model, sequences, iterations + 1)
    return {"seconds": sum(times.seconds[1:]) / iterations, "exact": sum(times.exact[1:]) / iterations}


def bound_settings(run: Run, terms: int | None) -> dict[str, Any]:
    sizes = {"num_states": run.bound_states, "num_kept": BOUND_KEPT, "steps": run.bound_steps}
    return {"part": "bounds", "terms": terms, **sizes, "iterations": run.iterations}


def cases(run: Run) -> Iterator[Case]:
    for num_states in run.sizes:
        for num_kept in (None, *run.kept):
            common = {"num_states": num_states, "num_kept": num_kept, "steps": run.steps}
            if "inference" in run.parts:
                yield {"part": "inference", **common}
            if "baum_welch" in run.parts:
                ways = [None] if num_kept is None else WAYS
                yield from ({"part": "baum_welch", **common, "way": way} for way in ways)
    if "bounds" in run.parts:
        yield from (bound_settings(run, terms) for terms in (None, *run.terms))


def compute(run: Run, case: Case) -> dict[str, float]:
    settings = dict(case)
    measures: dict[str, Callable[..., dict[str, float]]] = {
        "inference": time_inference,
        "baum_welch": time_baum_welch,
        "bounds": time_bounds,
    }
    measure = measures[settings.pop("part")]
    kernels = case["part"], case.get("way")
    if kernels not in COMPILED:  # Kernels are compiled at their first use.
        measure(**settings)
        COMPILED.add(kernels)
    return measure(**settings)


def times(run: Run, part: str, measure: str, kept: int | None, way: str | None) -> list[float]:
    """Returns the seconds for each number of states."""
    settings = {"part": part, "num_kept": kept, "steps": run.steps, "way": way}
    return [float(run.records.where(num_states=size, **settings)[-1][measure]) for size in run.sizes]


def states_table(run: Run, part: str) -> str:
    """Figures 1A and 1B as tables: seconds by N, for the regular HMM and for each K."""
    lines: dict[str, tuple[int | None, str | None]] = {"regular": (None, None)}
    for way in [None] if part == "inference" else WAYS:
        lines |= {f"K = {kept}" + (f", {way}" if way else ""): (kept, way) for kept in run.kept}
    tables = []
    for measure, title in MEASURES[part].items():
        regular, rows = times(run, part, measure, None, None), []
        for label, (kept, way) in lines.items():
            found = times(run, part, measure, kept, way)
            gains = ["" if kept is None else f" ({full / own:.1f}x)" for full, own in zip(regular, found, strict=True)]
            rows.append([label, *(f"{own:.3g}{gain}" for own, gain in zip(found, gains, strict=True))])
        tables.append(f"{title}, seconds\n\n" + markdown_table(["", *(f"N = {size:,}" for size in run.sizes)], rows))
    return "\n".join(tables)


def states_figure(run: Run, part: str) -> Figure:
    """Figures 1A and 1B: a panel for each measure, or for each way of selection."""
    shown: list[tuple[str, str, str | None]] = [(title, measure, None) for measure, title in MEASURES[part].items()]
    if part == "baum_welch":
        shown = [(f"{title}, {way}", measure, way) for title, measure, _ in shown for way in WAYS]
    plot, (all_axes,) = panels(5 * len(shown), 4.2, 1, len(shown), grid="both", sharey=part == "baum_welch")
    for axes, (title, measure, way) in zip(all_axes, shown, strict=True):
        for kept, color in zip((None, *run.kept), (COLORS[6], *COLORS), strict=False):
            found = times(run, part, measure, kept, None if kept is None else way)
            label = "regular" if kept is None else f"K = {kept}"
            axes.plot(run.sizes, found, marker="o", markersize=4, color=color, label=label)
        axes.set(title=title, xlabel="states N", yscale="log")
        log_ticks(axes, run.sizes)
        legend(axes)
    all_axes[0].set_ylabel("seconds of processor time")
    return plot


def bound_results(run: Run) -> tuple[float, list[float], list[float]]:
    """Returns the seconds of an iteration without bounds, and for each R the seconds and the exact sums per row."""
    found = [run.records.where(**bound_settings(run, terms))[-1] for terms in (None, *run.terms)]
    seconds, exact = ([record[name] for record in found[1:]] for name in ("seconds", "exact"))
    return found[0]["seconds"], seconds, exact


def bounds_table(run: Run) -> str:
    gemm, seconds, exact = bound_results(run)
    rows = [["seconds per iteration", f"{gemm:.3g}", *(f"{value:.3g}" for value in seconds)]]
    rows.append(["exact sums per row", f"{run.bound_states}", *(f"{value:.1f}" for value in exact)])
    return markdown_table(["", "all pairs", *(f"R = {terms:,}" for terms in run.terms)], rows)


def bounds_figure(run: Run) -> Figure:
    """Figure 1C: seconds of an iteration, and exact sums per row, by R."""
    gemm, seconds, exact = bound_results(run)
    plot, ((upper,), (lower,)) = panels(6.4, 5.6, 2, 1, grid="both", sharex=True)
    upper.plot(run.terms, seconds, marker="o", markersize=4, color=COLORS[0], label="lazily, by bounds")
    upper.axhline(gemm, color=COLORS[6], linestyle="--", label="all pairs, by matrix products")
    title = f"N = {run.bound_states}, K = {BOUND_KEPT}, T = {run.bound_steps:,}"
    upper.set(title=title, ylabel="seconds per iteration", ylim=(0, 1.15 * max(seconds)))
    legend(upper)
    lower.plot(run.terms, exact, marker="o", markersize=4, color=COLORS[0])
    lower.axhline(BOUND_KEPT, color=GREY, linewidth=0.8, linestyle="--")
    lower.annotate("K", (run.terms[0], BOUND_KEPT), textcoords="offset points", xytext=(0, -12), color=GREY)
    lower.set(ylabel="exact sums per row", xlabel="R, terms in a bound", ylim=(0, 1.15 * max(exact)))
    log_ticks(lower, run.terms)
    for axes in (upper, lower):
        axes.axvline(run.terms[seconds.index(min(seconds))], color=COLORS[1], linewidth=0.9, linestyle=":")
    return plot


def table(run: Run) -> dict[str, str]:
    return {part: bounds_table(run) if part == "bounds" else states_table(run, part) for part in run.parts}


def figure(run: Run) -> dict[str, Figure]:
    return {part: bounds_figure(run) if part == "bounds" else states_figure(run, part) for part in run.parts}


EXPERIMENT = Experiment(
    folder="dmc/speed",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[Option("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts of the figure (all if not given)")],
    settings={
        "sizes": (200, 400, 700, 1000, 1500, 2000),
        "kept": (20, 50, 100),
        "steps": 2000,
        "terms": (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
        "bound_states": 100,
        "bound_steps": 10_000,
        "iterations": 10,
    },
    quick={
        "sizes": (24, 30),
        "kept": (4,),
        "steps": 60,
        "terms": (5, 20),
        "bound_states": 12,
        "bound_steps": 100,
        "iterations": 2,
    },
    quick_help="few states, steps and points",
)

if __name__ == "__main__":
    run(EXPERIMENT)
