"""Plans of all phases -> GradientPlan: where gradients of uses are written, how gradients of values are read.

Backward never scatters. Each step writes the gradients of what it read into blocks of its own (a row a
use); the gradient of a value is then gathered from the rows of its uses: a view when each value of a block
has one use and the rows are consecutive, an index when it has at most one (row 0 of each arena is zero), a
sum over bags else. This needs no atomics and is deterministic on every device.

    >>> gradients = plan_gradients(phases, requests, types)       # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxbatch.ir import Plan, Program, offsets
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


@dataclass(frozen=True)
class GradientPlan:
    """Per phase, columns over grad outputs and grad groups in step order.

    `read_*[p]` are over (step, grad output) pairs of phase p; start is a row (view) or a position in
    `indices`; `bag[p]` the position in `bags` of a sum's offsets. `write_start[p]` is over (step, grad group)
    pairs: first row of its block. `capacity` counts rows an arena, the zero row included.
    """

    capacity: np.ndarray  # int64 [types]
    read_kind: list[np.ndarray]
    read_start: list[np.ndarray]
    read_stop: list[np.ndarray]
    bag: list[np.ndarray]
    write_arena: list[np.ndarray]
    write_start: list[np.ndarray]
    request_start: list[int]
    indices: np.ndarray  # int64
    bags: np.ndarray  # int64: offsets of bags, relative to their first index


def plan_gradients(
    phases: Sequence[PhaseGradients],
    requests: Sequence[tuple[int, np.ndarray]],
    types: int,
) -> GradientPlan:
    """requests: (type id, value ids) of each differentiable result tensor that got a gradient."""
    written = [_written_gathers(phase) for phase in phases]
    arena = np.concatenate([np.array([t for t, _ in requests], dtype=np.int64)] + [w.arena for w in written])
    rows = np.concatenate(
        [np.array([len(v) for _, v in requests], dtype=np.int64)] + [w.rows for w in written]
    )
    start, total = segmented_starts(arena, rows, types)
    start += 1  # row 0 is zero
    values = np.concatenate([v for _, v in requests] + [w.entries for w in written])
    use_row = np.repeat(start - offsets(rows)[:-1], rows) + np.arange(len(values))

    count = max(phase.program.values for phase in phases)
    uses = np.bincount(values, minlength=count)
    first_use = offsets(uses)
    row_by_value = use_row[np.argsort(values, kind="stable")]

    read_kind, read_start, read_stop, bag = [], [], [], []
    index_parts: list[np.ndarray] = []
    bag_parts: list[np.ndarray] = []
    index_base = bag_base = 0
    for phase in phases:
        reads = _read_blocks(phase, uses, first_use, row_by_value)
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
        read_kind=read_kind,
        read_start=read_start,
        read_stop=read_stop,
        bag=bag,
        write_arena=[w.arena for w in written],
        write_start=[start[bounds[i + 1] : bounds[i + 2]] for i in range(len(phases))],
        request_start=start[: len(requests)].tolist(),
        indices=np.concatenate(index_parts),
        bags=np.concatenate(bag_parts),
    )


@dataclass(frozen=True)
class _Written:
    arena: np.ndarray
    rows: np.ndarray
    entries: np.ndarray


def _flat(choices: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """A ragged table as (offsets, flat)."""
    counts = np.array([len(c) for c in choices], dtype=np.int64)
    return offsets(counts), np.array([x for c in choices for x in c], dtype=np.int64)


def _pick(choices: Sequence[tuple[int, ...]], step_signature: np.ndarray, base: np.ndarray) -> np.ndarray:
    """For each step, base[step] + each of its signature's choices, in step order."""
    first, flat = _flat(choices)
    counts = np.diff(first)[step_signature]
    within = np.arange(int(counts.sum())) - np.repeat(offsets(counts)[:-1], counts)
    return np.repeat(base, counts) + flat[np.repeat(first[step_signature], counts) + within]


def _written_gathers(phase: PhaseGradients) -> _Written:
    plan = phase.plan
    gathers = _pick(phase.grad_groups, plan.step_signature, plan.first_gather[:-1])
    rows = plan.gather_rows[gathers]
    begin = plan.entry_offsets[gathers]
    spread = np.repeat(begin - offsets(rows)[:-1], rows) + np.arange(int(rows.sum()))
    return _Written(phase.arena_ids[plan.gather_arena[gathers]], rows, plan.entries[spread])


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
    sizes = np.repeat(plan.step_rows, np.diff(plan.first_block))
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
    phase: PhaseGradients, uses: np.ndarray, first_use: np.ndarray, row_by_value: np.ndarray
) -> _Reads:
    plan = phase.plan
    first, value = value_of_rows(phase.program, plan)
    blocks = _pick(phase.grad_outputs, plan.step_signature, plan.first_block[:-1])
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

    row_summed = np.repeat(summed, rows)
    taken = np.where(row_summed, counts, np.repeat(kind == GRADIENT_INDEX, rows))
    where = offsets(taken)
    spread = np.arange(int(where[-1])) - np.repeat(where[:-1], taken)
    source = np.repeat(first_use[value], taken) + spread
    indices = np.where(
        np.repeat(row_summed, taken),
        row_by_value[np.minimum(source, len(row_by_value) - 1)],
        np.repeat(single, taken),
    )
    start, stop = where[begin[:-1]], where[begin[1:]]
    bags = (where[:-1] - np.repeat(start, rows))[row_summed]
    bag = offsets(np.where(summed, rows, 0))[:-1]
    first_row = single[begin[:-1]]
    is_view = kind == GRADIENT_VIEW
    start = np.where(is_view, first_row, start)
    stop = np.where(is_view, first_row + rows, stop)
    return _Reads(kind, start, stop, bag, indices, bags)
