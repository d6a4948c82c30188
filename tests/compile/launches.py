"""What a CUDA graph does, on the CPU: launches are recorded once, and replayed on the memory that they had.

In: work. Out: a function that makes the same calls of ATen on the same tensors, without running the work again: what
Python computed meanwhile is fixed, and so is every address. A call that reads numbers on the host is refused.

    replay = record_launches(lambda: torch.mul(x, 2, out=y))
    x.fill_(3); replay()                                  # y is 6
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxbatch.runtime.devices import WAITING
from fxbatch.torch_private import TorchDispatchMode, tree_leaves

Launch = tuple[Any, Sequence[Any], dict[str, Any], Any]


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launch] = []  # with their results, whose memory is never given to another

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **(kwargs or {}))
        self.found.append((func, args, kwargs or {}, result))
        return result


def record_launches(work: Callable[[], None]) -> Callable[[], None]:
    """Run the work twice, as a capture does: once to allocate what it needs, once recorded."""
    work()
    with _Launches() as launches:
        work()
    return lambda: replay(launches.found)


@torch.no_grad()
def replay(launches: Sequence[Launch]) -> None:
    """The recorded calls again, each result where it was."""
    for func, args, kwargs, before in launches:
        now = func(*args, **kwargs)
        if func._schema.is_mutable:
            continue
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        for old, new in zip(tensors(before), tensors(now), strict=True):
            if old.untyped_storage().data_ptr() not in given:  # no view
                old.copy_(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
