"""Calls of submodules on tensors of their own sizes, inside a forward that is recorded: a sentence encoder of a parser;
and of torch's functions on what these give.

In: while recording, calls whose shapes were not met before; before a phase runs, its program. Out: entries
that need no run on fake tensors; a program in which packed calls whose inputs are at hand have run, all of one level
at once, and are constants, and so are the rows that are read of them (`encoded[3]`, `for row in encoded`).

    entry = packed_calls.entry(entries, arguments)    # None: as any other call
    program = packed_calls.resolve(run, program)
    program = after_packed_calls(run, program)        # of a whole minibatch, with what packed calls need run first

A signature of a packed call is whole: where it is not resolved, it runs as any other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from fxbatch import stopwatch
from fxbatch.caches import guard
from fxbatch.ir import Program, Signature, Slot, TensorSpec
from fxbatch.mistakes import report
from fxbatch.passes.deduplicate import deduplicate
from fxbatch.passes.select import calls_behind, eliminate_dead, met_alone, number_segments, select_calls
from fxbatch.passes.unstack_rows import ALL, LIFTED, NO_ROW, row_read
from fxbatch.passes.unstack_sums import summed_stacks
from fxbatch.ragged.packed_column import PackedColumn
from fxbatch.runtime.autograd import take_results
from fxbatch.runtime.packed_route import SECONDS, PackedRoute
from fxbatch.runtime.run import Run
from fxbatch.runtime.value_tensors import HELD_APART, Column, Tensors, ValueTensors, is_of_packed
from fxbatch.signature import Template, tensor_spec
from fxbatch.stopwatch import building
from fxbatch.torch_private import any_autocast
from fxbatch.trace.constants import RowColumn
from fxbatch.trace.table import CallArguments, Entries, Entry, SignatureTable, static_key
from fxbatch.trace.values import GETITEM

if TYPE_CHECKING:  # it imports sympy, which takes half a second that most programs need not spend
    from fxbatch.ragged.packed_function import PackedFunction

MEMBERS = 3  # calls of different shapes that are met before a family is built
MANY = 16  # from which on one of a function is built, whether its calls can run before others or not
LONG = 8  # rows of the longest stack that a family has: shorter ones are children of a node, of which there are many
MOST_SIZES = 8
MOST = 3  # segments: each is a run, which takes as long as several steps
FEW = 4  # calls, from which on one step for all takes less than one for each
STACKS = 4  # of an instance on average
USUAL = 3  # steps in a row with calls of one signature alone, after which these are as any other calls
SAVES = 40  # launches, from which on a segment of a phase is worth planning
SHIFT = 2  # what is added to a number that stands as a size: graphs are of sizes from 2 on
_OF_ROWS = (torch.stack, torch.cat)
_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


Place: TypeAlias = tuple[int, str]  # of a number: a leaf of a template, and a bound where it is a slice


@dataclass(eq=False)
class CallFamily:
    """Calls of one module or function that differ in the sizes of their inputs, and in numbers that are such, alone."""

    numbers: Mapping[int, tuple[int, int] | None] = field(default_factory=dict)  # `_sizes_in`
    places: Sequence[Place] = ()  # numbers in an index, which each call has of its own
    key: object = None  # among the entries of their module
    members: list[Entry] = field(default_factory=list)
    keys: list[object] = field(default_factory=list)  # of the members among the entries of their module
    function: PackedFunction | None = None
    of_function: int = 0  # members of which it was built
    widest: bool = False  # whether another function was tried for calls in which more differs
    signature: Signature | None = None  # of a member: its body
    reason: str = ""
    calls: int = 0
    steps: int = 0
    checked: bool = False  # whether the function was compared with the calls one by one
    stacks: bool = False  # `torch.stack` or `torch.cat` of rows, another number of them in each call
    alike: Signature | None = None  # of all calls of the last step that had one alone ...
    times: int = 0  # ... and of how many such before it in a row

    def note_step(self, signatures: Sequence[Signature]) -> None:
        """Calls of these signatures have run in one step."""
        if len(signatures) == 1:
            self.times = self.times + 1 if signatures[0] is self.alike else 1
            self.alike = signatures[0]

    def is_usual(self, signature: Signature) -> bool:
        """Whether its calls are all of this signature, time and again: then they are as those of any operation."""
        return signature is self.alike and self.times >= USUAL and not (signature.reason or self.stacks)

    def types(self, types: Sequence[TensorSpec], template: Template | None) -> tuple[TensorSpec, ...]:
        """The types of what its function is given of the values of a call, and of its numbers: each as the size of a
        tensor without elements."""
        assert template is not None
        numbers = [_number_at(template, place) + SHIFT for place in self.places]
        return (*types, *[tensor_spec((n, 0), torch.float32, torch.device("cpu")) for n in numbers])


class PackedCalls:
    """The families of an engine, and what runs their calls."""

    def __init__(self, *, verify: bool, may_try: Callable[[float], bool]) -> None:
        self.verify = verify
        self.may_try = may_try  # asked before a function is built
        self.families: list[CallFamily] = []
        self.settled = 0  # families that were there when the minibatch before was resolved
        self.first: dict[Signature, CallFamily] = {}  # of calls that were recorded before it was built

    # -- while recording ------------------------------------------------------------------------------

    def entry(self, entries: Entries, arguments: CallArguments, *, of: object = None) -> Entry | None:
        """An entry for a call of a family whose function is for its sizes; None where there is none. of: the function
        that is called, if it is no module, whose entries these are."""
        recorder = arguments.recorder
        if not recorder.watches_operands or any_autocast():
            return None
        rows = _rows_key(of, arguments) if of in _OF_ROWS else None
        if rows is not None:
            return self._entry_of_rows(entries, rows, arguments)
        if of == torch.stack:
            return None
        if of is not None and not self.families:  # functions are packed beside submodules and stacks that are
            return None
        template, types = arguments.template(), arguments.types()
        family = self._family(entries, arguments, of)
        if family.reason or len(family.members) < MEMBERS:
            return None
        if family.function is None:
            # Built where its calls can run, but for numbers: those that all share are no values there.
            if of is not None and len(family.members) < MANY and all(t.shape for t in types):
                return None
            # Where calls wait for one another too often, those of other functions are likely to.
            unused = sum(f.function is not None and not f.steps for f in self.families[: self.settled])
            if not (
                self.may_try(PackedRoute.seconds_to_try * (1 + unused))
                and self._built(entries, family, arguments)
            ):
                return None
        function = family.function
        assert function is not None
        if (sizes := _fitting_sizes(function, family.types(types, template))) is None:
            return None
        member = family.members[0]
        assert member.outcome is not None
        outputs = tuple(
            tensor_spec(shape, t.dtype, t.device)
            for shape, t in zip(function.output_shapes(sizes), member.signature.outputs, strict=True)
        )
        signature = dataclasses.replace(
            member.signature, inputs=types, outputs=outputs, arguments=template, sizes=family,
        )  # fmt: skip
        table: SignatureTable = recorder.table
        return table.add(signature, dataclasses.replace(member.outcome, outputs=outputs))

    def awaits(self, entries: Entries, arguments: CallArguments) -> bool:
        """Whether a function for the sizes of this call is still to be tried: too much was built at once."""
        family, watched = self._family(entries, arguments, None), arguments.recorder.watches_operands
        return watched and len(family.members) >= MEMBERS and family.function is None and not family.reason

    def _built(self, entries: Entries, family: CallFamily, arguments: CallArguments) -> bool:
        """Whether it has a function now, by which its first members are packed as well from now on."""
        with building():
            self._build(family, arguments.types())
        if family.function is not None:
            self._take_over(entries, family, arguments)
        return family.function is not None

    def _take_over(self, entries: Entries, family: CallFamily, arguments: CallArguments) -> None:
        """From now on its first members run with it."""
        for key in family.keys:
            entries.pop(key, None)
        self._fit(family)
        arguments.recorder.lasts = False

    def _fit(self, family: CallFamily) -> None:
        """Those members run with its function for whose sizes it is, or all of stacks."""
        for signature in [member.signature for member in family.members]:
            types = family.types(signature.inputs, signature.arguments)
            self.first[signature] = family
            if family.function is not None and _fitting_sizes(family.function, types) is None:
                del self.first[signature]

    def _entry_of_rows(self, entries: Entries, key: object, arguments: CallArguments) -> Entry | None:
        """An entry for rows put together, which are a tensor of its own size to what reads it."""
        family: CallFamily | None = entries.get(key)
        if family is None or len(family.members) < MEMBERS:
            return None
        count, like = len(arguments.values), family.members[0]
        longest = max(count, *[len(m.signature.inputs) for m in family.members])
        if longest < LONG:
            return None
        assert like.outcome is not None and family.signature is not None
        if not family.stacks:
            family.stacks = True
            self.families.append(family)
            self._take_over(entries, family, arguments)
        row, whole = like.signature.inputs[0], like.signature.outputs[0]
        shape = (count, *whole.shape[1:])
        signature = dataclasses.replace(
            like.signature, inputs=(row,) * count, outputs=(tensor_spec(shape, row.dtype, row.device),),
            arguments=arguments.template(), sizes=family,
        )  # fmt: skip
        table: SignatureTable = arguments.recorder.table
        return table.add(signature, dataclasses.replace(like.outcome, outputs=signature.outputs))

    def _met_rows(
        self, entries: Entries, key: object, arguments: CallArguments, pair: tuple[object, Entry]
    ) -> None:
        family: CallFamily = entries.setdefault(key, CallFamily())
        if len(family.members) < MEMBERS or len(arguments.values) >= LONG:
            family.keys.append(pair[0])
            family.members.append(pair[1])
            family.signature = pair[1].signature

    def met(
        self,
        entries: Entries,
        arguments: CallArguments,
        pair: tuple[object, Entry],
        *,
        of: object = None,
    ) -> None:
        """A call that was recorded as any other: what its family is made of."""
        if not arguments.recorder.watches_operands or any_autocast():
            return
        rows = _rows_key(of, arguments) if of in _OF_ROWS else None
        if rows is not None:
            self._met_rows(entries, rows, arguments, pair)
        if rows is not None or of == torch.stack:
            return
        family = self._family(entries, arguments, of)
        key, entry = pair
        if not arguments.values:
            family.reason = "no value in it"
        if family.reason or (family.function is not None and not self._may_be_wider(family, entry)):
            return
        family.members.append(entry)
        family.keys.append(key)
        if family.function is not None and len(family.members) >= family.of_function + MEMBERS:
            self._widen(entries, family, arguments)
        elif family.function is None and of is not None and self.families and len(family.members) >= MEMBERS:
            if family.signature is None:
                family.signature = entry.signature
                self.families.append(family)
                self._fit(family)
            self.first[entry.signature] = family

    def _may_be_wider(self, family: CallFamily, entry: Entry) -> bool:
        """Whether a call is one of those in which another dimension differs than its function takes to be an instance's
        own, and another function may be tried."""
        assert family.function is not None
        types = family.types(entry.signature.inputs, entry.signature.arguments)
        other = not _other_dimensions_fit(family.function, types)
        return other and not family.widest and self.may_try(PackedRoute.seconds_to_try)

    def _widen(self, entries: Entries, family: CallFamily, arguments: CallArguments) -> None:
        """One family of the calls that fit the function and of those that do not, if one function is for them all."""
        wider = CallFamily(family.numbers, family.places, family.key, family.members, family.keys)
        family.widest = True
        if self._built(entries, wider, arguments):
            entries[family.key] = wider
            for key in [k for k, e in entries.items() if type(e) is Entry and e.signature.sizes is family]:
                del entries[key]

    def _family(self, entries: Entries, arguments: CallArguments, of: object) -> CallFamily:
        template, types = arguments.template(), arguments.types()
        places = self._own_numbers(entries, template, types, of)
        numbers = {i: n for i, n in _sizes_in(template, types, of).items() if (i, "") not in places}
        while True:
            leaves = _with_numbers(template, dict.fromkeys(places, -1)).leaves
            key = (
                "sizes",
                of,
                str(template.spec),
                places,
                tuple(
                    ("size", numbers[i]) if i in numbers else x if type(x) is Slot else static_key(x)
                    for i, x in enumerate(leaves)
                ),
                tuple((len(t.shape), t.dtype, t.device) for t in types),
                _repeated(types),
                tuple(s.key for s in arguments.shared),
            )
            family: CallFamily = entries.setdefault(key, CallFamily(numbers, places, key))
            if not family.reason or not (numbers or places):
                return family
            numbers, places = {}, ()  # then the numbers are what they are

    def _own_numbers(
        self, entries: Entries, template: Template, types: Sequence[TensorSpec], of: object
    ) -> tuple[Place, ...]:
        """The numbers in an index, `x[2:5]`, `x[:, i]`, along dimensions in which such values differ: any others of
        these, in another call, are numbers of the same family. None of `x[i]`, which reads a row."""
        index = template.leaves[1:] if of == GETITEM else (0,)
        if not types or type(index[0]) is int or not all(type(x) in (int, slice) or x is None for x in index):
            return ()
        dims = itertools.count()
        places: list[tuple[int, Place]] = []  # each with its dimension
        for i, x in enumerate(index, 1):
            dim = -1 if x is None else next(dims)
            bounds = ("start", "stop") if type(x) is slice else ("",)
            numbers = [(bound, _number_at(template, (i, bound))) for bound in bounds]
            places += [(dim, (i, bound)) for bound, n in numbers if type(n) is int and n >= 0]
        key = ("index", str(template.spec), *map(type, index), len(types[0].shape))
        first, differing = entries.setdefault(key, (types[0].shape, set()))
        differing.update(d for d, (n, m) in enumerate(zip(first, types[0].shape, strict=True)) if n != m)
        return tuple(place for dim, place in places if dim in differing)

    def _build(self, family: CallFamily, types: Sequence[TensorSpec]) -> None:
        from fxbatch.ragged.packed_function import PackedFunction
        from fxbatch.ragged.symbolic import NoPackedForm, is_composite

        PackedRoute.seconds_to_try = SECONDS
        every = [entry.signature.inputs for entry in family.members] + [tuple(types)]
        of_values = tuple(
            tuple(d for d in range(len(column[0].shape)) if len({t.shape[d] for t in column}) > 1)
            for column in zip(*every, strict=True)
        )
        if len(set(every)) < MEMBERS:
            return  # numbers alone differ so far
        dynamic = (*of_values, *[(0,)] * len(family.places))
        if sum(map(len, dynamic)) > MOST_SIZES or any(len(dims) > 2 for dims in dynamic):
            family.reason = "too many sizes of its own"
            return
        entry = max(family.members, key=lambda m: min(_own(m.signature.inputs, of_values), default=0))
        signature = entry.signature
        if min(_own(signature.inputs, of_values), default=0) < 2:
            # Sizes 0 and 1 make no example: wait for another.
            self.first.pop(family.members.pop().signature, None)
            family.keys.pop()
            return
        count = len(signature.inputs)
        first_shared = count + len(family.places)

        def body(*tensors: torch.Tensor) -> list[torch.Tensor]:
            assert signature.arguments is not None
            numbers: dict[Place, object] = {
                (i, ""): -1 if size is None else tensors[size[0]].shape[size[1]]
                for i, size in family.numbers.items()
            }
            sized = zip(family.places, tensors[count:first_shared], strict=True)
            numbers.update((place, t.shape[0] - SHIFT) for place, t in sized)
            call = dataclasses.replace(signature, arguments=_with_numbers(signature.arguments, numbers))
            return call.run(tensors[:count], tensors[first_shared:], reinstated=True)

        types = family.types(signature.inputs, signature.arguments)
        example = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in types]
        shared = [s.resolve() for s in signature.shared]
        operands = [s.detach().requires_grad_(s.requires_grad) for s in shared]
        try:
            # Around the trace, which has `len` and others of its own where the body's code looks for them.
            grad = signature.modes.grad
            with torch.inference_mode(False), torch.set_grad_enabled(grad), signature.as_recorded():
                function = PackedFunction.of(
                    body, example, dynamic, operands, flags_known=False, code=[signature.operation.target],
                    by_tape=signature.operation.kind == "function" and not is_composite(signature.operation.target),
                )  # fmt: skip
            if function.lowered.by_values:
                raise NoPackedForm("a size depends on values")
            family.function = function
            family.of_function = len(family.members)
            if family.signature is None:
                self.families.append(family)
            family.signature = signature
        except NoPackedForm as error:
            family.reason = str(error)
        except Exception as error:  # noqa: BLE001 - such calls run as any other
            family.reason = report(error, "a packed call", verify=self.verify)

    # -- before a phase runs ----------------------------------------------------------------------------

    def resolve(self, run: Run, program: Program) -> Program:
        """The program with constants in place of packed calls that could run, and of rows that are read of them.

        run: of the minibatch; what is known of its values grows. Where nothing needs gradients, calls of this phase run
        in it that packed calls wait for.
        """
        if not self.families and run.tensors.number is None:
            return program
        return _at_hand(self.resolve_as_columns(run, program))

    def resolve_as_columns(self, run: Run, program: Program) -> Program:
        """`resolve`, but constants may be places in columns: many of them are read by nobody."""
        table, tensors, grad, in_parts = run.table, run.tensors, run.grad, run.runs_in_parts
        assert table is not None
        tensors.make_room(program.values)
        packed, met = self.families_in(program), np.bincount(program.sig)
        can_run = packed and _can_run(program, packed).any()
        apart = packed if in_parts else {}  # of those that may wait for others of the phase
        cost = {s: _launches(run, program.signatures[s], family) for s, family in apart.items()}
        launches = sum(met.item(s) * n or 1 for s, n in cost.items())
        waits = _waiting(program, packed) if launches >= SAVES else None  # SAVES a segment
        if waits is not None and not _first_of_segments(program, packed, cost, waits).any():
            waits = None
        if not can_run and waits is None and not len(_readers(program, tensors)):
            if tensors.number is None:
                tensors.note(program)
                return program
            if (as_it_is := _renumbered(program, tensors)) is not None:
                return as_it_is
        work = _Resolution(program, tensors, None if waits is None else run, rows_stay=in_parts)
        self._run_packed(work, packed, grad=grad)
        if tensors.number is None and not work.resolved.any() and waits is None:
            return program  # none ran: all is where it would be
        work.take_rows()
        if waits is not None:
            self._run_between(work, run, table, packed, cost, waits)
        return work.program_left(table)

    def _run_between(
        self,
        work: _Resolution,
        run: Run,
        table: SignatureTable,
        packed: dict[int, CallFamily],
        cost: Mapping[int, int],
        waiting: np.ndarray,
    ) -> None:
        """Run what these packed calls wait for, and these, in turns; graphs for their sizes may be built later."""
        p, seconds = work.program, 0.0
        while True:
            waits = waiting & work.left
            first = _first_of_segments(p, packed, cost, waits)
            if not first.any():
                break
            behind = calls_behind(p, p.inputs[first[p.reader]]) & work.left & ~waits
            if behind.any():
                run.execute(met_alone(_at_hand(work.program_left(table, behind))), last=False)
                work.ran |= behind
            begun = stopwatch.now()
            self._run_packed(work, packed, grad=run.grad)
            seconds += stopwatch.now() - begun
            work.take_rows()
            if (first & ~work.resolved).any():
                break
        counts = np.bincount(p.sig[waiting & work.resolved], minlength=len(p.signatures))
        ran = {s: count for s, n in cost.items() if n and (count := counts.item(s))}
        for s, n in ran.items():
            run.planner.await_graph(p.signatures[s], seconds * n / sum(ran.values()))

    def families_in(self, program: Program) -> dict[int, CallFamily]:
        """By their signatures, whose functions run calls of a program; none where there is but one call for each step,
        in which a packed call takes several times as long."""
        called = {s: program.signatures[s] for s in np.bincount(program.sig).nonzero()[0].tolist()}
        of = {s: self.first.get(x) if x.sizes is None else x.sizes for s, x in called.items()}
        may_try = self.may_try(PackedRoute.seconds_to_try)
        packed = {s: f for s, f in of.items() if f and not f.reason and (f.function or f.stacks or may_try)}
        if program.known:  # the first phase begins with constants, and what packed calls make of these
            signatures = Counter(packed.values())
            packed = {s: f for s, f in packed.items() if signatures[f] > 1 or not f.is_usual(called[s])}
        return {} if program.instances == 1 and _follow_one_another(program, packed) else packed

    def _run_packed(self, work: _Resolution, packed: dict[int, CallFamily], *, grad: bool) -> None:
        """Run those calls whose inputs are at hand."""
        sig = work.program.sig
        families = list(dict.fromkeys(packed.values()))
        numbers = {family: i for i, family in enumerate(families)}
        of = np.full(len(work.program.signatures), -1)
        of[list(packed)] = [numbers[family] for family in packed.values()]
        waiting = _calls_of(work.program, packed) & work.left
        while waiting.any():
            ready = np.flatnonzero(waiting & work.have_inputs())
            if not len(ready):
                return
            mine = of[sig[ready]]
            for i in dict.fromkeys(mine.tolist()):
                self._step(work, families[i], ready[mine == i], grad=grad)
            waiting[ready] = False

    def _step(self, work: _Resolution, family: CallFamily, calls: np.ndarray, *, grad: bool) -> None:
        """All calls of one family at once."""
        program = work.program
        if family.function is None and not family.stacks and not family.reason:
            with building():
                self._build(family, family.members[-1].signature.inputs)
            self._fit(family)
            calls = calls[[program.signatures[s] in self.first for s in program.sig[calls].tolist()]]
        if family.reason or not (family.function or family.stacks) or not len(calls):
            return
        function, signature = family.function, program.signatures[program.sig[calls[0]]]
        with torch.set_grad_enabled(grad and signature.modes.grad):
            if function is None:
                parts: Sequence[Column] = [work.stacks_of(calls)]
            else:
                columns = [*work.columns_of(calls), *_numbers_as_sizes(family, program, calls)]
                shared = [s.resolve() for s in signature.shared]
                if not family.checked and not self._agrees(family, list(map(list, columns)), shared):
                    return
                sizes, device = function.columns_of(columns), signature.inputs[0].device
                outputs, z = function(columns, shared, sizes, device)
                parts = [
                    function.column(o, t, z) for o, t in zip(function.lowered.outputs, outputs, strict=True)
                ]
        family.calls += len(calls)
        family.steps += 1
        family.note_step([program.signatures[s] for s in set(program.sig[calls].tolist())])
        work.give(calls, parts)

    def _agrees(
        self, family: CallFamily, columns: Sequence[Sequence[torch.Tensor]], shared: Sequence[torch.Tensor]
    ) -> bool:
        """Whether the function gives what calls one by one do; where it does not, they run as any other."""
        from fxbatch.ragged.check import check_against_body

        assert family.function is not None and family.signature is not None
        family.checked = True
        try:
            with family.signature.as_recorded():
                check_against_body(family.function, columns, shared)
        except Exception as error:  # noqa: BLE001 - what is the user's own mistake is raised where the call runs
            family.reason = report(error, "a packed call", verify=self.verify)
        return not family.reason


def _calls_of(program: Program, signatures: Collection[int]) -> np.ndarray:
    """bool [calls]: those of these signatures."""
    of = np.zeros(len(program.signatures), dtype=bool)
    of[list(signatures)] = True
    return of.take(program.sig)


def _can_run(program: Program, packed: Collection[int]) -> np.ndarray:
    """bool [calls]: those of these signatures that read constants alone, and values of earlier phases."""
    constant = program.columns.constant
    waiting = _calls_of(program, packed)
    reads = np.flatnonzero(waiting[program.reader])
    maker = program.makers(program.inputs[reads])
    waiting[program.reader[reads[(maker >= 0) & ~constant[program.sig[maker]]]]] = False
    return waiting


def _follow_one_another(program: Program, packed: Mapping[int, CallFamily]) -> bool:
    """Whether hardly any calls of one family can run at once, of those that wait for no others."""
    at_once = Counter(packed[s] for s in program.sig[_can_run(program, packed)].tolist())
    return max(at_once.values(), default=0) < FEW


def _launches(run: Run, signature: Signature, family: CallFamily) -> int:
    """How many a call takes that is not packed: one for each of its functions; 0 where all take one, by a graph."""
    outcome = family.members[0].outcome
    return (1 if outcome is None else max(1, outcome.calls)) if run.planner.met.of(signature).late else 0


def _first_of_segments(
    program: Program, packed: Mapping[int, CallFamily], cost: Mapping[int, int], waits: np.ndarray
) -> np.ndarray:
    """bool [calls]: those of the packed calls that wait which have to wait for no other; none where that is not worth
    it, or random numbers are drawn, whose order it would change. cost: launches of a call, by signature."""
    segment = _segment_of(program, waits)
    last = int(segment[waits].max(initial=0))
    calls = Counter(zip(program.sig[waits].tolist(), segment[waits].tolist(), strict=True))
    steps = {(packed[s], k) for s, k in calls}
    saves = sum(n * cost[s] or 1 for (s, _), n in calls.items()) - len(steps)
    pays = saves >= SAVES * (last + 1) and last <= MOST
    return waits & (segment == 0) & (pays and not program.columns.random[program.sig].any())


class _Resolution:
    """A program of which some calls have run."""

    def __init__(
        self, program: Program, values: ValueTensors, run: Run | None = None, *, rows_stay: bool = False
    ) -> None:
        """rows_stay: whether all rows that are taken go to the run's memory, as phases to come may read them."""
        self.program, self.tensors, self.run = program, values, run
        self.rows_stay, self.rows = rows_stay, np.zeros(0, dtype=np.int64)
        values.make_room(program.values)
        values.note(program)
        self.resolved = np.zeros(len(program), dtype=bool)
        self.ran = self.resolved.copy()  # in the run's memory
        none = np.full(len(program.call_of_value), -1, dtype=np.int64)
        self.number = np.concatenate([values.numbers(program.known), none])  # of each value in it

    @property
    def left(self) -> np.ndarray:
        """bool [calls]: those that have not run."""
        p = self.program
        return ~(self.resolved | self.ran | p.columns.constant[p.sig])

    def have_inputs(self) -> np.ndarray:
        """bool [calls]: whether what each reads is at hand, or in the memory of the run."""
        p = self.program
        missing = self.tensors.marks[p.inputs] == 0
        if self.run is not None:
            missing &= self.number[p.inputs] < 0
        return np.bincount(p.reader[missing], minlength=len(p)) == 0

    def columns_of(self, calls: np.ndarray) -> list[Tensors]:
        """What these calls read, by input: tensors, or a packed column of them."""
        columns: list[Tensors] = []
        p = self.program
        for k, t in enumerate(p.signatures[p.sig[calls[0]]].inputs):
            values = p.inputs[p.input_offsets[calls] + k]
            at = self.column_of(values)
            columns.append(self.tensors_of(values, [t] * len(values)) if at is None else at[0].taken(at[1]))
        return columns

    def column_of(self, values: np.ndarray) -> tuple[PackedColumn, np.ndarray] | None:
        """The column that has all these values, or one of rows of the run's memory, and where; None if none has."""
        if self.run is None or self.tensors.marks[values].any():
            return self.tensors.column_of(values)
        number = self.number[values]
        kinds = self.run.value_type[number]
        if (kinds != kinds[:1]).any():
            return None
        return PackedColumn.of_rows(self.run.rows(number).detach()), np.arange(len(values))

    def tensors_of(self, values: np.ndarray, types: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Values that are at hand, or in the run's memory."""
        inside = self.tensors.marks[values] == 0
        if not inside.any():
            return self.tensors.every(values, types)
        assert self.run is not None
        rows = iter(self.run.in_memory(self.number[values[inside]]))
        apart = iter(self.tensors.every(values[~inside], itertools.compress(types, (~inside).tolist())))
        return [next(rows if of_run else apart) for of_run in inside.tolist()]

    def stacks_of(self, calls: np.ndarray) -> Column:
        """What these calls give, which put rows together: a packed column, where all rows are in one."""
        function = self.program.signatures[self.program.sig[calls[0]]].operation.target
        offsets, inputs = self.program.input_offsets, self.program.inputs
        rows = [inputs[offsets[c] : offsets[c + 1]] for c in calls.tolist()]
        at = self.column_of(np.concatenate(rows))
        if at is None or not at[0].is_dense:
            return [function(self.inputs_of(c)) for c in calls.tolist()]
        return at[0].stacked(at[1], list(map(len, rows)), joined=function == torch.cat)

    def inputs_of(self, c: int) -> list[torch.Tensor]:
        """The tensors that call `c` reads."""
        p = self.program
        values = p.inputs[p.input_offsets[c] : p.input_offsets[c + 1]]
        return self.tensors_of(values, p.signatures[p.sig[c]].inputs)

    def give(self, calls: np.ndarray, parts: Sequence[Column]) -> None:
        """Calls have run; parts: the values of each output."""
        first = self.program.first_value[calls]
        for k, column in enumerate(parts):
            self.tensors.put(first + k, column, mark=HELD_APART)
        self.resolved[calls] = True

    def take_rows(self) -> None:
        """Rows of what packed calls gave, where they are read one by one (`x[3]`, `for row in x`)."""
        p, tensors = self.program, self.tensors
        readers = _readers(p, tensors)
        readers = readers[~self.resolved[readers]]
        for s in sorted(set(p.sig[readers].tolist())):
            place, grad = row_read(p.signatures[s]), p.signatures[s].modes.grad
            if place == NO_ROW:
                continue
            calls = readers[p.sig[readers] == s]
            calls = calls[tensors.marks[p.inputs[p.input_offsets[calls]]] == HELD_APART]
            numbers = np.full(len(calls), place if place != ALL else 0)
            if place == LIFTED:
                calls = calls[tensors.marks[p.inputs[p.input_offsets[calls] + 1]] > 0]
                items = tensors.items(p.inputs[p.input_offsets[calls] + 1])
                plain = np.array([type(x) is int for x in items], dtype=bool)
                calls, numbers = calls[plain], np.array([x for x in items if type(x) is int], dtype=np.int64)
            sources, of = np.unique(p.inputs[p.input_offsets[calls]], return_inverse=True)
            columns = [self._rows_of(v, p.signatures[s].inputs[0], grad=grad) for v in sources.tolist()]
            where = np.array([(tensors.number_of(c), first, n) for c, first, n in columns], dtype=np.int64)
            column, first, count = where.reshape(-1, 3)[of.reshape(-1)].T
            values = p.first_value[calls]
            if place == ALL:
                rows = np.arange(count.sum()) - (count.cumsum() - count).repeat(count)
                column, first, values = (x.repeat(count) for x in (column, first, values))
                values = values + rows
            else:
                if ((numbers < -count) | (numbers >= count)).any():
                    raise IndexError("a row is read that a packed call did not give")
                rows = np.where(numbers < 0, numbers + count, numbers)
            tensors.put_apart(values, column, first + rows)
            self.resolved[calls] = True
            self.rows = np.concatenate([self.rows, values])

    def _rows_of(self, v: int, kind: TensorSpec, *, grad: bool) -> tuple[Column, int, int]:
        """The rows of what a packed call gave: in which column they are, the first, and how many."""
        at = self.tensors.column_of(np.array([v]))
        if at is not None and (rows := at[0].by_rows(grad=grad)) is not None:
            column, begins, counts = rows
            i = at[1].item(0)
            return column, begins.item(i), counts.item(i)
        (whole,) = self.tensors.every(np.array([v]), [kind])
        with torch.set_grad_enabled(grad and whole.requires_grad):
            parts = (whole if grad else whole.detach()).unbind(0)
        return parts, 0, len(parts)

    def program_left(self, table: SignatureTable, part: np.ndarray | None = None) -> Program:
        """The calls that are left, or a part of them (bool [calls]), behind constants for those values of others that
        they read, or that are results; and where all values are in the run's memory from now on."""
        p, tensors = self.program, self.tensors
        before = self.number
        runs, outputs = (self.left, p.outputs) if part is None else (part, p.outputs[:0])
        inside = runs.repeat(p.width[p.sig])
        entries = p.inputs[runs[p.reader]]
        outside = np.zeros(len(before), dtype=bool)
        outside[entries] = outside[outputs] = True
        outside[self.rows] |= self.rows_stay and part is None
        outside &= before < 0
        outside[p.known :] &= ~inside
        if not tensors.earlier or tensors.earlier[-1][0] is not p:
            tensors.earlier.append((p, self.resolved))
        signatures, sig, instance, values = _as_constants(
            table, tensors.earlier, p.signatures, np.flatnonzero(outside)
        )
        number = before.copy()
        number[values] = tensors.count + np.arange(len(values))
        number[p.known :][inside] = tensors.count + len(values) + np.arange(int(inside.sum()))
        cuts = np.flatnonzero(np.diff(sig)) + 1
        payloads: dict[int, Sequence[object]] = {}
        for first, last in itertools.pairwise([0, *cuts.tolist(), len(sig)] if len(sig) else []):
            s, mine = sig.item(first), values[first:last]
            if (
                len(mine) == len(p.constants.get(s, ()))
                and (p.sig[p.makers(mine)] == s).all()
                and mine[0] >= p.known
            ):
                payloads[s] = p.constants[s]
            else:
                payloads[s] = tensors.payload(mine)
        program = Program(
            signatures=signatures, sig=np.concatenate([sig, p.sig[runs]]), inputs=number[entries],
            instance=np.concatenate([instance, p.instance[runs]]), outputs=number[outputs], known=tensors.count,
            early_types=lambda: _types_by_number(p, before), instances=p.instances, constants=payloads,
        )  # fmt: skip
        self.number = tensors.number = number
        tensors.count = program.values
        return program


def _as_constants(
    table: SignatureTable,
    earlier: Sequence[tuple[Program, np.ndarray]],
    signatures: Sequence[Signature],
    values: np.ndarray,
) -> tuple[tuple[Signature, ...], np.ndarray, np.ndarray, np.ndarray]:
    """Constants in place of values: the signatures with those of such, and of each its signature, its instance and the
    value, those of one signature together, in order. earlier: the programs of which they are, and which calls have run
    apart."""
    every, places = list(signatures), {s: i for i, s in enumerate(signatures)}
    sig, instance = np.zeros_like(values, np.int32), np.zeros_like(values, np.int32)
    of = np.searchsorted([p.known for p, _ in earlier], values, side="right") - 1
    for i in np.unique(of).tolist():
        (p, resolved), mine = earlier[i], np.flatnonzero(of == i)
        calls = p.call_of_value[values[mine] - p.known]
        instance[mine] = p.instance[calls]
        output = values[mine] - p.first_value[calls]
        most = int(output.max()) + 1
        kinds, which = np.unique(
            (p.sig[calls].astype(np.int64) * most + output) * 2 + resolved[calls], return_inverse=True
        )
        numbers = []
        for kind in kinds.tolist():
            s, k, apart = kind // (2 * most), kind // 2 % most, kind % 2
            signature = p.signatures[s]
            if apart:
                signature = table.constant(signature.outputs[k], grad=signature.modes.grad).signature
            if signature not in places:
                places[signature] = len(every)
                every.append(signature)
            numbers.append(places[signature])
        sig[mine] = np.array(numbers, dtype=np.int32)[which.reshape(-1)]
    order = np.argsort(sig, kind="stable")
    return tuple(every), sig[order], instance[order], values[order]


def _renumbered(program: Program, tensors: ValueTensors) -> Program | None:
    """A program of which no call ran apart, by the numbers of the run's memory; None if it reads what is not there."""
    before = tensors.numbers(program.known)
    number = np.concatenate([before, tensors.count + np.arange(program.values - program.known)])
    inputs, outputs = number[program.inputs], number[program.outputs]
    if (inputs < 0).any() or (outputs < 0).any():
        return None
    tensors.note(program)
    tensors.earlier.append((program, np.zeros(len(program), dtype=bool)))
    early_types = lambda: _types_by_number(program, before)  # noqa: E731
    new = dataclasses.replace(
        program, inputs=inputs, outputs=outputs, known=tensors.count, early_types=early_types
    )
    tensors.number, tensors.count = number, new.values
    return new


def _types_by_number(program: Program, number: np.ndarray) -> np.ndarray | None:
    """int32: the types of values in a run's memory, of a program by the recording's numbers."""
    if program.known_types is None and len(program.call_of_value) < len(number):
        return None
    inside = np.flatnonzero(number >= 0)
    of_run = np.zeros(len(inside), dtype=np.int32)
    of_run[number[inside]] = program.type_of_value[inside]
    return of_run


def _at_hand(program: Program) -> Program:
    """The program with rows of tensors, or the tensors that its constants are, where these are places in columns."""
    places = {s: _rows_at_hand(x) for s, x in program.constants.items() if is_of_packed(x)}
    return dataclasses.replace(program, constants={**program.constants, **places}) if places else program


def _rows_at_hand(payload: RowColumn) -> Sequence[torch.Tensor]:
    """Constants that are tensors, and places in packed columns."""
    sources: Sequence[torch.Tensor | PackedColumn] = payload.sources
    if all(isinstance(x, torch.Tensor) or x.is_dense for x in sources):
        tensors = [x if isinstance(x, torch.Tensor) else x.tensor for x in sources]
        return RowColumn(tensors, payload.source, payload.row)
    places = zip(payload.source.tolist(), payload.row.tolist(), strict=True)
    return [x if isinstance(x := sources[k], torch.Tensor) else x[row] for k, row in places]


def _readers(program: Program, tensors: ValueTensors) -> np.ndarray:
    """The calls that read what packed calls gave, in order."""
    read = np.zeros(len(program), dtype=bool)
    read[program.reader[tensors.marks[program.inputs] & HELD_APART == HELD_APART]] = True
    return np.flatnonzero(read)


def _rows_key(of: object, arguments: Any) -> object:
    """The key of the family of rows of one type that are put together along the first dimension, by `torch.stack` or by
    `torch.cat` of tensors of one row each; None for other calls of these."""
    args, kwargs = arguments.args, arguments.kwargs
    dim = args[1] if len(args) == 2 else kwargs.get("dim", 0)
    types = set(arguments.types())
    plain = len(args) in (1, 2) and set(kwargs) <= {"dim"} and dim == 0
    if not plain or len(types) != 1 or len(args[0]) != len(arguments.values):
        return None
    row = types.pop()
    return None if of == torch.cat and row.shape[:1] != (1,) else ("rows", of, row)


def _sizes_in(
    template: Template, types: Sequence[TensorSpec], function: object
) -> dict[int, tuple[int, int] | None]:
    """Which arguments are sizes of an input, which and which of its dimensions: `x.view(len(x), -1)`. None for what
    the others leave to a `view`."""
    sizes: dict[int, tuple[int, int]] = {}
    for i, t in enumerate(types):
        for d, n in enumerate(t.shape):
            if n > 1:
                sizes.setdefault(n, (i, d))
    numbers = {i: x for i, x in enumerate(template.leaves) if type(x) is int}
    places: dict[int, tuple[int, int] | None] = {i: sizes[x] for i, x in numbers.items() if x in sizes}
    if function in _VIEWS and -1 not in numbers.values():
        rest = next((i for i, x in numbers.items() if x not in sizes and x > 1), None)
        if rest is not None:
            places[rest] = None
    return places


def _number_at(template: Template, place: Place) -> int:
    i, bound = place
    return getattr(template.leaves[i], bound) if bound else template.leaves[i]


def _with_numbers(template: Template, numbers: Mapping[Place, object]) -> Template:
    """The template with other numbers at some places."""
    leaves = list(template.leaves)
    for (i, bound), n in numbers.items():
        x = leaves[i]
        leaves[i] = (
            n if not bound else slice(n, x.stop, x.step) if bound == "start" else slice(x.start, n, x.step)
        )
    return dataclasses.replace(template, leaves=tuple(leaves))


def _numbers_as_sizes(family: CallFamily, program: Program, calls: np.ndarray) -> list[Tensors]:
    """The numbers that these calls have of their own: for each place the calls' tensors of that size."""
    if not family.places:
        return []
    signatures, of = np.unique(program.sig[calls], return_inverse=True)
    templates = [program.signatures[s].arguments for s in signatures.tolist()]
    every = [
        [torch.empty((_number_at(t, place) + SHIFT, 0), device="cpu") for t in templates]
        for place in family.places
    ]
    return [[sized[i] for i in of.tolist()] for sized in every]


def _repeated(types: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
    """By input the dimensions of one, from the end, where another has more: a pointwise function repeats them."""
    most = [max(sizes) for sizes in itertools.zip_longest(*(t.shape[::-1] for t in types), fillvalue=1)]
    return tuple(
        tuple(d for d, (n, m) in enumerate(zip(t.shape[::-1], most, strict=False)) if n == 1 < m)
        for t in types
    )


def _own(types: Sequence[TensorSpec], dynamic: Sequence[Sequence[int]]) -> list[int]:
    return [t.shape[d] for t, dims in zip(types, dynamic, strict=True) for d in dims]


@guard("sizes")
def _fitting_sizes(function: PackedFunction, types: Sequence[TensorSpec]) -> list[int] | None:
    """The sizes of one call; None where the function is not for them, or another dimension than its own differs."""
    if not _other_dimensions_fit(function, types):
        return None
    sizes = _own(types, function.dynamic)
    fits = function.graph.certain(sizes) or function.graph.fitting([np.array([n]) for n in sizes]).all()
    return sizes if fits else None


def _other_dimensions_fit(function: PackedFunction, types: Sequence[TensorSpec]) -> bool:
    """Whether nothing but the function's own dimensions differs from its example."""
    columns = zip(types, function.dynamic, function.graph.tensors, strict=False)
    return all(
        d in dims or size == example.shape[d]
        for t, dims, example in columns
        for d, size in enumerate(t.shape)
    )


# -- segments: packed calls on what recorded calls compute (attention over the states of a cell, a loss over a stack of
#    rows). What they need runs first, as a minibatch of its own; its values are constants of the rest, through which
#    gradients go.


def after_packed_calls(run: Run, program: Program) -> Program:
    """Runs the packed calls of a whole minibatch's program, and returns the program of the other calls, renumbered.

    Returns the same object if there are none, or if they would have to wait for one another too often. Where nothing
    needs gradients they run as the phase begins (`PackedCalls.resolve`).
    """
    table, packed = run.table, run.resolver
    if table is None or not isinstance(packed, PackedCalls) or not packed.families or not len(program):
        return program
    packed.settled = len(packed.families)
    if program.known:
        return run.planner.take_rows_first(eliminate_dead(program))
    if not _waiting(program, packed.families_in(program)).any():
        return program
    program = run.planner.take_rows_first(met_alone(eliminate_dead(program)))
    if run.planner.options.deduplicate:
        program = _without_equal(program, packed.families_in(program))
    if run.runs_in_parts:
        return program
    before = 0
    while True:
        program = eliminate_dead(packed.resolve_as_columns(run, program))
        run.tensors = ValueTensors()  # values have other numbers now
        families = packed.families_in(program)
        waits = _waiting(program, families)
        left = int(waits.sum())
        if not left or (left >= before if before else _too_often(program, families, waits)):
            return _at_hand(program)
        before = left
        program = _run_first(run, table, program, waits, waits & (_segment_of(program, waits) == 0))


def _without_equal(program: Program, packed: Collection[int]) -> Program:
    """The program with each computation once, where packed calls are among those that come again: all rows of a
    sentence at each step of a decoder."""
    smaller = deduplicate(program)
    return smaller if _calls_of(smaller, packed).sum() < _calls_of(program, packed).sum() else program


def _too_often(program: Program, packed: Mapping[int, CallFamily], waits: np.ndarray) -> bool:
    """Whether packed calls would wait for one another too often, or rows of many small tensors are stacked, as of the
    neighbours of each node: there sums over stacks are additions."""
    stacks = _calls_of(program, [s for s, family in packed.items() if family.stacks])
    many = int(stacks.sum()) > STACKS * program.instances
    return many or int(_segment_of(program, waits).max()) > MOST


def _waiting(program: Program, packed: Mapping[int, CallFamily]) -> np.ndarray:
    """bool [calls]: packed calls, but stacks that become additions."""
    return _calls_of(program, packed) & ~summed_stacks(program)


def _segment_of(program: Program, packed: np.ndarray) -> np.ndarray:
    """int64 [calls]: after how many segments each call can run.

    A packed call runs at the end of the segment that gives it the last of its inputs, and so do packed calls that
    read it; what else reads it is in the next one.
    """
    columns = program.columns
    segment = np.zeros(len(program), dtype=np.int64)
    number_segments(program.sig, columns.width, columns.arity, program.inputs, packed, segment, program.known)
    return segment


def _run_first(
    run: Run, table: SignatureTable, program: Program, packed: np.ndarray, first: np.ndarray
) -> Program:
    """The program with constants in place of what the first of its packed calls wait for."""
    maker = program.call_of_value
    segment = calls_behind(program, program.inputs[first[program.reader]]) & ~packed
    constant = program.columns.constant[program.sig]
    ran = segment & ~constant
    read_later = np.concatenate([program.inputs[~ran[program.reader]], program.outputs])
    values = np.unique(read_later[ran[maker[read_later]]])
    part = _at_hand(select_calls(dataclasses.replace(program, outputs=values), segment))
    first_run = Run(run.planner, grad=run.grad)
    run.segments.append(first_run)
    outputs = first_run.finish(part, part.outputs)(part.outputs)
    kinds = first_run.value_type[outputs]
    every = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    work = _Resolution(program, ValueTensors())
    for mine, rows in zip(every, take_results(first_run, [outputs[x] for x in every]), strict=True):
        needs = first_run.value_needs[outputs[mine]]
        for need in np.unique(needs).tolist():  # attached to autograd
            places = np.flatnonzero(needs == need)
            column = PackedColumn.of_rows(rows if need else rows.detach())
            work.tensors.put(values[mine[places]], column, places)
    work.resolved |= ran
    return eliminate_dead(work.program_left(table))
