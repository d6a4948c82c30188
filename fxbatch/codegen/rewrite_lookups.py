"""A look-up in a table is a selection of rows, which can be written into given memory.

embedding(table, indices)              =>  index_select(table, 0, indices)             indices: [n]
embedding(table, indices)              =>  reshape(index_select(table, 0, reshape(indices, [n * k])), [n, k, d])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxbatch.codegen.clean import apply_rules
from fxbatch.codegen.sizes import add_call, shape, shape_argument, size_argument

aten = torch.ops.aten


def rewrite_lookups(graph: fx.Graph) -> bool:
    """Returns whether anything changed."""
    return apply_rules(graph, {aten.embedding.default: (_select_rows,)})


def _select_rows(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    table: Any = node.args[0]
    indices: Any = node.args[1]
    dims = shape(indices)
    if len(dims) == 1:
        return add_call(graph, aten.index_select.default, (table, 0, indices))
    factor, rest = 0, 1
    for a, b in dims:
        if factor and a:
            return None
        factor, rest = (factor * b, rest * b) if factor or not a else (rest * a, rest * b)
    flat = add_call(graph, aten.reshape.default, (indices, [size_argument(graph, (factor, rest))]))
    rows = add_call(graph, aten.index_select.default, (table, 0, flat))
    return add_call(graph, aten.reshape.default, (rows, shape_argument(graph, shape(node))))
