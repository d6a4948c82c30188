"""A product and a bias are one kernel.

add(mm(x, w), b)                       =>  addmm(b, x, w)
add(reshape(mm(x, w), [n, L, k]), b)   =>  reshape(addmm(b, x, w), [n, L, k])      b: [k]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxbatch.codegen.clean import apply_rules
from fxbatch.codegen.sizes import add_call, dtype, shape

aten = torch.ops.aten


def rewrite_linear(graph: fx.Graph) -> bool:
    """Returns whether anything changed."""
    return apply_rules(graph, {aten.add.Tensor: (_addmm,)})


def _addmm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    if node.kwargs:
        return None
    for product, bias in (node.args, node.args[::-1]):
        if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node):
            continue
        inner: Any = product
        if product.target is aten.reshape.default and len(product.users) == 1:
            inner = product.args[0]
        if inner.target is not aten.mm.default or len(inner.users) > 1:
            continue
        if dtype(bias) != dtype(inner) or shape(node) != shape(product):
            continue
        width = shape(inner)[1:]
        if shape(bias) != width or shape(product)[-1:] != width:
            continue
        new = add_call(graph, aten.addmm.default, (bias, *inner.args))
        if inner is product:
            return new
        return add_call(graph, aten.reshape.default, (new, product.args[1]))
    return None
