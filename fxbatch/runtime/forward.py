"""A phase of a minibatch (its program, schedule and plan, and where its steps read and write), and its forward.

views = phase.views_in(memory)               # as tensors, for steps that Python runs
views[k]             # StepMemory: a source per gather, a view per output block, the rows kept for backward
launches = execute_forward(phase, memory, workspace, native=True)       # every step of its plan

Stretches of steps whose operations have native programs run in C, on the plan and pointers of the memory as columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from fxbatch import stopwatch
from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import extension
from fxbatch.codegen.native_table import BackwardColumns, ForwardColumns
from fxbatch.codegen.step_functions import Kept, Source, StepMemory
from fxbatch.ir import BROADCAST, INDEX, Plan, Program, Schedule
from fxbatch.passes.plan import WholePlan
from fxbatch.passes.signature_graph import Needs
from fxbatch.runtime.memory import GradientRows, Memory, fill_constants, to_device
from fxbatch.runtime.operands import Asked
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.structure_cache import OperationSet
from fxbatch.runtime.watchers import named_step
from fxbatch.signature import Body
from fxbatch.torch_private import profiler_enabled


@dataclass(eq=False)
class Phase:
    """One phase that has run, with its plan and operations; backward walks these in reverse."""

    program: Program
    schedule: Schedule
    plan: Plan
    needs: Needs
    operations: OperationSet
    whole_plan: WholePlan | None = None  # with all known of values; None where other phases share them
    # Step -> what a call-by-call operation keeps.
    tapes: dict[int, list[object]] = field(default_factory=dict)
    # What backward reads, with versions, where it may come late.
    read: Sequence[tuple[torch.Tensor, int]] = ()
    views: StepViews | None = None  # of its last run, where no other phase moves the memory

    @property
    def compiled(self) -> tuple[CompiledOperation | None, ...]:
        """One a signature, None where the program has no call of it."""
        return self.operations.compiled

    def operation(self, k: int) -> CompiledOperation:
        """The operation of step k."""
        compiled = self.compiled[self.plan.step_signature.item(k)]
        assert compiled is not None
        return compiled

    def rows_of_output(self, memory: Memory, k: int, index: int) -> torch.Tensor:
        """The rows of one output of step k."""
        plan = self.plan
        block = plan.first_block.item(k) + index
        arena = memory.arena_of(plan.arenas[plan.block_arena.item(block)])
        return arena.narrow(0, plan.block_start.item(block), plan.step_rows.item(k))

    def views_in(self, memory: Memory) -> StepViews:
        """Where its steps read and write, the memory being where it is now."""
        return self.views or StepViews(self, memory)


class StepViews:
    """Where the steps of a phase read and write, each made when it is asked for; indices are one copy per device."""

    def __init__(self, phase: Phase, memory: Memory) -> None:
        self.phase, self.memory = phase, memory
        self._indices: dict[torch.device, torch.Tensor] = {}
        self._made: dict[int, StepMemory] = {}

    def __getitem__(self, k: int) -> StepMemory:
        view = self._made.get(k)
        if view is None:
            phase, plan = self.phase, self.phase.plan
            gathers = range(plan.first_gather.item(k), plan.first_gather.item(k + 1))
            outputs = range(plan.first_block.item(k + 1) - plan.first_block.item(k))
            outs = [phase.rows_of_output(self.memory, k, j) for j in outputs]
            n, shared = plan.step_rows.item(k), self.memory.shared[phase.operation(k).signature]
            view = self._made[k] = StepMemory(n, [*map(self._source, gathers)], outs, *self._kept(k), shared)
        return view

    def _source(self, g: int) -> Source:
        plan = self.phase.plan
        arena = self.memory.arena_of(plan.arenas[plan.gather_arena.item(g)])
        kind, start, rows = plan.gather_kind.item(g), plan.gather_start.item(g), plan.gather_rows.item(g)
        if kind != INDEX:
            return kind, arena.narrow(0, start, 1 if kind == BROADCAST else rows), None
        indices = self._indices.get(arena.device)
        if indices is None:
            indices = self._indices[arena.device] = to_device(plan.indices, arena.device)
        return kind, arena, indices.narrow(0, start, rows)

    def _kept(self, k: int) -> tuple[list[Kept], Sequence[object]]:
        """The rows of a step that backward reads: of kept groups, and saved ones."""
        memory, compiled = self.memory, self.phase.operation(k)
        if compiled.unbatched is not None:
            return [], self.phase.tapes.setdefault(k, [])
        if not memory.keeps() or compiled.forward is None:
            return [], []
        first, n = self.phase.plan.step_offset.item(k), self.phase.plan.step_rows.item(k)
        groups: list[Kept] = []
        for i, size in enumerate(compiled.kept_members):
            flat = memory.kept_rows(compiled, i).narrow(0, first * size, n * size)
            wide = flat if size == 1 else flat.view(n, size, *flat.shape[1:])
            groups.append((None if memory.in_place(compiled, i) else flat, wide))
        saved = [memory.saved(compiled, i).narrow(0, first, n) for i in range(len(compiled.saved_types))]
        return groups, saved


# -- stretches of steps that run in C; pointers are fetched anew for each phase and backward pass


class NativeSteps(NamedTuple):
    """The programs of a phase by signature, and the columns that `_native_steps.c` walks."""

    phase: Phase
    programs: tuple[object, ...]
    room: object
    columns: tuple[object, ...]

    def begins_at(self, k: int) -> bool:
        """Whether step k has a program."""
        return self.programs[int(self.phase.plan.step_signature[k])] is not None

    def forward(self, first: int, last: int) -> int:
        """Run steps from `first` on; the first that was not run. Under a profiler one by one, each a range."""
        if profiler_enabled():
            for k in range(first, last):
                if not self.begins_at(k):
                    return k
                with self._named(k, "forward"):
                    stop = extension.forward(self.programs, self.room, self.columns, k, k + 1)
                if stop == k:
                    return k
            return last
        return int(extension.forward(self.programs, self.room, self.columns, first, last))

    def backward(self, last: int, first: int = 0) -> int:
        """Run steps from `last - 1` down to `first`; the number of the step after the next that is left."""
        if profiler_enabled():
            for k in range(last, first, -1):
                with self._named(k - 1, "backward") if self.begins_at(k - 1) else nullcontext():
                    stop = extension.backward(self.programs, self.room, self.columns, k - 1, k)
                if stop == k:
                    return k
            return first
        return int(extension.backward(self.programs, self.room, self.columns, first, last))

    def _named(self, k: int, kind: str) -> AbstractContextManager[object]:
        name = self.phase.operation(k).signature.name
        return named_step(name, int(self.phase.plan.step_rows[k]), kind)


def native_steps_of(
    phase: Phase,
    memory: Memory,
    workspace: Workspace,
    asked: Asked,
    written: GradientRows | None = None,
    columns: BackwardColumns | tuple[()] = (),
) -> NativeSteps | None:
    """The steps of a phase's forward; or of its backward, which writes to these rows."""
    table = phase.operations.forward if written is None else phase.operations.backward
    if table is None:
        return None
    arenas, places = memory.columns(phase.operations.arrays)
    if written is None and phase.whole_plan is None:
        filled = memory.filled[table] = table.fill_again(memory.filled.get(table), places, memory.shared)
    else:
        filled = table.fill(places, memory.shared, asked, written)
    plan = phase.plan
    forward = ForwardColumns(
        signature=plan.step_signature, rows=plan.step_rows, offset=plan.step_offset, first_gather=plan.first_gather,
        gather_arena=plan.gather_arena, gather_kind=plan.gather_kind, gather_start=plan.gather_start,
        gather_rows=plan.gather_rows, first_block=plan.first_block, block_arena=plan.block_arena,
        block_start=plan.block_start, indices=plan.indices, arenas=arenas, pointers=filled.rows,
        first_pointer=table.first,
    )  # fmt: skip
    return NativeSteps(phase, filled.programs, workspace.native_room(), (*forward, *columns))


