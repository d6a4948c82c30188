"""Python numbers that meet values: lifted to constants of shape [], so that they don't split batches.

In: `h * node.weight`, `h[node.index]`. Out: a call with the number as an input; where all calls turn out to have
the same number, `fixed_numbers` puts it back.

    call_lifted(recorder, torch.mul, (h, 0.5))   # mul(f32[3], f32[])

Floats that are arguments of a function (a slope, a probability, a bound) stay static, since few of them ever change.
Where one has had more than MANY_NUMBERS contents, the function runs call by call from then on, so that a schedule of
them builds nothing at each step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxbatch.ir import Operation, Slot, Template, TensorSpec
from fxbatch.trace.operations import FUNCTION, function_name, lifted_dtype, run_on_fakes, take_row
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.table import VARIED, Entry, Lifted, static_key
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import GETITEM, Value, View, new_value, refresh, row_later, row_written

MANY_NUMBERS = 4  # contents of a static float that operations are built for


def without_floats(key: object) -> tuple[object, tuple[object, ...]]:
    """The key of a call without the floats in it, and those floats."""
    floats: list[object] = []

    def strip(x: object) -> object:
        if type(x) is not tuple:
            return x
        if len(x) == 2 and x[0] is float:
            floats.append(x[1])
            return (float,)
        return tuple(map(strip, x))

    return strip(key), tuple(floats)


def call_lifted(recorder: RecordedCalls, func: Any, args: tuple[Any, ...]) -> object:
    """The call of a two-argument function with its Python number lifted; None when there is none to lift."""
    a, b = args
    if type(a) is Value and type(b) in (int, float):
        v, number, position = a, b, 1
    elif type(b) is Value and type(a) in (int, float):
        v, number, position = b, a, 0
    else:
        return None
    t = recorder.type_of(v)
    dtype = None if recorder.knowledge.autocast is None else lifted_dtype(func, t, number)
    if dtype is None:
        return None
    key = ("lifted", func, v._type, recorder.table.number(dtype, t.device).types[0], type(number), position)
    entry = recorder.knowledge.functions.get(key)
    uniform = recorder.table.uniform
    if entry is not None and recorder.watches_operands and uniform.get(entry.sid, VARIED) is not VARIED:
        if uniform[entry.sid] == static_key(number):  # the one that all have had
            fixed = recorder.table.lifted[entry.sid].fixed(number)
            result = recorder.emit(fixed, (refresh(v),))
            recorder.remember(func, args, {}, fixed)
            return result
        uniform[entry.sid] = VARIED
        recorder.knowledge.call_table.clear()  # calls with the number that it had in them are lifted again
    lifted = recorder.number(number, dtype, t.device)
    values = (v, lifted) if position == 1 else (lifted, v)
    if entry is None:
        make = functools.partial(_lifted_entry, recorder, key, func, func, values, position)
        entry = recorder.new_entry(key, make, _Pair(recorder, values), func)
    if entry.signature.sizes is None:
        recorder.lifted[entry.sid] = True
    refresh(v)
    if entry.signature.sizes is not None or uniform.get(entry.sid) is VARIED:  # each number is an input
        recorder.remember(func, args, {}, entry, any_number=True)
    return recorder.emit(entry, values)


@dataclass(frozen=True)
class _Pair:
    """The arguments of a lifted call, as calls with sizes of their own are looked for."""

    recorder: RecordedCalls
    values: tuple[Value, Value]
    shared: tuple[()] = ()

    def types(self) -> tuple[TensorSpec, ...]:
        return tuple(map(self.recorder.type_of, self.values))

    def template(self) -> Template:
        return _BOTH


_BOTH = Template.of(((Slot("input", 0), Slot("input", 1)), {}))


def call_row(recorder: RecordedCalls, v: Value, index: int) -> object:
    """`v[index]` for a Python int: the index is lifted, negative ones count from the end."""
    recorder.sync_modes()
    t = recorder.type_of(v)
    if not t.shape:
        raise IndexError(
            "invalid index of a 0-dim tensor. Use `tensor.item()` in Python to convert a 0-dim tensor to a number"
        )
    size = t.shape[0]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension 0 with size {size}{at_line()}")
    row = index + size if index < 0 else index
    row_call = recorder.row_calls.get((recorder.knowledge.mode, v._type))
    entry, _, numbers = _lift_rows(recorder, v) if row_call is None else row_call
    number = numbers.get(row)
    if number is None:
        number = numbers[row] = recorder.number(row, torch.int64, t.device)._value
    written = row_written(v, row)
    written = row_later(v, row, entry.types[0]) if written is None else written
    if written is not None:
        return written
    if not hasattr(v, "_rows"):
        refresh(v)
    recorder.lifted[entry.sid] = True
    kind = recorder.table.number(torch.int64, t.device).types[0]
    result = recorder.emit(entry, (v, new_value(recorder, number, kind, 0)))
    result._view = View(v, (GETITEM, (v, row), {}))
    return result


def _lift_rows(recorder: RecordedCalls, v: Value) -> tuple[Entry, int, dict[int, int]]:
    """For all rows of values of this type in a minibatch: the entry of `v[index]`, how many there are,
    and the numbers of the values that indices are (by the index, for all types of one device)."""
    t = recorder.type_of(v)
    lifted = recorder.number(0, torch.int64, t.device)
    key = ("lifted row", v._type, lifted._type)
    entry = recorder.knowledge.functions.get(key)
    if entry is None:
        make = functools.partial(_lifted_entry, recorder, key, take_row, GETITEM, (v, lifted), 1)
        entry = recorder.new_entry(key, make)
    numbers = recorder.index_numbers.setdefault(t.device, {})
    row_call = recorder.row_calls[recorder.knowledge.mode, v._type] = entry, t.shape[0], numbers
    return row_call


def _lifted_entry(
    recorder: RecordedCalls,
    key: tuple[object, ...],
    func: Callable[..., object],
    fixed_func: object,
    values: tuple[Value, Value],
    position: int,
) -> Entry:
    """The entry of a lifted call of this key; fixed_func: what is called with a number in its place."""
    table, functions = recorder.table, recorder.knowledge.functions
    types = [recorder.type_of(v) for v in values]
    outcome = run_on_fakes(
        lambda tensors, _: func(*tensors), types, (), grad=recorder.knowledge.grad, plain=True
    )
    name = function_name(fixed_func)
    entry = recorder.signed(Operation(name, "function", func, FUNCTION), types, (), _BOTH, outcome)

    def fixed(number: object) -> Entry:
        fixed_key = ("fixed", *key, static_key(number))
        with table.lock:
            fixed_entry = functions.get(fixed_key)
            if fixed_entry is None:
                args = (Slot("input", 0), number) if position == 1 else (number, Slot("input", 0))
                operation = table.operation(Operation(name, "function", fixed_func, FUNCTION))
                one, whole = (types[1 - position],), Template.of((args, {}))
                alone = replace(entry.signature, operation=operation, inputs=one, arguments=whole)
                fixed_entry = functions[fixed_key] = table.add(alone, outcome)
            return fixed_entry

    table.lifted[entry.sid] = Lifted(position, fixed)
    return entry
