"""Speed of dense, mostly constant transitions, compared with our dense routines, torch's products and hmmlearn.

    python benchmarks/dmc.py table gaussian em large hmmlearn growth [--out docs/benchmarks]   # about 12 minutes
    python benchmarks/dmc.py report            # writes the page and the plot again
    python benchmarks/dmc.py costs             # the constants in `inference/cpu/routes.py`

Both sides use one thread. The kept columns are random and have 0.8 of each row's mass. Each side runs several rounds,
and the best counts. A dense pass over 2,000 steps of 5,000 states would take a minute per call, so dense routines are
timed on two shorter lengths, and the difference gives the time per step. That excludes their set-up, while our code is
timed on the full length with everything. In the rows of the forward pass, "dense" is the faster of our dense routine
and torch's bare product of the same size, without emissions or anything else. For Viterbi and EM it is our dense
routine. The page lists for every row what was called on both sides, its precision and its rounds (`HOW`).
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baum_welch import peak_bytes
from numba import njit
from torch import Tensor

from lightning_hmm import DMCHMM, Sequences
from lightning_hmm.inference import EStep, Quadratic, Table, selection
from lightning_hmm.inference.cpu import estep
from lightning_hmm.inference.cpu.viterbi import viterbi
from lightning_hmm.inference.evidence import Evidence
from lightning_hmm.inference.kernels.simd import make_product, padded_size
from lightning_hmm.inference.operators import Dense, MostlyConstant, Operator

KEPT = 20
SIZES = (1000, 2000, 5000)
STEPS, ROUNDS = 2000, 5
PARTS = ("table", "gaussian", "em", "large", "hmmlearn", "growth")
WANTED = {  # what each row is held against
    ("forward, one sequence", 1000): 5, ("forward, one sequence", 2000): 10, ("forward, one sequence", 5000): 25,
    ("forward, 32 sequences", 1000): 6, ("forward, 32 sequences", 2000): 12, ("forward, 32 sequences", 5000): 30,
    ("Viterbi, one sequence", 1000): 6, ("Viterbi, one sequence", 2000): 12, ("Viterbi, one sequence", 5000): 25,
    ("forward with Gaussians, one sequence", 1000): 4, ("forward with Gaussians, one sequence", 2000): 8,
    ("forward with Gaussians, one sequence", 5000): 25,
    ("EM iteration, choosing each time", 2000): 3, ("EM iteration, choosing every 5th", 2000): 6,
    ("EM iteration, fixed set", 10000): 10,
    ("score, hmmlearn log", 500): 50, ("Viterbi, hmmlearn log", 500): 50,
}  # fmt: skip
HOW = {  # by the beginning of a task: what was called, its precision and its rounds, ours and the other side's
    "forward": (
        "the E-step's kernel without its backward pass, float32, full length, best of 10",
        "dense routine: the same in the dense kernel, float32, time per step from two shorter lengths, best of 3 each; "
        "torch's product: float32, best of 5",
    ),
    "Viterbi, one sequence": (
        "the Viterbi kernel, float64, full length, best of 5",
        "our dense Viterbi without backtracking, float32, fewer steps, best of 5",
    ),
    "EM iteration": (
        "E-step and M-step of the transitions, float32, full length, best of 2",
        "our dense E-step alone, float32, time per step from two shorter lengths, best of 3 each",
    ),
    "score, hmmlearn": (
        "the E-step's kernel without its backward pass, called directly, float32, best of 5",
        "`GaussianHMM.score`, float64",
    ),
    "Viterbi, hmmlearn": ("the Viterbi kernel, called directly, float64, best of 5", "`GaussianHMM.decode`, float64"),
    "public score": ("`DMCHMM.score`, float64, best of 5", "`GaussianHMM.score`, float64"),
    "public decode": ("`DMCHMM.decode`, float64, best of 5", "`GaussianHMM.decode`, float64"),
}


class Problem:
    """A random mostly constant chain, emissions and data.

    `symbols`: a table of probabilities, so that only the recursion is timed.
    """

    def __init__(
        self, num_states: int, num_kept: int = KEPT, sequences: int = 1, steps: int = STEPS, gaussian: bool = False
    ) -> None:
        random = np.random.default_rng(0)
        self.num_states, self.sequences, self.steps = num_states, sequences, steps
        self.initial = torch.full((num_states,), -np.log(num_states), dtype=torch.float64)
        indices = np.sort(
            np.stack([random.choice(num_states, num_kept, replace=False) for _ in range(num_states)]), axis=1
        )
        values = random.random((num_states, num_kept)) + 0.5
        values = np.log(0.8 * values / values.sum(1, keepdims=True))
        constants = np.full(num_states, np.log(0.2 / (num_states - num_kept)))
        self.operator = MostlyConstant(*(torch.from_numpy(array) for array in (indices, values, constants)))
        self.gaussian = gaussian
        if gaussian:
            self.means, self.variances = random.normal(0, 3, (num_states, 2)), random.uniform(0.1, 0.5, (num_states, 2))
            self.data: np.ndarray = random.normal(0, 3, (sequences * steps, 2))
        else:
            self.log_probs = np.log(random.dirichlet(np.ones(30), num_states))
            self.data = random.integers(0, 30, sequences * steps)

    def part(self, steps: int) -> np.ndarray:
        """The first steps of each sequence."""
        rows = self.data.reshape(self.sequences, self.steps, -1)[:, :steps].reshape(self.sequences * steps, -1)
        return np.ascontiguousarray(rows if self.gaussian else rows[:, 0])

    def evidence(self, steps: int) -> Evidence:
        data = torch.from_numpy(self.part(steps))
        if not self.gaussian:
            return Table(torch.from_numpy(self.log_probs), data.to(torch.uint8))
        means, variances = self.means, self.variances
        norm = (means**2 / (2 * variances) + 0.5 * np.log(2 * np.pi * variances)).sum(1, keepdims=True)
        weights = torch.from_numpy(np.concatenate([means / variances, -0.5 / variances, -norm], 1))
        columns = torch.cat([data, torch.ones(len(data), 1, dtype=torch.float64)], 1)
        return Quadratic(columns, torch.tensor([[0, 2], [1, 2], [0, 0], [1, 1], [2, 2]]), weights)

    def e_step(
        self, operator: Operator, steps: int, smooth: bool, single: bool, per_step: bool = False
    ) -> Callable[[], EStep]:
        """The E-step by the kernels of the operator, whichever `inference` would choose.

        Without `smooth` it is the forward pass alone.
        """
        given = (
            self.initial,
            operator,
            self.evidence(steps),
            torch.arange(self.sequences + 1) * steps,
            torch.ones(self.sequences, dtype=torch.float64),
        )
        dtype = torch.float32 if single else torch.float64
        return lambda: estep.e_step(*given, dtype=dtype, smooth=smooth, per_step=per_step)

    def sparse(self, smooth: bool = False, single: bool = True) -> Callable[[], EStep]:
        return self.e_step(self.operator, self.steps, smooth, single)

    def viterbi(self) -> Callable[[], object]:
        given = self.initial, self.operator, self.evidence(self.steps), torch.arange(self.sequences + 1) * self.steps
        return lambda: viterbi(*given)

    def full(self) -> Tensor:
        return self.operator.log_rows(slice(None))


def best(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds per call in the best of several rounds, after a warm-up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def dense_step(problem: Problem, smooth: bool = False, single: bool = True) -> float:
    """Seconds of a step of our dense routine, from two lengths."""
    full = Dense(problem.full())
    work = problem.num_states**2 * problem.sequences
    short = max(8, min(problem.steps // 4, int(2e8 / work)))
    long = min(problem.steps, 5 * short)

    def run(steps: int) -> float:
        return best(problem.e_step(full, steps, smooth, single), 3)

    run(short)
    return (run(long) - run(short)) / (long - short)


def torch_step(problem: Problem) -> float:
    """Seconds of torch's product of the messages with a matrix of this size."""
    matrix, messages = (
        torch.rand(problem.num_states, problem.num_states),
        torch.rand(problem.sequences, problem.num_states),
    )
    repeats = max(3, int(1e9 / (problem.num_states**2 * problem.sequences)))
    if problem.sequences == 1:
        vector = messages[0]
        return best(lambda: [torch.mv(matrix, vector) for _ in range(repeats)]) / repeats
    return best(lambda: [messages @ matrix for _ in range(repeats)]) / repeats


