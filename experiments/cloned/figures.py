"""Figures 2, 3b and 4: transitions of the toy machine, the time of a forward step, and words in a graph of states.

``python -m experiments.cloned.figures --path milton-paradise.txt`` (``--parts matrix`` for Figure 2 alone, ``forward``
for 3b, on an idle machine, ``communities`` for 4; without a path, of the help texts that come with Python)

Figure 2: k = 3, two clones of each of the 14 symbols, the best of 10 restarts on the training data, compared with a
standard HMM with the same number of states. Figure 3b: one sequence, random transitions between all clones of 27
symbols, all of them or a hundredth, compared with an LSTM of 256 units; processor time of one thread. Random
transitions are the worst case: the messages of a trained model are concentrated on few clones. Figure 4: states of a
model trained on the text, connected by how often they follow each other in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from matplotlib.figure import Figure

from datamodules import TextDataModule, ToyMachineDataModule
from experiments.measures import best_seconds, bits_per_symbol
from experiments.panels import legend, log_ticks, panel
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm import ClonedHMM, Sequences, StandardHMM, fit, inference
from lightning_hmm.graphs import communities, strings
from lightning_hmm.inference.cloned import Layout
from lightning_hmm.plotting import COLORS, clone_matrix, state_graph, transition_matrix

MIN_COUNT, MIN_SHARE = (
    3.0,
    0.05,
)  # Edges below this count, or this share of what leaves a state, are removed from the graph.
PARTS = ("matrix", "forward", "communities")
NUM_SYMBOLS = 27
FORWARD = {
    "blocks": "cloned HMM",
    "kept": "cloned HMM, 1 % of transitions kept",
    "lstm": "LSTM, 256 units, step by step",
    "lstm_whole": "LSTM, in one call",
}


# Figure 2


def learn_matrices(starts: int, online: int, batch: int, num_runs: int | None) -> dict[str, Any]:
    """Trains a cloned and a standard HMM on the toy machine; returns bits per symbol and transitions."""
    data = ToyMachineDataModule(k=3, num_runs=num_runs)
    data.setup()
    assert data.vocabulary is not None
    names = list(data.vocabulary.names)
    updates: dict[str, Any] = {"discount": 0.5, "sequences_per_update": 1, "online_epochs": online}
    options: dict[str, Any] = {"restarts": starts, "transition_pseudocount": 1e-6, **updates}
    model = ClonedHMM(clones=[2] * len(names), num_symbols=len(names), **options)
    fit(model, data.train_sequences, online + batch, 0)
    standard = StandardHMM(model.num_states, data.num_symbols)
    fit(standard, data.train_sequences, 20 * batch)
    test = data.test_sequences
    return {
        "test": bits_per_symbol(model, test),
        "hmm": bits_per_symbol(standard, test),
        "exact": data.exact_bits("test"),
        "restarts": [bits_per_restart(model, test, restart) for restart in range(starts)],
        "cloned": in_order(model).tolist(),
        "standard": standard.transition_probs.tolist(),
        "names": names,
    }


def bits_per_restart(model: ClonedHMM, sequences: Sequences, restart: int) -> float:
    with torch.no_grad():
        score = inference.log_likelihood(*model.problem(sequences, restart)).sum()
    return -float(score) / sequences.num_steps / math.log(2)


def in_order(model: ClonedHMM) -> np.ndarray:
    """Returns the transitions with the clones of each symbol sorted by their probability after signal 0."""
    matrix, symbols = model.transition_probs.numpy(), model.layout.symbols.numpy()
    after = np.where(symbols == 0, 1.0, 0.0)
    seen = np.zeros(len(matrix))
    for _ in range(8):  # steps from a signal to its answer
        after = after @ matrix
        seen = np.maximum(seen, after)
    order = np.lexsort((-seen, symbols))
    return matrix[np.ix_(order, order)]


def matrix_table(run: Run) -> str:
    found = run.records.where(part="matrix", **run.matrix)[-1]
    names = {"cloned HMM": "test", "standard HMM": "hmm", "true model": "exact"}
    made = markdown_table(["", "bits per symbol"], [[name, f"{found[what]:.4f}"] for name, what in names.items()])
    reached = sum(bits < found["exact"] + 0.002 for bits in found["restarts"])
    return f"{made}\n{reached} of {len(found['restarts'])} starts come within 0.002 of the true model.\n"


def matrix_figures(run: Run) -> dict[str, Figure]:
    found = run.records.where(part="matrix", **run.matrix)[-1]
    clones = np.full(len(found["names"]), 2)
    cloned = clone_matrix(np.array(found["cloned"]), clones, found["names"])
    return {"matrix": cloned, "matrix_hmm": transition_matrix(np.array(found["standard"]))}


# Figure 3b


def random_cloned(clones: int, kept: float | None) -> ClonedHMM:
    """Returns a model with random transitions to all clones, or to a fraction `kept` of those of each symbol."""
    model = ClonedHMM(clones=[clones] * NUM_SYMBOLS, num_symbols=NUM_SYMBOLS, arithmetic="float32")
    if kept is None:
        return model.set_layout(Layout(model.transition.given_clones))
    each = max(1, round(kept * clones))
    rows = torch.arange(model.num_states).repeat_interleave(NUM_SYMBOLS * each)
    targets = np.random.default_rng(0).integers(0, clones, (model.num_states, NUM_SYMBOLS, each))
    targets += clones * np.arange(NUM_SYMBOLS)[:, None]
    entries = torch.unique(rows * model.num_states + torch.from_numpy(targets.reshape(-1)))
    clones_of_symbols = model.transition.given_clones
    layout, _ = Layout.of_entries(clones_of_symbols, entries // model.num_states, entries % model.num_states)
    return model.set_layout(layout)


@torch.no_grad()
def time_forward(what: str, clones: int | None, steps: int, rounds: int) -> dict[str, float]:
    """Returns the seconds of a forward step of a cloned HMM, or, without `clones`, of an LSTM."""
    symbols = torch.from_numpy(np.random.default_rng(0).integers(0, NUM_SYMBOLS, steps))
    call: Callable[[], object]
    if clones is not None:
        model, sequences = (
            random_cloned(clones, None if what == "blocks" else 0.01),
            Sequences.from_lengths(symbols, [steps]),
        )
        call = lambda: model.score(sequences)  # noqa: E731
    else:
        network = torch.nn.LSTM(NUM_SYMBOLS, 256)
        inputs = torch.nn.functional.one_hot(symbols, NUM_SYMBOLS).float()
        call = (lambda: by_steps(network, inputs)) if what == "lstm" else (lambda: network(inputs[:, None]))
    return {"seconds": best_seconds(call, rounds) / steps}


def by_steps(network: torch.nn.LSTM, inputs: torch.Tensor) -> None:
    """Calls the network once for each step."""
    state = None
    for row in inputs:
        _, state = network(row.reshape(1, 1, -1), state)


def forward_times(run: Run, what: str) -> list[float]:
    """Returns the microseconds of a forward step for each number of clones, which an LSTM does not depend on."""

    def microseconds(clones: int | None) -> float:
        return 1e6 * float(run.records.where(part="forward", what=what, clones=clones, **run.timing)[-1]["seconds"])

    return [microseconds(None if what.startswith("lstm") else clones) for clones in run.sizes]


def forward_table(run: Run) -> str:
    rows = [[name, *(f"{time:.3g}" for time in forward_times(run, what))] for what, name in FORWARD.items()]
    return "Microseconds per step\n\n" + markdown_table(["", *(f"{size:,} clones" for size in run.sizes)], rows)


def forward_figures(run: Run) -> dict[str, Figure]:
    plot, axes = panel(6.4, 4.4, grid="both")
    dashed: dict[str, Any] = {"lstm": {"linestyle": "--"}, "lstm_whole": {"linestyle": ":"}}
    for number, (what, name) in enumerate(FORWARD.items()):
        style = dashed.get(what, {"marker": "o", "markersize": 4})
        axes.plot(run.sizes, forward_times(run, what), color=COLORS[number], label=name, **style)
    axes.set(xlabel="clones of each of 27 symbols", ylabel="microseconds per step", yscale="log")
    log_ticks(axes, run.sizes)
    legend(axes, outside="upper center", columns=2)
    return {"forward": plot}


# Figure 4


def text_model(data: TextDataModule, states: int, epochs: int, kept: Path) -> ClonedHMM:
    """Trains a model of the text by batch EM and stores it in the file `kept`, or loads it from there."""
    assert data.vocabulary is not None
    options: dict[str, Any] = {"allocation": "ngram", "ngram_order": 6, "arithmetic": "float32"}
    model = ClonedHMM(states, data.num_symbols, symbol_names=list(data.vocabulary.names), **options)
    if kept.exists():
        model.load_state_dict(torch.load(kept, weights_only=True))
        return model.eval()
    fit(model, data.train_sequences, epochs, 0)
    torch.save(model.state_dict(), kept)
    return model


def word_graph(model: ClonedHMM, sequences: Sequences) -> nx.DiGraph:
    """Returns the graph of states without weak edges and without the states of the space, which all words share."""
    graph = model.state_graph(sequences, threshold=MIN_COUNT)
    leaving = dict(graph.out_degree(weight="weight"))
    graph.remove_edges_from([(i, j) for i, j, weight in graph.edges(data="weight") if weight < MIN_SHARE * leaving[i]])
    graph.remove_nodes_from([state for state, name in graph.nodes(data="name") if name == " "])
    graph.remove_nodes_from(list(nx.isolates(graph)))
    return graph


def find_communities(path: str | None, states: int, epochs: int, resolution: float, out: Path) -> dict[str, Any]:
    """Returns number and sizes of the communities of a text model's states, and some of them with their strings."""
    data = TextDataModule(path, batch_size=10_000)
    data.setup()
    model = text_model(data, states, epochs, out / f"{Path(path).stem if path else 'help'}_{states}_{epochs}.pt")
    graph = word_graph(model, data.train_sequences)
    groups = communities(graph, resolution=resolution)
    assert data.vocabulary is not None
    text = "".join(map(str, data.vocabulary.decode(data.train_sequences.values.tolist())))
    words = [strings(graph, group, most=6) for group in groups]
    shown = pick(groups, words, text)
    sizes = sorted(map(len, groups))
    return {
        "bits": bits_per_symbol(model, data.train_sequences),
        "nodes": len(graph),
        "edges": graph.number_of_edges(),
        "groups": len(groups),
        "sizes": [sizes[0], sizes[len(sizes) // 2], sizes[-1]],
        "shown": [[word + ("" if word in text else " (new)") for word in words[k]] for k in shown],
        "parts": [
            {
                "names": {str(n): graph.nodes[n]["name"] for n in groups[k]},
                "edges": list(graph.subgraph(groups[k]).edges(data="weight")),
            }
            for k in shown
        ],
    }


def pick(groups: list[set[int]], words: list[list[str]], text: str, most: int = 9) -> list[int]:
    """Chooses the heaviest groups of 4 to 14 states whose first strings occur in the text and differ."""
    chosen: list[int] = []
    for k, (group, found) in enumerate(zip(groups, words, strict=True)):
        first = found[0] if found else ""
        taken = {words[other][0] for other in chosen}
        if 4 <= len(group) <= 14 and len(first) >= 3 and first in text and first not in taken:
            chosen.append(k)
    return chosen[:most]


def communities_table(run: Run) -> str:
    found = run.records.where(part="communities", **text_settings(run))[-1]
    smallest, median, largest = found["sizes"]
    words = (
        f"{found['groups']} communities of {smallest} to {largest} states, {median} in the median; a graph of "
        f"{found['nodes']:,} states and {found['edges']:,} edges; {found['bits']:.3f} bits per symbol of the training "
        "part.\n\n"
    )
    rows = [[str(n), ", ".join(f"`{word}`" for word in shown)] for n, shown in enumerate(found["shown"])]
    return words + markdown_table(["community", "spells"], rows)


def communities_figures(run: Run) -> dict[str, Figure]:
    found = run.records.where(part="communities", **text_settings(run))[-1]
    if not found["parts"]:
        return {}
    graph, groups = nx.DiGraph(), []
    for part in found["parts"]:
        graph.add_nodes_from((int(state), {"name": name}) for state, name in part["names"].items())
        graph.add_weighted_edges_from(part["edges"])
        groups.append({int(state) for state in part["names"]})
    titles = [", ".join(sorted(shown, key=len, reverse=True)[:3]) for shown in found["shown"]]
    return {"communities": state_graph(graph, groups, titles)}


# All of them


def text_settings(run: Run) -> dict[str, Any]:
    """Returns the settings of Figure 4, among them the name of the text."""
    return {"path": run.path and Path(run.path).stem, **run.text}


def cases(run: Run) -> Iterator[Case]:
    if "matrix" in run.parts:
        yield {"part": "matrix", **run.matrix}
    if "forward" in run.parts:
        for what in FORWARD:
            for clones in (None,) if what.startswith("lstm") else run.sizes:
                yield {"part": "forward", "what": what, "clones": clones, **run.timing}
    if "communities" in run.parts:
        yield {"part": "communities", **text_settings(run)}


def compute(run: Run, case: Case) -> dict[str, Any]:
    if case["part"] == "matrix":
        return learn_matrices(**run.matrix)
    if case["part"] == "forward":
        return time_forward(case["what"], case["clones"], **run.timing)
    return find_communities(run.path, **run.text, out=run.out)


def table(run: Run) -> dict[str, str]:
    made = {"matrix": matrix_table, "forward": forward_table, "communities": communities_table}
    return {part: made[part](run) for part in run.parts}


def figure(run: Run) -> dict[str, Figure]:
    made = {"matrix": matrix_figures, "forward": forward_figures, "communities": communities_figures}
    return {name: plot for part in run.parts for name, plot in made[part](run).items()}


EXPERIMENT = Experiment(
    folder="cloned/figures",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        Option("--parts", nargs="+", choices=PARTS, default=PARTS, help="Figures 2, 3b and 4 (all if not given)"),
        Option("--path", help="a text for Figure 4 (Python's help texts if not given)"),
    ],
    settings={
        "matrix": {"starts": 10, "online": 100, "batch": 30, "num_runs": None},
        "sizes": (10, 20, 50, 100, 200, 400, 800),
        "timing": {"steps": 1000, "rounds": 4},
        "text": {"states": 2000, "epochs": 25, "resolution": 20.0},
    },
    quick={
        "matrix": {"starts": 2, "online": 2, "batch": 2, "num_runs": 100},
        "sizes": (5, 10),
        "timing": {"steps": 50, "rounds": 1},
        "text": {"states": 100, "epochs": 2, "resolution": 20.0},
    },
    quick_help="small models, few epochs, few steps",
)

if __name__ == "__main__":
    run(EXPERIMENT)
