"""Traces: what one instance recorded, as picklable plain data; and many of them as one minibatch.

In: a forward and one instance. Out: a Trace (columns, constants, descriptions of its signatures, no
code); `merge`
concatenates traces with offsets into a Recording.

    trace = trace_instance(model.forward, (tree,), {}, table, execution, model)
    recording = merge([trace, trace], table, model)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fxbatch.errors import StaleTraceError, TraceError
from fxbatch.ir import Program, Slot, Template, TensorType
from fxbatch.torch_private import tree_flatten, tree_unflatten
from fxbatch.trace.columns import ExtensionSwitch, _fast
from fxbatch.trace.integers import IntegerColumn, read_payload
from fxbatch.trace.minibatch import Execution, Recording, record_minibatch
from fxbatch.trace.module_state import KnownModel, known_model
from fxbatch.trace.objects import has_attributes, values_in
from fxbatch.trace.portable_signature import (
    Described,
    as_tree,
    describe,
    fingerprint,
    from_tree,
    module_names,
)
from fxbatch.trace.reached import MISSING
from fxbatch.trace.record import Recorder
from fxbatch.trace.restored_signatures import find_again
from fxbatch.trace.state import RecordedUnder
from fxbatch.trace.statistics import Statistics
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.torch_patches import patched
from fxbatch.trace.values import Value

_KEPT = 256  # digests of traces whose signatures are known


@dataclass(frozen=True, eq=False)
class Trace:
    """One instance's calls. Picklable; holds no code and no parameters."""

    signatures: tuple[Described, ...]
    sig: np.ndarray  # int32 [calls], indices into `signatures`
    inputs: np.ndarray  # int64, value numbers of this trace
    constants: dict[int, list[Any]]  # signature -> payload in call order
    values: int
    result: Template  # output slots: value numbers
    outputs: tuple[int, ...]  # value numbers of the result's leaves
    output_types: tuple[TensorType, ...]
    fingerprint: tuple[str, ...]  # "name: what" of each module and parameter of the model
    under: RecordedUnder  # the modes that it was made in
    digest: bytes  # of signatures and fingerprint: equal for traces that need the same of a model
    not_cacheable: str = ""  # why this trace must not be used again, "" when it may
    live: Any = field(default=None, repr=False, compare=False)  # (table, model) of this process, not pickled

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "live": None, "result": as_tree(self.result)}
        state.pop("_integers", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, result=from_tree(state["result"]))

    def __len__(self) -> int:
        return len(self.sig)

    @functools.cached_property
    def row(self) -> bool:
        """Whether the result is a plain tuple of different values."""
        leaves = self.result.leaves
        if not leaves or any(type(x) is not Slot for x in leaves) or len(self.outputs) != len(leaves):
            return False
        return tree_unflatten(leaves, self.result.spec) == tuple(leaves)

    @functools.cached_property
    def leaf(self) -> bool:
        """Whether the result is no container."""
        return bool(self.result.spec.is_leaf())

    def integers(self) -> dict[int, IntegerColumn]:
        """The constants that are integers without dimensions, by signature: read once, and again when one was
        written to."""
        found: dict[int, IntegerColumn] | None = self.__dict__.get("_integers")
        if found is not None:
            for column in found.values():
                if column.written_to():
                    break
            else:
                return found
        found = {}
        for k, payload in self.constants.items():
            s = self.signatures[k]
            read = read_payload(s.outputs[0], s.kind, payload, watched=True)
            if read is not None:
                found[k] = read
        self.__dict__["_integers"] = found  # a cache: the trace says the same
        return found

    def program(self, model: torch.nn.Module | None = None, table: SignatureTable | None = None) -> Program:
        """The calls as a Program; a trace that comes from another process needs the model."""
        if model is None and self.live is not None:
            table, model = self.live if table is None else (table, self.live[1])
        recording = merge([self], SignatureTable() if table is None else table, model)
        return recording.pending_program(recording.output_ids())

    def to_fx(self, model: torch.nn.Module | None = None) -> torch.fx.GraphModule:
        """An executable graph of this instance, operations as call_module nodes."""
        return self.program(model).to_fx()

    def to_networkx(self, model: torch.nn.Module | None = None) -> Any:
        """The calls as a networkx.MultiDiGraph."""
        return self.program(model).to_networkx()

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
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    table: SignatureTable,
    execution: Execution,
    model: torch.nn.Module | None = None,
) -> Trace:
    """Record one instance. `fn` is called with exactly these arguments."""
    before, under = _random_states(), RecordedUnder.now()
    reads = known_model(table, model).reads
    try:
        recording = record_minibatch(
            fn, [(args, kwargs)], table, execution, roots=(model,) if model is not None else None
        )
    finally:
        changed = reads.changes()
        reads.restore(changed)
    recorder = recording.recorder
    reason = reads.opaque
    if recording.left is not None:
        recording.left.abandon()
        reason = "the forward writes to a tensor that outlives it"
    written = [x.path for x, now in changed if not (isinstance(now, torch.Tensor) and _is_result(x.value))]
    if written:
        reason = f"the forward changes {written[0]}"
    elif recording.statistics.suspensions:
        lines = ", ".join(recording.statistics.lines)
        reason = f"it branches on values ({lines})"
    elif any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
        reason = "the forward draws random numbers outside operations"
    elif any(t.grad_fn is not None for _, t, _ in recorder.constants.values()):
        reason = "the forward computes tensors from parameters outside operations"
    elif any(t.requires_grad for _, t, _ in recorder.constants.values()):
        reason = "the instance brings tensors that require gradients"
    return _trace(recording, table, model, reason, under)


