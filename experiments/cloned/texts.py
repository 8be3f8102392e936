"""Table 4: bits per symbol of eight texts by cloned HMMs, Kneser-Ney n-grams and a character LSTM.

``python -m experiments.cloned.texts --path <folder>`` (with gutenberg/, calgary/ and warpeace/; $LIGHTNING_HMM_DATA if
not given)

Everything except for the LSTM of long texts is chosen on validation data: the last tenth of the training text, cleaned
like the test part. The chosen model is trained on the whole training text and tested once.

Only ``--cleaning paper`` (see `TextDataModule`) reproduces the sizes and the n-gram results of the paper, so the
paper's results are shown only for this cleaning. It has a folder of its own for its records.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from matplotlib.figure import Figure

from datamodules import TextDataModule
from datamodules.corpus import LetterCleaning
from experiments.measures import Stopwatch, bits_per_symbol
from experiments.panels import legend, panel
from experiments.records import markdown_table
from experiments.run import QUIET_TRAINER, Case, Experiment, Option, Run, run
from lightning_hmm import ClonedHMM, Sequences, fit
from lightning_hmm.callbacks import KeepBest
from lightning_hmm.models import KneserNey, RecurrentNet
from lightning_hmm.models.contexts import BackOff, Contexts
from lightning_hmm.plotting import COLORS

SEED = 0
METHODS = {"cloned": "cloned HMM", "ngrams": "n-grams", "lstm": "LSTM"}
DATA_FOLDER = Option(
    "--path",
    type=Path,
    default=Path(os.environ.get("LIGHTNING_HMM_DATA", "data")),
    help="folder of the texts ($LIGHTNING_HMM_DATA if not given)",
)


class LSTM(NamedTuple):
    """Training of the network on batches of sequences of 500 letters.

    A long text has more updates per epoch, and more letters than the network has weights, so it has no dropout and no
    early stopping.

    Attributes:
        batch_size: Sequences in a batch.
        epochs: Number of epochs, or with `early` the maximum.
        learning_rate: Learning rate of the first epoch.
        decay: Factor of the learning rate for each epoch.
        dropout: Dropout between the layers.
        early: Whether the number of epochs is chosen on validation data.
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
        name: Name in the table.
        path: File in the data folder.
        paper: Bits of the paper's cloned HMM, n-grams, sequence memoizer and LSTM.
        candidates: Models to choose from on validation data: length of the contexts that have clones, and number of
        states.
        looks: Numbers of iterations after which the model is validated, until it has become worse twice.
        smoothing: Values to choose from on validation data, one setting after the other.
        lstm: Training of the LSTM.
    """

    name: str
    path: str
    paper: tuple[float, float, float, float]
    candidates: tuple[tuple[int, int], ...]
    looks: tuple[int, ...]
    smoothing: dict[str, tuple[float, ...]]
    lstm: LSTM


# All values of SMOOTHING were searched for the first text. The search on the other texts begins at its result, START.
SMOOTHING = {"strength": (0.15, 0.3, 0.6, 1.2), "returning": (0.05, 0.1, 0.2), "order": (4, 5, 6)}
START: dict[str, Any] = {"strength": 0.15, "returning": 0.05, "order": 5}
NEAR, LONG = {"strength": (0.08, 0.3), "returning": (0.1,)}, {"order": (6,), "strength": (0.4, 1.0, 2.0)}
FIRST, LARGE = (6, 9, 12, 15, 18, 21, 24, 27, 30, 34, 38), (16, 22)
SMALL = (12, 15, 18, 22, 26, 30, 34, 38, 44, 50, 58, 66, 76)
BRIEF, LENGTHY = LSTM(5, 60, 2e-3, 0.97, 0.25, True), LSTM(5, 12, 3e-3, 0.8, 0.0, False)


def _short(name: str, paper: tuple[float, float, float, float]) -> Text:
    return Text(name, f"gutenberg/{name}.txt", paper, ((2, 8000), (1, 4000)), SMALL, NEAR, BRIEF)


def _long(name: str, path: str, paper: tuple[float, float, float, float]) -> Text:
    return Text(name, path, paper, ((3, 30000),), LARGE, LONG, LENGTHY)


BLAKE_CANDIDATES = ((2, 3000), (2, 6000), (1, 3000))
TEXTS = [
    Text(
        "blake-poems", "gutenberg/blake-poems.txt", (1.60, 1.75, 1.71, 1.68), BLAKE_CANDIDATES, FIRST, SMOOTHING, BRIEF
    ),
    _short("shakespeare-macbeth", (1.69, 1.79, 1.77, 1.74)),
    _short("carroll-alice", (1.54, 1.61, 1.57, 1.58)),
    _short("shakespeare-hamlet", (1.63, 1.72, 1.69, 1.68)),
    _long("milton-paradise", "gutenberg/milton-paradise.txt", (1.73, 1.83, 1.78, 1.78)),
    _long("calgary", "calgary/book1", (1.63, 1.72, 1.64, 1.67)),
    _long("melville-mobydick", "gutenberg/melville-moby_dick.txt", (1.72, 1.81, 1.73, 1.76)),
    _long("war-peace", "warpeace/warpeace_input.txt.gz", (1.59, 1.65, 1.57, 1.62)),
]
HELP = Text("help", "", (math.nan,) * 4, ((2, 400), (1, 100)), (2, 4), {"order": (4,)}, BRIEF._replace(epochs=2))


class Parts(NamedTuple):
    """Training sequences, the sequences that are scored, and their data module."""

    train: Sequences
    scored: Sequences
    data: TextDataModule

    def shortened(self) -> Parts:
        """Returns the beginning of both parts, for quick runs."""
        return Parts(self.train[:8], Sequences.from_list([self.scored[0][:2000]]), self.data)


def final_parts(path: Path | None, cleaning: LetterCleaning = "letters") -> Parts:
    """Returns the whole training part and the test part."""
    data = TextDataModule(None if path is None else str(path), cleaning=cleaning, val_fraction=0.0)
    data.setup()
    return Parts(data.train_sequences, data.test_sequences, data)


def validation_parts(final: Parts, path: Path | None, folder: Path) -> Parts:
    """Returns the training text split in the same way, with its last tenth in the place of the test part."""
    if final.data.cleaning == "paper":  # The data module does this from the words before they are cleaned.
        data = TextDataModule(None if path is None else str(path), cleaning="paper", val_fraction=0.1)
        data.setup()
        return Parts(data.train_sequences, data.val_sequences, data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "training-text.txt"
    path.write_text(final.data.text["train"])
    return final_parts(path)


def find_text(run: Run, name: str) -> Text:
    return next(text for text in run.library if text.name == name)


@lru_cache(maxsize=1)
def text_parts(run: Run, name: str) -> tuple[Parts, Parts]:
    """Returns the parts for the test and those for the choice of settings."""
    path = None if run.quick else run.path / find_text(run, name).path
    final = final_parts(path, run.cleaning)
    if run.quick:
        final = final.shortened()
        final.data.text["train"] = final.data.text["train"][:8000]
    inner = validation_parts(final, path, run.out / name)
    return final, inner.shortened() if run.quick else inner


class Clones:
    """Clones of letters or of contexts of a text, trained some iterations at a time."""

    def __init__(self, parts: Parts, context: int, num_states: int) -> None:
        assert parts.data.num_symbols is not None
        self.parts, self.num_symbols, self.iterations = parts, parts.data.num_symbols, 0
        self.upper = Contexts(parts.train, self.num_symbols, context) if context > 1 else None
        self.encoded = parts.train if self.upper is None else self.upper.encode(parts.train)
        num_contexts = self.num_symbols if self.upper is None else len(self.upper)
        options: dict[str, Any] = {
            "allocation": "ngram",
            "ngram_order": 7 - context,
            "arithmetic": "float32",
            "seed": SEED,
        }
        self.model = ClonedHMM(max(num_states, num_contexts), num_contexts, **options)

    def train(self, iterations: int) -> float:
        """Trains up to this number of iterations in total and returns the seconds of processor time."""
        with Stopwatch() as watch:
            if iterations > self.iterations:
                fit(self.model, self.encoded, iterations - self.iterations, 0.0)
        self.iterations = iterations
        return watch.seconds

    def back_off(self) -> BackOff:
        return BackOff([self.model], self.parts.train, self.num_symbols, self.upper)

    def smoothed(self, counted: BackOff, strength: float, returning: float, order: int) -> ClonedHMM:
        lower = Contexts(self.parts.train, self.num_symbols, order, min_count=2)
        return counted.joined(lower, strength, returning, symbol_names=self.parts.data.symbol_names)


def choose_smoothing(text: Text, parts: Parts, context: int, num_states: int) -> dict[str, Any]:
    """Chooses the iterations and the smoothing of a candidate on validation data."""
    clones, seconds, found, best = Clones(parts, context, num_states), 0.0, [], None
    for look in text.looks:
        seconds += clones.train(look)
        counted = clones.back_off()
        found.append(bits_per_symbol(clones.smoothed(counted, **START), parts.scored))
        if found[-1] == min(found):
            best = look, counted
        if len(found) > 2 and min(found) < min(found[-2:]):
            break
    assert best is not None
    chosen, least = dict(START), min(found)
    for name, values in text.smoothing.items():
        for value in values:
            if value == chosen[name]:
                continue
            score = bits_per_symbol(clones.smoothed(best[1], **{**chosen, name: value}), parts.scored)
            if score < least:
                chosen, least = {**chosen, name: value}, score
    return {"iterations": best[0], **chosen, "validation": least, "seconds": round(seconds, 1)}


def run_cloned(run: Run, text: Text, final: Parts) -> dict[str, Any]:
    """Trains and tests the candidate that is best on validation data, and stores it as a checkpoint."""
    tried = run.records.where(text=text.name, tried="smoothing")
    candidates = [record for record in tried if (record["context"], record["num_states"]) in text.candidates]
    best = min(candidates, key=lambda record: record["validation"])
    settings = {name: best[name] for name in ("context", "num_states", "iterations", *START, "validation")}
    clones = Clones(final, settings["context"], settings["num_states"])
    seconds = clones.train(settings["iterations"])
    model = clones.smoothed(clones.back_off(), **{name: settings[name] for name in START})
    with Stopwatch() as watch:
        test = bits_per_symbol(model, final.scored)
    save(model, run.out / f"{text.name}.ckpt")
    sizes = {"states_in_all": model.num_states, "transitions": model.layout.num_entries}
    times = {"seconds": round(seconds, 1), "test_seconds": round(watch.seconds, 1)}
    return {**settings, **sizes, "test": test, **times}


def save(model: ClonedHMM, path: Path) -> None:
    """Writes a checkpoint for `lightning_hmm.load`."""
    trainer = Trainer(**QUIET_TRAINER)
    trainer.strategy.connect(model)
    trainer.save_checkpoint(path, weights_only=True)


def run_ngrams(final: Parts, inner: Parts, orders: range) -> dict[str, Any]:
    num_symbols = final.data.num_symbols
    assert num_symbols is not None

    def score(order: int, parts: Parts) -> float:
        return KneserNey(num_symbols, order).fit(parts.train).bits_per_symbol(parts.scored)

    with Stopwatch() as watch:
        found = {order: score(order, inner) for order in orders}
        order = min(found, key=found.__getitem__)
        test = score(order, final)
    return {"order": order, "validation": found[order], "test": test, "seconds": round(watch.seconds, 1)}


def train_lstm(settings: LSTM, parts: Parts, hidden_size: int, epochs: int, **options: Any) -> RecurrentNet:
    lengths = [500] * (parts.train.num_steps // 500) + [parts.train.num_steps % 500]
    data = Sequences.from_lengths(parts.train.values, lengths)
    size: dict[str, Any] = {"hidden_size": hidden_size, "num_layers": 2, "dropout": settings.dropout, "bptt_steps": 50}
    rates: dict[str, Any] = {"learning_rate": settings.learning_rate, "learning_rate_decay": settings.decay}
    model = RecurrentNet(num_symbols=parts.data.num_symbols, seed=SEED, **size, **rates)
    return fit(model, data, epochs, 0.0, batch_size=settings.batch_size, shuffle=True, seed=SEED, **options)


def run_lstm(settings: LSTM, final: Parts, inner: Parts, hidden_size: int) -> dict[str, Any]:
    """Trains on the whole training part, with `early` for the number of epochs that is best on validation data."""
    found: dict[str, Any] = {"epochs": settings.epochs}
    with Stopwatch() as watch:
        if settings.early:
            best = KeepBest("val/bits_per_symbol")
            callbacks = [EarlyStopping("val/bits_per_symbol", patience=8), best]
            train_lstm(settings, inner, hidden_size, settings.epochs, val_sequences=inner.scored, callbacks=callbacks)
            found = {"epochs": best.best_epoch, "validation": best.best_score}
        model = train_lstm(settings, final, hidden_size, found["epochs"])
        found["test"] = bits_per_symbol(model, final.scored)
    return {**found, "hidden_size": hidden_size, "seconds": round(watch.seconds, 1)}


def chosen_texts(run: Run) -> list[Text]:
    return [text for text in run.library if not run.texts or text.name in run.texts]


def cases(run: Run) -> Iterator[Case]:
    for text in chosen_texts(run):
        yield {"text": text.name, "tried": "sizes"}
        for method in run.methods:
            if method == "cloned" and not run.records.has(text=text.name, method=method):
                for context, num_states in text.candidates:
                    yield {"text": text.name, "tried": "smoothing", "context": context, "num_states": num_states}
            yield {"text": text.name, "method": method}


def compute(run: Run, case: Case) -> dict[str, Any]:
    text = find_text(run, case["text"])
    final, inner = text_parts(run, text.name)
    if case.get("tried") == "sizes":
        return {"training": final.train.num_steps, "test": final.scored.num_steps}
    if case.get("tried") == "smoothing":
        return choose_smoothing(text, inner, case["context"], case["num_states"])
    if case["method"] == "ngrams":
        return run_ngrams(final, inner, range(3, 11))
    if case["method"] == "cloned":
        return run_cloned(run, text, final)
    return run_lstm(text.lstm, final, inner, run.hidden_size)


def paper_bits(text: Text, method: str) -> float:
    return text.paper[{"cloned": 0, "ngrams": 1, "lstm": 3}[method]]


def table(run: Run) -> str:
    """Sizes and bits per symbol, with the paper's results if the cleaning is that of the paper."""
    with_paper = run.cleaning == "paper"
    header, rows = ["text", "training", "test"], []
    for method in METHODS.values():
        header += [method, "paper"] if with_paper else [method]
    for text in chosen_texts(run):
        (sizes,) = run.records.where(text=text.name, tried="sizes")
        row = [text.name, f"{sizes['training']:,}", f"{sizes['test']:,}"]
        for method in METHODS:
            found = run.records.values("test", text=text.name, method=method)
            row.append(f"{found[0]:.3f}" if found else "-")
            if with_paper:
                row.append(f"{paper_bits(text, method):.2f}")
        rows.append([*row, f"{text.paper[2]:.2f}"] if with_paper else row)
    return markdown_table([*header, "sequence memoizer (paper)"] if with_paper else header, rows)


