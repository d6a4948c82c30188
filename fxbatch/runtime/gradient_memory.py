"""Memory of parameters' gradients, used again when the user has let go of it.

A dense gradient of 18,281 words is 22 MB. From the system's allocator it comes in fresh pages as often as not, whose
5,300 faults take about 10 ms. A gradient that was handed out has a storage of its own; the pool holds that storage
too, and gives it out again once it is the only one to hold it.

    >>> memory = GradientMemory()
    >>> place = memory.take((1000, 300), torch.float32).data_ptr()
    >>> memory.take((1000, 300), torch.float32).data_ptr() == place      # nobody held the first
    True
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from fxbatch.torch_private import storage_uses

_LARGE = 1 << 16  # bytes from which on memory is kept: smaller pieces are cheap anywhere
_KEPT = 4  # storages kept a shape and type
_KINDS = 64  # shapes and types

Kind = tuple[tuple[int, ...], torch.dtype]


class GradientMemory:
    """Storages on the CPU by shape and type: each is held by the pool, and by whoever has the gradient."""

    def __init__(self) -> None:
        self._storages: OrderedDict[Kind, list[tuple[torch.UntypedStorage, int]]] = OrderedDict()
        self._lock = threading.Lock()
        self.reused = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU with undefined contents, no view of another."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size < _LARGE:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            kept = self._storages.setdefault((shape, dtype), [])
            self._storages.move_to_end((shape, dtype))
            for storage, pointer in reversed(kept):  # the last one is warm in the cache
                # Resized, or moved into shared memory, it is the user's alone.
                if storage_uses(storage) == 1 and storage.data_ptr() == pointer and storage.nbytes() == size:
                    self.reused += 1
                    return _on(storage, shape, dtype)
            made = torch.empty(shape, dtype=dtype, device="cpu")
            kept.append((made.untyped_storage(), made.data_ptr()))
            if len(kept) > _KEPT:
                kept.pop(0)
            if len(self._storages) > _KINDS:
                self._storages.popitem(last=False)
        return made


def _on(storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # type: ignore[call-overload]  # takes one
