"""Free memory: pieces that runs take and give back, and dense gradients of parameters that the user has let go of.

    pool = Pool()
    piece = pool.take(device, lines)             # piece.tensor: float32 [at least lines, 16]
    pool.give(piece)
    GradientMemory().take((1000, 300), torch.float32)

Compiled by Cython (see uncompiled.py): each run asks for memory a few times.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import torch

from fxbatch.caches import Cache
from fxbatch.codegen.native import address
from fxbatch.passes.room import LINE
from fxbatch.torch_private import storage_uses

_FREE = 64  # free pieces that a pool keeps


class Piece(NamedTuple):
    """A piece of memory."""

    lines: int  # of 64 bytes
    device: torch.device
    tensor: torch.Tensor  # float32 [lines, 16]
    pointer: int  # where C finds it, 0 where it can't


class Pool:
    """Free pieces of memory by device. A piece is in the pool or in one run, never both.

    They are at most a quarter more than the bytes that a minibatch took lately (`least` at any rate); those that were
    given back first go first, so that sizes that don't come again leave nothing behind.
    """

    def __init__(self, *, least: int = 64 << 20) -> None:
        self.least = least
        self._free: list[Piece] = []  # in the order in which they came back
        self._bytes = 0  # of all in `_free`
        self._taken = 0  # bytes taken since the last minibatch began
        self._usual = 0  # the most that a minibatch took, less a quarter per minibatch
        self._lock = threading.Lock()
        # What came back and is not sorted in yet: a collection of garbage may end a run while this thread has the lock.
        self._given: deque[Piece] = deque()
        self.usual: Cache[Hashable, int] = Cache("rows of arrays")  # only a hint
        self.allocated = 0  # fresh allocations so far
        self.reused = 0

    def begin(self) -> None:
        """A minibatch begins."""
        with self._lock:
            self._usual = max(self._taken, self._usual - self._usual // 4)
            self._taken = 0

    def take(self, device: torch.device, lines: int) -> Piece:
        """A piece of at least so many lines, with undefined contents."""
        with self._lock:
            if self._given:
                self._sort_in()
            for most in (2 * lines + 64, 8 * lines + 64):
                for i in range(len(self._free) - 1, -1, -1):  # the last one given is warm in the cache
                    piece = self._free[i]
                    if lines <= piece.lines <= most and piece.device == device:
                        self.reused += 1
                        del self._free[i]
                        self._bytes -= piece.lines * LINE
                        self._taken += piece.lines * LINE
                        return piece
            self.allocated += 1
            capacity = max(lines + lines // 4, 1)
            self._taken += capacity * LINE
        with torch.inference_mode(False):
            memory = torch.empty((capacity, LINE // 4), dtype=torch.float32, device=device)
        return Piece(capacity, device, memory, address(memory, capacity * LINE) or 0)

    def give(self, piece: Piece) -> None:
        """Take a piece back; the caller must not use it any more. Never waits, and takes no lock, which an interrupt
        between two lines could leave locked: what came back is sorted in when memory is taken next."""
        self._given.append(piece)

    def _sort_in(self) -> None:
        """Put what came back where it is taken from; the caller has the lock."""
        while self._given:
            piece = self._given.popleft()
            self._free.append(piece)
            self._bytes += piece.lines * LINE
        most = max(self.least, max(self._usual, self._taken) * 5 // 4)
        while self._free and (self._bytes > most or len(self._free) > _FREE):
            self._bytes -= self._free.pop(0).lines * LINE

    def clear(self) -> None:
        """Forget all free pieces."""
        with self._lock:
            self._given.clear()
            self._free.clear()
            self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes held in free pieces."""
        with self._lock:
            self._sort_in()
            return self._bytes


def _holders(entry: tuple[torch.UntypedStorage, int]) -> int:
    """How many hold the object of a storage, which is one for all who ask for it: only the first of these is counted
    as a user of the memory."""
    return sys.getrefcount(entry[0])


_ALONE = _holders((torch.UntypedStorage(0), 0))


def _is_free(entry: tuple[torch.UntypedStorage, int]) -> bool:
    """Whether nobody else holds a storage, nor a tensor of it."""
    return _holders(entry) == _ALONE and storage_uses(entry[0]) == 1


class GradientMemory:
    """Memory of dense gradients of parameters, used again when the user has let go of it.

    A dense gradient of 18,281 words is 22 MB. From the system's allocator it comes in fresh pages as often as not,
    whose 5,300 faults take about 10 ms. A gradient that was handed out has a storage of its own; this holds that
    storage too, and gives it out again once nobody else holds it.

        >>> memory = GradientMemory()
        >>> place = memory.take((1000, 300), torch.float32).data_ptr()
        >>> memory.take((1000, 300), torch.float32).data_ptr() == place      # nobody held the first
        True
    """

    LEAST = 1 << 16  # bytes from which on memory is kept: smaller pieces are cheap anywhere
    KEPT = 4  # storages kept a shape and type

    def __init__(self) -> None:
        self._storages: Cache[Hashable, list[tuple[torch.UntypedStorage, int]]] = Cache("gradient memory")
        self._lock = threading.Lock()
        self.reused = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU with undefined contents, no view of another."""
        size = dtype.itemsize * math.prod(shape)
        if size < self.LEAST:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            storages = self._storages.get((shape, dtype))
            if storages is None:
                storages = self._storages.put((shape, dtype), [])
            for entry in reversed(storages):  # the last one is warm in the cache
                # Resized, or moved into shared memory, it is the user's alone.
                if _is_free(entry) and entry[0].data_ptr() == entry[1] and entry[0].nbytes() == size:
                    self.reused += 1
                    return torch.empty(0, dtype=dtype, device="cpu").set_(entry[0], 0, shape)  # type: ignore[call-overload]  # takes one
            memory = torch.empty(shape, dtype=dtype, device="cpu")
            storages.append((memory.untyped_storage(), memory.data_ptr()))
            if len(storages) > self.KEPT:
                storages.pop(0)
        return memory
