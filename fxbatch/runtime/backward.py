"""Backward of a Run: all phases' steps once, in reverse; parameter gradients once an operation, at the end.

Each step gathers the gradients of its outputs from the rows that their readers wrote (`plan_gradients`),
runs the operation's backward graph, and writes the gradients of what it read into rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxbatch.errors import GradientError
from fxbatch.ir import TensorType
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
from fxbatch.runtime.memory import GradientRows, Memory
from fxbatch.runtime.native_stretches import NativeKernels, NativeSteps, backward_steps
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.parameter_gradients import Left, parameter_gradients
from fxbatch.runtime.phase import Phase, StepViews
from fxbatch.runtime.run import Run, kernel_modes
from fxbatch.runtime.structure_cache import BackwardNeeds
from fxbatch.runtime.watchers import is_watched, named_step
from fxbatch.torch_private import backward_keeps_graph, inside_functorch, memory_is_real, storage_of

Gradients = dict[int, torch.Tensor]  # id of the tensor -> its gradient


@dataclass(frozen=True, eq=False)
class Given:
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


class Backward:
    """One backward pass of a run: planned, its memory taken; `walk` may be repeated."""

    def __init__(self, run: Run, given: Sequence[Given]) -> None:
        self.run, self.memory, self.phases = run, run.memory, run.phases
        results = np.concatenate([g.values for g in given])
        reached, self.reaching = find_wanted([(p.program, p.needs) for p in self.phases], results)
        self.needs = [
            run.planner.backward_needs(p.compiled, r) for p, r in zip(self.phases, reached, strict=True)
        ]
        described = [self._describe(p, w) for p, w in zip(self.phases, self.needs, strict=True)]
        types = list(self.memory.type_ids)
        self.plan = plan_gradients(described, [(g.kind, g.values) for g in given], len(types))
        self.running = tuple(dict.fromkeys(op for w in reversed(self.needs) for op in w.running))
        extra = {op: self.memory.calls(op) for op in self.running if op.extra_types}
        self.rows = GradientRows(self.memory.pool, types, self.plan.capacity.tolist(), extra)
        self._views: dict[int, GradientViews] = {}
        self.found: Gradients = {}

    def write(self, given: Sequence[Given]) -> None:
        """Put the gradients of the results where the walk reads them."""
        for g, start in zip(given, self.plan.request_start, strict=True):
            self.rows.write(g.kind, start, g.grad)

    def walk(self) -> None:
        """All steps in reverse, then the gradients of parameters: `found`."""
        self.found = {}
        for p in range(len(self.phases) - 1, -1, -1):
            self._walk(p)
        self._parameters()

    def release(self) -> None:
        """Give the memory back, and leave no cycle that would hold gradients until the next collection."""
        self.rows.release()
        self._views.clear()

    # -- preparation --------------------------------------------------------------------------------

    def _describe(self, phase: Phase, needs: BackwardNeeds) -> PhaseGradients:
        ids = self.memory.types_of(phase.program)
        return PhaseGradients(phase.program, phase.plan, needs.groups, needs.outputs, ids)

    # -- the walk -----------------------------------------------------------------------------------

    def _walk(self, p: int) -> None:
        phase = self.phases[p]
        passed = self.needs[p].idle[phase.plan.step_signature]
        views = self._views.get(p)
        if views is None:
            views = self._views[p] = GradientViews(phase, self.memory, self.rows, self.plan, p)
        native = self._native(p, passed) if self.run.native else None
        k = len(phase.plan)
        while k > 0:
            k = (k if native is None else native.backward(k)) - 1
            if k >= 0 and not passed[k]:
                self._one(phase, k, int(phase.plan.step_signature[k]), views)

    def _native(self, p: int, passed: np.ndarray) -> NativeSteps | None:
        """The stretches of steps that run in C."""
        plan = self.plan
        columns = (
            plan.first_read[p], plan.read_kind[p], plan.read_start[p], plan.read_stop[p], plan.bag[p],
            plan.read_arena[p], plan.indices, plan.bags, self.rows.table, plan.first_write[p], plan.write_arena[p],
            plan.write_start[p], passed.astype(np.int64),
        )  # fmt: skip
        return backward_steps(self.phases[p], self.memory, self.run.workspace(), self.rows, columns)

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
                    self._add(shared[position], found)
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
                self._add(tensor, grad[row])

    def _add(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        found = self.found.get(id(tensor))
        if found is None:
            self.found[id(tensor)] = grad.clone() if grad._base is not None else grad
        else:
            self.found[id(tensor)] = found + grad

    # -- parameter gradients ------------------------------------------------------------------------

    def _parameters(self) -> None:
        workspace, native = self.run.workspace(), self.run.native
        kernels = NativeKernels(workspace, self.run.planner.gradient_memory) if native else None
        left = Left(self.phases, self.memory, self.rows)
        for compiled, results in parameter_gradients(self.running, left, workspace, kernels):
            shared = self.memory.shared[compiled.signature]
            for position, grad in zip(compiled.grad_shared, results, strict=True):
                self._add(shared[position], grad)


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


def _or_zeros(grad: torch.Tensor | None, kind: TensorType, n: int) -> torch.Tensor:
    if grad is not None:
        return grad
    return torch.zeros((), dtype=kind.dtype, device=kind.device).expand(n, *kind.shape)
