"""The memory of a run: arrays [rows, *shape] in few pieces of their device's memory, taken from a pool and given back.

An array is an arena (the values of one tensor type), or rows that an operation keeps or saves for its backward. A run
of one phase has all of them in one piece a device, laid out once a plan. A run of several phases begins with as many
rows as the last one came to have, and moves arrays that outgrow theirs to a new piece, with room for twice as many.

    arrays = Arrays.of(program.types, compiled)          # which arrays a set of operations needs
    layout = arrays.lay_out(plan)                        # where each begins, how many rows it has
    memory = Memory(pool)
    memory.take(arrays, layout)                          # one piece a device
    memory.tensor(3)                                     # array 3 as a tensor, made where Python asks
    memory.places                                        # pointers and bytes, for C
    memory.release()
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fxbatch.codegen.native import address
from fxbatch.ir import Plan, Program, Schedule, Signature, SignatureColumns, TensorType
from fxbatch.passes.plan import RunColumns, Slots, WholePlan
from fxbatch.passes.room import LINE, ArrayTable, place_arrays
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.torch_private import storage_uses

_FREE = 64  # free pieces that a pool keeps


class Pool:
    """Free pieces of memory by device, in lines of 64 bytes. A piece is in the pool or in one run, never both.

    They are at most a quarter more than the bytes that a minibatch took lately (`least` at any rate); those that were
    given back first go first, so that sizes that don't come again leave nothing behind.
    """

    def __init__(self, *, least: int = 64 << 20) -> None:
        self.least = least
        # Lines of each, where, and it, in the order in which they came back.
        self._free: list[tuple[int, torch.device, torch.Tensor]] = []
        self._bytes = 0  # of all in `_free`
        self._taken = 0  # bytes taken since the last minibatch began
        self._usual = 0  # the most that a minibatch took, less a quarter a minibatch
        self._lock = threading.Lock()
        # What came back and is not sorted in yet: a collection of garbage may end a run while this thread has the lock.
        self._given: deque[torch.Tensor] = deque()
        self.usual: dict[Hashable, int] = {}  # rows of arrays, only a hint
        self.allocated = 0  # fresh allocations so far
        self.reused = 0

    def begin(self) -> None:
        """A minibatch begins."""
        with self._lock:
            self._usual = max(self._taken, self._usual - self._usual // 4)
            self._taken = 0

    def take(self, device: torch.device, lines: int) -> torch.Tensor:
        """A tensor float32 [at least lines, 16] with undefined contents."""
        with self._lock:
            if self._given:
                self._sort_in()
            for most in (2 * lines + 64, 8 * lines + 64):
                for i in range(len(self._free) - 1, -1, -1):  # the last one given is warm in the cache
                    has, where, found = self._free[i]
                    if lines <= has <= most and where == device:
                        self.reused += 1
                        del self._free[i]
                        self._bytes -= has * LINE
                        self._taken += has * LINE
                        return found
            self.allocated += 1
            capacity = max(lines + lines // 4, 1)
            self._taken += capacity * LINE
        with torch.inference_mode(False):
            return torch.empty((capacity, LINE // 4), dtype=torch.float32, device=device)

    def note_usual(self, rows: Iterable[tuple[Hashable, int]]) -> None:
        """How many rows arrays came to have in a run of several phases: as many are taken at once in the next."""
        if len(self.usual) > 4096:
            self.usual.clear()
        self.usual.update(rows)

    def give(self, piece: torch.Tensor) -> None:
        """Take a piece back; the caller must not use it any more. Never waits, and takes no lock, which an interrupt
        between two lines could leave locked: what came back is sorted in when memory is taken next."""
        self._given.append(piece)

    def _sort_in(self) -> None:
        """Put what came back where it is taken from; the caller has the lock."""
        while self._given:
            piece = self._given.popleft()
            lines = piece.shape[0]
            self._free.append((lines, piece.device, piece))
            self._bytes += lines * LINE
        most = max(self.least, max(self._usual, self._taken) * 5 // 4)
        while self._free and (self._bytes > most or len(self._free) > _FREE):
            self._bytes -= self._free.pop(0)[0] * LINE

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


@dataclass(frozen=True, eq=False)
class Kinds:
    """The types of arrays, and the same as columns."""

    types: tuple[TensorType, ...]
    width: np.ndarray  # int64: bytes a row
    device: np.ndarray  # int64: the number of its device
    devices: tuple[torch.device, ...]

    @staticmethod
    def of(types: Sequence[TensorType]) -> Kinds:
        devices = list(dict.fromkeys([t.device for t in types]))
        width = np.array([t.nbytes for t in types], dtype=np.int64)
        numbers = np.zeros(len(types), dtype=np.int64)
        if len(devices) > 1:
            numbers[:] = [devices.index(t.device) for t in types]
        return Kinds(tuple(types), width, numbers, tuple(devices))


class ArrayLayout(NamedTuple):
    """Where arrays lie: of each the piece, and in it the offset, the bytes, and whether it is part of an arena."""

    lines: tuple[tuple[torch.device, int], ...]  # of each piece
    piece: tuple[int, ...]
    places: np.ndarray  # int64 [arrays, 3]
    offsets: tuple[int, ...]  # those of the places
    rows: tuple[int, ...]
    counts: tuple[int, ...] = ()  # calls of each signature

    @staticmethod
    def of(
        kinds: Kinds, rows: np.ndarray, places: np.ndarray, ends: np.ndarray, calls: np.ndarray | None = None
    ) -> ArrayLayout:
        """The layout of arrays of these types and places; ends: where each device's piece does."""
        return ArrayLayout(
            tuple(zip(kinds.devices, (ends // LINE).tolist(), strict=True)), tuple(kinds.device.tolist()), places,
            tuple(places[:, 0].tolist()), tuple(rows.tolist()), () if calls is None else tuple(calls.tolist()),
        )  # fmt: skip


def lay_out(kinds: Kinds, rows: np.ndarray) -> ArrayLayout:
    """One array after another, each device's in a piece of its own."""
    return ArrayLayout.of(kinds, rows, *place_arrays(kinds.width, kinds.device, len(kinds.devices), rows))


@dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays that a set of operations needs: arenas by type, then what each operation keeps and saves."""

    columns: Kinds
    arenas: int  # how many of them are arenas
    compiled: tuple[CompiledOperation | None, ...]
    first: tuple[int, ...]  # of each signature: its first array
    table: ArrayTable

    @property
    def kinds(self) -> tuple[TensorType, ...]:
        """The types of all arrays."""
        return self.columns.types

    @functools.cached_property
    def arena_widths(self) -> tuple[np.ndarray, bool]:
        """int64 [arenas]: bytes a row; and whether C can read all of them."""
        kinds = self.kinds[: self.arenas]
        widths = self.columns.width[: self.arenas]
        return widths, bool(widths.all()) and all(k.device.type == "cpu" for k in kinds)

    @staticmethod
    def of(types: Sequence[TensorType], compiled: Sequence[CompiledOperation | None]) -> Arrays:
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

    def lay_out(self, found: WholePlan) -> ArrayLayout:
        """Arenas as large as the plan has them, rows for all calls; rows that lie together in an arena stay there."""
        return ArrayLayout.of(self.columns, found.rows, found.places, found.ends, found.calls)


def kinds_of_rows(compiled: CompiledOperation) -> list[TensorType]:
    """The types of the arrays that an operation keeps and saves."""
    if compiled.graphs is None:
        return []
    return [*(compiled.graphs.group_type(g) for g in compiled.kept_groups), *compiled.saved_types]


@functools.lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of contiguous rows of this shape."""
    found = torch.empty((2, *shape), device="meta").stride()
    return tuple(found)


class Pieces:
    """Arrays by number, in pieces of memory."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kinds: list[TensorType] = []  # of each array
        self.rows: list[int] = []  # that each has room for
        # int64 [arrays, 3]: pointer (0 where C can't read it), bytes, whether part of an arena
        self.places = _NO_PLACES
        self._pieces: list[torch.Tensor] = []
        self._piece: list[int] = []  # of each array: its piece, and the offset in it
        self._offset: list[int] = []
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # pieces by type
        self._tensors: dict[int, torch.Tensor] = {}

    def add(self, kinds: Sequence[TensorType], layout: ArrayLayout) -> None:
        """Further arrays, in new pieces."""
        before = len(self._pieces)
        places = self._lay(layout)
        self.places = places if not self.kinds else np.concatenate((self.places, places))
        self.kinds += kinds
        self.rows += layout.rows
        self._piece += layout.piece if not before else [before + p for p in layout.piece]
        self._offset += layout.offsets

    def _lay(self, layout: ArrayLayout) -> np.ndarray:
        """New pieces: where arrays lie in them, for C."""
        begins = []
        for device, lines in layout.lines:
            piece = self.pool.take(device, lines)
            self._pieces.append(piece)
            begins.append(address(piece, lines * LINE) or 0)
        places = layout.places.copy()
        if len(begins) == 1 and begins[0]:
            begun = places[:, 0]
            begun += begins[0]
        elif begins:
            begin = np.array(begins, dtype=np.int64)[list(layout.piece)]
            places[:, 0] = np.where(begin > 0, places[:, 0] + begin, 0)
        return places

    def tensor(self, array: int) -> torch.Tensor:
        """An array as [rows, *shape]."""
        found = self._tensors.get(array)
        if found is None:
            found = self._tensors[array] = self._make_tensor(array)
        return found

    def _make_tensor(self, array: int) -> torch.Tensor:
        kind, rows = self.kinds[array], self.rows[array]
        if not rows or not kind.numel:
            return torch.empty((rows, *kind.shape), dtype=kind.dtype, device=kind.device)
        piece, offset = self._piece[array], self._offset[array]
        key = piece, kind.dtype
        typed = self._typed.get(key)
        if typed is None:
            whole = self._pieces[piece]
            typed = self._typed[key] = whole if kind.dtype == torch.float32 else whole.view(kind.dtype)
        return typed.as_strided((rows, *kind.shape), strides(kind.shape), offset // kind.dtype.itemsize)

    def release(self) -> None:
        """Give the memory back; no array can be read any more."""
        pieces, self._pieces = self._pieces, []
        self._typed, self._tensors = {}, {}
        self.places = _NO_PLACES
        for piece in pieces:
            self.pool.give(piece)


_NUMPY = frozenset(
    {torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)  # what `tolist` gives the same numbers of
_NO_PLACES = np.zeros((0, 3), dtype=np.int64)


class Memory(Pieces):
    """All tensors that the steps of a run read and write: shared operands, arenas, and rows kept for backward."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.shared: dict[Signature, list[torch.Tensor]] = {}  # the shared operands of each signature
        self.type_ids: dict[TensorType, int] = {}
        self._phases: RunColumns | None = None
        self._calls: dict[CompiledOperation | None, int] = {}  # where there is one
        self._operation: dict[CompiledOperation, int] = {}  # the number of each, where there are several
        self._arena: list[int] = []  # the array of each type
        self._first: dict[CompiledOperation, int] = {}  # the first array of each
        self._host: dict[int, np.ndarray | None] = {}  # arenas as numpy sees them
        self._keys: list[Hashable] = []  # what the next run knows arrays by, where there are several phases
        self.filled: dict[Any, Any] = {}  # pointers for C, by their table
        self.moves = 0  # how often arrays came to lie elsewhere
        self._columns: dict[Arrays, tuple[int, tuple[np.ndarray, np.ndarray]]] = {}  # after how many moves
        # Of arrays in this memory; and of each signature's operation, -1 for none.
        self._numbers: dict[Arrays, tuple[np.ndarray, np.ndarray]] = {}
        self._types: dict[SignatureColumns, np.ndarray] = {}

    @property
    def phases(self) -> RunColumns:
        """What they leave of values, arrays and operations, where there are several."""
        if self._phases is None:
            self._phases = RunColumns()
        return self._phases

    # -- types --------------------------------------------------------------------------------------

    def types_of(self, program: Program) -> np.ndarray:
        """int64 [program.types]: the number of each type in this run."""
        found = self._types.get(program.columns)
        if found is None:
            columns = program.columns
            if self.type_ids:
                ids = [self.type_ids.setdefault(t, len(self.type_ids)) for t in columns.types]
                found = np.array(ids, dtype=np.int64)
            else:
                self.type_ids, found = dict(columns.type_ids), columns.numbers
            self._types[columns] = found
        return found

    def arena(self, type_id: int) -> torch.Tensor:
        """The values of a type."""
        return self.tensor(self._arena[type_id])

    def host_arena(self, type_id: int) -> np.ndarray | None:
        """The same as numpy sees it, for few numbers; None where it can't."""
        array = self._arena[type_id]
        if array not in self._host:
            found = self.tensor(array)
            plain = found.device.type == "cpu" and found.dtype in _NUMPY
            self._host[array] = found.numpy() if plain else None
        return self._host[array]

    def copied(self, type_id: int, first: int, rows: int) -> torch.Tensor:
        """A copy of values of a type that lie together, without a kernel of ATen where C can read them."""
        array = self._arena[type_id]
        kind, pointer, room = self.kinds[array], self.places.item(array, 0), self.places.item(array, 1)
        start, size = first * kind.nbytes, rows * kind.nbytes
        if pointer and size and 0 <= start <= room - size:
            made = torch.empty((rows, *kind.shape), dtype=kind.dtype, device=kind.device)
            place = address(made, size)
            if place is not None:
                ctypes.memmove(place, pointer + start, size)
                return made
        return self.tensor(array).narrow(0, first, rows).clone()

    def arena_of(self, kind: TensorType) -> torch.Tensor:
        return self.arena(self.type_ids[kind])

    def row_place(self, kind: TensorType, row: int) -> int:
        """Where a value of a type is in memory that C can write to, 0 where it can't."""
        pointer: int = self.places.item(self._arena[self.type_ids[kind]], 0)
        return pointer + row * kind.nbytes if pointer else 0

    # -- room ---------------------------------------------------------------------------------------

    def take(self, arrays: Arrays, layout: ArrayLayout) -> None:
        """Room for a run's only phase."""
        assert not self.kinds and len(self.type_ids) == arrays.arenas, "the only phase of its run"
        self.add(arrays.kinds, layout)
        self._arena = list(range(arrays.arenas))
        self._first.update(arrays.first_of)
        self._calls.update(zip(arrays.compiled, layout.counts, strict=True))

    def calls(self, compiled: CompiledOperation) -> int:
        """Calls of an operation over all steps so far: how many rows it has kept."""
        number = self._operation.get(compiled)
        return self._calls[compiled] if number is None else int(self.phases.calls_of(number))

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
            rows = [max(n, 2 * self.rows[i] or usual.get(self._keys[i], 0)) for i, n, _ in small]
            self._move([i for i, _, _ in small], rows, [used for _, _, used in small])
        return plan

    def _move(self, moving: Sequence[int], rows: Sequence[int], used: Sequence[int]) -> None:
        """Put arrays into a new piece, with this many rows, and what they hold with them."""
        before = [self.tensor(i)[:n] if n else None for i, n in zip(moving, used, strict=True)]
        pieces = len(self._pieces)
        layout = lay_out(Kinds.of([self.kinds[i] for i in moving]), np.array(rows, dtype=np.int64))
        self.places[moving] = self._lay(layout)
        self.moves += 1
        where = zip(layout.piece, layout.offsets, strict=True)
        for i, (piece, offset), n, old in zip(moving, where, rows, before, strict=True):
            self.phases.give_room(i, n)
            self._piece[i], self._offset[i], self.rows[i] = pieces + piece, offset, n
            self._tensors.pop(i, None)
            self._host.pop(i, None)
            if old is not None:
                self.tensor(i)[: len(old)].copy_(old)

    def _number(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of a set's arrays and operations in this memory; arrays that are new have no rows yet."""
        found, operations = [], []
        for kind in arrays.kinds[: arrays.arenas]:
            type_id = self.type_ids[kind]
            if type_id == len(self._arena):
                self._arena.append(self._new(kind, id(kind)))
            found.append(self._arena[type_id])
        for compiled in arrays.compiled:
            if compiled is None:
                operations.append(-1)
                continue
            kinds = kinds_of_rows(compiled)
            if compiled not in self._first:
                self._first[compiled], self._operation[compiled] = len(self.kinds), len(self._operation)
                for own, kind in enumerate(kinds):
                    self._new(kind, (id(compiled), own))
            found += range(self._first[compiled], self._first[compiled] + len(kinds))
            operations.append(self._operation[compiled])
        self.phases.add(len(self.kinds), len(self._operation))
        self.places = np.concatenate(
            (self.places, np.zeros((len(self.kinds) - len(self.places), 3), dtype=np.int64))
        )
        numbers = np.array(found, dtype=np.int64), np.array(operations, dtype=np.int64)
        self._numbers[arrays] = numbers
        return numbers

    def _new(self, kind: TensorType, key: Hashable) -> int:
        self.kinds.append(kind)
        self._keys.append(key)
        self.rows.append(0)
        self._piece.append(-1)
        self._offset.append(0)
        return len(self.kinds) - 1

    def columns(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """For C: int64 [arenas, 3], pointer, bytes and bytes a row, nothing of what it can't read; and int64
        [arrays, 3], pointer, bytes and whether an array is part of an arena."""
        if not self._numbers:
            return self._columns_of(arrays, self.places)
        found = self._columns.get(arrays)
        if found is None or found[0] != self.moves:
            made = self._columns_of(arrays, self.places[self._numbers[arrays][0]])
            found = self._columns[arrays] = self.moves, made
        return found[1]

    def _columns_of(self, arrays: Arrays, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        arenas = places[: arrays.arenas].copy()
        widths, plain = arrays.arena_widths
        arenas[:, 2] = widths
        if not plain:
            arenas[(arenas[:, 0] == 0) | (widths == 0)] = 0
        return arenas, places

    # -- what operations keep -----------------------------------------------------------------------

    def keeps(self) -> bool:
        """Whether any operation keeps rows for its backward."""
        return len(self.kinds) > len(self._arena)

    def kept(self, compiled: CompiledOperation, position: int) -> torch.Tensor:
        """The rows of a kept group, those of its members one after another."""
        return self.tensor(self._first[compiled] + position)

    def in_place(self, compiled: CompiledOperation, position: int) -> bool:
        """Whether a kept group is read where it is in its arena."""
        return bool(self.places[self._first[compiled] + position, 2])

    def saved(self, compiled: CompiledOperation, index: int) -> torch.Tensor:
        """The rows of a saved tensor."""
        return self.tensor(self._first[compiled] + len(compiled.kept_groups) + index)

    def places_of(self, compiled: CompiledOperation) -> list[list[int]]:
        """Pointer (0 where C can't read it), bytes and whether it is part of an arena, of each array of an operation,
        kept groups first."""
        first = self._first[compiled]
        stop = first + len(compiled.kept_groups) + len(compiled.saved_types)
        found: list[list[int]] = self.places[first:stop].tolist()
        return found

    def release(self) -> None:
        super().release()
        if self._keys:
            self.pool.note_usual((key, self.phases.rows_used(i)) for i, key in enumerate(self._keys))
        self._numbers, self._types, self._host, self._columns, self.filled = {}, {}, {}, {}, {}


class GradientRows(Pieces):
    """The memory of one backward pass: arenas of gradients, whose first row is zero, and the rows that steps make for
    the gradients of parameters.

    capacity: rows of each arena, the zero row among them; arenas of that row alone have no memory.
    """

    def __init__(
        self,
        pool: Pool,
        kinds: Sequence[TensorType],
        capacity: Sequence[int],
        extra: Mapping[CompiledOperation, int],
    ) -> None:
        super().__init__(pool)
        rows = [n if n > 1 else 0 for n in capacity]
        everything = list(kinds)
        self._first: dict[CompiledOperation, int] = {}
        for compiled, n in extra.items():
            self._first[compiled] = len(everything)
            everything += compiled.extra_types
            rows += [n] * len(compiled.extra_types)
        self.add(everything, lay_out(Kinds.of(everything), np.array(rows, dtype=np.int64)))
        self.table = self._clear(len(kinds))

    def _clear(self, arenas: int) -> array[int]:
        """Zero the first row of each arena. int64 [arenas, 3]: pointer, bytes and bytes a row, nothing of what C can't
        read."""
        table = array("q")
        for i, (pointer, size, _) in enumerate(self.places[:arenas].tolist()):
            found = (0, 0, 0)
            if pointer and size:
                found = pointer, size, size // self.rows[i]
                ctypes.memset(pointer, 0, found[2])
            elif self.rows[i]:
                self.tensor(i)[0].zero_()
            table.extend(found)
        return table

    def write(self, i: int, start: int, grad: torch.Tensor) -> None:
        """Put gradients into the rows of arena i from `start` on."""
        pointer, _, row = self.table[3 * i : 3 * i + 3]
        whole = pointer and grad.layout is torch.strided and grad.is_contiguous()
        begin = address(grad, len(grad) * row) if whole and grad.dtype is self.kinds[i].dtype else None
        if begin:
            ctypes.memmove(pointer + start * row, begin, len(grad) * row)
        else:
            self.tensor(i)[start : start + len(grad)].copy_(grad)

    def extra(self, compiled: CompiledOperation) -> list[torch.Tensor]:
        """The rows that an operation's steps make for the gradients of parameters; none where it was not asked for."""
        first = self._first.get(compiled)
        return [] if first is None else [self.tensor(first + i) for i in range(len(compiled.extra_types))]

    def extra_places(self, compiled: CompiledOperation) -> np.ndarray:
        """Pointers and bytes of those rows, pointer 0 where C can't read them; none where they were not asked for."""
        first = self._first.get(compiled)
        return _NO_PLACES if first is None else self.places[first : first + len(compiled.extra_types)]


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
    KINDS = 64  # shapes and types

    def __init__(self) -> None:
        self._storages: OrderedDict[Any, list[tuple[torch.UntypedStorage, int]]] = OrderedDict()
        self._lock = threading.Lock()
        self.reused = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the CPU with undefined contents, no view of another."""
        size = dtype.itemsize * math.prod(shape)
        if size < self.LEAST:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with self._lock:
            kept = self._storages.setdefault((shape, dtype), [])
            self._storages.move_to_end((shape, dtype))
            for storage, pointer in reversed(kept):  # the last one is warm in the cache
                # Resized, or moved into shared memory, it is the user's alone.
                if storage_uses(storage) == 1 and storage.data_ptr() == pointer and storage.nbytes() == size:
                    self.reused += 1
                    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape)  # type: ignore[call-overload]  # takes one
            made = torch.empty(shape, dtype=dtype, device="cpu")
            kept.append((made.untyped_storage(), made.data_ptr()))
            if len(kept) > self.KEPT:
                kept.pop(0)
            if len(self._storages) > self.KINDS:
                self._storages.popitem(last=False)
        return made
