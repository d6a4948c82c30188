"""The oracle of packed functions: the body itself, one instance at a time; values and gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxbatch.ragged.packed_function import PackedFunction
from fxbatch.torch_private import tree_leaves

Sizes = Sequence[tuple[int, ...]]


def check_packed(
    body: Callable[..., Any],
    make: Callable[..., list[torch.Tensor]],
    sizes: Sizes,
    own: tuple[tuple[int, ...], ...],
    shared: Sequence[torch.Tensor] = (),
) -> PackedFunction:
    """Compare the packed function of `body` with the loop on instances `make(*sizes)`; give it back.

    own: per tensor of an instance its dimensions that differ.
    """
    torch.manual_seed(0)
    instances = [[_leaf(t) for t in make(*s)] for s in sizes]
    weights = [_leaf(t) for t in shared]

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(tree_leaves(body(*tensors)))

    example = [t.detach() for t in max(instances, key=lambda i: min(_own_sizes(i, own)))]
    function = PackedFunction.of(flat, example, own, weights)
    columns = list(zip(*instances, strict=True))
    found = function.columns_of(columns)
    assert function.graph.fitting(found).all(), f"sizes that the graph is not for: {function.graph.guards}"
    outputs, z = function(columns, weights, found, torch.device("cpu"))
    packed = [function.apart(o, t, z) for o, t in zip(function.lowered.outputs, outputs, strict=True)]
    loop = [flat(*i, *weights) for i in instances]
    ours, theirs = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for k, column in enumerate(packed):
        for a, b in zip(column, [r[k] for r in loop], strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
            if a.is_floating_point():
                weight = torch.randn_like(b)
                ours, theirs = ours + (a * weight).sum(), theirs + (b * weight).sum()
    leaves = [t for i in instances for t in i if t.requires_grad] + weights
    leaves = [t for t in leaves if t.requires_grad]
    if theirs.requires_grad:
        found_a = torch.autograd.grad(ours, leaves, allow_unused=True, materialize_grads=True)
        found_b = torch.autograd.grad(theirs, leaves, allow_unused=True, materialize_grads=True)
        for a, b in zip(found_a, found_b, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    return function


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.double().detach().requires_grad_() if t.is_floating_point() else t


def _own_sizes(instance: Sequence[torch.Tensor], own: tuple[tuple[int, ...], ...]) -> list[int]:
    return [t.shape[d] for t, dims in zip(instance, own, strict=True) for d in dims]
