"""A neural HMM trained in float32 on one rank and on two: the random runs differ, and the quality should not.

``python -m experiments.neural.ranks``

In float32 the order of a sum changes its last digits, and resampling turns such a difference into other particles. Each seed has its own environment of
moving targets in the plane and its own starting values. Errors of prediction and log-likelihoods per step are measured on test data, on one rank.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy

from datamodules import MovingTargetDataModule
from experiments.neural.training import mean_and_spread, prediction_error
from experiments.records import Records, markdown_table
from lightning_hmm import NeuralHMM, fit

SEEDS = 10
EPOCHS = 10
SIZES: dict[str, int] = {"num_sequences": 120, "length": 50}
NEURAL: dict[str, Any] = {"transition_order": 2, "num_particles": 32, "num_paths": 2, "m_steps": 8, "learning_rate": 1e-2}
MEASURES = {"error": "error", "log_likelihood": "log-likelihood"}


def measure(seed: int, ranks: int, epochs: int) -> dict[str, float]:
    """Trains on a number of ranks; gives the error and the log-likelihood per step on test data."""
    data = MovingTargetDataModule(2, seed=seed, **SIZES)
    data.setup()
    how: dict[str, Any] = {}
    if ranks > 1:
        # Spawned, since threads of compiled kernels do not survive a fork.
        strategy = DDPStrategy(start_method="spawn", timeout=timedelta(minutes=10), process_group_backend="gloo")
        how = {"strategy": strategy, "devices": ranks, "accelerator": "cpu"}
    model = NeuralHMM(2, 2, seed=seed, **NEURAL)
    fit(model, data.train_sequences, epochs, 0, batch_size=32, shuffle=True, seed=seed, **how)
    test = data.test_sequences
    error = prediction_error(model.predict_each(test, num_particles=128), test)
    return {"error": error, "log_likelihood": float(model.score(test, num_particles=128).sum()) / test.num_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/neural/ranks"))
    parser.add_argument("--quick", action="store_true", help="one seed, few and short trajectories, one epoch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, epochs = range(args.seeds), EPOCHS
    if args.quick:
        seeds, epochs = range(1), 1
        SIZES.update(num_sequences=20, length=10)
    records = Records(args.out / "records.jsonl")
    for seed in seeds:
        for ranks in (1, 2):
            if not records.has(seed=seed, ranks=ranks):
                records.add(seed=seed, ranks=ranks, **measure(seed, ranks, epochs))
    columns = {ranks: {name: [record[name] for record in records.where(ranks=ranks)] for name in MEASURES} for ranks in (1, 2)}
    rows = [[f"{ranks}", *(mean_and_spread(found[name], 4) for name in MEASURES)] for ranks, found in columns.items()]
    differences = {name: np.subtract(columns[2][name], columns[1][name]).tolist() for name in MEASURES}
    rows.append(["2 less 1, same seed", *(mean_and_spread(differences[name], 4) for name in MEASURES)])
    table = markdown_table(["ranks", *MEASURES.values()], rows)
    (args.out / "ranks.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
