"""Figures 4, 5 and 6: dense and standard HMMs on synthetic sequences, proteins and part-of-speech tags.

``python -m experiments.dense.sequences synthetic`` (or ``protein``, ``pos``; ``--path`` for real files, synthetic data
otherwise)

For each number of states n and vector length l, and each of 10 runs with data or splits of their own, these models are
compared: the standard HMM, the standard HMM with as many degrees of freedom as the DenseHMM, and the DenseHMM with each
of its objectives. Each model has 4 restarts, of which the best on the training data is tested. Tables and figures show
medians and quartiles over the runs. For real data, the deviations of the pairs in the training half and of independent
symbols are printed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from datamodules import POSDataModule, ProteinDataModule, SyntheticDataModule
from datamodules.base import SequenceDataModule
from experiments.measures import Stopwatch, quartiles
from experiments.panels import error_bars, legend, panels
from experiments.records import markdown_table
from experiments.run import QUIET_TRAINER, Case, Experiment, Option, Run, run
from lightning_hmm import HMM, DenseHMM, StandardHMM
from lightning_hmm.callbacks import CooccurrenceReport
from lightning_hmm.inference.cooccurrence import pair_counts
from lightning_hmm.models import fair_num_states
from lightning_hmm.plotting import COLORS
from lightning_hmm.training import quiet_lightning

STARTS = 4
EPOCHS = 100
EPOCHS_LIKELIHOOD = 400
# For `pos`, chosen on data held out of the training halves of two splits that no run has.
TAGS_EPOCHS, TAGS_LEARNING_RATE = 300, 0.1
MEASURES = ("cooccurrence_mad_analytic", "cooccurrence_mad_sampled", "nll_per_symbol", "nll_normalised")
NAMES = {
    "standard": "standard",
    "fair": "standard, fair",
    "em": "dense, EM",
    "direct": "dense, direct",
    "direct, pi constant": "dense, direct, pi constant",
    "direct, from data": "dense, direct, from data",
    "likelihood": "dense, likelihood",
}
ONLY_SYNTHETIC = ("direct, pi constant", "direct, from data")
LEVELS = ("training half", "independent symbols")


@lru_cache(maxsize=1)
def make_data(run: Run, num_states: int, seed: int) -> SequenceDataModule:
    """Returns the data of a run. Synthetic data have as many symbols as states; real data differ by their split."""
    halves: dict[str, Any] = {"seed": seed, "val_fraction": 0.0, "test_fraction": 0.5}
    if run.data == "synthetic":
        sizes: dict[str, Any] = {
            "num_states": num_states,
            "num_symbols": num_states,
            "num_sequences": 20,
            "length": 200,
        }
        return SyntheticDataModule(**sizes, concentration=0.1, every_symbol=True, **halves)
    given = {name: value for name, value in cleaning(run).items() if value is not None}
    return {"protein": ProteinDataModule, "pos": POSDataModule}[run.data](path=run.path, **given, **halves)


def cleaning(run: Run) -> dict[str, Any]:
    """Returns the options of real data, ``None`` for the paper's values."""
    return {} if run.data == "synthetic" else {"max_length": run.max_length, "rare_fraction": run.rare_fraction}


def make_model(name: str, kind: str, num_states: int, length: int, num_symbols: int, seed: int) -> HMM:
    common: dict[str, Any] = {"num_symbols": num_symbols, "seed": seed, "restarts": STARTS}
    if name in ("standard", "fair"):
        states = num_states if name == "standard" else fair_num_states(num_states, num_symbols, length)
        return StandardHMM(states, **common)
    options: dict[str, Any] = {"objective": name}  # "em" or "likelihood"
    if name == "em" and kind == "pos":
        options["learning_rate"] = TAGS_LEARNING_RATE
    elif name.startswith("direct"):
        truth = kind == "synthetic" and name != "direct, from data"
        options = {"objective": "cooccurrence", "target": "truth" if truth else "data"}
        options["differentiate_stationary"] = name != "direct, pi constant"
    return DenseHMM(num_states, embedding_dim=length, **common, **options)


def measure(model: HMM, data: SequenceDataModule, epochs: int) -> dict[str, float]:
    """Trains and tests; returns the measures and the seconds of processor time of training."""
    with quiet_lightning(announcements=False):
        trainer = Trainer(max_epochs=epochs, callbacks=[CooccurrenceReport()], **QUIET_TRAINER)
        with Stopwatch() as watch:
            trainer.fit(model, datamodule=data)
        (found,) = trainer.test(model, datamodule=data, verbose=False)
    return {name: found[f"test/{name}"] for name in MEASURES} | {"seconds": round(watch.seconds, 2)}


def deviation(level: str, data: SequenceDataModule) -> float:
    """Returns the deviation from the pair frequencies of the test half.

    Args:
        level: ``"training half"`` for the pairs of the training half, ``"independent symbols"`` for those of
            independent symbols with the frequencies of the training half.
        data: The data.
    """
    assert data.num_symbols is not None
    data.setup()
    train, test = (pair_counts(part, data.num_symbols) for part in (data.train_sequences, data.test_sequences))
    train, test = train / train.sum(), test / test.sum()
    pairs = train if level == "training half" else torch.outer(train.sum(1), train.sum(0))
    return float((pairs - test).abs().mean())


