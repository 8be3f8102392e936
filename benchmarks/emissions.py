"""CPU time of EM through `fit` and of scoring, compared with hmmlearn; of structural zeros, the reference, compilation.

    python benchmarks/emissions.py [--quick] [--rounds 15] [--out docs/benchmarks]

Both sides use one thread and float64, alternate in one process, and start from the same parameters, without k-means. A
time is the CPU time of the thread for the iterations between the second and the last, divided by their number. The best
of several rounds counts. hmmlearn runs with ``implementation="scaling"``.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hmmlearn.hmm import CategoricalHMM, GaussianHMM

from lightning_hmm import HMM, Categorical, Full, Gaussian, Sequences, StandardHMM, fit, inference
from lightning_hmm.inference import reference

COVARIANCES = {"diagonal": "diag", "full": "full", "tied": "tied", "spherical": "spherical"}
# covariance, states, columns, sequences, length
SETTINGS = (
    ("diagonal", 10, 3, 256, 300),
    ("diagonal", 50, 6, 256, 300),
    ("diagonal", 20, 30, 64, 1000),
    ("full", 20, 10, 64, 1000),
)
SMALL = (5, 8, 10, 200)


def per_iteration(run: Callable[[int], None], iterations: int) -> float:
    """CPU seconds per iteration, without one-time costs."""
    times = []
    for number in (2, 2 + iterations):
        begin = time.thread_time()
        run(number)
        times.append(time.thread_time() - begin)
    return (times[1] - times[0]) / iterations


def alternate(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The best time of each function in several rounds; they take turns."""
    for contestant in contestants.values():
        contestant()
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            found[name].append(contestant())
    return {name: min(times) for name, times in found.items()}


def gaussian(kind: str, states: int, size: int, sequences: int, length: int, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(sequences * length, size)) + 2 * rng.integers(0, 3, (sequences, 1, 1)).repeat(
        length, 1
    ).reshape(-1, 1)
    lengths = [length] * sequences
    data = Sequences.from_lengths(torch.from_numpy(values), lengths)
    start = HMM(states, Gaussian(kind), num_features=size)
    start.initialize(data)

    def ours(number: int) -> None:
        fit(copy.deepcopy(start), data, number, 0)

    def theirs(number: int) -> None:
        peer = GaussianHMM(
            states, COVARIANCES[kind], n_iter=number, tol=-np.inf, init_params="", implementation="scaling"
        )
        peer.startprob_, peer.transmat_, peer.means_ = (
            tensor.numpy() for tensor in (start.initial_probs, start.transition_probs, start.emission.mean)
        )
        covariance = start.emission.covariance.numpy()
        peer.covars_ = {
            "diagonal": start.emission.variance.numpy(),
            "full": covariance,
            "tied": covariance[0],
            "spherical": covariance[:, 0, 0],
        }[kind]
        peer.fit(values, lengths)

    return alternate({"ours": lambda: per_iteration(ours, 6), "hmmlearn": lambda: per_iteration(theirs, 2)}, rounds)


def small(kind: str, rounds: int) -> dict[str, float]:
    """Symbols, or Gaussians with three columns, with the default options of `fit`."""
    states, symbols, sequences, length = SMALL
    rng, lengths = np.random.default_rng(0), [length] * sequences
    values = rng.integers(0, symbols, sequences * length) if kind == "symbols" else rng.normal(size=(2000, 3))
    data = Sequences.from_lengths(torch.from_numpy(values), lengths)
    start = StandardHMM(states, symbols) if kind == "symbols" else HMM(states, Gaussian(), num_features=3)
    start.initialize(data)

    def ours(number: int) -> None:
        fit(copy.deepcopy(start), data, number, 0)

    def theirs(number: int) -> None:
        family = CategoricalHMM if kind == "symbols" else GaussianHMM
        peer = family(states, n_iter=number, tol=-np.inf, implementation="scaling", random_state=0)
        if kind != "symbols":  # without k-means
            peer.init_params = "stc"
            peer.means_ = start.emission.mean.numpy()
        peer.fit(values.reshape(len(values), -1), lengths)

    return alternate(
        {
            "ours": lambda: per_iteration(lambda n: ours(n * 10), 20) / 10,
            "hmmlearn": lambda: per_iteration(theirs, 100),
        },
        rounds,
    )


