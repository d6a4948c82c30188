"""Plans of all phases -> GradientPlan: where gradients of uses are written, how gradients of values are read.

Backward never scatters. Each step writes the gradients of what it read into blocks of its own (a row a
use); the gradient of a value is then gathered from the rows of its uses: a view when each value of a block
has one use and the rows are consecutive, an index when it has at most one (row 0 of each arena is zero), a
sum over bags else. This needs no atomics and is deterministic on every device.

A step whose operation hands its output's gradient on as it is (an addition) isn't run where each of its outputs
has at most one use: the gradient of what it read IS the row of that use, through chains of any length.

    >>> gradients = plan_gradients(phases, requests, types)       # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxbatch.ir import Plan, Program, offsets
from fxbatch.passes.frontier import grouped
from fxbatch.passes.native import Native, empty_column
from fxbatch.passes.plan_arenas import segmented_starts

NOTHING, GRADIENT_VIEW, GRADIENT_INDEX, GRADIENT_SUM = 0, 1, 2, 3


@dataclass(frozen=True)
class PhaseGradients:
    """What backward knows of one phase. The tuples are one a signature."""

    program: Program
    plan: Plan
    grad_groups: Sequence[tuple[int, ...]]  # groups whose gradients the operation's backward gives
    grad_outputs: Sequence[tuple[int, ...]]  # outputs whose gradients it takes
    arena_ids: np.ndarray  # int64 [plan.arenas]: number of each arena among the run's types
    hands_on: Sequence[
        bool
    ] = ()  # whether all its grad groups get the gradient of its one grad output as it is


@dataclass(frozen=True)
class GradientPlan:
    """Per phase, columns over grad outputs and grad groups in step order.

    `read_*[p]` are over (step, grad output) pairs of phase p; start is a row (view) or a position in
    `indices`; `bag[p]` the position in `bags` of a sum's offsets. `write_start[p]` is over (step, grad group)
    pairs: first row of its block. `first_read[p]` and `first_write[p]` say where the pairs of each step begin.
    `capacity` counts rows an arena, the zero row included. Steps in `passed[p]` are not run: they have no pairs.
    """

    capacity: np.ndarray  # int64 [types]
    passed: list[np.ndarray]  # bool a step
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
    phases: Sequence[PhaseGradients],
    requests: Sequence[tuple[int, np.ndarray]],
    types: int,
) -> GradientPlan:
    """requests: (type id, value ids) of each differentiable result tensor that got a gradient."""
    if Native.loops is not None:
        return _plan_in_c(phases, requests, types)
    count = max(phase.program.values for phase in phases)
    made = [_Made(*value_of_rows(phase.program, phase.plan)) for phase in phases]
    reading = [_read_gathers(phase) for phase in phases]
    passed = _find_passed(phases, made, reading, [v for _, v in requests], count)
    written = [read.choose(~skip) for read, skip in zip(reading, passed, strict=True)]
    arena = np.concatenate([np.array([t for t, _ in requests], dtype=np.int64)] + [w.arena for w in written])
    rows = np.concatenate(
        [np.array([len(v) for _, v in requests], dtype=np.int64)] + [w.rows for w in written]
    )
    start, total = segmented_starts(arena, rows, types)
    start += 1  # row 0 is zero
    values = np.concatenate([v for _, v in requests] + [w.entries for w in written])
    use_row = np.repeat(start - offsets(rows)[:-1], rows) + np.arange(len(values))
    if any(skip.any() for skip in passed):
        values, use_row = _follow(phases, made, reading, passed, values, use_row, count)

    first_use, order = grouped(values, count)
    uses, row_by_value = first_use[1:] - first_use[:-1], use_row[order]

    read_kind, read_start, read_stop, bag = [], [], [], []
    index_parts: list[np.ndarray] = []
    bag_parts: list[np.ndarray] = []
    index_base = bag_base = 0
    for phase, block, skip in zip(phases, made, passed, strict=True):
        reads = _read_blocks(phase, block, ~skip, uses, first_use, row_by_value)
        index_parts.append(reads.indices)
        bag_parts.append(reads.bags)
        indexed = reads.kind >= GRADIENT_INDEX
        read_kind.append(reads.kind)
        read_start.append(np.where(indexed, reads.start + index_base, reads.start))
        read_stop.append(np.where(indexed, reads.stop + index_base, reads.stop))
        bag.append(reads.bag + bag_base)
        index_base += len(reads.indices)
        bag_base += len(reads.bags)

    bounds = offsets(np.array([len(requests)] + [len(w.rows) for w in written], dtype=np.int64))
    return GradientPlan(
        capacity=total + 1,
        passed=passed,
        read_kind=read_kind,
        read_start=read_start,
        read_stop=read_stop,
        bag=bag,
        write_arena=[w.arena for w in written],
        write_start=[start[bounds[i + 1] : bounds[i + 2]] for i in range(len(phases))],
        write_rows=[w.rows for w in written],
        read_arena=[_read_arenas(phase, ~skip) for phase, skip in zip(phases, passed, strict=True)],
        first_read=[_first_of(p, p.grad_outputs, skip) for p, skip in zip(phases, passed, strict=True)],
        first_write=[_first_of(p, p.grad_groups, skip) for p, skip in zip(phases, passed, strict=True)],
        request_start=start[: len(requests)].tolist(),
        indices=np.concatenate(index_parts),
        bags=np.concatenate(bag_parts),
    )


def _plan_in_c(
    phases: Sequence[PhaseGradients], requests: Sequence[tuple[int, np.ndarray]], types: int
) -> GradientPlan:
    """What follows below, in one pass over the steps of all phases."""
    capacity, passed, *columns = Native.loops.plan_gradients(
        [_as_columns(phase) for phase in phases], requests, types, empty_column
    )
    return GradientPlan(capacity, [np.frombuffer(skip, dtype=bool) for skip in passed], *columns)


def _as_columns(phase: PhaseGradients) -> tuple[object, ...]:
    program, plan = phase.program, phase.plan
    c = program.columns
    return (
        program.sig, c.width, c.first_output, c.output_types,
        plan.step_signature, plan.step_rows, plan.first_gather, plan.gather_arena, plan.gather_rows,
        plan.entry_offsets, plan.entries, plan.first_block, plan.block_arena, plan.block_start,
        plan.capacity, plan.row_of_value, phase.arena_ids,
        program.known, phase.grad_groups, phase.grad_outputs, phase.hands_on,
    )  # fmt: skip


def _first_of(phase: PhaseGradients, choices: Sequence[tuple[int, ...]], skip: np.ndarray) -> np.ndarray:
    """Where the pairs of each step begin among all pairs; a passed step has none."""
    counts = np.array([len(c) for c in choices], dtype=np.int64)[phase.plan.step_signature]
    return offsets(np.where(skip, 0, counts))


def _read_arenas(phase: PhaseGradients, chosen: np.ndarray) -> np.ndarray:
    """The arena of each read of these steps, by its number among the run's types."""
    steps, plan = np.flatnonzero(chosen), phase.plan
    blocks = _pick(phase.grad_outputs, plan.step_signature[steps], plan.first_block[steps])
    return phase.arena_ids[plan.block_arena[blocks]]


