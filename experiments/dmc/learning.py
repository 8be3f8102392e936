"""What the learning curves and the table of N against K share: three data sets, and runs of EM that note the likelihood of held-out data."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from datamodules import AccelerometerDataModule, SyntheticDataModule
from datamodules.base import SequenceDataModule
from experiments.records import Records
from lightning_hmm import DMCHMM, Sequences, StandardHMM, fit

DATA = {"friendly": "DMC-friendly", "anti": "anti-DMC", "accelerometer": "accelerometer"}
TRANSITIONS = {"friendly": "mostly_constant", "anti": "graded"}
POINTS = {"synthetic": (20_000, 5_000, 5_000), "accelerometer": (10_000, 4_000, 4_720)}  # for training, validation, test
QUICK_POINTS = {"synthetic": (400, 100, 100), "accelerometer": (900, 270, 270)}
MINUTES = 24 * 60
SEEDS = 5


def add_options(parser: argparse.ArgumentParser, folder: str, quick: str) -> None:
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--path", help="a table with times for the accelerometer, looked up under $LIGHTNING_HMM_DATA too; drawn days if not given")
    parser.add_argument("--separation", type=float, default=3.0, help="distance of neighbouring centres of the synthetic data in standard deviations")
    parser.add_argument("--truth", type=int, default=0, help="seed of the synthetic data and their model, or of the drawn days")
    parser.add_argument("--criterion", choices=["window", "largest"], default="window", help="what EM keeps of a row; the paper's is largest")
    parser.add_argument("--start", choices=["even", "random"], default="even", help="of the transitions: all alike, or drawn")
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/dmc") / folder)
    parser.add_argument("--quick", action="store_true", help=quick)


def data_settings(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What tells data apart in the records."""
    points = list(points_of(name, args))
    if name == "accelerometer":
        return {"data": name, "points": points, "file": args.path and Path(args.path).name, "truth": None if args.path else args.truth}
    return {"data": name, "points": points, "separation": args.separation, "truth": args.truth}


def points_of(name: str, args: argparse.Namespace) -> tuple[int, int, int]:
    return (QUICK_POINTS if args.quick else POINTS)["accelerometer" if name == "accelerometer" else "synthetic"]


