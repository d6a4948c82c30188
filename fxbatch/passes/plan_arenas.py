"""Program + Schedule -> Plan: where each value lives and what each step reads.

Each output of a step is one contiguous block of rows in the arena of its tensor type; blocks follow one
another in step order. A step's input group is read as a view when its rows are consecutive, as a
broadcast when they are one row, else through an index. All of it is vectorised over calls and entries.

    >>> plan = plan_arenas(program, schedule, layouts)      # doctest: +SKIP
    >>> plan.steps[3].inputs[0]                              # doctest: +SKIP
    Gather(arena=1, kind='view', start=64, rows=32)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxbatch.ir import BROADCAST, INDEX, VIEW, Layout, Plan, Program, Schedule, Signature, offsets
from fxbatch.passes.native import Native, empty_column
from fxbatch.passes.reuse_rows import reuse_rows
from fxbatch.passes.survey import count_values


@dataclass(frozen=True)
class SlotTable:
    """Per signature slot (flat over signatures): where its rows go among the step's gathered rows."""

    first_slot: np.ndarray  # int64 [signatures + 1]
    prior: np.ndarray  # members of earlier groups of the signature
    size: np.ndarray  # members of the slot's group
    member: np.ndarray  # position in the group
    first_group: np.ndarray  # int64 [signatures + 1]
    group_size: np.ndarray  # int64 [groups]
    group_type: np.ndarray  # int64 [groups]: type id of the members


def tabulate_slots(program: Program, layouts: Sequence[Layout | None]) -> SlotTable:
    """The layouts of all signatures as columns; None means one group a slot."""
    prior: list[int] = []
    size: list[int] = []
    member: list[int] = []
    group_size: list[int] = []
    group_type: list[int] = []
    groups_of = []
    type_ids = program.type_ids
    for signature, layout in zip(program.signatures, layouts, strict=True):
        arity = len(signature.inputs)
        groups = tuple((i,) for i in range(arity)) if layout is None else layout.groups
        rows = [(0, 0, 0)] * arity
        before = 0
        for group in groups:
            for position, slot in enumerate(group):
                rows[slot] = (before, len(group), position)
            before += len(group)
            group_size.append(len(group))
            group_type.append(type_ids[signature.inputs[group[0]]])
        for a, b, c in rows:
            prior.append(a)
            size.append(b)
            member.append(c)
        groups_of.append(len(groups))
    as_array = lambda x: np.array(x, dtype=np.int64)  # noqa: E731
    return SlotTable(
        offsets(program.arity), as_array(prior), as_array(size), as_array(member),
        offsets(as_array(groups_of)), as_array(group_size), as_array(group_type),
    )  # fmt: skip


def plan_arenas(
    program: Program,
    schedule: Schedule,
    layouts: Sequence[Layout | None],
    *,
    slots: SlotTable | None = None,
    known_rows: np.ndarray | None = None,
    used: np.ndarray | None = None,
    run_before: np.ndarray | None = None,
    reuse: bool = False,
    into: np.ndarray | None = None,
) -> Plan:
    """The plan of a program (or of one phase of it).

    layouts: one a signature. known_rows: int64 [program.known], the rows of earlier phases' values;
    used: int64 [types], rows of each arena already taken; run_before: int64 [signatures], rows of each
    signature already run. reuse: rows are used again when their last reader has run (inference).
    into: int64 with room for all values, where `row_of_value` is made: with the known rows at the start of it,
    many phases copy none.
    """
    table = tabulate_slots(program, layouts) if slots is None else slots
    if Native.loops is not None:
        return _plan_in_c(program, schedule, table, known_rows, used, run_before, reuse, into)
    order, first = schedule.order, schedule.offsets
    rows = first[1:] - first[:-1]
    step_sig = program.sig[order[first[:-1]]].astype(np.int64)
    blocks = _lay_out_blocks(program, step_sig, rows, used)
    if reuse:
        assert used is None or not used.any(), "rows of earlier phases may be read again"
        blocks = _lay_out_again(program, schedule, blocks, rows)
    row_of_value = _place_values(program, schedule, rows, blocks, known_rows, into)
    first_gather, gathers = _lay_out_gathers(table, step_sig, rows)
    entries = _entries(program, table, schedule, step_sig, rows)
    start, kind, indices = _classify(row_of_value[entries], gathers.offsets, gathers.size)
    return Plan(
        arenas=program.types,
        capacity=blocks.capacity,
        step_signature=step_sig,
        step_rows=rows,
        step_offset=_running_offsets(step_sig, rows, len(program.signatures), run_before),
        first_gather=first_gather,
        gather_arena=gathers.arena,
        gather_kind=kind,
        gather_start=start,
        gather_rows=gathers.offsets[1:] - gathers.offsets[:-1],
        first_block=blocks.first,
        block_arena=blocks.arena,
        block_start=blocks.start,
        indices=indices,
        entries=entries,
        entry_offsets=gathers.offsets,
        row_of_value=row_of_value,
        constant_order=_order_constants(program, schedule, step_sig),
    )


