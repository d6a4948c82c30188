"""A minibatch under ordinary autograd: values live in the output tensors of steps instead of arenas.

With `backward="autograd"` a Run is differentiable as often as one likes: an input group is read from the blocks that it
needs: a narrow, an expand, or an index_select of their concatenation. `walk` takes tensors, or what stands for them:
`mode="unrolled"` is the same walk on proxies: each structure is emitted as an fx.GraphModule, kept, run under autograd.

    memory = BlockMemory(planner)
    memory.launch(memory.plan(program, schedule))   # each step a differentiable call
    memory.read(3, np.array([0, 2]))                # rows of values of type 3

    unrolled = emit_unrolled(planner, program, schedule)
    unrolled.graph_module.print_readable()          # gathers, batched operations and cats
    unrolled(unrolled.arguments())                  # a tensor for each of `results`: rows of these values

Everything that has a value is a tensor argument of the module: the stacked constants, the values of earlier phases,
the shared operands, each once. Row indices are buffers. So it can be differentiated twice, compiled with
`torch.compile(fullgraph=True)` and exported, and used again for other constants of that structure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from fxbatch.codegen.body import devices_of
from fxbatch.ir import INDEX, VIEW, Plan, Program, Schedule, SharedOperand, Signature, TensorSpec
from fxbatch.passes.plan import is_constant, plan_arenas
from fxbatch.passes.signature_graph import Needs, survey
from fxbatch.runtime.forward import Phase, payload_places
from fxbatch.runtime.memory import to_device
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.planner import Planner
from fxbatch.runtime.structure_cache import OperationSet, PlanKey

Index = Callable[[np.ndarray, torch.device], Any]  # row numbers as a tensor
CallStep = Callable[[int, int, list[Any]], Sequence[Any]]  # signature, rows, inputs -> outputs
StackConstants = Callable[[int, np.ndarray], Any]  # signature, positions in its payload -> their rows


class Blocks:
    """All values of one tensor type: tensors [rows, *shape], one a step output, in row order."""

    def __init__(self, kind: TensorSpec, index: Index = to_device) -> None:
        self.kind, self.index = kind, index
        self.tensors: list[object] = []
        self.starts: list[int] = []
        self.used = 0

    def append(self, tensor: object, rows: int) -> None:
        self.tensors.append(tensor)
        self.starts.append(self.used)
        self.used += rows

    def read(self, rows: np.ndarray) -> Any:
        """A tensor [len(rows), *shape], differentiable."""
        starts = np.array([*self.starts, self.used], dtype=np.int64)
        block = np.searchsorted(starts, rows, side="right") - 1
        needed, place = np.unique(block, return_inverse=True)
        sizes = starts[needed + 1] - starts[needed]
        local = rows - starts[block] + (np.cumsum(sizes) - sizes)[place]
        joined = self.tensors[needed[0]] if len(needed) == 1 else torch.cat([self.tensors[b] for b in needed])
        if len(local) and (np.diff(local) == 1).all():
            whole = len(local) == int(sizes.sum())
            return joined if whole else joined.narrow(0, int(local[0]), len(local))
        return joined.index_select(0, self.index(local, self.kind.device))


def walk(
    program: Program,
    plan: Plan,
    arenas: Sequence[Blocks],
    before: np.ndarray,
    call: CallStep,
    constants: StackConstants,
) -> None:
    """The steps of a plan. arenas: the blocks of each type of the program; before: rows that each signature's operation
    had in earlier phases."""
    for k, (s, n) in enumerate(zip(plan.step_signature.tolist(), plan.step_rows.tolist(), strict=True)):
        if is_constant(program.signatures[s]):
            outs = [constants(s, payload_places(plan, s, int(plan.step_offset[k] - before[s]), n))]
        else:
            gathers = range(int(plan.first_gather[k]), int(plan.first_gather[k + 1]))
            outs = list(call(s, n, [_read(plan, g, n, arenas) for g in gathers]))
        for b, out in zip(range(int(plan.first_block[k]), int(plan.first_block[k + 1])), outs, strict=True):
            arenas[plan.block_arena[b]].append(out, n)


def _read(plan: Plan, g: int, n: int, arenas: Sequence[Blocks]) -> object:
    blocks = arenas[plan.gather_arena[g]]
    kind, start, rows = int(plan.gather_kind[g]), int(plan.gather_start[g]), int(plan.gather_rows[g])
    if kind == INDEX:
        read = blocks.read(plan.indices[start : start + rows])
    elif kind == VIEW:
        read = blocks.read(np.arange(start, start + rows))
    else:
        read = blocks.read(np.array([start])).expand(n, *blocks.kind.shape)
    return read if rows == n else read.reshape(n, rows // n, *blocks.kind.shape)


def stack_constants(
    signatures: Sequence[Signature], payloads: Mapping[int, Sequence[object]], s: int, positions: np.ndarray
) -> torch.Tensor:
    """`[rows, *shape]` of the tensors or Python numbers at these positions of a signature's payload."""
    type_, items = signatures[s].outputs[0], [payloads[s][i] for i in positions.tolist()]
    if signatures[s].operation.kind == "number":
        return torch.tensor(items, dtype=type_.dtype, device=type_.device)
    tensors = [x for x in items if isinstance(x, torch.Tensor)]
    first = tensors[0]
    if all(t is first for t in tensors):
        return first.unsqueeze(0).expand(len(tensors), *first.shape)
    return torch.stack(tensors)


