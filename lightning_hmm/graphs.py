"""A cloned HMM as a graph: its states, how they follow each other, and the communities they form."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any, Literal, get_args

import networkx as nx

Method = Literal["auto", "infomap", "louvain"]


def communities(graph: nx.DiGraph, method: Method = "auto", seed: int = 0, resolution: float = 1.0) -> list[set[int]]:
    """Groups of states that mostly follow each other, the one with the most weight inside first.

    Args:
        graph: as `ClonedHMM.state_graph` makes it.
        method: "infomap" (Rosvall and Bergstrom, 2008), which the paper uses and which needs the package of that name; "louvain"
            (Blondel et al., 2008), which is networkx's; "auto" is the first where it is installed.
        seed: of the search.
        resolution: of louvain: more than 1 makes smaller groups, which words need. Infomap finds its own size.
    """
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, but is {method!r} instead.")
    installed = find_spec("infomap") is not None
    if method == "infomap" and not installed:
        raise ModuleNotFoundError("`method` infomap needs the package infomap. Install it, or take louvain.")
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
    """The names along the most probable paths inside a group of states, from where it is entered to where it is left.

    Args:
        graph: the whole one, of which the states are a part.
        states: the group.
        most: how many to give; those of the largest product of transition shares.
        longest: steps of a path.
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
    """Paths that stay inside, with the share of leaving walks that take each; those below a thousandth are not followed."""
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
