"""The memory of a run: arrays [rows, *shape] in few pieces of their device's memory, taken from a pool and given back.

An array is an arena (the values of one tensor type), or rows that an operation keeps or saves for its backward. A run
of one phase has all of them in one piece per device, laid out once a plan. A run of several phases begins with as many
rows as the last one came to have, and moves arrays that outgrow theirs to a new piece, with room for twice as many.

    arrays = Arrays.of(program.types, compiled)          # which arrays a set of operations needs
    memory = Memory(pool)
    memory.take(arrays, plan_whole(...))                 # one piece per device
    memory.tensor(3)                                     # array 3 as a tensor, made where Python asks
    memory.places                                        # pointers and bytes, for C
    memory.release()

Constants are stacked once a tensor type; they, and indices, come to their device in few copies, pinned, none that
waits: a copy reads pinned memory after the call has returned, and PyTorch's pinned allocator keeps it until then.
Indices are int64, as index_select and embedding_bag take them: int32 would halve one small copy a minibatch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fxbatch.codegen.native import address, extension
from fxbatch.ir import Plan, Program, Schedule, Signature, SignatureColumns, TensorSpec
from fxbatch.passes.plan import RunColumns, Slots, WholePlan
from fxbatch.passes.room import LINE, ArrayTable, place_arrays
from fxbatch.runtime.operands import arena_table, clear_rows, moved
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.pool import Piece, Pool
from fxbatch.trace.constants import IntegerColumn, RowColumn, holds_integer, read_integers


@dataclass(frozen=True, eq=False)
class Kinds:
    """The types of arrays, and the same as columns."""

    types: tuple[TensorSpec, ...]
    width: np.ndarray  # int64: bytes a row
    device: np.ndarray  # int64: the number of its device
    devices: tuple[torch.device, ...]

    @staticmethod
    def of(types: Sequence[TensorSpec]) -> Kinds:
        devices = list(dict.fromkeys([t.device for t in types]))
        width = np.array([t.nbytes for t in types], dtype=np.int64)
        numbers = np.zeros(len(types), dtype=np.int64)
        if len(devices) > 1:
            numbers[:] = [devices.index(t.device) for t in types]
        return Kinds(tuple(types), width, numbers, tuple(devices))

    def place(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One array after another, each device's in a piece of its own: see `place_arrays`."""
        return place_arrays(self.width, self.device, len(self.devices), rows)


@dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays that a set of operations needs: arenas by type, then what each operation keeps and saves."""

    kinds: Kinds
    arenas: int  # how many of them are arenas
    compiled: tuple[CompiledOperation | None, ...]
    first: tuple[int, ...]  # of each signature: its first array
    table: ArrayTable

    @staticmethod
    def of(types: Sequence[TensorSpec], compiled: Sequence[CompiledOperation | None]) -> Arrays:
        """The arrays of a program's types and compiled operations."""
        kinds, owners, first, groups = list(types), [], [], [-1] * len(types)
        for s, operation in enumerate(compiled):
            first.append(len(kinds))
            if operation is None:
                continue
            kinds += kinds_of_rows(operation)
            owners += [(s, members) for members in operation.kept_members]
            owners += [(s, 1)] * len(operation.saved_types)
            groups += [*operation.kept_groups, *[-1] * len(operation.saved_types)]
        of_arrays = np.array([*[(-1, 0)] * len(types), *owners], dtype=np.int64).reshape(-1, 2)
        owner, members = np.ascontiguousarray(of_arrays.T)
        columns, group = Kinds.of(kinds), np.array(groups, dtype=np.int64)
        devices = len(columns.devices)
        table = ArrayTable(owner, members, group, columns.width, columns.device, devices, len(first))
        return Arrays(columns, len(types), tuple(compiled), tuple(first), table)

    @functools.cached_property
    def first_of(self) -> dict[CompiledOperation, int]:
        """The first array of each operation."""
        return {c: i for c, i in zip(self.compiled, self.first, strict=True) if c is not None}

    @functools.cached_property
    def place_of(self) -> dict[CompiledOperation, int]:
        """Which signature's each operation is."""
        return {c: s for s, c in enumerate(self.compiled) if c is not None}


def kinds_of_rows(compiled: CompiledOperation) -> list[TensorSpec]:
    """The types of the arrays that an operation keeps and saves."""
    if compiled.graphs is None:
        return []
    return [*(compiled.graphs.group_type(g) for g in compiled.kept_groups), *compiled.saved_types]


