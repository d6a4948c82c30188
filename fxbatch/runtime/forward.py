"""Forward of a phase: every step of its plan, each a call of an emitted step function or a native program.

launches = execute_forward(phase, memory, workspace, native=True)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.step_functions import Source
from fxbatch.ir import BROADCAST, INDEX
from fxbatch.passes.plan import is_constant
from fxbatch.runtime.constants import fill_constants
from fxbatch.runtime.memory import Memory
from fxbatch.runtime.native_stretches import forward_steps
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.phase import Phase
from fxbatch.runtime.watchers import named_step


def execute_forward(phase: Phase, memory: Memory, workspace: Workspace, *, native: bool) -> int:
    """Take a phase's memory and run all its steps: stretches of native ones in C, the others one by one. How many
    kernels were launched."""
    workspace.enter_run(memory.shared)
    phase.views = None
    if phase.found is not None:
        memory.take(phase.operations.arrays, phase.found)
    launches, k, steps = 0, 0, len(phase.plan)
    found = forward_steps(phase, memory, workspace) if native else None
    if found is None:
        launches = run_steps(phase, memory, workspace, range(steps))
    else:
        while k < steps:
            stop = found.forward(k, steps) if found.begins_at(k) else k
            launches += stop - k
            if stop < steps:
                launches += _run_one(phase, memory, workspace, stop)
            k = stop + 1
    if not phase.whole:
        phase.views = None  # the next phase moves the memory
    return launches


def _run_one(phase: Phase, memory: Memory, workspace: Workspace, k: int) -> int:
    """A step that has no native program, or that its program can't run."""
    if is_constant(phase.operation(k).signature):
        _fill(phase, memory, k, native=True)
        return 0
    return run_steps(phase, memory, workspace, range(k, k + 1))


def _fill(phase: Phase, memory: Memory, k: int, *, native: bool) -> None:
    """Put constants into their rows."""
    plan = phase.plan
    s = plan.step_signature.item(k)
    signature, payload = phase.program.signatures[s], phase.program.constants[s]
    first, n = plan.step_offset.item(k), plan.step_rows.item(k)
    if not phase.whole:  # rows are counted over all phases
        first -= memory.calls(phase.operation(k)) - len(payload)
    place = (
        memory.row_place(signature.outputs[0], plan.block_start.item(plan.first_block.item(k)))
        if native
        else 0
    )
    rows = functools.partial(phase.rows_of_output, memory, k, 0)
    fill_constants(rows, place, signature, payload, first, n, plan.constant_order[s])


def run_steps(phase: Phase, memory: Memory, workspace: Workspace, steps: range) -> int:
    """Run some consecutive steps of a phase in Python."""
    launches, views = 0, phase.views_in(memory)
    phase.views = views
    for k in steps:
        compiled, n = phase.operation(k), phase.plan.step_rows.item(k)
        sources, outs, (kept, saved) = views[k]
        if compiled.forward is not None:
            launches += 1
            shared = memory.shared[compiled.signature]
            with named_step(compiled.signature.name, n, "forward"):
                compiled.forward(n, sources, outs, kept, saved, shared, workspace)
        elif is_constant(compiled.signature):
            _fill(phase, memory, k, native=False)
        else:
            launches += n
            with named_step(compiled.signature.name, n, "forward"):
                _run_call_by_call(phase, k, compiled, memory.shared[compiled.signature], sources, outs)
    return launches


def source_rows(source: Source, n: int) -> torch.Tensor:
    """The gathered rows of one source as a tensor."""
    kind, a, b = source
    if kind == INDEX:
        return torch.index_select(a, 0, b)
    return a.expand(n, *a.shape[1:]) if kind == BROADCAST else a


def _run_call_by_call(
    phase: Phase,
    step: int,
    compiled: CompiledOperation,
    shared: Sequence[torch.Tensor],
    sources: Sequence[Source],
    outs: Sequence[torch.Tensor],
) -> None:
    assert compiled.unbatched is not None
    n = int(phase.plan.step_rows[step])
    inputs = [source_rows(source, n) for source in sources]
    if compiled.unbatched.keeps_rows(compiled.needs_gradient):
        inputs = [x if source[0] == INDEX else x.clone() for x, source in zip(inputs, sources, strict=True)]
    _, tape = compiled.unbatched.forward(
        inputs, shared, input_needs=compiled.needs[0], shared_needs=compiled.needs[1], n=n, outs=outs
    )
    if compiled.needs_gradient:
        phase.tapes[step] = tape
