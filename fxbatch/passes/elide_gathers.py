"""BatchedGraph -> BatchedGraph without gathers that only pass consecutive rows on: views need no copy.

    g.b3.0: input 0 <- b2.0[4:8] at [0:4]         b3: input 0 <- b2.0[4:8] at [0:4]
    b3: input 0 <- g.b3.0.0[0:4] at [0:4]  ==>

`order_rows` orders the rows of steps so that more gathers are of this kind.
"""

from __future__ import annotations

import numpy as np

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Read


def elide_gathers(batched: BatchedGraph) -> BatchedGraph:
    """The graph without gathers of consecutive rows of one node; the same graph when there are none."""
    gone = [name for name, _ in batched.nodes("gather") if is_view(batched, name)]
    if not gone:
        return batched
    dropped = dict.fromkeys(gone)
    build = GraphBuilder(batched.program, "gathers elided")
    for name, node in batched.nodes():
        if name in dropped:
            continue
        build.add(name, node, give=False, connect=False)
        for before, read in batched.reads(name):
            if before in dropped:
                ((source, through),) = batched.reads(before)
                build.read(source, name, (Read(through.output, read.input, through.rows, read.places),))
            else:
                build.read(before, name, (read,))
    return build.build()


def is_view(batched: BatchedGraph, gather: str) -> bool:
    """Whether a gather reads consecutive rows of one output, in order."""
    reads = list(batched.reads(gather))
    if len(reads) != 1:
        return False
    rows, places = reads[0][1].rows, reads[0][1].places
    return bool((np.diff(rows) == 1).all() and (places == np.arange(len(places))).all())
