"""Traces: what one instance recorded, as picklable plain data; and many of them as one minibatch.

In: a forward and one instance. Out: a Trace (columns, constants, descriptions of its signatures, no code); `merge`
concatenates traces with offsets into a Recording.

    trace = trace_instance(model.forward, (tree,), {}, table, execution, model)
    recording = merge([trace, trace], table, model)

A signature is described as plain data. In another process it is found or made again by recording its call once more, in
a scratch recording; StaleTraceError where the model has no such call any more.

    described = describe(signature, module_names(model), lifted=-1, sample=0)
    find_again(described, table, model)
    refer(torch.add)                 # FunctionReference("torch", "add"), an import path
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib
import itertools
import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fxbatch.caches import guard
from fxbatch.errors import StaleTraceError, TraceError
from fxbatch.ir import Modes, Program, Signature, Slot, Template, TensorSpec
from fxbatch.torch_private import tree_flatten, tree_unflatten
from fxbatch.trace.calls import call_function, call_marked
from fxbatch.trace.constants import IntegerColumn, read_payload
from fxbatch.trace.minibatch import Execution, Recording, Statistics, record_minibatch
from fxbatch.trace.module_state import KnownModel, fingerprint, known_model
from fxbatch.trace.modules import call_module
from fxbatch.trace.objects import has_attributes, values_in
from fxbatch.trace.operations import MARKED
from fxbatch.trace.places import MISSING, put
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import entered_modes, modes_now, still_hold, tracing
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.torch_patches import patched
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import Value


@dataclass(frozen=True)
class FunctionReference:
    """A function by import path; `pickled` for those that pickle knows how to find."""

    module: str
    name: str
    pickled: bytes = b""

    def resolve(self) -> object:
        """The function, without the wrapper that @operation put around it."""
        if self.pickled:
            return pickle.loads(self.pickled)
        try:
            named = operator.attrgetter(self.name)(importlib.import_module(self.module))
        except (ImportError, AttributeError) as error:
            raise StaleTraceError(
                f"the trace calls {self.module}.{self.name}, which is gone: {error}"
            ) from None
        return named.__wrapped__ if getattr(named, "__fxbatch_operation__", False) is True else named


def refer(func: object) -> FunctionReference:
    """The reference of a function; TraceError when there is none (a lambda, a local function)."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "")
    if module and name and "<" not in name:
        with contextlib.suppress(StaleTraceError):
            if (reference := FunctionReference(module, name)).resolve() is func:
                return reference
    try:
        data = pickle.dumps(func)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TraceError(f"a trace can't be kept: {name or func!r} has no import path ({error})") from None
    return FunctionReference("", name, data)


@dataclass(frozen=True)
class Described:
    """A signature as plain data: enough to find or make it in another process."""

    kind: str
    name: str
    target: FunctionReference | str | None  # a function's reference, a module's dotted name
    method: str | None
    marked: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    shared: tuple[str, ...]  # dotted names of the shared operands of `arguments`
    own: int  # how many shared operands are the module's own, before those
    arguments: Template | None
    modes: Modes
    lifted: int = -1  # the input that is a lifted number ...
    number: object = 0  # ... and one such number
    key: str = field(default="", compare=False)

    def __str__(self) -> str:
        takes, gives = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"{self.name}({takes}) -> ({gives})"


def module_names(model: torch.nn.Module | None) -> dict[int, str]:
    """Dotted names of the modules of a model, by id."""
    return {} if model is None else {id(m): name for name, m in model.named_modules()}


