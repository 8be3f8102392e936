"""Seconds per EM iteration of the cloned HMM, beside its authors' public code; what the Trainer costs; and scoring beside an LSTM.

    python benchmarks/cloned.py [--quick] [--peer path/to/chmm_actions.py] [--out docs/benchmarks]
    python benchmarks/cloned.py --parts forward --checkpoint model.ckpt --path text.txt

The peer is one file of vicariousinc/naturecomm_cscg, which is not on PyPI; without `--peer` it is left out. Both iterate on the same symbols
from the same start, and their new transitions must agree before anything is timed. Contestants take turns; the best round counts.
Run it on an idle machine: the load average is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib.util
import io
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules import TextDataModule, ToyMachineDataModule
from lightning_hmm import ClonedHMM, Sequences, fit, load
from lightning_hmm.inference import cloned
from lightning_hmm.inference.cloned import Layout

SETTINGS = ((20, 30_000), (100, 30_000), (400, 5_000))  # clones a symbol, steps; 27 symbols
NUM_SYMBOLS = 27
CHUNKS = 64  # sequences that the same symbols are cut into, for the column that says so


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def race(contestants: dict[str, Callable[[], Any]], rounds: int, **prepare: Callable[[], Any]) -> dict[str, float]:
    """The best of `rounds` for each, after a call that is not counted; all take turns. Where `prepare` has the name too, it is called before, untimed."""
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
        self.model = peer_module(path).CHMM(np.full(NUM_SYMBOLS, clones, np.int64), self.symbols, self.actions, pseudocount=0.0, seed=0)
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
        layout = Layout([clones] * NUM_SYMBOLS)
        peer = None if arguments.peer is None else Peer(arguments.peer, symbols, clones)
        start = torch.rand(layout.num_states, layout.num_states) if peer is None else torch.from_numpy(peer.start[0].astype(np.float32))
        start = (start / start.sum(1, keepdim=True)).reshape(-1)
        initial = torch.full((layout.num_states,), 1 / layout.num_states, dtype=torch.float64).log()
        transition = start.clone()
        whole = Sequences.from_lengths(symbols, [steps])
        chunks = Sequences.from_lengths(symbols, [len(part) for part in np.array_split(symbols, CHUNKS)])

        def iterate(data: Sequences, transition=transition, initial=initial, layout=layout) -> None:
            cloned.em_step(initial, transition, layout, data)

        reset = functools.partial(transition.copy_, start)
        in_pieces = f"ours, {CHUNKS} sequences"
        contestants: dict[str, Callable[[], Any]] = {"ours": functools.partial(iterate, whole), in_pieces: functools.partial(iterate, chunks)}
        prepare: dict[str, Callable[[], Any]] = {"ours": reset, in_pieces: reset}
        if peer is not None:
            iterate(whole)
            peer.reset()
            difference = np.abs(peer.iterate() - transition.reshape(layout.num_states, -1).numpy()).max()
            if difference > 1e-3:
                raise RuntimeError(f"The new transitions must agree, but differ by {difference:.2g} with {clones} clones.")
            contestants["peer"], prepare["peer"] = peer.iterate, peer.reset
        times = race(contestants, 2 if arguments.quick else 3, **prepare)
        row = {"clones": clones, "steps": steps, **times}
        if peer is not None:
            row["peer / ours"] = times["peer"] / times["ours"]
        print(row, flush=True)
        rows.append(row)
    return rows


def trainer(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Epochs of `fit` beside the same work without Lightning."""
    rows = []
    toy = ToyMachineDataModule(k=3, num_runs=300 if arguments.quick else None)
    text = TextDataModule()
    for name, data, options in (
        ("toy machine, batches of 400", toy, {"num_states": 28, "discount": 0.9, "sequences_per_update": 1}),
        ("text, batch EM", text, {"num_states": 100 if arguments.quick else 1000, "allocation": "frequency", "arithmetic": "float32"}),
    ):
        data.setup()
        sequences = data.train_sequences[:20] if name.startswith("text") else data.train_sequences
        epochs = 2 if arguments.quick else 20 if name.startswith("text") else 200

        def through_trainer(epochs: int, options=options, sequences=sequences, data=data) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit(ClonedHMM(num_symbols=data.num_symbols, **options), sequences, epochs, 0)

        def bare(epochs: int, options=options, sequences=sequences, data=data) -> None:
            model = ClonedHMM(num_symbols=data.num_symbols, **options)
            model.initialise(sequences)
            initial, transition, layout = (part.detach() if isinstance(part, torch.Tensor) else part for part in model.chain(0))
            if model.discount is None:
                for _ in range(epochs):
                    cloned.em_step(initial, transition, layout, sequences)
                return
            buffers, size = [torch.zeros_like(initial), torch.zeros_like(transition)], torch.zeros((), dtype=torch.float64)
            how = {"layout": layout, "discount": model.discount, "size": size, "data_size": 1.0, "pseudocounts": [0, 0], "frozen": [True, False]}
            for epoch in range(epochs):
                cloned.online_em(initial, transition, sequences, 1, updates=epoch * len(sequences), buffers=buffers, **how)

        # What starting costs is in both counts and falls out of their difference.
        times = {}
        for way, call in (("fit", through_trainer), ("bare", bare)):
            call(1)
            few, many = (min(seconds(lambda n=n, call=call: call(n)) for _ in range(1 if arguments.quick else 3)) for n in (epochs // 2, epochs))
            times[way] = (many - few) / (epochs - epochs // 2)
        rows.append({"what": name, **times, "fit / bare": times["fit"] / times["bare"]})
        print(rows[-1], flush=True)
    return rows


def forward(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Scoring the test part of a text beside a one-layer LSTM of 256 units that reads it one step at a time."""
    if arguments.checkpoint is None:
        return []
    model = load(arguments.checkpoint)
    data = TextDataModule(arguments.path)
    data.setup()
    symbols = data.test_sequences
    network, embedded = torch.nn.LSTM(NUM_SYMBOLS, 256), torch.nn.functional.one_hot(symbols.values, NUM_SYMBOLS).float()

    @torch.no_grad()
    def recurrent() -> None:
        state = None
        for row in embedded:
            _, state = network(row.reshape(1, 1, -1), state)

    times = race({"ours": lambda: model.score(symbols), "LSTM": recurrent}, 1 if arguments.quick else 3)
    row = {"states": model.num_states, "steps": symbols.num_steps, **times, "LSTM / ours": times["LSTM"] / times["ours"]}
    print(row, flush=True)
    return [row]


PARTS = {"iterations": iterations, "trainer": trainer, "forward": forward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything works")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peer", help="path of chmm_actions.py")
    parser.add_argument("--checkpoint", help="a trained ClonedHMM, for the part `forward`")
    parser.add_argument("--path", help="the text it was trained on")
    parser.add_argument("--out", type=Path, help="folder for the tables, as CSV")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}, torch threads {torch.get_num_threads()}", flush=True)
    for part in arguments.parts:
        rows = PARTS[part](arguments)
        if arguments.out is not None and rows:
            arguments.out.mkdir(parents=True, exist_ok=True)
            with (arguments.out / f"cloned_{part}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
