"""Communities of graphs that have obvious ones, and the strings that run through a group."""

from __future__ import annotations

from importlib.util import find_spec

import networkx as nx
import pytest

from lightning_hmm.graphs import communities, strings


def chains() -> nx.DiGraph:
    """b-a-t and r-a-t share a-t; m-o-w is apart; all begin and end in a space."""
    graph = nx.DiGraph()
    names = dict(enumerate(" bratmow"))
    for state, name in names.items():
        graph.add_node(state, symbol=state, name=name)
    graph.add_weighted_edges_from(
        [
            (0, 1, 1),
            (0, 2, 3),
            (1, 3, 10),
            (2, 3, 30),
            (3, 4, 40),
            (4, 0, 4),
            (0, 5, 2),
            (5, 6, 20),
            (6, 7, 20),
            (7, 0, 2),
        ]
    )
    return graph


METHODS = [
    "louvain",
    pytest.param("infomap", marks=pytest.mark.skipif(find_spec("infomap") is None, reason="needs infomap")),
]


@pytest.mark.parametrize("method", METHODS)
def test_communities_are_found_the_heaviest_first(method):
    found = communities(chains(), method)
    assert set().union(*found) == set(range(8))
    assert sum(map(len, found)) == 8
    assert {1, 2, 3, 4} <= found[0]
    assert any({5, 6, 7} <= group for group in found[1:])


def test_a_finer_resolution_makes_smaller_groups():
    assert len(communities(chains(), "louvain", resolution=5.0)) > len(communities(chains(), "louvain"))


def test_strings_run_from_entry_to_exit():
    assert sorted(strings(chains(), {1, 2, 3, 4})) == ["bat", "rat"]
    assert strings(chains(), {5, 6, 7}) == ["mow"]
    assert strings(chains(), {5, 6, 7}, longest=2) == []


def test_what_is_not_there_is_said():
    with pytest.raises(ValueError, match="but is 'spectral'"):
        communities(chains(), "spectral")
    if find_spec("infomap") is None:
        with pytest.raises(ModuleNotFoundError, match="use louvain"):
            communities(chains(), "infomap")
