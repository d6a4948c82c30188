"""A program as the graphs that people and analyses know: networkx and fx, built on demand.

Comes in: a Program. Goes out: a networkx.MultiDiGraph, or an executable fx.GraphModule.

    program_to_networkx(program).nodes[3]      # signature, type, instance, depth
    program_to_fx(program)()                   # the values of program.outputs, one call after another
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx, nn

from fxbatch.ir import CONSTANT_KINDS, Program, Signature
from fxbatch.on_demand import networkx as nx


def program_to_networkx(program: Program) -> nx.MultiDiGraph:
    """The merged graph, call by call.

    Node c is call c, with `signature` (the Signature), `name`, `type` (output types as text), `instance`,
    `depth`, `outputs` (its value ids) and `result` (whether results need one of them). An edge an input,
    with `value`, `input` (position at the reader), `output` (position at the source) and `type`. Values
    of earlier phases are nodes ("known", v) of depth 0.
    """
    graph = nx.MultiDiGraph()
    first, maker = program.first_value.tolist(), program.call_of_value.tolist()
    sources = [maker[v - program.known] if v >= program.known else -1 for v in program.inputs.tolist()]
    depth = _depths(program, sources)
    results = frozenset(program.outputs.tolist())
    for v in range(program.known):
        type_ = program.types[program.type_of_value[v]]
        graph.add_node(
            ("known", v), signature=None, name="known", type=str(type_), instance=-1, depth=0,
            outputs=(v,), result=v in results,
        )  # fmt: skip
    for c, (s, instance) in enumerate(zip(program.sig.tolist(), program.instance.tolist(), strict=True)):
        signature, outputs = program.signatures[s], tuple(range(first[c], first[c + 1]))
        graph.add_node(
            c, signature=signature, name=signature.name, type=", ".join(map(str, signature.outputs)),
            instance=instance, depth=depth[c], outputs=outputs, result=any(v in results for v in outputs),
        )  # fmt: skip
    offsets = program.input_offsets.tolist()
    types = [str(t) for t in program.types]
    type_of_value = program.type_of_value.tolist()
    for at, (value, source, reader) in enumerate(
        zip(program.inputs.tolist(), sources, program.reader.tolist(), strict=True)
    ):
        node = source if source >= 0 else ("known", value)
        output = value - first[source] if source >= 0 else 0
        graph.add_edge(
            node,
            reader,
            value=value,
            input=at - offsets[reader],
            output=output,
            type=types[type_of_value[value]],
        )
    return graph


def _depths(program: Program, sources: list[int]) -> list[int]:
    """The depth of each call, as `passes.batch_by_depth` defines it."""
    constant = [s.operation.kind in CONSTANT_KINDS for s in program.signatures]
    depth = [0 if constant[s] else 1 for s in program.sig.tolist()]
    for source, reader in zip(sources, program.reader.tolist(), strict=True):
        if source >= 0:
            depth[reader] = max(depth[reader], depth[source] + 1)
    return depth


class OperationModule(nn.Module):
    """One operation's per-instance body as a module: inputs in, a tuple of outputs out.

    Modules with parameters stay reachable as `body`; other shared operands are looked up at each call.
    """

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.signature = signature
        if signature.operation.kind == "module":
            self.body = signature.operation.target

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.signature.run(inputs, [operand.resolve() for operand in self.signature.shared]))


def program_to_fx(program: Program) -> fx.GraphModule:
    """The program as one executable fx.GraphModule, one node per call.

    Inputs: the values of earlier phases, as placeholders. Result: a tuple, the values of
    `program.outputs`. Constants are `get_attr` nodes, operations `call_module` nodes; each node's meta
    has `call`, `signature` and `instance`.
    """
    root, graph = nn.Module(), fx.Graph()
    names = _module_names(program)
    values: list[Any] = [graph.placeholder(f"known_{v}") for v in range(program.known)]
    payload = {s: iter(p) for s, p in program.constants.items()}
    offsets = program.input_offsets.tolist()
    inputs = program.inputs.tolist()
    for c, s in enumerate(program.sig.tolist()):
        signature = program.signatures[s]
        if signature.operation.kind in CONSTANT_KINDS:
            name = f"constant_{c}"
            root.register_buffer(name, constant_tensor(signature, next(payload[s])), persistent=False)
            node = graph.get_attr(name)
            outs = [node]
        else:
            if not hasattr(root, names[s]):
                root.add_module(names[s], OperationModule(signature))
            node = graph.call_module(names[s], tuple(values[v] for v in inputs[offsets[c] : offsets[c + 1]]))
            outs = [graph.call_function(_item, (node, j)) for j in range(len(signature.outputs))]
        for made in (node, *outs):
            made.meta.update(call=c, signature=signature, instance=int(program.instance[c]))
        values.extend(outs)
    graph.output(tuple(values[v] for v in program.outputs.tolist()))
    graph.lint()
    return fx.GraphModule(root, graph, "Program")


def constant_tensor(signature: Signature, payload: Any) -> torch.Tensor:
    """The payload of a constant or number call as the tensor that the call gives."""
    if isinstance(payload, torch.Tensor):
        return payload
    type_ = signature.outputs[0]
    return torch.tensor(payload, dtype=type_.dtype, device=type_.device)


def _item(values: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
    return values[index]


def _module_names(program: Program) -> list[str]:
    """A Python identifier a signature, unique and stable."""
    taken: dict[str, int] = {}
    names = []
    for signature in program.signatures:
        base = re.sub(r"\W", "_", signature.name).strip("_") or "operation"
        base = f"op_{base}" if base[0].isdigit() else base
        taken[base] = taken.get(base, 0) + 1
        names.append(base if taken[base] == 1 else f"{base}_{taken[base]}")
    return names
