"""Operators without a rule: run instance by instance inside the function, or on rows that torch.vmap batches.

In: a node. Out: its value, by a loop over the instances of the minibatch (exact whatever the operator does), or by
torch's own batching rule where nothing in it has a size of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import Proxy

from fxbatch.ragged.expressions import depends
from fxbatch.ragged.lower import (
    DENSE,
    WHOLE,
    Given,
    NoRule,
    Operator,
    Packed,
    PackedTape,
    own_dimensions,
    shape_of,
)
from fxbatch.ragged.packed_column import apart, together
from fxbatch.ragged.recurrent import NODES
from fxbatch.torch_private import TreeSpec, tree_unflatten


def batched_by_vmap(tape: PackedTape, node: fx.Node) -> Given:
    """An operator on values without sizes of their own: torch.vmap over the instances."""
    leaves, spec = tape.leaves(node)
    values = [x for x in leaves if isinstance(x, Packed)]
    if all(v.layout == WHOLE for v in values):
        raise NoRule("nothing of the instances in it")
    target: Operator = NODES.get(node.target, node.target)

    def run(*tensors: torch.Tensor) -> object:
        operands = iter(tensors)
        args, kwargs = tree_unflatten([next(operands) if isinstance(x, Packed) else x for x in leaves], spec)
        return target(*args, **kwargs)

    dims = tuple(0 if v.layout == DENSE else None for v in values)
    batched = torch.vmap(run, in_dims=dims, randomness="different")
    return tape.results(node, tape.call(batched, *[v.rows for v in values]))


@dataclass(frozen=True, eq=False)
class Alone:
    """A call of an operator for each instance by itself."""

    target: Operator
    leaves: Sequence[tuple[Any, ...]]  # ("tensor", layout, own dimensions), ("number",) or ("plain", value)
    spec: TreeSpec
    outputs: Sequence[tuple[int, ...] | None]  # own dimensions of each result, None for what is no tensor

    def __call__(self, n: int, *arguments: Any) -> list[torch.Tensor | None]:
        """arguments: tensors with the Lengths of their own sizes, columns of numbers, in order."""
        columns: list[Sequence[object]] = []
        taken = iter(arguments)
        for leaf in self.leaves:
            if leaf[0] == "tensor":
                _, layout, axes = leaf
                columns.append(apart(next(taken), layout, axes, [next(taken) for _ in axes], n))
            elif leaf[0] == "number":
                columns.append(next(taken).tolist())
            else:
                columns.append([leaf[1]] * n)
        results = []
        for i in range(n):
            args, kwargs = tree_unflatten([c[i] for c in columns], self.spec)
            result = self.target(*args, **kwargs)
            results.append(result if isinstance(result, (tuple, list)) else (result,))
        out: list[torch.Tensor | None] = []
        for place, axes in enumerate(self.outputs):
            parts = [r[place] for r in results]
            out.append(None if axes is None else together(parts, axes, [next(taken) for _ in axes]))
        return out


def alone(tape: PackedTape, node: fx.Node) -> Given:
    """A node instance by instance."""
    leaves, spec = tape.leaves(node)
    described: list[tuple[Any, ...]] = []
    arguments: list[Proxy] = []
    for x in leaves:
        if isinstance(x, Packed):
            described.append(("tensor", x.layout, x.axes))
            arguments.append(x.rows)
            arguments += [tape.lengths(x.shape[a]) for a in x.axes]
        elif depends(x):
            described.append(("number",))
            arguments.append(tape.column(x))
        else:
            described.append(("plain", x))
    val = node.meta["val"]
    results = list(val) if isinstance(val, (tuple, list)) else [val]
    outputs: list[tuple[int, ...] | None] = []
    for t in results:
        axes = own_dimensions(shape_of(t)) if isinstance(t, torch.Tensor) else None
        outputs.append(axes)
        arguments += [tape.lengths(shape_of(t)[a]) for a in axes or ()]
    call = Alone(NODES.get(node.target, node.target), described, spec, outputs)
    results_of_all = tape.call(call, tape.z.n, *arguments)
    return tape.results(node, results_of_all if isinstance(val, (tuple, list)) else results_of_all[0])
