"""One compiled operation's graphs as text, as data and as DOT: body, forward, backward, parameter gradients.

Comes in: a CompiledOperation. Goes out: text, a dictionary, or DOT.

    print(operation_text(minibatch.operations[0]))
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn

from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.viz.describe import SCHEMA_VERSION, describe_signature
from fxbatch.viz.dot import quote


def operation_graphs(operation: CompiledOperation) -> dict[str, fx.GraphModule]:
    """The graphs that there are, by name; none of an operation that runs call by call."""
    if operation.graphs is None:
        return {}
    found = {name: getattr(operation.graphs, name, None) for name in ("forward", "backward", "parameters")}
    return {name: graph for name, graph in found.items() if graph is not None}


def operation_body(operation: CompiledOperation) -> str:
    """The source of what one call runs, where Python has it."""
    target = operation.signature.operation.target
    if isinstance(target, fx.GraphModule):
        return target.code.strip()
    method = operation.signature.operation.method or "forward"
    function = getattr(type(target), method) if isinstance(target, nn.Module) else target
    try:
        return inspect.cleandoc(inspect.getsource(function))
    except (TypeError, OSError):
        return f"{getattr(function, '__name__', function)}: no Python source"


def operation_text(operation: CompiledOperation) -> str:
    """The signature, the body and each graph's code."""
    s = operation.signature
    parts = [f"operation {s}", f"rule: {s.operation.rule}", f"line: {s.location or 'unknown'}"]
    if operation.reason:
        parts.append(f"runs call by call: {operation.reason}")
    parts.append(f"\nbody, of one call:\n{_indent(operation_body(operation))}")
    for name, graph in operation_graphs(operation).items():
        title = "parameter gradients" if name == "parameters" else name
        parts.append(f"\n{title}, of a batch:\n{_indent(graph.code.strip())}")
    return "\n".join(parts)


def describe_operation(operation: CompiledOperation) -> dict[str, Any]:
    """The operation as plain data, see docs/schema.md."""
    graphs = {
        name: {
            "code": graph.code.strip(),
            "nodes": [
                {
                    "name": n.name,
                    "op": n.op,
                    "target": str(n.target),
                    "inputs": [i.name for i in n.all_input_nodes],
                }
                for n in graph.graph.nodes
            ],
        }
        for name, graph in operation_graphs(operation).items()
    }
    return {
        "schema": "fxbatch",
        "version": SCHEMA_VERSION,
        "form": "operation",
        "signature": describe_signature(operation.signature),
        "reason": operation.reason,
        "body": operation_body(operation),
        "graphs": graphs,
        "source": operation.source,
    }


def operation_to_dot(operation: CompiledOperation) -> str:
    """A cluster a graph."""
    lines = [
        "digraph operation {",
        "  rankdir=LR;",
        '  node [shape=box, style=rounded, fontname="sans-serif"];',
    ]
    for name, graph in operation_graphs(operation).items():
        lines += [f"  subgraph {quote('cluster_' + name)} {{", f"    label={quote(name)};"]
        for node in graph.graph.nodes:
            lines.append(f"    {quote(f'{name}.{node.name}')} [label={quote(node.name)}];")
            lines += [
                f"    {quote(f'{name}.{i.name}')} -> {quote(f'{name}.{node.name}')};"
                for i in node.all_input_nodes
            ]
        lines.append("  }")
    return "\n".join([*lines, "}"])


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
