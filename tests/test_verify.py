"""Each invariant of each form, broken; the message names it and shows the line."""

from __future__ import annotations

import dataclasses
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given

from fxbatch.batched_graph import BatchedGraph
from fxbatch.errors import VerifyError
from fxbatch.ir import INDEX, Layout, Plan, Program, Schedule
from fxbatch.passes.fold import batch_calls
from fxbatch.passes.plan import plan_arenas
from fxbatch.passes.schedule import batch_by_agenda
from fxbatch.verify import verify_batched_graph, verify_plan, verify_program, verify_schedule
from tests.programs import programs, tree_lstm_program

PROGRAM = tree_lstm_program([((1, 2), (3, 4)), (5, 6)])
SCHEDULE = batch_by_agenda(PROGRAM)
CELL = 6  # the first call of `cell`; it reads values 2, 3, 6, 7


def changed(array: np.ndarray, index: Any, value: int) -> np.ndarray:
    out = array.copy()
    out[index] = value
    return out


def replace(**columns: Any) -> Program:
    return dataclasses.replace(PROGRAM, **columns)


def test_the_forms_are_right_before_they_are_broken() -> None:
    verify_program(PROGRAM)
    verify_schedule(PROGRAM, SCHEDULE)
    verify_batched_graph(batch_calls(PROGRAM, SCHEDULE))
    verify_plan(PROGRAM, SCHEDULE, PLAN)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (replace(sig=changed(PROGRAM.sig, CELL, 9)), "call 6 has signature 9, of 5"),
        (replace(inputs=PROGRAM.inputs[:-1]), "inputs, but there are"),
        (replace(instance=PROGRAM.instance[:-1]), "instance entries"),
        (replace(inputs=changed(PROGRAM.inputs, 4, 999)), r"input v999 does not exist.*\n.*cell"),
        (replace(inputs=changed(PROGRAM.inputs, 4, -1)), "input v-1 does not exist"),
        (replace(inputs=changed(PROGRAM.inputs, 4, 9)), "input v9 is not computed before its reader.*cycle"),
        (replace(inputs=changed(PROGRAM.inputs, 4, 0)), r"cell: input 0 takes f32\[4\], got i64\[\]"),
        (replace(instance=changed(PROGRAM.instance, 0, 2)), "instance 2 does not exist: there are 2"),
        (replace(outputs=np.array([999])), "output v999 is not reachable"),
        (replace(known=2), "2 known values, but types for 0"),
        (replace(known=1, early_types=np.array([7])), "a known value has a type that is none of"),
        (replace(constants={}), r"6 calls, but a payload of 0"),
        (replace(constants={0: [torch.zeros(2)] * 6}), r"a payload has shape \(2,\) and dtype torch.float32"),
    ],
)
def test_broken_programs(program: Program, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_program(program)


def broken_schedules() -> list[tuple[Schedule, str]]:
    order, offsets = SCHEDULE.order, SCHEDULE.offsets
    swapped = order.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    merged = np.delete(offsets, len(offsets) - 3)  # the two steps of `cell` in one
    return [
        (Schedule(order, offsets[:-1]), "offsets must rise from 0 to"),
        (Schedule(order, np.append(offsets, offsets[-1])), "no step empty"),
        (Schedule(changed(order, 0, order[1]), offsets), "is in 0 steps, expected exactly one"),
        (Schedule(changed(order, 0, 99), offsets), "the schedule has call 99"),
        (Schedule(swapped, offsets), "mixes signatures"),
        (Schedule(order, merged), "is in the same step as call"),
        (
            Schedule(np.concatenate([order[6:12], order[:6], order[12:]]), offsets),
            "is in an earlier step than",
        ),
    ]


@pytest.mark.parametrize(("schedule", "message"), broken_schedules())
def test_broken_schedules(schedule: Schedule, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_schedule(PROGRAM, schedule)


def edited(edit: Any) -> BatchedGraph:
    graph = nx.DiGraph(batch_calls(PROGRAM, SCHEDULE).graph)
    edit(graph)
    return BatchedGraph(PROGRAM, graph, "edited")


def set_read(graph: nx.DiGraph, **fields: Any) -> None:
    (read,) = graph.edges["b1", "b2"]["reads"]
    graph.edges["b1", "b2"]["reads"] = (dataclasses.replace(read, **fields),)


def set_calls(graph: nx.DiGraph, calls: np.ndarray) -> None:
    graph.nodes["b1"]["node"] = dataclasses.replace(graph.nodes["b1"]["node"], calls=calls)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda g: g.add_edge("b4", "b1", reads=()), "the edited graph has a cycle"),
        (lambda g: g.remove_edge("b1", "b2"), "row 0 of input 0 is read 0 times, expected once"),
        (
            lambda g: set_read(g, rows=np.arange(6)[::-1]),
            r"reads wrong values from b1.*\n.*b2 depth 2: batch",
        ),
        (lambda g: set_read(g, rows=np.arange(6) + 1), "reads rows outside the 6 rows of b1"),
        (lambda g: set_read(g, places=np.arange(6) + 1), "places rows outside its 6 rows"),
        (lambda g: set_read(g, output=3), "reads output 3 of b1, which has 1"),
        (lambda g: set_calls(g, SCHEDULE.steps()[1][:-1]), "is in 0 batches, expected exactly one"),
        (lambda g: set_calls(g, np.arange(6)), "node b1 mixes signatures"),
    ],
)
def test_broken_batched_graphs(edit: Any, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_batched_graph(edited(edit))


PLAN = plan_arenas(PROGRAM, SCHEDULE, [None] * len(PROGRAM.signatures))


def replan(**columns: Any) -> Plan:
    return dataclasses.replace(PLAN, **columns)


INDEXED = int(np.argmax(PLAN.gather_kind == INDEX))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            replan(indices=changed(PLAN.indices, 0, PLAN.indices[0] + 1)),
            r"wants v\d+ in row 0 of input .*finds",
        ),
        (replan(indices=changed(PLAN.indices, 0, 10_000)), "has an index outside"),
        (replan(indices=PLAN.indices[:-1]), "of the index buffer, which has"),
        (replan(gather_start=changed(PLAN.gather_start, 1, 20)), "finds nothing yet"),
        (
            replan(gather_arena=changed(PLAN.gather_arena, 1, 0)),
            r"step 2 reads a0 of i64\[\], takes f32\[4\]",
        ),
        (replan(gather_arena=changed(PLAN.gather_arena, 1, 5)), "reads arena a5, of 2"),
        (replan(gather_rows=changed(PLAN.gather_rows, 1, 3)), "gathers 3 rows, expected 6"),
        (replan(block_start=changed(PLAN.block_start, 3, 0)), "row_of_value disagrees with its block"),
        (replan(block_start=changed(PLAN.block_start, 3, 999)), "writes outside a1"),
        (replan(step_rows=changed(PLAN.step_rows, 1, 5)), "has 5 rows for 6 calls"),
        (replan(step_signature=changed(PLAN.step_signature, 1, 2)), "step 1 mixes signatures"),
        (replan(step_offset=changed(PLAN.step_offset, 4, 0)), r"step 4 has offset 0, expected \d"),
        (replan(constant_order={0: np.arange(6)[::-1]}), "stacks its constants in another order"),
        (replan(row_of_value=PLAN.row_of_value[:-1]), "rows for"),
    ],
)
def test_broken_plans(plan: Plan, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_plan(PROGRAM, SCHEDULE, plan)


def test_a_block_written_over_while_it_is_live() -> None:
    """The second output of a step goes where its first output is, which the next step reads."""
    block = int(PLAN.first_block[3])
    start = changed(PLAN.block_start, block + 1, int(PLAN.block_start[block]))
    rows, calls = PLAN.row_of_value.copy(), SCHEDULE.steps()[3]
    rows[PROGRAM.first_value[calls] + 1] = start[block] + np.arange(len(calls))
    with pytest.raises(VerifyError, match=r"step 4 wants v\d+ in row 0 of input \[0\], but finds v\d+"):
        verify_plan(PROGRAM, SCHEDULE, replan(block_start=start, row_of_value=rows))


@given(programs(known=False))
def test_plans_of_random_programs_are_right(program: Program) -> None:
    layouts = [None] * len(program.signatures)
    schedule = batch_by_agenda(program)
    verify_plan(program, schedule, plan_arenas(program, schedule, layouts))


def test_plans_with_wide_groups_are_right() -> None:
    groups = [tuple((i,) for i in range(len(s.inputs))) for s in PROGRAM.signatures]
    groups[3] = ((0, 2), (1, 3))  # `cell`
    plan = plan_arenas(PROGRAM, SCHEDULE, [Layout(g) for g in groups])
    verify_plan(PROGRAM, SCHEDULE, plan, groups)
    with pytest.raises(VerifyError, match="reads 2 groups, expected 4"):
        verify_plan(PROGRAM, SCHEDULE, plan)
