"""Autograd enters once a minibatch: results of a Run as outputs of one torch.autograd.Function; or it sees all of it.

With `backward="autograd"` a Run is differentiable as often as one likes: values live in the output tensors of steps
instead of arenas; an input group is read from the blocks that it needs: a narrow, an expand, or an index_select of
their concatenation. `walk` takes tensors, or what stands for them: `mode="unrolled"` is the same walk on proxies: each
structure is emitted as an fx.GraphModule, kept, run under autograd.

    unrolled = UnrolledRun(planner).emit(program, schedule)
    unrolled.graph_module.print_readable()          # gathers, batched operations and cats
    unrolled(unrolled.arguments())                  # a tensor for each of `results`: rows of these values

Everything that has a value is a tensor argument of the module: the stacked constants, the values of earlier phases,
the shared operands, each once. Row indices are buffers. So it can be differentiated twice, compiled with
`torch.compile(fullgraph=True)` and exported, and used again for other constants of that structure.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from fxbatch.codegen.body import devices_of, entered_modes
from fxbatch.errors import GradientError
from fxbatch.ir import INDEX, VIEW, Modes, Plan, Program, Schedule, SharedOperand, Signature, TensorSpec
from fxbatch.passes.plan import is_constant, plan_arenas
from fxbatch.passes.signature_graph import find_wanted
from fxbatch.runtime.backward import operands_behind, run_backward
from fxbatch.runtime.forward import Phase
from fxbatch.runtime.memory import to_device
from fxbatch.runtime.operands import any_of, requiring_grad
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.planner import Planner
from fxbatch.runtime.run import Renumber, Run, differentiable_constants, renumbering
from fxbatch.runtime.structure_cache import OperationSet, PlanKey
from fxbatch.torch_private import (
    apply_outside_functorch,
    backward_keeps_graph,
    inside_functorch,
    saved_tensors_are_packed,
)


class MinibatchFunction(torch.autograd.Function):
    """Forward hands out rows that the run has computed; backward walks the run's steps in reverse."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        requests: Sequence[np.ndarray],
        needs: Sequence[bool],
        ids: Sequence[int],
        *inputs: torch.Tensor,
    ) -> object:
        ctx.run = run
        ctx.ids = ids
        ctx.requests = requests
        ctx.set_materialize_grads(False)
        outputs = tuple([run.rows(values) for values in requests])
        plain = [o for o, needed in zip(outputs, needs, strict=True) if not needed]
        ctx.mark_non_differentiable(*plain)
        tensors = (
            [] if saved_tensors_are_packed() else _read_back(run, run.phases)
        )  # a checkpoint counts them
        ctx.save_for_backward(*inputs, *tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> object:
        run: Run = ctx.run
        if torch.is_grad_enabled():
            reason = (
                'backward="compiled" gives first derivatives only; create_graph=True (double backward) needs '
                '@fxbatch.autobatch(backward="autograd")'
            )
            run.planner.refuse(reason)
            raise GradientError(reason)
        _ = ctx.saved_tensors  # raises torch's own error when the graph was freed or a tensor changed
        gradients = run_backward(run, ctx.requests, grads)
        if not backward_keeps_graph() and not run.lasting:
            run.release()
        return (None, None, None, None, *map(gradients.get, ctx.ids))


class LazyRun(Run):
    """A Run that values are taken from again and again, for `fxbatch.lazy`. An optimizer may step before they are, so
    each phase knows what its operands were."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner, grad=torch.is_grad_enabled())
        self.lasting = True

    def launch(self, phase: Phase) -> None:
        super().launch(phase)
        if self.grad:
            trained = [t for shared in self.memory.shared.values() for t in shared if t.requires_grad]
            phase.read = [(t, t._version) for t in (*trained, *_read_back(self, [phase]))]

    def materialise(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real tensors that carry gradients, by one autograd function."""
        return self.by_type(values, lambda requests: [t.unbind(0) for t in take_results(self, requests)])


def mixes_constants(run: Run) -> bool:
    """Whether some constants of a type require gradients and others don't."""
    return any(
        0 < len(differentiable_constants(phase.program, s)) < len(phase.program.constants[s])
        for phase in run.phases
        for s in phase.program.constants
    )


def differentiable_inputs(run: Run) -> dict[int, torch.Tensor]:
    """The tensors that gradients of a run go to, by id: shared operands and constants that require them."""
    if not run.grad:
        return {}
    tensors = requiring_grad(list(run.operands.values()))
    for phase in run.phases:
        for s in phase.program.constants:
            tensors.update((id(t), t) for t in differentiable_constants(phase.program, s))
    return tensors


def _read_back(run: Run, phases: Sequence[Phase]) -> list[torch.Tensor]:
    """Buffers and frozen parameters that backward reads: it raises torch's own error where they were written to."""
    shared = run.memory.shared
    return [shared[signature][i] for phase in phases for signature, i in phase.operations.read_back]


def _has_hooks(t: torch.Tensor) -> bool:
    return t._backward_hooks is not None or t._post_accumulate_grad_hooks is not None


def _is_heard(t: torch.Tensor) -> bool:
    """Whether somebody may notice that a gradient of this tensor was asked for."""
    return not t.is_leaf or _has_hooks(t)


def _reached(run: Run, results: np.ndarray, inputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Those of the inputs that lead to results: hooks of the others, as of a score that was asked for alone, would be
    called with None."""
    reached, reaching = find_wanted([(p.program, p.needs) for p in run.phases], results)
    operands = operands_behind(run.phases, run.memory, reached, reaching)
    for phase in run.phases:
        program = phase.program
        for s, payload in program.constants.items():
            marks = reaching[program.first_value[np.flatnonzero(program.sig == s)]].tolist()
            operands.update(id(t) for t, mark in zip(payload, marks, strict=True) if mark)
    return {key: t for key, t in inputs.items() if key in operands}


def take_results(run: Run | DifferentiableRun, requests: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """One tensor [len(values), *shape] a request (values of one type), attached to autograd."""
    if not requests:
        return []
    if isinstance(run, DifferentiableRun):
        return [run.rows(values) for values in requests]
    inputs = differentiable_inputs(run)
    if any(map(_is_heard, inputs.values())):
        hooked = {key for key, t in inputs.items() if _has_hooks(t)}
        reached = [_reached(run, values, inputs) for values in requests] if hooked else []
        if any(hooked & reached_values.keys() != hooked & reached[0].keys() for reached_values in reached):
            run.lasting = True  # each result goes backward by itself: a loss may depend on some of them alone
            return [
                _attached(run, [values], reached_values)[0]
                for values, reached_values in zip(requests, reached, strict=True)
            ]
        inputs = _reached(run, np.concatenate(requests), inputs)
    return _attached(run, requests, inputs)


def _attached(
    run: Run, requests: Sequence[np.ndarray], inputs: dict[int, torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors of `take_results`, by one autograd function of these inputs."""
    needs = [any_of(run.value_needs, values) for values in requests] if inputs else []
    if not any(needs):
        if not torch.is_grad_enabled():
            return [run.rows(values) for values in requests]
        with torch.no_grad():
            return [run.rows(values) for values in requests]
    if inside_functorch():
        raise GradientError(
            'torch.func transforms can\'t go through backward="compiled"; use '
            '@fxbatch.autobatch(backward="autograd")'
        )
    return list(
        apply_outside_functorch(MinibatchFunction, run, requests, needs, list(inputs), *inputs.values())
    )


# -- under ordinary autograd: differentiable as often as one likes

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
            at, order = int(plan.step_offset[k] - before[s]), plan.constant_order[s]
            outs = [constants(s, np.arange(at, at + n) if order is None else order[at : at + n])]
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


class DifferentiableRun:
    """One minibatch under ordinary autograd; the same interface as Run."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.grad = True
        self.type_ids: dict[TensorSpec, int] = {}
        self.blocks: list[Blocks] = []
        self.value_row = np.zeros(0, dtype=np.int64)
        self.value_type = np.zeros(0, dtype=np.int64)
        self.rows_run: dict[CompiledOperation, int] = {}
        self.phases: list[tuple[Program, Schedule, Plan, tuple[CompiledOperation | None, ...]]] = []
        self.launches = 0

    def types_of(self, program: Program) -> np.ndarray:
        """int64: the number of each of the program's types among the run's."""
        for kind in program.types:
            if kind not in self.type_ids:
                self.type_ids[kind] = len(self.blocks)
                self.blocks.append(Blocks(kind))
        return np.array([self.type_ids[kind] for kind in program.types], dtype=np.int64)

    def run(self, program: Program) -> None:
        """Execute the calls of a program."""
        if len(program):
            self.execute(program, self.planner.schedule(program))

    def finish(self, program: Program, values: np.ndarray) -> Renumber:
        """Execute the last calls, rewritten; the map from the recorder's value ids to this run's."""
        if not len(program):
            return lambda ids: ids
        program, schedule = self.planner.prepare(program)
        if len(program):
            self.execute(program, schedule)
        return renumbering(values, program.outputs)

    def execute(self, program: Program, schedule: Schedule) -> None:
        """Run a scheduled program."""
        types, operations = self.types_of(program), self.operations(program)
        compiled, arenas = operations.compiled, [self.blocks[t] for t in types.tolist()]
        used = np.array([blocks.used for blocks in arenas], dtype=np.int64)
        before = np.array([0 if c is None else self.rows_run.get(c, 0) for c in compiled], dtype=np.int64)
        plan = plan_arenas(
            program, schedule, operations.layouts, slots=operations.slots,
            known_rows=self.value_row[: program.known], used=used, run_before=before,
        )  # fmt: skip
        self.phases.append((program, schedule, plan, compiled))
        for s, n in zip(plan.step_signature.tolist(), plan.step_rows.tolist(), strict=True):
            operation = compiled[s]
            assert operation is not None
            self.rows_run[operation] = self.rows_run.get(operation, 0) + n
            if not is_constant(operation.signature):
                self.launches += n if operation.graphs is None else 1
        walk(program, plan, arenas, before, _caller(compiled), _stacker(program))
        self._remember(program, types, plan.row_of_value)

    def operations(self, program: Program) -> OperationSet:
        """The operations without backward graphs: autograd differentiates their forward graphs."""
        present = np.bincount(program.sig, minlength=len(program.signatures)).tolist()
        compiled = tuple(
            self.planner.operations.get(
                s,
                ((False,) * len(s.inputs), (False,) * len(s.shared)),
                [x.resolve() for x in s.shared],
                autograd=True,
            )
            if n
            else None
            for s, n in zip(program.signatures, present, strict=True)
        )
        return self.planner.operation_set(program, compiled)

    def _remember(self, program: Program, types: np.ndarray, rows: np.ndarray) -> None:
        type_numbers = program.type_of_value[program.known :]
        self.value_row = rows
        self.value_type = np.concatenate([self.value_type[: program.known], types[type_numbers]])

    def rows(self, values: np.ndarray) -> torch.Tensor:
        """A differentiable tensor [len(values), *shape] of values of one type."""
        block: torch.Tensor = self.blocks[int(self.value_type[values[0]])].read(self.value_row[values])
        return block

    def materialise(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real tensors that carry gradients."""
        return [self.rows(np.array([v], dtype=np.int64))[0] for v in values]

    def read(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real, detached tensors."""
        with torch.no_grad():
            return [self.rows(np.array([v], dtype=np.int64))[0].detach() for v in values]

    def numbers(self, values: Sequence[int]) -> list[object]:
        """The values as Python numbers in nested lists."""
        return [t.tolist() for t in self.read(values)]

    def settled(self, base: int) -> object:
        """C finds none."""
        return None


def _stacker(program: Program) -> StackConstants:
    def stack(s: int, positions: np.ndarray) -> torch.Tensor:
        payload = program.constants[s]
        return stack_payload(program.signatures[s], [payload[i] for i in positions.tolist()])

    return stack


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
                return RowByRow(signature)(n, *inputs, *shared[s])
            for device in devices_of(signature):
                stack.enter_context(torch.autocast(device, enabled=False))  # casts are in the graph
            return operation.graphs.forward(n, *inputs, *shared[s])[: len(signature.outputs)]

    return call


# -- unrolled: each structure as an fx.GraphModule


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
        results: tuple[torch.Tensor, ...] = self.graph_module(*arguments)
        return results

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
            self.execute(replace(program, outputs=every), self.planner.schedule(program))

    def execute(self, program: Program, schedule: Schedule) -> None:
        """Emit the module of this structure (or find it), run it, and keep what it gives."""
        key = PlanKey(program)
        size = key.bytes + 2000 * len(program)
        unrolled = self.planner.structures.get("unrolled", key, lambda: self.emit(program, schedule), size)
        early_rows = [self.rows(values) for values in unrolled.known]
        results = unrolled(unrolled.arguments(early_rows, program.constants))
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
        known_rows, early, used = np.zeros(program.known, dtype=np.int64), [], []
        for t in range(len(program.types)):
            values = np.flatnonzero(program.type_of_value[: program.known] == t)
            known_rows[values] = np.arange(len(values))
            used.append(len(values))
            early.append(values)
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
        early = [values for values in early if len(values)]
        for values in early:
            t = int(program.type_of_value[values[0]])
            arenas[t].append(emitted.place(f"known_{t}"), len(values))
        shared = emitted.add_shared()
        walk(program, plan, arenas, before, emitted.call, emitted.constant)
        kinds = program.type_of_value[program.outputs]
        results = [program.outputs[kinds == t] for t in np.unique(kinds).tolist()]
        read = [arenas[program.type_of_value[r[0]]].read(plan.row_of_value[r]) for r in results]
        module = emitted.finish(read)
        return Unrolled(program, module, tuple(emitted.constants), tuple(early), shared, tuple(results))


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
