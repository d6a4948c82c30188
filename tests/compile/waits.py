"""What makes the host wait for a device, counted, also where there is only a CPU.

with count_waits() as waits: minibatch()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fxbatch.runtime.memory import host_numbers
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


def _reads_host_numbers() -> bool:
    """Whether this thread reads numbers that are on the host already."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is host_numbers.__code__:
            return True
    return False


class _Waits(QuietDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        on_host = _reads_host_numbers() and args[0].device.type == "cpu"
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
