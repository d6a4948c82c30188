"""The rewrites for few kernels, as one literal tuple: forward and backward graphs pass through alike."""

from __future__ import annotations

from torch import fx

from fxbatch.codegen.clean import clean
from fxbatch.codegen.rewrite_batched_products import rewrite_batched_products
from fxbatch.codegen.rewrite_gates import rewrite_gates
from fxbatch.codegen.rewrite_linear import rewrite_linear
from fxbatch.codegen.rewrite_lookups import rewrite_lookups
from fxbatch.codegen.rewrite_products import rewrite_products
from fxbatch.codegen.rewrite_slices import rewrite_slices

REWRITES = (
    rewrite_lookups,  # selections of rows can be written into given memory
    rewrite_batched_products,  # before the next: what becomes a product of matrices may have a bias
    rewrite_linear,  # products and biases become addmm, before anything looks at additions
    rewrite_slices,  # gradients of slices side by side, so that the next pass sees neighbours
    rewrite_gates,  # one kernel for neighbouring gates
    rewrite_products,  # last: it hides additions and products from the others
)


def rewrite(graph: fx.Graph) -> fx.Graph:
    """All rewrites in order, in place, each followed by cleaning where it changed something."""
    for step in REWRITES:
        if step(graph):
            clean(graph)
    return graph