class BlockMemory:
    """Where the values of a run under ordinary autograd are."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.type_ids: dict[TensorSpec, int] = {}
        self.blocks: list[Blocks] = []
        self.rows_run: dict[CompiledOperation, int] = {}
        self.row_of_value = self.type_of_value = np.zeros(0, dtype=np.int64)

    def types_of(self, program: Program) -> np.ndarray:
        """int64: the number of each of the program's types among the run's."""
        for kind in program.types:
            if kind not in self.type_ids:
                self.type_ids[kind] = len(self.blocks)
                self.blocks.append(Blocks(kind))
        return np.array([self.type_ids[kind] for kind in program.types], dtype=np.int64)

    def read(self, kind: int, rows: np.ndarray) -> torch.Tensor:
        """A differentiable tensor [len(rows), *shape] of values of one type."""
        return self.blocks[kind].read(rows)

    def plan(self, program: Program, schedule: Schedule | None, *, last: bool) -> BlockPhase:
        """One more phase: its steps, or the module that it is. last: whether no phase comes after it."""
        if not last:  # instances may ask for any value
            program = replace(program, outputs=np.arange(program.known, program.values, dtype=np.int64))
        schedule = self.planner.schedule(program) if schedule is None else schedule
        if self.planner.options.mode == "unrolled":
            key = PlanKey(program)
            size = key.bytes + 2000 * len(program)
            unrolled = self.planner.structures.get(
                "unrolled", key, lambda: emit_unrolled(self.planner, program, schedule), size
            )
            plan, operations = unrolled.plan, unrolled.operations
            return BlockPhase(program, schedule, plan, NO_NEEDS, operations, unrolled=unrolled)
        operations, arenas = forward_operations(self.planner, program), self._arenas(program)
        plan = plan_arenas(
            program, schedule, operations.slots,
            used=np.array([blocks.used for blocks in arenas], dtype=np.int64),
            known_rows=self.row_of_value[: program.known], run_before=self._before(operations),
        )  # fmt: skip
        return BlockPhase(program, schedule, plan, NO_NEEDS, operations)

    def launch(self, phase: BlockPhase) -> int:
        """Run a phase that was planned last; how many kernels were launched."""
        program, plan, arenas = phase.program, phase.plan, self._arenas(phase.program)
        row = plan.row_of_value
        if phase.unrolled is None:
            constants = functools.partial(stack_constants, program.signatures, program.constants)
            walk(program, plan, arenas, self._before(phase.operations), _caller(phase.compiled), constants)
        else:
            kinds, rows = self.type_of_value, self.row_of_value
            early = [self.read(kinds.item(values[0]), rows[values]) for values in phase.unrolled.early]
            results = phase.unrolled(phase.unrolled.arguments(early, program.constants))
            row = np.concatenate([rows[: program.known], np.full(program.values - program.known, -1)])
            for values, tensor in zip(phase.unrolled.results, results, strict=True):
                blocks = arenas[program.type_of_value[values[0]]]
                row[values] = blocks.used + np.arange(len(values))
                blocks.append(tensor, len(values))
        types = self.types_of(program)[program.type_of_value[program.known :]]
        self.row_of_value = row
        self.type_of_value = np.concatenate([self.type_of_value[: program.known], types])
        launches = 0
        for k, n in enumerate(plan.step_rows.tolist()):
            operation = phase.operation(k)
            self.rows_run[operation] = self.rows_run.get(operation, 0) + n
            launches += 0 if operation.forward is None else 1 if operation.unbatched is None else n
        return launches

    def _arenas(self, program: Program) -> list[Blocks]:
        return [self.blocks[t] for t in self.types_of(program).tolist()]

    def _before(self, operations: OperationSet) -> np.ndarray:
        """The rows that each signature's operation had in earlier phases."""
        rows = [0 if c is None else self.rows_run.get(c, 0) for c in operations.compiled]
        return np.array(rows, dtype=np.int64)


@dataclass(eq=False)
class BlockPhase(Phase):
    """A phase under ordinary autograd, which notes what needs gradients by itself."""

    unrolled: Unrolled | None = None


NO_NEEDS = Needs((), np.zeros(0, dtype=bool), (np.zeros(0, dtype=np.int64),) * 2)


def forward_operations(planner: Planner, program: Program) -> OperationSet:
    """The operations without backward graphs: autograd differentiates their forward graphs."""
    compiled: list[CompiledOperation | None] = []
    for s, called in zip(program.signatures, survey(program).present, strict=True):
        needs = (False,) * len(s.inputs), (False,) * len(s.shared)
        shared = [x.resolve() for x in s.shared] if called else []
        compiled.append(planner.operations.get(s, needs, shared, autograd=True) if called else None)
    return planner.operation_set(program, tuple(compiled))


