"""Table 4: bits per symbol of eight texts by cloned HMMs, Kneser-Ney n-grams and a character LSTM.

``python -m experiments.cloned.texts --path <folder>`` (with gutenberg/, calgary/ and warpeace/; $LIGHTNING_HMM_DATA if not given)

Everything but the LSTM of long texts is chosen on validation data: the last tenth of the training text, cleaned as the test part is. What was
chosen is trained on the whole training text and tested once.

Only ``--cleaning paper`` (see `TextDataModule`) reproduces the sizes and the n-gram results of the paper, so the paper's results stand beside those of
this cleaning only. Its records are in a folder of their own.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from matplotlib.figure import Figure

from datamodules import TextDataModule
from datamodules.corpus import LetterCleaning
from experiments.records import Records, markdown_table
from lightning_hmm import ClonedHMM, Sequences, fit
from lightning_hmm.models import KneserNey, RecurrentNet
from lightning_hmm.models.contexts import BackOff, Contexts
from lightning_hmm.plots import COLOURS

SEED = 0
METHODS = {"cloned": "cloned HMM", "ngrams": "n-grams", "lstm": "LSTM"}


class LSTM(NamedTuple):
    """How the network is trained: stretches of 500 letters in a batch, epochs, the rate and its factor each epoch.

    With `early`, the number of epochs is the best on validation data, at most `epochs`; without, it is `epochs`. A long text has more updates in an
    epoch, and more letters than the network has weights: it gets no dropout and no early stop.
    """

    batch_size: int
    epochs: int
    learning_rate: float
    decay: float
    dropout: float
    early: bool


class Text(NamedTuple):
    """A row of the table.

    Attributes:
        path: in the data folder.
        paper: bits of its cloned HMM, n-grams, sequence memoizer and LSTM.
        candidates: what validation chooses from: letters of the contexts that clones are of, and states.
        looks: after how many iterations validation looks, until it got worse twice.
        smoothing: values that validation chooses from, one setting after the other.
        lstm: how that is trained.
    """

    name: str
    path: str
    paper: tuple[float, float, float, float]
    candidates: tuple[tuple[int, int], ...]
    looks: tuple[int, ...]
    smoothing: dict[str, tuple[float, ...]]
    lstm: LSTM


SMOOTHING = {"strength": (0.15, 0.3, 0.6, 1.2), "returning": (0.05, 0.1, 0.2), "order": (4, 5, 6)}  # searched for the first text,
START = {"strength": 0.15, "returning": 0.05, "order": 5}  # which chose these; where the others start
NEAR, LONG = {"strength": (0.08, 0.3), "returning": (0.1,)}, {"order": (6,), "strength": (0.4, 1.0, 2.0)}
FIRST, SMALL, LARGE = (6, 9, 12, 15, 18, 21, 24, 27, 30, 34, 38), (12, 15, 18, 22, 26, 30, 34, 38, 44, 50, 58, 66, 76), (16, 22)
BRIEF, LENGTHY = LSTM(5, 60, 2e-3, 0.97, 0.25, True), LSTM(5, 12, 3e-3, 0.8, 0.0, False)
TEXTS = [
    Text("blake-poems", "gutenberg/blake-poems.txt", (1.60, 1.75, 1.71, 1.68), ((2, 3000), (2, 6000), (1, 3000)), FIRST, SMOOTHING, BRIEF),
    Text("shakespeare-macbeth", "gutenberg/shakespeare-macbeth.txt", (1.69, 1.79, 1.77, 1.74), ((2, 8000), (1, 4000)), SMALL, NEAR, BRIEF),
    Text("carroll-alice", "gutenberg/carroll-alice.txt", (1.54, 1.61, 1.57, 1.58), ((2, 8000), (1, 4000)), SMALL, NEAR, BRIEF),
    Text("shakespeare-hamlet", "gutenberg/shakespeare-hamlet.txt", (1.63, 1.72, 1.69, 1.68), ((2, 8000), (1, 4000)), SMALL, NEAR, BRIEF),
    Text("milton-paradise", "gutenberg/milton-paradise.txt", (1.73, 1.83, 1.78, 1.78), ((3, 30000),), LARGE, LONG, LENGTHY),
    Text("calgary", "calgary/book1", (1.63, 1.72, 1.64, 1.67), ((3, 30000),), LARGE, LONG, LENGTHY),
    Text("melville-mobydick", "gutenberg/melville-moby_dick.txt", (1.72, 1.81, 1.73, 1.76), ((3, 30000),), LARGE, LONG, LENGTHY),
    Text("war-peace", "warpeace/warpeace_input.txt.gz", (1.59, 1.65, 1.57, 1.62), ((3, 30000),), LARGE, LONG, LENGTHY),
]


class Parts(NamedTuple):
    """Training sequences, those that are scored, and the data module they are of."""

    train: Sequences
    scored: Sequences
    data: TextDataModule


def final_parts(path: Path | None, cleaning: LetterCleaning = "letters") -> Parts:
    """All that is trained on, and the test part."""
    data = TextDataModule(None if path is None else str(path), cleaning=cleaning, val_fraction=0.0)
    data.setup()
    return Parts(data.train_sequences, data.test_sequences, data)


def validation_parts(final: Parts, path: Path | None, folder: Path) -> Parts:
    """The training text once more as if it were all: its last tenth takes the place of the test part."""
    if final.data.cleaning == "paper":  # the data module does it itself, from the words before they were cleaned
        data = TextDataModule(None if path is None else str(path), cleaning="paper", val_fraction=0.1)
        data.setup()
        return Parts(data.train_sequences, data.val_sequences, data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "training-text.txt"
    path.write_text(final.data.text["train"])
    return final_parts(path)


def bits(model: Any, sequences: Sequences) -> float:
    return -float(model.score(sequences).sum()) / sequences.num_steps / math.log(2)


class Clones:
    """Cloned HMMs of a text, trained some iterations at a time."""

    def __init__(self, parts: Parts, context: int, num_states: int) -> None:
        assert parts.data.num_symbols is not None
        self.parts, self.num_symbols, self.iterations = parts, parts.data.num_symbols, 0
        self.upper = Contexts(parts.train, self.num_symbols, context) if context > 1 else None
        self.encoded = parts.train if self.upper is None else self.upper.encode(parts.train)
        num_contexts = self.num_symbols if self.upper is None else len(self.upper)
        options = {"allocation": "ngram", "ngram_order": 7 - context, "arithmetic": "float32", "seed": SEED}
        self.model = ClonedHMM(max(num_states, num_contexts), num_contexts, **options)

    def train(self, iterations: int) -> float:
        """Goes on up to so many iterations in all; returns the seconds of processor time."""
        begin = time.process_time()
        if iterations > self.iterations:
            fit(self.model, self.encoded, iterations - self.iterations, 0.0)
        self.iterations = iterations
        return time.process_time() - begin

    def back_off(self) -> BackOff:
        return BackOff([self.model], self.parts.train, self.num_symbols, self.upper)

    def smoothed(self, counted: BackOff, strength: float, returning: float, order: int) -> ClonedHMM:
        lower = Contexts(self.parts.train, self.num_symbols, order, min_count=2)
        return counted.joined(lower, strength, returning, symbol_names=self.parts.data.symbol_names)


def choose(text: Text, parts: Parts, records: Records) -> dict[str, Any]:
    """The settings that are best on validation data; what was tried is in the records."""
    for context, num_states in text.candidates:
        if records.where(text=text.name, tried="smoothing", context=context, num_states=num_states):
            continue
        clones, seconds, found, best = Clones(parts, context, num_states), 0.0, [], None
        for look in text.looks:
            seconds += clones.train(look)
            counted = clones.back_off()
            found.append(bits(clones.smoothed(counted, **START), parts.scored))
            print(f"{text.name}: contexts of {context}, {num_states} states, {look} iterations: {found[-1]:.4f} on validation ({seconds:.0f} s)", flush=True)
            if found[-1] == min(found):
                best = look, counted
            if len(found) > 2 and min(found) < min(found[-2:]):
                break
        assert best is not None
        chosen, least = dict(START), min(found)
        for name, values in text.smoothing.items():
            for value in values:
                if value != chosen[name] and (score := bits(clones.smoothed(best[1], **{**chosen, name: value}), parts.scored)) < least:
                    chosen, least = {**chosen, name: value}, score
        settings = {"context": context, "num_states": num_states, "iterations": best[0], **chosen}
        records.add(text=text.name, tried="smoothing", **settings, validation=least, seconds=round(seconds, 1))
    tried = records.where(text=text.name, tried="smoothing")
    best_record = min((record for record in tried if (record["context"], record["num_states"]) in text.candidates), key=lambda record: record["validation"])
    return {name: best_record[name] for name in ("context", "num_states", "iterations", *START, "validation")}


def run_cloned(text: Text, final: Parts, inner: Parts, records: Records, out: Path) -> dict[str, Any]:
    settings = choose(text, inner, records)
    clones = Clones(final, settings["context"], settings["num_states"])
    seconds = clones.train(settings["iterations"])
    counted = clones.back_off()
    model = clones.smoothed(counted, **{name: settings[name] for name in START})
    begin = time.process_time()
    test = bits(model, final.scored)
    save(model, out / f"{text.name}.ckpt")
    sizes = {"states_in_all": model.num_states, "transitions": model.layout.num_entries}
    return {**settings, **sizes, "test": test, "seconds": round(seconds, 1), "test_seconds": round(time.process_time() - begin, 1)}


def save(model: ClonedHMM, path: Path) -> None:
    """As a checkpoint that `lightning_hmm.load` reads."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path, weights_only=True)