def describe(s: Signature, names: dict[int, str], lifted: int, sample: object) -> Described:
    """A signature as plain data; TraceError when it uses what is not part of the model."""
    op = s.operation
    target: FunctionReference | str | None = None
    if op.kind == "module":
        if id(op.target) not in names:
            raise TraceError(f"{op.name} is no submodule of the model: its trace can't be kept")
        target = names[id(op.target)]
    elif op.kind == "function":
        target = refer(op.target)
    first_input = len(s.shared_names)
    shared = []
    for operand in s.shared[first_input:]:
        if operand.owner is None or id(operand.owner) not in names:
            raise TraceError(
                f"{op.name} uses a parameter that is no part of the model: its trace can't be kept"
            )
        prefix = names[id(operand.owner)]
        shared.append(f"{prefix}.{operand.name}" if prefix else operand.name)
    arguments = None
    if s.arguments is not None:
        packed = tuple(refer(x) if callable(x) and not isinstance(x, type) else x for x in s.arguments.leaves)
        arguments = Template(packed, s.arguments.spec)
    key = ""
    if arguments is not None:  # members of two enumerations may print alike
        members = [type(x).__module__ for x in arguments.leaves if isinstance(x, enum.Enum)]
        key = repr((arguments.leaves, str(arguments.spec), *members))
    described = Described(
        op.kind, op.name, target, op.method, op.rule == MARKED, s.inputs, s.outputs, tuple(shared), first_input, None,
        s.modes, lifted,
    )  # fmt: skip
    key = f"{described!r}{key}{type(sample).__name__ if lifted >= 0 else ''}"
    return replace(described, arguments=arguments, number=sample, key=key)


def find_again(s: Described, table: SignatureTable, model: torch.nn.Module | None) -> int:
    """The id of a described signature: its call is recorded once, in a scratch recording."""
    if s.kind == "constant":
        return table.constant(s.outputs[0]).sid
    if s.kind == "number":
        return table.number(s.outputs[0].dtype, s.outputs[0].device).sid
    scratch = Recorder(table, (model,) if model is not None else (), 1)
    inputs = [scratch.row(table.constant(t), ())[0] for t in s.inputs]
    with tracing(scratch), entered_modes(s.modes, ("cpu", "cuda")):
        _record_again(s, scratch, inputs, model)
    if len(scratch.sigs) <= len(inputs) or table.signatures[scratch.sigs[-1]].outputs != s.outputs:
        raise StaleTraceError(f"{s} is no operation of this model any more{at_line()}")
    return scratch.sigs[-1]


def _record_again(
    s: Described, scratch: Recorder, inputs: list[Value], model: torch.nn.Module | None
) -> None:
    assert s.arguments is not None
    leaves = tuple(x.resolve() if type(x) is FunctionReference else x for x in s.arguments.leaves)
    shared: list[object] = [None] * s.own
    for name in s.shared:
        assert model is not None
        shared.append(_attribute(model, name))
    filled: list[object] = list(inputs)
    if s.lifted >= 0:
        filled[s.lifted] = s.number
    args, kwargs = Template(leaves, s.arguments.spec).fill(input=filled, shared=shared)
    if s.kind == "module":
        if model is None:
            raise StaleTraceError(f"{s}: a trace that uses modules needs the model")
        module = _attribute(model, str(s.target))
        method = None if s.method is None else getattr(type(module), s.method)
        call_module(scratch, module, args, kwargs, getattr(method, "__wrapped__", method))
        return
    assert isinstance(s.target, FunctionReference)
    func = s.target.resolve()
    if s.name == "getitem" and s.lifted >= 0:
        args[0][s.number]
    elif s.marked:
        call_marked(scratch, func, args, kwargs)
    else:
        call_function(scratch, func, args, kwargs)


def _attribute(model: torch.nn.Module, name: str) -> Any:
    try:
        return operator.attrgetter(name)(model) if name else model
    except AttributeError:
        raise StaleTraceError(f"the trace uses {name}, which the model has not") from None


