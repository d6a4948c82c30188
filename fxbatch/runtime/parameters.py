"""Gradients of parameters: of each operation once a minibatch, on the rows of all its steps.

In: a Backward that has walked all steps. Out: each operation that ran, with the gradients of its shared operands.

    for compiled, results in parameter_gradients(backward):
        results[i]                                    # of shared operand compiled.grad_shared[i]

All operations that have native programs run in one call of `_native.c`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from fxbatch.codegen.operation import Ref
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.forward import block_rows
from fxbatch.runtime.native_steps import NativeKernels

if TYPE_CHECKING:
    from fxbatch.runtime.backward import Backward

Results = Sequence[torch.Tensor]


def parameter_gradients(backward: Backward) -> Iterator[tuple[CompiledOperation, Results]]:
    """The gradients that each operation gives its shared operands, which nobody else holds."""
    run, workspace = backward.run, backward.run.workspace()
    operations = [op for op in backward.running if op.parameters is not None]
    inputs = [[_all_rows(backward, op, ref) for ref in op.parameter_inputs] for op in operations]
    kernels = NativeKernels(workspace, run.engine.gradient_memory)
    made: list[Results | None] = []
    for compiled, rows in zip(operations, inputs, strict=True):
        step = compiled.native_parameters if run.native else None
        n, shared = run.rows_of[compiled].rows, run.shared[compiled.signature]
        made.append(None if step is None else kernels.add(step, n, rows, shared))
    kernels.run()
    for compiled, rows, found in zip(operations, inputs, made, strict=True):
        if found is None or kernels.failed(found):
            assert compiled.parameters is not None
            n, shared = run.rows_of[compiled].rows, run.shared[compiled.signature]
            found = compiled.parameters(n, (*rows, *shared), (None,) * len(compiled.grad_shared), workspace)
        yield compiled, found


def _all_rows(backward: Backward, compiled: CompiledOperation, ref: Ref) -> torch.Tensor:
    """[N, ...]: the rows of all steps of the operation, in step order."""
    run, rows = backward.run, backward.run.rows_of[compiled]
    if ref.kind == "group":
        return rows.kept_rows(compiled.kept_groups.index(ref.index), 0, rows.rows)[1]
    if ref.kind == "output":
        found = []
        for phase in run.phases:
            steps = [
                k for k, s in enumerate(phase.plan.step_signature.tolist()) if phase.compiled[s] is compiled
            ]
            found += [block_rows(run, phase, k, ref.index) for k in steps]
        return found[0] if len(found) == 1 else torch.cat(found)
    if ref.kind == "extra":
        kept = backward.kept.get(compiled)
        return backward.rows.extra(compiled)[ref.index] if kept is None else kept[ref.index]
    tensor = rows.saved[ref.index].tensor
    assert tensor is not None
    return tensor[: rows.rows]