_max_plus = make_product(max_plus=True, accumulate=False)


@njit(cache=True)
def _viterbi_steps(delta, transition, table, symbols, steps):
    padded = delta.shape[1]
    for t in range(1, steps):
        now = t % 2
        _max_plus(
            delta[0, 0],
            delta[now].ctypes.data,
            delta[1 - now].ctypes.data,
            padded,
            1,
            transition.ctypes.data,
            padded,
            1,
            padded,
            padded,
        )
        delta[now] += table[symbols[t]]


def dense_viterbi_step(problem: Problem) -> float:
    """Seconds of a step of our vectorized dense Viterbi in float32, without backtracking."""
    size = padded_size(problem.num_states, 4)
    transition = np.full((size, size), -np.inf, np.float32)
    transition[: problem.num_states, : problem.num_states] = problem.full().numpy()
    table = np.zeros((30, size), np.float32)
    table[:, : problem.num_states] = problem.log_probs.T
    delta, steps = np.zeros((2, size), np.float32), max(4, int(4e8 / size**2))
    return best(lambda: _viterbi_steps(delta, transition, table, problem.data, steps)) / (steps - 1)


Row = dict[str, Any]
FIELDS = ("task", "states", "kept", "ours", "other", "theirs", "times", "note", "machine", "load")


