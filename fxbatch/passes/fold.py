"""Program + Schedule -> BatchedGraph, and Fold's algorithm on it, stage by stage (Looks et al. 2017, section 2).

Comes in: a Program and its Schedule. Goes out: a node per step, an edge where a step reads what another made; then
what Fold adds: pass-throughs, gathers, cats. They are there for dumps, drawings and fidelity; a run walks a Plan.

    graph = batch_calls(program, schedule)
    graph = insert_cats(insert_gathers(insert_pass_throughs(graph)))
    program, schedule = add_pass_through_calls(program)       # the same as calls, so that any runtime can run them
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fxbatch.batched_graph import BatchedGraph, GraphBuilder, Node, Read
from fxbatch.caches import cached
from fxbatch.ir import CONSTANT_KINDS, Operation, Program, Schedule, Signature, Slot, Template, TensorSpec
from fxbatch.passes.schedule import depth_schedule, depths
from fxbatch.passes.select import reorder


def batch_calls(program: Program, schedule: Schedule) -> BatchedGraph:
    """The batched graph of a schedule; with the depth schedule, a node's depth is that of its calls.

        embed(v0) embed(v1) cell(v2, v3)   ==>   b1 depth 1: batch s1 embed x2
                                                 b2 depth 2: batch s2 cell x1
                                                   input 0 <- b1.0[0] at [0]
                                                   input 1 <- b1.0[1] at [0]

    Values of earlier phases are nodes `k0`, `k1`, ... (one a type), results `r0`, `r1`, ... (one a type).
    """
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


def insert_pass_throughs(batched: BatchedGraph) -> BatchedGraph:
    """The graph with a node `p<depth>.<type>` for the values that a depth carries on.

    A value that is read further up is carried there by pass-throughs, one node a depth and tensor type:

        b1 depth 1   b4 depth 3: input 0 <- b1.0[0] at [0]
        ==>
        b1 depth 1   p2.0 depth 2: pass x1   b4 depth 3: input 0 <- p2.0.0[0] at [0]

    Results are read at the depth after the last.
    """
    program = batched.program
    birth, last = _lifetimes(batched)
    build = GraphBuilder(program, "pass-throughs inserted")
    by_depth: dict[int, list[tuple[str, Node]]] = {}
    for name, node in batched.nodes():
        by_depth.setdefault(node.depth, []).append((name, node))
    for depth in sorted(by_depth):
        for name, node in by_depth[depth]:
            build.add(name, node, give=node.kind != "result")
        carried = np.flatnonzero((birth < depth) & (depth < last))
        for t in np.unique(program.type_of_value[carried]).tolist():
            values = carried[program.type_of_value[carried] == t]
            build.add(f"p{depth}.{t}", Node("pass", depth, (program.types[t],), (values,), (values,)))
    return build.build()


def _lifetimes(batched: BatchedGraph) -> tuple[np.ndarray, np.ndarray]:
    """A value: the depth that makes it, and the last depth that reads it."""
    birth = np.zeros(batched.program.values, dtype=np.int64)
    last = np.zeros(batched.program.values, dtype=np.int64)
    for _, node in batched.nodes("known", "batch"):
        for values in node.gives:
            birth[values] = node.depth
    for _, node in batched.nodes():
        for values in node.wants:
            np.maximum.at(last, values, node.depth)
    return birth, last


def insert_gathers(batched: BatchedGraph) -> BatchedGraph:
    """The graph in which every input is read, row for row, from its gather `g.<reader>.<input>`.

        b2: input 0 <- b0.0[3] at [0]                 g.b2.0: input 0 <- b0.0[3] at [0]
            input 0 <- b1.0[0] at [1]         ==>             input 0 <- b1.0[0] at [1]
                                                      b2: input 0 <- g.b2.0.0[0:2] at [0:2]

    A gather takes the rows that its reader wants, in its order, from wherever they are.
    """
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


def insert_cats(batched: BatchedGraph) -> BatchedGraph:
    """The graph in which gathers read from cats `c<depth>.<type>` only.

    A cat puts the outputs of one type of all batches and pass-throughs of one depth one after another, so
    that a gather is one index into one tensor. The row i of cat (d, t) is the value with label (d, t, i).

        g.b4.0: input 0 <- b1.0[3] at [0]             c1.0 depth 1: cat x9
                input 0 <- b2.0[0] at [1]    ==>      g.b4.0: input 0 <- c1.0.0[3,7] at [0:2]
    """
    build = GraphBuilder(batched.program, "cats inserted")
    by_depth: dict[int, list[tuple[str, Node]]] = {}
    for name, node in batched.nodes():
        by_depth.setdefault(node.depth, []).append((name, node))
    for depth in sorted(by_depth):
        # A depth's gathers read what the depths before have made, so they connect before it gives.
        for name, node in by_depth[depth]:
            if node.kind == "gather":
                build.add(name, node, give=False)
        for name, node in by_depth[depth]:
            if node.kind != "gather":
                build.add(name, node, give=node.kind != "result", connect=False)
                for before, read in batched.reads(name):
                    build.read(before, name, (read,))
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


@cached("pass-through signatures")
def pass_through(type_: TensorSpec) -> Signature:
    """The identity on values of a type; one Signature a type."""
    operation = Operation(
        "pass_through", "function", torch.clone, rule="carries a value to the next depth", identity=True
    )
    arguments = Template.of(((Slot("input", 0),), {}))
    return Signature(operation, (type_,), (type_,), (), arguments, Template.of(Slot("output", 0)))


def add_pass_through_calls(program: Program) -> tuple[Program, Schedule]:
    """The program with identity calls, and its schedule by depth.

    Output i of the result stands for output i of the program. The new signatures follow the old ones.

        v1 = s1 f(v0)                        v1 = s1 f(v0)
        v2 = s1 f(v1)             ==>        v2 = s3 pass_through(v0)
        v3 = s2 g(v0, v2)                    v3 = s1 f(v1) ...
                                             v5 = s2 g(v4, v3)

    Each depth reads the depth before and no other; results are carried to the last depth. The schedule is by
    depth (Looks et al. 2017, section 2). `insert_pass_throughs` does the same on the batched graph.
    """
    depth = depths(program).astype(np.int64)
    birth = np.zeros(program.values, dtype=np.int64)
    birth[program.known :] = depth[program.call_of_value]
    last = np.zeros(program.values, dtype=np.int64)
    np.maximum.at(last, program.inputs, depth[program.reader])
    last[program.outputs] = int(depth.max(initial=0)) + 1
    count = np.maximum(last - 1 - birth, 0)
    if not count.any():
        return program, depth_schedule(program, depth, "fold")
    return _carry(program, depth, birth, count)


def _carry(
    program: Program, depth: np.ndarray, made_at: np.ndarray, count: np.ndarray
) -> tuple[Program, Schedule]:
    """Add `count[v]` identity calls for each value v, then put all calls in order of depth."""
    added = int(count.sum())
    value = np.repeat(np.arange(program.values), count)
    start = np.cumsum(count) - count  # of each value's identity calls
    hop = np.arange(added) - np.repeat(start, count)
    types, type_of = np.unique(program.type_of_value[value], return_inverse=True)
    signatures = program.signatures + tuple(pass_through(program.types[t]) for t in types.tolist())
    maker_instance = np.zeros(program.values, dtype=program.instance.dtype)
    maker_instance[program.known :] = program.instance[program.call_of_value]

    all_depth = np.concatenate([depth, made_at[value] + 1 + hop])
    carrier = program.values + np.arange(added)  # the value of each identity call

    def at_depth(values: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Each value as depth `below` has it."""
        hops = below - made_at[values]
        carried = carrier[np.minimum(start[values] + np.maximum(hops, 1) - 1, added - 1)]
        return np.where(hops > 0, carried, values)

    inputs = at_depth(program.inputs, depth[program.reader] - 1)
    before = at_depth(value, made_at[value] + hop)
    wide = dataclasses.replace(
        program,
        signatures=signatures,
        sig=np.concatenate([program.sig, len(program.signatures) + type_of]).astype(np.int32),
        inputs=np.concatenate([inputs, before]),
        instance=np.concatenate([program.instance, maker_instance[value]]),
        outputs=at_depth(program.outputs, np.full(len(program.outputs), int(depth.max(initial=0)))),
    )
    order = np.argsort(all_depth, kind="stable")
    rewritten = reorder(wide, order)
    return rewritten, depth_schedule(rewritten, all_depth[order], "fold")
