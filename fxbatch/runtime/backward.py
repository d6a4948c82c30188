"""Backward of a Run: all phases' steps once, in reverse; parameter gradients once an operation, at the end.

Each step gathers the gradients of its outputs from the rows that their readers wrote (`plan_gradients`),
runs the operation's backward graph, and writes the gradients of what it read into rows of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fxbatch.ir import TensorType, offsets
from fxbatch.passes.find_needs import find_wanted
from fxbatch.passes.plan_arenas import is_constant
from fxbatch.passes.plan_gradients import (
    GRADIENT_INDEX,
    GRADIENT_SUM,
    GRADIENT_VIEW,
    NOTHING,
    GradientPlan,
    PhaseGradients,
    plan_gradients,
)
from fxbatch.runtime.buffers import Buffer
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.devices import to_device
from fxbatch.runtime.forward import block_rows, lay_out
from fxbatch.runtime.native_steps import NativeSteps, backward_steps, clear_row, run_native
from fxbatch.runtime.phase import Layout, OperationRows, Phase
from fxbatch.runtime.pieces import (
    Kept,
    is_given,
    reserve_extra,
    split,
    split_blocks,
    split_extra,
    split_kept,
)
from fxbatch.runtime.run import Run, kernel_modes

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
    with kernel_modes():
        found = None if run.lent is None else run.lent.run_backward(run, given)
        if found is not None:
            return found
        backward = Backward(run, given)
        backward.write(given)
        backward.walk()
        backward.release()
    return backward.found


class Backward:
    """One backward pass of a run: planned, its memory taken; `walk` may be repeated."""

    def __init__(self, run: Run, given: Sequence[Given]) -> None:
        self.run = run
        results = np.concatenate([g.values for g in given])
        wanted = find_wanted([(p.program, p.needs) for p in run.phases], results)
        self.described = [self._describe(p, w) for p, w in zip(run.phases, wanted, strict=True)]
        self.plan = plan_gradients(self.described, [(g.kind, g.values) for g in given], len(run.arenas))
        self.arenas = self._allocate(self.plan)
        self._places: dict[int, _Places] = {}
        self.found: Gradients = {}
        # Operations that ran, with the gradients that take the place of their extra rows.
        self.ran: dict[CompiledOperation, list[torch.Tensor]] = {}

    def write(self, given: Sequence[Given]) -> None:
        """Put the gradients of the results where the walk reads them."""
        for g, start in zip(given, self.plan.request_start, strict=True):
            self.arenas[g.kind][start : start + len(g.values)].copy_(g.grad)

    def walk(self) -> None:
        """All steps in reverse, then the gradients of parameters: `found`."""
        self.found, self.ran = {}, {}
        for p in range(len(self.run.phases) - 1, -1, -1):
            self._walk(p)
        self._parameters()

    def release(self) -> None:
        """Give the memory back, and leave no cycle that would hold gradients until the next collection."""
        for buffer in self._buffers:
            buffer.release()
        self._places.clear()

    # -- preparation --------------------------------------------------------------------------------

    def _describe(self, phase: Phase, wanted: np.ndarray) -> PhaseGradients:
        groups: list[tuple[int, ...]] = []
        outputs: list[tuple[int, ...]] = []
        for s, compiled in enumerate(phase.compiled):
            if compiled is None or not wanted[s]:
                groups.append(())
                outputs.append(())
            elif is_constant(compiled.signature):
                groups.append(())
                outputs.append((0,))
            elif not compiled.grad_outputs:  # no gradient reaches it: it writes none (`angle` of reals)
                groups.append(())
                outputs.append(())
            else:
                groups.append(compiled.grad_groups if compiled.needs_gradient else ())
                outputs.append(compiled.grad_outputs if compiled.needs_gradient else ())
        ids = np.array([self.run.type_ids[t] for t in phase.plan.arenas], dtype=np.int64)
        hands_on = [c is not None and c.hands_on for c in phase.compiled]
        return PhaseGradients(phase.program, phase.plan, groups, outputs, ids, hands_on)

    def _allocate(self, plan: GradientPlan) -> list[torch.Tensor]:
        kinds: list[TensorType] = list(self.run.type_ids)
        self._buffers = [Buffer(self.run.engine.pool, kind) for kind in kinds]
        arenas = []
        for buffer, rows in zip(self._buffers, plan.capacity.tolist(), strict=True):
            arena = buffer.reserve(rows) if rows > 1 else torch.empty(0)
            if rows > 1:
                clear_row(arena)
            arenas.append(arena)
        return arenas

    # -- the walk -----------------------------------------------------------------------------------

    def _walk(self, p: int) -> None:
        phase, given = self.run.phases[p], self.plan
        steps = phase.plan.step_signature
        reads = _offsets_of(self.described[p].grad_outputs, steps, given.passed[p])
        writes = _offsets_of(self.described[p].grad_groups, steps, given.passed[p])
        reserve_extra(self.run, phase)
        places = self._places.get(p)
        if places is None:
            places = self._places[p] = _Places(self, p, reads.tolist(), writes.tolist())
        native = self._native(p, reads, writes, places.arena) if self.run.native else None
        passed, signature, read = given.passed[p].tolist(), steps.tolist(), places.reads
        k = len(phase.plan)
        while k:
            stop = k if native is None else native.backward(k)
            for done in range(k - 1, stop - 1, -1):
                if not passed[done]:
                    self._has_run(phase, signature[done])
            k = stop - 1
            if k < 0:
                return
            if passed[k]:
                continue
            if read[k] == read[k + 1]:
                for tensor in places.extra[k]:
                    tensor.zero_()
                continue
            self._one(phase, k, signature[k], places)

    def _has_run(self, phase: Phase, s: int) -> None:
        compiled = phase.compiled[s]
        assert compiled is not None
        self.ran.setdefault(compiled, [])

    def _native(
        self, p: int, reads: np.ndarray, writes: np.ndarray, arena: Sequence[int]
    ) -> NativeSteps | None:
        """The stretches of steps that run in C."""
        plan, run = self.plan, self.run
        columns = (
            reads, plan.read_kind[p], plan.read_start[p], plan.read_stop[p], plan.bag[p],
            np.array(arena, dtype=np.int64), plan.indices, plan.bags, writes, plan.write_arena[p], plan.write_start[p],
        )  # fmt: skip
        return backward_steps(run, run.phases[p], run.workspace(), self.arenas, columns, plan.passed[p])

    def _one(self, phase: Phase, k: int, s: int, places: _Places) -> None:
        """A step that Python runs."""
        compiled, n = phase.compiled[s], int(phase.plan.step_rows[k])
        assert compiled is not None
        reads, writes = places.reads, places.writes
        if is_constant(compiled.signature):
            self._give_constants(phase, s, int(phase.plan.step_offset[k]), n, places.read(reads[k], n))
            return
        grads = [places.read(reads[k] + i, n) for i in range(reads[k + 1] - reads[k])]
        self._has_run(phase, s)
        filled = [
            torch.zeros((), dtype=t.dtype, device=t.device).expand(n, *t.shape) if g is None else g
            for g, t in zip(
                grads, (compiled.signature.outputs[j] for j in compiled.grad_outputs), strict=True
            )
        ]
        if is_given(self.run.rows_of[compiled], n):
            self.ran[compiled] = [filled[i] for i in compiled.extra_given]
            return
        written = places.written[writes[k] : writes[k + 1]]
        if all(g is None for g in grads):
            for tensor in (*written, *places.extra[k]):
                tensor.zero_()
            return
        self._step(phase, k, compiled, n, filled, written, places)

    def _step(
        self,
        phase: Phase,
        k: int,
        compiled: CompiledOperation,
        n: int,
        filled: list[torch.Tensor],
        group_grads: list[torch.Tensor],
        places: _Places,
    ) -> None:
        plan, shared = phase.plan, self.run.shared[compiled.signature]
        outs = places.layout.blocks[int(plan.first_block[k]) : int(plan.first_block[k + 1])]
        if compiled.unbatched is not None:
            given_by_output: list[torch.Tensor | None] = [None] * len(outs)
            for j, grad in zip(compiled.grad_outputs, filled, strict=True):
                given_by_output[j] = grad
            input_grads, shared_grads = compiled.unbatched.backward(phase.tapes[k], given_by_output)
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
        sources = places.layout.sources[int(plan.first_gather[k]) : int(plan.first_gather[k + 1])]
        kept, saved = places.pieces[k]
        compiled.backward(
            n, filled, sources, outs, kept, saved, shared, wide, places.extra[k], self.run.workspace()
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
        for row in range(n):
            tensor = payload[first + row if order is None else int(order[first + row])]
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                self._add(tensor, grad[row])

    def _add(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        found = self.found.get(id(tensor))
        if found is None:
            self.found[id(tensor)] = grad.clone() if grad._base is not None else grad
        else:
            self.found[id(tensor)] = found + grad

    # -- parameter gradients ------------------------------------------------------------------------

    def _parameters(self) -> None:
        for compiled in self.ran:
            rows = self.run.rows_of[compiled]
            if compiled.parameters is None:
                continue
            shared = self.run.shared[compiled.signature]
            inputs = [
                self._all_rows(compiled, rows, ref.kind, ref.index) for ref in compiled.parameter_inputs
            ]
            results, workspace = None, self.run.workspace()
            if self.run.native and compiled.native_parameters is not None:
                memory = self.run.engine.gradient_memory
                results = run_native(compiled.native_parameters, rows.rows, inputs, shared, workspace, memory)
            if results is None:
                results = compiled.parameters(
                    rows.rows,
                    (*inputs, *shared),
                    (None,) * len(compiled.grad_shared),
                    workspace,
                )
            for position, grad in zip(compiled.grad_shared, results, strict=True):
                self._add(shared[position], grad)

    def _all_rows(
        self, compiled: CompiledOperation, rows: OperationRows, kind: str, index: int
    ) -> torch.Tensor:
        """[N, ...]: the rows of all steps of the operation, in step order."""
        if kind == "group":
            return rows.kept_rows(compiled.kept_groups.index(index), 0, rows.rows)[1]
        if kind == "output":
            found = []
            for phase in self.run.phases:
                steps = [
                    k
                    for k, s in enumerate(phase.plan.step_signature.tolist())
                    if phase.compiled[s] is compiled
                ]
                found += [block_rows(self.run, phase, k, index) for k in steps]
            return found[0] if len(found) == 1 else torch.cat(found)
        if kind == "extra" and self.ran[compiled]:
            return self.ran[compiled][index]
        buffer = rows.saved[index] if kind == "saved" else rows.extra[index]
        assert buffer.tensor is not None
        return buffer.tensor[: rows.rows]


class _Places:
    """Where the steps of a phase read and write in backward; laid out where a step that Python runs asks."""

    def __init__(self, backward: Backward, p: int, reads: list[int], writes: list[int]) -> None:
        self._backward, self._p = backward, p
        self._phase = backward.run.phases[p]
        self.reads, self.writes = reads, writes  # where those of each step begin
        described, phase = backward.described[p].grad_outputs, self._phase
        kinds = [
            [int(backward.run.type_ids[signature.outputs[j]]) for j in outputs]
            for signature, outputs in zip(phase.program.signatures, described, strict=True)
        ]
        steps = phase.plan.step_signature[~backward.plan.passed[p]].tolist()
        self.arena = [kind for s in steps for kind in kinds[s]]  # of each read

    @functools.cached_property
    def layout(self) -> Layout:
        """What forward read and wrote: from its last run, where memory hasn't moved since."""
        return self._phase.layout or lay_out(self._backward.run, self._phase)

    @functools.cached_property
    def pieces(self) -> list[tuple[list[Kept], list[torch.Tensor]]]:
        """What forward kept, a step."""
        return self._phase.pieces or split_kept(self._backward.run, self._phase)

    @functools.cached_property
    def extra(self) -> list[list[torch.Tensor]]:
        """What is made for the gradients of parameters, a step."""
        return split_extra(self._backward.run, self._phase)

    @functools.cached_property
    def written(self) -> list[torch.Tensor]:
        """The blocks that gradients of what was read go to."""
        given, p = self._backward.plan, self._p
        return split_blocks(
            self._backward.arenas, given.write_arena[p], given.write_start[p], given.write_rows[p]
        )

    @functools.cached_property
    def _indices(self) -> dict[torch.device, tuple[dict[int, torch.Tensor], torch.Tensor]]:
        """By device the indices of each read that has some, and all bags: each in one copy."""
        return {}

    def read(self, i: int, n: int) -> torch.Tensor | None:
        """Read i, of n rows: a view, rows by an index, a sum over bags, or nothing."""
        plan, p = self._backward.plan, self._p
        kind, start, stop = int(plan.read_kind[p][i]), int(plan.read_start[p][i]), int(plan.read_stop[p][i])
        if kind == NOTHING:
            return None
        arena = self._backward.arenas[self.arena[i]]
        if kind == GRADIENT_VIEW:
            return arena[start:stop]
        found = self._indices.get(arena.device)
        if found is None:
            pieces, bags = self._split_indices(arena.device), to_device(plan.bags, arena.device)
            found = self._indices[arena.device] = pieces, bags
        index, bags = found[0][i], found[1]
        if kind == GRADIENT_SUM:
            bag = int(plan.bag[p][i])
            return sum_bags(arena, index, bags[bag : bag + n])
        return torch.index_select(arena, 0, index)

    def _split_indices(self, device: torch.device) -> dict[int, torch.Tensor]:
        """The indices of each read that has some: they are one after another."""
        plan, p = self._backward.plan, self._p
        reads = np.flatnonzero(plan.read_kind[p] >= GRADIENT_INDEX)
        sizes = (plan.read_stop[p][reads] - plan.read_start[p][reads]).tolist()
        pieces = split(to_device(plan.indices, device), int(plan.read_start[p][reads[0]]), sizes)
        return dict(zip(reads.tolist(), pieces, strict=True))


def _offsets_of(
    choices: Sequence[tuple[int, ...]], step_signature: np.ndarray, skip: np.ndarray
) -> np.ndarray:
    """Where the pairs of each step begin among all pairs; a skipped step has none."""
    counts = np.array([len(c) for c in choices], dtype=np.int64)[step_signature]
    return offsets(np.where(skip, 0, counts))


def sum_bags(rows: torch.Tensor, index: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    """For each bag b, the sum of `rows[index[bags[b] : bags[b + 1]]]`; deterministic on every device."""
    flat = torch.view_as_real(rows) if rows.is_complex() else rows
    table = flat.reshape(flat.shape[0], -1)
    if table.shape[1] == 0:
        return rows.new_zeros((len(bags), *rows.shape[1:]))
    summed = torch.embedding_bag(table, index, bags, False, 0)[0].view(len(bags), *flat.shape[1:])
    return torch.view_as_complex(summed) if rows.is_complex() else summed
