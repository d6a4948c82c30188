"""OperationGraphs + kernels -> step functions, one forward and one backward per signature.

The run walks the plan and calls these; the plan is data, so a new minibatch needs no new code. A step function reads
its input groups (from a view, a broadcast row or an index), puts what backward will need into the rows of the
signature's buffers, and calls the kernel with the arena rows as destinations:

    forward = forward_function(graphs, kept, kernel)
    forward(StepMemory(n, sources, outs, kept_rows, saved, shared), workspace)
    forward, backward = row_functions(unbatched, needs)      # of an operation that runs call by call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch

from fxbatch.codegen.call_by_call import UnbatchedKernel
from fxbatch.codegen.inductor import CompiledGraph
from fxbatch.codegen.kernel import Kernel, Workspace
from fxbatch.codegen.operation_graphs import OperationGraphs
from fxbatch.ir import BROADCAST, INDEX, VIEW

StepFunction = Callable[..., Any]
Tensors = Sequence[torch.Tensor]
Source = tuple[int, torch.Tensor, Any]  # kind of gather, arena or rows, indices
# Flat rows (None: read in place), rows as the operation reads them.
Kept = tuple[torch.Tensor | None, torch.Tensor]


class StepMemory(NamedTuple):
    """What a step reads and writes in forward."""

    n: int
    sources: Sequence[Source]
    outs: Sequence[torch.Tensor]
    kept_rows: Sequence[Kept]
    saved: Any  # tensors; call by call a list with the tape
    shared: Sequence[torch.Tensor]


class _GroupReader:
    """How the rows of an input group are read."""

    def __init__(self, graphs: OperationGraphs, group: int, kept_groups: tuple[int, ...]) -> None:
        self.members = len(graphs.layout.groups[group])
        self.place = kept_groups.index(group) if group in kept_groups else None
        self.together = graphs.in_parameters(group)

    def read(self, n: int, source: Source, kept_rows: Sequence[Kept]) -> torch.Tensor:
        """[n, *shape], or [n, members, *shape]; rows that are kept are put where backward finds them."""
        kind, a, b = source
        flat, rows = (None, None) if self.place is None else kept_rows[self.place]
        if rows is not None and self.together:  # the rows of all steps lie together
            if kind == INDEX:
                torch.index_select(a, 0, b, out=flat)
            elif flat is not None:
                flat.copy_(a)
            return rows
        if kind != INDEX:
            return self._in_place(n, kind, a)
        if rows is None:
            return self._wide(n, torch.index_select(a, 0, b))
        torch.index_select(a, 0, b, out=flat)
        return rows

    def read_again(self, n: int, source: Source, kept_rows: Sequence[Kept]) -> torch.Tensor:
        """The rows of a kept group, read again in backward."""
        assert self.place is not None
        kind, a, _ = source
        return kept_rows[self.place][1] if self.together or kind == INDEX else self._in_place(n, kind, a)

    def _in_place(self, n: int, kind: int, a: torch.Tensor) -> torch.Tensor:
        return self._wide(n, a) if kind == VIEW else a.expand(n, *a.shape[1:])

    def _wide(self, n: int, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.members == 1 else rows.view(n, self.members, *rows.shape[1:])


def forward_function(
    graphs: OperationGraphs, kept_groups: tuple[int, ...], kernel: Kernel | CompiledGraph
) -> StepFunction:
    """`(step, workspace)`: the forward of a step."""
    groups = [_GroupReader(graphs, g, kept_groups) for g in range(len(graphs.layout.groups))]

    def forward(step: StepMemory, workspace: Workspace) -> None:
        rows = [g.read(step.n, x, step.kept_rows) for g, x in zip(groups, step.sources, strict=True)]
        kernel(step.n, (*rows, *step.shared), (*step.outs, *step.saved), workspace)

    return forward


def backward_function(
    graphs: OperationGraphs, kept_groups: tuple[int, ...], kernel: Kernel | CompiledGraph
) -> StepFunction:
    """`(step, grads, group_grads, extra, workspace)`: the backward of a step."""
    refs = [
        (r, _GroupReader(graphs, r.index, kept_groups) if r.kind == "group" else None)
        for r in graphs.backward_inputs
    ]

    def backward(
        step: StepMemory, grads: Tensors, group_grads: Tensors, extra: Tensors, workspace: Workspace
    ) -> None:
        rows = [
            g.read_again(step.n, step.sources[r.index], step.kept_rows) if g is not None
            else step.outs[r.index] if r.kind == "output" else step.saved[r.index]
            for r, g in refs
        ]  # fmt: skip
        kernel(step.n, (*grads, *rows, *step.shared), (*group_grads, *extra), workspace)

    return backward


def row_functions(
    kernel: UnbatchedKernel, needs: tuple[Sequence[bool], Sequence[bool]]
) -> tuple[StepFunction, StepFunction]:
    """Forward and backward of steps that run call by call: what is saved is the tape. needs: which inputs and shared
    operands need gradients; backward returns those of the latter."""
    grad = any(map(any, needs))
    grad_outputs = [j for j, t in enumerate(kernel.signature.outputs) if t.differentiable]

    def forward(step: StepMemory, workspace: Workspace) -> None:
        inputs = [_rows(*source, step.n, copied=kernel.keeps_rows(grad)) for source in step.sources]
        outs, n = step.outs, step.n
        tape = kernel.taped(inputs, step.shared, input_needs=needs[0], shared_needs=needs[1], n=n, outs=outs)
        step.saved[:] = [tape] if grad else []

    def backward(
        step: StepMemory,
        grads: Sequence[torch.Tensor | Sequence[torch.Tensor | None] | None],
        group_grads: Tensors,
        extra: Tensors,
        workspace: Workspace,
    ) -> list[torch.Tensor | None]:
        of_outputs: list[torch.Tensor | Sequence[torch.Tensor | None] | None] = [None] * len(step.outs)
        for j, gradient in zip(grad_outputs, grads, strict=True):
            of_outputs[j] = gradient
        inputs, shared = kernel.backward(step.saved[0], of_outputs, keep=workspace.keeps_graphs)
        for gradient, target in zip(compress(inputs, needs[0]), group_grads, strict=True):
            target.zero_() if gradient is None else target.copy_(gradient)
        return [*compress(shared, needs[1])]

    return forward, backward


def _rows(kind: int, a: torch.Tensor, b: torch.Tensor | None, n: int, *, copied: bool) -> torch.Tensor:
    """The rows of a source; copied: in memory that nobody else has."""
    if kind == INDEX:
        assert b is not None
        return torch.index_select(a, 0, b)
    rows = a.expand(n, *a.shape[1:]) if kind == BROADCAST else a
    return rows.clone() if copied else rows
