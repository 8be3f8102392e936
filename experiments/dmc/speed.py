"""Figure 1: processor time of Viterbi, forward pass and Baum-Welch against the number of states, and of lazy choosing against its parameter R.

``python -m experiments.dmc.speed`` (``--parts inference`` for Figure 1A alone, ``baum_welch`` for 1B, ``bounds`` for 1C)

One sequence of two-dimensional Gaussian observations, drawn from the model: 2,000 steps in parts A and B, 10,000 in C. One thread, float64, the only
arithmetic that our dense Viterbi has. Nothing but the times depends on how busy the machine is; let it be idle. benchmarks/dmc.py
has float32, more states and rivals.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.records import Records, markdown_table
from lightning_hmm import DMCHMM, Sequences, StandardHMM, fit, inference
from lightning_hmm.inference.cpu import estep
from lightning_hmm.inference.cpu.viterbi import viterbi
from lightning_hmm.plots import COLOURS

PARTS = ("inference", "baum_welch", "bounds")
KEPT = (20, 50, 100)
SIZES = (200, 400, 700, 1000, 1500, 2000)
STEPS, BOUND_STEPS = 2000, 10_000
BOUND_STATES, BOUND_KEPT = 100, 10
BOUND_TERMS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
KEPT_MASS = 0.8
ROUNDS = 3


def random_model(num_states: int, num_kept: int, **options: Any) -> DMCHMM:
    """Random kept columns with 0.8 of each row's probability."""
    draw = torch.Generator().manual_seed(0)
    indices = torch.rand(num_states, num_states, generator=draw).topk(num_kept, dim=1).indices
    weights = torch.rand(num_states, num_kept, dtype=torch.float64, generator=draw) + 0.5
    means = 3 * torch.randn(num_states, 2, dtype=torch.float64, generator=draw)
    variances = 0.1 + 0.4 * torch.rand(num_states, 2, dtype=torch.float64, generator=draw)
    model = DMCHMM(num_states, num_kept, emission="gaussian", num_features=2, **options)
    return model.set_parameters(indices=indices, values=KEPT_MASS * weights / weights.sum(1, keepdim=True), emission={"mean": means, "variance": variances})


def seconds_of(call: Callable[[], object]) -> float:
    """Of processor time, in the best of some rounds, after one that does not count."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times[1:])


class IterationTimes(Callback):
    """Processor time of each EM iteration, and how many exact sums a row it took to choose."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.seconds: list[float] = []
        self.exact: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.process_time() - self.begin)
        if isinstance(pl_module, DMCHMM) and pl_module.choices:
            self.exact.append(float(pl_module.choices[0].dot_products.double().mean()))


def iterate(model: StandardHMM, sequences: Sequences, iterations: int) -> IterationTimes:
    times = IterationTimes()
    fit(model, sequences, max_epochs=iterations, tolerance=0, callbacks=[times])
    return times


def time_inference(num_states: int, num_kept: int | None, steps: int) -> dict[str, float]:
    """Viterbi and forward pass; `num_kept` of ``None`` is the regular HMM, whose times do not depend on what the matrix holds."""
    model = random_model(num_states, num_kept or KEPT[0])
    sequences = model.sample(1, steps)
    with torch.no_grad():
        if num_kept is None:
            problem = model.to_standard().problem(sequences)
            return {"viterbi": seconds_of(lambda: inference.viterbi(*problem)), "forward": seconds_of(lambda: inference.log_likelihood(*problem))}
        # The kernels along the kept entries even where `inference` would use the full matrix.
        problem, weights = model.problem(sequences), torch.ones(1, dtype=torch.float64)
        return {
            "viterbi": seconds_of(lambda: viterbi(*problem)),
            "forward": seconds_of(lambda: estep.e_step(*problem, weights, smooth=False)),
        }


WAYS: dict[str, dict[str, Any]] = {  # of choosing what to keep
    "choosing each time": {},
    "choosing lazily": {"criterion": "largest", "selection": "lazy"},
    "fixed set": {"reselect_every": 1_000_000},
}