def figure(run: Run) -> Figure:
    texts, with_paper = chosen_texts(run), run.cleaning == "paper"
    plot, axes = panel(9, 4, grid="y")
    for number, (method, name) in enumerate(METHODS.items()):
        places = [n + (number - 1) * 0.22 for n in range(len(texts))]
        found = [run.records.values("test", text=text.name, method=method) for text in texts]
        ours = [bits[0] if bits else math.nan for bits in found]
        axes.plot(places, ours, "o", color=COLORS[number], label=name)
        if with_paper:
            bits = [paper_bits(text, method) for text in texts]
            axes.plot(places, bits, "_", color=COLORS[number], markersize=11, label=f"{name}, the paper's")
    axes.set_xticks(range(len(texts)), [text.name.replace("-", "\n", 1) for text in texts], fontsize="small")
    axes.set(ylabel="bits per symbol, test part")
    legend(axes, columns=3, loc="upper center", bbox_to_anchor=(0.5, 1.18))
    return plot


EXPERIMENT = Experiment(
    folder=lambda run: "cloned/texts_paper" if run.cleaning == "paper" else "cloned/texts",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        DATA_FOLDER,
        Option("--texts", nargs="*", choices=[text.name for text in TEXTS], help="texts (all if not given)"),
        Option("--methods", nargs="*", choices=list(METHODS), default=list(METHODS), help="methods (all if not given)"),
        Option("--hidden-size", type=int, default=100, help="units of each of the two layers of the LSTM"),
        Option("--cleaning", choices=get_args(LetterCleaning), default="letters", help="option of TextDataModule"),
    ],
    settings={"library": TEXTS},
    quick={"library": [HELP], "texts": None, "methods": list(METHODS)},
    quick_help="the first letters of Python's help texts, few iterations",
)

if __name__ == "__main__":
    run(EXPERIMENT)
