"""Communities and typical paths in the state graph of a cloned HMM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any, Literal, get_args

import networkx as nx

Method = Literal["auto", "infomap", "louvain"]


def communities(graph: nx.DiGraph, method: Method = "auto", seed: int = 0, resolution: float = 1.0) -> list[set[int]]:
    """Returns groups of states with many transitions inside the group, in decreasing order of the weight inside.

    Args:
        graph: Graph of the states, as returned by `ClonedHMM.state_graph`.
        method: "infomap" (Rosvall and Bergstrom, 2008), the method of the paper, which requires the package infomap;
            "louvain" (Blondel et al., 2008) of networkx; or "auto", which is infomap if it is installed, otherwise
            louvain.
        seed: Seed for the search.
        resolution: Resolution of louvain. Values above 1 give smaller groups, such as words. Infomap determines the
            size itself.

    Example:
        >>> graph = nx.DiGraph()
        >>> graph.add_weighted_edges_from([(0, 1, 3.0), (1, 0, 3.0), (2, 3, 1.0), (3, 2, 1.0), (1, 2, 0.1)])
        >>> communities(graph, method="louvain")
        [{0, 1}, {2, 3}]
    """
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, but is {method!r} instead.")
    installed = find_spec("infomap") is not None
    if method == "infomap" and not installed:
        raise ModuleNotFoundError("`method` infomap requires the package infomap. Install it, or use louvain.")
    if method == "louvain" or not installed:
        found = [
            set(group)
            for group in nx.community.louvain_communities(graph, weight="weight", resolution=resolution, seed=seed)
        ]
    else:
        found = _infomap(graph, seed)
    return sorted(found, key=lambda group: -sum(weight for _, _, weight in graph.subgraph(group).edges(data="weight")))


def _infomap(graph: nx.DiGraph, seed: int) -> list[set[int]]:
    from infomap import Infomap

    search = Infomap(f"--two-level --directed --silent --seed {seed + 1}")
    for source, target, weight in graph.edges(data="weight"):
        search.add_link(source, target, weight)
    search.run()
    groups: dict[int, set[int]] = {}
    for node in search.nodes:
        groups.setdefault(node.module_id, set()).add(node.node_id)
    return list(groups.values())


def strings(graph: nx.DiGraph, states: Collection[int], most: int = 10, longest: int = 12) -> list[str]:
    """Returns the names along the most probable paths that enter a group of states, and end where they leave it.

    Args:
        graph: Graph of all states.
        states: States of the group.
        most: Largest number of paths. The probability of a path is the product of its transition shares.
        longest: Largest number of states of a path.

    Example:
        >>> graph = nx.DiGraph()
        >>> graph.add_nodes_from([(0, {"name": " "}), (1, {"name": "b"}), (2, {"name": "a"}), (3, {"name": "t"})])
        >>> graph.add_weighted_edges_from([(0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0), (3, 0, 1.0)])
        >>> strings(graph, [1, 2, 3])
        ['bat']
    """
    inside = set(states)
    entered = [state for state in inside if any(source not in inside for source in graph.predecessors(state))] or list(
        inside
    )
    weights: dict[str, float] = {}
    for state in entered:
        for path, share in _paths(graph, state, inside, longest):
            name = "".join(str(graph.nodes[node]["name"]) for node in path)
            weights[name] = weights.get(name, 0.0) + share
    return sorted(weights, key=lambda name: -weights[name])[:most]


def _paths(graph: nx.DiGraph, start: int, inside: set[int], longest: int) -> Iterator[tuple[list[int], float]]:
    """Yields paths inside a group and the probability of leaving the group after each.

    Those below 0.001 are dropped.
    """
    waiting: list[tuple[list[int], float]] = [([start], 1.0)]
    while waiting:
        path, share = waiting.pop()
        leaving: dict[Any, float] = {target: edge["weight"] for _, target, edge in graph.out_edges(path[-1], data=True)}
        total = sum(leaving.values())
        outside = sum(weight for target, weight in leaving.items() if target not in inside)
        if not total or outside:
            yield path, share * (outside / total if total else 1.0)
        for target, weight in leaving.items():
            if target in inside and len(path) < longest and share * weight / total > 1e-3:
                waiting.append(([*path, target], share * weight / total))
