"""The passes with hot loops: as plain Python they give what they give compiled, and wrong columns are errors."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given

import fxbatch
from fxbatch import uncompiled
from fxbatch.ir import Layout, Plan, Program, Schedule
from fxbatch.passes import deduplicate, gradients, plan, schedule, select, signature_graph
from fxbatch.passes.room import ArrayTable
from fxbatch.runtime import operands
from tests.programs import bilstm_program, lattice_program, programs, random_tree, tree_lstm_program

FOLDER = Path(fxbatch.__file__).parent


def plain(module: ModuleType) -> ModuleType:
    """The same file as plain Python, whatever was compiled, as where there is no Cython."""
    name = module.__name__.rpartition(".")[2]
    file = FOLDER.joinpath(*module.__name__.split(".")[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"plain_{name}", file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # where dataclasses look for it
    with mock.patch.dict(sys.modules, {"cython": None}):
        spec.loader.exec_module(made)
    assert made.cython is uncompiled.cython
    return made


COMPILED = (deduplicate, gradients, plan, schedule, select, signature_graph, operands)
PLAIN = {module: plain(module) for module in COMPILED}


def both(module: ModuleType, name: str, *args: Any, **options: Any) -> list[Any]:
    """What a function of a module gives, and what it gives as plain Python."""
    return [getattr(m, name)(*args, **options) for m in (module, PLAIN[module])]


def same(a: Any, b: Any) -> None:
    """Equal arrays, types of items included, in dataclasses and sequences of them."""
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            if not field.name.startswith("_") and field.name != "graph":
                same(getattr(a, field.name), getattr(b, field.name))
    elif type(a).__name__ == "SignatureGraph":  # each of its own module's class
        assert a.key == b.key
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, Sequence) and not isinstance(a, str):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, found in a.items():
            same(found, b[key])
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    else:
        assert a is b or a == b


def workloads() -> list[Program]:
    """Programs of the kinds that models give."""
    rng = random.Random(3)
    return [
        tree_lstm_program([random_tree(rng, rng.randint(1, 20)) for _ in range(30)]),
        bilstm_program([rng.randint(1, 30) for _ in range(20)]),
        lattice_program(rng, [5, 9, 30]),
    ]


def layouts_of(program: Program) -> list[list[Layout | None]]:
    """Each input by itself; all inputs as one group where they are of one type."""
    wide = [
        None if len(s.inputs) < 2 or len(set(s.inputs)) > 1 else Layout((tuple(range(len(s.inputs))),))
        for s in program.signatures
    ]
    return [[None] * len(program.signatures), wide]


def phase_of(program: Program, found: Plan, layouts: list[Layout | None]) -> Any:
    """Everything that has inputs gives gradients of all of them."""
    pairs = list(zip(program.signatures, layouts, strict=True))
    return gradients.PhaseGradients(
        program, found, [tuple(range(len(s.inputs) if x is None else len(x.groups))) for s, x in pairs],
        [tuple(range(len(s.outputs))) for s in program.signatures], np.arange(len(found.arenas)),
    )  # fmt: skip


def one_phase(module: ModuleType, program: Program, steps: Schedule) -> list[Any]:
    """A program as the first phase of a run, then as one that reads the values of that, and as the only one: plans,
    facts of values, rows and what lacks room."""
    columns = module.RunColumns()
    types, width = len(program.types), len(program.signatures)
    arrays = ArrayTable(
        np.array([-1] * types + list(range(width))), np.array([0] * types + [1 + s % 2 for s in range(width)]),
        np.array([-1] * types + [0 if s.inputs else -1 for s in program.signatures]),
        np.full(types + width, 12), np.zeros(types + width, dtype=np.int64), 1, width,
    )  # fmt: skip
    needs = np.arange(int(program.width.sum())) % 3 == 0
    slots, numbers = module.Slots(program, [None] * width), np.arange(types + width)
    columns.add(types + width, width)
    found: list[Any] = []
    for known in (program.known, program.values):
        made, small = columns.plan(
            dataclasses.replace(program, known=known),
            steps,
            slots,
            arrays,
            numbers,
            np.arange(width),
            np.arange(types)[::-1].copy(),
            needs,
        )
        found += [made, small, *columns.ran(), [columns.calls_of(s) for s in range(width)]]
        for i, n, _ in small:
            columns.give_room(i, n)
        found.append([columns.rows_used(i) for i in range(types + width)])
    for reuse in (False, True):
        whole = module.plan_whole(program, steps, slots, arrays, needs, reuse=reuse)
        found += list(whole)
    return found


def check(program: Program) -> None:
    known = np.arange(program.known) * 2
    same(*(m._survey(program) for m in (signature_graph, PLAIN[signature_graph])))
    for name in ("depth", "agenda", "lookahead", "none"):
        same(*(m.POLICIES[name](program) for m in (schedule, PLAIN[schedule])))
    same(*both(schedule, "longest_chains", program))
    shared = [k % 3 == 1 and bool(s.inputs) for k, s in enumerate(program.signatures)]
    needs = signature_graph.find_needs(program, shared, {}, known_needs=known % 4 == 0)
    same(*both(signature_graph, "find_wanted", [(program, needs)], program.outputs))
    same(*both(select, "eliminate_dead", dataclasses.replace(program, outputs=program.outputs[:1])))
    same(*both(deduplicate, "deduplicate", program))
    steps = schedule.batch_by_agenda(program)
    types = program.type_of_value[program.outputs]
    requests = [(int(t), program.outputs[types == t]) for t in np.unique(types)]
    for layouts in layouts_of(program):
        for options in ({"reuse": True}, {"used": np.full(len(program.types), 7)}, {}):
            made = both(plan, "plan_arenas", program, steps, layouts, known_rows=known, **options)
            same(*made)
        if not program.known:
            same(*(one_phase(m, program, steps) for m in (plan, PLAIN[plan])))
        phase = phase_of(program, made[0], layouts)
        same(*both(gradients, "plan_gradients", [phase], requests, len(program.types)))


@given(programs())
def test_plain_python_gives_the_same_on_random_programs(program: Program) -> None:
    check(program)


@pytest.mark.parametrize("number", range(3))
def test_plain_python_gives_the_same_on_workloads(number: int) -> None:
    check(workloads()[number])


def test_each_bit_of_each_column_is_in_the_checksum() -> None:
    columns = [np.arange(9, dtype=np.int32), np.arange(8), np.arange(5)]
    found = {select.checksum(*columns)}
    for k, column in enumerate(columns):
        for at in (0, 1, len(column) - 1):
            changed = column.copy()
            changed[at] ^= 1
            found.add(select.checksum(*columns[:k], changed, *columns[k + 1 :]))
        found.add(select.checksum(*columns[:k], column[:-1], *columns[k + 1 :]))
    assert len(found) == 1 + 3 * 4
    assert select.checksum(*(c.copy() for c in columns)) in found


def five_leaves() -> Program:
    return tree_lstm_program([random_tree(random.Random(0), 5)])


@pytest.mark.parametrize("column", ["sig", "inputs", "outputs"])
@pytest.mark.parametrize("by", [-1000, 1000])
def test_wrong_columns_of_a_program_are_errors(column: str, by: int) -> None:
    program = five_leaves()
    steps = schedule.batch_by_lookahead(program)
    changed = (getattr(program, column) + by).astype(getattr(program, column).dtype)
    wrong = dataclasses.replace(program, **{column: changed})
    passes = [lambda: plan.plan_arenas(wrong, steps, [None] * len(program.signatures), reuse=True)]
    passes += [lambda: select.eliminate_dead(wrong), lambda: deduplicate.deduplicate(wrong)]
    if column == "outputs":
        passes.append(lambda: signature_graph.find_wanted([(program, None)], wrong.outputs))  # type: ignore[list-item]
    else:
        passes += [lambda: signature_graph.survey(wrong), lambda: schedule.depths(wrong)]
    for run in passes:
        with pytest.raises(IndexError, match=r"not there|out of bounds"):
            run()


def test_wrong_schedules_and_too_little_room_are_errors() -> None:
    program = five_leaves()
    steps = schedule.batch_by_lookahead(program)
    for wrong in (Schedule(steps.order + 1, steps.offsets), Schedule(steps.order - 9, steps.offsets)):
        with pytest.raises(IndexError, match="not there"):
            plan.plan_arenas(program, wrong, [None] * len(program.signatures))
    with pytest.raises(IndexError, match="not there"):
        one_phase(plan, dataclasses.replace(program, known=3), steps)


def test_wrong_columns_of_a_plan_are_errors() -> None:
    program = five_leaves()
    made = plan.plan_arenas(program, schedule.batch_by_lookahead(program), layouts_of(program)[0])
    phase = phase_of(program, made, layouts_of(program)[0])
    requests = [(int(program.type_of_value[-1]), program.outputs)]
    gradients.plan_gradients([phase], requests, len(made.arenas))
    for column in (
        "entries",
        "gather_arena",
        "block_arena",
        "row_of_value",
        "step_signature",
        "entry_offsets",
    ):
        for by in (-1000, 1000):
            wrong = dataclasses.replace(made, **{column: getattr(made, column) + by})
            with pytest.raises(IndexError, match=r"not there|[Oo]ut of bounds"):
                gradients.plan_gradients([phase._replace(plan=wrong)], requests, len(made.arenas))
    for change in ({"grad_groups": [(9,)] * 9}, {"grad_outputs": [(9,)] * len(program.signatures)}):
        with pytest.raises(IndexError, match=r"not there|[Oo]ut of bounds"):
            gradients.plan_gradients([phase._replace(**change)], requests, len(made.arenas))
    for request in ((99, program.outputs), (0, program.outputs + 1000)):
        with pytest.raises(IndexError, match=r"not there|[Oo]ut of bounds"):
            gradients.plan_gradients([phase], [request], len(made.arenas))


def test_tables_of_pointers() -> None:
    """Where a backward pass has its memory, and that its arenas begin with zeros."""
    inside = np.array([[0, 24, 0], [64, 0, 0], [64, 16, 1]])
    devices, width = np.array([0, 1, 0]), np.array([8, 4, 16])
    same(*both(operands, "gradient_rows", np.array([4, 1, 2]), [7, 9], np.array([1, 0, 0])))
    for begins in ([1024, 0], [0, 2048]):
        places, plain_places = both(operands, "moved", inside, devices, begins)
        same(places, plain_places)
        same(*both(operands, "arena_table", places, width, 2))
    for module in (operands, PLAIN[operands]):
        rows = np.ones((3, 2))
        assert module.clear_rows(np.array([[0, 0, 0], [rows.ctypes.data, 48, 16]])) == [0]
        assert rows.tolist() == [[0, 0], [1, 1], [1, 1]]
        assert module.any_of(np.array([False, True]), np.array([0, 1]))
        with pytest.raises(IndexError):
            module.any_of(np.array([False]), np.array([1]))
