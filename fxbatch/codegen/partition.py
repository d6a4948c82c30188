"""The joint graph in three: forward, backward, and what only parameter gradients need.

In: a Joint. Out: a Partition. What backward and the parameter graph take from forward is a minimum cut:
inputs and outputs are cheaper to take than intermediates, views and casts are made again, whatever is
taken is row-wise `[n, ...]`, so that rows of many steps can be put one after another.

    forward: z = addmm(b, x, t(W)); s = sigmoid(z)       backward: dz = sigmoid_backward(g, s); dx = mm(dz, W)
    parameters: dW = mm(t(dz), x); db = sum(dz, [0])      saved: nothing (s is an output); extra: dz
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import fx

from fxbatch.codegen.batch import Joint
from fxbatch.codegen.operation_graphs import (
    Flows,
    NotBatchable,
    Ref,
    ancestors,
    bytes_per_row,
    row_type,
    rows_node,
)
from fxbatch.codegen.simplify import is_random
from fxbatch.ir import TensorSpec

aten = torch.ops.aten
_KEPT_ANYWAY, _ANEW = 1, 4  # what a byte costs: inputs and outputs are in arenas already
_INFINITE = 1 << 100
_CHEAP = (
    aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.expand.default,
    aten._to_copy.default, aten.detach.default, aten.alias.default, aten.unbind.int, aten.view.dtype,
    aten.diagonal.default, aten._conj.default, aten.view_as_real.default, aten.view_as_complex.default,
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.full.default,
    aten.full_like.default, aten.new_full.default, aten.ones.default, aten.ones_like.default,
    aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar,
    aten.logical_not.default, aten.neg.default, aten.sign.default, aten.sgn.default, aten.bitwise_not.default,
)  # fmt: skip


class Partition(NamedTuple):
    """The three graphs and what flows between them."""

    forward: fx.Graph
    backward: fx.Graph | None
    parameters: fx.Graph | None
    flows: Flows


def _row_types(nodes: Sequence[fx.Node]) -> tuple[TensorSpec, ...]:
    kinds = tuple(kind for kind in map(row_type, nodes) if kind is not None)
    assert len(kinds) == len(nodes), "what is cut is row-wise"
    return kinds


def partition(joint: Joint) -> Partition:
    """Cut the joint graph in three."""
    outputs = list(joint.outputs)
    inputs = [x for x in joint.group_gradients if x is not None]
    shared = [x for x in joint.shared_gradients if x is not None]
    forward = ancestors(outputs)
    free = {rows_node(joint.graph): None, **dict.fromkeys(joint.shared)}
    starts = dict.fromkeys(joint.output_gradients)
    backward = {x: None for x in ancestors(inputs) if x not in forward}
    later = {x: None for x in ancestors([*inputs, *shared]) if x not in forward}
    at_no_cost = {**dict.fromkeys(joint.groups), **dict.fromkeys(outputs)}

    sinks = [x for node in later for x in node.all_input_nodes if x in forward]
    sinks += [x for x in (*inputs, *shared) if x in forward]
    saved = cut(forward, sinks, dict.fromkeys(joint.groups), free, at_no_cost)

    crossing = [x for node in later if node not in backward for x in node.all_input_nodes]
    crossing = [x for x in [*crossing, *shared] if x in backward or x in starts]
    region = {**ancestors(saved), **backward, **starts}
    at_hand = dict.fromkeys(saved)
    cut_nodes = cut(region, crossing, {**starts, **at_hand}, free, at_hand)
    extra = [x for x in cut_nodes if x not in at_hand]
    return _assemble(joint, saved, extra, inputs, shared)


Again = Callable[[fx.Node], bool]


def _again(node: fx.Node) -> bool:
    """Whether a node is computed again in backward rather than saved."""
    number = isinstance(node.meta["values"][0], (int, float, bool))
    return node.op == "call_function" and (node.target in _CHEAP or number)


def _again_unless_random(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_random(node)


def _again_unless_rows(node: fx.Node) -> bool:
    return _again(node) or (_again_unless_random(node) and row_type(node) is None)


def cut(
    region: dict[fx.Node, None],
    sinks: list[fx.Node],
    sources: dict[fx.Node, None],
    free: dict[fx.Node, None],
    kept_nodes: dict[fx.Node, None],
) -> list[fx.Node]:
    """The cheapest row-wise tensors of `region` from which the sinks can be computed.

    `free` nodes cost nothing anywhere (n, shared operands); `kept_nodes` are stored in any case. Where computing
    cheap nodes again leaves no row-wise cut, what isn't row-wise is computed again, then whatever isn't random.
    """
    order = _depends_on_rows(region, free)
    ends = [x for x in dict.fromkeys(sinks) if x in order]
    if not ends:
        return []
    for allowed in (_again, _again_unless_rows, _again_unless_random):
        behind = minimum_cut(_flow(order, ends, sources, kept_nodes, allowed), "source", "sink")
        if behind is not None:
            return [x for x in order if (x, 0) not in behind and (x, 1) in behind]
    raise NotBatchable("gradients need tensors that are not row-wise")


def _flow(
    order: dict[fx.Node, None],
    ends: list[fx.Node],
    sources: dict[fx.Node, None],
    kept_nodes: dict[fx.Node, None],
    again: Again,
) -> Flow:
    """Each node is an edge whose capacity is what keeping it costs; what must be kept hangs on the source."""
    flow: Flow = {"source": {}, "sink": {}, **{(node, end): {} for node in order for end in (0, 1)}}
    for node in order:
        flow[node, 0][node, 1] = _capacity(node, kept_nodes)
        for source in node.all_input_nodes:
            if (source, 1) in flow:
                flow[source, 1][node, 0] = _INFINITE
        if node in sources or node.op == "placeholder" or not again(node):
            flow["source"][node, 0] = _INFINITE
    for node in ends:
        flow[node, 1]["sink"] = _INFINITE
    return flow


Flow = dict[Hashable, dict[Hashable, int]]  # what may flow from one to the other


def minimum_cut(flow: Flow, source: Hashable, sink: Hashable) -> set[Hashable] | None:
    """The nodes behind the minimum cut nearest to the sink; None if nothing bounds the flow (Edmonds & Karp)."""
    left = {a: dict(ends) for a, ends in flow.items()}
    for a, ends in flow.items():
        for b in ends:
            left[b].setdefault(a, 0)
    while sink in (before := _reached(left, source)):
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        edges = [(a, b) for b, a in pairwise(path)]
        pushed = min(left[a][b] for a, b in edges)
        if pushed > _INFINITE // 2:
            return None
        for a, b in edges:
            left[a][b] -= pushed
            left[b][a] += pushed
    return set(_reached({a: {b: left[b][a] for b in ends} for a, ends in left.items()}, sink))


def _reached(left: Flow, start: Hashable) -> dict[Hashable, Hashable]:
    """The nodes that flow from `start` can still reach, each with the one before it on a shortest path."""
    before = {start: start}
    reached = [start]
    for a in reached:
        for b, capacity in left[a].items():
            if capacity and b not in before:
                before[b] = a
                reached.append(b)
    return before


def _depends_on_rows(region: dict[fx.Node, None], free: dict[fx.Node, None]) -> dict[fx.Node, None]:
    """The nodes of the region that are not functions of n, shared operands and attributes alone."""
    depends: dict[fx.Node, bool] = {}
    for node in next(iter(region)).graph.nodes if region else ():
        if node not in region:
            continue
        if node in free or node.op == "get_attr":
            depends[node] = False
        elif node.op == "placeholder" or is_random(node):
            depends[node] = True
        else:
            depends[node] = any(depends.get(x, x not in free) for x in node.all_input_nodes)
    return {node: None for node, yes in depends.items() if yes}


def _capacity(node: fx.Node, kept_nodes: dict[fx.Node, None]) -> int:
    if row_type(node) is None:
        return _INFINITE
    cost = bytes_per_row(node) * (_KEPT_ANYWAY if node in kept_nodes else _ANEW)
    # keeping all pieces of a tensor means copying each: rather the tensor itself
    return cost * 100 + cost * (node.target in (aten.slice.Tensor, aten.select.int))


def _assemble(
    joint: Joint, saved: list[fx.Node], extra: list[fx.Node], inputs: list[fx.Node], shared: list[fx.Node]
) -> Partition:
    groups = {x: i for i, x in enumerate(joint.groups)}
    outputs = {x: i for i, x in reversed(list(enumerate(joint.outputs)))}
    new_saved = tuple(x for x in saved if x not in groups and x not in outputs)
    position = {x: i for i, x in enumerate(new_saved)}

    def ref(node: fx.Node) -> Ref:
        if node in groups:
            return Ref("group", groups[node])
        if node in outputs:
            return Ref("output", outputs[node])
        return Ref("saved", position[node])

    forward = build(joint, [*joint.groups, *joint.shared], [*joint.outputs, *new_saved])
    wanted = [*inputs, *extra]
    used_saved, used_starts = _used(wanted, saved, list(joint.output_gradients))
    backward = build(joint, [*used_starts, *used_saved, *joint.shared], wanted) if wanted else None
    used, used_extra = _used(shared, saved, extra)
    parameters = build(joint, [*used, *used_extra, *joint.shared], shared) if shared else None
    refs = [ref(x) for x in used] + [Ref("extra", extra.index(x)) for x in used_extra]
    started = dict.fromkeys(used_starts)
    flows = Flows(
        saved_types=_row_types(new_saved),
        grad_outputs=tuple(i for i, x in enumerate(joint.output_gradients) if x in started),
        grad_groups=tuple(i for i, x in enumerate(joint.group_gradients) if x is not None),
        backward_inputs=tuple(ref(x) for x in used_saved),
        extra_types=_row_types(extra),
        parameter_inputs=tuple(refs),
        grad_shared=tuple(i for i, x in enumerate(joint.shared_gradients) if x is not None),
    )
    return Partition(forward, backward, parameters, flows)


def _used(
    wanted: list[fx.Node], first: list[fx.Node], second: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Which of the two lists the wanted nodes are computed from."""
    seen = ancestors(wanted, dict.fromkeys([*first, *second]))
    return [x for x in first if x in seen], [x for x in second if x in seen]


def build(joint: Joint, inputs: list[fx.Node], wanted: list[fx.Node]) -> fx.Graph:
    """A graph `(n, *inputs) -> wanted` of copies of the joint graph's nodes."""
    graph = fx.Graph()
    node_of: dict[fx.Node, fx.Node] = {}
    for node in [rows_node(joint.graph), *inputs]:
        name = node.name if node.op == "placeholder" else f"kept_{node.name}"
        node_of[node] = graph.placeholder(name)
        node_of[node].meta = dict(node.meta)
    needed = ancestors(wanted, node_of)
    for node in joint.graph.nodes:
        if node in needed and node not in node_of:
            if node.op == "placeholder":
                raise NotBatchable(f"{node.name} is needed where it is not at hand")
            node_of[node] = graph.node_copy(node, lambda x: node_of[x])
    graph.output(tuple(node_of[x] for x in wanted))
    return graph
