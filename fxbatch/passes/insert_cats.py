"""BatchedGraph -> BatchedGraph with a cat for each depth and tensor type (Looks et al. 2017, section 2).

A cat puts the outputs of one type of all batches and pass-throughs of one depth one after another, so
that a gather is one index into one tensor. The row i of cat (d, t) is the value with label (d, t, i).

    g.b4.0: input 0 <- b1.0[3] at [0]             c1.0 depth 1: cat x9
            input 0 <- b2.0[0] at [1]    ==>      g.b4.0: input 0 <- c1.0.0[3,7] at [0:2]
"""

from __future__ import annotations

import numpy as np

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Node
from fxbatch.passes.rebuild import copy_node


def insert_cats(batched: BatchedGraph) -> BatchedGraph:
    """The graph in which gathers read from cats `c<depth>.<type>` only."""
    build = GraphBuilder(batched.program, "cats inserted")
    by_depth: dict[int, list[tuple[str, Node]]] = {}
    for name, node in batched.nodes():
        by_depth.setdefault(node.depth, []).append((name, node))
    for depth in sorted(by_depth):
        # A depth's gathers read what the depths before have made, so they connect before it gives.
        for name, node in by_depth[depth]:
            if node.kind == "gather":
                copy_node(build, batched, name, node)
        for name, node in by_depth[depth]:
            if node.kind != "gather":
                copy_node(build, batched, name, node)
        _add_cats(build, depth, [node for _, node in by_depth[depth]])
    return build.build()


def _add_cats(build: GraphBuilder, depth: int, nodes: list[Node]) -> None:
    program = build.program
    pieces: dict[int, list[np.ndarray]] = {}
    for node in nodes:
        if node.kind in ("known", "batch", "pass"):
            for type_, values in zip(node.types, node.gives, strict=True):
                pieces.setdefault(program.type_ids[type_], []).append(values)
    for t in sorted(pieces):
        wants = tuple(pieces[t])
        build.add(f"c{depth}.{t}", Node("cat", depth, (program.types[t],), (np.concatenate(wants),), wants))
