"""A batch of products with one shared matrix is one product; rows come first.

bmm(x [n, r, k], expand(w [k, m]))            =>  reshape(mm(reshape(x, [n * r, k]), w), [n, r, m])
bmm(expand(w [r, k]), x [n, k, 1])            =>  reshape(mm(reshape(x, [n, k]), t(w)), [n, r, 1])
sum(bmm(g [n, r, 1], x [n, 1, m]), [0])       =>  mm(t(reshape(g, [n, r])), reshape(x, [n, m]))
bmm(x [n, 1, k], y [n, k, 1])                 =>  reshape(sum(mul(x, y), [1]), [n, 1, 1])
bmm(g [n, r, 1], x [n, 1, m])                 =>  mul(g, x)
mm(w [r, k], t(x [n, k]))                     =>  t(mm(x, t(w)))
tanh(t(x [n, r]))                             =>  t(tanh(x))

The batches are what `vmap` makes of `w @ x`, `mv`, `einsum`, and of `linear` on rows that lie apart.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.clean import Rule, apply_rules
from fxbatch.codegen.sizes import Shape, Size, add_call, is_tensor, shape, shape_argument

aten = torch.ops.aten
_ROWS: Size = (1, 0)
_ONE: Size = (0, 1)
_TURNED = [1, 0]


def rewrite_batched_products(graph: fx.Graph) -> bool:
    """Returns whether anything changed."""
    changed = apply_rules(graph, {aten.sum.dim_IntList: (_sum_of_outer_products,)})
    changed |= apply_rules(
        graph,
        {
            aten.bmm.default: (_shared_right, _shared_left, _outer, _dot),
            aten.mm.default: (_rows_on_the_right,),
        },
    )
    turned: dict[Any, tuple[Rule, ...]] = {
        x.target: (_turn_after,) for x in graph.nodes if x.op == "call_function" and _is_pointwise(x)
    }
    return changed | apply_rules(graph, turned)


def _reshape(graph: fx.Graph, node: fx.Node, dims: Shape) -> fx.Node:
    return add_call(graph, aten.reshape.default, (node, shape_argument(graph, dims)))


def _permute(graph: fx.Graph, node: fx.Node, order: list[int]) -> fx.Node:
    return add_call(graph, aten.permute.default, (node, order))


def _times(a: Size, b: Size) -> Size:
    """A product of sizes of which one at least does not depend on n."""
    return (a[0] * b[1] + a[1] * b[0], a[1] * b[1])


def _shared_part(graph: fx.Graph, node: Any) -> fx.Node | None:
    """What each of the n rows of a node is, where all are the same; of the shape of one row."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    dims = shape(node)
    if not dims or dims[0] != _ROWS or any(a for a, _ in dims[1:]):
        return None
    source: Any = node.args[0]
    if node.target is aten.expand.default:
        given = shape(source)
        if len(given) == len(dims) and given[0] != _ONE:
            return None
        own = given[1:] if len(given) == len(dims) else given
        part = source if own == given else _reshape(graph, source, own)
        return part if own == dims[1:] else add_call(graph, aten.expand.default, (part, _plain(dims[1:])))
    if node.target is aten.reshape.default:
        inner = _shared_part(graph, source)
        return None if inner is None else _reshape(graph, inner, dims[1:])
    if node.target is aten.permute.default and node.args[1][0] == 0:
        inner = _shared_part(graph, source)
        order: Any = node.args[1]
        return None if inner is None else _permute(graph, inner, [d - 1 for d in order[1:]])
    return None


def _plain(dims: Shape) -> list[int]:
    return [b for _, b in dims]


def _shared_right(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a: Any = node.args[0]
    matrix = _shared_part(graph, node.args[1])
    if matrix is None:
        return None
    n, r, k = shape(a)
    product = add_call(graph, aten.mm.default, (_reshape(graph, a, (_times(n, r), k)), matrix))
    return _reshape(graph, product, shape(node))


def _shared_left(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    b: Any = node.args[1]
    matrix = _shared_part(graph, node.args[0])
    if matrix is None:
        return None
    n, k, m = shape(b)
    if m != _ONE:
        return None
    rows = _reshape(graph, b, (n, k))
    product = add_call(graph, aten.mm.default, (rows, _permute(graph, matrix, _TURNED)))
    return _reshape(graph, product, shape(node))


def _sum_of_outer_products(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Through a reshape that keeps the rows."""
    source: Any = node.args[0]
    rank = len(shape(source))
    over: Any = node.args[1]
    if node.kwargs or not over or [d % rank for d in over] != [0]:
        return None
    product = source.args[0] if source.target is aten.reshape.default else source
    if product.target is not aten.bmm.default or shape(source)[0] != _ROWS or shape(product)[0] != _ROWS:
        return None
    if len(source.users) > 1 or len(product.users) > 1:
        return None
    a, b = product.args
    (n, r, inner), (_, _, m) = shape(a), shape(b)
    if inner != _ONE:
        return None
    left = _permute(graph, _reshape(graph, a, (n, r)), _TURNED)
    total = add_call(graph, aten.mm.default, (left, _reshape(graph, b, (n, m))))
    return _reshape(graph, total, shape(node))


def _outer(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a: Any = node.args[0]
    return add_call(graph, aten.mul.Tensor, node.args) if shape(a)[2] == _ONE else None


def _dot(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a: Any
    b: Any
    a, b = node.args
    (n, r, k), (_, _, m) = shape(a), shape(b)
    if r != _ONE or m != _ONE or n != _ROWS:
        return None
    product = add_call(graph, aten.mul.Tensor, (_reshape(graph, a, (n, k)), _reshape(graph, b, (n, k))))
    return _reshape(graph, add_call(graph, aten.sum.dim_IntList, (product, [1])), shape(node))


def _rows_on_the_right(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    a: Any
    b: Any
    a, b = node.args
    if b.target is not aten.permute.default or list(b.args[1]) != _TURNED:
        return None
    if shape(b)[1] != _ROWS or any(size[0] for size in shape(a)):
        return None
    product = add_call(graph, aten.mm.default, (b.args[0], _permute(graph, a, _TURNED)))
    return _permute(graph, product, _TURNED)


@functools.cache
def _tagged(target: Any) -> bool:
    return torch.Tag.pointwise in getattr(target, "tags", ())


def _is_pointwise(node: fx.Node) -> bool:
    return _tagged(node.target) and is_tensor(node)


def _turn_after(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Of tensors [r, n] that all are turned ones, or numbers."""
    dims = shape(node)
    if node.kwargs or len(dims) != 2 or dims[1] != _ROWS or dims[0][0]:
        return None
    args: list[Any] = []
    for x in node.args:
        if isinstance(x, fx.Node):
            if x.target is not aten.permute.default or list(x.args[1]) != _TURNED or shape(x) != dims:
                return None
            x = x.args[0]
        elif not isinstance(x, (bool, int, float)):
            return None
        args.append(x)
    return _permute(graph, add_call(graph, node.target, tuple(args)), _TURNED)
