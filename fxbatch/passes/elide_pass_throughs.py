"""BatchedGraph -> BatchedGraph without pass-throughs: values are read where they were made.

    p2.0 depth 2: pass x1   b4 depth 3: input 0 <- p2.0.0[0] at [0]
    ==>
    b4 depth 3: input 0 <- b1.0[0] at [0]

Possible because what a depth has made stays there: arenas (and the nodes of a graph) keep their rows. The
gathers of pass-throughs go with them; cats lose the rows that were carried.
"""

from __future__ import annotations

import numpy as np

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Node
from fxbatch.passes.rebuild import copy_node


def elide_pass_throughs(batched: BatchedGraph) -> BatchedGraph:
    """The graph without `pass` nodes; the same graph when it has none."""
    passes = batched.nodes("pass")
    if not passes:
        return batched
    build = GraphBuilder(batched.program, "pass-throughs elided")
    gone = {name for name, _ in passes}
    for name, node in batched.nodes():
        readers = list(batched.graph.successors(name))
        if name in gone or (node.kind == "gather" and readers and all(r in gone for r in readers)):
            continue
        if node.kind == "cat":
            sources = {read.input: before for before, read in batched.reads(name)}
            wants = tuple(w for i, w in enumerate(node.wants) if sources[i] not in gone)
            if not wants:
                continue
            node = Node("cat", node.depth, node.types, (np.concatenate(wants),), wants)
        copy_node(build, batched, name, node)
    return build.build()
