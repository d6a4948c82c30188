"""Cuts are networkx's."""

from __future__ import annotations

from typing import Any

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from fxbatch.codegen.partition import minimum_cut


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from([0, 1, 2, 3, 50, 1 << 100]))))
def test_cuts_are_the_minimum_nearest_to_the_sink(edges: list[tuple[int, int, int]]) -> None:
    flow: Any = {a: {} for a in range(8)}
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(flow)
    for a, b, capacity in edges:
        if a != b and b != 0 and a != 7:
            flow[a][b] = capacity
            graph.add_edge(a, b, capacity=capacity if capacity < 1 << 100 else float("inf"))
    try:
        _, (_, behind) = nx.minimum_cut(graph, 0, 7)
    except nx.NetworkXUnbounded:
        behind = None
    assert minimum_cut(flow, 0, 7) == behind
