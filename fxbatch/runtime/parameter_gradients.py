"""Gradients of parameters: of each operation once a minibatch, on the rows of all its steps.

In: what a backward pass has left after all steps. Out: the gradients of the operations' shared operands.

    table = KernelTable.of(operations)                         # once a set of operations
    left = Left(phases, memory, rows)
    kernels = table.fill(left, workspace, gradient_memory, asked)       # before the steps run
    add_parameter_gradients(operations, kernels, left, workspace, found)     # after them: found[id(operand)]

All operations that have native programs run in one call of `_native.c`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fxbatch.codegen.build_operation import Ref
from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import address, extension
from fxbatch.codegen.native_programs import NativeStep
from fxbatch.runtime.memory import GradientRows, Memory, kinds_of_rows
from fxbatch.runtime.operands import FROM_FORWARD, FROM_STEPS, OUTPUT, Asked, add_gradients, put_kernels
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.phase import Phase
from fxbatch.runtime.pool import GradientMemory
from fxbatch.runtime.watchers import named_step
from fxbatch.torch_private import profiler_enabled

_ROWS = 1 << 20  # programs take no more
Gradients = dict[int, torch.Tensor]  # id of the tensor -> its gradient


class Left(NamedTuple):
    """What forward and the steps of backward left for the gradients of parameters."""

    phases: Sequence[Phase]
    memory: Memory
    rows: GradientRows

    def all_rows(self, compiled: CompiledOperation, ref: Ref) -> torch.Tensor:
        """[N, ...]: the rows of all steps of the operation, in step order."""
        n = self.memory.calls(compiled)
        if ref.kind == "group":
            position = compiled.kept_groups.index(ref.index)
            size, rows = compiled.kept_members[position], self.memory.kept(compiled, position)
            rows = rows[: n * size]
            return rows if size == 1 else rows.view(n, size, *rows.shape[1:])
        if ref.kind == "output":
            found = [
                phase.rows_of_output(self.memory, k, ref.index)
                for phase in self.phases
                for k, s in enumerate(phase.plan.step_signature.tolist())
                if phase.compiled[s] is compiled
            ]
            return found[0] if len(found) == 1 else torch.cat(found)
        if ref.kind == "extra":
            return self.rows.extra(compiled)[ref.index]
        return self.memory.saved(compiled, ref.index)[:n]


@dataclass(frozen=True)
class _Kernel:
    """The native program of one operation, and what it reads and writes: rows of a table from `row` on, first its
    inputs, then the operation's shared operands, then its results."""

    operation: CompiledOperation
    step: NativeStep
    row: int
    inputs: tuple[tuple[int, int], ...]  # from where, and which array of the operation there
    slots: tuple[int, ...]  # which of all results are its own
    adds: bool  # to what another has written there


