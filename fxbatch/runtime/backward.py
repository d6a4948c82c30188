"""Backward of a Run: all phases' steps once, in reverse; parameter gradients once an operation, at the end.

Each step gathers the gradients of its outputs from the rows that their readers wrote (`plan_gradients`),
runs the operation's backward graph, and writes the gradients of what it read into rows of its own. The gradients of an
operation's shared operands are made once, on the rows of all its steps:

    table = KernelTable.of(operations)                         # once a set of operations
    left = Left(phases, memory, rows)
    kernels = table.fill(left, workspace, gradient_memory, asked)       # before the steps run
    add_parameter_gradients(operations, kernels, left, workspace, found)     # after them: found[id(operand)]

All operations that have native programs run in one call of `_native.c`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fxbatch import stopwatch
from fxbatch.codegen.build_operation import Ref
from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import address, extension
from fxbatch.codegen.native_programs import NativeStep
from fxbatch.codegen.native_table import MOST_ROWS, BackwardColumns
from fxbatch.errors import GradientError
from fxbatch.ir import TensorSpec
from fxbatch.passes.gradients import (
    GRADIENT_INDEX,
    GRADIENT_SUM,
    GRADIENT_VIEW,
    NOTHING,
    GradientPlan,
    PhaseGradients,
    plan_gradients,
)
from fxbatch.passes.plan import is_constant
from fxbatch.passes.signature_graph import find_wanted
from fxbatch.runtime.forward import NativeSteps, Phase, StepViews, native_steps_of, payload_places
from fxbatch.runtime.leading_rows import LeadingRows, are_finite, has_idle_calls
from fxbatch.runtime.memory import GradientRows, Kinds, Memory, kinds_of_rows, to_device
from fxbatch.runtime.operands import (
    FROM_FORWARD,
    FROM_STEPS,
    OUTPUT,
    Asked,
    add_gradients,
    gradient_rows,
    put_kernels,
)
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.pool import GradientMemory
from fxbatch.runtime.run import Run, kernel_modes
from fxbatch.runtime.structure_cache import HELD
from fxbatch.runtime.watchers import named_step
from fxbatch.torch_private import (
    backward_keeps_graph,
    dispatch_mode_count,
    inside_functorch,
    memory_is_real,
    profiler_enabled,
    storage_of,
)
from fxbatch.trace.constants import RowColumn

Gradients = dict[int, torch.Tensor]  # id of the tensor -> its gradient


class Left(NamedTuple):
    """Inputs of the parameters' gradients: the phases that ran, their memory, and the rows that backward wrote."""

    phases: Sequence[Phase]
    memory: Memory
    rows: GradientRows
    leading: LeadingRows | None = None  # where the others are left out

    def inputs(self, compiled: CompiledOperation) -> tuple[int, list[torch.Tensor]]:
        """How many rows the parameters' gradients of an operation are made of, and these."""
        rows = [self.all_rows(compiled, ref) for ref in compiled.parameter_inputs]
        if self.leading is None:
            return self.memory.calls(compiled), rows
        places = self.leading.of_operation(compiled)
        return len(places), [x.index_select(0, to_device(places, x.device)) for x in rows]

    def all_rows(self, compiled: CompiledOperation, ref: Ref) -> torch.Tensor:
        """[N, ...]: the rows of all steps of the operation, in step order."""
        n = self.memory.calls(compiled)
        if ref.kind == "group":
            position = compiled.kept_groups.index(ref.index)
            size, rows = compiled.kept_members[position], self.memory.kept_rows(compiled, position)
            rows = rows[: n * size]
            return rows if size == 1 else rows.view(n, size, *rows.shape[1:])
        if ref.kind == "output":
            blocks = [
                phase.rows_of_output(self.memory, k, ref.index)
                for phase in self.phases
                for k, s in enumerate(phase.plan.step_signature.tolist())
                if phase.compiled[s] is compiled
            ]
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        if ref.kind == "extra":
            return self.rows.extra(compiled)[ref.index]
        return self.memory.saved(compiled, ref.index)[:n]


