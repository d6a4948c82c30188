"""BatchedGraph -> BatchedGraph in which each depth reads the depth before and no other (Looks et al. 2017).

A value that is read further up is carried there by pass-throughs, one node a depth and tensor type:

    b1 depth 1   b4 depth 3: input 0 <- b1.0[0] at [0]
    ==>
    b1 depth 1   p2.0 depth 2: pass x1   b4 depth 3: input 0 <- p2.0.0[0] at [0]

Results are read at the depth after the last.
"""

from __future__ import annotations

import numpy as np

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Node


def insert_pass_throughs(batched: BatchedGraph) -> BatchedGraph:
    """The graph with a node `p<depth>.<type>` for the values that a depth carries on."""
    program = batched.program
    made, last = _lifetimes(batched)
    build = GraphBuilder(program, "pass-throughs inserted")
    by_depth: dict[int, list[tuple[str, Node]]] = {}
    for name, node in batched.nodes():
        by_depth.setdefault(node.depth, []).append((name, node))
    for depth in sorted(by_depth):
        for name, node in by_depth[depth]:
            build.add(name, node, give=node.kind != "result")
        carried = np.flatnonzero((made < depth) & (depth < last))
        for t in np.unique(program.type_of_value[carried]).tolist():
            values = carried[program.type_of_value[carried] == t]
            build.add(f"p{depth}.{t}", Node("pass", depth, (program.types[t],), (values,), (values,)))
    return build.build()


def _lifetimes(batched: BatchedGraph) -> tuple[np.ndarray, np.ndarray]:
    """A value: the depth that makes it, and the last depth that reads it."""
    made = np.zeros(batched.program.values, dtype=np.int64)
    last = np.zeros(batched.program.values, dtype=np.int64)
    for _, node in batched.nodes("known", "batch"):
        for values in node.gives:
            made[values] = node.depth
    for _, node in batched.nodes():
        for values in node.wants:
            np.maximum.at(last, values, node.depth)
    return made, last
