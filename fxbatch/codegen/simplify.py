"""Cleaning of operation graphs: what does nothing goes, what is said in many ways is said in one.

In and out: an fx graph whose nodes carry their values at two numbers of rows (see `operation_graphs`). Views are
`reshape`, `permute`, `slice`, `select`, `expand`; splits are slices.

    squeeze(view(mm, [n, 1, 750]), 1)  =>  mm            t(t(x))     =>  x
    getitem(split(x, 150, 1), 2)  =>  slice(x, 1, 300, 450)          mul(x, 1)   =>  x
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.operation_graphs import (
    add_call,
    ancestors,
    device_of,
    dtype,
    is_tensor,
    shape,
    shape_argument,
)

aten = torch.ops.aten

_RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.squeeze_.dim, aten.squeeze_.dims, aten._reshape_alias.default,
    aten.flatten.using_ints, aten.reshape.default,
)  # fmt: skip
_COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default, aten.contiguous.default)
_SPLITS = (aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_with_sizes.default)
_FILLED = (aten.full.default, aten.full_like.default, aten.new_full.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)


def clean(graph: fx.Graph) -> fx.Graph:
    """Simplify to a fixed point, in place: local rules, common subexpressions, dead nodes."""
    for _ in range(8):
        changed = eliminate_dead(graph)
        changed |= apply_rules(graph, RULES)
        changed |= share_equal(graph)
        if not changed:
            break
    eliminate_dead(graph)
    return graph


Rule = Callable[[fx.Graph, fx.Node], "fx.Node | None"]


def apply_rules(graph: fx.Graph, rules: dict[Any, tuple[Rule, ...]]) -> bool:
    """One walk: each node is replaced by what the first fitting rule of its target gives."""
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.users:
            continue
        for rule in rules.get(node.target, ()):
            with graph.inserting_before(node):
                new = rule(graph, node)
            if new is not None and new is not node:
                node.replace_all_uses_with(new)
                changed = True
                break
    return changed


def eliminate_dead(graph: fx.Graph) -> bool:
    """Erase nodes without users, random ones too: graphs are functional."""
    changed = False
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
            changed = True
    return changed


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags


def share_equal(graph: fx.Graph) -> bool:
    """Equal calls on equal arguments become one (never random ones)."""
    seen: dict[Any, fx.Node] = {}
    changed = False
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or is_random(node):
            continue
        key = (node.op, node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            changed = True
    return changed


def _frozen(tree: object) -> Any:
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(x) for x in tree)
    if isinstance(tree, dict):
        return tuple((k, _frozen(v)) for k, v in tree.items())
    if isinstance(tree, float):
        return (float, tree.hex())
    return tree if isinstance(tree, fx.Node) else (type(tree), tree)


def constant_value(node: object) -> float | None:
    """1.0 or 0.0 (or another number) if the node is a tensor filled with it, else None. Integers keep all digits."""
    while isinstance(node, fx.Node) and node.target in (aten.expand.default, aten.reshape.default):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node.target in _FILLED:
        fill = node.args[2] if node.target is aten.new_full.default else node.args[1]
        return fill if isinstance(fill, (int, float)) else None
    if node.target is aten.scalar_tensor.default:
        return node.args[0]
    if node.target in _ZEROS:
        return 0.0
    return 1.0 if node.target in _ONES else None


def same_form(x: object, node: fx.Node) -> bool:
    """Whether x is a tensor of the shape and dtype of node."""
    return isinstance(x, fx.Node) and is_tensor(x) and dtype(x) == dtype(node) and shape(x) == shape(node)


def _to_reshape(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    while source.target is aten.reshape.default:
        source = source.args[0]
    if shape(source) == shape(node):
        return source
    if node.target is aten.reshape.default and source is node.args[0]:
        return None
    return add_call(graph, aten.reshape.default, (source, shape_argument(graph, shape(node))), like=node)


def _drop_copy(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return node.args[0]


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    return narrow.is_floating_point and torch.promote_types(narrow, wide) == wide


def _drop_same_cast(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x = node.args[0]
    if not isinstance(x, fx.Node):
        return None
    inner = x.args[0] if x.target is aten._to_copy.default else None
    if inner is not None and same_form(inner, node) and _widens(dtype(inner), dtype(x)):
        x = inner  # widened and narrowed again
    return x if same_form(x, node) and device_of(x) == device_of(node) else None


def _drop_same_expand(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x = node.args[0]
    if same_form(x, node):
        return x
    if x.target is aten.expand.default and shape(x.args[0]) != ():
        return add_call(
            graph, aten.expand.default, (x.args[0], shape_argument(graph, shape(node))), like=node
        )
    return None


def _permutation(node: fx.Node) -> list[int] | None:
    rank = len(node.meta["values"][0].shape)
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [d % rank for d in dims]
    if node.target is aten.t.default:
        return [1, 0] if rank == 2 else list(range(rank))
    if node.target is aten.transpose.int:
        order = list(range(rank))
        if rank:
            a, b = node.args[1] % rank, node.args[2] % rank
            order[a], order[b] = order[b], order[a]
        return order
    return None


def _to_permute(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    order = _permutation(node)
    source = node.args[0]
    assert order is not None
    while (inner := _permutation(source) if source.op == "call_function" else None) is not None:
        order = [inner[d] for d in order]
        source = source.args[0]
    if order == sorted(order):
        return source
    big = [d for d in order if shape(source)[d] != (0, 1)]
    if big == sorted(big):
        return add_call(graph, aten.reshape.default, (source, shape_argument(graph, shape(node))), like=node)
    if node.target is aten.permute.default and source is node.args[0] and list(node.args[1]) == order:
        return None
    return add_call(graph, aten.permute.default, (source, order), like=node)


def slice_bounds(node: fx.Node) -> tuple[int, int, int] | None:
    """(dim, start, end) of a slice with step 1 and constant bounds on a constant dimension."""
    arguments: list[Any] = list(node.args[1:])
    source: Any = node.args[0]
    dim, start, end, step = arguments + [None] * (4 - len(arguments))
    rank = len(shape(source))
    dim = (dim or 0) % rank
    a, size = shape(source)[dim]
    if a or (step or 1) != 1 or isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    first, last, _ = slice(start, end).indices(size)
    return dim, first, max(first, last)


def _slice(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if same_form(node.args[0], node):
        return node.args[0]
    bounds = slice_bounds(node)
    source = node.args[0]
    outer = slice_bounds(source) if source.target is aten.slice.Tensor else None
    if bounds is None or outer is None or outer[0] != bounds[0]:
        return None
    args = (source.args[0], bounds[0], outer[1] + bounds[1], outer[1] + bounds[2])
    return add_call(graph, aten.slice.Tensor, args, like=node)


def _getitem(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """getitem(split(x, 150, 1), 2) => slice(x, 1, 300, 450); getitem(unbind(x, 1), 2) => select(x, 1, 2)."""
    source, index = node.args
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    x = source.args[0] if source.args else None
    if source.target is aten.unbind.int:
        dim = source.args[1] if len(source.args) > 1 else 0
        return add_call(graph, aten.select.int, (x, dim, index), like=node)
    if source.target not in _SPLITS:
        return None
    dim = (source.args[2] if len(source.args) > 2 else 0) % len(shape(x))
    if shape(x)[dim][0]:
        return None
    pieces = [piece.shape[dim] for piece in source.meta["values"][0]]
    start = sum(pieces[:index])
    return add_call(graph, aten.slice.Tensor, (x, dim, start, start + pieces[index]), like=node)


def _neutral(value: float, sides: tuple[int, ...]) -> Rule:
    def rule(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            return None
        for side in sides:
            other, other_side = node.args[side], node.args[1 - side]
            number = other if isinstance(other, (int, float)) else constant_value(other)
            if number == value and same_form(other_side, node):
                return other_side
        return None

    return rule


def _mask_outputs(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A backward of three results computes those that are read."""
    mask = list(node.args[-1])
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    wanted = [old and i in read for i, old in enumerate(mask)]
    if wanted == mask or len(read) != len(node.users):
        return None
    return add_call(graph, node.target, (*node.args[:-1], wanted), dict(node.kwargs))


