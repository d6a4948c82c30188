"""BatchedGraph -> BatchedGraph with a gather for each input of each batch, pass-through and result.

    b2: input 0 <- b0.0[3] at [0]                 g.b2.0: input 0 <- b0.0[3] at [0]
        input 0 <- b1.0[0] at [1]         ==>             input 0 <- b1.0[0] at [1]
                                                  b2: input 0 <- g.b2.0.0[0:2] at [0:2]

A gather takes the rows that its reader wants, in its order, from wherever they are.
"""

from __future__ import annotations

import numpy as np

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Node, Read


def insert_gathers(batched: BatchedGraph) -> BatchedGraph:
    """The graph in which every input is read, row for row, from its gather `g.<reader>.<input>`."""
    program = batched.program
    build = GraphBuilder(program, "gathers inserted")
    for name, node in batched.nodes():
        for i, wanted in enumerate(node.wants):
            type_ = program.types[program.type_of_value[wanted[0]]]
            build.add(f"g.{name}.{i}", Node("gather", node.depth, (type_,), (wanted,), (wanted,)), give=False)
        build.add(name, node, give=node.kind != "result", connect=False)
        for i, wanted in enumerate(node.wants):
            rows = np.arange(len(wanted))
            build.read(f"g.{name}.{i}", name, (Read(0, i, rows, rows),))
    return build.build()
