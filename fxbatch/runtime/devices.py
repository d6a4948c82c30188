"""What a run moves to its device, and how: few copies, pinned, none that waits.

    index = to_device(plan.indices, device)          # all indices of a plan in one copy

A copy reads pinned memory after the call has returned; PyTorch's pinned allocator keeps it until then, so
nothing here waits. Indices are int64, as index_select and embedding_bag take them: int32 would halve one
small copy a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


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