def scoring(rounds: int) -> dict[str, float]:
    """`score` with five states, on 256 sequences of 300 symbols."""
    values = np.random.default_rng(0).integers(0, 20, 256 * 300)
    data, model = Sequences.from_lengths(values, [300] * 256), StandardHMM(5, 20)
    peer = CategoricalHMM(5, implementation="scaling", n_features=20)
    peer.startprob_, peer.transmat_, peer.emissionprob_ = (
        tensor.numpy() for tensor in (model.initial_probs, model.transition_probs, model.emission_probs)
    )

    def timed(run: Callable[[], object]) -> float:
        begin = time.thread_time()
        run()
        return time.thread_time() - begin

    return alternate(
        {
            "ours": lambda: timed(lambda: model.score(data)),
            "hmmlearn": lambda: timed(lambda: peer.score(values[:, None], [300] * 256)),
        },
        rounds,
    )


_FAMILIES = {
    "StandardHMM": "fit(lightning_hmm.StandardHMM(3, 4), symbols, 3)",
    "HMM with Gaussian": "fit(lightning_hmm.HMM(3, lightning_hmm.Gaussian()), vectors, 3)",
    "DMCHMM": "fit(lightning_hmm.DMCHMM(3, num_symbols=4, num_kept=1), symbols, 3)",
    "ClonedHMM": "fit(lightning_hmm.ClonedHMM(8, 4), symbols, 3)",
}
_PROGRAM = """import numpy as np, torch, lightning_hmm
from lightning_hmm import fit
torch.set_num_threads(1)
symbols, vectors = [np.arange(12) % 4] * 4, [np.random.default_rng(0).normal(size=(12, 2))] * 4
"""


def compilation() -> dict[str, float]:
    """CPU seconds that the first `fit` of a family takes more in an empty cache folder than in a full one."""
    found = {}
    for name, line in _FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            times = []
            for _ in range(2):
                before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
                environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
                subprocess.run(
                    [sys.executable, "-c", _PROGRAM + line], env=environment, check=True, stderr=subprocess.DEVNULL
                )
                times.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
        found[name] = times[0] - times[1]
    return found


def e_steps(rounds: int) -> dict[str, dict[str, float]]:
    """The E-step of a left-right and of a full matrix, and of the torch reference and of the driver."""
    rng = np.random.default_rng(0)
    found = {}
    for states, sequences, length in ((10, 256, 300), (50, 256, 300), (10, 64, 1000), (50, 64, 1000)):
        steps = torch.from_numpy(
            np.triu(rng.random((states, states)) + 0.1) * (np.arange(states)[None] - np.arange(states)[:, None] < 3)
        )
        data = Sequences.from_lengths(rng.integers(0, 20, sequences * length), [length] * sequences)
        plain = HMM(states, Categorical(), Full(), num_symbols=20)
        zeros = copy.deepcopy(plain).set_parameters(transition=steps / steps.sum(1, keepdim=True))
        for dtype in (torch.float64, torch.float32):
            contestants = {"other": _e_step(plain, data, dtype), "ours": _e_step(zeros, data, dtype)}
            name = f"left-right / full, {states} states, {sequences} x {length}, {str(dtype)[6:]}"
            found[name] = alternate(contestants, rounds)
    data = Sequences.from_lengths(rng.integers(0, 20, 64 * 300), [300] * 64)
    plain = HMM(50, Categorical(), Full(), num_symbols=20)
    problem = tuple(part.on("cpu") if hasattr(part, "on") else part for part in plain.problem(data))
    weights = torch.ones(len(data), dtype=torch.float64)

    def portable() -> float:
        begin = time.thread_time()
        with torch.no_grad():
            reference.e_step(*problem, weights, per_step=False)
        return time.thread_time() - begin

    times = alternate({"driver": _e_step(plain, data), "reference": portable}, rounds)
    found["torch reference / driver, 50 states, 64 x 300"] = {"ours": times["reference"], "other": times["driver"]}
    return found