def _is_result(x: Any) -> bool:
    """Whether an attribute held nothing yet, or a tensor: state that a forward sets before it reads it."""
    return x is MISSING or x is None or isinstance(x, torch.Tensor)


def _random_states() -> list[torch.Tensor]:
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _trace(
    recording: Recording,
    table: SignatureTable,
    model: torch.nn.Module | None,
    reason: str,
    under: RecordedUnder,
) -> Trace:
    recorder = recording.recorder
    leaves, spec = tree_flatten(recording.results[0])
    if recorder.known:
        if reason == "":
            reason = "some of its calls have run already"
        recorder.sigs, recorder.inputs, recorder.payload = _whole(recording)
    sigs = np.array(recorder.sigs, dtype=np.int32)
    used, sig = np.unique(sigs, return_inverse=True)
    names = module_names(model)
    numbers = {}
    for s, payload in recorder.payload.items():
        kept = recorder.foreign.originals(payload) if recorder.foreign.tensors else payload
        if kept is None:
            reason = reason or "the forward writes to memory that a tensor shares with numpy"
        numbers[s] = payload if kept is None else kept
    samples = _samples(recorder, sigs)
    described = tuple(
        describe(table.signatures[s], names, _lifted(table, s), samples.get(s, 0)) for s in used.tolist()
    )
    now = known_model(table, model).fingerprint
    found = [x for x in leaves if type(x) is Value]
    if any(has_attributes(x) and values_in(x) for x in leaves):
        reason = reason or "its result holds values in an object that torch's pytree does not know"
    slots = tuple(Slot("output", x.id) if type(x) is Value else x for x in leaves)
    trace = Trace(
        signatures=described,
        sig=sig.astype(np.int32),
        inputs=np.array(recorder.inputs, dtype=np.int64) - recorder.base,
        constants={k: numbers[s] for k, s in enumerate(used.tolist()) if s in numbers},
        values=recorder.count - recorder.base,
        result=Template(slots, spec),
        outputs=tuple(dict.fromkeys(x.id for x in found)),
        output_types=tuple(recorder.type_of(x) for x in {x.id: x for x in found}.values()),
        fingerprint=now,
        under=under,
        digest=hashlib.sha256(repr((now, under, [d.key for d in described])).encode()).digest(),
        not_cacheable=reason,
        live=(table, model),
    )
    trace.integers(), trace.row, trace.leaf  # read now, so that merging finds them
    return trace


def _whole(recording: Recording) -> Any:
    raise TraceError(
        "an instance that branches on values can't be traced ahead: its calls depend on values "
        f"({', '.join(recording.statistics.lines)})"
    )


def _lifted(table: SignatureTable, sid: int) -> int:
    found = table.lifted.get(sid)
    return -1 if found is None else found.position


def _samples(recorder: Recorder, sigs: np.ndarray) -> dict[int, Any]:
    """For each lifted signature one of the numbers that it met."""
    samples: dict[int, Any] = {}
    at = 0
    for sid in sigs.tolist():
        found = recorder.table.lifted.get(sid)
        if found is not None and sid not in samples:
            samples[sid] = recorder.number_of[recorder.inputs[at + found.position]]
        at += len(recorder.table.signatures[sid].inputs)
    return samples


# Merging