def _caller(compiled: Sequence[CompiledOperation | None]) -> CallStep:
    """Runs a step as autograd sees it."""
    shared: dict[int, list[torch.Tensor]] = {}

    def call(s: int, n: int, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        operation = compiled[s]
        assert operation is not None
        signature = operation.signature
        if s not in shared:
            shared[s] = [x.resolve() for x in signature.shared]
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(signature.modes.grad and torch.is_grad_enabled()))
            if operation.graphs is None:
                assert operation.unbatched is not None
                return operation.unbatched(n, *inputs, *shared[s])
            for device in devices_of(signature):
                stack.enter_context(torch.autocast(device, enabled=False))  # casts are in the graph
            return operation.graphs.forward(n, *inputs, *shared[s])[: len(signature.outputs)]

    return call


# -- unrolled: each structure as an fx.GraphModule


@dataclass(frozen=True)
class Unrolled:
    """The emitted module and what its arguments and results are.

    Arguments, in this order: a tensor `[rows, *shape]` for each of `constants` and of `early`, then the
    tensors of `shared`. Results: a tensor `[rows, *shape]` for each of `results`, which are value ids.
    """

    program: Program
    plan: Plan
    operations: OperationSet
    graph_module: fx.GraphModule
    constants: tuple[tuple[int, np.ndarray], ...]  # signature, positions in its payload
    early: tuple[np.ndarray, ...]  # value ids
    shared: tuple[SharedOperand, ...]
    results: tuple[np.ndarray, ...]

    def arguments(
        self, early: Sequence[torch.Tensor] = (), payloads: Mapping[int, Sequence[object]] | None = None
    ) -> list[torch.Tensor]:
        """The tensors to call the module with; `payloads` takes the place of `program.constants`."""
        payloads = self.program.constants if payloads is None else payloads
        stacked = [stack_constants(self.program.signatures, payloads, *place) for place in self.constants]
        return [*stacked, *early, *(operand.resolve() for operand in self.shared)]

    def __call__(self, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self.graph_module(*arguments)


def emit_unrolled(planner: Planner, program: Program, schedule: Schedule) -> Unrolled:
    """The unrolled module of a scheduled program."""
    operations = forward_operations(planner, program)
    known_rows, early, used = np.zeros(program.known, dtype=np.int64), [], []
    for t in range(len(program.types)):
        values = np.flatnonzero(program.type_of_value[: program.known] == t)
        known_rows[values] = np.arange(len(values))
        used.append(len(values))
        early.append(values)
    rows = np.array(used, dtype=np.int64)
    plan = plan_arenas(program, schedule, operations.slots, known_rows=known_rows, used=rows)
    emitted = _ProxySteps(program, operations.compiled)
    steps = zip(plan.step_signature.tolist(), plan.step_rows.tolist(), plan.step_offset.tolist(), strict=True)
    for s, n, at in steps:
        if is_constant(program.signatures[s]):
            emitted.add_constant(s, payload_places(plan, s, at, n))
    arenas = [Blocks(kind, emitted.index) for kind in program.types]
    early = [values for values in early if len(values)]
    for values in early:
        t = int(program.type_of_value[values[0]])
        arenas[t].append(emitted.place(f"known_{t}"), len(values))
    shared = emitted.add_shared()
    nothing = np.zeros(len(program.signatures), dtype=np.int64)  # ran before
    walk(program, plan, arenas, nothing, emitted.call, emitted.constant)
    kinds = program.type_of_value[program.outputs]
    results = [program.outputs[kinds == t] for t in np.unique(kinds).tolist()]
    read = [arenas[program.type_of_value[r[0]]].read(plan.row_of_value[r]) for r in results]
    module = emitted.finish(read)
    return Unrolled(
        program, plan, operations, module, tuple(emitted.constants), tuple(early), shared, tuple(results)
    )


class _ProxySteps:
    """Steps for `walk` that compute nothing: they take and give proxies, and add nodes to an fx graph."""

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
            module = operation.unbatched if operation.graphs is None else operation.graphs.forward
            self.root.add_module(name, module)
        arguments = [x.node for x in (*inputs, *(self._shared[o.key] for o in signature.shared))]
        node = self.graph.call_module(name, (n, *arguments))
        node.name = _identifier(f"b{self._calls}_{signature.name}")
        node.meta.update(signature=signature, rows=n)
        self._calls += 1
        result: Any = fx.Proxy(node, self.tracer)
        outputs = [result[j] for j in range(len(signature.outputs))]
        return outputs if signature.modes.grad else [x.detach() for x in outputs]  # called in no_grad

    def finish(self, results: Sequence[fx.Proxy]) -> fx.GraphModule:
        self.graph.output(tuple(x.node for x in results))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, "Unrolled")


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text)
