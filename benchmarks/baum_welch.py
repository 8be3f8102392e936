"""Time of a Baum-Welch iteration for our code and the peers, on the same data from the same initial parameters.

    python benchmarks/baum_welch.py [--quick] [--out docs/benchmarks]   # about 7 minutes
    python benchmarks/baum_welch.py --corpus   # one iteration over 50 million symbols, and its memory

Symbols and initial parameters are random, and an iteration is an E-step and an M-step. Before anything is timed, the
new transition matrices must agree, so that all programs do the same work. Then the programs take turns, and the best
round of each counts, so that a busy moment of the machine affects all of them. `benchmarks/README.md` describes what is
compared and what is not measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from peer import mean_seconds

HERE = Path(__file__).resolve().parent
PEERS = ("hmmlearn", "dynamax", "pomegranate")
COLUMNS = ("ours float32", "ours float64", "ours fit float32", "ours fit float64", *PEERS)
TOLERANCE = 1e-4  # between new transition matrices; float32 against float64
ROUNDS, SLOW_ROUNDS, SLOW = 10, 3, 2.0  # programs that need SLOW seconds per call get SLOW_ROUNDS
INTRO = """This page is written by `benchmarks/baum_welch.py`. Times are for one call in the best round. Every program
gets all data in one batch. Our code uses all threads; an iteration is `inference.e_step` and `BaumWelch.step`, and
"fit" is an epoch of `lightning_hmm.fit`. hmmlearn is `CategoricalHMM(implementation="scaling")` with its public
methods, which always use float64 and one thread. dynamax and pomegranate use float32 and all threads.
[benchmarks/README.md](../../benchmarks/README.md) describes what is timed."""
BURST = 0.02  # seconds; a faster call is repeated until a round lasts this long


@dataclass(frozen=True)
class Setting:
    states: int
    symbols: int
    sequences: int
    length: int

    def __str__(self) -> str:
        return f"{self.states}, {self.symbols}, {self.sequences:,} x {self.length:,}"


SETTINGS = (Setting(5, 5, 10, 200), Setting(10, 20, 512, 300), Setting(50, 27, 512, 300), Setting(200, 27, 64, 1000))
TRAINER_SETTING = SETTINGS[2]
CORPUS = Setting(20, 27, 50_000, 1000)


class Problem:
    """A random start (rows from Dirichlet(1)) and uniformly random symbols."""

    def __init__(self, setting: Setting) -> None:
        random = np.random.default_rng(0)
        self.setting = setting
        self.initial = random.dirichlet(np.ones(setting.states))
        self.transition = random.dirichlet(np.ones(setting.states), setting.states)
        self.emission = random.dirichlet(np.ones(setting.symbols), setting.states)
        self.symbols = random.integers(setting.symbols, size=(setting.sequences, setting.length))
        self.lengths = np.full(setting.sequences, setting.length)


# The contestants


class Contestant(Protocol):
    name: str
    may_repeat: bool

    def time(self, calls: int) -> float:
        """Mean seconds of a call."""

    def new_transition(self) -> np.ndarray:
        """(K, K) the transition matrix after one iteration from the start."""


@dataclass
class Local:
    """A program in this process.

    `reset` is called before every `run`, untimed; `result` returns the transition matrix.
    """

    name: str
    reset: Callable[[], object]
    run: Callable[[], object]
    result: Callable[[], np.ndarray] | None = None
    may_repeat: bool = True

    def time(self, calls: int) -> float:
        return mean_seconds(self.reset, self.run, calls)

    def new_transition(self) -> np.ndarray:
        assert self.result is not None
        self.reset()
        self.run()
        return self.result()


class Remote:
    """A program in a separate process and environment, which runs `peer.py`."""

    may_repeat = True

    def __init__(self, name: str, python: Path, scratch: Path) -> None:
        self.name, self.scratch = name, scratch
        self.versions: dict[str, str] = {}
        self.process = subprocess.Popen(
            [python, HERE / f"peer_{name}.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _order(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}; its own message stands above.")
        return json.loads(answer)

    def load(self, problem: Problem) -> None:
        file = self.scratch / f"{self.name}-start.npz"
        np.savez(
            file,
            initial=problem.initial,
            transition=problem.transition,
            emission=problem.emission,
            symbols=problem.symbols,
        )
        self.versions = self._order(do="load", file=str(file))["versions"]

    def time(self, calls: int) -> float:
        return self._order(do="time", calls=calls)["seconds"]

    def new_transition(self) -> np.ndarray:
        file = self.scratch / f"{self.name}-result.npz"
        self._order(do="step", file=str(file))
        with np.load(file) as arrays:
            return arrays["transition"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def environment(name: str) -> Path | None:
    """Returns the Python interpreter of the peer `name`.

    This is the running one, or that of a virtual environment, which is created if it is missing.
    """
    if find_spec(name) is not None:
        return Path(sys.executable)
    folder = HERE / f".venv-{name}"
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if python.exists() and subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode == 0:
        return python
    print(f"Installing {name} into {folder.relative_to(HERE.parent)} ...", flush=True)
    requirements = HERE / f"requirements-{name}.txt"
    commands: list[list[str | Path]] = [[sys.executable, "-m", "venv", folder]]
    # torch is installed first and separately: together with others, pip may choose a build with gigabytes of CUDA
    # libraries.
    torch = [line.split("#")[0].strip() for line in requirements.read_text().splitlines() if line.startswith("torch==")]
    commands += [[python, "-m", "pip", "install", "--quiet", pin] for pin in torch]
    commands += [[python, "-m", "pip", "install", "--quiet", "-r", requirements]]
    for command in commands:
        if subprocess.run(command).returncode:
            print(f"WARNING: {name} could not be installed and is skipped.", flush=True)
            return None
    return python


def hmmlearn_model(problem: Problem) -> Any:
    from hmmlearn.hmm import CategoricalHMM

    return CategoricalHMM(
        problem.setting.states, n_iter=1, init_params="", implementation="scaling", n_features=problem.setting.symbols
    )


def hmmlearn_reset(model: Any, problem: Problem) -> None:
    model.startprob_, model.transmat_, model.emissionprob_ = (
        problem.initial.copy(),
        problem.transition.copy(),
        problem.emission.copy(),
    )


def hmmlearn_iteration(problem: Problem) -> Local:
    model, column = hmmlearn_model(problem), problem.symbols.reshape(-1, 1)
    return Local(
        "hmmlearn",
        lambda: hmmlearn_reset(model, problem),
        lambda: model.fit(column, problem.lengths),
        lambda: model.transmat_,
    )


def our_sequences(problem: Problem) -> Any:
    from lightning_hmm import Sequences

    return Sequences.from_lengths(problem.symbols.reshape(-1), problem.lengths)


def our_iteration(problem: Problem, sequences: Any, single: bool) -> Local:
    """The E-step of `inference` and the M-step of `BaumWelch`, without a Trainer."""
    import torch

    from lightning_hmm import BaumWelch, inference

    model = our_model(problem, single)
    optimizer = BaumWelch(model.distributions)

    def reset() -> None:
        model.set_parameters(initial=problem.initial, transition=problem.transition, emission=problem.emission)

    @torch.no_grad()
    def run() -> None:
        found = inference.e_step(
            *model.chain(0), model.evidence(0, sequences), sequences.offsets, dtype=model.message_dtype
        )
        optimizer.step(
            counts={
                "initial": [found.initial[None]],
                "transition": [found.counts[0][None]],
                "emission": [found.evidence[None]],
            }
        )

    return Local(f"ours {'float32' if single else 'float64'}", reset, run, lambda: model.transition_probs.numpy())


def our_model(problem: Problem, single: bool) -> Any:
    from lightning_hmm import StandardHMM

    model = StandardHMM(
        num_states=problem.setting.states,
        num_symbols=problem.setting.symbols,
        seed=0,
        arithmetic="float32" if single else "float64",
    )
    model.set_parameters(initial=problem.initial, transition=problem.transition, emission=problem.emission)
    return model


def our_fit(problem: Problem, sequences: Any, single: bool, epochs: int) -> Local:
    """All of `fit`, of `epochs` epochs. The difference between two numbers of epochs gives the cost of one."""
    from lightning_hmm import fit

    model = our_model(problem, single)

    def reset() -> None:
        model.train()  # the `fit` before left it ready to answer
        model.set_parameters(initial=problem.initial, transition=problem.transition, emission=problem.emission)

    def run() -> None:
        precision = "32-true" if single else "64-true"
        fit(
            model,
            sequences,
            max_epochs=epochs,
            tolerance=0,
            precision=precision,
            enable_progress_bar=False,
            logger=False,
            batch_size=None,
        )
        if model.trainer.current_epoch != epochs:
            raise SystemExit(
                f"`fit` ran {model.trainer.current_epoch} epochs instead of {epochs}: its time cannot be divided."
            )

    name = f"fit {'float32' if single else 'float64'}, {epochs} epochs"
    return Local(name, reset, run, lambda: model.transition_probs.detach().numpy(), may_repeat=False)


# The race


@dataclass
class Timing:
    """Seconds per call in each round. `calls` is the number of calls per round."""

    calls: int
    rounds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def race(contestants: Sequence[Contestant], rounds: int) -> dict[str, Timing]:
    """Times the programs in turn; each round begins with another one. The first call of each is a warm-up."""
    timings, wanted = {}, {}
    for contestant in contestants:
        contestant.time(1)
        estimate = contestant.time(1)
        slow = estimate >= SLOW
        timings[contestant.name] = Timing(
            1 if slow or not contestant.may_repeat else min(200, math.ceil(BURST / estimate)),
            [estimate] if slow else [],
        )
        wanted[contestant.name] = min(rounds, SLOW_ROUNDS) if slow else rounds
    for turn in range(rounds):
        for place in range(len(contestants)):
            contestant = contestants[(turn + place) % len(contestants)]
            timing = timings[contestant.name]
            if len(timing.rounds) < wanted[contestant.name]:
                time.sleep(0.02)  # threads that spin while they wait for work must not slow the next one
                timing.rounds.append(contestant.time(timing.calls))
    return timings


@dataclass
class Row:
    """A line of the CSV file: seconds per call in the best round and in the median round."""

    task: str
    setting: Setting
    contestant: str
    seconds: float
    median_seconds: float
    rounds: int
    calls_per_round: int

    @classmethod
    def of(cls, task: str, setting: Setting, contestant: str, timing: Timing) -> Row:
        return cls(task, setting, contestant, timing.best, timing.median, len(timing.rounds), timing.calls)

    def record(self) -> dict[str, Any]:
        record = asdict(self)
        return {"task": record.pop("task"), **record.pop("setting"), **record}


def check_same(name: str, value: np.ndarray | float, other: np.ndarray | float, tolerance: float) -> None:
    difference = float(np.abs(np.asarray(value) - np.asarray(other)).max())
    if not difference <= tolerance:
        raise SystemExit(
            f"{name} differs by {difference:.1e}, more than {tolerance:.0e}: they do not do the same work, so nothing "
            "is timed."
        )
    print(f"  {name}: same to {difference:.0e}")


def iterations(
    settings: Iterable[Setting], options: argparse.Namespace, remotes: list[Remote]
) -> tuple[list[Row], dict[str, float]]:
    """One Baum-Welch iteration. Also returns the difference of pomegranate's transition matrix for each setting."""
    rows, off = [], {}
    for setting in settings:
        print(f"\nBaum-Welch iteration: {setting}", flush=True)
        problem = Problem(setting)
        reference = hmmlearn_iteration(problem)
        expected = reference.new_transition()
        contestants: list[Contestant] = []
        if not options.peers_only:
            sequences = our_sequences(problem)
            contestants += [our_iteration(problem, sequences, single) for single in (True, False)]
        if "hmmlearn" in options.peers:
            contestants.append(reference)
        for remote in remotes:
            if remote.name == "pomegranate" and setting.states >= 200:
                continue  # it holds an array of sequences x length x states x states: 10 GB here
            remote.load(problem)
            contestants.append(remote)
        for contestant in contestants:
            if contestant.name == "pomegranate":
                new = contestant.new_transition()
                off[str(setting)] = float(np.abs(new - expected).max())
                same = float(np.abs(new / new.sum(axis=1, keepdims=True) - expected).max())
                print(
                    f"  pomegranate: off by {off[str(setting)]:.0e} (its end state), same to {same:.0e} with rows "
                    "normalized"
                )
            elif contestant is not reference:
                check_same(f"{contestant.name} and hmmlearn", contestant.new_transition(), expected, TOLERANCE)
        runs: dict[bool, tuple[Local, Local, int]] = {}
        if not options.peers_only:
            for single, bare in zip((True, False), contestants[:2], strict=True):
                one_epoch = our_fit(problem, sequences, single, 1)
                check_same(f"{one_epoch.name}, and hmmlearn", one_epoch.new_transition(), expected, TOLERANCE)
                few, more = 2, min(200, max(4, math.ceil(0.5 / bare.time(1))))
                runs[single] = (
                    our_fit(problem, sequences, single, few),
                    our_fit(problem, sequences, single, few + more),
                    more,
                )
                contestants += runs[single][:2]
        timings, fits = race(contestants, options.rounds), []
        for single, (short, long, more) in runs.items():
            begun, ended = timings.pop(short.name), timings.pop(long.name)
            best, median = (ended.best - begun.best) / more, (ended.median - begun.median) / more
            fits.append(
                Row(
                    "iteration",
                    setting,
                    f"ours fit {'float32' if single else 'float64'}",
                    best,
                    median,
                    len(ended.rounds),
                    more,
                )
            )
        for row in [*(Row.of("iteration", setting, name, timing) for name, timing in timings.items()), *fits]:
            rows.append(row)
            print(f"  {row.contestant:<18} {show(row.seconds)}{wavered(row)}", flush=True)
    return rows, off


