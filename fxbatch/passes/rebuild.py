"""Copying a batched graph node by node, reconnecting by value what a rewrite has changed.

build = GraphBuilder(batched.program, "pass-throughs elided")
for name, node in batched.nodes():
    copy_node(build, batched, name, node)
build.build()                                  # the same graph again, under another stage
"""

from __future__ import annotations

import numpy as np

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Node, Read


def copy_node(build: GraphBuilder, batched: BatchedGraph, name: str, node: Node) -> None:
    """Add a node: inputs that come from a gather keep it, all others connect to who gives the values now."""
    gathers = {
        read.input: before
        for before, read in batched.reads(name)
        if batched.node(before).kind == "gather" and before in build.graph
    }
    build.add(name, node, give=False, connect=False)
    for i, wanted in enumerate(node.wants):
        if i in gathers:
            rows = np.arange(len(wanted))
            build.read(gathers[i], name, (Read(0, i, rows, rows),))
        else:
            build.connect(name, i, wanted)
    if node.kind not in ("gather", "result"):
        build.give(name, node)
