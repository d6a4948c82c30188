"""The oracle of packed functions: the body itself, one instance at a time; values and gradients, with float64 as
referee."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxbatch.ragged.check import packed_differences
from fxbatch.ragged.packed_function import PackedFunction
from fxbatch.torch_private import tree_leaves

Sizes = Sequence[tuple[int, ...]]
Instances = Sequence[Sequence[torch.Tensor]]
Results = Sequence[Sequence[torch.Tensor]]


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
    function = PackedFunction.of(flat, example, own, weights, code=[body])
    columns = list(zip(*instances, strict=True))
    found = function.columns_of(columns)
    assert function.graph.fitting(found).all(), f"sizes that the graph is not for: {function.graph.guards}"
    outputs, z = function(columns, weights, found, torch.device("cpu"))
    packed = function.apart(outputs, z)

    wrong = difference(packed, instances, lambda rows, shared: [flat(*row, *shared) for row in rows], weights)
    assert not wrong, wrong
    return function


def difference(
    packed: Results,
    instances: Instances,
    run_loop: Callable[[Instances, Sequence[torch.Tensor]], Results],
    shared: Sequence[torch.Tensor] = (),
) -> str:
    """What differs first between results [output][instance] and those of the loop, values and gradients; "" for
    nothing. run_loop(instances, shared) -> [instance][output]."""
    ours = list(zip(*packed, strict=True))
    try:
        wrong = packed_differences(ours, run_loop(instances, shared), instances, shared, run_loop)
    except RuntimeError as error:
        try:
            packed_differences(*(run_loop(instances, shared) for _ in range(2)), instances, shared, run_loop)
        except RuntimeError:  # the loop has no derivative either
            with torch.no_grad():
                wrong = packed_differences(ours, run_loop(instances, shared), instances, shared, run_loop)
        else:
            return f"backward: {error}"
    return wrong[0] if wrong else ""


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.float().detach().requires_grad_() if t.is_floating_point() else t


def _own_sizes(instance: Sequence[torch.Tensor], own: tuple[tuple[int, ...], ...]) -> list[int]:
    return [t.shape[d] for t, dims in zip(instance, own, strict=True) for d in dims]
