"""Run: the state of one minibatch. Programs (phases) go in, values live in arenas, results come out.

A Run is the `execution` that the recorder talks to: `run(program)` executes pending calls, `read(values)`
gives real tensors for values that the user's code asked for. Arenas grow from phase to phase; a value keeps
its row, so that backward can walk the steps of all phases once, in reverse.

    >>> run = Run(engine, grad=True)                       # doctest: +SKIP
    >>> run.run(program); run.read([3])                     # doctest: +SKIP
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fxbatch.ir import Plan, Program, Schedule, Signature, SignatureColumns, TensorType
from fxbatch.passes.signature_graph import (
    Needs,
    count_values,
    early_needs,
    find_needs,
    spread_outputs,
    survey,
)
from fxbatch.runtime.buffers import Buffer
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.devices import to_device
from fxbatch.runtime.family import Family, Operands, Template
from fxbatch.runtime.forward import execute_forward
from fxbatch.runtime.phase import OperationRows, Phase
from fxbatch.runtime.slab import Slab
from fxbatch.runtime.watchers import is_watched, shown_modes
from fxbatch.torch_private import any_autocast, set_grad_enabled

if TYPE_CHECKING:
    from fxbatch.codegen.kernel import Workspace
    from fxbatch.runtime.engine import Engine

Renumber = Callable[[np.ndarray], np.ndarray]


class GrowingArray:
    """Numbers of values, phase after phase, without copying those of the phases before."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._room = np.empty(0, dtype=dtype)

    def room(self, known: np.ndarray, stop: int) -> np.ndarray:
        """An array of `stop` items at least that begins with `known`: what it had before, or other numbers."""
        if stop > len(self._room):
            self._room = np.empty(max(stop, 2 * len(self._room)), dtype=self._room.dtype)
        if len(known) and known.base is not self._room:
            self._room[: len(known)] = known
        return self._room


