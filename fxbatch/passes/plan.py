"""Program + Schedule -> Plan: where each value lives and what each step reads.

Each output of a step is one contiguous block of rows in the arena of its tensor type; blocks follow one
another in step order. A step's input group is read as a view when its rows are consecutive, as a
broadcast when they are one row, else through an index.

    >>> plan = plan_arenas(program, schedule, layouts)      # doctest: +SKIP
    >>> plan.steps[3].inputs[0]                              # doctest: +SKIP
    Gather(arena=1, kind='view', start=64, rows=32)

For inference, which keeps nothing for backward, rows are used again (`reuse`): a block is free when the last reader
of any of its values has run (results are never freed), and each block takes the first free rows of its arena that
are wide enough, so that a chain of 1,000 steps needs two blocks.

A run asks for all that it needs of a phase in one call: `plan_whole` for its only phase (the plan, what is known of its
values, where its arrays lie), `RunColumns.plan` for one of several (the plan, and which arrays lack room).

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fxbatch.ir import CONSTANT_KINDS, NOT_THERE, Layout, Plan, Program, Schedule, Signature, offsets
from fxbatch.passes.room import ArrayTable, place_arrays, rows_of_arrays

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Shorts = cython.typedef(cython.const[cython.int][::1])
Flags = cython.typedef(cython.const[cython.uchar][::1])
Written = cython.typedef(cython.longlong[::1])
Marks = cython.typedef(cython.uchar[::1])


@cython.cclass
class Slots:
    """How operations take their inputs, beside the columns of their signatures: made once a set of operations.

    Of each slot, flat over signatures: members of earlier groups of its signature, members of its own, position in it.
    Of each signature where its groups begin, of each group its members and the id of their type. layouts: None means
    one group a slot.
    """

    arity: Ints
    width: Ints
    first_output: Ints
    output_types: Shorts
    constant: Flags
    first_slot: Ints
    prior: Ints
    size: Ints
    member: Ints
    first_group: Ints
    group_size: Ints
    group_type: Ints
    signatures: Int
    types: Int

    def __init__(self, program: Program, layouts: Sequence[Layout | None]) -> None:
        c = program.columns
        self.arity, self.width, self.constant, self.first_slot = c.arity, c.width, c.constant, c.first_slot
        self.first_output, self.output_types = c.first_output, c.output_types
        self.signatures, self.types = len(c.arity), len(c.types)
        slots: list[tuple[int, int, int]] = []
        groups: list[tuple[int, int]] = []
        counts = []
        for signature, layout in zip(program.signatures, layouts, strict=True):
            arity = len(signature.inputs)
            own = [(i,) for i in range(arity)] if layout is None else layout.groups
            rows, before = [(0, 0, 0)] * arity, 0
            for group in own:
                for position, slot in enumerate(group):
                    rows[slot] = (before, len(group), position)
                before += len(group)
                groups.append(
                    (len(group), c.type_ids.get(signature.inputs[group[0]], -1))
                )  # -1: never called
            slots += rows
            counts.append(len(own))
        self.first_group = offsets(np.array(counts, dtype=np.int64))
        self.prior, self.size, self.member = np.array(slots, dtype=np.int64).reshape(-1, 3).T.copy()
        self.group_size, self.group_type = np.array(groups, dtype=np.int64).reshape(-1, 2).T.copy()


def is_constant(signature: Signature) -> bool:
    """Whether calls of it have a payload instead of a body."""
    return signature.operation.kind in CONSTANT_KINDS


def plan_arenas(
    program: Program,
    schedule: Schedule,
    layouts: Sequence[Layout | None] | Slots,
    *,
    known_rows: np.ndarray | None = None,
    used: np.ndarray | None = None,
    run_before: np.ndarray | None = None,
    reuse: bool = False,
) -> Plan:
    """The plan of a program (or of one phase of it).

    layouts: one a signature, or what was made of these. known_rows: int64 [program.known], the rows of earlier
    phases' values; used: int64 [types], rows of each arena already taken; run_before: int64 [signatures], rows of
    each signature already run. reuse: rows are used again when their last reader has run (inference).
    """
    assert not reuse or used is None or not used.any(), "rows of earlier phases may be read again"
    slots = layouts if isinstance(layouts, Slots) else Slots(program, layouts)
    planner = _ArenaPlanner(program, schedule, slots)
    planner.allot(known_rows)
    if used is not None:
        planner.columns[0][:] = used
    if run_before is not None:
        before: Ints = run_before
        for s in range(planner.t.signatures):
            planner.ran[s] = before[s]
    planner.finish(reuse)
    return planner.plan(program, schedule)


class WholePlan(NamedTuple):
    """The plan of a minibatch's only phase, with what a run of it knows of its values and arrays."""

    plan: Plan
    type_of: np.ndarray  # int64 [values]
    needed: np.ndarray  # bool [values]: whether gradients go through it
    rows: np.ndarray  # int64 [arrays]
    places: np.ndarray  # int64 [arrays, 3]: see `place_arrays`
    ends: np.ndarray  # int64 [devices]
    calls: np.ndarray  # int64 [signatures]

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `RunColumns.ran` gives them."""
        return self.plan.row_of_value, self.type_of, self.needed


def plan_whole(
    program: Program, schedule: Schedule, slots: Slots, arrays: ArrayTable, needs: np.ndarray, *, reuse: bool
) -> WholePlan:
    """The plan of a minibatch's only phase. needs: bool [outputs of the signatures]."""
    planner = _ArenaPlanner(program, schedule, slots)
    planner.allot(None)
    planner.finish(reuse)
    type_of, needed = np.empty(planner.values, dtype=np.int64), np.empty(planner.values, dtype=bool)
    planner.tell(program.columns.numbers, needs, type_of, needed)
    plan = planner.plan(program, schedule)
    rows, inside, first, calls = rows_of_arrays(arrays, plan)
    places, ends = place_arrays(arrays.width, arrays.device, arrays.devices, rows, inside, first)
    return WholePlan(plan, type_of, needed, rows, places, ends, calls)


