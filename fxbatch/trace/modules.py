"""Module calls while tracing: which are one operation, which are traced through.

In: `nn.Module.__call__`, patched while at least one thread traces. Out: recorded calls, or the module's own forward run
with Values.

    with patched():                 # this process
        with tracing(recorder):     # this thread
            cell(h, c)              # one row
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from fxbatch.errors import BatchCoupledError, FxbatchError, TraceError
from fxbatch.ir import Operation
from fxbatch.mistakes import report
from fxbatch.signature import Frozen, Twins, in_twins, structural_twin
from fxbatch.torch_private import DisableTorchFunctionSubclass, module_call, reparametrized
from fxbatch.trace.arguments import Arguments
from fxbatch.trace.module_state import (
    MANY_STATES,
    Examined,
    has_hooks,
    keeps_changing,
    keeps_statistics,
    unchanged,
)
from fxbatch.trace.operations import (
    MARKED,
    PLAIN_MODULE,
    TORCH_MODULE,
    BodyError,
    TooManyCallsError,
    is_marked,
    run_on_fakes,
)
from fxbatch.trace.places import first_changed
from fxbatch.trace.plain_objects import holds_others, why_not_plain
from fxbatch.trace.reads import Reads
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import quicken, state, tracing
from fxbatch.trace.table import GIVES_SAME, Entries, Entry, OpaqueArgumentError
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import Value, link_views

MANY_SHAPES = 8  # a submodule that meets more signatures than this is traced through
MANY_FAILED = 3  # and one that fails so often on fake tensors, as a recurrent layer on packed sequences does
MOST_CALLS = 128  # of torch in a body that is one operation: a loop over a sequence is traced through
LOOP_CALLS = 48  # of torch, from which on a body that makes other numbers of them for other arguments is a loop as well


@dataclass(slots=True, eq=False)
class ModuleRecord:
    """One module (or one marked method of it) in a table: what was examined, and its entries."""

    module: torch.nn.Module
    method: str | None
    examined: Examined | None = None  # as it was when last called in a new minibatch
    changed: str = ""  # what it reads that changed last
    failed: int = 0  # arguments with which it could not run on fake tensors
    through: str = ""  # why it is traced through from now on, whatever it is called with
    # (modes, structure) -> what it reads -> argument key -> Entry or reason
    variants: dict[object, dict[object, Entries]] = field(default_factory=dict)


def traced_call(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
    """`nn.Module.__call__` while some thread traces, for calls that were not met before."""
    recorder = state.recorder
    by_parts = set() if recorder is None else recorder.by_parts  # whatever it is given, or with these types
    met = id(self) in by_parts or (not kwargs and (id(self), *map(type, args)) in by_parts)
    if recorder is None or met or _passes_through(recorder, self, args):
        return module_call(self, *args, **kwargs)
    return call_module(recorder, self, args, kwargs)


def _passes_through(recorder: RecordedCalls, module: torch.nn.Module, args: tuple[object, ...]) -> bool:
    """Whether the forward has made this module for itself, as in `nn.NLLLoss()(x, label)`: no other call of it comes
    again, so its parts are recorded. One of torch's own is given values, real tensors beside them at most."""
    if id(module) not in recorder.local or is_marked(module):
        return False
    if _rule(module, None) is TORCH_MODULE:
        kinds = set(map(type, args))
        return Value in kinds and kinds <= {Value, torch.Tensor}
    _refuse_what_cannot_be_seen(module)
    return True


def call_module(
    recorder: RecordedCalls,
    module: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    marked: object = None,
) -> object:
    """A module call that the fast path did not settle. marked: a method of it that is called, which is `@operation`."""
    quicken((type(module),))
    recorder.sync_modes()
    call = ModuleCall(recorder, module, args, kwargs, marked)
    is_root = any(module is r for r in recorder.knowledge.roots)
    return call.through() if is_root and marked is None else _recorded(call)


