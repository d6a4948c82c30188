"""What a run moves to its device, and how: few copies, pinned, none that waits.

    index = to_device(plan.indices, device)          # all indices of a plan in one copy
    with count_waits() as waits: minibatch()         # what made the host wait for a device

A copy reads pinned memory after the call has returned; PyTorch's pinned allocator keeps it until then, so
nothing here waits. Indices are int64, as index_select and embedding_bag take them: int32 would halve one
small copy a minibatch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fxbatch.torch_private import QuietDispatchMode

aten = torch.ops.aten
# What reads a tensor's numbers on the host, or whose result's shape depends on them.
WAITING: tuple[Any, ...] = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device: shared memory on the CPU, one pinned, non-blocking copy elsewhere."""
    return move(torch.from_numpy(array), device)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on a device, without waiting for the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory(device).to(device, non_blocking=True)


class _HostReads(threading.local):
    now = False  # whether this thread reads numbers that are on the host already


_host_reads = _HostReads()


def host_numbers(tensors: Sequence[torch.Tensor], kind: Any) -> np.ndarray:
    """The numbers of CPU tensors without dimensions, as an array; they wait for no device."""
    _host_reads.now = True
    try:
        return np.array(list(map(torch.Tensor.item, tensors)), dtype=kind)
    finally:
        _host_reads.now = False


class _Waits(QuietDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        on_host = _host_reads.now and args[0].device.type == "cpu"
        if (func in WAITING and not on_host) or _leaves_device(func, args, kwargs or {}):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def _leaves_device(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it copies from a device other than the CPU to the CPU, waiting for it."""
    if func is aten._to_copy.default:
        target = kwargs.get("device")
        away = target is not None and torch.device(target).type == "cpu"
        return away and args[0].device.type != "cpu" and not kwargs.get("non_blocking", False)
    if func is aten.copy_.default:
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return waits and args[0].device.type == "cpu" and args[1].device.type != "cpu"
    return False


@contextmanager
def count_waits() -> Iterator[list[str]]:
    """The operations within that make the host wait for a device, by name, also where there is only a CPU.

    For code that runs, not code that is recorded: a dispatch mode can't see recorded values.
    On CUDA `torch.cuda.set_sync_debug_mode("error")` is the stricter check.
    """
    with _Waits() as mode:
        yield mode.found