def run_ngrams(final: Parts, inner: Parts, orders: range) -> dict[str, Any]:
    assert final.data.num_symbols is not None
    begin = time.process_time()
    found = {order: KneserNey(final.data.num_symbols, order).fit(inner.train).bits_per_symbol(inner.scored) for order in orders}
    order = min(found, key=found.__getitem__)
    test = KneserNey(final.data.num_symbols, order).fit(final.train).bits_per_symbol(final.scored)
    return {"order": order, "validation": found[order], "test": test, "seconds": round(time.process_time() - begin, 1)}


def run_lstm(settings: LSTM, final: Parts, inner: Parts, hidden_size: int, folder: Path) -> dict[str, Any]:
    begin = time.process_time()

    def train(parts: Parts, epochs: int, **options: Any) -> RecurrentNet:
        lengths = [500] * (parts.train.num_steps // 500) + [parts.train.num_steps % 500]
        data = Sequences.from_lengths(parts.train.values, lengths)
        size = {"hidden_size": hidden_size, "num_layers": 2, "dropout": settings.dropout, "bptt_steps": 50, "seed": SEED}
        rates = {"learning_rate": settings.learning_rate, "learning_rate_decay": settings.decay}
        model = RecurrentNet(num_symbols=parts.data.num_symbols, **size, **rates)
        fit(model, data, epochs, 0.0, batch_size=settings.batch_size, shuffle=True, seed=SEED, **options)
        return model

    found = {"epochs": settings.epochs}
    if settings.early:
        stop = EarlyStopping("val/bits_per_symbol", patience=8)
        keep = ModelCheckpoint(folder, "lstm", monitor="val/bits_per_symbol", enable_version_counter=False)
        train(inner, settings.epochs, val_sequences=inner.scored, callbacks=[stop, keep], enable_checkpointing=True)
        assert keep.best_model_path
        found = {"epochs": int(torch.load(keep.best_model_path, weights_only=True)["epoch"]) + 1, "validation": float(stop.best_score)}
    model = train(final, int(found["epochs"]), enable_checkpointing=False)
    return {**found, "test": bits(model, final.scored), "hidden_size": hidden_size, "seconds": round(time.process_time() - begin, 1)}


def table(records: Records, texts: list[Text], with_paper: bool) -> str:
    """Sizes and bits per symbol; the paper's results only beside those of its own cleaning."""
    header, rows = ["text", "training", "test"], []
    for method in METHODS.values():
        header += [method, "paper"] if with_paper else [method]
    for text in texts:
        sizes = records.where(text=text.name, tried="sizes")[0]
        row = [text.name, f"{sizes['training']:,}", f"{sizes['test']:,}"]
        for method in METHODS:
            found = records.where(text=text.name, method=method)
            row += [f"{found[0]['test']:.3f}" if found else "-", *([f"{paper(text, method):.2f}"] if with_paper else [])]
        rows.append([*row, f"{text.paper[2]:.2f}"] if with_paper else row)
    return markdown_table([*header, "sequence memoizer (paper)"] if with_paper else header, rows)


def paper(text: Text, method: str) -> float:
    return text.paper[{"cloned": 0, "ngrams": 1, "lstm": 3}[method]]


def figure(records: Records, texts: list[Text], with_paper: bool) -> Figure:
    plot = Figure(figsize=(9, 4), layout="constrained")
    axes = plot.subplots()
    for number, (method, name) in enumerate(METHODS.items()):
        place = [n + (number - 1) * 0.22 for n in range(len(texts))]
        ours = [next((record["test"] for record in records.where(text=text.name, method=method)), math.nan) for text in texts]
        axes.plot(place, ours, "o", color=COLOURS[number], label=name)
        if with_paper:
            axes.plot(place, [paper(text, method) for text in texts], "_", color=COLOURS[number], markersize=11, label=f"{name}, the paper's")
    axes.set_xticks(range(len(texts)), [text.name.replace("-", "\n", 1) for text in texts], fontsize="small")
    axes.set(ylabel="bits per symbol, test part")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    axes.legend(frameon=False, fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.18))
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path(os.environ.get("LIGHTNING_HMM_DATA", "data")), help="folder of the texts")
    parser.add_argument("--texts", nargs="*", help="names of some of them; all if not given")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--hidden-size", type=int, default=100, help="units of each of the LSTM's two layers")
    parser.add_argument("--cleaning", choices=get_args(LetterCleaning), default="letters", help="as of TextDataModule")
    parser.add_argument("--out", type=Path, help="logs/experiments/cloned/texts if not given, or texts_paper with --cleaning paper")
    parser.add_argument("--quick", action="store_true", help="Python's help texts, the first letters of them, few iterations")
    args = parser.parse_args()
    args.out = args.out or Path("logs/experiments/cloned") / ("texts_paper" if args.cleaning == "paper" else "texts")
    torch.set_num_threads(1)
    texts, methods = [text for text in TEXTS if not args.texts or text.name in args.texts], args.methods
    records = Records(args.out / "records.jsonl")
    if args.quick:
        texts, methods = [Text("help", "", (math.nan,) * 4, ((2, 400), (1, 100)), (2, 4), {"order": (4,)}, BRIEF._replace(epochs=2))], list(METHODS)
    for text in texts:
        path = None if args.quick else args.path / text.path
        final = final_parts(path, args.cleaning)
        if args.quick:
            final = Parts(final.train[:8], Sequences.from_list([final.scored[0][:2000]]), final.data)
            final.data.text["train"] = final.data.text["train"][:8000]
        inner = validation_parts(final, path, args.out / text.name)
        if args.quick:
            inner = Parts(inner.train[:8], Sequences.from_list([inner.scored[0][:2000]]), inner.data)
        if not records.where(text=text.name, tried="sizes"):
            records.add(text=text.name, tried="sizes", training=final.train.num_steps, test=final.scored.num_steps)
        for method in methods:
            if records.has(text=text.name, method=method):
                continue
            if method == "ngrams":
                result = run_ngrams(final, inner, range(3, 11))
            elif method == "cloned":
                result = run_cloned(text, final, inner, records, args.out)
            else:
                result = run_lstm(text.lstm, final, inner, args.hidden_size, args.out / text.name)
            records.add(text=text.name, method=method, **result)
            print(f"{text.name}, {METHODS[method]}: {result}", flush=True)
    done = [text for text in texts if records.has(text=text.name, tried="sizes")]
    with_paper = args.cleaning == "paper"
    (args.out / "table.md").write_text(made := table(records, done, with_paper))
    print(made)
    figure(records, done, with_paper).savefig(args.out / "figure.png", dpi=150)
    print(f"Written to {args.out}: table.md, figure.png, records.jsonl and the models.")


if __name__ == "__main__":
    main()