def row(task: str, num_states: int, ours: float, theirs: dict[str, float], note: str = "") -> Row:
    fastest = min(theirs, key=lambda name: theirs[name])
    result = {
        "task": task,
        "states": num_states,
        "kept": KEPT,
        "ours": ours,
        "other": fastest,
        "theirs": theirs[fastest],
        "times": theirs[fastest] / ours,
    }
    result["note"] = note or "; ".join(f"{name} {seconds:.4g} s" for name, seconds in theirs.items())
    print(
        f"{task}, N={num_states}: {ours:.4g} s against {theirs[fastest]:.4g} s ({fastest}): {result['times']:.1f}x",
        flush=True,
    )
    return result


def table(gaussian: bool = False) -> list[Row]:
    rows = []
    words = "forward with Gaussians" if gaussian else "forward"
    for size in SIZES:
        for sequences, steps in ((1, STEPS), (32, 500)):
            problem = Problem(size, KEPT, sequences, steps, gaussian)
            ours = min(best(problem.sparse()) for _ in range(2))
            theirs = {"our dense routine": dense_step(problem) * steps, "torch's product": torch_step(problem) * steps}
            rows.append(row(f"{words}, {'one sequence' if sequences == 1 else '32 sequences'}", size, ours, theirs))
            if sequences == 1 and not gaussian:
                rows.append(
                    row(
                        "Viterbi, one sequence",
                        size,
                        best(problem.viterbi()),
                        {"our dense routine": dense_viterbi_step(problem) * steps},
                    )
                )
    return rows


def em_iteration(problem: Problem, choose: bool) -> Callable[[], object]:
    """E-step with fixed or with chosen entries, and the M-step of the transitions."""
    run_e_step = problem.e_step(problem.operator, problem.steps, smooth=True, single=True, per_step=choose)
    offsets = torch.arange(problem.sequences + 1) * problem.steps

    @torch.no_grad()
    def run() -> object:
        found = run_e_step()
        kept, rest = found.counts
        if choose:
            sums = selection.PairSums(problem.operator)
            sums.add(selection.factored_pairs(problem.operator, found, offsets))
            choice = selection.choose(sums, "window")
            kept, rest = choice.kept, choice.rest
        total = kept.sum(1) + rest
        return (kept / total[:, None]).log(), (rest / total).log()

    return run


def em() -> list[Row]:
    problem = Problem(2000, KEPT, 1, 10_000, gaussian=True)
    fixed, chosen = best(em_iteration(problem, False), 2), best(em_iteration(problem, True), 2)
    theirs = {"our dense routine": dense_step(problem, smooth=True) * problem.steps}
    return [
        row("EM iteration, fixed set", 2000, fixed, theirs),
        row("EM iteration, choosing each time", 2000, chosen, theirs),
        row("EM iteration, choosing every 5th", 2000, (chosen + 4 * fixed) / 5, theirs),
    ]


