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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fxbatch.ir import Plan, Program, Schedule, Signature, SignatureColumns, TensorType
from fxbatch.passes.find_needs import Needs, find_needs
from fxbatch.passes.frontier import count_signatures
from fxbatch.passes.survey import count_values, spread_outputs
from fxbatch.runtime.buffers import Buffer
from fxbatch.runtime.compiled import CompiledOperation
from fxbatch.runtime.devices import to_device
from fxbatch.runtime.forward import execute_forward
from fxbatch.runtime.phase import OperationRows, Phase

if TYPE_CHECKING:
    from fxbatch.codegen.workspace import Workspace
    from fxbatch.runtime.captured import Captured
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
        self.grad = grad
        self.type_ids: dict[TensorType, int] = {}
        self.arenas: list[Buffer] = []
        self.phases: list[Phase] = []
        self.rows_of: dict[CompiledOperation, OperationRows] = {}
        self.shared: dict[Signature, list[torch.Tensor]] = {}
        self.value_row = np.zeros(0, dtype=np.int64)
        self.value_type = np.zeros(0, dtype=np.int64)
        self.value_needs = np.zeros(0, dtype=bool)
        self._rows, self._types = GrowingArray(np.int64), GrowingArray(np.int64)
        self._needs = GrowingArray(np.bool_)
        self._type_numbers: dict[SignatureColumns, np.ndarray] = {}
        self.launches = 0
        self._compiled: dict[
            tuple[Signature, tuple[tuple[bool, ...], tuple[bool, ...]]], CompiledOperation
        ] = {}  # found in earlier phases
        self.native = engine.options.native
        self.lent: Captured | None = None  # whose memory this run is on
        self.lasting = False  # whether more may be run after a backward pass (lazy use)
        self.released = False

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give all memory back to the pool; values can't be read any more."""
        if self.released:
            return
        self.released = True
        if self.lent is not None:
            self.lent.take_back()
        else:
            for buffer in self.arenas:
                buffer.release()
            for rows in self.rows_of.values():
                rows.release()
        self.arenas, self.rows_of, self.lent = [], {}, None
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
        whole = last and not self.phases
        into = None if whole else self._rows.room(known, count_values(program))
        reuse = whole and not self.grad
        schedule, plan = self.engine.plan(
            program, schedule, tuple(compiled), known, used, before, whole=whole, reuse=reuse, into=into
        )
        return Phase(program, schedule, plan, needs, compiled, whole)

    def launch(self, phase: Phase) -> None:
        """Run all steps of a planned phase."""
        self.phases.append(phase)
        graphs = self.engine.cuda_graphs
        if graphs is None or not graphs.run(self, phase):
            execute_forward(self, phase)
        self._remember(phase.program, phase.plan, phase.needs)

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

    def _compile(self, program: Program) -> tuple[Needs, list[CompiledOperation | None]]:
        counts = count_signatures(program).tolist()
        present = [n > 0 for n in counts]
        shared_needs: list[tuple[bool, ...]] = []
        for s, signature in enumerate(program.signatures):
            if self.grad and present[s] and signature.modes.grad:
                shared_needs.append(tuple(t.requires_grad for t in self.shared_of(signature)))
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
        late = self.engine.postponed.choose(program.signatures, counts)
        compiled: list[CompiledOperation | None] = []
        for s, signature in enumerate(program.signatures):
            if not present[s]:
                compiled.append(None)
                continue
            wanted = (needs.inputs[s], shared_needs[s])
            found = self._compiled.get((signature, wanted))
            if found is None:
                found = self.engine.compiled(
                    signature, wanted, self.shared_of(signature), self.grad, late=s in late
                )
                self._compiled[(signature, wanted)] = found
            compiled.append(found)
        return needs, compiled

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
