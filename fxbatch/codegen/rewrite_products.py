"""A product that is only added is one kernel with the addition.

add(x, mul(a, b))                        =>  addcmul(x, a, b)
add(x, tanh_backward(mul(a, b), y))      =>  addcmul(x, tanh_backward(a, y), b)
add(addmm(b, x, w), mm(h, u))            =>  addmm(addmm(b, x, w), h, u)       (written over itself)
add(addmm(b, x, w), addmm(c, h, u))      =>  addmm(addmm(add(b, c), x, w), h, u)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxbatch.codegen.clean import apply_rules
from fxbatch.codegen.sizes import add_call, dtype, shape

aten = torch.ops.aten
_DERIVATIVES = (aten.tanh_backward.default, aten.sigmoid_backward.default)


def rewrite_products(graph: fx.Graph) -> bool:
    """Returns whether anything changed."""
    return apply_rules(graph, {aten.add.Tensor: (_two_products, _addcmul, _addcmul_of_derivative)})


def _addcmul(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if node.kwargs or not dtype(node).is_floating_point:
        return None
    for product, rest in (node.args[::-1], node.args):
        if not isinstance(product, fx.Node) or not isinstance(rest, fx.Node):
            continue
        if product.target is not aten.mul.Tensor or len(product.users) > 1:
            continue
        operands = (rest, *product.args)
        if not all(isinstance(x, fx.Node) and dtype(x) == dtype(node) for x in operands):
            continue
        if shape(product) == shape(node) and shape(rest) == shape(node):
            return add_call(graph, aten.addcmul.default, operands)
    return None


def _addcmul_of_derivative(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A derivative is linear in the gradient that it takes: a factor of that may as well come last."""
    if node.kwargs or not dtype(node).is_floating_point:
        return None
    for derivative, rest in (node.args[::-1], node.args):
        if not isinstance(derivative, fx.Node) or not isinstance(rest, fx.Node):
            continue
        if derivative.target not in _DERIVATIVES or len(derivative.users) > 1:
            continue
        product: Any = derivative.args[0]
        if product.target is not aten.mul.Tensor or len(product.users) > 1:
            continue
        if not all(isinstance(x, fx.Node) for x in product.args):
            continue
        operands = (rest, derivative, product, *product.args)
        if any(dtype(x) != dtype(node) or shape(x) != shape(node) for x in operands):
            continue
        inner = add_call(graph, derivative.target, (product.args[0], *derivative.args[1:]))
        return add_call(graph, aten.addcmul.default, (rest, inner, product.args[1]))
    return None


def _two_products(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Through reshapes of the same kind on both sides."""
    if node.kwargs or not all(isinstance(x, fx.Node) and shape(x) == shape(node) for x in node.args):
        return None
    sides = [_product(x) for x in node.args]
    if sides[0] is None or sides[1] is None or shape(sides[0]) != shape(sides[1]):
        return None
    first, second = sorted(sides, key=lambda x: x.target is not aten.addmm.default)
    if dtype(first) != dtype(second) or first is second or first.kwargs or second.kwargs:
        return None
    if second.target is aten.mm.default:
        total = add_call(graph, aten.addmm.default, (first, *second.args))
    elif shape(first.args[0]) == shape(second.args[0]) and len(shape(first.args[0])) == 1:
        bias = add_call(graph, aten.add.Tensor, (first.args[0], second.args[0]))
        inner = add_call(graph, aten.addmm.default, (bias, *first.args[1:]))
        total = add_call(graph, aten.addmm.default, (inner, *second.args[1:]))
    else:
        return None
    if shape(total) == shape(node):
        return total
    sizes = next(x for x in node.args if x.target is aten.reshape.default).args[1]
    return add_call(graph, aten.reshape.default, (total, sizes))


def _product(node: fx.Node) -> fx.Node | None:
    if len(node.users) > 1:
        return None
    inner: Any = node.args[0] if node.target is aten.reshape.default else node
    node = inner
    single = node.target in (aten.mm.default, aten.addmm.default) and len(node.users) == 1
    return node if single else None