def merge(traces: Sequence[Trace], table: SignatureTable, model: torch.nn.Module | None = None) -> Recording:
    """Many traces as one recording: columns concatenated with offsets.

    Raises StaleTraceError when the model is not as it was when a trace was made.
    """
    recorder = Recorder(table, (model,) if model is not None else (), len(traces))
    known = known_model(table, model)
    # A table of its own does not know which forward was traced: then the modules alone are compared.
    whole = table.forward is not None
    _check_fresh(traces, known.fingerprint if whole else fingerprint(model), whole=whole)
    ids = _signature_ids(traces, recorder, model, known)
    integers = _concatenate(traces, recorder, ids) if traces else []
    type_ids: dict[int, int] = {}  # by id of the type: hashing a type costs a microsecond
    results: list[Any] = []
    start = recorder.base
    for trace in traces:
        values = {}
        for v, t in zip(trace.outputs, trace.output_types, strict=True):
            found = type_ids.get(id(t))
            if found is None:
                found = type_ids[id(t)] = table.type_ids[t]
            values[v] = recorder.value(start + v, found)
        if trace.row:
            results.append(tuple(values.values()))
        elif trace.leaf:
            results.append(values[trace.outputs[0]] if trace.outputs else trace.result.leaves[0])
        else:
            results.append(trace.result.fill(output=_Offset(values)))
        start += trace.values
    recorder.finish()
    return Recording(recorder, results, Statistics(len(traces)), integers)


class _Offset:
    """A sequence that gives the Value of a trace's value number."""

    def __init__(self, values: dict[int, Value]) -> None:
        self.values = values

    def __getitem__(self, number: int) -> Value:
        return self.values[number]


def _check_fresh(traces: Sequence[Trace], now: tuple[str, ...], *, whole: bool) -> None:
    """whole: `now` also tells what the forward reads, not its modules alone."""
    checked: dict[bytes, bool] = {}
    under = RecordedUnder.now()
    for i, trace in enumerate(traces):
        if trace.digest in checked:
            continue
        checked[trace.digest] = True
        if not trace.under.hold_in(under):
            raise StaleTraceError(f"trace {i} was made with {trace.under}, now there is {under}")
        if trace.fingerprint != now if whole else trace.fingerprint[: len(now)] != now:
            was = next((a for a in trace.fingerprint if a not in now), "")
            is_now = next((b for b in now if b not in trace.fingerprint), "")
            raise StaleTraceError(f"trace {i} was made of another model: it had {was!r}, now {is_now!r}")


def _signature_ids(
    traces: Sequence[Trace], recorder: Recorder, model: torch.nn.Module | None, known: KnownModel
) -> list[np.ndarray]:
    """For each trace the table's id of each of its signatures."""
    found: dict[str, int] = {}
    out = []
    with contextlib.ExitStack() as stack:
        entered = False
        for trace in traces:
            ids = known.ids.get(trace.digest)
            if ids is None:
                missing = [s for s in trace.signatures if s.key not in found]
                if missing and not entered:
                    stack.enter_context(patched())
                    entered = True
                for s in missing:
                    found[s.key] = find_again(s, recorder.table, model)
                ids = np.array([found[s.key] for s in trace.signatures], dtype=np.int32)
                if len(known.ids) >= _KEPT:
                    known.ids.clear()
                known.ids[trace.digest] = ids
            out.append(ids)
    return out


def _concatenate(traces: Sequence[Trace], recorder: Recorder, ids: list[np.ndarray]) -> list[IntegerColumn]:
    """The columns of a recording; returned are the constants whose numbers are taken as they were read."""
    recorder.sigs, recorder.inputs = join_columns(traces, ids)
    calls = np.array([len(t.sig) for t in traces], dtype=np.int64)
    recorder.starts = (np.cumsum(calls) - calls).tolist()
    recorder.runs = list(range(len(traces)))
    recorder.count = recorder.base + sum([t.values for t in traces])
    payloads: dict[int, list[Any]] = {}
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
    if ExtensionSwitch.on:
        sigs = np.empty(sum([len(t.sig) for t in traces]), dtype=np.int32)
        inputs = np.empty(sum([len(t.inputs) for t in traces]), dtype=np.int64)
        _fast.join([(t.sig, m, t.inputs, t.values) for t, m in zip(traces, ids, strict=True)], sigs, inputs)
        return sigs, inputs
    sizes = np.array([t.values for t in traces], dtype=np.int64)
    sigs = np.concatenate([m[t.sig] for m, t in zip(ids, traces, strict=True)])
    inputs = np.concatenate([t.inputs for t in traces])
    inputs += np.repeat(np.cumsum(sizes) - sizes, [len(t.inputs) for t in traces])
    return sigs, inputs


def _join(parts: list[Any]) -> Any:
    if all(type(part) is IntegerColumn for part in parts):
        return IntegerColumn.joined(parts)
    return list(itertools.chain.from_iterable(parts))


def _number_values(recorder: Recorder) -> None:
    """Which values are which lifted numbers, as live recordings know it."""
    table = recorder.table
    sig = np.asarray(recorder.sigs)
    width = np.array([len(o) for o in table.outputs], dtype=np.int64)[sig]
    first = np.cumsum(width) - width + recorder.base
    for sid, payload in recorder.payload.items():
        if table.signatures[sid].operation.kind == "number":
            recorder.number_of.update(zip(first[sig == sid].tolist(), payload, strict=True))