def log_probability(problem: Problem, path: np.ndarray) -> float:
    """Natural log p(symbols, path), summed over sequences; `path` is (N, T)."""
    chain = np.log(problem.initial)[path[:, 0]].sum() + np.log(problem.transition)[path[:, :-1], path[:, 1:]].sum()
    return float(chain + np.log(problem.emission)[path, problem.symbols].sum())


def nothing() -> None:
    """There is nothing to reset."""


def inference(settings: Iterable[Setting], options: argparse.Namespace) -> list[Row]:
    """`score` (log-likelihood) and `decode` (Viterbi), compared with hmmlearn."""
    rows = []
    for setting in settings:
        print(f"\nScore and decode: {setting}", flush=True)
        problem = Problem(setting)
        peer, column = hmmlearn_model(problem), problem.symbols.reshape(-1, 1)
        hmmlearn_reset(peer, problem)
        tasks = {
            "score": [Local("hmmlearn", nothing, partial(peer.score, column, problem.lengths))],
            "decode": [Local("hmmlearn", nothing, partial(peer.decode, column, problem.lengths))],
        }
        if not options.peers_only:
            sequences = our_sequences(problem)
            double, single = our_model(problem, single=False), our_model(problem, single=True)
            score, best = peer.score(column, problem.lengths), peer.decode(column, problem.lengths)[0]
            check_same("score, relative, float64", float(double.score(sequences).sum()) / score, 1.0, 1e-9)
            check_same("score, relative, float32", float(single.score(sequences).sum()) / score, 1.0, 1e-5)
            path = double.decode(sequences).values.numpy().reshape(problem.symbols.shape)
            check_same("best path's log-probability, relative,", log_probability(problem, path) / best, 1.0, 1e-9)
            tasks["score"] += [
                Local("ours float32", nothing, partial(single.score, sequences)),
                Local("ours float64", nothing, partial(double.score, sequences)),
            ]
            tasks["decode"].append(Local("ours float64", nothing, partial(double.decode, sequences)))
        for task, contestants in tasks.items():
            for name, timing in race(contestants, options.rounds).items():
                rows.append(Row.of(task, setting, name, timing))
                print(f"  {task:<7} {name:<18} {show(timing.best)}{wavered(rows[-1])}", flush=True)
    return rows