@dataclass(frozen=True, eq=False)
class KernelTable:
    """The kernels of a set of operations that run in one call: rows (pointer, bytes) that are still to come."""

    kernels: tuple[_Kernel, ...]
    programs: tuple[Any, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and type of each
    rows: int
    rest: tuple[CompiledOperation, ...]  # the operations without a kernel here
    reading: tuple[int, ...]  # the kernels that read outputs of steps

    @staticmethod
    def of(operations: Sequence[CompiledOperation]) -> KernelTable:
        """The table of those that have native programs, and arrays that C can read."""
        kernels: list[_Kernel] = []
        results: list[tuple[tuple[int, ...], torch.dtype]] = []
        written: dict[Any, int] = {}  # the result of each shared operand that others may be added to
        row = 0
        for operation in operations:
            step = operation.native_parameters
            arrays = (*kinds_of_rows(operation), *operation.extra_types)
            if step is None or not all(k.nbytes and k.device.type == "cpu" for k in arrays):
                continue
            kept = operation.kept_groups
            inputs = tuple(
                (FROM_STEPS, ref.index) if ref.kind == "extra"
                else (FROM_FORWARD, kept.index(ref.index)) if ref.kind == "group"
                else (FROM_FORWARD, len(kept) + ref.index) if ref.kind == "saved"
                else (OUTPUT, ref.index)
                for ref in operation.parameter_inputs
            )  # fmt: skip
            keys = [operation.signature.shared[i].key for i in operation.grad_shared]
            adds = step.adding is not None and bool(keys) and all(key in written for key in keys)
            if adds:
                slots = tuple(written[key] for key in keys)
            else:
                slots = tuple(range(len(results), len(results) + len(keys)))
                results += step.outputs(1)  # as many for any number of rows
                if step.adding is not None:
                    written.update(zip(keys, slots, strict=True))
            kernels.append(_Kernel(operation, step, row, inputs, slots, adds))
            row += len(inputs) + len(step.shared_bytes) + len(slots)
        programs = tuple(k.step.adding if k.adds else k.step.program for k in kernels)
        own = {k.operation for k in kernels}
        rest = tuple(op for op in operations if op not in own)
        reading = tuple(i for i, k in enumerate(kernels) if any(source == OUTPUT for source, _ in k.inputs))
        return KernelTable(tuple(kernels), programs, tuple(results), row, rest, reading)

    def fill(
        self, left: Left, workspace: Workspace, memory: GradientMemory, asked: Asked
    ) -> NativeKernels | None:
        """The kernels with the pointers of now; None where one can't read what it is given."""
        counts = array("q", left.memory.calls_of([k.operation for k in self.kernels]))
        rows = np.empty((self.rows, 2), dtype=np.int64)
        results = [memory.take(shape, dtype) for shape, dtype in self.results]
        held: list[torch.Tensor] = []
        good = (
            put_kernels(rows, self.kernels, left.memory, left.rows, results, asked)
            and all(_put_outputs(self.kernels[i], left, rows, held) for i in self.reading)
            and all(0 < n <= _ROWS for n in counts)
        )
        return NativeKernels(self, workspace, counts, rows, results, held) if good else None


def _put_outputs(kernel: _Kernel, left: Left, rows: np.ndarray, held: list[torch.Tensor]) -> bool:
    """Where the outputs of steps that a kernel reads are; whether C can read them. held: until it has."""
    for i, (source, _) in enumerate(kernel.inputs):
        if source == OUTPUT:
            found = left.all_rows(kernel.operation, kernel.operation.parameter_inputs[i])
            place = address(found, found.nbytes) if found.is_contiguous() else None
            if not place:
                return False
            held.append(found)
            rows[kernel.row + i] = place, found.nbytes
    return True


class NativeKernels(NamedTuple):
    """Kernels that run one after another in one call, with memory of their own for their results."""

    table: KernelTable
    workspace: Workspace
    counts: array[int]  # rows of each
    rows: np.ndarray  # int64 [.., 2]: pointers and bytes
    results: list[torch.Tensor]
    held: list[torch.Tensor]

    @property
    def steps(self) -> list[NativeStep]:
        """What each kernel is of."""
        return [k.step for k in self.table.kernels]

    def run(self, first: int = 0, last: int = -1) -> bool:
        """Run them all, or some; whether they did."""
        last = len(self.counts) if last < 0 else last
        if profiler_enabled() and last - first > 1:
            for i in range(first, last):
                with named_step(self.table.kernels[i].step.name, self.counts[i], "parameter gradients"):
                    if not self.run(i, i + 1):
                        return False
            return True
        room = self.workspace.native_room()
        return bool(extension.run_all(self.table.programs, room, self.counts, self.rows, first, last) == last)


def add_parameter_gradients(
    operations: Sequence[CompiledOperation],
    kernels: NativeKernels | None,
    left: Left,
    workspace: Workspace,
    found: Gradients,
) -> None:
    """Add what operations give as the gradients of their shared operands. kernels: their native programs; None where
    nothing is to run in C."""
    if kernels is not None and kernels.run():  # else an index is out of range, which Python tells of
        add_gradients(kernels.table.kernels, left.memory.shared, kernels.results, found)
        operations = kernels.table.rest
    for compiled in operations:
        if compiled.parameters is None:
            continue
        n, shared = left.memory.calls(compiled), left.memory.shared[compiled.signature]
        rows = [left.all_rows(compiled, ref) for ref in compiled.parameter_inputs]
        with named_step(compiled.signature.name, n, "parameter gradients"):
            grads = compiled.parameters(n, (*rows, *shared), (None,) * len(compiled.grad_shared), workspace)
        for position, grad in zip(compiled.grad_shared, grads, strict=True):
            add_gradient(found, shared[position], grad)


def add_gradient(found: Gradients, tensor: torch.Tensor, grad: torch.Tensor) -> None:
    """Note a gradient of a tensor that may have others."""
    before = found.get(id(tensor))
    if before is None:
        found[id(tensor)] = grad.clone() if grad._base is not None else grad
    else:
        found[id(tensor)] = before + grad