@dataclass(frozen=True)
class _Gathers:
    """Gathers whose gradients backward gives."""

    step: np.ndarray  # of each gather
    arena: np.ndarray
    rows: np.ndarray
    entries: np.ndarray  # of all gathers

    def choose(self, steps: np.ndarray) -> _Gathers:
        """The gathers of some steps (bool a step)."""
        if steps.all():
            return self
        kept = steps[self.step]
        entries = self.entries[kept.repeat(self.rows)]
        return _Gathers(self.step[kept], self.arena[kept], self.rows[kept], entries)


def _flat(choices: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """A ragged table as (offsets, flat)."""
    counts = np.array([len(c) for c in choices], dtype=np.int64)
    return offsets(counts), np.array([x for c in choices for x in c], dtype=np.int64)


def _pick(choices: Sequence[tuple[int, ...]], step_signature: np.ndarray, base: np.ndarray) -> np.ndarray:
    """For each step, base[step] + each of its signature's choices, in step order."""
    first, flat = _flat(choices)
    counts = (first[1:] - first[:-1])[step_signature]
    within = np.arange(int(counts.sum())) - np.repeat(offsets(counts)[:-1], counts)
    return base.repeat(counts) + flat[np.repeat(first[step_signature], counts) + within]


def _read_gathers(phase: PhaseGradients) -> _Gathers:
    plan = phase.plan
    steps = np.arange(len(plan.step_signature))
    gathers = _pick(phase.grad_groups, plan.step_signature, plan.first_gather[:-1])
    step = np.repeat(
        steps, np.array([len(g) for g in phase.grad_groups], dtype=np.int64)[plan.step_signature]
    )
    rows = plan.gather_rows[gathers]
    entries = _spread(plan.entries, plan.entry_offsets[gathers], rows)
    return _Gathers(step, phase.arena_ids[plan.gather_arena[gathers]], rows, entries)


@dataclass(frozen=True)
class _Made:
    """The values of all blocks, row by row."""

    first: np.ndarray  # position of each block
    value: np.ndarray


def _find_passed(
    phases: Sequence[PhaseGradients],
    made: Sequence[_Made],
    reading: Sequence[_Gathers],
    requested: list[np.ndarray],
    count: int,
) -> list[np.ndarray]:
    """bool a step: whether it hands gradients on and each of its outputs has at most one use."""
    if not any(any(phase.hands_on) for phase in phases):
        return [np.zeros(len(phase.plan.step_signature), dtype=bool) for phase in phases]
    shared = np.bincount(np.concatenate(requested + [r.entries for r in reading]), minlength=count) > 1
    passed = []
    for phase, block in zip(phases, made, strict=True):
        plan = phase.plan
        found = np.array(phase.hands_on, dtype=bool)[plan.step_signature]
        blocks = _handed_on(phase, np.flatnonzero(found))
        before = offsets(shared[block.value].astype(np.int64))
        found[found] = before[block.first[blocks + 1]] == before[block.first[blocks]]
        passed.append(found)
    return passed


def _handed_on(phase: PhaseGradients, steps: np.ndarray) -> np.ndarray:
    """The block whose gradient each of the steps hands on."""
    output = np.array([o[0] if o else 0 for o in phase.grad_outputs], dtype=np.int64)
    return phase.plan.first_block[steps] + output[phase.plan.step_signature[steps]]


def _follow(
    phases: Sequence[PhaseGradients],
    made: Sequence[_Made],
    reading: Sequence[_Gathers],
    passed: Sequence[np.ndarray],
    values: np.ndarray,
    use_row: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The uses, those by passed steps added: their rows are those of the one use of what the step made."""
    read, through = [], []
    for phase, block, reads, skip in zip(phases, made, reading, passed, strict=True):
        chosen = reads.choose(skip)
        read.append(chosen.entries)
        through.append(_spread(block.value, block.first[_handed_on(phase, chosen.step)], chosen.rows))
    used, source = np.concatenate(read), np.concatenate(through)
    row = np.zeros(count, dtype=np.int64)  # what nothing uses has the gradient zero
    row[values] = use_row
    following = np.full(count, -1, dtype=np.int64)
    following[used] = source
    while True:  # each round doubles the length of the chains that have been followed
        further = following[source]
        chained = further >= 0
        if not chained.any():
            break
        source = np.where(chained, further, source)
        following[used] = source
    return np.concatenate([values, used]), np.concatenate([use_row, row[source]])


def _spread(column: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """column[start : start + size] of each piece, one after another."""
    return column[np.repeat(start - offsets(size)[:-1], size) + np.arange(int(size.sum()))]


@dataclass(frozen=True)
class _Reads:
    kind: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    bag: np.ndarray
    indices: np.ndarray
    bags: np.ndarray


def value_of_rows(program: Program, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """(first position of each block, value ids of all blocks row by row)."""
    sizes = plan.step_rows.repeat(plan.first_block[1:] - plan.first_block[:-1])
    first = offsets(sizes)
    made = np.arange(program.known, program.values)
    key_type = program.type_of_value[program.known :]
    count = np.bincount(key_type, minlength=len(plan.arenas))
    per_type = offsets(count)
    by_type = np.empty(len(made), dtype=np.int64)  # values by (arena, row): rows of an arena are dense
    by_type[(per_type[:-1] - plan.capacity + count)[key_type] + plan.row_of_value[program.known :]] = made
    within, _ = segmented_starts(plan.block_arena, sizes, len(plan.arenas))
    begin = per_type[plan.block_arena] + within
    spread = np.repeat(begin - first[:-1], sizes) + np.arange(int(first[-1]))
    return first, by_type[spread]


def _read_blocks(
    phase: PhaseGradients,
    made: _Made,
    chosen: np.ndarray,
    uses: np.ndarray,
    first_use: np.ndarray,
    row_by_value: np.ndarray,
) -> _Reads:
    plan = phase.plan
    first, value = made.first, made.value
    steps = np.flatnonzero(chosen)
    blocks = _pick(phase.grad_outputs, plan.step_signature[steps], plan.first_block[steps])
    none = np.zeros(0, dtype=np.int64)
    if not len(blocks):
        return _Reads(none, none, none, none, none, none)
    rows = first[blocks + 1] - first[blocks]
    begin = offsets(rows)
    value = value[np.repeat(first[blocks] - begin[:-1], rows) + np.arange(int(begin[-1]))]
    counts = uses[value]
    most = np.maximum.reduceat(counts, begin[:-1])
    least = np.minimum.reduceat(counts, begin[:-1])
    summed = most > 1

    single = np.zeros(len(value), dtype=np.int64)
    used = counts > 0
    single[used] = row_by_value[first_use[value[used]]]
    jump = np.ones(len(single), dtype=np.int64)
    np.subtract(single[1:], single[:-1], out=jump[1:])
    jump[begin[:-1]] = 1
    consecutive = np.minimum.reduceat(jump, begin[:-1]) == 1
    consecutive &= np.maximum.reduceat(jump, begin[:-1]) == 1
    view = consecutive & (most == 1) & (least == 1)
    kind = np.where(most == 0, NOTHING, np.where(view, GRADIENT_VIEW, GRADIENT_INDEX))
    kind[summed] = GRADIENT_SUM

    row_summed = summed.repeat(rows)
    taken = np.where(row_summed, counts, np.repeat(kind == GRADIENT_INDEX, rows))
    where = offsets(taken)
    spread = np.arange(int(where[-1])) - np.repeat(where[:-1], taken)
    source = np.repeat(first_use[value], taken) + spread
    indices = np.where(
        row_summed.repeat(taken),
        row_by_value[np.minimum(source, len(row_by_value) - 1)],
        single.repeat(taken),
    )
    start, stop = where[begin[:-1]], where[begin[1:]]
    bags = (where[:-1] - start.repeat(rows))[row_summed]
    bag = offsets(np.where(summed, rows, 0))[:-1]
    first_row = single[begin[:-1]]
    is_view = kind == GRADIENT_VIEW
    start = np.where(is_view, first_row, start)
    stop = np.where(is_view, first_row + rows, stop)
    return _Reads(kind, start, stop, bag, indices, bags)