def payload_places(plan: Plan, s: int, first: int, n: int) -> np.ndarray:
    """int64 [n]: where in the payload of signature s its constants are, from number `first` on in the order of rows."""
    order = plan.constant_order[s]
    return np.arange(first, first + n) if order is None else order[first : first + n]


# -- forward: each step a call of an emitted step function or a native program


def execute_forward(phase: Phase, memory: Memory, workspace: Workspace, *, native: bool) -> int:
    """Take a phase's memory and run all its steps: stretches of native ones in C, the others one by one. How many
    kernels were launched."""
    workspace.enter_run(memory.shared)
    phase.views = None
    if phase.whole_plan is not None:
        memory.take(phase.operations.arrays, phase.whole_plan)
    launches, k, steps, rows = 0, 0, len(phase.plan), RowCalls(phase, memory)
    native_steps = native_steps_of(phase, memory, workspace, {}) if native else None
    while k < steps:
        stop = k
        if native_steps is not None and native_steps.begins_at(k):
            stop = native_steps.forward(k, steps)
            launches += stop - k
        if stop < steps:
            launches += _run_one(phase, memory, workspace, stop, rows, native=native_steps is not None)
        k = stop + 1
    if phase.whole_plan is None:
        phase.views = None  # the next phase moves the memory
    return launches