@cython.cclass
class RunColumns:
    """Columns that grow from phase to phase of a run, not copied for each one: of each value its row, its type
    and whether gradients go through it; rows in use of each array, and the room that it has; calls of each operation
    so far.

        plan, small = columns.plan(program, schedule, slots, arrays, numbers, operations, types, needs)
        for i, n, used in small:
            columns.give_room(i, n)          # array i needs n rows, of which some are in use
        row, type_of, needed = columns.ran()
    """

    count: Int  # values whose phases have run
    planned: Int  # with those of the phase that was planned last
    row: np.ndarray
    type_of: np.ndarray
    needed: np.ndarray
    used: Written
    room: Written
    calls: Written

    def __init__(self) -> None:
        self.count = self.planned = 0
        self.row = self.type_of = self.used = self.room = self.calls = np.zeros(0, dtype=np.int64)
        self.needed = np.zeros(0, dtype=bool)

    def ran(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The phase that was planned has run. int64, int64 and bool [values]: row, type, and whether gradients go
        through each."""
        self.count = self.planned
        return self.row[: self.count], self.type_of[: self.count], self.needed[: self.count]

    def add(self, arrays: Int, operations: Int) -> None:
        """There are so many arrays and operations; those that are new have no rows and calls."""
        self.used, self.room = _longer(self.used, arrays), _longer(self.room, arrays)
        self.calls = _longer(self.calls, operations)

    def give_room(self, array: Int, rows: Int) -> None:
        """An array has room for so many rows from here on."""
        self.room[array] = rows

    def rows_used(self, array: Int) -> Int:
        """Rows in use of an array."""
        return self.used[array]

    def calls_of(self, operation: Int) -> Int:
        """Calls of an operation in all phases so far."""
        return self.calls[operation]

    def plan(
        self,
        program: Program,
        schedule: Schedule,
        slots: Slots,
        arrays: ArrayTable,
        numbers: np.ndarray,
        operations: np.ndarray,
        types: np.ndarray,
        needs: np.ndarray,
    ) -> tuple[Plan, list[tuple[int, int, int]]]:
        """The plan of a phase, and the arrays that lack room, with the rows that they need and those in use. numbers:
        of the arrays in this run; operations: of each signature the number of its operation here, -1 for none; types:
        likewise those of the program."""
        number: Ints = numbers
        operation: Ints = operations
        owner: Ints = arrays.owner
        members: Ints = arrays.members
        planner = _ArenaPlanner(program, schedule, slots)
        if planner.known > self.count:
            raise IndexError(NOT_THERE)
        self.planned = planner.values
        if len(self.row) < self.planned:
            self.row = _longer(self.row, 2 * self.planned)
            self.type_of = _longer(self.type_of, 2 * self.planned)
            self.needed = _longer(self.needed, 2 * self.planned).astype(bool)
        planner.allot(None, self.row)
        for a in range(planner.t.types):
            planner.capacity[a] = self.used[number[a]]
        for s in range(planner.t.signatures):
            planner.ran[s] = 0 if operation[s] < 0 else self.calls[operation[s]]
        planner.finish(False)
        planner.tell(types, needs, self.type_of, self.needed)
        small: list[tuple[int, int, int]] = []
        for s in range(planner.t.signatures):
            if operation[s] >= 0:
                self.calls[operation[s]] = planner.ran[s]
        for i in range(owner.shape[0]):
            s, a = owner[i], number[i]
            rows = planner.capacity[i] if s < 0 else planner.ran[s] * members[i]
            if rows > self.room[a]:
                small.append((a, rows, self.used[a]))
            self.used[a] = max(self.used[a], rows)
        return planner.plan(program, schedule), small


def _longer(column: Any, items: int) -> np.ndarray:
    """An array with more items, which are zeros."""
    longer = np.zeros(items, dtype=np.int64)
    longer[: len(column)] = column
    return longer


@cython.cclass
class _ArenaPlanner:
    """A plan as it is made: the columns of program and schedule, then those of the plan (see `Plan`)."""

    sig: Shorts
    order: Ints
    first: Ints  # step k runs order[first[k] : first[k + 1]]
    inputs: Ints
    outputs: Ints
    t: Slots
    calls: Int
    steps: Int
    entries: Int
    known: Int
    values: Int
    columns: list[np.ndarray]
    gathers: Int
    blocks: Int
    indexed: Int
    value: Written  # of each call its first value, and its first input
    begin: Written
    ran: Written  # of each signature how many rows so far, and one more than its last call
    last: Written

    capacity: Written
    step_signature: Written
    step_rows: Written
    step_offset: Written
    first_gather: Written
    gather_arena: Written
    kind: Written
    start: Written
    gather_rows: Written
    first_block: Written
    block_arena: Written
    block_start: Written
    entry_offsets: Written
    entry: Written
    row: Written
    indices: Written
    made: np.ndarray  # what the columns above are pieces of
    whole: Written
    cut: Int

    def __init__(self, program: Program, schedule: Schedule, tables: Slots) -> None:
        self.sig, self.order, self.first = program.sig, schedule.order, schedule.offsets
        self.inputs, self.outputs, self.t = program.inputs, program.outputs, tables
        self.calls, self.steps, self.entries = len(self.sig), len(self.first) - 1, len(self.inputs)
        self.known, self.gathers, self.blocks, self.indexed = program.known, 0, 0, 0
        scratch: Written = np.zeros(2 * self.calls + 2 + 2 * tables.signatures, dtype=np.int64)
        self.value, self.begin = scratch[: self.calls + 1], scratch[self.calls + 1 : 2 * self.calls + 2]
        self.ran = scratch[2 * self.calls + 2 : 2 * self.calls + 2 + tables.signatures]
        self.last = scratch[2 * self.calls + 2 + tables.signatures :]
        if not self.number_calls() or not self.count_pieces():
            raise IndexError(NOT_THERE)

    @cython.cfunc
    @cython.exceptval(check=False)
    def number_calls(self) -> cython.bint:
        """The first value and the first input of each call; whether all that the columns name is there."""
        value = self.known
        begin = 0
        for c in range(self.calls):
            self.value[c] = value
            self.begin[c] = begin
            s = self.sig[c]
            if s < 0 or s >= self.t.signatures:
                return False
            value += self.t.width[s]
            begin += self.t.arity[s]
        self.value[self.calls], self.begin[self.calls], self.values = value, begin, value
        for i in range(self.entries):
            if self.inputs[i] < 0 or self.inputs[i] >= value:
                return False
        for i in range(self.outputs.shape[0]):
            if self.outputs[i] < 0 or self.outputs[i] >= value:
                return False
        return begin == self.entries

    @cython.cfunc
    @cython.exceptval(check=False)
    def count_pieces(self) -> cython.bint:
        """How many gathers and blocks there are; whether each step has calls of one signature."""
        if self.steps and (self.first[0] != 0 or self.first[self.steps] > self.order.shape[0]):
            return False
        for k in range(self.steps):
            s = -1
            for at in range(self.first[k], self.first[k + 1]):
                c = self.order[at]
                if c < 0 or c >= self.calls or (s >= 0 and self.sig[c] != s):
                    return False
                s = self.sig[c]
            if s < 0:
                return False
            self.gathers += self.t.first_group[s + 1] - self.t.first_group[s]
            self.blocks += self.t.width[s]
        return True

    @cython.ccall
    def allot(self, known_rows: np.ndarray | None, into: np.ndarray | None = None) -> cython.void:
        """The columns of the plan, pieces of one array, with nothing in them yet but the rows of known values. into:
        room for the rows of all values, which has those already."""
        k = self.steps
        self.made = np.empty(
            self.t.types + 5 * k + 2 + 5 * self.gathers + 1 + 2 * self.blocks + 2 * self.entries
            + (self.values if into is None else 0), dtype=np.int64
        )  # fmt: skip
        self.whole, self.cut, self.columns = self.made, 0, []
        self.capacity = self.piece(self.t.types)
        self.step_signature = self.piece(k)
        self.step_rows = self.piece(k)
        self.step_offset = self.piece(k)
        self.first_gather = self.piece(k + 1)
        self.gather_arena = self.piece(self.gathers)
        self.kind = self.piece(self.gathers)
        self.start = self.piece(self.gathers)
        self.gather_rows = self.piece(self.gathers)
        self.first_block = self.piece(k + 1)
        self.block_arena = self.piece(self.blocks)
        self.block_start = self.piece(self.blocks)
        self.entry_offsets = self.piece(self.gathers + 1)
        self.entry = self.piece(self.entries)
        if into is None:
            self.row = self.piece(self.values)
        elif len(into) < self.values:
            raise IndexError(NOT_THERE)
        else:
            self.row = into
            self.columns.append(into[: self.values])
        if known_rows is not None:
            self.columns[14][: self.known] = known_rows
        self.indices = self.whole[self.cut :]
        self.capacity[:] = 0

    @cython.ccall
    def finish(self, reuse: cython.bint) -> cython.void:
        """Fill the columns; `capacity` and `ran` have what earlier phases took."""
        self.lay_out()
        if reuse:
            self.lay_out_again()
        self.place_values()
        if not self.read_inputs():
            raise IndexError(NOT_THERE)

    def plan(self, program: Program, schedule: Schedule) -> Plan:
        """The plan, when its columns are filled."""
        *columns, entry_offsets, entries, rows = self.columns
        unordered = self.out_of_order()
        order = {s: _order_of(schedule, columns[1], s) if s in unordered else None for s in program.constants}
        indices = self.made[self.cut : self.cut + self.indexed]
        return Plan.of(program.types, *columns, indices, entries, entry_offsets, rows, order)

    @cython.cfunc
    def piece(self, items: Int) -> Written:
        """The next column, also put into the list as an array."""
        at = self.cut
        self.cut += items
        self.columns.append(self.made[at : self.cut])
        return self.whole[at : self.cut]

    @cython.cfunc
    @cython.exceptval(check=False)
    def lay_out(self) -> cython.void:
        """The gathers and the output blocks of each step: blocks of an arena one after another."""
        g = 0
        b = 0
        entry = 0
        t: Slots = self.t
        for k in range(self.steps):
            s, rows = self.sig[self.order[self.first[k]]], self.first[k + 1] - self.first[k]
            self.step_signature[k], self.step_rows[k], self.step_offset[k] = s, rows, self.ran[s]
            self.ran[s] += rows
            self.first_gather[k] = g
            for j in range(t.first_group[s], t.first_group[s + 1]):
                self.gather_arena[g], self.gather_rows[g] = t.group_type[j], rows * t.group_size[j]
                self.entry_offsets[g] = entry
                entry += self.gather_rows[g]
                g += 1
            self.first_block[k] = b
            for j in range(t.first_output[s], t.first_output[s + 1]):
                arena = t.output_types[j]
                self.block_arena[b], self.block_start[b] = arena, self.capacity[arena]
                self.capacity[arena] += rows
                b += 1
        self.first_gather[self.steps], self.first_block[self.steps], self.entry_offsets[g] = g, b, entry

    @cython.cfunc
    @cython.exceptval(check=False)
    def place_values(self) -> cython.void:
        """Row r of a step's call goes to row r of each of its blocks."""
        row: Written = self.row
        value: Written = self.value
        order: Ints = self.order
        for k in range(self.steps):
            width = self.first_block[k + 1] - self.first_block[k]
            for at in range(self.first[k + 1] - self.first[k]):
                c = order[self.first[k] + at]
                for j in range(width):
                    row[value[c] + j] = self.block_start[self.first_block[k] + j] + at

    @cython.cfunc
    @cython.exceptval(check=False)
    def read_inputs(self) -> cython.bint:
        """The values that each step reads, in the order of its gathers; what each gather finds (see `Plan`)."""
        base = 0
        t: Slots = self.t
        entry: Written = self.entry
        inputs: Ints = self.inputs
        begin: Written = self.begin
        order: Ints = self.order
        for k in range(self.steps):
            s, rows = self.step_signature[k], self.step_rows[k]
            end = base + rows * t.arity[s]
            if end > self.entries:
                return False
            for i in range(t.arity[s]):
                slot = t.first_slot[s] + i
                size, to = t.size[slot], base + t.prior[slot] * rows + t.member[slot]
                if to < base or to + (rows - 1) * size >= end:
                    return False
                for at in range(self.first[k], self.first[k + 1]):
                    entry[to] = inputs[begin[order[at]] + i]
                    to += size
            group = t.first_group[s]
            for g in range(self.first_gather[k], self.first_gather[k + 1]):
                if base + self.gather_rows[g] > end:
                    return False
                self.classify(g, base, t.group_size[group] == 1)
                base += self.gather_rows[g]
                group += 1
            if base != end:
                return False
        return True

    @cython.cfunc
    @cython.exceptval(check=False)
    def classify(self, g: Int, base: Int, alone: cython.bint) -> cython.void:
        """Whether gather g, of the values from `base` on, finds consecutive rows, one row, or is to be indexed."""
        rows = self.gather_rows[g]
        at = self.indexed
        rows_of: Written = self.row
        entry: Written = self.entry
        indices: Written = self.indices
        row = rows_of[entry[base]] if rows else 0
        before = row
        next_rows: cython.bint = True
        same: cython.bint = alone
        indices[at] = row
        for i in range(1, rows):
            row = rows_of[entry[base + i]]
            indices[at + i] = row
            next_rows &= row == before + 1
            same &= row == before
            before = row
        if next_rows or same:
            self.kind[g], self.start[g] = 0 if next_rows else 1, indices[at]
        else:
            self.kind[g], self.start[g] = 2, at
            self.indexed += rows

    @cython.ccall
    def tell(self, types: Ints, needs: Flags, type_of: Written, needed: Marks) -> cython.void:
        """Write what stands for each output of the signatures at each value of the program: the number of its type,
        and whether gradients go through it."""
        t: Slots = self.t
        if types.shape[0] < t.types or needs.shape[0] < t.first_output[t.signatures]:
            raise IndexError(NOT_THERE)
        for c in range(self.calls):
            s = self.sig[c]
            v = self.value[c]
            for j in range(t.first_output[s], t.first_output[s + 1]):
                type_of[v], needed[v] = types[t.output_types[j]], needs[j]
                v += 1

    @cython.cfunc
    def out_of_order(self) -> list[int]:
        """Signatures of constants whose calls don't run in recorded order."""
        columns: list[int] = []
        for k in range(self.steps):
            s = self.step_signature[k]
            if not self.t.constant[s] or self.last[s] < 0:
                continue
            for at in range(self.first[k], self.first[k + 1]):
                if self.order[at] < self.last[s]:
                    columns.append(s)
                    self.last[s] = -1
                    break
                self.last[s] = self.order[at] + 1
        return columns

    # -- rows used again ----------------------------------------------------------------------------

    @cython.cfunc
    def lay_out_again(self) -> cython.void:
        """Blocks anew, each in the first free rows of its arena that are enough."""
        scratch: Written = np.zeros(3 * self.blocks + self.steps + 1, dtype=np.int64)
        size: Written = scratch[: self.blocks]
        dies: Written = scratch[self.blocks : 2 * self.blocks]
        # Of each block one more than the next that dies with it; of each step one more than a block that dies there.
        after: Written = scratch[2 * self.blocks : 3 * self.blocks]
        ending: Written = scratch[3 * self.blocks :]
        arenas: list[FreeRows] = [FreeRows() for _ in range(self.t.types)]
        free: FreeRows
        self.find_last_readers(dies)
        for k in range(self.steps):
            for b in range(self.first_block[k], self.first_block[k + 1]):
                free = arenas[self.block_arena[b]]
                size[b] = self.step_rows[k]
                self.block_start[b] = free.take(size[b])
                after[b] = ending[dies[b]]
                ending[dies[b]] = b + 1
            b = ending[k] - 1
            while b >= 0:
                free = arenas[self.block_arena[b]]
                free.give(self.block_start[b], self.block_start[b] + size[b])
                b = after[b] - 1
        for a in range(self.t.types):
            free = arenas[a]
            self.capacity[a] = free.end

    @cython.cfunc
    def find_last_readers(self, dies: Written) -> cython.void:
        """The step that reads any value of each block last: its own without readers, none of all for results."""
        block: Written = np.empty(self.values + 1, dtype=np.int64)  # of each value
        for k in range(self.steps):
            for b in range(self.first_block[k], self.first_block[k + 1]):
                dies[b] = k
            for at in range(self.first[k], self.first[k + 1]):
                c = self.order[at]
                for j in range(self.value[c + 1] - self.value[c]):
                    block[self.value[c] + j] = self.first_block[k] + j
        for k in range(self.steps):
            for at in range(self.first[k], self.first[k + 1]):
                c = self.order[at]
                for i in range(self.begin[c], self.begin[c + 1]):
                    if self.inputs[i] >= self.known:
                        dies[block[self.inputs[i]]] = k
        for i in range(self.outputs.shape[0]):
            if self.outputs[i] >= self.known:
                dies[block[self.outputs[i]]] = self.steps


@cython.cclass
class FreeRows:
    """The free rows of an arena: ranges in order, and all from `end` on."""

    first: Written
    stop: Written
    count: Int
    end: Int

    def __init__(self) -> None:
        room: Written = np.empty(32, dtype=np.int64)
        self.first, self.stop = room[:16], room[16:]
        self.count, self.end = 0, 0

    @cython.cfunc
    @cython.exceptval(check=False)
    def take(self, rows: Int) -> Int:
        """The first free rows that are enough, else rows at the end."""
        for i in range(self.count):
            a = self.first[i]
            if self.stop[i] - a >= rows:
                self.first[i] += rows
                if self.first[i] == self.stop[i]:
                    self.remove(i)
                return a
        a = self.end
        if self.count and self.stop[self.count - 1] == self.end:
            self.count -= 1
            a = self.first[self.count]
        self.end = a + rows
        return a

    @cython.cfunc
    def give(self, a: Int, b: Int) -> cython.void:
        """Put rows a : b back, joined with free neighbours."""
        i = self.count
        while i and self.first[i - 1] >= a:
            i -= 1
        if i and self.stop[i - 1] == a:
            self.stop[i - 1] = b
            if i < self.count and self.first[i] == b:
                self.stop[i - 1] = self.stop[i]
                self.remove(i)
        elif i < self.count and self.first[i] == b:
            self.first[i] = a
        else:
            if self.count == self.first.shape[0]:
                self.first = np.concatenate([self.first, self.first])
                self.stop = np.concatenate([self.stop, self.stop])
            for j in range(self.count, i, -1):
                self.first[j], self.stop[j] = self.first[j - 1], self.stop[j - 1]
            self.first[i], self.stop[i] = a, b
            self.count += 1

    @cython.cfunc
    @cython.exceptval(check=False)
    def remove(self, i: Int) -> cython.void:
        self.count -= 1
        for j in range(i, self.count):
            self.first[j], self.stop[j] = self.first[j + 1], self.stop[j + 1]


def _order_of(schedule: Schedule, step_sig: np.ndarray, s: int) -> np.ndarray | None:
    """The permutation of a signature's payload, None where its calls run as they were recorded."""
    order, first = schedule.order, schedule.offsets
    calls = [order[first[k] : first[k + 1]] for k in np.flatnonzero(step_sig == s).tolist()]
    joined = calls[0] if len(calls) == 1 else np.concatenate(calls) if calls else order[:0]
    in_order = len(joined) < 2 or bool((np.diff(joined) > 0).all())
    return None if in_order else np.argsort(np.argsort(joined))