class Pieces:
    """Arrays by number, in pieces of memory."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kinds: Sequence[TensorSpec] = ()  # of each array
        self.rows = self._piece = _NOTHING  # int64: that each has room for; which piece it is in
        self._inside = _NO_PLACES  # int64 [arrays, 3]: where in its piece, see `place_arrays`
        # int64 [arrays, 3]: pointer (0 where C can't read it), bytes, whether part of an arena
        self.places = _NO_PLACES
        self._pieces: list[Piece] = []
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # pieces by type
        self._tensors: dict[int, torch.Tensor] = {}

    def lay(self, kinds: Kinds, rows: np.ndarray, inside: np.ndarray, ends: np.ndarray) -> None:
        """Take memory for these arrays, laid out by `place_arrays`."""
        self.kinds, self.rows, self._piece, self._inside = kinds.types, rows, kinds.device, inside
        self.places = self._take(kinds, inside, ends)

    def _take(self, kinds: Kinds, inside: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """New pieces: where arrays lie in them, for C."""
        pieces = [self.pool.take(device, ends.item(i) // LINE) for i, device in enumerate(kinds.devices)]
        self._pieces += pieces
        return moved(inside, kinds.device, [piece.pointer for piece in pieces])

    def tensor(self, array: int) -> torch.Tensor:
        """An array as [rows, *shape]."""
        tensor = self._tensors.get(array)
        if tensor is None:
            tensor = self._tensors[array] = self._make_tensor(array)
        return tensor

    def _make_tensor(self, array: int) -> torch.Tensor:
        kind, rows = self.kinds[array], self.rows.item(array)
        if not rows or not kind.numel:
            return torch.empty((rows, *kind.shape), dtype=kind.dtype, device=kind.device)
        piece, offset = self._piece.item(array), self._inside.item(array, 0)
        key = piece, kind.dtype
        typed = self._typed.get(key)
        if typed is None:
            whole = self._pieces[piece].tensor
            typed = self._typed[key] = whole if kind.dtype == torch.float32 else whole.view(kind.dtype)
        return typed.as_strided((rows, *kind.shape), kind.strides, offset // kind.dtype.itemsize)

    def release(self) -> None:
        """Give the memory back; no array can be read any more."""
        pieces, self._pieces = self._pieces, []
        self._typed, self._tensors = {}, {}
        self.places = _NO_PLACES
        for piece in pieces:
            self.pool.give(piece)


_NUMPY = {  # what numpy has the same numbers of
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip
_NOTHING = np.zeros(0, dtype=np.int64)
_NO_PLACES = np.zeros((0, 3), dtype=np.int64)


class Memory(Pieces):
    """All tensors that the steps of a run read and write: shared operands, arenas, and rows kept for backward."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.shared: dict[Signature, list[torch.Tensor]] = {}  # the shared operands of each signature
        self.type_ids: dict[TensorSpec, int] = {}
        self.first_of: dict[CompiledOperation, int] = {}  # the first array of each operation
        self._types: dict[SignatureColumns, np.ndarray] = {}
        self._arena: Sequence[int] = ()  # the array of each type
        self._host: dict[int, np.ndarray | None] = {}  # arenas as numpy sees them
        # Of the only phase its arrays and calls of each signature; what follows is there where there are several.
        self._only: tuple[Arrays, np.ndarray] | None = None
        self._phases: RunColumns | None = None
        self._operation: dict[CompiledOperation, int] = {}  # the number of each
        self._keys: list[Hashable] = []  # what the next run knows arrays by
        self.filled: dict[object, Any] = {}  # pointers for C, by their table
        self.moves = 0  # how often arrays came to lie elsewhere
        self._columns: dict[Arrays, tuple[int, tuple[np.ndarray, np.ndarray]]] = {}  # after how many moves
        # Of arrays in this memory; and of each signature's operation, -1 for none.
        self._numbers: dict[Arrays, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def phases(self) -> RunColumns:
        """The columns of values, arrays and operations that grow from phase to phase, in runs of several phases."""
        if self._phases is None:
            self._phases = RunColumns()
        return self._phases

    # -- types --------------------------------------------------------------------------------------

    def types_of(self, program: Program) -> np.ndarray:
        """int64 [program.types]: the number of each type in this run."""
        type_ids = self._types.get(program.columns)
        if type_ids is None:
            columns = program.columns
            if self.type_ids:
                ids = [self.type_ids.setdefault(t, len(self.type_ids)) for t in columns.types]
                type_ids = np.array(ids, dtype=np.int64)
            else:
                self.type_ids, type_ids = dict(columns.type_ids), columns.numbers
            self._types[columns] = type_ids
        return type_ids

    def arena(self, type_id: int) -> torch.Tensor:
        """The values of a type."""
        return self.tensor(self._arena[type_id])

    def host_arena(self, type_id: int) -> np.ndarray | None:
        """The values of a type as a numpy array over the same memory; None if numpy has no such type or device."""
        array = self._arena[type_id]
        if array not in self._host:
            arena = self.tensor(array)
            plain = arena.device.type == "cpu" and arena.dtype in _NUMPY
            self._host[array] = arena.numpy() if plain else None
        return self._host[array]

    def copied(self, type_id: int, first: int, rows: int) -> torch.Tensor:
        """A copy of values of a type that lie together, without a kernel of ATen where C can read them."""
        array = self._arena[type_id]
        kind, pointer, room = self.kinds[array], self.places.item(array, 0), self.places.item(array, 1)
        start, size = first * kind.nbytes, rows * kind.nbytes
        if pointer and size and 0 <= start <= room - size:
            rows_of_copy = torch.empty((rows, *kind.shape), dtype=kind.dtype, device=kind.device)
            place = address(rows_of_copy, size)
            if place is not None:
                ctypes.memmove(place, pointer + start, size)
                return rows_of_copy
        return self.tensor(array).narrow(0, first, rows).clone()

    def arena_of(self, kind: TensorSpec) -> torch.Tensor:
        return self.arena(self.type_ids[kind])

    def row_place(self, kind: TensorSpec, row: int) -> int:
        """Where a value of a type is in memory that C can write to, 0 where it can't."""
        pointer: int = self.places.item(self._arena[self.type_ids[kind]], 0)
        return pointer + row * kind.nbytes if pointer else 0

    # -- room ---------------------------------------------------------------------------------------

    def take(self, arrays: Arrays, plan: WholePlan) -> None:
        """Room for a run's only phase."""
        assert not len(self.rows) and len(self.type_ids) == arrays.arenas, "the only phase of its run"
        self.lay(arrays.kinds, plan.rows, plan.places, plan.ends)
        self._arena, self.first_of, self._only = range(arrays.arenas), arrays.first_of, (arrays, plan.calls)

    def calls_of(self, operations: Sequence[CompiledOperation]) -> list[int]:
        """Calls of each operation over all steps so far: how many rows it has kept."""
        if self._only is None:
            return [self.phases.calls_of(self._operation[op]) for op in operations]
        arrays, calls = self._only
        return [calls.item(arrays.place_of[op]) for op in operations]

    def calls(self, compiled: CompiledOperation) -> int:
        """Calls of one operation over all steps so far."""
        return self.calls_of((compiled,))[0]

    @property
    def sets(self) -> tuple[SignatureColumns, ...]:
        """The sets of signatures that were met, in the order that gave types their numbers."""
        return tuple(self._types)

    def plan(
        self, program: Program, schedule: Schedule, slots: Slots, arrays: Arrays, needs: np.ndarray
    ) -> Plan:
        """The plan of one more phase, with room for it: arrays that are too small move to a new piece, with twice the
        rows. needs: whether gradients go through each output of the signatures."""
        types = self.types_of(program)
        numbers, operations = self._numbers.get(arrays) or self._number(arrays)
        plan, small = self.phases.plan(
            program, schedule, slots, arrays.table, numbers, operations, types, needs
        )
        if small:
            usual = self.pool.usual
            rows = [max(n, 2 * self.rows.item(i) or usual.get(self._keys[i]) or 0) for i, n, _ in small]
            self._move([i for i, _, _ in small], rows, [used for _, _, used in small])
        return plan

    def _move(self, moving: Sequence[int], rows: Sequence[int], used: Sequence[int]) -> None:
        """Put arrays into a new piece, with this many rows, and what they hold with them."""
        before = [self.tensor(i)[:n] if n else None for i, n in zip(moving, used, strict=True)]
        kinds, pieces = Kinds.of([self.kinds[i] for i in moving]), len(self._pieces)
        room = np.array(rows, dtype=np.int64)
        inside, ends = kinds.place(room)
        self.places[moving] = self._take(kinds, inside, ends)
        self._inside[moving], self._piece[moving], self.rows[moving] = inside, pieces + kinds.device, room
        self.moves += 1
        for i, n, old in zip(moving, rows, before, strict=True):
            self.phases.give_room(i, n)
            self._tensors.pop(i, None)
            self._host.pop(i, None)
            if old is not None:
                self.tensor(i)[: len(old)].copy_(old)

    def _number(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of a set's arrays and operations in this memory; arrays that are new have no rows yet."""
        numbering, operations, kinds, arenas = [], [], list(self.kinds), list(self._arena)
        for kind in arrays.kinds.types[: arrays.arenas]:
            type_id = self.type_ids[kind]
            if type_id == len(arenas):
                arenas.append(len(kinds))
                kinds.append(kind)
                self._keys.append(id(kind))
            numbering.append(arenas[type_id])
        for compiled in arrays.compiled:
            if compiled is None:
                operations.append(-1)
                continue
            kinds_of_operation = kinds_of_rows(compiled)
            if compiled not in self._operation:
                self.first_of[compiled], self._operation[compiled] = len(kinds), len(self._operation)
                kinds += kinds_of_operation
                self._keys += [(id(compiled), i) for i in range(len(kinds_of_operation))]
            numbering += range(self.first_of[compiled], self.first_of[compiled] + len(kinds_of_operation))
            operations.append(self._operation[compiled])
        self.kinds, self._arena = kinds, arenas
        self.phases.add(len(kinds), len(self._operation))
        none = np.zeros((len(kinds) - len(self.rows), 3), dtype=np.int64)
        self.rows, self._piece = (np.concatenate((x, none[:, 0])) for x in (self.rows, self._piece))
        self._inside, self.places = (np.concatenate((x, none)) for x in (self._inside, self.places))
        numbers = np.array(numbering, dtype=np.int64), np.array(operations, dtype=np.int64)
        self._numbers[arrays] = numbers
        return numbers

    def columns(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """For C: int64 [arenas, 3], pointer, bytes and bytes a row, nothing of what it can't read; and int64
        [arrays, 3], pointer, bytes and whether an array is part of an arena."""
        width = arrays.kinds.width
        if not self._numbers:
            return arena_table(self.places, width, arrays.arenas), self.places
        columns = self._columns.get(arrays)
        if columns is None or columns[0] != self.moves:
            places = self.places[self._numbers[arrays][0]]
            columns = self._columns[arrays] = self.moves, (arena_table(places, width, arrays.arenas), places)
        return columns[1]

    # -- what operations keep -----------------------------------------------------------------------

    def keeps(self) -> bool:
        """Whether any operation keeps rows for its backward."""
        return len(self.rows) > len(self._arena)

    def kept_rows(self, compiled: CompiledOperation, position: int) -> torch.Tensor:
        """The rows of a kept group, those of its members one after another."""
        return self.tensor(self.first_of[compiled] + position)

    def in_place(self, compiled: CompiledOperation, position: int) -> bool:
        """Whether a kept group is read where it is in its arena."""
        return bool(self.places[self.first_of[compiled] + position, 2])

    def saved(self, compiled: CompiledOperation, index: int) -> torch.Tensor:
        """The rows of a saved tensor."""
        return self.tensor(self.first_of[compiled] + len(compiled.kept_groups) + index)

    def release(self) -> None:
        super().release()
        self._host = {}
        if self._keys:
            for i, array in enumerate(self._keys):  # as many rows are taken at once in the next run
                self.pool.usual.put(array, self.phases.rows_used(i))
            self._numbers, self._columns, self.filled = {}, {}, {}


class GradientRows(Pieces):
    """The memory of one backward pass: arenas of gradients, whose first row is zero, and the rows that steps make for
    the gradients of parameters.

    kinds: of both, the arenas first; rows: that each has, where an arena of the zero row alone has no memory; first_of:
    the first array of each operation that makes such rows.
    """

    def __init__(
        self,
        pool: Pool,
        kinds: Kinds,
        arenas: int,
        rows: np.ndarray,
        first_of: Mapping[CompiledOperation, int],
    ) -> None:
        super().__init__(pool)
        self.first_of = first_of
        self.lay(kinds, rows, *kinds.place(rows))
        self.table = self._clear(kinds, arenas)

    def _clear(self, kinds: Kinds, arenas: int) -> np.ndarray:
        """Zero the first row of each arena. int64 [arenas, 3]: see `arena_table`."""
        table = arena_table(self.places, kinds.width, arenas)
        for i in clear_rows(table):
            if self.rows[i]:
                self.tensor(i)[0].zero_()
        return table

    def write(self, i: int, start: int, grad: torch.Tensor) -> None:
        """Put gradients into the rows of arena i from `start` on."""
        pointer, _, row = self.table[i].tolist()
        whole = pointer and grad.layout is torch.strided and grad.is_contiguous()
        begin = address(grad, len(grad) * row) if whole and grad.dtype is self.kinds[i].dtype else None
        if begin:
            ctypes.memmove(pointer + start * row, begin, len(grad) * row)
        else:
            self.tensor(i)[start : start + len(grad)].copy_(grad)

    def extra(self, compiled: CompiledOperation) -> list[torch.Tensor]:
        """The rows that an operation's steps make for the gradients of parameters; none where it was not asked for."""
        first = self.first_of.get(compiled)
        return [] if first is None else [self.tensor(first + i) for i in range(len(compiled.extra_types))]


# -- constants, the tensors and Python numbers that instances bring along


def fill_constants(
    rows: Callable[[], torch.Tensor],
    place: int,
    signature: Signature,
    payload: Sequence[Any],
    first: int,
    n: int,
    order: np.ndarray | None,
) -> None:
    """Write payloads `first : first + n` into their rows [n, *shape], one copy to their device.

    rows: gives them as a tensor; place: where they are in memory, 0 where C must not write there. order: where the
    payload of each row is, None for as recorded.
    """
    where = slice(first, first + n) if order is None else order[first : first + n]
    if isinstance(payload, RowColumn):
        payload.put(where, rows())
        return
    numbers = _host_column(signature, payload, where)
    if numbers is not None and place and numbers.flags.c_contiguous:
        extension.put(place, numbers)
        return
    out = rows()
    items = payload[where] if isinstance(where, slice) else [payload[i] for i in where.tolist()]
    if numbers is not None:
        out.copy_(torch.from_numpy(numbers).reshape(out.shape))
    elif signature.operation.kind == "number":
        out.copy_(move(torch.tensor(items, dtype=out.dtype, device="cpu"), out.device))
    elif len(items) == 1:
        out[0].copy_(items[0])
    elif out.device.type == "cuda":
        stack_distinct(items, out)
    else:
        torch.stack(list(items), out=out)


def _host_column(
    signature: Signature, payload: Sequence[object], where: slice | np.ndarray
) -> np.ndarray | None:
    """Tensors on the CPU without dimensions, or of one integer, as an array of their type, which takes half the time of
    stacking them; None for all others."""
    kind = signature.outputs[0]
    if (kind.shape and not holds_integer(kind)) or kind.device.type != "cpu":
        return None
    if signature.operation.kind == "number":
        return None
    dtype = _NUMPY.get(kind.dtype)
    if dtype is None:
        return None
    if type(payload) is IntegerColumn:
        return payload.numbers[where].astype(dtype, copy=False)
    items = list(payload[where] if isinstance(where, slice) else [payload[i] for i in where.tolist()])
    integers = read_integers(items, kind.dtype)
    return host_numbers(items, dtype) if integers is None else integers.astype(dtype, copy=False)


def stack_distinct(items: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Stack tensors that are on the device: each object once, then one index, where many come again (words).

    A launch stacks 128 tensors there: 130,000 words of 1,000 kinds would be 1,000 launches.
    """
    places: dict[int, int] = {}
    index = [places.setdefault(id(x), len(places)) for x in items]
    if 2 * len(places) > len(items):
        torch.stack(list(items), out=out)
        return
    objects = {id(x): x for x in items}
    table = torch.stack([objects[i] for i in places])
    torch.index_select(table, 0, to_device(np.array(index, dtype=np.int64), out.device), out=out)


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep what is freed for what is taken next: twice as much as the largest mapped block that was freed so
    far, of at most 32 MB (mallopt(3), M_MMAP_THRESHOLD). Pages that come fresh from the system take longer than what is
    computed in them."""
    bytes(31 << 20)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device: shared memory on the CPU, one pinned, non-blocking copy elsewhere."""
    return move(torch.from_numpy(array), device)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, without waiting for the copy of one on the CPU."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def host_numbers(tensors: Sequence[torch.Tensor], kind: type[np.generic]) -> np.ndarray:
    """The numbers of CPU tensors without dimensions, as an array; they wait for no device."""
    return np.array(list(map(torch.Tensor.item, tensors)), dtype=kind)