def _run_one(
    phase: Phase, memory: Memory, workspace: Workspace, k: int, rows: RowCalls, *, native: bool
) -> int:
    """A step that has no native program, or that its program can't run."""
    if (compiled := phase.operation(k)).forward is None:
        return _fill(phase, memory, k, native=native)
    n = phase.plan.step_rows.item(k)
    begun = stopwatch.now() if compiled.is_late else 0.0
    with named_step(compiled.signature.name, n, "forward"):
        if not rows.run(k, compiled):
            views = phase.views = phase.views_in(memory)
            compiled.forward(views[k], workspace)
    if compiled.is_late:
        compiled.count_late(stopwatch.now() - begun, n)
    return n if compiled.unbatched is not None else 1


class RowCalls:
    """Steps of a phase whose operations run call by call, with rows where they lie: of what only reads, and nothing
    goes backward through."""

    def __init__(self, phase: Phase, memory: Memory) -> None:
        self.phase, self.memory = phase, memory
        self._calls: dict[int, Body | None] = {}  # by signature

    @functools.cached_property
    def _columns(self) -> tuple[list[int], ...]:
        p = self.phase.plan
        columns = (
            p.step_signature, p.step_rows, p.first_gather, p.gather_kind, p.gather_start, p.gather_arena,
            p.first_block, p.block_start, p.block_arena,
        )  # fmt: skip
        return tuple([column.tolist() for column in columns])

    @functools.cached_property
    def _arenas(self) -> list[torch.Tensor]:
        return [self.memory.arena_of(kind) for kind in self.phase.plan.arenas]

    def run(self, k: int, compiled: CompiledOperation) -> bool:
        """Run step k, whose operation this is. Whether it is such a step; else nothing is done."""
        kernel = compiled.unbatched
        if kernel is None or compiled.needs_gradient:
            return False
        signatures, rows, first_gather, kinds, starts, of, first_block, block_start, block_arena = (
            self._columns
        )
        s, n, arenas = signatures[k], rows[k], self._arenas
        if s not in self._calls:
            self._calls[s] = kernel.bare(self.memory.shared[kernel.signature])
        call = self._calls[s]
        if call is None:
            return False
        columns: list[Sequence[torch.Tensor]] = []
        for g in range(first_gather[k], first_gather[k + 1]):
            arena, first = arenas[of[g]], starts[g]
            if kinds[g] == INDEX:
                columns.append([arena[row] for row in self.phase.plan.indices[first : first + n].tolist()])
            elif n == 1 or kinds[g] == BROADCAST:
                columns.append([arena[first]] * n)
            else:
                columns.append(arena.narrow(0, first, n).unbind(0))
        for j, column in enumerate(kernel.called(call, columns, n), first_block[k]):
            arena, first = arenas[block_arena[j]], block_start[j]
            if n == 1:
                arena[first].copy_(column[0])
            else:
                torch.stack([*column], out=arena.narrow(0, first, n))
        return True


def _fill(phase: Phase, memory: Memory, k: int, *, native: bool) -> int:
    """Put constants into their rows, which launches nothing."""
    plan = phase.plan
    s = plan.step_signature.item(k)
    signature, payload = phase.program.signatures[s], phase.program.constants[s]
    first, n = plan.step_offset.item(k), plan.step_rows.item(k)
    if phase.whole_plan is None:  # rows are counted over all phases
        first -= memory.calls(phase.operation(k)) - len(payload)
    start = plan.block_start.item(plan.first_block.item(k))
    place = memory.row_place(signature.outputs[0], start) if native else 0
    rows = functools.partial(phase.rows_of_output, memory, k, 0)
    fill_constants(rows, place, signature, payload, first, n, plan.constant_order[s])
    return 0
