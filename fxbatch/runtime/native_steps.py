"""Stretches of steps that run in C: a phase's plan and pointers of its memory, as columns.

In: a run and a phase whose memory is reserved. Out: a NativeSteps, or None where no operation has a native program.

    steps = forward_steps(run, phase)
    stop = steps.forward(0, len(phase.plan))      # the first step that Python has to run

Pointers are fetched anew for each phase and backward pass, and their tensors held as long as the object lives.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import Place, address, extension, place_of
from fxbatch.codegen.native_steps import NativeStep
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.pointer_table import Pointers, PointerTable, arena_columns
from fxbatch.runtime.watchers import named_step
from fxbatch.torch_private import profiler_enabled

if TYPE_CHECKING:
    from fxbatch.runtime.gradient_memory import GradientMemory
    from fxbatch.runtime.gradient_rows import GradientRows
    from fxbatch.runtime.phase import OperationRows, Phase
    from fxbatch.runtime.run import Run

Tables = tuple[tuple[Any, ...], Pointers, Any]  # programs by signature, the pointers of each, and the arenas

_ROWS = 1 << 20  # programs take no more


@dataclass
class NativeSteps:
    """The programs of a phase by signature, and the columns that `_native.c` walks."""

    phase: Phase
    programs: tuple[Any, ...]
    room: Any
    columns: tuple[Any, ...]
    held: list[torch.Tensor] = field(default_factory=list)

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

    def _named(self, k: int, kind: str) -> AbstractContextManager[Any]:
        plan = self.phase.plan
        compiled = self.phase.compiled[int(plan.step_signature[k])]
        assert compiled is not None
        return named_step(compiled.signature.name, int(plan.step_rows[k]), kind)


class _Pointers:
    """Rows of (pointer, bytes, flag), and where those of each signature begin."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.first = [0]
        self.held: list[torch.Tensor] = []  # what nobody else holds

    def columns(self) -> Pointers:
        return Pointers(array("q", self.rows), array("q", self.first), self.held)


def forward_steps(run: Run, phase: Phase, workspace: Workspace) -> NativeSteps | None:
    """The steps of a phase's forward."""
    found = _on_slab(run, phase.operations.forward, workspace)
    if found is None:
        chosen = [None if c is None else c.native_forward for c in phase.compiled]
        found = _tables(run, phase, chosen, workspace)
    if found is None:
        return None
    programs, pointers, arenas = found
    columns = (*_plan_columns(phase), arenas, pointers.rows, pointers.first)
    return NativeSteps(phase, programs, workspace.native_room(), columns, pointers.held)


def backward_steps(
    run: Run, phase: Phase, workspace: Workspace, rows: GradientRows, columns: tuple[Any, ...]
) -> NativeSteps | None:
    """The steps of a phase's backward.

    columns: where each step's reads begin, what they are, all indices and bags, the arenas of gradients, where each
    step's writes begin and go to, and which steps are passed over (in the order of `_native_steps.c`).
    """
    found = _on_slab(run, phase.operations.backward, workspace, rows)
    if found is None:
        chosen = [None if c is None else c.native_backward for c in phase.compiled]
        found = _tables(run, phase, chosen, workspace, rows)
    if found is None:
        return None
    programs, pointers, arenas = found
    everything = (*_plan_columns(phase), arenas, pointers.rows, pointers.first, *columns)
    return NativeSteps(phase, programs, workspace.native_room(), everything, pointers.held)


def _plan_columns(phase: Phase) -> tuple[Any, ...]:
    plan = phase.plan
    return (
        plan.step_signature, plan.step_rows, plan.step_offset, plan.first_gather, plan.gather_arena, plan.gather_kind,
        plan.gather_start, plan.gather_rows, plan.first_block, plan.block_arena, plan.block_start, plan.indices,
    )  # fmt: skip


