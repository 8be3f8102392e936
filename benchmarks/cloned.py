"""Speed of the cloned HMM: an EM iteration and scoring, compared with its authors' code and with an LSTM.

    python benchmarks/cloned.py [--quick] [--peer path/to/chmm_actions.py] [--out docs/benchmarks]
    python benchmarks/cloned.py --parts forward --path milton-paradise.txt --checkpoint model.ckpt
    python benchmarks/cloned.py --parts large --path carroll-alice.txt

The peer is one file of vicariousinc/naturecomm_cscg, which is not on PyPI; without `--peer` it is skipped. The part
`forward` trains a model if the checkpoint does not exist. Both sides iterate on the same symbols from the same initial
parameters, and their new transitions must agree before anything is timed. The sides take turns, and the best round
counts. Run it on an idle machine. The load average before each part, the threads and the rounds are written with the
results.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib.util
import io
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baum_welch import peak_bytes
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules import TextDataModule, ToyMachineDataModule
from lightning_hmm import BaumWelch, ClonedHMM, Sequences, fit, inference
from lightning_hmm.callbacks import Pruning
from lightning_hmm.models.contexts import BackOff, Contexts

SETTINGS = ((20, 30_000), (100, 30_000), (400, 5_000))  # clones a symbol, steps; 27 symbols
NUM_SYMBOLS = 27
STATES, EM_ITERATIONS = 30_000, 60  # of the parts `forward` and `large`
_NEGLIGIBLE = 1e-4  # probability of a transition that is pruned, in the part `large`
CHUNKS = 64  # sequences that the same symbols are cut into, for the column that says so


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def race(contestants: dict[str, Callable[[], Any]], rounds: int, **prepare: Callable[[], Any]) -> dict[str, float]:
    """The best time of each in `rounds` rounds, after a warm-up; all take turns.

    A function in `prepare` is called before, untimed.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for n in range(rounds + 1):
        for name, call in contestants.items():
            prepare.get(name, lambda: None)()
            spent = seconds(call)
            if n > 0:
                times[name].append(spent)
    return {name: min(found) for name, found in times.items()}