def scaling(options: argparse.Namespace) -> list[Row]:
    """Time of one iteration as a function of the number and of the length of sequences, at 10 states and 20 symbols."""
    top = 512 if options.quick else 4096
    sweeps = {
        "scaling sequences": [Setting(10, 20, 2**power, 300) for power in range(6, top.bit_length())],
        "scaling length": [Setting(10, 20, 64, 75 * 2**power) for power in range(top.bit_length() - 5)],
    }
    rows = []
    for task, settings in sweeps.items():
        print(f"\n{task.capitalize()}", flush=True)
        for setting in settings:
            problem = Problem(setting)
            contestants = [hmmlearn_iteration(problem)] if "hmmlearn" in options.peers else []
            if not options.peers_only:
                sequences = our_sequences(problem)
                contestants += [our_iteration(problem, sequences, single) for single in (True, False)]
            timings = race(contestants, options.rounds)
            rows += [Row.of(task, setting, name, timing) for name, timing in timings.items()]
            print(
                f"  {setting}: " + ", ".join(f"{name} {show(timing.best)}" for name, timing in timings.items()),
                flush=True,
            )
    return rows


def plot_scaling(rows: Sequence[Row], threads: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    styles = {
        "hmmlearn": ("#8a8a8a", "s", "hmmlearn, float64"),
        "ours float64": ("#0072b2", "o", "ours, float64"),
        "ours float32": ("#d55e00", "o", "ours, float32"),
    }
    panels = (
        ("scaling sequences", "sequences", "number of sequences", "300 symbols per sequence"),
        ("scaling length", "length", "symbols per sequence", "64 sequences"),
    )
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.8), sharey=True, layout="constrained")
    for axis, (task, attribute, label, fixed) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if row.task == task]
        guided = "ours float32" if any(row.contestant == "ours float32" for row in chosen) else "hmmlearn"
        for name, (colour, marker, legend) in styles.items():
            points = sorted((getattr(row.setting, attribute), row.seconds) for row in chosen if row.contestant == name)
            if not points:
                continue
            across, up = np.array(points).T
            axis.plot(across, up, color=colour, marker=marker, markersize=5.5, linewidth=1.8, label=legend)
            if name == guided:
                # Below the last point, not through it, so that both lines are seen.
                guide = 0.6 * up[-1] * across / across[-1]
                axis.plot(
                    across,
                    guide,
                    color="black",
                    linewidth=1,
                    linestyle=(0, (4, 3)),
                    label="slope 1: time in proportion",
                )
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.set_title(fixed, fontsize=11)
        ticks = sorted({getattr(row.setting, attribute) for row in chosen})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("time per Baum-Welch iteration")
    axes[0].yaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: (
                f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms" if value >= 1e-3 else f"{value * 1e6:g} µs"
            )
        )
    )
    figure.suptitle(f"One Baum-Welch iteration: 10 states, 20 different symbols, {threads} threads", fontsize=13)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=160)
    plt.close(figure)


