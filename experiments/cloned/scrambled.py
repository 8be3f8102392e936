"""Section 4.2.2 and Figure 5: words whose inner letters were put in any order, set right by a cloned HMM of Moby-Dick.

``python -m experiments.cloned.scrambled --path <folder>`` (with gutenberg/ and wordlist/; $LIGHTNING_HMM_DATA if not given)

The model is that of ``experiments.cloned.texts --texts melville-mobydick``, which comes first. Thirty passages of up to 600 symbols, whole words,
are drawn from the training part and thirty from the test part; then each word of a list of frequent ones that the training part does not have
is read by itself, between two spaces. Readings take each inner letter of a word once, or as the paper's do: any of them at each place.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.cloned.texts import TEXTS, Clones, Parts, final_parts
from experiments.records import Records, markdown_table
from lightning_hmm import ClonedHMM, load
from lightning_hmm.plots import COLOURS

SEED = 0
PASSAGES, LENGTH = 30, 600
PAPER_PASSAGES = {"training": (0.9902, 0.9942)}
PAPER_WORDS = {4: (0.741, 89), 5: (0.4545, 99), 6: (0.403, 144), 7: (0.279, 172), 8: (0.216, 134)}
WAYS = {False: "each letter once", True: "letters reused"}  # how a reading may take the inner letters of a word
SENTENCES = ("let us graduate and relax", "my boss likes to code", "we should purchase that historic downtown", "i disagree with my neighbor")


def scrambled(text: str, random: np.random.Generator) -> str:
    """The letters of each word in any order, but for its first and last."""
    return " ".join(word[:1] + "".join(random.permutation(list(word[1:-1]))) + word[-1:] if len(word) > 3 else word for word in text.split(" "))


def passages(text: str, number: int, random: np.random.Generator) -> list[str]:
    """Stretches of whole words, of up to 600 symbols."""
    starts = np.flatnonzero(np.frombuffer(text.encode(), np.uint8) == ord(" ")) + 1
    starts = starts[starts < len(text) - LENGTH - 1]
    found = (text[start : start + LENGTH + 1] for start in random.choice(starts, number, replace=False))
    return [passage[: passage.rindex(" ")] for passage in found]


def read(model: ClonedHMM, texts: list[str], reuse: bool) -> list[str]:
    """All texts set right."""
    return [model.unscramble(text, reuse=reuse) for text in texts]


def read_passages(model: ClonedHMM, text: str, number: int, reuse: bool) -> dict[str, Any]:
    random, begin = np.random.default_rng(SEED), time.process_time()
    true = passages(text, number, random)
    made = read(model, [scrambled(passage, random) for passage in true], reuse)
    words = [(a, b) for x, y in zip(true, made, strict=True) for a, b in zip(x.split(" "), y.split(" "), strict=True)]
    letters = [(a, b) for x, y in zip(true, made, strict=True) for a, b in zip(x, y, strict=True)]
    return {"words": _share(words), "characters": _share(letters), "num_words": len(words), "seconds": round(time.process_time() - begin, 1)}


def _share(pairs: list[tuple[str, str]]) -> float:
    return sum(a == b for a, b in pairs) / max(len(pairs), 1)


def read_words(model: ClonedHMM, words: list[str], reuse: bool) -> dict[int, tuple[int, int]]:
    """For each length, how many words there are and how many were read right."""
    random = np.random.default_rng(SEED)
    made = read(model, [f" {scrambled(word, random)} " for word in words], reuse)
    lengths = sorted({len(word) for word in words})
    right = [word == found[1:-1] for word, found in zip(words, made, strict=True)]
    return {n: (sum(len(word) == n for word in words), sum(good for word, good in zip(words, right, strict=True) if len(word) == n)) for n in lengths}


def figure(found: dict[bool, dict[int, tuple[int, int]]]) -> Figure:
    plot = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = plot.subplots()
    lengths = sorted(found[False])
    for place, (reuse, name) in enumerate(WAYS.items()):
        shares = [100 * found[reuse][n][1] / found[reuse][n][0] for n in lengths]
        axes.bar([n + 0.27 * (place - 1) for n in lengths], shares, 0.25, color=COLOURS[place], label=f"ours, {name}")
    axes.bar([n + 0.27 for n in lengths], [100 * PAPER_WORDS[n][0] for n in lengths], 0.25, color=COLOURS[2], label="the paper's (another word list)")
    axes.set_xticks(lengths, [f"{n}\n({found[False][n][0]} words)" for n in lengths], fontsize="small")
    axes.set(xlabel="letters of the word", ylabel="unseen words read right, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return plot


def quick_model() -> tuple[ClonedHMM, Parts, list[str]]:
    """A small model of Python's help texts, and words that it may not have seen."""
    whole = final_parts(None)
    parts = Parts(whole.train[:20], whole.scored, whole.data)
    clones = Clones(parts, 2, 800)
    clones.train(3)
    return clones.smoothed(clones.back_off(), 0.3, 0.1, 4), parts, ["gold", "storm", "flower", "harvest", "sunlight"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path(os.environ.get("LIGHTNING_HMM_DATA", "data")), help="folder of the texts and the word list")
    parser.add_argument("--model", type=Path, default=Path("logs/experiments/cloned/texts/melville-mobydick.ckpt"))
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/cloned/scrambled"))
    parser.add_argument("--quick", action="store_true", help="a small model of Python's help texts, two passages, five words")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(args.out / "records.jsonl")
    if args.quick:
        model, parts, words = quick_model()
    else:
        model = load(args.model)
        parts = final_parts(args.path / next(text.path for text in TEXTS if text.name == "melville-mobydick"))
        lines = (args.path / "wordlist" / "english-top3000.tsv").read_text().splitlines()[1:]
        words = [line.split("\t")[1] for line in lines]
    seen = set(parts.data.text["train"].split(" "))
    unseen = [word for word in words if len(word) in PAPER_WORDS and word not in seen]
    for reuse in WAYS:
        for part, text in (("training", parts.data.text["train"]), ("test", parts.data.text["test"])):
            if not records.has(part=part, reuse=reuse):
                records.add(part=part, reuse=reuse, **read_passages(model, text, 2 if args.quick else PASSAGES, reuse))
                print(records.where(part=part, reuse=reuse), flush=True)
        if not records.has(part="words", reuse=reuse):
            records.add(part="words", reuse=reuse, found=[[n, *counts] for n, counts in read_words(model, unseen, reuse).items()])
            random = np.random.default_rng(SEED)
            for true in SENTENCES:  # of Figure 5
                given = scrambled(true, random)
                records.add(part="sentence", reuse=reuse, true=true, given=given, read=read(model, [given], reuse)[0])
    rows = []
    for part in ("training", "test"):
        for reuse, name in WAYS.items():
            (result,) = records.where(part=part, reuse=reuse)
            paper = [f"{100 * number:.2f}" for number in PAPER_PASSAGES[part]] if reuse and part in PAPER_PASSAGES else ["-", "-"]
            shares = [f"{100 * result[what]:.2f}" for what in ("words", "characters")]
            rows.append([part, name, f"{result['num_words']:,}", shares[0], paper[0], shares[1], paper[1]])
    made = markdown_table(["passages of", "readings", "words", "words read right, %", "paper", "characters, %", "paper"], rows) + "\n"
    found = {reuse: {n: (size, right) for n, size, right in records.where(part="words", reuse=reuse)[0]["found"]} for reuse in WAYS}
    cells = [
        [str(n), str(size), *(f"{100 * found[reuse][n][1] / size:.1f}" for reuse in WAYS), str(PAPER_WORDS[n][1]), f"{100 * PAPER_WORDS[n][0]:.1f}"]
        for n, (size, _) in found[False].items()
    ]
    made += markdown_table(["letters", "unseen words", *(f"{name}, read right, %" for name in WAYS.values()), "paper's words", "paper, %"], cells) + "\n"
    sentences = zip(*(records.where(part="sentence", reuse=reuse) for reuse in WAYS), strict=True)
    made += markdown_table(["scrambled", *WAYS.values()], [[pair[0]["given"], *(record["read"] for record in pair)] for pair in sentences])
    (args.out / "table.md").write_text(made)
    print(made)
    figure(found).savefig(args.out / "figure.png", dpi=150)
    print(f"Written to {args.out}: table.md, figure.png, records.jsonl.")


if __name__ == "__main__":
    main()
