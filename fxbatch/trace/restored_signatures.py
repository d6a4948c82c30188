"""A described signature -> its id in a table: its call is recorded once more, in a scratch recording.

In: what a trace says of a signature, the model. Out: the id; StaleTraceError when the model has no such call any more.

    find_again(described, table, model)
"""

from __future__ import annotations

from typing import Any

import torch

from fxbatch.errors import StaleTraceError
from fxbatch.ir import Template
from fxbatch.trace.calls import call_function
from fxbatch.trace.marked import call_marked
from fxbatch.trace.modules import call_method, call_module
from fxbatch.trace.portable_signature import Described, Reference
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import entered_modes, tracing
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.user_line import user_line
from fxbatch.trace.values import Value


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
    if not scratch.sigs or table.signatures[scratch.sigs[-1]].outputs != s.outputs:
        raise StaleTraceError(f"{s} is no operation of this model any more{_at()}")
    return scratch.sigs[-1]


def _record_again(
    s: Described, scratch: Recorder, inputs: list[Value], model: torch.nn.Module | None
) -> None:
    assert s.arguments is not None
    leaves = tuple(x.resolve() if type(x) is Reference else x for x in s.arguments.leaves)
    shared: list[Any] = [None] * s.own
    for name in s.shared:
        assert model is not None
        shared.append(_attribute(model, name))
    filled: list[Any] = list(inputs)
    if s.lifted >= 0:
        filled[s.lifted] = s.number
    args, kwargs = Template(leaves, s.arguments.spec).fill(input=filled, shared=shared)
    if s.kind == "module":
        if model is None:
            raise StaleTraceError(f"{s}: a trace that uses modules needs the model")
        module = _attribute(model, str(s.target))
        if s.method is None:
            call_module(scratch, module, args, kwargs)
        else:
            method = getattr(type(module), s.method)
            call_method(scratch, getattr(method, "__wrapped__", method), (module, *args), kwargs)
        return
    assert isinstance(s.target, Reference)
    func = s.target.resolve()
    if s.name == "getitem" and s.lifted >= 0:
        args[0][s.number]
    elif s.marked:
        call_marked(scratch, func, args, kwargs)
    else:
        call_function(scratch, func, args, kwargs)


def _attribute(model: torch.nn.Module, name: str) -> Any:
    found: Any = model
    for part in name.split(".") if name else ():
        try:
            found = getattr(found, part)
        except AttributeError:
            raise StaleTraceError(f"the trace uses {name}, which the model has not") from None
    return found


def _at() -> str:
    line = user_line()
    return f" ({line})" if line else ""