# A corpus


def resident_bytes() -> int:
    """Resident memory of this process."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Peak resident memory of this process.

    `getrusage` does not give that on Linux: its `ru_maxrss` starts from the peak of the process that started this one.
    """
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def corpus_child(single: bool, num_sequences: int) -> None:
    """Runs in a separate process, so that the peak is its own. Prints one line of JSON."""
    setting = Setting(CORPUS.states, CORPUS.symbols, num_sequences, CORPUS.length)
    small = Problem(Setting(setting.states, setting.symbols, 64, setting.length))
    our_iteration(small, our_sequences(small), single).time(2)  # compiles
    problem = Problem(setting)
    sequences = our_sequences(problem)
    iteration = our_iteration(problem, sequences, single)
    sequences.check(setting.symbols, None)
    before, peak_before = resident_bytes(), peak_bytes()
    seconds = min(iteration.time(1) for _ in range(3))
    answer = {
        "seconds": seconds,
        "data_bytes": problem.symbols.nbytes,
        "beyond_bytes": peak_bytes() - before,
        "earlier_peak_bytes": peak_before - before,
    }
    print(json.dumps(answer))


def corpus(options: argparse.Namespace) -> None:
    num_sequences = 2_000 if options.quick else CORPUS.sequences
    setting = Setting(CORPUS.states, CORPUS.symbols, num_sequences, CORPUS.length)
    print(f"\nCorpus: {setting}, {num_sequences * CORPUS.length:,} symbols", flush=True)
    lines, records = [], []
    for precision in ("float32", "float64"):
        command = [
            sys.executable,
            __file__,
            "--corpus-child",
            precision,
            str(num_sequences),
            "--threads",
            str(options.threads),
        ]
        answer = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
        records.append({"precision": precision, **asdict(setting), **answer})
        rate = num_sequences * CORPUS.length / answer["seconds"] / 1e6
        cells = (
            precision,
            show(answer["seconds"]),
            f"{rate:.1f}",
            f"{answer['data_bytes'] / 1e6:,.0f} MB",
            f"{answer['beyond_bytes'] / 1e6:,.0f} MB",
        )
        lines.append(cells)
        print(
            f"  {precision}: {cells[1]} per iteration, {cells[2]} million symbols per second, {cells[4]} in addition "
            f"to the data ({cells[3]})",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(options.out / "corpus.csv", records)
    title = (
        f"One Baum-Welch iteration over {num_sequences * CORPUS.length:,} symbols "
        f"({CORPUS.states} states, {CORPUS.symbols} symbols)"
    )
    table = markdown(
        ["arithmetic", "seconds", "million symbols per second", "memory of the data", "peak memory in addition"], lines
    )
    (options.out / "corpus.md").write_text(f"# {title}\n\n{table}{machine(options)}")


# The report


def show(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            value = seconds / size
            return (
                f"{value:.{max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0}f} {unit}"
                if value < 100
                else f"{value:.0f} {unit}"
            )
    raise AssertionError


def wavered(row: Row) -> str:
    """The median round, if rounds differ so much that the machine may have been busy."""
    return f"   (median round {show(row.median_seconds)})" if row.median_seconds > 1.25 * row.seconds else ""


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ruler, *lines))