def _arena(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """(pointer, bytes, bytes a row) of an arena, nothing of one that C can't read."""
    place = None if tensor is None or tensor.dim() == 0 or not tensor.numel() else place_of(tensor)
    return (0, 0, 0) if place is None or tensor is None else (*place, place[1] // tensor.size(0))


def _on_slab(
    run: Run, table: PointerTable | None, workspace: Workspace, made: GradientRows | None = None
) -> Tables | None:
    """The same as `_tables`, for a run whose memory is one piece."""
    if run.slab is None or table is None:
        return None
    pointers = table.fill(run, run.slab, workspace, made)
    return None if pointers is None else (table.programs, pointers, arena_columns(run.slab))


def _tables(
    run: Run,
    phase: Phase,
    chosen: Sequence[NativeStep | None],
    workspace: Workspace,
    made: GradientRows | None = None,
) -> Tables | None:
    """Programs by signature, the pointers of each, and the arenas; None where nothing runs native."""
    pointers = _Pointers()
    programs: list[Any] = []
    for compiled, step in zip(phase.compiled, chosen, strict=True):
        program = None
        if step is not None and compiled is not None:
            program = _add_operation(run, compiled, step, pointers, workspace)
            if made is not None:
                for place in made.places(compiled):
                    pointers.rows += (*place, 0)
        programs.append(program)
        pointers.first.append(len(pointers.rows) // 3)
    if not any(x is not None for x in programs):
        return None
    arenas = array("q")
    for kind in phase.plan.arenas:
        arenas.extend(_arena(run.arenas[run.type_ids[kind]].tensor))
    return tuple(programs), pointers.columns(), arenas


def _add_operation(
    run: Run, compiled: CompiledOperation, step: NativeStep, pointers: _Pointers, workspace: Workspace
) -> Any:
    """The pointers of one operation: kept rows, saved rows, shared operands and prepared tensors. Its program, or None
    where it can't read what it is given."""
    shared = run.shared[compiled.signature]
    given = _places_of_shared(step, shared)
    fixed = None if given is None else step.prepared(shared, workspace)
    if given is None or fixed is None:
        return None
    rows: OperationRows = run.rows_of[compiled]
    own = [rows.in_place.get(position, buffer.tensor) for position, buffer in enumerate(rows.kept)]
    places: list[Place] = []
    for tensor in (*own, *(buffer.tensor for buffer in rows.saved)):
        assert tensor is not None, "rows were reserved before"
        place = place_of(tensor)
        if place is None:
            return None
        places.append(place)
    found = list(map(place_of, fixed))
    if None in found:
        return None
    table = [len(rows.kept), len(rows.saved), 0]
    for i, (start, size) in enumerate(places):
        table += (start, size, int(i in rows.in_place))
    for start, size in (*given, *(place for place in found if place is not None)):
        table += (start, size, 0)
    pointers.held += fixed
    pointers.rows += table
    return step.program


def _places_of_shared(step: NativeStep, shared: Sequence[torch.Tensor]) -> list[Place] | None:
    """Where the shared operands are; None where C can't read one as it is."""
    found: list[Place] = []
    for tensor, size in zip(shared, step.shared_bytes, strict=True):
        start = address(tensor, size)
        if start is None:
            return None
        found.append((start, size))
    return found


class NativeKernels:
    """Kernels that run one after another in one call, with memory of their own for their results."""

    def __init__(self, workspace: Workspace, memory: GradientMemory) -> None:
        self._workspace, self._memory = workspace, memory
        self.steps: list[NativeStep] = []
        self.counts, self._table = array("q"), array("q")  # rows of each; pointers and bytes
        self._results: list[list[torch.Tensor]] = []
        self.held: list[torch.Tensor] = []  # until `run`, what nobody else holds
        self._failed: list[int] = []

    def add(
        self, step: NativeStep, n: int, inputs: Sequence[Place], shared: Sequence[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Its results, to be written; None where it can't read what it is given. inputs: pointers and bytes of
        contiguous rows, which the caller holds until `run`."""
        if not 0 < n <= _ROWS:
            return None
        given = _places_of_shared(step, shared)
        fixed = None if given is None else step.prepared(shared, self._workspace)
        if given is None or fixed is None:
            return None
        results = [self._memory.take(form, dtype) for form, dtype in step.outputs(n)]
        places = [*inputs, *given]
        for tensor in (*results, *fixed):
            found = place_of(tensor)
            if found is None:
                return None
            places.append(found)
        for place in places:
            self._table.extend(place)
        self.steps.append(step)
        self.counts.append(n)
        self._results.append(results)
        self.held += fixed
        return results

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Run them all, or some."""
        programs, last = tuple(step.program for step in self.steps), len(self.steps) if last is None else last
        if profiler_enabled() and last - first > 1:
            for i in range(first, last):
                with named_step(self.steps[i].name, self.counts[i], "parameter gradients"):
                    self.run(i, i + 1)
            return
        while first < last:
            first = extension.run_all(
                programs, self._workspace.native_room(), self.counts, self._table, first, last
            )
            if first < last:  # an index out of range, which Python tells of
                self._failed.append(first)
                first += 1

    def failed(self, results: Sequence[torch.Tensor]) -> bool:
        """Whether the kernel that these are the results of could not run."""
        return any(self._results[i] is results for i in self._failed)
