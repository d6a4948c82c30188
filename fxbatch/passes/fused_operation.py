"""Member signatures + wiring -> one Signature of an operation of kind `graph` that does the work of all.

    wiring = Wiring(members, reads, outputs)
    fused_signature(wiring).operation.target     # an fx.GraphModule, a node a member

Shared operands that several members use are one, by `SharedOperand.key`.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxbatch.ir import Operation, SharedOperand, Signature


@dataclass(frozen=True)
class Wiring:
    """What makes a fused operation: members in order, where each of their inputs comes from, what it gives.

    reads[k][i] is (member, output) for an input that a member before k makes, else (-1, input of the
    whole). outputs are (member, output) pairs.
    """

    members: tuple[Signature, ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]
    outputs: tuple[tuple[int, int], ...]


class MemberModule(nn.Module):
    """A member's per-instance body: its inputs and shared operands in, a tuple of its outputs out."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.signature = signature

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arity = len(self.signature.inputs)
        return tuple(self.signature.run(tensors[:arity], tensors[arity:]))


def fused_signature(wiring: Wiring, rule: str = "calls that always occur together") -> Signature:
    """The Signature of the whole. Its body runs the members one after another."""
    members = wiring.members
    shared: dict[tuple[int, str], SharedOperand] = {}
    for member in members:
        for operand in member.shared:
            shared.setdefault(operand.key, operand)
    inputs = {
        at: members[k].inputs[i]
        for k, reads in enumerate(wiring.reads)
        for i, (source, at) in enumerate(reads)
        if source < 0
    }
    name = "+".join(dict.fromkeys(m.name.removeprefix("fused:") for m in members))
    operation = Operation(
        f"fused:{name}" if len(name) <= 60 else f"fused:{name[:57]}...",
        "graph",
        _compose(wiring, len(inputs), shared),
        rule=rule,
        random=any(m.operation.random for m in members),
    )
    return Signature(
        operation,
        tuple(inputs[i] for i in range(len(inputs))),
        tuple(members[k].outputs[j] for k, j in wiring.outputs),
        tuple(shared.values()),
        modes=members[0].modes,
        location=next((m.location for m in members if m.location), ""),
    )


def _compose(wiring: Wiring, inputs: int, shared: dict[tuple[int, str], SharedOperand]) -> fx.GraphModule:
    graph, root = fx.Graph(), nn.Module()
    given = [graph.placeholder(f"input_{i}") for i in range(inputs)]
    operands = {
        key: graph.placeholder(re.sub(r"\W", "_", f"shared_{i}_{operand.name}"))
        for i, (key, operand) in enumerate(shared.items())
    }
    used = frozenset([*wiring.outputs, *(read for reads in wiring.reads for read in reads)])
    made: list[list[Any]] = []
    for k, (member, reads) in enumerate(zip(wiring.members, wiring.reads, strict=True)):
        name = re.sub(r"\W", "_", f"m{k}_{member.name}")
        root.add_module(name, MemberModule(member))
        arguments = [given[at] if source < 0 else made[source][at] for source, at in reads]
        node = graph.call_module(name, (*arguments, *(operands[o.key] for o in member.shared)))
        made.append(
            [
                graph.call_function(operator.getitem, (node, j)) if (k, j) in used else None
                for j in range(len(member.outputs))
            ]
        )
    graph.output(tuple(made[k][j] for k, j in wiring.outputs))
    graph.lint()
    return fx.GraphModule(root, graph, "Fused")