def write_csv(file: Path, records: Sequence[dict[str, Any]]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def machine(options: argparse.Namespace, more: dict[str, str] | None = None) -> str:
    """The processor, the threads, the load and the versions."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        processor = next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            processor,
        )
    found = {"Python": platform.python_version()}
    for name in ("lightning_hmm", "torch", "lightning", "numba", "numpy", "hmmlearn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found |= more or {}
    listed = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"\n{processor}, {options.threads} threads; load average before the start {options.load:.2f}. {listed}.\n"


def ratio(seconds: dict[str, float], slower: str, faster: str) -> str:
    return f"{seconds[slower] / seconds[faster]:.3g}x" if slower in seconds and faster in seconds else "-"


def iteration_ratios(rows: Sequence[Row], threads: int) -> str:
    """Times of the peers divided by ours. Every column names both sides: what was called, precision and threads."""
    columns = {
        f"hmmlearn's `fit` (1 thread) / our iteration ({threads} threads), both float64": ("hmmlearn", "ours float64"),
        f"hmmlearn's `fit` (1 thread), float64 / our iteration ({threads} threads), float32": (
            "hmmlearn",
            "ours float32",
        ),
        f"hmmlearn's `fit` (1 thread) / an epoch of our `fit` ({threads} threads), both float64": (
            "hmmlearn",
            "ours fit float64",
        ),
        f"dynamax / our iteration, both float32, {threads} threads": ("dynamax", "ours float32"),
        f"pomegranate / our iteration, both float32, {threads} threads": ("pomegranate", "ours float32"),
    }
    measured = {row.contestant for row in rows}
    columns = {title: pair for title, pair in columns.items() if measured.issuperset(pair)}
    lines = []
    for setting in dict.fromkeys(row.setting for row in rows):
        seconds = {row.contestant: row.seconds for row in rows if row.setting == setting}
        lines.append([str(setting), *(ratio(seconds, *pair) for pair in columns.values())])
    return markdown(["states, symbols, sequences x length", *columns], lines) if columns else ""


def fewer_rounds(rows: Sequence[Row]) -> str:
    """Which times are the best of fewer rounds than the others."""
    most = max(row.rounds for row in rows)
    short = [f"{row.rounds} for {row.contestant} at {row.setting}" for row in rows if row.rounds < most]
    return f"Best of {most} rounds" + (f"; best of {'; of '.join(short)}" if short else "") + "."


def tables(rows: Sequence[Row], off: float | None, threads: int) -> str:
    """The results as markdown: seconds, then ratios whose columns name both sides.

    `off` is the difference of pomegranate's transition matrix.
    """
    text = ""
    titles = {
        "iteration": "One Baum-Welch iteration",
        "score": "`score`: log-likelihood",
        "decode": "`decode`: Viterbi",
    }
    for task, title in titles.items():
        chosen = [row for row in rows if row.task == task]
        if not chosen:
            continue
        names = [name for name in COLUMNS if any(row.contestant == name for row in chosen)]
        against = (
            {}
            if task == "iteration"
            else {
                name: f"hmmlearn, float64, 1 thread / {name}, {threads} threads" for name in names if name not in PEERS
            }
        )
        lines = []
        for setting in dict.fromkeys(row.setting for row in chosen):
            seconds = {row.contestant: row.seconds for row in chosen if row.setting == setting}
            cells = [str(setting), *(show(seconds[name]) if name in seconds else "-" for name in names)]
            lines.append([*cells, *(ratio(seconds, "hmmlearn", name) for name in against)])
        header = ["states, symbols, sequences x length", *names, *against.values()]
        text += f"\n## {title}\n\n{fewer_rounds(chosen)}\n\n{markdown(header, lines)}"
        if task == "iteration":
            text += f"\nTime of the peers divided by ours:\n\n{iteration_ratios(chosen, threads)}"
            if off is not None:
                text += (
                    f"\npomegranate's new transition matrix differs by up to {off:.0e}, because it has an end state. "
                    "With rows normalized it agrees.\n"
                )
    trainer = {
        row.contestant: row.seconds for row in rows if row.task == "iteration" and row.setting == TRAINER_SETTING
    }
    lines = []
    for precision in ("float32", "float64"):
        if f"ours fit {precision}" in trainer:
            bare, epoch = trainer[f"ours {precision}"], trainer[f"ours fit {precision}"]
            lines.append(
                [precision, show(bare), show(epoch), f"{(epoch - bare) * 1e3:+.2f} ms ({epoch / bare - 1:+.0%})"]
            )
    if lines:
        header = ["arithmetic", "bare call", "epoch of `fit`", "difference"]
        text += f"\n## Cost of the Trainer: an epoch of `fit` at {TRAINER_SETTING}\n\n{markdown(header, lines)}"
    return text


def write(rows: Sequence[Row], off: dict[str, float], options: argparse.Namespace, versions: dict[str, str]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(options.out / "baum_welch.csv", [row.record() for row in rows])
    kind = "A quick run, not for quoting. " if options.quick else ""
    page = f"# Baum-Welch, compared with the peers\n\n{kind}{INTRO}\n{machine(options, versions)}"
    page += tables(rows, max(off.values(), default=None), options.threads)
    (options.out / "baum_welch.md").write_text(page)


def use_threads(threads: int) -> None:
    """Pins this process and its children to this many cores.

    JAX has no other option; call before torch and numba are imported.
    """
    os.environ |= {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    else:
        print("WARNING: this system cannot pin a process to cores, so dynamax may use more threads than the others.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a Baum-Welch iteration, compared with the peers.")
    parser.add_argument("--quick", action="store_true", help="two settings and three rounds, to check that it works")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder for CSV, markdown and PNG")
    parser.add_argument(
        "--corpus", action="store_true", help="only this: one iteration over 50 million symbols, and its memory"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("iterations", "inference", "scaling"),
        default=["iterations", "inference", "scaling"],
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="peers to time")
    parser.add_argument("--peers-only", action="store_true", help="leave ours out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--corpus-child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_threads(options.threads)
    if options.corpus_child:
        corpus_child(options.corpus_child[0] == "float32", int(options.corpus_child[1]))
        return
    options.load = os.getloadavg()[0]
    print(f"Load average {options.load:.2f}, {options.threads} threads.")
    if options.load > 0.5:
        print(
            "WARNING: the load average is above 0.5. Other work increases the times, most of all those of programs "
            "that use all cores."
        )
    if options.corpus:
        corpus(options)
        return
    options.rounds = 3 if options.quick else ROUNDS
    settings = SETTINGS[:2] if options.quick else SETTINGS
    rows: list[Row] = []
    off: dict[str, float] = {}
    versions: dict[str, str] = {}
    if "iterations" in options.parts:
        with tempfile.TemporaryDirectory() as scratch:
            pythons = {name: environment(name) for name in options.peers if name != "hmmlearn"}
            remotes = [Remote(name, python, Path(scratch)) for name, python in pythons.items() if python is not None]
            try:
                rows, off = iterations(settings, options, remotes)
            finally:
                for remote in remotes:
                    versions |= {name: number for name, number in remote.versions.items() if name != "torch"}
                    remote.close()
        write(rows, off, options, versions)
    if "inference" in options.parts:
        rows += inference(settings, options)
        write(rows, off, options, versions)
    if "scaling" in options.parts:
        rows += scaling(options)
        write(rows, off, options, versions)
        plot_scaling(rows, options.threads, options.out / "scaling.png")
    print(tables(rows, max(off.values(), default=None), options.threads))
    print(
        f"Written to {options.out}: baum_welch.csv, baum_welch.md"
        + (", scaling.png" if "scaling" in options.parts else "")
        + "."
    )


if __name__ == "__main__":
    main()
