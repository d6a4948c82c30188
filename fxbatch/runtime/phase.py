"""A phase of a minibatch: its program, schedule and plan, and where its steps read and write.

views = phase.views_in(memory)               # as tensors, for steps that Python runs
sources, outs, (kept, saved) = views[k]      # a source a gather, a view an output block, the rows kept for backward
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fxbatch.codegen.step_functions import Kept, Source
from fxbatch.ir import BROADCAST, INDEX, Plan, Program, Schedule
from fxbatch.passes.plan import WholePlan
from fxbatch.passes.signature_graph import Needs
from fxbatch.runtime.constants import to_device
from fxbatch.runtime.memory import Memory
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.structure_cache import OperationSet

StepView = tuple[list[Source], list[torch.Tensor], tuple[list[Kept], list[torch.Tensor]]]


@dataclass(eq=False)
class Phase:
    """What one phase ran; backward walks these in reverse."""

    program: Program
    schedule: Schedule
    plan: Plan
    needs: Needs
    operations: OperationSet
    found: WholePlan | None = (
        None  # with all that is known of values and arrays; None where other phases share them
    )
    tapes: dict[int, Any] = field(default_factory=dict)  # step -> tape of a call-by-call operation
    views: StepViews | None = None  # of its last run, where no other phase moves the memory

    @property
    def whole(self) -> bool:
        """Whether it is the only phase of its minibatch."""
        return self.found is not None

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
    """Where the steps of a phase read and write, each made when it is asked for; all indices are one copy a device."""

    def __init__(self, phase: Phase, memory: Memory) -> None:
        self.phase, self.memory = phase, memory
        self._indices: dict[torch.device, torch.Tensor] = {}
        self._made: dict[int, StepView] = {}

    def __getitem__(self, k: int) -> StepView:
        found = self._made.get(k)
        if found is None:
            phase, plan = self.phase, self.phase.plan
            gathers = range(plan.first_gather.item(k), plan.first_gather.item(k + 1))
            outputs = range(plan.first_block.item(k + 1) - plan.first_block.item(k))
            outs = [phase.rows_of_output(self.memory, k, j) for j in outputs]
            found = self._made[k] = [self._source(g) for g in gathers], outs, self._kept(k)
        return found

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

    def _kept(self, k: int) -> tuple[list[Kept], list[torch.Tensor]]:
        """The rows of a step that backward reads: of kept groups, and saved ones."""
        memory, compiled = self.memory, self.phase.operation(k)
        if not memory.keeps() or compiled.forward is None:
            return [], []
        first, n = self.phase.plan.step_offset.item(k), self.phase.plan.step_rows.item(k)
        kept: list[Kept] = []
        for i, size in enumerate(compiled.kept_members):
            flat = memory.kept(compiled, i).narrow(0, first * size, n * size)
            wide = flat if size == 1 else flat.view(n, size, *flat.shape[1:])
            kept.append((None if memory.in_place(compiled, i) else flat, wide))
        return kept, [memory.saved(compiled, i).narrow(0, first, n) for i in range(len(compiled.saved_types))]
