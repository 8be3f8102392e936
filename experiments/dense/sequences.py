"""Figures 4, 5 and 6: co-occurrence deviations and likelihoods of dense and standard HMMs on synthetic sequences, proteins and tags.

``python -m experiments.dense.sequences synthetic`` (or ``protein``, ``pos``; ``--path`` for real files, else drawn data)

For each number of states n and vector length l, and each of 10 runs with data or splits of their own: the standard HMM, the one with
the DenseHMM's degrees of freedom, and the DenseHMM by each of its objectives; each from 4 starts, of which the best on the training data
is tested. Medians and quartiles over the runs. For real data the deviations of the training half's own pairs and of independent symbols are printed too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from datamodules import POSDataModule, ProteinDataModule, SyntheticDataModule
from datamodules.base import SequenceDataModule
from experiments.records import Records, markdown_table
from lightning_hmm import HMM, DenseHMM, StandardHMM
from lightning_hmm.callbacks import CooccurrenceReport
from lightning_hmm.inference.cooccurrence import pair_counts
from lightning_hmm.models import fair_num_states
from lightning_hmm.plots import COLOURS
from lightning_hmm.training import quiet_lightning

GRID = {3: (1, 2, 3), 5: (2, 3, 5), 10: (2, 3, 5, 10)}
RUNS = 10
STARTS = 4
EPOCHS = {"standard": 100, "fair": 100, "em": 100, "direct": 100, "direct, pi constant": 100, "direct, from data": 100, "likelihood": 400}
TAGS_EM: dict[str, Any] = {"epochs": 300, "learning_rate": 0.1}  # for `pos`; chosen on data held out of the training halves of two splits that no run has
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


def make_data(kind: str, num_states: int, run: int, path: str | None, options: dict[str, Any]) -> SequenceDataModule:
    """Data of a run. Synthetic ones have as many symbols as states; real ones differ by their split into halves."""
    halves = {"seed": run, "val_fraction": 0.0, "test_fraction": 0.5}
    if kind == "synthetic":
        sizes = {"num_states": num_states, "num_symbols": num_states, "num_sequences": 20, "length": 200}
        return SyntheticDataModule(**sizes, concentration=0.1, every_symbol=True, **halves)
    return {"protein": ProteinDataModule, "pos": POSDataModule}[kind](path=path, **options, **halves)


def make_model(name: str, kind: str, num_states: int, length: int, num_symbols: int, run: int) -> HMM:
    if name in ("standard", "fair"):
        return StandardHMM(num_states if name == "standard" else fair_num_states(num_states, num_symbols, length), num_symbols, seed=run, restarts=STARTS)
    sizes = {"num_states": num_states, "num_symbols": num_symbols, "embedding_dim": length, "seed": run, "restarts": STARTS}
    if name == "em":
        return DenseHMM(objective="em", learning_rate=TAGS_EM["learning_rate"] if kind == "pos" else None, **sizes)
    if name == "likelihood":
        return DenseHMM(objective="likelihood", **sizes)
    target = "truth" if kind == "synthetic" and name != "direct, from data" else "data"
    return DenseHMM(objective="cooccurrence", target=target, differentiate_stationary=name != "direct, pi constant", **sizes)


def measure(model: HMM, data: SequenceDataModule, epochs: int) -> dict[str, float]:
    """Trains, tests, and gives the measures and the seconds of processor time that training took."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with quiet_lightning(announcements=False):
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", devices=1, use_distributed_sampler=False, callbacks=[CooccurrenceReport()], **quiet)
        begin = time.process_time()
        trainer.fit(model, datamodule=data)
        seconds = time.process_time() - begin
        (found,) = trainer.test(model, datamodule=data, verbose=False)
    return {name: found[f"test/{name}"] for name in MEASURES} | {"seconds": round(seconds, 2)}


def levels(data: SequenceDataModule) -> dict[str, float]:
    """Deviations from the pair frequencies of the test half: of the training half's pairs, and of pairs of independent symbols with its frequencies."""
    assert data.num_symbols is not None
    train, test = (pair_counts(part, data.num_symbols) for part in (data.train_sequences, data.test_sequences))
    train, test = train / train.sum(), test / test.sum()
    pairs = {"training half": train, "independent symbols": torch.outer(train.sum(1), train.sum(0))}
    return {name: float((frequencies - test).abs().mean()) for name, frequencies in pairs.items()}


def settings_of(name: str, kind: str, num_states: int, length: int, num_symbols: int) -> dict[str, Any]:
    """What a result depends on beside the run; the standard HMM on real data does not depend on l."""
    return {"model": name, "n": num_states, "l": 0 if name == "standard" and kind != "synthetic" else length, "m": num_symbols, "epochs": EPOCHS[name]}


def all_runs(kind: str, runs: int, grid: dict[int, tuple[int, ...]]) -> Iterator[tuple[int, int, int]]:
    return ((run, n, length) for run in range(runs) for n, lengths in grid.items() for length in lengths)


