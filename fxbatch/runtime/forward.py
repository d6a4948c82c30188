"""Forward of a phase: every step of its plan, each a call of an emitted step function.

execute_forward(run, phase)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fxbatch.codegen.kernel import Workspace
from fxbatch.ir import BROADCAST, INDEX, VIEW
from fxbatch.passes.plan import is_constant
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.constants import fill_constants
from fxbatch.runtime.devices import to_device
from fxbatch.runtime.native_steps import NativeSteps, forward_steps
from fxbatch.runtime.phase import Layout, Phase
from fxbatch.runtime.pieces import split_blocks, split_kept
from fxbatch.runtime.watchers import named_step

if TYPE_CHECKING:
    from fxbatch.runtime.run import Run


def lay_out_sources(run: Run, phase: Phase) -> list[tuple[int, torch.Tensor, Any]]:
    """Per gather of the plan what the step functions take: (kind, arena or rows, indices)."""
    plan = phase.plan
    arena_ids = [run.type_ids[t] for t in plan.arenas]
    arenas = [run.arenas[i].tensor for i in arena_ids]
    kinds = plan.gather_kind.tolist()
    arena_of = plan.gather_arena.tolist()
    sizes = plan.gather_rows[plan.gather_kind == INDEX].tolist()
    pieces: dict[torch.device, Any] = {}
    out: list[tuple[int, torch.Tensor, Any]] = []
    at = 0
    columns = zip(kinds, arena_of, plan.gather_start.tolist(), plan.gather_rows.tolist(), strict=True)
    for kind, a, start, rows in columns:
        arena = arenas[a]
        assert arena is not None
        if kind == INDEX:
            split = pieces.get(arena.device)
            if split is None:
                split = pieces[arena.device] = to_device(plan.indices, arena.device).split(sizes)
            out.append((kind, arena, split[at]))
            at += 1
        elif kind == BROADCAST:
            out.append((kind, arena[start : start + 1], None))
        else:
            out.append((kind, arena[start : start + rows], None))
    return out


def lay_out_blocks(run: Run, phase: Phase) -> list[torch.Tensor]:
    """Per output block of the plan its rows in the arena."""
    plan = phase.plan
    arenas = [run.arenas[run.type_ids[t]].tensor for t in plan.arenas]
    rows = plan.step_rows.repeat(plan.first_block[1:] - plan.first_block[:-1])
    return split_blocks(arenas, plan.block_arena, plan.block_start, rows)


def lay_out(run: Run, phase: Phase) -> Layout:
    """Where the steps of a phase read and write, the memory being where it is now."""
    return Layout(lay_out_sources(run, phase), lay_out_blocks(run, phase))


def execute_forward(run: Run, phase: Phase) -> None:
    """Run all steps of a phase: stretches of native steps in C, the others one by one."""
    workspace = run.workspace()
    workspace.enter_run(run.shared)
    if not run.native or run.take_slab(phase) is None:
        reserve_forward(run, phase)
    native = forward_steps(run, phase, workspace) if run.native else None
    if native is None:
        run_steps(run, phase, lay_out_steps(run, phase), workspace, range(len(phase.plan)))
    else:
        _run_stretches(run, phase, workspace, native)
    if not phase.whole:
        phase.layout, phase.pieces = None, []  # the next phase moves the memory


def _run_stretches(run: Run, phase: Phase, workspace: Workspace, native: NativeSteps) -> None:
    k, steps = 0, len(phase.plan)
    while k < steps:
        stop = native.forward(k, steps) if native.begins_at(k) else k
        run.launches += stop - k
        if stop < steps:
            _run_one(run, phase, workspace, stop)
        k = stop + 1


def _run_one(run: Run, phase: Phase, workspace: Workspace, k: int) -> None:
    """A step that has no native program, or that its program can't run."""
    s = int(phase.plan.step_signature[k])
    compiled = phase.compiled[s]
    assert compiled is not None
    if is_constant(compiled.signature):
        out = block_rows(run, phase, k, 0)
        _fill(run, phase, compiled, s, out, int(phase.plan.step_offset[k]))
        return
    run_steps(run, phase, lay_out_steps(run, phase), workspace, range(k, k + 1))


def block_rows(run: Run, phase: Phase, step: int, index: int) -> torch.Tensor:
    """The rows of one output of a step."""
    plan = phase.plan
    block = int(plan.first_block[step]) + index
    arena = run.arenas[run.type_ids[plan.arenas[int(plan.block_arena[block])]]].tensor
    assert arena is not None
    return arena.narrow(0, int(plan.block_start[block]), int(plan.step_rows[step]))


def _fill(
    run: Run, phase: Phase, compiled: CompiledOperation, s: int, out: torch.Tensor, offset: int
) -> None:
    payload = phase.program.constants[s]
    first = offset - (run.rows_of[compiled].rows - len(payload))
    fill_constants(out, compiled.signature, payload, first, len(out), phase.plan.constant_order[s])