@dataclass(slots=True)
class ModuleCall:
    """A call of a module, or of a method of it that is marked."""

    recorder: RecordedCalls
    module: torch.nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, Any]
    marked: Any = None  # the method

    @property
    def method(self) -> str | None:
        """The name of the method."""
        return None if self.marked is None else self.marked.__name__

    def through(self) -> object:
        """Run it: its parts are recorded."""
        return (self.marked or module_call)(self.module, *self.args, **self.kwargs)

    def pass_through(self) -> object:
        """Run what is no operation; what torch's own modules and their hooks see are values."""
        tensors = all(isinstance(x, torch.Tensor) for x in self.args)
        if tensors and self.marked is None and _rule(self.module, None) is TORCH_MODULE:
            arguments = Arguments(self.recorder, self.args, {})
            with contextlib.suppress(OpaqueArgumentError):
                arguments.key()
            if len(arguments.values) == len(self.args):
                return module_call(self.module, *arguments.values, **self.kwargs)
        return self.through()

    def note(self, reason: str) -> None:
        """Remember why it is no operation."""
        _note(self.recorder, self.module, self.method, reason)


def _recorded(call: ModuleCall) -> object:
    _refuse_what_cannot_be_seen(call.module)
    recorder, module = call.recorder, call.module
    if recorder.knowledge.owners is None:
        recorder.look_at_modules()
    tensors = (x for m in module.modules() for x in (*m._parameters.values(), *m._buffers.values()))
    unseen = id(module) not in recorder.knowledge.modules.seen and all(x is None for x in tensors)
    if (unseen or id(module) in recorder.local) and call.marked is None and not is_marked(module):
        call.note("is no part of the model")
        return call.pass_through()
    record = _record(recorder, module, call.method)
    examined = recorder.knowledge.examined.get(id(record))
    by_parts = record.through or (examined is not None and examined.reason)
    if by_parts:  # they are exact whatever has changed since
        if call.marked is None and _rule(module, None) is not TORCH_MODULE:
            recorder.by_parts.add(id(module))
        return call.pass_through()
    if _rule(module, call.method) is not TORCH_MODULE and (reason := why_not_plain(call.args, call.kwargs)):
        call.note(reason)
        if call.marked is None and not call.kwargs and any(map(holds_others, call.args)):
            recorder.by_parts.add((id(module), *map(type, call.args)))
        return call.through()
    arguments = Arguments(recorder, call.args, call.kwargs)
    try:
        key = arguments.key()
    except OpaqueArgumentError as error:
        call.note(str(error))
        return call.through()
    if not arguments.values:
        if not call.args and not call.kwargs and _rule(module, call.method) is PLAIN_MODULE:
            recorder.by_parts.add((id(module),))
        alone = _rule(module, None) is TORCH_MODULE and not has_hooks(module)
        with DisableTorchFunctionSubclass() if alone else contextlib.nullcontext():  # parameters are bare
            return call.through()
    entry = _entry(call, record, arguments, key)
    if type(entry) is not Entry:
        return call.pass_through()
    entry.guards = recorder.knowledge.examined[id(record)].guards or None
    by_itself = call.marked is None and module is record.module
    in_forward = recorder.ask is not None  # else the call is made to find its signature again
    if by_itself and in_forward and entry.gives_first and arguments.begin_with_value:
        entry.written_as = GIVES_SAME  # dropout in eval: the user's own object
        recorder.remember(module, call.args, call.kwargs, entry)
        return call.args[0]
    result = recorder.emit(entry, arguments.values)
    if entry.aliases:
        link_views(entry, result, arguments.values, None, functools.partial(_recorded, call))
    elif by_itself and not arguments.copied:
        recorder.remember(module, call.args, call.kwargs, entry)
    return result