@dataclass(frozen=True)
class _Kernel:
    """The native program of one operation, and what it reads and writes: rows of a table from `row` on, first its
    inputs, then the operation's shared operands, then its results."""

    operation: CompiledOperation
    step: NativeStep
    row: int
    inputs: tuple[tuple[int, int], ...]  # from where, and which array of the operation there
    slots: tuple[int, ...]  # which of all results are its own
    adds: bool  # to what another has written there


@dataclass(frozen=True, eq=False)
class KernelTable:
    """The kernels of a set of operations that run in one call: rows (pointer, bytes) that are still to come."""

    kernels: tuple[_Kernel, ...]
    programs: tuple[object, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and type of each
    rows: int
    rest: tuple[CompiledOperation, ...]  # the operations without a kernel here
    reading: tuple[int, ...]  # the kernels that read outputs of steps

    @staticmethod
    def of(operations: Sequence[CompiledOperation]) -> KernelTable:
        """The table of those that have native programs, and arrays that C can read."""
        kernels: list[_Kernel] = []
        results: list[tuple[tuple[int, ...], torch.dtype]] = []
        written: dict[object, int] = {}  # the result of each shared operand that others may be added to
        row = 0
        for operation in operations:
            step = operation.native_parameters
            arrays = (*kinds_of_rows(operation), *operation.extra_types)
            if step is None or not all(k.nbytes and k.device.type == "cpu" for k in arrays):
                continue
            groups = operation.kept_groups
            inputs = tuple(
                (FROM_STEPS, ref.index) if ref.kind == "extra"
                else (FROM_FORWARD, groups.index(ref.index)) if ref.kind == "group"
                else (FROM_FORWARD, len(groups) + ref.index) if ref.kind == "saved"
                else (OUTPUT, ref.index)
                for ref in operation.parameter_inputs
            )  # fmt: skip
            keys = [operation.signature.shared[i].key for i in operation.grad_shared]
            adds = step.adding is not None and bool(keys) and all(key in written for key in keys)
            if adds:
                slots = tuple(written[key] for key in keys)
            else:
                slots = tuple(range(len(results), len(results) + len(keys)))
                results += step.outputs  # which don't grow with the rows
                if step.adding is not None:
                    written.update(zip(keys, slots, strict=True))
            kernels.append(_Kernel(operation, step, row, inputs, slots, adds))
            row += len(inputs) + len(step.shared_bytes) + len(slots)
        programs = tuple(k.step.adding if k.adds else k.step.program for k in kernels)
        batched = {k.operation for k in kernels}
        rest = tuple(op for op in operations if op not in batched)
        reading = tuple(i for i, k in enumerate(kernels) if any(source == OUTPUT for source, _ in k.inputs))
        return KernelTable(tuple(kernels), programs, tuple(results), row, rest, reading)

    def fill(
        self, left: Left, workspace: Workspace, memory: GradientMemory, asked: Asked
    ) -> NativeKernels | None:
        """The kernels with the pointers of now; None where there is none, or one can't read what it is given."""
        if not self.kernels:
            return None
        counts = array("q", left.memory.calls_of([k.operation for k in self.kernels]))
        rows = np.empty((self.rows, 2), dtype=np.int64)
        results = [memory.take(shape, dtype) for shape, dtype in self.results]
        held: list[torch.Tensor] = []
        good = (
            put_kernels(rows, self.kernels, left.memory, left.rows, results, asked)
            and all(_put_outputs(self.kernels[i], left, rows, held) for i in self.reading)
            and all(0 < n <= MOST_ROWS for n in counts)
        )
        return NativeKernels(self, workspace, counts, rows, results, held) if good else None


def _put_outputs(kernel: _Kernel, left: Left, rows: np.ndarray, held: list[torch.Tensor]) -> bool:
    """Where the outputs of steps that a kernel reads are; whether C can read them. held: until it has."""
    for i, (source, _) in enumerate(kernel.inputs):
        if source == OUTPUT:
            all_rows = left.all_rows(kernel.operation, kernel.operation.parameter_inputs[i])
            place = address(all_rows, all_rows.nbytes) if all_rows.is_contiguous() else None
            if not place:
                return False
            held.append(all_rows)
            rows[kernel.row + i] = place, all_rows.nbytes
    return True


class NativeKernels(NamedTuple):
    """Kernels that run one after another in one call, with memory of their own for their results."""

    table: KernelTable
    workspace: Workspace
    counts: array[int]  # rows of each
    rows: np.ndarray  # int64 [.., 2]: pointers and bytes
    results: list[torch.Tensor]
    held: list[torch.Tensor]

    @property
    def steps(self) -> list[NativeStep]:
        """The step that each kernel belongs to."""
        return [k.step for k in self.table.kernels]

    def run(self, first: int = 0, last: int = -1) -> bool:
        """Run them all, or some; whether they did."""
        last = len(self.counts) if last < 0 else last
        if profiler_enabled() and last - first > 1:
            for i in range(first, last):
                with named_step(self.table.kernels[i].step.name, self.counts[i], "parameter gradients"):
                    if not self.run(i, i + 1):
                        return False
            return True
        room = self.workspace.native_room()
        return bool(extension.run_all(self.table.programs, room, self.counts, self.rows, first, last) == last)


def add_parameter_gradients(
    operations: Sequence[CompiledOperation],
    kernels: NativeKernels | None,
    left: Left,
    workspace: Workspace,
    gradients: Gradients,
) -> None:
    """Add what operations give as the gradients of their shared operands. kernels: their native programs; None where
    nothing is to run in C."""
    if kernels is not None and kernels.run():  # else an index is out of range, which Python tells of
        add_gradients(kernels.table.kernels, left.memory.shared, kernels.results, gradients)
        operations = kernels.table.rest
    for compiled in operations:
        if compiled.parameters is None:
            continue
        shared = left.memory.shared[compiled.signature]
        n, rows = left.inputs(compiled)
        with named_step(compiled.signature.name, n, "parameter gradients"):
            grads = compiled.parameters(n, (*rows, *shared), (None,) * len(compiled.grad_shared), workspace)
        for position, grad in zip(compiled.grad_shared, grads, strict=True):
            add_gradient(gradients, shared[position], grad)


def operands_behind(
    phases: Sequence[Phase], memory: Memory, reached: Sequence[np.ndarray], reaching: np.ndarray
) -> set[int]:
    """The shared operands, by id, that results are computed from. reached, reaching: what `find_wanted` says."""
    ids: set[int] = set()
    for phase, leads in zip(phases, reached, strict=True):
        program = phase.program
        for s in np.flatnonzero(leads).tolist():
            shared, compiled = memory.shared.get(program.signatures[s], ()), phase.compiled[s]
            if compiled is None or not compiled.is_selective:
                ids.update(map(id, shared))
                continue
            first = program.first_value[np.flatnonzero(program.sig == s)]
            for j, places in enumerate(compiled.behind):
                if reaching[first + j].any():
                    ids.update(id(shared[i]) for i in places)
    return ids


def add_gradient(gradients: Gradients, tensor: torch.Tensor, grad: torch.Tensor) -> None:
    """Note a gradient of a tensor that may have others."""
    before = gradients.get(id(tensor))
    if before is None:
        gradients[id(tensor)] = grad.clone() if grad._base is not None else grad
    else:
        gradients[id(tensor)] = before + grad


# -- steps in reverse


class Given(NamedTuple):
    """The gradient of one result: of these values, all of the type `kind`."""

    kind: int
    values: np.ndarray
    grad: torch.Tensor


def run_backward(run: Run, requests: Sequence[np.ndarray], grads: Sequence[torch.Tensor | None]) -> Gradients:
    """The gradients of what a run read, given those of its results."""
    gradients_given = [
        Given(int(run.value_type[values[0]]), values, grad)
        for values, grad in zip(requests, grads, strict=True)
        if grad is not None and len(values)
    ]
    if not gradients_given:
        return {}
    strided = [x.grad for x in gradients_given if x.grad.layout is torch.strided]
    if not memory_is_real() or inside_functorch() or any(storage_of(grad) is None for grad in strided):
        raise GradientError(
            'backward="compiled" computes on real tensors, not under FakeTensorMode, vmap (is_grads_batched=True) or '
            'make_fx: use @fxbatch.autobatch(backward="autograd")'
        )
    if dispatch_mode_count():  # it sees calls of ATen
        run.native = False
    with kernel_modes():
        backward = Backward(run, gradients_given)
        backward.write(gradients_given)
        backward.walk()
        if backward.leaves_out():
            backward.walk()
        backward.release()
    return backward.gradients


@dataclass(frozen=True, eq=False)
class GradientTemplate:
    """Everything in a backward pass that depends on the operations alone, and not on the minibatch."""

    # Of the arenas of gradients, and of the rows that steps make for the gradients of parameters.
    kinds: Kinds
    arenas: int
    first_of: dict[CompiledOperation, int]  # the first array of each operation that makes such rows
    made_by: np.ndarray  # int64: which of these operations makes the rows of each array after the arenas
    kernels: KernelTable

    @staticmethod
    def of(types: Sequence[TensorSpec], running: Sequence[CompiledOperation]) -> GradientTemplate:
        """types: those of all values; running: the operations that run in backward."""
        kinds, owner = list(types), []
        first_of: dict[CompiledOperation, int] = {}
        for operation in running:
            if operation.extra_types:
                owner += [len(first_of)] * len(operation.extra_types)
                first_of[operation] = len(kinds)
                kinds += operation.extra_types
        made_by = np.array(owner, dtype=np.int64)
        return GradientTemplate(Kinds.of(kinds), len(types), first_of, made_by, KernelTable.of(running))

    def take(self, memory: Memory, capacity: np.ndarray) -> GradientRows:
        """Memory for a backward pass. capacity: rows of each arena, the zero row among them."""
        rows = gradient_rows(capacity, memory.calls_of([*self.first_of]), self.made_by)
        return GradientRows(memory.pool, self.kinds, self.arenas, rows, self.first_of)


class Backward:
    """One backward pass of a run: planned, its memory taken; `walk` may be repeated."""

    def __init__(self, run: Run, requests: Sequence[Given]) -> None:
        self.run, self.memory, self.phases = run, run.memory, run.phases
        structures, memory = run.planner.structures, run.memory
        results = requests[0].values if len(requests) == 1 else np.concatenate([g.values for g in requests])
        left_out = run.left_out.intersection(results.tolist()) if run.left_out else set()
        run.left_out -= left_out
        led_to = np.setdiff1d(results, [*left_out]) if left_out else results
        self.reached, self.reaching = find_wanted([(p.program, p.needs) for p in self.phases], led_to)
        for phase, leads in zip(self.phases, self.reached, strict=True):
            if leads.any() and any(t._version != version for t, version in phase.read):
                raise GradientError(
                    "a parameter or buffer that backward reads has been modified by an inplace operation (as an "
                    "optimizer's step) since the calls of this lazy block ran: go backward before"
                )
        self.needs = [
            run.planner.backward_needs(p.compiled, r) for p, r in zip(self.phases, self.reached, strict=True)
        ]
        described = [
            PhaseGradients(p.program, p.plan, needs.groups, needs.outputs, memory.types_of(p.program))
            for p, needs in zip(self.phases, self.needs, strict=True)
        ]
        self.plan = plan_gradients(described, [(g.kind, g.values) for g in requests], len(memory.type_ids))
        self.running = self.needs[0].running
        if len(self.needs) > 1:
            self.running = tuple(dict.fromkeys(op for w in reversed(self.needs) for op in w.running))
        self.template = structures.get(
            "gradients",
            (self.running, memory.sets),
            lambda: GradientTemplate.of(list(memory.type_ids), self.running),
            HELD * len(self.running),
        )
        self.rows = self.template.take(memory, self.plan.capacity)
        self._views: dict[int, GradientViews] = {}
        self.gradients: Gradients = {}
        self.of_rows: Gradients = {}  # of tensors that rows were read of
        self.leading: LeadingRows | None = None  # where gradients of other rows are left out

    def write(self, requests: Sequence[Given]) -> None:
        """Put the gradients of the results where the walk reads them."""
        for g, start in zip(requests, self.plan.request_start, strict=True):
            self.rows.write(g.kind, start, g.grad)

    def leaves_out(self) -> bool:
        """Whether the gradients are to be made once more, step by step, without those of rows that lead to no result:
        there are such, and gradients came out infinite or NaN."""
        rows = self.phases, self.reached, self.reaching
        if len(self.phases) == 1 and not has_idle_calls(
            *rows
        ):  # which takes less than to look at all gradients
            return False
        if are_finite(self.gradients.values()) or not has_idle_calls(*rows):
            return False
        self.gradients, self.of_rows = {}, {}
        self.leading = LeadingRows(self.run, self.reaching)
        return True

    def walk(self) -> None:
        """All steps in reverse. What prepares the gradients of parameters comes first, for what C runs goes through
        more memory than caches hold, and leaves none of Python's code in them."""
        run, left = self.run, Left(self.phases, self.memory, self.rows, self.leading)
        workspace = run.planner.workspace()
        workspace.keeps_graphs = run.lasting or backward_keeps_graph() or self.leading is None
        phases = range(len(self.phases))
        passed = [self.needs[p].idle.take(self.phases[p].plan.step_signature) for p in phases]
        native: list[NativeSteps | None] = [None] * len(phases)
        kernels = None
        if run.native and self.leading is None:
            asked: Asked = {}
            native = [self._native(p, passed[p], asked) for p in phases]
            kernels = self.template.kernels.fill(left, workspace, run.planner.gradient_memory, asked)
        for p in reversed(phases):
            phase, steps = self.phases[p], native[p]
            k = len(phase.plan)
            while k > 0:
                k = (k if steps is None else steps.backward(k)) - 1
                if k >= 0 and not passed[p][k]:
                    if p not in self._views:
                        self._views[p] = GradientViews(phase, self.memory, self.rows, self.plan, p)
                    self._one(phase, k, phase.plan.step_signature.item(k), self._views[p])
        selective = any(needs.selective for needs in self.needs)
        before = set(self.gradients) if selective else set()
        add_parameter_gradients(self.running, kernels, left, workspace, self.gradients)
        if selective:  # zeros of what only results without a gradient are computed from: None, as in the loop
            leading = operands_behind(self.phases, self.memory, self.reached, self.reaching)
            for key in self.gradients.keys() - before - leading:
                del self.gradients[key]

    def release(self) -> None:
        """Give the memory back, and leave no cycle that would hold gradients until the next collection."""
        self.rows.release()
        self._views.clear()

    def _native(self, p: int, passed: np.ndarray, asked: Asked) -> NativeSteps | None:
        """The stretches of steps that run in C."""
        plan = self.plan
        columns = BackwardColumns(
            first_read=plan.first_read[p], read_kind=plan.read_kind[p], read_start=plan.read_start[p],
            read_stop=plan.read_stop[p], read_bag=plan.bag[p], read_arena=plan.read_arena[p],
            gradient_indices=plan.indices, bags=plan.bags, gradients=self.rows.table, first_write=plan.first_write[p],
            write_arena=plan.write_arena[p], write_start=plan.write_start[p], passed=passed,
        )  # fmt: skip
        workspace = self.run.planner.workspace()
        return native_steps_of(self.phases[p], self.memory, workspace, asked, self.rows, columns)

    def _one(self, phase: Phase, k: int, s: int, views: GradientViews) -> None:
        """A step that Python runs."""
        compiled, n = phase.operation(k), int(phase.plan.step_rows[k])
        grads = views.reads(k, n)
        if is_constant(compiled.signature):
            if grads:
                self._give_constants(phase, s, int(phase.plan.step_offset[k]), n, grads[0])
            return
        written = views.writes(k) if grads else []
        if all(g is None for g in grads):
            for tensor in (*written, *views.extra(compiled, k, n)):
                tensor.zero_()
            return
        types = [compiled.signature.outputs[j] for j in compiled.grad_outputs]
        leads = None if self.leading is None else self.leading.of_step(phase, k)
        of_outputs: Sequence[torch.Tensor | list[torch.Tensor | None] | None] = grads
        if compiled.unbatched is None:
            of_outputs = [_or_zeros(g, t, n) for g, t in zip(grads, types, strict=True)]
        elif leads is not None:
            of_outputs = [None if g is None else _those(g, leads) for g in grads]
        if compiled.backward is None:
            return
        step, extra = views.forward[k], views.extra(compiled, k, n)
        sizes = [len(compiled.layout.groups[g]) for g in compiled.grad_groups]
        pairs = zip(written, sizes, strict=True)
        wide = [t if size == 1 else t.view(n, size, *t.shape[1:]) for t, size in pairs]
        begun = stopwatch.now() if compiled.is_late else 0.0
        with named_step(compiled.signature.name, n, "backward"):
            of_operands = compiled.backward(step, of_outputs, wide, extra, self.run.planner.workspace())
        if leads is not None and not leads.all():
            for tensor in (*wide, *extra):
                tensor[torch.from_numpy(~leads).to(tensor.device)] = 0
        if compiled.is_late:
            compiled.count_late(stopwatch.now() - begun, n)
        for position, grad in zip(compiled.grad_shared, of_operands or (), strict=False):
            if grad is not None:
                add_gradient(self.gradients, step.shared[position], grad)

    def _give_constants(self, phase: Phase, s: int, at: int, n: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        payload = phase.program.constants[s]
        plan = phase.plan  # rows are counted over all phases: the phase's first constant is the payload's
        first = at - int(plan.step_offset[plan.step_signature == s].min())
        where = payload_places(plan, s, first, n)
        reaching = self.reaching[phase.program.first_value[np.flatnonzero(phase.program.sig == s)]]
        if isinstance(payload, RowColumn):
            self._give_rows(payload, where, np.flatnonzero(reaching[where]), grad)
            return
        rows: Sequence[torch.Tensor] = ()
        for row, i in enumerate(where.tolist()):
            tensor = payload[i]
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and reaching[i]:
                rows = rows or torch.ops.aten.unbind_copy(grad)  # the block is written to again
                add_gradient(self.gradients, tensor, rows[row])

    def _give_rows(
        self, payload: RowColumn, where: np.ndarray, reaching: np.ndarray, grad: torch.Tensor
    ) -> None:
        """Add the gradients of rows to those of what they are rows of. reaching: those of them that lead to results."""
        for tensor, places, numbers in payload.parts(where[reaching]):
            if not tensor.requires_grad:
                continue
            order = np.argsort(numbers, kind="stable")
            targets, bags = np.unique(numbers[order], return_index=True)
            index, starts, into = (
                to_device(x, grad.device) for x in (reaching[places[order]], bags, targets)
            )
            whole = self.of_rows.get(id(tensor))
            if whole is None:
                before = self.gradients.get(id(tensor))
                whole = torch.zeros_like(tensor) if before is None else before.clone()
                self.of_rows[id(tensor)] = self.gradients[id(tensor)] = whole
            whole.index_add_(0, into, sum_bags(grad, index, starts))  # each row once: in one order
        for tensor, place in zip(*payload.alone(where[reaching]), strict=True):
            if tensor.requires_grad:
                add_gradient(self.gradients, tensor, grad[reaching[place]].clone())


class GradientViews:
    """Where the steps of a phase read and write in backward, as tensors, for steps that Python runs."""

    def __init__(self, phase: Phase, memory: Memory, rows: GradientRows, plan: GradientPlan, p: int) -> None:
        self._phase, self._rows, self._plan, self._p = phase, rows, plan, p
        self.forward: StepViews = phase.views_in(memory)  # what forward read, wrote and kept
        # And bags: two copies a device.
        self._indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def extra(self, compiled: CompiledOperation, k: int, n: int) -> list[torch.Tensor]:
        """The rows that a step makes for the gradients of parameters."""
        first = self._phase.plan.step_offset.item(k)
        return [tensor.narrow(0, first, n) for tensor in self._rows.extra(compiled)]

    def writes(self, k: int) -> list[torch.Tensor]:
        """The blocks that the gradients of what a step read go to."""
        plan, p = self._plan, self._p
        arena, start, rows = plan.write_arena[p], plan.write_start[p], plan.write_rows[p]
        places = range(plan.first_write[p].item(k), plan.first_write[p].item(k + 1))
        return [self._rows.tensor(arena.item(j)).narrow(0, start.item(j), rows.item(j)) for j in places]

    def reads(self, k: int, n: int) -> list[torch.Tensor | None]:
        """The gradients of a step's outputs, of n rows each."""
        first = self._plan.first_read[self._p]
        return [self._read(i, n) for i in range(first.item(k), first.item(k + 1))]

    def _read(self, i: int, n: int) -> torch.Tensor | None:
        """A view, rows by an index, a sum over bags, or nothing."""
        plan, p = self._plan, self._p
        kind, start, stop = int(plan.read_kind[p][i]), int(plan.read_start[p][i]), int(plan.read_stop[p][i])
        if kind == NOTHING:
            return None
        arena = self._rows.tensor(int(plan.read_arena[p][i]))
        if kind == GRADIENT_VIEW:
            return arena[start:stop]
        indices = self._indices.get(arena.device)
        if indices is None:
            indices = to_device(plan.indices, arena.device), to_device(plan.bags, arena.device)
            self._indices[arena.device] = indices
        index, bags = indices[0][start:stop], indices[1]
        if kind == GRADIENT_SUM:
            bag = int(plan.bag[p][i])
            return sum_bags(arena, index, bags[bag : bag + n])
        assert kind == GRADIENT_INDEX
        return torch.index_select(arena, 0, index)


def sum_bags(rows: torch.Tensor, index: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    """For each bag b, the sum of `rows[index[bags[b] : bags[b + 1]]]`; deterministic on every device."""
    flat = torch.view_as_real(rows) if rows.is_complex() else rows
    table = flat.reshape(flat.shape[0], -1)
    if table.shape[1] == 0:
        return rows.new_zeros((len(bags), *rows.shape[1:]))
    summed = torch.embedding_bag(table, index, bags, False, 0)[0].view(len(bags), *flat.shape[1:])
    return torch.view_as_complex(summed) if rows.is_complex() else summed


def _those(rows: torch.Tensor, flags: np.ndarray) -> list[torch.Tensor | None]:
    """The rows that are flagged, None in place of the others."""
    return [row if flag else None for row, flag in zip(rows.unbind(0), flags.tolist(), strict=True)]


def _or_zeros(grad: torch.Tensor | None, kind: TensorSpec, n: int) -> torch.Tensor:
    if grad is not None:
        return grad
    return torch.zeros((), dtype=kind.dtype, device=kind.device).expand(n, *kind.shape)
