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

from fxbatch.codegen.build_operation import Ref
from fxbatch.codegen.native import Place, place_of
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.forward import block_rows
from fxbatch.runtime.native_steps import NativeKernels
from fxbatch.runtime.watchers import named_step

if TYPE_CHECKING:
    from fxbatch.runtime.backward import Backward

Results = Sequence[torch.Tensor]


def parameter_gradients(backward: Backward) -> Iterator[tuple[CompiledOperation, Results]]:
    """The gradients that each operation gives its shared operands, which nobody else holds."""
    run, workspace = backward.run, backward.run.workspace()
    operations = [op for op in backward.running if op.parameters is not None]
    kernels = NativeKernels(workspace, run.engine.gradient_memory)
    made = [_add_native(backward, op, kernels) if run.native else None for op in operations]
    kernels.run()
    for compiled, found in zip(operations, made, strict=True):
        if found is None or kernels.failed(found):
            assert compiled.parameters is not None
            n, shared = run.rows_of[compiled].rows, run.shared[compiled.signature]
            rows = [_all_rows(backward, compiled, ref) for ref in compiled.parameter_inputs]
            with named_step(compiled.signature.name, n, "parameter gradients"):
                made_now = compiled.parameters(
                    n, (*rows, *shared), (None,) * len(compiled.grad_shared), workspace
                )
            yield compiled, made_now
        else:
            yield compiled, found


def _add_native(backward: Backward, compiled: CompiledOperation, kernels: NativeKernels) -> Results | None:
    """Let an operation's native program run with the others; None where it has none or can't."""
    step = compiled.native_parameters
    places = (
        None
        if step is None
        else [_place(backward, compiled, ref, kernels) for ref in compiled.parameter_inputs]
    )
    if step is None or places is None or None in places:
        return None
    n, shared = backward.run.rows_of[compiled].rows, backward.run.shared[compiled.signature]
    return kernels.add(step, n, [place for place in places if place is not None], shared)


def _place(backward: Backward, compiled: CompiledOperation, ref: Ref, kernels: NativeKernels) -> Place | None:
    """Pointer and bytes of the rows of all steps; None where they aren't together on the CPU."""
    rows, kept = backward.run.rows_of[compiled], backward.kept.get(compiled)
    if ref.kind == "extra" and kept is None:
        return backward.rows.places(compiled)[ref.index]
    if ref.kind == "group":
        position = compiled.kept_groups.index(ref.index)
        found = rows.in_place.get(position)
        tensor = rows.kept[position].tensor if found is None else found
    elif ref.kind == "saved":
        tensor = rows.saved[ref.index].tensor
    elif ref.kind == "extra" and kept is not None:
        tensor = kept[ref.index]
    else:
        tensor = _all_rows(backward, compiled, ref)
        kernels.held.append(tensor)
    return place_of(tensor) if tensor is not None and tensor.is_contiguous() else None


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