def _entry(call: ModuleCall, record: ModuleRecord, arguments: Arguments, key: object) -> Entry | str:
    """The entry of a call, or why it is no operation."""
    recorder, examined = call.recorder, _examined(call.recorder, record)
    if examined.reason:
        call.note(examined.reason)
        return examined.reason
    if examined.coupled and not keeps_statistics(record.module):
        return f"holds {examined.coupled} in training"  # which may never be called
    if examined.coupled:
        raise BatchCoupledError(
            f"{examined.coupled} in training would mix instances or change running statistics, which all instances "
            f"share: use eval(), or GroupNorm or LayerNorm instead{at_line()}"
        )
    entries = examined.entries.get(recorder.knowledge.mode_key)
    if entries is None:
        alike = record.variants.setdefault((recorder.knowledge.mode_key, examined.structure), {})
        if len(alike) >= MANY_STATES and examined.reads.key not in alike:
            return _from_now_on(recorder, record, keeps_changing(record.changed))
        entries = examined.entries[recorder.knowledge.mode_key] = alike.setdefault(examined.reads.key, {})
    entry: Entry | str | None = entries.get(key)
    return _new_entry(record, examined, entries, key, arguments) if entry is None else entry


def _from_now_on(recorder: RecordedCalls, record: ModuleRecord, reason: str) -> str:
    """A module is traced through, since building one more operation of it would not pay."""
    recorder.lasts = False  # its known calls would go on being one operation
    record.through = reason
    _note(recorder, record.module, record.method, reason)
    return reason


def _refuse_what_cannot_be_seen(module: torch.nn.Module) -> None:
    """Modules whose calls have effects that no recording of tensor functions has."""
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise TraceError(
            f"{name} is a TorchScript module, whose code can't be recorded: use the module that it was made "
            f"from{at_line()}"
        )
    classes = [c.__module__ for c in type(module).__mro__ if c.__name__ == "FSDPModule"]
    if any(home.startswith("torch.distributed") for home in classes):
        raise TraceError(
            f"{name} was given to fully_shard by itself: its parameters are whole only while it runs, and what it "
            f"does runs later, batched; call fully_shard on the root module alone{at_line()}"
        )
    if module._backward_hooks or module._backward_pre_hooks:
        raise TraceError(
            f"{name} has a full backward hook: gradients of a minibatch never pass one call by itself; "
            f"register a hook on its parameters, or on a result{at_line()}"
        )


def _record(recorder: RecordedCalls, module: torch.nn.Module, method: str | None) -> ModuleRecord:
    table = recorder.table
    record = table.modules.get((id(module), method))
    if record is None:
        with table.lock:
            record = table.modules.setdefault((id(module), method), ModuleRecord(module, method))
            recorder.local.discard(id(module))
            if not any(module is m for r in recorder.knowledge.roots for m in r.modules()):
                table.owners.setdefault(id(module), module)
                recorder.knowledge.owners, recorder.lasts = None, False
    return record


def _examined(recorder: RecordedCalls, record: ModuleRecord) -> Examined:
    """The record's module as it is: looked at once a minibatch, and anew where it changed."""
    examined = recorder.knowledge.examined.get(id(record))
    if examined is not None and not examined.reads.near():
        recorder.forget_modules()
        examined = None
    if examined is None:
        examined = record.examined
        if examined is None:
            reads = Reads.of_module(record.module, record.method)
            examined = record.examined = Examined(record.module, reads)
        elif not unchanged(examined.places):
            changed = first_changed(examined.reads.items)
            record.changed = record.changed if changed is None else changed.path
            examined = record.examined = Examined(record.module, examined.reads.again())
        if not examined.reason and (name := _set_by_instances(recorder, record.module, examined)):
            examined.reason = f"reads {name}, a tensor that instances set"
        recorder.has_examined(record, examined)
        if id(record.module) not in recorder.knowledge.modules.seen:  # it may change unseen
            recorder.lasts = False
    return examined


