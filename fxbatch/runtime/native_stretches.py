"""Stretches of steps that run in C: a phase's plan and pointers of its memory, as columns.

In: a phase whose memory is taken. Out: a NativeSteps, or None where no operation has a native program.

    steps = forward_steps(phase, memory, workspace)
    stop = steps.forward(0, len(phase.plan))      # the first step that Python has to run

Pointers are fetched anew for each phase and backward pass, and their tensors held as long as the object lives.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import extension
from fxbatch.codegen.native_programs import NativeStep
from fxbatch.runtime.memory import GradientMemory, GradientRows, Memory
from fxbatch.runtime.phase import Phase
from fxbatch.runtime.pointer_table import PointerTable
from fxbatch.runtime.watchers import named_step
from fxbatch.torch_private import profiler_enabled

_ROWS = 1 << 20  # programs take no more


@dataclass
class NativeSteps:
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
    return _steps(phase, memory, workspace, phase.operations.forward)


def backward_steps(
    phase: Phase, memory: Memory, workspace: Workspace, rows: GradientRows, columns: tuple[Any, ...]
) -> NativeSteps | None:
    """The steps of a phase's backward.

    columns: where each step's reads begin, what they are, all indices and bags, the arenas of gradients, where each
    step's writes begin and go to, and which steps are passed over (in the order of `_native_steps.c`).
    """
    return _steps(phase, memory, workspace, phase.operations.backward, rows, columns)


def _steps(
    phase: Phase,
    memory: Memory,
    workspace: Workspace,
    table: PointerTable | None,
    rows: GradientRows | None = None,
    columns: tuple[Any, ...] = (),
) -> NativeSteps | None:
    if table is None:
        return None
    arenas, places = memory.columns(phase.operations.arrays)
    filled = None
    if rows is None and not phase.whole:
        filled = memory.filled[table] = table.fill_again(memory.filled.get(table), places, memory.shared)
    else:
        filled = table.fill(places, memory.shared, rows)
    plan = phase.plan
    everything = (
        plan.step_signature, plan.step_rows, plan.step_offset, plan.first_gather, plan.gather_arena, plan.gather_kind,
        plan.gather_start, plan.gather_rows, plan.first_block, plan.block_arena, plan.block_start, plan.indices,
        arenas, filled.rows, table.first, *columns,
    )  # fmt: skip
    return NativeSteps(phase, filled.programs, workspace.native_room(), everything)


class NativeKernels:
    """Kernels that run one after another in one call, with memory of their own for their results."""

    def __init__(self, workspace: Workspace, memory: GradientMemory) -> None:
        self._workspace, self._memory = workspace, memory
        self.steps: list[NativeStep] = []
        self.counts, self._table = array("q"), array("q")  # rows of each; pointers and bytes
        self._results: list[list[torch.Tensor]] = []
        self.held: list[torch.Tensor] = []  # until `run`, what has no other owner
        self._programs: list[Any] = []
        self._sums: dict[int, torch.Tensor] = {}  # results that others may be added to, by shared operand
        self._failed: list[int] = []

    def add(
        self,
        step: NativeStep,
        n: int,
        inputs: Sequence[int],
        shared: Sequence[torch.Tensor],
        of: Sequence[int],
    ) -> list[torch.Tensor] | None:
        """Its results, to be written, empty where it adds to those of another; None where it can't read what it is
        given. inputs: pointer and bytes of contiguous rows, one after another, which the caller holds until `run`; of:
        the positions of the shared operands that the results belong to."""
        if not 0 < n <= _ROWS:
            return None
        operands = [] if step.adding is None else [id(shared[i]) for i in of]
        adds = bool(operands) and all(map(self._sums.__contains__, operands))
        if adds:
            results = [self._sums[x] for x in operands]
        else:
            results = [self._memory.take(form, dtype) for form, dtype in step.outputs(n)]
        table = array("q", inputs)
        first = len(inputs) // 2
        table.frombytes(bytes(16 * (len(shared) + len(results))))
        sizes = (*step.shared_bytes, *[x.nbytes for x in results])
        if not extension.put_places(table, 2, first, (*shared, *results), sizes):
            return None
        self._table += table
        if operands and not adds:
            self._sums.update(zip(operands, results, strict=True))
        self.steps.append(step)
        self._programs.append(step.adding if adds else step.program)
        self.counts.append(n)
        self._results.append(results)
        return [] if adds else results

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Run them all, or some."""
        programs, last = tuple(self._programs), len(self.steps) if last is None else last
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
