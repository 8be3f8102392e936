"""A neural HMM trained in float32 on one rank and on two: the random numbers differ, and the quality should not.

``python -m experiments.neural.ranks``

In float32 the order of a sum changes its last digits, and resampling turns such a difference into other particles. Each
seed has its own environment of moving targets in the plane and its own initial parameters. Prediction errors and
log-likelihoods per step are measured on test data, on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.figure import Figure

from datamodules import MovingTargetDataModule
from experiments.measures import mean_and_spread
from experiments.neural.training import prediction_error
from experiments.panels import GREY, panels
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm import NeuralHMM, fit
from lightning_hmm.plotting import COLORS

NEURAL: dict[str, Any] = {
    "transition_order": 2,
    "num_particles": 32,
    "num_paths": 2,
    "m_steps": 8,
    "learning_rate": 1e-2,
}
MEASURES = {"error": "error", "log_likelihood": "log-likelihood"}
RANKS = (1, 2)


def cases(run: Run) -> Iterator[Case]:
    for seed in range(run.seeds):
        yield from ({"seed": seed, "ranks": ranks} for ranks in RANKS)


def compute(run: Run, case: Case) -> dict[str, float]:
    """Trains on a number of ranks; returns the error and the log-likelihood per step on test data."""
    data = MovingTargetDataModule(2, seed=case["seed"], **run.sizes)
    data.setup()
    how: dict[str, Any] = {"batch_size": 32, "shuffle": True, "seed": case["seed"]}
    if case["ranks"] > 1:
        # Processes are spawned because threads of compiled kernels do not survive a fork.
        strategy = DDPStrategy(start_method="spawn", timeout=timedelta(minutes=10), process_group_backend="gloo")
        how |= {"strategy": strategy, "devices": case["ranks"], "accelerator": "cpu"}
    model = NeuralHMM(2, 2, seed=case["seed"], **NEURAL)
    fit(model, data.train_sequences, run.epochs, 0, **how)
    test = data.test_sequences
    error = prediction_error(model.predict_each(test, num_particles=128), test)
    return {"error": error, "log_likelihood": float(model.score(test, num_particles=128).sum()) / test.num_steps}


def results(run: Run) -> dict[str, np.ndarray]:
    """Returns the (ranks, seeds) results by measure."""
    return {name: np.array([run.records.values(name, ranks=ranks) for ranks in RANKS]) for name in MEASURES}


def table(run: Run) -> dict[str, str]:
    found = results(run)
    rows = [
        [f"{ranks}", *(mean_and_spread(list(found[name][n]), 4) for name in MEASURES)] for n, ranks in enumerate(RANKS)
    ]
    differences = [mean_and_spread(list(found[name][1] - found[name][0]), 4) for name in MEASURES]
    return {"ranks": markdown_table(["ranks", *MEASURES.values()], [*rows, ["2 less 1, same seed", *differences]])}


def figure(run: Run) -> Figure:
    """Results on two ranks against those on one rank, a point for each seed."""
    plot, (all_axes,) = panels(8, 3.8, 1, len(MEASURES), grid="both")
    for axes, (name, (one, two)) in zip(all_axes, results(run).items(), strict=True):
        axes.axline((one.mean(), one.mean()), slope=1, color=GREY, linewidth=0.8)
        axes.plot(one, two, "o", markersize=4, color=COLORS[0])
        axes.set(title=MEASURES[name], xlabel="one rank", ylabel="two ranks")
    return plot


EXPERIMENT = Experiment(
    folder="neural/ranks",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[Option("--seeds", type=int, default=10, help="number of seeds (%(default)s if not given)")],
    settings={"epochs": 10, "sizes": {"num_sequences": 120, "length": 50}},
    quick={"seeds": 1, "epochs": 1, "sizes": {"num_sequences": 20, "length": 10}},
    quick_help="one seed, few and short trajectories, one epoch",
)

if __name__ == "__main__":
    run(EXPERIMENT)
