"""Where a value's elements would lie in memory: strides and offset, worked out only when the user's code asks.

In: a value of a recording. Out: a fake tensor laid out as eager's would be, from a run of the calls that the value
depends on, on fake tensors that have the strides of the instance's own.

    laid_out(recorder, h.view(2, 3).t()).stride()      # (1, 3)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fxbatch.errors import TraceError
from fxbatch.ir import CONSTANT_KINDS, Signature
from fxbatch.torch_private import FakeTensorMode
from fxbatch.trace.operations import Attribute, on_views, take_row
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import tracing
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import Value


def laid_out(recorder: RecordedCalls, v: Value) -> torch.Tensor:
    """A fake tensor with the strides and the storage offset that v would have.

    Raises TraceError where they can't be told: after writes in place, and where a function of ours stands in for
    torch's.
    """
    calls = _Calls(recorder)
    constants = {c._value - recorder.base: t for c, t, _ in recorder.constants.values()}
    wanted = v._value - recorder.base
    with tracing(None), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made: dict[int, torch.Tensor] = {}
        for call in calls.before(wanted):
            s, inputs, outputs = calls[call]
            if any(o + recorder.base in recorder.rewritten for o in outputs):
                raise _untold("it was written to in place")
            if s.operation.kind in CONSTANT_KINDS:
                given = constants.get(outputs[0])
                given = recorder.foreign.tensors.get(id(given), (given,))[0]
                t = s.outputs[0]
                made[outputs[0]] = (
                    torch.empty(t.shape, dtype=t.dtype, device=t.device)
                    if given is None
                    else mode.from_tensor(given.detach())
                )
                continue
            results = _run(recorder, s, inputs, [made[i] for i in inputs], mode)
            made.update(zip(outputs, results, strict=True))
        return made[wanted]


def _run(
    recorder: RecordedCalls, s: Signature, inputs: Sequence[int], fakes: list[torch.Tensor], mode: Any
) -> list[torch.Tensor]:
    target = s.operation.target
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


class _Calls:
    """The calls of a recording, of all phases, by number."""

    def __init__(self, recorder: RecordedCalls) -> None:
        table, phases = recorder.table, recorder.gradients.phases
        pending = np.array(recorder.inputs, dtype=np.int64) - recorder.base
        self.signatures = table.signatures
        self.sig = np.concatenate([*(sig for sig, _ in phases), np.array(recorder.sigs, dtype=np.int64)])
        self.inputs = np.concatenate([*(inputs for _, inputs in phases), pending])
        self.arity = table.arity()[self.sig]
        self.width = table.output_types()[1][self.sig]
        self.first_input = self.arity.cumsum() - self.arity
        self.first_output = self.width.cumsum() - self.width

    def __getitem__(self, call: int) -> tuple[Signature, list[int], list[int]]:
        at, first = int(self.first_input[call]), int(self.first_output[call])
        return (
            self.signatures[int(self.sig[call])],
            self.inputs[at : at + int(self.arity[call])].tolist(),
            list(range(first, first + int(self.width[call]))),
        )

    def before(self, value: int) -> Iterator[int]:
        """All calls that a value depends on, its own last."""
        found: set[int] = set()
        ahead = [value]
        while ahead:
            call = int(np.searchsorted(self.first_output, ahead.pop(), side="right")) - 1
            if call not in found:
                found.add(call)
                ahead.extend(self[call][1])
        return iter(sorted(found))
