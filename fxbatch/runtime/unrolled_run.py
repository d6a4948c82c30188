"""A DifferentiableRun in `mode="unrolled"`: each structure is emitted as an fx.GraphModule, kept, run under autograd.

    unrolled = UnrolledRun(planner).emit(program, schedule)
    unrolled.graph_module.print_readable()          # gathers, batched operations and cats
    unrolled(unrolled.arguments())                  # a tensor for each of `results`: rows of these values

The module is what `walk` does on proxies. Everything that has a value is a tensor argument: the stacked constants, the
values of earlier phases, the shared operands, each once. Row indices are buffers. So the module can be differentiated
twice, compiled with `torch.compile(fullgraph=True)` and exported, and used again for other constants of that structure.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from fxbatch.ir import Program, Schedule, SharedOperand
from fxbatch.passes.plan import plan_arenas
from fxbatch.passes.slots import is_constant
from fxbatch.runtime.devices import to_device
from fxbatch.runtime.differentiable import Blocks, DifferentiableRun, RowByRow, stack_payload, walk
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.structure_cache import PlanKey


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


class UnrolledRun(DifferentiableRun):
    """One minibatch in unrolled modules, one a phase; the same interface as Run."""

    def run(self, program: Program) -> None:
        """Execute the calls of a phase that is not the last: instances may ask for any of its values."""
        if len(program):
            every = np.arange(program.known, program.values, dtype=np.int64)
            self.execute(dataclasses.replace(program, outputs=every), self.planner.schedule(program))

    def execute(self, program: Program, schedule: Schedule) -> None:
        """Emit the module of this structure (or find it), run it, and keep what it gives."""
        key = PlanKey(program)
        size = key.bytes + 2000 * len(program)
        unrolled = self.planner.structures.get("unrolled", key, lambda: self.emit(program, schedule), size)
        known = [self.rows(values) for values in unrolled.known]
        results = unrolled(unrolled.arguments(known, program.constants))
        self.launches += len(schedule)
        types = self.types_of(program)
        row = np.full(program.values, -1, dtype=np.int64)
        row[: program.known] = self.value_row[: program.known]
        for values, tensor in zip(unrolled.results, results, strict=True):
            blocks = self.blocks[int(types[program.type_of_value[values[0]]])]
            row[values] = blocks.used + np.arange(len(values))
            blocks.append(tensor, len(values))
        self._remember(program, types, row)

    def emit(self, program: Program, schedule: Schedule) -> Unrolled:
        """The unrolled module of a scheduled program."""
        operations = self.operations(program)
        known_rows, known, used = np.zeros(program.known, dtype=np.int64), [], []
        for t in range(len(program.types)):
            values = np.flatnonzero(program.type_of_value[: program.known] == t)
            known_rows[values] = np.arange(len(values))
            used.append(len(values))
            known.append(values)
        before = np.zeros(len(program.signatures), dtype=np.int64)
        plan = plan_arenas(
            program, schedule, operations.layouts, slots=operations.slots,
            known_rows=known_rows, used=np.array(used, dtype=np.int64), run_before=before,
        )  # fmt: skip
        emitted = _ProxySteps(program, operations.compiled)
        steps = zip(
            plan.step_signature.tolist(), plan.step_rows.tolist(), plan.step_offset.tolist(), strict=True
        )
        for s, n, at in steps:
            if is_constant(program.signatures[s]):
                order = plan.constant_order[s]
                emitted.add_constant(s, np.arange(at, at + n) if order is None else order[at : at + n])
        arenas = [Blocks(kind, emitted.index) for kind in program.types]
        known = [values for values in known if len(values)]
        for values in known:
            t = int(program.type_of_value[values[0]])
            arenas[t].append(emitted.place(f"known_{t}"), len(values))
        shared = emitted.add_shared()
        walk(program, plan, arenas, before, emitted.call, emitted.constant)
        kinds = program.type_of_value[program.outputs]
        results = [program.outputs[kinds == t] for t in np.unique(kinds).tolist()]
        read = [arenas[program.type_of_value[r[0]]].read(plan.row_of_value[r]) for r in results]
        module = emitted.finish(read)
        return Unrolled(program, module, tuple(emitted.constants), tuple(known), shared, tuple(results))


class _ProxySteps:
    """What `walk` runs on: proxies, and the graph that they add to."""

    def __init__(self, program: Program, compiled: Sequence[CompiledOperation | None]) -> None:
        self.program, self.compiled = program, compiled
        self.root, self.graph = nn.Module(), fx.Graph()
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)  # one for all: proxies of two don't meet
        self.constants: list[tuple[int, np.ndarray]] = []
        self._stacked: list[fx.Proxy] = []
        self._next = iter(self._stacked)
        self._shared: dict[tuple[int, str], fx.Proxy] = {}
        self._calls = 0

    def place(self, name: str) -> fx.Proxy:
        """An argument."""
        return fx.Proxy(self.graph.placeholder(_identifier(name)), self.tracer)

    def add_constant(self, s: int, positions: np.ndarray) -> None:
        """An argument for one step's constants."""
        self._stacked.append(self.place(f"constant_{len(self.constants)}"))
        self.constants.append((s, positions))

    def constant(self, s: int, positions: np.ndarray) -> fx.Proxy:
        """The argument of the next step of constants."""
        return next(self._next)

    def add_shared(self) -> tuple[SharedOperand, ...]:
        """An argument for each shared operand of the operations that run."""
        operands: dict[tuple[int, str], SharedOperand] = {}
        for operation in self.compiled:
            for operand in () if operation is None else operation.signature.shared:
                if operands.setdefault(operand.key, operand) is operand and operand.key not in self._shared:
                    self._shared[operand.key] = self.place(f"shared_{len(self._shared)}_{operand.name}")
        return tuple(operands.values())

    def index(self, rows: np.ndarray, device: torch.device) -> fx.Proxy:
        """Row numbers, as a buffer."""
        name = f"rows_{len(self.root._buffers)}"
        self.root.register_buffer(name, to_device(rows, device), persistent=False)
        return fx.Proxy(self.graph.get_attr(name), self.tracer)

    def call(self, s: int, n: int, inputs: list[fx.Proxy]) -> list[fx.Proxy]:
        """A step: a call of its operation's forward graph, or of its body row by row."""
        operation, signature = self.compiled[s], self.program.signatures[s]
        assert operation is not None
        name = _identifier(f"s{s}_{signature.name}")
        if name not in self.root._modules:
            graphs = operation.graphs
            self.root.add_module(name, RowByRow(signature) if graphs is None else graphs.forward)
        arguments = [x.node for x in (*inputs, *(self._shared[o.key] for o in signature.shared))]
        node = self.graph.call_module(name, (n, *arguments))
        node.name = _identifier(f"b{self._calls}_{signature.name}")
        node.meta.update(signature=signature, rows=n)
        self._calls += 1
        outputs: list[Any] = [
            operator.getitem(fx.Proxy(node, self.tracer), j) for j in range(len(signature.outputs))
        ]
        return outputs if signature.modes.grad else [x.detach() for x in outputs]  # called in no_grad

    def finish(self, results: Sequence[fx.Proxy]) -> fx.GraphModule:
        self.graph.output(tuple(x.node for x in results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, "Unrolled")


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)
