"""Run: the state of one minibatch. Programs (phases) go in, values live in arenas, results come out.

A Run is the `execution` that the recorder talks to: `run(program)` executes pending calls, `read(values)`
gives real tensors for values that the user's code asked for. Arenas grow from phase to phase; a value keeps
its row, so that backward can walk the steps of all phases once, in reverse.

    >>> run = Run(engine, grad=True)                       # doctest: +SKIP
    >>> run.run(program); run.read([3])                     # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fxbatch.codegen.looped import Scratch, group_type
from fxbatch.ir import BROADCAST, INDEX, VIEW, Plan, Program, Schedule, Signature, TensorType
from fxbatch.passes.find_needs import Needs, find_needs, flat_outputs
from fxbatch.passes.plan_arenas import is_constant
from fxbatch.runtime.buffers import Buffer
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.constants import fill_constants

if TYPE_CHECKING:
    from fxbatch.runtime.engine import Engine

Renumber = Callable[[np.ndarray], np.ndarray]


@dataclass(eq=False)
class Phase:
    """What one phase ran; backward walks these in reverse."""

    program: Program
    schedule: Schedule
    plan: Plan
    needs: Needs
    compiled: list[CompiledOperation | None]  # one a signature, None where the program has no call of it
    whole: bool = False  # the only phase of its minibatch
    tapes: dict[int, Any] = field(default_factory=dict)  # step -> tape of a call-by-call operation


class OperationRows:
    """The rows of one compiled operation over all steps of a run: what its backward needs."""

    __slots__ = ("compiled", "extra", "in_place", "kept", "rows", "saved", "scratch")

    def __init__(self, run: Run, compiled: CompiledOperation) -> None:
        pool = run.engine.pool
        self.compiled = compiled
        self.rows = 0
        self.in_place: dict[int, torch.Tensor] = {}  # kept groups that are read where they are, all rows
        graphs = compiled.graphs
        kinds = [] if graphs is None else [group_type(graphs, g) for g in compiled.kept_groups]
        self.kept = [Buffer(pool, kind) for kind in kinds]
        self.saved = [Buffer(pool, kind) for kind in compiled.saved_types]
        self.extra = [Buffer(pool, kind) for kind in compiled.extra_types]
        self.scratch = run.engine.scratch_of(compiled)

    def members(self, position: int) -> int:
        """How many inputs the kept group at `position` has."""
        return len(self.compiled.layout.groups[self.compiled.kept_groups[position]])

    def kept_rows(self, position: int, start: int, stop: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(flat rows, rows as the operation reads them) of a kept group, calls start to stop; no flat rows
        where the group is read in place."""
        if position in self.in_place:
            return None, self.in_place[position][start:stop]
        tensor = self.kept[position].tensor
        assert tensor is not None
        size = self.members(position)
        flat = tensor[start * size : stop * size]
        return flat, flat if size == 1 else flat.view(stop - start, size, *tensor.shape[1:])

    def release(self) -> None:
        for buffer in (*self.kept, *self.saved, *self.extra):
            buffer.release()


