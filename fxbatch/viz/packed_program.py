"""A packed forward as a Program, so that what prints and draws programs shows it: `fxbatch dump|draw`.

In: a PackedFunction, or a model and a minibatch. Out: a PackedProgram: one call per operator for ALL instances, types
with `*` for what is the instance's own, how each is held, and what runs instance by instance, with the reason.

    for packed in packed_forward(model, sentences):
        print(packed)                     # v3  aten.embedding  f32[*,64]  packed  embed.weight, v0
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fxbatch.inspection import Minibatch, minibatch_of
from fxbatch.ir import Operation, Program, Schedule, SharedOperand, Signature, TensorSpec, tensor_spec
from fxbatch.packed_explanation import function_text, packed_runs, padding_text
from fxbatch.runtime.packed_route import PackedRoute
from fxbatch.torch_private import tree_leaves
from fxbatch.viz.describe import describe_program

if TYPE_CHECKING:  # it imports sympy, which takes half a second that most programs need not spend
    from fxbatch.ragged.packed_function import PackedFunction

HELD = {
    "whole": "once, the same for all instances",
    "dense": "one row per instance",
    "packed": "rows of all instances, one after another",
    "padded": "padded to the longest",
}


@dataclass(frozen=True, eq=False)
class PackedProgram:
    """The program of a minibatch, or of the calls of a submodule. `source` is the function as it was written."""

    name: str
    text: str  # its signature: `Tagger.forward(i64[*]) -> (f32[*,5])`
    rows: str
    program: Program
    layouts: tuple[str, ...]  # of each call
    source: str

    @property
    def calls(self) -> int:
        """How many operators run."""
        kinds = [self.program.signatures[s].operation.kind for s in self.program.sig.tolist()]
        return kinds.count("function")

    @property
    def alone(self) -> int:
        """How many operators run instance by instance."""
        return sum(bool(self.program.signatures[s].reason) for s in self.program.sig.tolist())

    @property
    def counts(self) -> tuple[tuple[str, str], ...]:
        """The counts at the head of a page."""
        alone = ("instance by instance", f"{self.alone:,}")
        return ("packed", self.rows), ("operators", f"{self.calls:,}"), alone

    def describe(self) -> dict[str, Any]:
        """The program as plain data, see docs/schema.md."""
        data = {"name": self.name, "text": self.text, "rows": self.rows, "layouts": list(self.layouts)}
        return {**data, "source": self.source, "program": describe_program(self.program)}

    @property
    def schedule(self) -> Schedule:
        """A step a call, in order."""
        return Schedule(np.arange(len(self.program)), np.arange(len(self.program) + 1), "packed")

    def __str__(self) -> str:
        p = self.program
        table = []
        for c, s in enumerate(p.sig.tolist()):
            signature = p.signatures[s]
            read = [f"v{v}" for v in p.inputs[p.input_offsets[c] : p.input_offsets[c + 1]].tolist()]
            made = ", ".join(f"v{v}" for v in range(p.first_value[c], p.first_value[c + 1]))
            types = ", ".join(map(str, signature.outputs))
            how = f"alone: {signature.reason}" if signature.reason else self.layouts[c]
            args = ", ".join([*read, *[operand.name for operand in signature.shared]])
            table.append((made, signature.name, types, how, args))
        widths = [min(max((len(row[i]) for row in table), default=0), 40) for i in range(4)]
        lines = [f"packed {self.text}", f"  {self.rows}"]
        lines.append(f"  {_plural(self.calls, 'operator')}, {self.alone} of them instance by instance")
        lines += [
            "  " + "  ".join([*(f"{x:{w}}" for x, w in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in table
        ]
        return "\n".join([*lines, "  return " + ", ".join(f"v{v}" for v in p.outputs.tolist())])


def packed_forward(model: Any, *args: Any, **options: Any) -> list[PackedProgram]:
    """The packed programs of a whole forward, one a graph for some range of sizes; none where it is recorded."""
    autobatched, owner, chosen, instances = minibatch_of(model, args, options)
    route = PackedRoute(chosen, owner if isinstance(owner, torch.nn.Module) else None)
    return [
        packed_program(
            autobatched.name, v.function, v.names, f"{_plural(z.n, 'instance')}: {padding_text(z)}"
        )
        for v, z in packed_runs(route, autobatched.fn, instances)
    ]


def packed_submodules(minibatch: Minibatch) -> list[PackedProgram]:
    """The packed calls of submodules in a minibatch that was recorded; of those that it has calls of."""
    packed, program = minibatch.engine.packed_calls, minibatch.program
    if packed is None:
        return []
    families = packed.families_in(program)
    waiting = [families.get(s) for s in program.sig.tolist()]  # phases before have run
    return [
        packed_program(
            f.signature.name,
            f.function,
            [operand.name for operand in f.signature.shared],
            f"{_plural(calls, 'call')} in this minibatch",
        )
        for f in packed.families
        if f.function is not None
        and f.signature is not None
        and (calls := f.calls + sum(w is f for w in waiting))
    ]


def packed_program(name: str, function: PackedFunction, shared: Sequence[str], rows: str) -> PackedProgram:
    """`shared`: names of the last inputs of the function, which are the same for all instances."""
    graph, lowered = function.graph, function.lowered
    first_shared = len(graph.inputs) - len(shared)
    signatures: dict[Any, Signature] = {}
    values: dict[Any, list[int]] = {}  # of a node
    parameters = dict(zip(graph.inputs[first_shared:], shared, strict=True))
    sig, inputs, layouts, outputs, count = [], [], [], [], 0
    for node in graph.module.graph.nodes:
        if node.op == "output":
            outputs = [values[x][0] for x in tree_leaves(node.args[0])]
        elif node.target is operator.getitem:
            values[node] = [values[node.args[0]][node.args[1]]] if node.args[0] in values else []
        elif node not in parameters and tree_leaves(types := _types(node)):
            read = [v for x in node.all_input_nodes for v in values.get(x, [])]
            layout = lowered.layouts.get(node.name, _layout_of(node, lowered.layouts))
            _, reason = lowered.alone.get(node.name, ("", ""))
            operands = tuple(
                SharedOperand(None, parameters[x]) for x in node.all_input_nodes if x in parameters
            )
            kind = (_name(node), tuple(types), tuple(o.name for o in operands), layout, reason)
            given = tuple(t for x in node.all_input_nodes for t in (_types(x) if x in values else ()))
            if (kind, given) not in signatures:
                how = "instance by instance" if reason else HELD.get(layout, layout)
                made = Operation(
                    _name(node), "function" if node.op == "call_function" else "constant", rule=how
                )
                signatures[kind, given] = Signature(made, given, tuple(types), operands, reason=reason)
            sig.append(list(signatures).index((kind, given)))
            inputs += read
            layouts.append(layout)
            values[node] = list(range(count, count + len(types)))
            count += len(types)
    program = Program(
        tuple(signatures.values()), np.array(sig, np.int32), np.array(inputs, np.int64),
        np.zeros(len(sig), np.int32), np.array(list(dict.fromkeys(outputs)), np.int64), instances=1,
    )  # fmt: skip
    return PackedProgram(name, function_text(name, function), rows, program, tuple(layouts), lowered.source)


def _name(node: torch.fx.Node) -> str:
    if node.op == "call_function":
        return str(node.target).removesuffix(".default")
    return "input" if node.op == "placeholder" else "constant"


def _layout_of(node: torch.fx.Node, layouts: dict[str, str]) -> str:
    """That of the first of several results."""
    return next((layouts[user.name] for user in node.users if user.name in layouts), "whole")


def _types(node: torch.fx.Node) -> list[TensorSpec]:
    """Of what a node gives; -1 for sizes that are the instance's own."""
    return [
        tensor_spec(tuple(d if type(d) is int else -1 for d in t.shape), t.dtype, t.device)
        for t in tree_leaves(node.meta.get("val"))
        if isinstance(t, torch.Tensor)
    ]


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