def _plan_in_c(
    program: Program,
    schedule: Schedule,
    table: SlotTable,
    known_rows: np.ndarray | None,
    used: np.ndarray | None,
    run_before: np.ndarray | None,
    reuse: bool,
    into: np.ndarray | None,
) -> Plan:
    """What follows below, in one pass over the steps."""
    assert not reuse or used is None or not used.any(), "rows of earlier phases may be read again"
    c = program.columns
    *columns, unordered = Native.loops.plan(
        program.sig, schedule.order, schedule.offsets, program.inputs, program.outputs,
        c.arity, c.width, c.first_output, c.output_types, c.constant,
        table.first_slot, table.prior, table.size, table.member,
        table.first_group, table.group_size, table.group_type,
        known_rows, used, run_before, into, empty_column, program.known, len(c.types), reuse,
    )  # fmt: skip
    capacity, step_sig, step_rows, step_offset, first_gather, arena, kind, start, rows = columns[:9]
    first_block, block_arena, block_start, entry_offsets, entries, row_of_value, indices = columns[9:]
    order = {
        s: _order_of(program, schedule, step_sig, s) if s in unordered else None for s in program.constants
    }
    return Plan(
        c.types, capacity, step_sig, step_rows, step_offset, first_gather, arena, kind, start, rows,
        first_block, block_arena, block_start, indices, entries, entry_offsets, row_of_value, order,
    )  # fmt: skip


@dataclass(frozen=True)
class _Blocks:
    first: np.ndarray
    arena: np.ndarray
    start: np.ndarray
    capacity: np.ndarray


def _lay_out_blocks(
    program: Program, step_sig: np.ndarray, rows: np.ndarray, used: np.ndarray | None
) -> _Blocks:
    width = program.width[step_sig]
    first = offsets(width)
    columns = program.columns
    out_types = columns.output_types.astype(np.int64)
    within = np.arange(first[-1]) - np.repeat(first[:-1], width)
    arena = out_types[np.repeat(columns.first_output[step_sig], width) + within] if len(out_types) else within
    size = rows.repeat(width)
    types = len(program.types)
    base = np.zeros(types, dtype=np.int64) if used is None else used
    start, total = segmented_starts(arena, size, types)
    return _Blocks(first, arena, start + base[arena] if len(arena) else start, base + total)


def _lay_out_again(program: Program, schedule: Schedule, blocks: _Blocks, rows: np.ndarray) -> _Blocks:
    size = rows.repeat(blocks.first[1:] - blocks.first[:-1])
    start, end = reuse_rows(program, schedule, blocks.first, blocks.arena, size, len(program.types))
    return _Blocks(blocks.first, blocks.arena, start, end)


