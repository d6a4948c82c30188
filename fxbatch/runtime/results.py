"""Per-instance results -> the result of the decorated call: stacked, a list, or nested tensors.

>>> stack(Results(results), renumber, take)          # doctest: +SKIP
tensor of shape [instances, *shape], or a pytree of them
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import ResultError
from fxbatch.torch_private import TreeSpec, tree_flatten
from fxbatch.trace.held import Held, Renumber, Take
from fxbatch.trace.objects import (
    Structure,
    fill,
    has_attributes,
    in_order_of,
    put_together,
    take_apart,
    values_in,
)
from fxbatch.trace.values import REQUIRES_GRAD, Value, is_flat

Apart = Callable[[torch.Tensor, np.ndarray], Sequence[torch.Tensor]]

LONGEST = 200  # characters of a structure in a message


class Results:
    """The leaves of all instances' results. `values` lists the value ids that they need, each once.

    Leaves that are objects of the user's own classes hold values too: `objects` says whose, by the leaf's id.
    """

    def __init__(self, results: Sequence[Any], held: Held | None = None) -> None:
        self.results = results
        self.held = held  # what others hold
        self.specs: list[TreeSpec | Structure | None] = []
        self.rows: dict[tuple[type, int], TreeSpec] = {}  # those of plain lists and tuples, by length
        self.leaves: list[list[object]] = []
        self.objects: dict[int, list[Value]] = {}
        self._values: np.ndarray | None = None
        self.opaque = False  # whether there are objects whose attributes may be tensors
        self.are_values = set(map(type, results)) == _VALUES
        if self.are_values:
            self.leaves, self.specs = [[x] for x in results], [None] * len(results)
            return
        for result in results:
            if isinstance(result, torch.Tensor):  # a Value, or a tensor that the instance brings along
                self.leaves.append([result])
                self.specs.append(None)
            elif type(result) in (tuple, list) and is_flat(result):
                self.leaves.append(list(result))
                key = type(result), len(result)
                if key not in self.rows:
                    self.rows[key] = tree_flatten(result)[1]
                self.specs.append(self.rows[key])
            else:
                leaves, spec = tree_flatten(result)
                self.leaves.append(leaves)
                self.specs.append(spec)
                self._look_into(leaves)

    def _look_into(self, leaves: Sequence[object]) -> None:
        for leaf in leaves:
            if type(leaf) is not Value and has_attributes(leaf):
                self.opaque = True
                values = values_in(leaf)
                if values:
                    self.objects[id(leaf)] = values

    def all_values(self) -> list[Value]:
        """The values of all results, objects' among them, in order of appearance."""
        if self.are_values:
            return list(self.results)
        if not self.objects:
            return [x for leaves in self.leaves for x in leaves if type(x) is Value]
        values = []
        for leaves in self.leaves:
            for x in leaves:
                if type(x) is Value:
                    values.append(x)
                else:
                    values += self.objects.get(id(x), [])
        return values

    @property
    def values(self) -> np.ndarray:
        """Distinct ids of all values that have to be computed, in order of first appearance."""
        if self._values is None:
            ids = list(dict.fromkeys([x.id for x in self.all_values()]))
            self._values = np.array(ids, dtype=np.int64)
            if self.held is not None:
                self._values = np.concatenate([self._values, self.held.besides(self._values)])
        return self._values

    def made_alike(self) -> Results:
        """These results as leaves of one structure that all instances have, or a ResultError.

        Objects that hold tensors are taken apart by attribute, and dictionaries get the order of the first one's keys.
        """
        if self._is_alike() and not self.opaque:
            return self
        alike = self
        if self.opaque:
            alike = self._taken_apart()
            if not alike._is_alike() and not self.objects:
                alike = self  # objects that the forward did not compute stay as they are
        if not alike._is_alike():
            ordered = [in_order_of(result, self.results[0]) for result in self.results]
            if any(a is not b for a, b in zip(ordered, self.results, strict=True)):
                alike = Results(ordered)
                alike = alike._taken_apart() if alike.opaque else alike
        _same_structure(alike)
        return alike

    def one_of(self, leaves: list[Any]) -> Any:
        """One result of these leaves, where all have one structure."""
        spec = self.specs[0]
        return leaves[0] if spec is None else put_together(leaves, spec)

    def _is_alike(self) -> bool:
        return all(spec == self.specs[0] for spec in self.specs)

    def _taken_apart(self) -> Results:
        apart = Results(())
        apart.results = self.results
        for result in self.results:
            leaves, structure = take_apart(result)
            apart.leaves.append(leaves)
            apart.specs.append(structure)
        return apart


_VALUES = {Value}


def stack(results: Results, renumber: Renumber, take: Take) -> Any:
    """One pytree with the structure of one instance's result, its leaves stacked on a new first dimension."""
    if not results.leaves:
        return torch.empty(0)
    if results.are_values and len({x._type for x in results.results}) == 1:
        return take([renumber(np.array([x.id for x in results.results], dtype=np.int64))])[0]
    results = results.made_alike()
    columns = list(zip(*results.leaves, strict=True))
    requests: list[np.ndarray] = []
    for column in columns:
        if any(isinstance(x, torch.Tensor) for x in column):
            _same_types(column)
        ids = [x.id for x in column if type(x) is Value]
        if ids:
            requests.append(renumber(np.array(ids, dtype=np.int64)))
    rows = iter(take(requests))
    return results.one_of([_stack_column(column, rows) for column in columns])


