"""A phase of a minibatch: its program, schedule and plan, and where its steps read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fxbatch.codegen.step_functions import Kept, Source
from fxbatch.ir import Plan, Program, Schedule
from fxbatch.passes.signature_graph import Needs
from fxbatch.runtime.memory import ArrayLayout
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.structure_cache import OperationSet


@dataclass(frozen=True, eq=False)
class StepViews:
    """Where the steps of a phase read and write: a source a gather, a view an output block, and of each step the rows
    that its operation keeps and saves for backward."""

    sources: Sequence[Source]
    blocks: Sequence[torch.Tensor]
    rows: Sequence[tuple[list[Kept], list[torch.Tensor]]]


@dataclass(eq=False)
class Phase:
    """What one phase ran; backward walks these in reverse."""

    program: Program
    schedule: Schedule
    plan: Plan
    needs: Needs
    operations: OperationSet
    layout: ArrayLayout | None = None  # where its memory is; None where other phases share it
    # Of each value row, type, and whether gradients go through it; None where the memory knows, for all phases.
    facts: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    tapes: dict[int, Any] = field(default_factory=dict)  # step -> tape of a call-by-call operation
    views: StepViews | None = None  # of its last run, where no other phase moves the memory

    @property
    def whole(self) -> bool:
        """Whether it is the only phase of its minibatch."""
        return self.layout is not None

    @property
    def compiled(self) -> tuple[CompiledOperation | None, ...]:
        """One a signature, None where the program has no call of it."""
        return self.operations.compiled
