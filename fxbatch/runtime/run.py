"""Run: one minibatch. Programs (phases) go in, values live in its memory, results come out.

A Run is the `execution` that the recorder talks to: `run(program)` executes pending calls, `read(values)`
gives real tensors for values that the user's code asked for. Arenas grow from phase to phase; a value keeps
its row, so that backward can walk the steps of all phases once, in reverse.

    >>> run = Run(planner, grad=True)                      # doctest: +SKIP
    >>> run.run(program); run.read([3])                     # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from fxbatch.ir import Program, Schedule
from fxbatch.passes.plan import is_constant
from fxbatch.passes.select import met_alone
from fxbatch.passes.signature_graph import early_needs, find_needs, survey
from fxbatch.runtime.blocks import BlockMemory, BlockPhase
from fxbatch.runtime.forward import Phase, execute_forward
from fxbatch.runtime.memory import Memory, to_device
from fxbatch.runtime.operands import by_signature
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.planner import Planner
from fxbatch.runtime.structure_cache import HELD, Family, FamilyTemplate, Operands, Types
from fxbatch.runtime.value_tensors import ValueTensors
from fxbatch.stopwatch import Timing
from fxbatch.torch_private import any_autocast, set_grad_enabled
from fxbatch.trace.constants import sources_of
from fxbatch.trace.held import Renumber
from fxbatch.trace.state import _fast, autocast_state, set_autocast
from fxbatch.trace.table import SignatureTable


class Resolver(Protocol):
    """Runs calls with sizes of their own; who makes a run gives one, or none."""

    def resolve(self, run: Run, program: Program) -> Program: ...


class Run:
    """One minibatch: its memory, the phases run so far, and where each value is."""

    released = True  # until it is made: a fault in between leaves nothing to release
    table: SignatureTable | None = None  # of the recording, where packed calls may be resolved
    resolver: Resolver | None = None
    value_row = value_type = np.zeros(0, dtype=np.int64)  # of each value
    value_needs = np.zeros(0, dtype=bool)
    launches = 0
    phases_timed: Timing | None = None  # of phases that run while others are recorded

    def __init__(
        self, planner: Planner, *, grad: bool, differentiable: bool = False, lasting: bool = False
    ) -> None:
        """differentiable: it runs under ordinary autograd. lasting: more may be run after a backward pass, or an
        optimizer's step, as of a lazy block."""
        self.planner = planner
        self.lasting = lasting
        # Values of results that got no gradient, in the backward pass that begins.
        self.left_out: set[int] = set()
        self.blocks = BlockMemory(planner) if differentiable else None
        self.tensors = ValueTensors()  # to packed calls
        planner.pool.begin()
        self.grad = grad
        self.memory = Memory(planner.pool)
        self.phases: list[Phase] = []
        self.segments: list[Run] = []  # what ran before, for packed calls
        self.operands: Operands = {}  # what shared operands are in this run
        self._families: dict[object, tuple[Family, Types]] = {}  # that were met in it
        self._asked: dict[int, None] = {}  # types that numbers were asked for of
        self.modes: Callable[[], AbstractContextManager[None]] = (
            kernel_modes if self.blocks is None else nullcontext
        )
        self.runs_in_parts = not grad and self.blocks is None  # whether a phase may stop for packed calls
        self.native = planner.options.native
        self.released = False

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give all memory back to the pool; values can't be read any more."""
        if self.released:
            return
        self.released = True
        self.memory.release()
        for phase in self.phases:
            phase.views = None
        self.phases.clear()

    # -- running a phase ----------------------------------------------------------------------------

    def run(self, program: Program) -> None:
        """Execute the calls of a program; its values are numbered on from those of earlier phases."""
        program = met_alone(self.resolved(program))
        if len(program) and self.phases_timed is not None:
            self.phases_timed.forward_of(lambda: self.execute(program, last=False))
        elif len(program):
            self.execute(program, last=False)

    def resolved(self, program: Program) -> Program:
        """The program after its packed calls, which are constants then."""
        if self.resolver is None or self.table is None or not (len(program) or len(program.outputs)):
            return program
        return self.resolver.resolve(self, program)

    def finish(self, program: Program, values: np.ndarray) -> Renumber:
        """Execute the last calls; only `values` (= program.outputs) are read any more, so the program is
        rewritten first. Returns the map from the recorder's value ids to this run's."""
        phase, renumber = self.prepare(self.resolved(program), values)
        if phase is not None:
            self.start(phase)
        return renumber

    def prepare(self, program: Program, values: np.ndarray) -> tuple[Phase | None, Renumber]:
        """`finish` up to where it runs: the last phase, None where there is nothing to run."""
        if not len(program):
            return None, renumbering(values, program.outputs)
        program, schedule = self.planner.rewrite(program)
        with self.modes():
            phase = self.plan_phase(program, schedule, last=True) if len(program) else None
        return phase, renumbering(values, program.outputs)

    def execute(self, program: Program, schedule: Schedule | None = None, *, last: bool = True) -> None:
        """Run a program, by the policy of the options where no schedule is given."""
        with self.modes():
            self.launch(self.plan_phase(program, schedule, last=last))

    def start(self, phase: Phase) -> None:
        """Run a phase that was planned by `prepare`."""
        with self.modes():
            self.launch(phase)

    def plan_phase(self, program: Program, schedule: Schedule | None, *, last: bool) -> Phase:
        """Everything of a phase but the running: operations compiled, steps, places and gathers planned.

        last: whether no phase comes after it.
        """
        if self.blocks is not None:
            return self.blocks.plan(program, schedule, last=last)
        template = self._template(program)
        operations, memory = template.operations, self.memory
        if last and not self.phases:
            memory.types_of(program)
            schedule, phase = self.planner.plan(program, schedule, template, reuse=not self.grad)
            return Phase(program, schedule, phase.plan, template.needs, operations, phase)
        schedule = self.planner.schedule(program) if schedule is None else schedule
        plan = memory.plan(program, schedule, operations.slots, operations.arrays, template.needs.outputs)
        return Phase(program, schedule, plan, template.needs, operations)

    def launch(self, phase: Phase) -> None:
        """Run all steps of a planned phase."""
        self.phases.append(phase)
        if isinstance(phase, BlockPhase):
            assert self.blocks is not None
            self.launches += self.blocks.launch(phase)
            self.value_row, self.value_type = self.blocks.row_of_value, self.blocks.type_of_value
            return
        self.launches += execute_forward(phase, self.memory, self.planner.workspace(), native=self.native)
        columns = self.memory.phases.ran() if phase.whole_plan is None else phase.whole_plan.columns
        self.value_row, self.value_type, self.value_needs = columns
        if self.lasting and self.grad:
            trained = [t for shared in self.memory.shared.values() for t in shared if t.requires_grad]
            phase.read = [(t, t._version) for t in (*trained, *self.read_back([phase]))]

    def read_back(self, phases: Sequence[Phase]) -> list[torch.Tensor]:
        """Buffers and frozen parameters that backward reads: it raises torch's own error where they were written to."""
        shared = self.memory.shared
        sets = dict.fromkeys(phase.operations for phase in phases)
        return [shared[signature][i] for s in sets for signature, i in s.read_back if signature in shared]

    def _template(self, program: Program) -> FamilyTemplate:
        """Who needs gradients in a program, and its compiled operations; the shared operands are noted."""
        family, types = self._family(program)
        constants, known_needs = tuple[int, ...](), None
        if self.grad:
            constants = tuple([s for s in program.constants if differentiable_constants(program, s)])
            known_needs = self.value_needs[: program.known]
        key = "template", (family, types, constants, early_needs(program, known_needs))
        template: FamilyTemplate | None = self.planner.structures.entries.get(key)
        if template is None or not family.settled:
            template = self._make_template(program, family, constants, known_needs)
            if family.settled:
                self.planner.structures.entries.put(key, template, HELD + program.columns.bytes)
        return template

    def _family(self, program: Program) -> tuple[Family, Types]:
        """The family of a program and the types of its operands, which stay what they are: looked for once a run."""
        facts = survey(program)
        key = facts.graph, facts.present
        family_and_types = None if self.lasting else self._families.get(key)
        if family_and_types is None:
            family = self.planner.family(program, self.grad)
            tensors = family.resolve(self.operands)
            self.memory.shared.update(by_signature(family.called, tensors))
            family_and_types = self._families[key] = family, family.types(tensors)
        return family_and_types

    def _make_template(
        self, program: Program, family: Family, constants: tuple[int, ...], known_needs: np.ndarray | None
    ) -> FamilyTemplate:
        shared = self.memory.shared
        shared_needs = [(False,) * len(signature.shared) for signature in program.signatures]
        for s, signature in enumerate(program.signatures):
            if self.grad and family.present[s] and signature.modes.grad:
                shared_needs[s] = tuple(t.requires_grad for t in shared[signature])
        trained = [any(x) for x in shared_needs]
        needs = find_needs(program, trained, dict.fromkeys(constants, True), known_needs=known_needs)
        counts = survey(program).counts
        late = self.planner.late(program.signatures, counts.tolist())
        operations: list[CompiledOperation | None] = [None] * len(program.signatures)
        for s in np.argsort(-counts, kind="stable").tolist():  # those with the most calls are built first
            if family.present[s]:
                signature = program.signatures[s]
                wanted = needs.inputs[s], shared_needs[s]
                operations[s] = self.planner.compiled(
                    signature, wanted, shared[signature], self.grad, late=s in late, calls=counts.item(s)
                )
        family.settled = not any(x is not None and x.is_late for x in operations)
        needs = replace(needs, inputs=tuple(map(_given_back, operations, needs.inputs)))
        return FamilyTemplate(needs, self.planner.all_met(program, operations, self.grad))

    # -- reading values -----------------------------------------------------------------------------

    def rows(self, values: np.ndarray) -> torch.Tensor:
        """A new tensor [len(values), *shape] of values of one type; under ordinary autograd, what it has of them."""
        assert len(values), "values of one tensor type"
        at = values.item(0)
        if self.blocks is not None:
            return self.blocks.read(self.value_type.item(at), self.value_row.take(values))
        kind, first = self.value_type.item(at), self.value_row.item(at)
        if len(values) == 1:
            return self.memory.copied(kind, first, 1)
        kinds, rows = self.value_type.take(values), self.value_row.take(values)
        assert (kinds == kind).all(), "values of one tensor type"
        if (rows[1:] - rows[:-1] == 1).all():
            return self.memory.copied(kind, first, len(rows))
        arena = self.memory.arena(kind)
        return torch.index_select(arena, 0, to_device(rows, arena.device))

    def by_type(
        self,
        values: Sequence[int] | np.ndarray,
        take: Callable[[list[np.ndarray]], Iterable[Sequence[object]]],
    ) -> list[Any]:
        """One item a value. take: gives, for each request of values of one type, an item a value."""
        ids = np.asarray(values, dtype=np.int64)
        kinds = self.value_type[ids]
        places = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        out: list[object] = [None] * len(ids)
        for where, items in zip(places, take([ids[w] for w in places]), strict=True):
            for place, item in zip(where.tolist(), items, strict=True):
                out[place] = item
        return out

    def in_memory(self, values: Sequence[int] | np.ndarray) -> list[torch.Tensor]:
        """Detached tensors of values, by their numbers in the memory."""
        if len(values) == 1:
            return [self.rows(np.asarray(values)).detach()[0]]
        return self.by_type(values, lambda requests: [self.rows(ids).detach().unbind(0) for ids in requests])

    def read(self, values: Sequence[int]) -> list[torch.Tensor]:
        """The values as real, detached tensors on the CPU side: one transfer per type and call."""
        if self.tensors.number is None:
            return self.in_memory(values)
        number = self.tensors.number.take(values)
        inside = iter(self.in_memory(number[number >= 0]))
        places = zip(values, number.tolist(), strict=True)
        return [self.tensors.of(v).detach().clone() if n < 0 else next(inside) for v, n in places]

    def numbers(self, values: Sequence[int]) -> list[object]:
        """The values as Python numbers in nested lists: one transfer per type and call."""
        if self.blocks is not None or self.tensors.number is not None:
            number = self.tensors.number
            if number is None or (number.take(values) < 0).any():
                return [t.tolist() for t in self.read(values)]
            values = number.take(values).tolist()
        if len(values) == 1:
            kind, row = self.value_type.item(values[0]), self.value_row.item(values[0])
            host = self.memory.host_arena(kind)
            if host is not None:
                self._asked[kind] = None
                return [host.item(row) if host.ndim == 1 else host[row].tolist()]
        wanted = np.array(values, dtype=np.int64)
        kinds = self.value_type.take(wanted)
        if (kinds == kinds[:1]).all():
            if not len(wanted):
                return []
            host = self.memory.host_arena(kinds.item(0))
            self._asked[kinds.item(0)] = None
            payload: list[object] = (
                self.rows(wanted).tolist()
                if host is None
                else host.take(self.value_row.take(wanted), axis=0).tolist()
            )
            return payload
        return self.by_type(values, lambda requests: [self.rows(ids).tolist() for ids in requests])

    def settled(self, base: int) -> object:
        """Where C finds the numbers of values that have run, of the types that were asked for before."""
        if not self._asked or _fast is None:
            return None
        arenas: list[np.ndarray | None] = [None] * (max(self._asked) + 1)
        for kind in self._asked:  # those of one number a row
            arenas[kind] = x if (x := self.memory.host_arena(kind)) is not None and x.size == len(x) else None
        if (number := self.tensors.number) is None:
            return _fast.Settled(base, self.value_type, self.value_row, tuple(arenas))
        types, rows = (np.append(x, -1).take(number) for x in (self.value_type, self.value_row))
        return _fast.Settled(base, types, rows, tuple(arenas))  # C asks by what was recorded; -1 is no type


