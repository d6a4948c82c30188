"""A phase of a minibatch, and the rows that each operation keeps over all steps for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.codegen.looped import group_type
from fxbatch.ir import Plan, Program, Schedule
from fxbatch.passes.find_needs import Needs
from fxbatch.runtime.buffers import Buffer
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.pieces import Kept

if TYPE_CHECKING:
    from fxbatch.runtime.run import Run


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the steps of a phase read and write: a source a gather, a view an output block."""

    sources: list[tuple[int, torch.Tensor, Any]]  # (kind, arena or rows, indices)
    blocks: list[torch.Tensor]


@dataclass(eq=False)
class Phase:
    """What one phase ran; backward walks these in reverse."""

    program: Program
    schedule: Schedule
    plan: Plan
    needs: Needs
    compiled: list[CompiledOperation | None]  # one a signature, None where the program has no call of it
    whole: bool = False  # the only phase of its minibatch
    tapes: dict[int, Any] = field(default_factory=dict)  # step -> tape of a call-by-call operation
    pieces: list[tuple[list[Kept], list[torch.Tensor]]] = field(default_factory=list)  # of its last run
    layout: Layout | None = None  # of its last run, where no other phase moves the memory


class OperationRows:
    """The rows of one compiled operation over all steps of a run: what its backward needs."""

    __slots__ = ("compiled", "in_place", "kept", "rows", "saved", "scratch", "sizes")

    def __init__(self, run: Run, compiled: CompiledOperation) -> None:
        pool = run.engine.pool
        self.compiled = compiled
        self.rows = 0
        self.in_place: dict[int, torch.Tensor] = {}  # kept groups that are read where they are, all rows
        graphs = compiled.graphs
        kinds = [] if graphs is None else [group_type(graphs, g) for g in compiled.kept_groups]
        self.kept = [Buffer(pool, kind) for kind in kinds]
        self.saved = [Buffer(pool, kind) for kind in compiled.saved_types]
        self.sizes = [len(compiled.layout.groups[g]) for g in compiled.kept_groups]
        self.scratch = run.engine.scratch_of(compiled)

    def members(self, position: int) -> int:
        """How many inputs the kept group at `position` has."""
        return self.sizes[position]

    def kept_rows(self, position: int, start: int, stop: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(flat rows, rows as the operation reads them) of a kept group, calls start to stop; no flat rows
        where the group is read in place."""
        if position in self.in_place:
            return None, self.in_place[position][start:stop]
        tensor = self.kept[position].tensor
        assert tensor is not None
        size = self.sizes[position]
        flat = tensor.narrow(0, start * size, (stop - start) * size)
        return flat, flat if size == 1 else flat.view(stop - start, size, *tensor.shape[1:])

    def release(self) -> None:
        for buffer in (*self.kept, *self.saved):
            buffer.release()
