"""Plans against brute force: each step reads what the program says, from rows that are written."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxbatch.ir import Layout, Plan, Program, Schedule
from fxbatch.passes.gradients import (
    GRADIENT_INDEX,
    GRADIENT_SUM,
    GRADIENT_VIEW,
    NOTHING,
    PhaseGradients,
    plan_gradients,
)
from fxbatch.passes.plan import plan_arenas
from fxbatch.passes.schedule import batch_by_agenda, batch_by_depth
from fxbatch.passes.signature_graph import find_needs
from tests import programs as P


def wide_layouts(program: Program) -> list[Layout | None]:
    """Every pair of neighbouring inputs of one type as one group, the others alone."""
    found: list[Layout | None] = []
    for signature in program.signatures:
        groups: list[tuple[int, ...]] = []
        i = 0
        while i < len(signature.inputs):
            if i + 1 < len(signature.inputs) and signature.inputs[i] == signature.inputs[i + 1]:
                groups.append((i + 1, i) if i % 2 else (i, i + 1))
                i += 2
            else:
                groups.append((i,))
                i += 1
        found.append(Layout(tuple(groups)))
    return found


def check_plan(
    program: Program, schedule: Schedule, plan: Plan, layouts: list[Layout | None], *, reuse: bool = False
) -> None:
    """Run the plan on names instead of numbers: a row holds the id of the value that is in it."""
    arenas: list[dict[int, int]] = [{} for _ in plan.arenas]
    value_type = program.type_of_value
    for step, calls in zip(plan.steps, schedule.steps(), strict=True):
        assert step.rows == len(calls)
        signature = program.signatures[step.signature]
        layout = layouts[step.signature] or Layout(tuple((i,) for i in range(len(signature.inputs))))
        assert len(step.inputs) == len(layout.groups)
        for gather, group in zip(step.inputs, layout.groups, strict=True):
            if gather.kind == "view":
                rows = list(range(gather.start, gather.start + gather.rows))
            elif gather.kind == "broadcast":
                rows = [gather.start] * gather.rows
            else:
                rows = plan.indices[gather.start : gather.start + gather.rows].tolist()
            read = [arenas[gather.arena][row] for row in rows]
            wanted = [
                int(program.inputs[program.input_offsets[c] + slot]) for c in calls.tolist() for slot in group
            ]
            assert read == wanted
        for j, (arena, start) in enumerate(step.outputs):
            for position, c in enumerate(calls.tolist()):
                value = int(program.first_value[c]) + j
                assert plan.arenas[arena] == program.types[value_type[value]]
                assert reuse or start + position not in arenas[arena], "row written twice"
                arenas[arena][start + position] = value
                assert plan.row_of_value[value] == start + position
    for v in program.outputs.tolist():
        assert arenas[value_type[v]][int(plan.row_of_value[v])] == v, "a result was written over"
    assert [len(a) for a in arenas] == plan.capacity.tolist()


def workloads() -> list[Program]:
    rng = random.Random(3)
    trees = [P.random_tree(rng, n) for n in (1, 2, 5, 9, 14)]
    return [
        P.tree_lstm_program(trees),
        P.bilstm_program([3, 1, 6]),
        P.chain_program(20, 3),
        P.lattice_program(rng, [4, 9]),
    ]


@pytest.mark.parametrize("policy", [batch_by_depth, batch_by_agenda])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("wide", [False, True])
def test_plan_reads_what_the_program_says(policy, which: int, wide: bool) -> None:
    program = workloads()[which]
    schedule = policy(program)
    layouts = wide_layouts(program) if wide else [None] * len(program.signatures)
    check_plan(program, schedule, plan_arenas(program, schedule, layouts), layouts)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_plans_of_random_programs(data: st.DataObject) -> None:
    program = data.draw(P.programs())
    if not len(program) or program.known:
        return
    schedule = batch_by_agenda(program)
    layouts = wide_layouts(program)
    check_plan(program, schedule, plan_arenas(program, schedule, layouts), layouts)


@pytest.mark.parametrize("which", range(4))
def test_rows_are_used_again_when_their_last_reader_has_run(which: int) -> None:
    program = workloads()[which]
    schedule = batch_by_agenda(program)
    layouts = wide_layouts(program)
    plan = plan_arenas(program, schedule, layouts, reuse=True)
    check_plan(program, schedule, plan, layouts, reuse=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reuse_in_random_programs(data: st.DataObject) -> None:
    program = data.draw(P.programs())
    if not len(program) or program.known:
        return
    schedule, layouts = batch_by_depth(program), wide_layouts(program)
    plan = plan_arenas(program, schedule, layouts, reuse=True)
    check_plan(program, schedule, plan, layouts, reuse=True)
    assert (plan.capacity <= plan_arenas(program, schedule, layouts).capacity).all()


def test_memory_of_a_deep_chain_is_bounded_by_its_live_values() -> None:
    program = P.chain_program(1000, 4)
    schedule = batch_by_depth(program)
    layouts: list[Layout | None] = [None] * len(program.signatures)
    assert int(plan_arenas(program, schedule, layouts, reuse=True).capacity.sum()) <= 4 * 4
    assert int(plan_arenas(program, schedule, layouts).capacity.sum()) > 4000


def test_a_wrong_plan_is_seen() -> None:
    program = workloads()[0]
    schedule = batch_by_agenda(program)
    layouts: list[Layout | None] = [None] * len(program.signatures)
    plan = plan_arenas(program, schedule, layouts)
    plan.indices[0] += 1
    with pytest.raises((AssertionError, KeyError)):
        check_plan(program, schedule, plan, layouts)


def test_consecutive_rows_are_views_and_one_row_is_a_broadcast() -> None:
    program = P.chain_program(3, 4)
    plan = plan_arenas(program, batch_by_depth(program), [None] * len(program.signatures))
    kinds = [[g.kind for g in step.inputs] for step in plan.steps]
    assert ["index", "view"] in kinds or ["view", "view"] in kinds
    shared = P.ProgramBuilder(2)
    zero = shared.constant(1.0)
    outputs = [shared.call("f", zero, instance=i) for i in range(2)]
    program = shared.program(*outputs)
    plan = plan_arenas(program, batch_by_depth(program), [None] * len(program.signatures))
    assert plan.steps[-1].inputs[0].kind == "broadcast"
    assert not len(plan.indices)


def check_gradients(
    program: Program,
    schedule: Schedule,
    layouts: list[Layout | None],
    results: list[int],
) -> None:
    """Count paths instead of multiplying Jacobians: each call passes the sum of its outputs' gradients on."""
    plan = plan_arenas(program, schedule, layouts)
    grad_outputs = [tuple(range(len(s.outputs))) for s in program.signatures]
    groups = [
        ()
        if s.operation.kind in ("constant", "number")
        else tuple(range(len(layout.groups if layout else s.inputs)))
        for s, layout in zip(program.signatures, layouts, strict=True)
    ]
    ids = np.arange(len(plan.arenas))
    by_type: dict[int, list[int]] = {}
    for v in results:
        by_type.setdefault(int(program.type_of_value[v]), []).append(v)
    requests = [(t, np.array(v, dtype=np.int64)) for t, v in by_type.items()]
    phase = PhaseGradients(program, plan, groups, grad_outputs, ids)
    found = plan_gradients([phase], requests, len(plan.arenas))
    arenas = [np.full(int(n), -(10**9), dtype=object) for n in found.capacity]
    for arena in arenas:
        arena[0] = 0
    for (t, values), start in zip(requests, found.request_start, strict=True):
        arenas[t][start : start + len(values)] = 1

    expected: dict[int, int] = dict.fromkeys(range(program.values), 0)
    for v in results:
        expected[v] += 1
    for c in range(len(program) - 1, -1, -1):
        made = range(int(program.first_value[c]), int(program.first_value[c + 1]))
        total = sum(expected[v] for v in made)
        for v in program.inputs[program.input_offsets[c] : program.input_offsets[c + 1]].tolist():
            expected[v] += total

    read = sum(len(grad_outputs[s]) for s in plan.step_signature.tolist())
    write = sum(len(groups[s]) for s in plan.step_signature.tolist())
    for k in range(len(plan) - 1, -1, -1):
        step, calls = plan.steps[k], schedule.steps()[k]
        read -= len(grad_outputs[step.signature])
        write -= len(groups[step.signature])
        totals = [0] * len(calls)
        for j, (arena, _) in enumerate(step.outputs):
            kind, start, stop = (x[0][read + j] for x in (found.read_kind, found.read_start, found.read_stop))
            if kind == NOTHING:
                got = [0] * len(calls)
            elif kind == GRADIENT_VIEW:
                got = arenas[arena][start:stop].tolist()
            elif kind == GRADIENT_INDEX:
                got = arenas[arena][found.indices[start:stop]].tolist()
            else:
                assert kind == GRADIENT_SUM
                bags = found.bags[found.bag[0][read + j] :][: len(calls)].tolist() + [stop - start]
                rows = found.indices[start:stop]
                got = [sum(arenas[arena][rows[a:b]].tolist()) for a, b in itertools.pairwise(bags)]
            assert got == [expected[int(program.first_value[c]) + j] for c in calls.tolist()]
            totals = [a + b for a, b in zip(totals, got, strict=True)]
        for g, gather in zip(range(len(groups[step.signature])), step.inputs, strict=False):
            start, arena = found.write_start[0][write + g], found.write_arena[0][write + g]
            members = gather.rows // len(calls)
            arenas[arena][start : start + gather.rows] = np.repeat(np.array(totals, dtype=object), members)
    assert read == write == 0


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("wide", [False, True])
def test_gradients_sum_over_uses(which: int, wide: bool) -> None:
    program = workloads()[which]
    layouts = wide_layouts(program) if wide else [None] * len(program.signatures)
    check_gradients(program, batch_by_agenda(program), layouts, program.outputs.tolist())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gradients_of_random_programs(data: st.DataObject) -> None:
    program = data.draw(P.programs())
    if not len(program) or program.known or not len(program.outputs):
        return
    results = program.outputs.tolist()
    check_gradients(program, batch_by_depth(program), wide_layouts(program), results)
    check_gradients(program, batch_by_agenda(program), [None] * len(program.signatures), results)


def test_needs_follow_the_signature_graph() -> None:
    build = P.ProgramBuilder(1)
    x = build.constant(1.0)
    y = build.call("f", x)
    z = build.call("g", y)
    program = build.program(z)
    f = [s.name for s in program.signatures].index("f")
    shared = [i == f for i in range(len(program.signatures))]
    needs = find_needs(program, shared, {})
    assert needs.inputs == ((), (False,), (True,))
    assert find_needs(program, [False] * 3, {}).inputs == ((), (False,), (False,))