def quartiles(records: Records, measure_name: str, **settings: Any) -> tuple[float, float, float, int]:
    found = [record[measure_name] for record in records.where(**settings)]
    low, median, high = np.quantile(found, [0.25, 0.5, 0.75])
    return float(median), float(low), float(high), len(found)


def figure(records: Records, kind: str, models: list[str], grid: dict[int, tuple[int, ...]], num_symbols: dict[int, int]) -> Figure:
    plot = Figure(figsize=(11, 4.6), layout="constrained")
    pairs = [(n, length) for n, lengths in grid.items() for length in lengths]
    titles = {"cooccurrence_mad_sampled": "Co-occurrence deviation (sampled)", "nll_per_symbol": "Negative log-likelihood per symbol (nats)"}
    for axes, (measure_name, title) in zip(plot.subplots(1, 2), titles.items(), strict=True):
        for number, name in enumerate(models):
            found = [quartiles(records, measure_name, **settings_of(name, kind, n, length, num_symbols[n])) for n, length in pairs]
            median, low, high = (np.array(column) for column in list(zip(*found, strict=True))[:3])
            place = np.arange(len(pairs)) + (number - (len(models) - 1) / 2) * 0.11
            axes.errorbar(place, median, [median - low, high - median], fmt="o", markersize=4, capsize=2, color=COLOURS[number], label=NAMES[name])
        axes.set_xticks(range(len(pairs)), [f"{n}, {length}" for n, length in pairs])
        axes.set(title=title, xlabel="number of states n, length of the vectors l")
        axes.set_ylim(bottom=0 if "mad" in measure_name else None)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    axes.legend(frameon=False, fontsize="small")
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=["synthetic", "protein", "pos"])
    parser.add_argument("--path", help="a FASTA or tag file, looked up under $LIGHTNING_HMM_DATA too; drawn data if not given")
    parser.add_argument("--max-length", type=int, help="where sequences are cut; the paper's value if not given")
    parser.add_argument("--rare-fraction", type=float, help="what the rarest symbols are together; the paper's value if not given")
    parser.add_argument("--out", type=Path, help="logs/experiments/dense/<data> if not given")
    parser.add_argument("--quick", action="store_true", help="one run, n = 3, few epochs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    grid, runs, out = GRID, RUNS, args.out or Path("logs/experiments/dense") / args.data
    if args.data == "pos":
        EPOCHS["em"] = TAGS_EM["epochs"]
    if args.quick:
        grid, runs = {3: (1, 2)}, 1
        EPOCHS.update(dict.fromkeys(EPOCHS, 2))
    options = {name: value for name, value in (("max_length", args.max_length), ("rare_fraction", args.rare_fraction)) if value is not None}
    models = [name for name in NAMES if args.data == "synthetic" or name not in ("direct, pi constant", "direct, from data")]
    records, num_symbols = Records(out / "records.jsonl"), {}
    for run, n, length in all_runs(args.data, runs, grid):
        data = make_data(args.data, n, 1000 * length + run if args.data == "synthetic" else run, args.path, options)
        assert data.num_symbols is not None
        num_symbols[n] = data.num_symbols
        if args.data != "synthetic" and not records.has(run=run, model="training half"):
            data.setup()
            for name, deviation in levels(data).items():
                records.add(run=run, model=name, m=data.num_symbols, cooccurrence_mad_analytic=deviation)
        for name in models:
            settings = settings_of(name, args.data, n, length, data.num_symbols)
            if not records.has(run=run, **settings):
                model = make_model(name, args.data, n, length, data.num_symbols, run)
                records.add(run=run, **settings, **measure(model, data, EPOCHS[name]))
        print(f"run {run}, n = {n}, l = {length}: done", flush=True)
    for name in ("training half", "independent symbols"):
        if found := [record["cooccurrence_mad_analytic"] for record in records.where(model=name)]:
            print(f"{name}: median deviation {np.median(found):.6f}")
    for measure_name in MEASURES:
        rows = []
        for n, lengths in grid.items():
            for length in lengths:
                found = [quartiles(records, measure_name, **settings_of(name, args.data, n, length, num_symbols[n])) for name in models]
                digits = 4 if "mad" not in measure_name else 5 if args.data == "synthetic" else 6  # real data have more symbols, and pairs are rarer
                rows.append([f"{n}, {length}", *(f"{median:.{digits}f} ({low:.{digits}f}/{high:.{digits}f})" for median, low, high, _ in found)])
        table = markdown_table(["n, l", *(NAMES[name] for name in models)], rows)
        (out / f"{measure_name}.md").write_text(table)
        print(measure_name, table, sep="\n\n")
    figure(records, args.data, [name for name in models if name not in ("direct, pi constant", "direct, from data")], grid, num_symbols).savefig(
        out / "figure.png", dpi=150
    )
    print(f"Written to {out}: a table for each measure, figure.png, records.jsonl.")


if __name__ == "__main__":
    main()
