"""Signatures made by hand from a module or a function, and the per-row reference of their kernels."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from fxbatch import ir
from fxbatch.codegen.build_operation import build_operation
from fxbatch.codegen.kernel import Kernel, Workspace, emit_kernel
from fxbatch.codegen.operation_graphs import OperationGraphs, Ref, Unbatched
from fxbatch.torch_private import tree_flatten

Slot = ir.Slot


def signature_of(
    target: Any,
    inputs: Sequence[torch.Tensor],
    *,
    shared: Sequence[torch.Tensor] = (),
    modes: ir.Modes | None = None,
) -> tuple[ir.Signature, list[torch.Tensor]]:
    """A signature and its shared operands: of a module, or of a function `(*inputs, *shared)`."""
    slots = tuple(Slot("input", i) for i in range(len(inputs)))
    module = isinstance(target, torch.nn.Module)
    if module:
        named = [*target.named_parameters(remove_duplicate=False), *target.named_buffers()]
        names = tuple(name for name, _ in named)
        tensors = [tensor for _, tensor in named]
        owners = [(target.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        operands = tuple(ir.SharedOperand(owner, name) for owner, name in owners)
        result = target(*[x.clone() for x in inputs])
    else:
        names, tensors = (), list(shared)
        operands = tuple(ir.SharedOperand(None, f"w{i}", x) for i, x in enumerate(shared))
        slots += tuple(Slot("shared", i) for i in range(len(shared)))
        result = target(*[x.clone() for x in inputs], *shared)
    outputs = [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
    name = getattr(target, "__name__", type(target).__name__)
    return ir.Signature(
        operation=ir.Operation(name, "module" if module else "function", target),
        inputs=tuple(map(ir.TensorSpec.of, inputs)),
        outputs=tuple(map(ir.TensorSpec.of, outputs)),
        shared=operands,
        arguments=ir.Template.of((slots, {})),
        modes=modes or ir.Modes(training=module and target.training),
        shared_names=names,
    ), tensors  # fmt: skip


def build(
    target: Any, inputs: Sequence[torch.Tensor], *, grad: bool = True, **options: Any
) -> tuple[OperationGraphs | Unbatched, list[torch.Tensor]]:
    """The graphs of a module or function with every gradient that can be had (or none)."""
    signature, shared = signature_of(target, inputs, **options)
    needs = tuple(grad and x.differentiable for x in signature.inputs)
    shared_needs = tuple(grad and x.is_floating_point() and x.requires_grad for x in shared)
    graphs = build_operation(signature, input_needs=needs, shared_needs=shared_needs, shared=shared)
    return graphs, shared


emitted = functools.lru_cache(maxsize=16)(emit_kernel)  # a kernel is emitted once for all numbers of rows


def rows_of(inputs: Sequence[torch.Tensor], n: int) -> list[torch.Tensor]:
    """n different rows of the type of each input; integers and booleans are repeated."""
    gen = torch.Generator().manual_seed(n)
    rows = []
    for x in inputs:
        if x.is_floating_point() or x.is_complex():
            wide = torch.complex128 if x.is_complex() else torch.float64
            rows.append(torch.randn(n, *x.shape, generator=gen, dtype=wide).to(x.dtype))
        else:
            rows.append(x.expand(n, *x.shape).clone())
    return rows


def run_kernels(
    graphs: OperationGraphs,
    rows: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    n: int,
    *,
    given: bool,
    workspace: Workspace,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Outputs, input gradients and shared gradients from the three emitted kernels."""
    shared = [x.detach() for x in shared]
    groups = [
        rows[g[0]] if len(g) == 1 else torch.stack([rows[m] for m in g], 1) for g in graphs.layout.groups
    ]
    width = len(graphs.signature.outputs)

    def memory(kinds: Sequence[ir.TensorSpec]) -> list[torch.Tensor | None]:
        if not given:
            return [None] * len(kinds)
        return [torch.full((n, *k.shape), 77, dtype=k.dtype) for k in kinds]

    def call(kernel: Kernel, ins: list[torch.Tensor], kinds: Sequence[ir.TensorSpec]) -> list[torch.Tensor]:
        outs = memory(kinds)
        results = kernel(n, ins, outs, workspace)
        for out, result in zip(outs, results, strict=True):
            assert out is None or out is result
        return results

    with torch.no_grad():
        results = call(
            emitted(graphs.forward), [*groups, *shared], [*graphs.signature.outputs, *graphs.saved_types]
        )
        tensors = {"group": groups, "output": results[:width], "saved": results[width:], "extra": []}

        def pick(refs: Sequence[Ref]) -> list[torch.Tensor]:
            return [tensors[r.kind][r.index] for r in refs]

        input_grads: list[torch.Tensor | None] = [None] * len(rows)
        shared_grads: list[torch.Tensor | None] = [None] * len(shared)
        if graphs.backward is not None:
            kinds = [_group_type(graphs, g) for g in graphs.grad_groups]
            starts = [grads[i] for i in graphs.grad_outputs]
            ins = [*starts, *pick(graphs.backward_inputs), *shared]
            found = call(emitted(graphs.backward), ins, [*kinds, *graphs.extra_types])
            for g, grad in zip(graphs.grad_groups, found, strict=False):
                members = graphs.layout.groups[g]
                for i, m in enumerate(members):
                    input_grads[m] = grad if len(members) == 1 else grad[:, i]
            tensors["extra"] = found[len(graphs.grad_groups) :]
        if graphs.parameters is not None:
            kernel = emitted(graphs.parameters)
            sums = kernel(
                n, [*pick(graphs.parameter_inputs), *shared], [None] * len(graphs.grad_shared), workspace
            )
            for i, grad in zip(graphs.grad_shared, sums, strict=True):
                shared_grads[i] = grad
    return results[:width], input_grads, shared_grads


