"""Cost of the objectives of DenseHMM: the Trainer and a bare loop, many runs and one, EM and Baum-Welch, and memory.

    python benchmarks/dense.py [--out docs/benchmarks]      # about 2 minutes, on an idle machine

The sides take turns, and the best round of each counts. Both times of a ratio are from the same run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from baum_welch import peak_bytes

from lightning_hmm import DenseHMM, Sequences, StandardHMM, fit
from lightning_hmm.inference.cooccurrence import pair_counts, squared_error
from lightning_hmm.models.dense_hmm import expected_log_likelihood

STATES, SYMBOLS, LENGTH = 10, 42, 5
STEPS = 10_000
LARGE = (1000, 10_000, 10)  # states, symbols, length of the vectors


def random_sequences(num_sequences: int, length: int, num_symbols: int) -> Sequences:
    generator = torch.Generator().manual_seed(0)
    return Sequences(
        torch.randint(num_symbols, (num_sequences * length,), generator=generator),
        torch.arange(num_sequences + 1) * length,
    )


def best(rounds: int, **contestants: Callable[[], float]) -> dict[str, float]:
    """The best time of each; a function times itself, without its preparation."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            times[name].append(contestant())
    return {name: min(values) for name, values in times.items()}


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def cooccurrence_model(runs: int = 1, **options) -> DenseHMM:
    return DenseHMM(STATES, SYMBOLS, embedding_dim=LENGTH, objective="cooccurrence", restarts=runs, **options)


def bare_cooccurrence_loop(target: torch.Tensor, steps: int, runs: int = 1) -> float:
    """The same steps without a Trainer."""
    model = cooccurrence_model(runs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)

    def work() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            transition, emission = (part.natural(slice(None))[0].exp() for part in (model.transition, model.emission))
            squared_error(transition, emission, target).sum().backward()
            optimizer.step()

    return seconds(work)


def epochs(model: DenseHMM | StandardHMM, sequences: Sequences, count: int) -> float:
    return seconds(lambda: fit(model, sequences, count, 0))


def epoch_seconds(make: Callable[[], DenseHMM | StandardHMM], sequences: Sequences) -> float:
    """Seconds per epoch without one-time costs: the time of 22 epochs minus that of 2."""
    return (epochs(make(), sequences, 22) - epochs(make(), sequences, 2)) / 20


def m_step_seconds(sequences: Sequences, steps: int) -> float:
    """The Adam steps of an EM epoch alone."""
    model = DenseHMM(STATES, SYMBOLS, embedding_dim=LENGTH)
    parts = [(part, part.natural(slice(None))[0].detach().exp()) for part in model.embedded_parts.values()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03, fused=True)

    def work() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (-torch.stack([expected_log_likelihood(part, counts) for part, counts in parts])).sum().backward()
            optimizer.step()

    return seconds(work)


def large_model() -> None:
    """Trains a large model for a few steps with the Trainer and prints seconds per step and the peak memory."""
    states, symbols, length = LARGE
    model = DenseHMM(states, symbols, embedding_dim=length, objective="cooccurrence", steps_per_epoch=1)
    sequences = random_sequences(1000, 1000, symbols)
    spent = epochs(model, sequences, 1)
    print(f"{spent:.1f} {peak_bytes() / 2**30:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="shows only that everything works")
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)  # the process whose memory is looked at
    args = parser.parse_args()
    if args.large:
        large_model()
        return
    steps, rounds = (200, 1) if args.quick else (STEPS, args.rounds)
    load = os.getloadavg()[0]
    print(f"Load average {load:.2f}, {torch.get_num_threads()} threads.")
    data = random_sequences(500, 25, SYMBOLS)
    target = pair_counts(data, SYMBOLS)
    target /= target.sum()
    bare_cooccurrence_loop(target, 50)
    fit(cooccurrence_model(), data, 1, 0)
    lines = [
        "# Cost of the objectives of DenseHMM\n",
        "This page is written by `benchmarks/dense.py`. Both sides of each ratio use float64 and "
        f"{torch.get_num_threads()} threads; times are the best of {rounds} rounds. The load average before the "
        f"start was {load:.2f}.\n",
        "| | seconds | ratio |",
        "| --- | ---: | ---: |",
    ]

    def add(what: str, spent: float, ratio: float | None = None) -> None:
        lines.append(f"| {what} | {spent:.4g} | {'' if ratio is None else f'{ratio:.2f}'} |")
        print(lines[-1], flush=True)

    size = f"{STATES} states, {SYMBOLS} symbols, vectors of {LENGTH}"
    found = best(
        rounds,
        bare=lambda: bare_cooccurrence_loop(target, steps),
        trainer=lambda: epochs(cooccurrence_model(), data, steps // 100),
    )
    add(f"{steps:,} co-occurrence steps in a bare loop; {size}", found["bare"])
    add("the same through the Trainer", found["trainer"], found["trainer"] / found["bare"])
    few = max(1, steps // 10)
    found = best(
        rounds, one=lambda: bare_cooccurrence_loop(target, few), many=lambda: bare_cooccurrence_loop(target, few, 100)
    )
    add(f"{few:,} steps of one run", found["one"])
    add("of 100 runs in one tensor", found["many"], found["many"] / found["one"])
    large = random_sequences(512, 300, SYMBOLS)
    found = best(
        rounds,
        standard=lambda: epoch_seconds(lambda: StandardHMM(STATES, SYMBOLS), large),
        adam=lambda: m_step_seconds(large, 25),
        dense=lambda: epoch_seconds(lambda: DenseHMM(STATES, SYMBOLS, embedding_dim=LENGTH), large),
    )
    add(f"an epoch of a StandardHMM, 512 sequences of 300; {STATES} states, {SYMBOLS} symbols", found["standard"])
    add("25 Adam steps on Q", found["adam"])
    add(
        "an epoch of DenseHMM with EM, relative to the sum of the last two",
        found["dense"],
        found["dense"] / (found["standard"] + found["adam"]),
    )
    if not args.quick:
        answer = subprocess.run(
            [sys.executable, __file__, "--large"], capture_output=True, text=True, check=True
        ).stdout.split()
        states, symbols, length = LARGE
        lines.append(
            f"\nWith {states:,} states, {symbols:,} symbols and vectors of {length}, one co-occurrence step takes "
            f"{answer[0]} s and "
            f"the process needs at most {answer[1]} GiB."
        )
        print(lines[-1])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "dense.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
