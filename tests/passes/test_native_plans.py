"""Plans and gradient plans made in C against their numpy twins: as one phase and as several, and for wrong columns."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxbatch.ir import Layout, Plan, Program, Schedule
from fxbatch.passes.find_needs import find_needs, find_wanted
from fxbatch.passes.native import Native
from fxbatch.passes.plan_arenas import plan_arenas
from fxbatch.passes.plan_gradients import GradientPlan, PhaseGradients, plan_gradients
from fxbatch.passes.policies import POLICIES
from tests.passes.test_native import both, workloads
from tests.programs import programs, random_tree, tree_lstm_program

pytestmark = pytest.mark.skipif(Native.loops is None, reason="fxbatch was installed without its C extension")

Layouts = list[Layout | None]


def layouts_of(program: Program) -> tuple[Layouts, Layouts]:
    """Each input by itself; all inputs as one group where they are of one type."""
    return [None] * len(program.signatures), [
        None if len(s.inputs) < 2 or len(set(s.inputs)) > 1 else Layout((tuple(range(len(s.inputs))),))
        for s in program.signatures
    ]


def plan_options(program: Program) -> Iterator[Callable[[], dict[str, Any]]]:
    """As a phase that follows others, as one that writes into their rows, and as inference."""
    rng = np.random.default_rng(len(program))
    known = rng.integers(0, 9, program.known)
    used, before = rng.integers(0, 9, len(program.types)), rng.integers(0, 9, len(program.signatures))
    room = np.concatenate([known, np.full(program.values + 3, -1)])
    yield lambda: {"known_rows": known, "used": used, "run_before": before}
    yield lambda: {"used": used, "run_before": before, "into": room.copy()}
    yield lambda: {"known_rows": known, "reuse": True}


def same_plans(plan: Plan, native: Plan) -> None:
    for column in (x.name for x in dataclasses.fields(Plan) if x.name != "constant_order"):
        found = getattr(native, column)
        np.testing.assert_array_equal(getattr(plan, column), found, err_msg=column)
        assert column == "arenas" or found.dtype == np.int64
    assert plan.constant_order.keys() == native.constant_order.keys()
    for s, order in plan.constant_order.items():
        np.testing.assert_array_equal(order, native.constant_order[s])  # both may be None


def check_plans(program: Program) -> None:
    for name in ("depth", "lookahead"):
        schedule = POLICIES[name](program)
        for layouts in layouts_of(program):
            for options in plan_options(program):
                plan, native = both(
                    lambda layouts=layouts, schedule=schedule, options=options: plan_arenas(
                        program, schedule, layouts, **options()
                    )
                )
                same_plans(plan, native)


@given(programs())
def test_plans_of_random_programs(program: Program) -> None:
    check_plans(program)


@pytest.mark.parametrize("number", range(4))
def test_plans_of_workloads(number: int) -> None:
    check_plans(workloads()[number])


def cut(program: Program, call: int) -> list[Program]:
    """The calls before this one as one phase, the others as the next."""
    value, entry = int(program.first_value[call]), int(program.input_offsets[call])
    before = np.bincount(program.sig[:call], minlength=len(program.signatures))
    first = dataclasses.replace(
        program, sig=program.sig[:call], inputs=program.inputs[:entry], instance=program.instance[:call],
        outputs=program.outputs[:0],
        constants={s: payload[: before[s]] for s, payload in program.constants.items()},
    )  # fmt: skip
    second = dataclasses.replace(
        program, sig=program.sig[call:], inputs=program.inputs[entry:], instance=program.instance[call:],
        known=value, known_types=program.type_of_value[:value],
        constants={s: payload[before[s] :] for s, payload in program.constants.items()},
    )  # fmt: skip
    return [first, second]


def gradients(phases: list[Program], wide: bool, hands_on: bool, results: np.ndarray) -> GradientPlan:
    """Of phases one after another; everything that has inputs gives gradients of all of them."""
    described = []
    used = np.zeros(len(phases[0].types), dtype=np.int64)
    room = np.zeros(phases[-1].values, dtype=np.int64)
    for program in phases:
        layouts = layouts_of(program)[wide]
        plan = plan_arenas(program, POLICIES["agenda"](program), layouts, used=used, into=room)
        used = plan.capacity
        groups = [
            tuple(range(len(s.inputs) if x is None else len(x.groups)))
            for s, x in zip(program.signatures, layouts, strict=True)
        ]
        outputs = [tuple(range(len(s.outputs))) for s in program.signatures]
        hands = [
            hands_on and len(s.outputs) == 1 and x is None
            for s, x in zip(program.signatures, layouts, strict=True)
        ]
        described.append(PhaseGradients(program, plan, groups, outputs, np.arange(len(used)), hands))
    types = phases[-1].type_of_value[results]
    requests = [(int(t), results[types == t]) for t in np.unique(types)]
    return plan_gradients(described, requests, len(used))


def check_gradients(phases: list[Program], results: np.ndarray) -> None:
    for wide in (False, True):
        for hands_on in (False, True):
            numpy, native = both(
                lambda wide=wide, hands_on=hands_on: gradients(phases, wide, hands_on, results)
            )
            for field in dataclasses.fields(GradientPlan):
                a, b = getattr(numpy, field.name), getattr(native, field.name)
                for x, y in zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]:
                    np.testing.assert_array_equal(x, y, err_msg=field.name)
                    assert np.asarray(x).dtype == np.asarray(y).dtype


def whole_and_cut(data: st.DataObject, check: Callable[[list[Program], np.ndarray], None]) -> None:
    """Check a random program, and the same in two phases."""
    program = data.draw(programs(known=False))
    if not len(program) or not len(program.outputs):
        return
    check([program], program.outputs)
    call = data.draw(st.integers(1, len(program)))
    if call < len(program):
        check(cut(program, call), program.outputs)


@given(st.data())
def test_gradient_plans_of_random_programs(data: st.DataObject) -> None:
    whole_and_cut(data, check_gradients)


def check_wanted(phases: list[Program], results: np.ndarray) -> None:
    def found() -> list[np.ndarray]:
        pairs, before = [], np.zeros(0, dtype=bool)
        for program in map(dataclasses.replace, phases):
            own = [bool(s.inputs) and k % 3 == 1 for k, s in enumerate(program.signatures)]
            needs = find_needs(program, own, {}, known_needs=before)
            before = np.concatenate([before, needs.outputs[program.output_of_value]])
            pairs.append((program, needs))
        return find_wanted(pairs, results)

    for a, b in zip(*both(found), strict=True):
        np.testing.assert_array_equal(a, b)


@given(st.data())
def test_wanted_signatures_of_random_programs(data: st.DataObject) -> None:
    whole_and_cut(data, check_wanted)


def test_values_that_are_not_there_are_errors() -> None:
    program = tree_lstm_program([random_tree(random.Random(0), 5)])
    phase = (program.sig, program.columns.first_output, program.inputs, 0)
    for wrong in ((program.sig + 99, *phase[1:]), (*phase[:2], phase[2] + 999, 0), (*phase[:3], 999)):
        with pytest.raises(IndexError, match="not there"):
            Native.loops.reached([wrong], program.outputs, program.values)
    with pytest.raises(IndexError, match="not there"):
        Native.loops.reached([phase], program.outputs + 999, program.values)


@pytest.mark.parametrize("number", range(4))
def test_gradient_plans_of_workloads(number: int) -> None:
    program = workloads()[number]
    check_wanted(cut(program, len(program) // 3), program.outputs)
    check_gradients([program], program.outputs)
    check_gradients(cut(program, len(program) // 2), program.outputs)


@pytest.mark.parametrize("column", ["sig", "inputs", "outputs"])
@pytest.mark.parametrize("by", [-1000, 1000])
def test_plans_of_wrong_columns_are_errors(column: str, by: int) -> None:
    program = tree_lstm_program([random_tree(random.Random(0), 5)])
    schedule = POLICIES["lookahead"](program)
    wrong = dataclasses.replace(program, **{column: (getattr(program, column) + by).astype(np.int64)})
    if column == "sig":
        wrong = dataclasses.replace(wrong, sig=wrong.sig.astype(np.int32))
    with pytest.raises(IndexError, match="not there"):
        plan_arenas(wrong, schedule, [None] * len(program.signatures), reuse=True)
    half = Schedule(schedule.order + 1, schedule.offsets)
    with pytest.raises(IndexError, match="not there"):
        plan_arenas(program, half, [None] * len(program.signatures))
    with pytest.raises(IndexError, match="not there"):
        plan_arenas(program, schedule, [None] * len(program.signatures), into=np.zeros(3, dtype=np.int64))


def test_gradient_plans_of_wrong_columns_are_errors() -> None:
    program = tree_lstm_program([random_tree(random.Random(0), 5)])
    plan = plan_arenas(program, POLICIES["lookahead"](program), layouts_of(program)[0])
    phase = PhaseGradients(
        program, plan, [tuple(range(len(s.inputs))) for s in program.signatures],
        [tuple(range(len(s.outputs))) for s in program.signatures], np.arange(len(plan.arenas)),
    )  # fmt: skip
    requests = [(int(program.type_of_value[-1]), program.outputs)]
    plan_gradients([phase], requests, len(plan.arenas))
    for column in ("entries", "gather_arena", "block_start", "row_of_value", "step_signature", "capacity"):
        for by in (-1000, 1000):
            wrong = dataclasses.replace(plan, **{column: getattr(plan, column) + by})
            with pytest.raises(IndexError, match="not there"):
                plan_gradients([dataclasses.replace(phase, plan=wrong)], requests, len(plan.arenas))
    for change in ({"grad_groups": [(9,)] * 9}, {"grad_outputs": [(9,)] * len(program.signatures)}):
        with pytest.raises(IndexError, match="not there"):
            plan_gradients([dataclasses.replace(phase, **change)], requests, len(plan.arenas))
    for request in ((99, program.outputs), (0, program.outputs + 1000)):
        with pytest.raises(IndexError, match="not there"):
            plan_gradients([phase], [request], len(plan.arenas))
