"""What a recorder has: the calls of a whole minibatch as columns, one row a call; its values, constants and phases.

In: calls (a signature's Entry and the ids of its inputs). Out: Values, and on demand an `ir.Program` of what
was recorded since the last phase. How a call of the user's becomes one is above this (`record.Recorder`).

    value = recorder.emit(entry, ids)
    program = recorder.pending_program([])       # and marks its calls as run
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fxbatch.errors import InPlaceError, TraceError
from fxbatch.ir import Modes, Operation, Program, SharedOperand, Signature, Template, TensorSpec
from fxbatch.mistakes import error_of_operation, refusal_of
from fxbatch.signature import Frozen, Numbers
from fxbatch.torch_private import any_autocast
from fxbatch.trace import torch_functions
from fxbatch.trace.argument_checks import ArgumentChecks
from fxbatch.trace.bare_parameters import Heard
from fxbatch.trace.constants import IntegerColumn
from fxbatch.trace.module_changes import ModuleChanges
from fxbatch.trace.module_state import Examined, ModulesMet, Owners, has_hooks, unchanged
from fxbatch.trace.operations import BodyRun
from fxbatch.trace.phases import Phases
from fxbatch.trace.places import Item, first_changed, versions_now, without_sizes, written_to
from fxbatch.trace.state import _fast, modes_now, new_call_table, new_column, state, tracing
from fxbatch.trace.table import CallArguments, Entry, SignatureTable, fix_uniform_numbers, operands_require
from fxbatch.trace.user_line import at_line, user_line
from fxbatch.trace.values import (
    CONSTANT,
    REQUIRES_GRAD,
    Value,
    Written,
    new_constants,
    new_value,
    new_values,
    refresh,
    value_of,
)

# Each recorder numbers its values from another multiple of this: values of other recordings are found.
_RANGE = 1 << 40
_STRIDED = torch.strided
_LAST = 64  # calls among which those are looked for that what is asked depends on
_ranges = itertools.count(1)


class Columns:
    """The recorder's state that each call reads or writes: slots, which C finds by their offsets."""

    __slots__ = (
        "base", "by_parts", "constants", "count", "filled", "graded", "heard", "inputs", "knowledge", "lifted",
        "made_by", "number_ids", "once", "payload", "row_calls", "settled", "sigs", "uses", "values", "views_met",
    )  # fmt: skip
    values: Any  # all Value objects of the recording
    # Ids of modules whose calls are recorded by their parts, as long as no hook is set; with types of arguments: whose
    # calls with such are.
    by_parts: set[int | tuple[int | type, ...]]
    base: int  # id of its first value
    views_met: dict[int, list[torch.Tensor]]  # of real tensors, by the id of what they are views of
    graded: bool  # whether some call was made with gradients on
    heard: Heard  # parameters that the user's code reads by itself
    sigs: Any  # signature id of each call
    inputs: Any  # value ids
    count: int  # id of the next value
    knowledge: Knowledge
    constants: Any  # the real tensors that were met
    settled: Any  # where C finds numbers that were computed, None where it doesn't
    payload: dict[int, Any]  # of the constants, by signature: a list, in merged traces maybe an IntegerColumn
    lifted: dict[int, bool]  # lifted signatures recorded since the last phase
    # By mode and type: the entry of `v[index]`, how many rows, and the numbers of the values that indices are. By mode,
    # type and type of a row: how many rows there are of values that such rows were written to.
    row_calls: dict[tuple[int, ...], Any]
    # By call of a factory, as C knows it: number and type of the value that it gave, None where it is to give one; and
    # the calls that gave real tensors, by their ids, which others may have by now.
    filled: dict[object, tuple[int, int] | None]
    made_by: dict[int, Any]
    # By call of a factory: what it made and became constants; None where values are asked for.
    uses: dict[tuple[object, ...], list[torch.Tensor]] | None
    once: dict[int, int]  # by signature, of calls of parameters alone: the number of the value that they gave
    # By lifted signature: the numbers of the values that its numbers are.
    number_ids: dict[int, dict[float, int]]


