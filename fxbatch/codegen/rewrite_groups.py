"""Inputs that an operation concatenates or stacks first thing become one group, gathered as one wide row.

In: the per-instance body graph `(*inputs, *shared)`. Out: the layout and a body `(*groups, *shared)`.

    cat([in0, in2])  =>  reshape(group0, [2 * d]),  group0: [2, d];   stack([in0, in2])  =>  group0
"""

from __future__ import annotations

import torch
from torch import fx

from fxbatch.ir import Layout, Signature

aten = torch.ops.aten


def find_groups(body: fx.GraphModule, signature: Signature) -> Layout:
    """The layout: members of a group are concatenated or stacked along the first dimension, in order."""
    count = len(signature.inputs)
    position = {node: i for i, node in enumerate(_placeholders(body)[:count])}
    group_of: dict[int, tuple[int, ...]] = {}
    for node in body.graph.nodes:
        if node.target not in (aten.cat.default, aten.stack.default) or _dim(node) != 0:
            continue
        members = tuple(position.get(x, -1) for x in node.args[0])
        if _can_group(members, group_of, signature):
            group_of.update((m, members) for m in members)
    groups = dict.fromkeys(group_of.get(i, (i,)) for i in range(count))
    return Layout(tuple(groups))


def _can_group(members: tuple[int, ...], taken: dict[int, tuple[int, ...]], signature: Signature) -> bool:
    if len(members) < 2 or -1 in members or len(set(members)) < len(members):
        return False
    if any(m in taken for m in members):
        return False
    kinds = {signature.inputs[m] for m in members}
    return len(kinds) == 1


def _dim(node: fx.Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    rank = len(node.args[0][0].meta["val"].shape) if "val" in node.args[0][0].meta else 1
    return dim % max(rank, 1) if node.target is aten.cat.default else dim


def _placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return [node for node in body.graph.nodes if node.op == "placeholder"]


def group_inputs(body: fx.GraphModule, layout: Layout, signature: Signature) -> fx.GraphModule:
    """The body over groups: members are selected, their concatenation is the group itself."""
    if all(len(group) == 1 for group in layout.groups):
        return _reorder(body, layout, len(signature.inputs))
    graph = fx.Graph()
    olds = _placeholders(body)
    count = len(signature.inputs)
    known: dict[fx.Node, fx.Node] = {}
    whole: dict[tuple[fx.Node, ...], fx.Node] = {}
    wides = []
    for g, group in enumerate(layout.groups):
        wides.append(graph.placeholder(f"group{g}"))
        if len(group) == 1:
            known[olds[group[0]]] = wides[g]
        else:
            whole[tuple(olds[m] for m in group)] = wides[g]
    for old in olds[count:]:
        known[old] = graph.placeholder(old.name)
    for members, wide in whole.items():
        for i, old in enumerate(members):
            known[old] = graph.call_function(aten.select.int, (wide, 0, i))
    for node in body.graph.nodes:
        if node.op == "placeholder":
            continue
        members = tuple(node.args[0]) if node.target in (aten.cat.default, aten.stack.default) else ()
        if members in whole and _dim(node) == 0:
            known[node] = _whole(graph, node, whole[members], signature.inputs[olds.index(members[0])].shape)
        else:
            known[node] = graph.node_copy(node, lambda x: known[x])
    module = fx.GraphModule(body, graph)
    graph.eliminate_dead_code()
    return module


def _whole(graph: fx.Graph, node: fx.Node, wide: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    if node.target is aten.stack.default:
        return wide
    members = len(node.args[0])
    return graph.call_function(aten.view.default, (wide, [members * shape[0], *shape[1:]]))


def _reorder(body: fx.GraphModule, layout: Layout, count: int) -> fx.GraphModule:
    assert layout.groups == tuple((i,) for i in range(count))
    return body
