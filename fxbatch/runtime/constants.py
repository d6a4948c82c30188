"""Constants: the tensors and Python numbers that instances bring along, stacked once a tensor type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.ir import Signature
from fxbatch.runtime.devices import host_numbers, move, to_device
from fxbatch.trace.integers import IntegerColumn, read_integers

# Tensors without dimensions are read one by one in half the time that stacking them takes.
_NUMBERS = {
    torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.float64: np.float64,
    torch.bool: np.bool_,
}  # fmt: skip


def fill_constants(
    out: torch.Tensor,
    signature: Signature,
    payload: Sequence[Any],
    first: int,
    n: int,
    order: np.ndarray | None,
) -> None:
    """Write payloads `first : first + n` into the rows `out` [n, *shape], one copy to its device.

    order: where the payload of each row is, None for as recorded.
    """
    where = slice(first, first + n) if order is None else order[first : first + n]
    if isinstance(payload, IntegerColumn) and out.dim() == 1 and out.device.type == "cpu":
        out.copy_(torch.from_numpy(payload.numbers[where]))
        return
    items = payload[where] if isinstance(where, slice) else [payload[i] for i in where.tolist()]
    if signature.operation.kind == "number":
        out.copy_(move(torch.tensor(items, dtype=out.dtype), out.device))
    elif len(items) == 1:
        out[0].copy_(items[0])
    elif out.dim() == 1 and out.device.type == "cpu" and out.dtype in _NUMBERS:
        numbers = read_integers(list(items), out.dtype)
        out.copy_(torch.from_numpy(host_numbers(items, _NUMBERS[out.dtype]) if numbers is None else numbers))
    elif out.device.type == "cuda":
        stack_distinct(items, out)
    else:
        torch.stack(list(items), out=out)


def stack_distinct(items: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Stack tensors that are on the device: each object once, then one index, where many come again (words).

    A launch stacks 128 tensors there: 130,000 words of 1,000 kinds would be 1,000 launches.
    """
    places: dict[int, int] = {}
    index = [places.setdefault(id(x), len(places)) for x in items]
    if 2 * len(places) > len(items):
        torch.stack(list(items), out=out)
        return
    objects = {id(x): x for x in items}
    table = torch.stack([objects[i] for i in places])
    torch.index_select(table, 0, to_device(np.array(index, dtype=np.int64), out.device), out=out)
