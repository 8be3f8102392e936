"""The E-step in plain torch, compared with the compiled kernels, one thread each.

``python benchmarks/reference.py`` writes `docs/benchmarks/reference.md`. Times are CPU times of the thread, the two
sides alternate, and the best of 15 rounds counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_hmm import Sequences
from lightning_hmm.inference import Table, cpu, reference
from lightning_hmm.inference.operators import Dense

SETTINGS = ((10, 20, 256, 300), (50, 27, 64, 300), (200, 27, 16, 300))  # states, symbols, sequences, steps
ROUNDS = 15


def _least(calls: list[Callable[[], object]]) -> list[float]:
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for number, call in enumerate(calls):
            begin = time.thread_time()
            call()
            best[number] = min(best[number], time.thread_time() - begin)
    return best


def measured(states: int, symbols: int, number: int, length: int) -> tuple[float, float]:
    """Seconds of the compiled and of the plain E-step."""
    random = torch.Generator().manual_seed(0)
    initial, transition, table = (
        torch.randn(*shape, generator=random, dtype=torch.float64).log_softmax(-1)
        for shape in ((states,), (states, states), (states, symbols))
    )
    data = Sequences.from_lengths(torch.randint(symbols, (number * length,), generator=random), [length] * number)
    given = (
        initial,
        Dense(transition),
        Table(table, data.symbols(symbols)),
        data.offsets,
        torch.ones(number, dtype=torch.float64),
    )

    def compiled() -> object:
        return cpu.e_step(*given)

    def plain() -> object:
        return reference.e_step(*given, per_step=False)

    compiled()  # compiles
    ours, theirs = _least([compiled, plain])
    return ours, theirs


def main() -> None:
    torch.set_num_threads(1)
    lines = []
    for setting in SETTINGS:
        ours, theirs = measured(*setting)
        states, symbols, number, length = setting
        lines.append(
            f"| {states}, {symbols}, {number} x {length} | {1e3 * ours:.1f} | {1e3 * theirs:.1f} | {theirs / ours:.1f} "
            "|"
        )
    text = f"""# The E-step in plain torch, compared with the compiled kernels

This page is written by `benchmarks/reference.py`. The table gives milliseconds of CPU time of one thread in float64,
for symbols, as the best of {ROUNDS} rounds in which both sides alternate. `compiled` is the backend `cpu` of
`inference.e_step`; `plain` is the backend `reference`, which other devices run. The load average at the end was
{os.getloadavg()[0]:.1f}.

| states, symbols, sequences x steps | compiled | plain | plain / compiled |
| --- | ---: | ---: | ---: |
""" + "\n".join(lines)
    Path("docs/benchmarks/reference.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
