"""Plans of all phases -> GradientPlan: where gradients of uses are written, how gradients of values are read.

Backward never scatters. Each step writes the gradients of what it read into blocks of its own (a row a
use); the gradient of a value is then gathered from the rows of its uses: a view when each value of a block
has one use and the rows are consecutive, an index when it has at most one (row 0 of each arena is zero), a
sum over bags else. This needs no atomics and is deterministic on every device.

    >>> gradients = plan_gradients(phases, requests, types)       # doctest: +SKIP

Compiled by Cython; what is annotated with Int, Ints, ... is a C type there (see uncompiled.py). What comes
from plans is checked where it is looked at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxbatch.ir import NOT_THERE, Plan, Program

try:
    import cython
except ImportError:
    from fxbatch.uncompiled import cython

Int = cython.typedef(cython.longlong)
Ints = cython.typedef(cython.const[cython.longlong][::1])
Shorts = cython.typedef(cython.const[cython.int][::1])
Written = cython.typedef(cython.longlong[::1])

NOTHING, GRADIENT_VIEW, GRADIENT_INDEX, GRADIENT_SUM = 0, 1, 2, 3


class PhaseGradients(NamedTuple):
    """The plan of backward for one phase. The tuples have one item per signature."""

    program: Program
    plan: Plan
    grad_groups: Sequence[tuple[int, ...]]  # groups whose gradients the operation's backward gives
    grad_outputs: Sequence[tuple[int, ...]]  # outputs whose gradients it takes
    arena_ids: np.ndarray  # int64 [plan.arenas]: number of each arena among the run's types


class GradientPlan(NamedTuple):
    """Per phase, columns over grad outputs and grad groups in step order.

    `read_*[p]` are over (step, grad output) pairs of phase p; start is a row (view) or a position in
    `indices`; `bag[p]` the position in `bags` of a sum's offsets. `write_start[p]` is over (step, grad group)
    pairs: first row of its block. `first_read[p]` and `first_write[p]` say where the pairs of each step begin.
    `capacity` counts rows an arena, the zero row included.
    """

    capacity: np.ndarray  # int64 [types]
    read_kind: list[np.ndarray]
    read_start: list[np.ndarray]
    read_stop: list[np.ndarray]
    bag: list[np.ndarray]
    write_arena: list[np.ndarray]
    write_start: list[np.ndarray]
    write_rows: list[np.ndarray]
    read_arena: list[np.ndarray]
    first_read: list[np.ndarray]  # int64 [steps + 1]
    first_write: list[np.ndarray]
    request_start: list[int]
    indices: np.ndarray  # int64
    bags: np.ndarray  # int64: offsets of bags, relative to their first index


def plan_gradients(
    phases: Sequence[PhaseGradients], requests: Sequence[tuple[int, np.ndarray]], types: int
) -> GradientPlan:
    """requests: (type id, value ids) of each differentiable result tensor that got a gradient."""
    return _GradientPlanner(phases, requests, types).run()


@cython.cfunc
def _flatten(rows: Sequence[tuple[int, ...]], first: Written, flat: Written) -> cython.void:
    """Rows one after another in `flat`, and where each begins; `first` is zeros."""
    s: Int
    at = 0
    for s, row in enumerate(rows):
        for item in row:
            flat[at] = item
            at += 1
        first[s + 1] = at


@cython.boundscheck(True)
@cython.cclass
class _PhaseColumns:
    """A phase's columns (see `Plan`), its choices flat, the values of its blocks, and the columns made for it.

    The groups of signature s are group[first_group[s] : first_group[s + 1]]; block b has the values
    made[block[b] : block[b + 1]], row by row.
    """

    sig: Shorts
    first_output: Ints
    output_types: Shorts
    step_signature: Ints
    step_rows: Ints
    first_gather: Ints
    gather_arena: Ints
    gather_rows: Ints
    entry_offsets: Ints
    entries: Ints
    first_block: Ints
    block_arena: Ints
    block_start: Ints
    row_of_value: Ints
    arena_ids: Ints
    known: Int
    values: Int
    steps: Int
    signatures: Int
    arenas: Int
    first_group: Written
    group: Written
    first_choice: Written  # of outputs
    choice: Written
    made: Written
    block: Written
    reads: Int
    writes: Int
    kind: Written
    start: Written
    stop: Written
    bag: Written
    write_arena: Written
    write_start: Written
    write_rows: Written
    read_arena: Written
    first_read: Written
    first_write: Written

    def __init__(self, phase: PhaseGradients) -> None:
        program, plan = phase.program, phase.plan
        columns = program.columns
        self.sig, self.row_of_value, self.arena_ids = program.sig, plan.row_of_value, phase.arena_ids
        self.first_output, self.output_types = columns.first_output, columns.output_types
        self.step_signature, self.step_rows = plan.step_signature, plan.step_rows
        self.first_gather, self.first_block = plan.first_gather, plan.first_block
        self.gather_arena, self.gather_rows = plan.gather_arena, plan.gather_rows
        self.entry_offsets, self.entries = plan.entry_offsets, plan.entries
        self.block_arena, self.block_start = plan.block_arena, plan.block_start
        self.known, self.steps, self.signatures = program.known, len(self.step_signature), len(columns.arity)
        self.arenas = len(self.arena_ids)
        self.reads = self.writes = 0
        self.take_choices(phase.grad_groups, phase.grad_outputs)

    @cython.cfunc
    def take_choices(
        self, groups: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]
    ) -> cython.void:
        """Ragged tables as offsets and one flat column; all columns are pieces of one array."""
        n = self.signatures
        if len(groups) != n or len(outputs) != n:
            raise IndexError(NOT_THERE)
        grouped: Int = sum(map(len, groups))
        chosen: Int = sum(map(len, outputs))
        scratch: Written = np.zeros(2 * n + 2 + grouped + chosen, dtype=np.int64)
        self.first_group, self.first_choice = scratch[: n + 1], scratch[n + 1 : 2 * n + 2]
        self.group, self.choice = scratch[2 * n + 2 : 2 * n + 2 + grouped], scratch[2 * n + 2 + grouped :]
        _flatten(groups, self.first_group, self.group)
        _flatten(outputs, self.first_choice, self.choice)

    @cython.cfunc
    def find_made(self) -> cython.void:
        """The values of all blocks: those of an arena are dense, in rows from that of its first block on."""
        at = 0
        v = self.known
        self.values = self.known
        for c in range(self.sig.shape[0]):
            self.values += self.first_output[self.sig[c] + 1] - self.first_output[self.sig[c]]
        blocks = self.block_arena.shape[0]
        scratch: Written = np.zeros(
            2 * self.arenas + 2 + 2 * (self.values - self.known) + blocks + 1, dtype=np.int64
        )
        base: Written = scratch[: self.arenas + 1]  # where each arena begins in `by_row`
        first: Written = scratch[self.arenas + 1 : 2 * self.arenas + 2]  # the row of its first block
        scratch = scratch[2 * self.arenas + 2 :]
        by_row: Written = scratch[: self.values - self.known]
        self.made = scratch[self.values - self.known : 2 * (self.values - self.known)]
        self.block = scratch[2 * (self.values - self.known) :]
        for k in range(self.steps):
            for b in range(self.first_block[k], self.first_block[k + 1]):
                t = self.block_arena[b]
                if not base[t + 1]:
                    first[t] = self.block_start[b]
                base[t + 1] += self.step_rows[k]
        for t in range(self.arenas):
            base[t + 1] += base[t]
        if base[self.arenas] != self.values - self.known:
            raise IndexError(NOT_THERE)
        for c in range(self.sig.shape[0]):
            s = self.sig[c]
            for j in range(self.first_output[s], self.first_output[s + 1]):
                t = self.output_types[j]
                row = self.row_of_value[v] - first[t]
                if row < 0 or row >= base[t + 1] - base[t]:
                    raise IndexError(NOT_THERE)
                by_row[base[t] + row] = v
                v += 1
        for k in range(self.steps):
            for b in range(self.first_block[k], self.first_block[k + 1]):
                t = self.block_arena[b]
                row = self.block_start[b] - first[t]
                self.block[b] = at
                for j in range(self.step_rows[k]):
                    self.made[at + j] = by_row[base[t] + row + j]
                at += self.step_rows[k]
        self.block[blocks] = at


@cython.boundscheck(True)
@cython.cclass
class _GradientPlanner:
    """A gradient plan as it is made, of all phases.

    A use is a read of a value by a step, or a request; its row is where that gradient is written. Use u of value v
    is at rows[first_use[v]] and on when they are sorted by value.
    """

    phases: list[_PhaseColumns]
    requests: list[np.ndarray]  # the values of each
    request_type: list[int]
    request_start: list[int]
    types: Int
    values: Int
    uses: Int
    read_rows: Int
    total: Written  # rows of each arena, without row 0
    value: Written  # of each use
    row: Written
    first_use: Written
    rows: Written
    indices: Int
    bags: Int
    array: np.ndarray  # what columns are pieces of
    whole: Written
    cut: Int

    def __init__(
        self, phases: Sequence[PhaseGradients], requests: Sequence[tuple[int, np.ndarray]], types: int
    ) -> None:
        self.types, self.values, self.uses, self.read_rows, self.indices, self.bags = types, 0, 0, 0, 0, 0
        phase: _PhaseColumns
        self.phases, self.request_start = [], []
        for phase_columns in phases:
            phase = _PhaseColumns(phase_columns)
            phase.find_made()
            self.phases.append(phase)
            self.values = max(self.values, phase.values)
        self.request_type, self.requests = [t for t, _ in requests], [v for _, v in requests]
        asked: Ints
        for t, given_values in requests:
            asked = given_values
            for i in range(asked.shape[0]):
                if not 0 <= asked[i] < self.values:
                    raise IndexError(NOT_THERE)
            if not 0 <= t < types:
                raise IndexError(NOT_THERE)
            self.uses += asked.shape[0]

    def run(self) -> GradientPlan:
        p: _PhaseColumns
        items = self.types
        for p in self.phases:
            self.count_pairs(p)
            items += 5 * p.reads + 3 * p.writes + 2 * (p.steps + 1)
        n = self.uses
        self.array = np.empty(items, dtype=np.int64)
        self.whole, self.cut = self.array, 0
        scratch: Written = np.zeros(3 * n + self.values + 2, dtype=np.int64)
        self.value, self.row, self.rows = scratch[:n], scratch[n : 2 * n], scratch[2 * n : 3 * n]
        self.first_use = scratch[3 * n :]
        capacity: list[np.ndarray] = []
        lists: list[list[np.ndarray]] = [[] for _ in range(10)]
        self.total = self.piece(capacity, self.types)
        self.total[:] = 0
        for p in self.phases:
            p.kind = self.piece(lists[0], p.reads)
            p.start = self.piece(lists[1], p.reads)
            p.stop = self.piece(lists[2], p.reads)
            p.bag = self.piece(lists[3], p.reads)
            p.write_arena = self.piece(lists[4], p.writes)
            p.write_start = self.piece(lists[5], p.writes)
            p.write_rows = self.piece(lists[6], p.writes)
            p.read_arena = self.piece(lists[7], p.reads)
            p.first_read = self.piece(lists[8], p.steps + 1)
            p.first_write = self.piece(lists[9], p.steps + 1)
            p.first_read[0] = p.first_write[0] = 0
        self.place_uses()
        self.sort_uses()
        indices = np.empty(n + self.read_rows, dtype=np.int64)
        bags = np.empty(self.read_rows, dtype=np.int64)
        for p in self.phases:
            self.find_reads(p, indices, bags)
        for i in range(self.types):
            self.total[i] += 1
        return GradientPlan(
            capacity[0], *lists, self.request_start, indices[: self.indices].copy(), bags[: self.bags].copy()
        )

    @cython.cfunc
    def piece(self, columns: list[np.ndarray], items: Int) -> Written:
        """The next column, also put into the list as an array."""
        at = self.cut
        self.cut += items
        columns.append(self.array[at : self.cut])
        return self.whole[at : self.cut]

    @cython.cfunc
    def count_pairs(self, p: _PhaseColumns) -> cython.void:
        """How many gradients are read and written by steps, and how many uses there are."""
        for k in range(p.steps):
            s = p.step_signature[k]
            for i in range(p.first_group[s], p.first_group[s + 1]):
                self.uses += p.gather_rows[p.first_gather[k] + p.group[i]]
            for i in range(p.first_choice[s], p.first_choice[s + 1]):
                if not 0 <= p.choice[i] < p.first_block[k + 1] - p.first_block[k]:
                    raise IndexError(NOT_THERE)
            p.reads += p.first_choice[s + 1] - p.first_choice[s]
            self.read_rows += (p.first_choice[s + 1] - p.first_choice[s]) * p.step_rows[k]
            p.writes += p.first_group[s + 1] - p.first_group[s]

    @cython.cfunc
    def place_uses(self) -> cython.void:
        """Give each request and each pair that is written its rows, and each use the row that is its own."""
        p: _PhaseColumns
        asked: Ints
        entries: Ints
        t: Int
        n = 0
        value: Written = self.value
        row: Written = self.row
        for t, requested in zip(self.request_type, self.requests):
            asked = requested
            self.request_start.append(int(self.total[t]) + 1)  # row 0 is zero
            for i in range(asked.shape[0]):
                value[n], row[n] = asked[i], self.total[t] + 1 + i
                n += 1
            self.total[t] += asked.shape[0]
        for p in self.phases:
            w, entries = 0, p.entries
            for k in range(p.steps):
                s = p.step_signature[k]
                for i in range(p.first_group[s], p.first_group[s + 1]):
                    g = p.first_gather[k] + p.group[i]
                    t, rows = p.arena_ids[p.gather_arena[g]], p.gather_rows[g]
                    p.write_arena[w], p.write_start[w], p.write_rows[w] = t, self.total[t] + 1, rows
                    for e in range(rows):
                        value[n + e], row[n + e] = entries[p.entry_offsets[g] + e], self.total[t] + 1 + e
                    n += rows
                    self.total[t] += rows
                    w += 1
                p.first_write[k + 1] = w

    @cython.cfunc
    def sort_uses(self) -> cython.void:
        """By value, stable: a count sort."""
        before = 0
        first: Written = self.first_use
        value: Written = self.value
        for u in range(self.uses):
            first[value[u]] += 1
        for v in range(self.values + 1):
            count = first[v]
            first[v] = before
            before += count
        for u in range(self.uses):
            self.rows[first[value[u]]] = self.row[u]
            first[value[u]] += 1
        for v in range(self.values, 0, -1):
            first[v] = first[v - 1]
        first[0] = 0

    @cython.cfunc
    @cython.exceptval(check=False)
    @cython.boundscheck(False)
    def single(self, v: Int) -> Int:
        """The row of a value's first use; 0, which is zero, without uses."""
        u = self.first_use[v]
        return self.rows[u] if u < self.first_use[v + 1] else 0

    @cython.cfunc
    @cython.boundscheck(False)
    def find_reads(self, p: _PhaseColumns, indices: Written, bags: Written) -> cython.void:
        """Kind, start and stop of each read; the rows that it takes, and where those of each sum begin among them."""
        r = 0
        phase_begin = self.indices
        consecutive: cython.bint
        gradient_of: Written = p.made
        first: Written = self.first_use
        for k in range(p.steps):
            s = p.step_signature[k]
            for i in range(p.first_choice[s], p.first_choice[s + 1]):
                b = p.first_block[k] + p.choice[i]
                most, least, consecutive, before = 0, 2, True, -1
                for at in range(p.block[b], p.block[b] + p.step_rows[k]):
                    v = gradient_of[at]
                    uses = first[v + 1] - first[v]
                    most, least = max(most, uses), min(least, uses)
                    row = self.rows[first[v]] if uses else 0
                    consecutive &= before < 0 or row == before + 1
                    before = row
                row = self.single(gradient_of[p.block[b]])
                p.read_arena[r], p.bag[r] = p.arena_ids[p.block_arena[b]], self.bags
                if most == 0:
                    p.kind[r], p.start[r] = 0, self.indices - phase_begin
                    p.stop[r] = p.start[r]
                elif consecutive and least == 1 and most == 1:
                    p.kind[r], p.start[r], p.stop[r] = 1, row, row + p.step_rows[k]
                else:
                    p.kind[r], p.start[r] = 3 if most > 1 else 2, self.indices
                    for at in range(p.block[b], p.block[b] + p.step_rows[k]):
                        v = gradient_of[at]
                        if most == 1:
                            indices[self.indices] = self.single(v)
                            self.indices += 1
                            continue
                        bags[self.bags] = self.indices - p.start[r]
                        self.bags += 1
                        for u in range(first[v], first[v + 1]):
                            indices[self.indices] = self.rows[u]
                            self.indices += 1
                    p.stop[r] = self.indices
                r += 1
            p.first_read[k + 1] = r
