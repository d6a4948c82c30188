"""Buffers: rows of one tensor type in one piece of memory, pooled from minibatch to minibatch.

>>> pool = BufferPool()
>>> buffer = Buffer(pool, TensorType((3,), torch.float32, torch.device("cpu")))
>>> buffer.reserve(4).shape
torch.Size([4, 3])
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

import torch

from fxbatch.ir import TensorType

_KEPT = 4  # free buffers kept a type
_TYPES = 4096  # types that are kept, with or without buffers
_LEAST = 64 << 20  # bytes of free buffers that are always kept


class BufferPool:
    """Free buffers by tensor type. A buffer is in the pool or in one run, never both.

    They are at most twice the bytes that a minibatch took lately (`least` at any rate); types that were not used for
    the longest time go first, so that shapes that don't come again leave nothing behind.
    """

    def __init__(self, *, least: int = _LEAST) -> None:
        self.least = least
        # By the type's identity, as types are interned: hashing one takes longer than all the rest of taking. Least
        # recently used first.
        self._free: OrderedDict[int, tuple[TensorType, list[torch.Tensor]]] = OrderedDict()
        self._bytes = 0  # of all in `_free`
        self._taken = 0  # bytes taken since the last minibatch began
        self._usual = 0  # the most that a minibatch took, less a quarter a minibatch
        self._lock = threading.Lock()
        # What came back and is not sorted in yet: a collection of garbage may end a run while this thread has the lock.
        self._given: deque[tuple[TensorType, torch.Tensor]] = deque()
        self.allocated = 0  # fresh allocations so far
        self.reused = 0

    def begin(self) -> None:
        """A minibatch begins."""
        with self._lock:
            self._usual = max(self._taken, self._usual - self._usual // 4)
            self._taken = 0

    def take(self, kind: TensorType, rows: int) -> torch.Tensor:
        """A tensor [at least rows, *shape] with undefined contents."""
        with self._lock:
            self._sort_in()
            free = self._free_of(kind)
            for i in range(len(free) - 1, -1, -1):  # the last one given is warm in the cache
                if rows <= free[i].size(0) <= 8 * rows + 64:
                    self.reused += 1
                    found = free.pop(i)
                    self._bytes -= found.nbytes
                    self._taken += found.nbytes
                    return found
            self.allocated += 1
            capacity = max(rows + rows // 4, 1)
            self._taken += capacity * kind.numel * kind.dtype.itemsize
        with torch.inference_mode(False):
            return torch.empty((capacity, *kind.shape), dtype=kind.dtype, device=kind.device)

    def give(self, kind: TensorType, tensor: torch.Tensor) -> None:
        """Take a buffer back; the caller must not use it any more. Never waits."""
        self._given.append((kind, tensor))
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        """Put what came back where it is taken from; the caller has the lock."""
        while self._given:
            kind, tensor = self._given.popleft()
            free = self._free_of(kind)
            free.append(tensor)
            self._bytes += tensor.nbytes
            if len(free) > _KEPT:
                self._bytes -= free.pop(0).nbytes
        most = max(self.least, 2 * max(self._usual, self._taken))
        while self._free and (self._bytes > most or len(self._free) > _TYPES):
            key, (_, oldest) = next(iter(self._free.items()))
            if oldest:
                self._bytes -= oldest.pop(0).nbytes
            if not oldest:
                del self._free[key]

    def _free_of(self, kind: TensorType) -> list[torch.Tensor]:
        found = self._free.get(id(kind))
        if found is None:
            found = self._free[id(kind)] = (kind, [])
        else:
            self._free.move_to_end(id(kind))
        return found[1]

    def clear(self) -> None:
        """Forget all free buffers."""
        with self._lock:
            self._given.clear()
            self._free.clear()
            self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes held in free buffers."""
        with self._lock:
            self._sort_in()
            return self._bytes


class Buffer:
    """Growing rows of one tensor type. `tensor` is [capacity, *shape]; growing copies what is used."""

    __slots__ = ("_lent", "_tensor", "kind", "pool", "used")

    def __init__(self, pool: BufferPool, kind: TensorType) -> None:
        self.pool = pool
        self.kind = kind
        self._tensor: torch.Tensor | None = None
        self._lent: Callable[[], torch.Tensor] | None = None  # memory of somebody else, while it is there
        self.used = 0

    @property
    def tensor(self) -> torch.Tensor | None:
        """The memory, None before `reserve`."""
        if self._tensor is None and self._lent is not None:
            self._tensor = self._lent()
        return self._tensor

    def lend(self, view: Callable[[], torch.Tensor], rows: int) -> None:
        """Be on memory of somebody else, which `view` gives, with these rows."""
        self._lent, self.used = view, rows

    def reserve(self, rows: int) -> torch.Tensor:
        """The tensor, with room for `rows` in all; `used` becomes `rows`."""
        old = self.tensor
        if old is None:
            old = self._tensor = self.pool.take(self.kind, rows)
        elif old.size(0) < rows:
            self._tensor = self.pool.take(self.kind, max(rows, 2 * old.shape[0]))
            self._tensor[: self.used].copy_(old[: self.used])
            if self._lent is None:
                self.pool.give(self.kind, old)
            self._lent, old = None, self._tensor
        self.used = rows
        return old

    def release(self) -> None:
        """Give the memory back to the pool."""
        if self._tensor is not None and self._lent is None:
            self.pool.give(self.kind, self._tensor)
        self._tensor, self._lent, self.used = None, None, 0
