"""Constants, the tensors and Python numbers that instances bring along, stacked once a tensor type; and how they, and
indices, come to their device: few copies, pinned, none that waits.

A copy reads pinned memory after the call has returned; PyTorch's pinned allocator keeps it until then, so
nothing here waits. Indices are int64, as index_select and embedding_bag take them: int32 would halve one
small copy a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.codegen.native import extension
from fxbatch.ir import Signature
from fxbatch.trace.integers import IntegerColumn, read_integers

# Tensors without dimensions are read one by one in half the time that stacking them takes.
_NUMBERS = {
    torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32, torch.float64: np.float64,
    torch.bool: np.bool_,
}  # fmt: skip


def fill_constants(
    rows: Callable[[], torch.Tensor],
    place: int,
    signature: Signature,
    payload: Sequence[Any],
    first: int,
    n: int,
    order: np.ndarray | None,
) -> None:
    """Write payloads `first : first + n` into their rows [n, *shape], one copy to their device.

    rows: gives them as a tensor; place: where they are in memory, 0 where C must not write there. order: where the
    payload of each row is, None for as recorded.
    """
    where = slice(first, first + n) if order is None else order[first : first + n]
    numbers = _host_column(signature, payload, where)
    if numbers is not None and place and numbers.flags.c_contiguous:
        extension.put(place, numbers)
        return
    out = rows()
    items = payload[where] if isinstance(where, slice) else [payload[i] for i in where.tolist()]
    if numbers is not None:
        out.copy_(torch.from_numpy(numbers))
    elif signature.operation.kind == "number":
        out.copy_(move(torch.tensor(items, dtype=out.dtype), out.device))
    elif len(items) == 1:
        out[0].copy_(items[0])
    elif out.device.type == "cuda":
        stack_distinct(items, out)
    else:
        torch.stack(list(items), out=out)


def _host_column(
    signature: Signature, payload: Sequence[Any], where: slice | np.ndarray
) -> np.ndarray | None:
    """Tensors on the CPU without dimensions as an array of their type; None for all others."""
    kind = signature.outputs[0]
    if kind.shape or kind.device.type != "cpu" or signature.operation.kind == "number":
        return None
    dtype = _NUMBERS.get(kind.dtype)
    if dtype is None:
        return None
    if type(payload) is IntegerColumn:
        return payload.numbers[where].astype(dtype, copy=False)
    items = list(payload[where] if isinstance(where, slice) else [payload[i] for i in where.tolist()])
    found = read_integers(items, kind.dtype)
    return host_numbers(items, dtype) if found is None else found


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


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device: shared memory on the CPU, one pinned, non-blocking copy elsewhere."""
    return move(torch.from_numpy(array), device)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on a device, without waiting for the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory(device).to(device, non_blocking=True)


def host_numbers(tensors: Sequence[torch.Tensor], kind: Any) -> np.ndarray:
    """The numbers of CPU tensors without dimensions, as an array; they wait for no device."""
    return np.array(list(map(torch.Tensor.item, tensors)), dtype=kind)
