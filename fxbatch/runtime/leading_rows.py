"""Which rows of a run's steps lead to results, so that gradients of the others can be left out.

In: a run, and which of its values lead to results that got gradients. Out: flags of the rows of a step, and of all rows
of an operation.

What an instance computes, looks at and gives up (a factor of a matrix that was singular, a score that is infinite) has
no gradient in the loop. Batched, its row is given zeros, and zero times infinity is NaN: where gradients come out so,
they are made again without such rows (`backward.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fxbatch.passes.plan import is_constant
from fxbatch.runtime.forward import Phase
from fxbatch.runtime.memory import Memory
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.run import Run


def has_idle_calls(phases: Sequence[Phase], reached: Sequence[np.ndarray], reaching: np.ndarray) -> bool:
    """Whether a call leads to no result, while others of its signature do. Both are what `find_wanted` says."""
    counts = np.concatenate([[0], np.cumsum(reaching)])
    for phase, leads in zip(phases, reached, strict=True):
        program = phase.program
        first, stop = program.first_value[:-1], program.first_value[1:]
        idle = (leads[program.sig] != 0) & (counts[stop] == counts[first]) & (stop > first)
        signatures = [program.signatures[s] for s in np.unique(program.sig[idle]).tolist()]
        if not all(map(is_constant, signatures)):
            return True
    return False


class LeadingRows:
    """The rows of a run that lead to results. reaching: which of its values do."""

    def __init__(self, run: Run, reaching: np.ndarray) -> None:
        self._memory: Memory = run.memory
        self._phases: Sequence[Phase] = run.phases
        self._flags: dict[int, np.ndarray] = {}  # bool, by type and row
        for kind in np.unique(run.value_type).tolist():
            values = np.flatnonzero(run.value_type == kind)
            rows = run.value_row[values]
            self._flags[kind] = np.ones(int(rows.max()) + 1, dtype=bool)
            self._flags[kind][rows] = reaching[values] != 0

    def of_step(self, phase: Phase, k: int) -> np.ndarray:
        """bool [rows of step k]."""
        plan, types = phase.plan, self._memory.types_of(phase.program)
        flags = np.zeros(plan.step_rows.item(k), dtype=bool)
        for block in range(plan.first_block.item(k), plan.first_block.item(k + 1)):
            start = plan.block_start.item(block)
            flags |= self._flags[types.item(plan.block_arena.item(block))][start : start + len(flags)]
        return flags

    def of_operation(self, compiled: CompiledOperation) -> np.ndarray:
        """int64: those of the rows of all steps of an operation, in step order."""
        flags = np.zeros(self._memory.calls(compiled), dtype=bool)
        for phase in self._phases:
            for k, s in enumerate(phase.plan.step_signature.tolist()):
                if phase.compiled[s] is compiled:
                    first = phase.plan.step_offset.item(k)
                    flags[first : first + phase.plan.step_rows.item(k)] = self.of_step(phase, k)
        return np.flatnonzero(flags)


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no number of these is infinite or NaN (nor their sum too large): one look at each device's memory."""
    sums = [torch.isfinite(t.sum()) for t in tensors]
    return not sums or bool(torch.stack([s.to(sums[0].device) for s in sums]).all())