def reserve_forward(run: Run, phase: Phase) -> None:
    """Room for the values of a phase, and for what its operations keep."""
    plan = phase.plan
    for kind, rows in zip(plan.arenas, plan.capacity.tolist(), strict=True):
        if rows:  # the table knows types of other minibatches too
            run.arenas[run.type_ids[kind]].reserve(rows)
    phase.layout, phase.pieces = None, []
    if phase.whole:
        _read_in_place(run, phase)
    _reserve_rows(run, phase)


def lay_out_steps(run: Run, phase: Phase) -> Layout:
    """What the step functions take, laid out once a phase and only where one of them runs."""
    if phase.layout is None:
        phase.layout = lay_out(run, phase)
        phase.pieces = split_kept(run, phase)
    return phase.layout


def run_steps(run: Run, phase: Phase, layout: Layout, workspace: Workspace, steps: range) -> None:
    """Run some consecutive steps of a phase."""
    plan, sources, blocks = phase.plan, layout.sources, layout.blocks
    gather, block = plan.first_gather.tolist(), plan.first_block.tolist()
    signatures, sizes, offsets = (
        x[steps.start : steps.stop].tolist() for x in (plan.step_signature, plan.step_rows, plan.step_offset)
    )
    for k, s, n, at in zip(steps, signatures, sizes, offsets, strict=True):
        compiled = phase.compiled[s]
        assert compiled is not None
        outs = blocks[block[k] : block[k + 1]]
        if compiled.forward is not None:
            rows = run.rows_of[compiled]
            run.launches += 1
            kept, saved = phase.pieces[k]
            with named_step(compiled.signature.name, n, "forward"):
                compiled.forward(
                    n,
                    sources[gather[k] : gather[k + 1]],
                    outs,
                    kept,
                    saved,
                    run.shared[compiled.signature],
                    rows.scratch,
                    workspace,
                )
        elif is_constant(compiled.signature):
            _fill(run, phase, compiled, s, outs[0], at)
        else:
            run.launches += n
            with named_step(compiled.signature.name, n, "forward"):
                _run_call_by_call(run, phase, k, compiled, sources[gather[k] : gather[k + 1]], outs)


def _read_in_place(run: Run, phase: Phase) -> None:
    """Operations with one step whose kept groups are views: all their rows are together already, no copy."""
    if not any(c is not None and c.kept_groups for c in phase.compiled):
        return
    plan = phase.plan
    signatures = plan.step_signature.tolist()
    for s, compiled in enumerate(phase.compiled):
        if compiled is None or not compiled.kept_groups or signatures.count(s) != 1:
            continue
        k = signatures.index(s)
        rows, n = run.operation_rows(compiled), int(plan.step_rows[k])
        for position, group in enumerate(compiled.kept_groups):
            gather = int(plan.first_gather[k]) + group
            if plan.gather_kind[gather] == VIEW:
                arena = run.arenas[run.type_ids[plan.arenas[int(plan.gather_arena[gather])]]].tensor
                assert arena is not None
                view = arena.narrow(0, int(plan.gather_start[gather]), int(plan.gather_rows[gather]))
                size = rows.members(position)
                rows.in_place[position] = view if size == 1 else view.view(n, size, *view.shape[1:])


def _reserve_rows(run: Run, phase: Phase) -> None:
    """Room in the buffers of each operation for the rows of this phase."""
    counts = np.bincount(
        phase.plan.step_signature, weights=phase.plan.step_rows, minlength=len(phase.compiled)
    ).astype(np.int64)
    for s, compiled in enumerate(phase.compiled):
        if compiled is None:
            continue
        rows = run.operation_rows(compiled)
        rows.rows += int(counts[s])
        for position, buffer in enumerate(rows.kept):
            if position not in rows.in_place:
                buffer.reserve(rows.rows * rows.members(position))
        for buffer in rows.saved:
            buffer.reserve(rows.rows)


def source_rows(source: tuple[int, torch.Tensor, Any], n: int) -> torch.Tensor:
    """The gathered rows of one source as a tensor."""
    kind, a, b = source
    if kind == INDEX:
        return torch.index_select(a, 0, b)
    return a.expand(n, *a.shape[1:]) if kind == BROADCAST else a


def _run_call_by_call(
    run: Run,
    phase: Phase,
    step: int,
    compiled: CompiledOperation,
    sources: list[tuple[int, torch.Tensor, Any]],
    outs: list[torch.Tensor],
) -> None:
    assert compiled.unbatched is not None
    n = int(phase.plan.step_rows[step])
    inputs = [source_rows(source, n).clone() for source in sources]
    results, tape = compiled.unbatched.forward(
        inputs,
        run.shared[compiled.signature],
        input_needs=compiled.needs[0],
        shared_needs=compiled.needs[1],
        n=n,
    )
    for out, result in zip(outs, results, strict=True):
        out.copy_(result)
    if compiled.needs_gradient:
        phase.tapes[step] = tape