@dataclass(frozen=True, eq=False)
class Trace:
    """One instance's calls. Picklable; holds no code and no parameters."""

    signatures: tuple[Described, ...]
    sig: np.ndarray  # int32 [calls], indices into `signatures`
    inputs: np.ndarray  # int64, value numbers of this trace
    constants: dict[int, list[object]]  # signature -> payload in call order
    values: int
    result: Template  # output slots: value numbers
    outputs: tuple[int, ...]  # value numbers of the result's leaves
    output_types: tuple[TensorSpec, ...]
    fingerprint: tuple[str, ...]  # "name: what" of each module and parameter of the model
    under: Modes  # that it was made in
    digest: bytes  # of signatures and fingerprint: equal for traces that need the same of a model
    not_cacheable: str = ""  # why this trace must not be used again, "" when it may
    live: Any = field(default=None, repr=False, compare=False)  # (table, model) of this process, not pickled

    def __getstate__(self) -> dict[str, object]:
        return {name: x for name, x in self.__dict__.items() if name != "_integers"} | {"live": None}

    def __len__(self) -> int:
        return len(self.sig)

    @functools.cached_property
    def row(self) -> bool:
        """Whether the result is a plain tuple of different values."""
        leaves = self.result.leaves
        each = len(self.outputs) == len(leaves) > 0 and all(type(x) is Slot for x in leaves)
        return each and tree_unflatten(leaves, self.result.spec) == tuple(leaves)

    @functools.cached_property
    def sound(self) -> bool:
        """Whether its columns name signatures and values that it has: it may come from a file."""
        pairs = (self.sig, len(self.signatures)), (self.inputs, self.values)
        return not any(((column < 0) | (column >= size)).any() for column, size in pairs)

    @functools.cached_property
    def leaf(self) -> bool:
        """Whether the result is no container."""
        return bool(self.result.spec.is_leaf())

    def integers(self) -> dict[int, IntegerColumn]:
        """The constants that are integers without dimensions, by signature: read once, and again when one was
        written to."""
        columns: dict[int, IntegerColumn] | None = self.__dict__.get("_integers")
        if columns is None or any(column.written_to() for column in columns.values()):
            columns = self.__dict__["_integers"] = {}  # a cache: the trace says the same
            for k, payload in self.constants.items():
                s = self.signatures[k]
                read = read_payload(s.outputs[0], s.kind, payload, watched=True)
                if read is not None:
                    columns[k] = read
        return columns

    def program(self, model: torch.nn.Module | None = None, table: SignatureTable | None = None) -> Program:
        """The calls as a Program; a trace that comes from another process needs the model."""
        if model is None and self.live is not None:
            table, model = self.live if table is None else (table, self.live[1])
        recording = merge([self], SignatureTable() if table is None else table, model)
        return recording.pending_program(recording.output_ids())

    def __str__(self) -> str:
        lines, value, at = [], 0, 0
        for sid in self.sig.tolist():
            s = self.signatures[sid]
            names = ", ".join(f"%{value + i}" for i in range(len(s.outputs)))
            takes = ", ".join(f"%{i}" for i in self.inputs[at : at + len(s.inputs)].tolist())
            gives = ", ".join(map(str, s.outputs))
            lines.append(f"{names} = {s.name}({takes}) : {gives}")
            value += len(s.outputs)
            at += len(s.inputs)
        lines.append(f"return {', '.join(f'%{v}' for v in self.outputs)}")
        return "\n".join(lines)


def trace_instance(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    table: SignatureTable,
    execution: Execution,
    model: torch.nn.Module | None = None,
) -> Trace:
    """Record one instance. `fn` is called with exactly these arguments."""
    before, under = _random_states(), modes_now()
    reads = known_model(table, model).reads
    roots = None if model is None else (model,)
    try:
        recording = record_minibatch(fn, [(args, kwargs)], table, execution, roots=roots)
    finally:
        changed = reads.changes()
        for item, _ in reversed(changed):
            put(item, item.value)
    recorder = recording.recorder
    reason = ""
    if recording.held is not None and recording.held.written:
        recording.held.abandon()
        reason = "the forward writes to a tensor that outlives it"
    brought = [t for rows in recorder.payload.values() for t in rows if isinstance(t, torch.Tensor)]
    # What held nothing yet, or a tensor, is state that a forward sets before it reads it.
    state = torch.Tensor | None | type(MISSING)
    written = [
        x.path for x, now in changed if not isinstance(now, torch.Tensor) or not isinstance(x.value, state)
    ]
    if written:
        reason = f"the forward changes {written[0]}"
    elif recording.statistics.suspensions:
        lines = ", ".join(recording.statistics.lines)
        reason = f"it branches on values ({lines})"
    elif any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
        reason = "the forward draws random numbers outside operations"
    elif recorder.heard.computed or any(t.grad_fn is not None for t in brought):
        reason = "the forward computes tensors from parameters outside operations"
    elif any(t.requires_grad for t in brought):
        reason = "the instance brings tensors that require gradients"
    return _trace(recording, table, model, reason, under)


