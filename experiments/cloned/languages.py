"""Tables 1, 2 and 3: cloned HMMs on two artificial languages whose optimal prediction is known exactly.

``python -m experiments.cloned.languages toy`` (Table 1; ``brackets`` for Table 2, ``shifted`` for Table 3)

Each of 10 seeds draws data and initial parameters. The methods are our setting, the paper's setting with online and
with batch EM, and an overcomplete standard HMM. Table 3 has an LSTM instead, with 3 seeds, whose epoch is chosen on
validation data that are drawn like the training data and, as in the paper, on data that are drawn like the test data.
If a setting has several restarts, the one with the largest training likelihood is used. Test data are a single sequence
as long as the training data, including its first symbol. The optimum is the result of the true model of the training
data on the same data. ``--methods`` restricts the methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from matplotlib.figure import Figure

from datamodules import BracketDataModule, ToyMachineDataModule
from datamodules.languages import LanguageDataModule, pieces
from experiments.measures import Stopwatch, bits_per_symbol
from experiments.panels import GREY, legend, panel
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm import ClonedHMM, Sequences, StandardHMM, fit
from lightning_hmm.callbacks import KeepBest
from lightning_hmm.models.baselines import RecurrentNet
from lightning_hmm.models.sequence_model import SequenceModel
from lightning_hmm.plotting import COLORS
from lightning_hmm.random import generator

METHODS = {
    "ours": "online, then batch EM from a sparse start",
    "online": "the paper's online EM",
    "long": "the same without its stop, 1,000 iterations",
    "em": "the paper's batch EM",
    "hmm": "overcomplete HMM",
    "lstm": "LSTM, epoch chosen on data of the training kind",
    "lstm_shifted": "LSTM, epoch chosen on data of the test kind",
}
LSTM_SEEDS, LSTM_STREAMS, LSTM_EPOCHS, LSTM_PATIENCE = 3, 50, 150, 20
HMM_EPOCHS = 50
SHIFTED = {
    "start": [15 / 19, 4 / 19],
    "inside": [15 / 24, 4 / 24, 5 / 24],
    "test_start": [4 / 19, 15 / 19],
    "test_inside": [4 / 24, 15 / 24, 5 / 24],
}


class Language(NamedTuple):
    """A row of a table.

    Attributes:
        name: Name in the table.
        data: Data module and its options.
        clones: Number of clones of each symbol in the paper's settings.
        our_clones: Number of clones of each symbol in our setting.
        ours: Options of the model in our setting.
        epochs: Epochs of online and of batch EM in our setting.
        most_epochs: Maximum number of epochs of the paper's settings.
        within: The table counts the seeds that come within so many bits of the optimum.
        paper: Bits per symbol in the paper, by method.
        others: Methods that are not in the paper's table.
    """

    name: str
    data: tuple[type[LanguageDataModule], dict[str, Any]]
    clones: list[int]
    our_clones: list[int]
    ours: dict[str, Any]
    epochs: tuple[int, int]
    most_epochs: int
    within: float
    paper: dict[str, float]
    others: tuple[str, ...] = ()


def _toy(k: int, clones: int, paper: dict[str, float]) -> Language:
    """The toy machine. Signals and answers have one clone; the clones of the noise symbols have to carry the signal."""
    settings = {"start_concentration": 0.05, "discount": 0.5}
    data = (ToyMachineDataModule, {"k": k})
    counts = _carried(k, clones), _carried(k, 10)
    return Language(f"k = {k}", data, *counts, settings, (10, 10), 1000, 0.002, paper, ("long",))


def _carried(k: int, clones: int) -> list[int]:
    return [1] * 4 + [clones] * (4 * k - 2)


def _brackets(k: int, clones: int, our_clones: int, restarts: int, within: float, paper: dict[str, float]) -> Language:
    settings = {"start_concentration": 0.1, "discount": 0.8, "restarts": restarts}
    data = (BracketDataModule, {"k": k})
    return Language(f"k = {k}", data, [clones] * 5, [our_clones] * 5, settings, (20, 10), 100, within, paper)


TABLES = {
    "toy": [
        _toy(2, 2, {"online": 0.502, "em": 0.502, "hmm": 0.657}),
        _toy(3, 2, {"online": 0.446, "em": 0.556, "hmm": 0.556}),
        _toy(4, 3, {"online": 0.418, "em": 0.500, "hmm": 0.500}),
        _toy(5, 4, {"online": 0.428, "em": 0.467, "hmm": 0.467}),
    ],
    "brackets": [
        _brackets(2, 6, 6, 2, 0.002, {"online": 1.054, "em": 1.053, "hmm": 1.178}),
        _brackets(3, 20, 20, 6, 0.006, {"online": 1.134, "em": 1.172, "hmm": 1.384}),
        _brackets(4, 100, 40, 2, 0.025, {"online": 1.240, "em": 1.191, "hmm": 1.500}),
    ],
    "shifted": [
        Language(
            "toy, k = 2",
            (ToyMachineDataModule, {"k": 2, "alpha": [0.9, 0.1], "length": 59_559}),
            _carried(2, 2),
            _carried(2, 10),
            {"start_concentration": 0.05, "discount": 0.9, "restarts": 4},
            (20, 10),
            400,
            0.002,
            {"online": 0.512, "lstm": 0.535},
        ),
        Language(
            "brackets, k = 2",
            (BracketDataModule, {"k": 2, **SHIFTED}),
            [4] * 5,
            [6] * 5,
            {"start_concentration": 0.1, "discount": 0.9, "restarts": 4},
            (20, 10),
            100,
            0.02,
            {"online": 1.191, "lstm_shifted": 1.211},
            ("lstm",),
        ),
    ],
}


def make_model(method: str, language: Language, seed: int) -> tuple[SequenceModel, int, float]:
    """Returns the model, its maximum number of epochs, and the tolerance at which training stops."""
    num_symbols = len(language.clones)
    options: dict[str, Any]
    if method == "ours":
        online, batch = language.epochs
        options = {"sequences_per_update": 1, "online_epochs": online, "transition_pseudocount": 1e-6, **language.ours}
        return ClonedHMM(clones=language.our_clones, num_symbols=num_symbols, seed=seed, **options), online + batch, 0.0
    if method == "hmm":
        return StandardHMM(sum(language.clones), num_symbols, seed=seed, arithmetic="float32"), HMM_EPOCHS, 1e-6
    options = {} if method == "em" else {"discount": 0.9, "sequences_per_update": 1, "transition_pseudocount": 1e-10}
    model = ClonedHMM(clones=language.clones, num_symbols=num_symbols, seed=seed, **options)
    return model, language.most_epochs, 0.0 if method == "long" else 1e-6


def train_lstm(data: LanguageDataModule, seed: int, most_epochs: int, shifted: bool) -> tuple[RecurrentNet, int]:
    """Trains two layers of 100 units, as in the paper. Returns the best epoch and the number of epochs.

    Args:
        data: The language.
        seed: Seed for the initial parameters and the validation data.
        most_epochs: Maximum number of epochs.
        shifted: Whether the validation data are drawn like the test data.
    """
    symbols = data.train_sequences.values
    streams = Sequences.from_lengths(symbols, pieces(len(symbols), -(-len(symbols) // LSTM_STREAMS)))  # one batch
    validation, machine = data.val_sequences, data.test_machine
    if shifted:
        random = generator(seed, "validation of the test kind")
        draws = torch.rand(data.val_length, dtype=torch.float64, generator=random).numpy()
        validation = Sequences.from_list([torch.from_numpy(machine.symbols[machine.draw(data.val_length, draws)])])
    rates: dict[str, Any] = {"learning_rate": 5e-3, "learning_rate_decay": 0.97}
    model = RecurrentNet(100, num_symbols=data.num_symbols, num_layers=2, bptt_steps=50, seed=seed, **rates)
    monitor = "val/bits_per_symbol"
    callbacks = [KeepBest(monitor), EarlyStopping(monitor, patience=LSTM_PATIENCE)]
    fit(model, streams, most_epochs, 0, val_sequences=validation, callbacks=callbacks)
    return model, model.trainer.current_epoch


def cases(run: Run) -> Iterator[Case]:
    for language in run.tables[run.table]:
        for method in run.methods or ["ours", *language.paper, *language.others]:
            for seed in range(min(run.seeds, LSTM_SEEDS) if method.startswith("lstm") else run.seeds):
                yield {"language": language.name, "method": method, "seed": seed, "most_epochs": run.most_epochs}


def compute(run: Run, case: Case) -> dict[str, Any]:
    """Trains on data of the seed; returns bits per symbol of training and test data and those of the true model."""
    method, seed = case["method"], case["seed"]
    language = next(language for language in run.tables[run.table] if language.name == case["language"])
    kind, options = language.data
    data = kind(seed=seed, **options | run.sizes)
    data.setup()
    model: Any
    with Stopwatch() as watch:
        if method.startswith("lstm"):
            model, epochs = train_lstm(data, seed, run.most_epochs or LSTM_EPOCHS, method == "lstm_shifted")
        else:
            model, limit, tolerance = make_model(method, language, seed)
            fit(model, data.train_sequences, min(limit, run.most_epochs or limit), tolerance)
            epochs = model.trainer.current_epoch
    return {
        "train": bits_per_symbol(model, data.train_sequences),
        "test": bits_per_symbol(model, data.test_sequences),
        "exact": data.exact_bits("test"),
        "optimum": data.optimal_bits,
        "epochs": epochs,
        "seconds": round(watch.seconds, 2),
    }


def row(language: Language, method: str, found: list[dict[str, Any]]) -> list[str]:
    bits, above = np.array([one["test"] for one in found]), np.array([one["test"] - one["exact"] for one in found])
    exact, epochs, seconds = (np.mean([one[what] for one in found]) for what in ("exact", "epochs", "seconds"))
    clones = "" if method in ("hmm", "lstm", "lstm_shifted") else str(max(language.clones))
    starts = 1
    if method == "ours":
        clones, starts = str(max(language.our_clones)), language.ours.get("restarts", 1)
    return [
        f"{language.name}, {METHODS[method]}",
        clones,
        str(starts),
        f"{bits.mean():.4f} ({bits.std():.4f})",
        f"{language.paper[method]:.3f}" if method in language.paper else "",
        f"{exact:.4f}",
        f"{int((above <= language.within).sum())} of {len(found)}",
        f"{epochs:.0f}",
        f"{seconds:.1f}",
    ]


def table(run: Run) -> str:
    rows = []
    for language in run.tables[run.table]:
        for method in METHODS:
            found = run.records.where(language=language.name, method=method, most_epochs=run.most_epochs)
            if found:
                rows.append(row(language, method, found))
    within = ", ".join(f"{bits:g}" for bits in dict.fromkeys(language.within for language in run.tables[run.table]))
    numbers = ["bits per symbol", "paper", "true model", f"within {within}", "iterations", "seconds"]
    return markdown_table(["", "clones", "starts", *numbers], rows)


def figure(run: Run) -> Figure:
    """The distance of each run from the optimum."""
    languages, settings = run.tables[run.table], {"most_epochs": run.most_epochs}
    methods = [method for method in METHODS if run.records.has(method=method, **settings)]
    plot, axes = panel(2.4 + 1.9 * len(languages), 4, grid="y")
    for number, method in enumerate(methods):
        for place, language in enumerate(languages):
            found = run.records.where(language=language.name, method=method, **settings)
            above = [max(one["test"] - one["exact"], 1e-5) for one in found]
            spread = np.linspace(-0.06, 0.06, max(len(above), 1))[: len(above)]
            places = place + (number - (len(methods) - 1) / 2) * 0.2 + spread
            label = METHODS[method] if place == 0 else None
            axes.plot(places, above, "o", markersize=4, color=COLORS[number], label=label)
    for place, language in enumerate(languages):
        axes.plot([place - 0.45, place + 0.45], [language.within] * 2, color=GREY, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(languages)), [language.name for language in languages])
    axes.set(yscale="log", ylabel="bits per symbol above the true model")
    legend(axes, outside="upper center", columns=2)
    return plot


EXPERIMENT = Experiment(
    folder=lambda run: f"cloned/{run.table}",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        Option("table", choices=list(TABLES), help="the table to compute"),
        Option("--methods", nargs="+", choices=list(METHODS), help="methods to run (those of the table if not given)"),
        Option("--seeds", type=int, default=10, help="number of seeds (%(default)s if not given)"),
    ],
    settings={"tables": TABLES, "most_epochs": None, "sizes": {}},
    quick={
        "tables": {name: languages[:1] for name, languages in TABLES.items()},
        "seeds": 1,
        "most_epochs": 3,
        "sizes": {"length": 2000},
    },
    quick_help="one seed, the first language, short data, few epochs",
)

if __name__ == "__main__":
    run(EXPERIMENT)
