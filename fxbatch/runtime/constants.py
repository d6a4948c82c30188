"""Constants: the tensors and Python numbers that instances bring along, stacked once a tensor type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.ir import Signature
from fxbatch.runtime.devices import host_numbers, move

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
    items = payload[first : first + n] if order is None else [payload[i] for i in order[first : first + n]]
    if signature.operation.kind == "number":
        out.copy_(move(torch.tensor(items, dtype=out.dtype), out.device))
    elif len(items) == 1:
        out[0].copy_(items[0])
    elif out.dim() == 1 and out.device.type == "cpu" and out.dtype in _NUMBERS:
        out.copy_(torch.from_numpy(host_numbers(items, _NUMBERS[out.dtype])))
    else:
        torch.stack(list(items), out=out)
