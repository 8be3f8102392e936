"""Figures 2, 3b and 4: what the toy machine's transitions become, the time of a forward step, and the words in the graph of a text's states.

``python -m experiments.cloned.figures --path milton-paradise.txt`` (``--parts matrix`` for Figure 2 alone, ``forward`` for 3b, on an idle machine,
``communities`` for 4; without a path, of the help texts that come with Python)

Figure 2: k = 3, two clones of each of the 14 symbols, the best of 10 starts on the training data, beside a standard HMM of as many states.
Figure 3b: one sequence, random transitions between all clones of 27 symbols, in blocks and with a hundredth of them kept, beside an LSTM of 256 units;
processor time of one thread. Random transitions are the worst case: the messages of a trained model sit on a handful of clones.
Figure 4: states of a model trained on the text, joined by how often they follow each other in it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from datamodules import TextDataModule, ToyMachineDataModule
from experiments.records import Records, markdown_table
from lightning_hmm import ClonedHMM, Sequences, StandardHMM, fit, inference
from lightning_hmm.graphs import communities, strings
from lightning_hmm.inference.cloned import Layout
from lightning_hmm.plots import COLOURS, clone_matrix, state_graph, transition_matrix

LEAST_COUNT, LEAST_SHARE = 3.0, 0.05  # of edges that are left in the graph
PARTS = ("matrix", "forward", "communities")
NUM_SYMBOLS = 27


def bits_per_symbol(model: Any, sequences: Sequences) -> float:
    return -float(model.score(sequences).sum()) / sequences.num_steps / math.log(2)


# Figure 2


def learn_matrices(starts: int, online: int, batch: int, num_runs: int | None) -> dict[str, Any]:
    """The toy machine learnt by online and then batch EM, and by a standard HMM; and both transition matrices."""
    data = ToyMachineDataModule(k=3, num_runs=num_runs)
    data.setup()
    options = {"discount": 0.5, "sequences_per_update": 1, "online_epochs": online, "transition_pseudocount": 1e-6, "restarts": starts}
    model = ClonedHMM(clones=[2] * data.num_symbols, num_symbols=data.num_symbols, **options)
    fit(model, data.train_sequences, online + batch, 0)
    standard = StandardHMM(model.num_states, data.num_symbols)
    fit(standard, data.train_sequences, 20 * batch)
    reached = [bits_per_restart(model, data.test_sequences, restart) for restart in range(starts)]
    found = {"test": bits_per_symbol(model, data.test_sequences), "hmm": bits_per_symbol(standard, data.test_sequences)}
    found |= {"exact": data.exact_bits("test"), "restarts": reached}
    return {**found, "cloned": in_order(model).tolist(), "standard": standard.transition_probs.tolist(), "names": list(data.vocabulary.names)}


def bits_per_restart(model: ClonedHMM, sequences: Sequences, restart: int) -> float:
    with torch.no_grad():
        score = inference.log_likelihood(*model.problem(sequences, restart)).sum()
    return -float(score) / sequences.num_steps / math.log(2)


def in_order(model: ClonedHMM) -> np.ndarray:
    """Transitions, with the clones of each symbol in the order in which they come after signal 0 (on the way to 1), so that the two ways lie apart."""
    matrix, symbols = model.transition_probs.numpy(), model.layout.symbols.numpy()
    after = np.where(symbols == 0, 1.0, 0.0)
    seen = np.zeros(len(matrix))
    for _ in range(8):  # the steps from a signal to its answer
        after = after @ matrix
        seen = np.maximum(seen, after)
    order = np.lexsort((-seen, symbols))
    return matrix[np.ix_(order, order)]


def draw_matrices(record: dict[str, Any], out: Path) -> str:
    names = record["names"]
    clone_matrix(np.array(record["cloned"]), np.full(len(names), 2), names).savefig(out / "matrix.png", dpi=150)
    transition_matrix(np.array(record["standard"])).savefig(out / "matrix_hmm.png", dpi=150)
    reached = sum(bits < record["exact"] + 0.002 for bits in record["restarts"])
    rows = [["cloned HMM", f"{record['test']:.4f}"], ["standard HMM", f"{record['hmm']:.4f}"], ["true model", f"{record['exact']:.4f}"]]
    return markdown_table(["", "bits per symbol"], rows) + f"\n{reached} of {len(record['restarts'])} starts come within 0.002 of the true model.\n"


# Figure 3b


def seconds_a_step(call: Callable[[], Any], steps: int, rounds: int) -> float:
    """Of processor time, in the best of some rounds, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times[1:]) / steps