def large() -> list[Row]:
    """10,000 states, in a separate process to measure its memory."""
    if "--child" not in sys.argv:
        done = subprocess.run(
            [sys.executable, __file__, "large", "--child"], capture_output=True, text=True, check=True
        )
        ours, gigabytes = map(float, done.stdout.split())
        problem = Problem(10_000, KEPT, 1, 200, gaussian=True)
        theirs = {"our dense routine": dense_step(problem, smooth=True) * 10_000}
        return [
            row("EM iteration, fixed set", 10_000, ours, theirs, f"peak memory of the process: {gigabytes:.2f} GiB")
        ]
    run = em_iteration(Problem(10_000, KEPT, 1, 10_000, gaussian=True), False)
    print(best(run, 2), peak_bytes() / 2**30)
    sys.exit()


def hmmlearn() -> list[Row]:
    from hmmlearn.hmm import GaussianHMM

    problem = Problem(500, KEPT, 1, STEPS, gaussian=True)
    data, lengths = problem.part(STEPS), [STEPS]
    model, sequences = public_model(problem), Sequences.from_lengths(torch.from_numpy(data), lengths)
    score, decode = best(problem.sparse()), best(problem.viterbi())
    public_score, public_decode = best(lambda: model.score(sequences)), best(lambda: model.decode(sequences))
    rows = []
    for implementation in ("log", "scaling"):
        peer = GaussianHMM(500, implementation=implementation)
        peer.startprob_, peer.transmat_ = problem.initial.exp().numpy(), problem.full().exp().numpy()
        peer.means_, peer.covars_ = problem.means, problem.variances
        for found in (problem.sparse(single=False)().log_likelihood[0], model.score(sequences)[0]):
            difference = abs(peer.score(data, lengths) - float(found))
            if difference > 1e-6 * STEPS:
                raise SystemExit(
                    f"hmmlearn's score differs by {difference}: they do not do the same work, so nothing is timed."
                )
        name = f"hmmlearn {implementation}"
        their_score, their_decode = (
            best(lambda p=peer: p.score(data, lengths)),
            best(lambda p=peer: p.decode(data, lengths)),
        )
        note = f"hmmlearn: best of {ROUNDS}"
        rows += [
            row(f"score, {name}", 500, score, {name: their_score}, note),
            row(f"public score, {name}", 500, public_score, {name: their_score}, note),
            row(f"Viterbi, {name}", 500, decode, {name: their_decode}, note),
            row(f"public decode, {name}", 500, public_decode, {name: their_decode}, note),
        ]
    return rows


def public_model(problem: Problem) -> DMCHMM:
    """The model of a problem with Gaussian emissions, in float64."""
    model = DMCHMM(problem.num_states, KEPT, emission="gaussian", num_features=2)
    kept = {"indices": problem.operator.indices, "values": problem.operator.log_values.exp()}
    return model.set_parameters(
        initial=problem.initial.exp(), **kept, emission={"mean": problem.means, "variance": problem.variances}
    )


def growth() -> list[Row]:
    """Time against N at fixed K and T, emissions included."""
    rows = []
    for size in (500, 1000, 2000, 4000, 8000, 16000):
        problem = Problem(size, KEPT, 1, 500, gaussian=True)
        tasks = {"score": problem.sparse(), "Viterbi": problem.viterbi(), "EM, fixed set": problem.sparse(smooth=True)}
        rows += [row(f"growth: {name}", size, best(call, 3), {"nothing": float("nan")}) for name, call in tasks.items()]
    return rows