def _e_step(model: HMM, data: Sequences, dtype: torch.dtype = torch.float64) -> Callable[[], float]:
    def run() -> float:
        begin = time.thread_time()
        with torch.no_grad():
            inference.e_step(*model.problem(data), dtype=dtype)
        return time.thread_time() - begin

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small settings and two rounds, to check that it works")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of which the best counts")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder for CSV and markdown")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rounds, load = (2 if options.quick else options.rounds), os.getloadavg()[0]
    settings = (("diagonal", 3, 2, 8, 50), ("full", 3, 2, 8, 50)) if options.quick else SETTINGS
    rows = [(f"{kind}, K={k}, D={d}, {n} x {t}", gaussian(kind, k, d, n, t, rounds)) for kind, k, d, n, t in settings]
    for kind in ("symbols", "diagonal"):
        rows.append(("{}, K={}, {} x {}".format(kind, SMALL[0], *SMALL[2:]), small(kind, rounds)))
    rows.append(("score, symbols, K=5, 256 x 300", scoring(rounds)))
    ratios = {} if options.quick else e_steps(rounds)
    seconds = {} if options.quick else compilation()
    options.out.mkdir(parents=True, exist_ok=True)
    _write_csv(options.out / "emissions.csv", rows, ratios, seconds)
    text = _as_markdown(rows, ratios, seconds, f"best of {rounds} rounds", load)
    (options.out / "emissions.md").write_text(text)
    print(text)


def _write_csv(
    path: Path,
    rows: list[tuple[str, dict[str, float]]],
    ratios: dict[str, dict[str, float]],
    seconds: dict[str, float],
) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "ours_ms", "other_ms", "ratio"])
        for name, times in rows:
            mine, other = times["ours"] * 1e3, times["hmmlearn"] * 1e3
            writer.writerow([name, f"{mine:.3f}", f"{other:.3f}", f"{other / mine:.2f}"])
        for name, times in ratios.items():
            mine, other = times["ours"] * 1e3, times["other"] * 1e3
            writer.writerow([name, f"{mine:.3f}", f"{other:.3f}", f"{mine / other:.2f}"])
        for name, value in seconds.items():
            writer.writerow([f"compilation, {name}", f"{value * 1e3:.0f}", "", ""])


def _as_markdown(
    rows: list[tuple[str, dict[str, float]]],
    ratios: dict[str, dict[str, float]],
    seconds: dict[str, float],
    rounds: str,
    load: float,
) -> str:
    assert __doc__ is not None
    lines = ["# An EM iteration through `fit`, compared with hmmlearn", ""]
    lines += [__doc__.split("\n\n")[2].replace("\n", " ").strip(), ""]
    lines += [f"Times are CPU milliseconds, {rounds}. The load average before the start was {load:.2f}.", ""]
    lines += ["| | ours | hmmlearn 0.3.3 | hmmlearn / ours |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | {t['ours'] * 1e3:.3g} | {t['hmmlearn'] * 1e3:.3g} | {t['hmmlearn'] / t['ours']:.1f}x |"
        for name, t in rows
    ]
    if ratios:
        lines += ["", "The next table compares E-steps of our own code, on symbols with V = 20:", ""]
        lines += ["| | first | second | first / second |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {name} | {t['ours'] * 1e3:.3g} | {t['other'] * 1e3:.3g} | {t['ours'] / t['other']:.2f} |"
            for name, t in ratios.items()
        ]
    if seconds:
        lines += ["", "The first `fit` on a machine compiles the kernels, which are kept on disk:", ""]
        lines += ["| | CPU seconds |", "| --- | ---: |"]
        lines += [f"| {name} | {value:.1f} |" for name, value in seconds.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