def _random_states() -> list[torch.Tensor]:
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _trace(
    recording: Recording, table: SignatureTable, model: torch.nn.Module | None, reason: str, under: Modes
) -> Trace:
    recorder = recording.recorder
    leaves, spec = tree_flatten(recording.results[0])
    if recorder.phases.known:
        raise TraceError(
            "an instance that branches on values can't be traced ahead: its calls depend on values "
            f"({', '.join(recording.statistics.lines)})"
        )
    sigs = np.array(recorder.sigs, dtype=np.int32)
    used, sig = np.unique(sigs, return_inverse=True)
    names = module_names(model)
    samples = _samples(recorder, sigs)
    ids = used.tolist()
    described = tuple(describe(table.signatures[s], names, *samples.get(s, (-1, 0))) for s in ids)
    now = known_model(table, model).fingerprint
    values = [x for x in leaves if type(x) is Value]
    if any(has_attributes(x) and values_in(x) for x in leaves):
        reason = reason or "its result holds values in an object that torch's pytree does not know"
    slots = tuple(Slot("output", x.id) if type(x) is Value else x for x in leaves)
    trace = Trace(
        signatures=described,
        sig=sig.astype(np.int32),
        inputs=np.array(recorder.inputs, dtype=np.int64) - recorder.base,
        constants={k: recorder.payload[s] for k, s in enumerate(ids) if s in recorder.payload},
        values=recorder.count - recorder.base,
        result=Template(slots, spec),
        outputs=tuple(dict.fromkeys(x.id for x in values)),
        output_types=tuple(recorder.type_of(x) for x in {x.id: x for x in values}.values()),
        fingerprint=now,
        under=under,
        digest=hashlib.sha256(repr((now, under, [d.key for d in described])).encode()).digest(),
        not_cacheable=reason,
        live=(table, model),
    )
    trace.integers(), trace.row, trace.leaf, trace.sound  # read now, so that merging finds them
    return trace


def _samples(recorder: Recorder, sigs: np.ndarray) -> dict[int, tuple[int, object]]:
    """For each lifted signature the input that is a number, and one of the numbers that it met."""
    samples: dict[int, tuple[int, object]] = {}
    at = 0
    for sid in sigs.tolist():
        lifted = recorder.table.lifted.get(sid)
        if lifted is not None and sid not in samples:
            number = recorder.number_of[recorder.inputs[at + lifted.position]]
            samples[sid] = lifted.position, number
        at += len(recorder.table.signatures[sid].inputs)
    return samples


# Merging


def merge(traces: Sequence[Trace], table: SignatureTable, model: torch.nn.Module | None = None) -> Recording:
    """Many traces as one recording: columns concatenated with offsets.

    Raises StaleTraceError when the model is not as it was when a trace was made.
    """
    recorder = Recorder(table, (model,) if model is not None else (), len(traces))
    model_state = known_model(table, model)
    # A table of its own does not know which forward was traced: then the modules alone are compared.
    whole = table.forward is not None
    _check_fresh(traces, model_state.fingerprint if whole else fingerprint(model), whole=whole)
    ids = _signature_ids(traces, recorder, model, model_state)
    integers = _concatenate(traces, recorder, ids) if traces else []
    type_ids: dict[int, int] = {}  # by id of the type: hashing a type costs a microsecond
    results: list[object] = []
    start = recorder.base
    for trace in traces:
        values = {}
        for v, t in zip(trace.outputs, trace.output_types, strict=True):
            type_id = type_ids.get(id(t))
            if type_id is None:
                type_id = type_ids[id(t)] = table.type_ids[t]
            values[v] = recorder.value(start + v, type_id)
        if trace.row:
            results.append(tuple(values.values()))
        elif trace.leaf:
            results.append(values[trace.outputs[0]] if trace.outputs else trace.result.leaves[0])
        else:
            results.append(trace.result.fill(output=values))
        start += trace.values
    recorder.finish()
    return Recording(recorder, results, Statistics(len(traces)), integers)