def _set_by_instances(recorder: RecordedCalls, module: torch.nn.Module, examined: Examined) -> str:
    """An attribute that the body reads to which instances give tensors of their own, "" where there is none."""
    met = recorder.table.tensors_set
    names = (
        f"{type(m).__name__}.{n}"
        for m in module.modules()
        for n in met.get(id(m), ())
        if n in examined.reads.names
    )
    return next(names, "") if met else ""


def _note(recorder: RecordedCalls, module: torch.nn.Module, method: str | None, reason: str) -> None:
    name = type(module).__name__ + (f".{method}" if method else "")
    recorder.table.note_traced_through(name, reason)


def _rule(module: torch.nn.Module, method: str | None) -> str:
    if method is not None or is_marked(module):
        return MARKED
    home = type(module).__module__
    leaf = home.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, torch.nn.Sequential)
    return TORCH_MODULE if leaf else PLAIN_MODULE


def _new_entry(
    record: ModuleRecord, examined: Examined, entries: Entries, key: object, arguments: Arguments
) -> Entry | str:
    """The entry of a call that was not met before, or why it is no operation."""
    recorder, module, method = arguments.recorder, record.module, record.method
    recorder.knowledge.places = None  # what is known of the module may be more then
    arguments.first_shared = len(examined.names)
    rule = _rule(module, method)
    with recorder.table.lock, tracing(None):
        entry = entries.get(key)
        if entry is not None:
            return entry
        sized = recorder.table.sized
        if sized is not None and (entry := sized.entry(entries, arguments)) is not None:
            entries[key] = entry
            return entry
        met = _signatures_met(recorder, record, examined) if rule is PLAIN_MODULE else {}
        if len(met) >= MANY_SHAPES:
            if sized is not None and sized.awaits(entries, arguments):
                return "one function for all its sizes is not built yet"  # its parts, this once
            many = f"met more than {MANY_SHAPES} signatures: its parts batch better"
            return _from_now_on(recorder, record, many)
        try:
            entry = _signature(record, examined, rule, arguments)
            if rule is PLAIN_MODULE and _loops({**met, key: entry}):
                raise TooManyCallsError("loops over a sequence: the steps of all instances batch better")
        except TooManyCallsError as error:
            return _from_now_on(recorder, record, str(error))
        except FxbatchError:
            raise
        except Exception as error:  # noqa: BLE001 - traced through, its parts raise again what is the user's own mistake
            report(error, _name(recorder, module), verify=recorder.table.verify)
            entry = str(error) if isinstance(error, BodyError) else first_line(error)
            _note(recorder, module, method, entry)
            record.failed += 1
            if record.failed == MANY_FAILED and Entry not in map(type, entries.values()):
                return _from_now_on(recorder, record, entry)
            if isinstance(error, BodyError):
                examined.reason = entry  # whatever it is called with
        entries[key] = entry
        if sized is not None and type(entry) is Entry:
            sized.met(entries, arguments, (key, entry))
        return entry


def first_line(error: BaseException) -> str:
    """The kind and the text of an error in one line."""
    text = str(error).splitlines()[0][:160] if str(error) else ""
    return f"{type(error).__name__}: {text}"


def _why_coupled(module: torch.nn.Module) -> str:
    """A text: which part writes to a parameter or buffer, and what to write instead."""
    bounded = next((m for m in module.modules() if getattr(m, "max_norm", None) is not None), None)
    if bounded is not None:
        return (
            f"max_norm={bounded.max_norm} rewrites rows of the table at each look-up, which all instances share: leave "
            "it out, and after each step of the optimizer call torch.embedding_renorm_(weight, words, max_norm, 2.0) "
            "under torch.no_grad()"
        )
    return "writes to a parameter or buffer, which all instances share"


def _signatures_met(recorder: RecordedCalls, record: ModuleRecord, examined: Examined) -> dict[object, Entry]:
    """By arguments the calls of a module that were recorded, whatever its code read meanwhile, but for packed ones."""
    alike = record.variants[recorder.knowledge.mode_key, examined.structure].values()
    every = [(key, x) for entries in alike for key, x in entries.items() if type(x) is Entry]
    return {key: entry for key, entry in every if entry.signature.sizes is None}


