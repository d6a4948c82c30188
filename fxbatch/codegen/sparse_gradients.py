"""`nn.Embedding(sparse=True)` keeps its sparse gradient, made once from the rows of the whole minibatch.

embedding_dense_backward(g, indices, V, padding, False)   =>
    embedding_sparse_gradient(g, indices, V, padding)
"""

from __future__ import annotations

import torch
from torch import fx

from fxbatch.codegen.clean import eliminate_dead

aten = torch.ops.aten


def embedding_sparse_gradient(
    grad: torch.Tensor, indices: torch.Tensor, rows: int, padding: int
) -> torch.Tensor:
    """The gradient of a table `[rows, width]` as a sparse tensor, uncoalesced, padding left out.

    It is the user's, so it shares no memory with what it is made of: a minibatch's rows, which the next one overwrites.
    """
    flat, values = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if padding >= 0:
        keep = flat != padding
        flat, values = flat[keep], values[keep]
    else:
        flat, values = flat.clone(), values.clone()
    size = (rows, grad.shape[-1])
    with torch.sparse.check_sparse_tensor_invariants(True):  # torch 2.11 warns where nothing was chosen
        return torch.sparse_coo_tensor(flat.unsqueeze(0), values, size)


def sparse_tables(body: fx.GraphModule, inputs: int) -> tuple[int, ...]:
    """The shared operands that the per-instance body only looks up with `sparse=True`."""
    places = [node for node in body.graph.nodes if node.op == "placeholder"][inputs:]
    return tuple(
        i for i, node in enumerate(places) if node.users and all(_looks_up(u, node) for u in node.users)
    )


def _looks_up(user: fx.Node, table: fx.Node) -> bool:
    return (
        user.target is aten.embedding.default
        and user.args[0] is table
        and len(user.args) > 4
        and bool(user.args[4])
    )


def look_up_densely(body: fx.GraphModule) -> None:
    """Trace the look-ups as dense ones: the gradients are made sparse afterwards."""
    for node in body.graph.nodes:
        if node.target is aten.embedding.default and len(node.args) > 4:
            node.args = (*node.args[:4], False)
    body.recompile()


def make_sparse(graph: fx.Graph, wanted: list[int]) -> None:
    """Results `wanted` of the parameter graph that are plain embedding gradients become sparse ones."""
    results = list(graph.output_node().args[0])
    for index in wanted:
        dense = results[index]
        if dense.target is not aten.embedding_dense_backward.default or dense.args[4]:
            continue
        with graph.inserting_before(dense):
            node = graph.call_function(embedding_sparse_gradient, tuple(dense.args[:4]))
        like = dense.meta["values"]
        node.meta["values"] = tuple(
            torch.empty(x.shape, dtype=x.dtype, layout=torch.sparse_coo) for x in like
        )
        results[index] = node
    graph.output_node().args = (tuple(results),)
    eliminate_dead(graph)
