"""Calls that speak of memory (strides, memory formats), as calls that speak of elements.

In: ATen calls of the per-instance body. Out: calls that mean the same for rows of a larger tensor.

    as_strided(x [n], (2,), (3,), 1)   =>  x.reshape(-1)[1 + arange(2) * 3]
    clone(x, channels_last)            =>  clone(x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_FORMATS = (torch.channels_last, torch.channels_last_3d)


def _positions(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor | None:
    """Which elements of x a strided view shows; None where x itself is no plain block of memory."""
    if not x.is_contiguous() or x.storage_offset():
        return None
    found = torch.full((), offset or 0, dtype=torch.int64, device=x.device)
    for i, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[i] = length
        found = found + (torch.arange(length, device=x.device) * step).reshape(shape)
    return found


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    at = _positions(x, size, stride, storage_offset)
    return NotImplemented if at is None else aten.index.Tensor(x.reshape(-1), [at])


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    at = _positions(x, size, stride, storage_offset)
    return NotImplemented if at is None else x.reshape(-1).index_put([at], source).reshape(x.shape)


def to_copy(x: Tensor, *, memory_format: torch.memory_format | None = None, **kwargs: Any) -> Tensor:
    if memory_format not in _FORMATS:
        return NotImplemented
    copied: Tensor = aten._to_copy.default(x, **kwargs)
    return copied


def clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return aten.clone.default(x) if memory_format in _FORMATS else NotImplemented


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Without dimensions all elements roll as one row."""
    if dims:
        return NotImplemented
    return x.clone() if not x.dim() else x.reshape(-1).roll(shifts, 0).reshape(x.shape)


def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    blocks = [x if x.dim() == 2 else x.reshape(1, -1) for x in tensors]
    width, left, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(aten.constant_pad_nd.default(x, [left, width - left - x.shape[1]]))
        left += x.shape[1]
    return torch.cat(rows)


MEMORY: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: as_strided,
    aten.as_strided_copy.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten._to_copy.default: to_copy,
    aten.clone.default: clone,
    aten.roll.default: roll,
    aten.block_diag.default: block_diag,
}