def _stack_column(column: Sequence[Any], rows: Iterator[torch.Tensor]) -> object:
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


def separate(
    results: Results,
    renumber: Renumber,
    take: Take,
    needs: np.ndarray | None = None,
    apart: Apart = lambda rows, _: rows.unbind(0),
) -> list[object]:
    """A list of per-instance results with real tensors in place of values. needs: whether gradients go through each
    value of the program, where the run knows; apart: the rows of a result of these values, each a tensor of its own."""
    by_type: dict[object, dict[int, Value]] = {}
    for x in results.all_values():
        kind = id(x._recorder.table), x._type
        ids = by_type.get(kind)
        if ids is None:
            ids = by_type[kind] = {}
        ids.setdefault(x.id, x)
    requests = [renumber(np.array(list(ids), dtype=np.int64)) for ids in by_type.values()]
    tensors: dict[int, torch.Tensor] = {}
    for values, request, rows in zip(by_type.values(), requests, take(requests), strict=True):
        parts = apart(rows, request)
        if rows.requires_grad:
            flags = [bool(x._flags & REQUIRES_GRAD) for x in values.values()]
            if needs is not None:
                flags = [flag and need for flag, need in zip(flags, needs[request].tolist(), strict=True)]
            if not all(flags):  # one tensor for all: what is detached was taken along
                parts = tuple(t if flag else t.detach() for t, flag in zip(parts, flags, strict=True))
        tensors.update(zip(values, parts, strict=True))
    out = []
    for leaves, spec in zip(results.leaves, results.specs, strict=True):
        real = [tensors[x.id] if type(x) is Value else x for x in leaves]
        if results.objects:
            real = [fill(x, tensors) if id(x) in results.objects else x for x in real]
        if spec is None:
            out.append(real[0])
        elif spec is results.rows.get((list, len(real))):
            out.append(real)
        elif spec is results.rows.get((tuple, len(real))):
            out.append(tuple(real))
        else:
            out.append(put_together(real, spec))
    return out


def stack_real(results: Sequence[object]) -> object:
    """`stack` of one-by-one results: what `fxbatch.disabled()` returns, and a decorated call inside another."""
    alike = _stack_alike(results)
    if alike is not None:
        return alike
    whole = Results(results)
    if len(whole.values):  # inside a recording: stacking is recorded too
        whole = whole.made_alike()
        return whole.one_of([_stack_recorded(column) for column in zip(*whole.leaves, strict=True)])
    return stack(whole, lambda ids: ids, lambda requests: [])


_DTYPE = operator.attrgetter("dtype")


def _stack_alike(results: Sequence[object]) -> torch.Tensor | None:
    """The short way for plain tensors of one type; None for others, and where they can't be stacked."""
    if set(map(type, results)) != {torch.Tensor} or len(set(map(_DTYPE, results))) > 1:
        return None
    try:
        return torch.stack(results)  # type: ignore[arg-type]  # a list or a tuple
    except RuntimeError:  # the long way says which differs
        return None


def _stack_recorded(column: Sequence[Any]) -> object:
    if not any(isinstance(x, torch.Tensor) for x in column):
        return _stack_plain(column)
    _same_types(column)
    return torch.stack(list(column))


def gather(results: Sequence[object], out: str) -> object:
    """One-by-one results as a decorated call gives them."""
    return stack_real(results) if out == "stack" else nest(results) if out == "nested" else results


def nest(results: Sequence[object]) -> object:
    """One pytree whose tensor leaves are jagged nested tensors over the instances."""
    alike = Results(results).made_alike()
    leaves = [
        torch.nested.as_nested_tensor(list(column), layout=torch.jagged)
        if all(isinstance(x, torch.Tensor) for x in column)
        else _stack_plain(column)
        for column in zip(*alike.leaves, strict=True)
    ]
    return alike.one_of(leaves)


def _same_structure(results: Results) -> None:
    first = results.specs[0]
    for i, spec in enumerate(results.specs):
        if spec != first:
            this, other = (_describe(results.results[k])[:LONGEST] for k in (i, 0))
            raise ResultError(
                f"results of different structures can't be stacked: instance 0 gave {other}, instance {i} gave {this}; "
                'use out="list"'
            )


def _describe(result: object) -> str:
    """A result's structure in words: `(a tensor, {'n': an int})`."""
    if isinstance(result, torch.Tensor):
        return "a tensor"
    if type(result) is tuple:
        return f"({', '.join(map(_describe, result))})"
    if type(result) is list:
        return f"[{', '.join(map(_describe, result))}]"
    if type(result) is dict:
        return "{" + ", ".join(f"{key!r}: {_describe(value)}" for key, value in result.items()) + "}"
    plain = result is None or isinstance(result, (int, float, str))
    return repr(result)[:60] if plain else type(result).__name__


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


def _stack_plain(column: Sequence[Any]) -> object:
    """Leaves that are no tensors: numbers become a tensor, None stays None, others become a list."""
    if all(x is None for x in column):
        return None
    if all(type(x) is bool for x in column) or all(type(x) is int for x in column):
        return torch.tensor(column)
    if all(type(x) in (int, float) for x in column):
        return torch.tensor([float(x) for x in column], dtype=torch.get_default_dtype())
    return list(column)