class Knowledge:
    """What a recording knows of torch's modes, modules and calls: the next one of its table goes on with it, where the
    modules are as they were. C finds the slots by their offsets."""

    __slots__ = (
        "autocast", "by_mode", "call_table", "constant_entries", "examined", "floats", "functions", "grad", "mode",
        "mode_key", "modules", "owners", "places", "read", "roots",
    )  # fmt: skip
    functions: dict[object, Any]  # entries of calls of functions, under these modes

    def __init__(self, roots: tuple[torch.nn.Module, ...]) -> None:
        self.roots = roots  # traced through, and searched for owners of parameters
        self.owners: Owners | None = None
        self.modules = _NO_MODULES  # all modules as they were when owners were found
        self.examined: dict[int, Any] = {}  # modules as they are
        self.call_table = new_call_table()  # of calls that were met before
        self.constant_entries: dict[object, Entry] = {}  # by (shape, dtype, device), and as C knows a type
        self.by_mode: dict[object, tuple[int, dict[object, object]]] = {}
        self.mode = -1  # number of torch's modes, part of the key of a known call
        self.mode_key: Any = None
        self.grad = False
        self.floats = torch.float32  # torch's default dtype
        # What any_autocast() must say; None never is: then each call takes the slow path.
        self.autocast: bool | None = None
        self.places: list[Item] | None = None  # what all of it depends on; None: something was added to it
        self.read: list[Item] = []  # and what the code of operations reads

    def note_places(self) -> None:
        """List the places of what was found, to be looked at before another recording goes on with it."""
        lasting = [x for x in self.examined.values() if x.lasts]  # others are to be looked at again
        if len(lasting) < len(self.examined):
            self.examined = {key: x for key, x in self.examined.items() if x.lasts}
        of_operations = {
            id(item.holder)
            for x in lasting
            if type(x) is Examined and not x.reason
            for item in x.places or ()
        }
        of_modules = without_sizes(self.modules.places or [], of_operations)
        self.places = [*of_modules, *(item for x in lasting for item in x.reads.items)]
        self.read = self.read_by_operations()

    def read_by_operations(self) -> list[Item]:
        """The places that the code of operations reads."""
        return [item for x in self.examined.values() if not x.reason for item in x.reads.items]


_NO_MODULES = ModulesMet({}, None, frozenset(), [], (), (), ())


