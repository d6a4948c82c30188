"""Backward of a Run: all phases' steps once, in reverse; parameter gradients once an operation, at the end.

Each step gathers the gradients of its outputs from the rows that their readers wrote (`plan_gradients`),
runs the operation's backward graph, and writes the gradients of what it read into rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

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
from fxbatch.runtime.constants import to_device
from fxbatch.runtime.memory import GradientRows, Kinds, Memory
from fxbatch.runtime.native_stretches import NativeSteps, backward_steps
from fxbatch.runtime.operands import Asked, gradient_rows
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.parameter_gradients import (
    Gradients,
    KernelTable,
    Left,
    add_gradient,
    add_parameter_gradients,
)
from fxbatch.runtime.phase import Phase, StepViews
from fxbatch.runtime.run import Run, kernel_modes
from fxbatch.runtime.structure_cache import HELD
from fxbatch.runtime.watchers import is_watched, named_step
from fxbatch.torch_private import backward_keeps_graph, inside_functorch, memory_is_real, storage_of


class Given(NamedTuple):
    """The gradient of one result: of these values, all of the type `kind`."""

    kind: int
    values: np.ndarray
    grad: torch.Tensor


def run_backward(run: Run, requests: Sequence[np.ndarray], grads: Sequence[torch.Tensor | None]) -> Gradients:
    """The gradients of what a run read, given those of its results."""
    given = [
        Given(int(run.value_type[values[0]]), values, grad)
        for values, grad in zip(requests, grads, strict=True)
        if grad is not None and len(values)
    ]
    if not given:
        return {}
    if not memory_is_real() or inside_functorch() or any(map(_is_wrapped, given)):
        raise GradientError(
            'backward="compiled" computes on real tensors, not under FakeTensorMode, vmap (is_grads_batched=True) or '
            'make_fx: use @fxbatch.autobatch(backward="autograd")'
        )
    if is_watched():
        run.native = False
    with kernel_modes():
        backward = Backward(run, given)
        backward.write(given)
        backward.walk()
        backward.release()
    return backward.found


def _is_wrapped(given: Given) -> bool:
    """Whether a gradient stands for several: `is_grads_batched=True`."""
    return given.grad.layout is torch.strided and storage_of(given.grad) is None


@dataclass(frozen=True, eq=False)
class GradientTemplate:
    """What all backward passes of some operations have in common."""

    kinds: (
        Kinds  # of the arenas of gradients, and of the rows that steps make for the gradients of parameters
    )
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

    def __init__(self, run: Run, given: Sequence[Given]) -> None:
        self.run, self.memory, self.phases = run, run.memory, run.phases
        structures, memory = run.planner.structures, run.memory
        results = given[0].values if len(given) == 1 else np.concatenate([g.values for g in given])
        reached, self.reaching = find_wanted([(p.program, p.needs) for p in self.phases], results)
        self.needs = [
            run.planner.backward_needs(p.compiled, r) for p, r in zip(self.phases, reached, strict=True)
        ]
        described = [
            PhaseGradients(p.program, p.plan, needs.groups, needs.outputs, memory.types_of(p.program))
            for p, needs in zip(self.phases, self.needs, strict=True)
        ]
        self.plan = plan_gradients(described, [(g.kind, g.values) for g in given], len(memory.type_ids))
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
        self.found: Gradients = {}

    def write(self, given: Sequence[Given]) -> None:
        """Put the gradients of the results where the walk reads them."""
        for g, start in zip(given, self.plan.request_start, strict=True):
            self.rows.write(g.kind, start, g.grad)

    def walk(self) -> None:
        """All steps in reverse, then the gradients of parameters: `found`. What prepares them comes first, for what C
        runs goes through more memory than caches hold, and leaves none of Python's code in them."""
        run, left = self.run, Left(self.phases, self.memory, self.rows)
        phases = range(len(self.phases))
        passed = [self.needs[p].idle.take(self.phases[p].plan.step_signature) for p in phases]
        native: list[NativeSteps | None] = [None] * len(phases)
        kernels = None
        if run.native:
            asked: Asked = {}
            native = [self._native(p, passed[p], asked) for p in phases]
            kernels = self.template.kernels.fill(left, run.workspace(), run.planner.gradient_memory, asked)
        for p in reversed(phases):
            self._walk(p, passed[p], native[p])
        add_parameter_gradients(self.running, kernels, left, run.workspace(), self.found)

    def release(self) -> None:
        """Give the memory back, and leave no cycle that would hold gradients until the next collection."""
        self.rows.release()
        self._views.clear()

    # -- the walk -----------------------------------------------------------------------------------

    def _walk(self, p: int, passed: np.ndarray, native: NativeSteps | None) -> None:
        phase, views = self.phases[p], self._views.get(p)
        k = len(phase.plan)
        while k > 0:
            k = (k if native is None else native.backward(k)) - 1
            if k >= 0 and not passed[k]:
                if views is None:
                    views = self._views[p] = GradientViews(phase, self.memory, self.rows, self.plan, p)
                self._one(phase, k, int(phase.plan.step_signature[k]), views)

    def _native(self, p: int, passed: np.ndarray, asked: Asked) -> NativeSteps | None:
        """The stretches of steps that run in C."""
        plan = self.plan
        columns = (
            plan.first_read[p], plan.read_kind[p], plan.read_start[p], plan.read_stop[p], plan.bag[p],
            plan.read_arena[p], plan.indices, plan.bags, self.rows.table, plan.first_write[p], plan.write_arena[p],
            plan.write_start[p], passed,
        )  # fmt: skip
        return backward_steps(self.phases[p], self.memory, self.run.workspace(), self.rows, columns, asked)

    def _one(self, phase: Phase, k: int, s: int, views: GradientViews) -> None:
        """A step that Python runs."""
        compiled, n = phase.compiled[s], int(phase.plan.step_rows[k])
        assert compiled is not None
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
        filled = [_or_zeros(g, t, n) for g, t in zip(grads, types, strict=True)]
        self._step(phase, k, compiled, n, filled, written, views)

    def _step(
        self,
        phase: Phase,
        k: int,
        compiled: CompiledOperation,
        n: int,
        filled: list[torch.Tensor],
        group_grads: list[torch.Tensor],
        views: GradientViews,
    ) -> None:
        shared = self.memory.shared[compiled.signature]
        sources, outs, (kept, saved) = views.forward[k]
        if compiled.unbatched is not None:
            given_by_output: list[torch.Tensor | None] = [None] * len(outs)
            for j, grad in zip(compiled.grad_outputs, filled, strict=True):
                given_by_output[j] = grad
            with named_step(compiled.signature.name, n, "backward"):
                input_grads, shared_grads = compiled.unbatched.backward(
                    phase.tapes[k], given_by_output, keep=self.run.lasting or backward_keeps_graph()
                )
            for group, target in zip(compiled.grad_groups, group_grads, strict=True):
                given = input_grads[group]
                target.zero_() if given is None else target.copy_(given)
            for position in compiled.grad_shared:
                found = shared_grads[position]
                if found is not None:
                    add_gradient(self.found, shared[position], found)
            return
        if compiled.backward is None:
            return
        wide = [
            t
            if len(compiled.layout.groups[g]) == 1
            else t.view(n, len(compiled.layout.groups[g]), *t.shape[1:])
            for g, t in zip(compiled.grad_groups, group_grads, strict=True)
        ]
        extra = views.extra(compiled, k, n)
        with named_step(compiled.signature.name, n, "backward"):
            compiled.backward(
                n, filled, sources, outs, kept, saved, shared, wide, extra, self.run.workspace()
            )

    def _give_constants(self, phase: Phase, s: int, at: int, n: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        compiled = phase.compiled[s]
        assert compiled is not None
        payload = phase.program.constants[s]
        plan = phase.plan  # rows are counted over all phases: the phase's first constant is the payload's
        first = at - int(plan.step_offset[plan.step_signature == s].min())
        order = phase.plan.constant_order[s]
        reaching = self.reaching[phase.program.first_value[np.flatnonzero(phase.program.sig == s)]]
        for row in range(n):
            i = first + row if order is None else int(order[first + row])
            tensor = payload[i]
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and reaching[i]:
                add_gradient(self.found, tensor, grad[row])


class GradientViews:
    """Where the steps of a phase read and write in backward, as tensors, for steps that Python runs."""

    def __init__(self, phase: Phase, memory: Memory, rows: GradientRows, plan: GradientPlan, p: int) -> None:
        self._phase, self._rows, self._plan, self._p = phase, rows, plan, p
        self.forward: StepViews = phase.views_in(memory)  # what forward read, wrote and kept
        self._indices: dict[
            torch.device, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # and bags: two copies a device

    def extra(self, compiled: CompiledOperation, k: int, n: int) -> list[torch.Tensor]:
        """The rows that a step makes for the gradients of parameters."""
        first = self._phase.plan.step_offset.item(k)
        return [tensor.narrow(0, first, n) for tensor in self._rows.extra(compiled)]

    def writes(self, k: int) -> list[torch.Tensor]:
        """The blocks that the gradients of what a step read go to."""
        plan, p = self._plan, self._p
        arena, start, rows = plan.write_arena[p], plan.write_start[p], plan.write_rows[p]
        own = range(plan.first_write[p].item(k), plan.first_write[p].item(k + 1))
        return [self._rows.tensor(arena.item(j)).narrow(0, start.item(j), rows.item(j)) for j in own]

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
        found = self._indices.get(arena.device)
        if found is None:
            found = to_device(plan.indices, arena.device), to_device(plan.bags, arena.device)
            self._indices[arena.device] = found
        index, bags = found[0][start:stop], found[1]
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


def _or_zeros(grad: torch.Tensor | None, kind: TensorSpec, n: int) -> torch.Tensor:
    if grad is not None:
        return grad
    return torch.zeros((), dtype=kind.dtype, device=kind.device).expand(n, *kind.shape)