class Run:
    """One minibatch: arenas, the phases run so far, and where each value is."""

    released = True  # until it is made: a fault in between leaves nothing to release

    def __init__(self, engine: Engine, *, grad: bool) -> None:
        self.engine = engine
        engine.pool.begin()
        self.grad = grad
        self.type_ids: dict[TensorType, int] = {}
        self.arenas: list[Buffer] = []
        self.phases: list[Phase] = []
        self.rows_of: dict[CompiledOperation, OperationRows] = {}
        self.slab: Slab | None = None  # all memory of a run of one phase, where it is one piece
        self.shared: dict[Signature, list[torch.Tensor]] = {}
        self.value_row = np.zeros(0, dtype=np.int64)
        self.value_type = np.zeros(0, dtype=np.int64)
        self.value_needs = np.zeros(0, dtype=bool)
        self._rows, self._types = GrowingArray(np.int64), GrowingArray(np.int64)
        self._needs = GrowingArray(np.bool_)
        self._type_numbers: dict[SignatureColumns, np.ndarray] = {}
        self.launches = 0
        self._operands: Operands = {}  # what shared operands are in this run
        self.watched = is_watched()  # by a dispatch mode, which sees the calls of ATen
        self.native = engine.options.native and not self.watched
        self.lasting = False  # whether more may be run after a backward pass (lazy use)
        self.released = False

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
        if self.slab is not None:
            self.slab.release()
        self.slab = None
        self.arenas, self.rows_of = [], {}
        for phase in self.phases:
            phase.pieces, phase.layout = [], None
        self.phases.clear()

    def workspace(self) -> Workspace:
        """Where the kernels' intermediates are."""
        return self.engine.workspace()

    # -- types and shared operands ------------------------------------------------------------------

    def type_id(self, kind: TensorType) -> int:
        found = self.type_ids.get(kind)
        if found is None:
            found = self.type_ids[kind] = len(self.arenas)
            self.arenas.append(Buffer(self.engine.pool, kind))
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
        template = self._template(program)
        operations = template.operations
        types = self.type_numbers(program)
        whole = last and not self.phases
        if whole:
            planned = self.engine.plan(program, schedule, operations, reuse=not self.grad)
        else:
            used = np.array([self.arenas[t].used for t in types.tolist()], dtype=np.int64)
            rows = [None if c is None else self.operation_rows(c) for c in operations.compiled]
            before = np.array([0 if r is None else r.rows for r in rows], dtype=np.int64)
            known = self.value_row[: program.known]
            into = self._rows.room(known, count_values(program))
            planned = self.engine.plan(
                program, schedule, operations, known, used, before, whole=False, into=into
            )
        schedule, plan, slab = planned
        return Phase(program, schedule, plan, template.needs, operations, whole, slab)

    def launch(self, phase: Phase) -> None:
        """Run all steps of a planned phase."""
        self.phases.append(phase)
        with shown_modes() if self.watched else nullcontext():
            execute_forward(self, phase)
        self._remember(phase.program, phase.plan, phase.needs)

    def take_slab(self, phase: Phase) -> Slab | None:
        """All memory of the run's only phase in one piece; None where it isn't planned so."""
        plan, kinds = phase.slab, phase.operations.memory
        if plan is None or kinds is None or len(self.arenas) != kinds.arenas:
            return None
        slab = self.slab = Slab(self.engine.pool, kinds, plan)
        for a, arena in enumerate(self.arenas):
            arena.lend(functools.partial(slab.tensor, a), plan.rows[a])
        for s, compiled in enumerate(phase.compiled):
            if compiled is not None:
                rows = self.rows_of[compiled] = OperationRows(self, compiled, slab, kinds.first[s])
                rows.rows = plan.counts[s]
        return slab

    def type_numbers(self, program: Program) -> np.ndarray:
        """int64 [program.types]: the number of each type in this run."""
        found = self._type_numbers.get(program.columns)
        if found is None:
            found = np.array([self.type_id(t) for t in program.types], dtype=np.int64)
            self._type_numbers[program.columns] = found
        return found

    def operation_rows(self, compiled: CompiledOperation) -> OperationRows:
        found = self.rows_of.get(compiled)
        if found is None:
            found = self.rows_of[compiled] = OperationRows(self, compiled)
        return found

    def _template(self, program: Program) -> Template:
        """Who needs gradients in a program, and its compiled operations; the shared operands are noted."""
        family = self.engine.family(program, self.grad)
        tensors = family.resolve(self._operands)
        self.shared.update(family.shared(tensors))
        constants = tuple(s for s in program.constants if self.grad and differentiable_constants(program, s))
        known_needs = self.value_needs[: program.known] if self.grad else None
        templates = family.templates(tensors)
        key = constants, early_needs(program, known_needs)
        found = templates.get(key)
        if found is None or not family.settled:
            found = self._make_template(program, family, constants, known_needs)
            if family.settled:
                templates[key] = found
        return found

    def _make_template(
        self,
        program: Program,
        family: Family,
        constants: tuple[int, ...],
        known_needs: np.ndarray | None,
    ) -> Template:
        shared_needs: list[tuple[bool, ...]] = []
        for s, signature in enumerate(program.signatures):
            if self.grad and family.present[s] and signature.modes.grad:
                shared_needs.append(tuple(t.requires_grad for t in self.shared[signature]))
            else:
                shared_needs.append((False,) * len(signature.shared))
        needs = find_needs(
            program,
            [any(x) for x in shared_needs],
            dict.fromkeys(constants, True),
            known_needs=known_needs,
        )
        late = self.engine.late(program.signatures, survey(program).counts.tolist())
        family.settled = not late
        compiled = tuple(
            self.engine.compiled(
                signature,
                (needs.inputs[s], shared_needs[s]),
                self.shared[signature],
                self.grad,
                late=s in late,
            )
            if family.present[s]
            else None
            for s, signature in enumerate(program.signatures)
        )
        return Template(needs, self.engine.operation_set(program, compiled))

    def _remember(self, program: Program, plan: Plan, needs: Needs) -> None:
        types = self.type_numbers(program)[program.columns.output_types]
        values = len(plan.row_of_value)
        type_of = self._types.room(self.value_type[: program.known], values)
        needed = self._needs.room(self.value_needs[: program.known], values)
        spread_outputs(program, types, needs.outputs, type_of, needed)
        self.value_row, self.value_type, self.value_needs = (
            plan.row_of_value,
            type_of[:values],
            needed[:values],
        )

    # -- reading values -----------------------------------------------------------------------------

    def rows(self, values: np.ndarray) -> torch.Tensor:
        """A new tensor [len(values), *shape] of values of one type."""
        kinds = self.value_type[values]
        assert len(values) and (kinds == kinds[0]).all(), "values of one tensor type"
        arena = self.arenas[int(kinds[0])].tensor
        assert arena is not None
        rows = self.value_row[values]
        if len(rows) == 1:
            return arena.narrow(0, int(rows[0]), 1).clone()
        if (rows[1:] - rows[:-1] == 1).all():
            return arena[int(rows[0]) : int(rows[0]) + len(rows)].clone()
        return torch.index_select(arena, 0, to_device(rows, arena.device))

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

    def numbers(self, values: Sequence[int]) -> list[Any]:
        """The values as Python numbers in nested lists: one transfer a type and call."""
        wanted = np.asarray(values, dtype=np.int64)
        kinds = self.value_type[wanted]
        if (kinds == kinds[:1]).all():
            found: list[Any] = self.rows(wanted).tolist() if len(wanted) else []
            return found
        out: list[Any] = [None] * len(wanted)
        for kind in np.unique(kinds).tolist():
            places = np.flatnonzero(kinds == kind)
            for place, row in zip(places.tolist(), self.rows(wanted[places]).tolist(), strict=True):
                out[place] = row
        return out


def renumbering(before: np.ndarray, after: np.ndarray) -> Renumber:
    """The map that takes each of the ids `before` to the id at its place in `after`."""
    if len(before) == 1:
        only = int(after[0])
        return lambda ids: np.full(len(ids), only, dtype=np.int64)
    order = np.argsort(before)
    ordered, mapped = before[order], after[order]
    return lambda ids: mapped[np.searchsorted(ordered, ids)]


class kernel_modes:
    """Kernels run without autograd; casts are in the operation graphs already, so without autocast too."""

    __slots__ = ("_grad", "_stack")

    def __enter__(self) -> None:
        self._stack: ExitStack | None = None
        self._grad = torch.is_grad_enabled()
        set_grad_enabled(False)
        if any_autocast():
            self._stack = ExitStack()
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    self._stack.enter_context(torch.autocast(device, enabled=False))

    def __exit__(self, *raised: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*raised)
        set_grad_enabled(self._grad)


def differentiable_constants(program: Program, s: int) -> list[torch.Tensor]:
    """The tensors of a constant signature that require gradients."""
    signature = program.signatures[s]
    if signature.operation.kind != "constant" or not signature.outputs[0].differentiable:
        return []
    return [t for t in program.constants[s] if t.requires_grad]