class Run:
    """One minibatch: arenas, the phases run so far, and where each value is."""

    def __init__(self, engine: Engine, *, grad: bool) -> None:
        self.engine = engine
        self.grad = grad
        self.type_ids: dict[TensorType, int] = {}
        self.arenas: list[Buffer] = []
        self.phases: list[Phase] = []
        self.rows_of: dict[CompiledOperation, OperationRows] = {}
        self.shared: dict[Signature, list[torch.Tensor]] = {}
        self.value_row = np.zeros(0, dtype=np.int64)
        self.value_type = np.zeros(0, dtype=np.int64)
        self.value_needs = np.zeros(0, dtype=bool)
        self.released = False
        self.launches = 0
        self.lasting = False  # whether more may be run after a backward pass (lazy use)

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give all memory back to the pool; values can't be read any more."""
        if self.released:
            return
        self.released = True
        for buffer in self.arenas:
            buffer.release()
        for rows in self.rows_of.values():
            rows.release()
        self.rows_of.clear()
        self.phases.clear()

    # -- types and shared operands ------------------------------------------------------------------

    def type_id(self, kind: TensorType) -> int:
        found = self.type_ids.get(kind)
        if found is None:
            found = self.type_ids[kind] = len(self.arenas)
            self.arenas.append(Buffer(self.engine.pool, kind))
        return found

    def shared_of(self, signature: Signature) -> list[torch.Tensor]:
        """The shared operands of a signature as they are in this run."""
        found = self.shared.get(signature)
        if found is None:
            found = self.shared[signature] = [operand.resolve() for operand in signature.shared]
        return found

    # -- running a phase ----------------------------------------------------------------------------

    def run(self, program: Program) -> None:
        """Execute the calls of a program; its values are numbered on from those of earlier phases."""
        if len(program):
            self.execute(program, self.engine.schedule(program), last=False)

    def finish(self, program: Program, values: np.ndarray) -> Renumber:
        """Execute the last calls; only `values` (= program.outputs) are read any more, so the program is
        rewritten first. Returns the map from the recorder's value ids to this run's."""
        if not len(program):
            return lambda ids: ids
        program, schedule = self.engine.prepare(program)
        if len(program):
            self.execute(program, schedule)
        return renumbering(values, program.outputs)

    def execute(self, program: Program, schedule: Schedule, *, last: bool = True) -> None:
        """Run a scheduled program."""
        with kernel_modes():
            self._execute(program, schedule, last)

    def _execute(self, program: Program, schedule: Schedule, last: bool) -> None:
        self.launch(self.plan_phase(program, schedule, last=last))

    def plan_phase(self, program: Program, schedule: Schedule, *, last: bool) -> Phase:
        """Everything of a phase but the running: operations compiled, places and gathers planned.

        last: whether no phase comes after it.
        """
        needs, compiled = self._compile(program)
        types = self.type_numbers(program)
        used = np.array([self.arenas[t].used for t in types.tolist()], dtype=np.int64)
        before = np.array([0 if c is None else self.operation_rows(c).rows for c in compiled], dtype=np.int64)
        known = self.value_row[: program.known]
        plan = self.engine.plan(program, schedule, compiled, known, used, before)
        return Phase(program, schedule, plan, needs, compiled, last and not self.phases)

    def launch(self, phase: Phase) -> None:
        """Run all steps of a planned phase."""
        self.phases.append(phase)
        execute_forward(self, phase)
        self._remember(phase.program, phase.plan, phase.needs)

    def type_numbers(self, program: Program) -> np.ndarray:
        """int64 [program.types]: the number of each type in this run."""
        return np.array([self.type_id(t) for t in program.types], dtype=np.int64)

    def operation_rows(self, compiled: CompiledOperation) -> OperationRows:
        found = self.rows_of.get(compiled)
        if found is None:
            found = self.rows_of[compiled] = OperationRows(self, compiled)
        return found

    def _compile(self, program: Program) -> tuple[Needs, list[CompiledOperation | None]]:
        present = np.zeros(len(program.signatures), dtype=bool)
        present[program.sig] = True
        shared_needs: list[tuple[bool, ...]] = []
        for s, signature in enumerate(program.signatures):
            if self.grad and present[s] and signature.modes.grad:
                shared_needs.append(
                    tuple(t.requires_grad and _can_differentiate(t) for t in self.shared_of(signature))
                )
            else:
                shared_needs.append((False,) * len(signature.shared))
        constant_needs = {
            s: self.grad and bool(differentiable_constants(program, s)) for s in program.constants
        }
        needs = find_needs(
            program,
            [any(x) for x in shared_needs],
            constant_needs,
            known_needs=self.value_needs[: program.known] if self.grad else None,
        )
        compiled: list[CompiledOperation | None] = []
        for s, signature in enumerate(program.signatures):
            if not present[s]:
                compiled.append(None)
                continue
            wanted = (needs.inputs[s], shared_needs[s])
            compiled.append(self.engine.compiled(signature, wanted, self.shared_of(signature), self.grad))
        return needs, compiled

    def _remember(self, program: Program, plan: Plan, needs: Needs) -> None:
        types = self.type_numbers(program)
        self.value_row = plan.row_of_value
        made = program.type_of_value[program.known :]
        self.value_type = np.concatenate([self.value_type[: program.known], types[made]])
        carried = needs.outputs[flat_outputs(program)]
        self.value_needs = np.concatenate([self.value_needs[: program.known], carried])

    # -- reading values -----------------------------------------------------------------------------

    def rows(self, values: np.ndarray) -> torch.Tensor:
        """A new tensor [len(values), *shape] of values of one type."""
        kinds = self.value_type[values]
        assert len(values) and (kinds == kinds[0]).all(), "values of one tensor type"
        arena = self.arenas[int(kinds[0])].tensor
        assert arena is not None
        rows = self.value_row[values]
        if (np.diff(rows) == 1).all():
            return arena[int(rows[0]) : int(rows[0]) + len(rows)].clone()
        return torch.index_select(arena, 0, torch.from_numpy(rows).to(arena.device))

    def read(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real, detached tensors on the CPU side: one transfer a type and call."""
        wanted = np.asarray(values, dtype=np.int64)
        out: list[torch.Tensor | None] = [None] * len(wanted)
        kinds = self.value_type[wanted]
        for kind in np.unique(kinds).tolist():
            places = np.flatnonzero(kinds == kind)
            rows = self.rows(wanted[places])
            for place, row in zip(places.tolist(), rows.unbind(0), strict=True):
                out[place] = row
        return [x for x in out if x is not None]


def renumbering(before: np.ndarray, after: np.ndarray) -> Renumber:
    """The map that takes each of the ids `before` to the id at its place in `after`."""
    order = np.argsort(before)
    ordered, mapped = before[order], after[order]
    return lambda ids: mapped[np.searchsorted(ordered, ids)]


@contextmanager
def kernel_modes() -> Iterator[None]:
    """Kernels run without autograd; casts are in the operation graphs already, so without autocast too."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def differentiable_constants(program: Program, s: int) -> list[torch.Tensor]:
    """The tensors of a constant signature that require gradients."""
    signature = program.signatures[s]
    if signature.operation.kind != "constant" or not signature.outputs[0].differentiable:
        return []
    return [t for t in program.constants[s] if t.requires_grad]


def _can_differentiate(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def move_indices(indices: np.ndarray, device: torch.device) -> torch.Tensor:
    """All indices of a plan on a device, in one copy (pinned and non-blocking for CUDA)."""
    tensor = torch.from_numpy(indices)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


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
                split = pieces[arena.device] = move_indices(plan.indices, arena.device).split(sizes)
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
    sizes = np.repeat(plan.step_rows, np.diff(plan.first_block))
    out: list[torch.Tensor] = [None] * len(sizes)  # type: ignore[list-item]  # each is filled below
    for a, kind in enumerate(plan.arenas):
        mine = np.flatnonzero(plan.block_arena == a)
        if not len(mine):
            continue
        tensor = run.arenas[run.type_ids[kind]].tensor
        assert tensor is not None
        first, last = int(plan.block_start[mine[0]]), int(plan.capacity[a])
        for b, view in zip(mine.tolist(), tensor[first:last].split(sizes[mine].tolist()), strict=True):
            out[b] = view
    return out


def execute_forward(run: Run, phase: Phase) -> None:
    """Run all steps of a phase."""
    plan = phase.plan
    for a, kind in enumerate(plan.arenas):
        run.arenas[run.type_ids[kind]].reserve(int(plan.capacity[a]))
    sources = lay_out_sources(run, phase)
    blocks = lay_out_blocks(run, phase)
    if phase.whole:
        _read_in_place(run, phase, sources)
    _reserve_rows(run, phase)
    workspace = run.engine.workspace()
    gather, block = plan.first_gather.tolist(), plan.first_block.tolist()
    columns = zip(
        plan.step_signature.tolist(), plan.step_rows.tolist(), plan.step_offset.tolist(), strict=True
    )
    for k, (s, n, at) in enumerate(columns):
        compiled = phase.compiled[s]
        assert compiled is not None
        outs = blocks[block[k] : block[k + 1]]
        if compiled.forward is not None:
            rows = run.rows_of[compiled]
            run.launches += 1
            kept = [rows.kept_rows(i, at, at + n) for i in range(len(rows.kept))]
            saved = [b.tensor[at : at + n] for b in rows.saved]  # type: ignore[index]  # reserved above
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
            payload = phase.program.constants[s]
            first = at - (run.rows_of[compiled].rows - len(payload))
            fill_constants(outs[0], compiled.signature, payload, first, n, plan.constant_order[s])
        else:
            run.launches += n
            _run_call_by_call(run, phase, k, compiled, sources[gather[k] : gather[k + 1]], outs)


def _read_in_place(run: Run, phase: Phase, sources: list[tuple[int, torch.Tensor, Any]]) -> None:
    """Operations with one step whose kept groups are views: all their rows are together already, no copy."""
    signatures, steps = np.unique(phase.plan.step_signature, return_counts=True)
    alone = set(signatures[steps == 1].tolist())
    for k, s in enumerate(phase.plan.step_signature.tolist()):
        compiled = phase.compiled[s]
        if s not in alone or compiled is None or not compiled.kept_groups:
            continue
        rows, n = run.rows_of[compiled], int(phase.plan.step_rows[k])
        for position, group in enumerate(compiled.kept_groups):
            kind, view, _ = sources[int(phase.plan.first_gather[k]) + group]
            if kind == VIEW:
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
        rows = run.rows_of[compiled]
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


__all__ = ["OperationRows", "Phase", "Run", "Scratch", "execute_forward", "lay_out_sources", "source_rows"]
