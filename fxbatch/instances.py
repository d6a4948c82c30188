"""Minibatches: the containers that an argument may come in, and the items that they hold.

In: an argument of a decorated call. Out: a list with one item per instance, or an error that says what to write.

    instances_of(deque(trees), "Model.forward: tree", "tree")      # a list of trees
    instances_of({"x": xs, "y": ys}, "Model.forward: row", "row")   # [{"x": xs[0], "y": ys[0]}, ...]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from fxbatch.errors import MinibatchError


def is_minibatch(x: Any) -> bool:
    """Whether an argument holds instances, going by its type.

    Classes derived from list, tuple or dict count as instances: a named tuple, or a tree that is a list of
    its children, is one of the things that a forward is written for.
    """
    return (
        type(x) in (list, tuple, dict, deque)
        or isinstance(x, (torch.Tensor, np.ndarray, Dataset, range))
        or (isinstance(x, Iterator) and not hasattr(x, "__len__"))
    )


def instances_of(value: Any, where: str, name: str) -> Sequence[Any]:
    """The items of a minibatch; MinibatchError, which begins with `where`, for what is none."""
    if type(value) in (list, tuple):
        items: Sequence[Any] = value
        return items
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return torch.nn.utils.rnn.unpack_sequence(value)
    if not is_minibatch(value):
        raise MinibatchError(f"{where} {_what_is_wrong(value, name)}")
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if not value.ndim:
            raise MinibatchError(f"{where} has no dimensions; its first dimension is the instances")
        if isinstance(value.shape[0], torch.SymInt):
            raise MinibatchError(
                f"{where} has a dynamic number of instances (dynamic_shapes): what is exported is the loop over as "
                "many instances as are given, so leave the first dimension static, or export the undecorated forward"
            )
        return value.unbind(0) if isinstance(value, torch.Tensor) else list(value)
    if isinstance(value, Mapping):
        return _rows(value, where, name)
    if isinstance(value, Dataset) and not isinstance(value, IterableDataset):
        if not hasattr(value, "__len__"):
            raise MinibatchError(f"{where} is a data set without a length; give a list of its items")
        return [value[i] for i in range(len(value))]
    return list(value)


def _rows(columns: Mapping[str, Any], where: str, name: str) -> list[dict[str, Any]]:
    """A dictionary of columns, as DataLoader collates dictionaries, as one dictionary per instance."""
    found = {}
    for key, column in columns.items():
        if not is_minibatch(column):
            raise MinibatchError(
                f"{where} is a dictionary, but {key!r} in it is not a column with one item per instance "
                f"({type(column).__name__}); for a minibatch of one dictionary: [{name}]"
            )
        found[key] = instances_of(column, f"{where}[{key!r}]", f"{name}[{key!r}]")
    lengths = {key: len(column) for key, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise MinibatchError(
            f"{where}: columns of different lengths: {lengths}; for a minibatch of one: [{name}]"
        )
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def _what_is_wrong(value: Any, name: str) -> str:
    kind = type(value)
    what = f"takes a minibatch, one item per instance (list, tuple, tensor, array, data set), got {kind.__name__}"
    if isinstance(value, (set, frozenset)):
        return f"{what}, which has no order: list({name})"
    if isinstance(value, torch.fx.Proxy):
        return (
            f"{what}: torch.fx.symbolic_trace can't look into a decorated forward; "
            "fxbatch.compile_minibatch(model, minibatch).graph_module is an fx graph of one minibatch"
        )
    items = (
        f", list({name}) for its items" if isinstance(value, (Sequence, Mapping)) and kind is not str else ""
    )
    return (
        f"{what}: did you mean [{name}]{items}? For an argument given once for all instances: "
        f'@fxbatch.autobatch(shared=("{name}",))'
    )