class RecordedCalls(Columns):
    """Calls, values and constants of one minibatch, as columns. `sigs` and `inputs` hold what no phase has run yet."""

    # As each recording begins.
    ask: Callable[..., list[object]] | None = None  # gives real tensors or numbers, may suspend
    give: Callable[[list[Value]], list[torch.Tensor]] | None = None
    lasts = True  # whether what is known of them may be true in the next minibatch too
    watches_operands = False  # whether its calls run here and now, before the user's next step
    over = ""  # why no call can be added any more
    checks: ArgumentChecks | None = None  # that nobody waits for; None: all are waited for
    substituted: frozenset[int] = frozenset()  # ids of modules that a functional_call gives other tensors
    long_calls = 0  # calls of functions that Python recorded
    running = 0  # the instance whose code runs
    refused: TraceError | None = None  # the first refusal that was raised in an instance
    refusals = 0  # how many were
    seeded = ""  # where the forward has seeded torch's generator
    switched_on = ""  # where gradients were, in a forward that is called without
    # Parameters and buffers, with version at first sight.
    operands: Sequence[tuple[str, torch.Tensor, int]] = ()

    def __init__(
        self,
        table: SignatureTable,
        roots: Sequence[torch.nn.Module] = (),
        instances: int = 0,
        *,
        recalls: bool = False,
    ) -> None:
        """recalls: begin with what the last recorder of this table knew of the modules, and leave it to the next."""
        self.table = table
        self.instances = instances
        self.recalls = recalls
        self.graded = torch.is_grad_enabled()
        self.values = new_values()
        self.sigs, self.inputs = new_column(), new_column()
        self.starts: list[int] = [0]  # run-length instance column: run k starts at call starts[k] ...
        self.runs: list[int] = [0]  # ... and belongs to instance runs[k]
        self.payload, self.lifted = {}, {}
        self._know_nothing()
        self.uses = None if table.used is None else {}
        self.heard = Heard()
        # Real tensors that values were written to, by id; one that nobody refers to leaves it.
        self.written: dict[int, tuple[weakref.ref[torch.Tensor], Written]] = {}
        self.lent: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and buffers, and their .data
        self.local: set[int] = set()  # ids of modules and parameters that forwards have made
        self.by_parts = set()
        self.free_to_set: set[tuple[int, str]] = set()  # attributes of modules: (id of the module, name)
        roots = tuple(roots)
        recalled = self._recalled(roots) if recalls else None
        self.knowledge = recalled or Knowledge(roots)
        self.sync_modes()
        self.plain_operands: dict[tuple[int, str], tuple[SharedOperand, torch.Tensor, int]] = {}
        if recalled is not None:
            self.operands = versions_now(recalled.modules.operands)
            for examined in self.knowledge.examined.values():
                self._watch_plain_operands(examined)
            self.heard.parameters = recalled.modules.bare
        elif recalls:
            self.look_at_modules()
        self.changes = ModuleChanges(self.knowledge.modules.containers if recalls else ())

    def _know_nothing(self) -> None:
        """No call was recorded and no tensor met: values are of another range from here on."""
        self.base = self.count = next(_ranges) * _RANGE
        self.constants, self.settled, self.views_met = new_constants(), None, {}
        self.numbers: dict[object, Value] = {}
        self.parameter_rows: dict[object, Value] = {}  # of the pending calls (trace/arguments.py)
        self.number_of: dict[int, Numbers] = {}  # value id -> lifted number
        self.row_calls, self.number_ids, self.once = {}, {}, {}
        self.index_numbers: dict[torch.device, dict[int, int]] = {}
        self.filled, self.made_by = dict.fromkeys(self.table.filled), {}
        self.phases = Phases(self.table)  # that have run

    # Modes

    def sync_modes(self) -> None:
        """Look at torch's modes again, and use the tables of these modes."""
        knowledge = self.knowledge
        knowledge.grad = grad = torch.is_grad_enabled()
        if grad and not self.graded:
            self.graded, self.switched_on = True, at_line()
        usual = knowledge.autocast is False and not any_autocast()
        if usual and knowledge.mode_key.grad is grad and torch.get_default_dtype() is knowledge.floats:
            return
        knowledge.autocast = None if any_autocast() else False
        key = modes_now()
        knowledge.floats = key.default_dtype
        if key != knowledge.mode_key:
            knowledge.mode_key = key
            if key not in knowledge.by_mode:
                functions = self.table.entries.setdefault(("by mode", key), {})
                knowledge.by_mode[key] = (len(knowledge.by_mode), functions)
            knowledge.mode, knowledge.functions = knowledge.by_mode[key]

    def modes(self, training: bool = False, *, detaches: bool = False) -> Modes:
        """The modes of a signature made now. detaches: it hands no gradient on, as under no_grad."""
        now: Modes = self.knowledge.mode_key
        return replace(now, training=training, grad=now.grad and not detaches)

    def signed(
        self,
        called: Operation,
        inputs: Sequence[TensorSpec],
        shared: Sequence[SharedOperand],
        arguments: Template,
        outcome: BodyRun,
        *,
        training: bool = False,
        names: tuple[str, ...] = (),
        reason: str = "",
        frozen: Frozen | None = None,
    ) -> Entry:
        """The entry of a call that was not met before: its signature, with an id from here on. names: of the shared
        operands that are the module's own; reason: why it is not to be batched."""
        operation = self.table.operation(replace(called, random=outcome.random))
        inputs, modes = tuple(inputs), self.modes(training, detaches=outcome.detaches(inputs))
        signature = Signature(
            operation, inputs, outcome.outputs, tuple(shared), arguments, outcome.result, modes, names, user_line(),
            reason, frozen,
        )  # fmt: skip
        return self.table.add(signature, outcome)

    def new_entry(
        self,
        key: object,
        make: Callable[[], Any],
        arguments: CallArguments | None = None,
        of: object = None,
    ) -> Any:
        """What calls of functions with this key are recorded as, under these modes, and their Entry where they are:
        `make` says it, once. arguments: of one that may be of a family for all sizes, of this function."""
        functions, sized = self.knowledge.functions, self.table.sized
        with self.table.lock, tracing(None):
            entry = functions.get(key)
            if entry is None and sized is not None and arguments is not None:
                entry = sized.entry(functions, arguments, of=of)
            if entry is None:
                entry = make()
                if sized is not None and arguments is not None and type(entry) is Entry and not entry.written:
                    sized.met(functions, arguments, (key, entry), of=of)
            functions[key] = entry
        return entry

    def attribute_changes(self, module: torch.nn.Module, name: str, *value: object) -> None:
        """The instance that runs is about to give an attribute of a module this value, or to delete it."""
        if id(module) in self.knowledge.modules.seen:  # others are the instance's own
            self.changes.note(module, name, *value)

    def refuse(self, error: Exception, *, may_loop: bool) -> None:
        """The recording has failed. Unless that is the user's own error, modules become what they were, and a
        TraceError says whether they are. may_loop: whether a mistake inside fxbatch becomes one."""
        hides = may_loop and not self.table.verify
        refusal = error if isinstance(error, TraceError) else refusal_of(error) if hides else None
        if refusal is None and may_loop:
            refusal = error_of_operation(error)
        if refusal is None:
            return
        were_set = self.changes.attributes  # by instances, and are put back
        undone, refusal.begun = self.changes.undo(), self.changes.begun
        changed = set(self._changed_plain_operands()) - were_set
        refusal.again = undone and written_to(self.operands) is None and not changed
        if refusal is not error and (refusal.again or not refusal.of_operation):
            raise refusal from error

    def forget_modules(self, module: torch.nn.Module | None = None) -> None:
        """Validate modules again at their next call: a mode, a parameter or a hook of one has changed, of this module
        where it is known; an instance's own is of no account."""
        if id(module) in self.local:
            return
        knowledge = self.knowledge
        knowledge.places = knowledge.owners = None
        knowledge.call_table.clear()
        knowledge.examined.clear()
        self.heard.forget()
        self.by_parts.clear()
        self.by_parts |= self.substituted
        self.free_to_set.clear()
        self.lasts = False

    def has_examined(self, record: object, examined: object) -> None:
        """It is known now what the operation of this module or function reads."""
        self.knowledge.examined[id(record)], self.knowledge.places = examined, None
        self.free_to_set.clear()
        self._watch_plain_operands(examined)

    def _watch_plain_operands(self, examined: object) -> None:
        """Note how tensors are which are no parameters or buffers, but plain attributes of an operation's modules."""
        if type(examined) is Examined and not examined.reason:
            for o in examined.plain:
                if not (t := o.resolve()).is_inference():
                    self.plain_operands.setdefault(o.key, (o, t, t._version))

    def has_set(self, module: torch.nn.Module, name: str) -> None:
        """An attribute has been set: the change is noted."""
        key = id(module), name
        if name != "training" and name in module.__dict__ and not self.is_read(module, name):
            self.free_to_set.add(key)
        else:
            self.free_to_set.discard(key)

    def is_read(self, module: torch.nn.Module, name: str) -> bool:
        """Whether the code of an operation, or its tensors, are of this name: none is of a module with hooks."""
        examined = () if has_hooks(module) else self.knowledge.examined.values()
        return any(name in x.attributes for x in examined if not x.reason)

    # Calls

    def begin(self, instance: int) -> None:
        """The calls from here on belong to this instance."""
        if self.runs[-1] != instance:
            if self.starts[-1] == len(self.sigs):
                self.runs[-1] = instance
            else:
                self.starts.append(len(self.sigs))
                self.runs.append(instance)

    def emit(self, entry: Entry, inputs: Sequence[Value]) -> Any:
        """Record one call; its result with Values."""
        return entry.result(self.row(entry, inputs)) if _fast is None else _fast.emit(self, entry, inputs)

    def remember(
        self,
        func: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        entry: Entry,
        *,
        any_number: bool = False,
    ) -> None:
        """Calls like this one, of a function or a module, are recorded in C from now on; any_number: with any number
        in place of the one among its two arguments, which is an input of the entry."""
        if _fast is not None:
            _fast.remember(self, func, args, kwargs, entry, any_number)
            torch_functions.note(func)

    def row(self, entry: Entry, inputs: Sequence[Value]) -> list[Value]:
        """Record one call; its outputs as a flat list."""
        self.sigs.append(entry.sid)
        self.inputs.extend([v._value for v in inputs])
        flags = [0] * len(entry.types)
        asked = entry.carries and any(v._flags & REQUIRES_GRAD for v in inputs)
        if asked or (entry.carries and operands_require(entry.operands)):
            flags = [carried >> 1 for carried in entry.carries]
        first = self.count
        self.count += len(flags)
        outputs = enumerate(zip(entry.types, flags, strict=True), first)
        return [new_value(self, number, t, flag) for number, (t, flag) in outputs]

    def value(self, number: int, type_id: int) -> Value:
        """A Value object with this id, of which nothing but the type is known: it may require a gradient."""
        flags = REQUIRES_GRAD if torch.is_grad_enabled() and self.table.types[type_id].differentiable else 0
        return new_value(self, number, type_id, flags)

    def let_go(self) -> list[Value]:
        """No more calls, and nothing here refers to values any more: those that the user refers to."""
        self.numbers, self.parameter_rows, self.row_calls, self.index_numbers = {}, {}, {}, {}
        self.number_ids, self.once, self.filled, self.uses = {}, {}, {}, None
        self.constants.let_go()
        used: list[Value] = self.values.close()
        return used

    def take_written(self) -> list[tuple[torch.Tensor, Written]]:
        """The user's tensors that stand for values and are still there. They are no more followed."""
        alive = [(t, record) for ref, record in self.written.values() if (t := ref()) is not None]
        self.written.clear()  # the weak references go: a tensor that has some can't be exchanged
        return alive

    def finish(self) -> None:
        """No more calls: a value that is used from here on is an error with the user's line."""
        if self.recalls:
            self._refuse_unseen_changes()
            self._leave_known()
        self.over = "its minibatch is over"
        self.settled = self.ask = None

    def _refuse_unseen_changes(self) -> None:
        """Code and attributes that operations read must not change past nn.Module.__setattr__ while instances run."""
        knowledge = self.knowledge
        read = knowledge.read_by_operations() if knowledge.places is None else knowledge.read
        changed = first_changed(read, far=False)
        if changed is not None:
            raise TraceError(
                f"{changed.path} was changed while instances ran, in a way that can't be seen at each call: set "
                "attributes of modules as attributes, not through __dict__, and don't replace code there"
            )

    def call(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Record a call of a torch function (`record.Recorder`)."""
        raise NotImplementedError

    def read(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """Real detached tensors of the values; may suspend the instance."""
        return self._ask([refresh(v) for v in values], False)

    def read_plain(self, v: Value) -> Any:
        """A value as Python numbers in nested lists; may suspend the instance."""
        return self._ask([refresh(v)], True)[0]

    def is_argument_check(self, v: Value) -> bool:
        """Whether a boolean that is asked for is a check of `torch.distributions`, which is looked at later."""
        if self.checks is None or self.over or not len(sigs := self.sigs) or v._value != self.count - 1:
            return False
        if not self.checks.is_one(self.table.signatures[sigs[len(sigs) - 1]]):
            return False
        self.checks.add(v, self.running)
        return True

    def _ask(self, values: list[Value], plain: bool) -> list[Any]:
        if self.ask is None:
            raise TraceError(
                f"a value was asked for after its minibatch was over: use the results of the call{at_line()}"
            )
        return self.ask(values, plain)

    def is_real(self, tensor_of: Callable[[Value], torch.Tensor | None]) -> None:
        """The call is over, and its values that somebody holds are these tensors."""

        def give(values: Sequence[Value]) -> list[torch.Tensor]:
            tensors = [tensor_of(v) for v in values]
            if any(t is None for t in tensors):
                raise TraceError(
                    "a value of a finished call was used, which nobody held when the call ended: keep results "
                    f"instead{at_line()}"
                )
            return [t for t in tensors if t is not None]

        def answer(values: Sequence[Value], plain: bool) -> list[Any]:
            real = [t.detach() for t in give(values)]
            return [x.tolist() for x in real] if plain else real

        self.give, self.ask = give, answer

    def tensor(self, v: Value) -> torch.Tensor | None:
        """The tensor that a value has become, None while its call goes on."""
        return self.give([v])[0] if self.over and self.give is not None else None

    def real_tensor(self, v: Value, refusal: str) -> torch.Tensor:
        """The tensor that a value has become; TraceError with this text while its call goes on."""
        real = self.tensor(v)
        if real is None:
            raise TraceError(f"{refusal}{at_line()}")
        return real

    def can_read(self) -> bool:
        """Whether a value can be asked for now, here."""
        return self.ask is not None and (state.recorder is self or bool(self.over))

    def requires_grad(self, v: Value) -> bool:
        """Whether an eager tensor would require a gradient here."""
        real = self.tensor(v)
        if real is not None:
            return real.requires_grad
        if state.recorder is self and not hasattr(v, "_rows"):
            refresh(v)
        return bool(v._flags & REQUIRES_GRAD)

    def gradient_switched(self, t: torch.Tensor) -> None:
        """Whether t requires a gradient is about to change: refused where a call has used it the other way."""
        if self.constants.get(t) is not None or self._has_used(t):
            owner = self.owner_of(t)
            name = f"{type(owner[0]).__name__}.{owner[1]}" if owner is not None else "a tensor"
            raise TraceError(
                f"requires_grad of {name} changes after a call has used it: all calls of a minibatch see the one of "
                f"its end; use detach() or no_grad() for those calls, or change it outside the forward{at_line()}"
            )

    def operand_replaced(self, module: torch.nn.Module, name: str, new: torch.Tensor) -> None:
        """A tensor of a module is about to be another one: refused where a call has used the one before."""
        of_torch = name in module._parameters or name in module._buffers
        if not of_torch and type(new) is torch.Tensor:
            self.table.tensors_set.setdefault(id(module), set()).add(name)
        for table in (module.__dict__, module._parameters, module._buffers):
            t = table.get(name)
            if not isinstance(t, torch.Tensor) or t is new or not (of_torch or self.is_read(module, name)):
                continue
            if self._has_used(t):
                raise TraceError(
                    f"{type(module).__name__}.{name} is replaced after a call has used it: all calls of a minibatch "
                    f"see the one of its end; keep it in a local variable, or in another attribute{at_line()}"
                )

    def _has_used(self, t: torch.Tensor) -> bool:
        """Whether a call of this minibatch has a parameter or buffer as its shared operand."""
        met = [*(sig for sig, _ in self.phases.columns), np.array(self.sigs, dtype=np.int64)]
        used = np.unique(np.concatenate(met)).tolist()
        return any(o.resolve() is t for s in used for o in self.table.signatures[s].shared)

    # What one minibatch finds out of the modules, for the next

    def _recalled(self, roots: tuple[torch.nn.Module, ...]) -> Knowledge | None:
        """What the last recorder of this table knew, if every module of its trees is as it was. It is taken out of the
        table while in use: another thread begins anew."""
        with self.table.lock:
            knowledge: Knowledge | None = self.table.knowledge
            self.table.knowledge = None
        if knowledge is None or len(knowledge.roots) != len(roots):
            return None
        same = all(map(operator.is_, knowledge.roots, roots)) and unchanged(knowledge.places)
        return knowledge if same else None

    def _leave_known(self) -> None:
        """After the last instance: leave what this knows in the table, if no module changed meanwhile."""
        knowledge = self.knowledge
        if not self.lasts or knowledge.owners is None or not (_fast is None or knowledge.call_table.lasts()):
            return
        if knowledge.places is None:
            knowledge.note_places()
        with self.table.lock:
            self.table.knowledge = knowledge

    def look_at_modules(self) -> Owners:
        """Look at all modules: whose each parameter and buffer is, and how the modules are now."""
        knowledge = self.knowledge
        knowledge.places = None
        versions = {id(t): version for _, t, version in self.operands}
        modules = ModulesMet.of((*knowledge.roots, *self.table.owners.values()), versions)
        knowledge.modules, knowledge.owners = modules, modules.owners
        self.heard.parameters = modules.bare
        self.lasts = self.lasts and modules.places is not None
        # A lazy block may outlast an optimizer's step.
        self.operands = modules.operands if self.recalls else ()
        return modules.owners

    # Constants, numbers, shared operands

    def constant(self, t: torch.Tensor) -> Value | None:
        """The value of a real tensor; None when it is a shared operand."""
        if self.written and id(t) in self.written:
            return value_of(t)
        hit: Value | None = self.constants.get(t)
        if hit is not None:
            return hit
        owners = self.knowledge.owners
        if owners is None:
            owners = self.look_at_modules()
        if id(t) in owners:
            return None
        return self.constant_of_own(t)

    def keep_content(self, t: torch.Tensor) -> None:
        """The memory of a tensor may be written to unseen from here on: pending calls read what it holds now."""
        base = t if type(t) is not torch.Tensor or t._base is None else t._base
        for x in (base, t, *self.views_met.pop(id(base), [])):
            if self.constants.get(x) is not None:
                self.hold_a_copy(x)

    def hold_a_copy(self, t: torch.Tensor) -> None:
        """Nothing that was recorded of a tensor until now refers to it any more."""
        with torch.set_grad_enabled(t.requires_grad):
            copy = t.clone()
        self.hold_instead(t, copy, but_lost=True)

    def hold_instead(self, t: torch.Tensor, other: torch.Tensor, *, but_lost: bool = False) -> None:
        """What was recorded of a tensor until now is of another one from here on, which has the content that it had.
        but_lost: unless it was written to since and calls are pending that read what it held before."""
        met = self.constants.exchange(t, other, but_lost)
        if met is None:
            return
        v, place = met
        sid = self.knowledge.constant_entries[other.shape, other.dtype, other.device].sid
        ran = v._value - self.base < self.phases.known
        for payload in self.phases.constants if ran else (self.payload,):
            rows = payload.get(sid, ())
            if place < len(rows) and rows[place] is t:
                rows[place] = other

    def constant_of_own(self, t: torch.Tensor) -> Value:
        """The value of a real tensor that is met now."""
        if t.layout is not _STRIDED:
            raise TraceError(
                f"a recorded tensor was used with one of {t.layout}: only strided ones can be{at_line()}"
            )
        entries, key = self.knowledge.constant_entries, (t.shape, t.dtype, t.device)
        entry = entries.get(key)
        if entry is None:
            entry = entries[key] = self.table.constant(TensorSpec.of(t))
        kind = _fast.kind_of(t) if _fast is not None and t.dim() <= 5 else None
        if kind is not None:  # C finds the next one
            entries[kind] = entry
        v: Value = self.emit(entry, ())
        v._flags = CONSTANT | REQUIRES_GRAD if t.requires_grad else CONSTANT
        payload = self.payload.setdefault(entry.sid, [])
        payload.append(t)
        self.constants.put(t, v, len(payload) - 1)
        return v

    def number(self, number: float, dtype: torch.dtype, device: torch.device) -> Value:
        """The value of a lifted Python number; equal numbers of a minibatch are one value."""
        key = (dtype, device, number, str(number) if number == 0 else "")
        v = self.numbers.get(key)
        if v is None:
            entry = self.table.number(dtype, device)
            v = self.emit(entry, ())
            self.payload.setdefault(entry.sid, []).append(number)
            self.numbers[key] = v
            self.number_of[v._value] = number
        return v

    def number_id(self, entry: Entry, place: int, number: float) -> int:
        """The number of the value that is input `place` of a lifted call."""
        t = entry.signature.inputs[place]
        value: int = self.number(number, t.dtype, t.device)._value
        if number:  # zeros are equal, and have signs
            self.number_ids.setdefault(entry.sid, {})[number] = value
        return value

    def of_parameters(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """The tensors of values that calls of parameters alone gave, for which nobody has to wait; nothing where there
        are others among them."""
        by_number = {number: sid for sid, number in self.once.items()}
        sids = [by_number.get(v._value) for v in values]
        signatures = [self.table.signatures[sid] for sid in sids if sid is not None]
        if len(signatures) < len(sids):
            return []
        with torch.no_grad():
            return [s.run((), [x.resolve() for x in s.shared])[0] for s in signatures]

    def owner_of(self, t: torch.Tensor) -> tuple[torch.nn.Module, str] | None:
        """The module and name of a parameter or buffer of the modules met; None for other tensors."""
        owners = self.knowledge.owners
        if owners is None:
            owners = self.look_at_modules()
        return owners.get(id(t))

    def shared_operand(self, t: torch.Tensor) -> SharedOperand | None:
        """The shared operand that t is, None when it is no parameter or buffer, or one that an instance has made."""
        owner = self.owner_of(t)
        if owner is not None:
            return SharedOperand(*owner)
        shared = isinstance(t, torch.nn.Parameter) and id(t) not in self.local
        return SharedOperand(None, "", t) if shared else None

    # Types

    def type_of(self, v: Value) -> TensorSpec:
        """The tensor type of a value."""
        return self.table.types[v._type]

    # Phases

    def has_run(self, v: Value) -> bool:
        """Whether a phase has run the call of a value, and its numbers are at hand."""
        return v._value - self.base < self.phases.known and self.table.types[v._type].device.type == "cpu"

    def last_calls(self) -> Iterator[tuple[Signature, int, int]]:
        """The last calls that wait for a phase, the newest first: its signature, the number of the first value that it
        gives, and where what it reads begins in `inputs`."""
        signatures, sigs, first, end = self.table.signatures, self.sigs, self.count, len(self.inputs)
        for i in range(len(sigs) - 1, max(len(sigs) - _LAST, 0) - 1, -1):
            s = signatures[sigs[i]]
            first, end = first - len(s.outputs), end - len(s.inputs)
            yield s, first, end

    def exact(self, v: Value, numbers: Callable[[int], Numbers]) -> Numbers:
        """What the last calls gave as numbers, where that is exact alone and all that they read has run; None for
        other values. numbers: gives those of a value that has run."""
        if not len(sigs := self.sigs) or not self.table.signatures[sigs[len(sigs) - 1]].is_exact:
            return None
        column, needed, ran = self.inputs, {v._value}, self.base + self.phases.known
        calls: list[tuple[Signature, int, list[int]]] = []
        for s, first, end in self.last_calls():
            width, reads = len(s.outputs), len(s.inputs)
            if first not in needed if width == 1 else needed.isdisjoint(range(first, first + width)):
                continue
            if not s.is_exact:
                return None
            inputs = [column[end + k] for k in range(reads)]
            calls.append((s, first, inputs))
            needed.difference_update(range(first, first + width))
            needed.update([n for n in inputs if n >= ran and n not in self.number_of])
            if not needed:
                break
        if needed:
            return None
        of: dict[int, Numbers] = {}
        for s, first, inputs in reversed(calls):
            for n in inputs:
                if n not in of:
                    lifted = self.number_of.get(n)
                    of[n] = numbers(n) if lifted is None else lifted
            of.update(enumerate(s.numbers([of[n] for n in inputs]), first))
        return of[v._value]

    def pending_program(self, outputs: Sequence[int] | np.ndarray) -> Program:
        """The calls since the last phase as a Program; they count as run from here on."""
        table, self.settled = self.table, None
        constants = self._payload_as_read() if self.payload else {}
        sig, inputs = self._columns()
        if self.lifted:
            sig, inputs = fix_uniform_numbers(table, sig, inputs, self.lifted, self.number_of, self.base)
        self._refuse_written_operands(sig)
        signatures, columns = table.snapshot_and_columns()
        if self.seeded and columns.random[sig].any():
            raise TraceError(
                "the forward seeds torch's generator, and its calls draw once all instances have: give them a "
                f"torch.Generator of their own{self.seeded}"
            )
        program = Program.of(
            columns,
            signatures=signatures,
            sig=sig,
            inputs=inputs,
            instance=self._instances(len(sig)),
            outputs=np.array(outputs, dtype=np.int64),
            constants=constants,
            known=self.phases.known,
            early_types=functools.partial(self.phases.types, self.phases.known),
            instances=self.instances,
        )
        self.phases.add(sig, inputs, self.payload, self.count - self.base)
        self.sigs, self.inputs = new_column(), new_column()
        self.payload, self.lifted, self.parameter_rows = {}, {}, {}
        self.constants.read()
        self.starts, self.runs = [0], [self.runs[-1]]
        return program

    def _columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Signatures as int32 [calls], inputs counted from 0 as int64 [inputs]; as merged traces have them."""
        if isinstance(self.sigs, np.ndarray):
            return self.sigs, self.inputs
        return np.array(self.sigs, dtype=np.int32), np.array(self.inputs, dtype=np.int64) - self.base

    def _instances(self, calls: int) -> np.ndarray:
        """int32 [calls]: the instance of each."""
        if len(self.runs) == 1:
            instances = np.empty(calls, dtype=np.int32)
            instances.fill(self.runs[0])
            return instances
        starts = np.array([*self.starts, calls], dtype=np.int64)
        return np.array(self.runs, dtype=np.int32).repeat(starts[1:] - starts[:-1])

    def begin_anew(self, read: Callable[[Sequence[int]], Sequence[torch.Tensor]]) -> int:
        """Forget all calls, of which none is pending: memory and numbers are as at the beginning. The values that
        somebody still refers to are constants of calls to come. read: gives real tensors of values. How many there are.
        """
        assert not self.pending, "calls that are forgotten have run"
        base, self.uses = self.base, None
        self._know_nothing()  # values that this alone has referred to are gone
        values: list[Value] = self.values.living()
        types = {v._value: v._type for v in values}
        tensors = read([number - base for number in types])
        numbers: dict[int, int] = {}
        for (number, kind), tensor in zip(types.items(), tensors, strict=True):
            entry = self.table.constant(self.table.types[kind])
            self.sigs.append(entry.sid)
            self.payload.setdefault(entry.sid, []).append(tensor)
            numbers[number] = self.count
            self.count += 1
        for v in values:
            v._value = numbers[v._value]
        return len(numbers)

    def final_program(self, outputs: Sequence[int] | np.ndarray) -> Program:
        """The last `pending_program` of a recording that is finished; its constants are let go."""
        program = self.pending_program(outputs)
        self.phases.constants.clear()
        return program

    def _payload_as_read(self) -> dict[int, Any]:
        """The constants of the pending calls: integers without dimensions as they were when they were met. Others must
        be so still."""
        columns, are_known = dict(self.payload), True
        for sid in self.payload.keys() & self.table.integers.keys():
            tensors = self.payload[sid]
            held = self.constants.integers(self.table.integers[sid]) if type(tensors) is list else None
            if held is not None and len(held) == 8 * len(tensors):
                columns[sid] = IntegerColumn.met(tensors, np.frombuffer(held, dtype=np.int64))
            else:
                are_known = False
        written = self.constants.written(are_known)
        if written is not None:
            raise InPlaceError(
                f"a tensor {self.table.types[written]} was written to after an operation had used it, before the "
                "operation ran: clone() it before the write"
            )
        return columns

    def _changed_plain_operands(self) -> list[tuple[int, str]]:
        """Those of them that are others by now, or were written to."""
        plain = self.plain_operands.items()
        return [
            k for k, (o, t, version) in plain if t._version != version or vars(o.owner).get(o.name) is not t
        ]

    def _refuse_written_operands(self, sig: np.ndarray) -> None:
        """A parameter, buffer or other tensor of a module that pending calls read must be as it was when the instances
        began."""
        plain = self._changed_plain_operands() if self.watches_operands else ()
        lent = {id(t) for t, data in self.lent if data._version}  # which counts writes of its own
        if not self.watches_operands or (written_to(self.operands) is None and not plain and not lent):
            return
        changed = lent.union(id(t) for _, t, version in self.operands if t._version != version)
        for s in np.unique(sig).tolist():
            for operand in self.table.signatures[s].shared:
                if operand.key in plain or id(operand.resolve()) in changed:
                    raise InPlaceError(
                        f"{type(operand.owner).__name__}.{operand.name}, which {self.table.signatures[s].name} reads, "
                        "was written to while instances ran: all instances share it, and its calls run after them; "
                        "write to it outside of the forward"
                    )

    @property
    def pending(self) -> int:
        """Calls that no phase has run yet."""
        return len(self.sigs)