def _group_type(graphs: OperationGraphs, group: int) -> ir.TensorSpec:
    members = graphs.layout.groups[group]
    kind = graphs.signature.inputs[members[0]]
    lead = () if len(members) == 1 else (len(members),)
    return ir.TensorSpec((*lead, *kind.shape), kind.dtype, kind.device)


def reference(
    graphs: OperationGraphs,
    rows: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor],
    grads: Sequence[Any],
    n: int,
) -> tuple[list[Any], list[Any], list[Any]]:
    signature = graphs.signature
    leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in rows]
    weights = [x.detach().clone().requires_grad_(x.requires_grad) for x in shared]
    outputs = [signature.run([x[i].clone() for x in leaves], weights) for i in range(n)]
    ends, starts = [], []
    for i, row in enumerate(outputs):
        for out, grad in zip(row, grads, strict=True):
            if out.requires_grad:
                ends.append(out)
                starts.append(grad[i].clone())
    wanted = [x for x in (*leaves, *weights) if x.requires_grad]
    found = iter(torch.autograd.grad(ends, wanted, starts, allow_unused=True) if ends and wanted else ())
    got = [next(found, None) if x.requires_grad else None for x in (*leaves, *weights)]
    stacked = [torch.stack([x.detach() for x in column]) for column in zip(*outputs, strict=True)]
    return stacked, got[: len(rows)], got[len(rows) :]


def close(a: torch.Tensor | None, b: torch.Tensor | None, dtype: torch.dtype | None = None) -> None:
    if a is None or b is None:
        other = a if b is None else b
        assert other is None or not other.any(), "a gradient is missing"
        return
    tolerance = {torch.bfloat16: 5e-2, torch.float32: 2e-5}.get(b.dtype, 1e-9)
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 5)


def assert_equals_rows(
    target: Any, inputs: Sequence[torch.Tensor], shared: Sequence[torch.Tensor] = ()
) -> None:
    """The kernels of a module or function against it one row at a time, values and gradients: 1, 9, 2 rows, none."""
    torch.manual_seed(0)
    graphs, operands = build(target, inputs, **({"shared": shared} if shared else {}))
    assert isinstance(graphs, OperationGraphs), graphs
    workspace = Workspace()
    for n in (1, 9, 2):
        rows = rows_of(inputs, n)
        grads = rows_of([torch.empty(t.shape, dtype=t.dtype) for t in graphs.signature.outputs], n)
        expected = reference(graphs, rows, operands, grads, n)
        for given in (True, False):
            got = run_kernels(graphs, rows, operands, grads, n, given=given, workspace=workspace)
            for ours, theirs in zip(got, expected, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    close(a, b)
    assert_takes_no_rows(graphs, inputs, operands)


def assert_takes_no_rows(
    graphs: OperationGraphs, inputs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
) -> None:
    """Results without rows, of the types of any others; gradients of parameters are zeros."""
    if _is_called(graphs, torch.ops.aten.native_group_norm.default):
        return  # PyTorch's own group_norm refuses a batch of none
    grads = [torch.empty((0, *t.shape), dtype=t.dtype) for t in graphs.signature.outputs]
    outputs, _, shared_grads = run_kernels(
        graphs, rows_of(inputs, 0), operands, grads, 0, given=False, workspace=Workspace()
    )
    for out, kind in zip(outputs, graphs.signature.outputs, strict=True):
        assert out.shape == (0, *kind.shape) and out.dtype == kind.dtype
    assert all(g is None or not g.any() for g in shared_grads)


def _is_called(graphs: OperationGraphs, target: Any) -> bool:
    return any(node.target is target for node in graphs.forward.graph.nodes)


def launches(kernel: Kernel) -> int:
    """How many calls of a kernel's body do work: views, items and sizes don't."""
    free = (operator.getitem, operator.add, operator.mul)
    return sum(x.op == "call_function" and x.target not in free for x in kernel.body.graph.nodes)
