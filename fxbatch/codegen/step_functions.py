"""OperationGraphs + kernels -> emitted Python step functions, one forward and one backward a signature.

The looped module walks the plan and calls these; the plan is data, so a new minibatch needs no new code.
A step function reads its input groups (from a view, a broadcast row or an index), puts what backward will
need into the rows of the signature's buffers, and calls the kernel with the arena rows as destinations:

    def forward_cell(n, sources, outs, kept, saved, shared, workspace):
        kind, a, b = sources[0]                      # inputs 0, 2, read interleaved
        flat, x0 = kept[0]
        if kind == INDEX: index_select(a, 0, b, out=flat)
        elif flat is not None: flat.copy_(a)         # None: x0 is read in place
        kernel(n, (x0, *shared), (*outs, *saved), workspace)
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any

import torch

from fxbatch.codegen.build_operation import OperationGraphs, Ref
from fxbatch.codegen.inductor import CompiledGraph
from fxbatch.codegen.kernel import Kernel
from fxbatch.ir import INDEX, VIEW, TensorType


def group_type(graphs: OperationGraphs, group: int) -> TensorType:
    """The type of the rows of an input group's members."""
    return graphs.signature.inputs[graphs.layout.groups[group][0]]


def _identifier(name: str) -> str:
    word = re.sub(r"\W+", "_", name).strip("_")
    return f"{word}_" if not word or word[0].isdigit() or keyword.iskeyword(word) else word


def in_parameters(graphs: OperationGraphs, group: int) -> bool:
    """Whether the parameter graph reads the rows of a group: then those of all steps lie together."""
    return any(r.kind == "group" and r.index == group for r in graphs.parameter_inputs)


def _read_group(graphs: OperationGraphs, group: int, kept: tuple[int, ...]) -> list[str]:
    members = graphs.layout.groups[group]
    size = len(members)
    x = f"x{group}"
    comment = (
        f"  # input{'s' if size > 1 else ''} {', '.join(map(str, members))}: {group_type(graphs, group)}"
    )
    lines = [f"kind, a, b = sources[{group}]{comment}"]
    shape = "".join(f", {d}" for d in group_type(graphs, group).shape)
    wide = f".view(n, {size}{shape})" if size > 1 else ""
    spread = f"a.expand(n{', -1' * len(group_type(graphs, group).shape)})"
    if group in kept and in_parameters(graphs, group):
        lines += [
            f"flat, {x} = kept[{kept.index(group)}]",
            "if kind == INDEX:",
            "    index_select(a, 0, b, out=flat)",
            "elif flat is not None:",
            "    flat.copy_(a)",
        ]
        return lines
    target = (
        "flat"
        if group in kept
        else f"workspace.rows({group}, type{group}, {f'{size} * n' if size > 1 else 'n'})"
    )
    lines.append("if kind == INDEX:")
    if group in kept:
        lines += [f"    flat, {x} = kept[{kept.index(group)}]", f"    index_select(a, 0, b, out={target})"]
    else:
        lines += [f"    {x} = index_select(a, 0, b, out={target}){wide}"]
    lines += ["elif kind == VIEW:", f"    {x} = a{wide}", "else:", f"    {x} = {spread}"]
    return lines


def emit_forward_step(
    graphs: OperationGraphs, kept: tuple[int, ...], kernel: Kernel | CompiledGraph
) -> tuple[Callable[..., Any], str]:
    """The forward step function of a signature, and its source."""
    name = f"forward_{_identifier(graphs.signature.name)}"
    body = []
    for group in range(len(graphs.layout.groups)):
        body += _read_group(graphs, group, kept)
    groups = "".join(f"x{g}, " for g in range(len(graphs.layout.groups)))
    given = f"({groups}*shared)" if groups else "shared"
    body.append(f"kernel(n, {given}, (*outs, *saved), workspace)")
    return _compile(name, "n, sources, outs, kept, saved, shared, workspace", body, kernel, graphs)


def emit_backward_step(
    graphs: OperationGraphs, kept: tuple[int, ...], kernel: Kernel | CompiledGraph | None
) -> tuple[Callable[..., Any] | None, str]:
    """The backward step function of a signature, and its source; (None, "") where nothing needs it."""
    if kernel is None:
        return None, ""
    name = f"backward_{_identifier(graphs.signature.name)}"
    body: list[str] = []
    inputs = [_backward_input(graphs, ref, kept, body) for ref in graphs.backward_inputs]
    listed = "".join(f"{x}, " for x in inputs)
    body.append(f"kernel(n, (*grads, {listed}*shared), (*group_grads, *extra), workspace)")
    return _compile(
        name,
        "n, grads, sources, outs, kept, saved, shared, group_grads, extra, workspace",
        body,
        kernel,
        graphs,
    )


def _backward_input(graphs: OperationGraphs, ref: Ref, kept: tuple[int, ...], body: list[str]) -> str:
    if ref.kind == "output":
        return f"outs[{ref.index}]"
    if ref.kind == "saved":
        return f"saved[{ref.index}]"
    assert ref.kind == "group"
    position = kept.index(ref.index)
    if in_parameters(graphs, ref.index):
        return f"kept[{position}][1]"
    kind = group_type(graphs, ref.index)
    size = len(graphs.layout.groups[ref.index])
    wide = f".view(n, {size}{''.join(f', {d}' for d in kind.shape)})" if size > 1 else ""
    body += [
        f"kind, a, b = sources[{ref.index}]",
        f"x{ref.index} = kept[{position}][1] if kind == INDEX else a{wide} if kind == VIEW else "
        f"a.expand(n{', -1' * len(kind.shape)})",
    ]
    return f"x{ref.index}"


def _compile(
    name: str,
    arguments: str,
    body: list[str],
    kernel: Kernel | CompiledGraph,
    graphs: OperationGraphs,
) -> tuple[Callable[..., Any], str]:
    lines = [f"def {name}({arguments}):", f"    # {graphs.signature}", *(f"    {line}" for line in body)]
    source = "\n".join(lines) + "\n"
    scope: dict[str, Any] = {
        "kernel": kernel,
        "index_select": torch.index_select,
        "INDEX": INDEX,
        "VIEW": VIEW,
        **{f"type{g}": group_type(graphs, g) for g in range(len(graphs.layout.groups))},
    }
    exec(compile(source, f"<fxbatch {name}>", "exec"), scope)
    return scope[name], f"{source}\n# kernel\n{kernel.source}"
