"""A Run in `mode="unrolled"`: each structure is emitted as an fx.GraphModule, kept, run under autograd."""

from __future__ import annotations

import dataclasses

import numpy as np

from fxbatch.codegen.operation_graphs import OperationGraphs, Unbatched
from fxbatch.codegen.unrolled import Unrolled, emit_unrolled
from fxbatch.ir import Program, Schedule
from fxbatch.passes.fold import batch_calls
from fxbatch.runtime.differentiable import DifferentiableRun
from fxbatch.runtime.operation_cache import CompiledOperation


def graphs_of(compiled: CompiledOperation | None) -> OperationGraphs | Unbatched | None:
    """What `emit_unrolled` takes for a signature."""
    if compiled is None:
        return None
    return compiled.graphs if compiled.graphs is not None else Unbatched(compiled.reason)


class UnrolledRun(DifferentiableRun):
    """One minibatch in unrolled modules, one a phase; the same interface as Run."""

    def run(self, program: Program) -> None:
        """Execute the calls of a phase that is not the last: instances may ask for any of its values."""
        if len(program):
            every = np.arange(program.known, program.values, dtype=np.int64)
            self.execute(dataclasses.replace(program, outputs=every), self.planner.schedule(program))

    def execute(self, program: Program, schedule: Schedule) -> None:
        """Emit the module of this structure (or find it), run it, and keep what it gives."""
        unrolled = self.planner.unrolled(program, lambda: self.emit(program, schedule))
        known = [self.rows(values) for values in unrolled.known]
        results = unrolled(unrolled.arguments(known, program.constants))
        self.launches += len(schedule)
        types = np.array([self.type_id(t) for t in program.types], dtype=np.int64)
        row = np.full(program.values, -1, dtype=np.int64)
        row[: program.known] = self.value_row[: program.known]
        for values, tensor in zip(unrolled.results, results, strict=True):
            blocks = self.blocks[int(types[program.type_of_value[values[0]]])]
            row[values] = blocks.used + np.arange(len(values))
            blocks.append(tensor)
        self.value_row = row
        made = program.type_of_value[program.known :]
        self.value_type = np.concatenate([self.value_type[: program.known], types[made]])

    def emit(self, program: Program, schedule: Schedule) -> Unrolled:
        """The unrolled module of a scheduled program."""
        present = set(program.sig.tolist())
        operations = [
            graphs_of(self.compiled(s, [x.resolve() for x in s.shared])) if i in present else None
            for i, s in enumerate(program.signatures)
        ]
        return emit_unrolled(batch_calls(program, schedule), operations)
