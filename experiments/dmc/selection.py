"""Seconds of one selection with the criterion largest, from all pairs of states and lazily.

``python -m experiments.dmc.selection``. Uses one thread and float32. Run this on an idle machine.
"""

from __future__ import annotations

import torch

from experiments.dmc.lazy import choose_lazily
from experiments.dmc.speed import random_model
from experiments.measures import best_seconds
from lightning_hmm import inference
from lightning_hmm.inference.selection import PairSums, choose, factored_pairs

SIZES = ((100, 10_000), (500, 5000), (1000, 5000), (2000, 10_000))  # states, steps


def compare(size: int, steps: int) -> None:
    """Prints the seconds of both ways for K = 10, and the exact sums per row for each number of terms in a bound."""
    model = random_model(size, 10, arithmetic="float32")
    sequences = model.sample(1, steps)
    initial, operator, *given = model.problem(sequences)
    with torch.no_grad():
        found = inference.e_step(initial, operator, *given, dtype=torch.float32, per_step=True)
        pairs = factored_pairs(operator, found, sequences.offsets)
        sums = PairSums(operator)
        sums.add(pairs)
        seconds = best_seconds(lambda: choose(sums, "largest"), 2)
        print(f"N = {size}, T = {steps}: all pairs {seconds:.3f} s", flush=True)
        for terms in (steps // 200, steps // 20, steps // 5):
            arguments = pairs.alpha, pairs.kappa, operator, *found.counts, terms
            exact = choose_lazily(*arguments)[1].double().mean()
            seconds = best_seconds(lambda given=arguments: choose_lazily(*given), 1)
            print(f"  lazily with R = {terms}: {seconds:.3f} s, {exact:.1f} exact sums per row", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size, steps in SIZES:
        compare(size, steps)