def models_of(run: Run) -> list[str]:
    return [name for name in NAMES if run.data == "synthetic" or name not in ONLY_SYNTHETIC]


def pairs_of(run: Run) -> list[tuple[int, int]]:
    return [(n, length) for n, lengths in run.grid.items() for length in lengths]


def settings_of(run: Run, name: str, num_states: int, length: int) -> dict[str, Any]:
    """Returns the settings of a record except for the run. The standard HMM on real data does not depend on l."""
    epochs = (
        EPOCHS_LIKELIHOOD if name == "likelihood" else TAGS_EPOCHS if name == "em" and run.data == "pos" else EPOCHS
    )
    alike = name == "standard" and run.data != "synthetic"
    sizes = {"n": num_states, "l": 0 if alike else length, "epochs": run.epochs or epochs}
    return {"model": name, **sizes, **cleaning(run)}


def cases(run: Run) -> Iterator[Case]:
    for number in range(run.runs):
        if run.data != "synthetic":
            yield from ({"run": number, "model": level, **cleaning(run)} for level in LEVELS)
        for n, length in pairs_of(run):
            for name in models_of(run):
                yield {"run": number, **settings_of(run, name, n, length)}


def compute(run: Run, case: Case) -> dict[str, Any]:
    number, name = case["run"], case["model"]
    if name in LEVELS:
        data = make_data(run, 0, number)
        return {"m": data.num_symbols, "cooccurrence_mad_analytic": deviation(name, data)}
    synthetic = run.data == "synthetic"
    data = make_data(run, case["n"], 1000 * case["l"] + number) if synthetic else make_data(run, 0, number)
    assert data.num_symbols is not None
    model = make_model(name, run.data, case["n"], case["l"], data.num_symbols, number)
    return {"m": data.num_symbols, **measure(model, data, case["epochs"])}


def table(run: Run) -> dict[str, str]:
    """One table for each measure, and the levels that real data are compared with."""
    made = {}
    for measure_name in MEASURES:
        # Real data have more symbols, so their pairs are rarer.
        digits = 4 if "mad" not in measure_name else 5 if run.data == "synthetic" else 6
        rows = []
        for n, length in pairs_of(run):
            found = [run.records.values(measure_name, **settings_of(run, name, n, length)) for name in models_of(run)]
            cells = ["{:.{d}f} ({:.{d}f}/{:.{d}f})".format(*quartiles(values), d=digits) for values in found]
            rows.append([f"{n}, {length}", *cells])
        made[measure_name] = markdown_table(["n, l", *(NAMES[name] for name in models_of(run))], rows)
    if run.data != "synthetic":
        levels = {name: run.records.values(MEASURES[0], model=name, **cleaning(run)) for name in LEVELS}
        rows = [[name, f"{np.median(values):.6f}"] for name, values in levels.items()]
        made["levels"] = markdown_table(["pairs of", "median deviation from the test half"], rows)
    return made


def figure(run: Run) -> Figure:
    plot, (all_axes,) = panels(11, 4.6, 1, 2, grid="y")
    pairs, models = pairs_of(run), [name for name in models_of(run) if name not in ONLY_SYNTHETIC]
    titles = {
        "cooccurrence_mad_sampled": "Co-occurrence deviation (sampled)",
        "nll_per_symbol": "Negative log-likelihood per symbol (nats)",
    }
    for axes, (measure_name, title) in zip(all_axes, titles.items(), strict=True):
        for number, name in enumerate(models):
            values = [run.records.values(measure_name, **settings_of(run, name, *pair)) for pair in pairs]
            median, low, high = zip(*map(quartiles, values), strict=True)
            places = np.arange(len(pairs)) + (number - (len(models) - 1) / 2) * 0.11
            style: dict[str, Any] = {"color": COLORS[number], "linestyle": "none"}
            error_bars(axes, places.tolist(), median, low, high, label=NAMES[name], **style)
        axes.set_xticks(range(len(pairs)), [f"{n}, {length}" for n, length in pairs])
        axes.set(title=title, xlabel="number of states n, length of the vectors l")
        axes.set_ylim(bottom=0 if "mad" in measure_name else None)
    legend(all_axes[-1])
    return plot


EXPERIMENT = Experiment(
    folder=lambda run: f"dense/{run.data}",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        Option("data", choices=["synthetic", "protein", "pos"], help="the data"),
        Option("--path", help="FASTA or tag file, also looked up in $LIGHTNING_HMM_DATA (synthetic data if not given)"),
        Option("--max-length", type=int, help="length at which sequences are cut (the paper's if not given)"),
        Option(
            "--rare-fraction",
            type=float,
            help="joint frequency of the symbols that are merged (the paper's if not given)",
        ),
    ],
    settings={"grid": {3: (1, 2, 3), 5: (2, 3, 5), 10: (2, 3, 5, 10)}, "runs": 10, "epochs": None},
    quick={"grid": {3: (1, 2)}, "runs": 1, "epochs": 2},
    quick_help="one run, n = 3, few epochs",
)

if __name__ == "__main__":
    run(EXPERIMENT)
