"""A Run under ordinary autograd (`backward="autograd"`): differentiable as often as one likes.

Values live in the output tensors of steps instead of arenas; an input group is read from the blocks that it
needs: a narrow, an expand, or an index_select of their concatenation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from fxbatch.codegen.body import devices_of
from fxbatch.codegen.unrolled import RowByRow, stack_payload
from fxbatch.ir import INDEX, VIEW, Plan, Program, Schedule, Signature, TensorType
from fxbatch.passes.plan import is_constant
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.planner import Planner
from fxbatch.runtime.run import Renumber, renumbering


class Blocks:
    """All values of one tensor type: tensors [rows, *shape], one a step output, in row order."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.starts: list[int] = []
        self.used = 0

    def append(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        self.starts.append(self.used)
        self.used += tensor.shape[0]

    def read(self, rows: np.ndarray) -> torch.Tensor:
        """A tensor [len(rows), *shape], differentiable."""
        starts = np.array(self.starts, dtype=np.int64)
        block = np.searchsorted(starts, rows, side="right") - 1
        needed, place = np.unique(block, return_inverse=True)
        tensors = [self.tensors[b] for b in needed.tolist()]
        base = np.cumsum([0] + [t.shape[0] for t in tensors])[:-1]
        local = rows - starts[block] + base[place]
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if len(local) and (np.diff(local) == 1).all():
            return joined.narrow(0, int(local[0]), len(local))
        return joined.index_select(0, torch.from_numpy(local).to(joined.device))


class DifferentiableRun:
    """One minibatch under ordinary autograd; the same interface as Run."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.grad = True
        self.type_ids: dict[TensorType, int] = {}
        self.blocks: list[Blocks] = []
        self.value_row = np.zeros(0, dtype=np.int64)
        self.value_type = np.zeros(0, dtype=np.int64)
        self.rows_run: dict[CompiledOperation, int] = {}
        self.phases: list[tuple[Program, Schedule, Plan, list[CompiledOperation | None]]] = []
        self.launches = 0

    def type_id(self, kind: TensorType) -> int:
        found = self.type_ids.get(kind)
        if found is None:
            found = self.type_ids[kind] = len(self.blocks)
            self.blocks.append(Blocks())
        return found

    def run(self, program: Program) -> None:
        """Execute the calls of a program."""
        if len(program):
            self.execute(program, self.planner.schedule(program))

    def finish(self, program: Program, values: np.ndarray) -> Renumber:
        """Execute the last calls, rewritten; the map from the recorder's value ids to this run's."""
        if not len(program):
            return lambda ids: ids
        program, schedule = self.planner.prepare(program)
        if len(program):
            self.execute(program, schedule)
        return renumbering(values, program.outputs)

    def execute(self, program: Program, schedule: Schedule) -> None:
        """Run a scheduled program."""
        present = np.zeros(len(program.signatures), dtype=bool)
        present[program.sig] = True
        shared = {
            s: [x.resolve() for x in sig.shared] for s, sig in enumerate(program.signatures) if present[s]
        }
        compiled = [
            self.compiled(signature, shared[s]) if present[s] else None
            for s, signature in enumerate(program.signatures)
        ]
        types = np.array([self.type_id(t) for t in program.types], dtype=np.int64)
        used = np.array([self.blocks[t].used for t in types.tolist()], dtype=np.int64)
        before = np.array([0 if c is None else self.rows_run.get(c, 0) for c in compiled], dtype=np.int64)
        known = self.value_row[: program.known]
        whole = not program.known and not used.any()
        operations = self.planner.operation_set(program, tuple(compiled))
        if whole:
            plan, _ = self.planner.plan(program, schedule, operations)
        else:
            plan, _ = self.planner.plan_on(program, schedule, operations, known, used, before)
        self.phases.append((program, schedule, plan, compiled))
        for k in range(len(plan)):
            s = int(plan.step_signature[k])
            operation = compiled[s]
            assert operation is not None
            self._step(program, plan, k, operation, shared[s], types, int(before[s]))
        made = program.type_of_value[program.known :]
        self.value_row = plan.row_of_value
        self.value_type = np.concatenate([self.value_type[: program.known], types[made]])

    def compiled(self, signature: Signature, shared: Sequence[torch.Tensor]) -> CompiledOperation:
        """The operation without backward graphs: autograd differentiates its forward graph."""
        needs = ((False,) * len(signature.inputs), (False,) * len(signature.shared))
        return self.planner.operations.get(signature, needs, shared, autograd=True)

    def _step(
        self,
        program: Program,
        plan: Plan,
        k: int,
        compiled: CompiledOperation,
        shared: list[torch.Tensor],
        types: np.ndarray,
        before: int,
    ) -> None:
        n, at = int(plan.step_rows[k]), int(plan.step_offset[k])
        signature = compiled.signature
        self.rows_run[compiled] = self.rows_run.get(compiled, 0) + n
        if is_constant(signature):
            s = int(plan.step_signature[k])
            outs = [self._constants(program, s, at - before, n, plan.constant_order[s])]
        else:
            self.launches += n if compiled.graphs is None else 1
            inputs = [
                self._read(plan, g, n, types)
                for g in range(int(plan.first_gather[k]), int(plan.first_gather[k + 1]))
            ]
            outs = self._call(compiled, n, inputs, shared)
        blocks = range(int(plan.first_block[k]), int(plan.first_block[k + 1]))
        for b, out in zip(blocks, outs, strict=True):
            self.blocks[int(types[plan.block_arena[b]])].append(out)

    def _read(self, plan: Plan, g: int, n: int, types: np.ndarray) -> torch.Tensor:
        blocks = self.blocks[int(types[plan.gather_arena[g]])]
        kind, start, rows = int(plan.gather_kind[g]), int(plan.gather_start[g]), int(plan.gather_rows[g])
        if kind == INDEX:
            read = blocks.read(plan.indices[start : start + rows])
        elif kind == VIEW:
            read = blocks.read(np.arange(start, start + rows))
        else:
            read = blocks.read(np.array([start])).expand(n, *blocks.tensors[0].shape[1:])
        return read if rows == n else read.reshape(n, rows // n, *read.shape[1:])

    def _call(
        self, compiled: CompiledOperation, n: int, inputs: list[torch.Tensor], shared: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        signature = compiled.signature
        grad = signature.modes.grad and torch.is_grad_enabled()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            if compiled.graphs is None:
                return list(RowByRow(signature)(n, *inputs, *shared))
            for device in devices_of(signature):
                stack.enter_context(torch.autocast(device, enabled=False))  # casts are in the graph
            return list(compiled.graphs.forward(n, *inputs, *shared))[: len(signature.outputs)]

    def _constants(
        self, program: Program, s: int, first: int, n: int, order: np.ndarray | None
    ) -> torch.Tensor:
        payload = program.constants[s]
        items = (
            payload[first : first + n] if order is None else [payload[i] for i in order[first : first + n]]
        )
        return stack_payload(program.signatures[s], items)

    def rows(self, values: np.ndarray) -> torch.Tensor:
        """A differentiable tensor [len(values), *shape] of values of one type."""
        return self.blocks[int(self.value_type[values[0]])].read(self.value_row[values])

    def materialise(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real tensors that carry gradients."""
        return [self.rows(np.array([v], dtype=np.int64))[0] for v in values]

    def read(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real, detached tensors."""
        with torch.no_grad():
            return [self.rows(np.array([v], dtype=np.int64))[0].detach() for v in values]

    def numbers(self, values: Sequence[int]) -> list[Any]:
        """The values as Python numbers in nested lists."""
        return [t.tolist() for t in self.read(values)]
