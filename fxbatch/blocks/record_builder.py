"""Blocks as rows of a recording: the program of a minibatch straight from its input, without user code.

In: a typed block and the recorder of a minibatch. Out: a function of one instance that appends rows to the
recorder's columns; a handle is a value's number. Each Function is run once, on values of its types, and the
rows that it makes are its template; a use of it replays them, a few list appends.

    run = block.runnable(RecordBuilder(tape))
    tape.attach(recorder)
    value = run(instance)

A Function that asks for values, or has hooks, has no template: it runs as user code at each use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fxbatch import ir
from fxbatch.blocks.build import Builder, Run, ToArray, as_tuples
from fxbatch.blocks.typed import Typed
from fxbatch.blocks.types import ResultType, TensorType, TupleType
from fxbatch.errors import TraceError
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import tracing
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.values import Value


def _plain_numbers(dtype: torch.dtype) -> tuple[tuple[type, ...], int, int]:
    """The kinds of Python numbers, and the range of integers, that are the same number as PyTorch and NumPy read them.

    Of other numbers (a float as an integer, an integer that a float or int8 can't hold) a block's own conversion
    makes a tensor, or an error.
    """
    if dtype in (torch.float32, torch.float64):
        return (int, float), -(2**53), 2**53
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return (), 0, 0
    limits = torch.iinfo(dtype)
    return (int,), limits.min, limits.max


class RowWriter:
    """Where rows go: the columns of the recorder that is being written. Attached anew for each instance."""

    __slots__ = (
        "constants", "count", "expected", "inputs", "kept", "numbers", "payload", "recorder", "rows", "sigs",
    )  # fmt: skip

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.constants: dict[int, int] = {}  # id of a tensor -> its value
        self.kept: list[torch.Tensor] = []  # keeps those ids valid
        self.numbers: dict[Any, int] = {}
        self.rows: dict[int, _Rows] = {}  # signature of a constant -> memory for its tensors
        self.expected: dict[int, int] = {}  # how many there were in the last minibatch
        self.count = 0

    def attach(self, recorder: Recorder) -> None:
        """Write to this recorder from here on."""
        if recorder is not self.recorder:
            self.recorder = recorder
            self.constants, self.kept, self.numbers = {}, [], {}
            self.expected |= {sid: rows.count for sid, rows in self.rows.items()}
            self.rows = {}
        self.resume()

    @property
    def runs_now(self) -> bool:
        """Whether the recording is for one run, now: others may be taken apart and stored, tensor by tensor."""
        return self.recorder is not None and self.recorder.watches_operands

    def row(self, sid: int, array: np.ndarray) -> torch.Tensor:
        """A tensor with the contents of an array: a row of memory that many share, made by two operations in all."""
        rows = self.rows.get(sid)
        if rows is None:
            rows = self.rows[sid] = _Rows(self.expected.get(sid, 0))
        return rows.add(array)

    def resume(self) -> None:
        """Take the columns as they are now: user code may have written to them."""
        recorder = self.recorder
        assert recorder is not None
        self.sigs, self.inputs, self.payload = recorder.sigs, recorder.inputs, recorder.payload
        self.count = recorder.count

    def pause(self) -> None:
        """Let user code write to the recorder, which numbers values on from here."""
        assert self.recorder is not None
        self.recorder.count = self.count

    def constant(self, sid: int, payload: Any) -> int:
        """A row of a constant or number; its value."""
        self.sigs.append(sid)
        self.payload.setdefault(sid, []).append(payload)
        n = self.count
        self.count = n + 1
        return n


class _Rows:
    """Tensors of one type, rows of few arrays: a tensor of its own for each costs an operation of PyTorch each."""

    __slots__ = ("array", "count", "size", "used", "views")

    def __init__(self, expected: int) -> None:
        self.size = min(max(expected, 8), 1 << 14)  # rows of the next array
        self.count = 0  # of all tensors
        self.used = 0  # rows of the array
        self.array = np.empty(0)
        self.views: tuple[torch.Tensor, ...] = ()

    def add(self, row: np.ndarray) -> torch.Tensor:
        """The next tensor, with these contents."""
        if self.used == len(self.views):
            self.array = np.empty((self.size, *row.shape), row.dtype)
            self.views = torch.from_numpy(self.array).unbind(0)
            self.used, self.size = 0, min(2 * self.size, 1 << 14)
        i = self.used
        self.array[i] = row
        self.used, self.count = i + 1, self.count + 1
        return self.views[i]


class RecordBuilder(Builder):
    """Builds blocks over one tape and one signature table."""

    def __init__(self, tape: RowWriter, table: SignatureTable) -> None:
        self.tape = tape
        self.table = table
        self._declared: dict[int, Run] = {}

    def type_of(self, t: TensorType, device: torch.device) -> ir.TensorSpec:
        """A block's tensor type as the engine knows it."""
        return ir.tensor_spec(t.shape, t.dtype, device)

    # -- constants ----------------------------------------------------------------------------------

    def tensor(
        self, block: Typed, convert: Callable[[Any], torch.Tensor], array: ToArray | None = None
    ) -> Run:
        t = block.output_type
        assert isinstance(t, TensorType)
        sid = self.table.constant(self.type_of(t, block.device)).sid
        tape = self.tape

        def run(x: Any) -> int:
            made = convert(x)
            found = tape.constants.get(id(made))
            if found is None:
                found = tape.constants[id(made)] = tape.constant(sid, made)
                tape.kept.append(made)
            return found

        if array is None or block.device.type != "cpu":
            return run

        def row(x: Any) -> int:
            if isinstance(x, torch.Tensor) or not tape.runs_now:
                return run(x)
            return tape.constant(sid, tape.row(sid, array(x)))

        return row

    def scalar(
        self,
        block: Typed,
        dtype: torch.dtype,
        convert: Callable[[Any], torch.Tensor],
        array: ToArray | None = None,
    ) -> Run:
        number = self.table.number(dtype, block.device).sid
        constant = self.table.constant(ir.tensor_spec((), dtype, block.device)).sid
        tape = self.tape
        kinds, least, most = _plain_numbers(dtype)
        as_number = None if dtype.is_complex else array

        def run(x: Any) -> int:
            kind = type(x)
            if not (kind in kinds and (kind is float or least <= x <= most)):
                if as_number is None or isinstance(x, torch.Tensor):
                    return tape.constant(constant, convert(x))
                x = as_number(x).item()
            key = (x, dtype, math.copysign(1, x)) if x == 0 else (x, dtype)
            found = tape.numbers.get(key)
            if found is None:
                found = tape.numbers[key] = tape.constant(number, x)
            return found

        return run

    def shared(self, get: Callable[[], torch.Tensor]) -> Run:
        tape, table = self.tape, self.table

        def run(x: Any) -> int:
            t = get()
            found = tape.constants.get(id(t))
            if found is None:
                sid = table.constant(ir.TensorSpec.of(t)).sid
                found = tape.constants[id(t)] = tape.constant(sid, t)
                tape.kept.append(t)
            return found

        return run

    # -- calls --------------------------------------------------------------------------------------

    def call(
        self, block: Typed, fn: Callable[..., Any], input_type: ResultType, output_type: ResultType
    ) -> Run:
        use = _Use(self, block, fn, input_type, output_type)
        made: list[Run] = []

        def run(x: Any) -> Any:
            if not made:
                made.append(use.build())
            return made[0](x)

        return run

    def recursive(self, declaration: Typed, build: Callable[[Builder], Run]) -> Run:
        found = self._declared.get(id(declaration))
        if found is None:
            found = self._declared[id(declaration)] = super().recursive(declaration, build)
        return found


class _Use:
    """One use of a callable in a block: its template of rows, or the callable as user code."""

    def __init__(
        self,
        to: RecordBuilder,
        block: Typed,
        fn: Callable[..., Any],
        input_type: ResultType,
        output: ResultType,
    ) -> None:
        self.to, self.block, self.fn = to, block, fn
        self.inputs, self.output = input_type, output
        self.device = block.device

    def build(self) -> Run:
        """The function from the handles of the inputs to those of the outputs."""
        if _has_hooks(self.fn):
            return self._live
        recorder = self.to.tape.recorder
        assert recorder is not None
        probe = Recorder(recorder.table, recorder.knowledge.roots)
        values = self._values(probe, self.inputs, None)
        given = [v._value - probe.base for v in _flatten(values)]
        first = len(probe.sigs)
        try:
            with tracing(probe):
                result = self._call(values)
                outputs = [self._number(probe, x) - probe.base for x in _flatten(as_tuples(result))]
        except TraceError:
            if probe.ask is None:
                return self._live
            raise
        _check_types(self.block, result, self.output)
        return self._replay(probe, given, first, outputs)

    def _call(self, values: Any) -> Any:
        return self.fn(*values) if isinstance(self.inputs, TupleType) else self.fn(values)

    def _values(self, recorder: Recorder, t: ResultType, handles: Any) -> Any:
        """Values of a nest of types: new constants of a probe, or those with these numbers."""
        if isinstance(t, TupleType):
            given = [None] * len(t) if handles is None else handles
            return tuple(self._values(recorder, x, h) for x, h in zip(t, given, strict=True))
        assert isinstance(t, TensorType)
        entry = recorder.table.constant(self.to.type_of(t, self.device))
        if handles is None:
            return recorder.emit(entry, ())
        return recorder.value(handles, entry.types[0])

    def _number(self, recorder: Recorder, x: Any) -> int:
        """The number of an output; a tensor that the callable brought along becomes a constant."""
        if type(x) is Value:
            return x._value
        found = recorder.constant(x)
        if found is None:
            entry = recorder.table.constant(ir.TensorSpec.of(x))
            found = recorder.emit(entry, ())
            recorder.payload.setdefault(entry.sid, []).append(x)
        return found._value

    def _live(self, x: Any) -> Any:
        """Run the callable on values, as under @autobatch."""
        tape = self.to.tape
        tape.pause()
        recorder = tape.recorder
        assert recorder is not None
        result = as_tuples(self._call(self._values(recorder, self.inputs, x)))
        numbers = iter([self._number(recorder, y) for y in _flatten(result)])
        tape.attach(recorder)
        return _unflatten(self.output, numbers)

    def _replay(self, probe: Recorder, given: list[int], first: int, outputs: list[int]) -> Run:
        rows = _rows_of(probe, given, first)
        if rows is None:
            return self._live
        run = self._template(rows, given, outputs)
        if not probe.lifted:
            return run
        # A number that was put back into its operation is no signature that a stored trace can describe.
        tape, live = self.to.tape, self._live
        return lambda x: run(x) if tape.runs_now else live(x)

    def _template(self, rows: list[_Row], given: list[int], outputs: list[int]) -> Run:
        single = isinstance(self.inputs, TensorType) and isinstance(self.output, TensorType)
        if len(rows) == 1 and rows[0].payload is None and rows[0].in_order(given):
            return self._one_row(rows[0], outputs, single)
        return self._many_rows(rows, given, outputs)

    def _one_row(self, row: _Row, outputs: list[int], single: bool) -> Run:
        """The template of one call whose inputs are the block's inputs in order."""
        tape, sid, width = self.to.tape, row.sid, row.width
        nested = isinstance(self.inputs, TupleType) and any(isinstance(t, TupleType) for t in self.inputs)
        places = [o - row.first for o in outputs]
        if any(p < 0 for p in places):
            return self._many_rows([row], row.inputs, outputs)
        alone = isinstance(self.output, TensorType)
        output, place = self.output, places[0] if places else 0

        def run(x: Any) -> Any:
            tape.sigs.append(sid)
            if single_input:
                tape.inputs.append(x)
            else:
                tape.inputs.extend(_flatten(x) if nested else x)
            n = tape.count
            tape.count = n + width
            if alone:
                return n + place
            return _unflatten(output, iter([n + p for p in places]))

        single_input = isinstance(self.inputs, TensorType)
        return run

    def _many_rows(self, rows: list[_Row], given: list[int], outputs: list[int]) -> Run:
        """The template of any rows: inputs are inputs of the block or outputs of earlier rows."""
        tape, output = self.to.tape, self.output
        plan = [(r.sid, tuple(r.inputs), r.payload, range(r.first, r.first + r.width)) for r in rows]

        def run(x: Any) -> Any:
            number = dict(zip(given, _flatten(x), strict=True))
            for sid, inputs, payload, made in plan:
                if payload is not None:
                    number[made[0]] = tape.constant(sid, payload[0])
                    continue
                tape.sigs.append(sid)
                tape.inputs.extend([number[i] for i in inputs])
                n = tape.count
                for m in made:
                    number[m] = n
                    n += 1
                tape.count = n
            return _unflatten(output, iter([number[o] for o in outputs]))

        return run


class _Row:
    """One row of a template; numbers are those of the probe, without its base."""

    __slots__ = ("first", "inputs", "payload", "sid", "width")

    def __init__(
        self, sid: int, inputs: list[int], first: int, width: int, payload: list[Any] | None
    ) -> None:
        self.sid, self.inputs, self.first, self.width, self.payload = sid, inputs, first, width, payload

    def in_order(self, given: list[int]) -> bool:
        """Whether its inputs are exactly these values."""
        return self.inputs == given


def _rows_of(probe: Recorder, given: list[int], first: int) -> list[_Row] | None:
    """The rows that a probe recorded after its inputs; None when they can't be replayed."""
    table = probe.table
    payload = {sid: iter(items) for sid, items in probe.payload.items()}
    rows: list[_Row] = []
    place, value = 0, 0
    sids = np.array(probe.sigs, dtype=np.int64).tolist()
    read = (np.array(probe.inputs, dtype=np.int64) - probe.base).tolist()
    for i, sid in enumerate(sids):
        signature = table.signatures[sid]
        inputs = read[place : place + len(signature.inputs)]
        place += len(signature.inputs)
        width = len(signature.outputs)
        constant = signature.operation.kind in ("constant", "number")
        if i >= first:
            item = None
            if constant:
                item = [next(payload[sid])]
            elif sid in probe.lifted:
                lifted = table.lifted[sid]
                number = probe.number_of[inputs[lifted.position] + probe.base]
                sid = lifted.fixed(number).sid
                inputs = [n for k, n in enumerate(inputs) if k != lifted.position]
            rows.append(_Row(sid, inputs, value, width, item))
        value += width
    return _without_unused_numbers(rows)


def _without_unused_numbers(rows: list[_Row]) -> list[_Row]:
    """Leave out constants that no row reads: numbers that were put back into their operations."""
    used = {i: True for r in rows for i in r.inputs}
    last = rows[-1].first if rows else -1
    return [r for r in rows if r.payload is None or r.first in used or r.first == last]


def _has_hooks(fn: Any) -> bool:
    if not isinstance(fn, nn.Module):
        return False
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in fn.modules()
    )


def _check_types(block: Typed, result: Any, expected: ResultType) -> None:
    def type_of(x: Any) -> ResultType:
        return TupleType(*map(type_of, x)) if isinstance(x, (tuple, list)) else TensorType(x.shape, x.dtype)

    found = type_of(result)
    if found != expected:
        raise TypeError(f"{block!r} gives {found!r}, but its output type is {expected!r}")


def _flatten(x: Any) -> list[Any]:
    if isinstance(x, tuple):
        return [z for y in x for z in _flatten(y)]
    return [x]


def _unflatten(t: ResultType, numbers: Any) -> Any:
    if isinstance(t, TupleType):
        return tuple([_unflatten(x, numbers) for x in t.items])
    return next(numbers)