def segmented_starts(key: np.ndarray, size: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """For pieces in order, each with a key: where each begins among the pieces of its key; total a key."""
    total = np.bincount(key, weights=size, minlength=keys).astype(np.int64)
    by_key = np.argsort(key, kind="stable")
    ends = np.cumsum(size[by_key])
    start = np.empty(len(key), dtype=np.int64)
    start[by_key] = ends - size[by_key] - np.repeat(offsets(total)[:-1], np.bincount(key, minlength=keys))
    return start, total


def _running_offsets(
    step_sig: np.ndarray, rows: np.ndarray, signatures: int, run_before: np.ndarray | None
) -> np.ndarray:
    start, _ = segmented_starts(step_sig, rows, signatures)
    return start if run_before is None else start + run_before[step_sig]


def _place_values(
    program: Program,
    schedule: Schedule,
    rows: np.ndarray,
    blocks: _Blocks,
    known_rows: np.ndarray | None,
    into: np.ndarray | None,
) -> np.ndarray:
    row_of_value = (
        np.empty(count_values(program), dtype=np.int64) if into is None else into[: count_values(program)]
    )
    if known_rows is not None:
        row_of_value[: program.known] = known_rows
    order, first = schedule.order, schedule.offsets
    position = np.arange(len(order)) - np.repeat(first[:-1], rows)
    step_of = np.repeat(np.arange(len(rows)), rows)
    width = program.width[program.sig[order]]
    if len(width) and int(width.min()) == int(width.max()) == 1:
        row_of_value[program.first_value[order]] = blocks.start[blocks.first[step_of]] + position
        return row_of_value
    within = np.arange(int(width.sum())) - np.repeat(offsets(width)[:-1], width)
    value = np.repeat(program.first_value[order], width) + within
    block = np.repeat(blocks.first[step_of], width) + within
    row_of_value[value] = blocks.start[block] + position.repeat(width)
    return row_of_value


@dataclass(frozen=True)
class _Gathers:
    arena: np.ndarray
    size: np.ndarray  # members
    offsets: np.ndarray  # entries


def _lay_out_gathers(table: SlotTable, step_sig: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, _Gathers]:
    groups = (table.first_group[1:] - table.first_group[:-1])[step_sig]
    first_gather = offsets(groups)
    within = np.arange(first_gather[-1]) - np.repeat(first_gather[:-1], groups)
    group = np.repeat(table.first_group[step_sig], groups) + within
    size = table.group_size[group]
    return first_gather, _Gathers(table.group_type[group], size, offsets(size * rows.repeat(groups)))


def _entries(
    program: Program, table: SlotTable, schedule: Schedule, step_sig: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """The values that each step reads, in the order of its gathers."""
    order, first = schedule.order, schedule.offsets
    entries = np.empty(len(program.inputs), dtype=np.int64)
    position = np.arange(len(order)) - np.repeat(first[:-1], rows)
    step_of = np.repeat(np.arange(len(rows)), rows)
    arity = program.arity[program.sig[order]]
    within = np.arange(int(arity.sum())) - np.repeat(offsets(arity)[:-1], arity)
    value = program.inputs[np.repeat(program.input_offsets[order], arity) + within]
    slot = np.repeat(table.first_slot[program.sig[order]], arity) + within
    step_base = offsets(rows * program.arity[step_sig])
    target = np.repeat(step_base[step_of], arity)
    target += table.prior[slot] * np.repeat(rows[step_of], arity)
    target += position.repeat(arity) * table.size[slot] + table.member[slot]
    entries[target] = value
    return entries


def _classify(
    rows: np.ndarray, bounds: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per gather: start and kind; and the index buffer, which holds only what is really indexed."""
    begin = bounds[:-1]
    if not len(begin):
        return begin, begin, rows
    jump = np.empty(len(rows), dtype=np.int64)
    jump[0] = 1
    np.subtract(rows[1:], rows[:-1], out=jump[1:])
    not_next, not_same = jump != 1, jump != 0
    not_next[begin] = False
    not_same[begin] = False
    view = np.add.reduceat(not_next, begin, dtype=np.int64) == 0
    same = (np.add.reduceat(not_same, begin, dtype=np.int64) == 0) & (size == 1)
    kind = np.where(view, VIEW, np.where(same, BROADCAST, INDEX))
    length = bounds[1:] - bounds[:-1]
    indexed = kind == INDEX
    kept = rows[indexed.repeat(length)]
    where = offsets(np.where(indexed, length, 0))[:-1]
    return np.where(indexed, where, rows[begin]), kind, kept


def _order_constants(
    program: Program, schedule: Schedule, step_sig: np.ndarray
) -> dict[int, np.ndarray | None]:
    return {s: _order_of(program, schedule, step_sig, s) for s in program.constants}


def _order_of(program: Program, schedule: Schedule, step_sig: np.ndarray, s: int) -> np.ndarray | None:
    """The permutation of a signature's payload, None where its calls run as they were recorded."""
    order, first = schedule.order, schedule.offsets
    calls = [order[first[k] : first[k + 1]] for k in np.flatnonzero(step_sig == s).tolist()]
    joined = calls[0] if len(calls) == 1 else np.concatenate(calls) if calls else order[:0]
    in_order = len(joined) < 2 or bool((joined[1:] > joined[:-1]).all())
    return None if in_order else np.argsort(np.argsort(joined))


def is_constant(signature: Signature) -> bool:
    """Whether calls of it have a payload instead of a body."""
    return signature.operation.kind in ("constant", "number")