@functools.cache
def peer_module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("chmm_actions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Peer:
    """One EM iteration of the authors' code, from a given start."""

    def __init__(self, path: str, symbols: np.ndarray, clones: int) -> None:
        self.symbols, self.actions = symbols, np.zeros(len(symbols), np.int64)
        self.model = peer_module(path).CHMM(
            np.full(NUM_SYMBOLS, clones, np.int64), self.symbols, self.actions, pseudocount=0.0, seed=0
        )
        self.start = self.model.T.copy()

    def reset(self) -> None:
        self.model.T = self.start.copy()

    def iterate(self) -> np.ndarray:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            self.model.learn_em_T(self.symbols, self.actions, n_iter=1, term_early=False)
        return self.model.T[0]


def iterations(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for clones, steps in [(5, 2_000)] if arguments.quick else SETTINGS:
        symbols = np.random.default_rng(0).integers(0, NUM_SYMBOLS, steps)
        model = ClonedHMM(clones=[clones] * NUM_SYMBOLS, num_symbols=NUM_SYMBOLS, pairs="all", arithmetic="float32")
        optimizer, layout = BaumWelch(model.distributions), model.layout
        transition = model.transition.probs.detach().view(-1)
        peer = None if arguments.peer is None else Peer(arguments.peer, symbols, clones)
        start = (
            torch.rand(layout.num_states, layout.num_states)
            if peer is None
            else torch.from_numpy(peer.start[0].astype(np.float32))
        )
        start = (start / start.sum(1, keepdim=True)).reshape(-1)
        transition.copy_(start)
        whole = Sequences.from_lengths(symbols, [steps])
        chunks = Sequences.from_lengths(symbols, [len(part) for part in np.array_split(symbols, CHUNKS)])

        @torch.no_grad()
        def iterate(data: Sequences, model=model, optimizer=optimizer) -> None:
            found = inference.e_step(*model.chain(0), model.evidence(0, data), data.offsets, dtype=torch.float32)
            optimizer.step(
                counts={"initial": [found.initial[None]], "transition": [found.counts[0][None]], "emission": []}
            )

        reset = functools.partial(transition.copy_, start)
        in_pieces = f"ours, {CHUNKS} sequences"
        contestants: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(iterate, whole),
            in_pieces: functools.partial(iterate, chunks),
        }
        prepare: dict[str, Callable[[], Any]] = {"ours": reset, in_pieces: reset}
        if peer is not None:
            iterate(whole)
            peer.reset()
            difference = np.abs(peer.iterate() - transition.reshape(layout.num_states, -1).numpy()).max()
            if difference > 1e-3:
                raise RuntimeError(
                    f"The new transitions must agree, but differ by {difference:.2g} with {clones} clones."
                )
            contestants["peer"], prepare["peer"] = peer.iterate, peer.reset
        rounds = 2 if arguments.quick else 7
        times = race(contestants, rounds, **prepare)
        row = {"clones": clones, "steps": steps, **times}
        if peer is not None:
            row["peer / ours"] = times["peer"] / times["ours"]
        row["rounds"] = rounds
        print(row, flush=True)
        rows.append(row)
    return rows


def trainer(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Epochs of `fit`, compared with the same work without Lightning."""
    rows = []
    rounds = 1 if arguments.quick else 3
    toy = ToyMachineDataModule(k=3, num_runs=300 if arguments.quick else None)
    text = TextDataModule()
    for name, data, options in (
        ("toy machine, batches of 400", toy, {"num_states": 28, "discount": 0.9, "sequences_per_update": 1}),
        (
            "text, batch EM",
            text,
            {"num_states": 100 if arguments.quick else 1000, "allocation": "frequency", "arithmetic": "float32"},
        ),
    ):
        data.setup()
        sequences = data.train_sequences[:20] if arguments.quick else data.train_sequences
        epochs = 2 if arguments.quick else 10 if name.startswith("text") else 1000

        def through_trainer(epochs: int, options=options, sequences=sequences, data=data) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit(ClonedHMM(num_symbols=data.num_symbols, **options), sequences, epochs, 0)

        @torch.no_grad()
        def bare(epochs: int, options=options, sequences=sequences, data=data) -> None:
            model = ClonedHMM(num_symbols=data.num_symbols, **options)
            model.initialize(sequences)
            if model.discount is None:
                for _ in range(epochs):
                    found = inference.e_step(*model.problem(sequences), dtype=model.message_dtype)
                    model.transition.maximize([found.counts[0][None]])
                return
            optimizer = BaumWelch(model.distributions, model.discount, model.frozen)
            for _ in range(epochs):
                optimizer.compiled_pass(sequences, 1, model.compiled_kernel)

        # The cost of starting is part of both times and cancels in the difference.
        times = {}
        for way, call in (("fit", through_trainer), ("bare", bare)):
            call(1)
            few, many = (
                min(seconds(lambda n=n, call=call: call(n)) for _ in range(rounds)) for n in (epochs // 2, epochs)
            )
            times[way] = (many - few) / (epochs - epochs // 2)
        rows.append({"what": name, **times, "fit / bare": times["fit"] / times["bare"], "rounds": rounds})
        print(rows[-1], flush=True)
    return rows


def trained(arguments: argparse.Namespace, data: TextDataModule) -> ClonedHMM:
    """Returns clones of contexts of three letters, trained until few transitions are left.

    They are joined with these contexts, so that every text is possible.
    """
    train, num_symbols = data.train_sequences, data.num_symbols
    assert num_symbols is not None
    contexts = Contexts(train, num_symbols, 3)
    model = ClonedHMM(
        max(len(contexts), 300 if arguments.quick else STATES),
        len(contexts),
        allocation="ngram",
        ngram_order=4,
        arithmetic="float32",
    )
    fit(model, contexts.encode(train), 2 if arguments.quick else EM_ITERATIONS, 0)
    return BackOff([model], train, num_symbols, contexts).joined(contexts, strength=1.0, returning=0.05)


@torch.no_grad()
def forward(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Times the scores of the test part of a text by our code and by a one-layer LSTM of 256 units.

    The LSTM is called once per symbol, and once with all symbols.
    """
    data = TextDataModule(arguments.path, val_fraction=0.0)
    data.setup()
    if arguments.checkpoint is not None and arguments.checkpoint.exists():
        model = ClonedHMM(**torch.load(arguments.checkpoint, weights_only=True)["options"])
        model.load_state_dict(torch.load(arguments.checkpoint, weights_only=True)["parameters"])
    else:
        model = trained(arguments, data)
        if arguments.checkpoint is not None:
            options = {"num_states": model.num_states, "num_symbols": data.num_symbols, "arithmetic": "float32"}
            torch.save({"options": options, "parameters": model.state_dict()}, arguments.checkpoint)
    symbols = data.test_sequences
    network, embedded = (
        torch.nn.LSTM(NUM_SYMBOLS, 256),
        torch.nn.functional.one_hot(symbols.values, NUM_SYMBOLS).float(),
    )

    def recurrent() -> None:
        state = None
        for row in embedded:
            _, state = network(row.reshape(1, 1, -1), state)

    def in_one_call() -> None:
        network(embedded.unsqueeze(1))

    rounds = 1 if arguments.quick else 3
    times = race({"ours": lambda: model.score(symbols), "LSTM": recurrent, "LSTM, one call": in_one_call}, rounds)
    bits = -float(model.score(symbols).sum()) / symbols.num_steps / math.log(2)
    row = {
        "states": model.num_states,
        "transitions": model.layout.num_entries,
        "steps": symbols.num_steps,
        "bits": bits,
        **times,
    }
    row |= {f"{name} / ours": times[name] / times["ours"] for name in ("LSTM", "LSTM, one call")}
    row["rounds"] = rounds
    print(row, flush=True)
    return [row]


def large(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains a model of 30,000 states with the Trainer and measures seconds, density and the peak memory per epoch."""
    data = TextDataModule(arguments.path, batch_size=10_000)
    states = 300 if arguments.quick else STATES
    layout = {"allocation": "ngram", "ngram_order": 6, "pairs": "all", "arithmetic": "float32"}
    model = ClonedHMM(states, data.num_symbols, start_concentration=0.01, **layout)
    rows: list[dict[str, Any]] = []

    class Clock(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.begin = time.perf_counter()

        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            spent = time.perf_counter() - self.begin
            density = int(pl_module.above(_NEGLIGIBLE).sum()) / pl_module.num_states**2
            peak = peak_bytes() / 2**30
            row = {
                "epoch": trainer.current_epoch,
                "seconds": spent,
                "density": density,
                "stored": pl_module.layout.density,
                "GiB": peak,
            }
            bits = trainer.callback_metrics.get("train/bits_per_symbol", torch.tensor(math.nan))  # of the epoch before
            rows.append({**row, "bits before": float(bits)})
            print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        checkpoints = ModelCheckpoint(folder, save_last=True, save_top_k=1)
        callbacks = [checkpoints, Clock(), Pruning(threshold=_NEGLIGIBLE, max_steps=20_000)]
        options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            accelerator="cpu", max_epochs=arguments.epochs, limit_val_batches=0, callbacks=callbacks, **options
        )
        trainer.fit(model, data)
        files = sorted(Path(folder).iterdir())
        print(f"checkpoints: {[(file.name, round(file.stat().st_size / 2**30, 2)) for file in files]} GiB", flush=True)
    return rows


PARTS = {"iterations": iterations, "trainer": trainer, "forward": forward, "large": large}
_WORDS = {
    "iterations": (
        "The table gives the seconds of one EM iteration on the same random symbols, 27 of them, from the same "
        "initial parameters, as one sequence. `ours` is `inference.e_step` and `BaumWelch.step` in float32. `peer` is "
        "`learn_em_T` of the authors' public code, in float32, compiled by numba without its parallel mode."
    ),
    "trainer": (
        "The table gives the seconds of an epoch of `fit` and of the same work in a bare loop, in the same precision "
        "and on the same number of threads."
    ),
    "forward": (
        "The table gives the seconds of the forward pass over the test part of a text as one sequence, in float32. "
        "`ours` is `ClonedHMM.score` of 30,000 clones of contexts of three letters joined with these contexts, after "
        "60 EM iterations; it is not the model of Table 4. `LSTM` is a one-layer `torch.nn.LSTM` of 256 untrained "
        "units, called once per symbol; most of its time is the cost of the calls. `LSTM, one call` is the same "
        "network, called once with all symbols."
    ),
    "large": (
        "The table describes the epochs of a large model that is trained with the Trainer from sparse initial "
        "transitions and pruned between epochs. `density` is the fraction of transitions above 1e-4, and `stored` the "
        "fraction that is stored. `GiB` is the peak resident memory so far, and `bits before` is the bits per symbol "
        "of the training text one epoch earlier."
    ),
}


def tables(folder: Path) -> str:
    """Returns the results so far as Markdown."""
    parts = [
        "# Speed and memory of the cloned HMM",
        "This page is written by `benchmarks/cloned.py`. Times are the best of the given number of rounds. `load` is "
        "the load average before the part.",
    ]
    for part, words in _WORDS.items():
        file = folder / f"cloned_{part}.csv"
        if file.exists():
            names, *rows = csv.reader(file.open(newline=""))
            lines = [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
            parts.append(
                "\n".join(
                    [
                        words,
                        "",
                        *lines,
                        *(f"| {' | '.join(_short(cell) or 'not recorded' for cell in row)} |" for row in rows),
                    ]
                )
            )
    return "\n\n".join(parts) + "\n"


def _short(text: str) -> str:
    return f"{float(text):.3g}" if "." in text and text.replace(".", "").replace("e-", "").isdigit() else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything works")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["iterations", "trainer"])
    parser.add_argument("--peer", help="path of chmm_actions.py")
    parser.add_argument("--checkpoint", type=Path, help="for the part `forward`: where the trained model is kept")
    parser.add_argument("--path", help="a text, for the parts `forward` and `large`")
    parser.add_argument("--epochs", type=int, default=10, help="of the part `large`")
    parser.add_argument("--scratch", help="folder for the checkpoints of the part `large`")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs/benchmarks"),
        help="folder for the tables: CSV, and all of them in cloned.md",
    )
    arguments = parser.parse_args()
    for part in arguments.parts:
        load, threads = os.getloadavg()[0], torch.get_num_threads()
        print(f"{part}: load average {load:.2f}, {threads} threads", flush=True)
        rows = [{**row, "threads": threads, "load": round(load, 2)} for row in PARTS[part](arguments)]
        arguments.out.mkdir(parents=True, exist_ok=True)
        with (arguments.out / f"cloned_{part}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (arguments.out / "cloned.md").write_text(tables(arguments.out))


if __name__ == "__main__":
    main()