def random_cloned(clones: int, kept: float | None) -> ClonedHMM:
    """Random transitions between all clones, or to a share of the clones of each symbol, drawn for each clone."""
    model = ClonedHMM(clones=[clones] * NUM_SYMBOLS, num_symbols=NUM_SYMBOLS, arithmetic="float32")
    if kept is None:
        return model.set_layout(Layout(model.transition.given_clones))
    each = max(1, round(kept * clones))
    rows = torch.arange(model.num_states).repeat_interleave(NUM_SYMBOLS * each)
    targets = np.random.default_rng(0).integers(0, clones, (model.num_states, NUM_SYMBOLS, each)) + clones * np.arange(NUM_SYMBOLS)[:, None]
    entries = torch.unique(rows * model.num_states + torch.from_numpy(targets.reshape(-1)))
    return model.set_layout(Layout.of_entries(model.transition.given_clones, entries // model.num_states, entries % model.num_states)[0])


@torch.no_grad()
def time_forward(what: str, clones: int | None, steps: int, rounds: int) -> dict[str, float]:
    symbols = torch.from_numpy(np.random.default_rng(0).integers(0, NUM_SYMBOLS, steps))
    if clones is not None:
        model, sequences = random_cloned(clones, None if what == "blocks" else 0.01), Sequences.from_lengths(symbols, [steps])
        return {"seconds": seconds_a_step(lambda: model.score(sequences), steps, rounds)}
    network, inputs = torch.nn.LSTM(NUM_SYMBOLS, 256), torch.nn.functional.one_hot(symbols, NUM_SYMBOLS).float()

    def by_steps() -> None:
        state = None
        for row in inputs:
            _, state = network(row.reshape(1, 1, -1), state)

    call = by_steps if what == "lstm" else lambda: network(inputs[:, None])
    return {"seconds": seconds_a_step(call, steps, rounds)}


FORWARD = {"blocks": "cloned HMM", "kept": "cloned HMM, 1 % of transitions kept", "lstm": "LSTM, 256 units, step by step", "lstm_whole": "LSTM, in one call"}


def draw_forward(records: Records, sizes: tuple[int, ...], settings: dict[str, Any], out: Path) -> str:
    plot = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes, rows = plot.subplots(), []
    for number, (what, name) in enumerate(FORWARD.items()):
        if what.startswith("lstm"):
            micro = [1e6 * records.where(part="forward", what=what, clones=None, **settings)[-1]["seconds"]] * len(sizes)
            axes.plot(sizes, micro, color=COLOURS[number], linestyle="--" if what == "lstm" else ":", label=name)
        else:
            micro = [1e6 * records.where(part="forward", what=what, clones=clones, **settings)[-1]["seconds"] for clones in sizes]
            axes.plot(sizes, micro, marker="o", markersize=4, color=COLOURS[number], label=name)
        rows.append([name, *(f"{value:.3g}" for value in micro)])
    axes.set(xlabel="clones of each of 27 symbols", ylabel="microseconds a step", xscale="log", yscale="log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    plot.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize="small", loc="outside upper center", ncols=2)
    plot.savefig(out / "forward.png", dpi=150)
    return "Microseconds a step\n\n" + markdown_table(["", *(f"{size:,} clones" for size in sizes)], rows)


# Figure 4


def text_model(data: TextDataModule, states: int, epochs: int, kept: Path) -> ClonedHMM:
    """A model of the text by batch EM, kept in a file."""
    names = list(data.vocabulary.names)
    model = ClonedHMM(states, data.num_symbols, allocation="ngram", ngram_order=6, arithmetic="float32", symbol_names=names)
    if kept.exists():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model.eval()
    fit(model, data.train_sequences, epochs, 0)
    torch.save(model.state_dict(), kept)
    return model


def find_communities(path: str | None, states: int, epochs: int, resolution: float, out: Path) -> dict[str, Any]:
    """The communities of a text model's states: how many, how large, what they spell, and the ones to draw."""
    data = TextDataModule(path, batch_size=10_000)
    data.setup()
    model = text_model(data, states, epochs, out / f"{Path(path).stem if path else 'help'}_{states}_{epochs}.pt")
    graph = model.state_graph(data.train_sequences, threshold=LEAST_COUNT)
    weak = [(i, j) for i, j, weight in graph.edges(data="weight") if weight < LEAST_SHARE * graph.out_degree(i, weight="weight")]
    graph.remove_edges_from(weak)
    graph.remove_nodes_from([state for state, name in graph.nodes(data="name") if name == " "])  # which all words share
    graph.remove_nodes_from(list(nx.isolates(graph)))
    groups = communities(graph, resolution=resolution)
    text = "".join(data.vocabulary.decode(data.train_sequences.values.tolist()))
    spelt = [strings(graph, group, most=6) for group in groups]
    shown = pick(groups, spelt, text)
    parts = [{"names": {str(n): graph.nodes[n]["name"] for n in groups[k]}, "edges": list(graph.subgraph(groups[k]).edges(data="weight"))} for k in shown]
    sizes = sorted(map(len, groups))
    found = {"bits": bits_per_symbol(model, data.train_sequences), "nodes": len(graph), "edges": graph.number_of_edges(), "groups": len(groups)}
    spelt = [[word + ("" if word in text else " (new)") for word in spelt[k]] for k in shown]
    return {**found, "sizes": [sizes[0], sizes[len(sizes) // 2], sizes[-1]], "shown": spelt, "parts": parts}


def pick(groups: list[set[int]], spelt: list[list[str]], text: str, most: int = 9) -> list[int]:
    """The heaviest groups of a size that can be drawn, whose first strings are parts of the text, no two beginning with the same."""
    chosen: list[int] = []
    for k, (group, found) in enumerate(zip(groups, spelt, strict=True)):
        if 4 <= len(group) <= 14 and found and len(found[0]) >= 3 and found[0] in text and found[0] not in {spelt[other][0] for other in chosen}:
            chosen.append(k)
    return chosen[:most]


def draw_communities(record: dict[str, Any], out: Path) -> str:
    graph, groups = nx.DiGraph(), []
    for part in record["parts"]:
        graph.add_nodes_from((int(state), {"name": name}) for state, name in part["names"].items())
        graph.add_weighted_edges_from(part["edges"])
        groups.append({int(state) for state in part["names"]})
    titles = [", ".join(sorted(found, key=len, reverse=True)[:3]) for found in record["shown"]]
    if groups:
        state_graph(graph, groups, titles).savefig(out / "communities.png", dpi=150)
    smallest, median, largest = record["sizes"]
    words = (
        f"{record['groups']} communities of {smallest} to {largest} states, {median} in the median; a graph of {record['nodes']:,} states and "
        f"{record['edges']:,} edges; {record['bits']:.3f} bits per symbol of the training part.\n\n"
    )
    return words + markdown_table(["community", "spells"], [[str(n), ", ".join(f"`{word}`" for word in found)] for n, found in enumerate(record["shown"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--path", help="a text, for Figure 4")
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/cloned/figures"))
    parser.add_argument("--quick", action="store_true", help="small models, few epochs, few steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    matrix, sizes, timing = {"starts": 10, "online": 100, "batch": 30, "num_runs": None}, (10, 20, 50, 100, 200, 400, 800), {"steps": 1000, "rounds": 4}
    text = {"path": args.path and Path(args.path).stem, "states": 2000, "epochs": 25, "resolution": 20.0}
    if args.quick:
        matrix, sizes, timing = {"starts": 2, "online": 2, "batch": 2, "num_runs": 100}, (5, 10), {"steps": 50, "rounds": 1}
        text |= {"states": 100, "epochs": 2}
    jobs: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []
    if "matrix" in args.parts:
        jobs.append(({"part": "matrix", **matrix}, lambda: learn_matrices(**matrix)))
    if "forward" in args.parts:
        points = [(what, clones) for what in FORWARD for clones in ((None,) if what.startswith("lstm") else sizes)]
        jobs += [({"part": "forward", "what": w, "clones": c, **timing}, lambda w=w, c=c: time_forward(w, c, **timing)) for w, c in points]
    if "communities" in args.parts:
        jobs.append(({"part": "communities", **text}, lambda: find_communities(args.path, text["states"], text["epochs"], text["resolution"], args.out)))
    records = Records(args.out / "records.jsonl")
    for settings, measure in jobs:
        if not records.has(**settings):
            records.add(**settings, **measure())
            print(f"Done: {settings}", flush=True)
    made = {
        "matrix": lambda: draw_matrices(records.where(part="matrix", **matrix)[-1], args.out),
        "forward": lambda: draw_forward(records, sizes, timing, args.out),
        "communities": lambda: draw_communities(records.where(part="communities", **text)[-1], args.out),
    }
    for part in args.parts:
        table = made[part]()
        (args.out / f"{part}.md").write_text(table)
        print(table)
    print(f"Written to {args.out}: a table and a figure for each part, records.jsonl.")


if __name__ == "__main__":
    main()
