"""BatchedGraph -> Unrolled: an fx.GraphModule for one minibatch structure, differentiable by autograd.

    unrolled = emit_unrolled(batched, operations)   # operations[s]: OperationGraphs, Unbatched or None
    unrolled.graph_module.print_readable()          # gathers, batched operations and cats, by name
    unrolled(unrolled.arguments())                  # a tensor a result node: its rows, in their order

Everything that has a value is a tensor argument: the stacked constants, the values of earlier phases, the
shared operands, each once. Row indices are buffers. So the module can be differentiated twice, compiled
with `torch.compile(fullgraph=True)` and exported, and used again for other constants of that structure.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx, nn

from fxbatch.batched_graph import BatchedGraph, Node, Read
from fxbatch.codegen.body import devices_of, entered_modes
from fxbatch.codegen.operation_graphs import OperationGraphs, Unbatched
from fxbatch.ir import CONSTANT_KINDS, Modes, Program, SharedOperand, Signature, TensorType


@dataclass(frozen=True)
class Unrolled:
    """The emitted module and what its arguments and results are.

    Arguments, in this order: a tensor `[rows, *shape]` for each of `constants` and of `known`, then the
    tensors of `shared`. Results: a tensor `[rows, *shape]` for each of `results`, which are value ids.
    """

    program: Program
    graph_module: fx.GraphModule
    constants: tuple[tuple[int, np.ndarray], ...]  # signature, positions in its payload
    known: tuple[np.ndarray, ...]  # value ids
    shared: tuple[SharedOperand, ...]
    results: tuple[np.ndarray, ...]

    def arguments(
        self, known: Sequence[torch.Tensor] = (), payloads: Mapping[int, Sequence[object]] | None = None
    ) -> list[torch.Tensor]:
        """The tensors to call the module with; `payloads` takes the place of `program.constants`."""
        payloads = self.program.constants if payloads is None else payloads
        stacked = [
            stack_payload(self.program.signatures[s], [payloads[s][i] for i in positions.tolist()])
            for s, positions in self.constants
        ]
        return [*stacked, *known, *(operand.resolve() for operand in self.shared)]

    def __call__(self, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.graph_module(*arguments)
        return found

    @property
    def code(self) -> str:
        """The emitted source."""
        return self.graph_module.code


def stack_payload(signature: Signature, payload: Sequence[object]) -> torch.Tensor:
    """`[rows, *shape]` of the tensors or Python numbers of a constant's calls."""
    type_ = signature.outputs[0]
    if signature.operation.kind == "number":
        return torch.tensor(payload, dtype=type_.dtype, device=type_.device)
    tensors = [t for t in payload if isinstance(t, torch.Tensor)]
    first = tensors[0]
    if all(t is first for t in tensors):
        return first.unsqueeze(0).expand(len(tensors), *first.shape)
    return torch.stack(tensors)


