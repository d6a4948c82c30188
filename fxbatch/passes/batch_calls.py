"""Program + Schedule -> BatchedGraph: a node a step, an edge where a step reads what another made.

    embed(v0) embed(v1) cell(v2, v3)   ==>   b1 depth 1: batch s1 embed x2
                                             b2 depth 2: batch s2 cell x1
                                               input 0 <- b1.0[0] at [0]
                                               input 1 <- b1.0[1] at [0]

Values of earlier phases are nodes `k0`, `k1`, ... (one a type), results `r0`, `r1`, ... (one a type).
"""

from __future__ import annotations

import numpy as np

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Node
from fxbatch.ir import CONSTANT_KINDS, Program, Schedule


def batch_calls(program: Program, schedule: Schedule) -> BatchedGraph:
    """The batched graph of a schedule; with the depth schedule, a node's depth is that of its calls."""
    build = GraphBuilder(program, "batched")
    depth_of = np.zeros(program.values, dtype=np.int64)
    _add_known(build)
    for k, calls in enumerate(schedule.steps()):
        s = int(program.sig[calls[0]])
        signature = program.signatures[s]
        first = program.input_offsets[calls]
        wants = tuple(program.inputs[first + i] for i in range(len(signature.inputs)))
        depth = 0
        if signature.operation.kind not in CONSTANT_KINDS:
            depth = 1 + max((int(depth_of[w].max()) for w in wants), default=0)
        made = program.first_value[calls]
        gives = tuple(made + j for j in range(len(signature.outputs)))
        for values in gives:
            depth_of[values] = depth
        build.add(f"b{k}", Node("batch", depth, signature.outputs, gives, wants, s, calls))
    _add_results(build, 1 + int(depth_of.max(initial=0)))
    return build.build()


def _add_known(build: GraphBuilder) -> None:
    program = build.program
    for t in range(len(program.types)):
        values = np.flatnonzero(program.type_of_value[: program.known] == t)
        if len(values):
            build.add(f"k{t}", Node("known", 0, (program.types[t],), (values,)))


def _add_results(build: GraphBuilder, depth: int) -> None:
    program = build.program
    kinds = program.type_of_value[program.outputs]
    for t in range(len(program.types)):
        values = program.outputs[kinds == t]
        if len(values):
            node = Node("result", depth, (program.types[t],), (values,), (values,))
            build.add(f"r{t}", node, give=False)