def make_data(name: str, args: argparse.Namespace) -> SequenceDataModule:
    """Synthetic data are of sequences as long as the validation part; a recording is one sequence, cut along time."""
    train, val, test = points_of(name, args)
    total = train + val + test
    fractions = {"val_fraction": (val + 0.5) / total, "test_fraction": (test + 0.5) / total, "seed": args.truth}  # half a point more, since rounded down
    data: SequenceDataModule
    if name == "accelerometer":
        data = AccelerometerDataModule(path=args.path, num_steps=total, days=-(-total // MINUTES), **fractions)
    else:
        shape = {"num_sequences": total // val, "length": val, "num_states": 20, "num_features": 2}
        truth = {"layout": "grid", "separation": args.separation, "transitions": TRANSITIONS[name], "concentration": 1.0}
        data = SyntheticDataModule(emission="gaussian", **shape, **truth, **fractions)
    data.setup()
    return data


def true_score(data: SequenceDataModule) -> float | None:
    """The log-likelihood of the test data under the model that they were drawn from, if that is an HMM."""
    if not isinstance(data, SyntheticDataModule):
        return None
    model = StandardHMM(data.num_states, emission="gaussian", num_features=data.num_features)
    model.set_parameters(data.initial_probs, data.transition_probs, emission={"mean": data.means, "variance": data.variances})
    return float(model.score(data.test_sequences).sum())


def make_model(num_states: int, num_kept: int | None, num_features: int | None, seed: int, criterion: Any, start: str) -> StandardHMM:
    """`num_kept` of ``None`` is the regular HMM. The means start from k-means, by `seed`, alike for all models of one size."""
    sizes: dict[str, Any] = {"num_states": num_states, "emission": "gaussian", "num_features": num_features, "seed": seed}
    even = 1 / num_states
    if num_kept is None:
        model = StandardHMM(**sizes)
        return model if start == "random" else model.set_parameters(transition=torch.full((num_states, num_states), even, dtype=torch.float64))
    model = DMCHMM(num_kept=num_kept, criterion=criterion, **sizes)
    if start == "even":
        model.set_parameters(indices=torch.arange(num_kept).repeat(num_states, 1), values=torch.full((num_states, num_kept), even))
    return model


class HeldOut(Callback):
    """Notes the log-likelihoods of validation and test data, before training and after each epoch; ends it when the former has not risen for some.

    Args:
        val, test: the data.
        patience: epochs without a higher validation likelihood after which training ends; ``None`` for never.
    """

    def __init__(self, val: Sequences, test: Sequences, patience: int | None) -> None:
        self.val, self.test, self.patience = val, test, patience
        self.scores: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(pl_module)
        if self.patience is not None and len(self.scores) - 1 - self.best >= self.patience:
            trainer.should_stop = True

    def _note(self, model: Any) -> None:
        self.scores.append((float(model.score(self.val).sum()), float(model.score(self.test).sum())))

    @property
    def best(self) -> int:
        """The epoch after which the validation data were most probable."""
        return int(np.argmax([val for val, _ in self.scores]))


def run(model: StandardHMM, data: SequenceDataModule, epochs: int, patience: int | None = None) -> dict[str, Any]:
    """Trains; gives the test likelihoods of all iterations, both likelihoods of the iteration that validation chose, and seconds of processor time."""
    held_out = HeldOut(data.val_sequences, data.test_sequences, patience)
    begin = time.process_time()
    fit(model, data.train_sequences, max_epochs=epochs, tolerance=0, callbacks=[held_out])
    seconds = time.process_time() - begin
    val, test = held_out.scores[held_out.best]
    curve = [round(score, 3) for _, score in held_out.scores]
    return {"iterations": len(curve) - 1, "best": held_out.best, "val": round(val, 3), "test": round(test, 3), "seconds": round(seconds, 2), "curve": curve}


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over the seeds."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def collect(records: Records, models: dict[str, tuple[int, int | None]], seeds: int, epochs: int, patience: int | None, args: argparse.Namespace) -> None:
    """Runs what is not in the records yet: every model on every data set, seed by seed."""
    for name in args.data:
        data = make_data(name, args)
        if not records.has(model="truth", **data_settings(name, args)):
            records.add(model="truth", test=true_score(data), observed=float(data.test_sequences.num_observed()), **data_settings(name, args))
        for seed in range(seeds):
            for label, (num_states, num_kept) in models.items():
                settings = settings_of(name, num_states, num_kept, epochs, args)
                if not records.has(seed=seed, **settings):
                    model = make_model(num_states, num_kept, data.num_features, seed, args.criterion, args.start)
                    found = run(model, data, epochs, patience)
                    records.add(seed=seed, **settings, **found)
                    chosen = f"{found['test']:.1f} after {found['best']} of {found['iterations']} iterations"
                    print(f"{DATA[name]}, seed {seed}, {label}: {chosen}, {found['seconds']:.0f} s of processor time", flush=True)


def settings_of(name: str, num_states: int, num_kept: int | None, epochs: int, args: argparse.Namespace) -> dict[str, Any]:
    """What a run depends on beside its seed; a choice of what to keep is only where there is one."""
    chooses = num_kept is not None and 0 < num_kept < num_states - 1
    settings = {"model": "hmm", "n": num_states, "k": num_kept, "epochs": epochs, "start": args.start, "criterion": args.criterion if chooses else None}
    return {**settings, **data_settings(name, args)}


def truth(records: Records, name: str, args: argparse.Namespace) -> tuple[float, float | None]:
    """How many points of the test data are observed, and the log-likelihood of these under the truth, if that is known."""
    (found,) = records.where(model="truth", **data_settings(name, args))
    return found["observed"], found["test"]