class RowByRow(nn.Module):
    """An operation that can't be batched: its body, row by row, results stacked."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.signature = signature

    def forward(self, n: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        signature = self.signature
        inputs, shared = tensors[: len(signature.inputs)], tensors[len(signature.inputs) :]
        modes = replace(signature.modes, grad=signature.modes.grad and torch.is_grad_enabled())
        with contextlib.nullcontext() if _are_present(modes) else entered_modes(modes, devices_of(signature)):
            rows = [signature.run([x[i] for x in inputs], shared) for i in range(n)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def _are_present(modes: Modes) -> bool:
    """Whether these modes hold right now; entering them would only break a compiled graph."""
    casts = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    same = modes.grad == torch.is_grad_enabled() and modes.default_dtype == torch.get_default_dtype()
    return same and not casts and not modes.autocast


def emit_unrolled(
    batched: BatchedGraph, operations: Sequence[OperationGraphs | Unbatched | None]
) -> Unrolled:
    """The module of a batched graph; `operations[s]` is what signature s was made into (None: unused)."""
    return _Emitter(batched, operations).emit()


class _Emitter:
    def __init__(
        self, batched: BatchedGraph, operations: Sequence[OperationGraphs | Unbatched | None]
    ) -> None:
        self.batched, self.program, self.operations = batched, batched.program, operations
        self.root, self.graph = nn.Module(), fx.Graph()
        self.values: dict[str, list[fx.Node]] = {}  # node name -> its outputs
        self.constants: list[tuple[int, np.ndarray]] = []
        self.shared: dict[tuple[int, str], fx.Node] = {}
        self.modules: dict[int, str] = {}

    def emit(self) -> Unrolled:
        operands = self._placeholders()
        nodes = self.batched.nodes()
        for name, node in nodes:
            if name not in self.values:
                self.values[name] = self._outputs(name, node)
        results = [(name, node) for name, node in nodes if node.kind == "result"]
        self.graph.output(tuple(self.values[name][0] for name, _ in results))
        self.graph.lint()
        return Unrolled(
            self.program,
            fx.GraphModule(self.root, self.graph, "Unrolled"),
            tuple(self.constants),
            tuple(node.gives[0] for _, node in self.batched.nodes("known")),
            operands,
            tuple(node.wants[0] for _, node in results),
        )

    def _placeholders(self) -> tuple[SharedOperand, ...]:
        """Constants, values of earlier phases, shared operands: what differs from call to call."""
        batches = self.batched.nodes("batch")
        position = _payload_positions(self.program)
        for name, node in batches:
            if self.program.signatures[node.signature].operation.kind in CONSTANT_KINDS:
                self.values[name] = [self.graph.placeholder(f"constant_{name}")]
                self.constants.append((node.signature, position[node.calls]))
        for name, _ in self.batched.nodes("known"):
            self.values[name] = [self.graph.placeholder(f"known_{name}")]
        operands: dict[tuple[int, str], SharedOperand] = {}
        for _, node in batches:
            for operand in self.program.signatures[node.signature].shared:
                operands.setdefault(operand.key, operand)
        for i, (key, operand) in enumerate(operands.items()):
            name = _identifier(f"shared_{i}_{operand.name}")
            self.shared[key] = self.graph.placeholder(name)
        return tuple(operands.values())

    def _outputs(self, name: str, node: Node) -> list[fx.Node]:
        if node.kind == "batch":
            return self._operation(name, node)
        if node.kind == "cat":
            parts = [self._input(name, node, i) for i in range(len(node.wants))]
            return [self._cat(parts, name)]
        return [self._input(name, node, 0)]  # gather, pass, result

    def _operation(self, name: str, node: Node) -> list[fx.Node]:
        signature, made = self.program.signatures[node.signature], self.operations[node.signature]
        assert made is not None, f"no operation graphs for {signature}"
        inputs = [self._input(name, node, i) for i in range(len(node.wants))]
        if isinstance(made, OperationGraphs):
            inputs = [self._group(name, g, [inputs[i] for i in m]) for g, m in enumerate(made.layout.groups)]
        if node.signature not in self.modules:
            module = _identifier(f"s{node.signature}_{signature.name}")
            body = made.forward if isinstance(made, OperationGraphs) else RowByRow(signature)
            self.root.add_module(module, body)
            self.modules[node.signature] = module
        shared = [self.shared[operand.key] for operand in signature.shared]
        call = self.graph.call_module(self.modules[node.signature], (len(node.calls), *inputs, *shared))
        call.name = _identifier(f"{name}_{signature.name}")
        call.meta.update(signature=signature, calls=node.calls, rows=len(node.calls))
        outputs = [self.graph.call_function(operator.getitem, (call, j)) for j in range(len(node.types))]
        if signature.modes.grad:
            return outputs
        return [self.graph.call_method("detach", (x,)) for x in outputs]  # the user called it in no_grad

    def _group(self, name: str, g: int, members: list[fx.Node]) -> fx.Node:
        """Inputs that an operation reads interleaved: `[n, members, *shape]`."""
        if len(members) == 1:
            return members[0]
        return self._named(self.graph.call_function(torch.stack, (members, 1)), f"{name}_group{g}")

    def _input(self, name: str, node: Node, i: int) -> fx.Node:
        """The rows that input i wants, from wherever they are."""
        reads = [(before, read) for before, read in self.batched.reads(name) if read.input == i]
        label = f"{name}_in{i}".replace(".", "_")
        type_ = self.program.types[self.program.type_of_value[node.wants[i][0]]]
        parts = [self._rows(before, read, type_, f"{label}_{k}") for k, (before, read) in enumerate(reads)]
        places = np.concatenate([read.places for _, read in reads])
        whole = self._cat(parts, label)
        if (np.diff(places) == 1).all():
            return whole
        return self._select(whole, np.argsort(places), type_, f"{label}_order")

    def _rows(self, before: str, read: Read, type_: TensorType, label: str) -> fx.Node:
        """All rows of a tensor, consecutive ones, one for all, or an index."""
        source, rows = self.values[before][read.output], read.rows
        have = len(self.batched.node(before).gives[read.output])
        if (np.diff(rows) == 1).all():
            if len(rows) == have:
                return source
            return self._named(
                self.graph.call_function(torch.narrow, (source, 0, int(rows[0]), len(rows))), f"view_{label}"
            )
        if (rows == rows[0]).all():
            one = self.graph.call_function(torch.narrow, (source, 0, int(rows[0]), 1))
            shape = (len(rows), *type_.shape)
            return self._named(self.graph.call_method("expand", (one, *shape)), f"broadcast_{label}")
        return self._select(source, rows, type_, f"gather_{label}")

    def _select(self, source: fx.Node, rows: np.ndarray, type_: TensorType, label: str) -> fx.Node:
        name = _identifier(f"rows_{label}")
        self.root.register_buffer(
            name, torch.from_numpy(rows.astype(np.int64)).to(type_.device), persistent=False
        )
        index = self.graph.get_attr(name)
        return self._named(self.graph.call_function(torch.index_select, (source, 0, index)), label)

    def _cat(self, parts: list[fx.Node], label: str) -> fx.Node:
        if len(parts) == 1:
            return parts[0]
        return self._named(self.graph.call_function(torch.cat, (parts,)), f"cat_{label}")

    def _named(self, node: fx.Node, name: str) -> fx.Node:
        node.name = _identifier(name)
        return node


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)


def _payload_positions(program: Program) -> np.ndarray:
    """int64 [calls]: how many earlier calls have the same signature."""
    out = np.zeros(len(program), dtype=np.int64)
    for s in program.constants:
        mine = np.flatnonzero(program.sig == s)
        out[mine] = np.arange(len(mine))
    return out