def time_baum_welch(num_states: int, num_kept: int | None, way: str | None, steps: int) -> dict[str, float]:
    """The best of some iterations after the first, which with a fixed set chooses all the same."""
    model = random_model(num_states, num_kept or KEPT[0], **WAYS.get(way or "", {}))
    sequences = model.sample(1, steps)
    times = iterate(model.to_standard() if num_kept is None else model, sequences, ROUNDS + 1)
    return {"seconds": min(times.seconds[1:])}


def time_bounds(terms: int | None, num_states: int, num_kept: int, steps: int, iterations: int) -> dict[str, float]:
    """Means over EM from a random start; without `terms` all pairs are multiplied out."""
    sequences = random_model(num_states, num_kept).sample(1, steps)
    how: dict[str, Any] = {"selection": "gemm"} if terms is None else {"selection": "lazy", "bound_terms": terms}
    model = DMCHMM(num_states, num_kept, emission="gaussian", num_features=2, criterion="largest", **how)
    times = iterate(model, sequences, iterations + 1)
    return {"seconds": sum(times.seconds[1:]) / iterations, "exact": sum(times.exact[1:]) / iterations}


def settings_for(args: argparse.Namespace) -> list[tuple[str, dict[str, Any], Callable[..., dict[str, float]]]]:
    """Part, settings and what times them, for all points of the figures."""
    every: list[tuple[str, dict[str, Any], Callable[..., dict[str, float]]]] = []
    for num_states in args.sizes:
        for num_kept in (None, *args.kept):
            common = {"num_states": num_states, "num_kept": num_kept, "steps": args.steps}
            every.append(("inference", common, time_inference))
            every += [("baum_welch", {**common, "way": way}, time_baum_welch) for way in ([None] if num_kept is None else WAYS)]
    for terms in (None, *args.terms):
        sizes = {"num_states": args.bound_states, "num_kept": BOUND_KEPT, "steps": args.bound_steps, "iterations": args.iterations}
        every.append(("bounds", {"terms": terms, **sizes}, time_bounds))
    return [entry for entry in every if entry[0] in args.parts]


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.6)