def renumbering(before: np.ndarray, after: np.ndarray) -> Renumber:
    """The map that takes each of the ids `before` to the id at its place in `after`."""
    if len(before) == 1:
        return lambda ids: after if len(ids) == 1 else after[np.zeros(len(ids), dtype=np.int64)]
    order = np.argsort(before)
    ordered, mapped = before[order], after[order]
    return lambda ids: mapped[np.searchsorted(ordered, ids)]


class kernel_modes:
    """Kernels run without autograd; casts are in the operation graphs already, so without autocast too."""

    __slots__ = ("_autocast", "_grad")

    def __enter__(self) -> None:
        self._grad, self._autocast = torch.is_grad_enabled(), autocast_state() if any_autocast() else None
        set_grad_enabled(False)
        if self._autocast is not None:
            set_autocast(None)

    def __exit__(self, *_: object) -> None:
        if self._autocast is not None:
            set_autocast(self._autocast)
        set_grad_enabled(self._grad)


def _given_back(compiled: CompiledOperation | None, needs: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which inputs an operation's backward gives gradients, of those that need some: not those of `x > 0` within it."""
    if compiled is None or is_constant(compiled.signature):
        return needs
    inputs = {i for group in compiled.grad_groups for i in compiled.layout.groups[group]}
    inputs.difference_update(compiled.without_gradient)
    return tuple([need and i in inputs for i, need in enumerate(needs)])


def differentiable_constants(program: Program, s: int) -> list[torch.Tensor]:
    """The tensors that constants of a signature are, or are rows of, and that require gradients."""
    signature = program.signatures[s]
    if signature.operation.kind != "constant" or not signature.outputs[0].differentiable:
        return []
    return [t for t in sources_of(program.constants[s]) if t.requires_grad]
