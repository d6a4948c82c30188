"""Gradients of parameters: of each operation once a minibatch, on the rows of all its steps.

In: what a backward pass has left after all steps. Out: each operation that ran, with its operands' gradients.

    left = Left(phases, memory, rows)
    for compiled, results in parameter_gradients(operations, left, workspace, NativeKernels(...)):
        results[i]                                    # of shared operand compiled.grad_shared[i]

All operations that have native programs run in one call of `_native.c`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fxbatch.codegen.build_operation import Ref
from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import address
from fxbatch.runtime.memory import GradientRows, Memory
from fxbatch.runtime.native_stretches import NativeKernels
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.phase import Phase
from fxbatch.runtime.watchers import named_step


@dataclass(frozen=True)
class Left:
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

    def places(self, compiled: CompiledOperation, held: list[torch.Tensor]) -> list[int] | None:
        """Pointers and bytes of all rows that the gradients of an operation's parameters read; None where some aren't
        together on the CPU. held: until C has read them."""
        own, kept = self.memory.places_of(compiled), compiled.kept_groups
        extra = self.rows.extra_places(compiled).tolist()
        found: list[int] = []
        for ref in compiled.parameter_inputs:
            if ref.kind == "extra":
                place = extra[ref.index]
            elif ref.kind == "group":
                place = own[kept.index(ref.index)]
            elif ref.kind == "saved":
                place = own[len(kept) + ref.index]
            else:
                rows = self.all_rows(compiled, ref)
                held.append(rows)
                place = (address(rows, rows.nbytes) if rows.is_contiguous() else None, rows.nbytes)
            if not place[0]:
                return None
            found += place[:2]
        return found


def parameter_gradients(
    operations: Sequence[CompiledOperation], left: Left, workspace: Workspace, kernels: NativeKernels | None
) -> Iterator[tuple[CompiledOperation, Sequence[torch.Tensor]]]:
    """The gradients that operations give their shared operands, which have no other owner. kernels: runs native
    programs; None where nothing is to run in C."""
    operations = [op for op in operations if op.parameters is not None]
    made = [None if kernels is None else _add_native(op, left, kernels) for op in operations]
    if kernels is not None:
        kernels.run()
    for compiled, found in zip(operations, made, strict=True):
        if found is not None and not found:
            continue  # added to those of another
        if found is None or kernels is None or kernels.failed(found):
            assert compiled.parameters is not None
            n, shared = left.memory.calls(compiled), left.memory.shared[compiled.signature]
            rows = [left.all_rows(compiled, ref) for ref in compiled.parameter_inputs]
            with named_step(compiled.signature.name, n, "parameter gradients"):
                found = compiled.parameters(
                    n, (*rows, *shared), (None,) * len(compiled.grad_shared), workspace
                )
        yield compiled, found


def _add_native(
    compiled: CompiledOperation, left: Left, kernels: NativeKernels
) -> Sequence[torch.Tensor] | None:
    """Let an operation's native program run with the others; None where it has none or can't."""
    step = compiled.native_parameters
    if step is None:
        return None
    places = left.places(compiled, kernels.held)
    if places is None:
        return None
    n, shared = left.memory.calls(compiled), left.memory.shared[compiled.signature]
    return kernels.add(step, n, places, shared, compiled.grad_shared)