def _sum_keepdim(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """reshape(sum(x, [0], keepdim=True), [k]) => sum(x, [0])."""
    source = node.args[0]
    if source.target is not aten.sum.dim_IntList or len(source.args) < 3 or source.args[2] is not True:
        return None
    rank = len(shape(source))
    dims = {d % rank for d in source.args[1]} if source.args[1] else set(range(rank))
    if shape(node) != tuple(s for d, s in enumerate(shape(source)) if d not in dims):
        return None
    return add_call(graph, aten.sum.dim_IntList, (source.args[0], source.args[1]), dict(source.kwargs), node)


def _detach_of_gradient(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A detach that the outputs do not depend on is autograd's own."""
    return node.args[0] if not node.meta.get("keep") else None


def mark_kept_detaches(outputs: tuple[fx.Node, ...]) -> None:
    """The user's detaches are those that the outputs depend on; they stay for ordinary autograd."""
    for node in ancestors(outputs):
        if node.target is aten.detach.default:
            node.meta["keep"] = True


def _one_cat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    pieces = node.args[0]
    return pieces[0] if len(pieces) == 1 and same_form(pieces[0], node) else None


RULES: dict[Any, tuple[Rule, ...]] = {
    **dict.fromkeys(_RESHAPES, (_sum_keepdim, _to_reshape)),
    **dict.fromkeys(_COPIES, (_drop_copy,)),
    aten.detach.default: (_detach_of_gradient,),
    aten._to_copy.default: (_drop_same_cast,),
    aten.expand.default: (_drop_same_expand,),
    **dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), (_to_permute,)),
    aten.slice.Tensor: (_slice,),
    operator.getitem: (_getitem,),
    aten.mul.Tensor: (_neutral(1.0, (0, 1)),),
    aten.div.Tensor: (_neutral(1.0, (1,)),),
    aten.add.Tensor: (_neutral(0.0, (0, 1)),),
    aten.sub.Tensor: (_neutral(0.0, (1,)),),
    aten.mul.Scalar: (_neutral(1.0, (1,)),),
    aten.div.Scalar: (_neutral(1.0, (1,)),),
    aten.add.Scalar: (_neutral(0.0, (1,)),),
    aten.cat.default: (_one_cat,),
    aten.convolution_backward.default: (_mask_outputs,),
    aten.native_layer_norm_backward.default: (_mask_outputs,),
    aten.native_group_norm_backward.default: (_mask_outputs,),
}
