"""Memory of one backward pass: arenas of gradients, and the rows that steps make for the gradients of parameters.

All of it is one piece of a device's memory, taken from the pool and given back as one.

    rows = GradientRows(pool, kinds, capacity, {operation: 19})
    rows.arena(2)                      # [capacity[2], *shape]; its first row is zero
    rows.extra(operation)              # a tensor [19, *shape] each of its extra types
    rows.table, rows.places(operation) # the same as pointers, for C
    rows.release()
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch

from fxbatch.codegen.native import Place, address, extension
from fxbatch.ir import TensorType, tensor_type
from fxbatch.runtime.buffers import BufferPool
from fxbatch.runtime.compiled import CompiledOperation

_LINE = 64  # bytes that pieces begin at a multiple of


class GradientRows:
    """`capacity`: rows of each arena, the zero row among them; arenas of that row alone have no memory."""

    def __init__(
        self,
        pool: BufferPool,
        kinds: Sequence[TensorType],
        capacity: Sequence[int],
        extra: Mapping[CompiledOperation, int],
    ) -> None:
        self._pool = pool
        self._kinds, self._capacity, self._rows = kinds, capacity, extra
        self._size: dict[torch.device, int] = {}
        self._arenas = [
            None if rows <= 1 else self._room(kind, rows) for kind, rows in zip(kinds, capacity, strict=True)
        ]
        self._extra = {op: [self._room(kind, rows) for kind in op.extra_types] for op, rows in extra.items()}
        self._lines = {device: tensor_type((_LINE,), torch.uint8, device) for device in self._size}
        self._pieces = {
            device: pool.take(self._lines[device], size // _LINE) for device, size in self._size.items()
        }
        cpu = self._pieces.get(_CPU)
        self._pointer = 0 if cpu is None or extension is None else address(cpu, self._size[_CPU]) or 0
        self._tensors: dict[int, torch.Tensor] = {}
        self.table = self._clear()

    def _room(self, kind: TensorType, rows: int) -> Place:
        """The place of so many rows, behind what the device has so far."""
        size, start = kind.numel * kind.dtype.itemsize * rows, self._size.get(kind.device, 0)
        self._size[kind.device] = start + (size + _LINE - 1) // _LINE * _LINE
        return start, size

    def _clear(self) -> array[int]:
        """Zero the first row of each arena. int64 [arenas, 3]: pointer, bytes and bytes a row, nothing of what C can't
        read."""
        table = array("q")
        for i, place in enumerate(self._arenas):
            found = (0, 0, 0)
            if place is not None and place[1]:
                if self._pointer and self._kinds[i].device == _CPU:
                    found = self._pointer + place[0], place[1], place[1] // self._capacity[i]
                    extension.clear(found[0], found[2])
                else:
                    self.arena(i)[0].zero_()
            table.extend(found)
        return table

    def _tensor(self, kind: TensorType, rows: int, place: Place) -> torch.Tensor:
        piece = self._pieces[kind.device].view(-1)[place[0] : place[0] + place[1]]
        return piece.view(kind.dtype).view(rows, *kind.shape)

    def arena(self, i: int) -> torch.Tensor:
        """The gradients of values of type i."""
        found, place = self._tensors.get(i), self._arenas[i]
        if found is None:
            found = _NOTHING if place is None else self._tensor(self._kinds[i], self._capacity[i], place)
            self._tensors[i] = found
        return found

    def write(self, i: int, start: int, grad: torch.Tensor) -> None:
        """Put gradients into the rows of arena i from `start` on."""
        pointer, _, row = self.table[3 * i : 3 * i + 3]
        whole = pointer and grad.layout is torch.strided and grad.is_contiguous()
        begin = address(grad, len(grad) * row) if whole and grad.dtype is self._kinds[i].dtype else None
        if begin:
            extension.copy(pointer + start * row, begin, len(grad) * row)
        else:
            self.arena(i)[start : start + len(grad)].copy_(grad)

    def extra(self, compiled: CompiledOperation) -> list[torch.Tensor]:
        """The rows that an operation's steps make for the gradients of parameters; none where it was not asked for."""
        return [
            self._tensor(kind, self._rows[compiled], place)
            for kind, place in zip(compiled.extra_types, self._extra.get(compiled, ()), strict=False)
        ]

    def places(self, compiled: CompiledOperation) -> list[Place]:
        """Pointers and bytes of those rows, nothing of what C can't read."""
        begin = self._pointer
        return [(begin + start, size) if begin else (0, 0) for start, size in self._extra.get(compiled, ())]

    def release(self) -> None:
        """Give the memory back."""
        for device, piece in self._pieces.items():
            self._pool.give(self._lines[device], piece)
        self._pieces, self._tensors = {}, {}


_NOTHING = torch.empty(0)
_CPU = torch.device("cpu")