def costs() -> None:
    """Nanoseconds of a step and sequence: an entry of the full matrix, a kept entry, a state.

    Measured at sizes where both take about as long.
    """
    for smooth in (False, True):
        for sequences in (1, 32):
            for single in (True, False):
                measured = []
                full = [
                    dense_step(Problem(size, 5, sequences, 2000 // sequences + 50), smooth, single)
                    / sequences
                    / size**2
                    for size in (128, 256, 512)
                ]
                for size, kept in ((256, 4), (256, 32), (512, 4), (512, 64)):
                    problem = Problem(size, kept, sequences, 4000 // sequences + 50)
                    seconds = best(problem.sparse(smooth, single)) / problem.steps / sequences
                    measured.append((size * kept, size, seconds))
                array = np.array(measured)
                entry, state = np.linalg.lstsq(array[:, :2] / array[:, 2:], np.ones(len(array)), rcond=None)[0]
                calls = f"{'e_step' if smooth else 'forward'}, {'many' if sequences > 1 else 'one'}"
                name = f"{calls}, {'float32' if single else 'float64'}"
                entries = ", ".join(f"{value * 1e9:.3f}" for value in full)
                print(
                    f"{name}: dense {np.median(full) * 1e9:.3f} ({entries}), kept {entry * 1e9:.3f}, state "
                    f"{state * 1e9:.2f}",
                    flush=True,
                )


def machine() -> str:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{model}, torch {version('torch')}, numba {version('numba')}, hmmlearn {version('hmmlearn')}"


def report(out: Path) -> None:
    """The page and the plot, from the CSV file."""
    import matplotlib.pyplot as plt

    with (out / "dmc.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = [
        "# Speed of dense, mostly constant transitions",
        "",
        "This page is written by `benchmarks/dmc.py`, which describes the data. Both sides use one thread.",
        "",
    ]
    lines += [
        f"- {where}; load average before the start {load or 'not recorded'}"
        for where, load in sorted({(r["machine"], r["load"]) for r in rows})
    ]
    lines += ["", "| rows | ours | other |", "| --- | --- | --- |"]
    lines += [
        f"| {task} | {ours} | {other} |"
        for task, (ours, other) in HOW.items()
        if any(entry["task"].startswith(task) for entry in rows)
    ]
    lines += [
        "",
        "| task | N, K | ours, s | other, s | compared with | other / ours | target | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in rows:
        if not entry["task"].startswith("growth"):
            wanted = WANTED.get((entry["task"], int(entry["states"])))
            cells = [
                entry["task"],
                f"{int(entry['states']):,}, {entry['kept']}",
                f"{float(entry['ours']):.3g}",
                f"{float(entry['theirs']):.3g}",
            ]
            cells += [
                entry["other"],
                f"{float(entry['times']):.1f}",
                "" if wanted is None else f"{wanted}",
                entry["note"],
            ]
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "The plot shows time against the number of states, for K = 20 and one sequence of 500 steps with "
        "two-dimensional Gaussians:",
        "",
        "![growth](dmc_growth.png)",
        "",
    ]
    (out / "dmc.md").write_text("\n".join(lines))
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in ("score", "Viterbi", "EM, fixed set"):
        points = [(int(entry["states"]), float(entry["ours"])) for entry in rows if entry["task"] == f"growth: {name}"]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    reference = [(int(entry["states"]), float(entry["ours"])) for entry in rows if entry["task"] == "growth: score"]
    if reference:
        sizes = np.array([reference[0][0], reference[-1][0]])
        axes.plot(sizes, 0.6 * reference[0][1] * sizes / sizes[0], "--", color="grey", label="in proportion to N")
    axes.set(xscale="log", yscale="log", xlabel="states N", ylabel="seconds", title="K = 20, T = 500, one thread")
    axes.grid(True, which="major", alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    figure.savefig(out / "dmc_growth.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "costs", "report"])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    makers = {
        "table": table,
        "gaussian": lambda: table(gaussian=True),
        "em": em,
        "large": large,
        "hmmlearn": hmmlearn,
        "growth": growth,
    }
    file = options.out / "dmc.csv"
    for part in options.parts:
        if part == "costs":
            costs()
        if part not in makers:
            continue
        load = f"{os.getloadavg()[0]:.2f}"
        rows = [{**entry, "machine": machine(), "load": load} for entry in makers[part]()]
        options.out.mkdir(parents=True, exist_ok=True)
        earlier = list(csv.DictReader(file.open())) if file.exists() else []
        measured = {(entry["task"], str(entry["states"])) for entry in rows}
        kept = [entry for entry in earlier if (entry["task"], entry["states"]) not in measured]
        with file.open("w", newline="") as target:
            writer = csv.DictWriter(target, FIELDS)
            writer.writeheader()
            writer.writerows(kept + rows)
    if (options.out / "dmc.csv").exists():
        report(options.out)


if __name__ == "__main__":
    main()