def _loops(entries: dict[object, Entry]) -> bool:
    """Whether a body makes many calls of torch, and another number of them each time."""
    calls = {entry.outcome.calls for entry in entries.values() if entry.outcome is not None}
    return len(calls) > 1 and max(calls) >= LOOP_CALLS


def _signature(record: ModuleRecord, examined: Examined, rule: str, arguments: Arguments) -> Entry:
    recorder, module, method = arguments.recorder, record.module, record.method
    names, template = tuple(examined.names), arguments.template()
    inputs, shared = arguments.types(), (*examined.shared, *arguments.shared)
    pairs = zip(names, examined.shared, strict=True)
    is_buffer = {n: s.name not in s.owner.__dict__ for n, s in pairs if s.owner}
    twins: Twins = {}
    twin = structural_twin(module, twins)

    def body(tensors: object, operands: Any) -> object:
        tensors_now = dict(zip(names, operands, strict=False))
        by_name = dict(tensors_now)
        a, k = template.fill(input=tensors, shared=operands)
        with reparametrized(twin, tensors_now):
            result = module_call(twin, *a, **k) if method is None else getattr(twin, method)(*a, **k)
        changed = [n for n in names if tensors_now[n] is not by_name[n]]
        if any(map(is_buffer.__getitem__, changed)):
            raise BatchCoupledError(f"{type(module).__name__}: assigns its buffer {changed[0]!r}{at_line()}")
        if changed:  # a tensor that an earlier call left there
            raise BodyError(f"changes its attribute {changed[0]!r}")
        return result

    most = MOST_CALLS if rule is PLAIN_MODULE else None
    plain = rule is PLAIN_MODULE or (rule is TORCH_MODULE and runs_torchs_code_alone(module))
    outcome = run_on_fakes(
        body, inputs, [s.resolve() for s in shared], grad=recorder.knowledge.grad, most=most, plain=plain
    )
    if changed := changed_attribute(twins):
        raise BodyError(f"changes {changed}")
    if outcome.written_shared:
        if is_parametrized(module):
            raise BodyError(
                "a parametrization of it writes to its buffers: they run for each call, as in a loop"
            )
        raise BatchCoupledError(f"{type(module).__name__}: {_why_coupled(module)}{at_line()}")
    if outcome.written:
        raise BodyError("writes to its inputs")
    if not outcome.outputs:
        raise BodyError("returns no tensor")
    name = _name(recorder, module) + (f".{method}" if method else "")
    operation = Operation(name, "module", module, rule, method=method)
    frozen = Frozen(structural_twin(module, {}), examined.reads)
    return recorder.signed(
        operation, inputs, shared, template, outcome, training=module.training, names=names, frozen=frozen
    )


def runs_torchs_code_alone(module: torch.nn.Module) -> bool:
    """Whether a module of torch's has no parts, and no code of users in it."""
    return not (module._modules or "forward" in vars(module) or has_hooks(module) or is_parametrized(module))


def _name(recorder: RecordedCalls, module: torch.nn.Module) -> str:
    for root in recorder.knowledge.roots:
        for name, m in root.named_modules():
            if m is module and name:
                return name
    return type(module).__name__


def changed_attribute(twins: Twins) -> str:
    """The name of an attribute that the run set on a twin, else ""."""
    for module, twin in twins.values():
        if type(module).__module__.startswith(("torch.nn", "torch.ao.nn")):
            continue  # caches of flattened weights, remade where they are stale
        before = module.__dict__
        for name, value in twin.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules") or (held := before.get(name, twin)) is value:
                continue
            parts = in_twins(held, twins)  # in which a module is equal to itself alone
            if parts is held or type(parts) is not type(value) or parts != value:
                return f"its attribute {name!r}"
    return ""