def against_states(records: Records, part: str, titles: dict[str, str], args: argparse.Namespace) -> tuple[Figure, str]:
    """Figure 1A or 1B and its table: seconds against N, for the regular HMM and for each K."""
    ways: list[str | None] = [None] if part == "inference" else list(WAYS)
    lines: dict[str, tuple[int | None, str | None]] = {"regular": (None, None)}
    for way in ways:
        lines |= {f"K = {kept}" + (f", {way}" if way else ""): (kept, way) for kept in args.kept}

    def found(measure: str, num_states: int, kept: int | None, way: str | None) -> float:
        extra = {} if part == "inference" else {"way": way}
        return float(records.where(part=part, num_states=num_states, num_kept=kept, steps=args.steps, **extra)[-1][measure])

    panels = len(titles) if part == "inference" else len(ways)
    plot = Figure(figsize=(5 * panels, 4.2), layout="constrained")
    for number, axes in enumerate(plot.subplots(1, panels, squeeze=False, sharey=part == "baum_welch")[0]):
        measure, title = list(titles.items())[number] if part == "inference" else ("seconds", f"{next(iter(titles.values()))}, {ways[number]}")
        shown = [(None, None), *((kept, None if part == "inference" else ways[number]) for kept in args.kept)]
        for (kept, way), colour in zip(shown, (COLOURS[6], *COLOURS), strict=False):
            values = [found(measure, num_states, kept, way) for num_states in args.sizes]
            axes.plot(args.sizes, values, marker="o", markersize=4, color=colour, label="regular" if kept is None else f"K = {kept}")
        axes.set(title=title, xlabel="states N", ylabel="seconds of processor time" if number == 0 else "", xscale="log", yscale="log")
        axes.set_xticks(args.sizes, [f"{size:,}" for size in args.sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        plain(axes)
        axes.legend(frameon=False, fontsize="small")
    tables = []
    for measure, title in titles.items():
        rows = []
        for label, (kept, way) in lines.items():
            times = [found(measure, num_states, kept, way) for num_states in args.sizes]
            gains = ["" if kept is None else f" ({found(measure, size, None, None) / time:.1f}x)" for size, time in zip(args.sizes, times, strict=True)]
            rows.append([label, *(f"{time:.3g}{gain}" for time, gain in zip(times, gains, strict=True))])
        tables.append(f"{title}, seconds\n\n" + markdown_table(["", *(f"N = {size:,}" for size in args.sizes)], rows))
    return plot, "\n".join(tables)


def against_terms(records: Records, args: argparse.Namespace) -> tuple[Figure, str]:
    """Figure 1C and its table: seconds of an iteration, and exact sums a row, against R."""
    common = {"part": "bounds", "num_states": args.bound_states, "steps": args.bound_steps, "iterations": args.iterations}
    seconds, exact = ([records.where(terms=terms, **common)[-1][name] for terms in args.terms] for name in ("seconds", "exact"))
    gemm = records.where(terms=None, **common)[-1]["seconds"]
    optimum = args.terms[seconds.index(min(seconds))]
    plot = Figure(figsize=(6.4, 5.6), layout="constrained")
    upper, lower = plot.subplots(2, 1, sharex=True)
    upper.plot(args.terms, seconds, marker="o", markersize=4, color=COLOURS[0], label="lazily, by bounds")
    upper.axhline(gemm, color=COLOURS[6], linestyle="--", label="all pairs, by matrix products")
    upper.set(ylabel="seconds an iteration", ylim=(0, 1.15 * max(seconds)), title=f"N = {args.bound_states}, K = {BOUND_KEPT}, T = {args.bound_steps:,}")
    upper.legend(frameon=False, fontsize="small")
    lower.plot(args.terms, exact, marker="o", markersize=4, color=COLOURS[0])
    lower.axhline(BOUND_KEPT, color="#8C8C8C", linewidth=0.8, linestyle="--")
    lower.annotate("K", (args.terms[0], BOUND_KEPT), textcoords="offset points", xytext=(0, -12), color="#8C8C8C")
    lower.set(ylabel="exact sums a row", xlabel="R, terms in a bound", xscale="log", ylim=(0, 1.15 * max(exact)))
    lower.set_xticks(args.terms, [f"{terms:,}" for terms in args.terms])
    lower.xaxis.set_minor_locator(NullLocator())
    for axes in (upper, lower):
        axes.axvline(optimum, color=COLOURS[1], linewidth=0.9, linestyle=":")
        plain(axes)
    rows = [["seconds an iteration", f"{gemm:.3g}", *(f"{value:.3g}" for value in seconds)]]
    rows.append(["exact sums a row", f"{args.bound_states}", *(f"{value:.1f}" for value in exact)])
    return plot, markdown_table(["", "all pairs", *(f"R = {terms:,}" for terms in args.terms)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/dmc/speed"))
    parser.add_argument("--quick", action="store_true", help="few states, steps and points")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.sizes, args.kept, args.steps = SIZES, KEPT, STEPS
    args.terms, args.bound_states, args.bound_steps, args.iterations = BOUND_TERMS, BOUND_STATES, BOUND_STEPS, 10
    if args.quick:
        args.sizes, args.kept, args.steps = (24, 30), (4,), 60
        args.terms, args.bound_states, args.bound_steps, args.iterations = (5, 20), 12, 100, 2
    records, warm = Records(args.out / "records.jsonl"), set()
    for part, settings, measure in settings_for(args):
        if records.has(part=part, **settings):
            continue
        if (part, settings.get("way")) not in warm:  # kernels are compiled at their first use
            measure(**settings)
            warm.add((part, settings.get("way")))
        found = measure(**settings)
        records.add(part=part, **settings, **found)
        words = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
        print(f"{part}, {words}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    made = {
        "inference": lambda: against_states(records, "inference", {"viterbi": "Viterbi", "forward": "Forward pass"}, args),
        "baum_welch": lambda: against_states(records, "baum_welch", {"seconds": "An iteration of Baum-Welch"}, args),
        "bounds": lambda: against_terms(records, args),
    }
    for part in args.parts:
        plot, table = made[part]()
        plot.savefig(args.out / f"{part}.png", dpi=150)
        (args.out / f"{part}.md").write_text(table)
        print(table)
    print(f"Written to {args.out}: a table and a figure for each part, records.jsonl.")


if __name__ == "__main__":
    main()
