"""The components are networkx's, in the order in which they feed each other."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from fxbatch.passes.components import components


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=25)
        )
    )
)
def test_components_are_those_of_networkx(given_: tuple[int, list[tuple[int, int]]]) -> None:
    nodes, edges = given_
    graph = nx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    condensed = nx.condensation(graph)
    members = [sorted(condensed.nodes[p]["members"]) for p in range(len(condensed))]
    order = nx.lexicographical_topological_sort(condensed, key=lambda p: members[p][0])
    assert components(nodes, edges) == [members[p] for p in order]


def test_a_chain_that_is_longer_than_the_stack() -> None:
    n = 20_000
    assert components(n, [(i + 1, i) for i in range(n - 1)]) == [[i] for i in reversed(range(n))]