@guard("model")
def _check_fresh(traces: Sequence[Trace], now: tuple[str, ...], *, whole: bool) -> None:
    """whole: `now` also tells what the forward reads, not its modules alone."""
    under, first = modes_now(), dict[bytes, tuple[int, Trace]]()
    for i, trace in enumerate(traces):
        first.setdefault(trace.digest, (i, trace))
    for i, trace in first.values():
        if not still_hold(trace.under, under):
            was, is_now = (f"{m}, default dtype {m.default_dtype}" for m in (trace.under, under))
            raise StaleTraceError(f"trace {i} was made with {was}, now there is {is_now}")
        if trace.fingerprint != now if whole else trace.fingerprint[: len(now)] != now:
            was = next((a for a in trace.fingerprint if a not in now), "")
            is_now = next((b for b in now if b not in trace.fingerprint), "")
            raise StaleTraceError(f"trace {i} was made of another model: it had {was!r}, now {is_now!r}")


def _signature_ids(
    traces: Sequence[Trace], recorder: Recorder, model: torch.nn.Module | None, model_state: KnownModel
) -> list[np.ndarray]:
    """For each trace the table's id of each of its signatures."""
    sid_of_key: dict[str, int] = {}
    out = []
    with contextlib.ExitStack() as stack:
        for trace in traces:
            ids = model_state.ids.get(trace.digest)
            if ids is None:
                missing = [s for s in trace.signatures if s.key not in sid_of_key]
                if missing:
                    stack.enter_context(patched())
                for s in missing:
                    sid_of_key[s.key] = find_again(s, recorder.table, model)
                ids = np.array([sid_of_key[s.key] for s in trace.signatures], dtype=np.int32)
                model_state.ids.put(trace.digest, ids)
            out.append(ids)
    return out


def _concatenate(traces: Sequence[Trace], recorder: Recorder, ids: list[np.ndarray]) -> list[IntegerColumn]:
    """The columns of a recording; returned are the constants whose numbers are taken as they were read."""
    recorder.sigs, recorder.inputs = join_columns(traces, ids)
    calls = np.array([len(t.sig) for t in traces], dtype=np.int64)
    recorder.starts = (np.cumsum(calls) - calls).tolist()
    recorder.runs = list(range(len(traces)))
    recorder.count = recorder.base + sum([t.values for t in traces])
    payloads: dict[int, list[object]] = {}
    for trace, mapping in zip(traces, ids, strict=True):
        integers = trace.integers()
        for k, payload in trace.constants.items():
            payloads.setdefault(int(mapping[k]), []).append(integers.get(k, payload))
    recorder.payload = {s: _join(parts) for s, parts in payloads.items()}
    lifted = recorder.table.lifted
    if lifted:
        recorder.lifted = {s: True for s in np.unique(recorder.sigs).tolist() if s in lifted}
    if recorder.lifted:
        _number_values(recorder)
    return [payload for payload in recorder.payload.values() if type(payload) is IntegerColumn]


def join_columns(traces: Sequence[Trace], ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Signatures as int32 [calls] and inputs, values counted from 0, of traces one behind the other."""
    calls, signatures, values = (
        np.array(n, dtype=np.int64)
        for n in ([len(t.sig) for t in traces], [len(m) for m in ids], [t.values for t in traces])
    )
    sig, inputs = np.concatenate([t.sig for t in traces]), np.concatenate([t.inputs for t in traces])
    reads = [len(t.inputs) for t in traces]
    if not all(t.sound for t in traces):
        raise IndexError("a trace names a signature or a value that it does not have")
    table_sig = np.concatenate(ids)[sig + (signatures.cumsum() - signatures).repeat(calls)]
    return table_sig, inputs + (values.cumsum() - values).repeat(reads)


def _join(parts: list[Any]) -> object:
    if all(type(part) is IntegerColumn for part in parts):
        return IntegerColumn.joined(parts)
    return list(itertools.chain.from_iterable(parts))


def _number_values(recorder: Recorder) -> None:
    """Which values are which lifted numbers, as live recordings know it."""
    table = recorder.table
    sig = np.asarray(recorder.sigs)
    width = table.snapshot_and_columns()[1].width[sig]
    first = np.cumsum(width) - width + recorder.base
    for sid, payload in recorder.payload.items():
        if table.signatures[sid].operation.kind == "number":
            recorder.number_of.update(zip(first[sig == sid].tolist(), payload, strict=True))
