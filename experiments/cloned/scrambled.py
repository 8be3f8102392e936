"""Section 4.2.2 and Figure 5: words with scrambled inner letters, restored by a cloned HMM of Moby-Dick.

``python -m experiments.cloned.scrambled --path <folder>`` (with gutenberg/ and wordlist/; $LIGHTNING_HMM_DATA if not
given)

The model is that of ``experiments.cloned.texts --texts melville-mobydick``, which has to be run first. Thirty passages
of up to 600 symbols, whole words, are drawn from the training part and thirty from the test part. In addition, each
word of a list of frequent words that the training part does not contain is read by itself, between two spaces. A
reading either uses each inner letter of a word once, or, as in the paper, any of the inner letters at each place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.cloned.texts import DATA_FOLDER, TEXTS, Clones, Parts, final_parts
from experiments.measures import Stopwatch
from experiments.panels import legend, panel
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm import ClonedHMM, load
from lightning_hmm.plotting import COLORS

SEED = 0
LENGTH = 600
PAPER_PASSAGES = {"training": (0.9902, 0.9942)}
PAPER_WORDS = {4: (0.741, 89), 5: (0.4545, 99), 6: (0.403, 144), 7: (0.279, 172), 8: (0.216, 134)}
READINGS = {False: "each letter once", True: "letters reused"}  # How a reading may use the inner letters of a word.
SENTENCES = (
    "let us graduate and relax",
    "my boss likes to code",
    "we should purchase that historic downtown",
    "i disagree with my neighbor",
)


def scrambled(text: str, random: np.random.Generator) -> str:
    """Permutes the letters of each word except for its first and last."""

    def permuted(word: str) -> str:
        return word[:1] + "".join(random.permutation(list(word[1:-1]))) + word[-1:]

    return " ".join(permuted(word) if len(word) > 3 else word for word in text.split(" "))


def passages(text: str, number: int, random: np.random.Generator) -> list[str]:
    """Draws passages of whole words, of up to 600 symbols."""
    starts = np.flatnonzero(np.frombuffer(text.encode(), np.uint8) == ord(" ")) + 1
    starts = starts[starts < len(text) - LENGTH - 1]
    found = (text[start : start + LENGTH + 1] for start in random.choice(starts, number, replace=False))
    return [passage[: passage.rindex(" ")] for passage in found]


def read_passages(model: ClonedHMM, text: str, number: int, reuse: bool) -> dict[str, Any]:
    """Returns the fractions of words and characters that are restored."""
    random = np.random.default_rng(SEED)
    with Stopwatch() as watch:
        true = passages(text, number, random)
        made = [model.unscramble(scrambled(passage, random), reuse=reuse) for passage in true]
    pairs = list(zip(true, made, strict=True))
    words = [pair for x, y in pairs for pair in zip(x.split(" "), y.split(" "), strict=True)]
    letters = [pair for x, y in pairs for pair in zip(x, y, strict=True)]
    shares = {"words": _share(words), "characters": _share(letters)}
    return {**shares, "num_words": len(words), "seconds": round(watch.seconds, 1)}


def _share(pairs: list[tuple[str, str]]) -> float:
    return sum(a == b for a, b in pairs) / max(len(pairs), 1)


def read_words(model: ClonedHMM, words: list[str], reuse: bool) -> list[tuple[int, int, int]]:
    """Returns, for each length, the number of words and how many of them are restored."""
    random = np.random.default_rng(SEED)
    made = [model.unscramble(f" {scrambled(word, random)} ", reuse=reuse)[1:-1] for word in words]
    found = []
    for length in sorted({len(word) for word in words}):
        right = [word == read for word, read in zip(words, made, strict=True) if len(word) == length]
        found.append((length, len(right), sum(right)))
    return found


def read_sentence(model: ClonedHMM, true: str, reuse: bool) -> dict[str, str]:
    random = np.random.default_rng(SEED)
    given = {sentence: scrambled(sentence, random) for sentence in SENTENCES}[true]
    return {"given": given, "read": model.unscramble(given, reuse=reuse)}


@lru_cache(maxsize=1)
def load_model(run: Run) -> tuple[ClonedHMM, dict[str, str], list[str]]:
    """Returns the model, the text of both parts, and the words of the list that the training part does not contain."""
    if run.quick:
        whole = final_parts(None)
        parts = Parts(whole.train[:20], whole.scored, whole.data)
        clones = Clones(parts, 2, 800)
        clones.train(3)
        model = clones.smoothed(clones.back_off(), 0.3, 0.1, 4)
        words = ["gold", "storm", "flower", "harvest", "sunlight"]
    else:
        model = load(run.model)
        parts = final_parts(run.path / next(text.path for text in TEXTS if text.name == "melville-mobydick"))
        lines = (run.path / "wordlist" / "english-top3000.tsv").read_text().splitlines()[1:]
        words = [line.split("\t")[1] for line in lines]
    text = parts.data.text
    seen = set(text["train"].split(" "))
    return model, text, [word for word in words if len(word) in PAPER_WORDS and word not in seen]


def cases(run: Run) -> Iterator[Case]:
    for reuse in READINGS:
        yield from ({"part": part, "reuse": reuse} for part in ("training", "test", "words"))
        yield from ({"part": "sentence", "reuse": reuse, "true": sentence} for sentence in SENTENCES)


def compute(run: Run, case: Case) -> dict[str, Any]:
    part, reuse = case["part"], case["reuse"]
    model, text, unseen = load_model(run)
    if part == "words":
        return {"found": read_words(model, unseen, reuse)}
    if part == "sentence":
        return read_sentence(model, case["true"], reuse)
    return read_passages(model, text["train" if part == "training" else "test"], run.passages, reuse)


def restored_words(run: Run) -> dict[bool, dict[int, tuple[int, int]]]:
    """Returns, for both readings and each length, the number of words and how many of them were restored."""
    found = {reuse: run.records.where(part="words", reuse=reuse)[0]["found"] for reuse in READINGS}
    return {reuse: {length: (size, right) for length, size, right in counts} for reuse, counts in found.items()}


def table(run: Run) -> str:
    rows = []
    for part in ("training", "test"):
        for reuse, name in READINGS.items():
            (result,) = run.records.where(part=part, reuse=reuse)
            paper = PAPER_PASSAGES.get(part) if reuse else None
            words, characters = (
                [f"{100 * result[what]:.2f}", "-" if paper is None else f"{100 * paper[number]:.2f}"]
                for number, what in enumerate(("words", "characters"))
            )
            rows.append([f"{part} part", name, f"{result['num_words']:,}", *words, *characters])
    header = ["passages of", "readings", "words", "words read right, %", "paper", "characters, %", "paper"]
    made = [markdown_table(header, rows)]
    found, rows = restored_words(run), []
    for length, (size, _) in found[False].items():
        ours = [f"{100 * found[reuse][length][1] / size:.1f}" for reuse in READINGS]
        share, number = PAPER_WORDS[length]
        rows.append([str(length), str(size), *ours, str(number), f"{100 * share:.1f}"])
    header = [
        "letters",
        "unseen words",
        *(f"{name}, read right, %" for name in READINGS.values()),
        "paper's words",
        "paper, %",
    ]
    made.append(markdown_table(header, rows))
    sentences = zip(*(run.records.where(part="sentence", reuse=reuse) for reuse in READINGS), strict=True)
    rows = [[once["given"], once["read"], reused["read"]] for once, reused in sentences]
    made.append(markdown_table(["scrambled", *READINGS.values()], rows))
    return "\n".join(made)


def figure(run: Run) -> Figure:
    plot, axes = panel(5.6, 3.4)
    found = restored_words(run)
    lengths = sorted(found[False])
    for place, (reuse, name) in enumerate(READINGS.items()):
        shares = [100 * found[reuse][n][1] / found[reuse][n][0] for n in lengths]
        axes.bar([n + 0.27 * (place - 1) for n in lengths], shares, 0.25, color=COLORS[place], label=f"ours, {name}")
    paper = [100 * PAPER_WORDS[n][0] for n in lengths]
    axes.bar([n + 0.27 for n in lengths], paper, 0.25, color=COLORS[2], label="the paper's (another word list)")
    axes.set_xticks(lengths, [f"{n}\n({found[False][n][0]} words)" for n in lengths], fontsize="small")
    axes.set(xlabel="letters of the word", ylabel="unseen words read right, %")
    legend(axes)
    return plot


MODEL = "logs/experiments/cloned/texts/melville-mobydick.ckpt"
EXPERIMENT = Experiment(
    folder="cloned/scrambled",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        DATA_FOLDER,
        Option("--model", type=Path, default=Path(MODEL), help="checkpoint (%(default)s if not given)"),
    ],
    settings={"passages": 30},
    quick={"passages": 2},
    quick_help="a small model of Python's help texts, two passages, five words",
)

if __name__ == "__main__":
    run(EXPERIMENT)
