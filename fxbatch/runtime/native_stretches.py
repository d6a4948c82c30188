"""Stretches of steps that run in C: a phase's plan and pointers of its memory, as columns.

In: a phase whose memory is taken. Out: a NativeSteps, or None where no operation has a native program.

    steps = forward_steps(phase, memory, workspace)
    stop = steps.forward(0, len(phase.plan))      # the first step that Python has to run

Pointers are fetched anew for each phase and backward pass, and their tensors held as long as the object lives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import extension
from fxbatch.runtime.memory import GradientRows, Memory
from fxbatch.runtime.operands import Asked
from fxbatch.runtime.phase import Phase
from fxbatch.runtime.pointer_table import PointerTable
from fxbatch.runtime.watchers import named_step
from fxbatch.torch_private import profiler_enabled


class NativeSteps(NamedTuple):
    """The programs of a phase by signature, and the columns that `_native.c` walks."""

    phase: Phase
    programs: tuple[Any, ...]
    room: Any
    columns: tuple[Any, ...]

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


def forward_steps(phase: Phase, memory: Memory, workspace: Workspace) -> NativeSteps | None:
    """The steps of a phase's forward."""
    return _steps(phase, memory, workspace, phase.operations.forward, {})


def backward_steps(
    phase: Phase,
    memory: Memory,
    workspace: Workspace,
    rows: GradientRows,
    columns: tuple[Any, ...],
    asked: Asked,
) -> NativeSteps | None:
    """The steps of a phase's backward.

    columns: where each step's reads begin, what they are, all indices and bags, the arenas of gradients, where each
    step's writes begin and go to, and which steps are passed over (in the order of `_native_steps.c`).
    """
    return _steps(phase, memory, workspace, phase.operations.backward, asked, rows, columns)


def _steps(
    phase: Phase,
    memory: Memory,
    workspace: Workspace,
    table: PointerTable | None,
    asked: Asked,
    made: GradientRows | None = None,
    columns: tuple[Any, ...] = (),
) -> NativeSteps | None:
    if table is None:
        return None
    arenas, places = memory.columns(phase.operations.arrays)
    if made is None and not phase.whole:
        filled = memory.filled[table] = table.fill_again(memory.filled.get(table), places, memory.shared)
    else:
        filled = table.fill(places, memory.shared, asked, made)
    plan = phase.plan
    everything = (
        plan.step_signature, plan.step_rows, plan.step_offset, plan.first_gather, plan.gather_arena, plan.gather_kind,
        plan.gather_start, plan.gather_rows, plan.first_block, plan.block_arena, plan.block_start, plan.indices,
        arenas, filled.rows, table.first, *columns,
    )  # fmt: skip
    return NativeSteps(phase, filled.programs, workspace.native_room(), everything)
