"""Per-instance results -> the result of the decorated call: stacked, a list, or nested tensors.

>>> assemble(results, "stack", take)          # doctest: +SKIP
tensor of shape [instances, *shape], or a pytree of them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import ResultError
from fxbatch.torch_private import TreeSpec, tree_flatten, tree_unflatten
from fxbatch.trace.values import Value

Take = Callable[[list[np.ndarray]], list[torch.Tensor]]


class Results:
    """The leaves of all instances' results. `values` lists the value ids that they need, each once."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = results
        self.specs: list[TreeSpec | None] = []
        self.leaves: list[list[Any]] = []
        for result in results:
            if isinstance(result, torch.Tensor):  # a Value, or a tensor that the instance brings along
                self.leaves.append([result])
                self.specs.append(None)
            elif type(result) is tuple and all(type(x) is Value for x in result):
                self.leaves.append(list(result))
                self.specs.append(_row_spec(len(result)))
            else:
                leaves, spec = tree_flatten(result)
                self.leaves.append(leaves)
                self.specs.append(spec)

    @property
    def values(self) -> np.ndarray:
        """Distinct value ids, in order of first appearance."""
        ids = [x.id for leaves in self.leaves for x in leaves if type(x) is Value]
        return np.array(list(dict.fromkeys(ids)), dtype=np.int64)


@functools.cache
def _row_spec(n: int) -> TreeSpec:
    """The structure of a plain tuple of n leaves."""
    return tree_flatten((0,) * n)[1]


def stack(found: Results, renumber: Callable[[np.ndarray], np.ndarray], take: Take) -> Any:
    """One pytree with the structure of one instance's result, its leaves stacked on a new first dimension."""
    if not found.leaves:
        return torch.empty(0)
    _same_structure(found)
    columns = list(zip(*found.leaves, strict=True))
    requests: list[np.ndarray] = []
    for column in columns:
        if any(isinstance(x, torch.Tensor) for x in column):
            _same_types(column)
        ids = [x.id for x in column if type(x) is Value]
        if ids:
            requests.append(renumber(np.array(ids, dtype=np.int64)))
    rows = iter(take(requests))
    stacked = [_stack_column(column, rows) for column in columns]
    spec = found.specs[0]
    return stacked[0] if spec is None else tree_unflatten(stacked, spec)


def _stack_column(column: Sequence[Any], rows: Iterator[torch.Tensor]) -> Any:
    """A leaf that instances compute, or bring along (a constant, a parameter, an input), or both."""
    computed = [i for i, x in enumerate(column) if type(x) is Value]
    if len(computed) == len(column):
        return next(rows)
    if not any(isinstance(x, torch.Tensor) for x in column):
        return _stack_plain(column)
    tensors = list(column)
    if computed:
        for i, row in zip(computed, next(rows).unbind(0), strict=True):
            tensors[i] = row
    return torch.stack(tensors)


def separate(found: Results, renumber: Callable[[np.ndarray], np.ndarray], take: Take) -> list[Any]:
    """A list of per-instance results with real tensors in place of values."""
    flat = [x for leaves in found.leaves for x in leaves if type(x) is Value]
    by_type: dict[Any, dict[int, int]] = {}
    for x in flat:
        by_type.setdefault((tuple(x.shape), x.dtype, x.device), {}).setdefault(x.id, 0)
    requests = [renumber(np.array(list(ids), dtype=np.int64)) for ids in by_type.values()]
    tensors: dict[int, torch.Tensor] = {}
    for ids, rows in zip(by_type.values(), take(requests), strict=True):
        tensors.update(zip(ids, rows.unbind(0), strict=True))
    out = []
    for leaves, spec in zip(found.leaves, found.specs, strict=True):
        real = [tensors[x.id] if type(x) is Value else x for x in leaves]
        out.append(real[0] if spec is None else tree_unflatten(real, spec))
    return out


def stack_real(results: Sequence[Any]) -> Any:
    """`stack` of one-by-one results: what `fxbatch.disabled()` returns, and a decorated call inside another."""
    found = Results(results)
    if len(found.values):  # inside a recording: stacking is recorded too
        _same_structure(found)
        stacked = [_stack_recorded(column) for column in zip(*found.leaves, strict=True)]
        spec = found.specs[0]
        return stacked[0] if spec is None else tree_unflatten(stacked, spec)
    return stack(found, lambda ids: ids, lambda requests: [])


def _stack_recorded(column: Sequence[Any]) -> Any:
    if not any(isinstance(x, torch.Tensor) for x in column):
        return _stack_plain(column)
    _same_types(column)
    return torch.stack(list(column))


def nest(results: Sequence[Any]) -> Any:
    """One pytree whose tensor leaves are jagged nested tensors over the instances."""
    found = Results(results)
    _same_structure(found)
    leaves = [
        torch.nested.as_nested_tensor(list(column), layout=torch.jagged)
        if all(isinstance(x, torch.Tensor) for x in column)
        else _stack_plain(column)
        for column in zip(*found.leaves, strict=True)
    ]
    spec = found.specs[0]
    return leaves[0] if spec is None else tree_unflatten(leaves, spec)


def _same_structure(found: Results) -> None:
    first = found.specs[0]
    for i, spec in enumerate(found.specs):
        if spec != first:
            raise ResultError(
                f"instance {i} returned a different structure than instance 0: "
                f'{_describe(spec)} against {_describe(first)}; use out="list" for results that differ'
            )


def _describe(spec: TreeSpec | None) -> str:
    return "a tensor" if spec is None else str(spec)


def _same_types(column: Sequence[Any]) -> None:
    if all(type(x) is Value for x in column) and len({x._type for x in column}) == 1:
        return
    first = next(x for x in column if isinstance(x, torch.Tensor))
    for i, x in enumerate(column):
        if not isinstance(x, torch.Tensor):
            raise ResultError(
                f"instance {i} returned {type(x).__name__} where others returned a tensor; "
                'use out="list" for results that differ'
            )
        if tuple(x.shape) != tuple(first.shape):
            raise ResultError(
                f"results of different shapes can't be stacked: instance 0 gave {list(first.shape)}, "
                f'instance {i} gave {list(x.shape)}; use out="list" or out="nested"'
            )
        if x.dtype != first.dtype or x.device != first.device:
            raise ResultError(
                f"results of different types: instance 0 gave {first.dtype} on {first.device}, "
                f'instance {i} gave {x.dtype} on {x.device}; use out="list"'
            )


def _stack_plain(column: Sequence[Any]) -> Any:
    """Leaves that are no tensors: numbers become a tensor, None stays None, others become a list."""
    if all(x is None for x in column):
        return None
    if all(type(x) is bool for x in column) or all(type(x) is int for x in column):
        return torch.tensor(column)
    if all(type(x) in (int, float) for x in column):
        return torch.tensor([float(x) for x in column], dtype=torch.get_default_dtype())
    return list(column)
