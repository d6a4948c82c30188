"""The rewrites for few kernels, as one literal tuple: forward and backward graphs pass through alike."""

from __future__ import annotations

from torch import fx

from fxbatch.codegen.clean import clean
from fxbatch.codegen.rewrite_linear import rewrite_linear

REWRITES = (
    rewrite_linear,  # products and biases become addmm, before anything looks at additions
)


def rewrite(graph: fx.Graph) -> fx.Graph:
    """All rewrites in order, in place, each followed by cleaning where it changed something."""
    for step in REWRITES:
        if step(graph):
            clean(graph)
    return graph
