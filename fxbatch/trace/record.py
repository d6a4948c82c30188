"""The recorder: how calls of the user's code on Values become recorded calls, and where a value would lie in memory.

In: torch functions, operators and indices that meet Values. Out: rows in the columns (`recorded_calls.py`), and Values.

    recorder = Recorder(table)
    recorder.call(torch.tanh, (value,), {})
    program = recorder.pending_program([])       # and marks its calls as run

Strides and offset are worked out only when the user asks: the calls that the value depends on run on fake tensors
that have the strides of the instance's own.

    laid_out(recorder, h.view(2, 3).t()).stride()      # (1, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import TraceError
from fxbatch.ir import CONSTANT_KINDS, Program, Signature
from fxbatch.torch_private import fake_mode, tree_flatten, tree_unflatten
from fxbatch.trace.arguments import take_parameter_row
from fxbatch.trace.calls import call_function
from fxbatch.trace.operations import Attribute, on_views, take_row
from fxbatch.trace.python_numbers import call_row
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import state, tracing
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import Value, with_values
from fxbatch.trace.writes import rebind


class Recorder(RecordedCalls):
    """Records the calls of one minibatch."""

    def call(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Record a call of a torch function."""
        if self.over and self.give is not None:
            return self._call_real(func, args, kwargs)
        if self.over or state.recorder is not self:
            raise TraceError(
                "a value of another minibatch (or of a finished call) was used: values live for one decorated call; "
                f"keep results instead{at_line()}"
            )
        if self.written:
            args, kwargs = with_values(args, kwargs)
        return call_function(self, func, args, kwargs)

    def _call_real(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """After a lazy block: the call on real tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        mine = [x for x in leaves if type(x) is Value and x._recorder is self]
        assert self.give is not None
        real = dict(zip(map(id, mine), self.give(mine), strict=True))
        args, kwargs = tree_unflatten([real.get(id(x), x) for x in leaves], spec)
        return func(*args, **kwargs)

    def row_of(self, v: Value, index: int) -> Any:
        """Record `v[index]`."""
        if self.over or state.recorder is not self:
            return self.call(torch.Tensor.__getitem__, (v, index), {})
        return call_row(self, v, index)

    def rebind(self, v: Value, new: Value, name: str) -> None:
        """Give v, and what shares its memory, the content of `new`."""
        rebind(self, v, new, name)

    def laid_out(self, v: Value) -> torch.Tensor:
        """A tensor with the strides that an eager tensor would have here, a fake one while the call goes on."""
        real = self.tensor(v)
        if real is not None:
            return real
        return laid_out(self, v)


def laid_out(recorder: RecordedCalls, v: Value) -> torch.Tensor:
    """A fake tensor with the strides and the storage offset that v would have.

    Raises TraceError where they can't be told: after writes in place, where a function of ours stands in for torch's,
    and where a recording that goes on has forgotten how a value came about.
    """
    program = _whole(recorder)
    constants = {c._value - recorder.base: t for c, t in recorder.constants.rows()}
    wanted = v._value - recorder.base
    with tracing(None), torch.no_grad(), fake_mode(allow_non_fake_inputs=True) as mode:
        tensors: dict[int, torch.Tensor] = {}
        for call in _before(program, wanted):
            s, inputs = program.signatures[program.sig[call]], _inputs(program, call)
            outputs = range(*program.first_value[call : call + 2].tolist())
            if any(o + recorder.base in recorder.rewritten for o in outputs):
                raise _untold("it was written to in place")
            if s.operation.kind in CONSTANT_KINDS:
                if outputs[0] < recorder.carried:
                    raise _untold("it was computed too long ago")
                payload = constants.get(outputs[0])
                t = s.outputs[0]
                tensors[outputs[0]] = (
                    torch.empty(t.shape, dtype=t.dtype, device=t.device)
                    if payload is None
                    else mode.from_tensor(payload.detach())
                )
                continue
            results = _run(recorder, s, inputs, [tensors[i] for i in inputs], mode)
            tensors.update(zip(outputs, results, strict=True))
        return tensors[wanted]


def _run(
    recorder: RecordedCalls, s: Signature, inputs: Sequence[int], fakes: list[torch.Tensor], mode: Any
) -> list[torch.Tensor]:
    target = s.operation.target
    if target is take_parameter_row and inputs[0] + recorder.base in recorder.number_of:
        base, leading = mode.from_tensor(s.shared[0].resolve().detach()), s.outputs[0].shape
        return [base.flatten(0, base.dim() - len(leading) - 1)[recorder.number_of[inputs[0] + recorder.base]]]
    if target is take_row and inputs[1] + recorder.base in recorder.number_of:
        return [fakes[0][recorder.number_of[inputs[1] + recorder.base]]]
    if getattr(target, "__module__", "").startswith("fxbatch.") and not (
        target is on_views or type(target) is Attribute
    ):
        raise _untold(f"{s.name} is recorded in another form")
    return s.run(fakes, [mode.from_tensor(o.resolve().detach()) for o in s.shared])


def _untold(reason: str) -> TraceError:
    return TraceError(
        f"where a value lies in memory can't be told: {reason}; contiguous(), reshape() or clone() need not know "
        f"it{at_line()}"
    )


def _whole(recorder: RecordedCalls) -> Program:
    """The calls of a recording, of all phases."""
    phases = recorder.phases.columns
    pending = np.array(recorder.inputs, dtype=np.int64) - recorder.base
    sig = np.concatenate([*(sig for sig, _ in phases), np.array(recorder.sigs, dtype=np.int32)])
    inputs = np.concatenate([*(inputs for _, inputs in phases), pending])
    return Program(recorder.table.snapshot(), sig, inputs, np.zeros_like(sig), np.zeros(0, dtype=np.int64))


def _inputs(program: Program, call: int) -> list[int]:
    numbers: list[int] = program.inputs[slice(*program.input_offsets[call : call + 2])].tolist()
    return numbers


def _before(program: Program, value: int) -> list[int]:
    """All calls that a value depends on, its own last."""
    numbers: set[int] = set()
    ahead = [value]
    while ahead:
        call = int(program.call_of_value[ahead.pop()])
        if call not in numbers:
            numbers.add(call)
            ahead.extend(_inputs(program, call))
    return sorted(numbers)
