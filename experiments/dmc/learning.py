"""The common part of `learning_curves` and `tradeoff`: three data sets, and EM with scores of held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from datamodules import AccelerometerDataModule, SyntheticDataModule
from datamodules.base import SequenceDataModule
from experiments.measures import Stopwatch
from experiments.run import Case, Experiment, Option, Run
from lightning_hmm import DMCHMM, Sequences, StandardHMM, fit

DATA = {"friendly": "DMC-friendly", "anti": "anti-DMC", "accelerometer": "accelerometer"}
TRANSITIONS = {"friendly": "mostly_constant", "anti": "graded"}
POINTS = {
    "synthetic": (20_000, 5_000, 5_000),
    "accelerometer": (10_000, 4_000, 4_720),
}  # for training, validation, test
QUICK_POINTS = {"synthetic": (400, 100, 100), "accelerometer": (900, 270, 270)}
MINUTES = 24 * 60
Models = Mapping[str, tuple[int, int | None]]  # number of states and of kept transitions, by the name in the table


def data_settings(run: Run, name: str) -> dict[str, Any]:
    """Returns the settings that identify data in the records."""
    points = list(points_of(run, name))
    if name == "accelerometer":
        file = run.path and Path(run.path).name
        return {"data": name, "points": points, "file": file, "truth": None if run.path else run.truth}
    return {"data": name, "points": points, "separation": run.separation, "truth": run.truth}


def points_of(run: Run, name: str) -> tuple[int, int, int]:
    return (QUICK_POINTS if run.quick else POINTS)["accelerometer" if name == "accelerometer" else "synthetic"]


@lru_cache(maxsize=1)
def make_data(run: Run, name: str) -> SequenceDataModule:
    """Returns synthetic sequences as long as the validation part, or a recording split along time."""
    train, val, test = points_of(run, name)
    total = train + val + test
    # Half a point is added because fractions are rounded down.
    fractions: dict[str, Any] = {
        "val_fraction": (val + 0.5) / total,
        "test_fraction": (test + 0.5) / total,
        "seed": run.truth,
    }
    data: SequenceDataModule
    if name == "accelerometer":
        data = AccelerometerDataModule(path=run.path, num_steps=total, days=-(-total // MINUTES), **fractions)
    else:
        shape: dict[str, Any] = {"num_sequences": total // val, "length": val, "num_states": 20, "num_features": 2}
        truth: dict[str, Any] = {"transitions": TRANSITIONS[name], "concentration": 1.0, "separation": run.separation}
        data = SyntheticDataModule(emission="gaussian", layout="grid", **shape, **truth, **fractions)
    data.setup()
    return data


def true_score(data: SequenceDataModule) -> float | None:
    """Returns the log-likelihood of the test data under the model that they were drawn from, if that is an HMM."""
    if not isinstance(data, SyntheticDataModule):
        return None
    model = StandardHMM(data.num_states, emission="gaussian", num_features=data.num_features)
    emission = {"mean": data.means, "variance": data.variances}
    model.set_parameters(data.initial_probs, data.transition_probs, emission=emission)
    return float(model.score(data.test_sequences).sum())


def make_model(
    run: Run, num_states: int, num_kept: int | None, num_features: int | None, seed: int
) -> StandardHMM | DMCHMM:
    """Returns a DMC-HMM, or the regular HMM if `num_kept` is ``None``.

    The means are initialized by k-means with `seed`, which is the same for all models of one size.
    """
    options: dict[str, Any] = {"emission": "gaussian", "num_features": num_features, "seed": seed}
    even = 1 / num_states
    if num_kept is None:
        regular = StandardHMM(num_states, **options)
        if run.start == "even":
            regular.set_parameters(transition=torch.full((num_states, num_states), even, dtype=torch.float64))
        return regular
    model = DMCHMM(num_states, num_kept, criterion=run.criterion, **options)
    if run.start == "even":
        indices = torch.arange(num_kept).repeat(num_states, 1)
        model.set_parameters(indices=indices, values=torch.full((num_states, num_kept), even))
    return model


class HeldOut(Callback):
    """Scores validation and test data before training and after each epoch, and stops training early.

    Args:
        val: Validation data.
        test: Test data.
        patience: Number of epochs without a higher validation likelihood after which training stops; ``None`` for
        never.
    """

    def __init__(self, val: Sequences, test: Sequences, patience: int | None) -> None:
        self.val, self.test, self.patience = val, test, patience
        self.scores: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._score(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._score(pl_module)
        if self.patience is not None and len(self.scores) - 1 - self.best >= self.patience:
            trainer.should_stop = True

    def _score(self, model: Any) -> None:
        self.scores.append((float(model.score(self.val).sum()), float(model.score(self.test).sum())))

    @property
    def best(self) -> int:
        """The epoch after which the validation likelihood was largest."""
        return int(np.argmax([val for val, _ in self.scores]))


def train(
    model: StandardHMM | DMCHMM, data: SequenceDataModule, epochs: int, patience: int | None = None
) -> dict[str, Any]:
    """Trains; returns all test likelihoods, and both likelihoods of the iteration chosen on validation data."""
    held_out = HeldOut(data.val_sequences, data.test_sequences, patience)
    with Stopwatch() as watch:
        fit(model, data.train_sequences, max_epochs=epochs, tolerance=0, callbacks=[held_out])
    val, test = held_out.scores[held_out.best]
    curve = [round(score, 3) for _, score in held_out.scores]
    chosen = {"iterations": len(curve) - 1, "best": held_out.best, "val": round(val, 3), "test": round(test, 3)}
    return {**chosen, "seconds": round(watch.seconds, 2), "curve": curve}


def settings_of(run: Run, name: str, num_states: int, num_kept: int | None) -> dict[str, Any]:
    """Returns the settings of a record except for its seed. A criterion is named only where entries are chosen."""
    criterion = run.criterion if num_kept is not None and 0 < num_kept < num_states - 1 else None
    settings = {"model": "hmm", "n": num_states, "k": num_kept, "epochs": run.epochs, "start": run.start}
    return {**settings, "criterion": criterion, **data_settings(run, name)}


def cases(run: Run) -> Iterator[Case]:
    """Every model on every data set, seed by seed."""
    for name in run.data:
        yield {"model": "truth", **data_settings(run, name)}
        for seed in range(run.seeds):
            yield from ({"seed": seed, **settings_of(run, name, *size)} for size in run.models.values())


def compute(run: Run, case: Case) -> dict[str, Any]:
    data = make_data(run, case["data"])
    if case["model"] == "truth":
        return {"test": true_score(data), "observed": float(data.test_sequences.num_observed())}
    model = make_model(run, case["n"], case["k"], data.num_features, case["seed"])
    return train(model, data, run.epochs, run.patience)


def truth(run: Run, name: str) -> tuple[float, float | None]:
    """Returns the number of observed test points and their log-likelihood under the true model, if known."""
    (found,) = run.records.where(model="truth", **data_settings(run, name))
    return found["observed"], found["test"]


def learning_experiment(
    name: str,
    description: str,
    models: Models,
    table: Callable[[Run], str],
    figure: Callable[[Run], Figure],
    *,
    epochs: int,
    quick_epochs: int,
    patience: int | None = None,
) -> Experiment:
    """Returns an experiment that trains these models on the three data sets."""
    looked_up = "also looked up in $LIGHTNING_HMM_DATA"
    return Experiment(
        folder=f"dmc/{name}",
        description=description,
        cases=cases,
        compute=compute,
        table=table,
        figure=figure,
        options=[
            Option("--data", nargs="+", choices=list(DATA), default=list(DATA), help="data sets (all if not given)"),
            Option("--path", help=f"accelerometer table with times, {looked_up} (synthetic days if not given)"),
            Option(
                "--separation", type=float, default=3.0, help="distance of neighboring centers in standard deviations"
            ),
            Option("--truth", type=int, default=0, help="seed for the synthetic data and their model"),
            Option("--criterion", choices=["window", "largest"], default="window", help="`largest` is the paper's"),
            Option("--start", choices=["even", "random"], default="even", help="initial transitions"),
        ],
        settings={"models": models, "seeds": 5, "epochs": epochs, "patience": patience},
        quick={"seeds": 1, "epochs": quick_epochs},
        quick_help=f"one start, {quick_epochs} iterations, 100 points to test on",
    )
