"""Tables 1, 2 and 3: cloned HMMs on two made-up languages whose best possible prediction is known exactly.

``python -m experiments.cloned.languages toy`` (Table 1; ``brackets`` for Table 2, ``shifted`` for Table 3)

For each language and each of 10 seeds, which draw data and starting values: our setting, the paper's with online and with batch EM, and an
overcomplete standard HMM. For Table 3 an LSTM instead, of 3 seeds, whose epoch is chosen on validation data drawn as the training data are and, as
in the paper, on such as the test data are. Where a setting has several starts, the one of the largest training likelihood is taken. Test data are as
many as training data, one run, its first symbol included; the optimum is what the true model of the training data gives on the same data.
``--methods`` runs some of them only.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from matplotlib.figure import Figure

from datamodules import BracketDataModule, ToyMachineDataModule
from datamodules.languages import LanguageDataModule, pieces
from experiments.records import Records, markdown_table
from lightning_hmm import HMM, ClonedHMM, Sequences, StandardHMM, fit, load
from lightning_hmm.models.baselines import RecurrentNet
from lightning_hmm.plots import COLOURS
from lightning_hmm.random import generator

SEEDS = 10
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
        data: what makes it.
        clones: the paper's, for each symbol.
        our_clones: for each symbol.
        ours: settings of our model.
        epochs: of online and of batch EM in our setting.
        most_epochs: of the paper's settings.
        within: bits of the optimum that we want to be in.
        paper: its bits by method.
        others: methods that are not in the paper's table.
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
    """One clone of signals and answers; noise has to carry them."""
    settings = {"start_concentration": 0.05, "discount": 0.5}
    return Language(f"k = {k}", (ToyMachineDataModule, {"k": k}), _carried(k, clones), _carried(k, 10), settings, (10, 10), 1000, 0.002, paper, ("long",))


def _carried(k: int, clones: int) -> list[int]:
    return [1] * 4 + [clones] * (4 * k - 2)


def _brackets(k: int, clones: int, our_clones: int, restarts: int, within: float, paper: dict[str, float]) -> Language:
    settings = {"start_concentration": 0.1, "discount": 0.8, "restarts": restarts}
    return Language(f"k = {k}", (BracketDataModule, {"k": k}), [clones] * 5, [our_clones] * 5, settings, (20, 10), 100, within, paper)


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


def make_model(method: str, language: Language, seed: int) -> tuple[HMM, int, float]:
    """The model, the most epochs, and the tolerance at which training stops."""
    num_symbols = len(language.clones)
    if method == "ours":
        online, batch = language.epochs
        options = {"sequences_per_update": 1, "online_epochs": online, "transition_pseudocount": 1e-6, **language.ours}
        return ClonedHMM(clones=language.our_clones, num_symbols=num_symbols, seed=seed, **options), online + batch, 0.0
    if method == "hmm":
        return StandardHMM(sum(language.clones), num_symbols, seed=seed, arithmetic="float32"), HMM_EPOCHS, 1e-6
    online_options = {} if method == "em" else {"discount": 0.9, "sequences_per_update": 1, "transition_pseudocount": 1e-10}
    model = ClonedHMM(clones=language.clones, num_symbols=num_symbols, seed=seed, **online_options)
    return model, language.most_epochs, 0.0 if method == "long" else 1e-6


def train_lstm(data: LanguageDataModule, seed: int, most_epochs: int, shifted: bool) -> tuple[RecurrentNet, int]:
    """Two layers of 100 units, as the paper's; the best epoch on validation data, with `shifted` of the test kind, and how many there were."""
    symbols = data.train_sequences.values
    streams = Sequences.from_lengths(symbols, pieces(len(symbols), -(-len(symbols) // LSTM_STREAMS)))  # read side by side
    validation, machine = data.val_sequences, data.test_machine
    if shifted:
        draws = torch.rand(data.val_length, dtype=torch.float64, generator=generator(seed, "validation of the test kind")).numpy()
        validation = Sequences.from_list([torch.from_numpy(machine.symbols[machine.draw(data.val_length, draws)])])
    model = RecurrentNet(100, num_symbols=data.num_symbols, num_layers=2, bptt_steps=50, learning_rate=5e-3, learning_rate_decay=0.97, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val/bits_per_symbol")
        patience = EarlyStopping("val/bits_per_symbol", patience=LSTM_PATIENCE)
        fit(model, streams, most_epochs, 0, val_sequences=validation, callbacks=[best, patience], enable_checkpointing=True)
        return load(best.best_model_path), model.trainer.current_epoch


def measure(method: str, language: Language, seed: int, most_epochs: int | None, length: int | None) -> dict[str, Any]:
    """Trains on data of that seed, and gives bits per symbol of training and test data beside the true model's."""
    kind, options = language.data
    data = kind(seed=seed, **options | ({} if length is None else {"length": length}))
    data.setup()
    begin = time.process_time()
    model: Any
    if method.startswith("lstm"):
        model, epochs = train_lstm(data, seed, most_epochs or LSTM_EPOCHS, method == "lstm_shifted")
    else:
        model, limit, tolerance = make_model(method, language, seed)
        fit(model, data.train_sequences, min(limit, most_epochs or limit), tolerance)
        epochs = model.trainer.current_epoch
    seconds = time.process_time() - begin
    bits = {part: bits_per_symbol(model, sequences) for part, sequences in {"train": data.train_sequences, "test": data.test_sequences}.items()}
    return {**bits, "exact": data.exact_bits("test"), "optimum": data.optimal_bits, "epochs": epochs, "seconds": round(seconds, 2)}


def bits_per_symbol(model: Any, sequences: Sequences) -> float:
    return -float(model.score(sequences).sum()) / sequences.num_steps / math.log(2)


def rows(records: Records, languages: list[Language], settings: dict[str, Any]) -> list[list[str]]:
    made = []
    for language in languages:
        for method, name in METHODS.items():
            found = records.where(language=language.name, method=method, **settings)
            if found:
                bits, above = np.array([one["test"] for one in found]), np.array([one["test"] - one["exact"] for one in found])
                reached = f"{int((above <= language.within).sum())} of {len(found)}"
                exact, epochs, seconds = (np.mean([one[what] for one in found]) for what in ("exact", "epochs", "seconds"))
                paper = f"{language.paper[method]:.3f}" if method in language.paper else ""
                size = {"ours": max(language.our_clones), "hmm": None, "lstm": None, "lstm_shifted": None}.get(method, max(language.clones))
                starts = language.ours.get("restarts", 1) if method == "ours" else 1
                numbers = [f"{bits.mean():.4f} ({bits.std():.4f})", paper, f"{exact:.4f}", reached]
                made.append([f"{language.name}, {name}", "" if size is None else str(size), str(starts), *numbers, f"{epochs:.0f}", f"{seconds:.1f}"])
    return made


def figure(records: Records, languages: list[Language], methods: list[str], settings: dict[str, Any]) -> Figure:
    """How far above the optimum each run ended."""
    plot = Figure(figsize=(2.4 + 1.9 * len(languages), 4), layout="constrained")
    axes = plot.subplots()
    for number, method in enumerate(methods):
        for place, language in enumerate(languages):
            above = [max(one["test"] - one["exact"], 1e-5) for one in records.where(language=language.name, method=method, **settings)]
            spread = place + (number - (len(methods) - 1) / 2) * 0.2 + np.linspace(-0.06, 0.06, max(len(above), 1))[: len(above)]
            axes.plot(spread, above, "o", markersize=4, color=COLOURS[number], label=METHODS[method] if place == 0 else None)
    for place, language in enumerate(languages):
        axes.plot([place - 0.45, place + 0.45], [language.within] * 2, color="#8C8C8C", linewidth=1, linestyle="--")
    axes.set_yscale("log")
    axes.set_xticks(range(len(languages)), [language.name for language in languages])
    axes.set_ylabel("bits per symbol above the true model")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    plot.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside upper center", ncols=2)
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="what the table shows, if not given")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, help="logs/experiments/cloned/<table> if not given")
    parser.add_argument("--quick", action="store_true", help="one seed, the first language, short data, few epochs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    languages, seeds, out = TABLES[args.table], args.seeds, args.out or Path("logs/experiments/cloned") / args.table
    most_epochs, length = None, None
    if args.quick:
        languages, seeds, most_epochs, length = languages[:1], 1, 3, 2000
    settings = {"most_epochs": most_epochs}
    records = Records(out / "records.jsonl")
    for language in languages:
        for method in args.methods or ["ours", *language.paper, *language.others]:
            for seed in range(min(seeds, LSTM_SEEDS) if method.startswith("lstm") else seeds):
                if not records.has(language=language.name, method=method, seed=seed, **settings):
                    found = measure(method, language, seed, most_epochs, length)
                    records.add(language=language.name, method=method, seed=seed, **settings, **found)
                    print(f"{language.name}, {METHODS[method]}, seed {seed}: {found['test']:.4f} ({found['exact']:.4f})", flush=True)
    methods = [method for method in METHODS if records.has(method=method, **settings)]
    reached = ", ".join(f"{language.within:g}" for language in {language.within: language for language in languages}.values())
    header = ["", "clones", "starts", "bits per symbol", "paper", "true model", f"within {reached}", "iterations", "seconds"]
    table = markdown_table(header, rows(records, languages, settings))
    (out / "table.md").write_text(table)
    figure(records, languages, methods, settings).savefig(out / "figure.png", dpi=150)
    print(table, f"Written to {out}: table.md, figure.png, records.jsonl.", sep="\n")


if __name__ == "__main__":
    main()
