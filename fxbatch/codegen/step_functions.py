"""OperationGraphs + kernels -> step functions, one forward and one backward per signature.

The run walks the plan and calls these; the plan is data, so a new minibatch needs no new code. A step function reads
its input groups (from a view, a broadcast row or an index), puts what backward will need into the rows of the
signature's buffers, and calls the kernel with the arena rows as destinations:

    forward = forward_function(graphs, kept, kernel)
    forward(n, sources, outs, kept_rows, saved, shared, workspace)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxbatch.codegen.inductor import CompiledGraph
from fxbatch.codegen.kernel import Kernel, Workspace
from fxbatch.codegen.operation_graphs import OperationGraphs
from fxbatch.ir import INDEX, VIEW

StepFunction = Callable[..., Any]
Source = tuple[int, torch.Tensor, Any]  # kind of gather, arena or rows, indices
Kept = tuple[
    torch.Tensor | None, torch.Tensor
]  # flat rows (None: read in place), rows as the operation reads them


class _GroupReader:
    """How the rows of an input group are read."""

    def __init__(self, graphs: OperationGraphs, group: int, kept_groups: tuple[int, ...]) -> None:
        self.number, self.type, self.members = (
            group,
            graphs.group_type(group),
            len(graphs.layout.groups[group]),
        )
        self.place = kept_groups.index(group) if group in kept_groups else None
        self.together = graphs.in_parameters(group)

    def read(self, n: int, source: Source, kept_rows: Sequence[Kept], workspace: Workspace) -> torch.Tensor:
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
        if flat is None:
            flat = workspace.rows(self.number, self.type, self.members * n)
        torch.index_select(a, 0, b, out=flat)
        return self._wide(n, flat) if rows is None else rows

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
    """`(n, sources, outs, kept, saved, shared, workspace)`: the forward of a step."""
    groups = [_GroupReader(graphs, g, kept_groups) for g in range(len(graphs.layout.groups))]

    def forward(
        n: int,
        sources: Sequence[Source],
        outs: Sequence[torch.Tensor],
        kept_rows: Sequence[Kept],
        saved: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        workspace: Workspace,
    ) -> None:
        rows = [g.read(n, source, kept_rows, workspace) for g, source in zip(groups, sources, strict=True)]
        kernel(n, (*rows, *shared), (*outs, *saved), workspace)

    return forward


def backward_function(
    graphs: OperationGraphs, kept_groups: tuple[int, ...], kernel: Kernel | CompiledGraph
) -> StepFunction:
    """`(n, grads, sources, outs, kept, saved, shared, group_grads, extra, workspace)`: the backward of a step."""
    refs = [
        (r, _GroupReader(graphs, r.index, kept_groups) if r.kind == "group" else None)
        for r in graphs.backward_inputs
    ]

    def backward(
        n: int,
        grads: Sequence[torch.Tensor],
        sources: Sequence[Source],
        outs: Sequence[torch.Tensor],
        kept_rows: Sequence[Kept],
        saved: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
        group_grads: Sequence[torch.Tensor],
        extra: Sequence[torch.Tensor],
        workspace: Workspace,
    ) -> None:
        rows = [
            g.read_again(n, sources[r.index], kept_rows) if g is not None
            else outs[r.index] if r.kind == "output" else saved[r.index]
            for r, g in refs
        ]  # fmt: skip
        kernel(n, (*grads, *rows, *shared), (*group_grads, *extra), workspace)

    return backward
