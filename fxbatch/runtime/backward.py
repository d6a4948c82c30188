"""Backward of a Run: all phases' steps once, in reverse; parameter gradients once an operation, at the end.

Each step gathers the gradients of its outputs from the rows that their readers wrote (`plan_gradients`),
runs the operation's backward graph, and writes the gradients of what it read into rows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from fxbatch.runtime.forward import lay_out, lay_out_blocks
from fxbatch.runtime.phase import OperationRows, Phase
from fxbatch.runtime.pieces import Kept, is_given, split, split_blocks, split_extra, split_kept
from fxbatch.runtime.run import Run, kernel_modes

Gradients = dict[int, torch.Tensor]  # id of the tensor -> its gradient


class Backward:
    """One backward pass of a run, given the gradients of its results."""

    def __init__(
        self, run: Run, requests: Sequence[np.ndarray], grads: Sequence[torch.Tensor | None]
    ) -> None:
        self.run = run
        given = [
            (int(run.value_type[values[0]]), values, grad)
            for values, grad in zip(requests, grads, strict=True)
            if grad is not None and len(values)
        ]
        self.found: Gradients = {}
        if not given:
            return
        with kernel_modes():
            self.wanted = self._find_wanted(np.concatenate([v for _, v, _ in given]))
            self.described = [self._describe(p, w) for p, w in zip(run.phases, self.wanted, strict=True)]
            self.plan = plan_gradients(
                self.described,
                [(t, v) for t, v, _ in given],
                len(run.arenas),
            )
            self.arenas = self._allocate(self.plan)
            for (t, values, grad), start in zip(given, self.plan.request_start, strict=True):
                self.arenas[t][start : start + len(values)].copy_(grad)
            # Operations that ran, with the gradients that take the place of their extra rows.
            self.ran: dict[CompiledOperation, list[torch.Tensor]] = {}
            for p in range(len(run.phases) - 1, -1, -1):
                self._walk(p)
            self._parameters()
            for buffer in self._buffers:
                buffer.release()

    # -- preparation --------------------------------------------------------------------------------

    def _find_wanted(self, results: np.ndarray) -> list[np.ndarray]:
        wanted: list[np.ndarray] = []
        for phase in reversed(self.run.phases):
            mine = results[results < phase.program.values]
            found = find_wanted(phase.program, phase.needs, mine)
            early = phase.program.inputs[phase.program.inputs < phase.program.known]
            results = np.concatenate([mine[mine < phase.program.known], early])
            wanted.append(found)
        return wanted[::-1]

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
                arena[0].zero_()
            arenas.append(arena)
        return arenas

    # -- the walk -----------------------------------------------------------------------------------

    def _walk(self, p: int) -> None:
        run, phase = self.run, self.run.phases[p]
        described = self.described[p]
        plan = phase.plan
        layout = phase.layout or lay_out(run, phase)
        sources, blocks = layout.sources, layout.blocks
        gather, block = plan.first_gather.tolist(), plan.first_block.tolist()
        signature, rows, at = (x.tolist() for x in (plan.step_signature, plan.step_rows, plan.step_offset))
        skip = self.plan.passed[p]
        reads = _offsets_of(described.grad_outputs, plan.step_signature, skip)
        writes = _offsets_of(described.grad_groups, plan.step_signature, skip)
        passed = skip.tolist()
        read = _Reader(self, p, phase)
        given = self.plan
        written = split_blocks(self.arenas, given.write_arena[p], given.write_start[p], given.write_rows[p])
        pieces = phase.pieces if phase.whole else split_kept(run, phase)  # memory moves between phases
        extra = split_extra(run, phase)
        for k in range(len(plan) - 1, -1, -1):
            if passed[k]:
                continue
            s, n = signature[k], rows[k]
            compiled = phase.compiled[s]
            assert compiled is not None
            if reads[k] == reads[k + 1]:
                for tensor in extra[k]:
                    tensor.zero_()
                continue
            if is_constant(compiled.signature):
                self._give_constants(phase, s, at[k], n, read(reads[k], n))
                continue
            grads = [read(reads[k] + i, n) for i in range(reads[k + 1] - reads[k])]
            self._step(
                phase, k, compiled, n, grads, written[writes[k] : writes[k + 1]],
                sources[gather[k] : gather[k + 1]], blocks[block[k] : block[k + 1]], *pieces[k], extra[k],
            )  # fmt: skip

    def _step(
        self,
        phase: Phase,
        k: int,
        compiled: CompiledOperation,
        n: int,
        grads: list[torch.Tensor | None],
        group_grads: list[torch.Tensor],
        sources: list[tuple[int, torch.Tensor, Any]],
        outs: list[torch.Tensor],
        kept: list[Kept],
        saved: list[torch.Tensor],
        extra: list[torch.Tensor],
    ) -> None:
        self.ran.setdefault(compiled, [])
        filled = [
            torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape) if g is None else g
            for g, t in zip(grads, (outs[j] for j in compiled.grad_outputs), strict=True)
        ]
        if is_given(self.run.rows_of[compiled], n):
            self.ran[compiled] = [filled[i] for i in compiled.extra_given]
            return
        if all(g is None for g in grads):
            for tensor in (*group_grads, *extra):
                tensor.zero_()
            return
        shared = self.run.shared[compiled.signature]
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
        compiled.backward(
            n, filled, sources, outs, kept, saved, shared, wide, extra, self.run.engine.workspace()
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
            results = compiled.parameters(
                rows.rows,
                (*inputs, *shared),
                (None,) * len(compiled.grad_shared),
                self.run.engine.workspace(),
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
                blocks = lay_out_blocks(self.run, phase) if steps else []
                found += [blocks[int(phase.plan.first_block[k]) + index] for k in steps]
            return found[0] if len(found) == 1 else torch.cat(found)
        if kind == "extra" and self.ran[compiled]:
            return self.ran[compiled][index]
        buffer = rows.saved[index] if kind == "saved" else rows.extra[index]
        assert buffer.tensor is not None
        return buffer.tensor[: rows.rows]


class _Reader:
    """Reads the gradient of a block: a view, an index, a sum over bags, or nothing."""

    def __init__(self, backward: Backward, p: int, phase: Phase) -> None:
        plan = backward.plan
        self.arenas = backward.arenas
        self.kind, self.start, self.stop = (
            x[p].tolist() for x in (plan.read_kind, plan.read_start, plan.read_stop)
        )
        self.bag = plan.bag[p].tolist()
        described = backward.described[p].grad_outputs
        self.arena = [
            int(backward.run.type_ids[phase.program.signatures[s].outputs[j]])
            for s in phase.plan.step_signature[~plan.passed[p]].tolist()
            for j in described[s]
        ]
        self.plan = plan
        self.indices: dict[torch.device, dict[int, torch.Tensor]] = {}  # by read, all made at once
        self.bags: dict[torch.device, torch.Tensor] = {}

    def __call__(self, i: int, n: int) -> torch.Tensor | None:
        kind = self.kind[i]
        if kind == NOTHING:
            return None
        arena = self.arenas[self.arena[i]]
        start, stop = self.start[i], self.stop[i]
        if kind == GRADIENT_VIEW:
            return arena[start:stop]
        device = arena.device
        if device not in self.indices:
            self.indices[device] = self._split_indices(device)
            self.bags[device] = to_device(self.plan.bags, device)
        index = self.indices[device][i]
        if kind == GRADIENT_SUM:
            return sum_bags(arena, index, self.bags[device][self.bag[i] : self.bag[i] + n])
        return torch.index_select(arena, 0, index)

    def _split_indices(self, device: torch.device) -> dict[int, torch.Tensor]:
        """The indices of each read that has some: they are one after another."""
        reads = [i for i, kind in enumerate(self.kind) if kind in (GRADIENT_INDEX, GRADIENT_SUM)]
        sizes = [self.stop[i] - self.start[i] for i in reads]
        pieces = split(to_device(self.plan.indices, device), self.start[reads[0]], sizes)
        return dict(zip(reads, pieces, strict=True))


def _offsets_of(
    choices: Sequence[tuple[int, ...]], step_signature: np.ndarray, skip: np.ndarray
) -> list[int]:
    """Where the pairs of each step begin among all pairs; a skipped step has none."""
    counts = np.array([len(c) for c in choices], dtype=np.int64)[step_signature]
    return offsets(np.where(skip, 0, counts)).tolist()


def sum_bags(rows: torch.Tensor, index: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    """For each bag b, the sum of `rows[index[bags[b] : bags[b + 1]]]`; deterministic on every device."""
    flat = torch.view_as_real(rows) if rows.is_complex() else rows
    table = flat.reshape(flat.shape[0], -1)
    if table.shape[1] == 0:
        return rows.new_zeros((len(bags), *rows.shape[1:]))
    summed = torch.embedding_bag(table, index, bags, False, 0)[0].view(len(bags), *flat.shape[1:])
    return torch.view_as_complex(summed) if rows.is_complex() else summed
