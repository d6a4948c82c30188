"""A phase of a minibatch, and the rows that each operation keeps over all steps for its backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.codegen.step_functions import Scratch, group_type
from fxbatch.ir import Plan, Program, Schedule, TensorType
from fxbatch.passes.signature_graph import Needs
from fxbatch.runtime.buffers import Buffer
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.family import OperationSet
from fxbatch.runtime.pieces import Kept
from fxbatch.runtime.slab import Slab, SlabPlan

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
    operations: OperationSet
    whole: bool = False  # the only phase of its minibatch
    slab: SlabPlan | None = None  # where its memory is, if that is one piece
    tapes: dict[int, Any] = field(default_factory=dict)  # step -> tape of a call-by-call operation
    pieces: list[tuple[list[Kept], list[torch.Tensor]]] = field(default_factory=list)  # of its last run
    layout: Layout | None = None  # of its last run, where no other phase moves the memory

    @property
    def compiled(self) -> tuple[CompiledOperation | None, ...]:
        """One a signature, None where the program has no call of it."""
        return self.operations.compiled


class OperationRows:
    """The rows of one compiled operation over all steps of a run: what its backward needs. Buffers are made where
    somebody asks for them; with a slab they are arrays of it, from number `first` on."""

    def __init__(
        self, run: Run, compiled: CompiledOperation, slab: Slab | None = None, first: int = 0
    ) -> None:
        self.compiled = compiled
        self.rows = 0
        self._engine = run.engine
        self._slab, self._first = slab, first

    @functools.cached_property
    def kept(self) -> list[Buffer]:
        graphs = self.compiled.graphs
        kinds = [] if graphs is None else [group_type(graphs, g) for g in self.compiled.kept_groups]
        return self._buffers(kinds, 0)

    @functools.cached_property
    def saved(self) -> list[Buffer]:
        return self._buffers(self.compiled.saved_types, len(self.compiled.kept_groups))

    @functools.cached_property
    def in_place(self) -> dict[int, torch.Tensor]:
        """Kept groups that are read where they are, all rows."""
        found: dict[int, torch.Tensor] = {}
        if self._slab is not None:
            for position, size in enumerate(self.sizes):
                if self._first + position in self._slab.plan.inside:
                    rows = self._slab.tensor(self._first + position)
                    found[position] = rows if size == 1 else rows.view(self.rows, size, *rows.shape[1:])
        return found

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Inputs of each kept group."""
        return [len(self.compiled.layout.groups[g]) for g in self.compiled.kept_groups]

    @functools.cached_property
    def scratch(self) -> Scratch:
        """Where a step gathers rows that nobody keeps."""
        return self._engine.scratch_of(self.compiled)

    def _buffers(self, kinds: Sequence[TensorType], first: int) -> list[Buffer]:
        found = [Buffer(self._engine.pool, kind) for kind in kinds]
        if self._slab is not None:
            for array, buffer in enumerate(found, self._first + first):
                buffer.lend(functools.partial(self._slab.tensor, array), self._slab.plan.rows[array])
        return found

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
        for name in ("kept", "saved"):
            for buffer in self.__dict__.pop(name, ()):
                buffer.release()
        self.in_place = {}
        self._slab = None
