"""CPU time of an EM iteration with Gaussian emissions through `fit`, compared with hmmlearn.

Also measures the cost of structural zeros and of the torch reference.

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


def small(rounds: int) -> dict[str, float]:
    states, symbols, sequences, length = SMALL
    values = np.random.default_rng(0).integers(0, symbols, sequences * length)
    data = Sequences.from_lengths(values, [length] * sequences)

    def ours(number: int) -> None:
        fit(StandardHMM(states, symbols), data, number, 0)

    def theirs(number: int) -> None:
        CategoricalHMM(states, n_iter=number, tol=-np.inf, implementation="scaling", random_state=0).fit(
            values[:, None], [length] * sequences
        )

    return alternate(
        {
            "ours": lambda: per_iteration(lambda n: ours(n * 10), 20) / 10,
            "hmmlearn": lambda: per_iteration(theirs, 100),
        },
        rounds,
    )


def e_steps(rounds: int) -> dict[str, dict[str, float]]:
    """The E-step of a left-right and of a full matrix, and of the torch reference and of the driver."""
    rng = np.random.default_rng(0)
    found = {}
    for states in (10, 50):
        steps = torch.from_numpy(
            np.triu(rng.random((states, states)) + 0.1) * (np.arange(states)[None] - np.arange(states)[:, None] < 3)
        )
        data = Sequences.from_lengths(rng.integers(0, 20, 256 * 300), [300] * 256)
        plain = HMM(states, Categorical(), Full(), num_symbols=20)
        zeros = copy.deepcopy(plain).set_parameters(transition=steps / steps.sum(1, keepdim=True))
        times = alternate(
            {name: _e_step(model, data) for name, model in (("full", plain), ("left-right", zeros))}, rounds
        )
        found[f"left-right / full, {states} states, 256 x 300"] = {"ours": times["left-right"], "other": times["full"]}
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


def _e_step(model: HMM, data: Sequences) -> Callable[[], float]:
    def run() -> float:
        begin = time.thread_time()
        with torch.no_grad():
            inference.e_step(*model.problem(data))
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
    rows.append(("symbols, K={}, V={}, {} x {}, ten iterations per epoch".format(*SMALL), small(rounds)))
    ratios = {} if options.quick else e_steps(rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "emissions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["what", "ours_ms", "other_ms", "ratio"])
        for name, times in rows:
            writer.writerow(
                [
                    name,
                    f"{times['ours'] * 1e3:.3f}",
                    f"{times['hmmlearn'] * 1e3:.3f}",
                    f"{times['hmmlearn'] / times['ours']:.2f}",
                ]
            )
        for name, times in ratios.items():
            writer.writerow(
                [
                    name,
                    f"{times['ours'] * 1e3:.3f}",
                    f"{times['other'] * 1e3:.3f}",
                    f"{times['ours'] / times['other']:.2f}",
                ]
            )
    lines = [
        "# An EM iteration through `fit`, compared with hmmlearn",
        "",
        __doc__.split("\n\n")[2].replace("\n", " ").strip(),
        "",
    ]
    lines += [
        f"Times are CPU milliseconds, best of {rounds} rounds. The load average before the start was {load:.2f}.",
        "",
    ]
    lines += ["| | ours | hmmlearn 0.3.3 | hmmlearn / ours |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | {t['ours'] * 1e3:.3g} | {t['hmmlearn'] * 1e3:.3g} | {t['hmmlearn'] / t['ours']:.1f}x |"
        for name, t in rows
    ]
    if ratios:
        lines += [
            "",
            "The next table compares E-steps of our own code, on symbols with V = 20:",
            "",
            "| | first | second | first / second |",
            "| --- | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {name} | {t['ours'] * 1e3:.3g} | {t['other'] * 1e3:.3g} | {t['ours'] / t['other']:.2f} |"
            for name, t in ratios.items()
        ]
    (options.out / "emissions.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
